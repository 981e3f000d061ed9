"""The tensors that `HFCache` decodes rows to for a model's own attention, and whose memory it uses again."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache.hf import HFCache, dense  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore:kvcache. the rows of every layer")

LAYERS, HEADS, DIM = 3, 2, 64
TOKENS = dense.WORTH_KEEPING // (4 * HEADS * DIM)  # whose keys of f32 are the least whose memory is used again
CONFIG = transformers.LlamaConfig(
    hidden_size=HEADS * DIM, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=97
)
CONFIG._attn_implementation = "sdpa"


def rows(tokens, seed, batch=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, tokens, DIM, generator=generator).to(dtype)


def step(cache, seed, tokens=1, keep=lambda keys: None, **options):
    """Give every layer new rows, as a model does; return what `keep` makes of each layer's keys, which are checked."""
    kept = []
    for layer in range(LAYERS):
        new = rows(tokens, seed + layer, **options)
        keys, values = cache.update(new, 2 * new, layer)
        torch.testing.assert_close(values, 2 * keys)
        assert torch.equal(keys[:, :, -tokens:], new)
        kept.append(keep(keys))
        del keys, values  # as a model drops them
    return kept


def filled():
    cache = HFCache(CONFIG, "f32")
    step(cache, 0, TOKENS)
    return cache


def saved_by_autograd(keys):
    factor = torch.ones(DIM, requires_grad=True)
    product = (keys * factor).sum()

    def read():
        factor.grad = None
        product.backward(retain_graph=True)
        return factor.grad.clone()

    return read


KEEPERS = {
    "tensor": lambda keys: keys,
    "slice": lambda keys: keys[:, :1, 5:7],
    "view of a view": lambda keys: keys.transpose(1, 2)[:, 3:].permute(3, 0, 1, 2)[1:],
    "other type": lambda keys: keys[0, 0].view(torch.int32),
    "parts": lambda keys: keys.chunk(4, dim=2)[2],
    "detached": lambda keys: keys.detach()[..., :3],
    "NumPy": lambda keys: keys.numpy()[0, 1],
    "memoryview": lambda keys: memoryview(keys.numpy()),
    "DLPack": lambda keys: torch.from_dlpack(keys[0]),
    "storage": lambda keys: keys.untyped_storage(),
    "autograd": saved_by_autograd,
}


def contents(kept):
    if callable(kept) and not isinstance(kept, torch.Tensor):
        kept = kept()
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.empty(0, dtype=torch.uint8).set_(kept)
    return bytes(kept) if isinstance(kept, memoryview) else torch.as_tensor(kept).numpy().tobytes()


@pytest.mark.parametrize("name", KEEPERS)
def test_kept_tensors_stay(name):
    cache = filled()
    kept = step(cache, 10, keep=KEEPERS[name])
    before = [contents(x) for x in kept]
    assert len(set(before)) == LAYERS
    for seed in (20, 30):
        step(cache, seed)
        assert [contents(x) for x in kept] == before


def test_memory_is_used_again():
    cache = filled()
    places = {place for seed in (10, 20) for place in step(cache, seed, keep=torch.Tensor.data_ptr)}
    assert len(places) == 1
    kept = step(cache, 30, keep=lambda keys: keys)
    assert len({keys.data_ptr() for keys in kept}) == LAYERS
    del kept
    assert len(set(step(cache, 40, keep=torch.Tensor.data_ptr))) == 1


def test_memory_is_bounded():
    cache = filled()
    size = 4 * HEADS * DIM * TOKENS  # bytes of a layer's keys
    tracemalloc.start()  # NumPy reports its arrays
    try:
        for seed in range(10, 60, 10):
            step(cache, seed, tokens=TOKENS // 4, keep=lambda keys: keys)
            size += size // 4
        assert tracemalloc.get_traced_memory()[0] < 2 * 1.2 * size + (1 << 20)  # keys and values of one layer
        cache.reset()
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("dtype", "transform"), [("f32", None), ("f16", None), ("bf16", None), ("q8_0", None), ("q8_0", "hadamard")]
)
def test_batch_of_other_type(dtype, transform):
    """Rows of a batch, of a model in bf16, decoded to memory that other numbers were in."""
    cache = HFCache(CONFIG, dtype, transform=transform)
    options = {"batch": 3, "dtype": torch.bfloat16}
    step(cache, 0, TOKENS, **options)
    step(cache, 10, 5, **options)
    for layer, keys in enumerate(step(cache, 20, keep=torch.clone, **options)):
        want = torch.cat([rows(n, seed + layer, **options) for n, seed in ((TOKENS, 0), (5, 10), (1, 20))], 2)
        torch.testing.assert_close(keys, want, atol=0.03, rtol=0.01)


def test_threads():
    def run(seed):
        cache = filled()
        kept = [keys for i in range(4) for keys in step(cache, seed + 10 * i, keep=lambda keys: keys)]
        return [keys.sum(dtype=torch.float64).item() for keys in kept]

    seeds = 100, 200, 300
    with ThreadPoolExecutor(len(seeds)) as pool:
        assert list(pool.map(run, seeds)) == list(map(run, seeds))
