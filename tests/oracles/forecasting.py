"""Small tables, and slow twins of what a forecaster computes: loops over windows in NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd

Array = np.ndarray


def waves(rows: int = 300, channels: int = 3, seed: int = 0) -> Array:
    """`[T, D]`: daily waves of unlike level and unit, with noise that is partly shared."""
    draw = np.random.default_rng([seed, rows, channels])
    time = np.arange(rows)[:, None]
    phase, period = draw.uniform(0, 6, channels), 24.0
    shared = np.cumsum(draw.normal(size=(rows, 1)), axis=0) / 10.0
    clean = np.sin(2 * np.pi * time / period + phase) + shared * draw.normal(size=channels)
    noisy = clean + 0.2 * draw.normal(size=(rows, channels))
    return 10.0 * draw.normal(size=channels) + noisy * 2.0 ** draw.uniform(-2, 4, channels)


def related(rows: int = 300, channels: int = 3, seed: int = 0, lag: int = 6) -> Array:
    """`[T, D]`: the first channel leads, the others repeat it `lag` rows later in other units."""
    draw = np.random.default_rng([seed, rows, channels])
    leader = np.zeros(rows + lag + 200)
    for t in range(2, len(leader)):
        leader[t] = 1.8 * leader[t - 1] - 0.9 * leader[t - 2] + draw.normal()
    leader = leader[200:] / leader.std()
    values = np.stack([leader[lag:], *[leader[:rows]] * (channels - 1)], axis=1)
    values = values + 0.05 * draw.normal(size=values.shape)
    return 10.0 * draw.normal(size=channels) + values * 2.0 ** draw.uniform(-2, 4, channels)


def hourly(rows: int = 300, channels: int = 3, seed: int = 0, tz: str | None = None, **dates):
    """`related` with a time column, as most tables come: wide, named channels, hours."""
    stamps = pd.date_range("2024-01-30 05:00", periods=rows, tz=tz, **({"freq": "h"} | dates))
    frame = pd.DataFrame({"date": stamps})
    names = ["load", "oil", "wind", *(f"c{i}" for i in range(channels))][:channels]
    frame[names] = related(rows, channels, seed)
    return frame


def long_form(wide: pd.DataFrame) -> pd.DataFrame:
    """`unique_id, ds, y`, series after series."""
    melted = wide.melt(id_vars="date", var_name="unique_id", value_name="y")
    return melted.rename(columns={"date": "ds"})[["unique_id", "ds", "y"]]


# ── the line by brute force ──


def stacked(
    series: Array, context: int, horizon: int, starts: list[int], centre: str, floor: float | None
) -> tuple[Array, Array]:
    """Centred contexts `[n, L]` and targets `[n, H]` of all channels at these starts."""
    zs, ys = [], []
    for channel in series:
        for t in starts:
            x, y = channel[t : t + context], channel[t + context : t + context + horizon]
            level = x[-1] if centre == "last" else sum(x) / context
            scale = 1.0
            if floor is not None:
                scale = math.sqrt(sum((x - sum(x) / context) ** 2) / context + floor)
            zs.append((x - level) / scale)
            ys.append((y - level) / scale)
    return np.array(zs), np.array(ys)


def ridge_head(z: Array, y: Array, penalty: float, centre: str) -> Array:
    """Ridge W `[L, H]` by least squares on the stacked design, as a head on raw contexts."""
    n, context = z.shape
    design = np.vstack([z, math.sqrt(penalty * n) * np.eye(context)])
    weights = np.linalg.lstsq(design, np.vstack([y, np.zeros((context, y.shape[1]))]), rcond=None)
    head = weights[0]
    lost = 1.0 - head.sum(axis=0)
    if centre == "last":
        head[-1] += lost
    else:
        head += lost / context
    return head


# ── intervals, choice, blend ──


def kth_smallest(scores: Array, coverage: float) -> Array:
    """The ⌈(N+1)c⌉-th smallest of `scores [N, ...]`; the largest where there are too few."""
    count = len(scores)
    rank = min(count, max(1, math.ceil(round((count + 1) * coverage, 9))))
    flat = scores.reshape(count, -1)
    return np.array([sorted(column)[rank - 1] for column in flat.T]).reshape(scores.shape[1:])


def best_blend(products: Array, steps: int = 60) -> tuple[Array, float]:
    """The best of all weights on a grid of 1/steps, and its error wᵀEw."""
    best, least = np.zeros(len(products)), math.inf
    for parts in itertools.product(range(steps + 1), repeat=len(products) - 1):
        if sum(parts) <= steps:
            w = np.array([*parts, steps - sum(parts)]) / steps
            if (error := float(w @ products @ w)) < least:
                best, least = w, error
    return best, least


# ── the protocol of the literature ──


def protocol_errors(
    values: Array, split: tuple[int, int, int], context: int, horizon: int, head: Array
) -> tuple[float, float, int]:
    """MSE, MAE and number of test windows of a head `[L, H]` on values `[T, D]`, one by one.

    Scaled by the training rows; contexts may reach back before the test rows; no window dropped.
    """
    train, first, end = split[0], split[0] + split[1], sum(split)
    scaled = (values - values[:train].mean(axis=0)) / values[:train].std(axis=0)
    squared, absolute, windows = [], [], 0
    for start in range(first, end - horizon + 1):
        x, y = scaled[start - context : start], scaled[start : start + horizon]
        residual = x.T @ head - y.T
        squared.append(residual**2)
        absolute.append(np.abs(residual))
        windows += 1
    return float(np.mean(squared)), float(np.mean(absolute)), windows
