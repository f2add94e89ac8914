"""Watch a training loop: numbers of every attention layer while it trains, and alarms.

    with levelhead.watch(model, optimizer, every=50, out="run") as run:
        for x, y in batches:
            loss = criterion(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            run.step(loss)

A *step* is a step of the optimiser that is really made; a *sampled* step is the first of the block
and every multiple of `every`. All Readings of step t speak of the weights that step t starts from:
its losses, maps, gradients (before the update, whatever the loop zeroes when) and invariants;
`update_norm` of what it did. Leaving the block reads the weights once more, under the number of the
last step, unless that was sampled. Training is bit for bit the same with and without the watcher.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadError, LevelheadWarning
from levelhead.base.files import unused_folder
from levelhead.base.records import Reading, Run
from levelhead.diagnostics.capture import MapCapture, Probe
from levelhead.invariants.catalogue import Invariant
from levelhead.training.alarms import Alarm, Detector, Thresholds
from levelhead.training.snapshots import Analysis, write_snapshot
from levelhead.training.watch_coverage import Coverage
from levelhead.training.watch_look import Before, Look
from levelhead.training.watch_model import (
    LiveLayers,
    bare_module,
    compiled_module,
    layer_name,
    refuse_unreadable,
)
from levelhead.training.watch_on_batch import OnBatch
from levelhead.training.watch_records import Recorder, Sink, run_for
from levelhead.training.watch_settings import WatchSettings
from levelhead.training.watch_steps import Losses, OptimizerSteps
from levelhead.training.watchers import DEFAULT_INVARIANTS, chosen_invariants, roughness
from levelhead.weights.layouts import Layout

__all__ = ["Watch", "watch"]

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
        invariants: names of the catalogue, read from the weights in float64; () reads none.
        maps: whether attention maps are looked at in the first training forward pass of a sampled
            step (one with gradients; evaluation passes are not looked at).
        sharpness: a function of no arguments that gives the loss of a fixed batch, without
            backward; λ_max and SAM sharpness (radius `rho`) at each sampled step. Costly.
        probe_batch: what the model is called with (a tensor, a tuple of arguments, a mapping of
            keywords) in eval mode for the CKA of layers and heads.
        probes: further ways in which maps are seen, see `diagnostics.capture`.
        layout, arguments: how layers are recognised, as in `levelhead.inspect` (heads=, …).
        out: the run folder, new or empty; by default watched, watched-2, ….
        resume: True goes on with the run in `out`, numbers of steps included; a whole number says
            how many steps there were (that of the checkpoint that was loaded).
        snapshots: every so many steps the attention weights are stored, and decomposed by another
            process (`training.snapshots`). Leaving the block waits at most a minute for it.
        sinks: objects with `write(readings)` and `close()`, such as `adapters.tracking` has.
        alarms: False for none; Thresholds of your own.

    At the first sampled step an error in any of these is raised; later it is a warning, and so is a
    folder that can no longer be written: training goes on.

    Raises InputError for arguments that cannot be used, a folder in use, sharded (FSDP, DTensor) or
    quantised weights, and NothingMatched if no attention layer is recognised where one is needed.

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
    chosen = chosen_invariants(() if invariants is None else invariants)
    ways, outlets = tuple(probes), tuple(sinks)
    settings = WatchSettings(
        *(every, chosen, maps, sharpness, probe_batch, ways, layout),
        *(resume, snapshots, rho, outlets, alarms, title, arguments),
    )
    settings.check(out)
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
        self._losses = Losses()
        self._window: list[float] = []
        self._first = 1
        self._sampled: set[int] = set()
        self._pending: list[Reading] = []
        self._before: Before | None = None
        self._late = False
        self._wanted = False
        self._closing = False
        self._analysis: Analysis | None = None
        self._told: set[str] = set()
        self._entered = False

    # ── the block ──

    def __enter__(self) -> Self:
        if self._entered:
            raise InputError("this watch was entered before: call levelhead.watch again")
        self._entered = True
        if _rank() != 0:
            return self
        settings = self._settings
        optimizers = [] if self._optimizers is None else self._optimizers.optimizers
        names = self._layers.names
        run, last = run_for(
            self.folder,
            settings.title or f"Training of {type(self._model).__name__}",
            settings.stored(self._model, optimizers, names),
            settings.resume is not False,
        )
        self.steps = last if isinstance(settings.resume, bool) else settings.resume
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
            self._capture_maps()
            # Such a layer leaves its fast path of evaluation when it has a hook.
            if not isinstance(self._model, nn.TransformerEncoderLayer):
                hook = self._model.register_forward_pre_hook(self._forward)
                self._stack.callback(hook.remove)
        if self._optimizers is not None:
            self._optimizers.attach()
            self._stack.callback(self._optimizers.detach)
        self._prepare()

    def _capture_maps(self) -> None:
        """Capture the maps of the layers as they are now."""
        if self._look.capture is not None:
            self._look.capture.__exit__(None, None, None)
            self._look.capture = None
        heads = {
            self._layers.module_path(layer_name(plan)): plan.sizes.heads
            for plan in self._layers.plans
        }
        capture = MapCapture(self._callee, list(heads), self._settings.probes, heads=heads)
        capture.__enter__()
        self._look.capture = capture

    def _detach(self) -> None:
        self._stack.close()
        if self._look.capture is not None:
            self._look.capture.__exit__(None, None, None)
            self._look.capture = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recorder is None:
            return
        self._closing = True
        self._detach()
        self._pending = []  # of a step that was begun and not made
        recorder, made = self._recorder, self.steps - self._first + 1
        if made and self.steps not in self._sampled:
            self._pending += self._try("weights", lambda: self._look.weights(self.steps))
        if made:
            self._pending.append(Reading("finished", 1.0, "1", {}, self.steps, "loop"))
        self._write()
        if error is not None:
            recorder.note([f"Ended by {type(error).__name__} after step {self.steps}."])
        self._finish_snapshots(wait=error is None)
        self._try("figures", recorder.draw)
        recorder.close()
        if made or error is not None:
            return
        if self._optimizers is None:
            raise InputError(
                "no step was seen: without an optimizer, run.step(loss) has to be called after "
                "each step of the loop; or give watch the optimizer"
            )
        warnings.warn(
            "no step was seen: the optimizer that was given to watch made none; give the one that "
            "the loop steps",
            LevelheadWarning,
            stacklevel=2,
        )

    # ── what the loop may call ──

    def step(self, loss: Any = None, validation: Any = None) -> None:
        """Hand over the loss of a step, and a validation loss if there is one.

        With an optimizer it may be called before or after its step, once a step. Without, the call
        is the step: weights and gradients are read as they are now. Nothing waits for the GPU
        between sampled steps. Raises InputError for anything that is not one number.
        """
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
        not a number.
        """
        if self._recorder is None:
            return
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        reading = Reading(name, number, unit, where, self.steps, "loop")
        self._recorder.write([reading], judged=name == "validation_loss")

    @property
    def coverage(self) -> dict[str, str]:
        """For each layer what is seen of it, from the first sampled step on."""
        return dict(self._coverage.layers)

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms raised so far in this block; empty on processes that do not write."""
        return [] if self._recorder is None else list(self._recorder.alarms)

    def readings(self) -> list[Reading]:
        """All Readings of the run folder. Raises StoredFileError while there is no run."""
        return Run.open(self.folder).readings()

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
        losses = self._losses.take(self.steps)
        found = [Reading(name, value, "1", {}, step, "loop") for name, step, value in losses]
        self._window += [value for name, _, value in losses if name == "loss"]
        rough = roughness(self._window)
        if rough == rough and losses:
            found.append(Reading("loss_roughness", rough, "1", {}, losses[-1][1], "loop"))
        self._window = self._window[-2:]
        pending, self._pending = self._pending, []
        self._recorder.write([*found, *pending])

    def _try(self, what: str, read: Callable[[], list[Reading] | None]) -> list[Reading]:
        """What `read` gives; after the first sampled step a failure is a warning, once each."""
        try:
            return read() or []
        except _FAILURES as error:
            if not (self._sampled or self._closing):
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
        """Say which layers are seen, at the first sampled step; later, which are seen no more."""
        assert self._recorder is not None
        if not self._sampled:
            self._recorder.note(self._coverage.begin(self._look, step))
        notes, self._on_batch.notes = self._on_batch.notes, []
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
            self._capture_maps()

    # ── snapshots ──

    def _take_snapshot(self, step: int) -> None:
        def take() -> None:
            write_snapshot(self.folder, step, self._look.views())
            assert self._analysis is not None
            self._analysis.start()

        self._try("snapshot", take)

    def _finish_snapshots(self, wait: bool) -> None:
        analysis = self._analysis
        if analysis is None or self._recorder is None:
            return

        def finish() -> None:
            if not analysis.finish(_PATIENCE if wait else 0.0):
                assert self._recorder is not None
                self._recorder.note(
                    [
                        "The analysis of snapshots was not done when training ended: it goes on by "
                        "itself, or with python -m levelhead.training.snapshots and this folder."
                    ]
                )

        self._try("snapshots", finish)


def _rank() -> int:
    """The number of this process among those that train together; 0 alone."""
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if together else 0
