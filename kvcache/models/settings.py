"""Settings of single layers: another number or size of heads, another window, or the rows of another layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcache.models.fields import Fields
from kvcache.models.kinds import FULL, SLIDING, STATELESS
from kvcache.models.reading import MAX_HEADS

__all__ = ["settings_of", "shares_of"]

# Fields that may have a list, with an entry for each layer, in the place of one value.
LISTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "sliding_window", "rope_theta",
    "partial_rotary_factor", "layer_rope_theta",
)  # fmt: skip
# Names that fields have for layers with a window, or for the others, and the names of their values in those layers.
PREFIXES = {"swa_": SLIDING, "global_": FULL}
PREFIXED = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")  # such fields of an attention with latents
OTHER_NAMES = {"num_attention_groups": "num_key_value_heads", "window_length": "sliding_window"}


def settings_of(config: Fields, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the fields of each layer that differ from the model's, by the layers' types."""
    found: list[dict[str, Any]] = [{} for _ in kinds]
    for make in (_by_kind, _lists, _other_setting, _blocks, _per_layer_config):
        for own, more in zip(found, make(config, kinds), strict=True):
            own.update({name: value for name, value in more.items() if value is not None})
    return found


def _by_kind(config: Fields, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return what prefixed fields say, such as ``swa_head_dim`` of the layers with a window."""
    if config.get("per_layer_config") is not None:
        config.used |= {prefix + name for prefix in PREFIXES for name in (*PREFIXED, *LATENT)}  # which it says as well
        return [{} for _ in kinds]
    found: dict[str, dict[str, Any]] = {}
    for kind in {*kinds}:
        prefixes = [prefix for prefix, of in PREFIXES.items() if kind in of]
        found[kind] = {name: config.get(prefix + name) for prefix in prefixes for name in (*PREFIXED, *LATENT)}
    if config.get("attention_k_eq_v") and (heads := config.get("num_global_key_value_heads")) is not None:
        for kind in FULL & found.keys():
            found[kind]["num_key_value_heads"] = heads
    return [found[kind] for kind in kinds]


def _lists(config: Fields, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of lists, where a field has one in the place of a number."""
    lists = {name: values for name in LISTS if isinstance(values := config.get(name), list | tuple)}
    for name, values in lists.items():
        if name == "sliding_window" and values and len(kinds) % len(values) == 0:
            lists[name] = [*values] * (len(kinds) // len(values))  # a pattern that begins again
        else:
            config.sequence(name, len(kinds))  # refuses a shorter one
    return [{name: values[i] for name, values in lists.items()} for i in range(len(kinds))]


def _other_setting(config: Fields, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return what ``attention_other_setting`` says of the layers of one type, as in Step 3.5."""
    other = config.part("attention_other_setting")
    if other is None:
        return [{} for _ in kinds]
    of = other.text("attention_type", "sliding_attention")
    own = {OTHER_NAMES.get(name, name): other.get(name) for name in (*PREFIXED, *OTHER_NAMES)}
    return [own if kind == of else {} for kind in kinds]


def _blocks(config: Fields, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return what ``block_configs`` says of each layer's attention."""
    blocks = config.sequence("block_configs", len(kinds))
    if blocks is None:
        return [{} for _ in kinds]
    found: list[dict[str, Any]] = []
    for i, kind in enumerate(kinds):
        if not isinstance(blocks[i], Mapping) or not isinstance(blocks[i].get("attention"), Mapping):
            found.append({})  # it says something of experts alone
            continue
        attention = Fields(blocks[i]["attention"], f"{config.source}, block_configs, layer {i}")
        own = {OTHER_NAMES.get(name, name): attention.get(name) for name in (*PREFIXED, "sliding_window", *OTHER_NAMES)}
        if kind not in STATELESS and attention.get("n_heads_in_group") is not None:
            heads = config.count("num_attention_heads", most=MAX_HEADS)
            own["num_key_value_heads"] = heads // attention.count("n_heads_in_group", most=heads)
        found.append({name: value for name, value in own.items() if value is not None})
    return found


def _per_layer_config(config: Fields, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the entries of ``per_layer_config``, which transformers writes."""
    given = config.part("per_layer_config")
    own = {} if given is None else {_number(key): value for key, value in given.values.items()}
    return [{**values} if isinstance(values := own.get(i), Mapping) else {} for i in range(len(kinds))]


def _number(key: object) -> int | None:
    """Return the layer's index that a key of ``per_layer_config`` is; None for any other key."""
    text = str(key)[:9]
    return int(text) if text.isdecimal() else None


def shares_of(config: Fields, kinds: Sequence[str]) -> list[int | None]:
    """Return the index of the layer whose rows each layer reads; None: its own.

    The last ``num_kv_shared_layers`` layers read the rows of the last layer of their type before them. With
    ``use_cla``, each group of ``cla_share_factor`` layers reads the rows of its first.
    """
    if config.get("use_cla"):
        group = config.count("cla_share_factor", most=len(kinds))
        return [None if i % group == 0 else i - i % group for i in range(len(kinds))]
    num_shared = config.count("num_kv_shared_layers", 0, least=0, most=len(kinds) - 1)
    own = kinds[: len(kinds) - num_shared]
    last = {kind: i for i, kind in enumerate(own)}
    for i, kind in enumerate(kinds[len(own) :], len(own)):
        if kind not in last and kind not in STATELESS:
            raise config.error(
                f"layer {i} is to read the rows of a layer of type {kind!r}, and there is none before it"
            )
    return [None] * len(own) + [None if kind in STATELESS else last[kind] for kind in kinds[len(own) :]]
