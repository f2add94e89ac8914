"""Small layers of every kind, and a differentiable twin of what a layer computes.

Axes as in `attention_view`. `LAYERS` names a maker for each kind; every maker takes a seed. Norms
have eps 0, so that their scale symmetries are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from levelhead.weights.attention_view import AttentionView
from levelhead.weights.structure import (
    Alibi,
    Disentangled,
    InputNorm,
    Latent,
    Mask,
    QKNorm,
    Relative,
    Rope,
)


def layer(
    seed: int = 0,
    *,
    h: int = 4,
    g: int | None = None,
    d_k: int = 4,
    d_v: int | None = None,
    d: int = 10,
    source: int | None = None,
    out: int | None = None,
    biases: str = "",
    **facts: Any,
) -> AttentionView:
    """A layer of random float64 weights; `biases` names those that it has, by letters of qkvo."""
    random = torch.Generator().manual_seed(seed)
    g, d_v, source, out = g or h, d_v or d_k, source or d, out or d

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) * shape[-1] ** -0.5

    weights = {"q": normal(h, d_k, d), "k": normal(g, d_k, source), "v": normal(g, d_v, source)}
    weights["o"] = normal(h, out, d_v)
    shapes = {"q": (h, d_k), "k": (g, d_k), "v": (g, d_v), "o": (out,)}
    given = {f"{n}_bias": normal(*shapes[n]) for n in biases}
    for name, fact in facts.items():
        if callable(fact):
            facts[name] = fact(normal)
    return AttentionView(**weights, **given, **facts)


def gains(kind: str = "rms", over: str = "head", *, q: tuple = (), k: tuple = (), **more: Any):
    """A norm of queries and keys with positive gains of shapes q and k (none: no gain)."""

    def make(normal: Callable[..., Tensor]) -> QKNorm:
        one, two = (normal(*s).exp() if s else None for s in (q, k))
        shifts = {n: normal(*s) for n, s in more.items() if n.endswith("shift")}
        rest = {n: v for n, v in more.items() if not n.endswith("shift")}
        return QKNorm(kind, over, one, two, 0.0, **shifts, **rest)  # type: ignore[arg-type]

    return make


def disentangled(h: int, d_k: int, d: int, *, query: bool = True):
    """DeBERTa's terms over seven distances."""

    def make(normal: Callable[..., Tensor]) -> Disentangled:
        one = normal(h, d_k, d) if query else None
        bias = normal(h, d_k) if query else None
        return Disentangled(normal(8, d), one, normal(h, d_k, d), bias, normal(h, d_k), 4)

    return make


def input_norm(kind: str, *, gain: bool = True, bias: bool = False, d: int = 10, **more: Any):
    """The norm in front."""

    def make(normal: Callable[..., Tensor]) -> InputNorm:
        return InputNorm(
            kind,  # type: ignore[arg-type]
            normal(d).exp() if gain else None,
            normal(d) if bias else None,
            **more,
        )

    return make


def latent(d: int = 10, d_k: int = 4):
    """Low-rank norms; the last two rows of keys are plain and turn."""

    def make(normal: Callable[..., Tensor]) -> Latent:
        return Latent(normal(3, d), normal(3, d), 0.0, (d_k - 2, 2))

    return make


def _tied(seed: int, **facts: Any) -> AttentionView:
    view = layer(seed, tied=True, **facts)
    return replace(view, k=view.q)


LAYERS: dict[str, Callable[[int], AttentionView]] = {
    "plain": layer,
    "biased": lambda s: layer(s, biases="qkvo", mask=Mask(causal=True)),
    "wide values": lambda s: layer(s, d_v=5, d_k=3, out=7, biases="qo"),
    "wide keys": lambda s: layer(s, h=2, d_k=6, d_v=2, d=4),
    "grouped": lambda s: layer(s, h=6, g=2, d_k=3, biases="qkvo"),
    "uneven groups": lambda s: layer(s, h=4, g=2, kv_group=(0, 1, 1, 1), d_k=2),
    "one group": lambda s: layer(s, h=4, g=1, d_k=3),
    "half rotary": lambda s: layer(s, position=Rope("half", 4, 100.0), biases="qkvo"),
    "interleaved rotary": lambda s: layer(s, h=4, g=2, position=Rope("interleaved", 4, 100.0)),
    "partly rotary": lambda s: layer(
        s, d_k=7, g=2, position=Rope("half", 4, 100.0, 1, temperature=1.2), biases="qkvo"
    ),
    "partly still": lambda s: layer(
        s, d_k=6, position=Rope("interleaved", 6, 100.0, rescaled=(1.0, 0.3, 0.0))
    ),
    "alibi": lambda s: layer(s, position=Alibi((0.5, 0.25, 0.5, 0.125)), biases="qkvo"),
    "steep alibi": lambda s: layer(s, position=Alibi((0.5, 0.25, 0.1, 0.125))),
    "relative": lambda s: layer(
        s, position=lambda normal: Relative(normal(4, 8), "t5", True, 8), scale=1.0
    ),
    "disentangled": lambda s: layer(s, position=disentangled(4, 4, 10), biases="qkvo"),
    "key positions": lambda s: layer(
        s, position=disentangled(4, 4, 10, query=False), biases="qkvo"
    ),
    "cross": lambda s: layer(s, cross=True, source=7, biases="qvo"),
    "cross of one width": lambda s: layer(s, cross=True, g=2),
    "capped": lambda s: layer(s, soft_cap=2.0, biases="qkvo"),
    "tied": _tied,
    "tied rotary": lambda s: _tied(s, position=Rope("half", 2, 100.0)),
    "linear": lambda s: layer(s, weighting="linear", biases="qkvo"),
    "linear rotary": lambda s: layer(s, weighting="linear", position=Rope("half", 4, 100.0)),
    "normed": lambda s: layer(s, g=2, biases="qkvo", qk_norm=gains()),
    "normed l2": lambda s: layer(s, qk_norm=gains("l2")),
    "normed gains": lambda s: layer(s, g=2, qk_norm=gains(q=(4,), k=(4,))),
    "normed own gains": lambda s: layer(s, g=2, qk_norm=gains(q=(4, 4), k=(2, 4))),
    "normed mixed gains": lambda s: layer(s, g=2, qk_norm=gains(q=(4, 4), k=(4,))),
    "normed one gain": lambda s: layer(s, qk_norm=gains(q=(4,))),
    "normed together": lambda s: layer(
        s, g=2, biases="q", qk_norm=gains("rms", "all", q=(4, 4), k=(2, 4))
    ),
    "normed layer": lambda s: layer(s, g=2, biases="qk", qk_norm=gains("layer")),
    "normed layer affine": lambda s: layer(
        s,
        g=2,
        qk_norm=gains("layer", q=(4,), k=(4,), q_shift=(4,), k_shift=(4,)),
        input_norm=input_norm("rms", gain=False),
    ),
    "normed layer together": lambda s: layer(
        s, g=2, biases="qk", qk_norm=gains("layer", "all", q=(4, 4), k=(2, 4))
    ),
    "normed rotary": lambda s: layer(s, g=2, qk_norm=gains(), position=Rope("half", 2, 100.0)),
    "normed rotary gains": lambda s: layer(
        s, g=2, qk_norm=gains(q=(4,), k=(4,)), position=Rope("half", 4, 100.0)
    ),
    "normed after rotary": lambda s: layer(
        s, qk_norm=gains(q=(4,), k=(4,), after_rope=True), position=Rope("interleaved", 4, 100.0)
    ),
    "normed layer rotary": lambda s: layer(
        s, qk_norm=gains("layer"), position=Rope("interleaved", 4, 100.0)
    ),
    "latent": lambda s: layer(s, latent=latent(), position=Rope("interleaved", 2, 100.0, 2), d_v=3),
    "gain in front": lambda s: layer(s, input_norm=input_norm("rms"), biases="qkvo"),
    "latent gain in front": lambda s: layer(
        s, input_norm=input_norm("rms"), latent=latent(), position=Rope("half", 2, 9.0, 2)
    ),
    "centred in front": lambda s: layer(s, input_norm=input_norm("layer", gain=False)),
    "layer norm gain": lambda s: layer(s, input_norm=input_norm("layer"), g=2),
    "layer norm in front": lambda s: layer(
        s, input_norm=input_norm("layer", bias=True), biases="qkvo", position=Rope("half", 2, 9.0)
    ),
    "layer norm before": lambda s: layer(
        s, input_norm=input_norm("layer", bias=True, position="post"), position=Alibi((1,) * 4)
    ),
    "cross layer norm": lambda s: layer(
        s, input_norm=input_norm("layer", gain=False), cross=True, source=7, biases="v"
    ),
}


# ── what a layer computes, with gradients ──


def front(view: AttentionView, stream: Tensor) -> Tensor:
    """What the layer reads [n, d] of the stream in front of its norm (as if it belonged to it)."""
    norm = view.input_norm
    if norm.kind == "none":
        return stream
    if norm.kind == "layer":
        stream = stream - stream.mean(-1, keepdim=True)
    x = stream / (stream.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.gain is None else x * norm.gain
    return x if norm.bias is None else x + norm.bias


def output(view: AttentionView, x: Tensor, source: Tensor | None = None) -> Tensor:
    """The layer's output [n, d_out] for x [n, d]: softmax or linear, rotary, ALiBi, norms, cap."""
    source = x if source is None else source
    q = torch.einsum("hrd,nd->hnr", view.q, x)
    k = torch.einsum("grd,nd->gnr", view.k, source)
    v = torch.einsum("gvd,nd->gnv", view.v, source)
    q = q if view.q_bias is None else q + view.q_bias[:, None]
    k = k if view.k_bias is None else k + view.k_bias[:, None]
    v = v if view.v_bias is None else v + view.v_bias[:, None]
    norm = view.qk_norm
    steps = [_normed, _turned] if norm is None or not norm.after_rope else [_turned, _normed]
    for step in steps:
        q, k = step(view, q, k)
    groups = list(view.kv_group)
    logits = view.logit_scale * q @ k[groups].mT
    if view.soft_cap is not None:
        logits = view.soft_cap * (logits / view.soft_cap).tanh()
    if view.position.tag == "alibi":
        at = torch.arange(len(source), dtype=x.dtype)
        logits = logits + torch.tensor(view.position.slopes, dtype=x.dtype)[:, None, None] * at
    weights = logits.softmax(-1) if view.weighting == "softmax" else logits
    out = torch.einsum("hmv,hab,hbv->am", view.o, weights, v[groups])
    return out if view.o_bias is None else out + view.o_bias


def _normed(view: AttentionView, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    norm = view.qk_norm
    if norm is None:
        return q, k
    out = []
    for rows, gain, shift in ((q, norm.q_gain, norm.q_shift), (k, norm.k_gain, norm.k_shift)):
        axes = (-1,) if norm.over == "head" else (0, -1)
        if norm.kind == "layer":
            rows = rows - rows.mean(axes, keepdim=True)
        if norm.kind == "l2":
            size = rows.square().sum(axes, keepdim=True).sqrt()
        else:
            size = (rows.square().mean(axes, keepdim=True) + norm.eps).sqrt()
        rows = rows / size
        if gain is not None:
            rows = rows * (gain if gain.ndim == 1 else gain[:, None])
        if shift is not None:
            rows = rows + (shift if shift.ndim == 1 else shift[:, None])
        out.append(rows)
    return out[0], out[1]


def _turned(view: AttentionView, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    rope = view.position
    if not isinstance(rope, Rope):
        return q, k
    out = []
    for rows in (q, k):
        columns = list(rows.unbind(-1))
        at = torch.arange(rows.shape[1], dtype=rows.dtype)
        for (e, o), theta in zip(rope.planes, rope.frequencies, strict=True):
            cos, sin = (theta * at).cos() * rope.temperature, (theta * at).sin() * rope.temperature
            columns[e], columns[o] = (
                columns[e] * cos - columns[o] * sin,
                columns[e] * sin + columns[o] * cos,
            )
        out.append(torch.stack(columns, -1))
    return out[0], out[1]
