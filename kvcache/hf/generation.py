"""Let transformers make caches, tell them what is fed, and hand them the prompts of ``generate``.

``generate`` makes a cache where ``cache_implementation="kvcache"`` asks for one, or for a model that was given to
`kvcache.hf.enable`. It hands its prompt to a cache that may hold the beginning of another text, or have a prefix cache.
Each call of a model tells its cache where it begins and ends, and which tokens it feeds. A cache with a prefix cache
keeps the rows of these tokens alone. A cache whose layers read other layers' rows needs its batch until the call ends.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import configuration_utils

from kvcache.cache import KVCache
from kvcache.hf.cache import HFCache, HFEncoderDecoderCache
from kvcache.hf.dense import NAME
from kvcache.hf.enabling import arguments_of, has_kernels, make_cache
from kvcache.hf.images import SOME, check_sizes, features_behind, images_of
from kvcache.hf.policies import read_config
from kvcache.hf.texts import (
    PieceByPiece,
    begin_anew,
    begin_source,
    begin_text,
    check_given,
    check_longer,
    end_text,
    leave_text,
)
from kvcache.hf.told import (
    CACHE,
    FEATURES,
    NEW_NAME,
    TYPES,
    Images,
    given_cache,
    has_others,
    name_cache,
    widened,
    without_images,
)
from kvcache.prefix import PrefixCache
from kvcache.warning import warn

STATIC = configuration_utils.ALL_STATIC_CACHE_IMPLEMENTATIONS
generate = GenerationMixin.generate
prefill: Any = GenerationMixin._prefill
decode_assisted: Any = GenerationMixin._assisted_decoding
prepare_cache = GenerationMixin._prepare_cache_for_generation
prepare_inputs: Any = GenerationMixin.prepare_inputs_for_generation


@dataclass
class Call:
    """A call of `generate`."""

    model: Any
    given: dict[str, Any]  # its arguments
    made: list[HFCache] = field(default_factory=list)  # the caches with a prefix cache that were made for it
    cache: Any = None  # the cache of its text, if it is one of this package


_noted: WeakSet[Any] = WeakSet()  # models that were warned of
_running: ContextVar[Call | None] = ContextVar("_running", default=None)


def register() -> None:
    """Add ``"kvcache"`` to the implementations that a generation config may name, and that ``generate`` makes.

    transformers has no registry of caches: its list of names and the methods that make and fill a cache are replaced.
    """
    if NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
        names: Any = configuration_utils
        names.ALL_CACHE_IMPLEMENTATIONS += (NAME,)
        kind: Any = GenerationMixin
        kind._prepare_cache_for_generation = _prepare_cache
        kind.prepare_inputs_for_generation = _prepare_inputs
        kind._prefill, kind._assisted_decoding, kind.generate = _prefill, _decode_assisted, _generate


@functools.wraps(prepare_cache)
def _prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Make the cache that a generation config names, with its `cache_config`, or the cache that `enable` asked for."""
    wanted, arguments = generation_config.cache_implementation, generation_config.cache_config or {}
    given, enabled = model_kwargs.get(CACHE), arguments_of(self)
    is_given = given is not None
    if wanted is None and (enabled is not None or has_kernels(self)):
        if arguments and not is_given and not generation_config.is_assistant:
            raise ValueError(
                f"cache_config is given without cache_implementation={NAME!r}: give both, or give the arguments of"
                " the cache to kvcache.hf.enable() alone"
            )
        if enabled is not None:
            wanted, arguments = NAME, enabled
        elif not is_given and generation_config.use_cache is not False:
            _note_other_cache(self)
    elif wanted == NAME and generation_config.is_assistant:  # a draft's config is a copy of the model's
        generation_config.cache_implementation = None  # which transformers refuses beside the cache of the last guesses
    if wanted == NAME and not isinstance(arguments, Mapping):
        raise TypeError(
            f"cache_config={arguments!r}: give the arguments of HFCache as a dict, such as {{'dtype': 'q8_0'}}"
        )
    if generation_config.is_assistant and wanted == NAME:
        arguments = _of_draft(self, arguments)
    if wanted in STATIC and has_kernels(self):
        raise ValueError(
            f"cache_implementation={wanted!r} does not go with the attention {NAME!r}: say"
            f" cache_implementation={NAME!r}, or pass an HFCache as {CACHE}"
        )
    _check_given(self, given)
    if generation_config.use_cache is False:
        _note_no_cache(self, wanted, given)
    running = _running.get()
    is_made = wanted == NAME and not is_given and generation_config.use_cache is not False
    if is_made:
        given = make_cache(self, arguments)
        model_kwargs[CACHE] = given
        if generation_config.is_assistant:
            given.activate_past_recording()  # to take back what was guessed wrong
        if running is not None and isinstance(given, HFCache) and given.beginnings.is_open:
            running.made.append(given)
    if running is not None and isinstance(given, (HFCache, HFEncoderDecoderCache)):
        running.cache = given
    return None if is_made else prepare_cache(self, generation_config, model_kwargs, *args, **kwargs)


def _check_given(model: Any, given: Any) -> None:
    """Raise TypeError if `generate` is given no cache, or the cache of another kind of model."""
    has_encoder = model.config.is_encoder_decoder
    kind = HFEncoderDecoderCache if has_encoder else HFCache
    is_other = isinstance(given, (HFCache, HFEncoderDecoderCache)) and not isinstance(given, kind)
    if is_other or isinstance(given, (KVCache, PrefixCache, bool, str, dict, list, type)):
        named = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        what = f"{named}, and the model has {'an' if has_encoder else 'no'} encoder" if is_other else named
        more = ", prefix=prefix" if isinstance(given, PrefixCache) else ""
        raise TypeError(
            f"the {CACHE} given is {what}: give an {kind.__name__}, made by"
            f" kvcache.hf.{kind.__name__}(model.config{more})"
        )


def _of_draft(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a draft's cache, which may have fewer layers: an early exit is the model's first ones."""
    kept = {name: value for name, value in arguments.items() if name not in ("select", "prefix")}
    if not model.config.is_encoder_decoder and any(isinstance(value, (list, tuple)) for value in kept.values()):
        num_layers = len(read_config(model.config).layers)
        kept = {name: value[:num_layers] if isinstance(value, (list, tuple)) else value for name, value in kept.items()}
    return kept


@functools.wraps(prepare_inputs)
def _prepare_inputs(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Give a model its cache back, without rows, where it drops the cache to feed the whole text once more.

    Models whose rotation changes at some length (Phi-3) drop it there, and transformers would go on with another.
    """
    running = _running.get()
    cache = running.cache if running is not None and running.model is self else None
    is_left_out = not args and kwargs.get("use_cache") is not False and given_cache(kwargs) is None
    if is_left_out and isinstance(cache, HFCache):
        cache.texts.feed_again()
        kwargs |= {CACHE: cache, "next_sequence_length": None}
    return prepare_inputs(self, input_ids, *args, **kwargs)


def _note_other_cache(model: Any) -> None:
    """Warn, once for a model, that `generate` makes a cache of transformers, over which no kernels attend."""
    if model not in _noted:
        _noted.add(model)
        warn(
            f"kvcache: the model's attention is {NAME!r}, but generate makes transformers' own cache, over which the"
            " kernels do not attend: call kvcache.hf.enable(model), or give"
            f" cache_implementation={NAME!r} or an HFCache"
        )


def _note_unused(model: Any, cache: HFCache | None) -> None:
    """Warn of a cache that holds nothing behind a call of `generate`."""
    if cache is not None and not cache.get_seq_length():
        warn(
            f"kvcache: generate has ended, and its cache holds no token: the {type(model).__name__} uses another cache,"
            " or none"
        )


def _note_no_cache(model: Any, wanted: str | None, given: Any) -> None:
    """Raise for a cache given although `use_cache` is False; warn of a cache that the model's own config rules out.

    If `use_cache` is False, the whole text is fed in every step, and a cache would store it each time anew.
    """
    if isinstance(given, (HFCache, HFEncoderDecoderCache)):
        raise ValueError(
            f"use_cache=False, which may come from the {type(model.config).__name__}, feeds the whole text in every"
            f" step: give use_cache=True beside {CACHE}"
        )
    if wanted == NAME and model.generation_config.use_cache is False:
        warn(
            f"kvcache: no cache is made, because the model's generation config says use_cache=False"
            f" ({type(model.config).__name__}): give use_cache=True beside cache_implementation={NAME!r}"
        )


@functools.wraps(prefill)
def _prefill(
    self: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Keep what the cache has in common with the prompts, or take that from its prefix cache; feed the rest."""
    cache, model, running, size = model_kwargs.get(CACHE), self, _running.get(), generation_config.prefill_chunk_size
    is_cut = not isinstance(cache, HFEncoderDecoderCache)  # transformers cuts the source's mask, too
    generation_config, images = _begin(self, input_ids, generation_config, model_kwargs)
    if isinstance(cache, HFCache):
        _acquire(cache, input_ids, images, model_kwargs)
        if images is not None and FEATURES in model_kwargs:
            features = features_behind(self.config, input_ids, model_kwargs[FEATURES], cache.get_seq_length())
            model_kwargs = model_kwargs | {FEATURES: features}
        is_held = running is not None and given_cache(running.given) is cache and not size
        model = PieceByPiece(self, cache.texts, size, is_held)
        # Otherwise pieces end elsewhere, or nowhere.
        is_cut = not (cache.texts.keeps_states or cache.texts.follows_from_later)
    if size and not is_cut:
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = None
    result = prefill(model, input_ids, generation_config, model_kwargs, *args, **kwargs)
    text_cache = _text_cache(cache)
    if text_cache is not None:
        text_cache.texts.check_complete()
    return result


@functools.wraps(decode_assisted)  # `generate` reads there that it takes the input of a draft's encoder
def _decode_assisted(self: Any, input_ids: torch.Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
    """Decode with a draft, which feeds the whole prompt whatever the cache holds."""
    cache, model = kwargs.get(CACHE), self
    own = inspect.signature(decode_assisted).parameters  # beside what the model is given
    model_kwargs = {name: value for name, value in kwargs.items() if name not in own}
    _, images = _begin(self, input_ids, generation_config, model_kwargs, feeds_all=True)
    if isinstance(cache, HFCache):
        _acquire(cache, input_ids, images, model_kwargs)
        if "position_ids" in model_kwargs:
            kwargs["position_ids"] = model_kwargs["position_ids"]
        model = PieceByPiece(self, cache.texts, generation_config.prefill_chunk_size)
    config, early_exit = self.base_model.config, generation_config.assistant_early_exit
    num_layers = getattr(config, "num_hidden_layers", None)
    try:
        return decode_assisted(model, input_ids, *args, generation_config=generation_config, **kwargs)
    finally:
        if early_exit:  # transformers changes the number for a draft, and leaves it so after an error
            config.num_hidden_layers = num_layers


def _acquire(cache: HFCache, input_ids: torch.Tensor, images: Images | None, model_kwargs: dict[str, Any]) -> None:
    """Name the prompts to the prefix cache, if there is one, and take from it what they begin with."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if images is None or not cache.beginnings.is_open or not _has_tokens(input_ids, mask):
        return
    counted = positions.numpy(force=True) if positions is not None and positions.ndim == 3 else None
    has_columns = _has_columns(input_ids, model_kwargs)
    if images.has_names and images.is_causal and (counted is not None or has_columns):
        cache.beginnings.acquire(replace(images, positions=counted), input_ids, mask)
    elif not has_others(model_kwargs) and has_columns:
        cache.acquire(input_ids, mask)


def _begin(
    model: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], feeds_all: bool = False
) -> tuple[Any, Images | None]:
    """Cut the cache to the columns it shares with the prompts and their source, and note these.

    With `feeds_all`, keep nothing but what was acquired. Return the generation config that feeds the rest, and the
    images of the prompts, if these are whole.
    """
    cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
    is_embedded = model_kwargs.get("inputs_embeds") is not None
    if isinstance(cache, HFEncoderDecoderCache):
        begin_source(cache.source.texts, cache.reset, model_kwargs["encoder_outputs"][0], mask)
        mask, is_embedded = model_kwargs.get("decoder_attention_mask"), False
        if mask is None:  # tell transformers that the text is whole, as it finds out of other models' masks
            generation_config = copy.copy(generation_config)
            generation_config._mask_length = input_ids.shape[1]
    text_cache = _text_cache(cache)
    if text_cache is None:
        return generation_config, None
    if is_embedded:
        length = model_kwargs["inputs_embeds"].shape[1]
        if not feeds_all:
            check_longer(text_cache.texts, length, "inputs_embeds", "that cannot be compared with embeddings")
            text_cache.texts.tokens = None
        return generation_config, None
    running, num_beams = _running.get(), max(generation_config.num_beams, generation_config.num_return_sequences)
    images = images_of(model, input_ids, model_kwargs, None if running is None else running.given, num_beams)
    if not _is_whole(input_ids, mask, generation_config):
        check_given(0, images.num_needed)
        if not feeds_all:
            text_cache.texts.tokens = None
        return generation_config, None
    is_told, held = text_cache.texts.tokens is not None, text_cache.get_seq_length()
    if feeds_all and not text_cache.texts.is_acquired:
        begin_anew(text_cache.texts, images.num_needed)
    positions = _given_positions(model, model_kwargs)
    others = has_others(without_images(model_kwargs) if images.has_names else model_kwargs) and text_cache is cache
    begin_text(text_cache.texts, images, mask, positions, others, text_cache.beginnings.are_known)
    goes_on = text_cache.get_seq_length() == held and not text_cache.texts.is_acquired
    if positions is None and (not goes_on or (is_told and images.are_given)):
        _count_positions(model, input_ids, num_beams, model_kwargs)
    _go_on_counting(text_cache, input_ids, model_kwargs, positions is None and not images.are_given)
    return generation_config, images


def _given_positions(model: Any, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the positions that the call of `generate` was given; None: the model counted them itself."""
    running = _running.get()
    name = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
    return None if running is None or running.given.get(name) is None else model_kwargs[name]


def _count_positions(model: Any, input_ids: torch.Tensor, num_beams: int, model_kwargs: dict[str, Any]) -> None:
    """Have a model count the positions of a whole text: it counted them behind a text that the cache held before.

    A model that counts height and width of images (Qwen2-VL) then counted on from the last one. `generate` no longer
    has the sizes of images; its arguments have. They are one for each prompt, and `num_beams` rows are of a prompt.
    """
    running, mask = _running.get(), model_kwargs.get("attention_mask")  # None: ones, as it was before
    if running is None or model_kwargs.get("position_ids") is None:
        return
    given = {name: value for name, value in running.given.items() if isinstance(value, torch.Tensor)}
    given.pop("input_ids", None)
    given["attention_mask"] = (torch.ones_like(input_ids) if mask is None else mask)[::num_beams]
    positions = model._prepare_position_ids_for_generation(input_ids[::num_beams], given)
    model_kwargs["position_ids"] = positions.repeat_interleave(num_beams, positions.ndim - 2)


def _go_on_counting(cache: HFCache, input_ids: torch.Tensor, model_kwargs: dict[str, Any], is_free: bool) -> None:
    """Have a text go on from the image in its own cache, and note how far its positions are ahead.

    A model that counts height and width counts on from the last image that it was shown, also in another cache. If it
    was shown none, it counts as without images. Positions that its user gave, or that were counted with all images of
    the text (`is_free` False), stay.
    """
    positions, mask = (model_kwargs.get(name) for name in ("position_ids", "attention_mask"))
    if positions is None or positions.ndim != 3:
        return
    shown = torch.ones_like(input_ids) if mask is None else mask.long()
    usual = (shown.cumsum(1) - 1).masked_fill(shown == 0, 0)
    seen = cache.get_seq_length()
    known = widened(cache.texts.ahead, seen) if seen and cache.texts.ahead is not None else None
    if is_free and known is not None:
        model_kwargs["position_ids"] = positions = (usual + known[:, -1:]).expand(len(positions), -1, -1)
    ahead = positions[-3:, :, -usual.shape[1] :].amax(0) - usual
    # Copies of the cache share it, so it is replaced, not changed.
    cache.texts.ahead = ahead if known is None else torch.cat([known, ahead[:, seen:]], 1)


def _text_cache(cache: Any) -> HFCache | None:
    """Return the cache, or the part of it, that holds a text's tokens; None if it is of another class."""
    part = cache.self_attention_cache if isinstance(cache, HFEncoderDecoderCache) else cache
    return part if isinstance(part, HFCache) else None


def _is_whole(input_ids: torch.Tensor, mask: torch.Tensor | None, generation_config: Any) -> bool:
    """Whether the prompts have the tokens that a cache holds, too: as many as the mask, which has all of them."""
    num_columns = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    has_columns = input_ids.ndim == 2 and (mask is None or mask.ndim == 2)
    return bool(has_columns and input_ids.numel() and num_columns == input_ids.shape[1])


def _has_tokens(input_ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether each prompt has a token, and a mask, if any, tells of all."""
    return input_ids.ndim == 2 and (mask is None or (mask.shape == input_ids.shape and bool(mask.any(1).all())))


def _has_columns(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> bool:
    """Whether prompts stand at the positions behind their padding."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is None:
        return mask is None or bool(mask.all())
    shown = torch.ones_like(input_ids) if mask is None else mask.long()
    wanted = (shown.cumsum(1) - 1).masked_fill(shown == 0, 0)
    has_columns = positions.ndim in (2, 3) and positions.shape[-1] == wanted.shape[1]
    return has_columns and bool((positions == wanted).all())  # three times, where a model counts height and width


@functools.wraps(generate)
def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate, and give the rows of caches that were made here, and that nobody else has, to their prefix caches."""
    name_cache(kwargs)
    used = given_cache(kwargs)
    held, call = _text_cache(used), object()
    users = {} if held is None else held._passes.users
    try:
        users[call] = threading.get_ident()
        if held is not None:
            held._passes.check_user()
        return _generate_with(self, used, args, kwargs)
    finally:
        users.pop(call, None)  # one instruction: a signal's handler runs before it, within `try`, or behind it


def _generate_with(self: Any, used: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generate with a cache that was given, if any, or with caches that are made for the call."""
    running, outer = Call(self, kwargs), _running.get()
    before = getattr(getattr(_text_cache(used), "texts", None), "tokens", None)
    try:
        _running.set(running)
        check_sizes(kwargs)
        result = generate(self, *args, **kwargs)
        used = getattr(result, CACHE, None) if used is None else used
        text = getattr(result, "sequences", result)
        filled = _text_cache(used)
        if filled is not None and isinstance(text, torch.Tensor):
            end_text(filled.texts, text)
        if not kwargs.get("custom_generate"):
            _note_unused(self, _text_cache(running.cache))
        for cache in running.made:
            if getattr(result, CACHE, None) is not cache:
                tokens: Any = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", ())
                is_known = len(tokens) == cache.batch_size and not kwargs.get("custom_generate")
                cache.release(tokens if is_known else None)
        return result
    except BaseException as error:
        filled = _text_cache(used)
        if filled is not None:
            filled.texts.drop_failed()
            if filled.texts.tokens is not before:
                leave_text(filled.texts, has_failed=True)
        for cache in running.made:
            cache.reset()
        if isinstance(error, StopIteration) and kwargs.get(TYPES) is not None:  # there was no size for an image
            raise ValueError(SOME) from error
        raise
    finally:
        _running.set(outer)


call_model: Any = PreTrainedModel.__call__
# The cache of the call that runs, and the positions that the call was given. A model calls parts that are models, too:
# these are fed what the first call makes.
_called: ContextVar[tuple[HFCache, Any] | None] = ContextVar("_called", default=None)


def register_calls() -> None:
    """Have each model of transformers tell its cache which tokens it is fed.

    The cache itself sees only keys and values. transformers has no hook for the calls of all models: their method is
    replaced.
    """
    if PreTrainedModel.__call__ is call_model:
        kind: Any = PreTrainedModel
        kind.__call__ = _call_model


@functools.wraps(call_model)
def _call_model(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a model, and tell its cache of the call, unless a call around this one did."""
    if CACHE != NEW_NAME and isinstance(kwargs.get(NEW_NAME), (HFCache, HFEncoderDecoderCache)):
        name_cache(kwargs)
    token = None
    for cache in (*args, *kwargs.values()):
        if isinstance(cache, HFCache) and cache.follows_calls:
            token = _begin_call(cache, self, args, kwargs)
            break
    if token is None:
        return call_model(self, *args, **kwargs)
    has_failed = True
    try:
        result = call_model(self, *args, **kwargs)
        has_failed = False
    finally:
        _end_call(cache, token, has_failed)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator] # it has no types
def _begin_call(
    cache: HFCache, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Token[Any] | None:
    """Tell a cache what a call feeds, and return what `_end_call` takes; None: a call around this one has told it.

    If the model has counted positions for its part itself, the cache is told these. In training, rows follow from
    chance as well (dropout): then the cache is told nothing, and keeps no prompts.
    """
    inputs, outer = dict(zip(_names_of(type(model).forward), args, strict=False)) | kwargs, _called.get()
    positions = inputs.get("position_ids")
    if outer is not None and outer[0] is cache:
        if positions is not None and positions is not outer[1] and not model.training:
            cache.beginnings.tell_part(inputs)
        return None
    if model.training and (cache.beginnings.is_open or cache.texts.is_acquired):
        warn("kvcache: the prefix cache keeps nothing of a model in training mode: call model.eval() first")
    cache.beginnings.tell({} if model.training else inputs)
    return _called.set((cache, positions))


@torch.compiler.disable  # type: ignore[untyped-decorator] # it has no types
def _end_call(cache: HFCache, token: Token[Any], has_failed: bool) -> None:
    """End what `_begin_call` began."""
    _called.reset(token)
    cache.beginnings.tell_end(has_failed)


@functools.cache
def _names_of(forward: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments, in order."""
    return [*inspect.signature(forward).parameters][1:]
