"""Laws of the line: moments of any windows, changes of units, sums over disjoint windows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levelhead.nn.linear import (
    Centre,
    Moments,
    lag_moments,
    line_as_head,
    moments,
    predict_line,
    revin_moments,
    solve_line,
)
from oracles import linear as oracle

CENTRES = st.sampled_from(["last", "mean"])
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 30), st.data(), SEEDS)
def test_lag_moments_equal_the_sum_over_windows(
    channels: int, width: int, count: int, data: st.DataObject, seed: int
) -> None:
    series = np.random.default_rng(seed).normal(size=(channels, count + width - 1))
    series += data.draw(st.sampled_from([0.0, 3.0]))
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    expected = oracle.lag_moments(series, width, start, stop)
    got = lag_moments(series, width, start, stop)
    assert got.shape == (width, width)
    # The recursion subtracts what leaves: its error is relative to all that was ever inside.
    size = max(np.abs(expected).max(), float((series**2).sum()))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10 * size)
    if np.abs(expected).max() > 0.01 * size:
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def series_of(seed: int, steps: int = 60) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return np.cumsum(draw.normal(size=(3, steps)), axis=1) / 3.0


@settings(max_examples=60, deadline=None)
@given(SEEDS, CENTRES, st.integers(1, 8), st.integers(1, 5), st.integers(1, 40))
def test_moments_add_up_over_disjoint_windows(
    seed: int, centre: Centre, context: int, horizon: int, cut: int
) -> None:
    series = series_of(seed)
    whole = moments(series, context, horizon, 0, 45, centre)
    parts = moments(series, context, horizon, 0, cut, centre) + moments(
        series, context, horizon, cut, 45, centre
    )
    size = float((series**2).sum())
    np.testing.assert_allclose(parts.gram, whole.gram, rtol=0, atol=1e-10 * size)
    np.testing.assert_allclose(parts.cross, whole.cross, rtol=0, atol=1e-10 * size)
    assert abs(parts.energy - whole.energy) < 1e-10 * size
    assert parts.count == whole.count == 3 * 45


@settings(max_examples=60, deadline=None)
@given(SEEDS, CENTRES, st.floats(0.01, 100.0), st.floats(-100.0, 100.0))
def test_forecasts_follow_a_change_of_units(
    seed: int, centre: Centre, scale: float, shift: float
) -> None:
    series, offsets = series_of(seed), shift * np.array([[1.0], [-0.3], [2.0]])

    def forecast(given: np.ndarray, penalty: float) -> np.ndarray:
        weights = solve_line(moments(given, 8, 3, 0, 40, centre), penalty)
        return predict_line(given[:, 45:53], weights, centre)

    # λ is a variance; offsets may differ from channel to channel, the scale is common.
    plain, changed = forecast(series, 0.1), forecast(scale * (series + offsets), scale**2 * 0.1)
    size = scale * (1.0 + np.abs(series).max())
    np.testing.assert_allclose(changed, scale * (plain + offsets), rtol=1e-9, atol=1e-7 * size)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.floats(0.01, 100.0), st.floats(-100.0, 100.0))
def test_revin_forecasts_follow_a_change_of_units(seed: int, scale: float, shift: float) -> None:
    series = series_of(seed)

    def forecast(given: np.ndarray, floor: float) -> np.ndarray:
        weights = solve_line(revin_moments(given, 8, 3, 0, 40, floor=floor), 0.1)
        return predict_line(given[:, 45:53], weights, "mean")

    plain, changed = forecast(series, 0.5), forecast(scale * (series + shift), scale**2 * 0.5)
    size = scale * (1.0 + np.abs(series).max())
    np.testing.assert_allclose(changed, scale * (plain + shift), rtol=1e-9, atol=1e-8 * size)


@settings(max_examples=60, deadline=None)
@given(SEEDS, CENTRES, st.integers(1, 12), st.integers(1, 6), st.sampled_from([0.0, 1e3, -1e6]))
def test_a_head_that_sums_to_one_is_the_line_inside_revin_too(
    seed: int, centre: Centre, context: int, horizon: int, offset: float
) -> None:
    draw = np.random.default_rng(seed)
    weights, x = draw.normal(size=(context, horizon)), draw.normal(size=(7, context)) + offset
    head = line_as_head(weights, centre)
    expected = predict_line(x, weights, centre)
    tolerance = {"rtol": 1e-12, "atol": 1e-11 * context * (1.0 + abs(offset))}
    np.testing.assert_allclose(x @ head, expected, **tolerance)
    mean, deviation = x.mean(axis=1, keepdims=True), np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)
    around = (x - mean) / deviation @ head * deviation + mean
    np.testing.assert_allclose(around, expected, **tolerance)


@settings(max_examples=60, deadline=None)
@given(SEEDS, CENTRES)
def test_no_weights_have_a_smaller_penalised_error(seed: int, centre: Centre) -> None:
    fitted: Moments = moments(series_of(seed), 6, 2, 0, 50, centre)
    best = solve_line(fitted, 0.2)

    def cost(weights: np.ndarray) -> float:
        # n H·error + λ n‖W‖², divided by n H
        return fitted.error(weights) + 0.2 * float((weights**2).sum()) / 2

    draw = np.random.default_rng(seed)
    for size in (1e-3, 1.0):
        nudge = size * draw.normal(size=best.shape)
        # A quadratic: the excess is exactly the quadratic form of the nudge.
        excess = np.vdot(nudge, fitted.gram @ nudge) / fitted.count / 2 + 0.1 * (nudge**2).sum()
        assert cost(best + nudge) - cost(best) == pytest.approx(excess, rel=1e-6, abs=1e-11)
