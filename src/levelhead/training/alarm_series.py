"""One reading in one place under one rule: what is usual, when it left, whether that is an alarm.

A `Series` is fed at sampled steps, in order. While its value is where it should be, the value joins
the history (at most `window` long), whose median is what is usual. The first value beyond the
threshold begins a *streak*, during which the history stands still; it ends when a value is back by
the factor `clear`. A streak of `persistence` values is evidence, one of more than `window` values
that raised no alarm is the new usual.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from levelhead.training.alarm_loss import LossState, harm, loss_gained
from levelhead.training.alarm_rules import Rule, Thresholds

__all__ = ["Evidence", "Sample", "Series"]

_MAD = 1.4826
# What spoils the loss while a value is on its way out must not make the rest look like a gain: the
# loss is compared with its best level at so many sampled steps before.
_BEST = 8


class Sample(NamedTuple):
    """The value at one sampled step, that of the witness (nan: none), and the loss then."""

    step: int
    value: float
    witness: float
    loss: LossState | None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What speaks for an alarm: since when, value, threshold, a sentence, and the harm if any."""

    since: int
    value: float
    threshold: float
    says: str
    harm: str


@dataclass(kw_only=True)
class _Streak:
    """Values beyond the threshold, one after the other.

    usual and usual_witness: medians before it; before: the loss when the value left; best: the best
    loss shortly before that; peak: the largest loss since; worst: the value farthest away; count:
    its values; back: values in a row that were back far enough.
    """

    since: int
    usual: float
    usual_witness: float
    threshold: float
    before: LossState | None
    best: LossState | None
    peak: float = -math.inf
    worst: float = math.nan
    count: int = 0
    back: int = 0
    raised: Evidence | None = None


class Series:
    """The state of one rule in one place; see the top of the module.

    >>> from levelhead.training.alarm_rules import rules
    >>> rule = rules(Thresholds())[-2]
    >>> series = Series(rule, Thresholds())
    >>> for step, logit in enumerate([5, 5, 5, 5, 150, 160, 170]):
    ...     evidence = series.judge(Sample(step, logit, float("nan"), None))
    >>> evidence.since, evidence.says
    (4, 'largest |logit| 170, above 100, was 5')
    """

    def __init__(self, rule: Rule, limits: Thresholds) -> None:
        self.rule = rule
        self.limits = limits
        self._history: deque[Sample] = deque(maxlen=limits.window)
        self._streak: _Streak | None = None
        self._last = -1

    @property
    def open(self) -> bool:
        """Whether an alarm was raised and has not cleared."""
        return self._streak is not None and self._streak.raised is not None

    def judge(self, now: Sample) -> Evidence | None:
        """Take the sample of one more step; evidence if an alarm is raised, or turns harmful.

        A step that comes again is passed over; one earlier than the last begins the series anew,
        but for an alarm that is open.
        """
        if now.step == self._last:
            return None
        if now.step < self._last:
            self._history.clear()
            self._streak = self._streak if self.open else None
        self._last = now.step
        streak = self._streak = self._streak or self._leaving(now)
        if streak is None:
            self._history.append(now)
            return None
        if now.loss is not None:
            streak.peak = max(streak.peak, now.loss.peak)
        if streak.raised is not None:
            return self._follow(streak, streak.raised, now)
        streak.count += 1
        if math.isnan(streak.worst) or self.rule.beyond(now.value, streak.worst):
            streak.worst = now.value
        for_long = streak.count > self.limits.window
        if for_long or not self.rule.beyond(now.value, self._clear_at(streak)):
            self._end(now, forget=for_long)
        elif streak.count >= self.rule.persistence and not self._excused(streak, now):
            streak.raised = Evidence(
                since=streak.since,
                value=streak.worst,
                threshold=streak.threshold,
                says=self._says(streak, now),
                harm=self._harm(streak, now),
            )
            return streak.raised
        return None

    def _leaving(self, now: Sample) -> _Streak | None:
        """A streak that begins with this value, or None while it is where it should be."""
        rule, limits = self.rule, self.limits
        if not rule.beyond(now.value, rule.level):
            return None  # the threshold is never less strict than the level
        earlier = [past.value for past in self._history if 0 < past.value < math.inf]
        if len(earlier) < limits.least_history:
            if not (rule.alone and rule.hard is not None and rule.beyond(now.value, rule.hard)):
                return None
            return _Streak(
                since=now.step,
                usual=math.nan,
                usual_witness=math.nan,
                threshold=rule.hard,
                before=now.loss,
                best=now.loss,
            )
        usual = _crest(earlier) if rule.crest else median(earlier)
        logs = [abs(math.log(past / usual)) for past in earlier]
        spread = 0.0 if rule.crest else limits.spread * _MAD * median(logs)
        moved = _moved(usual, rule, spread)
        threshold = max(rule.level, moved) if rule.up else min(rule.level, moved)
        right = (
            usual * limits.clear <= rule.level if rule.up else usual >= rule.level * limits.clear
        )
        if not rule.beyond(now.value, threshold) or (rule.margin and not right):
            return None
        since, before, best = self._left(now, threshold)
        witnesses = [past.witness for past in self._history if not math.isnan(past.witness)]
        return _Streak(
            since=since,
            usual=usual,
            usual_witness=median(witnesses) if witnesses else math.nan,
            threshold=threshold,
            before=before,
            best=best,
        )

    def _left(
        self, now: Sample, threshold: float
    ) -> tuple[int, LossState | None, LossState | None]:
        """The first step after the last value short of the threshold by half of the rule's factor
        (in logs), the loss before that step, and the best loss of the last states before it.
        """
        half = math.sqrt(self.rule.change)
        middle = threshold / half if self.rule.up else threshold * half
        since, history = now.step, list(self._history)
        while len(history) > 1 and self.rule.beyond(history[-1].value, middle):
            since = history.pop().step
        losses = [past.loss for past in history[-_BEST:] if past.loss is not None]
        best = min(losses, key=lambda loss: loss.level, default=None)
        return since, history[-1].loss, best

    def _excused(self, streak: _Streak, now: Sample) -> bool:
        """Whether the witness denies it, or the loss gained by it where the rule asks for that."""
        rule = self.rule
        if rule.hard is not None and rule.beyond(now.value, rule.hard):
            return False
        if now.witness < rule.witness_rise * streak.usual_witness:  # False for nan
            return True
        if not rule.asks or streak.best is None or now.loss is None:
            return False
        return loss_gained(streak.best, now.loss, self.limits, rule.gain)

    def _follow(self, streak: _Streak, raised: Evidence, now: Sample) -> Evidence | None:
        """An alarm that is open: it may clear, or turn harmful."""
        streak.back = 0 if self.rule.beyond(now.value, self._clear_at(streak)) else streak.back + 1
        if streak.back >= self.rule.persistence:
            self._end(now, forget=True)
        elif not raised.harm and (suffers := self._harm(streak, now)):
            streak.raised = replace(raised, harm=suffers)
            return streak.raised
        return None

    def _clear_at(self, streak: _Streak) -> float:
        """Back beyond this a value is where it should be."""
        clear = self.limits.clear
        return streak.threshold / clear if self.rule.up else streak.threshold * clear

    def _end(self, now: Sample, *, forget: bool) -> None:
        self._streak = None
        if forget:
            self._history.clear()
        self._history.append(now)

    def _harm(self, streak: _Streak, now: Sample) -> str:
        if streak.before is None or now.loss is None:
            return ""
        return harm(streak.before, now.loss, streak.since, streak.peak, self.limits)

    def _says(self, streak: _Streak, now: Sample) -> str:
        rule = self.rule
        side = "above" if rule.up else "below"
        says = f"{rule.what} {streak.worst:.3g}, {side} {streak.threshold:.3g}"
        if not math.isnan(streak.usual):
            says += f", was {streak.usual:.3g}"
        if not math.isnan(now.witness + streak.usual_witness):
            witness = rule.witness.replace("_", " ")
            says += f"; {witness} {now.witness:.3g}, was {streak.usual_witness:.3g}"
        if rule.asks and streak.before is not None and now.loss is not None:
            says += f"; loss {now.loss.level:.3g}, was {streak.before.level:.3g}"
        return says


def _crest(values: list[float]) -> float:
    """The upper quartile, or the next value above it."""
    return sorted(values)[math.ceil(0.75 * (len(values) - 1))]


def _moved(usual: float, rule: Rule, spread: float) -> float:
    """How far a value must be away from what is usual: by the factor and by `spread`, in logs.

    A spread asks for no more than the hard limit: after a wild history a coherence of 1 is one.
    """
    away = math.exp(min(max(math.log(rule.change), spread), 50.0))
    if not rule.up:
        least = usual / rule.change
        return usual / away if rule.hard is None else max(usual / away, min(least, rule.hard))
    least = usual * rule.change
    return usual * away if rule.hard is None else min(usual * away, max(least, rule.hard))
