"""Every row of the table of layouts: the slices are what is stored, and the view is the layer.

The proof of a family: a model is filled at random and run; a hook keeps what its query projection
reads and what its output projection writes; `oracles.attention` computes the same from the view
alone. Facts that should matter are then falsified, and the difference must show.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.weights.attention_view import AttentionView
from levelhead.weights.layouts import LayerPlan, match, views
from levelhead.weights.stores import Fused, PackedProjection, Separate
from levelhead.weights.structure import Mask, NoPosition
from oracles.attention import attend

pytest.importorskip("transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from contracts.layout_cases import CASES, Case, fill, run

RELATIVE = 1e-5
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class Seen:
    """What the layer read and wrote in a forward pass: x, the source, and the output."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.source: Tensor | None = None
        self.y: Tensor | None = None


Norms = list[tuple[Tensor, Tensor]]


@cache
def proved(case: Case) -> tuple[nn.Module, list[LayerPlan], list[AttentionView], list[Seen], Norms]:
    """The model of a case, its plans and views, what each layer saw, and what each norm did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fill(case.make())
    plans = list(match(model).plans)
    seen = [watched(model, plan) for plan in plans]
    norms = watched_norms(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(model, case.inputs)
    return model, plans, list(views(model)), seen, norms


def watched_norms(model: nn.Module) -> Norms:
    """(input, output) of every norm of the model, in the order in which they are run."""
    found: Norms = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        found.append((args[0].detach(), out.detach()))

    for part in model.modules():
        weight = getattr(part, "weight", None)
        if "Norm" in type(part).__name__ and weight is not None and weight.ndim == 1:
            part.register_forward_hook(keep)
    return found


def watched(model: nn.Module, plan: LayerPlan) -> Seen:
    """Hooks on the projections that a plan names."""
    seen, store = Seen(), plan.plan.store
    if isinstance(store, PackedProjection):

        def whole(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            query, key = (args + tuple(kwargs.values()))[:2]
            seen.x, seen.source, seen.y = query[0], key[0], out[0][0]

        model.get_submodule(plan.name).register_forward_hook(whole, with_kwargs=True)
        return seen
    if isinstance(store, Separate | Fused):
        first = store.qkv if isinstance(store, Fused) else store.q
        second = store.qkv if isinstance(store, Fused) else store.k
        last = store.o
    else:
        first = "q_a_proj" if store.anchor == "q_b_proj.weight" else "q_proj"
        second, last = "kv_a_proj_with_mqa", "o_proj"

    def reads(module: nn.Module, args: Any) -> None:
        seen.x = args[0][0] if seen.x is None else seen.x

    def looks(module: nn.Module, args: Any) -> None:
        seen.source = args[0][0] if seen.source is None else seen.source

    def writes(module: nn.Module, args: Any, out: Any) -> None:
        seen.y = out[0] if seen.y is None else seen.y

    model.get_submodule(f"{plan.name}.{first}").register_forward_pre_hook(reads)
    model.get_submodule(f"{plan.name}.{second}").register_forward_pre_hook(looks)
    model.get_submodule(f"{plan.name}.{last}").register_forward_hook(writes)
    return seen


def output(view: AttentionView, seen: Seen) -> Tensor:
    assert seen.x is not None
    with torch.no_grad():
        return attend(view, seen.x, seen.source)


def difference(view: AttentionView, seen: Seen) -> float:
    """Largest deviation of the oracle from the module, relative to the largest output."""
    assert seen.y is not None
    y = seen.y.detach().double().reshape(-1, seen.y.shape[-1])
    return float((output(view, seen) - y).abs().max() / y.abs().max())


@every_case
def test_the_view_alone_reproduces_the_layer(case: Case) -> None:
    _, plans, found, seen, _ = proved(case)
    assert len(found) == case.layers
    assert case.family in {plan.family for plan in plans}
    for view, saw in zip(found, seen, strict=True):
        assert difference(view, saw) < RELATIVE, view


def falsified(view: AttentionView) -> Iterator[tuple[str, AttentionView]]:
    """The view with one fact wrong, for each fact that is not the plainest."""
    assert view.scale is not None
    yield "scale", replace(view, scale=1.05 * view.scale)
    if not isinstance(view.position, NoPosition):
        yield "position", replace(view, position=NoPosition())
    if view.position.tag == "rope":
        other = "half" if view.position.layout == "interleaved" else "interleaved"
        yield "rope layout", replace(view, position=replace(view.position, layout=other))
    if view.qk_norm is not None:
        yield "qk_norm", replace(view, qk_norm=None)
    if view.soft_cap is not None:
        yield "soft_cap", replace(view, soft_cap=None)
    if view.mask.kind != "full":
        yield "mask", replace(view, mask=Mask())
    if view.latent is not None:
        yield "latent", replace(view, latent=None)
    if view.q_bias is not None:
        yield "q_bias", replace(view, q_bias=None)
    if view.v_bias is not None:
        yield "v_bias", replace(view, v_bias=None)
    if 1 < view.groups < view.heads:
        yield "kv_group", replace(view, kv_group=tuple(reversed(view.kv_group)))


@every_case
def test_a_wrong_fact_shows(case: Case) -> None:
    _, _, found, seen, _ = proved(case)
    for name, wrong in falsified(found[-1]):
        if name == "rope layout" and wrong.position.width == 2:
            continue  # one plane: both layouts are the same
        assert difference(wrong, seen[-1]) > 30 * RELATIVE, name


# ── the norm in front ──


def normed(view: AttentionView, x: Tensor) -> Tensor:
    """The view's input norm of x, from its definition in float64."""
    norm = view.input_norm
    x = x.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    assert norm.gain is not None
    x = x * norm.gain.double()
    return x if norm.bias is None else x + norm.bias.double()


@pytest.mark.parametrize("case", [c for c in CASES if c.name != "albert"], ids=str)
def test_the_input_norm_is_the_one_whose_output_the_layer_reads(case: Case) -> None:
    """ALBERT's one layer reads the embedding in its first pass and its own norm afterwards."""
    _, _, found, seen, norms = proved(case)
    for view, saw in zip(found, seen, strict=True):
        assert saw.x is not None
        made = [i[0] for i, o in norms if o[0].shape == saw.x.shape and torch.equal(o[0], saw.x)]
        if view.input_norm.kind == "none":
            assert not made, view
            continue
        assert made, f"{view}: no norm wrote what it reads"
        with torch.no_grad():
            mine = normed(view, made[0])
        assert float((mine - saw.x).abs().max()) < 2e-5 * float(mine.abs().max())


# ── the slices are the stored tensors ──


def stored(view: AttentionView, plan: LayerPlan) -> dict[str, Tensor]:
    """The stored tensors put together again from a view."""
    store = plan.plan.store
    h, g, d_k, d_v = view.heads, view.groups, view.d_k, view.d_v
    rows = {"q": view.q, "k": view.k, "v": view.v}
    flat = {n: t.reshape(-1, t.shape[-1]) for n, t in rows.items()}
    bias = {n: getattr(view, f"{n}_bias") for n in "qkv"}
    flat_bias = {n: None if t is None else t.reshape(-1) for n, t in bias.items()}
    out = torch.cat([view.o[i] for i in range(h)], dim=1)
    assert d_v * h == out.shape[1]
    found: dict[str, Tensor | None] = {}
    if isinstance(store, PackedProjection):
        found["in_proj_weight"] = torch.cat([flat[n] for n in "qkv"])
        if bias["q"] is not None:
            found["in_proj_bias"] = torch.cat([flat_bias[n] for n in "qkv"])
        found |= {"out_proj.weight": out, "out_proj.bias": view.o_bias}
    elif isinstance(store, Separate):
        turn = store.input_major
        for n in "qkv":
            found[f"{getattr(store, n)}.weight"] = flat[n].T if turn else flat[n]
            found[f"{getattr(store, n)}.bias"] = flat_bias[n]
        found |= {f"{store.o}.weight": out.T if turn else out, f"{store.o}.bias": view.o_bias}
    elif isinstance(store, Fused):
        if store.order == "stacked":
            joined = torch.cat([flat[n] for n in "qkv"])
            joined_bias = [flat_bias[n] for n in "qkv"]
        else:
            blocks, joined_bias = [], []
            for group in range(g):
                mine = range(group * (h // g), (group + 1) * (h // g))
                blocks += [view.q[i] for i in mine] + [view.k[group], view.v[group]]
                if bias["q"] is not None and bias["k"] is not None:
                    joined_bias += [bias["q"][i] for i in mine]
                    joined_bias += [bias["k"][group], bias["v"][group]]
            joined = torch.cat(blocks)
        assert joined.shape[0] == (h + 2 * g) * d_k
        found[f"{store.qkv}.weight"] = joined.T if store.input_major else joined
        if bias["q"] is not None and bias["k"] is None:
            beside = store.qkv.rpartition(".")[0]
            found |= {f"{beside}.{n}_bias": flat_bias[n] for n in "qv"}
        elif bias["q"] is not None:
            found[f"{store.qkv}.bias"] = torch.cat(joined_bias)
        found[f"{store.o}.weight"] = out.T if store.input_major else out
        found[f"{store.o}.bias"] = view.o_bias
    return {n: t for n, t in found.items() if t is not None}


@pytest.mark.parametrize("case", [c for c in CASES if c.family != "deepseek"], ids=str)
def test_slices_reassemble_to_what_is_stored(case: Case) -> None:
    """A low-rank projection's view holds products, which nothing is cut from."""
    model, plans, found, _, _ = proved(case)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for view, plan in zip(found, plans, strict=True):
        again = stored(view, plan)
        assert len(again) >= 2
        for name, tensor in again.items():
            assert torch.equal(tensor, parameters[f"{plan.name}.{name}"]), name
        mine = [n for n in parameters if n.startswith(f"{plan.name}.")]
        left = {n.removeprefix(f"{plan.name}.") for n in mine} - set(again)
        assert all("norm" in n.lower() or "relative" in n or "pos_" in n for n in left), left


# ── on disk, and back on autograd's tape ──


def same(a: AttentionView, b: AttentionView) -> None:
    for name in ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"):
        one, other = getattr(a, name), getattr(b, name)
        assert (one is None) == (other is None), name
        assert one is None or torch.equal(one, other), name
    for name in ("kv_group", "scale", "soft_cap", "mask", "cross", "family"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("position", "qk_norm", "input_norm", "latent"):
        one, other = getattr(a, name), getattr(b, name)
        assert type(one) is type(other), name
        for key, value in vars(one).items() if one is not None else ():
            theirs = getattr(other, key)
            alike = torch.equal(value, theirs) if isinstance(value, Tensor) else value == theirs
            assert alike, (name, key)


@every_case
def test_a_saved_model_gives_the_same_views(case: Case, tmp_path: Path) -> None:
    model, _, found, _, _ = proved(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
    again = list(views(tmp_path))
    assert len(again) == len(found)
    for a, b in zip(again, found, strict=True):
        same(a, b)


@every_case
def test_gradients_reach_every_matrix(case: Case) -> None:
    model, plans, _, _, _ = proved(case)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    plan = plans[-1]
    view = plan.apply(parameters.__getitem__)
    loss = sum(t.square().sum() for t in (view.q, view.k, view.v, view.o))
    mine = [p for n, p in parameters.items() if n.startswith(f"{plan.name}.") and p.ndim == 2]
    grads = torch.autograd.grad(loss, mine, allow_unused=True)
    reached = [g for g in grads if g is not None]
    assert len(reached) >= 2
    assert all(float(g.abs().sum()) > 0 for g in reached)
