"""Snapshots: what is stored is what there was; the process gives what this process would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from levelhead.base.errors import StoredFileError
from levelhead.base.records import Run
from levelhead.invariants.catalogue import catalogue
from levelhead.training import snapshots
from levelhead.training.snapshots import (
    WRITER,
    Analysis,
    analyse,
    layer_analysis,
    read_snapshot,
    write_snapshot,
)
from levelhead.training.watch import watch
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.layouts import views


def a_view(seed: int = 0, name: str = "enc.0") -> AttentionView:
    torch.manual_seed(seed)
    shapes = {"q": (4, 3, 8), "k": (2, 3, 8), "v": (2, 3, 8), "o": (4, 8, 3)}
    weights = {key: torch.randn(shape) for key, shape in shapes.items()}
    return AttentionView(**weights, kv_group=(0, 1, 0, 1), scale=0.25, name=name, family="made")


def a_run(folder: Path, *steps: int) -> Run:
    run = Run.create(folder, title="Watched", command="watch", settings={})
    for step in steps:
        write_snapshot(folder, step, [a_view(step), a_view(step + 1, "enc.1")])
    return run


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    one, two = a_view(), a_view(1, "enc.1").map(torch.Tensor.double)
    path = write_snapshot(tmp_path, 500, [one, two])
    assert path == tmp_path / "snapshots" / "step-00000500.safetensors"
    step, found = read_snapshot(path)
    assert step == 500
    for view, back in zip((one, two), found, strict=True):
        for name in ("q", "k", "v", "o"):
            assert torch.equal(getattr(view, name), getattr(back, name))
            assert getattr(view, name).dtype == getattr(back, name).dtype
        assert (back.name, back.kv_group, back.scale) == (view.name, (0, 1, 0, 1), 0.25)


def test_numbers_are_those_of_dense_tensors() -> None:
    view = a_view()
    readings, spectra = layer_analysis(view, 7)
    found = {(r.name, r.where.get("index")): r.value for r in readings}
    assert {r.step for r in readings} == {7}
    b = np.stack(
        [
            view.q[i].double().numpy().T @ view.k[g].double().numpy()
            for i, g in enumerate(view.kv_group)
        ]
    )
    for mode, side in enumerate(("head", "query", "key")):
        sigma = np.linalg.svd(np.moveaxis(b, mode, 0).reshape(b.shape[mode], -1), compute_uv=False)
        stored = spectra[f"qk_stack_{side}_spectrum"]
        np.testing.assert_allclose(stored, sigma, rtol=1e-6, atol=1e-6 * sigma[0])
        p = sigma[sigma > 1e-9] / sigma.sum()
        assert found[f"qk_{side}_mode_rank", None] == pytest.approx(
            np.exp(-(p * np.log(p)).sum()), rel=1e-5
        )
    # Keeping 3 of 6 directions on either side leaves something out; keeping all heads does not.
    assert 0.05 < found["qk_tucker_error", None] < 0.9
    assert found["qk_cp_error", None] == float(catalogue()["qk_cp_error"](view))
    assert found["ov_stack_head_spectrum", 1] == pytest.approx(
        float(view.ov.mode_singular_values(0)[1]), rel=1e-12
    )


def test_a_layer_that_is_not_finite_has_none() -> None:
    view = a_view()
    view.v[0, 0, 0] = torch.inf
    assert layer_analysis(view, 1) == ([], {})


def test_snapshots_are_analysed_in_order_once(tmp_path: Path) -> None:
    run = a_run(tmp_path, 20, 10)
    assert analyse(tmp_path) == 2
    steps = [r.step for r in run.readings()]
    assert steps == sorted(steps)
    assert set(steps) == {10, 20}
    assert analyse(tmp_path) == 0
    assert len(run.readings()) == len(steps)
    assert "step-00000020/enc.1/qk_stack_key_spectrum" in run.array_names()


def test_an_analysis_that_was_broken_off_is_finished(tmp_path: Path, monkeypatch) -> None:
    whole = a_run(tmp_path / "whole", 10, 20)
    analyse(whole.folder)
    run = a_run(tmp_path / "run", 10, 20)
    plain, calls = Run.add_readings, []

    def killed(self, readings, writer="main") -> None:
        calls.append(1)
        if len(calls) == 2:  # in the middle of the second layer's lines
            plain(self, list(readings)[:5], writer)
            raise KeyboardInterrupt
        plain(self, readings, writer)

    monkeypatch.setattr(Run, "add_readings", killed)
    with pytest.raises(KeyboardInterrupt):
        analyse(run.folder)
    monkeypatch.undo()
    assert analyse(run.folder) == 2
    # The fits are the same to rounding that grows over their sweeps.
    key = lambda r: (r.step, r.name, str(r.where))  # noqa: E731
    ours, theirs = (sorted(map(key, r.readings())) for r in (run, whole))
    assert ours == theirs
    assert run.array_names() == whole.array_names()


def test_a_damaged_snapshot_does_not_stop_the_others(tmp_path: Path) -> None:
    run = a_run(tmp_path, 10, 20)
    path = tmp_path / "snapshots" / "step-00000010.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(StoredFileError, match="step-00000010"):
        analyse(tmp_path)
    assert {r.step for r in run.readings()} == {20}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    a_run(tmp_path, 10)
    with snapshots._alone(tmp_path / "snapshots") as alone:
        assert alone
        assert analyse(tmp_path) == 0
    assert analyse(tmp_path) == 1


def test_the_process_says_what_is_wrong(tmp_path: Path) -> None:
    for arguments, said in (([], "give one argument"), ([str(tmp_path)], "is not a run folder")):
        ran = subprocess.run(
            [sys.executable, "-m", "levelhead.training.snapshots", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 1
        assert said in ran.stderr


def test_a_watched_run_is_analysed_by_another_process(tmp_path: Path) -> None:
    """At the end everything is there, as this process computes it from the weights."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, expected = torch.randn(2, 4, 8), {}
    with watch(model, optimizer, 2, out=tmp_path, snapshots=3) as run:
        for step in range(1, 8):
            if step % 3 == 0:
                [view] = views(model)
                expected[step] = layer_analysis(view.map(lambda t: t.detach().clone()), step)[0]
            optimizer.zero_grad()
            model(x, x, x)[0].square().sum().backward()
            optimizer.step()
    assert sorted(expected) == [3, 6]
    found = [r for r in run.readings() if r.source == "snapshot"]
    assert (tmp_path / f"readings-{WRITER}.jsonl").exists()
    truth = [reading for step in (3, 6) for reading in expected[step]]
    assert [(r.name, r.step, r.where) for r in found] == [(r.name, r.step, r.where) for r in truth]
    values = ([r.value for r in readings] for readings in (found, truth))
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-8)
    assert (tmp_path / "snapshots" / "analysis.log").read_text() == ""


def test_the_end_does_not_wait_for_ever(tmp_path: Path, monkeypatch) -> None:
    a_run(tmp_path, 10)
    sleeper = [sys.executable, "-c", "import time; time.sleep(1.5)"]
    plain = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: plain(sleeper, **more))
    analysis = Analysis(tmp_path)
    assert analysis.finish(0.05) is False
    assert analysis.running
    analysis._process.wait()
