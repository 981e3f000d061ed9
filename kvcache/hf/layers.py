"""The layers of an `HFCache`, for transformers, and the lazy tensors that they give to the model.

They hold no rows: the cache holds the rows of all layers.

With latent attention (MLA), the cache holds latents, and the attention reads them where they lie. A model gives the
cache latents, and expands them to a key and a value for every head. It multiplies them by a weight (``kv_b_proj``), and
appends to the keys the rotated elements, which all heads share. `expand` replaces that method by one that returns lazy
tensors, in which the attention finds the `Expansion`. The attention then multiplies the queries and its result by the
weight, not the latents, which gives the same numbers: ``q . (W latent) = (q W) . latent``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvcache.arguments import INT32_MAX
from kvcache.errors import NotSupportedError
from kvcache.hf.dense import Decoder, why_decoded
from kvcache.hf.lazy import LazyTensor
from kvcache.hf.passes import ForwardPass, Passes
from kvcache.hf.policies import Part
from kvcache.policy import ChunkedAttention, SlidingWindow, window_of

FLOATS = {torch.float32, torch.float16, torch.bfloat16}  # types of what a model brings


class Rows(LazyTensor):
    """The keys, or the values, of `LayerRows`."""

    source: LayerRows
    part: int  # 0: the keys; 1: the values

    def make(self) -> torch.Tensor:
        """Decode all rows, and store the new ones."""
        return self.source.dense()[self.part]


@dataclass(eq=False)
class LayerRows:
    """All rows of a layer that a forward pass may see: those stored before it, and its new ones.

    The model gets two lazy tensors, the keys and the values. If they reach the attention as they are, the kernels store
    the new rows, and attend over all where they lie. If an operation of the model needs their elements, they are
    decoded.
    """

    layer: Layer
    this_pass: ForwardPass | None  # the pass that brought the new rows; None: there are none
    new: tuple[torch.Tensor, torch.Tensor] | None  # keys and values, [batch, heads, tokens, dim]
    num_columns: int  # of all rows, [batch, heads, columns, dim]
    seq_ids: Sequence[int] = ()  # the sequences of rows that no pass brought
    unknown: str = ""  # says what of a call the kernels do not know, once the attention "kvcache" has fallen back
    _dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def tensors(self, *shapes: Sequence[int]) -> tuple[Rows, Rows]:
        """Return the lazy tensors. They have the shapes of new keys and values, except for the number of columns."""
        kind, dtype = self.layer.tensor_type, self.layer.decoder.dtype
        make: Any = torch.Tensor._make_wrapper_subclass
        (batch_size, num_heads, _, k_dim), v_dim = shapes[0], shapes[1][3]
        keys = make(kind, (batch_size, num_heads, self.num_columns, k_dim), dtype=dtype)
        values = make(kind, (batch_size, num_heads, self.num_columns, v_dim), dtype=dtype)
        keys.source = values.source = self
        keys.part, values.part = 0, 1
        return keys, values

    def current_pass(self) -> ForwardPass:
        """Return the pass that the rows belong to; raise if it has ended."""
        if self.this_pass is None or self.this_pass is not self.layer.passes.last:
            raise RuntimeError(
                f"these keys and values of layer {self.layer.index} were those of a forward pass that has ended: read"
                " cache.layers[i].keys and .values"
            )
        return self.this_pass

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as dense tensors, for other kernels than ours. Store the new ones.

        They are a row for each column of the mask, ``[batch, heads, columns, dim]``.
        """
        if self._dense is None:
            self._dense = self._make_dense()
        return self._dense

    def _make_dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the rows, and say why the kernels do not read them; refuse if rows are to be selected."""
        layer, passes = self.layer, self.layer.passes
        passes.calls["fallback" if self.unknown else "dense"] += 1
        if self.unknown:
            passes.warn(f"{self.unknown}; using dense tensors")
        elif passes.num_selected is not None:
            why, remedy = why_decoded(passes.config)
            raise NotSupportedError(
                f"select={passes.num_selected}: no rows can be selected, because {why}:"
                f" {'kvcache.hf.enable(model, select=...), or ' if remedy else ''}leave select out"
            )
        if self.new is None:
            passes.finish()
            if self.seq_ids != passes.seq_ids:
                raise RuntimeError(
                    f"these keys and values of layer {layer.index} are of rows that the cache no longer has: read"
                    " cache.layers[i].keys and .values"
                )
            return layer.decode_stored(self.num_columns)
        with passes.turns.lock:  # until the rows are decoded, no other cache may end the pass
            this_pass = self.current_pass()
            this_pass.decoded.add(layer.index)
            if not self.unknown:
                this_pass.without_kernels.add(layer.index)
            if layer.index in this_pass.pending:
                passes.put(this_pass, layer.index)
            dense = layer.decode(*self.new)
        if len(this_pass.decoded) == this_pass.num_layers:
            reasons = ": ".join(filter(None, why_decoded(passes.config)))
            passes.warn(f"the rows of every layer are decoded in each step, because {reasons}")
        return dense


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise NotSupportedError if a cache takes no keys, values and queries of an element type."""
    if dtype not in FLOATS:
        raise NotSupportedError(
            f"{what} {dtype}: this cache takes torch.float32, torch.float16 and torch.bfloat16; first call"
            " model.to(torch.float32)"
        )


def check_new(*tensors: torch.Tensor) -> None:
    """Raise if a cache cannot take what a layer brings of new tokens."""
    for tensor in tensors:
        check_dtype(tensor.dtype, "the keys or values are of type")
    if not tensors[0].is_cpu:
        raise NotSupportedError(f"the keys are on {tensors[0].device}: this cache is for models on the CPU")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError("the keys require grad: call the model under torch.inference_mode(), or no_grad()")


class Layer(CacheLayerMixin):
    """A layer of a model's attention over its own tokens: layer `index` of the `KVCache`.

    `decoder` decodes rows for a model with an attention of its own; `follows_config` says whether the layer's window is
    the model's.
    """

    is_croppable = True
    supports_early_init = True
    is_source = False  # whether its rows are an encoder's
    tensor_type: type[Rows] = Rows  # what stands for its rows
    part = Part()  # what is kept of the layer of the model
    beside = 0  # the first layer of the `KVCache` for what lies beside the rows, if anything does

    def __init__(self, passes: Passes, decoder: Decoder, index: int, follows_config: bool) -> None:
        self.passes, self.decoder, self.index, self.follows_config = passes, decoder, index, follows_config
        own = passes.layers[index]
        policy = own.policy
        self.num_selected = passes.num_selected if own.sketch else None  # the rows that a token selects
        self.window = window_of(policy)  # the most tokens that a query sees; 0: all
        self.most_past = self.window - 1 if self.window else INT32_MAX  # tokens before a pass in the pass's mask
        self.is_sliding = self.window > 0
        self.is_chunked = isinstance(policy, ChunkedAttention)
        self.num_sink_tokens = policy.num_sink_tokens if isinstance(policy, SlidingWindow) else 0
        self.k_shape = own.num_kv_heads, own.head_dim
        is_single = own.value_in_key or not own.v_head_dim  # whether keys are all that `pack` makes
        self.v_shape = self.k_shape if is_single else (own.num_kv_heads, own.v_head_dim)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override] # the base has an attribute, which nothing sets
        """Whether the cache holds tokens."""
        return self.get_seq_length() > 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override] # as above
        """The stored keys, decoded, ``[batch, heads, tokens, dim]``; None before the first pass."""
        rows = self._stored()
        return None if rows is None else rows[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override] # as above
        """The stored values, decoded, ``[batch, heads, tokens, dim]``; None before the first pass."""
        rows = self._stored()
        return None if rows is None else rows[1]

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        self.passes.finish()
        if not self.passes.seq_ids:
            return None
        columns = min(self.passes.num_seen, self.most_past)
        return self.unpack(*self.decode_stored(columns))

    def decode_stored(self, num_columns: int, num_new: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the rows of the last columns, as `Decoder.decode_rows` does; raise if tokens between were evicted."""
        passes = self.passes
        if passes.has_gaps:
            raise NotSupportedError(
                "tokens were evicted: only the attention 'kvcache' knows which rows are left, and the model has another"
                " one, or computes with the rows first: kvcache.hf.enable(model)"
            )
        return self.decoder.decode_rows(self.index, passes.seq_ids, num_columns, num_new)

    def decode(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the rows of earlier passes, and append the new rows unchanged."""
        num_seen = self.passes.num_seen
        if self.num_sink_tokens and num_seen + k.shape[2] > self.window:
            raise NotSupportedError("sink tokens lie apart from the window: only the attention 'kvcache' sees both")
        columns = min(num_seen, self.most_past)
        dense = self.unpack(*self.decode_stored(columns, k.shape[2]))
        for wide, new in zip(dense, (k, v), strict=True):
            wide[:, :, columns:] = new
        return dense

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make rows as the cache takes them of the keys and values that the model gives."""
        return k, v

    def unpack(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make keys and values as the model takes them of rows."""
        return k, v

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: there is nothing to initialise."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new tokens' keys and values ``[batch, heads, tokens, dim]``; return the attention's arguments.

        These are lazy tensors that stand for all rows of the layer. The attention ``"kvcache"`` attends over the rows
        where they lie; for any other attention, the first operation on the tensors decodes them.
        """
        k, v = key_states, value_states
        if not k.is_cpu or k.dtype not in FLOATS or torch.is_grad_enabled():
            check_new(k, v)
        rows = self.pack(k, v)
        if rows[0].shape[1::2] != self.k_shape or rows[-1].shape[1::2] != self.v_shape:
            self._refuse_shapes(rows)
        this_pass = self.passes.reach(self.index, rows)
        self.decoder.dtype = k.dtype
        past = 0 if self.is_source else min(self.passes.num_seen, self.most_past)
        return LayerRows(self, this_pass, (k, v), past + k.shape[2]).tensors(k.shape, v.shape)

    def _refuse_shapes(self, rows: tuple[torch.Tensor, ...]) -> NoReturn:
        """Raise ValueError for rows of other shapes than the config says."""
        is_key = rows[0].shape[1::2] != self.k_shape
        what, given = ("keys", rows[0]) if is_key else ("values", rows[-1])
        heads, dim = self.k_shape if is_key else self.v_shape
        raise ValueError(
            f"layer {self.index} of the model brings {what} of shape {tuple(given.shape)}, and the config that this"
            f" cache was made from says {heads} heads of {dim} elements: give HFCache this model's config, model.config"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns in the mask of a pass, and the index of the first column's token."""
        seen = self.passes.length
        past = min(seen, self.most_past)
        return past + query_length, seen - past

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, padding included."""
        return self.passes.length

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    @property
    def batch_size(self) -> int:
        """The number of sequences in the batch; -1 before the end of a first pass."""
        return self.passes.batch_size


class CrossLayer(Layer):
    """A layer of attention over an encoder. Its rows are stored in the first pass, and only read from then on."""

    is_source = True
    _values: Rows | None = None  # values fetched with the keys: transformers reads `keys`, then `values`

    def decode(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new rows: there are no others."""
        return k, v

    def get_seq_length(self) -> int:
        """Return the number of the encoder's rows. It is 0 until a first pass has gone through all layers."""
        passes = self.passes
        passes.finish()
        return passes.cache.seq_len(passes.seq_ids[0], layer=self.index) if passes.seq_ids else 0

    @property
    def keys(self) -> Rows:  # type: ignore[override] # the base has an attribute, which nothing sets
        """The keys that the model passes to its attention."""
        keys, self._values = self._fetch()
        return keys

    @property
    def values(self) -> Rows:  # type: ignore[override] # as above
        """The values for the keys that were read last, if the cache still has their rows."""
        values, self._values = self._values, None
        if values is None or values.source.seq_ids != self.passes.seq_ids:
            _, values = self._fetch()
        return values

    def _fetch(self) -> tuple[Rows, Rows]:
        """Return the keys and values of the attention over an encoder from the second pass on."""
        num_columns = self.get_seq_length()
        seq_ids = self.passes.seq_ids
        if not seq_ids:
            raise RuntimeError("nothing was stored of an encoder: run the decoder with what the encoder made first")
        own = self.passes.layers[self.index]
        shape = len(seq_ids), own.num_kv_heads, num_columns
        rows = LayerRows(self, None, None, num_columns, seq_ids)
        return rows.tensors((*shape, own.head_dim), (*shape, own.v_head_dim))


class MixedLayer(LinearAttentionLayer, Layer):  # type: ignore[override] # one base has an attribute, one a property
    """A layer with a recurrent state beside its keys and values."""

    is_compileable = False

    def __init__(self, number_of_states: int, *args: Any) -> None:
        Layer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states)

    def copy_state(self, other: MixedLayer) -> None:
        """Take a copy of another layer's state."""
        for name in vars(LinearAttentionLayer()):
            setattr(self, name, copy.deepcopy(getattr(other, name)))


class Latents(Rows):
    """The latents, or the rotated elements, of `LayerRows`."""


class LatentLayer(Layer):
    """A layer of latent attention. The model gives latents as keys and rotated elements as values; a row has both."""

    tensor_type = Latents

    def pack(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Append the rotated elements to the latents."""
        return (torch.cat((k, v), -1),)

    def unpack(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and rotated elements."""
        return v, k[..., v.shape[-1] :]


class Expanded(LazyTensor):
    """The keys, or the values, that a model makes of latents."""

    expansion: Expansion
    part: int  # 0: the keys; 1: the values

    def make(self) -> Tensor:
        """Expand the latents as the model does."""
        return self.expansion.own()[self.part]


class Expansion(NamedTuple):
    """The keys and values that a model makes of a layer's latents."""

    rows: LayerRows
    weight: Tensor  # [heads, elements of an unrotated key and of a value, elements of a latent]
    num_unrotated: int  # elements of a key
    own: Callable[[], tuple[Tensor, Tensor]]  # makes them

    @staticmethod
    def of(key: Tensor, value: Tensor) -> Expansion | None:
        """Return what keys and values are; None: they were made, or are others."""
        if not isinstance(key, Expanded) or not isinstance(value, Expanded):
            return None
        is_lazy = key.made is None and value.made is None
        is_pair = key.expansion is value.expansion and (key.part, value.part) == (0, 1)
        return key.expansion if is_lazy and is_pair else None

    def absorb(self, query: Tensor) -> Tensor:
        """Make queries for the cache's rows of queries for the keys, both ``[batch, heads, tokens, elements]``."""
        n = self.num_unrotated
        return torch.cat((query[..., :n] @ self.weight[:, :n], query[..., n:]), -1)

    def expand(self, result: Tensor) -> Tensor:
        """Make the attention's result of a sum of latents; both are ``[batch, tokens, heads, elements]``."""
        to_values = self.weight[:, self.num_unrotated :].transpose(1, 2)
        return (result.transpose(1, 2) @ to_values).transpose(1, 2)


def expand(
    own: Callable[[], tuple[Tensor, Tensor]], attention: Any, *, kv_nope: Tensor, k_rot: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do what the method `expand_kv` of an attention does, later if it must."""
    projection = attention.kv_b_proj
    if not (isinstance(kv_nope, Latents) and isinstance(k_rot, Latents) and _is_plain(projection)):
        return own()
    if kv_nope.made is not None or k_rot.made is not None:
        return own()
    n, v_dim = attention.qk_nope_head_dim, attention.v_head_dim
    weight = projection.weight.view(-1, n + v_dim, kv_nope.shape[3])
    expansion = Expansion(kv_nope.source, weight, n, functools.cache(own))
    shape = len(kv_nope), len(weight), kv_nope.shape[2]
    key = Expanded.of_shape((*shape, n + k_rot.shape[3]), kv_nope.dtype)
    value = Expanded.of_shape((*shape, v_dim), kv_nope.dtype)
    key.expansion = value.expansion = expansion
    key.part, value.part = 0, 1
    return key, value


def _is_plain(projection: Any) -> bool:
    """Whether a module multiplies by its weight, and does nothing else."""
    return (
        type(projection) is torch.nn.Linear
        and projection.bias is None
        and type(projection.weight) is torch.nn.Parameter
        and not (projection._forward_hooks or projection._forward_pre_hooks)
        and "forward" not in vars(projection)
    )
