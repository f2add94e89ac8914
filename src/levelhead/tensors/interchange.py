"""Results in TensorLy's types, if the library is there."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from levelhead.base.errors import InputError

__all__ = ["tensorly_array", "tensorly_class"]


def tensorly_class(module: str, name: str) -> Any:
    """The class `name` of tensorly.`module`; InputError if TensorLy is not installed."""
    try:
        return getattr(importlib.import_module(f"tensorly.{module}"), name)
    except ModuleNotFoundError as error:
        raise InputError(
            "TensorLy is not installed: run `pip install tensorly` to convert results to its types"
        ) from error


def tensorly_array(x: Tensor) -> Any:
    """x as an array of TensorLy's current backend; the same memory where that is PyTorch."""
    tensorly = importlib.import_module("tensorly")
    if tensorly.get_backend() == "pytorch":
        return x
    return tensorly.tensor(x.detach().cpu().numpy())
