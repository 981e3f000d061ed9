"""kvcache.compat.zigllama: what ZigLlama's inference.kv_cache promises, sentence by sentence."""

import math

import numpy as np
import pytest
from support.coming_from import random_rows

from kvcache.compat.zigllama import (
    CacheFull,
    CacheStrategy,
    KVCacheStats,
    KVCacheUtils,
    ModelKVCache,
    MultiSequenceKVCache,
    SlidingWindowKVCache,
)


@pytest.fixture
def model():
    return ModelKVCache(2, 2, 8, 16)


def append_everywhere(layers, tokens=1, seed=0):
    k, v = random_rows(tokens, seed=seed)
    for layer in layers:
        layer.append(k, v)
    return k, v


# --- ModelKVCache, LayerKVCache ----------------------------------------------------------------------------------


def test_memory_for_entries_is_allocated_lazily():
    cache = ModelKVCache(32, 8, 128, 2**17).cache
    assert cache.nbytes < 2**20 < cache.capacity_bytes


def test_a_layer_says_its_shape(model):
    assert [(layer.num_heads, layer.head_dim, layer.max_seq_len) for layer in model.layers] == [(2, 8, 16)] * 2


def test_append_adds_a_pair_at_the_next_position(model):
    (key,), (value,) = random_rows(1)
    model.layers[0].append(key, value)  # one token, [num_heads, head_dim]
    entry = model.layers[0].get(0)  # at once, though the other layer has none yet
    assert (entry.key.tolist(), entry.value.tolist(), entry.position) == (key.tolist(), value.tolist(), 0)
    assert model.layers[1].get(0) is None
    model.layers[1].append(key, value)
    k, v = append_everywhere(model.layers, 3, seed=1)
    for layer in model.layers:
        assert layer.sequence_length == 4
        assert layer.get(0).key.tolist() == key.tolist()
        for position in (1, 2, 3):
            entry = layer.get(position)
            assert entry.key.tolist() == k[position - 1].tolist()
            assert entry.value.tolist() == v[position - 1].tolist()


def test_a_layer_lists_its_entries(model):
    assert model.layers[0].entries == []
    k, v = append_everywhere(model.layers, 3)
    more, _ = rows = list(random_rows(1, seed=1))
    model.layers[0].append(*rows)
    assert [entry.position for entry in model.layers[0].entries] == [0, 1, 2, 3]
    assert [entry.position for entry in model.layers[1].entries] == [0, 1, 2]
    np.testing.assert_array_equal([entry.key for entry in model.layers[0].entries], [*k, *more])
    np.testing.assert_array_equal([entry.value for entry in model.layers[1].entries], v)


def test_a_window_lists_the_entries_that_are_left():
    model = ModelKVCache(1, 2, 8, None, window_size=4)
    for seed in range(10):
        append_everywhere(model.layers, seed=seed)
    assert [entry.position for entry in model.layers[0].entries] == [6, 7, 8, 9]


def test_fields_and_reprs(model):
    assert (model.num_layers, model.strategy) == (2, CacheStrategy.ALWAYS)
    append_everywhere(model.layers, 3)
    assert repr(model) == "<zigllama.ModelKVCache: 2 layers, 3 tokens>"
    assert repr(model.layers[1]) == "<zigllama.LayerKVCache 1: 3 tokens>"
    sequences = MultiSequenceKVCache(1, 2, 8, 16)
    sequences.get_or_create_sequence(7)
    assert repr(sequences) == "<zigllama.MultiSequenceKVCache: 1 sequences>"
    assert repr(SlidingWindowKVCache(1, 2, 8, 4)) == "<zigllama.SlidingWindowKVCache(4): 0 sequences>"


def test_get_returns_nothing_where_the_position_is_not_cached(model):
    assert model.layers[0].get(0) is None
    append_everywhere(model.layers, 2)
    assert [model.layers[0].get(position) is None for position in (0, 1, 2, 99)] == [False, False, True, True]
    model.layers[0].append(*random_rows(1))
    assert [model.layers[i].get(2) is None for i in range(2)] == [False, True]
    assert model.layers[0].get(3) is None


def test_clear_discards_all_entries_and_keeps_the_structure(model):
    append_everywhere(model.layers, 16)
    blocks = model.cache.stats()["blocks_opened"]
    model.clear()
    assert [layer.get(0) for layer in model.layers] == [None, None]
    append_everywhere(model.layers, 16)
    assert model.cache.stats()["blocks_opened"] == blocks


def test_clear_discards_what_was_appended_to_some_layers(model):
    model.layers[1].append(*random_rows(1))
    model.clear()
    append_everywhere(model.layers, 5)
    assert model.layers[1].sequence_length == 5


def test_compact_reclaims_memory(model):
    append_everywhere(model.layers, 16)
    taken = model.cache.nbytes
    model.clear()
    model.compact()
    assert model.cache.nbytes < taken


def test_deinit_frees_everything(model):
    append_everywhere(model.layers)
    model.layers[0].append(*random_rows(1))
    model.deinit()
    with pytest.raises(ValueError, match="closed"):
        model.layers[0].get(0)


def test_cache_full_at_max_seq_len(model):
    append_everywhere(model.layers, 15)
    with pytest.raises(CacheFull):
        model.layers[0].append(*random_rows(2))
    append_everywhere(model.layers, 1)
    with pytest.raises(CacheFull):
        model.layers[0].append(*random_rows(1))
    assert [layer.sequence_length for layer in model.layers] == [16, 16]


def test_what_does_not_fit_changes_nothing(model):
    with pytest.raises(ValueError, match="value: an array of shape"):
        model.layers[0].append(np.ones((2, 8)), np.ones((2, 7)))
    append_everywhere(model.layers, 3)
    cache = MultiSequenceKVCache(2, 2, 8, 16)
    for layer, error in ((-1, IndexError), (2, IndexError), (0, ValueError)):
        with pytest.raises(error, match=r"layer_id=|value: "):
            cache.append_to_sequence(1, layer, np.ones((2, 8)), np.ones((2, 7)))
    assert cache.sequences == {}
    with pytest.raises(TypeError, match="CacheStrategy"):
        ModelKVCache(2, 2, 8, 16, "always")


def test_layers_go_together(model):
    model.layers[0].append(*random_rows(1))
    with pytest.raises(ValueError, match="layer 0"):
        model.layers[0].append(*random_rows(1))
    model.layers[1].append(*random_rows(1))
    model.layers[0].append(*random_rows(1))


# --- strategies --------------------------------------------------------------------------------------------------


def is_stored(strategy, tokens):
    model = ModelKVCache(2, 2, 8, 1024, strategy)
    append_everywhere(model.layers, tokens)
    return model.layers[0].get(0) is not None


def test_long_sequences_only():
    assert [is_stored(CacheStrategy.LONG_SEQUENCE_ONLY, n) for n in (10, 512, 513)] == [False, False, True]


@pytest.mark.parametrize("tokens", [1, 7, 512])
def test_a_long_sequence_is_stored_though_it_grows_token_by_token(tokens):
    model = ModelKVCache(2, 2, 8, 2048, CacheStrategy.LONG_SEQUENCE_ONLY)
    k, v = random_rows(1024)
    for begin in range(0, 1024, tokens):
        end = min(begin + tokens, 1024)
        for layer in model.layers:
            layer.append(k[begin:end], v[begin:end])
            is_running = layer is model.layers[0]
            assert (layer.get(end - 1) is None) == (end <= 512 and not is_running)
        assert [layer.sequence_length for layer in model.layers] == [end if end > 512 else 0] * 2
    for layer in model.layers:
        np.testing.assert_array_equal(layer.get_range(0, 1024)[0], k)
        np.testing.assert_array_equal(layer.get_range(0, 1024)[1], v)
    model.clear()
    append_everywhere(model.layers, 500)
    assert model.layers[1].sequence_length == 0


def test_a_sequence_that_is_not_stored_has_a_limit_too():
    model = ModelKVCache(2, 2, 8, 100, CacheStrategy.LONG_SEQUENCE_ONLY)
    append_everywhere(model.layers, 100)
    with pytest.raises(CacheFull, match="max_seq_len is 100"):
        append_everywhere(model.layers)


def test_adaptive(monkeypatch):
    pytest.importorskip("psutil")
    for free, stored in ((2**30, True), (0, False)):
        monkeypatch.setattr("kvcache.system.available_memory", lambda free=free: (free, "of a test"))
        assert is_stored(CacheStrategy.ADAPTIVE, 10) is stored


def test_disabled_saves_memory():
    model = ModelKVCache(2, 2, 8, 1024, CacheStrategy.DISABLED)
    model.layers[0].append(*random_rows(100))
    assert model.layers[0].get(99) is not None  # until every layer has it
    model.layers[1].append(*random_rows(100))
    assert model.layers[0].get(99) is None
    assert model.cache.nbytes < 100 * 2 * 8 * 4  # less than the keys of one layer


# --- a range of positions ----------------------------------------------------------------------------------------


def test_get_range(model):
    k, v = append_everywhere(model.layers, 6)
    keys, values = model.layers[1].get_range(2, 3)
    np.testing.assert_array_equal(keys, k[2:5])
    np.testing.assert_array_equal(values, v[2:5])
    for start, length in ((4, 3), (-1, 2), (7, 0), (2, -1)):
        with pytest.raises(IndexError, match="holds 6 tokens"):
            model.layers[1].get_range(start, length)


def test_get_range_includes_what_was_appended_last(model):
    k, _ = append_everywhere(model.layers, 2)
    more, _ = rows = list(random_rows(1, seed=1))
    model.layers[0].append(*rows)
    np.testing.assert_array_equal(model.layers[0].get_range(0, 3)[0], np.concatenate([k, more]))
    with pytest.raises(IndexError):
        model.layers[1].get_range(0, 3)


# --- many sequences ----------------------------------------------------------------------------------------------


def test_sequences_are_independent_in_any_order():
    cache = MultiSequenceKVCache(2, 2, 8, 16)
    rows = {2**64 - 1: list(random_rows(3, seed=1)), 7: list(random_rows(2, seed=2))}
    for layer in range(2):  # layer by layer, as a batch goes through a model
        for sequence_id, (keys, values) in rows.items():
            cache.append_to_sequence(sequence_id, layer, keys, values)
            assert cache.get_sequence_length(sequence_id) == len(keys)
    for sequence_id, (keys, values) in rows.items():
        found = cache.get_from_sequence(sequence_id, 1, 0, len(keys))
        np.testing.assert_array_equal(found[0], keys)
        np.testing.assert_array_equal(found[1], values)


def test_an_unknown_sequence_is_empty():
    cache = MultiSequenceKVCache(2, 2, 8, 16)
    assert (cache.get_from_sequence(3, 0, 0, 1), cache.get_sequence_length(3)) == (None, 0)
    cache.clear_sequence(3)
    cache.remove_sequence(3)
    assert cache.get_memory_usage() == 0


def test_clearing_and_removing_a_sequence():
    cache = MultiSequenceKVCache(2, 2, 8, 16)
    for sequence_id in (1, 2):
        append_everywhere(cache.get_or_create_sequence(sequence_id), 4)
    taken = cache.get_memory_usage()
    cache.clear_sequence(1)
    assert [cache.get_sequence_length(i) for i in (1, 2)] == [0, 4]
    cache.remove_sequence(1)
    assert list(cache.sequences) == [2]
    assert 0 < cache.get_memory_usage() < taken
    cache.deinit()
    assert cache.get_memory_usage() == 0


def test_no_more_than_max_sequences():
    cache = MultiSequenceKVCache(2, 2, 8, 16, max_sequences=2)
    cache.get_or_create_sequence(1)
    cache.get_or_create_sequence(2)
    with pytest.raises(CacheFull, match="max_sequences=2"):
        cache.get_or_create_sequence(3)
    cache.remove_sequence(1)
    cache.get_or_create_sequence(3)


# --- a sliding window --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_window_expires_the_oldest(tokens):
    cache = SlidingWindowKVCache(2, 2, 8, 4)
    assert cache.get_with_window(9, 0) is None
    all_k = np.zeros((0, 2, 8), np.float32)
    for step in range(30):
        k, v = random_rows(tokens, seed=step)
        all_k = np.concatenate([all_k, k])
        for layer in range(2):
            cache.append_with_sliding(9, layer, k, v)
            keys, values = cache.get_with_window(9, layer, len(all_k) - 1)
            np.testing.assert_array_equal(keys, all_k[-4:])
            assert values.shape == keys.shape
    cache.deinit()
    assert cache.get_with_window(9, 0) is None


def test_a_window_is_that_of_the_layer():
    cache = SlidingWindowKVCache(2, 2, 8, 3)

    def first_elements(layer):
        found = cache.get_with_window(7, layer)
        return None if found is None else found[0][:, 0, 0].tolist()

    for position in range(5):
        row = np.full((2, 8), position, np.float32)
        before = [*range(max(position - 2, 0), position)] or None  # the window slides in all layers at once
        after = [*range(max(position - 2, 0), position + 1)]
        cache.append_with_sliding(7, 1, row, row)
        assert [first_elements(layer) for layer in range(2)] == [before, after]
        cache.append_with_sliding(7, 0, row, row)
        assert [first_elements(layer) for layer in range(2)] == [after, after]
    with pytest.raises(IndexError, match="layer_id=2"):
        cache.get_with_window(7, 2)


# --- figures -----------------------------------------------------------------------------------------------------


def test_statistics(capsys):
    cache = MultiSequenceKVCache(2, 2, 8, 16)
    assert KVCacheStats.compute(cache) == (0, 0, 0.0, 0.0)
    append_everywhere(cache.get_or_create_sequence(1), 4)
    append_everywhere(cache.get_or_create_sequence(2), 8)
    stats = KVCacheStats.compute(cache)
    assert stats == (2, cache.get_memory_usage(), 6.0, 12 / 32)
    stats.print()
    assert "tokens of a sequence: 6.0" in capsys.readouterr().out


def test_estimates():
    assert KVCacheUtils.estimate_memory_usage(1, 512, 32, 32, 128) == 512 * 32 * 32 * 128 * 2 * 4
    assert KVCacheUtils.recommended_window_size(2048, 1024) == 2048
    assert KVCacheUtils.recommended_window_size(2**20, 64) == 16384
    sizes = 100, 4096, 32, 32, 128
    assert KVCacheUtils.estimate_memory_usage(*np.int32(sizes)) == math.prod(sizes) * 2 * 4
    assert KVCacheUtils.recommended_window_size(*np.int32([4096, 4096])) == 4096
    with pytest.raises(TypeError, match="n_layers='2'"):
        KVCacheUtils.estimate_memory_usage(1, 2, "2", 2, 2)
    with pytest.raises(ValueError, match="available_memory_mb=-1"):
        KVCacheUtils.recommended_window_size(4096, -1)


@pytest.mark.parametrize("wrong", ["0", 0.0, None, True])
def test_an_argument_of_a_wrong_type_is_named(model, wrong):
    append_everywhere(model.layers)
    [layer, _] = model.layers
    sequences, window = MultiSequenceKVCache(2, 2, 8, 16), SlidingWindowKVCache(2, 2, 8, 4)
    sequences.get_or_create_sequence(0)
    rows = np.ones((2, 2, 8))
    calls = {
        "position": [lambda: layer.get(wrong)],
        "start_pos": [lambda: layer.get_range(wrong, 1)],
        "length": [lambda: layer.get_range(0, wrong)],
        "window_size": [lambda: SlidingWindowKVCache(2, 2, 8, wrong)],
        "num_heads": [lambda: ModelKVCache(2, wrong, 8, 16)],
        "n_layers": [lambda: MultiSequenceKVCache(wrong, 2, 8, 16)],
        "sequence_id": [
            lambda: sequences.get_or_create_sequence(wrong),
            lambda: sequences.append_to_sequence(wrong, 0, *rows),
            lambda: sequences.get_from_sequence(wrong, 0, 0, 1),
            lambda: sequences.get_sequence_length(wrong),
            lambda: sequences.clear_sequence(wrong),
            lambda: sequences.remove_sequence(wrong),
            lambda: window.append_with_sliding(wrong, 0, *rows),
            lambda: window.get_with_window(wrong, 0),
        ],
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(TypeError, match=f"{name}={wrong}|{name}={wrong!r}"):
                call()
    assert [*sequences.sequences] == [0]


def test_a_size_below_one_is_named():
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"window_size={size}: must be at least 1"):
            SlidingWindowKVCache(2, 2, 8, size)
        with pytest.raises(ValueError, match=f"max_seq_length={size}: must be at least 1"):
            MultiSequenceKVCache(2, 2, 8, size)
        with pytest.raises(ValueError, match=f"^num_heads={size}: must be at least 1"):
            ModelKVCache(2, size, 8, 16)
        with pytest.raises(ValueError, match=f"^window_size={size}: must be at least 1"):
            ModelKVCache(2, 2, 8, 16, window_size=size)
