"""Constraints: what acts on live weights between optimiser steps, where penalties act in the loss.

    QKClip         scales queries and keys of heads whose largest logit exceeds a threshold
    GaugeBalance   rewrites attention weights in their balanced gauge; the function stays

Layers are those that `weights.layouts` finds. A `Constraint` has `apply(model, optimizer)`, to be
called in a loop every N steps, or is attached to an optimiser, after whose every N-th step it then
acts. With DistributedDataParallel every process applies it to the wrapped model: largest logits are
those of all processes, and rewritten weights are the first one's.

Two examples. `attach(QKClip(100.0, source=capture.collect), model, optimizer)` clips after each
step by the logits that the capture saw. `GaugeBalance().apply(model, optimizer)` balances once.

σReparam, the third constraint on weights, is a parametrisation: `nn.sigma_reparam`. Fold it before
these two act.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.training.constraint_clip import Clip, ClipReport, QKClip, largest_logits, qk_clip
from levelhead.training.constraint_gauge import (
    Balanced,
    BalanceReport,
    GaugeBalance,
    balance_gauge,
)

__all__ = [
    "Attached",
    "BalanceReport",
    "Balanced",
    "Clip",
    "ClipReport",
    "Constraint",
    "GaugeBalance",
    "QKClip",
    "attach",
    "balance_gauge",
    "largest_logits",
    "qk_clip",
]


class Constraint(Protocol):
    """What acts on a model's weights between optimiser steps."""

    name: str

    def check(self, model: nn.Module) -> None:
        """Raise what `apply` would raise for this model, and act not."""

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> object:
        """Act once; the report says, as a sentence too, what was done and what was refused."""


class Attached:
    """A constraint that acts after every `every`-th step of an optimiser; made by `attach`.

    `report` is the last one, None before; `steps` counts optimiser steps. `remove()` ends it, and
    so does leaving it as a context manager.
    """

    def __init__(
        self, constraint: Constraint, model: nn.Module, optimizer: Optimizer, every: int
    ) -> None:
        self.report: object | None = None
        self.steps = 0
        self._constraint, self._model, self._every = constraint, model, every
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self.steps % self._every == 0:
            self.report = self._constraint.apply(self._model, optimizer)

    def remove(self) -> None:
        """Act no more."""
        self._handle.remove()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def attach(
    constraint: Constraint, model: nn.Module, optimizer: Optimizer, every: int = 1
) -> Attached:
    """Let `constraint` act on `model` after every `every`-th step of `optimizer`.

    Steps that a GradScaler leaves out do not count. Attach after `levelhead.watch` has been
    entered if the update it reads is to be the optimiser's alone. Raises InputError for an `every`
    below 1, and at once what `constraint` raises for this model: no attention, nothing measured.

    >>> import torch
    >>> model = nn.MultiheadAttention(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with attach(GaugeBalance(), model, optimizer, every=2) as balancing:
    ...     for _ in range(4):
    ...         optimizer.step()
    >>> balancing.steps, type(balancing.report).__name__
    (4, 'BalanceReport')
    """
    if not is_whole(every):
        raise InputError(f"every={every!r} was given; expected a whole number of steps ≥ 1.")
    constraint.check(model)
    return Attached(constraint, model, optimizer, every)
