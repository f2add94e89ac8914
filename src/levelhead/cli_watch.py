"""The command that follows a watched run in the terminal: watch.

As in `cli`: results go to stdout, everything else to stderr. It reads the run's folder alone, and
may be started before, during or after the training; stopping it does not touch the training.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from levelhead.base.errors import InputError
from levelhead.cli_shared import AsJson, Debug, say

if TYPE_CHECKING:
    from rich.console import Group

    from levelhead.training.watch_live import Follower

__all__ = ["register", "watch"]

_MOST_ALARMS = 6


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(watch)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a watched run.")],
    once: Annotated[bool, typer.Option("--once", help="Print the table once and leave.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Follow a training that is watched: entropy, logits, heads, ranks of each layer, and alarms.

    Ends when the training ends, or with Ctrl-C. --json prints what is known now, once.
    """
    from levelhead.training.watch_live import Follower

    follower = Follower(run)
    if once or as_json:
        if not follower.exists:
            raise InputError(
                f"{run} is no run folder: give the one that is named by levelhead.watch(out=…)."
            )
        follower.read()
        if as_json:
            typer.echo(json.dumps(follower.state(), indent=1, allow_nan=False))
        else:
            _print_once(follower)
        return
    try:
        _wait_for(follower, interval)
        _follow(follower, interval)
    except KeyboardInterrupt:
        say(f"Stopped looking at step {follower.step:,}; the training is not touched.")


def _wait_for(follower: Follower, interval: float) -> None:
    if follower.exists:
        return
    say(f"Waiting for {follower.folder} to be begun (Ctrl-C to stop).")
    while not follower.exists:
        time.sleep(interval)


def _follow(follower: Follower, interval: float) -> None:
    """Show the table until the run is over."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    follower.read()
    quiet_since = time.monotonic()
    with Live(_drawn(follower, console.height), console=console, auto_refresh=False) as live:
        while not follower.finished:
            time.sleep(interval)
            if follower.read():
                quiet_since = time.monotonic()
            quiet = time.monotonic() - quiet_since
            live.update(_drawn(follower, console.height, quiet), refresh=True)
    say(f"The training ended at step {follower.step:,}.")


def _print_once(follower: Follower) -> None:
    from rich.console import Console

    # A pipe or a file has no width: there the table is as wide as it needs.
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(_drawn(follower, height=10_000))


# ── what is drawn ──


def _drawn(follower: Follower, height: int, quiet: float = 0.0) -> Group:
    """Head line, one row a layer, alarms; layers that do not fit are counted."""
    from rich.console import Group
    from rich.text import Text

    from levelhead.training.alarms import sentences

    found = list(follower.alarms.values())
    told = sentences(found)
    room = max(height - 8 - 2 * min(len(told), _MOST_ALARMS), 3)
    rows = follower.rows()
    # With too little room the layers with alarms come first, the others in their order.
    chosen = sorted(range(len(rows)), key=lambda at: (not rows[at]["alarms"], at))[:room]
    parts: list[Any] = [_head(follower, quiet)]
    parts.append(_table(follower, [rows[at] for at in sorted(chosen)]))
    if len(chosen) < len(rows):
        parts.append(Text(f"{len(rows) - len(chosen)} more layers are not shown.", style="dim"))
    harmful = [sentence for sentence in told if "Harmful:" in sentence]
    told = harmful + [sentence for sentence in told if sentence not in harmful]
    for sentence in told[:_MOST_ALARMS]:
        parts.append(Text(f"! {sentence}", style="bold red" if sentence in harmful else "yellow"))
    if len(told) > _MOST_ALARMS:
        parts.append(Text(f"… and {len(told) - _MOST_ALARMS} more alarms.", style="dim"))
    if not told and follower.step:
        parts.append(Text("No alarm so far.", style="dim"))
    return Group(*parts)


def _head(follower: Follower, quiet: float) -> Any:
    from rich.text import Text

    from levelhead.training.watch_live import sparkline

    if not follower.step:
        return Text("Nothing was sampled yet.")
    text = Text(f"step {follower.step:,}", style="bold")
    for reading, name in (
        ("loss", "loss"),
        ("validation_loss", "validation"),
        ("gradient_norm", "gradient"),
        ("largest_hessian_eigenvalue", "λ_max"),
    ):
        if past := follower.history(reading):
            text.append(f"   {name} {_number(past[-1])} ", style="not bold")
            text.append(sparkline(past, 24), style="cyan")
    if follower.finished:
        text.append("   finished", style="green")
    elif quiet >= 30:
        text.append(f"   no news for {quiet:.0f} s", style="yellow")
    return text


def _table(follower: Follower, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from levelhead.training.watch_live import COLUMNS, sparkline

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", overflow="ellipsis", no_wrap=True)
    used = [c for c in COLUMNS if any(row[c.reading] is not None for row in rows)]
    for column in used:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [Text(row["layer"], style="red" if row["alarms"] else "")]
        for column in used:
            past = follower.history(column.reading, row["layer"], column.heads)
            cells.append(Text(f"{sparkline(past, 12)} {_number(row[column.reading])}"))
        table.add_row(*cells)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
