"""Opening a checkpoint: its format is recognised by content, its settings are looked for beside it.

a folder            config.json, then model.safetensors, an index of shards, or .bin
safetensors         the length of a header, then "{"
torch               a zip archive with a data.pkl, or the first bytes of a pickle
GGUF, llama2.c      magic numbers; llama2.c's older files by their size to the byte
a mapping, a module names → tensors; a module's tensors stay on autograd's tape
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, StoredFileError
from levelhead.weights.gguf_files import open_gguf
from levelhead.weights.llama2c import is_llama2c, open_llama2c
from levelhead.weights.safetensors_files import open_index, open_safetensors
from levelhead.weights.stored import BROKEN, Weights, unreadable
from levelhead.weights.torch_files import open_torch

__all__ = ["Weights", "open_weights"]

_IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ENDINGS = (".safetensors", ".gguf", ".pt", ".pth", ".bin")
_ATTRIBUTES = ("num_heads", "n_head", "n_heads", "num_key_value_heads")
_CONFIG_LIMIT = 10_000_000


def open_weights(source: object) -> Weights:
    """Open a path, a mapping of names to tensors, or a module; nothing but headers is read.

    Raises StoredFileError for a file that is missing, damaged or of no known format, InputError
    for another kind of source.

    >>> weights = open_weights({"a": torch.zeros(2, 3)})
    >>> weights.shapes, weights.format
    ({'a': (2, 3)}, 'mapping')
    """
    if isinstance(source, Weights):
        return source
    if isinstance(source, nn.Module):
        return _open_module(source)
    if isinstance(source, Mapping):
        return _open_mapping(source)
    if not isinstance(source, str | os.PathLike):
        raise InputError(
            f"a {type(source).__name__} was given; expected a path, a mapping of names to "
            "tensors, or a torch module"
        )
    path = Path(source)
    try:
        if not path.exists():
            raise StoredFileError(f"{path} does not exist: check the path")
        weights = _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise unreadable(path, error.strerror or error, "check the path") from error
    if weights.config is not None:
        return weights
    config = _read_config(path if path.is_dir() else path.parent)
    return Weights(
        weights.where, weights.format, weights.shapes, weights.get, config, "config.json"
    )


def _open_folder(folder: Path) -> Weights:
    for name in _IN_FOLDER:
        if (folder / name).is_file():
            return _open_file(folder / name)
    files = sorted(p for p in folder.iterdir() if p.suffix in _ENDINGS and p.is_file())
    if len(files) != 1:
        listed = ", ".join(p.name for p in files[:5]) or "none of the files of a checkpoint"
        raise StoredFileError(
            f"{folder} holds {listed}: give the file itself, or a folder with {_IN_FOLDER[0]}"
        )
    return _open_file(files[0])


def _open_file(path: Path) -> Weights:
    with path.open("rb") as file:
        start = file.read(16)
    if path.name.endswith(".index.json"):
        return open_index(path, _open_file)
    if start[:4] == b"GGUF":
        return open_gguf(path)
    if start[:4] == b"PK\x03\x04":
        return open_torch(path, zipped=True)
    # The header of safetensors may follow any length, also one that is a lie.
    if start[8:9] == b"{" or path.suffix == ".safetensors":
        return open_safetensors(path)
    if is_llama2c(path):
        return open_llama2c(path)
    if start[:1] == b"\x80" and start[1:2] in (b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"):
        return open_torch(path, zipped=False)
    raise StoredFileError(
        f"{path} is none of the formats that can be read (safetensors, torch, GGUF, llama2.c): "
        f"it starts with {start[:8]!r}"
    )


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _CONFIG_LIMIT:
            raise ValueError("more than 10 MB")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (RecursionError, *BROKEN) as error:
        raise unreadable(path, error) from error
    return content


def _open_mapping(source: Mapping[Any, Any]) -> Weights:
    tensors: dict[str, Tensor] = {}
    for name, value in source.items():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            value = torch.from_numpy(value)
        if isinstance(name, str) and isinstance(value, Tensor):
            tensors[name] = value
    if not tensors:
        raise InputError("a mapping without tensors was given; expected names and their tensors")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return Weights("the mapping given", "mapping", shapes, tensors.__getitem__)


def _open_module(module: nn.Module) -> Weights:
    """A live module: its parameters and buffers as they are, its config, its modules' counts."""
    tensors: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    tensors |= dict(module.named_parameters(remove_duplicate=False))
    config: Any = getattr(module, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        config = None
    attributes: dict[str, dict[str, Any]] = {}
    for name, part in module.named_modules():
        found = {a: v for a in _ATTRIBUTES if isinstance(v := getattr(part, a, None), int)}
        parent = module.get_submodule(name.rpartition(".")[0]) if name else None
        if isinstance(first := getattr(parent, "norm_first", None), bool):
            found["norm_first"] = first
        if found:
            attributes[name] = found
    return Weights(
        f"a {type(module).__name__}",
        "module",
        {name: tuple(t.shape) for name, t in tensors.items()},
        tensors.__getitem__,
        config,
        "config",
        attributes,
    )
