"""A layout of the user's own, as a file and as keywords."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from levelhead.base.errors import InputError, StoredFileError
from levelhead.weights.layouts import NothingMatched, views
from levelhead.weights.own_layout import REFERENCE, _Given, own_plan
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


# ── parameters by their own names, and layouts that fit nothing ──


def packed() -> dict[str, Tensor]:
    return {
        "net.blocks.0.attn.in_proj_weight": numbers(3 * D, D, seed=1),
        "net.blocks.0.attn.in_proj_bias": numbers(3 * D, seed=2),
        "net.blocks.0.attn.out.weight": numbers(D, D, seed=3),
    }


def test_qkv_may_be_the_name_of_a_parameter() -> None:
    layout = {"module": "{stem}blocks.{n}.attn", "qkv": "in_proj_weight", "o": "out", "heads": 3}
    [view] = views(packed(), layout=layout)
    rows = torch.cat([t.reshape(D, D) for t in (view.q, view.k, view.v)])
    assert torch.equal(rows, packed()["net.blocks.0.attn.in_proj_weight"])
    biases = torch.cat([t.reshape(D) for t in (view.q_bias, view.k_bias, view.v_bias)])
    assert torch.equal(biases, packed()["net.blocks.0.attn.in_proj_bias"])
    [same] = views(packed(), layout={**layout, "o": "out.weight"})
    assert torch.equal(same.o, view.o)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qkv": "to_qkv"}, r"looks for 'to_qkv.weight', by its q or qkv, and no name ends so"),
        (
            {"module": "{stem}layers.{n}.attn"},
            r"module '\{stem\}layers.\{n\}.attn' does not fit 'net.blocks.0.attn.in_proj_weight'",
        ),
        ({"o": "proj"}, r"it has no net.blocks.0.attn.proj.weight"),
    ],
)
def test_a_layout_that_fits_nothing_says_which_keyword(change: dict, said: str) -> None:
    layout = {"module": "{stem}blocks.{n}.attn", "qkv": "in_proj_weight", "o": "out", "heads": 3}
    with pytest.raises(NothingMatched, match=said) as error:
        list(views(packed(), layout={**layout, **change}))
    assert "the names seen are net.blocks.*.attn.in_proj_weight" in str(error.value)


def test_the_reference_names_every_keyword() -> None:
    words = set(re.findall(r"\w+", REFERENCE))
    assert {f.name for f in fields(_Given)} <= words
    example = "\n".join(
        line.split("#")[0].strip()
        for line in REFERENCE.split("Names.")[0].splitlines()
        if line.startswith("    ")
    )
    given = tomllib.loads(example)
    assert own_plan(given).store.anchor == "in_proj_weight"


def test_a_layout_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "l.toml")
    with pytest.raises(StoredFileError, match="no regular file"):
        list(views(packed(), layout=tmp_path / "l.toml"))


def test_matrices_stored_the_other_way_round() -> None:
    random = torch.Generator().manual_seed(0)
    weights = {f"attn.{n}.weight": torch.randn(8, 8, generator=random) for n in "qkvo"}
    layout = {"module": "attn", **{n: n for n in "qkvo"}, "heads": 2}
    [plain] = views(weights, layout=layout)
    turned = {name: t.T.contiguous() for name, t in weights.items()}
    [same] = views(turned, layout={**layout, "input_major": True})
    for name in "qkvo":
        assert torch.equal(getattr(plain, name), getattr(same, name))
