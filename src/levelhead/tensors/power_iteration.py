"""The largest singular value of products of two thin factors, by warm-started block iteration.

Axes. `left` [h, r, m] and `right` [h, r, n] stand for h products A_i = leftᵢᵀ rightᵢ [m, n]; a
block V [h, n, p] spans p directions of each row space. Powers of AᵀA are taken between the factors,

    (AᵀA)^s V = rightᵀ S^(s-1) P (right V),   P = left leftᵀ,   S = P (right rightᵀ)   [h, r, r],

and the last step on the factors themselves, U ← orth(A V), V ← orth(Aᵀ U), σ̂ = max ‖Uᵀ A V‖.
Nothing m × n, and nothing n × n, is formed: O(h r² (m + n)) once and O(h r² p) a step.

Error. σ̂ never exceeds σ_1, and each step shrinks its relative error by (σ_{p+1}/σ_1)⁴. Heads of
random weights have hardly a gap (.8 for p = 8): eight steps gain two digits or so, and a block that
is kept from call to call while the factors move slowly gains as much at every call. S squares the
condition of the product, which only the directions feel, for σ̂ is computed from the factors.

Two examples. left = right = [[2, 0]] (h = r = 1): σ = 4. A zero product: σ = 0, gradient 0, and the
block stays as it was.

Source: Golub & Van Loan 2013, sec. 8.2.4 (orthogonal iteration), applied to AᵀA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.factored_svd import slope_of_values

__all__ = ["largest_singular_values", "leading_pairs", "random_block"]

# Steps after which directions of float32, drawn towards the first one, are made orthogonal anew.
_KEEP_APART = 4


def random_block(right: Tensor, left: Tensor, width: int = 8, seed: int = 0) -> Tensor:
    """A start [h, n, p] with p = min(width, r, m, n), the same for the same seed on every device.

    Raises InputError for a width below 1.
    """
    if width < 1:
        raise InputError(f"width={width} was given; expected at least one direction")
    h, r, n = right.shape
    p = min(width, r, left.shape[2], n)
    random = torch.Generator().manual_seed(seed)
    return torch.randn(h, n, p, generator=random, dtype=torch.float64).to(right)


def leading_pairs(
    left: Tensor, right: Tensor, block: Tensor, steps: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """σ [h], u [h, m], v [h, n] of the largest singular value, and the block [h, n, p] to go on.

    Without gradient. Raises InputError for fewer steps than one.

    >>> one = torch.tensor([[[2.0, 0.0]]])
    >>> leading_pairs(one, one, torch.ones(1, 2, 1))[0]
    tensor([4.])
    """
    if steps < 1:
        raise InputError(f"steps={steps} was given; expected at least one")
    with torch.no_grad():
        v = block if steps == 1 else right.mT @ _powers(left, right, block, steps - 1)
        u = torch.linalg.qr(left.mT @ (right @ v)).Q
        v, triangle = torch.linalg.qr(right.mT @ (left @ u))
        # Uᵀ A = triangleᵀ Vᵀ: its singular vectors are the best in both spans.
        p, sigma, w = torch.linalg.svd(triangle.mT)
        u, v = u @ p, v @ w.mT
        alive = _alive(sigma[:, 0], left, right)
        return sigma[:, 0], u[:, :, 0], v[:, :, 0], torch.where(alive[:, None, None], v, block)


def largest_singular_values(
    left: Tensor, right: Tensor, block: Tensor, steps: int = 8
) -> tuple[Tensor, Tensor]:
    """σ_1 [h] with the gradient u_1 v_1ᵀ put through the factors, and the block [h, n, p].

    Differentiable once; second derivatives are refused. A product that is zero to rounding has the
    value and the gradient 0. Raises InputError for fewer steps than one.

    >>> left = torch.tensor([[[2.0, 0.0]]], requires_grad=True)
    >>> right = torch.tensor([[[0.0, 3.0]]])
    >>> sigma, block = largest_singular_values(left, right, torch.ones(1, 2, 1))
    >>> sigma.sum().backward()
    >>> sigma.tolist(), left.grad.tolist()
    ([6.0], [[[3.0, 0.0]]])
    """
    sigma, u, v, after = leading_pairs(left, right, block, steps)
    alive = _alive(sigma, left, right)
    found: Tensor = _Leading.apply(left, right, u, v, alive)  # type: ignore[no-untyped-call]
    return found, after


def _powers(left: Tensor, right: Tensor, block: Tensor, steps: int) -> Tensor:
    """Inner coordinates [h, r, p] of (AᵀA)^steps V, up to a basis of their span."""
    between = _of_size_one(left @ left.mT)
    product = _of_size_one(between @ _of_size_one(right @ right.mT))
    inner = _of_size_one(between @ (right @ block))
    for number in range(1, steps):
        inner = product @ inner
        if number % _KEEP_APART == 0:
            inner = torch.linalg.qr(inner).Q
    basis: Tensor = torch.linalg.qr(inner).Q
    return basis


def _of_size_one(x: Tensor) -> Tensor:
    size = x.abs().amax((-2, -1), keepdim=True)  # squares of small float32 would vanish
    return x / torch.where(size > 0, size, 1.0)


def _alive(sigma: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Whether σ is more than rounding in the factors."""
    size: Tensor = torch.linalg.vector_norm(left.detach(), dim=(-2, -1))
    size = size * torch.linalg.vector_norm(right.detach(), dim=(-2, -1))
    alive: Tensor = sigma > left.shape[-2] * torch.finfo(sigma.dtype).eps * size
    return alive


class _Leading(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, u: Tensor, v: Tensor, alive: Tensor
    ) -> Tensor:
        left_u, right_v = left @ u[..., None], right @ v[..., None]
        ctx.save_for_backward(
            left, right, alive[..., None], u[..., None], v[..., None], left_u, right_v
        )
        return torch.where(alive, (left_u * right_v).sum((-2, -1)), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        to_left, to_right = slope_of_values(grad[..., None], *ctx.saved_tensors)
        return to_left, to_right, None, None, None
