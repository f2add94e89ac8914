"""The arms of the forecasting study, each a change of one thing, and their networks.

Axes. Windows are channel-major, `[D, B, L]`, and normalised. Channel attention has a token for
each channel, A `[B, D, D]`; temporal attention has one for each step, A `[B, L, L]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from levelhead.forecasting.candidates import Line
from levelhead.forecasting.lines import LineKind
from levelhead.nn.samformer import Init, SAMformerNet, attention_matrix
from levelhead.nn.sigma_reparam import sigma_reparam

__all__ = ["ARMS", "Arm", "IdentityNet", "TemporalNet", "built", "map_measures"]

Attention = Literal["channel", "temporal", "identity"]
_ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Arm:
    """How a model is made and trained.

    Args:
        says: in a few words.
        line: the kind of closed form, None for a network.
        rho: SAM's radius as a share of the setting `rho`.
        gamma: σReparam's γ at the start, None without it.
        attention: between channels, between steps, or A = I.
        frozen: attention, W_V and W_O stay as they were drawn.
        from_line: starts equal to the closed form.
        slip: trained and judged with the released de-normalisation.
    """

    says: str
    line: LineKind | None = None
    rho: float = 1.0
    gamma: float | None = None
    attention: Attention = "channel"
    frozen: bool = False
    from_line: bool = False
    slip: bool = False


ARMS: dict[str, Arm] = {
    "line": Arm("ridge on windows from their last value, closed form", line="linear"),
    "line-revin": Arm("ridge on RevIN's windows, closed form", line="linear-revin"),
    "transformer": Arm("all weights, no SAM", rho=0.0),
    "random": Arm("attention, W_V and W_O frozen as drawn, no SAM", rho=0.0, frozen=True),
    "samformer": Arm("sharpness-aware minimisation"),
    "sigma": Arm("σReparam on all weights, γ = 1, no SAM", rho=0.0, gamma=1.0),
    "both": Arm("SAM and σReparam", gamma=1.0),
    "from-line": Arm("SAM, started equal to the line", from_line=True),
    "identity": Arm("SAM, every channel attends to itself alone", attention="identity"),
    "temporal": Arm("SAM, attention between steps", attention="temporal"),
    "transformer-slip": Arm("no SAM, the released de-normalisation", rho=0.0, slip=True),
    "samformer-slip": Arm("SAM, the released de-normalisation", slip=True),
}


class IdentityNet(SAMformerNet):
    """SAMformer with A = I: a line, written as X̂ (I + W_V W_O) W."""

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """I, `[B, D, D]`, for windows `[B, D, L]`."""
        eye = torch.eye(x.shape[1], dtype=self.head.dtype, device=x.device)
        return eye.expand(x.shape[0], -1, -1)

    def _attended(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return parts["value"]


class TemporalNet(SAMformerNet):
    """SAMformer with steps for tokens: W_Q, W_K, W_V `[D, m]` and W_O `[m, D]`.

        f(X) = [X + (A(Xᵀ) Xᵀ W_V W_O)ᵀ] W,    A(Xᵀ) = softmax(Xᵀ W_Q W_Kᵀ X / √m)  [L, L]

    RevIN, its affine map, biases and head are as in SAMformer, and so are the limits of the draw.
    """

    def __init__(
        self, context: int, horizon: int, channels: int, *, width: int = 16, init: Init = "glorot"
    ) -> None:
        super().__init__(context, horizon, channels, width=width, revin_affine=True, init=init)
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Parameter(torch.empty(channels, width)))
        self.output = nn.Parameter(torch.empty(width, channels))
        self.output_bias = nn.Parameter(torch.zeros(channels))
        self.reset_parameters()

    def core(self, normalised: torch.Tensor) -> torch.Tensor:
        """Forecast `[D, B, H]` in normalised units from normalised windows `[D, B, L]`."""
        channels, windows, _ = normalised.shape
        tokens = self._tokens(normalised.permute(1, 2, 0))
        q, k = self._queries_and_keys(tokens)
        value = _affine(tokens, self.value, self.value_bias)
        # One head, as the kernel wants it: it forms no [L, L] matrix, but for second derivatives.
        attended = nn.functional.scaled_dot_product_attention(
            q.unsqueeze(1), k.unsqueeze(1), value.unsqueeze(1)
        ).squeeze(1)
        mixed = (tokens + _affine(attended, self.output, self.output_bias)).permute(2, 0, 1)
        made = _affine(mixed.reshape(-1, self.context), self.head, self.head_bias)
        made = made.view(channels, windows, self.horizon)
        return self.norm.undo_affine(made.transpose(0, 1)).transpose(0, 1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """A(Xᵀ) `[B, L, L]` of windows `[B, D, L]` in any units."""
        mean, deviation = self.norm.statistics(x)
        normalised = ((x.double() - mean) / deviation).to(self.head.dtype)
        return attention_matrix(*self._queries_and_keys(self._tokens(normalised.transpose(1, 2))))

    def _tokens(self, steps: torch.Tensor) -> torch.Tensor:
        """RevIN's affine map on `[B, L, D]`."""
        assert self.norm.gain is not None
        assert self.norm.shift is not None
        return steps * self.norm.gain + self.norm.shift

    def _queries_and_keys(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = _affine(tokens, self.query, self.query_bias)
        return query, _affine(tokens, self.key, self.key_bias)


def _affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """x W + b; both are there in a network with biases, a W_O and its own W_K."""
    assert weight is not None
    assert bias is not None
    return x @ weight + bias


def built(
    arm: Arm,
    context: int,
    horizon: int,
    channels: int,
    *,
    width: int,
    init: Init,
    seed: int,
    line: Line | None = None,
) -> SAMformerNet:
    """The network of an arm, drawn from `seed` alone; what the arm does not train is frozen.

    `line` is what an arm with `from_line` starts from.
    """
    with torch.random.fork_rng(devices=[]):
        if arm.attention == "temporal":
            net: SAMformerNet = TemporalNet(context, horizon, channels, width=width, init=init)
        else:
            kind = IdentityNet if arm.attention == "identity" else SAMformerNet
            net = kind(context, horizon, channels, width=width, revin_affine=True, init=init)
        net.reset_parameters(torch.Generator().manual_seed(seed))
        if arm.from_line:
            assert line is not None
            net.start_from_line(line.head)
        if arm.gamma is not None:
            sigma_reparam(net, gamma=arm.gamma, names=[*_ATTENTION, "head"])
    still = _ATTENTION if arm.frozen else _ATTENTION[:2] if arm.attention == "identity" else ()
    for name in still:
        for parameter in (getattr(net, name), getattr(net, f"{name}_bias")):
            parameter.requires_grad_(False)
    return net


@torch.no_grad()
def map_measures(maps: torch.Tensor) -> dict[str, float]:
    """Of attention matrices A `[B, n, n]`, means over all.

    entropy_share: row entropy over log n, 0 one-hot to 1 uniform; own: weight on the own token;
    rank: exp of the entropy of σ/Σσ, from 1 to n.
    """
    maps = maps.double()
    sigma = torch.linalg.svdvals(maps)
    share = sigma / sigma.sum(-1, keepdim=True)
    entropy = torch.special.entr(maps).sum(-1).mean() / math.log(maps.shape[-1])
    return {
        "entropy_share": float(entropy),
        "own": float(maps.diagonal(dim1=1, dim2=2).mean()),
        "rank": float(torch.special.entr(share).sum(-1).exp().mean()),
    }
