"""A stack of products leftᵢᵀ rightᵢ that are never multiplied out by accident.

Axes. `left` [h, r, m] and `right` [h, r, n] stand for the stacked tensor [h, m, n] with slices
A_i = leftᵢᵀ rightᵢ, of rank at most r. Several slices may share a factor: `right` may hold g < h
blocks, and `group` says which block slice i uses; `left_group` does the same for `left`.

Two examples. left = right = ones [1, 1, 2] is the single slice [[1, 1], [1, 1]]. With h = 4,
right [2, r, n] and group (0, 0, 1, 1), slices 0 and 1 share the first block.

Precision. Everything that factorises takes `dtype`, by default float64 whatever the factors are;
float32 halves the cost and leaves singular values accurate to about 1e-6 of the largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.factored_svd import (
    differentiable_singular_values,
    factored_svd,
    triangles,
)
from levelhead.tensors.multilinear import numerical_rank, working
from levelhead.tensors.slice_pairs import inner_products, traces_of_products

__all__ = ["LowRankStack"]

Groups = tuple[int, ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class LowRankStack:
    """Stack [h, m, n] of A_i = left[i]ᵀ right[group[i]]; left [h, r, m], right [h or g, r, n].

    Raises InputError if the shapes, dtypes, devices or groups do not fit together.

    >>> stack = LowRankStack(torch.ones(1, 1, 2), torch.ones(1, 1, 3))
    >>> stack
    LowRankStack(1 × [2, 3], inner 1, torch.float32)
    >>> stack.dense()
    tensor([[[1., 1., 1.],
             [1., 1., 1.]]])
    """

    left: Tensor
    right: Tensor
    group: Groups = None
    left_group: Groups = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, factor in (("left", self.left), ("right", self.right)):
            working(factor)
            if factor.ndim != 3 or 0 in factor.shape:
                raise InputError(
                    f"{name} {list(factor.shape)} was given; expected [h, r, width], none of them 0"
                )
        if self.left.shape[1] != self.right.shape[1]:
            raise InputError(
                f"left {list(self.left.shape)} and right {list(self.right.shape)} do not share "
                "their inner width: expected [h, r, m] and [h, r, n]"
            )
        if (self.left.dtype, self.left.device) != (self.right.dtype, self.right.device):
            raise InputError(
                f"left is {self.left.dtype} on {self.left.device}, right is {self.right.dtype} "
                f"on {self.right.device}: bring them to one dtype and device"
            )
        for name in ("group", "left_group"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(int(i) for i in given))
        counts = [_heads("left", self.left, self.left_group)]
        counts.append(_heads("right", self.right, self.group))
        if counts[0] != counts[1]:
            raise InputError(
                f"left stands for {counts[0]} slices and right for {counts[1]}: "
                "give `group`, the block of right that each slice uses"
            )

    def __repr__(self) -> str:
        h, m, n = self.shape
        blocks = "" if self.group is None else f", {self.right.shape[0]} right blocks"
        return f"LowRankStack({h} × [{m}, {n}], inner {self.inner}{blocks}, {self.dtype})"

    # ── shape, selection, conversion ──

    @property
    def shape(self) -> tuple[int, int, int]:
        """(h, m, n): the shape of the stacked tensor."""
        return len(self), self.left.shape[2], self.right.shape[2]

    @property
    def inner(self) -> int:
        """r, the width that the two factors share."""
        return self.left.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors as they are kept."""
        return self.left.dtype

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.left.device

    def __len__(self) -> int:
        return self.left.shape[0] if self.left_group is None else len(self.left_group)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> LowRankStack:
        """The slices `index`, again as a stack (of one slice for an int)."""
        if isinstance(index, Tensor):
            index = torch.arange(len(self))[index.cpu()].reshape(-1).tolist()
        numbers = range(len(self))
        if isinstance(index, int):
            chosen = [numbers[index]]
        elif isinstance(index, slice):
            chosen = list(numbers[index])
        else:
            chosen = [numbers[i] for i in index]
        left, left_group = _choose(self.left, self.left_group, chosen)
        right, group = _choose(self.right, self.group, chosen)
        return LowRankStack(left, right, group, left_group=left_group)

    @property
    def mT(self) -> LowRankStack:
        """The stack of transposed slices [h, n, m]; no copy."""
        return LowRankStack(self.right, self.left, self.left_group, left_group=self.group)

    def scale(self, factor: float | Tensor) -> LowRankStack:
        """factor · A_i, for one number or one per slice [h]."""
        if not isinstance(factor, Tensor) or factor.ndim == 0:
            return replace(self, left=self.left * factor)
        if factor.shape != (len(self),):
            raise InputError(f"factors {list(factor.shape)} for {len(self)} slices: expected [h]")
        factor = factor.to(self.left)
        if self.left_group is not None and self.group is None:
            return replace(self, right=self.right * factor[:, None, None])
        return replace(self, left=self.expanded()[0] * factor[:, None, None], left_group=None)

    def to(self, target: torch.dtype | torch.device | str) -> LowRankStack:
        """The stack in another dtype or on another device, as `Tensor.to`."""
        return replace(self, left=self.left.to(target), right=self.right.to(target))

    def expanded(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """left [h, r, m] and right [h, r, n], shared blocks repeated, in `dtype` if it is given."""
        left, right = self.left, self.right
        if dtype is not None:
            left, right = left.to(dtype), right.to(dtype)
        left = left if self.left_group is None else left[list(self.left_group)]
        right = right if self.group is None else right[list(self.group)]
        return left, right

    def dense(self) -> Tensor:
        """The stacked tensor [h, m, n], multiplied out: h·m·n numbers."""
        left, right = self.expanded()
        return left.mT @ right

    # ── one product with vectors ──

    def matvec(self, x: Tensor) -> Tensor:
        """A_i x for x [..., n]: [..., h, m]."""
        inner = torch.einsum("grn,...n->...gr", self.right, x)
        inner = inner if self.group is None else inner[..., list(self.group), :]
        left = self.expanded()[0] if self.left_group is not None else self.left
        return torch.einsum("hrm,...hr->...hm", left, inner)

    def bilinear(self, x: Tensor, y: Tensor) -> Tensor:
        """xᵀ A_i y for x [..., m] and y [..., n]: [..., h].

        >>> float(LowRankStack(torch.ones(1, 1, 2), torch.ones(1, 1, 2)).bilinear(
        ...     torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])))
        21.0
        """
        a = torch.einsum("grm,...m->...gr", self.left, x)
        b = torch.einsum("grn,...n->...gr", self.right, y)
        a = a if self.left_group is None else a[..., list(self.left_group), :]
        b = b if self.group is None else b[..., list(self.group), :]
        return (a * b).sum(-1)

    # ── spectra of the slices ──

    def singular_values(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """Singular values [h, min(r, m, n)] of every slice, falling; O(h r² (m + n)).

        Differentiable once, finite also at zero factors and repeated values (see `factored_svd`).

        >>> stack = LowRankStack(torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[3.0, 4.0]]]))
        >>> stack.singular_values()
        tensor([[10.]], dtype=torch.float64)
        """
        if torch.is_grad_enabled() and (self.left.requires_grad or self.right.requires_grad):
            return differentiable_singular_values(*self.expanded(dtype))
        values: Tensor = torch.linalg.svdvals(self._core(dtype))
        return values

    def svd(self, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        """u [h, m, k], σ [h, k], v [h, n, k] of every slice, k = min(r, m, n); without gradient.

        The leading columns of u and v are the left and right singular subspaces, ready for
        principal angles. Where σ is zero to rounding they are any orthonormal completion.
        """
        with torch.no_grad():
            return factored_svd(*self.expanded(dtype))

    def nuclear_norms(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """Σ_a σ_a of every slice [h]; gradient U Vᵀ."""
        return self.singular_values(dtype=dtype).sum(-1)

    def spectral_norms(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """σ_1 of every slice [h]; gradient u_1 v_1ᵀ."""
        return self.singular_values(dtype=dtype)[:, 0]

    def frobenius_norms(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """√Σ_a σ_a² of every slice [h]; accurate also where large factors nearly cancel."""
        if torch.is_grad_enabled() and (self.left.requires_grad or self.right.requires_grad):
            norms: Tensor = torch.linalg.vector_norm(self.singular_values(dtype=dtype), dim=-1)
        else:
            norms = torch.linalg.matrix_norm(self._core(dtype))
        return norms

    def effective_ranks(
        self,
        kind: Literal["entropy", "participation"] = "entropy",
        *,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Effective rank [h], from 1 to k, and 0 for a slice that is zero.

        "entropy": exp(-Σ p log p) with p = σ/Σσ (Roy & Vetterli 2007); "participation":
        (Σσ²)²/Σσ⁴.

        >>> eye = torch.eye(3)[None]
        >>> LowRankStack(eye, eye).effective_ranks("participation")
        tensor([3.], dtype=torch.float64)
        """
        sigma = self.singular_values(dtype=dtype)
        largest = sigma[:, :1].detach()
        zero = largest == 0
        sigma = sigma / torch.where(zero, torch.ones_like(largest), largest)
        if kind == "participation":
            energy = sigma.square()
            total = torch.where(zero[:, 0], 1.0, energy.square().sum(-1))
            return energy.sum(-1).square() / total
        if kind != "entropy":
            raise InputError(f"kind {kind!r} was given; expected 'entropy' or 'participation'")
        p = sigma / torch.where(zero[:, 0], 1.0, sigma.sum(-1))[:, None]
        entropy = -(p * p.clamp_min(torch.finfo(dtype).tiny).log()).sum(-1)
        return torch.where(zero[:, 0], 0.0, entropy.exp())

    def eigenvalues(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """Eigenvalues [h, r], complex, largest modulus first, of slices with m = n.

        They are those of the small right leftᵀ; the other m - r eigenvalues are zero.
        """
        self._square("eigenvalues")
        left, right = self.expanded(dtype)
        values: Tensor = torch.linalg.eigvals(right @ left.mT)
        order = values.detach().abs().argsort(dim=-1, descending=True, stable=True)
        return values.gather(-1, order)

    def traces(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """tr A_i [h], m = n."""
        self._square("a trace")
        left, right = self.expanded(dtype)
        return (left * right).sum((1, 2))

    # ── pairs of slices ──

    def head_gram(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """⟨A_i, A_j⟩ = Σ (left_i left_jᵀ) ∘ (right_i right_jᵀ) [h, h], O(h² r² (m + n))."""
        factors = self.left.to(dtype), self.right.to(dtype)
        return inner_products(*factors, self.left_group, self.group)

    def trace_products(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """tr(A_i A_j) [h, h], symmetric, m = n; O(h² r² m)."""
        self._square("tr(A_i A_j)")
        factors = self.left.to(dtype), self.right.to(dtype)
        return traces_of_products(*factors, self.left_group, self.group)

    def cosines(self, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """⟨A_i, A_j⟩/(‖A_i‖ ‖A_j‖) [h, h]; a slice that is zero has cosine 0, with itself too."""
        gram = self.head_gram(dtype=dtype)
        energy = gram.diagonal()
        floor = torch.finfo(dtype).eps ** 2 * energy.detach().mean()
        length = energy.clamp_min(torch.finfo(dtype).tiny).maximum(floor).sqrt()
        return gram / length[:, None] / length[None, :]

    # ── the stacked tensor [h, m, n] ──

    def mode_singular_values(self, mode: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """Singular values of the mode-`mode` unfolding of the stacked tensor: [h], [m] or [n].

        Modes 1 and 2 come from stacked factors and are accurate to rounding; mode 0 comes from
        the head Gram, which resolves √ε of the largest value (1e-8 in float64).
        """
        if mode not in (0, 1, 2):
            raise InputError(f"mode {mode} was given for a stack [h, m, n]: expected 0, 1 or 2")
        if mode == 0:
            energies: Tensor = torch.linalg.eigvalsh(self.head_gram(dtype=dtype))
            return energies.clamp_min(0).sqrt().flip(0)
        rows = self.half_unfolding(mode, dtype=dtype)
        values = torch.linalg.svdvals(rows)
        return torch.nn.functional.pad(values, (0, rows.shape[1] - values.shape[0]))

    def half_unfolding(self, mode: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
        """A matrix [≤ h r, m] (mode 1; [.., n] for mode 2) with the Gram Σ A_i A_iᵀ (Σ A_iᵀ A_i).

        Slices that share a factor share their rows. Its right singular vectors and its singular
        values are the left ones of the mode-`mode` unfolding [m, h n].
        """
        own, other = (self.left, self.right) if mode == 1 else (self.right, self.left)
        groups, others = (self.left_group, self.group)[:: 1 if mode == 1 else -1]
        small = triangles(other.to(dtype))
        small = small if others is None else small[list(others)]
        own = own.to(dtype)
        if groups is None:
            return (small @ own).reshape(-1, own.shape[2])
        parts = []
        for block in sorted(set(groups)):
            members = torch.cat([small[i] for i, g in enumerate(groups) if g == block])
            parts.append(torch.linalg.qr(members, mode="r").R @ own[block])
        return torch.cat(parts)

    def multilinear_rank(self, tolerance: float | None = None) -> tuple[int, int, int]:
        """Numerical ranks of the three unfoldings of [h, m, n].

        A singular value counts above `tolerance` times the largest of its mode. By default that
        is max(h r, m, n) machine epsilons of the factors' dtype, and 1e-7 at least in mode 0,
        which the Gram does not resolve further.
        """
        h, m, n = self.shape
        limit = tolerance
        if limit is None:
            limit = max(h * self.inner, m, n) * torch.finfo(self.dtype).eps
        ranks = [
            numerical_rank(self.mode_singular_values(mode), max(limit, 1e-7 if mode == 0 else 0.0))
            for mode in range(3)
        ]
        return ranks[0], ranks[1], ranks[2]

    # ── private ──

    def _core(self, dtype: torch.dtype) -> Tensor:
        """R_l R_rᵀ of every slice; each shared block is factorised once."""
        left, right = triangles(self.left.to(dtype)), triangles(self.right.to(dtype))
        left = left if self.left_group is None else left[list(self.left_group)]
        right = right if self.group is None else right[list(self.group)]
        return left @ right.mT

    def _square(self, what: str) -> None:
        _, m, n = self.shape
        if m != n:
            raise InputError(f"slices are [{m}, {n}]: {what} exists only for square ones")


def _heads(name: str, factor: Tensor, groups: Groups) -> int:
    """How many slices a factor stands for; InputError if its groups name no block of it."""
    blocks = factor.shape[0]
    if groups is None:
        return blocks
    if any(not 0 <= g < blocks for g in groups):
        raise InputError(f"groups {groups} were given for the {blocks} blocks of {name}")
    return len(groups)


def _choose(factor: Tensor, groups: Groups, chosen: list[int]) -> tuple[Tensor, Groups]:
    """The factor of the chosen slices; shared blocks stay shared, and all of them are kept."""
    if groups is None:
        return factor[chosen], None
    return factor, tuple(groups[i] for i in chosen)
