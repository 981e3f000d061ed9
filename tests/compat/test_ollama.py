"""kvcache.compat.ollama: what Ollama's caches promise, sentence by sentence.

Rows are told apart by their values: the n-th token ever put has the n-th unit vector, and is called n. What is compared
is the set of rows that a query sees.
"""

import numpy as np
import pytest
from support.coming_from import random_rows

from kvcache import ChunkedAttention, FullAttention, RowsGoneError, SlidingWindow
from kvcache.compat import ollama
from kvcache.compat.ollama import CacheConfig, CausalOptions, ErrKvCacheFull, ErrNotSupported

MOST_TOKENS = 64


def moved(layer, keys, delta):
    """A shift function for keys that are their position."""
    return keys + np.float32(delta)


class Runner:
    """What a runner does with a cache: in each layer it puts rows, and asks for those it is to attend to."""

    def __init__(self, cache, num_layers=1, **options):
        options = {"dtype": "f32", "capacity": 16} | options
        cache.init(num_layers, 1, 2, v_head_dim=MOST_TOKENS, **options)
        self.kv, self.num_layers, self.count = cache, num_layers, 0

    def forward(self, *tokens, except_=()):
        """Run a pass of (sequence, position) tokens; return the rows that each sees, per layer if there are several."""
        sequences, positions = zip(*tokens, strict=True)
        names = self.count + 1 + np.arange(len(tokens))
        k = np.repeat(np.float32(positions), 2).reshape(-1, 1, 2)
        v = np.eye(MOST_TOKENS, dtype=np.float32)[names][:, None]
        self.kv.start_forward(positions, sequences)
        if except_:
            self.kv.set_causal(CausalOptions(except_))
        self.count += len(tokens)
        seen = []
        for layer in range(self.num_layers):
            self.kv.set_layer(layer)
            if isinstance(self.kv, ollama.WrapperCache):
                self.kv.set_layer_type(layer % 2)
            self.kv.put(k, v)
            seen.append(self.seen())
        return seen[0] if self.num_layers == 1 else seen

    def seen(self):
        _, values, mask = self.kv.get()
        names = values[:, 0].argmax(-1)
        return [set(names[row == 0].tolist()) for row in mask]

    def append(self, sequence, n):
        first = self.kv.cache.next_position(sequence) + self.running(sequence)
        return self.forward(*((sequence, position) for position in range(first, first + n)))

    def running(self, sequence):
        batch = self.kv._shared.batch
        return 0 if batch is None else int((batch.seq_ids == sequence).sum())


# --- what a query sees -------------------------------------------------------------------------------------------


def test_a_causal_cache_shows_what_came_before():
    runner = Runner(ollama.new_causal_cache())
    assert runner.append(0, 4) == [{1}, {1, 2}, {1, 2, 3}, {1, 2, 3, 4}]
    assert runner.append(0, 1) == [{1, 2, 3, 4, 5}]


def test_sequences_see_only_themselves():
    runner = Runner(ollama.new_causal_cache(), max_sequences=2)
    assert runner.forward((0, 0), (0, 1), (1, 0), (1, 1)) == [{1}, {1, 2}, {3}, {3, 4}]
    assert runner.forward((1, 2), (0, 2)) == [{3, 4, 5}, {1, 2, 6}]


def test_a_window_shows_that_many_tokens_and_the_token_itself():
    runner = Runner(ollama.new_swa_cache(1))
    assert runner.append(0, 4) == [{1}, {1, 2}, {2, 3}, {3, 4}]
    assert runner.append(0, 2) == [{4, 5}, {5, 6}]


def test_a_window_with_memory_keeps_more_than_it_shows():
    runner = Runner(ollama.new_swa_mem_cache(1, 3))
    assert runner.append(0, 4) == [{1}, {1, 2}, {2, 3}, {3, 4}]
    assert runner.append(0, 2) == [{4, 5}, {5, 6}]
    assert [runner.kv.can_resume(0, position) for position in (0, 4, 5, 6, 7)] == [False, True, True, True, False]
    runner.kv.remove(0, 4)
    assert runner.append(0, 1) == [{4, 7}]


def test_chunks_show_their_own_tokens_and_expire_nothing():
    runner = Runner(ollama.new_chunked_attention_cache(2))
    assert runner.append(0, 4) == [{1}, {1, 2}, {3}, {3, 4}]
    assert runner.append(0, 3) == [{5}, {5, 6}, {7}]
    assert all(runner.kv.can_resume(0, position) for position in range(8))


def test_except_lets_a_token_see_later_ones_until_the_next_pass():
    runner = Runner(ollama.new_causal_cache(), max_sequences=2)
    runner.append(0, 2)
    assert runner.forward((0, 2), (0, 3), (1, 0), except_=[0]) == [{1, 2, 3, 4}, {1, 2, 3, 4}, {5}]
    assert runner.forward((0, 4), (0, 5)) == [{1, 2, 3, 4, 6}, {1, 2, 3, 4, 6, 7}]


@pytest.mark.parametrize(
    ("window", "memory", "max_sequences", "capacity", "expected"),
    [
        (4, 7, 1, 16, SlidingWindow(5, resume_window=8)),
        (4, None, 1, 16, SlidingWindow(5, resume_window=5)),
        (4, None, 2, 16, SlidingWindow(5, resume_window=6)),  # one can step back by a token
        (4, 16, 1, 16, SlidingWindow(5, resume_window=17)),  # memory of the whole capacity: nothing has expired
        (4, 99, 3, 16, SlidingWindow(5, resume_window=49)),
    ],
)
def test_what_a_window_keeps(window, memory, max_sequences, capacity, expected):
    cache = ollama.new_swa_cache(window) if memory is None else ollama.new_swa_mem_cache(window, memory)
    cache.init(1, 1, 2, max_sequences=max_sequences, capacity=capacity)
    assert cache.cache.layers[0].policy == expected


def test_memory_smaller_than_the_window_is_refused():
    with pytest.raises(ValueError, match="memory=3"):
        ollama.new_swa_mem_cache(4, 3).init(1, 1, 2, capacity=16)


# --- capacity ----------------------------------------------------------------------------------------------------


def test_one_sequence_may_use_the_room_of_all():
    runner = Runner(ollama.new_causal_cache(), max_sequences=2, capacity=4)
    runner.append(0, 8)
    with pytest.raises(ErrKvCacheFull):
        runner.forward((1, 0))
    runner.kv.remove(0, 7)
    assert runner.forward((1, 0)) == [{9}]


def test_a_pass_that_does_not_fit_changes_nothing():
    runner = Runner(ollama.new_causal_cache(), capacity=4)
    runner.append(0, 3)
    with pytest.raises(ErrKvCacheFull):
        runner.append(0, 2)
    assert runner.append(0, 1) == [{1, 2, 3, 4}]


def test_a_window_of_a_small_integer():
    cache = ollama.Causal(window=np.uint8(255), memory=np.uint8(255))
    cache.init(1, 1, 2, capacity=300)
    assert cache.cache.layers[0].policy == SlidingWindow(256, resume_window=256)
    for name, value in (("window", "3"), ("memory", 1.5), ("chunk", True)):
        with pytest.raises(TypeError, match=f"{name}={value!r}: an integer is needed"):
            ollama.Causal(**{name: value})


def test_a_window_is_never_full():
    runner = Runner(ollama.new_swa_cache(2), capacity=8)
    for _ in range(30):
        runner.append(0, 1)
    assert runner.append(0, 1) == [{29, 30, 31}]


@pytest.mark.parametrize(
    ("cache", "max_sequences", "capacity", "padding", "room"),
    [
        (ollama.new_swa_cache(4), 1, 8, 1, 4 + 10),
        (ollama.new_swa_cache(4), 2, 8, 1, 2 * 5 + 1 + 10),  # of several sequences, one row more stays
        (ollama.new_swa_mem_cache(4, 6), 2, 8, 1, 2 * 6 + 1 + 10),
        (ollama.new_swa_mem_cache(4, 8), 2, 8, 1, 2 * 8),  # all rows stay
        (ollama.new_causal_cache(), 2, 8, 1, 2 * 8),
        (ollama.new_causal_cache(), 2, 8, 12, 24),
        (ollama.new_chunked_attention_cache(4), 2, 8, 1, 2 * 8),
        (ollama.new_wrapper_cache(ollama.new_swa_cache(4), ollama.new_causal_cache()), 1, 8, 1, 8),
        (ollama.new_wrapper_cache(ollama.new_swa_cache(4), ollama.new_swa_cache(6)), 1, 8, 1, 6 + 10),
        (ollama.new_wrapper_cache(ollama.new_swa_cache(4), ollama.new_encoder_cache()), 1, 8, 1, 4 + 10),
    ],
)
def test_room_for_what_windows_keep_and_a_pass(cache, max_sequences, capacity, padding, room):
    cache.set_config(CacheConfig(cache_padding=padding))
    cache.init(2, 1, 2, max_sequences=max_sequences, capacity=capacity, max_batch=10)
    assert cache.cache.capacity == room


def test_a_pass_above_capacity_is_stored_where_rows_are_let_go():
    runner = Runner(ollama.new_swa_cache(2), capacity=8, max_batch=10)
    for _ in range(3):
        seen = runner.append(0, 10)
    assert seen[-1] == {28, 29, 30}
    with pytest.raises(ErrKvCacheFull):
        runner.append(0, 11)
    with pytest.raises(ErrKvCacheFull):
        Runner(ollama.new_swa_cache(2), capacity=8).append(0, 10)
    with pytest.raises(ValueError, match="max_batch=0: must be at least 1"):
        ollama.new_swa_cache(2).init(1, 1, 2, capacity=8, max_batch=0)


@pytest.mark.parametrize("max_sequences", [1, 2, 3])
@pytest.mark.parametrize("new", [lambda: ollama.new_swa_cache(4), lambda: ollama.new_swa_mem_cache(4, 9)])
def test_sequences_take_turns_with_the_largest_passes(new, max_sequences):
    runner = Runner(new(), capacity=16, max_batch=6, max_sequences=max_sequences)
    for _ in range(3):
        for sequence in range(max_sequences):
            runner.append(sequence, 6)


def test_a_cache_says_its_type_and_what_it_is():
    cache = ollama.new_causal_cache()
    assert repr(cache) == "<ollama.Causal: not made yet>"
    cache.init(2, 1, 32, dtype="q8_0", capacity=8)
    assert (cache.dtype, repr(cache)) == ("q8_0", "<ollama.Causal: 0 sequences, 2 layers>")


def test_reserving_takes_the_memory_and_no_token():
    cache = ollama.new_causal_cache()
    cache.init(1, 1, 2, capacity=64)
    before = cache.cache.nbytes
    cache.start_forward(range(64), reserve=True)
    assert cache.cache.nbytes > before
    assert cache.cache.sequences == []
    for call in (cache.get, lambda: cache.put(*random_rows(1))):
        with pytest.raises(ValueError, match="no forward pass"):
            call()


# --- passes ------------------------------------------------------------------------------------------------------


def test_a_pass_of_which_a_layer_was_left_out_is_forgotten():
    runner = Runner(ollama.new_causal_cache(), num_layers=2)
    runner.append(0, 2)
    runner.kv.start_forward([2])
    with pytest.raises(ValueError, match="layer"):
        runner.forward((0, 3))
    runner.count = 2
    assert runner.append(0, 1) == [[{1, 2, 3}], [{1, 2, 3}]]


def test_rows_are_in_the_order_of_positions():
    cache = ollama.new_causal_cache()
    cache.init(1, 2, 8, dtype="f16", capacity=16)
    k, v = random_rows(3)
    cache.start_forward([2, 0, 1])
    cache.put(k, v)
    keys, values, mask = cache.get()
    np.testing.assert_array_equal(keys, k[[1, 2, 0]].astype(np.float16))
    np.testing.assert_array_equal(values, v[[1, 2, 0]].astype(np.float16))
    assert (mask == 0).tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert np.isneginf(mask[1, 1])


def test_a_layer_may_get_what_another_one_put():
    cache = ollama.new_causal_cache()
    cache.init(2, 2, 8, dtype="f32", capacity=16, share=[None, 0])
    k, v = random_rows(3)
    for seed in range(2):
        cache.start_forward(range(3 * seed, 3 * seed + 3))
        cache.set_layer(0)
        cache.put(k, v)
        cache.set_layer(1)
        keys, values, _ = cache.get()
        np.testing.assert_array_equal(keys[-3:], k)
        np.testing.assert_array_equal(values[-3:], v)
    assert len(keys) == 6


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8_0"])
def test_other_types_are_read_as_f32(dtype):
    cache = ollama.new_causal_cache()
    cache.init(1, 2, 32, dtype=dtype, capacity=16)
    k, v = random_rows(3, dim=32)
    cache.start_forward(range(3))
    cache.put(k, v)
    keys, _, _ = cache.get()
    assert keys.dtype == np.float32
    np.testing.assert_allclose(keys, k, atol=0.05)


def test_a_config_pads_and_permutes():
    cache = ollama.new_causal_cache()
    cache.set_config(CacheConfig(cache_padding=4, permuted_v=True, mask_dtype="f16"))
    cache.init(1, 2, 8, dtype="f32", capacity=16)
    k, v = random_rows(5)
    cache.start_forward(range(5))
    cache.put(k, v)
    keys, values, mask = cache.get()
    assert (keys.shape, values.shape, mask.shape, mask.dtype) == ((8, 2, 8), (2, 8, 8), (5, 8), np.float16)
    np.testing.assert_array_equal(values[:, :, :5], v.transpose(1, 2, 0))
    assert values.flags.c_contiguous
    assert (mask == 0).sum(axis=1).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="before init"):
        cache.set_config(CacheConfig())


@pytest.mark.parametrize("config", [3, None, {"cache_padding": 4}, CacheConfig])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_is_no_config_is_refused(is_wrapped, config):
    cache = ollama.new_causal_cache()
    if is_wrapped:
        cache = ollama.new_wrapper_cache(cache)
    with pytest.raises(TypeError, match=r"set_config\(.*\): a CacheConfig is needed"):
        cache.set_config(config)
    cache.set_config(CacheConfig())
    with pytest.raises(TypeError, match="permuted_v=3: a bool is needed"):
        CacheConfig(permuted_v=3)


def test_each_cache_of_a_wrapper_has_its_config():
    own, other = ollama.new_swa_cache(4), ollama.new_causal_cache()
    own.set_config(CacheConfig(cache_padding=8))
    both = ollama.new_wrapper_cache(own, other)
    with pytest.raises(ValueError, match=r"Causal has CacheConfig\(cache_padding=8.* already"):
        both.set_config(CacheConfig(permuted_v=True))
    both.init(2, 2, 8, dtype="f32", capacity=16)
    k, v = random_rows(5)
    both.start_forward(range(5))
    for layer, length in ((0, 8), (1, 5)):
        both.set_layer(layer)
        both.set_layer_type(layer)
        both.put(k, v)
        keys, values, mask = both.get()
        assert (keys.shape, values.shape, mask.shape) == ((length, 2, 8), (length, 2, 8), (5, length))


def test_the_config_of_a_wrapper_is_for_all_its_caches():
    both = ollama.new_wrapper_cache(ollama.new_encoder_cache(8), ollama.new_causal_cache())
    both.set_config(CacheConfig(permuted_v=True))
    both.init(2, 2, 8, dtype="f32", capacity=16)
    k, v = random_rows(5)
    both.start_forward(range(5))
    for layer in range(2):
        both.set_layer(layer)
        both.set_layer_type(layer)
        both.put(k, v)
        assert both.get()[1].shape == (2, 8, 5)
    assert both.get()[2].shape == (5, 5)


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_put_of_another_number_of_tokens_is_refused(tokens):
    cache = ollama.new_causal_cache()
    cache.init(1, 2, 8, capacity=16)
    cache.start_forward(range(3))
    rows, wrong = [*random_rows(3)], [*random_rows(tokens)]
    for k, v in ((wrong[0], wrong[1]), (rows[0], wrong[1])):
        with pytest.raises(ValueError, match=rf"an array of shape \({tokens}, 2, 8\), where the pass has 3 tokens"):
            cache.put(k, v)
    cache.put(*rows)
    cache.start_forward([3])
    assert cache.cache.seq_len() == 3


def test_without_init_and_after_close():
    cache = ollama.new_causal_cache()
    with pytest.raises(ValueError, match=r"call init\(\) first"):
        cache.start_forward([0])
    cache.init(1, 2, 8, capacity=16)
    cache.start_forward([0])
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        cache.can_resume(0, 0)


# --- removing, copying, resuming ---------------------------------------------------------------------------------


def test_removing_the_end():
    runner = Runner(ollama.new_swa_mem_cache(1, 3))
    runner.append(0, 4)
    runner.append(0, 1)
    assert not runner.kv.can_resume(0, 1)
    with pytest.raises(RowsGoneError):  # the original attends to less
        runner.kv.remove(0, 1)
    runner.kv.remove(0, 4)
    assert runner.append(0, 1) == [{4, 6}]
    runner.kv.remove(0, 0)
    assert runner.append(0, 1) == [{7}]
    runner.kv.remove(7, 0)  # unknown


def test_removing_the_middle_shifts():
    runner = Runner(ollama.new_causal_cache(moved))
    runner.append(0, 6)
    runner.kv.remove(0, 1, 3)
    assert runner.kv.cache.gather(0)[0][0, :, 0].tolist() == [0, 1, 2, 3]
    assert runner.append(0, 1) == [{1, 4, 5, 6, 7}]


def test_removing_without_a_shift_function_changes_nothing():
    runner = Runner(ollama.new_causal_cache())
    runner.append(0, 4)
    with pytest.raises(ErrNotSupported):
        runner.kv.remove(0, 1, 2)
    assert runner.append(0, 1) == [{1, 2, 3, 4, 5}]
    runner.kv.remove(0, 3, 9)  # no token is above it: nothing has to move
    assert runner.append(0, 1) == [{1, 2, 3, 6}]


@pytest.mark.parametrize("changed", [0, 1])
def test_a_copied_prefix_may_change_on_either_side(changed):
    runner = Runner(ollama.new_causal_cache(moved), max_sequences=2)
    runner.append(0, 4)
    runner.kv.copy_prefix(0, 1, 4)
    runner.kv.remove(changed, 1, 2)
    assert runner.append(changed, 1) == [{1, 3, 4, 5}]
    assert runner.append(1 - changed, 1) == [{1, 2, 3, 4, 6}]


def test_a_copy_replaces_what_was_there():
    runner = Runner(ollama.new_causal_cache(), max_sequences=2)
    runner.append(0, 3)
    runner.append(1, 5)
    runner.kv.copy_prefix(0, 1, 2)
    assert runner.append(1, 1) == [{1, 2, 9}]
    with pytest.raises(ValueError, match="differ"):
        runner.kv.copy_prefix(1, 1, 1)


def test_resuming():
    runner = Runner(ollama.new_swa_cache(4))
    runner.append(0, 8)
    runner.append(0, 1)
    assert [runner.kv.can_resume(0, position) for position in (0, 4, 9, 10)] == [False, False, True, False]
    assert [position for position in range(20) if runner.kv.can_resume(5, position)] == [0]


# --- encoders ----------------------------------------------------------------------------------------------------


def encoder(num_layers=1):
    cache = ollama.new_encoder_cache(64)
    cache.init(num_layers, 2, 8, dtype="f32", capacity=16)
    return cache


@pytest.mark.parametrize("shape", [(6, 2, 8), (3, 2, 2, 8), (1, 3, 2, 2, 8), (6, 16)])
def test_an_encoder_returns_what_was_put_in_its_shape(shape):
    cache = encoder()
    k, v = (rows.reshape(shape) for rows in random_rows(6))
    cache.start_forward([0], multimodal=[0])
    assert not cache.encoder_cached()
    cache.put(k, v)
    for _ in range(2):  # now, and in the next pass
        keys, values, mask = cache.get()
        assert (keys.tobytes(), values.tobytes(), mask) == (k.tobytes(), v.tobytes(), None)
        assert keys.shape == values.shape == shape
        assert cache.encoder_cached()
        cache.start_forward([1])
    image = list(random_rows(4, seed=1))
    cache.put(*image)
    assert cache.get()[0].tobytes() == image[0].tobytes()


def test_a_layer_may_get_what_an_encoder_put_in_another():
    """In the shape in which it was put, now and in the next pass."""
    cache = ollama.new_wrapper_cache(ollama.new_encoder_cache(64), ollama.new_encoder_cache(64))
    cache.init(3, 2, 8, dtype="f32", capacity=16, layer_types=[0, 0, 1], share=[None, 0, 0])
    k, v = (rows.reshape(3, 2, 2, 8) for rows in random_rows(6))
    cache.start_forward([0])
    cache.put(k, v)
    for position in (1, 2):
        for layer, layer_type in ((1, 0), (2, 1)):
            cache.set_layer(layer)
            cache.set_layer_type(layer_type)
            keys, values, _ = cache.get()
            np.testing.assert_array_equal(keys, k)
            np.testing.assert_array_equal(values, v)
        cache.start_forward([position])


@pytest.mark.parametrize(
    ("begin", "end", "cached"), [(0, 2, True), (0, 3, False), (2, 3, False), (3, 9, True), (0, ollama.MAX_INT32, False)]
)
def test_removing_the_token_of_an_image_forgets_it(begin, end, cached):
    cache = encoder()
    image = list(random_rows(5))
    cache.start_forward([1, 2, 3], multimodal=[0, 1])  # the last one counts: position 2
    cache.put(*image)
    cache.remove(0, begin, end)
    assert cache.encoder_cached() is cached
    assert cache.get()[0].tobytes() == image[0].tobytes()  # the rows are still there


def test_an_encoder_is_of_one_sequence():
    with pytest.raises(ValueError, match="max_sequences=2"):
        ollama.new_encoder_cache(64).init(1, 2, 8, max_sequences=2, capacity=16)
    cache = encoder()
    assert all(cache.can_resume(0, position) for position in range(9))
    with pytest.raises(ErrNotSupported):
        cache.copy_prefix(0, 1, 3)
    cache.start_forward([0])
    with pytest.raises(ValueError, match="has no rows"):
        cache.get()


# --- a wrapper ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_wrapper_has_layers_of_several_kinds(num_layers):
    runner = Runner(ollama.new_wrapper_cache(ollama.new_swa_cache(1), ollama.new_causal_cache()), num_layers)
    assert runner.append(0, 3) == [[{1}, {1, 2}, {2, 3}], [{1}, {1, 2}, {1, 2, 3}], [{1}, {1, 2}, {2, 3}]][:num_layers]
    assert runner.append(0, 1) == [[{3, 4}], [{1, 2, 3, 4}], [{3, 4}]][:num_layers]


def test_a_wrapper_says_which_layer_is_of_which():
    chunked, causal = ollama.new_chunked_attention_cache(4), ollama.new_causal_cache()
    cache = ollama.new_wrapper_cache(chunked, causal)
    cache.init(3, 1, 2, capacity=16, layer_types=[0, 0, 1])
    assert [type(layer.policy) for layer in cache.cache.layers[:2]] == [ChunkedAttention] * 2
    assert cache.underlying_cache() is chunked
    cache.set_layer_type(1)
    assert cache.underlying_cache() is causal
    cache.start_forward([0])
    assert cache.underlying_cache() is chunked  # each pass begins with the first


def test_a_layer_of_another_cache_is_neither_put_nor_read():
    images, causal = ollama.new_encoder_cache(64), ollama.new_causal_cache()
    cache = ollama.new_wrapper_cache(images, causal)
    cache.init(2, 2, 8, dtype="f32", capacity=16)
    cache.start_forward([0])
    for layer, layer_type, wrong in ((0, 1, causal), (1, 0, images)):
        cache.set_layer(layer)
        cache.set_layer_type(layer_type)
        for one in (cache, wrong):
            with pytest.raises(ValueError, match=rf"layer {layer} is of caches\[{layer}\].*set_layer_type\({layer}\)"):
                one.put(*random_rows(1))
            with pytest.raises(ValueError, match=rf"layer {layer} is of caches\[{layer}\]"):
                one.get()
    assert not images.encoder_cached()
    causal.put(*random_rows(1))  # a cache may be asked itself, whichever is chosen
    assert len(causal.get()[0]) == 1


def test_layer_types_may_be_any_iterable():
    cache = ollama.new_wrapper_cache(ollama.new_chunked_attention_cache(4), ollama.new_causal_cache())
    cache.init(3, 1, 2, capacity=16, layer_types=(number for number in np.array([0, 0, 1])))
    assert [type(layer.policy) for layer in cache.cache.layers] == [ChunkedAttention] * 2 + [FullAttention]


@pytest.mark.parametrize("layer_types", [[0, 1], [0, 1, 0, 1], []])
def test_layer_types_are_of_every_layer(layer_types):
    cache = ollama.new_wrapper_cache(ollama.new_causal_cache(), ollama.new_causal_cache())
    with pytest.raises(ValueError, match=rf"len\(layer_types\)={len(layer_types)}: must be num_layers, which is 3"):
        cache.init(3, 1, 2, capacity=16, layer_types=layer_types)


def test_arguments_out_of_range():
    with pytest.raises(ValueError, match="at least one cache"):
        ollama.new_wrapper_cache()
    cache = ollama.new_wrapper_cache(ollama.new_causal_cache())
    with pytest.raises(IndexError, match=r"layer_types\[1\]=1: must be at least 0 and below 1"):
        cache.init(2, 1, 2, capacity=16, layer_types=[0, 1])
    cache.init(2, 1, 2, capacity=16)
    with pytest.raises(IndexError, match="layer_type=1"):
        cache.set_layer_type(1)
    with pytest.raises(IndexError, match="layer=2"):
        cache.set_layer(2)
    for wrong in ({"cache_padding": 0}, {"mask_dtype": "f64"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CacheConfig(**wrong)


def test_a_wrapper_resumes_where_all_of_its_caches_can():
    runner = Runner(ollama.new_wrapper_cache(ollama.new_swa_cache(2), ollama.new_causal_cache()), 2)
    for _ in range(6):
        runner.append(0, 1)
    assert [runner.kv.can_resume(0, position) for position in (2, 3, 6, 7)] == [False, False, True, False]


def test_a_wrapper_fails_whole():
    runner = Runner(ollama.new_wrapper_cache(ollama.new_swa_cache(1), ollama.new_causal_cache()), 2, capacity=4)
    runner.append(0, 3)
    before = [runner.kv.can_resume(0, position) for position in range(9)]
    with pytest.raises(ErrKvCacheFull):
        runner.append(0, 2)
    assert [runner.kv.can_resume(0, position) for position in range(9)] == before
    assert runner.append(0, 1) == [[{3, 4}], [{1, 2, 3, 4}]]


def test_a_wrapper_of_an_encoder_and_a_causal_cache():
    images = ollama.new_encoder_cache(64)
    cache = ollama.new_wrapper_cache(images, ollama.new_causal_cache())
    cache.init(2, 2, 8, dtype="f32", capacity=16)
    image = list(random_rows(5))
    for position in range(3):
        cache.start_forward([position], multimodal=[0] if position == 0 else ())
        if position == 0:
            cache.put(*image)
        keys, _, mask = cache.get()
        assert (keys.tobytes(), mask) == (image[0].tobytes(), None)
        cache.set_layer(1)
        cache.set_layer_type(1)
        cache.put(*random_rows(1, seed=position))
        assert len(cache.get()[0]) == position + 1
        cache.set_layer(0)
    assert images.encoder_cached()
    cache.remove(0, 1)
    assert images.encoder_cached()
    cache.remove(0, 0)
    assert not images.encoder_cached()


@pytest.mark.parametrize("end", [ollama.MAX_INT32, 2])
def test_rows_that_are_gone_are_not_cached(end):
    images = ollama.new_encoder_cache(64)
    cache = ollama.new_wrapper_cache(images, ollama.new_causal_cache())
    cache.init(2, 2, 8, capacity=16)
    cache.start_forward([0, 1])  # the rows stand for no token
    cache.put(*random_rows(5))
    cache.set_layer(1)
    cache.set_layer_type(1)
    cache.put(*random_rows(2))
    cache.remove(9, 0)
    assert images.encoder_cached()
    cache.remove(0, 0, end)
    assert images.encoder_cached() is (cache.cache.seq_len(layer=0) > 0)


def test_rows_of_a_pass_that_is_forgotten_are_not_cached():
    """What stood there before the pass stays, in its shape."""
    images = ollama.new_encoder_cache(64)
    cache = ollama.new_wrapper_cache(images, ollama.new_causal_cache())
    cache.init(2, 2, 8, capacity=16, dtype="f32")
    kept = None
    for rows in (3, 5):
        cache.start_forward([0], multimodal=[0])
        cache.put(*random_rows(rows))
        assert images.encoder_cached()
        with pytest.raises(ValueError, match="not put in layer 1"):
            cache.start_forward([0])
        assert images.encoder_cached() is (kept is not None)
        cache.start_forward([0])
        if kept is None:
            with pytest.raises(ValueError, match="layer 0 has no rows"):
                cache.get()
            kept = list(random_rows(4, seed=2))
            cache.put(*kept)
        assert cache.get()[0].tobytes() == kept[0].tobytes()
        cache.set_layer(1)
        cache.set_layer_type(1)
        cache.put(*random_rows(1))
        cache.remove(0, 1)
        cache.set_layer(0)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_cache_that_is_made_anew_has_no_rows(is_wrapped):
    images = ollama.new_encoder_cache(64)
    cache = ollama.new_wrapper_cache(images) if is_wrapped else images
    for _ in range(2):
        cache.init(1, 2, 8, capacity=16)
        assert not images.encoder_cached()
        cache.start_forward([0])
        cache.put(*random_rows(3))
        assert images.encoder_cached()


@pytest.mark.parametrize("shape", [(6, 16), (2, 8)])
def test_permuted_values_have_an_axis_of_rows(shape):
    cache = ollama.new_encoder_cache(64)
    cache.set_config(CacheConfig(permuted_v=True))
    cache.init(1, 2, 8, capacity=16)
    cache.start_forward([0])
    with pytest.raises(ValueError, match=r"value: an array of shape .*, where permuted_v needs \[\.\.\., rows, heads"):
        cache.put(*np.ones((2, *shape), np.float32))
    assert not cache.encoder_cached()


@pytest.mark.parametrize("share", [None, [None, 0]])
def test_a_layer_without_the_rows_of_the_pass_is_not_read(share):
    cache = ollama.new_causal_cache()
    cache.init(2, 2, 8, capacity=16, share=share)
    k, v = random_rows(3)
    for first in (0, 3):
        cache.start_forward(range(first, first + 3))
        for layer in range(2 if share is None else 1):
            cache.set_layer(1)
            with pytest.raises(ValueError, match="layer 1 has no rows of this pass"):
                cache.get()
            cache.set_layer(layer)
            cache.put(k, v)
        cache.set_layer(1)
        assert len(cache.get()[0]) == first + 3


def test_a_wrong_index_of_multimodal_begins_nothing():
    cache = ollama.new_encoder_cache(8)
    cache.init(1, 2, 8, capacity=16)
    with pytest.raises(IndexError, match="multimodal=5: must be at least 0 and below 2"):
        cache.start_forward([0, 1], multimodal=[5])
    with pytest.raises(ValueError, match="start_forward"):
        cache.get()


def test_the_prefix_of_an_empty_sequence_is_empty():
    cache = ollama.new_causal_cache()
    cache.init(1, 2, 8, capacity=16, max_sequences=2)
    cache.start_forward([0, 1], [1, 1])
    cache.put(*random_rows(2))
    cache.copy_prefix(0, 1, 5)  # "in place of what that held"
    assert cache.cache.sequences == []


def test_caches_are_given_one_by_one():
    causal, encoder = ollama.new_causal_cache(), ollama.new_encoder_cache()
    with pytest.raises(TypeError, match=r"caches\[0\]=\[.*\]: must be a Causal or an EncoderCache; give each"):
        ollama.new_wrapper_cache([causal, encoder])
    with pytest.raises(TypeError, match=r"caches\[1\]=.*WrapperCache.*: must be a Causal"):
        ollama.new_wrapper_cache(causal, ollama.new_wrapper_cache(encoder))
    for padding in (1.5, "32"):
        with pytest.raises(TypeError, match="cache_padding="):
            ollama.CacheConfig(cache_padding=padding)


MADE = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 16}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        *((lambda cache, name=name: cache.init(**{**MADE, name: "2"}), name) for name in MADE),
        (lambda cache: cache.init(**{**MADE, "capacity": None}), "capacity"),
        (lambda cache: cache.init(**MADE, max_sequences="1"), "max_sequences"),
        (lambda cache: cache.init(**MADE, layer_types=0), "layer_types"),
        (lambda cache: cache.start_forward(None), "positions"),
        (lambda cache: cache.start_forward(None, reserve=True), "positions"),
        (lambda cache: cache.start_forward("01"), r"positions\[0\]"),
        (lambda cache: cache.start_forward([0], multimodal=0), "multimodal"),
        (lambda cache: cache.remove(0, 1, None), "end"),
        (lambda _: ollama.new_encoder_cache().remove(0, "1"), "begin"),
        (lambda cache: cache.set_causal([1]), r"set_causal\(\[1\]\)"),
        (lambda _: CausalOptions("ab"), r"except_\[0\]"),
        *((lambda _, size=size: ollama.new_swa_cache(size), "window_size") for size in ("3", None)),
        (lambda _: ollama.new_swa_mem_cache(3, None), "memory_size"),
        (lambda _: ollama.new_chunked_attention_cache(None), "chunk_size"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(call, name):
    cache = ollama.new_causal_cache()
    if "init" not in call.__code__.co_names:
        cache.init(**MADE)
    with pytest.raises(TypeError, match=name):
        call(cache)


@pytest.mark.parametrize("kind", [iter, np.array, tuple])
def test_except_may_be_any_iterable(kind):
    cache = ollama.new_causal_cache()
    cache.init(1, 2, 8, capacity=16)
    cache.start_forward([0, 1])
    cache.put(*random_rows(2))
    cache.set_causal(CausalOptions(kind([0])))
    for _ in range(2):
        assert (cache.get()[2] == 0).all()
    assert CausalOptions(kind([0])) == CausalOptions([0])


def test_tokens_that_there_are_not_see_nothing():
    cache = ollama.new_causal_cache()
    cache.init(1, 2, 8, capacity=16)
    cache.start_forward([0, 1])
    for token in (2, -1):
        with pytest.raises(IndexError, match=f"except_={token}: must be at least 0 and below 2"):
            cache.set_causal(CausalOptions([token]))
