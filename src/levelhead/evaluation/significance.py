"""Whether a difference is more than chance: over test windows, over seeds, over many comparisons.

Axes: losses of two models on the same windows in order of time are `[n]` arrays; a difference is
the first minus the second, so that below zero the first is better. Windows that overlap or follow
one another are not independent: blocks of neighbours are drawn together.
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
    "paired_seeds",
    "poisson_rate",
]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """A mean difference, its interval, and how surprising it is if there is none.

    Args:
        difference: mean of the first losses minus the second.
        low, high: interval at `level`.
        p_value: two-sided.
        effect: difference over the deviation of what was averaged (Cohen's d of pairs for seeds).
        count: how many pairs.
    """

    difference: float
    low: float
    high: float
    p_value: float
    effect: float
    count: int
    level: float = 0.95


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


def block_bootstrap(
    first: ArrayLike,
    second: ArrayLike,
    *,
    block: int,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Circular block bootstrap of the mean difference (Politis & Romano 1992).

    `block` is the number of neighbouring windows drawn together: at least the horizon where windows
    follow one another step by step. The interval is of percentiles; the p-value is twice the
    smaller share of draws on one side of zero, at least 1/draws.

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
    first: ArrayLike, second: ArrayLike, *, lags: int, level: float = 0.95
) -> Comparison:
    """Diebold & Mariano (1995) with Bartlett weights over `lags`, small samples as Harvey et al.

    `lags` is the horizon minus one where windows follow one another step by step; the weights
    (Newey & West 1987) keep the variance positive. Student's t with n - 1 degrees of freedom and
    the correction of Harvey, Leybourne & Newbold (1997, eq. 9).

    >>> found = diebold_mariano([1.0, 3.0, 2.0, 4.0], [0.5, 2.0, 2.5, 3.0], lags=0)
    >>> round(found.difference, 3), found.count
    (0.5, 4)
    """
    d = _difference(first, second, 3)
    n = len(d)
    if not is_whole(lags, 0) or lags >= n:
        raise InputError(f"lags {lags!r} was given: a whole number from 0 to {n - 1} is expected")
    mean = float(d.mean())
    centred = d - mean
    variance = float(centred @ centred) / n
    for lag in range(1, lags + 1):
        weight = 1 - lag / (lags + 1)
        variance += 2 * weight * float(centred[lag:] @ centred[:-lag]) / n
    steps = lags + 1
    shrink = max((n + 1 - 2 * steps + steps * (steps - 1) / n) / n, 1 / n)
    error = math.sqrt(variance / n / shrink)
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    p = float(2 * stats.t.sf(abs(t), n - 1))
    spread = float(d.std(ddof=1))
    return Comparison(
        mean, mean - half, mean + half, p, mean / spread if spread else math.nan, n, level
    )


def paired_seeds(first: ArrayLike, second: ArrayLike, *, level: float = 0.95) -> Comparison:
    """Student's paired t over seeds: two models trained with the same seeds.

    >>> found = paired_seeds([1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    >>> round(found.difference, 4), round(found.p_value, 4)
    (0.6667, 0.0572)
    """
    d = _difference(first, second, 2)
    mean, spread = float(d.mean()), float(d.std(ddof=1))
    error = spread / math.sqrt(len(d))
    half = float(stats.t.ppf((1 + level) / 2, len(d) - 1)) * error
    t = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    p = float(2 * stats.t.sf(abs(t), len(d) - 1))
    effect = mean / spread if spread else math.nan
    return Comparison(mean, mean - half, mean + half, p, effect, len(d), level)


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
