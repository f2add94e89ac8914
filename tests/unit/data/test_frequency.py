"""Hints where a step does not fit: what the sentence says, and that it stays silent elsewhere."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from levelhead.base.errors import DataError
from levelhead.data.frequency import dst_days
from levelhead.data.tables import read_table

STORED = "midnights of a zone with daylight-saving time, stored in UTC"


def midnights(zone: str, start: str, days: int = 20) -> pd.DatetimeIndex:
    return pd.date_range(start, periods=days, tz=zone).tz_convert("UTC")


@pytest.mark.parametrize("naive", [False, True])
@pytest.mark.parametrize("freq", [None, "D"])
@pytest.mark.parametrize(
    ("zone", "start"),
    [
        ("Europe/Berlin", "2024-03-25"),  # forward
        ("Europe/Berlin", "2024-10-20"),  # back
        ("America/New_York", "2024-03-05"),
        ("Australia/Sydney", "2024-04-01"),
        ("Europe/London", "2024-03-25"),  # between 00:00 and 23:00 of the day before
    ],
)
def test_local_midnights_stored_in_utc_are_recognised(
    zone: str, start: str, freq: str | None, naive: bool
) -> None:
    time = midnights(zone, start)
    frame = pd.DataFrame({"date": time.tz_localize(None) if naive else time, "a": np.arange(20.0)})
    with pytest.raises(DataError, match=STORED):
        read_table(frame, freq=freq)


def test_local_midnights_in_their_own_zone_are_regular() -> None:
    time = midnights("Europe/Berlin", "2024-03-25").tz_convert("Europe/Berlin")
    table = read_table(pd.DataFrame({"date": time, "a": np.arange(20.0)}))
    assert table.step == pd.offsets.Day()
    assert len(table) == 20


def test_one_odd_stamp_is_not_taken_for_a_change_of_clocks() -> None:
    time = pd.date_range("2024-03-25", periods=20).to_numpy().copy()
    time[6] += np.timedelta64(1, "h")  # the Sunday of the change
    with pytest.raises(DataError, match="rows are irregular in time") as caught:
        read_table(pd.DataFrame({"date": time, "a": np.arange(20.0)}))
    assert "stored in UTC" not in str(caught.value)


@pytest.mark.parametrize(
    "time",
    [
        pd.date_range("2024-01-01", periods=20, tz="UTC"),
        pd.date_range("2024-03-25", periods=200, freq="h", tz="UTC"),
        pd.date_range("2024-03-25", periods=20, tz="Europe/Berlin"),
        midnights("Europe/Berlin", "2024-06-01") + pd.to_timedelta(np.arange(20) // 10, unit="h"),
        pd.RangeIndex(20),
    ],
    ids=["no change", "hours", "own zone", "June", "numbers"],
)
def test_no_hint_elsewhere(time: pd.Index) -> None:
    assert dst_days(time) == ""
