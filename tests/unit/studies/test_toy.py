"""The toy study: data, arms, what is read off a model, and the propositions by other routes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from levelhead.nn.samformer import SAMformerNet
from levelhead.studies.running import study_settings
from levelhead.studies.toy import STUDY, ToySettings, _curvature
from levelhead.studies.toy_model import (
    ARMS,
    _SquaredError,
    built,
    mean_loss,
    measured,
    toy_data,
)
from levelhead.studies.toy_propositions import entropy_bound, propositions

SIZES = {"init": "keras", "width": 4, "seed": 3}


def loss_by_hand(weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """Equation 3 window by window, in NumPy."""
    total = 0.0
    for window, target in zip(x, y, strict=True):
        logits = (window @ weights["query"]) @ (window @ weights["key"]).T
        maps = np.exp(logits / math.sqrt(weights["query"].shape[1]))
        maps /= maps.sum(-1, keepdims=True)
        inner = window + maps @ window @ weights["value"] @ weights["output"]
        total += ((inner @ weights["head"] - target) ** 2).mean()
    return total / len(x)


def test_the_data_are_those_of_equation_2_and_seeded() -> None:
    toy = toy_data(32, 8, 4, 200, 100, seed=1)
    assert toy.x.shape == (200, 4, 32)
    assert toy.y_val.shape == (100, 4, 8)
    noise = toy.y - toy.x @ toy.truth
    assert float(noise.std()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(toy.x, toy_data(32, 8, 4, 200, 100, seed=1).x)
    assert not torch.equal(toy.x, toy_data(32, 8, 4, 200, 100, seed=2).x)


@pytest.mark.parametrize("arm", ["transformer", "tied", "random", "sigma"])
def test_the_loss_is_that_of_equation_3(arm: str) -> None:
    toy = toy_data(16, 4, 3, 20, 10, seed=0)
    model = built(ARMS[arm], 16, 4, **SIZES)
    names = ["query", "key", "value", "output", "head"]
    weights = {
        n: getattr(model, n).detach().double().numpy()
        for n in names
        if getattr(model, n) is not None
    }
    weights.setdefault("key", weights["query"])
    expected = loss_by_hand(weights, toy.x.double().numpy(), toy.y.double().numpy())
    found = mean_loss(model, ARMS[arm], toy.x, toy.y, 0.0).detach()
    assert float(found) == pytest.approx(expected, rel=1e-5)
    assert measured(model, toy.x, toy.y)["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_network_is_samformer_without_its_normalisation() -> None:
    toy = toy_data(16, 4, 3, 20, 10, seed=0)
    model = built(ARMS["transformer"], 16, 4, **SIZES)
    plain = SAMformerNet(16, 4, revin=False, bias=False, width=4)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.core(toy.x), plain(toy.x), rtol=1e-5, atol=1e-6)


def test_the_written_out_backward_pass_is_the_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(5, 3, 8), (5, 3, 4), (8, 10), (2, 8)]
    x, y, *weights = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    weights = [w.requires_grad_() for w in weights]
    assert torch.autograd.gradcheck(lambda *w: _SquaredError.apply(x, y, *w), weights)


def test_frozen_arms_train_their_head_alone_and_silent_ones_attend_to_nothing() -> None:
    random = built(ARMS["random"], 16, 4, **SIZES)
    assert [n for n, p in random.named_parameters() if p.requires_grad] == ["head"]
    linear = built(ARMS["linear"], 16, 4, **SIZES)
    toy = toy_data(16, 4, 3, 20, 10, seed=0)
    torch.testing.assert_close(linear.core(toy.x), toy.x @ linear.head)


@pytest.mark.parametrize(("arm", "own"), [("entropy-none", 1.0), ("entropy-full", 1 / 3)])
def test_interventions_fix_what_they_say(arm: str, own: float) -> None:
    toy = toy_data(16, 4, 3, 20, 10, seed=0)
    found = measured(built(ARMS[arm], 16, 4, **SIZES), toy.x, toy.y)
    assert found["own"] == pytest.approx(own)
    limit = math.log(3) if own < 1 else 0.0
    assert found["entropy"] == pytest.approx(limit, abs=1e-6)
    assert found["rank"] == pytest.approx(1.0 if own < 1 else 3.0, rel=1e-5)
    same = "loss_identity" if own == 1 else "loss_uniform"
    assert found["loss"] == pytest.approx(found[same], rel=1e-6)


def test_penalties_of_arms_are_added_as_they_are_written() -> None:
    toy = toy_data(16, 4, 3, 20, 10, seed=0)
    model = built(ARMS["quiet"], 16, 4, **SIZES)
    plain = mean_loss(model, ARMS["transformer"], toy.x, toy.y, 0.0)
    size = torch.linalg.matrix_norm(model.value @ model.output).square()
    expected = plain + ARMS["quiet"].quiet * size
    torch.testing.assert_close(mean_loss(model, ARMS["quiet"], toy.x, toy.y, 0.0), expected)
    maps = model.maps(toy.x).detach().double().numpy()
    entropy = -(maps * np.log(maps)).sum(-1)
    floor = 1.05
    weight = ARMS["entropy-floor"].entropy
    penalty = weight * np.square(np.maximum(floor - entropy, 0)).mean()
    found = mean_loss(model, ARMS["entropy-floor"], toy.x, toy.y, floor)
    assert float((found - plain).detach()) == pytest.approx(penalty, rel=1e-3)
    assert penalty > 0


def test_the_entropy_bound_is_the_least_entropy_within_its_radius() -> None:
    draw = np.random.default_rng(0)
    for tokens, radius in ((3, 0.5), (7, 2.0), (7, 6.0)):
        logits = draw.normal(size=(4000, tokens))
        logits -= logits.mean(-1, keepdims=True)
        logits *= radius / np.linalg.norm(logits, axis=-1, keepdims=True)
        p = np.exp(logits)
        p /= p.sum(-1, keepdims=True)
        entropy = -(p * np.log(p)).sum(-1)
        bound = float(entropy_bound(torch.tensor(radius, dtype=torch.float64), tokens))
        assert entropy.min() >= bound - 1e-12
        spike = np.full(tokens, -1 / tokens)
        spike[0] += 1
        spike *= radius / np.linalg.norm(spike)
        q = np.exp(spike) / np.exp(spike).sum()
        assert -(q * np.log(q)).sum() == pytest.approx(bound, rel=1e-10)


def test_numbers_of_the_propositions_by_other_routes() -> None:
    toy = toy_data(24, 6, 3, 200, 100, seed=0)
    found = {r.name: r.value for r in propositions(toy, 4, 0)}
    assert found["prop21_dimension"] == (24 - 3) * 6
    x = toy.x.reshape(-1, 24).double().numpy()
    y = toy.y.reshape(-1, 6).double().numpy()
    w, *_ = np.linalg.lstsq(x, y, rcond=None)
    truth = toy.truth.double().numpy()
    assert found["ols_error"] == pytest.approx(np.linalg.norm(w - truth), rel=1e-9)
    held = toy.x_val.double().numpy() @ w - toy.y_val.double().numpy()
    assert found["oracle_validation"] == pytest.approx((held**2).mean(), rel=1e-9)
    assert found["prop22_ratio"] <= found["prop22_sharp_ratio"] <= 1
    assert 0 < found["sam_first_order_0.1"] < 0.1


def test_the_grid_has_headline_arms_with_all_seeds_and_the_rest_with_few() -> None:
    settings = study_settings(STUDY)
    names = [cell.name for cell in STUDY.cells(settings)]
    assert "train-keras-sam-4" in names
    assert "train-glorot-sam-0" in names
    assert "train-glorot-sam-1" not in names
    assert "train-glorot-sam-sigma-0" not in names
    assert "train-keras-quiet-2" in names
    assert "train-keras-quiet-3" not in names
    assert "train-keras-tied-0" in names
    assert "train-keras-tied-1" not in names
    assert "train-glorot-quiet-0" not in names
    assert sum(name.startswith("optimiser") for name in names) == 4 * 3


def test_sharpness_is_of_the_function_not_of_how_an_arm_writes_it() -> None:
    toy = toy_data(32, 8, 4, 64, 8, seed=0)
    settings = ToySettings(curvature_windows=64)
    found = {
        name: _curvature(
            settings, ARMS[name], built(ARMS[name], 32, 8, init="keras", width=4, seed=0), toy
        )
        for name in ("transformer", "sigma-kept", "random", "linear", "tied", "entropy-none")
    }
    plain = found["transformer"]
    # The same function from the same weights, under σReparam and with attention frozen.
    for name in ("sigma-kept", "random"):
        assert found[name]["lambda_max"] == pytest.approx(plain["lambda_max"], rel=1e-3)
        assert found[name]["sam_sharpness"] == pytest.approx(plain["sam_sharpness"], rel=1e-3)
    assert plain["lambda_max_trained"] == plain["lambda_max"]
    assert found["random"]["lambda_max_trained"] < 0.9 * plain["lambda_max"]
    # Of W alone the loss is a quadratic: 2 λ_max(XᵀX) / (N D H), by another route.
    x = toy.x.reshape(-1, 32).double()
    exact = 2 * torch.linalg.eigvalsh(x.mT @ x)[-1] / (len(x) * 8)
    assert found["linear"]["lambda_max_trained"] == pytest.approx(float(exact), rel=0.02)
