"""Tests of differences: against closed forms, against other libraries, and under the null."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from levelhead.base.errors import InputError
from levelhead.evaluation.significance import (
    block_bootstrap,
    clopper_pearson,
    diebold_mariano,
    holm,
    paired_blocks,
    paired_seeds,
    poisson_rate,
)


def moving(draw: np.random.Generator, n: int, width: int) -> np.ndarray:
    """A series whose neighbours within `width` are correlated."""
    return np.convolve(draw.normal(size=n + width - 1), np.ones(width) / math.sqrt(width), "valid")


def test_seeds_agree_with_scipys_paired_test() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=10), draw.normal(size=10) + 0.5
    found, other = paired_seeds(a, b), stats.ttest_rel(a, b)
    interval = other.confidence_interval()
    assert found.p_value == pytest.approx(other.pvalue, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-12)
    assert found.effect == pytest.approx((a - b).mean() / (a - b).std(ddof=1), rel=1e-12)


@pytest.mark.parametrize(
    ("first", "second"),
    [([2.0, 3.0], [1.0, 2.0]), ([1.1, 1.3, 1.7], [1.0, 1.2, 1.6])],  # the second but for rounding
)
def test_seeds_that_agree_exactly_are_not_judged(first: list[float], second: list[float]) -> None:
    found = paired_seeds(first, second)
    assert not found.judged
    assert found.difference == pytest.approx(first[0] - second[0])
    assert np.isnan([found.low, found.high, found.p_value, found.effect]).all()
    same = paired_seeds(first, first)
    assert (same.p_value, same.low, same.high) == (1.0, 0.0, 0.0)


def test_blocks_agree_with_scipys_test_of_their_means() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.normal(size=60), draw.normal(size=60) + 0.2
    found = paired_blocks(a, b, block=10)
    other = stats.ttest_rel(a.reshape(6, 10).mean(axis=1), b.reshape(6, 10).mean(axis=1))
    interval = other.confidence_interval()
    assert found.p_value == pytest.approx(other.pvalue, rel=1e-10)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert found.count == 6


def test_blocks_use_every_window_and_are_never_shorter_than_asked() -> None:
    draw = np.random.default_rng(2)
    d = draw.normal(size=69)
    found = paired_blocks(d, np.zeros(69), block=10)
    # six runs of 12, 12, 12, 11, 11 and 11 windows
    means = [run.mean() for run in np.split(d, [12, 24, 36, 47, 58])]
    half = stats.t.ppf(0.975, 5) * np.std(means, ddof=1) / math.sqrt(6)
    assert found.difference == pytest.approx(d.mean(), rel=1e-12)
    assert found.high - found.low == pytest.approx(2 * half, rel=1e-12)
    assert found.effect == pytest.approx(d.mean() / np.std(means, ddof=1), rel=1e-12)


def test_fewer_than_five_blocks_are_not_judged() -> None:
    d = np.random.default_rng(3).normal(size=50) + 9
    assert paired_blocks(d, np.zeros(50), block=10).judged
    found = paired_blocks(d[1:], np.zeros(49), block=10)
    assert not found.judged
    assert (found.difference, found.count) == (pytest.approx(d[1:].mean()), 4)
    assert np.isnan([found.low, found.high]).all()


def test_diebold_mariano_is_held_against_the_lowest_frequencies() -> None:
    d = moving(np.random.default_rng(2), 60, 4) + 0.2
    ordinates = 60 // (4 * 4)
    power = []
    for j in range(1, ordinates + 1):
        angles = [2 * math.pi * j * t / 60 for t in range(60)]
        real = sum(x * math.cos(angle) for x, angle in zip(d, angles, strict=True))
        imaginary = sum(x * math.sin(angle) for x, angle in zip(d, angles, strict=True))
        power.append((real**2 + imaginary**2) / 60)
    t = d.mean() / math.sqrt(sum(power) / ordinates / 60)
    found = diebold_mariano(d, np.zeros(60), horizon=4)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(t), 2 * ordinates), rel=1e-10)
    half = stats.t.ppf(0.975, 2 * ordinates) * d.mean() / t
    assert (found.low, found.high) == pytest.approx((d.mean() - half, d.mean() + half))


@pytest.mark.parametrize("d", [np.full(40, 0.3), np.tile([0.1, 0.5], 20)])
def test_without_any_low_frequency_diebold_mariano_does_not_judge(d: np.ndarray) -> None:
    found = diebold_mariano(d, np.zeros(40), horizon=2)
    assert found.difference == pytest.approx(0.3)
    assert not found.judged


def rejects(kind: str, d: np.ndarray, horizon: int) -> bool:
    zeros = np.zeros_like(d)
    if kind == "blocks":
        found = paired_blocks(d, zeros, block=2 * horizon)
    elif kind == "diebold-mariano":
        found = diebold_mariano(d, zeros, horizon=horizon)
    else:
        found = block_bootstrap(d, zeros, block=horizon, draws=200)
    return found.p_value < 0.05


@pytest.mark.parametrize("share", [10, 15, 28])
def test_where_nothing_is_there_overlapping_windows_are_rejected_as_often_as_asked(
    share: int,
) -> None:
    draw = np.random.default_rng(share)
    horizon, tries = 96, 400
    # A mean over H white errors for each window.
    windows = [moving(draw, share * horizon, horizon) for _ in range(tries)]
    often = {
        kind: np.mean([rejects(kind, d, horizon) for d in windows])
        for kind in ("blocks", "diebold-mariano", "bootstrap")
    }
    for kind in ("blocks", "diebold-mariano"):
        assert 0.02 <= often[kind] <= 0.1
    assert often["bootstrap"] > 0.125  # why nothing is judged by it


@pytest.mark.parametrize("kind", ["blocks", "diebold-mariano"])
def test_what_is_there_is_found(kind: str) -> None:
    draw = np.random.default_rng(6)
    # Three deviations of a mean of 20 independent blocks.
    found = [rejects(kind, 3 / math.sqrt(20) + moving(draw, 960, 48), 48) for _ in range(200)]
    assert 0.6 < np.mean(found) < 0.9


def test_the_bootstrap_covers_and_its_draws_are_seeded() -> None:
    draw = np.random.default_rng(4)
    covered = 0
    for number in range(300):
        d = 0.3 + moving(draw, 300, 5)
        found = block_bootstrap(d, np.zeros_like(d), block=15, draws=300, seed=number)
        covered += found.low <= 0.3 <= found.high
    assert covered / 300 > 0.88
    again = [block_bootstrap(d, np.zeros_like(d), block=15, seed=9) for _ in range(2)]
    assert again[0] == again[1]


def test_the_bootstrap_of_blocks_is_a_mean_over_wrapped_blocks() -> None:
    d = np.arange(6.0)
    found = block_bootstrap(d, np.zeros(6), block=6, draws=200)
    # one block of all six, wherever it starts, always has the same mean
    assert (found.low, found.high) == (2.5, 2.5)


def test_holm_steps_down_and_never_falls() -> None:
    found = holm({"a": 0.02, "b": 0.9, "c": 0.011, "d": 0.021})
    assert found == pytest.approx({"c": 0.044, "a": 0.06, "d": 0.06, "b": 0.9})


@pytest.mark.parametrize(("hits", "tries"), [(0, 10), (3, 10), (10, 10), (41, 43)])
def test_clopper_pearson_bounds_leave_half_the_rest_on_each_side(hits: int, tries: int) -> None:
    low, high = clopper_pearson(hits, tries)
    if hits:
        assert stats.binom.sf(hits - 1, tries, low) == pytest.approx(0.025, rel=1e-8)
    if hits < tries:
        assert stats.binom.cdf(hits, tries, high) == pytest.approx(0.025, rel=1e-8)


@pytest.mark.parametrize("events", [0, 1, 7])
def test_poisson_bounds_leave_half_the_rest_on_each_side(events: int) -> None:
    low, high = poisson_rate(events, 20.0)
    if events:
        assert stats.poisson.sf(events - 1, 20 * low) == pytest.approx(0.025, rel=1e-8)
    assert stats.poisson.cdf(events, 20 * high) == pytest.approx(0.025, rel=1e-8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_seeds([1.0], [2.0]), "at least 2"),
        (lambda: paired_seeds([1.0, 2.0], [2.0]), "of the same length"),
        (lambda: paired_seeds([1.0, math.nan], [2.0, 1.0]), "not finite"),
        (lambda: block_bootstrap([1.0, 2.0], [2.0, 1.0], block=3), "from 1 to 2"),
        (lambda: block_bootstrap([1.0, 2.0], [2.0, 1.0], block=1, draws=9), "at least 100"),
        (lambda: paired_blocks([1.0] * 9, [2.0] * 9, block=0), "at least 1"),
        (lambda: diebold_mariano([1.0] * 9, [2.0] * 9, horizon=3), "from 1 to 2"),
        (lambda: diebold_mariano([1.0] * 3, [2.0] * 3, horizon=1), "at least 4"),
        (lambda: holm({"a": 1.5}), "from 0 to 1"),
        (lambda: clopper_pearson(3, 2), "3 hits of 2 tries"),
        (lambda: poisson_rate(1, 0.0), "a size above zero"),
    ],
)
def test_what_cannot_be_used_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
