"""Two processes: SAM takes the step of one on the whole batch, constraints keep replicas equal."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from levelhead.training.constraints import qk_clip
from levelhead.training.sam import SAM

WORKER = Path(__file__).with_name("ddp_worker.py")


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("ddp_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = load_worker()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What both processes found."""
    if not torch.distributed.is_available():
        pytest.skip("this torch was built without torch.distributed")
    folder = tmp_path_factory.mktemp("ddp")
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


def of(found: dict[str, Tensor], case: str) -> dict[str, Tensor]:
    start = f"{case}/"
    return {name.removeprefix(start): x for name, x in found.items() if name.startswith(start)}


@pytest.mark.parametrize("case", worker.CASES)
def test_processes_agree_to_the_last_bit(processes: list[dict[str, Tensor]], case: str) -> None:
    one, other = (of(found, case) for found in processes)
    assert one
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("case", ["plain", "adaptive", "accumulated", "bucket_views", "scaled"])
def test_two_halves_take_the_step_of_the_whole(
    processes: list[dict[str, Tensor]], case: str
) -> None:
    two = of(processes[0], case)
    whole = worker.trained("adaptive" if case == "adaptive" else "plain", 0, 1)
    assert int(two["ascents"]) == worker.STEPS
    for name, value in whole.items():
        torch.testing.assert_close(two[name], value, rtol=1e-12, atol=1e-14, msg=name)


def test_bfloat16_takes_the_step_to_its_rounding(processes: list[dict[str, Tensor]]) -> None:
    two, whole = of(processes[0], "bfloat16"), worker.trained("plain", 0, 1)
    assert int(two["ascents"]) == worker.STEPS
    for name, value in whole.items():
        # Adam divides by the size of a gradient: what is left of it is its sign, lr is 0.05.
        torch.testing.assert_close(two[name].to(value), value, rtol=0, atol=0.04, msg=name)


def test_an_infinite_loss_in_one_process_leaves_out_both_second_passes(
    processes: list[dict[str, Tensor]],
) -> None:
    for found in processes:
        infinite = of(found, "infinite")
        assert int(infinite["ascents"]) == 0
        assert not bool(infinite["losses"].isfinite().any())


@pytest.mark.parametrize("what", ["clipped", "balanced"])
def test_constraints_leave_replicas_equal(processes: list[dict[str, Tensor]], what: str) -> None:
    one, other = (of(found, what) for found in processes)
    assert one
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_the_largest_logits_of_all_processes_count(processes: list[dict[str, Tensor]]) -> None:
    model = worker.attention()
    qk_clip(model, worker.THRESHOLD, {"torch_mha": [70.0, 1.0, 90.0]})
    found = of(processes[1], "clipped")
    assert found["heads"].tolist() == [[0.0, 70.0], [2.0, 90.0]]
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-6, atol=0, msg=name)


# -- autocast in one process ---------------------------------------------------------------------


def narrow_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).float() - y).square().mean()


@pytest.mark.parametrize("around", [False, True])
def test_autocast_sees_the_displaced_weights(around: bool) -> None:
    """Also where autocast encloses the step: its copies of weights must not outlive the ascent."""
    x, y = (part.float() for part in worker.batch())
    model = worker.network().float()
    sam = SAM(model.parameters(), torch.optim.SGD, rho=2.0, lr=0.1)

    def closure() -> Tensor:
        sam.zero_grad()
        inside = nullcontext() if around else torch.autocast("cpu", torch.bfloat16)
        with inside:
            loss = narrow_loss(model, x, y)
        loss.backward()
        return loss

    twin = worker.network().float()
    weights = list(twin.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        first = narrow_loss(twin, x, y)
    gradients = torch.autograd.grad(first, weights)
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    start = [w.detach().clone() for w in weights]
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.add_((2.0 * gradient.double() / norm).float())
    with torch.autocast("cpu", torch.bfloat16):
        second = narrow_loss(twin, x, y)
    at_worst = torch.autograd.grad(second, weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        loss = sam.step(closure)
    assert float(loss) == pytest.approx(float(first.detach()), rel=1e-6)
    moved = 0.0
    for weight, begun, gradient, plain in zip(
        model.parameters(), start, at_worst, gradients, strict=True
    ):
        expected = begun - 0.1 * gradient
        size = float((0.1 * gradient).abs().max())
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=0.02 * size)
        moved = max(moved, float((gradient - plain).abs().max() / plain.abs().max()))
    assert moved > 0.2  # a step that ignored ε would be far from the expected one


def test_bfloat16_autocast_with_a_scaler_equals_the_step_without() -> None:
    x, y = (part.float() for part in worker.batch())
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=128.0)):
        model = worker.network().float()
        sam = SAM(model.parameters(), torch.optim.SGD, rho=0.5, lr=0.1)

        def closure(model: nn.Module = model, sam: SAM = sam, scaler: Any = scaler) -> Tensor:
            sam.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = narrow_loss(model, x, y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        sam.step(closure, scaler)
        ends.append([w.detach().clone() for w in model.parameters()])
    for one, other in zip(*ends, strict=True):
        # A power of two scales bfloat16 exactly, away from its underflow.
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
