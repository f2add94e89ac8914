"""Moves of an attention layer's inner bases, and of what goes with them, on its weights.

Axes as in `attention_view`: h heads, g key/value groups, q [h, d_k, d], k [g, d_k, d_source],
v [g, d_v, d_source], o [h, d_out, d_v]. One element acts for each *group*: queries of all heads
that share a block of keys move together, by element[kv_group[i]].

Two examples. `act_on_qk(view, m)` with m [g, d_k, d_k] makes q_i → m q_i, k → m⁻ᵀ k, and biases
alike, so that B_i = q_iᵀ k stays. `rotary_element(view, planes, free)` builds such m from what
commutes with rotary positions: (a, b) on plane (e, o) is the block [[a, -b], [b, a]], a complex
number a + ib that makes q_e + i q_o → (a + ib)(q_e + i q_o).

A move does what it says whether or not it leaves the layer's function as it is: which moves do is
the business of `symmetry_group`. All moves are differentiable, in the weights and in the element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.layer_weights import LayerWeights, View
from levelhead.weights.structure import Disentangled, Latent, QKNorm, Relative, Rope, exchanged

__all__ = [
    "InnerBlocks",
    "act_on_qk",
    "act_on_vo",
    "inner_blocks",
    "permute_heads",
    "random_linear",
    "random_orthogonal",
    "rescale_qk",
    "rescale_qk_gains",
    "rescale_scores",
    "rotary_element",
    "rotate_basis",
    "shift_key_bias",
    "shift_value_bias",
]


# ── which inner dimensions move freely ──


@dataclass(frozen=True)
class InnerBlocks:
    """How the d_k inner dimensions of queries and keys fall into parts that do not mix.

    `planes`: the pairs (e_f, o_f) that rotary positions turn. `free`: sets of dimensions on which
    any invertible map commutes with what the layer does between q and k.
    """

    planes: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, ...], ...]


def inner_blocks(view: LayerWeights) -> InnerBlocks:
    """The planes that turn, and the sets of dimensions that do not.

    Planes of frequency zero count as free. Rows of keys that a latent norm divides do not mix
    with those that it leaves alone.

    >>> view = LayerWeights(q=torch.ones(1, 6, 2), k=torch.ones(1, 6, 2), v=torch.ones(1, 1, 2),
    ...                     o=torch.ones(1, 2, 1), position=Rope("half", 4, 100.0))
    >>> inner_blocks(view)
    InnerBlocks(planes=((0, 2), (1, 3)), free=((4, 5),))
    """
    planes: tuple[tuple[int, int], ...] = ()
    if isinstance(view.position, Rope):
        turning = zip(view.position.planes, view.position.frequencies, strict=True)
        planes = tuple(plane for plane, theta in turning if theta != 0)
    turned = {a for plane in planes for a in plane}
    rest = [a for a in range(view.d_k) if a not in turned]
    if isinstance(view.latent, Latent):
        first, count = view.latent.plain
        plain = set(range(view.d_k)[first:][:count])
        parts = [[a for a in rest if a in plain], [a for a in rest if a not in plain]]
    else:
        parts = [rest]
    return InnerBlocks(planes, tuple(tuple(part) for part in parts if part))


# ── elements ──


def random_linear(
    count: int, n: int, generator: torch.Generator, condition: float = 10.0
) -> Tensor:
    """Invertible matrices [count, n, n] of exactly this condition number, float64 on the CPU.

    Singular values run from √condition down to 1/√condition in equal ratios, between two random
    orthogonal matrices. For n = 1: a random sign times a number between those bounds. Raises
    InputError for a condition below 1.

    >>> m = random_linear(1, 3, torch.Generator().manual_seed(0), condition=100.0)
    >>> round(float(torch.linalg.cond(m[0])), 6)
    100.0
    """
    if condition < 1:
        raise InputError(f"condition {condition} was given; a condition number is at least 1")
    bound = 0.5 * math.log(condition)
    if n == 1:
        signs = torch.randint(2, (count, 1, 1), generator=generator).double() * 2 - 1
        exponents = torch.rand((count, 1, 1), generator=generator, dtype=torch.float64) * 2 - 1
        return signs * (bound * exponents).exp()
    values = torch.linspace(bound, -bound, n, dtype=torch.float64).exp()
    left = random_orthogonal(count, n, generator)
    return (left * values) @ random_orthogonal(count, n, generator)


def random_orthogonal(count: int, n: int, generator: torch.Generator) -> Tensor:
    """Orthogonal matrices [count, n, n], uniform over O(n), float64 on the CPU.

    Source: Mezzadri, Notices of the AMS 54 (2007) 592 (QR of normal numbers, signs of R undone).
    """
    normal = torch.randn((count, n, n), generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return torch.as_tensor(q * signs[:, None, :])


def rotary_element(view: LayerWeights, planes: Tensor, free: Sequence[Tensor]) -> Tensor:
    """Element [g, d_k, d_k] from numbers (a, b) [g, planes, 2] and maps of each free block.

    `free` holds [g, m, m] for every block of m free dimensions, in the order of `inner_blocks`.
    """
    blocks = inner_blocks(view)
    out = view.q.new_zeros(view.groups, view.d_k, view.d_k)
    if blocks.planes:
        even, odd = (list(side) for side in zip(*blocks.planes, strict=True))
        a, b = planes.to(out).unbind(-1)
        out[:, even, even], out[:, odd, odd] = a, a
        out[:, even, odd], out[:, odd, even] = -b, b
    for block, matrix in zip(blocks.free, free, strict=True):
        rows = torch.tensor(block, device=out.device)
        out[:, rows[:, None], rows[None, :]] = matrix.to(out)
    return out


# ── moves of the inner bases ──


def act_on_qk(view: View, element: Tensor) -> View:
    """q_i → m q_i and k → m⁻ᵀ k for m = element[kv_group[i]], element [g, d_k, d_k].

    Biases, the shifts of a norm of queries and keys, and the projections of disentangled positions
    move along. Raises InputError for another shape, or if a shift that all groups share would have
    to move in several ways.

    >>> view = LayerWeights(q=torch.ones(1, 1, 2), k=torch.ones(1, 1, 2), v=torch.ones(1, 1, 2),
    ...                     o=torch.ones(1, 2, 1))
    >>> moved = act_on_qk(view, torch.tensor([[[2.0]]]))
    >>> moved.q, moved.k
    (tensor([[[2., 2.]]]), tensor([[[0.5000, 0.5000]]]))
    """
    forth = _element(view, element, view.d_k)
    back = torch.linalg.inv(forth).mT
    return carry_qk(view, forth, back, q=_by_head(view, forth) @ view.q, k=back @ view.k)


def carry_qk(view: View, forth: Tensor, back: Tensor, *, q: Tensor, k: Tensor) -> View:
    """The view with new q and k, and all that goes with them moved by `forth` and `back`."""
    heads = _by_head(view, forth)
    changes: dict[str, Any] = {"q": q, "k": k}
    changes["q_bias"] = _times(heads, view.q_bias)
    changes["k_bias"] = _times(back, view.k_bias)
    position = view.position
    if isinstance(position, Disentangled):
        backs = _by_head(view, back)
        changes["position"] = replace(
            position,
            query=None if position.query is None else heads @ position.query,
            key=None if position.key is None else backs @ position.key,
            query_bias=_times(heads, position.query_bias),
            key_bias=_times(backs, position.key_bias),
        )
    norm = view.qk_norm
    if norm is not None and (norm.q_shift is not None or norm.k_shift is not None):
        changes["qk_norm"] = replace(
            norm,
            q_shift=_shifted(norm.q_shift, forth, heads),
            k_shift=_shifted(norm.k_shift, back, back),
        )
    return exchanged(view, changes)


def act_on_vo(view: View, element: Tensor) -> View:
    """v → m v and o_i → o_i m⁻¹ for m = element[kv_group[i]], element [g, d_v, d_v]; v_bias too."""
    forth = _element(view, element, view.d_v)
    inverse = _by_head(view, torch.linalg.inv(forth))
    return replace(view, v=forth @ view.v, v_bias=_times(forth, view.v_bias), o=view.o @ inverse)


def rescale_qk(view: View, queries: Tensor, keys: Tensor) -> View:
    """q_i → queries[i] q_i, k_j → keys[j] k_j, biases too; queries [h], keys [g].

    Leaves the function alone where queries and keys are normed (up to the norm's eps).
    """
    a, b = queries.to(view.q), keys.to(view.q)
    return replace(
        view,
        q=view.q * a[:, None, None],
        k=view.k * b[:, None, None],
        q_bias=None if view.q_bias is None else view.q_bias * a[:, None],
        k_bias=None if view.k_bias is None else view.k_bias * b[:, None],
    )


def rescale_qk_gains(view: View, factor: Tensor) -> View:
    """γ_q → factor·γ_q, γ_k → γ_k/factor, shifts alike; factor [d_k], or [g, d_k] per group.

    Raises InputError without gains on both sides, or if per-group factors meet shared gains.
    """
    norm = view.qk_norm
    if norm is None or norm.q_gain is None or norm.k_gain is None:
        raise InputError(f"{view.name}: queries and keys have no gains on both sides to exchange")
    factor = factor.to(view.q)
    tensors = {n: getattr(norm, n) for n in ("q_gain", "q_shift", "k_gain", "k_shift")}
    changed = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        own = factor if name[0] == "q" else 1 / factor
        if factor.ndim == 2:
            if tensor.ndim == 1:
                raise InputError(f"{view.name}: factors per group were given for a shared {name}")
            own = own[list(view.kv_group)] if name[0] == "q" else own
        changed[name] = tensor * own
    return replace(view, qk_norm=exchanged(norm, changed))


def rescale_scores(view: View, factor: Tensor) -> View:
    """B_i → factor[i] B_i and M_i → M_i/factor[i], factor [h] positive; for linear weighting.

    The factor goes into q alone, or where k is the same parameter into both by its root.
    """
    factor = factor.to(view.q)
    if view.tied:
        root = factor.sqrt()
        scaled = rescale_qk(view, root, root)
    else:
        scaled = rescale_qk(view, factor, torch.ones_like(view.k[:, 0, 0]))
    return replace(scaled, o=view.o / factor[:, None, None])


# ── permutations, biases, outer basis ──


def permute_heads(view: View, order: Sequence[int]) -> View:
    """Head i of the result is head order[i] of the view, with all that belongs to it.

    Whole groups may change places and heads within a group; `kv_group` stays. Raises InputError if
    `order` is no permutation or tears a group apart.
    """
    order = [int(i) for i in order]
    if sorted(order) != list(range(view.heads)):
        raise InputError(f"{order} was given; expected a permutation of {view.heads} heads")
    sources = [
        {view.kv_group[order[i]] for i in view.members(block)} for block in range(view.groups)
    ]
    if any(len(source) > 1 for source in sources):
        raise InputError(
            f"{view.name}: {order} gives one key/value block to heads of different groups; "
            "permute heads within groups, and whole groups"
        )
    blocks = [source.pop() for source in sources]
    changes: dict[str, Any] = {"q": view.q[order], "o": view.o[order]}
    changes |= {"k": view.k[blocks], "v": view.v[blocks]}
    for name, index in (("q_bias", order), ("k_bias", blocks), ("v_bias", blocks)):
        tensor = getattr(view, name)
        changes[name] = None if tensor is None else tensor[index]
    position = view.position
    if isinstance(position, Relative):
        changes["position"] = replace(position, table=position.table[order])
    elif isinstance(position, Disentangled):
        names = ("query", "key", "query_bias", "key_bias")
        given = {n: t for n in names if (t := getattr(position, n)) is not None}
        changes["position"] = exchanged(position, {n: t[order] for n, t in given.items()})
    elif position.tag == "alibi":
        slopes = tuple(position.slopes[i] for i in order)
        changes["position"] = replace(position, slopes=slopes)
    if view.qk_norm is not None:
        changes["qk_norm"] = _permuted_norm(view.qk_norm, order, blocks)
    return exchanged(view, changes)


def rotate_basis(
    view: View, inputs: Tensor, source: Tensor | None = None, output: Tensor | None = None
) -> View:
    """The same layer in another orthonormal basis: x → inputs x, and what it writes → output y.

    `inputs` [d, d], `source` [d_source, d_source] (by default `inputs`, and not for
    cross-attention), `output` [d_out, d_out] (by default `inputs` if the widths agree). A basis of
    the residual stream moves in the whole model at once: the input must be moved too. Raises
    InputError where the norm in front has a gain or bias that is not folded.
    """
    if view.input_norm.gain is not None or view.input_norm.bias is not None:
        raise InputError(
            f"{view.name}: the input norm's gain and bias belong to the old basis: fold them first"
        )
    if source is None and not view.cross:
        source = inputs
    if output is None and view.d_out == view.d:
        output = inputs
    r = inputs.to(view.q)
    changes: dict[str, Any] = {"q": view.q @ r.mT}
    if source is not None:
        s = source.to(view.q)
        changes |= {"k": view.k @ s.mT, "v": view.v @ s.mT}
    if output is not None:
        w = output.to(view.q)
        changes["o"] = w @ view.o
        changes["o_bias"] = None if view.o_bias is None else w @ view.o_bias
    if view.latent is not None:
        changes["latent"] = replace(
            view.latent,
            source=view.latent.source if source is None else view.latent.source @ s.mT,
            query=None if view.latent.query is None else view.latent.query @ r.mT,
        )
    return exchanged(view, changes)


def shift_key_bias(view: View, shift: Tensor) -> View:
    """k_bias → k_bias + shift, shift [g, d_k]; void where softmax sees it as a term of a query."""
    if view.k_bias is None:
        raise InputError(f"{view.name}: there is no k_bias to shift")
    return replace(view, k_bias=view.k_bias + shift.to(view.q))


def shift_value_bias(view: View, shift: Tensor) -> View:
    """v_bias → v_bias + shift, o_bias → o_bias - Σ_i o_i shift_{g(i)}; shift [g, d_v].

    Leaves the function alone where the rows of attention sum to one.
    """
    if view.v_bias is None or view.o_bias is None:
        raise InputError(f"{view.name}: v_bias and o_bias are both needed for a shift")
    shift = shift.to(view.q)
    written = torch.einsum("hmv,hv->m", view.o, _by_head(view, shift))
    return replace(view, v_bias=view.v_bias + shift, o_bias=view.o_bias - written)


# ── private ──


def _element(view: LayerWeights, element: Tensor, width: int) -> Tensor:
    expected = (view.groups, width, width)
    if tuple(element.shape) != expected:
        raise InputError(
            f"{view.name}: an element {list(element.shape)} was given; expected one matrix for "
            f"each key/value group, {list(expected)}"
        )
    return element.to(view.q)


def _by_head(view: LayerWeights, blocks: Tensor) -> Tensor:
    """Blocks of groups [g, …] repeated for their heads [h, …]."""
    if view.kv_group == tuple(range(view.groups)):
        return blocks
    return blocks[list(view.kv_group)]


def _times(matrices: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else (matrices @ bias[..., None])[..., 0]


def _shifted(shift: Tensor | None, blocks: Tensor, own: Tensor) -> Tensor | None:
    """A shift behind the norm: per head (or group) moved by its own matrix, or all alike."""
    if shift is None or shift.ndim == 2:
        return _times(own, shift)
    if not torch.equal(blocks, blocks[:1].expand_as(blocks)):
        raise InputError(
            "queries and keys have a shift that all groups share: only an element that is the "
            "same for all groups can move it"
        )
    return blocks[0] @ shift


def _permuted_norm(norm: QKNorm, order: list[int], blocks: list[int]) -> QKNorm:
    rows = {"q_gain": order, "q_shift": order, "k_gain": blocks, "k_shift": blocks}
    given = {n: t for n in rows if (t := getattr(norm, n)) is not None and t.ndim == 2}
    return exchanged(norm, {n: t[rows[n]] for n, t in given.items()})
