"""Models whose last layers read rows that other layers have brought, in two threads with one `KVCache`."""

import copy
import threading

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import sparse_models  # noqa: E402 - torch may be missing
from support.hf_pairs import MIXED, make  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.told import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}


def gemma4():
    return make(transformers.Gemma4TextConfig(**MIXED, **SHARED, num_global_key_value_heads=2, global_head_dim=16))


def mistral_large4():
    return sparse_models.model_of("mistral_large4")


@pytest.mark.parametrize("joined_by", ["prefix", "copy"])
@pytest.mark.parametrize("model_of", [gemma4, mistral_large4])
def test_two_threads(model_of, joined_by):
    """A pass waits for the layers of another thread's pass that only read, and fails in none of them."""
    model = copy.deepcopy(model_of())
    model.set_attn_implementation("kvcache")
    tokens = sparse_models.tokens_of(2, 40)
    with torch.no_grad():
        want = [model(tokens[i : i + 1], use_cache=True, **{CACHE: HFCache(model.config)}).logits for i in range(2)]
    memory = HFCache.make_kv_cache(model.config)
    prefix = kvcache.PrefixCache(memory, fingerprint="a model")
    first = HFCache(model.config, prefix=prefix) if joined_by == "prefix" else HFCache(model.config)
    second = HFCache(model.config, prefix=prefix) if joined_by == "prefix" else copy.copy(first)
    got = {}

    def serve(i, past):
        with torch.no_grad():
            if joined_by == "prefix":
                past.acquire(tokens[i : i + 1])
            got[i] = model(tokens[i : i + 1], use_cache=True, **{CACHE: past}).logits

    other = threading.Thread(target=serve, args=(1, second))

    def let_other_go_on(module, inputs):
        if threading.current_thread() is not other:
            other.start()
            other.join(1)  # long enough for it to end, unless it waits

    last = [layer for layer in model.modules() if type(layer).__name__.endswith("DecoderLayer")][-1]
    last.register_forward_pre_hook(let_other_go_on)
    serve(0, first)
    other.join(60)
    assert not other.is_alive()
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
