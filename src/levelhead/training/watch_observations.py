"""What looks like a pathology in a watched run and raised no alarm, and which reason applies.

An alarm is a change for the worse (`alarm_rules`). Attention that is sharp, or the same in every
row, and raised none is an *observation*, for the first of these reasons that holds:

    it began so             there were too few readings before it to be a change
    too recent              fewer sampled steps than an alarm takes
    it came slowly          it never was below its earlier median by the rule's factor
    the logits              of entropy: the largest logit did not grow with it
    the loss gained by it   its level fell since

Two examples. A copying head is sharp from its first sampled step on. A head that sharpens over the
whole training comes slowly, for its median of the last readings moves along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from levelhead.training.alarm_rules import Thresholds
from levelhead.training.alarms import Alarm
from levelhead.training.watch_course import Course, Floats, Key, place_name

__all__ = ["Observation", "observation_sentences", "observations"]

_LEVEL = 32  # a level of the loss is the median of so many


@dataclass(frozen=True)
class Observation:
    """`name` is that of the alarm it is not; value: the last Reading; reason: why it is none."""

    name: str
    layer: str | None
    head: int | None
    value: float
    reason: str

    def __str__(self) -> str:
        return observation_sentences([self])[0]


_SAYS = {"entropy_collapse": "is sharp", "rank_collapse": "is the same in every row"}


def observations(
    course: Course, alarms: Sequence[Alarm], limits: Thresholds | None = None
) -> list[Observation]:
    """Observations at the last sampled step of each place.

    >>> from levelhead.base.records import Reading
    >>> course = Course(Reading("map_residual", 0.01, where={"layer": "a", "head": 0}, step=step)
    ...                 for step in (10, 20))
    >>> [found.reason for found in observations(course, [])]
    ['it began so']
    """
    limits = Thresholds() if limits is None else limits
    found = []
    for name, reading, level, fall, witness in (
        ("entropy_collapse", "attention_entropy_share", limits.entropy_level,
         limits.entropy_fall, "largest_logit"),
        ("rank_collapse", "map_residual", limits.rank_level, limits.rank_fall, ""),
    ):  # fmt: skip
        grid, other = course.grid(reading), course.grid(witness)
        alarmed = {(alarm.layer, alarm.head) for alarm in alarms if alarm.name == name}
        for key, row in zip(grid.places, grid.values, strict=True):
            layer, head = key[0] or None, key[1] if key[1] >= 0 else None
            seen = np.flatnonzero(np.isfinite(row))
            if not seen.size or row[seen[-1]] > level or (layer, head) in alarmed:
                continue
            reason = _reason(
                row[seen], grid.steps[seen], level, fall, limits,
                _at(other.steps, other.values, other.places, key, grid.steps[seen]), course,
            )  # fmt: skip
            found.append(Observation(name, layer, head, float(row[seen[-1]]), reason))
    return found


def _at(
    steps: Floats, values: Floats, places: Sequence[Key], key: Key, wanted: Floats
) -> Floats | None:
    """The row of a place at other steps, nan where it has none; None without such a place."""
    if key not in places:
        return None
    known = dict(zip(steps.tolist(), values[list(places).index(key)].tolist(), strict=True))
    return np.array([known.get(step, np.nan) for step in wanted.tolist()])


def _reason(
    values: Floats,
    steps: Floats,
    level: float,
    fall: float,
    limits: Thresholds,
    witness: Floats | None,
    course: Course,
) -> str:
    inside = np.flatnonzero(values > level)
    since = int(inside[-1]) + 1 if inside.size else 0
    if since < limits.least_history:
        return "it began so"
    count = len(values) - since
    if count < limits.persistence:
        many = "steps" if count > 1 else "step"
        return f"it is {count} sampled {many} old, and an alarm takes {limits.persistence}"
    before = slice(max(since - limits.window, 0), since)
    for at in range(since, len(values)):
        usual = np.median(values[max(at - limits.window, 0) : at])
        if usual >= level * limits.clear and values[at] <= usual / fall:
            break
    else:
        return "it came slowly"
    if witness is not None and np.isfinite(witness[before]).any():
        grown = witness[-1] / np.nanmedian(witness[before])
        if grown < limits.entropy_logit_rise:
            return "the largest logit did not grow with it"
    loss = course.grid("loss")
    if len(loss.places):
        earlier = loss.values[0][loss.steps < steps[since]][-_LEVEL:]
        now = loss.values[0][loss.steps >= steps[since]][-_LEVEL:]
        if earlier.size and now.size and np.median(now) < np.median(earlier):
            return "the loss gained by it"
    return "no alarm was raised for it"


def observation_sentences(found: Sequence[Observation]) -> list[str]:
    """One sentence for each name and reason, with a few of the places.

    >>> observation_sentences([Observation("rank_collapse", "a", 0, 0.01, "it began so")])
    ['Attention is the same in every row in a head 0: an observation, no alarm, since it began so.']
    """
    told = []
    order = sorted(found, key=lambda one: (one.name, one.reason))
    for (name, reason), group in groupby(order, key=lambda one: (one.name, one.reason)):
        same = list(group)
        places = [
            place_name(one.layer or "", -1 if one.head is None else one.head) for one in same[:3]
        ]
        more = f" and {len(same) - 3} more" if len(same) > 3 else ""
        told.append(
            f"Attention {_SAYS[name]} in {', '.join(places)}{more}: an observation, no alarm, "
            f"since {reason}."
        )
    return told
