"""Check the arguments of functions: numbers, names of files, and names of arguments that there are not.

Many libraries have other names for the same thing, and an error says what it is called here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, SupportsFloat, TypeVar, cast

import numpy as np

from kvcache._core import INT32_MAX, INT64_MAX, MAX_THREADS, integer, integers
from kvcache.errors import shown

__all__ = [
    "INT32_MAX", "INT64_MAX", "MAX_THREADS", "check_names", "check_path", "integer", "integers", "refusal", "spelt",
    "to_float",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def to_float(value: object, name: str) -> float:
    """Return a number as a float.

    Raise a ``TypeError`` that says `name` if it is not a number, and a ``ValueError`` if it is too large for a float.
    """
    try:
        if isinstance(value, bool | np.bool_ | str | bytes | bytearray):
            raise TypeError
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError):
        raise TypeError(f"{name}={shown(value)}: a number is needed, not {type(value).__name__}") from None
    except OverflowError:
        raise ValueError(f"{name}={shown(value)}: is beyond the range of floats, about 1.8e308") from None


def check_path(path: object, name: str = "path", what: str = "file") -> None:
    """Raise ``TypeError`` or ``ValueError`` unless `path` names a file. A number would be an open file's."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{name}={shown(path)}: the name of a {what} is needed, as a str or a Path")
    text = os.fsencode(path)
    if not text or b"\0" in text:
        reason = f"a null byte is in no name of a {what}" if text else f"it names no {what}"
        raise ValueError(f"{name}={shown(path)}: {reason}")


# ---- names of arguments

# Names of one thing, each line with a name of ours. A constructor has at most one name of a line.
SYNONYMS = tuple(
    frozenset(line.split())
    for line in (
        "num_layers num_transformer_layers "
        "num_hidden_layers n_layers n_layer n_hidden_layers num_decoder_layers decoder_layers block_count "
        "decoder_num_hidden_layers layers n_text_layer",
        "num_kv_heads kv_n_heads num_attention_groups num_key_value_heads_per_layer "
        "num_key_value_heads n_kv_heads n_head_kv n_kv_head n_heads_kv num_kv_head num_heads_kv kv_heads "
        "head_count_kv num_local_kv_heads multi_query_group_num num_query_groups num_query_groups_list "
        "decoder_num_key_value_heads num_decoder_key_value_heads num_multi_query_heads num_kv_attention_heads "
        "num_attention_heads_kv n_local_heads",
        "head_dim hidden_size_per_head "
        "head_size d_head dim_head dim_per_head attention_head_dim attention_head_size kv_channels d_kv k_dim "
        "k_head_dim key_length qk_head_dim size_per_head",
        "v_head_dim v_dim value_length value_head_dim v_head_size",
        "max_seq_len model_max_length "
        "max_len max_source_len max_length max_context max_context_len max_context_length context_length "
        "context_size context ctx_len n_ctx max_tokens max_cache_len max_model_len max_sequence_length max_seq_length "
        "max_position_embeddings max_target_positions max_source_positions max_text_positions "
        "max_decoder_position_embeddings max_encoder_position_embeddings max_speech_positions n_positions seq_length "
        "seq_len n_text_ctx n_audio_ctx",
        "max_sequences max_batch_size batch_size max_batch n_seq_max num_sequences n_seqs max_num_seqs max_seqs",
        "max_bytes max_memory memory_limit max_nbytes max_size size_limit",
        "block_size page_size block_tokens tokens_per_block num_tokens_per_block kv_block_size",
        "num_threads n_threads threads nthreads max_threads",
        "dtype cache_dtype kv_cache_dtype kv_dtype cache_type data_type torch_dtype",
        "k_dtype key_dtype k_type type_k cache_type_k dtype_k",
        "v_dtype value_dtype v_type type_v cache_type_v dtype_v",
        "window sliding_window window_size sliding_window_size attention_window attention_window_size window_length "
        "max_window",
        "num_sink_tokens num_sinks n_sink n_sinks sinks sink_tokens sink_size attention_sinks attention_sink_size "
        "num_sink",
        "attention_chunk_size chunk_size chunk chunk_length",
        "inv_freq freqs frequencies inverse_frequencies",
        "rope rotary rope_parameters rope_scaling",
        "threshold min_tokens min_length",
        "path folder directory dir cache_dir root",
        "url host uri address",
        "ttl expire expiry expires",
        "fingerprint model model_name model_id",
        "store storage backend",
        "prompts precision",
    )
)
BASES = ("rope_theta", "theta", "base", "rope_base", "rope_freq_base")
HELD = {"dtype", "k_dtype", "v_dtype", "transform", "k_transform", "v_transform"}  # by the files that `load` reads
# What to give for a thing for which a constructor has no argument of its own, by the argument that takes it.
INSTEAD = {
    "window": ("policy", "policy=SlidingWindow(...)"),
    "num_sink_tokens": ("policy", "policy=SlidingWindow(..., num_sink_tokens=...)"),
    "max_bytes": (
        "prefix",
        "prefix=PrefixCache(HFCache.make_kv_cache(config, max_bytes=...), fingerprint=...), or a window as policy",
    ),
    "attention_chunk_size": ("policy", "policy=ChunkedAttention(...)"),
    "inv_freq": ("rope", "rope=Rope(...)"),
    **dict.fromkeys(BASES, ("rope", "rope=Rope(...)")),
    **dict.fromkeys(
        ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads"),
        ("num_kv_heads", "num_kv_heads: the query's heads are told by what is attended with"),
    ),
}


def refusal(name: str, what: str, known: Iterable[str]) -> str:
    """Return the sentence for an argument `name` that `what`, whose arguments are `known`, does not have."""
    from difflib import get_close_matches  # not loaded by `import kvcache`

    names = sorted(each for each in known if not each.startswith("_"))
    said = f"{name} is no argument of {what}"
    group = next((group for group in SYNONYMS if name in group), frozenset({name}))
    if ours := group.intersection(names):
        return f"{said}: it is called {min(ours)} here"
    for each in sorted(group & INSTEAD.keys()):
        where, instead = INSTEAD[each]
        if where in names:
            return f"{said}: give {instead}"
    if name in BASES and "inv_freq" in names:
        return f"{said}: give inv_freq, the radians per position of each pair"
    if what.endswith("load") and not HELD.isdisjoint(group):
        return f"{said}: the file holds it, leave {name} out"
    if close := get_close_matches(name, names, n=1, cutoff=0.7):
        return f"{said}: did you mean {close[0]}?"
    return f"{said}: it takes {', '.join(names) or 'none'}"


def check_names(what: str, more: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method refuse keyword arguments that it does not have, and say which argument is missing.

    `what` is the method's name in these errors. `more` are names that its ``**`` takes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        known = frozenset(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]) | frozenset(more)
        needed = code.co_varnames[1 : code.co_argcount - len(function.__defaults__ or ())]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise TypeError(refusal(name, what, known))
            for name in needed[len(args) - 1 :]:
                if name not in kwargs:
                    raise TypeError(f"{what}({', '.join(needed)}) is given no {name}")
            return function(*args, **kwargs)

        return checked

    return decorate


def spelt(kind: type[T]) -> type[T]:
    """Make a class refuse keyword arguments that its constructor does not have, and suggest the right name."""
    kind.__init__ = check_names(kind.__name__)(kind.__init__)  # type: ignore[method-assign]  # it has the same arguments
    return kind
