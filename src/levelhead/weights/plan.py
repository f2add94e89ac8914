"""A row of the table of layouts: where a family's layers lie and what they are.

A plan finds layers by the name of one parameter (its store's anchor below one of its module
templates; see `layer`), cuts their weights into heads, and says what else the layer is through
small functions of `facts` and `rope`. It serves names in memory and names in files alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from levelhead.base.errors import InputError
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.doubts import caveats, note_other_model, unmodelled
from levelhead.weights.facts import full, no_norm, no_position, scale_by_d_k
from levelhead.weights.layer import GetTensor, Layer, Shapes, Sizes
from levelhead.weights.settings import Settings
from levelhead.weights.stores import Clues, Store
from levelhead.weights.structure import InputNorm, Latent, Mask, Position, QKNorm

__all__ = ["LayerPlan", "Plan", "kv_setting", "no_kv_groups"]


def kv_setting(layer: Layer) -> int | None:
    """The number of key/value groups that settings give."""
    found = layer.settings.whole("kv_heads")
    return None if found is None else found[0]


def no_kv_groups(layer: Layer) -> int | None:
    """Nothing: the family has no groups, whatever a config may say."""
    return None


def _no_qk_norm(layer: Layer, sizes: Sizes) -> QKNorm | None:
    layer.family_says("qk_norm", "none")
    return None


def _no_cap(layer: Layer) -> float | None:
    layer.family_says("soft_cap", "none")
    return None


def _nothing(layer: Layer) -> str | None:
    return None


def _no_latent(layer: Layer, sizes: Sizes) -> Latent | None:
    return None


# Buffers that are recomputed or masks: rotary tables, GPT-2's triangle.
_OTHERS = r"(.*\.)?(rotary_emb\w*\..*|inv_freq|masked_bias|bias|num_batches_tracked)"


@dataclass(frozen=True)
class Plan:
    """How the attention layers of one family are read.

    Args:
        family: the plan's name.
        modules: templates of the attention module's path; "" is any path.
        store: how q, k, v and o are stored.
        model_types: the config's `model_type`s that mean this plan.
        requires, forbids: parameters (or their templates) that tell it from others with the same
            names where no config does.
        clues: parameters whose shape gives the number or width of heads without a config.
        kv_heads: the number of key/value groups.
        position, mask, scale, soft_cap, qk_norm, input_norm, latent: the fields of the view.
        cross: whether keys and values come from another sequence.
        tied: whether keys are queries, by the parameters that are there.
        settings: what the layout itself says of heads, theta and the like, before any config.
        others: regular expression of parameters below the module that are no part of attention.
        by_name: whether names alone may choose this row, without a config that says so.
        refuse: a reason not to read a layer that was found.
    """

    family: str
    modules: tuple[str, ...]
    store: Store
    model_types: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    clues: Clues = ()
    kv_heads: Callable[[Layer], int | None] = kv_setting
    position: Callable[[Layer, Sizes], Position] = no_position
    mask: Callable[[Layer], Mask] = full
    scale: Callable[[Layer, Sizes], float] = scale_by_d_k
    soft_cap: Callable[[Layer], float | None] = _no_cap
    qk_norm: Callable[[Layer, Sizes], QKNorm | None] = _no_qk_norm
    input_norm: Callable[[Layer], InputNorm] = no_norm
    latent: Callable[[Layer, Sizes], Latent | None] = _no_latent
    cross: bool = False
    tied: Callable[[Layer], bool] = lambda layer: False
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: str = _OTHERS
    by_name: bool = True
    refuse: Callable[[Layer], str | None] = _nothing

    def suits(self, layer: Layer) -> bool:
        """Whether the parameters that tell this family from its likes are there."""
        if not self.by_name:
            return False
        return all(map(layer.has, self.requires)) and not any(map(layer.has, self.forbids))


@dataclass(frozen=True)
class LayerPlan:
    """One layer that was found: `apply` reads its tensors, and only those.

    `name` is the attention module's path; `number` its place in its stack; `known` whether the
    family follows from the config and not from names alone; `asked` whether the user chose the
    row; `reads` the parameters that it reads; `caveats` what to know of how it is read;
    `unmodelled` a setting that its row does not read and that changes attention, in words.
    Raises InputError where shapes, settings and the plan do not fit together.
    """

    plan: Plan
    name: str
    matched: Mapping[str, str]
    shapes: Shapes
    settings: Settings
    known: bool
    asked: bool = False
    sizes: Sizes = field(init=False)
    reads: tuple[str, ...] = field(init=False)
    caveats: tuple[str, ...] = field(init=False)
    unmodelled: str | None = field(init=False)

    def __post_init__(self) -> None:
        # A rehearsal on tensors without values finds what does not fit before anything is read.
        layer = self._layer(lambda name: torch.empty(self.shapes[name], device="meta"))
        try:
            view = self._view(layer)
        except InputError:
            raise
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise InputError(
                f"{self.name}: its settings make no sense for these weights ({said}): check "
                f"{self.settings.where}"
            ) from error
        sizes = Sizes(view.heads, view.groups, view.d_k, view.d_v)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "reads", tuple(dict.fromkeys(layer.read_names)))
        object.__setattr__(self, "caveats", caveats(view))
        doubted = not (self.known or self.asked)
        object.__setattr__(self, "unmodelled", unmodelled(layer, view) if doubted else None)

    @property
    def family(self) -> str:
        """The plan's name."""
        return self.plan.family

    @property
    def number(self) -> int:
        """The layer's number in its stack."""
        return self._layer().number

    def _layer(self, get: GetTensor | None = None) -> Layer:
        return Layer(
            self.name, self.matched, self.shapes, self.settings, self.family, self.known, get
        )

    def apply(self, get: GetTensor) -> AttentionView:
        """Read the layer through `get` (name → tensor) and describe it.

        Raises InputError for a tensor that is not what was announced; whatever `get` raises passes
        through.
        """
        return self._view(self._layer(get))

    @property
    def unread(self) -> tuple[str, ...]:
        """Parameters below the module that the plan neither reads nor knows to be no part of it."""
        if not self.name:
            return ()
        below, others = f"{self.name}.", re.compile(self.plan.others)
        mine = (n for n in self.shapes if n.startswith(below) and n not in self.reads)
        return tuple(n for n in mine if not others.fullmatch(n.removeprefix(below)))

    def _view(self, layer: Layer) -> AttentionView:
        plan = self.plan
        sizes = plan.store.sizes(layer, plan.kv_heads(layer), plan.clues)
        values: dict[str, Any] = dict(plan.store.slices(layer, sizes))
        # The identity that stands for a missing output projection is made on the CPU.
        values["o"] = values["o"].to(values["q"].device)
        values["scale"] = plan.scale(layer, sizes)
        values["soft_cap"] = plan.soft_cap(layer)
        values["position"] = plan.position(layer, sizes)
        values["mask"] = plan.mask(layer)
        values["qk_norm"] = plan.qk_norm(layer, sizes)
        values["input_norm"] = plan.input_norm(layer)
        values["latent"] = plan.latent(layer, sizes)
        for name in ("k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"):
            if values.get(name) is not None and name not in layer.origins:
                layer.note(name, "read", "stored weights")
        for name in ("cross", "weighting"):
            layer.family_says(name)
        if not self.asked:
            note_other_model(layer)
        if sizes.groups < 1 or sizes.heads % sizes.groups:
            raise InputError(
                f"{self.name}: {sizes.heads} heads cannot share {sizes.groups} key/value groups"
            )
        return AttentionView(
            **values,
            cross=plan.cross,
            tied=plan.tied(layer),
            name=self.name or plan.family,
            family=plan.family,
            origins=layer.origins,
        )
