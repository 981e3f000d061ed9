"""Which layers of a model select rows, and from how many tokens on, where `select` is given for a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvcache.errors import NotSupportedError
from kvcache.layer import Layer
from kvcache.warning import warn

FIRST_DENSE = 2  # layers of attention that read all rows: their attention is spread over most of them
SELECT_FROM = 8192  # tokens of a sequence; with fewer there is little to gain
ALWAYS_READ = 16 + 64  # rows that are read besides those selected: the first and the last


def with_sketches(layers: Sequence[Layer], select: int, context: int | None = None) -> list[Layer]:
    """Return a model's layers, with sketches where rows are selected; raise NotSupportedError if that is nowhere.

    The first two layers of attention select none, nor do layers that can have no sketches, nor their readers. Warns if
    texts of the model's `context` in tokens are too short.
    """
    if context is not None and context < least_tokens(select):
        warn(
            f"select={select} changes nothing: rows are selected in texts of {least_tokens(select)} tokens or more, and"
            f" the model has max_position_embeddings={context}"
        )
    first = [i for i, layer in enumerate(layers) if layer.policy is not None][:FIRST_DENSE]
    made = [layer if i in first else _sketched(layer) for i, layer in enumerate(layers)]
    made = [layer if layer.share is None else replace(layer, sketch=made[layer.share].sketch) for layer in made]
    if not any(layer.sketch for layer in made):
        raise NotSupportedError(
            f"select={select}: no layer of the model can select rows; it needs a layer behind the first {FIRST_DENSE}"
            " with values apart from keys, a head_dim that is a multiple of 32, and full attention or a long window"
        )
    return made


def least_tokens(select: int) -> int:
    """Return how many tokens a text must have, so that its last one selects rows."""
    return max(SELECT_FROM, ALWAYS_READ + 2 * select + 1)


def rows_read(select: int, num_tokens: int) -> int:
    """Return about how many rows a token of a text of `num_tokens` tokens reads, in a layer with sketches."""
    return num_tokens if num_tokens < least_tokens(select) else ALWAYS_READ + select


def _sketched(layer: Layer) -> Layer:
    try:
        return replace(layer, sketch=layer.policy is not None)
    except (ValueError, NotSupportedError):  # as `Layer` says of sketches
        return layer
