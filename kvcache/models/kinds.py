"""The type of each layer, from the fields of a model's configuration: what it sees, or that it stores nothing.

Files say it in many ways. A list, a pattern or indices of layers count first. Then a number of layers that alternate
counts, and last the default of the class. A layer may also have settings of its own: another number or size of heads,
another window, or the rows of another layer.

Letters stand for types of layers:

- F sees all tokens, S the tokens of a sliding window, and X chooses rows;
- L is linear attention or another layer without rows, and C a convolution;
- H has a recurrent state beside its attention.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvcache.errors import shown
from kvcache.layer import once_for_each
from kvcache.models import classes
from kvcache.models.reading import MAX_LAYERS, Fields

# Types of layers, as transformers names them.
F, S, L, C, H, HS = "full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding"
CHUNKED, CROSS = "chunked_attention", "cross_attention"
X, XB = "indexed_attention", "minimax_m3_sparse"
INDEXED = {X, XB}  # layers that choose rows, single ones or blocks
# Layers with a window, beside which a model keeps rows of several tokens each: it reads all, or chooses some.
HEAVILY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
COMPRESSED = {HEAVILY: 128, SPARSE: 4}  # and the tokens of such a row
# Types of layers that store no keys and values.
STATELESS = {L, C, "mamba", "mamba2", "recurrent", "dummy", "moe", "mlp", "gdn", "kda", "linear"}
FULL = {F, "attention", H, "full", "global"}  # a hybrid layer has another state as well
SLIDING = {S, HS, "sliding", "local"}
KNOWN = STATELESS | FULL | SLIDING | INDEXED | {*COMPRESSED, CHUNKED, CROSS}
# Types with an indexer whose keys a cache holds.
WITH_INDEXER = {
    "axk2", "deepseek_v32", "deepseek_v4", "dots3_note_text", "glm5_next_text", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text",
    "minimax_m3_vl_text", "mistral_large4_text", "qwen4_exp_text",
}  # fmt: skip
# Attentions per layer, where there are several; each is a layer of the cache.
ATTENTIONS = {"longcat_flash": 2}
# Every n-th layer rotates no keys (model type: n).
NO_ROPE_EVERY = {"llama4_text": 4, "mistral_large4_text": 4, "smollm3": 4}

# Fields with an entry for each layer, and what each entry stands for.
BY_LAYER: dict[str, Mapping[Any, str]] = {
    "layer_types": {"deepseek_sparse_attention": X},  # an older name
    "hybrid_override_pattern": {"M": L, "*": F, "E": "moe", "-": "mlp"},  # Nemotron-H
    "hybrid_layer_pattern": {0: F, 1: S},  # MiMo
    "sliding_window_layout": {0: F, 1: S},  # SmallThinker
    "attn_type_list": {0: L, 1: F},  # MiniMax
    "compress_ratios": {0: S} | {ratio: kind for kind, ratio in COMPRESSED.items()},  # DeepSeek V4
    "zaya_layers": {"a": H},  # ZAYA1's first files, and numbers of experts
    "attention_layers": {},  # GPT-Neo
    "attention_types": {},
    "decoder_attention_types": {"linear_attention": L, "softmax_attention": F},
}
# Fields that list layers: the type of a listed layer, and the type of any other.
INDICES = {
    "full_attn_idxs": (F, C),  # LFM2
    "attn_layer_indices": (F, L),  # Bamba
    "local_layer_ids": (HS, H),
    "hybrid_layer_ids": (H, L),  # Zamba2
    "global_attn_idx": (F, S),
    "cross_attention_layers": (CROSS, F),  # Llama 3.2 Vision
}
# Fields with the number of layers after which a pattern of types begins again, and the pattern.
PERIODS: dict[str, Callable[[int], list[str]]] = {
    "full_attention_interval": lambda n: [L] * (n - 1) + [F],
    "layer_group_size": lambda n: [L] * (n - 1) + [F],
    "global_attn_every_n_layers": lambda n: [S] * (n - 1) + [F],
    "sliding_window_pattern": lambda n: [S] * (n - 1) + [F],
}
# The pattern of a type whose file has none, or the period in a field's place.
PATTERNS: dict[str, tuple[str, int] | list[str]] = {
    **dict.fromkeys(("cohere2", "cohere2_moe"), ("sliding_window_pattern", 4)),
    **dict.fromkeys(("exaone4", "exaone_moe"), ("sliding_window_pattern", 4)),
    **dict.fromkeys(("gemma3_text", "t5gemma2_text", "t5gemma2_decoder"), ("sliding_window_pattern", 6)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("full_attention_interval", 4)),
    "qwen4_exp_text": ("full_attention_interval", 4),
    **{key: [S, F] for key in ("gemma2", "gpt_oss", "t5_gemma_module", "vaultgemma")},
    **dict.fromkeys(("gemma3n_text", "kolibri1"), [S] * 4 + [F]),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "beam"), [S] * 5 + [F]),
    **dict.fromkeys(("inkling_text", "inkling2_text"), [HS] * 5 + [H]),
    **{key: [X] for key in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "hy_v4_vl_text", "mistral_large4_text")},
    "dots3_note_text": [S, X, S, S],
    **{key: [F, S, S, S] for key in ("cwm", "granite_swa", "granitemoe_swa")},
    **{key: [S, S, S, F] for key in ("muse_glimmer_text", "muse_spark_text", "olmo3")},
    **{key: [H] for key in ("falcon_h1", "zaya")},
    "zaya_2025": [H, "moe"],
    **{key: [F] for key in ("cohere_compass_text", "laguna", "lfm2", "mellum", "minimax_m3_vl_text", "step3p5")},
    "deepseek_v4": [HEAVILY, SPARSE],
    "afmoe": ("global_attn_every_n_layers", 4),
    "bailing_hybrid": ("layer_group_size", 6),
    "flint": [S, F, S, S],
    "glm5_next_text": [L, L, L, X],
    "gpt_neo": [F, S],
    **{key: [L] for key in ("bamba", "granitemoehybrid")},
    "kimi_linear": [F, L, L, L],
    "lara_mini": [L, S, L, F, S],
    "lfm3": [S, C, F, C],
    "mimo_v2_flash": [S] * 5 + [F],
    "minimax": [F, L],
    "modernbert-decoder": ("global_attn_every_n_layers", 3),
    "nemotron_h": [L, "moe", F, "mlp"],
    "olmo_hybrid": [L, L, L, F],
    "zamba2": [L, *([L] * 5 + [H]) * 7, *[L] * 4, H, *[L] * 3, H, L, L],
}
# Types whose pattern begins with the layer that others end with, or ends with the last layer.
FULL_FIRST = {"modernbert-decoder"}
FROM_THE_END = {"muse_glimmer_text", "muse_spark_text"}
# Types whose first or last layer is an exception to the pattern.
FIRST = {"dots3_note_text": X, "flint": F, "kimi_linear": L, "lfm3": C, "mimo_v2_flash": F}
FULL_LAST = {"diffusion_gemma_text", "gemma4_text", "gemma4_unified_text"}  # even if a file lists another type
LAST = {"beam": F, "flint": F}
# Types with an ``attn_layer_period``: the period, the offset, and the type of that layer.
ATTENTION_EVERY = {"jamba": (8, 4, F), "zamba": (6, 4, H)}
# Fields that say how long a window is; the first present counts.
WINDOWS = ("sliding_window", "local_attention", "window_size")
# Types whose layers have a window from ``max_window_layers`` on.
FROM_MAX_WINDOW_LAYERS = {"dots1"}
EVERY_WINDOW = {"ministral", "qwen3_moe"}  # types for which ``max_window_layers`` says nothing


# Types whose layers have an indexer also where a file calls them full_attention.
ALL_CHOOSE = {"glm5_next_text", "qwen4_exp_text"}
# Types of layers that do not see everything, and their names in `classes.Class.limits`.
LIMITED = {**dict.fromkeys((S, "sliding", "local"), "sliding"), CHUNKED: "chunked"}
# Types whose files are mostly of another class's models, with windows that transformers' class ignores.
OTHER_CODE = {"mpt"}


def layer_types(config: Fields) -> list[str]:
    """Return transformers' type of each layer; its models ignore some windows and chunks that files name."""
    ignored = ignored_kinds(config)
    kinds = [F if kind in ignored else kind for kind in _said_types(config)]
    if config.get("gguf_architecture") is not None:  # whose reader says which layers choose
        return kinds
    if config.get("model_type") in ALL_CHOOSE:
        kinds = [X if kind == F else kind for kind in kinds]
    if config.get("model_type") == "dots3_note_text" and config.get("per_layer_config") is None:
        chooses = config.get("use_dsa") is not False  # older files call such layers full_attention
        kinds = [(X if chooses else F) if kind in (F, X) else kind for kind in kinds]
    return kinds


def ignored_kinds(config: Fields) -> set[str]:
    """Return the types of layers that a model takes for layers with full attention."""
    model_type = config.text("model_type", "")
    limits = classes.of(model_type).limits
    if limits is None or model_type in OTHER_CODE or config.get("gguf_architecture") is not None:
        return set()
    return {kind for kind, limit in LIMITED.items() if limit not in limits}


def _said_types(config: Fields) -> list[str]:
    """Return the type of each layer as a file says it."""
    kinds = _listed(config)
    if kinds is None:
        num_layers = _num_layers(config)
        kinds = _by_pattern(config, num_layers)
    if kinds is None:
        kinds = [_kind(config, i) for i in range(num_layers)]
    if config.get("model_type") in FULL_LAST and config.get("gguf_architecture") is None:
        kinds = [*kinds[:-1], F]
    has_indexer = config.get("model_type") in WITH_INDEXER
    for i, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in KNOWN or (kind in INDEXED and not has_indexer):
            raise config.unsupported(f"layer {i} is of type {shown(kind)}, which no policy stands for")
    return kinds


def _num_layers(config: Fields) -> int:
    """Return the number of the cache's layers: some models have several for a layer of the file."""
    num_layers = config.count("num_hidden_layers")
    attentions = ATTENTIONS.get(config.text("model_type", ""))
    if attentions is not None and config.get("num_layers") is not None:  # num_hidden_layers counts attentions
        num_layers = attentions * config.count("num_layers")
    if config.get("H_cycles") is not None and config.get("num_layers_per_stack") is None:  # HRM
        num_layers *= config.count("H_cycles") * (config.count("L_cycles") + 1)
    if num_layers > MAX_LAYERS:
        raise config.error(f"it has {num_layers:,} layers; {MAX_LAYERS:,} are the most that are read")
    return num_layers


def _listed(config: Fields) -> list[Any] | None:
    """Return the types that a list, a pattern or indices of layers say; None if the file has none of them."""
    name = next((name for name in BY_LAYER if name != "attention_types" and config.get(name) is not None), None)
    repeated = config.sequence("attention_types")  # GPT-Neo: lists of types, and how often each comes
    indices = next((name for name in INDICES if config.get(name) is not None), None)
    linear = config.part("linear_attn_config")
    blocks = config.sequence("block_configs")
    config.used |= {*BY_LAYER, *INDICES, *PERIODS, "attn_layer_period", "attn_layer_offset"}  # the first says the same
    entries: list[Any] = []
    if name is not None:
        given = config.get(name)
        is_text = name == "hybrid_override_pattern" and isinstance(given, str)
        entries = [*given] if is_text else config.sequence(name) or []
    elif repeated is not None:
        name, entries = "attention_types", _repeated(config, repeated)
    default = len(entries) or (None if blocks is None else len(blocks)) or None
    num_layers = default if name == "hybrid_override_pattern" else None
    num_layers = num_layers or config.count("num_hidden_layers", default)
    if config.get("model_type") == "nemotron_h" and name is not None:
        num_layers = len(entries)
    if name is not None:
        if len(entries) < num_layers:
            config.sequence(name, num_layers)  # refuses it
        return [_entry(entry, BY_LAYER[name]) for entry in entries[:num_layers]]
    if blocks is not None:
        config.sequence("block_configs", num_layers)
        return [_block(config, i, block) for i, block in enumerate(blocks[:num_layers])]
    if linear is not None and linear.get("full_attn_layers") is not None:
        listed = linear.sequence("full_attn_layers") or []
        return [F if i + 1 in listed else L for i in range(num_layers)]  # the first layer is 1
    if indices is not None:
        listed, (chosen, others) = config.sequence(indices) or [], INDICES[indices]
        return [chosen if i in listed else others for i in range(num_layers)]
    sparse = config.part("sparse_attention_config") if config.get("model_type") == "minimax_m3_vl_text" else None
    chooses = None if sparse is None else sparse.sequence("sparse_attention_freq", num_layers)
    return None if chooses is None else [XB if entry else F for entry in chooses]


def _repeated(config: Fields, given: list[Any]) -> list[Any]:
    """Return the types that a list of patterns gives, each with the number of times that it comes."""
    found: list[Any] = []
    for item in given:
        pattern, times = item if isinstance(item, list | tuple) and len(item) == 2 else (None, 0)
        if not isinstance(pattern, list | tuple) or not isinstance(times, int) or not 0 < times <= MAX_LAYERS:
            raise config.error(f"attention_types must hold lists of types and how often they come, not {shown(item)}")
        found += [*pattern] * times
        if len(found) > MAX_LAYERS:
            raise config.error(f"attention_types gives more than {MAX_LAYERS:,} layers")
    return found


def _entry(entry: Any, names: Mapping[Any, str]) -> Any:
    """Return the type of a layer that an entry of a list in BY_LAYER stands for."""
    if names is BY_LAYER["zaya_layers"] and isinstance(entry, int):
        return "moe"
    return names.get(entry, entry) if isinstance(entry, str | int) else entry


def _block(config: Fields, layer: int, block: Any) -> str:
    """Return the type of a layer that ``block_configs`` describes, as in Nemotron's models that a search made."""
    if isinstance(block, Mapping) and isinstance(block.get("block_type"), str):
        return str(block["block_type"])
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise config.error(f"block_configs must have an object 'attention' for layer {layer}, not {shown(block)}")
    if attention.get("no_op") or attention.get("replace_with_linear") or attention.get("mamba"):
        return L
    for name in ("num_sink_tokens", "unshifted_sink", "use_prefill_window_in_sink_attention", "llama4"):
        if attention.get(name):
            raise config.unsupported(
                f"block_configs, layer {layer}, has {name} {shown(attention[name])}, which is not read"
            )
    return S if attention.get("window_length") or attention.get("sliding_window") else F


def _by_pattern(config: Fields, num_layers: int) -> list[str] | None:
    """Return the types of layers by the pattern of the file, or of the model's type; None if neither has a pattern."""
    model_type = config.text("model_type", "")
    found = _pattern(config, model_type)
    if found is None:
        return None
    shift = -num_layers % len(found) if model_type in FROM_THE_END else 0
    kinds = [found[(i + shift) % len(found)] for i in range(num_layers)]
    if model_type == "bailing_moe_linear":  # the layers behind the last whole group
        rest = num_layers % len(found)
        kinds[num_layers - rest :] = [F] * rest
    if model_type == "cohere2_moe":
        kinds = _after_dense(config, found, num_layers)
    if model_type == "deepseek_v4":  # whose first two layers are alike
        kinds[:2] = [HEAVILY] * len(kinds[:2])
    kinds[0] = FIRST.get(model_type, kinds[0])
    kinds[-1] = LAST.get(model_type, kinds[-1])
    if model_type == "olmo_hybrid" and F not in kinds:
        kinds[-1] = F
    if S in kinds and all(config.get(name) is None for name in WINDOWS):
        return [F if kind == S else kind for kind in kinds]
    return kinds


def _after_dense(config: Fields, pattern: list[str], num_layers: int) -> list[str]:
    """Return the types of layers whose pattern begins behind the layers without experts, which have their own."""
    dense = min(config.count("first_k_dense_replace", 0, least=0), num_layers)
    every = config.count("prefix_dense_sliding_window_pattern", 1)
    before = [S if (i + 1) % every else F for i in range(dense)]
    return before + [pattern[i % len(pattern)] for i in range(num_layers - dense)]


def _pattern(config: Fields, model_type: str) -> list[str] | None:
    """Return the types of the layers of one period."""
    blocks = config.sequence("block_types")
    if blocks:
        attention = F if config.get("sliding_window") is None else S
        return [attention if block == "attention" else L for block in blocks]
    usual = PATTERNS.get(model_type)
    if isinstance(usual, list):
        return usual
    name, period = usual or (next((name for name in PERIODS if config.get(name) is not None), None), None)
    if name is None:
        return None
    given = config.get(name)
    if isinstance(given, str):  # such as "LLLG": three layers with a window, one without
        if {*given} - {*"LG"}:
            raise config.error(f"{name} must be a number, or letters L (local) and G (global), not {shown(given)}")
        return [F if letter == "G" else S for letter in given] or [S]
    found = PERIODS[name](config.count(name, period))
    return found[::-1] if model_type in FULL_FIRST else found


def _kind(config: Fields, layer: int) -> str:
    """Derive the type of a layer from fields that are for all layers."""
    model_type = config.text("model_type", "")
    if not _has_rows(config, layer, model_type):
        return L
    if model_type in ATTENTION_EVERY:
        _, _, kind = ATTENTION_EVERY[model_type]
        return kind
    has_chunks = config.get("attention_chunk_size") is not None
    if has_chunks and model_type == "llama4_text":  # its layers without rotation see all tokens
        return CHUNKED if rotates_by_interval(config, layer) else F
    if has_chunks and config.get("sliding_window") is None:
        return CHUNKED
    return S if _slides(config, layer, model_type) else F


def _has_rows(config: Fields, layer: int, model_type: str) -> bool:
    """Whether a layer has attention: some models have layers without it."""
    if config.get("mamba_step") is not None and config.get("mamba_enabled", True):  # Plamo 2
        step = config.count("mamba_step")
        num_layers = config.count("num_hidden_layers")
        return layer == num_layers - 1 if num_layers <= step // 2 else layer % step == step // 2
    period, offset, _ = ATTENTION_EVERY.get(model_type, (None, 0, F))
    if config.get("attn_layer_period", period) is None:
        return True
    behind = layer - 3 if model_type == "zamba" else layer
    if behind < 0:
        return layer == 2
    return behind % config.count("attn_layer_period", period) == config.count("attn_layer_offset", offset, least=0)


def _slides(config: Fields, layer: int, model_type: str) -> bool:
    """Whether a layer with attention has a window."""
    window = config.get("sliding_window")
    if isinstance(window, list | tuple):
        return bool(window) and window[layer % len(window)] is not None
    if window is None or layer in (config.sequence("full_attention_idx") or ()):  # Plamo 2
        return False
    if config.get("use_sliding_window") is False and model_type != "ministral":
        return False
    if model_type == "smollm3":
        return config.get("use_sliding_window") is True and not rotates_by_interval(config, layer)
    first = config.count("max_window_layers", 0, least=0)
    if model_type == "qwen2_moe":
        return layer % 2 == 0 and layer < first
    from_first = config.get("use_sliding_window") or model_type in FROM_MAX_WINDOW_LAYERS
    return layer >= first if from_first and model_type not in EVERY_WINDOW else True


def rotates_by_interval(config: Fields, layer: int) -> bool:
    """Whether a layer rotates keys, by ``no_rope_layers`` (0: it does not), else by ``no_rope_layer_interval``."""
    listed = config.get("no_rope_layers")
    if listed:
        rotating = config.sequence("no_rope_layers", layer + 1)
        return rotating is not None and bool(rotating[layer])
    every = config.count("no_rope_layer_interval", NO_ROPE_EVERY.get(config.text("model_type", "")))
    return (layer + 1) % every != 0


# ---- settings of single layers

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


def fields_of_layers(config: Fields, kinds: Sequence[str]) -> list[Fields]:
    """Return the fields of each layer, by the layers' types: the model's, except where the layer has its own."""
    by_kind = {kind: _of_kind(config, kind) for kind in {*kinds}}
    lists, blocks = _lists(config, len(kinds)), config.sequence("block_configs", len(kinds))
    listed, model = _per_layer_config(config), cast("dict[str, Any]", config.values)

    def make(i: int) -> Fields:
        """Put the fields of layer i together: what comes later in `said` counts."""
        before, behind = by_kind[kinds[i]]
        block = {} if blocks is None else _of_block(config, i, kinds[i], blocks[i])
        said = before, {name: values[i] for name, values in lists.items()}, behind, block, listed.get(i, {})
        own = {name: value for values in said for name, value in values.items() if value is not None}
        source = f"{config.source}, layer {i}"
        return Fields(ChainMap(own, model), source, config.used) if own else config

    n = len(kinds)
    entries = [[None] * n if blocks is None else blocks, map(listed.get, range(n))]
    return once_for_each(make, kinds, *entries, *(values[:n] for values in lists.values()))


def _of_kind(config: Fields, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what prefixed fields, such as ``swa_head_dim``, and ``attention_other_setting`` say of a type's layers.

    Lists override the former. The latter, which Step 3.5 has, overrides lists.
    """
    names, found, behind = (*PREFIXED, *LATENT), dict[str, Any](), dict[str, Any]()
    if config.get("per_layer_config") is not None:  # which says it as well
        config.used |= {prefix + name for prefix in PREFIXES for name in names}
    else:
        for prefix in (prefix for prefix, of in PREFIXES.items() if kind in of):
            found |= {name: config.get(prefix + name) for name in names}
        if kind in FULL and config.get("attention_k_eq_v"):
            found["num_key_value_heads"] = config.get("num_global_key_value_heads", found.get("num_key_value_heads"))
    other = config.part("attention_other_setting")
    if other is not None and kind == other.text("attention_type", "sliding_attention"):
        behind = {OTHER_NAMES.get(name, name): other.get(name) for name in (*PREFIXED, *OTHER_NAMES)}
    return found, behind


def _lists(config: Fields, count: int) -> Mapping[str, Sequence[Any]]:
    """Return the lists, with an entry for each layer, that fields have in the place of a number."""
    lists = {name: values for name in LISTS if isinstance(values := config.get(name), list | tuple)}
    for name, values in lists.items():
        if name == "sliding_window" and values and count % len(values) == 0:
            lists[name] = [*values] * (count // len(values))  # a pattern that begins again
        else:
            config.sequence(name, count)  # refuses a shorter one
    return lists


def _of_block(config: Fields, layer: int, kind: str, block: Any) -> dict[str, Any]:
    """Return what an entry of ``block_configs`` says of its layer's attention; some say something of experts alone."""
    if not isinstance(block, Mapping) or not isinstance(block.get("attention"), Mapping):
        return {}
    attention = Fields(block["attention"], f"{config.source}, block_configs, layer {layer}")
    own = {OTHER_NAMES.get(name, name): attention.get(name) for name in (*PREFIXED, "sliding_window", *OTHER_NAMES)}
    if kind not in STATELESS and attention.get("n_heads_in_group") is not None:
        heads = config.count("num_attention_heads")
        own["num_key_value_heads"] = heads // attention.count("n_heads_in_group", most=heads)
    return own


def _per_layer_config(config: Fields) -> dict[int, Mapping[str, Any]]:
    """Return the entries of ``per_layer_config``, which transformers writes, by the layer's index."""
    given = config.part("per_layer_config")
    named = {str(key)[:9]: value for key, value in (given.values if given else {}).items()}
    return {int(key): value for key, value in named.items() if key.isdecimal() and isinstance(value, Mapping)}


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
