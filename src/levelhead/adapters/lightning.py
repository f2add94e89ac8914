"""Lightning (extra `[lightning]`): its Trainer watched, SAM and penalties in it.

    class Model(L.LightningModule):
        def training_step(self, batch):
            x, y = batch
            return cross_entropy(self(x), y) + self.penalty()     # penalties.coherence(self)

    watching, sam = WatchCallback(every=50, out="run"), SharpnessAware(rho=0.05)
    L.Trainer(callbacks=[watching, sam, PenaltySteps(model.penalty)]).fit(model, data)

With automatic optimisation; in manual optimisation the loop is yours, and so are `levelhead.watch`
and `training.sam.SAM`. SAM also works as the optimiser that a module configures: Lightning hands it
the closure that it calls twice. But that closure holds the last micro-batch alone, and buffers move
twice unless `fit` is called within `sam.ascent_pass(module)`. `SharpnessAware` goes with any
optimiser and with `accumulate_grad_batches`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.training.penalty import Penalty, PenaltySum
from levelhead.training.sam import SAM
from levelhead.training.second_gradient import SecondGradient
from levelhead.training.watch import Watch, watch

__all__ = ["PenaltySteps", "SharpnessAware", "WatchCallback"]


class WatchCallback(Callback):
    """Watches what a Trainer fits; takes the arguments of `levelhead.watch` after the optimizer.

    The watch (`run`, which stays after training) opens when training begins and closes when it ends
    or raises. Steps are those of the optimiser. The loss of each is what training_step returned,
    the mean of its micro-batches; under SAM that of the first pass. After each validation the
    metric that was logged under the name `validation` becomes validation_loss. A fit from a
    checkpoint (`ckpt_path`) goes on in the folder `out`, at the checkpoint's step.

    Raises InputError as `watch` when training begins, and for manual optimisation. A SAM optimiser
    with accumulate_grad_batches is warned about.

    >>> WatchCallback(every=50, out="run").run is None
    True
    """

    def __init__(self, *, validation: str = "val_loss", **arguments: Any) -> None:
        taken = sorted({"model", "optimizer"} & arguments.keys())
        if taken:
            raise InputError(f"WatchCallback was given {taken[0]}; leave it to the Trainer")
        self.run: Watch | None = None
        self._arguments = arguments
        self._validation = validation
        self._open = False
        self._first: Tensor | None = None
        self._parts: list[Tensor] = []
        self._steps = 0

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Open the watch."""
        _refuse_manual(pl_module, "WatchCallback")
        arguments = dict(self._arguments)
        if trainer.global_step:
            if arguments.get("out") is None:
                raise InputError(
                    f"the fit goes on from step {trainer.global_step}: give WatchCallback out=, "
                    "the folder of the run to go on with, or a new one"
                )
            arguments["resume"] = int(trainer.global_step)
        if isinstance(trainer.optimizers[0], SAM) and trainer.accumulate_grad_batches > 1:
            warnings.warn(
                "the optimizer is SAM and accumulate_grad_batches is "
                f"{trainer.accumulate_grad_batches}: its second pass sees the last micro-batch "
                "alone, beside the gradients of the first pass; use the callback "
                "adapters.lightning.SharpnessAware with a plain optimizer",
                LevelheadWarning,
                stacklevel=2,
            )
        self.run = watch(pl_module, trainer.optimizers[0], **arguments).__enter__()
        self._open, self._steps, self._parts = True, self.run.steps, []

    def on_train_batch_start(
        self, trainer: LightningTrainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch comes: maps are looked at."""
        self._first = None
        self._training_passes()

    def on_before_backward(
        self, trainer: LightningTrainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Keep the loss of the first pass, in which nothing is scaled if there is a second."""
        if self._first is None:
            self._first = loss.detach().clone()

    def on_train_batch_end(
        self,
        trainer: LightningTrainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Hand over the loss, if a step was made."""
        if not self._open or self.run is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            first = None if _scaler(trainer) else self._first
            self._parts.append(loss.detach() if first is None else first)
        if self.run.steps == self._steps:
            return
        self._steps = self.run.steps
        parts, self._parts = self._parts, []
        if parts:
            # Lightning has divided each by the number of micro-batches.
            self.run.step(torch.stack(parts).sum())

    def on_validation_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Maps of validation are not those of training."""
        with torch.no_grad():
            self._training_passes()

    def on_validation_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Record the validation loss, if there is one."""
        value = trainer.callback_metrics.get(self._validation)
        if (
            self._open
            and self.run is not None
            and value is not None
            and not trainer.sanity_checking
        ):
            self.run.record("validation_loss", value)

    def on_train_end(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Close the watch."""
        self.close()

    def on_exception(
        self, trainer: LightningTrainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the watch; the error goes on."""
        self.close(exception)

    def close(self, error: BaseException | None = None) -> None:
        """Close the watch, if it is open; `error` is what ended the training."""
        if self._open and self.run is not None:
            self._open = False
            self.run.__exit__(None if error is None else type(error), error, None)

    def _training_passes(self) -> None:
        """Say whether the passes that come are of training: training_step may never call forward.

        The watch learns it from a hook before the module's forward pass, else.
        """
        if self._open and self.run is not None:
            self.run._forward()


class SharpnessAware(Callback):
    """SAM (`training.sam`) for whatever optimiser a LightningModule configures.

    Args:
        rho: radius ρ ≥ 0; 0 makes no second pass.
        adaptive: relative to each weight.

    When the gradients of all micro-batches of a step are there, each is passed again at the
    displaced weights, with the same random state; buffers end as the first pass left them, what
    the second pass logs is dropped, and gradient clipping clips the second gradient. Hooks of
    backward passes are called in both passes.

    Raises InputError, when training begins, for manual optimisation, 16-bit precision with a scaler
    (take bf16-mixed), strategies that scatter weights, a module whose optimiser is SAM or LBFGS,
    and a training_step that takes a data iterator.

    >>> SharpnessAware(rho=0.05).ascents
    0
    """

    def __init__(self, rho: float = 0.05, adaptive: bool = False) -> None:
        self._second = SecondGradient(rho, adaptive)

    @property
    def ascents(self) -> int:
        """The number of displacements made so far."""
        return self._second.ascents

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Refuse what it cannot go with."""
        _refuse_manual(pl_module, "SharpnessAware")
        strategy = trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise InputError(
                f"SharpnessAware was given with {type(strategy).__name__}; it needs gradients and "
                "weights whole: train on one device or with strategy='ddp'"
            )
        if _scaler(trainer):
            raise InputError(
                "SharpnessAware was given with a gradient scaler, which takes one pass a step; "
                "choose precision='bf16-mixed' or '32-true'"
            )
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, (SAM, torch.optim.LBFGS)):
            raise InputError(
                f"SharpnessAware was given with the optimizer {type(optimizer).__name__}, which "
                "makes passes of its own; configure the base optimizer, such as AdamW"
            )
        if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
            raise InputError(
                "training_step takes dataloader_iter, which gives each batch once; SharpnessAware "
                "needs a training_step that takes a batch"
            )
        self._second.forget()

    def on_train_batch_start(
        self, trainer: LightningTrainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the micro-batch."""
        step = pl_module.training_step
        numbered = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        arguments = (batch, batch_idx) if numbered else (batch,)

        def again(last: bool) -> None:
            _pass(trainer, pl_module, arguments, last)

        self._second.before(pl_module, again)

    def on_before_optimizer_step(
        self, trainer: LightningTrainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """All gradients are there: replace them by those at the displaced weights."""
        self._second.take(optimizer.param_groups)


class PenaltySteps(Callback):
    """Steps `training.penalties` with the optimiser, and keeps their states in checkpoints.

    Their values are added in training_step: `loss + self.penalty()`. Raises InputError for a
    checkpoint of another number of penalties.

    >>> from levelhead.training.penalties import l2
    >>> PenaltySteps(l2(torch.nn.MultiheadAttention(4, 1))).penalties
    (Penalty(l2, weight 0.0001, step 0),)
    """

    def __init__(self, *penalties: Penalty | PenaltySum) -> None:
        self.penalties = penalties
        self._steps = 0

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Count from here."""
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: LightningTrainer, *rest: Any) -> None:
        """Step the penalties, if the optimiser was stepped."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        for penalty in self.penalties:
            penalty.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of the penalties, in order."""
        return {"penalties": [penalty.state_dict() for penalty in self.penalties]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        PenaltySum(self.penalties).load_state_dict(state_dict)  # type: ignore[arg-type]


def _pass(
    trainer: LightningTrainer, module: LightningModule, arguments: tuple[Any, ...], last: bool
) -> None:
    """Forward and backward pass of a micro-batch, with nothing logged."""
    strategy: Any = trainer.strategy
    blocked = nullcontext() if last else getattr(strategy, "block_backward_sync", nullcontext)()
    shadowed = vars(module).get("log")
    vars(module)["log"] = _log_nothing
    try:
        with blocked:
            found = strategy.training_step(*arguments)
            loss = found.get("loss") if isinstance(found, Mapping) else found
            if loss is not None:
                strategy.backward(loss / trainer.accumulate_grad_batches, None)
    finally:
        if shadowed is None:
            del vars(module)["log"]
        else:
            vars(module)["log"] = shadowed


def _log_nothing(*args: Any, **options: Any) -> None:
    """Stands for LightningModule.log in a second pass."""


def _scaler(trainer: LightningTrainer) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def _refuse_manual(module: LightningModule, who: str) -> None:
    if not module.automatic_optimization:
        raise InputError(
            f"{who} was given with manual optimisation, where the loop is the module's; use "
            "levelhead.watch and training.sam.SAM in it"
        )
