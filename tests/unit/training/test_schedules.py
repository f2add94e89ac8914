"""Schedules against their formulas, at and beyond their ends."""

from __future__ import annotations

import math

import pytest

from levelhead.base.errors import InputError
from levelhead.training.schedules import Constant, Cosine, Every, Linear


def test_a_constant_stays() -> None:
    assert [Constant(0.3)(step) for step in (0, 5, 10**6)] == [0.3] * 3


def test_a_line_goes_from_start_to_end_and_stays() -> None:
    line = Linear(8, start=2.0, end=-2.0)
    assert [line(step) for step in (0, 2, 4, 8, 100)] == [2.0, 1.0, 0.0, -2.0, -2.0]


def test_half_a_cosine_goes_from_start_to_end_and_stays() -> None:
    curve = Cosine(6, start=3.0, end=1.0)
    expected = [2.0 + math.cos(math.pi * step / 6) for step in range(7)]
    assert [curve(step) for step in range(7)] == pytest.approx(expected)
    assert curve(50) == pytest.approx(1.0)


def test_every_keeps_the_average() -> None:
    sparse = Every(4, Linear(100, start=1.0, end=1.0))
    assert [sparse(step) for step in range(5)] == [4.0, 0.0, 0.0, 0.0, 4.0]
    assert sum(sparse(step) for step in range(400)) / 400 == 1.0


@pytest.mark.parametrize("kind", [Linear, Cosine, Every])
def test_steps_are_positive(kind: type) -> None:
    with pytest.raises(InputError, match="steps=0 was given"):
        kind(0)
