"""Frames of any library in, and frames in the caller's own form out.

Whatever comes is a pandas frame inside; `Form` remembers how it came, so that `native_frame` can
give results back in the same layout, names, library and kind of stamps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import narwhals as nw
import numpy as np
import pandas as pd

from levelhead.base.errors import DataError, InputError
from levelhead.data.files import read_file
from levelhead.data.frequency import Floats
from levelhead.data.messages import some

__all__ = ["Form", "Loaded", "load", "native_frame", "own_index"]


@dataclass(frozen=True)
class Form:
    """How a table came, so that results go back the same way; plain data that JSON can hold.

    `labels` are the channels' original names (column labels or series ids) in channel order;
    `time_kind` says where the stamps stood, `time_type` and `time_unit` what they were.
    """

    layout: Literal["wide", "long", "array"] = "wide"
    backend: Literal["pandas", "polars", "pyarrow", "numpy", "file"] = "pandas"
    labels: tuple[Hashable, ...] = ()
    time_name: Hashable = None
    time_kind: Literal["column", "index", "none"] = "none"
    time_type: Literal["datetime", "date", "period", "integer"] = "integer"
    time_unit: str | None = None
    time_at: int = 0
    id_name: Hashable = "unique_id"
    value_name: Hashable = "y"
    flat: bool = False


# ── in ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Loaded:
    """A pandas frame with what is known of the native one; never written to."""

    frame: pd.DataFrame
    backend: Literal["pandas", "polars", "pyarrow", "numpy", "file"]
    notes: tuple[str, ...] = ()
    flat: bool = False
    dates: frozenset[str] = frozenset()


def load(source: Any) -> Loaded:
    """Any accepted source but a Table as a pandas frame; its index kept, names still its own."""
    if isinstance(source, (str, Path)):
        frame, notes = read_file(Path(source))
        return Loaded(frame, "file", tuple(notes))
    if isinstance(source, np.ndarray):
        if source.ndim not in (1, 2):
            raise DataError(
                f"an array of shape {list(source.shape)} is no table: give [T, D] or [T]"
            )
        array = np.ma.filled(source.astype(float), np.nan) if np.ma.isMA(source) else source
        frame = pd.DataFrame(array[:, None] if source.ndim == 1 else array)
        return Loaded(frame, "numpy", flat=source.ndim == 1)
    if isinstance(source, pd.Series):
        source = source.to_frame("y" if source.name is None else source.name)
        return Loaded(own_index(source), "pandas", flat=source.index.nlevels == 1)
    if isinstance(source, pd.DataFrame):
        return Loaded(own_index(source), "pandas")
    native = nw.from_native(source, allow_series=True, pass_through=True)
    if isinstance(native, nw.LazyFrame):
        native = native.collect()
    if isinstance(native, nw.Series):
        native = native.to_frame()
    if not isinstance(native, nw.DataFrame):
        raise InputError(
            f"cannot read a {type(source).__name__} as a table: give a path, a pandas, polars or "
            f"pyarrow frame, or a numpy array [T, D]"
        )
    dates = frozenset(c.name for c in native.iter_columns() if c.dtype == nw.Date)
    columns = {c.name: _pandas_column(c) for c in native.iter_columns()}
    backend: Any = native.implementation.name.lower()
    backend = backend if backend in ("polars", "pyarrow") else "pandas"
    return Loaded(pd.DataFrame(columns), backend, dates=dates)


def own_index(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn index levels that are columns of a long table into columns."""
    levels = [str(level) for level in frame.index.names]
    if "unique_id" in levels:
        return frame.reset_index()
    if len(levels) > 1:
        raise DataError(f"an index of levels {some(levels)} is not understood; use reset_index()")
    return frame


def _pandas_column(column: nw.Series[Any]) -> Any:
    """One column without a detour by pyarrow, which polars' own conversion needs."""
    if isinstance(column.dtype, nw.Datetime) and column.dtype.time_zone is not None:
        naive = column.dt.convert_time_zone("UTC").dt.replace_time_zone(None).to_numpy()
        zone = column.dtype.time_zone
        return pd.DatetimeIndex(naive).tz_localize("UTC").tz_convert(zone)
    if isinstance(column.dtype, (nw.Categorical, nw.Enum)):
        return pd.Categorical(column.cast(nw.String()).to_list())
    return column.to_numpy()


# ── out ─────────────────────────────────────────────────────────────────────────────────────────


def native_frame(values: Floats, time: pd.Index, form: Form, labels: Sequence[Hashable]) -> Any:
    """Build the native frame that `Table.frame` promises."""
    if form.time_type == "period":
        time = pd.DatetimeIndex(time).to_period(form.time_unit)
    if form.layout == "long":
        ids = np.asarray(labels, dtype=None if _alike(labels) else object).repeat(len(time))
        stamps = time[np.tile(np.arange(len(time)), len(labels))]
        columns: dict[Hashable, Any] = {
            form.id_name: ids,
            form.time_name: stamps,
            form.value_name: values.T.ravel(),
        }
    else:
        columns = {label: values[:, i] for i, label in enumerate(labels)}
        if form.time_kind == "column":
            items = list(columns.items())
            items.insert(form.time_at, (form.time_name, time))
            columns = dict(items)
    if form.backend in ("polars", "pyarrow"):
        return _narwhals_frame(columns, form)
    columns = {k: pd.Series(v) for k, v in columns.items()}
    frame = pd.DataFrame(dict(enumerate(columns.values())))
    frame.columns = pd.Index(list(columns), tupleize_cols=False)
    if form.layout == "wide" and form.time_kind != "column":
        frame.index = time.rename(form.time_name)
    return frame.iloc[:, 0] if form.flat else frame


def _alike(labels: Sequence[Hashable]) -> bool:
    return len({type(label) for label in labels}) == 1


def _narwhals_frame(columns: dict[Hashable, Any], form: Form) -> Any:
    backend = cast(Any, form.backend)
    made = []
    for name, column in columns.items():
        zone = column.tz if isinstance(column, pd.DatetimeIndex) else None
        if isinstance(column, pd.DatetimeIndex):
            column = column.tz_convert(None) if zone is not None else column
            column = column.as_unit("us") if column.unit == "s" else column  # polars has no seconds
        series = nw.new_series(str(name), np.asarray(column), backend=backend)
        if zone is not None:
            named = str(zone)
            named = named[3:] if named.startswith("UTC") and len(named) > 3 else named
            series = series.dt.replace_time_zone("UTC").dt.convert_time_zone(named)
        if name == form.time_name and form.time_type == "date":
            series = series.cast(nw.Date())
        elif isinstance(series.dtype, nw.Datetime) and form.time_unit is not None:
            unit = cast(Any, form.time_unit)
            series = series.cast(nw.Datetime(unit, series.dtype.time_zone))
        made.append(series)
    return nw.DataFrame.from_dict({s.name: s for s in made}, backend=backend).to_native()
