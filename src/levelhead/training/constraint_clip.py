"""QK-clip: heads whose logits have grown too large get smaller queries and keys.

    s_i > τ:  q_i → √f q_i,  k_i → √f k_i,  f = τ/s_i,  s_i the largest |logit| of head i

Axes as in `weights.attention_view`: h heads, g groups of keys and values. Layers are called by the
names of their views.

Two examples. A head whose logits reach 400 with τ = 100 has f = 1/4: queries and keys are halved.
A head that shares its keys with three others gets a quarter of its queries instead, and the others'
logits stay.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.records import Reading
from levelhead.training.constraint_bounds import logit_bound, uncapped
from levelhead.training.constraint_layers import LiveLayer, LiveLayers, broadcast, refusals
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.gauge import rescale_qk
from levelhead.weights.layouts import Layout, Skip
from levelhead.weights.structure import Disentangled

__all__ = ["Clip", "ClipReport", "QKClip", "largest_logits", "qk_clip"]

Largest = Mapping[str, Any] | Iterable[Reading]


@dataclass(frozen=True)
class Clip:
    """One head that was clipped: its largest logit before, and the factor f on its logits."""

    layer: str
    head: int
    largest: float
    factor: float


@dataclass(frozen=True)
class ClipReport:
    """Which heads were clipped to `threshold` by how much, and which layers were refused."""

    threshold: float
    clipped: tuple[Clip, ...]
    refused: tuple[Skip, ...] = ()

    def __str__(self) -> str:
        if not self.clipped:
            said = f"QK-clip: no head was clipped to {self.threshold:g}"
        else:
            worst = min(self.clipped, key=lambda clip: clip.factor)
            heads = f"{len(self.clipped)} head{'s' if len(self.clipped) > 1 else ''}"
            said = (
                f"QK-clip: {heads} clipped to logits of {self.threshold:g}, the largest "
                f"{worst.largest:.4g} in {worst.layer}, head {worst.head}"
            )
        return f"{said}{refusals(self.refused)}."


def qk_clip(
    model: nn.Module,
    threshold: float,
    largest: Largest | Literal["bound"],
    *,
    token_norm: float | None = None,
    layers: Sequence[str] | None = None,
    layout: Layout | None = None,
    found: LiveLayers | None = None,
) -> ClipReport:
    """Scale down queries and keys of heads whose largest |logit| exceeds τ = `threshold`.

    QK-Clip of MuonClip (Kimi K2, arXiv 2507.20534, sec. 2.1): the logits of such a head become
    f = τ/largest times what they were, those of all others stay. A head with keys of its own gets
    √f on queries and keys; a head that shares its keys (grouped or multi-query attention) gets f on
    its queries alone, so that nobody else's logits move. Biases of queries and keys, and
    projections of disentangled positions, are scaled along; rotary positions turn what was scaled.
    A soft cap c is undone first: f = artanh(τ/c)/artanh(largest/c). Logit biases (ALiBi, T5) are
    not scaled: such a head comes nearer to τ, and below it only with its bias. The optimiser's
    moments stay as they are.

    Args:
        largest: what was measured: a mapping from the layer's name to [h] values, or to an object
            with those as `largest_logit` (`MapCapture.collect()`), or Readings `largest_logit`;
            layers that are not in it are left alone. Or "bound": what no token can exceed,
            scale·‖B_i‖₂·‖x‖² (see `logit_bounds`), which is never too small and often far above.
        token_norm: the largest ‖x‖ for "bound"; by default √d behind the layer's own norm.
        layers, layout: as in `layouts.views`. found: layers found before.

    Layers whose queries and keys are normed are refused, for their size does nothing; so are
    frozen ones, heads whose largest logit is not finite, and weights that are products.

    Raises InputError for a τ that is not positive, values [h] of another number, and a model
    without attention, with sharded weights or parametrised ones.

    >>> layer = nn.MultiheadAttention(4, 2, bias=False)
    >>> print(qk_clip(layer, 100.0, {"torch_mha": torch.tensor([400.0, 1.0])}))
    QK-clip: 1 head clipped to logits of 100, the largest 400 in torch_mha, head 0.
    """
    _check_threshold(threshold)
    found = found or LiveLayers(layers, layout)
    live = found.of(model)
    refused = list(found.skipped)
    measured = _measured(live, largest, token_norm, refused)
    measured = _over_processes(model, live, measured)
    clipped: list[Clip] = []
    written: list[Tensor] = []
    exceeding = _exceeding(measured, threshold)
    for layer in live:
        if layer.name not in exceeding:
            continue
        try:
            clips, names = _clip(layer, measured[layer.name], threshold)
        except InputError as error:
            refused.append(Skip(layer.name, str(error).removeprefix(f"{layer.name}: ")))
            continue
        clipped += clips
        written += [layer.tensors[name] for name in names]
    found.keep(live)
    broadcast(model, written)
    return ClipReport(threshold, tuple(clipped), tuple(refused))


def _exceeding(measured: Mapping[str, Tensor], threshold: float) -> set[str]:
    """Layers with a head above the threshold, or not a number; one transfer from the device."""
    over = [(~(values <= threshold)).any() for values in measured.values()]
    if not over:
        return set()
    flags = torch.stack([flag.to(over[0].device) for flag in over]).tolist()
    return {name for name, flag in zip(measured, flags, strict=True) if flag}


def _clip(layer: LiveLayer, values: Tensor, threshold: float) -> tuple[list[Clip], tuple[str, ...]]:
    view = layer.view()
    if values.shape != (view.heads,):
        raise InputError(f"largest logits {list(values.shape)} were given for {view.heads} heads")
    _refuse_clipping(layer, view)
    numbers = values.double().tolist()
    heads = [i for i, number in enumerate(numbers) if not number <= threshold]
    wrong = [i for i in heads if not math.isfinite(numbers[i])]
    if wrong:
        raise InputError(f"the largest logit of head {wrong[0]} is {numbers[wrong[0]]}")
    top = uncapped(threshold, view.soft_cap)
    factors = {i: top / uncapped(numbers[i], view.soft_cap) for i in heads}
    names = layer.write(_scaled(view, factors))
    return [Clip(layer.name, i, numbers[i], factors[i]) for i in heads], names


def _scaled(view: AttentionView, factors: Mapping[int, float]) -> AttentionView:
    """Logits of head i times factors[i]: √ on both sides, or all on the queries of shared keys."""
    queries = torch.ones(view.heads, dtype=view.dtype, device=view.q.device)
    keys = torch.ones(view.groups, dtype=view.dtype, device=view.q.device)
    for head, factor in factors.items():
        group = view.kv_group[head]
        if len(view.members(group)) == 1:
            queries[head] = keys[group] = math.sqrt(factor)
        else:
            queries[head] = factor
    scaled = rescale_qk(view, queries, keys)
    position = view.position
    if isinstance(position, Disentangled):
        own = keys[list(view.kv_group)]
        position = replace(
            position,
            query=_times(position.query, queries),
            query_bias=_times(position.query_bias, queries),
            key=_times(position.key, own),
            key_bias=_times(position.key_bias, own),
        )
    return replace(scaled, position=position)


def _times(tensor: Tensor | None, heads: Tensor) -> Tensor | None:
    return None if tensor is None else tensor * heads.reshape(-1, *[1] * (tensor.ndim - 1))


def _refuse_clipping(layer: LiveLayer, view: AttentionView) -> None:
    if view.qk_norm is not None:
        raise InputError(
            "its queries and keys are normed, which undoes any scaling; bound their gains instead"
        )
    name = layer.frozen(("q", "k", "q_bias", "k_bias"))
    if name is not None:
        raise InputError(f"{name} is frozen; let it train or leave the layer out")


def largest_logits(found: Largest) -> dict[str, Tensor]:
    """Layer name → largest logits [h], from a mapping or Readings (the latest step of each layer).

    Heads that no Reading names are 0. Raises InputError for a Reading without layer and head.

    >>> where = {"layer": "attn", "head": 1}
    >>> largest_logits([Reading("largest_logit", 7.0, where=where, step=3)])
    {'attn': tensor([0., 7.], dtype=torch.float64)}
    """
    if isinstance(found, Mapping):
        values = {name: getattr(value, "largest_logit", value) for name, value in found.items()}
        return {name: torch.as_tensor(value).detach() for name, value in values.items()}
    by_layer: dict[str, list[tuple[int, int, float]]] = {}
    for reading in found:
        if reading.name != "largest_logit":
            continue
        layer, head = reading.where.get("layer"), reading.where.get("head")
        if layer is None or not isinstance(head, int):
            raise InputError(
                f"a Reading largest_logit of {dict(reading.where)} was given; expected one with "
                f"layer and head."
            )
        by_layer.setdefault(str(layer), []).append((reading.step or 0, head, reading.value))
    result: dict[str, Tensor] = {}
    for name, rows in by_layer.items():
        latest = max(step for step, _, _ in rows)
        of_heads = torch.zeros(1 + max(head for _, head, _ in rows), dtype=torch.float64)
        for step, head, value in rows:
            if step == latest:
                of_heads[head] = value
        result[name] = of_heads
    return result


def _measured(
    live: list[LiveLayer],
    largest: Largest | Literal["bound"],
    token_norm: float | None,
    refused: list[Skip],
) -> dict[str, Tensor]:
    """Largest logits by layer; of layers under several names the largest of all."""
    found: dict[str, Tensor] = {}
    if isinstance(largest, str):
        if largest != "bound":
            raise InputError(f"largest={largest!r} was given; expected measured values or 'bound'.")
        for layer in live:
            try:
                found[layer.name] = logit_bound(layer.view(), token_norm)
            except InputError as error:
                refused.append(Skip(layer.name, str(error).removeprefix(f"{layer.name}: ")))
        return found
    given = {_bare(name): value for name, value in largest_logits(largest).items()}
    for layer in live:
        known = [given[_bare(name)] for name in layer.names if _bare(name) in given]
        if known:
            found[layer.name] = torch.stack(known).amax(0)
    return found


def _bare(name: str) -> str:
    """A layer's name without the wrappers of DistributedDataParallel and torch.compile."""
    parts = [part for part in name.split(".") if part not in ("module", "_orig_mod")]
    return ".".join(parts) or name


def _over_processes(
    model: nn.Module, live: list[LiveLayer], measured: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The largest of all processes where `model` is DistributedDataParallel."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return measured
    heads = [layer.plan.sizes.heads for layer in live]
    device = next(model.parameters()).device
    joint = torch.full((sum(heads),), -math.inf, device=device)
    parts = dict(zip((layer.name for layer in live), torch.split(joint, heads), strict=True))
    for name, values in measured.items():
        # Raising here, in one process alone, would leave the others waiting.
        parts[name].copy_(values if values.shape == parts[name].shape else torch.tensor(math.nan))
    torch.distributed.all_reduce(joint, torch.distributed.ReduceOp.MAX, model.process_group)
    return parts


class QKClip:
    """`qk_clip` as a constraint: it remembers the largest logits since it last acted.

    Give `source`, a function that returns what `observe` takes (`capture.collect`), or feed it with
    `observe` before it is attached or applied; with `source="bound"` it needs no measurement. Other
    arguments are those of `qk_clip`. A layer that is refused is named in a LevelheadWarning, once.

    Raises InputError for another source, and `apply` if nothing was ever measured.

    >>> clip = QKClip(100.0)
    >>> clip.observe({"torch_mha": torch.tensor([90.0, 1.0])})
    >>> clip.observe({"torch_mha": torch.tensor([80.0, 200.0])})
    >>> [(c.head, c.largest) for c in clip.apply(nn.MultiheadAttention(4, 2)).clipped]
    [(1, 200.0)]
    """

    name = "qk_clip"

    def __init__(
        self,
        threshold: float = 100.0,
        *,
        source: Callable[[], Largest] | Literal["bound"] | None = None,
        token_norm: float | None = None,
        layers: Sequence[str] | None = None,
        layout: Layout | None = None,
    ) -> None:
        _check_threshold(threshold)
        if source is not None and not callable(source) and source != "bound":
            raise InputError(
                f"source={source!r} was given; expected a function that measures "
                "(capture.collect), 'bound', or None with calls of observe."
            )
        self.threshold = threshold
        self._source = source
        self._token_norm = token_norm
        self._found = LiveLayers(layers, layout)
        self._seen: dict[str, Tensor] = {}
        self._observed = False
        self._refused: set[str] = set()

    def check(self, model: nn.Module) -> None:
        """Raise what `apply` would raise for this model, and act not."""
        self._check_measured()
        self._found.of(model)

    def observe(self, largest: Largest) -> None:
        """Note largest logits (see `qk_clip`); their maximum since the last `apply` counts."""
        self._observed = True
        for name, values in largest_logits(largest).items():
            before = self._seen.get(name)
            if before is not None and before.shape == values.shape:  # else heads were pruned
                values = torch.maximum(before.to(values), values)
            self._seen[name] = values

    def apply(self, model: nn.Module, optimizer: Optimizer | None = None) -> ClipReport:
        """Clip once by what was observed, and forget that."""
        # Of several processes one may have seen nothing: raising there leaves the rest waiting.
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            self._check_measured()
        bound = self._source == "bound"
        if callable(self._source):
            self.observe(self._source())
        seen, self._seen = self._seen, {}
        report = qk_clip(
            model,
            self.threshold,
            "bound" if bound else seen,
            token_norm=self._token_norm,
            found=self._found,
        )
        self._warn(report)
        return report

    def _check_measured(self) -> None:
        if self._source is None and not self._observed:
            raise InputError(
                "QKClip has no largest logits to clip by: give source=capture.collect of a "
                "MapCapture, or source='bound', or call observe first."
            )

    def _warn(self, report: ClipReport) -> None:
        """Say which layers stay as they are, each once."""
        new = [skip for skip in report.refused if skip.name not in self._refused]
        if not new:
            return
        self._refused |= {skip.name for skip in new}
        layers = f"{len(new)} layer{'s' if len(new) > 1 else ''}"
        warnings.warn(
            f"QK-clip leaves {layers} unclipped: {new[0]}.", LevelheadWarning, stacklevel=3
        )


def _check_threshold(threshold: float) -> None:
    if not isinstance(threshold, (int, float)) or not 0.0 < threshold < math.inf:
        raise InputError(f"threshold={threshold!r} was given; expected a finite logit > 0.")
