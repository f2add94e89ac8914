"""Numbers for all pairs of slices of a factored stack: ⟨A_i, A_j⟩ and tr(A_i A_j).

Axes as in `low_rank_stack`: A_i = left[a_i]ᵀ right[b_i], left [·, r, m], right [·, r, n]. One slice
is paired with all later ones at a time, so that no more than h r² numbers exist at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inner_products", "traces_of_products"]

Groups = tuple[int, ...] | None


def inner_products(left: Tensor, right: Tensor, a: Groups, b: Groups) -> Tensor:
    """⟨A_i, A_j⟩ = Σ (left_i left_jᵀ) ∘ (right_i right_jᵀ), [h, h]."""
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
