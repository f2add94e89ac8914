"""Hugging Face transformers (extra `[transformers]`): its Trainer watched, SAM and penalties in it.

    trainer = LevelheadTrainer(
        model, args, train_dataset=data, sam_rho=0.05, penalties=[coherence(model, weight=0.1)],
        callbacks=[WatchCallback(every=50, out="run")],
    )
    trainer.train()

`WatchCallback` goes with any Trainer. `LevelheadTrainer` is a Trainer, and in front of others a
mixin: `class Mine(LevelheadTrainer, Seq2SeqTrainer)`.

Attention as its interface sees it: `attention_probe()`. transformers' models hand queries and keys
to a function that `AttentionInterface` keeps under the name of the config's implementation ("sdpa",
"eager", "flash_attention_2", …). There queries and keys stand after norms and rotary positions,
keys unrepeated for the heads of a group, beside scaling, soft cap, bias of position and mask: all
an entropy needs, whatever kernel then runs.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.diagnostics.attention_maps import AttentionCall
from levelhead.diagnostics.interface_calls import overheard
from levelhead.training.second_gradient import SecondGradient
from levelhead.training.watch import Watch, watch

__all__ = ["AttentionProbe", "LevelheadTrainer", "WatchCallback", "attention_probe"]

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


class AttentionProbe:
    """Sees every call of transformers' attention functions; see `attention_probe`."""

    def attach(
        self, model: nn.Module, receive: Callable[[str, AttentionCall], None]
    ) -> AbstractContextManager[None]:
        """Until left, `receive(path of the module in model, call)` before each attention function.

        The interface gives out its functions wrapped under their own names, so that no config
        changes and masks are made as before. Calls of other models pass through untouched, and so
        does what is compiled. A call that cannot be understood (a block mask of flex_attention)
        is not handed over.

        Raises InputError for a model without a module of transformers' attention.
        """
        return _attached(model, receive)


def attention_probe() -> AttentionProbe:
    """A probe for `MapCapture` and `watch` that sees attention through AttentionInterface.

    Needed where a kernel hides it (flash-attn, flex_attention); elsewhere it shows keys unrepeated
    and soft caps apart.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...                     intermediate_size=8, vocab_size=9)
    >>> model, seen = BertModel(config), []
    >>> with attention_probe().attach(model, lambda name, call: seen.append((name, call.shape))):
    ...     _ = model(torch.zeros(1, 5, dtype=torch.long))
    >>> seen
    [('encoder.layer.0.attention.self', (1, 2, 5, 5))]
    """
    return AttentionProbe()


@contextmanager
def _attached(model: nn.Module, receive: Callable[[str, AttentionCall], None]) -> Iterator[None]:
    paths = {id(module): _plain(path) for path, module in model.named_modules()}
    users = [m for m in model.modules() if _INTERFACE in _globals(m) and hasattr(m, "config")]
    if not users:
        raise InputError(
            f"{type(model).__name__} was given; attention_probe() needs a model whose attention "
            "goes through transformers' AttentionInterface: leave the probe away"
        )
    interfaces = {id(found): found for m in users if (found := _globals(m)[_INTERFACE])}
    with ExitStack() as stack:
        for interface in interfaces.values():
            stack.enter_context(overheard(interface, paths, receive))
        yield


def _globals(module: nn.Module) -> Mapping[str, Any]:
    """The names that a module's forward sees."""
    return getattr(inspect.unwrap(type(module).forward), "__globals__", {})


def _plain(path: str) -> str:
    return ".".join(piece for piece in path.split(".") if piece != "_orig_mod")


# ── the Trainer, watched ──


class WatchCallback(TrainerCallback):
    """Watches what a Trainer trains; takes the arguments of `levelhead.watch` after the optimizer.

    The watch (`run`, which stays after training) opens when training begins and closes when it
    ends. Steps are those of the optimiser, whatever is accumulated. The loss of each step is the
    one the model returns, over all its micro-batches; LevelheadTrainer hands over the one that is
    minimised, penalties included. A model that returns none has the averages that the Trainer logs,
    and a logged loss that is not the model's is warned about. `eval_loss` becomes
    validation_loss; the losses of several evaluation sets evaluation_loss with `data`. A Trainer
    that resumes from a checkpoint goes on in the folder `out`, at the checkpoint's step.

    transformers tells callbacks nothing of an error. LevelheadTrainer closes the run at once then;
    with another Trainer use the callback as a context manager around `train()`, or it is closed
    with the next training, when the callback is dropped or when Python ends.

    Raises InputError as `watch`, when training begins.

    >>> WatchCallback(every=50, out="run").run is None
    True
    """

    def __init__(self, **arguments: Any) -> None:
        taken = sorted({"model", "optimizer"} & arguments.keys())
        if taken:
            raise InputError(f"WatchCallback was given {taken[0]}; leave it to the Trainer")
        self.run: Watch | None = None
        self._arguments = arguments
        self._losses = _StepLosses()
        self._finalizer: Any = None
        self._hook: Any = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **more: Any
    ) -> None:
        """Open the watch."""
        arguments = dict(self._arguments)
        if self._finalizer is not None and self.run is not None:
            # A smaller batch after out of memory, or a training that raised before.
            arguments |= {"out": self.run.folder, "resume": int(state.global_step)}
            self.close(Unfinished())
        elif state.global_step:
            if arguments.get("out") is None:
                raise InputError(
                    f"training resumes from step {state.global_step}: give WatchCallback out=, the "
                    "folder of the run to go on with, or a new one"
                )
            arguments["resume"] = int(state.global_step)
        self.run = watch(model, more.get("optimizer"), **arguments).__enter__()
        self._losses = losses = _StepLosses()
        self._hook = model.register_forward_hook(losses.of_model, with_kwargs=True)
        self._finalizer = weakref.finalize(self, _leave, self.run, self._hook, Unfinished())

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The first micro-batch of a step comes."""
        self._losses.begin()

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """A further micro-batch comes."""
        self._losses.open = True

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Hand over the loss of the step, if it was made."""
        if self.run is None or self.run.steps == self._losses.steps:
            return
        self._losses.steps = self.run.steps
        loss = self._losses.joint(args)
        if loss is not None:
            self.run.step(loss)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Take the logged average where the model returns no loss; compare it elsewhere."""
        logged = (logs or {}).get("loss")
        if self._finalizer is None or self.run is None or logged is None:
            return
        if self._losses.none:
            self.run.step(logged)
        elif args.world_size == 1 and (own := self._losses.strange(logged)) is not None:
            warnings.warn(
                f"the model returns a loss ({own:.6g} on average) that is not the one the Trainer "
                f"logs ({logged:.6g}): the watch has the model's; use LevelheadTrainer, which "
                "hands over what is minimised",
                LevelheadWarning,
                stacklevel=2,
            )

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        control: Any,
        metrics: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Record the losses of evaluation."""
        if self._finalizer is None or self.run is None:
            return
        for name, value in (metrics or {}).items():
            if name == "eval_loss":
                self.run.record("validation_loss", value)
            elif name.endswith("_loss"):
                data = name.removesuffix("_loss").removeprefix("eval_")
                self.run.record("evaluation_loss", value, data=data)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Close the watch."""
        self.close()

    def take(self, loss: Tensor) -> None:
        """Take the part a micro-batch has in the loss of the step; LevelheadTrainer calls it."""
        self._losses.take(loss)

    def close(self, error: BaseException | None = None) -> None:
        """Close the watch, if it is open; `error` is what ended the training."""
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None and finalizer.detach():
            assert self.run is not None
            _leave(self.run, self._hook, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)


class Unfinished(Exception):
    """Why a run was closed whose training never said that it ended."""


def _leave(run: Watch, hook: Any, error: BaseException | None) -> None:
    hook.remove()
    run.__exit__(None if error is None else type(error), error, None)


class _StepLosses:
    """The loss of a step from those of its micro-batches: the first of each that has gradients."""

    def __init__(self) -> None:
        self.open = False
        self.none = True
        self.steps = 0
        self._parts: list[tuple[Tensor, bool]] = []
        self._handed = False
        self._since_log: Tensor | None = None
        self._count = 0
        self._warned = False

    def begin(self) -> None:
        self.open, self._parts = True, []

    def of_model(self, model: nn.Module, args: Any, given: dict[str, Any], output: Any) -> None:
        """A hook after the model's forward pass."""
        if torch.compiler.is_compiling() or self._handed or not self.open:
            return
        if not (torch.is_grad_enabled() and model.training):
            return
        self.open = False
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(output, tuple) and given.get("labels") is not None:
            loss = output[0]
        if isinstance(loss, Tensor):
            # With the number of items in the batch the model gives its part of the batch's mean.
            self._parts.append((loss.detach().mean(), given.get("num_items_in_batch") is not None))

    def take(self, loss: Tensor) -> None:
        if not self._handed:
            self._handed, self._parts = True, []
        self._parts.append((loss.detach(), True))

    def joint(self, args: Any) -> Tensor | None:
        parts, self._parts = self._parts, []
        if not parts:
            return None
        self.none = False
        total = torch.stack([loss for loss, _ in parts]).sum()
        if not parts[0][1]:
            total = total / len(parts)
        elif not self._handed and args.average_tokens_across_devices:
            total = total * args.world_size
        if not self._handed:
            before = self._since_log
            self._since_log = total.double() if before is None else before + total
            self._count += 1
        return total

    def strange(self, logged: float) -> float | None:
        """The average since the last log, if it is not what was logged; said once."""
        total, self._since_log = self._since_log, None
        count, self._count = self._count, 0
        if total is None or self._warned:
            return None
        own = float(total) / count
        if not math.isfinite(own) or abs(own - logged) <= 0.01 * abs(logged):
            return None
        self._warned = True
        return own


# ── SAM and penalties in the Trainer ──


class LevelheadTrainer(Trainer):
    """transformers' Trainer with SAM and penalties; in front of another Trainer, a mixin.

    Args:
        sam_rho: SAM's radius (`training.sam`); 0 makes no second pass and trains bit for bit as
            the Trainer does. All micro-batches of a step are passed again at the displaced weights,
            with the same dropout masks; the optimiser stays what it is, and `max_grad_norm` clips
            the gradient that it steps with.
        sam_adaptive: relative to each weight.
        penalties: functions of no arguments whose values are added to the loss of training, once
            for each step, however many micro-batches there are; those of `training.penalties` are
            stepped with the optimiser, and stored in checkpoints and loaded from them.

    All else goes to the Trainer. Raises InputError for penalties with `model_init` (they look at a
    model that is replaced), SAM with sharded models or LOMO, a ρ that is no finite number ≥ 0, and
    in training for a compute_loss that does not call that of super() and so drops the penalties.

    >>> issubclass(LevelheadTrainer, Trainer)
    True
    """

    def __init__(
        self,
        *args: Any,
        sam_rho: float = 0.0,
        sam_adaptive: bool = False,
        penalties: Iterable[Callable[[], Tensor]] = (),
        **more: Any,
    ) -> None:
        self.penalties = tuple(penalties)
        self._second = SecondGradient(sam_rho, sam_adaptive)
        self._added = False
        super().__init__(*args, **more)
        if self.penalties and self.model_init is not None:
            raise InputError(
                "penalties and model_init were given: penalties look at one model, and model_init "
                "makes another; give model instead"
            )
        if sam_rho and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise InputError(
                "sam_rho was given with DeepSpeed or FSDP, which scatter gradients and weights; "
                "SAM needs them whole: use DistributedDataParallel or leave sam_rho away"
            )
        if sam_rho and "lomo" in str(self.args.optim).lower():
            raise InputError(
                "sam_rho was given with LOMO, which steps inside the backward pass; SAM needs all "
                "gradients before the step: choose another optim"
            )
        self.add_callback(_Steps(self))

    def train(self, *args: Any, **more: Any) -> Any:
        """As the Trainer's; an error closes runs of WatchCallback before it goes on."""
        try:
            return super().train(*args, **more)
        except BaseException as error:
            for callback in self._watching():
                callback.close(error)
            raise

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The Trainer's loss and, while training, the penalties' part in it."""
        found: Any = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not (self.penalties and model.training and torch.is_grad_enabled()):
            return found
        self._added = True
        loss, *outputs = found if return_outputs else (found,)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = counted or self.compute_loss_func is not None
        # Where the Trainer does not divide the losses of micro-batches, the penalties are divided.
        share = self.current_gradient_accumulation_steps if scaled else 1
        for penalty in self.penalties:
            loss = loss + penalty().to(loss.device) / share
        return (loss, *outputs) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The Trainer's pass over a micro-batch; after the last one of a step SAM's second pass."""
        step = super().training_step

        def again(last: bool) -> None:
            with nullcontext() if last else self.accelerator.no_sync(model):
                step(model, inputs, num_items_in_batch)

        self._second.before(model, again)
        self._added = False
        loss: Tensor = step(model, inputs, num_items_in_batch)
        if self.penalties and not self._added:
            raise InputError(
                f"compute_loss of {type(self).__name__} does not call super().compute_loss, which "
                "adds the penalties: call it, or leave penalties away"
            )
        for callback in self._watching():
            callback.take(loss)
        if self.accelerator.sync_gradients:
            optimizer: Any = self.optimizer
            self._second.take(optimizer.param_groups)
        return loss

    def _watching(self) -> list[WatchCallback]:
        return [c for c in self.callback_handler.callbacks if isinstance(c, WatchCallback)]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        states = [p.state_dict() for p in self.penalties if hasattr(p, "state_dict")]
        if states and self.args.should_save:
            torch.save(states, os.path.join(output_dir, _PENALTIES))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        stated = [p for p in self.penalties if hasattr(p, "load_state_dict")]
        if checkpoint is None or not stated:
            return
        file = os.path.join(checkpoint, _PENALTIES)
        if not os.path.isfile(file):
            warnings.warn(
                f"{checkpoint} holds no state of penalties: theirs begin at step 0",
                LevelheadWarning,
                stacklevel=2,
            )
            return
        states = torch.load(file, map_location="cpu", weights_only=True)
        if len(states) != len(stated):
            raise InputError(
                f"{checkpoint} holds the states of {len(states)} penalties and {len(stated)} were "
                "given; give those of the training that is resumed"
            )
        for penalty, state in zip(stated, states, strict=True):
            penalty.load_state_dict(state)


_PENALTIES = "penalties.pt"


class _Steps(TrainerCallback):
    """Tells a LevelheadTrainer of steps."""

    def __init__(self, trainer: LevelheadTrainer) -> None:
        self._trainer = weakref.proxy(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Nothing of a training that was broken off is left."""
        self._trainer._second.forget()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Schedules go on, unless the scaler left the step out."""
        if self._trainer.accelerator.optimizer_step_was_skipped:
            return
        for penalty in self._trainer.penalties:
            step = getattr(penalty, "step", None)
            if callable(step):
                step()
