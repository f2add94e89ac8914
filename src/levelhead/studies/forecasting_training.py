"""One cell of the forecasting study: fit an arm on one series and horizon, and judge it.

What a cell leaves: errors `[N]` of every test window (mean over channels and steps), curves by
epoch, and readings of the weights that were kept, those with the best validation error.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from levelhead.base.errors import DivergenceError
from levelhead.base.files import append_lines
from levelhead.base.records import Reading
from levelhead.data.windows import Windows, WindowSource, held
from levelhead.diagnostics.sharpness import canonical_sharpness
from levelhead.forecasting.candidates import Candidate, Network, forecasts, residual_products
from levelhead.forecasting.fitting import SeriesProblem
from levelhead.nn.samformer import Init, SAMformerNet
from levelhead.nn.sigma_reparam import remove
from levelhead.studies.forecasting_models import ARMS, Arm, built, map_measures
from levelhead.studies.forecasting_slip import slipped_errors, slipped_squares
from levelhead.studies.study import Outcome, Workspace
from levelhead.training.loop import Closure, History, TrainingSettings, train

__all__ = ["Task", "fitted", "window_errors"]

FloatArray = NDArray[np.float64]


class _Sizes(Protocol):
    """The settings that are read here; see `ForecastingSettings`."""

    @property
    def width(self) -> int: ...
    @property
    def init(self) -> Init: ...
    @property
    def curvature_every(self) -> int: ...
    @property
    def curvature_windows(self) -> int: ...
    @property
    def map_windows(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Task:
    """What a cell is to do: an arm on a problem, under training settings (their rho is the arm's).

    `where` names the cell in its readings.
    """

    arm: str
    problem: SeriesProblem
    test: Windows
    training: TrainingSettings
    where: Mapping[str, str | int]


def window_errors(candidate: Candidate, windows: Windows) -> tuple[FloatArray, FloatArray]:
    """Squared and absolute error `[N]` of each window, mean over channels and steps."""
    squared, absolute = [], []
    for made, truth in forecasts([candidate], windows):
        residual = (made[0] - truth).double()
        squared.append(residual.square().mean(dim=(0, 2)).cpu().numpy())
        absolute.append(residual.abs().mean(dim=(0, 2)).cpu().numpy())
    return np.concatenate(squared), np.concatenate(absolute)


def fitted(task: Task, settings: _Sizes, workspace: Workspace) -> Outcome:
    """Fit the task's arm and judge it on all its test windows."""
    arm = ARMS[task.arm]
    if arm.line is not None:
        began = time.perf_counter()
        line = task.problem.line(arm.line)
        found = {"penalty": line.penalty, "parameters": float(line.parameters)}
        found["validation"] = float(residual_products([line], task.problem.validation).mean())
        arrays = _judged(task, line, None)
        return _outcome(task, found, arrays, {"fit": time.perf_counter() - began}, [])
    return _trained(task, arm, settings, workspace)


def _trained(task: Task, arm: Arm, settings: _Sizes, workspace: Workspace) -> Outcome:
    problem = task.problem
    windows = held(problem.train)
    line = problem.line("linear") if arm.from_line else None
    net = built(
        arm,
        windows.context,
        windows.horizon,
        windows.channels,
        width=settings.width,
        init=settings.init,
        seed=task.training.seed,
        line=line,
    )
    looks = _Looks(net, arm, windows, held(problem.validation), task.training, settings)
    curves = _Curves(looks, workspace.state("curves", "jsonl"), workspace.state())
    found, timing, notes = _fit(task, net, looks, curves, workspace.state())
    if line is not None:
        found["line_validation"] = float(residual_products([line], problem.validation).mean())
    found |= looks.everything()
    arrays = curves.arrays() | _judged(task, Network(net), net if arm.slip else None)
    return _outcome(task, found, arrays, timing, notes)


def _fit(
    task: Task, net: SAMformerNet, looks: _Looks, curves: _Curves, state: Path
) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Train; what the history says, seconds, and a note if it diverged."""
    began = time.perf_counter()
    try:
        history = train(
            net,
            looks.batch_loss,
            len(looks.windows),
            curves,
            task.training,
            state_path=state,
            resume=True,
            data=task.problem.fingerprint,
            show_progress=False,
        )
    except DivergenceError as error:
        return {}, {"training": time.perf_counter() - began}, [f"training diverged ({error})"]
    seconds = [epoch.seconds for epoch in history.epochs[1:]]
    timing = {"training": sum(seconds), "epoch": float(np.median(seconds))}
    return _told(history, looks.trained), timing, []


def _told(history: History, trained: int) -> dict[str, float]:
    best = history.epochs[history.best_epoch]
    return {
        "epochs": float(len(history.epochs) - 1),
        "best_epoch": float(history.best_epoch),
        "validation": history.best_validation,
        "first_validation": history.epochs[0].validation,
        "training_loss": best.training_loss,
        "parameters": float(trained),
    }


class _Looks:
    """The losses of a network, and what is read off it on fixed windows.

    λ_max is of the loss that was trained (the slipped one for a slipped arm), on training windows
    spread over all, at the balanced gauge.
    """

    def __init__(
        self,
        net: SAMformerNet,
        arm: Arm,
        windows: WindowSource,
        validation: WindowSource,
        training: TrainingSettings,
        settings: _Sizes,
    ) -> None:
        self.net, self.arm, self.windows, self.validation = net, arm, windows, validation
        self.training, self.every = training, settings.curvature_every
        # Maps between steps are (L/D)² times as large.
        share = 8 if arm.attention == "temporal" else 1
        self.curvature = _spread(len(windows), settings.curvature_windows, share)
        self.maps = _spread(len(validation), settings.map_windows, share)
        self.trained = sum(p.numel() for p in net.parameters() if p.requires_grad)

    def batch_loss(self, index: torch.Tensor) -> Closure:
        """The loss of the windows at `index`, as a closure."""
        return self._loss(self.net, index)

    def _loss(self, net: SAMformerNet, index: torch.Tensor) -> Closure:
        batch = self.windows.batch(index)
        if self.arm.slip:
            return lambda: slipped_squares(net.core(batch.context), batch).mean()

        def compute() -> torch.Tensor:
            made = batch.centred(net.core(batch.context))
            return torch.nn.functional.mse_loss(made, batch.target)

        return compute

    def judge(self) -> float:
        """Validation error, with the slip where it was trained."""
        if self.arm.slip:
            size = self.training.batch_size
            return float(slipped_errors(self.net, self.validation, size).mean())
        return float(residual_products([Network(self.net)], self.validation).mean())

    def attention(self) -> dict[str, float]:
        """entropy_share, own and rank of A on validation windows."""
        batch = self.validation.batch(self.maps)
        return map_measures(self.net.attention(batch.context.transpose(0, 1)))

    def sharpness(self) -> dict[str, float]:
        """lambda_max; sam_rise for the radius .05; balanced: attention layers at that gauge.

        σReparam is folded into plain weights first, so that all arms are measured alike.
        """
        net = self.net
        if self.arm.gamma is not None:
            net = remove(copy.deepcopy(net))
        with torch.enable_grad():
            loss = self._loss(net, self.curvature)
            found = canonical_sharpness(net, loss, rho=0.05, max_steps=300)
        return {
            "lambda_max": found.largest_eigenvalue.value,
            "sam_rise": found.sam,
            "balanced": float(len(found.balanced)),
        }

    def everything(self) -> dict[str, float]:
        """All that is read off the network as it is."""
        return self.attention() | self.sharpness()


def _spread(count: int, wanted: int, share: int) -> torch.Tensor:
    """Positions of `wanted / share` windows, evenly over `count`."""
    some = min(count, max(2, wanted // share))
    return torch.linspace(0, count - 1, some).long()


class _Curves:
    """The judge of `train`: writes a line for each epoch, the first before the first step.

    The lines lie beside the resumable state. Those beyond it, of an epoch that was judged but not
    kept, are forgotten on resuming: the epoch is done again, to the same numbers.
    """

    def __init__(self, looks: _Looks, path: Path, state: Path) -> None:
        self.looks, self.path = looks, path
        self.lines: dict[int, dict[str, float]] = {}
        if state.exists() and path.exists():
            done = _epochs_in(state)
            for text in path.read_bytes().splitlines():
                line = json.loads(text)
                if line["epoch"] <= done:
                    self.lines[int(line["epoch"])] = line

    def __call__(self) -> float:
        epoch = len(self.lines)
        error = self.looks.judge()
        line = {"epoch": epoch, "validation_curve": error}
        if np.isfinite(error):
            line |= self.looks.attention()
            if epoch % self.looks.every == 0:
                line |= self.looks.sharpness()
        self.lines[epoch] = line
        append_lines(self.path, json.dumps(line).encode() + b"\n")
        return error

    def arrays(self) -> dict[str, NDArray[Any]]:
        """epoch [E + 1] and, of the same length, what was read; nan where it was not."""
        lines = [self.lines[e] for e in sorted(self.lines)]
        names = ("epoch", "validation_curve", "entropy_share", "own", "rank", "lambda_max")
        return {f"curve.{n}": np.array([line.get(n, np.nan) for line in lines]) for n in names}


def _epochs_in(state: Path) -> int:
    """Epochs that a state of `train` holds."""
    with safe_open(state, framework="pt") as file:
        record = json.loads((file.metadata() or {})["levelhead"])
    return len(record["history"]["epochs"]) - 1


def _judged(
    task: Task, candidate: Candidate, slipped: SAMformerNet | None
) -> dict[str, NDArray[Any]]:
    """squared, absolute [N] of the test windows as the arm is judged.

    A slipped arm is judged as released; correct.squared is of the same weights without the slip.
    """
    squared, absolute = window_errors(candidate, task.test)
    if slipped is None:
        return {"squared": squared, "absolute": absolute}
    size = task.training.batch_size
    return {
        "squared": slipped_errors(slipped, task.test, size),
        "absolute": slipped_errors(slipped, task.test, size, absolute=True),
        "correct.squared": squared,
    }


def _outcome(
    task: Task,
    found: Mapping[str, float],
    arrays: Mapping[str, NDArray[Any]],
    timing: Mapping[str, float],
    notes: list[str],
) -> Outcome:
    numbers = dict(found)
    numbers["mse"] = float(arrays["squared"].mean())
    numbers["mae"] = float(arrays["absolute"].mean())
    numbers["windows"] = float(len(arrays["squared"]))
    if "correct.squared" in arrays:
        numbers["mse_correct"] = float(arrays["correct.squared"].mean())
    readings = [
        Reading(name, value, where=task.where, source="forecasting")
        for name, value in numbers.items()
    ]
    return Outcome(readings, arrays, notes, timing)
