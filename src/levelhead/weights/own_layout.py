"""A user's own layout, from a small TOML file or the same keywords.

    module = "{stem}blocks.{n}.attn"   # its path: {stem} anything, {n} a number
    q = "to_q"                         # Linears below it …
    k = "to_k"
    v = "to_v"
    o = "to_out"
    # qkv = "qkv"                      # … or one for all three
    # order = "stacked"                # or "grouped": per group its queries, its key, its value
    heads = 8

Optional: family, kv_heads, head_dim, input_major (matrices stored [d, rows]), position ("none",
"rope-half", "rope-interleaved"), theta, rotary (share of d_k that rotates), mask ("full",
"causal"), window, scale, soft_cap, cross, norm (a module), norm_kind ("layer", "rms"), norm_eps.
"""

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

__all__ = ["own_plan", "read_layout"]

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


def read_layout(path: str | Path) -> Plan:
    """The plan that a TOML file describes.

    Raises StoredFileError if it cannot be read, InputError if a keyword is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        given = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StoredFileError(f"layout {path} cannot be read: {error}") from error
    return own_plan(given)


def own_plan(given: Mapping[str, Any]) -> Plan:
    """The plan that keywords describe (see the top of this file).

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
            raise InputError(f"a layout has no keyword {name!r}; it has {', '.join(known)}")
        kinds = tuple(k for word in known[name].split(" | ") for k in _KINDS.get(word, ()))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"layout {name} = {value!r}; expected {known[name].split(' |')[0]}")
        if value not in _CHOICES.get(name, (value,)):
            raise InputError(f"layout {name} = {value!r}; expected one of {_CHOICES[name]}")
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"layout {name} = {value}; expected at least 1")
    if "module" not in given:
        raise InputError("a layout needs `module`, the path of the attention module")
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
