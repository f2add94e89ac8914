"""Time stamps as they stand in a column: typed, objects, whole numbers or text in many formats.

Dates become a `pd.DatetimeIndex`, whole numbers an integer index; nothing is guessed where day and
month could be swapped, and one clear sentence names what cannot be read.

>>> import pandas as pd
>>> parse_stamps(pd.Series(["31.01.2024", "01.02.2024"]), "day")[0].day.tolist()
[31, 1]
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.api import guess_datetime_format

from levelhead.base.errors import DataError
from levelhead.data.frequency import is_regular, local_days, wall_clock

__all__ = ["is_text", "looks_like_dates", "parse_stamps"]

_NUMERIC = re.compile(
    r"\s*(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})"
    r"(?:(T|\s)(\d{1,2}):\d{2}(:\d{2})?(\.\d+)?(\s?[AaPp][Mm])?)?\s*"
)
_ZONE = r":\d{2}(?:[.,]\d+)?\s*([Zz]|[+-]\d{2}(?::?\d{2})?)\s*$"


def _formats(text: str) -> list[str]:
    """The formats `text` may be written in; two when day and month could be swapped."""
    found = _NUMERIC.fullmatch(text)
    if found is None:
        orders = ("%d %b %Y", "%d %B %Y", "%d %b %y", "%b %Y", "%B %Y", "%b %y")
        forms = [form.replace(" ", mark) for mark in " -" for form in orders]
        named = [f for f in forms if not pd.isna(pd.to_datetime(text, format=f, errors="coerce"))]
        guessed = guess_datetime_format(text)
        return named[:1] or ([guessed] if guessed else [])
    first, mark, _, last, middle, _, seconds, fraction, half = found.groups()
    if len(first) == 4:
        dates = [f"%Y{mark}%m{mark}%d"]
    else:
        year = "%Y" if len(last) == 4 else "%y"
        dates = [f"%d{mark}%m{mark}{year}"]
        dates = dates if mark == "." else [f"%m{mark}%d{mark}{year}", *dates]
    clock = ""
    if middle:
        clock = middle + ("%I:%M" if half else "%H:%M")
        clock += (":%S" if seconds else "") + (".%f" if fraction else "")
        clock += {0: "", 2: "%p", 3: " %p"}[len(half or "")]
    return [date + clock for date in dates]


def is_text(column: pd.Series[Any]) -> bool:
    """Whether a column may hold text: strings or any Python objects."""
    types = pd.api.types
    return types.is_object_dtype(column.dtype) or types.is_string_dtype(column.dtype)


def looks_like_dates(column: pd.Series[Any]) -> bool:
    """Whether most of a column's first values are dates, as objects or as text."""
    if not is_text(column):
        return False
    sample = column.dropna().head(20).tolist()
    found = [isinstance(v, dt.date) or (isinstance(v, str) and _is_date(v)) for v in sample]
    return sum(found) * 2 > len(found)


def _is_date(text: str) -> bool:
    try:
        float(text)  # "2020" and "20200101" are numbers unless the column's name says otherwise
    except ValueError:
        read = [pd.to_datetime(text, format=f, errors="coerce") for f in _formats(text)]
        return re.search(_ZONE, text) is not None or not all(pd.isna(stamp) for stamp in read)
    return False


def parse_stamps(column: pd.Series[Any], name: Hashable) -> tuple[pd.Index, list[str]]:
    """Stamps [n] of a column, in its order, and notes on what was understood.

    Dates (typed, objects or text) become a `DatetimeIndex`, whole numbers an integer index, whole
    numbers that all read as YYYYMMDD dates. Raises `DataError` naming the column, the first bad
    row and the count for stamps that are missing, unreadable, ambiguous or of mixed formats.
    """
    if column.isna().any():
        _complain(name, column.isna(), lambda i: "holds no stamp")
    kind = column.dtype
    if isinstance(kind, pd.PeriodDtype):
        return pd.PeriodIndex(column).to_timestamp(), []
    if pd.api.types.is_datetime64_any_dtype(kind):
        return pd.DatetimeIndex(column, name=None), []
    if pd.api.types.is_bool_dtype(kind):
        raise DataError(f"time column {str(name)!r} holds true/false, not dates or whole numbers")
    if pd.api.types.is_numeric_dtype(kind):
        return _parse_numbers(column, name)
    return _parse_texts(column.astype(object), name)


def _complain(name: Hashable, bad: Any, what: Callable[[int], str]) -> None:
    bad = np.asarray(bad, bool)
    first, count = int(np.argmax(bad)), int(bad.sum())
    rows = f"row {first + 1}" + (f" ({count} such rows in all)" if count > 1 else "")
    raise DataError(
        f"time column {str(name)!r} {what(first)} in {rows}; correct these rows, or pass "
        f"time='ignore' to take the rows as they stand"
    )


def _parse_numbers(column: pd.Series[Any], name: Hashable) -> tuple[pd.Index, list[str]]:
    if pd.api.types.is_integer_dtype(column.dtype):
        numbers = column.to_numpy(dtype=np.int64)
    else:
        values = column.to_numpy(dtype=np.float64)
        odd = ~(np.abs(values) < 2**53) | (values != np.floor(values))
        if odd.any():
            _complain(name, odd, lambda i: f"holds {values[i]:g}, no date or whole number,")
        numbers = values.astype(np.int64)
    if numbers.size and numbers.min() >= 19000101 and numbers.max() <= 21001231:
        texts = pd.Series(numbers).astype(str)
        dates = pd.to_datetime(texts, format="%Y%m%d", errors="coerce")
        if dates.notna().all():
            return pd.DatetimeIndex(dates), [f"column {str(name)!r} was read as YYYYMMDD dates"]
    return pd.Index(numbers), []


def _parse_texts(column: pd.Series[Any], name: Hashable) -> tuple[pd.Index, list[str]]:
    text = np.asarray([isinstance(v, str) for v in column], bool)
    if not text.any():
        zoned = np.asarray([getattr(v, "tzinfo", None) is not None for v in column], bool)
        if zoned.any() and not zoned.all():
            _complain(name, zoned != zoned[0], lambda i: f"mixes zones: {column.iloc[i]!s}")
        try:
            return pd.DatetimeIndex(pd.to_datetime(column)), []
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"time column {str(name)!r} does not hold dates ({error})") from error
    if not text.all():
        _complain(name, ~text, lambda i: f"holds {column.iloc[i]!r} among text")
    if re.search(_ZONE, column.iloc[0]):
        return _parse_zoned(column, name)
    column = column.str.strip()
    later = column.str.contains(_ZONE.replace("([", "(?:["))
    if later.any():
        _complain(name, later, lambda i: f"holds {column.iloc[i]!r}, zoned unlike row 1,")
    readings = [_read(column, form) for form in _formats(column.iloc[0])]
    whole = [r for r in readings if not r.hasnans]
    if not whole and re.match(r"\d{4}[-/]", column.iloc[0]):
        # forms of ISO 8601 may be mixed: midnights without a time, fractions on some rows only
        readings.append(_read(column, "ISO8601"))
        whole = [r for r in readings[-1:] if not r.hasnans]
    if not whole:
        bad = min((r.isna() for r in readings), key=np.sum, default=np.ones(len(column), bool))
        known = "" if bad[0] else " written like those before it"
        _complain(name, bad, lambda i: f"holds {column.iloc[i]!r}, which is not a date{known},")
    if len(whole) == 1 or whole[0].equals(whole[1]):
        return whole[0], []
    regular = [time for time in whole if is_regular(time)]
    if len(regular) != 1:
        raise DataError(
            f"time column {str(name)!r} can be read with the day or the month first (row 1 holds "
            f"{column.iloc[0]!r}); write dates as 2024-01-31"
        )
    order = "month" if regular[0] is whole[0] else "day"
    return regular[0], [f"dates of column {str(name)!r} were read with the {order} first"]


def _read(column: pd.Series[Any], form: str, utc: bool = False) -> pd.DatetimeIndex:
    parsed = pd.to_datetime(column, format=form, errors="coerce", utc=utc)
    return pd.DatetimeIndex(parsed, name=None)


def _parse_zoned(column: pd.Series[Any], name: Hashable) -> tuple[pd.Index, list[str]]:
    """Text with UTC offsets: one offset is kept; several (a change of clocks) become UTC."""
    zones = column.str.extract(_ZONE, expand=False)
    if zones.isna().any():
        _complain(name, zones.isna(), lambda i: f"holds {column.iloc[i]!r} without a UTC offset")
    time = _read(column.str.strip(), "ISO8601", utc=True)
    if time.hasnans:
        _complain(name, time.isna(), lambda i: f"holds {column.iloc[i]!r}, no ISO 8601 date,")
    seconds = zones.str.upper().map(_seconds_of_offset).to_numpy(np.int64)
    if np.all(seconds == seconds[0]):
        offset = dt.timezone(dt.timedelta(seconds=int(seconds[0]))) if seconds[0] else dt.UTC
        return time.tz_convert(offset if seconds[0] else "UTC"), []
    wall = wall_clock(time) + pd.to_timedelta(seconds, unit="s")
    said = f"stamps of column {str(name)!r} carry several UTC offsets"
    if not is_regular(time) and local_days(pd.DatetimeIndex(wall.sort_values())) is not None:
        return pd.DatetimeIndex(wall), [f"{said}; as they step by days the offsets were dropped"]
    return time, [f"{said}; they were put in UTC"]


def _seconds_of_offset(text: str) -> int:
    if text == "Z":
        return 0
    digits = re.sub(r"\D", "", text).ljust(4, "0")
    seconds = int(digits[:2]) * 3600 + int(digits[2:4]) * 60
    return -seconds if text[0] == "-" else seconds
