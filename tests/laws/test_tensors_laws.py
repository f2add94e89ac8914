"""Laws of the tensor algebra: gauges, rotations, permutations and scalings, at any shape."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from levelhead.base.errors import LevelheadWarning
from levelhead.tensors.cp import cp
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import (
    fold,
    mode_singular_values,
    multi_mode_product,
    multilinear_rank,
    squared_norm,
    unfold,
)
from levelhead.tensors.tucker import tucker, tucker_of_stack
from oracles import tensors as oracle

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.lists(st.integers(1, 5), min_size=2, max_size=4)
GROUPINGS = st.sampled_from([(14, 2), (8, 8), (8, 1), (6, 3), (1, 1)])

usual = settings(max_examples=60, deadline=None)


def normal(draw: np.random.Generator, *shape: int) -> Tensor:
    return torch.tensor(draw.normal(size=shape))


def rotation(draw: np.random.Generator, n: int) -> Tensor:
    return torch.linalg.qr(normal(draw, n, n)).Q


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    size = max(float(expected.abs().max()), 1e-300)
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * size)


def stack_of(
    draw: np.random.Generator, heads: int, groups: int, r: int, m: int, n: int, kind: str
) -> LowRankStack:
    """Heads in general position, of deficient rank, exactly collapsed, or with equal σ."""
    left, right = normal(draw, heads, r, m), normal(draw, groups, r, n)
    if kind == "deficient":
        left[:, -1] = left[:, 0]
    elif kind == "collapsed":
        left[:], right[:] = left[:1].clone(), right[:1].clone()
    elif kind == "degenerate":
        left = torch.linalg.qr(left.mT).Q.mT
        right = torch.linalg.qr(right.mT).Q.mT
    group = None if groups == heads else tuple(i // (heads // groups) for i in range(heads))
    return LowRankStack(left, right, group)


STACKS = st.tuples(
    SEEDS,
    GROUPINGS,
    st.integers(1, 4),
    st.integers(4, 7),
    st.sampled_from(["general", "deficient", "collapsed", "degenerate"]),
)


@usual
@given(STACKS)
def test_readings_do_not_move_with_the_inner_basis(
    drawn: tuple[int, tuple[int, int], int, int, str],
) -> None:
    seed, (heads, groups), r, d, kind = drawn
    draw = np.random.default_rng(seed)
    stack = stack_of(draw, heads, groups, r, d, d, kind)
    # g of condition 10 at most, one for each block that is shared.
    spread = torch.tensor(draw.uniform(0.3, 3.0, size=(groups, r)))
    turns = torch.stack([rotation(draw, r) for _ in range(groups)])
    g = turns * spread[:, None]
    of = list(stack.group or range(heads))
    moved = LowRankStack(torch.linalg.inv(g)[of].mT @ stack.left, g @ stack.right, stack.group)
    close(moved.dense(), stack.dense(), 1e-12)
    close(moved.singular_values(), stack.singular_values(), 1e-11)
    close(moved.traces(), stack.traces(), 1e-11 * r * d)
    close(moved.head_gram(), stack.head_gram(), 1e-11)
    close(moved.trace_products(), stack.trace_products(), 1e-10 * d)
    close(moved.cosines(), stack.cosines(), 1e-10)
    for mode in range(3):
        expected = stack.mode_singular_values(mode)
        close(moved.mode_singular_values(mode), expected, 1e-7 if mode == 0 else 1e-11)
    assert moved.multilinear_rank(1e-6) == stack.multilinear_rank(1e-6)


@usual
@given(STACKS)
def test_stacks_are_their_dense_tensors(
    drawn: tuple[int, tuple[int, int], int, int, str],
) -> None:
    seed, (heads, groups), r, d, kind = drawn
    draw = np.random.default_rng(seed)
    stack = stack_of(draw, heads, groups, r, d, d + 1, kind)
    dense = stack.dense()
    for both in ((stack, dense), (stack.mT, dense.mT)):
        sigma = torch.linalg.svdvals(both[1])[:, : min(r, d)]
        close(both[0].singular_values(), sigma, 1e-12)
        flat = both[1].flatten(1)
        close(both[0].head_gram(), flat @ flat.mT, 1e-12)
        for mode in range(1, 3):
            values = torch.tensor(oracle.mode_singular_values(both[1].numpy(), mode))
            got = both[0].mode_singular_values(mode)
            close(got[: len(values)], values, 1e-12)
            assert float(got[len(values) :].sum()) == 0.0
    assert stack.multilinear_rank(1e-6) == multilinear_rank(dense, 1e-6)


@usual
@given(STACKS, st.floats(0.01, 100.0))
def test_rotations_permutations_and_degrees(
    drawn: tuple[int, tuple[int, int], int, int, str], scale: float
) -> None:
    seed, (heads, groups), r, d, kind = drawn
    draw = np.random.default_rng(seed)
    stack = stack_of(draw, heads, groups, r, d, d, kind)
    turn = rotation(draw, d)
    turned = LowRankStack(stack.left @ turn, stack.right @ turn, stack.group)
    close(turned.singular_values(), stack.singular_values(), 1e-11)
    close(turned.traces(), stack.traces(), 1e-11 * r * d)
    close(turned.head_gram(), stack.head_gram(), 1e-11)
    order = draw.permutation(heads)
    close(stack[order.tolist()].head_gram(), stack.head_gram()[order][:, order], 1e-13)
    close(stack[order.tolist()].singular_values(), stack.singular_values()[order], 1e-13)
    scaled = LowRankStack(scale * stack.left, scale * stack.right, stack.group)
    close(scaled.nuclear_norms(), scale**2 * stack.nuclear_norms(), 1e-12)
    close(scaled.head_gram(), scale**4 * stack.head_gram(), 1e-12)
    close(scaled.effective_ranks(), stack.effective_ranks(), 1e-9)
    close(scaled.cosines(), stack.cosines(), 1e-11)


@usual
@given(STACKS)
def test_norms_bound_each_other(drawn: tuple[int, tuple[int, int], int, int, str]) -> None:
    seed, (heads, groups), r, d, kind = drawn
    stack = stack_of(np.random.default_rng(seed), heads, groups, r, d, d, kind)
    spectral, frobenius, nuclear = (
        stack.spectral_norms(),
        stack.frobenius_norms(),
        stack.nuclear_norms(),
    )
    slack = 1 + 1e-12
    assert (spectral <= frobenius * slack).all()
    assert (frobenius <= nuclear * slack).all()
    assert (nuclear <= np.sqrt(min(r, d)) * frobenius * slack).all()
    for one, two in itertools.pairwise(("participation", "entropy")):
        # Rényi entropies fall with their order, and σ² is more concentrated than σ.
        low, high = stack.effective_ranks(one), stack.effective_ranks(two)  # type: ignore[arg-type]
        assert (low >= 1 - 1e-9).all()
        assert (low <= high + 1e-9).all()
        assert (high <= min(r, d) + 1e-9).all()
    assert (stack.traces().abs() <= nuclear * slack + 1e-12).all()


# ── dense tensors ──


@usual
@given(SEEDS, SHAPES)
def test_unfold_and_fold_are_inverse_and_keep_the_norm(seed: int, shape: list[int]) -> None:
    x = normal(np.random.default_rng(seed), *shape)
    for mode in range(len(shape)):
        rows = unfold(x, mode)
        assert torch.equal(fold(rows, mode, shape), x)
        close(squared_norm(rows), squared_norm(x), 1e-14)
        close(mode_singular_values(x, mode).square().sum(), squared_norm(x), 1e-13)


@usual
@given(SEEDS, SHAPES, st.data())
def test_tucker_bounds_rotations_and_scalings(
    seed: int, shape: list[int], data: st.DataObject
) -> None:
    draw = np.random.default_rng(seed)
    x = normal(draw, *shape)
    ranks = [data.draw(st.integers(1, n)) for n in shape]
    fit = tucker(x, ranks, tolerance=1e-13, sweeps=300)
    # Truncating one mode alone is cheaper than all; all of them cost at most their sum.
    tails = [float(mode_singular_values(x, k)[r:].square().sum()) for k, r in enumerate(ranks)]
    square = fit.relative_error**2 * float(squared_norm(x))
    size = float(squared_norm(x))
    assert max(tails) - 1e-10 * size <= square <= sum(tails) + 1e-10 * size
    assert abs(fit.error(x) - fit.relative_error) <= 1e-9 * fit.relative_error + 1e-14
    turned = multi_mode_product(x, [rotation(draw, n) for n in shape])
    st_error = tucker(x, ranks, method="sthosvd").relative_error
    again = tucker(3.7 * turned, ranks, method="sthosvd").relative_error
    assert abs(again - st_error) <= 1e-7 * max(st_error, 1e-3)
    assert fit.relative_error <= st_error + 1e-12


@usual
@given(SEEDS, st.lists(st.integers(2, 5), min_size=3, max_size=3), st.integers(1, 4))
def test_cp_errors_never_rise_and_are_true(seed: int, shape: list[int], rank: int) -> None:
    x = normal(np.random.default_rng(seed), *shape)
    for line_search in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LevelheadWarning)
            fit = cp(x, rank, init="random", sweeps=25, tolerance=0.0, line_search=line_search)
        # Components may be as large as 1e3 and cancel: rounding is relative to their size.
        slack = 1e-12 * max(1.0, float(fit.weights[0]) ** 2 / float(squared_norm(x)))
        assert (np.diff(np.square(fit.history)) <= slack + 1e-10).all()
        residual = float((x - fit.reconstruct()).square().sum() / squared_norm(x)) ** 0.5
        assert abs(fit.relative_error - residual) <= 1e-9 * residual + 1e-13 * slack / 1e-12


@usual
@given(STACKS, st.data())
def test_tucker_and_cp_of_a_stack_report_the_error_of_the_dense_tensor(
    drawn: tuple[int, tuple[int, int], int, int, str], data: st.DataObject
) -> None:
    seed, (heads, groups), r, d, kind = drawn
    stack = stack_of(np.random.default_rng(seed), heads, groups, r, d, d, kind)
    dense = stack.dense()
    ranks = [data.draw(st.integers(1, n)) for n in stack.shape]
    fit = tucker_of_stack(stack, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LevelheadWarning)
        other = cp(stack, 2, init="random", sweeps=10)
    for got in (fit, other):
        residual = float((dense - got.reconstruct()).square().sum() / squared_norm(dense)) ** 0.5
        assert abs(got.relative_error - residual) <= 1e-9 * residual + 1e-12
