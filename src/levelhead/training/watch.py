"""Watch a training loop: numbers of every attention layer while it trains, and alarms.

    with levelhead.watch(model, optimizer, every=50, out="run") as run:
        for x, y in batches:
            loss = criterion(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            run.step(loss)

A *step* is a step of the optimiser that is really made; a *sampled* step is the first of the block
and every multiple of `every`. One rule says of which weights: Readings of step t speak of those
that step t starts from, its losses, maps, gradients (before the update, whatever the loop zeroes
when) and invariants; `update_norm` of what the optimiser's step did (not of constraints that move
weights after it). One exception: leaving the block reads the final weights, under the number of the
last step, with the source "end"; where that step was sampled they stand behind what was read before
it, and figures and tables show them.

Invariants are those that `levelhead.inspect` gives: of the layer in float64 with the norm in front
folded. Norms are of weights as they are stored; those of a layer include the norm in front.
Training is bit for bit the same with and without the watcher, and the model can be copied and
stored inside the block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadError, LevelheadWarning
from levelhead.base.files import unused_folder
from levelhead.base.records import Reading, Run
from levelhead.diagnostics.capture import Probe
from levelhead.invariants.catalogue import Invariant
from levelhead.training.alarms import Alarm, Detector, Thresholds
from levelhead.training.snapshots import Analysis, write_snapshot
from levelhead.training.watch_course import Course, current
from levelhead.training.watch_coverage import Coverage, say_no_step
from levelhead.training.watch_hooks import Hook
from levelhead.training.watch_look import Before, Look
from levelhead.training.watch_model import (
    LiveLayers,
    bare_module,
    compiled_module,
    refuse_unreadable,
)
from levelhead.training.watch_observations import Observation, observations
from levelhead.training.watch_on_batch import OnBatch
from levelhead.training.watch_process import write_process
from levelhead.training.watch_records import Recorder, Sink, discard, run_for
from levelhead.training.watch_settings import WatchSettings, check_watch_arguments
from levelhead.training.watch_steps import LossReadings, OptimizerSteps
from levelhead.training.watchers import DEFAULT_INVARIANTS
from levelhead.weights.layouts import Layout

__all__ = ["Watch", "check_watch_arguments", "watch"]

# What a reading may raise at a later step without ending the training.
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LevelheadError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
# How long the end of the block waits for the analysis of snapshots, in seconds.
_PATIENCE = 60.0


def watch(
    model: nn.Module,
    optimizer: Any = None,
    every: int = 50,
    invariants: Iterable[str | Invariant] | None = DEFAULT_INVARIANTS,
    maps: bool = True,
    sharpness: Callable[[], Tensor] | None = None,
    probe_batch: Any = None,
    probes: Sequence[Probe] = (),
    layout: Layout | None = None,
    out: str | Path | None = None,
    *,
    resume: bool | int = False,
    snapshots: int | None = None,
    rho: float = 0.05,
    sinks: Sequence[Sink] = (),
    alarms: bool | Thresholds = True,
    title: str | None = None,
    **arguments: Any,
) -> Watch:
    """A context manager around a training loop; gives the run that is written (`Watch`).

    Args:
        model: the module that is trained, also inside DistributedDataParallel (the first process
            writes, the others do nothing) or torch.compile.
        optimizer: whose steps count, also one that wraps another (SAM: gradients are those at the
            displaced weights, which the step is made with; weights are the undisplaced ones).
            Several in a list make one step together. With a closure the gradients of its last
            evaluation are read. None: the loop calls `run.step(loss)` itself, after each step.
        every: steps between sampled steps.
        invariants: names of the catalogue, read as `levelhead.inspect` does; () reads none.
        maps: whether attention maps are looked at in the first training forward pass of a sampled
            step (one with gradients; evaluation passes are not looked at).
        sharpness: a function of no arguments that gives the loss of a fixed batch, without
            backward; λ_max and SAM sharpness (radius `rho`) at each sampled step. Costly.
        probe_batch: what the model is called with (a tensor, a tuple of arguments, a mapping of
            keywords) in eval mode for the CKA of layers and heads.
        probes: further ways in which maps are seen, see `diagnostics.capture`.
        layout, arguments: how layers are recognised, as in `levelhead.inspect` (heads=, …; the
            names are `weights.settings.SETTABLE`). Heads that a module contradicts are refused.
        out: the run folder, new or empty; by default watched, watched-2, ….
        resume: True goes on with the run in `out`, numbers of steps included; a whole number says
            how many steps there were (that of the checkpoint that was loaded): what the folder
            holds of later ones is superseded.
        snapshots: every so many steps the attention weights are stored, and decomposed by another
            process (`training.snapshots`). Leaving the block waits at most a minute for it.
        sinks: objects with `write(readings)` and `close()`, such as `adapters.tracking` has.
        alarms: False for none; Thresholds of your own.

    At the first sampled step an error in any of these is raised, and a new folder is left as it was
    found; later it is a warning, and so is a folder that can no longer be written, or a loss that
    is not finite: training goes on.

    Raises InputError for arguments that cannot be used or are unknown, a folder in use, sharded
    (FSDP, DTensor) or quantised weights, and NothingMatched if no attention layer is recognised
    where one is needed.

    >>> import tempfile
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, optimizer, every=2, out=tempfile.mkdtemp()) as run:
    ...     for x in torch.randn(4, 3, 5, 8):
    ...         loss = model(x, x, x)[0].square().mean()
    ...         loss.backward()
    ...         optimizer.step()
    ...         run.step(loss)
    >>> sorted({r.step for r in run.readings() if r.name == "qk_effective_rank"})
    [1, 2, 4]
    """
    settings = check_watch_arguments(
        out=out, every=every, invariants=invariants, maps=maps, sharpness=sharpness,
        probe_batch=probe_batch, probes=probes, layout=layout, resume=resume, snapshots=snapshots,
        rho=rho, sinks=sinks, alarms=alarms, title=title, **arguments,
    )  # fmt: skip
    folder = unused_folder("watched") if out is None else Path(out)
    return Watch(model, optimizer, folder, settings)


class Watch:
    """A watched training: what `watch` gives, and the handle inside its block.

    `steps` counts the steps; `folder` is where the run lies.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, folder: Path, settings: WatchSettings
    ) -> None:
        """Used by `watch`."""
        self.folder = folder
        self.steps = 0
        self._coverage = Coverage()
        self._settings = settings
        self._model = bare_module(model)
        self._callee = compiled_module(model)
        refuse_unreadable(self._model)
        self._layers = LiveLayers(self._model, settings.layout, settings.arguments)
        if settings.need_layers:
            self._layers.refuse_none()
        self._optimizers: OptimizerSteps | None = None
        if optimizer is not None:
            self._optimizers = OptimizerSteps(optimizer, self._begin, self._finish)
        self._look = Look(self._model, self._layers, settings.invariants, None)
        self._on_batch = OnBatch(
            model, self._look, settings.sharpness, settings.rho, settings.probe_batch
        )
        self._stack = ExitStack()
        self._recorder: Recorder | None = None
        self._losses = LossReadings()
        self._first = 1
        self._sampled: set[int] = set()
        self._pending: list[Reading] = []
        self._before: Before | None = None
        self._late = False
        self._wanted = False
        self._closing = False
        self._analysis: Analysis | None = None
        self._told: set[str] = set()
        self._entered = self._left = False
        self._failed = False

    # ── the block ──

    def __enter__(self) -> Self:
        if self._entered:
            raise InputError("this watch was entered before: call levelhead.watch again")
        self._entered = True
        if _rank() != 0:
            return self
        self._made_folder = not self.folder.exists()
        settings = self._settings
        optimizers = [] if self._optimizers is None else self._optimizers.optimizers
        names = self._layers.names
        run, last = run_for(
            self.folder,
            settings.title or f"Training of {type(self._model).__name__}",
            settings.stored(self._model, optimizers, names),
            settings.resume,
        )
        write_process(run.folder)
        self.steps = last
        self._first = self.steps + 1
        limits = settings.alarms if isinstance(settings.alarms, Thresholds) else None
        detector = Detector(limits) if settings.alarms is not False else None
        self._recorder = Recorder(run, settings.sinks, detector)
        if last:
            self._recorder.remember()
        if settings.snapshots is not None:
            self._analysis = Analysis(run.folder)
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def _attach(self) -> None:
        if self._settings.maps or self._settings.probes:
            self._look.capture_maps(self._callee, self._settings.probes)
            # Such a layer leaves its fast path of evaluation when it has a hook.
            if not isinstance(self._model, nn.TransformerEncoderLayer):
                hook = self._model.register_forward_pre_hook(Hook(self._forward))
                self._stack.callback(hook.remove)
        if self._optimizers is not None:
            self._optimizers.attach()
            self._stack.callback(self._optimizers.detach)
        self._prepare()

    def _detach(self) -> None:
        self._stack.close()
        self._look.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = True
        if self._recorder is None:
            return
        self._closing = True
        self._detach()
        self._pending = []  # of a step that was begun and not made
        recorder, made = self._recorder, self.steps - self._first + 1
        if self._failed and not self._sampled and self._settings.resume is False:
            recorder.close()
            discard(self.folder, self._made_folder)
            return
        self._write()
        if made:
            last = self._try("weights", lambda: self._look.weights(self.steps))
            last = [replace(reading, source="end") for reading in last]
            end = Reading("finished", 1.0, "1", {}, self.steps, "loop")
            recorder.write([*last, end], judged=self.steps not in self._sampled)
            if self._losses.none:
                recorder.note(["No loss was handed over: call run.step(loss) once a step."])
        if error is not None:
            recorder.note([f"Ended by {type(error).__name__} after step {self.steps}."])
        self._try("snapshots", lambda: self._finish_snapshots(wait=error is None))
        self._try("figures", recorder.draw)
        recorder.close()
        if not made and error is None:
            say_no_step(self._optimizers is not None)

    # ── what the loop may call ──

    def step(self, loss: Any = None, validation: Any = None) -> None:
        """Hand over the loss of a step, and a validation loss if there is one.

        With an optimizer it may be called before or after its step, once a step or once a
        micro-batch: losses between two steps are averaged. Without, the call is the step: weights
        and gradients are read as they are now. Nothing waits for the GPU between sampled steps.
        Raises InputError for anything that is not one number, and outside the block.
        """
        self._refuse_outside()
        if self._left:
            raise InputError("run.step was called after the block of the watch had ended")
        if self._recorder is None:
            return
        if self._optimizers is not None:
            if loss is not None:
                self._losses.add(loss, self.steps, self._first)
        else:
            self._begin(False)
            if loss is not None:
                self._losses.add_at(loss, self.steps + 1)
            self._finish()
        if validation is not None:
            self._losses.add(validation, self.steps, self._first, "validation_loss")

    def record(self, name: str, value: Any, unit: str = "1", **where: str | int) -> None:
        """Store a number of your own, such as "validation_loss", under the steps made so far.

        It is written at once, and seen by alarms and sinks. Raises InputError for anything that is
        not a number, and before the block.
        """
        self._refuse_outside()
        if self._recorder is None:
            return
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        reading = Reading(name, number, unit, where, self.steps, "loop")
        self._recorder.write([reading], judged=name == "validation_loss")

    def _refuse_outside(self) -> None:
        if not self._entered:
            raise InputError(
                "this watch was not entered: write `with levelhead.watch(…) as run:` around it all"
            )

    @property
    def coverage(self) -> dict[str, str]:
        """For each layer what is seen of it, from the first sampled step on."""
        return dict(self._coverage.layers)

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms raised so far in this block; empty on processes that do not write."""
        return [] if self._recorder is None else list(self._recorder.alarms)

    @property
    def observations(self) -> list[Observation]:
        """What looks like a pathology and raised no alarm, with the reason (`watch_observations`).

        From all Readings of the run folder; raises StoredFileError while there is no run.
        """
        return observations(Course(self.readings()), self.alarms)

    def readings(self) -> list[Reading]:
        """All Readings of the run folder that no resumption superseded.

        Raises StoredFileError while there is no run.
        """
        return current(Run.open(self.folder).readings())

    def notes(self) -> list[str]:
        """The notes of the run folder. Raises StoredFileError while there is no run."""
        return Run.open(self.folder).notes()

    def __repr__(self) -> str:
        count = len(self._layers.plans)
        return f"Watch({str(self.folder)!r}: {count} layers, {self.steps} steps)"

    # ── a step ──

    def _samples(self, step: int) -> bool:
        return step == self._first or step % self._settings.every == 0

    def _prepare(self) -> None:
        """Arm the capture if the next step is sampled; without an optimiser keep the weights."""
        sampled = self._samples(self.steps + 1)
        self._arm(sampled)
        if sampled and self._optimizers is None:
            self._before = self._look.copy()

    def _arm(self, wanted: bool) -> None:
        self._wanted = wanted
        if self._look.capture is not None:
            self._look.capture.armed = wanted

    def _forward(self, *_: object) -> None:
        """A forward pass without gradients is no training step: it is not looked at."""
        capture = self._look.capture
        if torch.compiler.is_compiling() or capture is None or not self._wanted:
            return
        if capture.armed != torch.is_grad_enabled():
            capture.armed = torch.is_grad_enabled()

    def _begin(self, late: bool) -> None:
        """Before a step: weights, and gradients and maps unless a closure makes them later."""
        step = self.steps + 1
        if (n := self._settings.snapshots) is not None and step % n == 0:
            self._take_snapshot(step)
        if not self._samples(step):
            return
        self._late = late
        self._pending += self._try("weights", lambda: self._look.weights(step))
        self._note_changes(step)
        if not late:
            self._read_pass(step)
        self._arm(False)
        self._pending += self._try("sharpness", lambda: self._on_batch.sharpness(step))
        self._pending += self._try("probe_batch", lambda: self._on_batch.similarity(step))
        self._arm(late)
        if self._optimizers is not None:
            self._before = self._look.copy()

    def _read_pass(self, step: int) -> None:
        factor = 1.0 if self._optimizers is None else self._optimizers.gradient_factor()
        self._pending += self._try("gradients", lambda: self._look.gradients(step, factor))
        self._pending += self._try("maps", lambda: self._look.maps(step))
        self._arm(False)
        self._pending += self._try("maps", lambda: self._on_batch.unseen_maps(step))

    def _finish(self) -> None:
        """After a step: its update; everything that was read is written."""
        self.steps += 1
        step = self.steps
        if self._samples(step):
            if self._late:
                self._read_pass(step)
            before, self._before = self._before, None
            if before is not None:
                self._pending += self._try("updates", lambda: self._look.updates(before, step))
            self._cover(step)
            self._write()
            self._sampled.add(step)
            self._sampled = {s for s in self._sampled if s >= step}
        elif self._losses.many:
            self._write()
        self._prepare()

    def _write(self) -> None:
        """Losses since the last time, and whatever is pending."""
        assert self._recorder is not None
        pending, self._pending = self._pending, []
        self._recorder.write([*self._losses.readings(self.steps), *pending])

    def _try(self, what: str, read: Callable[[], list[Reading] | None]) -> list[Reading]:
        """What `read` gives; after the first sampled step a failure is a warning, once each."""
        try:
            return read() or []
        except _FAILURES as error:
            if not (self._sampled or self._closing):
                self._failed = True
                if what in ("sharpness", "probe_batch"):
                    error.add_note(f"Raised while watch read its argument {what} at the first step")
                raise
            if what not in self._told:
                self._told.add(what)
                sentence = f"Step {self.steps + 1}: {what} could not be read ({error})."
                assert self._recorder is not None
                self._recorder.note([sentence])
                warnings.warn(f"{sentence} Training goes on.", LevelheadWarning, stacklevel=2)
            return []

    # ── what is said ──

    def _cover(self, step: int) -> None:
        """Say which layers are seen, at first; later, which are seen no more."""
        assert self._recorder is not None
        if not self._sampled:
            self._recorder.note(self._coverage.begin(self._look, step))
        notes = [*self._on_batch.notes, *self._look.notes]
        self._on_batch.notes, self._look.notes = [], []
        self._recorder.note(n for n in notes if n not in self._told)
        self._told |= set(notes)
        for sentence in self._coverage.lost(self._look, step):
            self._recorder.note([sentence])
            warnings.warn(sentence, LevelheadWarning, stacklevel=2)

    def _note_changes(self, step: int) -> None:
        changed, self._layers.changed = self._layers.changed, []
        if not changed:
            return
        assert self._recorder is not None
        self._recorder.note([f"Step {step}: {sentence}." for sentence in changed])
        if self._look.capture is not None:
            # What was seen of this step's maps is kept; the next one needs new hooks.
            self._pending += self._try("maps", lambda: self._look.maps(step))
            self._look.capture_maps(self._callee, self._settings.probes)

    # ── snapshots ──

    def _take_snapshot(self, step: int) -> None:
        def take() -> None:
            write_snapshot(self.folder, step, self._look.views())
            assert self._analysis is not None
            self._analysis.start()

        self._try("snapshot", take)

    def _finish_snapshots(self, wait: bool) -> None:
        if self._analysis is not None and self._recorder is not None:
            self._recorder.note(self._analysis.unfinished(_PATIENCE if wait else 0.0))


def _rank() -> int:
    """The number of this process among those that train together; 0 alone."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if together else 0
