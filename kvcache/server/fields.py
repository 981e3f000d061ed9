"""The fields of a request, each checked: what they do, which are ignored, and which are refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvcache.errors import shown
from kvcache.server.errors import ApiError

# Fields that do something, by the route that takes them; docs/server.md has a line for each.
COMMON = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "min_tokens", "ignore_eos", "stop", "seed", "n", "stream", "stream_options",
    "logprobs", "response_format", "prompt_cache_retention",
}  # fmt: skip
OF_TEXT = {"prompt", "echo", "best_of"}
OF_CHAT = {
    "messages", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort",
}  # fmt: skip
IGNORED = {  # they cannot change the text
    "chat_id", "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "session_id", "store", "user",
}  # fmt: skip
REFUSED: dict[str, tuple[str, Any]] = {  # why, and the value that asks for nothing
    "suffix": ("the server continues texts, and fills in none", ""),
    "modalities": ("the server answers with text", ["text"]),
    "audio": ("the server answers with text", None),
    "prediction": ("the server takes no drafts of answers", None),
    "web_search_options": ("the server searches nothing", None),
    "functions": ("give tools instead", None),
    "function_call": ("give tool_choice instead", None),
}
MOST_LOGPROBS, MOST_ANSWERS, MOST_PINS = 20, 128, 4
ROLES = ("system", "developer", "user", "assistant", "tool")
OF_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
OF_PART = {"type", "text", "cache_control"}
LIFETIMES = {"5m": 300.0, "1h": 3600.0, "24h": 86400.0}  # seconds


@dataclass(frozen=True)
class Chat:
    """What a prompt is made of, as chat templates take it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    choice: str  # "none", "auto" or "required"
    chosen: str | None  # the name of the tool that must be called
    one_call: bool
    template: dict[str, Any]  # further arguments of the template
    pins: list[tuple[int, int, float]] = field(default_factory=list)  # message, characters of its text, seconds

    @property
    def names(self) -> list[str]:
        """The tools that may be called."""
        return [] if self.tools is None or self.choice == "none" else [one["function"]["name"] for one in self.tools]


@dataclass(frozen=True)
class Ask:
    """A request, checked. None: as the model says."""

    prompts: list[str | list[int]]  # empty for a chat
    chat: Chat | None
    model: str | None
    num_answers: int  # to each prompt
    max_tokens: int | None  # -1: what the context leaves
    min_tokens: int
    ignores_end: bool
    drawing: dict[str, float]  # temperature, top_p, top_k, min_p, repetition_penalty: those that were given
    presence_penalty: float
    frequency_penalty: float
    bias: dict[int, float]
    stop: tuple[str, ...]
    seed: int | None
    num_logprobs: int | None
    echoes: bool
    schema: dict[str, Any] | None  # of JSON that the answer must be
    is_stream: bool
    wants_usage: bool
    seconds_kept: float  # for which the whole prompt is pinned


def parse(data: bytes) -> dict[str, Any]:
    """Return the object of a body, without the fields that are null or empty lists."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return without_empty(body)


def without_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are given: null and empty lists mean that a field is left out."""
    return {name: value for name, value in fields.items() if value is not None and value != []}


def read(body: dict[str, Any], is_chat: bool, num_tokens: int, context: int) -> Ask:
    """Return what a body asks for; raise `ApiError` for fields that there are not, and for wrong values.

    `num_tokens` is the size of the vocabulary; `context` is the most tokens of a request.
    """
    for name, value in body.items():
        check_name(name, value, is_chat)
    is_stream, wants_usage = read_stream(body)
    num_answers = number(body, "n", 1, 1, MOST_ANSWERS, int)
    if number(body, "best_of", num_answers, 1, MOST_ANSWERS, int) != num_answers:
        raise ApiError(f"best_of: must be n, which is {num_answers}", "best_of")
    longest = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    max_tokens = number(body, longest, None, 1, 1 << 31, int, off=-1)
    min_tokens = number(body, "min_tokens", 0, 0, 1 << 31, int)
    if 0 < (max_tokens or 0) < min_tokens:
        raise ApiError(f"min_tokens={min_tokens}: must be at most {longest}, which is {max_tokens}", "min_tokens")
    chat = read_chat(body) if is_chat else None
    prompts = [] if is_chat else read_prompts(body, num_tokens, context)
    if num_answers * len(prompts) > MOST_ANSWERS:
        raise ApiError(f"n={num_answers}: {len(prompts)} prompts have more than {MOST_ANSWERS} answers", "n")
    seed = number(body, "seed", -1, 0, (1 << 63) - 1, int, off=-1)
    return Ask(
        prompts=prompts,
        chat=chat,
        model=text(body, "model"),
        num_answers=num_answers,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignores_end=flag(body, "ignore_eos"),
        drawing=read_drawing(body),
        presence_penalty=number(body, "presence_penalty", 0.0, -2, 2),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2, 2),
        bias=read_bias(body, num_tokens),
        stop=read_stop(body),
        seed=None if seed < 0 else seed,
        num_logprobs=read_logprobs(body, is_chat),
        echoes=read_echo(body),
        schema=read_format(body),
        is_stream=is_stream,
        wants_usage=wants_usage,
        seconds_kept=read_retention(body),
    )


def check_name(name: str, value: Any, is_chat: bool) -> None:
    """Raise for a field that this route does not take."""
    if name in REFUSED:
        why, off = REFUSED[name]
        if value != off:
            raise ApiError(f"{name}: {why}", name)
    elif name in (OF_TEXT if is_chat else OF_CHAT):
        raise ApiError(f"{name}: is a field of /v1/{'' if is_chat else 'chat/'}completions", name)
    elif name not in COMMON | IGNORED | OF_CHAT | OF_TEXT:
        raise ApiError(f"{shown(name)}: there is no such field", name[:80])


# ---- single values


def number(
    body: dict[str, Any],
    name: str,
    default: Any,
    least: float,
    most: float,
    kind: Any = (int, float),
    *,
    off: Any = None,
) -> Any:
    """Return a number of the body; `off`: a value below `least` that asks for the default."""
    value = body.get(name, default)
    if value is default or (off is not None and value == off and not isinstance(value, bool)):
        return value
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        what = "an integer" if kind is int else "a number"
        raise ApiError(f"{name}={shown(value)}: must be {what} from {least} to {most}", name)
    return value


def flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    """Return a truth value of the body."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(f"{name}={shown(value)}: must be true or false", name)
    return value


def text(body: dict[str, Any], name: str) -> str | None:
    """Return a text of the body."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise ApiError(f"{name}={shown(value)}: must be a text", name)
    return value


def checked(given: str, name: str) -> str:
    """Return a text; raise for half of a character, as JSON may have it."""
    try:
        given.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{name}: is no text that UTF-8 can encode", name) from None
    return given


# ---- fields


def read_stream(body: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the answer is to be a stream, and whether its last piece is to say what was used."""
    is_stream, options = flag(body, "stream"), body.get("stream_options")
    if options is None:
        return is_stream, False
    if not is_stream or not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError("stream_options: is for streams, an object with include_usage alone", "stream_options")
    return True, flag(without_empty(options), "include_usage")


def read_drawing(body: dict[str, Any]) -> dict[str, float]:
    """Return how tokens are drawn, as far as the client says it."""
    limits: dict[str, tuple[float, float, Any]] = {
        "temperature": (0, 2, (int, float)),
        "top_p": (1e-6, 1, (int, float)),
        "min_p": (0, 1, (int, float)),
        "repetition_penalty": (0.01, 100, (int, float)),
    }
    found = {name: number(body, name, None, *limit) for name, limit in limits.items() if name in body}
    if "top_k" in body:  # 0 and -1 are what others write for all tokens
        found["top_k"] = max(0, number(body, "top_k", 0, 0, 1 << 31, int, off=-1))
    return found


def read_bias(body: dict[str, Any], num_tokens: int) -> dict[int, float]:
    """Return what is added to the scores of tokens."""
    given = body.get("logit_bias", {})
    if not isinstance(given, dict):
        raise ApiError(f"logit_bias={shown(given)}: must be an object of tokens and numbers", "logit_bias")
    for token, value in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 12 and int(token) < num_tokens):
            raise ApiError(f"logit_bias: {shown(token)} is no token from 0 to {num_tokens - 1}", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise ApiError(f"logit_bias: {token}={shown(value)}: must be a number from -100 to 100", "logit_bias")
    return {int(token): float(value) for token, value in given.items()}


def read_stop(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts at which an answer ends."""
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(one, str) and one for one in stops):
        raise ApiError("stop: must be a text, or a list of up to 16, which may not be empty", "stop")
    return tuple(checked(one, "stop") for one in stops)


def read_logprobs(body: dict[str, Any], is_chat: bool) -> int | None:
    """Return how many of the likeliest tokens are to be told with each token; None: not even its own probability."""
    if not is_chat:
        if body.get("logprobs") is False:  # what a chat would say
            return None
        most: int | None = number(body, "logprobs", None, 0, MOST_LOGPROBS, int)
        return most
    is_wanted = flag(body, "logprobs")
    most = number(body, "top_logprobs", 0, 0, MOST_LOGPROBS, int)
    if most and not is_wanted:
        raise ApiError("top_logprobs: needs logprobs, which must be true", "top_logprobs")
    return most if is_wanted else None


def read_echo(body: dict[str, Any]) -> bool:
    """Return whether the prompt is to stand before the answer."""
    echoes = flag(body, "echo")
    if echoes and body.get("logprobs") is not None:
        raise ApiError("echo: goes without logprobs, which the tokens of a prompt do not have", "echo")
    return echoes


def read_format(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of JSON that an answer must be."""
    given = body.get("response_format")
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    of = given.get("json_schema") if kind == "json_schema" else None
    schema = of.get("schema") if isinstance(of, dict) else None
    if not isinstance(schema, dict):
        message = "must have the type text, json_object, or json_schema with an object json_schema that has a schema"
        raise ApiError(f"response_format: {message}", "response_format")
    return schema


def read_retention(body: dict[str, Any]) -> float:
    """Return for how many seconds the prompt is to be pinned."""
    given = body.get("prompt_cache_retention", "in_memory")
    if given in ("in_memory", "in-memory"):
        return 0.0
    if given != "24h":
        what = "must be 'in_memory' or '24h'"
        raise ApiError(f"prompt_cache_retention={shown(given)}: {what}", "prompt_cache_retention")
    return LIFETIMES["24h"]


def read_prompts(body: dict[str, Any], num_tokens: int, context: int) -> list[str | list[int]]:
    """Return prompts, each a text or its tokens."""
    given: Any = body.get("prompt")
    is_list = isinstance(given, list) and any(isinstance(one, str | list) for one in given)
    many: list[Any] = [*given] if is_list else [given]
    if len(many) > MOST_ANSWERS:
        raise ApiError(f"prompt: has {len(many)} prompts: at most {MOST_ANSWERS} go together", "prompt")
    for one in many:
        if isinstance(one, list) and len(one) > context:
            message = f"the prompt has {len(one)} tokens and the context {context}, which leaves no room for an answer"
            raise ApiError(f"prompt: {message}", "prompt", code="context_length_exceeded")
        is_tokens = isinstance(one, list) and all(type(token) is int and 0 <= token < num_tokens for token in one)
        if not (isinstance(one, str) or is_tokens):
            message = f"must be a text, a list of tokens from 0 to {num_tokens - 1}, or a list of these"
            raise ApiError(f"prompt: {message}", "prompt")
        if not one:
            raise ApiError("prompt: is empty", "prompt")
        if isinstance(one, str):
            checked(one, "prompt")
    return many


# ---- chats


def read_chat(body: dict[str, Any]) -> Chat:
    """Return the messages of a chat, its tools, and what else its template is given."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise ApiError("messages: must be a list of one or more", "messages")
    pins: list[tuple[int, int, float]] = []
    read_ones = [read_message(one, i, pins) for i, one in enumerate(messages)]
    if len(pins) > MOST_PINS:
        raise ApiError(f"messages: {len(pins)} parts have cache_control: at most {MOST_PINS} may", "messages")
    tools = read_tools(body)
    template = body.get("chat_template_kwargs", {})
    if not isinstance(template, dict):
        raise ApiError(f"chat_template_kwargs={shown(template)}: must be an object", "chat_template_kwargs")
    goes_on = flag(body, "continue_final_message")
    begins = flag(body, "add_generation_prompt", not goes_on)
    if goes_on and begins:
        message = "an answer cannot both continue the last message and begin a new one"
        raise ApiError(f"continue_final_message: {message}", "continue_final_message")
    effort = text(body, "reasoning_effort")
    template = {**({} if effort is None else {"reasoning_effort": effort}), **template}
    if wrong := template.keys() & {"conversation", "messages", "tools", "tokenize", "chat_template", "return_dict"}:
        raise ApiError(f"chat_template_kwargs: has {min(wrong)!r}, which the request gives", "chat_template_kwargs")
    template |= {"add_generation_prompt": begins, "continue_final_message": goes_on}
    choice, chosen = read_choice(body, tools)
    return Chat(read_ones, tools, choice, chosen, not flag(body, "parallel_tool_calls", True), template, pins)


def read_message(message: Any, i: int, pins: list[tuple[int, int, float]]) -> dict[str, Any]:
    """Return a message as templates take it; add the places of its text up to which the prompt is to be pinned."""
    where = f"messages[{i}]"
    given = without_empty(message) if isinstance(message, dict) else {}
    # What the API's answers have beside these, clients give back: there it is null or empty.
    given = {name: value for name, value in given.items() if name not in ("annotations", "refusal", "audio") or value}
    given.pop("provider_specific_fields", None)  # LiteLLM's clients give back what it adds to answers
    control = given.pop("cache_control", None)
    role = given.get("role")
    if role not in ROLES:
        raise ApiError(f"{where}: must have a role, one of {', '.join(ROLES)}", "messages")
    if unknown := given.keys() - OF_MESSAGE:
        raise ApiError(f"{where}: there is no field {shown(min(unknown))}", "messages")
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}  # templates have no developers
    found["content"], places = read_content(given.get("content", ""), where)
    if control is not None:  # as on the last part
        places.append((len(found["content"]), read_control(control, where)))
    pins.extend((i, at, seconds) for at, seconds in places)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := given.get(name)) is not None:
            if not isinstance(value, str):
                raise ApiError(f"{where}: {name}={shown(value)}: must be a text", "messages")
            found[name] = checked(value, "messages")
    if "tool_calls" in given:
        found["tool_calls"] = read_calls(given["tool_calls"], where)
    elif "content" not in given and role not in ("assistant", "tool"):
        raise ApiError(f"{where}: must have a content", "messages")
    return found


def read_content(content: Any, where: str) -> tuple[str, list[tuple[int, float]]]:
    """Return a message's text, and the places up to which it is to be pinned, each with its seconds."""
    if isinstance(content, str):
        return checked(content, "messages"), []
    if not isinstance(content, list):
        raise ApiError(f"{where}: content must be a text, or a list of parts that are text", "messages")
    whole, places = "", []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "file", "video_url"):
            what = f"{where}: this server takes text alone, and no part of the type {kind}"
            raise ApiError(f"{what}: kvcache-llama-server takes images", "messages")
        if kind != "text" or not isinstance(part.get("text"), str) or part.keys() - OF_PART:
            raise ApiError(f"{where}: a part of the content must have the type text, and a text", "messages")
        whole += checked(part["text"], "messages")
        if (control := part.get("cache_control")) is not None:
            places.append((len(whole), read_control(control, where)))
    return whole, places


def read_control(control: Any, where: str) -> float:
    """Return for how many seconds a prompt is to be pinned up to a part."""
    given = control if isinstance(control, dict) else {}
    lifetime = given.get("ttl", "5m")
    if given.get("type") != "ephemeral" or given.keys() - {"type", "ttl"} or lifetime not in ("5m", "1h"):
        raise ApiError(
            f"{where}: cache_control must have the type ephemeral, and may have a ttl of 5m or 1h", "messages"
        )
    return LIFETIMES[lifetime]


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools that an assistant made, with their arguments as templates take them: objects."""
    if not isinstance(calls, list):
        raise ApiError(f"{where}: tool_calls must be a list", "messages")
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        given = function.get("arguments", "{}") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(given, str):
            raise ApiError(f"{where}: each of tool_calls must have a function with a name and arguments", "messages")
        try:
            arguments = json.loads(given or "{}")
        except (ValueError, RecursionError):
            arguments = given
        called = {"name": function["name"], "arguments": arguments}
        found.append({"id": call.get("id", ""), "type": "function", "function": called})
    return found


def read_tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools that may be called."""
    tools = body.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ApiError("tools: must be a list", "tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ApiError(f"tools[{i}]: must have the type function, and a function with a name", "tools")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ApiError(f"tools[{i}]: parameters must be an object, a schema", "tools")
    return tools


def read_choice(body: dict[str, Any], tools: list[dict[str, Any]] | None) -> tuple[str, str | None]:
    """Return whether tools may, must or must not be called; and the one that must."""
    given = body.get("tool_choice", "none" if tools is None else "auto")
    if given in ("none", "auto") or (given == "required" and tools):
        return str(given), None
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if tools is None or name not in [one["function"]["name"] for one in tools]:
        message = "must be none, auto, required, or name one of the tools"
        raise ApiError(f"tool_choice={shown(given)}: {message}", "tool_choice")
    return "required", name
