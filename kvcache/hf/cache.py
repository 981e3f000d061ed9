"""`HFCache`: a `KVCache` behind the interface of transformers' caches."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from kvcache.cache import KVCache
from kvcache.errors import NotSupportedError
from kvcache.hf.attention import NAME, label
from kvcache.hf.decode import decode_rows
from kvcache.hf.forward_pass import ForwardPass
from kvcache.hf.layers import CrossLayer, Layer
from kvcache.hf.policies import CacheLayer, policy_of, shape_of
from kvcache.layer import DType
from kvcache.policy import CrossAttention, Policy

BLOCK_SIZE = 256  # also the tokens decoded at once for the model's own attention; unused slots take no memory


class Shared:
    """The state that an `HFCache` and its copies share beside their `KVCache`."""

    def __init__(self) -> None:
        self.seq_ids = itertools.count()  # ids that no sequence has had yet
        self.owner: Callable[[], HFCache | None] = lambda: None  # returns the cache whose batch is open, if any


class HFCache(Cache):
    """A cache for models of transformers: a sequence for each text of the batch.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's configuration.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0"}, default "f16"
        The type that rows are stored in.
    policy : policy or list of policies, optional
        The policy of all layers or of each layer of attention; by default from `config`.

    Raises
    ------
    NotSupportedError
        If the model has an encoder, no layer of attention, or a layer whose state is neither keys and values nor that
        of linear attention.
    ValueError
        If `config` does not say how many heads there are, or `kvcache.KVCache` refuses an argument.
    TypeError
        If `config` is not a configuration of transformers.

    Notes
    -----
    Padding is not stored: a token that the attention mask hides when it comes in has no row, and the positions of a
    sequence count its other tokens. Layers of linear attention keep transformers' own state.
    """

    def __init__(
        self, config: PreTrainedConfig, dtype: DType = "f16", policy: Policy | Sequence[Policy] | None = None
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is {config!r}: give the model's, of transformers")
        self._config = config.get_text_config(decoder=True)  # the model's object, which follows set_attn_implementation
        if config.is_encoder_decoder or self._config.is_encoder_decoder:
            raise NotSupportedError(f"a {type(config).__name__} has an encoder too: use HFEncoderDecoderCache")
        types, options = get_layer_types_and_kwargs(self._config)
        layers: list[Any] = [policy_of(i, *layer) for i, layer in enumerate(zip(types, options, strict=True))]
        policies = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, CacheLayer)}
        if not policies:
            raise NotSupportedError(f"a {type(config).__name__} has no layer with keys and values")
        num_kv_heads, head_dim = zip(*(shape_of(self._config.per_layer_config[i]) for i in policies), strict=True)
        self._cache = KVCache(
            len(policies),
            num_kv_heads,
            head_dim,
            None,
            dtype=dtype,
            policy=[*policies.values()] if policy is None else policy,
            max_sequences=None,
            block_size=BLOCK_SIZE,
        )
        self._v_dims = self._cache.v_head_dim
        self._calls = {"kernel": 0, "dense": 0, "fallback": 0}
        self._shared = Shared()
        self._forget()
        for index, i in enumerate(policies):
            layers[i] = self._make_layer(index)
        super().__init__(layers=layers)

    def _forget(self) -> None:
        self._seq_ids: list[int] = []  # the sequence of each batch index
        self._seen = 0  # tokens of each sequence, padding included
        self._pass: ForwardPass | None = None  # the pass that runs, or ran last
        self._has_gaps = False  # whether padding between tokens was left out
        self._source_is_packed = False  # whether an encoder's padding was left out

    def _make_layer(self, index: int) -> Layer:
        return (CrossLayer if isinstance(self.policy[index], CrossAttention) else Layer)(self, index)

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """The policy of each layer of attention."""
        return self._cache.policy

    @property
    def _others(self) -> list[Any]:
        """The layers whose state is transformers' own."""
        return [layer for layer in self.layers if not isinstance(layer, Layer)]

    # ---- called by the layers and the attention

    def store(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values ``[batch, heads, tokens, dim]``; return the attention's arguments.

        For the kernels, return the same tensors, which `attend` stores; for another attention, all rows, decoded.
        """
        if not k.is_cpu:
            raise NotSupportedError(f"the keys are on {k.device}: this cache is for models on the CPU")
        this_pass = self._pass_of(layer)
        this_pass.check_received(layer)
        self._dtype = k.dtype
        if this_pass.uses_kernels:
            this_pass.awaited = layer
            return label(k, layer), v
        self._calls["dense"] += 1
        return self._store_dense(this_pass, layer, k, v)

    def fetch(self, layer: CrossLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the attention over an encoder from the second pass on; empty for kernels."""
        if not self._seq_ids:
            raise RuntimeError("nothing was stored of an encoder: run the decoder with what the encoder made first")
        if self._uses_kernels():
            return label(torch.empty(0), layer), torch.empty(0)
        self._calls["dense"] += 1
        return self._decode_source(layer)

    def attend(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend with the kernels; first store the new tokens of the layer, unless they are stored."""
        storing = self._receive(layer)
        if isinstance(layer, CrossLayer):
            return self._attend_source(storing, layer, q, k, v, padding, options)
        if storing is not None:
            self._open(storing, k, padding)
            return self._run_kernel(storing, layer, q, (k, v), options)
        if self._pass is None or layer.index not in self._pass.done:
            raise RuntimeError(f"layer {layer.index} is read by another before it was written")
        return self._run_kernel(self._pass, layer, q, (), options)  # another layer of the model reads these rows

    def make_dense(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; return all the layer's rows, for an attention that the kernels lack."""
        if not self._calls["fallback"]:
            warnings.warn(
                "kvcache: a mask or an option that the kernels do not know; using dense tensors", stacklevel=2
            )
        self._calls["fallback"] += 1
        storing = self._receive(layer)
        if storing is not None:
            return self._store_dense(storing, layer, k, v)
        return self._decode_source(layer) if isinstance(layer, CrossLayer) else self._decode(layer, k, v)

    def has_source(self, index: int) -> bool:
        """Whether a layer has an encoder's rows: not after a pass that failed."""
        self._finish_pass()
        return bool(self._seq_ids) and self._cache.seq_len(self._seq_ids[0], layer=index) > 0

    # ---- the forward pass

    def _uses_kernels(self) -> bool:
        """Whether the model's attention is this package's now."""
        return bool(self._config._attn_implementation == NAME)

    def _pass_of(self, layer: Layer) -> ForwardPass:
        """Return the pass in which a layer brings keys.

        transformers does not say where a pass begins. A new pass begins with layer 0, and with a layer that the last
        pass has been through, whether that pass was complete or ended in an error.
        """
        if self._pass is None or layer.index == 0 or layer.index in self._pass.done:
            self._end_pass()
            self._pass = ForwardPass(self._cache.num_layers, self._uses_kernels())
        return self._pass

    def _receive(self, layer: Layer) -> ForwardPass | None:
        """Return the pass whose new keys of a layer reached the attention; None: the layer's rows are stored."""
        return self._pass if self._pass is not None and self._pass.receive(layer) else None

    def _open(self, this_pass: ForwardPass, new: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Begin the batch of a pass for new tokens ``[batch, heads, tokens, dim]``, unless the pass has a batch."""
        if this_pass.is_open:
            return
        batch_size, num_tokens = len(new), new.shape[2]
        if self._seq_ids and len(self._seq_ids) != batch_size:
            raise ValueError(
                f"the batch has {batch_size} rows: the cache was filled with {len(self._seq_ids)}; reset it"
            )
        owner = self._shared.owner()
        if owner is not None and owner is not self:
            owner._end_pass()
        self._shared.owner = weakref.ref(self)
        if not self._seq_ids:
            self._seq_ids = self._new_ids(batch_size)
        real = None if padding is None else self._find_real(padding, num_tokens)
        counts = [num_tokens] * batch_size if real is None else real.sum(1).tolist()
        positions: list[int] = []
        seq_ids: list[int] = []
        for seq_id, count in zip(self._seq_ids, counts, strict=True):
            begin = self._cache.next_position(seq_id)
            positions.extend(range(begin, begin + count))
            seq_ids.extend([seq_id] * count)
        batch = self._cache.batch(positions=positions, seq_ids=seq_ids)
        has_gaps = False
        if padding is not None and real is not None:  # without new padding there is no new gap
            is_token = padding[:, : self._seen + num_tokens].bool()
            has_gaps = bool((is_token.cummax(1).values & ~is_token).any())
        this_pass.open(batch, num_tokens, real, has_gaps)

    def _find_real(self, padding: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
        """Return which new tokens are no padding, ``[batch, tokens]`` of bool; None: there is no padding."""
        end = self._seen + num_tokens
        stored = [self._cache.next_position(seq_id) for seq_id in self._seq_ids]
        if padding.shape[1] < end:
            raise ValueError(f"attention_mask has {padding.shape[1]} columns, where there are {end} tokens")
        if padding[:, : self._seen].sum(1).tolist() != stored:
            raise ValueError(
                "attention_mask must hide those of the stored tokens that it hid when they came; the model's own "
                "attention has all of them stored: go on with that, or reset the cache"
            )
        real = padding[:, self._seen : end].bool()
        return None if real.all() else real

    def _end_pass(self) -> None:
        """End the last pass: keep its tokens if it is complete, else drop them."""
        ended, self._pass = self._pass, None
        if ended is not None and ended.end():
            self._seen += ended.num_tokens
            self._has_gaps |= ended.has_gaps

    def _finish_pass(self) -> None:
        """End the last pass if it is complete; leave a pass that still runs."""
        if self._pass is not None and self._pass.is_complete:
            self._end_pass()

    # ---- with the kernels

    def _run_kernel(
        self,
        this_pass: ForwardPass,
        layer: Layer,
        q: torch.Tensor,
        new_rows: tuple[torch.Tensor, ...],
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store `new_rows`, k and v, if there are any; then attend."""
        batch_size, num_heads, num_tokens, head_dim = q.shape
        if num_tokens < this_pass.num_tokens:  # queries of the last tokens only: pad with zeros, and cut the result
            wide = q.new_zeros(batch_size, num_heads, this_pass.num_tokens, head_dim)
            wide[:, :, -num_tokens:] = q
            return self._run_kernel(this_pass, layer, wide, new_rows, options)[:, -num_tokens:].contiguous()
        self._calls["kernel"] += 1
        out = q.new_empty(batch_size, num_tokens, num_heads, self._v_dims[layer.index])
        if this_pass.real is None:
            this_pass.batch.attend(layer.index, q, *new_rows, layout="BHTD", out=out.transpose(1, 2), **options)
        else:
            packed_q, *packed_rows = this_pass.drop_padding(q, *new_rows)
            result = q.new_empty(len(packed_q), *out.shape[2:])
            this_pass.batch.attend(layer.index, packed_q, *packed_rows, out=result, **options)
            out.zero_()
            out[this_pass.real] = result
        this_pass.done.add(layer.index)
        return out

    def _attend_source(
        self,
        storing: ForwardPass | None,
        layer: CrossLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attend over an encoder. In the first pass, `storing`, first store the encoder's rows."""
        if storing is None and layer.index == 0:
            self._check_source(padding)
        this_pass = self._pass_of(layer) if storing is None else storing
        self._open(this_pass, q, None)
        if storing is not None:
            self._put_source(storing, layer, k, v, padding)
        return self._run_kernel(this_pass, layer, q, (), options)

    def _put_source(
        self, this_pass: ForwardPass, layer: CrossLayer, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None
    ) -> None:
        """Store an encoder's rows, without its padding."""
        self._source_is_packed = padding is not None
        for batch_index, seq_id in enumerate(self._seq_ids):
            real = slice(None) if padding is None else padding[batch_index].bool()
            rows = k[batch_index][:, real], v[batch_index][:, real]
            this_pass.batch.put(layer.index, *rows, seq_id=seq_id, layout="HTD")

    def _check_source(self, padding: torch.Tensor | None) -> None:
        """Raise if a mask hides other tokens of an encoder than were left out when its rows were stored."""
        if padding is None:
            return
        if padding.sum(1).tolist() != [self._cache.seq_len(seq_id, layer=0) for seq_id in self._seq_ids]:
            raise ValueError(
                "the encoder's attention_mask must hide what it hid when that was stored; the model's own attention "
                "has all of it stored: go on with that, or reset the cache"
            )

    # ---- with dense tensors

    def _store_dense(
        self, this_pass: ForwardPass, layer: Layer, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; return a row for each column of the mask, ``[batch, heads, n, dim]``."""
        self._open(this_pass, k, None)
        if isinstance(layer, CrossLayer):
            self._put_source(this_pass, layer, k, v, None)
            dense = k, v
        else:
            this_pass.batch.put(layer.index, *this_pass.drop_padding(k, v), layout=this_pass.layout)
            dense = self._decode(layer, k, v)
        this_pass.done.add(layer.index)
        return dense

    def _decode(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the rows of earlier passes, and append the new rows unchanged."""
        if self._has_gaps:
            raise NotSupportedError(
                "padding between tokens was not stored: go on with the attention 'kvcache', and its masks"
            )
        columns = layer.past_columns(self._seen)
        dense = decode_rows(self._cache, layer.index, self._seq_ids, columns, k.shape[2], self._dtype)
        for wide, new in zip(dense, (k, v), strict=True):
            wide[:, :, columns:] = new
        return dense

    def _decode_source(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the encoder's rows that an earlier pass stored."""
        if self._source_is_packed:
            raise NotSupportedError(
                "the encoder's padding was not stored: go on with the attention 'kvcache', and its masks"
            )
        self._finish_pass()
        columns = self._cache.seq_len(self._seq_ids[0], layer=layer.index)
        return decode_rows(self._cache, layer.index, self._seq_ids, columns, 0, self._dtype)

    # ---- the interface of transformers' caches

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
        for layer in self._others:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `tokens_to_remove` is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        self._end_pass()
        for seq_id in self._seq_ids:
            self._cache.truncate(max(0, self._cache.next_position(seq_id) + tokens_to_remove), seq_id=seq_id)
        self._seen = max(0, self._seen + tokens_to_remove)
        self._has_gaps &= self._seen > 0
        for layer in self._others:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Continue batch index i from the tokens of index ``beam_idx[i]``; no row of keys or values is copied."""
        self._select(beam_idx.tolist())
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences at some batch indices, and drop the others."""
        self._select(torch.arange(len(self._seq_ids))[indices].tolist())
        for layer in self._others:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times."""
        self._select([i for i in range(len(self._seq_ids)) for _ in range(repeats)])
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def _select(self, batch_indices: list[int]) -> None:
        """Make a batch of the sequences at these indices; fork a sequence whose index occurs more than once."""
        self._end_pass()
        selected: list[int] = []
        for source in (self._seq_ids[i] for i in batch_indices):
            if source in selected:
                [seq_id] = self._new_ids(1)
                self._cache.fork(source, seq_id)
                selected.append(seq_id)
            else:
                selected.append(source)
        for seq_id in set(self._seq_ids) - set(selected):
            self._cache.clear(seq_id)
        self._seq_ids = selected

    def _new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._shared.seq_ids, count))

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        """Return a cache that continues from the same tokens; it shares their rows, and copies none."""
        self._end_pass()
        other = copy.copy(self)
        other._seq_ids, other._calls = self._new_ids(len(self._seq_ids)), dict(self._calls)
        for source, seq_id in zip(self._seq_ids, other._seq_ids, strict=True):
            self._cache.fork(source, seq_id)
        other.layers = [
            other._make_layer(layer.index) if isinstance(layer, Layer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return other

    def __del__(self) -> None:
        if "layers" in vars(self):  # else __init__ failed
            self._end_pass()
            for seq_id in self._seq_ids:  # clear instead of closing: copies may still use the KVCache
                self._cache.clear(seq_id)

    @property
    def nbytes(self) -> int:
        """The bytes of memory of the rows, with their bookkeeping and the rows of copies."""
        return self._cache.nbytes

    def stats(self) -> dict[str, Any]:
        """Return `kvcache.KVCache.stats`, and in ``"calls"`` how many times a layer was attended over by each means."""
        return {**self._cache.stats(), "calls": dict(self._calls)}
