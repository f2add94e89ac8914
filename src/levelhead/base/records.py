"""What a command or study leaves behind: Readings, arrays, Figures and notes in one run folder.

Everything here is plain data: written by whatever computes, read by `report` without the code
(or the libraries) that made it. A run folder holds

    settings.json               schema, title, command, settings, versions
    readings-<writer>.jsonl     one Reading a line, append-only; one file for each writer
    arrays-<digest>.safetensors one file for each call of `add_arrays`
    figures.json, notes.json    Figures in order, plain sentences in order

Any number of processes may add Readings and arrays at once, each under its own writer name;
Figures and notes are the business of one process, usually the one that created the run.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from levelhead.base.errors import InputError, LevelheadError, StoredFileError
from levelhead.base.files import (
    append_lines,
    broken_file,
    read_json,
    write_atomically,
    write_json,
)
from levelhead.base.plain_values import plain_value, refuse_changes, same_bits, versions

__all__ = ["FIGURE_KINDS", "RUN_FILES", "Figure", "Reading", "Run"]

SCHEMA = 1
FIGURE_KINDS = ("fan", "lines", "heatmap", "table", "bars")
RUN_FILES = (
    "settings.json",
    "figures.json",
    "notes.json",
    "readings-*.jsonl",
    "arrays-*.safetensors",
)
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_DRAWN = re.compile(r"~[0-9a-f]{12}$")  # arrays of figures that are drawn again


@dataclass(frozen=True)
class Reading:
    """One number: name, value, unit, where it was read (layer, head, …), step and source.

    `where` holds text and whole numbers; `value` may be nan or infinite. Raises `InputError` for
    anything that is not a number.

    >>> Reading("entropy", 1.5, unit="nat", where={"layer": 0, "head": 3}, step=10).value
    1.5
    """

    name: str
    value: float
    unit: str = ""
    where: Mapping[str, str | int] = field(default_factory=dict)
    step: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        try:
            where = {
                str(key): place if isinstance(place, str) else operator.index(place)
                for key, place in self.where.items()
            }
            step = None if self.step is None else operator.index(self.step)
            value = float(self.value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"Reading {self.name!r} was given value {self.value!r}, where {self.where!r} and "
                f"step {self.step!r}: a real number, text or whole numbers, and a whole number or "
                "None are expected."
            ) from error
        for part, content in (("value", value), ("where", where), ("step", step)):
            object.__setattr__(self, part, content)


@dataclass(frozen=True)
class Figure:
    """What is to be drawn: kind, the stored arrays by role, names of axes, units and labels.

    `says` is the sentence that tells what to see. Roles by kind (`[…]` are shapes):

    fan      history [T, D], forecast [H, D], lower [C, H, D], upper [C, H, D], optional
             actual [H, D]; labels channels (D), coverage (C, such as "80%"), time (T + H, ISO
             dates or whole numbers); units by channel name, or "y" for all
    lines    x [n], y [k, n] (nan leaves a gap), optional mark [m] (x positions); labels series (k);
             axes {"y_scale": "log"} for a logarithmic scale
    heatmap  values [r, c]; labels rows (r), columns (c)
    table    values [r, c]; labels rows, columns; axes {"best": "min"} marks each column's smallest
    bars     values [k], optional error [k]; labels names (k)

    axes may name "x" and "y" (of a heatmap or table: "columns" and "rows"); units are those of
    "x", "y" or "values". Raises `InputError` for an unknown kind.

    >>> Figure("loss", "lines", "Loss", "It falls.", {"x": "loss.x", "y": "loss.y"}).kind
    'lines'
    """

    name: str
    kind: str
    title: str
    says: str
    arrays: Mapping[str, str]
    axes: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in FIGURE_KINDS:
            raise InputError(
                f"Figure {self.name!r} was given the kind {self.kind!r}: "
                f"one of {', '.join(FIGURE_KINDS)} is expected."
            )
        for role in ("arrays", "axes", "units"):
            plain = {str(key): str(text) for key, text in getattr(self, role).items()}
            object.__setattr__(self, role, plain)
        labels = {
            str(key): tuple(str(text) for text in texts) for key, texts in self.labels.items()
        }
        object.__setattr__(self, "labels", labels)


class Run:
    """A folder of records; make one with `Run.create`, read one with `Run.open`.

    >>> import tempfile
    >>> run = Run.create(tempfile.mkdtemp(), title="A try", command=None, settings={"horizon": 96})
    >>> run.add_readings([Reading("mse", 0.37), Reading("mse", float("nan"), step=2)])
    >>> [reading.value for reading in Run.open(run.folder).readings()]
    [0.37, nan]
    """

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        """Used by `create` and `open`; `head` is the content of settings.json."""
        self._folder = folder
        self._head = head
        self._where_arrays_lie: dict[str, Path] = {}
        self._indexed: set[Path] = set()

    # ── making and opening ──

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        *,
        title: str,
        command: str | None,
        settings: Mapping[str, Any],
        resume: bool = False,
    ) -> Run:
        """Make `folder` a run, or with `resume` take up the run that is already there.

        Files that are not a run's are left alone. Settings may hold text, numbers, booleans,
        None, paths, and lists and mappings of these; a number that is not finite is kept as text.

        Raises `InputError` when the folder already holds a run and `resume` is false, when
        resumed settings differ from the stored ones, or when a setting cannot be stored;
        `LevelheadError` when the folder cannot be written.
        """
        folder = Path(folder)
        stored = {str(key): plain_value(value, str(key)) for key, value in settings.items()}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LevelheadError(
                f"{folder} cannot be made a folder ({error.strerror or error}): "
                "choose another place for the run."
            ) from error
        used = sorted({path.name for pattern in RUN_FILES for path in folder.glob(pattern)})
        if used and not resume:
            raise InputError(
                f"{folder} already holds a run ({used[0]}): "
                "choose an empty folder, or resume the run that is there (--resume)."
            )
        if used:
            run = cls.open(folder)
            refuse_changes(folder, run.settings, stored)
            return run
        head = {
            "schema": SCHEMA,
            "title": title,
            "command": command,
            "settings": stored,
            "versions": versions(),
        }
        write_json(folder / "settings.json", head)
        return cls(folder, head)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Run:
        """Read the run in `folder`; settings, figures, notes and headers of arrays are checked.

        Raises `StoredFileError` when the folder is not a run, when a file in it is truncated or
        altered, or when it was written by a newer version.
        """
        folder = Path(folder)
        path = folder / "settings.json"
        if not path.is_file():
            raise StoredFileError(
                f"{folder} is not a run folder: a settings.json is expected in it."
            )
        head = read_json(path)
        if not isinstance(head, dict) or not isinstance(head.get("schema"), int):
            raise StoredFileError(
                f"{path} is not a run's: a JSON object with a whole number under 'schema' "
                "is expected; choose a folder that levelhead wrote."
            )
        if head["schema"] > SCHEMA:
            raise StoredFileError(
                f"{folder} was written by a newer version (schema {head['schema']}, this one reads "
                f"up to {SCHEMA}): upgrade levelhead to open it."
            )
        if missing := {"title", "settings", "versions"} - head.keys():
            raise StoredFileError(
                f"{path} lacks {', '.join(sorted(missing))}: the file was altered; "
                "restore it or run the command again."
            )
        run = cls(folder, head)
        run.figures(), run.notes(), run.array_names()
        return run

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self._folder

    @property
    def title(self) -> str:
        """What the run is called."""
        return str(self._head["title"])

    @property
    def command(self) -> str | None:
        """The command line that made the run, if one did."""
        command = self._head.get("command")
        return None if command is None else str(command)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as stored (a copy)."""
        return dict(self._head["settings"])

    @property
    def versions(self) -> dict[str, str]:
        """Versions of python, levelhead, numpy, torch (if installed) and the platform."""
        return dict(self._head["versions"])

    # ── readings ──

    def add_readings(self, readings: Iterable[Reading], writer: str = "main") -> None:
        """Append Readings to the file of `writer` and hand them to the system at once.

        Each process that adds Readings needs a writer name of its own (letters, digits, `_.-`).
        Half a line left by a process that was killed is removed before anything is added.

        Raises `InputError` for a writer name that cannot be part of a file name,
        `LevelheadError` when the file cannot be written.
        """
        if not _WRITER.fullmatch(writer):
            raise InputError(
                f"The writer name {writer!r} cannot be part of a file name: "
                "use letters, digits, '_', '.' and '-'."
            )
        lines = b"".join(_to_line(reading) for reading in readings)
        append_lines(self._folder / f"readings-{writer}.jsonl", lines)

    def readings(self) -> list[Reading]:
        """All Readings: writers in the order of their names, lines in the order written.

        The last line of a file is ignored unless its line end was written. Raises
        `StoredFileError` with file and line when any other line cannot be read.
        """
        found: list[Reading] = []
        for path in sorted(self._folder.glob("readings-*.jsonl")):
            *lines, _unfinished = path.read_bytes().split(b"\n")
            found += [_from_line(line, path, number) for number, line in enumerate(lines, 1)]
        return found

    # ── arrays ──

    def add_arrays(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store named arrays in one new file; shapes and types are kept bit for bit.

        Names are unique in a run: adding the same content again (as a resumed command does)
        changes nothing, other content under a used name is refused. Booleans, integers and
        floats up to 64 bits can be stored. Raises `InputError` for anything else.
        """
        here = set(self.array_names())
        new: dict[str, NDArray[Any]] = {}
        for name, given in arrays.items():
            # Any other memory layout would be stored in the wrong order without a word.
            array = np.array(given, order="C", copy=None)
            if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
                raise InputError(
                    f"Array {name!r} has the type {array.dtype}: booleans, integers or floats "
                    "of up to 64 bits are expected."
                )
            if name not in here:
                new[name] = array
            elif not same_bits(self.array(name), array):
                raise InputError(
                    f"The run already holds another array named {name!r}: choose a new name."
                )
        if new:
            digest = hashlib.sha256("\0".join(sorted(new)).encode()).hexdigest()[:16]
            write_atomically(self._folder / f"arrays-{digest}.safetensors", to_safetensors(new))

    def array(self, name: str) -> NDArray[Any]:
        """The array stored under `name`, as it was given.

        Raises `InputError` for a name the run does not hold, `StoredFileError` for a bad file.
        """
        if name not in self._where_arrays_lie and name not in self.array_names():
            raise InputError(
                f"The run in {self._folder} holds no array named {name!r}: "
                f"it holds {', '.join(self.array_names()) or 'none'}."
            )
        path = self._where_arrays_lie[name]
        try:
            with safe_open(path, framework="numpy") as file:
                return np.asarray(file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise broken_file(path, error) from error

    def array_names(self) -> list[str]:
        """Names of all stored arrays, in alphabetical order."""
        for path in self._folder.glob("arrays-*.safetensors"):
            if path in self._indexed:
                continue
            try:
                with safe_open(path, framework="numpy") as file:
                    self._where_arrays_lie |= dict.fromkeys(file.keys(), path)
            except (SafetensorError, OSError) as error:
                raise broken_file(path, error) from error
            self._indexed.add(path)
        return sorted(self._where_arrays_lie)

    # ── figures and notes ──

    def add_figures(self, figures: Iterable[Figure]) -> None:
        """Append Figures, in the order in which they are to be shown.

        Names are unique: the same Figure again changes nothing, a different one of the same name
        is refused, and so is one that names an array the run does not hold (`InputError`).
        """
        by_name = {figure.name: figure for figure in self.figures()}
        for figure in figures:
            if by_name.setdefault(figure.name, figure) != figure:
                raise InputError(
                    f"The run already holds another figure named {figure.name!r}: "
                    "choose a new name."
                )
        self._write_figures(by_name.values())

    def replace_figures(
        self, figures: Iterable[Figure], arrays: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Put Figures in the place of those of the same names, and new ones at the end.

        For what is drawn again while a run grows. `arrays` belong to these Figures alone: they are
        stored under their names with a `~` and a digest of their content, which the Figures are
        made to name, so that the next drawing may hold other values; those that no Figure names
        any more are removed. Raises `InputError` as `add_figures` and `add_arrays`.

        >>> import tempfile
        >>> run = Run.create(tempfile.mkdtemp(), title="A try", command=None, settings={})
        >>> loss = Figure("loss", "lines", "Loss", "It falls.", {"x": "x", "y": "y"})
        >>> for n in (2, 3):
        ...     run.replace_figures([loss], {"x": np.arange(n), "y": np.ones((1, n))})
        >>> [run.array(figure.arrays["x"]) for figure in run.figures()], len(run.array_names())
        ([array([0, 1, 2])], 2)
        """
        given = {name: np.array(a, order="C", copy=None) for name, a in (arrays or {}).items()}
        digest = hashlib.sha256()
        for name, array in sorted(given.items()):
            digest.update(f"{name}\0{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
        stored = {name: f"{name}~{digest.hexdigest()[:12]}" for name in given}
        self.add_arrays({stored[name]: array for name, array in given.items()})
        by_name = {figure.name: figure for figure in self.figures()}
        for figure in figures:
            named = {role: stored.get(name, name) for role, name in figure.arrays.items()}
            by_name[figure.name] = replace(figure, arrays=named)
        self._write_figures(by_name.values())
        self._drop_arrays(set(stored.values()))

    def _write_figures(self, figures: Iterable[Figure]) -> None:
        arrays, plain = set(self.array_names()), []
        for figure in figures:
            if missing := sorted(set(figure.arrays.values()) - arrays):
                raise InputError(
                    f"Figure {figure.name!r} names the array {missing[0]!r}, "
                    "which the run does not hold: add the array first."
                )
            plain.append({part.name: getattr(figure, part.name) for part in fields(figure)})
        write_json(self._folder / "figures.json", plain)

    def _drop_arrays(self, new: set[str]) -> None:
        """Remove files of arrays that `replace_figures` stored and that no Figure names."""
        used = new.union(*(figure.arrays.values() for figure in self.figures()))
        files: dict[Path, set[str]] = {}
        for name, path in self._where_arrays_lie.items():
            files.setdefault(path, set()).add(name)
        for path, names in files.items():
            if all(_DRAWN.search(name) for name in names) and not names & used:
                path.unlink(missing_ok=True)
                self._indexed.discard(path)
                for name in names:
                    del self._where_arrays_lie[name]

    def figures(self) -> list[Figure]:
        """The Figures in the order in which they were added."""
        path = self._folder / "figures.json"
        stored = read_json(path) if path.exists() else []
        if not isinstance(stored, list):
            raise broken_file(path, "a list of figures is expected")
        try:
            return [Figure(**plain) for plain in stored]
        except (TypeError, AttributeError, InputError) as error:
            raise broken_file(path, error) from error

    def add_notes(self, notes: Iterable[str]) -> None:
        """Append plain sentences, such as what was found; a sentence already there is not repeated.

        >>> import tempfile
        >>> run = Run.create(tempfile.mkdtemp(), title="A try", command=None, settings={})
        >>> run.add_notes(["The line wins.", "The line wins."])
        >>> run.notes()
        ['The line wins.']
        """
        write_json(self._folder / "notes.json", list(dict.fromkeys([*self.notes(), *notes])))

    def notes(self) -> list[str]:
        """The sentences in the order in which they were added."""
        path = self._folder / "notes.json"
        notes = read_json(path) if path.exists() else []
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise broken_file(path, "a list of sentences is expected")
        return notes

    def __repr__(self) -> str:
        return f"Run({str(self._folder)!r}, title={self.title!r})"


# ── lines of readings ──


def _to_line(reading: Reading) -> bytes:
    """JSON has no nan and no infinity: such a value is written as text, which float() reads."""
    plain: dict[str, Any] = {"name": reading.name}
    plain["value"] = reading.value if math.isfinite(reading.value) else str(reading.value)
    for part in fields(reading)[2:]:
        if (content := getattr(reading, part.name)) != part.default and content != {}:
            plain[part.name] = content
    return json.dumps(plain, allow_nan=False).encode() + b"\n"


def _from_line(line: bytes, path: Path, number: int) -> Reading:
    try:
        return Reading(**json.loads(line))
    except (ValueError, TypeError, AttributeError) as error:
        raise StoredFileError(
            f"Line {number} of {path} is not a Reading: the file was altered; "
            "restore it or remove the line."
        ) from error
