"""Rows of the table of layouts: decoders (causal language models)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from levelhead.weights.facts import (
    alibi_position,
    alibi_slopes,
    causal,
    layer_mask,
    norm,
    qk_norm,
    scalar_scale,
    scale_by_d_k,
    soft_cap,
)
from levelhead.weights.layer import Layer, Sizes
from levelhead.weights.plan import Plan, kv_setting, no_kv_groups
from levelhead.weights.rope import rope
from levelhead.weights.stores import Fused, Separate
from levelhead.weights.structure import Alibi, Mask, NoPosition, Position

__all__ = ["DECODERS"]

_LAYERS = ("{stem}layers.{n}.self_attn",)
_H = ("{stem}h.{n}.attn",)
_QKVO = Separate("q_proj", "k_proj", "v_proj", "o_proj")
_RMS = norm("rms", "{stem}layers.{n}.input_layernorm")
_RMS_ONE = norm("rms", "{stem}layers.{n}.input_layernorm", plus_one=True)
_LAYER = norm("layer", "{stem}layers.{n}.input_layernorm")
_HEAD_NORM = (("q_norm.weight", 0, "head_dim"),)
_LN_1 = norm("layer", "{stem}h.{n}.ln_1")


# ── where a family needs a function of its own ──


def _gpt2_scale(layer: Layer, sizes: Sizes) -> float:
    """1/√d_k unless scale_attn_weights is off; also 1/(n + 1) if the config asks for it."""
    scale = scale_by_d_k(layer, sizes) if layer.settings.get("scale_attn_weights", True) else 1.0
    if layer.settings.get("scale_attn_by_inverse_layer_idx"):
        layer.note("scale", "read", f"{layer.settings.where} scale_attn_by_inverse_layer_idx")
        scale /= layer.number + 1
    return scale


def _neo_scale(layer: Layer, sizes: Sizes) -> float:
    layer.family_says("scale", "1")
    return 1.0


def _neo_mask(layer: Layer) -> Mask:
    """GPT-Neo's attention_types: [[["global", "local"], 6]] repeats the pair six times."""
    kinds: list[str] = list(layer.settings.get("attention_layers") or [])
    for pair, times in [] if kinds else layer.settings.get("attention_types") or []:
        kinds += list(pair) * int(times)
    if not kinds:
        layer.note("mask", "assumed", "odd layers are local, 256 wide, as in the published models")
        return Mask(causal=True, window=255 if layer.number % 2 else None)
    layer.note("mask", "read", f"{layer.settings.where} attention_types")
    if layer.number < len(kinds) and kinds[layer.number] == "local":
        return Mask(causal=True, window=int(layer.settings.get("window", 256)) - 1)
    return Mask(causal=True)


def _falcon_groups(layer: Layer) -> int | None:
    if layer.settings.get("new_decoder_architecture"):
        return kv_setting(layer)
    if layer.settings.get("multi_query", True) and layer.known:
        return 1
    return kv_setting(layer) if "kv_heads" in layer.settings.arguments else None


def _falcon_position(layer: Layer, sizes: Sizes) -> Position:
    """Rotary, or ALiBi, which Falcon scales together with the scores."""
    if not layer.settings.get("alibi"):
        return rope()(layer, sizes)
    layer.note("position", "read", f"{layer.settings.where} alibi")
    return Alibi(tuple(s / math.sqrt(sizes.d_k) for s in alibi_slopes(sizes.heads)))


def _mpt_settings(layer: Layer) -> Mapping[str, Any]:
    found = layer.settings.get("attn_config")
    return found if isinstance(found, Mapping) else {}


def _mpt_position(layer: Layer, sizes: Sizes) -> Position:
    """ALiBi; for other numbers of heads than powers of two the next power's, odd ones first."""
    layer.family_says("position", "ALiBi")
    power = 2 ** math.ceil(math.log2(sizes.heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    if power != sizes.heads:
        slopes = [*slopes[1::2], *slopes[::2]][: sizes.heads]
    return Alibi(tuple(slopes))


def _mpt_scale(layer: Layer, sizes: Sizes) -> float:
    given = _mpt_settings(layer).get("softmax_scale")
    if given is None:
        return scale_by_d_k(layer, sizes)
    layer.note("scale", "read", f"{layer.settings.where} attn_config softmax_scale")
    return float(given)


def _mpt_refuses(layer: Layer) -> str | None:
    usual = {"clip_qkv": None, "qk_ln": False, "prefix_lm": False, "alibi": True}
    settings = {**usual, "alibi_bias_max": 8, **_mpt_settings(layer)}
    for name, value in (*usual.items(), ("alibi_bias_max", 8)):
        if settings[name] != value and (value or settings[name]):
            return f"the config's attn_config {name} = {settings[name]} is not modelled"
    return None


def _gemma3_mask(layer: Layer) -> Mask:
    """Without layer_types every sixth layer is global."""
    every = int(layer.settings.get("sliding_window_pattern", 6))
    return layer_mask(lambda n: bool((n + 1) % every))(layer)


def _gemma3_slides(layer: Layer) -> bool:
    return _gemma3_mask(layer).window is not None


def _smol_position(layer: Layer, sizes: Sizes) -> Position:
    rotates = layer.settings.get("no_rope_layers")
    if isinstance(rotates, list) and layer.number < len(rotates) and not rotates[layer.number]:
        layer.note("position", "read", f"{layer.settings.where} no_rope_layers")
        return NoPosition()
    return rope(theta=2000000.0)(layer, sizes)


def _cohere2_position(layer: Layer, sizes: Sizes) -> Position:
    if layer_mask()(layer).window is None:
        layer.family_says("position", "none in layers without a window")
        return NoPosition()
    return rope("interleaved")(layer, sizes)


_COMMON = (
    # Families whose parameters have Llama's names. The first that suits is taken without a config.
    Plan(
        "qwen3",
        _LAYERS,
        _QKVO,
        ("qwen3", "qwen3_moe"),
        requires=("q_norm.weight", "k_norm.weight"),
        forbids=("{stem}layers.{n}.pre_feedforward_layernorm.weight", "o_proj.bias"),
        clues=_HEAD_NORM,
        position=rope(theta=1000000.0),
        mask=layer_mask(lambda n: True, switch="use_sliding_window"),
        qk_norm=qk_norm("rms", "q_norm", "k_norm"),
        input_norm=_RMS,
    ),
    Plan(
        "gemma3",
        _LAYERS,
        _QKVO,
        ("gemma3_text", "gemma3"),
        requires=("q_norm.weight", "{stem}layers.{n}.pre_feedforward_layernorm.weight"),
        clues=_HEAD_NORM,
        position=rope(theta=1000000.0, local_theta=10000.0, local=_gemma3_slides),
        mask=_gemma3_mask,
        scale=scalar_scale("query_pre_attn_scalar"),
        qk_norm=qk_norm("rms", "q_norm", "k_norm", plus_one=True),
        input_norm=_RMS_ONE,
    ),
    Plan(
        "gemma2",
        _LAYERS,
        _QKVO,
        ("gemma2",),
        requires=("{stem}layers.{n}.pre_feedforward_layernorm.weight",),
        position=rope(),
        mask=layer_mask(lambda n: n % 2 == 0),
        scale=scalar_scale("query_pre_attn_scalar"),
        soft_cap=soft_cap,
        input_norm=_RMS_ONE,
    ),
    Plan(
        "gemma",
        _LAYERS,
        _QKVO,
        ("gemma",),
        position=rope(),
        by_name=False,
        mask=causal,
        input_norm=_RMS_ONE,
    ),
    Plan(
        "olmo2",
        _LAYERS,
        _QKVO,
        ("olmo2", "olmo3"),
        requires=("q_norm.weight", "{stem}layers.{n}.post_feedforward_layernorm.weight"),
        forbids=("{stem}layers.{n}.input_layernorm.weight",),
        position=rope(theta=500000.0),
        mask=layer_mask(),
        qk_norm=qk_norm("rms", "q_norm", "k_norm", over="all", eps=1e-5),
    ),
    Plan(
        "phi",
        _LAYERS,
        Separate("q_proj", "k_proj", "v_proj", "dense"),
        ("phi",),
        position=rope(rotary=0.5),
        mask=causal,
        qk_norm=qk_norm("layer", "q_layernorm", "k_layernorm", eps=1e-5),
        input_norm=_LAYER,
    ),
    Plan(
        "phi3",
        _LAYERS,
        Fused("qkv_proj", "o_proj"),
        ("phi3",),
        position=rope(),
        mask=layer_mask(lambda n: True),
        input_norm=_RMS,
    ),
    Plan(
        "stablelm",
        _LAYERS,
        _QKVO,
        ("stablelm",),
        requires=("{stem}layers.{n}.input_layernorm.bias",),
        forbids=("q_layernorm.norms.0.weight", "o_proj.bias"),
        position=rope(rotary=0.25),
        mask=causal,
        input_norm=_LAYER,
    ),
    Plan(
        "starcoder2",
        _LAYERS,
        _QKVO,
        ("starcoder2",),
        requires=("{stem}layers.{n}.input_layernorm.bias", "o_proj.bias"),
        position=rope(),
        mask=layer_mask(lambda n: True),
        input_norm=norm("layer", "{stem}layers.{n}.input_layernorm", eps_setting="norm_epsilon"),
    ),
    Plan(
        "qwen2",
        _LAYERS,
        _QKVO,
        ("qwen2", "qwen2_moe"),
        requires=("q_proj.bias",),
        forbids=("o_proj.bias", "q_norm.weight"),
        position=rope(theta=10000.0),
        mask=layer_mask(lambda n: True, switch="use_sliding_window"),
        input_norm=_RMS,
    ),
    Plan(
        "llama",
        _LAYERS,
        _QKVO,
        ("llama",),
        forbids=("q_norm.weight", "q_layernorm.weight"),
        position=rope(),
        mask=causal,
        input_norm=_RMS,
    ),
    Plan(
        "ernie4_5",
        _LAYERS,
        _QKVO,
        ("ernie4_5",),
        position=rope("interleaved", theta=500000.0),
        by_name=False,
        mask=causal,
        input_norm=_RMS,
    ),
    Plan(
        "eurobert",
        _LAYERS,
        _QKVO,
        ("eurobert",),
        position=rope(theta=250000.0),
        by_name=False,
        input_norm=_RMS,
    ),
    Plan(
        "jamba",
        _LAYERS,
        _QKVO,
        ("jamba",),
        by_name=False,
        mask=causal,
        input_norm=_RMS,
    ),
    Plan(
        "mistral",
        _LAYERS,
        _QKVO,
        ("mistral", "mixtral"),
        position=rope(),
        by_name=False,
        mask=layer_mask(lambda n: True),
        input_norm=_RMS,
    ),
    Plan(
        "granite",
        _LAYERS,
        _QKVO,
        ("granite",),
        position=rope(),
        by_name=False,
        mask=causal,
        scale=scalar_scale("attention_multiplier", 1.0),
        input_norm=_RMS,
    ),
    Plan(
        "smollm3",
        _LAYERS,
        _QKVO,
        ("smollm3",),
        position=_smol_position,
        by_name=False,
        mask=layer_mask(),
        input_norm=_RMS,
    ),
    Plan(
        "cohere",
        _LAYERS,
        _QKVO,
        ("cohere",),
        clues=(("q_norm.weight", 0, "heads"),),
        position=rope("interleaved"),
        by_name=False,
        mask=causal,
        qk_norm=qk_norm("layer", "q_norm", "k_norm", eps=1e-5),
        input_norm=_LAYER,
    ),
    Plan(
        "cohere2",
        _LAYERS,
        _QKVO,
        ("cohere2",),
        position=_cohere2_position,
        by_name=False,
        mask=layer_mask(),
        input_norm=_LAYER,
    ),
    Plan(
        "glm",
        _LAYERS,
        _QKVO,
        ("glm", "glm4"),
        position=rope("interleaved", rotary=0.5),
        by_name=False,
        mask=causal,
        input_norm=_RMS,
    ),
)

DECODERS: tuple[Plan, ...] = (
    Plan(
        "mpt",
        ("{stem}blocks.{n}.attn",),
        Fused("Wqkv", "out_proj"),
        ("mpt",),
        kv_heads=no_kv_groups,
        position=_mpt_position,
        mask=causal,
        scale=_mpt_scale,
        input_norm=norm("layer", "{stem}blocks.{n}.norm_1"),
        refuse=_mpt_refuses,
    ),
    Plan(
        "gpt2",
        _H,
        Fused("c_attn", "c_proj", input_major=True),
        ("gpt2",),
        mask=causal,
        scale=_gpt2_scale,
        kv_heads=no_kv_groups,
        input_norm=_LN_1,
    ),
    Plan(
        "nanogpt",
        _H,
        Fused("c_attn", "c_proj"),
        mask=causal,
        kv_heads=no_kv_groups,
        input_norm=_LN_1,
    ),
    Plan(
        "gptj",
        _H,
        Separate("q_proj", "k_proj", "v_proj", "out_proj"),
        ("gptj",),
        position=rope("interleaved"),
        mask=causal,
        input_norm=_LN_1,
    ),
    Plan(
        "gpt_neo",
        ("{stem}h.{n}.attn.attention",),
        Separate("q_proj", "k_proj", "v_proj", "out_proj"),
        ("gpt_neo",),
        mask=_neo_mask,
        scale=_neo_scale,
        input_norm=_LN_1,
    ),
    Plan(
        "gpt_neox",
        ("{stem}layers.{n}.attention",),
        Fused("query_key_value", "dense", "grouped"),
        ("gpt_neox",),
        kv_heads=no_kv_groups,
        position=rope(rotary=0.25),
        mask=causal,
        input_norm=_LAYER,
    ),
    Plan(
        "bloom",
        ("{stem}h.{n}.self_attention",),
        Fused("query_key_value", "dense", "grouped"),
        ("bloom",),
        requires=("query_key_value.bias",),
        kv_heads=no_kv_groups,
        position=alibi_position,
        mask=causal,
        input_norm=norm("layer", "{stem}h.{n}.input_layernorm"),
    ),
    Plan(
        "falcon",
        ("{stem}h.{n}.self_attention",),
        Fused("query_key_value", "dense", "grouped"),
        ("falcon",),
        kv_heads=_falcon_groups,
        position=_falcon_position,
        mask=causal,
        input_norm=norm("layer", "{stem}h.{n}.ln_attn", "{stem}h.{n}.input_layernorm"),
    ),
    *_COMMON,
    Plan(
        "meta_llama",
        ("{stem}layers.{n}.attention",),
        Separate("wq", "wk", "wv", "wo"),
        ("llama2.c",),
        position=rope("interleaved"),
        mask=causal,
        input_norm=norm("rms", "{stem}layers.{n}.attention_norm", eps=1e-5),
    ),
)
