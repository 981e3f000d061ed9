"""Test that hybrid models find the beginnings of prompts where a recurrent state was kept, also after a restart."""

import pytest
from llama_models import text
from llama_server import NEXT_TOKEN, NO_AMX, ON, THREE_SLOTS, Server, expect_same_probabilities, in_folder, timings

pytestmark = pytest.mark.threads  # those of stores


def tokens_of(begin, end):
    return list(text(begin, end).encode())


def expect_next_as_without(server, prompt, slot):
    """Expect the next token of a prompt that is computed anew, and return how many tokens were known without."""
    found = server.complete(prompt, 1, id_slot=slot, **NEXT_TOKEN)
    anew = server.complete(prompt, 1, id_slot=2, cache_prompt=False, **NEXT_TOKEN)
    expect_same_probabilities(found, anew, 0.01)
    return timings(found)[0]


@pytest.mark.parametrize("unified", ["--no-kv-unified", "--kv-unified"])
def test_a_hybrid_model(folder, hybrid, unified):
    """The same prompt, the next turn and a similar prompt find the last state; equal batches give equal tokens."""
    with Server(hybrid, folder / f"hybrid{unified}.log", *ON, *THREE_SLOTS, unified) as server:
        prompt = tokens_of(0, 800)
        first = server.complete(prompt, id_slot=0)
        assert timings(first) == (0, 800)
        again = server.complete(prompt, id_slot=1)
        assert timings(again) == (796, 4)
        assert again["tokens"] == first["tokens"]
        said = prompt + first["tokens"][:31]
        assert expect_next_as_without(server, [*said, *tokens_of(900, 950)], 0) == 831
        assert expect_next_as_without(server, [*prompt[:740], *tokens_of(900, 950)], 1) == 800 - 68
        assert expect_next_as_without(server, [*prompt[:400], *tokens_of(900, 950)], 0) == 881 - 516
        assert expect_next_as_without(server, [*prompt[:200], *tokens_of(900, 950)], 1) == 0


CHAT = ("--chat-template", "chatml")
SYSTEM = {"role": "system", "content": text(0, 400)}  # 430 tokens in a prompt


def asks(content):
    return {"role": "user", "content": content}


def chat(server, messages, slot=0):
    """Return the message that answers, and how many tokens of the prompt were known."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "id_slot": slot}
    answer = server.ask("/v1/chat/completions", body)
    return answer["choices"][0]["message"], timings(answer)[0]


def test_a_hybrid_model_in_a_conversation(folder, hybrid):
    """Conversations share a system prompt, and each turn finds the one before."""
    with Server(hybrid, folder / "conversation.log", *ON, *THREE_SLOTS, *CHAT) as server:
        first = [SYSTEM, asks(text(1000, 1100))]
        said, known = chat(server, first, 0)
        assert known == 0
        assert chat(server, [SYSTEM, asks(text(2000, 2100))], 1)[1] == 430
        assert chat(server, [*first, said, asks(text(3000, 3050))], 2)[1] >= 500


# ---- stores


def test_a_folder_serves_a_hybrid_model(folder, hybrid):
    options = in_folder(folder / "states")
    long, short = tokens_of(0, 700), tokens_of(2000, 2300)
    with Server(hybrid, folder / "states-before.log", *options) as server:
        first = server.complete(long, 64, id_slot=0)
        server.complete(short, 1, id_slot=1)
    with Server(hybrid, folder / "states-after.log", *options) as server:
        found = server.complete(long, 64, id_slot=1)
        assert timings(found) == (700 - 68, 68)
        assert found["tokens"] == first["tokens"]
        assert expect_next_as_without(server, short, 1) == 300 - 68


TURN = [asks(text(3000, 3050)), {"role": "assistant", "content": text(4000, 4050)}]


@pytest.mark.parametrize("size", [20, 100, 350], ids="question of {}".format)
@pytest.mark.parametrize("turns", [[], TURN], ids=["first turn", "second turn"])
def test_a_system_prompt_of_a_hybrid_model_survives_restarts(folder, hybrid, size, turns):
    """Whatever the user says, and also if the first chat has earlier turns, all of its full blocks are found."""
    options = (*in_folder(folder / f"system-{size}-{len(turns)}"), *CHAT)
    with Server(hybrid, folder / "system-before.log", *options) as server:
        assert chat(server, [SYSTEM, *turns, asks(text(1000, 1000 + size))])[1] == 0
    for begin in (5000, 6000):
        with Server(hybrid, folder / "system-after.log", *options) as server:
            assert chat(server, [SYSTEM, asks(text(begin, begin + size))])[1] == 384


@pytest.mark.parametrize("guesses", ["", "draft-simple", "ngram-simple"], ids="guesses {}".format)
def test_a_conversation_with_a_hybrid_model_survives_restarts(folder, hybrid, guesses):
    """A turn goes on behind the last full block of the answer before, whose last token was not fed.

    Guesses end with a block, at the latest, so that a state is taken there.
    """
    speculation = ("--spec-type", guesses, "--model-draft", hybrid, "--spec-draft-n-max", "5") if guesses else ()
    exact = (NO_AMX, "-ctk", "f32", "-ctv", "f32")
    prompt, options = tokens_of(0, 317), (*in_folder(folder / f"turns-{guesses}"), *exact, *speculation)
    for turn, known in enumerate((0, 448, 640, 832)):
        with Server(hybrid, folder / f"turn-{turn}.log", *options) as server:
            assert expect_next_as_without(server, prompt, 0) == known
            prompt += server.complete(prompt, 150, id_slot=0)["tokens"] + tokens_of(1000 * turn, 1000 * turn + 40)
