"""Watching as people use and misuse it: misspelt arguments, copies, resumed and failed runs."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.records import Reading, Run
from levelhead.inspection.inspect import inspect
from levelhead.training.snapshots import read_snapshot
from levelhead.training.watch import check_watch_arguments, watch
from levelhead.training.watch_live import Follower

WIDTH = 8


def block(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)  # norms with gains, biases that are not zero
    return model


def data(steps: int = 4) -> Tensor:
    return torch.randn(steps, 2, 5, WIDTH, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, run: Any, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for x in data(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


class Plain(nn.Module):
    """Attention as a part of its own, which is looked at by hooks on it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0]


# ── arguments ──


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"evry": 1}, r"no argument 'evry'; every was meant, perhaps.*heads"),
        ({"colour": "red"}, r"no argument 'colour'\. Besides its own"),
        ({"sinks": print}, "sinks is a builtin_function_or_method; expected a list"),
        ({"sinks": [3]}, "sinks holds a int; expected objects with write"),
        ({"probes": 3}, "probes is a int; expected a list"),
    ],
)
def test_arguments_nobody_knows_and_wrong_sinks_are_refused(arguments, match, tmp_path) -> None:
    with pytest.raises(InputError, match=match):
        watch(block(), out=tmp_path / "run", **arguments)
    with pytest.raises(InputError, match=match):
        check_watch_arguments(**arguments)
    assert not list(tmp_path.iterdir())


def test_names_that_configs_use_are_known() -> None:
    assert check_watch_arguments(n_head=2, is_decoder=True).arguments == {
        "n_head": 2,
        "is_decoder": True,
    }


def test_heads_that_contradict_the_module_are_refused(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    with pytest.raises(InputError, match=r"heads=4 was given, but .* has num_heads=2"):
        watch(model, sgd(model), out=tmp_path, heads=4)
    assert watch(model, sgd(model), out=tmp_path, heads=2).steps == 0


# ── numbers ──


def test_each_step_reads_what_it_starts_from_and_the_end_what_there_is(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model, 1.0)
    names = ["qk_effective_rank", "ov_effective_rank", "ov_spectral_norm", "largest_logit_gain"]
    seen = []
    with watch(model, optimizer, 2, invariants=names, out=tmp_path) as run:
        for x in data(4):
            seen.append(inspect(model).layers[0].per_head)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
    seen.append(inspect(model).layers[0].per_head)

    def read(name: str, step: int, end: bool) -> list[float]:
        return [
            r.value
            for r in run.readings()
            if (r.name, r.step, r.source == "end") == (name, step, end)
        ]

    for name in names:
        for step in (1, 2, 4):
            assert read(name, step, False) == pytest.approx(seen[step - 1][name], rel=1e-9), name
        assert read(name, 4, True) == pytest.approx(seen[4][name], rel=1e-9)
        assert read(name, 4, True) != pytest.approx(read(name, 4, False), rel=1e-6)
    follower = Follower(tmp_path)
    follower.read()
    [row] = follower.rows()
    assert row["qk_effective_rank"] == pytest.approx(seen[4]["qk_effective_rank"].mean())
    figure = next(f for f in Run.open(tmp_path).figures() if f.name == "watch.qk_rank")
    drawn = Run.open(tmp_path).array(figure.arrays["y"])
    assert drawn[0, -1] == pytest.approx(seen[4]["qk_effective_rank"].mean())


def test_snapshots_hold_the_folded_layer(tmp_path: Path) -> None:
    model = block()
    gain = model.layers[0].norm1.weight.detach().clone()
    q = model.layers[0].self_attn.in_proj_weight[:WIDTH].detach().clone() * gain
    q = q - q.mean(1, keepdim=True)
    optimizer = sgd(model)
    with watch(model, optimizer, invariants=(), maps=False, snapshots=1, out=tmp_path) as run:
        train(model, run, optimizer, 1)
    _, [view] = read_snapshot(tmp_path / "snapshots" / "step-00000001.safetensors")
    torch.testing.assert_close(view.q.reshape(WIDTH, WIDTH), q)
    assert view.q.dtype == torch.float32


def test_losses_of_micro_batches_are_averaged(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model)
    given = []
    with watch(model, optimizer, 1, out=tmp_path) as run:
        for i, x in enumerate(data(6)):
            loss = model(x).square().mean()
            loss.backward()
            given.append(float(loss.detach()))
            run.step(loss)
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    found = [r.value for r in run.readings() if r.name == "loss"]
    assert found == pytest.approx([sum(given[:3]) / 3, sum(given[3:]) / 3], rel=1e-6)


def test_gradients_that_are_gone_are_no_zero(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model)
    with watch(model, every=1, out=tmp_path) as run:
        for x in data(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.step(loss)
    readings = run.readings()
    assert not [r for r in readings if r.name == "gradient_norm"]
    assert [r for r in readings if r.name == "update_norm"]
    assert sum(note.startswith("No gradient norms") for note in run.notes()) == 1


# ── copies ──


def test_a_watched_model_can_be_copied_and_stored(tmp_path: Path) -> None:
    """Also while its maps are about to be looked at, when there are hooks on every layer."""
    model = Plain()
    optimizer = sgd(model)
    x = data(1)[0]
    with watch(model, optimizer, 1, out=tmp_path) as run:
        train(model, run, optimizer, 1)
        assert any(module._forward_hooks for module in model.modules())
        twins = [copy.deepcopy(model)]
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twins.append(torch.load(file, weights_only=False))
        assert len(file.getvalue()) < 100_000  # no run, no second model
        for twin in twins:
            assert torch.equal(twin(x), model(x))
            twin(3 * x).sum().backward()
        copy.deepcopy(optimizer)
        train(model, run, optimizer, 2)
    assert run.steps == 3
    shares = {r.step for r in run.readings() if r.name == "attention_entropy_share"}
    assert shares == {1, 2, 3}
    hooked = [h for m in twins[0].modules() for h in m._forward_pre_hooks.values()]
    assert hooked  # copied, and idle
    assert torch.isfinite(twins[0](x)).all()


# ── resuming ──


def test_what_comes_after_the_step_a_run_is_resumed_from_is_superseded(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model)
    with watch(model, optimizer, 2, snapshots=3, out=tmp_path) as run:
        train(model, run, optimizer, 6)
    run_folder = Run.open(tmp_path)
    run_folder.add_readings(
        [
            Reading(
                "alarm.dead_head",
                0.01,
                "1",
                {"layer": "layers.0.self_attn", "head": 0, "since": 5, "harmful": 0},
                6,
                "alarm",
            )
        ]
    )
    follower = Follower(tmp_path)
    follower.read()
    assert follower.alarms
    with watch(model, optimizer, 2, snapshots=3, resume=4, out=tmp_path) as again:
        assert again.steps == 4
        assert not (tmp_path / "snapshots" / "step-00000006.safetensors").exists()
        assert (tmp_path / "snapshots" / "step-00000003.safetensors").exists()
        assert max(r.step for r in again.readings()) == 4
        train(model, again, optimizer, 1)
    readings = again.readings()
    assert max(r.step for r in readings) == 5
    assert sum(r.name == "loss" for r in readings) == 5
    assert max(r.step for r in Run.open(tmp_path).readings()) == 6  # nothing is erased
    follower.read()
    assert (follower.step, follower.alarms, follower.finished) == (5, {}, True)
    assert len(follower.history("loss")) == 5
    loss = next(f for f in Run.open(tmp_path).figures() if f.name == "watch.loss")
    assert "in 5 steps" in loss.says
    with watch(model, optimizer, 2, snapshots=3, resume=True, out=tmp_path) as more:
        assert more.steps == 5
        train(model, more, optimizer, 1)


# ── misuse ──


def test_a_step_outside_the_block_is_refused(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model)
    run = watch(model, optimizer, out=tmp_path)
    for call in (run.step, lambda: run.record("accuracy", 1.0)):
        with pytest.raises(InputError, match=r"with levelhead\.watch"):
            call()
    with run:
        train(model, run, optimizer, 1)
    with pytest.raises(InputError, match="after the block"):
        run.step(1.0)


def test_forgotten_losses_are_noted(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model)
    with watch(model, optimizer, out=tmp_path):
        model(data(1)[0]).sum().backward()
        optimizer.step()
    assert any(n.startswith("No loss was handed over") for n in Run.open(tmp_path).notes())


@pytest.mark.parametrize("made", [False, True])
def test_a_run_that_fails_at_once_can_be_repeated(made: bool, tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model)
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    with (
        pytest.raises(RuntimeError) as caught,
        watch(model, optimizer, probe_batch=torch.ones(2, 5, 3), out=folder) as run,
    ):
        train(model, run, optimizer, 1)
    assert any("its argument probe_batch" in note for note in caught.value.__notes__)
    assert folder.exists() == made
    assert not made or not list(folder.iterdir())

    def closure() -> Tensor:
        raise ValueError("mine")

    with (
        pytest.raises(ValueError, match="mine") as caught,
        watch(model, optimizer, sharpness=closure, out=folder) as run,
    ):
        train(model, run, optimizer, 1)
    assert any("its argument sharpness" in note for note in caught.value.__notes__)
    with watch(model, optimizer, out=folder) as run:
        train(model, run, optimizer, 1)
    assert run.steps == 1


def test_a_loss_that_is_not_finite_is_told_once_and_shown(tmp_path: Path) -> None:
    model = block()
    optimizer = sgd(model, 0.0)

    def loop() -> None:
        with watch(model, optimizer, 1, out=tmp_path) as run:
            for x in data(4):
                model(x).square().mean().backward()
                optimizer.step()
                run.step(math.nan if run.steps in (2, 3) else 1.0)

    with pytest.warns(LevelheadWarning, match="The loss was nan at step 2") as caught:
        loop()
    assert len(caught) == 1
    follower = Follower(tmp_path)
    follower.read()
    assert "The loss was nan at step 2." in follower.state()["notes"]


def test_observations_are_at_hand(tmp_path: Path) -> None:
    model = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    with torch.no_grad():
        model.in_proj_weight[: 2 * WIDTH] *= 100
    optimizer = sgd(model, 0.0)
    with watch(model, optimizer, 1, out=tmp_path) as run:
        for x in data(2):
            loss = model(x, x, x)[0].square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
    assert {(one.name, one.reason) for one in run.observations} == {
        ("entropy_collapse", "it began so")
    }
    assert {one.head for one in run.observations} == {0, 1}
