"""When a step happens: an optimiser's step seen through its hooks, and the losses of steps.

Steps count from 1. Optimisers that wrap another (SAM with its `base_optimizer`, those of accelerate
and Lightning with their `optimizer`) are seen through the innermost one: it steps once, on
unperturbed weights, and only if the step is really made.

Two examples. A GradScaler that finds an infinity leaves out `optimizer.step()`: no step, no number.
A loop that accumulates four batches steps once in four backward passes: one step, whose loss is
the mean of the four if each was handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from levelhead.base.errors import InputError
from levelhead.base.records import Reading
from levelhead.training.watchers import roughness

__all__ = ["LossReadings", "Losses", "OptimizerSteps", "innermost"]

# Losses that are kept as tensors before they are brought to the processor together.
_MOST = 1024


def innermost(optimizer: object) -> Optimizer:
    """The optimiser that moves the weights, inside those that only wrap it.

    Raises InputError for anything else than a torch optimiser, such as the scheduler of one.

    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> type(innermost(torch.optim.SGD([w], lr=0.1))).__name__
    'SGD'
    """
    found: Any = optimizer
    if isinstance(found, LRScheduler):
        raise InputError(
            f"optimizer is a {type(found).__name__}, a scheduler: give the optimizer it schedules"
        )
    while True:
        inner = getattr(found, "base_optimizer", None) or getattr(found, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is found:
            break
        found = inner
    if not isinstance(found, Optimizer):
        raise InputError(
            f"optimizer is a {type(found).__name__}; expected a torch.optim.Optimizer, several in "
            "a list, or None for a loop that calls run.step(loss) itself"
        )
    return found


class OptimizerSteps:
    """Calls `begin(late)` before and `finish()` after each step of one or several optimisers.

    `late` says that gradients are made inside the step, by a closure: they are there in `finish`
    (those of the last evaluation). Several optimisers make one step together: it begins before the
    first of them moves and is finished when each has stepped. Raises InputError as `innermost`.
    """

    def __init__(
        self, optimizers: object, begin: Callable[[bool], None], finish: Callable[[], None]
    ) -> None:
        several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.optimizers = [innermost(optimizer) for optimizer in several]
        if not self.optimizers or len(set(map(id, self.optimizers))) < len(self.optimizers):
            raise InputError("optimizer is a list that is empty or names one twice: name each once")
        self._begin, self._finish = begin, finish
        self._begun = False
        self._skipped = False
        self._stepped: set[int] = set()
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Register the hooks."""
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def detach(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def gradient_factor(self) -> float:
        """What gradients are multiplied by to undo the scale that a fused step removes itself."""
        scale = vars(self.optimizers[0]).get("grad_scale")
        return 1.0 if scale is None else 1.0 / float(scale)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A fused optimiser is called by GradScaler in any case, and then does nothing.
        found_inf = vars(optimizer).get("found_inf")
        self._skipped = found_inf is not None and float(found_inf) > 0
        if self._begun or self._skipped:
            return
        self._begun = True
        self._begin(_closure(args, kwargs) is not None)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._skipped or not self._begun:
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self._begun = False
            self._finish()


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure of `optimizer.step(closure)`; `args` starts with the optimiser itself."""
    given = kwargs.get("closure")
    return args[1] if given is None and len(args) > 1 else given


class _Loss(NamedTuple):
    name: str
    step: int
    value: Tensor | float  # the sum of all that were handed over
    parts: int = 1


class Losses:
    """Losses handed over for steps, in whichever order to the step, kept without a transfer.

    If the first one came before any step was made, each belongs to the step that follows it; else
    to the step before it. Several of one step are its micro-batches: their mean is its loss. (So
    is that of a step a scaler left out and its repetition, which nobody can tell apart.)
    """

    def __init__(self) -> None:
        self._waiting: list[_Loss] = []
        self._early: bool | None = None
        self._placed = False

    @property
    def none(self) -> bool:
        """Whether no loss was ever handed over."""
        return self._early is None and not self._placed

    def add(self, loss: Tensor | float, steps: int, first: int, name: str = "loss") -> None:
        """Take a loss after `steps` steps, the first of which is number `first`.

        Raises InputError for anything that is not one number.
        """
        value = _one_number(loss, name)
        if name != "loss":
            self._waiting.append(_Loss(name, steps, value))
            return
        if self._early is None:
            self._early = steps < first
        step = steps + 1 if self._early else steps
        for i, held in enumerate(self._waiting):
            if (held.name, held.step) == (name, step):
                self._waiting[i] = _Loss(name, step, _sum(held.value, value), held.parts + 1)
                return
        self._waiting.append(_Loss(name, step, value))

    def add_at(self, loss: Tensor | float, step: int) -> None:
        """Take the loss of a step whose number is known."""
        self._placed = True
        self._waiting.append(_Loss("loss", step, _one_number(loss, "loss")))

    @property
    def many(self) -> bool:
        """Whether so many wait that they should be taken."""
        return len(self._waiting) >= _MOST

    def take(self, upto: int) -> list[tuple[str, int, float]]:
        """(name, step, mean) of all that belong to steps up to `upto`, as handed over."""
        ready = [w for w in self._waiting if w.step <= upto]
        self._waiting = [w for w in self._waiting if w.step > upto]
        return [
            (w.name, w.step, value / w.parts)
            for w, value in zip(ready, _numbers([w.value for w in ready]), strict=True)
        ]


class LossReadings(Losses):
    """Losses as Readings, and how rough they are since the last time."""

    def __init__(self) -> None:
        super().__init__()
        self._window: list[float] = []

    def readings(self, upto: int) -> list[Reading]:
        """Readings of what `take` gives, and `loss_roughness` (`watchers.roughness`) at the end."""
        losses = self.take(upto)
        found = [Reading(name, value, "1", {}, step, "loop") for name, step, value in losses]
        self._window += [value for name, _, value in losses if name == "loss"]
        rough = roughness(self._window)
        if rough == rough and losses:
            found.append(Reading("loss_roughness", rough, "1", {}, losses[-1][1], "loop"))
        self._window = self._window[-2:]
        return found


def _one_number(loss: Any, name: str) -> Tensor | float:
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise InputError(
                f"{name} has the shape {list(loss.shape)}; expected one number, such as the mean"
            )
        # A copy: loops divide their loss in place.
        return loss.detach().reshape(()).clone()
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is {loss!r}; expected a tensor of one number, or one") from error


def _sum(one: Tensor | float, other: Tensor | float) -> Tensor | float:
    """In float32 at least: half precision overflows soon."""
    wide = [
        t.float() if isinstance(t, Tensor) and t.dtype in (torch.float16, torch.bfloat16) else t
        for t in (one, other)
    ]
    return wide[0] + wide[1]


def _numbers(values: Sequence[Tensor | float]) -> list[float]:
    """All values as numbers; tensors of one device are brought over in one transfer."""
    found = [float("nan")] * len(values)
    devices: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            devices.setdefault(value.device, []).append(i)
        else:
            found[i] = value
    for places in devices.values():
        tensors: list[Any] = [values[i] for i in places]
        joint = torch.stack([t.double() for t in tensors]).tolist()
        for i, number in zip(places, joint, strict=True):
            found[i] = number
    return found
