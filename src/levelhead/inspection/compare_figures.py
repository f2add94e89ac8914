"""What a comparison leaves in its run folder.

Arrays: heads [n, …] as the table prints them; curves of a series [layers, steps].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from levelhead.base.records import Figure, Reading, Run

__all__ = ["write_comparison", "write_series"]

_MOST = 40
_CURVES = {
    "qk_change": ("Change of QK forms", "Mean relative distance of the forms from the first step."),
    "ov_change": ("Change of OV maps", "Mean relative distance of the maps from the first step."),
    "qk_effective_heads": ("Effective heads, QK", "A fall: heads become copies in what they seek."),
    "ov_effective_heads": (
        "Effective heads, OV",
        "A fall: heads become copies in what they write.",
    ),
}


def write_comparison(
    run: Run,
    heads: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]],
    *,
    trained_apart: bool = False,
) -> None:
    """Readings of every head, the table of those that moved most, and a table of layers.

    With `trained_apart` heads are said to differ, since none of them became the other.
    """
    verb = "differs" if trained_apart else "moved"
    of = " of singular values" if trained_apart else ""
    for row in heads:
        where = {"layer": row["layer"], "head": row["head"]}
        run.add_readings(
            Reading(name, row[name], "1", where) for name in ("qk_change", "ov_change", "change")
        )
    figures = []
    for name, rows, says in (
        ("heads", heads[:_MOST], f"Heads of the first checkpoint, what {verb} most first. Changes "
         f"are relative distances{of}; `matched` is the partner's number in the second one."),
        ("layers", layers, "Means over heads, the largest change, and how many heads were found "
         "under another number."),
    ):  # fmt: skip
        if not rows:
            continue
        columns = [c for c in rows[0] if c not in ("layer", "head")]
        run.add_arrays({name: np.array([[float(row[c]) for c in columns] for row in rows])})
        labels = [
            f"{row['layer']}, head {row['head']}" if name == "heads" else row["layer"]
            for row in rows
        ]
        figures.append(
            Figure(
                name,
                "table",
                f"What {verb} most" if name == "heads" else "Layers",
                says,
                {"values": name},
                axes={"rows": "head" if name == "heads" else "layer"},
                labels={"rows": labels, "columns": columns},
            )
        )
    run.add_figures(figures)


def write_series(run: Run, rows: Sequence[Mapping[str, Any]]) -> None:
    """Readings with their step, and a curve for each layer over the steps."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    steps = sorted({row["step"] for row in rows})
    by_place = {(row["layer"], row["step"]): row for row in rows}
    if not rows:
        return
    run.add_readings(
        Reading(name, row[name], "1", {"layer": row["layer"]}, row["step"])
        for row in rows
        for name in _CURVES
    )
    arrays = {"step": np.array(steps, dtype=float)}
    figures = []
    for name, (title, says) in _CURVES.items():
        arrays[name] = np.array(
            [[by_place.get((n, s), {}).get(name, np.nan) for s in steps] for n in layers]
        )
        figures.append(
            Figure(
                name,
                "lines",
                title,
                says,
                {"x": "step", "y": name},
                axes={"x": "step", "y": title.lower()},
                labels={"series": layers},
            )
        )
    run.add_arrays(arrays)
    run.add_figures(figures)
