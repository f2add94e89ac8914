"""The rectangular grid that a table becomes on its way in: one row a step, absent cells known.

Rows are counted from 1 in messages, as data rows of the file, and from 0 in code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from levelhead.base.errors import DataError
from levelhead.data.frequency import (
    Floats,
    Ints,
    Step,
    dst_days,
    dst_gap,
    following,
    infer_step,
    off_grid,
    parse_step,
    positions,
    step_name,
)
from levelhead.data.messages import count

__all__ = ["FILL", "Grid", "order_notes", "regularise"]

FILL = "missing='interpolate' or 'ffill' (--missing interpolate) fills them"


@dataclass(frozen=True, eq=False)
class Grid:
    """A rectangular table on its way in: `values` and `rows` [T, D], `time` [T] sorted, unique.

    `rows` holds the 0-based source row of each cell, -1 where the input has no such cell.
    `noun` is what a channel is called in messages: a column, or a series of a long table.
    """

    values: Floats
    rows: Ints
    channels: tuple[str, ...]
    time: pd.Index
    noun: str
    step: Step = 1
    notes: tuple[str, ...] = ()

    def where(self, t: int, d: int) -> str:
        """Name cell (t, d) for a message."""
        row = int(self.rows[t, d])
        return f"row {row + 1} ({self.time[t]})" if row >= 0 else f"the absent row {self.time[t]}"

    def noted(self, *notes: str, **changes: Any) -> Grid:
        """The grid with notes added and fields changed."""
        return replace(self, notes=(*self.notes, *notes), **changes)


def regularise(grid: Grid, freq: object, missing: str) -> Grid:
    """Find or check the step, refuse irregular rows, and insert absent ones as NaN if allowed."""
    time = grid.time
    if freq is None and isinstance(time, pd.DatetimeIndex) and len(time) < 3:
        raise DataError(
            f"the step between rows cannot be told from {count(len(time), 'row')}; pass freq= "
            f"(--freq), for example freq='h'"
        )
    step = infer_step(time) if freq is None else parse_step(freq, time)
    at = positions(time, step)
    if (at < 0).any():
        raise DataError(_irregular(grid, step, freq, at))
    length = int(at[-1]) + 1
    absent = length - len(time)
    if not absent:
        return grid.noted(step=step)
    jump = int(np.argmax(np.diff(at) > 1))
    gaps = int((np.diff(at) > 1).sum())
    hint = dst_gap(time[jump], time[jump + 1], step)
    said = (
        f"{count(absent, 'row')} at {count(gaps, 'gap')} of time absent, the first after "
        f"{_row(grid, jump)}, where the next is {time[jump + 1]} and a step is {step_name(step)!r}"
    )
    if absent > 10 * len(time):
        raise DataError(f"{said}; these are too many to fill, so correct the stamps or give freq=")
    if missing == "error":
        raise DataError(f"{said}{hint}; {FILL}{_unlike(time, step, freq)}")
    values = np.full((length, grid.values.shape[1]), np.nan)
    rows = np.full(values.shape, -1, np.int64)
    values[at], rows[at] = grid.values, grid.rows
    full = time[:1].append(following(time[:1], step, length - 1))
    return grid.noted(f"{said}; they were inserted", values=values, rows=rows, time=full, step=step)


def _row(grid: Grid, t: int) -> str:
    """Name row t by the first cell that the input has."""
    return f"row {int(grid.rows[t].max()) + 1} ({grid.time[t]})"


def _unlike(time: pd.Index, step: Step, freq: object) -> str:
    if freq is None or len(time) < 3:
        return ""
    seen = infer_step(time)
    named = seen if isinstance(seen, int) else step_name(seen)
    return "" if seen == step else f" (the stamps themselves suggest freq={named!r})"


def _irregular(grid: Grid, step: Step, freq: object, at: Ints) -> str:
    time, off = grid.time, off_grid(grid.time, step, at)
    given = f"freq={freq!r}" if freq is not None else f"the usual step {step_name(step)!r}"
    first = int(np.argmax(off))
    if first == 0:
        return (
            f"the stamps do not fall on {given}, beginning with {_row(grid, 0)}"
            f"{_unlike(time, step, freq)}; give a freq= (--freq) that suits them"
        )
    places = count(int(off.sum()), "such place")
    return (
        f"rows are irregular in time: {_row(grid, first)} comes {time[first] - time[first - 1]} "
        f"after {_row(grid, first - 1)}, which {given} does not reach ({places} in all)"
        f"{_unlike(time, step, freq)}{dst_days(time)}; resample the table, or pass time='ignore' "
        f"to take the rows as they stand"
    )


def order_notes(stamps: pd.Index, group: Ints | None = None) -> list[str]:
    """A note where rows (of one series) are out of order in time, as they get sorted."""
    ticks = np.asarray(stamps.asi8 if isinstance(stamps, pd.DatetimeIndex) else stamps, np.int64)
    order = np.arange(len(ticks)) if group is None else np.argsort(group, kind="stable")
    back = np.diff(ticks[order]) < 0
    if group is not None:
        back &= np.diff(group[order]) == 0
    if not back.any():
        return []
    return [f"rows were sorted by time; row {order[1:][back][0] + 1} was the first out of order"]
