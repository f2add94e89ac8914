"""A layout of the user's own, as a file and as keywords."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError, StoredFileError
from levelhead.weights.layouts import views
from oracles.attention import attend

D, HEADS = 12, 3


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(layers: int = 2) -> dict[str, Tensor]:
    found = {}
    for i in range(layers):
        found[f"net.stage.{i}.mix.to_q.weight"] = numbers(D, D, seed=3 * i)
        found[f"net.stage.{i}.mix.to_kv_k.weight"] = numbers(4, D, seed=3 * i + 1)
        found[f"net.stage.{i}.mix.to_kv_v.weight"] = numbers(4, D, seed=3 * i + 2)
        found[f"net.stage.{i}.mix.to_q.bias"] = numbers(D, seed=50 + i)
        found[f"net.stage.{i}.norm.weight"] = numbers(D, seed=60 + i)
    return found


TEXT = """
family = "mixer"
module = "{stem}stage.{n}.mix"
q = "to_q"
k = "to_kv_k"
v = "to_kv_v"
heads = 3
position = "rope-interleaved"
theta = 50.0
rotary = 0.5
mask = "causal"
window = 2
scale = 0.7
soft_cap = 3.0
norm = "{stem}stage.{n}.norm"
norm_kind = "rms"
"""


def test_a_file_says_all_that_a_config_would(tmp_path: Path) -> None:
    path = tmp_path / "mixer.toml"
    path.write_text(TEXT)
    one, two = views(state(), layout=path)
    assert (one.family, one.heads, one.groups, one.d_k) == ("mixer", 3, 1, 4)
    assert (one.position.theta, one.position.width, one.position.layout) == (50.0, 2, "interleaved")
    assert (one.mask.causal, one.mask.window, one.scale, one.soft_cap) == (True, 2, 0.7, 3.0)
    assert (one.input_norm.kind, two.input_norm.gain.tolist()) == (
        "rms",
        state()["net.stage.1.norm.weight"].tolist(),
    )
    assert str(one.origin("q")) == "read (layout heads)"
    assert str(one.origin("scale")) == "read (the layout given)"
    x = numbers(5, D, seed=9).double()
    q = (x @ state()["net.stage.0.mix.to_q.weight"].double().T).view(5, HEADS, 4)
    q = q + state()["net.stage.0.mix.to_q.bias"].double().view(HEADS, 4)
    k = x @ state()["net.stage.0.mix.to_kv_k.weight"].double().T
    v = x @ state()["net.stage.0.mix.to_kv_v.weight"].double().T

    def turn(rows: Tensor) -> Tensor:
        at = torch.arange(5, dtype=torch.float64)
        plane = torch.view_as_complex(rows[:, :2].contiguous()) * torch.polar(
            torch.ones(5).double(), at
        )
        return torch.cat((torch.view_as_real(plane), rows[:, 2:]), dim=1)

    expected = []
    for i in range(HEADS):
        logits = 3.0 * torch.tanh(turn(q[:, i]) @ turn(k).T * 0.7 / 3.0)
        seen = torch.ones(5, 5).tril().bool() & torch.ones(5, 5).triu(-2).bool()
        expected.append(torch.softmax(logits.masked_fill(~seen, -torch.inf), -1) @ v)
    assert torch.allclose(attend(one, x), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-6)


def test_keywords_do_the_same_and_arguments_stand_before_them() -> None:
    keywords = {"module": "{stem}mix", "q": "to_q", "k": "to_kv_k", "v": "to_kv_v", "heads": 3}
    assert [v.heads for v in views(state(), layout=keywords)] == [3, 3]
    small = {n: t[:6] if "to_q" in n else t[:2] if "mix" in n else t for n, t in state().items()}
    assert [v.d_k for v in views(small, layout=keywords)] == [2, 2]
    assert [v.heads for v in views(state(), layout=keywords, heads=6, kv_heads=2)] == [6, 6]


@pytest.mark.parametrize("order", ["stacked", "grouped"])
@pytest.mark.parametrize("input_major", [False, True])
def test_fused(order: str, input_major: bool) -> None:
    qkv, out = numbers(2 * D, D, seed=1), numbers(D, D, seed=2)
    stored = {"a.qkv.weight": qkv, "a.out.weight": out}
    if input_major:
        stored = {n: t.T.contiguous() for n, t in stored.items()}
    layout = {"module": "{stem}a", "qkv": "qkv", "o": "out", "order": order, "heads": 4,
              "kv_heads": 2, "input_major": input_major}  # fmt: skip
    [view] = views(stored, layout=layout)
    rows = qkv.reshape(8, 3, D)
    if order == "stacked":
        expected = rows[:4], rows[4:6], rows[6:]
    else:
        expected = rows[[0, 1, 4, 5]], rows[[2, 6]], rows[[3, 7]]
    for mine, theirs in zip((view.q, view.k, view.v), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(torch.cat(list(view.o), dim=1), out)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"q": "a", "k": "b", "v": "c"}, "needs `module`"),
        ({"module": "m"}, "needs either `qkv`, or"),
        ({"module": "m", "q": "a", "k": "b"}, "needs either `qkv`, or"),
        ({"module": "m", "qkv": "a", "q": "a", "k": "b", "v": "c"}, "needs either `qkv`, or"),
        ({"module": "m", "qkv": "a", "colour": 1}, "no keyword 'colour'; it has module"),
        ({"module": "m", "qkv": "a", "heads": "many"}, "heads = 'many'; expected int"),
        ({"module": "m", "qkv": "a", "heads": True}, "heads = True; expected int"),
        ({"module": "m", "qkv": "a", "heads": 0}, "heads = 0; expected at least 1"),
        ({"module": "m", "qkv": "a", "order": "sorted"}, "expected one of"),
        ({"module": "m", "qkv": "a", "cross": 1}, "cross = 1; expected bool"),
    ],
)
def test_wrong_keywords(layout: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(views(state(), layout=layout))


def test_wrong_files_and_families(tmp_path: Path) -> None:
    path = tmp_path / "l.toml"
    for content in (b"module = ", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(StoredFileError, match=r"l\.toml cannot be read"):
            list(views(state(), layout=path))
    with pytest.raises(StoredFileError, match=r"missing\.toml cannot be read"):
        list(views(state(), layout="missing.toml"))
    with pytest.raises(InputError, match="neither a TOML file nor one of albert, bart"):
        list(views(state(), layout="lama"))
    with pytest.raises(InputError, match="no attention layer was recognised"):
        list(views(state(), layout="llama", heads=3))
