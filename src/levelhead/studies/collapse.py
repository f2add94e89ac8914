"""`collapse`: heads that become copies, or training that stalls: found, watched, treated, ablated.

In four steps, each of whose cells follow from the outcomes before:

    search   initialisation scale, spread of heads, rate, optimiser, depth, never a warm-up: in
             which setting does an alarm of attention go off?
    select   every penalty, and weight decay matched to it, over one grid of weights λ, from
             the failing setting; the best λ of each by validation loss
    verdict  all arms at their λ, with seeds that nothing was chosen on, on test rows
    confirm  select and verdict of the two best penalties and their controls on further tasks

Arms are those of `collapse_arms`. Axes as in `weights.attention_view`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from levelhead.base.errors import InputError
from levelhead.studies.collapse_conclusions import conclude
from levelhead.studies.collapse_measures import (
    course_values,
    curves,
    held_out_values,
    mean_off_diagonal,
    pictures,
    readings,
)
from levelhead.studies.collapse_outcomes import (
    FRESH,
    CollapseOutcomes,
    cell_name,
    main_arms,
    starts,
)
from levelhead.studies.collapse_tasks import MADE, Task, make_task, missing_task
from levelhead.studies.collapse_training import Plan, Start, begin, trained
from levelhead.studies.study import Cell, Given, Outcome, Study, StudySettings, Workspace

__all__ = ["STUDY", "CollapseSettings"]


TaskName = Literal["copy", "sort", "recall", "digits", "sst2", "fashion", "own"]
PenaltyName = Literal[
    "coherence",
    "log_det",
    "nuclear_ratio",
    "entropy_rank",
    "rank_floor",
    "nuclear",
    "spectral",
    "core_sparsity",
    "entropy_floor",
    "stability",
]
# A kind and a rate, such as "adam-0.001".
Optimiser = Annotated[str, Field(pattern=r"^(adam|sgd)-\d+(\.\d+)?(e-?\d+)?$")]


class CollapseSettings(StudySettings):
    """Settings of the collapse study.

    Attributes:
        seeds: of the verdicts; none of them is used before.
        search_seeds, selection_seeds: of the search and of the choice of λ.
        tasks: with the full grid. confirm: tasks for the two best penalties and their controls.
        text: folder of the SST-2 files. data: the user's own TSV or image folder (task "own").
        optimisers: kind and rate. scales, spreads, depths: what else is searched; the verdicts
            are about the first depth.
        penalties, weights: arms B and C, and their grid λ. shares: of the low-rank head core, as
            many as there are weights.
        heads, width, batch, epochs, epoch_steps: of the models and their training.
        text_epochs, recall_epochs: of tasks that are learnt more slowly; recall has twice the
            training examples. tokens: at most so many words.
        training, validation, test: examples of tasks made on the spot and of digits; stored: the
            same three of tasks that are read from files.
        every: steps between Readings.
        noises, radii, attack_steps: of the disturbances.
    """

    seeds: int = Field(default=10, ge=2)
    search_seeds: int = Field(default=3, ge=1)
    selection_seeds: int = Field(default=3, ge=1)
    tasks: tuple[TaskName, ...] = Field(default=("copy", "digits"), min_length=1)
    confirm: tuple[TaskName, ...] = ("recall", "sst2")
    text: str = ""
    data: str = ""
    optimisers: tuple[Optimiser, ...] = ("adam-0.0003", "adam-0.001", "adam-0.02", "sgd-0.1")
    scales: tuple[float, ...] = (1.0, 0.1, 0.01, 0.003)
    spreads: tuple[float, ...] = (1.0, 0.1)
    depths: tuple[int, ...] = (2, 4)
    penalties: tuple[PenaltyName, ...] = get_args(PenaltyName)
    weights: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    heads: int = Field(default=2, ge=2)
    width: int = Field(default=32, ge=4)
    batch: int = Field(default=32, ge=1)
    epochs: int = Field(default=13, ge=1)
    epoch_steps: int = Field(default=31, ge=1)
    text_epochs: int = Field(default=24, ge=1)
    recall_epochs: int = Field(default=32, ge=1)
    tokens: int = Field(default=32, ge=2)
    training: int = Field(default=1000, ge=8)
    stored: tuple[int, int, int] = (7000, 900, 2000)
    validation: int = Field(default=300, ge=8)
    test: int = Field(default=500, ge=8)
    every: int = Field(default=10, ge=1)
    noises: tuple[float, ...] = (0.3, 1.0)
    radii: tuple[float, ...] = (0.05, 0.2)
    attack_steps: int = Field(default=5, ge=1)

    @model_validator(mode="after")
    def _equal_grids(self) -> Self:
        if len(self.shares) != len(self.weights):
            raise ValueError("shares and weights must be equally many: arms are chosen from grids")
        return self


# ── cells ──


def _there(settings: CollapseSettings, names: Sequence[str]) -> list[str]:
    return [n for n in names if missing_task(n, text=settings.text, data=settings.data) is None]


def _confirming(settings: CollapseSettings) -> tuple[str, ...]:
    """The further tasks; the user's own is one as soon as there is something to read."""
    own = ("own",) if settings.data and "own" not in settings.tasks else ()
    return tuple(dict.fromkeys((*settings.confirm, *own)))


def _refuse_unreadable(settings: CollapseSettings) -> None:
    """Raise InputError for data that were named and are not there, and if no main task is there."""
    for name, given in (("own", settings.data), ("sst2", settings.text)):
        reason = missing_task(name, text=settings.text, data=settings.data)
        if given and reason is not None:
            raise InputError(reason)
    if not _there(settings, settings.tasks):
        reasons = (
            missing_task(name, text=settings.text, data=settings.data) for name in settings.tasks
        )
        raise InputError("; ".join(reason for reason in reasons if reason is not None))


def _cells(settings: CollapseSettings) -> list[Cell]:
    _refuse_unreadable(settings)
    return [
        _cell("search", task, start, "A", 0.0, seed)
        for task in _there(settings, settings.tasks)
        for start in starts(settings)
        for seed in range(settings.search_seeds)
    ]


def _cell(
    kind: str,
    task: str,
    start: Start,
    arm: str,
    weight: float,
    seed: int,
    strength: float | None = None,
) -> Cell:
    given: dict[str, Given] = {"kind": kind, "task": task, "arm": arm, "weight": weight}
    given |= {"strength": weight if strength is None else strength, "seed": seed}
    middle = start.name if kind == "search" else f"{arm}-{weight:g}"
    return Cell(cell_name(kind, task, middle, seed), {**given, **start.given()})


def _follow(settings: CollapseSettings, outcomes: Mapping[str, Outcome]) -> list[Cell]:
    """What can be asked for once `outcomes` are known; the same cells come again."""
    found = CollapseOutcomes(settings, outcomes)
    cells = []
    for task in _there(settings, settings.tasks):
        start = found.failing(task)
        if start is not None:
            arms = main_arms(settings.penalties)
            cells += _selected_and_judged(settings, found, task, start, arms)
    # The two best are known when all penalties have been tried on all main tasks.
    done = all(found.tried(task) for task in _there(settings, settings.tasks))
    start = found.failing(found.home())
    if start is None or not done:
        return cells
    best = found.best_penalties()
    for task in _there(settings, _confirming(settings)):
        cells += _selected_and_judged(settings, found, task, start, main_arms(best))
    return cells


def _selected_and_judged(
    settings: CollapseSettings, found: CollapseOutcomes, task: str, start: Start, arms: list[str]
) -> list[Cell]:
    """Penalties first, then weight decay, whose strength they tell, then the verdicts."""
    cells = []
    for arm in arms:
        for weight in found.grid(arm):
            told = found.strength(task, arm, weight)
            if told is not None:
                cells += [
                    _cell("select", task, start, arm, weight, seed, told)
                    for seed in range(settings.selection_seeds)
                ]
    chosen = {arm: best for arm in arms if (best := found.weight(task, arm)) is not None}
    if not any(arm.startswith("C") for arm in chosen):
        return cells
    plain = Start(start.optimiser, start.rate, 1.0, 1.0, start.depth)
    for seed in range(FRESH, FRESH + settings.seeds):
        cells += [
            _cell("verdict", task, start, "A", 0.0, seed),
            _cell("verdict", task, plain, "O", 0.0, seed),
            _cell("verdict", task, start, "E.naive", 1.0, seed),
        ]
        cells += [
            _cell("verdict", task, start, arm, weight, seed, told)
            for arm, weight in chosen.items()
            if (told := found.strength(task, arm, weight)) is not None
        ]
    return cells


# ── one cell ──


def _task(settings: CollapseSettings, name: str, seed: int) -> Task:
    sizes = (settings.training, settings.validation, settings.test)
    if name == "recall":
        sizes = (2 * settings.training, *sizes[1:])
    sizes = sizes if name in MADE else settings.stored
    return make_task(
        name, sizes, seed, text=settings.text, data=settings.data, tokens=settings.tokens
    )


def _plan(settings: CollapseSettings, task: Task) -> Plan:
    epochs = settings.text_epochs if task.padding is not None else settings.epochs
    epochs = settings.recall_epochs if task.name == "recall" else epochs
    sizes = (settings.batch, settings.heads, settings.width, settings.every)
    return Plan(epochs, settings.epoch_steps, *sizes)


def _run(settings: CollapseSettings, cell: Cell, workspace: Workspace) -> Outcome:
    given: Mapping[str, Any] = cell.given
    arm, weight, seed = str(given["arm"]), float(given["strength"]), int(given["seed"])
    start = Start.of(given)
    task = _task(settings, str(given["task"]), seed)
    plan = _plan(settings, task)
    began = time.perf_counter()
    model = begin(task, start, plan, arm, weight, seed)
    course, notes = trained(
        model, task, start, plan, arm, weight, seed, workspace, f"{cell.name} {task.name}"
    )
    seconds = {"training": time.perf_counter() - began}
    values = course_values(course, level=_level(task))
    arrays: dict[str, Any] = dict(curves(course)) if given["kind"] != "select" else {}
    if given["kind"] == "verdict":
        values |= held_out_values(
            model, task, settings.noises, settings.radii, settings.attack_steps
        )
        drawn = pictures(model, task, arm, whole=seed == FRESH)
        values["head_cka"] = mean_off_diagonal(drawn["head_cka"])
        values["layer_cka"] = mean_off_diagonal(drawn["layer_cka"])
        arrays |= drawn
    seconds["measuring"] = time.perf_counter() - began - seconds["training"]
    where = {k: str(given[k]) for k in ("kind", "task", "arm", "seed")}
    return Outcome(readings(values, where), arrays, notes, seconds)


def _level(task: Task) -> float:
    """Half of the loss of a guess, log C / 2."""
    return math.log(task.classes) / 2


def _limits(settings: CollapseSettings) -> list[str]:
    said = [
        f"Left out: all cells of {name}. {reason[0].upper()}{reason[1:]}."
        for name in (*settings.tasks, *_confirming(settings))
        if (reason := missing_task(name, text=settings.text, data=settings.data)) is not None
    ]
    asked = _there(settings, (*settings.tasks, *_confirming(settings)))
    slow = {"recall": settings.recall_epochs, "sst2": settings.text_epochs}
    slow["own"] = settings.text_epochs
    epochs = max((slow.get(name, settings.epochs) for name in asked), default=settings.epochs)
    stored = [name for name in asked if name not in MADE or name == "digits"]
    if stored:
        said.append(
            f"The rows of {', '.join(stored)} are the same for every seed: p-values over seeds "
            "speak of initialisations and batches, not of other test rows."
        )
    return [
        *said,
        f"Models are small (width {settings.width}, {settings.heads} heads, "
        f"{' or '.join(map(str, settings.depths))} layers) and trained for at most "
        f"{epochs * settings.epoch_steps} steps without warm-up; the settings that fail are those "
        "of the search, not of practice.",
        "How many seconds a cell took stands in timings.csv.",
        "Weight decay matched to a penalty has a constant coefficient: its gradient has the mean "
        "norm of the penalty's along the selection runs with that penalty. Both choose their "
        "weights on the same grid, so that the best of both are compared, not equal pulls.",
    ]


STUDY = Study(
    name="collapse",
    title="Head collapse: reproduced, watched, treated, ablated",
    question=(
        "In which settings do attention heads become copies or does training stall, and does a "
        "penalty on their invariants do better than nothing and than weight decay matched to it?"
    ),
    settings=CollapseSettings,
    presets={
        "quick": {
            "seeds": 2,
            "search_seeds": 1,
            "selection_seeds": 1,
            "tasks": ("digits",),
            "confirm": (),
            "optimisers": ("adam-0.001",),
            "scales": (1.0, 0.003),
            "spreads": (1.0,),
            "depths": (2,),
            "penalties": ("coherence",),
            "weights": (0.1,),
            "shares": (0.5,),
            "width": 16,
            "batch": 16,
            "epochs": 5,
            "epoch_steps": 20,
            "training": 320,
            "validation": 64,
            "test": 128,
            "radii": (0.2,),
            "noises": (0.3,),
            "attack_steps": 2,
            "every": 20,
        },
        "full": {
            "tasks": ("copy", "digits", "sort", "recall"),
            "confirm": ("sst2", "fashion", "own"),
            "selection_seeds": 3,
            "seeds": 20,
            "weights": (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
            "shares": (0.125, 0.25, 0.375, 0.5, 0.75, 1.0),
            "heads": 4,
            "epochs": 40,
            "text_epochs": 40,
            "recall_epochs": 80,
        },
    },
    cells=_cells,
    run=_run,
    conclude=conclude,
    limits=_limits,
    follow=_follow,
)
