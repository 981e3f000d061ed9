"""Tokenizers: folders and GGUF files of one vocabulary agree, and unusable files are refused."""

import codecs
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import gguf_files
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Package

from kvcache import ModelFileError
from kvcache.models.tokenizer import CUTS, ByteTokenizer, Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
CORPUS = [
    path.read_text()[:4000] for path in [*sorted((ROOT / "kvcache").glob("*.py")), ROOT / "examples/model/eval.txt"]
]
TEXTS = [
    "",
    " ",
    "ROMEO:",
    "  two  spaces\n\n\tand\r\n more 	\u00a0",
    "I'LL say it's we've I'd; don't'S",
    "12345678 3,141.59 ²½ ٣٤",
    "größer, Ǆungla — naïve 東京 🙂🙂 \x00\x1b[2J",
    "a <|name|> b<|end|>",
    CORPUS[0][:3000],
]
CONTROL = ["<|begin|>", "<|end|>"]


def train(cut: pre_tokenizers.PreTokenizer, size: int = 600, **settings: Any) -> Package:
    """A byte-level BPE; its first tokens are control tokens, its last one is a user's."""
    model = Package(models.BPE(**settings))
    model.pre_tokenizer = cut
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    model.add_tokens([AddedToken("<|name|>", normalized=False)])
    return model


def vocabulary(model: Package) -> list[str]:
    ids = model.get_vocab()
    return sorted(ids, key=lambda token: ids[token])


def write_folder(folder: Path, model: Package | None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if model is not None:
        model.save(str(folder / "tokenizer.json"))
    return folder


def write_gguf(path: Path, kind: str | None, entries: Mapping[str, Any], rows: int = 0) -> Path:
    """Write a GGUF file with these entries of tokenizer.ggml, and an embedding of `rows` rows."""
    entries = entries if kind is None else {"model": kind, **entries}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    tensors = [("token_embd.weight", np.zeros((rows, 4), np.float32), None)] if rows else []
    return gguf_files.write(path, "llama", metadata, tensors)


def entries_of(model: Package) -> dict[str, Any]:
    """Return the GGUF fields of a tokenizer made by `train`."""
    found = vocabulary(model)
    types = [3 if token in CONTROL else 4 if token == "<|name|>" else 1 for token in found]
    merges = [" ".join(pair) for pair in json.loads(model.to_str())["model"]["merges"]]
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return {"tokens": found, "token_type": types, "merges": merges, **ends}


# --- bytes -------------------------------------------------------------------------------------------------------


def test_the_model_of_the_examples_has_bytes() -> None:
    tokenizer = load_tokenizer(ROOT / "examples" / "model")
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.bos, tokenizer.stop) == (None, frozenset())
    assert tokenizer.encode("é") == tokenizer.encode("é".encode()) == [0xC3, 0xA9]
    assert tokenizer.decode(range(256)) == bytes(range(256))


def test_a_gguf_file_without_a_tokenizer_has_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "bytes.gguf", None, {}, rows=256)
    assert isinstance(load_tokenizer(path), ByteTokenizer)


# --- byte-level BPE ----------------------------------------------------------------------------------------------

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def cut_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), BYTES])


PUBLISHED = {  # what the models' own tokenizer.json say
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": cut_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "qwen2": cut_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """One vocabulary, as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = train(PUBLISHED["qwen2"])
    entries = entries_of(model)
    model.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    model.enable_truncation(5)
    write_folder(folder, model, bos_token_id=0, eos_token_id=1, vocab_size=700)
    write_gguf(folder / "model.gguf", "gpt2", {**entries, "pre": "qwen2", "add_bos_token": True})
    return load_tokenizer(folder), load_tokenizer(folder / "model.gguf")


Both = tuple[Tokenizer, Tokenizer]


def test_what_begins_and_ends_a_text(both: Both) -> None:
    for tokenizer in both:
        assert (tokenizer.bos, {*tokenizer.stop}) == (0, {1})
        assert tokenizer.encode("") == [0]
        assert tokenizer.decode([0, 1]) == b""
        assert tokenizer.decode([5000]) == b""  # a model may have more tokens than its tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_folder_and_file_agree(both: Both, text: str) -> None:
    folder, file = both
    assert folder.encode(text) == file.encode(text) == file.encode(text.encode())
    for tokenizer in both:
        assert tokenizer.decode(tokenizer.encode(text)).decode() == text.replace("<|end|>", "")


@given(st.text())
def test_any_text_goes_round(both: Both, text: str) -> None:
    found = both[0].encode(text)
    assert found == both[1].encode(text)
    assert both[1].decode(found).decode() == text
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert "".join(decoder.decode(both[1].decode([token])) for token in found) == text


@given(st.binary())
def test_bytes_that_are_no_text_are_replaced(both: Both, data: bytes) -> None:
    assert both[0].decode(both[0].encode(data)).decode() == data.decode(errors="replace")


@pytest.mark.parametrize("pre", PUBLISHED)
def test_texts_are_cut_as_published(tmp_path: Path, pre: str) -> None:
    whole_words = {"ignore_merges": True} if pre == "llama-bpe" else {}
    model = train(PUBLISHED[pre], **whole_words)
    file = load_tokenizer(write_gguf(tmp_path / "m.gguf", "gpt2", {**entries_of(model), "pre": pre}))
    assert file.bos == (0 if pre == "llama-bpe" else None)
    for text in (*TEXTS, *CORPUS):
        expected = model.encode(text, add_special_tokens=False).ids
        assert file.encode(text) == ([0] if pre == "llama-bpe" else []) + expected


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("tekken", "HelloWorld's 123\n/x", ["Hello", "World", "'s", "Ġ", "1", "2", "3", "Ċ", "/x"]),
        ("default", "a  b== 12345", ["a", "Ġ", "Ġb", "==", "Ġ", "123", "45"]),
    ],
)
def test_how_other_texts_are_cut(pre: str, text: str, expected: list[str]) -> None:
    assert [piece for piece, _ in cut_by(*CUTS[pre]).pre_tokenize_str(text)] == expected


# --- SentencePiece -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentence_piece() -> tuple[Package, list[str], list[float]]:
    """A tokenizer as Llama 2's, its tokens, and their scores."""
    model = Package(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    model.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    found, state = vocabulary(model), json.loads(model.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    model = Package.from_str(json.dumps(state))
    merges = ["".join(pair) for pair in state["model"]["merges"]]
    ranks = {token: i for i, token in enumerate(merges)}
    return model, found, [float(-ranks.get(token, 0)) for token in found]


def llama_entries(found: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    types = [2, 3, 3, *[6] * 256, *[1] * (len(found) - 259)]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"tokens": list(found), "scores": list(scores), "token_type": types, **ends}


def merge_best_first(text: str, scores: Mapping[str, float]) -> list[str]:
    """SentencePiece's algorithm, word for word: the pair that makes the best token is merged, the first of equals."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def lines_of(corpus: Sequence[str]) -> Iterator[str]:
    for text in corpus:
        yield from text.splitlines()[:60]


def test_scores_say_what_is_merged(tmp_path: Path, sentence_piece: tuple[Package, list[str], list[float]]) -> None:
    _, found, scores = sentence_piece
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", "llama", llama_entries(found, scores)))
    assert (tokenizer.bos, {*tokenizer.stop}) == (1, {2})
    ids = {token: i for i, token in enumerate(found)}
    ranked = dict(zip(found[259:], scores[259:], strict=True))
    for line in lines_of(CORPUS):
        if line and all(character in ids for character in line.replace(" ", "▁")):
            expected = [ids[part] for part in merge_best_first("▁" + line.replace(" ", "▁"), ranked)]
            assert tokenizer.encode(line) == [1, *expected]


@pytest.mark.parametrize("prefix", [True, False])
def test_bytes_stand_in_for_other_characters(
    tmp_path: Path, sentence_piece: tuple[Package, list[str], list[float]], prefix: bool
) -> None:
    entries = llama_entries(*sentence_piece[1:])
    path = write_gguf(tmp_path / "m.gguf", "llama", {**entries, "add_space_prefix": prefix, "add_bos_token": False})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("東")[-3:] == [3 + byte for byte in "東".encode()]
    for text in TEXTS[:7]:
        expected = (" " if prefix and text else "") + text
        assert tokenizer.decode(tokenizer.encode(text)).decode() == expected


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ],
    ids=["metaspace", "sequence"],
)
def test_a_folder_of_sentence_piece(
    tmp_path: Path, sentence_piece: tuple[Package, list[str], list[float]], decoder: decoders.Decoder
) -> None:
    model = Package.from_str(sentence_piece[0].to_str())
    model.decoder = decoder
    tokenizer = load_tokenizer(write_folder(tmp_path, model, eos_token_id=[2, 1]))
    assert (tokenizer.bos, {*tokenizer.stop}) == (None, {1, 2})
    assert tokenizer.decode(tokenizer.encode("ROMEO: 東京\n")).decode() == " ROMEO: 東京\n"


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train(PUBLISHED["qwen2"]), eos_token_id=1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert load_tokenizer(folder).stop == {1, 7}


# --- what will not do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no config\.json"),
        ({"config.json": "{"}, r"config\.json is not JSON"),
        ({"config.json": "[" * 100_000}, "its values are nested too deeply"),
        ({"config.json": "[]"}, r"config\.json must hold a JSON object"),
        (
            {"config.json": "{}"},
            "no tokenizer.json, and only a model of 256 tokens, bytes, needs none, not one of None",
        ),
        ({"config.json": '{"vocab_size": 32000}'}, "needs none, not one of 32000"),
        ({"config.json": '{"eos_token_id": "x"}'}, "eos_token_id must be a token or a list of tokens, not 'x'"),
        ({"config.json": '{"eos_token_id": [-1]}'}, r"or a list of tokens, not \[-1\]"),
        ({"config.json": '{"eos_token_id": true}'}, "or a list of tokens, not True"),
        ({"config.json": "{}", "generation_config.json": "x"}, r"generation_config\.json is not JSON"),
        ({"config.json": "{}", "tokenizer.json": ""}, r"tokenizer\.json is no tokenizer: "),
        ({"config.json": "{}", "tokenizer.json": '{"model": 1}'}, r"tokenizer\.json is no tokenizer: "),
        ({"config.json": "{}", "tokenizer.json": "[" * 100_000}, r"tokenizer\.json is no tokenizer: "),
        (
            {"config.json": "{}", "tokenizer.json": Package(models.BPE()).to_str()},
            "a decoder of None is not supported",
        ),
    ],
)
def test_bad_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer(tmp_path)


def test_other_decoders_are_refused_by_name(tmp_path: Path) -> None:
    model = Package(models.WordPiece({"a": 0}, unk_token="a"))
    model.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="a decoder of WordPiece is not supported"):
        load_tokenizer(write_folder(tmp_path, model))


BPE = {"tokens": ["a", "b", "ab"], "merges": ["a b"]}
SPM = {"tokens": ["a", "b", "ab"], "scores": [0.0, 0.0, -1.0]}


@pytest.mark.parametrize(
    ("kind", "entries", "message"),
    [
        (None, {}, "tokenizer.ggml.model 'none' is not supported, only 'gpt2' and 'llama' are"),
        ("bert", BPE, "tokenizer.ggml.model 'bert' is not supported"),
        ("gpt2", {}, "there is no tokens"),
        ("gpt2", {"tokens": ["a"]}, "there is no merges"),
        ("gpt2", {**BPE, "tokens": [1, 2]}, "the elements of tokens must be of type str"),
        ("gpt2", {**BPE, "tokens": "abc"}, "tokenizer.ggml.tokens is not an array"),
        ("gpt2", {**BPE, "tokens": ["a", "a"]}, "the tokens must differ"),
        ("gpt2", {**BPE, "tokens": ["a", "b", "x" * 1025]}, "a token has more than 1,024 characters"),
        ("gpt2", {**BPE, "token_type": [1]}, "token_type have one element for each"),
        ("gpt2", {**BPE, "token_type": ["1"] * 3}, "the elements of token_type must be of type int"),
        ("gpt2", {**BPE, "pre": "klingon"}, "pre 'klingon' is not supported, only default, gpt-2, llama-bpe"),
        ("gpt2", {**BPE, "merges": ["a c"]}, "the merges do not fit the tokens: 'c' is none"),
        ("gpt2", {**BPE, "merges": ["ab"]}, "the merges do not fit the tokens"),
        ("gpt2", {**BPE, "merges": ["a b c"]}, "the merges do not fit the tokens"),
        ("gpt2", {**BPE, "eos_token_id": 3}, "eos_token_id must be one of 3 tokens, not 3"),
        ("gpt2", {**BPE, "bos_token_id": "a", "add_bos_token": True}, "bos_token_id must be one of 3 tokens, not 'a'"),
        ("gpt2", {**BPE, "add_bos_token": 1}, "add_bos_token must be true or false, not 1"),
        ("llama", {"tokens": ["a"]}, "there is no scores"),
        ("llama", {**SPM, "scores": [1.0]}, "scores must have one element for each token"),
        ("llama", {**SPM, "scores": [1, 2, 3]}, "the elements of scores must be of type float"),
        ("llama", {**SPM, "unknown_token_id": 9}, "unknown_token_id must be one of 3 tokens, not 9"),
        ("llama", {**SPM, "add_space_prefix": 0}, "add_space_prefix must be true or false, not 0"),
    ],
)
def test_bad_files(tmp_path: Path, kind: str | None, entries: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "bad.gguf", kind, entries)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_tokenizer(path)
    assert "bad.gguf: " in str(caught.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, Package(models.BPE()))
    write_gguf(tmp_path / "m.gguf", "gpt2", BPE)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(ROOT / "examples" / "model").encode("a") == [97]
    for path in (tmp_path, tmp_path / "m.gguf"):
        with pytest.raises(ImportError, match=r"needs the package tokenizers: pip install 'kvcache\[cli\]'"):
            load_tokenizer(path)
