"""Whether a difference is more than chance: over test windows, over seeds, over many comparisons.

Axes: losses of two models on the same windows in order of time are `[n]` arrays; a difference is
the first minus the second, so that below zero the first is better. Windows of H steps that follow
one another step by step overlap, so that neighbours are far from independent.

How often the tests of this file reject at a nominal 5 % where nothing is there, in 2000 draws (the
bootstrap: 400) with H = 96, white errors by step, and a window's loss the mean over its H steps:

    windows over H                          5     7.6    10     15     28
    paired_blocks, blocks of 2H             -      -     6 %    7 %    7 %
    diebold_mariano                        6 %    5 %    6 %    6 %    6 %
    block_bootstrap, blocks of H          24 %   22 %     -    18 %   16 %

Errors that depend on one another for longer than H steps are rejected more often by all of them.
An effect and its interval say more than a p-value: they are to be shown first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError

__all__ = [
    "Comparison",
    "block_bootstrap",
    "clopper_pearson",
    "diebold_mariano",
    "holm",
    "paired_blocks",
    "paired_seeds",
    "poisson_rate",
]

FloatArray = NDArray[np.float64]
LEAST_BLOCKS = 5
"""With fewer blocks `paired_blocks` does not judge."""


@dataclass(frozen=True)
class Comparison:
    """A mean difference, its interval, and how surprising it is if there is none.

    Args:
        difference: mean of the first losses minus the second.
        low, high: interval at `level`; nan where nothing can be judged.
        p_value: two-sided; nan where nothing can be judged.
        effect: difference over the deviation of what was averaged (Cohen's d of pairs for seeds, of
            means over blocks for blocks); nan where that deviation is zero.
        count: how many pairs (windows, blocks or seeds).
    """

    difference: float
    low: float
    high: float
    p_value: float
    effect: float
    count: int
    level: float = 0.95

    @property
    def judged(self) -> bool:
        """Whether there is a p-value."""
        return not math.isnan(self.p_value)


def _difference(first: ArrayLike, second: ArrayLike, least: int) -> FloatArray:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or len(a) < least:
        raise InputError(
            f"losses of shapes {list(a.shape)} and {list(b.shape)} were given: two lists of the "
            f"same length, at least {least}, are expected"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise InputError("losses that are not finite were given: leave such windows out of both")
    return a - b


def _student(
    mean: float, error: float, freedom: int, effect: float, count: int, level: float
) -> Comparison:
    """Student's t of a mean with that standard error.

    A deviation of zero about a mean that is not zero says nothing of chance: no p, no interval.
    """
    if error == 0 and mean != 0:
        return Comparison(mean, math.nan, math.nan, math.nan, math.nan, count, level)
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, freedom)) if error else 1.0
    return Comparison(mean, mean - half, mean + half, p, effect, count, level)


def _deviation(values: FloatArray, first: ArrayLike, second: ArrayLike) -> float:
    """Deviation of differences; zero where it is no more than rounding of what was subtracted."""
    spread = float(values.std(ddof=1))
    size = max(float(np.abs(np.asarray(side, dtype=np.float64)).max()) for side in (first, second))
    return spread if spread > 4 * float(np.finfo(np.float64).eps) * size else 0.0


def paired_blocks(
    first: ArrayLike, second: ArrayLike, *, block: int, level: float = 0.95
) -> Comparison:
    """Student's paired t over means of blocks that share no window (Ibragimov & Müller 2010).

    The `n` windows are cut into as many equal runs (but for one window) of at least `block` as fit;
    `block` is twice the horizon where windows follow one another step by step. `difference` is the
    mean over windows, `count` the number of runs. With fewer than five, and where all runs have one
    mean that is not zero, nothing is judged: p-value and interval are nan. How often it rejects
    stands at the top of this file.

    Raises InputError for losses that are not two finite lists of one length, and for a `block` that
    is no whole number of at least one.

    >>> found = paired_blocks(np.arange(12.0), np.full(12, 5.0), block=2)
    >>> round(found.difference, 3), round(found.low, 3), round(found.high, 3), found.count
    (0.5, -3.427, 4.427, 6)
    """
    d = _difference(first, second, 2)
    if not is_whole(block):
        raise InputError(f"block {block!r} was given: a whole number of at least 1 is expected")
    count, mean = len(d) // block, float(d.mean())
    if count < LEAST_BLOCKS:
        return Comparison(mean, math.nan, math.nan, math.nan, math.nan, count, level)
    means = np.array([run.mean() for run in np.array_split(d, count)])
    spread = _deviation(means, first, second)
    effect = mean / spread if spread else math.nan
    return _student(mean, spread / math.sqrt(count), count - 1, effect, count, level)


def block_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    *,
    block: int,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Circular block bootstrap of the mean difference (Politis & Romano 1992), for description.

    With few blocks its interval is too narrow and its p-value too small, by far (see the top of
    this file); `paired_blocks` is what to judge by. `block` is the number of neighbouring windows
    drawn together: at least the horizon where windows follow one another step by step. The interval
    is of percentiles; the p-value is twice the smaller share of draws on one side of zero, at least
    1/draws.

    >>> found = block_bootstrap(np.zeros(50), np.ones(50), block=5)
    >>> found.difference, found.low, found.high
    (-1.0, -1.0, -1.0)
    """
    d = _difference(first, second, 2)
    n = len(d)
    if not is_whole(block) or block > n:
        raise InputError(f"block {block!r} was given: a whole number from 1 to {n} is expected")
    if not is_whole(draws, 100):
        raise InputError(f"draws {draws!r} was given: at least 100 are expected")
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((d, d[: block - 1])))))
    blocks = (sums[block:] - sums[:-block])[:n]
    count = math.ceil(n / block)
    starts = np.random.default_rng(seed).integers(n, size=(draws, count))
    means = blocks[starts].sum(axis=1) / (count * block)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    below = float(np.mean(means <= 0)), float(np.mean(means >= 0))
    p = min(1.0, max(2 * min(below), 1 / draws))
    spread = float(d.std(ddof=1))
    mean = float(d.mean())
    return Comparison(
        mean, float(low), float(high), p, mean / spread if spread else math.nan, n, level
    )


def diebold_mariano(
    first: ArrayLike, second: ArrayLike, *, horizon: int, level: float = 0.95
) -> Comparison:
    """Diebold & Mariano (1995) with fixed-smoothing critical values (Coroneo & Iacone 2020).

    The long-run variance is the mean of the first m = n / 4H ordinates of the periodogram of the
    differences (Daniell's weights), and the statistic is held against Student's t with 2m degrees
    of freedom. `horizon` H is how many windows that follow one another overlap, 1 for none. The
    spectrum of a mean over H steps is zero at frequency 1/H, so that a quarter of that is nearly
    flat. How often it rejects stands at the top of this file; with Bartlett's weights over H and
    the correction of Harvey, Leybourne & Newbold (1997) it is 12 to 14 %. Where all differences are
    one number that is not zero, p-value and interval are nan.

    Raises InputError for losses that are not two finite lists of one length of at least 4H.

    >>> found = diebold_mariano([1.0, 3.0, 2.0, 4.0], [0.5, 2.0, 2.5, 3.0], horizon=1)
    >>> round(found.difference, 3), found.count
    (0.5, 4)
    """
    d = _difference(first, second, 4)
    n = len(d)
    if not is_whole(horizon) or 4 * horizon > n:
        raise InputError(
            f"horizon {horizon!r} was given: a whole number from 1 to {n // 4}, a quarter of the "
            "windows, is expected"
        )
    ordinates = n // (4 * horizon)
    waves = np.fft.rfft(d - d.mean())[1 : ordinates + 1]
    error = math.sqrt(float(np.mean(np.abs(waves) ** 2))) / n
    mean, spread = float(d.mean()), _deviation(d, first, second)
    if error <= 4 * float(np.finfo(np.float64).eps) * spread:  # rounding of the transform
        error = 0.0
    effect = mean / spread if spread else math.nan
    return _student(mean, error if spread else 0.0, 2 * ordinates, effect, n, level)


def paired_seeds(first: ArrayLike, second: ArrayLike, *, level: float = 0.95) -> Comparison:
    """Student's paired t over seeds: two models trained with the same seeds.

    At least two pairs are expected. Where all pairs have one difference that is not zero there is
    no deviation to judge by: p-value, interval and effect are nan ("not judged"), and `difference`
    alone is told.

    Raises InputError for losses that are not two finite lists of one length of at least two.

    >>> found = paired_seeds([1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    >>> round(found.difference, 4), round(found.p_value, 4)
    (0.6667, 0.0572)
    >>> paired_seeds([2.0, 3.0], [1.0, 2.0]).judged
    False
    """
    d = _difference(first, second, 2)
    mean, spread = float(d.mean()), _deviation(d, first, second)
    effect = mean / spread if spread else math.nan
    return _student(mean, spread / math.sqrt(len(d)), len(d) - 1, effect, len(d), level)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for the number of comparisons (Holm 1979), by name.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'b': 0.06, 'c': 0.06}
    """
    for name, p in p_values.items():
        if not 0 <= p <= 1:
            raise InputError(f"the p-value of {name!r} is {p!r}: a number from 0 to 1 is expected")
    order = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    largest = 0.0
    for place, name in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - place) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def clopper_pearson(hits: int, tries: int, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a share, `hits` of `tries` (Clopper & Pearson 1934).

    >>> low, high = clopper_pearson(20, 20)
    >>> round(low, 4), high
    (0.8316, 1.0)
    """
    if not (is_whole(tries) and is_whole(hits, 0) and hits <= tries):
        raise InputError(f"{hits!r} hits of {tries!r} tries were given: 0 to all of at least one")
    tail = (1 - level) / 2
    low = float(stats.beta.ppf(tail, hits, tries - hits + 1)) if hits else 0.0
    high = float(stats.beta.isf(tail, hits + 1, tries - hits)) if hits < tries else 1.0
    return low, high


def poisson_rate(events: int, exposure: float, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a rate, `events` in `exposure` units (Garwood 1936).

    >>> low, high = poisson_rate(0, 75.0)
    >>> low, round(high, 4)
    (0.0, 0.0492)
    """
    if not is_whole(events, 0) or not exposure > 0:
        raise InputError(
            f"{events!r} events in {exposure!r} were given: a count, a size above zero"
        )
    tail = (1 - level) / 2
    low = float(stats.chi2.ppf(tail, 2 * events)) / 2 if events else 0.0
    return low / exposure, float(stats.chi2.isf(tail, 2 * events + 2)) / 2 / exposure
