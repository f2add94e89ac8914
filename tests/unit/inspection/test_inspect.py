"""What inspect hands back and leaves behind."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import levelhead
from levelhead.base.errors import InputError, StoredFileError
from levelhead.base.records import Run
from levelhead.inspection.inspect import inspect
from levelhead.weights.layouts import NothingMatched


def bert(layers: int = 2, d: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for n in range(layers):
        below = f"encoder.layer.{n}.attention"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            weights[f"{below}.{part}.weight"] = torch.randn(d, d, generator=random)
            weights[f"{below}.{part}.bias"] = torch.randn(d, generator=random)
    return weights


NAMES = ["encoder.layer.0.attention", "encoder.layer.1.attention"]


def test_frames_have_a_row_for_each_layer_and_head() -> None:
    found = levelhead.inspect(bert(), heads=3)
    frame = found.to_frame()
    assert list(frame.columns) == [
        "layer", "heads", "groups", "d_k", "qk_effective_rank", "ov_effective_rank",
        "largest_logit_gain", "largest_logit", "qk_coherence", "ov_coherence",
        "qk_effective_heads", "ov_effective_heads", "near_duplicates", "dead_heads", "notes",
    ]  # fmt: skip
    assert frame["layer"].tolist() == NAMES
    assert frame[["heads", "groups", "d_k"]].values.tolist() == [[3, 3, 4]] * 2
    heads = found.heads_frame()
    assert heads[["layer", "head"]].values.tolist() == [[n, i] for n in NAMES for i in range(3)]
    means = heads.groupby("layer")["qk_effective_rank"].mean()
    np.testing.assert_allclose(frame["qk_effective_rank"], means, rtol=1e-12)
    page = found._repr_html_()
    assert page.count("<tr") == 3
    assert NAMES[1] in page
    assert found.run is None
    assert repr(found) == "Inspection('the mapping given': 2 layers)"


def test_values_are_those_of_the_weights() -> None:
    weights = bert(1)
    q, k = (weights[f"{NAMES[0]}.self.{n}.weight"].double().numpy() for n in ("query", "key"))
    gains = [np.linalg.norm(q[4 * i : 4 * i + 4].T @ k[4 * i : 4 * i + 4], 2) / 2 for i in range(3)]
    found = inspect(weights, heads=3).heads_frame()
    np.testing.assert_allclose(found["largest_logit_gain"], gains, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_layers_that_are_not_finite_are_left_out_by_name(bad: float) -> None:
    weights = bert()
    weights[f"{NAMES[0]}.self.key.weight"][3, 3] = bad
    found = inspect(weights, heads=3)
    assert found.to_frame()["layer"].tolist() == NAMES[1:]
    (skip,) = found.skipped
    assert NAMES[0] in str(skip)
    assert "not finite" in str(skip)
    assert any("Left out" in note and "self.key.weight" in note for note in found.notes())
    assert "self.key.weight" in found._repr_html_()


def test_weights_whose_products_overflow_are_left_out() -> None:
    weights = {n: t.double() for n, t in bert(1).items()}
    weights[f"{NAMES[0]}.self.key.weight"] *= 1e200
    found = inspect(weights, heads=3)
    assert found.to_frame().empty
    assert "too large" in found.skipped[0].reason
    assert found.heads_frame().empty
    assert found.table() == ""


def test_layers_are_chosen_by_place_name_or_pattern() -> None:
    for wanted in ([1], [-1], [NAMES[1]], ["*.1.*"]):
        assert inspect(bert(), layers=wanted, heads=3).to_frame()["layer"].tolist() == NAMES[1:]


def test_the_run_holds_readings_arrays_and_a_page(tmp_path) -> None:
    found = inspect(bert(), heads=3, decompose="cp", ranks=[1, 3], out=tmp_path / "run")
    run = Run.open(found.run.folder)
    by_place = {(r.name, *r.where.values()): r for r in run.readings()}
    reading = by_place["qk_effective_heads", NAMES[0]]
    assert reading.value == found.layers[0].numbers["qk_effective_heads"]
    assert "cosines" in reading.source
    assert by_place["largest_logit_gain", NAMES[0]].unit == "logit per x²"
    assert ("head_qk_effective_rank", NAMES[1], 2) in by_place
    np.testing.assert_array_equal(run.array("layer-1.ov_cosines"), found.layers[1].ov_cosines)
    kinds = {figure.name: figure.kind for figure in run.figures()}
    assert kinds["layer-0.qk_similarity"] == kinds["layer-0.ov_similarity"] == "heatmap"
    assert kinds["layer-0.qk_spectra"] == "lines"
    assert kinds["layer-1.cp_shares"] == "heatmap"
    np.testing.assert_allclose(run.array("layer-0.cp_share").sum(1), 1, rtol=1e-9)
    says = {figure.name: figure.says for figure in run.figures()}
    assert "Basis dependent" in says["layer-0.raw_modes"]
    assert "d_k and d_model spectra are well defined" in says["layer-0.canonical_modes"]
    page = levelhead.report(run).read_text(encoding="utf-8")
    for text in ("Effective heads", "shortest weights", "share", NAMES[0]):
        assert text in page


def test_raw_mode_spectra_move_and_canonical_ones_do_not(tmp_path) -> None:
    """The same function with one head in another basis: what the two figures say of it."""
    weights = {n: t.double() for n, t in bert(1).items()}
    other = dict(weights)
    turn = torch.diag(torch.tensor([5.0, 1, 1, 0.2], dtype=torch.float64))
    for part, matrix in (("query", turn), ("key", torch.linalg.inv(turn))):
        for kind in ("weight", "bias"):
            name = f"{NAMES[0]}.self.{part}.{kind}"
            other[name] = torch.cat((matrix @ weights[name][:4], weights[name][4:]))
    runs = [inspect(w, heads=3, out=tmp_path / str(i)).run for i, w in enumerate((weights, other))]
    raw = [run.array("layer-0.raw_mode_spectra") for run in runs]
    canonical = [run.array("layer-0.canonical_mode_spectra") for run in runs]
    assert np.nanmax(np.abs(raw[0] - raw[1])) > 0.01
    np.testing.assert_allclose(canonical[0][1:3], canonical[1][1:3], rtol=1e-8)


def test_rotary_layers_say_why_there_is_no_canonical_spectrum(tmp_path) -> None:
    random = torch.Generator().manual_seed(0)
    weights = {
        f"model.layers.0.self_attn.{n}_proj.weight": torch.randn(rows, 16, generator=random)
        for n, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16))
    }
    found = inspect(weights, heads=4, kv_heads=2, out=tmp_path / "run", layout="llama")
    figures = {figure.name: figure for figure in found.run.figures()}
    assert "layer-0.canonical_modes" not in figures
    assert "There is no canonical gauge beside it" in figures["layer-0.raw_modes"].says
    assert found.to_frame()[["heads", "groups"]].values.tolist() == [[4, 2]]
    assert "rotary" in found.to_frame()["notes"][0]


def test_a_norm_of_queries_and_keys_changes_what_is_reported(tmp_path) -> None:
    """Qwen3: weights of queries 100 times as large are the same layer."""
    random = torch.Generator().manual_seed(0)
    below = "model.layers.0.self_attn"
    weights = {
        f"{below}.{n}_proj.weight": torch.randn(16, 16, generator=random).double() for n in "qkvo"
    }
    gains = {n: 0.5 + torch.rand(4, generator=random).double() for n in "qk"}
    weights |= {f"{below}.{n}_norm.weight": gain for n, gain in gains.items()}
    config = {"model_type": "qwen3", "num_attention_heads": 4, "head_dim": 4, "rms_norm_eps": 1e-30}

    def of(scale: float, out: str):
        scaled = weights | {f"{below}.q_proj.weight": scale * weights[f"{below}.q_proj.weight"]}
        save_file(scaled, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return inspect(tmp_path, out=tmp_path / out)

    one, other = of(1, "one"), of(100, "other")
    for name, value in one.layers[0].numbers.items():
        assert other.layers[0].numbers[name] == pytest.approx(value, rel=1e-9), name
    assert "QK-norm" in one.to_frame()["notes"][0]
    gain = next(r for r in one.run.readings() if r.name == "largest_logit")
    assert gain.unit == "logit"
    assert not any("largest_logit_gain" in r.name for r in one.run.readings())
    (row,) = one.rows()
    assert row["largest_logit"] == gain.value
    assert np.isnan(row["largest_logit_gain"])
    shown = one.table().splitlines()
    assert "largest" in shown[0]
    assert "gain" not in shown[1]
    # d_k·scale·max of the gains' products, over the two members of a rotary plane.
    q, k = (gains[n].reshape(2, 2).amax(0) for n in "qk")
    assert gain.value == pytest.approx(4 / 2 * float((q * k).max()), rel=1e-9)


def test_fits_tell_the_error_of_the_residual() -> None:
    weights = bert(1)
    found = inspect(weights, heads=3, decompose="tucker", ranks=(2, 4, 4))
    frame = found.fits_frame().set_index("tensor")
    q, k = (
        weights[f"{NAMES[0]}.self.{n}.weight"].double().reshape(3, 4, 12) for n in ("query", "key")
    )
    dense = (q.mT @ k).numpy()
    # Sub-optimal by at most √3 against the three truncations, and no better than each of them.
    tails = []
    for mode, rank in enumerate((2, 4, 4)):
        sigma = np.linalg.svd(np.moveaxis(dense, mode, 0).reshape(dense.shape[mode], -1))[1]
        tails.append((sigma[rank:] ** 2).sum())
    size = np.linalg.norm(dense)
    assert max(tails) ** 0.5 / size <= frame.loc["qk", "relative_error"] + 1e-9
    assert frame.loc["qk", "relative_error"] <= sum(tails) ** 0.5 / size + 1e-9
    assert frame.loc["qk", "rank"] == "2×4×4"
    assert frame.loc["raw", "rank"] == "2×4×4×3"
    assert frame.loc["raw", "is"] == "basis dependent"
    exact = inspect(weights, heads=3, decompose="tucker", ranks=(3, 12, 12)).fits_frame()
    assert exact["relative_error"].max() < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decompose": "svd"}, "expected 'tucker' or 'cp'"),
        ({"ranks": 3}, "without a decomposition"),
        ({"decompose": "cp", "ranks": [0]}, "whole numbers from 1"),
        ({"decompose": "tucker", "ranks": [3, 3]}, "tucker needs three"),
        ({"layers": [7]}, "2 were found"),
        ({"covariance": {"other": torch.eye(12)}}, "no covariance for encoder.layer.0.attention"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options, message, tmp_path) -> None:
    with pytest.raises(InputError, match=message):
        inspect(bert(), heads=3, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_sources_without_attention_say_what_was_seen(tmp_path) -> None:
    with pytest.raises(NothingMatched, match=r"convolution\.weight"):
        inspect({"convolution.weight": torch.ones(2, 2)})
    with pytest.raises(StoredFileError, match="does not exist"):
        inspect(tmp_path / "nothing")


def test_covariances_come_from_a_file_of_tensors(tmp_path) -> None:
    save_file({name: torch.eye(12) for name in NAMES}, tmp_path / "c.safetensors")
    by_file = inspect(bert(), heads=3, covariance=tmp_path / "c.safetensors").heads_frame()
    given = inspect(bert(), heads=3, covariance=torch.eye(12)).heads_frame()
    pd.testing.assert_frame_equal(by_file, given)
    # Behind the identity the root mean square of logits is the form's own size.
    assert "logit_rms" in given
    np.testing.assert_allclose(
        given["whitened_qk_effective_rank"], given["qk_effective_rank"], rtol=1e-6
    )


@pytest.mark.parametrize(("figures", "drawn"), [(12, 12), ("all", 14), (1, 1), (0, 0)])
def test_as_many_layers_are_drawn_as_were_asked_for(figures, drawn, tmp_path) -> None:
    weights = {}
    random = torch.Generator().manual_seed(0)
    for n in range(14):
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            name = f"encoder.layer.{n}.attention.{part}.weight"
            weights[name] = torch.randn(4, 4, generator=random)
    found = inspect(weights, heads=2, out=tmp_path / "run", figures=figures)
    names = {name for figure in found.run.figures() for name in str(figure).split("'")}
    layers = {name.split(".")[0] for name in names if name.startswith("layer-")}
    assert len(layers) == drawn
    said = [note for note in found.run.notes() if "not drawn" in note]
    assert said == (
        []
        if drawn == 14
        else [f"{14 - drawn} layers are in the table and the files, and not drawn."]
    )


@pytest.mark.parametrize("figures", [-1, "some", True])
def test_other_numbers_of_figures_are_refused(figures) -> None:
    with pytest.raises(InputError, match="expected 'all' or a number of layers"):
        inspect({}, figures=figures)
