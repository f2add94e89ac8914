"""safetensors files: one file, or shards with an index. Tensors are read one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from levelhead.base.errors import StoredFileError
from levelhead.weights.stored import BROKEN, Weights, unreadable

__all__ = ["open_index", "open_safetensors", "read_index"]

_LIMIT = 100_000_000  # bytes of a header or an index, as the safetensors format sets it


def open_safetensors(path: Path) -> Weights:
    """The tensors of one file, memory mapped. Raises StoredFileError if it is damaged."""
    file: Any
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, *BROKEN) as error:
        raise unreadable(path, error) from error

    def get(name: str) -> Tensor:
        # Opened anew each time: a map that stays open keeps every page that was read resident.
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, *BROKEN) as error:
            raise unreadable(path, f"tensor {name}: {error}") from error
        return tensor

    return Weights(str(path), "safetensors", shapes, get)


def read_index(path: Path) -> dict[str, str]:
    """name → shard of an index file.

    Raises StoredFileError for anything but plain file names of shards that lie beside it.
    """
    try:
        if path.stat().st_size > _LIMIT:
            raise unreadable(path, "an index of more than 100 MB")
        content: Any = json.loads(path.read_bytes())
        shards = content["weight_map"]
        pairs = dict(shards.items())
    except StoredFileError:
        raise
    except (RecursionError, *BROKEN) as error:
        raise unreadable(path, f"not an index of shards: {error!r}") from error
    for name, shard in pairs.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise unreadable(path, f"the shard of {name} is {shard!r}, not the name of a file")
        if not (path.parent / shard).is_file():
            raise unreadable(path, f"{shard} is missing")
    return pairs


def open_index(path: Path, open_shard: Callable[[Path], Weights]) -> Weights:
    """All tensors of the shards that an index lists."""
    index = read_index(path)
    shards = {shard: open_shard(path.parent / shard) for shard in dict.fromkeys(index.values())}
    shapes = {}
    for name, shard in index.items():
        if name not in shards[shard].shapes:
            raise unreadable(path, f"{name} is not in {shard}")
        shapes[name] = shards[shard].shapes[name]
    kind = next(iter(shards.values())).format if shards else "safetensors"
    return Weights(
        str(path), f"{kind}, {len(shards)} shards", shapes, lambda n: shards[index[n]].get(n)
    )
