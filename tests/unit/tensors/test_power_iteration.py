"""Largest singular values by warm-started iteration against dense decompositions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.power_iteration import (
    largest_singular_values,
    leading_pairs,
    random_block,
)


def factors(
    h: int = 3, r: int = 5, m: int = 11, n: int = 9, seed: int = 0
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    left = torch.randn(h, r, m, generator=random, dtype=torch.float64)
    return left, torch.randn(h, r, n, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(3, 5, 11, 9), (2, 6, 4, 5), (1, 1, 7, 3), (4, 2, 2, 2)])
def test_values_and_vectors_are_those_of_a_dense_svd(shape: tuple[int, ...]) -> None:
    left, right = factors(*shape)
    sigma, u, v, _ = leading_pairs(left, right, random_block(right, left, 3), 200)
    dense = left.mT @ right
    p, s, w = torch.linalg.svd(dense)
    torch.testing.assert_close(sigma, s[:, 0], rtol=1e-12, atol=0)
    pairs = u[:, :, None] * v[:, None, :]
    torch.testing.assert_close(pairs, p[:, :, :1] * w[:, :1, :], rtol=0, atol=1e-10)


def test_the_gradient_is_that_of_the_dense_norm() -> None:
    left, right = (f.requires_grad_() for f in factors())
    found, _ = largest_singular_values(left, right, random_block(right, left), 200)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    slopes = torch.autograd.grad((weights * found).sum(), (left, right))
    dense = torch.linalg.matrix_norm(left.mT @ right, ord=2)
    expected = torch.autograd.grad((weights * dense).sum(), (left, right))
    for slope, other in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-9, atol=1e-12)


def test_each_call_goes_on_from_the_last_block_and_never_exceeds_the_norm() -> None:
    left, right = factors(2, 8, 30, 30)
    exact = torch.linalg.matrix_norm(left.mT @ right, ord=2)
    block, errors = random_block(right, left, 2), []
    for _ in range(4):
        sigma, block = largest_singular_values(left, right, block, 2)
        errors.append(float((1 - sigma / exact).max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3  # a random start is not there yet
    assert errors[-1] < errors[0] / 50
    assert errors[-1] >= -1e-15


def test_steps_shrink_the_error_at_the_stated_rate() -> None:
    """σ = (1, .8, .8, .5): with p = 3 the error of σ falls as (.5/1)^(4 steps)."""
    values = torch.tensor([1.0, 0.8, 0.8, 0.5], dtype=torch.float64)
    left = torch.diag(values)[None]
    right = torch.eye(4, dtype=torch.float64)[None]
    start = random_block(right, left, 3)
    found = [1 - leading_pairs(left, right, start, steps)[0].item() for steps in (1, 2, 3, 4)]
    ratios = [after / before for before, after in itertools.pairwise(found)]
    assert ratios[1:] == pytest.approx([0.5**4] * 2, rel=0.2)


def test_a_zero_product_has_neither_value_nor_slope_and_keeps_its_block() -> None:
    left, right = factors()
    left[1] = 0
    right[2] = 0
    left.requires_grad_()
    right.requires_grad_()
    start = random_block(right, left)
    found, block = largest_singular_values(left, right, start)
    assert found[1:].tolist() == [0.0, 0.0]
    assert torch.equal(block[1:], start[1:])
    found.sum().backward()
    for factor in (left, right):
        assert bool((factor.grad[1:] == 0).all())
        assert bool(factor.grad[0].isfinite().all())


def test_products_of_any_size_in_float32() -> None:
    left, right = (f.float() for f in factors())
    exact = torch.linalg.matrix_norm(left.mT @ right, ord=2)
    for size in (1e-8, 1.0, 1e8):
        start = random_block(right, left, 3)
        found, _ = largest_singular_values(size * left, size * right, start, 60)
        torch.testing.assert_close(found, size**2 * exact, rtol=1e-5, atol=0)


def test_second_derivatives_are_refused() -> None:
    left, right = (f.requires_grad_() for f in factors())
    found, _ = largest_singular_values(left, right, random_block(right, left))
    (slope,) = torch.autograd.grad(found.sum(), left, create_graph=True)
    with pytest.raises(NotImplementedError, match="only first"):
        slope.sum().backward()


def test_bad_arguments_are_refused() -> None:
    left, right = factors()
    with pytest.raises(InputError, match="width=0"):
        random_block(right, left, 0)
    with pytest.raises(InputError, match="steps=0"):
        leading_pairs(left, right, random_block(right, left), 0)
    assert random_block(right, left, 50).shape == (3, 9, 5)
