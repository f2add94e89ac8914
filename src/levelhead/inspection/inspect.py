"""`inspect`: what the heads of a checkpoint are like, in numbers that do not depend on the basis.

One layer is in memory at a time. Layers with values that are not finite are left out by name.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from levelhead.base.console import table_text
from levelhead.base.errors import InputError
from levelhead.base.progress import progress
from levelhead.base.records import Figure, Run
from levelhead.inspection.decompositions import Method, checked_ranks, decomposed
from levelhead.inspection.figures import (
    LayerFigures,
    drawn_layers,
    mode_spectra,
    readings,
    summary,
)
from levelhead.inspection.measures import LayerNumbers, folded_layer, measure, too_large
from levelhead.inspection.rows import frame
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import open_weights
from levelhead.weights.layouts import Layout, Match, Skip, match, views

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Covariance", "Inspection", "inspect"]

Covariance = str | os.PathLike[str] | Mapping[str, Tensor] | Tensor
_SHORT = {
    "layer": "layer",
    "heads": "heads",
    "groups": "groups",
    "d_k": "d_k",
    "qk_effective_rank": "QK rank",
    "ov_effective_rank": "OV rank",
    "largest_logit_gain": "logit gain",
    "qk_coherence": "QK coh.",
    "ov_coherence": "OV coh.",
    "qk_effective_heads": "QK eff. heads",
    "ov_effective_heads": "OV eff. heads",
    "near_duplicates": "near-dup.",
    "dead_heads": "dead",
    "notes": "notes",
}


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """What `inspect` found: numbers of every layer, fits if they were asked for, what was skipped.

    Args:
        where, format, families: the source and how it was read.
        layers: the numbers of each layer, in the model's order.
        fits: rows of the decompositions.
        skipped: what looks like attention but was left out, with the reason.
        run: the run folder, if one was written.
    """

    where: str
    format: str
    families: tuple[str, ...]
    layers: tuple[LayerNumbers, ...]
    fits: tuple[dict[str, Any], ...] = ()
    skipped: tuple[Skip, ...] = ()
    run: Run | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each layer, as the rows of `to_frame`."""
        return [layer.row() for layer in self.layers]

    def table(self) -> str:
        """The rows as text for a terminal, with short headings; empty without layers."""
        rows = [{_SHORT[name]: value for name, value in row.items()} for row in self.rows()]
        return table_text(rows) if rows else ""

    def to_frame(self) -> pd.DataFrame:
        """One row for each layer.

        Columns: layer, heads, groups, d_k; qk_effective_rank and ov_effective_rank (means over
        heads); largest_logit_gain (logit per x²; under a norm of queries and keys the largest
        logit); qk_coherence, ov_coherence (0 … 1); qk_effective_heads, ov_effective_heads
        (1 … h); near_duplicates (pairs), dead_heads; notes.
        """
        return frame(self.rows(), list(_SHORT))

    def heads_frame(self) -> pd.DataFrame:
        """One row for each layer and head: ranks, gains, the most similar head, dead or not."""
        return frame([row for layer in self.layers for row in layer.head_rows()], ["layer", "head"])

    def fits_frame(self) -> pd.DataFrame:
        """One row for each decomposition: layer, tensor, rank, relative error, sweeps."""
        return frame(list(self.fits), ["layer", "tensor", "method", "rank", "relative_error"])

    def notes(self) -> list[str]:
        """Sentences: what was read how, and what was left out and why."""
        heads = f"{len(self.layers)} attention layer{'s' if len(self.layers) != 1 else ''}"
        said = [f"{self.where} ({self.format}): {heads}, read as {', '.join(self.families)}."]
        return [*said, *(f"Left out: {skip}." for skip in self.skipped)]

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
            mapping or a file of tensors), or one for all layers; adds columns to `heads_frame`.
        out: folder of a run: Readings, arrays, and figures that `levelhead.report` draws.
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
    weights = open_weights(source)
    held = match(weights, layout=layout, **arguments)
    many = len(held.plans) if layers is None else len(layers)
    work = _Work(held, _covariances(covariance), decompose, wanted, out, drawn_layers(many), [])
    with progress("layers", many, enabled=show_progress) as advance:
        for view in views(weights, layers, layout, skipped=work.skipped, **arguments):
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
    skipped: list[Skip]
    found: list[LayerNumbers] = field(default_factory=list)
    fits: list[dict[str, Any]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    run: Run | None = None

    def add(self, view: AttentionView) -> None:
        layer, notes = folded_layer(view)
        if too_large(layer):
            self.skipped.append(Skip(view.name, "its weights are too large for their products"))
            return
        given = _covariance_of(self.covariances, view.name)
        numbers = measure(view, given, folding=(layer, notes))
        number = len(self.found)
        self.found.append(numbers)
        if self.decompose is None and self.out is None:
            return
        fits = None
        if self.decompose is not None:
            fits = decomposed(layer, self.decompose, self.ranks)
            self.fits += fits.rows
        if self.out is not None:
            draw = number in self.drawn
            modes, missing = mode_spectra(layer) if draw else ({}, None)
            run = self._opened()
            run.add_readings(readings(numbers))
            figures = LayerFigures(number, numbers, modes, missing, fits).store(run)
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
        )
        if run is not None:
            run.add_figures([*summary(run, self.found, self.fits), *self.figures])
            hidden = len(self.found) - len(self.drawn)
            some = [f"{hidden} layers are in the table and the files, and not drawn."]
            run.add_notes([*out.notes(), *(some if hidden > 0 else [])])
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
