"""What a Tucker fit needs from its target, for dense tensors and for factored stacks.

A target hands out partial projections: the target contracted with all factors but one. Both kinds
make a sweep with the least work: a dense tensor is contracted as a whole only twice, a stack never
becomes [h, m, n].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import (
    in_chunks,
    mode_product,
    multi_mode_product,
    squared_norm,
    working,
)
from levelhead.tensors.power_sweeps import PowerSweeps
from levelhead.tensors.subspaces import is_large

__all__ = ["DenseTarget", "StackTarget", "Target", "Update"]

# Below this share of ‖l‖²‖r‖², ‖lᵀ r‖² from Gram matrices has lost four digits of sixteen.
_CANCELLED = 1e-4

# Called with a mode, a partial projection and the axis of the mode in it; returns the new factor.
Update = Callable[[int, Tensor, int], Tensor]


class Target(Protocol):
    """A tensor as a Tucker fit sees it; `factors` are [n_k, r_k] with orthonormal columns."""

    shape: tuple[int, ...]
    squared_norm: float

    def start(self, update: Update) -> list[Tensor]:
        """Factors of a sequentially truncated HOSVD."""

    def sweep(self, factors: list[Tensor], update: Update) -> float:
        """Update every factor in place once, in turn; the squared norm of the core afterwards."""

    def core(self, factors: list[Tensor]) -> Tensor:
        """The target contracted with all factors, in float64."""

    def squared_error(self, core: Tensor, factors: list[Tensor]) -> float:
        """‖target - core ×_k factors‖² from the residual itself, piece by piece, in float64."""


def finite_norm(total: Tensor, what: str) -> float:
    """The squared norm as a number; InputError if it is not finite."""
    number = float(total)
    if not math.isfinite(number):
        raise InputError(
            f"{what} holds NaN, infinite or overflowing entries: remove or rescale them first"
        )
    return number


class DenseTarget:
    """A dense tensor. It is kept with its axes from short to long, which makes products large.

    `ranks` tells which modes are truncated: the others are left alone throughout.
    """

    def __init__(self, x: Tensor, ranks: tuple[int, ...]) -> None:
        x = working(x.detach())
        self.shape = tuple(x.shape)
        self.squared_norm = finite_norm(squared_norm(x), f"the tensor {list(x.shape)}")
        self.order = sorted(range(x.ndim), key=lambda k: x.shape[k])
        self._x = x.permute(self.order).contiguous()
        self._active = [i for i, k in enumerate(self.order) if ranks[k] < self.shape[k]]

    def start(self, update: Update) -> list[Tensor]:
        """Sequentially truncated HOSVD, short modes first: each one shrinks all that follows."""
        factors = [torch.eye(n, dtype=self._x.dtype, device=self._x.device) for n in self.shape]
        y = self._x
        for i in self._active:
            k = self.order[i]
            factors[k] = update(k, y, i)
            y = mode_product(y, factors[k].mT, i)
        return factors

    def sweep(self, factors: list[Tensor], update: Update) -> float:
        """A dimension tree: the whole tensor is contracted once for each half of the modes."""
        core = 0.0

        def descend(y: Tensor, modes: list[int]) -> None:
            nonlocal core
            if len(modes) > 1:
                first, second = self._halves(modes)
                descend(self._contract(y, factors, second), first)
                descend(self._contract(y, factors, first), second)
                return
            i = modes[0]
            k = self.order[i]
            factors[k] = update(k, y, i)
            core = float(squared_norm(mode_product(y, factors[k].mT, i)))

        if not self._active:
            return self.squared_norm
        descend(self._x, self._active)
        return core

    def core(self, factors: list[Tensor]) -> Tensor:
        """The core in the caller's order of axes, contracted in float64 piece by piece."""
        inner: list[Tensor | None] = [None] * len(self.order)
        for i in self._active:
            inner[i] = factors[self.order[i]].double()
        parts = [
            multi_mode_product(part, inner, skip=0, transpose=True)
            for _, part in in_chunks(self._x)
        ]
        core = torch.cat(parts)
        core = core if inner[0] is None else mode_product(core, inner[0].mT, 0)
        return core.permute(*(self.order.index(k) for k in range(core.ndim)))

    def squared_error(self, core: Tensor, factors: list[Tensor]) -> float:
        """See `Target`."""
        ordered = [factors[k].double() for k in self.order]
        return dense_squared_error(self._x, core.permute(self.order), ordered)

    def _halves(self, modes: list[int]) -> tuple[list[int], list[int]]:
        sizes = [math.log(self._x.shape[i]) for i in modes]
        cuts = range(1, len(modes))
        cut = min(cuts, key=lambda c: abs(sum(sizes[:c]) - sum(sizes[c:])))
        return modes[:cut], modes[cut:]

    def _contract(self, y: Tensor, factors: list[Tensor], modes: list[int]) -> Tensor:
        chosen = [factors[self.order[i]] if i in modes else None for i in range(y.ndim)]
        return multi_mode_product(y, chosen, transpose=True)


def dense_squared_error(x: Tensor, core: Tensor, factors: list[Tensor]) -> float:
    """‖x - core ×_k factors‖² in float64, over chunks of axis 0."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part, entries in in_chunks(x):
        pieces = [factors[0][part], *factors[1:]]
        # From the small core outwards: the mode that grows least goes first.
        model = core
        for k in sorted(range(core.ndim), key=lambda k: pieces[k].shape[0] / pieces[k].shape[1]):
            model = mode_product(model, pieces[k], k)
        total += squared_norm(entries - model)
    return float(total)


class StackTarget:
    """The stacked tensor [h, m, n] of a LowRankStack, through its factors only."""

    def __init__(self, stack: LowRankStack) -> None:
        self.shape: tuple[int, ...] = stack.shape
        self.stack = stack
        with torch.no_grad():
            self.squared_norm = finite_norm(_energy(stack), repr(stack))
        dtype = torch.float64 if stack.dtype == torch.float64 else torch.float32
        self._left, self._right = stack.left.detach().to(dtype), stack.right.detach().to(dtype)
        h = len(stack)
        self._left_of = list(stack.left_group or range(h))
        self._right_of = list(stack.group or range(h))

    def start(self, update: Update) -> list[Tensor]:
        """Mode 1 from the stacked factors, then mode 2 within it, then the heads."""
        dtype = self._left.dtype
        one = update(1, self.stack.half_unfolding(1, dtype=dtype).detach(), 1)
        within = LowRankStack(
            self._left @ one, self._right, self.stack.group, left_group=self.stack.left_group
        )
        two = update(2, within.half_unfolding(2, dtype=dtype), 1)
        return [update(0, self._cores(self._left @ one, self._right @ two), 0), one, two]

    def sweep(self, factors: list[Tensor], update: Update) -> float:
        """See `Target`; O(h r m (r_1 + r_2)) and the factorisations."""
        left, right = self._left, self._right
        by_two = right @ factors[2]
        factors[0] = update(0, self._cores(left @ factors[1], by_two), 0)
        slices = zip(self._left_of, self._right_of, strict=True)
        rows = torch.stack([left[a].mT @ by_two[b] for a, b in slices])
        factors[1] = update(1, mode_product(rows, factors[0].mT, 0), 1)
        by_one = left @ factors[1]
        slices = zip(self._left_of, self._right_of, strict=True)
        rows = torch.stack([right[b].mT @ by_one[a] for a, b in slices])
        last = mode_product(rows, factors[0].mT, 0)
        factors[2] = update(2, last, 1)
        return float(squared_norm(mode_product(last, factors[2].mT, 1)))

    def is_large(self, ranks: tuple[int, ...]) -> bool:
        """Whether the modes of the slices are too long for a full factorisation in every sweep."""
        h, m, n = self.shape
        return is_large(m, h * n, ranks[1]) and is_large(n, h * m, ranks[2])

    def power_sweeps(self, factors: list[Tensor]) -> PowerSweeps:
        """Cheaper and less thorough sweeps of the same factors."""
        return PowerSweeps(self._left, self._right, self._left_of, self._right_of, factors)

    def core(self, factors: list[Tensor]) -> Tensor:
        """See `Target`."""
        left, right = self._left.double(), self._right.double()
        slices = self._cores(left @ factors[1].double(), right @ factors[2].double())
        return mode_product(slices, factors[0].double().mT, 0)

    def squared_error(self, core: Tensor, factors: list[Tensor]) -> float:
        """See `Target`; each residual slice is again a product of two thin factors."""
        return stack_squared_error(self.stack, core, factors)

    def _cores(self, left: Tensor, right: Tensor) -> Tensor:
        return left[self._left_of].mT @ right[self._right_of]


def _energy(stack: LowRankStack) -> Tensor:
    """Σ_i ‖A_i‖² in float64, from the Gram matrices of the factors unless digits cancel there."""
    grams = [x.double() @ x.double().mT for x in (stack.left, stack.right)]
    left, right = (
        gram if of is None else gram[list(of)]
        for gram, of in zip(grams, (stack.left_group, stack.group), strict=True)
    )
    energies = (left * right).sum((1, 2))
    bounds = left.diagonal(dim1=1, dim2=2).sum(1) * right.diagonal(dim1=1, dim2=2).sum(1)
    if bool((energies < _CANCELLED * bounds).any()):
        return stack.frobenius_norms().square().sum()
    return energies.sum()


def stack_squared_error(stack: LowRankStack, core: Tensor, factors: list[Tensor]) -> float:
    """Σ_i ‖A_i - U_1 C_i U_2ᵀ‖² with C_i = Σ_a U_0[i, a] core[a], in float64, slice by slice."""
    slices = mode_product(core, factors[0], 0)
    total = 0.0
    for i in range(len(stack)):
        left, right = stack[i].expanded(torch.float64)
        model = slices[i].mT @ factors[1].mT
        residual = LowRankStack(
            torch.cat([left.detach(), -model[None]], 1),
            torch.cat([right.detach(), factors[2].mT[None]], 1),
        )
        total += float(residual.frobenius_norms().square())
    return total
