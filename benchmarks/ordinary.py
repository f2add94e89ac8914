"""SAMformer written the ordinary way: nn.Linear, scaled_dot_product_attention, SAM by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class OrdinarySAMformer(nn.Module):
    """`value="full"` as the released PyTorch code has it, or the paper's W_V W_O."""

    def __init__(self, channels: int, context: int, horizon: int, width: int, *, full: bool):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1))
        self.query = nn.Linear(context, width)
        self.key = nn.Linear(context, width)
        self.value = nn.Linear(context, context if full else width)
        self.output = nn.Identity() if full else nn.Linear(width, context)
        self.head = nn.Linear(context, horizon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True).detach()
        deviation = (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        z = (x - mean) / deviation * self.gain + self.shift
        attended = nn.functional.scaled_dot_product_attention(
            self.query(z), self.key(z), self.value(z)
        )
        y = self.head(z + self.output(attended))
        return (y - self.shift) / (self.gain + 1e-10) * deviation + mean


def sam_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, rho: float
) -> None:
    """Two passes and the base optimiser's step, with torch's own fast list operations."""
    parameters = list(model.parameters())

    def backward() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()

    backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, torch._foreach_mul(gradients, rho / (norm + 1e-12)))
    backward()
    with torch.no_grad():
        torch._foreach_copy_(parameters, kept)
    optimizer.step()


def stepper(
    channels: int, context: int, horizon: int, batch: int, *, full: bool
) -> Callable[[], None]:
    """One SAM step on a fixed batch."""
    torch.manual_seed(0)
    model = OrdinarySAMformer(channels, context, horizon, 16, full=full)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(batch, channels, context)
    y = torch.randn(batch, channels, horizon)
    return lambda: sam_step(model, optimizer, x, y, 0.7)
