"""The numbers behind penalties of weights, with what they keep between calls.

Axes as in `attention_view`. Two examples. `LayerMean(live, term)()` of a model with two layers is
(term(first) + term(second))/2. `Stability(live, ("qk_spectrum",), 0.9)()` is 0 until weights move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from levelhead.base.errors import InputError
from levelhead.invariants.catalogue import entries
from levelhead.invariants.entry import Invariant
from levelhead.tensors.power_iteration import largest_singular_values, random_block
from levelhead.training.penalty_layers import LiveLayers
from levelhead.training.penalty_terms import Stacks, invariant_generators
from levelhead.weights.attention_view import AttentionView

__all__ = ["FactorCoherence", "LayerMean", "SpectralMean", "Stability"]

# Steps of power iteration from a random start; afterwards the last block is near.
_FIRST = 64


class LayerMean:
    """The mean over layers of a term. Raises InputError for a layer that has no such term."""

    def __init__(self, live: LiveLayers, term: Invariant) -> None:
        self.live, self.term = live, term
        with torch.no_grad():
            for view in live.views():
                if (reason := term.applies(view)) is not None:
                    raise InputError(
                        f"{term.name} of {view.name}: {reason}, or choose other layers with layers="
                    )

    def __call__(self) -> Tensor:
        """The mean, a scalar."""
        return torch.stack([self._of(view) for view in self.live.views()]).mean()

    def _of(self, view: AttentionView) -> Tensor:
        return self.term.function(view)

    def advance(self) -> None:
        """Nothing changes with steps."""

    def parameters(self) -> list[nn.Parameter]:
        """The layers' parameters."""
        return self.live.parameters()

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Refuses a state that is not empty."""
        if state:
            raise InputError(f"a state with {sorted(state)} was given; expected an empty one")

    def close(self) -> None:
        """Nothing is attached to the model."""


class SpectralMean(LayerMean):
    """The mean over layers and heads of spectral norms, with a block of directions for each."""

    def __init__(
        self, live: LiveLayers, term: Invariant, stacks: Stacks, iterations: int, width: int
    ) -> None:
        super().__init__(live, term)
        self.stacks, self.iterations, self.width = stacks, iterations, width
        self._blocks: dict[str, Tensor] = {}

    def _of(self, view: AttentionView) -> Tensor:
        norms = []
        for number, stack in enumerate(self.stacks(view)):
            left, right = stack.expanded(view.dtype)
            key = f"{view.name} {number}"
            block, steps = self._blocks.get(key), self.iterations
            if block is None or block.shape[:2] != (right.shape[0], right.shape[2]):
                block = random_block(right, left, self.width)
                steps = max(_FIRST, self.iterations)
            sigma, after = largest_singular_values(left, right, block.to(right), steps)
            self._blocks[key] = after
            norms.append(sigma.mean())
        return torch.stack(norms).mean()

    def state(self) -> dict[str, Any]:
        """The blocks [h, n, p] by layer."""
        return {name: block.clone() for name, block in self._blocks.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the blocks."""
        self._blocks = {name: block.clone() for name, block in state.items()}


class FactorCoherence:
    """The mean squared cosine of the columns of CP factors; see `penalties.cp_coherence`."""

    def __init__(self, source: nn.Module | Sequence[Tensor], modes: Sequence[int]) -> None:
        self.source, self.modes = source, tuple(modes)
        factors = self._factors()
        if not self.modes or not all(-len(factors) <= m < len(factors) for m in self.modes):
            raise InputError(f"modes {self.modes} were given for {len(factors)} factors")

    def __call__(self) -> Tensor:
        """The mean over modes, a scalar."""
        factors = self._factors()
        return torch.stack([_column_coherence(factors[mode]) for mode in self.modes]).mean()

    def advance(self) -> None:
        """Nothing changes with steps."""

    def parameters(self) -> list[nn.Parameter]:
        """The factors that are parameters and can learn, or those of the module."""
        if isinstance(self.source, nn.Module):
            return [p for p in self.source.parameters() if p.requires_grad]
        return [f for f in self.source if isinstance(f, nn.Parameter) and f.requires_grad]

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""

    def close(self) -> None:
        """Nothing is attached to the model."""

    def _factors(self) -> list[Tensor]:
        factors = self.source
        if isinstance(self.source, nn.Module):
            factors = getattr(self.source, "cp_factors", None)  # type: ignore[assignment]
            if factors is None:
                raise InputError(
                    f"{type(self.source).__name__} is not parametrised by CP factors (it has no "
                    "cp_factors): give the factor matrices, or use coherence for heads"
                )
        found = list(factors)  # type: ignore[arg-type]
        shapes = [list(f.shape) for f in found]
        if not found or any(len(s) != 2 for s in shapes) or len({s[1] for s in shapes}) > 1:
            raise InputError(f"factors {shapes} were given; expected matrices [n_m, R] of one R")
        if shapes[0][1] < 2:
            raise InputError("there is one component, which has nothing to differ from")
        return found


def _column_coherence(factor: Tensor) -> Tensor:
    """Σ_{r≠s} ⟨â_r, â_s⟩²/(R(R-1)) of a factor [n, R]; a zero column has no cosines."""
    wide = factor.to(torch.promote_types(factor.dtype, torch.float32))
    energy = wide.square().sum(0)
    floor = (1e-12 * energy.detach().mean()).clamp_min(torch.finfo(wide.dtype).tiny)
    unit = wide / energy.maximum(floor).sqrt()
    cosines = unit.mT @ unit
    off = cosines - torch.diag(cosines.diagonal())
    count = len(cosines)
    return off.square().sum() / (count * (count - 1))


class Stability(LayerMean):
    """The relative distance of catalogue entries to a slowly moving reference."""

    def __init__(self, live: LiveLayers, names: tuple[str, ...], decay: float) -> None:
        self.live, self.decay = live, decay
        self.chosen = entries(names)
        if not self.chosen:
            raise InputError("no quantities were given; expected names of the catalogue")
        for entry in self.chosen:
            if not entry.gradient or entry.kind == "data" or entry.smooth is not None:
                raise InputError(f"{entry.name} has no gradient that could be followed")
        self._references: dict[str, Tensor] = {}
        self._read()
        kept = [set(invariant_generators(e.symmetries)) for e in self.chosen]
        common = set.intersection(*kept)
        if any(entry.per for entry in self.chosen):
            common.discard("head_permutation")  # the reference knows heads by their number
        first = invariant_generators(self.chosen[0].symmetries)
        self.symmetry = tuple(name for name in first if name in common)

    def __call__(self) -> Tensor:
        """The mean over layers and quantities, a scalar."""
        distances = []
        for view in self.live.views():
            for entry in self.chosen:
                now = entry(view)
                reference = self._reference(f"{view.name} {entry.name}", now)
                size = reference.square().sum()
                distance = (now - reference).square().sum()
                distances.append((distance / torch.where(size > 0, size, 1.0)).to(view.dtype))
        return torch.stack(distances).mean()

    def advance(self) -> None:
        """The references move towards what is now."""
        with torch.no_grad():
            for view in self.live.views():
                for entry in self.chosen:
                    now = entry(view)
                    self._reference(f"{view.name} {entry.name}", now).lerp_(now, 1 - self.decay)

    def state(self) -> dict[str, Any]:
        """The references by layer and entry."""
        return {name: value.clone() for name, value in self._references.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up the references. Raises InputError for those of other layers or entries."""
        if set(state) != set(self._references):
            raise InputError(
                f"references of {sorted(state)} were given; expected {sorted(self._references)}"
            )
        self._references = {name: value.clone() for name, value in state.items()}

    def _read(self) -> None:
        with torch.no_grad():
            for view in self.live.views():
                for entry in self.chosen:
                    self._reference(f"{view.name} {entry.name}", entry(view))

    def _reference(self, key: str, now: Tensor) -> Tensor:
        """The reference; what is now, where there is none or heads were pruned since."""
        found = self._references.get(key)
        if found is None or found.shape != now.shape:
            found = self._references[key] = now.detach().clone()
        elif found.device != now.device:
            found = self._references[key] = found.to(now.device)
        return found
