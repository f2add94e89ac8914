"""The networks of the arms, against loops over windows and tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from levelhead.forecasting.candidates import Line
from levelhead.nn.samformer import SAMformerNet
from levelhead.studies.forecasting_models import (
    ARMS,
    IdentityNet,
    TemporalNet,
    built,
    map_measures,
)

CONTEXT, HORIZON, CHANNELS, WIDTH, COUNT = 9, 4, 3, 2, 5
NETWORKS = [name for name, arm in ARMS.items() if arm.line is None]


def stirred(net: SAMformerNet, seed: int = 0) -> SAMformerNet:
    """All parameters drawn anew, biases and RevIN's gains as well."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 2 + 0.5)
    return net.double()


def normalised(seed: int = 1) -> torch.Tensor:
    x = np.random.default_rng(seed).normal(size=(CHANNELS, COUNT, CONTEXT))
    return torch.from_numpy((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True))


def arrays(net: SAMformerNet) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


def softmax(row: np.ndarray) -> np.ndarray:
    powers = np.exp(row - row.max())
    return powers / powers.sum()


def temporal_twin(w: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Forecast [D, H] and A [L, L] of one normalised window x [D, L], step by step."""
    z = w["norm.gain"][:, None] * x + w["norm.shift"][:, None]
    steps = [z[:, t] for t in range(CONTEXT)]
    query = [step @ w["query"] + w["query_bias"] for step in steps]
    key = [step @ w["key"] + w["key_bias"] for step in steps]
    value = [step @ w["value"] + w["value_bias"] for step in steps]
    maps = np.stack([softmax(np.array([q @ k for k in key]) / math.sqrt(WIDTH)) for q in query])
    mixed = np.empty_like(z)
    for t in range(CONTEXT):
        attended = sum(maps[t, s] * value[s] for s in range(CONTEXT))
        mixed[:, t] = steps[t] + attended @ w["output"] + w["output_bias"]
    made = mixed @ w["head"] + w["head_bias"]
    return (made - w["norm.shift"][:, None]) / w["norm.gain"][:, None], maps


def test_temporal_attention_is_that_between_steps() -> None:
    net = stirred(TemporalNet(CONTEXT, HORIZON, CHANNELS, width=WIDTH))
    x = normalised()
    got = net.core(x).detach().numpy()
    for window in range(COUNT):
        expected, _ = temporal_twin(arrays(net), x[:, window].numpy())
        np.testing.assert_allclose(got[:, window], expected, rtol=1e-9, atol=1e-11)


def test_temporal_maps_are_of_steps() -> None:
    net = stirred(TemporalNet(CONTEXT, HORIZON, CHANNELS, width=WIDTH))
    x = normalised()
    got = net.attention(x.transpose(0, 1) * 3.0 + 7.0).detach().numpy()
    assert got.shape == (COUNT, CONTEXT, CONTEXT)
    for window in range(COUNT):
        _, expected = temporal_twin(arrays(net), x[:, window].numpy())
        # RevIN's eps is the only difference.
        np.testing.assert_allclose(got[window], expected, rtol=1e-4, atol=1e-6)


def test_temporal_attention_does_not_depend_on_the_order_of_steps() -> None:
    net = stirred(TemporalNet(CONTEXT, HORIZON, CHANNELS, width=WIDTH))
    x = normalised()
    order = torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(3))
    before = net.core(x)
    with torch.no_grad():
        net.head.copy_(net.head[order])
    torch.testing.assert_close(net.core(x[..., order]), before, rtol=1e-9, atol=1e-11)


def test_identity_attention_is_one_line_for_each_channel() -> None:
    net = stirred(IdentityNet(CONTEXT, HORIZON, CHANNELS, width=WIDTH, revin_affine=True))
    w, x = arrays(net), normalised().numpy()
    z = w["norm.gain"][:, None, None] * x + w["norm.shift"][:, None, None]
    value = z @ w["value"] + w["value_bias"]
    made = (z + value @ w["output"] + w["output_bias"]) @ w["head"] + w["head_bias"]
    expected = (made - w["norm.shift"][:, None, None]) / w["norm.gain"][:, None, None]
    got = net.core(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        net.attention(torch.zeros(2, CHANNELS, CONTEXT, dtype=torch.float64))[1],
        torch.eye(CHANNELS, dtype=torch.float64),
    )


def make(name: str, seed: int = 0, line: Line | None = None) -> SAMformerNet:
    sizes = (CONTEXT, HORIZON, CHANNELS)
    line = Line(torch.ones(CONTEXT, HORIZON).double() / CONTEXT, 1.0) if line is None else line
    return built(ARMS[name], *sizes, width=WIDTH, init="glorot", seed=seed, line=line)


@pytest.mark.parametrize("name", NETWORKS)
def test_an_arm_is_drawn_from_its_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(name, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = make(name, seed=2), make(name, seed=3)
    x = normalised().float()
    assert torch.equal(first.core(x), again.core(x))
    # The arm that starts from the line forecasts as the line whatever its seed.
    assert torch.equal(first.core(x), other.core(x)) == ARMS[name].from_line


def test_arms_that_differ_in_training_alone_start_equal() -> None:
    x = normalised().float()
    start = make("samformer").core(x)
    for name in ("transformer", "random", "transformer-slip", "samformer-slip"):
        assert torch.equal(make(name).core(x), start)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_trained(name: str) -> None:
    trained = {n.split(".")[-1] for n, p in make(name).named_parameters() if p.requires_grad}
    head = {"head", "head_bias", "gain", "shift"}
    if name == "random":
        assert trained == head
    elif name == "identity":
        assert trained == head | {"value", "value_bias", "output", "output_bias"}
    elif ARMS[name].gamma is not None:
        assert {"original", "gamma", "head_bias", "gain", "shift"} <= trained
    else:
        assert {"query", "key", "value", "output", "query_bias"} | head <= trained


def test_sigma_reparam_bounds_every_weight() -> None:
    net = make("sigma").eval()
    for name in ("query", "key", "value", "output", "head"):
        norm = torch.linalg.matrix_norm(getattr(net, name).double(), 2)
        assert norm.item() == pytest.approx(1.0, rel=1e-5)


def test_started_from_a_line_the_network_is_that_line() -> None:
    head = torch.from_numpy(np.random.default_rng(0).normal(size=(CONTEXT, HORIZON)))
    line = Line(head, 1.0)
    x = normalised()
    made = make("from-line", line=line).double().core(x)
    # The head is kept in float32.
    torch.testing.assert_close(made, line.core(x), rtol=1e-6, atol=1e-6)


def test_measures_of_known_maps() -> None:
    size = 4
    eye = torch.eye(size).expand(3, size, size)
    assert map_measures(eye) == pytest.approx({"entropy_share": 0.0, "own": 1.0, "rank": 4.0})
    uniform = torch.full((3, size, size), 1 / size)
    expected = {"entropy_share": 1.0, "own": 0.25, "rank": 1.0}
    assert map_measures(uniform) == pytest.approx(expected, rel=1e-6)
