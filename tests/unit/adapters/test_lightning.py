"""Lightning's Trainer: watched, with SAM and with penalties; tiny models, on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import oracles.sam as slow
from levelhead.adapters.lightning import PenaltySteps, SharpnessAware, WatchCallback
from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.records import Reading, Run
from levelhead.training.penalties import coherence, stability
from levelhead.training.sam import SAM
from levelhead.training.schedules import Linear

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*have no `val_dataloader`:UserWarning",
    "ignore:.*dataloader_iter.*:UserWarning",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",  # of Lightning itself
)
HEADS, D = 2, 8
WORKER = Path(__file__).with_name("lightning_worker.py")


class Attends(L.LightningModule):
    """Attention, dropout and batch normalisation; training_step does not call forward."""

    def __init__(self, sam: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.norm, self.drop, self.head = nn.BatchNorm1d(D), nn.Dropout(0.3), nn.Linear(D, 1)
        self.sam, self.options = sam, options
        self.losses: list[float] = []
        self.penalty: Any = lambda: 0.0

    def loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        x = self.attn(x, x, x, need_weights=False)[0].mean(1)
        return (self.head(self.drop(self.norm(x)))[:, 0] - y).square().mean()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.loss(batch) + self.penalty()
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.loss([10 * batch[0], batch[1]]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.sam:
            return SAM(self.parameters(), torch.optim.SGD, lr=0.1, **self.options)
        return torch.optim.SGD(self.parameters(), lr=0.1, **self.options)


def data(many: int = 12, size: int = 3) -> DataLoader:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(many, 5, D, generator=draw), torch.randn(many, generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def trainer(*callbacks: Any, **more: Any) -> L.Trainer:
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return L.Trainer(callbacks=list(callbacks), **(settings | more))


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], others[name]) for name in others)


def values(readings: list[Reading], name: str) -> dict[int | None, float]:
    return {r.step: r.value for r in readings if r.name == name and not r.where}


# ── watched ──


@pytest.mark.parametrize(
    "more",
    [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}],
)
def test_training_is_the_same_by_the_bit_and_all_is_recorded(
    more: dict[str, Any], tmp_path: Path
) -> None:
    count = more.get("accumulate_grad_batches", 1)
    plain = Attends()
    torch.manual_seed(1)
    trainer(**more).fit(plain, data(), data())
    watching, seen = WatchCallback(every=2, out=tmp_path / "run"), Attends()
    torch.manual_seed(1)
    trainer(watching, **more).fit(seen, data(), data())
    assert equal(plain, seen)
    assert watching.run is not None
    readings, steps = watching.run.readings(), -(-4 // count)
    found = values(readings, "loss")
    # The last step has one micro-batch, and Lightning divides its loss as the others.
    expected = [sum(plain.losses[i : i + count]) / count for i in range(0, 4, count)]
    assert list(found) == list(range(1, steps + 1))
    assert np.allclose(list(found.values()), expected, rtol=1e-6)
    sampled = {1, 2, steps}
    for name in ("attention_entropy", "map_rank", "qk_effective_rank"):
        assert {r.step for r in readings if r.name == name} == sampled, name
        assert {r.where["head"] for r in readings if r.name == name} == set(range(HEADS))
    assert "weights and maps" in watching.run.coverage["attn"]
    norms = values(readings, "gradient_norm")
    updates = values(readings, "update_norm")
    assert [updates[s] for s in norms] == pytest.approx([0.1 * g for g in norms.values()], rel=1e-4)
    assert not seen._forward_pre_hooks
    assert not seen.attn._forward_hooks


@pytest.mark.parametrize("sam", [False, True])
def test_maps_are_those_of_training_where_forward_is_never_called(
    sam: bool, tmp_path: Path
) -> None:
    """Validation after each batch sees tokens ten times as large: its logits are far larger."""
    largest = []
    for often in (None, 1):
        watching = WatchCallback(every=1, out=tmp_path / str(often))
        fit, model = trainer(watching, val_check_interval=often), Attends(sam=sam)
        model.drop.p = 0.0  # loaders of validation draw from the random state, too
        fit.fit(model, data(), data())
        assert watching.run is not None
        found = [r.value for r in watching.run.readings() if r.name == "largest_logit"]
        largest.append(found[: 4 * HEADS])
        if often:
            recorded = values(watching.run.readings(), "validation_loss")
            assert list(recorded) == [1, 2, 3, 4]
            assert recorded[4] == pytest.approx(float(fit.callback_metrics["val_loss"]), rel=1e-6)
    assert largest[0] == largest[1]


def test_a_fit_from_a_checkpoint_goes_on_at_its_step(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = trainer(WatchCallback(every=4, out=out))
    first.fit(Attends(), data())
    first.save_checkpoint(tmp_path / "after.ckpt")
    watching = WatchCallback(every=4, out=out)
    second = trainer(watching, max_epochs=2)
    second.fit(Attends(), data(), ckpt_path=tmp_path / "after.ckpt")
    assert watching.run is not None
    assert list(values(watching.run.readings(), "loss")) == list(range(1, 9))
    with pytest.raises(InputError, match="give WatchCallback out="):
        trainer(WatchCallback(), max_epochs=2).fit(
            Attends(), data(), ckpt_path=tmp_path / "after.ckpt"
        )


def test_an_error_closes_the_run_and_goes_on(tmp_path: Path) -> None:
    class Fails(Attends):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            if len(self.losses) == 2:
                raise OSError("the disk is gone")
            return super().training_step(batch)

    watching, model = WatchCallback(every=2, out=tmp_path / "run"), Fails()
    with pytest.raises(OSError, match="the disk is gone"):
        trainer(watching).fit(model, data())
    assert watching.run is not None
    assert any("Ended by OSError after step 2" in note for note in watching.run.notes())
    assert not model._forward_pre_hooks


def test_what_it_cannot_go_with_is_refused(tmp_path: Path) -> None:
    class Manual(Attends):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    for callback in (WatchCallback(out=tmp_path / "m"), SharpnessAware()):
        with pytest.raises(InputError, match="manual optimisation"):
            trainer(callback).fit(Manual(), data())
    with pytest.raises(InputError, match="leave it to the Trainer"):
        WatchCallback(model=None)
    with pytest.raises(InputError, match="makes passes of its own"):
        trainer(SharpnessAware()).fit(Attends(sam=True), data())
    with pytest.raises(InputError, match="radius"):
        SharpnessAware(rho=-1.0)

    class Iterates(Attends):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            return super().training_step(next(dataloader_iter)[0])

    with pytest.raises(InputError, match="takes dataloader_iter"):
        trainer(SharpnessAware()).fit(Iterates(), data())
    with pytest.warns(LevelheadWarning, match="sees the last micro-batch alone"):
        trainer(WatchCallback(out=tmp_path / "s"), accumulate_grad_batches=2).fit(
            Attends(sam=True), data()
        )


# ── SAM ──


class Tanh(L.LightningModule):
    """½ Σ ‖tanh(A x + c) - y‖² / B, the loss of the slow twin, in float64."""

    def __init__(self, start: slow.Arrays, optimizer: Any) -> None:
        super().__init__()
        self.a, self.c = (nn.Parameter(torch.tensor(w)) for w in start)
        self.optimizer, self.losses = optimizer, []

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Tensor]:
        x, y = batch
        loss = 0.5 * (torch.tanh(x @ self.a.T + self.c) - y).square().sum() / len(x)
        self.losses.append(loss.item())
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sam(parameters: Any) -> SAM:
    return SAM(parameters, torch.optim.SGD, rho=0.3, lr=0.1)


@pytest.mark.parametrize(("way", "micro"), [("closure", 1), ("callback", 1), ("callback", 3)])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_is_that_of_the_formula(
    way: str, micro: int, clip: float | None, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    problem = slow.Problem(draw.normal(size=(6, 3)), draw.normal(size=(6, 2)))
    start = [draw.normal(size=(2, 3)), draw.normal(size=2)]

    def reached(rho: float) -> slow.Arrays:
        here, base = start, slow.Sgd(lr=0.1)
        for _ in range(3):
            there = slow.displaced(here, problem.gradient(here), [rho] * 2, [False] * 2)
            gradient = problem.gradient(there)
            norm = sum(float((g**2).sum()) for g in gradient) ** 0.5
            # torch's clip divides by the norm plus 1e-6.
            shrink = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            here = base.step(here, [shrink * g for g in gradient])
        return here

    batches = DataLoader(
        TensorDataset(torch.tensor(problem.x), torch.tensor(problem.y)), batch_size=6 // micro
    )
    model = Tanh(start, sam if way == "closure" else sgd)
    watching = WatchCallback(every=1, maps=False, invariants=(), out=tmp_path / "run")
    callbacks = [watching, *([SharpnessAware(rho=0.3)] if way == "callback" else [])]
    trainer(
        *callbacks,
        max_epochs=3,
        accumulate_grad_batches=micro,
        gradient_clip_val=clip,
        precision="64-true",
    ).fit(model, batches)
    for got, want, other in zip(model.parameters(), reached(0.3), reached(1e-9), strict=True):
        assert np.allclose(got.detach().numpy(), want, rtol=1e-12, atol=1e-14)
        assert not np.allclose(want, other, rtol=1e-3)
    assert watching.run is not None
    losses = values(watching.run.readings(), "loss")
    assert len(model.losses) == 3 * 2 * micro
    assert losses[1] == pytest.approx(problem.loss(start), rel=1e-12)
    assert list(losses) == [1, 2, 3]


def test_without_a_radius_training_is_lightnings_by_the_bit() -> None:
    plain, ours = Attends(momentum=0.9), Attends(momentum=0.9)
    for model, callbacks in ((plain, ()), (ours, (SharpnessAware(rho=0.0),))):
        torch.manual_seed(1)
        trainer(*callbacks, accumulate_grad_batches=2).fit(model, data())
    assert equal(plain, ours)


@pytest.mark.parametrize("way", ["closure", "callback"])
def test_the_second_pass_leaves_masks_buffers_and_logs_alone(way: str) -> None:
    """Against SAM's own loop, which `training.sam` tests by formula."""
    byhand = Attends()
    byhand.log = lambda *args, **options: None
    optimizer = SAM(byhand.parameters(), torch.optim.SGD, rho=0.2, lr=0.1)

    def pass_over(batch: list[Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = byhand.training_step(batch)
        loss.backward()
        return loss

    torch.manual_seed(1)
    with optimizer.ascent_pass(byhand):
        for batch in data():
            optimizer.step(functools.partial(pass_over, batch))

    model = Attends(sam=way == "closure")
    torch.manual_seed(1)
    if way == "closure":
        ready = SAM(model.parameters(), torch.optim.SGD, rho=0.2, lr=0.1)
        model.configure_optimizers = lambda: ready
        with ready.ascent_pass(model):
            trainer().fit(model, data())
    else:
        fit, aware = trainer(callback := SharpnessAware(rho=0.2)), callback
        fit.fit(model, data())
        assert aware.ascents == 4
        first = byhand.losses[::2]
        assert float(fit.callback_metrics["train_loss"]) == pytest.approx(np.mean(first), rel=1e-5)
        assert "log" not in vars(model)
    assert int(model.norm.num_batches_tracked) == 4
    for name, value in byhand.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-6, atol=1e-7)


# ── penalties ──


def test_penalties_are_stepped_and_kept_in_checkpoints(tmp_path: Path) -> None:
    def built() -> tuple[Attends, PenaltySteps]:
        model = Attends()
        first = coherence(model, weight=0.5, schedule=Linear(4))
        model.penalty = first + stability(model, weight=0.5)
        return model, PenaltySteps(model.penalty)

    whole, steps = built()
    torch.manual_seed(1)
    fit = trainer(steps, accumulate_grad_batches=2)
    fit.fit(whole, data())
    assert [p.steps for p in whole.penalty.penalties] == [2, 2]
    fit.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(2)
    further, goes_on = built()
    trainer(goes_on, max_epochs=2, accumulate_grad_batches=2).fit(
        further, data(), ckpt_path=tmp_path / "half.ckpt"
    )
    assert [p.steps for p in further.penalty.penalties] == [4, 4]


# ── as in the README ──


def test_the_readme_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, held_out = data(), data(6)
    # fmt: off
    from levelhead.adapters.lightning import PenaltySteps, SharpnessAware, WatchCallback
    from levelhead.training.penalties import coherence

    model = Attends()
    model.penalty = coherence(model, weight=0.1)    # training_step returns loss + self.penalty()
    watching = WatchCallback(every=50, out="run")   # val_loss is recorded, too
    trainer = L.Trainer(
        max_epochs=2, callbacks=[watching, SharpnessAware(rho=0.05), PenaltySteps(model.penalty)],
        logger=False, enable_checkpointing=False, accelerator="cpu",
    )
    trainer.fit(model, train, held_out)
    # fmt: on
    assert watching.run is not None
    names = {reading.name for reading in watching.run.readings()}
    assert {"loss", "validation_loss", "attention_entropy", "qk_coherence"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert model.penalty.steps == 8


# ── several processes ──


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("lightning_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_two_processes_take_the_steps_of_one(count: int, tmp_path: Path) -> None:
    worker = load_worker()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own: dict[str, Any] = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own |= {"NODE_RANK": 0, "OMP_NUM_THREADS": 1}
    running = []
    for rank in range(2):
        env = {name: str(value) for name, value in (own | {"LOCAL_RANK": rank}).items()}
        command = [sys.executable, str(WORKER), str(tmp_path), str(count)]
        running.append(subprocess.Popen(command, env=os.environ | env))
    try:
        assert [process.wait(timeout=240) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = worker.train(tmp_path / "alone", 1, 1)
    for p, q, want, before in zip(one, other, alone, worker.Net().parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-14)
        assert not torch.allclose(want, before)
    runs = [Run.open(folder / "run") for folder in (tmp_path, tmp_path / "alone")]
    found, wanted = (values(run.readings(), "weight_norm") for run in runs)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert list(values(runs[0].readings(), "loss")) == [1, 2, 3]
