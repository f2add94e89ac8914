"""What an inspection leaves in its run folder: Readings, arrays and Figures, one layer at a time.

Arrays of layer n are called `layer-n.…`. Heads run down and across a heat map; spectra are
[heads, k]; mode spectra [mode, …], padded with nan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from levelhead.base.errors import InputError
from levelhead.base.records import Figure, Reading, Run
from levelhead.inspection.decompositions import Fits
from levelhead.inspection.measures import COLUMNS, ON_DATA, LayerNumbers
from levelhead.invariants.catalogue import catalogue
from levelhead.weights.attention_view import AttentionView

__all__ = ["MOST_LAYERS", "LayerFigures", "drawn_layers", "mode_spectra", "readings"]

# A page with more layers than this shows some of them, evenly spaced.
MOST_LAYERS = 12
# Mode spectra are drawn up to here: that over d_model is far longer than the others.
MOST_COMPONENTS = 64
# What is smaller than this share of the largest value is zero up to rounding.
_ROUNDING = 1e-10
_MODES = ("head", "inner", "model", "qkv")
_WELL_DEFINED = ("inner", "model")
_AXES = {"head": "head", "inner": "d_k", "model": "d_model", "qkv": "Q/K/V"}

Arrays = dict[str, NDArray[np.float64]]


def drawn_layers(count: int, most: int | Literal["all"] = MOST_LAYERS) -> tuple[int, ...]:
    """Which of `count` layers get figures of their own: all, or `most` evenly spaced ones.

    Raises InputError unless `most` is "all" or a whole number that is not negative.

    >>> drawn_layers(3), len(drawn_layers(80)), drawn_layers(80)[-1]
    ((0, 1, 2), 12, 79)
    >>> len(drawn_layers(80, "all")), drawn_layers(80, 2), drawn_layers(80, 0)
    (80, (0, 79), ())
    """
    if most != "all" and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise InputError(f"figures={most!r} was given; expected 'all' or a number of layers")
    if most == "all" or count <= most:
        return tuple(range(count))
    return tuple(sorted({round(i) for i in np.linspace(0, count - 1, most).tolist()}))


def readings(layer: LayerNumbers) -> list[Reading]:
    """All numbers of a layer and of its heads, with units and sources."""
    entries = catalogue()
    found = []
    columns = {**COLUMNS, **ON_DATA}
    for name, value in layer.numbers.items():
        where = {"layer": layer.name}
        if name not in columns:
            found.append(Reading(name, value, _unit(name), where))
            continue
        _, what, entry = columns[name]
        source = f"{what}: {entries[entry].formula}"
        found.append(Reading(name, value, entries[entry].unit, where, source=source))
    for name, values in layer.per_head.items():
        found += [
            Reading(f"head_{name}", value, _unit(name), {"layer": layer.name, "head": i})
            for i, value in enumerate(values.tolist())
        ]
    return found


def _unit(name: str) -> str:
    """The unit of a column: of the entry of that name, of which it may be one place."""
    entries = catalogue()
    entry = entries.get(name) or entries.get(name.rstrip("0123456789").rstrip("_"))
    return "" if entry is None else entry.unit


# ── one layer ──


def mode_spectra(layer: AttentionView) -> tuple[dict[str, NDArray[np.float64]], str | None]:
    """σ of the four unfoldings of T: "raw" and "canonical" [4, n], and why one is missing.

    Modes in the order head, d_k, d_model, Q/K/V; short ones are padded with nan.
    """
    entries = catalogue()
    found: dict[str, NDArray[np.float64]] = {}
    missing = None
    for gauge in ("raw", "canonical"):
        chosen = [entries[f"{gauge}_{mode}_spectrum"] for mode in _MODES]
        reasons = [entry.applies(layer) for entry in chosen]
        if reasons[1] is not None:  # of d_k; that over heads may miss for there is one head
            missing = missing or reasons[1]
            continue
        rows = [
            entry(layer).detach().cpu().numpy() if reason is None else np.full(1, np.nan)
            for entry, reason in zip(chosen, reasons, strict=True)
        ]
        width = max(map(len, rows))
        padded = [np.pad(r, (0, width - len(r)), constant_values=np.nan) for r in rows]
        found[gauge] = np.stack(padded)
    return found, missing


@dataclass(frozen=True, eq=False)
class LayerFigures:
    """Arrays and Figures of layer number `number`; `fits` and `modes` where they were asked for.

    On a page they lie in a fold of the layer's name, which is `open` from the start or not.
    """

    number: int
    layer: LayerNumbers
    modes: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    missing: str | None = None
    fits: Fits | None = None
    open: bool = False

    def store(self, run: Run) -> list[Figure]:
        """Put the arrays into the run, and return the Figures that show them."""
        arrays, figures = self._similarity()
        for make in (self._spectra, self._modes, self._shares):
            more, drawn = make()
            arrays |= more
            figures += drawn
        run.add_arrays(arrays)
        axes = {"fold": self.layer.name, **({"open": "yes"} if self.open else {})}
        return [replace(figure, axes={**figure.axes, **axes}) for figure in figures]

    def _name(self, part: str) -> str:
        return f"layer-{self.number}.{part}"

    def _similarity(self) -> tuple[Arrays, list[Figure]]:
        arrays = {
            self._name("qk_cosines"): self.layer.qk_cosines,
            self._name("ov_cosines"): self.layer.ov_cosines,
        }
        if self.layer.heads == 1:
            return arrays, []
        heads = [str(i) for i in range(self.layer.heads)]
        pairs = ", ".join(f"{i} and {j}" for i, j in self.layer.near_duplicates[:5])
        alike = f"Near-duplicates: {pairs}." if pairs else "No two heads are near-duplicates."
        figures = [
            Figure(
                self._name(f"{which}_similarity"),
                "heatmap",
                f"{self.layer.name}: {what} of its heads",
                f"Cosines of {symbol}_i and {symbol}_j, which no change of basis inside a head "
                f"moves: 1 is the same, 0 unrelated. {alike}",
                {"values": self._name(f"{which}_cosines")},
                axes={"columns": "head", "rows": "head"},
                units={"values": "cosine"},
                labels={"rows": heads, "columns": heads},
            )
            for which, what, symbol in (("qk", "QK forms", "B"), ("ov", "OV maps", "M"))
        ]
        return arrays, figures

    def _spectra(self) -> tuple[Arrays, list[Figure]]:
        arrays: Arrays = {}
        figures = []
        for which, values in (("qk", self.layer.qk_spectrum), ("ov", self.layer.ov_spectrum)):
            x = self._name(f"{which}_component")
            arrays |= {
                x: np.arange(1, values.shape[1] + 1, dtype=float),
                self._name(f"{which}_spectrum"): values,
                self._name(f"{which}_drawn"): _above_rounding(values),
            }
            up_to = " relative to the largest" if self.layer.normed and which == "qk" else ""
            flat = " A flat line is a head that uses all its dimensions."
            figures.append(
                Figure(
                    self._name(f"{which}_spectra"),
                    "lines",
                    f"{self.layer.name}: {which.upper()} spectra",
                    f"Singular values of each head{up_to}, the norm in front folded.{flat}",
                    {"x": x, "y": self._name(f"{which}_drawn")},
                    axes={"x": "component", "y": "singular value", "y_scale": "log"},
                    labels={"series": [f"head {i}" for i in range(self.layer.heads)]},
                )
            )
        return arrays, figures

    def _modes(self) -> tuple[Arrays, list[Figure]]:
        arrays: Arrays = {}
        figures = []
        says = {
            "raw": "Raw gauge: the weights as stored. Basis dependent: another basis inside the "
            "heads computes the same function and has other spectra.",
            "canonical": "Canonical (balanced) gauge: the shortest weights of the same function. "
            "The d_k and d_model spectra are well defined; the head and Q/K/V spectra still hang "
            "on signs that are free, and are not.",
        }
        if self.missing is not None and "raw" in self.modes:
            says["raw"] += f" There is no canonical gauge beside it: {self.missing}."
        for gauge, values in self.modes.items():
            x = self._name(f"{gauge}_mode_component")
            shown = _above_rounding(values[:, :MOST_COMPONENTS])
            arrays |= {
                x: np.arange(1, shown.shape[1] + 1, dtype=float),
                self._name(f"{gauge}_mode_spectra"): values,
                self._name(f"{gauge}_mode_drawn"): shown,
            }
            labels = [
                _AXES[m] + ("" if gauge == "raw" or m in _WELL_DEFINED else " (not well defined)")
                for m in _MODES
            ]
            figures.append(
                Figure(
                    self._name(f"{gauge}_modes"),
                    "lines",
                    f"{self.layer.name}: mode spectra of the raw head tensor, {gauge} gauge",
                    says[gauge],
                    {"x": x, "y": self._name(f"{gauge}_mode_drawn")},
                    axes={"x": "component", "y": "singular value", "y_scale": "log"},
                    labels={"series": labels},
                )
            )
        return arrays, figures

    def _shares(self) -> tuple[Arrays, list[Figure]]:
        if self.fits is None or self.fits.shares is None:
            return {}, []
        shares = self.fits.shares
        cancel = " This fit is degenerate: components grow and cancel, so that single ones mean "
        cancel = f"{cancel}little; use fewer." if self.fits.degenerate else ""
        figure = Figure(
            self._name("cp_shares"),
            "heatmap",
            f"{self.layer.name}: what CP components are made of"
            + (" (degenerate fit)" if self.fits.degenerate else ""),
            "Share of each component's energy in Q, K and V, largest component first. Of the raw "
            f"head tensor, and basis dependent like it.{cancel}",
            {"values": self._name("cp_share")},
            axes={"columns": "weights", "rows": "component"},
            units={"values": "share"},
            labels={
                "rows": [str(r + 1) for r in range(len(shares))],
                "columns": ["Q", "K", "V"],
            },
        )
        return {self._name("cp_share"): shares}, [figure]


def _above_rounding(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`values` without those that are zero up to rounding, which a logarithmic scale would show."""
    kept = values > _ROUNDING * np.nanmax(values, initial=0.0)
    return np.where(kept, values, np.nan)
