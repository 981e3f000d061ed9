"""The KV cache for CPU inference: stores keys and values, decides which tokens stay, attends over them."""

from importlib.machinery import PathFinder as _PathFinder

if _PathFinder.find_spec("kvcache._core", __path__) is None:
    # Python found the sources in the current folder before the installed package.
    raise ImportError(
        f"{__path__[0]} holds the sources of kvcache without the compiled module, and hides a kvcache that is "
        f"installed elsewhere. Run `pip install -e .` in {__path__[0].removesuffix('kvcache')}, or run Python from "
        "another folder."
    )

from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    from kvcache import _core as _core
except ImportError as _error:
    if "per process" not in str(_error) and "subinterpreter" not in str(_error):
        raise
    raise ImportError(
        "kvcache works in one interpreter of a process, as NumPy does, and not in this subinterpreter: use threads, or "
        "processes"
    ) from _error

from kvcache.batch import Batch
from kvcache.block import Block, Run, Span
from kvcache.cache import KVCache
from kvcache.errors import (
    CacheBusyError,
    CacheFullError,
    KVCacheError,
    ModelFileError,
    NotSupportedError,
    RowsGoneError,
    StateFormatError,
)
from kvcache.layer import Layer
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, SlidingWindow
from kvcache.rope import Rope
from kvcache.runtime import (
    __version__,
    get_include,
    get_library,
    get_num_threads,
    get_threading_layer,
    set_num_threads,
    show_config,
)
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
    "Layer",
    "LongSequencesOnly",
    "ModelFileError",
    "NotSupportedError",
    "PrefixCache",
    "PrefixEvent",
    "PrefixStats",
    "Rope",
    "RowsGoneError",
    "Run",
    "SlidingWindow",
    "Span",
    "StateFormatError",
    "__version__",
    "get_include",
    "get_library",
    "get_num_threads",
    "get_threading_layer",
    "set_num_threads",
    "show_config",
]

if _TYPE_CHECKING:
    from kvcache import plot as plot
    from kvcache import state as state
    from kvcache import stores as stores
    from kvcache.prefix import PrefixCache, PrefixEvent, PrefixStats


def __getattr__(name: str) -> object:
    """Import what is loaded when it is first asked for."""
    from importlib import import_module

    if name in ("hf", "plot", "state", "stores"):
        return import_module(f"kvcache.{name}")
    if name in ("PrefixCache", "PrefixEvent", "PrefixStats"):
        return getattr(import_module("kvcache.prefix"), name)
    raise AttributeError(f"module 'kvcache' has no attribute {name!r}")
