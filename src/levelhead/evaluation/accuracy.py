"""Numbers that judge point forecasts and intervals.

Axes: truths and forecasts are `[..., n]` arrays of equal shape, intervals are a lower and an upper
array. Everything is computed in float64. `mase` is in units of the naive error, the others in the
units (or squared units) of the input.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from levelhead.base.errors import InputError

__all__ = ["coverage", "mae", "mase", "mse", "pinball", "seasonal_naive_scale", "width"]

FloatArray = NDArray[np.float64]


def mse(truth: ArrayLike, forecast: ArrayLike) -> float:
    """Mean squared error.

    >>> mse([1.0, 2.0], [1.0, 4.0])
    2.0
    """
    y, f = _pair(truth, forecast)
    return float(np.mean((y - f) ** 2))


def mae(truth: ArrayLike, forecast: ArrayLike) -> float:
    """Mean absolute error.

    >>> mae([1.0, 2.0], [1.0, 4.0])
    1.0
    """
    y, f = _pair(truth, forecast)
    return float(np.mean(np.abs(y - f)))


def seasonal_naive_scale(history: ArrayLike, season: int = 1) -> FloatArray:
    """Mean |x_t - x_{t-season}| of `history [..., T]`, `[...]`: the denominator of MASE.

    (Hyndman & Koehler 2006, eq. 3.) A history that repeats itself exactly gives 0.
    """
    x = np.asarray(history, dtype=np.float64)
    if not 1 <= season < x.shape[-1]:
        raise InputError(
            f"a season of {season} steps needs a history of more than {season} steps, "
            f"{x.shape[-1]} were given"
        )
    return np.asarray(np.mean(np.abs(x[..., season:] - x[..., :-season]), axis=-1))


def mase(truth: ArrayLike, forecast: ArrayLike, scale: float) -> float:
    """Mean absolute scaled error: MAE over `scale`; NaN where the scale is 0 (undefined).

    >>> mase([1.0, 2.0], [1.0, 4.0], scale=0.5)
    2.0
    """
    return mae(truth, forecast) / scale if scale > 0 else float("nan")


def pinball(truth: ArrayLike, quantile: ArrayLike, level: float) -> float:
    """Mean pinball loss of a forecast quantile: max(q (y - f), (q - 1)(y - f)).

    >>> pinball([2.0], [1.0], level=0.9)
    0.9
    """
    y, f = _pair(truth, quantile)
    difference = y - f
    return float(np.mean(np.maximum(level * difference, (level - 1.0) * difference)))


def coverage(truth: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> float:
    """Share of truths inside [lower, upper].

    >>> coverage([1.0, 5.0], [0.0, 0.0], [2.0, 2.0])
    0.5
    """
    y, low = _pair(truth, lower)
    _, high = _pair(truth, upper)
    return float(np.mean((low <= y) & (y <= high)))


def width(lower: ArrayLike, upper: ArrayLike) -> float:
    """Mean width of the intervals."""
    low, high = _pair(lower, upper)
    return float(np.mean(high - low))


def _pair(first: ArrayLike, second: ArrayLike) -> tuple[FloatArray, FloatArray]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape:
        raise InputError(f"arrays of equal shape are needed, {a.shape} and {b.shape} were given")
    if a.size == 0:
        raise InputError("there is nothing to judge: the arrays are empty")
    return a, b
