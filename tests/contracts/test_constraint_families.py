"""Constraints and σReparam on transformers' families: functions stay, logits fall, all folds."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.nn.sigma_reparam import remove, sigma_reparam
from levelhead.training.constraints import balance_gauge, qk_clip
from levelhead.weights.canonical import balance
from levelhead.weights.layouts import match, views

pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from contracts.layout_cases import CASES, Case, fill, run

# One of each kind: separate, fused in three ways, grouped, rotary, relative, tied, normed, capped.
NAMES = (
    "bert",
    "gpt2",
    "llama_bias",
    "qwen3",
    "gpt_neox",
    "t5",
    "vit",
    "albert",
    "deberta",
    "falcon_grouped",
    "gemma2",
    "beit_shared",
    "phi3",
    "deepseek_v2",
)
PRODUCTS = ("deepseek_v2",)
NORMED = ("qwen3",)
every_case = pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=str)


def test_the_families_are_there() -> None:
    assert {case.name for case in CASES} >= set(NAMES)


@cache
def start(case: Case) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fill(case.make()).state_dict()


def made(case: Case) -> nn.Module:
    """The model of a case in float64, fed with float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.make().eval()
    model.load_state_dict(start(case))

    def widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
        wide = {
            name: value.double()
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in kwargs.items()
        }
        return args, wide

    model.register_forward_pre_hook(widen, with_kwargs=True)
    return model.double()


def outputs(model: nn.Module, case: Case) -> list[Tensor]:
    """All floating-point tensors that a forward pass returns."""
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        found = (value for value in out.values() if isinstance(value, Tensor))
        seen.extend(value.detach() for value in found if value.is_floating_point())

    handle = model.register_forward_hook(keep, with_kwargs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(model, case.inputs)
    handle.remove()
    assert seen
    return seen


def change(after: list[Tensor], before: list[Tensor]) -> float:
    pairs = zip(after, before, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@every_case
def test_balancing_keeps_the_function(case: Case) -> None:
    model = made(case)
    before = outputs(model, case)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = balance_gauge(model)
    if case.name in PRODUCTS:
        assert len(report.refused) == case.layers
        assert "computed from what the layer stores" in str(report)
        assert all(torch.equal(w, weights[n]) for n, w in model.state_dict().items())
        return
    assert not report.refused
    assert {layer.layer for layer in report.layers} == {plan.name for plan in match(model).plans}
    # Norms and softmax that transformers computes in float32 round to 1e-7 whatever we do.
    assert change(outputs(model, case), before) < 1e-12
    for view, layer in zip(views(model), report.layers, strict=True):
        found = balance(view.map(lambda t: t.detach()))
        assert float(found.ov.max()) < 1e-9
        kept = "queries and keys" in layer.kept
        assert kept == (case.name in NORMED)
        assert kept or float(found.qk.max()) < 1e-9
    assert any(not torch.equal(w, weights[n]) for n, w in model.state_dict().items())


@every_case
def test_clipping_scales_the_form_of_one_head(case: Case) -> None:
    model = made(case)
    [name, *_] = [plan.name for plan in match(model).plans]
    [before] = [v.map(lambda t: t.detach().clone()) for v in views(model, [name])]
    values = torch.zeros(before.heads)
    values[1] = 16.0
    report = qk_clip(model, 4.0, {name: values})
    [after] = [v.map(lambda t: t.detach()) for v in views(model, [name])]
    if case.name in (*PRODUCTS, *NORMED):
        assert not report.clipped
        assert report.refused
        assert torch.equal(after.q, before.q)
        return
    [clip] = report.clipped
    assert (clip.layer, clip.head, clip.largest) == (name, 1, 16.0)
    factors = torch.ones(before.heads, 1, 1, dtype=torch.float64)
    factors[1] = clip.factor
    if before.soft_cap is None:
        assert clip.factor == pytest.approx(0.25, rel=1e-15)
    torch.testing.assert_close(after.qk.dense(), before.qk.dense() * factors, rtol=1e-12, atol=0)
    if before.q_bias is not None:  # the content term: b_qᵀ k
        content = [
            torch.einsum("hk,hkd->hd", v.q_bias, v.k[list(v.kv_group)]) for v in (before, after)
        ]
        torch.testing.assert_close(content[1], content[0] * factors[:, 0], rtol=1e-12, atol=0)
    assert torch.equal(after.v, before.v)
    assert torch.equal(after.o, before.o)


REPARAMETRISED = ("bert", "gpt2", "llama_bias", "gpt_neox", "t5", "vit", "falcon_grouped", "phi3")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in REPARAMETRISED], ids=str)
def test_sigma_reparam_finds_attention_weights_and_folds_back(case: Case) -> None:
    model = made(case)
    before = outputs(model, case)
    keys = list(model.state_dict())
    plans = match(model).plans
    forms = [view.map(lambda t: t.detach().clone()) for view in views(model)]
    sigma_reparam(model, layers="all")
    assert change(outputs(model, case), before) < 1e-12
    gammas = {n: w for n, w in model.named_parameters() if n.endswith("gamma")}
    # Outside attention nothing was touched.
    assert gammas
    assert all(any(n.startswith(f"{plan.name}.") for plan in plans) for n in gammas)
    fused = {"gpt2": 3, "gpt_neox": 3}.get(case.name)
    if fused:
        # Q, K and V have a σ each, those of their own matrices.
        for plan, form in zip(plans, forms, strict=True):
            [found] = [w for n, w in gammas.items() if n.startswith(plan.name) and w.ndim == 1]
            expected = [
                torch.linalg.matrix_norm(x.flatten(0, 1), 2) for x in (form.q, form.k, form.v)
            ]
            torch.testing.assert_close(found.detach(), torch.stack(expected), rtol=1e-12, atol=0)
    model.train()
    with torch.no_grad():
        for gamma in gammas.values():
            gamma.mul_(0.5)
    model.eval()
    halved = outputs(model, case)
    assert change(halved, before) > 1e-3
    remove(model)
    assert list(model.state_dict()) == keys
    assert change(outputs(model, case), halved) < 1e-12
    for view, form in zip(views(model), forms, strict=True):
        torch.testing.assert_close(view.q.detach(), form.q / 2, rtol=1e-12, atol=0)
