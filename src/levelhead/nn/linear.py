"""The straight line: one `[L, H]` matrix for all channels, solved in closed form.

Axes. A series is `[D, T]`, a window starts at step t and has width P = L + H. The line forecasts
`c + (x - c 1ᵀ) W` from the context x, where c is the window's last value (`centre="last"`) or its
mean (`"mean"`). It has no intercept; therefore it is exactly the linear head
`W + e_c (1 - 1ᵀW)` of a SAMformer with reversible normalisation (`line_as_head`).

Two examples. With W = 0 and centre "last" the forecast repeats the last value. With a single
column W = e_{L-1} and centre "mean" the forecast is the last value as well.

Least squares needs only the moments G = Σ zzᵀ and C = Σ zyᵀ over windows z = (x - c, y - c). The
raw second moments R_ij = Σ_t x_{t+i} x_{t+j} of all overlapping windows obey

    R_{i+1,j+1} = R_ij + x_{b+i} x_{b+j} - x_{a+i} x_{a+j}      (starts a .. b-1),

so that after the first row each entry costs 2D operations, whatever the number of windows, and
memory does not depend on it. Centring is linear in the window and is applied to R afterwards.
RevIN's weights 1/s² differ from window to window and break the recursion; there the moments are
streamed in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, eigh

from levelhead.base.errors import InputError

__all__ = [
    "Centre",
    "LinePath",
    "Moments",
    "lag_moments",
    "line_as_head",
    "moments",
    "pair_moments",
    "predict_line",
    "revin_moments",
    "solve_line",
]

FloatArray = NDArray[np.float64]
Centre = Literal["last", "mean"]

_CHUNK_ROWS = 1024


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments of centred windows: sufficient statistics of a line and of its error.

    `gram [L, L]` = Σ zzᵀ, `cross [L, H]` = Σ zyᵀ, `energy` = Σ ‖y‖², over `count` pairs of window
    and channel. They add up over disjoint sets of windows.
    """

    gram: FloatArray
    cross: FloatArray
    energy: float
    count: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.gram + other.gram,
            self.cross + other.cross,
            self.energy + other.energy,
            self.count + other.count,
        )

    def error(self, weights: FloatArray) -> float:
        """Mean squared error of `weights [L, H]` over these windows, per step."""
        explained = 2.0 * np.vdot(weights, self.cross) - np.vdot(weights, self.gram @ weights)
        return float((self.energy - explained) / (self.count * self.cross.shape[1]))


def lag_moments(series: FloatArray, width: int, start: int, stop: int) -> FloatArray:
    """R `[P, P]`, R_ij = Σ_d Σ_{t=start}^{stop-1} x_d[t+i] x_d[t+j], P = `width`; float64.

    Costs D·P·N for the first row and D·P² for the rest, N = stop - start. The error is relative to
    the largest entry: standardise first, or a large offset hides the deviation.

    >>> lag_moments(np.array([[1.0, 2.0, 3.0]]), 2, 0, 2)
    array([[ 5.,  8.],
           [ 8., 13.]])
    """
    _check_range(series, width, start, stop)
    raw = np.zeros((width, width))
    for channel in series:
        lagged = np.lib.stride_tricks.sliding_window_view(channel[start : stop - 1 + width], width)
        raw[0] += channel[start:stop] @ lagged
    leaving = series[:, start : start + width]
    entering = series[:, stop : stop + width - 1]
    for i in range(width - 1):
        raw[i + 1, i + 1 :] = (
            raw[i, i:-1] + entering[:, i] @ entering[:, i:] - leaving[:, i] @ leaving[:, i:-1]
        )
    for i in range(width - 1):  # in place: a second P x P array is 12 MB at P = 1232
        raw[i + 1 :, i] = raw[i, i + 1 :]
    return raw


def moments(
    series: FloatArray, context: int, horizon: int, start: int, stop: int, centre: Centre
) -> Moments:
    """Moments of the windows that start at start .. stop-1 of `series [D, T]` (float64)."""
    raw = lag_moments(series, context + horizon, start, stop)
    weights = _centre_weights(context, horizon, centre)
    # z = (I - 1 wᵀ) x, hence Σ zzᵀ = R - 1(Rw)ᵀ - (Rw)1ᵀ + (wᵀRw) 11ᵀ.
    by_centre = raw @ weights
    raw -= by_centre[:, None]
    raw -= by_centre[None, :]
    raw += weights @ by_centre
    return _split_moments(raw, context, (stop - start) * series.shape[0])


def revin_moments(
    series: FloatArray,
    context: int,
    horizon: int,
    start: int,
    stop: int,
    *,
    floor: float,
    every: int = 1,
) -> Moments:
    """Moments of windows that are centred by their mean and divided by their deviation.

    Targets are normalised with the context's statistics, as RevIN does: a least-squares problem in
    which each window weighs 1/(s² + floor). `floor` is in squared units of the series. With
    `every` = k only every k-th window is read. Streamed: memory is O(L (L + H)).
    """
    width = context + horizon
    _check_range(series, width, start, stop)
    gram_cross = np.zeros((context, width))
    energy, count = 0.0, 0
    for channel in series:
        view = np.lib.stride_tricks.sliding_window_view(channel, width)[start:stop:every]
        for i in range(0, len(view), _CHUNK_ROWS):
            rows = view[i : i + _CHUNK_ROWS]
            past = rows[:, :context]
            scale = np.sqrt(past.var(axis=1, keepdims=True) + floor)
            rows = (rows - past.mean(axis=1, keepdims=True)) / scale
            gram_cross += rows[:, :context].T @ rows
            energy += float(np.vdot(rows[:, context:], rows[:, context:]))
            count += len(rows)
    return Moments(gram_cross[:, :context], gram_cross[:, context:], energy, count)


def pair_moments(
    contexts: FloatArray, targets: FloatArray, centre: Centre | None, *, floor: float | None = None
) -> Moments:
    """Moments of windows `[N, D, L]` and targets `[N, D, H]` given one by one.

    `centre=None` centres nothing; `floor` weighs each window by 1/(s² + floor).
    """
    x, y = contexts.reshape(-1, contexts.shape[2]), targets.reshape(-1, targets.shape[2])
    if centre is not None:
        level = x[:, -1:] if centre == "last" else x.mean(axis=1, keepdims=True)
        x, y = x - level, y - level
    if floor is not None:
        scale = np.sqrt(contexts.reshape(x.shape).var(axis=1, keepdims=True) + floor)
        x, y = x / scale, y / scale
    return Moments(x.T @ x, x.T @ y, float(np.vdot(y, y)), len(x))


class LinePath:
    """Ridge solutions for every λ from one factorisation of the Gram matrix.

    W(λ) = (G + λ n I)⁻¹ C, n the number of pairs of window and channel: λ is in squared units of
    the series, a variance added to each of the L inputs.

    >>> m = moments(np.random.default_rng(0).normal(size=(2, 90)), 8, 3, 0, 80, "last")
    >>> bool(np.allclose(LinePath(m).weights(0.1), solve_line(m, 0.1)))
    True
    """

    def __init__(self, fitted: Moments) -> None:
        values, vectors = eigh(fitted.gram)
        self._values = np.maximum(values, 0.0)
        self._vectors = vectors
        self._cross = vectors.T @ fitted.cross
        self._count = fitted.count

    def weights(self, penalty: float) -> FloatArray:
        """W(λ) `[L, H]`, λ > 0."""
        return np.asarray(self._vectors @ self._rotated(penalty))

    def errors(self, judged: Moments, penalties: Sequence[float]) -> FloatArray:
        """Mean squared error on other windows for every λ, `[len(penalties)]`."""
        rotated = Moments(
            self._vectors.T @ judged.gram @ self._vectors,
            self._vectors.T @ judged.cross,
            judged.energy,
            judged.count,
        )
        return np.array([rotated.error(self._rotated(penalty)) for penalty in penalties])

    def _rotated(self, penalty: float) -> FloatArray:
        """W(λ) in the basis of the eigenvectors."""
        _check_penalty(penalty)
        return np.asarray(self._cross / (self._values + penalty * self._count)[:, None])


def solve_line(fitted: Moments, penalty: float) -> FloatArray:
    """W `[L, H]` of one λ > 0 by Cholesky factorisation of G + λ n I (symmetric, positive)."""
    _check_penalty(penalty)
    shifted = fitted.gram + penalty * fitted.count * np.eye(len(fitted.gram))
    return np.asarray(cho_solve(cho_factor(shifted, lower=True, overwrite_a=True), fitted.cross))


def line_as_head(weights: FloatArray, centre: Centre) -> FloatArray:
    """The head `[L, H]` whose columns sum to one and that forecasts as the centred line does.

    c + (x - c 1ᵀ) W = x (W + w_c (1 - 1ᵀ W)) with c = xᵀ w_c: e_last for the last value, 1/L for
    the mean. Columns that sum to one commute with RevIN, so the same matrix is SAMformer's head.
    """
    context = weights.shape[0]
    by = _centre_weights(context, 0, centre)
    return np.asarray(weights + by[:, None] * (1.0 - weights.sum(axis=0)))


def predict_line(contexts: FloatArray, weights: FloatArray, centre: Centre) -> FloatArray:
    """Forecast `[..., H]` of `contexts [..., L]` by `weights [L, H]`."""
    level = contexts[..., -1:] if centre == "last" else contexts.mean(axis=-1, keepdims=True)
    return np.asarray(level + (contexts - level) @ weights)


def _centre_weights(context: int, horizon: int, centre: Centre) -> FloatArray:
    weights = np.zeros(context + horizon)
    if centre == "last":
        weights[context - 1] = 1.0
    else:
        weights[:context] = 1.0 / context
    return weights


def _split_moments(both: FloatArray, context: int, count: int) -> Moments:
    energy = float(np.trace(both[context:, context:]))
    return Moments(both[:context, :context].copy(), both[:context, context:].copy(), energy, count)


def _check_penalty(penalty: float) -> None:
    if not penalty > 0:
        raise InputError(f"the ridge penalty must be positive, {penalty} was given")


def _check_range(series: FloatArray, width: int, start: int, stop: int) -> None:
    if series.ndim != 2:
        raise InputError(f"a series [channels, steps] is needed, shape {series.shape} was given")
    if series.dtype != np.float64:
        raise InputError(f"a float64 series is needed, {series.dtype} was given: convert it first")
    if not 0 <= start < stop <= series.shape[1] - width + 1:
        raise InputError(
            f"window starts {start} .. {stop} of width {width} do not fit in "
            f"{series.shape[1]} steps: shorten context + horizon or give more rows"
        )
