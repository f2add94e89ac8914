"""A run's settings as JSON can hold them, versions, and whether two arrays are the same bits."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from levelhead.base.errors import InputError

__all__ = ["plain_value", "refuse_changes", "same_bits", "versions"]


def plain_value(value: Any, key: str) -> Any:
    """`value` as JSON can hold it; `key` says where it stands, for the error."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_value(part, f"{key}.{name}") for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(part, f"{key}[{place}]") for place, part in enumerate(value)]
    raise InputError(
        f"The setting {key!r} is a {type(value).__name__}, which a run cannot store: "
        "give text, numbers, booleans, None, or lists and mappings of these."
    )


def refuse_changes(folder: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises InputError for the first setting that is not as it is stored."""
    for key in sorted(stored.keys() | given.keys()):
        if stored.get(key) != given.get(key):
            raise InputError(
                f"The run in {folder} was made with {key} = {stored.get(key)!r}, not "
                f"{given.get(key)!r}: resume it with its own settings or choose another folder."
            )


def versions() -> dict[str, str]:
    """Versions of python, levelhead, numpy, torch (if installed) and the platform."""
    found = {"python": platform.python_version()}
    for name in ("levelhead", "numpy", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"platform": platform.platform()}


def same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays have one shape, type and content, whatever their byte order."""
    # Values alone would call -0.0 and 0.0 the same and nan different from itself.
    same = one.shape == other.shape and one.dtype == other.dtype.newbyteorder("=")
    return same and one.tobytes() == other.astype(one.dtype).tobytes()
