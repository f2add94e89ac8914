"""Moves of queries and keys: for each one, a generator for a view or why it has none.

Axes as in `attention_view`; h heads in g key/value groups. Without norms: GL(d_k) for each group,
or what commutes with rotary positions. With norms: rotations or signs, scales, gains and means.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from levelhead.weights.gauge import (
    act_on_qk,
    inner_blocks,
    random_linear,
    random_orthogonal,
    rescale_qk,
    rescale_qk_gains,
    rotary_element,
)
from levelhead.weights.generator import (
    Generator,
    Moved,
    near_identity,
    near_rotations,
    no_planes,
    normal_numbers,
    pair_fibre,
    random_complex,
    random_rotation,
    random_scales,
    rotation_dimension,
)
from levelhead.weights.layer_weights import LayerWeights, View
from levelhead.weights.structure import Disentangled, QKNorm, Rope

__all__ = [
    "notes",
    "qk_gain",
    "qk_gauge",
    "qk_mean",
    "qk_rotation",
    "qk_scale",
    "qk_sign",
    "rotary_gauge",
    "rotary_phase",
]


def notes(view: LayerWeights) -> tuple[str, ...]:
    """Where the layer's group is larger than its generators make it."""
    found = []
    if isinstance(view.position, Rope):
        turning = [f for f in view.position.frequencies if f != 0]
        if len(set(turning)) < len(turning):
            found.append("some rotary frequencies coincide: their planes also mix, GL(m, C)")
    if view.weighting != "softmax" and view.heads > 1:
        found.append("heads that are nearly of full rank also mix with one another")
    return tuple(found)


# ── what a layer's queries and keys allow ──


def _unnormed(view: LayerWeights) -> str | None:
    if view.qk_norm is not None:
        return "queries and keys are normed"
    return None


def _gained(norm: QKNorm) -> bool:
    return norm.q_gain is not None or norm.k_gain is not None


def _common(view: LayerWeights) -> bool:
    """Whether all groups must move alike: a shift behind the norm that all of them share."""
    norm = view.qk_norm
    shifts = () if norm is None else (norm.q_shift, norm.k_shift)
    return any(s is not None and s.ndim == 1 for s in shifts) and view.groups > 1


def _turning(view: LayerWeights) -> bool:
    return bool(inner_blocks(view).planes)


def _blocks_of_size(view: LayerWeights) -> tuple[int, list[int]]:
    blocks = inner_blocks(view)
    return len(blocks.planes), [len(block) for block in blocks.free]


def _qk_fields(view: LayerWeights) -> frozenset[str]:
    names = {"q", "k", "q_bias", "k_bias"}
    if isinstance(view.position, Disentangled):
        names.add("position")
    if view.qk_norm is not None:
        names.add("qk_norm")
    return frozenset(names)


# ── linear maps of queries and keys ──


def qk_gauge(view: LayerWeights) -> Generator | str:
    """GL(d_k) for each group (for each block that does not mix with others)."""
    if (reason := _unnormed(view)) is not None:
        return reason
    if _turning(view):
        return "rotary positions commute with less: see rotary_gauge"
    if view.tied:
        return "queries and keys are one parameter: see qk_rotation"
    sizes = _blocks_of_size(view)[1]
    g = view.groups
    rows = [view.d * len(view.members(j)) for j in range(g)]
    fibre = sum(pair_fibre(n, left, view.d_source) for n in sizes for left in rows)

    def near(view: View, x: Tensor) -> Moved[View]:
        return Moved(
            act_on_qk(view, rotary_element(view, no_planes(view), near_identity(x, g, sizes)))
        )

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        free = [random_linear(g, n, random, condition) for n in sizes]
        return Moved(act_on_qk(view, rotary_element(view, no_planes(view), free)))

    return Generator(
        "qk_gauge",
        "gauge",
        "GL(d_k) for each group: q_i → m q_i, k → m⁻ᵀ k",
        g * sum(n * n for n in sizes),
        _qk_fields(view),
        draw,
        near,
        fibre,
    )


def rotary_gauge(view: LayerWeights) -> Generator | str:
    """A complex number for each plane of each group, and GL of what does not turn."""
    if (reason := _unnormed(view)) is not None:
        return reason
    if not _turning(view):
        return "there are no rotary positions"
    if view.tied:
        return "queries and keys are one parameter: see rotary_phase"
    g, (planes, sizes) = view.groups, _blocks_of_size(view)
    count = 2 * g * planes

    def near(view: View, x: Tensor) -> Moved[View]:
        numbers = x[:count].reshape(g, planes, 2) + x.new_tensor([1.0, 0.0])
        return Moved(
            act_on_qk(view, rotary_element(view, numbers, near_identity(x[count:], g, sizes)))
        )

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        numbers = random_complex(g, planes, random, condition)
        free = [random_linear(g, n, random, condition) for n in sizes]
        return Moved(act_on_qk(view, rotary_element(view, numbers, free)))

    return Generator(
        "rotary_gauge",
        "gauge",
        "a complex number for each rotary plane of each group: q_f → z q_f, k_f → k_f / z̄",
        count + g * sum(n * n for n in sizes),
        _qk_fields(view),
        draw,
        near,
    )


def qk_rotation(view: LayerWeights) -> Generator | str:
    """O(d_k) for each group: what norms without gains, or one parameter for q and k, leave."""
    norm = view.qk_norm
    if norm is None and not view.tied:
        return "queries and keys are free of norms: see qk_gauge"
    if norm is not None and _gained(norm):
        return "gains of the norm fix the channels: see qk_sign"
    if _turning(view):
        return "rotary positions commute with less: see rotary_phase"
    centred = norm is not None and norm.kind == "layer"
    sizes = _blocks_of_size(view)[1]
    copies = 1 if _common(view) else view.groups

    def element(view: View, blocks: list[Tensor]) -> Tensor:
        blocks = [b.expand(view.groups, -1, -1) for b in blocks]
        return rotary_element(view, no_planes(view), blocks)

    def near(view: View, x: Tensor) -> Moved[View]:
        return Moved(act_on_qk(view, element(view, near_rotations(x, copies, sizes, centred))))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        blocks = [random_rotation(copies, n, random, centred) for n in sizes]
        return Moved(act_on_qk(view, element(view, blocks)))

    dimension = copies * sum(rotation_dimension(n, centred) for n in sizes)
    fixing = ", fixing the vector of ones" if centred else ""
    return Generator(
        "qk_rotation",
        "gauge",
        f"O(d_k) for each group{fixing}: q_i → r q_i, k → r k",
        dimension,
        _qk_fields(view),
        draw,
        near if dimension else None,
    )


def rotary_phase(view: LayerWeights) -> Generator | str:
    """A phase for each rotary plane: what norms without gains, or one parameter, leave of it."""
    norm = view.qk_norm
    if norm is None and not view.tied:
        return "queries and keys are free of norms: see rotary_gauge"
    if not _turning(view):
        return "there are no rotary positions"
    if norm is not None and _gained(norm):
        return "gains of the norm fix the channels: see qk_sign"
    if norm is not None and (norm.kind == "layer" or _common(view)):
        return "the norm centres queries and keys, or shifts them alike: see qk_sign"
    g, (planes, sizes) = view.groups, _blocks_of_size(view)
    count = g * planes

    def near(view: View, x: Tensor) -> Moved[View]:
        phase = x[:count].reshape(g, planes)
        numbers = torch.stack((torch.ones_like(phase), phase), -1)
        free = near_rotations(x[count:], g, sizes, False)
        return Moved(act_on_qk(view, rotary_element(view, numbers, free)))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        numbers = random_complex(g, planes, random, 1.0)
        free = [random_orthogonal(g, n, random) for n in sizes]
        return Moved(act_on_qk(view, rotary_element(view, numbers, free)))

    return Generator(
        "rotary_phase",
        "gauge",
        "a phase for each rotary plane of each group: q_f → e^{iφ} q_f, k_f → e^{iφ} k_f",
        count + g * sum(rotation_dimension(n, False) for n in sizes),
        _qk_fields(view),
        draw,
        near,
    )


def qk_sign(view: LayerWeights) -> Generator | str:
    """Signs of channels: what gains of a norm of queries and keys leave."""
    norm = view.qk_norm
    if norm is None:
        return "queries and keys are free of norms"
    turning = _turning(view)
    if not _gained(norm) and not (turning and (norm.kind == "layer" or _common(view))):
        return "the norm has no gains: rotations contain the signs"
    one = norm.kind == "layer"
    copies = 1 if _common(view) or (one and norm.over == "all") else view.groups
    blocks = inner_blocks(view)
    runs: list[tuple[int, ...]] = [tuple(range(view.d_k))]
    if not one:
        runs = [*blocks.planes, *((a,) for block in blocks.free for a in block)]

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        drawn = torch.randint(2, (copies, len(runs)), generator=random).double() * 2 - 1
        signs = torch.ones(copies, view.d_k, dtype=torch.float64)
        for run, column in zip(runs, drawn.unbind(1), strict=True):
            signs[:, list(run)] = column[:, None]
        return Moved(act_on_qk(view, torch.diag_embed(signs.expand(view.groups, -1))))

    where = "all channels together" if one else "each rotary plane" if turning else "each channel"
    return Generator(
        "qk_sign",
        "gauge",
        f"a sign for {where} of {'all groups' if copies == 1 else 'each group'}",
        0,
        _qk_fields(view),
        draw,
    )


# ── scales, gains and means of normed queries and keys ──


def qk_scale(view: LayerWeights) -> Generator | str:
    """A positive scale for the queries of each head and the keys of each group."""
    norm = view.qk_norm
    if norm is None:
        return "queries and keys are not normed: their scale is the logits'"
    together = norm.over == "all"
    counts = (1, 1) if together else (view.heads, view.groups)
    if view.tied:
        counts = (counts[0], 0)

    def scaled(view: View, factors: Tensor) -> Moved[View]:
        queries = factors[: counts[0]]
        keys = queries if view.tied else factors[counts[0] :]
        return Moved(rescale_qk(view, queries.expand(view.heads), keys.expand(view.groups)))

    def near(view: View, x: Tensor) -> Moved[View]:
        return scaled(view, 1 + x)

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return scaled(view, random_scales(sum(counts), random, condition))

    return Generator(
        "qk_scale",
        "gauge",
        "positive scales of the queries of each head and the keys of each group, before their "
        "norms (up to the norms' eps)",
        sum(counts),
        frozenset({"q", "k", "q_bias", "k_bias"}),
        draw,
        near,
    )


def qk_gain(view: LayerWeights) -> Generator | str:
    """(γ_q, γ_k) → (c γ_q, γ_k/c), channel by channel."""
    norm = view.qk_norm
    if norm is None or norm.q_gain is None or norm.k_gain is None:
        return "queries and keys have no gains on both sides"
    tensors = (norm.q_gain, norm.k_gain, norm.q_shift, norm.k_shift)
    shared = any(t is not None and t.ndim == 1 for t in tensors)
    copies = 1 if shared else view.groups
    blocks = inner_blocks(view)
    runs: list[tuple[int, ...]] = [(a,) for a in range(view.d_k)]
    if not norm.after_rope:
        runs = [*blocks.planes, *((a,) for block in blocks.free for a in block)]

    def scaled(view: View, factors: Tensor) -> Moved[View]:
        where = torch.zeros(len(runs), view.d_k, dtype=factors.dtype)
        for row, run in zip(where, runs, strict=True):
            row[list(run)] = 1
        spread = factors.reshape(copies, len(runs)) @ where.to(factors.device)
        return Moved(rescale_qk_gains(view, spread[0] if shared else spread))

    def near(view: View, x: Tensor) -> Moved[View]:
        return scaled(view, 1 + x)

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return scaled(view, random_scales(copies * len(runs), random, condition))

    where = "plane" if blocks.planes and not norm.after_rope else "channel"
    return Generator(
        "qk_gain",
        "gauge",
        f"gains of queries against gains of keys: (γ_q, γ_k) → (c γ_q, γ_k/c), c for each {where}",
        copies * len(runs),
        frozenset({"qk_norm"}),
        draw,
        near,
    )


def qk_mean(view: LayerWeights) -> Generator | str:
    """q_i → q_i + 1 uᵀ where a LayerNorm of queries and keys takes the mean away."""
    norm = view.qk_norm
    if norm is None or norm.kind != "layer":
        return "no norm takes the mean of queries and keys away"
    if norm.after_rope and _turning(view):
        return "queries and keys turn before their mean is taken away"
    together = norm.over == "all"
    heads, groups = (1, 1) if together else (view.heads, view.groups)
    sizes = [(heads, view.d), (heads, 1 if view.q_bias is not None else 0)]
    if not view.tied:
        sizes += [(groups, view.d_source), (groups, 1 if view.k_bias is not None else 0)]
    count = sum(n * m for n, m in sizes)

    def shifted(view: View, x: Tensor) -> Moved[View]:
        parts = [
            p.reshape(s)
            for p, s in zip(torch.split(x, [n * m for n, m in sizes]), sizes, strict=True)
        ]
        parts = [*parts, *parts] if view.tied else parts
        q, q_bias, k, k_bias = (p.to(view.q) for p in parts)
        return Moved(
            replace(
                view,
                q=view.q + q[:, None, :],
                k=view.k + k[:, None, :],
                q_bias=None if view.q_bias is None else view.q_bias + q_bias,
                k_bias=None if view.k_bias is None else view.k_bias + k_bias,
            )
        )

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return shifted(view, normal_numbers(view.q, count, random))

    return Generator(
        "qk_mean",
        "gauge",
        "q_i → q_i + 1 uᵀ and k likewise: their norm takes the mean over channels away",
        count,
        frozenset({"q", "k", "q_bias", "k_bias"}),
        draw,
        shifted,
    )
