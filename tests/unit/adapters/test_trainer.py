"""transformers' Trainer: watched, with SAM and with penalties; tiny models, on the CPU."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import oracles.sam as slow
from levelhead.adapters.transformers import LevelheadTrainer, WatchCallback
from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.records import Reading, Run
from levelhead.training.penalties import coherence, stability
from levelhead.training.schedules import Linear

HEADS, LAYERS = 4, 2
WORKER = Path(__file__).with_name("trainer_worker.py")


class Examples(torch.utils.data.Dataset):
    """Token sequences of random lengths with labels."""

    def __init__(self, many: int = 24, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 30, (many, 7), generator=draw)
        self.labels = torch.randint(2, (many,), generator=draw)
        self.mask = torch.arange(7)[None] < torch.randint(3, 8, (many, 1), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        found = {"input_ids": self.ids[i], "labels": self.labels[i]}
        return found | {"attention_mask": self.mask[i].long()}


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder / "out"), **(settings | more))


def trained(folder: Path, kind: type[Trainer] = Trainer, **more: Any) -> tuple[nn.Module, Trainer]:
    """A BERT trained a few steps; `more` goes to the arguments if they know it, else to `kind`."""
    given = {n: more.pop(n) for n in list(more) if n in TrainingArguments.__dataclass_fields__}
    model = more.pop("model", None) or bert()
    trainer = kind(model, arguments(folder, **given), train_dataset=Examples(), **more)
    trainer.train()
    return model, trainer


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(weights(one), weights(other), strict=True))


def values(readings: list[Reading], name: str) -> dict[int | None, float]:
    return {r.step: r.value for r in readings if r.name == name and not r.where}


class Losses(Trainer):
    """A Trainer that keeps the loss of each step: the parts its micro-batches have in it."""

    def training_step(self, *args: Any, **more: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **more)
        vars(self).setdefault("parts", []).append(float(loss))
        return loss


# ── watched ──


@pytest.mark.parametrize("more", [{}, {"bf16": True}, {"gradient_accumulation_steps": 3}])
def test_training_is_the_same_by_the_bit_and_all_is_recorded(
    more: dict[str, Any], tmp_path: Path
) -> None:
    plain, trainer = trained(tmp_path, Losses, **more)
    watching = WatchCallback(every=2, out=tmp_path / "run")
    seen, _ = trained(tmp_path, callbacks=[watching], **more)
    assert equal(plain, seen)
    assert watching.run is not None
    readings = watching.run.readings()
    count = more.get("gradient_accumulation_steps", 1)
    steps = np.array(trainer.parts).reshape(4, count).sum(1)
    found = values(readings, "loss")
    assert list(found) == [1, 2, 3, 4]
    assert np.allclose(list(found.values()), steps, rtol=1e-6)
    for name in ("attention_entropy", "map_rank", "qk_effective_rank"):
        places = {(r.step, r.where["layer"], r.where["head"]) for r in readings if r.name == name}
        assert len(places) == 3 * LAYERS * HEADS, name
        assert {step for step, _, _ in places} == {1, 2, 4}
    assert all("weights and maps" in how for how in watching.run.coverage.values())
    assert not seen._forward_hooks
    assert not seen._forward_pre_hooks


def test_a_loss_over_the_items_of_all_micro_batches(tmp_path: Path) -> None:
    class Counted(nn.Module):
        """Takes num_items_in_batch, and so does not have its losses divided by the Trainer."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.embed = nn.Embedding(30, 8)

        def forward(
            self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, **given: Any
        ) -> dict[str, Tensor]:
            x = self.embed(input_ids)
            x = self.attn(x, x, x)[0].mean((1, 2))
            total = (x - labels).square().sum()
            return {"loss": total / given.get("num_items_in_batch", len(x))}

    watching = WatchCallback(every=2, out=tmp_path / "run")
    more = {"gradient_accumulation_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
    _, trainer = trained(tmp_path, Losses, model=Counted(), callbacks=[watching], **more)
    assert watching.run is not None
    found = list(values(watching.run.readings(), "loss").values())
    assert np.allclose(found, np.array(trainer.parts).reshape(4, 2).sum(1), rtol=1e-6)


def test_validation_losses_and_the_steps_they_belong_to(tmp_path: Path) -> None:
    watching = WatchCallback(every=4, out=tmp_path / "run")
    more = {"eval_strategy": "steps", "eval_steps": 2}
    _, trainer = trained(tmp_path, callbacks=[watching], eval_dataset=Examples(6, seed=1), **more)
    assert watching.run is not None
    logged = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    assert values(watching.run.readings(), "validation_loss") == logged
    assert list(logged) == [2, 4]
    trainer.evaluate()  # after training: nothing is written
    assert len(values(watching.run.readings(), "validation_loss")) == 2


def test_several_evaluation_sets_are_told_apart(tmp_path: Path) -> None:
    watching = WatchCallback(every=4, out=tmp_path / "run")
    sets = {"a": Examples(4, seed=1), "b": Examples(4, seed=2)}
    trained(tmp_path, callbacks=[watching], eval_dataset=sets, eval_strategy="steps", eval_steps=4)
    assert watching.run is not None
    readings = watching.run.readings()
    assert {r.where["data"] for r in readings if r.name == "evaluation_loss"} == {"a", "b"}
    assert not values(readings, "validation_loss")


def test_a_resumed_training_goes_on_at_the_checkpoints_step(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", max_steps=6)
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "seed": 42}
    out = tmp_path / "run"

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
            control.should_training_stop = state.global_step == 4
            return control

    trained(tmp_path, callbacks=[WatchCallback(every=3, out=out), Stop()], **saving)
    model = bert()
    watching = WatchCallback(every=3, out=out)
    trainer = Trainer(
        model, arguments(tmp_path, **saving), train_dataset=Examples(), callbacks=[watching]
    )
    trainer.train(resume_from_checkpoint=True)
    assert equal(whole, model)
    assert watching.run is not None
    readings = watching.run.readings()
    assert watching.run.steps == 6
    losses = [r.step for r in readings if r.name == "loss"]
    assert losses == [1, 2, 3, 4, 5, 6]  # the first step 4 is superseded by the one made again
    with pytest.raises(InputError, match="give WatchCallback out="):
        Trainer(
            bert(),
            arguments(tmp_path, **saving),
            train_dataset=Examples(),
            callbacks=[WatchCallback()],
        ).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))


class Broken(Examples):
    """Raises when the fourth batch is read, in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 12  # of which one batch is read ahead

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return super().__getitem__(i)


@pytest.mark.parametrize("how", ["with", "mixin", "dropped", "again"])
def test_a_training_that_raises_leaves_a_closed_run_and_a_free_model(
    how: str, tmp_path: Path
) -> None:
    watching = WatchCallback(every=2, out=tmp_path / "run")
    model = bert()
    kind = LevelheadTrainer if how == "mixin" else Trainer
    trainer = kind(model, arguments(tmp_path), train_dataset=Broken(), callbacks=[watching])
    if how == "with":
        with pytest.raises(OSError, match="the disk is gone"), watching:
            trainer.train()
    else:
        with pytest.raises(OSError, match="the disk is gone"):
            trainer.train()
    run = watching.run
    assert run is not None
    if how == "dropped":
        del trainer, watching
        gc.collect()
    if how == "again":
        trainer.train_dataset = Examples()
        trainer.train()
        assert run is not watching.run
        assert watching.run is not None
        run = watching.run
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    ended = "OSError" if how in ("with", "mixin") else "Unfinished"
    assert any(f"Ended by {ended} after step 2" in note for note in run.notes())
    assert [r.step for r in run.readings() if r.name == "attention_entropy"]


def test_a_loss_that_is_not_the_models_is_warned_about_or_taken_exactly(tmp_path: Path) -> None:
    class Doubled(Trainer):
        def compute_loss(self, *args: Any, **more: Any) -> Any:
            return 2 * super().compute_loss(*args, **more)

    class Exact(LevelheadTrainer, Doubled):
        """The mixin in front."""

    logging = {"logging_strategy": "steps", "logging_steps": 2}
    with pytest.warns(LevelheadWarning, match="use LevelheadTrainer"):
        trained(
            tmp_path,
            Doubled,
            callbacks=[WatchCallback(every=2, out=tmp_path / "1")],
            **logging,
        )
    watching = WatchCallback(every=2, out=tmp_path / "2")
    _, trainer = trained(tmp_path, Exact, callbacks=[watching], **logging)
    assert watching.run is not None
    found = np.array(list(values(watching.run.readings(), "loss").values()))
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert np.allclose(found.reshape(2, 2).mean(1), logged, rtol=1e-5)


def test_where_the_model_returns_no_loss_the_logged_average_is_taken(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 4

    watching = WatchCallback(every=2, out=tmp_path / "run")
    more = {"logging_strategy": "steps", "logging_steps": 2, "compute_loss_func": loss}
    _, trainer = trained(tmp_path, callbacks=[watching], **more)
    assert watching.run is not None
    logged = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}
    found = values(watching.run.readings(), "loss")
    assert found == pytest.approx(logged)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_a_compiled_model_is_named_and_its_losses_are_kept(tmp_path: Path) -> None:
    """Hooks inside are dropped: maps are missing and named, losses come as the Trainer logs them,
    or step by step from LevelheadTrainer."""
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    more = compiled | {"logging_strategy": "steps", "logging_steps": 2}
    plain, trainer = trained(tmp_path, Losses, **more)
    logged = {e["step"]: e["loss"] for e in trainer.state.log_history if "loss" in e}
    for kind in (Trainer, LevelheadTrainer):
        torch._dynamo.reset()
        watching = WatchCallback(every=2, out=tmp_path / kind.__name__)
        with pytest.warns(LevelheadWarning, match="no maps of .*torch.compile"):
            seen, _ = trained(tmp_path, kind, callbacks=[watching], **more)
        assert equal(plain, seen)
        assert watching.run is not None
        found = values(watching.run.readings(), "loss")
        steps = dict(enumerate(trainer.parts, start=1))
        assert found == pytest.approx(logged if kind is Trainer else steps, rel=1e-6)


def test_what_the_trainer_gives_is_not_taken_from_the_user() -> None:
    with pytest.raises(InputError, match="leave it to the Trainer"):
        WatchCallback(optimizer=None)


# ── SAM ──


class Tanh(nn.Module):
    """½ Σ ‖tanh(A x + c) - y‖² / B, the loss of the slow twin, in float64."""

    def __init__(self, weights: slow.Arrays) -> None:
        super().__init__()
        self.a, self.c = (nn.Parameter(torch.tensor(w)) for w in weights)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        errors = torch.tanh(x @ self.a.T + self.c) - labels
        return {"loss": 0.5 * errors.square().sum() / len(x)}


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_is_that_of_the_formula(micro: int, adaptive: bool, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    problem = slow.Problem(draw.normal(size=(6, 3)), draw.normal(size=(6, 2)))
    start = [draw.normal(size=(2, 3)), draw.normal(size=2)]
    expected, _ = slow.run(problem, start, slow.Sgd(lr=0.1), [0.3] * 2, [adaptive] * 2, steps=3)
    unperturbed, _ = slow.run(problem, start, slow.Sgd(lr=0.1), [1e-9] * 2, [adaptive] * 2, steps=3)
    model = Tanh(start)
    rows = [{"x": x, "labels": y} for x, y in zip(problem.x, problem.y, strict=True)]
    trainer = LevelheadTrainer(
        model,
        arguments(
            tmp_path,
            max_steps=3,
            max_grad_norm=0.0,
            per_device_train_batch_size=6 // micro,
            gradient_accumulation_steps=micro,
            lr_scheduler_type="constant",
        ),
        train_dataset=rows,
        data_collator=lambda rows: {
            k: torch.tensor(np.stack([row[k] for row in rows])) for k in rows[0]
        },
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        sam_rho=0.3,
        sam_adaptive=adaptive,
    )
    trainer.train()
    assert trainer.state.global_step == 3
    for got, want, other in zip(model.parameters(), expected, unperturbed, strict=True):
        assert np.allclose(got.detach().numpy(), want, rtol=1e-12, atol=1e-14)
        assert not np.allclose(want, other, rtol=1e-3)


@pytest.mark.parametrize("count", [1, 2])
def test_without_a_radius_training_is_the_trainers_by_the_bit(count: int, tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": count, "max_grad_norm": 0.5}
    plain, _ = trained(tmp_path, **more)
    ours, _ = trained(tmp_path, LevelheadTrainer, sam_rho=0.0, **more)
    other, _ = trained(tmp_path, LevelheadTrainer, sam_rho=0.05, **more)
    assert equal(plain, ours)
    assert not equal(plain, other)


def test_the_second_pass_meets_the_masks_of_the_first_and_leaves_buffers_alone(
    tmp_path: Path,
) -> None:
    """Dropout and batch normalisation in two micro-batches, against the same by hand."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first, self.norm = nn.Linear(7, 5), nn.BatchNorm1d(5)
            self.drop, self.last = nn.Dropout(0.5), nn.Linear(5, 1)

        def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:
            x = self.last(self.drop(torch.tanh(self.norm(self.first(input_ids / 30)))))
            return {"loss": (x[:, 0] - labels).square().mean()}

    class Seen(LevelheadTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            if not micros:
                self.before = {k: v.clone() for k, v in model.state_dict().items()}
            micros.append((torch.get_rng_state(), inputs))
            return super().training_step(model, inputs, *args)

    micros: list[tuple[Tensor, dict[str, Tensor]]] = []
    model = Net()
    trainer = Seen(
        model,
        arguments(
            tmp_path,
            max_steps=1,
            gradient_accumulation_steps=2,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        ),
        train_dataset=Examples(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        sam_rho=0.2,
    )
    trainer.train()
    byhand = Net()
    byhand.load_state_dict(trainer.before)

    def gradients() -> list[Tensor]:
        byhand.zero_grad()
        for state, inputs in micros:
            torch.set_rng_state(state)
            (byhand(**inputs)["loss"] / 2).backward()
        return [p.grad.clone() for p in byhand.parameters()]

    start = weights(byhand)
    first = gradients()
    buffers = {name: b.clone() for name, b in byhand.named_buffers()}
    norm = torch.stack([g.square().sum() for g in first]).sum().sqrt()
    with torch.no_grad():
        for p, g in zip(byhand.parameters(), first, strict=True):
            p += 0.2 * g / norm
    second = gradients()
    for p, w, g in zip(model.parameters(), start, second, strict=True):
        torch.testing.assert_close(p.detach(), w - 0.1 * g, rtol=1e-5, atol=1e-7)
    assert len(micros) == 2
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name])


def test_the_gradient_that_is_clipped_is_the_second(tmp_path: Path) -> None:
    model, _ = trained(
        tmp_path,
        LevelheadTrainer,
        sam_rho=0.3,
        max_steps=1,
        max_grad_norm=1e-3,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
    )
    moved = [p - q for p, q in zip(weights(model), weights(bert()), strict=True)]
    assert float(torch.stack([m.norm() for m in moved]).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_watched_under_sam_the_loss_is_the_first_and_each_step_counts_once(tmp_path: Path) -> None:
    watching = WatchCallback(every=2, out=tmp_path / "run")
    more = {"gradient_accumulation_steps": 2, "max_steps": 2}
    trained(tmp_path, LevelheadTrainer, sam_rho=0.5, callbacks=[watching], **more)
    plain = WatchCallback(every=2, out=tmp_path / "plain")
    trained(tmp_path, callbacks=[plain], **more)
    assert watching.run is not None
    assert plain.run is not None
    sam, without = (values(w.run.readings(), "loss") for w in (watching, plain) if w.run)
    assert list(sam) == [1, 2]
    assert sam[1] == pytest.approx(without[1], rel=1e-6)
    assert sam[2] != pytest.approx(without[2], rel=1e-6)


# ── penalties ──


@pytest.mark.parametrize("count", [1, 3])
def test_a_penalty_counts_once_a_step(count: int, tmp_path: Path) -> None:
    """Against the twin's gradient and that of 5 ‖A‖²/2, by hand."""
    draw = np.random.default_rng(0)
    problem = slow.Problem(draw.normal(size=(6, 3)), draw.normal(size=(6, 2)))
    start = [draw.normal(size=(2, 3)), draw.normal(size=2)]
    a, c = problem.gradient(start)
    expected = [start[0] - 0.1 * (a + 5 * start[0]), start[1] - 0.1 * c]
    model = Tanh(start)
    rows = [{"x": x, "labels": y} for x, y in zip(problem.x, problem.y, strict=True)]
    trainer = LevelheadTrainer(
        model,
        arguments(
            tmp_path,
            max_steps=1,
            max_grad_norm=0.0,
            per_device_train_batch_size=6 // count,
            gradient_accumulation_steps=count,
            lr_scheduler_type="constant",
        ),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=lambda rows: {
            k: torch.tensor(np.stack([row[k] for row in rows])) for k in rows[0]
        },
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        penalties=[lambda: 2.5 * model.a.square().sum()],
    )
    trainer.train()
    for got, want in zip(model.parameters(), expected, strict=True):
        assert np.allclose(got.detach().numpy(), want, rtol=1e-12, atol=1e-14)
    there = [p.detach().numpy() for p in model.parameters()]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(problem.loss(there), rel=1e-6)


def test_a_penalty_is_part_of_the_loss_that_counted_items_divide(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / 8

    class Parts(LevelheadTrainer, Losses):
        pass

    _, trainer = trained(
        tmp_path,
        Parts,
        compute_loss_func=loss,
        gradient_accumulation_steps=2,
        max_steps=1,
        penalties=[lambda: torch.tensor(100.0)],
    )
    assert 100 < sum(trainer.parts) < 102


def test_penalties_are_stepped_and_go_on_with_a_checkpoint(tmp_path: Path) -> None:
    def build(folder: Path, steps: int) -> LevelheadTrainer:
        model = bert()
        penalties = [
            coherence(model, weight=0.5, schedule=Linear(6)),
            stability(model, weight=0.5),
        ]
        return LevelheadTrainer(
            model,
            arguments(folder, max_steps=6, save_strategy="steps", save_steps=3),
            train_dataset=Examples(),
            penalties=penalties,
        )

    whole = build(tmp_path / "a", 6)
    whole.train()
    assert [p.steps for p in whole.penalties] == [6, 6]
    rest = build(tmp_path / "b", 6)
    rest.train(resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-3"))
    assert [p.steps for p in rest.penalties] == [6, 6]
    assert equal(whole.model, rest.model)
    (tmp_path / "a" / "out" / "checkpoint-3" / "penalties.pt").unlink()
    with pytest.warns(LevelheadWarning, match="holds no state of penalties"):
        build(tmp_path / "c", 6).train(
            resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-3")
        )


def test_penalties_that_would_be_dropped_are_refused(tmp_path: Path) -> None:
    class Own(LevelheadTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            return model(**inputs)["loss"]

    with pytest.raises(InputError, match=r"does not call super\(\).compute_loss"):
        trained(tmp_path, Own, penalties=[lambda: torch.zeros(())])
    with pytest.raises(InputError, match="model_init makes another"):
        LevelheadTrainer(
            args=arguments(tmp_path), model_init=bert, penalties=[lambda: torch.zeros(())]
        )
    with pytest.raises(InputError, match="radius"):
        LevelheadTrainer(bert(), arguments(tmp_path), sam_rho=-1.0)


# ── as in the README ──


def test_the_readme_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, data, held_out = bert(), Examples(), Examples(8, seed=1)
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=4)
    # fmt: off
    from levelhead.adapters.transformers import LevelheadTrainer, WatchCallback
    from levelhead.training.penalties import coherence

    trainer = LevelheadTrainer(
        model, args, train_dataset=data, eval_dataset=held_out,
        sam_rho=0.05, penalties=[coherence(model, weight=0.1)],
        callbacks=[WatchCallback(every=50, out="run")],
    )
    trainer.train()
    # fmt: on
    lines = (tmp_path / "run" / "readings-main.jsonl").read_text().splitlines()
    names = {json.loads(line)["name"] for line in lines}
    assert {"loss", "validation_loss", "attention_entropy", "qk_coherence"} <= names


# ── several processes ──


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("trainer_worker", WORKER)
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
    own |= {"OMP_NUM_THREADS": 1}
    running = []
    for rank in range(2):
        env = {
            name: str(value) for name, value in (own | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        command = [sys.executable, str(WORKER), str(tmp_path), str(count)]
        running.append(subprocess.Popen(command, env=os.environ | env))
    try:
        assert [process.wait(timeout=240) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = worker.train(tmp_path / "alone", 1, 1)
    start = worker.Net().parameters()
    for p, q, want, before in zip(one, other, alone, start, strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, want, rtol=1e-12, atol=1e-14)
        assert not torch.allclose(want, before)
    runs = [Run.open(folder / "run") for folder in (tmp_path, tmp_path / "alone")]
    found, wanted = (values(run.readings(), "weight_norm") for run in runs)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert list(values(runs[0].readings(), "loss")) == [1, 2, 3]
