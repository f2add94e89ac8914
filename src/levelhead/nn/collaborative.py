"""Collaborative attention: heads share queries and keys and weigh their dimensions differently.

    B_i = W̃_Qᵀ diag(m_i) W̃_K,    logits_ab = (W̃_Q x_a ∘ m_i + b_i)ᵀ W̃_K x_b/√d_k

(Cordonnier, Loukas & Jaggi, arXiv 2006.16362, in row layout). Values stay as they are.

Axes. Row layout as in `AttentionView`: W̃_Q, W̃_K [D, d], m [h, D], b [h, D]; D is the number of
shared dimensions, d_k = d/h that of a head of `nn.MultiheadAttention`, whose scale is kept.

Two examples. D = h·d_k with m_i the indicator of head i's block is any multi-head attention. A
small D is multi-query attention with a gain for each head and dimension.

It is a head core whose factors are fixed in part: with h + 1 head ranks, U_h = [m, 1], U_k = I
[D, D], core[α, β, μ, Q] = δ_αβ W̃_Q[β, μ] and core[D, β, μ, K] = W̃_K[β, μ], the Tucker form of
`nn.head_core` gives these queries and keys. In contrast to that of the raw tensor it is fitted to
the forms B_i, which do not depend on the inner bases of the heads. The paper's content bias is any
vector [d]; here it is W̃_Kᵀ b_i, so that the layer has an AttentionView.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.nn.head_core import head_tensor_of
from levelhead.nn.masked_attention import MaskedAttention, copy_trainability
from levelhead.tensors.cp import cp
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.weights.attention_view import AttentionView

__all__ = ["CollaborativeAttention"]


class CollaborativeAttention(MaskedAttention):
    """A drop-in for `nn.MultiheadAttention` whose heads share D dimensions of queries and keys.

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as there.
        shared: D, by default h·d_k; or a share of that in (0, 1].
        add_bias_kv, add_zero_attn, kdim, vdim: refused unless they say nothing new.

    Parameters: `shared_query`, `shared_key` [D, d], `mixing` [h, D], `mixed_bias` [h, D],
    `value_proj` and `out_proj`. A new layer has Xavier-uniform matrices and a mixing around one.

    Raises InputError for a D out of range and options that are not supported.

    >>> layer = CollaborativeAttention(8, 2, shared=3, batch_first=True)
    >>> x = torch.randn(3, 5, 8)
    >>> out, weights = layer(x, x, x)
    >>> list(out.shape), list(weights.shape), layer.shared_parameters, layer.plain_parameters
    ([3, 5, 8], [3, 5, 5], 54, 128)
    """

    mixed_bias: nn.Parameter | None

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
        shared: int | float | None = None,
    ) -> None:
        options = {
            "add_bias_kv": add_bias_kv,
            "add_zero_attn": add_zero_attn,
            "kdim": kdim,
            "vdim": vdim,
        }
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first, options, device, dtype)
        self.shared = _shared_rank(shared, embed_dim)
        kind = {"device": device, "dtype": dtype}
        self.shared_query = nn.Parameter(torch.empty(self.shared, embed_dim, **kind))
        self.shared_key = nn.Parameter(torch.empty(self.shared, embed_dim, **kind))
        self.mixing = nn.Parameter(torch.empty(num_heads, self.shared, **kind))
        self.register_parameter("in_proj_bias", None)  # torch's encoder layer asks for it
        if bias:
            self.mixed_bias = nn.Parameter(torch.zeros(num_heads, self.shared, **kind))
        else:
            self.register_parameter("mixed_bias", None)
        self.value_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **kind)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the shared factors, the mixing and the values anew."""
        for weight in (self.shared_query, self.shared_key, self.value_proj.weight):
            nn.init.xavier_uniform_(weight)
        # Heads of equal gains would stay copies of each other.
        nn.init.normal_(self.mixing, mean=1.0, std=0.5)
        for bias in (self.mixed_bias, self.value_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    @classmethod
    def from_attention(
        cls,
        attention: nn.MultiheadAttention,
        shared: int | float | None = None,
        *,
        sweeps: int = 200,
        seed: int = 0,
    ) -> CollaborativeAttention:
        """The layer with D `shared` dimensions whose forms B_i are closest to `attention`'s.

        D = h·d_k computes the same. Fewer are found by CP of the stacked forms [h, d, d], as in the
        paper; they never leave their factors. The bias of keys, void under softmax, is
        dropped. Raises InputError as `HeadCoreAttention.from_attention`, and warns
        (LevelheadWarning) where the CP fit is degenerate.
        """
        tensor = head_tensor_of(cls.__name__, attention)
        q, k, v = tensor.unbind(-1)
        layer = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.dropout,
            attention.in_proj_bias is not None,
            batch_first=attention.batch_first,
            device=tensor.device,
            dtype=tensor.dtype,
            shared=shared,
        )
        h, d_k, d = q.shape
        if layer.shared == h * d_k:
            query, key = q.reshape(-1, d), k.reshape(-1, d)
            mixing = torch.eye(h, dtype=q.dtype, device=q.device).repeat_interleave(d_k, dim=1)
        else:
            fit = cp(LowRankStack(q, k), layer.shared, sweeps=sweeps, seed=seed)
            mixing, left, right = fit.factors
            root = fit.weights.sqrt()
            query, key = (left * root).mT, (right * root).mT
        with torch.no_grad():
            layer.shared_query.copy_(query)
            layer.shared_key.copy_(key)
            layer.mixing.copy_(mixing)
            layer.value_proj.weight.copy_(v.reshape(-1, d))
            if layer.mixed_bias is not None:
                own = attention.in_proj_bias.reshape(3, h, d_k)
                content = torch.einsum("hkd,hk->hd", k, own[0])
                layer.mixed_bias.copy_(content @ torch.linalg.pinv(key.to(k)))
                layer.value_proj.bias.copy_(own[2].flatten())
            layer.out_proj.load_state_dict(attention.out_proj.state_dict())
        layer._as_trainable_as(attention)
        return layer.train(attention.training)

    def to_attention(self, tolerance: float = 1e-5) -> nn.MultiheadAttention:
        """The same layer as a plain `nn.MultiheadAttention`, in new parameters.

        Raises InputError if a form B_i or content bias needs more than d_k dimensions: if what
        d_k singular directions leave out is more than `tolerance` of it. That happens for D > d_k
        unless the mixing is nearly zero in enough places.
        """
        h, d_k = self.num_heads, self.head_dim
        q, k = self._query_weight().detach(), self.shared_key.detach()
        u, sigma, w = LowRankStack(q, k[None], (0,) * h).svd()
        kept = min(d_k, sigma.shape[-1])
        root = sigma[:, :kept].sqrt()
        query, key = (root[:, None] * u[..., :kept]).mT, (root[:, None] * w[..., :kept]).mT
        lost = sigma[:, kept:].square().sum(-1).sqrt() > tolerance * sigma.square().sum(-1).sqrt()
        bias = query.new_zeros(h, kept)
        if self.mixed_bias is not None:
            content = (self.mixed_bias.detach() @ k).to(query)
            bias = torch.einsum("hd,hdk->hk", content, torch.linalg.pinv(key))
            missed = torch.einsum("hk,hkd->hd", bias, key) - content
            lost = lost | (missed.norm(dim=-1) > tolerance * content.norm(dim=-1))
        if lost.any():
            raise InputError(
                f"head {int(lost.nonzero()[0])} uses more than the {d_k} dimensions that a head of "
                f"nn.MultiheadAttention has; keep the CollaborativeAttention, whose view() can be "
                f"inspected, or choose shared ≤ {d_k}."
            )
        pad = (0, 0, 0, d_k - kept)
        packed = [nn.functional.pad(x, pad).reshape(h * d_k, -1) for x in (query, key)]
        plain = nn.MultiheadAttention(
            self.embed_dim,
            h,
            self.dropout,
            self.mixed_bias is not None,
            batch_first=self.batch_first,
            device=k.device,
            dtype=k.dtype,
        )
        with torch.no_grad():
            value = self.value_proj.weight.to(query)
            plain.in_proj_weight.copy_(torch.cat((*packed, value)))
            if self.mixed_bias is not None:
                shifts = nn.functional.pad(bias, (0, d_k - kept)).flatten()
                void = torch.zeros_like(shifts)
                own = self.value_proj.bias.to(query)
                plain.in_proj_bias.copy_(torch.cat((shifts, void, own)))
            plain.out_proj.load_state_dict(self.out_proj.state_dict())
        copy_trainability(plain, self, {"in_proj_weight": "shared_query"})
        return plain.train(self.training)

    # ── sizes ──

    @property
    def shared_parameters(self) -> int:
        """Numbers in shared queries, keys and mixing: D (2d + h)."""
        return self.shared_query.numel() + self.shared_key.numel() + self.mixing.numel()

    @property
    def plain_parameters(self) -> int:
        """Numbers in the weights they stand for: 2d²."""
        return 2 * self.embed_dim**2

    # ── weights ──

    def view(self) -> AttentionView:
        """The layer's weights as an AttentionView; gradients reach the shared factors.

        Queries are m_i ∘ W̃_Q [h, D, d]; the shared keys are repeated for every head [h, D, d].

        >>> CollaborativeAttention(8, 2, shared=3).view()
        AttentionView('collaborative': 2 heads, 2 groups, d_k 3, d_v 4, d 8, full, position none)
        """
        h = self.num_heads
        biases: dict[str, Any] = {}
        if self.mixed_bias is not None:
            biases["q_bias"] = self.mixed_bias
            biases["v_bias"] = self.value_proj.bias.reshape(h, -1)
            biases["o_bias"] = self.out_proj.bias
        return AttentionView(
            q=self._query_weight(),
            k=self.shared_key.expand(h, -1, -1),
            v=self.value_proj.weight.reshape(h, self.head_dim, -1),
            o=self._output(),
            **biases,
            scale=self.logit_scale,
            name="collaborative",
            family="collaborative",
        )

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, h, n, D], k [b, 1, m, D], v [b, h, m, d_v] of tokens [b, n, d]."""
        q = nn.functional.linear(query, self.shared_query)[:, None] * self.mixing[:, None]
        if self.mixed_bias is not None:
            q = q + self.mixed_bias[:, None]
        k = nn.functional.linear(key, self.shared_key)[:, None]
        v = self._heads(self.value_proj(value))
        return q.to(k.dtype), k, v

    def _query_weight(self) -> Tensor:
        """m_i ∘ W̃_Q [h, D, d]."""
        return self.mixing[..., None] * self.shared_query

    def _as_trainable_as(self, attention: nn.MultiheadAttention) -> None:
        weights = ("shared_query", "shared_key", "mixing", "value_proj.weight")
        biases = ("mixed_bias", "value_proj.bias")
        sources = dict.fromkeys(weights, "in_proj_weight") | dict.fromkeys(biases, "in_proj_bias")
        copy_trainability(self, attention, sources)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shared={self.shared}"


def _shared_rank(shared: int | float | None, embed_dim: int) -> int:
    """D; h·d_k is embed_dim."""
    if shared is None:
        return embed_dim
    if isinstance(shared, float) and 0.0 < shared <= 1.0:
        return max(1, round(shared * embed_dim))
    if not is_whole(shared) or shared > embed_dim:
        raise InputError(
            f"shared={shared!r} was given; expected D, a whole number from 1 to {embed_dim}, or a "
            f"share of it as a float in (0, 1]."
        )
    return int(shared)
