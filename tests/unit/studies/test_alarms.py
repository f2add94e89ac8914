"""The harness of the alarms: tasks, faults, what counts as found, bounds, what is shipped."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, poisson
from sklearn.datasets import load_digits
from torch.nn.attention import SDPBackend, sdpa_kernel

from levelhead.base.errors import StoredFileError
from levelhead.base.records import Reading, Run
from levelhead.studies import alarms as study
from levelhead.studies.alarms_conclusions import (
    conclude,
    poisson_bounds,
    share_bounds,
    write_rates,
)
from levelhead.studies.alarms_faults import CONSEQUENCES, Fault, Planted, drawn_fault
from levelhead.studies.alarms_trainings import (
    NULL,
    TASKS,
    Recipe,
    Training,
    null_recipe,
    planted_recipe,
)
from levelhead.studies.study import Cell, Outcome
from levelhead.training.alarm_rates import shipped_rates
from levelhead.training.alarms import ALARMS, Alarm, Thresholds, detect

HEADS = 4


def batch(task: str, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    training = Training(Recipe(task=task), seed)
    return training._task.batch(torch.Generator().manual_seed(0))


# ── tasks and trainings ──


def test_targets_are_what_the_tasks_say() -> None:
    x, y = batch("sort")
    assert [sorted(row) for row in x.tolist()] == y.tolist()
    x, y = batch("copy")
    (order,) = {tuple(next(j for j in range(8) if (x[:, j] == y[:, i]).all()) for i in range(8))}
    assert sorted(order) == list(range(8))
    x, y = batch("recall")
    for row, answer in zip(x.tolist(), y.tolist(), strict=True):
        *pairs, query = row
        assert dict(divmod(pair, 10) for pair in pairs)[query - 100] == answer


def test_patches_of_digits_are_the_squares_of_the_image() -> None:
    images = load_digits().images
    x, y = batch("digits")
    first = x[0].numpy() * 8 + 8
    image = first.reshape(4, 2, 2, 4).transpose(0, 2, 1, 3).reshape(8, 8)
    (place,) = np.flatnonzero((images == image).all((1, 2)))
    assert load_digits().target[place] == y[0]
    assert place >= 297


def test_labels_are_noisy_as_often_as_is_said() -> None:
    clean, noisy = Recipe(task="sort", batch=4000), Recipe(task="sort", batch=4000, noise=0.5)
    labels = [Training(r, 0)._task.batch(torch.Generator().manual_seed(0))[1]
              for r in (clean, noisy)]  # fmt: skip
    changed = (labels[0] != labels[1]).double().mean()
    # Half are drawn anew, nine in ten of these differ; 32,000 labels: standard error 0.003.
    assert float(changed) == pytest.approx(0.45, abs=0.015)


@pytest.mark.parametrize("kind", list(NULL))
def test_every_null_recipe_trains_and_its_rate_stays_within_a_factor_of_two(kind: str) -> None:
    recipe = null_recipe(kind, 5)
    assert 0.5 <= recipe.rate / NULL[kind].rate <= 2
    assert replace(recipe, rate=NULL[kind].rate) == NULL[kind]
    training, losses = Training(recipe, 5), []
    before = [p.clone() for p in training.model.parameters()]
    for _ in range(2):
        training.step(lambda loss: losses.append(loss.item()))
    assert len(losses) == 2
    assert all(np.isfinite(losses))
    assert any((p != b).any() for p, b in zip(training.model.parameters(), before, strict=True))


def test_the_loss_handed_over_by_sam_is_that_at_the_weights_themselves() -> None:
    training = Training(null_recipe("toy-sam", 0), 0)
    x, y = training._task.batch(training.twin().draw)
    plain = (training.model(x) - y).square().mean().item()
    losses: list[float] = []
    training.step(lambda loss: losses.append(loss.item()))
    assert losses == [pytest.approx(plain, rel=1e-6)]


def test_a_twin_goes_on_as_the_training_itself() -> None:
    training = Training(Recipe(task="sort", optimiser="sgd"), 1)
    for _ in range(3):
        training.step(lambda _: None)
    twin = training.twin()
    for one in (twin, training):
        for _ in range(3):
            one.step(lambda _: None)
    weights = [list(t.model.parameters()) for t in (training, twin)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert weights[0][0] is not weights[1][0]


def test_planted_recipes_take_all_tasks_in_turn() -> None:
    assert [planted_recipe(seed).task for seed in range(1000, 1004)] == list(TASKS)


# ── faults ──


def fault(way: str, **changes: Any) -> Fault:
    given: dict[str, Any] = {
        "name": "dead_head", "way": way, "onset": 1, "layer": 1, "heads": (2,), "ramp": 1,
        "strength": 0.01,
    }  # fmt: skip
    return Fault(**{**given, **changes})


def at_work(planted: Fault, task: str = "sort") -> tuple[Training, dict[str, torch.Tensor]]:
    """A training whose fault has acted before step 1, and its weights before that."""
    training = Training(Recipe(task=task), 2)
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    Planted(planted, training).act(1)
    return training, before


def blocks(weight: torch.Tensor) -> torch.Tensor:
    """Packed rows [3d, d] → [3, h, r, d]."""
    return weight.detach().reshape(3, HEADS, 8, 32)


@pytest.mark.parametrize(("way", "strength"), [("grow", 25.0), ("shrink", 0.01)])
def test_logits_of_the_chosen_head_alone_change_by_the_factor(way: str, strength: float) -> None:
    training, before = at_work(fault(way, strength=strength))
    name = "blocks.1.attention.in_proj_weight"
    then, now = blocks(before[name]), blocks(training.attention(1).in_proj_weight)
    logits = [torch.einsum("hrd,hre->hde", w[0], w[1]) for w in (then, now)]
    ratio = logits[1] / logits[0]
    torch.testing.assert_close(ratio[2], torch.full((32, 32), strength), rtol=1e-3, atol=0)
    assert torch.equal(logits[0][[0, 1, 3]], logits[1][[0, 1, 3]])
    assert torch.equal(then[2], now[2])


def test_a_ramp_is_even_in_logarithms_and_is_held_afterwards() -> None:
    training = Training(Recipe(task="sort"), 2)
    planted = Planted(fault("fade", ramp=4, strength=1 / 16), training)
    weight = training.attention(1).out_proj.weight.detach()
    norms = [float(weight[:, 16:24].norm())]
    for step in range(6):
        planted.act(step)
        norms.append(float(weight[:, 16:24].norm()))
        weight.mul_(1.1)  # what an optimiser might do
    # Nothing at step 0, before the onset at a norm of 1.1; then a half each step, and no growth.
    expected = [1, 1, 1.1 / 2, 1.1 / 4, 1.1 / 8, 1.1 / 16, 1.1 / 16]
    assert norms == pytest.approx([norms[0] * e for e in expected], rel=1e-5)


def test_copies_are_of_the_chosen_head() -> None:
    training, before = at_work(fault("copy", name="head_collapse", strength=0.25))
    then = blocks(before["blocks.1.attention.in_proj_weight"])
    now = blocks(training.attention(1).in_proj_weight)
    torch.testing.assert_close(now, 0.25 * then + 0.75 * then[:, 2:3])
    columns = training.attention(1).out_proj.weight.detach().reshape(32, HEADS, 8)
    old = before["blocks.1.attention.out_proj.weight"].reshape(32, HEADS, 8)
    torch.testing.assert_close(columns, 0.25 * old + 0.75 * old[:, 2:3])


@pytest.mark.parametrize("way", ["stiffen", "imbalance"])
def test_a_sharpness_fault_raises_the_largest_eigenvalue_as_asked(way: str) -> None:
    plain = Training(Recipe(task="digits"), 2)
    for _ in range(80):  # where negative curvature is small beside the largest
        plain.step(lambda _: None)
    training = plain.twin()
    Planted(fault(way, strength=9.0), training).act(1)
    found = []
    for one in (plain, training):
        parameters = list(one.model.parameters())
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no second derivative
            loss = one.fixed_loss()
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        vector = [torch.ones_like(p) for p in parameters]
        for _ in range(60):  # power iteration
            size = torch.sqrt(sum(v.square().sum() for v in vector))
            vector = [v / size for v in vector]
            dot = sum((g * v).sum() for g, v in zip(gradients, vector, strict=True))
            vector = [v.detach() for v in
                      torch.autograd.grad(dot, parameters, retain_graph=True)]  # fmt: skip
        found.append(float(torch.sqrt(sum(v.square().sum() for v in vector))))
    assert 8 < found[1] / found[0] < 40


def test_batches_are_spoilt_for_half_of_each_period() -> None:
    training, _ = at_work(fault("batches", ramp=4))
    x = torch.zeros(100, 8)
    y = torch.full((100, 8), 7)
    assert training.spoil is not None
    kept = [float((training.spoil(x, y, step)[1] == y).double().mean()) for step in range(8)]
    assert [share > 0.9 for share in kept] == [False, False, True, True] * 2


def test_weights_bounce_to_a_higher_loss_and_back() -> None:
    training = Training(Recipe(task="sort"), 2)
    for _ in range(60):
        training.step(lambda _: None)
    planted = Planted(fault("bounce", ramp=4, strength=1.0), training)
    with torch.no_grad():
        low = float(training.fixed_loss())
        rises = []
        for step in range(8):
            planted.act(step)
            rises.append(float(training.fixed_loss()) - low)
    assert rises[:2] == [0, pytest.approx(0, abs=1e-5)]
    assert 1.0 <= rises[2] < 3.0
    assert rises[3:6] == [rises[2], pytest.approx(0, abs=1e-4), pytest.approx(0, abs=1e-4)]
    assert rises[6] == rises[7] != rises[2]  # in another direction
    assert rises[6] > 0.2


def state(**values: float) -> list[Reading]:
    return [
        Reading(name, value if (layer, head) == ("b", 1) else 0.01, "1",
                {"layer": layer, "head": head}, 300)
        for name, value in values.items() for layer in "ab" for head in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALARMS)
def test_faults_are_drawn_from_the_seed_and_where_they_can_be(name: str) -> None:
    seen = state(attention_entropy_share=0.8, map_residual=0.7, largest_logit=4.0)
    drawn = [drawn_fault(name, seed, 300, 2, ["a", "b"], seen) for seed in range(40)]
    assert drawn[0] == drawn_fault(name, 0, 300, 2, ["a", "b"], seen)
    late = 60 if name == "sharpness_spike" else 0
    assert {301 + late <= f.onset <= 340 + late for f in drawn} == {True}
    assert len({f.strength for f in drawn}) > 1
    if name in ("entropy_collapse", "rank_collapse"):
        assert {f.layer for f in drawn} == {1}
        assert all(1 in f.heads for f in drawn)
    else:
        assert {f.layer for f in drawn} == {0, 1}


def alarm(**changes: Any) -> Alarm:
    given: dict[str, Any] = {
        "name": "dead_head", "step": 340, "since": 320, "layer": "b", "head": 2, "value": 0.0,
        "threshold": 0.05, "evidence": "", "harmful": False, "harm": "",
    }  # fmt: skip
    return Alarm(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "hit"),
    [
        ({}, True),
        ({"head": None}, True),
        ({"layer": None, "head": None}, True),
        ({"since": 312}, True),  # the sampled step before the onset may be the last healthy one
        ({"since": 309}, False),
        ({"step": 319, "since": 315}, False),
        ({"layer": "a"}, False),
        ({"head": 1}, False),
        ({"name": "rank_collapse"}, False),
    ],
)
def test_an_alarm_counts_in_its_place_and_from_the_onset_on(
    changes: dict[str, Any], hit: bool
) -> None:
    assert fault("fade", onset=320).raised_by(alarm(**changes), "b", 10) is hit


def test_consequences_name_alarms() -> None:
    assert tuple(CONSEQUENCES) == ALARMS
    assert {name for names in CONSEQUENCES.values() for name in names} <= set(ALARMS)


# ── watching ──


def test_a_planted_cell_judges_every_fault_and_keeps_what_it_watched(tmp_path: Path) -> None:
    settings = study.AlarmsSettings(start=60, after=60, every=10, keep=str(tmp_path))
    cell = Cell("planted-development-3", {"run": "planted", "half": "development", "seed": 3})
    readings, _ = study._planted(settings, cell, tmp_path / cell.name)
    found = {r.where["fault"]: r for r in readings if r.name == "found"}
    assert tuple(found) == ALARMS
    assert found["dead_head"].value == 1.0
    onset = found["dead_head"].step
    assert onset is not None
    assert 61 <= onset <= 100
    kept = {path.name for path in (tmp_path / cell.name).iterdir()}
    assert kept == {"healthy", *ALARMS}
    # Judged again, nothing is trained again: the folders are taken as they are.
    marked = tmp_path / cell.name / "dead_head" / "mark"
    marked.touch()
    assert study._planted(settings, cell, tmp_path / cell.name)[0] == readings
    assert marked.exists()
    # A run that is watched with alarms raises those that are found in its Readings.
    healthy = Run.open(tmp_path / cell.name / "healthy").readings()
    dead = Run.open(tmp_path / cell.name / "dead_head").readings()
    assert {r.step for r in dead if r.name == "loss"} == set(range(61, onset + 60))
    (first, *_) = [a for a in detect([*healthy, *dead]) if a.name == "dead_head"]
    delay = next(r.value for r in readings
                 if r.name == "delay" and r.where["fault"] == "dead_head")  # fmt: skip
    assert delay == first.step - onset + 1


def test_a_null_cell_counts_its_steps(tmp_path: Path) -> None:
    settings = study.AlarmsSettings(null_steps=60, null_every=30)
    cell = Cell("x", {"run": "null", "half": "held-out", "kind": "sort", "seed": 1001})
    found, _ = study._null(settings, cell, tmp_path / "x")
    values = {r.name: r.value for r in found if not r.where}
    assert (values["steps"], values["sharp_steps"]) == (60, 60)
    seen = Run.open(tmp_path / "x").readings()
    sharp = [r.step for r in seen if r.name == "largest_hessian_eigenvalue"]
    assert sharp == [1, 30, 60]


# ── conclusions ──


@pytest.mark.parametrize(("found", "of"), [(0, 7), (5, 7), (7, 7), (38, 40)])
def test_bounds_of_a_share_leave_the_tails_that_define_them(found: int, of: int) -> None:
    low, high = share_bounds(found, of)
    if found:
        assert binom.sf(found - 1, of, low) == pytest.approx(0.025, rel=1e-6)
    if found < of:
        assert binom.cdf(found, of, high) == pytest.approx(0.025, rel=1e-6)
    assert (low == 0) == (found == 0)
    assert (high == 1) == (found == of)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_bounds_of_a_count_leave_the_tails_that_define_them(count: int) -> None:
    low, high = poisson_bounds(count)
    assert poisson.cdf(count, high) == pytest.approx(0.025, rel=1e-6)
    if count:
        assert poisson.sf(count - 1, low) == pytest.approx(0.025, rel=1e-6)


def outcomes(found: int, false: int) -> dict[str, Outcome]:
    """Twenty planted runs of a dead head, held out, and one null run of 50,000 steps."""
    made = {}
    for seed in range(20):
        where = {"fault": "dead_head", "way": "fade"}
        readings = [Reading("found", float(seed < found), where=where, step=310)]
        readings.append(Reading("steps", 310.0))
        if seed < found:
            readings.append(Reading("delay", 30.0 + seed, "step", where))
        made[f"planted-held-out-{1000 + seed}"] = Outcome(readings)
    made["planted-development-0"] = Outcome(
        [Reading("found", 0.0, where={"fault": "dead_head", "way": "fade"})]
    )
    count = [Reading("false", float(false), where={"alarm": "dead_head"})]
    made["null-held-out-sort-1000"] = Outcome([Reading("steps", 43_800.0), *count])
    return made


@pytest.mark.parametrize(
    ("found", "false", "holds"), [(20, 0, True), (19, 1, True), (18, 0, False), (20, 2, False)]
)
def test_rates_are_those_of_the_held_out_half(found: int, false: int, holds: bool) -> None:
    findings = conclude(outcomes(found, false), True)
    (said,) = [s for s in findings.statements if s.name == "dead_head"]
    assert said.holds is holds
    assert said.failed is not holds
    assert f"{found} of 20 found" in said.evidence
    assert f"{false} false alarms in 50,000 steps" in said.evidence
    (other,) = [s for s in findings.statements if s.name == "rank_collapse"]
    assert other.holds is None
    (rates,) = [table for table in findings.tables if table.name == "rates"]
    row = rates.values[ALARMS.index("dead_head")]
    assert row[:2].tolist() == [20, found / 20]
    assert row[3:5].tolist() == pytest.approx([50_000, false / 50])
    (recall,) = [table for table in findings.tables if table.name == "recall-held-out"]
    delay = recall.values[ALARMS.index("dead_head"), recall.columns.index("median delay")]
    assert delay == 30 + (found - 1) / 2


def test_without_the_held_out_half_nothing_must_hold_but_the_balance() -> None:
    half = {n: o for n, o in outcomes(20, 0).items() if n.startswith("planted-development")}
    findings = conclude(half, True, ("development",))
    assert {s.name: s.holds for s in findings.statements if s.expected} == {"balanced": False}
    assert {s.holds for s in findings.statements if not s.expected} == {None}
    whole = [
        Outcome([Reading("found", 1.0, where={"fault": name, "way": "x"}) for name in ALARMS]),
        Outcome([Reading("steps", 9.0), Reading("sharp_steps", 9.0)]),
    ]
    names = ("planted-development-0", "null-development-sort-0")
    findings = conclude(dict(zip(names, whole, strict=True)), True, ("development",))
    assert findings.statements[0].holds is True


def test_the_halves_that_are_asked_for_have_cells() -> None:
    settings = study.AlarmsSettings(halves=("development",), seeds=2, null_seeds=1)
    seeds = {int(cell.given["seed"]) for cell in study._cells(settings)}
    assert seeds == {0, 1}
    both = study._cells(study.AlarmsSettings(seeds=2, null_seeds=1))
    assert {int(cell.given["seed"]) for cell in both} == {0, 1, 2000, 2001}
    assert len(both) == 2 * (2 + len(NULL))


def test_what_is_shipped_is_what_was_found(tmp_path: Path) -> None:
    settings = {"study": "alarms", "seeds": 20, "null_seeds": 2, "null_steps": 4000, "keep": ""}
    run = Run.create(tmp_path / "s", title="t", command="study alarms", settings=settings)
    with pytest.raises(StoredFileError, match="no finished study"):
        write_rates(run.folder, tmp_path / "rates.json")
    findings = conclude(outcomes(19, 1), True)
    whole = {f"table.{t.name}": np.nan_to_num(t.values) for t in findings.tables}
    run.add_arrays({"table.rates": whole["table.rates"]})
    write_rates(run.folder, tmp_path / "rates.json")
    text = (tmp_path / "rates.json").read_text()
    rate = shipped_rates(text).alarms["dead_head"]
    assert (rate.planted, rate.recall, rate.null_steps) == (20, 0.95, 50_000)
    assert rate.false_per_1000 == 0.02
    assert rate.recall_low == pytest.approx(0.7513, abs=1e-4)  # tables of Clopper-Pearson bounds
    assert rate.false_high == pytest.approx(5.572 / 50, rel=1e-3)
    stored = json.loads(text)
    assert stored["seeds"]["held-out"] == {"planted": "2000-2019", "null": "2000-2001"}
    assert stored["thresholds"] == asdict(Thresholds())


def test_shipped_rates_were_measured_at_the_shipped_thresholds() -> None:
    text = resources.files("levelhead.training").joinpath("alarm_rates.json").read_text()
    stored = json.loads(text)
    assert stored["thresholds"] == asdict(Thresholds()), "run the study again, then write_rates"
    assert tuple(stored["alarms"]) == ALARMS
    assert min(rate["planted"] for rate in stored["alarms"].values()) >= 20
    steps = {name: rate["null_steps"] for name, rate in stored["alarms"].items()}
    assert min(n for name, n in steps.items() if name != "sharpness_spike") >= 75_000
