"""CP decompositions against plain ALS, exact models and TensorLy."""

from __future__ import annotations

import doctest
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import levelhead.tensors.cp
import levelhead.tensors.cp_ranks
from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.tensors.cp import CPTensor, cp, largest_useful_rank
from levelhead.tensors.cp_line_search import extrapolated
from levelhead.tensors.cp_ranks import RankPoint, choose_rank, core_consistency, cp_rank_curve
from levelhead.tensors.cp_targets import CPTarget, DenseCPTarget, StackCPTarget
from levelhead.tensors.low_rank_stack import LowRankStack
from oracles import tensors as oracle


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def planted(shape: tuple[int, ...], rank: int, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    factors = [draw(n, rank, seed=seed + k) for k, n in enumerate(shape)]
    weights = np.arange(rank, 0.0, -1.0)
    return oracle.cp_model(weights, factors) + noise * draw(*shape, seed=seed + 99)


def model_of(fit: CPTensor) -> np.ndarray:
    return oracle.cp_model(fit.weights.numpy(), [f.numpy() for f in fit.factors])


def true_error(x: np.ndarray, fit: CPTensor) -> float:
    return float(np.sqrt(((x - model_of(fit)) ** 2).sum() / (x**2).sum()))


def make_stack(h: int, r: int, m: int, n: int, group: tuple[int, ...] | None) -> LowRankStack:
    left, right = draw(h, r, m), draw(h if group is None else max(group) + 1, r, n, seed=1)
    return LowRankStack(torch.tensor(left), torch.tensor(right), group)


STACKS = {
    "plain": make_stack(4, 2, 7, 6, None),
    "grouped": make_stack(4, 2, 7, 6, (0, 0, 1, 1)),
    "grouped, transposed": make_stack(4, 2, 7, 6, (0, 1, 1, 0)).mT,
}


def test_examples_in_the_docstrings() -> None:
    for module in (levelhead.tensors.cp, levelhead.tensors.cp_ranks):
        found = doctest.testmod(module)
        assert found.attempted >= 2
        assert found.failed == 0


# ── the iterates ──


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 4, 5, 3), [0, 1, 3, 2]),
        ((6, 4, 5), [1, 2, 0]),
        ((3, 4, 5), [0, 1, 2]),
        ((2, 3, 2, 4, 3), [0, 1, 2, 4, 3]),
        ((4, 5), [0, 1]),
    ],
)
@pytest.mark.parametrize("rank", [1, 3])
def test_iterates_are_those_of_plain_als(
    shape: tuple[int, ...], order: list[int], rank: int
) -> None:
    x = draw(*shape)
    start = [draw(n, rank, seed=7 + k) for k, n in enumerate(shape)]
    for sweeps in (1, 2, 9):
        expected = oracle.cp_model(np.ones(rank), oracle.als(x, start, order, sweeps))
        fit = cp(
            torch.tensor(x),
            rank,
            init=[torch.tensor(f) for f in start],
            sweeps=sweeps,
            tolerance=0.0,
            line_search=False,
        )
        assert fit.sweeps == sweeps
        size = np.abs(expected).max()
        np.testing.assert_allclose(model_of(fit), expected, rtol=0, atol=1e-10 * size)


@pytest.mark.parametrize("name", STACKS)
def test_iterates_from_factors_are_those_from_the_dense_tensor(name: str) -> None:
    stack = STACKS[name]
    dense = stack.dense()
    start = [draw(n, 3, seed=k) for k, n in enumerate(stack.shape)]
    for sweeps in (1, 8):
        expected = oracle.als(dense.numpy(), start, [0, 1, 2], sweeps)
        fit = cp(
            stack,
            3,
            init=[torch.tensor(f) for f in start],
            sweeps=sweeps,
            tolerance=0.0,
            line_search=False,
        )
        expected_model = oracle.cp_model(np.ones(3), expected)
        np.testing.assert_allclose(
            model_of(fit), expected_model, rtol=0, atol=1e-10 * np.abs(expected_model).max()
        )
        assert fit.relative_error == pytest.approx(true_error(dense.numpy(), fit), rel=1e-9)
        assert fit.error(stack) == pytest.approx(fit.relative_error, rel=1e-9)


def test_the_whole_tensor_is_multiplied_twice_a_sweep() -> None:
    """Counted where it happens: products with the [rest, n] matrix of the target."""

    calls: list[str] = []

    class Counted:
        """A matrix that notes every product with it or with its transpose."""

        def __init__(self, matrix: Tensor, name: str) -> None:
            self.matrix, self.name = matrix, name

        @property
        def mT(self) -> Counted:
            return Counted(self.matrix.mT, "Xᵀ")

        def __matmul__(self, other: Tensor) -> Tensor:
            calls.append(self.name)
            return self.matrix @ other

    for line_search in (False, True):
        target = DenseCPTarget(torch.tensor(planted((3, 4, 6), 2, 0.1)))
        target._matrix = Counted(target._matrix, "X")  # type: ignore[assignment]
        factors = [torch.tensor(draw(n, 2)) for n in (3, 4, 6)]
        calls.clear()
        levelhead.tensors.cp._als(target, factors, 10, 0.0, line_search)
        assert calls == ["X", "Xᵀ"] * 10


# ── the result ──


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", ["svd", "qr", "random"])
def test_form_and_error_of_the_result(dtype: torch.dtype, init: Any) -> None:
    x = torch.tensor(planted((4, 5, 6, 3), 3, 0.1)).to(dtype)
    fit = cp(x, 5, init=init, sweeps=30)
    assert fit.rank == 5
    assert (np.diff(fit.weights) <= 0).all()
    assert (fit.weights >= 0).all()
    for factor, n in zip(fit.factors, x.shape, strict=True):
        assert (factor.dtype, tuple(factor.shape)) == (torch.float64, (n, 5))
        np.testing.assert_allclose(factor.square().sum(0), np.ones(5), rtol=1e-12)
    expected = true_error(x.double().numpy(), fit)
    assert fit.relative_error == pytest.approx(expected, rel=1e-9)
    assert fit.error(x) == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(fit.reconstruct(), model_of(fit), rtol=0, atol=1e-12)
    assert fit.history[-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("init", ["svd", "qr", "random"])
def test_planted_components_are_found(init: Any) -> None:
    shape, rank = (5, 6, 7), 3
    factors = [draw(n, rank, seed=k) for k, n in enumerate(shape)]
    x = oracle.cp_model(np.array([3.0, 2.0, 1.0]), factors)
    fit = cp(torch.tensor(x), rank, init=init, starts=3, sweeps=2000, tolerance=1e-14)
    assert fit.relative_error < 1e-7
    lengths = np.prod([np.linalg.norm(f, axis=0) for f in factors], axis=0) * [3.0, 2.0, 1.0]
    order = np.argsort(-lengths)
    np.testing.assert_allclose(fit.weights, lengths[order], rtol=1e-5)
    for ours, theirs in zip(fit.factors, factors, strict=True):
        unit = theirs / np.linalg.norm(theirs, axis=0)
        np.testing.assert_allclose(np.abs((ours.numpy() * unit[:, order]).sum(0)), 1.0, rtol=1e-9)


def test_shares_along_the_short_mode() -> None:
    x = np.zeros((2, 3, 3))
    x[0, 0] = [2.0, 0.0, 0.0]
    x[1, 1] = [0.0, 0.6, 0.8]
    fit = cp(torch.tensor(x), 2, sweeps=100)
    expected = np.array([[1.0, 0.0, 0.0], [0.0, 0.36, 0.64]]).T
    np.testing.assert_allclose(fit.weights, [2.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(fit.shares(), expected, rtol=0, atol=1e-6)


def test_the_best_of_several_starts_is_returned() -> None:
    x = torch.tensor(planted((4, 4, 4), 4, seed=5))
    options = {"init": "random", "sweeps": 15, "tolerance": 0.0, "line_search": False}
    many = cp(x, 4, starts=6, **options)  # type: ignore[arg-type]
    single = [
        cp(x, 4, seed=1009 * k, **options).relative_error  # type: ignore[arg-type]
        for k in range(6)
    ]
    assert many.relative_error == min(single)
    assert len({round(e, 6) for e in single}) > 2


def test_the_fit_stops_at_its_tolerance() -> None:
    x = torch.tensor(planted((4, 5, 6), 2, 0.5))
    fit = cp(x, 2, tolerance=1e-7, sweeps=500)
    assert fit.converged
    assert fit.sweeps == len(fit.history) < 500
    steps = np.abs(np.diff(fit.history))
    assert steps[-1] < 1e-7
    assert (steps[:-1] >= 1e-7).all()
    assert not cp(x, 2, tolerance=0.0, sweeps=3).converged


# ── line search ──


@pytest.mark.parametrize("kind", ["dense", "five modes", *STACKS])
def test_the_error_along_the_line_is_exact(kind: str) -> None:
    """The polynomial's value at the chosen μ is the squared error of the moved factors."""
    x: Tensor
    target: CPTarget
    if kind in STACKS:
        x, target = STACKS[kind].dense(), StackCPTarget(STACKS[kind])
    else:
        x = torch.tensor(planted((4, 5, 6) if kind == "dense" else (2, 3, 2, 4, 3), 3, 0.1))
        target = DenseCPTarget(x)
    order = target.order
    factors = [torch.tensor(draw(n, 3, seed=k)) for k, n in enumerate(x.shape)]
    for k in order[:-1]:
        factors[k] /= factors[k].norm(dim=0)
    old = list(factors)

    def nudge(mode: int, mttkrp: Tensor) -> None:
        others = [f.numpy() for k, f in enumerate(factors) if k != mode]
        expected = oracle.unfold(x.numpy(), mode) @ oracle.khatri_rao(others)
        np.testing.assert_allclose(mttkrp, expected, rtol=0, atol=1e-11 * np.abs(expected).max())
        factors[mode] = factors[mode] + 0.01 * mttkrp / mttkrp.norm()

    target.sweep(factors, nudge)
    new = list(factors)
    coefficients = target.along(old, new)
    for mu in (0.0, 0.5, 3.0):
        there = [(b + mu * (b - a)).numpy() for a, b in zip(old, new, strict=True)]
        inner = (x.numpy() * oracle.cp_model(np.ones(3), there)).sum()
        value = sum(float(c) * mu**p for p, c in enumerate(coefficients))
        assert value == pytest.approx(inner, rel=1e-10)
    here = float(
        (x - torch.tensor(oracle.cp_model(np.ones(3), [f.numpy() for f in new]))).square().sum()
    )
    grams = [f.mT @ f for f in factors]
    square = extrapolated(target, old, factors, grams, here)
    moved = oracle.cp_model(np.ones(3), [f.numpy() for f in factors])
    assert square == pytest.approx(float(((x.numpy() - moved) ** 2).sum()), rel=1e-9)
    assert square < here
    for k in order[:-1]:
        np.testing.assert_allclose(factors[k].norm(dim=0), np.ones(3), rtol=1e-12)
    for gram, factor in zip(grams, factors, strict=True):
        np.testing.assert_allclose(gram, factor.mT @ factor, rtol=0, atol=1e-12)
    # What the target keeps has moved along: the next MTTKRP belongs to the moved factors.
    target.sweep(factors, nudge)


def test_line_search_needs_fewer_sweeps_on_a_slow_fit() -> None:
    """Nearly parallel components: the classic swamp of ALS."""
    base = draw(6, 1)
    factors = [base + 0.15 * draw(6, 3, seed=k) for k in range(3)]
    x = torch.tensor(oracle.cp_model(np.ones(3), factors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LevelheadWarning)
        slow, fast = (
            cp(x, 3, init="random", sweeps=150, tolerance=0.0, line_search=on)
            for on in (False, True)
        )
    assert fast.relative_error < slow.relative_error
    assert (np.diff(fast.history) <= 1e-9).all()


# ── degeneracy ──


def w_tensor() -> Tensor:
    """Border rank 2, rank 3: a best approximation of rank 2 does not exist."""
    x = torch.zeros(2, 2, 2, dtype=torch.float64)
    x[0, 0, 1] = x[0, 1, 0] = x[1, 0, 0] = 1.0
    return x


def test_the_alarm_rings_where_no_best_approximation_exists() -> None:
    with pytest.warns(LevelheadWarning, match="rank 2 is degenerate: components grow and cancel"):
        fit = cp(w_tensor(), 2, init="random", sweeps=500, tolerance=0.0, line_search=False)
    assert fit.degenerate
    assert fit.degeneracy < -0.9
    cosines = np.ones(())
    for f in fit.factors:
        cosines = cosines * float(f[:, 0] @ f[:, 1])
    assert fit.degeneracy == pytest.approx(float(cosines), rel=1e-12)
    longer = 2000
    with pytest.warns(LevelheadWarning, match="degenerate"):
        later = cp(w_tensor(), 2, init="random", sweeps=longer, tolerance=0.0, line_search=False)
    assert later.degeneracy < fit.degeneracy
    assert later.weights[0] > 1.2 * fit.weights[0]


def test_the_alarm_is_silent_on_sound_fits() -> None:
    for seed in range(6):
        fit = cp(torch.tensor(planted((5, 6, 7), 3, 0.05, seed=seed)), 3, sweeps=500)
        assert not fit.degenerate
        assert fit.degeneracy > -0.8
    assert cp(torch.ones(2, 3, 4), 1).degeneracy == 1.0
    assert not cp(w_tensor(), 3, init="random", starts=3, sweeps=3000, tolerance=1e-12).degenerate


def test_nearly_opposite_but_short_components_of_a_poor_fit_are_not_degenerate() -> None:
    """Noise: two components nearly cancel and still grow, but explain nothing yet."""
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(20, 20, 20, dtype=torch.float64, generator=draws)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LevelheadWarning)
        early, fit = (cp(x, 4, init="random", sweeps=n, tolerance=0.0) for n in (31, 60))
    assert fit.relative_error > 0.95
    assert fit.degeneracy < -0.9
    assert fit.weights[0] > 1.05 * early.weights[0]
    assert fit.weights[0] < torch.linalg.vector_norm(x)
    assert not fit.degenerate


# ── how many components ──


def test_core_consistency_is_that_of_bro_and_kiers() -> None:
    x = planted((5, 6, 7), 3, 1.0)
    for rank in (1, 2, 3, 4, 5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LevelheadWarning)
            fit = cp(torch.tensor(x), rank, sweeps=300)
        expected = oracle.core_consistency(x, fit.weights.numpy(), [f.numpy() for f in fit.factors])
        assert core_consistency(torch.tensor(x), fit) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_an_exact_fit_is_consistent_also_beyond_the_length_of_an_axis() -> None:
    factors = tuple(torch.tensor(draw(n, 5, seed=n)) for n in (3, 6, 7))
    unit = tuple(f / f.norm(dim=0) for f in factors)
    exact = CPTensor(torch.ones(5).double(), unit, 0.0)
    x = exact.reconstruct()
    assert core_consistency(x, exact) == pytest.approx(100.0, abs=1e-8)
    off = core_consistency(x + 0.3 * torch.tensor(draw(3, 6, 7)), exact)
    assert off < 90.0


def test_the_curve_falls_and_shows_the_planted_rank() -> None:
    x = torch.tensor(planted((6, 7, 8), 3, 0.05))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LevelheadWarning)
        curve = cp_rank_curve(x, [2, 3, 4, 5, 1, 3], starts=3, sweeps=1000, tolerance=1e-10)
    assert [p.rank for p in curve] == [1, 2, 3, 4, 5]
    errors = [p.relative_error for p in curve]
    assert (np.diff(errors) < 0).all()
    assert errors[1] > 5 * errors[2]
    for point in curve:
        assert point.consistency == core_consistency(x, point.fit)
        assert point.relative_error == point.fit.relative_error
    assert min(p.consistency for p in curve[:3]) > 90
    assert max(p.consistency for p in curve[3:]) < 50
    assert choose_rank(curve) == 3
    assert choose_rank(curve[3:]) == 4


def test_a_degenerate_rank_is_not_chosen_and_the_curve_starts_at_h() -> None:
    one = cp(torch.ones(2, 3, 4), 1)
    bad = CPTensor(one.weights, one.factors, 0.0, degenerate=True)
    assert choose_rank([RankPoint(2, 0.5, 99.0, one), RankPoint(4, 0.1, 99.0, bad)]) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LevelheadWarning)
        curve = cp_rank_curve(torch.tensor(draw(4, 5, 6)), sweeps=2)
    assert [p.rank for p in curve] == [4, 6, 8, 12, 16]
    with pytest.raises(InputError, match="no ranks were given"):
        cp_rank_curve(torch.ones(2, 2), [])


# ── TensorLy ──


def test_equal_to_tensorly() -> None:
    pytest.importorskip("tensorly")
    decomposition = pytest.importorskip("tensorly.decomposition")
    x = planted((5, 6, 7, 3), 3, 0.05)
    theirs = decomposition.parafac(x, 3, n_iter_max=3000, tol=1e-14, normalize_factors=True)
    fit = cp(torch.tensor(x), 3, sweeps=3000, tolerance=1e-14)
    overlap = np.prod(
        [np.abs(a.numpy().T @ b) for a, b in zip(fit.factors, theirs.factors, strict=True)], axis=0
    )
    match = max(itertools.permutations(range(3)), key=lambda p: overlap[range(3), p].sum())
    np.testing.assert_allclose(overlap[range(3), match], 1.0, rtol=1e-6)
    np.testing.assert_allclose(fit.weights, theirs.weights[list(match)], rtol=1e-6)
    model = theirs.to_tensor()
    assert np.linalg.norm(model_of(fit) - model) < 1e-6 * np.linalg.norm(model)


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
def test_conversion_to_tensorly(backend: str) -> None:
    tensorly = pytest.importorskip("tensorly")
    fit = cp(torch.tensor(planted((4, 5, 3), 2)), 2)
    with tensorly.backend_context(backend):
        given = fit.to_tensorly()
        assert type(given).__name__ == "CPTensor"
        np.testing.assert_allclose(given.to_tensor(), model_of(fit), rtol=0, atol=1e-12)


# ── edges and errors ──


def test_zero_tensors_and_superfluous_components() -> None:
    zero = cp(torch.zeros(2, 3, 4), 2)
    assert zero.relative_error == 0.0
    assert zero.weights.tolist() == [0.0, 0.0]
    assert zero.error(torch.zeros(2, 3, 4)) == 0.0
    many = cp(torch.ones(2, 3, 4).double(), 6, sweeps=20)
    assert many.relative_error < 1e-10
    assert torch.isfinite(many.weights).all()


def test_the_input_is_left_alone_and_gets_no_gradient() -> None:
    x = torch.tensor(planted((4, 5, 3), 2), requires_grad=True)
    kept = x.detach().clone()
    start = [torch.tensor(draw(n, 2)) for n in (4, 5, 3)]
    before = [f.clone() for f in start]
    fit = cp(x, 2, init=start, sweeps=5)
    assert torch.equal(x.detach(), kept)
    assert all(torch.equal(a, b) for a, b in zip(start, before, strict=True))
    assert not fit.weights.requires_grad
    assert fit.error(x) == pytest.approx(fit.relative_error, rel=1e-9)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3,), {}, r"a tensor \[3\] was given; expected two axes"),
        ((3, 0), {}, r"a tensor \[3, 0\] was given; .* none empty"),
        ((3, 2), {"rank": 0}, "rank=0 was given"),
        ((3, 2), {"starts": 0}, "starts=0 was given"),
        ((3, 2), {"sweeps": 0}, "sweeps=0 was given"),
        ((3, 2), {"init": "hosvd"}, "init 'hosvd' was given"),
        (
            (3, 2),
            {"init": [torch.ones(3, 2)]},
            r"\[\[3, 2\]\] were given; expected \[\[3, 2\], \[2, 2\]\]",
        ),
    ],
)
def test_errors(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cp(torch.ones(shape), **{"rank": 2, **options})


@pytest.mark.parametrize(("rank", "expected"), [(2, 1), (1 << 20, 3)], ids=["small", "large"])
def test_small_fits_run_on_one_thread(rank: int, expected: int, monkeypatch) -> None:
    seen: list[int] = []

    class Enough(Exception):
        """What is to be seen was seen."""

    def look(*_: Any) -> Any:
        seen.append(torch.get_num_threads())
        raise Enough

    monkeypatch.setattr(levelhead.tensors.cp, "_start", look)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for x in (torch.ones(4, 5, 6), STACKS["plain"]):
            with pytest.raises(Enough):
                cp(x, rank)
    finally:
        torch.set_num_threads(before)
    assert seen == [expected] * 2


def test_with_so_many_components_every_tensor_is_exact() -> None:
    x = torch.tensor(draw(2, 3, 4))
    most = largest_useful_rank(x.shape)
    assert most == 6
    fit = cp(x, most, sweeps=400, tolerance=1e-12)
    assert fit.relative_error < 1e-4


def test_other_errors() -> None:
    x = torch.ones(3, 4)
    x[0, 0] = float("inf")
    with pytest.raises(InputError, match="holds NaN, infinite"):
        cp(x, 1)
    with pytest.raises(InputError, match=r"\[2, 2\] was given; expected \[3, 4\]"):
        cp(torch.ones(3, 4), 1).error(torch.ones(2, 2))
