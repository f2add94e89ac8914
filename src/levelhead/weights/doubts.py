"""What speaks against a row of the table of layouts for a model that it was not proved for.

Families share names: parameters called q_proj, k_proj, v_proj and o_proj may or may not have rotary
positions, norms without parameters, gates or sinks. A row is proved for the `model_type`s that it
lists. For others three things are done: types that are known to compute something else are refused,
settings that change attention and that the row does not read are refused, and the rest is said in
the view's origins, which `caveats` turns into sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from levelhead.weights.layer import Layer
from levelhead.weights.layer_weights import LayerWeights
from levelhead.weights.structure import NoPosition

__all__ = ["NORM_UNKNOWN", "NOT_AS_NAMED", "caveats", "note_other_model", "unmodelled"]

NORM_UNKNOWN = (
    "the norm in front is not known from the names (pre or post norm): nothing folded; give "
    "norm_first=true|false"
)

# Types whose parameters have the names of a row, but which compute something else.
NOT_AS_NAMED: Mapping[str, str] = {
    "llama4": "its chunked attention and its norms without parameters are not modelled",
    "llama4_text": "its chunked attention and its norms without parameters are not modelled",
    "bigbird_pegasus": "its norm stands before the layer, in its row behind the layer before",
    "blenderbot-small": "its decoder adds positions behind the norm that its row folds",
    "exaone4": "its layers without a window have no rotary positions, which no row reads",
    "exaone_moe": "its layers without a window have no rotary positions, which no row reads",
    "nanochat": "its queries and keys are normed without parameters, which no row reads",
    "mra": "its attention is an approximation by blocks, which no row reads",
    "nemotron": "its norm's gain is stored minus one, which no row reads",
    "nllb-moe": "its norm stands before the layer, in its row behind the layer before",
    "nomic_bert": "its norm stands behind the layer before, in its row before the layer",
    "pegasus_x": "its norm stands before the layer, in its row behind the layer before",
    "phimoe": "its names are those of a row whose rotary positions turn a quarter of a head",
    "qwen3_next": "queries are gated, which no row reads",
    "roformer": "its queries and keys are rotated, those of its row are not",
    "yoso": "its attention is an approximation by hashing, which no row reads",
}


def caveats(view: LayerWeights) -> tuple[str, ...]:
    """Sentences on what a reader of the layer's numbers must know of how it was read.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> caveats(LayerWeights(q=one, k=one, v=one, o=one))
    ()
    """
    said = [view.origins["family"].source] if "family" in view.origins else []
    norm = view.origins.get("input_norm")
    return (*said, NORM_UNKNOWN) if norm and norm.source == NORM_UNKNOWN else tuple(said)


def note_other_model(layer: Layer) -> None:
    """Note that the config names a model which the layer's row was not proved for."""
    kind = layer.settings.model_type
    if kind is not None and not layer.known:
        layer.note(
            "family",
            "assumed",
            f"model_type {kind} is not among those the row {layer.family} was proved for: read by "
            "its parameters' names alone",
        )


def unmodelled(layer: Layer, view: LayerWeights) -> str | None:
    """The setting that changes attention in a way that `view` does not show; None if there is none.

    In one clause, as the reason for which a layer is skipped.
    """
    if _one_gain_a_row(layer, view):
        return (
            "one norm over the queries of all heads, or one for each head: names do not say which"
        )
    for names, shown, what in _RISKS:
        for name in names:
            value = layer.settings.get(name)
            if _says_something(value) and not shown(layer, view, value):
                return f"the config's {name} = {_short(value)} {what}"
    return None


def _one_gain_a_row(layer: Layer, view: LayerWeights) -> bool:
    """Gains [h·d_k] in one row: such norms are over all heads (OLMo 2) as well as over each."""
    norm, gains = view.qk_norm, "q_norm.weight"
    if norm is None or norm.over == "all" or view.heads == 1 or not layer.has(gains):
        return False
    return layer.shape(gains) == (view.heads * view.d_k,)


# ── settings that change attention ──

Shown = Callable[[Layer, LayerWeights, Any], bool]


def _says_something(value: Any) -> bool:
    """Whether a setting is switched on: neither null, false, zero nor empty."""
    return value is not None and value is not False and value != 0 and value not in ("", [], {})


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _never(layer: Layer, view: LayerWeights, value: Any) -> bool:
    return False


def _turns_everywhere(layer: Layer, view: LayerWeights, value: Any) -> bool:
    """no_rope_layers: true or 1 where a layer rotates."""
    if isinstance(view.position, NoPosition):
        return True
    here = isinstance(value, list) and layer.number < len(value)
    return here and bool(value[layer.number])


def _window(layer: Layer, view: LayerWeights, value: Any) -> bool:
    """Whether the mask has the window, or the config says that this layer slides not."""
    if view.mask.window is not None or layer.settings.get("use_sliding_window") is False:
        return True
    kinds = layer.settings.get("layer_types")
    here = isinstance(kinds, list) and layer.number < len(kinds)
    return here and kinds[layer.number] == "full_attention"


def _kind(layer: Layer, view: LayerWeights, value: Any) -> bool:
    """Whether this layer's entry of layer_types is one that masks can say."""
    if not isinstance(value, list) or layer.number >= len(value):
        return False
    kind = value[layer.number]
    return kind == "full_attention" or (
        kind == "sliding_attention" and view.mask.window is not None
    )


def _scaled(layer: Layer, view: LayerWeights, value: Any) -> bool:
    return "scale" in view.origins and view.origins["scale"].how == "read"


def _alibi(layer: Layer, view: LayerWeights, value: Any) -> bool:
    return view.position.tag == "alibi"


def _is_one(layer: Layer, view: LayerWeights, value: Any) -> bool:
    return bool(value == 1)


def _interleaved(layer: Layer, view: LayerWeights, value: Any) -> bool:
    return view.position.tag != "rope" or view.position.layout == "interleaved"


# (settings, whether the view shows what they say, what they do)
_RISKS: tuple[tuple[tuple[str, ...], Shown, str], ...] = (
    (
        ("use_qk_norm", "qk_norm", "use_qk_layernorm", "qk_layernorm", "qk_ln"),
        lambda layer, view, value: view.qk_norm is not None,
        "norms queries and keys, and no gains of such a norm are stored",
    ),
    (
        ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval"),
        _turns_everywhere,
        "leaves some layers without rotary positions",
    ),
    (
        ("attention_sinks", "attention_sink", "use_sinks", "num_sink_tokens", "add_attention_sink"),
        _never,
        "adds attention sinks, which no row reads",
    ),
    (
        ("attn_output_gate", "use_output_gate", "gated_attention", "use_gated_attention"),
        _never,
        "gates what heads write, which no row reads",
    ),
    (("attention_chunk_size", "index_topk"), _never, "restricts which keys a token sees"),
    (("attn_temperature_tuning",), _never, "scales logits by the token's place"),
    (("clip_qkv",), _never, "clips queries, keys and values"),
    (
        ("attn_logit_softcapping", "attn_logit_soft_cap", "attention_logit_cap"),
        lambda layer, view, value: view.soft_cap is not None,
        "caps logits",
    ),
    (
        ("query_pre_attn_scalar", "attention_multiplier", "attention_scale", "softmax_scale"),
        _scaled,
        "is another scale of logits",
    ),
    (
        ("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
        _is_one,
        "multiplies what the layer reads or writes",
    ),
    (("alibi", "use_alibi"), _alibi, "adds ALiBi's biases"),
    (("rope_interleave", "rope_interleaved"), _interleaved, "rotates neighbouring dimensions"),
    (("layer_types",), _kind, "makes this layer another than the row's"),
    (("sliding_window",), _window, "limits how far back a token sees"),
)
