"""Ticks lie inside, are round, tell themselves apart; dates stand on calendar boundaries."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from levelhead.report.ticks import linear_ticks, log_ticks, number, positions, span

_ends = st.floats(-1e9, 1e9, allow_nan=False)


def _value(label: str) -> float:
    """A label read back as a number, the way a reader would."""
    plain = label.replace("\u202f", "").replace("−", "-")
    mantissa, _, power = plain.partition("×10")
    digits = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    return float(mantissa) * 10.0 ** int(digits or 0)


@given(low=_ends, width=st.floats(1e-6, 1e9), most=st.integers(3, 12))
def test_linear_ticks_are_round_inside_and_labelled_truly(low, width, most):
    high = low + width
    assume(high - low > 1e-9 * max(abs(low), abs(high)))
    ticks = linear_ticks(low, high, most)
    values = np.array([value for value, _ in ticks])
    labels = [label for _, label in ticks]
    assert 1 <= len(ticks) <= most + 2
    slack = 1e-6 * width
    assert (values >= low - slack).all()
    assert (values <= high + slack).all()
    assert len(set(labels)) == len(labels)
    read = np.array([_value(label) for label in labels])
    np.testing.assert_allclose(read, values, rtol=1e-9, atol=1e-6 * width)
    if len(ticks) > 1:
        step = (values[-1] - values[0]) / (len(values) - 1)
        lead = step / 10.0 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(lead - round_) for round_ in (1, 2, 5, 10)) < 1e-4


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 100.0, ["0", "20", "40", "60", "80", "100"]),
        (0.31, 0.47, ["0.32", "0.34", "0.36", "0.38", "0.40", "0.42", "0.44", "0.46"]),
        (-2.2e7, 2.2e7, ["−2×10⁷", "−1×10⁷", "0", "1×10⁷", "2×10⁷"]),
        (
            9_000.0,
            31_000.0,
            ["10\u202f000", "15\u202f000", "20\u202f000", "25\u202f000", "30\u202f000"],
        ),
    ],
)
def test_linear_ticks_of_known_ranges(low, high, labels):
    assert [label for _, label in linear_ticks(low, high, 8)][: len(labels)] == labels


@given(low=st.floats(1e-12, 1e9), factor=st.floats(1.001, 1e15), most=st.integers(3, 9))
def test_log_ticks_lie_inside_and_differ(low, factor, most):
    ticks = log_ticks(low, low * factor, most)
    assert 1 <= len(ticks) <= most + 2
    assert all(low * (1 - 1e-6) <= value <= low * factor * (1 + 1e-6) for value, _ in ticks)
    assert len({label for _, label in ticks}) == len(ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (9.9996, "10.00"),
        (0.99996, "1.000"),
        (1234.4, "1234"),
        (-98765.4, "−98\u202f765"),
        (1e-4, "0.0001000"),
        (9.9e-5, "9.900×10⁻⁵"),
        (1e9, "1.000×10⁹"),
        (math.nan, "–"),
        (-math.inf, "−∞"),
    ],
)
def test_numbers_have_four_significant_digits(value, text):
    assert number(value) == text


def test_span_leaves_out_what_is_not_finite_and_is_never_empty():
    assert span(np.array([np.nan, np.inf])) is None
    assert span(np.array([-1.0, 0.0]), log=True) is None
    assert span(np.zeros(3)) == (-1.0, 1.0)
    low, high = span(np.array([1e6, np.nan]), np.array([1e6]))
    assert low < 1e6 < high
    low, high = span(np.array([0.0, 1e-3, 10.0]), log=True)
    assert 0 < low < 1e-3
    assert high > 10


@pytest.mark.parametrize(
    ("step", "count", "most", "labels"),
    [
        (timedelta(minutes=10), 40, 8, ["23:00", "1 Jan", "01:00", "02:00", "03:00", "04:00"]),
        (timedelta(hours=1), 72, 5, ["1 Jan", "2 Jan", "3 Jan"]),
        (timedelta(hours=1), 100, 12, ["1 Jan", "12:00", "2 Jan", "12:00", "3 Jan", "12:00"]),
        (timedelta(days=1), 35, 6, ["1 Jan", "8 Jan", "15 Jan", "22 Jan", "29 Jan"]),
        (timedelta(days=7), 80, 8, ["2018", "Apr", "Jul", "Oct", "2019", "Apr"]),
        (timedelta(days=365), 30, 7, ["2020", "2025", "2030", "2035", "2040", "2045"]),
    ],
)
def test_dates_get_ticks_on_calendar_boundaries(step, count, most, labels):
    begin = datetime(2017, 12, 31, 22, 30)
    axis = positions([(begin + i * step).isoformat(" ") for i in range(count)])
    ticks = axis.ticks(most)
    assert [label for _, label in ticks][: len(labels)] == labels
    assert len(ticks) <= most
    for seconds, label in ticks:
        moment = begin + timedelta(seconds=seconds)
        assert moment <= begin + (count - 1) * step
        shown = {f"{moment:%H:%M}", f"{moment.day} {moment:%b}", f"{moment:%b}", f"{moment:%Y}"}
        assert label in shown


def test_weeks_begin_on_mondays():
    axis = positions([(datetime(2026, 3, 3) + timedelta(days=i)).isoformat() for i in range(40)])
    days = [datetime(2026, 3, 3) + timedelta(seconds=seconds) for seconds, _ in axis.ticks(7)]
    assert len(days) == 5
    assert {day.isoweekday() for day in days} == {1}


def test_times_of_several_zones_stand_in_order_and_say_their_zone():
    axis = positions(["2024-03-31T01:30:00+01:00", "2024-03-31T03:00:00+02:00"])
    np.testing.assert_array_equal(axis.values, [0.0, 1800.0])
    assert axis.note == "31 Mar 2024, 01:30–02:00 UTC+01:00"


@pytest.mark.parametrize(
    "texts", [["a", "b"], ["2018-01-01", "x"], ["2018-01-01", "2018-01-01T00:00+01:00"], ["1", "x"]]
)
def test_other_labels_stand_one_after_the_other(texts):
    axis = positions(texts)
    np.testing.assert_array_equal(axis.values, [0.0, 1.0])
    assert axis.ticks(5) == [(0.0, texts[0]), (1.0, texts[1])]
    assert axis.note == ""


def test_whole_numbers_get_whole_ticks():
    assert positions(["5", "6"]).ticks(9) == [(5.0, "5"), (6.0, "6")]
    assert positions(["-3"]).ticks(5)[0][0] == -3.0
    ticks = positions([str(i) for i in range(1000, 1100)]).ticks(6)
    assert ticks == [(v, str(int(v))) for v in (1000.0, 1020.0, 1040.0, 1060.0, 1080.0)]
