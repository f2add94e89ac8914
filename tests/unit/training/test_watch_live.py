"""Following a growing run: each line once, heads taken together, bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from levelhead.base.records import Reading, Run
from levelhead.training.watch_live import KEPT, Follower, sparkline


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", title="x", command="watch", settings={})


def logits(step: int, *values: float, layer: str = "a") -> list[Reading]:
    return [
        Reading("largest_logit", value, where={"layer": layer, "head": head}, step=step)
        for head, value in enumerate(values)
    ]


def test_each_line_is_taken_once_and_half_a_line_later(run: Run) -> None:
    follower = Follower(run.folder)
    assert not follower.read()
    run.add_readings(logits(1, 2.0, 5.0, 3.0))
    assert follower.read()
    assert not follower.read()
    assert follower.history("largest_logit", "a", "largest") == [5.0]
    path = run.folder / "readings-main.jsonl"
    line = b'{"name": "largest_logit", "value": 8.0, "where": {"layer": "a", "head": 1}, "step": 2}'
    with path.open("ab") as file:
        file.write(line[:30])
        file.flush()
        assert not follower.read()
        file.write(line[30:] + b"\n")
        file.flush()
        assert follower.read()
    assert follower.history("largest_logit", "a", "largest") == [5.0, 8.0]


def test_heads_are_taken_together_as_the_column_says(run: Run) -> None:
    run.add_readings([*logits(1, 2.0), *logits(1, 7.0, layer="b"), *logits(1, 1.0, 6.0)])
    run.add_readings(logits(2, math.nan))
    follower = Follower(run.folder)
    follower.read()
    for how, value in (("largest", 6.0), ("smallest", 1.0), ("mean", 3.0)):
        first, second = follower.history("largest_logit", "a", how)
        assert first == value
        assert math.isnan(second)
    assert follower.layers() == ["a", "b"]
    assert follower.state()["layers"][0]["largest_logit"] is None


def test_memory_is_bounded_and_a_restart_drops_what_came_after(run: Run) -> None:
    follower = Follower(run.folder)
    for step in range(1, 501):
        run.add_readings(logits(step, float(step)))
    follower.read()
    assert follower.history("largest_logit", "a") == [float(s) for s in range(501 - KEPT, 501)]
    run.add_readings(logits(490, 0.0))
    follower.read()
    assert follower.history("largest_logit", "a")[-2:] == [489.0, 0.0]
    assert follower.step == 490


def test_several_writers_and_another_run_in_the_same_place(run: Run) -> None:
    follower = Follower(run.folder)
    run.add_readings([Reading("loss", 1.0, step=5)])
    run.add_readings([Reading("qk_rank", 1.0, step=3, source="snapshot")], writer="analysis")
    follower.read()
    assert follower.step == 5
    (run.folder / "readings-main.jsonl").write_bytes(b"")
    follower.read()
    assert (follower.step, follower.history("loss")) == (0, [])


def test_finished_holds_until_the_run_is_taken_up(run: Run) -> None:
    follower = Follower(run.folder)
    run.add_readings([Reading("loss", 1.0, step=5), Reading("finished", 1.0, step=5)])
    follower.read()
    assert follower.finished
    run.add_readings([Reading("loss", 1.0, step=6)])
    follower.read()
    assert not follower.finished


def test_sparklines() -> None:
    assert sparkline([1, 1, 1]) == "▁▁▁"
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 0, 7, math.inf], width=3) == "▁█·"
    assert sparkline([]) == ""


def test_final_weights_stand_in_the_place_of_those_before_the_last_step(run: Run) -> None:
    where = [{"layer": "a", "head": head} for head in (0, 1)]
    run.add_readings([Reading("qk_effective_rank", 4.0, "1", w, 10, "weights") for w in where])
    run.add_readings([Reading("qk_effective_rank", 2.0, "1", w, 10, "end") for w in where])
    follower = Follower(run.folder)
    follower.read()
    assert follower.history("qk_effective_rank", "a") == [2.0]
