"""Reversible instance normalisation (RevIN; Kim et al., ICLR 2022, eqs. 1-4).

Axes: `x [..., D, L]`; every window and channel is centred and scaled by its own context, a model
works on the result, and `denorm` puts level and scale back onto `[..., D, H]`.

Statistics and both changes of units are computed in float64 and only their result is cast, so that
a channel at offset 1e6 with deviation 1 loses nothing that its own type could hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from levelhead.base.errors import InputError

__all__ = ["ReversibleNorm", "WindowStatistics"]


class WindowStatistics(NamedTuple):
    """Mean and deviation sqrt(var + eps) of each window and channel, `[..., D, 1]`, float64."""

    mean: torch.Tensor
    deviation: torch.Tensor


class ReversibleNorm(nn.Module):
    """Centre and scale each window by its own statistics, optionally with an affine map after.

    Args:
        channels: D; needed only for `affine=True`, whose gain γ and shift β are per channel.
        affine: learn γ and β.
        eps: added to the variance, in squared units of the input; a constant channel is divided
            by sqrt(eps).

    >>> norm = ReversibleNorm(2, affine=True)
    >>> x = torch.randn(5, 2, 16, dtype=torch.float64) + 1e6
    >>> z, statistics = norm(x)
    >>> bool(torch.allclose(norm.denorm(z, statistics), x, rtol=0, atol=1e-6))
    True
    """

    def __init__(self, channels: int | None = None, *, affine: bool = False, eps: float = 1e-5):
        super().__init__()
        if affine and channels is None:
            raise InputError(
                "reversible normalisation with affine=True needs the number of channels: pass "
                "channels=, or affine=False"
            )
        self.channels, self.affine, self.eps = channels, affine, eps
        self.gain: nn.Parameter | None = None
        self.shift: nn.Parameter | None = None
        if affine:
            self.gain = nn.Parameter(torch.ones(channels or 0))
            self.shift = nn.Parameter(torch.zeros(channels or 0))

    def statistics(self, x: torch.Tensor) -> WindowStatistics:
        """Mean and deviation over the last axis of `x [..., D, L]`, kept as `[..., D, 1]`."""
        variance, mean = torch.var_mean(x.double(), dim=-1, correction=0, keepdim=True)
        return WindowStatistics(mean, (variance + self.eps).sqrt())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, WindowStatistics]:
        """Normalised `x [..., D, L]` in x's own type, and the statistics to undo it."""
        self.check_channels(x.shape[-2])
        statistics = self.statistics(x)
        z = ((x.double() - statistics.mean) / statistics.deviation).to(x.dtype)
        if self.gain is not None and self.shift is not None:
            z = z * self.gain[:, None].to(x.dtype) + self.shift[:, None].to(x.dtype)
        return z, statistics

    def undo_affine(self, y: torch.Tensor) -> torch.Tensor:
        """(y - β)/γ for `y [..., D, H]`; γ = 0 has no inverse and its channel keeps y - β."""
        if self.gain is None or self.shift is None:
            return y
        gain = torch.where(self.gain == 0, torch.ones_like(self.gain), self.gain).to(y.dtype)
        return (y - self.shift[:, None].to(y.dtype)) / gain[:, None]

    def denorm(self, y: torch.Tensor, statistics: WindowStatistics) -> torch.Tensor:
        """`y [..., D, H]` in the units of the window, in y's type."""
        y = self.undo_affine(y)
        return (y.double() * statistics.deviation + statistics.mean).to(y.dtype)

    def check_channels(self, count: int) -> None:
        """Raise InputError if there are gains, but not for `count` channels."""
        if self.affine and count != self.channels:
            raise InputError(
                f"the normalisation has gains for {self.channels} channels, the input has "
                f"{count}: fit with revin_affine=False to forecast other channels"
            )
