"""`HFCache`."""

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

from kvcache.cache import Batch, KVCache
from kvcache.errors import NotSupportedError
from kvcache.hf.attention import ATTRIBUTE, NAME
from kvcache.hf.layers import CrossLayer, Layer
from kvcache.hf.policies import CacheLayer, policy_of, shape_of
from kvcache.layer import DType
from kvcache.policy import CrossAttention, Policy

BLOCK = 256  # tokens: copied in one go for the model's own attention; what is not filled takes no memory


class Shared:
    """What an `HFCache` and its copies have in common, beside the rows."""

    def __init__(self) -> None:
        self.seq_ids = itertools.count()
        self.owner: Callable[[], HFCache | None] = lambda: None  # of the forward pass that may be open


class Step:
    """A forward pass."""

    def __init__(self, batch: Batch, real: torch.Tensor | None, num_tokens: int, num_layers: int) -> None:
        self.batch, self.num_tokens, self.num_layers = batch, num_tokens, num_layers
        self.real = real  # [batch, tokens] of bool, where some are padding
        self.has_gaps = False  # some of these lie between others
        self.done: set[int] = set()  # layers

    @property
    def is_whole(self) -> bool:
        """Whether it has been through all layers."""
        return len(self.done) == self.num_layers


class HFCache(Cache):
    """A cache for models of transformers, each row of the batch a sequence.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The model's.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0"}, default "f16"
        Of the rows.
    policy : policy or list of policies, optional
        Of all layers, or of each; by default what `config` says of them.

    Raises
    ------
    NotSupportedError
        If the model has a layer whose state is neither keys and values nor that of linear attention, or no attention;
        or an encoder.
    ValueError
        If `config` says nothing of heads, or an argument is none that `kvcache.KVCache` takes.
    TypeError
        If `config` is no configuration of transformers.

    Notes
    -----
    Padding is not stored: a token that the attention mask hides when it comes in has no row, so that a query sees the
    rows before it in its own order. Layers of linear attention keep transformers' own state, in the same cache.
    """

    def __init__(
        self, config: PreTrainedConfig, dtype: DType = "f16", policy: Policy | Sequence[Policy] | None = None
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config is {config!r}: give the model's, of transformers")
        self._config = config.get_text_config(decoder=True)  # says which attention the model has now
        if config.is_encoder_decoder or self._config.is_encoder_decoder:
            raise NotSupportedError(f"a {type(config).__name__} has an encoder too: use HFEncoderDecoderCache")
        types, options = get_layer_types_and_kwargs(self._config)
        layers: list[Any] = [policy_of(i, *layer) for i, layer in enumerate(zip(types, options, strict=True))]
        ours = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, CacheLayer)}  # policies
        if not ours:
            raise NotSupportedError(f"a {type(config).__name__} has no layer with keys and values")
        num_kv_heads, head_dim = zip(*(shape_of(self._config.per_layer_config[i]) for i in ours), strict=True)
        self._cache = KVCache(
            len(ours),
            num_kv_heads,
            head_dim,
            None,
            dtype=dtype,
            policy=[*ours.values()] if policy is None else policy,
            max_sequences=None,
            block_size=BLOCK,
        )
        self._v_dims = self._cache.v_head_dim
        self._calls = {"kernel": 0, "dense": 0, "fallback": 0}
        self._shared = Shared()
        self._forget()
        for index, i in enumerate(ours):
            layers[i] = self._layer(index)
        super().__init__(layers=layers)

    def _forget(self) -> None:
        self._rows: list[int] = []  # the sequence of each row of the batch
        self._seen = 0  # tokens, padding included
        self._step: Step | None = None
        self._pending: Layer | None = None  # its keys are on their way to `attention`
        self._has_gaps = False  # rows of padding are missing between others
        self._is_packed = False  # or of an encoder's

    def _layer(self, index: int) -> Layer:
        return (CrossLayer if isinstance(self.policy[index], CrossAttention) else Layer)(self, index)

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """What each layer of attention keeps."""
        return self._cache.policy

    @property
    def _others(self) -> list[Any]:
        """Transformers' own layers."""
        return [layer for layer in self.layers if not isinstance(layer, Layer)]

    # ---- a forward pass

    def store(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values ``[batch, heads, tokens, dim]``; return what the attention is given."""
        if not k.is_cpu:
            raise NotSupportedError(f"the keys are on {k.device}: this cache is for models on the CPU")
        self._look(layer)
        if self._pending is not None and self._pending.index < layer.index:
            index, self._pending = self._pending.index, None
            raise RuntimeError(f"the keys of layer {index} did not reach the attention: this model changes them first")
        self._dtype = k.dtype
        if self._attends:
            self._pending = layer
            return self._mark(layer, k), v
        self._calls["dense"] += 1
        return self._put(layer, k, v)

    def _look(self, layer: Layer) -> None:
        """Find out, once in a pass, whether the model's attention is ours; asking takes microseconds."""
        if layer.index == 0 or self._step is None:
            self._attends = self._config._attn_implementation == NAME
        if layer.index == 0:  # a pass begins, whatever became of the one before
            self._pending = None

    def _mark(self, layer: Layer, k: torch.Tensor) -> torch.Tensor:
        """The same, for `attention` to know whose it is."""
        setattr(k, ATTRIBUTE, layer)
        return k

    def has_source(self, index: int) -> bool:
        """Whether a layer has what an encoder made: not so after a pass that did not come to its end."""
        self._settle()
        return bool(self._rows) and self._cache.seq_len(self._rows[0], layer=index) > 0

    def fetch(self, layer: CrossLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention over an encoder is given from the second pass on."""
        if not self._rows:
            raise RuntimeError("nothing was stored of an encoder: run the decoder with what the encoder made first")
        self._look(layer)
        if self._attends:
            return self._mark(layer, torch.empty(0)), torch.empty(0)
        self._calls["dense"] += 1
        return self._source(layer)

    def attend(
        self,
        layer: Layer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Store the new tokens of a layer, and attend with the kernels."""
        is_new, self._pending = self._pending is layer, None
        rows: tuple[torch.Tensor, ...] = (k, v) if is_new else ()
        if isinstance(layer, CrossLayer):
            if not is_new and layer.index == 0:
                self._check_source(padding)
            step = self._step_of(layer, q, None)
            if is_new:
                self._put_source(step, layer, k, v, padding)
            rows = ()
        elif is_new:
            step = self._step_of(layer, k, padding)
        elif self._step is not None and layer.index in self._step.done:  # another layer reads the rows of this one
            step = self._step
        else:
            raise RuntimeError(f"layer {layer.index} is read by another before it was written")
        out = self._run(step, layer, q, rows, options)
        step.done.add(layer.index)
        return out

    def make_dense(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; all its keys and values, for what the kernels do not know."""
        if not self._calls["fallback"]:
            warnings.warn(
                "kvcache: a mask or an option that the kernels do not know; using dense tensors", stacklevel=2
            )
        self._calls["fallback"] += 1
        is_new, self._pending = self._pending is layer, None
        if is_new:
            return self._put(layer, k, v)
        return self._source(layer) if isinstance(layer, CrossLayer) else self._dense(layer, k, v)

    def _source(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """What was stored of an encoder, in an earlier pass."""
        if self._is_packed:
            raise NotSupportedError(
                "the encoder's padding was not stored: go on with the attention 'kvcache', and its masks"
            )
        self._settle()
        return self._stored(layer, self._cache.seq_len(self._rows[0], layer=layer.index))

    def _run(
        self, step: Step, layer: Layer, q: torch.Tensor, rows: tuple[torch.Tensor, ...], options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend, and store the rows of k and v first, if there are any."""
        batch_size, num_heads, num_tokens, head_dim = q.shape
        if num_tokens < step.num_tokens:  # the last ones; the others are thrown away
            wide = q.new_zeros(batch_size, num_heads, step.num_tokens, head_dim)
            wide[:, :, -num_tokens:] = q
            return self._run(step, layer, wide, rows, options)[:, -num_tokens:].contiguous()
        self._calls["kernel"] += 1
        out = q.new_empty(batch_size, num_tokens, num_heads, self._v_dims[layer.index])
        if step.real is None:
            step.batch.attend(layer.index, q, *rows, layout="BHTD", out=out.transpose(1, 2), **options)
            return out
        packed_q, *packed = (x.transpose(1, 2)[step.real] for x in (q, *rows))
        result = q.new_empty(len(packed_q), *out.shape[2:])
        step.batch.attend(layer.index, packed_q, *packed, out=result, **options)
        out.zero_()
        out[step.real] = result
        return out

    def _put(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens of a layer; all that its mask has columns for, ``[batch, heads, n, dim]``."""
        step = self._step_of(layer, k, None)
        if isinstance(layer, CrossLayer):
            self._put_source(step, layer, k, v, None)
            dense = k, v
        else:
            rows = (k, v) if step.real is None else tuple(x.transpose(1, 2)[step.real] for x in (k, v))
            step.batch.put(layer.index, *rows, layout="BHTD" if step.real is None else "THD")
            dense = self._dense(layer, k, v)
        step.done.add(layer.index)
        return dense

    def _dense(self, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored, and the new tokens."""
        if self._has_gaps:
            raise NotSupportedError(
                "padding between tokens was not stored: go on with the attention 'kvcache', and its masks"
            )
        kept = layer.kept(self._seen)
        dense = self._stored(layer, kept, k.shape[2])
        for wide, new in zip(dense, (k, v), strict=True):
            wide[:, :, kept:] = new
        return dense

    def _put_source(
        self, step: Step, layer: CrossLayer, k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None
    ) -> None:
        """Store what an encoder made, without its padding."""
        self._is_packed = padding is not None
        for i, row in enumerate(self._rows):
            real = slice(None) if padding is None else padding[i].bool()
            step.batch.put(layer.index, k[i][:, real], v[i][:, real], seq_id=row, layout="HTD")

    def _check_source(self, padding: torch.Tensor | None) -> None:
        """Whether what is stored of an encoder is what a mask shows."""
        if padding is not None and padding.sum(1).tolist() != [self._cache.seq_len(row, layer=0) for row in self._rows]:
            raise ValueError(
                "the encoder's attention_mask must hide what it hid when that was stored; the model's own attention "
                "has all of it stored: go on with that, or reset the cache"
            )

    def _stored(self, layer: Layer, columns: int, more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The last rows of a layer, ``[batch, heads, columns, dim]``, and room for some more."""
        i = layer.index
        k, v = (
            torch.empty(len(self._rows), self._cache.num_kv_heads[i], columns + more, dim[i], dtype=self._dtype)
            for dim in (self._cache.head_dim, self._v_dims)
        )
        for b, row in enumerate(self._rows):
            stored = self._cache.seq_len(row, layer=i)
            begin = max(0, columns - stored)
            k[b, :, :begin] = v[b, :, :begin] = 0
            out = k[b, :, begin:columns], v[b, :, begin:columns]
            self._cache.gather(i, seq_id=row, first=stored - columns + begin, out=out)
        return k, v

    def _step_of(self, layer: Layer, k: torch.Tensor, padding: torch.Tensor | None) -> Step:
        """The forward pass that a layer is part of; a new one, if that is done with this layer."""
        if self._step is not None and (layer.index == 0 or layer.index in self._step.done):
            self._end()
        if self._step is None:
            self._step = self._begin(len(k), k.shape[2], padding)
        return self._step

    def _begin(self, batch_size: int, num_tokens: int, padding: torch.Tensor | None) -> Step:
        if self._rows and len(self._rows) != batch_size:
            raise ValueError(f"the batch has {batch_size} rows: the cache was filled with {len(self._rows)}; reset it")
        owner = self._shared.owner()
        if owner is not None:
            owner._end()
        self._shared.owner = weakref.ref(self)
        if not self._rows:
            self._rows = self._new_ids(batch_size)
        real = None if padding is None else self._real_ones(padding, num_tokens)
        counts = [num_tokens] * batch_size if real is None else real.sum(1).tolist()
        positions: list[int] = []
        seq_ids: list[int] = []
        for row, count in zip(self._rows, counts, strict=True):
            begin = self._cache.next_position(row)
            positions.extend(range(begin, begin + count))
            seq_ids.extend([row] * count)
        batch = self._cache.batch(positions=positions, seq_ids=seq_ids)
        step = Step(batch, real, num_tokens, self._cache.num_layers)
        if padding is not None and real is not None:  # else nothing came that could be between others
            is_token = padding[:, : self._seen + num_tokens].bool()
            step.has_gaps = bool((is_token.cummax(1).values & ~is_token).any())
        return step

    def _real_ones(self, padding: torch.Tensor, num_tokens: int) -> torch.Tensor | None:
        """Which of the new tokens are; None: all."""
        end = self._seen + num_tokens
        stored = [self._cache.next_position(row) for row in self._rows]
        if padding.shape[1] < end:
            raise ValueError(f"attention_mask has {padding.shape[1]} columns, where there are {end} tokens")
        if padding[:, : self._seen].sum(1).tolist() != stored:
            raise ValueError(
                "attention_mask must hide those of the stored tokens that it hid when they came; the model's own "
                "attention has all of them stored: go on with that, or reset the cache"
            )
        real = padding[:, self._seen : end].bool()
        return None if real.all() else real

    def _end(self) -> None:
        """Keep the tokens of the last forward pass; drop them, where it ended with an error."""
        step, self._step, self._pending = self._step, None, None
        if step is None:
            return
        if not step.is_whole:
            step.batch.abort()
            return
        step.batch.commit()
        self._seen += step.num_tokens
        self._has_gaps |= step.has_gaps

    def _settle(self) -> None:
        """End a forward pass that has been through all layers."""
        if self._step is not None and self._step.is_whole:
            self._end()

    def _new_ids(self, count: int) -> list[int]:
        return list(itertools.islice(self._shared.seq_ids, count))

    # ---- what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding included."""
        self._settle()
        return self._seen

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first pass."""
        return len(self._rows) or -1

    def reset(self) -> None:
        """Forget all tokens."""
        self._end()
        for row in self._rows:
            self._cache.clear(row)
        self._forget()
        for layer in self._others:
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: `tokens_to_remove` is minus their number."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        self._end()
        for row in self._rows:
            self._cache.truncate(max(0, self._cache.next_position(row) + tokens_to_remove), seq_id=row)
        self._seen = max(0, self._seen + tokens_to_remove)
        self._has_gaps &= self._seen > 0
        for layer in self._others:
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let row i go on from what row ``beam_idx[i]`` has; no row of keys is copied."""
        self._select(beam_idx.tolist())
        for layer in self._others:
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows of the batch."""
        self._select(torch.arange(len(self._rows))[indices].tolist())
        for layer in self._others:
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have every row `repeats` times."""
        self._select([i for i in range(len(self._rows)) for _ in range(repeats)])
        for layer in self._others:
            layer.batch_repeat_interleave(repeats)

    def _select(self, sources: list[int]) -> None:
        self._end()
        rows: list[int] = []
        for source in (self._rows[i] for i in sources):
            if source in rows:
                [row] = self._new_ids(1)
                self._cache.fork(source, row)
                rows.append(row)
            else:
                rows.append(source)
        for row in set(self._rows) - set(rows):
            self._cache.clear(row)
        self._rows = rows

    def __deepcopy__(self, memo: dict[int, Any]) -> HFCache:
        """Return a cache that goes on from the same tokens; their rows are shared, none is copied."""
        self._end()
        other = copy.copy(self)
        other._rows, other._calls = self._new_ids(len(self._rows)), dict(self._calls)
        for source, row in zip(self._rows, other._rows, strict=True):
            self._cache.fork(source, row)
        other.layers = [
            other._layer(layer.index) if isinstance(layer, Layer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return other

    def __del__(self) -> None:
        if "layers" in vars(self):  # else it was never made; a copy may live on in the same blocks
            self._end()
            for row in self._rows:
                self._cache.clear(row)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the rows take, bookkeeping included; those of copies are among them."""
        return self._cache.nbytes

    def stats(self) -> dict[str, Any]:
        """What `kvcache.KVCache.stats` says, and how many layers were attended over by which means."""
        return {**self._cache.stats(), "calls": dict(self._calls)}
