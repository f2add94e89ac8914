"""The weights of one attention layer in one convention, whatever model they come from.

What gauges, foldings and symmetries need of a layer stands here; `attention_view.AttentionView` is
the same with their results as methods, and is what readers build. Functions that give a layer back
give back what they got: `View` stands for either.

Axes. h query heads, g key/value groups, d_k the width of queries and keys, d_v that of values;
d is the width of the layer's input, d_source that of the tokens it looks at (the same but in
cross-attention), d_out that of its output. Weights are in row layout: head i computes q_a = q_i x_a
[d_k] from q [h, d_k, d], k_b = k_{g(i)} x_b, v_b = v_{g(i)} x_b and writes Σ_b A_ab o_i v_b [d_out]
with o [h, d_out, d_v]. A = softmax_b(cap(scale · q_aᵀ k_b) + bias of position).

Two examples. A layer without biases and positions is the forms B_i = q_iᵀ k_{g(i)} [d, d_source]
(`.qk`, unscaled) and the maps M_i = o_i v_{g(i)} [d_out, d_source] (`.ov`). With h = 4, g = 2 and
kv_group (0, 0, 1, 1), heads 0 and 1 share the first block of k and v.

Nothing is detached: a view of live parameters lies on autograd's tape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Self, TypeVar

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.multilinear import working
from levelhead.weights.structure import (
    Alibi,
    InputNorm,
    Latent,
    Mask,
    NoPosition,
    Position,
    Provenance,
    QKNorm,
    Relative,
    exchanged,
    moved,
)

__all__ = ["LayerWeights", "View"]

_WEIGHTS = ("q", "k", "v", "o")
_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias")
_Fact = TypeVar("_Fact")
_UNSAID = Provenance("assumed", "given by whoever built the view")
_SHAPES = {
    "q": "[h, d_k, d]",
    "k": "[g, d_k, d_source]",
    "v": "[g, d_v, d_source]",
    "o": "[h, d_out, d_v]",
    "q_bias": "[h, d_k]",
    "k_bias": "[g, d_k]",
    "v_bias": "[g, d_v]",
    "o_bias": "[d_out]",
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerWeights:
    """One attention layer: q [h,d_k,d], k [g,d_k,d_source], v [g,d_v,d_source], o [h,d_out,d_v].

    Args:
        q, k, v, o: the weights in row layout. float16 and bfloat16 become float32; all are
            brought to the widest dtype among them.
        q_bias, k_bias, v_bias, o_bias: [h, d_k], [g, d_k], [g, d_v], [d_out] or None.
        kv_group: the block of k and v that each head uses [h]; by default head i uses
            i // (h/g), the order of grouped-query attention.
        scale: factor on q·k, by default 1/√d_k.
        soft_cap: c where logits are c·tanh(logit/c), else None.
        position, qk_norm, mask, input_norm: what the layer is; see `weights.structure`.
        latent: norms inside low-rank projections, for which .qk and .ov hold up to a factor that
            depends on the token.
        cross: whether keys and values come from another sequence.
        tied: whether k is the very parameter that q is.
        weighting: "softmax", or "linear" where scores weigh values as they are.
        name: the layer's name in its model; `family`: the plan that read it.
        origins: for a field's name where its value comes from. A field that is not there was
            given by the caller.

    Raises InputError for shapes that do not fit together, no heads, or a group out of range.

    >>> one = torch.ones(1, 1, 3)
    >>> LayerWeights(q=torch.ones(2, 1, 3), k=one, v=one, o=torch.ones(2, 3, 1))
    LayerWeights('attention': 2 heads, 1 group, d_k 1, d_v 1, d 3, full, position none)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    kv_group: tuple[int, ...] = ()
    scale: float | None = None
    soft_cap: float | None = None
    position: Position = field(default_factory=NoPosition)
    qk_norm: QKNorm | None = None
    mask: Mask = field(default_factory=Mask)
    input_norm: InputNorm = field(default_factory=lambda: InputNorm("none"))
    latent: Latent | None = None
    cross: bool = False
    tied: bool = False
    weighting: str = "softmax"
    name: str = "attention"
    family: str = "own"
    origins: Mapping[str, Provenance] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._one_dtype()
        h, g = self.q.shape[0], self.k.shape[0]
        if not self.kv_group:
            if h % g:
                raise InputError(
                    f"{self.name}: {h} heads cannot share {g} key/value groups evenly: "
                    "give kv_group, the group of each head"
                )
            object.__setattr__(self, "kv_group", tuple(i // (h // g) for i in range(h)))
        object.__setattr__(self, "kv_group", tuple(int(i) for i in self.kv_group))
        if self.scale is None:
            object.__setattr__(self, "scale", 1 / math.sqrt(self.q.shape[1]))
        object.__setattr__(self, "origins", dict(self.origins))
        self._check_shapes()
        self._check_facts()

    def _one_dtype(self) -> None:
        given = {n: getattr(self, n) for n in (*_WEIGHTS, *_BIASES)}
        given = {n: t for n, t in given.items() if t is not None}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise InputError(f"{self.name}: {name} is a {type(tensor).__name__}, not a tensor")
            try:
                given[name] = working(tensor)
            except InputError as error:
                raise InputError(f"{self.name}: {name}: {error}") from error
            rank = len(_SHAPES[name].split())
            if tensor.ndim != rank or 0 in tensor.shape:
                raise InputError(
                    f"{self.name}: {name} {list(tensor.shape)} was given; expected "
                    f"{_SHAPES[name]} with at least one head and no width of zero"
                )
        widest = given["q"].dtype
        for tensor in given.values():
            widest = torch.promote_types(widest, tensor.dtype)
        for name, tensor in given.items():
            object.__setattr__(self, name, tensor.to(widest))

    def _check_shapes(self) -> None:
        (h, d_k, _), (g, d_v, source) = self.q.shape, self.v.shape
        expected: dict[str, tuple[int, ...]] = {
            "k": (g, d_k, source),
            "o": (h, self.o.shape[1], d_v),
            "q_bias": (h, d_k),
            "k_bias": (g, d_k),
            "v_bias": (g, d_v),
            "o_bias": (self.o.shape[1],),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise InputError(
                    f"{self.name}: {name} {list(tensor.shape)} does not fit q {list(self.q.shape)} "
                    f"and v {list(self.v.shape)}: expected {_SHAPES[name]} = {list(shape)}"
                )
        if len(self.kv_group) != h or set(self.kv_group) != set(range(g)):
            raise InputError(
                f"{self.name}: kv_group {self.kv_group} was given; expected one group for each of "
                f"{h} heads, every group of 0 … {g - 1} used"
            )

    def _check_facts(self) -> None:
        heads = None
        if isinstance(self.position, Alibi):
            heads = len(self.position.slopes)
        elif isinstance(self.position, Relative):
            heads = self.position.table.shape[0]
        if heads not in (None, self.heads):
            raise InputError(f"{self.name}: position has {heads} heads, the layer {self.heads}")
        last = max((max(p) for p in getattr(self.position, "planes", ())), default=0)
        if last >= self.d_k:
            raise InputError(
                f"{self.name}: rope rotates dimension {last}, but d_k is {self.d_k}: "
                "its width and offset must fit into a head"
            )
        unknown = set(self.origins) - {f.name for f in fields(self)}
        if unknown:
            raise InputError(f"{self.name}: origins of unknown fields {sorted(unknown)}")

    def __repr__(self) -> str:
        groups = f"{self.groups} group{'s' if self.groups > 1 else ''}"
        width = f"d {self.d}" if self.d == self.d_source else f"d {self.d} from {self.d_source}"
        return (
            f"{type(self).__name__}({self.name!r}: {self.heads} heads, {groups}, d_k {self.d_k}, "
            f"d_v {self.d_v}, {width}, {'cross, ' if self.cross else ''}{self.mask.kind}, "
            f"position {self.position.tag})"
        )

    # ── sizes ──

    @property
    def heads(self) -> int:
        """h, the number of query heads."""
        return self.q.shape[0]

    @property
    def groups(self) -> int:
        """g, the number of key/value groups."""
        return self.k.shape[0]

    @property
    def d_k(self) -> int:
        """Width of queries and keys."""
        return self.q.shape[1]

    @property
    def d_v(self) -> int:
        """Width of values."""
        return self.v.shape[1]

    @property
    def d(self) -> int:
        """Width of the layer's input."""
        return self.q.shape[2]

    @property
    def d_source(self) -> int:
        """Width of the tokens that keys and values are made from."""
        return self.k.shape[2]

    @property
    def d_out(self) -> int:
        """Width of the layer's output."""
        return self.o.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all weights and biases."""
        return self.q.dtype

    @property
    def logit_scale(self) -> float:
        """`scale` as a number: what q·k is multiplied by before soft-cap and softmax."""
        assert self.scale is not None
        return self.scale

    def members(self, group: int) -> tuple[int, ...]:
        """The heads that use key/value group `group`.

        >>> LayerWeights(q=torch.ones(4, 1, 2), k=torch.ones(2, 1, 2), v=torch.ones(2, 1, 2),
        ...              o=torch.ones(4, 2, 1)).members(1)
        (2, 3)
        """
        return tuple(i for i, g in enumerate(self.kv_group) if g == group)

    def origin(self, name: str) -> Provenance:
        """Where the value of field `name` comes from. Raises InputError for an unknown field."""
        if name not in {f.name for f in fields(self)}:
            raise InputError(f"{type(self).__name__} has no field {name!r}")
        return self.origins.get(name, _UNSAID)

    # ── forms, maps, tensors ──

    @property
    def qk(self) -> LowRankStack:
        """B_i = q_iᵀ k_{g(i)}: stack [h, d, d_source], unscaled and without biases."""
        return LowRankStack(self.q, self.k, self._sharing())

    @property
    def ov(self) -> LowRankStack:
        """M_i = o_i v_{g(i)}: stack [h, d_out, d_source]."""
        return LowRankStack(self.o.mT, self.v, self._sharing())

    def _uneven(self) -> bool:
        return len({len(self.members(g)) for g in range(self.groups)}) > 1

    def _sharing(self) -> tuple[int, ...] | None:
        return None if self.kv_group == tuple(range(self.groups)) else self.kv_group

    # ── other views ──

    def head(self, head: int) -> Self:
        """The view of one head alone (its share of the output; o_bias is left out unless h = 1)."""
        i = self._index(head)
        g = self.kv_group[i]
        position = self.position
        if isinstance(position, Alibi):
            position = replace(position, slopes=(position.slopes[i],))
        elif position.tag in ("relative", "disentangled"):
            position = _rows(position, i, ("table", "query", "key", "query_bias", "key_bias"))
        return replace(
            self,
            q=self.q[i : i + 1],
            k=self.k[g : g + 1],
            v=self.v[g : g + 1],
            o=self.o[i : i + 1],
            q_bias=_row(self.q_bias, i),
            k_bias=_row(self.k_bias, g),
            v_bias=_row(self.v_bias, g),
            o_bias=self.o_bias if self.heads == 1 else None,
            kv_group=(0,),
            position=position,
            qk_norm=self._norm_of(i, g),
            name=f"{self.name}[head {i}]",
        )

    def _norm_of(self, i: int, g: int) -> QKNorm | None:
        norm = self.qk_norm
        if norm is None or self.heads == 1:
            return norm
        if norm.over == "all":
            raise InputError(
                f"{self.name}: queries are normed over all heads together, so no head stands alone"
            )
        norm = _rows(norm, i, ("q_gain", "q_shift"), least=2)
        return _rows(norm, g, ("k_gain", "k_shift"), least=2)

    def repeat_kv(self) -> Self:
        """The same layer with a key/value block for every head: g = h, kv_group (0, …, h - 1).

        Not an equal for symmetries: its blocks are copies, which a gauge of the layer moves as one.
        """
        if self._sharing() is None:
            return self
        blocks = list(self.kv_group)
        norm = self.qk_norm
        if norm is not None and norm.over == "all" and self._uneven():
            raise InputError(
                f"{self.name}: keys are normed over all groups together, and repeating them "
                "unevenly would change the norm"
            )
        if norm is not None:
            gains = {n: t for n in ("k_gain", "k_shift") if (t := getattr(norm, n)) is not None}
            norm = exchanged(norm, {n: t[blocks] for n, t in gains.items() if t.ndim == 2})
        return replace(
            self,
            k=self.k[blocks],
            v=self.v[blocks],
            k_bias=None if self.k_bias is None else self.k_bias[blocks],
            v_bias=None if self.v_bias is None else self.v_bias[blocks],
            kv_group=tuple(range(self.heads)),
            qk_norm=norm,
        )

    def to(self, target: torch.dtype | torch.device | str) -> Self:
        """The view in another dtype or on another device; everything it holds moves along.

        float16 and bfloat16 are refused: nothing is computed in them.
        """
        if target in (torch.float16, torch.bfloat16):
            raise InputError(f"{target} was given; views are computed in float32 or float64")
        return self.map(lambda t: t.to(target))

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """`change` applied to every tensor of the view: weights, biases, norms, position tables."""
        tensors = {n: t for n in (*_WEIGHTS, *_BIASES) if (t := getattr(self, n)) is not None}
        facts: dict[str, object] = {
            "position": moved(self.position, change),
            "qk_norm": None if self.qk_norm is None else moved(self.qk_norm, change),
            "latent": None if self.latent is None else moved(self.latent, change),
            "input_norm": moved(self.input_norm, change),
        }
        return exchanged(self, {**{n: change(t) for n, t in tensors.items()}, **facts})

    def _index(self, head: int) -> int:
        if not -self.heads <= head < self.heads:
            raise InputError(f"{self.name}: head {head} was asked for; it has {self.heads}")
        return head % self.heads


View = TypeVar("View", bound=LayerWeights)
"""A layer of one class or the other: what comes out is what went in."""


def _row(tensor: Tensor | None, i: int) -> Tensor | None:
    return None if tensor is None else tensor[i : i + 1]


def _rows(fact: _Fact, i: int, names: tuple[str, ...], least: int = 1) -> _Fact:
    """`fact` with the named tensors (of `least` axes or more) cut to row i."""
    tensors = {n: getattr(fact, n, None) for n in names}
    return exchanged(
        fact, {n: t[i : i + 1] for n, t in tensors.items() if t is not None and t.ndim >= least}
    )
