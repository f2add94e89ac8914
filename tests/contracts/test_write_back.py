"""Every row of the table of layouts: views are written back where they were cut from.

The balanced gauge is the proof that each entry went to its place: the model then still computes
what it did.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.weights.balancing import balance_module
from levelhead.weights.canonical import balance
from levelhead.weights.layouts import match, views
from levelhead.weights.write_back import placement, write_view

pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from contracts.layout_cases import CASES, Case, fill, run

# Mixtures of experts multiply in float32 only.
_SINGLE = ("mixtral", "qwen2_moe", "qwen3_moe")


def outputs(model: nn.Module, kind: str) -> list[Tensor]:
    """What the model gives for the fixed inputs of `run`, in its own precision."""
    dtype, found = next(model.parameters()).dtype, []

    def cast(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {n: t.to(dtype) if t.is_floating_point() else t for n, t in kwargs.items()}

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        found.extend(t for t in out.values() if isinstance(t, Tensor) and t.is_floating_point())

    before = model.register_forward_pre_hook(cast, with_kwargs=True)
    after = model.register_forward_hook(keep)
    run(model, kind)
    before.remove()
    after.remove()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_views_go_back_where_they_came_from(case: Case) -> None:
    double = case.name not in _SINGLE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fill(case.make())
        model = model.double() if double else model
        before = outputs(model, case.inputs)
        plans = match(model).plans
        stored = {n: t.clone() for n, t in model.state_dict().items()}
        placed = [placement(plan) for plan in plans]
        for plan, place, view in zip(plans, placed, views(model), strict=True):
            assert write_view(model, plan, view, place) == ()
        assert all(torch.equal(t, stored[n]) for n, t in model.state_dict().items())

        moved = balance_module(model, plans, placed)
        after = outputs(model, case.inputs)
    if case.family == "deepseek":
        assert not moved.written
        assert set(moved.left) == {plan.name for plan in plans}
        return
    # Some families round to float32 inside (norms, softmax).
    limit = 1e-6 if double else 1e-4
    assert before
    for x, y in zip(before, after, strict=True):
        assert float((x - y).abs().max()) < limit * float(x.abs().max())
    reads = {name for plan in plans for name in plan.reads}
    changed = {n for n, t in model.state_dict().items() if not torch.equal(t, stored[n])}
    tied = {id(t) for n, t in model.state_dict(keep_vars=True).items() if n in moved.written}
    named = {n for n, t in model.state_dict(keep_vars=True).items() if id(t) in tied}
    assert changed == named & changed
    assert set(moved.written) <= reads
    assert len(moved.layers) == len(plans)
    for view in views(model):
        with torch.no_grad():
            found = balance(view)
        assert float(found.ov.max()) < (1e-10 if double else 1e-4)
        assert view.qk_norm is not None or float(found.qk.max()) < (1e-10 if double else 1e-4)
