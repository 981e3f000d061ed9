"""`HFCache`: a `KVCache` behind the interface of transformers' caches; two of them are an `HFEncoderDecoderCache`.

A pass is a forward pass of the model (`kvcache.hf.passes`); one that was complete ends when something asks for its
tokens (`finish`). A part is what is kept of a layer of the model (`kvcache.hf.policies`). Layers beside others hold,
for example, an indexer's keys; in the `KVCache` they follow the layers of rows. A source is an encoder's rows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache, LinearAttentionLayer

from kvcache import KVCache, eviction
from kvcache.arguments import INT32_MAX, integer, spelt
from kvcache.arrays import Precision
from kvcache.errors import NotSupportedError
from kvcache.hf.batch import Beginnings, TextBatch
from kvcache.hf.choosing import IndexedLatentLayer, IndexedLayer, IndexKeys, Pooled, PooledKeys, SharedLayer
from kvcache.hf.dense import Decoder
from kvcache.hf.evicting import evict
from kvcache.hf.layers import CrossLayer, LatentLayer, Layer, MixedLayer
from kvcache.hf.passes import Passes, Turns
from kvcache.hf.policies import (
    BY_ONE_TOKEN,
    SHAPE,
    Part,
    block_size_for,
    block_size_of_rows,
    both_ways,
    check_config,
    check_model,
    check_policies,
    describe,
    describe_selection,
    find_decoder,
    read_config,
    rotation_by_length,
    stored_layers,
)
from kvcache.hf.prompts import check_prefix, check_prompts, placeholders_of, to_prompts
from kvcache.hf.recurrent import KEYS, ROWS, Recurrent
from kvcache.hf.replacing import REPLACED, install
from kvcache.hf.state import SaveableBatch, stored_in
from kvcache.hf.told import CACHE
from kvcache.layer import DTypeLike, Transform, count
from kvcache.models.configuration import NAMES
from kvcache.policy import CrossAttention, Policy
from kvcache.prefix.cache import MOST_BLOCK_SIZE, PrefixCache
from kvcache.state import ENCODER, RECURRENT, SavedState
from kvcache.system import readable


@spelt
class HFCache(SaveableBatch, Cache):
    """A cache for models of transformers: a sequence for each text of the batch.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4"}, optional
        The type that rows are stored in; by default "f16" or, with `prefix`, the type of its cache.
    policy : policy or list of policies, optional
        The policy of all layers or of each layer of attention; by default from `config`.
    transform : {"hadamard"}, optional
        How keys and values are transformed before they are quantised, as by `kvcache.KVCache`; by default not at all,
        or with `prefix`, as its cache does.
    prefix : PrefixCache, optional
        Where prompts begin that were computed before, on a cache of `make_kv_cache` with the same arguments. `generate`
        then feeds only what follows (`acquire`), and `release` keeps the tokens for prompts to come.
    select : int, optional
        About how many rows a new token of a long text reads for each KV head, as in `kvcache.Batch.attend`. It selects
        rows once each text of the batch has 8192 tokens. Prompts, guesses that the model verifies, and the first two
        layers of attention read all rows, as do layers that can have no sketches. By default all rows are read.
        A warning says if the model's context is too short.
    k_dtype, v_dtype : as `dtype`, optional
        The type of keys, or of values, if not `dtype`.
    prompts : {"stored", "int8"}, optional
        How prompts are attended to: the `precision` of `kvcache.Batch.attend`. "int8" multiplies long prompts in bytes,
        in 0.45 to 0.73 of the time, where heads and processor allow it. By default "stored" or, with `prefix`, as its
        cache was made.

    Raises
    ------
    NotSupportedError
        If the model has an encoder, no layer of attention, or a layer whose state is neither keys and values nor
        recurrent; or if it makes no use of a cache that it is given. With `prefix`, if its recurrent layers go on by
        single tokens only, it has a rotation that follows the length of the text, or its tokens see later ones. With
        `select`, if no layer can have sketches, an indexer chooses the rows, or, in a forward pass, the attention is
        not ``"kvcache"``.
    ValueError
        If `config` does not say how many heads there are, `kvcache.KVCache` refuses an argument, a `policy` is None or
        `CrossAttention`, or the cache of `prefix` has other layers or `prompts`, or `prefix` no `state_bytes` for
        recurrent ones.
    TypeError
        If `config` is not a configuration of transformers.

    Notes
    -----
    The padding before the first token of a row is not stored. Recurrent layers (linear attention, convolutions, state
    spaces) keep transformers' own tensors.
    """

    is_linear: Any = None  # whether each layer has a recurrent state alone; the base derives it in each pass
    _holds_source = False  # whether its rows are an encoder's: a part of HFEncoderDecoderCache

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Self:
        """Make an instance, of a class of its own for a type of model in `KINDS`."""
        if cls is HFCache:
            cls = KINDS.get(getattr(config, "model_type", ""), cls)
        return object.__new__(cls)

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: DTypeLike | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        transform: Transform | None = None,
        prefix: PrefixCache | None = None,
        select: int | None = None,
        *,
        k_dtype: DTypeLike | None = None,
        v_dtype: DTypeLike | None = None,
        prompts: Precision | None = None,
    ) -> None:
        own = {"k_dtype": k_dtype, "v_dtype": v_dtype}
        types: dict[str, Any] = {name: given for name, given in own.items() if given is not None}
        read = read_config(config)
        decoder, parts = read.decoder, read.parts
        layers, limits = stored_layers(read, dtype or "f16", policy, transform, select, types)
        if not self._holds_source:
            check_policies(layers)
        is_recurrent = read.is_recurrent
        self.is_linear = [isinstance(part.own, LinearAttentionLayer) and part.policy is None for part in parts]
        has_readers = len(read.layers) + sum(self.is_linear) < len(parts)
        # Whether it must know where the model's calls begin and end.
        self.follows_calls = has_readers or is_recurrent or prefix is not None
        if prefix is None:
            block_size = block_size_for([layer.policy for layer in layers[: len(read.layers)]])
            self._cache, turns = KVCache(layers, block_size=block_size, **limits), Turns()
            self._cache._prompts = to_prompts(prompts)
        else:
            fields: dict[str, str | None] = dict.fromkeys((*SHAPE, *(() if select is None else ("sketch",))))
            for name, given in (("dtype", dtype), ("transform", transform)):
                fields |= {} if given is None else {f"k_{name}": name, f"v_{name}": name}
            check_prefix(prefix, decoder, is_recurrent, layers, {**fields, **{name: name for name in types}})
            check_prompts(prefix, prompts)
            self._cache, turns = prefix.cache, Turns.of(prefix.cache)
        self._follows_config = policy is None  # whether a layer's window is the model's
        self._passes = Passes(self._cache, turns, has_readers, select, len(read.layers), config)
        own_decoder = Decoder(self._cache, torch.get_default_dtype())  # until the model brings some rows
        made = Maker(self._passes, own_decoder, self._follows_config).layers(parts)
        Cache.__init__(self, layers=made)  # a cache for MiniMax has another base, which takes no layers
        self.texts = TextBatch(self._passes, _recurrent_of(made), own_decoder)  # its sequences, states and tokens
        self.texts.goes_on_by_one_token = is_recurrent and decoder.model_type in BY_ONE_TOKEN
        self.texts.follows_from_later = bool(both_ways(decoder) or rotation_by_length(decoder))
        self.beginnings = Beginnings(self.texts, prefix, placeholders_of(config))  # what comes from a prefix cache
        if decoder.model_type in REPLACED or any(layer.value_in_key for layer in layers):
            install(type(decoder))

    @staticmethod
    def make_kv_cache(
        config: PreTrainedConfig,
        dtype: DTypeLike = "f16",
        policy: Policy | Sequence[Policy] | None = None,
        transform: Transform | None = None,
        select: int | None = None,
        *,
        prompts: Precision | None = None,
        block_size: int | None = None,
        **arguments: Any,
    ) -> KVCache:
        """Make the `KVCache` of a model, for a `kvcache.PrefixCache` and any number of sequences.

        Takes the arguments of `HFCache`, and raises what it raises; and arguments of `kvcache.KVCache`, such as
        `max_bytes` or `capacity`, which limit what is kept. A block is the unit that a prefix cache keeps and drops, of
        at most 1024 tokens: 64 by default, or so many that rows for several tokens fit.
        """
        if block_size is not None:
            block_size = integer(block_size, "block_size", 1, MOST_BLOCK_SIZE)
        prompts = to_prompts(prompts)
        read = read_config(config)
        layers, limits = stored_layers(read, dtype, policy, transform, select, arguments)
        block_size = block_size or block_size_of_rows(layers[len(read.layers) :])
        cache = KVCache(layers, block_size=block_size, **limits)
        cache._prompts = prompts
        return cache

    @staticmethod
    def state_bytes(model: Any) -> int:
        """Return the bytes of the recurrent state of one sequence, for `kvcache.PrefixCache`.

        0 if no layer is recurrent. The model is fed one token, because its configuration does not say it.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}: give the model itself, whose configuration does not say what its"
                " states hold"
            )
        config: Any = model.config
        cache = HFCache(config)
        if not cache.recurrent.layers:
            return 0
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{CACHE: cache})
        return len(cache.recurrent.state_of(0))

    @classmethod
    def _behind_in(cls, config: PreTrainedConfig) -> str:
        return RECURRENT if read_config(config).is_recurrent else ""

    @classmethod
    def _made_for(
        cls,
        config: PreTrainedConfig,
        policy: Any,
        prefix: PrefixCache | None,
        select: int | None,
        prompts: Precision | None,
        states: Sequence[SavedState],
    ) -> Self:
        types = {} if prefix is not None else stored_in(states[0])  # a prefix has types: restoring says what differs
        return cls(config, policy=policy, prefix=prefix, select=select, prompts=prompts, **types)

    @property
    def _parts(self) -> list[HFCache]:
        return [self]

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """The policy of each layer of attention."""
        return self.texts.policy

    @property
    def recurrent(self) -> Recurrent:
        """The recurrent layers."""
        return self.texts.recurrent

    def __copy__(self) -> HFCache:
        """Return what `copy.deepcopy` does."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        """Return a cache that continues from the same tokens; it shares their rows, and copies none."""
        return self._copy_with(self._passes.fork(), memo)

    def _copy_with(self, passes: Passes, memo: dict[int, Any]) -> HFCache:
        """Return a cache whose layers make other passes over the same rows, from copies of their states."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._passes, decoder = passes, Decoder(self._cache, self.texts.decoder.dtype)
        copy_of = Maker(passes, decoder, self._follows_config).copy_of
        other.layers = [
            copy_of(layer) if isinstance(layer, Layer) else copy.deepcopy(layer, memo) for layer in self.layers
        ]
        other.texts = self.texts.copy_with(passes, _recurrent_of(other.layers), decoder)
        other.beginnings = self.beginnings.copy_with(other.texts)
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a cache cannot be pickled: use save() and load(); copy.deepcopy() makes a cache that shares its rows, in"
            " this process"
        )

    def __repr__(self) -> str:
        passes = self._passes
        passes.finish()
        held = f"{count(len(passes.seq_ids), 'sequence')} of {count(self.get_seq_length(), 'token')}"
        calls = "{kernel} by the kernels, {dense} with dense tensors, {fallback} by fallback".format(**passes.calls)
        layers = describe(self._cache, passes.seq_ids)
        if self._cache._prompts != "stored":
            layers += f"; prompts={self._cache._prompts!r}"
        if passes.num_selected is not None:
            layers += f"; {describe_selection(self._cache, passes.num_selected)}"
            calls += f"; {passes.calls['select']} of the kernels' calls selected rows"
        return f"<HFCache: {held}, {layers}; {readable(self.nbytes)}; layers attended: {calls}>"

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the rows, with their bookkeeping and the rows of copies, and of recurrent states."""
        self._passes.finish()
        return self._cache.nbytes + self.recurrent.nbytes

    def stats(self) -> dict[str, Any]:
        """Return `kvcache.KVCache.stats`, and what the layers of this cache hold and did.

        ``"state_bytes"`` are the bytes of the recurrent states of its sequences, with those that are kept for `crop`.
        The states that a prefix cache keeps are in `kvcache.PrefixStats`. ``"calls"`` says how many times a layer was
        attended over by each means. With `select`, it also counts under ``"select"`` the kernels' calls that selected
        rows.
        """
        self._passes.finish()
        calls = dict(self._passes.calls)
        return {**self._cache.stats(), "state_bytes": self.recurrent.nbytes, "calls": calls}

    # ---- what a model's layers bring

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values of a layer; return the keys and values for the model's attention."""
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, Layer) or isinstance(layer, IndexKeys):
            raise self._not_as_configured(layer_idx, "keys and values")
        if self.texts.goes_on_by_one_token and key_states.shape[2] > 1 and self.get_seq_length():
            raise NotSupportedError(
                "the model goes on from the state of its recurrent layers by single tokens only: feed them one by one,"
                " or reset() the cache, and feed the whole text at once"
            )
        if self.texts.recurrent.layers:
            # The pass reaches this layer's rows. That is noted, as a pass that fails leaves recurrent states changed.
            self.texts.reach(layer_idx, ROWS)
        new: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return new

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Take the new tokens' keys of a layer's indexer, ``[batch, tokens, dim]``; return the keys of all tokens."""
        return self.index_keys(layer_idx).update_index(indexer_key_states.unsqueeze(1)).squeeze(1)

    def index_keys(self, layer_idx: int) -> IndexKeys | PooledKeys:
        """Return the keys of a layer's indexer; note that the pass has come to them."""
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        keys: IndexKeys | PooledKeys | None = (
            layer if isinstance(layer, IndexKeys) else getattr(layer, "index_keys", None)
        )
        if keys is None:
            raise self._not_as_configured(layer_idx, "keys of an indexer")
        if self.texts.recurrent.layers:
            self.texts.reach(layer_idx, KEYS)
        return keys

    def shared_layer(self, layer_idx: int) -> SharedLayer:
        """Return a layer whose keys are the values, too."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, SharedLayer):
            raise self._not_as_configured(layer_idx, "keys that are values")
        return layer

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a recurrent layer's convolution; None before the first pass.

        Each pass begins with this.
        """
        self.recurrent_layer(layer_idx, state_idx)
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def recurrent_layer(self, layer_idx: int, state_idx: int) -> LinearAttentionLayer:
        """Return a recurrent layer, to whose state a pass has come."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, LinearAttentionLayer):
            raise self._not_as_configured(layer_idx, "a recurrent state")
        self.texts.reach(layer_idx, state_idx)
        return layer

    def _not_as_configured(self, index: int, holds: str) -> ValueError:
        """Return what to raise for a layer of the model, which holds something, and which the config lacks."""
        if index >= len(self.layers):
            return ValueError(
                f"the model has {index + 1} layers or more, the config that this cache was made from has"
                f" {len(self.layers)}: give HFCache model.config"
            )
        return ValueError(
            f"layer {index} of the model has {holds}, that of the config which this cache was made from has not:"
            " give HFCache model.config"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, padding included.

        Tokens of a pass that still runs, or that failed, do not count.
        """
        texts = self.texts  # asked for in each pass: without recurrent layers, its passes say it
        return texts.length if texts.recurrent.layers else self._passes.length

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the end of a first pass."""
        return self._passes.batch_size

    # ---- what its user asks for

    def reset(self) -> None:
        """Forget all tokens."""
        self.texts.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `tokens_to_remove` is minus their number.

        Tokens of the last pass can always be removed. Before them, a window can go back as far as its `resume_window`
        keeps rows, else ``RowsGoneError`` is raised, and nothing has changed.

        Recurrent layers go back only to where their states are kept: before each pass of several tokens behind others,
        up to four of these, if there is no prefix cache. Otherwise ``NotSupportedError`` is raised, names the nearest
        kept states, and nothing has changed. Convolutions also go back in the last pass after
        `activate_past_recording`. If a pass of several tokens failed within its layers, ``crop(0)`` goes back to before
        it.
        """
        self.texts.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Continue batch index i from the tokens of index ``beam_idx[i]``; no row of keys or values is copied."""
        self.texts.select(beam_idx, "beam_idx")

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the sequences at some batch indices, or at the True places of a mask. Drop the others."""
        self.texts.select(indices, "indices")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times."""
        num_rows = len(self._passes.seq_ids)
        repeats = integer(repeats, "repeats", 0, INT32_MAX)
        self.texts.select(torch.arange(num_rows).repeat_interleave(repeats), f"repeats={repeats}")

    def acquire(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Take the beginning of prompts from the prefix cache. `generate` calls this by itself, with its own prompt.

        If you call the model yourself, call this first. Then feed ``input_ids[:, matched:]`` with the whole mask. If
        there is padding, or the model counts height and width of images (Qwen2-VL), give positions that count from the
        first real token, as `generate` does.

        Parameters
        ----------
        input_ids : torch.Tensor
            The prompts, ``[batch, tokens]``. What follows a token that stands for an image or sound is not matched.
        attention_mask : torch.Tensor, optional
            0 for padding, ``[batch, tokens]``. What follows a hidden token in the middle is not matched.

        Returns
        -------
        int
            The number of columns that need not be fed, the same for all rows: as far as the rows' matches all reach.

        Raises
        ------
        ValueError
            If there is no prefix cache, the cache holds tokens, or a shape is wrong.
        """
        return self.beginnings.acquire(None, input_ids, attention_mask)

    def release(self, tokens: torch.Tensor | None = None) -> None:
        """Give the rows back to the prefix cache, for prompts to come, and forget all tokens.

        Parameters
        ----------
        tokens : torch.Tensor, optional
            All tokens of the batch, ``[batch, tokens]``, with the prompts and their padding, as `generate` returns
            them; those that were not fed are ignored. By default, and of a batch whose rows were reordered (beam
            search), the prompts alone are kept; nothing, if they were not named to `acquire`. Without a prefix cache,
            this is `reset`.

        Raises
        ------
        ValueError
            If there are more or fewer rows, and none were reordered, or a row does not begin with its prompt; nothing
            has changed then.
        """
        self.beginnings.release(tokens)

    def activate_past_recording(self) -> None:
        """Prepare for assisted decoding, which feeds the whole prompt even if the cache holds its beginning."""
        self.beginnings.feed_all()
        super().activate_past_recording()

    def note_queries(self, every: int = eviction.EVERY) -> None:
        """Note queries of all tokens that are fed from now on, for `evict`: call this before the prompt.

        Kept are the queries of one token in `every`, and of the last 32, in float16. With 32, they take a 32nd of the
        memory of float16 keys for each query head of a KV head. Only the attention ``"kvcache"`` has queries to note.
        """
        self._passes.check_user()
        self._passes.end()
        self._passes.queries = eviction.Queries(every)

    def evict(
        self,
        policy: eviction.Policy,
        keep: float = 0.25,
        *,
        model: Any = None,
        input_ids: torch.Tensor | None = None,
    ) -> None:
        """Keep the most important tokens of each text, and give the memory of all others back.

        The first 4 tokens and the last 32 are always kept. The cache loses the others for every later question: do not
        evict before the question is known. Quantised rows lose less, so use them first. Tokens keep their positions.
        Lengths and masks count all tokens, as before. Rows in windows are dropped, too, and recurrent states stay. The
        model then needs the attention ``"kvcache"``.

        Parameters
        ----------
        policy : callable
            `kvcache.eviction.future`, which needs `note_queries`; `kvcache.eviction.kvzip`, which needs `model` and
            `input_ids`; or a function of a `kvcache.eviction.Prompt` that returns how important each token is.
        keep : float, default 0.25
            The share that is kept of the tokens that the cache has of each text, above 0 and at most 1.
        model, input_ids
            The model, and the tokens that it has read, ``[batch, tokens]`` with their padding. Behind padding, the
            model must have been given positions that count from the first real token, as by `generate`.

        Raises
        ------
        NotSupportedError
            If no layer keeps the rows of all tokens, an indexer chooses rows, the policy needs a rotation that is not
            known, or the prompt cannot be fed again: it has images, or the model has an encoder. Also if a layer
            attended with dense tensors in the last pass, for another reason than its mask.
        ValueError
            If `keep` is out of range, `input_ids` cannot be what was fed, or the policy lacks what it needs. Whatever
            the policy or the model raises, no token was dropped.
        RuntimeError
            If the policy has fed the cache or otherwise changed it. No token was dropped.
        """
        evict(self, self._passes, policy, keep, model, input_ids)


class Maker(NamedTuple):
    """Makes layers with these passes and this decoder; `follows_config`: whether a layer's window is the model's."""

    passes: Passes
    decoder: Decoder
    follows_config: bool

    def layers(self, parts: Sequence[Part]) -> list[Any]:
        """Make the layers of a model. In the `KVCache`, layers beside others, as of an indexer's keys, follow all."""
        count_rows = itertools.count().__next__
        beside = self.passes.num_rows
        layers: list[Any] = []
        for part in parts:
            if part.policy is not None:
                layers.append(self._layer(count_rows(), part, beside))
            else:
                layers.append(self._layer(beside) if part.beside else part.own)
            beside += len(part.beside)
        return layers

    def copy_of(self, layer: Layer) -> Layer:
        """Make a layer like another cache's, with a copy of its state if it has a state."""
        made = self._layer(layer.index, layer.part, layer.beside)
        if isinstance(layer, MixedLayer):
            assert isinstance(made, MixedLayer)
            made.copy_state(layer)
        return made

    def _layer(self, index: int, part: Part = Part(), beside: int = 0) -> Layer:  # noqa: B008 - it is a tuple
        """Make the layer that stands for a layer of the `KVCache`, for a part whose other layers begin at `beside`."""
        own = self.passes.layers[index]
        arguments = self.passes, self.decoder
        kind: Callable[..., Any] = CrossLayer if isinstance(own.policy, CrossAttention) else Layer
        if number_of_states := getattr(part.own, "number_of_states", 0):
            kind = partial(MixedLayer, number_of_states)
        elif part.keys_are_values:
            kind = SharedLayer
        elif not own.v_head_dim:
            kind = IndexKeys
        elif own.value_in_key:
            kind = IndexedLatentLayer if part.beside else LatentLayer
        elif part.beside:
            kind = IndexedLayer
        made: Any = kind(*arguments, index, self.follows_config)
        made.part, made.beside = part, beside
        if len(part.beside) == 1:
            made.index_keys = self._layer(beside)
        for i in range(0, len(part.beside) - 1, 2):  # rows for several tokens, and their inputs
            are_keys = not part.beside[i].v_head_dim
            rows = (PooledKeys if are_keys else Pooled)(*arguments, beside + i, self.follows_config)
            setattr(made, "index_keys" if are_keys else "compressed", rows)
        return made  # type: ignore[no-any-return] # each kind makes a Layer


def _recurrent_of(layers: Sequence[Any]) -> Recurrent:
    """Return the recurrent layers among the layers of a cache."""
    return Recurrent(layers, [i for i, layer in enumerate(layers) if isinstance(layer, Layer)])


KINDS: dict[str, type[Any]] = {}  # classes of `HFCache` for types of models that take no other


class Updated(dict[int, bool]):
    """Says for each layer whether it has stored the encoder's rows.

    Models set an entry when they store a layer. `get` ignores the entries and asks the cache, because the models' pass
    may fail after they set one.
    """

    def __init__(self, cache: SourceCache) -> None:
        super().__init__()
        self.cache = cache

    def get(self, index: int, default: Any = None) -> Any:
        """Return whether a layer has stored the encoder's rows."""
        return self.cache.get_seq_length(index) > 0


class SourceCache(HFCache):
    """The part of an `HFEncoderDecoderCache` that holds an encoder's rows."""

    _holds_source = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of the encoder's rows."""
        layer: Any = self.layers[layer_idx]
        return int(layer.get_seq_length())


@spelt
class HFEncoderDecoderCache(SaveableBatch, EncoderDecoderCache):
    """A cache for models of transformers that have an encoder and a decoder: two `HFCache`.

    Parameters
    ----------
    config, dtype, policy, transform, k_dtype, v_dtype, prompts
        The arguments of `HFCache`; the policy is for the decoder's attention over its own tokens.
    max_source_len : int, optional
        The most rows that the encoder makes; by default from `config`.

    Raises
    ------
    NotSupportedError
        As `HFCache` does; or if the model has no encoder.
    ValueError
        As `HFCache` does; or if `config` does not say how long a source may be.
    TypeError
        If `config` is not a configuration of transformers.

    Notes
    -----
    The attention ``"kvcache"`` uses dense tensors for models that add a bias by position to the scores (T5).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: DTypeLike | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        max_source_len: int | None = None,
        transform: Transform | None = None,
        *,
        k_dtype: DTypeLike | None = None,
        v_dtype: DTypeLike | None = None,
        prompts: Precision | None = None,
    ) -> None:
        check_config(config)
        check_model(config)
        if not config.is_encoder_decoder:
            raise NotSupportedError(f"a {type(config).__name__} has no encoder: use HFCache")
        decoder = find_decoder(config)
        if max_source_len is None:
            lengths = (getattr(config, name, None) for name in NAMES["max_source_positions"])
            max_source_len = next((length for length in lengths if length), None)
        if max_source_len is None:
            raise ValueError(
                f"max_source_len=None: a {type(config).__name__} does not say how long a source may be: give the most"
                " tokens of a source to what makes the cache, HFEncoderDecoderCache(config, max_source_len=512),"
                " enable(model, max_source_len=512), or generate's cache_config={'max_source_len': 512}"
            )
        options: dict[str, Any] = {"k_dtype": k_dtype, "v_dtype": v_dtype, "prompts": prompts}
        source = SourceCache(decoder, dtype, CrossAttention(max_source_len), transform, **options)
        super().__init__(HFCache(decoder, dtype, policy, transform, **options), source)
        self.is_updated = Updated(source)

    @classmethod
    def _behind_in(cls, config: PreTrainedConfig) -> str:
        return ENCODER

    @classmethod
    def _made_for(
        cls, config: PreTrainedConfig, policy: Any, prefix: Any, select: Any, prompts: Any, states: Sequence[SavedState]
    ) -> Self:
        if prefix is not None:
            raise NotSupportedError("prefix: rows of a decoder follow from its encoder's as well: leave prefix out")
        if select is not None:
            raise NotSupportedError(f"select={select}: texts behind an encoder are short: leave select out")
        lengths = (layer.policy.max_len for layer in states[1].layers if isinstance(layer.policy, CrossAttention))
        longest = next(lengths, None)
        return cls(config, policy=policy, max_source_len=longest, prompts=prompts, **stored_in(states[0]))

    @property
    def source(self) -> SourceCache:
        """The cache of the encoder's rows."""
        source: Any = self.cross_attention_cache
        return source  # type: ignore[no-any-return] # the base has an attribute for any cache

    @property
    def _parts(self) -> list[Any]:
        return [self.self_attention_cache, self.cross_attention_cache]

    def __copy__(self) -> HFEncoderDecoderCache:
        """Return what `copy.deepcopy` does: two caches of the same parts would feed each other's."""
        return copy.deepcopy(self)

    def check_dynamic_cache(self, method: str) -> None:
        """Do nothing: transformers allows some methods for its own caches only, and these have them too."""
