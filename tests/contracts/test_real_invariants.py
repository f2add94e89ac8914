"""The catalogue on real checkpoints, where they are at hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from levelhead.invariants.catalogue import catalogue
from levelhead.invariants.symmetry import relative_change, verify
from levelhead.weights.folding import folded
from levelhead.weights.layouts import views
from levelhead.weights.structure import Rope

ROOT = Path(__file__).resolve().parents[2]
EXACT = [e.name for e in catalogue().values() if e.kind == "exact"]


@pytest.fixture(scope="module")
def pretrained() -> Path:
    """Folder with nano_sort and stories260K; not part of the repository."""
    folder = Path(os.environ.get("LEVELHEAD_PRETRAINED", ROOT.parent / "shared" / "pretrained"))
    if not (folder / "stories260K" / "stories260K.bin").is_file():
        pytest.skip("set LEVELHEAD_PRETRAINED to a folder with nano_sort and stories260K")
    return folder


@pytest.mark.parametrize("name", ["nano_sort", "stories260K"])
def test_declarations_hold_on_real_layers(pretrained: Path, name: str) -> None:
    for view in list(views(pretrained / name))[::2]:
        found = verify(folded(view), EXACT)
        assert [(c.invariant, c.generator, c.change) for c in found.failures] == []
        assert {"ov_spectrum", "qk_spectrum", "qk_gram"} <= set(found.invariants())
        assert not {"raw_head_spectrum", "query_norm"} & set(found.invariants())


def test_one_model_in_two_files_has_the_same_invariants(pretrained: Path) -> None:
    """llama2.c interleaves rotary planes, transformers splits them: read so, both agree."""
    ours = list(views(pretrained / "stories260K" / "stories260K.bin"))
    theirs = list(views(pretrained / "stories260K"))
    for a, b in zip(ours, theirs, strict=True):
        own = verify(folded(b), EXACT, draws=1).invariants()
        assert len(own) > 50
        for name in own:
            entry = catalogue()[name]
            if entry.applies(b) is None:
                values = entry(folded(a)), entry(folded(b))
                assert relative_change(*values, entry.span) < 1e-6, name


@pytest.mark.parametrize("misread", ["interleaved as halves", "halves as interleaved"])
def test_rotary_planes_read_wrongly_move_what_looks_at_planes_and_nothing_else(
    pretrained: Path, misread: str
) -> None:
    """The order of inner dimensions is a change of basis: only their pairing distinguishes it."""
    one = next(views(pretrained / "stories260K" / "stories260K.bin"))
    other = next(views(pretrained / "stories260K"))
    right, wrong = (other, one) if misread == "interleaved as halves" else (one, other)
    assert isinstance(wrong.position, Rope)
    assert isinstance(right.position, Rope)
    wrong = folded(replace(wrong, position=replace(wrong.position, layout=right.position.layout)))
    right = folded(right)
    moved = set()
    own = verify(right, EXACT, draws=1).invariants()
    for name in own:
        entry = catalogue()[name]
        if entry.applies(right) is None and entry.kind != "data":
            change = relative_change(entry(right), entry(wrong), entry.span)
            assert change < 1e-6 or change > 0.05, name
            if change > 0.05:
                moved.add(name)
    assert moved == {"frequency_energies", "frequency_shares", "rotary_gram", "rotary_coherence"}
