"""Power sweeps of a factored stack against the same steps on the dense tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.tucker import tucker_of_stack
from levelhead.tensors.tucker_targets import StackTarget

H, R, M, N = 4, 3, 10, 9
RANKS = (3, 2, 4)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stack(kind: str) -> LowRankStack:
    left, right = numbers(H, R, M, seed=1), numbers(H, R, N, seed=2)
    if kind == "shared right":
        return LowRankStack(left, right[:2], (0, 0, 1, 1))
    if kind == "shared left":
        return LowRankStack(left[:2], right, left_group=(1, 0, 0, 1))
    return LowRankStack(left, right)


def dense_step(x: np.ndarray, factors: list[np.ndarray], mode: int) -> np.ndarray:
    """(y yᵀ - s) U for y, x contracted with the factors of the other modes."""
    y = x
    for k, factor in enumerate(factors):
        if k != mode:
            y = np.moveaxis(np.tensordot(factor.T, y, (1, k)), 0, k)
    y = np.moveaxis(y, mode, 0).reshape(x.shape[mode], -1)
    old = factors[mode]
    shift = np.linalg.eigvalsh(old.T @ y @ y.T @ old)[0] / 2
    return y @ y.T @ old - shift * old


@pytest.mark.parametrize("kind", ["plain", "shared right", "shared left"])
def test_a_sweep_is_one_shifted_power_step_for_each_mode(kind: str) -> None:
    target = StackTarget(stack(kind))
    factors = [
        torch.linalg.qr(numbers(n, r, seed=n)).Q for n, r in zip((H, M, N), RANKS, strict=True)
    ]
    mine = [f.numpy().copy() for f in factors]
    x = stack(kind).dense().numpy()
    explained = target.power_sweeps(factors)()
    heads = np.einsum("hmn,ma,nb->hab", x, mine[1], mine[2]).reshape(H, -1)
    mine[0] = np.linalg.svd(heads)[0][:, : RANKS[0]]
    for mode in (1, 2):
        mine[mode] = np.linalg.qr(dense_step(x, mine, mode))[0]
    for found, expected in zip(factors, mine, strict=True):
        projector = found.numpy() @ found.numpy().T
        assert np.allclose(projector, expected @ expected.T, rtol=0, atol=1e-10)
    core = np.einsum("hmn,ha,mb,nc->abc", x, *mine)
    assert explained == pytest.approx((core**2).sum(), rel=1e-10)


def test_sweeps_end_where_hooi_ends_and_the_error_is_the_true_one() -> None:
    falling = torch.arange(1, R + 1).double()[:, None] ** -3
    a = LowRankStack(falling * numbers(H, R, M, seed=1), numbers(H, R, N, seed=2))
    slow = tucker_of_stack(a, RANKS, method="randomised", sweeps=500, tolerance=0.0)
    exact = tucker_of_stack(a, RANKS, sweeps=500, tolerance=0.0)
    assert slow.relative_error == pytest.approx(exact.relative_error, rel=1e-4)
    assert slow.relative_error == pytest.approx(slow.error(a), rel=1e-9)


def test_long_modes_begin_with_power_sweeps_and_lose_nothing() -> None:
    left, right = numbers(3, 100, 300, seed=3), numbers(3, 100, 300, seed=4)
    a = LowRankStack(left, right)
    assert StackTarget(a).is_large((2, 20, 20))
    assert not StackTarget(a).is_large((2, 200, 20))
    fit = tucker_of_stack(a, (2, 20, 20), tolerance=1e-4)
    falls = np.diff(fit.history)
    assert (falls <= 1e-12).all()
    assert fit.relative_error == pytest.approx(fit.error(a), rel=1e-9)
    start = tucker_of_stack(a, (2, 20, 20), method="sthosvd")
    assert fit.history[0] < start.relative_error


@pytest.mark.parametrize("gap", [1.0, 1e-9])
def test_the_size_of_a_stack_keeps_its_digits_where_the_factors_cancel(gap: float) -> None:
    """lᵀ r = gap · a bᵀ from factors of the size of one."""
    a, b, c = numbers(3, 6, seed=5).split(1)
    left = torch.cat([a, a])[None]
    right = torch.cat([c + gap * b, -c])[None]
    cancelling = LowRankStack(left, right)
    expected = float(a.square().sum() * ((c + gap * b) - c).square().sum())
    assert StackTarget(cancelling).squared_norm == pytest.approx(expected, rel=1e-6, abs=0)
