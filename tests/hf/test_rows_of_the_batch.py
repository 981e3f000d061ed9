"""Edits of a batch's rows: an impossible edit changes nothing, and says what would do."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hf_pairs import model_of, models_with_states, passes, random_tokens  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

NEEDED = "batch indices are needed, a tensor or a list of integers"
REFUSED = {
    "reorder: too large": ("reorder_cache", torch.tensor([0, 0, 5]), IndexError, "beam_idx has 5: the rows of"),
    "reorder: negative": ("reorder_cache", torch.tensor([0, -1]), IndexError, "beam_idx has -1: .* are 0 to 1"),
    "reorder: no integers": ("reorder_cache", torch.tensor([0.0, 1.0]), TypeError, f"beam_idx=tensor.*: {NEEDED}"),
    "reorder: text": ("reorder_cache", "01", TypeError, f"beam_idx='01': {NEEDED}"),
    "reorder: two axes": ("reorder_cache", torch.tensor([[0, 1]]), TypeError, NEEDED),
    "select: too large": ("batch_select_indices", [0, 0, 2], IndexError, "indices has 2"),
    "select: None": ("batch_select_indices", None, TypeError, f"indices=None: {NEEDED}"),
    "select: another mask": ("batch_select_indices", torch.tensor([True] * 3), TypeError, NEEDED),
    "repeat: negative": ("batch_repeat_interleave", -1, ValueError, "repeats=-1: must be at least 0"),
    "repeat: text": ("batch_repeat_interleave", "2", TypeError, "repeats='2': an integer is needed, not str"),
    "crop: text": ("crop", "3", TypeError, "tokens_to_remove='3': an integer is needed, not str"),
    "crop: None": ("crop", None, TypeError, "tokens_to_remove=None: an integer is needed, not NoneType"),
}


def logits(model, cache, tokens):
    model.set_attn_implementation("kvcache")
    with torch.no_grad():
        return next(passes(model, cache, tokens))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_changes_nothing(case):
    method, argument, error, message = REFUSED[case]
    model, tokens = model_of("llama"), random_tokens(2, 8)
    cache, untouched = HFCache(model.config), HFCache(model.config)
    for each in (cache, untouched):
        logits(model, each, tokens[:, :6])
    with pytest.raises(error, match=message):
        getattr(cache, method)(argument)
    assert cache.get_seq_length() == 6
    cache._passes.finish()
    assert cache._cache.sequences == cache._passes.seq_ids
    assert torch.equal(logits(model, cache, tokens[:, 6:]), logits(model, untouched, tokens[:, 6:]))
    cache.reset()
    assert not cache._cache.sequences


def test_a_list_of_indices():
    model, tokens = model_of("llama"), random_tokens(2, 8)
    results = []
    for order in ([1, 0, 1], torch.tensor([1, 0, 1])):
        cache = HFCache(model.config)
        logits(model, cache, tokens[:, :6])
        cache.reorder_cache(order)
        results.append(logits(model, cache, tokens[[1, 0, 1], 6:]))
    assert torch.equal(*results)


def test_a_copy_that_fails_leaves_none(monkeypatch):
    model, tokens = model_of("llama"), random_tokens(2, 8)
    cache, forked, whole = HFCache(model.config), [], kvcache.KVCache.fork
    logits(model, cache, tokens)

    def fork(self, source, seq_id, **options):
        if forked:
            raise kvcache.CacheFullError
        forked.append(seq_id)
        whole(self, source, seq_id, **options)

    monkeypatch.setattr(kvcache.KVCache, "fork", fork)
    with pytest.raises(kvcache.CacheFullError):
        cache.batch_repeat_interleave(2)
    assert forked
    assert cache._cache.sequences == cache._passes.seq_ids == [0, 1]


def test_rows_of_layers_with_a_state():
    """Their states are moved with the rows of keys and values; transformers' own caches cannot do it."""
    for model in models_with_states():
        tokens = random_tokens(3, 10)
        cache, want = HFCache(model.config, dtype="f32"), HFCache(model.config, dtype="f32")
        logits(model, cache, tokens[:, :9])
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 1, 2, 0]))
        cache.reorder_cache([0, 0, 2, 1])
        rows = [2, 2, 1, 0]
        logits(model, want, tokens[rows, :9])
        got = logits(model, cache, tokens[rows, 9:])
        torch.testing.assert_close(got, logits(model, want, tokens[rows, 9:]), rtol=0, atol=1e-4)
