"""The step of torch's fused Adam without the bookkeeping that torch does again at each step.

`torch.optim.Adam.step` collects weights, gradients and moments anew, groups them by device, checks
options and opens a profiler record: for weights of some hundred kB that takes as long as the
arithmetic. Here the lists are kept between steps and the same kernel is called, to the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

__all__ = ["FusedSteps"]

_BEYOND = ("amsgrad", "maximize", "capturable", "differentiable")


class _Lists(NamedTuple):
    """A kernel, and the weights, their two moments and their step counts in one order."""

    kernel: Any
    weights: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    counts: list[Tensor]


class FusedSteps:
    """Takes the steps of `optimizer`, from the gradients that its weights have.

    The state stays the optimiser's own, so that its state_dict, rates and weight decay are as
    always. Groups, other options and state are taken to be as at the first step: after
    `load_state_dict`, or whatever else exchanges them, call `forget`. Where the optimiser is no
    fused Adam or AdamW of one group with plain options, where a weight has no gradient, or where a
    hook listens to steps, the step is torch's.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> steps = FusedSteps(torch.optim.Adam([weight], lr=0.5, fused=True))
    >>> for _ in range(2):
    ...     weight.grad = torch.tensor([3.0])
    ...     steps()
    >>> round(weight.item(), 6)
    1.0
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._lists: _Lists | None = None

    def forget(self) -> None:
        """Collect the lists anew: the state of the optimiser was exchanged."""
        self._lists = None

    def __call__(self) -> None:
        """One step."""
        lists = self._lists
        gradients = [] if lists is None else [w.grad for w in lists.weights if w.grad is not None]
        if lists is None or len(gradients) < len(lists.weights) or _heard(self.optimizer):
            self.optimizer.step()
            self._lists = self._collected()
            return
        group = self.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        with torch.no_grad():
            torch._foreach_add_(lists.counts, 1)
            lists.kernel(
                lists.weights,
                gradients,
                lists.first,
                lists.second,
                [],
                lists.counts,
                amsgrad=False,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )

    def _collected(self) -> _Lists | None:
        """The lists of a step in which all weights took part; None if it must stay torch's."""
        if not _is_plain(self.optimizer):
            return None
        group = self.optimizer.param_groups[0]
        weights = list(group["params"])
        states = [self.optimizer.state[w] for w in weights if w in self.optimizer.state]
        alike = len({(weight.device, weight.dtype) for weight in weights}) == 1
        if not alike or len(states) < len(weights):
            return None
        # Older versions of torch know the option by the class alone.
        decoupled = group.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        kept = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        return _Lists(kernel, weights, *kept)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is Adam or AdamW, fused, of one group whose options are all in its formula."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    group, *others = optimizer.param_groups
    numbers = all(isinstance(group[name], (int, float)) for name in ("lr", "eps", "weight_decay"))
    plain = numbers and not any(group[option] for option in _BEYOND)
    return bool(group["fused"]) and plain and not others


def _heard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are to be called before or after a step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )
