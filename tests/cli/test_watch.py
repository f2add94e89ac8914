"""The commands watch and report on runs that end, go on, were killed, or do not exist yet."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from levelhead.base.records import Reading, Run
from levelhead.cli import app
from levelhead.cli_watch import _drawn
from levelhead.training.alarms import Detector
from levelhead.training.watch_live import Follower
from unit.training.watched_runs import Values, batches


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def explodes(step: int, values: Values) -> None:
    if step > 600:
        values["largest_logit", "layers.1", 0] = 500.0


def written(folder: Path, steps: int = 1000, layers: int = 2) -> Run:
    run = Run.create(folder, title="Watched", command="watch", settings={})
    detector = Detector()
    for batch in batches(explodes if layers > 1 else (lambda *_: None), steps=steps, layers=layers):
        run.add_readings([*batch, *(alarm.reading() for alarm in detector.update(batch))])
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return written(tmp_path_factory.mktemp("watched") / "run")


def test_once_prints_layers_numbers_and_alarms(run: Run) -> None:
    result = call("watch", run.folder, "--once")
    assert result.exit_code == 0, result.output
    head, columns, *rows = result.stdout.splitlines()
    losses = [r.value for r in run.readings() if r.name == "loss"]
    assert head.startswith(f"step 1,000   loss {losses[-1]:.3g} ")
    assert columns.split() == [
        *("layer", "entropy", "share", "largest", "logit", "rank-one", "distance")
    ]
    assert [row.split()[0] for row in rows[:2]] == ["layers.0", "layers.1"]
    assert rows[1].split()[3] == "500"
    assert rows[2].startswith("! Exploding logits in layers.1, head 0, since step 620")
    assert result.stderr == ""


def test_json_is_all_there_is_on_stdout(run: Run) -> None:
    found = json.loads(call("watch", run.folder, "--json").stdout)
    assert (found["step"], found["finished"]) == (1000, False)
    assert [layer["layer"] for layer in found["layers"]] == ["layers.0", "layers.1"]
    assert found["layers"][1]["largest_logit"] == 500.0
    assert found["layers"][1]["alarms"] == "exploding_logits"
    (alarm,) = found["alarms"]
    assert (alarm["name"], alarm["layer"], alarm["head"]) == ("exploding_logits", "layers.1", 0)
    assert (alarm["since"], alarm["harmful"]) == (620, False)


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path, option: str) -> None:
    result = call("watch", tmp_path / "nothing", option)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1


def test_an_empty_run_and_a_torn_line(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="x", command="watch", settings={})
    assert "Nothing was sampled yet." in call("watch", tmp_path, "--once").stdout
    run.add_readings([Reading("loss", 0.5, step=7)])
    path = tmp_path / "readings-main.jsonl"
    path.write_bytes(path.read_bytes() + b'{"name": "loss", "value": 9')
    assert "step 7   loss 0.5 " in call("watch", tmp_path, "--once").stdout


def test_an_altered_line_is_one_sentence(tmp_path: Path) -> None:
    Run.create(tmp_path, title="x", command="watch", settings={})
    (tmp_path / "readings-main.jsonl").write_bytes(b"nonsense\n")
    result = call("watch", tmp_path, "--once")
    assert result.exit_code == 2
    assert "is not a Reading" in result.stderr


def test_it_waits_for_the_run_follows_it_and_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "later"

    def train() -> None:
        time.sleep(0.3)
        run = written(folder, steps=40, layers=1)
        time.sleep(0.3)
        run.add_readings([Reading("loss", 0.125, step=41), Reading("finished", 1.0, step=41)])

    training = threading.Thread(target=train)
    training.start()
    result = call("watch", folder, "--interval", "0.05")
    training.join()
    assert result.exit_code == 0, result.output
    waiting, ended = result.stderr.splitlines()
    assert waiting.startswith(f"Waiting for {folder} to be begun")
    assert ended == "The training ended at step 41."
    assert "loss 0.125 " in result.stdout
    assert "finished" in result.stdout


def test_interrupting_the_viewer_is_no_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    result = call("watch", run.folder)
    assert result.exit_code == 0
    assert result.stderr == "Stopped looking at step 1,000; the training is not touched.\n"


def test_report_draws_a_killed_run_without_torch(run: Run, tmp_path: Path) -> None:
    path = run.folder / "readings-main.jsonl"
    path.write_bytes(path.read_bytes() + b'{"name": "lo')
    script = (
        "import sys; from levelhead.cli import app; "
        f"app(['report', {str(run.folder)!r}], standalone_mode=False); "
        "print({'torch', 'pandas', 'scipy', 'sklearn'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines() == [str(run.folder / "report.html"), "set()"]
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "Exploding logits in layers.1, head 0, since step 620" in page
    assert "in 1,000 steps" in page
    assert call("report", run.folder).exit_code == 0  # and again


def test_the_viewer_needs_no_torch(run: Run) -> None:
    script = (
        "import sys; from levelhead.cli import app; "
        f"app(['watch', {str(run.folder)!r}, '--json'], standalone_mode=False); "
        "print({'torch', 'pandas', 'scipy', 'sklearn'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines()[-1] == "set()"


# ── what else is shown ──


def test_a_run_of_another_kind_is_refused(tmp_path: Path) -> None:
    Run.create(tmp_path, title="x", command="study alarms", settings={})
    for options in (["--once"], ["--json"], []):
        result = call("watch", tmp_path, *options)
        assert result.exit_code == 2
        assert "is not a watched run (it was made by study alarms)" in result.stderr
        assert result.stdout == ""


def test_a_killed_training_ends_the_viewer(tmp_path: Path) -> None:
    run = written(tmp_path, steps=40, layers=1)
    script = (
        "import sys, pathlib; from levelhead.training.watch_process import write_process; "
        "write_process(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", script, str(run.folder)], check=True, timeout=60)
    result = call("watch", tmp_path, "--interval", "0.05")
    assert result.exit_code == 0
    assert result.stderr == ("The training process is gone (no end was recorded); last step 40.\n")
    assert "the training process is gone" in call("watch", tmp_path, "--once").stdout
    assert json.loads(call("watch", tmp_path, "--json").stdout)["running"] is False


def test_losses_that_are_not_finite_and_observations_are_shown(tmp_path: Path) -> None:
    run = Run.create(tmp_path, title="x", command="watch", settings={})
    run.add_readings(
        [Reading("attention_entropy_share", 0.01, "1", {"layer": "a", "head": 0}, step=3)]
    )
    shown = call("watch", tmp_path, "--once").stdout
    assert "No alarm so far." in shown
    said = "Attention is sharp in a head 0: an observation, no alarm, since it began so."
    assert said in shown
    run.add_notes(["Watched from step 1: all.", "The loss was nan at step 4."])
    shown = call("watch", tmp_path, "--once").stdout
    assert "The loss was nan at step 4." in shown
    assert "No alarm so far." not in shown
    assert "Watched from" not in shown
    found = json.loads(call("watch", tmp_path, "--json").stdout)
    assert found["notes"][1] == "The loss was nan at step 4."
    assert [one["reason"] for one in found["observations"]] == ["it began so"]


def test_in_a_narrow_terminal_numbers_come_before_their_courses(run: Run) -> None:
    follower = Follower(run.folder)
    follower.read()
    drawn = {}
    for width in (40, 200):
        console = Console(width=width, height=50, record=True, file=io.StringIO())
        console.print(_drawn(follower, console))
        drawn[width] = console.export_text().splitlines()
    [narrow] = [line for line in drawn[40] if line.startswith("layers.1 ")]
    [wide] = [line for line in drawn[200] if line.startswith("layers.1 ")]
    numbers = [f"{row:.3g}" for row in _numbers(follower)]
    assert narrow.split() == ["layers.1", *numbers]
    assert wide.split()[1::2] == numbers
    assert all(len(bars) == 12 for bars in wide.split()[2::2])


def _numbers(follower: Follower) -> list[float]:
    row = follower.rows()[1]
    return [row[name] for name in ("attention_entropy_share", "largest_logit", "map_residual")]
