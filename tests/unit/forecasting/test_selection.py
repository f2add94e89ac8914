"""The choice among candidates on errors made by hand, and blends against other optimisers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from levelhead.forecasting.candidates import Line, SeasonalNaive
from levelhead.forecasting.fitting import Fitted, Plan, select
from levelhead.forecasting.selection import (
    Entrant,
    blend_weights,
    block_means,
    choose,
    relative_blocks,
)
from levelhead.training.loop import TrainingSettings
from oracles import forecasting as oracle


def entrants(**errors: tuple[int, list[float]]) -> list[Entrant]:
    return [Entrant(name, rank, np.array(e)) for name, (rank, e) in errors.items()]


# -- one standard error ---------------------------------------------------------------------------


def test_the_simplest_within_one_standard_error() -> None:
    """Excess .1, .02, 0 with standard errors that are known: spread .2, √4 blocks, t(3)."""
    found = choose(
        entrants(
            far=(0, [1.1, 1.1, 1.1, 1.1]),
            simple=(1, [0.92, 1.12, 0.92, 1.12]),
            best=(2, [1.0, 1.0, 1.0, 1.0]),
        )
    )
    assert (found.chosen, found.best, found.blocks) == ("simple", "best", 4)
    assert found.errors["simple"] == pytest.approx(1.02)
    assert found.excess == pytest.approx({"far": 0.1, "simple": 0.02, "best": 0.0})
    # sqrt(4 · .1²/3)/√4 = .057735, widened by t(3): the 84.13 % point is 1.1969
    assert found.standard_errors["simple"] == pytest.approx(0.0577350 * 1.1968931, rel=1e-5)
    assert found.standard_errors["far"] == 0.0


def test_what_is_beyond_one_standard_error_is_not_taken() -> None:
    found = choose(entrants(simple=(0, [1.06, 1.16, 1.06, 1.16]), best=(2, [1.0, 1.0, 1.0, 1.0])))
    assert found.excess["simple"] > found.standard_errors["simple"]
    assert found.chosen == "best"


def test_the_better_of_two_equally_simple() -> None:
    noise = [0.9, 1.1, 0.8, 1.2]
    found = choose(
        entrants(one=(1, [1.01 * e for e in noise]), two=(1, noise), net=(2, [0.95, 1.0, 0.9, 1.1]))
    )
    assert found.best == "net"
    assert found.chosen == "two"


@pytest.mark.parametrize(
    ("blocks", "factor"), [(2, 1.8367), (3, 1.3210), (4, 1.1969), (12, 1.0476)]
)
def test_few_blocks_widen_the_standard_error(blocks: int, factor: float) -> None:
    """Student's t at the level of one normal deviation, 84.13 % one-sided."""
    wave = np.resize([0.0, 1.0], blocks)
    found = choose([Entrant("a", 0, 5.0 + wave), Entrant("b", 1, np.ones(blocks))])
    plain = wave.std(ddof=1) / np.sqrt(blocks)
    assert found.standard_errors["a"] / plain == pytest.approx(factor, abs=1e-3)


def test_the_spread_is_that_of_the_difference() -> None:
    """Blocks that are hard for all say nothing about who is better."""
    hard = np.array([1.0, 5.0, 2.0, 9.0])
    found = choose([Entrant("simple", 0, hard + 0.01), Entrant("best", 2, hard)])
    assert found.chosen == "best"
    assert found.standard_errors["simple"] < 1e-12


def test_one_block_cannot_speak_against_the_simplest() -> None:
    found = choose(entrants(simple=(0, [2.0]), best=(3, [1.0])))
    assert (found.chosen, found.best, found.blocks) == ("simple", "best", 1)


# -- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "horizon", "blocks"),
    [(1, 5, 1), (2, 5, 2), (9, 5, 2), (19, 5, 3), (200, 5, 12), (24, 1, 12), (30, 3, 10)],
)
def test_blocks_are_runs_of_at_least_a_horizon(count: int, horizon: int, blocks: int) -> None:
    values = np.random.default_rng(0).normal(size=(count, 2))
    got = block_means(values, horizon)
    assert got.shape == (blocks, 2)
    at = 0
    for b in range(blocks):
        length = count // blocks + (b < count % blocks)
        np.testing.assert_allclose(got[b], values[at : at + length].mean(axis=0), rtol=1e-12)
        assert length >= horizon or blocks <= 2
        at += length


def products_of(residuals: np.ndarray) -> np.ndarray:
    """`[N, K, K]` from residuals `[K, N, ...]`."""
    flat = residuals.reshape(*residuals.shape[:2], -1)
    return np.einsum("knx,lnx->nkl", flat, flat) / flat.shape[-1]


def test_blocks_are_relative_to_the_line_in_each() -> None:
    draw = np.random.default_rng(1)
    residuals = draw.normal(size=(2, 40, 3))
    residuals[:, 20:] *= 100.0  # a lively half counts as much as the quiet one
    products = products_of(residuals)
    got = relative_blocks(products, 1, horizon=10)
    for b in range(4):
        part = products[10 * b : 10 * b + 10].mean(axis=0)
        np.testing.assert_allclose(got[b], part / part[1, 1], rtol=1e-12)
    np.testing.assert_allclose(got[:, 1, 1], 1.0)


def test_a_block_in_which_nothing_moves_decides_nothing() -> None:
    """There the line has no error at all and a network errs by its biases' rounding."""
    draw = np.random.default_rng(2)
    residuals = draw.normal(size=(3, 60, 4)) * np.array([2.0, 1.0, 0.5])[:, None, None]
    residuals[:, :20] = 0.0
    residuals[2, :20] = 1e-7
    blocks = relative_blocks(products_of(residuals), 1, horizon=10)
    names = [("naive", 0), ("linear", 1), ("net", 2)]
    found = choose([Entrant(n, s, blocks[:, i, i]) for i, (n, s) in enumerate(names)])
    assert found.chosen == "net"
    assert np.isfinite(list(found.standard_errors.values())).all()


# -- blends ---------------------------------------------------------------------------------------


def error_matrix(size: int, seed: int, samples: int = 30) -> np.ndarray:
    """Products of residuals of unequal size that share a part, as those of forecasts do."""
    draw = np.random.default_rng(seed)
    shared = draw.normal(size=samples)
    own = draw.normal(size=(size, samples)) * draw.uniform(0.3, 1.5, (size, 1))
    residuals = shared + own
    return residuals @ residuals.T / samples


@pytest.mark.parametrize("seed", range(12))
def test_blend_weights_are_the_best_of_all(seed: int) -> None:
    size = 2 + seed % 3
    products = error_matrix(size, seed)
    weights = blend_weights(products)
    error = weights @ products @ weights
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert weights.min() >= 0
    _, on_grid = oracle.best_blend(products, steps=40 if size < 4 else 20)
    assert error <= on_grid + 1e-12
    solved = minimize(
        lambda w: w @ products @ w,
        np.full(size, 1 / size),
        jac=lambda w: 2 * products @ w,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(size)},
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(weights, solved.x, atol=2e-5)
    assert error == pytest.approx(solved.fun, rel=1e-8)


def test_a_member_that_only_harms_gets_exactly_nothing() -> None:
    products = np.array([[1.0, 1.0, 1.0], [1.0, 4.0, 1.2], [1.0, 1.2, 9.0]])
    np.testing.assert_array_equal(blend_weights(products), [1.0, 0.0, 0.0])


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_weights_do_not_depend_on_the_unit(size: float) -> None:
    products = error_matrix(3, 4)
    np.testing.assert_allclose(blend_weights(size * products), blend_weights(products), rtol=1e-9)


@pytest.mark.parametrize(
    ("products", "error"),
    [
        (np.array([[1.0, -1.0], [-1.0, 1.0]]), 0.0),  # opposite errors cancel
        (np.array([[1.0, -2.0], [-2.0, 4.0]]), 0.0),
        (np.ones((3, 3)), 1.0),  # copies
        (np.zeros((2, 2)), 0.0),  # nothing errs
        (np.array([[0.0, 0.0], [0.0, 1.0]]), 0.0),
    ],
)
def test_degenerate_blends(products: np.ndarray, error: float) -> None:
    weights = blend_weights(products)
    assert weights.sum() == pytest.approx(1.0)
    assert weights.min() >= 0
    assert weights @ products @ weights == pytest.approx(error, abs=1e-12)


# -- select: the blend judged on blocks that did not weigh it -------------------------------------


class _Recorded:
    """A source whose residual products are given: three candidates on N windows."""

    context = horizon = 4
    channels, judged = 1, None

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def test_the_blend_is_judged_on_blocks_that_did_not_weigh_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = np.random.default_rng(8)
    residuals = draw.normal(size=(3, 40, 2)) * np.array([3.0, 1.0, 1.1])[:, None, None]
    products = products_of(residuals)
    monkeypatch.setattr("levelhead.forecasting.fitting.residual_products", lambda *given: products)
    lines = {n: Line(None, 1.0, n) for n in ("linear", "linear-revin")}  # type: ignore[arg-type]
    fitted = Fitted({"naive": SeasonalNaive(1, 4), **lines})
    plan = Plan(("naive", "linear", "linear-revin", "blend"), 1, TrainingSettings())
    _, choice, complete = select(fitted, plan, _Recorded(40))  # type: ignore[arg-type]
    assert choice is not None
    blocks = [products[4 * b : 4 * b + 4].mean(axis=0) for b in range(10)]
    inner = [(b / b[1, 1])[1:, 1:] for b in blocks]

    def of_two(e: np.ndarray) -> np.ndarray:
        share = (e[1, 1] - e[0, 1]) / (e[0, 0] + e[1, 1] - 2 * e[0, 1])
        return np.array([np.clip(share, 0, 1), 1 - np.clip(share, 0, 1)])

    expected = []
    for b in range(10):
        others = of_two(np.mean([e for i, e in enumerate(inner) if i != b], axis=0))
        expected.append(others @ inner[b] @ others)
    assert choice.errors["blend"] == pytest.approx(np.mean(expected), rel=1e-9)
    blend = complete.candidates["blend"]
    np.testing.assert_allclose(blend.weights, of_two(np.mean(inner, axis=0)), rtol=1e-9)  # type: ignore[attr-defined]
    assert [m.name for m in blend.members] == ["linear", "linear-revin"]  # type: ignore[attr-defined]


def test_one_model_leaves_nothing_to_choose() -> None:
    naive = SeasonalNaive(1, 4)
    plan = Plan(("naive",), 1, TrainingSettings())
    chosen, choice, _ = select(Fitted({"naive": naive}), plan, _Recorded(40))  # type: ignore[arg-type]
    assert chosen is naive
    assert choice is None


def test_one_block_tells_nothing_for_a_trained_model() -> None:
    """Then the better closed form is taken: neither the simplest nor the best of all."""
    choice = choose(
        [
            Entrant("naive", 0, np.array([9.0])),
            Entrant("linear", 1, np.array([1.0])),
            Entrant("samformer", 2, np.array([0.5])),
        ]
    )
    assert (choice.chosen, choice.best, choice.blocks) == ("linear", "samformer", 1)
