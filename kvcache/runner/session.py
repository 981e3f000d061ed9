"""`Session`: a file with the tokens of a text and their rows, from which a later run goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcache import KVCache, SlidingWindow, state
from kvcache.errors import StateFormatError, plain, sentence
from kvcache.layer import Layer, count
from kvcache.models.fingerprint import fingerprint
from kvcache.runner.llama import LlamaError

__all__ = ["Session"]


class Session:
    """A file in which a run keeps its sequence.

    Parameters
    ----------
    path : path
        The file, which `save` makes or replaces.
    model : path
        The model's folder or file; the file is of this model alone.

    Raises
    ------
    StateFormatError
        If the file is damaged, of another model, or no session.
    LlamaError
        If there is no folder for it, or it cannot be written.
    ModelFileError
        If the model's files cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], model: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise LlamaError("the name of the session's file is empty: give one")
        self.path = Path(path)
        self._fingerprint = fingerprint(model)
        self._saved: state.SavedState | None = None  # None: there is no file
        folder = Path(os.path.realpath(self.path)).parent
        if not os.path.isdir(folder):
            raise LlamaError(f"{plain(self.path)} cannot be written: there is no folder {plain(folder)}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise LlamaError(f"{plain(self.path)} cannot be written: no file may be made in {plain(folder)}")
        try:
            state.check_replaceable(self.path)
        except OSError as error:
            raise LlamaError(sentence(error)) from None
        if os.path.exists(self.path):
            self._saved = self._read()

    def _read(self) -> state.SavedState:
        """Read the file's own description. Refuse a file that no session of this model wrote."""
        with self._refusing():
            saved = state.inspect(self.path)
            if saved.fingerprint != self._fingerprint:
                what = f"of another model: its fingerprint is {saved.fingerprint}, this model's {self._fingerprint}"
                raise self._differs(what if saved.fingerprint else "no session: it does not say of which model it is")
            ids = [one.seq_id for one in saved.sequences]
            if not saved.layers or ids != [0] or saved.sequences[0].next_position != len(saved.sequences[0].tokens):
                raise self._differs("no session: it should have layers, and one sequence with the id of each token")
            return saved

    def resume(self, cache: KVCache, prompt: Sequence[int]) -> tuple[int, str]:
        """Restore what the file has of a prompt.

        Parameters
        ----------
        cache : KVCache
            An empty cache for the model.
        prompt : sequence of int
            The prompt's tokens, at least one.

        Returns
        -------
        tuple of int and str
            How many of the prompt's tokens are in the cache now, at most all but the last, whose logits are needed; and
            a sentence that says so.

        Raises
        ------
        LlamaError
            If the file's rows are of another type, or of other windows.
        StateFormatError
            If the file is damaged.
        """
        if self._saved is None:
            return 0, f"{plain(self.path)}: a new session"
        self._check_settings(self._saved.layers, cache)
        with self._refusing():
            cache.restore(self.path, 0, fingerprint=self._fingerprint)
        held = self._saved.sequences[0].tokens.tolist()
        there = count(len(held), "token")
        begin = min(_common(held, prompt), len(prompt) - 1)
        if begin and cache.can_resume(begin):
            cache.truncate(begin)
            how = f"goes on after {there}" if begin == len(held) else f"went back from {there} to {begin:,}"
            rest = f"{len(prompt) - begin:,} of the prompt's {len(prompt):,} to compute"
            return begin, f"{plain(self.path)}: {how}, {rest}"
        cache.clear(0)
        if not begin:
            return 0, f"{plain(self.path)}: began anew, as the prompt does not begin like its {there}"
        reason = f"the prompt leaves its {there} after {begin:,}, and the rows seen from there have left the window"
        return 0, f"{plain(self.path)}: began anew, as {reason}"

    def save(self, cache: KVCache, tokens: Sequence[int]) -> None:
        """Replace the file, as a whole; `tokens` are those in the cache, and maybe more."""
        held = tokens[: cache.next_position()]
        cache.save(self.path, tokens={0: held}, fingerprint=self._fingerprint)

    def _check_settings(self, layers: Sequence[Layer], cache: KVCache) -> None:
        """Refuse a file of a run with other options."""
        saved, ours = _settings(layers), _settings(cache.layers)
        others = [name for name, value in saved.items() if value != ours[name]]
        if others:
            with self._refusing():
                state.inspect(self.path, verify=True)  # where the file is damaged, that is why
            theirs, here = (" and ".join(f"{name} {of[name]}" for name in others) for of in (saved, ours))
            raise LlamaError(
                f"{plain(self.path)} is of a run with {theirs}, and this one has {here}: give the same, or another file"
            )

    def _differs(self, what: str) -> StateFormatError:
        """Return the error for a file that is not as it should be; first raise another one if it is damaged."""
        state.inspect(self.path, verify=True)
        return StateFormatError(f"{plain(self.path)} is {what}")

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Add to an error about the file what to do."""
        try:
            yield
        except StateFormatError as error:
            raise StateFormatError(f"{error}; give another file, or remove this one to begin anew") from None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    least = min(len(a), len(b))
    return next((i for i in range(least) if a[i] != b[i]), least)


def _settings(layers: Sequence[Layer]) -> dict[str, str | int]:
    """Return what a run's options made of the layers."""
    windows = [layer.policy for layer in layers if isinstance(layer.policy, SlidingWindow)]
    widest = max(windows, key=lambda policy: policy.window) if len(windows) == len(layers) else None
    return {
        "type": layers[0].k_dtype,
        "transform": layers[0].k_transform or "none",
        "window": "none" if widest is None else widest.window,
        "sink tokens": 0 if widest is None else widest.num_sink_tokens,
    }
