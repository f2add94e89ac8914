"""Laws: whatever the shapes, groups and defects of a layer, its own group moves no invariant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Verdict
from levelhead.invariants.symmetry import verify
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.canonical import balance, canonical
from levelhead.weights.gauge import random_orthogonal
from levelhead.weights.structure import Rope
from levelhead.weights.symmetry_group import symmetry_group
from oracles.layers import gains, layer

EXACT = [
    e.name
    for e in catalogue().values()
    if e.kind != "iterative" and not e.name.startswith(("raw", "canonical"))
]
DEFECTS = ("none", "deficient", "collapsed", "degenerate", "dead")


@st.composite
def views(draw: st.DrawFn) -> AttentionView:
    """Layers of random shape, position, norm and biases, some with a defect."""
    g = draw(st.integers(1, 3))
    h = g * draw(st.integers(1, 3))
    d_k = 2 * draw(st.integers(1, 2))
    facts: dict = {}
    if draw(st.booleans()):
        kind = draw(st.sampled_from(("half", "interleaved")))
        facts["position"] = Rope(kind, draw(st.sampled_from(range(2, d_k + 1, 2))), 50.0)
    if draw(st.booleans()):
        shape = (d_k,) if draw(st.booleans()) else ()
        facts["qk_norm"] = gains(draw(st.sampled_from(("rms", "l2"))), q=shape, k=shape)
    view = layer(
        draw(st.integers(0, 10**6)),
        h=h,
        g=g,
        d_k=d_k,
        d_v=draw(st.integers(1, 4)),
        d=draw(st.integers(7, 12)),
        biases=draw(st.sampled_from(("", "q", "qkvo"))),
        **facts,
    )
    return damaged(view, draw(st.sampled_from(DEFECTS)))


def damaged(view: AttentionView, defect: str) -> AttentionView:
    """The view with a head of lower rank, copies of one, equal singular values, or a dead head."""
    q, k, v, o = (t.clone() for t in (view.q, view.k, view.v, view.o))
    if defect == "deficient":
        q[0, -1] = q[0, 0]
        v[0, -1] = v[0, 0]
    elif defect == "collapsed":
        q[:], k[:], v[:], o[:] = q[:1].clone(), k[:1].clone(), v[:1].clone(), o[:1].clone()
    elif defect == "degenerate":
        random = torch.Generator().manual_seed(0)
        q[0] = 2 * random_orthogonal(1, view.d, random)[0, : view.d_k]
        k[view.kv_group[0]] = random_orthogonal(1, view.d, random)[0, : view.d_k]
    elif defect == "dead":
        q[0], o[0] = 0, 0
    return replace(view, q=q, k=k, v=v, o=o)


@settings(max_examples=40, deadline=None)
@given(view=views(), seed=st.integers(0, 1000))
def test_declared_invariants_stay(view: AttentionView, seed: int) -> None:
    """Also where heads are deficient, copies, dead, or have equal singular values."""
    found = verify(view, EXACT, draws=1, seed=seed)
    broken = [c for c in found.failures if c.declared is Verdict.INVARIANT]
    assert [(c.invariant, c.generator, c.change, c.moment) for c in broken] == []


@pytest.mark.parametrize(("h", "g"), [(14, 2), (8, 8), (8, 1)])
@pytest.mark.parametrize("defect", DEFECTS)
def test_invariants_of_common_groupings(h: int, g: int, defect: str) -> None:
    view = damaged(layer(9, h=h, g=g, d_k=4, d_v=3, d=14), defect)
    found = verify(view, EXACT, draws=1)
    broken = [c for c in found.failures if c.declared is Verdict.INVARIANT]
    assert [(c.invariant, c.generator, c.change, c.moment) for c in broken] == []


@settings(max_examples=60, deadline=None)
@given(view=views(), seed=st.integers(0, 1000), condition=st.sampled_from((1.0, 30.0, 1000.0)))
def test_forms_and_maps_stay_and_canonical_gauge_forgets_the_gauge(
    view: AttentionView, seed: int, condition: float
) -> None:
    """B and M stay under the linear gauges; the balanced spectra do not know what was done."""
    random = torch.Generator().manual_seed(seed)
    moved = view
    for generator in symmetry_group(view).choose("gauge"):
        if generator.name not in ("qk_scale", "qk_mean"):
            moved = generator.draw(moved, random, condition).view
    for one, two in ((view.qk, moved.qk), (view.ov, moved.ov)):
        torch.testing.assert_close(one.dense(), two.dense(), rtol=1e-10, atol=1e-10)
    before, after = canonical(view), canonical(moved)
    close(after.qk_values, before.qk_values)
    close(after.ov_values, before.ov_values)
    kept = set(before.ov_kept) | set(after.ov_kept)
    defects = balance(after.view).ov
    assert all(float(defects[j]) < 1e-9 for j in range(view.groups) if j not in kept)
    assert after.qk_kept == before.qk_kept
    close(after.view.qk.dense(), view.qk.dense())


@settings(max_examples=25, deadline=None)
@given(view=views(), factor=st.floats(0.1, 10.0))
def test_exact_numbers_have_the_degree_they_say(view: AttentionView, factor: float) -> None:
    names = ("q", "k", "v", "o")
    scaled = replace(view, **{n: factor * getattr(view, n) for n in names})
    root = torch.eye(view.d, dtype=torch.float64)
    for name in EXACT:
        entry = catalogue()[name]
        if entry.degree is None or entry.applies(view) is not None or entry.kind == "integer":
            continue
        covariance = root if entry.kind == "data" else None
        before, after = entry(view, covariance), entry(scaled, covariance)
        expected = before * factor**entry.degree
        size = max(1e-300, float(expected.abs().max())) if entry.span is None else entry.span
        loose = max(1e-8, 10 * entry.tolerance)
        if before.is_complex():
            expected, after = expected.abs(), after.abs()
        assert float((after - expected).abs().max()) <= loose * size, name


def close(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 * scale + 1e-12)
