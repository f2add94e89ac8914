"""Rows of the table of layouts: vision transformers and models of images and text."""

from __future__ import annotations

import math

from levelhead.weights.facts import causal, full, no_position, norm, qk_norm
from levelhead.weights.layer import Layer, Sizes
from levelhead.weights.plan import Plan, no_kv_groups
from levelhead.weights.stores import Fused, Separate
from levelhead.weights.structure import Mask, Position, Relative

__all__ = ["VISION"]

_VIT_TYPES = ("vit", "deit", "vit_msn", "yolos")
# The names of one family differ in memory (since transformers 5) and on disk.
_ON_DISK = Separate("attention.query", "attention.key", "attention.value", "output.dense")
_IN_MEMORY = Separate("q_proj", "k_proj", "v_proj", "o_proj")
_DISK = ("{stem}encoder.layer.{n}.attention",)
_MEMORY = ("{stem}layers.{n}.attention", "{stem}encoder.layer.{n}.attention")
_NONE = r"(?!)"
_TABLE = "relative_position_bias.relative_position_bias_table"


def _beit_position(layer: Layer, sizes: Sizes) -> Position:
    """One entry of the table for each offset inside the window of patches."""
    for name in (
        "{stem}layers.{n}." + _TABLE,
        f"attention.{_TABLE}",
        f"{{stem}}encoder.{_TABLE}",
        f"{{stem}}{_TABLE}",
        f"{{stem}}shared_position_bias.{_TABLE.split('.')[1]}",
    ):
        if layer.has(name):
            image, patch = (_pair(layer, n) for n in ("image_size", "patch_size"))
            window = None
            if image and patch:
                window = (image[0] // patch[0], image[1] // patch[1])
            elif (side := math.isqrt(entries := layer.shape(name)[0] - 3)) ** 2 == entries:
                window = ((side + 1) // 2, (side + 1) // 2)
            layer.note("position", "read", f"stored weights {layer.path(name)}")
            return Relative(layer.read(name).mT, "window", window=window)
    return no_position(layer, sizes)


def _pair(layer: Layer, name: str) -> tuple[int, int] | None:
    found = layer.settings.get(name)
    if isinstance(found, list | tuple):
        return int(found[0]), int(found[1])
    return None if found is None else (int(found), int(found))


def _clip_mask(layer: Layer) -> Mask:
    """CLIP's text tower is causal."""
    kind = layer.settings.model_type or ""
    return causal(layer) if "text" in layer.module or "text" in kind else full(layer)


def _timm_refuses(layer: Layer) -> str | None:
    for name in ("relative_position_bias_table", "logit_scale", "rel_pos_h"):
        if layer.has(name):
            return f"its {name} is a position or scale that is not read"
    return None


def _vit(family: str, types: tuple[str, ...], before: str, eps: float) -> tuple[Plan, Plan]:
    """A family's two rows: as transformers holds it in memory and as it is on disk."""
    norms = (f"{{stem}}encoder.layer.{{n}}.{before}", f"{{stem}}layers.{{n}}.{before}")
    beit = family == "beit"
    rows = [
        Plan(
            family,
            modules,
            store,
            types,
            kv_heads=no_kv_groups,
            position=_beit_position if beit else no_position,
            others=r"attention\.relative_position_bias\.relative_position_index" if beit else _NONE,
            input_norm=norm("layer", *norms, eps=eps),
        )
        for modules, store in ((_DISK, _ON_DISK), (_MEMORY, _IN_MEMORY))
    ]
    return rows[0], rows[1]


VISION: tuple[Plan, ...] = (
    *_vit("vit", _VIT_TYPES, "layernorm_before", 1e-12),
    *_vit("beit", ("beit", "data2vec-vision"), "layernorm_before", 1e-12),
    *_vit("dinov2", ("dinov2", "dinov2_with_registers"), "norm1", 1e-6),
    Plan(
        "timm",
        ("{stem}blocks.{n}.attn",),
        Fused("qkv", "proj"),
        kv_heads=no_kv_groups,
        clues=(("q_norm.weight", 0, "head_dim"),),
        qk_norm=qk_norm("layer", "q_norm", "k_norm", eps=1e-6),
        input_norm=norm("layer", "{stem}blocks.{n}.norm1", eps=1e-6),
        refuse=_timm_refuses,
    ),
    Plan(
        "clip",
        ("{stem}layers.{n}.self_attn",),
        Separate("q_proj", "k_proj", "v_proj", "out_proj"),
        ("clip", "clip_text_model", "clip_vision_model"),
        requires=("{stem}layers.{n}.layer_norm1.weight",),
        mask=_clip_mask,
        input_norm=norm("layer", "{stem}layers.{n}.layer_norm1"),
    ),
    Plan(
        "siglip",
        ("{stem}layers.{n}.self_attn",),
        Separate("q_proj", "k_proj", "v_proj", "out_proj"),
        ("siglip", "siglip_text_model", "siglip_vision_model"),
        by_name=False,
        input_norm=norm("layer", "{stem}layers.{n}.layer_norm1", eps=1e-6),
    ),
)
