"""Numbers for all pairs of slices of a factored stack: ⟨A_i, A_j⟩ and tr(A_i A_j).

Axes as in `low_rank_stack`: A_i = left[a_i]ᵀ right[b_i], left [·, r, m], right [·, r, n]. One slice
is paired with all later ones at a time, so that no more than h r² numbers exist at once.

With gradients (which keep all pairs anyway) ⟨A_i, A_j⟩ takes one matrix product for each factor,
P = left leftᵀ and S = right rightᵀ, and its gradient one more: with w = g + gᵀ,

    ∂left = (w ∘ S) left,   ∂right = (w ∘ P) right,   w_ij spread over the r × r block (i, j).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["inner_products", "traces_of_products"]

Groups = tuple[int, ...] | None


def inner_products(left: Tensor, right: Tensor, a: Groups, b: Groups) -> Tensor:
    """⟨A_i, A_j⟩ = Σ (left_i left_jᵀ) ∘ (right_i right_jᵀ), [h, h]."""
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        gram: Tensor = _InnerProducts.apply(left, right, a, b)[0]  # type: ignore[no-untyped-call]
        return gram
    rows = []
    for i in range(left.shape[0] if a is None else len(a)):
        by_left = _pairs(left[_block(a, i)], left, a, i)
        by_right = _pairs(right[_block(b, i)], right, b, i)
        rows.append((by_left * by_right).sum((1, 2)))
    return _symmetric(rows)


def traces_of_products(left: Tensor, right: Tensor, a: Groups, b: Groups) -> Tensor:
    """tr(A_i A_j) = Σ (left_i right_jᵀ) ∘ (right_i left_jᵀ), [h, h], for m = n."""
    rows = []
    for i in range(left.shape[0] if a is None else len(a)):
        forth = _pairs(left[_block(a, i)], right, b, i)
        back = _pairs(right[_block(b, i)], left, a, i)
        rows.append((forth * back).sum((1, 2)))
    return _symmetric(rows)


class _InnerProducts(torch.autograd.Function):
    """The Gram matrix; P and S are outputs only so that the gradient finds them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, a: Groups, b: Groups) -> tuple[Tensor, ...]:
        p, s = _all_pairs(left), _all_pairs(right)
        gram = (_spread(p, a) * _spread(s, b)).sum((1, 3))
        return gram, p, s

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        left, right, ctx.a, ctx.b = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(left, right, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        left, right, p, s = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: P and S must depend on factors
            p, s = _all_pairs(left), _all_pairs(right)
        whole = (grad + grad.mT)[:, None, :, None]
        to_left = to_right = None
        if ctx.needs_input_grad[0]:
            to_left = _times(_gathered(whole * _spread(s, ctx.b), ctx.a, len(left)), left)
        if ctx.needs_input_grad[1]:
            to_right = _times(_gathered(whole * _spread(p, ctx.a), ctx.b, len(right)), right)
        return to_left, to_right, None, None


def _all_pairs(factor: Tensor) -> Tensor:
    """factor_i factor_jᵀ of all blocks [g, r, g, r], in one product."""
    g, r, _ = factor.shape
    flat = factor.reshape(g * r, -1)
    return (flat @ flat.mT).reshape(g, r, g, r)


def _spread(pairs: Tensor, groups: Groups) -> Tensor:
    """Pairs of blocks [g, r, g, r] as pairs of slices [h, r, h, r]."""
    return pairs if groups is None else pairs[list(groups)][:, :, list(groups)]


def _gathered(pairs: Tensor, groups: Groups, blocks: int) -> Tensor:
    """The sum over slices [h, r, h, r] that use the same blocks: [g, r, g, r]."""
    if groups is None:
        return pairs
    index = torch.tensor(groups, device=pairs.device)
    h, r, _, _ = pairs.shape
    rows = pairs.new_zeros(blocks, r, h, r).index_add(0, index, pairs)
    return rows.new_zeros(blocks, r, blocks, r).index_add(2, index, rows)


def _times(pairs: Tensor, factor: Tensor) -> Tensor:
    g, r, width = factor.shape
    return (pairs.reshape(g * r, g * r) @ factor.reshape(g * r, width)).reshape(g, r, width)


def _block(groups: Groups, i: int) -> int:
    return i if groups is None else groups[i]


def _pairs(one: Tensor, factor: Tensor, groups: Groups, start: int) -> Tensor:
    """`one` [r, w] times the transposed blocks of slices start .. h-1: [h - start, r, r]."""
    others = factor[start:] if groups is None else factor
    count, r, _ = others.shape
    products = (one @ others.flatten(0, 1).mT).reshape(-1, count, r).movedim(1, 0)
    return products if groups is None else products[list(groups[start:])]


def _symmetric(rows: list[Tensor]) -> Tensor:
    """The matrix whose row i, from the diagonal on, is rows[i]."""
    h = len(rows)
    i, j = torch.triu_indices(h, h, device=rows[0].device)
    values = torch.cat(rows)
    full = values.new_zeros(h, h).index_put((i, j), values)
    return full + full.mT - torch.diag(full.diagonal())
