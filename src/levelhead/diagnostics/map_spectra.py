"""Spectra of attention matrices and their distance to rank one, at a bounded cost.

Axes. A sampled map A is [n', m]: n' rows over m keys, each row a distribution over the keys it may
look at. Heads are measured one by one.

The sample. No random numbers: batch entries are taken evenly from first to last. Maps of up to 256
rows are taken whole; of larger ones 256 rows, evenly from first to last, over all their keys. The
number of matrices is at most `matrices` over all heads, and so small that their singular values
together cost what 8 of [256, 256] do, but at least one a head: a map of 4096 × 4096 costs one
decomposition of [256, 256] (of the Gram matrix of its rows, in float64) and 4 MB.

Two examples. The uniform map 1/n has nuclear norm, rank and effective rank 1 and residual 0; the
identity [n, n] has n, n, n and residual √(1 − 1/n).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_call import AttentionCall

__all__ = ["MapSpectra", "map_spectra", "rank_one_residual"]

_SIDE = 256
_WORK = 8 * _SIDE**3
# Entries of sampled maps that are formed at a time, 16 MB in float32 (or one map).
_BLOCK = 2**22


@dataclass(frozen=True, eq=False)
class MapSpectra:
    """Means over sampled maps, one number a head: every field is [h].

    Args:
        nuclear_norm: Σσ.
        rank: the number of σ above max(n', m) · 2⁻²³ · σ₁ (the noise of float32).
        effective_rank: exp of the entropy of σ/Σσ (Roy & Vetterli 2007).
        residual: see `rank_one_residual`.
    """

    nuclear_norm: Tensor
    rank: Tensor
    effective_rank: Tensor
    residual: Tensor


def map_spectra(call: AttentionCall, matrices: int = 64) -> MapSpectra:
    """Nuclear norm, rank, effective rank and residual of at most `matrices` maps of a call.

    Maps without any allowed key (a sentence of padding) do not count; 0 for heads that have no
    others. Maps that are not finite give NaN. Raises InputError for matrices < 1.

    >>> call = AttentionCall(logits=torch.full((1, 1, 3, 3), -50.0) + 100 * torch.eye(3))
    >>> found = map_spectra(call)
    >>> [round(float(x), 3) for x in (found.nuclear_norm, found.rank, found.residual)]
    [3.0, 3.0, 0.816]
    """
    if matrices < 1:
        raise InputError(f"matrices = {matrices} was given; expected at least 1")
    h = call.shape[1]
    total = torch.zeros(4, h, dtype=torch.float64, device=call.device)
    taken = torch.zeros(h, dtype=torch.float64, device=call.device)
    for heads, maps, where in _maps(call, matrices):
        there = (maps != 0).flatten(2).any(-1)
        total[:3, heads] += torch.where(there.mT, _spectral(maps), 0.0).sum(-1)
        total[3, heads] += rank_one_residual(maps, where).sum(0).double()
        taken[heads] += there.sum(0)
    nuclear, rank, effective, residual = (total / taken.clamp(min=1)).to(call.dtype)
    return MapSpectra(nuclear, rank, effective, residual)


def rank_one_residual(maps: Tensor, where: Tensor | None = None) -> Tensor:
    """‖A − C‖_F / ‖A‖_F of maps [..., n, m], C the map whose rows are one common preference.

    Without a mask every row of C is the mean row: C = 11ᵀA/n. With one (`where`, True: may look)
    row i of C is the preference w_j restricted to the keys that row i may look at, w_j / Σ_k w_k,
    where w_j = Σ_i A_ij / Σ_{i may see j} 1/N_i sets the weight that key j gets against what it
    would get from uniform rows. So a causal map that is uniform, as at rank collapse, has residual
    0 as well; causal rows of one common preference that is not uniform come near to it only (0.1
    where keys differ by factors of e^±2). w is not fitted further: a fit would call a causal map
    that looks at itself alone a common preference, for the newest key.
    Rows without keys are zero and do not count. 0 for maps of zeros.

    Source: Dong, Cordonnier & Loukas 2021 (residual); w is the first round of Hunter's fit of
    Luce's model (Annals of Statistics 32, 2004).

    >>> causal = torch.ones(3, 3).tril()
    >>> rank_one_residual(causal / causal.sum(-1, keepdim=True), causal.bool())
    tensor(0.)
    """
    if where is None:
        common = maps.mean(-2, keepdim=True)
    else:
        common = _common(maps, where.expand(maps.shape).to(maps.dtype))
    size = torch.linalg.vector_norm(maps, dim=(-2, -1))
    away = torch.linalg.vector_norm(maps - common, dim=(-2, -1))
    return torch.where(size > 0, away / size.clamp(min=torch.finfo(size.dtype).tiny), size)


def _common(maps: Tensor, where: Tensor) -> Tensor:
    least = torch.finfo(maps.dtype).tiny
    keys = where.sum(-1, keepdim=True)
    uniform = torch.where(keys > 0, 1 / keys.clamp(min=1), 0.0).mT @ where
    liking = where * (maps.sum(-2, keepdim=True) / uniform.clamp(min=least))
    return liking / liking.sum(-1, keepdim=True).clamp(min=least)


def _spectral(maps: Tensor) -> Tensor:
    """Nuclear norm, rank and effective rank [3, heads, count] of maps [count, heads, n, m]."""
    maps = maps.transpose(0, 1)
    n, m = maps.shape[-2:]
    if 0 in maps.shape or not bool(maps.isfinite().all()):
        return torch.full((3, *maps.shape[:2]), torch.nan, dtype=torch.float64, device=maps.device)
    if max(n, m) > 2 * min(n, m):
        wide = maps.double() if n <= m else maps.double().mT
        values = torch.linalg.eigvalsh(wide @ wide.mT).clamp(min=0.0).sqrt()
    else:
        values = torch.linalg.svdvals(maps).double()
    noise = max(n, m) * torch.finfo(torch.float32).eps * values.amax(-1, keepdim=True)
    nuclear = values.sum(-1)
    part = values / nuclear.clamp(min=torch.finfo(torch.float64).tiny)[..., None]
    effective = (-torch.special.xlogy(part, part).sum(-1)).exp()
    return torch.stack((nuclear, (values > noise).sum(-1).double(), effective))


def _maps(call: AttentionCall, matrices: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Sampled maps [count', heads', n', m] and where rows may look, in blocks of memory."""
    b, h, n, m = call.shape
    side = min(n, _SIDE)
    small, large = sorted((side, m))
    most = max(min(matrices, _WORK // max(small**2 * min(large, 2 * small), 1)), 1)
    chosen = _evenly(b, max(most // h, 1), call.device)
    rows = _evenly(n, side, call.device)
    together = max(_BLOCK // max(side * m, 1), 1)
    height = min(h, together)
    for first in range(0, h, height):
        heads = slice(first, min(first + height, h))
        for entries in torch.split(chosen, max(together // height, 1)):
            logits, where = call.block(batch=entries, heads=heads, rows=rows)
            if where is None:
                yield heads, logits.softmax(-1), None
                continue
            logits = logits.masked_fill(~where, -torch.inf)
            maps = logits.softmax(-1).masked_fill(~where, 0.0)
            yield heads, maps, None if bool(where.all()) else where


def _evenly(size: int, count: int, device: torch.device) -> Tensor:
    """At most `count` positions among `size`, from first to last."""
    count = min(size, count)
    places = torch.linspace(0, max(size - 1, 0), count, dtype=torch.float64, device=device)
    return places.round().long()
