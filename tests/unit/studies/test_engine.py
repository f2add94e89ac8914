"""The engine: every cell once, nothing lost, failures named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from joblib import parallel_config

from levelhead.base.errors import Interrupted, LevelheadError
from levelhead.studies.engine import execute, load_outcome, run_cell
from levelhead.studies.study import Cell, StudySettings
from unit.studies.study_work import doubled, full_disk, stopped

SETTINGS = StudySettings()


def cells(folder: Path, count: int = 4, **more: dict[int, object]) -> list[Cell]:
    made = []
    for number in range(count):
        given = {"number": number, "folder": str(folder)}
        given |= {k: v[number] for k, v in more.items() if number in v}
        made.append(Cell(f"cell-{number}", given))
    return made


def starts(folder: Path, number: int) -> int:
    return len((folder / f"starts-{number}").read_text())


def test_every_cell_runs_once_and_leaves_what_it_found(tmp_path: Path) -> None:
    assert execute(doubled, SETTINGS, cells(tmp_path), tmp_path, show_progress=False) == []
    for number in range(4):
        found = load_outcome(tmp_path, Cell(f"cell-{number}", {}))
        assert found is not None
        assert found.value("double", number=number) == 2 * number
        np.testing.assert_array_equal(found.arrays["curve"], np.arange(3.0) * number)
        assert list(found.notes) == [f"number {number}"]
        assert found.seconds["part"] == 0.5
        assert found.seconds["whole"] > 0
        assert found.seconds["cpu"] > 0
        assert starts(tmp_path, number) == 1


def test_a_second_call_does_nothing_again(tmp_path: Path) -> None:
    execute(doubled, SETTINGS, cells(tmp_path), tmp_path, show_progress=False)
    execute(doubled, SETTINGS, cells(tmp_path, 5), tmp_path, show_progress=False)
    assert [starts(tmp_path, n) for n in range(5)] == [1] * 5


def test_an_error_of_ours_belongs_to_its_cell_and_is_named(tmp_path: Path) -> None:
    asked = cells(tmp_path, 3, diverges={1: 1})
    failures = execute(doubled, SETTINGS, asked, tmp_path, show_progress=False)
    assert [str(failure) for failure in failures] == ["cell-1: the loss became nan at step 3"]
    assert load_outcome(tmp_path, asked[1]) is None
    assert load_outcome(tmp_path, asked[2]) is not None


def test_any_other_error_stops_the_study(tmp_path: Path) -> None:
    broken = [Cell("broken", {"folder": str(tmp_path)})]
    with pytest.raises(KeyError):
        execute(doubled, SETTINGS, broken, tmp_path, show_progress=False)


def test_what_an_unfinished_start_left_is_cleared_but_for_its_states(tmp_path: Path) -> None:
    [cell] = cells(tmp_path, 1)
    place = tmp_path / "cells" / cell.name
    place.mkdir(parents=True)
    (place / "readings-main.jsonl").write_text('{"name": "double", "value": 7}\n')
    (place / "settings.json").write_text("{}")
    (place / "training.state.safetensors").write_bytes(b"half way")
    run_cell(doubled, SETTINGS, cell, tmp_path)
    found = load_outcome(tmp_path, cell)
    assert found is not None
    assert found.value("resumed") == 1.0
    assert [reading.value for reading in found.readings if reading.name == "double"] == [0.0]
    assert not list(place.glob("*.state.*"))


def test_a_killed_worker_costs_only_what_was_in_flight(tmp_path: Path) -> None:
    asked = cells(tmp_path, 4, dies={2: 1})
    assert execute(doubled, SETTINGS, asked, tmp_path, jobs=2, show_progress=False) == []
    assert starts(tmp_path, 2) == 2
    found = load_outcome(tmp_path, asked[2])
    assert found is not None
    assert found.value("resumed") == 1.0
    assert sum(starts(tmp_path, n) for n in range(4)) <= 4 + 2  # at most two were in flight


@pytest.mark.slow
def test_a_worker_that_has_grown_is_replaced_without_a_word(tmp_path: Path) -> None:
    each = dict.fromkeys(range(6), 400 * 1024**2)
    asked = cells(tmp_path, 6, keeps=each, slow=dict.fromkeys(range(6), 1.1))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert execute(doubled, SETTINGS, asked, tmp_path, jobs=2, show_progress=False) == []
    assert [str(w.message) for w in heard] == []
    assert [starts(tmp_path, n) for n in range(6)] == [1] * 6


def test_what_an_interruption_leaves_to_the_tracker_is_cleared_without_a_word() -> None:
    code = """
import os
from joblib.externals.loky.backend import resource_tracker
from levelhead.studies.engine import LOKY
with LOKY.start(2, 1):
    resource_tracker.register("/loky-levelhead-gone", "semlock")
assert "PYTHONWARNINGS" not in os.environ
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr.decode()) == (0, "")


def test_a_cell_that_always_kills_its_worker_is_given_up(tmp_path: Path) -> None:
    asked = cells(tmp_path, 2, dies={1: 99})
    failures = execute(doubled, SETTINGS, asked, tmp_path, jobs=2, tries=2, show_progress=False)
    assert [failure.cell for failure in failures] == ["cell-1"]
    assert "also with no other beside it" in failures[0].reason
    assert load_outcome(tmp_path, asked[0]) is not None


def test_a_cell_that_kills_its_worker_at_once_costs_no_other_its_place(tmp_path: Path) -> None:
    # The first cell dies before the others, which take longer, can finish beside it.
    asked = cells(tmp_path, 3, dies={0: 99})
    asked = [replace(c, given={**c.given, "slow": float(i > 0)}) for i, c in enumerate(asked)]
    failures = execute(doubled, SETTINGS, asked, tmp_path, jobs=2, tries=2, show_progress=False)
    assert [failure.cell for failure in failures] == ["cell-0"]
    assert all(load_outcome(tmp_path, cell) is not None for cell in asked[1:])
    # Twice in a row beside others, and alone twice; again after each of the others that finished.
    assert 4 <= starts(tmp_path, 0) <= 2 * 3 + 2


@dataclass(frozen=True)
class Here:
    """A pool whose only worker is this process, as joblib has it for a cluster of one core."""

    name: str = "here"
    broken: tuple[type[BaseException], ...] = (BrokenProcessPool,)

    @contextmanager
    def start(self, jobs: int, threads: int) -> Iterator[None]:
        with parallel_config(backend="sequential"):
            yield


def test_a_stop_is_heard_where_the_pool_is_this_process(tmp_path: Path) -> None:
    asked = cells(tmp_path, 2)
    assert execute(doubled, SETTINGS, asked, tmp_path, jobs=2, pool=Here()) == []
    with pytest.raises(Interrupted):
        execute(stopped, SETTINGS, asked, tmp_path / "other", jobs=2, pool=Here())


def test_a_full_disk_stops_the_study_and_the_cell_can_be_run_again(tmp_path: Path) -> None:
    [asked] = cells(tmp_path, 1)
    with pytest.raises(LevelheadError, match="free some space"):
        run_cell(full_disk, SETTINGS, asked, tmp_path)
    assert load_outcome(tmp_path, asked) is None
    assert (tmp_path / "cells" / asked.name / "training.state.safetensors").read_bytes() == b"half"
    run_cell(doubled, SETTINGS, asked, tmp_path)
    found = load_outcome(tmp_path, asked)
    assert found is not None
    assert found.value("resumed") == 1.0


def test_workers_leave_when_the_study_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from pathlib import Path\n"
        "from levelhead.studies.engine import execute\n"
        "from levelhead.studies.study import Cell, StudySettings\n"
        "from unit.studies.study_work import sleeping\n"
        "if __name__ == '__main__':\n"
        f"    folder = Path({str(tmp_path)!r})\n"
        "    cells = [Cell(f'c{n}', {'folder': str(folder), 'number': n}) for n in range(2)]\n"
        "    execute(sleeping, StudySettings(), cells, folder, jobs=2, show_progress=False)\n"
    )
    study = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    workers: list[int] = []
    deadline = time.monotonic() + 120
    while len(workers) < 2:
        assert study.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
        workers = [int(p.read_text()) for p in tmp_path.glob("worker-*") if p.read_text()]
    study.kill()
    study.wait()
    while any(_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its study"
        time.sleep(0.1)


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
