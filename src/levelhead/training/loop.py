"""A plain training loop: validation, patience, best weights, restarts, and a state to resume from.

The loop knows neither windows nor forecasts. It is given a model, a function that turns window
positions into a loss closure, and a judge; `SAM` sees each batch twice through the same closure.

An epoch is a function of the state at its start and of (seed, epoch) alone: positions are shuffled
by a generator seeded from both, and torch's random state, which dropout draws from, is part of the
state. Therefore a state written at the end of each epoch is enough to resume to the same numbers,
bit for bit, wherever the run was stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from levelhead.base.arguments import is_whole
from levelhead.base.errors import DivergenceError, InputError, Interrupted, StoredFileError
from levelhead.base.files import write_atomically
from levelhead.base.progress import Advance, progress
from levelhead.base.signals import noted_signals
from levelhead.training.fused import FusedSteps
from levelhead.training.sam import SAM
from levelhead.training.second_pass import frozen_power_iteration

__all__ = ["Epoch", "History", "TrainingSettings", "train"]

Closure = Callable[[], torch.Tensor]
_STATE_VERSION = 1
_LARGEST = 1 << 31


@dataclass(frozen=True)
class TrainingSettings:
    """How to train. Defaults are SAMformer's released protocol (Ilbert et al. 2024, code).

    Attributes:
        epochs: at most so many.
        patience: stop after so many epochs without a better validation error; 0 never stops early.
        batch_size: windows per step.
        learning_rate, minimal_rate: Adam's rate falls from the first to the second along a cosine.
        restart_every: epochs per cosine; 0 keeps the rate constant.
        rho: radius of sharpness-aware minimisation; 0 is plain Adam.
        adaptive: ASAM's elementwise scaling of the radius.
        weight_decay: decoupled (AdamW) when positive; added to the gradient by SGD.
        optimizer: "adam", or "sgd" (momentum .9).
        steps_per_epoch: cap on steps per epoch, None for all windows.
        seed: of the shuffling.
    """

    epochs: int = 300
    patience: int = 5
    batch_size: int = 32
    learning_rate: float = 1e-3
    minimal_rate: float = 1e-6
    restart_every: int = 5
    rho: float = 0.7
    adaptive: bool = False
    weight_decay: float = 0.0
    optimizer: Literal["adam", "sgd"] = "adam"
    steps_per_epoch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in ("adam", "sgd"):
            raise InputError(f"optimizer must be 'adam' or 'sgd', {self.optimizer!r} was given")
        steps = 1 if self.steps_per_epoch is None else self.steps_per_epoch
        positive = {"epochs": self.epochs, "batch_size": self.batch_size, "steps_per_epoch": steps}
        for name, value in positive.items():
            if not is_whole(value):
                raise InputError(f"{name} must be a positive integer, {value!r} was given")
        for name, value in {"restart_every": self.restart_every, "seed": self.seed}.items():
            if not is_whole(value, least=0) or value >= _LARGEST:
                raise InputError(
                    f"{name} must be an integer from 0 to 2³¹ - 1, {value!r} was given"
                )
        for name in ("learning_rate", "minimal_rate", "rho", "weight_decay", "patience"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} must be a number >= 0, {value!r} was given")

    def rate(self, epoch: int, fraction: float) -> float:
        """Learning rate at `fraction` of epoch `epoch` (from 0)."""
        if self.restart_every == 0:
            return self.learning_rate
        phase = (epoch % self.restart_every + fraction) / self.restart_every
        span = self.learning_rate - self.minimal_rate
        return self.minimal_rate + 0.5 * span * (1.0 + math.cos(math.pi * phase))


@dataclass(frozen=True)
class Epoch:
    """One finished epoch; epoch 0 is the judgement before the first step."""

    epoch: int
    training_loss: float
    validation: float
    seconds: float


@dataclass
class History:
    """What happened: one entry per epoch, the best epoch and why training ended."""

    epochs: list[Epoch] = field(default_factory=list)
    best_epoch: int = 0
    steps: int = 0
    ended: str = "running"

    @property
    def best_validation(self) -> float:
        """Validation error of the weights that were kept."""
        return self.epochs[self.best_epoch].validation


def train(
    model: nn.Module,
    batch_loss: Callable[[torch.Tensor], Closure],
    count: int,
    validate: Callable[[], float] | None,
    settings: TrainingSettings,
    *,
    state_path: Path | None = None,
    resume: bool = False,
    data: str = "",
    label: str = "training",
    show_progress: bool | None = None,
) -> History:
    """Train `model` in place and leave it with its best weights.

    Args:
        batch_loss: positions `[B]` of windows → a function that computes their mean loss; it is
            called once, or twice under SAM, and must not change the batch. A loss without a graph
            is taken to have written the gradients of the weights already.
        count: number of windows to draw from.
        validate: smaller is better; None trains for `settings.epochs` and keeps the last weights.
        state_path: where to keep the resumable state; None keeps none.
        resume: go on from `state_path` if it exists, to the numbers of an uninterrupted run.
        data: a fingerprint of the data; a state that was written for other data is refused.

    Raises:
        InputError: there is no window, or a loss depends on no trained weight.
        DivergenceError: a loss or a weight is not finite; the weights are the best ones so far.
        Interrupted: SIGINT or SIGTERM came; the state holds the last finished epoch.
        StoredFileError: the state is damaged or was written under other settings.
    """
    if count < 1:
        raise InputError("there is no window to train on: shorten context or horizon")
    run = _Run(model, batch_loss, count, validate, settings, state_path, data)
    if resume and state_path is not None and state_path.exists():
        run.load()
    else:
        run.begin()
        if state_path is not None:
            # An older file must not be taken for this run's if it is stopped in its first epoch.
            run.save(state_path)
    steps = run.steps_per_epoch
    with (
        noted_signals() as stopped_by,
        progress(label, steps * settings.epochs, enabled=show_progress) as advance,
    ):
        advance(steps * (len(run.history.epochs) - 1))
        while not run.finished:
            run.one_epoch(advance, stopped_by)
    run.keep_best()
    return run.history


class _Run:
    """State of one training: everything that a resumed run must find again."""

    def __init__(
        self,
        model: nn.Module,
        batch_loss: Callable[[torch.Tensor], Closure],
        count: int,
        validate: Callable[[], float] | None,
        settings: TrainingSettings,
        state_path: Path | None,
        data: str = "",
    ) -> None:
        self.model, self.batch_loss, self.count = model, batch_loss, count
        self.validate, self.settings, self.state_path = validate, settings, state_path
        self.data = data
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.weights, settings)
        self.plain_step = FusedSteps(self.optimizer)
        self.history = History()
        self.best: dict[str, torch.Tensor] = {}
        all_steps = math.ceil(count / settings.batch_size)
        self.steps_per_epoch = min(all_steps, settings.steps_per_epoch or all_steps)

    def begin(self) -> None:
        first = math.nan if self.validate is None else self.judged(0)
        self.history.epochs.append(Epoch(0, math.nan, first, 0.0))
        self.remember_best()

    @property
    def finished(self) -> bool:
        done = len(self.history.epochs) - 1
        waited = done - self.history.best_epoch
        if self.validate is not None and 0 < self.settings.patience <= waited:
            self.history.ended = f"no better validation error for {waited} epochs"
            return True
        if done >= self.settings.epochs:
            self.history.ended = f"{done} epochs done"
            return True
        return False

    def one_epoch(self, advance: Advance, stopped_by: Callable[[], str | None]) -> None:
        began = time.perf_counter()
        epoch = len(self.history.epochs)
        total = 0.0
        order = self.order(epoch)
        self.model.train()
        for step, index in enumerate(order):
            if (signal := stopped_by()) is not None:
                raise self.interrupted(signal)
            rate = self.settings.rate(epoch - 1, step / len(order))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self.step(self.batch_loss(index))
            self.history.steps += 1
            if not math.isfinite(loss):
                raise self.diverged(f"the loss became {loss}", epoch)
            total += loss
            advance(1)
        # The last step's gradient may be infinite though its loss was not; these must not be kept.
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            raise self.diverged("a weight became infinite or nan", epoch)
        validation = math.nan if self.validate is None else self.judged(epoch)
        seconds = time.perf_counter() - began
        self.history.epochs.append(Epoch(epoch, total / len(order), validation, seconds))
        if self.validate is None or validation < self.history.best_validation:
            self.history.best_epoch = epoch
            self.remember_best()
        advance(0, f"epoch {epoch}, best error {self.history.best_validation:.4g}")
        if self.state_path is not None:
            self.save(self.state_path)

    def order(self, epoch: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(self.count, generator=generator)
        return list(torch.split(shuffled, self.settings.batch_size)[: self.steps_per_epoch])

    def step(self, compute: Closure) -> float:
        def closure() -> torch.Tensor:
            for weight in self.weights:
                weight.grad = None
            loss = compute()
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            if all(weight.grad is None for weight in self.weights):
                raise InputError(
                    "the loss depends on no trained weight, and no gradient was written: return a "
                    "loss of the model that is trained, or set `grad` of its weights"
                )
            return loss

        if isinstance(self.optimizer, SAM):
            with self.optimizer.ascent_pass(self.model):
                loss = self.optimizer.step(closure)
        else:
            with torch.enable_grad():
                loss = closure()
            self.plain_step()
        return loss.detach().item() if isinstance(loss, torch.Tensor) else float(loss)

    def judged(self, epoch: int) -> float:
        assert self.validate is not None
        self.model.eval()
        with torch.no_grad():
            error = self.validate()
        if not math.isfinite(error):
            raise self.diverged(f"the validation error became {error}", epoch)
        return error

    def remember_best(self) -> None:
        self.best = {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def keep_best(self) -> None:
        with frozen_power_iteration(self.model):
            self.model.load_state_dict(self.best)
        self.model.eval()

    def diverged(self, what: str, epoch: int) -> DivergenceError:
        if self.best:
            self.keep_best()
        settings = self.settings
        return DivergenceError(
            f"{what} at step {self.history.steps} (epoch {epoch}): try a smaller learning_rate "
            f"(now {settings.learning_rate:g}) or rho (now {settings.rho:g}), and look for extreme "
            "values in the data"
        )

    def interrupted(self, signal: str) -> Interrupted:
        self.keep_best()
        done = len(self.history.epochs) - 1
        if self.state_path is None:
            return Interrupted(
                f"{signal} after {done} epochs: no state was asked for, none is kept", signal
            )
        return Interrupted(
            f"{signal} after {done} epochs: the state is in {self.state_path}, resume to go on",
            signal,
        )

    def save(self, path: Path) -> None:
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{k}": torch.as_tensor(v) for k, v in state.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        record = {
            "version": _STATE_VERSION,
            "settings": asdict(self.settings),
            "count": self.count,
            "data": self.data,
            "history": asdict(self.history),
        }
        tensors = {k: v.detach().contiguous().cpu().clone() for k, v in tensors.items()}
        write_atomically(path, save(tensors, metadata={"levelhead": json.dumps(record)}))

    def load(self) -> None:
        assert self.state_path is not None
        try:
            with safe_open(self.state_path, framework="pt") as file:
                record = json.loads((file.metadata() or {})["levelhead"])
                tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
            self._restore(record, tensors)
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
            if isinstance(error, StoredFileError):
                raise
            reason = " ".join(str(error).split())  # torch's span several lines
            raise StoredFileError(
                f"{self.state_path} does not hold a training state that can be resumed "
                f"({reason}): delete it to start again"
            ) from error

    def _restore(self, record: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        expected = {"version": _STATE_VERSION, "settings": asdict(self.settings)}
        if record["data"] != self.data:
            raise StoredFileError(
                f"{self.state_path} was written for other data: resume with the same table, or "
                "delete the file"
            )
        for name, value in (expected | {"count": self.count}).items():
            if record[name] != value:
                raise StoredFileError(
                    f"{self.state_path} was written with {name} {record[name]}, now {value} is "
                    "asked for: resume with the same settings and data, or delete the file"
                )
        history = record["history"]
        if not isinstance(history, dict):
            raise TypeError("its history is not a table")
        epochs = [Epoch(**e) for e in history.pop("epochs")]
        self.history = History(epochs=epochs, **history)
        kinds = ("model", "best", "optimizer", "random")
        groups: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            groups[kind][name] = tensor
        # A resumed model keeps the stored state of its power iterations, to go on bit for bit.
        with frozen_power_iteration(self.model):
            self.model.load_state_dict(groups["model"])
        self.best = groups["best"]
        torch.set_rng_state(groups["random"]["cpu"])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in groups["optimizer"].items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = tensor
        as_saved = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state, "param_groups": as_saved["param_groups"]})
        self.plain_step.forget()


def _optimizer(weights: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    if not weights:
        raise InputError("the model has no parameter that requires a gradient: nothing to train")
    kind: type[torch.optim.Optimizer]
    kind = torch.optim.AdamW if settings.weight_decay > 0 else torch.optim.Adam
    options: dict[str, Any] = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        kind, options = torch.optim.SGD, options | {"momentum": 0.9}
    options["fused"] = True
    if settings.rho == 0:
        return kind(weights, **options)
    return SAM(weights, kind, rho=settings.rho, adaptive=settings.adaptive, **options)
