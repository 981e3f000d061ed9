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


BYTES = {name: byte for byte, name in bytes_to_unicode().items()}  # by their characters in vocabularies of bytes


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are the bytes of a text."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=SCENE)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the text of a token alone, in UTF-8; a token may be a part of a character."""
    name: str = tokenizer.convert_ids_to_tokens(token) or ""
    if name.startswith("\u2581"):  # a blank, which decoding a token alone would drop
        return name.replace("\u2581", " ").encode()
    text: str = tokenizer.decode([token])
    if "\ufffd" not in text:
        return text.encode()
    if name.startswith("<0x"):
        return bytes.fromhex(name[3:5])
    return bytes(BYTES[one] for one in name) if BYTES.keys() >= {*name} else text.encode()


def hidden_tokens(tokenizer: Any, shown: Sequence[str] = ()) -> frozenset[int]:
    """Return the special tokens, which answers do not show, except those with these texts."""
    special = {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.special and str(added) not in shown
    }
    return frozenset(special | {*tokenizer.all_special_ids} - {*tokenizer.convert_tokens_to_ids([*shown])})


class Text:
    """The text of an answer. It hands out whole characters, and nothing that may become a stop sequence.

    `_held` is text that is not handed out yet. Tokens up to `_end` were decoded, the last of them from `_begin` on.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], hidden: frozenset[int] | None = None, before: Sequence[int] = ()
    ) -> None:
        """Begin a text behind the tokens `before`; `hidden` tokens are not shown: by default special ones."""
        self._tokenizer, self._stop = tokenizer, stop
        self._hidden = hidden_tokens(tokenizer) if hidden is None else hidden
        self._tokens = [token for token in before if token not in self._hidden]  # those that are shown
        # The last tokens that had text are decoded again before new ones, whose text may depend on them.
        self._begin = self._end = 0
        if self._new().endswith("\ufffd"):  # what completes a character is shown as without `before`
            self._tokens = []
        self._end = len(self._tokens)
        self._held = ""  # text that may become a stop sequence

    def add(self, token: int) -> tuple[str, bool]:
        """Return what may be shown after another token, and whether the text has come to a stop sequence."""
        if token in self._hidden:
            return "", False
        self._tokens.append(token)
        new = self._new()
        is_part = new.endswith("\ufffd") or not new  # of a character; or the token has no text
        if is_part and len(self._tokens) - self._end < MOST_PARTS:
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
            self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
            for tokens in (self._tokens[self._begin : self._end], self._tokens[self._begin :])
        )
        return text[len(before) :]

    def _begun(self, stop: str) -> int:
        """Return how many first characters of a stop sequence the text ends with."""
        most = min(len(stop) - 1, len(self._held))  # a client's sequence may be far longer than the text
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
