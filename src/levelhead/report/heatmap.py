"""A matrix as coloured cells: one hue, or two around zero when values of both signs occur."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from levelhead.base.records import Figure, Run
from levelhead.report.palette import inks, opacity
from levelhead.report.parts import Floats, both, labels_of, named, read, remark
from levelhead.report.svg import drawing, shorten, tag, text_width
from levelhead.report.ticks import fixed, number, power_of_ten

__all__ = ["draw_heatmap"]

MOST_NUMBERED = 12  # rows and columns up to which numbers are printed in the cells
MOST_CELLS = 128  # rows and columns drawn; larger matrices are shown as means over blocks
_LEVELS = 32


@dataclass(frozen=True)
class _Matrix:
    """values [r, c] with labels; `low` and `high` are the ends of the colour scale."""

    values: Floats
    rows: list[str]
    columns: list[str]
    low: float
    high: float
    title: str
    says: str

    @property
    def numbered(self) -> bool:
        return bool(max(self.values.shape) <= MOST_NUMBERED)

    @property
    def power(self) -> int:
        """Power of ten that is taken out of the numbers in the cells, so that they stay short."""
        largest = float(np.abs(self.values[np.isfinite(self.values)]).max())
        exponent = math.floor(math.log10(largest)) if largest else 0
        return 0 if -3 <= exponent < 5 else exponent

    def _numbers(self) -> list[list[str]]:
        """Texts of all cells with the same number of decimals, about two digits of the largest."""
        values = self.values / 10.0**self.power
        finite = np.abs(values[np.isfinite(values)])
        exponent = math.floor(math.log10(finite.max())) if finite.any() else 0
        decimals = 1 - exponent if exponent < 0 else max(2 - exponent, 0)
        if self.power == 0 and (finite == np.round(finite)).all():
            decimals = 0
        return [
            [fixed(v, decimals) if math.isfinite(v) else number(v) for v in row]
            for row in values.tolist()
        ]

    def shade(self, value: float) -> tuple[str, float]:
        """Hue and opacity of a cell, in 32 steps; no value, no colour."""
        if self.low < 0 < self.high:
            share = abs(value) / max(-self.low, self.high)
            hue = "warm" if value > 0 else "cool"
        else:
            share = (value - self.low) / ((self.high - self.low) or 1.0)
            hue = "cool"
        return hue, opacity(round(min(max(share, 0.0), 1.0) * _LEVELS) / _LEVELS)

    def draw(self, room: float, class_: str) -> Markup:
        """Cells as wide as `room` allows, but never narrower than their numbers."""
        count_rows, count_columns = self.values.shape
        left = min(max(map(text_width, self.rows), default=0.0), room * 0.3) + 8
        texts = self._numbers() if self.numbered else []
        least = max((text_width(t) + 8 for row in texts for t in row), default=0.0)
        wide = min(max((room - left) / max(count_columns, 1), least), max(64.0, least))
        tall = 28.0 if texts else min(wide, 28.0)
        longest = max(map(text_width, self.columns), default=0.0)
        upright = longest > wide - 6
        top = min(longest, 120.0) + 10 if upright else 20.0
        width, height = left + wide * count_columns + 2, top + tall * count_rows + 2
        content = self._cells(left, top, wide, tall)
        content += self._names(left, top, wide, tall, upright)
        for r, row in enumerate(texts):
            for c, text in enumerate(row):
                place = {"x": left + (c + 0.5) * wide, "y": top + (r + 0.5) * tall + 4}
                value = float(self.values[r, c])
                ink = inks(*self.shade(value)) if np.isfinite(value) else "muted"
                content.append(tag("text", text, class_=f"cell {ink}", **place))
        kind = f"{class_} fixed" if width > room else class_
        return drawing(width, height, self.title, self.says, content, kind)

    def _cells(self, left: float, top: float, wide: float, tall: float) -> list[Markup]:
        """One path for each shade: thousands of cells stay small on the page."""
        gap = 1.0 if min(wide, tall) >= 9 else 0.0
        paths: dict[tuple[str, float], list[str]] = {}
        for (r, c), value in np.ndenumerate(self.values):
            if np.isfinite(value):
                corner = f"M{left + c * wide:.1f} {top + r * tall:.1f}"
                size = f"h{wide - gap:.1f}v{tall - gap:.1f}h{gap - wide:.1f}z"
                paths.setdefault(self.shade(float(value)), []).append(corner + size)
        return [
            tag("path", d="".join(cells), class_=hue, fill_opacity=alpha)
            for (hue, alpha), cells in sorted(paths.items())
        ]

    def _names(
        self, left: float, top: float, wide: float, tall: float, upright: bool
    ) -> list[Markup]:
        """Names of rows and columns, every n-th when there is no room for all."""
        drawn = []
        every = _every(len(self.rows), 15 / tall)
        for at in range(0, len(self.rows), every):
            name = shorten(self.rows[at], left - 8)
            place = {"x": left - 6, "y": top + (at + 0.5) * tall + 4, "text_anchor": "end"}
            drawn.append(tag("text", name, tag("title", self.rows[at]), class_="tick", **place))
        every = _every(len(self.columns), 15 / wide)
        for at in range(0, len(self.columns), every):
            x, y = left + (at + 0.5) * wide, top - 6
            name = shorten(self.columns[at], top - 10 if upright else wide)
            turn = f"rotate(-90 {x + 4:.1f} {y:.1f})" if upright else None
            place = {"x": x + 4 if upright else x, "y": y, "transform": turn}
            anchor = "start" if upright else "middle"
            title = tag("title", self.columns[at])
            drawn.append(tag("text", name, title, class_="tick", text_anchor=anchor, **place))
        return drawn


def draw_heatmap(figure: Figure, run: Run) -> Markup:
    """Cells of a heatmap figure; array values [r, c], labels rows (r) and columns (c)."""
    values = read(figure, run, "values", "rc")
    rows = labels_of(figure, "rows", values.shape[0])
    columns = labels_of(figure, "columns", values.shape[1])
    finite = values[np.isfinite(values)]
    if not finite.size:
        return remark("There is nothing to draw.")
    low, high = float(finite.min()), float(finite.max())
    if 0 < low < 0.3 * high:
        low = 0.0
    block = -(-max(values.shape) // MOST_CELLS)
    says = f"{len(rows)} rows, {len(columns)} columns, values from {number(low)} to {number(high)}."
    matrix = _Matrix(
        _means(values, block), rows[::block], columns[::block], low, high, figure.title, says
    )
    unit = figure.units.get("values", "")
    down, across = (
        figure.axes.get("rows", figure.axes.get("y", "")),
        figure.axes.get("columns", figure.axes.get("x", "")),
    )
    return (
        _legend(low, high, unit)
        + tag(
            "div",
            both(matrix.draw),
            class_="scroll",
            tabindex="0",
            role="group",
            aria_label=figure.title,
        )
        + remark(
            f"Rows: {down}; columns: {across}." if down and across else "",
            f"Numbers are multiples of {power_of_ten(matrix.power)}."
            if matrix.numbered and matrix.power
            else "",
            f"Each cell is the mean over {block} × {block} values." if block > 1 else "",
        )
    )


def _every(count: int, least: float) -> int:
    """Of `count` labels every n-th is shown: at least `least` cells apart, about 24 in all."""
    return max(int(np.ceil(max(least, count / 24))), 1)


def _means(values: Floats, block: int) -> Floats:
    """Means over blocks of `block` × `block`, nan left out; [r, c] → [⌈r/b⌉, ⌈c/b⌉]."""
    if block == 1:
        return values
    starts = [np.arange(0, size, block) for size in values.shape]
    sums, counts = np.nan_to_num(values), np.isfinite(values).astype(np.float64)
    for axis, begins in enumerate(starts):
        sums = np.add.reduceat(sums, begins, axis=axis)
        counts = np.add.reduceat(counts, begins, axis=axis)
    means: Floats = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return means


def _legend(low: float, high: float, unit: str) -> Markup:
    around = low < 0 < high
    ends = (-max(-low, high), max(-low, high)) if around else (low, high)
    ramp = tag("i", class_="ramp around" if around else "ramp")
    texts = [tag("span", number(end, 3)) for end in ends]
    return tag("div", texts[0], ramp, texts[1], tag("span", named("", unit)), class_="scale")
