"""The requests, answers and errors of OpenAI's interface."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcache.errors import shown

UNSUPPORTED: dict[str, Any] = {  # fields with the one value that is taken, beside null
    "n": 1, "best_of": 1, "echo": False, "suffix": "", "logprobs": False, "logit_bias": {}, "presence_penalty": 0,
    "frequency_penalty": 0, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
    "modalities": ["text"],
}  # fmt: skip
IGNORED = {  # they cannot change the text
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
COMMON = {"model", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "stream_options"}
OWN = {False: {"prompt"}, True: {"messages", "max_completion_tokens"}}


@dataclass(frozen=True)
class Options:
    """How a request's tokens are drawn, and where its text ends; None: as the model says."""

    max_tokens: int
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...]
    seed: int | None


class ApiError(Exception):
    """An error that a client gets."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        message, param = message.encode(errors="replace").decode(), param and param.encode(errors="replace").decode()
        super().__init__(message)
        self.status = status
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def number(body: dict[str, Any], name: str, default: Any, least: float, most: float, kind: Any = (int, float)) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "an integer" if kind is int else "a number"
        raise ApiError(f"{name}={shown(value)}: must be {what} from {least} to {most}", name)
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name}={shown(value)}: must be true or false", name)
    return bool(value)


def parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


def read_stream(body: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the answer is to be a stream, and whether its last piece is to say what was used."""
    is_stream, options = flag(body, "stream"), body.get("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream or not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError("stream_options: is for streams, an object with include_usage alone", "stream_options")
    return True, flag(options, "include_usage")


def check_fields(body: dict[str, Any], is_chat: bool, model: str) -> None:
    """Raise for fields that there are not, and for another model."""
    for name, value in body.items():
        if name in UNSUPPORTED and not is_off(value, UNSUPPORTED[name]):
            raise ApiError(f"{name}: this server takes {json.dumps(UNSUPPORTED[name])} alone", name)
        if name not in COMMON | OWN[is_chat] | UNSUPPORTED.keys() | IGNORED:
            raise ApiError(f"{shown(name)}: there is no such field", name[:80])
    if body.get("model") not in (None, model):
        raise ApiError(f"model: there is {model!r} alone", "model", status=404, code="model_not_found")


def read_options(body: dict[str, Any], is_chat: bool, num_prompt: int, context: int) -> Options:
    """Return the options of a request; raise for a wrong value, or if prompt and answer exceed the context."""
    lengths, room = f"the prompt has {num_prompt} tokens and the context {context}", context - num_prompt
    if room < 1:
        name = "messages" if is_chat else "prompt"
        raise ApiError(f"{name}: {lengths}, which leaves no room for an answer", name, code="context_length_exceeded")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = number(body, name, room if is_chat else min(room, 16), 1, 1 << 31, int)
    if max_tokens > room:
        raise ApiError(
            f"{name}={max_tokens}: {lengths}, which leaves {room} for the answer", name, code="context_length_exceeded"
        )
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(one, str) and one for one in stops):
        raise ApiError("stop: must be a text, or a list of up to 4, which may not be empty", "stop")
    return Options(
        max_tokens,
        number(body, "temperature", None, 0, 2),
        number(body, "top_p", None, 1e-6, 1),
        tuple(check_text(one, "stop") for one in stops),
        number(body, "seed", None, 0, (1 << 63) - 1, int),
    )


def is_off(value: Any, off: Any) -> bool:
    """Return whether a field's value is null, or the value that turns it off; 0 and 1 are no truth values."""
    return value is None or (value == off and isinstance(value, bool) == isinstance(off, bool))


def check_text(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character, as JSON may have it
        raise ApiError(f"{name}: is no text that UTF-8 can encode", name) from None
    return text


def read_prompt(body: dict[str, Any], num_tokens: int) -> str | list[int]:
    """Return a prompt, which is a text or its tokens."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
    elif not isinstance(prompt, list) or not all(type(one) is int and 0 <= one < num_tokens for one in prompt):
        raise ApiError(f"prompt: must be one text, or a list of tokens from 0 to {num_tokens - 1}", "prompt")
    if not prompt:
        raise ApiError("prompt: is empty", "prompt")
    return prompt


def read_messages(body: dict[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a chat, as chat templates take them."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: must be a list of one or more", "messages")
    return [read_message(one, i) for i, one in enumerate(messages)]


def read_message(message: Any, i: int) -> dict[str, str]:
    given = message if isinstance(message, dict) else {}
    role, content, name = given.get("role"), text_of(given.get("content")), given.get("name")
    if role not in ("system", "developer", "user", "assistant") or not isinstance(content, str):
        raise ApiError(f"messages[{i}]: must have a role and a content, which is text", "messages")
    if unknown := {field for field, value in given.items() if value is not None} - {"role", "content", "name"}:
        raise ApiError(f"messages[{i}]: there is no field {shown(min(unknown))}", "messages")
    if name is not None and not isinstance(name, str):
        raise ApiError(f"messages[{i}]: name={shown(name)}: must be a text", "messages")
    read = {"role": "system" if role == "developer" else role, "content": content}  # templates have no developers
    if name:
        read["name"] = name
    for text in (content, name or ""):
        check_text(text, "messages")
    return read


def text_of(content: Any) -> Any:
    """Return a message's content; if it consists of parts of text, their text."""
    if isinstance(content, list) and all(is_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content


def is_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class Answer:
    """Makes the JSON of an answer."""

    def __init__(self, model: str, is_chat: bool, is_stream: bool) -> None:
        self._is_chat, self._is_stream = is_chat, is_stream
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if is_chat and is_stream else kind,
            "created": int(time.time()),
            "model": model,
        }

    def body(self, text: str, reason: str | None, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return an answer, or a piece of one."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": None}
        if self._is_chat:
            key = "delta" if self._is_stream else "message"
            choice[key] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {**self._head, "choices": [choice], **({} if usage is None else {"usage": usage})}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the piece that follows the text, and says what was used."""
        return {**self._head, "choices": [], "usage": usage}


def events(bodies: Iterable[Any]) -> str:
    return "".join(f"data: {body if isinstance(body, str) else json.dumps(body)}\n\n" for body in bodies)


def usage_of(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
