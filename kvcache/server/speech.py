"""Tell an answer's parts apart while it comes: thoughts, calls of tools, and what is said."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OPEN_THOUGHTS, CLOSE_THOUGHTS = "<think>", "</think>"
# Fields of response templates whose text an answer shows, and what it calls them.
KINDS = {"content": "content", "thinking": "reasoning_content", "reasoning_content": "reasoning_content"}


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])  # templates of Mistral take nine characters


@dataclass(frozen=True)
class Format:
    """How models of a family write calls: from `opening` to `closing`, or to the end of the answer."""

    name: str
    opening: str
    closing: str | None
    arguments: str  # the field that has them

    def read(self, body: str, tools: list[str]) -> list[Call] | None:
        """Return the calls of these tools in a text, or None if it has others than these."""
        return _calls(_values(body, names=self.name == "mistral") or [], self.arguments, tools)


HERMES = Format("hermes", "<tool_call>", "</tool_call>", "arguments")
MISTRAL = Format("mistral", "[TOOL_CALLS]", None, "arguments")
LLAMA = Format("llama", "<|python_tag|>", None, "parameters")  # or nothing, where an object begins the answer


def format_of(template: str) -> Format | None:
    """Return how a model writes calls, by its chat template."""
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    if '"parameters"' in template or LLAMA.opening in template:
        return LLAMA
    return None


class Speech:
    """Takes the text of an answer in pieces, and returns its parts.

    A part is a `Call`, or the kind of a text ("content", "reasoning_content") and the text. `_held` is text whose kind
    is not sure yet. `_mode` is what it is a part of: thoughts, a call, or what is said; or the answer is yet to begin.

    Parameters
    ----------
    format : Format or None
        How calls are written; None: there are none.
    tools : list of str
        The tools that may be called. What calls another one is said.
    thinks : bool
        Whether the answer begins within thoughts, which the template has opened.
    """

    def __init__(self, format: Format | None, tools: list[str], thinks: bool = False) -> None:
        self._format, self._tools = format if tools else None, tools
        self._mode = "thoughts" if thinks else "begin"  # what comes now: these, a "call", or "said" text
        self._held = ""  # text whose kind is not sure yet
        self._blanks = ""  # before what may be a call
        self._skips_space = thinks  # whether blanks at the front of it are left out
        self.num_calls = 0  # so far

    def add(self, text: str) -> list[tuple[str, str] | Call]:
        """Return the parts that are sure now."""
        self._held += text
        return self._take(is_last=False)

    def end(self) -> list[tuple[str, str] | Call]:
        """Return the rest."""
        return self._take(is_last=True)

    def _take(self, is_last: bool) -> list[tuple[str, str] | Call]:
        found: list[tuple[str, str] | Call] = []
        while self._step(found, is_last):
            pass
        return found

    def _step(self, found: list[tuple[str, str] | Call], is_last: bool) -> bool:
        """Take what can be taken in this mode; return whether another mode goes on."""
        if self._skips_space:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._skips_space = False
        if self._mode == "begin":
            return self._begin(is_last)
        if self._mode == "call":
            return self._call(found, is_last)
        kind = "reasoning_content" if self._mode == "thoughts" else "content"
        closing = CLOSE_THOUGHTS if self._mode == "thoughts" else self._format.opening if self._format else None
        at = -1 if closing is None else self._held.find(closing)
        if closing is None or (at < 0 and is_last):
            said, self._held = self._held, ""
        elif at < 0:
            said, self._held = _split_sure(self._held, closing)
        else:
            said, self._held = self._held[:at], self._held[at + len(closing) :]
            said, self._blanks = said.rstrip(), said[len(said.rstrip()) :]
        if said:
            found.append((kind, said))
        if at < 0:
            return False
        self._mode, self._skips_space = ("said", True) if self._mode == "thoughts" else ("call", False)
        return True

    def _begin(self, is_last: bool) -> bool:
        """See whether the answer begins with thoughts, or is a call as a whole."""
        begun = self._held.lstrip()
        if not is_last and (not begun or OPEN_THOUGHTS.startswith(begun)):
            return False
        if begun.startswith(OPEN_THOUGHTS):
            self._mode, self._held, self._skips_space = "thoughts", begun.removeprefix(OPEN_THOUGHTS), True
        elif self._format is LLAMA and begun.startswith("{"):
            self._mode = "call"
        else:
            self._mode = "said"
        return True

    def _call(self, found: list[tuple[str, str] | Call], is_last: bool) -> bool:
        """Read calls once they are complete; what is none is said."""
        assert self._format is not None
        closing = self._format.closing
        at = -1 if closing is None else self._held.find(closing)
        if at < 0 and not is_last:
            return False
        body, self._held = (self._held, "") if at < 0 or closing is None else (
            self._held[:at], self._held[at + len(closing) :],
        )  # fmt: skip
        calls = self._format.read(body, self._tools)
        if calls:
            found += calls
            self.num_calls += len(calls)
            self._skips_space = True
        elif body or at >= 0:
            opening = "" if self._format is LLAMA and body.lstrip().startswith("{") else self._format.opening
            found.append(("content", self._blanks + opening + body + (closing or "" if at >= 0 else "")))
        self._mode = "said"
        return bool(self._held)


class TemplatedSpeech:
    """The same by transformers' parser, for tokenizers with a response template; it needs special tokens in the text.

    Parameters
    ----------
    make : callable
        Returns transformers' ``ResponseParser`` behind a text.
    prompt : str
        The text before the answer.
    tools : list of str
        The tools that may be called. What calls another one is said.
    end : str
        The token that ends answers, which is not said.
    """

    def __init__(self, make: Callable[[str], Any], prompt: str, tools: list[str], end: str = "") -> None:
        self._make, self._parser, self._tools, self._end = make, make(prompt), tools, end
        self._held = ""  # text that no part has yet, such as half of a call
        self.num_calls = 0  # so far

    def add(self, text: str) -> list[tuple[str, str] | Call]:
        """Return the parts that are sure now."""
        found: list[tuple[str, str] | Call] = []
        for one in text:  # where reading fails, all events of a piece are lost
            self._held += one
            try:
                self._take(found, self._parser.feed(one))
            except Exception:  # a template may raise any
                _say(found, "content", self._held)
                self._held, self._parser = "", self._make("")
        return found

    def end(self) -> list[tuple[str, str] | Call]:
        """Return the rest."""
        found: list[tuple[str, str] | Call] = []
        self._held = self._held.removesuffix(self._end)
        try:
            self._take(found, self._parser.finalize()[1])
        except Exception:  # half of a call, or a template that asks for more
            _say(found, "content", self._held)
        return found

    def _take(self, found: list[tuple[str, str] | Call], events: list[dict[str, Any]]) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if name == "tool_calls" and kind == "region_close":
                calls = _calls([event["value"]], "arguments", self._tools) or []
                _say(found, "content", "" if calls else self._held)
                found += calls
                self._held, self.num_calls = "", self.num_calls + len(calls)
            elif name != "tool_calls" and kind == "region_chunk":
                _say(found, KINDS.get(name, ""), event["text"] if name in KINDS else "")
                self._held = self._held.partition(event["text"])[2]
        if events and events[-1]["field"] != "tool_calls" and events[-1]["type"] != "region_chunk":
            self._held = ""  # a marker of other parts


def _say(found: list[tuple[str, str] | Call], kind: str, text: str) -> None:
    """Add text to parts, to the last one if it is of this kind."""
    last = found[-1] if found else None
    if isinstance(last, tuple) and last[0] == kind:
        found[-1] = kind, last[1] + text
    elif text:
        found.append((kind, text))


def _calls(values: list[Any], field: str, tools: list[str]) -> list[Call] | None:
    """Return calls of these tools, which have their arguments in a field, or None if there are others than these."""
    found = []
    for value in (one for some in values for one in (some if isinstance(some, list) else [some])):
        call = value.get("function", value) if isinstance(value, dict) else None  # there may be an object around it
        name, arguments = (call.get("name"), call.get(field, {})) if isinstance(call, dict) else (None, None)
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments  # JSON within JSON
            if name not in tools or not isinstance(arguments, dict):
                return None
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            return None
        # UTF-8 has no half of a character, which JSON writes as Python does.
        found.append(Call(str(name), text.encode(errors="backslashreplace").decode()))
    return found or None


def _split_sure(text: str, marker: str) -> tuple[str, str]:
    """Return what comes before a marker that the text may end in a part of, and before its blanks; and the rest."""
    most = min(len(marker) - 1, len(text))
    begun = next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)
    sure = text[: len(text) - begun].rstrip()
    return sure, text[len(sure) :]


def _values(text: str, names: bool) -> list[Any] | None:
    """Return the values of JSON that follow each other, with blanks, ; or markers between; None if there is other text.

    `names`: a name may stand before an object, which then are the arguments of its call.
    """
    decoder, found = json.JSONDecoder(), []
    rest = text.strip()
    while rest:
        name = ""
        if names and rest[0] not in "[{":
            name, brace, after = rest.partition("{")
            name, rest = name.replace("[ARGS]", "").partition("[CALL_ID]")[0].strip(), brace + after
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        found.append({"name": name, "arguments": value} if name else value)
        rest = rest[end:].strip().removeprefix(";").strip()
        rest = rest.removeprefix(MISTRAL.opening) if names else rest
    return found
