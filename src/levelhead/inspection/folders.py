"""Where a command's run may go: a folder that is new or empty, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from levelhead.base.errors import InputError

__all__ = ["refuse_used"]


def refuse_used(out: str | os.PathLike[str] | None) -> None:
    """Raise InputError if something lies in the folder `out` already; None and new ones pass.

    Runs of `inspect` and `compare` are written in one go and never taken up again, and what else
    lies in a folder is not theirs to write between.

    >>> import tempfile
    >>> refuse_used(None), refuse_used(tempfile.mkdtemp()), refuse_used("not/there")
    (None, None, None)
    """
    if out is None:
        return
    folder = Path(out)
    try:
        if folder.is_file():
            raise InputError(f"{folder} is a file: name a folder for the run")
        if not folder.is_dir():
            return
        found = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): name another") from error
    if "figures.json" in found or any(name.startswith("readings-") for name in found):
        raise InputError(f"{folder} already holds a run: name a new folder, or remove this one")
    if found:
        raise InputError(
            f"{folder} is not empty ({found[0]}): name a new or an empty folder for the run"
        )
