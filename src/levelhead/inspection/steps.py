"""A training as a folder of `step-…` folders or files, in order of their numbers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from levelhead.base.errors import InputError

__all__ = ["refuse_series_with_b", "steps_of"]

_STEP = re.compile(r"step[-_]?(\d+)")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


def steps_of(folder: object) -> list[tuple[int, Path]]:
    """(number, path) of the `step-…` folders or files in a folder, in order.

    Raises InputError for fewer than two of them, or two of one number.
    """
    if not isinstance(folder, str | os.PathLike) or not Path(folder).is_dir():
        raise InputError(
            f"one source was given ({folder}), and it is no folder: give two checkpoints, or a "
            "folder of step-… folders"
        )
    found = _found(Path(folder))
    numbers = [number for number, _ in found]
    if len(found) < 2 or len(set(numbers)) < len(numbers):
        raise InputError(
            f"{folder} holds {len(found)} step-… folders or files; expected two at least, each "
            "with a number of its own, or give two checkpoints"
        )
    return sorted(found)


def refuse_series_with_b(a: object, b: object) -> None:
    """Raise InputError if one of two sources is a folder of steps and holds no weights itself."""
    for source in (a, b):
        if not isinstance(source, str | os.PathLike) or b is None:
            continue
        folder = Path(source)
        if not folder.is_dir() or not (found := _found(folder)):
            continue
        inside = [path.name for path in folder.iterdir() if path.suffix in _WEIGHTS]
        if not set(inside) - {path.name for _, path in found}:
            raise InputError(
                f"{source} is a series of {len(found)} steps, and a series takes no second "
                f"source: give it alone, or one of its steps such as {sorted(found)[-1][1]}"
            )


def _found(folder: Path) -> list[tuple[int, Path]]:
    return [
        (int(matched[1]), path)
        for path in folder.iterdir()
        if (matched := _STEP.fullmatch(path.name if path.is_dir() else path.stem))
    ]
