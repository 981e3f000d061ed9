"""Sparse attention in a GGUF: which layers choose rows, or keep rows of several tokens, and the sizes of indexers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcache.errors import NotSupportedError
from kvcache.models import gguf_tables as tables
from kvcache.models.fields import Fields
from kvcache.models.reading import MAX_CONTEXT

__all__ = ["kinds_of", "sizes_of"]

CHOOSES, CHOOSES_BLOCKS = "indexed_attention", "minimax_m3_sparse"
TYPES, RATIOS = "attention.indexer.types", "attention.compress_ratios"


def kinds_of(keys: Fields, name: str, windowed: Sequence[bool]) -> list[str | None]:
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


def sizes_of(keys: Fields, name: str, count: int) -> dict[str, Any]:
    """Return the sizes of a model's indexers, and which of its layers have an indexer of their own."""
    if not _has_indexers(keys, name):
        return {}
    found: dict[str, Any] = {ours: keys.count(theirs) for theirs, ours in tables.INDEXERS[name].items()}
    found["indexer_types"] = ["full" if is_own else "shared" for is_own in _own(keys, name, count)]
    found["indexes_neighbours"] = name in tables.INDEX_NEIGHBOURS
    if name == "qwen4exp":
        ratios = {*keys.counts(RATIOS, count, 0, least=0)} - {0}
        if len(ratios) > 1:
            raise NotSupportedError(
                f"{keys.source}: {RATIOS} has {sorted(ratios)}: a key must stand for as many tokens in each layer"
            )
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
        all_own = keys.count("context_length", most=MAX_CONTEXT) < tables.GLM52_CONTEXT
        return [all_own or i < 2 or (i - 2) % 4 == 0 for i in range(count)]
    if given is None or isinstance(given, bool):
        return [given is not False] * count
    return [*map(bool, keys.sequence(TYPES, count) or [])]
