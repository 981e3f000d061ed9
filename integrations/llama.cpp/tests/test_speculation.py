"""Test speculative decoding in llama-server: its answers are those without, and wrong guesses leave no trace."""

import concurrent.futures
import random
import re

import llama_f32_models
import pytest
from llama_models import text
from llama_server import USED, Server, expect_same_probabilities, next_token, timings

ONE_SLOT = ("--parallel", "1", "--ctx-size", "2048", "--cache-ram", "0", "--no-repack")
NGRAMS = {
    "ngram-simple": ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"),
    "ngram-map-k": ("--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8"),
    "ngram-map-k4v": ("--spec-ngram-map-k4v-size-n", "3", "--spec-ngram-map-k4v-size-m", "8"),
    "ngram-mod": ("--spec-ngram-mod-n-match", "4", "--spec-ngram-mod-n-min", "2", "--spec-ngram-mod-n-max", "8"),
    "ngram-cache": (),
}
KINDS = ("plain", "windows", "hybrid")
REFUSED = "not used: the context is a draft head's (MTP; use a draft model, -md, or no speculation)"


@pytest.fixture(scope="module")
def models(folder, repository):
    """Return a model that repeats itself, one with windows and a hybrid one."""
    windows, hybrid = llama_f32_models.write_gemma4(folder), llama_f32_models.write_qwen35(folder)
    return {"plain": repository, "windows": windows, "hybrid": hybrid}


# Answers are of three letters, so that what followed before is sometimes right, whatever the model.
LETTERS = {"logit_bias": [[ord(letter), 100] for letter in "abc"]}
# Prompts that end in such letters. The second one goes on from the first, the third goes back behind all windows.
SPELLED = "".join(random.Random(0).choices("abc", k=25)) * 8
LONG = text(0, 900) + SPELLED
PROMPTS = (LONG, LONG + "KING", text(0, 100) + SPELLED, LONG)


@pytest.fixture(scope="module", params=KINDS)
def kind(request, folder, models):
    """Return a kind of model, and a server of it without guesses."""
    with Server(models[request.param], folder / "without.log", "--kvcache", *ONE_SLOT) as server:
        yield request.param, server


def expect_answers_as_without(folder, model, without, *options, **fields):
    """Ask one prompt after the other in one slot; return how many tokens were guessed, and how many rightly."""
    counts = []
    with Server(model, folder / "with.log", "--kvcache", *ONE_SLOT, *options) as server:
        for prompt in PROMPTS:
            answer = server.complete(prompt, 40, **fields)
            assert answer["tokens"] == without.complete(prompt, 40, cache_prompt=False, **fields)["tokens"]
            counts.append([answer["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted")])
            longer = [*prompt.encode(), *answer["tokens"]]
            found = next_token(server, longer)
            assert timings(found)[0] >= len(prompt) - 4
            expect_same_probabilities(found, next_token(without, longer, cache_prompt=False), 0.03)
    return map(sum, zip(*counts, strict=True))


@pytest.mark.parametrize("method", NGRAMS)
def test_guesses_from_the_text(folder, models, kind, method):
    name, without = kind
    options = ("--spec-type", method, "--spec-draft-n-max", "8", *NGRAMS[method])
    guessed, accepted = expect_answers_as_without(folder, models[name], without, *options, **LETTERS)
    assert accepted < guessed
    assert accepted > 0 or method == "ngram-map-k4v"


@pytest.mark.parametrize("draft", KINDS)
def test_guesses_of_a_draft_model(folder, models, kind, draft):
    """A draft model of less precise rows guesses mostly right, and another one, which may not go back as far, wrong."""
    name, without = kind
    types = ("--spec-draft-type-k", "q4_0", "--spec-draft-type-v", "q4_0")
    options = ("--spec-type", "draft-simple", "--model-draft", models[draft], "--spec-draft-n-max", "5", *types)
    guessed, accepted = expect_answers_as_without(folder, models[name], without, *options)
    assert accepted < guessed
    assert accepted > 0 or name != draft


@pytest.mark.threads
def test_a_draft_model_beside_others(folder, models):
    """Two slots at once, of which one goes back behind the window of the draft model."""
    options = ("--spec-type", "draft-simple", "--model-draft", models["windows"], *ONE_SLOT)
    two = ("--parallel", "2", "--ctx-size", "4096", "--kv-unified")
    with Server(models["plain"], folder / "slots.log", "--kvcache", *options, *two) as server:
        expected = [server.complete(prompt, 24, cache_prompt=False)["tokens"] for prompt in PROMPTS]
        with concurrent.futures.ThreadPoolExecutor() as clients:
            for _ in range(3):
                answers = clients.map(lambda prompt: server.complete(prompt, 24)["tokens"], PROMPTS)
                assert list(answers) == expected


@pytest.mark.parametrize("draft", [*KINDS, "head"])
def test_a_draft_lacks_the_prefixes_that_its_model_finds(folder, models, kind, draft):
    """Slots take prompts of each other, and go back to checkpoints of which the draft has forgotten its part."""
    name, without = kind
    if draft == "head" and name != "hybrid":
        pytest.skip("the model has no head")
    guess = ("draft-mtp",) if draft == "head" else ("draft-simple", "--model-draft", models[draft])
    slots = ("--parallel", "2", "--ctx-size", "4096", "--no-repack", "--kvcache-prefix", "on")
    known = 0
    with Server(models[name], folder / "shared.log", "--kvcache", *slots, "--spec-type", *guess) as server:
        for slot, i in ((0, 0), (1, 1), (1, 2), (0, 1), (1, 0), (0, 2), (1, 1)):
            answer = server.complete(PROMPTS[i], 24, id_slot=slot)
            assert answer["tokens"] == without.complete(PROMPTS[i], 24, cache_prompt=False)["tokens"]
            assert answer["timings"]["draft_n"] > 0
            known += timings(answer)[0]
    assert known > 2 * len(LONG)


# ---- draft heads


@pytest.mark.parametrize("write", [llama_f32_models.write_glm4_moe, llama_f32_models.write_qwen35])
def test_a_head_of_the_model_guesses_on_the_own_cache(folder, write):
    """It is refused, in words and once; the model stays on this cache."""
    model = write(folder)
    with Server(model, folder / "without-head.log", "--kvcache", *ONE_SLOT) as without:
        counts = expect_answers_as_without(folder, model, without, "--spec-type", "draft-mtp")
        assert next(counts) > 0
    log = (folder / "with.log").read_text(errors="replace")
    assert log.count(REFUSED) == log.count("not used: ") == 1
    assert len(re.findall(USED, log)) == 1


def test_a_head_that_reads_the_rows_of_its_model_needs_the_own_cache(folder, models):
    """The reason is the error that ends the start."""
    head = llama_f32_models.write_gemma4_assistant(folder)
    options = (*ONE_SLOT, "--spec-type", "draft-mtp", "--model-draft", head)
    with pytest.raises(RuntimeError):
        Server(models["windows"], folder / "head.log", "--kvcache", *options)
    log = (folder / "head.log").read_text(errors="replace")
    assert "gemma4-assistant reads the rows of its model's context" in log
    assert "exiting due to model loading error" in log
    with Server(models["windows"], folder / "head.log", "--no-kvcache", *options) as server:
        assert server.complete(PROMPTS[0], 20)["timings"]["draft_n"] > 0
