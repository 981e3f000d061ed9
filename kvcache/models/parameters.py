"""The number of a model's parameters: from its files' headers, by arithmetic, or from the model transformers makes."""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvcache.errors import NotSupportedError, plain, shown
from kvcache.models import arithmetic, gguf
from kvcache.models.fields import find_config, is_gguf, read_json
from kvcache.models.reading import MAX_MODULES

__all__ = ["count", "in_gguf"]

# Tasks of transformers' classes, as its mappings are named; the first that has the model is made.
TASKS = "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"

NOT_OF_SHAPES = "dtype", "torch_dtype", "quantization_config"  # these may be unknown to transformers


def count(source: Any) -> int:
    """Count the parameters of a model.

    A GGUF has them in its header. Decoders of the commonest types (Llama, Mistral, Qwen, Gemma) are counted from their
    configuration alone. Any other model is made by transformers on torch's device "meta", which allocates no weights;
    all of its parts are counted. Nothing is downloaded, and no code beside transformers' own is run.

    Parameters
    ----------
    source : path, mapping, or configuration of transformers
        What `kvcache.models.configuration.read_config` takes.

    Raises
    ------
    ModelFileError
        If a file cannot be read.
    NotSupportedError
        If transformers is needed, and it or torch is not installed, or it cannot make the model, of at most
        `MAX_MODULES`.

    Examples
    --------
    >>> count({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
    ...        "intermediate_size": 96, "vocab_size": 100, "tie_word_embeddings": False})
    82752
    """
    if isinstance(source, str | os.PathLike):
        path = find_config(source)
        if is_gguf(path):
            return in_gguf(gguf.read_header(path))
        return _counted(read_json(path), plain(path))
    return _counted(source, "config")


def in_gguf(header: gguf.Header) -> int:
    """Count the elements of all tensors of a GGUF file."""
    return sum(math.prod(tensor.shape) for tensor in header.tensors.values())


def _counted(config: Any, name: str) -> int:
    number = arithmetic.count(config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)())
    return _made(config, name) if number is None else number


def _made(config: Any, name: str) -> int:
    """Let transformers make a model without weights, and count its parameters."""
    try:
        import torch
        import transformers
    except ImportError as error:
        needs = f"counting needs {error.name}, which is not installed; run: pip install 'kvcache[hf]'"
        raise NotSupportedError(f"{name}: {needs}") from None
    try:
        with _silence(), _limit(), torch.device("meta"):
            if isinstance(config, Mapping):
                fields = {key: value for key, value in config.items() if key not in NOT_OF_SHAPES}
                config = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(fields)
            mappings = (getattr(transformers, f"MODEL_FOR_{task}_MAPPING") for task in TASKS)
            made: Any = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
            if made is None:
                auto: Any = transformers.AutoModel
                made = partial(auto.from_config, trust_remote_code=False)
            return int(made(config).num_parameters())
    except Exception as error:  # a file may say anything
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise NotSupportedError(f"{name}: transformers cannot make the model ({what})") from None


@contextmanager
def _limit() -> Iterator[None]:
    """Raise for a model of too many modules, which would take any time and memory: a file may ask for that."""
    from torch.nn.modules.module import register_module_module_registration_hook as call_for_each

    left, thread = iter(range(MAX_MODULES)), threading.get_ident()

    def note(*_: object) -> None:  # called for the modules of every thread
        if threading.get_ident() == thread and next(left, None) is None:
            raise ValueError(f"it has more than {MAX_MODULES:,} modules")

    hook = call_for_each(note)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what transformers says about fields that it does not know from stderr."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
