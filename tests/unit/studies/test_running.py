"""Running a study: settings, resumption to the same bytes, statements, what is left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import Field

from levelhead.base.errors import InputError, StoredFileError
from levelhead.base.records import Run
from levelhead.report.document import write_report
from levelhead.studies.catalogue import STUDIES, find_study
from levelhead.studies.running import run_study, settings_from_toml, study_settings
from levelhead.studies.study import (
    Cell,
    Findings,
    Outcome,
    Statement,
    Study,
    StudySettings,
    Table,
    grid,
)
from unit.studies.study_work import doubled


class Sizes(StudySettings):
    numbers: tuple[int, ...] = (1, 2, 3)
    rate: float = Field(default=0.1, gt=0)
    folder: str = ""
    diverges: int = -1


def _cells(settings: Sizes) -> list[Cell]:
    cells = grid(number=settings.numbers)
    told = {"folder": settings.folder}
    return [
        replace(
            c, given={**c.given, **told, "diverges": int(c.given["number"] == settings.diverges)}
        )
        for c in cells
    ]


def _conclude(settings: Sizes, outcomes: Mapping[str, Outcome]) -> Findings:
    values = np.array([[outcomes[n].value("double")] for n in outcomes])
    table = Table("doubles", "Doubles", "Twice.", list(outcomes), ["double"], values)
    total = float(values.sum())
    return Findings(
        [table],
        statements=[Statement("even", "The sum is even.", total % 2 == 0, f"It is {total:g}.")],
        conclusion=[f"The sum is {total:g}."],
    )


STUDY = Study(
    name="doubling",
    title="Doubling",
    question="Is it even?",
    settings=Sizes,
    presets={"quick": {"numbers": (1,)}},
    cells=_cells,
    run=doubled,
    conclude=_conclude,
)


def tables(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "tables").iterdir()}


def test_a_study_leaves_tables_statements_settings_and_a_report(tmp_path: Path) -> None:
    result = run_study(
        STUDY, tmp_path / "out", overrides={"folder": str(tmp_path)}, show_progress=False
    )
    assert not result.failed
    assert result.conclusion == ("The sum is 12.",)
    out = tmp_path / "out"
    assert tables(out) == {"doubles.csv": b"row,double\n1,2\n2,4\n3,6\n"}
    [statement] = json.loads((out / "statements.json").read_text())
    assert statement["holds"] is True
    stored = tomllib.loads((out / "settings.toml").read_text())
    assert stored["numbers"] == [1, 2, 3]
    assert (out / "timings.csv").read_text().startswith("cell,part,seconds\n1,whole,")
    page = write_report(Run.open(out)).read_text(encoding="utf-8")
    assert "Is it even?" in page
    assert "Holds: The sum is even. It is 12." in page


def test_a_failed_statement_fails_the_study_and_a_left_out_cell_is_named(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path), "diverges": "2"}
    result = run_study(STUDY, tmp_path / "out", overrides=told, show_progress=False)
    assert [failure.cell for failure in result.left_out] == ["2"]
    assert any("Left out: 2: the loss became nan" in note for note in result.run.notes())
    assert not result.failed  # 2 + 6 is even


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("huge", {}, "the preset 'huge' was given: one of quick, standard, full is expected"),
        ("quick", {"speed": 1}, "has no setting 'speed': it has seeds, threads, numbers"),
        ("quick", {"rate": "fast"}, "the setting rate = 'fast' does not fit"),
        ("quick", {"rate": -1}, "the setting rate = -1 does not fit"),
        ("quick", {"numbers": "1,b"}, "the setting numbers.1 = 'b' does not fit"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(
    preset: str, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        study_settings(STUDY, preset, overrides)
    assert message in str(caught.value)


def test_settings_come_from_preset_then_overrides_then_seeds() -> None:
    settings = study_settings(STUDY, "quick", {"numbers": "4, 5"}, seeds=7)
    assert isinstance(settings, Sizes)
    assert settings.numbers == (4, 5)
    assert settings.seeds == 7
    assert settings.rate == 0.1


def test_stored_settings_can_be_given_again(tmp_path: Path) -> None:
    run_study(STUDY, tmp_path / "a", overrides={"folder": str(tmp_path)}, show_progress=False)
    again = settings_from_toml(tmp_path / "a" / "settings.toml")
    run_study(STUDY, tmp_path / "b", overrides=again, show_progress=False)
    assert tables(tmp_path / "a") == tables(tmp_path / "b")


def test_a_used_folder_is_refused_and_resumed_only_with_its_settings(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path)}
    run_study(STUDY, tmp_path / "out", overrides=told, show_progress=False)
    with pytest.raises(InputError, match="already holds a run"):
        run_study(STUDY, tmp_path / "out", overrides=told, show_progress=False)
    with pytest.raises(InputError, match=r"was made with rate = 0\.1, not 0\.2"):
        run_study(
            STUDY, tmp_path / "out", overrides={**told, "rate": 0.2}, resume=True,
            show_progress=False,
        )  # fmt: skip
    before = tables(tmp_path / "out")
    run_study(STUDY, tmp_path / "out", overrides=told, resume=True, show_progress=False)
    assert tables(tmp_path / "out") == before
    assert len((tmp_path / "starts-1").read_text()) == 1


def test_a_changed_conclusion_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    told, out = {"folder": str(tmp_path)}, tmp_path / "out"
    old = run_study(STUDY, out, overrides=told, show_progress=False)

    def conclude(settings: Sizes, outcomes: Mapping[str, Outcome]) -> Findings:
        before = _conclude(settings, outcomes)
        table = before.tables[0]
        changed = replace(table, values=table.values + 1)
        other = replace(table, name="others", title="Others")
        return replace(before, tables=[changed, other], conclusion=["Seen anew."])

    newer = replace(STUDY, conclude=conclude)
    new = run_study(newer, out, overrides=told, resume=True, show_progress=False)
    assert not {*old.conclusion} & {*new.run.notes()}
    assert "Seen anew." in new.run.notes()
    assert sorted(tables(out)) == ["doubles.csv", "others.csv"]
    assert [figure.title for figure in new.run.figures()][:2] == ["Doubles", "Others"]
    write_report(new.run)
    # Back again, nothing of the newer one stays.
    run_study(STUDY, out, overrides=told, resume=True, show_progress=False)
    assert sorted(tables(out)) == ["doubles.csv"]


def test_a_folder_with_another_study_is_named(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path)}
    run_study(STUDY, tmp_path / "out", overrides=told, show_progress=False)
    with pytest.raises(InputError, match="holds a run of the study doubling: choose another --out"):
        run_study(replace(STUDY, name="products"), tmp_path / "out", overrides=told, resume=True)


def test_an_unfinished_study_says_so_in_its_report(tmp_path: Path) -> None:
    told, out = {"folder": str(tmp_path)}, tmp_path / "out"

    def stops(settings: Sizes, outcomes: Mapping[str, Outcome]) -> Findings:
        raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        run_study(replace(STUDY, conclude=stops), out, overrides=told, show_progress=False)
    said = "This study is not finished: the same command with --resume and its --out goes on."
    assert said in write_report(out).read_text(encoding="utf-8")
    run_study(STUDY, out, overrides=told, resume=True, show_progress=False)
    assert said not in write_report(out).read_text(encoding="utf-8")


def test_a_study_of_which_no_cell_could_run_is_an_error(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path), "numbers": "1", "diverges": 1}
    with pytest.raises(InputError, match=r"not one run of the study could be made: .*the loss bec"):
        run_study(STUDY, tmp_path / "out", overrides=told, show_progress=False)


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("toy", {"arms": "nonsense"}, "'nonsense' is not one of transformer"),
        ("toy", {"arms": ""}, "at least 1 item"),
        ("toy", {"optimisers": "adamw"}, "adamw with its decay"),
        ("collapse", {"tasks": ""}, "at least 1 item"),
    ],
)
def test_settings_that_name_nothing_are_refused(
    name: str, setting: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        study_settings(find_study(name), "quick", setting)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"tasks": "own"}, "own needs a TSV or an image folder"),
        ({"data": "nowhere"}, r"--set data=PATH \('nowhere' was given\)"),
        ({"text": "nowhere"}, r"--set text=DIR \('nowhere' holds none of them, or not all\)"),
    ],
)
def test_data_that_cannot_be_read_stop_the_collapse_study_at_once(
    setting: dict[str, str], said: str
) -> None:
    study = find_study("collapse")
    with pytest.raises(InputError, match=said):
        study.cells(study_settings(study, "quick", setting))


def test_a_settings_file_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    with pytest.raises(StoredFileError, match="is no file"):
        settings_from_toml(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoredFileError, match="is no TOML file that can be read"):
        settings_from_toml(path)


def test_two_studies_do_not_run_in_one_folder_at_once(tmp_path: Path) -> None:
    told, out = {"folder": str(tmp_path)}, tmp_path / "out"
    run_study(STUDY, out, overrides=told, show_progress=False)
    before = (out / "settings.toml").stat().st_mtime_ns
    holds = "import filelock, sys; held = filelock.FileLock(sys.argv[1]).acquire()"
    waits = "print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", f"{holds}; {waits}", str(out / "running.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"1\n"
        with pytest.raises(InputError, match=r"a study is running in .* right now: wait for it"):
            run_study(STUDY, out, overrides=told, resume=True, show_progress=False)
        assert (out / "settings.toml").stat().st_mtime_ns == before
        other.kill()  # the one that held the folder is gone, whatever file it left
    run_study(STUDY, out, overrides=told, resume=True, show_progress=False)
    assert (out / "settings.toml").stat().st_mtime_ns > before


def test_an_unknown_study_names_those_there_are() -> None:
    with pytest.raises(InputError, match="there is no study 'toys': choose from toy"):
        find_study("toys")


def test_every_study_has_a_grid_of_unique_cells_in_every_preset() -> None:
    for study in STUDIES.values():
        for preset in ("quick", "standard", "full"):
            if study.name == "forecasting" and preset != "quick":
                continue  # its grid needs data that may not be here; see its own tests
            cells = study.cells(study_settings(study, preset))
            assert len({cell.name for cell in cells}) == len(cells) > 0, study.name


QUICK = ["--quick", "--jobs", "1", "--no-progress"]


def command(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "levelhead", "study", "toy", *QUICK, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_study_killed_twice_and_resumed_gives_byte_equal_tables(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command("--out", str(whole)).wait() == 0
    cells = len(list((whole / "cells").iterdir()))
    for share in (0.2, 0.6):
        process = command("--out", str(killed), "--resume")
        deadline = time.monotonic() + 300
        while len(list(killed.glob("cells/*/done.json"))) < share * cells:
            assert process.poll() is None, "the study ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert command("--out", str(killed), "--resume").wait() == 0
    assert tables(whole) == tables(killed)
    assert (whole / "statements.json").read_bytes() == (killed / "statements.json").read_bytes()


@pytest.mark.slow
def test_ctrl_c_of_two_jobs_says_one_sentence(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "levelhead", "study", "toy", "--quick", "--jobs", "2",
         "--no-progress", "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("out/cells/*/*.state.*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers, too
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.decode().splitlines() == [
        f"Interrupted: what is finished is kept, go on with --resume --out {tmp_path / 'out'}"
    ]
