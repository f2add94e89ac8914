"""Tucker decompositions against dense SVDs, plain HOOI and TensorLy."""

from __future__ import annotations

import doctest
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import levelhead.tensors.tucker
from levelhead.base.errors import InputError
from levelhead.tensors import multilinear, subspaces
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.subspaces import iterated_subspace, leading_subspace, sketched_subspace
from levelhead.tensors.tucker import Method, TuckerTensor, tucker, tucker_of_stack
from oracles import tensors as oracle

METHODS: tuple[Method, ...] = ("hooi", "sthosvd", "randomised")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def smooth(*shape: int, seed: int = 0, power: float = 1.0) -> np.ndarray:
    """A tensor whose modes have falling spectra."""
    x = draw(*shape, seed=seed)
    for mode, n in enumerate(shape):
        basis = np.linalg.qr(draw(n, n, seed=seed + mode))[0]
        x = oracle.mode_product(x, basis * np.arange(1, n + 1) ** -power, mode)
    return x


def true_error(x: np.ndarray, fit: TuckerTensor) -> float:
    model = oracle.tucker_model(fit.core.numpy(), [u.numpy() for u in fit.factors])
    return float(np.sqrt(((x - model) ** 2).sum() / (x**2).sum()))


def check_form(fit: TuckerTensor, shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    """Orthonormal float64 factors, an all-orthogonal core with falling slice norms."""
    assert tuple(fit.core.shape) == ranks
    assert [tuple(u.shape) for u in fit.factors] == list(zip(shape, ranks, strict=True))
    size = float(fit.core.square().sum())
    for mode, u in enumerate(fit.factors):
        assert u.dtype == torch.float64
        torch.testing.assert_close(u.mT @ u, torch.eye(u.shape[1]).double(), rtol=0, atol=1e-13)
        gram = oracle.unfold(fit.core.numpy(), mode)
        gram = gram @ gram.T
        np.testing.assert_allclose(gram, np.diag(np.diag(gram)), rtol=0, atol=1e-12 * size)
        assert (np.diff(np.diag(gram)) <= 1e-12 * size).all()


def test_examples_in_the_docstrings() -> None:
    found = doctest.testmod(levelhead.tensors.tucker)
    assert found.attempted > 5
    assert found.failed == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [
        ((4, 5, 6, 3), (2, 3, 4, 3)),
        ((4, 5, 6, 3), (2, 3, 4, 2)),
        ((6, 5), (3, 3)),
        ((3, 4, 5), (3, 4, 5)),
        ((7, 1, 4), (2, 1, 2)),
        ((5, 4, 3), (4, 2, 1)),
    ],
)
def test_the_reported_error_is_the_true_one(
    method: Method, dtype: torch.dtype, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    x = torch.tensor(smooth(*shape)).to(dtype)
    fit = tucker(x, ranks, method=method, tolerance=1e-9)
    check_form(fit, shape, ranks)
    expected = true_error(x.double().numpy(), fit)
    assert fit.relative_error == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert fit.error(x) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    model = oracle.tucker_model(fit.core.numpy(), [u.numpy() for u in fit.factors])
    np.testing.assert_allclose(fit.reconstruct(), model, rtol=0, atol=1e-13 * np.abs(model).max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_small_errors_do_not_drown_in_cancellation(noise: float, dtype: torch.dtype) -> None:
    """‖x‖² - ‖core‖² alone would be wrong in the fourth digit at 1e-6."""
    parts = [draw(n, 2, seed=n) for n in (6, 7, 8)]
    exact = oracle.tucker_model(draw(2, 2, 2), parts)
    x = torch.tensor(exact + noise * draw(6, 7, 8)).to(dtype)
    fit = tucker(x, (2, 2, 2))
    assert fit.relative_error == pytest.approx(true_error(x.double().numpy(), fit), rel=1e-9)
    assert fit.relative_error < 3 * noise


def test_hooi_is_plain_hooi_at_its_limit() -> None:
    x = smooth(5, 6, 7, power=0.3)
    ranks = (2, 3, 3)
    core, factors = oracle.hooi(x, ranks, 400)
    fit = tucker(torch.tensor(x), ranks, tolerance=1e-15, sweeps=400)
    model = oracle.tucker_model(core, factors)
    np.testing.assert_allclose(fit.reconstruct(), model, rtol=0, atol=1e-6 * np.abs(model).max())
    limit = np.sqrt(((x - model) ** 2).sum() / (x**2).sum())
    assert fit.relative_error == pytest.approx(limit, rel=1e-9)


def test_sthosvd_is_truncation_from_the_shortest_mode_on() -> None:
    x = smooth(6, 4, 5, 3)
    fit = tucker(torch.tensor(x), (3, 2, 3, 2), method="sthosvd")
    expected = oracle.sthosvd_error(x, (3, 2, 3, 2), order=[3, 1, 2, 0])
    assert fit.relative_error == pytest.approx(expected, rel=1e-10)
    assert (fit.sweeps, fit.converged, fit.history) == (0, True, ())


def test_errors_stand_in_their_order_and_hooi_never_rises() -> None:
    for seed in range(5):
        x = torch.tensor(smooth(6, 9, 8, 3, seed=seed, power=0.2))
        hooi, st, fast = (tucker(x, (3, 4, 4, 2), method=m, tolerance=1e-7) for m in METHODS)
        assert hooi.relative_error <= st.relative_error
        assert fast.sweeps >= 1
        assert fast.relative_error <= 1.05 * hooi.relative_error
        assert (np.diff(hooi.history) <= 1e-14).all()
        assert hooi.history[-1] == pytest.approx(hooi.relative_error, rel=1e-10)
        assert hooi.converged


def test_one_sweep_improves_the_sketch_and_is_reported_as_not_converged() -> None:
    x = torch.tensor(smooth(6, 9, 8, power=0.2))
    once = tucker(x, (3, 4, 4), method="randomised", sweeps=1)
    assert (once.sweeps, once.converged) == (1, False)
    more = tucker(x, (3, 4, 4), method="randomised", tolerance=1e-12, sweeps=200)
    assert more.relative_error < once.relative_error
    again = tucker(x, (3, 4, 4), method="randomised", sweeps=1)
    assert torch.equal(once.core, again.core)


def test_core_norms_are_the_mode_spectra_of_the_model() -> None:
    x = smooth(4, 5, 6)
    fit = tucker(torch.tensor(x), (2, 3, 3))
    model = fit.reconstruct().numpy()
    for mode, rank in enumerate((2, 3, 3)):
        expected = oracle.mode_singular_values(model, mode)[:rank]
        np.testing.assert_allclose(fit.core_norms(mode), expected, rtol=1e-9)
    full = tucker(torch.tensor(x), x.shape)
    for mode in range(3):
        expected = oracle.mode_singular_values(x, mode)
        np.testing.assert_allclose(full.core_norms(mode), expected, rtol=1e-9)


def test_slice_spectral_norms() -> None:
    fit = tucker(torch.tensor(smooth(4, 5, 6, 3)), (3, 4, 5, 2))
    core = fit.core.numpy()
    got = fit.slice_spectral_norms(0)  # unfolded along axis 2, the longest one left
    expected = [np.linalg.norm(oracle.unfold(core[a], 1), 2) for a in range(3)]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    got = fit.slice_spectral_norms(-1, rows=0)
    expected = [np.linalg.norm(oracle.unfold(core[..., a], 0), 2) for a in range(2)]
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    with pytest.raises(InputError, match="rows 1 was given"):
        fit.slice_spectral_norms(1, rows=1)


# ── subspaces ──


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (9, 9)])
@pytest.mark.parametrize("last", [1e-2, 1e-5, 1e-9, 1e-13])
def test_leading_subspaces_of_ill_conditioned_matrices(shape: tuple[int, int], last: float) -> None:
    """On both sides of the border between Gram and SVD the loss is ε σ₁/σ_rank or less."""
    u, v = (np.linalg.qr(draw(n, 3, seed=n))[0] for n in shape)
    y = torch.tensor(u * np.array([1.0, 0.1, last]) @ v.T)
    basis = leading_subspace(y, 3)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(3).double(), rtol=0, atol=1e-13)
    lost = y - basis @ (basis.mT @ y)
    assert float(lost.norm()) < 1e-11


def test_a_gram_matrix_alone_would_lose_the_last_direction() -> None:
    """So that the test above means something: the limit matters."""
    u, v = (np.linalg.qr(draw(n, 3, seed=n))[0] for n in (9, 9))
    y = u * np.array([1.0, 0.1, 1e-9]) @ v.T
    basis = np.linalg.eigh(y @ y.T)[1][:, -3:]
    assert np.linalg.norm(y - basis @ basis.T @ y) > 1e-11


def test_more_columns_than_the_matrix_has_are_completed() -> None:
    for rank in (3, 5):
        basis = leading_subspace(torch.tensor(draw(5, 2)), rank)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(rank).double(), rtol=0, atol=1e-13)
        y = torch.tensor(draw(5, 2))
        torch.testing.assert_close(basis @ (basis.mT @ y), y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_block_iteration_beats_two_power_steps_and_finds_the_subspace(dtype: torch.dtype) -> None:
    y = torch.tensor(smooth(60, 80, power=0.5)).to(dtype)
    start = sketched_subspace(y, 10, seed=3)

    def captured(basis: Tensor) -> float:
        return float((basis.mT @ y).double().square().sum())

    power = start
    for _ in range(2):
        power = torch.linalg.qr(y @ (y.mT @ power)).Q
    once = iterated_subspace(y, start, 1)
    assert captured(start) < captured(power) < captured(once)
    best = float(torch.linalg.svdvals(y.double())[:10].square().sum())
    assert captured(iterated_subspace(y, start, 12)) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_large_modes_reach_the_exact_fit(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block iteration in place of factorisations changes the way, not the limit."""
    x = torch.tensor(smooth(5, 24, 30, power=0.5))
    exact = tucker(x, (3, 6, 7), tolerance=1e-12, sweeps=300)
    monkeypatch.setattr(subspaces, "_LARGE", 2)
    fit = tucker(x, (3, 6, 7), method=method, tolerance=1e-12, sweeps=300)
    if method == "sthosvd":
        assert fit.relative_error == pytest.approx(exact.relative_error, rel=2e-2)
    else:
        assert fit.relative_error == pytest.approx(exact.relative_error, rel=1e-8)
        assert (np.diff(fit.history) <= 1e-14).all()


def test_work_in_several_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor(smooth(7, 6, 5))
    whole = tucker(x, (3, 4, 2), tolerance=1e-12)
    monkeypatch.setattr(multilinear, "_CHUNK", 40)
    parts = tucker(x, (3, 4, 2), tolerance=1e-12)
    assert parts.relative_error == pytest.approx(whole.relative_error, rel=1e-12)
    assert parts.error(x) == pytest.approx(whole.relative_error, rel=1e-12)


# ── stacks ──


def stacks() -> dict[str, tuple[LowRankStack, np.ndarray]]:
    out = {}
    for name, (h, r, m, n, group) in {
        "h·r < m": (3, 2, 9, 11, None),
        "h·r > m": (6, 3, 8, 8, None),
        "grouped": (6, 2, 8, 9, (0, 0, 0, 1, 1, 1)),
    }.items():
        left, right = draw(h, r, m), draw(h if group is None else 2, r, n, seed=1)
        stack = LowRankStack(torch.tensor(left), torch.tensor(right), group)
        out[name] = stack, oracle.dense_stack(left, right, group)
        out[name + ", transposed"] = stack.mT, out[name][1].transpose(0, 2, 1)
    return out


@pytest.mark.parametrize("name", list(stacks()))
@pytest.mark.parametrize("method", METHODS)
def test_tucker_of_a_stack_is_that_of_the_dense_tensor(name: str, method: Method) -> None:
    stack, dense = stacks()[name]
    ranks = (2, 4, 3)
    fit = tucker_of_stack(stack, ranks, method=method, tolerance=1e-13, sweeps=500)
    check_form(fit, dense.shape, ranks)
    assert fit.relative_error == pytest.approx(true_error(dense, fit), rel=1e-9)
    assert fit.error(stack) == pytest.approx(true_error(dense, fit), rel=1e-9)
    assert fit.error(torch.tensor(dense)) == pytest.approx(true_error(dense, fit), rel=1e-9)
    if method == "sthosvd":
        expected = oracle.sthosvd_error(dense, ranks, order=[1, 2, 0])
        assert fit.relative_error == pytest.approx(expected, rel=1e-9)
    elif method == "hooi":
        core, factors = oracle.hooi(dense, ranks, 500)
        model = oracle.tucker_model(core, factors)
        plain = np.sqrt(((dense - model) ** 2).sum() / (dense**2).sum())
        # Both are stationary points; ours is no worse.
        assert fit.relative_error <= plain * (1 + 1e-6)


def test_a_stack_of_full_ranks_is_given_back() -> None:
    for stack, dense in stacks().values():
        ranks = stack.multilinear_rank()
        fit = tucker_of_stack(stack, ranks)
        assert fit.relative_error < 1e-13
        np.testing.assert_allclose(fit.reconstruct(), dense, rtol=0, atol=1e-12)


def test_float32_stacks_report_their_true_error() -> None:
    stack, _ = stacks()["h·r > m"]
    narrow = stack.to(torch.float32)
    dense = oracle.dense_stack(narrow.left.double().numpy(), narrow.right.double().numpy())
    fit = tucker_of_stack(narrow, (3, 4, 4))
    assert fit.relative_error == pytest.approx(true_error(dense, fit), rel=1e-9)


# ── TensorLy ──


def test_equal_to_tensorly() -> None:
    tensorly = pytest.importorskip("tensorly")
    decomposition = pytest.importorskip("tensorly.decomposition")
    x = smooth(5, 6, 7, 3, power=0.7)
    ranks = (3, 4, 4, 2)
    core, factors = decomposition.tucker(x, ranks, n_iter_max=500, tol=1e-14)
    fit = tucker(torch.tensor(x), ranks, tolerance=1e-14, sweeps=500)
    model = tensorly.tucker_to_tensor((core, factors))
    error = np.linalg.norm(fit.reconstruct().numpy() - model) / np.linalg.norm(model)
    assert error < 1e-6
    for ours, theirs in zip(fit.factors, factors, strict=True):  # bases differ, subspaces do not
        np.testing.assert_allclose(ours @ ours.mT, theirs @ theirs.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
def test_conversion_to_tensorly(backend: str) -> None:
    tensorly = pytest.importorskip("tensorly")
    fit = tucker(torch.tensor(smooth(4, 5, 3)), (2, 3, 2))
    with tensorly.backend_context(backend):
        given = fit.to_tensorly()
        assert type(given).__name__ == "TuckerTensor"
        assert isinstance(given.core, np.ndarray if backend == "numpy" else Tensor)
        np.testing.assert_allclose(given.to_tensor(), fit.reconstruct(), rtol=0, atol=1e-13)


def test_without_tensorly_the_conversion_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = tucker(torch.ones(2, 2), (1, 1))
    monkeypatch.setitem(sys.modules, "tensorly", None)
    monkeypatch.setitem(sys.modules, "tensorly.tucker_tensor", None)
    with pytest.raises(InputError, match="pip install tensorly"):
        fit.to_tensorly()


# ── edges and errors ──


def test_zero_and_constant_tensors() -> None:
    for method in METHODS:
        fit = tucker(torch.zeros(3, 4, 2), (2, 2, 1), method=method)
        assert fit.relative_error == 0.0
        assert fit.error(torch.zeros(3, 4, 2)) == 0.0
        assert float(fit.reconstruct().abs().max()) == 0.0
        assert tucker(torch.ones(3, 4, 2).double(), (2, 2, 2), method=method).relative_error < 1e-14


def test_the_input_is_left_alone_and_gets_no_gradient() -> None:
    x = torch.tensor(smooth(4, 5, 3), requires_grad=True)
    kept = x.detach().clone()
    fit = tucker(x.permute(2, 0, 1), (2, 2, 2))
    assert torch.equal(x.detach(), kept)
    assert not fit.core.requires_grad
    assert fit.error(x.permute(2, 0, 1)) == pytest.approx(fit.relative_error, rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        ((2, 2), {}, r"ranks \(2, 2\) were given for a tensor \[3, 4, 2\]"),
        ((2, 5, 2), {}, "from 1 to its length"),
        ((0, 2, 2), {}, "from 1 to its length"),
        ((2, 2, 2), {"method": "cp"}, "method 'cp' was given"),
        ((2, 2, 2), {"sweeps": 0}, "makes at least one sweep"),
        ((2, 2, 2), {"sweeps": 0, "method": "randomised"}, "makes at least one sweep"),
    ],
)
def test_errors(ranks: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tucker(torch.ones(3, 4, 2), ranks, **options)


def test_entries_that_are_not_finite() -> None:
    x = torch.ones(3, 4)
    x[1, 1] = float("nan")
    with pytest.raises(InputError, match=r"the tensor \[3, 4\] holds NaN, infinite"):
        tucker(x, (1, 1))
    stack = LowRankStack(torch.full((1, 1, 2), float("inf")), torch.ones(1, 1, 2))
    with pytest.raises(InputError, match="holds NaN, infinite"):
        tucker_of_stack(stack, (1, 1, 1))
    with pytest.raises(InputError, match=r"\[2, 2\] was given; expected \[3, 4\]"):
        tucker(torch.ones(3, 4), (1, 1)).error(torch.ones(2, 2))
