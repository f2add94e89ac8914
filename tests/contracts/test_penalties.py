"""One suite for every penalty: its gradient, its edges, its declared symmetries, and that it acts.

A new penalty is a row of `ROWS`. Everything runs on live modules; what a penalty claims is measured
on dense forms by the slow twins, not by the penalty itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from levelhead.invariants.entry import Invariant
from levelhead.invariants.symmetry import verify
from levelhead.training import penalties
from levelhead.training import penalty_terms as terms
from levelhead.training.penalty import Penalty
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.folding import folded
from levelhead.weights.layouts import views
from levelhead.weights.symmetry_group import GENERATORS, symmetry_group
from oracles import invariants as twin
from oracles.layers import LAYERS

D, H = 12, 3
Measure = Callable[[nn.MultiheadAttention], float]


# ── a model, its forms, and ways to break it ──


def attention(d: int = D, h: int = H, seed: int = 0, dtype: Any = torch.float64):
    torch.manual_seed(seed)
    return nn.MultiheadAttention(d, h, batch_first=True, dtype=dtype)


def tokens(model: nn.MultiheadAttention, seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    shape = (4, 6, model.embed_dim)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(model.in_proj_weight.dtype)


def write(model: nn.MultiheadAttention, view: AttentionView) -> None:
    """Put the weights of a view [h, d_k, d] … into the module."""
    d = model.embed_dim
    with torch.no_grad():
        rows = [w.reshape(-1, d) for w in (view.q, view.k, view.v)]
        model.in_proj_weight.copy_(torch.cat(rows))
        model.out_proj.weight.copy_(view.o.permute(1, 0, 2).reshape(d, d))
        biases = [b.reshape(-1) for b in (view.q_bias, view.k_bias, view.v_bias)]
        model.in_proj_bias.copy_(torch.cat(biases))
        model.out_proj.bias.copy_(view.o_bias)


def view_of(model: nn.MultiheadAttention) -> AttentionView:
    [view] = views(model)
    return view.map(lambda t: t.detach().clone())


def change(model: nn.MultiheadAttention, how: Callable[[Tensor], Tensor]) -> None:
    """Each of q, k, v [h, d_k, d] and o [h, d_out, d_v] put through `how`."""
    view = view_of(model)
    changed = {n: how(getattr(view, n)) for n in "qkvo"}
    write(
        model, AttentionView(**changed, **{f"{n}_bias": getattr(view, f"{n}_bias") for n in "qkvo"})
    )


@cache
def copies(noise: float) -> Callable[[Tensor], Tensor]:
    """Every head the first one, with noise of that share of its entries."""

    def how(w: Tensor) -> Tensor:
        random = torch.Generator().manual_seed(int(w.abs().sum() * 1e4))
        drawn = torch.randn(w.shape, generator=random, dtype=torch.float64).to(w)
        return w[:1] + noise * w[:1].std() * drawn

    return how


def first_head_zero(w: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(w[:1]), w[1:]))


def near_rank_one(w: Tensor) -> Tensor:
    """One strong row (column of o) in every head."""
    axis = 1 if w.shape[1] < w.shape[2] else 2
    out = 0.05 * w
    out.select(axis, 0).copy_(2 * w.select(axis, 0))
    return out


def orthogonal(w: Tensor) -> Tensor:
    h, r, d = w.shape
    if r > d:  # o: [h, d_out, d_v]
        return orthogonal(w.mT).mT
    return torch.eye(d, dtype=w.dtype)[: h * r].reshape(h, r, d)


def sharper(w: Tensor) -> Tensor:
    return 2.5 * w


def unchanged(w: Tensor) -> Tensor:
    return w


class Factors(nn.Module):
    """Collaborative attention's weights: forms Σ_r a_r ∘ u_r ∘ v_r."""

    def __init__(self, h: int = 5, d: int = 7, r: int = 3) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.cp_factors = nn.ParameterList(
            torch.randn(n, r, generator=random, dtype=torch.float64) for n in (h, d, d)
        )


# ── what penalties claim, from dense forms ──


def forms(model: nn.MultiheadAttention, which: str = "qk") -> np.ndarray:
    return (twin.forms if which == "qk" else twin.maps)(view_of(model))


def coherent(model: nn.MultiheadAttention) -> float:
    return twin.coherence(twin.gram(forms(model)))


def spectra(model: nn.MultiheadAttention) -> np.ndarray:
    return twin.spectra(forms(model), model.head_dim)


def rank(model: nn.MultiheadAttention) -> float:
    return min(twin.effective_rank(s) for s in spectra(model))


def largest(model: nn.MultiheadAttention) -> float:
    return float(spectra(model)[:, 0].mean())


def core_share(model: nn.MultiheadAttention) -> float:
    """Mean participation share of the mode spectra of the dense tensor."""
    x, r = forms(model), model.head_dim
    shares = []
    for mode, most in enumerate((len(x), len(x) * r, len(x) * r)):
        s = np.linalg.svd(np.moveaxis(x, mode, 0).reshape(x.shape[mode], -1), compute_uv=False)
        shares.append((s**2).sum() ** 2 / (s**4).sum() / min(most, x.shape[mode]))
    return float(np.mean(shares))


def entropy(model: nn.MultiheadAttention) -> float:
    """The least mean share of a head, from the weights the module itself returns."""
    x = tokens(model)
    with torch.no_grad():
        p = model(x, x, x, average_attn_weights=False)[1].double().numpy()
    share = -(p * np.log(np.maximum(p, 1e-300))).sum(-1) / np.log(p.shape[-1])
    return float(share.mean((0, 2)).min())


def size(model: nn.MultiheadAttention) -> float:
    return sum(w.square().sum().item() for w in (model.in_proj_weight, model.out_proj.weight))


def moved(start: np.ndarray) -> Measure:
    def measure(model: nn.MultiheadAttention) -> float:
        return float(((spectra(model) - start) ** 2).sum() / (start**2).sum())

    return measure


# ── the rows ──


@dataclass(frozen=True)
class Row:
    """One penalty: how it is made, what its term is, and what it does to `measure` in training.

    `start` is put on the weights first; after training `measure` is on the right side of `bound`,
    and on the wrong one without the penalty.
    """

    make: Callable[..., Penalty]
    term: Callable[[], Invariant] | None
    start: Callable[[Tensor], Tensor]
    measure: Measure | None
    bound: float
    weight: float
    rises: bool = False


def head(name: str, form: str = "qk") -> Callable[[], Invariant]:
    return lambda: terms.head_term(name, form)  # type: ignore[arg-type]


def with_form(make: Callable[..., Penalty], **more: Any) -> Callable[..., Penalty]:
    return lambda model, **options: make(model, **more, **options)


P = penalties
NEAR = copies(0.05)
ROWS: dict[str, Row] = {
    "coherence": Row(P.coherence, head("coherence"), NEAR, coherent, 0.02, 0.3),
    "coherence ov": Row(
        with_form(P.coherence, form="ov"),
        head("coherence", "ov"),
        NEAR,
        lambda m: twin.coherence(twin.gram(forms(m, "ov"))),
        5e-4,
        0.3,
    ),
    "coherence both": Row(
        with_form(P.coherence, form="both"), head("coherence", "both"), NEAR, coherent, 0.02, 0.6
    ),
    "coherence product": Row(
        with_form(P.coherence, form="product"),
        head("coherence", "product"),
        NEAR,
        lambda m: twin.coherence(twin.gram(forms(m)) * twin.gram(forms(m, "ov"))),
        2e-5,
        0.3,
    ),
    "log_det": Row(P.log_det, head("log_det"), NEAR, coherent, 0.02, 0.3),
    "nuclear_ratio": Row(P.nuclear_ratio, head("nuclear_ratio"), NEAR, coherent, 0.02, 0.3),
    "entropy_rank": Row(P.entropy_rank, head("entropy_rank"), NEAR, coherent, 0.02, 0.3),
    "nuclear_norm": Row(
        P.nuclear_norm, lambda: terms.nuclear_term("qk"), unchanged, rank, 2.6, 0.06
    ),
    "spectral_norm": Row(
        P.spectral_norm, lambda: terms.spectral_term("qk"), unchanged, largest, 0.4, 0.1
    ),
    "spectral_norm ov": Row(
        with_form(P.spectral_norm, form="ov"),
        lambda: terms.spectral_term("ov"),
        unchanged,
        lambda m: float(twin.spectra(forms(m, "ov"), 1).mean()),
        0.4,
        0.15,
    ),
    "rank_floor": Row(
        with_form(P.rank_floor, floor=3.8),
        lambda: terms.rank_floor_term("qk", 3.8),
        near_rank_one,
        rank,
        3.75,
        1.0,
        rises=True,
    ),
    "core_sparsity": Row(
        P.core_sparsity, lambda: terms.core_sparsity_term("qk"), unchanged, core_share, 0.2, 1.0
    ),
    "entropy_floor": Row(
        with_form(P.entropy_floor, floor=0.6),
        None,
        lambda w: 2.5 * w,
        entropy,
        0.55,
        2.0,
        rises=True,
    ),
    "stability": Row(
        with_form(P.stability, quantities=("qk_spectrum",), decay=1.0),
        None,
        unchanged,
        moved(spectra(attention())),
        0.01,
        10.0,
    ),
    "l2": Row(P.l2, terms.l2_term, unchanged, size, 40.0, 3e-3),
}
every_row = pytest.mark.parametrize("name", ROWS)


def made(name: str, model: nn.MultiheadAttention, **options: Any) -> Penalty:
    return ROWS[name].make(model, **options)


def value(penalty: Penalty, model: nn.MultiheadAttention) -> Tensor:
    """The value after a forward pass, which the entropy floor looks at."""
    if penalty.name == "entropy_floor":
        x = tokens(model)
        model(x, x, x)
    return penalty.value()


# ── gradients ──


@every_row
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    model = attention(6, 2 if name != "rank_floor" else 1)
    if name in ("rank_floor", "entropy_floor"):
        change(model, ROWS[name].start)
    parameters = [model.in_proj_weight, model.out_proj.weight]
    penalty = made(name, model)
    if name == "stability":
        change(model, lambda w: 1.1 * w)
    for _ in range(8):  # directions of a power iteration settle
        value(penalty, model)
    if name.startswith("spectral_norm"):
        assert value(penalty, model).item() == pytest.approx(
            value(penalty, model).item(), rel=1e-14
        )
    assert torch.autograd.gradcheck(lambda *_: value(penalty, model), parameters, atol=1e-7)
    assert value(penalty, model) > 0


def test_gradients_of_cp_coherence() -> None:
    module = Factors()
    penalty = penalties.cp_coherence(module, modes=(0, 2))
    assert torch.autograd.gradcheck(lambda *_: penalty.value(), list(module.parameters()))
    a, _, c = (f.detach().numpy() for f in module.cp_factors)
    expected = []
    for factor in (a, c):
        unit = factor / np.linalg.norm(factor, axis=0)
        off = unit.T @ unit - np.eye(3)
        expected.append((off**2).sum() / 6)
    assert penalty.value().item() == pytest.approx(np.mean(expected), rel=1e-12)


EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "collapse": copies(0.0),
    "near collapse": copies(1e-4),
    "orthogonality": orthogonal,
    "a zero head": first_head_zero,
    "nothing but zeros": torch.zeros_like,
    "rank one": lambda w: w[:, :1].expand_as(w).clone(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edge", EDGES)
@every_row
def test_values_and_gradients_are_finite_at_the_edges(name: str, edge: str, dtype: Any) -> None:
    model = attention(dtype=dtype)
    change(model, EDGES[edge])
    penalty = made(name, model)
    found = value(penalty, model)
    found.backward()
    assert bool(found.isfinite())
    assert found.dtype == dtype
    for parameter in (model.in_proj_weight, model.out_proj.weight):
        if parameter.grad is not None:
            assert bool(parameter.grad.isfinite().all())
            assert float(parameter.grad.norm()) < 1e3


# ── symmetries ──

TERMS = {n: replace(row.term(), name=n) for n, row in ROWS.items() if row.term is not None}
KINDS = [
    "plain", "biased", "uneven groups", "wide keys", "half rotary", "cross", "tied", "linear",
    "normed", "normed gains", "normed layer", "gain in front", "centred in front",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_declared_symmetries_hold(kind: str) -> None:
    """Random elements of the layer's own group, and the infinitesimal test, for every term."""
    view = LAYERS[kind](1)
    chosen = list(TERMS.values())
    found = verify(view, chosen, draws=1)
    assert [(c.invariant, c.generator, c.change, c.moment) for c in found.failures] == []
    if view.input_norm.kind != "none":
        assert verify(folded(view), chosen, draws=1).passed


def moment(model: nn.MultiheadAttention, penalty: Penalty) -> tuple[float, float]:
    """Relative |μ| and |μ - μᵀ| of q and k: μ = (∂f/∂q) qᵀ - k (∂f/∂k)ᵀ of each head."""
    model.zero_grad()
    value(penalty, model).backward()
    r, d = model.head_dim, model.embed_dim
    weight, slope = model.in_proj_weight, model.in_proj_weight.grad
    q, k = (w.detach().reshape(-1, r, d) for w in weight.chunk(3)[:2])
    to_q, to_k = (w.reshape(-1, r, d) for w in slope.chunk(3)[:2])
    bias, slope = model.in_proj_bias, model.in_proj_bias.grad
    mu = to_q @ q.mT - k @ to_k.mT
    if slope is not None:
        b_q, b_k = (b.detach().reshape(-1, r, 1) for b in bias.chunk(3)[:2])
        s_q, s_k = (b.reshape(-1, r, 1) for b in slope.chunk(3)[:2])
        mu = mu + s_q @ b_q.mT - b_k @ s_k.mT
    scale = float(to_q.norm() * q.norm() + to_k.norm() * k.norm())
    return float(mu.norm()) / scale, float((mu - mu.mT).norm()) / scale


@every_row
def test_live_values_stand_still_under_what_is_declared_and_move_under_the_rest(name: str) -> None:
    model = attention()
    if name in ("rank_floor", "entropy_floor"):
        change(model, ROWS[name].start)
    penalty = made(name, model)
    assert set(penalty.symmetry) <= set(GENERATORS)
    if name == "stability":
        change(model, lambda w: 1.1 * w)
    with torch.no_grad():
        model.in_proj_bias.normal_(0, 0.3)
    for _ in range(4):
        value(penalty, model)
    before, view = value(penalty, model).item(), view_of(model)
    mu, skew = moment(model, penalty) if "ov" not in name else (0.0, 0.0)
    assert skew < 1e-10
    assert (mu < 1e-10) == ("qk_gauge" in penalty.symmetry)
    random = torch.Generator().manual_seed(3)
    for generator in symmetry_group(view).generators:
        if generator.moves_inputs and name == "entropy_floor":
            continue  # the whole model must move with the basis
        write(model, generator.draw(view, random, 10.0).view)
        for _ in range(4):
            after = value(penalty, model).item()
        if generator.name in penalty.symmetry:
            assert after == pytest.approx(before, rel=1e-9), generator.name
        else:
            assert after != pytest.approx(before, rel=1e-6), generator.name


def test_cp_coherence_sees_no_permutation_of_heads_and_no_rotation_of_the_basis() -> None:
    module = Factors()
    penalty = penalties.cp_coherence(module, modes=(0, 1, 2))
    assert penalty.symmetry == ("head_permutation", "basis_rotation")
    before = penalty.value().item()
    turn = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64)).Q
    with torch.no_grad():
        module.cp_factors[0].copy_(module.cp_factors[0].flip(0))
        for mode in (1, 2):
            module.cp_factors[mode].copy_(turn @ module.cp_factors[mode])
    assert penalty.value().item() == pytest.approx(before, rel=1e-12)


# ── acting ──


def trained(model: nn.MultiheadAttention, penalty: Penalty | None, steps: int = 300) -> float:
    """Fit y = 0.5 · x behind a shift of tokens; the loss at the end."""
    x = tokens(model)
    y = 0.5 * x.roll(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        task = (model(x, x, x, need_weights=False)[0] - y).square().mean()
        (task if penalty is None else task + penalty()).backward()
        optimizer.step()
        if penalty is not None:
            penalty.step()
    return float(task.detach())


@cache
def without_penalty(start: Callable[[Tensor], Tensor]) -> tuple[nn.MultiheadAttention, float]:
    model = attention()
    change(model, start)
    return model, trained(model, None)


@every_row
def test_it_does_what_it_claims_in_300_steps(name: str) -> None:
    """Beside the task, and not without the penalty."""
    row = ROWS[name]
    assert row.measure is not None
    model = attention()
    change(model, row.start)
    start = row.measure(model)
    penalty = made(name, model, weight=row.weight)
    loss = trained(model, penalty)
    alone, plain = without_penalty(row.start)
    found, without = row.measure(model), row.measure(alone)
    sign = 1 if row.rises else -1
    said = f"{start:.3g} → {found:.3g}, alone {without:.3g}; loss {loss:.3g}, alone {plain:.3g}"
    assert sign * (found - row.bound) >= 0, said
    assert sign * (without - row.bound) < 0, said
    assert loss < float(tokens(model).square().mean()) * 0.25, said  # below y = 0


def test_cp_coherence_falls_in_300_steps() -> None:
    """Beside a fit of the tensor that the factors stand for."""
    module, target = Factors(), torch.randn(5, 7, 7, dtype=torch.float64)
    with torch.no_grad():
        module.cp_factors[0].copy_(module.cp_factors[0][:, :1] + 0.1 * module.cp_factors[0])
    penalty = penalties.cp_coherence(module, weight=10.0)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    start = penalty.value().item()
    for _ in range(300):
        optimizer.zero_grad()
        fit = torch.einsum("ir,jr,kr->ijk", *module.cp_factors)
        ((fit - target).square().mean() + penalty()).backward()
        optimizer.step()
    assert start > 0.8
    assert penalty.value().item() < 0.01
