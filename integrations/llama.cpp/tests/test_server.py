"""Test llama-server on this cache as its clients use it: every answer equals the answer with llama.cpp's own cache."""

import concurrent.futures
import itertools
import random
import re
import resource
import time
from pathlib import Path

import llama_models
import pytest
from llama_models import text
from llama_server import (
    NEXT_TOKEN,
    Pair,
    Server,
    completion,
    expect_same_probabilities,
    part_of_cache,
    timings,
)

pytestmark = pytest.mark.threads  # those of its clients


# Two slots, each with a context of its own or both in one.
TWO_SLOTS = ("--parallel", "2", "--ctx-size", "1024", "--metrics")


@pytest.fixture(scope="module", params=["--no-kv-unified", "--kv-unified"])
def pair(request, folder, repository):
    saved = folder / f"saved{request.param}"
    saved.mkdir()
    with Pair(repository, folder, *TWO_SLOTS, "--slot-save-path", saved, request.param) as pair:
        yield pair


# ---- completions


def test_completions(pair):
    plain = pair.complete(text(0, 200), 100)
    assert plain["tokens_predicted"] == 100
    for server in (pair.ours, pair.own):
        events = list(server.stream("/completion", completion(text(0, 200), 100)))
        assert "".join(event["content"] for event in events) == plain["content"]
        assert events[-1]["stop"]
        assert len(events) > 10


def test_completions_in_the_words_of_openai(pair):
    request = {"prompt": text(300, 400), "max_tokens": 40, "temperature": 0}
    ours, own = pair.ask("/v1/completions", request)
    assert ours["choices"] == own["choices"]
    assert ours["usage"]["completion_tokens"] == 40
    chat = {"messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 40, "temperature": 0}
    ours, own = pair.ask("/v1/chat/completions", chat)
    assert ours["choices"] == own["choices"]
    said = "".join(
        event["choices"][0]["delta"].get("content") or ""
        for event in pair.ours.stream("/v1/chat/completions", chat)
        if event["choices"]
    )
    assert said == ours["choices"][0]["message"]["content"]


def test_several_prompts_and_probabilities_in_one_request(pair):
    answers = [
        server.ask("/completion", completion([text(0, 60), text(500, 590)], 16, n_probs=3))
        for server in (pair.ours, pair.own)
    ]
    for ours, own in zip(*answers, strict=True):
        assert part_of_cache(ours) == part_of_cache(own)
        for a, b in zip(ours["completion_probabilities"], own["completion_probabilities"], strict=True):
            assert a["logprob"] == pytest.approx(b["logprob"], abs=0.02)


def test_a_prompt_that_is_too_long_is_refused_and_a_full_context_ends_the_answer(pair):
    room = pair.ours.ask("/props")["default_generation_settings"]["n_ctx"]
    ours, own = pair.ask("/completion", completion(text(0, 1100), 8), status=400)
    assert ours == own
    assert "exceeds the available context size" in ours["error"]["message"]
    answer = pair.complete(text(0, room - 40), 100)
    assert answer["truncated"]
    assert answer["tokens_predicted"] < 50
    pair.complete(text(40, 90))


# ---- the prompt cache of a slot


def test_a_common_prefix_is_evaluated_once(pair):
    pair.ask("/slots/0?action=erase", {})
    first = pair.complete(text(1000, 1200), id_slot=0)
    assert timings(first) == (0, 200)
    longer = pair.complete(text(1000, 1250), id_slot=0)
    assert timings(longer) == (200, 50)
    assert longer["tokens_cached"] == 250 + 31
    other = pair.complete(text(1000, 1100) + "KING HENRY:", id_slot=0)  # which goes back
    assert timings(other) == (100, 11)
    alone = pair.complete(text(1000, 1100) + "KING HENRY:", id_slot=0, cache_prompt=False)
    assert timings(alone) == (0, 111)
    assert alone["content"] == other["content"]


# ---- save, erase, restore


def test_a_slot_of_rows_with_scales_is_saved_erased_and_restored(folder, repository):
    saved = folder / "scales"
    saved.mkdir()
    types = ("--kvcache-type-k", "int8", "--kvcache-type-v", "int8")
    options = ("--kvcache", *types, *TWO_SLOTS, "--slot-save-path", saved)
    with Server(repository, folder / "scales.log", *options) as server:
        assert "K (int8), V (int8)" in server.log()
        first = server.complete(text(2000, 2200), id_slot=0)
        assert server.ask("/slots/0?action=save", {"filename": "slot.bin"})["n_saved"] == 200 + 31
        continued = server.complete(text(2000, 2200) + first["content"][:20], id_slot=0)
        server.ask("/slots/0?action=erase", {})
        for slot in (0, 1):
            assert server.ask(f"/slots/{slot}?action=restore", {"filename": "slot.bin"})["n_restored"] == 231
            again = server.complete(text(2000, 2200) + first["content"][:20], id_slot=slot)
            assert timings(again) == (219, 1)
            assert again["content"] == continued["content"]
    with Server(repository, folder / "no scales.log", "--kvcache", *TWO_SLOTS, "--slot-save-path", saved) as server:
        refused = server.ask("/slots/0?action=restore", {"filename": "slot.bin"}, status=400)
        assert "mismatched type of keys (int8 instead of f16, layer 0)" in refused["error"]["message"]
        assert server.complete(text(2000, 2200), id_slot=0)["tokens_predicted"] == 32


# ---- many clients


PROMPTS = [(begin, begin + length) for begin, length in zip(range(0, 12000, 1000), (20, 300, 150, 80) * 3, strict=True)]


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.slow)])
def test_parallel_clients(pair, seconds):
    """Each gets the answer that it gets alone, also while others come, go and break off.

    If a client breaks off, llama-server sometimes ends another's answer before it began, with either cache.
    """
    expected = {prompt: pair.complete(text(*prompt), 24, cache_prompt=False)["tokens"] for prompt in PROMPTS}
    end = time.monotonic() + seconds

    def client(seed):
        chance, answers = random.Random(seed), 0
        while time.monotonic() < end or not answers:
            prompt = chance.choice(PROMPTS)
            if chance.random() < 0.2:
                events = pair.ours.stream("/completion", completion(text(*prompt), 200))
                list(itertools.islice(events, chance.randrange(1, 8)))
                events.close()
                continue
            answer = pair.ours.complete(text(*prompt), 24, cache_prompt=chance.random() < 0.7)
            if answer["stop_type"] != "none":
                assert answer["tokens"] == expected[prompt], prompt
                answers += 1
        return answers

    with concurrent.futures.ThreadPoolExecutor() as clients:
        answers = list(clients.map(client, range(6)))
    assert min(answers) > 0  # also where a sanitizer makes the first one come after the end
    pair.ours.wait_for_slots()
    pair.complete(text(0, 200), cache_prompt=False)


@pytest.mark.parametrize("num_prompt", [400, 20])
def test_a_client_that_breaks_off_frees_its_slot(pair, num_prompt):
    """In the middle of a prompt, and of an answer."""
    pair.ask("/slots/0?action=erase", {})
    prompt = text(4000, 4000 + num_prompt)
    for server in (pair.ours, pair.own):
        for events in range(3):
            stream = server.stream("/completion", completion(prompt, 450 - num_prompt, id_slot=0))
            assert len(list(itertools.islice(stream, events))) == events
            stream.close()
        server.wait_for_slots()
    pair.complete(prompt, id_slot=0, cache_prompt=False)
    ours = pair.ours.ask("/slots")
    assert [slot["is_processing"] for slot in ours] == [False, False]


# ---- other endpoints


def test_endpoints_about_the_server(pair):
    assert pair.ask("/health") == ({"status": "ok"}, {"status": "ok"})
    ours, own = pair.ask("/props")
    assert ours["total_slots"] == 2
    assert ours["default_generation_settings"] == own["default_generation_settings"]
    assert [slot["n_ctx"] for slot in pair.ours.ask("/slots")] == [slot["n_ctx"] for slot in pair.own.ask("/slots")]
    pair.ours.complete(text(0, 20), 4)
    metrics = pair.ours.ask("/metrics")
    counted = dict(re.findall(r"^llamacpp:(\w+) ([\d.]+)$", metrics, re.MULTILINE))
    assert int(counted["tokens_predicted_total"]) > 0
    assert float(counted["requests_processing"]) == 0


@pytest.mark.parametrize("option", ["--kvcache", "--no-kvcache"])
def test_the_server_says_which_cache_it_has(folder, hybrid, option):
    """The log has a line at the default verbosity, and the properties have its text."""
    options = (option, "--kvcache-type-k", "int8", "--ctx-size", "512", "--verbosity", "3")
    with Server(hybrid, folder / f"said{option}.log", *options) as server:
        said = re.findall(r"keys and values are in libkvcache: (.*)$", server.log(), re.MULTILINE)
        assert said == [server.ask("/props")["kvcache"]] if option == "--kvcache" else not said
        assert ("kvcache" in server.ask("/props")) == (option == "--kvcache")
        assert all(re.fullmatch(r"512 cells, 2 layers, K \(int8\), V \(f16\), .*, up to [\d.]+ MiB", it) for it in said)


def test_a_context_that_memory_cannot_hold_is_said_when_the_server_starts(folder, repository):
    """A warning says so at the default verbosity; the server starts, as memory is taken when it fills."""
    for size, is_said in (("512", False), ("2000000000", True)):
        options = ("--kvcache", "--parallel", "2", "--ctx-size", size, "--verbosity", "3")
        with Server(repository, folder / f"memory-{size}.log", *options) as server:
            said = re.search(r" keys and values may take ([\d.]+) MiB as they come, but ([\d.]+) MiB", server.log())
            assert bool(said) == is_said
            assert not said or float(said[1]) > float(said[2]) > 0


def test_refused_memory_frees_slots_and_is_said_to_the_client(folder):
    """A server that may take 8 MiB more has no room for 1,000 tokens of 128 KiB beside 1,000 others."""
    sizes = {"num_layers": 2, "num_heads": 32, "num_kv_heads": 32, "head_dim": 256}
    model = llama_models.write_small(folder / "wide.gguf", architecture="llama", **sizes)
    options = ("--kv-unified", "--parallel", "2", "--ctx-size", "2048", "--cache-ram", "0")
    types = ("--cache-type-k", "f32", "--cache-type-v", "f32")
    with Pair(model, folder, *options, *types) as pair:
        pair.complete(text(0, 1000), 4, id_slot=0)
        status = Path(f"/proc/{pair.ours.process.pid}/status").read_text()
        most = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) * 1024 + (8 << 20)
        resource.prlimit(pair.ours.process.pid, resource.RLIMIT_AS, (most, most))
        pair.complete(text(1000, 2000), 4, id_slot=1)
        assert "purging slot 0" in pair.ours.log()
        request = completion(text(0, 2000), 4, id_slot=0)
        assert "libkvcache: out of memory" in pair.ours.ask("/completion", request, status=500)["error"]["message"]
        pair.complete(text(0, 1000), 4, cache_prompt=False)


def test_the_web_page(pair):
    """build.sh leaves the page out, and the server says so then; it is the same with either cache."""
    pages = []
    for server in (pair.ours, pair.own):
        connection, response = server.connect("GET", "/")
        pages.append((response.status, response.read()))
        connection.close()
    assert pages[0] == pages[1]
    assert pages[0][0] in (200, 404)


def test_embeddings(folder, repository):
    """With a context for each slot, llama.cpp's own cache cuts two inputs in pieces, and pools the last piece alone."""
    texts = [text(0, 300), text(700, 720)]
    options = ("--embeddings", "--pooling", "mean", "--ctx-size", "1024", "--parallel", "2")
    with Pair(repository, folder, *options, "--kv-unified") as pair:
        for ours, own in zip(*(answer["data"] for answer in pair.ask("/v1/embeddings", {"input": texts})), strict=True):
            assert len(ours["embedding"]) == 256
            assert ours["embedding"] == pytest.approx(own["embedding"], abs=1e-4)
    with Pair(repository, folder, *options, "--no-kv-unified") as pair:
        both = [answer["embedding"] for answer in pair.ours.ask("/v1/embeddings", {"input": texts})["data"]]
        for content, vector in zip(texts, both, strict=True):
            for (answer,) in pair.ask("/embedding", {"content": content}):
                assert answer["embedding"][0] == pytest.approx(vector, abs=1e-4)


# ---- options


def test_context_shift(folder, repository):
    """An answer three times as long as the context, with the beginning of the prompt kept; then a longer answer.

    In f32: in f16 llama.cpp's own cache rounds the keys that it moves, and this one leaves them as they are.
    """
    types = ("--cache-type-k", "f32", "--cache-type-v", "f32")
    with Pair(repository, folder, "-c", "256", "-np", "1", "--context-shift", "--keep", "20", *types) as pair:
        answer = pair.complete(text(0, 100), 700)
        assert answer["tokens_predicted"] == 700
        assert answer["truncated"]
        assert "context shift" in pair.ours.log()
        pair.complete(text(0, 100) + "KING HENRY:", 300)


def test_cache_reuse(folder, repository):
    """A prompt with a piece cut out of its middle keeps what follows the cut."""
    with Pair(repository, folder, "--ctx-size", "1024", "--parallel", "1", "--cache-reuse", "32") as pair:
        pair.complete(text(0, 600), 1)
        answer = pair.complete(text(0, 200) + text(300, 600), 64)
        assert timings(answer) == (499, 1)
        answer = pair.complete(text(0, 100) + text(400, 600) + "\nKING HENRY:\n", 64)
        assert timings(answer) == (300, 13)


def test_prompts_that_left_their_slot_come_back_from_memory(folder, repository):
    """Three conversations fight for two slots; each finds its rows again."""
    with Pair(repository, folder, *TWO_SLOTS, "--cache-ram", "64") as pair:
        prompts = [text(begin, begin + 300) for begin in (0, 3000, 6000)]
        answers = ["", "", ""]
        for turn in range(4):
            for i, prompt in enumerate(prompts):
                answer = pair.complete(prompt + answers[i], 16)
                if turn:
                    assert timings(answer)[0] >= 300, (turn, i)
                answers[i] += answer["content"]
        assert "prompt cache" in pair.ours.log()
        alone = pair.complete(prompts[0], len(answers[0]), cache_prompt=False)
        assert alone["content"] == answers[0]


def test_a_restored_slot_goes_back_behind_its_window(folder, windows):
    """A file has a window's rows alone: with --swa-full, too, the prompt is evaluated anew if it needs those before."""
    options = ("--ctx-size", "1024", "--parallel", "1", "--swa-full", "--slot-save-path", folder)
    with Server(windows, folder / "back.log", "--kvcache", *options) as server:
        server.complete(text(0, 700), 1)
        server.ask("/slots/0?action=save", {"filename": "back.bin"})
        server.ask("/slots/0?action=restore", {"filename": "back.bin"})
        back = server.complete(text(0, 660) + "KING HENRY:", 1, **NEXT_TOKEN)
        anew = server.complete(text(0, 660) + "KING HENRY:", 1, **NEXT_TOKEN, cache_prompt=False)
        expect_same_probabilities(back, anew)


def test_rows_are_selected_beside_layers_whose_tokens_choose_them(folder):
    """Layers with an indexer have no sketches: one layer of four selects."""
    model = llama_models.write_sparse(folder, "minimax-m3", "-d", "0.5")
    sizes = {"leading_dense_block_count": 3, "context_length": 16384}
    model = llama_models.write_layers(folder / "beside.gguf", model, [0, 0, 0, 1], **sizes)
    tokens = random.Random(0).choices(range(2, 100), k=8300)
    with Server(model, folder / "beside.log", "--kvcache", "--parallel", "1") as all_rows:
        expected = [all_rows.complete(tokens[:num_tokens], 3, n_probs=20) for num_tokens in (300, 8300)]
    with Server(model, folder / "beside.log", "--kvcache", "--parallel", "1", "--kvcache-select", "64") as server:
        assert "selects 64 rows in 1 of 4 layers" in server.log()
        found = [server.complete(tokens[:num_tokens], 3, n_probs=20) for num_tokens in (300, 8300)]
    assert part_of_cache(found[0]) == part_of_cache(expected[0])
    assert found[1]["completion_probabilities"][0] == expected[1]["completion_probabilities"][0]
    assert found[1]["completion_probabilities"][1] != expected[1]["completion_probabilities"][1]
