"""Hostile model files are read, or refused in one sentence, at little cost."""

import ast
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from support import hostile

import kvcache
from kvcache import ModelFileError, NotSupportedError, errors, runner
from kvcache.models import gguf, reading, shapes, tokenizer, weights
from kvcache.runner import llama

MODEL = Path(__file__).parents[2] / "examples" / "model"

# --- memory and work ---------------------------------------------------------------------------------------------

READ = """
import resource, sys, time
from kvcache import KVCacheError
from kvcache.models import shapes, tokenizer
from kvcache import runner
from kvcache.tools import cli
import gguf, numpy, tokenizers

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

tokenizers.Tokenizer.from_buffer(
    b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}'
).encode("a")
before, allowed, begin = peak(), int(sys.argv[3]), time.process_time()
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
result = "read"
try:
    {"shape": shapes.read, "tokenizer": tokenizer.load_tokenizer, "llama": runner.Llama.load}[sys.argv[1]](sys.argv[2])
except KVCacheError as error:
    result = f"{type(error).__name__}: {error}"
seconds = time.process_time() - begin
if seconds > 10:  # two, and what a slow machine may take longer
    result = f"{seconds:.0f} s for: {result}"
if peak() - before > allowed:  # of what the imports took already
    result = f"{(peak() - before) >> 20} MiB for: {result}"
print(ascii(result))
"""


def read_apart(kind: str, path: Path, allowed: int = 200 * 1000 * 1000) -> str:
    """Read a file as a shape, tokenizer or model; return "read", the error, or that it took too much memory."""
    command = [sys.executable, "-c", READ, kind, str(path), str(allowed)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stderr == ""
    return str(ast.literal_eval(done.stdout))


MB = 1 << 20
SIZE = 10 * 1000 * 1000  # of the files that are to be as large as they may


def repeated(text: bytes, size: int = SIZE) -> bytes:
    """Return a JSON list of about `size` bytes that repeats this value."""
    return b"[" + (text + b",") * (size // (len(text) + 1)) + b"0]"


def json_of(folder: Path, data: bytes, sparse: int = 0) -> Path:
    (folder / "config.json").write_bytes(data)
    if sparse:
        os.truncate(folder / "config.json", sparse)
    return folder


def index_of_many_files(folder: Path) -> Path:
    names = {str(i): f"{i}.safetensors" for i in range(300_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return hostile.config(folder / "config.json").parent


def safetensors_of(
    folder: Path, header: bytes | dict[str, Any], data: bytes = b"", sparse: int = 0, **config: int
) -> Path:
    hostile.config(folder / "config.json", **config)
    path = hostile.safetensors(folder / "model.safetensors", header, data)
    os.truncate(path, path.stat().st_size + sparse)
    return folder


def entry(offset: int, *shape: int, dtype: str = "F16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [0, offset]}


def overlapping_gguf(folder: Path) -> Path:
    tensors = [hostile.tensor(b"token_embd.weight", (128, 256))]
    for i in range(1000):
        shapes = {"attn_norm": (128,), "ffn_norm": (128,), "ffn_gate": (128, 512), "ffn_up": (128, 512)}
        shapes |= {f"attn_{name}": (128, 128) for name in ("q", "k", "v", "output")} | {"ffn_down": (512, 128)}
        tensors += [hostile.tensor(b"blk.%d.%s.weight" % (i, name.encode()), shape) for name, shape in shapes.items()]
    return hostile.gguf(folder / "a.gguf", hostile.llama_entries(), tensors, 512 * 128 * 4)


def gguf_of_long_strings(folder: Path) -> Path:
    """Sparse: of the 6 GB that they have, a file system stores some kB."""
    size = (1 << 24) - 100
    path = folder / "a.gguf"
    with path.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, 400))
        for i in range(400):
            file.write(hostile.text(b"%d" % i) + struct.pack("<IQ", 8, size))
            file.seek(size, os.SEEK_CUR)
        file.truncate()
    return path


def gguf_of(folder: Path, entries: dict[str, bytes], tensors: Sequence[bytes] = (), sparse: int = 0) -> Path:
    path = hostile.gguf(folder / "a.gguf", entries, tensors)
    if sparse:
        os.truncate(path, sparse)
    return path


def vocabulary(folder: Path, kind: bytes, tokens: list[bytes], **entries: bytes) -> Path:
    return hostile.gguf(folder / "a.gguf", hostile.vocabulary(kind, tokens, **entries))


def scored(folder: Path, tokens: list[bytes]) -> Path:
    return vocabulary(folder, b"llama", tokens, scores=hostile.numbers(6, "f", [0.0] * len(tokens)))


def of_many_merges(folder: Path) -> Path:
    tokens = [b"%c%c" % (33 + i % 90, 33 + i // 90) for i in range(8100)]
    merges = [a + b" " + b for a in tokens[:90] for b in tokens]
    return vocabulary(folder, b"gpt2", tokens, merges=hostile.strings(merges))


def bpe_of(folder: Path, data: bytes) -> Path:
    return hostile.tokenizer(folder, b'{"model":{"type":"BPE","x":' + data + b"}}")


def sparse_tokenizer(folder: Path) -> Path:
    os.truncate(hostile.tokenizer(folder, b"{") / "tokenizer.json", 1 << 40)
    return folder


def config(**changes: Any) -> Callable[[Path], Path]:
    return lambda folder: hostile.config(folder / "config.json", **changes)


DEEP = b'{"":' * 90 + b"0" + b"}" * 90
WIDE = "\U0001f642"
NUMBERED = {str(i): i for i in range(300_000)}
MADE: dict[str, dict[str, Callable[[Path], Path]]] = {  # how it is read, what it is of: how it is made in a folder
    "shape": {
        "wide values": config(v_head_dim=1 << 20),
        "a rotation of too much": config(
            model_type="stablelm", rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 1e7}
        ),
        "keys for each layer": config(
            num_hidden_layers=1024, per_layer_config={str(i): {"head_dim": 32} for i in range(1024)}, **NUMBERED
        ),
        "long names of fields": config(
            num_hidden_layers=1024,
            per_layer_config={str(i): {"head_dim": 32} for i in range(1024)},
            max_position_embeddings=-5,
            **{f"{i:0>250}": 1 for i in range(4000)},
        ),
        "names of many characters": config(**{"r" * 2400 + str(i): 1 for i in range(3900)}),
        "keys of a rotation": config(num_hidden_layers=1024, rope_scaling=NUMBERED),
        "a long list of layers": config(
            model_type="bamba", num_hidden_layers=1024, attn_layer_indices=[*range(1_000_000, 2_000_000)]
        ),
        "a long name": config(model_type=WIDE * (SIZE // 12)),
        "JSON of empty lists": lambda folder: json_of(folder, b'{"a":' + repeated(b"[]") + b"}"),
        "JSON of small objects": lambda folder: json_of(folder, b'{"a":' + repeated(b'{"":0}') + b"}"),
        "JSON of nested objects": lambda folder: json_of(folder, b'{"a":' + repeated(DEEP) + b"}"),
        "JSON of as many objects as are read": lambda folder: json_of(
            folder, b'{"a":' + repeated(DEEP, 5700 * (len(DEEP) + 1)) + b"}"
        ),
        "JSON with one wide character": lambda folder: json_of(
            folder, b'{"a": "' + b"x" * SIZE + WIDE.encode() + b'"}'
        ),
        "sparse JSON": lambda folder: json_of(folder, b"", 1 << 40),
        "long strings": gguf_of_long_strings,
        "one wide string": lambda folder: gguf_of(
            folder, {"a": hostile.string(b"x" * (SIZE - 100) + WIDE.encode())}
        ),
        "short arrays": lambda folder: gguf_of(
            folder, dict.fromkeys(map(str, range(SIZE // 8016)), hostile.numbers(3, "h", [*range(1000, 5000)]))
        ),
        "small entries": lambda folder: gguf_of(
            folder, {f"{i:x}": struct.pack("<Id", 12, i / 3) for i in range(1 << 17)}
        ),
        "small tensors": lambda folder: gguf_of(
            folder, {}, [hostile.tensor(b"%x" % i, (0, 1, 2, 3)) for i in range(1 << 17)]
        ),
        "arrays in an array": lambda folder: gguf_of(
            folder, {"a": struct.pack("<IIQ", 9, 9, SIZE // 12) + struct.pack("<IQ", 9, 0) * (SIZE // 12)}
        ),
        "empty strings without end": lambda folder: gguf_of(
            folder, {"a": struct.pack("<IIQ", 9, 8, 1 << 22)}, sparse=1 << 40
        ),
    },
    "llama": {
        "an index of many files": index_of_many_files,
        "a header of empty lists": lambda folder: safetensors_of(
            folder, b'{"a":' + repeated(b"[]", 100_000_000 - 20) + b"}"
        ),
        "tensors without elements": lambda folder: safetensors_of(
            folder, {f"{i:x}": entry(0, 0, dtype="F32") for i in range(58_000)}
        ),
        "sparse safetensors": lambda folder: safetensors_of(
            folder, {"model.embed_tokens.weight": entry(1 << 40, 1 << 20, 1 << 19)}, sparse=1 << 40
        ),
        "safetensors that overlap": lambda folder: safetensors_of(
            folder,
            dict.fromkeys(
                ["model.embed_tokens.weight", *(f"model.layers.{i}.x" for i in range(2000))], entry(MB, 256, 2048)
            ),
            bytes(MB),
            hidden_size=2048,
            num_hidden_layers=1000,
        ),
        "a GGUF that overlaps": overlapping_gguf,
    },
    "tokenizer": {
        "nested tokens": lambda folder: scored(
            folder, [bytes([97 + i]) * n for i in range(19) for n in range(1, 1025)]
        ),
        "long tokens": lambda folder: scored(folder, [b"%06d" % i + b"x" * 1000 for i in range(SIZE // 1020)]),
        "many tokens": lambda folder: vocabulary(
            folder, b"gpt2", [b"%x" % i for i in range(SIZE // 14)], merges=hostile.strings([])
        ),
        "many merges": of_many_merges,
        "control tokens": lambda folder: vocabulary(
            folder, b"gpt2", [b"%x" % i for i in range(400_000)],
            token_type=hostile.numbers(5, "i", [3] * 400_000), merges=hostile.strings([]),
        ),
        "a tokenizer of objects": lambda folder: bpe_of(folder, repeated(b'{"":0}')),
        "a tokenizer of lists": lambda folder: bpe_of(folder, repeated(b"[]")),
        "a tokenizer of numbers": lambda folder: bpe_of(folder, repeated(b"0", 3_140_000)),
        "a sparse tokenizer": sparse_tokenizer,
    },
}  # fmt: skip
LARGE = {name: (kind, make) for kind, made in MADE.items() for name, make in made.items()}


QUICK = ["wide values", "a long name", "JSON with one wide character", "short arrays", "sparse safetensors"]
QUICK += ["nested tokens", "a tokenizer of objects", "JSON of small objects", "sparse JSON", "a GGUF that overlaps"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in LARGE]
)
def test_files_that_are_refused_take_little(tmp_path: Path, name: str) -> None:
    kind, make = LARGE[name]
    assert read_apart(kind, make(tmp_path)).startswith("ModelFileError: ")


# --- files that change -------------------------------------------------------------------------------------------


def write_gguf(path: Path) -> Path:
    """One tensor of many pages."""
    tensors = [hostile.tensor(b"token_embd.weight", (1024, 256))]
    return hostile.gguf(path, hostile.llama_entries(block_count=1), tensors, 1 << 20)


def write_folder(folder: Path) -> Path:
    hostile.config(folder / "config.json")
    entry = {"dtype": "F32", "shape": [256, 1024], "data_offsets": [0, 1 << 20]}
    hostile.safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": entry}, bytes(1 << 20))
    return folder


CUT = """
import os, sys
from pathlib import Path
from kvcache import ModelFileError
from kvcache.models import weights
tensors = weights.Tensors(Path(sys.argv[1]))
os.truncate(sys.argv[2], os.path.getsize(sys.argv[2]) - (1 << 19))
try:
    tensors.take("model.embed_tokens.weight", 256, 1024)
except ModelFileError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_that_is_cut_before_a_tensor_is_taken(tmp_path: Path, kind: str) -> None:
    """Read in a process of its own, which ends where the file is mapped."""
    path = write_gguf(tmp_path / "a.gguf") if kind == "file" else write_folder(tmp_path)
    command = [sys.executable, "-c", CUT, path, path if kind == "file" else path / "model.safetensors"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "was changed while it was read" in done.stdout


def test_a_file_that_another_takes_the_place_of(tmp_path: Path) -> None:
    header = gguf.read_header(write_gguf(tmp_path / "a.gguf"))
    write_gguf(tmp_path / "b.gguf").rename(tmp_path / "a.gguf")
    with pytest.raises(ModelFileError, match=r"a\.gguf was changed while it was read"):
        weights._dequantize(reference, header, header.tensors["token_embd.weight"])


# --- what is no file ---------------------------------------------------------------------------------------------

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {  # what is no file, in a folder of a model; who reads it
    "config": ("config.json", shapes.read),
    "config of a model": ("config.json", runner.Llama.load),
    "config of a tokenizer": ("config.json", tokenizer.load_tokenizer),
    "generation": ("generation_config.json", tokenizer.load_tokenizer),
    "tokenizer": ("tokenizer.json", tokenizer.load_tokenizer),
    "weights": ("model.safetensors", runner.Llama.load),
    "index": ("model.safetensors.index.json", runner.Llama.load),
    "index of a shape": ("model.safetensors.index.json", shapes.read),
    "gguf": ("a.gguf", lambda folder: shapes.read(folder / "a.gguf")),
    "gguf of a tokenizer": ("a.gguf", lambda folder: tokenizer.load_tokenizer(folder / "a.gguf")),
    "gguf of a model": ("a.gguf", lambda folder: runner.Llama.load(folder / "a.gguf")),
    "text": ("eval.txt", lambda folder: runner.read_windows(folder / "eval.txt", tokenizer.ByteTokenizer(), 8)),
    "prompt": ("prompt.txt", lambda folder: reading.read_prompt(folder / "prompt.txt")),
}


NO_FILES = [(reader, what) for reader in READERS for what in ("pipe", "device", "folder")]
IS_MODEL = {(reader, "folder") for reader in READERS if "gguf" in reader}


@pytest.mark.parametrize(("reader", "what"), [pair for pair in NO_FILES if pair not in IS_MODEL])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, reader: str, what: str) -> None:
    name, read = READERS[reader]
    hostile.config(tmp_path / "config.json")
    (tmp_path / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(tmp_path / name)
    elif what == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    outcomes: list[str] = []

    def run() -> None:
        try:
            read(tmp_path)
        except ModelFileError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert outcomes == [f"{tmp_path / name} is not a file"]


def test_weights_that_are_no_file_are_not_looked_at(tmp_path: Path) -> None:
    hostile.config(tmp_path / "config.json")
    os.mkfifo(tmp_path / "model.safetensors")
    assert len(shapes.read(tmp_path).layers) == 2


def test_standard_input_may_be_a_pipe() -> None:
    command = [
        sys.executable,
        "-m",
        "kvcache",
        "generate",
        str(MODEL),
        "--prompt-file",
        "/dev/stdin",
        "--quiet",
    ]
    done = subprocess.run([*command, "--tokens", "3"], input="ROMEO:", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ROMEO:")


def test_a_mapping_that_holds_itself() -> None:
    config: dict[str, Any] = dict(hostile.CONFIG)
    config["text_config"] = config
    with pytest.raises(ModelFileError, match="more than 8 configurations are nested in each other"):
        shapes.read(config)
    config = dict(hostile.CONFIG)
    config["rope_theta"] = config["per_layer_config"] = config
    with pytest.raises(ModelFileError, match=r"rope_theta must be a positive number, not .*hidden_size"):
        shapes.read(config)


# --- what is shown -----------------------------------------------------------------------------------------------

ESCAPES = "\x1b[2J\x07\n\u202e"


def check_sentence(said: str, most: int = 1000) -> None:
    assert said.isprintable(), said
    assert len(said) < most


@pytest.mark.parametrize(
    "value", [ESCAPES, ESCAPES * 1_000_000, [ESCAPES] * 100, {ESCAPES: ESCAPES}, 10**5000], ids=type
)
def test_values_are_shown_quoted_and_cut(value: object) -> None:
    check_sentence(errors.shown(value), 81)
    assert errors.shown("it's") == '"it\'s"'
    assert errors.plain("/a b/größer") == "/a b/größer"
    check_sentence(errors.plain(value if isinstance(value, str) else ESCAPES), 400)


def write_index(folder: Path, name: object) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    return hostile.config(folder / "config.json").parent


TEXTS: dict[str, Callable[[Path, str], object]] = {
    "model_type": lambda folder, text: runner.Llama.load(hostile.config(folder / "config.json", model_type=text)),
    "rope_type": lambda folder, text: runner.Llama.load(
        hostile.config(folder / "config.json", rope_scaling={"rope_type": text})
    ),
    "layer_types": lambda folder, text: shapes.read(hostile.config(folder / "config.json", layer_types=[text] * 2)),
    "window": lambda folder, text: shapes.read(
        hostile.gguf(
            folder / "a.gguf",
            {
                "general.architecture": hostile.string(text.encode()),
                **{
                    f"{text}.{key}": struct.pack("<II", 4, value)
                    for key, value in {
                        "block_count": 2,
                        "attention.head_count": 2,
                        "embedding_length": 64,
                        "attention.sliding_window": 8,
                    }.items()
                },
            },
        )
    ),
    "tensor": lambda folder, text: runner.Llama.load(
        hostile.gguf(
            folder / "a.gguf",
            hostile.llama_entries(block_count=1),
            [hostile.tensor(text.encode(), (4,)), hostile.tensor(b"token_embd.weight", (128, 256), 32)],
            1 << 18,
        )
    ),
    "safetensors": lambda folder, text: weights.Tensors(
        hostile.safetensors(folder / "model.safetensors", {text: {"dtype": text}}).parent
    ),
    "shard": lambda folder, text: weights.Tensors(write_index(folder, text.replace("/", ""))),
    "folder": lambda folder, text: shapes.read(folder / text),
    "decoder": lambda folder, text: tokenizer.load_tokenizer(
        hostile.tokenizer(folder, json.dumps({"version": text, "model": {"type": text}}).encode())
    ),
    "tokens": lambda folder, text: tokenizer.load_tokenizer(
        hostile.gguf(
            folder / "a.gguf",
            hostile.vocabulary(b"gpt2", [b"a", b"b"], merges=hostile.strings([text.encode() + b" a"])),
        )
    ),
    "pre": lambda folder, text: tokenizer.load_tokenizer(
        hostile.gguf(folder / "a.gguf", hostile.vocabulary(b"gpt2", [b"a"], pre=hostile.string(text.encode())))
    ),
    "vocab_size": lambda folder, text: tokenizer.load_tokenizer(
        hostile.config(folder / "config.json", vocab_size=text).parent
    ),
}


@pytest.mark.parametrize("times", [1, 20, 200_000])
@pytest.mark.parametrize("where", TEXTS)
def test_texts_of_a_file_do_not_steer_a_terminal(tmp_path: Path, where: str, times: int) -> None:
    with pytest.raises((ModelFileError, NotSupportedError)) as caught:
        TEXTS[where](tmp_path, ESCAPES * times)
    check_sentence(str(caught.value))


@pytest.mark.parametrize("name", ["\x1b[2J", "x" * 250, "\udcff"])
def test_a_table_of_a_file_does_not_steer_a_terminal(tmp_path: Path, name: str) -> None:
    hostile.config(tmp_path / "config.json", model_type=name)
    command = [sys.executable, "-m", "kvcache", "plan", "--no-measure", "--weights", "none", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "".join(done.stdout.split()).startswith(
        f"{errors.plain(name)},2layers".replace(" ", "")
    )  # lines are wrapped


# --- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"rope_scaling": {"type": "yarn", "rope_theta": 1, "original_max_position_embeddings": 9}},
            "above 1 for yarn",
        ),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1e-308}}, "factor must be a positive"),
        ({"rope_scaling": {"type": "linear", "factor": 5e-324}}, "no finite frequencies"),
        (
            {"rope_scaling": {"type": "llama3", **dict.fromkeys(["low_freq_factor", "high_freq_factor"], 1.0)}},
            "factor",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    **dict.fromkeys(["low_freq_factor", "high_freq_factor"], 1.0),
                    "original_max_position_embeddings": 2 * np.pi,
                    "factor": 2.0,
                }
            },
            "no finite frequencies",
        ),
        ({"rope_theta": 5e-324, "head_dim": 8192}, "no finite frequencies"),
        ({"model_type": "phi", "partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ({"model_type": "phi", "partial_rotary_factor": 1e-5}, "rotary_dim must be a whole number from 2"),
        ({"head_dim": 1}, "rotary_dim must be a whole number from 2"),
        ({"model_type": "gptj", "rotary_dim": 1}, "rotary_dim"),
        ({"model_type": "bamba", "attn_layer_indices": 5}, "attn_layer_indices must be a list, not 5"),
        ({"block_types": {"a": 1}}, "block_types must be a list"),
        ({"num_attention_heads": 1 << 20}, "num_attention_heads must be a whole number from 1 to 1024"),
        ({"num_key_value_heads": 1 << 20}, "num_key_value_heads must be a whole number from 1 to 1024"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads are not a multiple of 2"),
        ({"num_attention_heads": 1024, "head_dim": 8192}, "1024 heads of 8192 elements are more than any model's"),
        ({"v_head_dim": 1 << 20}, "v_head_dim"),
        ({"kv_lora_rank": 1 << 20}, "kv_lora_rank"),
        ({"max_position_embeddings": 2**31 - 1}, "max_position_embeddings"),
        ({"max_position_embeddings": 2**31 - 2}, "max_position_embeddings"),
        ({"per_layer_config": {"0": {"head_dim": 0}, "9" * 5000: {}}}, "layer 0: head_dim"),
        ({"model_type": "x" * 257}, "model_type must be a string of at most 256 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_that_cannot_be(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = hostile.config(tmp_path / "config.json", **change)
    with pytest.raises(ModelFileError, match=words) as caught:
        kvcache.KVCache.from_config(path)
    assert str(caught.value).startswith(str(path))
    check_sentence(str(caught.value))


def test_the_longest_context_there_is(tmp_path: Path) -> None:
    path = hostile.config(tmp_path / "config.json", max_position_embeddings=1 << 30)
    assert kvcache.KVCache.from_config(path).max_seq_len == 1 << 30
    config = runner.LlamaConfig.read(path)
    assert runner.new_cache(config, runner.Options(window=1 << 30)).max_seq_len == (1 << 30) + llama.PREFILL_TOKENS


@pytest.mark.parametrize("name", ["..", ".", "", "a\0b", "/etc/passwd", "../a", "a/b", 7, None, ["a"]], ids=str)
def test_an_index_that_names_no_file_of_its_folder(tmp_path: Path, name: object) -> None:
    write_index(tmp_path, name)
    with pytest.raises(ModelFileError, match=r"index\.json: weight_map must name files of this folder"):
        runner.Llama.load(tmp_path)


def test_paths_with_a_zero_byte(tmp_path: Path) -> None:
    for read in (shapes.read, runner.Llama.load, tokenizer.load_tokenizer):
        with pytest.raises(ModelFileError, match=r"cannot be read: .*embedded null"):
            read(f"{tmp_path}/a\0b")


def bpe(**changes: Any) -> dict[str, Any]:
    state = hostile.bpe()
    return {**state, **changes, "model": {**state["model"], **changes.get("model", {})}}


@pytest.mark.parametrize(
    "state",
    [
        bpe(model={"continuing_subword_prefix": "####"}),
        bpe(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        bpe(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "Z", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        ),
    ],
    ids=["prefix", "characters", "template"],
)
def test_tokenizers_that_panic(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is no tokenizer: "):
        tokenizer.load_tokenizer(hostile.tokenizer(tmp_path, json.dumps(state).encode()))


def test_a_tokenizer_that_fails_on_a_text(tmp_path: Path) -> None:
    state = bpe()
    state["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}
    found = tokenizer.load_tokenizer(hostile.tokenizer(tmp_path, json.dumps(state).encode()))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: the tokenizer fails: "):
        found.encode("c")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, number: float, dtype: str) -> None:
    data = np.arange(8, dtype=np.float32)
    data[5] = number
    bits = data.view("<u4") >> 16
    stored = {"F32": data, "F16": data.astype(np.float16), "BF16": bits.astype("<u2")}[dtype].tobytes()
    entry = {"dtype": dtype, "shape": [2, 4], "data_offsets": [0, len(stored)]}
    hostile.safetensors(tmp_path / "model.safetensors", {"model.norm.weight": entry}, stored)
    with pytest.raises(ModelFileError, match=r"tensor model\.norm\.weight has an element that is no finite number"):
        weights.Tensors(tmp_path).take("model.norm.weight", 2, 4)
    tensors = [hostile.tensor(b"output_norm.weight", (4, 2))]
    path = hostile.gguf(tmp_path / "a.gguf", {"general.architecture": hostile.string(b"llama")}, tensors, 32)
    path.write_bytes(path.read_bytes()[:-32] + data.tobytes())
    with pytest.raises(ModelFileError, match=r"tensor output_norm\.weight has an element that is no finite number"):
        weights.Tensors(path).take("model.norm.weight", 2, 4)
