"""One suite for every entry of the catalogue: what it declares is what it does.

A new entry is tested by being in the table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError
from levelhead.invariants.catalogue import catalogue, entries
from levelhead.invariants.entry import Invariant, Verdict
from levelhead.invariants.symmetry import verify
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.folding import folded
from levelhead.weights.symmetry_group import GENERATORS, symmetry_group
from oracles.layers import LAYERS, layer

TABLE = catalogue()
EXACT = [e.name for e in TABLE.values() if e.kind != "iterative"]
every_entry = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)
every_layer = pytest.mark.parametrize("name", sorted(LAYERS))


def value(entry: Invariant, view: AttentionView) -> Tensor:
    return entry(view, torch.eye(view.d) if entry.kind == "data" else None)


@every_entry
def test_an_entry_says_what_it_is(entry: Invariant) -> None:
    assert all((entry.name, entry.formula, entry.unit, entry.source, entry.range))
    assert entry.name == entry.name.lower().replace(" ", "_")
    assert entry.kind in ("exact", "integer", "iterative", "data")
    assert entry.reads
    assert 0 < entry.tolerance <= 1e-3
    assert entry.tolerance == 1e-8 or entry.kind == "iterative" or not entry.gradient or (
        entry.smooth is not None
    )  # fmt: skip


@every_entry
def test_an_entry_declares_every_generator_that_moves_what_it_reads(entry: Invariant) -> None:
    declared: set[str] = set()
    for make in LAYERS.values():
        view = make(0)
        for generator in symmetry_group(view).generators:
            verdict, reason = entry.verdict(view, generator)
            assert isinstance(verdict, Verdict)
            assert (verdict is Verdict.NOT_APPLICABLE) <= bool(reason)
            declared.add(generator.name)
    assert declared == set(GENERATORS)


@every_entry
def test_values_have_the_axes_and_the_degree_they_say(entry: Invariant) -> None:
    found = 0
    for name in ("grouped", "partly rotary", "normed own gains", "plain"):
        view = LAYERS[name](2)
        if entry.applies(view) is not None:
            continue
        found += 1
        base = value(entry, view)
        assert base.dtype in (torch.float64, torch.int64, torch.complex128)
        assert bool(base.isfinite().all())
        lengths = {"head": view.heads, "group": view.groups}
        assert tuple(base.shape[: len(entry.per)]) == tuple(lengths[p] for p in entry.per)
        if entry.degree is not None:
            twice = replace(view, q=2 * view.q, k=2 * view.k, v=2 * view.v, o=2 * view.o)
            grown = value(entry, twice)
            expected = base.to(grown.dtype) * 2**entry.degree
            loose = max(entry.tolerance, 1e-9)
            scale = float(expected.abs().max()) if entry.span is None else entry.span
            assert float((grown - expected).abs().max()) <= loose * max(scale, 1e-300)
    assert found


@every_entry
def test_float32_weights_give_float64_values(entry: Invariant) -> None:
    view = layer(2, biases="q") if entry.name == "key_preference_norm" else layer(2)
    if entry.applies(view) is not None:
        return
    wide = value(entry, view)
    narrow = value(entry, view.to(torch.float32))
    assert narrow.dtype == wide.dtype
    if entry.kind not in ("iterative", "integer") and not entry.name.startswith("canonical"):
        scale = entry.span or float(wide.abs().max())
        assert float((narrow - wide).abs().max()) < 1e-4 * scale


@every_layer
def test_declarations_hold_for_every_kind_of_layer(name: str) -> None:
    """T5: random elements of the layer's own group, and the infinitesimal test."""
    found = verify(LAYERS[name](1), EXACT)
    assert [(c.invariant, c.generator, c.change, c.moment) for c in found.failures] == []


@every_layer
def test_declarations_hold_for_every_folded_layer(name: str) -> None:
    view = LAYERS[name](3)
    if view.input_norm.kind == "none":
        return
    view = folded(view)
    found = verify(view, EXACT)
    assert [(c.invariant, c.generator, c.change, c.moment) for c in found.failures] == []
    if view.qk_norm is None and not view.cross:
        assert "qk_spectrum" in found.invariants()


@pytest.mark.parametrize(
    "name", ["biased", "one group", "half rotary", "normed gains", "cross", "linear", "tied"]
)
def test_declarations_of_fits_hold(name: str) -> None:
    fits = [e.name for e in TABLE.values() if e.kind == "iterative"]
    found = verify(LAYERS[name](1), fits)
    assert [(c.invariant, c.generator, c.change) for c in found.failures] == []


CONTROLS = {
    "raw_head_spectrum": "plain",
    "raw_qkv_spectrum": "plain",
    "raw_head_cosines": "half rotary",
    "query_reciprocal_condition": "plain",
    "key_reciprocal_condition": "grouped",
    "small_product_norm": "plain",
    "qk_spectrum": "normed",
    "qk_effective_rank": "normed layer",
    "ov_spectrum": "linear",
    "qk_nuclear_norm": "centred in front",
}


@pytest.mark.parametrize("name", CONTROLS)
def test_negative_controls_move(name: str) -> None:
    """T6: what is no invariant of a layer moves by more than a hundredth under its own group."""
    view = LAYERS[CONTROLS[name]](1)
    found = verify(view, [name], assume={name: "all"})
    assert not found.passed
    assert max(c.change for c in found.failures) > 1e-2
    assert max(c.moment for c in found.failures) > 1e-3
    assert {c.reason for c in found.failures} == {"assumed"}


def test_the_declared_tables_are_not_trivial() -> None:
    """Every generator moves something that some entry reads, and leaves some entry still."""
    for generator in GENERATORS:
        verdicts = set()
        for make in LAYERS.values():
            view = make(0)
            try:
                there = symmetry_group(view)[generator]
            except InputError:
                continue
            for entry in entries():
                if there.moves & entry.reads:
                    verdicts.add(entry.verdict(view, there)[0])
        if generator not in ("key_bias", "value_bias"):  # numbers of biases alone are few
            assert Verdict.INVARIANT in verdicts, generator
