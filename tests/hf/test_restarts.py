"""Prompts of models with recurrent layers in one process after another, with a store between them."""

import copy
import signal
import subprocess
import sys

import pytest

import kvcache

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hf_pairs import HYBRID, feeding, model_of, prefix_for, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

BLOCK = 16
FEW = ["lfm2", "qwen3_next"]
# Jamba takes no prefix cache. How much is fed does not depend on the kind of state.
SERVED = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRID if name not in (*FEW, "jamba"))]
APART = {"zamba2"}  # whose step and scan of several tokens differ by a thousandth


class Process:
    """What a process has: a model, and a prefix cache whose memory is empty, over a store that others have, too."""

    def __init__(self, name, store, block_size=BLOCK):
        self.model = model_of(name)
        self.model.set_attn_implementation("kvcache")
        state_bytes = HFCache.state_bytes(self.model)
        self.prefix = prefix_for(self.model, block_size, state_bytes=state_bytes, store=store, timeout=60)

    def generate(self, tokens, mask=None, num_new=8, **options):
        """Return what is generated, and the tokens of a row that were fed before the first new one."""
        options = {"cache_implementation": "kvcache", "cache_config": {"prefix": self.prefix}} | options
        mask = torch.ones_like(tokens) if mask is None else mask
        with feeding(self.model) as fed:
            text = self.model.generate(
                tokens, attention_mask=mask, do_sample=False, max_new_tokens=num_new, pad_token_id=0, **options
            )
        assert self.prefix.flush(30)
        return text, sum(fed) - num_new + 1

    def wanted(self, tokens, mask=None, num_new=8):
        """Return what is generated without a prefix cache."""
        return self.generate(tokens, mask, num_new, cache_config={"dtype": "f32"})[0]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("length", "again"), [(77, 13), (64, 16), (65, 1), (15, 15), (17, 1)])
def test_the_same_prompt(name, length, again):
    """What follows its last full block is fed, as by models without recurrent layers."""
    store, tokens = {}, random_tokens(1, length)
    for wanted_fed in (length, again, again):
        process = Process(name, store)
        got, fed = process.generate(tokens)
        assert fed == wanted_fed
        assert torch.equal(got, process.wanted(tokens)) or name in APART


@pytest.mark.parametrize("name", SERVED)
def test_other_questions_behind_the_same_beginning(name):
    """The second question leaves a state at the last full block of what both begin with; others resume there."""
    process, store, system = None, {}, random_tokens(1, 70)
    for seed, (is_new, wanted_fed) in enumerate([(True, 90), (False, 90), (False, 26), (True, 26)]):
        tokens = torch.cat([system, random_tokens(1, 20, seed=20 + seed)], 1)
        process = Process(name, store) if is_new else process
        got, fed = process.generate(tokens)
        assert fed == wanted_fed
        assert torch.equal(got, process.wanted(tokens)) or name in APART


def test_the_prompts_of_the_issue():
    """With blocks of 64 tokens, and pieces of 2,048."""
    store = {}
    for length, again in ((317, 61), (1900, 44), (5892, 4)):
        tokens = random_tokens(1, length, seed=length)
        for wanted_fed in (length, again):
            process = Process("lfm2", store, block_size=64)
            got, fed = process.generate(tokens)
            assert fed == wanted_fed
            assert torch.equal(got, process.wanted(tokens))


@pytest.mark.parametrize("name", SERVED)
def test_turns(name):
    """Each turn is fed from the last full block of the answer before it on, although that was generated."""
    store, text = {}, random_tokens(1, 29)
    known = 0
    for turn in range(2):
        process = Process(name, store)
        got, fed = process.generate(text, num_new=43)
        assert fed == text.shape[1] - known
        assert torch.equal(got, process.wanted(text, num_new=43)) or name in APART
        known = (got.shape[1] - 1) // BLOCK * BLOCK  # the last token was not fed
        text = torch.cat([got, random_tokens(1, 9, seed=turn)], 1)


@pytest.mark.parametrize("name", FEW)
def test_rows_of_a_batch(name):
    """Rows of different lengths resume at one column, in a full block of each."""
    tokens, mask = random_tokens(3, 77), torch.ones(3, 77, dtype=torch.long)
    for row, leading in enumerate((0, 11, 20)):  # their last full blocks end at columns 64, 75 and 68
        tokens[row, :leading] = mask[row, :leading] = 0
    store = {}
    for wanted_fed in (77, 77 - 64):
        process = Process(name, store)
        got, fed = process.generate(tokens, mask)
        assert fed == wanted_fed
        assert torch.equal(got, process.wanted(tokens, mask))


@pytest.mark.parametrize(("name", "seed"), [("lfm2", 0), ("qwen3_next", 1)])
def test_padding_where_other_rows_part(name, seed):
    """Rows part from earlier prompts at columns 16 and 17, of which a third row hides the second: none is a pass."""
    tokens, mask = random_tokens(3, 35, seed=seed), torch.ones(3, 35, dtype=torch.long)
    process = Process(name, {})
    for row in range(2):
        process.generate(torch.cat([tokens[row : row + 1, row : row + 16], random_tokens(1, 9, seed=row)], 1))
    for row, leading in ((1, 1), (2, 17)):
        mask[row, :leading] = 0
    got, _ = process.generate(tokens, mask)
    assert torch.equal(got, process.wanted(tokens, mask))
    alone = tokens[2:, 17:]
    assert torch.equal(process.generate(alone)[0], process.wanted(alone))


@pytest.mark.parametrize("name", FEW)
def test_a_hidden_last_token(name):
    """The last token of a prompt is no pass of its own where a row hides it."""
    tokens, mask = random_tokens(2, 35), torch.ones(2, 35, dtype=torch.long)
    mask[1, -1] = 0
    process = Process(name, None)
    assert torch.equal(process.generate(tokens, mask)[0], process.wanted(tokens, mask))


@pytest.mark.parametrize("name", FEW)
def test_answers_of_beams(name):
    """Their states are not kept, because rows were selected."""
    store, tokens = {}, random_tokens(1, 29)
    process = Process(name, store)
    got, _ = process.generate(tokens, num_new=43, num_beams=3)
    text = torch.cat([got, random_tokens(1, 9)], 1)
    process = Process(name, store)
    got, _ = process.generate(text)
    assert torch.equal(got, process.wanted(text))


def test_a_text_that_is_taken_back():
    """A state that waits for `release` is dropped with the tokens behind which it was."""
    store = {}
    process = Process("lfm2", store)
    cache, tokens, other = HFCache(process.model.config, prefix=process.prefix), *random_tokens(2, 40)[:, None]
    cache.acquire(tokens[:, :20])
    with torch.no_grad():
        for begin, end in ((0, 20), (20, 32), (32, 40)):  # the state at 32 is noted when the pass behind it begins
            process.model(tokens[:, begin:end], past_key_values=cache)
        cache.crop(-40)
        process.model(other, past_key_values=cache)
    cache.release(other)
    assert process.prefix.flush(30)
    text = torch.cat([other, random_tokens(1, 9, seed=2)], 1)
    process = Process("lfm2", store)
    got, fed = process.generate(text)
    assert fed == 49  # of a text that was fed in one pass there is no state in a full block
    assert torch.equal(got, process.wanted(text))


def test_states_that_wait_behind_what_is_taken_back():
    """Each row's is dropped if it is behind the row's last token, and no other row's."""
    process, tokens = Process("lfm2", {}), random_tokens(2, 40)
    mask = torch.ones_like(tokens)
    tokens[1, :5] = mask[1, :5] = 0
    cache = HFCache(process.model.config, prefix=process.prefix)
    cache.acquire(tokens[:, :20], mask[:, :20])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for begin, end in ((0, 32), (32, 37), (37, 40)):  # blocks are full at columns 32 and 37
            options = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            process.model(tokens[:, begin:end], past_key_values=cache, **options)
    prompts = cache._passes.prompts
    assert {row: length for row, (length, _) in prompts._ends_of_blocks.items()} == {0: 32, 1: 32}
    copied = copy.copy(prompts)
    prompts.crop(34)
    assert {row: length for row, (length, _) in prompts._ends_of_blocks.items()} == {0: 32}
    prompts.crop(32)
    assert {*prompts._ends_of_blocks} == {0}
    prompts.crop(31)
    assert not prompts._ends_of_blocks
    assert {*copied._ends_of_blocks} == {0, 1}  # of a copy of the cache


@pytest.mark.parametrize("name", FEW)
def test_one_state_waits_for_each_sequence(name):
    """A long answer leaves no more states than a short one: those that a later one supersedes are not kept."""
    counts = []
    for num_new in (30, 120):
        process = Process(name, {})
        process.generate(random_tokens(1, 29), num_new=num_new)
        counts.append(process.prefix.stats.checkpoints)
    assert counts == [4, 4]  # in the prompt, behind it, and in and behind the answer


KILLED = """
import os, signal, sys
import kvcache, kvcache.stores
sys.path.insert(0, {tests!r})
from hf.test_restarts import Process, random_tokens
process = Process("lfm2", kvcache.stores.open({address!r}))
process.generate(random_tokens(1, 77))
assert process.prefix.flush(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_process_that_is_killed(tmp_path, request):
    """It has replied, and its states are in the folder."""
    address = f"dir:{tmp_path}"
    program = KILLED.format(tests=str(request.config.rootpath / "tests"), address=address)
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    process, tokens = Process("lfm2", kvcache.stores.open(address)), random_tokens(1, 77)
    got, fed = process.generate(tokens)
    assert fed == 13
    assert torch.equal(got, process.wanted(tokens))
