"""A model of transformers, its tokenizer, and the engine that runs requests on it."""

from __future__ import annotations

import contextlib
import queue
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcache import NotSupportedError, PrefixCache, stores
from kvcache.errors import described, shown
from kvcache.hf import Engine, HFCache, Request
from kvcache.hf.requests import vocab_size_of
from kvcache.models.configuration import advise
from kvcache.models.fingerprint import fingerprint
from kvcache.server.adapters import CONFIG
from kvcache.server.drawing import Grammar, Grammars, Penalties, token_of
from kvcache.server.errors import ApiError
from kvcache.server.fields import Ask, Chat, checked
from kvcache.server.speech import CLOSE_THOUGHTS, OPEN_THOUGHTS, Format, Speech, TemplatedSpeech, format_of
from kvcache.server.text import Text, byte_tokenizer, hidden_tokens, token_bytes

# Names of what quantised weights have beside them; transformers leaves out what it does not know.
OF_QUANTISED = re.compile(r"(weight_(scale\w*|packed)|_?scales|qweight|qzeros|absmax|SCB)$")
OF_ROWS = {"dtype", "select", "prompts"}  # what decides how many bytes a token takes
SPARE = 1 << 24  # bytes for lists, beside rows
STATES = 256  # recurrent states that are kept
LAST = 16  # tokens of a prompt with which an answer that goes on is decoded
LEAST_TEMPERATURE = 1e-5  # divided by less, logits may become infinite; the most likely token is drawn instead


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model of a folder, and its tokenizer. A model without one has to have the bytes as tokens."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give its folder")
    if not folder.is_dir():
        advise(folder, folder)
        raise ValueError(f"there is no folder {folder}")
    if (folder / CONFIG).exists():  # transformers would load it unasked, from other folders, too, and pickled weights
        raise ValueError(f"{folder} describes an adapter: give the folder of its model, and --adapter NAME={folder}")
    has_tokenizer = any(any(folder.glob(name)) for name in ("tokenizer*", "vocab.*", "*.model"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else byte_tokenizer()
    except Exception as error:  # a damaged file may raise any
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {described(error)}") from None
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # a damaged file may raise any
        raise ValueError(f"{folder} has no model that can be loaded: {described(error)}") from None
    # What else transformers would say is a list of classes, or that weights are lacking.
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{folder} cannot be served: {config.model_type} has an encoder and a decoder")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "transformers has no decoder of text alone for it, as for many models that see or hear"
        raise ValueError(f"{folder} cannot be served: {config.model_type}: {what}")
    try:
        num_tokens = config.get_text_config().vocab_size
        dtype = "auto" if has_tokenizer else torch.float32
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # a damaged file may raise any
        raise ValueError(f"{folder} has no model that can be loaded: {described(error)}") from None
    model, found = loaded
    if not has_tokenizer and num_tokens != 256:
        raise ValueError(f"{folder} has no tokenizer, and {num_tokens:,} tokens, which cannot be bytes")
    if wrong := sorted(filter(OF_QUANTISED.search, found["unexpected_keys"])):
        raise ValueError(
            f"{folder} has quantised weights that transformers cannot read: {', '.join(wrong[:3])} ({len(wrong)} in "
            "all): give a folder whose weights are not quantised"
        )
    # transformers fills these with random numbers.
    if wrong := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise ValueError(
            f"{folder} lacks weights of the model, or has others: {', '.join(wrong[:3])} ({len(wrong)} in all)"
        )
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.use_cache = True  # whatever training left there
    return model.eval(), tokenizer


def kept_prompts(model: Any, folder: Path, url: str, **arguments: Any) -> PrefixCache:
    """Return a prefix cache whose prompts outlive the server, in a store.

    `arguments` are those of `HFCache.make_kv_cache`.
    """
    limits = limits_of(model, **arguments)
    arguments = {name: value for name, value in arguments.items() if name in OF_ROWS} | limits
    cache = HFCache.make_kv_cache(model.config, arguments.pop("dtype") or "f16", **arguments)
    name = f"kvcache serve {fingerprint(folder)}"
    return PrefixCache(
        cache,
        fingerprint=name,
        store=stores.open(url if ":" in url else f"dir:{url}"),
        state_bytes=HFCache.state_bytes(model),
    )


def limits_of(model: Any, capacity: int, **arguments: Any) -> dict[str, int]:
    """Return how many tokens a cache may hold, and the bytes that it may take for them.

    Short prompts hold blocks in part, so the bytes are twice those of the tokens, and those of recurrent states.
    """
    how = {name: value for name, value in arguments.items() if name in OF_ROWS}
    with HFCache.make_kv_cache(model.config, how.pop("dtype", None) or "f16", capacity=capacity, **how) as cache:
        rows = capacity * sum(layer.bytes_per_token for layer in cache.layers)
    return {"capacity": capacity, "max_bytes": 2 * rows + SPARE + STATES * HFCache.state_bytes(model)}


class Prompt:
    """The tokens of a prompt, and how its answer begins."""

    def __init__(self, tokens: list[int], text: str = "") -> None:
        self.tokens, self.text = tokens, text  # of a chat as its template makes it; otherwise as answers show it
        self.thinks = text.rstrip().endswith(OPEN_THOUGHTS)
        self.pins: list[tuple[int, float]] = []  # how many tokens are to be pinned, and for how many seconds


class Served:
    """What the server runs: text becomes tokens here, and options become those of transformers.

    `adapters` are the names of adapters in the model, by those that clients give. Other `arguments` are those of
    `kvcache.hf.Engine`.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        capacity: int,
        adapters: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.name, self.tokenizer, self._adapters = name, tokenizer, adapters or {}
        self.num_tokens = vocab_size_of(model)
        if arguments.get("prefix") is None:
            arguments |= limits_of(model, capacity, **arguments)
        self.engine = Engine(model, **arguments)
        per_token = sum(layer.bytes_per_token for layer in self.engine.prefix.cache.layers)
        self.tokens_of_state = -(-HFCache.state_bytes(model) // max(per_token, 1))  # which take as many bytes as one
        self._room = capacity - 2 * self._block_size  # a block may be shared, and another one filled in part
        self._num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # characters of a token
        self._defaults = model.generation_config  # options that a request does not give
        ends = self._defaults.eos_token_id
        self._grammars = Grammars(tokenizer, min(self.num_tokens, max(len(tokenizer), 1)), ends)
        self.format: Format | None = format_of(str(tokenizer.chat_template or ""))  # of calls of tools
        self.hidden = hidden_tokens(tokenizer)  # from answers
        self._hidden_beside_calls = hidden_tokens(tokenizer, [self.format.opening] if self.format else [])

    @property
    def names(self) -> list[str]:
        """The models that clients may ask for."""
        return [self.name, *self._adapters]

    def tenant(self, salt: bytes, num_kept: int, model: str) -> PrefixCache:
        """Return the prefix cache of a tenant's prompts to a model, of which so many tokens are kept."""
        self.reserve(num_kept)
        return self.engine.tenant(salt, adapter=self._adapters.get(model), quota=num_kept)

    def reserve(self, num_tokens: int) -> None:
        """Count tokens that requests cannot have."""
        self._room -= num_tokens + self._block_size - 1 if num_tokens else 0  # the block in which it ends is kept whole

    @property
    def context(self) -> int:
        """The most tokens of a request, its answer included: as many as there is always room for, if it is alone."""
        return self._room if self._num_positions is None else min(self._room, self._num_positions)

    def room(self, ask: Ask, prompt: Prompt) -> int:
        """Return how many tokens an answer may have; raise if a prompt and its answer exceed the context."""
        num_prompt, name = len(prompt.tokens), "prompt" if ask.chat is None else "messages"
        lengths, room = f"the prompt has {num_prompt} tokens and the context {self.context}", self.context - num_prompt
        if not num_prompt:
            raise ApiError(f"{name}: has no tokens", name)
        if (last := max(prompt.tokens)) >= self.num_tokens:  # the tokenizer may have more than the model
            token = shown(self.tokenizer.convert_ids_to_tokens(last))
            raise ApiError(f"{name}: has {token}, a token that the model does not have", name)
        if room < 1:
            raise ApiError(
                f"{name}: {lengths}, which leaves no room for an answer", name, code="context_length_exceeded"
            )
        if ask.max_tokens is None:
            usual = first(self._defaults.max_new_tokens, 16 if ask.chat is None else room)
            return min(max(usual, ask.min_tokens), room)
        if ask.max_tokens < 0:
            return room
        if ask.max_tokens > room:
            message = f"max_tokens={ask.max_tokens}: {lengths}, which leaves {room} for the answer"
            raise ApiError(message, "max_tokens", code="context_length_exceeded")
        return ask.max_tokens

    @property
    def _block_size(self) -> int:
        return self.engine.prefix.cache.block_size

    # ---- prompts

    def prompts_of(self, ask: Ask, may_pin: bool) -> list[Prompt]:
        """Return the prompts of a request."""
        if ask.chat is not None:
            return [self._prompt_of_chat(ask.chat, may_pin)]
        return [self._prompt_of(one, ask) for one in ask.prompts]

    def _prompt_of(self, given: str | list[int], ask: Ask) -> Prompt:
        tokens: Any = given
        if isinstance(given, str):
            self._check_length(given, "prompt")
            tokens = self.tokenizer(given)["input_ids"]
        return Prompt(tokens, self._text_of_prompt(tokens) if ask.echoes else "")

    def _check_length(self, text: str, name: str) -> None:
        """Raise for a text that has more tokens than the context, before they are counted one by one."""
        if len(text) > self.context * max(self._longest, 16):
            message = f"has {len(text):,} characters, more than the context of {self.context:,} tokens holds"
            raise ApiError(f"{name}: {message}", name, code="context_length_exceeded")

    def _prompt_of_chat(self, chat: Chat, may_pin: bool) -> Prompt:
        if not self.tokenizer.chat_template:
            raise ApiError("messages: the model has no chat template: use /v1/completions", "messages")
        if chat.names and self.format is None and not self._parses:
            raise ApiError("tools: the model's chat template has none", "tools")
        text = self._rendered(chat, chat.messages, chat.template)
        prompt = Prompt(self._encoded(text), text)
        template = chat.template | {"add_generation_prompt": False, "continue_final_message": False}
        for i, num_characters, seconds in chat.pins if may_pin else ():
            last = {**chat.messages[i], "content": chat.messages[i]["content"][:num_characters]}
            with contextlib.suppress(ApiError):  # a template may refuse the first messages alone
                begin = self._encoded(self._rendered(chat, [*chat.messages[:i], last], template))
                prompt.pins.append((num_common(begin, prompt.tokens), seconds))
        return prompt

    @property
    def _parses(self) -> bool:
        """Whether transformers reads this model's calls of tools."""
        return getattr(self.tokenizer, "response_template", None) is not None

    def _rendered(self, chat: Chat, messages: list[dict[str, Any]], template: dict[str, Any]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=None if chat.choice == "none" else chat.tools, tokenize=False, **template
            )
        except Exception as error:  # a template may raise any
            raise ApiError(f"messages: the model's chat template refuses them: {error}", "messages") from None
        self._check_length(text, "messages")
        return checked(text, "messages")

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def grammar_of(self, ask: Ask) -> Grammar | None:
        """Return the grammar of a request's answers."""
        if ask.chat is not None and ask.chat.choice == "required":
            if self.format is None:
                message = "the server makes no model of this kind call a tool: give auto"
                raise ApiError(f"tool_choice: {message}", "tool_choice")
            tools = ask.chat.tools or []
            named = [one for one in tools if one["function"]["name"] == ask.chat.chosen]
            return self._grammars.of_calls(self.format, named or tools)
        return None if ask.schema is None else self._grammars.of_schema(ask.schema, "response_format")

    def speech_of(self, ask: Ask, prompt: Prompt) -> Speech | TemplatedSpeech | None:
        """Return what tells the parts of an answer to a chat apart."""
        if ask.chat is None:
            return None
        # JSON of a schema may look like a call.
        names = ask.chat.names if ask.schema is None or ask.chat.choice == "required" else []
        if not self._parses:
            return Speech(self.format, names, prompt.thinks)
        make, tools = self.tokenizer.get_response_parser, ask.chat.tools if names else None
        end = self.tokenizer.eos_token or ""
        return TemplatedSpeech(lambda text: make(prefix=text, tools=tools), prompt.text, names, end)

    def text_of(self, ask: Ask, prompt: Prompt) -> Text:
        """Return what makes text of an answer's tokens."""
        goes_on = ask.chat is None or ask.chat.template["continue_final_message"]
        before = prompt.tokens[-LAST:] if goes_on else ()  # some decoders drop the blank with which a text begins
        if ask.chat is not None and self._parses:
            return Text(self.tokenizer, ask.stop, frozenset(), before)
        shows_calls = ask.chat is not None and ask.chat.names
        return Text(self.tokenizer, ask.stop, self._hidden_beside_calls if shows_calls else self.hidden, before)

    def _text_of_prompt(self, tokens: list[int]) -> str:
        """Return the text of a prompt, as far as answers show text."""
        text = Text(self.tokenizer, (), self.hidden)
        return "".join(text.add(token)[0] for token in tokens) + text.end()[0]

    def bytes_of(self, token: int) -> bytes:
        """Return the text of a token, in UTF-8; a part of a character is a part of its bytes."""
        return token_bytes(self.tokenizer, token)

    # ---- requests

    def try_one(self) -> None:
        """Generate a token with each model; raise ValueError if no request could be served."""
        for model in self.names:
            try:
                how = {"max_new_tokens": 1, "tokenizer": self.tokenizer, **self._how({})}
                self.engine.submit([0], tenant=self.tenant(b"try", 0, model), **how).result()
            except Exception as error:
                raise ValueError(f"{model}: no request can be served: {error}") from None

    def _how(self, given: dict[str, float]) -> dict[str, Any]:
        """Return how tokens are drawn. What the client leaves open is as the model's generation config says."""
        usual = 0 if self._defaults.do_sample is False else first(self._defaults.temperature, 1)
        temperature = float(given.get("temperature", usual))
        how: dict[str, Any] = {"do_sample": temperature > LEAST_TEMPERATURE}
        if how["do_sample"]:
            how["temperature"] = temperature
            how["top_p"] = float(first(given.get("top_p"), self._defaults.top_p, 1))
            how["top_k"] = first(given.get("top_k"), self._defaults.top_k, 0)  # transformers' own default would be 50
            how["min_p"] = first(given.get("min_p"), self._defaults.min_p) or None
        if "repetition_penalty" in given:
            how["repetition_penalty"] = float(given["repetition_penalty"])
        return how

    def submit(
        self, prompt: Prompt, ask: Ask, max_tokens: int, seed: int | None, grammar: Grammar | None, tenant: PrefixCache
    ) -> Request:
        """Begin an answer."""
        how = self._how(ask.drawing) | {"max_new_tokens": max_tokens, "tokenizer": self.tokenizer}
        processors: list[Any] = []
        if ask.presence_penalty or ask.frequency_penalty or ask.bias:
            penalties = ask.presence_penalty, ask.frequency_penalty, ask.bias
            processors.append(Penalties(len(prompt.tokens), *penalties))
        if grammar is not None:
            behind = token_of(self.tokenizer, CLOSE_THOUGHTS) if prompt.thinks else None
            if prompt.thinks and behind is None:
                message = f"no grammar can follow thoughts: the model's tokenizer has no token {CLOSE_THOUGHTS}"
                raise ApiError(f"{grammar.param}: {message}", grammar.param, status=501)
            grammar = grammar.copy(behind)
            processors.append(grammar)
            how["stopping_criteria"] = [grammar.ends]
        if ask.min_tokens:
            how["min_new_tokens"] = ask.min_tokens
        if ask.ignores_end:
            how["eos_token_id"] = -1  # None would be the model's own
        try:
            return self.engine.submit(
                prompt.tokens,
                tenant=tenant,
                seed=seed,
                num_logprobs=ask.num_logprobs,
                logits_processor=processors,
                **how,
            )
        except queue.Full:
            raise ApiError("too many requests wait: try again later", status=503, code="overloaded") from None
        except (NotSupportedError, ValueError) as error:  # as a generation config that asks for beams
            raise ApiError(str(error)) from None


def first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def num_common(a: list[int], b: list[int]) -> int:
    """Return how many first tokens two prompts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
