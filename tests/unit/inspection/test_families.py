"""Every family of the table of layouts: inspected, and its numbers the layers' own."""

from __future__ import annotations

import warnings

import pytest
import torch

from levelhead.inspection.inspect import inspect
from levelhead.inspection.measures import folded_layer, measure
from levelhead.weights.layouts import views
from levelhead.weights.symmetry_group import symmetry_group

pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from contracts.layout_cases import CASES, Case, fill


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_element_of_a_layers_group_moves_its_numbers(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fill(case.make())
    found = inspect(model)
    assert len(found.layers) == case.layers
    assert not found.skipped
    for view, numbers in zip(views(model), found.layers, strict=True):
        folded, _ = folded_layer(view)
        other = symmetry_group(folded).random(folded, torch.Generator().manual_seed(1)).view
        moved = measure(other).numbers
        for name, value in numbers.numbers.items():
            if name not in numbers.basis_dependent:
                assert moved[name] == pytest.approx(value, rel=1e-5), (view.name, name)
