"""`forecasting`: SAM, σReparam and the straight line on real series.

Ilbert et al. (2024), section 4: SAMformer beside the same transformer without SAM, with frozen,
identical or temporal attention, with σReparam, and started from the line; and the straight line
solved in closed form, beside which all of them stand. The released code's de-normalisation slip is
an arm of its own, with SAM and without, to see what it does to the gain ascribed to SAM.

Protocol "ltsf": see `forecasting.bench`. Training is the paper's (`bench.PAPER`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator

from levelhead.forecasting.bench import PAPER
from levelhead.studies.forecasting_conclusions import conclude
from levelhead.studies.forecasting_data import MADE, SETS, paper_rate, posed, require
from levelhead.studies.forecasting_models import ARMS
from levelhead.studies.forecasting_training import Task, fitted
from levelhead.studies.study import Cell, Given, Outcome, Study, StudySettings, Workspace

__all__ = ["STUDY", "ForecastingSettings"]

HEADLINE = ("line", "line-revin", "transformer", "samformer")
"""Arms that run at every horizon; the others at `other_horizons`."""


class ForecastingSettings(StudySettings):
    """Settings of the forecasting study; the defaults are the paper's.

    Attributes:
        data: folder with the csv files; "" is the cache that `levelhead data get` fills.
        sets: of the catalogue of data sets, or "made".
        brief: sets that run with one seed at the first horizon only, without temporal attention.
        horizons, arms: the grid. The lines and the transformer with and without SAM run at every
            horizon.
        other_horizons: of the other arms but "temporal", which runs at `temporal_horizons` with
            `temporal_seeds` seeds, for it costs twenty times the others.
        costly_epochs: at most so many for temporal attention and for brief sets.
        context, width, init: of the networks; `init` as in `SAMformerNet`.
        epochs, patience, batch, rho: of training.
        rate: factor on Adam's rate, which is the released script's for each set.
        rhos: further radii for SAMformer, at the first horizon with one seed; none for brief sets.
        curvature_every: epochs between measurements of λ_max; curvature_windows, map_windows: on
            how many training windows, and on how many validation windows attention is looked at.
        draws: of the bootstrap.
    """

    data: str = ""
    sets: tuple[str, ...] = ("ETTh1", "exchange_rate", "weather")
    brief: tuple[str, ...] = ("weather",)
    horizons: tuple[int, ...] = (96, 192, 336, 720)
    other_horizons: tuple[int, ...] = (96, 192, 336, 720)
    temporal_horizons: tuple[int, ...] = (96,)
    temporal_seeds: int = Field(default=1, ge=1)
    costly_epochs: int = Field(default=20, ge=1)
    arms: tuple[str, ...] = tuple(ARMS)
    context: int = Field(default=512, ge=2)
    width: int = Field(default=16, ge=1)
    init: Literal["glorot", "keras"] = "glorot"
    epochs: int = Field(default=PAPER.epochs, ge=1)
    patience: int = Field(default=int(PAPER.patience), ge=0)
    batch: int = Field(default=PAPER.batch_size, ge=1)
    rho: float = Field(default=PAPER.rho, ge=0)
    rate: float = Field(default=1.0, gt=0)
    rhos: tuple[float, ...] = (0.05, 0.2, 0.4, 1.0)
    curvature_every: int = Field(default=5, ge=1)
    curvature_windows: int = Field(default=256, ge=2)
    map_windows: int = Field(default=64, ge=2)
    draws: int = Field(default=10_000, ge=100)

    @field_validator("horizons", "other_horizons", "temporal_horizons")
    @classmethod
    def _steps(cls, horizons: tuple[int, ...]) -> tuple[int, ...]:
        if any(horizon < 1 for horizon in horizons):
            raise ValueError("a horizon is a number of steps, 1 or more")
        return horizons

    @field_validator("rhos")
    @classmethod
    def _radii(cls, rhos: tuple[float, ...]) -> tuple[float, ...]:
        if not all(rho > 0 for rho in rhos):
            raise ValueError("a radius is a number above 0")
        return rhos

    @field_validator("sets", "arms", "horizons")
    @classmethod
    def _some(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise ValueError("at least one is needed")
        return values

    @field_validator("sets", "arms", "horizons", "other_horizons", "temporal_horizons", "rhos")
    @classmethod
    def _different(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(values)) < len(values):
            raise ValueError("one of them is there twice")
        return values

    @field_validator("sets", "brief")
    @classmethod
    def _known_sets(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _known(names, SETS)

    @field_validator("arms")
    @classmethod
    def _known_arms(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _known(names, tuple(ARMS))


def _known(names: tuple[str, ...], allowed: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{name!r} is not one of {', '.join(allowed)}")
    return names


def _cells(settings: ForecastingSettings) -> list[Cell]:
    require(settings.sets, settings.data)
    cells = [cell for name in settings.sets for cell in _cells_of(settings, name)]
    # What takes longest begins first, so that no worker is left with it at the end.
    return sorted(cells, key=lambda c: (c.given["arm"] != "temporal", c.given["set"] != "weather"))


def _cells_of(settings: ForecastingSettings, name: str) -> Iterator[Cell]:
    brief = name in settings.brief
    for horizon in settings.horizons[:1] if brief else settings.horizons:
        for arm in settings.arms:
            for seed in range(_seeds(settings, arm, horizon, brief=brief)):
                yield _cell(f"{arm}-{seed}", name, horizon, arm, settings.rho, seed)
    if "samformer" in settings.arms and not brief:
        first = settings.horizons[0]
        for rho in settings.rhos:
            yield _cell(f"rho{rho:g}-0", name, first, "samformer", rho, 0)


def _seeds(settings: ForecastingSettings, arm: str, horizon: int, *, brief: bool) -> int:
    """With how many seeds an arm runs at a horizon."""
    if arm == "temporal":
        wanted = settings.temporal_seeds if horizon in settings.temporal_horizons else 0
        return 0 if brief else min(wanted, settings.seeds)
    if arm not in HEADLINE and horizon not in settings.other_horizons and not brief:
        return 0
    return 1 if brief or ARMS[arm].line is not None else settings.seeds


def _cell(ending: str, name: str, horizon: int, arm: str, rho: float, seed: int) -> Cell:
    given: dict[str, Given] = {"set": name, "horizon": horizon, "arm": arm}
    return Cell(f"{name}-{horizon}-{ending}", {**given, "rho": rho, "seed": seed})


def _run(settings: ForecastingSettings, cell: Cell, workspace: Workspace) -> Outcome:
    given = cell.given
    name, arm, seed = str(given["set"]), str(given["arm"]), int(given["seed"])
    problem, test = posed(name, settings.data, settings.context, int(given["horizon"]))
    costly = arm == "temporal" or name in settings.brief
    training = replace(
        PAPER,
        epochs=min(settings.epochs, settings.costly_epochs) if costly else settings.epochs,
        patience=settings.patience,
        batch_size=settings.batch,
        learning_rate=settings.rate * paper_rate(name),
        rho=float(given["rho"]) * ARMS[arm].rho,
        seed=seed,
    )
    where = {key: str(value) for key, value in given.items()}
    return fitted(Task(arm, problem, test, training, where), settings, workspace)


def _limits(settings: ForecastingSettings) -> list[str]:
    brief = [name for name in settings.sets if name in settings.brief]
    seeds = settings.seeds
    said = [
        "The made series is synthetic, a leader and followers that repeat it 12 steps later: what "
        "holds on it says nothing of real series."
        if MADE in settings.sets
        else "",
        f"One seed, the first horizon and no temporal attention for {', '.join(brief)}."
        if brief
        else "",
        *_fewer(settings),
        _epochs(settings, brief),
        "One seed says nothing about the spread over initialisations, and nothing is judged by it."
        if seeds == 1
        else f"{seeds} seeds say little about the spread over initialisations.",
        "Windows of one series are one realisation: an interval over windows says nothing of other "
        "series.",
        "Windows overlap. Where nothing is there and errors are white, the test over blocks of 2H "
        "windows rejects 6 to 7 % instead of 5, Diebold and Mariano's about 6 %, and the block "
        "bootstrap, which is only described, 16 % and more (simulated, 10 to 28 times H windows). "
        "Errors that depend on one another for longer than the horizon are rejected more often.",
        "Arms with the slip are judged by another loss and stand in no ranking.",
        "Radii other than the paper's, and the curves, are shown at the first horizon only.",
        "λ_max is of the trained loss on a sample of training windows.",
        "What a cell costs is measured: its seconds are in timings.csv.",
    ]
    return [sentence for sentence in said if sentence]


def _fewer(settings: ForecastingSettings) -> list[str]:
    """Arms that run at fewer horizons, or with fewer seeds, than the others."""
    said = []
    others = [arm for arm in settings.arms if arm not in (*HEADLINE, "temporal")]
    left = [h for h in settings.horizons if h not in settings.other_horizons]
    if others and left:
        said.append(f"Left out at {_at(left)}: {', '.join(others)}.")
    if "temporal" in settings.arms:
        left = [h for h in settings.horizons if h not in settings.temporal_horizons]
        few = settings.temporal_seeds < settings.seeds
        limits = [f"is left out at {_at(left)}"] * bool(left)
        limits += [f"has {settings.temporal_seeds} of {settings.seeds} seeds"] * few
        if limits:
            said.append(f"Temporal attention {' and '.join(limits)}.")
    return said


def _at(horizons: Sequence[int]) -> str:
    return f"horizon{'s' * (len(horizons) > 1)} {', '.join(map(str, horizons))}"


def _epochs(settings: ForecastingSettings, brief: Sequence[str]) -> str:
    """Which trainings have fewer epochs than the others."""
    fewer = [*["temporal attention"] * ("temporal" in settings.arms), *brief]
    if not fewer or settings.costly_epochs >= settings.epochs:
        return f"All trainings have at most {settings.epochs} epochs."
    named = " and ".join([", ".join(fewer[:-1]), fewer[-1]] if len(fewer) > 1 else fewer)
    return (
        f"At most {settings.costly_epochs} epochs for {named}, at most {settings.epochs} for all "
        "else; nothing is judged by a training that the lower limit stopped. The table of measures "
        "has the epochs of each."
    )


STUDY = Study(
    name="forecasting",
    title="SAM, σReparam and the straight line on real series",
    question=(
        "On real series, does sharpness-aware minimisation make a transformer better than itself, "
        "than σReparam and than a straight line, and is channel attention what does it?"
    ),
    settings=ForecastingSettings,
    presets={
        "quick": {
            "seeds": 2,
            "sets": (MADE,),
            "brief": (),
            "horizons": (6, 12),
            "other_horizons": (6,),
            "temporal_horizons": (6,),
            "context": 24,
            "width": 4,
            "epochs": 4,
            "rate": 5.0,
            "batch": 64,
            "rho": 0.1,
            "rhos": (0.3,),
            "curvature_every": 4,
            "curvature_windows": 32,
            "map_windows": 16,
            "draws": 500,
        },
        "full": {
            "seeds": 5,
            "brief": (),
            "temporal_horizons": (96, 192, 336, 720),
            "temporal_seeds": 3,
            "costly_epochs": PAPER.epochs,
        },
    },
    cells=_cells,
    run=_run,
    conclude=conclude,
    limits=_limits,
)
