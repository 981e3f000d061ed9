"""Each layer's fields of a GGUF, under Hugging Face's names.

`kvcache.models.gguf` decodes the metadata, and `kvcache.models.gguf_tables` has what files leave to their readers. An
architecture is llama.cpp's name for a type of model. `windowed` says whether a layer has a window, or a chunk. An
indexer chooses the rows that a token of a layer reads, by index keys of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvcache.errors import ModelFileError, NotSupportedError, plain, shown
from kvcache.models import gguf
from kvcache.models import gguf_tables as tables
from kvcache.models.reading import MAX_LAYERS, MAX_NAME, Fields

FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_long.weight"  # tensors by which frequencies are divided
CHOOSES, CHOOSES_BLOCKS = "indexed_attention", "minimax_m3_sparse"
TYPES, RATIOS = "attention.indexer.types", "attention.compress_ratios"


def read(header: gguf.Header, source: str) -> Fields:
    """Give a GGUF's metadata Hugging Face's names, with the fields of each layer in ``per_layer_config``.

    Raise `ModelFileError` if a key is missing or holds an impossible value. Raise `NotSupportedError` if the
    architecture is unknown, if no policy stands for its layers, or if a key about layers is not read.
    """
    model = _Model(header, source)
    model.refuse()
    kinds, layers = model.layers()
    common = {name: value for name, value in layers[0].items() if all(layer[name] == value for layer in layers)}
    others = [
        {name: value for name, value in layer.items() if name not in common and value is not None} for layer in layers
    ]
    values = {"num_hidden_layers": len(layers), "layer_types": kinds, **common}
    if any(others):
        values["per_layer_config"] = {str(i): layer for i, layer in enumerate(others)}
    indexers = indexer_fields(model.keys, model.name, len(kinds))
    fields = Fields({**model.facts(), **values, **indexers}, source)
    model.refuse_unread()
    return fields


def refuse_without_model(header: gguf.Header, source: str) -> None:
    """Refuse a file that holds no model, or a later part of one."""
    metadata = header.metadata
    kind = metadata.get("general.type", "adapter" if "adapter.type" in metadata else None)
    if isinstance(kind, str) and kind in tables.NO_MODELS:
        raise ModelFileError(f"{source} is {tables.NO_MODELS[kind]}: give the model's own file")
    if metadata.get("split.no", 0) != 0:
        raise ModelFileError(f"{source} is a later part of a model: give the first, whose name has 00001-of-")


def as_llama_cpp_has(name: str, own: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of an architecture under llama.cpp's names, with what other converters leave out."""
    is_text_alone = name in tables.IMAGES and tables.IMAGES[name] not in own
    left_out = {} if is_text_alone else tables.LEFT_OUT.get(name, {})
    kept = {key: value for key, value in own.items() if not key.startswith(tables.OF_OTHER_PARTS)}
    given = {new: kept.pop(key) for key, new in tables.ALIASES.items() if key in kept}
    return {**left_out, **given, **kept}


class _Noted(dict[str, Any]):
    """A dictionary that notes the keys that it is asked for."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


class _Model:
    """The keys of a file's architecture, and what they say about the layers."""

    def __init__(self, header: gguf.Header, source: str) -> None:
        name = header.metadata.get("general.architecture")
        refuse_without_model(header, source)
        if not isinstance(name, str):
            raise ModelFileError(f"{source}: there is no general.architecture")
        if len(name) > MAX_NAME:
            raise ModelFileError(f"{source}: general.architecture {shown(name)} is no name")
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
        self.name, self.header, self.noted = tables.ALIKE.get(name, name), header, _Noted(as_llama_cpp_has(name, own))
        self.keys = Fields(self.noted, source)

    def refuse(self) -> None:
        """Refuse an architecture that is unknown, or whose rows no policy describes."""
        name, keys = self.name, self.keys
        if name not in tables.HALVES | tables.NEIGHBOURS | tables.UNROTATED:
            raise keys.unsupported(
                f"the architecture {shown(name)} is unknown, and the file does not say how its layers "
                "rotate keys and which have windows: give the model's config.json, or the sizes of the layers"
            )
        reason = tables.REFUSED.get(name, tables.ENCODER if name in tables.ENCODERS else None)
        if name in tables.BOTH_SIDES and self.window:
            reason = "its windows reach to both sides, which no policy stands for"
        if name not in tables.INDEXERS and keys.get("attention.indexer.top_k"):
            reason = "it keeps keys of an indexer beside the others (attention.indexer.top_k)"
        if name == "dflash" and keys.get("hyper_connection.count"):
            reason = "it keeps keys without values (hyper_connection.count)"
        if reason is not None:
            raise keys.unsupported(f"a {plain(name)} is not supported, as {reason}")

    def refuse_unread(self) -> None:
        """Refuse a key that says something about layers, and that nobody asked for."""
        for name in self.noted.keys() - self.noted.asked - tables.NOT_ABOUT_LAYERS:
            if tables.ABOUT_LAYERS.search(name):
                raise self.keys.unsupported(
                    f"what {shown(name)} says about the layers of a {plain(self.name)} is not "
                    "read: give the model's config.json, or the sizes of the layers"
                )

    def facts(self) -> dict[str, Any]:
        """Return the fields that no layer has for itself."""
        values = {ours: self.keys.get(name) for name, ours in tables.NAMES.items()}
        if isinstance(values["intermediate_size"], tuple):  # one of each layer
            values["intermediate_size"] = next((size for size in values["intermediate_size"] if size), None)
        tokens = self.header.metadata.get("tokenizer.ggml.tokens")
        if values["vocab_size"] is None and tokens is not None:
            values["vocab_size"] = tokens.count if isinstance(tokens, gguf.Skipped) else len(tokens)
        own_rows = tables.OWN_ROWS.get(self.name, self.num_layers)
        shared = self.keys.get("attention.shared_kv_layers", max(self.num_layers - own_rows, 0))
        return {
            **values,
            "gguf_architecture": self.name,
            "model_type": tables.MODEL_TYPES.get(self.name, self.name),
            "tie_word_embeddings": "output.weight" not in self.header.tensors,
            "sliding_window": self.window or None,
            "attention_chunk_size": self.window or None,
            # files of Gemma 3n have a float
            "num_kv_shared_layers": int(shared) if isinstance(shared, float) and shared.is_integer() else shared,
            "is_encoder_decoder": self.name in tables.ENCODER_DECODERS,
            "max_source_positions": values["max_position_embeddings"],
        }

    # ---- which layers there are

    @cached_property
    def num_layers(self) -> int:
        """The number of layers in the file, except layers that only draft tokens."""
        num_layers = self.keys.count("block_count")
        if self.name in tables.ENCODER_DECODERS:
            return self.keys.count("decoder_block_count", num_layers)
        without = num_layers - self.keys.count("nextn_predict_layers", 0, least=0, most=num_layers - 1)
        is_left_out = self.name == "deepseek4" and f"blk.{without}.nextn.eh_proj.weight" not in self.header.tensors
        return num_layers if is_left_out else without  # older files of DeepSeek V4 count layers that they do not have

    @cached_property
    def num_heads(self) -> list[int]:
        """The number of query heads of each layer."""
        return self.keys.counts("attention.head_count", self.num_layers, least=0)

    def layers(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Return Hugging Face's type and the fields of each layer of the cache."""
        num_kv_heads = self.num_heads
        if self.keys.get("attention.head_count_kv") is not None:
            num_kv_heads = self.keys.counts("attention.head_count_kv", self.num_layers, least=0)
        windowed, recurrent = self.windowed(), self.recurrent()
        sparse = sparse_kinds(self.keys, self.name, windowed)
        sizes = {kind: self.sizes(kind) for kind in (False, True)}
        rotations = {kind: self.rotation(kind, sizes[False], sizes[kind]) for kind in {*windowed}}
        kinds, layers = [], []
        for i, kind in enumerate(windowed):
            has_rows = num_kv_heads[i] and not recurrent[i]
            kinds.append(sparse[i] or self.kind(kind) if has_rows else self.kind_without_rows(i))
            layer = {"num_attention_heads": self.num_heads[i], "num_key_value_heads": num_kv_heads[i]}
            layers.append({**layer, **sizes[kind], **rotations[kind]})
            layers[-1]["rotates"] = self.rotates(i, kind) and layers[-1]["rotary_dim"] > 0
            layers[-1]["embeds_positions"] = self.embeds_positions
        if self.name == "nanbeige":  # runs its layers several times, with other rows each time
            loops = self.keys.count("num_loops", 1, most=MAX_LAYERS // self.num_layers)
            kinds, layers = kinds * loops, layers * loops
        if self.name == "graniteswitch":  # has one more layer, which chooses adapters
            kinds.append("full_attention")
            layers.append({**layers[0], "num_attention_heads": 1, "num_key_value_heads": 1, "rotates": False})
        return kinds, layers

    def recurrent(self) -> list[bool]:
        """Return which layers have a recurrent state, though the file has a number of KV heads for them."""
        if self.name not in tables.ATTENTION_EVERY:
            return [False] * self.num_layers
        every = self.keys.count("full_attention_interval", tables.ATTENTION_EVERY[self.name])
        listed = self.keys.sequence("attention.recurrent_layers", self.num_layers)
        return [(i + 1) % every != 0 for i in range(self.num_layers)] if listed is None else [*map(bool, listed)]

    # ---- windows

    @cached_property
    def window(self) -> int:
        """The tokens of a window, or of a chunk; 0: no layer has one."""
        if self.name in tables.CHUNKED and self.keys.get("attention.sliding_window") != 0:
            return self.keys.count("attention.chunk_size", tables.CHUNKED[self.name])
        size = tables.WINDOWS[self.name].size if self.name in tables.WINDOWS else 0
        if self.name == "exaone4" and self.num_layers == tables.EXAONE4_LAYERS:
            size = tables.EXAONE4_WINDOW
        return self.keys.count("attention.sliding_window", size, least=0)

    def windowed(self) -> list[bool]:
        """Return which layers have a window."""
        name = "attention.sliding_window_pattern"
        given, rule = self.keys.get(name), tables.WINDOWS.get(self.name)
        if not self.window:
            if isinstance(given, tuple) and any(given) and self.keys.get("attention.sliding_window") is None:
                raise self.keys.error(f"{name} names layers with a window, and attention.sliding_window is missing")
            return [False] * self.num_layers
        if isinstance(given, tuple):
            return [*map(bool, self.keys.sequence(name, self.num_layers) or [])]
        if given is None and (rule is None or rule.every is None):
            raise self.keys.unsupported(
                f"it names a window, but not which layers of a {plain(self.name)} have it: give "
                "the model's config.json, or a policy for each layer"
            )
        every = self.keys.count(name, rule.every if rule else None, least=0)
        whole = 0 if rule and rule.first else every - 1  # of `every` layers, the one that sees everything
        return [not every or i % every != whole for i in range(self.num_layers)]

    def kind_without_rows(self, layer: int) -> str:
        """Return Hugging Face's type of a layer without attention."""
        sizes = self.keys.get("feed_forward_length")
        has_mlp_alone = self.name in tables.MLP_ALONE and isinstance(sizes, tuple) and any(sizes[layer : layer + 1])
        return "mlp" if has_mlp_alone else "linear_attention"

    def kind(self, windowed: bool) -> str:
        """Return Hugging Face's type of a layer with attention."""
        if not windowed:
            return "hybrid" if self.name in tables.HYBRID else "full_attention"
        return "chunked_attention" if self.name in tables.CHUNKED else "sliding_attention"

    # ---- rows, and how keys are rotated; both differ between layers with a window and others

    def sizes(self, windowed: bool) -> dict[str, Any]:
        """Return the sizes of a layer's keys and values, or of the latents that both are made of."""
        keys, hidden = self.keys, self.keys.get("embedding_length")
        heads = next(filter(None, self.num_heads), 1)
        derived = None if hidden is None else keys.count("embedding_length") // heads or None
        head_dim = keys.count("attention.key_length", derived)
        v_head_dim = keys.count("attention.value_length", derived or head_dim)
        rank = keys.count("attention.kv_lora_rank", 0, least=0)
        if windowed:
            head_dim = keys.count("attention.key_length_swa", head_dim)
            v_head_dim = keys.count("attention.value_length_swa", v_head_dim)
            rank = keys.count("attention.kv_lora_rank_swa", rank, least=0)
        rotated = None
        made = ("attention.key_length_mla", "attention.key_length")  # of keys made of latents, and of latents
        if rank and any(keys.get(name) is None for name in made):
            rotated = keys.count("rope.dimension_count", least=0)
        elif rank and head_dim < rank:
            raise keys.error(f"attention.key_length {head_dim} is below attention.kv_lora_rank, {rank}")
        elif rank:
            rotated = head_dim - rank
        return {
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "kv_lora_rank": rank or None,
            "qk_rope_head_dim": rotated,
        }

    def rotation(self, windowed: bool, full: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Return how keys are rotated, from the sizes of layers without a window and of this kind of layers."""
        name = "qk_rope_head_dim" if own["kv_lora_rank"] else "head_dim"
        dim = self.keys.count("rope.dimension_count", full[name], least=0)
        if self.name in tables.WHOLE_HEAD:
            dim = own[name]
        elif windowed:
            dim = self.keys.count("rope.dimension_count_swa", min(dim, own[name]), least=0)
        elif self.name in tables.HALF_OUTSIDE_WINDOWS:
            dim //= 2
        factors = None if windowed and self.name in tables.UNDIVIDED_IN_WINDOWS else self.factors
        if factors is not None and self.name in tables.HALF_OUTSIDE_WINDOWS:  # as many as the widest rotation needs
            factors = factors[: dim // 2]
        halves = self.name in tables.HALVES | tables.HALVES_IN_GRAPH or (
            self.name in tables.HALVES_WITH_SECTIONS and self.has_sections
        )
        return {
            "rotary_dim": dim,
            "stored_as_neighbours": not halves,
            "rope_parameters": self.parameters(windowed),
            "rope_freqs": factors,
        }

    @cached_property
    def factors(self) -> tuple[float, ...] | None:
        """The factors that divide the frequencies of each pair, as of Llama 3."""
        return gguf.read_floats(self.header, FACTORS) if FACTORS in self.header.tensors else None

    @cached_property
    def has_sections(self) -> bool:
        """Whether the elements of a key are divided between the positions of an image."""
        sections = self.keys.get("rope.dimension_sections")
        return isinstance(sections, tuple) and len(sections) > 1 and all(bool(size) for size in sections[:2])

    @cached_property
    def embeds_positions(self) -> bool:
        """Whether positions are added to the embeddings."""
        without_alibi = not self.keys.get("attention.max_alibi_bias")
        return self.name in tables.EMBEDDED_POSITIONS or (self.name in tables.EMBEDDED_OR_ALIBI and without_alibi)

    def rotates(self, layer: int, windowed: bool) -> bool:
        """Return whether a layer's keys are rotated."""
        name, keys = self.name, self.keys
        pattern = keys.sequence("attention.rope_pattern", self.num_layers)
        if name in tables.UNROTATED or (pattern is not None and not pattern[layer]):
            return False
        if name in tables.SWITCHED_BY_FINETUNED and keys.get("rope.scaling.finetuned") is False:
            return False
        if name == "baichuan" and self.num_layers == tables.BAICHUAN_UNROTATED:
            return False
        if name in tables.ROTATED_IN_WINDOWS and self.window:
            first = keys.count("leading_dense_block_count", 0, least=0) if name == "cohere2moe" else 0
            return windowed or layer < first
        if tables.UNROTATED_OF_FOUR.get(name) == layer % 4:
            return name in tables.ONLY_BESIDE_WINDOWS and not self.window
        return True

    def parameters(self, windowed: bool) -> dict[str, Any]:
        """Return the base of the frequencies, and how they are scaled, as transformers names it."""
        name, keys = self.name, self.keys
        if name in tables.PLAIN:
            return {"rope_type": "default", "rope_theta": 10000.0}
        theta = keys.positive("rope.freq_base", 10000.0)
        if windowed:
            theta = keys.positive("rope.freq_base_swa", 10000.0 if name in tables.OWN_BASE else theta)
        if name in tables.SCALED_BY_ALPHA and keys.get("rope.scaling.alpha"):
            dim = self.sizes(False)["head_dim"]
            theta *= keys.positive("rope.scaling.alpha") ** (dim / (dim - 2))
        scaling = keys.text("rope.scaling.type", "linear")
        if LONG_FACTORS in self.header.tensors:
            scaling = "longrope"
        factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear")) or 1.0
        unscaled = windowed and name in tables.UNSCALED_IN_WINDOWS
        if unscaled or scaling == "none" or (scaling == "linear" and factor == 1):
            return {"rope_type": "default", "rope_theta": theta}
        values = {"rope_type": scaling, "rope_theta": theta, "factor": factor}
        return {**values, **self.yarn()} if scaling == "yarn" else values

    def yarn(self) -> dict[str, Any]:
        """Return what YaRN needs beside a factor."""
        keys, mix = self.keys, self.keys.get("rope.scaling.yarn_ext_factor", 1.0)
        if mix == 0:  # pairs keep nothing of their frequency
            return {"rope_type": "linear"}
        return {
            "original_max_position_embeddings": keys.get(
                "rope.scaling.original_context_length", keys.get("context_length")
            ),
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast", tables.BETA_FAST.get(self.name)),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
            "extrapolation_factor": None if mix == -1 else mix,  # -1: not given
        }


# ---- sparse attention: which layers choose rows, or keep rows of several tokens, and the sizes of indexers


def sparse_kinds(keys: Fields, name: str, windowed: Sequence[bool]) -> list[str | None]:
    """Return Hugging Face's type of each layer with sparse attention; None for other layers."""
    count = len(windowed)
    if not _has_indexers(keys, name):
        return [None] * count
    if name == "deepseek4":
        return [_compressed(keys, i, ratio) for i, ratio in enumerate(keys.counts(RATIOS, count, least=0))]
    if name == "minimax-m3":
        dense = keys.count("leading_dense_block_count", 0, least=0)
        return [None if i < dense else CHOOSES_BLOCKS for i in range(count)]
    if name == "qwen4exp":
        return [CHOOSES if ratio else None for ratio in keys.counts(RATIOS, count, 0, least=0)]
    return [None if is_windowed else CHOOSES for is_windowed in windowed]


def _compressed(keys: Fields, layer: int, ratio: int) -> str:
    """Return the type of a layer of DeepSeek V4 that keeps a row of so many tokens; 0: it keeps none."""
    if ratio not in tables.COMPRESSED:
        known = " or ".join(map(str, tables.COMPRESSED))
        raise NotSupportedError(f"{keys.source}, layer {layer}: {RATIOS} {ratio} is not supported, only {known} is")
    return tables.COMPRESSED[ratio]


def indexer_fields(keys: Fields, name: str, count: int) -> dict[str, Any]:
    """Return the fields about a model's indexers: sizes, how keys are rotated, which layers have one of their own."""
    if not _has_indexers(keys, name):
        return {}
    found: dict[str, Any] = {ours: keys.count(theirs) for theirs, ours in tables.INDEXERS[name].items()}
    found["indexer_types"] = ["full" if is_own else "shared" for is_own in _own(keys, name, count)]
    found["index_rotates_neighbours"] = name in tables.INDEX_NEIGHBOURS
    if name == "qwen4exp":  # whose files say for each layer how many tokens an index key stands for
        ratios = {*keys.counts(RATIOS, count, 0, least=0)} - {0}  # 0: the layer has no indexer
        if len(ratios) > 1:
            raise keys.unsupported(f"{RATIOS} has {sorted(ratios)}: all layers with an indexer must have the same")
        found["indexer_compress_ratio"] = ratios.pop() if ratios else None
    return found


def _has_indexers(keys: Fields, name: str) -> bool:
    """Whether a model has indexers; there are models of Hunyuan 4 with and without."""
    return name in tables.INDEXERS and (name != "hy_v4" or bool(keys.get("attention.indexer.top_k")))


def _own(keys: Fields, name: str, count: int) -> list[bool]:
    """Return which layers have an indexer of their own, if they choose; others use the choice of one before them."""
    if name not in tables.SHARED_INDEXERS:
        return [True] * count
    given = keys.get(TYPES)
    if given is None and name in tables.INDEXERS_IN_FILE:
        raise keys.error(f"there is no field {TYPES!r}")
    if given is None and name == "glm-dsa":
        all_own = keys.count("context_length") < tables.GLM52_CONTEXT
        return [all_own or i < 2 or (i - 2) % 4 == 0 for i in range(count)]
    if given is None or isinstance(given, bool):
        return [given is not False] * count
    return [*map(bool, keys.sequence(TYPES, count) or [])]
