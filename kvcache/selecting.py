"""Which layers of a model select rows, and from how many tokens on, where `select` is given for a whole model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvcache.errors import NotSupportedError
from kvcache.layer import Layer

FIRST_DENSE = 2  # layers that read all rows: their attention is spread over most of them
SELECT_FROM = 8192  # tokens of a sequence; with fewer there is little to gain


def with_sketches(layers: Sequence[Layer], select: int) -> list[Layer]:
    """Return a model's layers, with sketches where rows are selected; raise NotSupportedError if that is nowhere.

    The first two layers select none, nor do layers that can have no sketches.
    """
    made = [*layers[:FIRST_DENSE], *_sketched(layers[FIRST_DENSE:])]
    if not any(layer.sketch for layer in made):
        raise NotSupportedError(
            f"select={select}: no layer of the model can select rows; it needs a layer behind the first {FIRST_DENSE}"
            " with values apart from keys, a head_dim that is a multiple of 32, and full attention or a long window"
        )
    return made


def _sketched(layers: Sequence[Layer]) -> Iterator[Layer]:
    for layer in layers:
        try:
            yield replace(layer, sketch=layer.policy is not None)
        except (ValueError, NotSupportedError):  # as `Layer` says of sketches
            yield layer
