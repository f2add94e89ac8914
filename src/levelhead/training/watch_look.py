"""What a watcher does at a sampled step: look at weights, gradients, updates, maps, curvature.

The model is left as it was. Numbers are computed without autocast, those of weights in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.numerics import threads
from levelhead.base.records import Reading
from levelhead.diagnostics.attention_maps import MapStatistics
from levelhead.diagnostics.capture import MapCapture, Probe
from levelhead.invariants.catalogue import Invariant
from levelhead.training.watch_hooks import WatchedCapture
from levelhead.training.watch_model import LiveLayers, layer_name
from levelhead.training.watchers import (
    folded_view,
    map_readings,
    norm_readings,
    trainable,
    weight_readings,
)
from levelhead.weights.attention_view import AttentionView

__all__ = ["Before", "Look"]

# Layers wider than this keep all threads busy; narrower ones are faster on one.
_WIDE = 1024
_NO_GRADIENTS = (
    "No gradient norms: no parameter had a gradient when a sampled step was read. A loop that "
    "gives watch no optimizer has to call run.step before it drops them."
)


@contextmanager
def _plain_numbers(model: nn.Module) -> Iterator[None]:
    """No gradients, no autocast."""
    kinds = {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in filter(torch.amp.is_autocast_available, sorted(kinds)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _as_stored(view: AttentionView) -> AttentionView:
    dtype = view.q.dtype
    return folded_view(view).map(lambda t: t.to(dtype))


@dataclass(eq=False)
class Before:
    """The weights before a step: copies, and the parameters they are copies of, by name."""

    live: dict[str, nn.Parameter]
    copies: dict[str, Tensor]


@dataclass(eq=False)
class Look:
    """Looks at one model; every method gives Readings of the step it is told.

    Args:
        model: the bare module.
        layers: its attention layers.
        chosen: the invariants that are read.
        capture: of the maps, entered by the watcher; None without maps.
    """

    model: nn.Module
    layers: LiveLayers
    chosen: Sequence[Invariant]
    capture: MapCapture | None
    missing: dict[str, str] = field(default_factory=dict)
    seen: dict[str, str] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    # ── capturing ──

    def capture_maps(self, callee: nn.Module, probes: Sequence[Probe]) -> None:
        """Capture the maps of the layers as they are now, where `callee` is what the loop calls."""
        self.release()
        heads = {
            self.layers.module_path(layer_name(plan)): plan.sizes.heads
            for plan in self.layers.plans
        }
        capture = WatchedCapture(callee, list(heads), probes, heads=heads)
        capture.__enter__()
        self.capture = capture

    def release(self) -> None:
        """Capture no more."""
        if self.capture is not None:
            self.capture.__exit__(None, None, None)
            self.capture = None

    # ── weights ──

    def weights(self, step: int) -> list[Reading]:
        """The chosen invariants of every layer, folded, and norms of the weights as they are."""
        with _plain_numbers(self.model):
            self.layers.refresh()
            named = {name: p.detach() for name, p in self.model.named_parameters()}
            found = norm_readings("weight_norm", named, self.layers.parameters(), step)
            if not self.chosen:
                return found
            plans = self.layers.plans
            widest = max((max(self.layers.shapes[n]) for p in plans for n in p.reads), default=1)
            with threads(1 if widest <= 4 * _WIDE else None):
                for plan in plans:
                    view = folded_view(self.layers.view(plan))
                    found += weight_readings(view, self.chosen, step)
        return found

    def views(self) -> list[AttentionView]:
        """The layers as they are now, folded as for `weights`, in the dtype they have."""
        with _plain_numbers(self.model):
            self.layers.refresh()
            return [_as_stored(self.layers.view(plan)) for plan in self.layers.plans]

    # ── one step ──

    def copy(self) -> Before:
        """The weights that training moves, for `updates`."""
        live = trainable(self.model)
        return Before(live, {name: p.detach().clone() for name, p in live.items()})

    def updates(self, before: Before, step: int) -> list[Reading]:
        """‖w_after - w_before‖; uses up the copies.

        Of what the optimiser's step did: constraints that move weights after it, in the loop, are
        not in it.
        """
        with _plain_numbers(self.model):
            names = [n for n, p in before.live.items() if p.shape == before.copies[n].shape]
            moved = [before.copies[n] for n in names]
            torch._foreach_sub_(moved, [before.live[n].detach() for n in names])
            tensors = dict(zip(names, moved, strict=True))
            return norm_readings("update_norm", tensors, self.layers.parameters(), step)

    def gradients(self, step: int, factor: float) -> list[Reading]:
        """Norms of the gradients that are there; parameters without one count as zero.

        Nothing if no parameter has one: then they were dropped before they could be read.
        """
        with _plain_numbers(self.model):
            tensors = {
                name: p.grad.detach()
                for name, p in self.model.named_parameters()
                if p.grad is not None
            }
            if not tensors:
                self.notes.append(_NO_GRADIENTS)
                return []
            return norm_readings(
                "gradient_norm", tensors, self.layers.parameters(), step, factor=factor
            )

    def maps(self, step: int) -> list[Reading]:
        """Statistics of the maps that were captured; fills `seen`, `unseen` and `missing`."""
        if self.capture is None:
            return []
        with _plain_numbers(self.model):
            self.capture.armed = False
            found = self._of_maps(self.capture.collect(), step, "maps")
        self.missing = self._named(self.capture.missing())
        return found

    def of_batch(self, batch: Any, step: int) -> list[Reading]:
        """Maps of the layers in `unseen`, from one pass over a batch in eval mode."""
        assert self.capture is not None
        wanted = {self.layers.module_path(name) for name in self.unseen}
        found = self.capture.look(self.model, batch)
        found = {path: statistics for path, statistics in found.items() if path in wanted}
        with _plain_numbers(self.model):
            readings = self._of_maps(found, step, "maps on probe_batch")
        self.missing = self._named(self.capture.missing())
        return readings

    def _of_maps(
        self, collected: Mapping[str, MapStatistics], step: int, source: str
    ) -> list[Reading]:
        found: list[Reading] = []
        named = self._named(collected)
        for layer, statistics in named.items():
            where = statistics.method + source.removeprefix("maps")
            self.seen[layer] = where
            found += map_readings(layer, statistics, step, source)
        self.unseen = [name for name in self.layers.names if name not in named]
        return found

    def _named(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """By the layer's name instead of its module's path."""
        names = {self.layers.module_path(name): name for name in self.layers.names}
        return {names.get(path, path): value for path, value in by_path.items()}
