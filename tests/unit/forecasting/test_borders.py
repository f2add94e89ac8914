"""Which rows do what, and what is said when they are too few."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from levelhead.base.errors import DataError, InputError
from levelhead.forecasting.borders import divide


def test_rows_are_divided_in_order() -> None:
    borders = divide(1000, 24, 96)
    assert (borders.train, borders.select, borders.rows) == (700, 850, 1000)
    assert (borders.context, borders.horizon, borders.note) == (96, 24, None)


@pytest.mark.parametrize(
    ("rows", "horizon", "context", "held"),
    [
        (1000, 24, 96, 150),  # 15 %
        (1001, 24, 96, 151),  # rounded up
        (400, 48, 96, 96),  # two horizons are more than 15 %
        (300, 96, 5, 96),  # two horizons do not fit, one does
    ],
)
def test_held_out_rows(rows: int, horizon: int, context: int, held: int) -> None:
    borders = divide(rows, horizon, context)
    assert (borders.select - borders.train, borders.rows - borders.select) == (held, held)


@pytest.mark.parametrize(
    ("rows", "horizon", "season", "context"),
    [
        (17420, 96, 24, 512),  # the longest; a cap, so no whole season is cut from it
        (1000, 24, None, 338),  # half of 700 training rows less the horizon
        (1000, 24, 24, 336),  # in whole seasons
        (1000, 24, 400, 338),  # a season longer than the context cuts nothing
        (130, 24, None, 29),  # with two horizons held back only 3 steps would be left
        (60, 10, 1, 15),
    ],
)
def test_auto_takes_the_longest_sensible_context(
    rows: int, horizon: int, season: int | None, context: int
) -> None:
    borders = divide(rows, horizon, "auto", season)
    assert borders.context == context
    assert borders.note is not None
    assert f"context {context} steps" in borders.note
    assert f"{rows} rows and horizon {horizon}" in borders.note


def test_auto_never_collapses_as_rows_are_added() -> None:
    contexts = [divide(rows, 24, "auto").context for rows in range(90, 400)]
    assert all(b >= a - 24 for a, b in pairwise(contexts))
    assert min(contexts[40:]) >= 24


@pytest.mark.parametrize(
    ("rows", "horizon", "context", "said"),
    [
        (100, 8, 96, "context 55 would fit (or context='auto')"),
        (100, 40, 12, "horizon 27 would fit with context 12"),
        (20, 19, "auto", "horizon 4 would fit with context auto"),
        (3, 1, "auto", "give about"),
    ],
)
def test_too_few_rows_say_what_would_fit(
    rows: int, horizon: int, context: object, said: str
) -> None:
    with pytest.raises(DataError) as error:
        divide(rows, horizon, context)  # type: ignore[arg-type]
    text = str(error.value)
    assert said in text
    assert text.startswith(f"{rows} rows are too few for context {context} and horizon {horizon}")


def test_the_number_of_rows_that_is_asked_for_is_enough() -> None:
    with pytest.raises(DataError) as error:
        divide(5, 30, 60)
    needed = int(re.search(r"about (\d+) rows", str(error.value))[1])  # type: ignore[index]
    assert divide(needed, 30, 60).context == 60
    assert needed < 300


@pytest.mark.parametrize("horizon", [0, -3, 1.5, True, "6", None])
def test_a_horizon_that_is_no_number_of_steps_is_refused(horizon: object) -> None:
    with pytest.raises(InputError, match="horizon must be a positive whole number"):
        divide(100, horizon, "auto")  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [0, -1, 2.0, True, "long", None, np.nan])
def test_a_context_that_is_no_number_of_steps_is_refused(context: object) -> None:
    with pytest.raises(InputError, match="context must be 'auto' or a positive whole number"):
        divide(100, 3, context)  # type: ignore[arg-type]
