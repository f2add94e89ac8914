"""Rows of the table of layouts: PyTorch's own layers, forecasters, low-rank projections, GGUF.

And, where no other row reads a layer, own modules whose four Linears have names that many use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from levelhead.weights.doubts import NORM_UNKNOWN
from levelhead.weights.facts import (
    causal,
    full,
    no_norm,
    no_position,
    norm,
    qk_norm,
)
from levelhead.weights.layer import Layer, Sizes, template_pattern
from levelhead.weights.low_rank import LowRank, latent_scale, read_latent, rotated_rows
from levelhead.weights.plan import Plan, no_kv_groups
from levelhead.weights.plans_decoders import DECODERS
from levelhead.weights.plans_encoders import ENCODERS
from levelhead.weights.plans_vision import VISION
from levelhead.weights.rope import rope
from levelhead.weights.stores import Fused, PackedProjection, Plain, Separate
from levelhead.weights.structure import InputNorm, Mask, NoPosition, Position

__all__ = ["GENERIC"]


# ── PyTorch ──


# TransformerEncoderLayer and TransformerDecoderLayer: norm1 belongs to the attention to itself, a
# decoder's norm2 to the one to the memory, the last to the feed-forward part.


def _torch_norm(layer: Layer) -> InputNorm:
    """The norm before the layer (norm_first), or the one that ends what stands before it.

    Names are the same for both, so that without norm_first nothing is folded.
    """
    first, said = layer.settings.flag("norm_first"), layer.settings.find("norm_first")
    numbered = layer.matched.get("n") is not None
    here = "{stem}{n}." if numbered else "{stem}"
    if not layer.has(f"{here}norm1.weight"):
        return no_norm(layer)
    if said is None:
        layer.note("input_norm", "assumed", NORM_UNKNOWN)
        return InputNorm("none")
    last = "norm3" if layer.has(f"{here}norm3.weight") else "norm2"
    if layer.module.endswith("multihead_attn"):
        name = f"{here}norm2" if first else f"{here}norm1"
    elif first:
        name = f"{here}norm1"
    elif numbered and layer.number:
        name = f"{{stem}}{{n-1}}.{last}"
    else:
        layer.note("input_norm", "inferred", "post norm: what is in front is not in the layer")
        return InputNorm("none")
    position: Literal["pre", "post"] = "pre" if first else "post"
    found = norm("layer", name, position=position, eps_setting="")(layer)
    layer.note("input_norm", said[1].how, f"norm {layer.path(name)}, by {said[1].source}")
    return found


def _torch_mask(layer: Layer) -> Mask:
    layer.note("mask", "assumed", "the mask is an argument of forward, not part of the weights")
    return Mask()


# ── a forecaster's rows ──


def _tied(layer: Layer) -> bool:
    return not layer.has("key")


def _patchtst_norm(layer: Layer) -> InputNorm:
    """A LayerNorm before the layer; BatchNorm (the default) is affine in use and not folded."""
    if layer.has("{stem}layers.{n}.norm_sublayer1.batchnorm.weight"):
        layer.note(
            "input_norm", "inferred", "BatchNorm, an affine map that is not part of the view"
        )
        return InputNorm("none")
    if not layer.settings.get("pre_norm", True):
        return norm("layer", "{stem}layers.{n-1}.norm_sublayer3", position="post")(layer)
    return norm("layer", "{stem}layers.{n}.norm_sublayer1", eps_setting="norm_eps")(layer)


# ── GGUF ──

# llama.cpp rotates neighbouring dimensions in these architectures, halves in the others.
_NEIGHBOURS = ("llama", "mistral3", "deepseek2", "cohere2", "command-r", "glm4", "minicpm")


def _gguf_position(layer: Layer, sizes: Sizes) -> Position:
    kind = str(layer.settings.get("general.architecture", ""))
    if kind in ("gpt2", "bert", "bloom", "mpt"):
        return no_position(layer, sizes)
    return rope("interleaved" if kind in _NEIGHBOURS else "half")(layer, sizes)


def _gguf_mask(layer: Layer) -> Mask:
    kind = str(layer.settings.get("general.architecture", ""))
    return full(layer) if "bert" in kind else causal(layer)


def _gguf_refuses(layer: Layer) -> str | None:
    kind = str(layer.settings.get("general.architecture", ""))
    if kind in ("bloom", "mpt", "t5", "t5encoder", "gemma2", "gemma3"):
        return f"positions, masks and scales of the GGUF architecture {kind} are not modelled"
    return None


_GGUF = ("{stem}blk.{n}",)
_GGUF_NORM = norm("rms", "{stem}blk.{n}.attn_norm")

_FAMILIES: tuple[Plan, ...] = (
    Plan(
        "deepseek",
        ("{stem}layers.{n}.self_attn",),
        LowRank(),
        ("deepseek_v2", "deepseek_v3"),
        kv_heads=no_kv_groups,
        position=rope("interleaved", dims=rotated_rows),
        mask=causal,
        scale=latent_scale,
        latent=read_latent,
        input_norm=norm("rms", "{stem}layers.{n}.input_layernorm"),
    ),
    Plan(
        "deepseek",
        ("{stem}layers.{n}.self_attn",),
        LowRank(compressed_queries=False),
        ("deepseek_v2", "deepseek_v3"),
        kv_heads=no_kv_groups,
        position=rope("interleaved", dims=rotated_rows),
        mask=causal,
        scale=latent_scale,
        latent=read_latent,
        input_norm=norm("rms", "{stem}layers.{n}.input_layernorm"),
    ),
    Plan(
        "patchtst",
        ("{stem}layers.{n}.self_attn",),
        Separate("q_proj", "k_proj", "v_proj", "out_proj"),
        ("patchtst",),
        requires=("{stem}layers.{n}.ff.0.weight",),
        kv_heads=no_kv_groups,
        input_norm=_patchtst_norm,
    ),
    Plan(
        "torch_encoder",
        ("{stem}{n}.self_attn",),
        PackedProjection(),
        kv_heads=no_kv_groups,
        mask=_torch_mask,
        input_norm=_torch_norm,
    ),
    Plan(
        "torch_encoder",
        ("{stem}self_attn",),
        PackedProjection(),
        requires=("{stem}norm1.weight",),
        kv_heads=no_kv_groups,
        mask=_torch_mask,
        input_norm=_torch_norm,
    ),
    Plan(
        "torch_cross",
        ("{stem}{n}.multihead_attn", "{stem}multihead_attn"),
        PackedProjection(),
        kv_heads=no_kv_groups,
        cross=True,
        input_norm=_torch_norm,
    ),
    Plan(
        "torch_mha",
        ("",),
        PackedProjection(),
        kv_heads=no_kv_groups,
        mask=_torch_mask,
    ),
    Plan(
        "torch_mha_separate",
        ("",),
        PackedProjection(separate=True),
        kv_heads=no_kv_groups,
        cross=True,
    ),
    Plan(
        "samformer",
        ("",),
        Plain("query", "key", "value", "output"),
        ("samformer",),
        requires=("head",),
        kv_heads=no_kv_groups,
        tied=_tied,
    ),
    Plan(
        "gguf",
        _GGUF,
        Separate("attn_q", "attn_k", "attn_v", "attn_output"),
        ("gguf",),
        position=_gguf_position,
        mask=_gguf_mask,
        qk_norm=qk_norm("rms", "attn_q_norm", "attn_k_norm"),
        clues=(("attn_q_norm.weight", 0, "head_dim"),),
        input_norm=_GGUF_NORM,
        refuse=_gguf_refuses,
    ),
    Plan(
        "gguf",
        _GGUF,
        Fused("attn_qkv", "attn_output"),
        ("gguf",),
        position=_gguf_position,
        mask=_gguf_mask,
        input_norm=_GGUF_NORM,
        refuse=_gguf_refuses,
    ),
)


# ── own modules ──

_ASSUMED = (
    "its parameters' names alone tell that this is attention: no positions inside, no mask and the "
    "scale 1/√d_k are assumed, and no norm in front is folded; a layout can say what it is"
)


@dataclass(frozen=True)
class _LastResort(Plan):
    """A row of names that many modules share.

    It suits where a row of a family neither reads the layer nor refuses it for more than a missing
    matrix, and where no config names a type: that type's own code may do anything.
    """

    def suits(self, layer: Layer) -> bool:
        """Whether no other row speaks of this layer, and its keys come from where they should."""
        if layer.settings.model_type is not None or not super().suits(layer):
            return False
        if _crosses(layer, self.store) != self.cross:
            return False
        others = (*_FAMILIES, *ENCODERS, *VISION, *DECODERS)
        return not any(_speaks_of(plan, layer) for plan in others)


def _speaks_of(plan: Plan, layer: Layer) -> bool:
    """Whether a row finds this layer by names alone, with all its matrices."""
    for template in plan.modules:
        pattern = template_pattern(template) if template else "(?P<stem>.*)"
        if (matched := re.fullmatch(pattern, layer.module)) is None:
            continue
        groups = matched.groupdict()
        theirs = Layer(layer.module, groups, layer.shapes, layer.settings, plan.family, layer.known)
        if plan.suits(theirs) and plan.store.complete(theirs) is None:
            return True
    return False


def _crosses(layer: Layer, store: object) -> bool:
    """Whether keys read another width than queries, or the module's name says another sequence."""
    name = layer.module.rpartition(".")[2]
    if name == "attn2" or "cross" in name:
        return True
    if not isinstance(store, Separate):
        return False
    q, k = f"{store.q}.weight", f"{store.k}.weight"
    both = layer.has(q) and layer.has(k)
    return both and layer.shape(q)[1:] != layer.shape(k)[1:]


def _own_position(layer: Layer, sizes: Sizes) -> Position:
    layer.note("family", "assumed", _ASSUMED)
    layer.note("position", "assumed", "positions inside the layer would be code, not parameters")
    return NoPosition()


def _own_norm(layer: Layer) -> InputNorm:
    layer.note("input_norm", "assumed", "names do not say what stands in front: nothing folded")
    return InputNorm("none")


class _ByOutput(Separate):
    """`Separate`, found by its output projection: what q is called is called so elsewhere too."""

    @property
    def anchor(self) -> str:
        """o.weight."""
        return f"{self.o}.weight"


_ANYWHERE = ("",)
# A layer of BERT or ViT has its query, key and value in a module below; those have no proj.
_NAMED = ("{stem}attn", "{stem}attention", "{stem}self_attn", "{stem}self_attention", "{stem}mha")
_OWN: tuple[tuple[Separate, tuple[str, ...]], ...] = (
    (Separate("to_q", "to_k", "to_v", "to_out.0"), _ANYWHERE),
    (Separate("to_q", "to_k", "to_v", "to_out"), _ANYWHERE),
    (Separate("wq", "wk", "wv", "wo"), _ANYWHERE),
    (Separate("q_proj", "k_proj", "v_proj", "o_proj"), _ANYWHERE),
    (Separate("q_proj", "k_proj", "v_proj", "out_proj"), _ANYWHERE),
    (_ByOutput("query", "key", "value", "proj"), _NAMED),
)

GENERIC: tuple[Plan, ...] = (
    *_FAMILIES,
    *(
        _LastResort(
            "generic",
            modules,
            store,
            mask=_torch_mask,
            position=_own_position,
            input_norm=_own_norm,
            cross=cross,
            # Buffers of masks; what else is below the module may turn or norm, and is refused.
            others=r"mask|causal_mask|attn_mask|tril",
        )
        for store, modules in _OWN
        for cross in (False, True)
    ),
)
