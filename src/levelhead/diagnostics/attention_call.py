"""One call of attention, whatever code made it, in one convention.

Axes. b batch, h query heads, g key groups (head i uses group i // (h/g)), n rows (queries), m keys,
d_k the width of queries and keys. The logit of row i and key j is

    l_ij = cap(scale · q_iᵀ k_j) + bias_ij,    cap(x) = soft_cap · tanh(x / soft_cap),

and the row's weights are the softmax of l over the keys it may look at: those that `allowed` and,
for a causal call, j ≤ i (counted from the upper left, as PyTorch does). Where a layer formed its
logits itself, `logits` are used as they are.

Two examples. q [2, 4, 5, 8] with k [2, 2, 7, 8] are 4 heads in 2 groups, 5 rows over 7 keys. With
`causal` row 0 has one key and row 4 five; without it all have seven.

Precision. float16 and bfloat16 are computed in float32, float64 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.tensors.multilinear import working

__all__ = ["AttentionCall", "attention_call", "logits_call", "split_mask"]

# A mask of zeros and values at or below this is a mask and no bias (-10000 was once customary).
_CLOSED = -9000.0
# Anything at or below this is "not allowed", also beside a bias; float16 has its own, half its end.
_NOT_ALLOWED = -1e8

Part = slice | Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCall:
    """One call of attention: q [b,h,n,d_k], k [b,g,m,d_k] or logits [b,h,n,m].

    Args:
        q, k: queries and keys as they are multiplied, after positions and norms; None where only
            the logits were seen.
        logits: where the layer formed them itself, with bias and cap, −∞ (or a mask's very
            negative constant) where masked.
        scale: factor on q·k; by default 1/√d_k.
        bias: added to the logits, broadcastable to [b, h, n, m].
        allowed: True where a row may look, broadcastable to [b, h, n, m]; None: everywhere.
        causal: whether row i sees keys j ≤ i only.
        soft_cap: c where logits are c·tanh(logit/c) before the bias.

    Raises InputError for shapes that do not fit together, or neither q and k nor logits.

    >>> call = AttentionCall(q=torch.ones(1, 2, 3, 4), k=torch.ones(1, 1, 3, 4), causal=True)
    >>> call.shape, call.scale
    ((1, 2, 3, 3), 0.5)
    """

    q: Tensor | None = None
    k: Tensor | None = None
    logits: Tensor | None = None
    scale: float = math.nan
    bias: Tensor | None = None
    allowed: Tensor | None = None
    causal: bool = False
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.logits is not None:
            fits = self.logits.ndim == 4
        elif self.q is not None and self.k is not None:
            q, k = self.q.shape, self.k.shape
            fits = len(q) == len(k) == 4 and q[0] == k[0] and q[3] == k[3]
            fits = fits and k[1] > 0 and q[1] % k[1] == 0
        else:
            raise InputError("a call needs q and k, or logits; neither was given")
        if not fits:
            parts = {n: getattr(self, n) for n in ("q", "k", "logits")}
            given = ", ".join(f"{n} {list(t.shape)}" for n, t in parts.items() if t is not None)
            raise InputError(
                f"{given} was given; expected q [b, h, n, d_k] and k [b, g, m, d_k], g dividing h, "
                "or logits [b, h, n, m]"
            )
        for name in ("bias", "allowed"):
            part = getattr(self, name)
            if part is not None:
                object.__setattr__(self, name, _four(part, self.shape, name))
        if math.isnan(self.scale):
            width = 1 if self.q is None else max(self.q.shape[-1], 1)
            object.__setattr__(self, "scale", 1 / math.sqrt(width))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, h, n, m)."""
        if self.logits is not None:
            b, h, n, m = self.logits.shape
            return b, h, n, m
        assert self.q is not None
        assert self.k is not None
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def device(self) -> torch.device:
        """Where the call's tensors lie."""
        return self._any.device

    @property
    def dtype(self) -> torch.dtype:
        """What statistics are computed in: float32, or float64."""
        return torch.float64 if self._any.dtype == torch.float64 else torch.float32

    @property
    def _any(self) -> Tensor:
        seen = self.q if self.logits is None else self.logits
        assert seen is not None
        return seen

    def block(
        self, batch: Part = slice(None), heads: Part = slice(None), rows: Part = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of a part of the call and where they count (None: everywhere), [b', h', n', m'].

        Each part is a slice or a tensor of positions. Masked logits keep the value they had; keys
        that no row of a causal slice reaches are left away, else m' = m.
        """
        if self.logits is not None:
            found = working(_cut(self.logits, batch, heads, rows))
            # Not `>`: what is not a number must stay visible.
            return found, ~(found <= lowest(self.logits.dtype))
        reached = rows.stop if self.causal and isinstance(rows, slice) else None
        parts = (batch, heads, rows, slice(reached))
        found = self._products(*parts)
        if self.soft_cap is not None:
            found = self.soft_cap * torch.tanh(found / self.soft_cap)
        if self.bias is not None:
            found = found + _cut(self.bias, *parts)
        return found, self._where(*parts)

    def _products(self, batch: Part, heads: Part, rows: Part, keys: Part) -> Tensor:
        """scale · qᵀk of a part; keys are not repeated for the heads of a group."""
        assert self.q is not None
        assert self.k is not None
        q, k = _cut(self.q, batch, heads, rows).to(self.dtype), self.k[batch][:, :, keys]
        h, g = self.q.shape[1], self.k.shape[1]
        if not (isinstance(heads, slice) and heads == slice(None)):
            k = k[:, torch.arange(h, device=k.device)[heads] // (h // g)]
        k = k.to(self.dtype)
        b, taken, n, width = q.shape
        together = taken // k.shape[1] * n  # not -1, which of an empty batch says nothing
        q = (q * self.scale).reshape(b, k.shape[1], together, width)
        return (q @ k.mT).view(b, taken, n, k.shape[2])

    def _where(self, batch: Part, heads: Part, rows: Part, keys: Part) -> Tensor | None:
        found = None if self.allowed is None else _cut(self.allowed, batch, heads, rows, keys)
        if self.causal:
            _, _, n, m = self.shape
            at = torch.arange(n, device=self.device)[rows]
            past = torch.arange(m, device=self.device)[keys] <= at[:, None]
            found = past[None, None] if found is None else found & past
        return found


def attention_call(
    q: Tensor,
    k: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
    heads: int | None = None,
) -> AttentionCall:
    """The call of q [..., h, n, d_k] and k [..., g, m, d_k] with PyTorch's kind of mask.

    Args:
        mask: boolean (True: may look) or added to the logits, broadcastable to [..., h, n, m];
            see `split_mask`.
        bias: added to the logits before the mask.
        heads: the number of heads, where q [b·h, n, d_k] does not show it; else a third axis from
            the right counts heads if there are four axes and batch if there are three.

    Nothing is copied that need not be; tensors are detached. Raises InputError for shapes that do
    not fit together.
    """
    if q.ndim < 2 or k.ndim != q.ndim:
        raise InputError(
            f"q {list(q.shape)} and k {list(k.shape)} were given; expected [..., h, n, d_k] and "
            "[..., g, m, d_k]"
        )
    q, k = q.detach(), k.detach()
    lead = q.shape[:-2] if q.shape[-3:-2] != k.shape[-3:-2] else None
    if lead is None:
        lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])  # type: ignore[no-untyped-call]
        q, k = q.expand(*lead, *q.shape[-2:]), k.expand(*lead, *k.shape[-2:])
    full = (*lead, q.shape[-2], k.shape[-2])
    allowed, added = (None, None) if mask is None else split_mask(mask.detach())
    added = _summed(None if bias is None else bias.detach(), added)
    return AttentionCall(
        q=_heads_second(q, heads),
        k=_heads_second(k, heads if k.shape[:-2] == lead else None),
        scale=math.nan if scale is None else float(scale),
        bias=None if added is None else _like_logits(added, full, heads),
        allowed=None if allowed is None else _like_logits(allowed, full, heads),
        causal=causal,
        soft_cap=soft_cap,
    )


def logits_call(logits: Tensor, heads: int | None = None) -> AttentionCall:
    """The call whose logits [b, h, n, m] a layer formed itself.

    Also [n, m], [b·h, n, m] (or [b, n, m] of one head), [h, b, n, m] and [..., g, h/g, n, m] where
    `heads` says how many there are.

    >>> logits_call(torch.zeros(6, 5, 5), heads=3).shape
    (2, 3, 5, 5)
    """
    found = logits.detach()
    if found.ndim == 4 and heads is not None and found.shape[1] != heads == found.shape[0]:
        found = found.transpose(0, 1)
    grouped = found.ndim > 4 and heads is not None and found.shape[-3] != heads
    if grouped and found.shape[-4] * found.shape[-3] == heads:
        found = found.flatten(-4, -3)
    return AttentionCall(logits=_heads_second(found, heads), scale=1.0)


def split_mask(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What a mask allows and what it adds: (allowed or None, bias or None).

    A boolean mask allows where it is True. A mask of numbers allows where it is above the values
    that stand for −∞ (−∞ itself, the end of a type, −1e9); if it holds nothing but 0 and
    values of at most −9000 it is as good as boolean and adds nothing.

    >>> split_mask(torch.tensor([0.0, -torch.inf]))
    (tensor([ True, False]), None)
    >>> split_mask(torch.tensor([0.5, -torch.inf]))
    (tensor([ True, False]), tensor([0.5000, 0.0000]))
    """
    if mask.dtype == torch.bool:
        return mask, None
    values = working(mask)
    if ((values == 0) | (values <= _CLOSED)).all():
        allowed = values == 0
        return (None if allowed.all() else allowed), None
    allowed = values > lowest(mask.dtype)
    return allowed, values.masked_fill(~allowed, 0.0)


def lowest(dtype: torch.dtype) -> float:
    """Logits and masks at or below this stand for −∞."""
    return max(torch.finfo(dtype).min / 2, _NOT_ALLOWED)


def _summed(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


def _four(part: Tensor, shape: Sequence[int], name: str) -> Tensor:
    """`part` with four axes, if it can be broadcast to `shape`."""
    found = part.detach()
    found = found.reshape((1,) * (4 - found.ndim) + tuple(found.shape))
    if found.ndim != 4 or any(s not in (1, t) for s, t in zip(found.shape, shape, strict=True)):
        raise InputError(
            f"{name} {list(part.shape)} was given; expected a shape that broadcasts to "
            f"[b, h, n, m] = {list(shape)}"
        )
    return found


def _heads_second(x: Tensor, heads: int | None) -> Tensor:
    """x [..., n, ·] as [b, h, n, ·]."""
    if x.ndim == 2:
        return x[None, None]
    if x.ndim == 3:
        folded = heads if heads and x.shape[0] % heads == 0 else 1
        return x.reshape(-1, folded, *x.shape[1:])
    return x.reshape(-1, *x.shape[-3:])


def _like_logits(part: Tensor, full: Sequence[int], heads: int | None) -> Tensor:
    """A mask or bias of logits [..., h, n, m] = `full` as [b, h, n, m], unexpanded if it can be."""
    if len(full) == 4:
        return part
    if part.ndim <= 2 or all(s == 1 for s in part.shape[:-2]):
        return part.reshape(part.shape[-2:]) if part.ndim > 1 else part
    try:
        part = part.expand(*full[:-2], *part.shape[-2:])
    except RuntimeError as error:
        raise InputError(
            f"a mask {list(part.shape)} was given; expected a shape that broadcasts to the logits "
            f"{list(full)}"
        ) from error
    return _heads_second(part, heads)


def _cut(x: Tensor, *parts: Part) -> Tensor:
    """The parts of the first axes of x; an axis of length one stands for all."""
    for axis, part in enumerate(parts):
        if x.shape[axis] != 1:
            x = x[(slice(None),) * axis + (part,)]
    return x
