"""Test that the C runner writes the Python one's text, with its own threads and OpenMP's, and refuses other models."""

import io
import json
import subprocess

import pytest
from support.compiling import EMULATOR, ENVIRONMENT, ROOT

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


def with_bias(weights):
    """Return a safetensors file with one more tensor, of 256 f16."""
    end = 8 + int.from_bytes(weights[:8], "little")
    header, num_bytes = json.loads(weights[8:end]), len(weights) - end
    name = "model.layers.0.self_attn.q_proj.bias"
    header[name] = {"dtype": "F16", "shape": [256], "data_offsets": [num_bytes, num_bytes + 512]}
    data = json.dumps(header, separators=(",", ":")).encode()
    return len(data).to_bytes(8, "little") + data + weights[end:] + bytes(512)


@pytest.fixture(scope="module")
def program(build):
    sources = sorted((ROOT / "examples" / "c").glob("*.c"), key=lambda source: source.stem != "generate")
    return build(*sources, flags=["-O2"])  # as its README says


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


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"config.json": b""}, "config.json is not of a byte-level Llama such as examples/model"),
        ({"config.json": json.dumps(CONFIG | {"vocab_size": 32000}).encode()}, "config.json is not of a byte-level"),
        (
            {"config.json": json.dumps(CONFIG | {"num_key_value_heads": 3}).encode()},
            "config.json is not of a byte-level",
        ),
        ({"model.safetensors": b""}, "model.safetensors is not a whole file"),
        ({"model.safetensors": WEIGHTS[:100]}, "model.safetensors is not a whole file"),
        ({"model.safetensors": WEIGHTS[:-1]}, "model.safetensors has no tensor model."),
        (
            {"config.json": json.dumps(CONFIG | {"num_hidden_layers": 5}).encode()},
            "model.safetensors has no tensor model.layers.4.input_layernorm.weight of 256 f16",
        ),
        (
            {"model.safetensors": WEIGHTS.replace(b'"F16"', b'"I16"')},
            "has no tensor model.embed_tokens.weight of 65536 f16",
        ),
        ({"config.json": json.dumps(CONFIG | {"hidden_act": "gelu"}).encode()}, "config.json is not of a byte-level"),
        ({"model.safetensors": with_bias(WEIGHTS)}, "model.safetensors has tensors that this program does not read"),
        ({"model.safetensors": None}, "model.safetensors, or it cannot be read"),
    ],
)
def test_other_models(generate, tmp_path, files, sentence):
    for name, data in ({"config.json": json.dumps(CONFIG).encode(), "model.safetensors": WEIGHTS} | files).items():
        if data is not None:
            (tmp_path / name).write_bytes(data)
    check_refused(generate("--model", tmp_path), sentence)
