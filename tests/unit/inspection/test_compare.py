"""Heads of two checkpoints: who is who, and what moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import levelhead
from levelhead.base.errors import InputError
from levelhead.base.records import Run
from levelhead.inspection.compare import compare, steps_of
from levelhead.weights.layouts import NothingMatched

H, R, D = 3, 4, 12
NAME = "encoder.layer.0.attention"


def bert(seed: int = 0, layers: int = 2, d: int = D) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        f"encoder.layer.{n}.attention.{part}.weight": torch.randn(
            d, d, generator=random, dtype=torch.float64
        )
        for n in range(layers)
        for part in ("self.query", "self.key", "self.value", "output.dense")
    }


def disguised(weights: dict[str, torch.Tensor], order: list[int]) -> dict[str, torch.Tensor]:
    """The same layers with heads in another order and another basis inside every head."""
    random = torch.Generator().manual_seed(7)
    out = {}
    for name in {n.rsplit(".attention", 1)[0] + ".attention" for n in weights}:
        parts = {p: weights[f"{name}.self.{p}.weight"] for p in ("query", "key", "value")}
        q, k, v = (t.reshape(H, R, D)[order] for t in parts.values())
        o = weights[f"{name}.output.dense.weight"].reshape(D, H, R)[:, order]
        g, m = (
            torch.eye(R, dtype=torch.float64)
            + 0.3 * torch.randn(H, R, R, generator=random, dtype=torch.float64)
            for _ in range(2)
        )
        out[f"{name}.self.query.weight"] = (g @ q).reshape(D, D)
        out[f"{name}.self.key.weight"] = (torch.linalg.inv(g).mT @ k).reshape(D, D)
        out[f"{name}.self.value.weight"] = (m @ v).reshape(D, D)
        inverse = torch.linalg.inv(m)
        out[f"{name}.output.dense.weight"] = torch.einsum("dhr,hrs->dhs", o, inverse).reshape(D, D)
    return out


def test_the_same_layer_in_disguise_has_not_moved() -> None:
    order = [2, 0, 1]
    found = levelhead.compare(bert(), disguised(bert(), order), heads=H)
    assert len(found.heads) == 2 * H
    for row in found.heads:
        assert order[row["matched"]] == row["head"]
        assert row["change"] < 1e-11
        assert row["qk_cosine"] == pytest.approx(1, abs=1e-12)
    assert all(row["permuted"] == 3 for row in found.layers)


def test_the_same_weights_have_moved_by_nothing() -> None:
    found = compare(bert(), bert(), heads=H)
    assert max(row["change"] for row in found.heads) < 1e-14
    assert [row["matched"] for row in found.heads] == [row["head"] for row in found.heads]


def test_what_moved_most_comes_first_with_its_relative_distance() -> None:
    other = bert()
    other["encoder.layer.1.attention.self.query.weight"][R : 2 * R] *= 1.5
    other[f"{NAME}.output.dense.weight"][:, :R] *= 0.9
    found = compare(bert(), disguised(other, [1, 2, 0]), heads=H)
    first, second, third = found.heads[:3]
    assert (first["layer"], first["head"]) == ("encoder.layer.1.attention", 1)
    assert first["qk_change"] == pytest.approx(0.5, rel=1e-9)
    assert first["ov_change"] < 1e-11
    assert first["change"] == pytest.approx(0.5 / 2**0.5, rel=1e-9)
    assert (second["layer"], second["head"]) == (NAME, 0)
    assert second["ov_change"] == pytest.approx(0.1, rel=1e-9)
    assert third["change"] < 1e-11
    assert any("Most moved: head 1 of encoder.layer.1" in note for note in found.notes())
    frame = found.to_frame()
    assert frame["change"].is_monotonic_decreasing
    assert "Most moved" in found._repr_html_()


def test_changes_are_those_of_dense_forms() -> None:
    one, two = bert(1, layers=1), bert(1, layers=1)
    noise = bert(2, layers=1)
    two = {n: t + 0.05 * noise[n] for n, t in two.items()}

    def forms(weights: dict[str, torch.Tensor]) -> np.ndarray:
        q, k = (weights[f"{NAME}.self.{p}.weight"].reshape(H, R, D) for p in ("query", "key"))
        return (q.mT @ k).numpy()

    b, c = forms(one), forms(two)
    expected = [np.linalg.norm(b[i] - c[i]) / np.linalg.norm(b[i]) for i in range(H)]
    found = compare(one, two, heads=H).to_frame().sort_values("head")
    np.testing.assert_allclose(found["qk_change"], expected, rtol=1e-9)


def llama(seed: int = 0, g: int = H) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = {"q_proj": (H * R, D), "k_proj": (g * R, D), "v_proj": (g * R, D), "o_proj": (D, H * R)}
    return {
        f"model.layers.0.self_attn.{n}.weight": torch.randn(
            *shape, generator=random, dtype=torch.float64
        )
        for n, shape in sizes.items()
    }


QUERY, KEY = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qk")
ROTARY = {"heads": H, "theta": 100.0, "layout": "llama"}


def turned(weights: dict[str, torch.Tensor], offset: int) -> np.ndarray:
    """B_i(n) [h, d, d] of half-split rotary positions, multiplied out."""
    q, k = (weights[name].reshape(H, R, D).numpy() for name in (QUERY, KEY))
    angles = offset * 100.0 ** -(2 * np.arange(R // 2) / R)
    cosine, sine = (np.diag(np.concatenate([f(angles)] * 2)) for f in (np.cos, np.sin))
    swap = np.zeros((R, R))
    swap[: R // 2, R // 2 :], swap[R // 2 :, : R // 2] = -np.eye(R // 2), np.eye(R // 2)
    return np.einsum("hrd,rs,hse->hde", q, cosine + sine @ swap, k)


def test_rotary_layers_are_compared_over_all_offsets() -> None:
    one, noise = llama(1), llama(2)
    two = {n: t + 0.3 * noise[n] for n, t in one.items()}
    moved, size = np.zeros(H), np.zeros(H)
    for offset in range(6000):
        b, c = turned(one, offset), turned(two, offset)
        moved += ((b - c) ** 2).sum((1, 2))
        size += (b**2).sum((1, 2))
    expected = np.sqrt(moved / size)
    found = compare(one, two, **ROTARY)
    here = found.to_frame().sort_values("head")["qk_change"]
    np.testing.assert_allclose(here, expected, rtol=1e-3)
    b, c = turned(one, 0), turned(two, 0)
    alone = np.sqrt(((b - c) ** 2).sum((1, 2)) / (b**2).sum((1, 2)))
    assert np.abs(here / alone - 1).max() > 0.02
    assert "Rotary positions: QK forms are compared by averages over all offsets." in found.said


def test_a_rotary_layer_that_keeps_only_the_form_of_a_token_with_itself_has_moved() -> None:
    one = llama(1)
    two = dict(one)
    plane = torch.tensor([[2.0, 0.5], [-0.5, 2.0]], dtype=torch.float64)
    any_map = torch.eye(R, dtype=torch.float64) + torch.ones(R, R, dtype=torch.float64).triu(1)
    commuting = torch.kron(plane, torch.eye(R // 2, dtype=torch.float64))
    for element, moves in ((any_map, True), (commuting, False)):
        two[QUERY] = (element @ one[QUERY].reshape(H, R, D)).reshape(H * R, D)
        back = torch.linalg.inv(element).T
        two[KEY] = (back @ one[KEY].reshape(H, R, D)).reshape(H * R, D)
        np.testing.assert_allclose(turned(one, 0), turned(two, 0), rtol=1e-9, atol=1e-12)
        changes = [row["qk_change"] for row in compare(one, two, **ROTARY).heads]
        assert min(changes) > 0.1 if moves else max(changes) < 1e-11


def test_rotary_heads_in_another_order_are_found_also_in_groups() -> None:
    one = llama(3, g=1)
    two = dict(one)
    order = [1, 2, 0]
    two[QUERY] = one[QUERY].reshape(H, R, D)[order].reshape(H * R, D)
    name = QUERY.replace("q_proj", "o_proj")
    two[name] = one[name].reshape(D, H, R)[:, order].reshape(D, H * R)
    found = compare(one, two, kv_heads=1, **ROTARY)
    assert all(order[row["matched"]] == row["head"] for row in found.heads)
    assert max(row["change"] for row in found.heads) < 1e-12
    assert min(row["qk_cosine"] for row in found.heads) == pytest.approx(1, rel=1e-12)


def test_spectra_of_rotary_layers_are_said_to_be_of_a_token_with_itself() -> None:
    found = compare(llama(1), llama(1), basis="own", **ROTARY)
    assert "Rotary positions: singular values are those of a token with itself." in found.said
    assert not any("Rotary" in note for note in compare(bert(), bert(), heads=H).said)


def test_models_trained_apart_compare_by_spectra() -> None:
    """The residual stream of one is a rotation of the other's: forms differ, spectra do not."""
    one = bert(layers=1)
    random = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(D, D, generator=random, dtype=torch.float64)).Q
    other = {
        n: turn @ t if n.endswith("dense.weight") else t @ turn.mT
        for n, t in disguised(one, [1, 2, 0]).items()
    }
    shared = compare(one, other, heads=H)
    assert any("trained apart" in note for note in shared.notes())
    own = compare(one, other, heads=H, basis="own")
    for row in own.heads:
        assert [1, 2, 0][row["matched"]] == row["head"]
        assert row["change"] < 1e-10


def test_layers_that_do_not_belong_together_are_named() -> None:
    found = compare(bert(layers=2), bert(layers=1), heads=H)
    assert {row["layer"] for row in found.heads} == {NAME}
    assert "encoder.layer.1.attention" in str(found.skipped[0])
    other = {n.replace("encoder.layer", "deep.encoder.layer"): t for n, t in bert().items()}
    assert len(compare(bert(), other, heads=H).heads) == 2 * H, "in order where names differ"
    with pytest.raises(NothingMatched, match=r"the names seen are encoder\.layer\.0\.attention"):
        compare(bert(layers=1), other, heads=H)
    wide = bert(layers=1, d=24)
    (skip,) = compare(bert(layers=1), wide, heads=H).skipped
    assert "3 heads on width 12 against 3 on 24" in str(skip)


def test_a_series_gives_curves(tmp_path) -> None:
    start, target = bert(0, layers=1), bert(1, layers=1)
    for step, share in ((0, 0.0), (100, 0.5), (20, 0.1)):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        mixed = {n: t + share * (target[n] - t) for n, t in start.items()}
        save_file(mixed, folder / "model.safetensors")
    found = compare(tmp_path, heads=H, out=tmp_path / "run")
    assert [row["step"] for row in found.layers] == [0, 20, 100]
    changes = [row["qk_change"] for row in found.layers]
    assert changes[0] < 1e-14
    assert 0.05 < changes[1] < changes[2]
    run = Run.open(tmp_path / "run")
    np.testing.assert_allclose(run.array("qk_change"), [changes])
    assert [f.kind for f in run.figures()] == ["lines"] * 4
    assert {r.step for r in run.readings()} == {0, 20, 100}
    assert levelhead.report(run).is_file()


def test_a_run_of_two_checkpoints_has_its_tables(tmp_path) -> None:
    other = bert()
    other[f"{NAME}.self.query.weight"][:R] *= 2
    found = compare(bert(), other, heads=H, out=tmp_path / "run")
    run = Run.open(found.run.folder)
    (heads, layers) = run.figures()
    assert heads.labels["rows"][0] == f"{NAME}, head 0"
    assert run.array("heads")[0][1] == pytest.approx(1.0)
    assert layers.labels["rows"] == (NAME, "encoder.layer.1.attention")
    assert "What moved most" in levelhead.report(run).read_text(encoding="utf-8")


def test_one_source_must_be_a_series(tmp_path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(InputError, match="holds 1 step"):
        steps_of(tmp_path)
    with pytest.raises(InputError, match="give two checkpoints"):
        compare(bert())
    with pytest.raises(InputError, match="expected 'shared' or 'own'"):
        compare(bert(), bert(), basis="none")
