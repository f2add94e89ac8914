"""Where a watched run's Readings go: the folder, the sinks, the alarms.

Training must not die of being watched. If the folder cannot be written (a full disk), one warning
says so and nothing more is written; the run so far stays as it is, and alarms go on in memory. A
sink that fails is warned about once and left out from then on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from levelhead.base.errors import InputError, LevelheadError, LevelheadWarning
from levelhead.base.records import Reading, Run
from levelhead.training.alarms import Alarm, Detector, sentences
from levelhead.training.watch_figures import figures

__all__ = ["Recorder", "Sink", "run_for"]


class Sink(Protocol):
    """Whatever takes Readings besides the run folder (see `adapters.tracking`)."""

    def write(self, readings: Sequence[Reading]) -> object:
        """Take Readings, in the order of steps."""

    def close(self) -> object:
        """Nothing more will come."""


def run_for(out: Path, title: str, settings: Mapping[str, Any], resume: bool) -> tuple[Run, int]:
    """The run in `out`, and the last step it knows of; a folder in use is refused.

    Raises InputError for a folder that holds anything, unless it is to be resumed, and for
    settings that are not those of the run that is resumed.
    """
    if not resume and out.is_dir() and (held := sorted(path.name for path in out.iterdir())):
        raise InputError(
            f"{out} is in use (it holds {held[0]}): choose an empty folder, or give resume=True to "
            "go on with the run that is there"
        )
    run = Run.create(out, title=title, command="watch", settings=settings, resume=resume)
    steps = [r.step for r in run.readings() if r.step is not None] if resume else []
    return run, max(steps, default=0)


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
            self._detector.update(r for r in self.run.readings() if r.source != "snapshot")

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
                self.note([f"The loss was {reading.value} at step {reading.step}."])
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
