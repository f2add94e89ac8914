"""Rotary position from a model's settings: base, rotated width, and the scalings of long contexts.

Settings come in two generations: one mapping `rope_parameters` (per kind of layer where kinds
differ), or `rope_theta` beside `rope_scaling`. Frequencies are radians per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from levelhead.base.errors import InputError
from levelhead.weights.layer import Layer, Sizes
from levelhead.weights.structure import NoPosition, Position, Rope

__all__ = ["layer_type", "rope", "rope_parameters", "rope_settings", "yarn_temperature"]

Layout = Literal["interleaved", "half"]


def rope(
    layout: Layout = "half",
    *,
    theta: float = 10000.0,
    rotary: float = 1.0,
    local_theta: float | None = None,
    local: Callable[[Layer], bool] | None = None,
    dims: Callable[[Layer, int], tuple[int, int]] | None = None,
) -> Callable[[Layer, Sizes], Position]:
    """A plan's `position`: rotary, with the family's defaults for what settings do not say.

    Args:
        theta, rotary: base and rotated share of d_k where the config is silent.
        local_theta: base of local (sliding) layers where the config is silent.
        local: whether a layer is local, by default what layer_types say.
        dims: (offset, width) of the rotated dimensions, by default the first rotary·d_k.
    """

    def position(layer: Layer, sizes: Sizes) -> Position:
        d_k = sizes.d_k
        near = local(layer) if local else layer_type(layer) == "sliding_attention"
        values = rope_parameters(layer, near)
        default = local_theta if near and local_theta is not None else theta
        base = float(values.get("rope_theta") or default)
        offset, width = dims(layer, d_k) if dims else (0, _rotated(layer, values, d_k, rotary))
        if values.get("rope_theta"):
            layer.note("position", "read", f"{layer.settings.where} rope_theta")
        else:
            layer.family_says("position", f"rotary with theta {base:g}")
        if width == 0:
            return NoPosition()
        used: Layout = "interleaved" if values.get("interleaved") else layout
        if base <= 1:
            raise InputError(f"{layer.module}: rope_theta {base} was given; expected more than 1")
        plain = Rope(used, width, base, offset)
        scaling, frequencies, temperature = _scaled(plain, values, layer)
        return Rope(used, width, base, offset, scaling, frequencies, temperature)

    return position


def layer_type(layer: Layer) -> str | None:
    """The config's word for this layer (full_attention, sliding_attention), None without one."""
    kinds = layer.settings.get("layer_types")
    if isinstance(kinds, list | tuple) and layer.number < len(kinds):
        return str(kinds[layer.number])
    return None


def rope_settings(layer: Layer) -> Mapping[str, Any]:
    """`rope_parameters` (or the older `rope_scaling`) as the config holds it, or nothing."""
    for name in ("rope_parameters", "rope_scaling"):
        found = layer.settings.get(name)
        if isinstance(found, Mapping):
            return found
    return {}


def rope_parameters(layer: Layer, local: bool = False) -> dict[str, Any]:
    """The rotary settings that hold for this layer, in the newer names; `local` if it slides."""
    found = dict(rope_settings(layer))
    kind = "sliding_attention" if local else "full_attention"
    if isinstance(found.get(kind), Mapping):
        found = dict(found[kind])
    elif any(isinstance(found.get(k), Mapping) for k in ("full_attention", "sliding_attention")):
        found = {}
    names = ("rope_local_base_freq", "local_rope_theta") if local else ("global_rope_theta",)
    for name in (*names, "theta"):
        if (said := layer.settings.find(name)) is not None and "rope_theta" not in found:
            found["rope_theta"] = said[0]
    said = layer.settings.find("theta")
    if said is not None and said[1].source.startswith(("argument", "layout")):
        found["rope_theta"] = said[0]
    if local and layer.settings.find("rope_local_base_freq") is not None:
        found = {"rope_theta": found["rope_theta"]}  # only the global layers are stretched
    for name in ("rotary", "rotary_dims"):
        if (said := layer.settings.find(name)) is not None:
            found.setdefault("partial_rotary_factor" if name == "rotary" else name, said[0])
    if "type" in found:
        found.setdefault("rope_type", found["type"])
    return found


def _rotated(layer: Layer, values: Mapping[str, Any], d_k: int, rotary: float) -> int:
    if values.get("rotary_dims"):
        return int(values["rotary_dims"])
    width = int(d_k * float(values.get("partial_rotary_factor") or rotary))
    if width % 2:
        raise InputError(f"{layer.module}: {width} of {d_k} dimensions cannot rotate in planes")
    return width


Scaled = tuple[str | None, tuple[float, ...] | None, float]


def _scaled(plain: Rope, values: Mapping[str, Any], layer: Layer) -> Scaled:
    """(what is done, in words; frequencies; temperature) of the scaling that `values` name."""
    kind = str(values.get("rope_type", "default"))
    if kind in ("default", "mrope"):
        return ("three-dimensional positions" if kind == "mrope" else None), None, 1.0
    if kind == "dynamic":
        return "theta grows with the length of long inputs (dynamic NTK)", None, 1.0
    known = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
    scale = (known | {"longrope": _longrope, "su": _longrope}).get(kind)
    if scale is None:
        return f"{kind}, which is not modelled: frequencies are those without it", None, 1.0
    try:
        return scale(plain, values, layer)
    except (KeyError, TypeError, ZeroDivisionError, ValueError) as error:
        raise InputError(
            f"{layer.module}: rope scaling {kind!r} is incomplete ({error!r}): check the config"
        ) from error


def _linear(plain: Rope, values: Mapping[str, Any], layer: Layer) -> Scaled:
    factor = float(values["factor"])
    return f"linear, factor {factor:g}", tuple(f / factor for f in plain.frequencies), 1.0


def _llama3(plain: Rope, values: Mapping[str, Any], layer: Layer) -> Scaled:
    """Low frequencies divided by the factor, high ones kept, those between interpolated."""
    factor = float(values["factor"])
    low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
    length = float(values["original_max_position_embeddings"])
    found = []
    for frequency in plain.frequencies:
        turns = length * frequency / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return f"llama3, factor {factor:g}", tuple(found), 1.0


def _yarn(plain: Rope, values: Mapping[str, Any], layer: Layer) -> Scaled:
    """YaRN (arXiv 2309.00071, eqs. 17-23), as transformers computes it."""
    length = float(values["original_max_position_embeddings"])
    factor = values.get("factor") or layer.settings.get("max_position_embeddings") / length
    factor = float(factor)

    def dimension(rotations: float) -> float:
        turns = math.log(length / (rotations * 2 * math.pi))
        return plain.width * turns / (2 * math.log(plain.theta))

    low = dimension(float(values.get("beta_fast") or 32))
    high = dimension(float(values.get("beta_slow") or 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, plain.width - 1)
    high = high + 0.001 if low == high else high
    found = []
    for f, frequency in enumerate(plain.frequencies):
        keep = 1 - min(max((f - low) / (high - low), 0.0), 1.0)
        found.append((1 - keep) * frequency / factor + keep * frequency)
    temperature = values.get("attention_factor")
    if temperature is None:
        one, other = values.get("mscale"), values.get("mscale_all_dim")
        temperature = yarn_temperature(factor)
        if one and other:
            temperature = yarn_temperature(factor, one) / yarn_temperature(factor, other)
    return f"yarn, factor {factor:g}", tuple(found), float(temperature)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on queries and keys (its √(1/t))."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(plain: Rope, values: Mapping[str, Any], layer: Layer) -> Scaled:
    """LongRoPE; the factors for short inputs."""
    settings = layer.settings
    length = float(
        values.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
    )
    factor = values.get("factor") or settings.get("max_position_embeddings") / length
    short = values["short_factor"]
    found = tuple(f / float(s) for f, s in zip(plain.frequencies, short, strict=True))
    temperature = values.get("attention_factor")
    if temperature is None:
        stretched = factor > 1
        temperature = math.sqrt(1 + math.log(factor) / math.log(length)) if stretched else 1.0
    said = f"longrope; the frequencies hold for inputs of up to {length:.0f} tokens"
    return said, found, float(temperature)
