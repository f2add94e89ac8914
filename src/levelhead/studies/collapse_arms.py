"""The arms of the collapse study: what is added to the loss, or put in place of attention.

    A            nothing, from the failing setting; O is the same from an ordinary start
    B.<penalty>  a penalty with weight λ
    C.<penalty>  weight decay ‖W‖² that pulls as hard as that penalty did, see below
    D.core       attention with a low-rank head core, λ being its share of the inner ranks
    E.naive      ‖UᵀU - I‖² of the head factor U of a Tucker decomposition

Axes as in `weights.attention_view`. An `Addition` is asked once a step for what it adds. Equal
strength: the coefficient of C is the mean norm of the gradient of λ·penalty over that of ‖W‖², both
with respect to attention weights and along the trainings *with the penalty*. Matching both on the
weights of C itself would run away: what does not see the size of weights pulls as 1/‖W‖, so that
decay shrinks weights, which makes the decay stronger.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.nn.replacement import replace_attention, restore_attention
from levelhead.training import penalties
from levelhead.training.penalties import Penalty
from levelhead.training.penalty_layers import LiveLayers
from levelhead.weights.attention_view import AttentionView

__all__ = [
    "PENALTIES",
    "Addition",
    "addition",
    "family",
    "gradient_norm",
    "naive_penalty",
    "readable",
    "structured",
]

Make = Callable[[nn.Module, float], Penalty]
# Heads are compared, and spectra taken, in both of what a head is: its form and its map.
PENALTIES: Mapping[str, Make] = {
    "coherence": lambda model, weight: penalties.coherence(model, weight, form="both"),
    "log_det": lambda model, weight: penalties.log_det(model, weight, form="both"),
    "nuclear_ratio": lambda model, weight: penalties.nuclear_ratio(model, weight, form="both"),
    "entropy_rank": lambda model, weight: penalties.entropy_rank(model, weight, form="both"),
    "rank_floor": lambda model, weight: penalties.rank_floor(
        model, weight, form="both", floor=max(1.5, _narrowest(model) / 2)
    ),
    "nuclear": lambda model, weight: penalties.nuclear_norm(model, weight, form="both"),
    "spectral": lambda model, weight: penalties.spectral_norm(model, weight, form="both"),
    "core_sparsity": lambda model, weight: penalties.core_sparsity(model, weight, form="both"),
    "entropy_floor": lambda model, weight: penalties.entropy_floor(model, weight, floor=0.5),
    "stability": penalties.stability,
}


def family(arm: str) -> tuple[str, str]:
    """Letter and name of an arm.

    >>> family("B.coherence"), family("A")
    (('B', 'coherence'), ('A', ''))
    """
    letter, _, name = arm.partition(".")
    return letter, name


def _narrowest(model: nn.Module) -> int:
    """The inner dimension of the narrowest head."""
    return min(view.q.shape[1] for view in LiveLayers(model).views())


class Addition:
    """What an arm adds to the loss of a step: nothing, unless a subclass says otherwise.

    `measured` are numbers of the last sampled step: how hard it pulls (`pull`), and the like.
    """

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}

    def __call__(self, loss: Tensor, sampled: bool) -> Tensor:
        """The loss with what is added; `sampled`: take measurements."""
        return loss

    def step(self) -> None:
        """A step is done."""

    def state(self) -> dict[str, Any]:
        """What it keeps between epochs, as plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned."""

    def close(self) -> None:
        """Leave the model as it was."""


class _Penalised(Addition):
    """B: a penalty; `decay_pull` is the pull of weight decay with the coefficient one."""

    def __init__(self, penalty: Penalty, model: nn.Module) -> None:
        super().__init__()
        self.penalty, self.control = penalty, penalties.l2(model, 1.0)

    def __call__(self, loss: Tensor, sampled: bool) -> Tensor:
        value = self.penalty()
        if sampled:
            parameters = self.control.parameters()
            self.measured = {
                "pull": gradient_norm(value, parameters),
                "decay_pull": gradient_norm(self.control(), parameters),
            }
        return loss + value

    def step(self) -> None:
        self.penalty.step()

    def state(self) -> dict[str, Any]:
        return _plain(self.penalty.state_dict())  # type: ignore[no-any-return]

    def load(self, state: Mapping[str, Any]) -> None:
        self.penalty.load_state_dict(_tensors(dict(state)))

    def close(self) -> None:
        self.penalty.close()


class _Decay(Addition):
    """C: weight decay with a coefficient."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        super().__init__()
        self.control, self.strength = penalties.l2(model, 1.0), strength

    def __call__(self, loss: Tensor, sampled: bool) -> Tensor:
        if self.strength == 0:  # of a penalty that never pulled
            return loss
        value = self.strength * self.control.value()
        if sampled:
            self.measured = {"pull": gradient_norm(value, self.control.parameters())}
        return loss + value


class _Naive(Addition):
    """E: the penalty that cannot act, and what its gradient is."""

    def __init__(self, model: nn.Module, weight: float) -> None:
        super().__init__()
        self.live, self.weight = LiveLayers(model), weight

    def __call__(self, loss: Tensor, sampled: bool) -> Tensor:
        value = torch.stack([naive_penalty(view) for view in self.live.views()]).mean()
        if sampled:
            parameters = self.live.parameters()
            own = gradient_norm(value, parameters)
            task = gradient_norm(loss, parameters)
            self.measured = {
                "pull": self.weight * own,
                "naive": float(value.detach()),
                "naive_share": own / task if task > 0 else math.nan,
            }
        return loss + self.weight * value.to(loss.dtype)


def naive_penalty(view: AttentionView) -> Tensor:
    """‖UᵀU - I‖² of the left singular vectors U [h, h] of the head tensor's head unfolding.

    U is the head factor of a higher-order SVD, and of orthogonal iteration at full head rank. A
    scalar, zero up to rounding whatever the heads are, and so is its gradient (theory of the
    study: U is orthonormal by construction).
    """
    unfolded = view.head_tensor().double().flatten(1)
    u = torch.linalg.svd(unfolded, full_matrices=False).U
    eye = torch.eye(u.shape[1], dtype=u.dtype, device=u.device)
    found: Tensor = (u.mT @ u - eye).square().sum()
    return found


def addition(arm: str, weight: float, model: nn.Module) -> Addition:
    """What `arm` adds to the loss of `model`; `weight` is λ, and of C the coefficient.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> type(addition("A", 0.0, model)) is Addition
    True
    """
    letter, name = family(arm)
    if letter == "B":
        return _Penalised(PENALTIES[name](model, weight), model)
    if letter == "C":
        return _Decay(model, weight)
    if letter == "E":
        return _Naive(model, weight)
    return Addition()


def structured(arm: str, share: float, model: nn.Module) -> None:
    """Put the low-rank head core of arm D in place; other arms are left alone."""
    if family(arm)[0] == "D":
        replace_attention(model, (1.0, share, share))


def readable(model: nn.Module, arm: str) -> nn.Module:
    """The model with plain attention layers, which are what all measurements read."""
    if family(arm)[0] != "D":
        return model
    plain = copy.deepcopy(model)
    restore_attention(plain)
    return plain


def gradient_norm(value: Tensor, parameters: Sequence[nn.Parameter]) -> float:
    """‖∂value/∂parameters‖; 0 where nothing depends on them. The graph is kept."""
    if not value.requires_grad or not parameters:
        return 0.0
    slopes = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    found = [s.double().square().sum() for s in slopes if s is not None]
    return float(torch.stack(found).sum().sqrt()) if found else 0.0


# ── states of penalties as plain values ──


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.tolist(), "dtype": kind, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"tensor", "dtype", "shape"}:
            made = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
            return made.view(value["shape"])
        return {key: _tensors(inner) for key, inner in value.items()}
    return [_tensors(inner) for inner in value] if isinstance(value, list) else value
