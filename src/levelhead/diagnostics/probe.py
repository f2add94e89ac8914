"""What the attention layers and heads of a model make of a probe batch.

A layer's features are what it writes: the output of its output projection. A head's features are
its share of what that projection reads. Both are found through the layout: the stored tensor that
holds o says which module to watch, and which of its inputs belong to which head.

Axes. A row is a token (b·n rows, in the order of the batch), or a sequence, averaged over its
tokens (b rows): layers [rows, d_out], heads [h, rows, d_v]. Rows of tokens from one sequence
depend on each other, so that CKA of unrelated layers is then near 0 less reliably than its
estimator promises for independent rows. Padding counts like any token: leave it out of the batch.

Covered: every layer whose output projection is a module of its own (transformers' families, timm),
and `nn.MultiheadAttention` with the layers built on it, whose heads take a second pass through the
layer with the identity as its projection. Not covered, and named in `missing`: layers with bare
parameters (SAMformer), layers that did not run, outputs that are not tensors. Of a module that
runs more than once (ALBERT) the first call counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from levelhead.base.errors import InputError
from levelhead.diagnostics.looking import unwrapped
from levelhead.diagnostics.undisturbed import (
    kept_buffers,
    kept_random_state,
    own_casts,
    uncompiled,
    uses,
)
from levelhead.weights.layouts import Layout, match
from levelhead.weights.plan import LayerPlan
from levelhead.weights.write_back import placement

__all__ = ["Features", "probe"]

Rows = Literal["tokens", "sequences"]


@dataclass(frozen=True, eq=False)
class Features:
    """Features of a probe batch: by layer [rows, d_out] and of its heads [h, rows, d_v].

    `missing` maps the name of a layer without features to the reason.
    """

    layers: Mapping[str, Tensor] = field(default_factory=dict)
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


def probe(
    model: nn.Module,
    batch: Any,
    layers: Sequence[str] | None = None,
    *,
    rows: Rows = "tokens",
    plans: Sequence[LayerPlan] | None = None,
    layout: Layout | None = None,
) -> Features:
    """Run the model on a batch in eval mode, without gradient, and keep what attention writes.

    Training flags, buffers and random states are bit for bit as before. What torch.compile and
    DistributedDataParallel put around the model is left away: one process alone may probe.

    Args:
        batch: a tensor (the model's one argument), a tuple or list (its arguments) or a mapping
            (its keywords).
        layers: names of attention layers as in their views; None: all that are found.
        rows: what a row of the features is, see the top of this module.
        plans: the layers, by default what `layouts.match(model, layout=layout)` finds.

    Raises InputError for an unknown layer; what the model raises passes through.

    >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> found = probe(model, torch.randn(4, 5, 8))
    >>> {name: x.shape for name, x in found.heads.items()}
    {'self_attn': torch.Size([2, 20, 4])}
    """
    if rows not in ("tokens", "sequences"):
        raise InputError(f"rows = {rows!r} was given; expected 'tokens' or 'sequences'")
    found = match(model, layout=layout).plans if plans is None else plans
    chosen = {plan.name or plan.family: plan for plan in found}
    if layers is not None:
        for name in layers:
            if name not in chosen:
                raise InputError(f"no attention layer is called {name!r}: {_some(chosen)}")
        chosen = {name: chosen[name] for name in layers}
    watch = _Watch(rows)
    with ExitStack() as stack:
        for name, plan in chosen.items():
            stack.enter_context(watch.layer(model, name, plan))
        stack.enter_context(own_casts())
        stack.enter_context(uncompiled())
        stack.enter_context(torch.no_grad())
        stack.enter_context(uses(model, training=False))
        stack.enter_context(kept_buffers(model))
        stack.enter_context(kept_random_state(model.parameters()))
        stack.enter_context(_slow_path())
        _call(unwrapped(model), batch)
    for name in chosen:
        if name not in watch.layers:
            watch.missing.setdefault(name, "its output projection did not run on this batch")
    return Features(watch.layers, watch.heads, watch.missing)


class _Watch:
    """Collects what the hooks of one probe see."""

    def __init__(self, rows: Rows) -> None:
        self.layers: dict[str, Tensor] = {}
        self.heads: dict[str, Tensor] = {}
        self.missing: dict[str, str] = {}
        self._rows = rows

    @contextmanager
    def layer(self, model: nn.Module, name: str, plan: LayerPlan) -> Iterator[None]:
        """Hooks on the layer's output projection while inside."""
        placed = placement(plan)
        stored = placed.stored("o")
        path, _, kind = stored[0].rpartition(".") if len(stored) == 1 else ("", "", "")
        owner = model.get_submodule(plan.name) if plan.name else model
        if isinstance(owner, nn.MultiheadAttention):
            heads, width = plan.sizes.heads, plan.sizes.d_v
            handle = owner.register_forward_hook(
                self._torch_hook(name, heads, width), with_kwargs=True
            )
        elif kind == "weight" and path != plan.name and placed.copied("o"):
            columns = _columns(placed.pieces["o"][0].index, plan, plan.shapes[stored[0]])
            handle = model.get_submodule(path).register_forward_hook(self._hook(name, columns))
        else:
            self.missing[name] = (
                "its output projection is no module of its own, so none can be watched"
            )
            yield
            return
        try:
            yield
        finally:
            handle.remove()

    def _hook(self, name: str, columns: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, out: Any) -> None:
            read = args[0] if args else None
            if name in self.layers or name in self.missing:
                return
            if not isinstance(read, Tensor) or not isinstance(out, Tensor):
                self.missing[name] = (
                    "its output projection reads or writes something else than a tensor"
                )
            elif read.ndim < 2 or read.shape[-1] != columns.numel():
                self.missing[name] = (
                    f"its output projection reads {list(read.shape)}, not its heads"
                )
            else:
                self.layers[name] = self._as_rows(out)
                self.heads[name] = self._split(read[..., columns.to(read.device)])

        return keep

    def _torch_hook(self, name: str, heads: int, width: int) -> Callable[..., None]:
        busy: list[bool] = []

        def keep(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if busy or name in self.layers:
                return
            weight = module.get_parameter("out_proj.weight")
            eye = torch.eye(*weight.shape, dtype=weight.dtype, device=weight.device)
            plain = {"out_proj.weight": eye}
            if isinstance(bias := module.out_proj.bias, Tensor):  # type: ignore[union-attr]
                plain["out_proj.bias"] = torch.zeros_like(bias)
            busy.append(True)
            try:
                inner = functional_call(module, plain, args, kwargs)[0]
            finally:
                busy.clear()
            first = getattr(module, "batch_first", False) or inner.ndim < 3
            written, inner = (t if first else t.transpose(0, 1) for t in (out[0], inner))
            self.layers[name] = self._as_rows(written)
            self.heads[name] = self._split(inner.unflatten(-1, (heads, width)))

        return keep

    def _split(self, read: Tensor) -> Tensor:
        """[…, h, d_v] as [h, rows, d_v]."""
        return torch.stack([self._as_rows(part) for part in read.unbind(-2)])

    def _as_rows(self, x: Tensor) -> Tensor:
        if x.is_nested:
            x = x.to_padded_tensor(0.0)
        if self._rows == "sequences" and x.ndim > 2:
            x = x.flatten(1, -2).mean(1)
        # A copy: what follows in the model may work in place.
        return x.detach().reshape(-1, x.shape[-1]).clone()


def _columns(index: Tensor, plan: LayerPlan, shape: tuple[int, ...]) -> Tensor:
    """Which inputs of the output projection each head writes: [h, d_v].

    `index` are the flat positions of o [h, d_out, d_v] in a stored matrix of this `shape`.
    """
    h, d_v = plan.sizes.heads, plan.sizes.d_v
    at = index.view(h, -1, d_v)
    row, column = at // shape[1], at % shape[1]
    same_row = bool((row == row[:, :1]).all()) and at.shape[1] > 1
    return (row if same_row else column)[:, 0]


@contextmanager
def _slow_path() -> Iterator[None]:
    """PyTorch's fused encoder layer calls no module: hooks would see nothing."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def _some(names: Mapping[str, object]) -> str:
    shown = list(names)[:8]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"there are {', '.join(shown) or 'none'}{more}"
