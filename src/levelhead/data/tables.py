"""A user's table in, one rectangular float64 array with a regular index out, and back again.

Axes: `values[t, d]` is channel d at row t; rows are in order of time, one `step` apart.
*Wide* tables have a time column and one column per channel; *long* ones have the columns
`unique_id, ds, y`, one row per series and stamp.

>>> import pandas as pd
>>> days = pd.date_range("2024-02-27", periods=3)
>>> table = read_table(pd.DataFrame({"date": days, "a": [1.0, 2.0, 3.0], "b": [0, 1, 0]}))
>>> table.channels, table.values.shape, table.season
(('a', 'b'), (3, 2), 7)
>>> table.future(2).day.tolist()
[1, 2]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from levelhead.base.errors import DataError, InputError
from levelhead.data import checks
from levelhead.data.frames import Form, load, native_frame
from levelhead.data.frequency import Floats, Step, following, season_of
from levelhead.data.grid import Grid, regularise
from levelhead.data.labels import listed, pick
from levelhead.data.layouts import Options, is_long, read_long, read_wide, share_span
from levelhead.data.messages import count

__all__ = ["Form", "Table", "read_table"]


@dataclass(frozen=True, eq=False)
class Table:
    """A checked table: `values [T, D]` float64, channels [D], a sorted regular index [T].

    `step` is what one row is: a pandas offset, or a whole number for integer stamps. `form` says
    how the table came and `notes` what was seen and done. `present [T, D]` is None, or marks the
    cells that the input had (only where missing values were kept). Units are the user's own.
    """

    values: Floats
    channels: tuple[str, ...]
    time: pd.Index
    step: Step
    form: Form
    notes: tuple[str, ...] = ()
    present: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def season(self) -> int | None:
        """Rows of the customary season of the step: a day of hours, a week of days, or None."""
        return season_of(self.step)

    def future(self, horizon: int) -> pd.Index:
        """The `horizon` stamps [H] after the last row: right across month ends and clock changes.

        Raises `InputError` for a horizon below 1.
        """
        if horizon < 1:
            raise InputError(f"horizon={horizon} must be at least 1 row")
        return following(self.time, self.step, horizon)

    def rows(self, start: int | None, stop: int | None) -> Table:
        """Rows `start` to `stop` as a view of the same memory, negative counts from the end."""
        part = slice(start, stop)
        present = None if self.present is None else self.present[part]
        return replace(self, values=self.values[part], time=self.time[part], present=present)

    def select(self, channels: Sequence[str]) -> Table:
        """The named channels, in that order. Raises `InputError` for names that do not exist."""
        at = pick(channels, self.channels)
        labels = tuple(self.form.labels[i] for i in at) if self.form.labels else ()
        return replace(
            self,
            values=np.ascontiguousarray(self.values[:, at]),
            channels=tuple(self.channels[i] for i in at),
            form=replace(self.form, labels=labels),
            present=None if self.present is None else self.present[:, at],
        )

    def to_wide(self) -> pd.DataFrame:
        """A new frame [T, D]: the stamps as index `ds`, one column per channel."""
        index = self.time.rename("ds")
        return pd.DataFrame(self.values.copy(), index=index, columns=list(self.channels))

    def to_long(self) -> pd.DataFrame:
        """A new frame `unique_id, ds, y`, series after series; cells absent from the input are left
        out, so a long table read with `missing="keep"` comes back row for row.
        """
        length, width = self.values.shape
        frame = pd.DataFrame(
            {
                "unique_id": np.repeat(np.asarray(self.channels, object), length),
                "ds": self.time[np.tile(np.arange(length), width)],
                "y": self.values.T.ravel(),
            }
        )
        if self.present is None:
            return frame
        return frame[self.present.T.ravel()].reset_index(drop=True)

    def frame(self, values: NDArray[Any], time: pd.Index) -> Any:
        """Numbers [n, D] at stamps [n] in the caller's own layout, names and library.

        A polars table gives a polars frame, a long one a long one, an array an array [n, D] (or
        [n] for a 1-D one), a file a pandas frame like it. Raises `InputError` for other shapes.
        """
        values = np.asarray(values, np.float64)
        if values.shape != (len(time), len(self.channels)):
            raise InputError(
                f"values of shape {list(values.shape)} do not suit {len(time)} stamps and "
                f"{len(self.channels)} channels: give [{len(time)}, {len(self.channels)}]"
            )
        if self.form.backend == "numpy":
            return values[:, 0].copy() if self.form.flat else values.copy()
        return native_frame(values, time, self.form, self.form.labels or self.channels)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def read_table(
    source: Any,
    *,
    time_column: str | None = None,
    channels: Sequence[str] | str | None = None,
    freq: Any = None,
    layout: Literal["auto", "wide", "long"] = "auto",
    missing: Literal["error", "interpolate", "ffill", "keep"] = "error",
    sentinels: Literal["warn", "mask", "keep"] = "warn",
    duplicates: Literal["error", "first", "last", "mean"] = "error",
    time: Literal["use", "ignore"] = "use",
) -> Table:
    """Read and check a user's table; returns `values [T, D]` with its index, step and notes.

    Args:
        source: path to CSV (`,` `;` tab or `|`, also gzipped) or Parquet; a pandas, polars or
            pyarrow frame; an array [T, D] or [T]; or a `Table`, returned as is if it passes.
        time_column: name of the stamps; else a typed, parsable or so named column, or the index.
        channels: the columns (or series) to keep, in that order; all by default.
        freq: the step, as `"h"`, `"15min"`, `"D"`, `"MS"` or a whole number; inferred by default.
        layout: `"long"` for `unique_id, ds, y`; `"auto"` knows these by their names.
        missing: refuse missing values and absent rows, fill them, or keep them as NaN.
        sentinels: codes such as -9999 are warned of, masked as missing, or kept silently.
        duplicates: refuse repeated stamps, or merge their rows.
        time: `"ignore"` takes the rows as they stand, numbered from 0.

    The series of a long table are cut to the span they share unless `missing="keep"`.
    Raises `DataError` naming column, first bad row (counted from 1) and count; `InputError` for
    arguments. Warns (`LevelheadWarning`) of codes, lost rows and heavy filling.

    >>> read_table([[1.0, 5.0], [2.0, 6.0]])
    Traceback (most recent call last):
        ...
    levelhead.base.errors.InputError: cannot read a list as a table: give a path, a pandas, ...
    """
    options = Options(time_column, channels, freq, layout, missing, sentinels, duplicates, time)
    if isinstance(source, Table):
        return _again(source, options)
    loaded = load(source)
    frame = loaded.frame
    if not len(frame) or not len(frame.columns):
        raise DataError(f"the table is empty ({count(len(frame), 'row')}); give rows and channels")
    grid, form = (read_long if is_long(frame, layout) else read_wide)(loaded, options)
    return _settle(grid, form, options)


def _settle(grid: Grid, form: Form, options: Options) -> Table:
    """Make a sorted grid regular and complete, and a Table of it."""
    keep = options.missing == "keep"
    if form.layout == "long" and not keep:
        grid = share_span(grid)
    if len(grid.time) < 2:
        raise DataError(f"{count(len(grid.time), 'row')} of data is no series; give two or more")
    if form.layout != "long" and not keep:
        checks.refuse_known_future(grid, options.missing)
    grid = regularise(grid, options.freq, options.missing)
    grid = checks.fill_missing(grid, options.missing)
    present = grid.rows >= 0
    return Table(
        values=np.ascontiguousarray(grid.values),
        channels=grid.channels,
        time=grid.time,
        step=grid.step,
        form=form,
        notes=(*grid.notes, *checks.constant_notes(grid.values, grid.channels)),
        present=present if keep and not present.all() else None,
    )


def _again(table: Table, options: Options) -> Table:
    """Check a Table once more, against options that may differ from those it was read with."""
    if options.channels is not None:
        table = table.select(listed(options.channels))
    if options.time == "ignore":
        form = replace(table.form, time_kind="none", time_name=None, time_type="integer")
        table = replace(table, time=pd.RangeIndex(len(table)), step=1, form=form)
    rows = np.broadcast_to(np.arange(len(table))[:, None], table.values.shape)
    present = np.ones(rows.shape, bool) if table.present is None else table.present
    grid = Grid(
        table.values.copy(), np.where(present, rows, -1), table.channels, table.time, "column"
    )
    cells = [checks.Cells(c, grid.values[:, d], rows[:, d]) for d, c in enumerate(grid.channels)]
    checks.check_finite(cells, table.time, "column")
    notes: list[str] = []
    if options.sentinels == "mask":
        notes = checks.check_sentinels(cells, table.time, "mask", "column")
    known = options.freq is None or regularise(grid, options.freq, "error").step == table.step
    clean = options.missing == "keep" or not np.isnan(grid.values).any()
    if known and clean and not notes:
        return table
    freq = table.step if options.freq is None else options.freq
    made = _settle(grid.noted(*table.notes, *notes), table.form, replace(options, freq=freq))
    return replace(made, notes=tuple(dict.fromkeys(made.notes)))
