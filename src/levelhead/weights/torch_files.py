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
from levelhead.weights.settings import has_heads
from levelhead.weights.stored import BROKEN, Weights, unreadable

__all__ = ["not_dense", "open_torch", "plain_tensors"]

# Under which keys training scripts put the weights.
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "params", "weights", "net", "ema")
# Under which keys they put what the model was built with.
_SETTINGS = ("model_args", "config", "model_config", "hyper_parameters", "hparams", "args")


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
    held = _found(content)
    tensors, left = plain_tensors(held), not_dense(held)
    if not tensors:
        first = next(iter(left.items()), None)
        reason = "there are no named tensors in it" if first is None else "{}: {}".format(*first)
        raise unreadable(path, reason, "save a state_dict()")
    _check_sizes(path, tensors)
    config, where = _settings(content)
    return Weights(
        str(path),
        "torch",
        {n: tuple(t.shape) for n, t in tensors.items()},
        tensors.__getitem__,
        config,
        where,
        left=left,
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


def not_dense(content: Mapping[Any, Any]) -> dict[str, str]:
    """The entries of a mapping that are tensors but not dense ones, and why they are not read."""
    return {
        name: f"it is stored as a {str(value.layout).removeprefix('torch.')} tensor, which is not "
        "read: store its to_dense()"
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.layout != torch.strided
    }


def _found(content: object) -> Mapping[Any, Any]:
    """The mapping that holds the weights: the content, or what is under one of the usual keys."""
    if not isinstance(content, Mapping):
        return {}
    places: list[Mapping[Any, Any]] = [content]
    places += [content[key] for key in _INSIDE if isinstance(content.get(key), Mapping)]
    for held in places:
        if plain_tensors(held):
            return held
    return next((held for held in places if not_dense(held)), {})


def _settings(content: object) -> tuple[Mapping[str, Any] | None, str]:
    """What the file says of the model beside its weights, and what to call it."""
    for key in _SETTINGS if isinstance(content, Mapping) else ():
        outer = content.get(key)  # type: ignore[attr-defined]
        if not isinstance(outer, Mapping):
            continue
        for name in (None, "model", *_SETTINGS):
            held = outer if name is None else outer.get(name)
            if isinstance(held, Mapping) and has_heads(held):
                return held, key if name is None else f"{key} {name}"
    return None, "config"


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
