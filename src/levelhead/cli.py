"""The command line: each command parses, calls the one function of its name, prints one result.

Results (a table, a path, JSON) go to stdout, everything else to stderr. Exit codes: 0 done · 1 a
check that was asked for failed · 2 bad input or environment · 3 nothing matched · 130 interrupted.
Heavy libraries are imported inside the commands, so that `levelhead --help` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from levelhead import __version__
from levelhead.base.console import (
    explained,
    names,
    shares,
    warnings_as_sentences,
    whole_numbers,
)
from levelhead.base.errors import InputError, LevelheadError
from levelhead.base.files import unused_folder
from levelhead.base.records import Run
from levelhead.cli_analysis import register
from levelhead.cli_shared import (
    DEBUG,
    AsJson,
    Debug,
    OutFolder,
    Progress,
    reported,
    say,
    show,
    tell,
)
from levelhead.cli_studies import register as register_studies
from levelhead.cli_watch import register as register_watch

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """Commands whose deliberate errors are one sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings_as_sentences(say):
                return super().invoke(ctx)
        except (LevelheadError, KeyboardInterrupt, OSError) as error:
            sentence, code = explained(error)
            if ctx.meta.get(DEBUG):
                traceback.print_exc()
            say(sentence)
            raise typer.Exit(code) from None


# ── options that several commands share ─────────────────────────────────────────────────────────

TablePath = Annotated[
    Path, typer.Argument(metavar="TABLE", help="CSV or Parquet file: wide, or unique_id, ds, y.")
]
Horizon = Annotated[int, typer.Option("--horizon", "-H", min=1, help="Steps to forecast.")]
Context = Annotated[str, typer.Option(help="Rows each forecast looks back on, or auto.")]
TimeColumn = Annotated[str | None, typer.Option(help="Name of the column of time stamps.")]
Targets = Annotated[str | None, typer.Option(help="Channels to forecast: a,b,c. All by default.")]
Channels = Annotated[str | None, typer.Option(help="Columns to use at all: a,b,c.")]
Freq = Annotated[str | None, typer.Option(help="Step of the rows: h, 15min, D, MS … or a number.")]
Missing = Annotated[
    Literal["error", "interpolate", "ffill"], typer.Option(help="What to do with missing values.")
]
Sentinels = Annotated[
    Literal["warn", "mask", "keep"],
    typer.Option(help="Codes such as -9999: warn, take as missing, or keep as numbers."),
]
Duplicates = Annotated[
    Literal["error", "first", "last", "mean"], typer.Option(help="What to do with repeated stamps.")
]
Layout = Annotated[Literal["auto", "wide", "long"], typer.Option(help="How the table is laid out.")]
Season = Annotated[int | None, typer.Option(min=1, help="Rows of a season. Default: by the step.")]
Coverage = Annotated[str, typer.Option(help="Coverages of the intervals, as shares.")]
Model = Annotated[str, typer.Option(help="auto, naive, linear, linear-revin, samformer or blend.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Adaptive = Annotated[bool, typer.Option("--adaptive", help="Intervals that follow drift.")]
Resume = Annotated[bool, typer.Option("--resume", help="Take up the run in --out.")]

app = typer.Typer(
    name="levelhead",
    cls=_Commands,
    help="Forecast with SAMformer, beside the straight line; look into attention weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="The usual benchmark sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"levelhead {__version__}")
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Debug = False,
) -> None:
    pass


# ── commands ────────────────────────────────────────────────────────────────────────────────────


@app.command()
def forecast(
    table: TablePath,
    horizon: Horizon,
    context: Context = "auto",
    time_column: TimeColumn = None,
    channels: Channels = None,
    targets: Targets = None,
    freq: Freq = None,
    missing: Missing = "error",
    sentinels: Sentinels = "warn",
    duplicates: Duplicates = "error",
    layout: Layout = "auto",
    season: Season = None,
    coverage: Coverage = "0.8,0.95",
    model: Model = "auto",
    seed: Seed = 0,
    refit: Annotated[bool, typer.Option(help="Fit once more on all rows in the end.")] = True,
    adaptive: Adaptive = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of forecast.csv, model and report. Default: TABLE-forecast."),
    ] = None,
    resume: Resume = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Forecast the next steps of every series in TABLE, with intervals and a report."""
    options = _table_options(
        time_column, channels, targets, freq, missing, sentinels, duplicates, layout
    )
    numbers = _model_options(context, season, coverage, model, seed)
    from levelhead.forecasting.commands import forecast as work

    run = work(
        table,
        horizon,
        **options,
        **numbers,
        refit=refit,
        adaptive=adaptive,
        out=_folder(out, f"{table.stem}-forecast", resume),
        resume=resume,
        show_progress=progress,
    )
    tell([*run.settings.get("seen", []), *run.notes()])
    typer.echo(reported(run))


@app.command()
def backtest(
    table: TablePath,
    horizon: Horizon,
    windows: Annotated[int | None, typer.Option(min=1, help="How many forecasts to try.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Rows between two of them.")] = None,
    test_rows: Annotated[int | None, typer.Option(min=1, help="Last rows to judge on.")] = None,
    refit: Annotated[bool, typer.Option(help="Fit anew before each forecast.")] = False,
    context: Context = "auto",
    time_column: TimeColumn = None,
    channels: Channels = None,
    targets: Targets = None,
    freq: Freq = None,
    missing: Missing = "error",
    sentinels: Sentinels = "warn",
    duplicates: Duplicates = "error",
    layout: Layout = "auto",
    season: Season = None,
    coverage: Coverage = "0.8,0.95",
    model: Model = "auto",
    seed: Seed = 0,
    adaptive: Adaptive = False,
    out: OutFolder = None,
    resume: Resume = False,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Forecast the last rows of TABLE from those before them, and say how well that went."""
    options = _table_options(
        time_column, channels, targets, freq, missing, sentinels, duplicates, layout
    )
    numbers = _model_options(context, season, coverage, model, seed)
    from levelhead.forecasting.backtest import backtest as work

    result = work(
        table,
        horizon,
        windows=windows,
        step=step,
        test_rows=test_rows,
        refit=refit,
        **options,
        **numbers,
        adaptive=adaptive,
        out=out,
        resume=_resumable(resume, out),
        show_progress=progress,
    )
    tell(result.notes)
    if out is not None and result.run is not None:
        tell([str(reported(result.run))])
    show(result.metrics.to_dict("records"), as_json)


@app.command()
def bench(
    table: TablePath,
    protocol: Annotated[str, typer.Option(help="ltsf, the protocol of the literature.")] = "ltsf",
    context: Annotated[int, typer.Option(min=1, help="Rows each forecast looks back on.")] = 512,
    split: Annotated[
        str | None, typer.Option(help="Rows to train, validate and test: 8640,2880,2880.")
    ] = None,
    horizons: Annotated[str, typer.Option(help="Steps to forecast.")] = "96,192,336,720",
    models: Annotated[str, typer.Option(help="Models.")] = "linear,linear-revin,samformer,auto",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds of what is trained.")] = 1,
    out: OutFolder = None,
    resume: Resume = False,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Make the table of the literature for one file: every model at every horizon."""
    parts = None if split is None else whole_numbers(split, "--split", "8640,2880,2880")
    if parts is not None and len(parts) != 3:
        raise InputError(
            f"--split {split} has {len(parts)} parts: give rows to train, validate, test"
        )
    steps = whole_numbers(horizons, "--horizons", "96,192,336,720")
    chosen = names(models, "--models", "linear,auto")
    from levelhead.data.tables import read_table
    from levelhead.forecasting.bench import bench as work
    from levelhead.forecasting.bench import describe_split, ltsf_split

    length = len(read_table(table, time="ignore", sentinels="keep"))
    used = ltsf_split(table.name, length) if parts is None else (parts[0], parts[1], parts[2])
    if sum(used) <= length:
        tell([f"Split: {describe_split(used, length)}."])
    rows = work(
        table,
        protocol=protocol,
        context=context,
        split=used,
        horizons=steps,
        models=chosen,
        seeds=seeds,
        out=out,
        resume=_resumable(resume, out),
        show_progress=progress,
    )
    if out is not None:
        tell([str(reported(Run.open(out)))])
    tell([f"auto took {r.took} at {r.horizon} (seed {r.seed})." for r in rows if r.model == "auto"])
    show([row.as_dict() for row in rows], as_json)


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: levelhead-demo.")
    ] = None,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Forecast the weather at three airports for a day, and say what was found."""
    from levelhead.forecasting.commands import demo as work

    run = work(_folder(out, "levelhead-demo", False), show_progress=progress)
    path = reported(run)
    tell([*run.settings.get("seen", []), *run.notes()])
    typer.echo(path)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[
        Path | None,
        typer.Option(help="File; *.md: Markdown and SVG. Default: report.html in RUN."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the report of a run: one HTML file that needs no network, or a Markdown page."""
    from levelhead.report.document import write_report
    from levelhead.report.markdown import write_markdown

    opened = Run.open(run)
    if opened.command == "watch":  # its Figures are of what was read by now, ended or not
        from levelhead.training.watch_figures import redraw

        redraw(opened)
    if out is not None and out.suffix.lower() == ".md":
        typer.echo(write_markdown(opened, out))
    else:
        typer.echo(write_report(opened, out))


@data_app.command("list")
def data_list(
    pattern: Annotated[str, typer.Argument(help="Names such as 'ETT*'; all by default.")] = "*",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the benchmark sets: size, licence and checksum."""
    from levelhead.data.datasets import catalogue

    found = [d for d in catalogue() if fnmatch(d.name.lower(), pattern.lower())]
    if as_json or not found:
        show([vars(dataset) for dataset in found], as_json)
        return
    rows = [
        {
            "name": dataset.name,
            "rows": dataset.rows,
            "channels": dataset.channels,
            "step": dataset.step,
            "MB": None if dataset.bytes is None else round(dataset.bytes / 1e6, 1),
            "licence": dataset.licence,
            "sha256": None if dataset.sha256 is None else f"{dataset.sha256[:16]}…",
        }
        for dataset in found
    ]
    show(rows, as_json)


@data_app.command("get")
def data_get(
    sets: Annotated[list[str], typer.Argument(metavar="NAME...", help="See: levelhead data list.")],
    cache: Annotated[Path | None, typer.Option(help="Folder. Default: the user's cache.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Where to get the files instead.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Checksum to expect of one set.")] = None,
    trust_on_first_use: Annotated[
        bool, typer.Option("--trust-on-first-use", help="Accept what has no known checksum.")
    ] = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Download benchmark sets, checked by their SHA-256, and print where they are."""
    if sha256 is not None and len(sets) > 1:
        raise InputError(f"--sha256 is for one set, {len(sets)} names were given: ask one by one")
    from levelhead.base.progress import progress as bar
    from levelhead.data.datasets import catalogue
    from levelhead.data.datasets import get as work

    megabytes = {d.name.lower(): (d.bytes or 0) // 1_000_000 for d in catalogue()}
    for name in sets:
        with bar(f"{name} (MB)", megabytes.get(name.lower(), 0), enabled=progress) as advance:
            path = work(
                name,
                cache=cache,
                base_url=base_url,
                sha256=sha256,
                trust_on_first_use=trust_on_first_use,
                progress=_by_difference(advance),
            )
        typer.echo(path)


register(app)
register_studies(app)
register_watch(app)


def main() -> None:
    """Run the command line; the entry point of the installed command `levelhead`."""
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")  # a terminal that cannot show every letter
    app()


# ── what is given, and what is printed ──────────────────────────────────────────────────────────


def _table_options(
    time_column: str | None,
    channels: str | None,
    targets: str | None,
    freq: str | None,
    missing: str,
    sentinels: str,
    duplicates: str,
    layout: str,
) -> dict[str, Any]:
    return {
        "time_column": time_column,
        "channels": None if channels is None else names(channels, "--channels", "HUFL,OT"),
        "targets": None if targets is None else names(targets, "--targets", "HUFL,OT"),
        "freq": int(freq) if freq is not None and freq.isdecimal() else freq,
        "missing": missing,
        "sentinels": sentinels,
        "duplicates": duplicates,
        "layout": layout,
    }


def _model_options(
    context: str, season: int | None, coverage: str, model: str, seed: int
) -> dict[str, Any]:
    if context != "auto" and not (context.isdecimal() and int(context)):
        raise InputError(f"--context {context} is no number of rows: give one like 512, or auto")
    return {
        "context": context if context == "auto" else int(context),
        "season": "auto" if season is None else season,
        "coverage": tuple(shares(coverage, "--coverage", "0.8,0.95")),
        "model": model,
        "seed": seed,
    }


def _by_difference(advance: Callable[[int], object]) -> Callable[[int, int | None], None]:
    """Turn a count of all bytes so far into steps of one megabyte."""
    shown = 0

    def note(done: int, total: int | None) -> None:
        nonlocal shown
        if (now := done // 1_000_000) > shown:
            advance(now - shown)
            shown = now

    return note


def _folder(given: Path | None, usual: str, resume: bool) -> Path:
    """Where a command writes: where it was told, else the first unused folder of the usual name."""
    _resumable(resume, given)
    return unused_folder(usual) if given is None else given


def _resumable(resume: bool, out: Path | None) -> bool:
    if resume and out is None:
        raise InputError("--resume needs --out: name the folder of the run to take up")
    return resume
