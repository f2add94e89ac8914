"""LowRankStack against the dense stack: every number by another route."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import levelhead.tensors.low_rank_stack
from levelhead.base.errors import InputError
from levelhead.tensors.factored_svd import differentiable_singular_values
from levelhead.tensors.low_rank_stack import LowRankStack
from oracles import tensors as oracle


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


Case = tuple[LowRankStack, np.ndarray]


def make(
    h: int, r: int, m: int, n: int, group: tuple[int, ...] | None = None, seed: int = 0
) -> Case:
    left = draw(h, r, m, seed=seed)
    right = draw(h if group is None else max(group) + 1, r, n, seed=seed + 1)
    stack = LowRankStack(torch.tensor(left), torch.tensor(right), group)
    return stack, oracle.dense_stack(left, right, group)


def transposed(case: Case) -> Case:
    return case[0].mT, case[1].transpose(0, 2, 1)


CASES = {
    "square": lambda: make(4, 3, 8, 8),
    "wide": lambda: make(3, 2, 5, 9),
    "one head, rank 1": lambda: make(1, 1, 4, 4),
    "inner wider than the slices": lambda: make(2, 7, 4, 4),
    "inner wider than one side": lambda: make(2, 5, 3, 8),
    "h·r > m": lambda: make(6, 3, 7, 7),
    "grouped": lambda: make(6, 2, 7, 7, (0, 0, 0, 1, 1, 1)),
    "multi-query": lambda: make(4, 3, 6, 8, (0, 0, 0, 0)),
    "groups out of order": lambda: make(4, 2, 5, 5, (2, 0, 2, 1)),
    "grouped, transposed": lambda: transposed(make(6, 2, 7, 9, (0, 0, 1, 1, 2, 2))),
}
every = pytest.mark.parametrize("name", CASES)


def close(got: Tensor, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    assert tuple(got.shape) == expected.shape
    size = max(float(np.abs(expected).max()), 1e-300)
    np.testing.assert_allclose(got.detach().numpy(), expected, rtol=0, atol=tolerance * size)


def test_examples_in_the_docstrings() -> None:
    found = doctest.testmod(levelhead.tensors.low_rank_stack)
    assert found.attempted > 5
    assert found.failed == 0


@every
def test_spectra_of_the_slices(name: str) -> None:
    stack, dense = CASES[name]()
    h, m, n = dense.shape
    count = min(stack.inner, m, n)
    sigma = np.linalg.svd(dense, compute_uv=False)[:, :count]
    assert stack.shape == dense.shape
    close(stack.dense(), dense, 1e-14)
    close(stack.singular_values(), sigma)
    close(stack.nuclear_norms(), np.linalg.norm(dense, "nuc", axis=(1, 2)))
    close(stack.spectral_norms(), np.linalg.norm(dense, 2, axis=(1, 2)))
    close(stack.frobenius_norms(), np.sqrt((dense**2).sum((1, 2))))
    p = sigma / sigma.sum(1, keepdims=True)
    close(stack.effective_ranks(), np.exp(-(p * np.log(p)).sum(1)))
    q = sigma**2 / (sigma**2).sum(1, keepdims=True)
    close(stack.effective_ranks("participation"), 1 / (q**2).sum(1))
    u, s, v = stack.svd()
    assert u.shape == (h, m, count)
    assert v.shape == (h, n, count)
    close((u * s[:, None]) @ v.mT, dense)
    for basis in (u, v):
        close(basis.mT @ basis, np.broadcast_to(np.eye(count), (h, count, count)).copy())


@every
def test_pairs_of_slices_and_products(name: str) -> None:
    stack, dense = CASES[name]()
    h, m, n = dense.shape
    flat = dense.reshape(h, -1)
    close(stack.head_gram(), flat @ flat.T)
    length = np.linalg.norm(flat, axis=1)
    close(stack.cosines(), flat @ flat.T / np.outer(length, length))
    x, y = draw(5, 2, n), draw(5, 2, m, seed=1)
    close(stack.matvec(torch.tensor(x)), np.einsum("hmn,abn->abhm", dense, x))
    close(
        stack.bilinear(torch.tensor(y), torch.tensor(x)), np.einsum("abm,hmn,abn->abh", y, dense, x)
    )
    close(stack.matvec(torch.tensor(x[0, 0])), dense @ x[0, 0])
    close(stack.mT.dense(), dense.transpose(0, 2, 1), 1e-14)


@every
def test_eigenvalues_and_traces_of_square_slices(name: str) -> None:
    stack, dense = CASES[name]()
    h, m, n = dense.shape
    if m != n:
        for call in (stack.eigenvalues, stack.traces, stack.trace_products):
            with pytest.raises(InputError, match=rf"slices are \[{m}, {n}\]"):
                call()
        return
    close(stack.traces(), np.trace(dense, axis1=1, axis2=2))
    expected = [[np.trace(a @ b) for b in dense] for a in dense]
    close(stack.trace_products(), np.array(expected))
    got = stack.eigenvalues().numpy()
    assert got.shape == (h, stack.inner)
    assert (np.diff(np.abs(got), axis=1) <= 1e-12).all()
    for i in range(h):
        # Newton's power sums fix the multiset: Σ λ^k = tr A^k, k = 1 .. m.
        for k in range(1, m + 1):
            power = np.linalg.matrix_power(dense[i], k)
            size = np.abs(np.linalg.eigvals(dense[i])).max() ** k
            assert abs((got[i] ** k).sum() - np.trace(power)) < 1e-10 * max(size, 1.0) * m


@every
def test_the_stacked_tensor(name: str) -> None:
    stack, dense = CASES[name]()
    for mode in range(3):
        expected = np.zeros(dense.shape[mode])
        values = oracle.mode_singular_values(dense, mode)
        expected[: len(values)] = values
        close(stack.mode_singular_values(mode), expected, 1e-7 if mode == 0 else 1e-13)
    ranks = [np.linalg.matrix_rank(oracle.unfold(dense, mode)) for mode in range(3)]
    assert stack.multilinear_rank() == tuple(ranks)


@every
def test_selection_scaling_and_conversion(name: str) -> None:
    stack, dense = CASES[name]()
    h = len(stack)
    close(stack[0].dense(), dense[:1], 1e-14)
    close(stack[-1].dense(), dense[-1:], 1e-14)
    close(stack[::-1].dense(), dense[::-1], 1e-14)
    close(stack[[0, 0, h - 1]].dense(), dense[[0, 0, h - 1]], 1e-14)
    mask = torch.arange(h) % 2 == 0
    close(stack[mask].dense(), dense[::2], 1e-14)
    close(stack[torch.tensor([h - 1, 0])].dense(), dense[[h - 1, 0]], 1e-14)
    factors = 1.0 + np.arange(h)
    close(stack.scale(torch.tensor(factors)).dense(), dense * factors[:, None, None], 1e-14)
    close(stack.scale(-2.5).dense(), -2.5 * dense, 1e-14)
    narrow = stack.to(torch.float32)
    assert narrow.dtype == torch.float32
    assert narrow.to("cpu").device == torch.device("cpu")
    close(narrow.dense().double(), dense, 1e-6)


def test_shared_blocks_are_not_copied() -> None:
    stack, _ = CASES["grouped"]()
    for other in (stack[1:3], stack.mT, stack.mT.mT, stack.scale(torch.arange(6.0))):
        assert stack.right.data_ptr() in (other.left.data_ptr(), other.right.data_ptr())
        assert 2 in (other.left.shape[0], other.right.shape[0])
    close(
        stack.mT.scale(torch.arange(6.0)).dense(),
        stack.mT.dense().numpy() * np.arange(6.0)[:, None, None],
    )


def test_ill_conditioned_factors_keep_their_small_singular_values() -> None:
    """Gram matrices of the factors (Cholesky-QR) would lose everything below 1e-8."""
    q = [np.linalg.qr(draw(20, 4, seed=k))[0] for k in range(2)]
    spread = np.array([1.0, 1e-4, 1e-8, 1e-11])
    left, right = (q[0] * spread).T[None], q[1].T[None]
    stack = LowRankStack(torch.tensor(left), torch.tensor(right))
    np.testing.assert_allclose(stack.singular_values()[0], spread, rtol=1e-4)
    ill = (
        np.linalg.qr(draw(4, 4))[0]
        * np.array([1.0, 1e3, 1e6, 1e8])
        @ np.linalg.qr(draw(4, 4, seed=9))[0]
    )
    moved = LowRankStack(
        torch.tensor(ill.T @ q[0].T)[None], torch.tensor(np.linalg.inv(ill) @ q[1].T)[None]
    )
    np.testing.assert_allclose(moved.singular_values()[0], np.ones(4), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_factors_are_computed_in_float64(dtype: torch.dtype) -> None:
    left, right = (torch.tensor(draw(3, 2, 6, seed=s)).to(dtype) for s in (1, 2))
    dense = oracle.dense_stack(left.double().numpy(), right.double().numpy())
    stack = LowRankStack(left, right)
    for got, expected in (
        (stack.singular_values(), np.linalg.svd(dense, compute_uv=False)[:, :2]),
        (stack.traces(), np.trace(dense, axis1=1, axis2=2)),
        (stack.head_gram(), dense.reshape(3, -1) @ dense.reshape(3, -1).T),
        (stack.mode_singular_values(1), oracle.mode_singular_values(dense, 1)),
    ):
        assert got.dtype == torch.float64
        close(got, expected)
    assert stack.singular_values(dtype=torch.float32).dtype == torch.float32


def test_collapsed_and_zero_heads() -> None:
    left, right = draw(1, 2, 5).repeat(4, axis=0), draw(1, 2, 5, seed=1).repeat(4, axis=0)
    stack = LowRankStack(torch.tensor(left), torch.tensor(right))
    assert stack.multilinear_rank() == (1, 2, 2)
    close(stack.cosines(), np.ones((4, 4)))
    left[2] = 0.0
    stack = LowRankStack(torch.tensor(left), torch.tensor(right))
    expected = np.ones((4, 4))
    expected[2], expected[:, 2] = 0.0, 0.0
    close(stack.cosines(), expected)
    for kind in ("entropy", "participation"):
        ranks = stack.effective_ranks(kind)
        assert ranks[2] == 0
        assert 1 <= ranks[0] <= 2
    nothing = LowRankStack(torch.zeros(2, 2, 3), torch.zeros(2, 2, 3))
    assert nothing.multilinear_rank() == (0, 0, 0)
    assert nothing.cosines().tolist() == [[0.0, 0.0], [0.0, 0.0]]


# ── gradients ──


@pytest.mark.parametrize("group", [None, (0, 0, 1)])
@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (3, 4, 3, 6)])
def test_gradients_by_finite_differences(
    group: tuple[int, ...] | None, shape: tuple[int, int, int, int]
) -> None:
    h, r, m, n = shape
    left = torch.tensor(draw(h, r, m), requires_grad=True)
    right = torch.tensor(draw(h if group is None else 2, r, n, seed=1), requires_grad=True)

    def readings(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        stack = LowRankStack(a, b, group)
        return (
            stack.nuclear_norms(),
            stack.spectral_norms(),
            stack.frobenius_norms(),
            stack.singular_values(),
            stack.effective_ranks(),
            stack.effective_ranks("participation"),
            stack.cosines(),
        )

    assert torch.autograd.gradcheck(readings, (left, right))


def test_gradients_of_square_readings() -> None:
    left, right = (torch.tensor(draw(3, 2, 4, seed=s), requires_grad=True) for s in (0, 1))
    assert torch.autograd.gradcheck(
        lambda a, b: (LowRankStack(a, b).traces(), LowRankStack(a, b).trace_products()),
        (left, right),
    )


def test_gradients_at_repeated_singular_values_are_those_of_the_dense_product() -> None:
    """‖AᵀB‖_* at orthogonal A and B: the gradient in A is B Vᵀ… = B, since AᵀB is orthogonal."""
    left = torch.linalg.qr(torch.tensor(draw(1, 4, 4))).Q.requires_grad_()
    right = torch.linalg.qr(torch.tensor(draw(1, 4, 4, seed=1))).Q.requires_grad_()
    LowRankStack(left, right).nuclear_norms().sum().backward()
    assert left.grad is not None
    # d‖M‖_* = ⟨M, dM⟩ for orthogonal M = AᵀB, hence ∂A = B Mᵀ = A and ∂B = B.
    close(left.grad, left.detach().numpy())
    close(right.grad, right.detach().numpy())  # type: ignore[arg-type]


def test_gradients_are_finite_where_heads_are_zero_or_rank_deficient() -> None:
    left, right = torch.tensor(draw(3, 3, 5)), torch.tensor(draw(3, 3, 5, seed=1))
    left[0] = 0.0
    left[1, 2] = left[1, 0]
    right[2, 1:] = 0.0
    readings = ("nuclear_norms", "spectral_norms", "frobenius_norms", "effective_ranks", "cosines")
    for name, both in itertools.product(readings, (False, True)):
        a, b = left.clone().requires_grad_(), right.clone()
        if both:
            b[0] = 0.0
        b.requires_grad_()
        getattr(LowRankStack(a, b), name)().sum().backward()
        assert torch.isfinite(a.grad).all(), name
        assert torch.isfinite(b.grad).all(), name
        if name.endswith("norms"):
            assert (a.grad[0] == 0).all(), "a head that is zero is not pulled"
            assert (b.grad[0] == 0).all()
            dense = (a.detach().mT @ b.detach()).requires_grad_()
            kind = {"nuclear": "nuc", "spectral": 2, "frobenius": "fro"}[name.split("_")[0]]
            torch.linalg.matrix_norm(dense[2], ord=kind).backward()
            close(a.grad[2], (b.detach()[2] @ dense.grad[2].mT).numpy())


def test_gradients_pass_through_functional_transforms() -> None:
    left, right = torch.tensor(draw(2, 2, 4)), torch.tensor(draw(2, 2, 4, seed=1))
    got = torch.func.grad(lambda a: LowRankStack(a, right).nuclear_norms().sum())(left)
    a = left.clone().requires_grad_()
    torch.linalg.matrix_norm(a.mT @ right, ord="nuc").sum().backward()
    close(got, a.grad.numpy())  # type: ignore[union-attr]


def test_a_second_derivative_is_refused() -> None:
    left = torch.tensor(draw(1, 2, 3), requires_grad=True)
    values = differentiable_singular_values(left, torch.tensor(draw(1, 2, 3, seed=1)))
    (slope,) = torch.autograd.grad(values.sum(), left, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        slope.sum().backward()


def test_nothing_is_recorded_without_gradients() -> None:
    stack = LowRankStack(*(torch.tensor(draw(1, 2, 3), requires_grad=True) for _ in range(2)))
    with torch.no_grad():
        assert not stack.singular_values().requires_grad
    assert not stack.svd()[0].requires_grad


# ── errors ──


@pytest.mark.parametrize(
    ("left", "right", "group", "message"),
    [
        ((2, 3), (2, 3, 4), None, r"left \[2, 3\] was given"),
        ((0, 3, 4), (0, 3, 4), None, r"left \[0, 3, 4\] was given; .* none of them 0"),
        ((2, 3, 4), (2, 2, 4), None, "do not share their inner width"),
        ((2, 3, 4), (1, 3, 4), None, "give `group`"),
        ((2, 3, 4), (1, 3, 4), (0, 1), "the 1 blocks of right"),
        ((2, 3, 4), (1, 3, 4), (0, 0, 0), "2 slices and right for 3"),
    ],
)
def test_factors_that_do_not_fit(
    left: tuple[int, ...], right: tuple[int, ...], group: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        LowRankStack(torch.zeros(left), torch.zeros(right), group)


def test_other_errors() -> None:
    with pytest.raises(InputError, match="bring them to one dtype"):
        LowRankStack(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1).double())
    stack = LowRankStack(torch.ones(2, 1, 3), torch.ones(2, 1, 3))
    with pytest.raises(InputError, match="mode 3 was given"):
        stack.mode_singular_values(3)
    with pytest.raises(InputError, match=r"factors \[3\] for 2 slices"):
        stack.scale(torch.ones(3))
    with pytest.raises(InputError, match="'rank' was given"):
        stack.effective_ranks("rank")  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        stack[2]
