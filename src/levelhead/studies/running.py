"""From the name of a study to its run folder: settings, cells, conclusion, tables, statements.

The folder of a study is a run that `levelhead.report` draws. Besides it holds

    settings.toml        the settings, ready to be given again
    cells/<name>/        a run folder for each cell
    tables/<name>.csv    every table; the same settings give the same bytes
    statements.json      what was checked, and what came out
    timings.csv          seconds of every cell: the one table that never repeats
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import tomli_w
from filelock import FileLock, Timeout
from pydantic import ValidationError

from levelhead.base.errors import InputError, Interrupted, StoredFileError
from levelhead.base.files import read_json, write_atomically, write_json
from levelhead.base.records import Run
from levelhead.studies.engine import LOKY, CellFailed, Pool, execute, load_outcome, seconds
from levelhead.studies.study import Cell, Findings, Outcome, Statement, Study, StudySettings

__all__ = ["PRESETS", "StudyResult", "run_study", "study_settings"]

_UNFINISHED = "This study is not finished: the same command with --resume and its --out goes on."
PRESETS = ("quick", "standard", "full")


@dataclass(frozen=True, eq=False)
class StudyResult:
    """What a study ended with: its run, statements, computed sentences, cells left out."""

    run: Run
    statements: tuple[Statement, ...]
    conclusion: tuple[str, ...]
    left_out: tuple[CellFailed, ...]

    @property
    def failed(self) -> bool:
        """Whether a statement that was expected to hold does not, or could not be judged."""
        return any(statement.failed for statement in self.statements)

    def rows(self) -> list[dict[str, Any]]:
        """One mapping for each statement."""
        return [asdict(statement) for statement in self.statements]


def study_settings(
    study: Study[Any],
    preset: str = "standard",
    overrides: Mapping[str, Any] | None = None,
    seeds: int | None = None,
) -> StudySettings:
    """The settings of `preset`, changed by `overrides` (values may be text, as on a command line).

    Raises InputError for an unknown preset or setting and for a value that does not fit.
    """
    if preset not in PRESETS:
        raise InputError(
            f"the preset {preset!r} was given: one of {', '.join(PRESETS)} is expected"
        )
    given: dict[str, Any] = {**study.presets.get(preset, {}), **(overrides or {})}
    if seeds is not None:
        given["seeds"] = seeds
    fields = study.settings.model_fields
    for name in given:
        if name not in fields:
            raise InputError(
                f"the study {study.name} has no setting {name!r}: it has {', '.join(fields)}"
            )
    parsed = {name: _parsed(value, fields[name].annotation) for name, value in given.items()}
    try:
        settings: StudySettings = study.settings(**parsed)
    except ValidationError as error:
        first = error.errors()[0]
        where, said = ".".join(map(str, first["loc"])), first["msg"]
        raise InputError(
            f"the setting {where} = {first['input']!r} does not fit: {said[:1].lower()}{said[1:]}"
        ) from error
    return settings


def _parsed(value: Any, annotation: Any) -> Any:
    """Text for a list or a tuple is split at commas; all else is left to pydantic."""
    if isinstance(value, str) and getattr(annotation, "__origin__", None) in (tuple, list):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def run_study(
    study: Study[Any],
    out: str | os.PathLike[str],
    *,
    preset: str = "standard",
    overrides: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    pool: Pool = LOKY,
    resume: bool = False,
    show_progress: bool | None = None,
) -> StudyResult:
    """Run `study` into the folder `out` and conclude.

    Args:
        preset: "quick" (seconds), "standard", or "full".
        overrides: single settings by name; `seeds` stands before them.
        jobs: cells at a time; `pool`: where they run when there are several.
        resume: go on in a folder that holds an unfinished run of the same settings.

    Raises InputError for a used folder without `resume`, for a folder that a study is running in
    and for changed settings, Interrupted for Ctrl-C and SIGTERM (the same call with `resume` goes
    on to the same tables).
    """
    settings = study_settings(study, preset, overrides, seeds)
    folder = Path(out)
    asked = _distinct(study, study.cells(settings))  # may say that data are missing
    _refuse_other(study, folder)
    run = Run.create(
        folder,
        title=study.title,
        command=f"study {study.name}",
        settings={"study": study.name, **settings.model_dump(mode="json")},
        resume=resume,
    )
    with _alone(folder):
        if not (folder / "statements.json").exists():
            run.add_notes([_UNFINISHED])
        write_atomically(folder / "settings.toml", tomli_w.dumps(_toml(settings)).encode())
        cells: list[Cell] = []
        outcomes: dict[str, Outcome] = {}
        left_out: list[CellFailed] = []
        while asked:
            try:
                left_out += execute(
                    study.run,
                    settings,
                    asked,
                    folder,
                    jobs=jobs,
                    pool=pool,
                    show_progress=show_progress,
                )
            except KeyboardInterrupt as error:
                raise Interrupted(
                    f"what is finished is kept, go on with --resume --out {quote(str(folder))}",
                    getattr(error, "signal", None),
                ) from error
            cells += asked
            outcomes |= {c.name: found for c in asked if (found := load_outcome(folder, c))}
            known = {cell.name for cell in cells}
            following = _distinct(study, study.follow(settings, outcomes))
            asked = [cell for cell in following if cell.name not in known]
        if not outcomes:
            reason = left_out[0] if left_out else "the settings ask for none"
            raise InputError(f"not one run of the study could be made: {reason}")
        findings = study.conclude(settings, outcomes)
        run = _keep(folder, study, settings, cells, outcomes, findings, left_out)
    return StudyResult(run, tuple(findings.statements), tuple(findings.conclusion), tuple(left_out))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder; the system frees it when this one dies."""
    lock = FileLock(folder / "running.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"a study is running in {folder} right now: wait for it or stop it, then --resume, or "
            "choose another --out"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _refuse_other(study: Study[Any], folder: Path) -> None:
    """Name the study whose run a folder holds, where that is another one."""
    path = folder / "settings.json"
    head = read_json(path) if path.is_file() else None
    settings = head.get("settings") if isinstance(head, dict) else None
    held = settings.get("study", study.name) if isinstance(settings, dict) else study.name
    if held != study.name:
        raise InputError(f"{folder} holds a run of the study {held}: choose another --out")


def _distinct(study: Study[Any], cells: Sequence[Cell]) -> list[Cell]:
    if len({cell.name for cell in cells}) != len(cells):
        raise InputError(f"the study {study.name} has two cells of one name")
    return list(cells)


def _keep(
    folder: Path,
    study: Study[Any],
    settings: StudySettings,
    cells: Sequence[Cell],
    outcomes: Mapping[str, Outcome],
    findings: Findings,
    left_out: Sequence[CellFailed],
) -> Run:
    """Write all that follows from the outcomes; doing it twice changes nothing.

    The verdicts come last: until then the folder says that the study is not finished.
    """
    run = _without_conclusion(folder)
    (folder / "tables").mkdir(exist_ok=True)
    for table in findings.tables:
        write_atomically(folder / "tables" / f"{table.name}.csv", table.csv().encode())
    run.add_arrays(
        {f"table.{t.name}": np.asarray(t.values, float) for t in findings.tables}
        | dict(findings.arrays)
    )
    run.add_figures([*(table.figure() for table in findings.tables), *findings.figures])
    missing = [f"Left out: {failure}." for failure in left_out]
    noted = [f"{name}: {note}" for name, found in outcomes.items() for note in found.notes]
    lines = ["cell,part,seconds"]
    for cell, parts in seconds(folder, cells).items():
        lines += [f"{cell},{part},{value:.3f}" for part, value in parts.items()]
    write_atomically(folder / "timings.csv", ("\n".join(lines) + "\n").encode())
    write_json(folder / "notes.json", [])
    run.add_notes(
        [
            study.question,
            *findings.conclusion,
            *map(str, findings.statements),
            *missing,
            *noted,
            *study.limits(settings),
        ]
    )
    write_json(folder / "statements.json", [asdict(s) for s in findings.statements])
    return run


def _without_conclusion(folder: Path) -> Run:
    """The run without what an earlier version of the program may have concluded from its cells."""
    write_json(folder / "notes.json", [_UNFINISHED])
    for pattern in ("statements.json", "figures.json", "arrays-*.safetensors", "tables/*.csv"):
        for path in folder.glob(pattern):
            path.unlink()
    return Run.open(folder)


def _toml(settings: StudySettings) -> dict[str, Any]:
    """Settings without those that are None, which TOML cannot say and which are the defaults."""
    return {k: v for k, v in settings.model_dump(mode="json").items() if v is not None}


def settings_from_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Overrides from a settings.toml; raises StoredFileError if it cannot be read."""
    if not os.path.isfile(path):
        raise StoredFileError(f"{os.fspath(path)} is no file: name a settings.toml")
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StoredFileError(
            f"{os.fspath(path)} is no TOML file that can be read ({error})"
        ) from error
