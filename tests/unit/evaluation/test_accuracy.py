"""Numbers that judge forecasts, against sums written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import mean_absolute_error, mean_pinball_loss, mean_squared_error

from levelhead.base.errors import InputError
from levelhead.evaluation import accuracy

DRAW = np.random.default_rng(5)
TRUTH, MADE = DRAW.normal(size=(3, 40)), DRAW.normal(size=(3, 40))


def test_errors_equal_scikit_learns() -> None:
    flat = TRUTH.ravel(), MADE.ravel()
    assert accuracy.mse(TRUTH, MADE) == pytest.approx(mean_squared_error(*flat), rel=1e-12)
    assert accuracy.mae(TRUTH, MADE) == pytest.approx(mean_absolute_error(*flat), rel=1e-12)
    for level in (0.05, 0.5, 0.9):
        expected = mean_pinball_loss(*flat, alpha=level)
        assert accuracy.pinball(TRUTH, MADE, level) == pytest.approx(expected, rel=1e-12)


def test_everything_is_computed_in_float64() -> None:
    """In float32 neither 1e8 + 1 nor the mean of many such squares would be held."""
    truth, made = np.full(3, 2**25, np.int64), np.full(3, 2**25 + 1, np.int64)
    assert accuracy.mse(truth, made) == 1.0
    half = np.array([30000.0, 30000.0], np.float16)
    assert accuracy.mse(half, -half) == float(2 * half[0].astype(float)) ** 2


@pytest.mark.parametrize("season", [1, 3, 39])
def test_naive_scale_is_the_mean_step_of_a_season(season: int) -> None:
    got = accuracy.seasonal_naive_scale(TRUTH, season)
    for d, row in enumerate(TRUTH):
        steps = [abs(row[t] - row[t - season]) for t in range(season, len(row))]
        assert got[d] == pytest.approx(sum(steps) / len(steps), rel=1e-12)


@pytest.mark.parametrize("season", [0, 40, 41])
def test_a_season_that_the_history_does_not_hold_is_refused(season: int) -> None:
    with pytest.raises(InputError, match=rf"season of {season} steps .* 40 were given"):
        accuracy.seasonal_naive_scale(TRUTH, season)


def test_mase_is_in_units_of_the_naive_error() -> None:
    history = [1.0, 2.0, 4.0, 7.0]  # steps 1, 2, 3: the naive forecast errs by 2
    scale = float(accuracy.seasonal_naive_scale(history))
    assert scale == 2.0
    assert accuracy.mase([10.0, 10.0], [11.0, 13.0], scale) == 1.0
    assert math.isnan(accuracy.mase([1.0], [1.0], 0.0))


def test_coverage_counts_the_edges_as_inside() -> None:
    assert accuracy.coverage([0.0, 1.0, 2.0, 3.0], np.ones(4), np.full(4, 2.0)) == 0.5
    assert accuracy.width([1.0, 2.0], [2.0, 5.0]) == 2.0


@pytest.mark.parametrize("judge", [accuracy.mse, accuracy.mae, accuracy.width])
def test_arrays_that_do_not_belong_together_are_refused(judge) -> None:
    with pytest.raises(InputError, match=r"\(3, 40\) and \(40,\)"):
        judge(TRUTH, MADE[0])
    with pytest.raises(InputError, match="empty"):
        judge([], [])
