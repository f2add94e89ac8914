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
from levelhead.studies.stability_change import LEAST, STAYS, is_rounding
from levelhead.studies.study import Findings, Outcome, Statement, Table
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.symmetry_group import symmetry_group

__all__ = ["MODELS", "MOVES", "conclude"]

MODELS = ("random", "trained", "collapsed")
MOVES = ("orthogonal", "scaling", "affine", "gauge", "permutation")
OPTIMISERS = ("sgd", "adam")
_OLDER = ("change", "retrained")
"""Readings of changes by earlier definitions."""
_MEASURED = (
    "The largest difference of its values over their largest size before or after; values below "
    f"{LEAST:g} of the quantity's natural scale (1 nat, say), before and after, are not judged"
)
Floats = NDArray[np.float64]


def conclude(outcomes: Mapping[str, Outcome], plain: AttentionView) -> Findings:
    """Findings of the study; `plain` is any view of its layer, for its symmetries."""
    readings = [r for outcome in outcomes.values() for r in outcome.readings]
    entries = list(catalogue())
    seen = [n for n in entries if any(r.where.get("entry") == n for r in readings)]
    changes = {m: _worst(readings, "moved", seen, MOVES, model=m) for m in MODELS}
    tables = [_change_table(seen, changes)]
    again = {
        kind: _middle(readings, "moved-again", seen, MOVES, optimiser=kind) for kind in OPTIMISERS
    }
    farthest = {
        kind: _worst(readings, "moved-again", seen, MOVES, optimiser=kind) for kind in OPTIMISERS
    }
    spread = {kind: _spread(readings, seen, kind) for kind in OPTIMISERS}
    tables += [_retrained_table(seen, again[kind], spread[kind], kind) for kind in OPTIMISERS]
    missing = _missing(readings)
    statements = [
        _function_statement(readings, missing),
        _declared_statement(readings, missing),
        *_retrained_statements(seen, farthest, spread["sgd"], plain),
    ]
    said = [*_older(readings), *_sentences(seen, changes, missing)]
    told = [t for t in tables if np.isfinite(t.values).any()]
    return Findings(told, statements=statements, conclusion=said)


def _older(readings: Sequence[Reading]) -> list[str]:
    """A sentence for cells whose changes were measured in another way, and are left out."""
    if not any(r.name in _OLDER for r in readings):
        return []
    return [
        "Cells of an earlier version are here, which measured changes in more than one way: they "
        "are left out, and a run in a new folder measures them again."
    ]


def _missing(readings: Sequence[Reading]) -> str:
    """Which models were not looked at, whole or with some of the seeds; "" if none is missing."""
    seeds = sorted({int(r.where["seed"]) for r in readings if "seed" in r.where})
    said = []
    for model in MODELS:
        there = {r.where["seed"] for r in readings if r.where.get("model") == model}
        left = [str(seed) for seed in seeds if seed not in there]
        if left or not seeds:
            some = f" (seed{'s' * (len(left) > 1)} {', '.join(left)})" if there else ""
            said.append(f"{model}{some}")
    return ", ".join(said)


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
    values = [
        [float(how(held[r, c])) if (r, c) in held else math.nan for c in columns] for r in rows
    ]
    return np.array(values, dtype=float).reshape(len(rows), len(columns))


def _spread(readings: Sequence[Reading], rows: Sequence[str], kind: str) -> Floats:
    """Deviation over seeds of an entry's mean, relative to its largest size: [rows]."""
    held: dict[str, list[float]] = {}
    for reading in readings:
        if reading.name == "value" and reading.where.get("optimiser") == kind:
            held.setdefault(str(reading.where["entry"]), []).append(reading.value)
    out = []
    for row in rows:
        values = np.array(held.get(row, []))
        size = np.abs(values).max() if values.size else 0.0
        judged = values.size > 1 and size > 0 and not is_rounding(catalogue()[row], size)
        out.append(float(values.std(ddof=1) / size) if judged else math.nan)
    return np.array(out)


def _change_table(seen: Sequence[str], changes: Mapping[str, Floats]) -> Table:
    columns = [f"{model}: {move}" for model in MODELS for move in MOVES]
    return Table(
        "adjusted",
        "How far each quantity moves while the layer's function stays",
        f"Largest relative change over seeds and draws; below {STAYS:g} it stays. {_MEASURED}.",
        list(seen),
        columns,
        np.concatenate([changes[m] for m in MODELS], axis=1),
        row_axis="entry",
    )


def _retrained_table(seen: Sequence[str], again: Floats, spread: Floats, kind: str) -> Table:
    return Table(
        f"retrained-{kind}",
        f"How far each quantity moves when the layer is trained again ({kind})",
        "Median relative change over seeds, beside the spread between seeds (deviation of the mean "
        f"value over its largest size). {_MEASURED}.",
        list(seen),
        [*MOVES, "spread of seeds"],
        np.column_stack([again, spread]),
        row_axis="entry",
    )


def _of_all(name: str, claim: str, evidence: str, found: bool | None, missing: str) -> Statement:
    """A statement of every model: it fails by one, and holds only if none is missing."""
    if missing:
        evidence += f" Missing: {missing}."
    return Statement(name, claim, None if found and missing else found, evidence.strip())


def _function_statement(readings: Sequence[Reading], missing: str) -> Statement:
    gaps = [r.value for r in readings if r.name == "function"]
    return _of_all(
        "same-function",
        "Every move with adjusted weights keeps the layer's function (to 1e-9).",
        f"Largest relative change of outputs {max(gaps):.2g}." if gaps else "",
        max(gaps) < 1e-9 if gaps else None,
        missing,
    )


def _declared_statement(readings: Sequence[Reading], missing: str) -> Statement:
    wrong = [r.value for r in readings if r.name == "wrong"]
    count = sum(r.value for r in readings if r.name == "declarations")
    return _of_all(
        "declarations",
        "What the catalogue declares holds for every model.",
        f"{sum(wrong):.0f} of {count:.0f} declarations fail." if wrong else "",
        sum(wrong) == 0 if wrong else None,
        missing,
    )


def _invariant_under(name: str, generators: Sequence[str], plain: AttentionView) -> bool:
    """Whether the catalogue declares that entry invariant under all those generators."""
    group = symmetry_group(plain)
    entry = catalogue()[name]
    return all(entry.verdict(plain, group[g])[0] is Verdict.INVARIANT for g in generators)


def _retrained_statements(
    seen: Sequence[str],
    farthest: Mapping[str, Floats],
    spread: Floats,
    plain: AttentionView,
) -> list[Statement]:
    """Trained again: all three by the largest change over seeds of the quantities in question."""
    turned = [i for i, n in enumerate(seen) if _invariant_under(n, ["basis_rotation"], plain)]
    free = [i for i, n in enumerate(seen) if _invariant_under(n, ["qk_gauge", "vo_gauge"], plain)]
    turn, gauge = MOVES.index("orthogonal"), MOVES.index("gauge")
    apart = spread[free][np.isfinite(spread[free])]
    beside = f"; the median spread between seeds is {np.median(apart):.2g}" if apart.size else ""
    return [
        _stays(
            "sgd-equivariant",
            "Trained again by SGD on turned data, everything declared invariant under turns stays.",
            _of(seen, turned, farthest["sgd"][:, turn]),
            expected=True,
        ),
        _stays(
            "adam-equivariant",
            "The same holds for Adam.",
            _of(seen, turned, farthest["adam"][:, turn]),
            "; Adam's steps depend on the basis",
        ),
        _stays(
            "gauge-blind-training",
            "Trained again by SGD from another gauge of the same start, gauge invariants stay.",
            _of(seen, free, farthest["sgd"][:, gauge]),
            beside,
        ),
    ]


def _of(seen: Sequence[str], places: Sequence[int], changes: Floats) -> dict[str, float]:
    """Changes of the quantities at `places` by name; nan for those that are not judged."""
    return {seen[i]: float(changes[i]) for i in places}


def _stays(
    name: str,
    claim: str,
    changes: Mapping[str, float],
    beside: str = "",
    *,
    expected: bool = False,
) -> Statement:
    """Whether all quantities stay, by the largest change over seeds of each."""
    judged = {entry: moved for entry, moved in changes.items() if not math.isnan(moved)}
    if not judged:
        return Statement(name, claim, None, "No cell is there.", expected)
    most = max(judged, key=lambda entry: judged[entry])
    between = [moved for entry, moved in judged.items() if not _whole(entry)] or [*judged.values()]
    evidence = (
        f"{_kept(changes)}; largest change over seeds {judged[most]:.2g} ({most}), median over "
        f"quantities {np.median(between):.2g}{beside}."
    )
    kept = all(moved < STAYS for moved in judged.values())
    return Statement(name, claim, kept, evidence, expected)


def _whole(entry: str) -> bool:
    """Whether it is a whole number, a rank or a count, which small changes cannot move."""
    return catalogue()[entry].kind == "integer"


def _kept(changes: Mapping[str, float], how: str = "") -> str:
    """How many quantities stay; apart from them whole numbers, and those that are not judged."""
    judged = {entry: moved for entry, moved in changes.items() if not math.isnan(moved)}
    whole = [moved < STAYS for entry, moved in judged.items() if _whole(entry)]
    between = [moved < STAYS for entry, moved in judged.items() if not _whole(entry)]
    said = f"{sum(between)} of {len(between)} quantities stay{how}"
    if whole:
        said += f", beside {sum(whole)} of {len(whole)} whole-valued ranks and counts"
    left = [entry for entry in changes if entry not in judged]
    return said + (f" (too small to be judged: {', '.join(left)})" if left else "")


def _sentences(seen: Sequence[str], changes: Mapping[str, Floats], missing: str) -> list[str]:
    worst = np.stack([changes[m] for m in MODELS])
    # The largest over the models that are there; nan where none is.
    worst = np.where(np.isnan(worst).all(axis=0), np.nan, np.nan_to_num(worst).max(axis=0))
    if not np.isfinite(worst).any():
        return []
    said = [f"Not looked at with adjusted weights: {missing}."] if missing else []
    for place, move in enumerate(MOVES):
        column = dict(zip(seen, worst[:, place].tolist(), strict=True))
        said.append(f"{move}: {_kept(column, ' with adjusted weights')}.")
    gauge = MOVES.index("gauge")
    rows = [i for i, n in enumerate(seen) if n.startswith("raw_") and not _whole(n)]
    raw = worst[rows, gauge]
    raw = raw[~np.isnan(raw)]
    if raw.size:
        said.append(
            f"{int((raw >= STAYS).sum())} of {len(raw)} quantities of the raw head tensor, without "
            f"ranks and counts, move under gauges, by up to {raw.max():.2g}."
        )
    return said
