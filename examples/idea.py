"""The idea of kvcache on one screen: the cache of a layer with one head, in plain NumPy.

A row is a key and a value. Rows lie in blocks, and never move. A sequence is a list of runs, which say which rows stand
at which positions. So a fork shares rows, an edit changes runs, and neither copies a row. A key stays rotated for its
first position. A run knows how far its rows have moved since, and attention rotates the query back by that.

>>> cache = Cache(2, [0.1])
>>> cache.append(np.ones((7, 2)), np.ones((7, 2)))
>>> cache.remove(2, 5)
>>> [(run.block, run.slot, run.count, run.position, run.delta) for run in cache.runs[0]]
[(0, 0, 2, 0, 0), (1, 1, 2, 2, -3)]
"""

from typing import NamedTuple

import numpy as np

BLOCK = 4  # slots
END = 1 << 30  # behind every position


class Run(NamedTuple):
    """Rows in neighbouring slots of a block, at neighbouring positions."""

    block: int
    slot: int
    count: int
    position: int  # of the first row
    delta: int = 0  # how far its keys have moved since they were rotated

    def part(self, begin, end, by=0):
        """Return the rows at positions [begin, end), moved by a number of positions. There may be none."""
        first = max(begin, self.position, -by)  # no row moves below position 0
        count = max(min(end, self.position + self.count) - first, 0)
        return Run(self.block, self.slot + first - self.position, count, first + by, self.delta + by)


def rotate(x, by, inv_freq):
    """Rotate pairs of elements by a number of positions, as RoPE does."""
    (a, b), angle = np.split(x, 2, -1), by * inv_freq
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


class Cache:
    """Sequences of rows. With a window, a token sees so many of the latest positions, its own included.

    Rows that a window leaves behind are dropped, so that attention needs no mask. With a window, nothing is removed or
    shifted here. KVCache does so, and refuses it where a later token would see dropped rows.
    """

    def __init__(self, head_dim, inv_freq, window=END):
        self.inv_freq, self.window = np.asarray(inv_freq), window
        self.blocks = np.zeros((0, 2, BLOCK, head_dim))  # keys and values
        self.holders = np.zeros((0, BLOCK), int)  # how many sequences hold each slot
        self.runs = {}  # of each sequence, in order of arrival

    def append(self, k, v, seq_id=0):
        """Add rows [n, head_dim] behind the last position, with keys that are rotated for it."""
        for row in zip(k, v, strict=True):
            *others, last = self.runs.get(seq_id) or [Run(0, BLOCK, 0, 0)]  # of a new sequence: a full block
            end, position = last.slot + last.count, self.next_position(seq_id)
            is_free = end < BLOCK and not self.holders[last.block, end]
            new = Run(*((last.block, end) if is_free else (self._free_block(), 0)), 1, position)
            self.blocks[new.block, :, new.slot] = row
            goes_on = new == last._replace(slot=end, count=1, position=last.position + last.count)
            runs = [*others, last._replace(count=last.count + 1)] if goes_on else [*others, last, new]
            self._set(seq_id, [run.part(position + 1 - self.window, END) for run in runs])

    def fork(self, src, dst):
        """Make a sequence hold the rows of another one."""
        self._set(dst, self.runs[src])

    def remove(self, begin, end, seq_id=0):
        """Drop the rows at positions [begin, end), and move later ones down."""
        self._split(seq_id, lambda run: (run.part(0, begin), run.part(end, END, begin - end)))

    def shift(self, begin, end, delta, seq_id=0):
        """Move the rows at positions [begin, end). Rows that would move below 0 are dropped."""
        self._split(seq_id, lambda run: (run.part(0, begin), run.part(begin, end, delta), run.part(end, END)))

    def next_position(self, seq_id=0):
        """Return the position behind the last row."""
        return max((run.position + run.count for run in self.runs.get(seq_id, [])), default=0)

    def gather(self, seq_id=0):
        """Return the keys, rotated for their present positions, the values, and the positions."""
        keys = [rotate(k, run.delta, self.inv_freq) for run, k, _ in self._rows(seq_id)]
        positions = [run.position + np.arange(run.count) for run in self.runs[seq_id]]
        return np.concatenate(keys), np.concatenate([v for _, _, v in self._rows(seq_id)]), np.concatenate(positions)

    def attend(self, q, seq_id=0):
        """Return what the last token's query gets of the rows. The query is rotated for each run, and no key is."""
        rows = [(k @ rotate(q, -run.delta, self.inv_freq), v) for run, k, v in self._rows(seq_id)]
        scores, values = (np.concatenate(arrays) for arrays in zip(*rows, strict=True))
        weights = np.exp((scores - scores.max()) / np.sqrt(len(q)))
        return weights @ values / weights.sum()

    def _rows(self, seq_id):
        return [(run, *self.blocks[run.block, :, run.slot : run.slot + run.count]) for run in self.runs[seq_id]]

    def _split(self, seq_id, parts):
        if self.window < END:
            raise NotImplementedError("a later token might see rows that the window has dropped")
        self._set(seq_id, [part for run in self.runs[seq_id] for part in parts(run)])

    def _set(self, seq_id, runs):
        """Give a sequence other runs. A block without a holder is free."""
        for change, held in ((-1, self.runs.get(seq_id, [])), (1, runs)):
            for run in held:
                self.holders[run.block, run.slot : run.slot + run.count] += change
        self.runs[seq_id] = [run for run in runs if run.count]

    def _free_block(self):
        """Return a block that nobody holds: an old one, or a new one."""
        if self.holders.any(1).all():
            self.blocks = np.concatenate([self.blocks, np.zeros((1, *self.blocks.shape[1:]))])
            self.holders = np.concatenate([self.holders, np.zeros((1, BLOCK), int)])
        return int(np.flatnonzero(~self.holders.any(1))[0])
