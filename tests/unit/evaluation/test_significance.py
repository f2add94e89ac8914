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


def test_without_lags_diebold_mariano_is_a_t_test_of_the_differences() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.normal(size=40), draw.normal(size=40) + 0.2
    found = diebold_mariano(a, b, lags=0)
    assert found.p_value == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-10)


def test_diebold_mariano_weighs_neighbours_as_newey_and_west() -> None:
    draw = np.random.default_rng(2)
    d = moving(draw, 60, 4)
    lags, n = 3, 60
    c = d - d.mean()
    gammas = [sum(c[t] * c[t - lag] for t in range(lag, n)) / n for lag in range(lags + 1)]
    variance = gammas[0] + 2 * sum((1 - k / (lags + 1)) * gammas[k] for k in range(1, lags + 1))
    h = lags + 1
    harvey = math.sqrt((n + 1 - 2 * h + h * (h - 1) / n) / n)
    t = d.mean() / math.sqrt(variance / n) * harvey
    found = diebold_mariano(d, np.zeros(n), lags=lags)
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(t), n - 1), rel=1e-10)


@pytest.mark.parametrize("kind", ["bootstrap", "diebold-mariano"])
def test_under_the_null_dependent_windows_are_rejected_about_as_often_as_asked(kind: str) -> None:
    draw = np.random.default_rng(3)
    rejected, tries, width = 0, 400, 8
    for number in range(tries):
        d = moving(draw, 400, width)
        zeros = np.zeros_like(d)
        if kind == "bootstrap":
            found = block_bootstrap(d, zeros, block=3 * width, draws=400, seed=number)
        else:
            found = diebold_mariano(d, zeros, lags=3 * width)
        rejected += found.p_value < 0.05
    # blind to the dependence, a t-test rejects about half of these
    assert 0.02 <= rejected / tries <= 0.11
    naive = np.mean(
        [stats.ttest_1samp(moving(draw, 400, width), 0).pvalue < 0.05 for _ in range(200)]
    )
    assert naive > 0.3


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
        (lambda: diebold_mariano([1.0] * 4, [2.0] * 4, lags=4), "from 0 to 3"),
        (lambda: holm({"a": 1.5}), "from 0 to 1"),
        (lambda: clopper_pearson(3, 2), "3 hits of 2 tries"),
        (lambda: poisson_rate(1, 0.0), "a size above zero"),
    ],
)
def test_what_cannot_be_used_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
