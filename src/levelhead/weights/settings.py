"""A model's settings under one name each, whatever its config calls them, with their provenance.

A config is a plain mapping (a transformers `config.json`, the header of a file). Arguments of the
user stand before it. `heads` is looked up as num_attention_heads, n_head, …; the first that is
there counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from levelhead.base.arguments import is_whole
from levelhead.base.errors import InputError
from levelhead.weights.structure import Provenance

__all__ = ["ALIASES", "SETTABLE", "Settings", "has_heads"]

# Our name → what configs call it, in the order of trust.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "nhead"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "d_kv", "attention_head_dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "d_model", "n_embd", "dim"),
    "theta": ("rope_theta", "rotary_emb_base"),
    "rotary": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
    "rotary_dims": ("rotary_dim", "rotary_ndims"),
    "rms_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "layer_eps": ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"),
    "soft_cap": ("attn_logit_softcapping",),
    "window": ("sliding_window", "window_size"),
}
# What a user may say of a model beside its config; each also under the names that configs use.
SETTABLE: tuple[str, ...] = (
    *ALIASES,
    "model_type",
    "norm_first",
    "do_stable_layer_norm",
    "is_decoder",
    "query_pre_attn_scalar",
    "attention_multiplier",
)


def has_heads(config: Mapping[str, Any]) -> bool:
    """Whether a mapping reads like a model's config: it says how many heads there are.

    >>> has_heads({"n_head": 6}), has_heads({"learning_rate": 1e-3})
    (True, False)
    """
    return any(is_whole(config.get(name)) for name in ("heads", *ALIASES["heads"]))


# Which part of a nested config describes a layer, by a piece of the layer's name.
_PARTS = (
    ("text_model.", ("text_config",)),
    ("vision_model.", ("vision_config",)),
    ("language_model.", ("text_config", "llm_config")),
    ("vision_tower.", ("vision_config",)),
    ("visual.", ("vision_config",)),
)


class Settings:
    """Settings of a model by trust: arguments, a module's attributes, a layout, its config.

    >>> settings = Settings({"n_head": 12, "model_type": "gpt2"}, where="config.json")
    >>> settings.find("heads")
    (12, Provenance(how='read', source='config.json n_head'))
    >>> settings.find("theta") is None
    True
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        where: str = "config",
        arguments: Mapping[str, Any] | None = None,
        before: tuple[tuple[str, Mapping[str, Any]], ...] = (),
        side: str | None = None,
    ) -> None:
        if config is not None and not isinstance(config, Mapping):
            raise InputError(f"config is a {type(config).__name__}; expected a mapping of settings")
        self.config: Mapping[str, Any] = config or {}
        self.arguments = {k: v for k, v in (arguments or {}).items() if v is not None}
        self.where = where
        self.before = before
        self.side = side

    @property
    def model_type(self) -> str | None:
        """The config's model_type, or the argument that stands before it; None without either."""
        found = self.arguments.get("model_type", self.config.get("model_type"))
        return found if isinstance(found, str) else None

    def part(self, name: str) -> Settings:
        """The settings that describe the layer `name` of a composite model (CLIP, Gemma 3).

        Where a config counts the heads of encoder and decoder apart, the name says which.
        """
        side = "decoder" if "decoder." in name else "encoder"
        keys = [key for piece, group in _PARTS if piece in name for key in group]
        if "num_attention_heads" not in self.config:
            keys.append("text_config")
        for key in keys:
            if isinstance(inner := self.config.get(key), Mapping):
                return self._like(inner, f"{self.where} {key}", self.before, side)
        return self._like(self.config, self.where, self.before, side)

    def _like(
        self,
        config: Mapping[str, Any],
        where: str,
        before: tuple[tuple[str, Mapping[str, Any]], ...],
        side: str | None,
    ) -> Settings:
        return Settings(config, where=where, arguments=self.arguments, before=before, side=side)

    def after(self, where: str, values: Mapping[str, Any]) -> Settings:
        """These settings with `values` (called `where`) between the arguments and the rest."""
        if not values:
            return self
        return self._like(self.config, self.where, ((where, values), *self.before), self.side)

    def find(self, name: str) -> tuple[Any, Provenance] | None:
        """(value, provenance) of setting `name` (ours or the config's own); None if unsaid.

        A null counts as unsaid.
        """
        if name in self.arguments:
            return self.arguments[name], Provenance("read", f"argument {name}")
        for where, values in (*self.before, (self.where, self.config)):
            for alias in self._names(name):
                if values.get(alias) is not None:
                    return values[alias], Provenance("read", f"{where} {alias}")
        return None

    def _names(self, name: str) -> tuple[str, ...]:
        own = (f"{self.side}_attention_heads",) if name == "heads" and self.side else ()
        return (name, *own, *ALIASES.get(name, ()))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of setting `name`, or `default`."""
        found = self.find(name)
        return default if found is None else found[0]

    def whole(self, name: str) -> tuple[int, Provenance] | None:
        """`find` for a number of things; raises InputError unless it is a whole number ≥ 1."""
        found = self.find(name)
        if found is not None and not is_whole(found[0]):
            raise InputError(
                f"{found[1].source} is {found[0]!r}; expected a whole number of at least 1"
            )
        return found

    def flag(self, name: str) -> bool | None:
        """`find` for a switch, None if unsaid; raises InputError unless it is true or false."""
        found = self.find(name)
        if found is None:
            return None
        if not isinstance(found[0], bool):
            raise InputError(f"{found[1].source} is {found[0]!r}; expected true or false")
        return found[0]
