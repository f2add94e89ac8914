"""Readings are written by the sinks and read back with the libraries' own readers."""

from __future__ import annotations

import builtins
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from levelhead.adapters.tracking import MLflowSink, TensorBoardSink, tag_of
from levelhead.base.errors import InputError, LevelheadError
from levelhead.base.records import Reading

HEAD = {"layer": "layers.0", "head": 3}
VALUES = [1.5, math.nan, math.inf, -0.25]
READINGS = [
    *(Reading("attention_entropy", value, "nat", HEAD, 50 * i) for i, value in enumerate(VALUES)),
    Reading("loss", 0.5, step=10),
    Reading("no_step", 2.0),
    Reading("alarm.dead_head", 0.01, "1", {**HEAD, "since": 40, "harmful": 1, "harm": "x"}, 60),
]


def same(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> bool:
    return len(found) == len(wanted) and all(
        s == t and (a == b or (math.isnan(a) and math.isnan(b)))
        for (s, a), (t, b) in zip(found, wanted, strict=True)
    )


# ── names ──


@pytest.mark.parametrize(
    ("reading", "tag"),
    [
        (READINGS[0], "attention_entropy/layers.0/head3"),
        (READINGS[-1], "alarm.dead_head/layers.0/head3"),
        (Reading("head_cka", 1, where={"layer": "a", "head": 0, "other": 2}),
         "head_cka/a/head0/other2"),
        (Reading("layer_cka", 1, where={"layer": "a", "other": "b"}), "layer_cka/a/other_b"),
        (Reading("x", 1, where={"layer": "é/λ#?"}), "x/_____"),
        (Reading("x", 1, where={"layer": ".."}), "x/_"),
        (Reading("x", 1, where={"layer": ""}), "x/_"),
    ],
)  # fmt: skip
def test_tags(reading: Reading, tag: str) -> None:
    assert tag_of(reading) == tag


def test_long_names_are_cut_and_stay_apart() -> None:
    tags = {tag_of(Reading("x", 1, where={"layer": "a" * 300 + end})) for end in "bc"}
    assert len(tags) == 2
    assert all(len(tag) == 250 for tag in tags)


# ── TensorBoard ──


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "logs")
    sink.write(READINGS[:2])
    assert same(scalars(tmp_path / "logs")["attention_entropy/layers.0/head3"],
                [(0, 1.5), (50, math.nan)])  # fmt: skip
    sink.write(iter(READINGS[2:]))
    sink.close()
    sink.close()
    found = scalars(tmp_path / "logs")
    assert found.keys() == {
        "attention_entropy/layers.0/head3", "loss", "no_step", "alarm.dead_head/layers.0/head3"
    }  # fmt: skip
    wanted = [(50 * i, value) for i, value in enumerate(VALUES)]
    assert same(found["attention_entropy/layers.0/head3"], wanted)
    assert (found["loss"], found["no_step"]) == ([(10, 0.5)], [(0, 2.0)])
    with pytest.raises(InputError, match="closed"):
        sink.write(READINGS)


def test_two_places_never_share_a_tag(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        sink.write(Reading("x", step + n, where={"layer": f"a{c}b"}, step=step)
                   for n, c in enumerate("/_#"))  # fmt: skip
    sink.close()
    assert scalars(tmp_path) == {
        "x/a_b": [(1, 1.0), (2, 2.0)],
        "x/a_b-2": [(1, 2.0), (2, 3.0)],
        "x/a_b-3": [(1, 3.0), (2, 4.0)],
    }


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LevelheadError, match="choose another folder"):
        TensorBoardSink(tmp_path / "file" / "logs")


# ── MLflow ──


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local store of files, which MLflow asks to be allowed; others need a server."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "store").as_uri()


def test_mlflow_reads_what_was_written(store: str) -> None:
    from mlflow.tracking import MlflowClient

    sink = MLflowSink(store, "an experiment", run_name="first")
    sink.write(READINGS)
    # More than one request holds, all of one name.
    sink.write(Reading("many", float(step), step=step) for step in range(1001))
    sink.close()
    sink.close()
    client = MlflowClient(tracking_uri=store)
    run = client.get_run(sink.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.metrics.keys() == {
        "attention_entropy/layers.0/head3", "loss", "no_step", "many",
        "alarm.dead_head/layers.0/head3",
    }  # fmt: skip

    def history(name: str) -> list[tuple[int, float]]:
        return sorted((m.step, m.value) for m in client.get_metric_history(sink.run_id, name))

    wanted = [(50 * i, value) for i, value in enumerate(VALUES)]
    assert same(history("attention_entropy/layers.0/head3"), wanted)
    assert history("many") == [(step, float(step)) for step in range(1001)]
    with pytest.raises(InputError, match="closed"):
        sink.write(READINGS)
    other = MLflowSink(store, "an experiment")
    other.close()
    assert client.get_run(other.run_id).info.experiment_id == run.info.experiment_id


def test_what_mlflow_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with pytest.raises(InputError, match="MLflow refuses 'nonsense://x'"):
        MLflowSink("nonsense://x", "e")


# ── without the libraries ──


@pytest.mark.parametrize("sink", ["TensorBoardSink", "MLflowSink"])
def test_without_the_library_one_sentence_says_what_to_install(
    sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] in ("tensorboard", "mlflow"):
            raise ImportError(f"No module named {name!r}")
        return before(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'levelhead\[tracking\]'"):
        TensorBoardSink("x") if sink == "TensorBoardSink" else MLflowSink("x", "y")


def test_importing_the_adapter_imports_neither_library() -> None:
    script = (
        "import sys, levelhead.adapters.tracking; "
        "print({'torch', 'tensorboard', 'mlflow'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "set()\n"
