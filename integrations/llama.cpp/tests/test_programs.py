"""Test how llama.cpp's programs are switched to this cache, and that they answer the same with it."""

import re
import subprocess

import llama_cpp_build
import llama_models
import pytest
from llama_models import text
from llama_server import ENVIRONMENT, USED, Server

from kvcache.layer import DTYPES

BOTH = ("--kvcache", "--no-kvcache")
WITH_COMMON_OPTIONS = ("server", "completion", "perplexity", "batched-bench")


def run(name, *options, status=0, end="", **environment):
    """Run a program, and return what it prints and what it logs, to the end that this pattern finds.

    A program that ends leaves its log's thread behind, with the last lines: then it is run again.
    """
    for _ in range(20):
        done = subprocess.run(
            [llama_cpp_build.program(f"llama-{name}"), *options],
            env=ENVIRONMENT | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == status, done.stdout[-2000:] + done.stderr[-2000:]
        if re.search(end, done.stdout + done.stderr):
            return done.stdout, done.stderr
    pytest.fail(f"nothing like {end!r} in:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def option_too(variable):
    """Return a variable with its option, as errors name it."""
    return f"{variable} (--{variable.removeprefix('LLAMA_').lower().replace('_', '-')})"


def complete(model, prompt, *options, **environment):
    common = ("--model", model, "--prompt", prompt, "-n", "50", "--temp", "0", "--ignore-eos", "--threads", "1")
    end = "common_perf_print: +graphs reused"
    return run("completion", *common, "--no-conversation", "--verbosity", "4", *options, end=end, **environment)


# ---- switching it on


@pytest.mark.parametrize("name", WITH_COMMON_OPTIONS)
def test_help_shows_the_options(folder, name):
    said = "".join(run(name, "--help"))
    assert re.search(r"^--kvcache, +--no-kvcache ", said, re.MULTILINE)
    words = " ".join(said.split())
    assert "default: disabled, except in kvcache-llama-server; env: LLAMA_KVCACHE)" in words
    for x in "kv":
        assert re.search(rf"^--kvcache-type-{x} TYPE ", said, re.MULTILINE)
        assert f"LLAMA_KVCACHE_TYPE_{x.upper()})" in said
        assert f"(env: LLAMA_ARG_KVCACHE_TYPE_{x.upper()})" in said
    assert re.search(r"^--kvcache-select N ", said, re.MULTILINE)
    assert "LLAMA_KVCACHE_SELECT)" in said
    assert re.search(r"^--kvcache-prompts PRECISION ", said, re.MULTILINE)
    assert "LLAMA_KVCACHE_PROMPTS)" in said
    for option in ("", "_SELECT", "_PROMPTS", *(["_PREFIX"] if name in ("server", "completion") else [])):
        assert f"(env: LLAMA_ARG_KVCACHE{option})" in said


def test_the_option_goes_before_the_environment(repository):
    expected, log = complete(repository, text(0, 100))
    assert not re.search(USED, log)
    for options, environment, used in (
        (["--kvcache"], {}, True),
        ([], {"LLAMA_KVCACHE": "1"}, True),
        ([], {"LLAMA_KVCACHE": "0"}, False),
        (["--no-kvcache"], {"LLAMA_KVCACHE": "1"}, False),
        (["--kvcache"], {"LLAMA_KVCACHE": "0"}, True),
        *(([], {"LLAMA_KVCACHE": word}, True) for word in ("on", "true", "enabled")),
        *(([], {"LLAMA_KVCACHE": word}, False) for word in ("off", "false", "disabled")),
        ([], {"LLAMA_ARG_KVCACHE": "true"}, True),
        ([], {"LLAMA_ARG_KVCACHE": "0", "LLAMA_KVCACHE": "1"}, False),
        ([], {"LLAMA_ARG_NO_KVCACHE": "1", "LLAMA_KVCACHE": "1"}, False),
        (["--kvcache"], {"LLAMA_ARG_KVCACHE": "off"}, True),
    ):
        said, log = complete(repository, text(0, 100), *options, **environment)
        assert bool(re.search(USED, log)) == used, (options, environment)
        assert said == expected


@pytest.mark.parametrize(
    ("options", "environment", "used"),
    [
        ([], {}, True),
        (["--no-kvcache"], {}, False),
        ([], {"LLAMA_KVCACHE": "0"}, False),
        (["--kvcache"], {"LLAMA_KVCACHE": "0"}, True),
    ],
)
def test_the_servers_other_name_switches_it_on(repository, folder, options, environment, used):
    with Server(repository, folder / "named.log", *options, name="kvcache-llama-server", **environment) as server:
        assert server.complete("To be", 4)["tokens_predicted"] == 4
        assert bool(re.search(USED, server.log())) == used


VALUES = {
    "": (["yes", "2", "1 ", ""], "1, on, true or enabled, for this cache, or to 0, off, false or disabled"),
    "_TYPE_K": (["i8", "INT8", "int8 "], f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"),
    "_TYPE_V": (["i8"], f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"),
    "_PROMPTS": (["INT8", "8", "f16", "int8 "], "stored or int8"),
    "_SELECT": (
        ["all", "-1", "2.5", "64 ", "2147483648", "99999999999"],
        "the number of rows that a new token reads of a long text, such as 2048",
    ),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in VALUES for value in VALUES[name][0]])
def test_another_value_is_an_error(repository, name, value):
    options = ("--model", repository, "--prompt", "a", "-n", "1", "--no-conversation")
    variable = f"LLAMA_KVCACHE{name}"
    end = re.escape(f"{option_too(variable)} is '{value}': set it to {VALUES[name][1]}")
    run("completion", *options, status=1, end=end, **({"LLAMA_KVCACHE": "1"} | {variable: value}))


@pytest.mark.parametrize("option", ["type-k", "type-v", "select", "prompts", "prefix"])
def test_an_empty_value_is_an_error(repository, option):
    """A script's unset variable gives one. It is an error also if nothing uses the value."""
    name = option.upper().replace("-", "_")
    end = re.escape(f"{option_too(f'LLAMA_KVCACHE_{name}')} is '': set it to ")
    common = ("--model", repository, "--prompt", "a", "-n", "1", "--no-conversation")
    for switch in BOTH:
        run("completion", *common, switch, f"--kvcache-{option}", "", status=1, end=end)
    for variable in (f"LLAMA_KVCACHE_{name}", f"LLAMA_ARG_KVCACHE_{name}"):
        run("completion", *common, status=1, end=end, **{variable: ""})


@pytest.fixture(scope="module")
def without(folder):
    """Return an environment in which the library is as if it was built without this cache.

    The file that creates a memory is compiled without this cache, and loaded first.
    """
    build = llama_cpp_build.folder()
    if not (build / "bin/libllama.so").exists() or "SANITIZE_ADDRESS:BOOL=ON" in (build / "CMakeCache.txt").read_text():
        pytest.skip("the library is linked into the programs, or cannot be preloaded")
    source, library = build / "source", folder / "without.so"
    headers = [f"-I{source / name}" for name in ("include", "src", "ggml/include")]
    file = source / "src/llama-model.cpp"
    subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", "-w", *headers, file, "-o", library], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--kvcache"], {}, "LLAMA_KVCACHE is '1'"),
        ([], {"LLAMA_KVCACHE": "true"}, "LLAMA_KVCACHE is 'true'"),
        ([], {"LLAMA_ARG_KVCACHE": "on"}, "LLAMA_KVCACHE is '1'"),
        (["--kvcache-type-k", "int8"], {}, "LLAMA_KVCACHE_TYPE_K is 'int8'"),
        (["--kvcache-type-v", "int8"], {}, "LLAMA_KVCACHE_TYPE_V is 'int8'"),
        (["--kvcache-select", "64"], {}, "LLAMA_KVCACHE_SELECT is '64'"),
        (["--kvcache-prompts", "int8"], {}, "LLAMA_KVCACHE_PROMPTS is 'int8'"),
        (["--kvcache-prefix", "on"], {}, "LLAMA_KVCACHE_PREFIX is 'on'"),
        (["--no-kvcache", "--kvcache-select", "0", "--kvcache-prefix", "off"], {"LLAMA_KVCACHE": "1"}, ""),
        (["--kvcache-prompts", "stored"], {}, ""),
        ([], {"LLAMA_KVCACHE_PREFIX": "off"}, ""),
        (["--kvcache-type-k", ""], {}, "LLAMA_KVCACHE_TYPE_K is ''"),
    ],
)
def test_a_build_without_it_refuses_to_be_asked_for_it(repository, without, options, environment, said):
    common = ("--model", repository, "--prompt", "a", "-n", "1", "--no-conversation", "--verbosity", "4")
    end = f"{said}: this build has no libkvcache" if said else "common_perf_print"
    run("completion", *common, *options, status=bool(said), end=end, **environment | without)


def test_wrong_options(repository):
    run("server", "--kvcache", "1", "--model", repository, status=1, end="invalid argument: 1")
    run("bench", "--kvcache", status=1, end="invalid parameter for argument: --kvcache")


def types_of_llama_cpp():
    """Return the types that llama.cpp takes for its cache."""
    said, _ = run("completion", "--help")
    return re.search(r"-ctk,.*?allowed values: ([\w, ]+)$", said, re.MULTILINE | re.DOTALL)[1].split(", ")


def test_types_are_served_if_the_library_has_them(repository):
    types = types_of_llama_cpp()
    served = [name for name in DTYPES if name in types]
    assert {"f16", "q8_0"} < set(served)
    reason = f"no support for rows of type {{}} (use {', '.join(served[:-1])} or {served[-1]})"
    for i, name in enumerate(types):
        options = (("--cache-type-k", "--cache-type-v")[i % 2], name)
        said, log = complete(repository, text(0, 100), "--kvcache", *options)
        assert bool(re.search(USED, log)) == (name in served), log
        assert log.count("not used: ") == log.count(reason.format(name)) == (name not in served)
        if name not in served:
            assert "llama_kv_cache: size" in log
            assert said == complete(repository, text(0, 100), *options)[0]


TYPE_K, TYPE_V = "LLAMA_KVCACHE_TYPE_K", "LLAMA_KVCACHE_TYPE_V"


@pytest.mark.parametrize(
    ("options", "environment", "types"),
    [
        ([], {TYPE_K: "int8"}, ("int8", "f16")),
        (["--cache-type-k", "q4_0"], {TYPE_K: "int8", TYPE_V: "int8"}, ("int8", "int8")),
        (["--cache-type-k", "q4_0"], {}, ("q4_0", "f16")),
        ([], {"LLAMA_ARG_KVCACHE_TYPE_V": "int8"}, ("f16", "int8")),
        (["--kvcache-type-k", "int8", "--kvcache-type-v", "q8_0"], {TYPE_K: "f32", TYPE_V: "int8"}, ("int8", "q8_0")),
        (["--kvcache-type-v", "int8", "--flash-attn", "off"], {}, ("f16", "int8")),
    ],
)
def test_types_of_this_library_go_before_llama_cpps(repository, options, environment, types):
    _, log = complete(repository, text(0, 100), "--kvcache", *options, **environment)
    assert "K ({}), V ({}),".format(*types) in re.search(f"{USED}.*", log)[0]


def test_a_type_of_this_library_is_nothing_to_llama_cpps_cache(repository):
    said, log = complete(repository, text(0, 100), "--no-kvcache", LLAMA_KVCACHE_TYPE_K="int8")
    assert not re.search(USED, log)
    assert "(--kvcache-type-k, -v) name no types without LLAMA_KVCACHE=1 (--kvcache)" in log
    assert said == complete(repository, text(0, 100))[0]


def test_an_unknown_variable_is_named(repository):
    """Also where it should have switched this cache on."""
    of_options = "LLAMA_ARG_KVCACHE, LLAMA_ARG_KVCACHE_TYPE_K, "
    for name, known in {
        "LLAMA_KVCACHE_TYPEK": "LLAMA_KVCACHE, LLAMA_KVCACHE_TYPE_K, ",
        "LLAMA_KVCACH": "LLAMA_KVCACHE, LLAMA_KVCACHE_TYPE_K, ",
        "LLAMA_ARG_KVCACHE_TYPK": of_options,
        "LLAMA_ARG_KVCACHE_VALKEY_USER": of_options,
        "LLAMA_ARG_NO_KVCACHES": "LLAMA_ARG_NO_KVCACHE\n",
    }.items():
        _, log = complete(repository, "a", **{name: "1"})
        assert log.count(f"nothing reads the variable {name}: there are {known}") == 1
    _, log = complete(repository, "a", LLAMA_KVCACHE="0", LLAMA_KV_CACHE_DEBUG="0", LLAMA_ARG_KVCACHE_TYPE_K="f16",
                      LLAMA_ARG_NO_KVCACHE="1", LLAMA_ARG_KV_UNIFIED="1")  # fmt: skip
    assert "nothing reads" not in log


def test_a_type_of_this_library_is_no_value_of_llama_cpps_option(repository):
    options = ("--model", repository, "--prompt", "a", "-n", "1", "--no-conversation", "-ctk", "int8")
    run("completion", *options, status=1, end=r"Unsupported cache type: int8 \(types of libkvcache: --kvcache-type-k")


@pytest.mark.parametrize(
    ("architecture", "head_dim", "type_k", "said"),
    [
        ("llama", 48, "int8", r"layers\[0\].k_dim is 48: for int8 it must be a multiple of 32"),
        (
            "deepseek2",
            None,
            None,
            "_TYPE_V .* is 'int8': this model's values lie in its keys, whose type is f16",
        ),
        ("deepseek2", None, "int8", ""),
    ],
)
def test_types_that_do_not_fit_a_model_are_errors(folder, architecture, head_dim, type_k, said):
    model = folder / f"{architecture}-{head_dim}.gguf"
    if head_dim:
        module = llama_models.writer()
        module.write_random(model, module.Shape(architecture, 1, 96, 96, 2, 1, head_dim, vocab_size=320))
    else:
        model = llama_models.write_random(folder, architecture)
    options = ("--model", model, "-npp", "16", "-ntg", "4", "-npl", "1", "-c", "256", "--threads", "1", "--kvcache")
    end = said or r"\| +4 \| +1 \|"
    types = {TYPE_V: "int8"} | ({TYPE_K: type_k} if type_k else {})
    run("batched-bench", *options, status=bool(said), end=end, **types)


SELECT = "LLAMA_KVCACHE_SELECT"


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--kvcache-select", "64"], {}, "a new token selects 64 rows in 2 of 4 layers, from 8192 tokens on"),
        ([], {SELECT: "64"}, "a new token selects 64 rows"),
        (["--kvcache-select", "32"], {SELECT: "64"}, "a new token selects 32 rows"),
        ([], {"LLAMA_ARG_KVCACHE_SELECT": "32"}, "a new token selects 32 rows"),
        (["--kvcache-select", "0"], {SELECT: "64"}, ""),
        ([], {SELECT: "4055"}, "a new token selects 4055 rows"),
        ([], {SELECT: "4056"}, f"{SELECT} is 4056: all rows are read, because a token selects from 8193 tokens on"),
        (["--ctx-size", "4096"], {SELECT: "64"}, "a sequence of this context has at most 4096"),
        (["--no-kvcache"], {SELECT: "64"}, f"{option_too(SELECT)} selects no rows without LLAMA_KVCACHE=1 (--kvcache)"),
    ],
)
def test_rows_are_selected_if_asked_for(repository, options, environment, said):
    _, log = complete(repository, text(0, 100), "--ctx-size", "8192", "--kvcache", *options, **environment)
    assert said in log
    assert ("a new token selects" in log) == said.startswith("a new token selects")


def test_reports_of_memory_count_sketches(repository):
    """Both the line of the cache, which names them, and the table at the end of the program."""
    found = []
    for rows in ("0", "64"):
        _, log = complete(repository, text(0, 100), "--ctx-size", "32768", "--kvcache", "--kvcache-select", rows)
        (all_bytes,) = set(re.findall(r"up to ([\d.]+) MiB$", log, re.MULTILINE))
        context = re.findall(r"- Host .* = +\d+ \+ +(\d+) \+ +\d+ ", log)[-1]
        sketches = re.findall(r"tokens on, by sketches of up to ([\d.]+) MiB, counted above$", log, re.MULTILINE)
        assert len(set(sketches)) == (rows != "0")
        found.append((float(all_bytes), int(context), float(sketches[0]) if sketches else 0))
    (without, without_in_table, _), (with_them, with_them_in_table, sketches) = found
    assert sketches == 2.25  # 2 layers of 2 heads of 64: 18 bytes a key
    assert with_them == without + sketches
    assert with_them_in_table == without_in_table + 2


PROMPTS = "LLAMA_KVCACHE_PROMPTS"
IN_BYTES = ", prompts: int8"


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--kvcache-prompts", "int8"], {}, IN_BYTES),
        ([], {PROMPTS: "int8"}, IN_BYTES),
        ([], {"LLAMA_ARG_KVCACHE_PROMPTS": "int8"}, IN_BYTES),
        (["--kvcache-prompts", "stored"], {PROMPTS: "int8"}, ""),
        ([], {PROMPTS: "stored"}, ""),
        (["--no-kvcache"], {PROMPTS: "int8"}, f"{option_too(PROMPTS)} multiplies no prompts in int8 without"),
        (["--no-kvcache"], {PROMPTS: "stored"}, ""),
    ],
)
def test_prompts_are_multiplied_in_bytes_if_asked_for(repository, options, environment, said):
    _, log = complete(repository, text(0, 100), "--kvcache", *options, **environment)
    assert said in log
    assert (IN_BYTES in log) == (said == IN_BYTES)
    assert ("multiplies no prompts" in log) == (said not in ("", IN_BYTES))


def test_bench_says_why_there_is_no_context(repository):
    options = ("-m", repository, "-p", "0", "-n", "1")
    for variable in ("LLAMA_KVCACHE", SELECT, PROMPTS, TYPE_K):
        _, log = run("bench", *options, status=1, **{"LLAMA_KVCACHE": "1", variable: "no"})
        assert f"{option_too(variable)} is 'no': set it to" in log


def test_bench_names_the_cache(repository):
    options = ("-m", repository, "-p", "0", "-n", "1", "-r", "1", "-t", "1")
    for switch, used in (("0", "llama.cpp's own cache"), ("1", "libkvcache: ")):
        said, _ = run("bench", *options, LLAMA_KVCACHE=switch)
        assert f"keys and values are in {used}" in said


def test_bench_says_why_the_model_is_not_served(folder):
    model = llama_models.write_random(folder, "deepseek4")
    _, log = run("bench", "-m", model, "-p", "0", "-n", "1", "-r", "1", "-t", "1", LLAMA_KVCACHE="1")
    assert re.fullmatch(r"llama_kvcache_create: not used: deepseek4: .*\n", log)


@pytest.mark.parametrize(
    ("architecture", "num_layers", "head_dim", "window"),
    [("llama", 2, 64, 0), ("llama", 4, 48, 0), ("gemma3", 5, 64, 64), ("deepseek2", 0, 0, 0)],
)
def test_a_model_that_can_select_no_rows_is_an_error(folder, architecture, num_layers, head_dim, window):
    """Its layers are too few, its heads do not fit, all have windows, or values lie in the keys."""
    if num_layers:
        sizes = {"num_heads": 2, "num_layers": num_layers, "head_dim": head_dim, "window": window}
        model = llama_models.write_small(folder / "unselectable.gguf", architecture=architecture, **sizes)
    else:
        model = llama_models.write_random(folder, architecture)
    options = ("--model", model, "-npp", "16", "-ntg", "4", "-npl", "1", "-c", "8192", "--threads", "1", "--kvcache")
    end = re.escape(f"{option_too(SELECT)} is 64") + ": no layer of the model can select rows"
    run("batched-bench", *options, status=1, end=end, LLAMA_KVCACHE_SELECT="64")


def test_a_model_that_is_not_served_runs_on_the_own_cache(folder):
    """The reason is in the log once, also at the server, which makes contexts to measure memory."""
    model = llama_models.write_random(folder, "deepseek4")
    reason = r"not used: deepseek4: the model reads images, whose tokens see each other beyond its windows"
    options = ("--model", model, "-npp", "16", "-ntg", "4", "-npl", "1,2", "-c", "256", "--threads", "1", "--kvcache")
    log = "".join(run("batched-bench", *options, end=r"\| +4 \| +2 \|"))
    assert len(re.findall(reason, log)) == 1
    with Server(model, folder / "refused.log", "--kvcache", "--parallel", "2", "--ctx-size", "512") as server:
        assert server.ask("/health") == {"status": "ok"}
        assert len(re.findall(reason, server.log())) == 1


# ---- the programs


PREFIX = ["off", "on"]


@pytest.mark.parametrize("prefix", PREFIX)
def test_a_prompt_cache_in_a_file(repository, tmp_path, prefix):
    """The file goes from one cache to the other, and a longer prompt goes on from it."""
    expected, _ = complete(repository, text(0, 300))
    longer, _ = complete(repository, text(0, 340))
    for option, other in (BOTH, BOTH[::-1]):
        kept = ("--prompt-cache", tmp_path / f"{option}.bin", "--kvcache-prefix", prefix)
        assert complete(repository, text(0, 300), option, *kept)[0] == expected
        for again in (option, other):
            said, log = complete(repository, text(0, 300), again, *kept, "--prompt-cache-ro")
            assert said == expected
            assert "session file has exact match for prompt" in log
            said, log = complete(repository, text(0, 340), again, *kept, "--prompt-cache-ro")
            assert said == longer
            assert "session file matches 300 / 340 tokens" in log


@pytest.mark.parametrize("prefix", PREFIX)
def test_a_prompt_cache_of_a_hybrid_model(hybrid, tmp_path, prefix):
    """The file has the recurrent state: it answers as the run that wrote it."""
    letters = ("--grammar", "root ::= [a-z]+")  # a random model would answer with parts of characters
    for option in BOTH:
        kept = ("--prompt-cache", tmp_path / f"{option}.bin", "--kvcache-prefix", prefix, *letters)
        expected, _ = complete(hybrid, text(0, 300), option, *kept)
        said, log = complete(hybrid, text(0, 300), option, *kept, "--prompt-cache-ro")
        assert said == expected
        assert "session file has exact match for prompt" in log


def test_perplexity(repository, tmp_path):
    """Four sequences at a time, on a text of the repository."""
    (tmp_path / "text").write_text(text(0, 6000))
    found = []
    for option in BOTH:
        options = ("--model", repository, "--file", tmp_path / "text", "--ctx-size", "512", "--threads", "1")
        log = "".join(run("perplexity", *options, "--verbosity", "4", option, end="Final estimate: PPL"))
        assert bool(re.search(USED, log)) == (option == "--kvcache")
        found.append(re.search(r"Final estimate: PPL = ([\d.]+)", log)[1])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [[], ["-pps"], ["-kvu"], ["-pps", "-kvu"]], ids=" ".join)
def test_batched_bench(repository, options):
    """Sequences beside each other; with -pps and -kvu the prompt is shared."""
    common = ("--model", repository, "-npp", "64", "-ntg", "16", "-npl", "1,2,4", "-c", "2048", "--threads", "1")
    printed, log = run("batched-bench", *common, "--verbosity", "4", "--kvcache", *options, end=r"\| +16 \| +4 \|")
    assert re.search(USED, printed + log)
    rows = re.findall(r"\| +64 \| +16 \| +(\d) \| +(\d+) \|", printed + log)
    shared = options == ["-pps", "-kvu"]
    assert rows == [(str(n), str(64 * (1 if shared else n) + 16 * n)) for n in (1, 2, 4)]


def test_bench(repository):
    """It has options of its own: the environment switches it on."""
    options = ("-p", "64", "-n", "8", "-d", "0,128", "-r", "1", "-t", "1", "-v")
    printed, log = run("bench", "-m", repository, *options, LLAMA_KVCACHE="1")
    assert re.search(USED, log)
    assert re.findall(r"(pp64|tg8)( @ d128)? \|", printed) == [
        ("pp64", ""), ("tg8", ""), ("pp64", " @ d128"), ("tg8", " @ d128")
    ]  # fmt: skip
