"""What columns and cells may hold; one clear sentence for what cannot be used.

Rows are counted from 1 in messages, as data rows of the file (the header is not one), and from 0
in code. Nothing here changes the user's data: arrays handed in are copies made by `data.layouts`.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from levelhead.base.errors import DataError
from levelhead.data.frequency import Floats, Ints, dst_repeat
from levelhead.data.grid import FILL, Grid
from levelhead.data.messages import count, some, warn
from levelhead.data.stamps import is_text

__all__ = [
    "Cells",
    "big_integers",
    "check_finite",
    "check_sentinels",
    "constant_notes",
    "fill_missing",
    "merge_repeats",
    "place",
    "refuse_known_future",
    "to_numbers",
]

# ── cells: numbers, infinities, codes for "missing" ─────────────────────────────────────────────


def place(row: int, time: pd.Index | None) -> str:
    """Name a 0-based source row for a message: counted from 1, with its stamp."""
    return f"row {row + 1}" + (f" ({time[row]})" if time is not None else "")


def to_numbers(column: pd.Series[Any], name: str, time: pd.Index | None) -> Floats:
    """The numbers [n] of a column as new float64, NaN where missing; `time` [n] dates its rows.

    Booleans are 0 and 1; nullable, Arrow and decimal columns and numbers written as text are
    converted. Raises `DataError` naming the column, the first bad row and the count otherwise.
    """
    kind, types = column.dtype, pd.api.types
    if types.is_complex_dtype(kind):
        raise DataError(f"column {name!r} holds complex numbers; give real and imaginary parts")
    if types.is_numeric_dtype(kind):
        return np.array(column.to_numpy(dtype=np.float64, na_value=np.nan), np.float64)
    if not is_text(column):
        text = isinstance(kind, pd.CategoricalDtype)
        what = "categories" if text else "dates or durations"
        raise DataError(f"column {name!r} holds {what}, not numbers; {_CHOOSE}")
    cells = column.to_numpy(dtype=object)
    try:
        return np.array(cells, np.float64)  # numbers as text, decimals, booleans: the usual case
    except (ValueError, TypeError):
        numbers, bad = _one_by_one(cells)
    if bad:
        held = cells[bad[0]]
        hint = _CHOOSE
        if isinstance(held, str) and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", held):
            hint = "this is a decimal comma: write decimal points (pandas: read_csv(decimal=','))"
        raise DataError(
            f"column {name!r} is not numeric: {place(bad[0], time)} holds {str(held)[:40]!r} "
            f"({count(len(bad), 'such row')}); {hint}"
        )
    return numbers


_CHOOSE = "choose the numeric columns with channels= (--channels) or drop this one"


def _one_by_one(cells: NDArray[np.object_]) -> tuple[Floats, list[int]]:
    numbers, bad = np.full(len(cells), np.nan), []
    for i, cell in enumerate(cells):
        if cell is None or cell is pd.NA or (isinstance(cell, str) and not cell.strip()):
            continue
        try:
            numbers[i] = float(cell)
        except (ValueError, TypeError, OverflowError):
            bad.append(i)
    return numbers, bad


@dataclass(frozen=True, eq=False)
class Cells:
    """One channel as it came: `values` [m] (ours to change) and their 0-based source `rows` [m]."""

    name: str
    values: Floats
    rows: Ints


def check_finite(columns: Iterable[Cells], time: pd.Index | None, noun: str) -> None:
    """Refuse infinities, naming the first column that has them, its first row and its count."""
    for column in columns:
        bad = np.isinf(column.values)
        if bad.any():
            where = place(int(column.rows[np.argmax(bad)]), time)
            raise DataError(
                f"{noun} {column.name!r} holds {count(int(bad.sum()), 'infinite value')}, the "
                f"first in {where}; replace them, for example by missing values"
            )


_INTEGER_LIMITS = (-32768.0, 32767.0, 65535.0, -2147483648.0, 2147483647.0)


def _is_code(value: float) -> bool:
    """Whether a number is one that programs write for "missing": nines, powers, integer limits."""
    digits = f"{abs(value):.7g}".replace(".", "")
    nines = set(digits) == {"9"} and (len(digits) >= 3 or value == -99)
    return nines or abs(value) >= 1e15 or value in _INTEGER_LIMITS


def _codes(values: Floats) -> list[float]:
    """Codes among the values [m]: extremes further from the rest than twice its range."""
    found, rest = list[float](), values[np.isfinite(values)]
    while rest.size:
        ends = [float(v) for v in (rest.min(), rest.max()) if _is_code(float(v))]
        for value in ends:
            others = rest[rest != value]
            if _is_far(value, others[~np.isin(others, ends)]):
                found.append(value)
                rest = others
                break
        else:
            break
    return found


def _is_far(value: float, others: Floats) -> bool:
    if not others.size:
        return False
    low, high = float(others.min()), float(others.max())
    away = low - value if value < low else value - high
    return away > 2 * (high - low) and away > 0.5 * abs(value)


def check_sentinels(
    columns: Sequence[Cells], time: pd.Index | None, how: str, noun: str
) -> list[str]:
    """Find codes like -9999 that stand for "missing"; warn, or mask them in place by NaN.

    A value counts as a code when it is written like one, occurs twice or more in the table and
    lies far outside the range of the other values of its column. Returns notes.
    """
    found = [(c, code) for c in columns for code in _codes(c.values)]
    times: Counter[float] = Counter()
    for column, code in found:
        times[code] += int((column.values == code).sum())
    said: dict[float, list[str]] = {}
    for column, code in (pair for pair in found if times[pair[1]] > 1):
        held = column.values == code
        first = place(int(column.rows[np.argmax(held)]), time)
        cells = count(int(held.sum()), "cell")
        said.setdefault(code, []).append(f"{noun} {column.name!r} ({cells}, first in {first})")
        if how == "mask":
            column.values[held] = np.nan
    notes = [f"{code:g} stands in {', '.join(where)}" for code, where in said.items()]
    if how == "mask":
        return [f"{note}: taken as missing" for note in notes]
    for note in notes if how == "warn" else []:
        warn(
            f"{note}: it looks like a code for 'missing'; sentinels='mask' takes it as missing, "
            f"sentinels='keep' as a number"
        )
    return [f"{note}: kept as a number" for note in notes]


def big_integers(column: pd.Series[Any], name: str) -> list[str]:
    """A note where whole numbers beyond 2^53 lose digits as float64."""
    if not pd.api.types.is_integer_dtype(column.dtype):
        return []
    big = int((column.abs() > 2**53).sum())
    note = f"column {name!r} holds {count(big, 'whole number')} beyond 2^53, rounded"
    return [note] if big else []


# ── rows that repeat ────────────────────────────────────────────────────────────────────────────


def merge_repeats(
    values: Floats,
    group: Ints,
    stamps: pd.Index,
    how: str,
    names: Sequence[str],
    rows: Ints | None = None,
) -> tuple[Floats, Ints, list[str]]:
    """Merge rows [n, k] of equal `group` and stamp; returns values, kept 0-based rows, notes.

    Rows come out sorted by group, then stamp. `how="error"` refuses repeats, naming the first.
    """
    ticks = np.asarray(stamps.asi8 if isinstance(stamps, pd.DatetimeIndex) else stamps, np.int64)
    order = np.lexsort((ticks, group))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(ticks[order]) != 0) | (np.diff(group[order]) != 0)
    repeats = order[~new]
    if not repeats.size:
        return values[order], order, []
    first = int(repeats.min())
    same = (ticks == ticks[first]) & (group == group[first])
    source = np.arange(len(ticks)) if rows is None else rows
    row, earlier = (int(source[i]) + 1 for i in (first, np.flatnonzero(same)[0]))
    number = count(int(repeats.size), "duplicate time stamp")
    if how == "error":
        of = f" of series {names[int(group[first])]!r}" if names else ""
        hint = dst_repeat(stamps[group == group[first]], stamps[repeats])
        raise DataError(
            f"time stamp {stamps[first]}{of} in row {row} is a duplicate of row {earlier} "
            f"({number} in all); choose duplicates='first', 'last' or 'mean'{hint}"
        )
    starts = np.flatnonzero(new)
    note = f"{number} merged by {how!r}, first in row {row}"
    if how == "last":
        kept = order[np.append(starts[1:], len(order)) - 1]
        return values[kept], kept, [note]
    kept = order[starts]
    if how == "first":
        return values[kept], kept, [note]
    known = np.isfinite(values[order])
    total = np.add.reduceat(np.where(known, values[order], 0.0), starts, axis=0)
    of_each = np.add.reduceat(known.astype(np.int64), starts, axis=0)
    return np.where(of_each > 0, total / np.maximum(of_each, 1), np.nan), kept, [note]


# ── missing values ──────────────────────────────────────────────────────────────────────────────


def refuse_known_future(grid: Grid, missing: str) -> None:
    """Refuse a table whose last rows lack some columns while others go on: known-future covariates.

    Only a block of two rows or more that all lacking columns share counts; when filling was asked
    for, columns with other missing cells are taken for patchy ones.
    """
    absent = np.isnan(grid.values)
    tail = np.where(absent.all(axis=0), 0, np.argmin(absent[::-1], axis=0))
    lacking = tail > 0
    length = int(tail.max(initial=0))
    if length < 2 or lacking.all() or (tail[lacking] != length).any():
        return
    patchy = bool((absent[:, lacking].sum(axis=0) != length).any())
    if absent[-length:, ~lacking].any() or (missing != "error" and patchy):
        return
    t = len(absent) - length
    names, d = np.asarray(grid.channels, object), int(np.argmax(lacking))
    raise DataError(
        f"{grid.noun} {some(names[lacking])} has missing values in the last {length} rows, from "
        f"{grid.where(t, d)}, where {some(names[~lacking])} goes on: this "
        f"looks like known-future covariates, which are not supported yet; cut the table at the "
        f"last complete row ({grid.where(t - 1, d)})"
    )


def fill_missing(grid: Grid, how: str) -> Grid:
    """Refuse, keep or fill missing values; what cannot be reached takes the nearest value."""
    absent = np.isnan(grid.values)
    counts = absent.sum(axis=0)
    lacking = np.flatnonzero(counts)
    if not lacking.size:
        return grid
    d, names = int(lacking[0]), [grid.channels[i] for i in lacking]
    if how == "keep":
        return grid.noted(f"{count(int(counts.sum()), 'missing value')} kept, in {some(names)}")
    empty = [grid.channels[i] for i in np.flatnonzero(counts == len(absent))]
    if empty:
        raise DataError(f"{grid.noun} {some(empty)} has no value at all; drop it")
    if how == "error":
        others = f" and so has {some(names[1:], 3)}" if len(names) > 1 else ""
        raise DataError(
            f"{grid.noun} {names[0]!r} has {count(int(counts[d]), 'missing value')}, the first in "
            f"{grid.where(int(np.argmax(absent[:, d])), d)}{others}; {FILL}"
        )
    values, at, edge = grid.values.copy(), np.arange(len(absent)), 0
    for i in lacking:
        known = np.flatnonzero(~absent[:, i])
        edge += int(known[0]) + (len(at) - 1 - int(known[-1]) if how == "interpolate" else 0)
        if how == "interpolate":
            values[:, i] = np.interp(at, known, grid.values[known, i])
        else:
            last = np.searchsorted(known, at, side="right") - 1
            values[:, i] = grid.values[known[np.maximum(last, 0)], i]
    note = f"{count(int(counts.sum()), 'missing value')} filled by {how!r}, in {some(names)}"
    note += f"; {edge} of them at an end, by the nearest value" if edge else ""
    heavy = zip(grid.channels, counts / len(at), counts > max(10, 0.1 * len(at)), strict=True)
    much = [f"{name!r} ({share:.0%})" for name, share, is_much in heavy if is_much]
    if much:
        warn(f"more than a tenth of these was missing and is filled in: {', '.join(much[:6])}")
    return grid.noted(note, values=values)


def constant_notes(values: Floats, channels: Sequence[str]) -> list[str]:
    """Notes on channels [T, D] that never change, or by 1e-9 of their size, or on 1 row in 1000."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # channels without any value
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    size = np.maximum(np.abs(low), np.abs(high))
    changes = (np.diff(values, axis=0) != 0).sum(axis=0)
    constant = high == low
    still = (high - low <= 1e-9 * size) | (changes <= max(len(values) // 1000, len(values) >= 20))
    names = np.asarray(channels, object)
    found = (("constant", constant), ("nearly constant", still & ~constant))
    return [f"{some(names[which])} {what}, kept" for what, which in found if which.any()]
