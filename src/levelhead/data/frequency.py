"""The step of an index: inferred, named, checked against the stamps, and the stamps that follow.

Conventions: an index is a `pd.DatetimeIndex` (naive or tz-aware) or an integer `pd.Index`; a step
is a pandas offset for the former, an `int` for the latter. A *clock* step (hours, minutes, …) is
regular in absolute time, so a day of a daylight-saving change has 23 or 25 hourly rows; a
*calendar* step (days, weeks, months, …) is regular on the wall clock of the index's own zone.

>>> hours = pd.date_range("2024-03-31", periods=4, freq="h", tz="Europe/Berlin")
>>> [str(t.time()) for t in hours]  # 02:00 does not exist that day
['00:00:00', '01:00:00', '03:00:00', '04:00:00']
>>> following(pd.DatetimeIndex(["2024-01-31"]), pd.offsets.MonthEnd(), 2).day.tolist()
[29, 31]
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Any, TypeAlias, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.tseries.frequencies import to_offset

from levelhead.base.errors import InputError

__all__ = [
    "Floats",
    "Ints",
    "Step",
    "dst_days",
    "dst_gap",
    "dst_repeat",
    "following",
    "infer_step",
    "is_regular",
    "local_days",
    "off_grid",
    "parse_step",
    "positions",
    "season_of",
    "step_name",
    "wall_clock",
]

Step: TypeAlias = "pd.tseries.offsets.BaseOffset | int"
Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_HOUR, _DAY = pd.Timedelta(hours=1), pd.Timedelta(days=1)
_ZERO = ("None", "UTC")  # how a zone reads that may hold stamps put in UTC
_OLD_ALIASES = {"M": "ME", "Q": "QE", "Y": "YE", "A": "YE", "H": "h", "T": "min", "S": "s"}


# ── steps ───────────────────────────────────────────────────────────────────────────────────────


def _is_calendar(step: Step) -> bool:
    # pandas 2 counts Day among the ticks, pandas 3 does not; for us it is a calendar day in both
    return isinstance(step, pd.offsets.Day) or not isinstance(step, (int, pd.offsets.Tick))


def step_name(step: Step) -> str:
    """Name a step the way `freq=` takes it.

    >>> step_name(pd.offsets.Hour(2)), step_name(pd.DateOffset(months=1)), step_name(3)
    ('2h', 'months=1', '3')
    """
    if isinstance(step, int):
        return str(step)
    found = re.fullmatch(r"<(?:\d+ \* )?DateOffsets?: (.*)>", str(step))
    return found[1] if found else str(step.freqstr)


def parse_step(freq: object, time: pd.Index | None = None) -> Step:
    """Turn a user's `freq` into a step; `time`, when given, must be of the same kind.

    Takes pandas aliases (`"h"`, `"15min"`, `"D"`, `"B"`, `"MS"`; also the retired `"H"`, `"M"`),
    offsets, timedeltas, whole numbers and the names `step_name` writes; `"W"` takes the weekday
    of the first stamp. Raises `InputError` for anything else, or for a step that is not positive.

    >>> parse_step("15min")
    <15 * Minutes>
    """
    whole = isinstance(freq, (int, np.integer)) and not isinstance(freq, bool)
    if time is not None and whole == isinstance(time, pd.DatetimeIndex):
        kind, like = ("dates", "'h' or 'D'") if whole else ("whole numbers", "1")
        raise InputError(
            f"freq={freq!r} is no step for stamps that are {kind}; give one like {like}"
        )
    if whole:
        if int(cast(int, freq)) < 1:
            raise InputError(f"freq={freq!r} is not a positive whole number of units per row")
        return int(cast(int, freq))
    step = _offset(freq)
    somewhen = pd.Timestamp(2024, 1, 3)
    if not somewhen + step > somewhen:
        raise InputError(f"freq={freq!r} does not move forward in time")
    if freq == "W" and isinstance(time, pd.DatetimeIndex) and len(time):
        return pd.offsets.Week(weekday=int(time[0].weekday()))
    return step


def _offset(freq: object) -> pd.tseries.offsets.BaseOffset:
    if isinstance(freq, str):
        if match := re.fullmatch(r"(months|years)=(\d+)", freq):
            return pd.DateOffset(**{match[1]: int(match[2])})  # type: ignore[arg-type]
        if match := re.fullmatch(r"(\d*)([MQYAHTS])", freq):
            freq = match[1] + _OLD_ALIASES[match[2]]
    # the clock's 24 hours are written "24h"; a timedelta of whole days means calendar days
    if isinstance(freq, dt.timedelta) and freq % dt.timedelta(days=1) == dt.timedelta(0):
        return pd.offsets.Day(freq // dt.timedelta(days=1))
    try:
        step = to_offset(cast(Any, freq))
    except (ValueError, TypeError):
        step = None
    if step is None:
        raise InputError(
            f"freq={freq!r} is not a frequency: give one like 'h', '15min', 'D', 'B', 'W', 'MS', "
            f"'ME' or 'QS', or a whole number for integer stamps"
        )
    return cast(pd.tseries.offsets.BaseOffset, step)


def season_of(step: Step) -> int | None:
    """Rows in the default season of a step; None where no season is customary.

    A day for clock steps of whole minutes that divide it, a week for days and business days,
    a year for weeks, months and quarters.

    >>> season_of(pd.offsets.Minute(15)), season_of(pd.offsets.BDay()), season_of(7)
    (96, 5, None)
    """
    if isinstance(step, int):
        return None
    if not _is_calendar(step):
        minutes, rest = divmod(int(step.nanos), 60_000_000_000)
        if rest or minutes == 0 or 1440 % minutes:
            return None
        return 7 if minutes == 1440 else 1440 // minutes
    if isinstance(step, pd.offsets.Day):
        return {1: 7, 7: 52}.get(step.n)
    if isinstance(step, (pd.offsets.BusinessDay, pd.offsets.Week)):
        season = 52 if isinstance(step, pd.offsets.Week) else 5
        return season if step.n == 1 else None
    months = getattr(step, "kwds", {}).get("months", 0) * step.n
    if not months:
        rule = str(step.rule_code)
        months = step.n * (3 if "Q" in rule else 1 if "M" in rule and "Y" not in rule else 0)
    return {1: 12, 3: 4}.get(months)


# ── the grid a step spans ───────────────────────────────────────────────────────────────────────


def _ticks(time: pd.DatetimeIndex) -> tuple[Ints, int]:
    """Absolute time as integers, and how many nanoseconds one unit is."""
    if time.unit != "ns":
        return np.asarray(time.as_unit("us").asi8, np.int64), 1000
    return np.asarray(time.asi8, np.int64), 1


def wall_clock(time: pd.DatetimeIndex) -> pd.DatetimeIndex:
    """Stamps [T] as clocks on the wall show them, without a zone."""
    return time.tz_localize(None) if time.tz is not None else time


def _localise(wall: pd.DatetimeIndex, tz: Any) -> pd.DatetimeIndex:
    """Wall time put in zone `tz`: skipped times move forward, repeated ones are the first."""
    wall = pd.DatetimeIndex(wall, freq=None)  # type: ignore[arg-type]  # a freq would be checked
    if tz is None:
        return wall
    first = np.ones(len(wall), dtype=bool)
    return wall.tz_localize(tz, ambiguous=first, nonexistent="shift_forward")


def following(time: pd.Index, step: Step, count: int) -> pd.Index:
    """The `count` stamps [count] that follow the last one of `time`, one `step` apart.

    >>> following(pd.RangeIndex(5), 1, 3).tolist()
    [5, 6, 7]
    """
    if isinstance(step, int):
        last = int(time[-1])
        return pd.RangeIndex(last + step, last + step * (count + 1), step)
    time = cast(pd.DatetimeIndex, time)
    end = time[-1:]
    if not _is_calendar(step):
        moves = pd.to_timedelta(np.arange(1, count + 1) * int(step.nanos), unit="ns")
        ahead = end.repeat(count) + moves
    else:
        wall = pd.date_range(wall_clock(end)[0], periods=count + 1, freq=step)
        # a last stamp that is off the step's own anchor is not part of the range
        wall = wall[1:] if wall[0] == wall_clock(end)[0] else wall[:count]
        ahead = _localise(pd.DatetimeIndex(wall), time.tz)
    # a step finer than the unit of the stamps needs the finer unit
    finer = not _is_calendar(step) and step.nanos % pd.Timedelta(1, unit=time.unit).value
    return ahead if finer else ahead.as_unit(time.unit)


def positions(time: pd.Index, step: Step) -> Ints:
    """Row of each stamp [T] on the grid that starts at the first one; -1 for stamps off the grid.

    `time` is sorted and free of repeats. A regular index gives 0, 1, …, T-1; a gap is a jump.
    """
    if len(time) == 0:
        return np.zeros(0, np.int64)
    if _is_calendar(step):
        return _calendar_positions(cast(pd.DatetimeIndex, time), cast(Any, step))
    ticks, size = _scaled(time, step)
    at, rest = np.divmod(ticks - ticks[0], size)
    return np.where(rest == 0, at, -1)


def off_grid(time: pd.Index, step: Step, at: Ints) -> NDArray[np.bool_]:
    """Rows [T] off the grid; `at` [T] are their `positions`.

    Clock steps are judged from the row before, as the first stamp may be the one at fault.
    """
    off = np.asarray(at < 0, bool)
    if not _is_calendar(step):
        ticks, size = _scaled(time, step)
        off[1:] = (ticks[1:] - ticks[:-1]) % size != 0
    return off


def _scaled(time: pd.Index, step: Step) -> tuple[Ints, int]:
    """Stamps [T] and a clock or whole-number step as integers of one unit."""
    if isinstance(step, int):
        return np.asarray(time, np.int64), step
    ticks, nanos = _ticks(cast(pd.DatetimeIndex, time))
    if step.nanos % nanos:
        return ticks * nanos, int(step.nanos)
    return ticks, int(step.nanos) // nanos


def _calendar_positions(time: pd.DatetimeIndex, step: pd.tseries.offsets.BaseOffset) -> Ints:
    wall = wall_clock(time)
    grid = pd.date_range(wall[0], wall[-1], freq=step)
    if len(grid) == 0 or grid[0] != wall[0]:
        # a first stamp moved by a skipped hour: start from the time of day of the others
        day, usual = wall[0].normalize(), wall[-1] - wall[-1].normalize()
        grid = pd.date_range(day + usual, wall[-1], freq=step)
    grid = wall_clock(_localise(grid, time.tz))
    at = np.asarray(grid.get_indexer(wall), np.int64)
    return at if at.size and at[0] == 0 else np.full(len(time), -1, np.int64)


def infer_step(time: pd.Index) -> Step:
    """The step that most rows of a sorted index without repeats are apart; it takes three dates.

    Calendar steps (month starts and ends, quarters, years, weeks, business days, days) are tried
    on the wall clock first, and gaps do not hide them. The step returned need not fit every row:
    `positions` tells.

    >>> infer_step(pd.DatetimeIndex(["2024-01-31", "2024-02-29", "2024-03-31", "2024-05-31"]))
    <MonthEnd>
    """
    if not isinstance(time, pd.DatetimeIndex):
        return max(1, _usual(np.asarray(time, np.int64)))
    days = local_days(time)
    if days is not None:
        apart = _usual(np.asarray(days.as_unit("s").asi8, np.int64) // 86_400)
        for step in _calendar_steps(days, apart):
            if np.all(_calendar_positions(days, step) >= 0):
                return step
        return pd.offsets.Day(max(1, apart))
    ticks, nanos = _ticks(time)
    return to_offset(pd.Timedelta(_usual(ticks) * nanos, unit="ns"))


def is_regular(time: pd.Index) -> bool:
    """Whether the stamps, sorted and without repeats, are three or more, one step apart."""
    unique = time.unique().sort_values()
    return len(unique) > 2 and bool(
        np.array_equal(positions(unique, infer_step(unique)), np.arange(len(unique)))
    )


def _usual(ticks: Ints) -> int:
    """The commonest difference of neighbours, the smallest of equals."""
    values, counts = np.unique(ticks[1:] - ticks[:-1], return_counts=True)
    return int(values[np.argmax(counts)])


def local_days(time: pd.DatetimeIndex) -> pd.DatetimeIndex | None:
    """The days [T] of stamps that fall on one wall-clock time per day at most, else None."""
    wall = wall_clock(time)
    days = wall.normalize()
    if not days.is_unique:
        return None
    usual = (wall - days).value_counts().index[0]
    same = wall_clock(_localise(pd.DatetimeIndex(days + usual), time.tz)) == wall
    return days if bool(np.all(same)) else None


def _calendar_steps(days: pd.DatetimeIndex, apart: int) -> list[pd.tseries.offsets.BaseOffset]:
    """Calendar steps worth trying for days that are usually `apart` days apart, likeliest first."""
    tried: list[pd.tseries.offsets.BaseOffset] = []
    months = round(apart / 30.4375)
    weekday = int(days[0].weekday())
    if months and abs(apart - 30.4375 * months) < 5:
        tried += _month_steps(days, months)
    elif apart == 7:
        tried.append(pd.offsets.Week(weekday=weekday))
    elif apart == 1 and (days[-1] - days[0]).days + weekday >= 7:
        # no stamp on any weekend that the table spans: a working week, holidays or not
        tried += [pd.offsets.BDay()] * bool(np.all(days.day_of_week < 5))
    return [*tried, pd.offsets.Day(max(1, apart))]


def _month_steps(days: pd.DatetimeIndex, months: int) -> list[pd.tseries.offsets.BaseOffset]:
    """Steps of `months` months; those fixed to a day of the month only where that day is seen."""
    month, day = int(days[0].month), int(days[0].day)
    off = pd.offsets
    kinds: list[Any] = [off.MonthBegin, off.MonthEnd, off.BMonthBegin, off.BMonthEnd]
    anchor: dict[str, int] = {}
    if months == 3:
        kinds = [off.QuarterBegin, off.QuarterEnd, off.BQuarterBegin, off.BQuarterEnd]
        anchor = {"startingMonth": (month - 1) % 3 + 1}
    elif months == 12:
        kinds = [off.YearBegin, off.YearEnd, off.BYearBegin, off.BYearEnd]
        anchor = {"month": month}
    steps = [kind(1 if anchor else months, **anchor) for kind in kinds]
    if day <= 28 and bool(np.all(days.day == day)):
        steps.insert(2, pd.DateOffset(months=months))
    nth_weekday = off.WeekOfMonth(n=months, week=min(3, (day - 1) // 7), weekday=days[0].weekday())
    return [*steps, nth_weekday]


# ── daylight saving written on a wall clock ─────────────────────────────────────────────────────

_DST = (
    "; this looks like a change of daylight-saving time written on the wall clock: give "
    "time-zone-aware or UTC stamps"
)


_UTC_DAYS = (
    "; this looks like the midnights of a zone with daylight-saving time, stored in UTC: give the "
    "local dates, or stamps converted to that zone"
)


def _may_change(stamp: pd.Timestamp) -> bool:
    # nearly every zone changes on a Sunday of these months, before four in the morning
    return stamp.weekday() == 6 and stamp.month in (3, 4, 9, 10, 11) and stamp.hour <= 4


def dst_repeat(time: pd.Index, repeated: pd.Index) -> str:
    """A hint, or "", whether the stamps `repeated` in `time` are the hour that clocks go back."""
    if not isinstance(time, pd.DatetimeIndex) or time.tz is not None or len(time) < 3:
        return ""
    stamps = pd.DatetimeIndex(repeated)
    apart = pd.Timedelta(_usual(_ticks(time.unique().sort_values())[0]), unit="us")
    if time.unit == "ns":
        apart = apart / 1000
    if not pd.Timedelta(0) < apart <= _HOUR or not all(_may_change(t) for t in stamps):
        return ""
    per_day = stamps.unique().normalize().value_counts()
    return _DST if bool(np.all(per_day * apart == _HOUR)) else ""


def dst_gap(before: object, after: object, step: Step) -> str:
    """A hint, or "", whether the gap between two neighbours is the hour that clocks skip."""
    if not (isinstance(before, pd.Timestamp) and isinstance(after, pd.Timestamp)):
        return ""
    if before.tz is not None or _is_calendar(step) or pd.Timedelta(cast(Any, step)) > _HOUR:
        return ""
    skipped = after - before - pd.Timedelta(cast(Any, step)) == _HOUR
    return _DST if skipped and _may_change(after) else ""


def dst_days(time: pd.Index) -> str:
    """A hint, or "", whether the stamps are daily midnights of a zone that changes its clocks.

    >>> midnights = pd.date_range("2024-03-29", periods=4, tz="Europe/Berlin").tz_convert("UTC")
    >>> dst_days(midnights)[:39]
    '; this looks like the midnights of a zo'
    """
    if not isinstance(time, pd.DatetimeIndex) or len(time) < 3 or str(time.tz) not in _ZERO:
        return ""
    of_day = (time - time.normalize()).unique()
    if len(of_day) != 2 or (of_day[0] - of_day[1]) % _DAY not in (_HOUR, _DAY - _HOUR):
        return ""
    past = (time[1:] - time[:-1]) % _DAY
    moved = np.asarray(past != pd.Timedelta(0), bool)
    # where clocks change on a Sunday, the next local midnight is still Sunday or Monday in UTC
    likely = all(t.weekday() in (6, 0) and t.month in (3, 4, 9, 10, 11) for t in time[1:][moved])
    alone = not bool(np.any(moved[1:] & moved[:-1]))  # a single odd stamp moves there and back
    return _UTC_DAYS if likely and alone else ""
