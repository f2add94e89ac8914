"""What a command leaves behind: everything, what resumes it, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from levelhead.base.errors import InputError, Interrupted
from levelhead.base.records import Run

__all__ = ["refuse_other_folder", "undone_on_error"]

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
    half-written. Whatever else lies in the folder stays, and a run that was finished before this
    one resumed it (it has notes) is never taken back.
    """
    if run is None:
        yield None
        return
    states = run.folder / "training"
    finished = bool(run.notes())
    try:
        yield states
    except Interrupted as error:
        raise Interrupted(
            f"{error.signal or 'a signal'} stopped the work: the same call with resume goes on "
            f"(on the command line: --out {run.folder} --resume)"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException:
        if finished:
            raise
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


def refuse_other_folder(
    folder: Path, *written: str, resume: bool, values_sha256: str | None = None
) -> None:
    """Refuse a folder in which something lies that would be written over, or a run of other data.

    Files of other names may lie there; they stay. A folder that holds a run is left to
    `Run.create` to refuse or take up.
    """
    if (folder / "settings.json").exists():
        if resume and values_sha256 is not None:
            stored = Run.open(folder).settings.get("values_sha256", values_sha256)
            if stored != values_sha256:
                raise InputError(
                    f"the table has changed since the run in {folder} began: choose another folder"
                )
        return
    taken = [name for name in (*written, "report.html") if (folder / name).exists()]
    if taken:
        raise InputError(
            f"{folder} already holds {taken[0]}, which is not a run's: choose another folder"
        )
