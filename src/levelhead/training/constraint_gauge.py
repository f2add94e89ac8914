"""Gauge balancing: attention weights in their balanced gauge, while the model's function stays.

    (q_i, k) → (g q_i, g⁻ᵀ k) and (v, o_i) → (m v, o_i m⁻¹), with both sides equally large

Axes as in `weights.attention_view`; g and m are one matrix for each group of keys and values.

Two examples. A head with q = 2 and k = 8 becomes q = k = 4: its form q·k = 16 and its outputs stay.
Two heads that share k balance it against both their queries: Σ_i q_i q_iᵀ = k kᵀ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from levelhead.base.errors import InputError
from levelhead.training.constraint_layers import (
    LiveLayer,
    LiveLayers,
    broadcast,
    refusals,
    reset_state,
)
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import balance, canonical
from levelhead.weights.layouts import Layout, Skip

__all__ = ["BalanceReport", "Balanced", "GaugeBalance", "balance_gauge"]


@dataclass(frozen=True)
class Balanced:
    """One layer that was balanced: its imbalance before, 0 … 1, the largest of its groups.

    `kept`: what stayed as it was, and why, in words; empty if nothing.
    """

    layer: str
    qk: float
    ov: float
    kept: str = ""


@dataclass(frozen=True)
class BalanceReport:
    """Layers that were balanced, parameters written, those whose optimiser state was reset."""

    layers: tuple[Balanced, ...]
    written: tuple[str, ...]
    reset: tuple[str, ...]
    refused: tuple[Skip, ...] = ()

    def __str__(self) -> str:
        worst = max((max(x.qk, x.ov) for x in self.layers), default=0.0)
        start, end = "gauge balancing", "; no optimiser state was reset"
        if self.reset:  # what a user would not expect stands first
            count = f"{len(self.reset)} parameter{'' if len(self.reset) == 1 else 's'}"
            start, end = f"{start}, which reset the optimiser's state of {count}", ""
        return (
            f"{start}: {len(self.layers)} layer{'' if len(self.layers) == 1 else 's'} "
            f"balanced (imbalance up to {worst:.2g}), {len(self.written)} parameters rewritten "
            f"with the same function{end}{refusals(self.refused)}."
        )


def balance_gauge(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    layers: Sequence[str] | None = None,
    layout: Layout | None = None,
    found: LiveLayers | None = None,
) -> BalanceReport:
    """Write every attention layer in its balanced gauge; the model's function stays.

    Outputs stay to rounding: 1e-6 relative in float32, 1e-12 in float64. The gauge is that of
    `weights.canonical`: in each group Σ_i q_i q_iᵀ = k kᵀ and Σ_i o_iᵀ o_i = v vᵀ, diagonal; the
    shortest weights with these forms, to which gradient flow with weight decay drifts by itself
    (Kempf & Ness 1979). A void bias of keys becomes zero.

    What an optimiser remembers of the rewritten parameters belongs to the old gauge. Given
    `optimizer`, its state of those parameters (Adam's moments, SGD's momentum) is reset, and the
    report names them; without it, nothing is reset.

    Refused, with the reason in the report: frozen or half-precision weights, weights that are
    products or shared with something that would not move along. Parts that stay: queries and keys
    that are normed, values without output projection, and groups whose form is too
    rank-deficient to carry a bias.

    Raises InputError for a model without attention, with sharded weights or parametrised ones.

    >>> layer = nn.MultiheadAttention(4, 2)
    >>> print(balance_gauge(layer))
    gauge balancing: 1 layer balanced ...; no optimiser state was reset.
    """
    found = found or LiveLayers(layers, layout)
    live = found.of(model)
    done: list[Balanced] = []
    refused = list(found.skipped)
    written: dict[str, Tensor] = {}
    elsewhere = _other_names(live)
    for layer in live:
        try:
            _refuse_balancing(layer, elsewhere)
            balanced, view = _balanced(layer.view())
            names = layer.write(view)
        except InputError as error:
            refused.append(Skip(layer.name, str(error).removeprefix(f"{layer.name}: ")))
            continue
        done.append(replace(balanced, layer=layer.name))
        written |= {name: layer.tensors[name] for name in names}
    found.keep(live)
    broadcast(model, written.values())
    forgotten = [] if optimizer is None else reset_state(optimizer, written.values())
    gone = {id(weight) for weight in forgotten}
    reset = tuple(name for name, weight in written.items() if id(weight) in gone)
    return BalanceReport(tuple(done), tuple(written), reset, tuple(refused))


def _balanced(view: AttentionView) -> tuple[Balanced, AttentionView]:
    before = balance(view)
    gauge = canonical(view)
    balanced, kept = gauge.view, []
    if view.qk_norm is not None:
        kept.append("queries and keys, which are normed")
    elif gauge.qk_kept:
        kept.append(f"queries and keys of groups {gauge.qk_kept}, too deficient to carry a bias")
    if view.origin("o").how == "inferred":
        balanced = replace(balanced, v=view.v, o=view.o, v_bias=view.v_bias)
        kept.append("values, which no output projection reads")
    elif gauge.ov_kept:
        kept.append(f"values of groups {gauge.ov_kept}, too deficient to carry a bias")
    moved = Balanced("", float(before.qk.max()), float(before.ov.max()), "; ".join(kept))
    return moved, balanced


def _other_names(live: list[LiveLayer]) -> dict[int, set[str]]:
    """For each tensor the names it has, by id."""
    names: dict[int, set[str]] = {}
    for name, tensor in live[0].tensors.items():
        names.setdefault(id(tensor), set()).add(name)
    return names


def _refuse_balancing(layer: LiveLayer, names: Mapping[int, set[str]]) -> None:
    placed = layer.placed()
    stored = {n for field in ("q", "k", "v", "o") for n in placed.stored(field)}
    frozen = layer.frozen()
    if frozen is not None:
        raise InputError(f"{frozen} is frozen; let it train or leave the layer out")
    for name in sorted(stored):
        tensor = layer.tensors[name]
        if tensor.dtype in (torch.float16, torch.bfloat16):
            raise InputError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, whose rounding would "
                "change the function; balance float32 weights"
            )
        own = {f"{alias}.{name.removeprefix(f'{layer.plan.name}.')}" for alias in layer.aliases}
        others = names[id(tensor)] - {name} - own - set(layer.plan.reads)
        if others:
            raise InputError(f"{name} is also {min(others)}, which would not move along")


class GaugeBalance:
    """`balance_gauge` as a constraint; plans are found once.

    >>> GaugeBalance().apply(nn.MultiheadAttention(4, 2)).written
    ('in_proj_weight', 'out_proj.weight')
    """

    name = "gauge_balance"

    def __init__(
        self, *, layers: Sequence[str] | None = None, layout: Layout | None = None
    ) -> None:
        self._found = LiveLayers(layers, layout)

    def check(self, model: nn.Module) -> None:
        """Raise what `apply` would raise for this model, and act not."""
        self._found.of(model)

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> BalanceReport:
        """Balance once, and reset what `optimizer` remembers of the weights that moved."""
        return balance_gauge(model, optimizer, found=self._found)
