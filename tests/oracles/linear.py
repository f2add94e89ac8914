"""Slow twins of the line: all windows written out, sums by loops, solutions by least squares."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def lag_moments(series: Array, width: int, start: int, stop: int) -> Array:
    """R_ij = Σ_d Σ_t x_d[t+i] x_d[t+j]."""
    total = np.zeros((width, width))
    for channel in series:
        for t in range(start, stop):
            window = channel[t : t + width]
            total += np.outer(window, window)
    return total


def windows(
    series: Array, context: int, horizon: int, start: int, stop: int
) -> tuple[Array, Array]:
    """Contexts `[n, L]` and targets `[n, H]` of all channels and starts, channel after channel."""
    x = [c[t : t + context] for c in series for t in range(start, stop)]
    y = [c[t + context : t + context + horizon] for c in series for t in range(start, stop)]
    return np.array(x), np.array(y)


def centred(
    x: Array, y: Array, centre: str | None, floor: float | None = None
) -> tuple[Array, Array]:
    """Windows less their last value or mean, divided by sqrt(s² + floor) unless it is None."""
    zs, ys = [], []
    for row, target in zip(x, y, strict=True):
        level = {"last": row[-1], "mean": np.mean(row), None: 0.0}[centre]
        scale = 1.0 if floor is None else (np.mean((row - np.mean(row)) ** 2) + floor) ** 0.5
        zs.append((row - level) / scale)
        ys.append((target - level) / scale)
    return np.array(zs), np.array(ys)


def ridge(z: Array, y: Array, penalty: float) -> Array:
    """argmin Σ‖y - zW‖² + λ n ‖W‖² from the stacked design, without normal equations."""
    n, context = z.shape
    design = np.vstack([z, (penalty * n) ** 0.5 * np.eye(context)])
    target = np.vstack([y, np.zeros((context, y.shape[1]))])
    return np.linalg.lstsq(design, target, rcond=None)[0]
