"""Tables in and out: libraries, layouts, stamps, steps, files; the expected is built by hand."""

from __future__ import annotations

import datetime as dt
import decimal
import gzip
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from levelhead.base.errors import DataError, InputError, LevelheadWarning
from levelhead.data.tables import Table, read_table

VALUES = np.array([[1.0, 10.0], [2.5, 20.0], [4.0, 30.0], [8.0, 50.0]])
HOURS = pd.date_range("2024-01-01", periods=4, freq="h")


def wide(time: pd.Index = HOURS) -> pd.DataFrame:
    return pd.DataFrame({"date": time, "a": VALUES[:, 0], "b": VALUES[:, 1]})


def long() -> pd.DataFrame:
    """Series `a` has all four hours, `b` lacks the first and the last."""
    return pd.DataFrame(
        {
            "unique_id": ["b", "a", "a", "b", "a", "a"],
            "ds": HOURS[[1, 0, 1, 2, 2, 3]],
            "y": [20.0, 1.0, 2.5, 30.0, 4.0, 8.0],
        }
    )


SOURCES = {
    "column": wide,
    "index": lambda: wide().set_index("date"),
    "text": lambda: wide().astype({"date": str}),
    "polars": lambda: pl.DataFrame(wide()),
    "lazy": lambda: pl.DataFrame(wide()).lazy(),
    "arrow": lambda: pa.Table.from_pandas(wide()),
    "arrow-backed": lambda: wide().convert_dtypes(dtype_backend="pyarrow"),
    "nullable": lambda: wide().convert_dtypes(),
    "long": lambda: (
        wide().melt("date", var_name="unique_id", value_name="y").rename(columns={"date": "ds"})
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_library_and_layout_gives_the_same_table(name: str) -> None:
    table = read_table(SOURCES[name]())
    np.testing.assert_array_equal(table.values, VALUES)
    assert table.values.dtype == np.float64
    assert table.values.flags.c_contiguous
    assert table.channels == ("a", "b")
    assert table.time.tolist() == HOURS.tolist()
    assert table.step == pd.offsets.Hour()
    assert table.season == 24
    json.dumps({**asdict(table.form), "labels": None})


@pytest.mark.parametrize("name", ["column", "index", "polars", "lazy", "arrow", "nullable"])
def test_results_go_back_in_the_callers_library_and_layout(name: str) -> None:
    source = SOURCES[name]()
    table = read_table(source)
    back = table.frame(VALUES[:2] + 0.5, table.future(2))
    source = source.collect() if name == "lazy" else source
    assert type(back) is type(source)
    as_pandas = back if isinstance(back, pd.DataFrame) else back.to_pandas()
    as_pandas = as_pandas.reset_index() if name == "index" else as_pandas
    assert list(as_pandas.columns) == ["date", "a", "b"]
    assert as_pandas["date"].tolist() == [
        pd.Timestamp("2024-01-01 04:00"),
        pd.Timestamp("2024-01-01 05:00"),
    ]
    np.testing.assert_array_equal(as_pandas[["a", "b"]].to_numpy(float), VALUES[:2] + 0.5)


def test_polars_time_keeps_unit_zone_and_date_type_so_that_frames_concatenate() -> None:
    zoned = pl.DataFrame(wide()).with_columns(
        pl.col("date").cast(pl.Datetime("ms")).dt.replace_time_zone("Europe/Berlin")
    )
    dated = pl.DataFrame(
        {"date": [dt.date(2024, 1, d) for d in (29, 30, 31)], "a": [1.0, 2.0, 3.0]}
    )
    for source, width in ((zoned, 2), (dated, 1)):
        table = read_table(source)
        joined = pl.concat([source, table.frame(np.ones((1, width)), table.future(1))])
        assert joined.schema == source.schema
        assert joined["date"].is_sorted()
    assert joined["date"][-1] == dt.date(2024, 2, 1)


def test_long_goes_back_long_with_its_own_ids_and_column_order() -> None:
    days = pd.date_range("2024-01-01", periods=3)
    source = pl.DataFrame(
        {"ds": [*days, *days], "y": [1.0, 2, 3, 4, 5, 6], "unique_id": [7, 7, 7, 3, 3, 3]}
    )
    table = read_table(source)
    assert table.channels == ("7", "3")
    back = table.frame(np.array([[10.0, 20.0]]), table.future(1))
    assert isinstance(back, pl.DataFrame)
    assert back.select("unique_id", "y").rows() == [(7, 10.0), (3, 20.0)]
    assert back.schema == source.select(back.columns).schema


def test_arrays_stay_arrays_and_are_copied() -> None:
    table = read_table(array := VALUES.copy())
    assert table.channels == ("0", "1")
    assert table.time.equals(pd.RangeIndex(4))
    assert (table.step, table.season, table.future(2).tolist()) == (1, None, [4, 5])
    assert any("numbered from 0" in note for note in table.notes)
    array[:] = -1
    np.testing.assert_array_equal(table.values, VALUES)
    np.testing.assert_array_equal(table.frame(VALUES[:1], table.future(1)), VALUES[:1])
    flat = read_table(VALUES[:, 0])
    assert flat.values.shape == (4, 1)
    assert flat.frame(np.ones((2, 1)), flat.future(2)).shape == (2,)
    with pytest.raises(InputError, match=r"shape \[1, 2\]"):
        flat.frame(VALUES[:1], flat.future(1))


def test_series_with_names_of_every_kind() -> None:
    series = pd.Series(VALUES[:, 0], index=HOURS, name="load")
    back = read_table(series).frame(np.array([[3.0]]), read_table(series).future(1))
    pd.testing.assert_series_equal(
        back, pd.Series([3.0], index=HOURS[-1:] + HOURS.freq, name="load"), check_freq=False
    )
    frame = pd.DataFrame(np.ones((3, 4)).cumsum(0), columns=[0, "", None, ("x", 1)])
    table = read_table(frame)
    assert table.channels == ("0", "column 2", "column 3", "('x', 1)")
    assert table.frame(np.ones((1, 4)), table.future(1)).columns[0] == 0


def test_the_users_frame_is_never_changed() -> None:
    source = wide().iloc[::-1]
    source.loc[2, "a"] = np.nan
    before = source.copy(deep=True)
    read_table(source, missing="interpolate")
    pd.testing.assert_frame_equal(source, before)


def test_number_types_and_what_they_become() -> None:
    source = pd.DataFrame(
        {
            "flag": [True, False, True],
            "text": ["1.5", " 2 ", "-3e1"],
            "money": [decimal.Decimal("1.10"), 2, 3.5],
            "half": np.array([1, 2, 3], np.float16),
            "big": [2**53 + 1, 5, 6],
            "maybe": pd.array([1, 0, 1], dtype="boolean"),
        }
    )
    table = read_table(source)
    expected = [[1, 1.5, 1.1, 1, 2**53, 1], [0, 2, 2, 2, 5, 0], [1, -30, 3.5, 3, 6, 1]]
    np.testing.assert_array_equal(table.values, np.array(expected, float))
    assert any("'big'" in note and "2^53" in note for note in table.notes)


def test_channels_picks_and_orders_and_hints() -> None:
    source = wide().assign(name=["x", "y", "z", "w"])
    table = read_table(source, channels=["b", "a"])
    assert table.channels == ("b", "a")
    np.testing.assert_array_equal(table.values, VALUES[:, ::-1])
    assert read_table(table, channels="a").channels == ("a",)
    with pytest.raises(InputError, match=r"no channel 'aa': did you mean 'a'\?.*'a', 'b', 'name'"):
        read_table(source, channels=["aa"])
    with pytest.raises(InputError, match="asked for twice"):
        read_table(source, channels=["a", "a"])


def test_rows_are_views_and_select_keeps_labels() -> None:
    table = read_table(wide())
    part = table.rows(1, 3)
    assert np.shares_memory(part.values, table.values)
    assert part.time.tolist() == HOURS[1:3].tolist()
    assert part.future(1)[0] == HOURS[3]
    chosen = table.select(["b"])
    assert list(chosen.frame(np.ones((1, 1)), chosen.future(1)).columns) == ["date", "b"]


def test_a_table_is_returned_as_is_or_checked_again() -> None:
    table = read_table(wide())
    assert read_table(table) is table
    gappy = read_table(wide().drop(1), missing="keep")
    assert np.isnan(gappy.values[1]).all()
    assert read_table(gappy, missing="keep") is gappy
    with pytest.raises(DataError, match=r"'a' has 1 missing value.*--missing interpolate"):
        read_table(gappy)
    np.testing.assert_array_equal(read_table(gappy, missing="ffill").values[1], VALUES[0])


# ── long tables ──


def test_unequal_series_are_kept_row_for_row() -> None:
    table = read_table(long(), missing="keep")
    expected = np.array([[np.nan, 1.0], [20.0, 2.5], [30.0, 4.0], [np.nan, 8.0]])
    np.testing.assert_array_equal(table.values, expected)
    assert table.channels == ("b", "a")
    rows = sorted(table.to_long().itertuples(index=False, name=None))
    assert rows == sorted(long().itertuples(index=False, name=None))


def test_unequal_series_are_cut_to_what_they_share_and_said() -> None:
    with pytest.warns(
        LevelheadWarning,
        match=r"'b' start at 2024-01-01 01.* 'b' end at 2024-01-01 02.*2 rows of 6",
    ):
        table = read_table(long(), freq="h")
    np.testing.assert_array_equal(table.values, [[20.0, 2.5], [30.0, 4.0]])
    apart = pd.DataFrame({"unique_id": list("aabb"), "ds": HOURS, "y": 1.0})
    with pytest.raises(DataError, match=r"share no span.*'b' starts.*'a' ends"):
        read_table(apart)


def test_a_kept_long_table_is_cut_when_it_is_checked_again() -> None:
    kept = read_table(long(), missing="keep")
    with pytest.warns(LevelheadWarning, match="2 rows of 6 lost"):
        table = read_table(kept, freq="h")
    np.testing.assert_array_equal(table.values, [[20.0, 2.5], [30.0, 4.0]])


def test_long_needs_its_names_and_says_what_it_leaves_out() -> None:
    with pytest.raises(DataError, match=r"'unique_id', 'ds', 'y'.*'date', 'a', 'b'"):
        read_table(wide(), layout="long")
    with pytest.warns(LevelheadWarning, match="'price'"):
        read_table(SOURCES["long"]().assign(price=1.0))
    ahead = SOURCES["long"]().assign(price=1.0)
    ahead.loc[ahead["ds"] == HOURS[-1], "y"] = np.nan
    with pytest.raises(DataError, match="known-future covariates"):
        read_table(ahead)


def test_long_index_and_repeats_within_a_series() -> None:
    table = read_table(SOURCES["long"]().set_index(["unique_id", "ds"]))
    np.testing.assert_array_equal(table.values, VALUES)
    twice = pd.concat([SOURCES["long"](), SOURCES["long"]().iloc[[5]].assign(y=40.0)])
    with pytest.raises(DataError, match=r"of series 'b' in row 9 is a duplicate of row 6"):
        read_table(twice)
    assert read_table(twice, duplicates="mean").values[1, 1] == 30.0


# ── stamps and steps ──

STEPS = {
    "h": 24, "30min": 48, "15min": 96, "10min": 144, "min": 1440, "D": 7, "B": 5, "W-SUN": 52,
    "W-WED": 52, "MS": 12, "ME": 12, "QS-JAN": 4, "QE-DEC": 4, "YS-JAN": None, "7s": None,
    "36h": None, "2D": None, "BME": 12,
}  # fmt: skip


@pytest.mark.parametrize("zone", [None, "Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize("freq", STEPS)
def test_steps_are_inferred_also_with_gaps_and_continue(freq: str, zone: str | None) -> None:
    full = pd.date_range("2023-10-02", periods=63, freq=freq, tz=zone)
    source = pd.DataFrame({"a": np.arange(60.0)}, index=full[:60])
    table = read_table(source)
    assert table.season == STEPS[freq]
    assert table.future(3).tolist() == full[60:].tolist()
    filled = read_table(source.drop(full[[7, 8, 30]]), missing="interpolate")
    assert filled.time.tolist() == full[:60].tolist()
    np.testing.assert_allclose(filled.values[:, 0], np.arange(60.0), rtol=1e-14)


def test_clock_steps_are_absolute_and_days_are_calendar_days() -> None:
    zone = "Europe/Berlin"  # 2024-03-31: 02:00 does not exist; 2024-10-27: 02:00 twice
    for day, hours in (("2024-03-31", 23), ("2024-10-27", 25)):
        last = pd.DatetimeIndex(pd.date_range(end=pd.Timestamp(day, tz=zone), periods=5, freq="h"))
        table = read_table(pd.DataFrame({"a": np.arange(5.0)}, index=last))
        following = table.future(hours)
        assert following[-1] == pd.Timestamp(day, tz=zone) + pd.DateOffset(days=1)
        assert following.is_unique
        days = pd.date_range(end=day, periods=5, tz=zone)
        ahead = read_table(pd.DataFrame({"a": np.arange(5.0)}, index=days)).future(2)
        assert [str(t.time()) for t in ahead] == ["00:00:00"] * 2


def test_days_whose_midnight_is_skipped_are_regular() -> None:
    wall = pd.date_range("2017-10-10", periods=10)  # São Paulo skipped 2017-10-15 00:00
    days = pd.DatetimeIndex(wall, freq=None).tz_localize(
        "America/Sao_Paulo", nonexistent="shift_forward"
    )
    assert read_table(pd.DataFrame({"a": np.arange(10.0)}, index=days)).season == 7
    before = read_table(pd.DataFrame({"a": np.arange(4.0)}, index=days[:4])).future(3)
    assert before.tolist() == days[4:7].tolist()


def test_month_ends_and_mid_months() -> None:
    ends = pd.DataFrame({"date": ["2023-11-30", "2023-12-31", "2024-01-31"], "a": [1.0, 2, 3]})
    assert [str(t.date()) for t in read_table(ends).future(2)] == ["2024-02-29", "2024-03-31"]
    mids = pd.DataFrame({"date": ["2023-11-15", "2023-12-15", "2024-01-15"], "a": [1.0, 2, 3]})
    table = read_table(mids)
    assert table.season == 12
    assert [str(t.date()) for t in table.future(2)] == ["2024-02-15", "2024-03-15"]


READABLE = {
    "short": (["1990/1/1 0:00", "1990/1/2 0:00", "1990/1/3 0:00"], "1990-01-03 00:00:00"),
    "iso": (["2024-01-01T00:00", "2024-01-01T01:00", "2024-01-01T02:00"], "2024-01-01 02:00:00"),
    "offset": ([f"2024-01-01 0{i}:00+02:00" for i in range(3)], "2024-01-01 02:00:00+02:00"),
    "zulu": ([f"2024-01-01T0{i}:00:00Z" for i in range(3)], "2024-01-01 02:00:00+00:00"),
    "change of clocks": (
        ["2024-03-31T00:00+01:00", "2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00"],
        "2024-03-31 01:00:00+00:00",
    ),
    "days over a change": (
        ["2024-03-30T00:00+01:00", "2024-03-31T00:00+01:00", "2024-04-01T00:00+02:00"],
        "2024-04-01 00:00:00",
    ),
    "German": (["30.01.2024", "31.01.2024", "01.02.2024"], "2024-02-01 00:00:00"),
    "day first": (["30/01/2024", "31/01/2024", "01/02/2024"], "2024-02-01 00:00:00"),
    "regular only by day": (
        ["10/11/2024", "11/11/2024", "12/11/2024", "13/11/2024"],
        "2024-11-13 00:00:00",
    ),
    "month name": (["Nov 2023", "Dec 2023", "Jan 2024"], "2024-01-01 00:00:00"),
    "no midnights": (["2024-01-01 22:00", "2024-01-01 23:00", "2024-01-02"], "2024-01-02 00:00:00"),
}


@pytest.mark.parametrize("name", READABLE)
def test_stamps_as_text(name: str) -> None:
    texts, last = READABLE[name]
    table = read_table(pd.DataFrame({"when": texts, "a": np.arange(len(texts)) * 1.0}))
    assert str(table.time[-1]) == last


BAD_STAMPS = {
    "word": (["2024-01-01", "2024-01-02", "soon", "later"], r"'soon'.*row 3 \(2 such rows"),
    "mixed": (["2024-01-01", "2024-01-02", "03/01/2024"], r"'03/01/2024'.*row 3"),
    "none": (["2024-01-01", None, "2024-01-03"], r"no stamp in row 2"),
    "half offset": (
        ["2024-01-01 00:00+01:00", "2024-01-01 01:00", "2024-01-01 02:00"],
        r"without a UTC offset.*row 2",
    ),
    "late offset": (
        ["2024-01-01 00:00", "2024-01-01 01:00+01:00", "2024-01-01 02:00"],
        r"zoned unlike row 1.*row 2",
    ),
    "objects": (
        [dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 2, tzinfo=dt.UTC), dt.datetime(2024, 1, 3)],
        r"mixes zones: 2024-01-02.* in row 2",
    ),
    "either": (["01/01/2024", "02/01/2024", "03/01/2024"], r"day or the month first"),
}


@pytest.mark.parametrize("name", BAD_STAMPS)
def test_stamps_that_cannot_be_read(name: str) -> None:
    texts, message = BAD_STAMPS[name]
    source = pd.DataFrame({"date": texts, "a": np.arange(len(texts)) * 1.0})
    with pytest.raises(DataError, match=message):
        read_table(source)
    assert read_table(source, time="ignore").time.equals(pd.RangeIndex(len(texts)))


def test_whole_number_stamps() -> None:
    table = read_table(pd.DataFrame({"time": [10, 12, 14], "a": [1.0, 2, 3]}))
    assert (table.step, table.future(2).tolist()) == (2, [16, 18])
    days = read_table(pd.DataFrame({"date": [20240130, 20240131, 20240201], "a": [1.0, 2, 3]}))
    assert (days.season, str(days.future(1)[0].date())) == (7, "2024-02-02")
    part = read_table(pd.DataFrame({"a": np.arange(9.0)}).iloc[5:])
    assert part.future(1).tolist() == [9]
    with pytest.raises(DataError, match=r"holds 2\.5"):
        read_table(pd.DataFrame({"time": [1, 2.5, 3], "a": [1.0, 2, 3]}))


def test_freq_is_checked_against_the_stamps() -> None:
    assert read_table(wide().head(2), freq="h").step == pd.offsets.Hour()
    with pytest.raises(DataError, match=r"2 rows; pass freq="):
        read_table(wide().head(2))
    with pytest.raises(DataError, match=r"row 2 .*freq='2h' does not reach.*suggest freq='h'"):
        read_table(wide(), freq="2h")
    with pytest.raises(DataError, match=r"3 rows at 3 gaps.*after row 1 .*suggest freq='h'"):
        read_table(wide(), freq="30min")
    with pytest.raises(InputError, match="no step for stamps"):
        read_table(wide(), freq=1)
    with pytest.raises(InputError, match="is not a frequency"):
        read_table(wide(), freq="often")
    mondays = pd.date_range("2024-01-01", periods=4, freq="7D")
    assert read_table(wide(mondays), freq="W").future(1)[0] == pd.Timestamp("2024-01-29")
    with pytest.raises(InputError, match="missing='guess' is unknown"):
        read_table(wide(), missing="guess")  # type: ignore[arg-type]


# ── files ──


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


CSV = "date,a,b\n" + "".join(f"{t},{x},{y}\n" for t, (x, y) in zip(HOURS, VALUES, strict=True))

GOOD_FILES = {
    "plain": CSV.encode(),
    "crlf": CSV.replace("\n", "\r\n").encode(),
    "bom": b"\xef\xbb\xbf" + CSV.encode(),
    "utf-16": CSV.encode("utf-16"),
    "semicolons": CSV.replace(",", ";").encode(),
    "tabs": CSV.replace(",", "\t").encode(),
    "spaces": CSV.replace(",", ", ").encode(),
    "gzip": gzip.compress(CSV.encode()),
    "delimiter at the end": CSV.replace("\n", ",\n").encode(),
    "saved index": wide().to_csv().encode(),
    "blank lines": CSV.replace("\n", "\n\n").encode(),
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_csv_dialects(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "table.csv", GOOD_FILES[name])
    table = read_table(path)
    assert table.channels == ("a", "b")
    np.testing.assert_array_equal(table.values, VALUES)
    assert table.time.tolist() == HOURS.tolist()
    back = table.frame(VALUES[:1], table.future(1))
    assert isinstance(back, pd.DataFrame)
    assert list(back.columns) == ["date", "a", "b"]


def test_latin_1_and_headless_files(tmp_path: Path) -> None:
    path = write(
        tmp_path / "l.csv", CSV.replace("a", "µ/m²", 2).replace("dµ/m²te", "date").encode("latin-1")
    )
    assert read_table(str(path)).channels == ("µ/m²", "b")
    bare = write(tmp_path / "bare.txt", "0.5,1.5\n0.25,2\n0.125,3\n")
    np.testing.assert_array_equal(read_table(bare).values, [[0.5, 1.5], [0.25, 2], [0.125, 3]])
    dated = write(tmp_path / "dated.csv", CSV.split("\n", 1)[1])
    np.testing.assert_array_equal(read_table(dated).values, VALUES)


def test_parquet_and_its_missing_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.Table.from_pandas(wide()), path := tmp_path / "t.parquet")
    np.testing.assert_array_equal(read_table(path).values, VALUES)
    write(tmp_path / "cut.parquet", path.read_bytes()[:-40])
    with pytest.raises(DataError, match="not a complete Parquet file"):
        read_table(tmp_path / "cut.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"pip install 'levelhead\[parquet\]'"):
        read_table(path)


# ── real files ──


def test_real_files(real_data: Path) -> None:
    ett = read_table(real_data / "ETTh1.csv")
    assert (ett.values.shape, ett.season) == ((17420, 7), 24)
    assert ett.values[0, 0] == 5.827000141143799
    rates = read_table(real_data / "exchange_rate.csv")
    assert (rates.values.shape, rates.season, rates.channels[0]) == ((7588, 8), 7, "0")
    with (
        pytest.warns(LevelheadWarning, match=r"-9999.*'OT' \(50 cells, first in row 7245"),
        pytest.raises(
            DataError, match="2020-05-12 06:00:00 in row 19045 is a duplicate of row 19044"
        ),
    ):
        read_table(real_data / "weather.csv")
    plain = read_table(real_data / "weather.csv", time="ignore", sentinels="keep")
    assert plain.values.shape == (52696, 21)
    assert (plain.values == -9999).sum() == 81
    assert isinstance(plain, Table)
