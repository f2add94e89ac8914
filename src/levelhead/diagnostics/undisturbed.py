"""Looking at a model without a trace: random states, buffers, modes and weights, restored exactly.

Each is a context manager that puts back, bit for bit, what a measurement may change: the states of
torch's, numpy's and Python's global generators, the buffers of every module that runs, the
training flags of modules, the values of tensors.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = [
    "RandomState",
    "kept_buffers",
    "kept_random_state",
    "kept_values",
    "own_casts",
    "uncompiled",
    "uses",
]


@dataclass(frozen=True, eq=False)
class RandomState:
    """The states of torch's CPU generator, those of `devices`, numpy's and Python's."""

    cpu: Tensor
    devices: dict[torch.device, Tensor]
    numpy: Any
    python: Any

    @classmethod
    def now(cls, tensors: Iterable[Tensor] = ()) -> RandomState:
        """The states at this moment; on the accelerators on which `tensors` lie as well."""
        devices = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
        states = {d: getattr(torch, d.type).get_rng_state(*_which(d)) for d in devices}
        return cls(torch.get_rng_state(), states, np.random.get_state(), random.getstate())  # noqa: NPY002

    def restore(self) -> None:
        """Put all generators back."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            getattr(torch, device.type).set_rng_state(state, *_which(device))
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    """How to name a device to its own module: there is one of MPS, which some releases ask."""
    return () if device.type == "mps" else (device,)


@contextmanager
def kept_random_state(tensors: Iterable[Tensor] = ()) -> Iterator[RandomState]:
    """Restore all global random states on leaving; inside, `.restore()` starts them afresh.

    >>> with kept_random_state() as state:
    ...     one = torch.rand(1); state.restore(); other = torch.rand(1)
    >>> bool(one == other), bool(torch.rand(1) == one)
    (True, True)
    """
    state = RandomState.now(tensors)
    try:
        yield state
    finally:
        state.restore()


@dataclass(eq=False)
class _Buffers:
    """Buffers of the modules seen so far: the objects and their values."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    saved: list[tuple[nn.Module, dict[str, Tensor | None]]] = field(default_factory=list)
    values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see(self, module: nn.Module, *_: object) -> None:
        """Save the buffers of a module and of everything below it, the first time only."""
        if id(module) in self.modules:
            return
        for part in module.modules():
            if id(part) in self.modules:
                continue
            self.modules[id(part)] = part
            if part._buffers:
                self.saved.append((part, dict(part._buffers)))
            for buffer in part._buffers.values():
                if buffer is not None and id(buffer) not in self.values:
                    self.values[id(buffer)] = (buffer, buffer.detach().clone())

    def restore(self) -> None:
        for part, buffers in self.saved:
            part._buffers.clear()
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in self.values.values():
                # A copy without need would invalidate graphs that hold the buffer. Versions alone
                # do not tell: batch norm's kernel writes running statistics behind their back.
                if not buffer.equal(value):
                    buffer.copy_(value)


@contextmanager
def kept_buffers(*modules: nn.Module) -> Iterator[None]:
    """Restore the buffers of `modules`, and of every module that runs inside, on leaving.

    >>> norm = nn.BatchNorm1d(2)
    >>> with kept_buffers():
    ...     _ = norm(torch.ones(4, 2))
    >>> norm.num_batches_tracked
    tensor(0)
    """
    buffers = _Buffers()
    for module in modules:
        buffers.see(module)
    handle = register_module_forward_pre_hook(buffers.see)
    try:
        yield
    finally:
        handle.remove()
        buffers.restore()


@contextmanager
def kept_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of `tensors` on leaving, from copies: adding and subtracting would round.

    >>> w = torch.tensor([0.1])
    >>> with kept_values([w]):
    ...     _ = w.zero_()
    >>> w
    tensor([0.1000])
    """
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)


@contextmanager
def uses(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All modules in one mode, their own flags on leaving; `train()` itself is not called.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with uses(model, training=False):
    ...     model[0].training
    False
    >>> model[0].training, model[1].training
    (True, False)
    """
    flags = [(part, part.training) for part in model.modules()]
    try:
        for part, _ in flags:
            part.training = training
        yield
    finally:
        for part, flag in flags:
            part.training = flag


@contextmanager
def own_casts() -> Iterator[None]:
    """Share no copies of weights with an autocast around: those are of other values, or gradless.

    >>> weight, one = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     _ = one @ weight, weight.data.zero_()
    ...     stale = (one @ weight).item()
    ...     with own_casts():
    ...         fresh = (one @ weight).item()
    >>> stale, fresh
    (1.0, 0.0)
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions eagerly: what torch.compile makes cannot be differentiated twice."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it is slow
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # `kept_buffers` listens to all modules; that a wrapper is heard as well does no harm.
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        yield
