"""Rows of the table of layouts: text encoders, and models of an encoder and a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from levelhead.weights.doubts import NORM_UNKNOWN
from levelhead.weights.facts import (
    MaskOf,
    causal,
    constant_scale,
    full,
    half_causal,
    no_position,
    norm,
)
from levelhead.weights.layer import Layer, Sizes
from levelhead.weights.plan import Plan, no_kv_groups
from levelhead.weights.rope import rope
from levelhead.weights.stores import Fused, Separate
from levelhead.weights.structure import Disentangled, InputNorm, Mask, Position, Relative

__all__ = ["ENCODERS"]

_BERT = ("{stem}encoder.layer.{n}.attention",)
_NORM_BEHIND = r"(output\.)?LayerNorm\..*"
_SELF = Separate("self.query", "self.key", "self.value", "output.dense")
_QKVO = Separate("q_proj", "k_proj", "v_proj", "out_proj")


# ELECTRA's and RemBERT's maps from a narrower embedding.
_PROJECTED = (
    "{stem}embeddings_project.weight",
    "{stem}encoder.embedding_hidden_mapping_in.weight",
)


def _post(layer_norm: str, *first: str) -> Callable[[Layer], InputNorm]:
    """The previous block's last norm; in front of the first block the embedding's."""
    names = (layer_norm.replace("{n}", "{n-1}"), *first)

    def input_norm(layer: Layer) -> InputNorm:
        chosen = names[1:] if layer.number == 0 else names[:1]
        if layer.number == 0 and any(map(layer.has, _PROJECTED)):
            layer.note("input_norm", "inferred", "the embedding is projected after its norm")
            return InputNorm("none")
        return norm("layer", *chosen, position="post", eps=1e-12)(layer)

    return input_norm


# ── ESM, ModernBERT, DeBERTa, T5 ──


def _esm_position(layer: Layer, sizes: Sizes) -> Position:
    if layer.settings.get("position_embedding_type", "rotary") == "rotary":
        return rope()(layer, sizes)
    return no_position(layer, sizes)


def _modern_mask(layer: Layer) -> Mask:
    """Local layers see ±local_attention/2; every global_attn_every_n_layers-th sees all."""
    kinds = layer.settings.get("layer_types")
    every = int(layer.settings.get("global_attn_every_n_layers", 3))
    local = bool(layer.number % every)
    if isinstance(kinds, list) and layer.number < len(kinds):
        local = kinds[layer.number] == "sliding_attention"
    window = int(layer.setting("local_attention", 128, of="mask"))
    return Mask(window=window // 2) if local else Mask()


def _modern_position(layer: Layer, sizes: Sizes) -> Position:
    near = _modern_mask(layer).window is not None
    return rope(theta=160000.0, local_theta=10000.0, local=lambda _: near)(layer, sizes)


def _deberta_terms(layer: Layer, of: str) -> list[str]:
    """pos_att_type, a list or "p2c|c2p"."""
    terms = layer.setting("pos_att_type", ["c2p", "p2c"], of=of) or []
    return terms.split("|") if isinstance(terms, str) else list(terms)


def _deberta_scale(layer: Layer, sizes: Sizes) -> float:
    """1/√(d_k·(1 + number of position terms))."""
    return 1 / math.sqrt(sizes.d_k * (1 + len(_deberta_terms(layer, "scale"))))


def _deberta_position(layer: Layer, sizes: Sizes) -> Position:
    """Disentangled attention; the position embeddings belong to the encoder."""
    table = "{stem}encoder.rel_embeddings.weight"
    if not layer.has(table):
        return no_position(layer, sizes)
    terms = _deberta_terms(layer, "position")
    shared = not layer.has("self.pos_key_proj.weight") and not layer.has(
        "self.pos_query_proj.weight"
    )
    buckets = max(int(layer.settings.get("position_buckets", -1)), 0)
    embeddings = layer.read(table)
    span = buckets or embeddings.shape[0] // 2
    farthest = int(layer.settings.get("max_relative_positions", -1))
    if farthest < 1:
        farthest = int(layer.settings.get("max_position_embeddings", embeddings.shape[0] // 2))
    if layer.has("{stem}encoder.LayerNorm.weight"):
        gain, shift = (layer.read("{stem}encoder.LayerNorm." + p) for p in ("weight", "bias"))
        eps = float(layer.settings.get("layer_eps", 1e-7))
        centred = embeddings - embeddings.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        embeddings = centred / spread * gain + shift

    def projection(term: str, role: str) -> tuple[Tensor | None, Tensor | None]:
        if term not in terms:
            return None, None
        name = f"self.{role}_proj" if shared else f"self.pos_{role}_proj"
        weight, bias = layer.read(f"{name}.weight"), layer.read_if(f"{name}.bias")
        shape = (sizes.heads, sizes.d_k)
        return weight.reshape(*shape, -1), None if bias is None else bias.reshape(shape)

    (key, key_bias), (query, query_bias) = projection("c2p", "key"), projection("p2c", "query")
    return Disentangled(
        embeddings[: 2 * span], query, key, query_bias, key_bias, span, buckets, farthest, shared
    )


def _first_deberta_position(layer: Layer, sizes: Sizes) -> Position:
    """DeBERTa's first version: a table of its own size, no buckets, its own projections."""
    table = "{stem}encoder.rel_embeddings.weight"
    if not layer.has(table):
        return no_position(layer, sizes)
    embeddings = layer.read(table)
    span = embeddings.shape[0] // 2
    shape = (sizes.heads, sizes.d_k)

    def projection(name: str) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = layer.read_if(f"{name}.weight"), layer.read_if(f"{name}.bias")
        return (
            None if weight is None else weight.reshape(*shape, -1),
            None if bias is None else bias.reshape(shape),
        )

    (key, key_bias), (query, query_bias) = map(projection, ("self.pos_proj", "self.pos_q_proj"))
    layer.note("position", "read", f"stored weights {layer.path(table)}")
    return Disentangled(embeddings, query, key, query_bias, key_bias, span, 0, span, False)


def _t5_position(layer: Layer, sizes: Sizes) -> Position:
    """The stack's table, which its first layer holds (umT5: each layer its own)."""
    own = "relative_attention_bias.weight"
    for name in (own, "{stem}block.0.layer.0.SelfAttention.relative_attention_bias.weight"):
        if layer.has(name):
            farthest = layer.setting("relative_attention_max_distance", 128, of="position")
            forward = "decoder." not in layer.module
            return Relative(layer.read(name).mT, "t5", forward, int(farthest))
    return no_position(layer, sizes)


def _by_side(encoder: MaskOf, decoder: MaskOf) -> MaskOf:
    return lambda layer: decoder(layer) if "decoder" in layer.module else encoder(layer)


# ── BART's likes: self_attn and encoder_attn below numbered layers ──


def _fixed(*templates: str, post: bool = False) -> Callable[[Layer], InputNorm]:
    """A LayerNorm whose eps is PyTorch's, 1e-5."""
    position = "post" if post else "pre"
    return norm("layer", *templates, position=position, eps_setting="")  # type: ignore[arg-type]


def _bart_self_norm(layer: Layer) -> InputNorm:
    if layer.number:
        return _fixed("{stem}layers.{n-1}.final_layer_norm", post=True)(layer)
    return _fixed("{stem}layernorm_embedding", post=True)(layer)


def _opt_norm(layer: Layer) -> InputNorm:
    if layer.settings.get("do_layer_norm_before", True):
        return _fixed("{stem}layers.{n}.self_attn_layer_norm")(layer)
    return _fixed("{stem}layers.{n-1}.final_layer_norm", post=True)(layer)


def _wav2vec2_norm(layer: Layer) -> InputNorm:
    """Before the layer (do_stable_layer_norm), or the previous one's last; names do not tell."""
    stable = layer.settings.flag("do_stable_layer_norm")
    if stable is None:
        stable = layer.settings.flag("norm_first")
    if stable is None and not layer.known:
        layer.note("input_norm", "assumed", NORM_UNKNOWN)
        return InputNorm("none")
    if stable:
        return norm("layer", "{stem}layers.{n}.layer_norm")(layer)
    before = "{stem}layers.{n-1}.final_layer_norm" if layer.number else "{stem}layer_norm"
    return norm("layer", before, position="post")(layer)


_PRE = ("whisper", "mbart", "pegasus", "m2m_100", "blenderbot")
_POST = ("bart", "marian")
_STACK = ("{stem}layers.{n}.self_attn",)
_CROSS = ("{stem}layers.{n}.encoder_attn",)
_SIDES = _by_side(full, causal)

_SEQUENCE_TO_SEQUENCE = (
    Plan(
        "whisper",
        _STACK,
        _QKVO,
        _PRE,
        requires=("q_proj.bias", "{self}_layer_norm.weight"),
        forbids=("k_proj.bias",),
        mask=_SIDES,
        input_norm=_fixed("{self}_layer_norm"),
    ),
    Plan(
        "whisper",
        _CROSS,
        _QKVO,
        _PRE,
        requires=("q_proj.bias",),
        forbids=("k_proj.bias",),
        cross=True,
        input_norm=_fixed("{self}_layer_norm"),
    ),
    Plan(
        "opt",
        ("{stem}decoder.layers.{n}.self_attn",),
        _QKVO,
        ("opt",),
        requires=("{stem}decoder.layers.{n}.self_attn_layer_norm.weight",),
        forbids=("{stem}decoder.layers.{n}.encoder_attn.q_proj.weight",),
        mask=causal,
        input_norm=lambda layer: _opt_norm(_deeper(layer, "decoder.")),
    ),
    Plan(
        "bart",
        _STACK,
        _QKVO,
        _POST,
        requires=("{self}_layer_norm.weight",),
        mask=_SIDES,
        input_norm=_bart_self_norm,
    ),
    Plan(
        "bart",
        _CROSS,
        _QKVO,
        _POST,
        cross=True,
        input_norm=_fixed("{stem}layers.{n}.self_attn_layer_norm", post=True),
    ),
)


def _deeper(layer: Layer, more: str) -> Layer:
    """The layer with `more` moved from the template into the stem; the same origins."""
    matched = {**layer.matched, "stem": (layer.matched.get("stem") or "") + more}
    return replace(layer, matched=matched)


_T5 = Separate("q", "k", "v", "o")
_T5_TYPES = ("t5", "mt5", "umt5")
_T5_CLUE = (
    ("relative_attention_bias.weight", 1, "heads"),
    ("{stem}block.0.layer.0.SelfAttention.relative_attention_bias.weight", 1, "heads"),
)

ENCODERS: tuple[Plan, ...] = (
    Plan(
        "esm",
        _BERT,
        _SELF,
        ("esm",),
        requires=("LayerNorm.weight",),
        position=_esm_position,
        mask=half_causal,
        input_norm=norm("layer", "LayerNorm", eps=1e-12),
    ),
    Plan(
        "roberta_prelayernorm",
        _BERT,
        _SELF,
        ("roberta-prelayernorm",),
        requires=("LayerNorm.weight",),
        by_name=False,
        mask=half_causal,
        input_norm=norm("layer", "LayerNorm", eps=1e-12),
    ),
    Plan(
        "bert",
        _BERT,
        _SELF,
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "rembert"),
        mask=half_causal,
        others=_NORM_BEHIND,
        input_norm=_post("{stem}encoder.layer.{n}.output.LayerNorm", "{stem}embeddings.LayerNorm"),
    ),
    Plan(
        "deberta-v2",
        _BERT,
        Separate("self.query_proj", "self.key_proj", "self.value_proj", "output.dense"),
        ("deberta-v2",),
        position=_deberta_position,
        scale=_deberta_scale,
        others=_NORM_BEHIND,
        input_norm=_post("{stem}encoder.layer.{n}.output.LayerNorm", "{stem}embeddings.LayerNorm"),
    ),
    Plan(
        "deberta",
        _BERT,
        Fused("self.in_proj", "output.dense", "grouped"),
        ("deberta",),
        kv_heads=no_kv_groups,
        position=_first_deberta_position,
        scale=_deberta_scale,
        others=_NORM_BEHIND,
        input_norm=_post("{stem}encoder.layer.{n}.output.LayerNorm", "{stem}embeddings.LayerNorm"),
    ),
    Plan(
        "wav2vec2",
        ("{stem}layers.{n}.attention",),
        _QKVO,
        ("wav2vec2", "hubert"),
        requires=("{stem}layers.{n}.final_layer_norm.weight",),
        kv_heads=no_kv_groups,
        input_norm=_wav2vec2_norm,
    ),
    Plan(
        "distilbert",
        ("{stem}transformer.layer.{n}.attention",),
        Separate("q_lin", "k_lin", "v_lin", "out_lin"),
        ("distilbert",),
        input_norm=_post(
            "{stem}transformer.layer.{n}.output_layer_norm", "{stem}embeddings.LayerNorm"
        ),
    ),
    Plan(
        "albert",
        ("{stem}encoder.albert_layer_groups.{n}.albert_layers.{m}.attention",),
        Separate("query", "key", "value", "dense"),
        ("albert",),
        others=_NORM_BEHIND,
        input_norm=norm(
            "layer",
            "{stem}encoder.albert_layer_groups.{n}.albert_layers.{m}.full_layer_layer_norm",
            position="post",
            eps=1e-12,
        ),
    ),
    Plan(
        "modernbert",
        ("{stem}layers.{n}.attn",),
        Fused("Wqkv", "Wo"),
        ("modernbert",),
        position=_modern_position,
        mask=_modern_mask,
        input_norm=norm("layer", "{stem}layers.{n}.attn_norm", "{stem}embeddings.norm"),
    ),
    Plan(
        "t5",
        ("{stem}block.{n}.layer.0.SelfAttention",),
        _T5,
        _T5_TYPES,
        clues=_T5_CLUE,
        position=_t5_position,
        scale=constant_scale(1.0),
        mask=_SIDES,
        input_norm=norm("rms", "{stem}block.{n}.layer.0.layer_norm", eps_setting="layer_eps"),
    ),
    Plan(
        "t5",
        ("{stem}block.{n}.layer.1.EncDecAttention",),
        _T5,
        _T5_TYPES,
        clues=_T5_CLUE[1:],
        scale=constant_scale(1.0),
        cross=True,
        input_norm=norm("rms", "{stem}block.{n}.layer.1.layer_norm", eps_setting="layer_eps"),
    ),
    *_SEQUENCE_TO_SEQUENCE,
)
