"""The JSON of answers, whole or in pieces, as OpenAI's interface has it."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import Iterable
from typing import Any

from kvcache.server.speech import Call


class Answer:
    """Makes the JSON of an answer."""

    def __init__(self, model: str, is_chat: bool, is_stream: bool) -> None:
        self._is_chat = is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        self._head: dict[str, Any] = {  # the fields that all of its pieces have
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if is_chat and is_stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def id(self) -> str:
        """The answer's name, which logs have too."""
        name: str = self._head["id"]
        return name

    def of(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return an answer, or a piece of one."""
        return {**self._head, "choices": choices, **more}

    def choice(self, index: int, pieces: list[Piece], reason: str) -> dict[str, Any]:
        """Return one of the whole answers to a prompt."""
        logprobs = joined([one.logprobs for one in pieces])
        if not self._is_chat:
            said = "".join(one.text for one in pieces)
            return {"index": index, "text": said, "logprobs": logprobs, "finish_reason": reason}
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for one in pieces:
            if one.kind == "call":
                message.setdefault("tool_calls", []).append(called(one.call))
            else:
                message[one.kind] = (message.get(one.kind) or "") + one.text
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def role(self, index: int) -> dict[str, Any]:
        """Return the first piece of a chat's choice, which says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, index: int, piece: Piece | None, num_calls: int, reason: str | None = None) -> dict[str, Any]:
        """Return a piece of a choice; `num_calls`: how many calls of tools came before it."""
        found: dict[str, Any] = {"index": index, "logprobs": piece and piece.logprobs, "finish_reason": reason}
        if not self._is_chat:
            return {**found, "text": "" if piece is None else piece.text}
        if piece is None:
            return {**found, "delta": {}}
        if piece.kind == "call":
            return {**found, "delta": {"tool_calls": [{"index": num_calls, **called(piece.call)}]}}
        return {**found, "delta": {piece.kind: piece.text}}


class Piece:
    """What an answer goes on with: text of a kind (content, reasoning_content), or a call of a tool."""

    def __init__(self, kind: str, text: str = "", call: Call | None = None, logprobs: Any = None) -> None:
        self.kind, self.text, self.call, self.logprobs = kind, text, call, logprobs


def called(call: Call | None) -> dict[str, Any]:
    """Return the JSON of a call."""
    assert call is not None
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def joined(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the probabilities of several pieces as those of one."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, values in (part or {}).items():
            found.setdefault(name, []).extend(values)
    return found or None


def chat_logprobs(tokens: list[tuple[bytes, Any]], names: Any) -> dict[str, Any]:
    """Return the probabilities of tokens as chats have them; `names` returns the bytes of a token."""

    def one(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": [*data]}

    content = [
        {**one(data, its.logprob), "top_logprobs": [one(names(token), value) for token, value in its.top]}
        for data, its in tokens
    ]
    return {"content": content}


def text_logprobs(tokens: list[tuple[bytes, Any]], names: Any, places: list[int]) -> dict[str, Any]:
    """Return the probabilities of tokens, which begin at these places of the text, as completions have them."""
    tops: list[dict[str, float]] = [{} for _ in tokens]
    for top, (_, its) in zip(tops, tokens, strict=True):
        for token, value in its.top:
            # Parts of characters look alike: the likeliest one is told.
            top.setdefault(names(token).decode(errors="replace"), value)
    return {
        "tokens": [data.decode(errors="replace") for data, _ in tokens],
        "token_logprobs": [its.logprob for _, its in tokens],
        "top_logprobs": tops,
        "text_offset": places,
    }


class Places:
    """Tells where in a text its tokens begin. `_place` is the end of the whole characters before a token."""

    def __init__(self) -> None:
        self._place, self._decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> int:
        """Return where a token begins: the parts of a character begin where it does."""
        begun, _ = self._decoder.getstate()
        both, before, alone = (len(one.decode(errors="replace")) for one in (begun + data, begun, data))
        place = self._place + (before if both == before + alone else 0)
        self._place += len(self._decoder.decode(data))
        return place


def events(bodies: Iterable[Any]) -> str:
    """Return bodies as events of a stream."""
    return "".join(f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n" for body in bodies)


def usage_of(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    """Return what a request has used."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
