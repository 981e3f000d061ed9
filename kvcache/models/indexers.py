"""Indexers of sparse attention: which layers of a model have one, and the layers of a cache for the keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvcache.arguments import INT32_MAX
from kvcache.layer import Layer
from kvcache.models.fields import Fields
from kvcache.models.kinds import COMPRESSED, HEAVILY, INDEXED, XB
from kvcache.models.reading import MAX_HEAD_DIM, MAX_HEADS
from kvcache.policy import FullAttention, SlidingWindow
from kvcache.rope import Rope, RopeLike

__all__ = ["chosen_rows", "index_layers", "sources_of"]

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
) -> list[tuple[int, Layer, int | None]]:
    """Return the number of heads of each indexer, and the layer for its keys, which lie beside a layer's rows.

    An indexer that pools the keys of several tokens has a second layer, of what it pools. Rows that stand for several
    tokens lie there as well; the third part is how many tokens those stand for that a token chooses, if it does.
    """
    found: list[tuple[int, Layer, int | None]] = []
    if {*kinds}.isdisjoint({*INDEXED, *COMPRESSED}):
        return []
    has_indexer = _has_indexer(config, kinds)
    for i, layer in enumerate(layers):
        if kinds[i] in COMPRESSED:
            found += _compressed(own[i], kinds[i], layer)
        elif has_indexer[i]:
            dim = _count(own[i], "index_head_dim", MAX_HEAD_DIM)
            rope = _moved(config, layer.rope, dim)
            keys = Layer(1, dim, v_head_dim=0, policy=layer.policy, rope=rope)
            made = _pooled(config, keys) if config.get("model_type") in POOLS else [keys]
            num_heads = _count(own[i], "index_n_heads", MAX_HEADS)
            found += [(heads, one, None) for heads, one in zip((num_heads, 1), made, strict=False)]
    return found


def _compressed(config: Fields, kind: str, layer: Layer) -> list[tuple[int, Layer, int | None]]:
    """Return the layers beside one with a window: compressed rows, the keys by which tokens choose some, and inputs.

    A row is made of two products of each token. A row of a layer that chooses is made of four, of two blocks' tokens.
    """
    block, given = COMPRESSED[kind], config.part("compress_rates")
    older = f"compress_rate_{'hca' if kind == HEAVILY else 'csa'}"
    block = config.count(older, block, most=INT32_MAX) if given is None else given.count(kind, block, most=INT32_MAX)
    times = 1 if kind == HEAVILY else 2
    rows = replace(layer, policy=FullAttention(stride=block))
    num_heads = config.count("num_attention_heads", most=MAX_HEADS)

    def inputs_of(dim: int) -> Layer:
        policy = SlidingWindow(times * block)
        return replace(layer, head_dim=2 * times * dim, v_head_dim=0, value_in_key=False, policy=policy)

    if kind == HEAVILY:
        return [(num_heads, rows, None), (1, inputs_of(layer.head_dim), None)]
    dim = _count(config, "index_head_dim", MAX_HEAD_DIM)
    keys = replace(rows, head_dim=dim, v_head_dim=0, value_in_key=False)
    chosen = block * config.count("index_topk", most=INT32_MAX // block)
    beside = [(num_heads, rows, chosen), (1, inputs_of(layer.head_dim), None)]
    return [*beside, (_count(config, "index_n_heads", MAX_HEADS), keys, None), (1, inputs_of(dim), None)]


def _pooled(config: Fields, keys: Layer) -> list[Layer]:
    """Return the layers for the keys that an indexer pools, and for what it pools.

    GLM-5.3 Flash pools keys by gates. Qwen 4 rotates a pooled key for the block's first token, so that a token comes
    with its cosines and sines, for which no rotation is known.
    """
    block = config.count(POOLS[config.text("model_type")][0], most=INT32_MAX)
    dim = 2 * keys.head_dim
    if config.get("model_type") == "qwen4_exp_text":
        num_rotated = 2 * len(keys.rope.inv_freq) if isinstance(keys.rope, Rope) else keys.head_dim
        dim = keys.head_dim + 2 * num_rotated
    inputs = replace(keys, head_dim=dim, policy=SlidingWindow(block), rope=None if keys.rope else keys.rope)
    return [replace(keys, policy=FullAttention(stride=block)), inputs]


def chosen_rows(own: Sequence[Fields], kinds: Sequence[str]) -> list[int | None]:
    """Return the most rows that a token chooses in each layer; None: it reads all, or the file does not say."""
    return [_chosen_by(config, kind) for config, kind in zip(own, kinds, strict=True)]


def _chosen_by(config: Fields, kind: str) -> int | None:
    if kind not in INDEXED:
        return None
    pools = POOLS.get(config.text("model_type", ""))
    if pools is not None and _has(config, pools[1]):  # and its own block, which is not complete
        return config.count(pools[1], most=INT32_MAX) + config.count(pools[0], most=INT32_MAX) - 1
    names = ("index_topk_blocks", "index_block_size") if kind == XB else ("index_topk",)
    if not all(_has(config, name) for name in names):
        return None
    return math.prod(_count(config, name, INT32_MAX) for name in names)


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


def _count(config: Fields, name: str, most: int) -> int:
    """Return a number of an indexer, wherever the file has it."""
    sparse = config.part("sparse_attention_config")
    if config.get("model_type") == "qwen4_exp_text":
        return config.count(OF_QWEN4[name], most=most)
    listed = SPARSE.get(name, name)
    if sparse is not None and sparse.get(listed) is not None:
        return sparse.count(listed, most=most)
    return config.count(name, most=most)


def _has(config: Fields, name: str) -> bool:
    """Whether the file has a number of an indexer."""
    sparse = config.part("sparse_attention_config")
    return config.get(name) is not None or (sparse is not None and sparse.get(SPARSE.get(name, name)) is not None)


def _moved(config: Fields, rope: RopeLike, dim: int) -> RopeLike:
    """Return the rotation of index keys. It is the rotation of the rows, but rotates other elements."""
    if not isinstance(rope, Rope):
        return rope
    num_rotated = 2 * len(rope.inv_freq)
    if num_rotated > dim:
        raise config.error(f"index_head_dim {dim} is less than the {num_rotated} elements that are rotated")
    first_dim = dim - num_rotated if config.get("model_type") in ROTATED_LAST else 0
    interleaved = config.get("indexes_neighbours", rope.interleaved)  # a GGUF's reader knows
    return replace(rope, first_dim=first_dim, interleaved=interleaved)
