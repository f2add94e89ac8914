"""Alarms: rules over Readings that name what goes wrong in training; no torch, nothing computed.

An alarm states a fact: since which step, in which layer and head, on which evidence. It is called
*harmful* only if the loss says so. The rules stand in `levelhead.training.alarm_rules`; here they
are applied to Readings as they come. A *sampled step* is a step with a Reading other than of
the loss; the rules are asked there and nowhere else. Order within a step does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

from levelhead.base.errors import InputError
from levelhead.base.records import Reading
from levelhead.training.alarm_loss import LossTrack
from levelhead.training.alarm_rules import ALARMS, CURES, Rule, Thresholds, rules
from levelhead.training.alarm_series import Sample, Series

__all__ = ["ALARMS", "Alarm", "Detector", "Thresholds", "detect", "sentences"]

_LOSSES = ("loss", "validation_loss")
# What says nothing of a sampled step: it is written between two of them as well.
_BETWEEN = ("loss_roughness", "finished")
_NORMS = ("ov_frobenius_norm", "ov_spectral_norm", "ov_nuclear_norm")

Place = tuple[str | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A fact about training: `name` is one of `ALARMS`, `step` when it was seen.

    since: the first sampled step away from the earlier value; layer, head: where, None for the
    whole run or layer; value: the farthest Reading since; threshold: what it is beyond; evidence: a
    sentence with the numbers; harmful and harm: what in the loss says so; cure: what usually helps.

    >>> alarm = Alarm(name="dead_head", step=90, since=60, layer="enc.0", head=2, value=0.01,
    ...               threshold=0.05, evidence="OV norm 0.01 of the other heads'", harmful=False,
    ...               harm="")
    >>> str(alarm)[:52]
    'Dead head in enc.0, head 2, since step 60: OV norm 0'
    >>> Alarm.from_reading(alarm.reading()) == alarm
    True
    """

    name: str
    step: int
    since: int
    layer: str | None = None
    head: int | None = None
    value: float
    threshold: float
    evidence: str
    harmful: bool
    harm: str
    unit: str = "1"

    @property
    def cure(self) -> str:
        """What usually helps, in words."""
        return CURES[self.name]

    @property
    def key(self) -> tuple[str, str | None, int | None, int]:
        """Name, layer, head and since: the same for an alarm and for its turn to harmful."""
        return self.name, self.layer, self.head, self.since

    def reading(self) -> Reading:
        """The alarm as a Reading named `alarm.<name>`, which a run can store."""
        where: dict[str, str | int] = {}
        if self.layer is not None:
            where["layer"] = self.layer
        if self.head is not None:
            where["head"] = self.head
        where |= {"since": self.since, "harmful": int(self.harmful)}
        where |= {"threshold": repr(self.threshold), "evidence": self.evidence, "harm": self.harm}
        return Reading(f"alarm.{self.name}", self.value, self.unit, where, self.step, "alarm")

    @classmethod
    def from_reading(cls, reading: Reading) -> Alarm:
        """The alarm that `reading` is of; raises `InputError` if it is of none."""
        name = reading.name.removeprefix("alarm.")
        where: Mapping[str, Any] = reading.where
        try:
            if name not in ALARMS or name == reading.name or reading.step is None:
                raise KeyError(reading.name)
            return cls(
                name=name,
                step=reading.step,
                since=int(where["since"]),
                layer=where.get("layer"),
                head=where.get("head"),
                value=reading.value,
                threshold=float(where.get("threshold", "nan")),
                evidence=str(where.get("evidence", "")),
                harmful=bool(where.get("harmful", 0)),
                harm=str(where.get("harm", "")),
                unit=reading.unit,
            )
        except (KeyError, ValueError) as error:
            raise InputError(
                f"The Reading {reading.name!r} of step {reading.step} is no alarm: one named "
                f"alarm.<name> with a step and 'since' is expected, <name> of {', '.join(ALARMS)}."
            ) from error

    def __str__(self) -> str:
        return (
            f"{_title(self.name)}{_place(self.layer, [self.head])}, since step {self.since}: "
            f"{self.evidence}. {_verdict(self)} Usual cure: {self.cure}."
        )


@dataclass
class _Group:
    """The Readings of one step by name and place; of repeated ones the last counts."""

    losses: dict[str, float] = field(default_factory=dict)
    values: dict[str, dict[Place, float]] = field(default_factory=dict)
    sampled: bool = False

    def add(self, reading: Reading) -> None:
        if reading.name in _LOSSES and not reading.where:
            self.losses[reading.name] = reading.value
            return
        if reading.name in _BETWEEN:
            return
        self.sampled = True
        layer, head = reading.where.get("layer"), reading.where.get("head")
        if reading.where.keys() <= {"layer", "head"} and not isinstance(head, str):
            place = (None if layer is None else str(layer), head)
            self.values.setdefault(reading.name, {})[place] = reading.value


class Detector:
    """Applies the rules to Readings as they come; its memory does not grow with the run.

    >>> from levelhead.base.records import Reading
    >>> where = {"layer": "enc.0", "head": 1}
    >>> detector = Detector()
    >>> for step in range(10, 200, 10):
    ...     logit = 5.0 if step < 100 else 5.0 * 2 ** (step / 10 - 10)
    ...     for alarm in detector.update([Reading("largest_logit", logit, where=where, step=step)]):
    ...         print(alarm.name, alarm.step, alarm.since, alarm.head)
    exploding_logits 170 140 1
    """

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = Thresholds() if thresholds is None else thresholds
        self._rules = rules(self.thresholds)
        self._loss = LossTrack()
        self._series: dict[tuple[str, Place], Series] = {}
        self._alarms: dict[tuple[str, Place], Alarm] = {}

    @property
    def open(self) -> list[Alarm]:
        """The alarms that were raised and have not cleared, in order of names and places."""
        return sorted(
            (alarm for at, alarm in self._alarms.items() if self._series[at].open), key=_order
        )

    def update(self, readings: Iterable[Reading]) -> list[Alarm]:
        """Take more Readings, in any order, and return the alarms they raise, in order of steps.

        An alarm is returned when it is raised, and once more (with the same `key`) if the loss
        turns out to suffer; after it has cleared, a new one may be raised in the same place.
        Readings without a step, and those of alarms, are passed over. A series whose steps begin
        again earlier, as after a restart from a checkpoint, begins anew.
        """
        with_step = [r for r in readings if r.step is not None and not r.name.startswith("alarm.")]
        with_step.sort(key=lambda reading: reading.step or 0)
        found: list[Alarm] = []
        for step, same in groupby(with_step, key=lambda reading: reading.step or 0):
            group = _Group()
            for reading in same:
                group.add(reading)
            if "loss" in group.losses:
                self._loss.add(step, group.losses["loss"])
            if "validation_loss" in group.losses:
                self._loss.validate(step, group.losses["validation_loss"])
            if group.sampled:
                found += self._sampled(step, group.values)
        return found

    def _sampled(self, step: int, values: dict[str, dict[Place, float]]) -> list[Alarm]:
        loss = self._loss.close(step)
        derived: dict[str, dict[Place, float]] = {
            "coherence": _coherence(values),
            "ov_share": _shares(values),
            "swing": {} if loss is None else {(None, None): loss.swing / loss.scale},
        }
        found = []
        for rule in self._rules:
            read = derived.get(rule.reading) or values.get(rule.reading, {})
            witnesses = values.get(rule.witness, {})
            for place, value in read.items():
                if not math.isnan(value):
                    sample = Sample(step, value, witnesses.get(place, math.nan), loss)
                    found += self._judge(rule, place, sample)
        return sorted(found, key=_order)

    def _judge(self, rule: Rule, place: Place, sample: Sample) -> list[Alarm]:
        at = rule.name, place
        if at not in self._series:
            self._series[at] = Series(rule, self.thresholds)
        evidence = self._series[at].judge(sample)
        if evidence is None:
            return []
        layer, head = place
        self._alarms[at] = Alarm(
            name=rule.name,
            step=sample.step,
            since=evidence.since,
            layer=layer,
            head=head,
            value=evidence.value,
            threshold=evidence.threshold,
            evidence=evidence.says,
            harmful=bool(evidence.harm),
            harm=evidence.harm,
            unit=rule.unit,
        )
        return [self._alarms[at]]


def detect(readings: Iterable[Reading], thresholds: Thresholds | None = None) -> list[Alarm]:
    """The alarms in the Readings of a whole run: what a watched run would have raised.

    >>> detect([])
    []
    """
    return Detector(thresholds).update(readings)


def sentences(alarms: Iterable[Alarm]) -> list[str]:
    """One sentence for each name and layer, its heads together; of each key the last alarm.

    >>> sentences([])
    []
    """
    latest = {alarm.key: alarm for alarm in alarms}
    grouped: dict[tuple[str, str | None], list[Alarm]] = {}
    for alarm in sorted(latest.values(), key=_order):
        grouped.setdefault((alarm.name, alarm.layer), []).append(alarm)
    found = []
    for (name, layer), same in grouped.items():
        first = min(same, key=lambda alarm: alarm.since)
        worst = next((alarm for alarm in same if alarm.harmful), first)
        found.append(
            f"{_title(name)}{_place(layer, [alarm.head for alarm in same])}, since step "
            f"{first.since}: {worst.evidence}. {_verdict(worst)} Usual cure: {worst.cure}."
        )
    return found


# ── derived values ──


def _coherence(values: Mapping[str, Mapping[Place, float]]) -> dict[Place, float]:
    """The smaller one of QK and OV coherence of each layer: copies agree in both."""
    ov = values.get("ov_coherence", {})
    found = {}
    for place, qk in values.get("qk_coherence", {}).items():
        if place in ov and not math.isnan(qk) and not math.isnan(ov[place]):
            found[place] = min(qk, ov[place])
    return found


def _shares(values: Mapping[str, Mapping[Place, float]]) -> dict[Place, float]:
    """Each head's OV norm over the median of the other heads' in its layer."""
    norms = next((values[name] for name in _NORMS if name in values), {})
    layers: dict[str | None, dict[Place, float]] = {}
    for place, norm in norms.items():
        if place[1] is not None and math.isfinite(norm):
            layers.setdefault(place[0], {})[place] = norm
    found = {}
    for heads in layers.values():
        for place, norm in heads.items():
            others = [other for at, other in heads.items() if at != place]
            if others and (usual := median(others)) > 0:
                found[place] = norm / usual
    return found


# ── words ──


def _order(alarm: Alarm) -> tuple[int, str, int]:
    return ALARMS.index(alarm.name), alarm.layer or "", -1 if alarm.head is None else alarm.head


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _place(layer: str | None, heads: Iterable[int | None]) -> str:
    numbers = [head for head in heads if head is not None]
    which = f", head{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return ("" if layer is None else f" in {layer}") + (which if numbers else "")


def _verdict(alarm: Alarm) -> str:
    return f"Harmful: {alarm.harm}." if alarm.harmful else "The loss shows no harm so far."
