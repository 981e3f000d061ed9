"""Test that llama.cpp on this cache finds the beginnings of prompts across slots, and answers as without."""

import base64
import concurrent.futures
import itertools
import os
import random
import re
import shutil
import subprocess
import time

import llama_cpp_build
import llama_models
import numpy as np
import pytest
from llama_models import text
from llama_server import (
    ENVIRONMENT,
    NEXT_TOKEN,
    NO_AMX,
    ON,
    THREE_SLOTS,
    Server,
    completion,
    expect_same_probabilities,
    in_folder,
    timings,
)
from support import servers

from kvcache.system import parse_bytes

pytestmark = pytest.mark.threads  # those of its clients


@pytest.fixture(scope="module")
def plain(folder, repository):
    """Return a server without prefixes, with room for one prompt after the other."""
    with Server(repository, folder / "plain.log", "--kvcache", "--parallel", "1", "--ctx-size", "1024") as server:
        yield server


@pytest.fixture(scope="module", params=["--no-kv-unified", "--kv-unified"])
def server(request, folder, repository):
    """Return a server of three slots with prefixes."""
    with Server(repository, folder / f"on{request.param}.log", *ON, *THREE_SLOTS, request.param) as server:
        assert "in place of the prompt cache" in server.log()
        yield server


ROWS = ["llama", "gemma3", "qwen2vl", "deepseek2"]
HYBRID = ["lfm2", "falcon-h1", "granitehybrid", "qwen3next", "jamba"]


@pytest.mark.parametrize("architecture", [*ROWS, *HYBRID, *llama_models.POOLED])
def test_the_memory(folder, architecture):
    """Full attention, windows, M-RoPE, values in keys, hybrid models, pooled keys: in memory, and in a folder."""
    out = llama_cpp_build.run("test-kvcache-prefix", llama_models.write_random(folder, architecture))
    assert out.endswith("ok\n"), out


# ---- one request after the other


def test_a_prompt_begins_as_one_of_another_slot(plain, server):
    first = server.complete(text(1000, 1300), id_slot=0)
    assert timings(first) == (0, 300)
    other = text(1000, 1250) + "KING HENRY:"
    again = server.complete(other, id_slot=1)
    assert timings(again) == (250, 11)
    assert again["tokens"] == plain.complete(other, cache_prompt=False)["tokens"]
    answered = text(1000, 1300) + first["content"]
    longer = server.complete(answered, id_slot=2)
    assert timings(longer) == (300 + 31, 1)
    assert longer["tokens"] == plain.complete(answered, cache_prompt=False)["tokens"]
    same = server.complete(answered, id_slot=0)
    assert timings(same) == (300 + 31, 1)
    assert same["tokens"] == longer["tokens"]


def test_a_draft_model_leaves_the_prefixes_of_its_model(folder, repository, plain):
    """It has not read them, and so guesses from the tokens behind them, in each slot."""
    options = ("--spec-type", "draft-simple", "--model-draft", repository, "--spec-draft-n-max", "5")
    with Server(repository, folder / "draft.log", *ON, *THREE_SLOTS, *options) as server:
        assert "in place of the prompt cache" in server.log()
        first = server.complete(text(1000, 1300), id_slot=0)
        for slot, end, known in ((1, 1250, 250), (0, 1280, 280), (2, 1250, 260), (1, 1100, 100), (2, 1290, 290)):
            prompt = text(1000, end) + "KING HENRY:"
            again = server.complete(prompt, id_slot=slot)
            assert timings(again)[0] >= known
            assert again["timings"]["draft_n"] > 0
            assert again["tokens"] == plain.complete(prompt, cache_prompt=False)["tokens"]
        longer = text(1000, 1300) + first["content"]
        assert timings(server.complete(longer, id_slot=1))[0] >= 300


def test_a_request_that_asks_for_no_cache_uses_none(server):
    server.complete(text(1500, 1700), 4, id_slot=0)
    for slot in range(3):
        assert timings(server.complete(text(1500, 1700), 4, id_slot=slot, cache_prompt=False)) == (0, 200)
    assert timings(server.complete(text(1500, 1700), 4, id_slot=1)) == (199, 1)


def test_a_prompt_that_asks_for_no_cache_is_kept_for_others(plain, server):
    """llama.cpp's own prompt cache keeps it, too."""
    first = server.complete(text(3300, 3500), 4, id_slot=0, cache_prompt=False)
    again = server.complete(text(3300, 3500), 4, id_slot=1)
    assert timings(again) == (199, 1)
    assert first["tokens"] == again["tokens"] == plain.complete(text(3300, 3500), 4, cache_prompt=False)["tokens"]


def test_a_prompt_that_was_broken_off_is_known_as_far_as_it_was_fed(plain, server):
    prompt = text(5000, 5900)
    stream = server.stream("/completion", completion(prompt, 90, id_slot=0))
    assert len(list(itertools.islice(stream, 2))) == 2
    stream.close()
    server.wait_for_slots()
    other = prompt[:850] + "KING HENRY:"
    found = server.complete(other, id_slot=1)
    assert timings(found) == (850, 11)
    assert found["tokens"] == plain.complete(other, cache_prompt=False)["tokens"]


def test_more_conversations_than_slots_go_on(plain, server):
    """Their answers are known, too."""
    prompts = [text(begin, begin + 200) for begin in range(2050, 8000, 850)]
    said = [""] * len(prompts)
    for turn in range(4):
        for i, prompt in enumerate(prompts):
            answer = server.complete(prompt + said[i], 16)
            known = timings(answer)[0]
            assert known == 200 + 16 * turn - 1 if turn else known < 20, (turn, i)
            said[i] += answer["content"]
    for prompt, answer in zip(prompts, said, strict=True):
        assert plain.complete(prompt, len(answer), cache_prompt=False)["content"] == answer


def test_prompts_make_room_for_others(folder, repository, plain):
    """The oldest kept block is evicted first, and nobody is refused for it."""
    size = ("--parallel", "2", "--ctx-size", "1024", "--kv-unified")
    with Server(repository, folder / "small.log", *ON, *size) as small:
        for begin in (0, 1500, 3000, 4500, 6000):
            prompt = text(begin, begin + 700)
            found = small.complete(prompt, 8)
            assert timings(found)[0] < 20
            assert found["tokens"] == plain.complete(prompt, 8, cache_prompt=False)["tokens"]
        assert timings(small.complete(text(6000, 6700), 8, id_slot=0))[0] == 699
        assert timings(small.complete(text(0, 700), 8, id_slot=1))[0] < 700 - 64


# ---- many clients


SYSTEM = [(0, 400), (2000, 2130), (4000, 4060)]
PROMPTS = [(system, begin, begin + 50 * i) for system in SYSTEM for i, begin in enumerate(range(5000, 8000, 800), 1)]


def words(prompt):
    system, begin, end = prompt
    return text(*system) + text(begin, end)


def play_clients(server, seconds, check, *request, **fields):
    """Have six clients ask, and some break off; check each answer."""
    end = time.monotonic() + seconds
    known = []

    def client(seed):
        chance, answers = random.Random(seed), 0
        while time.monotonic() < end or not answers:
            prompt = chance.choice(PROMPTS)
            slot = chance.randrange(-1, 3)
            if chance.random() < 0.3:
                events = server.stream("/completion", completion(words(prompt), 200, id_slot=slot))
                list(itertools.islice(events, chance.randrange(0, 8)))
                events.close()
                continue
            answer = server.complete(words(prompt), *request, id_slot=slot, **fields)
            if answer["stop_type"] != "none":
                check(prompt, answer)
                known.append(timings(answer)[0])
                answers += 1
        return answers

    with concurrent.futures.ThreadPoolExecutor() as clients:
        assert min(clients.map(client, range(6))) > 0
    assert sum(known) > 0
    server.wait_for_slots()


SECONDS = [3, pytest.param(60, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seconds", SECONDS)
def test_parallel_clients(plain, server, seconds):
    """Each gets the answer that it gets alone, on whichever slot, also while others come, go and break off."""
    expected = {prompt: plain.complete(words(prompt), 24, cache_prompt=False)["tokens"] for prompt in PROMPTS}

    def check(prompt, answer):
        assert answer["tokens"] == expected[prompt], prompt

    play_clients(server, seconds, check, 24)


@pytest.mark.parametrize("seconds", SECONDS)
def test_parallel_clients_of_a_hybrid_model(folder, hybrid, seconds):
    """The same, before and after a restart from a folder."""
    with Server(hybrid, folder / "alone.log", "--kvcache", "--parallel", "1", "--ctx-size", "1024", NO_AMX) as alone:
        expected = {prompt: alone.complete(words(prompt), 1, **NEXT_TOKEN) for prompt in PROMPTS}

    def check(prompt, answer):
        expect_same_probabilities(answer, expected[prompt], 0.01)

    for _ in range(2):
        with Server(hybrid, folder / "clients.log", *in_folder(folder / f"clients-{seconds}"), NO_AMX) as server:
            play_clients(server, seconds, check, 1, **NEXT_TOKEN)


# ---- models, options


def test_a_model_with_windows(folder, windows):
    """A match is one to the token, though windows have dropped what they showed there."""
    small = ("--ctx-size", "4096", "--parallel", "3", "--batch-size", "64", "--ubatch-size", "64")
    with Server(windows, folder / "windows.log", *ON, *small) as server:

        def next_token(prompt, slot):
            found = server.complete(prompt, 1, id_slot=slot, **NEXT_TOKEN)
            anew = server.complete(prompt, 1, id_slot=2, cache_prompt=False, **NEXT_TOKEN)
            expect_same_probabilities(found, anew)
            return timings(found)[0]

        assert next_token(text(0, 720), 0) == 0
        assert next_token(text(0, 720) + text(900, 920), 1) == 720
        assert next_token(text(0, 500) + text(900, 920), 1) == 500
        assert next_token(text(0, 310) + text(2000, 2400), 0) == 310
        assert next_token(text(0, 720) + text(900, 930), 0) >= 720


def test_images_count_by_what_they_show(folder, repository):
    """Tokens behind the same image are known; tokens behind another image are not."""
    options = ("--mmproj", llama_models.write_projector(folder, 256), "--parallel", "3", "--ctx-size", "3072")
    with Server(repository, folder / "images.log", *ON, *options) as server:
        marker = server.ask("/props")["media_marker"]

        def known(seed, end, slot):
            image = base64.b64encode(llama_models.picture(seed)).decode()
            prompt = {"prompt_string": text(0, 100) + marker + text(200, end), "multimodal_data": [image]}
            found = server.complete(prompt, 1, id_slot=slot, **NEXT_TOKEN)
            anew = server.complete(prompt, 1, id_slot=2, cache_prompt=False, **NEXT_TOKEN)
            expect_same_probabilities(found, anew, 0.01)
            return timings(found)[0]

        assert known(1, 250, 0) == 0
        assert known(1, 250, 1) == 100 + 64 + 50 - 1
        assert known(1, 230, 0) == 100 + 64 + 30 - 1
        assert known(2, 250, 1) == 100
        assert known(2, 280, 0) == 100 + 64 + 50
        assert known(1, 280, 0) == 100 + 64 + 50


# ---- stores


def test_a_folder_serves_after_a_restart(folder, repository, plain):
    """Answers are found, too, as far as their blocks were full."""
    options = in_folder(folder / "kept")
    prompt = text(1000, 1300)
    with Server(repository, folder / "before.log", *options) as server:
        first = server.complete(prompt, id_slot=0)
        assert timings(first) == (0, 300)
    with Server(repository, folder / "after.log", *options) as server:
        answered = prompt + first["content"]
        found = server.complete(answered, id_slot=1)
        assert timings(found) == (320, 12)
        assert found["tokens"] == plain.complete(answered, cache_prompt=False)["tokens"]
        other = text(1000, 1250) + "KING HENRY:"
        found = server.complete(other, id_slot=2)
        assert timings(found) == (250, 11)
        assert found["tokens"] == plain.complete(other, cache_prompt=False)["tokens"]


def write_adapter(path, seed):
    """Write a LoRA of the first layer's queries."""
    gguf_files = pytest.importorskip("support.gguf_files")
    rng = np.random.default_rng(seed)
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
    parts = {"lora_a": (8, 256), "lora_b": (256, 8)}
    tensors = [(f"blk.0.attn_q.weight.{part}", rng.standard_normal(n, np.float32), None) for part, n in parts.items()]
    return gguf_files.write(path, "llama", metadata, tensors)


def test_models_and_adapters_share_a_folder_and_no_rows(folder, repository, windows):
    """Each finds its own; a file of weights is known by what is in it."""
    options = in_folder(folder / "shared")
    adapter = folder / "adapter.gguf"
    rope = ("--rope-freq-scale", "0.5")

    def known(name, *more, model=repository):
        with Server(model, folder / f"{name}.log", *options, *more) as server:
            return timings(server.complete(text(0, 200), 1))[0]

    assert known("first") == 0
    assert known("first-again") == 192
    assert known("windows", model=windows) == 0
    weights = bytearray(repository.read_bytes())
    weights[-len(weights) // 3] ^= 1
    (changed := folder / "changed.gguf").write_bytes(weights)
    assert known("changed", model=changed) == 0
    for seed in (1, 2):
        write_adapter(adapter, seed)
        assert known(f"adapter-{seed}", "--lora", adapter) == 0
        assert known(f"adapter-{seed}-again", "--lora", adapter) == 192
    assert known("scaled", "--lora-scaled", f"{adapter}:0.5") == 0
    assert known("rope", *rope) == 0
    assert known("rope-again", *rope) == 192
    assert known("type", "--cache-type-k", "q8_0") == 0
    assert known("bytes", "--kvcache-prompts", "int8") == 0
    assert known("bytes-again", "--kvcache-prompts", "int8") == 192
    assert known("stored", "--kvcache-prompts", "stored") == 192
    assert known("override", "--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.01") == 0


def test_adapters_that_are_switched_between_requests(folder, repository):
    """Tokens that a slot was fed together with others are neither reused nor kept as theirs."""
    adapter = write_adapter(folder / "switched.gguf", 1)
    prompt = text(0, 300)
    with Server(repository, folder / "switched.log", *in_folder(folder / "switched"), "--lora", adapter) as server:

        def next_token(slot, **fields):
            return server.complete(prompt, 1, id_slot=slot, **NEXT_TOKEN, **fields)

        next_token(0)
        server.ask("/lora-adapters", [{"id": 0, "scale": 0.25}])
        found = [next_token(slot) for slot in (0, 1, 0)]
        assert [timings(answer)[0] for answer in found] == [0, 299, 299]
        anew = next_token(2, cache_prompt=False)
        for answer in found:
            expect_same_probabilities(answer, anew, 0.01)


def test_a_folder_that_fails_costs_no_answer(folder, repository, plain):
    """It is said once, and answers are those without it."""
    kept = folder / "failing"
    with Server(repository, folder / "failing.log", *in_folder(kept)) as server:
        server.complete(text(0, 200), 4)
        server.wait_for_slots()
        kept.rename(folder / "gone")
        kept.write_text("not a folder")
        for begin in range(1000, 7000, 1000):
            prompt = text(begin, begin + 300)
            assert server.complete(prompt, 8)["tokens"] == plain.complete(prompt, 8, cache_prompt=False)["tokens"]
        assert timings(server.complete(text(6000, 6300), 8))[0] == 299
    for what in ("read", "write"):
        assert server.log().count(f"cannot {what} dir:{kept}") <= 1
    assert server.log().count("no attempt to write for a minute") == 1


def test_llama_completion_reads_from_a_folder(folder, repository, hybrid):
    def complete(name, model, prompt):
        options = ("--kvcache", "--kvcache-prefix", f"dir:~/{name}", "-n", "70", "--temp", "0", "--ignore-eos")
        done = subprocess.run(
            [llama_cpp_build.program("llama-completion"), "--model", model, "--prompt", prompt, *options,
             "--threads", "1", "--no-conversation", "--verbosity", "4", "--ctx-size", "1024"],
            env={**ENVIRONMENT, "HOME": str(folder)}, stdin=subprocess.DEVNULL, capture_output=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert (folder / name).is_dir()
        known = re.search(rb"(\d+) / (\d+) tokens of prompt are known", done.stderr)
        return done.stdout, int(known[1])

    for model, expected in ((repository, 256), (hybrid, 300 - 65)):
        first, known = complete(model.stem, model, text(0, 300))
        assert known == 0
        assert complete(model.stem, model, text(0, 300)) == (first, expected)
        assert complete(model.stem, model, text(0, 290) + text(900, 950))[1] == expected


def test_a_server_serves_another_machine(folder, repository):
    """The test needs a llama.cpp that was built with a client for it."""
    servers.need()
    built = llama_cpp_build.folder() / "bin"
    if any(
        b"this build has no client" in path.read_bytes()
        for path in (*built.glob("libllama.so"), built / "llama-server")
    ):
        pytest.skip("llama.cpp was built without --valkey")
    with servers.Server(folder / "valkey") as valkey:
        options = ("--kvcache", "--kvcache-prefix", f"valkey://127.0.0.1:{valkey.port}", *THREE_SLOTS)
        with Server(repository, folder / "valkey-one.log", *options) as server:
            assert timings(server.complete(text(0, 200), 1)) == (0, 200)
        with Server(repository, folder / "valkey-other.log", *options) as server:
            assert timings(server.complete(text(0, 200), 1)) == (192, 8)
            valkey.kill()
            assert timings(server.complete(text(1000, 1200), 1)) == (0, 200)
            server.wait_for_slots()
        assert "cannot read valkey://127.0.0.1" in server.log()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("yes", "set it to on, off, dir:/path or valkey:host:port"),
        ("dir:", "there is no folder in it: write dir:/path"),
        ("dir:~nobody/kept", "no home folder is known for its ~: write dir:/path"),
        ("dir:/dev/null/kept", "name a folder that can be made and written to"),
        ("dir:kept?most=1", r"write dir:/path\?max_bytes=20GiB"),
        ("dir:kept?max_bytes=20XB", "max_bytes is '20XB': write a number of bytes, such as 20GB or 20GiB"),
        ("dir:kept?max_bytes=1.5", "max_bytes is '1.5': write a number of bytes"),
        ("valkey:localhost", "(this build has no client|write valkey:127.0.0.1:6379)"),
        ("valkey:***@localhost:6379", "(this build has no client|set LLAMA_KVCACHE_VALKEY_USER and )"),
        ("valkey:localhost/1:6379", "(this build has no client|write valkey:host:port, )"),
    ],
)
def test_what_else_is_asked_for_is_an_error(folder, repository, spec, said):
    done = subprocess.run(
        [llama_cpp_build.program("llama-server"), "--model", repository, "--kvcache",
         "--kvcache-prefix", spec.replace("***", "user:secret")],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "secret" not in done.stderr
    assert re.search(rf"LLAMA_KVCACHE_PREFIX \(--kvcache-prefix\) is '{re.escape(spec)}': .*{said}", done.stderr)


@pytest.mark.parametrize(("spec", "kept"), [("kept/there", "kept/there"), ("~", "home")])
def test_a_folder_begins_where_the_program_was_started_or_at_home(tmp_path, repository, spec, kept):
    """The log says where it is."""
    (tmp_path / "home").mkdir()
    options = ("--kvcache", "--kvcache-prefix", f"dir:{spec}", "--ctx-size", "256", "--prompt", text(0, 100), "-n", "1")
    done = subprocess.run(
        [llama_cpp_build.program("llama-completion"), "--model", repository, *options, "--no-conversation"],
        cwd=tmp_path, env=ENVIRONMENT | {"HOME": str(tmp_path / "home"), "LLAMA_ARG_LOG_VERBOSITY": "4"},
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert f"prompts are kept in dir:{tmp_path / kept} (up to 32.00 GiB)" in done.stderr
    assert len([path for path in (tmp_path / kept).rglob("*") if path.is_file()]) > 0


@pytest.mark.parametrize(
    ("size", "said"),
    [("20GB", "18.63"), ("20 gb", "18.63"), ("1.5g", "1.50"), ("512MiB", "0.50"), ("1073741824", "1.00")],
)
def test_sizes_are_written_as_for_stores_in_python(folder, repository, size, said):
    spec = f"dir:{folder / 'sizes'}?max_bytes={size}"
    options = (
        "--kvcache",
        "--kvcache-prefix",
        spec,
        "--prompt",
        "a",
        "-n",
        "1",
        "--no-conversation",
        "--ctx-size",
        "256",
    )
    done = subprocess.run(
        [llama_cpp_build.program("llama-completion"), "--model", repository, "--verbosity", "4", *options],
        env=ENVIRONMENT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert f"MiB, prompts in dir:{folder / 'sizes'} (up to {said} GiB)" in done.stderr
    assert parse_bytes(size) == pytest.approx(float(said) * 2**30, rel=1e-3)


@pytest.mark.skipif(not shutil.which("setpriv"), reason="the superuser can write to any folder")
def test_a_folder_that_cannot_be_written_to_is_an_error(folder, repository):
    kept = folder / "read-only"
    kept.mkdir()
    kept.chmod(0o500)
    command = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.geteuid() == 0 else []
    options = ("--kvcache", "--kvcache-prefix", f"dir:{kept}", "--ctx-size", "256", "--prompt", "a", "-n", "1")
    done = subprocess.run(
        [*command, llama_cpp_build.program("llama-completion"), "--model", repository, *options],
        env=ENVIRONMENT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode != 0
    assert "it cannot be written to: name a folder that can be made and written to" in done.stderr


@pytest.mark.parametrize("kind", ["rows", "states"])
def test_a_folder_without_room_for_a_block_is_an_error(folder, repository, hybrid, kind):
    """With the room that the error names, a block is kept."""
    model, prompt = (repository, text(0, 100)) if kind == "rows" else (hybrid, text(0, 64 + 4))
    options = ("--kvcache", "--kvcache-prefix", f"dir:{folder / kind}?max_bytes=1KiB")
    done = subprocess.run(
        [llama_cpp_build.program("llama-server"), "--model", model, *options],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    (size,) = set(re.findall(r"a block of this model takes (\d+) KiB: write \?max_bytes=\1KiB or more", done.stderr))
    for known in (0, 64):
        options = in_folder(f"{folder / kind}?max_bytes={size}KiB")
        with Server(model, folder / f"room-{kind}-{known}.log", *options) as server:
            assert timings(server.complete(prompt, 1))[0] == known
            server.wait_for_slots()


def wait_until(is_so):
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_metrics_count_what_is_kept_and_what_fails(folder, repository):
    """In a cache of two prompts of 300 tokens, and a folder that is gone."""
    kept = folder / "counted"
    options = ("--kvcache", "--kvcache-prefix", f"dir:{kept}", "--parallel", "1", "--ctx-size", "640", "--metrics")

    def metrics():
        return dict(re.findall(r"^kvcache_(\w+) (\d+)$", server.ask("/metrics"), re.MULTILINE))

    with Server(repository, folder / "counted.log", *options) as server:
        assert f", prompts in dir:{kept} (up to 32.00 GiB)" in server.log()
        assert metrics().keys() == {
            "bytes", "most_bytes", "rows_evicted_total", "store_read_failures_total", "store_write_failures_total"
        }  # fmt: skip
        server.complete(text(0, 300), 1)
        server.wait_for_slots()
        wait_until(lambda: len(list(kept.rglob("*"))) >= 300 // 64)
        before = metrics()
        assert 0 < int(before["bytes"]) < int(before["most_bytes"]) * 2
        assert before["rows_evicted_total"] == before["store_write_failures_total"] == "0"
        kept.rename(folder / "counted-before")
        kept.write_text("no folder")
        for begin in (1000, 2000, 3000):
            server.complete(text(begin, begin + 300), 1)
            server.wait_for_slots()
        wait_until(lambda: int(metrics()["store_write_failures_total"]) > 0)
        assert int(metrics()["rows_evicted_total"]) > 0


def test_prefixes_without_the_cache_are_said_to_be_none(folder, repository):
    with Server(repository, folder / "no-cache.log", "--kvcache-prefix", "on", "--ctx-size", "256") as server:
        assert "keeps no prompts without LLAMA_KVCACHE=1 (--kvcache)" in server.log()
        assert "in place of the prompt cache" not in server.log()


def test_llama_completion_prints_all_of_an_answer(hybrid):
    """And what it logs, up to its end."""
    options = ("--kvcache", "--kvcache-prefix", "on", "-n", "70", "--temp", "0", "--ignore-eos", "--verbosity", "4")
    command = [llama_cpp_build.program("llama-completion"), "--model", hybrid, "--prompt", text(0, 300), *options,
               "--threads", "1", "--no-conversation", "--ctx-size", "1024"]  # fmt: skip
    for _ in range(20):
        done = subprocess.run(command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
        assert done.stdout.endswith(b"\n\n"), done.stdout
        assert b"graphs reused" in done.stderr
