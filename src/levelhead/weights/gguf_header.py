"""A walk over a GGUF header that checks every announced length against the size of the file.

The package `gguf` believes the counts of a header and would loop over 2^63 entries. Little-endian:
magic, version (uint32), number of tensors, number of keys (uint64); a key is a string, a type
(uint32) and a value; a tensor is a string, a number of axes (uint32), the axes (uint64), a type
(uint32) and an offset (uint64). Source: ggml/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from typing import BinaryIO

__all__ = ["check_header"]

# Bytes of a value by its type; strings (8) and arrays (9) have their lengths with them.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_SMALLEST_KEY, _SMALLEST_TENSOR = 13, 32
_DEEPEST = 4
_MOST_AXES = 4


def check_header(file: BinaryIO, size: int) -> None:
    """Walk over the header of an open file of `size` bytes; ValueError where it does not fit."""
    file.seek(4)
    version, tensors, keys = struct.unpack("<IQQ", _take(file, 20))
    if version not in (2, 3):
        raise ValueError(f"version {version} of GGUF")
    if tensors * _SMALLEST_TENSOR + keys * _SMALLEST_KEY > size:
        raise ValueError(f"{tensors} tensors and {keys} keys announced in {size} bytes")
    for _ in range(keys):
        _skip_string(file, size)
        (kind,) = struct.unpack("<I", _take(file, 4))
        _skip_value(file, size, kind, 0)
    for _ in range(tensors):
        _skip_string(file, size)
        (axes,) = struct.unpack("<I", _take(file, 4))
        if axes > _MOST_AXES:
            raise ValueError(f"a tensor of {axes} axes")
        shape = struct.unpack(f"<{axes}Q", _take(file, 8 * axes))
        _, offset = struct.unpack("<IQ", _take(file, 12))
        # No quantisation packs more than eight weights into a byte.
        if math.prod(shape) > 8 * size or offset > size:
            raise ValueError(f"a tensor {list(shape)} at {offset} in {size} bytes")


def _take(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise ValueError("the file ends within its header")
    return found


def _skip(file: BinaryIO, size: int, count: int) -> None:
    if count > size - file.tell():
        raise ValueError(f"{count} bytes announced, {size - file.tell()} are left")
    file.seek(count, 1)


def _skip_string(file: BinaryIO, size: int) -> None:
    (length,) = struct.unpack("<Q", _take(file, 8))
    _skip(file, size, length)


def _skip_value(file: BinaryIO, size: int, kind: int, depth: int) -> None:
    if kind == _STRING:
        _skip_string(file, size)
    elif kind == _ARRAY:
        inner, count = struct.unpack("<IQ", _take(file, 12))
        if depth == _DEEPEST:
            raise ValueError("arrays of arrays without end")
        if inner in _SIZES:
            _skip(file, size, count * _SIZES[inner])
            return
        if 8 * count > size:
            raise ValueError(f"an array of {count} entries in {size} bytes")
        for _ in range(count):
            _skip_value(file, size, inner, depth + 1)
    elif kind in _SIZES:
        _skip(file, size, _SIZES[kind])
    else:
        raise ValueError(f"a value of the unknown type {kind}")
