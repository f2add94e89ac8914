"""What all commands share: options, and how results, notes and reports are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from levelhead.base.console import json_text, table_text

__all__ = [
    "DEBUG",
    "NOTHING_MATCHED",
    "AsJson",
    "Debug",
    "OutFolder",
    "Progress",
    "reported",
    "say",
    "show",
    "tell",
]

NOTHING_MATCHED = 3
DEBUG = "levelhead.debug"


def _note_debug(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[DEBUG] = True


Debug = Annotated[
    bool, typer.Option("--debug", callback=_note_debug, help="Show the traceback of an error.")
]
Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Default: only on a terminal.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="Folder to keep the run in.")]


def say(sentence: str) -> None:
    """Print a sentence on stderr."""
    typer.echo(sentence, err=True)


def tell(sentences: Sequence[str]) -> None:
    """Print sentences on stderr, one a line."""
    for sentence in sentences:
        say(sentence)


def reported(run: Any) -> Path:
    """Write the report of a run and return where it is."""
    from levelhead.report.document import write_report

    return write_report(run)


def show(rows: Sequence[Mapping[Any, Any]], as_json: bool, text: str | None = None) -> None:
    """Print rows as a table (or as the `text` given) or as JSON; leave with 3 for no rows."""
    if rows or as_json:
        typer.echo(json_text(rows) if as_json else text or table_text(rows))
    if not rows:
        say("Nothing matched.")
        raise typer.Exit(NOTHING_MATCHED)
