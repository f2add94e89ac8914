"""Where a watched run's Readings go: the folder, the sinks, the alarms.

Training must not die of being watched. If the folder cannot be written (a full disk), one warning
says so and nothing more is written; the run so far stays as it is, and alarms go on in memory. A
sink that fails is warned about once and left out from then on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from levelhead.base.errors import InputError, LevelheadError, LevelheadWarning
from levelhead.base.records import RUN_FILES, Reading, Run
from levelhead.training.alarms import Alarm, Detector, sentences
from levelhead.training.snapshots import WRITER, drop_snapshots
from levelhead.training.watch_course import RESUMED, current
from levelhead.training.watch_figures import figures
from levelhead.training.watch_process import PROCESS_FILE

__all__ = ["Recorder", "Sink", "discard", "run_for"]


class Sink(Protocol):
    """Whatever takes Readings besides the run folder (see `adapters.tracking`)."""

    def write(self, readings: Sequence[Reading]) -> object:
        """Take Readings, in the order of steps."""

    def close(self) -> object:
        """Nothing more will come."""


def run_for(
    out: Path, title: str, settings: Mapping[str, Any], resume: bool | int
) -> tuple[Run, int]:
    """The run in `out`, and the step it goes on from; a folder in use is refused.

    `resume` is as for `watch`: True goes on from the last step. What was read after the step that
    a run goes on from is marked as superseded, and its snapshots are removed.

    Raises InputError for a folder that holds anything, unless it is to be resumed, and for
    settings that are not those of the run that is resumed.
    """
    resumed = resume is not False
    if not resumed and out.is_dir() and (held := sorted(path.name for path in out.iterdir())):
        raise InputError(
            f"{out} is in use (it holds {held[0]}): choose an empty folder, or give resume=True to "
            "go on with the run that is there"
        )
    run = Run.create(out, title=title, command="watch", settings=settings, resume=resumed)
    readings = current(run.readings()) if resumed else []
    last = max((r.step for r in readings if r.step is not None), default=0)
    if isinstance(resume, bool):
        return run, last
    if last > resume:
        later = [r for r in readings if r.step is not None and r.step > resume]
        run.add_readings([Reading(RESUMED, resume, "1", {}, resume, "loop")])
        drop_snapshots(out, resume)
        if any(r.source == "snapshot" for r in later):
            run.add_readings([Reading(RESUMED, resume, "1", {}, resume, "snapshot")], WRITER)
    return run, resume


def discard(folder: Path, made: bool) -> None:
    """Remove what a run wrote that failed before it had read anything, so that it can be repeated.

    The folder itself too if it was `made` for the run. Files that are not a run's stay, and so does
    whatever cannot be removed.
    """
    with suppress(OSError):
        drop_snapshots(folder, -1)
        for pattern in (*RUN_FILES, PROCESS_FILE):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)
        if made:
            folder.rmdir()


class Recorder:
    """Takes the Readings of one watched run. Alarms they raise are warned about, and kept."""

    def __init__(self, run: Run, sinks: Sequence[Sink], detector: Detector | None) -> None:
        self.run = run
        self.alarms: list[Alarm] = []
        self._sinks = list(sinks)
        self._detector = detector
        self._writing = True
        self._bad_loss = False

    def remember(self) -> None:
        """Feed the alarms what a resumed run has seen before; nothing of it is told again."""
        if self._detector is not None:
            past = [r for r in current(self.run.readings()) if r.source not in ("snapshot", "end")]
            self._detector.update(past)

    def write(self, readings: Sequence[Reading], judged: bool = True) -> list[Alarm]:
        """Store Readings and the alarms they raise (if they are judged); returns the alarms."""
        found = self._detector.update(readings) if self._detector and judged else []
        every = [*readings, *(alarm.reading() for alarm in found)]
        if every:
            self._guard(lambda: self.run.add_readings(every))
            self._send(every)
        self.alarms += found
        self._note_losses(readings)
        for sentence in sentences(found):
            warnings.warn(sentence, LevelheadWarning, stacklevel=2)
        return found

    def note(self, sentences: Iterable[str]) -> None:
        """Store plain sentences in the run."""
        told = list(sentences)
        if told:
            self._guard(lambda: self.run.add_notes(told))

    def draw(self) -> None:
        """Draw the run's Figures, in the place of earlier ones."""

        def put() -> None:
            arrays, drawn = figures(self.run)
            self.run.replace_figures(drawn, arrays)

        self._guard(put)

    def close(self) -> None:
        """Close the sinks."""
        for sink in self._sinks:
            self._attempt(sink, sink.close)
        self._sinks = []

    def _note_losses(self, readings: Sequence[Reading]) -> None:
        if self._bad_loss:
            return
        for reading in readings:
            if reading.name == "loss" and not math.isfinite(reading.value):
                self._bad_loss = True
                # A rule of the alarms for losses that diverge would stand here.
                said = f"The loss was {reading.value} at step {reading.step}."
                self.note([said])
                warnings.warn(
                    f"{said} Training goes on; usual cures are a lower rate, a longer warm-up and "
                    "clipped gradients.",
                    LevelheadWarning,
                    stacklevel=2,
                )
                return

    def _guard(self, put: Any) -> None:
        if not self._writing:
            return
        try:
            put()
        except LevelheadError as error:
            self._writing = False
            warnings.warn(
                f"{error} Training goes on, but nothing more is written to {self.run.folder}.",
                LevelheadWarning,
                stacklevel=2,
            )

    def _send(self, readings: Sequence[Reading]) -> None:
        for sink in list(self._sinks):
            if not self._attempt(sink, lambda sink=sink: sink.write(readings)):
                self._sinks.remove(sink)

    def _attempt(self, sink: Sink, act: Any) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - other people's code, and training must go on
            warnings.warn(
                f"The sink {type(sink).__name__} failed ({error}) and is left out from here on.",
                LevelheadWarning,
                stacklevel=2,
            )
            return False
        return True
