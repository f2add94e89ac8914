"""The command that runs studies.

As in `cli`: results go to stdout, everything else to stderr, heavy libraries are imported inside
the command.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from levelhead.base.errors import InputError
from levelhead.base.files import unused_folder
from levelhead.cli_shared import AsJson, Debug, Progress, reported, say, show, tell

__all__ = ["register", "study"]

FAILED = 1


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(study)


def study(
    name: Annotated[str, typer.Argument(help="Which study; none is a list of them.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, seconds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything, hours.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A settings.toml, such as a study leaves behind.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: the cores.")
    ] = None,
    engine: Annotated[
        Literal["loky", "dask", "ray"], typer.Option(help="What runs them (extras dask, ray).")
    ] = "loky",
    address: Annotated[
        str | None, typer.Option(help="Of a running Dask or Ray cluster; none: a local one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder. Default: study-NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --out.")] = False,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Run an experiment again: its tables, its figures, and what it was to show, checked."""
    if quick and full:
        raise InputError("--quick and --full were both given: choose one")
    if resume and out is None:
        raise InputError("--resume needs --out: name the folder of the study to take up")
    changes = dict(_pair(text) for text in set_ or [])
    from levelhead.studies.catalogue import STUDIES, find_study
    from levelhead.studies.running import run_study, settings_from_toml

    if not name:
        if quick or full or set_ or settings or seeds or out:
            raise InputError(f"which study? Name one of {', '.join(STUDIES)}")
        show([{"study": s.name, "question": s.question} for s in STUDIES.values()], as_json)
        return
    chosen = find_study(name)
    if engine != "loky" and jobs == 1:
        raise InputError("--jobs 1 runs everything here: leave it away, or give --engine loky")
    stored = {} if settings is None else settings_from_toml(settings)
    result = run_study(
        chosen,
        unused_folder(f"study-{name}") if out is None else out,
        preset="quick" if quick else "full" if full else "standard",
        overrides={**stored, **changes},
        seeds=seeds,
        jobs=_cores() if jobs is None else jobs,
        pool=_pool(engine, address),
        resume=resume,
        show_progress=progress,
    )
    tell([f"Left out: {failure}." for failure in result.left_out])
    tell(list(result.conclusion))
    say(str(reported(result.run)))
    rows = result.rows()
    short = [
        {"verdict": _verdict(r), "statement": r["claim"], "evidence": r["evidence"]} for r in rows
    ]
    show(rows if as_json else short, as_json)
    if any(not row["expected"] for row in rows) and not as_json:
        say("holds, FAILS: what was expected; yes, no: a question, answered either way.")
    if result.failed:
        failed = [s.name for s in result.statements if s.failed]
        say(f"{len(failed)} of {len(rows)} statements fail: {', '.join(failed)}.")
        raise typer.Exit(FAILED)


def _verdict(row: dict[str, Any]) -> str:
    if row["holds"] is None:
        return "not judged"
    if row["expected"]:
        return "holds" if row["holds"] else "FAILS"
    return "yes" if row["holds"] else "no"


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise InputError(f"--set {text} was given: write a setting and its value, as epochs=20")
    return key.strip(), value.strip()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(engine: str, address: str | None) -> Any:
    if engine == "dask":
        from levelhead.adapters.dask import DaskPool

        return DaskPool(address)
    if engine == "ray":
        from levelhead.adapters.ray import RayPool

        return RayPool(address)
    if address is not None:
        raise InputError("--address is of a Dask or Ray cluster: give --engine dask or ray")
    from levelhead.studies.engine import LOKY

    return LOKY
