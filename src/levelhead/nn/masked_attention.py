"""What attention layers of this folder that replace `nn.MultiheadAttention` have in common.

Axes. Inside, everything is batch first: x [b, n, d], q [b, h, n, r], k [b, g, m, r] with g = h or
g = 1 (all heads read the same keys), v [b, h, m, d_v]; n tokens ask, m are looked at. Outside, axes
are those of `nn.MultiheadAttention`: [n, b, d], [b, n, d] if `batch_first`, or [n, d].

Two examples. A boolean mask is True where a key must not be seen, as for `nn.MultiheadAttention`
(and unlike `scaled_dot_product_attention`). A float mask is added to the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView

__all__ = ["MaskedAttention", "copy_trainability", "each_once"]


class MaskedAttention(nn.Module):
    """Everything of a drop-in for `nn.MultiheadAttention` but how q, k and v are made.

    A subclass has `project` and `view`. `head_dim` is d/h; logits are scaled by 1/√head_dim
    whatever the width of q and k.

    Raises InputError for sizes that do not fit, and for the options of `nn.MultiheadAttention`
    that are not supported: `add_bias_kv`, `add_zero_attn`, another `kdim` or `vdim`.
    """

    # torch's TransformerEncoderLayer has a fast path in evaluation that reads in_proj_weight past
    # the module; it asks for this first.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        batch_first: bool,
        options: dict[str, Any],
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        _check(type(self).__name__, embed_dim, num_heads, dropout, options)
        self.embed_dim = self.kdim = self.vdim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    @property
    def logit_scale(self) -> float:
        """1/√head_dim, the factor on q·k."""
        return 1 / math.sqrt(self.head_dim)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, h, n, r], k [b, g, m, r], v [b, h, m, d_v] of tokens [b, n, d] and [b, m, d]."""
        raise NotImplementedError

    def view(self) -> AttentionView:
        """The layer's weights in one convention, on autograd's tape."""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [n, b, d] and attention [b, n, m], as `nn.MultiheadAttention` returns them.

        Tokens are [n, b, d] ([b, n, d] if `batch_first`), or [n, d] without a batch. Attention is
        the mean over the heads, [b, h, n, m] with `average_attn_weights=False`, None with
        `need_weights=False`. `key_padding_mask` [b, m] and `attn_mask` [n, m] or [b·h, n, m] hide
        a key where they are True, or are added to the logits. `is_causal` says that `attn_mask`
        is the causal one. Raises InputError for masks of other shapes and for nested tensors.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise InputError(
                f"{type(self).__name__} got nested tensors; set use_nested_tensor=False on the "
                f"nn.TransformerEncoder around it, or pass padded tensors and a mask."
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = each_once(lambda x: x.unsqueeze(0), query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = each_once(lambda x: x.transpose(0, 1), query, key, value)
        q, k, v = self.project(query, key, value)
        k = k.expand(-1, self.num_heads, -1, -1)
        sizes = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        if is_causal and attn_mask is None:
            raise InputError(
                "is_causal only says what attn_mask is: pass the causal attn_mask too."
            )
        kernel = is_causal and key_padding_mask is None and not need_weights
        mask = None if kernel else _merged(attn_mask, key_padding_mask, sizes, q)
        out, weights = self._attend(q, k, v, mask, kernel, need_weights)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        if not weights:
            out = functional.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=self.logit_scale
            )
            return out, None
        logits = (q * self.logit_scale) @ k.mT
        logits = logits if mask is None else logits + mask
        attention = functional.dropout(torch.softmax(logits, dim=-1), dropout)
        return attention @ v, attention

    def _heads(self, rows: Tensor) -> Tensor:
        """[b, n, h·d_v] as [b, h, n, d_v]."""
        return rows.reshape(*rows.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _output(self) -> Tensor:
        """[h, d, d_v]."""
        weight = self.out_proj.weight
        return weight.reshape(self.embed_dim, self.num_heads, -1).permute(1, 0, 2)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def each_once(
    function: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`function` of the three; tensors that are one stay one, and are computed once."""
    one = function(query)
    two = one if key is query else function(key)
    three = one if value is query else two if value is key else function(value)
    return one, two, three


def copy_trainability(to: nn.Module, of: nn.Module, sources: Mapping[str, str]) -> None:
    """Make parameters of `to` require gradients as those of `of` do; out_proj's by its own name."""
    alike = {name: name for name in ("in_proj_bias", "out_proj.weight", "out_proj.bias")}
    own, given = dict(to.named_parameters()), dict(of.named_parameters())
    for name, source in (alike | dict(sources)).items():
        if name in own and source in given:
            own[name].requires_grad_(given[source].requires_grad)


def _merged(
    attn_mask: Tensor | None,
    padding: Tensor | None,
    sizes: tuple[int, int, int, int],
    like: Tensor,
) -> Tensor | None:
    """Both masks as one to add [b or 1, h or 1, n, m] in the dtype of `like`."""
    b, h, n, m = sizes
    merged = None
    if attn_mask is not None:
        allowed = ((n, m), (b * h, n, m))
        if tuple(attn_mask.shape) not in allowed:
            raise InputError(
                f"attn_mask {list(attn_mask.shape)} was given; expected [{n}, {m}] or "
                f"[{b * h}, {n}, {m}], one for each head of each sequence."
            )
        merged = _additive(attn_mask, like)
        merged = merged.view(b, h, n, m) if attn_mask.dim() == 3 else merged[None, None]
    if padding is not None:
        if tuple(padding.shape) != (b, m):
            raise InputError(
                f"key_padding_mask {list(padding.shape)} was given; expected [{b}, {m}]."
            )
        hidden = _additive(padding, like)[:, None, None, :]
        merged = hidden if merged is None else merged + hidden
    return merged


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        zeros = torch.zeros_like(mask, dtype=like.dtype)
        return zeros.masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise InputError(f"a mask of {mask.dtype} was given; expected bool or floating point.")
    return mask.to(like.dtype)


def _check(
    name: str, embed_dim: int, num_heads: int, dropout: float, options: dict[str, Any]
) -> None:
    if not is_whole(embed_dim) or not is_whole(num_heads) or embed_dim % num_heads:
        raise InputError(
            f"{name} got embed_dim={embed_dim!r} and num_heads={num_heads!r}; the first must be a "
            f"multiple of the second, both whole numbers ≥ 1."
        )
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"{name} got dropout={dropout!r}; give a share from 0 to below 1.")
    for option in ("add_bias_kv", "add_zero_attn"):
        if options.get(option):
            raise InputError(f"{name} adds no token to keys and values: leave out {option}.")
    for option in ("kdim", "vdim"):
        if options.get(option) not in (None, embed_dim):
            raise InputError(
                f"{name} got {option}={options[option]!r}, but shares its factors between Q, K and "
                f"V, which must read tokens of the same width {embed_dim}: project them first."
            )
