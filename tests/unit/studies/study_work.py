"""Cells for tests of the engine; a module of its own, for workers import it by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from levelhead.base.errors import DivergenceError, Interrupted, LevelheadError
from levelhead.base.records import Reading
from levelhead.studies.study import Cell, Outcome, StudySettings, Workspace

_KEPT: list[np.ndarray] = []


def doubled(settings: StudySettings, cell: Cell, workspace: Workspace) -> Outcome:
    """Twice the number the cell is told; starts are counted in the folder it is told."""
    number = int(cell.given["number"])
    starts = Path(str(cell.given["folder"])) / f"starts-{number}"
    before = len(starts.read_text()) if starts.exists() else 0
    with starts.open("a") as file:
        file.write("x")
    if cell.given.get("dies") and before < int(cell.given["dies"]):
        workspace.state().write_bytes(b"half way")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(cell.given.get("slow", 0)))
    if cell.given.get("keeps"):
        _KEPT.append(np.ones(int(cell.given["keeps"]), dtype=np.uint8))
    if cell.given.get("diverges"):
        raise DivergenceError("the loss became nan at step 3")
    reading = Reading("double", 2.0 * number, where={"number": number})
    resumed = 1.0 if workspace.state().exists() else 0.0
    return Outcome(
        [reading, Reading("resumed", resumed)],
        {"curve": np.arange(3.0) * number},
        [f"number {number}"],
        {"part": 0.5},
    )


def sleeping(settings: StudySettings, cell: Cell, workspace: Workspace) -> Outcome:
    """Say which process this is, then sleep for longer than any test."""
    folder = Path(str(cell.given["folder"]))
    (folder / f"worker-{cell.given['number']}").write_text(str(os.getpid()))
    time.sleep(600)
    return Outcome()


def stopped(settings: StudySettings, cell: Cell, workspace: Workspace) -> Outcome:
    """As a training does that was told to stop."""
    raise Interrupted("SIGINT after 3 epochs", "SIGINT")


def full_disk(settings: StudySettings, cell: Cell, workspace: Workspace) -> Outcome:
    """As a training does that can no longer write its state."""
    workspace.state().write_bytes(b"half")
    raise LevelheadError("training.state could not be written: free some space")
