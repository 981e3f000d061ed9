"""The recurrent layers of an `HFCache`: convolutions, linear attention, state spaces.

Their states are transformers' own tensors, which a model overwrites in each pass. A state has all tokens in it. It goes
back only to where it was kept. The state of a convolution, the inputs of the last tokens, can also be narrowed: without
the last ones it is the state before these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers.cache_utils import LinearAttentionLayer

from kvcache.errors import NotSupportedError

# Parts of a layer: its keys and values, the keys of an indexer, and its first state. Others follow that one.
ROWS, KEYS, STATE = -1, -2, 0
MOST_KEPT = 4  # columns behind which states are kept


Narrowed: TypeAlias = tuple[Any, int, torch.Tensor]  # a layer, the index of a convolution, and its state


class Recurrent:
    """The recurrent layers of a cache, and how far the model has come through all layers.

    In each pass it comes to the parts of the layers, a state or the rows, in the same order. So a pass begins where a
    part is reached again; if it does before the last one was through, that one failed, and some states have its tokens.
    `layers` are all layers of the cache, `rows` the indices of those that have keys and values. `_reached` has
    the parts that the last pass has come to, and `_kept` the states that were kept, by column.
    """

    def __init__(self, layers: Sequence[Any], rows: Sequence[int]) -> None:
        self.layers: dict[int, Any] = {
            i: layer for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionLayer)
        }
        self._all = {(i, STATE) for i in self.layers}  # indices of layers, and their parts
        self._all |= {(i, ROWS) for i in rows}
        self._all |= {(i, KEYS) for i, layer in enumerate(layers) if getattr(layer, "index_keys", None) is not None}
        self._reached: set[tuple[int, int]] = set()  # parts that the last pass has come to
        # By rising column: the state of each row behind it. Caches that go on from the same tokens share the bytes.
        self._kept: dict[int, list[bytes]] = {}

    def go_on_as(self, other: Recurrent) -> None:
        """Go on from where another cache is, whose layers these are copies of."""
        self._reached, self._kept = {*other._reached}, {**other._kept}

    def is_begun_by(self, index: int, part: int) -> bool:
        """Whether a pass begins when it comes to a part of a layer."""
        return not self._reached or (index, part) in self._reached

    def reach(self, index: int, part: int) -> None:
        """Note that a pass has come to a part of a layer."""
        if (index, part) in self._reached:
            self._reached.clear()
        self._reached.add((index, part))

    @property
    def is_within(self) -> bool:
        """Whether the last pass has not come to every layer: it runs, or it failed."""
        reached = {(i, min(part, STATE)) for i, part in self._reached}
        return bool(reached) and reached != self._all

    @property
    def has_come_to_rows(self) -> bool:
        """Whether the last pass has stored rows, but not come to every layer."""
        return self.is_within and any(part < STATE for _, part in self._reached)

    def reset(self) -> None:
        """Forget all states, also the kept ones, and the size of the batch."""
        self._kept = {}
        self._clear()

    def _clear(self) -> None:
        """Forget the states behind the last token, and the size of the batch."""
        for layer in self.layers.values():
            recording = layer.record_past
            LinearAttentionLayer.__init__(layer, layer.number_of_states)
            layer.record_past = recording
        self._reached = set()

    def select(self, batch_indices: Sequence[int]) -> None:
        """Make a batch of the rows at these indices."""
        for layer in self.layers.values():
            layer.reorder_cache(torch.tensor(batch_indices))
        self._kept = {column: [rows[i] for i in batch_indices] for column, rows in self._kept.items()}

    def keep(self, column: int, num_rows: int) -> None:
        """Keep the states behind a column, the last one, so that `crop` can go back to it.

        If there are too many, drop an earlier column: the one without which the fewest tokens have to be fed again.
        """
        if column in self._kept:
            return
        if len(self._kept) == MOST_KEPT:
            fed_again = {end: end - begin for begin, end in pairwise((0, *self._kept))}
            self._kept.pop(min(fed_again, key=fed_again.__getitem__))
        self._kept[column] = [self.state_of(row) for row in range(num_rows)]

    def last_kept(self, column: int) -> int:
        """Return the last column up to this one that has kept states; 0: there is none."""
        return max((kept for kept in self._kept if kept <= column), default=0)

    def check_crop(self, num_back: int, num_left: int) -> None:
        """Raise NotSupportedError if the states cannot go back by so many tokens, to so many."""
        for i, layer in self.layers.items() if num_back and num_left and num_left not in self._kept else ():
            widths = [(layer.conv_kernel_size[n], x.shape[-1]) for n, x in layer.conv_states.items() if x is not None]
            if any(layer.is_recurrent_states_initialized.values()):
                reason = "its recurrent state has all tokens in it"
            elif not all(width - num_back >= min(size, num_left) for size, width in widths):
                reason = "its convolution goes back only in the last pass, after activate_past_recording()"
            else:
                continue
            raise NotSupportedError(
                f"layer {i} cannot go back by {num_back} tokens, to {num_left}: {reason}; {self.ways_back(num_left)}"
            )

    def ways_back(self, column: int) -> str:
        """Say, in an error, where to go back to instead of a column."""
        again = "reset() the cache and feed the text again"
        if not self._kept:
            return again
        before, behind = self.last_kept(column), min((kept for kept in self._kept if kept > column), default=0)
        nearest = " and ".join(str(kept) for kept in (before, behind) if kept)
        return f"the nearest kept states are behind {nearest} tokens: crop to there, or {again}"

    def narrowed(self, num_back: int, num_left: int) -> list[Narrowed]:
        """Return what states of convolutions become that go back by so many tokens, to so many; nothing changes."""
        found: list[Narrowed] = []
        for layer in self.layers.values() if num_left and num_left not in self._kept else ():
            for n, state in layer.conv_states.items():
                if state is not None:
                    begin = state.shape[-1] - num_back - layer.conv_kernel_size[n]
                    cut = torch.nn.functional.pad(state, (-begin, -num_back))  # before a text, zeros
                    found.append((layer, n, cut))
        return found

    def crop(self, num_left: int, narrowed: Sequence[Narrowed]) -> bool:
        """Go back to so many tokens; `check_crop` has found that the states can, and `narrowed` has said how.

        Return whether no token of a pass that failed is left in them.
        """
        self._kept = {column: rows for column, rows in self._kept.items() if column <= num_left}
        if num_left in self._kept:
            self.restore(self._kept[num_left])
            return True
        if not num_left:
            self.reset()
            return True
        for layer, n, state in narrowed:
            layer.conv_states[n] = state
        return False

    def states_of(self, row: int) -> dict[str, torch.Tensor]:
        """Return the states of a row of the batch by name, as `_states` names them; later passes may change them."""
        return {name: state[row].contiguous() for name, state in self._states().items()}

    def state_of(self, row: int) -> bytes:
        """Return the states of a row of the batch, in the format of safetensors: always as many bytes for a model."""
        return save(self.states_of(row))

    def restore(self, rows: Sequence[Any]) -> None:
        """Go on from what `state_of` returned for each row; raise ValueError, and forget all, if it cannot be that."""
        try:
            loaded = [load(bytes(row)) for row in rows]
            self.go_on_from(loaded)
            if {int(name.split(".")[1]) for name in loaded[0]} != {*self.layers}:
                raise ValueError("states of other layers")
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            self.reset()
            raise ValueError(f"states of another model, {type(error).__name__}: {error}") from None

    def go_on_from(self, rows: Sequence[dict[str, torch.Tensor]]) -> None:
        """Go on from copies of the states of each row, as `states_of` returns them."""
        self._clear()
        for name in rows[0]:
            kind, layer, number = name.split(".")
            state = torch.stack([row[name] for row in rows])
            update = "update_conv_state" if kind == "conv" else "update_recurrent_state"
            getattr(self.layers[int(layer)], update)(state, int(number))

    def _states(self) -> dict[str, torch.Tensor]:
        """Return all states. Their names are ``kind.layer.number``: a layer may have several states of a kind.

        States of convolutions are as wide as a pass needs.
        """
        states = {}
        for i, layer in self.layers.items():
            for n in range(layer.number_of_states):
                if (conv := layer.conv_states[n]) is not None:
                    size = layer.conv_kernel_size[n]
                    states[f"conv.{i}.{n}"] = torch.nn.functional.pad(conv, (size - conv.shape[-1], 0))
                if (recurrent := layer.recurrent_states[n]) is not None:
                    states[f"recurrent.{i}.{n}"] = recurrent
        return states

    @property
    def num_elements(self) -> int:
        """The elements of the states of a row, except for numbers of tokens."""
        return sum(x[0].numel() for x in self._states().values() if x.is_floating_point())

    @property
    def nbytes(self) -> int:
        """The bytes of all states, those that are kept as well."""
        kept = {id(row): len(row) for rows in self._kept.values() for row in rows}  # beams share theirs
        return sum(state.nbytes for state in self._states().values()) + sum(kept.values())
