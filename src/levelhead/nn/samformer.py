"""SAMformer's network (Ilbert et al., ICML 2024, eqs. 3-4), written so that it trains fast.

    f(X) = [X + A(X) X W_V W_O] W,    A(X) = softmax(X W_Q W_Kᵀ Xᵀ / √m)

Axes. X is `[D, L]`: channels are the tokens, so A(X) is `[D, D]` and row-stochastic. W_Q, W_K, W_V
are `[L, m]`, W_O is `[m, L]`, W is `[L, H]`. Public inputs are `[B, D, L]`; inside, tensors are
channel-major `[D, B, ·]`, the order in which windows lie in memory.

The products are reassociated: X[W_Q W_K W_V W] is one matrix product, and (A X W_V)(W_O W) never
forms an `L x L` matrix. RevIN's affine map stands behind that product,
(γX̂ + β1ᵀ) C = γ (X̂C) + β (1ᵀC), so that windows need no gradient: the backward pass of the
product is the one matrix product X̂ᵀ dZ.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import nn

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.nn.reversible_norm import ReversibleNorm

__all__ = ["SAMformerNet", "attention_matrix"]

Init = Literal["glorot", "keras"]
Value = Literal["factored", "full"]


def attention_matrix(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """softmax(Q Kᵀ/√m): `[..., D, m]` twice → `[..., D, D]`, rows sum to one (eq. 4)."""
    logits = query @ key.transpose(-1, -2)
    return torch.softmax(logits / math.sqrt(query.shape[-1]), dim=-1)


class SAMformerNet(nn.Module):
    """One layer of channel attention and a linear head between RevIN and its inverse.

    Args:
        channels: D; used only by `revin_affine=True`. Without it any number of channels works.
        context, horizon: L and H, in steps.
        width: m, the inner dimension of attention.
        revin: normalise each window (off: the network acts on X as it is, as in the toy problem).
        revin_affine: learnable gain and shift per channel in RevIN.
        bias: biases on Q, K, V, O and the head.
        tie_qk: W_Q = W_K, which makes the logits symmetric and positive semi-definite.
        value: "factored" is the paper's W_V W_O; "full" the released PyTorch variant, one `[L, L]`
            matrix and no W_O.
        init: "glorot" (limits of each matrix as it stands) or "keras" (the limits that Keras'
            multi-head attention gives its 3-D kernels: q, k, v fan out to L·m).
        eps: RevIN's, in squared units of the input.

    Parameters are `query`, `key`, `value` `[L, m]`, `output` `[m, L]`, `head` `[L, H]` and, with
    biases, `query_bias` … `head_bias`: separate matrices, concatenated in the forward pass.
    """

    def __init__(
        self,
        context: int,
        horizon: int,
        channels: int | None = None,
        *,
        width: int = 16,
        revin: bool = True,
        revin_affine: bool = False,
        bias: bool = True,
        tie_qk: bool = False,
        value: Value = "factored",
        init: Init = "glorot",
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "channels": channels,
            "width": width,
            "revin": revin,
            "revin_affine": revin_affine,
            "bias": bias,
            "tie_qk": tie_qk,
            "value": value,
            "init": init,
            "eps": eps,
        }
        _check_sizes(context=context, horizon=horizon, width=width)
        self.context, self.horizon, self.width = context, horizon, width
        self.value_kind, self.init, self.revin = value, init, revin
        self.query_bias: nn.Parameter | None
        self.key_bias: nn.Parameter | None
        self.value_bias: nn.Parameter | None
        self.output_bias: nn.Parameter | None
        self.head_bias: nn.Parameter | None
        self.norm = ReversibleNorm(channels, affine=revin and revin_affine, eps=eps)
        v_width = context if value == "full" else width
        self.query = nn.Parameter(torch.empty(context, width))
        self.key = None if tie_qk else nn.Parameter(torch.empty(context, width))
        self.value = nn.Parameter(torch.empty(context, v_width))
        self.output = None if value == "full" else nn.Parameter(torch.empty(width, context))
        self.head = nn.Parameter(torch.empty(context, horizon))
        biases = {
            "query_bias": width,
            "key_bias": None if tie_qk else width,
            "value_bias": v_width,
            "output_bias": None if value == "full" else context,
            "head_bias": horizon,
        }
        for name, size in biases.items():
            made = nn.Parameter(torch.zeros(size)) if bias and size is not None else None
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all matrices again (uniform, within the limits of `init`); biases become zero."""
        kernels = {"query": self.query, "key": self.key, "value": self.value}
        with torch.no_grad():
            for weight in (*kernels.values(), self.output, self.head):
                if weight is None:
                    continue
                fan_in, fan_out = weight.shape
                # Keras counts the first axis of its [L, 1, m] kernels as a receptive field.
                if self.init == "keras" and any(weight is k for k in kernels.values()):
                    fan_out *= fan_in
                limit = math.sqrt(6.0 / (fan_in + fan_out))
                weight.uniform_(-limit, limit, generator=generator)
            for name, parameter in self.named_parameters():
                if name.endswith("_bias"):
                    parameter.zero_()

    def start_from_line(self, head: torch.Tensor) -> None:
        """Make the network equal to a line: its `head [L, H]`, attention's output zero.

        W_O = 0 and W_V ≠ 0, so that the gradient reaches W_O at once and the rest after it.
        """
        with torch.no_grad():
            self.head.copy_(head)
            silent = [self.value if self.output is None else self.output]
            biases = [self.output_bias, self.head_bias]
            if self.output is None:
                biases.append(self.value_bias)
            for parameter in (*silent, *(b for b in biases if b is not None)):
                parameter.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Forecast `[B, D, H]` of windows `[B, D, L]` in the windows' own units and type.

        Raises:
            InputError: the last axis is not the context length, the input is not a batch of
                windows, or there are gains for another number of channels.
        """
        if x.ndim != 3:
            raise InputError(
                f"the model reads windows [batch, channels, steps], shape {tuple(x.shape)} was "
                "given: add the missing axis"
            )
        if x.shape[-1] != self.context:
            raise InputError(
                f"the model reads {self.context} steps, windows of {x.shape[-1]} were given: "
                "cut the last context steps of each window"
            )
        working = self.head.dtype
        if not self.revin:
            return self.core(x.to(working).transpose(0, 1)).transpose(0, 1)
        mean, deviation = self.norm.statistics(x)
        normalised = ((x.double() - mean) / deviation).to(working)
        out = self.core(normalised.transpose(0, 1)).transpose(0, 1)
        return (out.double() * deviation + mean).to(x.dtype)

    def core(self, normalised: torch.Tensor) -> torch.Tensor:
        """Forecast `[D, B, H]` in normalised units from normalised windows `[D, B, L]`.

        The denormalised forecast is `mean + deviation * core(...)`: RevIN's affine map and its
        inverse are inside.
        """
        parts = self._products(normalised)
        attended = self._attended(parts)
        channels, windows, inner = attended.shape
        after = self.head if self.output is None else self.output @ self.head
        mixed = (attended.reshape(-1, inner) @ after).view(channels, windows, self.horizon)
        forecast = parts["head"] + mixed
        if self.output_bias is not None:
            forecast = forecast + self.output_bias @ self.head
        return self.norm.undo_affine(forecast.transpose(0, 1)).transpose(0, 1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """A(X) `[B, D, D]` of windows `[B, D, L]` in any units."""
        if self.revin:
            mean, deviation = self.norm.statistics(x)
            x = (x.double() - mean) / deviation
        parts = self._products(x.to(self.head.dtype).transpose(0, 1))
        return attention_matrix(parts["query"].transpose(0, 1), parts["key"].transpose(0, 1))

    def _attended(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """A(X) X W_V, `[D, B, m]`."""
        query, key, value = (parts[n].transpose(0, 1) for n in ("query", "key", "value"))
        return torch.bmm(attention_matrix(query, key), value).transpose(0, 1)

    def _products(self, normalised: torch.Tensor) -> dict[str, torch.Tensor]:
        """X W_Q, X W_K, X W_V and X W (each `[D, B, ·]`) from one matrix product."""
        channels, windows, _ = normalised.shape
        # A wrong number would otherwise be broadcast: one channel against many gains.
        self.norm.check_channels(channels)
        names = ["query", "key", "value", "head"]
        matrices = {n: m for n in names if (m := getattr(self, n)) is not None}
        joined = torch.cat(list(matrices.values()), dim=1)
        z = (normalised.reshape(-1, self.context) @ joined).view(channels, windows, -1)
        offset = self._joined_bias(matrices)
        if self.norm.gain is not None and self.norm.shift is not None:
            by_shift = self.norm.shift[:, None] * joined.sum(dim=0)
            offset = by_shift if offset is None else by_shift + offset
            z = torch.addcmul(offset[:, None, :], z, self.norm.gain[:, None, None])
        elif offset is not None:
            z = z + offset
        parts = dict(
            zip(matrices, torch.split(z, [m.shape[1] for m in matrices.values()], -1), strict=True)
        )
        parts.setdefault("key", parts["query"])
        return parts

    def _joined_bias(self, matrices: dict[str, torch.Tensor]) -> torch.Tensor | None:
        biases = [getattr(self, f"{name}_bias") for name in matrices]
        return None if biases[0] is None else torch.cat(biases)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not is_whole(size):
            raise InputError(f"{name} must be a positive integer, {size!r} was given")
