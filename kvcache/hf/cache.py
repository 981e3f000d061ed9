"""`HFCache`: a `KVCache` behind the interface of transformers' caches."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from kvcache import KVCache, NotSupportedError, _core
from kvcache.hf.decode import Decoder
from kvcache.hf.forward_pass import DECODED, UNKNOWN, ForwardPass
from kvcache.hf.layers import CrossLayer, LatentLayer, Layer
from kvcache.hf.padding import count_leading, hidden_ranges, refuse_batch, refuse_padding, shown_columns
from kvcache.hf.policies import SHAPE, CacheLayer, block_size_for, describe, parts_of, shapes_of
from kvcache.hf.prompts import Prompts, check_prefix, placeholders_of
from kvcache.hf.rows import LayerRows, Shape
from kvcache.hf.shared import STALLED, Shared, clear_finally
from kvcache.hf.state import SaveableBatch, stored_in
from kvcache.layer import DType, Transform, count
from kvcache.policy import CrossAttention, Policy
from kvcache.prefix.cache import MOST_BLOCK_SIZE, PrefixCache
from kvcache.state import SavedState
from kvcache.system import readable


class HFCache(SaveableBatch, Cache):
    """A cache for models of transformers: a sequence for each text of the batch.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"}, default "f16"
        The type that rows are stored in; by default, with `prefix`, the type of its cache.
    policy : policy or list of policies, optional
        The policy of all layers or of each layer of attention; by default from `config`.
    transform : {"hadamard"}, optional
        How keys and values are transformed before they are quantised, as by `kvcache.KVCache`; by default not at all,
        or with `prefix`, as its cache does.
    prefix : PrefixCache, optional
        Where prompts begin that were computed before, on a cache of `make_kv_cache` with the same arguments. `generate`
        then feeds only what follows (`acquire`), and `release` keeps the tokens for prompts to come.

    Raises
    ------
    NotSupportedError
        If the model has an encoder, no layer of attention, or a layer whose state is neither keys and values nor that
        of linear attention; or if it makes no use of a cache that it is given. With `prefix`, if the model has layers
        of linear attention, or a rotation that follows the length of the text.
    ValueError
        If `config` does not say how many heads there are, `kvcache.KVCache` refuses an argument, or the cache of
        `prefix` has other layers.
    TypeError
        If `config` is not a configuration of transformers.

    Notes
    -----
    The padding before the first token of a row is not stored. Layers of linear attention keep transformers' own state.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: DType | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        transform: Transform | None = None,
        prefix: PrefixCache | None = None,
    ) -> None:
        block_size = block_size_for(shapes_of(config)[1] if policy is None else policy)
        made = self.make_kv_cache(config, dtype or "f16", policy, transform, block_size=block_size)
        layers: list[Any] = parts_of(config)[1]
        self._prefix = prefix
        if prefix is None:
            self._cache, self._shared = made, Shared()
        else:
            types = ("k_dtype", "v_dtype") if dtype is not None else ()
            transforms = ("k_transform", "v_transform") if transform is not None else ()
            check_prefix(prefix, config.get_text_config(decoder=True), layers, made, (*SHAPE, *types, *transforms))
            self._cache, self._shared = prefix.cache, Shared.of(prefix.cache, prefix.new_sequence)
        self._placeholders = placeholders_of(config)
        self._dtype = torch.get_default_dtype()  # of decoded rows, until the model brings some
        self.follows_config = policy is None  # whether a layer's window is the model's
        self._v_dims = self._cache.v_head_dim
        self._calls = {"kernel": 0, "dense": 0, "fallback": 0}
        self._has_warned = False  # that layers were attended without the kernels
        self._first_layer: int | None = None  # the layer that forward passes begin with
        self._forget()
        with_rows = [i for i, layer in enumerate(layers) if not isinstance(layer, CacheLayer)]
        for index, i in enumerate(with_rows):
            layers[i] = self._make_layer(index)
        super().__init__(layers=layers)

    @staticmethod
    def make_kv_cache(
        config: PreTrainedConfig,
        dtype: DType = "f16",
        policy: Policy | Sequence[Policy] | None = None,
        transform: Transform | None = None,
        *,
        block_size: int = 64,
        **arguments: Any,
    ) -> KVCache:
        """Make the `KVCache` of a model, for a `kvcache.PrefixCache`.

        Parameters
        ----------
        config, dtype, policy, transform
            The arguments of `HFCache`.
        block_size : int, default 64
            The number of tokens in a block, the unit that a prefix cache keeps and drops: at most 1024.
        **arguments
            Further ones of `kvcache.KVCache`, such as `max_bytes` or `capacity`, which limit what is kept.

        Returns
        -------
        KVCache
            A cache for any number of sequences.

        Raises
        ------
        NotSupportedError, ValueError, TypeError
            As `HFCache` does.
        """
        block_size = _core.integer(block_size, "block_size", 1, MOST_BLOCK_SIZE)
        arguments = {"block_size": block_size, "max_sequences": None, **arguments}
        stored: dict[str, Any] = {"dtype": dtype, "k_transform": transform, "v_transform": transform}
        shapes, policies = shapes_of(config)
        return KVCache(policy=policies if policy is None else policy, max_seq_len=None, **shapes, **stored, **arguments)

    @classmethod
    def _made_for(cls, config: PreTrainedConfig, policy: Any, states: Sequence[SavedState]) -> Self:
        dtype, transform = stored_in(states[0])
        return cls(config, dtype, policy, transform)

    @property
    def _parts(self) -> list[HFCache]:
        return [self]

    def _forget(self) -> None:
        self._seq_ids: list[int] = []  # the sequence of each batch index
        self._seen = 0  # tokens of each sequence, padding included: the columns of a mask
        self._offsets: list[int] = []  # the column of each sequence's position 0: its leading padding is not stored
        self._pass: ForwardPass | None = None  # the pass that runs, or ran last
        self._prompts: Prompts | None = None  # what `acquire` was told
        self.text: torch.Tensor | None = None  # tokens of each sequence, padding included, as far as `generate` told
        self.has_moved_rows = False  # since `generate` told them
        self._decoder = Decoder(self._cache)

    def _make_layer(self, index: int) -> Layer:
        if self._cache.value_in_key[index]:
            return LatentLayer(self, index)
        return (CrossLayer if isinstance(self.policy[index], CrossAttention) else Layer)(self, index)

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """The policy of each layer of attention."""
        return self._cache.policy

    @property
    def others(self) -> list[Any]:
        """The layers whose state is transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, Layer)]

    # ---- called by the layers and the attention

    def store(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values ``[batch, heads, tokens, dim]``; return the attention's arguments.

        These are lazy tensors that stand for all rows of the layer. The attention ``"kvcache"`` attends over the rows
        where they lie; for any other attention, the first operation on the tensors decodes them.
        """
        if not k.is_cpu:
            raise NotSupportedError(f"the keys are on {k.device}: this cache is for models on the CPU")
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("the keys require grad: call the model under torch.inference_mode(), or no_grad()")
        this_pass = self._pass_of(layer)
        self._dtype = k.dtype
        rows = LayerRows(layer, this_pass, (k, v), self._shapes(layer, k, v), k.dtype)
        this_pass.pending[layer.index] = rows
        return rows.tensors

    def fetch(self, layer: CrossLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the attention over an encoder from the second pass on."""
        if not self._seq_ids:
            raise RuntimeError("nothing was stored of an encoder: run the decoder with what the encoder made first")
        return LayerRows(layer, None, None, self._source_shapes(layer), self._dtype).tensors

    def attend(
        self, rows: LayerRows, q: torch.Tensor, padding: torch.Tensor | None, options: dict[str, Any]
    ) -> torch.Tensor | None:
        """Attend with the kernels; first store the layer's new rows. None: the kernels do not know this mask."""
        if isinstance(rows.layer, CrossLayer):
            return self._attend_source(rows, rows.layer, q, padding, options)
        this_pass = self._current(rows)
        if not this_pass.is_open:
            self._open(this_pass, rows, padding)
        if not self._chunks_agree(this_pass, rows.layer, padding):
            return None
        hidden = self._hidden(this_pass, padding, this_pass.offsets)
        new = this_pass.pending.pop(rows.layer.index, None)
        new_rows = () if new is None or new.new is None else rows.layer.pack(*new.new)
        return self._run_kernel(this_pass, rows.layer, q, new_rows, hidden, options)

    def make_dense(self, rows: LayerRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's rows as dense tensors, for what is no kernel of ours; store those that are new.

        They are a row for each column of the mask, ``[batch, heads, columns, dim]``.
        """
        self._calls["fallback" if rows.falls_back else "dense"] += 1
        if rows.falls_back:
            self._warn(UNKNOWN)
        if rows.new is None:
            assert isinstance(rows.layer, CrossLayer)
            self._finish_pass()
            return self._decoder.decode_rows(rows.layer.index, self._seq_ids, rows.shapes[0][2], 0, self._dtype)
        with self._shared.changed:  # until the rows are decoded, no other cache may end the pass
            this_pass = self._current(rows)
            this_pass.decoded.add(rows.layer.index)
            if rows.layer.index in this_pass.pending:
                self._put(this_pass, rows)
            dense = rows.new if isinstance(rows.layer, CrossLayer) else self._decode(rows.layer, *rows.new)
        if this_pass.all_decoded:
            self._warn(DECODED)
        return dense

    def _warn(self, what: str) -> None:
        """Warn that the kernels do not attend, once for a cache and its copies."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"kvcache: {what}", stacklevel=3)

    def has_source(self, index: int) -> bool:
        """Whether a layer has an encoder's rows: not after a pass that failed."""
        self._finish_pass()
        return bool(self._seq_ids) and self._cache.seq_len(self._seq_ids[0], layer=index) > 0

    def dense_rows(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a layer's stored rows, ``[batch, heads, tokens, dim]``; None: there are none."""
        self._finish_pass()
        if not self._seq_ids:
            return None
        columns = layer.past_columns(self._seen)
        return layer.unpack(*self._decoder.decode_rows(layer.index, self._seq_ids, columns, 0, self._dtype))

    # ---- the forward pass

    def _pass_of(self, layer: Layer) -> ForwardPass:
        """Return the pass in which a layer brings keys.

        transformers does not say where a pass begins. All begin with the same layer, whether the last one was complete
        or ended in an error.
        """
        with self._shared.changed:
            return self._find_pass(layer)

    def _find_pass(self, layer: Layer) -> ForwardPass:
        if self._first_layer is None:
            self._first_layer = layer.index
        if self._pass is None or layer.index == self._first_layer or layer.index in self._pass.begun:
            self._drop_unfinished()
            self._end_pass()
            if layer.index != self._first_layer:
                raise RuntimeError(
                    f"layer {layer.index} brings keys in a forward pass without layer {self._first_layer}: the model"
                    " runs a layer twice, or the cache, or a copy of it, was used by others before the pass ended"
                )
            self._pass = ForwardPass(self._cache.num_layers)
        elif self._pass.pending:  # the model attended to other keys than those it was given
            self._pass.leaves_rows = True
            self._put_pending(self._pass)
        self._pass.begun.add(layer.index)
        self._pass.last_active = time.monotonic()
        return self._pass

    def runs_elsewhere(self) -> bool:
        """Whether a pass of this cache runs in another thread."""
        running = self._pass
        is_done = running is None or len(running.done) == running.num_layers
        return running is not None and not is_done and running.thread != threading.get_ident()

    def last_active(self) -> float:
        """Return when its pass reached a layer, by ``time.monotonic``."""
        return 0.0 if self._pass is None else self._pass.last_active

    def end_for_other(self) -> None:
        """End the pass because a pass of another cache begins in the same memory."""
        self._drop_unfinished()
        self._end_pass()

    def _drop_unfinished(self) -> None:
        """Warn if the last pass left layers out, so that its tokens are dropped."""
        if self._pass is not None and not self._pass.is_complete:
            warnings.warn(
                f"kvcache: the last forward pass went through {len(self._pass.done)} of {self._pass.num_layers} layers,"
                " and its tokens were dropped: it failed, a copy of the cache was used before it ended, or the cache"
                " was made from another model's config",
                stacklevel=2,
            )

    def _current(self, rows: LayerRows) -> ForwardPass:
        """Return the pass that rows belong to; raise if it has ended."""
        if rows.this_pass is None or rows.this_pass is not self._pass:
            raise RuntimeError(
                f"these keys and values of layer {rows.layer.index} were those of a forward pass that has ended: read"
                " cache.layers[i].keys and .values"
            )
        return rows.this_pass

    def _open(self, this_pass: ForwardPass, rows: LayerRows, padding: torch.Tensor | None) -> None:
        """Begin the batch of a pass for the new tokens of a layer."""
        assert rows.new is not None
        self._begin(this_pass, len(rows.new[0]), rows.new[0].shape[2], padding)

    def _begin(self, this_pass: ForwardPass, batch_size: int, num_tokens: int, padding: torch.Tensor | None) -> None:
        """Begin the batch of a pass; leave out the padding before a row's first token."""
        self.check_batch_size(batch_size)
        if not self._seq_ids:
            self._seq_ids, self._offsets = self._new_ids(batch_size), [0] * batch_size
        leading = [0] * batch_size
        if padding is None and self._prompts is not None:
            padding = self._prompts.padding(self._seen)
        if padding is not None:
            new = shown_columns(padding[:, self._seen :], num_tokens)
            counts = zip(count_leading(new), self._offsets, strict=True)
            leading = [count if offset == self._seen else 0 for count, offset in counts]
        positions: list[int] = []
        seq_ids: list[int] = []
        for seq_id, offset, left_out in zip(self._seq_ids, self._offsets, leading, strict=True):
            begin = self._seen - offset
            positions.extend(range(begin, begin + num_tokens - left_out))
            seq_ids.extend([seq_id] * (num_tokens - left_out))
        offsets = [offset + left_out for offset, left_out in zip(self._offsets, leading, strict=True)]
        if self._prompts is not None:
            self._prompts.check_leading(offsets, self._seen + num_tokens)
        with self._shared.changed:
            self._shared.take_turn(self)
            timeout = 0.0 if self._prefix is None else STALLED
            batch = self._cache.batch(positions=positions, seq_ids=seq_ids, timeout=timeout) if positions else None
        stored = torch.arange(num_tokens) >= torch.tensor(leading)[:, None] if any(leading) else None
        this_pass.open(batch, num_tokens, stored, offsets, self._seen)

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ValueError if the cache holds more or fewer rows."""
        if self._seq_ids and len(self._seq_ids) != batch_size:
            refuse_batch(batch_size, len(self._seq_ids))

    def _hidden(
        self, this_pass: ForwardPass, padding: torch.Tensor | None, offsets: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Return the positions that a mask hides; raise if it shows padding that was not stored."""
        num_columns = self._seen + this_pass.num_tokens
        if padding is None and not any(offsets):
            return []
        if padding is None:
            padding = torch.ones(len(offsets), num_columns, dtype=torch.bool)
        known = this_pass.hidden.get(id(padding))
        if known is not None:
            return known[1]
        shown = shown_columns(padding, num_columns)
        for row, (columns, offset) in enumerate(zip(shown, offsets, strict=True)):
            if columns[:offset].any():
                refuse_padding(row, offset)
        ranges = hidden_ranges(shown, self._seq_ids, offsets)
        this_pass.hidden[id(padding)] = padding, ranges
        if self._prompts is not None:
            self._prompts.note_hidden(ranges, self._seq_ids, [self._seen - offset for offset in self._offsets])
        return ranges

    def check_mask(self, rows: LayerRows, mask: torch.Tensor | None, num_queries: int) -> None:
        """Raise if a mask of elements, ``[batch, heads, queries, columns]``, shows padding that was not stored."""
        this_pass = rows.this_pass
        assert this_pass is not None
        num_seen = this_pass.num_seen + this_pass.num_tokens
        first = num_seen - rows.shapes[0][2]  # the first column's token
        for row, offset in enumerate(this_pass.offsets):
            query = max(0, offset - (num_seen - num_queries))  # the first that is no padding itself
            if offset <= first or query >= num_queries:
                continue
            if mask is not None:
                part = mask[row if len(mask) > 1 else 0, :, query:, : offset - first]
                if not (part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2).any():
                    continue
            refuse_padding(row, offset)

    def _chunks_agree(self, this_pass: ForwardPass, layer: Layer, padding: torch.Tensor | None) -> bool:
        """Whether a layer's chunks begin where the mask's do, which is after the padding that the mask hides."""
        if padding is None or not layer.is_chunked:
            return True
        leading = count_leading(shown_columns(padding, self._seen + this_pass.num_tokens))
        return leading == this_pass.offsets

    def _end_pass(self) -> None:
        """End the last pass: keep its tokens if it is complete, else drop them."""
        with self._shared.changed:
            ended, self._pass = self._pass, None
            if ended is None:
                return
            is_complete = ended.is_complete
            if is_complete:
                self._put_pending(ended)
            ended.end()
            if is_complete:
                self._seen += ended.num_tokens
                self._offsets = ended.offsets
            self._shared.changed.notify_all()

    def _finish_pass(self) -> None:
        """End the last pass if it is complete; leave a pass that still runs."""
        with self._shared.changed:
            if self._pass is not None and self._pass.is_complete:
                self._end_pass()

    def _note_done(self, this_pass: ForwardPass, index: int) -> None:
        """Note that a layer has stored the new tokens."""
        with self._shared.changed:
            this_pass.done.add(index)
            this_pass.last_active = time.monotonic()
            self._shared.changed.notify_all()

    def _put_pending(self, this_pass: ForwardPass) -> None:
        """Store the new rows of layers that the pass has been at."""
        for rows in [*this_pass.pending.values()]:
            self._put(this_pass, rows)

    def _put(self, this_pass: ForwardPass, rows: LayerRows) -> None:
        """Store the new rows of a layer, without attending."""
        if not this_pass.is_open:
            self._open(this_pass, rows, None)
        index = rows.layer.index
        assert rows.new is not None
        if isinstance(rows.layer, CrossLayer):
            self._put_source(this_pass, index, *rows.new)
        elif this_pass.batch is not None:
            packed = this_pass.drop_padding(*rows.layer.pack(*rows.new))
            this_pass.batch.put(index, *packed, layout=this_pass.layout)
        del this_pass.pending[index]
        self._note_done(this_pass, index)

    # ---- with the kernels

    def _run_kernel(
        self,
        this_pass: ForwardPass,
        layer: Layer,
        q: torch.Tensor,
        new_rows: tuple[torch.Tensor, ...],
        hidden: list[tuple[int, int, int]],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store `new_rows`, k and v, if there are any; then attend."""
        batch_size, num_heads, num_tokens, head_dim = q.shape
        if num_tokens < this_pass.num_tokens:  # queries of the last tokens only: pad with zeros, and cut the result
            wide = q.new_zeros(batch_size, num_heads, this_pass.num_tokens, head_dim)
            wide[:, :, -num_tokens:] = q
            return self._run_kernel(this_pass, layer, wide, new_rows, hidden, options)[:, -num_tokens:].contiguous()
        self._calls["kernel"] += 1
        out = q.new_empty(batch_size, num_tokens, num_heads, self._v_dims[layer.index])
        options = {**options, "hidden": hidden or None}
        if this_pass.batch is None:
            out.zero_()
        elif this_pass.stored is None:
            this_pass.batch.attend(layer.index, q, *new_rows, layout="BHTD", out=out.transpose(1, 2), **options)
        else:
            packed_q, *packed_rows = this_pass.drop_padding(q, *new_rows)
            result = q.new_empty(len(packed_q), *out.shape[2:])
            this_pass.batch.attend(layer.index, packed_q, *packed_rows, out=result, **options)
            out.zero_()
            out[this_pass.stored] = result
        self._note_done(this_pass, layer.index)
        return out

    def _attend_source(
        self,
        rows: LayerRows,
        layer: CrossLayer,
        q: torch.Tensor,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend over an encoder. In the first pass, first store the encoder's rows."""
        this_pass = self._pass_of(layer) if rows.this_pass is None else self._current(rows)
        if not this_pass.is_open:
            self._begin(this_pass, len(q), q.shape[2], None)
        new = this_pass.pending.pop(layer.index, None)
        if new is not None and new.new is not None:
            self._put_source(this_pass, layer.index, *new.new)
        hidden: list[tuple[int, int, int]] = []
        if padding is not None:
            shown = shown_columns(padding, rows.shapes[0][2])
            hidden = hidden_ranges(shown, self._seq_ids, [0] * len(self._seq_ids))
        return self._run_kernel(this_pass, layer, q, (), hidden, options)

    def _put_source(self, this_pass: ForwardPass, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store an encoder's rows."""
        assert this_pass.batch is not None
        for batch_index, seq_id in enumerate(self._seq_ids):
            this_pass.batch.put(index, k[batch_index], v[batch_index], seq_id=seq_id, layout="HTD")

    # ---- with dense tensors

    def _shapes(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[Shape, Shape]:
        """Return the shapes of a layer's keys and values, stored and new."""
        past = 0 if isinstance(layer, CrossLayer) else layer.past_columns(self._seen)
        batch_size, num_heads, num_new, head_dim = k.shape
        num_columns = past + num_new
        return (batch_size, num_heads, num_columns, head_dim), (batch_size, num_heads, num_columns, v.shape[3])

    def _source_shapes(self, layer: CrossLayer) -> tuple[Shape, Shape]:
        """Return the shapes of the keys and values that an encoder made."""
        index = layer.index
        shape = len(self._seq_ids), self._cache.num_kv_heads[index], self._cache.seq_len(self._seq_ids[0], layer=index)
        return (*shape, self._cache.head_dim[index]), (*shape, self._v_dims[index])

    def _decode(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the rows of earlier passes, and append the new rows unchanged."""
        if layer.num_sink_tokens and self._seen + k.shape[2] > layer.window:
            raise NotSupportedError("sink tokens lie apart from the window: only the attention 'kvcache' sees both")
        columns = layer.past_columns(self._seen)
        dense = self._decoder.decode_rows(layer.index, self._seq_ids, columns, k.shape[2], self._dtype)
        dense = layer.unpack(*dense)
        for wide, new in zip(dense, (k, v), strict=True):
            wide[:, :, columns:] = new
        return dense

    # ---- the interface of transformers' caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values of a layer; return the keys and values for the model's attention."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the model has {layer_idx + 1} layers or more, the config that this cache was made from has"
                f" {len(self.layers)}: give HFCache model.config"
            )
        layer: Any = self.layers[layer_idx]
        new: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, padding included."""
        self._finish_pass()
        return self._seen

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the first pass."""
        return len(self._seq_ids) or -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._end_pass()
        for seq_id in self._seq_ids:
            self._cache.clear(seq_id)
        self._forget()
        for layer in self.others:
            layer.reset()

    # ---- prompts that begin as earlier ones

    @property
    def takes_prompt(self) -> bool:
        """Whether the next prompt may begin with tokens of the prefix cache: there is one, and no token was fed."""
        return self._prefix is not None and self._pass is None and not self._seq_ids

    @property
    def is_acquired(self) -> bool:
        """Whether the cache holds what `acquire` took from the prefix cache, and no token was fed since."""
        return self._prompts is not None and self._seen == self._prompts.num_matched and self._pass is None

    def acquire(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Take the beginning of prompts from the prefix cache. `generate` calls this by itself, with its own prompt.

        Call it before a model that you call yourself, then feed ``input_ids[:, matched:]`` with the whole mask, and, if
        there is padding, with positions that count from the first token that is none, as `generate` does.

        Parameters
        ----------
        input_ids : torch.Tensor
            The prompts, ``[batch, tokens]``. What follows a token that stands for an image or sound is not matched.
        attention_mask : torch.Tensor, optional
            A mask ``[batch, tokens]``, 0 for padding. What follows a hidden token in the middle is not matched.

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
        if not self.takes_prompt:
            raise ValueError("the cache holds tokens: release or reset it first")
        prompts = Prompts(self._prefix, input_ids, attention_mask, self._placeholders)
        self._seq_ids, self._seen = prompts.acquire(input_ids.shape[1])
        self._prompts, self._offsets = prompts, prompts.offsets(self._seen)
        return self._seen

    def begins_behind(self, column: int) -> bool:
        """Whether a prompt that was acquired begins there or behind: another one cannot take its place."""
        return self._prompts is not None and self._prompts.begins_behind(column)

    def release(self, tokens: torch.Tensor | None = None) -> None:
        """Give the rows back to the prefix cache, for prompts to come, and forget all tokens.

        Parameters
        ----------
        tokens : torch.Tensor, optional
            All tokens of the batch, ``[batch, tokens]``, with the prompts and their padding, as `generate` returns
            them; those that were not fed are ignored. By default the prompts alone are kept, as they are of a batch
            whose rows were reordered (beam search). If the prompts were not named to `acquire`, nothing is kept; so
            without a prefix cache, where this is `reset`.

        Raises
        ------
        ValueError
            If there are more or fewer rows, or a row does not begin with its prompt; nothing has changed then.
        """
        self._end_pass()
        if self._prompts is not None:
            self._prompts.release(self._seq_ids, tokens)
        self.reset()

    def activate_past_recording(self) -> None:
        """Prepare for assisted decoding, which feeds the whole prompt even if the cache holds its beginning."""
        if self._prompts is not None and self.is_acquired:
            for seq_id in self._seq_ids:
                self._cache.clear(seq_id)
            self._seq_ids, self._seen = self._prompts.acquire(1)
            self._offsets = self._prompts.offsets(self._seen)
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `tokens_to_remove` is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        self._end_pass()
        seen = max(0, self._seen + tokens_to_remove)
        lengths = {i: max(0, seen - offset) for i, offset in zip(self._seq_ids, self._offsets, strict=True)}
        can_resume = {i: self._cache.can_resume(length, seq_id=i) for i, length in lengths.items()}
        if all(can_resume.values()):
            for layer in self.others:
                layer.crop(tokens_to_remove)
        for seq_id in sorted(self._seq_ids, key=can_resume.__getitem__):
            self._cache.truncate(lengths[seq_id], seq_id=seq_id)  # what may raise comes first: then none has changed
        self._seen, self._offsets = seen, [min(offset, seen) for offset in self._offsets]
        self.text = None if self.text is None else self.text[:, :seen]
        if self._prompts is not None:
            self._prompts.crop(seen)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Continue batch index i from the tokens of index ``beam_idx[i]``; no row of keys or values is copied."""
        self._select(beam_idx.tolist())
        for layer in self.others:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the sequences at some batch indices, and drop the others."""
        indices = torch.as_tensor(indices)
        self._select(torch.arange(len(self._seq_ids))[indices].tolist() if self._seq_ids else [])
        for layer in self.others:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times."""
        self._select([i for i in range(len(self._seq_ids)) for _ in range(repeats)])
        for layer in self.others:
            layer.batch_repeat_interleave(repeats)

    def _select(self, batch_indices: list[int]) -> None:
        """Make a batch of the sequences at these indices; fork a sequence whose index occurs more than once."""
        self._end_pass()
        if not self._seq_ids:  # transformers' own caches ignore this as well
            return
        if not batch_indices:
            raise ValueError("no row of the batch would be left: select one or more, or reset the cache")
        selected: list[int] = []
        for source in (self._seq_ids[i] for i in batch_indices):
            if source in selected:
                [seq_id] = self._new_ids(1)
                self._cache.fork(source, seq_id, missing_ok=True)
                selected.append(seq_id)
            else:
                selected.append(source)
        for seq_id in set(self._seq_ids) - set(selected):
            self._cache.clear(seq_id)
        self._seq_ids, self._offsets = selected, [self._offsets[i] for i in batch_indices]
        self.text, self.has_moved_rows = None if self.text is None else self.text[batch_indices], True
        if self._prompts is not None:
            self._prompts.select(batch_indices, self._seen)

    def _new_ids(self, count: int) -> list[int]:
        return [self._shared.new_id() for _ in range(count)]

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        """Return a cache that continues from the same tokens; it shares their rows, and copies none."""
        self._end_pass()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._seq_ids, other._calls = self._new_ids(len(self._seq_ids)), dict(self._calls)
        other._decoder, other._prompts = Decoder(self._cache), copy.copy(self._prompts)
        for source, seq_id in zip(self._seq_ids, other._seq_ids, strict=True):
            self._cache.fork(source, seq_id, missing_ok=True)
        other.layers = [
            other._make_layer(layer.index) if isinstance(layer, Layer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return other

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a cache cannot be pickled: use save() and load(), or where a layer cannot be saved, keep the token ids and"
            " give them to the model again; copy.deepcopy() makes a cache that shares its rows, in this process"
        )

    def __repr__(self) -> str:
        self._finish_pass()
        held = f"{count(len(self._seq_ids), 'sequence')} of {count(self._seen, 'token')}"
        calls = "{kernel} by the kernels, {dense} with dense tensors, {fallback} by fallback".format(**self._calls)
        layers = describe(self._cache, self._seq_ids)
        return f"<HFCache: {held}, {layers}; {readable(self.nbytes)}; layers attended: {calls}>"

    def __del__(self) -> None:
        if "layers" in vars(self):  # else __init__ failed
            ended, self._pass = self._pass, None  # without a lock: this may run in the middle of anything
            if ended is not None and ended.is_open and ended.batch is not None:
                ended.batch.abort()
            clear_finally(self._cache, self._seq_ids)  # instead of closing it: copies may still use the KVCache

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the rows, with their bookkeeping and the rows of copies."""
        self._finish_pass()
        return self._cache.nbytes

    def stats(self) -> dict[str, Any]:
        """Return `kvcache.KVCache.stats`, and in ``"calls"`` how many times a layer was attended over by each means."""
        return {**self._cache.stats(), "calls": dict(self._calls)}
