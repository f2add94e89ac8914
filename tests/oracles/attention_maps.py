"""Attention maps and their statistics from the formulas, row by row in float64.

Axes. logits [b, h, n, m]; `allowed` is anything that broadcasts to it, True where a row may look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SlowStatistics:
    """The fields of MapStatistics as lists of numbers, one a head."""

    entropy: list[float]
    entropy_share: list[float]
    entropy_min: list[float]
    largest_logit: list[float]
    top_mass: list[float]
    nuclear_norm: list[float]
    rank: list[float]
    effective_rank: list[float]
    residual: list[float]


def logits_of(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """cap(scale·qᵀk) + bias, keys repeated for the heads of a group."""
    q, k = q.detach().double(), k.detach().double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = torch.einsum("bhnd,bhmd->bhnm", q, k)
    found = found * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if soft_cap is not None:
        found = soft_cap * torch.tanh(found / soft_cap)
    return found if bias is None else found + bias.double()


def row_weights(logits: list[float]) -> list[float]:
    """Softmax of one row of allowed logits."""
    exponentials = [math.exp(x - max(logits)) for x in logits]
    return [e / sum(exponentials) for e in exponentials]


def entropy(weights: list[float]) -> float:
    """−Σ p log p, in nat."""
    return -sum(p * math.log(p) for p in weights if p > 0)


def entropies(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """[b, h, n]; 0 for rows without allowed keys."""
    found = torch.zeros(logits.shape[:3], dtype=torch.float64)
    for at, row in _rows(logits, allowed):
        found[at] = entropy(row_weights([x for x, _ in row])) if row else 0.0
    return found


def maps_of(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The weights [b, h, n, m]; rows of zeros where nothing is allowed."""
    found = torch.zeros(logits.shape, dtype=torch.float64)
    for at, row in _rows(logits, allowed):
        if row:
            for p, (_, j) in zip(row_weights([x for x, _ in row]), row, strict=True):
                found[(*at, j)] = p
    return found


def statistics(logits: Tensor, allowed: Tensor | None = None) -> SlowStatistics:
    """All of MapStatistics; the residual only where no mask is (else nan)."""
    heads = [_head(logits[:, i : i + 1], allowed, i) for i in range(logits.shape[1])]
    return SlowStatistics(*(list(column) for column in zip(*heads, strict=True)))


def _head(logits: Tensor, allowed: Tensor | None, head: int) -> tuple[float, ...]:
    if allowed is not None and allowed.ndim == 4 and allowed.shape[1] > 1:
        allowed = allowed[:, head : head + 1]
    rows = [row for _, row in _rows(logits, allowed) if row]
    weights = [row_weights([x for x, _ in row]) for row in rows]
    shares = sorted(entropy(p) / math.log(len(p)) for p in weights if len(p) > 1)
    maps = maps_of(logits, allowed)[:, 0]
    spectra = [np.linalg.svd(a.numpy(), compute_uv=False) for a in maps]
    parts = [s / s.sum() for s in spectra]
    noise = max(maps.shape[1:]) * 2.0**-23
    mean = [a.mean(0, keepdim=True) for a in maps]
    residual = [float((a - c).norm() / a.norm()) for a, c in zip(maps, mean, strict=True)]
    return (
        float(np.mean([entropy(p) for p in weights])),
        float(np.mean(shares)),
        shares[int(0.05 * (len(shares) - 1))],
        max(abs(x) for row in rows for x, _ in row),
        float(np.mean([max(p) for p in weights])),
        float(np.mean([s.sum() for s in spectra])),
        float(np.mean([(s > noise * s[0]).sum() for s in spectra])),
        float(np.mean([math.exp(entropy(list(p))) for p in parts])),
        float(np.mean(residual)) if allowed is None else math.nan,
    )


def _rows(
    logits: Tensor, allowed: Tensor | None
) -> list[tuple[tuple[int, int, int], list[tuple[float, int]]]]:
    """For each row its place and the allowed logits with their keys."""
    b, h, n, m = logits.shape
    where = torch.ones(1, dtype=torch.bool) if allowed is None else allowed
    where = where.expand(b, h, n, m).tolist()
    values = logits.double().tolist()
    return [
        ((x, y, i), [(values[x][y][i][j], j) for j in range(m) if where[x][y][i][j]])
        for x in range(b)
        for y in range(h)
        for i in range(n)
    ]
