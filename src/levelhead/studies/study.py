"""What a study is: settings, a grid of cells, the run of one cell, and what follows from them all.

A study is one file of this folder that ends in a `Study`. Its cells are independent: each is a
function of the settings and of what the cell is told, so that they may run anywhere, in any order,
and twice. What is concluded is a function of what the cells left behind, and of nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from levelhead.base.errors import InputError
from levelhead.base.records import Figure, Reading

__all__ = [
    "Cell",
    "Findings",
    "Outcome",
    "Statement",
    "Study",
    "StudySettings",
    "Table",
    "Workspace",
    "grid",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]{0,99}")
Given = str | int | float | bool
S = TypeVar("S", bound="StudySettings")


class StudySettings(BaseModel):
    """Settings that every study has; a study's own class adds its fields, each with a default.

    Attributes:
        seeds: how many seeds (0, 1, …) each cell of the grid is run with.
        threads: of each run; recorded, for sums may depend on it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seeds: int = Field(default=3, ge=1)
    threads: int = Field(default=1, ge=1)


@dataclass(frozen=True)
class Cell:
    """One run of a study: its name, unique and fit for a file, and what it is told.

    >>> Cell("sam-0", {"arm": "sam", "seed": 0}).given["arm"]
    'sam'
    """

    name: str
    given: Mapping[str, Given]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"The cell name {self.name!r} cannot be a folder's: use letters, digits, '_.=-'."
            )


def grid(**axes: Sequence[Given]) -> list[Cell]:
    """The cells of a full grid, the last axis fastest; names join the values by "-".

    >>> [cell.name for cell in grid(arm=["sam", "line"], seed=[0, 1])]
    ['sam-0', 'sam-1', 'line-0', 'line-1']
    """
    cells: list[dict[str, Given]] = [{}]
    for axis, values in axes.items():
        cells = [{**cell, axis: value} for cell in cells for value in values]
    return [
        Cell("-".join(f"{v:g}" if isinstance(v, float) else str(v) for v in c.values()), c)
        for c in cells
    ]


@dataclass(frozen=True)
class Workspace:
    """Where a cell may keep what a second start of it goes on from."""

    folder: Path

    def state(self, name: str = "training", ending: str = "safetensors") -> Path:
        """Path of a resumable state; it may exist from an earlier, unfinished start."""
        return self.folder / f"{name}.state.{ending}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one cell found.

    Args:
        readings: numbers; the study's own names.
        arrays: named arrays (curves, matrices).
        notes: sentences, such as that a training diverged.
        seconds: what took how long; kept apart from all else, for it never repeats.
    """

    readings: Sequence[Reading] = ()
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def value(self, name: str, **where: str | int) -> float:
        """The reading of that name and place; nan if there is none."""
        for reading in self.readings:
            if reading.name == name and all(reading.where.get(k) == v for k, v in where.items()):
                return reading.value
        return float("nan")


@dataclass(frozen=True)
class Statement:
    """A claim held against numbers.

    Args:
        name: short and unique.
        claim: the sentence that is checked, worded before the numbers were known.
        holds: whether the numbers bear it out; None if they do not exist (a cell was left out).
        evidence: the sentence with the numbers.
        expected: whether a failure makes the study fail. A question (expected=False) is only
            answered.
    """

    name: str
    claim: str
    holds: bool | None
    evidence: str
    expected: bool = True

    @property
    def failed(self) -> bool:
        """Whether this makes the exit code 1."""
        return self.expected and not self.holds

    def __str__(self) -> str:
        verdict = {True: "Holds", False: "Fails", None: "Not judged"}[self.holds]
        if not self.expected:
            verdict = {True: "Yes", False: "No", None: "Not judged"}[self.holds]
        return f"{verdict}: {self.claim} {self.evidence}"


@dataclass(frozen=True, eq=False)
class Table:
    """Numbers with names for rows and columns: values [r, c], nan where there is none."""

    name: str
    title: str
    says: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: NDArray[np.float64]
    row_axis: str = ""
    best: str = ""

    def figure(self) -> Figure:
        """The Figure that draws it; its array is called "table.<name>"."""
        axes = {"rows": self.row_axis} if self.row_axis else {}
        if self.best:
            axes["best"] = self.best
        labels = {"rows": list(self.rows), "columns": list(self.columns)}
        array = {"values": f"table.{self.name}"}
        return Figure(self.name, "table", self.title, self.says, array, axes=axes, labels=labels)

    def csv(self) -> str:
        """The table as text; the same numbers give the same bytes."""
        lines = [",".join([self.row_axis or "row", *map(_quoted, self.columns)])]
        for row, values in zip(self.rows, self.values, strict=True):
            lines.append(",".join([_quoted(row), *(f"{value:.9g}" for value in values)]))
        return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f'"{text}"' if "," in text else text


@dataclass(frozen=True, eq=False)
class Findings:
    """What follows from the outcomes: tables, arrays, Figures, statements, computed sentences."""

    tables: Sequence[Table] = ()
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    statements: Sequence[Statement] = ()
    conclusion: Sequence[str] = ()


@dataclass(frozen=True)
class Study(Generic[S]):
    """A study: what `levelhead study NAME` runs.

    Args:
        name: the file's name.
        title, question: for the report.
        settings: class of its settings.
        presets: overrides of the defaults for "quick" and "full" (and "standard", usually none).
        cells: the grid; run: one cell; conclude: outcomes by cell name → findings. Cells that
            failed are not among the outcomes. All three are functions of a module, for they travel
            to other processes by name.
        limits: sentences about what is not examined, which the report prints.
        follow: cells that can be named once others have run: settings and outcomes → cells, those
            that were named before among them or not. It is asked again until nothing new comes.
    """

    name: str
    title: str
    question: str
    settings: type[S]
    presets: Mapping[str, Mapping[str, Any]]
    cells: Callable[[S], Sequence[Cell]]
    run: Callable[[S, Cell, Workspace], Outcome]
    conclude: Callable[[S, Mapping[str, Outcome]], Findings]
    limits: Callable[[S], Sequence[str]] = lambda _settings: ()
    follow: Callable[[S, Mapping[str, Outcome]], Sequence[Cell]] = lambda _settings, _outcomes: ()
