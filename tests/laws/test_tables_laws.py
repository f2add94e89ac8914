"""Laws: wide ↔ long loses nothing, reading twice changes nothing, order does not matter."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from levelhead.base.errors import LevelheadWarning
from levelhead.data.tables import read_table

FREQS = ["h", "30min", "D", "B", "W-MON", "MS", "ME", "QS-JAN", "YE-DEC", "months=1", "7s"]
ZONES = [None, "UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]


@st.composite
def long_tables(draw: st.DrawFn, holes: bool = False) -> pd.DataFrame:
    """Series with starts and ends of their own that overlap, in shuffled rows."""
    length = draw(st.integers(11, 30))
    freq = draw(st.sampled_from(FREQS))
    step = pd.DateOffset(months=1) if freq == "months=1" else freq
    start = draw(st.dates(pd.Timestamp("1995-01-01").date(), pd.Timestamp("2030-01-01").date()))
    first = pd.Timestamp(start).replace(day=min(start.day, 28))
    time = pd.date_range(first, periods=length, freq=step, tz=draw(st.sampled_from(ZONES)))
    if draw(st.booleans()) and draw(st.booleans()):
        time = pd.RangeIndex(3, 3 + 2 * length, 2)
    names = draw(
        st.lists(
            st.text("abcäß xyz09", min_size=1).filter(str.strip),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    numbers = st.floats(-1e6, 1e6) | (st.just(np.nan) if holes else st.nothing())
    parts = []
    for name in names:
        begin, end = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        ds = time[begin : length - end]
        y = draw(st.lists(numbers, min_size=len(ds), max_size=len(ds)))
        parts.append(pd.DataFrame({"unique_id": name, "ds": ds, "y": y}))
    table = pd.concat(parts, ignore_index=True)
    return table.iloc[draw(st.permutations(range(len(table))))] if draw(st.booleans()) else table


@settings(max_examples=150, deadline=None)
@given(long_tables(holes=True))
def test_long_to_wide_and_back_loses_no_row(source: pd.DataFrame) -> None:
    table = read_table(source, missing="keep", sentinels="keep")
    key = ["unique_id", "ds"]
    expected = source.sort_values(key).reset_index(drop=True)
    pd.testing.assert_frame_equal(
        table.to_long().sort_values(key).reset_index(drop=True), expected, check_dtype=False
    )
    pivoted = source.pivot(index="ds", columns="unique_id", values="y")
    wide = table.to_wide()
    assert wide.columns.tolist() == list(table.channels)
    assert wide.index.tolist() == pivoted.index.tolist()
    np.testing.assert_array_equal(wide.to_numpy(), pivoted[list(table.channels)].to_numpy())


@settings(max_examples=100, deadline=None)
@given(long_tables(holes=True))
def test_wide_long_wide_is_the_identity(source: pd.DataFrame) -> None:
    wide = read_table(source, missing="keep", sentinels="keep").to_wide()
    table = read_table(wide, missing="keep", sentinels="keep")
    again = read_table(table.to_long(), missing="keep", sentinels="keep")
    pd.testing.assert_frame_equal(again.to_wide(), table.to_wide())
    pd.testing.assert_frame_equal(again.to_wide(), wide)
    assert again.step == table.step


@settings(max_examples=60, deadline=None)
@given(long_tables(), st.data())
def test_order_of_rows_and_columns_and_library_do_not_matter(
    source: pd.DataFrame, data: st.DataObject
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LevelheadWarning)
        table = read_table(source, freq=None, sentinels="keep")
        other = read_table(pl.DataFrame(source.to_dict("series")), sentinels="keep")
    np.testing.assert_array_equal(other.values, table.values)
    assert other.time.tolist() == table.time.tolist()
    wide = table.to_wide()
    rows, columns = (
        data.draw(st.permutations(range(len(wide)))),
        data.draw(st.permutations(list(wide.columns))),
    )
    shuffled = read_table(wide.iloc[rows][columns], sentinels="keep")
    np.testing.assert_array_equal(shuffled.select(table.channels).values, table.values)
    assert shuffled.channels == tuple(columns)


@settings(max_examples=60, deadline=None)
@given(long_tables(), st.integers(1, 5))
def test_the_future_of_a_part_is_the_rest(source: pd.DataFrame, horizon: int) -> None:
    table = read_table(source, missing="keep", sentinels="keep")
    part = table.rows(0, len(table) - horizon)
    assert part.future(horizon).tolist() == table.time[-horizon:].tolist()
