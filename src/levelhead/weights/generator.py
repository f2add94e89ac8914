"""What a generator of a layer's symmetry group is, with charts and random numbers to make one of.

Axes as in `attention_view`; h heads in g key/value groups. A chart takes `dimension` numbers, zero
at the identity, and is right to first order there: that is what gradients along the group need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol

import torch
from torch import Tensor

from levelhead.weights.gauge import random_orthogonal
from levelhead.weights.layer_weights import LayerWeights, View

__all__ = [
    "FAMILIES",
    "Generator",
    "Moved",
    "near_identity",
    "near_rotations",
    "no_planes",
    "normal_numbers",
    "pair_fibre",
    "random_complex",
    "random_rotation",
    "random_scales",
    "rotation_dimension",
]

FAMILIES = ("gauge", "bias", "scale", "norm", "permutation", "basis")


@dataclass(frozen=True, eq=False)
class Moved(Generic[View]):
    """A view after a move, and how everything around it moved.

    `heads`, `groups`: head i of `view` was head heads[i] before, likewise groups; None: unmoved.
    `inputs` [d, d], `source` [d_source, d_source], `output` [d_out, d_out]: x → inputs x; None:
    unmoved.
    """

    view: View
    heads: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    inputs: Tensor | None = None
    source: Tensor | None = None
    output: Tensor | None = None

    def covariance(self, c: Tensor) -> Tensor:
        """E[x xᵀ] [d, d] of the moved inputs."""
        if self.inputs is None:
            return c
        a = self.inputs.to(c)
        return a @ c @ a.mT

    def then(self, other: Moved[View]) -> Moved[View]:
        """This move and then `other`, a move of this one's view."""
        changes: dict[str, Any] = {}
        for name in ("heads", "groups"):
            first, second = getattr(self, name), getattr(other, name)
            both = second if first is None else first
            if first is not None and second is not None:
                both = tuple(first[i] for i in second)
            changes[name] = both
        for name in ("inputs", "source", "output"):
            first, second = getattr(self, name), getattr(other, name)
            changes[name] = first if second is None else second
            if first is not None and second is not None:
                changes[name] = second @ first
        return replace(other, **changes)


class Chart(Protocol):
    """Makes moves of a view from numbers near zero."""

    def __call__(self, view: View, x: Tensor, /) -> Moved[View]:
        """The view moved by the element that the numbers x stand for."""


class Draw(Protocol):
    """Makes random moves of a view."""

    def __call__(self, view: View, random: torch.Generator, condition: float, /) -> Moved[View]:
        """The view moved by a random element whose matrices have this condition number."""


@dataclass(frozen=True, eq=False)
class Generator:
    """One kind of move of a layer.

    Args:
        name: as in `GENERATORS`; `family`: one of `FAMILIES`.
        description: what moves how.
        dimension: of the Lie group, 0 if it is finite; `fibre`: of what it makes of generic
            weights, which is less where it does not act freely.
        moves: the fields of a view that it changes.
        draw: (view, random, condition) → a random element's move; condition numbers are exactly
            `condition`.
        near: (view, numbers [dimension]) → the move by an element near the identity, which is at
            zero; None for finite groups.
        moves_inputs: whether the layer's input must be moved along.
    """

    name: str
    family: str
    description: str
    dimension: int
    moves: frozenset[str]
    draw: Draw
    near: Chart | None = None
    fibre: int = -1
    moves_inputs: bool = False

    def __post_init__(self) -> None:
        if self.fibre < 0:
            object.__setattr__(self, "fibre", self.dimension)


# ── charts and random numbers ──


def no_planes(view: LayerWeights) -> Tensor:
    """Numbers for the planes of a layer in which nothing turns: none, [g, 0, 2]."""
    return view.q.new_zeros(view.groups, 0, 2)


def near_identity(x: Tensor, copies: int, sizes: list[int]) -> list[Tensor]:
    """1 + X for X [copies, n, n] from the numbers x."""
    parts = torch.split(x, [copies * n * n for n in sizes])
    return [
        p.reshape(copies, n, n) + torch.eye(n, dtype=x.dtype, device=x.device)
        for p, n in zip(parts, sizes, strict=True)
    ]


def rotation_dimension(n: int, centred: bool) -> int:
    """Dimension of O(n), or of what of it fixes the vector of ones."""
    free = n - 1 if centred else n
    return free * (free - 1) // 2


def near_rotations(x: Tensor, copies: int, sizes: list[int], centred: bool) -> list[Tensor]:
    """1 + X for antisymmetric X [copies, n, n] (with X 1 = 0 if `centred`)."""
    out = []
    parts = torch.split(x, [copies * rotation_dimension(n, centred) for n in sizes])
    for part, n in zip(parts, sizes, strict=True):
        free = n - 1 if centred else n
        rows, columns = torch.tril_indices(free, free, -1, device=x.device)
        skew = x.new_zeros(copies, free, free)
        skew = skew.index_put(
            (torch.arange(copies, device=x.device)[:, None], rows, columns),
            part.reshape(copies, -1),
        )
        skew = skew - skew.mT
        if centred:
            basis = _complement_of_ones(n).to(x)
            skew = basis @ skew @ basis.mT
        out.append(skew + torch.eye(n, dtype=x.dtype, device=x.device))
    return out


def random_rotation(count: int, n: int, random: torch.Generator, centred: bool) -> Tensor:
    """Orthogonal matrices [count, n, n], uniform over O(n) or over what of it fixes the ones."""
    if not centred:
        return random_orthogonal(count, n, random)
    ones = torch.full((n, n), 1 / n, dtype=torch.float64)
    if n == 1:
        return ones.expand(count, 1, 1)
    basis = _complement_of_ones(n)
    return basis @ random_orthogonal(count, n - 1, random) @ basis.mT + ones


def _complement_of_ones(n: int) -> Tensor:
    """An orthonormal basis [n, n - 1] of the vectors with mean zero."""
    columns = torch.eye(n, dtype=torch.float64)
    columns[:, 0] = 1
    return torch.as_tensor(torch.linalg.qr(columns).Q[:, 1:])


def random_complex(g: int, planes: int, random: torch.Generator, condition: float) -> Tensor:
    """Complex numbers [g, planes, 2] of any phase and of moduli as `random_scales`."""
    sizes = random_scales(g * planes, random, condition)
    phases = 2 * torch.pi * torch.rand(g * planes, generator=random, dtype=torch.float64)
    return torch.stack((sizes * phases.cos(), sizes * phases.sin()), -1).reshape(g, planes, 2)


def random_scales(count: int, random: torch.Generator, condition: float) -> Tensor:
    """Positive numbers between 1/√condition and √condition, equally likely in the logarithm."""
    u = torch.rand(count, generator=random, dtype=torch.float64) - 0.5
    return torch.as_tensor(condition**u)


def normal_numbers(like: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Normal numbers of the size of `like`'s entries."""
    size = like.detach().double().square().mean().sqrt().clamp_min(1e-3).cpu()
    return size * torch.randn(count, generator=random, dtype=torch.float64)


def pair_fibre(n: int, left: int, right: int) -> int:
    """Dimension of the pairs [n, left], [n, right] with one product, near generic ones."""
    rank = min(n, left, right)
    return n * (left + right) - rank * (left + right - rank)
