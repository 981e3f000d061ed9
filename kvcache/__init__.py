"""The KV cache for CPU inference: stores keys and values, decides which tokens stay, attends over them."""

from kvcache.block import Block, Run
from kvcache.cache import Batch, KVCache, Span
from kvcache.config import __version__, get_num_threads, set_num_threads, show_config
from kvcache.errors import (
    CacheBusyError,
    CacheFullError,
    KVCacheError,
    ModelFileError,
    NotSupportedError,
    RowsGoneError,
)
from kvcache.library import get_include, get_library
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, SlidingWindow
from kvcache.rope import Rope
from kvcache.strategy import Adaptive, LongSequencesOnly

__all__ = [
    "Adaptive",
    "Batch",
    "Block",
    "CacheBusyError",
    "CacheFullError",
    "ChunkedAttention",
    "CrossAttention",
    "FullAttention",
    "KVCache",
    "KVCacheError",
    "LongSequencesOnly",
    "ModelFileError",
    "NotSupportedError",
    "Rope",
    "RowsGoneError",
    "Run",
    "SlidingWindow",
    "Span",
    "__version__",
    "get_include",
    "get_library",
    "get_num_threads",
    "set_num_threads",
    "show_config",
]
