"""The head Gram with gradients against dense slices: values, slopes, second derivatives, groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from levelhead.tensors.slice_pairs import inner_products

GROUPS = [(None, None), (None, (0, 0, 1, 1)), ((1, 0, 0, 1), None), ((0, 1, 1, 1), (1, 0, 1, 1))]


def factors(a: tuple | None, b: tuple | None) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = (4 if a is None else 2, 3, 5), (4 if b is None else 2, 3, 6)
    left, right = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return left.requires_grad_(), right.requires_grad_()


def dense(left: Tensor, right: Tensor, a: tuple | None, b: tuple | None) -> Tensor:
    left = left if a is None else left[list(a)]
    right = right if b is None else right[list(b)]
    flat = (left.mT @ right).flatten(1)
    return flat @ flat.mT


@pytest.mark.parametrize(("a", "b"), GROUPS)
def test_values_and_slopes_are_those_of_dense_slices(a: tuple | None, b: tuple | None) -> None:
    left, right = factors(a, b)
    found, expected = inner_products(left, right, a, b), dense(left, right, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(inner_products(left, right, a, b), expected)
    # Not symmetric: a slope must not count on it.
    weights = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
    slopes = torch.autograd.grad((weights * found).sum(), (left, right))
    others = torch.autograd.grad((weights * expected).sum(), (left, right))
    for slope, other in zip(slopes, others, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("a", "b"), GROUPS)
def test_second_derivatives(a: tuple | None, b: tuple | None) -> None:
    left, right = factors(a, b)
    assert torch.autograd.gradgradcheck(
        lambda x, y: inner_products(x, y, a, b).sin().sum(), (left, right)
    )


def test_one_factor_that_learns() -> None:
    left, right = factors(None, None)
    right.requires_grad_(False)
    (slope,) = torch.autograd.grad(inner_products(left, right, None, None).sum(), left)
    (other,) = torch.autograd.grad(dense(left, right, None, None).sum(), left)
    torch.testing.assert_close(slope, other, rtol=1e-11, atol=1e-11)


def test_many_layers_at_once() -> None:
    """Under vmap, as per-sample gradients take it."""
    left, right = (f.detach() for f in factors(None, None))
    stacks = torch.stack((left, 2 * left)), torch.stack((right, right))

    def energy(x: Tensor, y: Tensor) -> Tensor:
        return inner_products(x, y, None, None).square().sum()

    found = torch.func.vmap(torch.func.grad(energy))(*stacks)
    expected = [torch.func.grad(energy)(x, y) for x, y in zip(*stacks, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))
