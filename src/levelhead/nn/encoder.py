"""A small transformer encoder for classes: of tokens or of image patches, from two heads up.

    x → embedding + positions → blocks of (norm, attention) and (norm, feed-forward) → readout

Axes. b examples, n tokens, d numbers a token, C classes. Inputs are token numbers [b, n] or patches
[b, n, p]; logits are [b, C] for one class an example, [b, n, C] for one a token. Attention is an
`nn.MultiheadAttention` in pre-norm blocks named as in `nn.TransformerEncoder`, so that everything
that reads or replaces such layers reads and replaces these.

Two examples. `Encoder(12, tokens=8, vocabulary=10, readout="each")` gives every one of 8 tokens
one of 12 classes. `Encoder(10, tokens=16, patch=4)` reads 16 patches of 2 × 2 points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError

__all__ = ["Encoder", "EncoderBlock", "Readout", "draw_heads", "image_patches"]

Readout = Literal["mean", "last", "each"]


class EncoderBlock(nn.Module):
    """x + attention(norm1 x), then + linear2 gelu(linear1 norm2 x): [b, n, d] → [b, n, d]."""

    norm_first = True

    def __init__(self, width: int, heads: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.self_attn = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, *, maps: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [b, n, d] and, with `maps`, attention [b, h, n, n]; `padding` [b, n] is hidden."""
        seen = self.norm1(x)
        written, found = self.self_attn(
            seen,
            seen,
            seen,
            key_padding_mask=padding,
            need_weights=maps,
            average_attn_weights=False,
        )
        x = x + written
        return x + self.linear2(functional.gelu(self.linear1(self.norm2(x)))), found


class Encoder(nn.Module):
    """Token numbers [b, n] or patches [b, n, p] → logits [b, C], or [b, n, C] of each token.

    Args:
        classes: C.
        tokens: n at most.
        vocabulary, patch: number of tokens, or numbers p of a patch; give one of them.
        layers, heads, width, hidden: sizes; hidden is 2·width by default.
        readout: "mean" over tokens, the "last" one, or "each".
        padding: token number that is not looked at and not averaged; None: there is none.
        dropout: of attention.

    Raises InputError for sizes that do not fit one another, and in `forward` for longer inputs.

    >>> model = Encoder(3, tokens=6, vocabulary=10, layers=1)
    >>> model(torch.zeros(2, 6, dtype=torch.long)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        classes: int,
        *,
        tokens: int,
        vocabulary: int | None = None,
        patch: int | None = None,
        layers: int = 2,
        heads: int = 2,
        width: int = 32,
        hidden: int | None = None,
        readout: Readout = "mean",
        padding: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"classes": classes, "tokens": tokens, "layers": layers, "heads": heads}
        for name, size in (sizes | {"width": width}).items():
            if not is_whole(size):
                raise InputError(f"{name}={size!r} was given; expected a whole number ≥ 1")
        if (vocabulary is None) == (patch is None):
            raise InputError("give either vocabulary (of tokens) or patch (numbers of a patch)")
        if width % heads:
            raise InputError(f"width {width} is no multiple of heads {heads}")
        if readout not in ("mean", "last", "each"):
            raise InputError(f"readout {readout!r} was given; expected 'mean', 'last' or 'each'")
        self.readout, self.padding = readout, padding
        self.embedding: nn.Module
        if vocabulary is not None:
            self.embedding = nn.Embedding(vocabulary, width)
        else:
            assert patch is not None
            self.embedding = nn.Linear(patch, width)
        self.positions = nn.Parameter(0.5 * torch.randn(tokens, width))
        hidden = 2 * width if hidden is None else hidden
        self.layers = nn.ModuleList(
            EncoderBlock(width, heads, hidden, dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; see the class."""
        return self.from_embedded(self.embed(x), self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor | None:
        """Which tokens are padding [b, n]; None if none can be."""
        return None if self.padding is None or x.ndim != 2 else x == self.padding

    def embed(self, x: Tensor) -> Tensor:
        """Embeddings with positions, [b, n, d]: what an attack on text may move."""
        if x.shape[1] > len(self.positions):
            raise InputError(
                f"{x.shape[1]} tokens were given; this encoder was made for {len(self.positions)}"
            )
        embedded: Tensor = self.embedding(x) + self.positions[: x.shape[1]]
        return embedded

    def from_embedded(self, embedded: Tensor, padding: Tensor | None = None) -> Tensor:
        """Logits of embeddings [b, n, d]; `padding` [b, n] is True for tokens that do not count."""
        x = embedded
        for block in self._blocks():
            x, _ = block(x, padding)
        logits: Tensor = self.head(self.norm(self._read(x, padding)))
        return logits

    def maps(self, x: Tensor) -> list[Tensor]:
        """Attention of each layer, [b, h, n, n]; rows sum to one."""
        padding, at = self.hidden(x), self.embed(x)
        found = []
        for block in self._blocks():
            at, weights = block(at, padding, maps=True)
            assert weights is not None
            found.append(weights)
        return found

    def _read(self, x: Tensor, padding: Tensor | None) -> Tensor:
        if self.readout == "each":
            return x
        if self.readout == "last":
            return x[:, -1]
        if padding is None:
            return x.mean(1)
        kept = (~padding).to(x.dtype)[..., None]
        return (x * kept).sum(1) / kept.sum(1).clamp_min(1)

    def _blocks(self) -> Iterator[EncoderBlock]:
        for block in self.layers:
            assert isinstance(block, EncoderBlock)
            yield block


def draw_heads(model: nn.Module, *, scale: float = 1.0, spread: float = 1.0) -> None:
    """Change the start of every `nn.MultiheadAttention` of a model, in place.

    Weights of q, k, v and o are multiplied by `scale`, and every head is pulled towards the first:
    head_i ← head_0 + spread·(head_i - head_0), so that spread 0 makes copies and 1 leaves them.
    Raises InputError for a scale or spread that is negative or not finite, and without such layers.

    >>> layer = nn.MultiheadAttention(8, 2, bias=False)
    >>> draw_heads(layer, spread=0.0)
    >>> bool((layer.in_proj_weight[:4] == layer.in_proj_weight[4:8]).all())
    True
    """
    for name, value in {"scale": scale, "spread": spread}.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name}={value!r} was given; expected a number of at least 0")
    found = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    if not found:
        raise InputError(
            f"{type(model).__name__} has no nn.MultiheadAttention whose start could be changed"
        )
    with torch.no_grad():
        for layer in found:
            d, h = layer.embed_dim, layer.num_heads
            packed = layer.in_proj_weight.view(3, h, d // h, d)
            output = layer.out_proj.weight.view(d, h, d // h)
            for heads, axis in ((packed, 1), (output, 1)):
                first = heads.narrow(axis, 0, 1).clone()
                heads.copy_(scale * (first + spread * (heads - first)))


def image_patches(images: Tensor, size: int) -> Tensor:
    """Images [b, height, width] or [b, channels, height, width] as patches [b, n, size²·channels].

    Raises InputError where `size` does not divide height and width.

    >>> image_patches(torch.arange(16.0).view(1, 4, 4), 2)[0, 1]
    tensor([2., 3., 6., 7.])
    """
    if images.ndim not in (3, 4):
        shape = list(images.shape)
        raise InputError(f"images {shape} were given; expected [b, (c,) height, width]")
    height, width = images.shape[-2:]
    if not is_whole(size) or height % size or width % size:
        raise InputError(f"patches of {size!r} do not divide images of {height} × {width}")
    if images.ndim == 3:
        images = images[:, None]
    b, c = images.shape[:2]
    cut = images.reshape(b, c, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * size * size)
