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
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
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
from levelhead.weights.torch_files import not_dense, open_torch, plain_tensors

__all__ = ["Weights", "open_weights"]

_IN_FOLDER = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ENDINGS = (".safetensors", ".gguf", ".pt", ".pth", ".bin")
_ATTRIBUTES = ("num_heads", "n_head", "n_heads", "heads", "num_key_value_heads")
_CONFIG_LIMIT = 10_000_000
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


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
    given = os.fsdecode(source)
    if not given:
        raise InputError("no path was given: name a file or folder of weights")
    path = Path(given)
    try:
        if not path.exists():
            raise StoredFileError(_missing(given, path))
        weights = _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise unreadable(path, error.strerror or error, "check the path") from error
    if weights.config is not None:
        return weights
    config = _read_config(path if path.is_dir() else path.parent)
    return replace(weights, config=config, config_where="config.json")


def _missing(given: str, path: Path) -> str:
    """What to say of a path that leads nowhere."""
    if "://" in given:
        return f"{given} is an address: levelhead reads files, so download it first"
    if path.is_symlink():
        return f"{given} is a symbolic link that leads nowhere or back to itself: check the link"
    if _HUB_NAME.fullmatch(given) and not path.parent.exists():
        return (
            f"{given} does not exist; if it is a model's name on a hub, download it first "
            f"(hf download {given} --local-dir {path.name}): levelhead reads files"
        )
    return f"{given} does not exist: check the path"


def _open_folder(folder: Path) -> Weights:
    for name in _IN_FOLDER:
        if (folder / name).is_file():
            return _open_file(folder / name)
    files = sorted(p for p in folder.iterdir() if p.suffix in _ENDINGS and p.is_file())
    if not files:
        _refuse_odd(folder)
    if len(files) != 1:
        listed = ", ".join(p.name for p in files[:5]) or "none of the files of a checkpoint"
        raise StoredFileError(
            f"{folder} holds {listed}: give the file itself, or a folder with {_IN_FOLDER[0]}"
        )
    return _open_file(files[0])


def _refuse_odd(folder: Path) -> None:
    """Say so where a checkpoint's name is that of a folder, a pipe or a broken link."""
    if folder.suffix in _ENDINGS:
        raise StoredFileError(f"{folder} is a folder, though it is named like a file: check it")
    for path in (folder / name for name in _IN_FOLDER):
        if path.is_dir():
            raise StoredFileError(f"{path} is a folder, though it is named like a file: check it")
        if path.is_symlink() and not path.exists():
            raise StoredFileError(_missing(str(path), path))
        if path.exists():
            raise StoredFileError(f"{path} is no regular file: give a file or a folder")


def _open_file(path: Path) -> Weights:
    if not path.is_file():  # to open a pipe would wait for ever
        raise StoredFileError(f"{path} is no regular file: give a file or a folder")
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        raise StoredFileError(f"{path} is empty: restore it or download it again")
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
    held = {
        name: torch.from_numpy(value)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f"
        else value
        for name, value in source.items()
    }
    tensors, left = plain_tensors(held), not_dense(held)
    if not tensors and not left:
        raise InputError("a mapping without tensors was given; expected names and their tensors")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return Weights("the mapping given", "mapping", shapes, tensors.__getitem__, left=left)


def _open_module(module: nn.Module) -> Weights:
    """A live module: its parameters and buffers as they are, its config, its modules' counts."""
    held: dict[str, Tensor] = dict(module.named_buffers(remove_duplicate=False))
    held |= dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        if callable(plain := getattr(part, "plain_weights", None)):
            # Factors that multiply out to the weights of a layer of known names.
            start = f"{path}." if path else ""
            held = {name: t for name, t in held.items() if not name.startswith(start)}
            held |= {f"{start}{name}": tensor for name, tensor in plain().items()}
    tensors, left = plain_tensors(held), not_dense(held)
    config: Any = getattr(module, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if is_dataclass(config):  # as nanoGPT's
        config = {f.name: getattr(config, f.name) for f in fields(config)}
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
        left,
    )
