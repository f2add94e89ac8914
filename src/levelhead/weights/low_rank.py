"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, sec. 2.1) as products.

Queries are q_b γ_q q_a x / rms(q_a x), keys' first rows and values kv_b γ_kv kv_a x / rms(kv_a x),
and the last rows of keys, which alone rotate, are one projection shared by all heads. The view
holds the products of the matrices; `Latent` holds the two norms.

Axes. kv_b is stored [h·(d_nope + d_v), r_kv], per head its key rows and its value rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.layer import GIVE_HEADS, Layer, Sizes
from levelhead.weights.rope import rope_parameters, yarn_temperature
from levelhead.weights.stores import Clues, Slices, output_slices
from levelhead.weights.structure import Latent

__all__ = ["LowRank", "latent_scale", "read_latent", "rotated_rows"]

_DOWN, _UP = "kv_a_proj_with_mqa", "kv_b_proj"
_EPS = 1e-6  # written into the models' code


def _rotated(layer: Layer) -> int:
    """Rows of the shared rotated key: what the compression leaves over."""
    return layer.shape(f"{_DOWN}.weight")[0] - layer.shape("kv_a_layernorm.weight")[0]


def rotated_rows(layer: Layer, d_k: int) -> tuple[int, int]:
    """(offset, width): the last rows of queries and keys rotate."""
    return d_k - _rotated(layer), _rotated(layer)


def latent_scale(layer: Layer, sizes: Sizes) -> float:
    """1/√d_k, times YaRN's temperature squared where all dimensions have one."""
    layer.family_says("scale", "1/√d_k")
    values = rope_parameters(layer)
    scale = 1 / math.sqrt(sizes.d_k)
    share = values.get("mscale_all_dim")
    if values.get("rope_type") not in (None, "default") and share:
        layer.note("scale", "read", f"{layer.settings.where} mscale_all_dim")
        scale *= yarn_temperature(float(values["factor"]), float(share)) ** 2
    return scale


def read_latent(layer: Layer, sizes: Sizes) -> Latent:
    """The two norms between the factors."""
    rank = layer.shape("kv_a_layernorm.weight")[0]
    layer.family_says("latent", f"low-rank projections with eps {_EPS:g}")
    return Latent(
        layer.read(f"{_DOWN}.weight")[:rank],
        layer.read_if("q_a_proj.weight"),
        _EPS,
        rotated_rows(layer, sizes.d_k),
    )


@dataclass(frozen=True)
class LowRank:
    """The store of latent attention; queries compressed or not."""

    compressed_queries: bool = True

    @property
    def anchor(self) -> str:
        """The last projection of queries."""
        return "q_b_proj.weight" if self.compressed_queries else "q_proj.weight"

    def complete(self, layer: Layer) -> str | None:
        """All factors are there, and no biases inside them."""
        names = [self.anchor, f"{_DOWN}.weight", f"{_UP}.weight", "o_proj.weight"]
        names += ["kv_a_layernorm.weight"]
        if self.compressed_queries:
            names += ["q_a_proj.weight", "q_a_layernorm.weight"]
        for name in names:
            if not layer.has(name):
                return f"it has no {layer.path(name)}"
        for name in (f"{_DOWN}.bias", "q_a_proj.bias"):
            if layer.has(name):
                return f"{layer.path(name)} lies inside a low-rank projection"
        return None

    def sizes(self, layer: Layer, kv_heads: int | None, clues: Clues) -> Sizes:
        """d_k from the rows of queries, d_v from what is left of kv_b."""
        found = layer.settings.whole("heads")
        if found is None:
            raise InputError(
                f"{layer.module}: shapes alone do not say how many heads there are: {GIVE_HEADS}"
            )
        heads = found[0]
        layer.origins["q"] = found[1]
        rows, both = layer.shape(self.anchor)[0], layer.shape(f"{_UP}.weight")[0]
        d_k = rows // heads
        d_v = both // heads - (d_k - _rotated(layer))
        if d_k * heads != rows or both % heads or d_v < 1:
            raise InputError(
                f"{layer.module}: {rows} rows of queries and {both} of keys and values do not "
                f"fit {heads} heads: check heads="
            )
        return Sizes(heads, heads, d_k, d_v)

    def slices(self, layer: Layer, sizes: Sizes) -> Slices:
        """The products of the factors, and the shared rotated rows copied into every key."""
        h = sizes.heads
        query = layer.read(self.anchor)
        if self.compressed_queries:
            gain = layer.read("q_a_layernorm.weight")
            query = query @ (gain[:, None] * layer.read("q_a_proj.weight"))
        down, gain = layer.read(f"{_DOWN}.weight"), layer.read("kv_a_layernorm.weight")
        rank = gain.shape[0]
        both = layer.read(f"{_UP}.weight").reshape(h, -1, rank) @ (gain[:, None] * down[:rank])
        nope = both.shape[1] - sizes.d_v
        shared: Tensor = down[rank:].expand(h, -1, -1)
        found: Slices = {
            "q": query.reshape(h, sizes.d_k, -1),
            "k": torch.cat((both[:, :nope], shared), dim=1),
            "v": both[:, nope:],
        }
        layer.note("kv_group", "inferred", "every head has its own rows of kv_b_proj")
        return found | output_slices(layer, "o_proj", sizes, False)
