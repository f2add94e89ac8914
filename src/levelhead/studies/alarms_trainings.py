"""Small trainings for the harness of the alarms: tasks made on the spot, tiny transformers.

Axes. b sequences of T tokens, width d; targets are classes. Every attention layer is an
`nn.MultiheadAttention`, whose packed weights hold q, k, v in rows [3d, d], head after head.

Two examples. "copy" asks for the tokens in another, fixed order: attention becomes sharp, and is
healthy. "toy" is a linear forecast with one head over channels, where sharp attention is a trap.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from levelhead.training.sam import SAM

__all__ = ["NULL", "TASKS", "Recipe", "Training", "null_recipe", "planted_recipe"]

TASKS = ("copy", "sort", "recall", "digits")
_TOKENS, _CLASSES = 10, 12
_CHANNELS, _CONTEXT, _HORIZON = 5, 24, 12
# Of the digits, so many are kept for validation.
_HELD = 297


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A healthy training.

    noise: share of labels that are drawn at random (1: nothing can be learnt); warmup: steps;
    cosine: steps of a cosine schedule, 0 for none; clip: largest norm of the gradient, 0 for none;
    validate: steps between evaluations on held-out data, 0 for none.
    """

    task: str
    layers: int = 2
    heads: int = 4
    width: int = 32
    batch: int = 16
    optimiser: str = "adam"
    rate: float = 2e-3
    decay: float = 0.0
    dropout: float = 0.0
    noise: float = 0.0
    warmup: int = 0
    cosine: int = 0
    clip: float = 0.0
    validate: int = 0


# What is special about each kind of null run; rates and sizes are drawn beside it.
NULL: dict[str, Recipe] = {
    "copy": Recipe(task="copy", layers=1),
    "sort": Recipe(task="sort", layers=1, validate=100),
    "recall": Recipe(task="recall", layers=1, warmup=200),
    "digits": Recipe(
        task="digits", layers=1, dropout=0.1, decay=0.01, optimiser="adamw", validate=100
    ),
    "toy-sam": Recipe(task="toy", layers=1, heads=1, optimiser="sam", batch=32, rate=1e-3),
    "label-noise": Recipe(task="digits", layers=1, noise=0.3, validate=100),
    "small-batches": Recipe(task="copy", layers=1, batch=4, rate=1e-3, clip=1.0),
    "plateau": Recipe(task="copy", noise=1.0),
    "warm-up": Recipe(task="sort", layers=1, rate=5e-3, warmup=400, cosine=3000, clip=1.0),
    "decay": Recipe(task="recall", layers=1, decay=0.1, optimiser="adamw", rate=3e-3),
    "momentum": Recipe(task="digits", layers=1, optimiser="sgd", rate=0.01, dropout=0.1, clip=1.0),
    "sharp": Recipe(task="copy", layers=1, heads=2, rate=5e-3),
}


def null_recipe(kind: str, seed: int) -> Recipe:
    """The recipe of one null run: that of its kind, with its rate within a factor of 2."""
    recipe = NULL[kind]
    draw = torch.Generator().manual_seed(1_000_003 + 97 * seed + 13 * sorted(NULL).index(kind))
    factor = 2.0 ** float(torch.rand((), generator=draw) * 2 - 1)
    return replace(recipe, rate=recipe.rate * factor)


def planted_recipe(seed: int) -> Recipe:
    """The recipe of the healthy part of a planted run, drawn from its seed."""
    draw = torch.Generator().manual_seed(2_000_003 + 97 * seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    optimiser = one_of("adam", "adamw", "sgd")
    rate = 2.0 ** float(torch.rand((), generator=draw) * 2 - 1)
    return Recipe(
        task=TASKS[seed % len(TASKS)],
        layers=one_of(1, 1, 1, 2),
        heads=one_of(2, 4),
        optimiser=optimiser,
        rate=rate * (0.03 if optimiser == "sgd" else 2e-3),
        decay=0.01 if optimiser == "adamw" else 0.0,
        dropout=one_of(0.0, 0.1),
        noise=one_of(0.0, 0.1),
        warmup=one_of(0, 50),
    )


# ── data ──


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """All digits as 8 patches of 2 × 4 points [1797, 8, 8], and their classes."""
    found = load_digits()
    images = torch.as_tensor(found.images, dtype=torch.float32).div(8).sub(1)
    patches = images.reshape(-1, 4, 2, 2, 4).transpose(2, 3)
    return patches.reshape(-1, 8, 8), torch.as_tensor(found.target)


@dataclass(frozen=True, eq=False)
class _Task:
    """Batches of one task; `order` and `truth` are its fixed parts, drawn from the seed."""

    recipe: Recipe
    order: Tensor
    truth: Tensor

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one step."""
        return self._noisy(self._clean(draw, self.recipe.batch, held=False), draw)

    def large(self, draw: torch.Generator, held: bool = False) -> tuple[Tensor, Tensor]:
        """64 examples, for what is measured; `held`: clean ones, and digits never trained on."""
        clean = self._clean(draw, 64, held)
        return clean if held else self._noisy(clean, draw)

    def _noisy(self, clean: tuple[Tensor, Tensor], draw: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = clean
        if self.recipe.noise:
            wrong = torch.rand(y.shape, generator=draw) < self.recipe.noise
            y = torch.where(wrong, torch.randint(0, 10, y.shape, generator=draw), y)
        return x, y

    def _clean(self, draw: torch.Generator, b: int, held: bool) -> tuple[Tensor, Tensor]:
        task = self.recipe.task
        if task == "digits":
            images, classes = _digits()
            first, count = (0, _HELD) if held else (_HELD, len(images) - _HELD)
            chosen = first + torch.randint(0, count, (b,), generator=draw)
            return images[chosen], classes[chosen]
        if task == "toy":
            x = torch.randn(b, _CHANNELS, _CONTEXT, generator=draw)
            noise = torch.randn(b, _CHANNELS, _HORIZON, generator=draw)
            return x, x @ self.truth + noise
        if task == "recall":
            keys = torch.rand(b, _TOKENS, generator=draw).argsort(1)[:, : _TOKENS - 2]
            values = torch.randint(0, _TOKENS, keys.shape, generator=draw)
            asked = torch.randint(0, keys.shape[1], (b, 1), generator=draw)
            query = _TOKENS**2 + keys.gather(1, asked)
            return torch.cat([keys * _TOKENS + values, query], 1), values.gather(1, asked)[:, 0]
        x = torch.randint(0, _TOKENS, (b, len(self.order)), generator=draw)
        return x, x.sort(1).values if task == "sort" else x[:, self.order]


# ── networks ──


class _Block(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        d = recipe.width
        self.before = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(
            d, recipe.heads, dropout=recipe.dropout, batch_first=True
        )
        self.between = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0]
        out: Tensor = x + self.mlp(self.between(x))
        return out


class _Transformer(nn.Module):
    """Tokens [b, T] or patches [b, T, 8] → logits of classes, [b, C] or [b, T, C]."""

    def __init__(self, recipe: Recipe, tokens: int) -> None:
        super().__init__()
        d = recipe.width
        self.task = recipe.task
        self.embed: nn.Module = nn.Embedding(_TOKENS**2 + _TOKENS, d)
        if recipe.task == "digits":
            self.embed = nn.Linear(8, d)
        self.places = nn.Parameter(torch.randn(tokens, d) * 0.5)
        self.blocks = nn.ModuleList(_Block(recipe) for _ in range(recipe.layers))
        self.last = nn.LayerNorm(d)
        self.readout = nn.Linear(d, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.places
        for block in self.blocks:
            h = block(h)
        if self.task == "digits":
            h = h.mean(1)
        elif self.task == "recall":
            h = h[:, -1]
        out: Tensor = self.readout(self.last(h))
        return out


class _Toy(nn.Module):
    """(x + attention over channels) W for windows [b, D, L]: [b, D, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_CONTEXT, 1, bias=False, batch_first=True)
        self.readout = nn.Linear(_CONTEXT, _HORIZON, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.readout(x + self.attention(x, x, x, need_weights=False)[0])
        return out


# ── training ──


class Training:
    """A training that goes on step by step: `model`, `optimizer`, `steps` made so far.

    `rate_factor` multiplies the rate of the recipe, and `spoil` changes a batch before it is used;
    a fault may set them. Everything is drawn from the seed; dropout takes torch's own generator.
    """

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        draw = torch.Generator().manual_seed(31 * seed + 7)
        tokens = _TOKENS - 1 if recipe.task == "recall" else 8
        order = torch.randperm(tokens, generator=draw)
        truth = torch.randn(_CONTEXT, _HORIZON, generator=draw)
        self._task = _Task(recipe, order, truth)
        self.draw = torch.Generator().manual_seed(31 * seed + 8)
        self.model: nn.Module = _Toy() if recipe.task == "toy" else _Transformer(recipe, tokens)
        self.optimizer = self._optimizer()
        self.steps = 0
        self.rate_factor = 1.0
        self.spoil: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
        self._fixed = self._task.large(torch.Generator().manual_seed(31 * seed + 9))
        self._held = self._task.large(torch.Generator().manual_seed(31 * seed + 10), held=True)

    def twin(self) -> Training:
        """A copy that goes on by itself as this one would."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other.optimizer = other._optimizer()
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        other.draw = torch.Generator()
        other.draw.set_state(self.draw.get_state())
        return other

    def attention(self, layer: int) -> nn.MultiheadAttention:
        """The attention of a layer."""
        found = [m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)]
        return found[layer]

    def step(self, hand_over: Callable[[Tensor], object]) -> None:
        """One step; `hand_over` is given the loss before the optimiser moves."""
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate * self._schedule() * self.rate_factor
        x, y = self._task.batch(self.draw)
        if self.spoil is not None:
            x, y = self.spoil(x, y, self.steps)
        if isinstance(self.optimizer, SAM):
            self.optimizer.step(self._closure(x, y, hand_over))
            return
        loss = self._backward(x, y)
        if self.recipe.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        hand_over(loss)
        self.optimizer.step()

    def fixed_loss(self) -> Tensor:
        """The loss of one batch that never changes, without dropout."""
        return self._quietly(*self._fixed)

    @torch.no_grad()
    def validation_loss(self) -> Tensor:
        """The loss of data that training does not see."""
        return self._quietly(*self._held)

    def _quietly(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.eval()
        try:
            return self._loss(x, y)
        finally:
            self.model.train()

    def _closure(
        self, x: Tensor, y: Tensor, hand_over: Callable[[Tensor], object]
    ) -> Callable[[], Tensor]:
        """Of the two losses that SAM asks for, the first is the one at the weights themselves."""
        asked = False

        def closure() -> Tensor:
            nonlocal asked
            loss = self._backward(x, y)
            if not asked:
                hand_over(loss)
            asked = True
            return loss

        return closure

    def _backward(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self._loss(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        if self.recipe.task == "toy":
            error: Tensor = (out - y).square().mean()
            return error
        return F.cross_entropy(out.flatten(0, -2), y.flatten())

    def _schedule(self) -> float:
        recipe = self.recipe
        up = min(1.0, self.steps / recipe.warmup) if recipe.warmup else 1.0
        if not recipe.cosine:
            return up
        done = min(1.0, self.steps / recipe.cosine)
        return up * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    def _optimizer(self) -> Any:
        recipe = self.recipe
        parameters = self.model.parameters()
        if recipe.optimiser == "sgd":
            return torch.optim.SGD(parameters, lr=recipe.rate, momentum=0.9)
        if recipe.optimiser == "sam":
            return SAM(parameters, torch.optim.Adam, rho=0.3, lr=recipe.rate)
        kind = torch.optim.AdamW if recipe.optimiser == "adamw" else torch.optim.Adam
        return kind(parameters, lr=recipe.rate, weight_decay=recipe.decay, fused=True)
