"""The commands that look into weights: inspect, compare, invariants.

As in `cli`: results go to stdout, everything else to stderr, heavy libraries are imported inside
the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from levelhead.base.console import names as listed
from levelhead.base.console import table_text, whole_numbers
from levelhead.base.errors import InputError
from levelhead.cli_shared import (
    AsJson,
    Debug,
    OutFolder,
    Progress,
    reported,
    say,
    show,
    tell,
)

__all__ = ["compare", "inspect", "invariants", "register"]

FAILED = 1

Layers = Annotated[
    str | None, typer.Option(help="Positions, names or patterns: 0,-1 or '*.encoder.*'.")
]
LayoutOf = Annotated[
    str | None, typer.Option("--layout", help="TOML file of a layout, or a family's name.")
]
CheckpointPath = Annotated[Path, typer.Argument(metavar="PATH", help="File or folder of weights.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    for command in (inspect, compare, invariants):
        app.command()(command)


def inspect(
    path: CheckpointPath,
    layers: Layers = None,
    decompose: Annotated[
        Literal["tucker", "cp"] | None, typer.Option(help="Fit the layers' tensors as well.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Of cp one or several: 8,16. Of tucker three: 8,32,32.")
    ] = None,
    layout: LayoutOf = None,
    covariance: Annotated[
        Path | None,
        typer.Option(help="File of second moments of what each layer reads, by its name."),
    ] = None,
    out: OutFolder = None,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Print what the attention heads in PATH are like: ranks, gains, copies, dead heads."""
    fitted = None if ranks is None else whole_numbers(ranks, "--ranks", "8,16")
    from levelhead.inspection.inspect import inspect as work

    found = work(
        path,
        layers=_layers(layers),
        decompose=decompose,
        ranks=fitted,
        layout=layout,
        covariance=covariance,
        out=out,
        show_progress=progress,
    )
    tell(found.notes())
    if found.run is not None:
        say(str(reported(found.run)))
    show(found.rows(), as_json, found.table())
    if found.fits and not as_json:
        typer.echo(f"\n{table_text(found.fits)}")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Weights, or a folder of step-… folders.")],
    b: Annotated[
        Path | None, typer.Argument(metavar="[B]", help="Weights to compare with; none for steps.")
    ] = None,
    layers: Layers = None,
    layout: LayoutOf = None,
    basis: Annotated[
        Literal["shared", "own"],
        typer.Option(help="own: singular values alone, for models trained apart."),
    ] = "shared",
    out: OutFolder = None,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Match the heads of two checkpoints and print what moved most; or follow a training."""
    from levelhead.inspection.compare import compare as work

    found = work(
        a,
        b,
        layers=_layers(layers),
        layout=layout,
        basis=basis,
        out=out,
        show_progress=progress,
    )
    tell(found.notes())
    if found.run is not None:
        say(str(reported(found.run)))
    show(found.rows(), as_json)


def invariants(
    verify: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="Hold the declarations against its layers."),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=GROUP", help="Take a number to be invariant under a group."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="These numbers alone: a,b.")] = None,
    layers: Layers = None,
    layout: LayoutOf = None,
    draws: Annotated[int, typer.Option(min=1, help="Random elements of each generator.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Print the catalogue of numbers and what leaves them alone; check it on a checkpoint."""
    chosen = None if only is None else listed(only, "--only", "qk_spectrum,ov_trace")
    if assume and verify is None:
        raise InputError("--assume needs --verify: name the checkpoint to hold it against")
    from levelhead.inspection import verification

    assumed = verification.parse_assumptions(assume or [])
    if verify is None:
        rows = verification.catalogue_rows(chosen)
        show(rows, as_json, None if as_json else verification.catalogue_text(chosen))
        return
    found = verification.verify_checkpoint(
        verify,
        layers=_layers(layers),
        layout=layout,
        invariants=chosen,
        assume=assumed,
        draws=draws,
        seed=seed,
        show_progress=progress,
    )
    tell([f"Left out: {skip}." for skip in found.skipped])
    if not found.verdicts:
        show([], as_json)
    show(found.rows() if as_json else found.table(), as_json)
    _judge(found)


def _judge(found: Any) -> None:
    """Say how many declarations held; leave with 1 if one did not."""
    wrong = found.failures()
    tell(wrong)
    count = sum(len(verdict.checks) for verdict in found.verdicts)
    layers = len(found.verdicts)
    if wrong:
        say(f"{len(wrong)} of {count} declarations in {layers} layers are wrong.")
        raise typer.Exit(FAILED)
    say(f"All {count} declarations in {layers} layers hold.")


def _layers(text: str | None) -> list[int | str] | None:
    if text is None:
        return None
    return [
        int(part) if part.removeprefix("-").isdecimal() else part
        for part in listed(text, "--layers", "0,-1")
    ]
