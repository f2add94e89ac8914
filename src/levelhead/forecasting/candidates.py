"""What can forecast: the naive repeat, the line, SAMformer, and a convex blend of them.

Axes and units. A candidate maps normalised windows `[D, B, L]` (mean 0, deviation 1 per window and
channel) to normalised forecasts `[D, B, H]`; the forecast in the series' units is
`mean + deviation * core(...)`. Every candidate here commutes with that change of units, so one
representation serves all: a line is the head whose columns sum to one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from levelhead.data.windows import WindowSource
from levelhead.nn.samformer import SAMformerNet

__all__ = [
    "Blend",
    "Candidate",
    "Line",
    "Network",
    "SeasonalNaive",
    "chunk_size",
    "forecasts",
    "residual_products",
]

FloatArray = NDArray[np.float64]

_FORECAST_ELEMENTS = 1 << 19


class Candidate(Protocol):
    """A forecaster of normalised windows."""

    @property
    def name(self) -> str:
        """Name in tables and settings."""

    @property
    def parameters(self) -> int:
        """Number of fitted numbers."""

    def core(self, context: torch.Tensor) -> torch.Tensor:
        """`[D, B, L]` normalised windows → `[D, B, H]` normalised forecasts."""


@dataclass(frozen=True, eq=False)
class SeasonalNaive:
    """Repeats the last season; season 1 repeats the last value."""

    season: int
    horizon: int
    name: str = "naive"
    parameters: int = 0

    def core(self, context: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(self.horizon, device=context.device) % self.season
        return context[..., context.shape[-1] - self.season + steps]


@dataclass(frozen=True, eq=False)
class Line:
    """x̂ ↦ x̂ · head, `head [L, H]` float64 with columns that sum to one."""

    head: torch.Tensor
    penalty: float
    name: str = "linear"

    @property
    def parameters(self) -> int:
        return self.head.numel()

    def core(self, context: torch.Tensor) -> torch.Tensor:
        head = self.head.to(context.device, context.dtype)
        flat = context.reshape(-1, context.shape[-1]) @ head
        return flat.view(*context.shape[:-1], head.shape[1])


@dataclass(frozen=True, eq=False)
class Network:
    """A trained `SAMformerNet`."""

    net: SAMformerNet
    name: str = "samformer"

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.net.parameters())

    def core(self, context: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.net.core(context.to(self.net.head.dtype)).to(context.dtype)


@dataclass(frozen=True, eq=False)
class Blend:
    """Σ w_k · member_k with w ≥ 0, Σ w = 1."""

    members: tuple[Candidate, ...]
    weights: tuple[float, ...]
    name: str = "blend"

    @property
    def parameters(self) -> int:
        return sum(m.parameters for m in self.members) + len(self.weights) - 1

    def core(self, context: torch.Tensor) -> torch.Tensor:
        total = self.weights[0] * self.members[0].core(context)
        for member, weight in zip(self.members[1:], self.weights[1:], strict=True):
            total = total + weight * member.core(context)
        return total


def chunk_size(channels: int, context: int, horizon: int) -> int:
    """Windows per pass of a forecast; a function of the model alone, never of the training batch.

    Matrix products of another size round differently, so that one fixed size per model keeps
    every metric bit-equal whatever the batch size. Attention's `[B, D, D]` counts as well.
    """
    per_window = channels * (context + horizon + channels)
    return max(1, min(512, _FORECAST_ELEMENTS // per_window))


def forecasts(
    candidates: Sequence[Candidate], windows: WindowSource
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (forecasts `[K, D, B, H]`, truth `[D, B, H]`), both centred by the window's mean.

    In units of the series given to `windows`, float64 inside the working type's accuracy.
    """
    size = chunk_size(windows.channels, windows.context, windows.horizon)
    for index in torch.split(torch.arange(len(windows)), size):
        batch = windows.batch(index)
        with torch.no_grad():
            made = [batch.centred(c.core(batch.context)) for c in candidates]
        yield torch.stack(made), batch.target


def residual_products(candidates: Sequence[Candidate], windows: WindowSource) -> FloatArray:
    """E `[N, K, K]`, E_nkl = mean over channels and steps of r_k · r_l in window n; float64.

    Sufficient for the error of every candidate (diagonal) and of every blend (wᵀ E w).
    """
    size = len(candidates)
    found = np.empty((len(windows), size, size))
    done = 0
    for made, truth in forecasts(candidates, windows):
        residual = made - truth
        part = found[done : done + truth.shape[1]]
        for k in range(size):
            for m in range(k + 1):
                sums = (residual[k] * residual[m]).sum(dim=(0, 2), dtype=torch.float64)
                part[:, k, m] = part[:, m, k] = sums.cpu().numpy()
        done += truth.shape[1]
    judged = windows.channels if windows.judged is None else len(windows.judged)
    return found / (judged * windows.horizon)
