"""The number of a model's parameters: from its files' headers, by arithmetic, or from the model transformers makes."""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvcache.errors import KVCacheError, NotSupportedError, plain, shown
from kvcache.models import arithmetic, classes, gguf
from kvcache.models.configuration import read_config
from kvcache.models.fields import INDEX, Fields, find_config, is_gguf, read_json
from kvcache.models.reading import MAX_MODULES

__all__ = ["CPU_TORCH", "Index", "count", "in_gguf", "read_index", "share_read", "share_read_in_gguf"]

# Tasks of transformers' classes, as its mappings are named; the first that has the model is made.
TASKS = "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"

# Fields with the number of a layer's experts, and with the number of experts that a token goes through.
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip
MAX_DEPTH = 3  # of configurations in each other, where experts are looked for

NOT_OF_SHAPES = "dtype", "torch_dtype", "quantization_config"  # these may be unknown to transformers
MOST = 1 << 60  # bytes of weights
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
# How to install PyTorch without the libraries of a GPU, which take gigabytes.
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Index:
    """The sizes in the index of a model's weights: of all of its files, which need not be there."""

    nbytes: int
    num_parameters: int | None  # None: it does not say


def read_index(folder: Path) -> Index | None:
    """Read the sizes in a folder's ``model.safetensors.index.json``; None: there is no such file, or it has no sizes.

    Raise `ModelFileError` if it is no JSON, or a size is no whole number.
    """
    if not os.path.isfile(folder / INDEX):
        return None
    metadata = Fields(read_json(folder / INDEX), plain(folder / INDEX)).part("metadata")
    if metadata is None or metadata.get("total_size") is None:
        return None
    number = None
    if metadata.get("total_parameters") is not None:
        number = metadata.count("total_parameters", most=MOST)
    return Index(metadata.count("total_size", most=MOST), number)


def count(source: Any) -> int:
    """Count the parameters of a model.

    The header of a GGUF has them, and so does an index of weights beside a configuration. An older index has the bytes
    alone: they are divided by the size of an element. Decoders of the commonest types (Llama, Mistral, Qwen, Gemma) are
    counted from their configuration alone. Any other model is made by transformers on torch's device "meta", which
    allocates no weights; all of its parts are counted. Nothing is downloaded, and no code beside transformers' own is
    run.

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
        number = _in_index(path)
        return _counted(read_json(path), plain(path)) if number is None else number
    return _counted(source, "config")


def _in_index(path: Path) -> int | None:
    """Return the parameters that the index beside a configuration counts; None: it says nothing of them."""
    index = read_index(path.parent)
    if index is None:
        return None
    config = read_config(path)
    if config.get("quantization_config"):  # weights may be packed into other shapes
        return None
    itemsize = ITEMSIZES.get(str(config.get("dtype")).removeprefix("torch."))
    return index.nbytes // itemsize if index.num_parameters is None and itemsize else index.num_parameters


def in_gguf(header: gguf.Header) -> int:
    """Count the elements of all tensors of a GGUF file."""
    return sum(math.prod(tensor.shape) for tensor in header.tensors.values())


def share_read(source: Any) -> float | None:
    """Return the share of a model's parameters that are read to decode a token; None if it cannot be counted.

    It is 1, unless tokens go through some of the model's experts only. Then the parameters are counted twice: as they
    are, and with so few experts. `source` is what `count` takes, except a GGUF.

    >>> share_read({"model_type": "llama"})
    1.0
    """
    config = source
    if isinstance(source, str | os.PathLike):
        config = read_json(find_config(source))
    elif not isinstance(source, Mapping):
        config = source.to_dict()
    read = _with_experts_of_a_token(config)
    if read == config:
        return 1.0
    try:
        return count(read) / max(1, count(config))
    except KVCacheError:
        return None


def _with_experts_of_a_token(config: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a configuration with as many experts as a token goes through."""
    own: dict[str, Any] = {
        name: _with_experts_of_a_token(value, depth + 1) if isinstance(value, Mapping) and depth < MAX_DEPTH else value
        for name, value in config.items()
    }
    known = classes.of(config.get("model_type")).defaults.get("num_experts_per_tok")
    used = next((config[name] for name in PER_TOKEN if config.get(name) is not None), known)
    used = max(used, default=None) if isinstance(used, list) and all(type(one) is int for one in used) else used
    if type(used) is not int or used < 1:
        return own
    if known is not None and not any(name in own for name in EXPERTS):  # the type has a default number of experts
        return own | dict.fromkeys(EXPERTS, used)
    return own | {name: min(used, own[name]) for name in EXPERTS if type(own.get(name)) is int}


def share_read_in_gguf(headers: Sequence[gguf.Header]) -> float:
    """Return the share of the elements of a GGUF's files that are read to decode a token, as `share_read`."""
    found = [header.metadata for header in headers if "general.architecture" in header.metadata]
    keys = [f"{found[0]['general.architecture']}.expert_{name}count" for name in ("used_", "")] if found else []
    used, experts = (found[0].get(key) for key in keys) if keys else (None, None)
    if type(used) is not int or type(experts) is not int or not 0 < used < experts:
        return 1.0
    sizes = [(name, math.prod(tensor.shape)) for header in headers for name, tensor in header.tensors.items()]
    read = sum(size * used / experts if "_exps." in name else size for name, size in sizes)
    return read / max(1, sum(size for _, size in sizes))


def _counted(config: Any, name: str) -> int:
    number = arithmetic.count(config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)())
    return _made(config, name) if number is None else number


def _made(config: Any, name: str) -> int:
    """Let transformers make a model without weights, and count its parameters."""
    try:
        import torch
        import transformers
    except ImportError as error:
        run = CPU_TORCH if error.name == "torch" else "pip install transformers"
        needs = f"counting needs {error.name}, which is not installed; run: {run}"
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
