"""Test that llama.cpp on this cache finds the beginnings of prompts across slots, and answers as without."""

import base64
import concurrent.futures
import itertools
import random
import subprocess
import time

import pytest
from support import llama_cpp_build, llama_models
from support.llama_models import text
from support.llama_server import ENVIRONMENT, NEXT_TOKEN, Server, completion, expect_same_probabilities, timings

pytestmark = pytest.mark.threads  # those of its clients

ON = ("--kvcache", "--kvcache-prefix", "on")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    llama_cpp_build.program("llama-server")
    return tmp_path_factory.mktemp("llama-prefix")


@pytest.fixture(scope="module")
def repository(folder):
    return llama_models.write_repository(folder)


@pytest.fixture(scope="module")
def plain(folder, repository):
    """Return a server without prefixes, with room for one prompt after the other."""
    with Server(repository, folder / "plain.log", "--kvcache", "--parallel", "1", "--ctx-size", "1024") as server:
        yield server


@pytest.fixture(scope="module", params=["--no-kv-unified", "--kv-unified"])
def server(request, folder, repository):
    """Return a server of three slots with prefixes."""
    size = ("--parallel", "3", "--ctx-size", "3072")
    with Server(repository, folder / f"on{request.param}.log", *ON, *size, request.param) as server:
        assert "in place of the prompt cache" in server.log()
        yield server


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2vl", "deepseek2", "lfm2"])
def test_the_memory(folder, architecture):
    """Full attention, windows, M-RoPE, values in keys, and a hybrid, which has no prefixes."""
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


def test_a_request_that_asks_for_no_cache_uses_none(server):
    server.complete(text(1500, 1700), 4, id_slot=0)
    for slot in range(3):
        assert timings(server.complete(text(1500, 1700), 4, id_slot=slot, cache_prompt=False)) == (0, 200)
    assert timings(server.complete(text(1500, 1700), 4, id_slot=1)) == (199, 1)


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
    """What was kept first is evicted first, and nobody is refused for it."""
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


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_parallel_clients(plain, server, seconds):
    """Each gets the answer that it gets alone, on whichever slot, also while others come, go and break off."""

    def words(prompt):
        system, begin, end = prompt
        return text(*system) + text(begin, end)

    expected = {prompt: plain.complete(words(prompt), 24, cache_prompt=False)["tokens"] for prompt in PROMPTS}
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
            answer = server.complete(words(prompt), 24, id_slot=slot)
            if answer["stop_type"] != "none":
                assert answer["tokens"] == expected[prompt], prompt
                known.append(timings(answer)[0])
                answers += 1
        return answers

    with concurrent.futures.ThreadPoolExecutor() as clients:
        assert min(clients.map(client, range(6))) > 0
    assert sum(known) > 0
    server.wait_for_slots()


# ---- models, options


def test_a_model_with_windows(folder):
    """A match is one to the token, though windows have dropped what they showed there."""
    windows = llama_models.write_windows(folder)
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
    """Tokens behind the same image are known, those of another one are not."""
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


def test_a_hybrid_has_no_prefixes(folder):
    model = llama_models.write_random(folder, "lfm2")
    options = ("--model", model, "-npp", "16", "-ntg", "4", "-npl", "1", "-c", "256", "--threads", "1")
    done = subprocess.run(
        [llama_cpp_build.program("llama-batched-bench"), *options],
        env=ENVIRONMENT | {"LLAMA_KVCACHE": "1", "LLAMA_KVCACHE_PREFIX": "on"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert "no prefixes: the model has recurrent layers" in done.stderr


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("yes", "set it to on or to off"),
        ("dir:kept", "prompts are kept in memory alone"),
        ("valkey:redis://localhost", "prompts are kept in memory alone"),
    ],
)
def test_what_else_is_asked_for_is_an_error(folder, repository, spec, said):
    done = subprocess.run(
        [llama_cpp_build.program("llama-server"), "--model", repository, "--kvcache", "--kvcache-prefix", spec],
        env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"LLAMA_KVCACHE_PREFIX is '{spec}': {said}" in done.stderr
