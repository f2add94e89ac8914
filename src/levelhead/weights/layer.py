"""One attention layer while it is being described: its names, shapes, settings and origins.

Paths. `module` is the attention module's path. The functions of a plan name parameters by
templates: "q_proj.weight" is below the module; "{stem}…{n}…" starts from what the plan's module
template matched: {stem} the path before the template (with its dot, or empty), {n} the layer's
number, {n-1} the one before it, {m} a second number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.multilinear import working
from levelhead.weights.settings import Settings
from levelhead.weights.structure import Provenance

__all__ = [
    "GIVE_HEADS",
    "GIVE_KV_HEADS",
    "GetTensor",
    "Layer",
    "Shapes",
    "Sizes",
    "template_pattern",
]

# What to do where shapes alone do not say it.
GIVE_HEADS = "give the number of heads (heads= in Python, --heads on the command line)"
GIVE_KV_HEADS = (
    "give the number of key/value groups (kv_heads= in Python, --set kv_heads=N on the command "
    "line)"
)

Shapes = Mapping[str, tuple[int, ...]]
GetTensor = Callable[[str], Tensor]

_FLOAT8 = tuple(
    t for name in dir(torch) if name.startswith("float8") and (t := getattr(torch, name))
)


@dataclass(frozen=True)
class Sizes:
    """h heads, g key/value groups, d_k and d_v."""

    heads: int
    groups: int
    d_k: int
    d_v: int


def template_pattern(template: str) -> str:
    """Regular expression of a module template.

    >>> re.fullmatch(template_pattern("{stem}layer.{n}.attn"), "bert.layer.3.attn")["n"]
    '3'
    """
    pieces = {
        re.escape("{stem}"): r"(?P<stem>(?:.*\.)?)",
        re.escape("{n}"): r"(?P<n>\d+)",
        re.escape("{m}"): r"(?P<m>\d+)",
    }
    pattern = re.escape(template)
    for piece, expression in pieces.items():
        pattern = pattern.replace(piece, expression)
    return pattern


@dataclass
class Layer:
    """What a plan's functions look at; `origins` collects where each field's value comes from."""

    module: str
    matched: Mapping[str, str]
    shapes: Shapes
    settings: Settings
    family: str
    known: bool
    get: GetTensor | None = None
    origins: dict[str, Provenance] = field(default_factory=dict)
    read_names: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The layer's number in its stack, 0 if it has none."""
        return int(self.matched.get("n") or 0)

    def path(self, template: str) -> str:
        """Full name of a parameter or module; see the top of this file."""
        if "{" not in template:
            return f"{self.module}.{template}" if self.module else template
        values = {k: v or "" for k, v in self.matched.items()}
        filled = template.replace("{n-1}", str(self.number - 1)).replace("{self}", self.module)
        return filled.format(**values)

    def has(self, template: str) -> bool:
        """Whether the model has this parameter."""
        return self.path(template) in self.shapes

    def shape(self, template: str) -> tuple[int, ...]:
        """The stored shape of a parameter."""
        return tuple(self.shapes[self.path(template)])

    def read(self, template: str) -> Tensor:
        """The parameter, in float32 at least. Raises InputError if it holds no plain numbers."""
        assert self.get is not None, "a layer is read only when its plan is applied"
        name = self.path(template)
        tensor = self.get(name)
        self.read_names.append(name)
        if tuple(tensor.shape) != tuple(self.shapes[name]):
            raise InputError(
                f"{name} is {list(tensor.shape)}, but was announced as {list(self.shapes[name])}"
            )
        if tensor.dtype in _FLOAT8 or not tensor.is_floating_point():
            raise InputError(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}, a quantised "
                "format whose scales lie elsewhere: dequantise the checkpoint first"
            )
        return working(tensor)

    def read_if(self, template: str) -> Tensor | None:
        """The parameter, or None if the model has none of that name."""
        return self.read(template) if self.has(template) else None

    # ── where values come from ──

    def note(self, name: str, how: str, source: str) -> None:
        """Remember where the value of the view's field `name` comes from."""
        self.origins[name] = Provenance(how, source)  # type: ignore[arg-type]

    def family_says(self, name: str, what: str = "") -> None:
        """The value of field `name` is what this family does."""
        said = f"what {self.family} does{': ' if what else ''}{what}"
        if self.known:
            self.note(name, "inferred", f"{said}, by model_type {self.settings.model_type}")
        else:
            self.note(name, "assumed", f"{said}, by its parameters' names alone")

    def setting(self, name: str, default: Any, *, of: str) -> Any:
        """Setting `name`, or the family's `default`; the origin is noted for field `of`."""
        found = self.settings.find(name)
        if found is None:
            self.family_says(of, f"{name} {default}")
            return default
        self.origins[of] = found[1]
        return found[0]

    # ── sizes ──

    def heads(self, rows: int, clues: tuple[tuple[str, int, str], ...] = ()) -> tuple[int, int]:
        """(h, d_k) of queries with `rows` = h·d_k rows.

        From settings; else from `clues` (parameter, axis, "heads" or "head_dim"): a parameter
        whose axis has that length. Raises InputError if neither says it or they contradict.
        """
        heads, head_dim = self.settings.whole("heads"), self.settings.whole("head_dim")
        if heads is None and head_dim is None:
            found = self._clue(rows, clues)
        elif heads is None:
            assert head_dim is not None
            found = (rows // head_dim[0], head_dim[0])
            self.origins["q"] = head_dim[1]
        else:
            found = (heads[0], rows // heads[0])
            self.origins["q"] = heads[1]
        if found[0] < 1 or found[1] < 1 or found[0] * found[1] != rows:
            raise InputError(
                f"{self.module}: {rows} rows of queries cannot be {found[0]} heads of width "
                f"{found[1]} ({self.origins['q'].source}): {GIVE_HEADS}"
            )
        return found

    def _clue(self, rows: int, clues: tuple[tuple[str, int, str], ...]) -> tuple[int, int]:
        for template, axis, kind in clues:
            if self.has(template):
                count = self.shape(template)[axis]
                self.note("q", "inferred", f"shape of {self.path(template)}")
                other = rows // count if count else 0
                return (count, other) if kind == "heads" else (other, count)
        raise InputError(
            f"{self.module}: shapes alone do not say into how many heads {rows} rows of queries "
            f"fall, and no config says it: {GIVE_HEADS}"
        )
