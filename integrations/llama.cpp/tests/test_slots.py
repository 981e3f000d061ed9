"""Test the slots of llama-server: saved and restored, and when requests together exceed the context."""

import concurrent.futures
import itertools
import json
import random

import llama_f32_models
import llama_models
import pytest
from llama_models import text
from llama_server import Pair, Server, completion, expect_same_probabilities, next_token, timings

ROUNDING = 0.002  # of the same rows in other batches, of models in f32
OPTIONS = ("--cache-ram", "0", "--no-repack")
UNIFIED = ["--no-kv-unified", "--kv-unified"]
WRITE = {"plain": llama_f32_models.write_glm4_moe, "windows": llama_f32_models.write_gemma4,
         "hybrid": llama_f32_models.write_qwen35}  # fmt: skip


@pytest.fixture(scope="module", params=WRITE)
def kind(request, folder):
    """Return a kind of model, its path, and a server that answers without a cached prompt."""
    model = WRITE[request.param](folder)
    options = ("--parallel", "1", "--ctx-size", "4096", *OPTIONS)
    with Server(model, folder / "anew.log", "--kvcache", *options) as anew:
        yield request.param, model, anew


def ask_to(server, action, slot, name, status=200):
    """Save or restore a slot."""
    return server.ask(f"/slots/{slot}?action={action}", {"filename": name}, status=status)


def expect_next_as_anew(server, anew, prompt, **fields):
    """Expect the next token as without a cached prompt, and return how many tokens were known, and how many not."""
    found = next_token(server, prompt, **fields)
    expect_same_probabilities(found, next_token(anew, prompt, cache_prompt=False), ROUNDING)
    return timings(found)


# ---- rows that stand for several tokens


def expect_known(model, known, prefix):
    """Ask for a prompt, then for two that begin like it, and compare with the answers of an empty slot.

    `known` has how many of their tokens are known.
    """
    rng = random.Random(0)
    read, *ends = ([rng.randrange(1, 120) for _ in range(length)] for length in (900, 30, 30))
    prompts = [read, read[:850] + ends[0], read[:300] + ends[1]]
    options = ("--kvcache", "--parallel", "2", "--ctx-size", "8192", "--batch-size", "64", "--ubatch-size", "64")
    with Server(model, model.with_suffix(".log"), *options, *OPTIONS, "--kvcache-prefix", prefix) as server:
        for prompt, num_known in zip(prompts, known, strict=True):
            request = completion(prompt, 1, n_probs=20)
            found = server.ask("/completion", request | {"id_slot": 0})
            anew = server.ask("/completion", request | {"id_slot": 1, "cache_prompt": False})
            assert timings(found)[0] == num_known
            expect_same_probabilities(found, anew, ROUNDING)
            server.complete(prompt, 300, id_slot=0)  # more tokens than windows go back


@pytest.mark.parametrize("prefix", ["off", "on", "dir"])
def test_deepseek_v4_goes_back(folder, prefix):
    """It goes back to a checkpoint, or to any token that a slot has read, also after a restart."""
    model = llama_models.write_compressed(folder, "-d", "0.5")
    store = f"dir:{folder}/compressed" if prefix == "dir" else prefix
    for known in {"off": [[0, 836, 0]], "on": [[0, 850, 300]], "dir": [[0, 850, 300], [896, 850, 300]]}[prefix]:
        expect_known(model, known, store)


@pytest.mark.parametrize("name", llama_models.POOLED)
def test_models_that_pool_keys_go_back(folder, name):
    """They go back to a checkpoint, and after a restart to a state that was kept with a prompt."""
    model = llama_models.write_sparse(folder, name, "-d", "0.5", context_length=8192)
    expect_known(model, [0, 836, 0], "off")
    for known in ([0, 836, 0], [896, 836, 266]):
        expect_known(model, known, f"dir:{folder}/{name}")


# ---- saved and restored

COMMON = text(0, 600)
TWO = (COMMON + text(1000, 1100), COMMON + text(2000, 2150))


def known_after_restore(name, num_saved):
    """Return how many tokens are known if a prompt goes on where a file ends.

    With either cache llama-server wants one row more than a window has, unless it keeps all (--swa-full).
    """
    return 0 if name == "windows" else num_saved


@pytest.mark.parametrize("unified", UNIFIED)
def test_two_slots_with_a_common_prompt_change_places(folder, kind, unified):
    """They go on where they were, from files of either cache, and go back as far as their model can."""
    name, model, anew = kind
    saved = folder / f"two-{name}{unified}"
    saved.mkdir()
    options = ("--parallel", "2", "--ctx-size", "4096", "--slot-save-path", saved, unified, *OPTIONS)
    with Pair(model, folder, *options) as pair:
        both = {"ours": pair.ours, "own": pair.own}
        for cache, server in both.items():
            for slot in (0, 1):
                next_token(server, TWO[slot], id_slot=slot)
                assert ask_to(server, "save", slot, f"{cache}-{slot}.bin")["n_saved"] == len(TWO[slot])
            for slot in (0, 1):
                assert server.ask(f"/slots/{slot}?action=erase", {})["n_erased"] == len(TWO[slot])
        for cache in both:
            for slot, server in itertools.product((0, 1), both.values()):
                restored = ask_to(server, "restore", 1 - slot, f"{cache}-{slot}.bin")
                assert restored["n_restored"] == len(TWO[slot])
            for slot, prompt in enumerate(TWO):
                longer, cut = prompt + "KING", prompt[:-30] + "KING"
                num_known = known_after_restore(name, len(prompt))
                for asked, expected in ((longer, num_known), (cut, 0 if name == "hybrid" else len(cut) - 4)):
                    counts = expect_next_as_anew(pair.ours, anew, asked, id_slot=1 - slot)
                    assert counts == timings(next_token(pair.own, asked, id_slot=1 - slot))
                    assert counts[0] == expected


@pytest.mark.parametrize("unified", UNIFIED)
def test_a_restart_with_another_context(folder, kind, unified):
    """A slot is restored where it has room, and refused where it has none."""
    name, model, anew = kind
    saved = folder / f"restart-{name}{unified}"
    saved.mkdir()
    common = ("--parallel", "2", "--slot-save-path", saved, unified, *OPTIONS)
    prompt = text(0, 700)
    with Pair(model, folder, *common, "--ctx-size", "4096") as pair:
        for server, cache in ((pair.ours, "ours"), (pair.own, "own")):
            next_token(server, prompt, id_slot=0)
            ask_to(server, "save", 0, f"{cache}.bin")
    for size, status in (("8192", 200), ("2048", 200), ("512", 400)):
        with Pair(model, folder, *common, "--ctx-size", size) as pair:
            for cache in ("ours", "own"):
                ask_to(pair.ours, "restore", 1, f"{cache}.bin", status)
                ask_to(pair.own, "restore", 1, f"{cache}.bin", status)
                for slot in (0, 1):
                    expect_next_as_anew(pair.ours, anew, text(3000, 3100), id_slot=slot, cache_prompt=slot == 0)
                if status == 200:
                    ask_to(pair.ours, "restore", 1, f"{cache}.bin")
                    counts = expect_next_as_anew(pair.ours, anew, prompt + "KING", id_slot=1)
                    assert counts == timings(next_token(pair.own, prompt + "KING", id_slot=1))
                    assert counts[0] == known_after_restore(name, 700)


@pytest.mark.parametrize("architecture", ["granitehybrid", "falcon-h1", "qwen3next", "jamba"])
def test_a_hybrid_model_continues_with_the_same_bits(folder, architecture):
    """Another process restores a slot with its recurrent state, and answers as the one that saved it."""
    model = llama_models.write_random(folder, architecture, "-d", "0.5")
    saved = folder / f"bits-{architecture}"
    saved.mkdir()
    options = ("--kvcache", "--parallel", "1", "--ctx-size", "256", "--slot-save-path", saved, *OPTIONS)
    rng = random.Random(0)
    prompt, more = ([rng.randrange(1, 120) for _ in range(length)] for length in (100, 30))
    with Server(model, saved / "before.log", *options) as server:
        server.complete(prompt, 1)
        ask_to(server, "save", 0, "slot.bin")
        expected = server.complete(prompt + more, 20, n_probs=20)
    with Server(model, saved / "after.log", *options) as server:
        ask_to(server, "restore", 0, "slot.bin")
        found = server.complete(prompt + more, 20, n_probs=20)
    assert timings(found) == timings(expected) == (100, 30)
    assert found["completion_probabilities"] == expected["completion_probabilities"]


def cut(whole):
    """Yield a file that ends too early, at many places."""
    for i in range(40):
        yield whole[: len(whole) * i // 40]
    yield whole[:-8]
    yield whole[:-1]


def changed(whole, num_tokens):
    """Yield a file with another byte, at each place of its beginning and of what follows the tokens."""
    header = 4 * (3 + num_tokens)
    for i, byte in itertools.product((*range(16), *range(header, header + 120)), (0, 0x7F, 0xFF)):
        if whole[i] != byte:
            yield whole[:i] + bytes([byte]) + whole[i + 1 :]


def test_a_damaged_file_leaves_the_slot_usable(folder, kind):
    """If the file ends too early, it is refused."""
    name, model, anew = kind
    saved = folder / f"damaged-{name}"
    saved.mkdir()
    options = ("--parallel", "2", "--ctx-size", "2048", "--slot-save-path", saved, *OPTIONS)
    prompt = text(0, 700)
    with Server(model, folder / f"damaged-{name}.log", "--kvcache", *options) as server:
        next_token(server, prompt, id_slot=0)
        ask_to(server, "save", 0, "whole.bin")
        whole = (saved / "whole.bin").read_bytes()
        for content in cut(whole):
            (saved / "cut.bin").write_bytes(content)
            refused = ask_to(server, "restore", 0, "cut.bin", 400)
        assert name != "plain" or "the file ends before the state" in refused["error"]["message"]
        refused = ask_to(server, "restore", 0, "nowhere.bin", 400)
        assert "invalid slot save file" in refused["error"]["message"]
        expect_next_as_anew(server, anew, prompt, id_slot=0)
        for i, content in enumerate(changed(whole, 700)):
            (saved / "changed.bin").write_bytes(content)
            connection, response = server.connect("POST", "/slots/0?action=restore", {"filename": "changed.bin"})
            assert response.status in (200, 400), response.read()
            connection.close()
            if i % 25 == 0:
                expect_next_as_anew(server, anew, prompt + "KING", id_slot=0, cache_prompt=response.status == 400)
        ask_to(server, "restore", 0, "whole.bin")
        assert expect_next_as_anew(server, anew, prompt + "KING", id_slot=0)[0] == known_after_restore(name, 700)


# ---- four slots

FOUR = ("--parallel", "4", "--ctx-size", "1024")


@pytest.mark.parametrize("options", [OPTIONS, ("--no-repack",)], ids=["without a prompt cache", "with one"])
def test_idle_slots_make_room(folder, kind, options):
    """Four prompts in turn, which together exceed the context that the slots share."""
    _, model, anew = kind
    prompts = [text(begin, begin + 300) for begin in range(0, 8000, 2000)]
    with Pair(model, folder, *FOUR, "--kv-unified", *options) as pair:
        for turn in range(3):
            for slot, prompt in enumerate(prompts):
                asked = prompt + "KING" * turn
                counts = expect_next_as_anew(pair.ours, anew, asked, id_slot=slot)
                assert counts == timings(next_token(pair.own, asked, id_slot=slot))


def answers_at_once(server, requests):
    """Return what the server says to requests that come together: the status, and the answer."""

    def ask(request):
        connection, response = server.connect("POST", "/completion", request)
        said = json.loads(response.read())
        connection.close()
        return response.status, said

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as clients:
        return list(clients.map(ask, requests))


BEGINS = range(0, 8000, 2000)


@pytest.mark.threads
@pytest.mark.parametrize("unified", UNIFIED)
def test_requests_that_together_exceed_the_context(folder, repository, unified):
    """Each gets its answer, or the error of a full context. A prompt longer than the context is refused at once."""
    fits = 1000 if unified == "--kv-unified" else 240
    with Pair(repository, folder, *FOUR, unified, *OPTIONS) as pair:
        requests = [completion(text(begin, begin + 200), 200) for begin in BEGINS]
        expected = [pair.complete(request["prompt"], 200, cache_prompt=False) for request in requests]
        too_long = completion(text(0, 1500), 8)
        for server in (pair.ours, pair.own):
            for _ in range(2):
                answers = answers_at_once(server, [*requests, too_long])
                status, said = answers.pop()
                assert status == 400
                assert "exceeds the available context size" in said["error"]["message"]
                for (status, said), alone in zip(answers, expected, strict=True):
                    assert (status, said.get("tokens")) == (200, alone["tokens"]) or (
                        status == 500 and said["error"]["message"] == "Context size has been exceeded."
                    )
                server.wait_for_slots()
            assert ("Context size has been exceeded." in server.log()) == (unified == "--kv-unified")
        longest = pair.complete(text(0, fits), 50, cache_prompt=False)
        assert longest["truncated"]


@pytest.mark.threads
@pytest.mark.parametrize("unified", UNIFIED)
def test_a_long_request_beside_short_ones(folder, kind, unified):
    """The short ones are answered as alone, while long ones come, go on, and break off in a prompt or an answer."""
    _, model, anew = kind
    short = [text(begin, begin + 90) for begin in range(500, 8000, 900)]
    options = ("--parallel", "4", "--ctx-size", "6144", "--batch-size", "64", "--ubatch-size", "32", *OPTIONS)
    with Server(model, folder / "long.log", "--kvcache", *options, unified) as server:

        def break_off(num_events):
            for _ in range(3):
                stream = server.stream("/completion", completion(text(0, 1200), 300, id_slot=0))
                assert len(list(itertools.islice(stream, num_events))) == num_events
                stream.close()

        with concurrent.futures.ThreadPoolExecutor() as clients:
            for num_events in (0, 1, 5):
                long = clients.submit(break_off, num_events)
                answers = clients.map(lambda prompt: next_token(server, prompt), short)
                for prompt, answer in zip(short, answers, strict=True):
                    expect_same_probabilities(answer, next_token(anew, prompt, cache_prompt=False), ROUNDING)
                long.result()
        server.wait_for_slots()
        expect_next_as_anew(server, anew, text(0, 1250), id_slot=0)
