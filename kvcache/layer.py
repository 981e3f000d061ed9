"""`Layer`, which says what a cache stores of one layer; and layers made of the arguments of `KVCache`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar, cast, get_args

import numpy as np

from kvcache import _core
from kvcache._core import INT32_MAX, integer
from kvcache.arguments import spelt
from kvcache.errors import NotSupportedError
from kvcache.policy import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    Policy,
    SlidingWindow,
    most_rows,
    window_of,
    written,
)
from kvcache.rope import Rope, RopeFunction, RopeLike

T = TypeVar("T")
FloatDType: TypeAlias = Literal["f32", "f16", "bf16"]
DType: TypeAlias = Literal[FloatDType, "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4"]
DTYPES: tuple[DType, ...] = get_args(DType)
Transform: TypeAlias = Literal["hadamard"]
OTHER_NAMES: dict[str, FloatDType] = {"float32": "f32", "float16": "f16", "half": "f16", "bfloat16": "bf16"}


class TorchDType(Protocol):
    """An element type of PyTorch."""

    is_floating_point: bool
    is_complex: bool
    itemsize: int


# Element types as other libraries and model files name them, beside the names of this package.
FloatDTypeLike: TypeAlias = (
    FloatDType | Literal["float32", "float16", "half", "bfloat16"] | TorchDType | np.dtype[Any] | type[np.generic]
)
DTypeLike: TypeAlias = DType | FloatDTypeLike


def to_dtype(value: Any, name: str, among: Sequence[DType] = DTYPES) -> DType:
    """Return the name of an element type, of which torch, NumPy and model files have others.

    Raise ``ValueError`` that names the argument `name`, unless the type is in `among`.
    """
    known: str | None = None
    if isinstance(value, str):
        known = OTHER_NAMES.get(value.removeprefix("torch."), str(value))
    elif isinstance(value, np.dtype) and value.isnative:
        known = OTHER_NAMES.get(value.name)
    elif isinstance(value, type) and issubclass(value, np.generic):  # such as ml_dtypes.bfloat16
        known = OTHER_NAMES.get(value.__name__)
    elif type(value).__module__ == "torch":  # not imported here
        known = OTHER_NAMES.get(str(value).removeprefix("torch."))
    if known in among:
        return cast(DType, known)
    raise ValueError(f"{name}={value!r}: must be {', '.join(map(repr, among[:-1]))} or {among[-1]!r}")


# The core's limits, checked here so that messages name Python's arguments.
MAX_LAYERS = 1 << 20
SKETCH_BITS = 2
LEAST_SKETCHED = 8192  # positions that queries of a layer with sketches see, at least
MAX_DIM = 1 << 20
MAX_ORDER = 1024  # of the Hadamard matrix that keys are multiplied by
ALWAYS_TRANSFORMED = ("int6", "int4")


def suits(dtype: DType, dim: int) -> bool:
    """Whether rows of `dim` elements can be stored in a type: quantised types store 32 elements at a time."""
    return dtype in get_args(FloatDType) or dim % 32 == 0


def stored_as(dtype: DType, transform: Transform | None) -> str:
    """Return what rows are stored as, in words; a transform is of no effect where the type has its own, or none."""
    is_plain = transform is None or suits(dtype, 1) or dtype in ALWAYS_TRANSFORMED  # only floats suit a dim of 1
    return dtype if is_plain else f"{transform} {dtype}"


def order_of_keys(dtype: DType, transform: Transform | None, head_dim: int) -> int:
    """Return the order of the matrix that keys are multiplied by before they are stored; 1: by none."""
    is_transformed = dtype in ALWAYS_TRANSFORMED or (transform is not None and not suits(dtype, 1))
    return min(head_dim & -head_dim, MAX_ORDER) if is_transformed else 1


def why_not(dtype: DType, head_dim: int, v_head_dim: int, value_in_key: bool) -> str | None:
    """Return the reason why rows of these sizes cannot be stored in a type; None: they can."""
    for name, dim in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
        if not suits(dtype, dim):
            return f"{dtype} takes a {name} that is a multiple of 32, not {dim}"
    order = order_of_keys(dtype, None, head_dim)
    if value_in_key and v_head_dim % order:
        return f"{dtype} takes a v_head_dim that is a multiple of {order}, not {v_head_dim}, in keys of {head_dim}"
    return None


def dtypes_for(*dims: int) -> list[DType]:
    """Return the types that can store rows of all these sizes."""
    return [dtype for dtype in DTYPES if all(suits(dtype, dim) for dim in dims)]


def bytes_of_token(
    num_kv_heads: int, head_dim: int, v_head_dim: int, k_dtype: DType, v_dtype: DType, value_in_key: bool = False
) -> int:
    """Return the bytes of a token's rows in one layer."""
    row = _core.bytes_of_row(_core.TYPES[k_dtype], head_dim)
    if v_head_dim and not value_in_key:
        row += _core.bytes_of_row(_core.TYPES[v_dtype], v_head_dim)
    return num_kv_heads * row


@spelt
@dataclass(frozen=True, init=False)
class Layer:
    """The rows that a cache stores for one layer: their shape and types, and which of them it keeps.

    Parameters
    ----------
    num_kv_heads : int
        The number of KV heads.
    head_dim : int
        The number of elements of one key of one head.
    v_head_dim : int, optional
        The number of elements of one value of one head; by default `head_dim`. 0: the layer holds keys alone, such as
        the index keys of a model with sparse attention. Give it the policy of the layer that it belongs to. `Batch.put`
        takes no values for it, `KVCache.gather` returns values of width 0, and `Batch.attend` raises
        `NotSupportedError`.
    value_in_key : bool, default False
        Whether a value is the first `v_head_dim` elements of its key, and stored once, as in multi-head latent
        attention [1]_. `Batch.attend` must then be given a `scale`.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4"}, optional
        The type of stored rows, by default "f16". Those from q8_0 on need a `head_dim` that is a multiple of 32: ggml's
        blocks of 32 elements, in 18 to 34 bytes, and int8, int6 and int4, with one scale for a row of one head. The
        first three are also taken as PyTorch and NumPy name them: ``torch.bfloat16``, ``np.float16``, ``"float32"``.
    k_dtype, v_dtype : as `dtype`, optional
        The type of keys, or of values, if not `dtype`. In a layer of keys alone, `v_dtype` and `v_transform` are
        ignored, and equal those of the keys.
    k_transform, v_transform : {"hadamard", None}, optional
        How quantised keys, or values, are transformed before they are stored. "hadamard": each block of elements is
        multiplied by an orthonormal Hadamard matrix, which makes elements that share a scale about equally large, so
        that q4_0 and the like lose less [2]_. Rows are handed out transformed back, except raw ones. f32, f16 and bf16
        are stored as given; int6 and int4 are always transformed, in their own way. By default None.
    policy : FullAttention, SlidingWindow, ChunkedAttention, CrossAttention or None
        The positions that a query may see, and so the rows that are kept; by default `FullAttention`. None: the layer
        has no attention, and holds nothing.
    share : int, optional
        The index in the cache of the layer whose rows this one reads, which must be equal in all else and have rows of
        its own; None: the layer reads its own rows.
    rope : Rope, False or callable, optional
        The rotation of keys by their position. None, the default: unknown, so tokens cannot be moved. False: keys carry
        no rotation. A callable takes ``(layer, keys, delta)``, where `keys` are f32 ``[num_kv_heads, n, head_dim]``,
        and returns the keys moved by `delta` positions.
    sketch : bool, default False
        Whether a sketch of each key is kept beside it, so that `Batch.attend` can `select` rows: ``head_dim / 4 + 2``
        bytes for a KV head. `head_dim` must be a multiple of 32, at most 1024. A layer of keys alone, one whose values
        lie in the keys, and one whose queries see fewer than 8192 positions has none.

    Raises
    ------
    ValueError
        If a number is out of range, a name is unknown, or arguments contradict each other.
    TypeError
        If an argument has the wrong type: a float or a bool is no integer.

    Notes
    -----
    A layer has these arguments as attributes, but for `dtype`, which `k_dtype` and `v_dtype` stand for.
    ``dataclasses.replace(layer, policy=SlidingWindow(64))`` makes another one.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model",
       arXiv:2405.04434, 2024.
    .. [2] S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv:2404.00456, 2024.

    Examples
    --------
    Windows in three layers of four:

    >>> full = kvcache.Layer(8, 128, dtype="q8_0")
    >>> window = kvcache.Layer(8, 128, dtype="q8_0", policy=kvcache.SlidingWindow(4096))
    >>> cache = kvcache.KVCache([window, window, window, full] * 8)
    >>> cache.num_layers, cache.layers[4].policy.window, window.most_bytes(131072)
    (32, 4096, 8912896)
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    k_dtype: DType
    v_dtype: DType
    policy: Policy | None
    value_in_key: bool
    rope: RopeLike
    k_transform: Transform | None
    v_transform: Transform | None
    share: int | None
    sketch: bool

    def __init__(
        self,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        *,
        v_head_dim: SupportsIndex | None = None,
        value_in_key: bool = False,
        dtype: DTypeLike | None = None,
        k_dtype: DTypeLike | None = None,
        v_dtype: DTypeLike | None = None,
        k_transform: Transform | None = None,
        v_transform: Transform | None = None,
        policy: Policy | None = FullAttention(),  # noqa: B008  (frozen)
        share: SupportsIndex | None = None,
        rope: RopeLike = None,
        sketch: bool = False,
    ) -> None:
        if dtype is not None and k_dtype is not None and v_dtype is not None:  # as from dataclasses.replace
            raise ValueError(f"dtype={dtype!r}: k_dtype and v_dtype are given; give these two, or dtype alone")
        default = "f16" if dtype is None else to_dtype(dtype, "dtype")
        k_dim = _dim(head_dim, "head_dim")
        values = {
            "num_kv_heads": _dim(num_kv_heads, "num_kv_heads"),
            "head_dim": k_dim,
            "v_head_dim": k_dim if v_head_dim is None else _dim(v_head_dim, "v_head_dim", least=0),
            "k_dtype": default if k_dtype is None else to_dtype(k_dtype, "k_dtype"),
            "v_dtype": default if v_dtype is None else to_dtype(v_dtype, "v_dtype"),
            "policy": _policy(policy, "policy"),
            "value_in_key": _bool(value_in_key, "value_in_key"),
            "rope": _rope(rope, "rope"),
            "k_transform": to_transform(k_transform, "k_transform"),
            "v_transform": to_transform(v_transform, "v_transform"),
            "share": None if share is None else integer(share, "share", 0, MAX_LAYERS - 1),
            "sketch": _bool(sketch, "sketch"),
        }
        if not values["v_head_dim"]:  # keys alone
            values |= {"v_dtype": values["k_dtype"], "v_transform": values["k_transform"]}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        v_name = "head_dim" if v_head_dim is None else "v_head_dim"
        _check_dim("head_dim", self.head_dim, self.k_dtype, "keys")
        _check_dim(v_name, self.v_head_dim, self.v_dtype, "values")
        if self.value_in_key:
            _check_value_in_key(self, v_name)
        if self.sketch:
            _check_sketch(self)
        if isinstance(self.rope, Rope):
            _check_rope(self.rope, self)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.v_head_dim in (0, self.head_dim) else f"{self.head_dim}/{self.v_head_dim}"
        k_type, v_type = stored_as(self.k_dtype, self.k_transform), stored_as(self.v_dtype, self.v_transform)
        types = k_type if v_type == k_type else f"{k_type}/{v_type}"
        words = [f"{count(self.num_kv_heads, 'KV head')} x {dims}", types]
        words.append("no attention" if self.policy is None else repr(self.policy))
        if self.value_in_key:
            words.append("values in keys")
        if not self.v_head_dim:
            words.append("keys alone")
        if self.rope is False:
            words.append("no rotation")
        elif self.rope is not None:
            words.append(repr(self.rope) if isinstance(self.rope, Rope) else "rope function")
        if self.sketch:
            words.append("sketches")
        if self.share is not None:
            words.append("reads another's rows")
        return ", ".join(words)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's rows; 0 if the layer has no attention, or reads another layer's rows."""
        if self.policy is None or self.share is not None:
            return 0
        rows = bytes_of_token(
            self.num_kv_heads, self.head_dim, self.v_head_dim, self.k_dtype, self.v_dtype, self.value_in_key
        )
        return rows + (self.num_kv_heads * (self.head_dim // 4 + 2) if self.sketch else 0)

    def most_bytes(self, num_tokens: SupportsIndex, batch_tokens: SupportsIndex = 0) -> int:
        """Return the most bytes of rows that a sequence of `num_tokens` tokens can hold.

        `batch_tokens` of them belong to an open batch: windows keep all of these until it ends.
        """
        tokens = integer(num_tokens, "num_tokens", 0, INT32_MAX)
        at_once = integer(batch_tokens, "batch_tokens", 0, INT32_MAX)
        return self.bytes_per_token * most_rows(self.policy, tokens, at_once)

    def for_core(self) -> _core._LayerTuple:
        """Return the layer as the core takes it."""
        rope: Any = self.rope
        if isinstance(rope, Rope):
            rope = rope.inv_freq, rope.interleaved, rope.first_dim
        v_dtype, v_transform = (self.v_dtype, self.v_transform) if self.v_head_dim else ("f32", None)
        return (
            (self.num_kv_heads, self.head_dim, self.v_head_dim),
            (_core.TYPES[self.k_dtype], _core.TYPES[v_dtype]),
            (_core.TRANSFORMS[self.k_transform], _core.TRANSFORMS[v_transform]),
            self.value_in_key,
            0 if self.share is None else self.share + 1,
            SKETCH_BITS if self.sketch else 0,
            _core_policy(self.policy),
            rope,
        )


class Sizes:
    """Adds up the bytes of layers; equal ones are counted once.

    Parameters
    ----------
    layers : sequence of Layer
        The layers of a cache.
    max_seq_len : int or None
        The most rows of a sequence in a layer; None: no limit.
    """

    def __init__(self, layers: Iterable[Layer], max_seq_len: int | None) -> None:
        layers = [*layers]
        self._kinds = Counter(once_for_each(lambda i: (layers[i].policy, layers[i].bytes_per_token), layers))
        self.max_seq_len = max_seq_len
        is_bound = max_seq_len is not None and self._bounds_batches(max_seq_len)
        self._limit = max_seq_len if is_bound else None  # of a batch, too

    def most_bytes(self, num_tokens: int, batch_tokens: int = 0) -> int:
        """Return the most bytes of rows that a sequence holds, as `Layer.most_bytes`."""
        tokens = num_tokens if self._limit is None else min(num_tokens, self._limit)
        return sum(
            number * nbytes * most_rows(policy, tokens, batch_tokens)
            for (policy, nbytes), number in self._kinds.items()
        )

    def _bounds_batches(self, limit: int) -> bool:
        """Whether a layer keeps more rows of `limit` + 1 tokens than of `limit`; else all let rows go by then."""
        return any(most_rows(policy, limit + 1) > most_rows(policy, limit) for policy, nbytes in self._kinds if nbytes)


FIELDS = tuple(field.name for field in fields(Layer))


def once_for_each(make: Callable[[int], T], *columns: Iterable[Any]) -> list[T]:
    """Return ``make(i)`` for each row i of some columns. Rows of the same objects share what is made for the first."""
    rows = [*zip(*columns, strict=True)]  # holds the objects, so that each has an id of its own
    made: dict[tuple[int, ...], T] = {}
    found = []
    for i, row in enumerate(rows):
        key = (*map(id, row),)
        if key not in made:
            made[key] = make(i)
        found.append(made[key])
    return found


# ---- the layers of a cache


def check_layers(layers: Any, given: Mapping[str, Any]) -> list[Layer]:
    """Return the layers given to `KVCache`. Raise if one is not a layer, or `given` has arguments of layers too."""
    if given:
        raise TypeError(f"{min(given)}: each Layer has its own; leave it out, or give num_layers, not a list of layers")
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise ValueError(f"num_layers: a list of {len(layers)} layers; must be from 1 to {MAX_LAYERS}")
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"layers[{i}]={layer!r}: must be a Layer")
    _check_shares(layers, "layers[{}].share")
    return list(layers)


def make_layers(num_layers: Any, given: Mapping[str, Any]) -> list[Layer]:
    """Make layers of the arguments of `KVCache` that take one value for all layers or one for each."""
    if isinstance(num_layers, Layer):
        raise TypeError(f"num_layers={num_layers!r}: must be a number, or a list of layers, such as [Layer(8, 128)]")
    n = integer(num_layers, "num_layers", 1, MAX_LAYERS)
    for name in ("num_kv_heads", "head_dim"):
        if name not in given:
            raise TypeError(f"{name} is not given: with a number of layers, num_kv_heads and head_dim are needed")
    return _build([{}] * n, {"dtype": "f16", **given})


def override(layers: Sequence[Layer], arguments: Mapping[str, Any]) -> tuple[list[Layer], dict[str, Any]]:
    """Replace what arguments of `KVCache` say of its layers; return these, and the other arguments."""
    given = {name: value for name, value in arguments.items() if name in PER_LAYER}
    others = {name: value for name, value in arguments.items() if name not in PER_LAYER}
    num_layers = others.pop("num_layers", len(layers))
    if integer(num_layers, "num_layers", 1, MAX_LAYERS) != len(layers):
        raise ValueError(f"num_layers={num_layers}: the model's cache has {count(len(layers), 'layer')}; leave it out")
    if not given:
        return list(layers), others
    own = once_for_each(lambda i: {name: getattr(layers[i], name) for name in FIELDS}, layers)
    return _build(own, given), others


def _build(own: Sequence[Mapping[str, Any]], given: dict[str, Any]) -> list[Layer]:
    """Make layers: `own` has the arguments of each.

    Arguments in `given`, for all layers or one per layer, replace these.
    """
    if given.get("share") is not None and not _is_sequence(given["share"]):
        raise TypeError(f"share={given['share']!r}: must be None, or a sequence of one layer or None for each layer")
    n = len(own)
    columns = {name: _per_layer(value, name, n) for name, value in given.items()}
    if "dtype" in given:
        named = columns.pop("dtype")
        dtypes = once_for_each(lambda i: to_dtype(named[i], _name("dtype", given["dtype"], i)), named)
        columns |= {name: dtypes for name in ("k_dtype", "v_dtype") if given.get(name) is None}

    def make(i: int) -> Layer:
        try:
            return Layer(**{**own[i], **{name: column[i] for name, column in columns.items()}})
        except (TypeError, ValueError) as error:
            name, _, rest = str(error).partition("=")
            if name in given:
                raise type(error)(f"{_name(name, given[name], i)}={rest}") from None
            raise

    layers = once_for_each(make, own, *columns.values())
    _check_shares(layers, "share[{}]")
    return layers


PER_LAYER = {*FIELDS, "dtype"}  # arguments of `KVCache`


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _per_layer(value: Any, name: str, num_layers: int) -> Sequence[Any]:
    """Return one value per layer, from one value for all layers or a sequence."""
    if not _is_sequence(value):
        return [value] * num_layers
    if len(value) != num_layers:
        raise ValueError(f"len({name})={len(value)}: must be num_layers, which is {num_layers}")
    return cast(Sequence[Any], value)


def _check_shares(layers: Sequence[Layer], name: str) -> None:
    """Raise unless each layer that shares rows reads a layer that has rows and is otherwise equal; name: of a share."""
    for i, layer in enumerate(layers):
        if layer.share is None:
            continue
        what = f"{name.format(i)}={layer.share}"
        if layer.share >= len(layers):
            raise ValueError(f"{what}: must be at most {len(layers) - 1}")
        owner = layers[layer.share]
        if owner.share is not None:
            whose = "itself" if layer.share == i else f"those of layer {owner.share}"
            raise ValueError(f"{what}: layer {layer.share} has no rows of its own: it shares {whose}")
        for field in FIELDS:
            mine, its = getattr(layer, field), getattr(owner, field)
            if field != "share" and mine != its:
                raise ValueError(f"{what}: {field} of both must be the same, not {mine!r} and {its!r}")


def _name(name: str, value: Any, layer: int) -> str:
    """Return what messages call a layer's value: the argument's name, with an index if it is a sequence."""
    return f"{name}[{layer}]" if _is_sequence(value) else name


# ---- the values of a layer


def _dim(value: Any, name: str, least: int = 1) -> int:
    return integer(value, name, least, MAX_DIM)


def to_transform(value: Any, name: str) -> Transform | None:
    """Return a transform; raise ``ValueError`` that says `name` if it is none."""
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
        raise ValueError(f"{name}={dim}: must be a multiple of 32 where {what} are stored as {dtype}; f16 takes any")


def _check_sketch(layer: Layer) -> None:
    if not layer.v_head_dim or layer.value_in_key:
        what = "values lie in the keys" if layer.value_in_key else "there are keys alone"
        raise NotSupportedError(f"sketch=True: {what}, and rows are selected where values are stored apart from keys")
    if layer.head_dim % 32 or layer.head_dim > 1024:
        raise ValueError(f"head_dim={layer.head_dim}: for sketches it must be a multiple of 32, at most 1024")
    policy = layer.policy
    sees = window_of(policy) or LEAST_SKETCHED
    if policy is not None and (isinstance(policy, CrossAttention) or sees < LEAST_SKETCHED):
        raise NotSupportedError(
            f"sketch=True: with policy={written(policy)} there is nothing to gain, as queries must see at least"
            f" {LEAST_SKETCHED} positions: leave sketch out"
        )
    if isinstance(policy, FullAttention) and policy.stride > 1:
        raise NotSupportedError(f"sketch=True: with policy={written(policy)}, not each token has a row to select")


def _check_value_in_key(layer: Layer, v_name: str) -> None:
    if not layer.v_head_dim:
        raise ValueError("v_head_dim=0: must be at least 1 where values lie in the keys (value_in_key)")
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
    order = order_of_keys(layer.k_dtype, layer.k_transform, layer.head_dim)
    if layer.v_head_dim % order:
        how = f"stored as {layer.k_dtype}" if layer.k_dtype in ALWAYS_TRANSFORMED else "transformed"
        raise ValueError(
            f"{v_name}={layer.v_head_dim}: must be a multiple of {order}, the largest power of two that divides "
            f"head_dim, where values lie in keys (value_in_key) that are {how}"
        )


def _check_rope(rope: Rope, layer: Layer) -> None:
    end = rope.first_dim + 2 * len(rope.inv_freq)
    if end > layer.head_dim:
        raise ValueError(
            f"rope={rope}: rotates the elements {rope.first_dim} to {end - 1} of a key, and there are {layer.head_dim} "
            "(head_dim)"
        )
    if layer.value_in_key and rope.first_dim < layer.v_head_dim:
        raise ValueError(
            f"rope={rope}: rotates elements from {rope.first_dim} on, and the first {layer.v_head_dim} are the values "
            "(value_in_key); first_dim must be at least that"
        )


def _core_policy(policy: Policy | None) -> tuple[int, int, int, int, int, int, int]:
    """Return kind, window, num_sink_tokens, attention_chunk_size, resume_window, max_len, stride; 0 if it has none."""
    match policy:
        case SlidingWindow(window, sinks, resume):
            return _core.POLICIES["sliding"], window, sinks, 0, resume or window, 0, 0
        case ChunkedAttention(size, resume):
            return _core.POLICIES["chunked"], 0, 0, size, resume or 0, 0, 0
        case CrossAttention(max_len):
            return _core.POLICIES["cross"], 0, 0, 0, 0, max_len, 0
        case None:
            return _core.POLICIES["none"], 0, 0, 0, 0, 0, 0
        case FullAttention(stride):
            return _core.POLICIES["full"], 0, 0, 0, 0, 0, stride


def count(n: int, what: str) -> str:
    """Return "1 layer", "2 layers"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"
