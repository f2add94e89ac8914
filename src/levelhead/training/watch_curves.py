"""Curves and matrices of a watched run: one line a layer, one cell a head; see `watch_figures`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure
from levelhead.training.watch_course import (
    Course,
    Floats,
    Grid,
    ends_of,
    hidden,
    place_name,
    thinned,
)

__all__ = [
    "CURVES",
    "MOST_STEPS",
    "Curves",
    "Drawn",
    "curve_figures",
    "entropy_map",
    "similarity_maps",
]

MOST_STEPS, MOST_COLUMNS = 400, 60
MOST_LAYERS, MOST_HEADS = 12, 48

Drawn = tuple[dict[str, NDArray[np.float64]], list[Figure]]


@dataclass(frozen=True)
class Curves:
    """Lines over steps: one a layer (`reduce` over its heads) or, for several names, one a name."""

    name: str
    title: str
    what: str
    names: Sequence[str]
    reduce: Callable[[Floats], Floats] | None = None
    unit: str = ""
    log: bool = False


def _mean(values: Floats) -> Floats:
    return np.asarray(np.nanmean(values, axis=0))


def _largest(values: Floats) -> Floats:
    return np.asarray(np.nanmax(values, axis=0))


def _smallest(values: Floats) -> Floats:
    return np.asarray(np.nanmin(values, axis=0))


CURVES = (
    Curves("entropy", "Entropy share",
            "Mean over heads of the entropy of attention rows over the largest possible one: "
            "0 is one token, 1 is all tokens alike.",
            ["attention_entropy_share"], _mean, "share"),
    Curves("logits", "Largest logit", "Largest |logit| of each layer, before the softmax.",
            ["largest_logit"], _largest, "logit", log=True),
    Curves("map_residual", "Rank-one distance",
            "Smallest over heads of ‖A - C‖/‖A‖, C the map in which all rows have the same "
            "preferences (behind a causal mask: among the keys that each row may see).",
            ["map_residual"], _smallest, "share"),
    Curves("map_rank", "Effective rank of the maps", "Mean over heads.",
            ["map_effective_rank"], _mean),
    Curves("qk_heads", "Effective heads of QK", "1: all heads are copies of one.",
            ["qk_effective_heads"], _mean, "heads"),
    Curves("ov_heads", "Effective heads of OV", "1: all heads are copies of one.",
            ["ov_effective_heads"], _mean, "heads"),
    Curves("qk_coherence", "Coherence of QK", "Mean squared cosine of two heads: 1 for copies.",
            ["qk_coherence"], _mean),
    Curves("ov_coherence", "Coherence of OV", "Mean squared cosine of two heads: 1 for copies.",
            ["ov_coherence"], _mean),
    Curves("qk_rank", "Effective rank of QK", "Mean over heads; at most the width of a head.",
            ["qk_effective_rank"], _mean),
    Curves("ov_rank", "Effective rank of OV", "Mean over heads; at most the width of a head.",
            ["ov_effective_rank"], _mean),
    Curves("norms", "Norms of gradients, updates and weights", "Of all weights together.",
            ["gradient_norm", "update_norm", "weight_norm"], log=True),
    Curves("layer_gradients", "Gradient norms of the layers", "Of each attention layer.",
            ["gradient_norm"], _mean, log=True),
    Curves("sharpness", "Sharpness", "Largest eigenvalue of the Hessian, and the rise of the loss "
            "one step of SAM away, at the canonical gauge.",
            ["largest_hessian_eigenvalue", "sam_sharpness"], log=True),
    Curves("roughness", "Roughness of the loss", "How much the loss bends from step to step.",
            ["loss_roughness"]),
)  # fmt: skip


def curve_figures(course: Course, curves: Curves) -> Drawn:
    """The lines of `curves`, if anything of it was read."""
    if curves.reduce is None:
        grid = _together([course.grid(name) for name in curves.names], curves.names)
        thing = "curves"
    else:
        grid = course.grid(curves.names[0])
        inside = [at for at, key in enumerate(grid.places) if key[0]]
        grid = replace(grid, places=[grid.places[i] for i in inside], values=grid.values[inside])
        grid = grid.by_layer(curves.reduce)
        thing = "layers"
    if grid.empty:
        return {}, []
    grid = replace(grid, values=np.where(np.isfinite(grid.values), grid.values, np.nan))
    grid = grid.thin(MOST_STEPS)
    kept = thinned(len(grid.places), MOST_LAYERS)
    rows = grid.values[kept]
    labels = [grid.places[i][0] for i in kept]
    ends = [ends_of(row) for row in grid.values]
    low, high = (pick(range(len(ends)), key=lambda i: _sortable(ends[i][1])) for pick in (min, max))
    says = f"{curves.what} {_course_of(grid.places[low][0], ends[low])}"
    says += "." if low == high else f"; {_course_of(grid.places[high][0], ends[high])}."
    says += hidden(len(kept), len(grid.places), f"{thing}, evenly spaced")
    name = f"watch.{curves.name}"
    figure = Figure(
        name,
        "lines",
        curves.title,
        says,
        {"x": f"{name}.x", "y": f"{name}.y"},
        axes={"x": "Step", "y": curves.title} | ({"y_scale": "log"} if curves.log else {}),
        units={"y": curves.unit} if curves.unit else {},
        labels={"series": labels},
    )
    return {f"{name}.x": grid.steps, f"{name}.y": rows}, [figure]


def _together(grids: Sequence[Grid], names: Sequence[str]) -> Grid:
    """The values of the whole run (no layer) under several names, as rows over all their steps."""
    steps = np.unique(np.concatenate([grid.steps for grid in grids]))
    rows, places = [], []
    for grid, name in zip(grids, names, strict=True):
        for key, values in zip(grid.places, grid.values, strict=True):
            if key[0] == "":
                row = np.full(len(steps), np.nan)
                row[np.searchsorted(steps, grid.steps)] = values
                rows.append(row)
                places.append((name.replace("_", " "), -1, ""))
    return Grid(steps, places, np.stack(rows) if rows else np.empty((0, len(steps))))


def _sortable(value: float) -> float:
    return np.inf if np.isnan(value) else value


def _course_of(place: str, ends: tuple[float, float]) -> str:
    return f"{place}: {ends[0]:.3g} at first, {ends[1]:.3g} at last"


# ── matrices ──


def entropy_map(course: Course) -> Drawn:
    """Entropy share of single heads over steps, the sharpest heads if there are many."""
    grid = course.grid("attention_entropy_share")
    heads = [at for at, key in enumerate(grid.places) if key[1] >= 0]
    if grid.empty or len(heads) < 2:
        return {}, []
    values = grid.values[heads]
    last = np.array([ends_of(row)[1] for row in values])
    sharpest = np.argsort(np.where(np.isnan(last), np.inf, last), kind="stable")
    shown = np.sort(sharpest[:MOST_HEADS])
    columns = thinned(len(grid.steps), MOST_COLUMNS)
    least = sharpest[0]
    layer, head, _ = grid.places[heads[least]]
    says = f"Sharpest at last: {place_name(layer, head)} with {last[least]:.3g}."
    says += hidden(len(shown), len(heads), "heads, the sharpest at last")
    figure = Figure(
        "watch.entropy_heads",
        "heatmap",
        "Entropy share of single heads",
        says,
        {"values": "watch.entropy_heads"},
        axes={"rows": "Head", "columns": "Step"},
        units={"values": "share"},
        labels={
            "rows": [place_name(*grid.places[heads[i]][:2]) for i in shown],
            "columns": [f"{step:.0f}" for step in grid.steps[columns]],
        },
    )
    return {"watch.entropy_heads": values[shown][:, columns]}, [figure]


def similarity_maps(course: Course) -> list[Drawn]:
    """CKA of layers, and of heads in the layer where they are most alike, at the last probe."""
    found = [_matrix(course.grid("layer_cka"), "layer_cka", "CKA of layers", None)]
    heads = course.grid("head_cka")
    if not heads.empty:
        alike = {}
        for layer in dict.fromkeys(key[0] for key in heads.places):
            off = [
                ends_of(row)[1]
                for key, row in zip(heads.places, heads.values, strict=True)
                if key[0] == layer and str(key[1]) != key[2]
            ]
            alike[layer] = float(np.nanmean(off)) if np.isfinite(off).any() else -np.inf
        layer = max(alike, key=lambda name: alike[name])
        title = f"CKA of heads in {layer}"
        found.append(_matrix(heads, "head_cka", title, layer))
    return found


def _matrix(grid: Grid, name: str, title: str, layer: str | None) -> Drawn:
    pairs = {}
    for key, row in zip(grid.places, grid.values, strict=True):
        if layer is None or key[0] == layer:
            one = key[0] if layer is None else str(key[1])
            pairs[one, key[2]] = ends_of(row)[1]
    labels = list(dict.fromkeys(part for pair in pairs for part in pair))
    if len(labels) < 2 or not np.isfinite(list(pairs.values())).any():
        return {}, []
    place = {label: at for at, label in enumerate(labels)}
    values = np.eye(len(labels))
    values[values == 0] = np.nan
    for (one, other), value in pairs.items():
        values[place[one], place[other]] = value
        if (other, one) not in pairs:
            values[place[other], place[one]] = value
    off = np.where(np.eye(len(labels), dtype=bool), np.nan, values)
    row, column = np.unravel_index(int(np.nanargmax(off)), off.shape)
    figure = Figure(
        f"watch.{name}",
        "heatmap",
        title,
        f"Debiased CKA on the probe batch at step {grid.steps[-1]:.0f}: 1 is the same up to "
        f"rotation and scale. Most alike: {labels[row]} and {labels[column]} with "
        f"{off[row, column]:.3g}.",
        {"values": f"watch.{name}"},
        units={"values": "CKA"},
        labels={"rows": labels, "columns": labels},
    )
    return {f"watch.{name}": values}, [figure]
