"""examples/rust, where cargo is installed: the binding's own tests, and the text that its Llama writes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "rust"
MODEL = ROOT / "examples" / "model"
EXPECTED = json.loads((MODEL / "expected.json").read_text())
TIMEOUT = 1200


def runs(*command: str) -> bool:
    """Return whether a command exists, and is no stub that asks to install it."""
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


for tool in ("cargo", "cc"):
    if not runs(tool, "--version"):
        pytest.skip(f"there is no {tool} here", allow_module_level=True)


def cargo(target: Path, *arguments: str, **environment: str) -> None:
    """Run cargo, without a network, and with what it makes in a folder of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "KVCACHE_LIB_DIR"}
    done = subprocess.run(
        ["cargo", *arguments],
        cwd=PACKAGE,
        env=inherited | {"CARGO_TARGET_DIR": str(target), "CARGO_NET_OFFLINE": "true"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def installed() -> dict[str, str]:
    """The environment that names the library of the package under test, so that the core is not compiled once more."""
    return {"KVCACHE_LIB_DIR": str(Path(kvcache.get_library()).parent)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, installed: dict[str, str]) -> Path:
    """Where the program was built; by .ci/full with a core that build.rs compiles, as it is by hand."""
    target = tmp_path_factory.mktemp("rust")
    cargo(
        target,
        "build",
        "--release",
        "--locked",
        **({} if os.environ.get("HYPOTHESIS_PROFILE") == "full" else installed),
    )
    return target


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(target: Path) -> Run:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [target / "release" / "generate", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT,
        )

    return run


def in_python(*arguments: str | Path) -> str:
    script = ROOT / "examples" / "generate.py"
    command = [sys.executable, script, "--temperature", "0", "--quiet", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, encoding="utf-8", timeout=TIMEOUT).stdout


# --- the package -------------------------------------------------------------------------------------------------


def test_binding(tmp_path: Path, installed: dict[str, str]) -> None:
    """cargo test passes: declarations match the header, the safe layer and the readers work; overflows panic."""
    cargo(tmp_path, "test", "--locked", **installed)


def test_clippy(tmp_path: Path, installed: dict[str, str]) -> None:
    if not runs("cargo", "clippy", "--version"):
        pytest.skip("there is no cargo clippy here")
    cargo(tmp_path, "clippy", "--all-targets", "--", "-D", "warnings", **installed)


def test_format(tmp_path: Path) -> None:
    if not runs("cargo", "fmt", "--version"):
        pytest.skip("there is no cargo fmt here")
    cargo(tmp_path, "fmt", "--check")


# --- the text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_greedy_text(run: Run, dtype: str, threads: str) -> None:
    done = run("ROMEO:", "--tokens", "250", "--dtype", dtype, "--threads", threads)
    assert (done.returncode, done.stdout, done.stderr) == (0, EXPECTED["greedy"] + "\n", "")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_text_that_python_writes(run: Run, dtype: str) -> None:
    arguments = ("KING RICHARD:\n", "--tokens", "100", "--dtype", dtype)
    assert run(*arguments).stdout == in_python(*arguments)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
def test_quantised_rows(run: Run, dtype: str) -> None:
    """Rounding makes the text differ sooner or later; the number of threads must not."""
    texts = [run("ROMEO:", "--tokens", "250", "--dtype", dtype, "--threads", threads).stdout for threads in "12"]
    assert texts[0].startswith("ROMEO:\nThe ")
    assert texts[0] == texts[1] != EXPECTED["greedy"] + "\n"


def test_defaults(run: Run) -> None:
    done = run()
    assert done.returncode == 0
    assert done.stdout.startswith(EXPECTED["greedy"])
    assert len(done.stdout) == len("ROMEO:") + 300 + 1


def test_the_end_of_the_context(run: Run) -> None:
    done = run((MODEL / "eval.txt").read_text()[:2040], "--tokens", "50")
    assert done.returncode == 0
    assert len(done.stdout.removesuffix("\n")) in (2047, 2048)  # a newline may be the model's own
    assert done.stderr == "(stopped at 2048 tokens, the model's whole context)\n"


def test_help(run: Run) -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(option in done.stdout for option in ("--model", "--tokens", "--dtype", "--threads"))


def test_a_reader_that_leaves(target: Path) -> None:
    command = [target / "release" / "generate", "--tokens", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(6) == b"ROMEO:"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT) == 1


# --- models ------------------------------------------------------------------------------------------------------


def read_model() -> tuple[dict[str, Any], bytes]:
    """The header and the data of the model's safetensors."""
    whole = (MODEL / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    return json.loads(whole[8:end]), whole[end:]


def write_model(folder: Path, header: object = None, data: bytes | None = None, **config: object) -> Path:
    """The model, with changes; a field that is None is not there."""
    own_header, own_data = read_model()
    text = json.dumps(header or own_header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + (data or own_data))
    fields = json.loads((MODEL / "config.json").read_text()) | config
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_model_that_ends_its_text(run: Run, tmp_path: Path) -> None:
    write_model(tmp_path, eos_token_id=[1, ord(",")])
    done = run("--model", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == EXPECTED["greedy"].partition(",")[0] + "\n" == in_python("--model", tmp_path)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_weights_of_other_types(run: Run, tmp_path: Path, dtype: str) -> None:
    """And with a head of its own, and the numbers of heads and RoPE where older files have them."""
    header, data = read_model()
    del header["__metadata__"]
    header["lm_head.weight"] = header["model.embed_tokens.weight"]
    pieces, at = {}, 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[begin:end], "<f2").astype("<f4").view("<u4")
        piece = bits.tobytes() if dtype == "F32" else (bits >> 16).astype("<u2").tobytes()
        pieces[name] = {"dtype": dtype, "shape": entry["shape"], "data_offsets": [at, at + len(piece)]}, piece
        at += len(piece)
    write_model(
        tmp_path,
        {name: entry for name, (entry, _) in pieces.items()},
        b"".join(piece for _, piece in pieces.values()),
        tie_word_embeddings=False,
        head_dim=None,
        rope_parameters=None,
        rope_theta=10000,
    )
    arguments = ("--model", tmp_path, "--tokens", "60", "--dtype", "f32")
    text = run(*arguments).stdout
    assert text == in_python(*arguments)
    assert dtype == "BF16" or text == EXPECTED["greedy"][:66] + "\n"


# --- bad input ---------------------------------------------------------------------------------------------------


def check_refused(done: subprocess.CompletedProcess[str], sentence: str) -> None:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("generate: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "0"], "tokens must be a whole number from 1 to 2147483647, not 0"),
        (["--tokens", "many"], "tokens must be a whole number from 1 to 2147483647, not many"),
        (["--tokens", str(10**30)], "tokens must be a whole number from 1"),
        (["--tokens"], "--tokens needs a value"),
        (["--threads", "-1"], "threads must be a whole number from 1"),
        (["--threads", "5000"], "num_threads is 5000"),
        (["--dtype", "f64"], 'dtype must be one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, not "f64"'),
        (["--no-such"], "there is no option --no-such"),
        (["a", "b", "c"], '"c" is an argument too many: quote a prompt of several words'),
        (["a", "b", "--model", "c"], "the model is given twice"),
        ([""], "the prompt is empty"),
        (["x" * 2048], "the prompt of 2048 tokens leaves no room in the model's context of 2048"),
        (["--model", "/no/such/folder"], "/no/such/folder/config.json: No such file or directory"),
    ],
)
def test_bad_options(run: Run, arguments: list[str], sentence: str) -> None:
    check_refused(run(*arguments), sentence)


def test_the_model_stands_before_the_prompt(run: Run) -> None:
    """As in `kvcache generate` and examples/generate.py."""
    assert run(str(MODEL), "KING:", "--tokens", "1k").stdout == run("KING:", "--tokens", "1024").stdout


def test_arguments_that_are_no_text(target: Path) -> None:
    done = subprocess.run([target / "release" / "generate", b"\xff"], capture_output=True)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b'generate: "\\xFF" is not UTF-8\n'


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mistral"}, 'model_type "mistral" is not supported, only "llama" is'),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported, only "silu" is'),
        ({"mlp_bias": True}, "mlp_bias true is not supported, only false is"),
        ({"rope_parameters": {"rope_type": "yarn"}}, 'rope_type "yarn" is not supported, only "default" is'),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, not -1"),
        ({"rms_norm_eps": None}, 'there is no field "rms_norm_eps"'),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps must be a positive number, not "small"'),
        ({"hidden_size": 0}, "hidden_size must be a whole number from 1 to 2147483647, not 0"),
        ({"hidden_size": 256.5}, "hidden_size must be a whole number from 1 to 2147483647, not 256.5"),
        ({"hidden_size": 2**31 - 1}, "model.embed_tokens.weight has the shape [256, 256], where [256, 2147483647] is"),
        ({"num_hidden_layers": 2**31 - 1}, "has no tensor model.layers.4.input_layernorm.weight"),
        ({"num_hidden_layers": 3}, "has a tensor model.layers.3.input_layernorm.weight, which a plain Llama has not"),
        ({"num_attention_heads": 3}, "3 attention heads are no multiple of 2 key-value heads"),
        ({"num_attention_heads": 512, "head_dim": None}, "head_dim would be 0: it must be at least 1"),
        ({"head_dim": 63}, "head_dim must be even for RoPE, not 63"),
        ({"vocab_size": 32000}, "vocab_size must be 256, as a token is a byte here, not 32000"),
        ({"eos_token_id": "."}, "eos_token_id must be a token or a list of tokens"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
)
def test_bad_configurations(run: Run, tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    check_refused(run("--model", write_model(tmp_path, **change)), sentence)


def test_damaged_files(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    for damaged, sentence in (
        (weights[:4], "model.safetensors is no safetensors file: it has no header"),
        (b"\xff" * 8 + weights[8:], "model.safetensors is no safetensors file: it ends within its header"),
        (weights[:-1], "tensor model.norm.weight does not lie in the file as its shape says"),
    ):
        (folder / "model.safetensors").write_bytes(damaged)
        check_refused(run("--model", folder), sentence)
    (folder / "config.json").write_text("[" * 1_000_000)
    check_refused(run("--model", folder), "config.json is no JSON: no further level was expected at byte 64")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file(run: Run, tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    check_refused(run("--model", folder), f"{folder / name} is not a file")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    check_refused(run("--model", folder), f"{folder / name} is not a file")


def test_files_that_are_larger_than_they_may_be(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    os.truncate(folder / "model.safetensors", 1 << 40)  # read where the tensors are only
    assert run("--model", folder, "--tokens", "1").returncode == 0
    os.truncate(folder / "config.json", 1 << 40)
    check_refused(run("--model", folder), "config.json is larger than the 1048576 bytes that it may have")


def test_weights_that_will_not_do(run: Run, tmp_path: Path) -> None:
    header, data = read_model()
    begin = header["model.norm.weight"]["data_offsets"][0]
    nan = data[:begin] + np.float16(np.nan).tobytes() + data[begin + 2 :]
    folder = write_model(tmp_path, header, nan)
    check_refused(run("--model", folder), "tensor model.norm.weight has an element that is no finite number")
    for i in range(4, 500):
        layer = {name: entry for name, entry in header.items() if name.startswith("model.layers.0.")}
        header |= {name.replace(".0.", f".{i}.", 1): entry for name, entry in layer.items()}
    check_refused(run("--model", write_model(tmp_path, header)), "its tensors lie within each other")
    header, data = read_model()
    header["\x1b[2J" + "x" * 5000] = header["model.norm.weight"] | {"data_offsets": [0, 0]}
    done = run("--model", write_model(tmp_path, header))
    check_refused(done, r"has a tensor \u{1b}[2Jxxx")
    assert len(done.stderr) < 1200


def test_types_that_do_not_suit_the_heads(run: Run, tmp_path: Path) -> None:
    folder = write_model(tmp_path, num_attention_heads=16, num_key_value_heads=8, head_dim=16)
    check_refused(run("--model", folder, "--dtype", "q8_0"), "k_dim is 16: for q8_0 it must be a multiple of 32")
