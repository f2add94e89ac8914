"""Which process trains a watched run, and whether it is still there; plain data, no torch.

    process.json    host, pid, start time and namespace of the process that entered the block last

A process that was killed records no end. Whoever follows its run on the same machine can tell;
from another machine, or where the system does not say, nobody can.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from levelhead.base.errors import StoredFileError
from levelhead.base.files import read_json, write_json

__all__ = ["PROCESS_FILE", "is_running", "write_process"]

PROCESS_FILE = "process.json"


def write_process(folder: Path) -> None:
    """Say that this process trains the run in `folder`. Raises LevelheadError on a full disk."""
    write_json(folder / PROCESS_FILE, {**_place(), "pid": os.getpid(), "start": _start("self")})


def is_running(folder: Path) -> bool | None:
    """Whether the process that trains the run is there; None if that cannot be told."""
    try:
        told: Any = read_json(folder / PROCESS_FILE) if (folder / PROCESS_FILE).exists() else None
    except StoredFileError:
        return None
    if os.name != "posix" or not isinstance(told, dict) or not isinstance(told.get("pid"), int):
        return None
    if any(told.get(name) != value for name, value in _place().items()):
        return None
    pid = told["pid"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's: it is there
    start = _start(str(pid))
    # Another process may have the number by now; one that ended may not have been taken note of.
    return start != "" and (start is None or told.get("start") is None or start == told["start"])


def _place() -> dict[str, str | None]:
    """Where process numbers mean the same."""
    try:
        space: str | None = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = None
    return {"host": socket.gethostname(), "namespace": space}


def _start(pid: str) -> str | None:
    """When a process began, as Linux counts it; "" for one that has ended, None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]
