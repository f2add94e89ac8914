"""SAM where a framework owns the loop: the gradient at w is replaced by the one at w + ε.

transformers' Trainer and Lightning make the backward passes and the step themselves and leave no
room for SAM's closure, but there is a moment between the last backward pass and the step. Then ε is
computed from the gradients that are there (of the whole batch, all micro-batches together), every
micro-batch is passed once more at w + ε, and the weights are put back:

    second = SecondGradient(rho=0.05)
    for batch in micro_batches:
        second.before(model, lambda last, batch=batch: backward(batch))
        backward(batch)
    second.take(optimizer.param_groups)
    optimizer.step()                                   # from w, with ∇L(w + ε)

Two examples. With rho = 0 nothing is passed again. With a GradScaler gradients may still be scaled:
ε depends on their direction alone, and an inf in them leaves the weights where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from levelhead.base.errors import InputError
from levelhead.training.sam import SAM
from levelhead.training.second_pass import Footprint

__all__ = ["SecondGradient"]

# Makes forward and backward pass of one micro-batch again; told whether it is the last of them.
Again = Callable[[bool], object]


class _Micro(NamedTuple):
    model: nn.Module
    footprint: Footprint
    random: list[Tensor]
    again: Again


class _Still(Optimizer):
    """Steps nowhere: SAM over it leaves the weights at w and the gradients of w + ε."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"maximize": False})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


class SecondGradient:
    """The second pass of SAM (`training.sam`), made by others than an optimiser.

    Args:
        rho: radius ρ ≥ 0 in units of the weights; 0 switches it off.
        adaptive: relative to each weight (ASAM).

    In the second pass each micro-batch meets the random state it met in the first, and buffers and
    power iterations end as the first pass left them, as within `SAM.ascent_pass`. `ascents` counts
    the displacements made. Raises InputError for a ρ that is not a finite number ≥ 0.

    >>> import torch
    >>> w = nn.Linear(2, 1, bias=False)
    >>> w.weight.data = torch.tensor([[3.0, 4.0]])
    >>> optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
    >>> def backward(last=True):
    ...     (0.5 * w.weight.square().sum()).backward()
    >>> second = SecondGradient(rho=0.5)
    >>> second.before(w, backward)
    >>> backward()
    >>> second.take(optimizer.param_groups)
    >>> w.weight.grad                                    # w + 0.5 w/‖w‖
    tensor([[3.3000, 4.4000]])
    """

    def __init__(self, rho: float, adaptive: bool = False) -> None:
        self.rho = float(rho)
        self.adaptive = adaptive
        self.ascents = 0
        self._micros: list[_Micro] = []
        if self.rho != 0.0:
            self._sam([{"params": [nn.Parameter()]}])  # refuses what SAM refuses

    def before(self, model: nn.Module, again: Again) -> None:
        """A micro-batch is about to be passed through `model`; `again(last)` passes it once more.

        It makes forward and backward pass, adding to the gradients; `last` says whether it is the
        last micro-batch, after which processes that train together average their gradients.
        """
        if self.rho == 0.0:
            return
        # Modules may have come and gone since the last batch, so that nothing is kept here.
        footprint = Footprint((model,))
        self._micros.append(_Micro(model, footprint, footprint.random_state(), again))

    def forget(self) -> None:
        """Forget micro-batches of a step that was never made."""
        self._micros = []

    def take(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Let the gradients of the weights in `groups` (those of an optimiser) be those at w + ε.

        Called when the gradients of all micro-batches are there, before anything clips them. Where
        the gradient is zero or not finite there is nowhere to go, and it stays. Weights are back,
        bit for bit, also when a pass raises. Raises InputError as SAM does for complex weights and
        sparse gradients, and if no micro-batch was announced.
        """
        if self.rho == 0.0:
            return
        micros, self._micros = self._micros, []
        if not micros:
            raise InputError(
                "SAM has no micro-batch to pass again before this step: the optimizer steps twice, "
                "or evaluates the loss itself; choose one that steps once on given gradients."
            )
        sam = self._sam(
            [
                {"params": list(group["params"]), "maximize": bool(group.get("maximize", False))}
                for group in groups
            ]
        )

        def second() -> None:
            for model in {id(micro.model): micro.model for micro in micros}.values():
                model.zero_grad()
            sam.zero_grad()
            for micro in micros:
                with micro.footprint.replayed(micro.random):
                    micro.again(micro is micros[-1])

        passes = iter((lambda: None, second))

        def closure() -> float:
            next(passes)()
            # Not the loss: processes whose losses differ must all go on, or none. Their gradients
            # agree, and SAM looks at these, too.
            return 0.0

        sam.step(closure)
        self.ascents += sam.ascent_steps

    def _sam(self, groups: list[dict[str, Any]]) -> SAM:
        return SAM(groups, _Still, rho=self.rho, adaptive=self.adaptive)
