"""Tucker and CP fits of a layer's tensors, as rows of a table.

Axes as in `attention_view`. Fitted are 𝓑 [h, d, d_source] and 𝓜 [h, d_out, d_source], from their
factors, and the raw head tensor T [h, d_k, d, 3], whose components depend on the basis and are
labelled so: only of T can one ask how much of a component lies in q, in k and in v.

Two examples. `ranks=(8, 16)` with CP fits eight and then sixteen components. `ranks=(8, 32, 32)`
with Tucker keeps 8 directions over heads and 32 on either side; T has 32 along d_k and d as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.invariants.raw import has_raw_tensor
from levelhead.tensors.cp import cp
from levelhead.tensors.low_rank_stack import LowRankStack
from levelhead.tensors.tucker import TuckerTensor, tucker, tucker_of_stack
from levelhead.weights.attention_view import AttentionView

__all__ = ["Fits", "Method", "checked_ranks", "decomposed"]

Method = Literal["tucker", "cp"]
_BASIS = "basis dependent"


@dataclass(frozen=True, eq=False)
class Fits:
    """`rows` of the table, and for CP the shares [R, 3] of q, k and v in the largest fit of T."""

    rows: tuple[dict[str, object], ...]
    shares: NDArray[np.float64] | None = None


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


def decomposed(layer: AttentionView, method: Method, ranks: tuple[int, ...] | None) -> Fits:
    """Fits of a folded layer's 𝓑, 𝓜 and T (where it exists), each error that of the residual."""
    rows: list[dict[str, object]] = []
    shares = None
    tensors: dict[str, Tensor | LowRankStack] = {"qk": layer.qk, "ov": layer.ov}
    if (reason := has_raw_tensor(layer)) is None:
        tensors["raw"] = layer.head_tensor()
    for name, tensor in tensors.items():
        about = {"layer": layer.name, "tensor": name, "method": method}
        kind = _BASIS if name == "raw" else "of the forms"
        if method == "tucker":
            fit = _tucker(tensor, ranks or (layer.heads, layer.d_k, layer.d_k))
            size = "×".join(str(n) for n in fit.core.shape)
            rows.append(
                {**about, "rank": size, **_told(fit.relative_error, fit.sweeps), "is": kind}
            )
            continue
        for rank in sorted(ranks or (layer.heads,)):
            with warnings.catch_warnings():  # told in the table, for each fit
                warnings.simplefilter("ignore", LevelheadWarning)
                found = cp(tensor, rank)
            state = f"degenerate; {kind}" if found.degenerate else kind
            told = _told(found.relative_error, found.sweeps)
            rows.append({**about, "rank": str(rank), **told, "is": state})
            if name == "raw":
                shares = found.shares().mT.cpu().numpy()
    if reason is not None:
        about = {"layer": layer.name, "tensor": "raw", "method": method, "rank": "none"}
        rows.append({**about, **_told(float("nan"), 0), "is": reason})
    return Fits(tuple(rows), shares)


def _tucker(tensor: Tensor | LowRankStack, ranks: tuple[int, ...]) -> TuckerTensor:
    heads, one, two = ranks
    if isinstance(tensor, LowRankStack):
        wanted = [min(r, n) for r, n in zip((heads, one, two), tensor.shape, strict=True)]
        return tucker_of_stack(tensor, wanted)
    wanted = [min(r, n) for r, n in zip((heads, one, two, 3), tensor.shape, strict=True)]
    return tucker(tensor, wanted)


def _told(error: float, sweeps: int) -> dict[str, object]:
    return {"relative_error": error, "sweeps": sweeps}
