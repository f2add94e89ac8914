"""Parts of a layer that can be put into its weights, so that spectra speak of its function.

Axes as in `attention_view`. Two examples. A norm that multiplies by γ before q reads x is q diag(γ)
behind the norm without gain. A bias of values adds the same vector to every output of softmax
attention, for the rows of attention sum to one: it belongs into o_bias.

LayerNorm is RMSNorm of centred tokens, LN(x) = RMS(P x) with P = I - 11ᵀ/d: what it makes has
P x = x, so that W and W P are the same to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.gauge import inner_blocks
from levelhead.weights.layer_weights import LayerWeights, View
from levelhead.weights.structure import Disentangled, exchanged

__all__ = [
    "centre_output",
    "drop_key_bias",
    "fold_input_norm",
    "fold_value_bias",
    "folded",
    "void_key_dimensions",
]


def folded(view: View) -> View:
    """Everything that can be folded: the input norm, the bias of values, void biases of keys.

    What spectra and symmetries should be computed on. The result reads the norm's output without
    gain and bias, and computes the same function.
    """
    view = fold_input_norm(view)
    if view.weighting == "softmax" and view.latent is None:
        view = fold_value_bias(view)
    return drop_key_bias(view)


def fold_input_norm(view: View) -> View:
    """W → W diag(γ), b → b + W β, and for LayerNorm also W → W P; the norm is left without affine.

    q, k and v are folded (q alone in cross-attention, where k and v read another sequence). A norm
    that stands behind the previous block ("post") is folded alike: the weights then belong to the
    normed token, no longer to the residual stream. Raises InputError for β between low-rank norms.

    >>> from levelhead.weights.structure import InputNorm
    >>> one = torch.ones(1, 1, 2)
    >>> view = LayerWeights(q=one, k=one, v=one, o=one.mT,
    ...                     input_norm=InputNorm("rms", torch.tensor([2.0, 3.0])))
    >>> fold_input_norm(view).q
    tensor([[[2., 3.]]])
    """
    norm = view.input_norm
    if norm.kind == "none":
        return view
    names = ("q",) if view.cross else ("q", "k", "v")
    if norm.bias is not None and view.latent is not None:
        raise InputError(
            f"{view.name}: a bias cannot be folded through low-rank projections' norms"
        )
    changes: dict[str, Any] = {"input_norm": replace(norm, gain=None, bias=None)}
    for name in names:
        weight = getattr(view, name)
        if norm.bias is not None:
            added = weight @ norm.bias.to(weight)
            before = getattr(view, f"{name}_bias")
            changes[f"{name}_bias"] = added if before is None else before + added
        changes[name] = _read(weight, norm.gain, norm.kind == "layer")
    if view.latent is not None:
        changes["latent"] = exchanged(
            view.latent,
            {
                n: _read(t, norm.gain, norm.kind == "layer")
                for n in ("query", *(() if view.cross else ("source",)))
                if (t := getattr(view.latent, n)) is not None
            },
        )
    if isinstance(view.position, Disentangled):
        changes["position"] = replace(view.position, shared=False)
    return exchanged(view, changes)


def fold_value_bias(view: View) -> View:
    """(v_bias, o_bias) → (none, o_bias + Σ_i o_i v_bias_{g(i)}).

    Raises InputError unless rows of attention sum to one.
    """
    if view.v_bias is None:
        return view
    if view.weighting != "softmax":
        raise InputError(
            f"{view.name}: rows of {view.weighting} attention do not sum to one, so its v_bias is "
            "no constant of the output"
        )
    written = torch.einsum("hmv,hv->m", view.o, view.v_bias[list(view.kv_group)])
    output = written if view.o_bias is None else view.o_bias + written
    return replace(view, v_bias=None, o_bias=output)


def drop_key_bias(view: View) -> View:
    """k_bias without the dimensions in which it is void; none at all if that is everywhere."""
    void = void_key_dimensions(view)
    if view.k_bias is None or isinstance(void, str):
        return view
    if len(void) == view.d_k:
        return replace(view, k_bias=None)
    kept = torch.ones_like(view.k_bias)
    kept[:, list(void)] = 0
    return replace(view, k_bias=view.k_bias * kept)


def void_key_dimensions(view: LayerWeights) -> tuple[int, ...] | str:
    """The inner dimensions in which a bias of keys changes nothing, or the reason why none is.

    q·k_bias is the same for all keys of a query, and softmax does not see it; not so under rotary
    positions (in the dimensions that turn), norms of keys, soft caps, or without softmax.
    """
    if view.weighting != "softmax":
        return "without softmax a bias of keys shifts the scores of a query, which counts"
    if view.qk_norm is not None:
        return "a bias of keys lies inside their norm"
    if view.soft_cap is not None:
        return "a soft cap bends logits after the bias of keys is added"
    if view.latent is not None:
        return "keys are divided by a norm of their own token"
    if isinstance(view.position, Disentangled) and view.position.query is not None:
        return "keys also meet the positions, at different distances"
    free = tuple(a for block in inner_blocks(view).free for a in block)
    return free or "rotary positions turn every dimension of the bias of keys"


def centre_output(view: View) -> View:
    """o → P o, o_bias → P o_bias with P = I - 11ᵀ/d_out: what a LayerNorm behind it still sees."""
    o = view.o - view.o.mean(1, keepdim=True)
    bias = view.o_bias
    return replace(view, o=o, o_bias=None if bias is None else bias - bias.mean())


def _read(weight: Tensor, gain: Tensor | None, centre: bool) -> Tensor:
    out = weight if gain is None else weight * gain.to(weight)
    return out - out.mean(-1, keepdim=True) if centre else out
