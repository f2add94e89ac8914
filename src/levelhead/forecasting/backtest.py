"""`levelhead.backtest`: how would this forecaster have done on the last rows of my table?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from levelhead.base.files import write_atomically
from levelhead.base.records import Figure, Reading, Run
from levelhead.forecasting.forecaster import SAMformer
from levelhead.forecasting.intervals import check_coverage
from levelhead.forecasting.judgement import pooled_rows
from levelhead.forecasting.rolling import Backtest
from levelhead.forecasting.undo import refuse_other_folder, undone_on_error

__all__ = ["BacktestRun", "backtest"]


@dataclass(frozen=True, eq=False)
class BacktestRun:
    """A `Backtest`, and the run folder it was written to (None if none was asked for)."""

    frame: pd.DataFrame
    metrics: pd.DataFrame
    by_step: pd.DataFrame
    notes: tuple[str, ...]
    run: Run | None


def backtest(
    table: Any,
    horizon: int,
    *,
    windows: int | None = None,
    step: int | None = None,
    test_rows: int | None = None,
    refit: bool | int = False,
    coverage: Sequence[float] | float = (0.8, 0.95),
    adaptive: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    show_progress: bool | None = None,
    **options: Any,
) -> BacktestRun:
    """Forecast the last rows of `table` window by window and judge the forecasts.

    Args:
        windows, step, test_rows, refit, adaptive: see `SAMformer.backtest`.
        out: folder for backtest.csv, metrics.csv and the figures; nothing is written without it.
        missing: filled before the table is cut: "interpolate" lets a gap that a cutoff falls into
            see its far end, "ffill" looks ahead nowhere; filled cells count as truths.
        resume: take an interrupted backtest in `out` up again, to the same numbers.
        options: of `SAMformer` (context, model, targets, missing, …).

    Returns:
        Frames in long form (`unique_id, ds, cutoff, y, model…`) and the findings in sentences.
    """
    estimator = SAMformer(horizon, random_state=seed, **options)
    run = None
    if out is not None:
        settings = {
            **{k: v for k, v in estimator.get_params(deep=False).items() if _is_plain(v)},
            "windows": windows,
            "step": step,
            "test_rows": test_rows,
            "refit_every": refit,
            "coverage": list(check_coverage(coverage)),
            "adaptive": adaptive,
        }
        refuse_other_folder(Path(out), "backtest.csv", "metrics.csv", resume=resume)
        name = Path(table).name if isinstance(table, str | Path) else "a table"
        run = Run.create(
            Path(out),
            title=f"Backtest of {name}: {horizon} steps",
            command="backtest",
            settings=settings,
            resume=resume,
        )
    with undone_on_error(run, "backtest.csv", "metrics.csv") as state_dir:
        found = estimator.backtest(
            table,
            windows=windows,
            step=step,
            test_rows=test_rows,
            refit=refit,
            coverage=coverage,
            adaptive=adaptive,
            state_dir=state_dir,
            resume=resume,
            show_progress=show_progress,
        )
        if run is not None:
            _write(run, found)
    return BacktestRun(found.frame, found.metrics, found.by_step, found.notes, run)


def _write(run: Run, found: Backtest) -> None:
    for name, frame in (("backtest.csv", found.frame), ("metrics.csv", found.metrics)):
        write_atomically(run.folder / name, frame.to_csv(index=False).encode())
    (run.folder / "readings-main.jsonl").unlink(missing_ok=True)  # of a run stopped at this point
    run.add_readings(
        Reading(
            measure,
            float(row[measure]),
            where={"model": str(row["model"]), "channel": str(row["channel"])},
            source="backtest",
        )
        for row in found.metrics.to_dict("records")
        for measure in found.metrics.columns[2:]
        if not np.isnan(row[measure])
    )
    pooled = pooled_rows(found.metrics)
    errors = ["mse_scaled", "mae_scaled", "mase"]
    arrays = {"errors": pooled[errors].to_numpy(dtype=np.float64)}
    channels = list(dict.fromkeys(found.by_step.channel))
    for level, part in found.by_step.groupby("level"):
        measured = part.coverage.to_numpy().reshape(len(channels), -1)
        nominal = np.full((1, measured.shape[1]), float(str(level)) / 100.0)
        arrays[f"coverage_{level:g}"] = np.concatenate([nominal, measured])
    steps = arrays[next(n for n in arrays if n.startswith("coverage"))].shape[1]
    arrays["steps"] = np.arange(1.0, steps + 1)
    run.add_arrays(arrays)
    figures = [
        Figure(
            "errors",
            "table",
            "Errors of the forecast and of what it stands beside",
            "Errors over all windows, channels and steps; the smallest per column is marked.",
            {"values": "errors"},
            axes={"best": "min"},
            labels={
                "rows": [str(m) for m in pooled.model],
                "columns": ["MSE (standardised)", "MAE (standardised)", "MASE"],
            },
        )
    ]
    for name in arrays:
        if name.startswith("coverage_"):
            level = name.removeprefix("coverage_")
            figures.append(
                Figure(
                    name,
                    "lines",
                    f"Coverage of the {level} % intervals",
                    f"Share of truths inside the interval, per channel and step; {level} % meant.",
                    {"x": "steps", "y": name},
                    axes={"x": "step", "y": "share covered"},
                    labels={"series": ["nominal", *channels]},
                )
            )
    run.add_figures(figures)
    run.add_notes([f"{note}." for note in found.notes])


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple)
