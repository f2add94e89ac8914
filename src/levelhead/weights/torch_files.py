"""PyTorch's .pt and .bin files: tensors only (`weights_only=True`), never code."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import StoredFileError
from levelhead.weights.stored import BROKEN, Weights, unreadable

__all__ = ["open_torch", "plain_tensors"]

# Under which keys training scripts put the weights.
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "params", "weights", "net", "ema")


def open_torch(path: Path, *, zipped: bool) -> Weights:
    """The tensors of a file written by torch.save; memory mapped where it is a zip archive.

    Raises StoredFileError for a damaged file, one that holds objects or code, one whose parts
    unpack to more than the file holds, or one without tensors.
    """
    if zipped:
        _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = _loaded(path, zipped)
    except (RecursionError, *BROKEN) as error:
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise unreadable(
                path,
                "it holds objects or code beside tensors, and nothing in it was run",
                "save the model's state_dict() instead",
            ) from error
        raise unreadable(path, error) from error
    tensors = _found(content)
    if not tensors:
        raise unreadable(path, "there are no named tensors in it", "save a state_dict()")
    _check_sizes(path, tensors)
    return Weights(
        str(path), "torch", {n: tuple(t.shape) for n, t in tensors.items()}, tensors.__getitem__
    )


def _loaded(path: Path, zipped: bool) -> object:
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    with path.open("rb") as file:  # by that ending torch.load would choose another parser
        return torch.load(file, map_location="cpu", weights_only=True)


def plain_tensors(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The entries of a mapping that are dense tensors under a name."""
    return {
        name: value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
    }


def _found(content: object) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        return {}
    if found := plain_tensors(content):
        return found
    for key in _INSIDE:
        if isinstance(content.get(key), Mapping) and (found := plain_tensors(content[key])):
            return found
    return {}


def _check_archive(path: Path) -> None:
    """Refuse archives that are not torch's: it stores its records as they are, uncompressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        size = path.stat().st_size
    except BROKEN as error:
        raise unreadable(path, error) from error
    if not any(entry.filename.endswith("data.pkl") for entry in entries):
        raise unreadable(path, "a zip archive, but not one of torch.save", "give a checkpoint")
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > size:
        raise unreadable(path, "its parts unpack to more than the file holds", "do not trust it")


def _check_sizes(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that claim more numbers than the file has bytes for (strides of zero)."""
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise unreadable(path, f"{name} has no values ({tensor.device.type})")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise StoredFileError(
                f"{path} cannot be read ({name} claims shape {list(tensor.shape)}, more than the "
                "file holds): do not trust it"
            )
