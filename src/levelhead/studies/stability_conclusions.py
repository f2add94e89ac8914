"""What follows from the cells of the stability study: tables, statements, sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Reading
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Verdict
from levelhead.studies.study import Findings, Outcome, Statement, Table
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.symmetry_group import symmetry_group

__all__ = ["MODELS", "MOVES", "conclude"]

MODELS = ("random", "trained", "collapsed")
MOVES = ("orthogonal", "scaling", "affine", "gauge", "permutation")
STAYS = 1e-6
"""A relative change below this is rounding."""

Floats = NDArray[np.float64]


def conclude(outcomes: Mapping[str, Outcome], plain: AttentionView) -> Findings:
    """Findings of the study; `plain` is any view of its layer, for its symmetries."""
    readings = [r for outcome in outcomes.values() for r in outcome.readings]
    entries = list(catalogue())
    seen = [n for n in entries if any(r.where.get("entry") == n for r in readings)]
    changes = {m: _worst(readings, "change", seen, MOVES, model=m) for m in MODELS}
    tables = [_change_table(seen, changes)]
    again = {
        kind: _middle(readings, "retrained", seen, MOVES, optimiser=kind)
        for kind in ("sgd", "adam")
    }
    spread = {kind: _spread(readings, seen, kind) for kind in again}
    tables += [_retrained_table(seen, again[kind], spread[kind], kind) for kind in again]
    statements = [
        *_function_statements(readings),
        _declared_statement(readings),
        *_retrained_statements(seen, again, spread, plain),
    ]
    return Findings(
        tables, statements=statements, conclusion=_sentences(seen, changes, again, spread)
    )


def _worst(
    readings: Sequence[Reading],
    name: str,
    rows: Sequence[str],
    columns: Sequence[str],
    **where: str,
) -> Floats:
    return _table(readings, name, rows, columns, np.max, **where)


def _middle(
    readings: Sequence[Reading],
    name: str,
    rows: Sequence[str],
    columns: Sequence[str],
    **where: str,
) -> Floats:
    return _table(readings, name, rows, columns, np.median, **where)


def _table(
    readings: Sequence[Reading],
    name: str,
    rows: Sequence[str],
    columns: Sequence[str],
    how: Callable[[list[float]], Any],
    **where: str,
) -> Floats:
    """[rows, columns]: over seeds, of the readings of that name and place."""
    held: dict[tuple[str, str], list[float]] = {}
    for reading in readings:
        place = reading.where
        if reading.name == name and all(place.get(k) == v for k, v in where.items()):
            held.setdefault((str(place["entry"]), str(place["move"])), []).append(reading.value)
    return np.array(
        [[float(how(held[r, c])) if (r, c) in held else math.nan for c in columns] for r in rows]
    )


def _spread(readings: Sequence[Reading], rows: Sequence[str], kind: str) -> Floats:
    """Deviation over seeds of an entry's mean, relative to its size: [rows]."""
    held: dict[str, list[float]] = {}
    for reading in readings:
        if reading.name == "value" and reading.where.get("optimiser") == kind:
            held.setdefault(str(reading.where["entry"]), []).append(reading.value)
    out = []
    for row in rows:
        values = np.array(held.get(row, []))
        size = np.abs(values).max() if values.size else 0.0
        out.append(float(values.std(ddof=1) / size) if values.size > 1 and size > 0 else math.nan)
    return np.array(out)


def _change_table(seen: Sequence[str], changes: Mapping[str, Floats]) -> Table:
    columns = [f"{model}: {move}" for model in MODELS for move in MOVES]
    return Table(
        "adjusted",
        "How far each quantity moves while the layer's function stays",
        "Largest relative change over seeds and draws; below 1e-6 it stays.",
        list(seen),
        columns,
        np.concatenate([changes[m] for m in MODELS], axis=1),
        row_axis="entry",
    )


def _retrained_table(seen: Sequence[str], again: Floats, spread: Floats, kind: str) -> Table:
    return Table(
        f"retrained-{kind}",
        f"How far each quantity moves when the layer is trained again ({kind})",
        "Median relative change over seeds, beside the spread between seeds (deviation over size).",
        list(seen),
        [*MOVES, "spread of seeds"],
        np.column_stack([again, spread]),
        row_axis="entry",
    )


def _function_statements(readings: Sequence[Reading]) -> list[Statement]:
    gaps = [r.value for r in readings if r.name == "function"]
    if not gaps:
        return [Statement("same-function", "Moves keep the function.", None, "No cell is there.")]
    return [
        Statement(
            "same-function",
            "Every move with adjusted weights keeps the layer's function (to 1e-9).",
            max(gaps) < 1e-9,
            f"Largest relative change of outputs {max(gaps):.2g}.",
        )
    ]


def _declared_statement(readings: Sequence[Reading]) -> Statement:
    claim = "What the catalogue declares holds for every model."
    wrong = [r.value for r in readings if r.name == "wrong"]
    count = sum(r.value for r in readings if r.name == "declarations")
    if not wrong:
        return Statement("declarations", claim, None, "No cell is there.")
    evidence = f"{sum(wrong):.0f} of {count:.0f} declarations fail."
    return Statement("declarations", claim, sum(wrong) == 0, evidence)


def _invariant_under(name: str, generators: Sequence[str], plain: AttentionView) -> bool:
    """Whether the catalogue declares that entry invariant under all those generators."""
    group = symmetry_group(plain)
    entry = catalogue()[name]
    return all(entry.verdict(plain, group[g])[0] is Verdict.INVARIANT for g in generators)


def _retrained_statements(
    seen: Sequence[str],
    again: Mapping[str, Floats],
    spread: Mapping[str, Floats],
    plain: AttentionView,
) -> list[Statement]:
    if not np.isfinite(again["sgd"]).any():
        return [Statement("sgd-equivariant", "SGD is equivariant.", None, "No cell is there.")]
    turned = MOVES.index("orthogonal")
    kept = [i for i, n in enumerate(seen) if _invariant_under(n, ["basis_rotation"], plain)]
    worst = float(np.nanmax(again["sgd"][kept, turned]))
    adam = float(np.nanmedian(again["adam"][kept, turned]))
    gauge = MOVES.index("gauge")
    free = [i for i, n in enumerate(seen) if _invariant_under(n, ["qk_gauge", "vo_gauge"], plain)]
    moved = again["sgd"][free, gauge]
    return [
        Statement(
            "sgd-equivariant",
            "Trained again by SGD on turned data, everything declared invariant under turns stays.",
            worst < STAYS,
            f"Largest median change {worst:.2g} of {len(kept)} quantities.",
        ),
        Statement(
            "adam-equivariant",
            "The same holds for Adam.",
            adam < STAYS,
            f"Median change {adam:.2g}; Adam's steps depend on the basis.",
            expected=False,
        ),
        Statement(
            "gauge-blind-training",
            "Trained again by SGD from another gauge of the same start, gauge invariants stay.",
            float(np.nanmedian(moved)) < STAYS,
            f"Median change {float(np.nanmedian(moved)):.2g} of {len(free)} quantities, against a "
            f"spread between seeds of {float(np.nanmedian(spread['sgd'][free])):.2g}.",
            expected=False,
        ),
    ]


def _sentences(
    seen: Sequence[str],
    changes: Mapping[str, Floats],
    again: Mapping[str, Floats],
    spread: Mapping[str, Floats],
) -> list[str]:
    said = []
    worst = np.nanmax(np.stack([changes[m] for m in MODELS]), axis=0)
    for place, move in enumerate(MOVES):
        stays = int((worst[:, place] < STAYS).sum())
        said.append(f"{move}: {stays} of {len(seen)} quantities stay with adjusted weights.")
    raw = [i for i, n in enumerate(seen) if n.startswith("raw_")]
    if raw:
        gauge = MOVES.index("gauge")
        moved = int((worst[raw, gauge] >= STAYS).sum())
        said.append(
            f"Of {len(raw)} quantities of the raw head tensor {moved} move under gauges, by up to "
            f"{float(np.nanmax(worst[raw, gauge])):.2g}."
        )
    return said
