"""Tucker and CP fits of a layer's tensors, as rows of a table.

Axes as in `attention_view`. Fitted are 𝓑 [h, d, d_source] and 𝓜 [h, d_out, d_source], from their
factors, and the raw head tensor T [h, d_k, d, 3], whose components depend on the basis and are
labelled so: only of T can one ask how much of a component lies in q, in k and in v.

Two examples. `ranks=(8, 16)` with CP fits eight and then sixteen components. `ranks=(8, 32, 32)`
with Tucker keeps 8 directions over heads and 32 on either side; T has 32 along d_k and d as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.progress import progress
from levelhead.invariants.raw import has_raw_tensor
from levelhead.tensors.cp import CPTensor, cp, largest_useful_rank
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.tucker import TuckerTensor, tucker, tucker_of_stack
from levelhead.weights.attention_view import AttentionView

__all__ = ["Fits", "Method", "checked_ranks", "decomposed"]

Method = Literal["tucker", "cp"]
_BASIS = "basis dependent"


@dataclass(frozen=True, eq=False)
class Fits:
    """`rows` of the table, and for CP the shares [R, 3] of q, k and v in the largest fit of T.

    `degenerate`: whether that fit is, so that its components grow and cancel. `said`: sentences on
    what was fitted in place of what was asked for.
    """

    rows: tuple[dict[str, object], ...]
    shares: NDArray[np.float64] | None = None
    degenerate: bool = False
    said: tuple[str, ...] = ()


def checked_ranks(method: str | None, ranks: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Ranks as they were meant. Raises InputError for a method or ranks that cannot be used."""
    if method not in (None, "tucker", "cp"):
        raise InputError(f"decompose={method!r} was given; expected 'tucker' or 'cp'")
    if ranks is None:
        return None
    if method is None:
        raise InputError("ranks were given without a decomposition: say which, tucker or cp")
    given = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    if not given or not all(is_whole(r) for r in given):
        raise InputError(f"ranks {ranks!r} were given; expected whole numbers from 1 on")
    if method == "tucker" and len(given) != 3:
        raise InputError(
            f"{len(given)} ranks were given; tucker needs three: of heads, and of both sides"
        )
    return given


def decomposed(
    layer: AttentionView,
    method: Method,
    ranks: tuple[int, ...] | None,
    show_progress: bool | None = False,
) -> Fits:
    """Fits of a folded layer's 𝓑, 𝓜 and T (where it exists), each error that of the residual.

    Raises InputError for a CP rank with which every tensor of these sizes is exact.
    """
    tensors: dict[str, Tensor | LowRankStack] = {"qk": layer.qk, "ov": layer.ov}
    if (reason := has_raw_tensor(layer)) is None:
        tensors["raw"] = layer.head_tensor()
    wanted = sorted(set(ranks or (layer.heads,)))
    if method == "cp":
        _check_ranks(layer.name, tensors, wanted)
    rows: list[dict[str, object]] = []
    said: list[str] = []
    largest: CPTensor | None = None
    count = len(tensors) * (len(wanted) if method == "cp" else 1)
    with progress(f"fits of {layer.name}", count, enabled=show_progress) as advance:
        for name, tensor in tensors.items():
            about = {"layer": layer.name, "tensor": name, "method": method}
            kind = _BASIS if name == "raw" else "of the forms"
            if method == "tucker":
                fit = _tucker(tensor, ranks or (layer.heads, layer.d_k, layer.d_k))
                size = "×".join(str(n) for n in fit.core.shape)
                told = _told(fit.relative_error, fit.sweeps)
                rows.append({**about, "rank": size, **told, "is": kind})
                if ranks is not None and any(
                    r > n for r, n in zip(ranks, tensor.shape, strict=False)
                ):
                    said.append(f"Tucker ranks above the sizes of {name} were cut to {size}.")
                advance()
                continue
            for rank in wanted:
                found = _cp(tensor, rank)
                state = f"degenerate; {kind}" if found.degenerate else kind
                told = _told(found.relative_error, found.sweeps)
                rows.append({**about, "rank": str(rank), **told, "is": state})
                largest = found if name == "raw" else largest
                advance()
    if reason is not None:
        about = {"layer": layer.name, "tensor": "raw", "method": method, "rank": "none"}
        rows.append({**about, **_told(float("nan"), 0), "is": reason})
    if largest is None:
        return Fits(tuple(rows), said=tuple(said))
    shares = largest.shares().mT.cpu().numpy()
    return Fits(tuple(rows), shares, largest.degenerate, tuple(said))


def _check_ranks(
    layer: str, tensors: Mapping[str, Tensor | LowRankStack], ranks: Sequence[int]
) -> None:
    shape = min((tuple(t.shape) for t in tensors.values()), key=largest_useful_rank)
    most = largest_useful_rank(shape)
    if max(ranks) > most:
        sizes = " × ".join(map(str, shape))
        raise InputError(
            f"CP rank {max(ranks)} was given for {layer}: {most} components fit every tensor of "
            f"{sizes} exactly; give a smaller one, of the order of its heads"
        )


def _cp(tensor: Tensor | LowRankStack, rank: int) -> CPTensor:
    with warnings.catch_warnings():  # told in the table, for each fit
        warnings.simplefilter("ignore", LevelheadWarning)
        return cp(tensor, rank)


def _tucker(tensor: Tensor | LowRankStack, ranks: tuple[int, ...]) -> TuckerTensor:
    heads, one, two = ranks
    if isinstance(tensor, LowRankStack):
        wanted = [min(r, n) for r, n in zip((heads, one, two), tensor.shape, strict=True)]
        return tucker_of_stack(tensor, wanted)
    wanted = [min(r, n) for r, n in zip((heads, one, two, 3), tensor.shape, strict=True)]
    return tucker(tensor, wanted)


def _told(error: float, sweeps: int) -> dict[str, object]:
    return {"relative_error": error, "sweeps": sweeps}
