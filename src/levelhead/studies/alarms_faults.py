"""Faults that are planted into healthy trainings, one kind for each alarm.

A fault is data: what is done, from which step on, where, how fast, how strongly. `act` does it
before each step from the onset on; during the first `ramp` steps it grows (evenly in logarithms),
after that it is held against what the optimiser does. All of a fault is drawn from the seed and
from what the healthy part looked like (a head that is one-hot already cannot collapse).

Axes: packed weights of `nn.MultiheadAttention`, q, k, v in rows [3d, d] and the output [d, d] with
one head after the other in its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from levelhead.base.records import Reading
from levelhead.diagnostics.sharpness import largest_eigenvalue
from levelhead.studies.alarms_trainings import Training
from levelhead.training.alarms import ALARMS, Alarm

__all__ = ["CONSEQUENCES", "Fault", "Planted", "drawn_fault"]

# What a fault may bring about besides its own alarm. Any other alarm after it is unexplained.
CONSEQUENCES: Mapping[str, tuple[str, ...]] = {
    "entropy_collapse": (
        "exploding_logits", "rank_collapse", "sharpness_spike", "loss_oscillation",
    ),
    "rank_collapse": ("sharpness_spike", "loss_oscillation"),
    "head_collapse": ("sharpness_spike", "loss_oscillation"),
    "dead_head": ("sharpness_spike", "loss_oscillation"),
    "sharpness_spike": (
        "exploding_logits", "entropy_collapse", "rank_collapse", "loss_oscillation",
    ),
    "exploding_logits": (
        "entropy_collapse", "rank_collapse", "sharpness_spike", "loss_oscillation",
    ),
    "loss_oscillation": (
        "entropy_collapse", "rank_collapse", "head_collapse", "dead_head", "sharpness_spike",
        "exploding_logits",
    ),
}  # fmt: skip


_QUIET = 0.02


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is planted: the alarm `name` it should raise, how it is done, and where.

    way: "grow" or "shrink" (q and k of `heads`), "point" (k becomes random, then both grow; the
    rate is a fiftieth from before the onset, so that the loss gains nothing by it), "copy" (heads
    become the first of `heads`), "fade" (their output), "stiffen" (the embedding, which a norm
    follows, shrinks), "imbalance" (the first matrix of an MLP grows, the second shrinks), "bounce"
    (weights jump away and back, each time elsewhere), "batches" (targets are random in half of each
    period of steps); ramp: steps of its growth, or the period of what alternates; strength: the
    factor of the largest logit, of norms or of λ_max, the share that stays a head's own, the rise
    of the loss.
    """

    name: str
    way: str
    onset: int
    layer: int
    heads: tuple[int, ...]
    ramp: int
    strength: float

    def raised_by(self, alarm: Alarm, layer: str, every: int) -> bool:
        """Whether `alarm` names this fault, in its place and not from before its onset."""
        if alarm.name != self.name or alarm.step < self.onset or alarm.since < self.onset - every:
            return False
        return alarm.layer in (None, layer) and (alarm.head is None or alarm.head in self.heads)


def drawn_fault(
    name: str, seed: int, start: int, heads: int, layers: list[str], seen: Iterable[Reading]
) -> Fault:
    """The fault `name` of a seed, into a training whose healthy part of `start` steps was `seen`.

    Args:
        heads: of each layer; layers: their names in the Readings.
    """
    draw = torch.Generator().manual_seed(3_000_017 + 1009 * seed + ALARMS.index(name))

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=draw))

    def one_of(count: int) -> int:
        return int(torch.randint(count, (), generator=draw))

    onset = start + 1 + one_of(40) + (60 if name == "sharpness_spike" else 0)
    ramp = (1, 10, 30, 60)[one_of(4)]
    seen = list(seen)
    state = _state(seen)
    layer, head = one_of(len(layers)), one_of(heads)
    if name in ("entropy_collapse", "rank_collapse"):
        what = "attention_entropy_share" if name == "entropy_collapse" else "map_residual"
        layer, head = _fit(state[what], layers, draw)
    chosen = (head,) if one_of(2) else tuple(range(heads))
    way, strength = "", 1.0
    if name in ("entropy_collapse", "exploding_logits"):
        way = "point" if name == "entropy_collapse" else "grow"
        aim = uniform(300, 1000) if way == "point" else math.exp(uniform(6.2, 8.5))
        strength = aim / min(state["largest_logit"][layers[layer], h] for h in chosen)
    elif name == "rank_collapse":
        way, strength = "shrink", math.exp(uniform(math.log(1e-5), math.log(2e-3)))
    elif name == "head_collapse":
        way, strength, chosen = "copy", uniform(0.0, 0.1), (head,)
    elif name == "dead_head":
        way, strength, chosen = "fade", math.exp(uniform(math.log(1e-4), math.log(0.02))), (head,)
    elif name == "sharpness_spike":
        way, strength = ("stiffen", "imbalance")[one_of(2)], math.exp(uniform(2.3, 3.9))
    else:
        way, strength, ramp = "bounce", uniform(1.0, 2.0), (2, 8)[one_of(2)]
        if one_of(2) and _learned(seen):
            way = "batches"
    return Fault(
        name=name, way=way, onset=onset, layer=layer, heads=chosen, ramp=ramp, strength=strength
    )  # fmt: skip


def _state(seen: Iterable[Reading]) -> dict[str, dict[tuple[str, int], float]]:
    """The last value of each reading of a head."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for reading in seen:
        layer, head = reading.where.get("layer"), reading.where.get("head")
        if isinstance(layer, str) and isinstance(head, int):
            found.setdefault(reading.name, {})[layer, head] = reading.value
    return found


def _learned(seen: Iterable[Reading]) -> bool:
    """Whether random targets would be seen in the loss: it has come down by a third."""
    losses = [reading.value for reading in seen if reading.name == "loss"]
    return sum(losses[-20:]) < 2 / 3 * sum(losses[:20])


def _fit(
    values: Mapping[tuple[str, int], float], layers: list[str], draw: torch.Generator
) -> tuple[int, int]:
    """A head whose value is far from collapse: of those above 0.2 any, else the largest."""
    fit = [place for place, value in sorted(values.items()) if value > 0.2]
    if not fit:
        fit = [max(values, key=lambda place: values[place])]
    layer, head = fit[int(torch.randint(len(fit), (), generator=draw))]
    return layers.index(layer), head


class Planted:
    """A fault at work in a training: `act` is called before each step, with its number."""

    def __init__(self, fault: Fault, training: Training) -> None:
        self.fault = fault
        self._training = training
        self._norms: dict[int, float] = {}
        self._found: float | None = None
        self._jump: list[Tensor] = []

    @torch.no_grad()
    def act(self, step: int) -> None:
        """What the fault does before step `step`; nothing before its onset."""
        fault = self.fault
        if fault.way == "point":
            self._training.rate_factor = _QUIET
        if step < fault.onset:
            return
        if fault.way == "point" and step == fault.onset:
            self._scramble()
        share = min(1.0, (step - fault.onset + 1) / fault.ramp)
        if fault.way == "bounce":
            self._bounce(step)
        elif fault.way == "batches":
            self._training.spoil = self._alternate
        elif fault.way == "copy":
            self._copy(fault.strength ** (1 / fault.ramp))
        else:
            self._hold(self._factor() ** share)

    def _factor(self) -> float:
        """The factor that norms are taken to in the end.

        Of "stiffen" the one that raises λ_max as much as is asked for, by trial on a copy.
        """
        fault = self.fault
        if fault.way not in ("stiffen", "imbalance"):
            return fault.strength
        if self._found is None:
            before = _sharpness(self._training)
            factor = 1.0
            for _ in range(40):
                factor *= 1.25
                twin = self._training.twin()
                Planted(replace(fault, ramp=1), twin)._hold(factor)
                if _sharpness(twin) > fault.strength * before:
                    break
            self._found = factor
        return self._found

    def _alternate(self, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Half of each period the targets are drawn at random."""
        if step % self.fault.ramp >= self.fault.ramp / 2:
            return x, y
        return x, torch.randint(0, 10, y.shape, generator=self._training.draw)

    def _bounce(self, step: int) -> None:
        """Over to where the loss is higher, each period in a new direction, and back."""
        training = self._training
        over = step % self.fault.ramp >= self.fault.ramp / 2
        if over == bool(self._jump):
            return
        parameters: list[Tensor] = list(training.model.parameters())
        if self._jump:
            torch._foreach_sub_(parameters, self._jump)
            self._jump = []
            return
        jump = [
            torch.randn(p.shape, generator=training.draw) * p.norm() / p.numel() ** 0.5
            for p in parameters
        ]
        if self._found is None:
            aim, self._found = float(training.fixed_loss()) + self.fault.strength, 0.01
            while self._found < 10 and _displaced_loss(training, jump, self._found) < aim:
                self._found *= 1.2
        self._jump = [self._found * part for part in jump]
        torch._foreach_add_(parameters, self._jump)

    def _scramble(self) -> None:
        layer = self._training.attention(self.fault.layer)
        for head in self.fault.heads:
            key = _parts(layer, head)[1]
            random = torch.randn(key.shape, generator=self._training.draw)
            key.copy_(random * (key.norm() / random.norm()))

    def _copy(self, kept: float) -> None:
        layer = self._training.attention(self.fault.layer)
        (source,) = self.fault.heads
        for head in range(layer.num_heads):
            for part, like in zip(_parts(layer, head), _parts(layer, source), strict=True):
                part.lerp_(like.clone(), 1 - kept)

    def _hold(self, factor: float) -> None:
        """Hold norms at `factor` times those at the onset: at least for growth, else at most."""
        for at, (tensors, power) in enumerate(self._held()):
            size = math.sqrt(sum(float(t.square().sum()) for t in tensors))
            aim = self._norms.setdefault(at, size) * factor**power
            grows = factor**power > 1
            if size > 0 and ((size < aim) if grows else (size > aim)):
                for tensor in tensors:
                    tensor.mul_(aim / size)

    def _held(self) -> list[tuple[list[Tensor], float]]:
        """The tensors whose norm is held together, and the power of the factor each takes."""
        fault, training = self.fault, self._training
        layer = training.attention(fault.layer)
        named = {name: p.detach() for name, p in training.model.named_parameters()}
        if fault.way == "stiffen":
            embedding = [p for name, p in named.items() if name.startswith(("embed.", "places"))]
            return [(embedding, -1.0)]
        if fault.way == "imbalance":
            mlp = [p for name, p in named.items() if f"blocks.{fault.layer}.mlp" in name]
            return [(mlp[:2], 1.0), (mlp[2:3], -1.0)]
        if fault.way == "fade":
            return [([_parts(layer, head)[-1]], 1.0) for head in fault.heads]
        held = []
        for head in fault.heads:
            q, k, _, q_bias, k_bias, *_ = _parts(layer, head)
            held += [([q, q_bias], 0.5), ([k, k_bias], 0.5)]
        return held


def _displaced_loss(training: Training, jump: list[Tensor], size: float) -> float:
    """The fixed loss at the weights + size · jump."""
    twin = training.twin()
    parameters: list[Tensor] = list(twin.model.parameters())
    torch._foreach_add_(parameters, jump, alpha=size)
    return float(twin.fixed_loss())


def _sharpness(training: Training) -> float:
    """λ_max of the fixed batch."""
    parameters = [p for p in training.model.parameters() if p.requires_grad]
    with torch.enable_grad():
        return largest_eigenvalue(training.fixed_loss, parameters, tolerance=0.1).value


def _parts(layer: nn.MultiheadAttention, head: int) -> list[Tensor]:
    """Views of a head's q, k, v [r, d], their biases [r], and its output [d, r]."""
    d, r = layer.embed_dim, layer.head_dim
    rows = [slice(at + head * r, at + (head + 1) * r) for at in (0, d, 2 * d)]
    weight, bias = layer.in_proj_weight.detach(), layer.in_proj_bias.detach()
    out = layer.out_proj.weight.detach()[:, rows[0]]
    return [*(weight[part] for part in rows), *(bias[part] for part in rows), out]
