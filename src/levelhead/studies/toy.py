"""`toy`: why a transformer fails on a linear problem, and which quantity tells the arms apart.

Ilbert et al. (2024), section 2: eq. 2's data, Figures 2, 3 and 15, Propositions 2.1 and 2.2; Zhai
et al. (2023), Theorem 3.1. The published account, that entropy collapse explains the failure, is
tested: entropy, sharpness and rank are changed one at a time (arms of the second half of
`toy_model.ARMS`), and after training A(X) is replaced without touching any weight.
"""

from __future__ import annotations

import copy
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from safetensors import safe_open
from torch import Tensor

from levelhead.base.errors import DivergenceError, LevelheadError
from levelhead.base.files import append_lines
from levelhead.base.records import Reading
from levelhead.diagnostics.sharpness import canonical_sharpness, leading_eigenpairs
from levelhead.nn.sigma_reparam import remove
from levelhead.studies.study import Cell, Outcome, Study, StudySettings, Workspace, grid
from levelhead.studies.toy_conclusions import conclude
from levelhead.studies.toy_model import (
    ARMS,
    Arm,
    Joined,
    Toy,
    ToyNet,
    built,
    graded_loss,
    learner,
    measured,
    toy_data,
)
from levelhead.studies.toy_propositions import propositions
from levelhead.training.loop import TrainingSettings, train

__all__ = ["STUDY", "ToySettings"]

OPTIMISERS = ("adam", "adamw-0.01", "adamw-0.1", "sgd")


class ToySettings(StudySettings):
    """Settings of the toy study; the defaults are the paper's sizes.

    Attributes:
        context, horizon, channels, training, validation: sizes of the data.
        width: m, the inner dimension of attention.
        epochs, batch, rate, rho: of the headline arms; Adam at a constant rate.
        inits, arms: the grid. The headline arms run with the first initialisation and all seeds;
            four of them also with the others.
        other_seeds: of interventions. side_seeds: of the remaining arms, and of those with other
            initialisations.
        curvature_every, curvature_windows: when and on how many windows λ_max is measured.
        optimisers, rates, optimiser_epochs, optimiser_arms: the grid of Figure 15 (one seed).
        floor: entropy in nat that "entropy-floor" keeps.
    """

    seeds: int = Field(default=5, ge=1)
    context: int = Field(default=512, ge=8)
    horizon: int = Field(default=96, ge=1)
    channels: int = Field(default=7, ge=2)
    training: int = Field(default=10_000, ge=32)
    validation: int = Field(default=5_000, ge=32)
    width: int = Field(default=16, ge=1)
    epochs: int = Field(default=100, ge=2)
    batch: int = Field(default=32, ge=1)
    rate: float = Field(default=1e-3, gt=0)
    rho: float = Field(default=0.7, ge=0)
    inits: tuple[Literal["keras", "glorot"], ...] = Field(default=("keras", "glorot"), min_length=1)
    arms: tuple[str, ...] = Field(default=tuple(ARMS), min_length=1)
    other_seeds: int = Field(default=3, ge=1)
    side_seeds: int = Field(default=1, ge=1)
    curvature_every: int = Field(default=10, ge=1)
    curvature_windows: int = Field(default=256, ge=8)
    optimisers: tuple[str, ...] = OPTIMISERS
    rates: tuple[Annotated[float, Field(gt=0)], ...] = (1e-4, 1e-3, 1e-2)
    optimiser_epochs: int = Field(default=40, ge=1)
    optimiser_arms: tuple[str, ...] = ("transformer",)
    floor: float = Field(default=1.0, ge=0)

    @field_validator("arms", "optimiser_arms")
    @classmethod
    def _known_arms(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in ARMS:
                raise ValueError(f"{name!r} is not one of {', '.join(ARMS)}")
        return names

    @field_validator("optimisers")
    @classmethod
    def _known_optimisers(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"adam|sgd|adamw-\d+(\.\d+)?", name):
                raise ValueError(f"{name!r} is not adam, sgd, or adamw with its decay: adamw-0.1")
        return names


SLICED = ("transformer", "random", "sam")
HEADLINE = ("transformer", "random", "sam", "sigma", "sigma-fast", "sam-sigma", "linear")
# Arms that are also trained from other initialisations.
OTHERWISE = ("transformer", "random", "sam", "sigma")


def _cells(settings: ToySettings) -> list[Cell]:
    cells = [
        cell
        for cell in grid(
            kind=["train"], init=settings.inits, arm=settings.arms, seed=range(settings.seeds)
        )
        if int(cell.given["seed"]) < _seeds(settings, cell)
    ]
    if settings.optimisers:
        cells += grid(
            kind=["optimiser"],
            arm=settings.optimiser_arms,
            optimiser=settings.optimisers,
            rate=settings.rates,
        )
    return cells + grid(kind=["propositions"], seed=range(settings.seeds))


def _seeds(settings: ToySettings, cell: Cell) -> int:
    """With how many seeds the arm of a cell is trained from its initialisation."""
    arm, init = str(cell.given["arm"]), cell.given["init"]
    if init != settings.inits[0]:
        return min(settings.seeds, settings.side_seeds) if arm in OTHERWISE else 0
    if arm in HEADLINE:
        return settings.seeds
    few = settings.other_seeds if ARMS[arm].intervention else settings.side_seeds
    return min(settings.seeds, few)


def _run(settings: ToySettings, cell: Cell, workspace: Workspace) -> Outcome:
    given = cell.given
    if given["kind"] == "propositions":
        return Outcome(
            propositions(_data(settings, int(given["seed"])), settings.width, int(given["seed"]))
        )
    if given["kind"] == "optimiser":
        return _optimised(settings, cell, workspace)
    return _trained(settings, cell, workspace)


def _data(settings: ToySettings, seed: int) -> Toy:
    return toy_data(
        settings.context,
        settings.horizon,
        settings.channels,
        settings.training,
        settings.validation,
        seed,
    )


# ── one training ──


class _Curves:
    """What is read off a model before the first epoch and after each; kept beside the state.

    A resumed training repeats the epoch it was stopped in to the same numbers, so that of two
    lines for one epoch the later one counts.
    """

    def __init__(
        self, settings: ToySettings, arm: Arm, model: ToyNet, toy: Toy, path: Path
    ) -> None:
        self.settings, self.arm, self.model, self.toy, self.path = settings, arm, model, toy, path
        self.lines: dict[int, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                found = json.loads(line)
                self.lines[found["epoch"]] = found

    def restart(self, epochs_done: int) -> None:
        """Forget what lies beyond the state that training goes on from."""
        self.lines = {e: line for e, line in self.lines.items() if e <= epochs_done}

    def __call__(self) -> float:
        toy = self.toy
        epoch = len(self.lines)
        found: dict[str, Any] = {"epoch": epoch, **measured(self.model, toy.x_val, toy.y_val)}
        looked = epoch % self.settings.curvature_every == 0 or epoch in (1, self.settings.epochs)
        if looked and np.isfinite(found["loss"]):
            found |= _curvature(self.settings, self.arm, self.model, toy)
            found["map"] = self.model.maps(toy.x_val[:1])[0].detach().double().tolist()
        self.lines[epoch] = found
        append_lines(self.path, json.dumps(found).encode() + b"\n")
        return float(found["loss"])


def _curvature(settings: ToySettings, arm: Arm, model: ToyNet, toy: Toy) -> dict[str, float]:
    """λ_max of the training loss on the first windows, in all weights, at the balanced gauge.

    Arms are measured alike: σReparam is folded into plain weights, and frozen weights count.
    lambda_max_trained leaves out the weights that the arm does not train, as the paper does.
    """
    count = settings.curvature_windows
    x, y = toy.x[:count], toy.y[:count]
    plain = _plain(arm, model)
    trained = [p for n, p in plain.named_parameters() if n in arm.trained]

    def loss() -> Tensor:
        return (plain.core(x) - y).square().mean()

    with torch.enable_grad():
        found = canonical_sharpness(plain, loss, rho=settings.rho, max_steps=300)
        top = found.largest_eigenvalue.value
        if found.left:
            raise LevelheadError(f"attention is not at the balanced gauge: {dict(found.left)}")
        if len(trained) < len(list(plain.parameters())):
            some = canonical_sharpness(plain, loss, rho=settings.rho, params=trained, max_steps=300)
            trained_top = some.largest_eigenvalue.value
        else:
            trained_top = top
    return {"lambda_max": top, "lambda_max_trained": trained_top, "sam_sharpness": found.sam}


def _plain(arm: Arm, model: ToyNet) -> ToyNet:
    """A copy of plain weights that all want a gradient, with the same function."""
    plain = copy.deepcopy(model)
    if arm.gamma is not None:
        remove(plain)
    for weight in plain.parameters():
        weight.requires_grad_(True)
    return plain


def _slices(settings: ToySettings, arm: Arm, model: ToyNet, toy: Toy) -> dict[str, Any]:
    """The training loss along the two leading eigenvectors of its Hessian in all weights, at last.

    slice_at [41] distances in units of the weights, slice_loss [2, 41], slice_eigenvalues [2].
    """
    count = settings.curvature_windows
    x, y = toy.x[:count], toy.y[:count]

    plain = _plain(arm, model)

    def loss() -> Tensor:
        return (plain.core(x) - y).square().mean()

    weights = list(plain.parameters())
    found = leading_eigenpairs(loss, weights, 2)
    before = [p.detach().clone() for p in weights]
    at = torch.linspace(-2 * settings.rho, 2 * settings.rho, 41, dtype=torch.float64)
    rows = []
    with torch.no_grad():
        for vector in found.vectors:
            row = []
            for distance in at.tolist():
                for weight, start, direction in zip(weights, before, vector, strict=True):
                    weight.copy_(start + distance * direction)
                row.append(float(loss()))
            rows.append(row)
    return {
        "slice_at": at.numpy(),
        "slice_loss": np.array(rows),
        "slice_eigenvalues": np.array(found.values),
    }


def _trained(settings: ToySettings, cell: Cell, workspace: Workspace) -> Outcome:
    arm, seed = ARMS[str(cell.given["arm"])], int(cell.given["seed"])
    toy = _data(settings, seed)
    init = str(cell.given["init"])
    model = built(
        arm, settings.context, settings.horizon, init=init, width=settings.width, seed=seed
    )
    counts = _parameter_counts(model)
    training = TrainingSettings(
        epochs=settings.epochs,
        patience=0,
        batch_size=settings.batch,
        learning_rate=settings.rate * arm.rate,
        restart_every=0,
        rho=settings.rho * arm.rho,
        seed=seed,
    )
    outcome = _fit(settings, cell, arm, model, toy, training, workspace, counts)
    if seed == 0 and cell.given["arm"] in SLICED and init == settings.inits[0]:
        slices = _slices(settings, arm, model, toy)
        outcome = replace(outcome, arrays={**outcome.arrays, **slices})
    return outcome


def _fit(
    settings: ToySettings,
    cell: Cell,
    arm: Arm,
    model: ToyNet,
    toy: Toy,
    training: TrainingSettings,
    workspace: Workspace,
    counts: Mapping[str, int],
) -> Outcome:
    """Train, and gather curves, counts and what the last weights are like."""
    curves = _Curves(settings, arm, model, toy, workspace.state("curves", "jsonl"))
    state = workspace.state()
    notes: list[str] = []
    began = time.perf_counter()
    if state.exists():
        curves.restart(_epochs_in(state))
    else:
        curves.lines.clear()
    last = _LastWeights(model, curves)
    learns = learner(model, arm)
    try:
        history = train(
            learns,
            lambda index: _closure(learns, arm, toy, index, settings.floor),
            len(toy.x),
            last,
            training,
            state_path=state,
            resume=True,
            data=cell.name,
            show_progress=False,
        )
    except DivergenceError as error:
        notes.append(f"training diverged ({error})")
        losses = {}
        epochs_seconds: list[float] = []
    else:
        losses = {e.epoch: e.training_loss for e in history.epochs}
        epochs_seconds = [e.seconds for e in history.epochs[1:]]
    return _outcome(
        cell, curves, losses, counts, notes, epochs_seconds, time.perf_counter() - began
    )


class _LastWeights:
    """The judge of `train`: writes the curves, and tells it that each epoch is the best so far.

    The paper looks at the weights as they are after each epoch, not at the best ones; a judge that
    falls makes the loop keep the last.
    """

    def __init__(self, model: ToyNet, curves: _Curves) -> None:
        self.model, self.curves = model, curves

    def __call__(self) -> float:
        loss = self.curves()
        return -float(len(self.curves.lines)) if np.isfinite(loss) else float("nan")


def _closure(model: ToyNet | Joined, arm: Arm, toy: Toy, index: Tensor, floor: float) -> Any:
    x, y = toy.batch(index)
    return lambda: graded_loss(model, arm, x, y, floor)


def _epochs_in(state: Path) -> int:
    """Epochs that a state of `train` holds."""
    with safe_open(state, framework="pt") as file:
        record = json.loads((file.metadata() or {})["levelhead"])
    return len(record["history"]["epochs"]) - 1


def _outcome(
    cell: Cell,
    curves: _Curves,
    losses: Mapping[int, float],
    counts: Mapping[str, int],
    notes: Sequence[str],
    epoch_seconds: Sequence[float],
    whole: float,
) -> Outcome:
    lines = [curves.lines[e] for e in sorted(curves.lines)]
    for line in lines:
        line["training_loss"] = losses.get(line["epoch"], float("nan"))
    names = sorted({n for line in lines for n in line} - {"epoch", "map"})
    where = {k: str(v) for k, v in cell.given.items()}
    arrays: dict[str, Any] = {"epoch": np.array([line["epoch"] for line in lines])}
    for name in names:
        arrays[name] = np.array([line.get(name, float("nan")) for line in lines])
    drawn = [line for line in lines if "map" in line]
    arrays["maps"] = np.array([line["map"] for line in drawn])
    arrays["maps_epoch"] = np.array([line["epoch"] for line in drawn])
    # What a training that diverged was like before is none of its results.
    ends = {name: math.nan if notes else float(arrays[name][-1]) for name in names}
    readings = [
        Reading(name, value, where=where, step=int(lines[-1]["epoch"]), source="toy")
        for name, value in ends.items()
    ]
    readings.append(Reading("diverged", float(bool(notes)), where=where, source="toy"))
    readings += [
        Reading(f"parameters_{n}", float(v), where=where, source="toy") for n, v in counts.items()
    ]
    timing = {"training": whole}
    if epoch_seconds:
        timing["epoch"] = float(np.median(epoch_seconds))
    return Outcome(readings, arrays, list(notes), timing)


def _parameter_counts(model: ToyNet) -> dict[str, int]:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attention = sum(
        t.numel()
        for n in ("query", "key", "value", "output")
        if (t := getattr(model, n)) is not None
    )
    return {"trained": trained, "attention": attention, "head": model.head.numel()}


def _optimised(settings: ToySettings, cell: Cell, workspace: Workspace) -> Outcome:
    """One cell of Figure 15: an optimiser and a rate."""
    arm = ARMS[str(cell.given["arm"])]
    name = str(cell.given["optimiser"])
    kind, _, decay = name.partition("-")
    toy = _data(settings, 0)
    model = built(
        arm,
        settings.context,
        settings.horizon,
        init=settings.inits[0],
        width=settings.width,
        seed=0,
    )
    training = TrainingSettings(
        epochs=settings.optimiser_epochs,
        patience=0,
        batch_size=settings.batch,
        learning_rate=float(cell.given["rate"]),
        restart_every=0,
        rho=0.0,
        weight_decay=float(decay) if decay else 0.0,
        optimizer="sgd" if kind == "sgd" else "adam",
        seed=0,
    )
    short = settings.model_copy(
        update={"curvature_every": 10**9, "epochs": settings.optimiser_epochs}
    )
    return _fit(short, cell, arm, model, toy, training, workspace, _parameter_counts(model))


STUDY = Study(
    name="toy",
    title="Why transformers fail on a linear problem",
    question=(
        "Does entropy collapse explain why a transformer generalises worse than a straight line "
        "on a linear problem, and what do sharpness-aware minimisation and σReparam change?"
    ),
    settings=ToySettings,
    presets={
        "quick": {
            "seeds": 1,
            "context": 32,
            "horizon": 8,
            "channels": 4,
            "training": 512,
            "validation": 256,
            "width": 4,
            "epochs": 6,
            "rate": 1e-2,
            "arms": ("transformer", "random", "sam", "sigma", "linear", "entropy-none"),
            "inits": ("keras",),
            "curvature_every": 3,
            "curvature_windows": 64,
            "optimisers": ("adam", "sgd"),
            "rates": (1e-3, 1e-2),
            "optimiser_epochs": 2,
        },
        "full": {
            "epochs": 300,
            "seeds": 10,
            "other_seeds": 10,
            "side_seeds": 10,
            "optimiser_arms": ("transformer", "random"),
        },
    },
    cells=_cells,
    run=_run,
    conclude=conclude,
)
