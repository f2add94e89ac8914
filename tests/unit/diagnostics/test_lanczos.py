"""Lanczos against dense eigenvalues, and where it must not stop too early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.diagnostics.lanczos import leading


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(n: int, seed: int) -> Tensor:
    a = torch.randn(n, n, generator=seeded(seed), dtype=torch.float64)
    return a + a.mT


def draw(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("largest", [True, False])
def test_leading_pairs_are_those_of_a_dense_solver(seed: int, largest: bool) -> None:
    a = symmetric(40, seed) - (8.0 * torch.eye(40, dtype=torch.float64) if not largest else 0)
    dense, vectors = torch.linalg.eigh(a)
    order = (dense if largest else dense.abs()).argsort(descending=True)[:3]
    found = leading(lambda v: a @ v, draw(40, 9), 3, tolerance=1e-10, largest=largest)
    assert found.converged
    assert torch.allclose(found.values, dense[order], rtol=1e-10)
    overlap = (found.vectors @ vectors[:, order]).abs()
    assert torch.allclose(overlap, torch.eye(3, dtype=torch.float64), atol=1e-7)
    for value, residual, y in zip(found.values, found.residuals, found.vectors, strict=True):
        assert float((a @ y - value * y).norm()) == pytest.approx(float(residual), abs=1e-9)
    if not largest:
        assert float(found.values[0]) < 0


def test_a_bound_on_steps_is_kept_and_said() -> None:
    a = symmetric(60, 1)
    found = leading(lambda v: a @ v, draw(60, 2), tolerance=1e-12, max_steps=7)
    assert (found.steps, found.converged) == (7, False)
    y = found.vectors[0]
    assert float((a @ y - found.values[0] * y).norm()) == pytest.approx(
        float(found.residuals[0]), rel=1e-9
    )


def test_products_that_vanish_and_invariant_spaces() -> None:
    zero = leading(torch.zeros_like, draw(10, 0))
    assert (float(zero.values[0]), float(zero.residuals[0]), zero.steps) == (0.0, 0.0, 1)
    # The start spans an invariant line of eigenvalue 1; three pairs need directions outside it.
    d = torch.tensor([1.0, 5.0, 3.0, -2.0], dtype=torch.float64)
    first = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    found = leading(lambda v: d * v, first, 3, tolerance=1e-9)
    assert torch.allclose(found.values, torch.tensor([5.0, 3.0, 1.0], dtype=torch.float64))
    negative = leading(lambda v: -v * torch.arange(1, 5).double(), draw(4, 3), tolerance=1e-9)
    assert float(negative.values[0]) == pytest.approx(-1.0)
    assert negative.converged


def test_more_pairs_than_dimensions_gives_all() -> None:
    a = symmetric(3, 0)
    found = leading(lambda v: a @ v, draw(3, 0), 5)
    assert torch.allclose(found.values, torch.linalg.eigvalsh(a).flip(0))
    assert found.converged


def test_a_pair_of_near_eigenvalues_is_told_apart() -> None:
    """1 and .9 above a bulk: a residual of 1 % alone lets one start in a hundred stop at .9.

    Before the run: 100 starts, none may be more than 1 % off.
    """
    d = 0.3 * torch.arange(1, 2001, dtype=torch.float64) ** -0.7
    d[0], d[1] = 1.0, 0.9
    for seed in range(100):
        found = leading(lambda v: d * v, draw(2000, seed))
        assert float(found.values[0]) == pytest.approx(1.0, rel=0.01)


def test_float32_keeps_its_basis_orthogonal() -> None:
    d = torch.logspace(0, -6, 3000)
    start = torch.randn(3000, generator=seeded(1))
    found = leading(lambda v: d * v, start, 6, tolerance=1e-4)
    assert torch.allclose(found.values, d[:6].double(), rtol=1e-4)
    gram = found.vectors @ found.vectors.mT
    assert torch.allclose(gram, torch.eye(6), atol=1e-5)


def test_what_cannot_be_used() -> None:
    with pytest.raises(InputError, match="product with the Hessian is not finite"):
        leading(lambda v: v * float("nan"), draw(4, 0))
    with pytest.raises(InputError, match="length zero"):
        leading(lambda v: v, torch.zeros(4))
