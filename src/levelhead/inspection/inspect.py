"""`inspect`: what the heads of a checkpoint are like, in numbers that do not depend on the basis.

One layer is in memory at a time. Layers with values that are not finite are left out by name.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.base.numerics import threads
from levelhead.base.progress import progress
from levelhead.base.records import Figure, Run
from levelhead.inspection.chosen import checked_numbers, with_numbers
from levelhead.inspection.decompositions import Method, checked_ranks, decomposed
from levelhead.inspection.figures import (
    MOST_LAYERS,
    LayerFigures,
    drawn_layers,
    mode_spectra,
    readings,
)
from levelhead.inspection.folders import refuse_used
from levelhead.inspection.measures import (
    COLUMNS,
    LayerNumbers,
    folded_layer,
    measure,
    one_thread,
    too_large,
)
from levelhead.inspection.rows import frame
from levelhead.inspection.summary import summary
from levelhead.inspection.tables import compact, legend, narrow_text
from levelhead.invariants.entry import Invariant
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import open_weights
from levelhead.weights.layouts import Layout, Match, Skip, match, views

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Covariance", "Inspection", "inspect"]

Covariance = str | os.PathLike[str] | Mapping[str, Tensor] | Tensor
_COLUMNS = ("layer", "heads", "groups", "d_k", *COLUMNS, "near_duplicates", "dead_heads", "notes")


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """What `inspect` found: numbers of every layer, fits if they were asked for, what was skipped.

    Args:
        where, format, families: the source and how it was read.
        layers: the numbers of each layer, in the model's order.
        fits: rows of the decompositions.
        skipped: what looks like attention but was left out, with the reason.
        run: the run folder, if one was written.
        said: sentences on what was done in place of what was asked for.
    """

    where: str
    format: str
    families: tuple[str, ...]
    layers: tuple[LayerNumbers, ...]
    fits: tuple[dict[str, Any], ...] = ()
    skipped: tuple[Skip, ...] = ()
    run: Run | None = None
    said: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each layer, as the rows of `to_frame`."""
        return [layer.row() for layer in self.layers]

    def head_rows(self) -> list[dict[str, Any]]:
        """One mapping for each layer and head, as the rows of `heads_frame`."""
        return [row for layer in self.layers for row in layer.head_rows()]

    def table(self) -> str:
        """The rows as text for a terminal, without what all layers share; empty without layers."""
        rows = compact(self.rows()).rows
        return narrow_text(rows) if rows else ""

    def heads_table(self) -> str:
        """The rows of all heads as text for a terminal; empty without layers."""
        rows = compact(self.head_rows()).rows
        return narrow_text(rows) if rows else ""

    def legend(self, per_head: bool = False) -> list[str]:
        """Sentences below the table: what all layers share, and what its columns mean."""
        shown = compact(self.rows())
        headings = dict.fromkeys(name for row in shown.rows[:1] for name in row)
        if per_head:
            headings |= dict.fromkeys(n for row in compact(self.head_rows()).rows[:1] for n in row)
        return [*shown.said, *([told] if (told := legend(headings)) else [])]

    def to_frame(self) -> pd.DataFrame:
        """One row for each layer.

        Columns: layer, heads, groups, d_k; qk_effective_rank and ov_effective_rank (means over
        heads); largest_logit_gain (logit per x²) or, under a norm of queries and keys,
        largest_logit, and nan in the other one; qk_coherence, ov_coherence (0 … 1);
        qk_effective_heads, ov_effective_heads (1 … h); with a covariance
        whitened_qk_effective_rank, logit_rms (the largest) and entropy_bound_typical (the
        smallest of the heads); near_duplicates (pairs), dead_heads; notes.
        """
        return frame(self.rows(), list(_COLUMNS))

    def heads_frame(self) -> pd.DataFrame:
        """One row for each layer and head: ranks, gains, the most similar head, dead or not."""
        return frame(self.head_rows(), ["layer", "head"])

    def fits_frame(self) -> pd.DataFrame:
        """One row for each decomposition: layer, tensor, rank, relative error, sweeps."""
        return frame(list(self.fits), ["layer", "tensor", "method", "rank", "relative_error"])

    def notes(self) -> list[str]:
        """Sentences: what was read how, and what was left out and why."""
        heads = f"{len(self.layers)} attention layer{'s' if len(self.layers) != 1 else ''}"
        said = [f"{self.where} ({self.format}): {heads}, read as {', '.join(self.families)}."]
        return [*said, *self.said, *(f"Left out: {skip}." for skip in self.skipped)]

    def __repr__(self) -> str:
        left = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"Inspection({self.where!r}: {len(self.layers)} layers{left})"

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes())
        table = self.to_frame().to_html(index=False, border=0, float_format="{:.4g}".format)
        return f"{table}<ul>{notes}</ul>"


def inspect(
    source: object,
    *,
    layers: Sequence[int | str] | None = None,
    decompose: Method | None = None,
    ranks: int | Sequence[int] | None = None,
    layout: Layout | None = None,
    covariance: Covariance | None = None,
    out: str | os.PathLike[str] | None = None,
    figures: int | Literal["all"] = MOST_LAYERS,
    numbers: Sequence[str] = (),
    show_progress: bool | None = None,
    **arguments: Any,
) -> Inspection:
    """Numbers of every attention layer of `source`, each one the layer's own.

    Args:
        source: a checkpoint's file or folder, a mapping of names to tensors, or a module.
        layers: positions, names or patterns of names; None: all.
        decompose: "tucker" or "cp" fits 𝓑 [h, d, d_source], 𝓜 [h, d_out, d_source] and the raw
            head tensor [h, d_k, d, 3].
        ranks: of CP one or several; of Tucker three, of heads and of both sides. By default h,
            and (h, d_k, d_k).
        layout: a family of the table of layouts, a TOML file or keywords; None: recognised.
        covariance: E[x xᵀ] [d, d] of what the projections of a layer read, by the layer's name (a
            mapping or a file of tensors), or one for all layers; adds columns to both frames.
        out: a new or empty folder for Readings, arrays, and figures that `levelhead.report` draws.
        figures: how many layers get figures of their own, evenly spaced, or "all" of them.
        numbers: names of the catalogue (`levelhead invariants` lists them) for more columns: in
            `heads_frame` what heads have, in `to_frame` what layers have.
        show_progress: a bar on stderr; None: only on a terminal.
        arguments: settings that stand before the config's: heads, kv_heads, head_dim, theta, ….

    Raises NothingMatched if no attention layer is found (it says which names were seen),
    StoredFileError for a file that cannot be read, InputError for an argument out of range.

    >>> import torch
    >>> found = inspect(torch.nn.TransformerEncoderLayer(8, 2))
    >>> found, found.to_frame()[["heads", "d_k", "dead_heads"]].values.tolist()
    (Inspection('a TransformerEncoderLayer': 1 layers), [[2, 4, 0]])
    """
    wanted = checked_ranks(decompose, ranks)
    drawn_layers(0, figures)  # a wrong argument is told before anything is read
    chosen = checked_numbers(numbers, covariance is not None)
    refuse_used(out)
    weights = open_weights(source)
    held = match(weights, layout=layout, **arguments)
    many = len(held.plans) if layers is None else len(layers)
    drawn = drawn_layers(many, figures)
    given = _covariances(covariance)
    work = _Work(held, given, decompose, wanted, out, drawn, chosen, show_progress, [])
    with progress("layers", many, enabled=show_progress) as advance:
        for view in views(weights, layers, layout, skipped=work.skipped, **arguments):
            with threads(one_thread(view)):
                work.add(view)
            advance()
    return work.finished()


@dataclass(eq=False)
class _Work:
    """An inspection under way; its run folder is made when there is a first layer to keep."""

    held: Match
    covariances: Mapping[str, Tensor] | Tensor | None
    decompose: Method | None
    ranks: tuple[int, ...] | None
    out: str | os.PathLike[str] | None
    drawn: tuple[int, ...]
    chosen: tuple[Invariant, ...]
    show_progress: bool | None
    skipped: list[Skip]
    found: list[LayerNumbers] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    run: Run | None = None

    def add(self, view: AttentionView) -> None:
        layer, notes = folded_layer(view)
        if too_large(layer):
            self.skipped.append(Skip(view.name, "its weights are too large for their products"))
            return
        given = _covariance_of(self.covariances, view.name)
        numbers = measure(view, given, folding=(layer, notes))
        numbers = with_numbers(numbers, self.chosen, view, layer, given)
        number = len(self.found)
        self.found.append(numbers)
        if self.decompose is None and self.out is None:
            return
        fits = None
        if self.decompose is not None:
            fits = decomposed(layer, self.decompose, self.ranks, self.show_progress)
            self.fits += fits.rows
            self.said += [told for told in fits.said if told not in self.said]
        if self.out is not None:
            draw = number in self.drawn
            modes, missing = mode_spectra(layer) if draw else ({}, None)
            run = self._opened()
            run.add_readings(readings(numbers))
            first = draw and not self.figures
            figures = LayerFigures(number, numbers, modes, missing, fits, first).store(run)
            self.figures += figures if draw else []

    def _opened(self) -> Run:
        if self.run is None:
            assert self.out is not None
            self.run = Run.create(
                self.out,
                title=f"The heads of {_called(self.held.where)}",
                command="inspect",
                settings={
                    "source": self.held.where,
                    "format": self.held.format,
                    "families": list(self.held.families),
                    "decompose": self.decompose,
                    "ranks": None if self.ranks is None else list(self.ranks),
                },
            )
        return self.run

    def finished(self) -> Inspection:
        run = self.run
        held = self.held
        out = Inspection(
            held.where,
            held.format,
            held.families,
            tuple(self.found),
            tuple(self.fits),
            tuple(self.skipped),
            run,
            tuple(self.said),
        )
        if run is not None:
            run.add_figures([*summary(run, self.found, self.fits), *self.figures])
            hidden = len(self.found) - len(self.drawn)
            some = [f"{hidden} layers are in the table and the files, and not drawn."]
            shared = compact(out.rows()).said
            run.add_notes([*out.notes(), *shared, *(some if hidden > 0 else [])])
        return out


def _called(where: str) -> str:
    """A short name of the source: its file's, or its folder's if every model's file is so called.

    >>> _called("models/tiny/model.safetensors"), _called("tiny.gguf"), _called("a Linear")
    ('tiny', 'tiny.gguf', 'a Linear')
    """
    path = Path(where)
    common = path.name.split(".")[0] in ("model", "pytorch_model")
    return path.parent.name or path.name if common else path.name


# ── covariances ──


def _covariances(given: Covariance | None) -> Mapping[str, Tensor] | Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    if isinstance(given, Mapping):
        return {str(name): value for name, value in given.items()}
    stored = open_weights(given)
    if len(stored.shapes) == 1:
        return stored.get(next(iter(stored.shapes)))
    return {name: stored.get(name) for name in stored.shapes}


def _covariance_of(given: Mapping[str, Tensor] | Tensor | None, layer: str) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    if layer not in given:
        raise InputError(
            f"there is no covariance for {layer}: the names given are {', '.join(list(given)[:5])}"
        )
    return given[layer]
