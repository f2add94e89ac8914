"""How a layer's q, k, v and o lie in stored tensors, and the slices that take them out.

Axes. A Linear is stored [rows, width], rows = heads · width of a head; "input-major" storage
(GPT-2's Conv1D, plain matrices that multiply from the right) is [width, rows]. Slices are views of
what is stored wherever that is possible, so gradients flow back into it.

Two examples. `Separate("q", "k", "v", "o")` reads q.weight [h·d_k, d] as [h, d_k, d], and
o.weight [d_out, h·d_v] as [h, d_out, d_v]. `Fused("qkv", "o", order="grouped")` reads [rows, d] as
[g, h/g + 2, d_k, d]: the queries of a group, its key, its value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.weights.layer import GIVE_HEADS, GIVE_KV_HEADS, Layer, Sizes

__all__ = [
    "Fused",
    "PackedProjection",
    "Plain",
    "Separate",
    "Slices",
    "Store",
    "bias_of",
    "weight_of",
]

Slices = dict[str, Tensor | None]
Clues = tuple[tuple[str, int, str], ...]


class Store(Protocol):
    """A way of storing a layer."""

    @property
    def anchor(self) -> str:
        """The parameter by whose name a layer is found."""

    def complete(self, layer: Layer) -> str | None:
        """None if everything needed is there, else what is missing, in words."""

    def sizes(self, layer: Layer, kv_heads: int | None, clues: Clues) -> Sizes:
        """Heads and widths; raises InputError where shapes and settings do not say them."""

    def slices(self, layer: Layer, sizes: Sizes) -> Slices:
        """q, k, v, o and their biases in the view's layout."""


def weight_of(name: str) -> str:
    """The matrix of a Linear called `name`, or `name` itself if it is a parameter's own name.

    >>> weight_of("qkv"), weight_of("in_proj_weight")
    ('qkv.weight', 'in_proj_weight')
    """
    return name if name.endswith("weight") else f"{name}.weight"


def bias_of(name: str) -> str:
    """The bias beside `weight_of(name)`.

    >>> bias_of("qkv"), bias_of("in_proj_weight")
    ('qkv.bias', 'in_proj_bias')
    """
    return f"{weight_of(name).removesuffix('weight')}bias"


def _missing(layer: Layer, names: tuple[str, ...], rank: int = 2) -> str | None:
    for name in names:
        if not layer.has(name):
            return f"it has no {layer.path(name)}"
        if len(layer.shape(name)) != rank or 0 in layer.shape(name):
            return f"{layer.path(name)} is {list(layer.shape(name))}, not a matrix"
    return None


def _blocks(rows: Tensor, count: int, width: int) -> Tensor:
    return rows.reshape(count, width, *rows.shape[1:])


def _output(matrix: Tensor, sizes: Sizes) -> Tensor:
    """[d_out, h·d_v] as [h, d_out, d_v]."""
    return matrix.reshape(matrix.shape[0], sizes.heads, sizes.d_v).permute(1, 0, 2)


def _groups(layer: Layer, rows: int, d_k: int, kv_heads: int | None) -> int:
    """g from `rows` = g·d_k of keys; a config that says otherwise is an error."""
    groups = rows // d_k
    if groups * d_k != rows or (kv_heads is not None and kv_heads != groups):
        said = "" if kv_heads is None else f" in {kv_heads} groups"
        raise InputError(
            f"{layer.module}: {rows} rows of keys do not fit heads of width {d_k}{said}: "
            f"check the config, or {GIVE_HEADS}"
        )
    layer.note("kv_group", "inferred", "shapes of q and k, groups of neighbouring heads")
    return groups


@dataclass(frozen=True)
class Separate:
    """Four Linears q, k, v [rows, d] and o [d_out, h·d_v], with or without biases.

    `o` None means that the layer ends with its heads' outputs side by side: o is then the
    identity's blocks. `input_major` for [d, rows] storage.
    """

    q: str
    k: str
    v: str
    o: str | None
    input_major: bool = False

    @property
    def anchor(self) -> str:
        """q.weight."""
        return weight_of(self.q)

    def complete(self, layer: Layer) -> str | None:
        """All weight matrices are there, and as many queries as the output projection reads."""
        names = [self.q, self.k, self.v, *([self.o] if self.o else [])]
        missing = _missing(layer, tuple(weight_of(n) for n in names))
        if missing or self.o is None:
            return missing
        q, k, v = self._rows(layer)
        read = layer.shape(weight_of(self.o))[0 if self.input_major else 1]
        return "queries are gated, which no row reads" if k == v and q == 2 * read else None

    def _rows(self, layer: Layer) -> tuple[int, int, int]:
        """How many rows q, k and v have."""
        axis = 1 if self.input_major else 0
        q, k, v = (layer.shape(weight_of(n))[axis] for n in (self.q, self.k, self.v))
        return q, k, v

    def sizes(self, layer: Layer, kv_heads: int | None, clues: Clues) -> Sizes:
        """h from settings or clues, g and d_v from the rows of k and v."""
        rows = self._rows(layer)
        heads, d_k = layer.heads(rows[0], clues)
        groups = _groups(layer, rows[1], d_k, kv_heads)
        if rows[2] % groups:
            raise InputError(f"{layer.module}: {rows[2]} rows of values for {groups} groups")
        return Sizes(heads, groups, d_k, rows[2] // groups)

    def slices(self, layer: Layer, sizes: Sizes) -> Slices:
        """The four matrices cut into heads."""
        found: Slices = {}
        widths = {"q": (sizes.heads, sizes.d_k), "k": (sizes.groups, sizes.d_k)}
        widths["v"] = (sizes.groups, sizes.d_v)
        for role, (count, width) in widths.items():
            name = getattr(self, role)
            matrix = layer.read(weight_of(name))
            found[role] = _blocks(matrix.mT if self.input_major else matrix, count, width)
            bias = layer.read_if(bias_of(name))
            found[f"{role}_bias"] = None if bias is None else _blocks(bias, count, width)
        return found | output_slices(layer, self.o, sizes, self.input_major)


@dataclass(frozen=True)
class Fused:
    """One Linear for q, k and v and one for o.

    order: "stacked": all queries, all keys, all values; "grouped": for each group its queries,
    its key, its value (per head where g = h).
    """

    qkv: str
    o: str | None
    order: Literal["stacked", "grouped"] = "stacked"
    input_major: bool = False

    @property
    def anchor(self) -> str:
        """qkv.weight."""
        return weight_of(self.qkv)

    def complete(self, layer: Layer) -> str | None:
        """Both weight matrices are there, and the layer reads as many numbers as it writes.

        That tells [3d, d] from [d, 3d] storage under the same names.
        """
        missing = _missing(layer, (self.anchor, *([weight_of(self.o)] if self.o else [])))
        if missing or self.o is None:
            return missing
        shape, out = layer.shape(self.anchor), layer.shape(weight_of(self.o))
        width, written = (shape[0], out[1]) if self.input_major else (shape[1], out[0])
        if width != written:
            return f"{layer.path(self.anchor)} {list(shape)} reads {width} numbers, not {written}"
        return None

    def sizes(self, layer: Layer, kv_heads: int | None, clues: Clues) -> Sizes:
        """g is `kv_heads`, or h where nothing else is said."""
        rows = layer.shape(self.anchor)[1 if self.input_major else 0]
        return fused_sizes(layer, rows, kv_heads, clues)

    def slices(self, layer: Layer, sizes: Sizes) -> Slices:
        """The fused matrix cut into its three parts, each into heads."""
        matrix = layer.read(self.anchor)
        found = self._parts(matrix.mT if self.input_major else matrix, sizes, "")
        if (bias := layer.read_if(bias_of(self.qkv))) is not None:
            found |= self._parts(bias, sizes, "_bias")
        beside = self.qkv.rpartition(".")[0]
        for role, count in (("q", sizes.heads), ("k", sizes.groups), ("v", sizes.groups)):
            own = f"{beside}.{role}_bias" if beside else f"{role}_bias"
            if bias is None and layer.has(own):  # BEiT in timm, DeBERTa: none for keys
                found[f"{role}_bias"] = _blocks(layer.read(own), count, sizes.d_k)
        return found | output_slices(layer, self.o, sizes, self.input_major)

    def _parts(self, rows: Tensor, sizes: Sizes, suffix: str) -> Slices:
        h, g, width = sizes.heads, sizes.groups, sizes.d_k
        if self.order == "stacked":
            parts = torch.split(rows, [h * width, g * width, g * width])
            counts = (h, g, g)
            cut = [_blocks(p, n, width) for p, n in zip(parts, counts, strict=True)]
        else:
            blocks = rows.reshape(g, h // g + 2, width, *rows.shape[1:])
            q = blocks[:, :-2].reshape(h, width, *rows.shape[1:])
            cut = [q, blocks[:, -2], blocks[:, -1]]
        return {f"{role}{suffix}": part for role, part in zip("qkv", cut, strict=True)}


@dataclass(frozen=True)
class PackedProjection:
    """`nn.MultiheadAttention`: in_proj_weight [3d, d], or q/k/v_proj_weight where widths differ."""

    separate: bool = False

    @property
    def anchor(self) -> str:
        """in_proj_weight or q_proj_weight."""
        return "q_proj_weight" if self.separate else "in_proj_weight"

    def _names(self) -> tuple[str, ...]:
        if self.separate:
            return ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return ("in_proj_weight",)

    def complete(self, layer: Layer) -> str | None:
        """All matrices are there, and no learned extra token."""
        if layer.has("bias_k"):
            return "it adds a learned token (bias_k, bias_v) to keys and values"
        return _missing(layer, (*self._names(), "out_proj.weight"))

    def sizes(self, layer: Layer, kv_heads: int | None, clues: Clues) -> Sizes:
        """All heads have keys and values of their own."""
        heads, d_k = layer.heads(layer.shape("out_proj.weight")[0], clues)
        layer.note("kv_group", "inferred", "nn.MultiheadAttention has no groups")
        return Sizes(heads, heads, d_k, d_k)

    def slices(self, layer: Layer, sizes: Sizes) -> Slices:
        """The three matrices cut into heads."""
        if self.separate:
            parts = [layer.read(name) for name in self._names()]
        else:
            parts = list(layer.read(self.anchor).chunk(3))
        found: Slices = {
            r: _blocks(p, sizes.heads, sizes.d_k) for r, p in zip("qkv", parts, strict=True)
        }
        if (bias := layer.read_if("in_proj_bias")) is not None:
            for role, part in zip("qkv", bias.chunk(3), strict=True):
                found[f"{role}_bias"] = _blocks(part, sizes.heads, sizes.d_k)
        return found | output_slices(layer, "out_proj", sizes, False)


@dataclass(frozen=True)
class Plain:
    """Four bare matrices that multiply from the right: q, k, v [d, width], o [h·d_v, d_out].

    `k` missing means that keys are queries (tied), `o` missing that values are written as they
    are. Biases are called `<name>_bias`.
    """

    q: str
    k: str
    v: str
    o: str
    heads: int = 1

    @property
    def anchor(self) -> str:
        """The query matrix."""
        return self.q

    def complete(self, layer: Layer) -> str | None:
        """q and v are there."""
        return _missing(layer, (self.q, self.v))

    def sizes(self, layer: Layer, kv_heads: int | None, clues: Clues) -> Sizes:
        """As many heads as the plan says; widths from shapes."""
        layer.family_says("q", f"{self.heads} head")
        rows, values = layer.shape(self.q)[1], layer.shape(self.v)[1]
        return Sizes(self.heads, self.heads, rows // self.heads, values // self.heads)

    def slices(self, layer: Layer, sizes: Sizes) -> Slices:
        """The transposed matrices cut into heads."""
        key = self.k if layer.has(self.k) else self.q
        found: Slices = {}
        for role, name, width in (
            ("q", self.q, sizes.d_k),
            ("k", key, sizes.d_k),
            ("v", self.v, sizes.d_v),
        ):
            found[role] = _blocks(layer.read(name).mT, self.heads, width)
            bias = layer.read_if(f"{name}_bias")
            found[f"{role}_bias"] = None if bias is None else _blocks(bias, self.heads, width)
        if not layer.has(self.o):
            return found | output_slices(layer, None, sizes, False)
        found["o"] = _output(layer.read(self.o).mT, sizes)
        found["o_bias"] = layer.read_if(f"{self.o}_bias")
        return found


def fused_sizes(layer: Layer, rows: int, kv_heads: int | None, clues: Clues) -> Sizes:
    """Sizes of `rows` = (h + 2g)·d_k fused rows; without `kv_heads` g = h."""
    heads = layer.settings.whole("heads")
    if kv_heads is None:
        if rows % 3:
            raise InputError(
                f"{layer.module}: {rows} fused rows are not queries, keys and values of equal "
                f"number: {GIVE_KV_HEADS}"
            )
        count, width = layer.heads(rows // 3, clues)
        layer.family_says("kv_group", "every head has its own key and value")
        return Sizes(count, count, width, width)
    if heads is None:
        raise InputError(
            f"{layer.module}: shapes alone do not say into how many heads {rows} fused rows fall: "
            f"{GIVE_HEADS}"
        )
    layer.origins["q"] = heads[1]
    width = rows // (heads[0] + 2 * kv_heads)
    if width < 1 or width * (heads[0] + 2 * kv_heads) != rows or heads[0] % kv_heads:
        raise InputError(
            f"{layer.module}: {rows} fused rows cannot be {heads[0]} heads and {kv_heads} "
            "key/value groups: check heads= and kv_heads="
        )
    return Sizes(heads[0], kv_heads, width, width)


def output_slices(layer: Layer, name: str | None, sizes: Sizes, input_major: bool) -> Slices:
    """o [h, d_out, d_v] and its bias; `name` None, no output projection: the identity's blocks."""
    if name is None:
        layer.note("o", "inferred", "there is no output projection: the identity")
        return {"o": _output(torch.eye(sizes.heads * sizes.d_v), sizes), "o_bias": None}
    matrix = layer.read(weight_of(name))
    matrix = matrix.mT if input_major else matrix
    if matrix.shape[1] != sizes.heads * sizes.d_v:
        raise InputError(
            f"{layer.module}: the output projection reads {matrix.shape[1]} numbers, but "
            f"{sizes.heads} heads write {sizes.d_v} each: check heads="
        )
    return {"o": _output(matrix, sizes), "o_bias": layer.read_if(bias_of(name))}
