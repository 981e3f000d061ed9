"""examples/prefix.c: prompts find what they begin with, a request waits for room, and replies are those of it alone."""

import re
import runpy

import pytest
from support.compiling import ROOT, runner_of

SCENE, SPEAKERS = (runpy.run_path(str(ROOT / "examples/prefix.py"))[name] for name in ("SCENE", "SPEAKERS"))
SCENE, SPEAKERS = SCENE.decode(), [speaker.decode() for speaker in SPEAKERS]
REPLY = 60


@pytest.fixture(scope="module")
def serve(build):
    """Return a function that runs the program with some arguments."""
    sources = [ROOT / "examples" / name for name in ("prefix.c", "c/model.c", "c/pool.c")]
    return runner_of(build(*sources, flags=["-O2"]), cwd=ROOT)  # as examples/README.md says


def replies_of(done):
    """Return each request's reply, and, in order, the request, tokens found and tokens of each acquired sequence."""
    assert (done.returncode, done.stderr) == (0, "")
    found = re.findall(r"^request (\d+): (\d+) of (\d+) tokens are there$", done.stdout, re.M)
    replies = re.findall(rf"^request (\d+): ((?:.|\n){{{REPLY}}})$", done.stdout, re.M)
    return {int(number): reply for number, reply in replies}, [tuple(map(int, line)) for line in found]


def test_each_prompt_finds_the_scene_and_one_waits_for_room(serve):
    done = serve()
    replies, found = replies_of(done)
    scene, lengths = len(SCENE), [len(SCENE + speaker) for speaker in SPEAKERS]
    assert sorted(replies) == [1, 2, 3]
    assert found[:4] == [(0, 0, scene), *((i, scene, length) for i, length in enumerate(lengths, 1))]
    assert done.stdout.count("waits for room") == 1
    ((number, matched, length),) = found[4:]
    assert f"request {number}: waits for room" in done.stdout
    assert scene <= matched < length < lengths[number - 1] + REPLY
    for each in (number, number % 3 + 1):  # the one that waited, and one that did not
        alone, found = replies_of(serve("", SCENE + SPEAKERS[each - 1]))
        assert found == [(1, 0, lengths[each - 1])]
        assert alone == {1: replies[each]}


@pytest.mark.full  # the program does what it does above; tests/world finds what was generated
def test_what_was_generated_is_found(serve):
    """The second request begins with what the first one was answered, as a conversation does."""
    (first,) = replies_of(serve(SCENE, SPEAKERS[0]))[0].values()
    turn = SPEAKERS[0] + first
    replies, found = replies_of(serve(SCENE + turn, SPEAKERS[1]))
    assert found == [(0, 0, len(SCENE + turn)), (1, len(SCENE + turn), len(SCENE + turn + SPEAKERS[1]))]
    assert replies == replies_of(serve("", SCENE + turn + SPEAKERS[1]))[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a"], "give what the prompts begin with, then 1 to 16 of them, or nothing"),
        (["a", *"b" * 17], "give what the prompts begin with, then 1 to 16 of them, or nothing"),
        (["", ""], "num_tokens is 0: a prompt has at least one token"),
        (["a" * 400, "b"], "of capacity 368 are in use"),
        (["a", "b" * 350], "of capacity 368 are in use"),
    ],
    ids=["no prompt", "too many", "empty", "long beginning", "long reply"],
)
def test_what_cannot_be_served(serve, arguments, sentence):
    done = serve(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("prefix: ")
    assert sentence in done.stderr
