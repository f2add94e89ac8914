"""Figures of the toy study: curves over epochs, attention over epochs, loss along eigenvectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure
from levelhead.studies.toy_outcomes import ToyOutcomes

__all__ = ["figures"]

Floats = NDArray[np.float64]
_CURVES = {
    "loss": ("Validation loss", "mean squared error"),
    "entropy": ("Entropy of attention", "nat"),
    "lambda_max": ("Largest Hessian eigenvalue", "λ_max"),
    "nuclear": ("Nuclear norm of attention", "‖A‖_*"),
    "rank": ("Effective rank of attention", "rank"),
    "leak": ("What attention adds for not being the identity", "mean square"),
}


def figures(found: ToyOutcomes) -> tuple[dict[str, NDArray[Any]], list[Figure]]:
    """Arrays by name, and the Figures that draw them."""
    arrays: dict[str, NDArray[Any]] = {}
    made: list[Figure] = []
    for init in found.settings.inits:
        for name, (title, unit) in _CURVES.items():
            _add_curve(found, init, name, title, unit, arrays, made)
    _add_maps(found, arrays, made)
    _add_slices(found, arrays, made)
    return arrays, made


def _add_slices(found: ToyOutcomes, arrays: dict[str, NDArray[Any]], figures: list[Figure]) -> None:
    """Training loss along the leading eigenvectors of the Hessian at the last weights."""
    init = found.settings.inits[0]
    names, rows, at, sizes = [], [], None, []
    for arm in found.arms(init):
        run = found.trainings(arm, init).get(0)
        if run is None or "slice_loss" not in run.arrays:
            continue
        at = run.arrays["slice_at"]
        rows += list(run.arrays["slice_loss"])
        values = run.arrays["slice_eigenvalues"]
        names += [f"{arm}, eigenvector {i + 1}" for i in range(len(values))]
        sizes.append(f"{arm} {values[0]:.3g}")
    if at is None:
        return
    arrays["slices.x"], arrays["slices.y"] = at, np.array(rows)
    figures.append(
        Figure(
            "slices",
            "lines",
            "Loss along the leading eigenvectors of the Hessian",
            "At the last weights, seed 0, in the gauge of training. Leading eigenvalues: "
            f"{', '.join(sizes)}.",
            {"x": "slices.x", "y": "slices.y"},
            axes={"x": "distance", "y": "training loss", "y_scale": "log"},
            labels={"series": names},
        )
    )


# ── figures ──


def _add_curve(
    found: ToyOutcomes,
    init: str,
    name: str,
    title: str,
    unit: str,
    arrays: dict[str, NDArray[Any]],
    figures: list[Figure],
) -> None:
    """The median over seeds of one quantity by epoch, a line for each arm."""
    arms = found.arms(init)
    lines, epochs = [], None
    for arm in arms:
        curves = [o.arrays[name] for o in found.trainings(arm, init).values() if name in o.arrays]
        length = max((len(c) for c in curves), default=0)
        padded = [np.pad(c, (0, length - len(c)), constant_values=np.nan) for c in curves]
        if padded:
            epochs = max(epochs or 0, length)
        lines.append(_median(padded))
    if not epochs:
        return
    y = np.array([np.pad(line, (0, epochs - len(line)), constant_values=np.nan) for line in lines])
    kept = np.isfinite(y).any(axis=0)
    if not kept.any():
        return
    key = f"{name}-{init}"
    arrays[f"{key}.x"] = np.arange(epochs)[kept].astype(float)
    arrays[f"{key}.y"] = y[:, kept]
    ends = {
        arm: line[np.isfinite(line)][-1]
        for arm, line in zip(arms, y, strict=True)
        if np.isfinite(line).any()
    }
    low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    figures.append(
        Figure(
            key,
            "lines",
            f"{title}, {init} limits",
            f"Medians over seeds. At the end {low} is lowest ({ends[low]:.3g}), {high} highest "
            f"({ends[high]:.3g}).",
            {"x": f"{key}.x", "y": f"{key}.y"},
            axes={"x": "epoch", "y": unit, "y_scale": "log" if _log(y) else "linear"},
            labels={"series": arms},
        )
    )


def _log(y: Floats) -> bool:
    finite = y[np.isfinite(y)]
    return bool(finite.min() > 0 and finite.max() > 20 * finite.min())


def _median(curves: Sequence[Floats]) -> Floats:
    if not curves:
        return np.zeros(0)
    stacked = np.array(curves)
    out = np.full(stacked.shape[1], np.nan)
    seen = np.isfinite(stacked).any(axis=0)
    out[seen] = np.nanmedian(stacked[:, seen], axis=0)
    return out


def _add_maps(found: ToyOutcomes, arrays: dict[str, NDArray[Any]], figures: list[Figure]) -> None:
    """Attention of one validation window over epochs, side by side (the paper's Figure 3a)."""
    init = found.settings.inits[0]
    for arm in ("transformer", "random", "sam"):
        runs = found.trainings(arm, init)
        if 0 not in runs or runs[0].arrays["maps"].ndim != 3:
            continue
        maps, epochs = runs[0].arrays["maps"], runs[0].arrays["maps_epoch"]
        chosen = sorted({0, 1, len(maps) // 2, len(maps) - 1} & set(range(len(maps))))
        size = maps.shape[-1]
        gap = np.full((size, 1), np.nan)
        pieces = [p for i in chosen for p in (maps[i], gap)][:-1]
        columns = [
            label for i in chosen for label in [*(f"{epochs[i]}:{c}" for c in range(size)), ""]
        ][:-1]
        arrays[f"maps-{arm}"] = np.concatenate(pieces, axis=1)
        own = float(np.mean(np.diagonal(maps[chosen[-1]])))
        figures.append(
            Figure(
                f"maps-{arm}",
                "heatmap",
                f"Attention between channels over epochs: {arm}",
                f"One validation window at epochs {', '.join(str(epochs[i]) for i in chosen)}; at "
                f"the end the mean weight of a channel on itself is {own:.2f}.",
                {"values": f"maps-{arm}"},
                axes={"rows": "query channel", "columns": "epoch:key channel"},
                labels={"rows": [str(r) for r in range(size)], "columns": columns},
            )
        )
