"""Plan a model's cache: its memory by type and policy, what fits beside the weights, and how fast a machine decodes.

`make` computes the plan without allocating a cache, by `Layer.most_bytes`. The speed of decoding follows from the rates
at which a machine reads weights, and rows of each type, which `kvcache.tools.rates` measures or takes as given. Types
are written as on the command line: "int8", or "int6/int4" for keys and values. A `Row` is a line of the plan.
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcache import system
from kvcache.arguments import INT32_MAX
from kvcache.errors import KVCacheError, NotSupportedError, plain
from kvcache.layer import DTYPES, DType, Layer, Sizes, count, to_dtype
from kvcache.models import states
from kvcache.models.configuration import read_config
from kvcache.models.shapes import PREFILL_TOKENS, Shape
from kvcache.policy import CrossAttention, FullAttention, Policy, most_rows, written
from kvcache.selecting import rows_read, with_sketches
from kvcache.tools.rates import Kind, Rates
from kvcache.tools.weighing import weigh

MOST_TOKENS = INT32_MAX - 1
AS_IT_IS = "the model's own"
NO_ATTENTION = "no attention"
# Types that docs/choosing.md recommends. A stroke separates the types of keys and of values.
RECOMMENDED = "f16", "int8", "int6", "int6/int4", "int4"


@dataclass(frozen=True)
class Memory:
    """Free memory, and what it must hold beside the cache: weights, and the recurrent states of sequences."""

    free: int
    source: str  # where the figure comes from: the machine, a cgroup or the user
    weights: int | None = 0  # bytes; None: they are not counted
    weights_source: str = "there is no model"  # where this figure comes from, or why there is none
    num_parameters: int | None = None  # None: not counted
    weights_read: int | None = 0  # bytes that are read to decode a token; None: it is not known how many
    experts: int = 0  # bytes of weights of the experts among which tokens choose
    share_used: float = 1.0  # the share of the experts that a token goes through
    multiplied: int | None = 0  # parameters that a token is multiplied by; None: not counted
    head: int = 0  # parameters of the output among them
    states: int | None = 0  # bytes of the recurrent states of a sequence; None: they are not counted
    states_source: str = ""  # which layers have them, or why they are not counted

    def beside(self, sequences: int) -> int:
        """Return the bytes of weights and of states of `sequences`, as far as they are counted."""
        return (self.weights or 0) + sequences * (self.states or 0)

    def read_together(self, sequences: int) -> float | None:
        """Return the bytes of weights that are read to decode a token of each sequence at once; None: not known.

        Each token is taken to choose its experts at random. `experts` are bytes, `share_used` of which a token reads.
        """
        if self.weights_read is None:
            return None
        share = 1 - (1 - self.share_used) ** sequences  # of the experts, which one token or more goes through
        return self.weights_read + self.experts * (share - self.share_used)  # `weights_read` has those of one token


@dataclass(frozen=True)
class Group:
    """Layers of the cache with the same heads, sizes and policy."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    policy: str
    shares: bool  # whether the layers read other layers' rows, and store none
    bytes_per_token: dict[str, int]  # by type
    nbytes: dict[str, int]  # bytes of all sequences at full length
    beside: bool  # whether the layers lie beside layers of the model: index keys, what is pooled, cross-attention


@dataclass(frozen=True)
class Row:
    """The cost of one element type under one policy, or with selected rows."""

    policy: str  # of `variants`
    dtype: str  # or the types of keys and values, as in `RECOMMENDED`
    bytes_per_token: int  # before anything expires
    nbytes: int  # bytes of the rows of all sequences at full length
    needs: int  # bytes of rows, of weights and states as far as they are counted, and `prompt_nbytes`
    fits: bool | None  # whether all that fits; None: it does, and weights or states are not counted
    longest_context: int | None  # most tokens of each sequence that fit; None: no limit
    most_sequences: int | None  # most sequences of that context that fit; None: no limit
    tokens_per_second: float | None  # at most, of all sequences together at full length; None: it is not known
    prompt_nbytes: int  # more bytes while a prompt runs in pieces of PREFILL_TOKENS: windows hold an open batch, too
    read_nbytes: int  # bytes that attention reads to decode a token of one sequence of full length
    sketch_nbytes: int  # bytes of sketches, which `nbytes` counts, too
    num_selecting: int  # layers that have sketches


@dataclass(frozen=True)
class _Read:
    """The bytes that attention reads to decode a token, by type."""

    rows: Counter[tuple[Kind, DType]]  # of layers that read all rows that they see, or rows that an indexer chooses
    sketches: Counter[DType]  # by the keys' type
    selected: Counter[DType]  # rows that sketches select


@dataclass(frozen=True)
class Plan:
    """The plan of a model's cache on a machine."""

    model_type: str
    num_layers: int  # of the model; its cache may have more
    model_context: int | None  # context length of the training
    context: int
    sequences: int
    memory: Memory
    bandwidth: float | None  # bytes per second at which weights are read; None: no rates
    bandwidth_source: str | None
    groups: list[Group]
    rows: list[Row]
    left_out: list[str]  # why the table lacks some of the `RECOMMENDED` types


def make(
    shape: Shape,
    memory: Memory,
    *,
    context: int,
    sequences: int = 1,
    dtypes: Sequence[str] | None = None,
    window: Policy | None = None,
    select: int | None = None,
    rates: Rates | None = None,
) -> Plan:
    """Plan a model's cache on a machine with this `memory`; the plan has a row for each of `variants`, and each type.

    `sequences` of `context` tokens each are to be held, in each of `dtypes`, by default `usual_types`. `window` is a
    policy to plan with as well, in place of `FullAttention`; with `select`, decoding selects about so many rows.
    `rates` are the machine's.

    Raise `NotSupportedError` if no layer can select rows.
    """
    by_type = {stored: variants(shape, stored, window, select) for stored in dtypes or usual_types(shape)}
    own = {stored: made[AS_IT_IS] for stored, made in by_type.items()}
    rows = []
    for policy in next(iter(by_type.values())):
        for stored, made in by_type.items():
            read = _read(made[policy], shape, context, select)
            speed = _speed(read, memory, rates, sequences)
            rows.append(_row(policy, stored, made[policy], context, sequences, memory, read, speed))
    return Plan(
        shape.model_type,
        shape.num_layers,
        shape.max_seq_len,
        context,
        sequences,
        memory,
        bandwidth=None if rates is None else rates.memory,
        bandwidth_source=None if rates is None else rates.source,
        groups=_groups(own, shape.num_layers, context, sequences),
        rows=rows,
        left_out=_left_out(shape, [*by_type]),
    )


def _left_out(shape: Shape, dtypes: Sequence[str]) -> list[str]:
    """Return why a plan lacks recommended types; none if one that suits is missing, too: somebody chose the types."""
    why = {one: why_not(shape, one) for one in RECOMMENDED}
    is_chosen = any(reason is None and one not in dtypes for one, reason in why.items())
    return [] if is_chosen else [*dict.fromkeys(reason for reason in why.values() if reason)]


def variants(shape: Shape, stored: str, window: Policy | None, select: int | None) -> dict[str, list[Layer]]:
    """Return the layers to plan with, by name: the model's own, with a window, and with sketches.

    Raise `NotSupportedError` if rows are to be selected, and no layer can.
    """
    k_dtype, v_dtype = keys_and_values(stored)
    own = [replace(layer, k_dtype=k_dtype, v_dtype=v_dtype) for layer in shape.layers]
    made = {AS_IT_IS: own}
    if window is not None:
        made[written(window)] = [
            replace(layer, policy=window) if layer.policy == FullAttention() else layer for layer in own
        ]
    if select is not None:
        if any(layer.v_head_dim == 0 for layer in own):
            raise NotSupportedError(f"select={select}: this {plain(shape.model_type)} chooses rows by an indexer")
        made[f"select={select}"] = with_sketches(own, select)
    return made


def keys_and_values(stored: str) -> tuple[DType, DType]:
    """Return the types of keys and of values: "int6/int4" names both, and "int8" one for both.

    >>> keys_and_values("int6/int4"), keys_and_values("f16")
    (('int6', 'int4'), ('f16', 'f16'))
    """
    keys, stroke, values = stored.partition("/")
    return to_dtype(keys, "keys"), to_dtype(values if stroke else keys, "values")


def why_not(shape: Shape, stored: str) -> str | None:
    """Return the reason why a model cannot store rows as a type, or as types of keys and values; None: it can."""
    keys, values = keys_and_values(stored)
    if keys != values and any(layer.value_in_key for layer in shape.layers):
        return f"{stored}: values of this {plain(shape.model_type)} lie in its keys, and have their type"
    return shape.why_not(keys) or shape.why_not(values)


def usual_types(shape: Shape, model: Any = None) -> list[str]:
    """Return the type that a configuration names, and the `RECOMMENDED` types, without types that rows cannot have."""
    named = set[str]()
    if model is not None:
        with contextlib.suppress(ValueError):  # it names none, or another
            named.add(to_dtype(read_config(model).get("dtype"), "dtype"))
    return [one for one in [*(named - {*RECOMMENDED}), *RECOMMENDED] if not why_not(shape, one)]


def every_type(shape: Shape) -> list[str]:
    """Return all types that a model's rows can have, and pairs that are recommended."""
    return [*shape.dtypes, *(one for one in RECOMMENDED if one not in DTYPES and not why_not(shape, one))]


def available_memory(model: Any = None, weights: str | int | None = None, free: int | None = None) -> Memory:
    """Return free memory, and the bytes of a model's weights, by `weigh`, and of its recurrent states.

    `free` is the free memory of another machine. By default this machine and the process's cgroups count.
    Raise ``ImportError`` if it is not given, the system has no /proc/meminfo, and psutil is not installed.
    """
    here = system.available_memory() if free is None else (free, "as given")
    if model is None:
        return Memory(*here)
    found, (of_states, states_source) = weigh(model, weights), _states(model)
    return Memory(
        *here,
        weights=found.nbytes,
        weights_source=found.source,
        num_parameters=found.num_parameters,
        weights_read=found.read,
        experts=found.experts,
        share_used=found.share_used,
        multiplied=found.multiplied,
        head=found.head,
        states=of_states,
        states_source=states_source,
    )


def _states(model: Any) -> tuple[int | None, str]:
    """Return the bytes of a sequence's recurrent states, and which layers have them; or why they are not counted."""
    try:
        found = [state.nbytes for state in states.read(model) if state.nbytes]
    except KVCacheError as error:
        return None, str(error)
    return sum(found), f"in {count(len(found), 'layer')}" if found else ""


def _row(
    policy: str,
    stored: str,
    layers: list[Layer],
    context: int,
    sequences: int,
    memory: Memory,
    read: _Read,
    speed: float | None,
) -> Row:
    """Return the line of the plan for a type, whose layers these are, under a policy."""
    sizes, beside = Sizes(layers, None), memory.beside(sequences)

    def prompt(num_tokens: int) -> int:
        return sizes.most_bytes(num_tokens, PREFILL_TOKENS) - sizes.most_bytes(num_tokens)

    def needs(num_tokens: int) -> int:
        return beside + sequences * sizes.most_bytes(num_tokens) + prompt(num_tokens)

    nbytes = sequences * sizes.most_bytes(context)
    return Row(
        policy,
        stored,
        bytes_per_token=_per_token(layers),
        nbytes=nbytes,
        needs=needs(context),
        fits=fits(needs(context), memory),
        longest_context=_longest(needs, memory.free),
        most_sequences=_most_sequences(
            memory.free - memory.beside(0) - prompt(context), sizes.most_bytes(context) + (memory.states or 0)
        ),
        tokens_per_second=speed,
        prompt_nbytes=prompt(context),
        read_nbytes=read.rows.total() + read.sketches.total() + read.selected.total(),
        sketch_nbytes=nbytes - sequences * Sizes(map(_plain, layers), None).most_bytes(context),
        num_selecting=sum(layer.sketch for layer in layers),
    )


def _plain(layer: Layer) -> Layer:
    """Return a layer without sketches."""
    return replace(layer, sketch=False)


def _read(layers: Sequence[Layer], shape: Shape, context: int, select: int | None) -> _Read:
    """Return the bytes that attention reads at a context.

    Shared rows are stored once, and read by each layer that shares them. If a layer chooses or selects rows, the others
    are not read.
    """
    read = _Read(Counter(), Counter(), Counter())
    for layer, num_heads, chosen in zip(layers, shape.num_heads, shape.chosen, strict=True):
        own = _plain(replace(layer, share=None))
        seen = most_rows(layer.policy, context)
        found = rows_read(select, seen) if layer.sketch and select is not None else seen
        if found < seen:
            read.selected.update(_by_type(own, found))
            sketch = replace(own, sketch=True).bytes_per_token - own.bytes_per_token
            read.sketches[layer.k_dtype] += sketch * seen
        else:
            num_rows = most_rows(own.policy, context if chosen is None else min(chosen, context))
            kind = Kind.of(layer, num_heads)
            read.rows.update({(kind, dtype): nbytes for dtype, nbytes in _by_type(own, num_rows).items() if nbytes})
    return read


def _by_type(layer: Layer, num_rows: int) -> dict[DType, int]:
    """Return the bytes of rows of a layer, by type."""
    keys = layer if layer.value_in_key else replace(layer, v_head_dim=0)
    values = layer.bytes_per_token - keys.bytes_per_token
    found = Counter({layer.k_dtype: keys.bytes_per_token * num_rows})
    found[layer.v_dtype] += values * num_rows
    return found


def _speed(read: _Read, memory: Memory, rates: Rates | None, sequences: int) -> float | None:
    """Return the most tokens of all sequences that are decoded in a second; None: it is not known."""
    if rates is None or memory.weights_read is None:
        return None
    found = [(nbytes, rates.of_rows(*key)) for key, nbytes in read.rows.items()]
    found += [(nbytes, rates.of_sketches(dtype)) for dtype, nbytes in read.sketches.items()]
    found += [(nbytes, rates.of_selected(dtype)) for dtype, nbytes in read.selected.items()]
    states = 2 * (memory.states or 0) / rates.memory  # they are written, too
    attention = 0.0
    for nbytes, rate in found:
        if rate is None:
            return None
        attention += nbytes / rate
    return sequences / (multiplying(memory, rates, sequences) + sequences * (attention + states))


def multiplying(memory: Memory, rates: Rates, num_tokens: int, head: bool = True) -> float:
    """Return the seconds in which weights are read, and multiplied by so many tokens, if that takes longer.

    Without `head`, no logits are made. Computing counts if its rate is known.
    """
    reading = (memory.read_together(num_tokens) or 0) / rates.memory
    if rates.prompts is None:
        return reading
    multiplied = (memory.multiplied or 0) - (0 if head else memory.head)
    return max(reading, 2 * num_tokens * multiplied / rates.prompts.weights)


def fits(needs: int, memory: Memory) -> bool | None:
    """Return whether so many bytes fit; None: they do, and weights or states are not counted."""
    if needs <= memory.free and (memory.weights is None or memory.states is None):
        return None
    return needs <= memory.free


def _per_token(layers: Sequence[Layer]) -> int:
    """Return the bytes of a token's rows, with its share of rows for several, without cross-attention layers."""
    own = [layer for layer in layers if not isinstance(layer.policy, CrossAttention)]
    return round(sum(layer.bytes_per_token / getattr(layer.policy, "stride", 1) for layer in own))


def _longest(needs: Callable[[int], int], free: int) -> int | None:
    """Return the most tokens of a sequence that need no more than what is free; None: any number."""
    if needs(MOST_TOKENS) <= free:
        return None
    return bisect.bisect_right(range(MOST_TOKENS), free, key=needs) - 1 if needs(0) <= free else 0


def _most_sequences(free: int, of_each: int) -> int | None:
    """Return how many sequences of so many bytes fit into what is free; None: any number."""
    return max(0, free) // of_each if of_each else None


def _groups(layers: Mapping[str, list[Layer]], num_layers: int, context: int, sequences: int) -> list[Group]:
    """Group equal layers, in the order of the groups' first layers; the first `num_layers` are the model's own."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for i, layer in enumerate(next(iter(layers.values()))):
        beside, shares = i >= num_layers, layer.share is not None
        key = layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.policy, shares, beside
        members.setdefault(key, []).append(i)
    groups = []
    for (num_kv_heads, head_dim, v_head_dim, policy, shares, beside), indices in members.items():
        own = {dtype: [every[i] for i in indices] for dtype, every in layers.items()}
        per_token = {dtype: _per_token(some) for dtype, some in own.items()}
        nbytes = {dtype: sequences * sum(layer.most_bytes(context) for layer in some) for dtype, some in own.items()}
        name = NO_ATTENTION if policy is None else written(policy)
        groups.append(Group(len(indices), num_kv_heads, head_dim, v_head_dim, name, shares, per_token, nbytes, beside))
    return groups
