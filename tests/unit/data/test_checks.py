"""What is refused, warned of, filled or noted; each message names column, first row and count."""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from levelhead.base.errors import DataError, InputError, LevelheadWarning
from levelhead.data.frequency import parse_step, step_name
from levelhead.data.tables import read_table

HOURS = pd.date_range("2024-01-01", periods=40, freq="h")


def frame(**changes: tuple[list[int], object]) -> pd.DataFrame:
    """Two channels over 40 hours, with some cells of a column replaced."""
    source = pd.DataFrame({"date": HOURS, "a": np.arange(40.0), "b": np.arange(40.0) ** 2})
    for name, (rows, value) in changes.items():
        source[name] = source[name].astype(object) if isinstance(value, str) else source[name]
        source.loc[rows, name] = value
    return source


REFUSED = {
    "missing": (
        frame(b=([4, 7], np.nan)),
        r"column 'b' has 2 missing values, the first in row 5 \(2024-01-01 04:00:00\); "
        r"missing='interpolate' or 'ffill' \(--missing interpolate\)",
    ),
    "infinite": (
        frame(a=([9], -np.inf)),
        r"column 'a' holds 1 infinite value, the first in row 10 \(2024",
    ),
    "text": (
        frame(b=([2, 3], "bad")),
        r"column 'b' is not numeric: row 3 .* 'bad' \(2 such rows\).*channels=",
    ),
    "comma": (frame(a=([0], "1,5")), r"row 1 .*'1,5'.*decimal comma"),
    "category": (frame().assign(c=pd.Categorical(["x"] * 40)), r"'c' holds categories.*channels="),
    "dates": (frame().assign(c=HOURS), r"'c' holds dates or durations"),
    "complex": (frame().assign(c=1j), r"'c' holds complex"),
    "no channel": (frame()[["date"]], r"no channel beside the time column 'date'"),
    "no row": (frame().head(0), r"empty \(0 rows\)"),
    "one row": (frame().head(1), r"1 row of data"),
    "same names": (frame().rename(columns={"b": "a"}), r"'a' occurs twice \(columns 2 and 3\)"),
    "empty column": (frame().assign(b=np.nan), r"'b' has no value at all"),
    "repeat": (
        pd.concat([frame(), frame().iloc[[3]]]),
        r"2024-01-01 03:00:00 in row 41 is a duplicate of row 4 \(1 duplicate time stamp in all\)",
    ),
    "gap": (
        frame().drop([5, 6, 20]),
        r"3 rows at 2 gaps of time absent, the first after row 5 \(2024-01-01 04:00:00\)",
    ),
    "irregular": (
        frame().assign(date=HOURS.where(HOURS[7] != HOURS, HOURS[7] + pd.Timedelta("5min"))),
        r"irregular in time: row 8 \(2024-01-01 07:05:00\) comes 0 days 01:05:00 "
        r"after row 7.*2 such places",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_default(name: str) -> None:
    source, message = REFUSED[name]
    with pytest.raises(DataError, match=message) as caught:
        read_table(source)
    assert "\n" not in str(caught.value)


def test_filling_is_linear_or_forward_with_the_nearest_value_at_the_ends() -> None:
    source = frame(b=([0, 4, 5], np.nan), a=([39], np.nan))
    linear = read_table(source, missing="interpolate")
    assert linear.values[[0, 4, 5], 1].tolist() == [1.0, 9 + 27 / 3, 9 + 2 * 27 / 3]  # 9 … 36
    assert linear.values[39, 0] == 38.0
    assert any("4 missing values" in n and "2 of them at an end" in n for n in linear.notes)
    ahead = read_table(source, missing="ffill")
    assert ahead.values[[0, 4, 5], 1].tolist() == [1.0, 9.0, 9.0]
    known = source[["a", "b"]].notna().to_numpy()
    for filled in (linear, ahead):
        np.testing.assert_array_equal(filled.values[known], source[["a", "b"]].to_numpy()[known])
    kept = read_table(source, missing="keep")
    assert np.argwhere(np.isnan(kept.values)).tolist() == [[0, 1], [4, 1], [5, 1], [39, 0]]


def test_heavy_filling_is_warned_of() -> None:
    with pytest.warns(LevelheadWarning, match=r"more than a tenth.*'b' \(30%\)"):
        read_table(frame(b=(list(range(10, 22)), np.nan)), missing="ffill")


def test_a_stray_stamp_far_away_is_not_filled_up_to() -> None:
    stray = pd.concat([frame().head(1).assign(date=pd.Timestamp("1970-01-01")), frame()])
    with pytest.raises(DataError, match="too many to fill"):
        read_table(stray, missing="ffill")


def test_gaps_are_filled_with_whole_rows() -> None:
    table = read_table(frame().drop([5, 6, 20]), missing="interpolate")
    assert table.time.tolist() == HOURS.tolist()
    np.testing.assert_allclose(table.values[:, 0], np.arange(40.0), rtol=1e-14)
    assert table.values[5, 1] == 16 + (49 - 16) / 3
    assert any("3 rows at 2 gaps" in note and "inserted" in note for note in table.notes)


SENTINELS = {
    "-9999 twice": ([3, 8], -9999.0, True),
    "1e20": ([3, 8], 1e20, True),
    "99999": ([3, 8], 99999.0, True),
    "int16": ([3, 8], -32768.0, True),
    "once": ([3], -9999.0, False),
    "no code": ([3, 8], -9000.0, False),
    "in range": ([3, 8], 999.0, False),
    "near": ([3, 8], -999.0, False),
}


@pytest.mark.parametrize("name", SENTINELS)
def test_codes_for_missing_are_found_and_nothing_else(name: str) -> None:
    rows, code, found = SENTINELS[name]
    source = frame(b=(rows, code))  # b spans 0 … 1521
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = read_table(source)
    said = [str(w.message) for w in caught if w.category is LevelheadWarning]
    assert len(said) == found
    if found:
        assert f"{code:g} stands in column 'b' (2 cells, first in row 4 (2024-01-01 03" in said[0]
        assert caught[0].filename == __file__
    assert (table.values[rows, 1] == code).all()
    assert read_table(source, sentinels="keep").values[rows[0], 1] == code
    masked = read_table(source, sentinels="mask", missing="keep")
    assert np.isnan(masked.values[rows, 1]).all() == found


def test_two_codes_in_one_column_and_one_over_two_columns() -> None:
    both = frame(b=([3, 8], -9999.0))
    both.loc[[10, 11], "b"] = 1e20
    table = read_table(both, sentinels="mask", missing="keep")
    assert np.flatnonzero(np.isnan(table.values[:, 1])).tolist() == [3, 8, 10, 11]
    spread = frame(a=([2], -9999.0), b=([3], -9999.0))
    assert np.isnan(read_table(spread, sentinels="mask", missing="keep").values).sum() == 2


@pytest.mark.parametrize(
    ("how", "expected"), [("first", [3.0, 9.0]), ("last", [5.0, 11.0]), ("mean", [4.0, 10.0])]
)
def test_repeats_are_merged(how: str, expected: list[float]) -> None:
    again = frame().iloc[[3]].assign(a=5.0, b=11.0)
    table = read_table(pd.concat([frame(), again]), duplicates=how)
    assert table.values[3].tolist() == expected
    assert len(table) == 40
    gap = pd.concat([frame(), again.assign(b=np.nan)])
    assert read_table(gap, duplicates="mean").values[3].tolist() == [4.0, 9.0]


def test_rows_are_sorted_and_that_is_noted() -> None:
    shuffled = frame().iloc[[1, 0, *range(2, 40)]]
    table = read_table(shuffled)
    np.testing.assert_array_equal(table.values[:, 0], np.arange(40.0))
    assert "rows were sorted by time; row 2 was the first out of order" in table.notes
    with pytest.raises(DataError, match=r"the first in row 1 \(2024-01-01 01:00:00\)"):
        read_table(shuffled.assign(a=shuffled["a"].where(shuffled["a"] != 1)))


def test_constant_and_nearly_constant_channels_are_kept_and_noted() -> None:
    source = frame().assign(
        same=5.0, almost=1e9 + np.arange(40) * 1e-3, step=[0.0] * 20 + [1.0] * 20
    )
    table = read_table(source)
    assert "'same' constant, kept" in table.notes
    assert "'almost', 'step' nearly constant, kept" in table.notes
    assert table.channels == ("a", "b", "same", "almost", "step")


def test_known_future_covariates_are_refused_but_patchy_columns_are_not() -> None:
    ahead = frame(b=(list(range(35, 40)), np.nan))
    for missing in ("error", "ffill"):
        message = r"'b' has missing values in the last 5 rows, from row 36 .*'a' goes on.*row 35"
        with pytest.raises(DataError, match=message):
            read_table(ahead, missing=missing)
    assert np.isnan(read_table(ahead, missing="keep").values).sum() == 5
    patchy = ahead.assign(b=ahead["b"].where(ahead["b"] != 9))
    assert read_table(patchy, missing="ffill").values[-1, 1] == 34.0**2
    both = ahead.assign(a=ahead["b"])
    with pytest.raises(DataError, match="5 missing values"):
        read_table(both)


@pytest.mark.parametrize("minutes", [60, 30, 15])
def test_wall_clock_changes_are_recognised(minutes: int) -> None:
    zone = "Europe/Berlin"
    for day, message in (("2024-10-27", "is a duplicate"), ("2024-03-31", "absent")):
        aware = pd.date_range(day, periods=600 // minutes, freq=f"{minutes}min", tz=zone)
        source = pd.DataFrame({"date": aware.tz_localize(None), "a": np.arange(len(aware)) * 1.0})
        with pytest.raises(DataError, match=f"{message}.*daylight-saving.*UTC"):
            read_table(source)
        assert len(read_table(source.assign(date=aware))) == len(aware)


def test_other_repeats_and_gaps_are_not_called_a_change_of_clocks() -> None:
    sunday = pd.date_range("2024-10-27", periods=20, freq="10min")
    one = pd.DataFrame({"date": sunday.insert(13, sunday[12]), "a": np.arange(21.0)})
    with pytest.raises(DataError, match="duplicate") as caught:
        read_table(one)
    assert "daylight" not in str(caught.value)
    weekday = pd.date_range("2024-10-29", periods=20, freq="h").delete(3)
    with pytest.raises(DataError, match="absent") as caught:
        read_table(pd.DataFrame({"date": weekday, "a": np.arange(19.0)}))
    assert "daylight" not in str(caught.value)


@pytest.mark.parametrize(
    "freq", ["h", "15min", "D", "B", "W-TUE", "MS", "2MS", "QS-FEB", "YE-DEC", "months=1"]
)
def test_step_names_are_read_back(freq: str) -> None:
    step = parse_step(freq)
    assert step_name(step) == freq
    assert parse_step(step_name(step)) == step


# ── files and things that are no tables ──

CSV = "date,a,b\n" + "".join(f"{t},{i},{i / 4}\n" for i, t in enumerate(HOURS[:4]))

BAD_FILES = {
    "nothing": (b"", "0 bytes"),
    "blanks": (b"\n \n", "blanks"),
    "junk": (bytes(range(256)) * 4, "binary data"),
    "page": (b"<!DOCTYPE html><html></html>", "HTML"),
    "sheet": (b"PK\x03\x04abc", "spreadsheet"),
    "header only": (b"date,a\n", "empty"),
    "long row": (CSV.encode() + b"2024-01-01 04:00:00,1,2,3\n", "Expected 3 fields"),
    "cut row": (CSV.encode() + b"2024-01-01 04:0", r"1 of 3 fields in row 5.*complete"),
    "short header": (b"date,a\n2024-01-01,1,2\n", "2 names in its header, 3 fields"),
    "cut gzip": (gzip.compress(CSV.encode())[:-12], "cannot be read"),
    "same names": (CSV.replace("b\n", "a\n", 1).encode(), "'a' occurs twice"),
    "decimal comma": (CSV.replace(",", ";").replace(".", ",").encode(), "decimal comma"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_no_tables(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_table(path)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        read_table(tmp_path)
    with pytest.raises(DataError, match="there is no file"):
        read_table(tmp_path / "gone.csv")


@pytest.mark.parametrize(
    "source", [None, 3, [1.0], {"a": [1.0]}, np.ones((2, 2, 2)), np.float64(3)]
)
def test_things_that_are_no_tables(source: object) -> None:
    with pytest.raises(InputError, match=r"as a table|is no table"):
        read_table(source)
