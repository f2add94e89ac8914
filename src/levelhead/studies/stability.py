"""`stability`: which candidate invariants stay when nothing but the basis changes.

Weights of a small attention layer, as drawn and as trained, are moved in three ways:

adjusted   inputs turned, scaled or mapped by any matrix, with the weights adjusted so that the
           layer computes the same; gauges of each head; permutations of heads. What the catalogue
           declares must hold; what it does not declare is measured.
retrained  the data are moved and the layer is trained again, from a start moved along.
restarted  the layer is trained again from another gauge of the same start: the same function at
           the first step, but not the same training.

Changes are relative to a quantity's own size, in one way everywhere (`studies.stability_change`);
the spread between seeds is what they are held against.
Axes: tokens X [N, n, d], weights in row layout (`weights.attention_view`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from levelhead.base.records import Reading
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Invariant
from levelhead.invariants.symmetry import relative_change, verify
from levelhead.studies.stability_change import change
from levelhead.studies.stability_conclusions import MODELS, MOVES, conclude
from levelhead.studies.study import (
    Cell,
    Findings,
    Outcome,
    Study,
    StudySettings,
    Workspace,
    grid,
)
from levelhead.weights.attention_view import AttentionView

__all__ = ["STUDY", "StabilitySettings"]

_SCALE = 2.0


class StabilitySettings(StudySettings):
    """Settings of the stability study.

    Attributes:
        heads, head_width, width, tokens: sizes h, d_k, d and n of the layer.
        examples, steps, rate, adam_rate: of the training (whole batch, float64).
        draws: random elements of each kind of move.
        condition: of the random matrices of affine moves and gauges.
    """

    seeds: int = Field(default=5, ge=2)
    heads: int = Field(default=4, ge=2)
    head_width: int = Field(default=4, ge=1)
    width: int = Field(default=16, ge=2)
    tokens: int = Field(default=8, ge=2)
    examples: int = Field(default=256, ge=8)
    steps: int = Field(default=400, ge=1)
    rate: float = Field(default=0.05, gt=0)
    adam_rate: float = Field(default=3e-3, gt=0)
    draws: int = Field(default=3, ge=1)
    condition: float = Field(default=5.0, ge=1)


Weights = dict[str, Tensor]


def _cells(settings: StabilitySettings) -> list[Cell]:
    seeds = range(settings.seeds)
    cells = grid(kind=["adjusted"], model=MODELS, seed=seeds)
    return cells + grid(kind=["retrained"], optimiser=["sgd", "adam"], seed=seeds)


def _run(settings: StabilitySettings, cell: Cell, workspace: Workspace) -> Outcome:
    seed = int(cell.given["seed"])
    if cell.given["kind"] == "adjusted":
        return Outcome(_adjusted(settings, str(cell.given["model"]), seed))
    began = time.perf_counter()
    readings = _retrained(settings, str(cell.given["optimiser"]), seed)
    return Outcome(readings, seconds={"trainings": time.perf_counter() - began})


# ── the layer and its training ──


def _draw(seed: int, *key: int) -> torch.Generator:
    state = seed
    for number in key:
        state = state * 1_009 + number + 1
    return torch.Generator().manual_seed(state)


def _start(settings: StabilitySettings, seed: int) -> Weights:
    """q, k, v [h, r, d], o [h, d, r] and a readout [d, d], each with rows of length about one."""
    draw = _draw(seed, 1)
    h, r, d = settings.heads, settings.head_width, settings.width
    shapes = {"q": (h, r, d), "k": (h, r, d), "v": (h, r, d), "o": (h, d, r), "out": (d, d)}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }


def _layer(weights: Weights, x: Tensor) -> Tensor:
    """(x + Σ_i A_i x v_iᵀ o_iᵀ) out: [N, n, d]."""
    q, k, v = (torch.einsum("hrd,bnd->bhnr", weights[name], x) for name in ("q", "k", "v"))
    maps = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
    written = torch.einsum("bhnr,hdr->bnd", maps @ v, weights["o"])
    return (x + written) @ weights["out"]


def _data(settings: StabilitySettings, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and what another layer, with noise, makes of them."""
    draw = _draw(seed, 2)
    shape = (settings.examples, settings.tokens, settings.width)
    x = torch.randn(shape, generator=draw, dtype=torch.float64)
    teacher = {n: 1.5 * w for n, w in _start(settings, 10_007 + seed).items()}
    y = _layer(teacher, x)
    return x, y + 0.1 * torch.randn(y.shape, generator=draw, dtype=torch.float64)


def _train(settings: StabilitySettings, start: Weights, x: Tensor, y: Tensor, kind: str) -> Weights:
    """The weights after `steps` steps on the whole batch."""
    weights = {n: w.clone().requires_grad_() for n, w in start.items()}
    optimiser: torch.optim.Optimizer
    if kind == "sgd":
        optimiser = torch.optim.SGD(weights.values(), lr=settings.rate)
    else:
        optimiser = torch.optim.Adam(weights.values(), lr=settings.adam_rate)
    for _ in range(settings.steps):
        optimiser.zero_grad()
        loss = (_layer(weights, x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return {n: w.detach() for n, w in weights.items()}


def _view(weights: Weights) -> AttentionView:
    return AttentionView(q=weights["q"], k=weights["k"], v=weights["v"], o=weights["o"])


# ── moves ──


def _moved(
    settings: StabilitySettings, weights: Weights, kind: str, draw: torch.Generator
) -> tuple[Weights, Tensor]:
    """Weights that compute the same on x Lᵀ as `weights` on x, and L [d, d]."""
    h, d = settings.heads, settings.width
    eye = torch.eye(d, dtype=torch.float64)
    if kind == "permutation":
        order = torch.randperm(h, generator=draw)
        return {n: w if n == "out" else w[order] for n, w in weights.items()}, eye
    if kind == "gauge":
        out = dict(weights)
        for left, right, back in (("q", "k", False), ("v", "o", True)):
            g = torch.stack(
                [_matrix(settings.head_width, settings.condition, draw) for _ in range(h)]
            )
            inverse = torch.linalg.inv(g)
            out[left] = g @ weights[left]
            out[right] = weights[right] @ inverse if back else inverse.mT @ weights[right]
        return out, eye
    if kind == "orthogonal":
        turn = torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64)).Q
    elif kind == "scaling":
        turn = _SCALE * eye
    else:
        turn = _matrix(d, settings.condition, draw)
    inverse = torch.linalg.inv(turn)
    moved = {n: weights[n] @ inverse for n in ("q", "k", "v")}
    moved["o"] = turn @ weights["o"]
    moved["out"] = inverse.mT @ weights["out"]
    return moved, turn


def _matrix(size: int, condition: float, draw: torch.Generator) -> Tensor:
    """A random matrix with that condition number."""
    u, v = (
        torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64)).Q
        for _ in range(2)
    )
    sizes = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
    made: Tensor = u * (sizes / sizes.log().mean().exp()) @ v
    return made


# ── what is looked at ──


def _entries(view: AttentionView) -> Iterator[Invariant]:
    """Entries of the catalogue that are functions of weights alone, without fits."""
    for entry in catalogue().values():
        if entry.kind in ("exact", "integer") and entry.applies(view) is None:
            yield entry


def _values(view: AttentionView) -> dict[str, Tensor]:
    """Values by entry; of those that run over heads, sorted, for heads have no order here."""
    found = {}
    with torch.no_grad():
        for entry in _entries(view):
            found[entry.name] = _unordered(entry, entry(view))
    return found


def _unordered(entry: Invariant, value: Tensor) -> Tensor:
    if not entry.per or value.is_complex():
        return value
    if len(entry.per) == 2:  # over pairs of heads: all numbers, sorted
        return value.flatten().sort().values
    rows = value.reshape(value.shape[0], -1)
    return rows.sort(dim=0).values


def _adjusted(settings: StabilitySettings, model: str, seed: int) -> list[Reading]:
    weights = _model(settings, model, seed)
    x, _ = _data(settings, seed)
    view = _view(weights)
    before = _values(view)
    entries = {entry.name: entry for entry in _entries(view)}
    readings = []
    plain = _layer(weights, x)
    for place, kind in enumerate(MOVES):
        changes: dict[str, float] = {}
        gap = 0.0
        for number in range(settings.draws):
            moved, turn = _moved(settings, weights, kind, _draw(seed, 3, place, number))
            same = _layer(moved, x @ turn.mT)
            gap = max(gap, relative_change(plain, same))
            after = _values(_view(moved))
            for name, entry in entries.items():
                moved_by = change(entry, before[name], after[name])
                if moved_by is not None:
                    changes[name] = max(changes.get(name, 0.0), moved_by)
        where: dict[str, str | int] = {"model": model, "move": kind, "seed": seed}
        readings.append(Reading("function", gap, where=where, source="stability"))
        readings += [
            Reading("moved", v, where={**where, "entry": n}, source="stability")
            for n, v in changes.items()
        ]
    return readings + _declarations(settings, view, list(entries.values()), model, seed)


def _declarations(
    settings: StabilitySettings,
    view: AttentionView,
    entries: Sequence[Invariant],
    model: str,
    seed: int,
) -> list[Reading]:
    """How many declarations of the catalogue were held against this layer, and how many failed."""
    found = verify(view, entries, draws=settings.draws, seed=seed, condition=settings.condition)
    where: dict[str, str | int] = {"model": model, "seed": seed}
    return [
        Reading("declarations", float(len(found.checks)), where=where, source="stability"),
        Reading("wrong", float(len(found.failures)), where=where, source="stability"),
    ]


def _model(settings: StabilitySettings, model: str, seed: int) -> Weights:
    start = _start(settings, seed)
    if model == "random":
        return start
    x, y = _data(settings, seed)
    trained = _train(settings, start, x, y, "adam")
    if model == "trained":
        return trained
    draw = _draw(seed, 4)
    return {
        n: w if n == "out" else w[:1] + 0.01 * torch.randn(w.shape, generator=draw, dtype=w.dtype)
        for n, w in trained.items()
    }


def _retrained(settings: StabilitySettings, kind: str, seed: int) -> list[Reading]:
    """Values after training, and after training on moved data from a start moved along."""
    start = _start(settings, seed)
    x, y = _data(settings, seed)
    entries = catalogue()
    base = _values(_view(_train(settings, start, x, y, kind)))
    where: dict[str, str | int] = {"optimiser": kind, "seed": seed}
    readings = [
        Reading(
            "value", float(value.double().mean()), where={**where, "entry": n}, source="stability"
        )
        for n, value in base.items()
        if not value.is_complex()
    ]
    for place, move in enumerate(MOVES):
        moved, turn = _moved(settings, start, move, _draw(seed, 5, place))
        after = _values(_view(_train(settings, moved, x @ turn.mT, y, kind)))
        for name, value in base.items():
            moved_by = change(entries[name], value, after[name])
            if moved_by is not None:
                place_of = {**where, "move": move, "entry": name}
                readings.append(
                    Reading("moved-again", moved_by, where=place_of, source="stability")
                )
    return readings


# ── what follows ──


def _conclude(settings: StabilitySettings, outcomes: Mapping[str, Outcome]) -> Findings:
    return conclude(outcomes, _view(_start(settings, 0)))


def _limits(settings: StabilitySettings) -> list[str]:
    return [
        "Left out: quantities that are iterative fits (CP) or need data, and layers with "
        "positions, norms or biases, which `levelhead invariants --verify` holds against their "
        "own groups.",
    ]


STUDY = Study(
    name="stability",
    title="Which invariants are invariant",
    question=(
        "Which candidate quantities stay when inputs are turned, scaled or mapped, when heads "
        "change their inner basis or their order, and when the layer is trained again?"
    ),
    settings=StabilitySettings,
    presets={
        "quick": {"seeds": 2, "steps": 40, "examples": 64, "draws": 1},
        "full": {"seeds": 20, "width": 32, "head_width": 8, "steps": 2000},
    },
    cells=_cells,
    run=_run,
    conclude=_conclude,
    limits=_limits,
)
