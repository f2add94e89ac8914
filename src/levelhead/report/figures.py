"""Each kind of Figure as a drawing: HTML and inline SVG, from stored arrays and labels alone.

A chart is drawn twice, for wide and for narrow pages, so that its text keeps its size; the style
sheet shows one of them. Legends and names of channels are HTML, which wraps by itself. Axis
conventions of the arrays are those of `levelhead.base.records.Figure`.
"""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from levelhead.base.records import Figure, Run
from levelhead.report.fan import draw_fan
from levelhead.report.heatmap import draw_heatmap
from levelhead.report.palette import SERIES
from levelhead.report.parts import (
    Floats,
    agree,
    both,
    frame,
    key,
    labels_of,
    named,
    only_some,
    read,
    remark,
    stroke,
    swatch,
)
from levelhead.report.svg import Scale, drawing, line, shorten, tag, text_width
from levelhead.report.ticks import Tick, fixed, linear_ticks, number, span

__all__ = ["draw"]

MOST_SERIES, MOST_BARS, FEW_POINTS, BROAD = 24, 60, 24, 7
_DASHES = (None, "7 3", "2 2.5", "9 3 2 3")


def draw(figure: Figure, run: Run) -> Markup:
    """The drawing of one Figure, safe to put into a page.

    Raises `InputError` when a role is missing or shapes and labels do not fit one another,
    `StoredFileError` when an array cannot be read.
    """
    kinds = {
        "fan": draw_fan,
        "lines": _draw_lines,
        "heatmap": draw_heatmap,
        "table": _draw_table,
        "bars": _draw_bars,
    }
    return kinds[figure.kind](figure, run)


# ── lines ──


def _draw_lines(figure: Figure, run: Run) -> Markup:
    x, y = read(figure, run, "x", "n"), read(figure, run, "y", "kn")
    mark = run.array(figure.arrays["mark"]).ravel() if "mark" in figure.arrays else x[:0]
    agree(figure, "y", y.shape[1:], x.shape)
    names = labels_of(figure, "series", len(y), "series")
    log = figure.axes.get("y_scale") == "log"
    shown = y[:MOST_SERIES]
    reach = span(shown, log=log)
    places = np.r_[x, mark]
    places = places[np.isfinite(places)]
    if reach is None or not places.size:
        return remark("There is nothing to draw.")
    x_name = named(figure.axes.get("x", ""), figure.units.get("x", ""))
    y_name = named(figure.axes.get("y", ""), figure.units.get("y", ""))
    finite = y[np.isfinite(y)]
    says = f"{len(y)} lines, values from {number(finite.min())} to {number(finite.max())}."

    def ticks(most: int) -> list[Tick]:
        low, high = places.min(), places.max()
        if low == high:
            return [(low, number(low))]
        found = linear_ticks(low, high, most)
        if (places != np.round(places)).any() or max(abs(low), abs(high)) >= 1e6:
            return found
        # Layers and components are counted: there is nothing at one half.
        return [(value, fixed(value, 0)) for value, _ in found if value == round(value)]

    def make(width: float, class_: str) -> Markup:
        height = 320.0 if class_ == "wide" else 250.0
        axes = frame(width, height, places, reach, ticks, x_name=x_name, y_name=y_name, log=log)
        content = axes.draw()
        for at in axes.x(mark):
            ends = {"y1": axes.y.end, "y2": axes.y.start}
            content.append(tag("line", class_="border", x1=float(at), x2=float(at), **ends))
        for place, values in enumerate(shown):
            style = {"class_": _series(place), "stroke_dasharray": _dash(place)}
            few = x.size <= FEW_POINTS
            content += line(axes.x(x), axes.y(values), dots=few, **style)
        return drawing(width, height, figure.title, says, content, class_)

    entries = [
        (swatch(stroke(_series(place), _dash(place))), name)
        for place, name in enumerate(names[:MOST_SERIES])
    ]
    hidden = int((y <= 0).sum()) if log else 0
    return (
        (key(entries) if len(y) > 1 or "series" in figure.labels else Markup(""))
        + both(make)
        + remark(
            only_some(len(shown), len(y), "lines"),
            f"Values left out because they are not positive: {hidden}." if hidden else "",
        )
    )


def _series(place: int) -> str:
    return f"series s{place % SERIES}"


def _dash(place: int) -> str | None:
    return _DASHES[place // SERIES % len(_DASHES)]


# ── bars ──


def _draw_bars(figure: Figure, run: Run) -> Markup:
    values = read(figure, run, "values", "k")
    error = read(figure, run, "error", "k", optional=True)
    if error.size:
        agree(figure, "error", error.shape, values.shape)
    names = labels_of(figure, "names", len(values))[:MOST_BARS]
    shown = values[:MOST_BARS]
    spread = np.nan_to_num(error[:MOST_BARS]) if error.size else np.zeros(shown.size)
    reach = span(np.r_[shown - spread, shown + spread, 0.0], margin=0.0)
    if reach is None or not np.isfinite(shown).any():
        return remark("There is nothing to draw.")
    texts = [
        f"{number(v)} ± {number(e, 2)}" if e and np.isfinite(v) else number(v)
        for v, e in zip(shown, spread, strict=True)
    ]
    says = f"{len(values)} bars, from {number(np.nanmin(values))} to {number(np.nanmax(values))}."

    def make(width: float, class_: str) -> Markup:
        left = min(max(map(text_width, names)), width * 0.36) + 10
        right = max(map(text_width, texts)) + 8
        x = Scale(*reach, left, width - right)
        content = []
        for row, (name, text) in enumerate(zip(names, texts, strict=True)):
            bar = (x, float(shown[row]), float(spread[row]))
            content += _bar(row * 28.0, name, text, left, bar)
        zero = x.at(0.0)
        height = len(names) * 28.0 + 2
        content.append(tag("line", class_="axis", x1=zero, x2=zero, y1=0.0, y2=height))
        return drawing(width, height, figure.title, says, content, class_)

    about = named(figure.axes.get("x", ""), figure.units.get("x", figure.units.get("values", "")))
    return (
        (tag("p", about, class_="about") if about else Markup(""))
        + both(make)
        + remark(only_some(len(shown), len(values), "bars"))
    )


def _bar(
    top: float, name: str, text: str, left: float, bar: tuple[Scale, float, float]
) -> list[Markup]:
    """Name on the left, bar, error line, and the number to the right of both."""
    x, value, spread = bar
    middle = top + 14
    content = [
        tag(
            "text",
            shorten(name, left - 10),
            tag("title", name),
            class_="label",
            x=left - 10,
            y=middle + 4,
            text_anchor="end",
        )
    ]
    end = x.at(0.0)
    if np.isfinite(value):
        ends = sorted((x.at(0.0), x.at(value)))
        shape = {"x": ends[0], "y": top + 6, "width": ends[1] - ends[0], "height": 16.0}
        content.append(tag("rect", class_="bar", rx=1.5, **shape))
        end = ends[1]
    if np.isfinite(value) and spread:
        reach = (x.at(value - spread), x.at(value + spread))
        whisker = {"x1": reach[0], "x2": reach[1], "y1": middle, "y2": middle}
        content += [tag("line", class_=kind, **whisker) for kind in ("halo", "whisker")]
        end = max(end, reach[1])
    return [*content, tag("text", text, class_="tick", x=end + 6, y=middle + 4)]


# ── table ──


def _draw_table(figure: Figure, run: Run) -> Markup:
    values = read(figure, run, "values", "rc")
    rows = labels_of(figure, "rows", values.shape[0])
    columns = labels_of(figure, "columns", values.shape[1])
    best = figure.axes.get("best") == "min"
    head = [tag("th", figure.axes.get("rows", ""), scope="col")]
    for name in columns:
        unit = figure.units.get(name, "")
        head.append(tag("th", name, tag("small", unit) if unit else "", scope="col"))
    notes = labels_of(figure, "notes", len(rows)) if "notes" in figure.labels else []
    if notes:
        head.append(tag("th", "notes", class_="words", scope="col"))
    texts = [_column(column) for column in values.T]
    marked = [_smallest(column) if best else set() for column in values.T]
    body = []
    for r, name in enumerate(rows):
        cells = [
            tag("td", tag("strong", text[r]), class_="best") if r in least else tag("td", text[r])
            for text, least in zip(texts, marked, strict=True)
        ]
        if notes:
            cells.append(tag("td", notes[r], class_="words"))
        body.append(tag("tr", tag("th", tag("span", name, title=name), scope="row"), *cells))
    broad = "broad" if len(columns) + bool(notes) > BROAD else None
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_=broad)
    scroll = tag("div", table, class_="scroll", tabindex="0", role="group", aria_label=figure.title)
    return scroll + remark("The smallest value of each column is in bold." if best else "")


def _column(values: Floats) -> list[str]:
    """Four significant digits, or none behind the point when the whole column is integers."""
    finite = values[np.isfinite(values)]
    if finite.size and (finite == np.round(finite)).all() and np.abs(finite).max() < 1e12:
        return [fixed(v, 0) if np.isfinite(v) else number(v) for v in values.tolist()]
    return [number(v) for v in values.tolist()]


def _smallest(values: Floats) -> set[int]:
    if np.isnan(values).all():
        return set()
    return set(np.flatnonzero(values == np.nanmin(values)).tolist())
