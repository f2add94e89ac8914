"""What PyTorch's own attention functions and modules were asked for, as an AttentionCall.

Axes. As in `attention_call`; PyTorch's multi-head functions have x [n, b, d] (or [b, n, d] with
`batch_first`, or [n, d]).

Queries and keys are computed again from the arguments: one projection more, whatever path the
module took (its fast path included, which forms no queries that could be seen). Weights are used
detached, so that autocast caches no copy of them that would cut the layer's own gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_call import AttentionCall, attention_call

__all__ = ["encoder_layer_call", "function_call", "module_call", "sdpa_call"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FUNCTION = inspect.signature(F.multi_head_attention_forward)
_MODULE = inspect.signature(nn.MultiheadAttention.forward)
_ENCODER_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)


def sdpa_call(args: Sequence[Any], kwargs: Mapping[str, Any], heads: int | None) -> AttentionCall:
    """The call of `F.scaled_dot_product_attention(*args, **kwargs)`, values apart.

    `heads` is used where queries [b·h, n, d_k] do not show it. Raises InputError for nested tensors
    and shapes that do not fit together.
    """
    given = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
    q, k = given["query"], given["key"]
    if q.is_nested or k.is_nested:
        raise InputError("nested tensors were given to attention; pad them to look at its maps")
    mask, causal = given.get("attn_mask"), bool(given.get("is_causal", False))
    return attention_call(q, k, mask=mask, causal=causal, scale=given.get("scale"), heads=heads)


def function_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionCall:
    """The call inside `F.multi_head_attention_forward(*args, **kwargs)`.

    Raises InputError for `static_k`, which stands for keys that are not computed here.
    """
    bound = _FUNCTION.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["static_k"] is not None:
        raise InputError("static_k was given to attention: its keys have no layer of their own")
    query, key = given["query"], given["key"]
    bias = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        weights = given["q_proj_weight"], given["k_proj_weight"]
    else:
        weights = _thirds(given["in_proj_weight"])[:2]
    biases = (None, None) if bias is None else _thirds(bias)[:2]
    hint = given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"]
    return _projected(
        query,
        key,
        given["num_heads"],
        weights,
        biases,
        attn_mask=None if hint else given["attn_mask"],
        key_padding_mask=given["key_padding_mask"],
        causal=bool(hint),
        more=(given["bias_k"], given["add_zero_attn"]),
    )


def module_call(
    module: nn.MultiheadAttention, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttentionCall:
    """The call inside `module(*args, **kwargs)`, whichever path the module takes.

    Raises InputError for shapes that do not fit together.
    """
    bound = _MODULE.bind(module, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, padding = given["query"], given["key"], given["key_padding_mask"]
    rows = None
    if query.is_nested:
        # Only self-attention takes nested tensors, and only without masks.
        query, padding = _padded(query)
        key, rows = query, padding
    elif module.batch_first and query.ndim == 3:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    joined: Tensor | None = module.in_proj_weight
    weights: tuple[Tensor, Tensor] = module.q_proj_weight, module.k_proj_weight
    if joined is not None:
        weights = _thirds(joined)[:2]
    bias = module.in_proj_bias
    hint = given["is_causal"] and padding is None and not given["need_weights"]
    call = _projected(
        query,
        key,
        module.num_heads,
        weights,
        (None, None) if bias is None else _thirds(bias)[:2],
        attn_mask=None if hint else given["attn_mask"],
        key_padding_mask=padding,
        causal=bool(hint),
        more=(module.bias_k, module.add_zero_attn),
    )
    return call if rows is None else _without_rows(call, rows)


def encoder_layer_call(
    layer: nn.TransformerEncoderLayer, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttentionCall:
    """The self-attention inside `layer(*args, **kwargs)`, also where the layer is one kernel.

    Raises InputError for shapes that do not fit together.
    """
    bound = _ENCODER_LAYER.bind(layer, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    source, padding, rows = given["src"], given["src_key_padding_mask"], None
    if source.is_nested:
        source, padding = _padded(source)
        rows = padding
        source = source.transpose(0, 1) if layer.self_attn.batch_first else source
    if layer.norm_first:
        norm = layer.norm1
        gain, shift = (None if p is None else p.detach() for p in (norm.weight, norm.bias))
        source = F.layer_norm(source.detach(), norm.normalized_shape, gain, shift, norm.eps)
    more = {"attn_mask": given["src_mask"], "key_padding_mask": padding}
    more |= {"is_causal": given["is_causal"], "need_weights": False}
    call = module_call(layer.self_attn, (source, source, source), more)
    return call if rows is None else _without_rows(call, rows)


def _thirds(joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = joined.chunk(3)
    return q, k, v


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """A nested tensor [b, ragged, d] as [n, b, d], and which keys are padding [b, n]."""
    lengths = torch.tensor([part.shape[0] for part in nested.unbind()], device=nested.device)
    full = torch.nested.to_padded_tensor(nested.detach(), 0.0)
    beyond = torch.arange(full.shape[1], device=nested.device) >= lengths[:, None]
    return full.transpose(0, 1), beyond


def _without_rows(call: AttentionCall, padding: Tensor) -> AttentionCall:
    """Padded rows do not exist in a nested tensor: they get no keys, and so are left out."""
    rows = ~padding[:, None, :, None]
    return replace(call, allowed=rows if call.allowed is None else call.allowed & rows)


def _projected(
    query: Tensor,
    key: Tensor,
    heads: int,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    causal: bool,
    more: tuple[Tensor | None, bool],
) -> AttentionCall:
    """The call of inputs [n, b, d] or [n, d]; `more`: a key to append, and whether zeros."""
    if query.ndim == 2:
        query, key = query.unsqueeze(1), key.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    n, b, _ = query.shape
    q, k = (
        F.linear(x.detach(), w.detach(), None if v is None else v.detach())
        for x, w, v in zip((query, key), weights, biases, strict=True)
    )
    extra, zero = more
    if extra is not None:
        k = torch.cat((k, extra.detach().to(k.dtype).expand(1, b, -1)))
    if zero:
        k = torch.cat((k, k.new_zeros(1, b, k.shape[-1])))
    mask = _added(attn_mask, key_padding_mask, b)
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[0] - key.shape[0]))
    # PyTorch's causal kernel counts from the upper left whatever was appended.
    return attention_call(
        q.view(n, b, heads, q.shape[-1] // heads).permute(1, 2, 0, 3),
        k.view(k.shape[0], b, heads, k.shape[-1] // heads).permute(1, 2, 0, 3),
        mask=mask,
        causal=causal,
    )


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int) -> Tensor | None:
    """Both masks as one that is added to the logits [b, h, n, m]; boolean ones forbid if True."""
    parts = []
    if attn_mask is not None:
        shape = attn_mask.shape[-2:]
        parts.append(_number(attn_mask).reshape(batch if attn_mask.ndim == 3 else 1, -1, *shape))
    if key_padding_mask is not None:
        parts.append(_number(key_padding_mask)[:, None, None, :])
    return None if not parts else sum(parts[1:], parts[0])


def _number(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.detach()
    return torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
