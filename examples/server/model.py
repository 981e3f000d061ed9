"""A model of transformers, its tokenizer, and the engine that runs requests on it."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.server.protocol import ApiError, Options
from examples.server.text import byte_tokenizer
from kvcache import NotSupportedError, PrefixCache
from kvcache.errors import described
from kvcache.hf import Engine, Request

LEAST_TEMPERATURE = 1e-5  # divided by less, logits may become infinite; the most likely token is drawn instead


def load(folder: Path) -> tuple[Any, Any]:
    """Return the model of a folder, and its tokenizer. A model without one has to have the bytes as tokens."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    has_tokenizer = any(folder.glob("tokenizer*"))
    try:
        num_tokens = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
        tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else byte_tokenizer()
        dtype = "auto" if has_tokenizer else torch.float32
        options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # a damaged file may raise any
        raise ValueError(f"{folder} has no model that can be loaded: {described(error)}") from None
    if not has_tokenizer and num_tokens != 256:
        raise ValueError(f"{folder} has no tokenizer, and {num_tokens:,} tokens, which cannot be bytes")
    # transformers fills these with random numbers.
    if wrong := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise ValueError(
            f"{folder} lacks weights of the model, or has others: {', '.join(wrong[:3])} ({len(wrong)} in all)"
        )
    return model.eval(), tokenizer


class Served:
    """What the server runs: text becomes tokens here, and options become those of transformers.

    `arguments` are those of `kvcache.hf.Engine`.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, capacity: int, **arguments: Any) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.num_tokens = model.get_input_embeddings().num_embeddings
        self.engine = Engine(model, capacity=capacity, **arguments)
        self._room = capacity - 2 * self._block_size  # a block may be shared, and another one filled in part
        self._num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._defaults = model.generation_config

    def tenant(self, salt: bytes, quota: int) -> PrefixCache:
        """Return the prefix cache of a tenant, for whom so many tokens are kept."""
        self._room -= quota + self._block_size - 1 if quota else 0  # the block in which it ends is kept whole
        return self.engine.prefix.tenant(salt, quota=quota)

    @property
    def context(self) -> int:
        """The most tokens of a request, its answer included: as many as there is always room for, if it is alone."""
        return self._room if self._num_positions is None else min(self._room, self._num_positions)

    @property
    def _block_size(self) -> int:
        return self.engine.prefix.cache.block_size

    def tokens_of(self, prompt: str) -> list[int]:
        tokens: list[int] = self.tokenizer(prompt)["input_ids"]
        return tokens

    def tokens_of_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ApiError("messages: the model has no chat template: use /v1/completions", "messages")
        try:
            tokens: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        except Exception as error:  # a template may raise any
            raise ApiError(f"messages: the model's chat template refuses them: {error}", "messages") from None
        return tokens

    def try_one(self) -> None:
        """Generate a token; raise ValueError if no request could be served."""
        try:
            self.submit([0], Options(1, None, None, (), None), self.engine.prefix).result()
        except Exception as error:
            raise ValueError(f"{self.name}: no request can be served: {error}") from None

    def submit(self, prompt: list[int], options: Options, tenant: PrefixCache) -> Request:
        """Begin a request. What the client leaves open is as the model's generation config says."""
        temperature = float(first(options.temperature, self._defaults.temperature, 1))
        how: dict[str, Any] = {"do_sample": temperature > LEAST_TEMPERATURE}
        if how["do_sample"]:
            how |= {
                "temperature": temperature,
                "top_p": float(first(options.top_p, self._defaults.top_p, 1)),
                "top_k": first(self._defaults.top_k, 0),  # transformers' own default would be 50
            }
        try:
            how |= {"max_new_tokens": options.max_tokens, "tokenizer": self.tokenizer}  # for stop strings of the model
            return self.engine.submit(prompt, tenant=tenant, seed=options.seed, **how)
        except queue.Full:
            raise ApiError("too many requests wait: try again later", status=503, code="overloaded") from None
        except (NotSupportedError, ValueError) as error:  # as a generation config that asks for beams
            raise ApiError(str(error)) from None


def first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
