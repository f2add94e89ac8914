"""Sinks that hand Readings on to TensorBoard or MLflow while a run is watched.

    levelhead.watch(model, optimizer, out="run", sinks=[TensorBoardSink("runs/a")])

A Reading becomes one scalar, called by its name and its place: `attention_entropy/layers.0/head3`.
Characters that MLflow refuses become `_`. Each library is imported when its sink is made, so that
one can be used without the other; `pip install 'levelhead[tracking]'` installs both.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from levelhead.base.errors import InputError, LevelheadError
from levelhead.base.records import Reading

__all__ = ["MLflowSink", "TensorBoardSink", "tag_of"]

# MLflow's limits: letters of a name, its length, and metrics in one request.
_REFUSED = re.compile(r"[^A-Za-z0-9_.: -]")
_LONGEST, _BATCH = 250, 1000


def tag_of(reading: Reading) -> str:
    """What a Reading is called: name, layer, head and any further place, with `/` between.

    >>> tag_of(Reading("attention_entropy", 1.5, where={"layer": "layers.0", "head": 3}, step=1))
    'attention_entropy/layers.0/head3'
    >>> tag_of(Reading("layer_cka", 0.5, where={"layer": "a/b", "other": "é"}, step=1))
    'layer_cka/a_b/other__'
    """
    parts = [reading.name]
    for key, place in reading.where.items():
        if reading.name.startswith("alarm.") and key not in ("layer", "head"):
            continue
        if key == "layer":
            parts.append(str(place))
        else:
            parts.append(f"{key}{place}" if isinstance(place, int) else f"{key}_{place}")
    clean = [_REFUSED.sub("_", part).strip() for part in parts]
    # A part of dots alone would be a folder to MLflow.
    tag = "/".join(part if part.strip(".") else "_" for part in clean)
    if len(tag) <= _LONGEST:
        return tag
    digest = hashlib.sha256(tag.encode()).hexdigest()[:8]
    return f"{tag[: _LONGEST - 9]}-{digest}"


class _Tags:
    """Tags of Readings, no two places under one: the second of two alike gets `-2`, and so on."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str] = {}
        self._used: dict[str, int] = {}

    def of(self, reading: Reading) -> str:
        alarm = reading.name.startswith("alarm.")
        places = [p for p in reading.where.items() if not alarm or p[0] in ("layer", "head")]
        key = (reading.name, *places)
        if key not in self._known:
            tag = tag_of(reading)
            count = self._used[tag] = self._used.get(tag, 0) + 1
            self._known[key] = tag if count == 1 else f"{tag[: _LONGEST - 6]}-{count}"
        return self._known[key]


class TensorBoardSink:
    """Writes Readings as scalars below `logdir`, where `tensorboard --logdir` finds them.

    nan and infinity are kept; values are rounded to float32 by the format. Readings without a step
    stand at step 0. Raises `InputError` if TensorBoard is not installed, `LevelheadError` if the
    folder cannot be written.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("TensorBoardSink", "tensorboard", error) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._tags = _Tags()
        try:
            self._writer: Any = EventFileWriter(os.fspath(logdir))
        except OSError as error:
            raise LevelheadError(
                f"{os.fspath(logdir)} cannot be written ({error.strerror or error}): "
                "choose another folder for TensorBoard."
            ) from error

    def write(self, readings: Iterable[Reading]) -> None:
        """Write Readings, those of one step as one event; a closed sink refuses (`InputError`)."""
        if self._writer is None:
            raise _closed("TensorBoardSink")
        now = time.time()
        for step, same in _by_step(readings):
            summary = self._summary()
            for reading in same:
                summary.value.add(tag=self._tags.of(reading), simple_value=reading.value)
            self._writer.add_event(self._event(wall_time=now, step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Hand everything to the system; closing again does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflowSink:
    """Writes Readings as metrics of a new MLflow run, named `run_name`, in `experiment`.

    `tracking_uri` is a server's address, or whatever else the installed MLflow takes; the
    experiment is made if there is none of that name. Readings without a step stand at step 0.
    `run_id` is MLflow's name of the run. Raises `InputError` if MLflow is not installed or refuses
    the address; what a server answers later is raised as `LevelheadError`.
    """

    def __init__(self, tracking_uri: str, experiment: str, run_name: str | None = None) -> None:
        try:
            from mlflow.entities import Metric
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise _missing("MLflowSink", "mlflow", error) from error
        self._metric, self._refusal = Metric, MlflowException
        self._tags = _Tags()
        self._open = True
        try:
            self._client: Any = MlflowClient(tracking_uri=tracking_uri)
            found = self._client.get_experiment_by_name(experiment)
            known = found.experiment_id if found else self._client.create_experiment(experiment)
            self.run_id: str = self._client.create_run(known, run_name=run_name).info.run_id
        except MlflowException as error:
            raise InputError(f"MLflow refuses {tracking_uri!r}: {_first(error)}") from error

    def write(self, readings: Iterable[Reading]) -> None:
        """Write Readings, a thousand at a time; a closed sink refuses (`InputError`)."""
        if not self._open:
            raise _closed("MLflowSink")
        now = int(time.time() * 1000)
        metrics = [
            self._metric(self._tags.of(reading), reading.value, now, reading.step or 0)
            for reading in readings
        ]
        self._ask(lambda: [self._client.log_batch(self.run_id, metrics=m) for m in _parts(metrics)])

    def close(self) -> None:
        """End the run in MLflow; closing again does nothing."""
        if self._open:
            self._open = False
            self._ask(lambda: self._client.set_terminated(self.run_id))

    def _ask(self, act: Any) -> None:
        try:
            act()
        except self._refusal as error:
            raise LevelheadError(f"MLflow did not take the Readings: {_first(error)}") from error


def _by_step(readings: Iterable[Reading]) -> Iterator[tuple[int, Iterator[Reading]]]:
    ordered = sorted(readings, key=lambda reading: reading.step or 0)
    return groupby(ordered, key=lambda reading: reading.step or 0)


def _parts(metrics: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (metrics[at : at + _BATCH] for at in range(0, len(metrics), _BATCH))


def _first(error: Exception) -> str:
    """The first sentence of somebody else's message."""
    return str(error).strip().split(". ")[0].removesuffix(".") + "."


def _missing(sink: str, library: str, error: ImportError) -> InputError:
    return InputError(
        f"{sink} needs {library}, which cannot be imported ({error}): "
        "pip install 'levelhead[tracking]'."
    )


def _closed(sink: str) -> InputError:
    return InputError(f"This {sink} is closed: make a new one to write more.")
