"""What a report says of all layers at once: tables of layers, heads and fits, curves over layers.

Arrays are called `summary.…`. Tables have the headings that the terminal shows; what all layers
share is told once, and words of single layers stand in a last column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Figure, Run
from levelhead.inspection.measures import COLUMNS, ON_DATA, LayerNumbers
from levelhead.inspection.tables import HEADINGS, compact, legend

__all__ = ["summary"]

# A page with more heads than this shows those of the first layers.
MOST_HEADS = 300
_FIRST = ("heads", "groups", "d_k")
_LAST = ("near_duplicates", "dead_heads")
_UNITS = {HEADINGS[name]: unit for name, (unit, *_) in {**COLUMNS, **ON_DATA}.items()}
_NAMES = {"qk": "QK", "ov": "OV", "raw": "T"}


def summary(
    run: Run, layers: Sequence[LayerNumbers], fits: Sequence[Mapping[str, object]] = ()
) -> list[Figure]:
    """Store the arrays of all layers, and return the Figures that come before single layers'."""
    figures = [_layers(run, layers), *_curves(run, layers)]
    if fits:
        figures.append(_fits(run, fits))
    return [*figures, _heads(run, layers)]


def _layers(run: Run, layers: Sequence[LayerNumbers]) -> Figure:
    rows = [layer.row() for layer in layers]
    names = [*_FIRST, *COLUMNS, *(n for n in ON_DATA if n in rows[0]), *_LAST]
    headings, table = _table(rows, names)
    run.add_arrays({"summary.table": table})
    notes = [str(row.get("notes") or "") for row in compact(rows).rows]
    labels = {"rows": [layer.name for layer in layers], "columns": headings}
    return Figure(
        "summary",
        "table",
        "Layers",
        f"One row for each layer. {legend(headings)}",
        {"values": "summary.table"},
        axes={"rows": "layer"},
        units=_units(headings),
        labels={**labels, "notes": notes} if any(notes) else labels,
    )


def _heads(run: Run, layers: Sequence[LayerNumbers]) -> Figure:
    rows = [row for layer in layers for row in layer.head_rows()]
    shown = rows[:MOST_HEADS]
    words = ("near_duplicate", "dead")
    grouped = any(row["group"] != row["head"] for row in rows)
    left = {"layer", "head", *words, *(() if grouped else ("group",))}
    headings, table = _table(shown, [name for name in shown[0] if name not in left])
    run.add_arrays({"summary.every_head": table})
    notes = [", ".join(n.replace("_", "-") for n in words if row[n]) for row in shown]
    some = f" The first {len(shown)} of {len(rows)} are shown." if len(shown) < len(rows) else ""
    labels = {
        "rows": [f"{row['layer']}, head {row['head']}" for row in shown],
        "columns": headings,
    }
    return Figure(
        "summary_every_head",
        "table",
        "Every head",
        f"One row for each head.{some} {legend(headings)}",
        {"values": "summary.every_head"},
        axes={"rows": "head", "fold": "Every head"},
        units=_units(headings),
        labels={**labels, "notes": notes} if any(notes) else labels,
    )


def _table(
    rows: Sequence[Mapping[str, object]], names: Sequence[str]
) -> tuple[list[str], NDArray[np.float64]]:
    """Headings and numbers of the columns that say something."""
    table = np.array([[float(str(row[name])) for name in names] for row in rows])
    kept = ~np.isnan(table).all(0)
    headings = [HEADINGS.get(n, n) for n, k in zip(names, kept, strict=True) if k]
    return headings, np.ascontiguousarray(table[:, kept])


def _units(headings: Sequence[str]) -> dict[str, str]:
    return {h: unit for h in headings if (unit := _UNITS.get(h, "1")) != "1"}


def _curves(run: Run, layers: Sequence[LayerNumbers]) -> list[Figure]:
    def row(name: str) -> list[float]:
        return [layer.numbers[name] for layer in layers]

    heads = [row("qk_effective_heads"), row("ov_effective_heads")]
    ranks = [row("qk_effective_rank"), row("ov_effective_rank")]
    run.add_arrays(
        {
            "summary.layer": np.arange(len(layers), dtype=float),
            "summary.heads": np.array([*heads, [float(n.heads) for n in layers]]),
            "summary.ranks": np.array([*ranks, [float(n.d_k) for n in layers]]),
        }
    )
    if len(layers) == 1:
        return []
    return [
        Figure(
            f"summary_{part}",
            "lines",
            f"{title} from layer to layer",
            says,
            {"x": "summary.layer", "y": f"summary.{part}"},
            axes={"x": "layer", "y": title.lower()},
            labels={"series": ["QK", "OV", "heads" if part == "heads" else "d_k"]},
        )
        for part, title, says in (
            ("heads", "Effective heads", "Close to the number of heads: all of them differ."),
            ("ranks", "Effective ranks", "Means over heads; at most the width of a head."),
        )
    ]


def _fits(run: Run, fits: Sequence[Mapping[str, object]]) -> Figure:
    """A row for each layer, a column for each tensor and rank."""
    layers = list(dict.fromkeys(str(fit["layer"]) for fit in fits))
    made = [fit for fit in fits if fit["rank"] != "none"]
    columns = list(dict.fromkeys(_column(fit) for fit in made))
    table = np.full((len(layers), len(columns)), np.nan)
    notes: dict[str, list[str]] = {layer: [] for layer in layers}
    for fit in made:
        table[layers.index(str(fit["layer"])), columns.index(_column(fit))] = fit["relative_error"]
        if str(fit["is"]).startswith("degenerate"):
            notes[str(fit["layer"])].append(_column(fit))
    told = [f"degenerate: {', '.join(found)}" if found else "" for found in notes.values()]
    for fit in fits:
        if fit["rank"] == "none":
            at = layers.index(str(fit["layer"]))
            told[at] = "; ".join(filter(None, (told[at], f"no T: {fit['is']}")))
    run.add_arrays({"summary.fits": table})
    labels = {"rows": layers, "columns": columns}
    return Figure(
        "summary_fits",
        "table",
        f"Errors of {_method(fits[0])} fits",
        "‖x - fit‖/‖x‖ from the residual, for each tensor and rank. Fits of the QK forms and OV "
        "maps are the layer's own; those of the raw head tensor T depend on the basis.",
        {"values": "summary.fits"},
        axes={"rows": "layer"},
        labels={**labels, "notes": told} if any(told) else labels,
    )


def _method(fit: Mapping[str, object]) -> str:
    return {"cp": "CP", "tucker": "Tucker"}[str(fit["method"])]


def _column(fit: Mapping[str, object]) -> str:
    return f"{_NAMES[str(fit['tensor'])]}, {fit['rank']}"
