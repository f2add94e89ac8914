"""Moves of values, biases, heads and the outer basis: a generator for a view, or why it has none.

Axes as in `attention_view`; h heads in g key/value groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from levelhead.weights.folding import void_key_dimensions
from levelhead.weights.gauge import (
    act_on_vo,
    permute_heads,
    random_linear,
    rescale_scores,
    rotate_basis,
    shift_key_bias,
    shift_value_bias,
)
from levelhead.weights.generator import (
    Generator,
    Moved,
    near_identity,
    near_rotations,
    normal_numbers,
    pair_fibre,
    random_rotation,
    random_scales,
    rotation_dimension,
)
from levelhead.weights.layer_weights import LayerWeights, View
from levelhead.weights.structure import Alibi, NoPosition, Rope

__all__ = [
    "basis_rotation",
    "head_permutation",
    "input_gain",
    "input_mean",
    "key_bias",
    "score_scale",
    "value_bias",
    "vo_gauge",
]

_CENTRED = 1e-6  # |W n| below this share of |W||n| is what float32 leaves of a removed mean

# ── values and biases ──


def vo_gauge(view: LayerWeights) -> Generator | str:
    """GL(d_v) for each group."""
    g, n = view.groups, view.d_v
    rows = [view.d_out * len(view.members(j)) for j in range(g)]

    def near(view: View, x: Tensor) -> Moved[View]:
        return Moved(act_on_vo(view, near_identity(x, g, [n])[0]))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return Moved(act_on_vo(view, random_linear(g, n, random, condition)))

    return Generator(
        "vo_gauge",
        "gauge",
        "GL(d_v) for each group: v → m v, o_i → o_i m⁻¹",
        g * n * n,
        frozenset({"v", "o", "v_bias"}),
        draw,
        near,
        sum(pair_fibre(n, left, view.d_source) for left in rows),
    )


def key_bias(view: LayerWeights) -> Generator | str:
    """k_bias → k_bias + anything, where softmax does not see it."""
    if view.k_bias is None:
        return "there is no bias of keys"
    void = void_key_dimensions(view)
    if isinstance(void, str):
        return void
    if view.tied:
        return "queries and keys are one parameter, and so are their biases"
    dims = list(void)

    def near(view: View, x: Tensor) -> Moved[View]:
        shift = torch.zeros(view.groups, view.d_k, dtype=x.dtype, device=x.device)
        shift[:, dims] = x.reshape(view.groups, len(dims))
        return Moved(shift_key_bias(view, shift))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        assert view.k_bias is not None
        return near(view, normal_numbers(view.k_bias, view.groups * len(dims), random))

    return Generator(
        "key_bias",
        "bias",
        "a bias of keys adds the same to all logits of a query",
        view.groups * len(dims),
        frozenset({"k_bias"}),
        draw,
        near,
    )


def value_bias(view: LayerWeights) -> Generator | str:
    """v_bias against o_bias, where rows of attention sum to one."""
    if view.v_bias is None or view.o_bias is None:
        return "biases of values and of the output are not both there"
    if view.weighting != "softmax":
        return "rows of attention do not sum to one"
    if view.latent is not None:
        return "values are divided by a norm of their own token"

    def near(view: View, x: Tensor) -> Moved[View]:
        return Moved(shift_value_bias(view, x.reshape(view.groups, view.d_v)))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        assert view.v_bias is not None
        return near(view, normal_numbers(view.v_bias, view.groups * view.d_v, random))

    return Generator(
        "value_bias",
        "bias",
        "v_bias → v_bias + b, o_bias → o_bias - Σ_i o_i b",
        view.groups * view.d_v,
        frozenset({"v_bias", "o_bias"}),
        draw,
        near,
    )


def score_scale(view: LayerWeights) -> Generator | str:
    """(λ B_i, M_i/λ) where scores weigh values as they are."""
    if view.weighting != "linear":
        return "softmax does not commute with scaling"
    if view.soft_cap is not None:
        return "a soft cap does not commute with scaling"
    if view.qk_norm is not None:
        return "queries and keys are normed"
    if not isinstance(view.position, NoPosition | Rope):
        return "scores have a part that does not scale"

    def near(view: View, x: Tensor) -> Moved[View]:
        return Moved(rescale_scores(view, 1 + x))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return Moved(rescale_scores(view, random_scales(view.heads, random, condition)))

    return Generator(
        "score_scale",
        "scale",
        "scores against values: (B_i, M_i) → (λ_i B_i, M_i/λ_i)",
        view.heads,
        frozenset({"q", "k", "o", "q_bias", "k_bias"} if view.tied else {"q", "o", "q_bias"}),
        draw,
        near,
    )


# ── the norm in front ──


def input_gain(view: LayerWeights) -> Generator | str:
    """γ → c γ, W → W/c for a norm of this block whose gain is not folded."""
    norm = view.input_norm
    if norm.kind == "none" or norm.gain is None:
        return "no gain of an input norm stands before the weights"
    if norm.position != "pre":
        return "the norm's output is the residual stream, which others read"

    def scaled(view: View, factor: Tensor) -> Moved[View]:
        factor = factor.to(view.q)
        norm = view.input_norm
        assert norm.gain is not None
        changed = replace(
            norm,
            gain=norm.gain.to(factor) * factor,
            bias=None if norm.bias is None else norm.bias.to(factor) * factor,
        )
        latent = view.latent
        if latent is not None:
            latent = replace(
                latent,
                source=latent.source if view.cross else latent.source / factor,
                query=None if latent.query is None else latent.query / factor,
            )
        new = replace(view, q=view.q / factor, input_norm=changed, latent=latent)
        if not view.cross:
            new = replace(new, k=view.k / factor, v=view.v / factor)
        spread = torch.diag(factor)
        return Moved(new, inputs=spread, source=None if view.cross else spread)

    def near(view: View, x: Tensor) -> Moved[View]:
        return scaled(view, 1 + x)

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return scaled(view, random_scales(view.d, random, condition))

    read = {"q"} if view.cross else {"q", "k", "v"}
    return Generator(
        "input_gain",
        "norm",
        "the gain of the norm in front against the weights: γ → c γ, W → W/c (fold it)",
        view.d,
        frozenset(read | {"input_norm", "latent"}),
        draw,
        near,
    )


def input_mean(view: LayerWeights) -> Generator | str:
    """W → W + u (1/γ)ᵀ: LayerNorm's output has no component along 1/γ."""
    norm = view.input_norm
    if norm.kind != "layer":
        return "the norm in front, if there is one, takes no mean away"
    if norm.bias is not None:
        return "the bias of the norm in front is not folded"
    if norm.gain is not None and not bool((norm.gain != 0).all()):
        return "a gain of the norm in front is zero"
    names: tuple[str, ...] = ("q",) if view.cross else ("q", "k", "v")

    def void(view: View) -> Tensor:
        gain = view.input_norm.gain
        return torch.ones_like(view.q[0, 0]) if gain is None else 1 / gain.to(view.q)

    with torch.no_grad():
        n = void(view)
        left = [float((getattr(view, a) @ n).norm() / n.norm()) for a in names]
        sizes = [float(getattr(view, a).norm()) for a in names]
    if all(a <= _CENTRED * b for a, b in zip(left, sizes, strict=True)):
        return "the weights are centred: the mean is gone from them too"
    if view.tied:
        names = names[:1] + names[2:]
    counts = [getattr(view, name)[..., 0].numel() for name in names]

    def shifted(view: View, x: Tensor) -> Moved[View]:
        changes = {}
        for name, part in zip(names, torch.split(x, counts), strict=True):
            weight = getattr(view, name)
            added = part.reshape(weight.shape[:2]).to(weight)[..., None] * void(view)
            changes[name] = weight + added
            if view.tied and name == "q" and not view.cross:
                changes["k"] = view.k + added
        return Moved(replace(view, **changes))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return shifted(view, normal_numbers(view.q, sum(counts), random))

    return Generator(
        "input_mean",
        "norm",
        "W → W + u 1ᵀ: tokens behind LayerNorm are centred (centre the weights)",
        sum(counts),
        frozenset({"q"} if view.cross else {"q", "k", "v"}),
        draw,
        shifted,
    )


# ── permutations and the outer basis ──


def head_permutation(view: LayerWeights) -> Generator | str:
    """Heads within a group and whole groups; ALiBi only exchanges equal slopes."""
    labels: tuple[float, ...] = (0.0,) * view.heads
    if isinstance(view.position, Alibi):
        labels = view.position.slopes
    members = [view.members(j) for j in range(view.groups)]
    kinds = [tuple(sorted(labels[i] for i in group)) for group in members]
    exchangeable = len(set(kinds)) < len(kinds) or any(len(set(k)) < len(k) for k in kinds)
    if not exchangeable:
        return "there is one head" if view.heads == 1 else "no two heads can be exchanged"

    def order(random: torch.Generator) -> list[int]:
        places: list[int] = [0] * view.heads
        for kind in set(kinds):
            slots = [j for j, k in enumerate(kinds) if k == kind]
            drawn = [slots[a] for a in torch.randperm(len(slots), generator=random).tolist()]
            for slot, source in zip(slots, drawn, strict=True):
                for label in set(kind):
                    here = [i for i in members[slot] if labels[i] == label]
                    there = [i for i in members[source] if labels[i] == label]
                    mixed = torch.randperm(len(there), generator=random).tolist()
                    for i, a in zip(here, mixed, strict=True):
                        places[i] = there[a]
        return places

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        places = order(random)
        while places == list(range(view.heads)):
            places = order(random)
        groups = tuple(view.kv_group[places[m[0]]] for m in members)
        return Moved(permute_heads(view, places), heads=tuple(places), groups=groups)

    carried = frozenset({"q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "position", "qk_norm"})
    limit = "" if len(set(labels)) == 1 else " of equal slopes"
    return Generator(
        "head_permutation",
        "permutation",
        f"heads{limit} within groups, and whole groups, change places",
        0,
        carried,
        draw,
    )


def basis_rotation(view: LayerWeights) -> Generator | str:
    """O(d) of the layer's input and output; behind LayerNorm it fixes the vector of ones."""
    if view.input_norm.gain is not None or view.input_norm.bias is not None:
        return "the gain or bias of the norm in front belongs to the basis: fold it first"
    widths = [view.d]
    if view.cross:
        widths.append(view.d_source)
    if view.d_out != view.d:
        widths.append(view.d_out)
    centred = view.input_norm.kind == "layer"

    def rotated(view: View, blocks: list[Tensor]) -> Moved[View]:
        rest = [b[0].to(view.q) for b in blocks]
        inputs = rest.pop(0)
        source = rest.pop(0) if view.cross else inputs
        output = rest.pop(0) if view.d_out != view.d else inputs
        new = rotate_basis(view, inputs, source, output)
        return Moved(new, inputs=inputs, source=source, output=output)

    def near(view: View, x: Tensor) -> Moved[View]:
        return rotated(view, near_rotations(x, 1, widths, centred))

    def draw(view: View, random: torch.Generator, condition: float) -> Moved[View]:
        return rotated(view, [random_rotation(1, n, random, centred) for n in widths])

    return Generator(
        "basis_rotation",
        "basis",
        "an orthonormal change of basis of what the layer reads and writes, in the whole model",
        sum(rotation_dimension(n, centred) for n in widths),
        frozenset({"q", "k", "v", "o", "o_bias", "latent"}),
        draw,
        near,
        moves_inputs=True,
    )
