"""What the second forward pass of a step must not change: buffers, power iterations, random states.

**Freezing protocol.** A module that takes power-iteration steps in its forward pass has a boolean
attribute `power_iteration_frozen`; while it is true no such step is taken, and loading a
state_dict leaves the vectors as stored. Modules are recognised by that attribute alone, so that
this folder need not know who implements it (`nn.sigma_reparam` does).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Footprint", "frozen_power_iteration"]


@contextmanager
def frozen_power_iteration(*models: nn.Module) -> Iterator[None]:
    """Keep the modules of `models` from taking power-iteration steps (protocol: see the top).

    Loading a state_dict inside it keeps the stored vectors, which an exact resume needs.
    """
    yield from _frozen([module for model in models for module in model.modules()])


def _frozen(modules: list[nn.Module]) -> Iterator[None]:
    held: list[Any] = [module for module in modules if hasattr(module, "power_iteration_frozen")]
    was = [module.power_iteration_frozen for module in held]
    try:
        for module in held:
            module.power_iteration_frozen = True
        yield
    finally:
        for module, value in zip(held, was, strict=True):
            module.power_iteration_frozen = value


class Footprint:
    """What a forward pass leaves behind in modules: buffers, power iterations, random states."""

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        self._modules = [module for model in models for module in model.modules()]
        self._buffers = [(module, name) for module in self._modules for name in module._buffers]
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        self._cuda = sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)

    def random_state(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._cuda)]

    def _set_random_state(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._cuda, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def replayed(self, before: list[Tensor]) -> Iterator[None]:
        """Run the block from the random states `before`; then everything is as it was on entry."""
        after = self.random_state()
        kept = [(m, name, b, b._version, b.clone()) for m, name, b in self._live_buffers()]
        self._set_random_state(before)
        try:
            yield from _frozen(self._modules)
        finally:
            self._set_random_state(after)
            with torch.no_grad():
                for module, name, buffer, version, value in kept:
                    # Writing through `.data` leaves the version alone, so it cannot tell what is
                    # unchanged; but an expanded buffer that nobody wrote to must not be written.
                    if buffer.is_contiguous() or buffer._version != version:
                        buffer.copy_(value)
                    module._buffers[name] = buffer

    def _live_buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module, name in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None and not buffer.is_inference():
                yield module, name, buffer
