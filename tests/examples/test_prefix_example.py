"""examples/prefix.py: the second and third reply find the scene, and are those of a model that computes it."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvcache.runner import Llama

SCRIPT = Path(__file__).parents[2] / "examples" / "prefix.py"
LINE = r"\((\d+) of (\d+) tokens were there, the rest took \d+ ms\)"


def test_the_scene_is_found():
    output = subprocess.run([sys.executable, SCRIPT], capture_output=True, encoding="utf-8", check=True).stdout
    found = [(int(matched), int(length)) for matched, length in re.findall(LINE, output)]
    example = runpy.run_path(str(SCRIPT))
    scene = len(example["SCENE"])
    assert [length for _, length in found] == [scene + len(speaker) for speaker in example["SPEAKERS"]]
    assert found[0][0] == 0
    assert all(scene - 16 < matched < length for matched, length in found[1:])


def test_replies_are_those_of_an_empty_cache():
    example = runpy.run_path(str(SCRIPT))
    model = Llama.load(example["MODEL"])
    kept = example["new_prefix_cache"](model)
    for speaker in example["SPEAKERS"]:
        prompt = example["SCENE"] + speaker
        texts = [example["reply"](model, prefix, prompt)[0] for prefix in (kept, example["new_prefix_cache"](model))]
        assert texts[0] == texts[1]
    assert kept.stats.hits == 2
    assert kept.cache.sequences == []  # each was released
    logits = [model.forward(list(prompt), kept.cache, seq_id=seq_id) for seq_id in (3, 4)]
    np.testing.assert_array_equal(*logits)
    assert kept.cache.sequences == [3, 4]
