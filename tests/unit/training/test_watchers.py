"""Readings against dense twins: invariants, norms, roughness."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from levelhead.base.errors import InputError
from levelhead.invariants.catalogue import catalogue
from levelhead.training import watchers
from levelhead.training.watchers import (
    MAP_NAMES,
    chosen_invariants,
    frobenius,
    map_readings,
    norm_readings,
    roughness,
    weight_readings,
)
from levelhead.weights.attention_view import AttentionView
from levelhead.weights.structure import QKNorm


def a_view(dtype: torch.dtype = torch.float32, **more: object) -> AttentionView:
    torch.manual_seed(3)
    h, g, r, d = 4, 2, 3, 8
    shapes = {"q": (h, r, d), "k": (g, r, d), "v": (g, r, d), "o": (h, d, r)}
    weights = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    return AttentionView(**weights, name="layer", **more)


def forms(view: AttentionView) -> tuple[np.ndarray, np.ndarray]:
    """B and M as dense matrices, head by head."""
    q, k, v, o = (t.double().numpy() for t in (view.q, view.k, view.v, view.o))
    groups = view.kv_group
    return (
        np.stack([q[i].T @ k[g] for i, g in enumerate(groups)]),
        np.stack([o[i] @ v[g] for i, g in enumerate(groups)]),
    )


def test_default_invariants_are_those_of_dense_forms() -> None:
    view = a_view()
    found = {
        (r.name, r.where.get("head")): r for r in weight_readings(view, chosen_invariants(None), 7)
    }
    b, m = forms(view)
    for name, stack in (("qk", b), ("ov", m)):
        sigma = np.linalg.svd(stack, compute_uv=False)[:, :3]
        p = sigma / sigma.sum(1, keepdims=True)
        ranks = np.exp(-(p * np.log(p)).sum(1))
        flat = stack.reshape(4, -1)
        cos = flat @ flat.T
        cos /= np.sqrt(np.outer(cos.diagonal(), cos.diagonal()))
        off = cos[~np.eye(4, dtype=bool)]
        assert found[f"{name}_coherence", None].value == pytest.approx((off**2).mean(), rel=1e-10)
        heads = 16 / (cos**2).sum()
        assert found[f"{name}_effective_heads", None].value == pytest.approx(heads, rel=1e-10)
        for i in range(4):
            assert found[f"{name}_effective_rank", i].value == pytest.approx(ranks[i], rel=1e-10)
        if name == "qk":
            for i in range(4):
                top = sigma[i, 0]
                assert found["qk_spectral_norm", i].value == pytest.approx(top, rel=1e-10)
                gain = found["largest_logit_gain", i].value
                assert gain == pytest.approx(top / math.sqrt(3), rel=1e-10)
        else:
            for i in range(4):
                size = np.linalg.norm(m[i])
                assert found["ov_frobenius_norm", i].value == pytest.approx(size, rel=1e-10)
    assert all(r.step == 7 and r.where["layer"] == "layer" for r in found.values())
    assert found["qk_spectral_norm", 0].unit == catalogue()["qk_spectral_norm"].unit


def test_shared_work_gives_the_very_numbers_of_the_catalogue() -> None:
    view = a_view()
    names = [e.name for e in catalogue().values() if e.kind not in ("data", "iterative")]
    found = weight_readings(view, chosen_invariants(names), 1)
    by_name: dict[str, list[float]] = {}
    for reading in found:
        by_name.setdefault(reading.name, []).append(reading.value)
    for name in names:
        entry = catalogue()[name]
        if entry.applies(view) is None:
            value = entry(view)
            value = value.abs() if value.is_complex() else value
            assert by_name[name] == value.double().flatten().tolist(), name
        else:
            assert name not in by_name


def test_singular_values_are_computed_once_for_all_entries(monkeypatch) -> None:
    calls = []
    plain = torch.linalg.svdvals
    monkeypatch.setattr(torch.linalg, "svdvals", lambda x: calls.append(1) or plain(x))
    names = ["qk_spectral_norm", "qk_effective_rank", "qk_nuclear_norm", "largest_logit_gain"]
    weight_readings(a_view(), chosen_invariants(names), 1)
    assert len(calls) == 1


def test_places_of_numbers_with_two_axes() -> None:
    view = a_view()
    found = weight_readings(view, chosen_invariants(["qk_cosines", "qk_spectrum"]), None)
    cosines = catalogue()["qk_cosines"](view)
    for reading in found:
        head = reading.where["head"]
        if reading.name == "qk_cosines":
            assert reading.value == float(cosines[head, reading.where["other"]])
    assert {r.where["index"] for r in found if r.name == "qk_spectrum"} == {0, 1, 2}


def test_weights_that_are_not_finite_have_nan_and_raise_nothing() -> None:
    view = a_view()
    view.q[0, 0, 0] = math.inf
    found = weight_readings(view, chosen_invariants(["qk_spectral_norm", "qk_coherence"]), 1)
    assert len(found) == 5
    assert all(math.isnan(r.value) for r in found)


def test_a_normed_layer_has_a_bound_and_no_gain() -> None:
    view = a_view(qk_norm=QKNorm("rms", "head", None, None, eps=1e-6))
    found = weight_readings(view, chosen_invariants(["largest_logit_gain", "largest_logit"]), 1)
    assert {r.name for r in found} == {"largest_logit_bound"}


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["qk_rnak"], "no invariant 'qk_rnak'"),
        (["logit_rms"], "needs the covariance"),
        (["qk_cp_error"], "ask for snapshots"),
        ("qk_rank", "expected a sequence of names"),
    ],
)
def test_entries_that_cannot_be_watched_are_refused(names, match) -> None:
    with pytest.raises(InputError, match=match):
        chosen_invariants(names)


# ── norms ──


def test_norms_of_mixed_tensors() -> None:
    torch.manual_seed(0)
    half = (torch.randn(50) * 300).half()  # squares overflow float16
    sparse = torch.sparse_coo_tensor(
        [[0, 0, 2]], [[1.0, 2.0], [2.0, 2.0], [0.0, 1.0]], (4, 2), check_invariants=True
    )
    tensors = [half, torch.randn(3, 4), torch.randn(5, dtype=torch.float64), sparse]
    flat = np.concatenate([t.to_dense().double().numpy().ravel() for t in tensors])
    assert float(frobenius(tensors)) == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    assert float(frobenius([])) == 0.0


def test_norms_of_layers_and_of_the_whole() -> None:
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    found = norm_readings(
        "gradient_norm", tensors, {"x": ["a", "gone"], "y": ["gone"]}, 3, factor=0.5
    )
    assert [(r.where.get("layer"), r.value) for r in found] == [(None, 6.5), ("x", 2.5), ("y", 0.0)]


def test_trainable_parameters_are_the_ones_that_move() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert list(watchers.trainable(model)) == ["weight"]


# ── maps and losses ──


def test_statistics_of_maps_become_readings() -> None:
    statistics = SimpleNamespace(
        **{name: torch.tensor([1.0, 2.0]) * i for i, name in enumerate(MAP_NAMES)}
    )
    found = map_readings("enc", statistics, 5)
    assert len(found) == 2 * len(MAP_NAMES)
    by_name = {(r.name, r.where["head"]): r.value for r in found}
    assert by_name["attention_entropy_share", 1] == 2.0
    assert by_name["map_residual", 0] == 8.0


def test_roughness_is_free_of_scale_and_of_slopes() -> None:
    rng = np.random.default_rng(0)
    losses = (2 + rng.normal(size=20)).tolist()
    bends = np.abs(np.diff(losses, 2)).mean() / np.abs(losses).mean()
    assert roughness(losses) == pytest.approx(bends, rel=1e-12)
    assert roughness([10 * loss for loss in losses]) == pytest.approx(bends, rel=1e-12)
    assert roughness([1.0, 1.5, 2.0, 2.5]) == 0.0
    assert math.isnan(roughness([1.0, 2.0]))
    assert roughness([0.0, 0.0, 0.0]) == 0.0
