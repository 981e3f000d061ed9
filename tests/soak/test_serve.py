"""Soak `kvcache serve`, with --full: some seconds, and an hour, behind which its memory is judged."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")

from soak.serve import Oracle, Sent, make_models  # noqa: E402 - it needs those

PROGRAM = Path(__file__).with_name("serve.py")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of PEFT


@pytest.mark.full  # what it asks has shorter tests in tests/server
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("seconds", [3, 3600])
def test_soak(seconds):
    command = [sys.executable, "-W", "ignore", str(PROGRAM), "--seconds", str(seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert " greedy" in done.stdout, done.stdout
    assert seconds < 3600 or "memory beside the cache" in done.stdout, done.stdout


def test_a_wrong_answer_is_found(tmp_path):
    """Another byte, another adapter and another probability are wrong; what generate answers is right."""
    make_models(tmp_path)
    oracle, prompt = Oracle(tmp_path), "ROMEO:\nWhat say you"
    ids = oracle.tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = oracle.models["model"].generate(ids, max_new_tokens=20, do_sample=False)
    answer = oracle.tokenizer.decode(found[0, ids.shape[1] :])
    assert oracle.wrong("model", prompt, answer, [], True) is None
    assert "less likely" in oracle.wrong("sql", prompt, answer, [], True)
    for i in (0, 10, 19):
        other = answer[:i] + "#" + answer[i + 1 :]
        assert "less likely" in oracle.wrong("model", prompt, other, [], True)
        assert oracle.wrong("model", prompt, other, [], False) is None
    assert "probability" in oracle.wrong("model", prompt, answer, [1.0], False)


def test_what_a_key_knows():
    sent = Sent()
    for text in ("abc|", "abd|", "b|"):
        sent.add("one", text)
    sent.add("two", "abc|")
    assert [sent.known("one", text) for text in ("abc|", "abd|", "b|")] == [2, 2, 0]
    assert sent.known("two", "abc|") == 0
    sent.add("two", "abc|")
    sent.add("one", "abd|e|")
    assert (sent.known("two", "abc|"), sent.known("one", "abd|e|")) == (4, 6)
