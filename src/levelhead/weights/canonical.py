"""The balanced gauge of an attention layer: the shortest weights that compute the same function.

Axes as in `attention_view`; g key/value groups. In the balanced gauge the queries of a group and
its keys have the same Gram matrix, Σ_i q_i q_iᵀ = k kᵀ = diag(σ), with σ the singular values of
the group's stacked form, vstack_i(q_i)ᵀ k; likewise Σ_i o_iᵀ o_i = v vᵀ = diag(σ). Rotary planes
are only scaled and turned: |q_f| = |k_f| and Σ q_f k_f ≥ 0 as complex numbers.

Two examples. q = [[2, 0]], k = [[0, 8]] (one head, d_k = 1) become [[4, 0]] and [[0, 4]], σ = 16.
A head with q = 0 gets k = 0 too: its form is zero.

What is left free. A sign for each component (a rotation where σ coincide): numbers that depend on
it are not well defined even here. `reference` fixes signs, and rotations within clusters, by a
rule that follows the basis (largest-entry rules would not). No gradient goes through any of this.

Source: Kempf & Ness (1979): the balanced point is the shortest of its orbit, with
½(‖q‖² + ‖k‖²) = ‖B‖_* and ‖q‖₂‖k‖₂ = ‖B‖₂ for each head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.folding import drop_key_bias
from levelhead.weights.gauge import act_on_vo, carry_qk, inner_blocks
from levelhead.weights.layer_weights import LayerWeights, View
from levelhead.weights.structure import Disentangled

__all__ = ["Balance", "CanonicalGauge", "balance", "canonical", "clusters"]

# Below this share of the largest σ a group cannot carry a bias through its gauge in float64.
_DEFICIENT = 1e-8

Clusters = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class CanonicalGauge(Generic[View]):
    """`view` in balanced gauge, and what its components are.

    Args:
        qk_values: [g, d_k], σ of each component; the two dimensions of a rotary plane both hold
            |q_f||k_f|.
        ov_values: [g, d_v].
        qk_clusters, ov_clusters: for each group, which components share their σ to `tolerance`;
            those of one cluster are defined up to a rotation only. Planes are left out.
        qk_kept, ov_kept: groups that stayed as they were, for a rank-deficient form cannot carry
            their biases exactly; all groups for `qk_kept` where queries and keys are normed.
        tolerance: of the clusters, relative to the largest σ of a group.
    """

    view: View
    qk_values: Tensor
    ov_values: Tensor
    qk_clusters: tuple[Clusters, ...]
    ov_clusters: tuple[Clusters, ...]
    qk_kept: tuple[int, ...]
    ov_kept: tuple[int, ...]
    tolerance: float


def canonical(
    view: View,
    *,
    reference: LayerWeights | Tensor | None = None,
    tolerance: float | None = None,
) -> CanonicalGauge[View]:
    """The layer in balanced gauge, QK and OV; same function, forms and maps. Without gradient.

    A void k_bias is dropped, other biases and disentangled positions move along. Queries and keys
    that are normed stay as they are: norms allow no balancing. Where k is the parameter q, both
    only rotate.

    Args:
        reference: another view of these shapes (an earlier checkpoint, in this gauge): signs, and
            rotations within clusters, are those closest to it. Or a vector r [d] (a mean normed
            token): every component reads it with q·r ≥ 0, every value with v·r ≥ 0.
        tolerance: for clusters of σ, relative to the largest one. By default 10·ε·√d of float64
            for float64 weights and of float32 otherwise; 1e-3 to 1e-2 suits monitoring.

    Raises InputError for a reference of other shapes.

    >>> view = LayerWeights(q=torch.tensor([[[2.0, 0.0]]]), k=torch.tensor([[[0.0, 8.0]]]),
    ...                     v=torch.ones(1, 1, 2), o=torch.ones(1, 2, 1))
    >>> found = canonical(view)
    >>> found.view.q.abs(), found.qk_values
    (tensor([[[4., 0.]]]), tensor([[16.]], dtype=torch.float64))
    """
    if tolerance is None:
        tolerance = 10 * torch.finfo(view.dtype).eps * math.sqrt(view.d)
    with torch.no_grad():
        work = drop_key_bias(view.to(torch.float64))
        work, qk_values, qk_kept = _balanced_qk(work)
        work, ov_values, ov_kept = _balanced_ov(work)
        blocks = inner_blocks(work)
        free = blocks.free if work.qk_norm is None else ()
        qk_clusters = tuple(
            tuple(c for block in free for c in clusters(row, tolerance, block)) for row in qk_values
        )
        ov_clusters = tuple(clusters(row, tolerance) for row in ov_values)
        if reference is not None:
            planes = blocks.planes if work.qk_norm is None else ()
            work = _referred(work, reference, qk_clusters, ov_clusters, planes)
        work = work.to(view.dtype)
    return CanonicalGauge(
        work, qk_values, ov_values, qk_clusters, ov_clusters, qk_kept, ov_kept, tolerance
    )


def clusters(values: Tensor, tolerance: float, where: tuple[int, ...] | None = None) -> Clusters:
    """Runs of falling `values` whose neighbours differ by at most `tolerance` times the largest.

    `where` names the positions to look at, by default all.

    >>> clusters(torch.tensor([3.0, 3.0, 1.0]), 1e-6)
    ((0, 1), (2,))
    """
    where = tuple(range(len(values))) if where is None else where
    found: list[list[int]] = []
    limit = tolerance * float(values[list(where)].max()) if where else 0.0
    for a in where:
        if found and float(values[found[-1][-1]] - values[a]) <= limit:
            found[-1].append(a)
        else:
            found.append([a])
    return tuple(tuple(run) for run in found)


@dataclass(frozen=True, eq=False)
class Balance:
    """How far a view is from balance: qk [g], ov [g], from 0 (balanced) to 1."""

    qk: Tensor
    ov: Tensor


def balance(view: LayerWeights) -> Balance:
    """‖Σ_i q_i q_iᵀ - k kᵀ‖/(‖Σ_i q_i q_iᵀ‖ + ‖k kᵀ‖) for each group, and the same for o and v.

    Under rotary positions only what the layer's gauge can change counts: |q_f|² against |k_f|² of
    each plane, and the block of dimensions that do not turn. Differentiable; 0 for zero weights.
    """
    q, k = _grams(view, view.q), view.k @ view.k.mT
    o, v = _grams(view, view.o.mT), view.v @ view.v.mT
    return Balance(_defect(_movable(view, q), _movable(view, k)), _defect(o, v))


# ── balancing ──


@dataclass(frozen=True, eq=False)
class _Pair:
    """Balanced factors: left [r, n], right [r, n'], σ [r], and the maps to them [r, r]."""

    left: Tensor
    right: Tensor
    values: Tensor
    forth: Tensor
    back: Tensor


def _balanced_qk(view: View) -> tuple[View, Tensor, tuple[int, ...]]:
    blocks, d_k = inner_blocks(view), view.d_k
    carried = view.q_bias is not None or view.k_bias is not None
    carried = carried or isinstance(view.position, Disentangled)
    forth = torch.eye(d_k, dtype=view.dtype, device=view.q.device).repeat(view.groups, 1, 1)
    back, q, k = forth.clone(), view.q.clone(), view.k.clone()
    values, kept = view.q.new_zeros(view.groups, d_k), []
    for group in range(view.groups):
        members = list(view.members(group))
        for block in (*blocks.planes, *blocks.free):
            rows = torch.tensor(block, device=q.device)
            here = torch.tensor(members, device=q.device)[:, None], rows
            left = view.q[here].movedim(1, 0).flatten(1)
            right = view.k[group, rows]
            pair = _plane(left, right, view) if block in blocks.planes else None
            if pair is None:
                pair = _balanced(left, right, view.tied, carried)
                if carried and not view.tied and _deficient(pair.values):
                    kept.append(group)
                    pair = replace(pair, left=left, right=right, **_still(pair.forth))
            values[group, rows] = pair.values
            square = rows[:, None], rows[None, :]
            forth[group][square], back[group][square] = pair.forth, pair.back
            q[here] = pair.left.reshape(len(rows), len(members), -1).movedim(0, 1)
            k[group, rows] = pair.right
    if view.qk_norm is not None:
        return view, values, tuple(range(view.groups))
    return carry_qk(view, forth, back, q=q, k=k), values, tuple(sorted(set(kept)))


def _balanced_ov(view: View) -> tuple[View, Tensor, tuple[int, ...]]:
    o, v = view.o.clone(), view.v.clone()
    bias = None if view.v_bias is None else view.v_bias.clone()
    values, kept = view.v.new_zeros(view.groups, view.d_v), []
    for group in range(view.groups):
        members = list(view.members(group))
        left = view.o[members].movedim(2, 0).flatten(1)
        pair = _balanced(left, view.v[group], False, bias is not None)
        values[group] = pair.values
        if bias is not None and _deficient(pair.values):
            kept.append(group)
            continue
        o[members] = pair.left.reshape(view.d_v, len(members), -1).movedim(0, 2)
        v[group] = pair.right
        if bias is not None:
            bias[group] = pair.back @ bias[group]
    return replace(view, o=o, v=v, v_bias=bias), values, tuple(kept)


def _balanced(left: Tensor, right: Tensor, tied: bool, carried: bool) -> _Pair:
    """left [r, n], right [r, n'] → √σ times the singular vectors of leftᵀ right.

    The maps to them are worked out only if something is `carried` by them.
    """
    r = left.shape[0]
    if tied:  # one parameter: only rotations keep it one
        turn, sizes, _ = torch.linalg.svd(left)
        values = torch.zeros_like(turn[0])
        values[: len(sizes)] = sizes.square()
        return _Pair(turn.mT @ left, turn.mT @ right, values, turn.mT, turn.mT)
    q_left, r_left = torch.linalg.qr(left.mT)
    q_right, r_right = torch.linalg.qr(right.mT)
    p, sigma, s = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    root = sigma.sqrt()[:, None]
    new_left, new_right = root * (q_left @ p).mT, root * (s @ q_right.mT)
    pad = (0, 0, 0, r - len(sigma))
    new_left = torch.nn.functional.pad(new_left, pad)
    new_right = torch.nn.functional.pad(new_right, pad)
    values = torch.nn.functional.pad(sigma, (0, r - len(sigma)))
    maps = _still(values)
    if carried:
        maps["forth"] = new_left @ torch.linalg.pinv(left)
        maps["back"] = new_right @ torch.linalg.pinv(right)
    return _Pair(new_left, new_right, values, **maps)


def _plane(left: Tensor, right: Tensor, view: LayerWeights) -> _Pair:
    """left [2, n], right [2, n'] as complex rows: equal lengths, and Σ q k real and positive.

    In cross-attention queries and keys have no common coordinates: there Σ q² is made positive.
    """
    q, k = torch.complex(left[0], left[1]), torch.complex(right[0], right[1])
    sizes = torch.linalg.vector_norm(left), torch.linalg.vector_norm(right)
    product = sizes[0] * sizes[1]
    stretch = (sizes[1] / sizes[0]).sqrt() if product > 0 else torch.ones_like(product)
    turned = q.square().sum() if view.cross else (q.reshape(-1, len(k)) * k).sum()
    phase = -0.5 * turned.angle()
    cosine, sine = phase.cos(), phase.sin()
    turn = torch.stack((torch.stack((cosine, -sine)), torch.stack((sine, cosine))))
    lost = product == 0 and view.q_bias is None and view.k_bias is None and not view.tied
    forth, back = turn * stretch, turn / stretch
    keep = 0.0 if lost else 1.0
    return _Pair(keep * (forth @ left), keep * (back @ right), product.expand(2), forth, back)


def _deficient(values: Tensor) -> bool:
    return bool(values[-1] <= _DEFICIENT * values[0])


def _still(like: Tensor) -> dict[str, Tensor]:
    eye = torch.eye(like.shape[0], dtype=like.dtype, device=like.device)
    return {"forth": eye, "back": eye}


# ── signs ──


def _referred(
    view: View,
    reference: LayerWeights | Tensor,
    qk: tuple[Clusters, ...],
    ov: tuple[Clusters, ...],
    planes: tuple[tuple[int, int], ...],
) -> View:
    """Signs, and rotations inside clusters, as close to the reference as they can be."""
    if isinstance(reference, Tensor):
        if reference.shape != (view.d,) or view.cross:
            raise InputError(
                f"{view.name}: a reference {list(reference.shape)} was given; expected a vector "
                f"[{view.d}] of a layer that reads one sequence, or another view"
            )
        r = reference.to(view.q)
        like, other = view.q.new_zeros(view.q.shape) + r, view.v.new_zeros(view.v.shape) + r
        pairs = [(view.q, like)], [(view.v, other)]
        qk = tuple(tuple((a,) for c in group for a in c) for group in qk)
        ov = tuple(tuple((a,) for c in group for a in c) for group in ov)
    else:
        for name in ("q", "k", "v", "o"):
            if getattr(reference, name).shape != getattr(view, name).shape:
                raise InputError(
                    f"{view.name}: {reference.name}, given as reference, has other shapes"
                )
        ref = reference.to(torch.float64)
        pairs = (
            [(view.q, ref.q), (view.k, ref.k)],
            [(view.o.mT, ref.o.mT), (view.v, ref.v)],
        )
    turn = _turns(view, pairs[0], qk, planes)
    back = turn  # orthogonal: its inverse transpose is itself
    heads = turn[list(view.kv_group)]
    view = carry_qk(view, turn, back, q=heads @ view.q, k=back @ view.k)
    return act_on_vo(view, _turns(view, pairs[1], ov, ()))


def _turns(
    view: LayerWeights,
    pairs: list[tuple[Tensor, Tensor]],
    runs: tuple[Clusters, ...],
    planes: tuple[tuple[int, int], ...],
) -> Tensor:
    """Orthogonal matrices [g, r, r]: Procrustes inside each run, a sign on each plane."""
    r = pairs[0][0].shape[1]
    near = view.q.new_zeros(view.groups, r, r)
    groups = torch.tensor(view.kv_group, device=near.device)
    for own, ref in pairs:
        products = ref @ own.mT
        if len(products) == view.groups:
            near = near + products
        else:
            near = near.index_add(0, groups, products)
    turn = torch.eye(r, dtype=near.dtype, device=near.device).repeat(view.groups, 1, 1)
    for group, found in enumerate(runs):
        for run in found:
            rows = torch.tensor(run, device=near.device)
            square = rows[:, None], rows[None, :]
            u, _, v = torch.linalg.svd(near[group][square])
            turn[group][square] = u @ v
        for plane in planes:
            rows = torch.tensor(plane, device=near.device)
            negative = near[group].diagonal()[rows].sum() < 0
            turn[group, rows, rows] = -1.0 if negative else 1.0
    return turn


# ── balance ──


def _grams(view: LayerWeights, rows: Tensor) -> Tensor:
    """Σ over the heads of a group of rows rowsᵀ: [g, r, r] from [h, r, n]."""
    groups = torch.tensor(view.kv_group, device=rows.device)
    products = rows @ rows.mT
    return products.new_zeros(view.groups, *products.shape[1:]).index_add(0, groups, products)


def _movable(view: LayerWeights, gram: Tensor) -> Tensor:
    """The part of a Gram matrix [g, d_k, d_k] that the layer's gauge can change."""
    blocks = inner_blocks(view)
    mask = torch.zeros_like(gram[0])
    for block in blocks.free:
        rows = torch.tensor(block, device=gram.device)
        mask[rows[:, None], rows[None, :]] = 1
    part = gram * mask
    if blocks.planes:
        even, odd = (list(side) for side in zip(*blocks.planes, strict=True))
        energy = gram[:, even, even] + gram[:, odd, odd]
        part = part + torch.diag_embed(
            torch.zeros_like(gram[:, 0]).index_add(
                1, torch.tensor(even + odd, device=gram.device), torch.cat((energy, energy), 1)
            )
        )
    return part


def _defect(one: Tensor, other: Tensor) -> Tensor:
    sizes = torch.linalg.matrix_norm(one) + torch.linalg.matrix_norm(other)
    defect: Tensor = torch.linalg.matrix_norm(one - other) / torch.where(sizes > 0, sizes, 1.0)
    return defect
