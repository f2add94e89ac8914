"""Two processes that train together, and a model that torch.compile took over."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from levelhead.base.errors import InputError, LevelheadWarning
from levelhead.base.records import Run
from levelhead.training.watch import watch

TRAIN = textwrap.dedent("""
    import os, sys, warnings
    from contextlib import nullcontext
    import torch, torch.distributed as dist
    import levelhead
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, folder, watched = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = torch.nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
            self.norm = torch.nn.BatchNorm1d(8)
        def forward(self, x):
            return self.norm(self.attn(x, x, x)[0].mean(1))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(rank + 1)
    x = torch.randn(6, 3, 4, 8)
    closure = lambda: model.module(x[0]).square().mean()
    more = {"sharpness": closure, "probe_batch": x[0]}
    run = levelhead.watch(model, optimizer, 2, **more, out=f"{folder}/run")
    with run if watched else nullcontext():
        for batch in x:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss) if watched else None
            run.record("mine", 1.0) if watched else None
    assert not watched or run.steps == (6 if rank == 0 else 0)
    assert run.alarms == []
    torch.save(model.state_dict(), f"{folder}/weights-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of torch's reducers may abort an interpreter that is taken down
""")


def test_two_processes_train_as_without_and_the_first_writes(tmp_path: Path) -> None:
    weights = []
    for watched in (0, 1):
        folder = tmp_path / str(watched)
        folder.mkdir()
        together = [
            subprocess.Popen([sys.executable, "-c", TRAIN, str(rank), str(folder), str(watched)])
            for rank in (0, 1)
        ]
        try:
            assert [process.wait(120) for process in together] == [0, 0]
        finally:
            for process in together:
                process.kill()
                process.wait()
        weights += [torch.load(folder / f"weights-{r}.pt") for r in (0, 1)]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[2][name]), name
        assert torch.equal(weights[1][name], weights[3][name]), name
    run = Run.open(tmp_path / "1" / "run")
    readings = run.readings()
    assert [r.step for r in readings if r.name == "loss"] == [1, 2, 3, 4, 5, 6]
    assert [r.step for r in readings if r.name == "mine"] == [1, 2, 3, 4, 5, 6]
    assert {r.step for r in readings if r.name == "largest_hessian_eigenvalue"} == {1, 2, 4, 6}
    assert {r.where["layer"] for r in readings if r.name == "attention_entropy"} == {"attn"}
    assert not list((tmp_path / "0").glob("run"))


def test_a_closure_that_would_wait_for_others_is_refused(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(
            nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)})
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            return model(torch.zeros(1)).sum()

        with (
            pytest.raises(InputError, match=r"let it call model\.module"),
            watch(model, optimizer, maps=False, sharpness=closure, out=tmp_path / "run"),
        ):
            optimizer.step()
    finally:
        distributed.destroy_process_group()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


def trained(model: nn.Module, run: object, optimizer: torch.optim.Optimizer) -> None:
    for x in torch.randn(4, 2, 5, 8, generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("batch", [True, False])
def test_a_compiled_model_is_named_or_seen_on_the_probe_batch(batch: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Small()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.randn(2, 5, 8)).sum().backward()  # compiled before it is watched
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = torch.randn(3, 5, 8) if batch else None
    run = watch(compiled, optimizer, 2, probe_batch=probe, out=tmp_path)
    if batch:
        with run:
            trained(compiled, run, optimizer)
    else:
        with pytest.warns(LevelheadWarning, match=r"Step 1: no maps of attn: .*compile"), run:
            trained(compiled, run, optimizer)
    found = [r for r in run.readings() if r.name == "attention_entropy"]
    assert {r.step for r in found} == ({1, 2, 4} if batch else set())
    assert {r.source for r in found} == ({"maps on probe_batch"} if batch else set())
    assert {r.step for r in run.readings() if r.name == "qk_effective_rank"} == {1, 2, 4}
    assert ("probe_batch" in run.coverage["attn"]) is True
