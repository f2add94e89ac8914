"""A training of the collapse study: where it starts, what is read, and going on after a stop."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from levelhead.base.errors import Interrupted
from levelhead.invariants.heads import coherence, head_gram
from levelhead.studies import collapse_training
from levelhead.studies.collapse_arms import PENALTIES, Addition
from levelhead.studies.collapse_measures import course_values, curves, held_out_values, pictures
from levelhead.studies.collapse_tasks import Part, Task, make_task
from levelhead.studies.collapse_training import Course, Plan, Start, begin, trained
from levelhead.studies.study import Workspace
from levelhead.weights.layouts import views

PLAN = Plan(epochs=3, steps=4, batch=16, heads=2, width=8, every=4)
START = Start("adam", 3e-3, 0.1, 1.0, 2)


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task("copy", (64, 16, 24), 0)


def run(task: Task, folder: Path, arm: str, weight: float) -> tuple[Course, list[str], Any]:
    folder.mkdir(exist_ok=True)
    model = begin(task, START, PLAN, arm, weight, 5)
    course, notes = trained(
        model, task, START, PLAN, arm, weight, 5, Workspace(folder), f"{arm}-{weight}"
    )
    return course, notes, model


def test_arms_of_one_seed_start_from_the_same_weights_and_leave_randomness_alone(
    task: Task,
) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    plain = begin(task, START, PLAN, "A", 0.0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    same = begin(task, START, PLAN, "B.coherence", 1.0, 1)
    other = begin(task, START, PLAN, "A", 0.0, 2)
    core = begin(task, START, PLAN, "D.core", 1.0, 1)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), same.parameters(), strict=True)
    )
    assert not torch.equal(plain.positions, other.positions)
    torch.testing.assert_close(core(task.test.x), plain(task.test.x), rtol=1e-4, atol=1e-5)


def test_the_start_is_scaled_and_pulled_together(task: Task) -> None:
    ordinary = begin(task, replace(START, scale=1.0), PLAN, "A", 0.0, 1)
    small = begin(task, START, PLAN, "A", 0.0, 1)
    alike = begin(task, replace(START, spread=0.01), PLAN, "A", 0.0, 1)
    one, two, three = (next(iter(views(m))) for m in (ordinary, small, alike))
    torch.testing.assert_close(two.q, 0.1 * one.q)
    assert coherence(head_gram(two)).item() < 0.5 < coherence(head_gram(three)).item()


def test_the_course_has_every_loss_and_readings_of_sampled_steps(
    task: Task, tmp_path: Path
) -> None:
    course, notes, model = run(task, tmp_path, "B.nuclear", 0.01)
    assert notes == []
    assert len(course.losses) == 12
    assert len(course.judged) == 4
    fresh = begin(task, START, PLAN, "B.nuclear", 0.01, 5)
    # The order of train's first epoch, and the loss of its first batch before any step.
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5 * 1_000_003 + 1))[:16]
    logits = fresh(task.training.x[order]).flatten(0, 1)
    expected = functional.cross_entropy(logits, task.training.y[order].flatten())
    assert course.losses[0] == pytest.approx(expected.item(), rel=1e-6)
    sampled = [0, 3, 4, 6, 8, 9]
    steps = sorted({r.step for r in course.readings if r.name == "qk_coherence"})
    assert steps == sampled
    # Means of pulls are over evenly spaced steps, so no others are measured.
    assert sorted(r.step for r in course.readings if r.name == "pull") == [0, 4, 8]
    first = next(r for r in course.readings if r.name == "qk_coherence")
    assert first.value == pytest.approx(
        coherence(head_gram(next(iter(views(fresh))))).item(), rel=1e-5
    )
    drawn = curves(course)
    assert drawn["at"].tolist() == sampled
    worst = max(
        min(r.value for r in course.readings if r.step == 0 and r.where.get("layer") == layer
            and r.name in ("qk_coherence", "ov_coherence"))
        for layer in ("layers.0.self_attn", "layers.1.self_attn")
    )  # fmt: skip
    assert drawn["coherence"][0] == worst
    values = course_values(course, level=100.0)
    assert values["best_validation"] == min(course.judged)
    # Twelve losses cannot have a mean over twenty.
    assert math.isnan(values["steps_to_level"])
    assert values["reached"] == 0
    assert drawn["judged"].tolist() == course.judged
    # The best weights are kept.
    with torch.no_grad():
        logits = model(task.validation.x).flatten(0, 1)
        loss = functional.cross_entropy(logits, task.validation.y.flatten())
    assert loss.item() == pytest.approx(values["best_validation"], rel=1e-6)


def test_texts_are_judged_without_their_padding_to_the_same_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collapse_training, "_TEXTS", 3)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 9, (10, 6), generator=draw)
    for row, length in zip(x, (3, 1, 6, 2, 5, 1, 4, 6, 2, 3), strict=True):
        row[length:] = 0
    part = Part(x, torch.randint(0, 3, (10,), generator=draw))
    texts = Task("own", part, part, part, 3, 6, "mean", vocabulary=9, padding=0)
    model = begin(texts, START, PLAN, "A", 0.0, 0).eval()
    widths: list[int] = []
    model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    judged = collapse_training._whole_loss(model, part, 0)
    assert widths == [2, 3, 6, 6]
    with torch.no_grad():
        each = [functional.cross_entropy(model(x[i : i + 1]), part.y[i : i + 1]) for i in range(10)]
    assert judged.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)


def test_looks_follow_the_weights_of_now(task: Task, tmp_path: Path) -> None:
    for arm in ("A", "D.core"):
        model = begin(task, START, PLAN, arm, 1.0, 0)
        course = Course(model, task, PLAN, arm, Addition(), tmp_path / "course")
        course.look()
        with torch.no_grad():
            for p in model.layers.parameters():
                p.mul_(2.0)
        course.look()
        for name in ("ov_frobenius_norm", "largest_logit"):
            values = [r.value for r in course._new_readings if r.name == name]
            first, second = values[: len(values) // 2], values[len(values) // 2 :]
            assert all(b > 1.5 * a for a, b in zip(first, second, strict=True)), (arm, name)


class _Stopped(Course):
    def judge(self) -> float:
        value = super().judge()
        if len(self.judged) == 3:  # the line of epoch 2 is there, its state is not
            raise Interrupted("stopped", "SIGTERM")
        return value


@pytest.mark.parametrize(
    ("arm", "weight"),
    [("A", 0.0), ("B.stability", 1.0), ("B.spectral", 0.1), ("C.coherence", 0.01), ("D.core", 0.5)],
)
def test_a_stopped_training_goes_on_to_the_same_numbers(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, weight: float
) -> None:
    whole, _, model = run(task, tmp_path / "whole", arm, weight)
    with monkeypatch.context() as patched:
        patched.setattr(collapse_training, "Course", _Stopped)
        with pytest.raises(Interrupted):
            run(task, tmp_path / "again", arm, weight)
    again, _, resumed = run(task, tmp_path / "again", arm, weight)
    assert again.losses == whole.losses
    assert again.judged == whole.judged
    assert again.readings == whole.readings
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_a_training_that_diverges_is_an_outcome_with_a_note(task: Task, tmp_path: Path) -> None:
    wild = replace(START, optimiser="sgd", rate=1e12)
    model = begin(task, wild, PLAN, "A", 0.0, 0)
    course, notes = trained(model, task, wild, PLAN, "A", 0.0, 0, Workspace(tmp_path), "wild")
    assert len(notes) == 1
    assert notes[0].startswith("training diverged (")
    assert course_values(course, 1.0)["best_validation"] == course.judged[0]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("rate", [1e12, 1e38])
@pytest.mark.parametrize("arm", [*(f"B.{name}" for name in PENALTIES), "D.core", "E.naive"])
def test_no_arm_breaks_off_when_its_training_diverges(
    task: Task, tmp_path: Path, arm: str, rate: float
) -> None:
    wild = replace(START, optimiser="sgd", rate=rate)
    plan = replace(PLAN, epochs=1, every=1)
    weight = 0.5 if arm == "D.core" else 1.0
    model = begin(task, wild, plan, arm, weight, 0)
    course, notes = trained(model, task, wild, plan, arm, weight, 0, Workspace(tmp_path), arm)
    assert len(notes) == 1
    values = course_values(course, 1.0)
    assert values["best_validation"] == course.judged[0]
    # The strength of weight decay follows from pulls, and is written as JSON.
    assert all(math.isfinite(v) for name, v in values.items() if "pull" in name)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_tests_and_pictures_are_of_the_test_rows(task: Task, tmp_path: Path) -> None:
    model = begin(task, START, PLAN, "A", 0.0, 0)
    found = held_out_values(model, task, (0.0, 1.0), (0.1,), 2)
    with torch.no_grad():
        wrong = (model(task.test.x).argmax(-1) != task.test.y).double().mean().item()
    assert found["error"] == pytest.approx(wrong)
    assert found["noise_0"] == pytest.approx(wrong)
    assert found["pgd_0.1"] >= wrong - 1e-12
    assert found["fgsm_0.1"] >= wrong - 1e-12
    drawn = pictures(model, task, "A", whole=True)
    assert drawn["maps"].shape == (2, 2, 8, 8)
    assert drawn["head_cka"].shape == (4, 4)
    assert drawn["layer_cka"].shape == (2, 2)
    copies = begin(task, replace(START, spread=0.0), PLAN, "A", 0.0, 0)
    cka = pictures(copies, task, "A", whole=False)["head_cka"]
    assert cka[0, 1] == pytest.approx(1.0, abs=1e-6)
    assert drawn["head_cka"][0, 1] < 0.999
