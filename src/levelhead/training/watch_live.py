"""A watched run as it grows: new lines of its Readings, the last numbers of each layer, alarms.

Of each number and layer the last `KEPT` sampled steps are kept, its heads taken together, so memory
does not grow with the run. A line that is not finished yet is read the next time.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from levelhead.base.errors import InputError, StoredFileError
from levelhead.base.records import Reading, Run
from levelhead.training.alarms import Alarm
from levelhead.training.watch_course import RESUMED, Course, current, natural
from levelhead.training.watch_observations import Observation, observations
from levelhead.training.watch_process import is_running

__all__ = ["COLUMNS", "KEPT", "Column", "Follower", "sparkline"]

KEPT = 60
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Column:
    """A number of each layer: its Reading, heading, and how heads are taken together."""

    reading: str
    heading: str
    heads: str  # mean, largest or smallest


COLUMNS = (
    Column("attention_entropy_share", "entropy share", "mean"),
    Column("largest_logit", "largest logit", "largest"),
    Column("qk_effective_heads", "heads QK", "mean"),
    Column("ov_effective_heads", "heads OV", "mean"),
    Column("qk_effective_rank", "rank QK", "mean"),
    Column("map_residual", "rank-one distance", "smallest"),
    Column("gradient_norm", "gradient", "mean"),
)
_RUN = ("loss", "validation_loss", "gradient_norm", "largest_hessian_eigenvalue")


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """The last `width` values as bars between their smallest and largest; `·` for no number.

    >>> sparkline([0, 1, 2, float("nan"), 7])
    '▁▂▃·█'
    """
    shown = list(values)[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[int((value - low) * scale)] if math.isfinite(value) else "·" for value in shown
    )


@dataclass
class _Step:
    """Numbers of all heads of one layer at one step, taken together as they come."""

    step: int
    count: int = 0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    source: str = ""

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def take(self, how: str) -> float:
        if not self.count:
            return math.nan
        return self.total / self.count if how == "mean" else float(getattr(self, how))


class Follower:
    """Reads a run folder again and again; `read()` says whether anything was new.

    >>> import tempfile
    >>> from levelhead.base.records import Run
    >>> run = Run.create(tempfile.mkdtemp(), title="A try", command="watch", settings={})
    >>> run.add_readings([Reading("largest_logit", 3.0, where={"layer": "a", "head": 0}, step=5)])
    >>> follower = Follower(run.folder)
    >>> follower.read(), follower.read(), follower.rows()[0]["largest_logit"]
    (True, False, 3.0)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.step = 0
        self.finished = False
        self.alarms: dict[tuple[str, str | None, int | None, int], Alarm] = {}
        self._offsets: dict[Path, int] = {}
        self._wanted = {column.reading for column in COLUMNS} | set(_RUN)
        self._series: dict[tuple[str, str], deque[_Step]] = {}
        self._observed: list[Observation] = []
        self._observed_step = 0
        self._observe_at = 0.0

    @property
    def exists(self) -> bool:
        """Whether the folder is a run by now."""
        return (self.folder / "settings.json").is_file()

    def read(self) -> bool:
        """Take the lines that were finished since the last time.

        Raises `StoredFileError` for a line that is not a Reading.
        """
        before = dict(self._offsets)
        for path in sorted(self.folder.glob("readings-*.jsonl")):
            self._read(path)
        return before != self._offsets

    def _read(self, path: Path) -> None:
        at = self._offsets.get(path, 0)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < at:
                at = 0  # another run was begun in its place
                self._forget()
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    self._take(Reading(**json.loads(line)))
                except (ValueError, TypeError, AttributeError, InputError) as error:
                    raise StoredFileError(
                        f"{path} holds a line that is not a Reading (byte {at}): the file was "
                        "altered; restore it or remove the line."
                    ) from error
                at += len(line)
        self._offsets[path] = at

    def _forget(self) -> None:
        self.step, self.finished = 0, False
        self.alarms.clear()
        self._observed = []
        self._series.clear()

    def _take(self, reading: Reading) -> None:
        if reading.step is None:
            return
        if reading.name == RESUMED:
            if reading.source != "snapshot":
                self._resume(reading.step)
            return
        if reading.name == "finished":
            self.finished = True
            return
        if reading.name.startswith("alarm."):
            alarm = Alarm.from_reading(reading)
            self.alarms[alarm.key] = alarm
            return
        if reading.source != "snapshot":
            self.step = reading.step
            self.finished = False
        if reading.name not in self._wanted:
            return
        key = reading.name, str(reading.where.get("layer", ""))
        series = self._series.setdefault(key, deque(maxlen=KEPT))
        if series and series[-1].step > reading.step:
            while series and series[-1].step >= reading.step:
                series.pop()  # the run was taken up from an earlier step
        if (
            series
            and series[-1].step == reading.step
            and reading.source == "end" != series[-1].source
        ):
            series.pop()  # the final weights stand in the place of those before the last step
        if not series or series[-1].step != reading.step:
            series.append(_Step(reading.step, source=reading.source))
        if not math.isnan(reading.value):
            series[-1].add(reading.value)

    def _resume(self, step: int) -> None:
        """The run was taken up from this step: what came later counts no longer."""
        self.step, self.finished = min(self.step, step), False
        self.alarms = {key: alarm for key, alarm in self.alarms.items() if alarm.step <= step}
        for series in self._series.values():
            while series and series[-1].step > step:
                series.pop()

    # ── what is shown ──

    @property
    def gone(self) -> bool:
        """Whether the process that trained is gone though no end was recorded."""
        return not self.finished and is_running(self.folder) is False

    def notes(self) -> list[str]:
        """What the run has noted; nothing while there is no run."""
        return Run.open(self.folder).notes() if self.exists else []

    def refuse_others(self) -> None:
        """Raises InputError for a run of another kind, such as a study's."""
        command = Run.open(self.folder).command
        if command != "watch":
            raise InputError(
                f"{self.folder} is not a watched run (it was made by {command or 'something else'}"
                "): give the folder that is named by levelhead.watch(out=…), or use "
                "levelhead report."
            )

    def observations(self) -> list[Observation]:
        """See `watch_observations`; all Readings are read for it, but not too often."""
        now = time.monotonic()
        if self.step != self._observed_step and now >= self._observe_at and self.exists:
            course = Course(current(Run.open(self.folder).readings()))
            self._observed = observations(course, list(self.alarms.values()))
            self._observed_step = self.step
            self._observe_at = time.monotonic() + 20 * (time.monotonic() - now)
        return self._observed

    def layers(self) -> list[str]:
        """Names of the layers of which anything was read, in natural order."""
        return sorted({layer for _, layer in self._series if layer}, key=natural)

    def history(self, reading: str, layer: str = "", heads: str = "mean") -> list[float]:
        """The last numbers of one layer, or of the run."""
        return [step.take(heads) for step in self._series.get((reading, layer), ())]

    def rows(self) -> list[dict[str, Any]]:
        """The last number of each column for each layer, and its alarms; None: not read."""
        rows = []
        for layer in self.layers():
            row: dict[str, Any] = {"layer": layer}
            for column in COLUMNS:
                past = self.history(column.reading, layer, column.heads)
                row[column.reading] = past[-1] if past else None
            names = [alarm.name for alarm in self.alarms.values() if alarm.layer == layer]
            row["alarms"] = ", ".join(dict.fromkeys(names))
            rows.append(row)
        return rows

    def state(self) -> dict[str, Any]:
        """All of it as plain values, for JSON; numbers that are not finite are None."""
        found: dict[str, Any] = {"run": str(self.folder), "step": self.step}
        for name in _RUN:
            past = self.history(name)
            found[name] = past[-1] if past else None
        found |= {"layers": self.rows(), "finished": self.finished}
        found |= {"running": False if self.finished else is_running(self.folder)}
        found["alarms"] = [
            {
                **{part: getattr(alarm, part) for part in ("name", "since", "step", "layer")},
                **{part: getattr(alarm, part) for part in ("head", "value", "threshold")},
                **{part: getattr(alarm, part) for part in ("evidence", "harmful", "harm", "cure")},
            }
            for alarm in self.alarms.values()
        ]
        found["observations"] = [asdict(one) for one in self.observations()]
        found["notes"] = self.notes()
        return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value
