"""`alarms`: how often the alarms find what was planted, and how often they cry wolf.

Planted runs. A healthy training of `start` steps goes on seven times, each time with another fault
from a known step on. Null runs are healthy trainings of many kinds, `null_steps` long; those of odd
seeds are watched with sharpness. Everything is watched by `levelhead.watch`, and the
alarms are those of its Readings at the shipped thresholds.

Two halves. Thresholds were fixed on the *development* half (seeds 0, 1, …); the rates are those of
the *held-out* half (seeds 2000, 2001, …), which no threshold has seen. (Seeds 1000, … were held out
before the excuse for sharpness was widened, and count no more.)
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field

from levelhead.base.records import Reading, Run
from levelhead.studies.alarms_conclusions import HALVES, HELD_OUT, conclude
from levelhead.studies.alarms_faults import CONSEQUENCES, Fault, Planted, drawn_fault
from levelhead.studies.alarms_trainings import NULL, Training, null_recipe, planted_recipe
from levelhead.studies.study import Cell, Findings, Outcome, Study, StudySettings, Workspace, grid
from levelhead.training.alarms import ALARMS, Alarm, detect
from levelhead.training.watch import watch

__all__ = ["STUDY", "AlarmsSettings"]


class AlarmsSettings(StudySettings):
    """Settings of the harness.

    Attributes:
        seeds: planted runs of each alarm in each half.
        null_seeds: null runs of each kind in each half.
        null_steps: of each null run; `start`: of the healthy part of planted runs; `after`: after
            the onset.
        every, null_every: steps between sampled steps of planted and of null runs.
        halves: which halves are run; to work on thresholds, "development" alone.
        keep: a folder in which watched runs are kept, and from which those that it holds are
            taken instead of training them again; for the development of thresholds.
        targets: whether rates that miss the targets make the study fail.
    """

    seeds: int = Field(default=4, ge=1)
    null_seeds: int = Field(default=2, ge=1)
    null_steps: int = Field(default=1000, ge=50)
    start: int = Field(default=200, ge=50)
    after: int = Field(default=200, ge=50)
    every: int = Field(default=20, ge=1)
    null_every: int = Field(default=50, ge=1)
    halves: tuple[Literal["development", "held-out"], ...] = HALVES
    keep: str = ""
    targets: bool = True


def _cells(settings: AlarmsSettings) -> list[Cell]:
    cells = []
    for half in settings.halves:
        first = HELD_OUT if half == "held-out" else 0
        seeds = range(first, first + settings.seeds)
        cells += grid(run=["planted"], half=[half], seed=seeds)
        seeds = range(first, first + settings.null_seeds)
        cells += grid(run=["null"], half=[half], kind=list(NULL), seed=seeds)
    return cells


def _run(settings: AlarmsSettings, cell: Cell, workspace: Workspace) -> Outcome:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, torch.random.fork_rng(devices=[]):
        kept = Path(settings.keep or scratch) / cell.name
        one = _planted if cell.given["run"] == "planted" else _null
        readings, notes = one(settings, cell, kept)
    return Outcome(readings, notes=notes, seconds={"run": time.perf_counter() - began})


# ── watching ──


def watched(
    training: Training,
    steps: int,
    folder: Path,
    every: int,
    *,
    sharp: bool = False,
    before: Callable[[int], object] | None = None,
) -> list[Reading]:
    """The Readings of `steps` more steps of a training; of `folder`, if it holds them already.

    `before` is called before each step with its number. Alarms are left to the caller.
    """
    if not folder.is_dir():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)  # of a start that was broken off
        first = training.steps
        with watch(
            training.model,
            training.optimizer,
            every=every,
            out=part,
            resume=first if first else False,
            alarms=False,
            sharpness=training.fixed_loss if sharp else None,
        ) as run:
            for step in range(first + 1, first + steps + 1):
                if before is not None:
                    before(step)
                training.step(run.step)
                if training.recipe.validate and step % training.recipe.validate == 0:
                    run.record("validation_loss", training.validation_loss())
        part.rename(folder)
    return Run.open(folder).readings()


def _planted(settings: AlarmsSettings, cell: Cell, folder: Path) -> tuple[list[Reading], list[str]]:
    seed = int(cell.given["seed"])
    recipe = planted_recipe(seed)
    torch.manual_seed(seed)
    training = Training(recipe, seed)
    if not all((folder / name).is_dir() for name in ("healthy", *ALARMS)):
        shutil.rmtree(folder, ignore_errors=True)  # faults go on from the healthy part
    folder.mkdir(parents=True, exist_ok=True)
    healthy = watched(training, settings.start, folder / "healthy", settings.every)
    layers = sorted({str(r.where["layer"]) for r in healthy if "layer" in r.where})
    early: dict[tuple[object, ...], Alarm] = {}
    found: list[Reading] = []
    until = settings.start
    for name in ALARMS:
        torch.manual_seed(seed + 1)
        branch = training.twin()
        fault = drawn_fault(name, seed, settings.start, recipe.heads, layers, healthy)
        steps = fault.onset - 1 - settings.start + settings.after
        sharp = name == "sharpness_spike"
        more = watched(branch, steps, folder / name, settings.every, sharp=sharp,
                       before=Planted(fault, branch).act)  # fmt: skip
        alarms = detect([*healthy, *more])
        early |= {a.key: a for a in alarms if a.step < fault.onset}
        until = max(until, fault.onset - 1)
        found += _judged(fault, alarms, layers, settings.every)
        if sharp:
            found.append(Reading("sharp_steps", float(fault.onset - 1 - settings.start)))
    found.append(Reading("steps", float(until)))
    found += _false(list(early.values()))
    return found, [f"Before the onset: {alarm}" for alarm in early.values()]


def _judged(fault: Fault, alarms: Sequence[Alarm], layers: list[str], every: int) -> list[Reading]:
    """Whether and how late a fault was found, and what else was raised after its onset."""
    hits = [a for a in alarms if fault.raised_by(a, layers[fault.layer], every)]
    where: dict[str, str | int] = {"fault": fault.name, "way": fault.way}
    found = [Reading("found", float(bool(hits)), where=where, step=fault.onset)]
    if hits:
        first = min(hits, key=lambda a: a.step)
        found.append(Reading("delay", float(first.step - fault.onset + 1), "step", where))
        found.append(Reading("since", float(first.since - fault.onset), "step", where))
        found.append(Reading("harmful", float(any(a.harmful for a in hits)), where=where))
    others = {a.key: a for a in alarms if a.step >= fault.onset and a not in hits}
    for name in ALARMS:
        count = sum(a.name == name for a in others.values())
        if count:
            explained = int(name in CONSEQUENCES[fault.name] or name == fault.name)
            at = {**where, "alarm": name, "explained": explained}
            found.append(Reading("also", float(count), where=at))
    return found


def _null(settings: AlarmsSettings, cell: Cell, folder: Path) -> tuple[list[Reading], list[str]]:
    seed, kind = int(cell.given["seed"]), str(cell.given["kind"])
    recipe = null_recipe(kind, seed)
    torch.manual_seed(seed)
    training = Training(recipe, seed)
    sharp = seed % 2 == 1
    folder.parent.mkdir(parents=True, exist_ok=True)
    readings = watched(training, settings.null_steps, folder, settings.null_every, sharp=sharp)
    alarms = {a.key: a for a in detect(readings)}
    losses = [r.value for r in readings if r.name == "loss"]
    found = [Reading("steps", float(settings.null_steps))]
    found.append(Reading("sharp_steps", float(settings.null_steps * sharp)))
    found.append(Reading("loss", sum(losses[-50:]) / len(losses[-50:])))
    found.append(Reading("sharpest", min(r.value for r in readings
                                         if r.name == "attention_entropy_share")))  # fmt: skip
    return found + _false(list(alarms.values())), [f"Null: {a}" for a in alarms.values()]


def _false(alarms: Sequence[Alarm]) -> list[Reading]:
    counts = {name: sum(a.name == name for a in alarms) for name in ALARMS}
    return [Reading("false", float(counts[name]), where={"alarm": name}) for name in ALARMS]


# ── what follows ──


def _conclude(settings: AlarmsSettings, outcomes: Mapping[str, Outcome]) -> Findings:
    return conclude(outcomes, settings.targets, settings.halves)


def _limits(settings: AlarmsSettings) -> list[str]:
    return [
        "Models are tiny (one or two layers of width 32, sequences of 5 to 16 tokens) and trained "
        "for minutes; rates on large models may differ.",
        f"Rates belong to how often training is watched: every {settings.every} steps in planted "
        f"runs, every {settings.null_every} in null runs. Persistence is counted in sampled steps.",
        "Faults are planted by hand, abruptly or over up to 60 steps, and are held; those that "
        "grow by themselves over thousands of steps are not among them.",
    ]


STUDY = Study(
    name="alarms",
    title="How often the alarms are right",
    question=(
        "How many planted faults of training does each alarm find, and how often is it raised in "
        "healthy training?"
    ),
    settings=AlarmsSettings,
    presets={
        "quick": {
            "seeds": 1, "null_seeds": 1, "null_steps": 50, "start": 60, "after": 90,
            "every": 10, "targets": False,
        },
        "full": {"seeds": 20, "null_steps": 3200},
    },
    cells=_cells,
    run=_run,
    conclude=_conclude,
    limits=_limits,
)  # fmt: skip
