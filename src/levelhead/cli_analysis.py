"""The commands that look into weights: inspect, compare, invariants.

As in `cli`: results go to stdout, everything else to stderr, heavy libraries are imported inside
the commands.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer

from levelhead.base.console import json_of_parts, table_text, whole_numbers
from levelhead.base.console import names as listed
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


def _help_on_layouts(value: str | None) -> str | None:
    """Print the reference of layout files for `--layout help`, and leave."""
    if value == "help":
        from levelhead.weights.own_layout import REFERENCE

        typer.echo(REFERENCE)
        raise typer.Exit()
    return value


LayoutOf = Annotated[
    str | None,
    typer.Option(
        "--layout",
        callback=_help_on_layouts,
        is_eager=True,
        help="TOML file of a layout, or a family's name; 'help' prints what such a file says.",
    ),
]
# Paths are texts here: "" and "https://…" would not survive as a Path.
CheckpointPath = Annotated[str, typer.Argument(metavar="PATH", help="File or folder of weights.")]
Heads = Annotated[int | None, typer.Option(min=1, help="Number of heads, where no config says it.")]
Given = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting that stands before the config's: kv_heads, head_dim, theta, norm_first, … "
        "May be repeated.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Leave with 1 if layers were left out.")]


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
    heads: Heads = None,
    given: Given = None,
    covariance: Annotated[
        str | None,
        typer.Option(
            help="safetensors or .pt file: for each layer's name the second moment E[x xᵀ] [d, d] "
            "of what its projections read, behind the norm with its gain; or one for all layers. "
            "Adds the columns data rank, data logit and entropy bound."
        ),
    ] = None,
    out: OutFolder = None,
    figures: Annotated[
        str, typer.Option(metavar="N|all", help="How many layers the report draws.")
    ] = "12",
    per_head: Annotated[
        bool,
        typer.Option("--per-head", help="A row for each head as well; as JSON: layers and heads."),
    ] = False,
    numbers: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="More columns, by their names in the catalogue."),
    ] = None,
    strict: Strict = False,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Print what the attention heads in PATH are like: ranks, gains, copies, dead heads.

    What the columns mean stands below the table. A layer takes about a tenth of a second at width
    400, and a second more with --decompose.
    """
    fitted = None if ranks is None else whole_numbers(ranks, "--ranks", "8,16")
    chosen = [] if numbers is None else listed(numbers, "--numbers", "ov_trace,qk_rank")
    drawn: int | Literal["all"] = "all"
    if figures != "all":
        drawn = whole_numbers(figures, "--figures", "12 or all")[0]
    from levelhead.inspection.inspect import inspect as work

    arguments = _arguments(heads, given)
    weights, caveats = _opened(path, layout, arguments)
    found = work(
        weights,
        **arguments,
        layers=_layers(layers),
        decompose=decompose,
        ranks=fitted,
        layout=layout,
        covariance=covariance,
        out=out,
        figures=drawn,
        numbers=chosen,
        show_progress=progress,
    )
    tell([*found.notes(), *caveats])
    if found.run is not None:
        say(str(reported(found.run)))
    if as_json and per_head:
        both = {"layers": found.rows(), "heads": found.head_rows()}
        typer.echo(json_of_parts(both))
    else:
        show(found.rows(), as_json, found.table())
    if not as_json:
        if per_head or numbers is not None:
            typer.echo(f"\n{found.heads_table()}")
        if found.fits:
            typer.echo(f"\n{table_text(found.fits)}")
        tell(["", *found.legend(per_head)])
    _count_left_out(found.skipped, {layer.name for layer in found.layers}, strict)


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Weights, or a folder of step-… folders.")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Weights to compare with; none for steps.")
    ] = None,
    layers: Layers = None,
    layout: LayoutOf = None,
    heads: Heads = None,
    given: Given = None,
    basis: Annotated[
        Literal["shared", "own"],
        typer.Option(help="own: only how singular values differ, for models trained apart."),
    ] = "shared",
    out: OutFolder = None,
    strict: Strict = False,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Match the heads of two checkpoints and print what moved most; or follow a training."""
    from levelhead.inspection.compare import compare as work
    from levelhead.inspection.steps import refuse_series_with_b

    refuse_series_with_b(a, b)
    arguments = _arguments(heads, given)
    sources: list[Any] = [a, b]
    caveats: list[str] = []
    if b is not None:
        opened = [_opened(path, layout, arguments) for path in (a, b)]
        sources = [weights for weights, _ in opened]
        caveats = list(dict.fromkeys(text for _, said in opened for text in said))
    found = work(
        *sources,
        **arguments,
        layers=_layers(layers),
        layout=layout,
        basis=basis,
        out=out,
        show_progress=progress,
    )
    tell([*found.notes(), *caveats])
    if found.run is not None:
        say(str(reported(found.run)))
    # A table of differences that are rounding would only look like news.
    if as_json or found.b is None or not found.heads or found.moved:
        show(found.rows(), as_json)
    _count_left_out(found.skipped, {row["layer"] for row in found.rows()}, strict)


def invariants(
    verify: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Hold the declarations against its layers."),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=GROUP", help="Take a number to be invariant under a group."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="These numbers alone: a,b.")] = None,
    layers: Layers = None,
    layout: LayoutOf = None,
    heads: Heads = None,
    given: Given = None,
    draws: Annotated[int, typer.Option(min=1, help="Random elements of each generator.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    strict: Strict = False,
    as_json: AsJson = False,
    progress: Progress = None,
    debug: Debug = False,
) -> None:
    """Print the catalogue of numbers and what leaves them alone; check it on a checkpoint.

    --verify takes about 1 s a layer at width 32 and 10 s at width 384; --layers and --only make it
    shorter. What the signs mean stands below the table.
    """
    chosen = None if only is None else listed(only, "--only", "qk_spectrum,ov_trace")
    if assume and verify is None:
        raise InputError("--assume needs --verify: name the checkpoint to hold it against")
    from levelhead.inspection import verification

    assumed = verification.parse_assumptions(assume or [])
    if verify is None:
        rows = verification.catalogue_rows(chosen)
        show(rows, as_json, None if as_json else verification.catalogue_text(chosen))
        if not as_json:
            tell(["", verification.CATALOGUE_LEGEND])
        return
    arguments = _arguments(heads, given)
    weights, caveats = _opened(verify, layout, arguments)
    found = verification.verify_checkpoint(
        weights,
        **arguments,
        layers=_layers(layers),
        layout=layout,
        invariants=chosen,
        assume=assumed,
        draws=draws,
        seed=seed,
        show_progress=progress,
    )
    tell([*(f"Left out: {skip}." for skip in found.skipped), *caveats])
    if not found.verdicts:
        show([], as_json)
    show(found.rows() if as_json else found.table(), as_json)
    if not as_json:
        tell(["", verification.TABLE_LEGEND])
    _judge(found)
    _count_left_out(found.skipped, {verdict.layer for verdict in found.verdicts}, strict)


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


def _arguments(heads: int | None, given: list[str] | None) -> dict[str, Any]:
    """The settings of --heads and --set, by name."""
    from levelhead.weights.settings import ALIASES, SETTABLE

    known = {*SETTABLE, *(alias for names in ALIASES.values() for alias in names)}
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise InputError(f"--set {text} was given; write NAME=VALUE, as kv_heads=2")
        if name not in known:
            raise InputError(f"--set knows no {name!r}; it has {', '.join(SETTABLE)}")
        ours = next((n for n, names in ALIASES.items() if name in names), name)
        found[ours] = _value(value)
    return found if heads is None else {**found, "heads": heads}


def _opened(
    path: str, layout: str | None, arguments: dict[str, Any]
) -> tuple[Any, tuple[str, ...]]:
    """The checkpoint, and sentences on what to know of how its layers are read."""
    from levelhead.weights.checkpoints import open_weights
    from levelhead.weights.layouts import match

    weights = open_weights(path)
    return weights, match(weights, layout=layout, **arguments).caveats


def _value(text: str) -> Any:
    """What a text says: a number, true or false, a list; else the text itself."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def _count_left_out(skipped: tuple[Any, ...], kept: set[Any], strict: bool) -> None:
    """Say how many layers were left out; leave with 1 if that was to be an error."""
    left = {skip.name for skip in skipped if not skip.loose}
    if not left:
        return
    say(f"{len(left)} of {len(left | kept)} layers were left out.")
    if strict:
        raise typer.Exit(FAILED)
