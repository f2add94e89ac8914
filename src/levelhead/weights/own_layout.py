"""A user's own layout, from a small TOML file or the same keywords: `REFERENCE` lists them all."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from levelhead.base.errors import InputError, StoredFileError
from levelhead.weights.facts import norm
from levelhead.weights.layer import Layer, Sizes
from levelhead.weights.plan import Plan
from levelhead.weights.rope import rope
from levelhead.weights.stores import Fused, Separate, Store
from levelhead.weights.structure import InputNorm, Mask, NoPosition, Position

__all__ = ["REFERENCE", "layout_keywords", "own_plan"]

REFERENCE = """\
A layout says where attention layers lie in a checkpoint and what they are: a TOML file for
--layout FILE, or the same keywords as a mapping for layout= in Python.

    module = "{stem}blocks.{n}.attn"   # the layers' path: {stem} anything, {n} a number
    qkv = "in_proj_weight"             # queries, keys and values in one matrix
    o = "out_proj"                     # the output projection
    heads = 8
    norm = "{stem}blocks.{n}.norm1"    # the norm whose output the layer reads

Names. q, k, v, o and qkv are named below the module: a Linear ("to_q" stands for to_q.weight and
to_q.bias), or a parameter itself if the name ends in "weight" (then the bias ends in "bias").

  module       path of the attention module                                   needed
  q, k, v      three matrices, or instead of them                             needed
  qkv          one matrix, and its                                            needed
  order        "stacked" (all queries, all keys, all values) or "grouped"     "stacked"
               (for each group its queries, its key, its value)
  o            output projection                                              none
  input_major  matrices are stored [d, rows], as in GPT-2                     false
  heads, kv_heads, head_dim    numbers                                        a config's
  family       a name to call the layers by                                   "own"
  position     "none", "rope-half" or "rope-interleaved"                      "none"
  theta        base of the rotary frequencies                                 10000.0
  rotary       share of head_dim that rotates                                 1.0
  mask         "full" or "causal"                                             "full"
  window       how many tokens back a token sees                              all
  scale        factor on q·k                                                  1/sqrt(head_dim)
  soft_cap     c in c·tanh(logit/c)                                           none
  cross        keys and values come from another sequence                     false
  norm         path of the norm in front, from {stem} and {n}                 none
  norm_kind    "layer" or "rms"                                               "layer"
  norm_eps     its eps                                                        1e-5

A file with the `family` of a known row and without `module` keeps that row and adds settings:

    family = "torch_encoder"
    heads = 8
    norm_first = true
"""

_SETTINGS = ("heads", "kv_heads", "head_dim", "theta", "rotary")
_SAID = "the layout given"


@dataclass(frozen=True)
class _Given:
    """The keywords of a layout, checked."""

    module: str
    q: str | None = None
    k: str | None = None
    v: str | None = None
    o: str | None = None
    qkv: str | None = None
    order: str = "stacked"
    input_major: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    family: str = "own"
    position: str = "none"
    theta: float = 10000.0
    rotary: float = 1.0
    mask: str = "full"
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    cross: bool = False
    norm: str | None = None
    norm_kind: str = "layer"
    norm_eps: float = 1e-5


_CHOICES = {
    "order": ("stacked", "grouped"),
    "position": ("none", "rope-half", "rope-interleaved"),
    "mask": ("full", "causal"),
    "norm_kind": ("layer", "rms"),
}
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,)}
_KINDS["float"] = (int, float)


def layout_keywords(path: str | Path) -> dict[str, Any]:
    """The keywords in a TOML file.

    Raises StoredFileError if it cannot be read.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # to open a pipe would wait for ever
            raise ValueError("it is no regular file")
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoredFileError(f"layout {path} cannot be read: {error}") from error


def own_plan(given: Mapping[str, Any]) -> Plan:
    """The plan that keywords describe (see `REFERENCE`).

    Raises InputError for a keyword that is unknown, missing or of the wrong kind.

    >>> plan = own_plan({"module": "{stem}attn", "qkv": "qkv", "o": "out", "heads": 2})
    >>> plan.store.anchor
    'qkv.weight'
    """
    options = _checked(given)
    return Plan(
        options.family,
        (options.module,),
        _store(options),
        settings={n: given[n] for n in _SETTINGS if n in given},
        position=_position(options),
        mask=_mask(options),
        scale=_scale(options),
        soft_cap=_cap(options),
        input_norm=_norm(options),
        cross=options.cross,
    )


def _checked(given: Mapping[str, Any]) -> _Given:
    known = {f.name: str(f.type) for f in fields(_Given)}
    for name, value in given.items():
        if name not in known:
            raise InputError(
                f"a layout has no keyword {name!r}; it has {', '.join(known)} (levelhead inspect "
                "--layout help says what they mean)"
            )
        kinds = tuple(k for word in known[name].split(" | ") for k in _KINDS.get(word, ()))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"layout {name} = {value!r}; expected {known[name].split(' |')[0]}")
        if value not in _CHOICES.get(name, (value,)):
            raise InputError(f"layout {name} = {value!r}; expected one of {_CHOICES[name]}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"layout {name} = {value}; expected at least 1")
    if "module" not in given:
        raise InputError("a layout needs `module`, the path of the attention module, or a `family`")
    separate = all(given.get(n) for n in ("q", "k", "v"))
    if separate == bool(given.get("qkv")):
        raise InputError("a layout needs either `qkv`, or `q`, `k` and `v`")
    return _Given(**given)


def _store(options: _Given) -> Store:
    if options.qkv:
        return Fused(options.qkv, options.o, options.order, options.input_major)  # type: ignore[arg-type]
    assert options.q
    assert options.k
    assert options.v
    return Separate(options.q, options.k, options.v, options.o, options.input_major)


def _position(options: _Given) -> Callable[[Layer, Sizes], Position]:
    def position(layer: Layer, sizes: Sizes) -> Position:
        found: Position = NoPosition()
        if options.position != "none":
            layout = options.position.removeprefix("rope-")
            turning = rope(layout, theta=options.theta, rotary=options.rotary)  # type: ignore[arg-type]
            found = turning(layer, sizes)
        layer.note("position", "read", _SAID)
        return found

    return position


def _mask(options: _Given) -> Callable[[Layer], Mask]:
    def mask(layer: Layer) -> Mask:
        layer.note("mask", "read", _SAID)
        return Mask(options.mask == "causal", options.window)

    return mask


def _scale(options: _Given) -> Callable[[Layer, Sizes], float]:
    def scale(layer: Layer, sizes: Sizes) -> float:
        if options.scale is None:
            layer.note("scale", "assumed", "1/√d_k")
            return float(sizes.d_k**-0.5)
        layer.note("scale", "read", _SAID)
        return options.scale

    return scale


def _cap(options: _Given) -> Callable[[Layer], float | None]:
    def cap(layer: Layer) -> float | None:
        layer.note("soft_cap", "read", _SAID)
        return options.soft_cap

    return cap


def _norm(options: _Given) -> Callable[[Layer], InputNorm]:
    def input_norm(layer: Layer) -> InputNorm:
        layer.note("input_norm", "read", _SAID)
        if options.norm is None:
            return InputNorm("none")
        kind: Any = options.norm_kind
        return norm(kind, options.norm, eps=options.norm_eps, eps_setting="")(layer)

    return input_norm
