"""Soak a server for some seconds; with --full for an hour, after which its memory is judged, too."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from soak.soak import TOLERANCE, VOCAB, Fed, Plain, largest_difference, the_model

PROGRAM = Path(__file__).with_name("soak.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("seconds", [5, pytest.param(3600, marks=pytest.mark.full)])
def test_soak(seconds, tmp_path):
    seen, picture = tmp_path / "soak.json", tmp_path / "soak.svg"
    command = [sys.executable, PROGRAM, "--seconds", seconds, "--period", seconds / 60]
    done = subprocess.run(
        [*map(str, command), "--json", str(seen), "--output", str(picture)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert json.loads(seen.read_text())["minutes"][-1]["counts"]["requests"] > 0
    assert picture.stat().st_size > 0
    assert seconds < 3600 or "memory held" in done.stdout, done.stdout


def test_a_wrong_answer_is_found():
    """A single other token changes an answer by far more than the tolerance, wherever it stands."""
    tokens = np.random.default_rng(0).integers(VOCAB, size=200).tolist()
    logits = Plain(the_model()).feed(tokens, 0)
    assert largest_difference([Fed(0, tokens, dict(enumerate(logits)))]) < TOLERANCE / 10
    for i in range(0, 200, 40):
        other = [*tokens[:i], (tokens[i] + 1) % VOCAB, *tokens[i + 1 :]]
        assert largest_difference([Fed(0, other, {199: logits[199]})]) > 10 * TOLERANCE
