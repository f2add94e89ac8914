"""Entries of the catalogue that a user asks for by name, as more columns of an inspection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.inspection.measures import LayerNumbers
from levelhead.invariants.catalogue import entries
from levelhead.invariants.entry import Invariant
from levelhead.weights.attention_view import AttentionView

__all__ = ["checked_numbers", "with_numbers"]


def checked_numbers(names: Sequence[str], covariance: bool) -> tuple[Invariant, ...]:
    """The entries of these names. Raises InputError for unknown ones, or a covariance missing.

    >>> [entry.name for entry in checked_numbers(["ov_trace"], False)]
    ['ov_trace']
    """
    chosen = entries(names)
    for entry in chosen:
        if entry.per not in ((), ("head",)):
            raise InputError(
                f"{entry.name} compares pairs of heads or blocks: it is no column of a table; read "
                f"it in Python, levelhead.invariants.catalogue.catalogue()[{entry.name!r}](view)"
            )
        if entry.kind == "data" and not covariance:
            raise InputError(f"{entry.name} needs a covariance of the data: give one as well")
    return chosen


def with_numbers(
    numbers: LayerNumbers,
    chosen: Sequence[Invariant],
    view: AttentionView,
    layer: AttentionView,
    covariance: Tensor | None,
) -> LayerNumbers:
    """`numbers` and those of `chosen` that the layer has (nan for others).

    A number of a head becomes a column of heads, one of the layer a column of layers; of several
    numbers each stands under the name with its place, from 1. `layer` is the folded view.
    """
    of_heads, of_layer = dict(numbers.per_head), dict(numbers.numbers)
    for entry in chosen:
        value: Tensor | None = None
        if entry.applies(view if entry.kind == "data" else layer) is None:
            with torch.no_grad():
                value = entry(view, covariance) if entry.kind == "data" else entry(layer)
        if value is not None and value.is_complex():
            raise InputError(f"{entry.name} is complex: it is no column of a table")
        if entry.per:
            found = np.full(numbers.heads, math.nan) if value is None else _array(value)
            columns = found.reshape(numbers.heads, -1).T
            of_heads |= dict(
                zip(_names(entry.name, found.ndim > 1, len(columns)), columns, strict=True)
            )
        else:
            flat = np.array([math.nan]) if value is None else _array(value).reshape(-1)
            several = value is not None and value.ndim > 0
            names = _names(entry.name, several, len(flat))
            of_layer |= dict(zip(names, flat.tolist(), strict=True))
    return replace(numbers, per_head=of_heads, numbers=of_layer)


def _names(name: str, several: bool, count: int) -> list[str]:
    return [f"{name}_{i + 1}" for i in range(count)] if several else [name]


def _array(value: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return value.detach().double().cpu().numpy()
