"""Files that are either the old one or the new one, never half of either; and their checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from levelhead.base.errors import LevelheadError, StoredFileError

__all__ = [
    "append_lines",
    "broken_file",
    "read_json",
    "sha256_of",
    "write_atomically",
    "write_json",
]

_CHUNK = 1 << 20


def write_atomically(
    path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]
) -> Path:
    """Write `content` beside `path`, then rename it over `path` in one step; return the path.

    `content` is the bytes themselves or a function that writes them to an open binary file.
    A reader sees the old file or the new one. The name of the temporary file is unique, so any
    number of processes and threads may write in one folder; when two write the same path, the
    later rename wins. Nothing is left behind when the writing fails or is interrupted. The folder
    must exist; a symbolic link is followed, not replaced.

    Raises `LevelheadError` when the system refuses (disk full, no permission, no such folder);
    whatever the function itself raises passes through.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_atomically(folder / "a.txt", b"one").read_bytes()
    b'one'
    >>> write_atomically(folder / "a.txt", lambda file: file.write(b"two")).read_bytes()
    b'two'
    """
    path = Path(path)
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise LevelheadError(
            f"{path} is not a file that can be replaced (a folder or a device): name a file."
        )
    # The target's own name is left out of the temporary one: it may already be as long as allowed.
    beside = target.with_name(f".levelhead-{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        with open(beside, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
        os.replace(beside, target)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        beside.unlink(missing_ok=True)
    return path


def unused_folder(path: str | os.PathLike[str]) -> Path:
    """`path` if nothing is in it yet, else the first free of path-2, path-3, …

    >>> import tempfile
    >>> taken = Path(tempfile.mkdtemp())
    >>> (taken / "a").touch()
    >>> unused_folder(taken).name == f"{taken.name}-2"
    True
    """
    path = Path(path)
    candidate, number = path, 1
    while candidate.exists() and not (candidate.is_dir() and not any(candidate.iterdir())):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def sha256_of(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes as 64 hexadecimal digits; reads it in pieces of 1 MiB.

    Raises `StoredFileError` when the file is missing or cannot be read.

    >>> import tempfile
    >>> empty = Path(tempfile.mkdtemp()) / "empty"
    >>> empty.touch()
    >>> sha256_of(empty)[:16]
    'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
    except OSError as error:
        raise StoredFileError(
            f"{os.fspath(path)} cannot be read ({error.strerror or error}): check the path."
        ) from error
    return digest.hexdigest()


def write_json(path: str | os.PathLike[str], content: object) -> Path:
    """Write `content` as strict JSON (no nan, no infinity) in one step; see `write_atomically`."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return write_atomically(path, text.encode() + b"\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Content of a JSON file of ours; raises `StoredFileError` if it cannot be read whole."""
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise broken_file(path, error) from error


def broken_file(path: str | os.PathLike[str], reason: object) -> StoredFileError:
    """The error for a stored file that is truncated or altered, to be raised by the caller."""
    return StoredFileError(
        f"{os.fspath(path)} is truncated or altered ({reason}): "
        "restore it or run the command again."
    )


def append_lines(path: str | os.PathLike[str], lines: bytes) -> None:
    r"""Append whole lines (each ends with a newline) and hand them to the system at once.

    What a killed process left after the last newline is cut off first, so that half a line never
    ends up in the middle of the file. One process at a time may append to one file. Raises
    `LevelheadError` when the system refuses.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines"
    >>> _ = path.write_bytes(b"one\ntw")
    >>> append_lines(path, b"three\n")
    >>> path.read_bytes()
    b'one\nthree\n'
    """
    try:
        with open(path, "a+b") as file:
            _drop_torn_line(file)
            file.write(lines)
    except OSError as error:
        raise _refused(path, error) from error


def _drop_torn_line(file: BinaryIO) -> None:
    end = start = file.seek(0, os.SEEK_END)
    while start > 0:
        back = max(start - 4096, 0)
        file.seek(back)
        if (at := file.read(start - back).rfind(b"\n")) >= 0:
            start = back + at + 1
            break
        start = back
    if start < end:
        file.truncate(start)


def _refused(path: str | os.PathLike[str], error: OSError) -> LevelheadError:
    if error.errno == errno.ENOENT:
        return LevelheadError(f"{os.fspath(path)} could not be written: there is no such folder.")
    return LevelheadError(
        f"{os.fspath(path)} could not be written ({error.strerror or error}): "
        "free some space or choose another folder."
    )
