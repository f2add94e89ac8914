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
    from rich.console import Console, Group

    from levelhead.training.watch_live import Follower

__all__ = ["register", "watch"]

_MOST_ALARMS, _MOST_NOTES = 6, 4
_BARS = 12  # values in the course of a number
_BAD_LOSS = "The loss was "
# What is no news to who looks at the run: the layers stand in the table.
_PLAIN_NOTES = ("Watched", "Not read: ")


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

    Ends when the training ends or its process is gone, or with Ctrl-C. --json prints what is known
    now, once.
    """
    from levelhead.training.watch_live import Follower

    follower = Follower(run)
    if once or as_json:
        if not follower.exists:
            raise InputError(
                f"{run} is no run folder: give the one that is named by levelhead.watch(out=…)."
            )
        follower.refuse_others()
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
    follower.refuse_others()
    follower.read()
    quiet_since = time.monotonic()
    gone = False
    with Live(_drawn(follower, console), console=console, auto_refresh=False) as live:
        while not (follower.finished or gone):
            time.sleep(interval)
            gone = follower.gone  # before the last look, which takes what it wrote at its end
            if follower.read():
                quiet_since = time.monotonic()
            quiet = time.monotonic() - quiet_since
            live.update(_drawn(follower, console, quiet), refresh=True)
    if not console.is_terminal:
        console.print()
    if follower.finished:
        say(f"The training ended at step {follower.step:,}.")
    else:
        say(f"The training process is gone (no end was recorded); last step {follower.step:,}.")


def _print_once(follower: Follower) -> None:
    from rich.console import Console

    # A pipe or a file has no width: there the table is as wide as it needs.
    console = Console()
    console = Console(height=10_000, width=console.width if console.is_terminal else 200)
    console.print(_drawn(follower, console))


# ── what is drawn ──


def _drawn(follower: Follower, console: Console, quiet: float = 0.0) -> Group:
    """Head line, one row a layer, alarms, notes; layers that do not fit are counted."""
    from rich.console import Group
    from rich.text import Text

    from levelhead.training.alarms import sentences
    from levelhead.training.watch_observations import observation_sentences

    found = list(follower.alarms.values())
    told = sentences(found)
    notes = [note for note in follower.notes() if not note.startswith(_PLAIN_NOTES)]
    notes = [*observation_sentences(follower.observations()), *notes]
    taken = 2 * min(len(told), _MOST_ALARMS) + 2 * min(len(notes), _MOST_NOTES)
    room = max(console.height - 8 - taken, 3)
    rows = follower.rows()
    # With too little room the layers with alarms come first, the others in their order.
    chosen = sorted(range(len(rows)), key=lambda at: (not rows[at]["alarms"], at))[:room]
    parts: list[Any] = [_head(follower, quiet)]
    parts.append(_table(follower, [rows[at] for at in sorted(chosen)], console))
    if len(chosen) < len(rows):
        parts.append(Text(f"{len(rows) - len(chosen)} more layers are not shown.", style="dim"))
    harmful = [sentence for sentence in told if "Harmful:" in sentence]
    told = harmful + [sentence for sentence in told if sentence not in harmful]
    for sentence in told[:_MOST_ALARMS]:
        parts.append(Text(f"! {sentence}", style="bold red" if sentence in harmful else "yellow"))
    if len(told) > _MOST_ALARMS:
        parts.append(Text(f"… and {len(told) - _MOST_ALARMS} more alarms.", style="dim"))
    bad = [note for note in notes if note.startswith(_BAD_LOSS)]
    if not told and not bad and follower.step:
        parts.append(Text("No alarm so far.", style="dim"))
    kept = bad + [note for note in notes if note not in bad]
    parts += [Text(note, style="bold red" if note in bad else "dim") for note in kept[:_MOST_NOTES]]
    if len(kept) > _MOST_NOTES:
        parts.append(Text(f"… and {len(kept) - _MOST_NOTES} more notes (--json).", style="dim"))
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
    elif follower.gone:
        text.append("   the training process is gone", style="bold red")
    elif quiet >= 30:
        text.append(f"   no news for {quiet:.0f} s", style="yellow")
    return text


def _table(follower: Follower, rows: list[dict[str, Any]], console: Console) -> Any:
    """Numbers, and behind them their courses if there is room for all of these."""
    from rich.table import Table
    from rich.text import Text

    from levelhead.training.watch_live import COLUMNS, sparkline

    used = [c for c in COLUMNS if any(row[c.reading] is not None for row in rows)]
    longest = max((len(row["layer"]) for row in rows), default=5)
    wide = console.width >= longest + len(used) * (_BARS + 12)
    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 2 if wide else 1, 0, 0)
    )
    table.add_column("layer", overflow="ellipsis", no_wrap=True, min_width=5)
    for column in used:
        least = max(map(len, column.heading.split()))
        table.add_column(
            column.heading, justify="left" if wide else "right", no_wrap=wide, min_width=least
        )
    for row in rows:
        cells = [Text(row["layer"], style="red" if row["alarms"] else "")]
        for column in used:
            past = follower.history(column.reading, row["layer"], column.heads)
            bars = f" {sparkline(past, _BARS)}" if wide else ""
            cells.append(Text(f"{_number(row[column.reading]):{'8' if wide else ''}}{bars}"))
        table.add_row(*cells)
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
