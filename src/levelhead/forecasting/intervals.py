"""Conformal intervals per channel and step, in units of the window's deviation.

Axes: scores are `[N, D, H]`: N calibration windows in order of time. A score is |y - ŷ| / s with s
the deviation of the window's context, so that an interval widens when a series becomes lively.

Split conformal prediction (Papadopoulos et al. 2002): the half width at coverage c is the
⌈(N+1)c⌉-th smallest score. For exchangeable windows the coverage would follow from the
count alone; windows of a series overlap and drift, so that here it is a calibrated estimate and
every backtest measures it.
The adaptive variant (Gibbs & Candès 2021, eq. 2) moves the level of each channel by
γ (c - share covered) as outcomes become known, and follows drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.errors import InputError

__all__ = [
    "AdaptiveLevels",
    "Conformal",
    "Scores",
    "adaptive_levels",
    "check_coverage",
    "last_levels",
]

FloatArray = NDArray[np.float64]
Scores = NDArray[np.floating[Any]]

_LEVELS = 400


@dataclass(frozen=True, eq=False)
class Conformal:
    """Empirical quantiles of the scores on a fixed grid of levels.

    `grid [Q, D, H]` holds the scores at levels 0 .. 1, `pooled [Q, H]` those of all channels
    together (for channels that were not calibrated), `count` the windows behind them.
    """

    grid: FloatArray
    pooled: FloatArray
    count: int

    @classmethod
    def fit(cls, scores: Scores) -> Conformal:
        """Quantiles of `scores [N, D, H]`, N ≥ 1.

        >>> c = Conformal.fit(np.arange(9.0).reshape(9, 1, 1))
        >>> c.half_width(0.8).shape, float(c.half_width(0.8)[0, 0])
        ((1, 1), 7.0)
        """
        if len(scores) == 0:
            raise InputError("there is no calibration window: give more rows, or a shorter horizon")
        joined = scores.reshape(-1, scores.shape[2])
        return cls(_quantiles(scores), _quantiles(joined), len(scores))

    def half_width(
        self, coverage: float, levels: FloatArray | None = None, *, pooled: bool = False
    ) -> FloatArray:
        """Half widths `[D, H]` (`[H]` if pooled) in units of the window's deviation.

        `levels [D]` replaces the coverage of each channel by an adapted level.
        """
        if pooled:
            return np.asarray(self.pooled[self._position(coverage)])
        channels = self.grid.shape[1]
        wanted = np.full(channels, coverage) if levels is None else levels
        return np.stack([self.grid[self._position(float(c)), d] for d, c in enumerate(wanted)])

    def supports(self, coverage: float) -> bool:
        """Whether so many windows have an error of the rank that this coverage needs."""
        return math.ceil((self.count + 1) * coverage - 1e-9) <= self.count

    def _position(self, level: float) -> int:
        """Place of the ⌈(N+1)c⌉-th smallest score, the largest if there are too few windows.

        Exact up to as many windows as the grid has steps, beyond that the next larger grid value.
        """
        rank = min(self.count, max(1, math.ceil((self.count + 1) * level - 1e-9)))
        return (rank - 1) * _LEVELS // self.count + 1


def _quantiles(scores: Scores) -> FloatArray:
    """The ⌈N q⌉-th smallest of `scores [N, ...]` for each level q of the grid, `[Q, ...]`."""
    ranks = -(-np.arange(_LEVELS + 1) * len(scores) // _LEVELS)
    return np.asarray(np.sort(scores, axis=0)[np.maximum(ranks, 1) - 1])


@dataclass
class AdaptiveLevels:
    """Level of each channel, moved by what came true; `levels [D]`."""

    coverage: float
    levels: FloatArray
    gamma: float

    @classmethod
    def start(cls, coverage: float, channels: int, stride: int) -> AdaptiveLevels:
        """γ grows with the rows between two windows: .005 per row, at most .05."""
        return cls(coverage, np.full(channels, coverage), min(0.05, 0.005 * stride))

    def update(self, covered: FloatArray) -> None:
        """Take in the share of steps covered per channel, `covered [D]`, of one finished window.

        A level may leave [0, 1]: it then stands for the smallest or the largest score, and its
        distance remembers how long the misses lasted. Clipping it would forget that.
        """
        self.levels = self.levels + self.gamma * (self.coverage - covered)


def adaptive_levels(
    conformal: Conformal, coverage: float, scores: Scores, *, stride: int, horizon: int
) -> Iterator[FloatArray]:
    """Levels `[D]` for each of the windows behind `scores [N, D, H]`, and on until all are known.

    Windows start `stride` rows apart. The outcome of a window is known `horizon` rows later, so
    window n sees the outcomes of windows up to n - ⌈horizon/stride⌉.
    """
    state = AdaptiveLevels.start(coverage, scores.shape[1], stride)
    delay = math.ceil(horizon / stride)
    used: list[FloatArray] = []
    for n in range(len(scores) + delay):
        done = n - delay
        if done >= 0:
            half = conformal.half_width(coverage, used[done])
            state.update((scores[done] <= half).mean(axis=1))
        used.append(state.levels.copy())
        yield used[-1]


def last_levels(
    conformal: Conformal, coverage: float, scores: Scores, *, horizon: int
) -> FloatArray:
    """Levels `[D]` after all the outcomes in `scores [N, D, H]`, windows one row apart."""
    *_, last = adaptive_levels(conformal, coverage, scores, stride=1, horizon=horizon)
    return last


def check_coverage(coverage: Sequence[float] | float) -> tuple[float, ...]:
    """Coverages as a sorted tuple of shares in (0, 1).

    >>> check_coverage([0.95, 0.8])
    (0.8, 0.95)
    """
    given: Any = [coverage] if isinstance(coverage, Real) else coverage
    try:
        values = tuple(float(v) for v in given)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"coverage must be one share or several, {coverage!r} was given: write 0.8 for 80 %"
        ) from error
    if not values:
        raise InputError("at least one coverage is needed, none was given: write 0.8 for 80 %")
    for value in values:
        if not 0 < value < 1:
            raise InputError(
                f"coverage must lie between 0 and 1, {value} was given: write 0.8 for 80 %"
            )
    return tuple(sorted({float(v) for v in values}))
