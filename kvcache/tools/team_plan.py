"""Plan a model for a team: memory with kept prompts, tokens/s of one user and of all, seconds to the first token.

`make` adds this to a plan of `kvcache.tools.memory_plan` whose sequences are the users' texts.

A prompt is fed in passes of PREFILL_TOKENS tokens. A pass reads the weights, and multiplies its tokens by them: the
longer of the two counts. Attention over the rows that its tokens see takes time as well, and each layer takes PASS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.errors import NotSupportedError, plain
from kvcache.layer import Layer, Sizes
from kvcache.models.shapes import PREFILL_TOKENS, Shape
from kvcache.models.states import CHECKPOINT_TOKENS
from kvcache.policy import CrossAttention, FullAttention, Policy, most_rows, window_of
from kvcache.tools.memory_plan import Memory, Plan, fits, multiplying, variants
from kvcache.tools.rates import Kind, Rates

NEW_TOKENS = 64  # of a prompt whose beginning is known: a question
# Seconds of a layer in a pass of a prompt, for norms, rotations and Python. transformers takes about so long for layers
# of 256 to 512 elements, on one core of an EPYC. For wide layers it is little beside the products.
PASS = 0.002


@dataclass(frozen=True)
class TeamRow:
    """What one element type under one policy gives a team, beside the plan's row for it."""

    policy: str
    dtype: str
    kept_nbytes: int  # bytes of all tokens' rows: of windows, too, as prompts are kept
    kept_needs: int  # bytes of these rows, of weights, and of states that run and that are kept
    kept_fits: bool | None  # as `Row.fits`
    tokens_per_second_alone: float | None  # at most, of one text that decodes alone; None: it is not known
    new_seconds: float | None  # to the first token of a prompt of which nothing is known
    known_seconds: float | None  # to the first token of a prompt of which all but `new_tokens` are known


@dataclass(frozen=True)
class Team:
    """The plan of a model for a team."""

    users: int
    prompt: int  # tokens
    new_tokens: int  # of a prompt whose beginning is known
    kept_states: int  # bytes of states of recurrent layers that are kept
    operations_per_second: float | None  # at which prompts are multiplied by weights; None: not measured
    operations_source: str | None
    rows: list[TeamRow]  # for each of the plan's


def make(
    shape: Shape,
    plan: Plan,
    alone: Plan,
    *,
    prompt: int,
    window: Policy | None = None,
    select: int | None = None,
    rates: Rates | None = None,
) -> Team:
    """Plan for a team whose users have a sequence of the `plan` each, and send prompts of `prompt` tokens.

    `alone` is the same plan for one sequence. Other arguments are those of `kvcache.tools.memory_plan.make`.

    Raise `NotSupportedError` if prompts of such a model cannot be kept.
    """
    if any(isinstance(layer.policy, CrossAttention) for layer in shape.layers):
        raise NotSupportedError(
            f"users={plan.sequences}: no prompts are kept of this {plain(shape.model_type)}, whose rows follow from "
            "what an encoder gets; plan its --sequences"
        )
    memory, users, new = plan.memory, plan.sequences, min(NEW_TOKENS, prompt)
    kept_states = users * (plan.context // CHECKPOINT_TOKENS + 1) * (memory.states or 0)
    rows = []
    for row, single in zip(plan.rows, alone.rows, strict=True):
        layers = variants(shape, row.dtype, window, select)[row.policy]
        kept = users * Sizes(map(_without_window, layers), None).most_bytes(plan.context)
        needs = memory.beside(users) + kept_states + kept
        rows.append(
            TeamRow(
                row.policy,
                row.dtype,
                kept_nbytes=kept,
                kept_needs=needs,
                kept_fits=fits(needs, memory),
                tokens_per_second_alone=single.tokens_per_second,
                new_seconds=seconds_of(shape, layers, memory, rates, 0, prompt),
                known_seconds=seconds_of(shape, layers, memory, rates, prompt - new, prompt),
            )
        )
    measured = None if rates is None else rates.prompts
    return Team(
        users,
        prompt,
        new,
        kept_states,
        None if measured is None else measured.weights,
        None if measured is None else f"by {measured.library}",
        rows,
    )


def _without_window(layer: Layer) -> Layer:
    """Return a layer that keeps all rows, as kept prompts do."""
    return replace(layer, policy=FullAttention()) if window_of(layer.policy) else layer


def seconds_of(
    shape: Shape, layers: Sequence[Layer], memory: Memory, rates: Rates | None, begin: int, end: int
) -> float | None:
    """Return in about how many seconds tokens `begin` to `end` of a prompt are fed; None: it is not known."""
    if rates is None or rates.prompts is None or memory.multiplied is None or memory.weights_read is None:
        return None
    kinds = Counter(
        (Kind.of(layer, num_heads), layer.policy, layer.k_dtype, layer.v_dtype, num_heads, chosen)
        for layer, num_heads, chosen in zip(layers, shape.num_heads, shape.chosen, strict=True)
        if layer.policy is not None
    )
    seconds = 0.0
    for first in range(begin, end, PREFILL_TOKENS):
        num_tokens = min(PREFILL_TOKENS, end - first)
        seconds += multiplying(memory, rates, num_tokens, head=False) + PASS * shape.num_layers
        for (kind, policy, k_dtype, v_dtype, num_heads, chosen), number in kinds.items():
            seen = most_rows(policy, first + num_tokens // 2)  # by the token in the middle
            products = 2 * number * num_tokens * num_heads * (seen if chosen is None else min(chosen, seen))
            seconds += products * kind.head_dim / rates.prompts.attention[kind, k_dtype]
            seconds += products * kind.v_head_dim / rates.prompts.attention[kind, v_dtype]
    return seconds
