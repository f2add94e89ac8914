"""The line against windows written out one by one and least squares on the stacked design."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from levelhead.base.errors import InputError
from levelhead.nn.linear import (
    Centre,
    LinePath,
    Moments,
    lag_moments,
    line_as_head,
    moments,
    pair_moments,
    predict_line,
    revin_moments,
    solve_line,
)
from oracles import linear as oracle

L, H = 9, 4
CENTRES: list[Centre] = ["last", "mean"]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def walk(channels: int, steps: int, seed: int = 0) -> np.ndarray:
    """A smooth series with a level of its own per channel, as real ones have."""
    series = np.cumsum(draw(channels, steps, seed=seed), axis=1) / 5.0
    return series + 3.0 * draw(channels, 1, seed=seed)


def expected_moments(z: np.ndarray, y: np.ndarray) -> Moments:
    return Moments(z.T @ z, z.T @ y, float((y**2).sum()), len(z))


def assert_moments(got: Moments, expected: Moments, rtol: float = 1e-10) -> None:
    size = np.abs(expected.gram).max()
    np.testing.assert_allclose(got.gram, expected.gram, rtol=0, atol=rtol * size)
    np.testing.assert_allclose(got.cross, expected.cross, rtol=0, atol=rtol * size)
    assert got.energy == pytest.approx(expected.energy, rel=rtol)
    assert got.count == expected.count


# -- moments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("centre", CENTRES)
@pytest.mark.parametrize(("start", "stop"), [(0, 60), (5, 48), (7, 8)])
def test_moments_equal_sums_over_windows(centre: Centre, start: int, stop: int) -> None:
    series = walk(3, 72)
    windows = oracle.windows(series, L, H, start, stop)
    expected = expected_moments(*oracle.centred(*windows, centre))
    assert_moments(moments(series, L, H, start, stop, centre), expected)


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("rows", [1024, 5])
def test_revin_moments_equal_sums_over_windows(
    every: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("levelhead.nn.linear._CHUNK_ROWS", rows)
    series = walk(3, 72)
    x, y = oracle.windows(series, L, H, 5, 60)
    kept = (np.arange(len(x)) % 55) % every == 0
    expected = expected_moments(*oracle.centred(x[kept], y[kept], "mean", floor=0.3))
    got = revin_moments(series, L, H, 5, 60, floor=0.3, every=every)
    assert_moments(got, expected)


@pytest.mark.parametrize("centre", [*CENTRES, None])
@pytest.mark.parametrize("floor", [None, 0.3])
def test_pair_moments_equal_sums_over_windows(centre: Centre | None, floor: float | None) -> None:
    contexts, targets = 2.0 + draw(11, 3, L), draw(11, 3, H)
    rows = contexts.reshape(-1, L), targets.reshape(-1, H)
    expected = expected_moments(*oracle.centred(*rows, centre, floor))
    assert_moments(pair_moments(contexts, targets, centre, floor=floor), expected)


def test_streamed_and_written_out_windows_agree() -> None:
    series = walk(2, 60)
    cuts = np.lib.stride_tricks.sliding_window_view(series, L + H, axis=1)  # [D, N, P]
    contexts, targets = np.split(cuts.swapaxes(0, 1), [L], axis=-1)
    for centre in CENTRES:
        assert_moments(
            moments(series, L, H, 0, 48, centre), pair_moments(contexts, targets, centre)
        )
    assert_moments(
        revin_moments(series, L, H, 0, 48, floor=1.0),
        pair_moments(contexts, targets, "mean", floor=1.0),
    )


def test_lag_moments_are_symmetric_and_leave_the_series_alone() -> None:
    series = walk(2, 40)
    before = series.copy()
    raw = lag_moments(series, 7, 3, 30)
    np.testing.assert_array_equal(raw, raw.T)
    moments(series, L, H, 0, 20, "last")
    revin_moments(series, L, H, 0, 20, floor=1.0)
    np.testing.assert_array_equal(series, before)


@pytest.mark.parametrize(
    "compute",
    [
        lambda s, n: lag_moments(s, 60, 0, n),
        lambda s, n: moments(s, 48, 12, 0, n, "last"),
        lambda s, n: revin_moments(s, 48, 12, 0, n, floor=1.0),
    ],
    ids=["lag", "last", "revin"],
)
def test_memory_does_not_grow_with_the_number_of_windows(
    compute: Callable[[np.ndarray, int], object],
) -> None:
    series = draw(2, 20_000)

    def peak(count: int) -> int:
        tracemalloc.start()
        compute(series, count)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    compute(series, 2000)  # what is allocated only once
    few, many = peak(4000), peak(16_000)
    assert many < 1.1 * few
    assert few < 16_000 * 60 * 8 / 4  # far from the windows written out


# -- errors and solutions ------------------------------------------------------------------------


@pytest.mark.parametrize("centre", CENTRES)
def test_error_equals_that_of_the_residuals(centre: Centre) -> None:
    series, weights = walk(3, 72), draw(L, H, seed=1)
    x, y = oracle.windows(series, L, H, 0, 60)
    residuals = predict_line(x, weights, centre) - y
    got = moments(series, L, H, 0, 60, centre).error(weights)
    assert got == pytest.approx(np.mean(residuals**2), rel=1e-10)


def test_revin_error_weighs_each_window() -> None:
    series, weights = walk(3, 72), draw(L, H, seed=1)
    x, y = oracle.windows(series, L, H, 0, 60)
    residuals = (predict_line(x, weights, "mean") - y) / np.sqrt(x.var(axis=1) + 0.3)[:, None]
    got = revin_moments(series, L, H, 0, 60, floor=0.3).error(weights)
    assert got == pytest.approx(np.mean(residuals**2), rel=1e-10)


@pytest.mark.parametrize("kind", ["last", "mean", "revin"])
@pytest.mark.parametrize("penalty", [1e-3, 0.1, 10.0])
def test_solutions_equal_least_squares_on_the_stacked_design(kind: str, penalty: float) -> None:
    series = walk(3, 90)
    x, y = oracle.windows(series, L, H, 2, 70)
    if kind == "revin":
        fitted = revin_moments(series, L, H, 2, 70, floor=0.5)
        z, target = oracle.centred(x, y, "mean", floor=0.5)
    else:
        fitted = moments(series, L, H, 2, 70, kind)  # type: ignore[arg-type]
        z, target = oracle.centred(x, y, kind)
    expected = oracle.ridge(z, target, penalty)
    np.testing.assert_allclose(solve_line(fitted, penalty), expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(LinePath(fitted).weights(penalty), expected, rtol=1e-8, atol=1e-10)


def test_revin_solution_is_explicit_weighted_least_squares() -> None:
    series = walk(3, 90)
    x, y = oracle.windows(series, L, H, 0, 70)
    weight = 1.0 / (x.var(axis=1) + 0.5)
    level = x.mean(axis=1, keepdims=True)
    root = np.sqrt(weight)[:, None]
    expected = oracle.ridge((x - level) * root, (y - level) * root, 0.1)
    got = solve_line(revin_moments(series, L, H, 0, 70, floor=0.5), 0.1)
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-10)
    flat = solve_line(moments(series, L, H, 0, 70, "mean"), 0.1)
    assert np.abs(got - flat).max() > 1e-2


def test_path_errors_are_those_of_its_weights_on_other_windows() -> None:
    series = walk(3, 120)
    fitted, judged = moments(series, L, H, 0, 60, "last"), moments(series, L, H, 70, 100, "last")
    x, y = oracle.windows(series, L, H, 70, 100)
    penalties = [1e-4, 1e-2, 1.0, 1e3]
    expected = [
        np.mean((predict_line(x, solve_line(fitted, p), "last") - y) ** 2) for p in penalties
    ]
    np.testing.assert_allclose(LinePath(fitted).errors(judged, penalties), expected, rtol=1e-9)


def test_a_known_line_is_found() -> None:
    true = draw(L, H, seed=3)
    contexts = draw(50, 2, L)
    targets = predict_line(contexts, true, "mean")
    weights = solve_line(pair_moments(contexts, targets, "mean"), 1e-13)
    np.testing.assert_allclose(predict_line(contexts, weights, "mean"), targets, atol=1e-8)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(predict_line(contexts, weights, "last"), targets, atol=1e-2)


# -- the line as SAMformer's head ----------------------------------------------------------------


@pytest.mark.parametrize("centre", CENTRES)
def test_the_head_is_the_line(centre: Centre) -> None:
    weights, x = draw(L, H, seed=1), 5.0 + draw(6, 3, L)
    head = line_as_head(weights, centre)
    np.testing.assert_allclose(head.sum(axis=0), 1.0, rtol=1e-13)
    line = predict_line(x, weights, centre)
    np.testing.assert_allclose(x @ head, line, rtol=1e-12, atol=1e-12)
    # The same with RevIN around it, for its columns sum to one.
    mean, deviation = x.mean(axis=-1, keepdims=True), np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    around = (x - mean) / deviation @ head * deviation + mean
    np.testing.assert_allclose(around, line, rtol=1e-12, atol=1e-12)


def test_the_head_of_the_last_value_is_the_formula() -> None:
    weights = draw(L, H, seed=1)
    expected = weights.copy()
    for h in range(H):
        expected[L - 1, h] += 1.0 - sum(weights[:, h])
    np.testing.assert_allclose(line_as_head(weights, "last"), expected, rtol=1e-13, atol=1e-14)


def test_a_line_with_an_intercept_is_no_head() -> None:
    weights, x = draw(L, H, seed=1), 5.0 + draw(200, L)
    intercept = 0.3 + draw(H, seed=2) ** 2
    straight = predict_line(x, weights, "last")

    def left_by_the_best_head(y: np.ndarray) -> float:
        mean, deviation = x.mean(axis=1, keepdims=True), x.std(axis=1, keepdims=True)
        z, target = (x - mean) / deviation, (y - mean) / deviation
        best = np.linalg.lstsq(z, target, rcond=None)[0]
        return float(np.abs(z @ best - target).max())

    assert left_by_the_best_head(straight) < 1e-12
    assert left_by_the_best_head(straight + intercept) > 0.3
    # RevIN and a head commute with a change of scale, an intercept does not.
    doubled = predict_line(2.0 * x, weights, "last")
    np.testing.assert_allclose(doubled, 2.0 * straight, rtol=1e-12)
    assert np.abs((doubled + intercept) - 2.0 * (straight + intercept)).min() > 0.29


def test_the_two_examples_of_the_module() -> None:
    x = draw(5, L)
    repeated = np.repeat(x[:, -1:], H, axis=1)
    np.testing.assert_array_equal(predict_line(x, np.zeros((L, H)), "last"), repeated)
    last = np.zeros((L, H))
    last[-1] = 1.0
    np.testing.assert_allclose(predict_line(x, last, "mean"), repeated, atol=1e-15)


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 5), (5, 5), (0, 29)], ids=["negative", "empty", "beyond the end"]
)
def test_starts_that_do_not_fit_are_refused(start: int, stop: int) -> None:
    for compute in (
        lambda s: lag_moments(s, L + H, start, stop),
        lambda s: moments(s, L, H, start, stop, "last"),
        lambda s: revin_moments(s, L, H, start, stop, floor=1.0),
    ):
        with pytest.raises(InputError, match="width 13 do not fit in 40 steps: shorten"):
            compute(draw(2, 40))


def test_other_refusals() -> None:
    with pytest.raises(InputError, match=r"shape \(40,\) was given"):
        lag_moments(draw(40), 5, 0, 9)
    with pytest.raises(InputError, match="float64 series is needed, float32 was given"):
        revin_moments(draw(2, 40).astype(np.float32), L, H, 0, 9, floor=1.0)
    fitted = moments(draw(2, 40), L, H, 0, 9, "last")
    for penalty in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="must be positive"):
            solve_line(fitted, penalty)
        with pytest.raises(InputError, match="must be positive"):
            LinePath(fitted).weights(penalty)
        with pytest.raises(InputError, match="must be positive"):
            LinePath(fitted).errors(fitted, [1.0, penalty])
