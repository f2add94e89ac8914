"""Attention whose heads share factors: the head tensor of Q, K and V in Tucker form.

    W[i, a, m, c] = Σ_{αβμ} core[α, β, μ, c] U_h[i, α] U_k[a, β] U_d[m, μ],   c = Q, K, V

Axes. i runs over the h heads, a over the d_k = d/h numbers of a head, m over the d numbers of a
token; W [h, d_k, d, 3] is the raw head tensor (`AttentionView.head_tensor`), the core is
[R_h, R_k, R_d, 3]. Tokens are projected to R_d numbers once, then by the core to queries, keys and
values.

Two examples. Ranks (h, d_k, d) can be any layer there is. R_h = 1 makes all heads multiples of one,
with R_k(R_d·3) + … parameters in place of 3·d².

The form is that of the *raw* tensor: what a truncation keeps depends on the inner bases of the
heads, which the layer's function does not. `training.constraints.balance_gauge` gives every head
its balanced basis first. Collaborative attention (`nn.collaborative`) shares factors in a form that
does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.nn.masked_attention import MaskedAttention, copy_trainability, each_once
from levelhead.tensors.tucker import Method, tucker
from levelhead.weights.attention_view import AttentionView

__all__ = ["HeadCoreAttention", "Ranks", "head_tensor_of"]

Ranks = Sequence[int | float] | None


class HeadCoreAttention(MaskedAttention):
    """A drop-in for `nn.MultiheadAttention` with an explicit low-rank head core.

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as there.
        ranks: (R_h, R_k, R_d), whole numbers up to (h, d_k, d) or shares of them in (0, 1];
            None: all of them.
        add_bias_kv, add_zero_attn, kdim, vdim: refused unless they say nothing new.

    Parameters: `head_factor` [h, R_h], `inner_factor` [d_k, R_k], `model_factor` [d, R_d], `core`
    [R_h, R_k, R_d, 3], `in_proj_bias` [3d], `out_proj` as in `nn.MultiheadAttention`. A new layer
    has orthonormal factors, and a normal core of the size that gives the entries of W the variance
    they have in a new `nn.MultiheadAttention`.

    Raises InputError for ranks out of range and options that are not supported.

    >>> layer = HeadCoreAttention(8, 2, ranks=(1, 4, 6), batch_first=True)
    >>> x = torch.randn(3, 5, 8)
    >>> out, weights = layer(x, x, x)
    >>> list(out.shape), list(weights.shape), layer.ranks
    ([3, 5, 8], [3, 5, 5], (1, 4, 6))
    >>> layer.shared_parameters, layer.plain_parameters
    (138, 192)
    """

    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        ranks: Ranks = None,
    ) -> None:
        options = {
            "add_bias_kv": add_bias_kv,
            "add_zero_attn": add_zero_attn,
            "kdim": kdim,
            "vdim": vdim,
        }
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first, options, device, dtype)
        shape = (num_heads, self.head_dim, embed_dim)
        self.ranks = _whole_ranks(ranks, shape)
        kind = {"device": device, "dtype": dtype}
        factors = [
            nn.Parameter(torch.empty(n, r, **kind)) for n, r in zip(shape, self.ranks, strict=True)
        ]
        self.head_factor, self.inner_factor, self.model_factor = factors
        self.core = nn.Parameter(torch.empty(*self.ranks, 3, **kind))
        if bias:
            self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, **kind))
        else:
            self.register_parameter("in_proj_bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors and core anew (see the class)."""
        for factor in (self.head_factor, self.inner_factor, self.model_factor):
            nn.init.orthogonal_(factor)
        # Entries of W: variance 1/(2d), as xavier_uniform_ gives an in_proj_weight [3d, d].
        entries = self.num_heads * self.head_dim * self.embed_dim
        spread = math.sqrt(entries / math.prod(self.ranks) / (2 * self.embed_dim))
        nn.init.normal_(self.core, std=spread)

    @classmethod
    def from_attention(
        cls, attention: nn.MultiheadAttention, ranks: Ranks = None, *, method: Method = "hooi"
    ) -> HeadCoreAttention:
        """The layer closest to `attention` with these ranks: Tucker of its head tensor.

        At full ranks it computes the same. Biases and out_proj are copied; the layer is as
        trainable, and in the same mode, as `attention`. `method`: see `tensors.tucker`. Raises
        InputError for what has no head tensor: other widths of keys or values, an added token.
        """
        tensor = head_tensor_of(cls.__name__, attention)
        layer = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.dropout,
            attention.in_proj_bias is not None,
            batch_first=attention.batch_first,
            device=tensor.device,
            dtype=tensor.dtype,
            ranks=ranks,
        )
        fit = tucker(tensor, (*layer.ranks, 3), method=method)
        with torch.no_grad():
            layer.core.copy_(fit.core @ fit.factors[3].mT)
            own = (layer.head_factor, layer.inner_factor, layer.model_factor)
            for factor, found in zip(own, fit.factors, strict=False):
                factor.copy_(found)
            if layer.in_proj_bias is not None:
                layer.in_proj_bias.copy_(attention.in_proj_bias)
            layer.out_proj.load_state_dict(attention.out_proj.state_dict())
        shared = ("head_factor", "inner_factor", "model_factor", "core")
        copy_trainability(layer, attention, dict.fromkeys(shared, "in_proj_weight"))
        return layer.train(attention.training)

    def to_attention(self) -> nn.MultiheadAttention:
        """The same layer as a plain `nn.MultiheadAttention`, in new parameters."""
        plain = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.in_proj_bias is not None,
            batch_first=self.batch_first,
            device=self.core.device,
            dtype=self.core.dtype,
        )
        with torch.no_grad():
            for name, value in self.plain_weights().items():
                plain.get_parameter(name).copy_(value)
        copy_trainability(plain, self, {"in_proj_weight": "core"})
        return plain.train(self.training)

    # ── sizes ──

    @property
    def shared_parameters(self) -> int:
        """Numbers in factors and core: R_h h + R_k d_k + R_d d + 3 R_h R_k R_d."""
        parts = (self.head_factor, self.inner_factor, self.model_factor, self.core)
        return sum(part.numel() for part in parts)

    @property
    def plain_parameters(self) -> int:
        """Numbers in the weights they stand for: 3d²."""
        return 3 * self.embed_dim**2

    # ── weights ──

    def head_tensor(self) -> Tensor:
        """W [h, d_k, d, 3], multiplied out; differentiable."""
        return torch.einsum("hakc,mk->hamc", self._mixed(), self.model_factor)

    def plain_weights(self) -> dict[str, Tensor]:
        """The weights under the names of `nn.MultiheadAttention`, on autograd's tape.

        >>> sorted(HeadCoreAttention(8, 2, bias=False).plain_weights())
        ['in_proj_weight', 'out_proj.weight']
        """
        packed = self.head_tensor().permute(3, 0, 1, 2).reshape(-1, self.embed_dim)
        found = {"in_proj_weight": packed, "out_proj.weight": self.out_proj.weight}
        if self.in_proj_bias is not None:
            found |= {"in_proj_bias": self.in_proj_bias, "out_proj.bias": self.out_proj.bias}
        return found

    def view(self) -> AttentionView:
        """The layer's weights as an AttentionView; gradients reach factors and core.

        >>> HeadCoreAttention(8, 2, ranks=(1, 2, 3)).view()
        AttentionView('head_core': 2 heads, 2 groups, d_k 4, d_v 4, d 8, full, position none)
        """
        q, k, v = self.head_tensor().unbind(-1)
        biases: dict[str, Any] = {}
        if self.in_proj_bias is not None:
            parts = self.in_proj_bias.reshape(3, self.num_heads, self.head_dim)
            biases = dict(zip(("q_bias", "k_bias", "v_bias"), parts, strict=True))
            biases["o_bias"] = self.out_proj.bias
        return AttentionView(
            q=q, k=k, v=v, o=self._output(), **biases, name="head_core", family="head_core"
        )

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [b, h, n, d_k] of tokens [b, n, d], through R_d numbers a token."""
        short = each_once(lambda x: x @ self.model_factor, query, key, value)
        mixed = self._mixed().permute(3, 0, 1, 2).flatten(1, 2)
        biases: Any = (None,) * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        q, k, v = (
            self._heads(functional.linear(x, weight, bias))
            for x, weight, bias in zip(short, mixed, biases, strict=True)
        )
        return q, k, v

    def _mixed(self) -> Tensor:
        """core ×_h U_h ×_k U_k: [h, d_k, R_d, 3]."""
        inner = torch.einsum("abmc,kb->akmc", self.core, self.inner_factor)
        return torch.einsum("akmc,ha->hkmc", inner, self.head_factor)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.ranks}"


def head_tensor_of(name: str, attention: nn.Module) -> Tensor:
    """The raw head tensor [h, d_k, d, 3] of an `nn.MultiheadAttention`, detached.

    Raises InputError, in the name of `name`, for any other module and for layers without one.
    """
    if not isinstance(attention, nn.MultiheadAttention):
        raise InputError(
            f"{name}.from_attention got a {type(attention).__name__}; it starts from an "
            f"nn.MultiheadAttention."
        )
    if not attention._qkv_same_embed_dim:
        raise InputError(
            f"{name} shares factors between Q, K and V, but this layer reads keys and values of "
            f"widths {attention.kdim} and {attention.vdim} beside queries of {attention.embed_dim}."
        )
    if attention.bias_k is not None or attention.add_zero_attn:
        raise InputError(
            f"{name} adds no token to keys and values, as this layer does (add_bias_kv or "
            f"add_zero_attn): it cannot be replaced."
        )
    packed = attention.in_proj_weight.detach()
    heads = packed.reshape(3, attention.num_heads, attention.head_dim, attention.embed_dim)
    return heads.permute(1, 2, 3, 0)


def _whole_ranks(ranks: Ranks, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    if ranks is None:
        return shape
    wanted = list(ranks)
    found = [
        max(1, round(r * n)) if isinstance(r, float) and 0.0 < r <= 1.0 else r
        for r, n in zip(wanted, shape, strict=False)
    ]
    if len(wanted) != 3 or not all(
        is_whole(r) and r <= n for r, n in zip(found, shape, strict=True)
    ):
        raise InputError(
            f"ranks {tuple(wanted)} were given; expected (R_h, R_k, R_d): whole numbers from 1 to "
            f"{shape}, or shares of these as floats in (0, 1]."
        )
    a, b, c = (int(r) for r in found)
    return a, b, c
