"""What the training loss was like around a step, and whether that speaks of harm.

The loss is scalar, one value a training step, in the order of the steps. Everything here keeps a
bounded number of values, however long the run: the last `RECENT` losses, and one `LossState` for
each of the last sampled steps. Differences of the loss are judged against the noise of single
losses and against its *scale*: the geometric mean of the present level and of the range learned so
far (loss at the start minus the best level), but at least a hundredth of that range. The range
alone would make light of everything after a first loss of 500 has come down to 1; the level alone
would make much of everything once it is 1e-5.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from levelhead.training.alarm_rules import Thresholds

__all__ = ["RECENT", "LossState", "LossTrack", "harm", "loss_gained", "swing"]

RECENT = 64
# A level is the median of at most this many losses, and of at least `_FEWEST`.
_LEVEL, _FEWEST = 32, 8
# Standard deviation of a normal variable over its median absolute value.
_MAD = 1.4826
# Standard error of a median over that of a mean.
_MEDIAN = 1.2533
# States kept to see whether the loss was falling before something happened.
_STATES = 8


@dataclass(frozen=True, kw_only=True)
class LossState:
    """The loss as it stood at one sampled step; all but `count` in the unit of the loss.

    level: median of the losses just before `step`; error: standard error of that median; noise:
    standard deviation of one loss around its course; peak: largest loss since the sampled step
    before; scale: see the top of the module; fallen: how
    much lower the level is than `_STATES` sampled steps earlier; finite: whether half of the
    last losses were; validation, best_validation: the last and the smallest validation loss, and
    validated: the step of the last one.
    """

    step: int
    level: float
    error: float
    noise: float
    peak: float
    scale: float
    fallen: float
    reach: int
    swing: float
    finite: bool
    validation: float = math.nan
    best_validation: float = math.nan
    validated: int = -1


def swing(losses: Sequence[float]) -> float:
    """How much a loss swings from step to step: the larger median of |second differences|.

    Second differences at distances of 1 and of 4 steps, divided by 4, so that a loss which jumps
    up and down by ±a gives a; a straight course gives 0, and so does a single spike. nan for less
    than 9 losses.

    >>> swing([0.5 + 0.125 * (-1) ** step for step in range(64)])
    0.125
    >>> swing([1.0] * 30 + [9.0] + [1.0] * 30)
    0.0
    """
    if len(losses) < 9:
        return math.nan
    found = []
    for lag in (1, 4):
        inner = range(lag, len(losses) - lag)
        found.append(
            median(abs(losses[i + lag] - 2 * losses[i] + losses[i - lag]) for i in inner) / 4
        )
    return max(found)


class LossTrack:
    """The losses of one run as they come; `close(step)` sums them up at a sampled step."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._states: deque[LossState] = deque(maxlen=_STATES)
        self._new = 0
        self._bad = 0
        self._peak = -math.inf
        self._start = math.nan
        self._best = math.inf
        self._validation = self._best_validation = math.nan
        self._validated = -1
        self._step = -1

    def add(self, step: int, loss: float) -> None:
        """Take the loss of one step; a step that was seen already is a restart from before it."""
        if step <= self._step:
            self._recent.clear()
            self._states.clear()
            self._new = self._bad = 0
        self._step = step
        self._new += 1
        if math.isfinite(loss):
            self._recent.append(loss)
            self._peak = max(self._peak, loss)
        else:
            self._bad += 1

    def validate(self, step: int, loss: float) -> None:
        """Take a validation loss; one that is not finite is passed over."""
        if math.isfinite(loss):
            self._validation, self._validated = loss, step
            best = self._best_validation
            self._best_validation = loss if math.isnan(best) else min(best, loss)

    def close(self, step: int) -> LossState | None:
        """The state at `step`: None before `_FEWEST` losses, the last state if no loss is new."""
        if not self._new:
            return self._states[-1] if self._states else None
        finite = self._bad < max(1, self._new / 2)
        losses = list(self._recent)
        if len(losses) < _FEWEST:
            return None if finite or not self._states else self._lost(step)
        used = losses[-min(max(self._new - self._bad, _FEWEST), _LEVEL) :]
        noise = _noise(losses)
        level = median(used)
        if math.isnan(self._start):
            self._start = median(losses[:_FEWEST])
        self._best = min(self._best, level)
        learned = max(self._start - self._best, 1e-3 * abs(self._start), 1e-300)
        earlier = self._states[0] if self._states else None
        state = LossState(
            step=step,
            level=level,
            error=_MEDIAN * noise / math.sqrt(len(used)),
            noise=noise,
            peak=self._peak,
            scale=max(math.sqrt(learned * abs(level)), 0.01 * learned),
            fallen=0.0 if earlier is None else earlier.level - level,
            reach=step if earlier is None else earlier.step,
            swing=swing(losses),
            finite=finite,
            validation=self._validation,
            best_validation=self._best_validation,
            validated=self._validated,
        )
        self._states.append(state)
        self._new = self._bad = 0
        self._peak = -math.inf
        return state

    def _lost(self, step: int) -> LossState:
        last = self._states[-1]
        return LossState(**{**vars(last), "step": step, "finite": False})


def loss_gained(
    before: LossState, now: LossState, limits: Thresholds, share: float | None = None
) -> bool:
    """Whether the loss went down between two states by more than noise and a share of its scale.

    The share is `limits.loss_gain`, unless another one is given.
    """
    error = math.hypot(before.error, now.error)
    least = limits.loss_gain if share is None else share
    return before.level - now.level > max(least * now.scale, limits.loss_z * error)


def harm(before: LossState, now: LossState, since: int, peak: float, limits: Thresholds) -> str:
    """What in the loss speaks of harm after `since`; empty if nothing does.

    `before` is the state when the evidence began, `now` the present one, `peak` the largest loss
    since. In this order: the loss is not finite, it rose for good, it spiked, it had been falling
    and stands still, or the validation loss rose while the training loss did not.
    """
    if not now.finite:
        return f"the loss is no longer finite (it was {before.level:.4g} at step {before.step})"
    error = math.hypot(before.error, now.error)
    risen = now.level - before.level
    if risen > max(limits.harm_rise * now.scale, limits.harm_z * error):
        return (
            f"the loss rose from {before.level:.4g} (step {before.step}) "
            f"to {now.level:.4g} (step {now.step})"
        )
    usual = limits.spike_z * max(before.noise, 1e-300)
    if peak - before.level > max(limits.harm_spike * now.scale, usual):
        return f"the loss spiked to {peak:.4g} from {before.level:.4g} (step {before.step})"
    worth = max(limits.loss_gain * now.scale, limits.harm_z * error)
    # Only the stretch right after it counts: in the long run every loss stands still.
    soon = since <= now.reach <= since + (now.step - now.reach) / 4
    stands = soon and now.fallen < before.fallen / 8
    if stands and before.fallen > worth and risen > -worth:
        return (
            f"the loss stands still at {now.level:.4g} since step {before.step}, "
            f"after falling by {before.fallen:.4g} just before"
        )
    gap = now.validation - now.best_validation
    if now.validated > since and risen <= 0 and gap > limits.harm_gap * abs(now.best_validation):
        return (
            f"the validation loss rose from {now.best_validation:.4g} to {now.validation:.4g} "
            "while the training loss did not"
        )
    return ""


def _noise(losses: Sequence[float]) -> float:
    """Standard deviation of single losses around their course, from first differences."""
    steps = [abs(b - a) for a, b in pairwise(losses)]
    return _MAD * median(steps) / math.sqrt(2) if steps else 0.0
