"""What an attention layer is besides its weights: position, norms, mask, and who says so.

Axes. h heads, g key/value groups, d_k the width of queries and keys. Positions count tokens; a is
the query's and b the key's. Tensors follow `AttentionView`: a head's rows are its inner axis.

Two examples. `Rope("half", 64, 10000.0)` rotates the dimensions (f, f + 32) by a·θ_f with
θ_f = 10000^(-f/32). `Mask(causal=True, window=3)` lets token a see a, a-1, a-2 and a-3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from torch import Tensor

from levelhead.base.errors import InputError

__all__ = [
    "Alibi",
    "Disentangled",
    "InputNorm",
    "Latent",
    "Mask",
    "NoPosition",
    "Position",
    "Provenance",
    "QKNorm",
    "Relative",
    "Rope",
    "exchanged",
    "moved",
]


@dataclass(frozen=True)
class Provenance:
    """Where a fact comes from: read from a file, inferred from names and shapes, or assumed.

    `source` says which: "config num_attention_heads", "shape of encoder.layer.0…", "what this
    family does".

    >>> print(Provenance("read", "config rope_theta"))
    read (config rope_theta)
    """

    how: Literal["read", "inferred", "assumed"]
    source: str

    def __str__(self) -> str:
        return f"{self.how} ({self.source})"


# ── position ──


@dataclass(frozen=True)
class NoPosition:
    """The layer itself knows no positions (they were added to its input, or there are none)."""

    tag: Literal["none"] = "none"


@dataclass(frozen=True)
class Rope:
    """Rotary position (RoFormer, arXiv 2104.09864): plane f of q_a and k_b turns by a·θ_f, b·θ_f.

    Args:
        layout: "half" pairs dimensions (f, f + width/2), "interleaved" pairs (2f, 2f + 1), both
            counted from `offset`.
        width: how many dimensions are rotated; the others of d_k stay as they are.
        theta: the base; θ_f = theta^(-2f/width) unless `rescaled` is given.
        offset: the first rotated dimension.
        scaling: what the model does to the frequencies for long contexts, in words; None: nothing.
        rescaled: the width/2 frequencies after that scaling, where it does not depend on length.
        temperature: factor on the rotated dimensions of both q and k (YaRN, arXiv 2309.00071).

    Raises InputError for an odd width or another number of frequencies.

    >>> Rope("half", 4, 100.0).frequencies
    (1.0, 0.1)
    """

    layout: Literal["interleaved", "half"]
    width: int
    theta: float
    offset: int = 0
    scaling: str | None = None
    rescaled: tuple[float, ...] | None = None
    temperature: float = 1.0
    tag: Literal["rope"] = "rope"

    def __post_init__(self) -> None:
        if self.layout not in ("interleaved", "half"):
            raise InputError(
                f"rope layout {self.layout!r} was given; expected 'interleaved' or 'half'"
            )
        if self.width < 2 or self.width % 2:
            raise InputError(f"rope width {self.width} was given; expected an even number of 2 up")
        if self.rescaled is not None and len(self.rescaled) != self.width // 2:
            raise InputError(
                f"{len(self.rescaled)} rope frequencies for width {self.width}: expected width/2"
            )

    @property
    def frequencies(self) -> tuple[float, ...]:
        """θ_f [width/2], radians per token."""
        if self.rescaled is not None:
            return self.rescaled
        return tuple(self.theta ** (-2 * f / self.width) for f in range(self.width // 2))

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """The pair (e_f, o_f) of inner dimensions that frequency f rotates.

        >>> Rope("half", 4, 100.0).planes, Rope("interleaved", 4, 100.0).planes
        (((0, 2), (1, 3)), ((0, 1), (2, 3)))
        """
        half, first = self.width // 2, self.offset
        if self.layout == "half":
            return tuple((first + f, first + f + half) for f in range(half))
        return tuple((first + 2 * f, first + 2 * f + 1) for f in range(half))


@dataclass(frozen=True)
class Alibi:
    """A logit bias -slope_i · (a - b) after scaling, one slope per head [h] (arXiv 2108.12409).

    Under softmax only the part that depends on the key counts: slope_i · b.
    """

    slopes: tuple[float, ...]
    tag: Literal["alibi"] = "alibi"


@dataclass(frozen=True, eq=False)
class Relative:
    """A learned logit bias table[head, bucket(b - a)], added after scaling; table [h, buckets].

    Args:
        table: [h, buckets].
        kind: "t5" (logarithmic buckets up to max_distance, arXiv 1910.10683 sec. 2.1), "window"
            (one entry for each two-dimensional offset inside `window`, BEiT and Swin order, the
            last three for the class token) or "unknown".
        bidirectional: whether later and earlier keys have buckets of their own ("t5").
        max_distance: the distance from which on all keys share the last bucket ("t5").
        window: (height, width) in tokens ("window").
    """

    table: Tensor
    kind: Literal["t5", "window", "unknown"]
    bidirectional: bool = True
    max_distance: int | None = None
    window: tuple[int, int] | None = None
    tag: Literal["relative"] = "relative"


@dataclass(frozen=True, eq=False)
class Disentangled:
    """DeBERTa's position terms (arXiv 2006.03654, eq. 4), in the sum that is scaled.

    The scaled sum is q_aᵀ k_b + q_aᵀ (key r_δ) + k_bᵀ (query r_δ), both terms with
    δ = clamp(bucket(a - b) + span, 0, 2·span - 1) as in the released code.

    Args:
        embeddings: r [2·span, d], one row for each bucket of a - b, already normalised if the
            model does so; before the projections below.
        query, key: [h, d_k, d], the projections of r; None where the term does not exist.
            The content projections themselves where the model shares them.
        query_bias, key_bias: [h, d_k] or None.
        span: how many buckets lie on each side.
        buckets, max_distance: logarithmic bucketing; buckets 0 means every distance its own.
    """

    embeddings: Tensor
    query: Tensor | None
    key: Tensor | None
    query_bias: Tensor | None
    key_bias: Tensor | None
    span: int
    buckets: int = 0
    max_distance: int = 0
    shared: bool = False
    tag: Literal["disentangled"] = "disentangled"


Position = NoPosition | Rope | Alibi | Relative | Disentangled


# ── norms and mask ──


@dataclass(frozen=True, eq=False)
class QKNorm:
    """A norm of q and k behind their projections and biases, before the logits.

    Args:
        kind: "rms" (x/√(mean x² + eps)), "layer" (centred first) or "l2" (x/‖x‖).
        over: "head" norms the d_k numbers of each head, "all" the h·d_k (g·d_k) of a token.
        q_gain, k_gain: [d_k] shared by the heads, or [h, d_k] and [g, d_k]; None: ones. What
            multiplies: a model that stores gain - 1 has 1 added.
        q_shift, k_shift: what is added after the gain ("layer"), shaped alike.
        eps: added under the root.
        after_rope: whether the norm follows the rotation (it usually precedes it).
    """

    kind: Literal["rms", "layer", "l2"]
    over: Literal["head", "all"]
    q_gain: Tensor | None
    k_gain: Tensor | None
    eps: float
    q_shift: Tensor | None = None
    k_shift: Tensor | None = None
    after_rope: bool = False


@dataclass(frozen=True, eq=False)
class Latent:
    """Norms between the factors of low-rank projections (DeepSeek's multi-head latent attention).

    The view's q, k and v are the products of both factors and the gain between them. What is left
    is a number for each token: queries are divided by rms(query x), values and the rows of keys
    outside `plain` by rms(source x), where rms(y) = √(mean y² + eps).

    Args:
        source: [r_kv, d_source], the compression of keys and values.
        query: [r_q, d], that of queries; None where they are not compressed.
        eps: added to the mean square.
        plain: (first, count), the rows of every key that are not compressed (the rotated ones).
    """

    source: Tensor
    query: Tensor | None
    eps: float
    plain: tuple[int, int]


@dataclass(frozen=True, eq=False)
class InputNorm:
    """The norm whose output the layer reads as x.

    Args:
        kind: "layer", "rms" or "none".
        gain, bias: [d] or None. What multiplies: a model that stores gain - 1 has 1 added.
        eps: added to the variance (mean square).
        position: "pre": the norm belongs to this block and the residual stream does not pass
            through it; "post": it is the previous block's last step (or the embedding's), and the
            stream is its output.
    """

    kind: Literal["layer", "rms", "none"]
    gain: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    position: Literal["pre", "post"] = "pre"


@dataclass(frozen=True)
class Mask:
    """Which keys b a query a may see: b ≤ a if causal, and |a - b| ≤ window if there is one.

    >>> Mask().kind, Mask(causal=True).kind, Mask(causal=True, window=3).kind
    ('full', 'causal', 'sliding')
    """

    causal: bool = False
    window: int | None = None

    @property
    def kind(self) -> Literal["full", "causal", "sliding"]:
        """One word: "sliding" wherever there is a window."""
        if self.window is not None:
            return "sliding"
        return "causal" if self.causal else "full"


# ── moving to another dtype or device ──

_Fact = TypeVar("_Fact")


def moved(fact: _Fact, move: Callable[[Tensor], Tensor]) -> _Fact:
    """`fact`, one of the dataclasses above, with `move` applied to each of its tensors."""
    return exchanged(fact, {n: move(t) for n, t in vars(fact).items() if isinstance(t, Tensor)})


def exchanged(fact: _Fact, values: Mapping[str, object]) -> _Fact:
    """`fact` with other values in some of its fields, unchanged if there are none."""
    changed: _Fact = replace(cast(Any, fact), **values) if values else fact
    return changed
