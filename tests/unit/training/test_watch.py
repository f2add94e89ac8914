"""Watching a loop: it changes nothing, counts steps rightly, writes what the weights are."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadError, LevelheadWarning
from levelhead.base.records import Reading, Run
from levelhead.invariants.catalogue import catalogue
from levelhead.nn.sigma_reparam import sigma_reparam
from levelhead.training.alarms import Thresholds
from levelhead.training.sam import SAM
from levelhead.training.watch import Watch, watch
from levelhead.weights.layouts import NothingMatched, views


class Model(nn.Module):
    """Dropout, batch norm and two attention layers: everything that has a state."""

    def __init__(self, width: int = 8, heads: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.two = nn.MultiheadAttention(width, heads, batch_first=True)
        self.out = nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(x, x, x)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = self.dropout(x + self.two(x, x, x, need_weights=False)[0])
        return self.out(x).mean((1, 2))


def data(steps: int = 6, width: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(steps, 3, 5, width, generator=generator)


def model_of(seed: int = 0, make: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.mean((1, 2))).square().mean()


def train(
    model: nn.Module,
    run: Watch | None,
    optimizer: torch.optim.Optimizer,
    steps: int = 6,
    loss_before: bool = False,
) -> None:
    closured = isinstance(optimizer, SAM | torch.optim.LBFGS)
    for x in data(steps):

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        if closured:
            loss = optimizer.step(closure)
        else:
            loss = closure()
            if loss_before and run is not None:
                run.step(loss)
            optimizer.step()
        if run is not None and not loss_before:
            run.step(loss)


def steps_of(readings: list[Reading], name: str) -> list[int | None]:
    return sorted({r.step for r in readings if r.name == name})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sam": lambda p: SAM(p, torch.optim.AdamW, rho=0.1, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


# ── nothing changes ──


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All bits that training leaves: weights, gradients, buffers, optimiser, random states."""
    state = [t.clone() for t in model.state_dict().values()]
    state += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for held in optimizer.state.values():
        state += [v.clone() for v in held.values() if isinstance(v, Tensor)]
    return [*state, torch.get_rng_state(), torch.tensor(np.random.rand(3)), random.random()]  # noqa: NPY002


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_bit_for_bit_the_same(kind: str, tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        model = model_of()
        x = data(1)[0]
        closure = lambda model=model, x=x: loss_of(model, x)  # noqa: E731
        optimizer = OPTIMIZERS[kind](model.parameters())
        context = watch(
            model, optimizer, 2, sharpness=closure, probe_batch=x, out=tmp_path / "run",
            snapshots=3 if kind == "adam" else None,
        ) if watched else nullcontext()  # fmt: skip
        with context as run:
            train(model, run, optimizer)
        found.append(everything(model, optimizer))
    assert len(found[0]) == len(found[1]) > 20
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_nothing_is_left_on_the_model_and_the_optimizer(tmp_path: Path) -> None:
    model = model_of()
    optimizer = OPTIMIZERS["sam"](model.parameters())
    with watch(model, optimizer, 2, out=tmp_path) as run:
        train(model, run, optimizer)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not optimizer.base_optimizer._optimizer_step_pre_hooks
    assert not optimizer.base_optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


# ── steps ──


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sampled_steps_are_the_first_every_and_the_last(kind: str, tmp_path: Path) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with watch(model, optimizer, 3, out=tmp_path) as run:
        train(model, run, optimizer, 7)
    readings = run.readings()
    assert run.steps == 7
    assert steps_of(readings, "qk_spectral_norm") == [1, 3, 6, 7]
    for name in ("gradient_norm", "update_norm", "attention_entropy"):
        assert steps_of(readings, name) == [1, 3, 6]
    assert steps_of(readings, "loss") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("loss_before", [True, False])
def test_losses_are_those_that_were_handed_over(loss_before: bool, tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(model)
    expected = []
    torch.manual_seed(5)
    for x in data():
        loss = loss_of(twin, x)
        expected.append(float(loss.detach()))
        for p, g in zip(
            twin.parameters(), torch.autograd.grad(loss, list(twin.parameters())), strict=True
        ):
            p.data -= 0.1 * g
    torch.manual_seed(5)
    with watch(model, optimizer, 4, out=tmp_path) as run:
        train(model, run, optimizer, loss_before=loss_before)
    found = {r.step: r.value for r in run.readings() if r.name == "loss"}
    assert [found[step] for step in range(1, 7)] == pytest.approx(expected, rel=1e-5)


def test_accumulation_and_evaluation_are_no_steps(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = data(8)
    with watch(model, optimizer, 1, out=tmp_path) as run:
        for i, x in enumerate(batches):
            loss_of(model, x).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    assert run.steps == 2
    assert steps_of(run.readings(), "gradient_norm") == [1, 2]


def test_maps_are_those_of_the_training_pass_not_of_evaluation(tmp_path: Path) -> None:
    """Evaluation comes first here, on another batch; its maps would be uniform."""
    model = model_of(make=lambda: Model(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = data(1)[0]
    with torch.no_grad():
        _, weights = model.one(x, x, x, average_attn_weights=False)
    entropy = -(weights * weights.log()).sum(-1).mean((0, 2))
    with watch(model, optimizer, 1, out=tmp_path) as run:
        for _ in range(2):
            with torch.no_grad():
                model(torch.zeros_like(x))
            loss_of(model, x).backward()
            optimizer.step()
    for step in (1, 2):
        found = [
            r.value for r in run.readings()
            if (r.name, r.step, r.where.get("layer")) == ("attention_entropy", step, "one")
        ]  # fmt: skip
        assert found == pytest.approx(entropy.tolist(), rel=1e-5)


def test_without_an_optimizer_the_loop_says_when_a_step_is_made(tmp_path: Path) -> None:
    model = model_of()
    before = [p.detach().clone() for p in model.parameters()]
    moves = []
    with watch(model, every=2, out=tmp_path) as run:
        for x in data(4):
            loss = loss_of(model, x)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            now = [p.detach().clone() for p in model.parameters()]
            moves.append(
                math.sqrt(
                    sum(float((a - b).square().sum()) for a, b in zip(now, before, strict=True))
                )
            )
            before = now
            run.step(loss, validation=2.0)
    readings = run.readings()
    found = {r.step: r.value for r in readings if r.name == "update_norm" and not r.where}
    assert found == {step: pytest.approx(moves[step - 1], rel=1e-4) for step in (1, 2, 4)}
    assert steps_of(readings, "validation_loss") == [1, 2, 3, 4]


def test_an_absent_step_is_refused_at_the_end(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"run\.step\(loss\) has to be called"),
        watch(Model(), out=tmp_path),
    ):
        pass


def test_an_optimizer_that_never_steps_is_warned_about(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(LevelheadWarning, match="no step was seen"),
        watch(model, optimizer, out=tmp_path),
    ):
        pass


# ── values ──


def test_readings_of_a_step_speak_of_the_weights_it_starts_from(tmp_path: Path) -> None:
    """The loop zeroes gradients first thing after the step, as many do."""
    model = model_of(make=lambda: Model(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    expected: dict[int, dict[str, float]] = {}
    with watch(model, optimizer, 2, out=tmp_path) as run:
        for step, x in enumerate(data(4), 1):
            loss_of(model, x).backward()
            names = dict(model.named_parameters())
            one = [p for n, p in names.items() if n.startswith("one.")]
            layer = {v.name: v for v in views(model)}["one"]
            expected[step] = {
                "gradient": float(torch.cat([p.grad.flatten() for p in names.values()]).norm()),
                "layer": float(torch.cat([p.grad.flatten() for p in one]).norm()),
                "weight": float(torch.cat([p.detach().flatten() for p in names.values()]).norm()),
                "qk": float(layer.qk.dense()[1].double().detach().norm(2)),
                "sigma": float(torch.linalg.matrix_norm(layer.qk.dense()[1].double().detach(), 2)),
            }
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    readings = [r for r in run.readings() if r.source != "end"]

    def one_of(name: str, step: int, **where: Any) -> float:
        [value] = [
            r.value for r in readings if (r.name, r.step, dict(r.where)) == (name, step, where)
        ]
        return value

    for step in (1, 2, 4):
        truth = expected[step]
        assert one_of("gradient_norm", step) == pytest.approx(truth["gradient"], rel=1e-5)
        assert one_of("gradient_norm", step, layer="one") == pytest.approx(truth["layer"], rel=1e-5)
        assert one_of("weight_norm", step) == pytest.approx(truth["weight"], rel=1e-5)
        # Plain gradient descent: the update is the gradient times the rate.
        assert one_of("update_norm", step) == pytest.approx(0.5 * truth["gradient"], rel=1e-4)
        assert one_of("update_norm", step, layer="one") == pytest.approx(
            0.5 * truth["layer"], rel=1e-4
        )
        assert one_of("qk_spectral_norm", step, layer="one", head=1) == pytest.approx(
            truth["sigma"], rel=1e-5
        )


def test_sam_reads_the_gradient_of_the_displaced_and_the_weights_of_the_undisplaced(
    tmp_path: Path,
) -> None:
    model = model_of(make=lambda: Model(dropout=0.0))
    for part in model.modules():
        part.eval() if isinstance(part, nn.BatchNorm1d) else None
    x, rho = data(1)[0], 0.3
    params = list(model.parameters())
    gradient = torch.autograd.grad(loss_of(model, x), params)
    size = torch.cat([g.flatten() for g in gradient]).norm()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p, g in zip(twin.parameters(), gradient, strict=True):
            p += rho * g / size
    displaced = torch.autograd.grad(loss_of(twin, x), list(twin.parameters()))
    expected = float(torch.cat([g.flatten() for g in displaced]).norm())
    weight = float(torch.cat([p.detach().flatten() for p in params]).norm())
    sam = SAM(params, torch.optim.SGD, rho=rho, lr=0.1)

    def closure() -> Tensor:
        sam.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss

    with watch(model, sam, out=tmp_path) as run:
        run.step(sam.step(closure))
    whole = {r.name: r.value for r in run.readings() if not r.where and r.source != "end"}
    assert whole["gradient_norm"] == pytest.approx(expected, rel=1e-4)
    assert abs(expected / float(size) - 1) > 1e-3  # the two gradients differ
    assert whole["weight_norm"] == pytest.approx(weight, rel=1e-6)
    assert whole["update_norm"] == pytest.approx(0.1 * expected, rel=1e-3)


def test_frozen_parameters_have_no_gradient_and_no_update(tmp_path: Path) -> None:
    model = model_of()
    model.one.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with watch(model, optimizer, out=tmp_path) as run:
        train(model, run, optimizer, 2)
    found = {(r.name, r.where.get("layer")): r.value for r in run.readings() if r.step == 1}
    for name in ("gradient_norm", "update_norm"):
        assert found[name, "one"] == 0.0
        assert found[name, "two"] > 0.0
    assert found["weight_norm", "one"] > 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, tmp_path: Path) -> None:
    model = model_of().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, 2, out=tmp_path) as run:
        for x in data(3).to(dtype):
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            run.step(loss)
    values = [r.value for r in run.readings() if r.step == 1]
    assert np.isfinite(values).all()
    assert steps_of(run.readings(), "attention_entropy") == [1, 2]


def test_autocast_and_a_scaler(tmp_path: Path) -> None:
    """Gradients are unscaled, and steps that the scaler leaves out are not counted."""
    model = model_of(make=lambda: Model(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    run = watch(model, optimizer, 1, out=tmp_path)

    def loop() -> None:
        with run:
            for i, x in enumerate(data(3)):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, x) * (math.inf if i == 1 else 1.0)
                scaler.scale(loss).backward()
                scale = scaler.get_scale()
                gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
                norms.append(float(gradient.norm()) / scale)
                scaler.step(optimizer)
                scaler.update()
                run.step(loss)

    with pytest.warns(LevelheadWarning, match="The loss was inf at step 1"):
        loop()
    assert run.steps == 2
    found = {r.step: r.value for r in run.readings() if r.name == "gradient_norm" and not r.where}
    assert found == {1: pytest.approx(norms[0], rel=1e-5), 2: pytest.approx(norms[2], rel=1e-5)}


def test_a_loss_that_is_not_finite_is_recorded_and_noted(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = watch(model, optimizer, 2, out=tmp_path, alarms=False)

    def loop() -> None:
        with run:
            for x in data(4):
                optimizer.zero_grad()
                loss = loss_of(model, x) * (math.nan if run.steps == 1 else 1.0)
                loss.backward()
                optimizer.step()
                run.step(loss)

    with pytest.warns(LevelheadWarning, match="The loss was nan at step 2") as caught:
        loop()
    found = {r.step: r.value for r in run.readings() if r.name == "loss"}
    assert math.isnan(found[2])
    assert len(caught) == 1
    assert any("The loss was nan at step 2" in note for note in run.notes())
    last = [r.value for r in run.readings() if (r.name, r.step) == ("qk_spectral_norm", 4)]
    assert last
    assert all(math.isnan(value) for value in last)


# ── layers of all kinds ──


def test_reparametrised_weights_are_read_as_the_model_uses_them(tmp_path: Path) -> None:
    model = model_of()
    sigma_reparam(model, gamma=1.0, names=("in_proj_weight",))
    nn.utils.parametrizations.spectral_norm(model.two.out_proj)
    before = {n: b.clone() for n, b in model.named_buffers()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, out=tmp_path) as run:
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name])
        train(model, run, optimizer, 1)
        # σ of every block of in_proj is γ = 1 at the start.
        q, k = model.one.in_proj_weight.detach()[:16].double().reshape(2, 8, 8)
    assert {r.where["layer"] for r in run.readings() if r.name == "qk_spectral_norm"} == {
        "one",
        "two",
    }
    found = [
        r.value
        for r in run.readings()
        if (r.name, r.where.get("layer"), r.step) == ("qk_spectral_norm", "one", 1)
    ]
    assert all(0 < value <= 1.0 + 1e-3 for value in found)
    assert q.shape == k.shape


def test_cross_attention_shared_and_grouped_layers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.models.albert.modeling_albert", exc_type=ImportError)
    common = {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "intermediate_size": 16,
        "vocab_size": 30,
    }
    models = {
        "albert": transformers.AlbertModel(
            transformers.AlbertConfig(**common, embedding_size=8, num_hidden_layers=3)
        ),
        "llama": transformers.LlamaModel(
            transformers.LlamaConfig(**common, num_key_value_heads=2, num_hidden_layers=1)
        ),
        "t5": transformers.T5Model(
            transformers.T5Config(
                vocab_size=30, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
            )
        ),
    }
    layers = {"albert": 1, "llama": 1, "t5": 3}
    ids = torch.randint(30, (2, 6), generator=torch.Generator().manual_seed(0))
    for name, model in models.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer, out=tmp_path / name) as run:
            more = {"decoder_input_ids": ids} if name == "t5" else {}
            model(input_ids=ids, **more)[0].square().mean().backward()
            optimizer.step()
        readings = [r for r in run.readings() if r.source != "end"]
        for what in ("qk_spectral_norm", "attention_entropy_share"):
            places = [(r.where["layer"], r.where["head"]) for r in readings if r.name == what]
            assert len(places) == len(set(places)) == 4 * layers[name], (name, what)
        assert all("maps" in how for how in run.coverage.values())


class Pruned(nn.Module):
    """Projections without a module that knows the number of heads."""

    def __init__(self, heads: int = 4, width: int = 3, d: int = 12) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, heads * width) for _ in range(3))
        self.out_proj = nn.Linear(heads * width, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (
            f(x).view(b, n, self.heads, self.width).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(b, n, -1))

    def prune(self, left: int) -> None:
        self.heads, rows = left, left * self.width
        for f in (self.q_proj, self.k_proj, self.v_proj):
            f.weight, f.bias = (
                nn.Parameter(f.weight[:rows].detach()),
                nn.Parameter(f.bias[:rows].detach()),
            )
        self.out_proj.weight = nn.Parameter(self.out_proj.weight[:, :rows].detach())


def test_heads_that_are_pruned_while_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Pruned()})
    layout = {
        "module": "attn",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "out_proj",
    }
    x = torch.randn(2, 5, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, 1, layout=layout, out=tmp_path, heads=4) as run:
        for step in range(4):
            if step == 2:
                model["attn"].prune(2)  # 6 rows: by halves of the old count it would be 4 heads
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            model["attn"](x).square().mean().backward()
            optimizer.step()
        sigma = catalogue()["qk_spectral_norm"](next(views(model, layout=layout, heads=2)))
    heads = {
        step: sum(
            (r.name, r.step) == ("qk_spectral_norm", step) and r.source != "end"
            for r in run.readings()
        )
        for step in (1, 2, 3, 4)
    }
    assert heads == {1: 4, 2: 4, 3: 2, 4: 2}
    assert any("Step 3: attn changed from 4 to 2 heads" in note for note in run.notes())
    assert steps_of(run.readings(), "attention_entropy") == [1, 2, 3, 4]
    assert len(sigma) == 2


# ── folders ──


def test_an_empty_folder_is_taken_and_a_used_one_refused(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "empty").mkdir()
    with watch(model, optimizer, out=tmp_path / "empty") as run:
        train(model, run, optimizer, 1)
    assert Run.open(tmp_path / "empty").command == "watch"
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    for used in ("empty", "used"):
        with (
            pytest.raises(InputError, match="is in use"),
            watch(model, optimizer, out=tmp_path / used),
        ):
            pytest.fail("it was entered")


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for resume in (False, True, 10):
        with watch(model, optimizer, 3, out=tmp_path, resume=resume) as run:
            train(model, run, optimizer, 4)
    readings = run.readings()
    assert steps_of(readings, "loss") == [*range(1, 9), *range(11, 15)]
    assert steps_of(readings, "gradient_norm") == [1, 3, 5, 6, 11, 12]
    with (
        pytest.raises(InputError, match="every"),
        watch(model, optimizer, 7, out=tmp_path, resume=True),
    ):
        pytest.fail("it was entered")
    names = [figure.name for figure in Run.open(tmp_path).figures()]
    assert len(names) == len(set(names)) > 0


def test_no_layer_is_named_with_what_was_seen(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NothingMatched, match=r"names seen are 0\.weight, 0\.bias"):
        watch(model, optimizer, out=tmp_path / "no")
    assert not (tmp_path / "no").exists()
    with watch(model, optimizer, maps=False, invariants=(), out=tmp_path / "yes") as run:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        run.step(1.0)
    assert {r.name for r in run.readings()} == {
        "loss",
        "gradient_norm",
        "update_norm",
        "weight_norm",
        "finished",
    }


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"every": 0}, "every=0"),
        ({"snapshots": 1.5}, r"snapshots=1\.5"),
        ({"resume": True}, "without out"),
        ({"resume": -1, "out": "x"}, "resume=-1"),
        ({"sharpness": 3}, "no function"),
        ({"invariants": ["qk_rnak"]}, "no invariant"),
        ({"optimizer": "adam"}, "expected a torch"),
        ({"layout": "bart_simpson"}, "neither a TOML file nor"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    arguments, match, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=match):
        watch(Model(), **arguments)
    assert not list(tmp_path.iterdir())


def test_a_name_for_the_folder_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for expected in ("watched", "watched-2"):
        with watch(model, optimizer) as run:
            train(model, run, optimizer, 1)
        assert run.folder == Path(expected)


# ── ends ──


class Stop(Exception):
    pass


def test_the_end_of_the_block_is_written_last_under_the_number_of_steps(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, 2, out=tmp_path) as run:
        train(model, run, optimizer, 3)
        assert steps_of(run.readings(), "finished") == []
    assert (run.readings()[-1].name, run.readings()[-1].step) == ("finished", 3)
    with watch(model, optimizer, 2, out=tmp_path, resume=True) as run:
        train(model, run, optimizer, 2)
    assert steps_of(run.readings(), "finished") == [3, 5]


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
def test_an_exception_passes_and_what_was_seen_stays(
    kind: type[BaseException], tmp_path: Path
) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = watch(model, optimizer, 50, out=tmp_path)

    def loop() -> None:
        with run:
            train(model, run, optimizer, 3)
            raise kind

    with pytest.raises(kind):
        loop()
    assert steps_of(run.readings(), "loss") == [1, 2, 3]
    assert steps_of(run.readings(), "qk_spectral_norm") == [1, 3]
    assert f"Ended by {kind.__name__} after step 3." in run.notes()
    assert not model._forward_pre_hooks


def test_an_exception_inside_a_step_leaves_nothing_half_read(tmp_path: Path) -> None:
    model = model_of()

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise Stop

    optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(Stop), watch(model, optimizer, out=tmp_path) as run:
        train(model, run, optimizer, 1)
    assert [r.name for r in run.readings()] == []


def test_a_killed_process_leaves_a_folder_that_opens(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, torch, levelhead
        torch.manual_seed(0)
        model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(2, 4, 8)
        with levelhead.watch(model, optimizer, every=2, out=sys.argv[1]) as run:
            while True:
                optimizer.zero_grad()
                loss = model(x, x, x)[0].square().mean()
                loss.backward()
                optimizer.step()
                run.step(loss)
    """)
    folder = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)])
    try:
        path, deadline = folder / "readings-main.jsonl", time.monotonic() + 120
        while not (path.exists() and path.stat().st_size > 20_000):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run = Run.open(folder)
    steps = steps_of(run.readings(), "qk_spectral_norm")
    assert steps[:3] == [1, 2, 4]
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    last = max(r.step for r in run.readings())
    with watch(model, optimizer, every=2, out=folder, resume=True) as again:
        x = torch.randn(2, 4, 8)
        model(x, x, x)[0].sum().backward()
        optimizer.step()
    assert again.steps == last + 1
    assert max(steps_of(again.readings(), "qk_spectral_norm")) == last + 1


def test_a_full_disk_is_warned_about_once_and_training_goes_on(tmp_path: Path, monkeypatch) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    written = []

    def full(self: Run, readings: Any, writer: str = "main") -> None:
        written.append(1)
        raise LevelheadError(
            "readings could not be written (No space left on device): free some space."
        )

    monkeypatch.setattr(Run, "add_readings", full)
    with (
        pytest.warns(LevelheadWarning, match="Training goes on") as caught,
        watch(model, optimizer, 1, out=tmp_path) as run,
    ):
        train(model, run, optimizer, 4)
    assert run.steps == 4
    assert len(caught) == len(written) == 1


def test_a_later_failure_is_a_warning_and_the_first_an_error(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 1 and first:
            raise ValueError("at once")
        if run.steps >= 1:
            raise ValueError("later")
        return loss_of(model, data(1)[0])

    first = True
    with (
        pytest.raises(ValueError, match="at once"),
        watch(model, optimizer, sharpness=closure, out=tmp_path / "a") as run,
    ):
        train(model, run, optimizer, 1)
    first = False
    with (
        pytest.warns(LevelheadWarning, match="sharpness could not be read") as caught,
        watch(model, optimizer, 1, sharpness=closure, out=tmp_path / "b") as run,
    ):
        train(model, run, optimizer, 4)
    assert len(caught) == 1
    assert run.steps == 4
    assert steps_of(run.readings(), "largest_hessian_eigenvalue") == [1]


# ── what the loop and others say and hear ──


def test_own_readings_and_sinks(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.got: list[Reading] = []
            self.closed = 0

        def write(self, readings: list[Reading]) -> None:
            self.got += readings

        def close(self) -> None:
            self.closed += 1

    class Bad(Sink):
        def write(self, readings: list[Reading]) -> None:
            raise OSError("no connection")

    model, sink = model_of(), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, 2, out=tmp_path, sinks=[Bad(), sink]) as run:
        with pytest.warns(LevelheadWarning, match=r"sink Bad failed \(no connection\)") as caught:
            train(model, run, optimizer, 3)
        run.record("accuracy", torch.tensor(0.5), split="dev")
        last = Run.open(tmp_path).readings()[-1]
        assert last == Reading("accuracy", 0.5, "1", {"split": "dev"}, 3, "loop")
    assert len(caught) == 1
    assert sink.got == run.readings()
    assert sink.closed == 1


def test_alarms_are_warned_about_stored_and_kept(tmp_path: Path) -> None:
    """Logits that double with every sampled step explode."""
    model = model_of(make=lambda: Model(dropout=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = data(1)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, optimizer, 1, out=tmp_path) as run:
            for step in range(30):
                if step > 10:
                    with torch.no_grad():
                        model.one.in_proj_weight[:8] *= 2
                loss = loss_of(model, x)
                loss.backward()
                optimizer.step()
                run.step(1.0)
    alarms = [alarm for alarm in run.alarms if alarm.name == "exploding_logits"]
    assert {alarm.layer for alarm in alarms} == {"one"}
    told = [str(w.message) for w in caught if issubclass(w.category, LevelheadWarning)]
    assert any(t.startswith("Exploding logits in one") for t in told)
    stored = [r for r in run.readings() if r.name == "alarm.exploding_logits"]
    assert [r.step for r in stored] == [alarm.step for alarm in alarms]


def test_alarms_may_be_left_out_or_set(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, alarms in (("a", False), ("b", Thresholds())):
        with watch(model, optimizer, out=tmp_path / name, alarms=alarms) as run:
            train(model, run, optimizer, 1)
        assert run.alarms == []


def test_coverage_names_what_is_seen_and_what_not(tmp_path: Path) -> None:
    class Half(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.one(x, x, x)[0]).mean((1, 2))

    model = model_of(make=Half)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(LevelheadWarning, match="Step 1: no maps of two") as caught,
        watch(model, optimizer, 2, out=tmp_path) as run,
    ):
        train(model, run, optimizer, 4)
    assert len(caught) == 1
    assert run.coverage["one"].startswith("weights and maps")
    assert run.coverage["two"].startswith("weights; no maps: ")
    assert any(
        note.startswith("Watched from step 1: 2 attention layers (one, two)")
        for note in run.notes()
    )


def test_a_watch_is_entered_once(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, out=tmp_path) as run:
        train(model, run, optimizer, 1)
    with pytest.raises(InputError, match="entered before"):
        run.__enter__()
    assert os.fspath(run.folder) in repr(run)
