"""The layers' shapes of a model's cache, from a Hugging Face folder, a ``config.json`` or a GGUF.

`read` derives a `Shape` from the fields that `kvcache.models.configuration` gathers from either format. `KVCache`'s
`from_config` makes a cache of it. `kvcache.models.kinds` says what each layer sees, its kind, and
`kvcache.models.rotation` how its keys rotate. `own` are the fields of each layer: the model's, except where the layer
has its own. An encoder-decoder's cache has a cross-attention layer, over the encoder's rows, for each decoder layer. An
indexer chooses rows by keys of its own, which lie in layers beside the others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from kvcache.arguments import INT32_MAX
from kvcache.errors import ModelFileError, plain, shown
from kvcache.layer import DTYPES, DType, Layer, once_for_each, why_not
from kvcache.models import guard, reading
from kvcache.models.configuration import read_config
from kvcache.models.kinds import (
    COMPRESSED,
    CROSS,
    HEAVILY,
    INDEXED,
    SLIDING,
    STATELESS,
    XB,
    fields_of_layers,
    layer_types,
    rotates_by_interval,
    shares_of,
)
from kvcache.models.reading import Fields, find_config, find_weights, open_file, read_safetensors_header
from kvcache.models.rotation import Unshiftable, rope
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow
from kvcache.rope import Rope, RopeLike

# Tokens of a prompt that the runner feeds at once; transformers too, if a model has windows.  They are enough for
# efficient matrix products, and few beside the window, which holds them until they are committed.
PREFILL_TOKENS = 512
PACKED = "quantization_config"  # a field with which weights may be packed into other shapes

LAYERED = "num_hidden_layers", "layer_types", "block_configs"  # fields that say how many layers there are
STATE = "its state is not keys and values"
# Types that are refused, and the reason.
REFUSED = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "xlstm"), STATE),
    **dict.fromkeys(("rwkv", "rwkv5", "rwkv6", "rwkv7", "rwkv6qwen2", "rwkv7qwen3"), STATE),
    **dict.fromkeys(("forgetting_transformer", "path_attn"), "it keeps more of a token than keys and values"),
    "reformer": "it sorts what it stores into buckets",
    "blt_local_decoder": "it is made of several decoders",
    **dict.fromkeys(("dory", "inkling2_loop_text"), "it runs some of its layers several times"),
}
# Types whose layers with a window have more KV heads than their other layers (model type: how many times as many).
MORE_KV_HEADS = {"mimo_v2_flash": 2}
# Types whose encoders make one row of so many frames, the tokens that ``max_source_positions`` counts.
SOURCE_FRAMES = {"speech_to_text": 4}
# Types whose attention is twice as wide as the model: it sees the embeddings beside the hidden states.
WIDE_ATTENTION = {"zamba", "zamba2"}
# Types whose heads divide the model's width, whatever a config.json says of their size.
DIVIDED = {"cohere2", "cohere_compass_text", "deepseek_ocr2_text", "recurrent_gemma", "unlimited_ocr_text", "zamba2"}


@dataclass(frozen=True)
class Shape:
    """A model as its cache sees it.

    Attributes
    ----------
    model_type : str
        Hugging Face's type of the text decoder.
    layers : tuple of Layer
        The layers of the cache: heads, sizes, policies, shared rows and rotations are the model's, types the default.
        A `rope` of None: the files do not say.
    num_heads : tuple of int
        The number of query heads of each layer.
    max_seq_len : int or None
        The context length of the model's training.
    chosen : tuple of int or None
        The most rows that a token of each layer reads, for layers that choose rows. None: a layer reads all, or the
        files do not say.
    num_layers : int
        The number of the model's own layers, which are the first of `layers`. Cross-attention, index keys and what is
        pooled have further layers of the cache.
    """

    model_type: str
    layers: tuple[Layer, ...]
    num_heads: tuple[int, ...]
    max_seq_len: int | None
    chosen: tuple[int | None, ...]
    num_layers: int

    @property
    def dtypes(self) -> list[DType]:
        """The element types that can store the rows of every layer."""
        return [dtype for dtype in DTYPES if not self.why_not(dtype)]

    def why_not(self, dtype: DType) -> str | None:
        """Return the reason why an element type cannot store the rows of some layer; None: it can."""
        sizes = dict.fromkeys((layer.head_dim, layer.v_head_dim, layer.value_in_key) for layer in self.layers)
        return next((reason for each in sizes if (reason := why_not(dtype, *each))), None)


def read(source: Any, max_source_len: int | None = None) -> Shape:
    """Read the shape of a model's cache.

    Parameters
    ----------
    source : path, mapping, or configuration of transformers
        A folder with a ``config.json``, that file, or a GGUF; or the content of a ``config.json``, as a mapping or as
        `Fields`.
    max_source_len : int, optional
        The most tokens, or frames, that an encoder is given; by default the files' number. Ignored without an encoder.

    Returns
    -------
    Shape
        The shape. A model with an encoder has the decoder's layers, then a cross-attention layer for each of them. A
        model with sparse attention has, behind all others, a layer of keys alone for each indexer, and layers of what
        is pooled.

    Raises
    ------
    ModelFileError
        If a file is missing, is of another format, or holds impossible values.
    NotSupportedError
        If a layer keeps a state that no policy describes, or no layer keeps keys and values.
    TypeError
        If `source` is none of these.

    Examples
    --------
    >>> shape = read({"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 32,
    ...               "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096})
    >>> shape.layers[1].num_kv_heads, shape.layers[1].head_dim, shape.layers[1].policy
    (8, 128, SlidingWindow(window=4096, num_sink_tokens=0, resume_window=None))
    """
    config = read_config(source)
    model_type = config.text("model_type", "model")
    if model_type in REFUSED:
        raise config.unsupported(f"a {model_type} is not supported, as {REFUSED[model_type]}")
    guard.refuse(config)
    if guard.is_unknown(config) and not any(map(config.get, LAYERED)):
        raise config.error("there is no field 'num_hidden_layers': this is no model's config.json")
    kinds = layer_types(config)
    own = fields_of_layers(config, kinds)
    decoding = _decoding(config, own, kinds, max_source_len)
    indexing = [*chain(*index_layers(config, own, kinds, [layer for _, layer in decoding]))]
    crossing = []
    if config.get("is_encoder_decoder"):
        policy = _cross(config, max_source_len)
        crossing = [_crossing(config, heads, layer, policy) for heads, layer in decoding]
    described = [*decoding, *crossing, *((heads, layer) for heads, layer, _ in indexing)]
    num_heads, layers = zip(*described, strict=True)
    if all(layer.policy is None for layer in layers):
        raise config.unsupported(f"no layer of this {plain(model_type)} has keys and values")
    context = config.get("max_position_embeddings")
    if context is not None:
        context = config.count("max_position_embeddings")
    guard.check(config, kinds)
    chosen = (*map(_chosen_by, own, kinds), *(None for _ in crossing), *(rows for _, _, rows in indexing))
    shape = Shape(model_type, layers, num_heads, context, chosen, len(kinds))
    if isinstance(source, str | os.PathLike) and not any(config.get(name) for name in ("gguf_architecture", PACKED)):
        _check_weights(find_config(source).parent, shape)
    return shape


def _decoding(
    config: Fields, own: Sequence[Fields], kinds: Sequence[str], max_source_len: int | None
) -> list[tuple[int, Layer]]:
    """Return the number of query heads of each layer of the decoder, and the layer."""
    found = []
    rows = rows_of_layers(config, own, kinds, max_source_len)
    for i, share in enumerate(sources_of(config, len(kinds)) or shares_of(config, kinds)):
        num_heads, layer = rows[i]
        found.append((num_heads, replace(layer, share=share, rope=_rotation(own[i], i, kinds[i], layer))))
    return found


def _check_weights(folder: Path, shape: Shape) -> None:
    """Refuse a folder whose weights disagree with its configuration on the size of keys or values."""
    prefix = "model.layers.0.self_attn"  # what most models call layer 0's attention
    first = shape.layers[0]
    dims = {f"{prefix}.k_proj.weight": first.head_dim, f"{prefix}.v_proj.weight": first.v_head_dim}
    for found in find_weights(folder, dims):
        if found is None or not os.path.isfile(found):
            continue
        with open_file(found) as file:
            entries, _ = read_safetensors_header(file)
        for tensor, dim in dims.items():
            made = Fields(entry, "").get("shape") if isinstance(entry := entries.get(tensor), dict) else None
            if not isinstance(made, list) or not made or first.value_in_key:
                continue
            if made[0] != first.num_kv_heads * dim:
                raise ModelFileError(
                    f"{plain(found)}: {tensor} makes {shown(made[0])} elements for a token, and config.json says "
                    f"{first.num_kv_heads} KV heads of {dim}"
                )


# ---- heads, sizes and policy of each layer


def rows_of_layers(
    config: Fields, own: Sequence[Fields], kinds: Sequence[str], max_source_len: int | None = None
) -> list[tuple[int, Layer]]:
    """Return the number of query heads of each layer, and the layer, without its rotation."""
    differs = config.get("model_type") in LATENTS_ALONE
    places = range(len(kinds)) if differs else kinds
    return once_for_each(lambda i: _rows_of(own[i], i, kinds[i], max_source_len), own, kinds, places)


def _rows_of(config: Fields, layer: int, kind: str, max_source_len: int | None) -> tuple[int, Layer]:
    """Return what `rows_of_layers` does for a layer."""
    policy = _policy(config, kind, max_source_len)
    if policy is None:
        return 1, Layer(1, 32, policy=None)  # stores nothing: sizes that suit every element type
    num_heads = _num_heads(config)
    if config.get("kv_lora_rank") and config.get("use_mla") is not False:
        rank = config.count("kv_lora_rank")
        rotated = config.count("qk_rope_head_dim", least=0)
        if config.get("model_type") in LATENTS_ALONE and not rotates_by_interval(config, layer):
            rotated = 0
        _check_width(config, num_heads, rank + rotated)
        return num_heads, Layer(1, rank + rotated, v_head_dim=rank, value_in_key=True, policy=policy)
    head_dim = _head_dim(config, num_heads)
    if config.get("model_type") in KEYS_ALONE:
        _check_width(config, num_heads, head_dim)
        return num_heads, Layer(1, head_dim, v_head_dim=head_dim, value_in_key=True, policy=policy)
    v_head_dim = config.count("v_head_dim", least=0) if config.get("v_head_dim") else head_dim
    num_kv_heads = _num_kv_heads(config, kind, num_heads)
    if num_heads % num_kv_heads:
        raise config.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    _check_width(config, num_heads, max(head_dim, v_head_dim))
    return num_heads, Layer(num_kv_heads, head_dim, v_head_dim=v_head_dim, policy=policy)


def _rotation(config: Fields, layer: int, kind: str, rows: Layer) -> RopeLike:
    """Return the rotation of a layer's keys."""
    if rows.policy is None:
        return None
    if config.get("model_type") in KEYS_ALONE:
        return Unshiftable("they are the values, too, which the attention rotates back")
    first_dim = rows.v_head_dim if rows.value_in_key else 0
    if isinstance(rows.policy, CrossAttention) or first_dim == rows.head_dim:
        return False
    return rope(config, layer, kind, rows.head_dim, first_dim)


def _check_width(config: Fields, num_heads: int, head_dim: int) -> None:
    if num_heads * head_dim > reading.MAX_WIDTH:
        raise config.error(f"{num_heads} heads of {head_dim} elements are more than any model's")


def _num_heads(config: Fields) -> int:
    """Return the number of query heads; JetMoE's experts have them, each as many as there are KV heads."""
    if config.text("model_type", "") == "jetmoe":
        return config.count("num_key_value_heads") * config.count("num_experts_per_tok", most=reading.MAX_HEADS)
    return config.count("num_attention_heads")


def _head_dim(config: Fields, num_heads: int) -> int:
    """Return the elements of a head: the file's, or the model's width divided among the heads."""
    model_type = config.text("model_type", "")
    width = 0
    if config.get("attention_projection_size") is not None:  # Yuan
        width = config.count("attention_projection_size") // num_heads
    elif config.get("hidden_size") is not None:
        width = config.count("hidden_size") * (2 if model_type in WIDE_ATTENTION else 1) // num_heads
    if model_type in DIVIDED and width and config.get("gguf_architecture") is None:
        return width
    return config.count("head_dim", width or None)


def _num_kv_heads(config: Fields, kind: str, num_heads: int) -> int:
    """Return the number of KV heads of a layer."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    if any(config.get(name) is False for name in ("multi_query_attention", "group_query_attention")):
        return num_heads  # ChatGLM and CodeShell name a number of groups nevertheless
    if config.get("attention_head_type") in ("multiquery", "mqa"):
        return 1
    if config.get("attn_type") in ("multiquery_attention", "multihead_attention"):
        return 1 if config.get("attn_type") == "multiquery_attention" else num_heads
    if config.get("n_shared_head") is not None:  # Plamo
        return -(-num_heads // config.count("n_shared_head", most=num_heads))
    more = MORE_KV_HEADS.get(config.text("model_type", ""), 1) if kind in SLIDING else 1
    if config.get("swa_num_key_value_heads") is not None:
        more = 1
    return more * config.count("num_key_value_heads", num_heads, most=reading.MAX_HEADS // more)


def _policy(config: Fields, kind: str, max_source_len: int | None) -> Policy | None:
    """Return the policy of a layer of this kind; None for one that keeps no rows."""
    if kind in STATELESS:
        return None
    if kind in SLIDING or kind in COMPRESSED:
        return SlidingWindow(_window(config))
    if kind == CROSS:
        return _cross(config, max_source_len)
    return ChunkedAttention(config.count("attention_chunk_size")) if kind == "chunked_attention" else FullAttention()


def _window(config: Fields) -> int:
    """Return the tokens that a query of a layer with a window sees, itself included."""
    if config.get("model_type") == "modernbert-decoder" and config.get("local_attention") is not None:
        return config.count("local_attention", least=2) // 2  # it counts both sides
    name = "window_size" if config.get("sliding_window") is None and config.get("window_size") else "sliding_window"
    return config.count(name)


def _crossing(config: Fields, num_heads: int, layer: Layer, policy: CrossAttention) -> tuple[int, Layer]:
    """Return the number of query heads of a cross-attention layer, and the layer.

    `num_heads` and `layer` are of the self-attention beside it. A file may give cross-attention other sizes.
    """
    num_heads = config.count("cross_num_attention_heads", num_heads)
    num_kv_heads = config.count("cross_num_key_value_heads", layer.num_kv_heads)
    layer = replace(layer, policy=policy, rope=False, share=None, num_kv_heads=num_kv_heads)
    if config.get("cross_head_dim") is not None:
        dim = config.count("cross_head_dim")
        layer = replace(layer, head_dim=dim, v_head_dim=dim)
    return num_heads, layer


def _cross(config: Fields, max_source_len: int | None) -> CrossAttention:
    """Return the policy of a cross-attention layer."""
    if max_source_len is None and config.get("max_source_positions") is None:
        raise config.unsupported("it does not say what its encoder is given at most: give max_source_len")
    if max_source_len is not None:
        return CrossAttention(max_source_len)
    frames = SOURCE_FRAMES.get(config.text("model_type", ""), 1)
    return CrossAttention(-(-config.count("max_source_positions") // frames))


# ---- indexers of sparse attention

# Types whose index keys have their rotated elements at the end; others have these first.
ROTATED_LAST = {"hy_v4", "hy_v4_vl_text"}
# Types of which a layer without a rotation stores latents alone.
LATENTS_ALONE = {"mistral_large4_text"}
# Types whose keys are the values, too.
KEYS_ALONE = {"deepseek_v4"}
# Names of fields within ``sparse_attention_config``, as MiniMax M3 has them, and their names elsewhere.
SPARSE = {
    "index_head_dim": "sparse_index_dim",
    "index_n_heads": "sparse_num_index_heads",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_block_size": "sparse_block_size",
}

# Types whose indexers pool the keys of several tokens: the fields with their number, and with how many are chosen.
POOLS = {
    "glm5_next_text": ("index_kpool", "index_topk"),
    "qwen4_exp_text": ("indexer_compress_ratio", "indexer_budget"),
}
# Names of fields in Qwen 4, and their names elsewhere.
OF_QWEN4 = {"index_head_dim": "indexer_head_dim", "index_n_heads": "indexer_n_heads"}


def index_layers(
    config: Fields, own: Sequence[Fields], kinds: Sequence[str], layers: Sequence[Layer]
) -> list[list[tuple[int, Layer, int | None]]]:
    """Return the number of heads of each indexer, and the layer for its keys, which lie beside a layer's rows.

    The list has an entry for each of `layers`, mostly empty. An indexer that pools the keys of several tokens has a
    second layer, of what it pools. Rows that stand for several tokens lie there as well; the third part is how many
    tokens those stand for that a token chooses, if it does.
    """
    found: list[list[tuple[int, Layer, int | None]]] = [[] for _ in layers]
    if {*kinds}.isdisjoint({*INDEXED, *COMPRESSED}):
        return found
    has_indexer = _has_indexer(config, kinds)
    for i, layer in enumerate(layers):
        if kinds[i] in COMPRESSED:
            found[i] = _compressed(own[i], kinds[i], layer)
        elif has_indexer[i]:
            dim = _count(own[i], "index_head_dim")
            rope = _moved(config, _rotation(own[i], i, kinds[i], layer), dim)
            keys = Layer(1, dim, v_head_dim=0, policy=layer.policy, rope=rope)
            made = _pooled(config, keys) if config.get("model_type") in POOLS else [keys]
            num_heads = _count(own[i], "index_n_heads")
            found[i] = [(heads, one, None) for heads, one in zip((num_heads, 1), made, strict=False)]
    return found


def _compressed(config: Fields, kind: str, layer: Layer) -> list[tuple[int, Layer, int | None]]:
    """Return the layers beside one with a window: compressed rows, the keys by which tokens choose some, and inputs.

    A row is made of two products of each token. A row of a layer that chooses is made of four, of two blocks' tokens.
    """
    block, given = COMPRESSED[kind], config.part("compress_rates")
    older = f"compress_rate_{'hca' if kind == HEAVILY else 'csa'}"
    block = config.count(older, block) if given is None else given.count(kind, block)
    times = 1 if kind == HEAVILY else 2
    rows = replace(layer, policy=FullAttention(stride=block))
    num_heads = config.count("num_attention_heads")

    def inputs_of(dim: int) -> Layer:
        policy = SlidingWindow(times * block)
        return replace(layer, head_dim=2 * times * dim, v_head_dim=0, value_in_key=False, policy=policy)

    if kind == HEAVILY:
        return [(num_heads, rows, None), (1, inputs_of(layer.head_dim), None)]
    dim = _count(config, "index_head_dim")
    keys = replace(rows, head_dim=dim, v_head_dim=0, value_in_key=False)
    chosen = block * config.count("index_topk", most=INT32_MAX // block)
    beside = [(num_heads, rows, chosen), (1, inputs_of(layer.head_dim), None)]
    return [*beside, (_count(config, "index_n_heads"), keys, None), (1, inputs_of(dim), None)]


def _pooled(config: Fields, keys: Layer) -> list[Layer]:
    """Return the layers for the keys that an indexer pools, and for what it pools.

    GLM-5.3 Flash pools keys by gates. Qwen 4 rotates a pooled key for the block's first token, so that a token comes
    with its cosines and sines, for which no rotation is known.
    """
    block = config.count(POOLS[config.text("model_type")][0])
    dim = 2 * keys.head_dim
    if config.get("model_type") == "qwen4_exp_text":
        num_rotated = 2 * len(keys.rope.inv_freq) if isinstance(keys.rope, Rope) else keys.head_dim
        dim = keys.head_dim + 2 * num_rotated
    inputs = replace(keys, head_dim=dim, policy=SlidingWindow(block), rope=None if keys.rope else keys.rope)
    return [replace(keys, policy=FullAttention(stride=block)), inputs]


def _chosen_by(config: Fields, kind: str) -> int | None:
    """Return the most rows that a token chooses in a layer; None: it reads all, or the file does not say."""
    if kind not in INDEXED:
        return None
    pools = POOLS.get(config.text("model_type", ""))
    if pools is not None and _has(config, pools[1]):  # and its own block, which is not complete
        return config.count(pools[1]) + config.count(pools[0]) - 1
    names = ("index_topk_blocks", "index_block_size") if kind == XB else ("index_topk",)
    if not all(_has(config, name) for name in names):
        return None
    return math.prod(_count(config, name) for name in names)


def sources_of(config: Fields, count: int) -> list[int | None] | None:
    """Return the layer whose rows each layer reads, or None for its own; None if the file lists none."""
    listed = config.sequence("kv_source_layers", count)
    if listed is None:
        return None
    for i, source in enumerate(listed):
        if type(source) is not int or not 0 <= source <= i or listed[source] != source:
            raise config.error(f"kv_source_layers: layer {i} must read its own rows, or those of a layer before it")
    return [None if source == i else source for i, source in enumerate(listed)]


def _has_indexer(config: Fields, kinds: Sequence[str]) -> list[bool]:
    """Return which layers have an indexer; the others use the choice of the last one before them, or choose nothing."""
    count = len(kinds)
    types = config.sequence("indexer_types", count)
    pattern = config.get("index_topk_pattern")
    if types is None and pattern is not None:
        types = [*pattern] if isinstance(pattern, str) else config.sequence("index_topk_pattern")
    if types is None:
        types = ["full" if _chooses(config, i) else "shared" for i in range(count)]
    if len(types) < count or any(one not in ("full", "shared", "F", "S") for one in types):
        raise config.error("indexer_types must have full or shared for each layer")
    return [kind in INDEXED and one in ("full", "F") for kind, one in zip(kinds, types, strict=False)]


def _chooses(config: Fields, layer: int) -> bool:
    """Whether a layer has an indexer, where the file has no list."""
    if config.get("model_type") in ROTATED_LAST:  # which always have one in four
        return layer == 0 or (layer - 1) % 4 == 0
    every = config.count("index_topk_freq", 1, least=0) or 1
    offset = config.count("index_skip_topk_offset", 2, least=0)
    return max(layer - offset + 1, 0) % every == 0


def _count(config: Fields, name: str) -> int:
    """Return a number of an indexer, wherever the file has it."""
    fields, own = _place(config, name)
    return fields.count(own)


def _has(config: Fields, name: str) -> bool:
    """Whether the file has a number of an indexer."""
    fields, own = _place(config, name)
    return fields.get(own) is not None


def _place(config: Fields, name: str) -> tuple[Fields, str]:
    """Return the fields that have a number of an indexer, and its name there."""
    sparse, listed = config.part("sparse_attention_config"), SPARSE.get(name, name)
    if config.get("model_type") == "qwen4_exp_text":
        return config, OF_QWEN4.get(name, name)
    return (config, name) if sparse is None or sparse.get(listed) is None else (sparse, listed)


def _moved(config: Fields, rope: RopeLike, dim: int) -> RopeLike:
    """Return the rotation of index keys. It is the rotation of the rows, but rotates other elements."""
    if not isinstance(rope, Rope):
        return rope
    num_rotated = 2 * len(rope.inv_freq)
    if num_rotated > dim:
        raise config.error(f"index_head_dim {dim} is less than the {num_rotated} elements that are rotated")
    first_dim = dim - num_rotated if config.get("model_type") in ROTATED_LAST else 0
    interleaved = config.get("index_rotates_neighbours", rope.interleaved)  # a GGUF's reader knows
    return replace(rope, first_dim=first_dim, interleaved=interleaved)
