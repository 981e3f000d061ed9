"""What changes the scores of tokens before one is drawn; it runs in the engine's thread."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from kvcache.errors import shown
from kvcache.server.errors import ApiError
from kvcache.server.speech import HERMES, LLAMA, Format

# Models would go on with blanks for ever, where a grammar lets them.
SPARINGLY = {"x-guidance": {"whitespace_pattern": r"[ \t\n\r]{0,12}"}}
# llguidance has a state for each remainder: a second for 100,000 of them, three minutes for 10,000,000.
MOST_REMAINDERS = 100_000
MOST_PATTERNS = 8  # of one value: time and memory double with each
MOST_OBJECTS = 5_000  # of a schema: llguidance goes as deep as references lead
STACK = 64 << 20  # bytes for that depth of a thread; with 8 MB, 2,000 objects end the process


class Penalties:
    """Adds a bias to tokens, and takes from tokens that the answer has already, as OpenAI's interface defines it."""

    def __init__(self, num_prompt: int, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency
        self._tokens, self._values = torch.tensor([*bias], dtype=torch.long), torch.tensor([*bias.values()])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token, ``[1, vocabulary]``."""
        scores[0, self._tokens] += self._values
        answer: Any = input_ids[0, self._num_prompt :]
        tokens, times = answer.unique(return_counts=True)
        scores[0, tokens] -= self._presence + self._frequency * times
        return scores


class Grammars:
    """Makes what keeps an answer within a grammar, by llguidance, for a model's tokenizer."""

    def __init__(self, tokenizer: Any, num_tokens: int, end: int | list[int] | None) -> None:
        self._tokenizer, self._num_tokens, self._end = tokenizer, num_tokens, end
        self._made: Any = None  # llguidance's tokenizer, once it is needed

    def of_schema(self, schema: dict[str, Any], param: str) -> Grammar:
        """Return what keeps an answer within a schema of JSON."""
        check_schema(schema, param)
        return self._grammar(json.dumps({"grammars": [{"json_schema": {**schema, **SPARINGLY}}]}), param)

    def of_calls(self, format: Format, tools: list[dict[str, Any]]) -> Grammar:
        """Return what makes an answer a call of one of these tools."""
        for tool in tools:
            check_schema(tool["function"].get("parameters"), "tools")
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            function = tool["function"]
            schema = {**object_schema(function.get("parameters") or {}, function["name"]), **SPARINGLY}
            begin = f'{{"name": {json.dumps(function["name"])}, "{format.arguments}": '
            rules.append(f'call_{i}: {json.dumps(begin)} arguments_{i} "}}"\narguments_{i}: %json {json.dumps(schema)}')
        opening = self._literal(format.opening)
        if format is LLAMA:
            start = "call"
        elif format is HERMES:
            start = f'{opening} "\\n" call "\\n" {self._literal(format.closing or "")}'
        else:
            start = f'{opening} "[" call "]"'
        return self._grammar("\n".join([f"start: {start}", *rules]), "tools", is_lark=True)

    def _literal(self, marker: str) -> str:
        """Return a marker as grammars name it: by its token, if it is one, as texts do not match special tokens."""
        token = token_of(self._tokenizer, marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def _grammar(self, grammar: str, param: str, is_lark: bool = False) -> Grammar:
        try:
            from llguidance import LLMatcher, hf
        except ModuleNotFoundError:
            message = "the server lacks llguidance: its operator installs kvcache[serve]"
            raise ApiError(f"{param}: {message}", param, status=501) from None
        if self._made is None:  # takes about a second
            try:
                self._made = hf.from_tokenizer(self._tokenizer, n_vocab=self._num_tokens, eos_token=self._end)
            except Exception as error:
                raise ApiError(f"{param}: the model's tokenizer takes no grammar: {error}", param, status=501) from None
        matcher = LLMatcher(self._made, LLMatcher.grammar_from_lark(grammar) if is_lark else grammar, log_level=0)
        # Some limits show only behind the tokens with which every answer begins.
        trial = matcher.deep_copy()
        trial.try_consume_tokens(trial.compute_ff_tokens())
        trial.compute_bitmask()
        check_matcher(trial, param)
        return Grammar(matcher, self._num_tokens, param)


def token_of(tokenizer: Any, text: str) -> int | None:
    """Return the token that a text is, or None if it is none."""
    token: int | None = tokenizer.convert_tokens_to_ids(text)
    return None if token == tokenizer.unk_token_id else token


def object_schema(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a tool's schema for objects alone, as its arguments are one; raise if it allows none."""
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ApiError(f"tools: the parameters of {shown(name)} must have the type object", "tools")
    return {**schema, "type": "object"}


def check_matcher(matcher: Any, param: str) -> None:
    """Raise for a schema that llguidance cannot follow, or not any further."""
    if matcher.is_error():
        raise ApiError(f"{param}: the schema cannot be followed: {matcher.get_error().splitlines()[0]}", param)


def check_schema(schema: Any, param: str) -> None:
    """Raise for a schema for which llguidance would take too long, or too much memory."""
    num, left = 0, [schema]
    while left and num <= MOST_OBJECTS:
        one = left.pop()
        num += isinstance(one, dict)
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    num_seen, num_remainders, values, seen = 0, 0, [[schema]], set()  # values: of each, its schemas
    while values and num <= MOST_OBJECTS and num_seen <= 20 * MOST_OBJECTS:
        applied = all_of(values.pop(), schema, param)
        if (name := frozenset(map(id, applied))) in seen:
            continue
        seen.add(name)
        num_seen += len(applied)
        patterns = {str(one[word]) for one in applied for word in ("pattern", "format") if word in one}
        if len(patterns) > MOST_PATTERNS:
            what = f"the schema has {len(patterns)} patterns of one value, by allOf, anyOf or $ref"
            raise ApiError(f"{param}: {what}: give at most {MOST_PATTERNS}", param)
        num_remainders += math.lcm(*(remainders(one.get("multipleOf")) for one in applied)) - 1
        if num_remainders >= MOST_REMAINDERS:
            what = f"the numbers of multipleOf, without zeros at the end, have more than {MOST_REMAINDERS:,} remainders"
            raise ApiError(f"{param}: {what}: give fewer digits", param)
        parts: dict[Any, list[Any]] = {}
        others = [
            one[word] for one in applied for word in ("items", "prefixItems", "additionalProperties") if word in one
        ]
        for one in applied:
            others += members(one.get("patternProperties")).values()
            for part, of in members(one.get("properties")).items():
                parts.setdefault(part, []).append(of)
        values += [others, *(part + others for part in parts.values())]
    if values or num > MOST_OBJECTS:
        what = f"the schema has more than {MOST_OBJECTS:,} objects, or refers to as many again and again"
        raise ApiError(f"{param}: {what}: give a smaller one", param)


def all_of(schemas: list[Any], root: Any, param: str) -> list[dict[str, Any]]:
    """Return the schemas that may hold for one value together, with those that they name."""
    found: dict[int, dict[str, Any]] = {}
    left = [*schemas]
    while left:
        one = left.pop()
        if isinstance(one, list):  # as prefixItems has
            left += one
        if not isinstance(one, dict) or id(one) in found:
            continue
        found[id(one)] = one
        left += [one.get(word) for word in ("allOf", "anyOf", "oneOf")]
        if isinstance(path := one.get("$ref"), str):
            left.append(referred(path, root, param))
    return [*found.values()]


def referred(path: str, root: Any, param: str) -> Any:
    """Return the part of a schema that a reference names."""
    begin, *names = unquote(path).split("/")
    found: Any = root
    for name in names:
        found = members(found).get(name.replace("~1", "/").replace("~0", "~"))
    if begin != "#" or found is None:
        what = f"$ref={shown(path)} names no part of the schema"
        raise ApiError(f"{param}: {what}: it must be one, as #/$defs/name", param)
    return found


def members(value: Any) -> dict[str, Any]:
    """Return what an object or a list has, by name or index."""
    if isinstance(value, list):
        return {str(i): one for i, one in enumerate(value)}
    return value if isinstance(value, dict) else {}


def remainders(multiple: Any) -> int:
    """Return how many remainders a number has, without zeros at its end: 0.05 and 500 are easy."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return 1
    number = Decimal(repr(multiple))
    digits = "".join(map(str, number.as_tuple().digits)).rstrip("0") if number.is_finite() else ""
    return int(digits[:9] or 1)


class Grammar:
    """Keeps an answer within a grammar: it changes the scores of tokens, and `ends` says when the answer is complete.

    With `behind`, a token such as the end of thoughts, what comes before that token is free. `_matcher`, llguidance's,
    says which tokens may come next, and `_mask` has a bit for each.
    """

    def __init__(self, matcher: Any, num_tokens: int, param: str, behind: int | None = None) -> None:
        self._matcher, self._num_tokens, self.param, self._behind = matcher, num_tokens, param, behind
        self._is_free = behind is not None  # whether `behind` has not come yet
        self._mask = np.full((num_tokens + 31) // 32, -1, np.int32)  # a bit for each token: whether it may come

    def copy(self, behind: int | None) -> Grammar:
        """Return one for another answer."""
        return Grammar(self._matcher.deep_copy(), self._num_tokens, self.param, behind)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token, ``[1, vocabulary]``, without tokens that the grammar does not have."""
        if self._is_free:
            return scores
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        allowed = np.zeros(scores.shape[1], np.bool_)  # a model may have more scores than tokens
        allowed[: self._num_tokens] = bits[: self._num_tokens]
        return scores.masked_fill(torch.from_numpy(~allowed), -torch.inf)

    def ends(self, input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        """Take the last token, and return whether it completes the answer, ``[1]``."""
        token = int(input_ids[0, -1])
        if self._is_free:
            self._is_free = token != self._behind
            return torch.tensor([False])
        self._matcher.consume_token(token)
        check_matcher(self._matcher, self.param)
        return torch.tensor([self._matcher.is_stopped()])
