"""What an opened checkpoint is, whatever its format: names, shapes, and tensors one at a time."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from levelhead.base.errors import StoredFileError

__all__ = ["BROKEN", "Weights", "unreadable"]

# What parsers of a damaged or hostile file may raise: everything but interrupts and our own errors.
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Weights:
    """An opened checkpoint.

    `shapes` (name → shape) is known at once, `get(name)` reads one tensor as it is stored.
    `config` are the model's settings if there are any, `config_where` what to call them;
    `attributes` those of single modules (path → name → value); `left` are tensors that are
    there but cannot be read (name → reason).
    """

    where: str
    format: str
    shapes: Mapping[str, tuple[int, ...]]
    get: Callable[[str], Tensor]
    config: Mapping[str, Any] | None = None
    config_where: str = "config"
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)


def unreadable(
    path: str | Path, reason: object, what: str = "restore it or download it again"
) -> StoredFileError:
    """The error for a file that cannot be read, to be raised: one sentence."""
    said = " ".join(str(reason).split())
    said = said if len(said) <= 200 else f"{said[:197]}..."
    return StoredFileError(f"{path} cannot be read ({said}): {what}")
