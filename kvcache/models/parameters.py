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
from typing import Any, NamedTuple

from kvcache.errors import KVCacheError, NotSupportedError, plain, shown
from kvcache.models import arithmetic, classes, gguf
from kvcache.models.arithmetic import Counted
from kvcache.models.configuration import read_config, text_parts
from kvcache.models.reading import INDEX, MAX_MODULES, Fields, find_config, is_gguf, read_json

# Tasks of transformers' classes, as its mappings are named; the first that has the model is made.
TASKS = "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"

# Fields with the number of a layer's experts, and with the number of experts that a token goes through.
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip
# Beginnings of names of a GGUF's tensors. Tokens of text do not read encoders of images and sounds, and they read one
# row of each layer's embeddings.
UNREAD_IN_GGUF = "v.", "mm.", "a.", "per_layer_token_embd."
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
    alone: they are divided by the size of an element. Decoders of the commonest types (Llama, Mistral, Qwen, Gemma,
    DeepSeek V3) are counted from their configuration alone. Any other model is made by transformers on torch's device
    "meta", which allocates no weights; all of its parts are counted. Nothing is downloaded, and no code beside
    transformers' own is run.

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
        return _counted(read_json(path), plain(path)).total if number is None else number
    return _counted(source, "config").total


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


class Parts(NamedTuple):
    """The parts of a model's parameters, or of their bytes, that decoding reads in different ways."""

    total: int
    unread: int = 0  # parts for other inputs than text, and input embeddings that are not the output's: a row is read
    experts: int = 0  # the experts among which tokens choose
    share_used: float = 1.0  # the share of the experts that a token goes through
    head: int = 0  # the output, through which only tokens go that are followed by a new one

    @property
    def multiplied(self) -> int:
        """The parameters that a token is multiplied by."""
        return round(self.total - self.unread - self.experts * (1 - self.share_used))


def parts(source: Any, may_make: bool = True) -> Parts:
    """Count what decoding reads of a model's parameters.

    A model with experts is counted three times: as it is, with as many experts as a token goes through, and with twice
    as many. `source` is what `count` takes, except a GGUF. With `may_make` false, raise `NotSupportedError` for a model
    that transformers would have to make; otherwise raise as `count` does.

    >>> parts({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
    ...        "intermediate_size": 96, "vocab_size": 100, "tie_word_embeddings": False})
    Parts(total=82752, unread=6400, experts=0, share_used=1.0, head=6400)
    """
    config, name = _config(source)
    text = _text(config, name)
    if not may_make and arithmetic.count(text) is None:
        raise NotSupportedError(f"{name}: counting needs transformers")
    total = count(source)
    try:
        whole = _counted(text, name)
    except KVCacheError:  # transformers makes only the model that has it as a part
        text = config
        whole = _counted(text, name)
    unread = max(0, total - whole.total) + whole.embedding
    if _with_experts(text, 1) == text:
        return Parts(total, unread, head=whole.head)
    once, twice = (_counted(_with_experts(text, times), name).total for times in (1, 2))
    used = twice - once
    experts = max(used, whole.total - once + used)
    return Parts(total, unread, experts, used / max(1, experts), whole.head)


def has_experts(source: Any) -> bool:
    """Return whether tokens go through some of a model's experts only; `source` is what `count` takes, except a GGUF.

    >>> has_experts({"model_type": "llama"})
    False
    """
    config, _ = _config(source)
    return _with_experts(config, 1) != config


def _config(source: Any) -> tuple[dict[str, Any], str]:
    """Return the content of a configuration, and its name for messages."""
    if isinstance(source, str | os.PathLike):
        path = find_config(source)
        return read_json(path), plain(path)
    return {**source} if isinstance(source, Mapping) else source.to_dict(), "config"


def _text(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the configuration of a model's text decoder, as if the decoder were the whole model."""
    whole, *others = text_parts(config, name)
    if not others:
        return whole
    tied = {key: whole[key] for key in ("tie_word_embeddings",) if whole.get(key) is not None}
    return {**others[-1], **tied}


def _with_experts(config: Mapping[str, Any], times: int, depth: int = 0) -> dict[str, Any]:
    """Return a configuration with `times` as many experts as a token goes through; without experts, as it is."""
    own: dict[str, Any] = {
        name: _with_experts(value, times, depth + 1) if isinstance(value, Mapping) and depth < MAX_DEPTH else value
        for name, value in config.items()
    }
    known = classes.of(config.get("model_type")).defaults.get("num_experts_per_tok")
    used = next((config[name] for name in PER_TOKEN if config.get(name) is not None), known)
    used = max(used, default=None) if isinstance(used, list) and all(type(one) is int for one in used) else used
    if type(used) is not int or used < 1:
        return own
    if known is not None and not any(name in own for name in EXPERTS):  # the type has a default number of experts
        return own | dict.fromkeys(EXPERTS, times * used)
    return own | {name: times * min(used, own[name]) for name in EXPERTS if type(own.get(name)) is int}


def parts_in_gguf(headers: Sequence[gguf.Header], in_bytes: bool) -> Parts:
    """Count what a token reads of a GGUF's files, as `parts`: the elements of tensors, or their bytes."""
    found = [header.metadata for header in headers if "general.architecture" in header.metadata]
    keys = [f"{found[0]['general.architecture']}.expert_{name}count" for name in ("used_", "")] if found else []
    used, number = (found[0].get(key) for key in keys) if keys else (None, None)
    share = used / number if type(used) is int and type(number) is int and 0 < used < number else 1.0
    sizes = [
        (name, (tensor.nbytes if in_bytes else None) or math.prod(tensor.shape))
        for header in headers
        for name, tensor in header.tensors.items()
    ]
    names = {name for name, _ in sizes}
    is_read = {name: not name.startswith(UNREAD_IN_GGUF) for name in names}
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    is_read["token_embd.weight"] = head == "token_embd.weight"
    return Parts(
        sum(size for _, size in sizes),
        sum(size for name, size in sizes if not is_read[name]),
        sum(size for name, size in sizes if "_exps." in name and share < 1),
        share,
        sum(size for name, size in sizes if name == head),
    )


def _counted(config: Any, name: str) -> Counted:
    """Count a model's parameters by arithmetic, or otherwise let transformers make it."""
    found = arithmetic.count(config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)())
    return _made(config, name) if found is None else found


def _made(config: Any, name: str) -> Counted:
    """Let transformers make a model without weights, and count its parameters."""
    try:
        import torch
        import transformers
    except ImportError as error:
        needs = f"counting needs {error.name}, which is not installed; run: pip install transformers, and {CPU_TORCH}"
        raise NotSupportedError(f"{name}: {needs}") from None
    named = config.get("model_type") if isinstance(config, Mapping) else None
    if isinstance(named, str) and named not in transformers.CONFIG_MAPPING:
        raise NotSupportedError(f"{name}: transformers knows no model_type {shown(named)}")
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
            model = made(config)
            return Counted(int(model.num_parameters()), *_embeddings(model))
    except Exception as error:  # a file may say anything
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise NotSupportedError(f"{name}: transformers cannot make the model ({what})") from None


def _embeddings(model: Any) -> tuple[int, int]:
    """Return the parameters of a model's input embedding, or 0 if it is the output's, too; and those of the output."""
    output = model.get_output_embeddings()
    if output is None:
        return 0, 0
    weight = model.get_input_embeddings().weight
    return 0 if output.weight is weight else weight.numel(), output.weight.numel()


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
