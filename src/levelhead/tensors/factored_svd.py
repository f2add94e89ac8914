"""Singular values of products of two thin factors, through QR; nothing m × n is formed.

Axes. `left` [h, r, m] and `right` [h, r, n] stand for h products leftᵢᵀ rightᵢ [m, n]. With
leftᵢᵀ = Q_l R_l and rightᵢᵀ = Q_r R_r the product is Q_l (R_l R_rᵀ) Q_rᵀ, and the small core
R_l R_rᵀ = P diag(σ) Wᵀ has its singular values. QR and not Cholesky of the Gram matrices: squaring
the condition number makes small σ noise.

Gradients. dσ_a = u_aᵀ d(leftᵀ right) v_a with u = Q_l P, v = Q_r W: finite for repeated σ, where
functions that are symmetric in σ get their true gradient. A σ that is zero to rounding gets the
gradient 0, the smallest of its subgradients; differentiating QR itself gives NaN there. Second
derivatives are refused with an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["differentiable_singular_values", "factored_svd", "slope_of_values", "triangles"]


def triangles(factor: Tensor) -> Tensor:
    """R [·, min(r, m), r] of the QR factorisation of factorᵀ, for `factor` [·, r, m]."""
    r: Tensor = torch.linalg.qr(factor.mT, mode="r").R
    return r


def factored_svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u [h, m, k], σ [h, k], v [h, n, k] with leftᵀ right = u diag(σ) vᵀ, k = min(r, m, n).

    Not meant for gradients: singular vectors have none where singular values coincide.
    """
    q_left, r_left = torch.linalg.qr(left.mT)
    q_right, r_right = torch.linalg.qr(right.mT)
    p, sigma, w = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    return q_left @ p, sigma, q_right @ w.mT


def differentiable_singular_values(left: Tensor, right: Tensor) -> Tensor:
    """σ [h, min(r, m, n)] of leftᵀ right, falling, with the gradient given above (once only)."""
    sigma: Tensor = _SingularValues.apply(left, right)[0]  # type: ignore[no-untyped-call]
    return sigma


def slope_of_values(
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    alive: Tensor,
    u: Tensor,
    v: Tensor,
    left_u: Tensor,
    right_v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Slopes of Σ grad_a σ_a in left and right: (right v) diag(grad) uᵀ, (left u) diag(grad) vᵀ.

    grad, alive [h, k]; u [h, m, k], v [h, n, k] and left u, right v [h, r, k]. Values that are not
    alive have none. Differentiating the result is an error.
    """
    slopes: tuple[Tensor, Tensor] = _Slope.apply(  # type: ignore[no-untyped-call]
        grad, left, right, alive, u, v, left_u, right_v
    )
    return slopes


class _SingularValues(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        u, sigma, v = factored_svd(left, right)
        # What σ is accurate to: rounding in the factors, not in their possibly tiny product.
        size = left.pow(2).sum((-2, -1)).sqrt() * right.pow(2).sum((-2, -1)).sqrt()
        alive = sigma > left.shape[-2] * torch.finfo(sigma.dtype).eps * size[..., None]
        return sigma, alive, u, v, left @ u, right @ v

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return slope_of_values(grad, *ctx.saved_tensors)


class _Slope(torch.autograd.Function):
    """The gradient as a node of its own, so that differentiating it is an error and not zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, left: Tensor, right: Tensor, alive: Tensor, *vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        del left, right  # only there to tie the slope to them
        u, v, left_u, right_v = vectors
        weight = torch.where(alive, grad, torch.zeros_like(grad))[..., None, :]
        return (right_v * weight) @ u.mT, (left_u * weight) @ v.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "singular values of a factored product were differentiated twice; only first "
            "derivatives are provided: take this term out of the Hessian"
        )
