"""inspect, compare and invariants as commands, on tiny checkpoints made here and on real ones."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from levelhead.cli import app

ROOT = Path(__file__).resolve().parents[2]
BERT = ["encoder.layer.0.attention", "encoder.layer.1.attention"]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def bert_weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        f"{name}.{part}.weight": torch.randn(12, 12, generator=random)
        for name in BERT
        for part in ("self.query", "self.key", "self.value", "output.dense")
    }


def stored(folder: Path, weights: dict[str, torch.Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return stored(
        tmp_path / "bert", bert_weights(), model_type="bert", num_attention_heads=3, hidden_size=12
    )


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    random = torch.Generator().manual_seed(1)
    weights = {
        f"model.layers.0.self_attn.{n}_proj.weight": torch.randn(rows, 16, generator=random)
        for n, rows in (("q", 16), ("k", 8), ("v", 8), ("o", 16))
    }
    weights["model.layers.0.input_layernorm.weight"] = torch.rand(16, generator=random) + 0.5
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    return stored(
        tmp_path / "llama", weights, model_type="llama", rope_theta=10000.0, rms_norm_eps=1e-5,
        **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pretrained() -> Path:
    """Folder with stories260K and nano_sort; not part of the repository."""
    folder = Path(os.environ.get("LEVELHEAD_PRETRAINED", ROOT.parent / "shared" / "pretrained"))
    if not (folder / "stories260K" / "stories260K.bin").is_file():
        pytest.skip("set LEVELHEAD_PRETRAINED to a folder with stories260K and nano_sort")
    return folder


# ── inspect ──


def test_the_table_stands_on_stdout_and_notes_on_stderr(bert: Path, llama: Path) -> None:
    result = call("inspect", bert)
    assert result.exit_code == 0, result.output
    head, below, *rows = result.stdout.splitlines()
    assert head.split() == ["layer", "QK", "OV", "logit", "QK", "OV", "QK", "OV"]
    assert below.split() == ["rank", "rank", "gain", "coh.", "coh.", "heads", "heads"]
    assert [row.split()[0] for row in rows] == BERT
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "2 attention layers, read as bert" in result.stderr
    for said in ("Every layer: 3 heads, 3 groups, d_k 4.", "No near-duplicates, no dead heads."):
        assert said in result.stderr
    for column in ("QK rank: mean over heads of exp", "QK coh.: coherence, mean", "OV heads: "):
        assert column in result.stderr
    result = call("inspect", llama)
    assert result.stdout.splitlines()[2].split()[0] == "model.layers.0.self_attn"
    assert "The layer: 4 heads, 2 groups, d_k 4." in result.stderr
    assert "RMSNorm folded" in result.stderr


def test_json_is_all_there_is_on_stdout(bert: Path) -> None:
    rows = json.loads(call("inspect", bert, "--json", "--decompose", "tucker").stdout)
    assert [row["layer"] for row in rows] == BERT
    assert 1 <= rows[0]["qk_effective_heads"] <= 3
    assert (rows[0]["near_duplicates"], rows[0]["dead_heads"]) == (0, 0)


def test_each_head_has_a_row_where_it_was_asked_for(bert: Path) -> None:
    result = call("inspect", bert, "--per-head")
    rows = [line.split() for line in result.stdout.split("\n\n")[1].splitlines()[2:]]
    assert [row[:2] for row in rows] == [[name, str(i)] for name in BERT for i in range(3)]
    assert "nearest head: the head that is most alike" in result.stderr
    both = json.loads(call("inspect", bert, "--per-head", "--json").stdout)
    assert both["layers"] == json.loads(call("inspect", bert, "--json").stdout)
    assert [(r["layer"], r["head"]) for r in both["heads"]] == [
        (name, i) for name in BERT for i in range(3)
    ]


def test_more_numbers_are_columns(bert: Path) -> None:
    names = "ov_trace,qk_stack_ranks,qk_spectrum,largest_logit"
    both = json.loads(call("inspect", bert, "--per-head", "--json", "--numbers", names).stdout)
    weights = bert_weights()
    v, o = (weights[f"{BERT[1]}.{n}.weight"].double() for n in ("self.value", "output.dense"))
    expected = torch.trace(o[:, 4:8] @ v[4:8]).item()
    assert both["heads"][4]["ov_trace"] == pytest.approx(expected, rel=1e-6)
    assert [both["heads"][0][f"qk_spectrum_{i}"] > 0 for i in (1, 2, 3, 4)] == [True] * 4
    assert both["heads"][0]["largest_logit"] is None  # there is no norm of queries and keys
    assert [both["layers"][0][f"qk_stack_ranks_{i}"] for i in (1, 2, 3)] == [3, 12, 12]
    assert "ov_trace" in call("inspect", bert, "--numbers", "ov_trace").stdout
    for name, said in (
        ("tail", "no invariant 'tail'"),
        ("qk_cosines", "compares pairs of heads"),
        ("logit_rms", "needs a covariance"),
        ("ov_eigenvalues", "is complex"),
    ):
        result = call("inspect", bert, "--numbers", name)
        assert result.exit_code == 2
        assert said in result.stderr


def test_ranks_that_fit_anything_are_refused_and_large_ones_cut(bert: Path) -> None:
    result = call("inspect", bert, "--decompose", "cp", "--ranks", "5000")
    assert result.exit_code == 2
    # Of 3 × 12 × 12 and of 3 × 4 × 12 × 3: 36 components fit both.
    assert "36 components fit every tensor of 3 × 12 × 12 exactly" in result.stderr
    result = call("inspect", bert, "--decompose", "cp", "--ranks", "2,2", "--layers", "0")
    assert [line.split()[3] for line in result.stdout.split("\n\n")[1].splitlines()[1:]] == [
        "2"
    ] * 3
    result = call("inspect", bert, "--decompose", "tucker", "--ranks", "2,99,99")
    assert "Tucker ranks above the sizes of qk were cut to 2×12×12." in result.stderr


def test_runs_are_not_written_between_other_files(bert: Path, tmp_path: Path) -> None:
    kept = sorted(bert.iterdir())
    for command in (["inspect", bert], ["compare", bert, bert]):
        result = call(*command, "--out", bert)
        assert result.exit_code == 2
        assert "is not empty (config.json): name a new or an empty folder" in result.stderr
        run = tmp_path / command[0]
        assert call(*command, "--out", run).exit_code == 0
        result = call(*command, "--out", run)
        assert result.exit_code == 2
        assert "already holds a run: name a new folder" in result.stderr
        assert "resume" not in result.stderr
    assert sorted(bert.iterdir()) == kept


def test_huge_numbers_keep_their_digits_to_themselves(tmp_path: Path) -> None:
    weights = {n: t.double() * 1e15 for n, t in bert_weights().items()}
    path = stored(tmp_path / "huge", weights, model_type="bert", num_attention_heads=3)
    table = call("inspect", path).stdout
    assert "e+31" in table
    assert max(map(len, table.splitlines())) < 90


def test_layers_fits_and_folder(bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = call(
        "inspect", bert, "--layers", "-1", "--decompose", "cp", "--ranks", "2,3", "--out", out
    )
    assert result.exit_code == 0, result.output
    table, fits = result.stdout.split("\n\n")
    assert BERT[1] in table
    assert BERT[0] not in table
    assert [line.split()[1:4] for line in fits.splitlines()[1:]] == [
        [tensor, "cp", rank] for tensor in ("qk", "ov", "raw") for rank in ("2", "3")
    ]
    assert str(out / "report.html") in result.stderr.splitlines()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "what CP components are made of" in page
    assert "Basis dependent" in page


def test_a_covariance_and_a_layout_are_files(bert: Path, tmp_path: Path) -> None:
    save_file({name: torch.eye(12) for name in BERT}, tmp_path / "c.safetensors")
    result = call("inspect", bert, "--covariance", tmp_path / "c.safetensors")
    assert result.exit_code == 0
    assert "data rank: QK rank on your covariance" in result.stderr
    row = json.loads(
        call("inspect", bert, "--covariance", tmp_path / "c.safetensors", "--json").stdout
    )[0]
    # Behind the identity the data change nothing.
    assert row["whitened_qk_effective_rank"] == pytest.approx(row["qk_effective_rank"], rel=1e-6)
    assert row["logit_rms"] > 0
    save_file({"a": torch.eye(3)}, tmp_path / "small.safetensors")
    result = call("inspect", bert, "--covariance", tmp_path / "small.safetensors")
    assert result.exit_code == 2
    assert "expected [12, 12]" in result.stderr
    weights = {f"deep.0.mix.{n}.weight": torch.randn(8, 8) for n in ("a", "b", "c", "d")}
    save_file(weights, tmp_path / "own.safetensors")
    assert call("inspect", tmp_path / "own.safetensors").exit_code == 3
    layout = 'module = "deep.{n}.mix"\nq = "a"\nk = "b"\nv = "c"\no = "d"\nheads = 2\n'
    (tmp_path / "own.toml").write_text(layout)
    result = call("inspect", tmp_path / "own.safetensors", "--layout", tmp_path / "own.toml")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2].split()[0] == "deep.0.mix"
    assert "The layer: 2 heads, 2 groups, d_k 4." in result.stderr


def test_layers_that_are_not_finite_are_excluded_by_name(tmp_path: Path) -> None:
    weights = bert_weights()
    weights[f"{BERT[0]}.self.value.weight"][0, 0] = float("nan")
    path = stored(tmp_path / "nan", weights, model_type="bert", num_attention_heads=3)
    result = call("inspect", path)
    assert result.exit_code == 0
    assert BERT[0] not in result.stdout
    assert f"{BERT[0]}.self.value.weight holds values that are not finite" in result.stderr
    result = call("inspect", path, "--layers", "0", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (3, [])


def test_nothing_matched_leaves_with_3_and_the_names(tmp_path: Path) -> None:
    save_file({"convolution.weight": torch.ones(2, 2)}, tmp_path / "c.safetensors")
    for command in (
        ["inspect"],
        ["compare", tmp_path / "c.safetensors"],
        ["invariants", "--verify"],
    ):
        result = call(*command, tmp_path / "c.safetensors")
        assert result.exit_code == 3, command
        assert result.stdout == ""
        assert "convolution.weight" in result.stderr


class _Evil:
    def __reduce__(self):
        return (Path.touch, (Path("owned"),))


def _hostile(folder: Path, whole: bytes) -> dict[str, bytes]:
    overlapping = {
        f"{BERT[0]}.self.{n}.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
        for n in ("query", "key")
    }
    header = json.dumps(overlapping).encode()
    return {
        "truncated": whole[: len(whole) // 2],
        "short": whole[:5],
        "empty": b"",
        "long header": struct.pack("<Q", 2**63) + whole[8:],
        "overlapping": struct.pack("<Q", len(header)) + header + b"\0" * 32,
        "code": pickle.dumps({"a": _Evil()}),
        "no header": struct.pack("<Q", 4) + b"{{{{" + b"\0" * 8,
    }


def test_hostile_files_are_one_sentence_and_2(bert: Path, tmp_path: Path) -> None:
    whole = (bert / "model.safetensors").read_bytes()
    for name, content in _hostile(tmp_path, whole).items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        for command in (["inspect"], ["compare", bert], ["invariants", "--verify"]):
            result = call(*command, path)
            assert result.exit_code == 2, (name, command, result.output)
            assert result.stdout == ""
            (line,) = result.stderr.splitlines()
            assert line.startswith("Error: "), name
            assert path.name in line
    pickled = tmp_path / "model.bin"
    pickled.write_bytes(pickle.dumps({"a": _Evil()}, protocol=2))
    assert call("inspect", pickled).exit_code == 2
    assert not Path("owned").exists()


def test_options_that_make_no_sense_leave_with_2(bert: Path) -> None:
    for options, said in (
        (["--ranks", "3"], "without a decomposition"),
        (["--decompose", "cp", "--ranks", "x"], "--ranks"),
        (["--layers", "9"], "2 were found"),
        (["--layers", ","], "--layers"),
        (["--layout", "nobody"], "neither a TOML file"),
    ):
        result = call("inspect", bert, *options)
        assert result.exit_code == 2, options
        assert said in result.stderr


def test_inspecting_loads_neither_pandas_nor_scipy(bert: Path) -> None:
    script = (
        "import sys\nfrom levelhead.cli import app\n"
        f"app(['inspect', {str(bert)!r}], standalone_mode=False)\n"
        "print('loaded', sorted({'pandas', 'scipy', 'sklearn'} & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "loaded []"


def torch_layers(path: Path) -> Path:
    random = torch.Generator().manual_seed(2)
    shapes = {"self_attn.in_proj_weight": (36, 12), "self_attn.out_proj.weight": (12, 12)}
    shapes |= {"norm1.weight": (12,), "norm1.bias": (12,), "norm2.weight": (12,)}
    torch.save(
        {
            f"layers.{i}.{n}": torch.randn(s, generator=random)
            for i in range(2)
            for n, s in shapes.items()
        },
        path,
    )
    return path


def test_settings_can_be_given_where_there_is_no_config(tmp_path: Path) -> None:
    path = torch_layers(tmp_path / "encoder.pt")
    for command in (["inspect"], ["compare", path], ["invariants", "--verify"]):
        result = call(*command, path)
        assert result.exit_code == 2, command
        assert "(heads= in Python, --heads on the command line)" in result.stderr
    result = call("inspect", path, "--heads", "3")
    assert result.exit_code == 0, result.output
    assert "2 layers: the norm in front is not known from the names" in result.stderr
    result = call("inspect", path, "--set", "nhead=3", "--set", "norm_first=True")
    assert result.exit_code == 0, result.output
    assert "norm in front" not in result.stderr
    assert "folded" in result.stderr
    assert call("compare", path, path, "--heads", "3").exit_code == 0
    some = ["--only", "ov_spectrum", "--set", "heads=3"]
    assert call("invariants", "--verify", path, *some).exit_code == 0
    for given, said in (
        ("heads", "write NAME=VALUE"),
        ("heds=3", "--set knows no 'heds'"),
        ("norm_first=7", "expected true or false"),
        ("heads=many", "'many'"),
    ):
        result = call("inspect", path, "--set", given)
        assert result.exit_code == 2, given
        assert said in result.stderr


def test_the_reference_of_layouts_needs_no_path() -> None:
    result = call("inspect", "--layout", "help")
    assert result.exit_code == 0
    assert 'module = "{stem}blocks.{n}.attn"' in result.stdout


def test_left_out_layers_are_counted_and_may_be_an_error(tmp_path: Path) -> None:
    weights = bert_weights()
    weights[f"{BERT[0]}.self.value.weight"][0, 0] = float("nan")
    path = stored(tmp_path / "nan", weights, model_type="bert", num_attention_heads=3)
    commands = (["inspect", path], ["compare", path, path], ["invariants", "--verify", path])
    for command in commands:
        for options, code in (([], 0), (["--strict"], 1)):
            only = ["--only", "ov_rank"] if command[0] == "invariants" else []
            result = call(*command, *only, *options)
            assert result.exit_code == code, (command, result.output)
            assert result.stderr.splitlines()[-1] == "1 of 2 layers were left out."
    assert "left out." not in call("inspect", path, "--layers", "1", "--json").stdout


def test_paths_that_are_none_are_said_as_they_were_given() -> None:
    for path, said in (("", "no path was given"), ("https://a.b/c", "https://a.b/c is an address")):
        result = call("inspect", path)
        assert result.exit_code == 2
        assert said in result.stderr


# ── compare ──


def test_compare_prints_what_moved_most_first(bert: Path, tmp_path: Path) -> None:
    weights = bert_weights()
    weights[f"{BERT[1]}.self.query.weight"][8:] *= 3
    other = stored(tmp_path / "other", weights, model_type="bert", num_attention_heads=3)
    result = call("compare", bert, other, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    first = result.stdout.splitlines()[1].split()
    assert first[:4] == [BERT[1], "2", "2", "2"]
    assert "Most moved: head 2 of encoder.layer.1.attention" in result.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    rows = json.loads(call("compare", bert, other, "--json").stdout)
    assert rows[0]["qk_change"] == pytest.approx(2, rel=1e-6)


def test_compare_follows_a_series(tmp_path: Path) -> None:
    for step in (10, 2):
        weights = {n: t * (1 + step / 10) for n, t in bert_weights().items()}
        stored(tmp_path / f"step-{step}", weights, model_type="bert", num_attention_heads=3)
    rows = json.loads(call("compare", tmp_path, "--json").stdout)
    assert [(r["layer"], r["step"]) for r in rows] == [(n, s) for n in BERT for s in (2, 10)]
    assert rows[1]["ov_change"] == pytest.approx((2 / 1.2) ** 2 - 1, rel=1e-5)
    assert call("compare", tmp_path / "step-2").exit_code == 2
    result = call("compare", tmp_path, tmp_path / "step-2")
    assert result.exit_code == 2
    assert "is a series of 2 steps, and a series takes no second source" in result.stderr


def test_what_is_the_same_needs_no_table(bert: Path, tmp_path: Path) -> None:
    result = call("compare", bert, bert)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "Nothing moved, up to rounding." in result.stderr
    assert len(json.loads(call("compare", bert, bert, "--json").stdout)) == 6
    result = call("compare", bert, bert, "--basis", "own")
    assert "No singular value differs" in result.stderr
    weights = bert_weights()
    weights[f"{BERT[1]}.self.query.weight"][0, 0] = float("nan")
    broken = stored(tmp_path / "broken", weights, model_type="bert", num_attention_heads=3)
    result = call("compare", bert, broken)
    assert "Nothing moved in the 1 layer compared" in result.stderr
    assert "1 could not be compared" in result.stderr
    weights = bert_weights()
    weights[f"{BERT[0]}.self.query.weight"] *= 2
    other = stored(tmp_path / "other", weights, model_type="bert", num_attention_heads=3)
    result = call("compare", bert, other, "--basis", "own")
    assert "moved" not in result.stderr
    assert "Differs most in its singular values: head" in result.stderr


# ── invariants ──


def test_the_catalogue_is_printed_with_every_verdict() -> None:
    result = call("invariants")
    assert result.exit_code == 0
    assert "qk_spectrum = σ_a(B_i)" in result.stdout
    assert "forms B_i = W_Q,iᵀ W_K,i and maps M_i" in result.stderr
    assert "invariant: qk_gauge" in result.stdout
    rows = json.loads(call("invariants", "--only", "raw_head_spectrum", "--json").stdout)
    assert rows[0]["vo_gauge"] == "variant"
    assert {"name", "formula", "unit", "kind", "degree", "source"} <= rows[0].keys()


def test_verify_prints_the_truth_table(bert: Path, llama: Path) -> None:
    some = ["--only", "qk_spectrum,raw_model_spectrum,qk_effective_heads"]
    result = call("invariants", "--verify", bert, *some)
    assert result.exit_code == 0, result.output
    head, *rows = result.stdout.splitlines()
    assert head.split()[:3] == ["invariant", "qk_gauge", "vo_gauge"]
    assert rows[0].split()[:3] == ["qk_spectrum", "=", "="]
    assert rows[1].split()[:3] == ["raw_model_spectrum", "moves", "moves"]
    assert "in 2 layers hold" in result.stderr
    assert "= declared invariant, and stood still; moves: declared variant" in result.stderr
    rows = json.loads(call("invariants", "--verify", llama, *some, "--json").stdout)
    assert {row["generator"] for row in rows} >= {"rotary_gauge", "vo_gauge", "head_permutation"}
    assert all(row["passed"] for row in rows)


def test_a_wrong_assumption_leaves_with_1(bert: Path) -> None:
    options = ["--only", "raw_head_spectrum", "--assume", "raw_head_spectrum=gauge"]
    result = call("invariants", "--verify", bert, *options)
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert "declared invariant (assumed) under qk_gauge, but it moves by" in result.stderr
    result = call("invariants", "--verify", bert, *options, "--json")
    assert result.exit_code == 1
    assert not all(row["passed"] for row in json.loads(result.stdout))


def test_assumptions_that_cannot_be_held_against_anything(bert: Path) -> None:
    for options, said in (
        (["--assume", "qk_spectrum=gauge"], "--assume needs --verify"),
        (["--verify", bert, "--assume", "qk_spectrum"], "write NAME=GROUP"),
        (["--verify", bert, "--assume", "tail=gauge"], "no invariant 'tail'"),
        (["--verify", bert, "--assume", "qk_spectrum=tail"], "no group 'tail'"),
        (["--only", "tail"], "no invariant 'tail'"),
        (["--verify", bert, "--only", "ov_rank", "--assume", "qk_rank=gauge"], "qk_rank"),
    ):
        result = call("invariants", *options)
        assert result.exit_code == 2, options
        assert said in result.stderr


# ── real checkpoints ──


def test_two_formats_of_one_model_hold_the_same_heads(pretrained: Path) -> None:
    folder = pretrained / "stories260K"
    one, two = (
        json.loads(call("inspect", path, "--json").stdout)
        for path in (folder, folder / "stories260K.bin")
    )
    assert len(one) == len(two) == 5
    for a, b in zip(one, two, strict=True):
        for name, value in a.items():
            if isinstance(value, float):
                assert b[name] == pytest.approx(value, rel=1e-6), name
    result = call("compare", folder, folder / "stories260K.bin", "--json")
    assert max(row["change"] for row in json.loads(result.stdout)) < 1e-9
    assert "Nothing moved" in result.stderr
    assert "matched in their order" in result.stderr


def test_a_real_layer_keeps_its_declarations(pretrained: Path) -> None:
    some = "qk_spectrum,ov_eigenvalues,qk_effective_heads,raw_head_spectrum,largest_logit_gain"
    path = pretrained / "nano_sort"
    result = call("invariants", "--verify", path, "--only", some, "--layers", "0")
    assert result.exit_code == 0, result.output
