"""The verification itself: what it reports, and that wrong declarations fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants import decompositions
from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.entry import Invariant, Verdict, declare
from levelhead.invariants.symmetry import moment, relative_change, verify
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.gauge import act_on_qk
from levelhead.weights.structure import Rope
from levelhead.weights.symmetry_group import symmetry_group
from oracles.layers import LAYERS, gains, layer


def entry(function: Callable[[AttentionView], Tensor], verdict: Verdict, **more) -> Invariant:
    """An entry of one's own that reads q and k, the same under everything that moves them."""
    symmetries = declare(verdict, head_permutation=Verdict.GENERIC, basis_rotation=Verdict.GENERIC)
    settings = {"kind": "exact", "reads": frozenset({"q", "k"}), "symmetries": symmetries, **more}
    return Invariant("own", function, "f", "1", "here", "any", 2, **settings)


def test_a_raw_number_declared_invariant_fails() -> None:
    found = verify(layer(), assume={"raw_head_spectrum": "gauge"})
    assert not found.passed
    assert [(c.invariant, c.generator) for c in found.failures] == [
        ("raw_head_spectrum", "qk_gauge"),
        ("raw_head_spectrum", "vo_gauge"),
    ]
    assert all(c.change > 1e-2 for c in found.failures)
    assert verify(layer(), ["raw_head_spectrum"]).passed


def test_spectra_of_normed_queries_and_keys_are_not_the_layers_own() -> None:
    view = LAYERS["normed gains"](0)
    found = verify(view, ["qk_spectrum", "qk_normalised_spectrum", "qk_effective_rank"])
    assert found.passed
    assert found["qk_spectrum", "qk_scale"].declared is Verdict.VARIANT
    assert found["qk_spectrum", "qk_scale"].found == "moved"
    assert "qk_normalised_spectrum" in found.invariants()
    assert "qk_spectrum" not in found.invariants()
    assumed = verify(view, ["qk_spectrum"], assume={"qk_spectrum": "qk_scale"})
    assert [c.generator for c in assumed.failures] == ["qk_scale"]


def test_a_declared_variant_that_never_moves_fails() -> None:
    form = entry(lambda v: v.qk.singular_values(), Verdict.VARIANT, per=("head",))
    failures = verify(layer(), [form]).failures
    assert [c.generator for c in failures] == ["qk_gauge"]
    assert failures[0].found == "still"
    assert verify(layer(), [replace(form, symmetries=declare(Verdict.INVARIANT))]).passed


def test_the_gradient_test_sees_what_two_elements_may_miss() -> None:
    """A number that is invariant under every element that is drawn, and not under small ones."""

    def step(view: AttentionView) -> Tensor:
        size = view.q.square().sum()
        return 1 + 0 * size.detach() + (size - size.detach())  # constant, with a slope

    found = verify(layer(), [entry(step, Verdict.INVARIANT)])["own", "qk_gauge"]
    assert found.change == 0.0
    assert found.moment > 1e-2
    assert not found.passed


def test_moments_are_those_of_the_formula() -> None:
    """μ_i = (∂f/∂q_i) q_iᵀ - k_i (∂f/∂k_i)ᵀ, here for f = Σ ‖q‖²: 2 q qᵀ."""
    view = layer()
    own = entry(lambda v: v.q.square().sum(), Verdict.VARIANT)
    group = symmetry_group(view)
    found = moment(own, view, group.generators)["qk_gauge"]
    mu = 2 * view.q @ view.q.mT
    expected = float(mu.norm()) / float((2 * view.q).norm() * view.q.norm())
    assert found == pytest.approx(expected, rel=1e-12)
    rows = moment(entry(lambda v: v.qk.traces(), Verdict.INVARIANT), view, group.generators)
    assert rows["qk_gauge"] < 1e-15
    assert rows["basis_rotation"] < 1e-15


def test_moments_are_projected_on_what_commutes_with_rotations() -> None:
    """|q_f||k_f| has a moment under GL(d_k), and none along the planes' complex numbers."""
    view = layer(position=Rope("half", 4, 100.0))
    energies = catalogue()["frequency_energies"]
    assert moment(energies, view, symmetry_group(view).generators)["rotary_gauge"] < 1e-14
    x = torch.zeros(4, 4, 4, dtype=torch.float64, requires_grad=True)
    moved = act_on_qk(view, torch.eye(4, dtype=torch.float64) + x)  # GL(d_k): too much here
    energies(moved).sum().backward()
    assert float(x.grad.norm()) > 0.1
    shares = x.grad.diagonal(dim1=1, dim2=2)
    assert float((shares[:, :2] + shares[:, 2:]).abs().max()) < 1e-13  # traces of the planes


@pytest.mark.parametrize(
    ("name", "rotation"),
    [("raw_model_spectrum", True), ("raw_head_cosines", False), ("query_norm", True)],
)
def test_some_raw_numbers_are_invariant_under_rotations_alone(name: str, rotation: bool) -> None:
    """Section 2.8: μ symmetric means O(d_k)-invariant."""
    view = layer(1)
    normed = layer(1, qk_norm=gains())
    assert moment(catalogue()[name], view, symmetry_group(view).generators)["qk_gauge"] > 1e-2
    turned = moment(catalogue()[name], normed, symmetry_group(normed).generators)["qk_rotation"]
    assert (turned < 1e-14) == rotation


def test_what_does_not_exist_is_listed_and_never_fails() -> None:
    view = LAYERS["cross of one width"](0)
    found = verify(view, ["qk_trace"], assume={"qk_trace": "gauge"})
    assert found.passed
    assert {c.declared for c in found} == {Verdict.NOT_APPLICABLE}
    assert "different sequences" in found["qk_trace", "qk_gauge"].reason
    assert str(found["qk_trace", "qk_gauge"].declared) == "not applicable"
    with pytest.raises(KeyError):
        found["qk_trace", "rotary_gauge"]
    assert found.invariants() == ()


def test_a_layer_of_zeros_says_nothing_against_a_variant() -> None:
    view = layer()
    zero = view.map(torch.zeros_like)
    found = verify(zero, ["query_norm", "qk_spectrum", "qk_effective_rank", "qk_coherence"])
    assert found.passed
    assert found["query_norm", "qk_gauge"].found == "zero"


def test_verification_repeats_and_depends_on_its_seed() -> None:
    view = layer()
    one, two, other = (verify(view, ["raw_head_spectrum"], seed=s) for s in (0, 0, 1))
    assert one == two
    changes = [v["raw_head_spectrum", "qk_gauge"].change for v in (one, other)]
    assert changes[0] != changes[1]
    wild = verify(view, ["raw_head_spectrum"], condition=1e4)
    assert wild["raw_head_spectrum", "qk_gauge"].change > 3 * max(changes)


def test_fits_are_drawn_once_and_shared() -> None:
    calls: list[AttentionView] = []

    def through(view: AttentionView) -> Tensor:
        calls.append(view)
        return view.qk.nuclear_norms()

    own = entry(lambda t: t, Verdict.INVARIANT, kind="iterative", through=through)
    names = replace(own, name="other")
    assert verify(layer(), [own, names], draws=5).passed
    group = symmetry_group(layer())
    assert len(calls) == 1 + sum(bool(g.moves & own.reads) for g in group.generators)


@pytest.mark.parametrize("what", ["qk", "ov", "raw"])
def test_the_numbers_of_one_fit_are_computed_from_one_fit(what: str, monkeypatch) -> None:
    made: list[str] = []
    fit_once = decompositions.cp

    def counted(*arguments, **options):
        made.append(what)
        return fit_once(*arguments, **options)

    monkeypatch.setattr(decompositions, "cp", counted)
    names = [name for name in catalogue() if name.startswith(f"{what}_cp_")]
    assert len(names) >= 5
    one = layer()
    verify(one, names, draws=3)
    reads = catalogue()[names[0]].reads
    drawn = sum(bool(g.moves & reads) for g in symmetry_group(one).generators)
    assert len(made) == 1 + drawn


def test_shared_work_changes_no_value_and_no_gradient() -> None:
    """Entries one at a time against all of them together, in both tests."""
    view, names = layer(), [n for n, e in catalogue().items() if e.kind == "exact"]
    generators = symmetry_group(view).generators
    together = verify(view, names, draws=1)
    for name in names[::7]:
        found = moment(catalogue()[name], view, generators) if catalogue()[name].gradient else {}
        for g in generators:
            check = together[name, g.name]
            if catalogue()[name].applies(view) is None and g.name in found:
                assert check.moment == pytest.approx(found[g.name], rel=1e-9, abs=1e-14)
    values = [catalogue()[n](view) for n in names if catalogue()[n].applies(view) is None]
    again = [catalogue()[n](view) for n in names if catalogue()[n].applies(view) is None]
    for one, other in zip(values, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_covariance_can_be_given() -> None:
    view = layer()
    c = torch.diag(torch.arange(10.0))  # singular: a direction that no token has
    assert verify(view, ["whitened_qk_spectrum", "logit_rms"], covariance=c).passed


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draws": 0}, "draws=0"),
        ({"invariants": ["nothing"]}, "no invariant 'nothing'"),
        ({"assume": {"nothing": "gauge"}}, "not among the numbers"),
        ({"invariants": ["qk_rank"], "assume": {"qk_rank": "gage"}}, "no group 'gage'"),
    ],
)
def test_bad_arguments_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        verify(layer(), **settings)


def test_relative_changes() -> None:
    a = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert relative_change(a, a) == 0.0
    assert relative_change(a, a + 0.5) == 0.125
    assert relative_change(a, a + 0.5, 1.0) == 0.5
    assert relative_change(a, a * torch.nan) == float("inf")
    assert relative_change(a, a[:1]) == float("inf")
    assert relative_change(0 * a, a) == 4.0
    whole = torch.tensor([3, 4])
    assert relative_change(whole, torch.tensor([3, 5]), exact=True) == 1.0
    assert relative_change(whole, whole, exact=True) == 0.0
    pair = torch.tensor([1 + 1j, 1 - 1j, 0.5], dtype=torch.complex128)
    assert relative_change(pair, pair[[1, 2, 0]]) == 0.0
    assert relative_change(pair, pair.conj()) == 0.0
    assert relative_change(pair, pair + 0.1) == pytest.approx(0.1 / 2**0.5)
