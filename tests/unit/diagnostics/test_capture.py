"""Watching maps while models run: nothing changes by a bit, everything is seen or named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import oracles.attention_maps as slow
from levelhead.base.errors import InputError
from levelhead.diagnostics.attention_maps import AttentionCall, attention_call
from levelhead.diagnostics.capture import MapCapture, Receive
from levelhead.nn.samformer import SAMformerNet

D, H, N = 8, 2, 5


def x(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Lift(nn.Module):
    """Larger inputs, so that attention is not uniform."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3 * tokens


class Attention(nn.Module):
    """minGPT's kind of layer, with several ways to weigh values."""

    def __init__(self, way: str = "sdpa", dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.way, self.dropout, self.n_head = way, dropout, H
        self.gate, self.lift = nn.Linear(D, 3), Lift()
        self.logits: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        b, n, _ = tokens.shape
        route = torch.softmax(self.gate(tokens), dim=-1)
        q, k, v = (
            t.view(b, n, H, -1).transpose(1, 2) for t in self.qkv(self.lift(tokens)).chunk(3, -1)
        )
        past = torch.ones(n, n, dtype=torch.bool).tril()
        logits = (q @ k.mT / math.sqrt(D // H)).masked_fill(~past, -math.inf)
        self.logits = logits.detach()
        p = 0.0 if not self.training else self.dropout
        if self.way == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        elif self.way == "softmax":
            y = F.dropout(F.softmax(logits, dim=-1), p, self.training) @ v
        elif self.way == "method":
            y = torch.matmul(logits.softmax(-1, dtype=torch.float64).to(v.dtype), v)
        elif self.way == "einsum":
            y = torch.einsum("bhij,bhjd->bhid", torch.softmax(logits, dim=3), v)
        elif self.way == "bmm":
            weights = nn.Softmax(dim=-1)(logits.reshape(b * H, n, n))
            y = torch.bmm(weights, v.reshape(b * H, n, -1)).view(b, H, n, -1)
        elif self.way == "sink":
            more = torch.cat((logits, torch.zeros(b, H, n, 1)), -1)
            y = torch.softmax(more, -1)[..., :-1] @ v
        elif self.way == "transposed":
            y = (v.mT @ torch.softmax(logits, -1).mT).mT
        else:
            weights = torch.softmax(logits, -1)
            y = (weights[..., None] * v[:, :, None]).sum(-2)
        return self.out(y.transpose(1, 2).reshape(b, n, D)) * route[..., :1]


class Model(nn.Module):
    """Two layers, one of them below a container."""

    def __init__(self, way: str = "sdpa", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Attention(way, dropout)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(D), Attention(way, dropout))])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks[0](tokens + self.first(tokens))


NAMES = ["first", "blocks.0.1"]
TOKENS = x(1, 3, N, D)


def step(model: nn.Module, tokens: Tensor = TOKENS) -> list[Tensor]:
    """Output and gradients of one training step, and the random state after it."""
    torch.manual_seed(7)
    model.zero_grad()
    out = model(tokens)
    out.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.detach(), *gradients, torch.get_rng_state()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def hooked(model: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ── what is seen ──


WAYS = ["sdpa", "softmax", "method", "einsum", "bmm", "transposed"]


@pytest.mark.parametrize("way", WAYS)
def test_entropy_is_that_of_the_eager_matrix(way: str) -> None:
    model = Model(way)
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        model(TOKENS)
        found = capture.collect()
    assert list(found) == NAMES
    assert capture.missing() == {}
    for name, layer in (("first", model.first), ("blocks.0.1", model.blocks[0][1])):
        logits = layer.logits
        assert logits is not None
        expected = slow.statistics(logits, logits > -math.inf)
        for field in ("entropy", "entropy_share", "largest_logit", "top_mass", "nuclear_norm"):
            wanted = torch.tensor(getattr(expected, field), dtype=torch.float64)
            torch.testing.assert_close(
                getattr(found[name], field).double(), wanted, atol=1e-5, rtol=0
            )
        assert found[name].method == ("chunks" if way == "sdpa" else "eager")


def test_a_sink_belongs_to_the_map() -> None:
    model = Model("sink")
    with MapCapture(model, ["first"]) as capture:
        capture.armed = True
        model(TOKENS)
        found = capture.collect()["first"]
    logits = model.first.logits
    assert logits is not None
    more = torch.cat((logits, torch.zeros(3, H, N, 1)), -1)
    wanted = torch.tensor(slow.statistics(more, more > -math.inf).entropy)
    torch.testing.assert_close(found.entropy.double(), wanted.double(), atol=1e-5, rtol=0)


def test_a_softmax_that_weighs_nothing_is_not_attention() -> None:
    """The gate's softmax stands first in each layer and never counts, here nor above."""
    model = Model("elementwise")
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        model(TOKENS)
        assert capture.collect() == {}
    said = capture.missing()
    assert set(said) == set(NAMES)
    assert "softmax of shape [3, 5, 3]" in said["first"]


@pytest.mark.parametrize("name", ["", "samformer"])
@pytest.mark.parametrize("revin", [True, False])
def test_samformer(name: str, revin: bool) -> None:
    torch.manual_seed(0)
    model = SAMformerNet(12, 4, width=6, revin=revin)
    windows = 3 * x(2, 3, 7, 12)
    with MapCapture(model, [name]) as capture:
        capture.armed = True
        model(windows)
        found = capture.collect()[name]
    weights = model.attention(windows).detach().double()
    expected = -torch.special.xlogy(weights, weights).sum(-1).mean()
    torch.testing.assert_close(found.entropy.double(), expected[None], atol=1e-5, rtol=0)


def test_heads_of_a_folded_axis_may_be_given() -> None:
    model = Model("bmm")
    del model.first.n_head
    for heads, count in (({}, 1), ({"first": H}, H)):
        with MapCapture(model, ["first"], heads=heads) as capture:
            capture.armed = True
            model(TOKENS)
            assert capture.collect()["first"].entropy.shape == (count,)


def test_a_parent_serves_and_one_module_may_have_two_names() -> None:
    model = Model()
    model.again = model.first  # type: ignore[assignment]
    with MapCapture(model, ["blocks.0", "first", "again"]) as capture:
        capture.armed = True
        model(TOKENS)
        found = capture.collect()
    assert set(found) == {"blocks.0", "first", "again"}
    assert found["first"] is found["again"]


def test_of_nested_layers_the_innermost_counts() -> None:
    """The whole model's first attention is the inner layer's: the outer one saw none of its own."""
    model = Model()
    with MapCapture(model, ["blocks.0", "blocks.0.1"]) as capture:
        capture.armed = True
        model(TOKENS)
        assert list(capture.collect()) == ["blocks.0.1"]
        assert list(capture.missing()) == ["blocks.0"]


def test_only_the_first_call_of_an_arming_counts() -> None:
    model = Model()
    with MapCapture(model, ["first"]) as capture:
        capture.armed = True
        model(TOKENS)
        model(100 * TOKENS)
        first = capture.collect()["first"]
        model(100 * TOKENS)
        again = capture.collect()["first"]
        capture.armed = False
        capture.armed = True
        model(TOKENS)
        third = capture.collect()["first"]
    assert torch.equal(first.entropy, third.entropy)
    assert not torch.equal(first.entropy, again.entropy)


def test_a_layer_replaced_while_training_is_found_again() -> None:
    model = Model()
    with MapCapture(model, ["first"]) as capture:
        model.first = Attention("softmax")
        capture.armed = True
        model(TOKENS)
        assert capture.collect()["first"].method == "eager"


# ── nothing changes ──


@pytest.mark.parametrize("way", [*WAYS, "sink", "elementwise"])
def test_a_step_is_the_same_by_the_bit(way: str) -> None:
    model = Model(way, dropout=0.3).train()
    plain = step(model)
    with MapCapture(model, NAMES) as capture:
        assert same(step(model), plain)
        capture.armed = True
        assert same(step(model), plain)
        capture.armed = False
        assert same(step(model), plain)
    assert not hooked(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The step is the same, weights keep their gradients, statistics are in float32."""
    model = nn.Sequential(Model("softmax"), nn.TransformerEncoderLayer(D, H, 16, dropout=0.0))
    names = ["0.first", "1.self_attn"]

    def half_step() -> list[Tensor]:
        with torch.autocast("cpu", dtype=dtype):
            return step(model)

    plain = half_step()
    with MapCapture(model, names) as capture:
        capture.armed = True
        assert same(half_step(), plain)
        found = capture.collect()
    assert set(found) == set(names)
    assert all(s.entropy.dtype == torch.float32 for s in found.values())


def test_disarmed_there_is_nothing() -> None:
    """No hook, no mode, no statistics; and while armed none but at the layers themselves."""
    model = Model()
    with MapCapture(model, NAMES) as capture:
        assert not hooked(model)
        model(TOKENS)
        assert capture.collect() == {}
        assert capture.missing() == {}
        capture.armed = True
        assert [n for n, m in model.named_modules() if m._forward_hooks] == NAMES
        assert torch._C._len_torch_function_stack() == 0
    assert not hooked(model)


@pytest.mark.parametrize("options", [{}, {"reentrant": True}, {"selective": True}])
def test_gradient_checkpointing(options: dict[str, bool]) -> None:
    """The second forward is not looked at, and selective checkpointing caches none of our work."""

    class Checkpointed(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            more: dict[str, Any] = {"use_reentrant": options.get("reentrant", False)}
            if options.get("selective"):
                kept = [torch.ops.aten.bmm.default, torch.ops.aten.mul.Tensor]
                more["context_fn"] = lambda: create_selective_checkpoint_contexts(kept)
            return checkpoint(super().forward, tokens.requires_grad_(), **more)  # type: ignore[no-any-return]

    model = Checkpointed("softmax", dropout=0.3).train()
    plain = step(model, TOKENS.clone())
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        assert same(step(model, TOKENS.clone()), plain)
        assert list(capture.collect()) == NAMES


def test_functions_own_modes_stay_in_place() -> None:
    """An exception or an interruption in the forward leaves no mode behind, and passes."""

    class Failing(Model):
        raises: type[BaseException] = ValueError

        def forward(self, tokens: Tensor) -> Tensor:
            def stop(*_: object) -> None:
                raise self.raises("stop")

            handle = self.first.out.register_forward_pre_hook(stop)
            try:
                return super().forward(tokens)
            finally:
                handle.remove()

    model = Failing()
    for raised in (ValueError, KeyboardInterrupt):
        model.raises = raised
        with torch.device("cpu"), MapCapture(model, NAMES) as capture:
            capture.armed = True
            with pytest.raises(raised, match="stop"):
                model(TOKENS)
            capture.armed = False
            assert torch._C._len_torch_function_stack() == 1
        assert torch._C._len_torch_function_stack() == 0


def test_models_may_be_copied_while_armed() -> None:
    model = Model()
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.first.out.weight.zero_()
        assert not torch.equal(twin(TOKENS), model(TOKENS))


# ── what cannot be seen is named ──


def test_meta_and_fake_tensors_are_left_alone() -> None:
    with FakeTensorMode():
        model = Model()
        with MapCapture(model, NAMES) as capture:
            capture.armed = True
            model(torch.zeros(3, N, D))
            assert capture.collect() == {}
            assert "FakeTensor" in capture.missing()["first"]
    empty = nn.MultiheadAttention(D, H, device="meta")
    with MapCapture(empty, [""]) as capture:
        capture.armed = True
        tokens = torch.zeros(N, 3, D, device="meta")
        empty(tokens, tokens, tokens)
        assert "meta device" in capture.missing()[""]


def test_a_failure_of_statistics_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: AttentionCall, **_: object) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr("levelhead.diagnostics.capture.map_statistics", broken)
    model = Model().train()
    plain = step(model)
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        assert same(step(model), plain)
        said = capture.missing()["first"]
    assert "its statistics failed (RuntimeError: no memory): " in said
    assert "capture.look" in said


def test_layers_that_do_not_run_are_missing_until_they_do() -> None:
    model = Model()
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        model.first(TOKENS)
        assert list(capture.missing()) == ["blocks.0.1"]
        assert "not called as a module" in capture.missing()["blocks.0.1"]
        model(TOKENS)
        assert capture.missing() == {}


def test_unknown_layers_are_refused() -> None:
    with pytest.raises(InputError, match=r"layer 'second' was asked for.*first"):
        MapCapture(Model(), ["second"])


def test_kernels_that_call_nothing_are_named() -> None:
    class Config:
        _attn_implementation = "flash_attention_2"

    model = Model("elementwise")
    model.first.config = Config()  # type: ignore[assignment]
    with MapCapture(model, ["first"]) as capture:
        capture.armed = True
        assert "attention_probe()" in capture.missing()["first"]


# ── compiled ──


@contextmanager
def compiled(how: str, model: Model) -> Iterator[tuple[Callable[[Tensor], Tensor], Any]]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    run: Callable[[Tensor], Tensor] = model
    if how == "torch.compile(model)":
        run = torch.compile(model, backend=counter, fullgraph=True)
    elif how == "model.compile()":
        model.compile(backend=counter, fullgraph=True)
    elif how == "part.compile()":
        model.first.compile(backend=counter, fullgraph=True)
        model.blocks[0].compile(backend=counter, fullgraph=True)
    elif how == "part = torch.compile(part)":
        model.first = torch.compile(model.first, backend=counter, fullgraph=True)  # type: ignore
        model.blocks[0] = torch.compile(model.blocks[0], backend=counter, fullgraph=True)  # type: ignore
    elif how == "below":
        model.first.lift.compile(backend=counter, fullgraph=True)
        model.blocks[0][1].lift.compile(backend=counter, fullgraph=True)
    else:

        def run(tokens: Tensor) -> Tensor:
            return model(tokens)  # type: ignore[no-any-return]

        run = torch.compile(run, backend=counter, fullgraph=True)
    yield run, counter
    torch._dynamo.reset()


AFTER = ["torch.compile(model)", "model.compile()", "part.compile()", "below", "function"]
CASES = [(how, False) for how in (*AFTER, "part = torch.compile(part)")]
CASES += [(how, True) for how in ("torch.compile(model)", "function")]


# Dynamo looks at .grad of inputs that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(("how", "armed_first"), CASES)
def test_compiled_models_train_the_same_and_are_named(how: str, armed_first: bool) -> None:
    """Armed before or after compilation: the same bits, no graph more, and the remedy said."""
    plain = Model("softmax").train()(TOKENS).detach()
    model = Model("softmax").train()
    with compiled(how, model) as (run, counter):
        watched = run if isinstance(run, nn.Module) else model
        with MapCapture(watched, NAMES) as capture:
            if not armed_first:
                run(TOKENS)
            before = counter.frame_count
            capture.armed = True
            assert torch.equal(run(TOKENS).detach(), plain)
            said = capture.missing()
            assert capture.collect() == {}
            capture.armed = False
            assert torch.equal(run(TOKENS).detach(), plain)
            assert armed_first or counter.frame_count == before
            assert set(said) == set(NAMES)
            for reason in said.values():
                assert "torch.compile drops hooks" in reason
                assert "capture.look(model, batch)" in reason
            frames = counter.frame_count
            found = capture.look(watched, TOKENS)
            assert list(found) == NAMES
            assert capture.missing() == {}
            run(TOKENS)
            assert counter.frame_count == frames
            assert not hooked(model)


def test_names_from_before_compilation_and_after() -> None:
    model = torch.compile(Model(), backend="aot_eager")
    for names in (NAMES, [f"_orig_mod.{n}" for n in NAMES]):
        assert list(MapCapture(model, names).look(model, TOKENS)) == names  # type: ignore[arg-type]


# ── look ──


class Counting(Model):
    """With a buffer that every forward changes, and dropout in the middle."""

    def __init__(self) -> None:
        super().__init__("softmax", dropout=0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.norm = nn.BatchNorm1d(N)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        self.steps.add_(1)  # type: ignore[operator]
        torch.rand(1)
        return super().forward(self.norm(scale * tokens))


@pytest.mark.parametrize(
    "batch", [TOKENS, (TOKENS,), [TOKENS, 1.0], {"tokens": TOKENS, "scale": 1.0}]
)
def test_look_leaves_no_trace(batch: object) -> None:
    model = Counting().train()
    model.first.eval()
    plain = copy.deepcopy(model.state_dict())
    capture = MapCapture(model, NAMES)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = capture.look(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(list(model.state_dict().values()), list(plain.values()))
    assert [m.training for m in (model, model.first, model.norm)] == [True, False, True]
    assert not hooked(model)
    again = capture.look(model, batch)
    assert torch.equal(found["first"].entropy, again["first"].entropy)


def test_look_does_not_disturb_an_arming() -> None:
    model = Model()
    with MapCapture(model, NAMES) as capture:
        capture.armed = True
        model.first(TOKENS)
        looked = capture.look(model, 100 * TOKENS)
        assert list(looked) == NAMES
        model(100 * TOKENS)
        found = capture.collect()
    assert set(found) == set(NAMES)
    assert not torch.equal(found["first"].entropy, looked["first"].entropy)


def test_a_batch_that_fails_is_the_callers_and_all_is_put_back() -> None:
    model = Counting().train()
    capture = MapCapture(model, NAMES)
    with pytest.raises(RuntimeError):
        capture.look(model, x(0, 3, N, D + 1))
    assert model.training
    assert model.steps == 0
    assert not hooked(model)


# ── probes ──


class Given:
    """A probe that hands over one call of a path when attached."""

    def __init__(self, path: str) -> None:
        self.path, self.attached = path, 0

    @contextmanager
    def attach(self, model: nn.Module, receive: Receive) -> Iterator[None]:
        self.attached += 1
        receive(self.path, attention_call(x(0, 1, H, N, 4), x(1, 1, H, N, 4), causal=True))
        yield
        self.attached -= 1


@pytest.mark.parametrize("path", ["first", "first.inner.deep", "blocks.0.1"])
def test_a_probes_call_goes_to_its_layer(path: str) -> None:
    model, probe = Model(), Given(path)
    with MapCapture(model, NAMES, [probe]) as capture:
        assert probe.attached == 0
        assert capture.collect() == {}
        capture.armed = True
        assert probe.attached == 1
        (name,) = capture.collect()
        assert name == ("first" if path.startswith("first") else path)
    assert probe.attached == 0


def test_a_probe_before_the_forward_wins_and_a_parents_path_means_its_only_layer() -> None:
    model = Model("softmax")
    with MapCapture(model, NAMES, [Given("blocks")]) as capture:
        capture.armed = True
        model(TOKENS)
        found = capture.collect()
    assert {n: s.method for n, s in found.items()} == {"first": "eager", "blocks.0.1": "chunks"}
