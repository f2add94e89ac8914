"""A very small drawing kit: escaped elements, scales, lines with gaps, axes that do not collide.

Lengths are in units of the view box, y grows downwards. Colours and sizes of text come from
classes of the page's style sheet, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from levelhead.report.ticks import Tick

__all__ = ["Frame", "Scale", "band", "clean", "drawing", "line", "shorten", "tag", "text_width"]

Floats = NDArray[np.float64]
TEXT = 12.0  # size of all text in a drawing; the style sheet uses the same
_NARROW, _WIDE = frozenset("iljtfrI.,:;'|!()[]·- \u202f"), frozenset("mwMWQO@%—…")


def clean(text: str) -> str:
    r"""`text` without characters that HTML forbids or that would break the encoding.

    >>> clean("a\x00b\x1b[0m\ud800")
    'a�b�[0m�'
    """
    text = " ".join(text.splitlines()).replace("\t", " ")
    return "".join("�" if unicodedata.category(sign) in ("Cc", "Cs") else sign for sign in text)


def text_width(text: str, size: float = TEXT) -> float:
    """Width of `text` in a sans-serif face, estimated for a wide face (DejaVu)."""
    widths = 0.0
    for sign in text:
        if unicodedata.east_asian_width(sign) in "WF":
            widths += 1.05
        elif sign in _NARROW:
            widths += 0.41
        else:
            widths += 1.0 if sign in _WIDE else 0.76 if sign.isupper() else 0.64
    return widths * size


def shorten(text: str, room: float, size: float = TEXT) -> str:
    """`text`, cut with an ellipsis so that it fits into `room`.

    >>> shorten("temperature", 500), shorten("temperature", 40)
    ('temperature', 'tem…')
    """
    if text_width(text, size) <= room:
        return text
    while text and text_width(text + "…", size) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """One element; content and attributes are escaped, `class_` and `stroke_width` are spelt out.

    >>> tag("text", "a < b", class_="tick", x=1.25, y=3.0)
    Markup('<text class="tick" x="1.25" y="3">a &lt; b</text>')
    """
    parts = []
    for key, value in attributes.items():
        if value is None:
            continue
        if isinstance(value, float):
            value = f"{value:.2f}".rstrip("0").rstrip(".")
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"')
    inner = "".join(escape(_plain(part)) for part in content)
    return Markup(f"<{name}{''.join(parts)}>{inner}</{name}>")


def _plain(value: object) -> object:
    if isinstance(value, Markup):
        return value
    return clean(value) if isinstance(value, str) else value


def drawing(
    width: float, height: float, title: str, says: str, content: Iterable[Markup], class_: str = ""
) -> Markup:
    """An svg with a title and a description for those who do not see it."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", says),
        *content,
        class_=f"drawing {class_}".strip(),
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=width,
        height=height,
        role="img",
        aria_label=f"{title}. {says}",
    )


@dataclass(frozen=True)
class Scale:
    """A map from values in [low, high] to lengths between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, values: Floats | float) -> Floats:
        """Lengths of `values`; nan where a value has none (not finite, or not positive on log)."""
        values = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.log:
            values = np.log(np.where(values > 0, values, np.nan))
            low, high = math.log(low), math.log(high)
        share = (np.where(np.isfinite(values), values, np.nan) - low) / ((high - low) or 1.0)
        return np.asarray(self.start + share * (self.end - self.start))

    def at(self, value: float) -> float:
        """The length of one value."""
        return float(self(value))


def _pieces(good: NDArray[np.bool_]) -> list[slice]:
    """Runs of consecutive true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def line(x: Floats, y: Floats, *, dots: bool = False, **attributes: object) -> list[Markup]:
    """A line through the points, broken where one is nan; a point on its own becomes a dot."""
    drawn = []
    steps = []
    lonely = []
    for piece in _pieces(np.isfinite(x) & np.isfinite(y)):
        if piece.stop - piece.start == 1 or dots:
            lonely += list(range(piece.start, piece.stop))
        if piece.stop - piece.start > 1:
            steps.append(_path(*_thinned(x[piece], y[piece])))
    if steps:
        drawn.append(tag("path", d="".join(steps), fill="none", **attributes))
    dot = {key: value for key, value in attributes.items() if key != "stroke_dasharray"}
    dot["class_"] = f"{dot.get('class_', '')} dot".strip()
    return drawn + [tag("circle", cx=float(x[i]), cy=float(y[i]), r=2.0, **dot) for i in lonely]


def band(x: Floats, lower: Floats, upper: Floats, **attributes: object) -> list[Markup]:
    """The area between two lines; a single point becomes a narrow bar."""
    steps = []
    for piece in _pieces(np.isfinite(x) & np.isfinite(lower) & np.isfinite(upper)):
        xs, low, high = x[piece], lower[piece], upper[piece]
        if xs.size == 1:
            xs, low, high = xs + np.array([-3.0, 3.0]), np.repeat(low, 2), np.repeat(high, 2)
        steps.append(_path(np.r_[xs, xs[::-1]], np.r_[high, low[::-1]]) + "Z")
    return [tag("path", d="".join(steps), stroke="none", **attributes)] if steps else []


def _path(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _thinned(x: Floats, y: Floats, most: int = 1600) -> tuple[Floats, Floats]:
    """Of more than `most` points, the lowest and highest of each stretch, in their own order."""
    if x.size <= most:
        return x, y
    keep = {0, x.size - 1}
    for stretch in np.array_split(np.arange(x.size), most // 2):
        keep |= {int(stretch[y[stretch].argmin()]), int(stretch[y[stretch].argmax()])}
    order = sorted(keep)
    return x[order], y[order]


@dataclass(frozen=True)
class Frame:
    """The plotting area of one chart: its scales and the ticks on them."""

    x: Scale
    y: Scale
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    width: float
    x_name: str = ""
    y_name: str = ""

    def draw(self) -> list[Markup]:
        """Horizontal rules, tick labels and the names of both axes; labels never touch."""
        left, right = self.x.start, self.x.end
        bottom = self.y.start
        drawn = []
        for value, label in self.y_ticks:
            at = self.y.at(value)
            drawn.append(tag("line", class_="rule", x1=left, x2=right, y1=at, y2=at))
            place = {"x": left - 6, "y": at + 3.5, "text_anchor": "end"}
            drawn.append(tag("text", label, class_="tick", **place))
        free = -math.inf
        for value, label in self.x_ticks:
            half = text_width(label) / 2
            at = self.x.at(value)
            middle = min(max(at, half), self.width - half)
            if middle - half < free:
                continue
            free = middle + half + 8
            drawn.append(tag("line", class_="axis", x1=at, x2=at, y1=bottom, y2=bottom + 4))
            place = {"x": middle, "y": bottom + 16, "text_anchor": "middle"}
            drawn.append(tag("text", label, class_="tick", **place))
        drawn.append(tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
        if self.y_name:
            drawn.append(
                tag("text", shorten(self.y_name, self.width - 4), class_="name", x=0.0, y=12.0)
            )
        if self.x_name:
            name = shorten(self.x_name, right - 4)
            place = {"x": right, "y": bottom + 31, "text_anchor": "end"}
            drawn.append(tag("text", name, class_="name", **place))
        return drawn
