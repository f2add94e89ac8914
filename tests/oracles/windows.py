"""Slow twins of windows: every window is cut, centred and scaled by itself, in float64 NumPy."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray


def starts(start: int, stop: int, context: int, horizon: int, reach_back: bool) -> list[int]:
    """All t ≥ 0 whose targets lie in rows start .. stop-1, contexts too unless they reach back."""
    found = []
    for t in range(stop + 1):
        targets = range(t + context, t + context + horizon)
        inside = all(start <= row < stop for row in targets)
        if inside and (reach_back or t >= start):
            found.append(t)
    return found


def cut(series: Array, start: int, context: int, horizon: int) -> tuple[Array, Array]:
    """Context `[D, L]` and target `[D, H]` of one window."""
    return (
        series[:, start : start + context],
        series[:, start + context : start + context + horizon],
    )


def normalised(context: Array, target: Array, eps: float) -> tuple[Array, Array, Array, Array]:
    """(x - mean)/s and y - mean, then mean and s `[D]`, s = sqrt(Σ(x - mean)²/L + eps)."""
    x, y = np.empty_like(context), np.empty_like(target)
    means, deviations = np.empty(len(context)), np.empty(len(context))
    for d, row in enumerate(context):
        mean = math.fsum(row) / len(row)
        variance = math.fsum((v - mean) ** 2 for v in row) / len(row)
        means[d], deviations[d] = mean, math.sqrt(variance + eps)
        x[d] = [(v - mean) / deviations[d] for v in row]
        y[d] = [v - mean for v in target[d]]
    return x, y, means, deviations
