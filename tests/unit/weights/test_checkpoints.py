"""Opening checkpoints: formats by content, settings beside them, and files that mean harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from levelhead.base.errors import InputError, LevelheadError, LevelheadWarning, StoredFileError
from levelhead.weights.checkpoints import open_weights
from levelhead.weights.layouts import NothingMatched, Skip, match, views

D, HEADS = 8, 2
BLOCK = "model.layers.{}.self_attn.{}_proj.weight"
CONFIG = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": 1}


def llama_state(layers: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (D, D), "k": (D // HEADS, D), "v": (D // HEADS, D), "o": (D, D)}
    return {
        BLOCK.format(i, n): torch.randn(s, generator=generator).to(dtype)
        for i in range(layers)
        for n, s in shapes.items()
    }


def folder_with(path: Path, write: Callable[[Path], object], config: object = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    write(path)
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_shards(folder: Path) -> None:
    state = llama_state()
    index = {}
    for i in range(2):
        part = {n: t for n, t in state.items() if f".{i}." in n}
        save_file(part, folder / f"model-{i}.safetensors")
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda f: save_file(llama_state(), f / "model.safetensors"),
    "shards": save_shards,
    "torch": lambda f: torch.save(llama_state(), f / "pytorch_model.bin"),
    "torch_old": lambda f: torch.save(
        llama_state(), f / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "inside": lambda f: torch.save({"epoch": 3, "state_dict": llama_state()}, f / "last.pt"),
}


# ── formats ──


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_layers(kind: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / kind, WRITERS[kind])
    state = llama_state()
    found = list(views(folder))
    assert [v.name for v in found] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for i, view in enumerate(found):
        assert torch.equal(view.q.reshape(D, D), state[BLOCK.format(i, "q")])
        assert torch.equal(view.k.reshape(-1, D), state[BLOCK.format(i, "k")])
        assert view.family == "llama"
        assert str(view.origin("q")) == "read (config.json num_attention_heads)"


def test_the_ending_does_not_matter(tmp_path: Path) -> None:
    torch.save(llama_state(), tmp_path / "a.safetensors")
    save_file(llama_state(), tmp_path / "b.pt")
    for name, kind in (("a.safetensors", "torch"), ("b.pt", "safetensors")):
        assert open_weights(tmp_path / name).format == kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_narrow_numbers_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    state = llama_state(dtype=dtype)
    folder = folder_with(tmp_path / "f", lambda f: save_file(state, f / "model.safetensors"))
    view = next(views(folder))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert view.dtype == wide
    assert torch.equal(view.q.reshape(D, D), state[BLOCK.format(0, "q")].to(wide))


def test_a_mapping_of_arrays_and_a_module_are_sources() -> None:
    arrays = {n: t.numpy() for n, t in llama_state(1).items()}
    [view] = views(arrays, heads=HEADS)
    assert view.heads == HEADS
    module = nn.ModuleDict({"blocks": nn.ModuleList([nn.MultiheadAttention(D, HEADS)])})
    [view] = views(module)
    assert str(view.origin("q")) == "read (module attribute num_heads)"
    for source in (3, None, [1]):
        with pytest.raises(InputError, match="expected a path, a mapping"):
            open_weights(source)
    with pytest.raises(InputError, match="mapping without tensors"):
        open_weights({"a": 1})


def test_only_the_layers_asked_for_are_read() -> None:
    """The rest of a file is never touched: here any other access is an error."""
    state = llama_state(3)
    opened = open_weights(state)
    read: list[str] = []

    def get(name: str) -> Tensor:
        read.append(name)
        return state[name]

    [view] = views(type(opened)(**{**vars(opened), "get": get, "config": CONFIG}), [1])
    assert view.name == "model.layers.1.self_attn"
    assert sorted(read) == sorted(BLOCK.format(1, n) for n in "qkvo")


# ── llama2.c ──


def llama2c_bytes(version: int = 0, shared: bool = True) -> bytes:
    """A file as llama2.c's export.py writes it: dim 8, 2 layers, 2 heads, 1 KV head, 5 tokens."""
    dim, hidden, layers, heads, kv, vocabulary, length = D, 12, 2, HEADS, 1, 5, 4
    state = {n: t.numpy() for n, t in llama_state().items()}
    part = {n: b"".join(state[BLOCK.format(i, n)].tobytes() for i in range(layers)) for n in "qkvo"}
    attention = part["q"] + part["k"] + part["v"] + part["o"]
    embedding = np.zeros((vocabulary, dim), "<f4").tobytes()
    norms = np.arange(layers * dim, dtype="<f4").tobytes()
    feed = np.zeros(3 * layers * dim * hidden, "<f4").tobytes()
    last = np.zeros(dim, "<f4").tobytes()
    classifier = b"" if shared else embedding
    if version == 0:
        sizes = (dim, hidden, layers, heads, kv, vocabulary if shared else -vocabulary, length)
        tables = np.zeros(2 * length * (dim // heads // 2), "<f4").tobytes()
        body = embedding + norms + attention + norms + feed + last + tables + classifier
        return struct.pack("<7i", *sizes) + body
    sizes = (dim, hidden, layers, heads, kv, vocabulary, length)
    header = struct.pack("<Ii7iB", 0x616B3432, version, *sizes, shared).ljust(256, b"\0")
    return header + norms + norms + last + embedding + attention + feed + classifier


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_llama2c(version: int, shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(llama2c_bytes(version, shared))
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 7}))
    state = llama_state()
    found = list(views(path))
    assert len(found) == 2
    for i, view in enumerate(found):
        rows = {"q": view.q, "k": view.k, "v": view.v}
        for name, tensor in rows.items():
            assert torch.equal(tensor.reshape(-1, D), state[BLOCK.format(i, name)])
        assert torch.equal(torch.cat(list(view.o), dim=1), state[BLOCK.format(i, "o")])
        assert view.input_norm.gain.tolist() == list(range(i * D, (i + 1) * D))
        assert (view.position.layout, view.groups) == ("interleaved", 1)
        assert str(view.origin("q")) == "read (header n_heads)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (llama2c_bytes(1)[:-8], "truncated: 4408 bytes, but its header announces 4416"),
        (llama2c_bytes(2), "version 2 is quantised"),
        (llama2c_bytes(0)[:-4], "truncated: 4248 bytes, but its header announces 4252"),
        (llama2c_bytes(0) + bytes(4), "none of the formats"),
        (struct.pack("<Ii7iB", 0x616B3432, 1, 8, 8, 1, 0, 1, 5, 4, 1), "header is not one of"),
        (struct.pack("<Ii7iB", 0x616B3432, 1, -8, 8, 1, 2, 1, 5, 4, 1), "header is not one of"),
    ],
)
def test_llama2c_that_is_broken(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(StoredFileError, match=said):
        open_weights(path)


# ── GGUF ──


def gguf_file(path: Path, kind: str) -> dict[str, np.ndarray]:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    wide = 64
    shapes = {"q": (wide, wide), "k": (32, wide), "v": (32, wide), "output": (wide, wide)}
    state = {
        f"blk.0.attn_{n}.weight": rng.standard_normal(s, dtype="f4") for n, s in shapes.items()
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    for name, tensor in state.items():
        quantum = getattr(gguf.GGMLQuantizationType, kind)
        packed = gguf.quants.quantize(tensor, quantum)
        writer.add_tensor(name, packed, raw_dtype=quantum)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return state


@pytest.mark.parametrize(
    ("kind", "error"), [("F32", 0.0), ("F16", 1e-3), ("Q8_0", 2e-2), ("Q4_0", 0.3)]
)
def test_gguf(kind: str, error: float, tmp_path: Path) -> None:
    state = gguf_file(tmp_path / "m", kind)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        [view] = views(tmp_path / "m")
    noisy = [w for w in told if issubclass(w.category, LevelheadWarning)]
    assert len(noisy) == (kind in ("Q8_0", "Q4_0"))
    assert all(kind in str(w.message) and "noise" in str(w.message) for w in noisy)
    assert (view.heads, view.groups, view.d_k) == (4, 2, 16)
    assert (view.position.layout, view.position.theta) == ("interleaved", 5000.0)
    off = np.abs(view.q.reshape(64, 64).numpy() - state["blk.0.attn_q.weight"]).max()
    assert off <= error
    assert (off > 0) == (kind != "F32")


def gguf_start(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF",
        b"GGUF" + b"\xff" * 60,
        gguf_start(2**63, 0),
        gguf_start(0, 2**63),
        gguf_start(0, 1, struct.pack("<Q", 2**62) + b"a"),
        gguf_start(0, 1, struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**40)),
        gguf_start(1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 2**60, 0, 0)),
    ],
    ids=["magic", "ones", "tensors", "keys", "string", "array", "tensor"],
)
def test_broken_gguf(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(StoredFileError, match="cannot be read") as error:
        open_weights(tmp_path / "m")
    assert "\n" not in str(error.value)


def test_gguf_that_ends_early(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m", "F32")
    whole = (tmp_path / "m").read_bytes()
    for size in range(0, len(whole), len(whole) // 40 + 1):
        (tmp_path / "m").write_bytes(whole[:size])
        with pytest.raises(StoredFileError):
            open_weights(tmp_path / "m")


def test_gguf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").write_bytes(b"GGUF" + bytes(40))

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("levelhead.weights.gguf_files.import_module", missing)
    with pytest.raises(InputError, match=r"pip install 'levelhead\[gguf\]'"):
        open_weights(tmp_path / "m")


# ── files that mean harm, or are broken ──


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.target,)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    content = {"a": torch.ones(2), "b": Evil(str(target))}
    torch.save(content, tmp_path / "new.pt")
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(content))
    for name in ("new.pt", "old.pt", "plain.pt"):
        with pytest.raises(StoredFileError, match=f"{name} cannot be read"):
            open_weights(tmp_path / name)
        assert not target.exists()


def test_a_whole_model_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(StoredFileError, match=r"nothing in it was run.*state_dict\(\) instead"):
        open_weights(tmp_path / "model.pt")


def packed_again(path: Path, compression: int, repeat: int = 1) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {e.filename: archive.read(e) for e in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content * (repeat if "/data/" in name else 1))


def test_a_zip_bomb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    packed_again(path, zipfile.ZIP_DEFLATED, repeat=10_000)
    assert path.stat().st_size < 200_000
    with pytest.raises(StoredFileError, match="unpack to more than the file holds"):
        open_weights(path)


def test_a_packed_archive_is_refused_even_if_it_is_no_bomb(tmp_path: Path) -> None:
    """A memory map of packed numbers would be read as if they were numbers."""
    path = tmp_path / "packed.pt"
    torch.save({"a": torch.randn(10_000)}, path)
    packed_again(path, zipfile.ZIP_LZMA)
    with zipfile.ZipFile(path) as archive:
        data = next(e for e in archive.infolist() if "/data/" in e.filename)
    padded = path.read_bytes() + bytes(data.file_size)
    path.write_bytes(padded[: len(padded)])
    with pytest.raises(StoredFileError, match="unpack to more than the file holds"):
        open_weights(path)


def test_an_archive_that_is_none_of_torchs(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    with pytest.raises(StoredFileError, match=r"not one of torch\.save"):
        open_weights(tmp_path / "a.npz")


def test_a_tensor_that_claims_more_than_the_file_holds(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(10**5, 10**5)}, tmp_path / "huge.pt")
    with pytest.raises(StoredFileError, match=r"claims shape \[100000, 100000\]"):
        open_weights(tmp_path / "huge.pt")
    torch.save({"a": torch.ones(3, device="meta")}, tmp_path / "meta.pt")
    with pytest.raises(StoredFileError, match="a has no values"):
        open_weights(tmp_path / "meta.pt")


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 4) + b"{{{{",
        header(a={**F32, "data_offsets": [0, 8]}) + bytes(4),
        header(a={**F32, "data_offsets": [0, 8]}, b={**F32, "data_offsets": [4, 12]}) + bytes(12),
        header(a={**F32, "data_offsets": [8, 0]}) + bytes(8),
        header(a={**F32, "shape": [2**40, 2**40], "data_offsets": [0, 8]}) + bytes(8),
        header(a={**F32, "shape": [-2], "data_offsets": [0, 8]}) + bytes(8),
        header(a={**F32, "dtype": "X9", "data_offsets": [0, 8]}) + bytes(8),
        save(llama_state())[:-1],
    ],
    ids=["empty", "short", "2^63", "long", "no JSON", "truncated", "overlap", "backwards", "huge",
         "negative", "dtype", "one byte less"],
)  # fmt: skip
def test_broken_safetensors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    for source in (path, tmp_path):
        with pytest.raises(StoredFileError) as error:
            list(views(source))
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, "not the name of a file"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not the name of a file"),
        ({"weight_map": {"a": 3}}, "not the name of a file"),
        ({"weight_map": {"a": "none.safetensors"}}, "none.safetensors is missing"),
        ({"weight_map": {"b": "model-0.safetensors"}}, "b is not in model-0.safetensors"),
        ({"weight_map": [1]}, "not an index of shards"),
        ({}, "not an index of shards"),
        ([], "not an index of shards"),
    ],
)
def test_wrong_index(index: object, said: str, tmp_path: Path) -> None:
    save_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(StoredFileError, match=said):
        open_weights(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\xff", "[" * 100_000])
def test_broken_config(text: str, tmp_path: Path) -> None:
    save_file(llama_state(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(StoredFileError, match=r"config\.json cannot be read"):
        list(views(tmp_path))


@pytest.mark.parametrize(
    "more",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -2},
        {"num_attention_heads": 10**30},
        {"num_attention_heads": [2]},
        {"head_dim": 3, "num_attention_heads": None},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 5},
        {"rope_parameters": {"rope_theta": -1.0}},
        {"rope_parameters": {"rope_theta": "big"}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "yarn", "factor": "x"}},
        {"rope_parameters": {"partial_rotary_factor": 7.0}},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 9}},
        {"rms_norm_eps": "small"},
    ],
)
def test_a_config_that_makes_no_sense_is_one_sentence(more: dict, tmp_path: Path) -> None:
    state = llama_state() | {
        f"model.layers.{i}.input_layernorm.weight": torch.ones(D) for i in (0, 1)
    }
    write = lambda f: save_file(state, f / "model.safetensors")  # noqa: E731
    folder = folder_with(tmp_path / "f", write, {**CONFIG, **more})
    with pytest.raises(InputError) as error:
        list(views(folder))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_values_that_are_not_finite_are_left_out_by_name() -> None:
    state = llama_state(3)
    state[BLOCK.format(1, "k")][0, 0] = float("nan")
    state[BLOCK.format(2, "o")][0, 0] = float("inf")
    skipped: list[Skip] = []
    [view] = views(state, heads=HEADS, skipped=skipped)
    assert view.name == "model.layers.0.self_attn"
    assert [s.name for s in skipped] == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
    assert skipped[0].reason == f"{BLOCK.format(1, 'k')} holds values that are not finite"
    with pytest.warns(LevelheadWarning, match="not finite; the layer is left out") as told:
        assert len(list(views(state, heads=HEADS))) == 1
    assert len(told) == 2


def test_quantised_tensors_are_refused_by_name() -> None:
    state = {n: t.to(torch.int8) for n, t in llama_state(1).items()}
    with pytest.raises(InputError, match=r"q_proj.weight is stored as int8.*dequantise"):
        list(views(state, heads=HEADS))
    state = {n: t.to(torch.float8_e4m3fn) for n, t in llama_state(1).items()}
    with pytest.raises(InputError, match="stored as float8_e4m3fn"):
        list(views(state, heads=HEADS))


def test_nothing_matched_says_what_was_seen(tmp_path: Path) -> None:
    save_file({f"layer.{i}.w": torch.ones(2, 2) for i in range(30)}, tmp_path / "model.safetensors")
    with pytest.raises(NothingMatched, match=r"the names seen are layer\.\*\.w; describe") as error:
        list(views(tmp_path))
    assert error.value.exit_code == 3
    assert match(tmp_path).plans == ()


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello, this is no checkpoint at all")
    for source, said in (
        (tmp_path / "missing", "does not exist"),
        (tmp_path / "a.txt", "none of the formats"),
        (tmp_path, "none of the files of a checkpoint"),
    ):
        with pytest.raises(StoredFileError, match=said):
            open_weights(source)


def test_what_cannot_be_opened_is_one_clear_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty.pt").touch()
    folder = tmp_path / "f" / "model.safetensors"
    folder.mkdir(parents=True)
    broken = tmp_path / "g"
    broken.mkdir()
    (broken / "model.safetensors").symlink_to(tmp_path / "gone")
    piped = tmp_path / "h"
    piped.mkdir()
    os.mkfifo(piped / "model.safetensors")
    for source, said in (
        (tmp_path / "pipe.safetensors", "is no regular file"),
        (piped, "model.safetensors is no regular file"),
        (tmp_path / "loop", "a symbolic link that leads nowhere or back to itself"),
        (broken, "a symbolic link that leads nowhere"),
        (tmp_path / "empty.pt", r"empty\.pt is empty"),
        (folder, "is a folder, though it is named like a file"),
        (folder.parent, r"model\.safetensors is a folder, though"),
        ("https://example.org/a/b", r"https://example\.org/a/b is an address"),
        ("nobody/model", r"download it first \(hf download nobody/model --local-dir model\)"),
        (f"{tmp_path}/a", "does not exist: check the path"),
    ):
        with pytest.raises(StoredFileError, match=said):
            open_weights(source)
    with pytest.raises(InputError, match="no path was given"):
        open_weights("")


def test_a_path_in_a_folder_that_is_there_is_no_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoredFileError, match="models/tiny does not exist: check the path"):
        open_weights("models/tiny")


def test_sparse_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    state = llama_state(2)
    name = BLOCK.format(0, "q")
    state[name] = state[name].to_sparse()
    torch.save(state, tmp_path / "s.pt")
    for source in (state, tmp_path / "s.pt"):
        skipped: list[Skip] = []
        [view] = views(source, skipped=skipped, heads=HEADS)
        assert view.name == "model.layers.1.self_attn"
        [skip] = skipped
        assert (skip.name, skip.loose) == (name, False)
        assert "a sparse_coo tensor, which is not read" in skip.reason
        assert match(source, heads=HEADS).skipped == (skip,)
    only = {name: state[name]}
    torch.save(only, tmp_path / "o.pt")
    with pytest.raises(StoredFileError, match="sparse_coo tensor"):
        open_weights(tmp_path / "o.pt")
    with pytest.raises(NothingMatched, match="sparse_coo tensor"):
        list(views(only))


@pytest.mark.parametrize(
    "beside",
    [
        {"model_args": {"n_head": 2, "n_embd": D}, "config": {"n_head": 8, "learning_rate": 1.0}},
        {"config": {"n_head": 2}},
        {"hyper_parameters": {"lr": 0.1, "model": {"num_heads": 2}}},
        {"args": {"nhead": 2}},
    ],
)
def test_a_torch_file_may_hold_its_models_settings(beside: dict, tmp_path: Path) -> None:
    parts = {"c_attn.weight": (3 * D, D), "c_proj.weight": (D, D)}
    state = {f"transformer.h.0.attn.{n}": torch.randn(s) for n, s in parts.items()}
    torch.save({"model": state, **beside}, tmp_path / "ckpt.pt")
    [view] = views(tmp_path / "ckpt.pt")
    assert (view.heads, view.family) == (2, "nanogpt")
    assert view.origin("q").source.startswith(next(iter(beside)))


@dataclass
class NanoConfig:
    n_head: int = 2
    n_embd: int = D


def test_a_live_modules_config_may_be_a_dataclass() -> None:
    attention = nn.ModuleDict({"c_attn": nn.Linear(D, 3 * D), "c_proj": nn.Linear(D, D)})
    model = nn.ModuleDict({"h": nn.ModuleList([nn.ModuleDict({"attn": attention})])})
    model.config = NanoConfig()
    [view] = views(model)
    assert (view.heads, str(view.origin("q"))) == (2, "read (config n_head)")


def test_settings_without_heads_are_no_config(tmp_path: Path) -> None:
    torch.save({"model": llama_state(1), "config": {"lr": 0.1}}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert open_weights(tmp_path / "model.pt").config == CONFIG


def test_the_message_of_what_was_not_recognised_is_short() -> None:
    """Names that look like attention come first; the advice is given once."""
    state = {f"blocks.{i}.layer_{j}.w": torch.ones(2, 2) for i in range(3) for j in range(200)}
    state["odd.to_qkv.weight"] = torch.ones(6, 2)
    with pytest.raises(NothingMatched) as error:
        list(views(state))
    said = str(error.value)
    assert len(said) <= 300
    assert said.count("layout (") == said.count("layout") - 1 == 1
    assert "the names seen are odd.to_qkv.weight, " in said


# ── fuzzed ──


def _valid() -> dict[str, bytes]:
    found = {"safetensors": save(llama_state(1)), "llama2c": llama2c_bytes(1)}
    for kind, new in (("zip", True), ("pickle", False)):
        buffer = io.BytesIO()
        torch.save(llama_state(1), buffer, _use_new_zipfile_serialization=new)
        found[kind] = buffer.getvalue()
    return found


VALID = _valid()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_gguf_gives_views_or_one_sentence(tmp_path: Path, data: st.DataObject) -> None:
    gguf_file(tmp_path / "m", "F16")
    damaged((tmp_path / "m").read_bytes(), tmp_path, data)


@pytest.mark.parametrize("kind", VALID)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_bytes_give_views_or_one_sentence(
    kind: str, tmp_path: Path, data: st.DataObject
) -> None:
    damaged(VALID[kind], tmp_path, data)


def damaged(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Change and cut bytes, most of them in the header, and read what is left."""
    content = bytearray(whole)
    early = st.integers(0, min(len(content), 400) - 1) | st.integers(0, len(content) - 1)
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(early)] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]
    path = tmp_path / "file"
    path.write_bytes(bytes(content))
    try:
        for view in views(path, heads=HEADS, skipped=[]):
            assert view.heads == HEADS
    except LevelheadError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from error
