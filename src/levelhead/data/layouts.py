"""Wide and long tables as one grid of float64 cells, checked on the way.

*Wide* tables have a time column and one column per channel; *long* ones have the columns
`unique_id, ds, y`, one row per series and stamp. Rows are counted from 1 in messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from levelhead.base.errors import DataError, InputError
from levelhead.data import checks
from levelhead.data.frames import Form, Loaded, own_index
from levelhead.data.frequency import Floats
from levelhead.data.grid import Grid, order_notes
from levelhead.data.labels import distinct_names, pick
from levelhead.data.messages import count, some, warn
from levelhead.data.stamps import looks_like_dates, parse_stamps

__all__ = ["Options", "is_long", "read_long", "read_wide", "share_span"]

TIME_NAMES = ("date", "ds", "time", "timestamp", "datetime")
LONG_NAMES = ("unique_id", "ds", "y")


@dataclass(frozen=True)
class Options:
    """What `data.tables.read_table` was asked for; raises `InputError` for unknown values."""

    time_column: str | None
    channels: Sequence[str] | str | None
    freq: Any
    layout: str
    missing: str
    sentinels: str
    duplicates: str
    time: str

    def __post_init__(self) -> None:
        allowed = {
            "layout": ("auto", "wide", "long"),
            "missing": ("error", "interpolate", "ffill", "keep"),
            "sentinels": ("warn", "mask", "keep"),
            "duplicates": ("error", "first", "last", "mean"),
            "time": ("use", "ignore"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                known = ", ".join(map(repr, values))
                raise InputError(
                    f"{name}={getattr(self, name)!r} is unknown: choose one of {known}"
                )
        if self.time == "ignore" and self.freq is not None:
            raise InputError("freq= has no meaning with time='ignore'; leave out one of the two")


def is_long(frame: pd.DataFrame, layout: str) -> bool:
    """Whether to read a frame as a long table: by `layout`, or by its columns if that is auto."""
    named = set(LONG_NAMES) <= {str(name) for name in frame.columns}
    return layout == "long" or (layout == "auto" and named)


def _find_time(frame: pd.DataFrame, names: list[str], wanted: str | None) -> int | None:
    """Place of the time column, -1 for the index, None where there are no stamps."""
    index, columns = frame.index, [frame.iloc[:, i] for i in range(len(names))]
    if wanted is not None:
        if str(index.name) == wanted:
            return -1
        return pick(wanted, names, "time column")[0]
    types = pd.api.types
    if isinstance(index, (pd.DatetimeIndex, pd.PeriodIndex)):
        return -1
    for i, column in enumerate(columns):
        if types.is_datetime64_any_dtype(column.dtype) or isinstance(column.dtype, pd.PeriodDtype):
            return i
    named = [i for i, name in enumerate(names) if name.strip().lower() in TIME_NAMES]
    dated = [i for i in [*named, 0] if looks_like_dates(columns[i])]
    if dated or named:
        return [*dated, *named][0]
    numbered = types.is_integer_dtype(index.dtype) and not index.equals(pd.RangeIndex(len(index)))
    return -1 if numbered or looks_like_dates(index.to_series()) else None


def read_wide(loaded: Loaded, options: Options) -> tuple[Grid, Form]:
    """A wide table as a grid [T, D], sorted by time, and the form it came in.

    Raises `DataError` naming column, first bad row and count for cells or stamps of no use.
    """
    frame, notes = loaded.frame, list(loaded.notes)
    names = distinct_names(frame.columns)
    at = _find_time(frame, names, options.time_column)
    stamps: pd.Index | None = None
    form = Form(layout="array" if loaded.backend == "numpy" else "wide", backend=loaded.backend)
    if at is not None and options.time == "use":
        column = frame.index.to_series() if at < 0 else frame.iloc[:, at]
        label = frame.index.name if at < 0 else frame.columns[at]
        stamps, said = parse_stamps(column, "index" if label is None else label)
        notes += said
        form = replace(
            form,
            time_name=label,
            time_kind="index" if at < 0 else "column",
            time_at=max(at, 0),
            **_time_type(column, stamps, names[at] in loaded.dates),
        )
    else:
        what = "the time column was left out" if at is not None else "there is no time column"
        notes.append(f"{what}: rows are numbered from 0")
        if at is None and loaded.backend != "numpy":
            notes += _index_like(frame, names)
    free = [i for i in range(len(names)) if i != at]
    kept = free
    if options.channels is not None:
        kept = [free[k] for k in pick(options.channels, [names[i] for i in free])]
    if not kept:
        raise DataError(
            f"there is no channel beside the time column {names[0]!r}; give one or more"
        )
    channels = tuple(names[i] for i in kept)
    values = np.empty((len(frame), len(kept)))
    for d, i in enumerate(kept):
        values[:, d] = checks.to_numbers(frame.iloc[:, i], names[i], stamps)
        notes += checks.big_integers(frame.iloc[:, i], names[i])
    rows = np.arange(len(frame))
    cells = [checks.Cells(c, values[:, d], rows) for d, c in enumerate(channels)]
    checks.check_finite(cells, stamps, "column")
    notes += checks.check_sentinels(cells, stamps, options.sentinels, "column")
    index = pd.RangeIndex(len(frame)) if stamps is None else stamps
    notes += order_notes(index)
    values, rows, said = checks.merge_repeats(
        values, np.zeros(len(rows), np.int64), index, options.duplicates, ()
    )
    labels = tuple(frame.columns[i] for i in kept)
    grid_rows = np.broadcast_to(rows[:, None], values.shape)
    grid = Grid(values, grid_rows, channels, index[rows], "column", notes=(*notes, *said))
    return grid, replace(form, labels=labels, flat=loaded.flat)


def _index_like(frame: pd.DataFrame, names: list[str]) -> list[str]:
    """A sentence for a first column of evenly rising whole numbers: maybe years or seconds."""
    first = frame.iloc[:, 0]
    if len(first) < 3 or not pd.api.types.is_integer_dtype(first) or first.isna().any():
        return []
    steps = np.diff(first.to_numpy(dtype=np.int64))
    if steps[0] <= 0 or (steps != steps[0]).any():
        return []
    return [
        f"column {names[0]!r} rises by {steps[0]} in every row and is taken as a channel: if it is "
        f"the time, pass time_column={names[0]!r} (--time-column {names[0]})"
    ]


def _time_type(column: pd.Series[Any], stamps: pd.Index, date: bool) -> dict[str, Any]:
    if not isinstance(stamps, pd.DatetimeIndex):
        return {"time_type": "integer", "time_unit": None}
    if isinstance(column.dtype, pd.PeriodDtype):
        return {"time_type": "period", "time_unit": str(column.dtype)[7:-1]}
    return {"time_type": "date" if date else "datetime", "time_unit": stamps.unit}


def read_long(loaded: Loaded, options: Options) -> tuple[Grid, Form]:
    """A long table as a grid [T, D] over all its stamps, absent cells as NaN with source row -1.

    Raises `DataError` naming series, first bad row and count for cells or stamps of no use.
    """
    frame, notes = own_index(loaded.frame), list(loaded.notes)
    if frame.index.name == "ds":
        frame = frame.reset_index()
    names = distinct_names(frame.columns)
    ds = options.time_column or "ds"
    need = ["unique_id", ds, "y"]
    if not set(need) <= set(names):
        raise DataError(
            f"a long table has the columns {some(need)}, this one {some(names, 8)}; rename them"
        )
    ids, time, y = (frame.iloc[:, names.index(n)] for n in need)
    if ids.isna().any():
        raise DataError(f"column 'unique_id' is empty in row {int(np.argmax(ids.isna())) + 1}")
    group, labels = pd.factorize(ids)
    extra = [n for n in names if n not in need]
    channels = tuple(distinct_names(labels))
    if options.time == "ignore":
        stamps: pd.Index = pd.Index(pd.Series(group).groupby(group).cumcount().to_numpy())
        notes.append("the time column was left out: the rows of each series are numbered from 0")
    else:
        stamps, said = parse_stamps(time, ds)
        notes += said
    kept = list(range(len(channels)))
    if options.channels is not None:
        kept = pick(options.channels, channels, "series")
    values = checks.to_numbers(y, "y", stamps)
    notes += checks.big_integers(y, "y")
    if extra:
        _other_columns(values, extra, group)
        notes.append(f"columns {some(extra)} were left out")
    notes += order_notes(stamps, group)
    cells = []
    for k in kept:
        rows = np.flatnonzero(group == k)
        cells.append(checks.Cells(channels[k], values[rows], rows))
    checks.check_finite(cells, stamps, "series")
    notes += checks.check_sentinels(cells, stamps, options.sentinels, "series")
    rows = np.concatenate([c.rows for c in cells])
    one = np.concatenate([c.values for c in cells])
    place = np.repeat(np.arange(len(cells)), [len(c.rows) for c in cells])
    chosen = tuple(c.name for c in cells)
    merged, order, said = checks.merge_repeats(
        one[:, None], place, stamps[rows], options.duplicates, chosen, rows
    )
    unique = stamps[rows].unique().sort_values()
    at = unique.get_indexer(stamps[rows[order]])
    full = np.full((len(unique), len(cells)), np.nan)
    sources = np.full(full.shape, -1, np.int64)
    full[at, place[order]], sources[at, place[order]] = merged[:, 0], rows[order]
    ignored = options.time == "ignore"
    form = Form(
        layout="long",
        backend=loaded.backend,
        labels=tuple(labels[k] for k in kept),
        time_name=ds,
        time_kind="none" if ignored else "column",
        **_time_type(time, stamps, ds in loaded.dates),
    )
    return Grid(full, sources, chosen, unique, "series", notes=(*notes, *said)), form


def share_span(grid: Grid) -> Grid:
    """Cut a long table's grid to the rows between the latest first and the earliest last row."""
    present = grid.rows >= 0
    start = np.argmax(present, axis=0)
    stop = len(present) - np.argmax(present[::-1], axis=0)
    begin, end = int(start.max()), int(stop.min())
    names = np.asarray(grid.channels, object)
    if end <= begin:
        raise DataError(
            f"the series share no span of time: {str(names[np.argmax(start)])!r} starts at "
            f"{grid.time[begin]}, {str(names[np.argmin(stop)])!r} ends at {grid.time[end - 1]}; "
            f"choose series that overlap with channels= (--channels)"
        )
    lost = int(present.sum() - present[begin:end].sum())
    if not lost:
        return grid
    late, early = names[start == begin], names[stop == end]
    why = [f"{some(late)} start at {grid.time[begin]}"] if begin else []
    why += [f"{some(early)} end at {grid.time[end - 1]}"] if end < len(present) else []
    said = f"the table was cut to the span that all series share, as {' and '.join(why)}"
    note = f"{said}; {count(lost, 'row')} of {int(present.sum())} lost"
    warn(note)
    cut = slice(begin, end)
    return grid.noted(note, values=grid.values[cut], rows=grid.rows[cut], time=grid.time[cut])


def _other_columns(values: Floats, extra: list[str], group: NDArray[np.int64]) -> None:
    """Say that a long table's other columns are not used; refuse those that go on where y ends."""
    last = pd.Series(np.arange(len(group))).groupby(group).max().to_numpy()
    if np.isnan(values[last]).all():
        raise DataError(
            f"column 'y' has missing values in the last row of every series, where {some(extra)} "
            f"goes on: this looks like known-future covariates, which are not supported yet; cut "
            f"the table at the last complete row"
        )
    warn(f"columns {some(extra)} of the long table are not used; drop them to silence this")
