"""A forward beside training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from levelhead.diagnostics.capture import MapCapture
from levelhead.diagnostics.looking import undisturbed, unwrapped


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_parallel_and_compiled_wrappings_are_left_away() -> None:
    """A forward of one process alone through DistributedDataParallel would wait for the others."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.BatchNorm1d(8))
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    assert unwrapped(wrapped) is model  # type: ignore[arg-type]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.norm(self.attention(tokens, tokens, tokens)[0].flatten(0, 1))  # type: ignore[no-any-return]

    parallel = DistributedDataParallel(Own())
    capture = MapCapture(parallel, ["module.attention"])
    assert list(capture.look(parallel, torch.ones(5, 2, 8))) == ["module.attention"]


def test_everything_is_put_back_after_an_exception() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    model[1].eval()
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()

    def disturb() -> None:
        with undisturbed(model) as still:
            assert not still[0].training
            assert not torch.is_grad_enabled()
            torch.rand(3)
            still[0].running_mean.add_(1)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        disturb()
    assert [m.training for m in model.modules()] == [True, True, False]
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad


def test_looking_inside_autocast_leaves_the_gradients_of_the_next_forward() -> None:
    """Autocast would hand on copies of weights that were made without gradient."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with undisturbed(model) as still:
            still(x)
        model(x).float().square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
