"""Numbers, dates and where to put marks on an axis.

Nothing here knows of drawing. Values are in the units of the data; a tick is a pair
(value, label). Words and month names are fixed, whatever the reader's locale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Positions",
    "fixed",
    "linear_ticks",
    "log_ticks",
    "number",
    "positions",
    "power_of_ten",
    "span",
]

Floats = NDArray[np.float64]
Tick = tuple[float, str]

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SECOND, _MINUTE, _HOUR, _DAY, _MONTH, _YEAR = 1.0, 60.0, 3600.0, 86400.0, 2629746.0, 31556952.0
_TIME_STEPS = tuple(
    (unit, count)
    for unit, counts in (
        (_SECOND, (1, 5, 15, 30)),
        (_MINUTE, (1, 5, 15, 30)),
        (_HOUR, (1, 2, 3, 6, 12)),
        (_DAY, (1, 2, 7, 14)),
        (_MONTH, (1, 2, 3, 6)),
        (_YEAR, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
    )
    for count in counts
)


def number(value: float, digits: int = 4) -> str:
    """`value` to `digits` significant digits, as a person would write it; nan is a dash.

    >>> [number(v) for v in (0.36451, -12.3456, 123456.7, 2.5e-7, float("nan"), float("inf"))]
    ['0.3645', '−12.35', '123\u202f457', '2.500×10⁻⁷', '–', '∞']
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    # Rounding first: 9.9996 to four digits is 10.00, which has one decimal less.
    mantissa, power = f"{abs(value):.{digits - 1}e}".split("e")
    exponent = int(power)
    if -4 <= exponent < 9:
        return fixed(value, max(digits - 1 - exponent, 0))
    return _sign(value) + f"{mantissa}×{power_of_ten(exponent)}"


def power_of_ten(exponent: int) -> str:
    """Ten to a power, in print: 10⁻⁵."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def fixed(value: float, decimals: int) -> str:
    """`value` with `decimals` decimals, a true minus and thin spaces between thousands.

    >>> fixed(-1234.5, 1), fixed(12345.6, 0), fixed(-0.01, 1)
    ('−1234.5', '12\u202f346', '0.0')
    """
    digits = f"{abs(value):.{decimals}f}"
    sign = _sign(value) if float(digits) else ""
    if abs(value) >= 9999.5:
        digits = f"{abs(value):,.{decimals}f}".replace(",", "\u202f")
    return sign + digits


def _sign(value: float) -> str:
    return "−" if value < 0 else ""


def span(*parts: Floats, log: bool = False, margin: float = 0.05) -> tuple[float, float] | None:
    """Lowest and highest finite value of all parts, widened a little; None if there is none.

    A single value gets room around it, so that the span is never empty. With `log` only
    positive values count and the margin is multiplicative.

    >>> span(np.array([0.0, np.nan, 10.0]), margin=0.1), span(np.array([3.0]))
    ((-1.0, 11.0), (1.5, 4.5))
    """
    values = np.concatenate([np.ravel(part).astype(np.float64) for part in parts])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        factor = max((high / low) ** margin, 1.1) if low < high else 2.0
        return low / factor, high * factor
    # Below this width neighbouring ticks could no longer be told apart in float64.
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = 0.5 * abs(low) or 1.0
    else:
        room = margin * (high - low)
    return low - room, high + room


def linear_ticks(low: float, high: float, most: int) -> list[Tick]:
    """About `most` round values (1, 2 or 5 times a power of ten) within [low, high].

    >>> linear_ticks(0.0, 1.0, 5)
    [(0.0, '0'), (0.5, '0.5'), (1.0, '1.0')]
    >>> [label for _, label in linear_ticks(-3e-5, 4e-5, 5)]
    ['−2×10⁻⁵', '0', '2×10⁻⁵', '4×10⁻⁵']
    """
    power = 10.0 ** math.floor(math.log10((high - low) / max(most, 1)))
    finer: tuple[float, int, int] | None = None
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
        finer = step, first, last
    # One tick tells nothing of the scale: then rather a few more than were asked for.
    if last - first < 1 and finer and finer[2] - finer[1] <= most + 2:
        step, first, last = finer
    values = [index * step for index in range(first, last + 1)]
    return list(zip(values, _labels(values, step), strict=True))


def _labels(values: Sequence[float], step: float) -> list[str]:
    """Labels that differ from one another and have the same number of decimals."""
    if not values:
        return []
    largest = max(abs(value) for value in values)
    finest = math.floor(math.log10(step) + 1e-9)
    exponent = math.floor(math.log10(largest) + 1e-9) if largest else 0
    if (exponent >= 6 and finest >= 3) or exponent <= -4:
        decimals = max(exponent - finest, 0)
        ten = power_of_ten(exponent)
        return [f"{fixed(v / 10.0**exponent, decimals)}×{ten}" if v else "0" for v in values]
    return [fixed(value, max(-finest, 0)) if value else "0" for value in values]


def log_ticks(low: float, high: float, most: int) -> list[Tick]:
    """At most `most` powers of ten within [low, high]; 1, 2, 5 times them when they are few.

    >>> [label for _, label in log_ticks(0.01, 100.0, 5)]
    ['0.01', '0.1', '1', '10', '100']
    >>> [label for _, label in log_ticks(1.5, 60.0, 5)]
    ['2', '5', '10', '20', '50']
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1,)):
        values = [f * 10.0**p for p in range(first, last + 1) for f in factors]
        values = [v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(values) <= most and (len(values) >= 2 or factors == (1,)):
            break
    if len(values) < 2:  # less than a factor of about two: a logarithmic axis is almost linear
        return linear_ticks(low, high, most)
    return [(v, number(v, 1)) for v in values[:: math.ceil(len(values) / most)]]


@dataclass(frozen=True)
class Positions:
    """Where labelled points stand on an axis: `values [n]`, and the moments if they are dates."""

    values: Floats
    moments: tuple[datetime, ...] | None = None
    texts: tuple[str, ...] | None = None

    @property
    def note(self) -> str:
        """From when to when, for the caption; empty unless the labels are dates."""
        if not self.moments:
            return ""
        first, last = min(self.moments), max(self.moments)
        zone = first.strftime(" %Z") if first.tzinfo else ""
        ends = dict.fromkeys((_day(first), _day(last)))
        if len(ends) == 1 and first != last:
            return f"{_day(first)}, {first:%H:%M}–{last:%H:%M}{zone}"
        return " – ".join(ends) + zone

    def ticks(self, most: int) -> list[Tick]:
        """At most `most` ticks: calendar boundaries, round numbers or the labels themselves."""
        if self.moments:
            return _time_ticks(self.moments[0], self.values, most)
        if self.texts is None:
            low, high = float(self.values.min()), float(self.values.max())
            if low == high:
                return [(low, number(low))]
            values = [value for value, _ in linear_ticks(low, high, most)]
            return [(value, fixed(value, 0)) for value in values if value == round(value)]
        every = max(math.ceil(len(self.texts) / most), 1)
        return list(zip(self.values.tolist(), self.texts, strict=True))[::every]


def positions(texts: Sequence[str]) -> Positions:
    """Read labels of an axis: all whole numbers, all ISO dates, or else plain names.

    Dates stand at seconds after the first one (in its own time zone), numbers at themselves,
    names at 0, 1, 2, …

    >>> positions(["2018-01-01", "2018-01-03"]).values
    array([     0., 172800.])
    >>> positions(["2018-01-01", "2018-01-03"]).note
    '1 Jan 2018 – 3 Jan 2018'
    >>> positions(["7", "8"]).values
    array([7., 8.])
    """
    names = Positions(np.arange(len(texts), dtype=np.float64), texts=tuple(texts))
    if not texts:
        return names
    try:
        return Positions(np.array([int(text) for text in texts], dtype=np.float64))
    except (ValueError, OverflowError):
        pass
    try:
        moments = [datetime.fromisoformat(text) for text in texts]
        if moments[0].tzinfo:
            moments = [moment.astimezone(moments[0].tzinfo) for moment in moments]
        seconds = [(moment - moments[0]).total_seconds() for moment in moments]
    except (ValueError, TypeError, OverflowError):
        return names
    return Positions(np.array(seconds), tuple(moments))


def _day(moment: datetime) -> str:
    return f"{moment.day} {_MONTHS[moment.month - 1]} {moment.year}"


def _time_ticks(zero: datetime, seconds: Floats, most: int) -> list[Tick]:
    low, high = float(seconds.min()), float(seconds.max())
    unit, count = next(
        (step for step in _TIME_STEPS if (high - low) / math.prod(step) <= most - 1),
        _TIME_STEPS[-1],
    )
    begin, end = (zero + timedelta(seconds=at) for at in (low, high))
    return [
        ((moment - zero).total_seconds(), _moment_label(moment, unit))
        for moment in _boundaries(begin, end, unit, count)
    ]


def _boundaries(begin: datetime, end: datetime, unit: float, count: int) -> Iterator[datetime]:
    """Moments in [begin, end] at which the calendar field of `unit` is a multiple of `count`."""
    midnight = begin.replace(hour=0, minute=0, second=0, microsecond=0)
    if unit >= _MONTH:
        size = count * (12 if unit == _YEAR else 1)
        index = -(-(begin.year * 12 + begin.month - 1) // size) * size
        while index < 12 * 9999:
            moment = midnight.replace(year=index // 12, month=index % 12 + 1, day=1)
            if moment > end:
                return
            if moment >= begin:
                yield moment
            index += size
        return
    # Weeks begin on Mondays: day 1 of the proleptic calendar was one.
    behind = (midnight.toordinal() - 1) % count if unit == _DAY else 0
    moment = midnight - timedelta(days=min(behind, midnight.toordinal() - 1))
    step = timedelta(seconds=unit * count)
    moment += math.ceil((begin - moment) / step) * step
    while moment <= end:
        yield moment
        moment += step


def _moment_label(moment: datetime, unit: float) -> str:
    day = f"{moment.day} {_MONTHS[moment.month - 1]}"
    if unit == _YEAR or (unit == _MONTH and moment.month == 1):
        return str(moment.year)
    if unit == _MONTH:
        return _MONTHS[moment.month - 1]
    if unit == _DAY or (moment.hour, moment.minute, moment.second) == (0, 0, 0):
        return day
    return f"{moment:%H:%M:%S}" if unit == _SECOND else f"{moment:%H:%M}"
