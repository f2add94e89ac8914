"""What the kinds of Figure share: reading roles and labels, legends, remarks, axes of a chart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from levelhead.base.errors import InputError
from levelhead.base.records import Figure, Run
from levelhead.report.svg import Frame, Scale, tag, text_width
from levelhead.report.ticks import Tick, linear_ticks, log_ticks

__all__ = [
    "NARROW",
    "WIDE",
    "Floats",
    "agree",
    "both",
    "frame",
    "key",
    "labels_of",
    "named",
    "only_some",
    "read",
    "remark",
    "stroke",
    "swatch",
]

Floats = NDArray[np.float64]
WIDE, NARROW = 900.0, 350.0  # a chart is drawn in both widths; the style sheet shows one


def read(figure: Figure, run: Run, role: str, axes: str, optional: bool = False) -> Floats:
    """The array of a role as float64; `axes` names its axes, one letter each.

    An optional role that is absent gives an array of length zero. Raises `InputError` when a
    required role is absent or the number of axes is another.
    """
    if role not in figure.arrays:
        if optional:
            return np.empty((0,) * len(axes))
        raise InputError(
            f"Figure {figure.name!r} has no array for {role!r}: a figure of kind {figure.kind} "
            f"needs one of shape [{', '.join(axes)}]."
        )
    values = np.asarray(run.array(figure.arrays[role]), dtype=np.float64)
    if values.ndim != len(axes):
        raise InputError(
            f"The array for {role!r} of figure {figure.name!r} has shape {list(values.shape)}: "
            f"[{', '.join(axes)}] is expected."
        )
    return values


def agree(figure: Figure, role: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise `InputError` unless two shapes of a figure's arrays are the same."""
    if tuple(found) != tuple(wanted):
        raise InputError(
            f"The array for {role!r} of figure {figure.name!r} has sizes {list(found)} where the "
            f"others have {list(wanted)}: the same are expected."
        )


def labels_of(figure: Figure, role: str, count: int, word: str = "") -> list[str]:
    """`count` labels, numbered from one if the figure names none; `InputError` on another count."""
    given = figure.labels.get(role)
    if given is None:
        return [f"{word} {place}".strip() for place in range(1, count + 1)]
    if len(given) != count:
        raise InputError(
            f"Figure {figure.name!r} has {len(given)} labels for {role!r}: {count} are expected."
        )
    return list(given)


def named(name: str, unit: str) -> str:
    """Name and unit as an axis shows them.

    >>> named("wind", "m/s"), named("", "m/s"), named("wind", "")
    ('wind (m/s)', 'm/s', 'wind')
    """
    return f"{name} ({unit})" if name and unit else name or unit


def only_some(shown: int, total: int, word: str) -> str:
    """The sentence that owns up to what is left out; empty if nothing is."""
    return f"The first {shown} of {total} {word} are shown." if shown < total else ""


def remark(*sentences: str) -> Markup:
    """A paragraph below a drawing, or nothing."""
    text = " ".join(sentence for sentence in sentences if sentence)
    return tag("p", text, class_="remark") if text else Markup("")


def key(entries: Iterable[tuple[Markup, str]], note: str = "") -> Markup:
    """A legend: swatches with their names, and a note at the end."""
    items = [tag("li", picture, tag("span", name)) for picture, name in entries]
    if note:
        items.append(tag("li", note, class_="note"))
    return tag("ul", *items, class_="key") if items else Markup("")


def swatch(*content: Markup) -> Markup:
    """The little picture of a legend entry; its name stands beside it."""
    return tag("svg", *content, class_="swatch", viewBox="0 0 22 10", aria_hidden="true")


def stroke(class_: str, dash: str | None = None) -> Markup:
    """A stretch of line for a swatch."""
    return tag("line", class_=class_, x1=1, x2=21, y1=5, y2=5, stroke_dasharray=dash)


def both(make: Callable[[float, str], Markup]) -> Markup:
    """The same drawing for wide and for narrow pages."""
    return make(WIDE, "wide") + make(NARROW, "narrow")


def frame(
    width: float,
    height: float,
    x: Floats,
    y: tuple[float, float],
    x_ticks: Callable[[int], list[Tick]],
    *,
    x_name: str = "",
    y_name: str = "",
    log: bool = False,
) -> Frame:
    """Axes of a chart: `x` are all positions, `y` the span; `x_ticks` gives at most n ticks."""
    y_ticks = (log_ticks if log else linear_ticks)(*y, max(int(height // 38), 3))
    left = max([text_width(label) for _, label in y_ticks], default=0.0) + 8
    top, bottom = (26.0 if y_name else 8.0), height - (37.0 if x_name else 22.0)
    low, high = float(x.min()), float(x.max())
    if low == high:
        low, high = low - 1, high + 1
    return Frame(
        x=Scale(low, high, left, width - 8),
        y=Scale(*y, bottom, top, log),
        x_ticks=x_ticks(max(int((width - left) // 62), 2)),
        y_ticks=y_ticks,
        width=width,
        x_name=x_name,
        y_name=y_name,
    )
