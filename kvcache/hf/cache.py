"""`HFCache`: a `KVCache` behind the interface of transformers' caches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.generation.utils import ALL_CACHE_NAMES

from kvcache import KVCache, eviction
from kvcache.arguments import INT32_MAX, INT64_MAX, integer
from kvcache.errors import NotSupportedError
from kvcache.hf.compressing import SharedLayer
from kvcache.hf.decode import Decoder
from kvcache.hf.indexing import IndexKeys
from kvcache.hf.layers import Layer
from kvcache.hf.making import Maker
from kvcache.hf.models import REPLACED, install
from kvcache.hf.padding import check_rows
from kvcache.hf.passes import Passes, indices_of
from kvcache.hf.policies import (
    BY_ONE_TOKEN,
    SHAPE,
    block_size_for,
    block_size_of_rows,
    both_ways,
    check_policies,
    describe,
    describe_selection,
    index_layers_of,
    layers_of,
    parts_of,
    ropes_of,
    rotation_by_length,
)
from kvcache.hf.pooling import PooledKeys
from kvcache.hf.prompts import Prompt, Prompts, check_prefix, check_tokens, placeholders_of, prompts_of
from kvcache.hf.recurrent import KEYS, ROWS, Recurrent
from kvcache.hf.state import SaveableBatch, stored_in
from kvcache.hf.turns import Turns
from kvcache.layer import DTypeLike, Transform, count, override
from kvcache.policy import Policy
from kvcache.prefix.cache import MOST_BLOCK_SIZE, PrefixCache
from kvcache.selecting import with_sketches
from kvcache.spelling import spelt
from kvcache.state import SavedState
from kvcache.system import readable

CACHE = "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"  # the argument's name, from 5.24 on the first


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
        `CrossAttention`, or the cache of `prefix` has other layers, or `prefix` no `state_bytes` for recurrent ones.
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
    ) -> None:
        own = {"k_dtype": k_dtype, "v_dtype": v_dtype}
        types = {name: given for name, given in own.items() if given is not None}
        block_size = block_size_for([layer.policy for layer in layers_of(config)] if policy is None else policy)
        made = self.make_kv_cache(config, dtype or "f16", policy, transform, select, block_size=block_size, **types)
        if not self._holds_source:
            check_policies(made.layers)
        decoder, parts, _ = parts_of(config)
        is_recurrent = any(isinstance(part.own, LinearAttentionLayer) for part in parts)
        self.goes_on_by_one_token = is_recurrent and decoder.model_type in BY_ONE_TOKEN
        self.follows_from_later = bool(both_ways(decoder) or rotation_by_length(decoder))  # a row does, from tokens
        self._config, self._prefix = config, prefix
        has_readers = any(part.policy is None and not isinstance(part.own, LinearAttentionLayer) for part in parts)
        # Whether it must know where the model's calls begin and end.
        self.follows_calls = has_readers or is_recurrent or prefix is not None
        if prefix is None:
            self._cache, turns = made, Turns()
        else:
            fields: dict[str, str | None] = dict.fromkeys((*SHAPE, *(() if select is None else ("sketch",))))
            for name, given in (("dtype", dtype), ("transform", transform)):
                fields |= {} if given is None else {f"k_{name}": name, f"v_{name}": name}
            check_prefix(prefix, decoder, is_recurrent, made, {**fields, **{name: name for name in types}})
            self._cache, turns = prefix.cache, Turns.of(prefix.cache)
        self._placeholders = placeholders_of(config)
        self._follows_config = policy is None  # whether a layer's window is the model's
        num_rows = sum(part.policy is not None for part in parts)
        self._passes = Passes(self._cache, turns, has_readers, select, num_rows, config)
        self._decoder = Decoder(self._cache, torch.get_default_dtype())  # until the model brings some rows
        self._forget_text()
        layers = Maker(self._passes, self._decoder, self._follows_config).layers(parts)
        Cache.__init__(self, layers=layers)  # a cache for MiniMax has another base, which takes no layers
        self._recurrent = Recurrent(layers)
        if decoder.model_type in REPLACED or any(layer.value_in_key for layer in made.layers):
            install(type(decoder))
        self.is_linear = [isinstance(part.own, LinearAttentionLayer) and part.policy is None for part in parts]

    @staticmethod
    def make_kv_cache(
        config: PreTrainedConfig,
        dtype: DTypeLike = "f16",
        policy: Policy | Sequence[Policy] | None = None,
        transform: Transform | None = None,
        select: int | None = None,
        *,
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
        arguments = {"max_sequences": None, **arguments}
        stored: dict[str, Any] = {"dtype": dtype, "k_transform": transform, "v_transform": transform}
        chosen = {} if policy is None else {"policy": policy}
        layers, limits = override(layers_of(config), {"max_seq_len": None, **stored, **chosen, **arguments})
        index_layers = index_layers_of(config, layers)
        if select is not None:
            select = integer(select, "select", 1, INT32_MAX)
            if index_layers:
                raise NotSupportedError(
                    f"select={select}: a {type(config).__name__} chooses rows by an indexer: leave select out"
                )
            text = config.get_text_config(decoder=True)
            layers = with_sketches(layers, select, getattr(text, "max_position_embeddings", None))
        limits["block_size"] = block_size or block_size_of_rows(index_layers)
        return KVCache([*layers, *index_layers], **limits)

    @classmethod
    def _made_for(
        cls,
        config: PreTrainedConfig,
        policy: Any,
        prefix: PrefixCache | None,
        select: int | None,
        states: Sequence[SavedState],
    ) -> Self:
        if prefix is not None:  # whose types need not be the file's: then restoring says what differs
            return cls(config, policy=policy, prefix=prefix, select=select)
        return cls(config, policy=policy, select=select, **stored_in(states[0]))

    @property
    def _parts(self) -> list[HFCache]:
        return [self]

    def _forget_text(self) -> None:
        # What `generate` told about each sequence: its tokens, padding included, or a digest of an encoder's rows.
        self.text: torch.Tensor | None = None
        self.has_moved_rows = False  # since `generate` told them
        self.next_positions: torch.Tensor | None = None  # of what `generate` makes, [axes, batch, 1]; None: usual ones
        self.ahead: torch.Tensor | None = None  # by how much the text's positions are ahead, behind images, [batch, 1]
        self.follows_from_others = False  # whether rows follow from images or the like as well

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """The policy of each layer of attention."""
        return tuple(layer.policy for layer in self._cache.layers[: self._passes.num_rows])

    @property
    def recurrent(self) -> Recurrent:
        """The recurrent layers."""
        return self._recurrent

    def check_batch_size(self, batch_size: int) -> None:
        """End a pass that failed; raise ValueError if the cache holds more or fewer rows."""
        self._passes.end()
        self._passes.check_batch_size(batch_size)

    # ---- the interface of transformers' caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values of a layer; return the keys and values for the model's attention."""
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if not isinstance(layer, Layer) or isinstance(layer, IndexKeys):
            raise self._not_as_configured(layer_idx, "keys and values")
        if self.goes_on_by_one_token and key_states.shape[2] > 1 and self.get_seq_length():
            raise NotSupportedError(
                "the model goes on from the state of its recurrent layers by single tokens only: feed them one by one,"
                " or reset() the cache, and feed the whole text at once"
            )
        if self._recurrent.layers:
            self._reach(layer_idx, ROWS)
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
        if self._recurrent.layers:
            self._reach(layer_idx, KEYS)
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
        self._reach(layer_idx, state_idx)
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

    def _reach(self, layer_idx: int, part: int) -> None:
        """Note that a pass has come to a part of a layer."""
        if self._recurrent.is_begun_by(layer_idx, part):
            if self.has_lost_state:
                self._begin_anew()
            self._passes.finish()  # if this pass fails before any rows, the last one is not taken for it
            self._checkpoint()
        self._recurrent.reach(layer_idx, part)

    def _begin_anew(self) -> None:
        """Forget the states that a pass which failed has left; raise if tokens before it are lost with them."""
        is_first = self._passes.last is not None and self._passes.last.brings_sequences
        self._passes.end()
        if self._passes.seq_ids and not is_first:
            raise ValueError(
                "a forward pass did not go through all layers, and recurrent layers cannot go back to before it:"
                " reset() the cache, then feed the whole text"
            )
        self.reset()

    def _checkpoint(self) -> None:
        """Let the prefix cache keep the states behind the last pass, if it fed several tokens of the prompts."""
        passes = self._passes
        if passes.prompts is not None and passes.num_last > 1:
            passes.prompts.checkpoint(passes.seq_ids, passes.num_seen, self._recurrent.state_of)

    @property
    def has_lost_state(self) -> bool:
        """Whether some recurrent layers have tokens of a pass that failed in them; ask when none runs."""
        return bool(self._recurrent) and (self._passes.has_dropped or self._recurrent.is_within)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, padding included.

        Tokens of a pass that still runs, or that failed, do not count.
        """
        is_among_rows = self._recurrent.layers and self._recurrent.has_come_to_rows
        return self._passes.num_seen if is_among_rows else self._passes.length

    def finish(self) -> None:
        """Make the last pass part of its sequences, so that the `KVCache` has no open batch, if it is complete."""
        self._passes.finish()

    def check_complete(self) -> None:
        """Raise ValueError if the model has returned from a pass that did not go through every layer."""
        last = self._passes.last
        if last is not None and not last.is_complete:
            raise ValueError(
                f"the model went through {len(last.done)} of {last.num_layers} layers of attention that the config has"
                " which this cache was made from: give HFCache model.config"
            )
        if self._recurrent and self._recurrent.is_within:
            raise ValueError(
                "the model left out recurrent layers that the config has which this cache was made from: give HFCache"
                " model.config"
            )

    def drop_failed(self) -> None:
        """End a pass that failed."""
        last = self._passes.last
        if last is not None and not last.is_complete:
            self._passes.end()

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the end of a first pass."""
        return self._passes.batch_size

    def reset(self) -> None:
        """Forget all tokens."""
        passes = self._passes
        passes.end()
        seq_ids = passes.seq_ids
        try:  # forget first: after an interrupt, no token may count as held whose row is gone
            passes.forget()
            passes.has_dropped = True  # until recurrent layers have forgotten as well
            self._forget_text()
            self._recurrent.reset()
            self._decoder.forget()
            passes.has_dropped = False
        finally:
            for seq_id in seq_ids:
                self._cache.clear(seq_id)

    # ---- eviction by importance

    def note_queries(self, every: int = eviction.EVERY) -> None:
        """Note queries of all tokens that are fed from now on, for `evict`: call this before the prompt.

        Kept are the queries of one token in `every`, and of the last 32, in float16. With 32, they take a 32nd of the
        memory of float16 keys for each query head of a KV head. Only the attention ``"kvcache"`` has queries to note.
        """
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
        passes, keep = self._passes, eviction.check_share(keep)
        passes.end()
        passes.check_evictable()
        if model is not None or input_ids is not None:
            self._check_fed_again(model, input_ids)
        held, kept, ropes = ([*passes.seq_ids], passes.num_seen), [], ropes_of(self._config, self._cache)
        for row, seq_id in enumerate(held[0]):
            again = None if input_ids is None else partial(self._feed_again, row, model, input_ids)
            prompt = eviction.Prompt(self._cache, seq_id, passes.queries, again, ropes)
            kept.append(eviction.choose(prompt, policy, keep))
        passes.end()
        if (passes.seq_ids, passes.num_seen) != held:
            raise RuntimeError("the policy changed the cache that it was asked about: give it copy.deepcopy(cache)")
        passes.keep_positions(kept)

    def _check_fed_again(self, model: Any, input_ids: torch.Tensor | None) -> None:
        """Raise unless a model can be fed these tokens once more."""
        if not isinstance(model, torch.nn.Module) or input_ids is None:
            raise TypeError("give both model, which is fed the prompt once more, and input_ids, its tokens")
        check_tokens(input_ids, "input_ids")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise NotSupportedError(f"a {type(model).__name__} has an encoder: it cannot be fed its prompt once more")
        wanted = len(self._passes.seq_ids), self._passes.num_seen
        if input_ids.ndim != 2 or len(input_ids) != wanted[0] or input_ids.shape[1] > wanted[1]:
            raise ValueError(
                f"input_ids has the shape {tuple(input_ids.shape)}: [batch, tokens] is needed, {wanted[0]} rows of at"
                f" most the {wanted[1]} tokens that were fed"
            )
        for row, offset in enumerate(self._passes.offsets):
            if input_ids.shape[1] <= offset < wanted[1]:
                raise ValueError(
                    f"input_ids has {input_ids.shape[1]} columns, and row {row} begins behind {offset} of padding: give"
                    " the tokens that the model has read"
                )
        if torch.isin(input_ids, torch.tensor([*self._placeholders], dtype=input_ids.dtype)).any():
            raise NotSupportedError("input_ids has tokens that stand for images or sound, which cannot be fed again")

    def _feed_again(
        self, row: int, model: Any, input_ids: torch.Tensor
    ) -> Iterator[tuple[int, eviction.Queries]]:  # fmt: skip
        """Feed the tokens of a row once more, some at a time behind a copy; yield the copy's sequence and queries."""
        offset, seen = self._passes.offsets[row], self._passes.num_seen
        for begin in range(offset, input_ids.shape[1], eviction.AGAIN):
            chunk = input_ids[row : row + 1, begin : begin + eviction.AGAIN]
            again = copy.deepcopy(self)
            again.batch_select_indices([row])
            queries = again._passes.queries = eviction.Queries(every=1, last=0)
            again._passes.prompts = None
            inputs: dict[str, Any] = {"input_ids": chunk, CACHE: again, "use_cache": True}
            if offset:
                inputs["attention_mask"] = (torch.arange(seen + chunk.shape[1]) >= offset)[None].long()
                inputs["position_ids"] = torch.arange(seen - offset, seen - offset + chunk.shape[1])[None]
            try:
                with torch.no_grad():
                    model(**inputs)
                again.check_complete()
                again.finish()
            except BaseException:
                again.reset()  # the traceback keeps the copy
                raise
            yield again._passes.seq_ids[0], queries

    # ---- prompts that begin as earlier ones

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
        if not cache.recurrent:
            return 0
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True, **{CACHE: cache})
        return len(cache.recurrent.state_of(0))

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix cache keeps the states of recurrent layers behind the passes that feed a prompt."""
        return bool(self._recurrent) and self._prefix is not None

    @property
    def branches(self) -> set[int]:
        """The columns of the prompts that were acquired at which other prompts go on otherwise: a state there helps."""
        prompts = self._passes.prompts
        return set() if prompts is None else prompts.branches

    @property
    def takes_prompt(self) -> bool:
        """Whether the next prompt may begin with tokens of the prefix cache: there is one, and no token was fed."""
        return self._prefix is not None and self._passes.last is None and not self._passes.seq_ids

    def tell(self, inputs: Mapping[str, Any], is_part: bool) -> None:
        """Note what a call of the model, or in it a call of its part, is about to feed; `inputs` are its arguments."""
        prompts = self._passes.prompts
        if self._recurrent and not is_part and not self.has_lost_state:  # what is lost ends with its rows
            check_rows(inputs, self._passes.batch_size)
        if prompts is not None:
            tell = prompts.tell_part if is_part else prompts.tell
            tell(self.get_seq_length(), inputs)
        if not is_part:
            self._passes.note_call(True)

    def tell_end(self, has_failed: bool) -> None:
        """Note that a call has ended; if it has failed, only the tokens that the cache holds were fed."""
        self._passes.note_call(False)
        prompts = self._passes.prompts
        if has_failed and prompts is not None:
            prompts.tell_end(self.get_seq_length())

    @property
    def is_acquired(self) -> bool:
        """Whether the cache holds what `acquire` took from the prefix cache, and no token was fed since."""
        passes = self._passes
        return passes.prompts is not None and passes.num_seen == passes.prompts.num_matched and passes.last is None

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
        if self._prefix is None:
            raise ValueError("the cache has no prefix cache: make it by HFCache(config, prefix=prefix)")
        self._passes.end()
        if not self.takes_prompt:
            raise ValueError("the cache holds tokens: release or reset it first")
        rows, num_columns = prompts_of(input_ids, attention_mask, self._placeholders), input_ids.shape[1]
        prompts = Prompts(self._prefix, rows, self._placeholders, attention_mask)
        self._begin_with(prompts, num_columns)
        return self._passes.num_seen

    def _begin_with(self, prompts: Prompts, num_columns: int) -> None:
        """Begin with the beginnings of prompts, as far as `Prompts.acquire` has them before the last column."""
        self._passes.begin_with(prompts, num_columns)
        self._recurrent.reset()
        if not (self._recurrent and self._passes.num_seen):
            return
        try:
            self._recurrent.restore(prompts.states(self._passes.seq_ids))
        except BaseException:
            self.reset()
            raise

    def _go_on_from(self, seq_ids: list[int], seen: int, offsets: list[int], text: torch.Tensor | None) -> None:
        """Take sequences that were restored as the rows of the batch, in which so many columns were seen."""
        passes, self.text = self._passes, text
        passes.seq_ids, passes.num_seen, passes.offsets = seq_ids, seen, offsets
        if self._prefix is None or seen in offsets:  # of a row without a token nothing can be kept
            return
        for seq_id in seq_ids:
            self._prefix.note_inexact(seq_id, 0)  # without a prefix cache, the one that was saved noted no masks
        passes.prompts = Prompts(self._prefix, [Prompt(offset, []) for offset in offsets], self._placeholders)
        passes.prompts.select(range(len(offsets)), 0)  # as the saved cache may have done, which kept nothing behind it

    def is_begun_by(self, text: torch.Tensor, hidden: int) -> bool:
        """Whether a text begins with the prompts that were acquired, if any; `hidden` stands for padding."""
        prompts = self._passes.prompts
        return prompts is None or prompts.begin(text, hidden)

    @property
    def lacks_prompt(self) -> bool:
        """Whether prompts were acquired and not fed to their end."""
        prompts = self._passes.prompts
        return prompts is not None and not prompts.are_fed(self.get_seq_length())

    def begins_behind(self, column: int) -> bool:
        """Whether a prompt that was acquired begins there or behind: another one cannot take its place."""
        prompts = self._passes.prompts
        return prompts is not None and prompts.begins_behind(column)

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
        passes = self._passes
        passes.end()
        prompts = None if self.has_lost_state else passes.prompts
        rows = [] if prompts is None else prompts.tokens_of(tokens)
        try:
            if prompts is not None:
                prompts.release(passes.seq_ids, passes.num_seen, rows, self._recurrent.state_of)
        finally:  # sequences that were released hold nothing more
            self.reset()

    def activate_past_recording(self) -> None:
        """Prepare for assisted decoding, which feeds the whole prompt even if the cache holds its beginning."""
        prompts = self._passes.prompts
        if prompts is not None and self.is_acquired:
            for seq_id in self._passes.seq_ids:
                self._cache.clear(seq_id)
            self._begin_with(prompts, 1)
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `tokens_to_remove` is minus their number.

        Tokens of the last pass can always be removed. Before them, a window can go back as far as its `resume_window`
        keeps rows, else ``RowsGoneError`` is raised, and nothing has changed. Recurrent layers cannot go back:
        ``NotSupportedError`` is raised. Except convolutions, which can go back in the last pass after
        `activate_past_recording`.
        """
        tokens_to_remove = integer(tokens_to_remove, "tokens_to_remove", -INT64_MAX, INT64_MAX)
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        passes = self._passes
        with passes.turns.lock:  # until tokens of the last pass are taken back, no other cache may end it
            if not passes.num_open:
                passes.end()
            before = passes.length
            num_back, seen = min(-tokens_to_remove, passes.num_open), max(0, before + tokens_to_remove)
            stuck: list[int] = []  # sequences whose windows have moved on
            if seen < passes.num_seen:
                begins = zip(passes.seq_ids, passes.offsets, strict=True)
                stuck = [i for i, offset in begins if not self._cache.can_resume(max(0, seen - offset), seq_id=i)]
            if stuck:
                num_back = 0
            else:
                self._recurrent.check_crop(before - seen, seen)
                self._recurrent.crop(before - seen, seen)
            passes.end(num_back)
            lengths = {i: max(0, seen - offset) for i, offset in zip(passes.seq_ids, passes.offsets, strict=True)}
            for seq_id in (*stuck, *lengths):  # first what raises: then none has changed
                self._cache.truncate(lengths[seq_id], seq_id=seq_id)  # also tells a prefix cache what was taken back
            passes.num_seen, passes.offsets = seen, [min(offset, seen) for offset in passes.offsets]
        self.text = None if self.text is None else self.text[:, :seen]
        self.ahead = self.ahead if seen == before else None
        if passes.prompts is not None and seen < before:
            if self.begins_behind(seen):
                passes.prompts = None  # what comes now may have other padding
            else:
                passes.prompts.crop(seen)

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Continue batch index i from the tokens of index ``beam_idx[i]``; no row of keys or values is copied."""
        self._select(beam_idx, "beam_idx")

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the sequences at some batch indices, or at the True places of a mask. Drop the others."""
        self._select(indices, "indices")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times."""
        num_rows = len(self._passes.seq_ids)
        repeats = integer(repeats, "repeats", 0, INT32_MAX)
        self._select(torch.arange(num_rows).repeat_interleave(repeats), f"repeats={repeats}")

    def _select(self, indices: torch.Tensor | Sequence[int], name: str) -> None:
        """Make a batch of the sequences at these indices; nothing has changed where one does not exist."""
        self._passes.end()
        num_rows = len(self._passes.seq_ids)
        if not num_rows:  # transformers' own caches ignore this as well
            return
        batch_indices = indices_of(indices, name, num_rows)
        self._passes.select(batch_indices)
        self.text, self.has_moved_rows = None if self.text is None else self.text[batch_indices], True
        self.ahead = None if self.ahead is None else self.ahead[batch_indices]
        self._recurrent.select(batch_indices)

    def __copy__(self) -> HFCache:
        """Return what `copy.deepcopy` does."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        """Return a cache that continues from the same tokens; it shares their rows, and copies none."""
        passes = self._passes.fork()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._passes, other._decoder = passes, Decoder(self._cache, self._decoder.dtype)
        copy_of = Maker(passes, other._decoder, self._follows_config).copy_of
        other.layers = [
            copy_of(layer) if isinstance(layer, Layer) else copy.deepcopy(layer, memo) for layer in self.layers
        ]
        other._recurrent = Recurrent(other.layers)
        other._recurrent.go_on_as(self._recurrent)
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a cache cannot be pickled: use save() and load(), or where a layer cannot be saved, keep the token ids and"
            " give them to the model again; copy.deepcopy() makes a cache that shares its rows, in this process"
        )

    def __repr__(self) -> str:
        passes = self._passes
        passes.finish()
        held = f"{count(len(passes.seq_ids), 'sequence')} of {count(self.get_seq_length(), 'token')}"
        calls = "{kernel} by the kernels, {dense} with dense tensors, {fallback} by fallback".format(**passes.calls)
        layers = describe(self._cache, passes.seq_ids)
        if passes.num_selected is not None:
            layers += f"; {describe_selection(self._cache, passes.num_selected)}"
            calls += f"; {passes.calls['select']} of the kernels' calls selected rows"
        return f"<HFCache: {held}, {layers}; {readable(self.nbytes)}; layers attended: {calls}>"

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the rows, with their bookkeeping and the rows of copies, and of recurrent states."""
        self._passes.finish()
        return self._cache.nbytes + self._recurrent.nbytes

    def stats(self) -> dict[str, Any]:
        """Return `kvcache.KVCache.stats`, and in ``"calls"`` how many times a layer was attended over by each means.

        With `select`, ``"calls"`` also counts under ``"select"`` the kernels' calls that selected rows.
        """
        self._passes.finish()
        return {**self._cache.stats(), "calls": dict(self._passes.calls)}


KINDS: dict[str, type[Any]] = {}  # classes of `HFCache` for types of models that take no other
