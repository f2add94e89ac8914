"""What a command leaves behind: everything, what resumes it, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from levelhead.base.errors import Interrupted
from levelhead.base.records import Run

__all__ = ["undone_on_error"]

_OF_A_RUN = (
    "settings.json",
    "figures.json",
    "notes.json",
    "readings-*.jsonl",
    "arrays-*.safetensors",
)


@contextmanager
def undone_on_error(run: Run | None, *written: str) -> Iterator[Path | None]:
    """Hand out a folder for resumable states and clean up after the block.

    After success the states are removed. After an interruption they stay, to resume from. After an
    error the states, the named files and folders and the run's own files are removed: nothing
    half-written. Whatever else lies in the folder stays.
    """
    if run is None:
        yield None
        return
    states = run.folder / "training"
    try:
        yield states
    except (Interrupted, KeyboardInterrupt):
        raise
    except BaseException:
        shutil.rmtree(states, ignore_errors=True)
        for path in [p for name in (*written, *_OF_A_RUN) for p in run.folder.glob(name)]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            run.folder.rmdir()  # only if nothing else lies there
        raise
    shutil.rmtree(states, ignore_errors=True)
