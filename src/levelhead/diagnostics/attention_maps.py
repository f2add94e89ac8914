"""Exact statistics of attention maps: entropy, logits, weights, spectra, distance to rank one.

Axes. As in `attention_call`: b batch, h heads, n rows (queries), m keys. Row i of a map has N_i
keys that it may look at; in a causal map N_i = min(i + 1, m). All entropies are in nat.

Two examples. A row that looks at one key alone has entropy 0 and share 0; a row that looks at its
N_i keys alike has entropy log N_i and share 1. Rows without any allowed key are left out of every
mean (their entropy is given as 0), and shares and their quantile leave out rows with one key,
which are both one-hot and uniform.

Ways. With l_ij the logits and p_i = softmax(l_i), H_i = LSE_i − E_p[l_i]. Where the logit is s·q·k
plus a mask of 0 and −∞, E_p[l_i] = s·q_i·(Σ_j p_ij k_j): attention applied to the keys
themselves, which a fused kernel does without a matrix of weights ("fused"). Everywhere else, and
where no kernel gives LSE, the logits are formed in blocks of at most 2¹⁹ numbers (or one row of all
heads), and each row's H = log Z + Σ_j p_ij (max − l_ij), Z = Σ_j e^{l_ij − max}: "chunks", or
"eager" where the layer had formed them. The largest logit and weight always need the logits; on the
CPU, where the exponentials then cost less than the fused call (0.9× of one call against 1.5× for
kernel and blocks), `map_statistics` takes everything from the blocks.

Precision. float16 and bfloat16 are computed in float32. The fused difference of two numbers of the
size of LSE is exact to about 2⁻²² · max(1, |LSE|) in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from levelhead.diagnostics.attention_call import AttentionCall, attention_call, logits_call
from levelhead.diagnostics.map_spectra import map_spectra

__all__ = [
    "AttentionCall",
    "MapStatistics",
    "attention_call",
    "logits_call",
    "map_statistics",
    "row_entropy",
]

Method = Literal["fused", "chunks", "eager"]

# Logits that are formed at a time: 2 MB in float32, which a core's cache holds.
_BLOCK = 2**19
# Weights below e^-80 of a row's largest change no sum in float64, and exp is slow where it
# underflows; the bound keeps 0 · ∞ out of the sums, too.
_FAR = -80.0


@dataclass(frozen=True, eq=False)
class MapStatistics:
    """What the maps of one call look like, one number a head: every field but `method` is [h].

    Args:
        entropy: mean over batch and rows of H_i, in nat.
        entropy_share: mean of H_i / log N_i over rows with N_i ≥ 2; 0 one-hot … 1 uniform. 1 where
            there is no such row.
        entropy_min: the 5 % quantile of these shares (the lower neighbour, not interpolated).
        largest_logit: largest |logit| among allowed pairs, after scale, soft cap and bias.
        top_mass: mean over rows of the largest weight.
        nuclear_norm, rank, effective_rank: means over sampled matrices; see `map_spectra`.
        residual: mean of ‖A − C‖_F / ‖A‖_F, C the map whose rows are one common preference;
            0 at rank collapse; see `map_spectra`.
        method: how the entropy was computed, see the top of this module.
    """

    entropy: Tensor
    entropy_share: Tensor
    entropy_min: Tensor
    largest_logit: Tensor
    top_mass: Tensor
    nuclear_norm: Tensor
    rank: Tensor
    effective_rank: Tensor
    residual: Tensor
    method: Method


def row_entropy(call: AttentionCall, *, fused: bool = True) -> Tensor:
    """Exact entropy of each row of each map, [b, h, n], in nat; 0 for rows without allowed keys.

    Args:
        fused: whether a fused kernel may be used where there is one.

    Memory: beside the result one kernel's output, or a block (see the top of this module).

    >>> call = AttentionCall(q=torch.zeros(1, 1, 3, 4), k=torch.zeros(1, 1, 3, 4), causal=True)
    >>> row_entropy(call).exp().round()
    tensor([[[1., 2., 3.]]])
    """
    with torch.no_grad():
        found = _fused_entropy(call) if fused else None
        return _rows(call).entropy if found is None else found


def map_statistics(
    call: AttentionCall, *, matrices: int = 64, fused: bool | None = None
) -> MapStatistics:
    """All statistics of a call's maps, head by head.

    Args:
        matrices: the largest number of matrices whose spectra are computed, over all heads (at
            least one a head); chosen evenly over the batch, without random numbers.
        fused: whether to take entropies from a fused kernel; None: on a GPU only.

    Every row of every map counts for all but the spectra. Raises InputError for matrices < 1.

    >>> call = AttentionCall(q=torch.zeros(2, 1, 4, 8), k=torch.zeros(2, 1, 4, 8))
    >>> found = map_statistics(call)
    >>> [round(float(x), 4) for x in (found.entropy_share, found.rank, found.residual)]
    [1.0, 1.0, 0.0]
    """
    with torch.no_grad():
        wanted = call.device.type == "cuda" if fused is None else fused
        entropy = _fused_entropy(call) if wanted else None
        rows = _rows(call, entropy is None)
        method: Method = "fused" if entropy is not None else "chunks"
        if call.logits is not None:
            method = "eager"
        entropy = rows.entropy if entropy is None else entropy
        seen, choice = rows.keys > 0, rows.keys > 1
        share = torch.where(choice, entropy / rows.keys.clamp(min=2).log(), 0.0)
        some = choice.sum((0, 2)) > 0
        spectra = map_spectra(call, matrices)
        return MapStatistics(
            entropy=_mean(entropy, seen),
            entropy_share=torch.where(some, _mean(share, choice), 1.0),
            entropy_min=torch.where(some, _low(share, choice), 1.0),
            largest_logit=rows.largest,
            top_mass=_mean(rows.top, seen),
            nuclear_norm=spectra.nuclear_norm,
            rank=spectra.rank,
            effective_rank=spectra.effective_rank,
            residual=spectra.residual,
            method=method,
        )


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean [h] of values [b, h, n] where it says so; 0 where it never does."""
    total = torch.where(where, values, 0.0).sum((0, 2), dtype=torch.float64)
    return (total / where.sum((0, 2)).clamp(min=1)).to(values.dtype)


def _low(share: Tensor, where: Tensor) -> Tensor:
    """The 5 % quantile [h] of share [b, h, n] where it says so."""
    ordered = torch.where(where, share, torch.inf).transpose(0, 1).flatten(1).sort(dim=1).values
    at = (0.05 * (where.sum((0, 2)) - 1).clamp(min=0).double()).long()
    return ordered.gather(1, at[:, None])[:, 0]


# ── row by row, in blocks ──


@dataclass(frozen=True, eq=False)
class _Rows:
    """entropy, top and keys [b, h, n] (keys as numbers), largest [h]."""

    entropy: Tensor
    top: Tensor
    keys: Tensor
    largest: Tensor


def _rows(call: AttentionCall, entropies: bool = True) -> _Rows:
    b, h, n, _ = call.shape
    entropy, top, keys = torch.zeros(3, b, h, n, dtype=call.dtype, device=call.device)
    largest = torch.zeros(h, dtype=call.dtype, device=call.device)
    for batch, rows in _blocks(call):
        logits, where = call.block(batch=batch, rows=rows)
        if where is None:
            count = torch.full((), float(logits.shape[-1]), dtype=call.dtype, device=call.device)
            high = logits.amax(-1, keepdim=True)
            size = torch.maximum((-logits).amax(-1), high[..., 0])
        else:
            count = where.expand(*where.shape[:-1], logits.shape[-1]).sum(-1).to(call.dtype)
            size = logits.masked_fill(~where, 0.0).abs().amax(-1)
            logits = logits.masked_fill(~where, -torch.inf)
            high = logits.amax(-1, keepdim=True)
            high = torch.where(count[..., None] > 0, high, 0.0)
        largest = torch.maximum(largest, size.amax((0, 2)))
        # `block` may hand over the layer's own logits: they must not be written to.
        below = (logits - high).clamp_(min=_FAR)
        weight = below.exp()
        total = weight.sum(-1)
        keys[batch, :, rows] = count
        top[batch, :, rows] = torch.where(count > 0, 1 / total, 0.0)
        if entropies:
            found = total.log() - torch.linalg.vecdot(weight, below) / total
            entropy[batch, :, rows] = torch.where(count > 0, found, 0.0)
    return _Rows(entropy.clamp_(min=0.0), top, keys, largest)


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Parts of batch and rows of at most _BLOCK logits, or one row of all heads."""
    b, h, n, m = call.shape
    together = max(_BLOCK // max(h * n * m, 1), 1)
    height = max(min(_BLOCK // max(h * m, 1), n), 1)
    for first in range(0, b, together):
        for row in range(0, n, height):
            yield slice(first, first + together), slice(row, row + height)


# ── in one fused call ──


def _fused_entropy(call: AttentionCall) -> Tensor | None:
    """Entropy [b, h, n] by H = LSE − s·q·Attn(q, k, k); None where it cannot be had that way."""
    if call.q is None or call.k is None or call.logits is not None:
        return None
    if call.bias is not None or call.soft_cap is not None or 0 in call.shape or call.scale <= 0:
        return None
    mask = None
    if call.allowed is not None:
        # A kernel may answer anything for a row without keys.
        if call.causal or not call.allowed.any(-1).all():
            return None
        mask = torch.zeros(call.allowed.shape, dtype=call.dtype, device=call.device)
        mask.masked_fill_(~call.allowed, -torch.inf)
    h, g = call.shape[1], call.k.shape[1]
    q, k = call.q.to(call.dtype), call.k.to(call.dtype)
    found = torch.empty(call.shape[:3], dtype=call.dtype, device=call.device)
    for i in range(h // g):
        # The i-th head of every group: keys need not be repeated.
        heads = slice(i, None, h // g)
        part = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        answer = _attend(q[:, heads], k, part, call.causal, call.scale)
        if answer is None:
            return None
        seen, lse = answer
        mean_logit = torch.linalg.vecdot(q[:, heads], seen) * call.scale
        found[:, heads] = lse - mean_logit
    return found.clamp_(min=0.0)


def _attend(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Attn(q, k, k) and LSE [b, h, n] from the device's kernel; None where none fits."""
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, k, 0.0, causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]
    if q.device.type != "cuda" or mask is not None or q.dtype != torch.float32 or q.shape[-1] % 4:
        return None
    # The only kernel in float32; its masks would need strides that are multiples of 8.
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    try:
        seen, lse, *_ = kernel(q, k, k, None, True, 0.0, causal, scale=scale)
    except RuntimeError:
        # Cards that this kernel was not built for; the caller says that it used blocks.
        return None
    return seen, lse[:, :, : q.shape[2]]
