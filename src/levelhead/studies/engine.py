"""Where the cells of a study run: in this process or in a pool of joblib's, with bounded retries.

Every cell has a folder of its own below `cells/`. It holds resumable states while the cell runs
and becomes a finished run folder in one step, when `done.json` is written last. A pool that breaks
(a worker was killed) is started again with the cells that are not finished; those that were in
flight go on from their states. Nothing else is lost, and nothing is done twice.

The folder must be reachable by all workers: local processes always see it, those of a cluster on
several machines need a shared file system.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky.backend import resource_tracker
from joblib.externals.loky.process_executor import TerminatedWorkerError

from levelhead.base.errors import DivergenceError, InputError, Interrupted
from levelhead.base.files import read_json, write_json
from levelhead.base.numerics import threads
from levelhead.base.progress import progress
from levelhead.base.records import Run
from levelhead.studies.study import Cell, Outcome, StudySettings, Workspace

__all__ = ["LOKY", "CellFailed", "Pool", "execute", "load_outcome", "run_cell", "seconds"]

_DONE = "done.json"
_GUARD = "levelhead-parent"
_ENVIRONMENT = threading.Lock()
Work = Callable[[Any, Cell, Workspace], Outcome]


class Pool(Protocol):
    """A place where joblib runs things: see `LOKY` here and the adapters of Dask and Ray.

    `start(jobs, threads)` is a context in which `joblib.Parallel` finds its backend; `broken` are
    the errors that say that workers were lost.
    """

    @property
    def name(self) -> str: ...

    @property
    def broken(self) -> tuple[type[BaseException], ...]: ...

    def start(self, jobs: int, threads: int) -> AbstractContextManager[object]: ...


@dataclass(frozen=True)
class _Loky:
    name: str = "loky"
    broken: tuple[type[BaseException], ...] = (BrokenProcessPool, TerminatedWorkerError)

    @contextmanager
    def start(self, jobs: int, threads: int) -> Iterator[None]:
        _start_tracker()
        config = parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=threads)
        with warnings.catch_warnings(), config:
            # Between two cells loky replaces a worker that has grown, by a data set it keeps, say.
            warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
            yield


def _start_tracker() -> None:
    """Start loky's process that clears away semaphores and folders, without its warnings.

    When a study is interrupted it may find a semaphore that is registered still and gone already,
    or a folder that is left. It removes what is there, with nothing for a user to do. One that runs
    already stays as it is.
    """
    quiet = "ignore:resource_tracker:UserWarning"
    with _ENVIRONMENT:
        before = os.environ.get("PYTHONWARNINGS")
        os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
        try:
            resource_tracker.ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONWARNINGS"]
            else:
                os.environ["PYTHONWARNINGS"] = before


LOKY: Pool = _Loky()
"""Processes of this machine, by joblib's own default backend."""


@dataclass(frozen=True)
class CellFailed:
    """A cell that diverged or could not use its input, or that took its pool down too often."""

    cell: str
    reason: str

    def __str__(self) -> str:
        return f"{self.cell}: {self.reason}"


def execute(
    work: Work,
    settings: StudySettings,
    cells: Sequence[Cell],
    folder: Path,
    *,
    jobs: int = 1,
    pool: Pool = LOKY,
    tries: int = 3,
    show_progress: bool | None = None,
) -> list[CellFailed]:
    """Run the cells that are not finished in `folder`; return those that could not be.

    Args:
        work: the study's function of one cell; a function of a module.
        jobs: cells at a time; 1 runs them here, without a pool.
        tries: how often a pool may break without a single cell finished in between; then the cells
            that had begun run one at a time, and those that lose their worker again are given up.

    A training that diverged and input that cannot be used (`DivergenceError`, `InputError`) belong
    to their cell: they are written down and named. Any other error stops the study: a full disk, a
    damaged state, or a mistake in the code. Raises Interrupted for Ctrl-C and
    SIGTERM; what is finished stays, and a second call goes on.
    """
    with progress("cells", len(cells), enabled=show_progress) as advance:
        done = sum(_finished(folder, cell) for cell in cells)
        advance(done)
        broke = 0
        lost: set[str] = set()
        while todo := _unfinished(folder, cells, lost):
            suspects = [cell for cell in todo if _begun(folder, cell)] or todo
            # What took its worker down comes last, that it may not do so for each of the others.
            todo.sort(key=lambda cell: _begun(folder, cell))
            with _counted(folder, cells, advance):
                if broke < tries:
                    _once(work, settings, todo, folder, jobs, pool)
                else:
                    for cell in suspects:
                        if not _alone(work, settings, cell, folder, pool):
                            lost.add(cell.name)
            now = sum(_finished(folder, cell) for cell in cells)
            broke = 0 if now > done or broke == tries else broke + 1
            done = now
    return _failures(folder, cells)


def _once(
    work: Work,
    settings: StudySettings,
    todo: Sequence[Cell],
    folder: Path,
    jobs: int,
    pool: Pool,
) -> None:
    """Run `todo` once; some are unfinished after it if the pool broke or a worker was stopped."""
    if jobs == 1:
        for cell in todo:
            run_cell(work, settings, cell, folder)
        return
    with suppress(*pool.broken), pool.start(jobs, settings.threads):
        Parallel(batch_size=1, pre_dispatch="n_jobs")(
            delayed(_in_worker)(work, settings, cell, folder, os.getpid()) for cell in todo
        )


def _alone(
    work: Work, settings: StudySettings, cell: Cell, folder: Path, pool: Pool, tries: int = 2
) -> bool:
    """Run one cell with no other beside it, in a worker still; whether it was finished."""
    for _ in range(tries):
        _once(work, settings, [cell], folder, 2, pool)
        if _finished(folder, cell):
            return True
    return False


def _in_worker(work: Work, settings: StudySettings, cell: Cell, folder: Path, study: int) -> None:
    """Run a cell for the process `study`; a worker that is stopped by a signal leaves its state."""
    if os.getpid() == study:  # a cluster of one core: joblib runs its cells here
        run_cell(work, settings, cell, folder)
        return
    _leave_with(os.getppid())
    with suppress(Interrupted):
        run_cell(work, settings, cell, folder)


def _leave_with(parent: int) -> None:
    """End this worker when the process that started it is gone (killed, say), once a process.

    Otherwise it would finish its cell for nobody, beside the workers of whoever resumes.
    """
    if any(thread.name == _GUARD for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name=_GUARD, daemon=True).start()


def run_cell(work: Work, settings: StudySettings, cell: Cell, folder: Path) -> None:
    """Run one cell in its folder and mark it finished; a finished one is left alone."""
    place = folder / "cells" / cell.name
    if (place / _DONE).is_file():
        return
    _clear(place)
    place.mkdir(parents=True, exist_ok=True)
    began, busy = time.perf_counter(), time.process_time()
    failed = None
    outcome = Outcome()
    with threads(settings.threads):
        try:
            outcome = work(settings, cell, Workspace(place))
        except Interrupted:
            raise
        except (DivergenceError, InputError) as error:
            failed = str(error)
    run = Run.create(
        place,
        title=cell.name,
        command=None,
        settings={"cell": dict(cell.given), "settings": settings.model_dump(mode="json")},
    )
    run.add_readings(outcome.readings)
    run.add_arrays(outcome.arrays)
    run.add_notes(list(outcome.notes))
    for state in place.glob("*.state.*"):
        state.unlink()
    record = {
        "failed": failed,
        "threads": settings.threads,
        "process": os.getpid(),
        # A cell whose cores are shared takes longer than it computes.
        "seconds": {
            "whole": time.perf_counter() - began,
            "cpu": time.process_time() - busy,
            **outcome.seconds,
        },
    }
    write_json(place / _DONE, record)


def load_outcome(folder: Path, cell: Cell) -> Outcome | None:
    """What a finished cell found, or None if it failed or was never finished."""
    place = folder / "cells" / cell.name
    if not (place / _DONE).is_file():
        return None
    record = read_json(place / _DONE)
    if record["failed"] is not None:
        return None
    run = Run.open(place)
    arrays = {name: run.array(name) for name in run.array_names()}
    return Outcome(run.readings(), arrays, run.notes(), record["seconds"])


def _clear(place: Path) -> None:
    """Remove what an unfinished start left, but for the states it can go on from."""
    if not place.is_dir():
        return
    for path in place.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif ".state." not in path.name:
            path.unlink()


def _finished(folder: Path, cell: Cell) -> bool:
    return (folder / "cells" / cell.name / _DONE).is_file()


def _begun(folder: Path, cell: Cell) -> bool:
    return (folder / "cells" / cell.name).is_dir()


def _unfinished(folder: Path, cells: Sequence[Cell], lost: Collection[str]) -> list[Cell]:
    return [cell for cell in cells if cell.name not in lost and not _finished(folder, cell)]


def _failures(folder: Path, cells: Sequence[Cell]) -> list[CellFailed]:
    failures = []
    for cell in cells:
        if not _finished(folder, cell):
            reason = (
                "its worker was lost or stopped each time, also with no other beside it (memory?)"
            )
            failures.append(CellFailed(cell.name, reason))
            continue
        reason = read_json(folder / "cells" / cell.name / _DONE)["failed"]
        if reason is not None:
            failures.append(CellFailed(cell.name, reason))
    return failures


@contextmanager
def _counted(
    folder: Path, cells: Sequence[Cell], advance: Callable[[int], object]
) -> Iterator[None]:
    """Move the bar as cells finish, wherever they run: what counts is the file they leave."""
    ended = threading.Event()
    shown = sum(_finished(folder, cell) for cell in cells)

    def catch_up() -> None:
        nonlocal shown
        now = sum(_finished(folder, cell) for cell in cells)
        if now > shown:
            advance(now - shown)
            shown = now

    def watch() -> None:
        while not ended.wait(0.5):
            catch_up()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        catch_up()


def seconds(folder: Path, cells: Sequence[Cell]) -> Mapping[str, Mapping[str, float]]:
    """Seconds of every finished cell by what took them."""
    return {
        cell.name: read_json(folder / "cells" / cell.name / _DONE)["seconds"]
        for cell in cells
        if _finished(folder, cell)
    }
