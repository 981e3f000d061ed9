"""Check the arguments of `KVCache` that take one value for all layers or one per layer, and make `Layer` of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

import numpy as np

from kvcache import _core
from kvcache._core import integer
from kvcache.policy import ChunkedAttention, CrossAttention, Policy, SlidingWindow
from kvcache.rope import Rope, RopeFunction, RopeLike

__all__ = [
    "DTYPES",
    "DType",
    "FloatDType",
    "Layer",
    "Transform",
    "bytes_of_token",
    "count",
    "dtypes_for",
    "make_layers",
    "stored_as",
    "suits",
]

FloatDType: TypeAlias = Literal["f32", "f16", "bf16"]
DType: TypeAlias = Literal[FloatDType, "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
DTYPES: tuple[DType, ...] = get_args(DType)
Transform: TypeAlias = Literal["hadamard"]
T = TypeVar("T")

# The core's limits, checked here so that messages name Python's arguments.
MAX_LAYERS = 1 << 20
MAX_DIM = 1 << 20
MAX_ORDER = 1024  # of the Hadamard matrix that keys are multiplied by


def suits(dtype: DType, dim: int) -> bool:
    """Whether rows of `dim` elements can be stored in a type: quantised types store 32 elements at a time."""
    return dtype in get_args(FloatDType) or dim % 32 == 0


def stored_as(dtype: DType, transform: Transform | None) -> str:
    """Return what rows are stored as, in words; a transform is of no effect where the type is not quantised."""
    return dtype if transform is None or suits(dtype, 1) else f"{transform} {dtype}"


def dtypes_for(*dims: int) -> list[DType]:
    """Return the types that can store rows of every one of these sizes."""
    return [dtype for dtype in DTYPES if all(suits(dtype, dim) for dim in dims)]


def bytes_of_token(
    num_kv_heads: int, head_dim: int, v_head_dim: int, k_dtype: DType, v_dtype: DType, value_in_key: bool = False
) -> int:
    """Return the bytes of a token's rows in one layer."""
    row = _core.bytes_of_row(_core.TYPES[k_dtype], head_dim)
    if not value_in_key:
        row += _core.bytes_of_row(_core.TYPES[v_dtype], v_head_dim)
    return num_kv_heads * row


class Layer(NamedTuple):
    """The shape, types and policy of one layer."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    k_dtype: DType
    v_dtype: DType
    policy: Policy | None
    value_in_key: bool
    rope: RopeLike
    k_transform: Transform | None = None
    v_transform: Transform | None = None
    share: int | None = None

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}/{self.v_head_dim}"
        k_type, v_type = stored_as(self.k_dtype, self.k_transform), stored_as(self.v_dtype, self.v_transform)
        types = k_type if v_type == k_type else f"{k_type}/{v_type}"
        words = [f"{count(self.num_kv_heads, 'KV head')} x {dims}", types]
        words.append("no attention" if self.policy is None else repr(self.policy))
        if self.value_in_key:
            words.append("values in keys")
        if self.rope is False:
            words.append("no rotation")
        elif self.rope is not None:
            words.append(repr(self.rope) if isinstance(self.rope, Rope) else "rope function")
        if self.share is not None:
            words.append("reads another's rows")
        return ", ".join(words)

    def most_bytes(self, num_tokens: int, batch_tokens: int = 0) -> int:
        """Return the most bytes of rows that a sequence of `num_tokens` tokens can hold.

        `batch_tokens` of them are those of a batch that is still open: windows let go of none of these before it ends.
        """
        policy = self.policy
        if policy is None or self.share is not None:
            return 0
        if isinstance(policy, CrossAttention):
            num_tokens = policy.max_len
        elif isinstance(policy, SlidingWindow):
            kept = (policy.resume_window or policy.window) + policy.num_sink_tokens
            num_tokens = min(num_tokens, kept + batch_tokens)
        elif isinstance(policy, ChunkedAttention):
            kept = policy.attention_chunk_size + (policy.resume_window or 0)
            num_tokens = min(num_tokens, kept + batch_tokens)
        return num_tokens * bytes_of_token(*self[:5], self.value_in_key)

    def for_core(self) -> _core._LayerTuple:
        """Return the layer as the core takes it."""
        rope: Any = self.rope
        if isinstance(rope, Rope):
            rope = rope.inv_freq, rope.interleaved, rope.first_dim
        return (
            (self.num_kv_heads, self.head_dim, self.v_head_dim),
            (_core.TYPES[self.k_dtype], _core.TYPES[self.v_dtype]),
            (_core.TRANSFORMS[self.k_transform], _core.TRANSFORMS[self.v_transform]),
            self.value_in_key,
            0 if self.share is None else self.share + 1,
            _core_policy(self.policy),
            rope,
        )


def make_layers(
    num_layers: Any,
    num_kv_heads: Any,
    head_dim: Any,
    v_head_dim: Any,
    value_in_key: Any,
    dtype: Any,
    k_dtype: Any,
    v_dtype: Any,
    policy: Any,
    share: Any,
    rope: Any,
    k_transform: Any = None,
    v_transform: Any = None,
) -> list[Layer]:
    """Make the layers from the arguments of `KVCache` with these names; raise an error that names a wrong argument."""
    n = integer(num_layers, "num_layers", 1, MAX_LAYERS)
    k_dims = _per_layer(head_dim, "head_dim", n, _dim)
    dtypes = _per_layer(dtype, "dtype", n, _dtype)
    layers = list(
        map(
            Layer,
            _per_layer(num_kv_heads, "num_kv_heads", n, _dim),
            k_dims,
            k_dims if v_head_dim is None else _per_layer(v_head_dim, "v_head_dim", n, _dim),
            dtypes if k_dtype is None else _per_layer(k_dtype, "k_dtype", n, _dtype),
            dtypes if v_dtype is None else _per_layer(v_dtype, "v_dtype", n, _dtype),
            _per_layer(policy, "policy", n, _policy),
            _per_layer(value_in_key, "value_in_key", n, _bool),
            _per_layer(rope, "rope", n, _rope),
            _per_layer(k_transform, "k_transform", n, _transform),
            _per_layer(v_transform, "v_transform", n, _transform),
        )
    )
    for i, layer in enumerate(layers):
        k_name = _name("head_dim", head_dim, i)
        v_name = k_name if v_head_dim is None else _name("v_head_dim", v_head_dim, i)
        _check_dim(k_name, layer.head_dim, layer.k_dtype, "keys")
        _check_dim(v_name, layer.v_head_dim, layer.v_dtype, "values")
        if layer.value_in_key:
            _check_value_in_key(layer, v_name)
        if isinstance(layer.rope, Rope):
            _check_rope(layer.rope, layer, i)
    if share is not None:
        _share(layers, share)
    return layers


def _per_layer(value: Any, name: str, num_layers: int, convert: Callable[[Any, str], T]) -> list[T]:
    """Return a list of one value per layer, from one value for all layers or a sequence."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [convert(value, name)] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"len({name})={len(value)}: must be num_layers, which is {num_layers}")
    return [convert(one, f"{name}[{layer}]") for layer, one in enumerate(value)]


def _dim(value: Any, name: str) -> int:
    return integer(value, name, 1, MAX_DIM)


def _dtype(value: Any, name: str) -> DType:
    if isinstance(value, str) and value in DTYPES:
        return value
    raise ValueError(f"{name}={value!r}: must be {', '.join(map(repr, DTYPES[:-1]))} or {DTYPES[-1]!r}")


def _transform(value: Any, name: str) -> Transform | None:
    if value is None or (isinstance(value, str) and value in _core.TRANSFORMS):
        return cast(Transform | None, value)
    raise ValueError(f"{name}={value!r}: must be 'hadamard' or None")


def _bool(value: Any, name: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name}={value!r}: must be True or False")


def _policy(value: Any, name: str) -> Policy | None:
    if value is None or isinstance(value, Policy):
        return value
    raise TypeError(
        f"{name}={value!r}: must be a FullAttention, a SlidingWindow, a ChunkedAttention, a CrossAttention or None"
    )


def _rope(value: Any, name: str) -> RopeLike:
    if value is None or value is False or isinstance(value, Rope):
        return value
    if callable(value) and not isinstance(value, type):
        return cast(RopeFunction, value)
    raise TypeError(f"{name}={value!r}: must be a Rope, False (no rotation), a function, or None (not told)")


def _check_dim(name: str, dim: int, dtype: DType, what: str) -> None:
    if not suits(dtype, dim):
        raise ValueError(f"{name}={dim}: must be a multiple of 32 where {what} are stored as {dtype}")


def _check_value_in_key(layer: Layer, v_name: str) -> None:
    if layer.v_head_dim > layer.head_dim:
        raise ValueError(
            f"{v_name}={layer.v_head_dim}: must be at most head_dim, which is {layer.head_dim}, where values lie in "
            "the keys (value_in_key)"
        )
    if layer.v_dtype != layer.k_dtype:
        raise ValueError(
            f"v_dtype={layer.v_dtype!r}: must be k_dtype, which is {layer.k_dtype!r}, where values lie in the keys "
            "(value_in_key)"
        )
    if layer.v_transform != layer.k_transform:
        raise ValueError(
            f"v_transform={layer.v_transform!r}: must be k_transform, which is {layer.k_transform!r}, where values lie "
            "in the keys (value_in_key)"
        )
    order = min(layer.head_dim & -layer.head_dim, MAX_ORDER)
    if layer.k_transform is not None and layer.v_head_dim % order and not suits(layer.k_dtype, 1):
        raise ValueError(
            f"{v_name}={layer.v_head_dim}: must be a multiple of {order}, the largest power of two that divides "
            "head_dim, where values lie in keys (value_in_key) that are transformed"
        )


def _check_rope(rope: Rope, layer: Layer, i: int) -> None:
    end = rope.first_dim + 2 * len(rope.inv_freq)
    if end > layer.head_dim:
        raise ValueError(
            f"rope={rope}: rotates the elements {rope.first_dim} to {end - 1} of a key, and there are {layer.head_dim} "
            f"(head_dim of layer {i})"
        )
    if layer.value_in_key and rope.first_dim < layer.v_head_dim:
        raise ValueError(
            f"rope={rope}: rotates elements from {rope.first_dim} on, and the first {layer.v_head_dim} are the values "
            f"(value_in_key of layer {i}); first_dim must be at least that"
        )


def _share(layers: list[Layer], share: Any) -> None:
    """Set the layer whose rows each layer reads."""
    if isinstance(share, str) or not isinstance(share, Sequence):
        raise TypeError(f"share={share!r}: must be None, or a sequence of one layer or None for each layer")
    owners = _per_layer(share, "share", len(layers), lambda one, name: _index(one, name, len(layers)))
    for i, owner in enumerate(owners):
        if owner is None:
            continue
        if owners[owner] is not None:
            whose = "itself" if owner == i else f"those of layer {owners[owner]}"
            raise ValueError(f"share[{i}]={owner}: layer {owner} has no rows of its own: it shares {whose}")
        for name, mine, its in zip(Layer._fields, layers[i], layers[owner], strict=True):
            if name != "share" and mine != its:
                raise ValueError(f"share[{i}]={owner}: {name} of both must be the same, not {mine!r} and {its!r}")
        layers[i] = layers[i]._replace(share=owner)


def _index(value: Any, name: str, num_layers: int) -> int | None:
    return None if value is None else integer(value, name, 0, num_layers - 1)


def _name(name: str, value: Any, layer: int) -> str:
    """Return what messages call a layer's value: the argument's name, with an index if it is a sequence."""
    return name if isinstance(value, str) or not isinstance(value, Sequence) else f"{name}[{layer}]"


def _core_policy(policy: Policy | None) -> tuple[int, int, int, int, int, int]:
    """Return kind, window, num_sink_tokens, attention_chunk_size, resume_window, max_len; 0 if the kind has none."""
    match policy:
        case SlidingWindow(window, sinks, resume):
            return _core.POLICIES["sliding"], window, sinks, 0, resume or window, 0
        case ChunkedAttention(size, resume):
            return _core.POLICIES["chunked"], 0, 0, size, resume or 0, 0
        case CrossAttention(max_len):
            return _core.POLICIES["cross"], 0, 0, 0, 0, max_len
        case None:
            return _core.POLICIES["none"], 0, 0, 0, 0, 0
    return _core.POLICIES["full"], 0, 0, 0, 0, 0


def count(n: int, what: str) -> str:
    """Return "1 layer", "2 layers"."""
    return f"{n} {what}{'' if n == 1 else 's'}"
