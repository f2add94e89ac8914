"""A forward of a model beside its training: afterwards everything is as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from levelhead.diagnostics.undisturbed import (
    kept_buffers,
    kept_random_state,
    own_casts,
    uncompiled,
    uses,
)

__all__ = ["undisturbed", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what torch.compile and DistributedDataParallel put around it.

    >>> model = nn.Linear(2, 2)
    >>> unwrapped(model) is model
    True
    """
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[nn.Module]:
    """The model itself in eval mode, without gradients and compiled code; then as it was.

    What torch.compile and DistributedDataParallel put around it is left away (a forward of one
    process alone would wait for the others). Modes, buffers and random states are put back, also
    after an exception.

    >>> model = nn.Dropout().train()
    >>> with undisturbed(model) as still:
    ...     still.training
    False
    >>> model.training
    True
    """
    original = unwrapped(model)
    with (
        kept_random_state(original.parameters()),
        kept_buffers(original),
        uses(original, training=False),
        uncompiled(),
        own_casts(),
        torch.no_grad(),
    ):
        yield original
