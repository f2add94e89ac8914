"""The table of layouts: from names and shapes to the AttentionView of every layer.

The table is the same for files, `state_dict`s and `dict(model.named_parameters())`. Finding is
separate from reading: `find_layers` looks at names, shapes and settings only, and each `LayerPlan`
then reads the tensors of its one layer.

    source → names and shapes → find_layers → LayerPlan.apply → AttentionView
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import Weights, open_weights
from levelhead.weights.layer import Layer, Shapes, template_pattern
from levelhead.weights.own_layout import own_plan, read_layout
from levelhead.weights.plan import LayerPlan, Plan
from levelhead.weights.plans_decoders import DECODERS
from levelhead.weights.plans_encoders import ENCODERS
from levelhead.weights.plans_generic import GENERIC
from levelhead.weights.plans_vision import VISION
from levelhead.weights.settings import Settings

__all__ = [
    "TABLE",
    "LayerPlan",
    "Match",
    "NothingMatched",
    "Skip",
    "find_layers",
    "match",
    "views",
]

# Where the config is silent the first row that suits counts, so the particular stand first.
TABLE: tuple[Plan, ...] = (*GENERIC, *ENCODERS, *VISION, *DECODERS)

# Names of weights that look like a query projection, for the report of what was not understood.
_LOOKS_LIKE_ATTENTION = re.compile(
    r"(^|[._])(query|qkv|q|wq|q_proj|to_q|to_qkv|in_proj|c_attn|Wqkv|q_lin|query_key_value)"
    r"([._](weight|kernel|qweight|weight_packed)|_weight|$)"
)
_SHOWN = 12

Layout = str | Path | Mapping[str, Any] | Plan


class NothingMatched(InputError):
    """No attention layer was found; says which names were seen."""

    exit_code = 3


@dataclass(frozen=True)
class Skip:
    """Something that looks like attention but was not read, and why, in one clause.

    `by_settings`: the names are understood, but shapes and settings do not fit together.
    """

    name: str
    reason: str
    by_settings: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Match:
    """What a source holds: the layers that can be read, and what was skipped."""

    where: str
    format: str
    model_type: str | None
    plans: tuple[LayerPlan, ...]
    skipped: tuple[Skip, ...]
    names: int

    @property
    def families(self) -> tuple[str, ...]:
        """The plans that matched, in order of appearance."""
        return tuple(dict.fromkeys(plan.family for plan in self.plans))


def find_layers(
    shapes: Shapes,
    config: Mapping[str, Any] | Settings | None = None,
    *,
    layout: Layout | None = None,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[list[LayerPlan], list[Skip]]:
    """Plans of all attention layers among `shapes` (name → shape), and what was skipped.

    Args:
        config: the model's settings, as in a transformers config.json.
        layout: a family of the table, a `Plan`, a mapping of keywords or a TOML file
            (see `own_layout`); by default every row of the table is tried.
        attributes: settings of single modules (path → name → value), as a live module has them.

    Raises InputError for an unknown layout.

    >>> shapes = {f"encoder.layer.0.attention.self.{n}.weight": (8, 8)
    ...           for n in ("query", "key", "value")}
    >>> shapes["encoder.layer.0.attention.output.dense.weight"] = (8, 8)
    >>> plans, skipped = find_layers(shapes, {"num_attention_heads": 2})
    >>> [(p.name, p.family, p.sizes.heads) for p in plans], skipped
    ([('encoder.layer.0.attention', 'bert', 2)], [])
    """
    settings = config if isinstance(config, Settings) else Settings(config)
    table = _rows(layout)
    plans: list[LayerPlan] = []
    skipped: list[Skip] = []
    for module, candidates in sorted(_candidates(shapes, table).items(), key=_natural):
        found = _choose(module, candidates, shapes, settings, attributes or {}, layout is not None)
        if isinstance(found, LayerPlan):
            plans.append(found)
        else:
            skipped.append(found)
    skipped += _not_understood(shapes, [p.name for p in plans] + [s.name for s in skipped])
    return plans, skipped


def _rows(layout: Layout | None) -> Sequence[Plan]:
    if layout is None:
        return TABLE
    if isinstance(layout, Plan):
        return (layout,)
    if isinstance(layout, Mapping):
        return (own_plan(layout),)
    named = [plan for plan in TABLE if plan.family == str(layout)]
    if named:
        return named
    if isinstance(layout, Path) or str(layout).endswith(".toml") or Path(layout).is_file():
        return (read_layout(layout),)
    families = ", ".join(sorted({plan.family for plan in TABLE}))
    raise InputError(f"layout {layout!r} is neither a TOML file nor one of {families}")


Candidates = dict[str, list[tuple[Plan, Mapping[str, str]]]]


def _candidates(shapes: Shapes, table: Sequence[Plan]) -> Candidates:
    """For each attention module every row whose anchor is there."""
    found: Candidates = {}
    for plan in table:
        anchor = plan.store.anchor
        names = [n for n in shapes if n.endswith(anchor)]
        for template in plan.modules if names else ():
            start = rf"{template_pattern(template)}\." if template else r"(?P<stem>(?:.*\.)?)"
            pattern = re.compile(start + re.escape(anchor))
            for name in names:
                if (matched := pattern.fullmatch(name)) is not None:
                    module = name[: -len(anchor)].removesuffix(".")
                    found.setdefault(module, []).append((plan, matched.groupdict()))
    return found


def _choose(
    module: str,
    candidates: list[tuple[Plan, Mapping[str, str]]],
    shapes: Shapes,
    settings: Settings,
    attributes: Mapping[str, Mapping[str, Any]],
    asked: bool,
) -> LayerPlan | Skip:
    """The row that reads a module: by model_type if the config has one, else the first to suit."""
    own = settings.part(f"{module}.").after("module attribute", attributes.get(module, {}))
    kinds = {kind for kind in (own.model_type, settings.model_type) if kind}
    reasons: list[Skip] = []
    called = module or "the whole model"
    by_type = [c for c in candidates if kinds & set(c[0].model_types)]
    for plan, matched in by_type or candidates:
        known = bool(by_type)
        said = own.after("layout", plan.settings)
        layer = Layer(module, matched, shapes, said, plan.family, known)
        if not known and not asked and not plan.suits(layer):
            continue
        reason = plan.store.complete(layer) or plan.refuse(layer)
        if reason is None:
            try:
                found = LayerPlan(plan, module, matched, shapes, said, known)
                if not found.unread:
                    return found
                reason = f"{plan.family} has no {found.unread[0]}, which may change what it does"
                reasons.insert(0, Skip(called, reason))
            except InputError as error:
                reasons.insert(0, Skip(called, str(error).removeprefix(f"{module}: "), True))
        else:
            reasons.append(Skip(called, reason))
    unknown = Skip(called, "its parameters are those of no row of the table")
    return reasons[0] if reasons else unknown


def _not_understood(shapes: Shapes, claimed: list[str]) -> list[Skip]:
    """Weights that look like queries outside every module that was found, one line a kind."""
    starts = tuple(f"{name}." for name in claimed)
    kinds: dict[str, int] = {}
    for name in shapes:
        if _LOOKS_LIKE_ATTENTION.search(name) and not name.startswith(starts or ("\0",)):
            kind = re.sub(r"\.\d+\.", ".*.", name)
            kinds[kind] = kinds.get(kind, 0) + 1
    return [
        Skip(kind, f"no row of the table knows this name ({count} found); describe it in a layout")
        for kind, count in kinds.items()
    ]


def _natural(item: tuple[str, object]) -> list[tuple[int, int, str]]:
    """Order of names: layer.10 after layer.9, decoder after encoder, cross after self."""
    name = item[0].replace("decoder", "encoder~")
    name = name.replace("encoder~_attn", "self_attn~").replace("encoder_attn", "self_attn~")
    pieces = re.split(r"(\d+)", name.replace("multihead_attn", "self_attn~"))
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in pieces]


# ── from a source ──


def match(source: object, *, layout: Layout | None = None, **arguments: Any) -> Match:
    """What `source` (a file, a folder, a mapping, a module) holds; reads no weights.

    `arguments` are settings that stand before the config's: heads, kv_heads, head_dim, theta, ….
    Raises StoredFileError for a file that cannot be read and InputError for a wrong argument.
    """
    weights = open_weights(source)
    settings = Settings(weights.config, where=weights.config_where, arguments=arguments)
    plans, skipped = find_layers(
        weights.shapes, settings, layout=layout, attributes=weights.attributes
    )
    return Match(
        weights.where,
        weights.format,
        settings.model_type,
        tuple(plans),
        tuple(skipped),
        len(weights.shapes),
    )


def views(
    source: object,
    layers: Sequence[int | str] | None = None,
    layout: Layout | None = None,
    *,
    skipped: list[Skip] | None = None,
    **arguments: Any,
) -> Iterator[AttentionView]:
    """The attention layers of `source`, one after the other; one is in memory at a time.

    Args:
        source: a checkpoint's file or folder, a mapping of names to tensors, or a module (then
            gradients flow through the views).
        layers: positions in the order of `match`, or names or patterns of names; None: all.
        layout: see `find_layers`.
        skipped: what is not read is appended here, with the reason. Layers with values that are
            not finite are left out; without `skipped` a LevelheadWarning names them.
        arguments: settings that stand before the config's: heads, kv_heads, head_dim, theta, ….

    Raises NothingMatched if no layer is found, StoredFileError for a broken file, InputError for a
    wrong argument or a config that does not fit the weights.

    >>> import torch
    >>> model = torch.nn.MultiheadAttention(8, 2)
    >>> [view] = views(model)
    >>> view
    AttentionView('torch_mha': 2 heads, 2 groups, d_k 4, d_v 4, d 8, full, position none)
    >>> view.q.requires_grad
    True
    """
    weights = open_weights(source)
    settings = Settings(weights.config, where=weights.config_where, arguments=arguments)
    plans, left = find_layers(
        weights.shapes, settings, layout=layout, attributes=weights.attributes
    )
    if not plans:
        raise _nothing(weights, left)
    chosen = plans if layers is None else _selected(plans, layers)
    report = [] if skipped is None else skipped
    report += left
    for plan in chosen:
        bad: list[str] = []
        view = plan.apply(lambda name, bad=bad: _checked(weights.get(name), name, bad))  # type: ignore[misc]
        if bad:
            skip = Skip(plan.name, f"{bad[0]} holds values that are not finite")
            report.append(skip)
            if skipped is None:
                warnings.warn(f"{skip}; the layer is left out", LevelheadWarning, stacklevel=2)
            continue
        yield view


def _checked(tensor: Tensor, name: str, bad: list[str]) -> Tensor:
    """The tensor; its name goes to `bad` if it holds NaN or infinity."""
    if tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.isfinite().all():
        bad.append(name)
    return tensor


def _selected(plans: list[LayerPlan], layers: Sequence[int | str]) -> list[LayerPlan]:
    chosen: dict[str, LayerPlan] = {}
    for wanted in layers:
        if isinstance(wanted, int):
            if not -len(plans) <= wanted < len(plans):
                raise InputError(
                    f"layer {wanted} was asked for, but {len(plans)} were found: 0 to "
                    f"{len(plans) - 1}"
                )
            found = [plans[wanted]]
        else:
            found = [p for p in plans if p.name == wanted or fnmatchcase(p.name, wanted)]
            if not found:
                raise InputError(f"no layer is called {wanted!r}; the first is {plans[0].name!r}")
        chosen |= {plan.name: plan for plan in found}
    return [plan for plan in plans if plan.name in chosen]


def _nothing(weights: Weights, skipped: list[Skip]) -> InputError:
    """The error for a source without layers: the reason of the first that was skipped, or names."""
    if skipped and skipped[0].by_settings:
        return InputError(str(skipped[0]))
    names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", n) for n in weights.shapes))
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    shown = ", ".join(names[:_SHOWN]) + more
    reason = f" ({skipped[0]})" if skipped else ""
    return NothingMatched(
        f"no attention layer was recognised in {weights.where}{reason}: the names seen are "
        f"{shown or 'none'}; describe them in a layout"
    )
