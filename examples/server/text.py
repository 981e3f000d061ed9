"""Turn the tokens of an answer into text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

MOST_PARTS = 64  # tokens that are held because they may be parts of a character

# A scene in which each speaker has a name, and the assistant speaks next.
SCENE = """\
{%- for one in messages -%}
{%- if one.role != "system" -%}{{ (one.name or one.role) | upper }}:{{ "\n" }}{%- endif -%}
{{ one.content }}{{ "\n\n" }}
{%- endfor -%}
{{ "ASSISTANT:\n" }}"""


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the bytes of a text."""
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=SCENE)


class Text:
    """The text of an answer. It hands out whole characters, and nothing that may become a stop sequence."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        # The last tokens that had text are decoded again before new ones, whose text may depend on them.
        self._begin = self._end = 0
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Return what may be shown after another token, and whether the text has come to a stop sequence."""
        self._tokens.append(token)
        new = self._new()
        is_part = new.endswith("\ufffd") and len(self._tokens) - self._end < MOST_PARTS
        if is_part or not new:  # a part of a character, or a token that is not shown
            return "", False
        self._begin, self._end = self._end, len(self._tokens)
        self._held += new
        return self._show(is_last=False)

    def end(self) -> tuple[str, bool]:
        """Return the rest, and whether the text has come to a stop sequence."""
        self._held += self._new()
        return self._show(is_last=True)

    def _show(self, is_last: bool) -> tuple[str, bool]:
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            _, at = min(found)  # of two that end together, the longer one counts
            text, self._held = self._held[:at], ""
            return text, True
        begun = 0 if is_last else max((self._begun(stop) for stop in self._stop), default=0)
        shown = len(self._held) - begun
        text, self._held = self._held[:shown], self._held[shown:]
        return text, False

    def _new(self) -> str:
        """Return the text of the tokens that were not decoded with their neighbours yet."""
        before, text = (
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (self._tokens[self._begin : self._end], self._tokens[self._begin :])
        )
        return text[len(before) :]

    def _begun(self, stop: str) -> int:
        """Return how many first characters of a stop sequence the text ends with."""
        most = min(len(stop) - 1, len(self._held))  # a client's sequence may be far longer than the text
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
