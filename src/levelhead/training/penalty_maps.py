"""Attention maps of a live model with their gradients, and the floor under their entropy.

    forward pre-hook → a TorchFunctionMode while the attention module runs → AttentionCall

Axes as in `diagnostics.attention_call`: b batch, h heads, n rows, m keys. Where a fused kernel or
`nn.MultiheadAttention` runs, its q and k are kept and logits are formed again; where a layer forms
logits itself, those that enter its softmax are kept. Nothing that the model computes is changed.

Two examples. A row with all weight on one of four keys has the share 0, a uniform one 1; with the
floor .2 only the first is pulled.

Only forwards with gradients are seen, and the last one of the model counts. Not for compiled models
(whose kernels no mode sees) and not inside reentrant checkpointing; both are named when asked for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_call import AttentionCall, split_mask
from levelhead.diagnostics.intercepts import end_listening
from levelhead.training.penalty_layers import LiveLayers
from levelhead.weights.symmetry_group import GENERATORS

__all__ = ["EntropyFloor", "LiveMaps", "entropy_shares"]

# Logits formed at a time: a few megabytes, which caches hold.
_CHUNK = 2**20
_FACTS = ("scale", "bias", "allowed", "causal", "soft_cap")
Part = slice | Tensor
_MHA = inspect.signature(F.multi_head_attention_forward)
_SDPA_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


def entropy_shares(call: AttentionCall, rows: int | None = None) -> Tensor:
    """Mean over batch and rows of H/log(allowed keys) [h], with gradient; 0 one-hot … 1 uniform.

    Rows with fewer than two keys do not count; 1 where none does. `rows`: that many, evenly spaced,
    are looked at.

    >>> flat = AttentionCall(logits=torch.zeros(1, 1, 2, 4), scale=1.0)
    >>> entropy_shares(flat)
    tensor([1.])
    """
    n = call.shape[2]
    part: Part = slice(None)
    if rows is not None and rows < n:
        part = torch.linspace(0, n - 1, rows, device=call.device).round().long()
    if call.q is None or call.k is None:
        return _shares(*_sums(call, part))
    shares: Tensor = _Chunked.apply(call.q, call.k, call, part)  # type: ignore[no-untyped-call]
    return shares


def _shares(total: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 0, total / count.clamp_min(1), 1.0)


def _sums(call: AttentionCall, part: Part) -> tuple[Tensor, Tensor]:
    """Sum of shares over batch and rows that count [h], and how many these are."""
    logits, allowed = call.block(rows=part)
    if allowed is None:
        share = _entropy(logits) / math.log(max(logits.shape[-1], 2))
        counted = share[:, 0].numel() if logits.shape[-1] > 1 else 0
        return share.sum((0, 2)), share.new_full(share.shape[1:2], counted)
    keys = allowed.expand_as(logits).sum(-1)
    counts = keys >= 2
    # Rows that do not count may hold nothing but −∞, whose slopes would be NaN.
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    entropy = _entropy(logits.masked_fill(~counts[..., None], 0.0))
    share = torch.where(counts, entropy / keys.clamp_min(2).to(entropy).log(), 0.0)
    return share.sum((0, 2)), counts.sum((0, 2)).to(share)


class _Chunked(torch.autograd.Function):
    """Shares [h] of q and k, some sentences at a time, whose logits are formed again backwards."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, call: AttentionCall, part: Part) -> Tensor:
        ctx.save_for_backward(q, k)
        # Without q and k, which would hold on to their own graph.
        ctx.facts = {name: getattr(call, name) for name in _FACTS}
        ctx.part = part
        found = [_sums(each, part) for each in _chunks(q, k, ctx.facts)]
        total = torch.stack([part_total for part_total, _ in found]).sum(0)
        ctx.count = torch.stack([count for _, count in found]).sum(0)
        return _shares(total, ctx.count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, k = ctx.saved_tensors
        slopes = []
        with torch.enable_grad():
            for each in _chunks(q, k, ctx.facts):
                assert each.q is not None
                assert each.k is not None
                leaves = each.q.requires_grad_(), each.k.requires_grad_()
                total, _ = _sums(each, ctx.part)
                slope = torch.where(ctx.count > 0, grad / ctx.count.clamp_min(1), 0.0)
                slopes.append(torch.autograd.grad(total, leaves, slope))
        to_q, to_k = (torch.cat(parts) for parts in zip(*slopes, strict=True))
        return to_q, to_k, None, None


def _chunks(q: Tensor, k: Tensor, facts: Mapping[str, Any]) -> Iterator[AttentionCall]:
    """The call cut along the batch, with q and k cut from the tape."""
    b, h, n, _ = q.shape
    size = max(1, _CHUNK // max(h * n * k.shape[2], 1))
    for start in range(0, max(b, 1), size):
        cut = slice(start, start + size)
        parts = dict(facts)
        for name in ("bias", "allowed"):
            if parts[name] is not None and parts[name].shape[0] == b:
                parts[name] = parts[name][cut]
        yield AttentionCall(q=q[cut].detach(), k=k[cut].detach(), **parts)


def _entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax of the last axis; its slope is -p (log p + H)."""
    found: Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]
    return found


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        # A masked logit has p = 0, and -1e38 · 0 is zero.
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        entropy: Tensor = -(p * log_p).sum(-1)
        ctx.save_for_backward(p, log_p, entropy)
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        p, log_p, entropy = ctx.saved_tensors
        slope: Tensor = -p * (log_p + entropy[..., None]) * grad[..., None]
        return slope


class EntropyFloor:
    """Mean over layers and heads of max(0, floor - share); see `penalties.entropy_floor`."""

    def __init__(self, model: nn.Module, live: LiveLayers, floor: float, rows: int | None) -> None:
        self.live, self.floor, self.rows = live, floor, rows
        with torch.no_grad():
            heads = {view.name: view.heads for view in live.views()}
        self.maps = LiveMaps(model, dict(zip(live.paths, heads.values(), strict=True)))
        # What leaves the function of softmax attention alone leaves its maps alone.
        self.symmetry = tuple(name for name in GENERATORS if name != "score_scale")

    def __call__(self) -> Tensor:
        """The mean, a scalar. Raises InputError for a layer whose maps were not seen."""
        hinges = []
        for calls in self.maps.calls().values():
            for call in calls:
                hinge = (self.floor - entropy_shares(call, self.rows)).clamp_min(0)
                hinges.append(hinge.mean())
        return torch.stack(hinges).mean()

    def advance(self) -> None:
        """Nothing changes with steps."""

    def parameters(self) -> list[nn.Parameter]:
        """The layers' parameters (maps also depend on those of all layers before)."""
        return self.live.parameters()

    def state(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""

    def close(self) -> None:
        """Remove the hooks."""
        self.maps.close()


class LiveMaps:
    """Calls of attention of the last forward of `model`, on the tape; `heads`: path → h."""

    def __init__(self, model: nn.Module, heads: Mapping[str, int]) -> None:
        self.heads = dict(heads)
        self._calls = _Calls()
        self._layers: list[_Layer] = []
        self._handles = [model.register_forward_pre_hook(self._begin)]
        for path in self.heads:
            watched = _Layer(path, self.heads[path], self._calls)
            self._layers.append(watched)
            module = model.get_submodule(path) if path else model
            self._handles.append(module.register_forward_pre_hook(watched.enter))
            self._handles.append(module.register_forward_hook(watched.leave, always_call=True))

    def _begin(self, module: nn.Module, args: Any) -> None:
        for layer in self._layers:
            layer.stop()
        self._calls.clear()

    def calls(self) -> dict[str, list[AttentionCall]]:
        """The calls by layer. Raises InputError if a layer has none."""
        for path in self.heads:
            if not self._calls.get(path):
                raise InputError(
                    f"{path or 'the model'} ran no attention with gradients that could be seen "
                    "since the last forward began: call the model (uncompiled, with gradients) "
                    "before its penalty, or leave the layer out with layers="
                )
        return {path: self._calls[path] for path in self.heads}

    def close(self) -> None:
        """Remove the hooks and forget the calls."""
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            layer.stop()
        self._calls.clear()


class _Calls(dict[str, list[AttentionCall]]):
    """Calls by layer. A copy of the model, which copies its hooks, starts without any."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Calls, ()


class _Layer:
    """Hooks of one attention module: a mode for as long as it runs."""

    def __init__(self, path: str, heads: int, calls: _Calls) -> None:
        self.path, self.heads, self.calls = path, heads, calls
        self.modes: list[_Seeing] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        mode = _Seeing(self.receive)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self.modes.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.modes:
            self.modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End what an interruption (after which torch runs no hook) left listening."""
        while self.modes:
            end_listening(self.modes.pop())

    def receive(self, seen: dict[str, Any]) -> None:
        self.calls.setdefault(self.path, []).append(_call(seen, self.heads))


class _Seeing(TorchFunctionMode):
    """Hands what enters attention kernels and softmaxes to `receive`; calls them as they are."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.receive = receive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader = _READERS.get(func)
        if reader is not None and torch.is_grad_enabled():
            seen = reader(args, kwargs)
            if seen is not None:
                self.receive(seen)
        return func(*args, **kwargs)


# ── what is seen ──


def _from_sdpa(args: Any, kwargs: Any) -> dict[str, Any]:
    given = dict(zip(_SDPA_NAMES, args, strict=False)) | kwargs
    return {
        "q": given["query"],
        "k": given["key"],
        "mask": given.get("attn_mask"),
        "causal": bool(given.get("is_causal")),
        "scale": given.get("scale"),
    }


def _from_softmax(args: Any, kwargs: Any) -> dict[str, Any] | None:
    logits = args[0] if args else kwargs.get("input")
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not isinstance(logits, Tensor) or logits.ndim < 3 or axis not in (-1, logits.ndim - 1):
        return None
    return {"logits": logits}


def _from_mha(args: Any, kwargs: Any) -> dict[str, Any]:
    """q and k of nn.MultiheadAttention, projected once more; rows are [n, b, d] or [n, d]."""
    bound = _MHA.bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    if a["bias_k"] is not None or a["add_zero_attn"] or a["static_k"] is not None:
        raise InputError(
            "this nn.MultiheadAttention adds keys of its own (bias_k, add_zero_attn), which the "
            "entropy floor does not follow: leave the layer out with layers="
        )
    d, h = a["embed_dim_to_check"], a["num_heads"]
    biases = (None, None) if a["in_proj_bias"] is None else a["in_proj_bias"].split(d)[:2]
    if a["use_separate_proj_weight"]:
        weights = a["q_proj_weight"], a["k_proj_weight"]
    else:
        weights = a["in_proj_weight"].split(d)[:2]
    q, k = (
        F.linear(a[name] if a[name].ndim == 3 else a[name][:, None], weight, bias)
        for name, weight, bias in zip(("query", "key"), weights, biases, strict=True)
    )
    q, k = (x.reshape(len(x), -1, h, d // h).permute(1, 2, 0, 3) for x in (q, k))
    return {"q": q, "k": k, "mask": _mha_mask(a, q.shape[0], h), "causal": False, "scale": None}


def _mha_mask(a: Mapping[str, Any], b: int, h: int) -> Tensor | None:
    """What MultiheadAttention adds to logits: its boolean masks are True where not to look."""
    found = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = a[name]
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -math.inf)
        if name == "key_padding_mask":
            mask = mask.reshape(b, 1, 1, -1)
        elif mask.ndim == 3:
            mask = mask.reshape(b, h, *mask.shape[1:])
        found = mask if found is None else found + mask
    return found


def _call(seen: dict[str, Any], heads: int) -> AttentionCall:
    if "logits" in seen:
        return AttentionCall(logits=_four(seen["logits"], heads), scale=1.0)
    q, k, mask = _four(seen["q"], heads), _four(seen["k"], heads), seen["mask"]
    scale = 1 / math.sqrt(q.shape[-1]) if seen["scale"] is None else float(seen["scale"])
    allowed, bias = (None, None) if mask is None else split_mask(mask.detach())
    if bias is not None and mask is not None and mask.requires_grad:
        # A learned bias has a gradient, which a call's bias has not: the logits as they are.
        groups = q.shape[1] // k.shape[1]
        logits = scale * q @ k.repeat_interleave(groups, 1).mT + mask
        return AttentionCall(logits=logits, scale=1.0)
    if allowed is not None and allowed.ndim == 3:
        allowed = allowed[:, None]
    if bias is not None and bias.ndim == 3:
        bias = bias[:, None]
    return AttentionCall(q=q, k=k, scale=scale, bias=bias, allowed=allowed, causal=seen["causal"])


def _four(x: Tensor, heads: int) -> Tensor:
    """x [..., n, ·] as [b, h, n, ·]."""
    if x.ndim == 3:
        folded = heads if x.shape[0] % heads == 0 else 1
        return x.reshape(-1, folded, *x.shape[1:])
    return x.reshape(-1, *x.shape[-3:])


_READERS: dict[Any, Callable[[Any, Any], dict[str, Any] | None]] = {
    F.scaled_dot_product_attention: _from_sdpa,
    F.multi_head_attention_forward: _from_mha,
    F.softmax: _from_softmax,
    torch.softmax: _from_softmax,
    Tensor.softmax: _from_softmax,
}
