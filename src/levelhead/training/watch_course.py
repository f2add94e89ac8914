"""Readings of a watched run as arrays over steps; plain data, no torch.

Axes: p places (in the natural order of their names: layer 2 before layer 10), s steps, increasing.
Missing numbers are nan. Of Readings of one name, place and step the last one counts: those of the
final weights, at the last step, stand behind what was read before that step. A run that was taken
up from step 20 has a Reading `resumed` with value and step 20: what was read before it and has a
later step is superseded (`current`); of Readings with the source "snapshot" one of that source says
so, for another process writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from levelhead.base.records import Reading

__all__ = [
    "RESUMED",
    "Course",
    "Grid",
    "current",
    "ends_of",
    "hidden",
    "natural",
    "place_name",
    "superseded",
    "thinned",
]

Floats = NDArray[np.float64]
RESUMED = "resumed"

Key = tuple[str, int, str]  # layer ("" for the run), head (-1 for the layer), other


def current(readings: Iterable[Reading]) -> list[Reading]:
    """The Readings without those that a resumed run has superseded, and without the marks.

    >>> found = [Reading("loss", 1.0, step=30), Reading(RESUMED, 20, step=20),
    ...          Reading("loss", 2.0, step=21)]
    >>> [reading.value for reading in current(found)]
    [2.0]
    """
    kept: list[Reading] = []
    for reading in readings:
        if reading.name == RESUMED and reading.step is not None:
            kept = [old for old in kept if not superseded(old, reading)]
        else:
            kept.append(reading)
    return kept


def superseded(reading: Reading, mark: Reading) -> bool:
    """Whether a Reading before the mark of a resumed run counts no longer."""
    same = (reading.source == "snapshot") == (mark.source == "snapshot")
    return same and reading.step is not None and reading.step > (mark.step or 0)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts numbers inside names as numbers.

    >>> sorted(["h.10", "h.9", "a"], key=natural)
    ['a', 'h.9', 'h.10']
    """
    parts = re.split(r"(\d+)", name)
    return tuple((int(p.isdecimal()), int(p) if p.isdecimal() else 0, p) for p in parts)


def thinned(count: int, most: int) -> NDArray[np.intp]:
    """At most `most` of `count` positions, evenly spaced, the first and the last among them.

    >>> thinned(9, 5).tolist(), thinned(3, 5).tolist()
    ([0, 2, 4, 6, 8], [0, 1, 2])
    """
    if count <= most:
        return np.arange(count)
    return np.unique(np.round(np.linspace(0, count - 1, most)).astype(np.intp))


@dataclass(frozen=True, eq=False)
class Grid:
    """steps [s], places (p keys) and values [p, s] of one name."""

    steps: Floats
    places: Sequence[Key]
    values: Floats

    @property
    def empty(self) -> bool:
        """Whether there is no number in it."""
        return not bool(np.isfinite(self.values).any())

    def thin(self, most: int) -> Grid:
        """The same at `most` steps or fewer."""
        kept = thinned(len(self.steps), most)
        return Grid(self.steps[kept], self.places, self.values[:, kept])

    def by_layer(self, reduce: Callable[[Floats], Floats]) -> Grid:
        """One row a layer: `reduce` over the heads at each step, those that are nan left out."""
        layers = list(dict.fromkeys(layer for layer, _, _ in self.places))
        rows = np.full((len(layers), len(self.steps)), np.nan)
        for row, layer in enumerate(layers):
            values = self.values[[at for at, key in enumerate(self.places) if key[0] == layer]]
            seen = ~np.isnan(values).all(axis=0)
            rows[row, seen] = reduce(values[:, seen])
        return Grid(self.steps, [(layer, -1, "") for layer in layers], rows)


class Course:
    """Readings sorted by name and place.

    >>> course = Course(Reading("largest_logit", 2.0 * step, where={"layer": "a"}, step=step)
    ...                 for step in (10, 20))
    >>> course.grid("largest_logit").values
    array([[20., 40.]])
    """

    def __init__(self, readings: Iterable[Reading] = ()) -> None:
        self._found: dict[str, dict[Key, tuple[list[int], list[float]]]] = {}
        self.alarms: list[Reading] = []
        for reading in readings:
            self.add(reading)

    def add(self, reading: Reading) -> None:
        """Take one more Reading; one without a step is passed over."""
        if reading.step is None:
            return
        if reading.name.startswith("alarm."):
            self.alarms.append(reading)
            return
        where = reading.where
        head = where.get("head", -1)
        other = where.get("other", "")
        key = (str(where.get("layer", "")), head if isinstance(head, int) else -1, str(other))
        steps, values = self._found.setdefault(reading.name, {}).setdefault(key, ([], []))
        steps.append(reading.step)
        values.append(reading.value)

    @property
    def names(self) -> list[str]:
        """Names of all Readings that were taken, in the order in which they came first."""
        return list(self._found)

    @property
    def last_step(self) -> int:
        """The last step of any Reading; 0 if there is none."""
        places = [steps for found in self._found.values() for steps, _ in found.values()]
        return max((max(steps) for steps in places), default=0)

    def grid(self, name: str) -> Grid:
        """All numbers of a name; no places and no steps if there are none."""
        found = self._found.get(name, {})
        places = sorted(found, key=lambda key: (natural(key[0]), key[1], natural(key[2])))
        each = [np.asarray(found[key][0]) for key in places]
        steps = np.unique(np.concatenate(each)) if each else np.empty(0)
        values = np.full((len(places), len(steps)), np.nan)
        for row, (key, at) in enumerate(zip(places, each, strict=True)):
            # The last one counts: of repeated positions numpy keeps the last assignment.
            values[row, np.searchsorted(steps, at)] = found[key][1]
        return Grid(steps.astype(np.float64), places, values)


def ends_of(row: Floats) -> tuple[float, float]:
    """The first and the last finite number of a row; nan if there is none.

    >>> ends_of(np.array([np.nan, 1.0, 2.0, np.inf]))
    (1.0, 2.0)
    """
    finite = row[np.isfinite(row)]
    return (float(finite[0]), float(finite[-1])) if finite.size else (np.nan, np.nan)


def place_name(layer: str, head: int) -> str:
    """A place in words.

    >>> place_name("enc.0", 3), place_name("enc.0", -1)
    ('enc.0 head 3', 'enc.0')
    """
    return f"{layer} head {head}".strip() if head >= 0 else layer


def hidden(shown: int, count: int, what: str) -> str:
    """What is not drawn, as a sentence; nothing if all is.

    >>> hidden(12, 100, "layers")
    ' Shown are 12 of 100 layers.'
    """
    return "" if shown == count else f" Shown are {shown} of {count} {what}."
