"""What a watcher measures by running the model itself: sharpness, and CKA on a probe batch.

Both are taken at the weights a sampled step starts from, and leave no trace: weights, gradients,
buffers, modes and random states are bit for bit as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.base.records import Reading
from levelhead.diagnostics.probe import probe
from levelhead.diagnostics.sharpness import canonical_sharpness
from levelhead.diagnostics.similarity import cka_matrix
from levelhead.diagnostics.undisturbed import uncompiled
from levelhead.training.second_pass import Footprint
from levelhead.training.watch_look import Look

__all__ = ["OnBatch", "no_collectives"]


class OnBatch:
    """Measures on batches of the user's; each method gives the Readings of one step.

    Args:
        outer: the model as the user has it, perhaps inside DistributedDataParallel.
        look: at the model.
        closure: gives the loss; None measures no sharpness.
        rho: SAM's radius.
        batch: what the model is called with; None measures no CKA.
    """

    def __init__(
        self,
        outer: nn.Module,
        look: Look,
        closure: Callable[[], Tensor] | None,
        rho: float,
        batch: Any,
    ) -> None:
        self._outer, self._look = outer, look
        self._closure, self._rho, self._batch = closure, rho, batch
        self._vector: tuple[Tensor, ...] | None = None
        self.notes: list[str] = []

    def sharpness(self, step: int) -> list[Reading]:
        """λ_max and SAM's rise at the balanced gauge; `notes` says once what that does not cover.

        Raises InputError for a closure that calls the DistributedDataParallel model.
        """
        if self._closure is None:
            return []
        # Power-iteration steps stand still, so that every pass measures the same weights.
        footprint = Footprint((self._look.model,))
        with (
            footprint.replayed(footprint.random_state()),
            torch.enable_grad(),
            no_collectives(self._outer),
        ):
            found = canonical_sharpness(
                self._look.model,
                self._closure,
                rho=self._rho,
                plans=self._look.layers.stored_plans,
                start=self._vector,
            )
        self._vector = found.largest_eigenvalue.vector
        self.notes += [
            f"Sharpness depends on the gauge of {n}: {why}" for n, why in found.left.items()
        ]
        value = found.largest_eigenvalue.value
        return [
            Reading("largest_hessian_eigenvalue", value, "1", {}, step, "sharpness"),
            Reading("sam_sharpness", found.sam, "1", {}, step, "sharpness"),
        ]

    def similarity(self, step: int) -> list[Reading]:
        """Debiased CKA of layers, and of the heads of each layer, on the batch in eval mode.

        Each pair once: `where` has "other" besides the layer, or the layer and the head. Layers
        that see other numbers of tokens are not compared. Raises what the model raises.
        """
        if self._batch is None:
            return []
        with uncompiled():
            found = probe(self._look.model, self._batch, plans=self._look.layers.stored_plans)
        self.notes += [f"No CKA of {name}: {why}." for name, why in found.missing.items()]
        readings: list[Reading] = []
        by_rows: dict[int, list[str]] = {}
        for name, features in found.layers.items():
            by_rows.setdefault(len(features), []).append(name)
        for names in by_rows.values():
            for i, j, value in _pairs([found.layers[name] for name in names]):
                where: dict[str, str | int] = {"layer": names[i], "other": names[j]}
                readings.append(Reading("layer_cka", value, "1", where, step, "probe_batch"))
        for name, heads in found.heads.items():
            for i, j, value in _pairs(list(heads)):
                where = {"layer": name, "head": i, "other": j}
                readings.append(Reading("head_cka", value, "1", where, step, "probe_batch"))
        return readings

    def unseen_maps(self, step: int) -> list[Reading]:
        """Maps of layers that the training pass did not show, from the batch instead.

        That is how a compiled model is seen: on the batch it runs as it was written.
        """
        look = self._look
        if self._batch is None or look.capture is None or not look.unseen:
            return []
        return look.of_batch(self._batch, step)


def _pairs(features: list[Tensor]) -> list[tuple[int, int, float]]:
    """CKA of each pair of sets of features, by their positions."""
    if len(features) < 2:
        return []
    matrix = cka_matrix(features).tolist()
    return [(i, j, matrix[i][j]) for i, j in combinations(range(len(features)), 2)]


@contextmanager
def no_collectives(model: nn.Module) -> Iterator[None]:
    """Raises InputError where a closure calls the DistributedDataParallel model.

    One process alone would wait for the others for ever.
    """
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return

    def refuse(*_: object) -> None:
        raise InputError(
            "the sharpness closure calls the DistributedDataParallel model, on one process alone: "
            "let it call model.module"
        )

    handle = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
