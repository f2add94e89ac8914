"""λ_max of a SAMformer's loss to 1 %: levelhead against curvlinops with SciPy's eigsh.

CPU seconds of one process, in turns. The reference is eigsh at a tolerance of 1e-6; both must be
within 1 % of it. The peer runs with eigsh's own number of Lanczos vectors (20), which decides how
many products it takes whatever the tolerance.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from levelhead.diagnostics.hessian import Hessian, Surface, surface
from levelhead.diagnostics.sharpness import largest_eigenvalue
from levelhead.nn.samformer import SAMformerNet

CONTEXT, HORIZON, CHANNELS, WINDOWS = 512, 96, 7, 256
ROUNDS = 5
# Both curvlinops and forward derivatives load code that PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def windows() -> tuple[Tensor, Tensor]:
    """256 windows of seven noisy waves: [256, 7, 512] and [256, 7, 96]."""
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(3000.0)
    waves = torch.stack([torch.sin(t / (5 + 3 * c)) for c in range(CHANNELS)])
    series = waves + 0.3 * torch.randn(waves.shape, generator=generator)
    starts = torch.randint(0, 3000 - CONTEXT - HORIZON, (WINDOWS,), generator=generator)
    cut = torch.stack([series[:, s : s + CONTEXT + HORIZON] for s in starts])
    return cut[..., :CONTEXT], cut[..., CONTEXT:]


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def peer(net: nn.Module, x: Tensor, y: Tensor, tolerance: float) -> float:
    """curvlinops' Hessian as a SciPy operator, and eigsh."""
    curvlinops = pytest.importorskip("curvlinops")
    sparse = pytest.importorskip("scipy.sparse.linalg")
    operator = curvlinops.HessianLinearOperator(
        net, nn.MSELoss(), list(net.parameters()), [(x, y)], check_deterministic=False
    )
    found = sparse.eigsh(
        operator.to_scipy(), k=1, which="LA", tol=tolerance, return_eigenvectors=False
    )
    return float(found[0])


@pytest.mark.parametrize("steps", [0, 50, 200])
def test_samformer(rows: Any, steps: int) -> None:
    """At the start and after some steps of Adam."""
    torch.manual_seed(0)
    net = SAMformerNet(CONTEXT, HORIZON, CHANNELS)
    x, y = windows()

    def loss() -> Tensor:
        return nn.functional.mse_loss(net(x), y)

    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    reference = peer(net, x, y, 1e-6)
    quotients, errors, theirs = [], [], []
    for round_ in range(ROUNDS):
        mine, found = cpu_seconds(lambda seed=round_: largest_eigenvalue(loss, net, seed=seed))
        other, value = cpu_seconds(lambda: peer(net, x, y, 0.1))
        quotients.append(other / mine)
        errors.append(abs(found.value / reference - 1))
        theirs.append(abs(value / reference - 1))
    assert max(errors) < 0.01
    assert max(theirs) < 0.01
    rows.note(
        f"λ_max after {steps} steps, curvlinops + eigsh / ours",
        f"{statistics.median(quotients):.1f}x fewer CPU seconds "
        f"({min(quotients):.1f}–{max(quotients):.1f}; ours {found.steps} products, worst error "
        f"{max(errors):.1e})",
    )


def test_ways_to_a_product(rows: Any) -> None:
    """One Hessian-vector product: graph kept, graph built anew, jvp of grad."""
    torch.manual_seed(0)
    net = SAMformerNet(CONTEXT, HORIZON, CHANNELS)
    x, y = windows()

    def loss() -> Tensor:
        return nn.functional.mse_loss(net(x), y)

    weights = {n: p.detach() for n, p in net.named_parameters()}
    along = {n: torch.randn_like(p) for n, p in weights.items()}

    def by_jvp() -> object:
        # Written out: mse_loss has no forward derivative of its backward.
        def squares(p: dict[str, Tensor]) -> Tensor:
            return (torch.func.functional_call(net, p, (x,)) - y).square().mean()  # type: ignore[no-any-return]

        return torch.func.jvp(torch.func.grad(squares), (weights,), (along,))

    with surface(loss, net) as whole:
        v = torch.randn(whole.size)
        kept = Hessian(whole)
        halves = Surface([loss, loss], whole.params, whole._state)
        anew = Hessian(halves)
        rows.ratio(
            "a product with the graph built anew / kept",
            lambda: (kept(v), kept(v)),
            lambda: anew(v),
        )
        rows.ratio("a product by jvp of grad / graph kept", lambda: kept(v), by_jvp)
