"""The toy problem of Ilbert et al. (2024), eq. 2: data, arms, and what is read off a model.

    Y = X W_toy + ε,   X [D, L], W_toy [L, H], ε [D, H], all standard normal

Axes. Windows are X [N, D, L] and Y [N, D, H], one after the other in memory, so that a batch is
gathered in long rows and X [N·D, L] is a matrix as it lies. A "leak" is what attention adds to a
forecast for not being the identity: (A − I) X W_V W_O W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from levelhead.base.errors import InputError
from levelhead.nn.samformer import SAMformerNet, attention_matrix
from levelhead.nn.sigma_reparam import sigma_reparam

__all__ = ["ARMS", "Arm", "Toy", "ToyNet", "built", "mean_loss", "measured", "toy_data"]

Mixing = Literal["learned", "identity", "uniform"]
# Rows of A whose own weight is below this count as not being the identity.
_OWN = 0.9


@dataclass(frozen=True, eq=False)
class Toy:
    """Training and validation windows: x, y [N, D, ·], x_val, y_val [V, D, ·]; truth [L, H]."""

    x: Tensor
    y: Tensor
    x_val: Tensor
    y_val: Tensor
    truth: Tensor


def toy_data(
    context: int, horizon: int, channels: int, training: int, validation: int, seed: int
) -> Toy:
    """Draw the data of eq. 2 from an own generator, in float32.

    >>> toy_data(8, 3, 2, 5, 4, seed=0).y.shape
    torch.Size([5, 2, 3])
    """
    draw = torch.Generator().manual_seed(7_919 * seed + 17)
    count = training + validation
    truth = torch.randn(context, horizon, generator=draw)
    x = torch.randn(count, channels, context, generator=draw)
    y = x @ truth + torch.randn(count, channels, horizon, generator=draw)
    return Toy(
        x[:training].clone(),
        y[:training].clone(),
        x[training:].clone(),
        y[training:].clone(),
        truth,
    )


@dataclass(frozen=True)
class Arm:
    """How a model is made and trained; the interventions change one thing each.

    Args:
        says: in a few words.
        rho: SAM's radius as a share of the setting `rho`.
        gamma: σReparam's γ at the start, None without it.
        rate: factor on the learning rate.
        trained: parameters that are trained; others stay as they were drawn.
        mixing: "learned", or attention replaced by the identity or by the mean of all channels.
        entropy: weight of a penalty on row entropy below `target` nat.
        quiet: weight of a penalty on ‖W_V W_O‖_F².
        tied: W_Q = W_K.
        silent: W_O is zero and stays so, so that nothing is attended.
    """

    says: str
    rho: float = 0.0
    gamma: float | None = None
    rate: float = 1.0
    trained: tuple[str, ...] = ("query", "key", "value", "output", "head")
    mixing: Mixing = "learned"
    entropy: float = 0.0
    quiet: float = 0.0
    tied: bool = False
    silent: bool = False


ARMS: dict[str, Arm] = {
    "transformer": Arm("all weights trained by Adam"),
    "random": Arm("attention, W_V and W_O frozen as drawn", trained=("head",)),
    "sam": Arm("sharpness-aware minimisation", rho=1.0),
    "sigma": Arm("σReparam on all weights, γ = 1", gamma=1.0),
    "sigma-fast": Arm("σReparam, γ = 1, ten times the rate", gamma=1.0, rate=10.0),
    "sam-sigma": Arm("SAM and σReparam", rho=1.0, gamma=1.0),
    "linear": Arm("W alone, nothing attended", trained=("head",), silent=True),
    "tied": Arm("W_Q = W_K", tied=True),
    "sam-tied": Arm("SAM, W_Q = W_K", rho=1.0, tied=True),
    # interventions: one thing each
    "entropy-none": Arm("entropy: A is the identity from the start", mixing="identity"),
    "entropy-full": Arm("entropy maximal, rank one: A is the mean", mixing="uniform"),
    "entropy-floor": Arm("entropy: a penalty keeps rows soft", entropy=1.0),
    "sharpness-low": Arm("sharpness: SAM with a tenth of the radius", rho=0.1),
    "sharpness-mid": Arm("sharpness: SAM with a third of the radius", rho=1 / 3),
    "quiet": Arm("the attended path: a penalty on W_V W_O", quiet=1e-3),
}


class ToyNet(SAMformerNet):
    """SAMformer without RevIN and biases, whose attention may be replaced by a fixed mixing."""

    def __init__(
        self, context: int, horizon: int, mixing: Mixing, init: str, tied: bool, width: int
    ) -> None:
        if init not in ("keras", "glorot"):
            raise InputError(f"the initialisation {init!r} was given: 'keras' or 'glorot' expected")
        kind: Literal["keras", "glorot"] = "keras" if init == "keras" else "glorot"
        super().__init__(
            context, horizon, revin=False, bias=False, init=kind, tie_qk=tied, width=width
        )
        self.mixing = mixing

    def core(self, normalised: Tensor) -> Tensor:
        """Forecast [B, D, H] of windows [B, D, L]; window-major, unlike the class it extends."""
        parts = self._products(normalised)
        attended = torch.bmm(self._maps(parts), parts["value"])
        assert self.output is not None
        after = self.output @ self.head
        mixed = attended.view(-1, attended.shape[-1]) @ after
        return parts["head"] + mixed.view_as(parts["head"])

    def maps(self, x: Tensor) -> Tensor:
        """A(X) [N, D, D] of windows [N, D, L], as it is used."""
        return self._maps(self._products(x))

    def _maps(self, parts: dict[str, Tensor]) -> Tensor:
        query, key = parts["query"], parts["key"]
        if self.mixing == "learned":
            return attention_matrix(query, key)
        windows, channels, _ = query.shape
        if self.mixing == "identity":
            return torch.eye(channels, dtype=query.dtype, device=query.device).expand(
                windows, channels, channels
            )
        return query.new_full((windows, channels, channels), 1 / channels)


def built(arm: Arm, context: int, horizon: int, *, init: str, width: int, seed: int) -> ToyNet:
    """The model of an arm, drawn from `seed` alone; what the arm does not train is frozen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # σReparam's exact start draws nothing, but parametrize may
        model = ToyNet(context, horizon, arm.mixing, init, arm.tied, width)
        model.reset_parameters(generator)
        if arm.silent:
            with torch.no_grad():
                assert model.output is not None
                model.output.zero_()
        names = [
            n
            for n in ("query", "key", "value", "output", "head")
            if getattr(model, n, None) is not None
        ]
        if arm.gamma is not None:
            sigma_reparam(model, gamma=arm.gamma, names=names)
        else:
            for name in names:
                getattr(model, name).requires_grad_(name in arm.trained)
    return model


class _SquaredError(torch.autograd.Function):
    """Mean squared error of f(X) = X W + A(X) X W_V W_O W, with a backward pass written out.

    Its point is speed: one product with X forward and one backward, and no tensor of the tape but
    the few that are needed. Second derivatives go through `ToyNet.core` instead.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, w: Tensor
    ) -> Tensor:
        count, channels, _ = x.shape
        m = q.shape[1]
        z = (x.view(-1, x.shape[2]) @ torch.cat((q, k, v, w), dim=1)).view(count, channels, -1)
        query, key, value, head = torch.split(z, [m, m, m, w.shape[1]], dim=-1)
        maps = torch.softmax(torch.bmm(query, key.mT) / math.sqrt(m), dim=-1)
        attended = torch.bmm(maps, value)
        after = o @ w
        residual = torch.addmm(head.reshape(-1, w.shape[1]), attended.view(-1, m), after)
        residual -= y.view_as(residual)
        ctx.save_for_backward(x, z, maps, attended, after, residual, o, w)
        return residual.square().mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, z, maps, attended, after, residual, o, w = ctx.saved_tensors
        count, channels, m = attended.shape
        query, key, value, _ = torch.split(z, [m, m, m, w.shape[1]], dim=-1)
        g = residual * (2 / residual.numel() * slope)
        d_attended = (g @ after.mT).view_as(attended)
        d_after = attended.view(-1, m).mT @ g
        d_maps = torch.bmm(d_attended, value.mT)
        d_logits = torch.ops.aten._softmax_backward_data(d_maps, maps, -1, maps.dtype)
        d_logits /= math.sqrt(m)
        d_z = torch.cat(
            (
                torch.bmm(d_logits, key),
                torch.bmm(d_logits.mT, query),
                torch.bmm(maps.mT, d_attended),
                g.view(count, channels, -1),
            ),
            dim=-1,
        )
        d_joined = x.view(-1, x.shape[2]).mT @ d_z.view(-1, d_z.shape[-1])
        d_q, d_k, d_v, d_w = torch.split(d_joined, [m, m, m, w.shape[1]], dim=1)
        return None, None, d_q, d_k, d_v, d_after @ w.mT, d_w + o.mT @ d_after


def mean_loss(model: ToyNet, arm: Arm, x: Tensor, y: Tensor, floor: float) -> Tensor:
    """Mean squared error of windows [B, D, ·], with the arm's penalty; for first derivatives.

    `floor`: the entropy in nat that the penalty of the arm "entropy-floor" keeps.
    """
    assert model.output is not None
    if model.mixing == "learned" and model.query.requires_grad:
        key = model.query if model.key is None else model.key
        weights = (model.query, key, model.value, model.output, model.head)
        loss: Tensor = _SquaredError.apply(x, y, *weights)  # type: ignore[no-untyped-call]
    else:
        loss = torch.nn.functional.mse_loss(model.core(x), y)
    if arm.entropy:
        maps = model.maps(x)
        entropy = -(maps * maps.clamp_min(1e-30).log()).sum(-1)
        loss = loss + arm.entropy * (floor - entropy).clamp_min(0).square().mean()
    if arm.quiet:
        gram = (model.value.mT @ model.value) * (model.output @ model.output.mT)
        loss = loss + arm.quiet * gram.sum()
    return loss


@torch.no_grad()
def measured(model: ToyNet, x: Tensor, y: Tensor, sample: int = 256) -> dict[str, float]:
    """What is read off a model on windows [N, D, ·].

    loss; loss_identity and loss_uniform: with A replaced after training; own: mean diagonal of A;
    soft_rows: share of rows with own weight below .9; entropy in nat; nuclear, rank (effective):
    means over `sample` matrices; leak: mean square of the forecast's part (A − I) X W_V W_O W;
    attended: that of A X W_V W_O W; qk_norm, vo_norm, path_norm: spectral norms of W_Q W_Kᵀ,
    W_V W_O and W_V W_O W.
    """
    parts = model._products(x)
    maps = model._maps(parts)
    values = parts["value"]
    assert model.output is not None
    after = model.output @ model.head
    residual = parts["head"] - y
    channels = maps.shape[-1]
    attended = (maps @ values) @ after
    own = values @ after
    diagonal = maps.diagonal(dim1=1, dim2=2)
    sigma = torch.linalg.svdvals(maps[:sample].double())
    share = sigma / sigma.sum(-1, keepdim=True)
    key = model.query if model.key is None else model.key
    uniform = values.mean(1, keepdim=True) @ after
    found = {
        "loss": (residual + attended).square().mean(),
        "loss_identity": (residual + own).square().mean(),
        "loss_uniform": (residual + uniform).square().mean(),
        "own": diagonal.mean(),
        "soft_rows": (diagonal < _OWN).double().mean(),
        "entropy": -torch.special.xlogy(maps, maps).sum(-1).mean(),
        "nuclear": sigma.sum(-1).mean(),
        "rank": (-torch.special.xlogy(share, share).sum(-1)).exp().mean(),
        "leak": (attended - own).square().mean(),
        "attended": attended.square().mean(),
        "qk_norm": _product_norm(model.query, key.mT),
        "vo_norm": _product_norm(model.value, model.output),
        "path_norm": _product_norm(model.value, after),
        "entropy_limit": torch.tensor(math.log(channels)),
    }
    return {name: float(value) for name, value in found.items()}


def _product_norm(left: Tensor, right: Tensor) -> Tensor:
    """‖left right‖₂ for left [n, m], right [m, k] with a narrow m, without forming n × k."""
    r_left = torch.linalg.qr(left.double(), mode="r").R
    r_right = torch.linalg.qr(right.double().mT, mode="r").R
    norm: Tensor = torch.linalg.matrix_norm(r_left @ r_right.mT, 2)
    return norm
