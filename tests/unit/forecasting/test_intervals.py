"""Conformal quantiles by sorting and counting, their coverage on noise, and adaptive levels."""

from __future__ import annotations

import numpy as np
import pytest

from levelhead.base.errors import InputError
from levelhead.forecasting.intervals import (
    Conformal,
    adaptive_levels,
    check_coverage,
    last_levels,
)
from oracles import forecasting as oracle


def scores(count: int, channels: int = 2, horizon: int = 3, seed: int = 0) -> np.ndarray:
    return np.abs(np.random.default_rng([seed, count]).normal(size=(count, channels, horizon)))


# -- quantiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 9, 19, 20, 99, 100, 333, 399, 400])
@pytest.mark.parametrize("coverage", [0.01, 0.5, 0.8, 0.9, 0.95, 0.999])
def test_half_width_is_the_right_order_statistic(count: int, coverage: float) -> None:
    drawn = scores(count)
    half = Conformal.fit(drawn).half_width(coverage)
    np.testing.assert_array_equal(half, oracle.kth_smallest(drawn, coverage))


@pytest.mark.parametrize("count", [401, 777, 1999])
@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_with_many_windows_the_grid_rounds_up_by_a_four_hundredth(
    count: int, coverage: float
) -> None:
    drawn = scores(count)
    half = Conformal.fit(drawn).half_width(coverage)
    ranks = (drawn <= half).sum(axis=0)
    exact = (drawn <= oracle.kth_smallest(drawn, coverage)).sum(axis=0)
    assert (ranks >= exact).all()
    assert (ranks <= exact + count / 400).all()


def test_pooled_quantiles_join_the_channels_per_step() -> None:
    alike = Conformal.fit(np.repeat(scores(39, channels=1), 4, axis=1))
    for coverage in (0.5, 0.8, 0.97):
        pooled = alike.half_width(coverage, pooled=True)
        np.testing.assert_array_equal(pooled, alike.half_width(coverage)[2])
    drawn = scores(39, channels=4)
    pooled = Conformal.fit(drawn).half_width(0.8, pooled=True)
    for step in range(3):  # rank 32 of 39, that is 125 of 156
        assert pooled[step] == np.sort(drawn[:, :, step].ravel())[124]


def test_levels_replace_the_coverage_of_each_channel() -> None:
    drawn = scores(99)
    conformal = Conformal.fit(drawn)
    half = conformal.half_width(0.8, np.array([0.5, 1.0]))
    np.testing.assert_array_equal(half[0], oracle.kth_smallest(drawn, 0.5)[0])
    np.testing.assert_array_equal(half[1], drawn[:, 1].max(axis=0))


def test_scores_are_left_alone_and_need_a_window() -> None:
    drawn = scores(30)
    before = drawn.copy()
    Conformal.fit(drawn)
    np.testing.assert_array_equal(drawn, before)
    with pytest.raises(InputError, match="no calibration window"):
        Conformal.fit(drawn[:0])


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_coverage_of_exchangeable_scores_is_what_was_asked_for(coverage: float) -> None:
    """99 windows, 4000 independent cells: a rank too low would be .01, eight standard errors."""
    draw = np.random.default_rng(11)
    fitted, new = np.abs(draw.normal(size=(2, 99, 40, 100)))
    covered = (new <= Conformal.fit(fitted).half_width(coverage)).mean()
    per_cell = coverage * (1 - coverage) * (1 / 101 + 1 / 99)
    error = np.sqrt(per_cell / 4000)
    assert error < 0.01 / 8
    assert abs(covered - coverage) < 0.005


# -- adaptive levels ------------------------------------------------------------------------------


def slow_levels(
    fitted: np.ndarray, coverage: float, seen: np.ndarray, stride: int, horizon: int
) -> list[np.ndarray]:
    """Gibbs & Candès eq. 2 channel by channel, an outcome taken in once all its rows are known."""
    gamma, channels = min(0.05, 0.005 * stride), seen.shape[1]
    levels = [[coverage] * channels]
    finished = 0
    while finished < len(seen):
        now = len(levels)  # the window about to be forecast, its cutoff at row now * stride
        level = list(levels[-1])
        if finished * stride + horizon <= now * stride:
            for d in range(channels):
                half = oracle.kth_smallest(fitted[:, d], levels[finished][d])
                share = float(np.mean(seen[finished, d] <= half))
                level[d] += gamma * (coverage - share)
            finished += 1
        levels.append(level)
    return [np.array(level) for level in levels]


@pytest.mark.parametrize(("stride", "horizon"), [(1, 3), (2, 3), (3, 3), (7, 3), (1, 1)])
def test_levels_follow_the_recursion_with_its_delay(stride: int, horizon: int) -> None:
    fitted, seen = scores(50), 1.4 * scores(25, seed=1)
    got = list(adaptive_levels(Conformal.fit(fitted), 0.8, seen, stride=stride, horizon=horizon))
    expected = slow_levels(fitted, 0.8, seen, stride, horizon)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_a_level_beyond_one_remembers_how_long_the_misses_lasted() -> None:
    """Clipping the level itself lost 6 points of coverage on drifting series."""
    conformal = Conformal.fit(scores(50))
    missed = np.full((400, *scores(1).shape[1:]), 1e6)
    last = last_levels(conformal, 0.8, missed, horizon=3)
    np.testing.assert_allclose(last, 0.8 + 0.005 * 0.8 * 400, rtol=1e-12)
    assert (conformal.half_width(0.8, last) == scores(50).max(axis=0)).all()


def test_outcomes_that_are_not_known_yet_change_nothing() -> None:
    conformal, seen = Conformal.fit(scores(50)), scores(20, seed=1)
    other = seen.copy()
    other[10:] = 1e3
    one, two = (
        list(adaptive_levels(conformal, 0.8, s, stride=1, horizon=4)) for s in (seen, other)
    )
    np.testing.assert_array_equal(one[: 10 + 4], two[: 10 + 4])
    assert (one[10 + 4] < two[10 + 4]).all()


def test_last_levels_take_in_every_outcome() -> None:
    """All windows end with the rows that were given, so that all their outcomes are known."""
    conformal, seen = Conformal.fit(scores(50)), scores(6, horizon=12, seed=1)
    conformal = Conformal.fit(scores(50, horizon=12))
    wide = seen.copy()
    wide[-1] = 1e3
    a, b = (last_levels(conformal, 0.8, s, horizon=12) for s in (seen, wide))
    assert (b > a).all()
    np.testing.assert_allclose(b - a, 0.005 * (seen[-1] <= 1e2).mean(axis=1), atol=0.0051)
    expected = slow_levels(scores(50, horizon=12), 0.8, seen, 1, 12)[-1]
    np.testing.assert_allclose(a, expected, rtol=1e-12)


def test_adaptive_levels_mend_a_planted_drift() -> None:
    fitted = scores(300, channels=4, horizon=8)
    drifted = 1.6 * scores(400, channels=4, horizon=8, seed=1)
    conformal = Conformal.fit(fitted)
    fixed = (drifted <= conformal.half_width(0.8)).mean()
    used = list(adaptive_levels(conformal, 0.8, drifted, stride=4, horizon=8))
    inside = [
        (drifted[n] <= conformal.half_width(0.8, used[n])).mean() for n in range(len(drifted))
    ]
    assert fixed < 0.65
    assert abs(np.mean(inside[200:]) - 0.8) < 0.03


def test_adaptive_levels_narrow_what_is_too_wide() -> None:
    conformal = Conformal.fit(scores(300))
    used = list(adaptive_levels(conformal, 0.8, 0.3 * scores(200, seed=1), stride=10, horizon=3))
    assert (used[-1] < 0.5).all()
    assert (conformal.half_width(0.8, used[-1]) < conformal.half_width(0.8)).all()


def test_a_level_remembers_how_long_the_misses_lasted() -> None:
    """Beyond 1 the interval cannot widen any more, below 0 it cannot narrow."""
    fitted = scores(50)
    conformal = Conformal.fit(fitted)
    *_, never = adaptive_levels(conformal, 0.8, 1e3 + scores(20, seed=1), stride=10, horizon=3)
    np.testing.assert_allclose(never, 0.8 + 20 * 0.05 * 0.8)
    np.testing.assert_array_equal(conformal.half_width(0.8, never), fitted.max(axis=0))
    always = np.zeros((100, 2, 3))
    *_, low = adaptive_levels(conformal, 0.8, always, stride=10, horizon=3)
    np.testing.assert_allclose(low, 0.8 - 100 * 0.05 * 0.2)
    np.testing.assert_array_equal(conformal.half_width(0.8, low), fitted.min(axis=0))


# -- coverages ------------------------------------------------------------------------------------


def test_coverages_are_sorted_shares() -> None:
    assert check_coverage(0.9) == (0.9,)
    assert check_coverage([0.95, 0.5, 0.95]) == (0.5, 0.95)
    assert check_coverage(np.array([0.8])) == (0.8,)  # type: ignore[arg-type]
    assert check_coverage(np.float64(0.8)) == (0.8,)
    assert check_coverage(np.float32(0.5)) == (0.5,)


@pytest.mark.parametrize("coverage", [0, 1, 80, -0.1, [0.8, 95.0], float("nan")])
def test_a_coverage_that_is_no_share_is_refused(coverage: object) -> None:
    with pytest.raises(InputError, match=r"write 0\.8 for 80 %"):
        check_coverage(coverage)  # type: ignore[arg-type]


@pytest.mark.parametrize("coverage", ["0.8", None, ["a"]])
def test_a_coverage_that_is_no_number_is_refused(coverage: object) -> None:
    with pytest.raises(InputError, match="must be one share or several"):
        check_coverage(coverage)  # type: ignore[arg-type]


def test_no_coverage_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="at least one coverage"):
        check_coverage([])
