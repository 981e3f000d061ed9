"""`enable` and `disable`: this package's attention and cache for a model's `generate`, in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, Pipeline, PreTrainedConfig

from kvcache.errors import NotSupportedError
from kvcache.hf.cache import HFCache, HFEncoderDecoderCache
from kvcache.hf.dense import NAME, OWN
from kvcache.hf.layers import check_dtype
from kvcache.hf.state import types_of
from kvcache.layer import DTypeLike
from kvcache.warning import warn

PLACE = "_kvcache_enabled"  # the model's attribute that has its `Enabled`


@dataclass(frozen=True)
class Enabled:
    """The arguments of `enable` for a model, and what `disable` restores."""

    arguments: dict[str, Any]  # of the caches that `generate` makes
    attention: dict[str, Any]  # the implementations before, as set_attn_implementation takes them

    def __deepcopy__(self, memo: dict[int, Any]) -> Enabled:
        """Return the same: a copy of the model uses the same prefix cache."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the prefix cache out: a model that was pickled goes on without it."""
        arguments = dict(self.arguments)
        prefix = arguments.pop("prefix", None)
        if prefix is not None:  # from which the cache takes what it is not told
            told = {name: value for name, value in arguments.items() if value is not None}
            arguments = {**types_of(prefix.cache.layers[0]), "prompts": prefix.cache._prompts, **told}
        return Enabled, (arguments, self.attention)


def enable(model: Any, dtype: DTypeLike | None = None, **arguments: Any) -> None:
    """Let a model attend with this package's kernels, and its ``generate`` make an `HFCache` by itself.

    Parameters
    ----------
    model : transformers.PreTrainedModel or transformers.Pipeline
        A model that generates text, a wrapper around one, or a pipeline with one. Called again, it takes the new
        arguments.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4"}, optional
        The type that rows are stored in; by default "f16" or, with `prefix`, the type of its cache.
    **arguments
        Further ones of `HFCache`, or of `HFEncoderDecoderCache` if the model has an encoder.

    Raises
    ------
    TypeError
        If `model` is none of transformers that generates text, or an argument does not exist.
    NotSupportedError
        If the model is not on the CPU, computes in float64, or the cache does not serve it.
    ValueError
        If the cache refuses an argument.

    Notes
    -----
    A warning says if the model takes no attention but its own (BLOOM, Falcon): the cache then only stores its rows.
    A cache that is passed to ``generate``, or named by ``cache_implementation``, wins. Nothing
    of this is saved with the model. `disable` undoes it. Where an error is raised, nothing has changed. Models that
    were made of one configuration object share its attention: make each of ``copy.deepcopy(config)``.

    Examples
    --------
    >>> import torch, transformers, kvcache.hf
    >>> config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    ...     num_attention_heads=2, vocab_size=97, eos_token_id=None)
    >>> model = transformers.AutoModelForCausalLM.from_config(config).eval()
    >>> kvcache.hf.enable(model, dtype="int8")
    >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4).shape
    torch.Size([1, 7])
    """
    target = served(model)
    make_cache(target, {"dtype": dtype, **arguments})  # raises for what cannot be made
    old = getattr(target, PLACE, None)
    attention = implementations(target.config) if old is None else old.attention
    try:
        target.set_attn_implementation(NAME)
    except BaseException:
        target.set_attn_implementation(attention)
        raise
    setattr(target, PLACE, Enabled({"dtype": dtype, **arguments}, attention))
    if not has_kernels(target):
        warn(f"kvcache: a {type(target).__name__} {OWN}")


def disable(model: Any) -> None:
    """Undo `enable`: the model has the attention that it had before, and ``generate`` makes the caches that it made.

    Parameters
    ----------
    model : transformers.PreTrainedModel or transformers.Pipeline
        What was given to `enable`; another model is left as it is.
    """
    target = _find_generating(model)
    old = getattr(target, PLACE, None)
    if old is not None:
        delattr(target, PLACE)
        target.set_attn_implementation(old.attention)


def make_cache(model: Any, arguments: dict[str, Any]) -> HFCache | HFEncoderDecoderCache:
    """Make the cache of a model's kind."""
    kind = HFEncoderDecoderCache if model.config.is_encoder_decoder else HFCache
    cache = kind(model.config, **arguments)
    if arguments_of(model) is not None and not has_kernels(model):  # `enable` has warned of it
        for part in cache._parts:
            part._passes.has_warned = True
    return cache


def has_kernels(model: Any) -> bool:
    """Return whether a model has the attention of this package."""
    return bool(model.config.get_text_config(decoder=True)._attn_implementation == NAME)


def arguments_of(model: Any) -> dict[str, Any] | None:
    """Return the arguments that `enable` was given for a model; None: it was not called."""
    enabled = getattr(model, PLACE, None)
    return None if enabled is None else enabled.arguments


def served(model: Any) -> Any:
    """Return the model of transformers whose `generate` runs; raise if a cache cannot serve it."""
    target = _find_generating(model)
    if target.device.type != "cpu":
        raise NotSupportedError(f"the model is on {target.device}: this cache is for models on the CPU")
    if target.dtype == torch.float64:  # what weights of other types are computed in is not known
        check_dtype(target.dtype, "the model is of type")
    return target


def _find_generating(model: Any) -> Any:
    """Return the model of transformers whose `generate` runs: `model`, or what it wraps or has (PEFT, a pipeline)."""
    if isinstance(model, Pipeline):
        model = model.model
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a model or a pipeline, not its name or config")
    found = next((part for part in model.modules() if isinstance(part, GenerationMixin)), None)
    if found is None:
        raise TypeError(
            f"model is a {type(model).__name__}, which generates no text: give one of AutoModelForCausalLM or its like,"
            " or call set_attn_implementation('kvcache') and pass an HFCache"
        )
    return found


def implementations(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the attention of a configuration and of its parts, as `set_attn_implementation` takes them."""
    parts = ((name, getattr(config, name)) for name in config.sub_configs)
    found = {name: implementations(part) for name, part in parts if part is not None}
    return found if config._attn_implementation is None else {"": config._attn_implementation, **found}
