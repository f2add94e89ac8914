"""Statistics of every attention map of a model while it runs, without changing the run by a bit.

Two examples. While armed, the first forward of each layer is looked at, and nothing else:

    with MapCapture(model, names) as capture:
        capture.armed = True
        loss = model(batch).loss            # the very same numbers as without
        capture.armed = False
        statistics, unseen = capture.collect(), capture.missing()

A model that torch.compile compiled drops hooks; there `capture.look(model, batch)` runs the
original module once without gradients and puts everything back.

How nothing changes. Hooks exist while armed only: a disarmed model has none. A pre-hook starts to
listen (`intercepts.Listening`) for the duration of that one module's forward and a hook ends it,
also after an exception. Layers below an `nn.TransformerEncoderLayer` are watched through global
hooks, since that layer leaves its fast path for a slower one of other rounding when it has a hook
anywhere below; for the same reason nothing listens inside an `nn.MultiheadAttention`, whose
arguments are read instead. Statistics are taken from detached tensors at once. Only the thread that
armed is looked at.

Layers that are called more than once in a forward (ALBERT's shared one, a recomputation of
gradient checkpointing, micro-batches) are looked at the first time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.nn.modules.module as hooks
from torch import Tensor, nn

from levelhead.diagnostics.attention_maps import AttentionCall, MapStatistics, map_statistics
from levelhead.diagnostics.finding import Found, fast_path_at, find_modules
from levelhead.diagnostics.intercepts import (
    FAILURES,
    Listening,
    aside,
    end_listening,
    full_precision,
    why_not,
)
from levelhead.diagnostics.looking import undisturbed
from levelhead.diagnostics.torch_attention import encoder_layer_call, module_call

__all__ = ["MapCapture", "Probe", "Receive"]

Receive = Callable[[str, AttentionCall], None]

_DROPPED = (
    "torch.compile drops hooks: look at the original with capture.look(model, batch) (when "
    "watching: give probe_batch), or run it uncompiled"
)
_FAST = (
    "an nn.MultiheadAttention in it may take PyTorch's fast path, which listening would turn off: "
    "name that module itself, or look while training"
)
# Implementations of transformers that call nothing of PyTorch's that could be heard; the second
# kind hides its masks from a probe as well.
_KERNELS = {
    "flash": "flash-attn's kernels",
    "sage": "SageAttention's kernels",
    "kernels-": "a kernel",
}
_MASKED = {"flex": "flex_attention", "paged": "paged attention"}


class Probe(Protocol):
    """Something that sees calls of attention by its own means, such as a library's registry."""

    def attach(self, model: nn.Module, receive: Receive) -> AbstractContextManager[object]:
        """Until left, hand each call over: `receive(path of the module, call)`."""
        ...


class MapCapture:
    """Looks at the attention maps of the named layers whenever it is armed; a context manager.

    Args:
        model: the model, compiled or wrapped as it may be.
        layers: names of attention layers, as AttentionViews have them.
        probes: further ways to see calls; attached while armed, and the first to see a layer wins.
        heads: number of heads by layer, where a module folds batch and heads into one axis and has
        no
            attribute num_heads (or alike) to tell.
        matrices: see `map_statistics`.

    Raises InputError for a layer that is no module of the model.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> with MapCapture(model, [""]) as capture:
    ...     capture.armed = True
    ...     x = torch.zeros(3, 1, 8)
    ...     _ = model(x, x, x)
    ...     found = capture.collect()[""]
    >>> [round(float(share), 4) for share in found.entropy_share], capture.missing()
    ([1.0, 1.0], {})
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        probes: Sequence[Probe] = (),
        *,
        heads: Mapping[str, int] | None = None,
        matrices: int = 64,
    ) -> None:
        self._model, self._layers, self._probes = model, tuple(layers), tuple(probes)
        self._heads, self._matrices = dict(heads or {}), matrices
        self._results: dict[str, MapStatistics] = {}
        self._reasons: dict[str, str] = {}
        self._covered: set[str] = set()
        self._armed = self._was_armed = False
        self._exit = ExitStack()
        self._watched: dict[int, list[Found]] = {}
        self._seen: set[str] = set()
        self._open: list[tuple[int, Listening | None]] = []
        self._thread = 0
        self._find()
        for probe in self._probes:
            # A probe that does not fit says so now, not in the middle of training.
            with probe.attach(model, _ignore):
                pass

    # ── arming ──

    @property
    def armed(self) -> bool:
        """Whether the next forward is looked at; hooks exist only while it is."""
        return self._armed

    @armed.setter
    def armed(self, wanted: bool) -> None:
        if wanted and not self._armed:
            self._arm(compiled=False)
        elif not wanted:
            self._disarm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disarm()

    def collect(self) -> dict[str, MapStatistics]:
        """Statistics by layer since the last collection, which are forgotten here.

        If still armed, the next forward of each layer is looked at again.
        """
        found, self._results, self._seen = self._results, {}, set()
        return found

    def missing(self) -> dict[str, str]:
        """Layers of which no attention was seen so far though armed: why, and what to do."""
        if not self._was_armed:
            return {}
        return {n: self._reasons[n] for n in self._layers if n not in self._covered}

    def look(self, model: nn.Module, batch: object) -> dict[str, MapStatistics]:
        """Statistics by layer of one forward of `model` on `batch`, eager also if it is compiled.

        `batch` is a mapping (keyword arguments), a tuple or list (arguments) or the one argument.
        The model runs in eval mode without gradients; modes, buffers and random state are put back.
        Whatever the forward raises is the caller's. An arming goes on as before.
        """
        pending = self._results, self._seen, self._armed
        self._disarm()
        self._results, self._seen = {}, set()
        try:
            with undisturbed(model) as original:
                self._arm(compiled=True)
                if isinstance(batch, Mapping):
                    original(**batch)
                elif isinstance(batch, tuple | list):
                    original(*batch)
                else:
                    original(batch)
                return self.collect()
        finally:
            self._disarm()
            self._results, self._seen, armed = pending
            if armed:
                self._arm(compiled=False, again=True)

    # ── hooks ──

    def _find(self) -> list[Found]:
        return find_modules(self._model, self._layers, self._heads)

    def _arm(self, *, compiled: bool, again: bool = False) -> None:
        """Place hooks; on layers that torch.compile hides only if `compiled` (they run eager)."""
        found = self._find()
        self._reasons |= {f.name: _unseen(f) for f in found}
        self._thread, self._open = threading.get_ident(), []
        if not again:
            self._seen = set()
        hidden = [] if compiled else [f for f in found if f.compiled is not None]
        self._reasons |= {f.name: f"{f.compiled} is compiled, and {_DROPPED}" for f in hidden}
        self._watched = {}
        for f in (f for f in found if f not in hidden):
            self._watched.setdefault(id(f.module), []).append(f)
            if f.around is not None:
                self._watched.setdefault(id(f.around), [])
        self._armed = self._was_armed = True
        # What a probe changes for its time would have compiled code compiled again.
        for probe in self._probes if not hidden else ():
            self._exit.enter_context(probe.attach(self._model, self._received))
        self._hook([f for f in found if f not in hidden])

    def _hook(self, found: Sequence[Found]) -> None:
        if any(f.around is not None for f in found):
            before = hooks.register_module_forward_pre_hook(self._before)
            after = hooks.register_module_forward_hook(
                self._after, with_kwargs=True, always_call=True
            )
            self._exit.callback(before.remove)
            self._exit.callback(after.remove)
            # The handle forgets one of the three tables that the hook stands in.
            self._exit.callback(hooks._global_forward_hooks_with_kwargs.pop, after.id, None)
            return
        for module in {id(f.module): f.module for f in found}.values():
            first = module.register_forward_pre_hook(self._before)
            last = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._exit.callback(first.remove)
            self._exit.callback(last.remove)

    def _disarm(self) -> None:
        self._armed = False
        while self._open:
            self._close()
        self._exit.close()
        self._watched = {}

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or id(module) not in self._watched:
            return
        if threading.get_ident() != self._thread:
            return
        found = self._watched[id(module)]
        listening = None
        heard = [f.name for f in found if f.way == "listen" and f.name not in self._seen]
        if heard and fast_path_at(module):
            self._reasons |= dict.fromkeys(heard, _FAST)
        elif heard:
            mine = len(self._open)

            def look(make: Callable[[], AttentionCall], tensors: Sequence[Tensor]) -> None:
                self._look(found, make, tensors)

            listening = Listening(look, lambda: self._innermost(mine), found[0].heads)
            listening.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((id(module), listening))

    def _after(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """`rest`: keyword arguments and result; the result alone after an exception."""
        if torch.compiler.is_compiling() or id(module) not in self._watched:
            return
        if threading.get_ident() != self._thread or not self._open:
            return
        while self._open and self._close() != id(module):
            continue
        if len(rest) < 2 or rest[1] is None:
            return
        kwargs = rest[0]
        found = [f for f in self._watched[id(module)] if f.way == "module"]
        if found:
            mha = found[0].module
            assert isinstance(mha, nn.MultiheadAttention)
            self._look(found, lambda: module_call(mha, args, kwargs), _among(args, kwargs))
        if isinstance(module, nn.TransformerEncoderLayer):
            inner = [f for f in self._watched.get(id(module.self_attn), []) if f.way == "module"]
            if type(module).forward is nn.TransformerEncoderLayer.forward:
                tensors = _among(args, kwargs)
                self._look(inner, lambda: encoder_layer_call(module, args, kwargs), tensors)

    def _close(self) -> int:
        """End the innermost open forward; its module's identity."""
        ident, listening = self._open.pop()
        if listening is not None:
            end_listening(listening)
            listening.close()
            for f in self._watched.get(ident, []):
                if f.name not in self._seen and listening.unweighed is not None:
                    self._reasons[f.name] = (
                        f"it took a softmax of shape {list(listening.unweighed)}, but no matrix "
                        "product with the result was seen: pass a probe that knows this layer"
                    )
        return ident

    def _innermost(self, place: int) -> bool:
        return len(self._open) == place + 1

    # ── what was seen ──

    def _received(self, path: str, call: AttentionCall) -> None:
        """A probe's call: for the layer of that path, the one around it or the only one below."""
        around = [n for n in self._layers if path == n or path.startswith(f"{n}." if n else "")]
        below = [n for n in self._layers if n.startswith(f"{path}.")]
        name = max(around, key=len) if around else below[0] if len(below) == 1 else None
        if name is not None:
            tensors = [t for t in (call.q, call.k, call.logits) if t is not None]
            found = [f for fs in self._watched.values() for f in fs if f.name == name]
            self._look(found, lambda: call, tensors)

    def _look(
        self,
        found: Sequence[Found],
        make: Callable[[], AttentionCall],
        tensors: Sequence[Tensor],
    ) -> None:
        """Statistics for layers not seen yet; a failure becomes the reason why they are missing."""
        names = [f.name for f in found if f.name not in self._seen]
        if not names:
            return
        self._seen.update(names)
        try:
            reason = why_not(tensors)
            if reason is None:
                with aside():
                    call = make()
                    with full_precision(call.device):
                        statistics = map_statistics(call, matrices=self._matrices)
        except FAILURES as error:
            told = str(error).strip().partition("\n")[0] or "no reason was given"
            reason = f"its statistics failed ({type(error).__name__}: {told})"
        if reason is not None:
            remedy = "look at a plain eager forward with capture.look(model, batch)"
            self._reasons |= dict.fromkeys(names, f"{reason}: {remedy}")
            return
        self._covered.update(names)
        self._results |= dict.fromkeys(names, statistics)


def _ignore(path: str, call: AttentionCall) -> None:
    """Receives nothing."""


def _among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]


def _unseen(found: Found) -> str:
    """Why a layer whose attention was never seen may not have been, as far as can be told."""
    chosen = found.implementation or ""
    for start, what in {**_KERNELS, **_MASKED}.items():
        if start in chosen:
            probe = "pass levelhead.adapters.transformers.attention_probe() as a probe, or "
            return (
                f"it runs {what} ({chosen}), which calls no function of PyTorch's that could be "
                f"seen: {probe if start in _KERNELS else ''}choose attn_implementation='sdpa'"
            )
    compiled = ""
    if "torch._dynamo" in sys.modules:
        compiled = f", or it ran inside a function compiled by torch.compile ({_DROPPED})"
    return (
        "no attention was seen: either it was not called as a module in the forward that was "
        f"looked at{compiled}, or it weighs values by other means than "
        "scaled_dot_product_attention, PyTorch's multi-head functions or a softmax (then pass a "
        "probe that knows it)"
    )
