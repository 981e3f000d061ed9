"""Load a model's tokenizer, which turns text into tokens, and tokens into the bytes that they stand for.

It is read from a Hugging Face folder's ``tokenizer.json`` or from a GGUF file's metadata, both with the package
``tokenizers``. A model of 256 tokens without either takes bytes as tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvcache.errors import ModelFileError, plain, shown
from kvcache.models import reading
from kvcache.models.gguf import Header, Skipped, read_array, read_header
from kvcache.models.reading import expanded, read_file, read_json

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece writes a space


class Tokenizer(Protocol):
    """Turn text into a model's tokens, and tokens into bytes."""

    @property
    def bos(self) -> int | None:
        """The token that `encode` puts first, if any."""

    @property
    def stop(self) -> frozenset[int]:
        """The tokens by which a model ends its text."""

    def encode(self, text: str | bytes) -> list[int]:
        """Turn a text into tokens; where tokens are text, bytes that are not UTF-8 become replacement characters."""

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that tokens stand for; control tokens stand for none.

        A token may end within a character: decode a stream of them with ``codecs.getincrementaldecoder("utf-8")``.
        """


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or a GGUF; a `ByteTokenizer` for 256 tokens without a tokenizer.

    Raise `ModelFileError` if a file is missing or damaged, or the tokenizer is of an unsupported kind, and
    ``ImportError`` if the package ``tokenizers`` is needed and not installed.
    """
    path = expanded(path)
    return _from_folder(path) if os.path.isdir(path) else _from_gguf(read_header(path))


class ByteTokenizer:
    """Tokens that are bytes.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("Romeo")
    [82, 111, 109, 101, 111]
    >>> tokenizer.decode([82, 111])
    b'Ro'
    """

    bos = None

    def __init__(self, stop: frozenset[int] = frozenset()) -> None:
        self.stop = stop

    def encode(self, text: str | bytes) -> list[int]:
        """Turn a text into tokens."""
        return list(text.encode() if isinstance(text, str) else text)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that tokens stand for."""
        return bytes(tokens)


class ModelTokenizer:
    """A tokenizer of the package ``tokenizers``.

    `byte_level`: a token's characters stand for a byte each, as in GPT-2, and are not text with SentencePiece's spaces.
    `bos` precedes an encoded text, the tokens `stop` end one, and `source` names the file in messages.
    """

    def __init__(
        self, model: tokenizers.Tokenizer, byte_level: bool, bos: int | None, stop: frozenset[int], source: str
    ) -> None:
        self.bos, self.stop = bos, stop
        self._source = source
        self._model, self._byte_level = model, byte_level
        added = model.get_added_tokens_decoder().items()
        self._added = {token: b"" if entry.special else entry.content.encode() for token, entry in added}

    def encode(self, text: str | bytes) -> list[int]:
        """Turn a text into tokens, control sequences in it too; `bos` comes first."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        with _guarded(f"{self._source}: the tokenizer fails"):
            tokens: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return tokens if self.bos is None else [self.bos, *tokens]

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes that tokens stand for, with the space that SentencePiece puts before a text."""
        return b"".join(map(self._piece, tokens))

    def _piece(self, token: int) -> bytes:
        """Return the bytes of one token; none for a special one."""
        if token in self._added:
            return self._added[token]
        text = self._model.id_to_token(token) or ""  # a model may have more tokens than its tokenizer
        if self._byte_level:
            return b"".join(BYTES_OF.get(character) or character.encode() for character in text)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", text):
            return bytes.fromhex(byte[1])
        return text.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Return the byte of each character of GPT-2's alphabet.

    Printable bytes are written as themselves, the others as characters from 256 on.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    pairs = [*zip(shown, shown, strict=True), *zip(range(256, 256 + len(hidden)), hidden, strict=True)]
    return {chr(code): bytes([byte]) for code, byte in pairs}


BYTES_OF = _byte_alphabet()


def import_package(name: str) -> Any:
    """Import a package that only some models need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this model needs the package {name}: pip install 'kvcache[cli]'", name=name) from error


@contextmanager
def _guarded(sentence: str) -> Iterator[None]:
    """Turn any error of the package into a `ModelFileError`; its panics derive from `BaseException` only."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ModelFileError):
        raise
    except BaseException as error:
        raise ModelFileError(f"{sentence}: {plain(error)}") from None


# --- Hugging Face folders ----------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> Tokenizer:
    """Read the tokenizer of a folder, and the tokens that end a text."""
    config = read_json(folder / "config.json")
    stop = _token_ids(folder / "config.json", config)
    if os.path.lexists(folder / "generation_config.json"):
        stop |= _token_ids(folder / "generation_config.json", read_json(folder / "generation_config.json"))
    if os.path.lexists(folder / "tokenizer.json"):
        return _from_json(folder / "tokenizer.json", config.get("bos_token_id"), stop)
    if config.get("vocab_size") == 256:
        return ByteTokenizer(stop)
    size = config.get("vocab_size")
    raise ModelFileError(
        f"{plain(folder)} has no tokenizer.json, and only a model of 256 tokens, bytes, needs none, not one of "
        f"{shown(size)}"
    )


def _from_json(path: Path, bos: object, stop: frozenset[int]) -> ModelTokenizer:
    """Read a tokenizer.json. `bos` comes before every text only if the package puts it there."""
    package = import_package("tokenizers")
    data = read_file(path, reading.MAX_TOKENIZER, "a tokenizer")
    most = {b"{": reading.MAX_OBJECTS, b"[": reading.MAX_LISTS, b",": reading.MAX_ITEMS}
    if any(data.count(mark) > count for mark, count in most.items()):
        raise ModelFileError(f"{plain(path)} is no tokenizer: it has more entries than any")
    with _guarded(f"{plain(path)} is no tokenizer"):
        model = package.Tokenizer.from_buffer(data)
        model.no_truncation()
        model.no_padding()
        first = next(iter(model.encode("").ids), None)  # the token that the package puts before every text
        is_byte_level = _is_byte_level(path, model)
        return ModelTokenizer(model, is_byte_level, first if first == bos else None, stop, plain(path))


def _is_byte_level(path: Path, model: tokenizers.Tokenizer) -> bool:
    """Return True for a tokenizer that writes bytes as GPT-2 does, False for SentencePiece's way; refuse others."""
    decoder = json.loads(model.decoder.__getstate__()) if model.decoder else {"type": None}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder])}
    if kinds == {"ByteLevel"}:
        return True
    if kinds & {"ByteFallback", "Metaspace"} and kinds <= {"ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"}:
        return False
    raise ModelFileError(f"{plain(path)}: a decoder of {plain(', '.join(sorted(map(str, kinds))))} is not supported")


def _token_ids(path: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the tokens of ``eos_token_id``, which is absent, one, or several."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ModelFileError(f"{plain(path)}: eos_token_id must be a token or a list of tokens, not {shown(value)}")
    return frozenset(ids)


# --- GGUF files --------------------------------------------------------------------------------------------------

# Patterns that cut a text before pairs are merged. CUTS has them by tokenizer.ggml.pre, whose values are llama.cpp's.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    **dict.fromkeys(["llama-bpe", "llama3", "llama-v3", "falcon3"], (LLAMA3,)),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen"], (LLAMA3.replace("{1,3}", ""),)),
    **dict.fromkeys(["smollm", "starcoder", "refact"], (r"\p{N}", GPT2)),
    "tekken": (TEKKEN,),
}
# Values of tokenizer.ggml.pre with which words that are tokens are not cut further, and a text begins with BOS.
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"}


def _from_gguf(header: Header) -> Tokenizer:
    """Make a tokenizer from the metadata of a GGUF file."""
    kind = header.metadata.get("tokenizer.ggml.model", "none")
    embedding = header.tensors.get("token_embd.weight")
    if kind in ("none", "no_vocab") and embedding is not None and embedding.shape[:1] == (256,):
        return ByteTokenizer()
    if kind not in ("gpt2", "llama"):
        raise ModelFileError(
            f"{plain(header.path)}: tokenizer.ggml.model {shown(kind)} is not supported, only 'gpt2' and 'llama' are"
        )
    return _Vocabulary(header).tokenizer(byte_level=kind == "gpt2")


class _Vocabulary:
    """The tokens of a GGUF file, and the metadata about them."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.tokens = self.array("tokens", str, reading.MAX_TOKENS)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        has_types = self.get("token_type") is not None
        self.types = self.array("token_type", int, reading.MAX_TOKENS) if has_types else (NORMAL,) * len(self.tokens)
        if not len(self.ids) == len(self.tokens) == len(self.types):
            raise self.error("the tokens must differ, and token_type have one element for each")
        if max(map(len, self.tokens), default=0) > reading.MAX_TOKEN:
            raise self.error(f"a token has more than {reading.MAX_TOKEN:,} characters")

    def error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{plain(self.header.path)}: tokenizer.ggml: {what}")

    # --- the metadata, each entry checked as it is read ----------------------------------------------------------

    def get(self, name: str) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{name}")

    def array(self, name: str, element: type, most: int) -> tuple[Any, ...]:
        """Return an array of elements of one type, which must be there; refuse one of more than `most`."""
        given = self.get(name)
        if given is None:
            raise self.error(f"there is no {name}")
        if isinstance(given, Skipped) and given.count > most:
            raise self.error(f"{name} has {given.count:,} elements; {most:,} are the most that are read")
        values = read_array(self.header, f"tokenizer.ggml.{name}")
        if not all(type(value) is element for value in values):
            raise self.error(f"the elements of {name} must be of type {element.__name__}")
        return values

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise self.error(f"{name} must be true or false, not {shown(value)}")
        return default if value is None else value

    def token(self, name: str) -> int | None:
        value = self.get(name)
        if value is not None and not (type(value) is int and 0 <= value < len(self.tokens)):
            raise self.error(f"{name} must be one of {len(self.tokens):,} tokens, not {shown(value)}")
        return value

    def of_type(self, *types: int) -> list[str]:
        """Return the tokens of some of llama.cpp's types."""
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found in types]

    # --- building the package's tokenizer ------------------------------------------------------------------------

    def tokenizer(self, byte_level: bool) -> ModelTokenizer:
        """Make a tokenizer that writes bytes as GPT-2 does, or as SentencePiece."""
        package = import_package("tokenizers")
        model, adds_bos = self._byte_level(package) if byte_level else self._sentence_piece(package)
        control, own = self.of_type(UNKNOWN, CONTROL), self.of_type(USER_DEFINED)
        if len(control) + len(own) > reading.MAX_ADDED:
            raise self.error(
                f"{len(control) + len(own):,} tokens are no normal ones; {reading.MAX_ADDED:,} are the most"
            )
        with _guarded(f"{plain(self.header.path)}: tokenizer.ggml"):
            model.add_special_tokens([package.AddedToken(t, special=True, normalized=False) for t in control])
            model.add_tokens([package.AddedToken(t, normalized=False) for t in own])
        stop = {self.token(f"{name}_token_id") for name in ("eos", "eot", "eom")}
        bos = self.token("bos_token_id") if self.flag("add_bos_token", adds_bos) else None
        ends = frozenset(token for token in stop if token is not None)
        return ModelTokenizer(model, byte_level, bos, ends, plain(self.header.path))

    def _byte_level(self, package: Any) -> tuple[Any, bool]:
        """Make a tokenizer like GPT-2's; return it, and whether a text begins with BOS by default."""
        pre = self.get("pre") or "default"
        if pre not in CUTS:
            raise self.error(f"pre {shown(pre)} is not supported, only {', '.join(CUTS)} are")
        merges = list(map(self._pair, self.array("merges", str, reading.MAX_MERGES * len(self.tokens))))
        model = self._model(package, merges, ignore_merges=pre in WHOLE_WORDS)
        parts = package.pre_tokenizers
        cuts = [parts.Split(package.Regex(pattern), "isolated") for pattern in CUTS[pre]]
        model.pre_tokenizer = parts.Sequence([*cuts, parts.ByteLevel(add_prefix_space=False, use_regex=False)])
        return model, pre in WHOLE_WORDS

    def _sentence_piece(self, package: Any) -> tuple[Any, bool]:
        """Make a tokenizer like Llama 2's; return it, and whether a text begins with BOS by default."""
        unknown = self.token("unknown_token_id")
        unk_token = None if unknown is None else self.tokens[unknown]
        model = self._model(package, self._merges(), byte_fallback=True, fuse_unk=True, unk_token=unk_token)
        parts = package.normalizers
        prepend = [parts.Prepend(SPACE)] if self.flag("add_space_prefix", True) else []
        model.normalizer = parts.Sequence([*prepend, parts.Replace(" ", SPACE)])
        return model, True

    def _merges(self) -> list[tuple[str, str]]:
        """Return every pair of tokens that joins to a token, in SentencePiece's order: best score first."""
        scores = self.array("scores", float, reading.MAX_TOKENS)
        if len(scores) != len(self.tokens):
            raise self.error("scores must have one element for each token")
        ids = {token: self.ids[token] for token in self.of_type(NORMAL)}
        if sum(map(len, ids)) > reading.MAX_CUTS:
            raise self.error(f"its tokens have more than {reading.MAX_CUTS:,} characters")
        found = []
        for token, i in ids.items():
            for cut in range(1, len(token)):
                left, right = ids.get(token[:cut]), ids.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-scores[i], i, left, right))
            if len(found) > reading.MAX_MERGES * len(self.tokens):
                raise self.error(f"its tokens are made of each other in more than {reading.MAX_MERGES} ways each")
        return [(self.tokens[left], self.tokens[right]) for _, _, left, right in sorted(found)]

    def _pair(self, merge: str) -> tuple[str, str]:
        """Return the two tokens that a merge joins: the vocabulary's objects, not copies."""
        pieces = merge.split(" ")
        for piece in pieces:
            if piece not in self.ids:
                raise self.error(f"the merges do not fit the tokens: {shown(piece)} is none")
        if len(pieces) != 2 or "".join(pieces) not in self.ids:
            raise self.error(f"the merges do not fit the tokens: {shown(merge)} makes none of two")
        return self.tokens[self.ids[pieces[0]]], self.tokens[self.ids[pieces[1]]]

    def _model(self, package: Any, merges: Sequence[tuple[str, str]], **settings: Any) -> Any:
        with _guarded(f"{plain(self.header.path)}: tokenizer.ggml: the merges do not fit the tokens"):
            return package.Tokenizer(package.models.BPE(self.ids, merges, **settings))
