"""What a family's layers are, as small functions that plans are composed of.

Each takes the `Layer` (and d_k where it matters), returns the value of one field of the view, and
notes on the layer where that value comes from. Numbers are settings where the config says them and
the family's own otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.layer import Layer, Sizes
from levelhead.weights.rope import layer_type
from levelhead.weights.structure import Alibi, InputNorm, Mask, NoPosition, Position, QKNorm

__all__ = [
    "alibi_position",
    "alibi_slopes",
    "causal",
    "constant_scale",
    "full",
    "half_causal",
    "layer_mask",
    "no_norm",
    "no_position",
    "norm",
    "qk_norm",
    "scalar_scale",
    "scale_by_d_k",
    "soft_cap",
]

MaskOf = Callable[[Layer], Mask]
NormOf = Callable[[Layer], InputNorm]

# ── position ──


def no_position(layer: Layer, sizes: Sizes) -> Position:
    """Positions are added to the model's input, or there are none."""
    layer.family_says("position", "none inside the layer")
    return NoPosition()


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slopes (arXiv 2108.12409, sec. 3 and its code for other than powers of two).

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
    return tuple(slopes)


def alibi_position(layer: Layer, sizes: Sizes) -> Position:
    """ALiBi with the paper's slopes."""
    layer.family_says("position", "ALiBi with the paper's slopes")
    return Alibi(alibi_slopes(sizes.heads))


# ── mask ──


def full(layer: Layer) -> Mask:
    """Every token sees every token."""
    layer.family_says("mask", "no mask")
    return Mask()


def causal(layer: Layer) -> Mask:
    """Every token sees itself and those before it."""
    layer.family_says("mask", "causal")
    return Mask(causal=True)


def half_causal(layer: Layer) -> Mask:
    """Causal if the config says is_decoder (an encoder family used as a decoder)."""
    if layer.settings.get("is_decoder"):
        layer.note("mask", "read", f"{layer.settings.where} is_decoder")
        return Mask(causal=True)
    return full(layer)


def layer_mask(
    default: Callable[[int], bool] | None = None, *, switch: str | None = None
) -> MaskOf:
    """Causal, sliding where the config's layer_types say so.

    Args:
        default: for a layer's number whether it slides, where there are no layer_types but a
            sliding_window. None: without layer_types no layer slides.
        switch: the name of a setting that must be true for any layer to slide.
    """

    def mask(layer: Layer) -> Mask:
        window = layer.settings.find("window")
        kind = layer_type(layer)
        slides = default is not None and window is not None and default(layer.number)
        if kind is not None:
            slides = kind == "sliding_attention"
        elif switch is not None and not layer.settings.get(switch):
            slides = False
        if kind not in (None, "sliding_attention", "full_attention"):
            raise InputError(
                f"{layer.module}: its layer_types entry is {kind!r}; only full_attention and "
                "sliding_attention can be read"
            )
        if not slides:
            return causal(layer)
        if window is None:
            raise InputError(f"{layer.module}: it slides, but the config has no sliding_window")
        layer.origins["mask"] = window[1]
        return Mask(causal=True, window=int(window[0]) - 1)

    return mask


# ── scale and soft cap ──


def scale_by_d_k(layer: Layer, sizes: Sizes) -> float:
    """1/√d_k."""
    layer.family_says("scale", "1/√d_k")
    return 1 / math.sqrt(sizes.d_k)


def constant_scale(value: float) -> Callable[[Layer, Sizes], float]:
    """A scale that does not depend on d_k (T5: 1)."""

    def scale(layer: Layer, sizes: Sizes) -> float:
        layer.family_says("scale", f"{value:g}")
        return value

    return scale


def scalar_scale(name: str, power: float = -0.5) -> Callable[[Layer, Sizes], float]:
    """setting^power (Gemma: query_pre_attn_scalar^-1/2; Granite: attention_multiplier)."""

    def scale(layer: Layer, sizes: Sizes) -> float:
        found = layer.settings.find(name)
        if found is None:
            return scale_by_d_k(layer, sizes)
        layer.origins["scale"] = found[1]
        return float(float(found[0]) ** power)

    return scale


def soft_cap(layer: Layer) -> float | None:
    """attn_logit_softcapping."""
    found = layer.settings.find("soft_cap")
    if found is None:
        layer.family_says("soft_cap", "none")
        return None
    layer.origins["soft_cap"] = found[1]
    return float(found[0])


# ── norms ──


def no_norm(layer: Layer) -> InputNorm:
    """The layer's input is not normed, or by nothing that is known."""
    layer.family_says("input_norm", "none")
    return InputNorm("none")


def norm(
    kind: Literal["layer", "rms"],
    *templates: str,
    position: Literal["pre", "post"] = "pre",
    eps: float | None = None,
    plus_one: bool = False,
    eps_setting: str | None = None,
) -> NormOf:
    """The norm in front of the layer: the first of the modules `templates` that is there.

    Args:
        eps: its eps where the config is silent (1e-6 "rms", 1e-5 "layer" by default).
        plus_one: whether gain - 1 is stored.
        eps_setting: the setting to ask; "" asks none (eps is written into the model's code).
    """
    silent = eps if eps is not None else (1e-6 if kind == "rms" else 1e-5)
    setting = f"{kind}_eps" if eps_setting is None else eps_setting

    def input_norm(layer: Layer) -> InputNorm:
        for template in templates:
            if "{n-1}" in template and layer.number == 0:
                continue
            for gain, bias in (("weight", "bias"), ("gamma", "beta")):
                if not layer.has(f"{template}.{gain}"):
                    continue
                size = layer.setting(setting, silent, of="input_norm") if setting else silent
                weight = layer.read(f"{template}.{gain}")
                shift = layer.read_if(f"{template}.{bias}")
                before = layer.origins.get("input_norm")
                eps_by = f", eps {before.source}" if before is not None else ""
                layer.note(
                    "input_norm",
                    before.how if before else "read",
                    f"{layer.path(template)}{eps_by}",
                )
                return InputNorm(
                    kind, weight + 1 if plus_one else weight, shift, float(size), position
                )
        layer.note("input_norm", "inferred", "no norm of this layer's input is stored")
        return InputNorm("none")

    return input_norm


def qk_norm(
    kind: Literal["rms", "layer"],
    q: str,
    k: str,
    *,
    over: Literal["head", "all"] = "head",
    plus_one: bool = False,
    eps: float = 1e-6,
    after_rope: bool = False,
) -> Callable[[Layer, Sizes], QKNorm | None]:
    """Norms of queries and keys by the modules `q` and `k`; none if they are not stored."""

    def read(layer: Layer, name: str, d_k: int) -> list[Tensor | None]:
        found = []
        for part in ("weight", "bias"):
            tensor = layer.read_if(f"{name}.{part}")
            if tensor is not None and plus_one and part == "weight":
                tensor = tensor + 1
            if tensor is not None and tensor.numel() != d_k:
                tensor = tensor.reshape(-1, d_k)
            found.append(tensor)
        return found

    def described(layer: Layer, sizes: Sizes) -> QKNorm | None:
        if not layer.has(f"{q}.weight"):
            layer.note("qk_norm", "inferred", "no norm of queries and keys is stored")
            return None
        size = layer.setting("rms_eps" if kind == "rms" else "layer_eps", eps, of="qk_norm")
        (q_gain, q_shift), (k_gain, k_shift) = (read(layer, n, sizes.d_k) for n in (q, k))
        return QKNorm(kind, over, q_gain, k_gain, float(size), q_shift, k_shift, after_rope)

    return described
