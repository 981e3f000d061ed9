"""Run a Llama-family model in NumPy through a `KVCache`, for the examples and the command line.

`Llama` is the model, `generate` is the loop over its tokens, and `sample` draws each token. `seconds_without_cache` and
`compare_dtypes` measure. `run` uses them all: it streams a text, and ends with a table on request.
"""

from kvcache.runner.evaluate import (
    Fidelity,
    Report,
    compare_dtypes,
    fidelity,
    mean_loss,
    read_windows,
    seconds_without_cache,
)
from kvcache.runner.generate import (
    FIRST_TOKENS_KEPT,
    POLICIES,
    Options,
    Speed,
    Speeds,
    evict_prompt,
    feed_again,
    generate,
    new_cache,
    sample,
    shift_context,
)
from kvcache.runner.llama import PREFILL_TOKENS, Llama, LlamaConfig, LlamaError
from kvcache.runner.stream import run

__all__ = [
    "FIRST_TOKENS_KEPT",
    "POLICIES",
    "PREFILL_TOKENS",
    "Fidelity",
    "Llama",
    "LlamaConfig",
    "LlamaError",
    "Options",
    "Report",
    "Speed",
    "Speeds",
    "compare_dtypes",
    "evict_prompt",
    "feed_again",
    "fidelity",
    "generate",
    "mean_loss",
    "new_cache",
    "read_windows",
    "run",
    "sample",
    "seconds_without_cache",
    "shift_context",
]
