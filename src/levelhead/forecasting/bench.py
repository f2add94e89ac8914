"""The table of the literature: every model at every horizon on one file, under one protocol.

Protocol "ltsf" (Informer, Autoformer and everything after): rows in order, stamps ignored; the
first part trains, the second validates, the third tests; the scaler is fitted on the training rows;
errors are on standardised values; every test window counts, none is dropped. Nothing is refitted on
validation rows and test rows choose nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from levelhead.base.errors import InputError
from levelhead.base.numerics import threads
from levelhead.base.progress import progress
from levelhead.base.records import Figure, Reading, Run
from levelhead.data.tables import Table, read_table
from levelhead.data.windows import Scaler, WindowSource
from levelhead.forecasting.candidates import Candidate, forecasts
from levelhead.forecasting.fitting import MODELS, Plan, SeriesProblem, fit_models, select
from levelhead.forecasting.undo import refuse_other_folder
from levelhead.training.loop import TrainingSettings

__all__ = ["BENCH_MODELS", "PAPER", "BenchRow", "bench", "describe_split", "ltsf_split"]

BENCH_MODELS = (*MODELS, "auto")

PAPER = TrainingSettings(patience=10)
"""SAMformer's released protocol: Adam 1e-3, batch 32, cosine restarted every 5 epochs to 1e-6, at
most 300 epochs, ρ .7. Patience is two restarts: five epochs end inside the first one."""

_MONTH = 30 * 24
_SEEDED = ("samformer", "blend", "auto")
_AXES = ("model", "horizon")
_MEASURES = (
    ("mse", "standardised²"),
    ("mae", "standardised"),
    ("seconds", "s"),
    ("parameters", ""),
    ("windows", ""),
)


@dataclass(frozen=True)
class BenchRow:
    """One cell of the table; errors on standardised test windows, seconds of fit and forecast.

    `took` is the model that was used: what "auto" chose, or the model itself.
    """

    model: str
    horizon: int
    seed: int
    mse: float
    mae: float
    seconds: float
    parameters: int
    windows: int
    took: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row as plain data: the eight columns of the literature's table."""
        found = asdict(self)
        del found["took"]
        return found


def ltsf_split(name: str, rows: int) -> tuple[int, int, int]:
    """Training, validation and test rows of the literature for a file of this name.

    ETTh*: 12/4/4 months of 30 days of hours; ETTm*: the same in quarters; otherwise 70/10/20 %.

    >>> ltsf_split("ETTh1.csv", 17420), ltsf_split("weather.csv", 1000)
    ((8640, 2880, 2880), (700, 100, 200))
    """
    stem = Path(name).stem
    for prefix, per_month in (("ETTh", _MONTH), ("ETTm", 4 * _MONTH)):
        if stem.startswith(prefix) and rows >= 20 * per_month:
            return 12 * per_month, 4 * per_month, 4 * per_month
    train, test = int(rows * 0.7), int(rows * 0.2)
    return train, rows - train - test, test


def describe_split(split: tuple[int, int, int], rows: int) -> str:
    """One sentence that says which rows do what."""
    train, validation, test = split
    left = rows - sum(split)
    rest = f", {left} rows after them unused" if left else ""
    return f"{train} rows train, {validation} validate, {test} test{rest}"


def bench(
    table: Any,
    *,
    protocol: str = "ltsf",
    context: int = 512,
    split: tuple[int, int, int] | None = None,
    horizons: Sequence[int] = (96, 192, 336, 720),
    models: Sequence[str] = ("linear", "linear-revin", "samformer", "auto"),
    seeds: int = 1,
    training: TrainingSettings = PAPER,
    device: str = "cpu",
    num_threads: int | None = 1,
    out: str | Path | None = None,
    resume: bool = False,
    show_progress: bool | None = None,
) -> list[BenchRow]:
    """Errors of `models` at `horizons` on the test rows of `table`.

    Args:
        table: a path or anything `read_table` takes; stamps are ignored.
        split: rows that train, validate and test; by default the literature's for the file's name.
        models: of naive (the last value, since stamps are ignored), linear, linear-revin,
            samformer (Glorot start, the paper's protocol),
            blend and auto (started from the line; what the forecaster does).
        seeds: samformer, blend and auto run with seeds 0 .. seeds-1; closed forms once, as seed 0.
        out: a folder for settings and rows; nothing is written without it.
        resume: keep the rows that `out` holds and go on with the others.

    Raises:
        InputError: an unknown protocol or model, or rows too few for a horizon.
    """
    if protocol != "ltsf":
        raise InputError(f"protocol {protocol!r} is not known: use 'ltsf'")
    for model in models:
        if model not in BENCH_MODELS:
            raise InputError(f"unknown model {model!r}: choose from {', '.join(BENCH_MODELS)}")
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, {seeds} was given")
    data = table if isinstance(table, Table) else read_table(table, time="ignore", sentinels="keep")
    name = str(table) if isinstance(table, str | Path) else ""
    borders = ltsf_split(name, len(data.values)) if split is None else split
    _check_split(borders, len(data.values), context, horizons)
    settings = {
        "table": Path(name).name,
        "protocol": protocol,
        "context": context,
        "split": list(borders),
        "horizons": list(horizons),
        "models": list(models),
        "seeds": seeds,
        "training": asdict(training),
        "values_sha256": hashlib.sha256(data.values.tobytes()).hexdigest(),
    }
    run = None if out is None else _opened(Path(out), settings, resume)
    done = {} if run is None else {(r.model, r.horizon, r.seed): r for r in _stored_rows(run)}
    cells = [
        (horizon, model, seed)
        for horizon in horizons
        for model in models
        for seed in range(seeds if model in _SEEDED else 1)
    ]
    rows = []
    with threads(num_threads), progress("cells", len(cells), enabled=show_progress) as advance:
        for horizon, model, seed in cells:
            row = done.get((model, horizon, seed))
            if row is None:
                states = (
                    None if run is None else run.folder / "training" / f"{horizon}-{model}-{seed}"
                )
                cell = _Cell(data, borders, context, horizon, training, device, show_progress)
                row = cell.row(model, seed, states, resume)
                if run is not None:
                    run.add_readings(_readings(row))
            rows.append(row)
            advance(1, f"{model} {horizon}: {row.mse:.4f}")
    if run is not None:
        _draw(run, rows)
        shutil.rmtree(run.folder / "training", ignore_errors=True)
    return rows


def _opened(out: Path, settings: dict[str, Any], resume: bool) -> Run:
    refuse_other_folder(out, resume=resume, values_sha256=settings["values_sha256"])
    title = f"Bench of {settings['table']}"
    return Run.create(out, title=title, command="bench", settings=settings, resume=resume)


def _stored_rows(run: Run) -> list[BenchRow]:
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    took: dict[tuple[str, int, int], str] = {}
    for reading in run.readings():
        where = reading.where
        key = (str(where["model"]), int(where["horizon"]), int(where["seed"]))
        found.setdefault(key, {})[reading.name] = reading.value
        took[key] = str(where.get("took", ""))
    names = {name for name, _ in _MEASURES}
    return [
        BenchRow(
            *key,
            values["mse"],
            values["mae"],
            values["seconds"],
            int(values["parameters"]),
            int(values["windows"]),
            took[key],
        )
        for key, values in found.items()
        if names <= set(values)  # a row that was cut off while it was written is done again
    ]


def _draw(run: Run, rows: Sequence[BenchRow]) -> None:
    models, horizons = (list(dict.fromkeys(getattr(r, n) for r in rows)) for n in _AXES)
    figures = []
    for measure in ("mse", "mae"):
        table = np.full((len(models), len(horizons)), np.nan)
        for m, h in np.ndindex(table.shape):
            cell = [
                getattr(r, measure)
                for r in rows
                if r.model == models[m] and r.horizon == horizons[h]
            ]
            table[m, h] = float(np.mean(cell))
        run.add_arrays({measure: table})
        figures.append(
            Figure(
                measure,
                "table",
                f"Test {measure.upper()} by model and horizon",
                "On standardised values, every test window counted, mean over seeds; the smallest "
                "per horizon is marked.",
                {"values": measure},
                axes={"best": "min", "rows": "model", "columns": "horizon"},
                labels={"rows": models, "columns": [str(h) for h in horizons]},
            )
        )
    run.add_figures(figures)


@dataclass(frozen=True, eq=False)
class _Cell:
    """One horizon: the problem, and how to judge a model on its test windows."""

    data: Table
    borders: tuple[int, int, int]
    context: int
    horizon: int
    training: TrainingSettings
    device: str
    show_progress: bool | None

    def problem(self) -> SeriesProblem:
        train, validation, test = self.borders
        values = np.ascontiguousarray(self.data.values[: train + validation + test].T)
        series = Scaler.fit(values[:, :train]).apply(values)
        return SeriesProblem(
            series,
            self.context,
            self.horizon,
            (0, train),
            (train, train + validation),
            device=self.device,
        )

    def plan(self, model: str, seed: int) -> Plan:
        if model == "samformer":
            return Plan(
                (model,),
                1,
                self.training,
                "glorot",
                self.training.rho,
                {"revin_affine": True},
                seed,
                self.device,
            )
        models = MODELS if model == "auto" else (model,)
        return Plan(models, 1, default_training(seed), seed=seed, device=self.device)

    def row(self, model: str, seed: int, states: Path | None, resume: bool) -> BenchRow:
        began = time.perf_counter()
        problem, plan = self.problem(), self.plan(model, seed)
        fitted = fit_models(
            problem, plan, state_dir=states, resume=resume, show_progress=self.show_progress
        )
        chosen, _, _ = select(fitted, plan, problem.validation)
        first = sum(self.borders[:2])
        test = problem.windows((first, sum(self.borders)), reach_back=True)
        squared, absolute = test_errors(chosen, test)
        seconds = time.perf_counter() - began
        return BenchRow(
            model,
            self.horizon,
            seed,
            squared,
            absolute,
            seconds,
            chosen.parameters,
            len(test),
            chosen.name,
        )


def default_training(seed: int) -> TrainingSettings:
    """How the forecaster trains from the line: short, patient for one restart."""
    return TrainingSettings(epochs=50, patience=6, steps_per_epoch=256, seed=seed)


def test_errors(candidate: Candidate, windows: WindowSource) -> tuple[float, float]:
    """MSE and MAE over all windows, channels and steps, summed in float64."""
    squared = absolute = 0.0
    count = 0
    for made, truth in forecasts([candidate], windows):
        residual = (made[0] - truth).double()
        squared += float(residual.square().sum())
        absolute += float(residual.abs().sum())
        count += residual.numel()
    return squared / count, absolute / count


def _check_split(
    split: tuple[int, int, int], rows: int, context: int, horizons: Sequence[int]
) -> None:
    if len(split) != 3 or min(split) < 1 or sum(split) > rows:
        raise InputError(
            f"a split of three positive row counts that fit into {rows} rows is needed, "
            f"{','.join(map(str, split))} was given"
        )
    if not horizons:
        raise InputError("at least one horizon is needed, none was given")
    for name, steps in (("context", context), ("horizon", min(horizons))):
        if steps < 1:
            raise InputError(f"{name} must be a positive whole number of steps, {steps} was given")
    longest = max(horizons)
    if split[0] < context + longest or min(split[1:]) < longest:
        raise InputError(
            f"the split {','.join(map(str, split))} is too short for context {context} and horizon "
            f"{longest}: training rows must hold both, validation and test rows the horizon"
        )


def _readings(row: BenchRow) -> list[Reading]:
    where: dict[str, str | int] = {"model": row.model, "horizon": row.horizon, "seed": row.seed}
    where["took"] = row.took
    return [
        Reading(name, float(getattr(row, name)), unit, where, source="bench")
        for name, unit in _MEASURES
    ]
