"""Attention computed from an AttentionView alone, slowly and from the formulas.

Axes. x [n, d] are the tokens that ask, source [m, d_source] those that are looked at. A loop over
heads, no batching; nothing here uses the view's own methods, only its fields.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from levelhead.weights.attention_view import AttentionView


def attend(view: AttentionView, x: Tensor, source: Tensor | None = None, first: int = 0) -> Tensor:
    """The layer's output [n, d_out]; `first` is the position of the first token."""
    view = view.map(lambda tensor: tensor.detach().double())
    x = x.detach().double()
    source = x if source is None else source.detach().double()
    n, m = len(x), len(source)
    at_query, at_key = torch.arange(n) + first, torch.arange(m) + first
    queries = torch.stack([x @ view.q[i].T for i in range(view.heads)])
    keys = torch.stack([source @ view.k[g].T for g in range(view.groups)])
    values = torch.stack([source @ view.v[g].T for g in range(view.groups)])
    queries, keys, values = undo_latent(view, queries, keys, values, x, source)
    if view.q_bias is not None:
        queries = queries + view.q_bias[:, None, :]
    if view.k_bias is not None:
        keys = keys + view.k_bias[:, None, :]
    if view.v_bias is not None:
        values = values + view.v_bias[:, None, :]
    if view.qk_norm is not None and not view.qk_norm.after_rope:
        queries, keys = normed(view, queries, keys)
    if view.position.tag == "rope":
        queries = turned(queries, at_query, view.position)
        keys = turned(keys, at_key, view.position)
    if view.qk_norm is not None and view.qk_norm.after_rope:
        queries, keys = normed(view, queries, keys)
    out = torch.zeros(n, view.o.shape[1], dtype=torch.float64)
    for i, g in enumerate(view.kv_group):
        logits = queries[i] @ keys[g].T
        logits = logits + disentangled(view, i, queries[i], keys[g])
        logits = logits * view.scale
        if view.soft_cap is not None:
            logits = view.soft_cap * torch.tanh(logits / view.soft_cap)
        logits = logits + bias(view, i, at_query, at_key)
        visible = torch.ones(n, m, dtype=torch.bool)
        for a in range(n):
            for b in range(m):
                distance = int(at_query[a] - at_key[b])
                if view.mask.causal and distance < 0:
                    visible[a, b] = False
                if view.mask.window is not None and abs(distance) > view.mask.window:
                    visible[a, b] = False
        weights = torch.softmax(logits.masked_fill(~visible, -math.inf), dim=-1)
        out = out + weights @ values[g] @ view.o[i].T
    return out if view.o_bias is None else out + view.o_bias


def undo_latent(
    view: AttentionView, queries: Tensor, keys: Tensor, values: Tensor, x: Tensor, source: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide by the root mean squares inside low-rank projections."""
    latent = view.latent
    if latent is None:
        return queries, keys, values
    if latent.query is not None:
        inner = x @ latent.query.T
        queries = queries / (inner.square().mean(-1, keepdim=True) + latent.eps).sqrt()
    inner = source @ latent.source.T
    size = (inner.square().mean(-1, keepdim=True) + latent.eps).sqrt()
    first, count = latent.plain
    kept = torch.zeros(keys.shape[-1], dtype=torch.bool)
    kept[first : first + count] = True
    return queries, torch.where(kept, keys, keys / size), values / size


def normed(view: AttentionView, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys after the layer's QK-norm."""
    norm = view.qk_norm
    assert norm is not None

    def one(rows: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        heads, n, width = rows.shape
        joined = rows.permute(1, 0, 2).reshape(n, 1, -1) if norm.over == "all" else rows
        if norm.kind == "layer":
            joined = joined - joined.mean(-1, keepdim=True)
        if norm.kind == "l2":
            joined = joined / joined.norm(dim=-1, keepdim=True)
        else:
            joined = joined / (joined.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        if norm.over == "all":
            joined = joined.reshape(n, heads, width).permute(1, 0, 2)
        if gain is not None:
            joined = joined * (gain if gain.ndim == 1 else gain[:, None, :])
        if shift is not None:
            joined = joined + (shift if shift.ndim == 1 else shift[:, None, :])
        return joined

    return one(queries, norm.q_gain, norm.q_shift), one(keys, norm.k_gain, norm.k_shift)


def turned(rows: Tensor, at: Tensor, rope) -> Tensor:
    """Rotate plane f of every token by position · θ_f, and stretch it by the temperature."""
    rows = rows.clone()
    half = rope.width // 2
    for f in range(half):
        if rope.rescaled is not None:
            theta = rope.rescaled[f]
        else:
            theta = rope.theta ** (-2 * f / rope.width)
        if rope.layout == "half":
            even, odd = rope.offset + f, rope.offset + f + half
        else:
            even, odd = rope.offset + 2 * f, rope.offset + 2 * f + 1
        cos, sin = torch.cos(at * theta), torch.sin(at * theta)
        a, b = rows[..., even].clone(), rows[..., odd].clone()
        rows[..., even] = (a * cos - b * sin) * rope.temperature
        rows[..., odd] = (a * sin + b * cos) * rope.temperature
    return rows


def bias(view: AttentionView, head: int, at_query: Tensor, at_key: Tensor) -> Tensor:
    """What ALiBi or a learned table adds to scaled logits [n, m]."""
    position = view.position
    found = torch.zeros(len(at_query), len(at_key), dtype=torch.float64)
    if position.tag == "alibi":
        distance = at_query[:, None] - at_key[None, :]
        return -position.slopes[head] * distance.double()
    if position.tag == "relative" and position.kind == "t5":
        for a, p in enumerate(at_query.tolist()):
            for b, q in enumerate(at_key.tolist()):
                found[a, b] = position.table[head, t5_bucket(q - p, position)]
    elif position.tag == "relative":
        height, width = position.window
        places = [(r, c) for r in range(height) for c in range(width)]
        shift = (2 * height - 1) * (2 * width - 1)
        for a in range(len(at_query)):
            for b in range(len(at_key)):
                if a == 0 or b == 0:
                    entry = shift + (2 if a == b else 0 if a == 0 else 1)
                else:
                    (r, c), (s, d) = places[a - 1], places[b - 1]
                    entry = (r - s + height - 1) * (2 * width - 1) + c - d + width - 1
                found[a, b] = position.table[head, entry]
    return found


def t5_bucket(distance: int, position) -> int:
    """Bucket of key minus query position (Raffel et al. 2020, and the code they released)."""
    buckets, start = position.table.shape[1], 0
    if position.bidirectional:
        buckets //= 2
        start = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    grown = math.log(distance / exact) / math.log(position.max_distance / exact)
    return start + min(exact + int(grown * (buckets - exact)), buckets - 1)


def disentangled(view: AttentionView, head: int, queries: Tensor, keys: Tensor) -> Tensor:
    """DeBERTa's two terms [n, n], before scaling (He et al. 2021, eq. 4)."""
    position = view.position
    found = torch.zeros(len(queries), len(keys), dtype=torch.float64)
    if position.tag != "disentangled":
        return found
    span = position.span

    def place(distance: int) -> int:
        mid = position.buckets // 2
        if position.buckets and abs(distance) > mid:
            grown = math.log(abs(distance) / mid) / math.log((position.max_distance - 1) / mid)
            size = math.ceil(grown * (mid - 1)) + mid
            distance = size if distance > 0 else -size
        return min(max(distance + span, 0), 2 * span - 1)

    for a in range(len(queries)):
        for b in range(len(keys)):
            if position.key is not None:
                row = position.key[head] @ position.embeddings[place(a - b)]
                row = row if position.key_bias is None else row + position.key_bias[head]
                found[a, b] += queries[a] @ row
            if position.query is not None:
                row = position.query[head] @ position.embeddings[place(a - b)]
                row = row if position.query_bias is None else row + position.query_bias[head]
                found[a, b] += keys[b] @ row
    return found
