"""Test that the C runner writes the Python one's text, with its own threads and OpenMP's, and refuses bad files."""

import io
import json
import os
import struct
import subprocess

import numpy as np
import pytest
from support.compiling import EMULATOR, ENVIRONMENT, ROOT, is_for_windows

from kvcache import runner

MODEL = ROOT / "examples" / "model"
EXPECTED = json.loads((MODEL / "expected.json").read_text())
EVAL = (MODEL / "eval.txt").read_text()
QUICK = {("q8_0", None), ("f16", 50)}
THREADS = [2, *(pytest.param(num, marks=pytest.mark.full) for num in (1, 5))]
TYPES_AND_WINDOWS = [
    pytest.param(dtype, window, marks=() if (dtype, window) in QUICK else pytest.mark.full)
    for dtype in ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_1")
    for window in (None, 50)
]

CONFIG = json.loads((MODEL / "config.json").read_text())
WEIGHTS = (MODEL / "model.safetensors").read_bytes()
HEADER_SIZE = struct.unpack("<Q", WEIGHTS[:8])[0]
HEADER = json.loads(WEIGHTS[8 : 8 + HEADER_SIZE])
DATA = WEIGHTS[8 + HEADER_SIZE :]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def program(build):
    sources = sorted((ROOT / "examples" / "c").glob("*.c"), key=lambda source: source.stem != "generate")
    return build(*sources)


@pytest.fixture
def generate(program):
    """Return a function that runs the program with passive waiting: spinning threads are slow on a busy machine."""

    def run(*arguments):
        command = [*EMULATOR, program, "--model", MODEL, *map(str, arguments)]
        environment = ENVIRONMENT | {"OMP_WAIT_POLICY": "passive"}
        return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=900)

    return run


def text_of(done):
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def check_refused(done, sentence):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("generate: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def text_in_python(prompt, tokens, model=MODEL, **options):
    stream = io.StringIO()
    options = runner.Options(max_new_tokens=tokens, temperature=0, quiet=True, **options)
    assert runner.run(model, prompt.encode(), options, stream) == 0
    return stream.getvalue()


# --- the text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_own_threads(generate, threads):
    assert text_of(generate("ROMEO:", "--tokens", 250, "--threads", threads)) == EXPECTED["greedy"] + "\n"


@pytest.mark.parametrize("threads", THREADS)
def test_openmp(generate, threads):
    done = generate("--tokens", 100, "--threads", threads, "--openmp")
    if "without OpenMP" in done.stderr:
        check_refused(done, "--openmp: this program was built without OpenMP")
        pytest.skip("the compiler has no OpenMP")
    assert text_of(done) == EXPECTED["greedy"][:106] + "\n"


@pytest.mark.parametrize(("dtype", "window"), TYPES_AND_WINDOWS)
def test_types(generate, dtype, window):
    """Test a prompt that takes two batches, and a window that spans several blocks."""
    prompt = EVAL[:150]
    limit = ["--window", window] if window else []
    text = text_of(generate(prompt, "--dtype", dtype, "--tokens", 20, "--threads", 2, *limit))
    assert text == text_in_python(prompt, 20, dtype=dtype, window=window)


def test_the_end_of_the_context(generate, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 40}))
    (tmp_path / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    model, prompt = ["--model", tmp_path], EVAL[:32]
    full = generate(prompt, "--tokens", 20, *model)
    assert full.returncode == 0
    assert full.stderr == "(stopped at 40 tokens, the model's whole context; with a window it would go on)\n"
    assert len(full.stdout) == 41
    assert text_of(generate(prompt, "--tokens", 8, *model)) == full.stdout
    assert len(text_of(generate(prompt, "--tokens", 20, "--window", 10, *model))) == 53
    check_refused(generate(EVAL[:40], *model), "the prompt of 40 tokens leaves no room in the model's context of 40")


# --- bad input ---------------------------------------------------------------------------------------------------


def test_help(generate):
    text = text_of(generate("--help"))
    for flag in ("--model", "--tokens", "--dtype", "--threads", "--openmp", "--window", "--help"):
        assert flag in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "0"], "--tokens must be a whole number from 1 to 1000000000, not 0"),
        (["--tokens", "many"], "--tokens must be a whole number from 1 to 1000000000, not many"),
        (["--tokens", "9" * 30], "--tokens must be a whole number from 1 to 1000000000, not 999"),
        (["--tokens", ""], "--tokens must be a whole number"),
        (["--tokens"], "--tokens must be a whole number from 1 to 1000000000, not missing"),
        (["--threads", "257"], "--threads must be a whole number from 1 to 256, not 257"),
        (["--threads", "-1"], "--threads must be a whole number from 1 to 256, not -1"),
        (["--window", "1x"], "--window must be a whole number"),
        (["--window", "2049"], "--window is 2049: it may be at most the model's context, 2048"),
        (
            ["--dtype", "f64"],
            "--dtype must be one of f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl int8 int6 int4, not f64",
        ),
        (
            ["--dtype"],
            "--dtype must be one of f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 iq4_nl int8 int6 int4, not missing",
        ),
        (["--model"], "--model needs a folder"),
        (["--model", "/no/such/folder"], "there is no /no/such/folder/config.json, or it cannot be read"),
        (["--model", "x" * 5000], "the folder's name is too long"),
        (["--no-such"], "there is no option --no-such"),
        (["and", "two", "words"], "words is an argument too many"),
        (["a", "b", "--model", "c"], "the model is given twice"),
        (["--tokens", "3q"], "--tokens must be a whole number from 1 to 1000000000, not 3q"),
        (["--tokens", "3000000k"], "--tokens must be a whole number from 1 to 1000000000, not 3000000k"),
        ([""], "the prompt is empty"),
        (["x" * 2048], "the prompt of 2048 tokens leaves no room in the model's context of 2048"),
    ],
)
def test_bad_arguments(generate, arguments, sentence):
    check_refused(generate(*arguments), sentence)


def test_the_model_stands_before_the_prompt(program, generate):
    """As in `kvcache generate` and examples/generate.py."""
    arguments = ["--tokens", "30", "--window", "1k"]
    expected = text_of(generate("KING:", *arguments))

    def run(*arguments):
        return subprocess.run([*EMULATOR, program, *arguments], capture_output=True, encoding="utf-8", env=ENVIRONMENT)

    assert text_of(run(MODEL, "KING:", *arguments)) == text_of(run(MODEL, *arguments, "KING:")) == expected
    check_refused(run(MODEL, "KING:", "--model", MODEL), "the model is given twice")


# --- hostile files -----------------------------------------------------------------------------------------------


@pytest.fixture
def refused(generate, tmp_path):
    """Return a function that checks the error for a model with these files."""

    def check(sentence, *, config=CONFIG, weights=WEIGHTS):
        (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
        (tmp_path / "model.safetensors").write_bytes(weights)
        check_refused(generate("--model", tmp_path), sentence)

    return check


def with_header(text, size=None):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + DATA


def with_tensor(name, **fields):
    return with_header(HEADER | {name: HEADER[name] | fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "gpt2"}, 'model_type must be "llama"'),
        ({"model_type": None}, 'model_type must be "llama"'),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu"'),
        ({"rope_parameters": {"rope_type": "llama3"}}, 'rope_type must be "default"'),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"vocab_size": 32000}, "vocab_size is 32000: tokens are bytes here, so it must be 256"),
        ({"vocab_size": 0}, "vocab_size must be a whole number from 1"),
        ({"hidden_size": 2**31}, "hidden_size must be a whole number from 1 to 1048576"),
        ({"hidden_size": 255.5}, "hidden_size must be a whole number"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": 128}, "tensor model.embed_tokens.weight must have the shape [256, 128]"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": 5}, "has no tensor model.layers.4.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "has other tensors than those of a plain Llama"),
        ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, 'rope_type must be "default"'),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number"),
        ({"num_key_value_heads": 3}, "num_attention_heads, 4, must be a multiple of num_key_value_heads, 3"),
        ({"head_dim": 63}, "head_dim must be even, as halves are rotated together, not 63"),
        ({"head_dim": 2**20}, "4 heads of 1048576 are more than any model's"),
        ({"intermediate_size": 705}, "mlp.gate_proj.weight must have the shape [705, 256]"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be a whole number"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
)
def test_configuration_that_does_not_fit(refused, fields, sentence):
    refused(sentence, config=CONFIG | fields)


@pytest.mark.parametrize("text", [b"", b"{", b"nul", b"[]", b'"model_type"', b'{"model_type', b'{"model_type": "llama'])
def test_what_is_no_configuration(refused, text):
    refused('model_type must be "llama"', config=text)
    refused(f"has no tensor {EMBEDDING}", weights=with_header(text))


@pytest.mark.parametrize("entry", ["", " {", " {}", " [1]", ' "'])
def test_tensors_without_a_description(refused, entry):
    refused(f"tensor {EMBEDDING} ", weights=with_header(f'{{"{EMBEDDING}":{entry}'.encode()))


def test_large_configuration(refused):
    refused("config.json is too large for a configuration", config=b" " * (2**20 + 1))


@pytest.mark.parametrize("size", [0, 5, 7])
def test_too_short(refused, size):
    refused("is too short to be a safetensors file", weights=WEIGHTS[:size])


@pytest.mark.parametrize("size", [HEADER_SIZE + len(WEIGHTS), 2**31, 2**32 + 10, 2**63, 2**64 - 1])
def test_header_beyond_the_file(refused, size):
    refused("its header ends outside of it", weights=with_header(HEADER, size))


@pytest.mark.parametrize("size", [8, 9, 100, HEADER_SIZE])
def test_truncated_in_the_header(refused, size):
    refused("its header ends outside of it", weights=WEIGHTS[:size])


@pytest.mark.parametrize("size", [8 + HEADER_SIZE, len(WEIGHTS) - 1])
def test_truncated_behind_it(refused, size):
    refused("elements within the file", weights=WEIGHTS[:size])


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 2**53],
        [len(WEIGHTS), len(WEIGHTS) + 512],
        [-512, 0],
        [512, 0],
        [0.5, 512.5],
        [0, 511],
        [0],
        [],
        "0, 512",
        None,
        {"begin": 0, "end": 512},
    ],
    ids=str,
)
def test_offsets(refused, offsets):
    refused(f"the data_offsets of tensor {NORM} are not those of 256", weights=with_tensor(NORM, data_offsets=offsets))


@pytest.mark.parametrize("shape", [[255], [256, 1], [1, 256], [], [2**40, 2**40], [-256], "256", None], ids=str)
def test_shapes(refused, shape):
    refused(f"tensor {NORM} must have the shape [256]", weights=with_tensor(NORM, shape=shape))
    refused(f"tensor {EMBEDDING} must have the shape [256, 256]", weights=with_tensor(EMBEDDING, shape=shape))


@pytest.mark.parametrize("dtype", ["I8", "F64", "f16", "", None, 16], ids=str)
def test_types_of_tensors(refused, dtype):
    refused(f"tensor {NORM} must be of type F32, F16 or BF16", weights=with_tensor(NORM, dtype=dtype))


def test_tensors_missing_and_too_many(refused):
    refused(f"has no tensor {NORM}", weights=with_header({k: v for k, v in HEADER.items() if k != NORM}))
    refused(f"has no tensor {NORM}", weights=with_header(HEADER | {NORM: None}))
    bias = HEADER | {"model.norm.bias": HEADER[NORM] | {"data_offsets": [len(DATA), len(DATA) + 512]}}
    refused("has other tensors than those of a plain Llama", weights=with_header(bias) + bytes(512))


def test_tensors_within_each_other(refused):
    """500 layers share the bytes of one, so loading them would need many times the file's size; it is refused."""
    entries = {name: HEADER[name] for name in HEADER if not name.startswith("model.layers.")}
    layer = {name: HEADER[name] for name in HEADER if name.startswith("model.layers.0.")}
    for i in range(500):
        entries |= {name.replace(".0.", f".{i}.", 1): entry for name, entry in layer.items()}
    refused("or some lie within each other", config=CONFIG | {"num_hidden_layers": 500}, weights=with_header(entries))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_no_numbers(refused, number):
    weights = bytearray(WEIGHTS)
    at = 8 + HEADER_SIZE + HEADER[NORM]["data_offsets"][0] + 20
    weights[at : at + 2] = np.float16(number).tobytes()
    refused(f"tensor {NORM} has an element that is no finite number", weights=bytes(weights))


@pytest.mark.skipif(is_for_windows(), reason="files have no such names there")
def test_names_do_not_steer_a_terminal(generate, tmp_path):
    check_refused(generate("--model", tmp_path / "\x1b[2J\x7f\u009b"), "?[2J???/config.json")


@pytest.mark.skipif(is_for_windows(), reason="a folder cannot be opened there")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file(generate, tmp_path, name):
    for other in {"config.json", "model.safetensors"} - {name}:
        (tmp_path / other).symlink_to(MODEL / other)
    os.mkfifo(tmp_path / name)
    check_refused(generate("--model", tmp_path), f"{tmp_path / name} is not a file")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    check_refused(generate("--model", tmp_path), f"{tmp_path / name} is not a file")


def test_missing_files(generate, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check_refused(generate("--model", tmp_path), f"there is no {tmp_path}/model.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    check_refused(generate("--model", tmp_path), "model.safetensors")


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_types_of_weights(generate, tmp_path, dtype):
    """Store every tensor as `dtype`, with a separate output head."""
    header, data = {}, b""
    tensors = {name: entry["data_offsets"] for name, entry in HEADER.items() if name != "__metadata__"}
    for name, (begin, end) in (tensors | {"lm_head.weight": tensors[EMBEDDING]}).items():
        values = np.frombuffer(DATA[begin:end], "<f2").astype("<f4")
        raw = (values if dtype == "F32" else (values.view("<u4") >> 16).astype("<u2")).tobytes()
        shape = HEADER.get(name, HEADER[EMBEDDING])["shape"]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    text = text_of(generate("--model", tmp_path, "--tokens", 60))
    assert text == text_in_python("ROMEO:", 60, model=tmp_path)
