"""llama2.c's .bin files: a header of seven int32 and float32 weights in a fixed order.

Layout after the header. Version 0 (no magic, 28 bytes): embedding, then for all layers together
attention norm, wq, wk, wv, wo, ffn norm, w1, w2, w3; then the final norm, cos and sin tables, and
the classifier unless it is shared (which a negative vocabulary size denies). Version 1 (magic
"ak42", 256 bytes): the norms, the embedding, wq, wk, wv, wo, w1, w2, w3, the classifier.
Queries and keys are for interleaved rotary planes, as in Meta's release. Source: karpathy/llama2.c,
export.py.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from levelhead.weights.stored import BROKEN, Weights, unreadable

__all__ = ["is_llama2c", "open_llama2c"]

_MAGIC = 0x616B3432
_NAMES = {
    "wq": "attention.wq",
    "wk": "attention.wk",
    "wv": "attention.wv",
    "wo": "attention.wo",
    "attention_norm": "attention_norm",
    "ffn_norm": "ffn_norm",
    "w1": "feed_forward.w1",
    "w2": "feed_forward.w2",
    "w3": "feed_forward.w3",
}


@dataclass(frozen=True)
class _Header:
    version: int
    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    length: int
    shared: bool

    @property
    def start(self) -> int:
        return 28 if self.version == 0 else 256

    def sensible(self) -> bool:
        sizes = (self.dim, self.hidden, self.layers, self.heads, self.kv_heads, self.length)
        if not all(0 < size < 2**24 for size in (*sizes, self.vocabulary)):
            return False
        return self.dim % self.heads == 0 and self.heads % self.kv_heads == 0

    def blocks(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape) of everything in the file, in its order."""
        d, n, f, v = self.dim, self.layers, self.hidden, self.vocabulary
        half = d // self.heads // 2
        source = d // self.heads * self.kv_heads
        embedding = ("tok_embeddings", (v, d))
        attention = [("wq", (n, d, d)), ("wk", (n, source, d)), ("wv", (n, source, d))]
        attention.append(("wo", (n, d, d)))
        feed = [("w1", (n, f, d)), ("w2", (n, d, f)), ("w3", (n, f, d))]
        norms = [("attention_norm", (n, d)), ("ffn_norm", (n, d)), ("norm", (d,))]
        classifier: list[tuple[str, tuple[int, ...]]] = []
        if not self.shared:
            classifier.append(("output", (v, d)))
        if self.version:
            return [*norms, embedding, *attention, *feed, *classifier]
        tables = [("cos", (self.length, half)), ("sin", (self.length, half))]
        return [embedding, norms[0], *attention, norms[1], *feed, norms[2], *tables, *classifier]

    def numbers(self) -> int:
        return sum(math.prod(shape) for _, shape in self.blocks())


def _header(path: Path) -> _Header | None:
    """The header, None if the file is none of llama2.c's."""
    with path.open("rb") as file:
        start = file.read(37)
    if len(start) < 28:
        return None
    magic, version = struct.unpack("<Ii", start[:8])
    if magic == _MAGIC and len(start) == 37:
        d, f, n, h, g, v, length = struct.unpack("<7i", start[8:36])
        return _Header(version, d, f, n, h, g, v, length, shared=bool(start[36]))
    d, f, n, h, g, v, length = struct.unpack("<7i", start[:28])
    header = _Header(0, d, f, n, h, g, abs(v), length, shared=v > 0)
    # Without a magic number sizes tell: of the model, and of a file that is whole or was cut off.
    fits = header.sensible() and 28 + 4 * header.numbers() >= path.stat().st_size
    return header if fits else None


def is_llama2c(path: Path) -> bool:
    """Whether the file is one of llama2.c's, by its magic number or by the sizes in its header.

    A file that is shorter than its header says counts, so that it can be called truncated.
    """
    try:
        return _header(path) is not None
    except BROKEN:
        return False


def open_llama2c(path: Path) -> Weights:
    """The weights under the names of Meta's release, and the header as a config.

    Raises StoredFileError for a truncated file or a quantised one (version 2).
    """
    try:
        header = _header(path)
        size = path.stat().st_size
    except BROKEN as error:
        raise unreadable(path, error) from error
    if header is None or not header.sensible():
        raise unreadable(path, "its header is not one of llama2.c's")
    if header.version not in (0, 1):
        raise unreadable(
            path, f"llama2.c version {header.version} is quantised", "export version 0 or 1"
        )
    if size < header.start + 4 * header.numbers():
        whole = header.start + 4 * header.numbers()
        raise unreadable(
            path,
            f"a llama2.c file that is truncated: {size} bytes, but its header announces {whole}",
        )
    places, at = {}, header.start
    for block, shape in header.blocks():
        for name, inner in _named(block, shape):
            places[name] = (at, inner)
            at += 4 * math.prod(inner)
    config = {
        "model_type": "llama2.c",
        "dim": header.dim,
        "n_heads": header.heads,
        "n_kv_heads": header.kv_heads,
        "n_layers": header.layers,
        "vocab_size": header.vocabulary,
        "max_position_embeddings": header.length,
    }

    def get(name: str) -> Tensor:
        start, shape = places[name]
        try:
            numbers = np.fromfile(path, dtype="<f4", count=math.prod(shape), offset=start)
            return torch.from_numpy(numbers.astype(np.float32, copy=False).reshape(shape))
        except BROKEN as error:
            raise unreadable(path, f"tensor {name}: {error}") from error

    shapes = {name: shape for name, (_, shape) in places.items()}
    return Weights(str(path), "llama2.c", shapes, get, config, "header")


def _named(block: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors of one block: one per layer where it holds all layers'."""
    if block not in _NAMES:
        return [(f"{block}.weight", shape)]
    return [(f"layers.{i}.{_NAMES[block]}.weight", shape[1:]) for i in range(shape[0])]
