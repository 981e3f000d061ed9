"""Programs of the documentation and the examples that decode: one token at a time, and three, with right results."""

import io
import re

import numpy as np
import pytest
from support.attention import attend
from support.compiling import EMULATOR, ROOT, run, runner_of

from kvcache import runner

MODEL = ROOT / "examples" / "model"
pytestmark = pytest.mark.parametrize("num_tokens", [1, 3])


def program_of(page):
    """Return the first program in C on a page."""
    return re.findall(r"^```c\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)[0]


def replaced(text, old, new):
    assert old in text
    return text.replace(old, new)


def check_attention(printed, num_tokens, num_heads, num_kv_heads, dim):
    """Check numbers that a program prints: q, k, v, and what it attended to."""
    heads = [num_heads, num_kv_heads, num_kv_heads, num_heads]
    numbers = np.array([float.fromhex(word) for word in printed.split()])
    arrays = np.split(numbers, np.cumsum([num_tokens * n * dim for n in heads])[:-1])
    q, k, v, out = (x.reshape(num_tokens, n, dim) for x, n in zip(arrays, heads, strict=True))
    right = attend(q, k.astype(np.float16), v.astype(np.float16), np.tri(num_tokens, dtype=bool))
    np.testing.assert_allclose(out, right, rtol=1e-4, atol=1e-5)


README_WITH_NUMBERS = """
#define main decode
#include "app.c"
#undef main

static void show(const float *x, size_t size) {
    for (size_t i = 0; i < size / sizeof *x; i++) printf("%a\\n", (double)x[i]);
}

int main(void) {
    float *const given[] = {**q, **k, **v};
    const size_t sizes[] = {sizeof q, sizeof k, sizeof v};
    for (int a = 0; a < 3; a++)
        for (size_t i = 0; i < sizes[a] / sizeof *given[a]; i++)
            given[a][i] = (float)((i * 37 + i / 64 * 11 + a) % 61) / 16 - 2;
    if (decode()) return 1;
    for (int a = 0; a < 3; a++) show(given[a], sizes[a]);
    show(**out, sizeof out);
    return 0;
}
"""


def test_readme(build, tmp_path, num_tokens):
    source = tmp_path / "numbers.c"
    (tmp_path / "app.c").write_text(replaced(program_of("README.md"), "NUM_TOKENS = 1", f"NUM_TOKENS = {num_tokens}"))
    source.write_text(README_WITH_NUMBERS)
    stored, _, numbers = run(*EMULATOR, build(source)).partition("\n")
    assert stored == f"tokens stored: {num_tokens}"
    check_attention(numbers, num_tokens, 16, 4, 64)


def test_prefixes(build, tmp_path, num_tokens):
    source = tmp_path / "prefixes.c"
    source.write_text(replaced(program_of("docs/prefix.md"), "ids, 40)", f"ids, {num_tokens})"))
    lines = run(*EMULATOR, build(source)).splitlines()
    assert lines == [f"{found} of {num_tokens} tokens are there" for found in (0, num_tokens - 1)]


CPP_WITH_NUMBERS = """
#define main example
#include "{example}"
#undef main

int main() {{
    std::mt19937 random(1), again = random;
    const kvcache::Cache cache = make_cache();
    kvcache::Batch batch(cache, 0, {num_tokens});
    const Rows out = attend(batch, 0, {num_tokens}, random);
    for (int32_t heads : {{num_heads, num_kv_heads, num_kv_heads}}) {{
        Rows given({num_tokens}, heads);
        for (float number : given.fill(again).numbers) std::printf("%a\\n", double(number));
    }}
    for (float number : out.numbers) std::printf("%a\\n", double(number));
}}
"""


def test_cpp(build, tmp_path, num_tokens):
    source = tmp_path / "numbers.cpp"
    source.write_text(CPP_WITH_NUMBERS.format(example=ROOT / "examples/cpp/decode.cpp", num_tokens=num_tokens))
    check_attention(run(*EMULATOR, build(source)), num_tokens, 8, 2, 32)


def test_sparse(build, tmp_path, num_tokens):
    source = tmp_path / "sparse.c"
    text = (ROOT / "examples/sparse.c").read_text()
    source.write_text(replaced(text, "SEEKERS = 1", f"SEEKERS = {num_tokens}"))
    assert run(*EMULATOR, build(source), "5000").splitlines() == [
        f"read 64 of {rows} rows, with the hidden one at position 1666: yes" for rows in range(5001, 5001 + num_tokens)
    ]


def test_store(build, tmp_path, num_tokens):
    serve = runner_of(build(ROOT / "examples/store.c"))
    for _ in range(2):  # too few tokens for a block
        done = serve(tmp_path / "prefixes", "abc"[:num_tokens])
        assert (done.returncode, done.stderr) == (0, "")
        assert [int(number) for number in re.findall(r"\d+", done.stdout)] == [0, num_tokens, 0, 0]


@pytest.mark.parametrize("name", ["prefix", "c"])
def test_models(build, num_tokens, name):
    prompt, stream = "The"[:num_tokens], io.StringIO()
    assert runner.run(MODEL, prompt.encode(), runner.Options(max_new_tokens=60, temperature=0, quiet=True), stream) == 0
    if name == "c":
        sources = sorted((ROOT / "examples/c").glob("*.c"), key=lambda source: source.stem != "generate")
        done = runner_of(build(*sources, flags=["-O2"]))("--model", MODEL, prompt, "--tokens", "60")
        assert done.stdout == stream.getvalue()
    else:
        sources = [ROOT / "examples" / source for source in ("prefix.c", "c/model.c", "c/pool.c")]
        done = runner_of(build(*sources, flags=["-O2"]), cwd=ROOT)("", prompt)
        assert prompt + done.stdout.split("request 1: ")[-1] == stream.getvalue()
