"""One training of the collapse study: where it starts, how it goes on, what is read on the way.

Readings are taken before the step that is about to be made, so that their `step` counts the steps
done; losses are those of the task alone. Everything that a second start needs lies in two files:
the state of `training.loop`, and a line for each epoch beside it with losses, Readings and the
state of what is added to the loss. Of two lines for one epoch the later one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from levelhead.base.errors import DivergenceError
from levelhead.base.files import append_lines
from levelhead.base.records import Reading
from levelhead.diagnostics.capture import MapCapture
from levelhead.nn.encoder import Encoder, draw_heads
from levelhead.studies.collapse_arms import Addition, addition, readable, structured
from levelhead.studies.collapse_tasks import Part, Task
from levelhead.studies.study import Given, Workspace
from levelhead.training.loop import TrainingSettings, train
from levelhead.training.penalty_layers import LiveLayers
from levelhead.training.watchers import chosen_invariants, map_readings, weight_readings

__all__ = ["Course", "Plan", "Start", "begin", "trained"]

# What curves and alarms read of weights; nothing else is computed.
INVARIANTS = (
    "qk_coherence",
    "ov_coherence",
    "qk_effective_heads",
    "ov_effective_heads",
    "ov_frobenius_norm",
)
_EARLY, _OFTEN = 60, 3
_PROBED = 32
# Texts judged at a time: of like length, so that little padding is computed.
_TEXTS = 64


@dataclass(frozen=True)
class Start:
    """A setting: optimiser and constant rate (no warm-up), and how attention is drawn.

    scale: factor on the weights of attention; spread: of heads around the first one (1: as
    drawn); depth: layers.

    >>> Start("adam", 3e-4, 0.01, 1.0, 2).name
    'adam-0.0003-scale0.01-spread1-depth2'
    """

    optimiser: Literal["adam", "sgd"]
    rate: float
    scale: float
    spread: float
    depth: int

    @property
    def name(self) -> str:
        """Fit for the name of a cell."""
        return (
            f"{self.optimiser}-{self.rate:g}-scale{self.scale:g}-spread{self.spread:g}"
            f"-depth{self.depth}"
        )

    def given(self) -> dict[str, Given]:
        """What a cell is told."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Start:
        """Back from what a cell is told."""
        return cls(**{field.name: given[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Plan:
    """How long and how: epochs of at most `steps`, batches, heads and width, when to look."""

    epochs: int
    steps: int
    batch: int
    heads: int
    width: int
    every: int

    def sampled(self, done: int) -> bool:
        """Whether Readings are taken after that many steps; early ones are close together.

        >>> [step for step in range(90) if Plan(1, 90, 8, 2, 8, 20).sampled(step)][-6:]
        [48, 51, 54, 57, 60, 80]
        """
        return self.even(done) or (done <= _EARLY and done % _OFTEN == 0)

    def even(self, done: int) -> bool:
        """Whether that many steps are a multiple of `every`: of these, means are taken."""
        return done % self.every == 0


def begin(task: Task, start: Start, plan: Plan, arm: str, weight: float, seed: int) -> Encoder:
    """The untrained model of an arm; arms of one seed start from the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7_919 * seed + 13)
        model = Encoder(
            task.classes,
            tokens=task.tokens,
            vocabulary=task.vocabulary,
            patch=task.patch,
            layers=start.depth,
            heads=plan.heads,
            width=plan.width,
            readout=task.readout,
            padding=task.padding,
        )
        draw_heads(model, scale=start.scale, spread=start.spread)
        structured(arm, weight, model)
    return model


@dataclass(frozen=True, eq=False)
class _Looking:
    """A model, and what finds its layers and maps: made once, for that takes a quarter of a look.

    It is no other for other weights, unless the model itself is another (arm D is read as a copy).
    """

    model: nn.Module
    live: LiveLayers
    capture: MapCapture

    @classmethod
    def of(cls, model: nn.Module) -> _Looking:
        live = LiveLayers(model)
        return cls(model, live, MapCapture(model, live.names, matrices=16))


class Course:
    """What is read of a training as it goes on; see the top of the module.

    losses: of every step. readings: of sampled steps. judged: validation losses, from the one
    before the first step.
    """

    def __init__(
        self, model: Encoder, task: Task, plan: Plan, arm: str, added: Addition, path: Path
    ) -> None:
        self.model, self.task, self.plan, self.arm, self.added = model, task, plan, arm, added
        self.path = path
        self.losses: list[float] = []
        self.readings: list[Reading] = []
        self.judged: list[float] = []
        self._new_losses: list[Tensor] = []
        self._new_readings: list[Reading] = []
        self._chosen = chosen_invariants(INVARIANTS)
        self._looking: _Looking | None = None

    @property
    def steps(self) -> int:
        """Steps begun."""
        return len(self.losses) + len(self._new_losses)

    def batch(self, index: Tensor) -> Callable[[], Tensor]:
        """The closure of one step, for `training.loop.train`."""
        if self.steps:
            self.added.step()
        sampled = self.plan.sampled(self.steps)
        if sampled:
            self.look()
        x, y = self.task.training.x[index], self.task.training.y[index]

        def closure() -> Tensor:
            loss = _loss(self.model(x), y)
            step = self.steps
            self._new_losses.append(loss.detach())
            measured = self.plan.even(step)
            try:
                whole = self.added(loss, measured)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                # Weights, or products of them, are not finite: `train` ends at a loss of nan.
                return loss * math.nan
            if measured:
                self._new_readings += [
                    Reading(name, value, step=step, source="collapse")
                    for name, value in self.added.measured.items()
                ]
            return whole

        return closure

    def look(self) -> None:
        """Readings of weights and maps as they are; none where they are not finite."""
        plain = readable(self.model, self.arm)
        if not all(bool(p.isfinite().all()) for p in plain.parameters()):
            return
        looking = self._looking
        if looking is None or looking.model is not plain:
            looking = self._looking = _Looking.of(plain)
        with torch.no_grad():
            for view in looking.live.views():
                self._new_readings += weight_readings(view, self._chosen, self.steps)
        probed = self.task.validation.x[:_PROBED]
        for name, found in looking.capture.look(plain, probed).items():
            self._new_readings += map_readings(name, found, self.steps)

    def judge(self) -> float:
        """The validation loss at the end of an epoch, which is written down first."""
        value = float(_whole_loss(self.model, self.task.validation, self.task.padding))
        line = {
            "epoch": len(self.judged),
            "validation": value,
            "losses": [float(loss) for loss in self._new_losses],
            "readings": [[r.name, r.value, r.unit, r.where, r.step] for r in self._new_readings],
            "added": self.added.state(),
        }
        append_lines(self.path, json.dumps(line).encode() + b"\n")
        self._take(line)
        return value

    def restart(self, epochs: int) -> None:
        """Go on after that many epochs, as the lines have it."""
        lines = {}
        for text in self.path.read_bytes().splitlines():
            line = json.loads(text)
            lines[line["epoch"]] = line
        for epoch in range(epochs + 1):
            self._take(lines[epoch])
        self.added.load(lines[epochs]["added"])

    def readings_with_losses(self) -> list[Reading]:
        """All Readings, and every loss as one, for the rules of alarms."""
        losses = [
            Reading("loss", value, step=step, source="collapse")
            for step, value in enumerate(self.losses, 1)
        ]
        return [*losses, *self.readings]

    def cut_short(self) -> None:
        """Keep what was read in an epoch that has no end, of a training that diverged."""
        self.losses += [float(loss) for loss in self._new_losses]
        self.readings += self._new_readings
        self._new_losses, self._new_readings = [], []

    def _take(self, line: Mapping[str, Any]) -> None:
        self.judged.append(line["validation"])
        self.losses += line["losses"]
        self.readings += [
            Reading(name, value, unit, where, step, "collapse")
            for name, value, unit, where, step in line["readings"]
        ]
        self._new_losses, self._new_readings = [], []


def trained(
    model: Encoder,
    task: Task,
    start: Start,
    plan: Plan,
    arm: str,
    weight: float,
    seed: int,
    workspace: Workspace,
    name: str,
) -> tuple[Course, list[str]]:
    """Train `model` in place to its best validation loss; the course, and notes on failure.

    A training that diverges keeps its best weights so far and says so; it is an outcome.
    """
    added = addition(arm, weight, model)
    state = workspace.state()
    course = Course(model, task, plan, arm, added, workspace.state("course", "jsonl"))
    if state.exists():
        course.restart(_epochs_in(state))
    elif course.path.exists():
        course.path.unlink()
    notes = []
    try:
        train(
            model,
            course.batch,
            len(task.training),
            course.judge,
            TrainingSettings(
                epochs=plan.epochs,
                patience=0,
                batch_size=plan.batch,
                learning_rate=start.rate,
                restart_every=0,
                rho=0.0,
                optimizer=start.optimiser,
                steps_per_epoch=plan.steps,
                seed=seed,
            ),
            state_path=state,
            resume=True,
            data=name,
            show_progress=False,
        )
    except DivergenceError as error:
        notes.append(f"training diverged ({error})")
        course.cut_short()
    finally:
        added.close()
    return course, notes


def _loss(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), y.flatten())


def _whole_loss(model: Encoder, part: Part, padding: int | None) -> Tensor:
    with torch.no_grad():
        return _loss(_whole_logits(model, part.x, padding), part.y)


def _whole_logits(model: Encoder, x: Tensor, padding: int | None) -> Tensor:
    """Logits [N, …]; texts by length, without the padding at their ends, which changes nothing."""
    if padding is None:
        logits: Tensor = model(x)
        return logits
    lengths = (x != padding).sum(1)
    order = lengths.argsort(stable=True)
    found = [model(x[part, : int(lengths[part[-1]])]) for part in torch.split(order, _TEXTS)]
    return torch.cat(found)[order.argsort()]


def _epochs_in(state: Path) -> int:
    """Epochs that a state of `train` holds."""
    with safe_open(state, framework="pt") as file:
        record = json.loads((file.metadata() or {})["levelhead"])
    return len(record["history"]["epochs"]) - 1
