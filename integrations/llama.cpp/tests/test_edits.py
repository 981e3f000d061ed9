"""Test llama-server on edited prompts: it answers as a server that has seen no prompt before.

How many tokens are computed depends on what llama-server can go back to, and is the same with either cache.
"""

import math
import random

import llama_f32_models
import llama_models
import pytest
from llama_models import text
from llama_server import (
    NEXT_TOKEN,
    Pair,
    Server,
    completion,
    expect_same_probabilities,
    next_token,
    probabilities,
    timings,
)

ONE_SLOT = ("--parallel", "1", "--ctx-size", "4096", "--cache-ram", "0", "--no-repack")
SMALL_BATCHES = ("--batch-size", "64", "--ubatch-size", "64")
ROUNDING = 0.002  # of the same rows in other batches


@pytest.fixture(scope="module")
def windows(folder):
    return llama_f32_models.write_gemma4(folder)


# ---- chats

SYSTEM, FIRST = ("system", 0, 300), ("user", 1000, 1300)
CHAT = [SYSTEM, FIRST, ("assistant", 2000, 2400), ("user", 3000, 3250), ("assistant", 4000, 4300), ("user", 5000, 5200)]
EDITS = {
    "the next turn": [*CHAT, ("assistant", 6000, 6100), ("user", 7000, 7100)],
    "another last message": [*CHAT[:-1], ("user", 5000, 5100)],
    "the last answer cut": [*CHAT[:-2], ("assistant", 4000, 4150), CHAT[-1]],
    "the last answer anew": CHAT[:-2],
    "an edited message": [SYSTEM, ("user", 1000, 1200), *CHAT[2:]],
    "another system prompt": [("system", 100, 400), *CHAT[1:]],
}
FROM_PREFIX, NOTHING = (1952, 1819, 1541, 1390, 547, 19), (0,) * 6  # tokens that are known


def reply(server, messages, num_tokens=8, **fields):
    """Return the likelihoods at each place of an answer of that many "a", and how many tokens were there."""
    said = [{"role": role, "content": text(begin, end)} for role, begin, end in messages]
    request = {"messages": said, "max_tokens": num_tokens, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    answer = server.ask("/v1/chat/completions", request | {"logit_bias": NEXT_TOKEN["logit_bias"]} | fields)
    places = answer["choices"][0]["logprobs"]["content"]
    assert len(places) == num_tokens
    return [{entry["id"]: entry["logprob"] for entry in place["top_logprobs"]} for place in places], timings(answer)


def farthest(some, others):
    """Return by how much the likelihoods of two answers differ at most, infinity if they have no likely token alike."""
    return max(
        max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=math.inf)
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "options", "known"),
    [
        ("windows", ("--swa-full",), FROM_PREFIX),
        ("windows", (), (1952, 1702, 1091, 1091, 330, 0)),
        ("windows", ("--ctx-checkpoints", "0"), (1952, 1819, 0, 0, 0, 0)),
        ("hybrid", (), (1948, 1702, 1091, 1091, 330, 0)),
        ("hybrid", ("--ctx-checkpoints", "0"), NOTHING),
    ],
    ids=["windows, --swa-full", "windows", "windows, no checkpoints", "hybrid", "hybrid, no checkpoints"],
)
def test_an_edited_chat(folder, windows, kind, options, known):
    """It goes on from the common beginning, or from the last checkpoint in it."""
    model = windows if kind == "windows" else llama_f32_models.write_qwen35(folder)
    more = ("--chat-template", "chatml", "--checkpoint-min-step", "64", *ONE_SLOT, *SMALL_BATCHES, *options)
    with Pair(model, folder, *more) as pair, Server(model, folder / "anew.log", "--kvcache", *more) as anew:
        before, _ = reply(anew, CHAT, cache_prompt=False)
        for (name, messages), num_known in zip(EDITS.items(), known, strict=True):
            for server in (pair.ours, pair.own):
                reply(server, CHAT)
            (ours, counts), own = (reply(server, messages) for server in (pair.ours, pair.own))
            expected, (_, num_tokens) = reply(anew, messages, cache_prompt=False)
            assert counts == own[1] == (num_known, num_tokens - num_known), name
            assert farthest(ours, expected) < ROUNDING, name
            assert farthest(ours, own[0]) < 0.05, name
            assert farthest(expected, before) > 0.08, name


COMMON, OTHERS = text(0, 196), text(3000, 3300)
RETURNS = {
    "to where another checkpoint was restored": (
        (text(0, 200), OTHERS, COMMON + text(1000, 1030), OTHERS + "x", COMMON + text(1000, 1005) + text(2000, 2030)),
        (0, 0, 196, 296, 196),
    ),
    "behind a checkpoint whose last token is another one": (
        (text(0, 200), COMMON[:-1] + text(1000, 1600), COMMON[:-1] + text(1000, 1010) + text(2000, 2030)),
        (0, 195, 136),
    ),
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_prompt_goes_back_to_a_checkpoint(folder, windows, name):
    """It goes on at the end of the checkpoint, which may have a row less than the token before its end would see."""
    options = ("--parallel", "1", "--ctx-size", "4096", "--no-repack", *SMALL_BATCHES)
    with Pair(windows, folder, *options) as pair:
        for prompt, num_known in zip(*RETURNS[name], strict=True):
            ours, own = (next_token(server, prompt) for server in (pair.ours, pair.own))
            assert timings(ours) == timings(own) == (num_known, len(prompt) - num_known)
            expect_same_probabilities(ours, own, 0.05)
        expect_same_probabilities(ours, next_token(pair.ours, prompt, cache_prompt=False), ROUNDING)


# ---- hybrid models


def tokens(seed, num_tokens):
    chance = random.Random(seed)
    return [chance.randrange(2, 100) for _ in range(num_tokens)]


def answer_of_tokens(server, prompt, num_tokens=1, **fields):
    """Complete tokens of a model without a vocabulary."""
    return server.ask("/completion", completion(prompt, num_tokens, n_probs=20, **fields))


FIRST_PROMPT, OTHER = tokens(0, 600), tokens(1, 100)


@pytest.mark.parametrize(
    ("options", "known"), [((), (619, 596, 536, 0)), (("--ctx-checkpoints", "0"), (619, 0, 0, 0))], ids=["", "without"]
)
@pytest.mark.parametrize("architecture", ["granitehybrid", "falcon-h1"])
def test_an_edited_prompt_of_a_hybrid_model(folder, architecture, options, known):
    """A state cannot go back: the prompt goes on from the end, from a checkpoint, or is computed anew."""
    model = llama_models.write_random(folder, architecture, "-d", "0.5")
    length = ("--override-kv", f"{architecture}.context_length=int:4096")
    more = ("--checkpoint-min-step", "64", *ONE_SLOT, *SMALL_BATCHES, *length, *options)
    with Pair(model, folder, *more) as pair, Server(model, folder / "anew.log", "--kvcache", *more) as anew:
        said = answer_of_tokens(anew, FIRST_PROMPT, 20, cache_prompt=False)["tokens"]
        before = probabilities(answer_of_tokens(anew, FIRST_PROMPT, cache_prompt=False))
        edited = (
            [*FIRST_PROMPT, *said, *OTHER],
            [*FIRST_PROMPT, *said[:10], *OTHER],
            [*FIRST_PROMPT[:590], *OTHER],
            [*FIRST_PROMPT[:250], *OTHER, *FIRST_PROMPT[300:]],
        )
        for prompt, num_known in zip(edited, known, strict=True):
            for server in (pair.ours, pair.own):
                answer_of_tokens(server, FIRST_PROMPT, 20)
            ours, own = (answer_of_tokens(server, prompt) for server in (pair.ours, pair.own))
            assert timings(ours) == timings(own) == (num_known, len(prompt) - num_known)
            expected = answer_of_tokens(anew, prompt, cache_prompt=False)
            expect_same_probabilities(ours, expected, ROUNDING)
            assert farthest([probabilities(expected)], [before]) > 0.1


# ---- --cache-reuse

CUT = text(0, 200) + text(300, 900)
REUSED = {
    "a piece cut out": (CUT + "KING", (800, 4)),
    "and another": (text(0, 200) + text(300, 500) + text(600, 900) + "KING", (700, 4)),
    "a piece replaced": (text(0, 200) + text(2000, 2050) + text(300, 900) + "KING", None),
    "another end": (text(0, 200) + text(300, 700) + text(3000, 3100), (600, 100)),
}


def test_reused_pieces_of_a_model_with_windows(folder, windows):
    """With --swa-full; windows that drop rows refuse."""
    reuse = ("--cache-reuse", "32", *ONE_SLOT)
    with Pair(windows, folder, *reuse, "--swa-full") as pair:
        for name, (prompt, counts) in REUSED.items():
            for server in (pair.ours, pair.own):
                next_token(server, text(0, 900))
            ours, own = (next_token(server, prompt) for server in (pair.ours, pair.own))
            assert timings(ours) == timings(own) == (counts or timings(own)), name
            expect_same_probabilities(ours, own, 0.05)
    with Server(windows, folder / "refused.log", "--kvcache", *reuse) as server:
        assert "cache_reuse is not supported by this context" in server.log()
        for prompt, _ in REUSED.values():
            next_token(server, text(0, 900))
            found = next_token(server, prompt)
            assert timings(found)[0] <= 200
            expect_same_probabilities(found, next_token(server, prompt, cache_prompt=False), ROUNDING)


@pytest.mark.parametrize("architecture", ["falcon-h1", "granitehybrid"])
def test_reused_pieces_of_a_hybrid_model(folder, architecture):
    """They do not go with a state that was kept among tokens that have moved."""
    model = llama_models.write_random(folder, architecture, "-d", "0.5")
    length = ("--override-kv", f"{architecture}.context_length=int:4096")
    more = ("--cache-reuse", "32", "--checkpoint-min-step", "64", *ONE_SLOT, *SMALL_BATCHES, *length)
    with Pair(model, folder, *more) as pair:
        for server in (pair.ours, pair.own):
            answer_of_tokens(server, FIRST_PROMPT, 20)
            prompt = [*FIRST_PROMPT[:250], *FIRST_PROMPT[300:], *OTHER]
            found = answer_of_tokens(server, prompt)
            assert timings(found) == (0, 650)
            expected = answer_of_tokens(server, prompt, cache_prompt=False)
            expect_same_probabilities(found, expected, ROUNDING)


def test_pieces_are_not_reused_where_positions_have_two_dimensions(folder):
    model = llama_f32_models.write_qwen35(folder)
    with Server(model, folder / "refused-2d.log", "--kvcache", "--cache-reuse", "32", *ONE_SLOT) as server:
        assert "cache_reuse is not supported by this context" in server.log()
        next_token(server, text(0, 900))
        found = next_token(server, CUT)
        expect_same_probabilities(found, next_token(server, CUT, cache_prompt=False), ROUNDING)
