"""The toy problem of Ilbert et al. (2024), eq. 2: data, arms, and what is read off a model.

    Y = X W_toy + ε,   X [D, L], W_toy [L, H], ε [D, H], all standard normal

Axes. Windows are X [N, D, L] and Y [N, D, H]. A training window's X and Y lie side by side,
[N, D, L + H]: a batch is gathered at once, and X [N·D, L] is a matrix as it lies, whose rows do not
start at multiples of a power of two (a product with Xᵀ would lose a tenth to cache conflicts). A
"leak" is what attention adds to a
forecast for not being the identity: (A − I) X W_V W_O W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from levelhead.base.errors import InputError
from levelhead.nn.samformer import SAMformerNet, attention_matrix
from levelhead.nn.sigma_reparam import sigma_reparam

__all__ = [
    "ARMS",
    "Arm",
    "Joined",
    "Toy",
    "ToyNet",
    "built",
    "graded_loss",
    "learner",
    "mean_loss",
    "measured",
    "toy_data",
]

Mixing = Literal["learned", "identity", "uniform"]
# Rows of A whose own weight is below this count as not being the identity.
_OWN = 0.9


@dataclass(frozen=True, eq=False)
class Toy:
    """Training windows [N, D, L + H]; x_val, y_val [V, D, ·]; truth [L, H]."""

    windows: Tensor
    x_val: Tensor
    y_val: Tensor
    truth: Tensor

    @property
    def x(self) -> Tensor:
        """What is known of the training windows, [N, D, L]."""
        return self.windows[..., : len(self.truth)]

    @property
    def y(self) -> Tensor:
        """What is to be forecast, [N, D, H]."""
        return self.windows[..., len(self.truth) :]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """X and Y of the training windows at the positions `index` [B]."""
        gathered = self.windows.index_select(0, index.to(self.windows.device))
        return gathered[..., : len(self.truth)], gathered[..., len(self.truth) :]


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
    windows = torch.cat((x[:training], y[:training]), dim=-1)
    return Toy(windows, x[training:].clone(), y[training:].clone(), truth)


@dataclass(frozen=True)
class Arm:
    """How a model is made and trained; the interventions change one thing each.

    Args:
        says: in a few words.
        rho: SAM's radius as a share of the setting `rho`.
        gamma: σReparam's γ at the start ("preserve": σ(W)), None without it.
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
    gamma: float | Literal["preserve"] | None = None
    rate: float = 1.0
    trained: tuple[str, ...] = ("query", "key", "value", "output", "head")
    mixing: Mixing = "learned"
    entropy: float = 0.0
    quiet: float = 0.0
    tied: bool = False
    silent: bool = False

    @property
    def intervention(self) -> bool:
        """Whether it changes one of entropy, sharpness, rank and the attended path; `says` which.

        >>> ARMS["entropy-none"].intervention, ARMS["sam"].intervention
        (True, False)
        """
        return ":" in self.says


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
    "sigma-kept": Arm("σReparam, γ = σ(W)", gamma="preserve"),
    "sigma-kept-fast": Arm("σReparam, γ = σ(W), ten times the rate", gamma="preserve", rate=10.0),
    # interventions: one thing each
    "entropy-none": Arm("entropy: A is the identity from the start", mixing="identity"),
    "entropy-full": Arm("entropy maximal, rank one: A is the mean", mixing="uniform"),
    "entropy-floor": Arm("entropy: a penalty keeps rows soft", entropy=100.0),
    "sharpness": Arm("sharpness: SAM with a third of the radius", rho=1 / 3),
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


class Joined(nn.Module):
    """W_Q, W_K, W_V and W of a model side by side in one parameter [L, 3m + H], and its W_O [m, L].

    Training this trains the model, whose four weights become views of the parameter: one product
    with X takes them as they lie, and to Adam and SGD every entry is alike. It is no faster way to
    SAM, whose radius is a norm over weights and would round differently.
    """

    def __init__(self, model: ToyNet) -> None:
        super().__init__()
        assert model.key is not None
        assert model.output is not None
        blocks = (model.query, model.key, model.value, model.head)
        self.weight = nn.Parameter(_side_by_side(*blocks).detach())
        self.output = model.output
        for block, view in zip(
            blocks, _blocks(self.weight.detach(), len(self.output)), strict=True
        ):
            block.data = view


def learner(model: ToyNet, arm: Arm) -> ToyNet | Joined:
    """What `train` and `graded_loss` are given: the model with its weights joined where it can be.

    It can where Adam or SGD trains all five weights on the error alone.
    """
    if _writes_gradients(model, arm) and model.key is not None and not arm.rho:
        return Joined(model)
    return model


def _side_by_side(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.cat((q, k, v, w), dim=1)


def _blocks(joined: Tensor, m: int) -> tuple[Tensor, ...]:
    """The parts of the last axis that belong to W_Q, W_K, W_V and W."""
    return joined.split_with_sizes([m, m, m, joined.shape[-1] - 3 * m], dim=-1)


class _Kept(NamedTuple):
    """What the backward pass needs of the forward pass.

    x [N, L]; query, key, value = X W_Q, X W_K, X W_V [B, D, m]; turned = A(X)ᵀ [B, D, D];
    attended = A X W_V [N, m]; after = W_O W [m, H]; residual [N, H]; N = B·D.
    """

    x: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    turned: Tensor
    attended: Tensor
    after: Tensor
    residual: Tensor


def _error(x: Tensor, y: Tensor, joined: Tensor, o: Tensor) -> tuple[Tensor, _Kept]:
    """Mean squared error of f(X) = X W + A(X) X W_V W_O W, with one product with X.

    `joined` is [W_Q W_K W_V W].
    """
    windows, channels, context = x.shape
    m = len(o)
    rows = x.view(-1, context)
    z = (rows @ joined).view(windows, channels, -1)
    query, key, value, head = _blocks(z, m)
    # Aᵀ, whose columns sum to one: a softmax along an outer axis is vectorised over the inner one,
    # along a short last axis it is not.
    turned = torch.softmax(torch.bmm(key, query.mT) / math.sqrt(m), dim=1)
    attended = torch.bmm(turned.mT, value).view(-1, m)
    after = o @ joined[:, 3 * m :]
    residual = (head - y).view(len(rows), -1).addmm_(attended, after)
    errors = residual.view(-1)
    loss = torch.dot(errors, errors) / errors.numel()
    return loss, _Kept(rows, query, key, value, turned, attended, after, residual)


def _gradients(
    kept: _Kept, joined: Tensor, o: Tensor, slope: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    """`slope` times the derivatives of `_error` in `joined` and o, with one product with Xᵀ."""
    x, query, key, value, turned, attended, after, residual = kept
    m, w = len(o), joined[:, 3 * len(o) :]
    g = residual * (2 / residual.numel() * slope)
    d_attended = (g @ after.T).view(query.shape)
    d_after = attended.T @ g
    d_turned = torch.bmm(value, d_attended.mT)
    d_logits = torch.ops.aten._softmax_backward_data(d_turned, turned, 1, turned.dtype)
    d_logits /= math.sqrt(m)
    d_query, d_key = torch.bmm(d_logits.mT, key), torch.bmm(d_logits, query)
    d_value = torch.bmm(turned, d_attended)
    d_z = torch.cat([part.view(-1, m) for part in (d_query, d_key, d_value)] + [g], dim=1)
    d_joined = x.T @ d_z
    d_joined[:, 3 * m :].addmm_(o.T, d_after)
    return d_joined, d_after @ w.T


class _SquaredError(torch.autograd.Function):
    """`_error` on the tape; second derivatives go through `ToyNet.core` instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, joined: Tensor, o: Tensor) -> Tensor:
        loss, kept = _error(x, y, joined, o)
        ctx.save_for_backward(*kept, joined, o)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        *kept, joined, o = ctx.saved_tensors
        return None, None, *_gradients(_Kept(*kept), joined, o, slope)


def mean_loss(model: ToyNet, arm: Arm, x: Tensor, y: Tensor, floor: float) -> Tensor:
    """Mean squared error of windows [B, D, ·], with the arm's penalty; for first derivatives.

    `floor`: the entropy in nat that the penalty of the arm "entropy-floor" keeps.
    """
    # σReparam computes a weight whenever it is read: here once for a pass.
    with parametrize.cached():
        if model.mixing == "learned" and model.query.requires_grad:
            joined = _side_by_side(*_taken(model))
            loss: Tensor = _SquaredError.apply(x, y, joined, model.output)  # type: ignore[no-untyped-call]
        else:
            loss = torch.nn.functional.mse_loss(model.core(x), y)
        if arm.entropy:
            maps = model.maps(x)
            entropy = -(maps * maps.clamp_min(1e-30).log()).sum(-1)
            loss = loss + arm.entropy * (floor - entropy).clamp_min(0).square().mean()
        if arm.quiet:
            assert model.output is not None
            gram = (model.value.mT @ model.value) * (model.output @ model.output.mT)
            loss = loss + arm.quiet * gram.sum()
    return loss


def graded_loss(model: ToyNet | Joined, arm: Arm, x: Tensor, y: Tensor, floor: float) -> Tensor:
    """`mean_loss` for a closure of `training.loop.train`: the plain error writes its gradients.

    For an error without penalty in weights that are parameters themselves the tape only costs
    time: the loss has no graph then, and its gradients are added to `grad`. Otherwise it is
    `mean_loss`, and the loop takes the derivative. `model` is what `learner` gives.
    """
    if isinstance(model, Joined):
        with torch.inference_mode():
            loss, kept = _error(x, y, model.weight, model.output)
            parts = _gradients(kept, model.weight, model.output)
            _add_gradients((model.weight, model.output), parts)
        return loss
    if not _writes_gradients(model, arm):
        return mean_loss(model, arm, x, y, floor)
    assert model.output is not None
    taken = _taken(model)
    with torch.inference_mode():
        joined = _side_by_side(*taken)
        loss, kept = _error(x, y, joined, model.output)
        d_joined, d_output = _gradients(kept, joined, model.output)
        _add_gradients((*taken, model.output), (*_blocks(d_joined, len(model.output)), d_output))
    return loss


def _add_gradients(weights: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for weight, part in zip(weights, parts, strict=True):
        # W_Q = W_K comes twice; fused Adam reads gradients in the order of their weights.
        weight.grad = part.contiguous() if weight.grad is None else weight.grad + part


def _writes_gradients(model: ToyNet, arm: Arm) -> bool:
    """Whether the loss is the error alone, in five weights that are all trained parameters."""
    plain = model.mixing == "learned" and not arm.entropy and not arm.quiet
    if not plain or parametrize.is_parametrized(model):
        return False
    return all(weight.requires_grad for weight in model.parameters())


def _taken(model: ToyNet) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V, W, with which X is multiplied; W_Q twice where they are tied."""
    query = model.query
    return query, query if model.key is None else model.key, model.value, model.head


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
