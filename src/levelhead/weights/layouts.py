"""The table of layouts: from names and shapes to the AttentionView of every layer.

The table is the same for files, `state_dict`s and `dict(model.named_parameters())`. Finding is
separate from reading: `find_layers` looks at names, shapes and settings only, and each `LayerPlan`
then reads the tensors of its one layer.

    source → names and shapes → find_layers → LayerPlan.apply → AttentionView
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.checkpoints import Weights, open_weights
from levelhead.weights.doubts import NOT_AS_NAMED
from levelhead.weights.layer import Layer, Shapes, template_pattern
from levelhead.weights.own_layout import layout_keywords, own_plan
from levelhead.weights.plan import LayerPlan, Plan
from levelhead.weights.plans_decoders import DECODERS
from levelhead.weights.plans_encoders import ENCODERS
from levelhead.weights.plans_generic import GENERIC
from levelhead.weights.plans_vision import VISION
from levelhead.weights.settings import SETTABLE, Settings

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
_LONG = 280

Layout = str | Path | Mapping[str, Any] | Plan


class NothingMatched(InputError):
    """No attention layer was found; says which names were seen."""

    exit_code = 3


@dataclass(frozen=True)
class Skip:
    """Something that looks like attention but was not read, and why, in one clause.

    `by_settings`: the names are understood, but shapes and settings do not fit together;
    `loose`: names of parameters that belong to no layer that was found.
    """

    name: str
    reason: str
    by_settings: bool = False
    loose: bool = False

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

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences on what to know of how layers are read, each once with their number."""
        said = Counter(text for plan in self.plans for text in plan.caveats)
        layers = {n: f"{n} layer{'s' if n > 1 else ''}" for n in said.values()}
        return tuple(f"{layers[n]}: {text}" for text, n in said.items())


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
    for name in {"norm_first", "do_stable_layer_norm"} & set(settings.arguments):
        settings.flag(name)  # what the user says wrongly is an error, not another row
    table = _rows(layout)
    plans: list[LayerPlan] = []
    skipped: list[Skip] = []
    known: set[str] = set()  # at the root no path tells a module's parameters from others
    for module, candidates in sorted(_candidates(shapes, table).items(), key=_natural):
        if not module:
            known |= {plan.store.anchor for plan, _ in candidates}
        found = _choose(module, candidates, shapes, settings, attributes or {}, layout is not None)
        if isinstance(found, LayerPlan):
            plans.append(found)
        else:
            skipped.append(found)
    modules = [name for name in (*(p.name for p in plans), *(s.name for s in skipped)) if name]
    skipped += _not_understood(shapes, modules, known)
    return plans, skipped


def _rows(layout: Layout | None) -> Sequence[Plan]:
    if layout is None:
        return TABLE
    if isinstance(layout, Plan):
        return (layout,)
    if isinstance(layout, Mapping):
        return _described(layout)
    if named := _named(str(layout)):
        return named
    if isinstance(layout, Path) or str(layout).endswith(".toml") or Path(layout).is_file():
        return _described(layout_keywords(layout))
    raise InputError(f"layout {str(layout)!r} is neither a TOML file nor one of {_families()}")


def _named(family: str) -> list[Plan]:
    return [plan for plan in TABLE if plan.family == family]


def _families() -> str:
    return ", ".join(sorted({plan.family for plan in TABLE}))


def _described(given: Mapping[str, Any]) -> Sequence[Plan]:
    """The plan that keywords describe; without `module` the rows of `family`, with settings."""
    if "module" in given or "family" not in given:
        return (own_plan(given),)
    settings = {name: value for name, value in given.items() if name != "family"}
    if unknown := [name for name in settings if name not in SETTABLE]:
        raise InputError(
            f"a layout that names a family without a module has no keyword {unknown[0]!r}; it has "
            f"family, {', '.join(SETTABLE)}"
        )
    if not (named := _named(str(given["family"]))):
        raise InputError(f"layout family {given['family']!r} is none of {_families()}")
    return [replace(plan, settings={**plan.settings, **settings}) for plan in named]


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
    if (other := kinds & set(NOT_AS_NAMED)) and not asked and not by_type:
        kind = min(other)
        return Skip(called, f"model_type {kind}: {NOT_AS_NAMED[kind]}")
    for plan, matched in by_type or candidates:
        known = bool(by_type)
        said = own.after("layout", plan.settings)
        layer = Layer(module, matched, shapes, said, plan.family, known)
        if not known and not asked and not plan.suits(layer):
            continue
        reason = plan.store.complete(layer) or plan.refuse(layer)
        if reason is None:
            try:
                found = LayerPlan(plan, module, matched, shapes, said, known, asked)
                if not found.unread and not found.unmodelled:
                    return found
                reason = found.unmodelled or (
                    f"{plan.family} has no {found.unread[0]}, which may change what it does"
                )
                reasons.insert(0, Skip(called, reason))
            except InputError as error:
                reasons.insert(0, Skip(called, str(error).removeprefix(f"{module}: "), True))
        else:
            reasons.append(Skip(called, reason))
    reasons.sort(key=lambda skip: skip.reason.startswith("it has no "))  # another row's names
    unknown = Skip(called, "its parameters are those of no row of the table")
    return reasons[0] if reasons else unknown


def _not_understood(shapes: Shapes, modules: list[str], known: set[str]) -> list[Skip]:
    """Weights that look like queries and are neither `known` nor below a module, a line a kind."""
    starts = tuple(f"{name}." for name in modules)
    kinds: dict[str, int] = {}
    for name in (n for n in shapes if n not in known):
        if _LOOKS_LIKE_ATTENTION.search(name) and not name.startswith(starts):
            kind = re.sub(r"\.\d+\.", ".*.", name)
            kinds[kind] = kinds.get(kind, 0) + 1
    return [
        Skip(kind, f"no row of the table knows this name ({count} found)", loose=True)
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

    `arguments` are settings that stand before the config's: heads, kv_heads, head_dim, theta,
    norm_first, …; see `settings.SETTABLE`.

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
        (*skipped, *_left(weights)),
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
            not finite or in a format that is not read are left out; without `skipped` a
            LevelheadWarning names them.
        arguments: settings that stand before the config's: heads, kv_heads, head_dim, theta,
            norm_first, …; see `settings.SETTABLE`.

    Raises NothingMatched if no layer is found, StoredFileError for a broken file, InputError for a
    wrong argument or where no layer's config fits its weights.

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
    left += _left(weights)
    if not plans:
        raise _nothing(weights, left, None if layout is None else _rows(layout))
    chosen = plans if layers is None else _selected(plans, layers)
    report = [] if skipped is None else skipped
    report += left
    failed: list[InputError] = []
    for plan in chosen:
        found = _read(plan, weights, failed)
        if isinstance(found, Skip):
            if len(failed) == len(chosen):
                raise failed[0]
            report.append(found)
            if skipped is None:
                warnings.warn(f"{found}; the layer is left out", LevelheadWarning, stacklevel=2)
            continue
        yield found


def _left(weights: Weights) -> list[Skip]:
    """Tensors that cannot be read; one that looks like a layer's queries stands for the layer."""
    return [
        Skip(name, reason, loose=not _LOOKS_LIKE_ATTENTION.search(name))
        for name, reason in weights.left.items()
    ]


def _read(plan: LayerPlan, weights: Weights, failed: list[InputError]) -> AttentionView | Skip:
    """The layer, or why it is left out; an error that explains it is appended to `failed`."""
    bad: list[str] = []
    try:
        view = plan.apply(lambda name: _checked(weights.get(name), name, bad))
    except InputError as error:
        failed.append(error)
        return Skip(plan.name, str(error).removeprefix(f"{plan.name}: "), True)
    return Skip(plan.name, f"{bad[0]} holds values that are not finite") if bad else view


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


def _nothing(
    weights: Weights, skipped: list[Skip], given: Sequence[Plan] | None = None
) -> InputError:
    """The error for a source without layers: what did not fit, or which names were seen.

    `given` are the rows of the layout that the user gave.
    """
    if skipped and skipped[0].by_settings:
        return InputError(str(skipped[0]))
    text = ""
    if weights.left or (skipped and not skipped[0].loose):
        text = str((_left(weights) or skipped)[0])
    elif given is not None:
        text = _unmatched(weights.shapes, given)
    reason = f" ({_shortened(text, 200)})" if text else ""
    start = f"no attention layer was recognised in {weights.where}{reason}: the names seen are "
    end = "; describe them in a layout (levelhead inspect --layout help)"
    names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", n) for n in weights.shapes))
    names.sort(key=lambda name: not _LOOKS_LIKE_ATTENTION.search(name))
    shown = names[:1]
    for name in names[1:_SHOWN]:
        if len(start + ", ".join([*shown, name]) + end) > _LONG:
            break
        shown.append(name)
    more = f" and {len(names) - len(shown)} more" if names[len(shown) :] else ""
    return NothingMatched(f"{start}{', '.join(shown) or 'none'}{more}{end}")


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _unmatched(shapes: Shapes, given: Sequence[Plan]) -> str:
    """Which part of a layout that was given fits no name."""
    plan = given[0]
    ends = [n for n in shapes if any(n.endswith(p.store.anchor) for p in given)]
    if not ends:
        return f"the layout looks for {plan.store.anchor!r}, by its q or qkv, and no name ends so"
    template = plan.modules[0] or "any path"
    return f"the layout's module {template!r} does not fit {ends[0]!r}, where its q or qkv is"
