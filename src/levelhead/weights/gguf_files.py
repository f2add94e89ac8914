"""GGUF files (llama.cpp) through the optional package `gguf`; quantised tensors are dequantised."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.weights.gguf_header import check_header
from levelhead.weights.stored import BROKEN, Weights, unreadable

__all__ = ["open_gguf"]

_EXACT = ("F32", "F16", "BF16", "F64")
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K")
# Keys of the header below its architecture's name → settings.
_SETTINGS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary_dim",
}


def open_gguf(path: Path) -> Weights:
    """The tensors and settings of a GGUF file.

    Warns (LevelheadWarning) when attention weights are quantised. Raises InputError without the
    package `gguf` and StoredFileError for a damaged file or an unknown kind of tensor.
    """
    try:
        gguf = import_module("gguf")
    except ImportError as error:
        raise InputError(
            f"{path} is a GGUF file, and reading it needs the package gguf: "
            "pip install 'levelhead[gguf]'"
        ) from error
    try:
        with path.open("rb") as file:
            check_header(file, path.stat().st_size)
        reader = gguf.GGUFReader(path)
        found = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {n: tuple(int(s) for s in reversed(t.shape)) for n, t in found.items()}
        config = _config({n: f.contents() for n, f in reader.fields.items() if len(f.data) == 1})
        kinds = {t.tensor_type.name for n, t in found.items() if ".attn_" in n}
    except BROKEN as error:
        raise unreadable(path, error) from error
    if noisy := sorted(kinds - set(_EXACT)):
        warnings.warn(
            f"{path}: attention weights are quantised ({', '.join(noisy)}); what is below the "
            "step of that quantisation, small singular values above all, is noise",
            LevelheadWarning,
            stacklevel=2,
        )

    def get(name: str) -> Tensor:
        tensor: Any = found[name]
        kind = tensor.tensor_type.name
        if kind not in _EXACT + _QUANTISED:
            raise unreadable(path, f"{name} is {kind}", f"one of {', '.join(_QUANTISED)} is read")
        try:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            return torch.from_numpy(np.array(numbers, dtype=np.float32)).reshape(shapes[name])
        except BROKEN as error:
            raise unreadable(path, f"tensor {name}: {error}") from error

    return Weights(str(path), "gguf", shapes, get, config, "header")


def _config(header: dict[str, Any]) -> dict[str, Any]:
    kind = header.get("general.architecture", "")
    config = {"model_type": "gguf", "general.architecture": kind}
    for key, name in _SETTINGS.items():
        if (value := header.get(f"{kind}.{key}")) is not None:
            config[name] = value
    scaling = header.get(f"{kind}.rope.scaling.type")
    if scaling and scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": header.get(f"{kind}.rope.scaling.factor"),
            "original_max_position_embeddings": header.get(
                f"{kind}.rope.scaling.original_context_length"
            ),
        }
    return config
