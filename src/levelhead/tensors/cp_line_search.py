"""Enhanced line search for CP: how far to follow a sweep's step (Rajih, Comon & Harshman 2008).

At the factors A_k + μ ΔA_k, with ΔA_k the change of the last sweep, the squared error

    ‖x‖² - 2 ⟨x, x̂(μ)⟩ + ‖x̂(μ)‖²

is a polynomial in μ: the second term of degree N, from coefficients; the third of degree 2N, from
R × R Gram matrices. Both are exact, so that its smallest value on a grid is found without touching
x again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from levelhead.tensors.cp_targets import CPTarget

__all__ = ["extrapolated"]


def extrapolated(
    target: CPTarget,
    old: list[Tensor],
    factors: list[Tensor],
    grams: list[Tensor],
    square: float,
) -> float:
    """Move `factors` (and `grams`) in place to the best μ ≥ 0; the squared error there.

    `square` is the squared error at μ = 0. A gain within rounding leaves everything as it is.
    """
    inner = target.along(old, factors)
    device = inner.device
    grid = torch.cat([torch.linspace(0.0, 1.0, 6), torch.logspace(0.1, 2.0, 20)]).double()
    grid = grid.to(device)
    model = torch.ones((), dtype=torch.float64, device=device)
    for factor, before in zip(factors, old, strict=True):
        here = factor.double()
        step = here - before.double()
        cross = here.mT @ step
        parts = torch.stack([here.mT @ here, cross + cross.mT, step.mT @ step])
        powers = torch.stack([grid**0, grid, grid**2], 1)
        model = model * torch.einsum("gp,prs->grs", powers, parts)
    powers = torch.stack([grid**p for p in range(len(inner))], 1)
    errors = target.squared_norm - 2.0 * (powers @ inner) + model.sum((1, 2))
    best = int(errors.argmin())
    rounding = 10.0 * torch.finfo(target.dtype).eps * target.squared_norm
    if float(errors[0] - errors[best]) <= rounding:
        return square
    mu = float(grid[best])
    for k, (factor, before) in enumerate(zip(list(factors), old, strict=True)):
        factors[k] = factor + mu * (factor - before)
    lengths = _rebalance(target.order, factors)
    for k, factor in enumerate(factors):
        wide = factor.double()
        grams[k] = wide.mT @ wide
    target.moved(mu, lengths, factors)
    return float(errors[best])


def _rebalance(order: list[int], factors: list[Tensor]) -> Tensor:
    """Unit columns in all modes but the last of `order`, which takes up their lengths [R]."""
    *others, last = order
    taken = torch.ones_like(factors[last][0])
    for k in others:
        lengths = factors[k].square().sum(0).sqrt()
        lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        factors[k] = factors[k] / lengths
        taken = taken * lengths
    factors[last] = factors[last] * taken
    return taken
