"""Real training, watched: sentences, digits, families of transformers, frameworks, what they vary.

Each case is trained twice, without and with the watch. Weights, buffers and all logits on the way
must be equal bit for bit, and every head of every layer must have its entropies and ranks.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from levelhead.base.errors import LevelheadWarning
from levelhead.base.records import Reading
from levelhead.training.watch import Watch, watch

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4
Batch = tuple[dict[str, Tensor], Tensor]  # arguments of the model and labels


@dataclass(frozen=True, eq=False)
class Case:
    """A model that returns logits [b, classes], its batches, and its layers' heads."""

    build: Callable[[], nn.Module]
    batches: list[Batch]
    heads: dict[str, int]
    autocast: bool = False
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    between: Callable[[nn.Module, int], None] = lambda model, step: None
    layers: Callable[[int], dict[str, int]] | None = None  # heads at a step, if they change

    def at(self, step: int) -> dict[str, int]:
        return self.heads if self.layers is None else self.layers(step)


def logits(model: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    out = model(**arguments)
    return out if isinstance(out, Tensor) else out["logits"]


def fit(case: Case, out: Path | None) -> tuple[list[Tensor], list[Tensor], Watch | None]:
    """State after training, logits on the way, and the run if `out` is given."""
    torch.manual_seed(0)
    model = case.build()
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.01)
    watching: Any = nullcontext()
    if out is not None:
        watching = watch(model, optimizer, 2, out=out, alarms=False, **case.options)
    seen, batches = [], iter(case.batches * STEPS * case.accumulate)
    torch.manual_seed(1)
    with watching as run:
        for step in range(STEPS):
            case.between(model, step)
            if case.layers is not None:
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(case.accumulate):
                arguments, labels = next(batches)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    found = logits(model, arguments)
                    loss = cross_entropy(found.float(), labels) / case.accumulate
                loss.backward()
                total += loss.detach()
                seen.append(found.detach().clone())
            optimizer.step()
            if run is not None:
                run.step(total)
        model.eval()
        with torch.no_grad():
            seen.append(logits(model, case.batches[0][0]))
    return [t.clone() for t in model.state_dict().values()], seen, run


def check(readings: list[Reading], at: Callable[[int], dict[str, int]], last: int = STEPS) -> None:
    """Entropies and ranks of every head of every layer, at sampled steps, within their bounds."""
    for name in ("attention_entropy_share", "map_rank", "map_effective_rank", "largest_logit"):
        found = [r for r in readings if r.name == name]
        places = Counter((r.step, r.where["layer"], r.where["head"]) for r in found)
        want = {
            (step, layer, head)
            for step in sorted({1, 2, last})
            for layer, heads in at(step).items()
            for head in range(heads)
        }
        assert set(places) == want, name
        assert set(places.values()) == {1}, name
        if name == "attention_entropy_share":
            assert all(0 <= r.value <= 1 + 1e-6 for r in found)
        if name.startswith("map_"):
            assert all(r.value >= 1 - 1e-6 for r in found)
    for name in ("qk_effective_rank", "ov_effective_rank"):
        found = {(r.step, r.where["layer"], r.where["head"]) for r in readings if r.name == name}
        assert {step for step, _, _ in found} == {1, 2, last}, name
        assert {layer for _, layer, _ in found} == set(at(1)), name
    losses = [r.step for r in readings if r.name == "loss"]
    assert losses == list(range(1, last + 1))


# ── data ──


def sentences(many: int = 32, length: int = 12) -> tuple[Tensor, Tensor, int]:
    """Words of SST-2 as numbers [b, n] (0 pads), labels [b], and the number of words."""
    folder = Path(os.environ.get("LEVELHEAD_TEXT", ROOT.parent / "shared" / "text"))
    if not (folder / "stsa.binary.train").is_file():
        pytest.skip("set LEVELHEAD_TEXT to a folder with stsa.binary.train")
    lines = (folder / "stsa.binary.train").read_text(encoding="utf-8").splitlines()[:many]
    words: dict[str, int] = {}
    rows, labels = [], []
    for line in lines:
        label, *tokens = line.split()[: length + 1]
        numbers = [words.setdefault(token, len(words) + 1) for token in tokens]
        rows.append(numbers + [0] * (length - len(numbers)))
        labels.append(int(label))
    return torch.tensor(rows), torch.tensor(labels), len(words) + 1


def digits(many: int = 32) -> tuple[Tensor, Tensor]:
    """Scanned digits as 16 patches of 2 × 2 pixels [b, 16, 4], and labels [b]."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:many], dtype=torch.float32).view(many, 4, 2, 4, 2) / 16
    return x.transpose(2, 3).reshape(many, 16, 4), torch.tensor(labels[:many])


def split(labels: Tensor, **arguments: Tensor) -> list[Batch]:
    return [
        ({name: value[i : i + 8] for name, value in arguments.items()}, labels[i : i + 8])
        for i in range(0, len(labels), 8)
    ]


# ── models ──


class Plain(nn.Module):
    """One attention layer on patches."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.out = nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.attn(x, x, x)[0]).mean(1))


class Text(nn.Module):
    """A transformer on words, with padding masked and dropout on."""

    def __init__(self, words: int, d: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, d), nn.Embedding(12, d)
        layer = nn.TransformerEncoderLayer(d, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        return self.out(self.encoder(x, src_key_padding_mask=ids == 0).mean(1))


class Patches(nn.Module):
    """A small ViT, with norms in front."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(4, d), nn.Parameter(0.02 * torch.randn(17, d))
        self.token = nn.Parameter(torch.zeros(d))
        layer = nn.TransformerEncoderLayer(d, 4, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, -1), self.embed(x)], 1) + self.place
        return self.out(self.encoder(x)[:, 0])


def frozen() -> nn.Module:
    model = Patches()
    model.encoder.layers[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


class Lora(nn.Module):
    """A frozen layer with a low-rank adapter beside it, which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


class Separate(nn.Module):
    """Attention with projections of its own, whose heads can be taken away."""

    def __init__(self, heads: int = 4, width: int = 3, d: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, heads * width) for _ in range(3))
        self.out_proj = nn.Linear(heads * width, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(*x.shape[:2], self.heads, self.width).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Prunable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.out = Separate(), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.attn(x)).mean(1))


def adapted() -> nn.Module:
    model = Prunable()
    for name in ("q_proj", "v_proj"):
        setattr(model.attn, name, Lora(getattr(model.attn, name)))
    return model


def prune(model: nn.Module, step: int) -> None:
    """Before the third step two of four heads go."""
    if step != 2:
        return
    attn: Any = model.attn
    attn.heads, rows = 2, 2 * attn.width
    for f in (attn.q_proj, attn.k_proj, attn.v_proj):
        f.weight = nn.Parameter(f.weight[:rows].detach().clone())
        f.bias = nn.Parameter(f.bias[:rows].detach().clone())
    attn.out_proj.weight = nn.Parameter(attn.out_proj.weight[:, :rows].detach().clone())


class Family(nn.Module):
    """A model of transformers with a classifier on the mean of its last states."""

    def __init__(self, kind: str, words: int) -> None:
        super().__init__()
        import transformers

        sizes: dict[str, Any] = {
            "vocab_size": words,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 16,
            "pad_token_id": 0,
        }
        more: dict[str, dict[str, Any]] = {
            "Bert": {},
            "Albert": {"embedding_size": 8},
            "Llama": {"num_key_value_heads": 2},
        }
        if kind == "T5":
            settings = {"vocab_size": words, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 4}
            config = transformers.T5Config(**settings, num_layers=1, decoder_start_token_id=0)
        else:
            config = getattr(transformers, f"{kind}Config")(**sizes, **more[kind])
        self.base = getattr(transformers, f"{kind}Model")(config)
        self.out = nn.Linear(16, 2)
        self.decodes = kind == "T5"

    def forward(self, ids: Tensor) -> Tensor:
        given = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        if self.decodes:
            given["decoder_input_ids"] = ids[:, :5]
        return self.out(self.base(**given)[0].mean(1))


LAYOUT = {"module": "attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
# What the config says that stands inside the wrapped model.
WITHIN: dict[str, dict[str, Any]] = {"T5": {}, "Llama": {"heads": 4, "kv_heads": 2}}
FAMILIES = {
    "Bert": [f"base.encoder.layer.{i}.attention" for i in range(2)],
    "Albert": ["base.encoder.albert_layer_groups.0.albert_layers.0.attention"],
    "Llama": [f"base.layers.{i}.self_attn" for i in range(2)],
    "T5": [
        "base.encoder.block.0.layer.0.SelfAttention",
        "base.decoder.block.0.layer.0.SelfAttention",
        "base.decoder.block.0.layer.1.EncDecAttention",
    ],
}


def text_case(build: Callable[[int], nn.Module], names: list[str], **more: Any) -> Case:
    ids, labels, words = sentences()
    return Case(lambda: build(words), split(labels, ids=ids), dict.fromkeys(names, 4), **more)


def digit_case(build: Callable[[], nn.Module], heads: dict[str, int], **more: Any) -> Case:
    x, labels = digits()
    return Case(build, split(labels, x=x), heads, **more)


def probed() -> Case:
    """Attention also seen through transformers' interface."""
    from levelhead.adapters.transformers import attention_probe

    options = {"heads": 4, "probes": [attention_probe()]}
    return text_case(lambda words: Family("Bert", words), FAMILIES["Bert"], options=options)


ENCODER = [f"encoder.layers.{i}.self_attn" for i in range(2)]
SEPARATE: dict[str, Any] = {"layout": LAYOUT, "heads": 4}
CASES: dict[str, Callable[[], Case]] = {
    "plain": lambda: digit_case(Plain, {"attn": 2}),
    "text": lambda: text_case(Text, ENCODER),
    "digits": lambda: digit_case(Patches, dict.fromkeys(ENCODER, 4)),
    "bfloat16 autocast": lambda: digit_case(Patches, dict.fromkeys(ENCODER, 4), autocast=True),
    "accumulation": lambda: text_case(Text, ENCODER, accumulate=3),
    "frozen": lambda: digit_case(frozen, dict.fromkeys(ENCODER, 4)),
    "adapters": lambda: digit_case(adapted, {"attn": 4}, options=SEPARATE),
    "pruned": lambda: digit_case(
        Prunable,
        {"attn": 4},
        options=SEPARATE,
        between=prune,
        layers=lambda step: {"attn": 4 if step < 3 else 2},
    ),
    "Bert with its probe": probed,
    **{
        kind: lambda kind=kind, names=names: text_case(
            lambda words: Family(kind, words), names, options=WITHIN.get(kind, {"heads": 4})
        )
        for kind, names in FAMILIES.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_and_every_head_is_seen(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    state, plain, _ = fit(case, None)
    watched, seen, run = fit(case, tmp_path / "run")
    assert len(plain) == STEPS * case.accumulate + 1
    assert all(torch.equal(p, q) for p, q in zip(plain, seen, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(state, watched, strict=True))
    assert not torch.equal(plain[0], plain[-1])
    assert run is not None
    assert run.steps == STEPS
    assert set(run.coverage) == set(case.heads)
    assert all(how.startswith("weights and maps (") for how in run.coverage.values())
    check(run.readings(), case.at)
    if name == "pruned":
        assert any("changed from 4 to 2 heads" in note for note in run.notes())
    if name == "frozen":
        moved = {r.where.get("layer"): r.value for r in run.readings() if r.name == "update_norm"}
        assert moved[ENCODER[0]] == 0 < moved[ENCODER[1]]
    if name == "adapters":
        first, last = (
            [r.value for r in run.readings() if (r.name, r.step) == ("qk_spectral_norm", step)]
            for step in (1, STEPS)
        )
        assert first != last  # the adapter's part in the weights is seen


# ── frameworks ──


def test_a_bert_under_its_trainer(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from levelhead.adapters.transformers import WatchCallback, attention_probe

    ids, labels, words = sentences()
    rows = [
        {"input_ids": i, "labels": label, "attention_mask": (i != 0).long()}
        for i, label in zip(ids, labels, strict=True)
    ]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=words, intermediate_size=16, pad_token_id=0, **sizes)
    watching = WatchCallback(every=2, probes=[attention_probe()], out=tmp_path / "run")
    models = []
    for callbacks in ([], [watching]):
        torch.manual_seed(0)
        models.append(BertForSequenceClassification(config))
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=0.01,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        Trainer(models[-1], arguments, train_dataset=rows, callbacks=callbacks).train()
    one, other = (model.state_dict().values() for model in models)
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))
    assert watching.run is not None
    names = [f"bert.encoder.layer.{i}.attention" for i in range(2)]
    assert set(watching.run.coverage) == set(names)
    check(watching.run.readings(), lambda step: dict.fromkeys(names, 4))


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",
)
def test_a_lightning_module(tmp_path: Path) -> None:
    import lightning.pytorch as L
    from torch.utils.data import DataLoader, TensorDataset

    from levelhead.adapters.lightning import WatchCallback

    class Digits(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Patches()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    watching, modules = WatchCallback(every=2, out=tmp_path / "run"), []
    for callbacks in ([], [watching]):
        torch.manual_seed(0)
        modules.append(Digits())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            callbacks=callbacks,
            enable_model_summary=False,
            **quiet,
        )
        trainer.fit(modules[-1], DataLoader(TensorDataset(*digits()), batch_size=8))
    one, other = (module.state_dict().values() for module in modules)
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))
    assert watching.run is not None
    names = [f"net.{name}" for name in ENCODER]
    assert set(watching.run.coverage) == set(names)
    check(watching.run.readings(), lambda step: dict.fromkeys(names, 4))


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("early", [True, False])
def test_a_compiled_model_is_detected_and_named(early: bool, tmp_path: Path) -> None:
    """Compiled before or after it is watched: trained alike, and no layer passes for seen."""

    def compiled() -> nn.Module:
        model = torch.compile(Patches(), backend="eager")
        if early:
            model(**case.batches[0][0]).sum().backward()
            model.zero_grad()
        return model

    x, labels = digits()
    case = Case(compiled, split(labels, x=x), dict.fromkeys(ENCODER, 4))
    state, plain, _ = fit(case, None)
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watched, seen, run = fit(case, tmp_path / "run")
    assert all(torch.equal(p, q) for p, q in zip(plain, seen, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(state, watched, strict=True))
    assert run is not None
    readings = run.readings()
    with_maps = {r.where["layer"] for r in readings if r.name == "attention_entropy"}
    assert {r.where["layer"] for r in readings if r.name == "qk_effective_rank"} == set(ENCODER)
    told = [str(w.message) for w in said if issubclass(w.category, LevelheadWarning)]
    without = set(ENCODER) - with_maps
    assert all("no maps" in run.coverage[name] for name in without)
    if early:
        assert without
    if without:
        assert any("compile" in sentence for sentence in told)
        assert all(any(name in sentence for sentence in told) for name in without)
