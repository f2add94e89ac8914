"""Sees attention happen inside a module's forward, whatever wrote it, and changes nothing.

`Listening` is a TorchFunctionMode that is active for the forward of one attention module. It looks
at the arguments of what is called and hands the very same result on:

* `F.scaled_dot_product_attention`: queries, keys, mask and scale as given;
* `F.multi_head_attention_forward`: queries and keys computed again from its arguments;
* a softmax over the last axis (torch.softmax, F.softmax, Tensor.softmax): its input counts as the
  logits of attention if its result, through dropout, casts, reshapes, products with head masks and
  slices of at least half its size, becomes a factor of a matrix product (matmul, @, bmm, baddbmm,
  einsum): that is weighing values. A softmax that routes, gates or pools otherwise is not taken.

The first of them counts. Statistics are computed there and then, without gradient, autocast or
any mode of the caller's, on detached tensors: nothing is stored for the backward pass, no random
number is drawn, and activation checkpointing's own modes do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from levelhead.diagnostics.attention_call import AttentionCall, logits_call
from levelhead.diagnostics.torch_attention import function_call, sdpa_call

__all__ = ["FAILURES", "Listening", "aside", "end_listening", "full_precision", "why_not"]

# What computing on tensors of the user's may raise: shapes, memory, unsupported types and devices.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError)

_SOFTMAX = frozenset((torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax))
_PRODUCTS = frozenset(
    (
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        torch.bmm,
        Tensor.bmm,
        torch.mm,
        Tensor.mm,
        torch.baddbmm,
        Tensor.baddbmm,
        torch.einsum,
        torch.functional.einsum,
        torch.tensordot,
    )
)

Look = Callable[[Callable[[], AttentionCall], Sequence[Tensor]], None]


class Listening(TorchFunctionMode):
    """Looks for the first attention among the functions that are called while it is active.

    Args:
        look: called with a function that makes the AttentionCall and the tensors it is made from;
            must not raise but for an interruption.
        active: whether to look at all: of nested attention modules only the innermost is.
        heads: the number of heads, where shapes do not show it.

    After `close` `unweighed` is the shape of a softmax that was seen but weighed no values.
    """

    def __init__(self, look: Look, active: Callable[[], bool], heads: int | None = None) -> None:
        super().__init__()
        self._look, self._active, self._heads = look, active, heads
        self._done = False
        # By identity: the tensor (kept, so that its identity stays its own) and the logits.
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}
        self.unweighed: tuple[int, ...] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` and look at what went in; the result is handed on as it is."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not torch.compiler.is_compiling() and not self._done and self._active():
            self._heard(func, args, kwargs, result)
        return result

    def close(self) -> None:
        """Forget all tensors."""
        if not self._done and self._weights:
            _, logits = next(iter(self._weights.values()))
            self.unweighed = tuple(logits.shape)
        self._weights.clear()

    def _heard(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if func is F.scaled_dot_product_attention:
            tensors = [t for t in (*args[:4], *kwargs.values()) if isinstance(t, Tensor)]
            self._found(lambda: sdpa_call(args, kwargs, self._heads), tensors)
        elif func is F.multi_head_attention_forward:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            self._found(lambda: function_call(args, kwargs), tensors)
        elif func in _SOFTMAX:
            self._softmax(args, kwargs, result)
        elif self._weights:
            self._follow(func, args, kwargs, result)

    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given = args[0] if args else kwargs.get("input")
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        if not (isinstance(given, Tensor) and isinstance(result, Tensor) and given.ndim >= 2):
            return
        if isinstance(axis, int) and axis in (-1, given.ndim - 1):
            self._weights[id(result)] = (result, given)

    def _follow(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        known = [self._weights[id(t)] for t in _tensors(args, kwargs) if id(t) in self._weights]
        if not known:
            return
        weights, logits = known[0]
        if func in _PRODUCTS:
            self._found(lambda: logits_call(logits, self._heads), (logits,))
        elif isinstance(result, Tensor) and 2 * result.numel() >= weights.numel():
            self._weights.setdefault(id(result), (result, logits))

    def _found(self, make: Callable[[], AttentionCall], tensors: Sequence[Tensor]) -> None:
        self._done = True
        self._weights.clear()
        self._look(make, tensors)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for given in (*args, *kwargs.values()):
        if isinstance(given, Tensor):
            yield given
        elif isinstance(given, (list, tuple)):
            yield from (t for t in given if isinstance(t, Tensor))


def why_not(tensors: Sequence[Tensor]) -> str | None:
    """Why statistics of these tensors cannot be computed here, in a clause; None if they can.

    >>> why_not([torch.ones(2)]), why_not([torch.ones(2, device="meta")])
    (None, 'its tensors are on the meta device and hold no values')
    """
    for tensor in tensors:
        if tensor.device.type == "meta":
            return "its tensors are on the meta device and hold no values"
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return "it ran inside a torch.func transform"
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"its tensors are {type(tensor).__name__}s, not plain tensors"
        if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "it ran while a CUDA graph was captured"
    tracing = torch._C._get_tracing_state() is not None
    return "it ran while being traced" if tracing else None


def end_listening(mode: TorchFunctionMode) -> None:
    """Leave a mode, even if an interruption left it below other modes of this thread."""
    above = []
    while (count := torch._C._len_torch_function_stack()) > 0:
        top = torch._C._get_function_stack_at(count - 1)
        torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


@contextmanager
def aside() -> Iterator[None]:
    """Compute beside a run: no gradient, none of the modes that are active; autocast as it is."""
    with (
        torch.no_grad(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast: what is computed in float32 stays there."""
    if not torch.amp.is_autocast_available(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield
