"""What a CP fit needs from its target, for dense tensors and for factored stacks.

A target hands out matricised products with the Khatri-Rao product of all factors but one (MTTKRP,
[n_k, R]) in the order `order`, and ⟨target, model⟩ along a line of models as a polynomial. Factors
are [n_k, R].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import in_chunks, squared_norm, working
from levelhead.tensors.tucker_targets import finite_norm

__all__ = ["CPTarget", "DenseCPTarget", "StackCPTarget", "cp_squared_error"]

# Called with a mode and its MTTKRP; puts the new factor into the list of factors.
Solve = Callable[[int, Tensor], None]


class CPTarget(Protocol):
    """A tensor as a CP fit sees it. The last mode of `order` carries the weights."""

    shape: tuple[int, ...]
    squared_norm: float
    order: list[int]
    dtype: torch.dtype
    device: torch.device

    def unfolding(self, mode: int) -> Tensor:
        """A matrix [n_mode, ·] whose leading left singular vectors are the unfolding's."""

    def sweep(self, factors: list[Tensor], solve: Solve) -> None:
        """Call `solve` once for each mode of `order`, every time with the newest factors."""

    def along(self, old: list[Tensor], new: list[Tensor]) -> Tensor:
        """Coefficients [N + 1] of μ ↦ ⟨target, model at new + μ (new - old)⟩, lowest first.

        `new` must be what the last sweep left, and `old` what it started from.
        """

    def moved(self, mu: float, lengths: Tensor, factors: list[Tensor]) -> None:
        """After `along`: the last mode's factor is now (new + μ (new - old)) · `lengths` [R]."""


class DenseCPTarget:
    """A dense tensor as the matrix [rest, n] of its longest mode: two products a sweep.

    With D the factor of the longest mode, T = X D serves the MTTKRPs of all other modes, and Xᵀ
    times their Khatri-Rao product is that of D. T is linear in D: the line search costs nothing
    of that size.
    """

    def __init__(self, x: Tensor) -> None:
        x = working(x.detach())
        self.shape, self.dtype, self.device = tuple(x.shape), x.dtype, x.device
        self.squared_norm = finite_norm(squared_norm(x), f"the tensor {list(x.shape)}")
        last = max(range(x.ndim), key=lambda k: (x.shape[k], k))
        self.order = [k for k in range(x.ndim) if k != last] + [last]
        self._x = x.permute(self.order).contiguous()
        self._matrix = self._x.reshape(-1, x.shape[last])
        # X D of the last two sweeps, and the D that the newer one belongs to.
        self._products = self._before = self._products_of = torch.empty(0)

    def unfolding(self, mode: int) -> Tensor:
        """See `CPTarget`."""
        rows = self._x.movedim(self.order.index(mode), 0)
        return rows.reshape(rows.shape[0], -1)

    def sweep(self, factors: list[Tensor], solve: Solve) -> None:
        """See `CPTarget`."""
        *others, last = self.order
        if self._products_of is not factors[last]:
            self._keep(self._matrix @ factors[last], factors)
        block = self._products.reshape(*self._x.shape[:-1], -1)
        for mode in others:
            solve(mode, _contract_others(block, [factors[k] for k in others], others.index(mode)))
        solve(last, self._matrix.mT @ _khatri_rao([factors[k] for k in others]))

    def along(self, old: list[Tensor], new: list[Tensor]) -> Tensor:
        """See `CPTarget`."""
        *others, last = self.order
        if self._products_of is not new[last]:
            self._before = self._products
            self._keep(self._matrix @ new[last], new)
        step = self._products - self._before
        terms = [p.reshape(*self._x.shape[:-1], -1) for p in (self._products, step)]
        for k in reversed(others):
            ends = new[k], new[k] - old[k]
            terms = _times_line([[(t * end).sum(-2) for end in ends] for t in terms])
        return torch.stack([t.double().sum() for t in terms])

    def moved(self, mu: float, lengths: Tensor, factors: list[Tensor]) -> None:
        """See `CPTarget`; what is kept for the next sweep moves along."""
        self._keep((self._products + mu * (self._products - self._before)) * lengths, factors)

    def _keep(self, products: Tensor, factors: list[Tensor]) -> None:
        self._products, self._products_of = products, factors[self.order[-1]]


class StackCPTarget:
    """The stacked tensor [h, m, n] of a LowRankStack: O(h r (m + n) R) a sweep, nothing m × n.

    Shared blocks are projected once and then repeated.
    """

    def __init__(self, stack: LowRankStack) -> None:
        self.shape: tuple[int, ...] = stack.shape
        self.device = stack.device
        self.dtype = torch.float64 if stack.dtype == torch.float64 else torch.float32
        self.order = [0, 1, 2]
        self.stack = stack
        with torch.no_grad():
            energies = stack.frobenius_norms().square().sum()
        self.squared_norm = finite_norm(energies, repr(stack))
        self._left, self._right = (f.detach().to(self.dtype) for f in (stack.left, stack.right))
        heads = torch.arange(len(stack))
        self._left_of = _index(stack.left_group, heads).to(self.device)
        self._right_of = _index(stack.group, heads).to(self.device)

    def unfolding(self, mode: int) -> Tensor:
        """See `CPTarget`."""
        if mode == 0:
            values, vectors = torch.linalg.eigh(self.stack.head_gram().detach())
            columns: Tensor = (vectors * values.clamp_min(0).sqrt()).to(self.dtype)
            return columns
        return self.stack.half_unfolding(mode).detach().mT.to(self.dtype)

    def sweep(self, factors: list[Tensor], solve: Solve) -> None:
        """See `CPTarget`."""
        left, right = self._projected(factors[1], factors[2])
        solve(0, (left * right).sum(1))
        solve(1, _gathered(self._left, self._left_of, factors[0][:, None] * right))
        left = (self._left @ factors[1])[self._left_of]
        solve(2, _gathered(self._right, self._right_of, factors[0][:, None] * left))

    def along(self, old: list[Tensor], new: list[Tensor]) -> Tensor:
        """See `CPTarget`."""
        here, before = self._projected(new[1], new[2]), self._projected(old[1], old[2])
        terms = [new[0][:, None], (new[0] - old[0])[:, None]]
        for end, start in zip(here, before, strict=True):
            terms = _times_line([[t * end, t * (end - start)] for t in terms])
        return torch.stack([t.double().sum() for t in terms])

    def moved(self, mu: float, lengths: Tensor, factors: list[Tensor]) -> None:
        """Nothing is kept from sweep to sweep."""

    def _projected(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return (self._left @ one)[self._left_of], (self._right @ two)[self._right_of]


def cp_squared_error(x: Tensor | LowRankStack, weights: Tensor, factors: Sequence[Tensor]) -> float:
    """‖x - Σ_r w_r a_r∘b_r∘…‖² from the residual itself, in float64, piece by piece."""
    if isinstance(x, LowRankStack):
        return _stack_squared_error(x, weights, factors)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part, entries in in_chunks(x.detach()):
        first, *others, last = [factors[0][part] * weights, *factors[1:]]
        model = _khatri_rao([first, *others]) @ last.mT
        total += squared_norm(entries.reshape(model.shape) - model)
    return float(total)


def _stack_squared_error(stack: LowRankStack, weights: Tensor, factors: Sequence[Tensor]) -> float:
    heads, one, two = factors
    total = 0.0
    for i in range(len(stack)):
        left, right = (f.detach() for f in stack[i].expanded(torch.float64))
        model = (one * (weights * heads[i])).mT
        residual = LowRankStack(
            torch.cat([left, -model[None]], 1), torch.cat([right, two.mT[None]], 1)
        )
        total += float(residual.frobenius_norms().square())
    return total


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Column-wise Kronecker product [Π n_k, R], the last factor's rows fastest."""
    out = factors[0]
    for factor in factors[1:]:
        out = (out[:, None] * factor[None]).flatten(0, 1)
    return out


def _contract_others(block: Tensor, factors: list[Tensor], mode: int) -> Tensor:
    """block [n_0, …, R] summed against all factors but that of `mode`: [n_mode, R]."""
    for k in reversed(range(mode + 1, len(factors))):
        block = (block * factors[k]).sum(-2)
    for k in range(mode):
        along = (-1, *[1] * (block.ndim - 2), block.shape[-1])
        block = (block * factors[k].reshape(along)).sum(0)
    return block


def _times_line(products: list[list[Tensor]]) -> list[Tensor]:
    """Coefficients of (Σ t_i μ^i)(e + μ s) from the products [t_i e, t_i s]."""
    return [
        *[
            constant if i == 0 else constant + products[i - 1][1]
            for i, (constant, _) in enumerate(products)
        ],
        products[-1][1],
    ]


def _gathered(factor: Tensor, block_of: Tensor, inner: Tensor) -> Tensor:
    """Σ_i factor[block_of i]ᵀ inner_i, [width, R]."""
    blocks = torch.zeros(
        factor.shape[0], *inner.shape[1:], dtype=inner.dtype, device=inner.device
    ).index_add_(0, block_of, inner)
    return factor.flatten(0, 1).mT @ blocks.flatten(0, 1)


def _index(groups: tuple[int, ...] | None, heads: Tensor) -> Tensor:
    return heads if groups is None else torch.tensor(groups)
