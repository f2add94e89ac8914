"""A forecast as small multiples: history, forecast and intervals, one panel for each channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from levelhead.base.records import Figure, Run
from levelhead.report.parts import (
    NARROW,
    WIDE,
    Floats,
    agree,
    frame,
    key,
    labels_of,
    only_some,
    read,
    remark,
    stroke,
    swatch,
)
from levelhead.report.svg import band, clean, drawing, line, tag
from levelhead.report.ticks import Positions, number, positions, span

__all__ = ["draw_fan"]

MOST_PANELS = 24


@dataclass(frozen=True)
class _Panel:
    """One channel: past [T], ahead [H], low and high [C, H] (widest first), seen [H] or []."""

    name: str
    unit: str
    time: Positions
    past: Floats
    ahead: Floats
    low: Floats
    high: Floats
    seen: Floats

    @property
    def says(self) -> str:
        known = self.past[np.isfinite(self.past)]
        last = number(float(known[-1])) if known.size else "unknown"
        end = number(float(self.ahead[-1])) if self.ahead.size else "unknown"
        return f"Last known value {last}; the forecast ends at {end}."

    def draw(self, width: float, height: float, class_: str = "") -> Markup:
        y = span(self.past, self.ahead, self.low, self.high, self.seen, margin=0.04)
        if y is None:
            nothing = tag("text", "no finite values", class_="tick", x=2.0, y=20.0)
            return drawing(width, 30, self.name, self.says, [nothing], class_)
        axes = frame(width, height, self.time.values, y, self.time.ticks, y_name=self.unit)
        now = len(self.past)
        x = axes.x(self.time.values)
        ahead, content = x[now:], axes.draw()
        for low, high in zip(self.low, self.high, strict=True):
            content += band(ahead, axes.y(low), axes.y(high), class_="band")
        if 0 < now < x.size:
            ends = {"y1": axes.y.end, "y2": axes.y.start}
            middle = float(x[now - 1] + x[now]) / 2
            content.append(tag("line", class_="border", x1=middle, x2=middle, **ends))
        content += line(x[:now], axes.y(self.past), class_="past")
        # The forecast sets out from the last known value, as the eye expects.
        joined = np.r_[self.past[-1:], self.ahead]
        content += line(x[x.size - joined.size :], axes.y(joined), class_="ahead")
        if self.seen.size:
            content += line(ahead, axes.y(self.seen), class_="actual")
        return drawing(width, height, self.name, self.says, content, class_)


def draw_fan(figure: Figure, run: Run) -> Markup:
    """Panels of a fan figure; arrays history [T, D], forecast [H, D], lower and upper [C, H, D]."""
    panels, coverage, total = _panels(figure, run)
    if not panels:
        return remark("There is nothing to draw.")
    drawn = []
    for panel in panels[:MOST_PANELS]:
        if total == 1:
            picture = panel.draw(WIDE, 300, "wide") + panel.draw(NARROW, 220, "narrow")
        else:
            picture = panel.draw(300, 180)
        name = tag("span", panel.name, title=panel.name)
        drawn.append(tag("figure", tag("figcaption", name), picture))
    entries = [(swatch(stroke("past")), "history"), (swatch(stroke("ahead")), "forecast")]
    for depth, share in enumerate(coverage, 1):
        layers = [tag("rect", class_="band", x=1, y=0, width=20, height=10)] * depth
        entries.append((swatch(*layers), f"{share} interval"))
    if panels[0].seen.size:
        entries.append((swatch(stroke("actual")), "what came"))
    return (
        key(entries, panels[0].time.note)
        + tag("div", *drawn, class_="panels one" if total == 1 else "panels")
        + remark(only_some(len(drawn), total, "channels"))
    )


def _panels(figure: Figure, run: Run) -> tuple[list[_Panel], list[str], int]:
    """Panels of the channels to be shown, coverages widest first, number of all channels."""
    history, forecast = read(figure, run, "history", "TD"), read(figure, run, "forecast", "HD")
    lower, upper = read(figure, run, "lower", "CHD"), read(figure, run, "upper", "CHD")
    actual = read(figure, run, "actual", "HD", optional=True)
    agree(figure, "history", history.shape[1:], forecast.shape[1:])
    agree(figure, "lower", lower.shape[1:], forecast.shape)
    agree(figure, "upper", upper.shape, lower.shape)
    if actual.size:
        agree(figure, "actual", actual.shape, forecast.shape)
    steps, total = forecast.shape
    names = labels_of(figure, "channels", total, "channel")
    coverage = labels_of(figure, "coverage", len(lower))
    time = positions(labels_of(figure, "time", len(history) + steps))
    if not time.values.size:
        return [], coverage, total
    # Wide bands first, so that the narrow ones lie on top of them.
    widths = np.nansum(upper - lower, axis=(1, 2))
    order = np.argsort(-widths, kind="stable")
    panels = []
    for at in range(min(total, MOST_PANELS)):
        panels.append(
            _Panel(
                name=clean(names[at]),
                unit=figure.units.get(names[at], figure.units.get("y", "")),
                time=time,
                past=history[:, at],
                ahead=forecast[:, at],
                low=lower[order, :, at],
                high=upper[order, :, at],
                seen=actual[:, at] if actual.size else np.empty(0),
            )
        )
    return panels, [coverage[at] for at in order], total
