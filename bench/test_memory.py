"""Measure resident memory, each figure in a process of its own."""

import pytest
from resident_memory import measure_in_child

MIB, KIB = 1 << 20, 1 << 10


def test_memory_of_an_empty_cache(figures):
    """Measure a cache for 32 layers x 8 heads x 128 x 131,072 tokens, which is 16 GiB once full."""
    found = measure_in_child(
        """
        x = np.ones((1, 8, 128), np.float32)
        result.append(resident())
        cache = kvcache.KVCache(32, 8, 128, 131072)
        result.append(resident())
        with cache.batch(1) as batch:
            for layer in range(32):
                batch.put(layer, x, x)
        result.append(resident())
        pages = set()  # a row may reach into a second one
        for layer in range(32):
            for x in (cache.keys(layer), cache.values(layer)):
                for head in range(8):
                    begin = x.ctypes.data + head * x.strides[0]
                    pages.update(range(begin // 4096, (begin + x[head].nbytes - 1) // 4096 + 1))
        result.append(4096 * len(pages))
        """
    )
    empty, first, rows = found[1] - found[0], found[2] - found[1], found[3]
    figures.value("resident, empty cache of 131,072 tokens", f"{empty / KIB:.0f} KiB", "< 1 MiB")
    name, note = "resident, its first token beside its rows' OS pages", f"OS pages: {rows / KIB:.0f} KiB"
    figures.value(name, f"{(first - rows) / KIB:.0f} KiB", "<= 64 KiB", note)
    assert empty < MIB
    assert first - rows <= 64 * KIB


FULL = {
    "contiguous": "4, 8, 128, 8192",
    "blocks of 64": "4, 8, 128, 8192, block_size=64",
    "blocks of 16, 1 head x 64": "1, 1, 64, 65536, block_size=16",
    "f32, f16, 80 and 96": "3, 5, 80, 8192, v_head_dim=96, k_dtype='f32'",
}
COMPACT = """
        for position in range(1, cache.max_seq_len, 2):
            cache.remove(position, position + 1, shift=False)
        cache.compact()
"""


@pytest.mark.parametrize(
    ("after", "name"), [("filling", name) for name in FULL] + [("compact", name) for name in [*FULL][:2]]
)
def test_memory_after(figures, after, name):
    """Measure a full cache, or one that lost every second token and was made compact."""
    resident, nbytes = measure_in_child(
        f"""
        with kvcache.KVCache({FULL[name]}) as like:
            dims = like.layers[0].head_dim, like.layers[0].v_head_dim
            k, v = (np.ones((512, like.layers[0].num_kv_heads, dim), np.float32) for dim in dims)
        before = resident()
        cache = kvcache.KVCache({FULL[name]})
        for _ in range(cache.max_seq_len // 512):
            with cache.batch(512) as batch:
                for layer in range(cache.num_layers):
                    batch.put(layer, k, v)
{COMPACT if after == "compact" else ""}
        result.extend([resident() - before, cache.nbytes])
        """
    )
    wanted, note = "0.98 .. 1.02" if after == "filling" else "0.95 .. 1.05", f"{nbytes / MIB:.1f} MiB"
    figures.value(f"nbytes / resident memory after {after}, {name}", f"{nbytes / resident:.3f}", wanted, note)


@pytest.mark.parametrize(("window", "dim"), [(1024, 128), (65536, 16)])
def test_memory_of_a_window(figures, window, dim):
    """Measure resident memory at the end of each of 20 windows.

    After the twenty turns before them, the heap has all the holes that coming and going blocks leave.
    """
    found = measure_in_child(
        f"""
        cache = kvcache.KVCache(1, 8, {dim}, None, policy=kvcache.SlidingWindow({window}))
        x = np.ones(({window} // 16, 8, {dim}), np.float32)
        for turn in range(40):
            for part in [x] * 15 + [x[:1]] * 64:
                with cache.batch(len(part)) as batch:
                    batch.put(0, part, part)
            result.append(resident())
        result.append(cache.nbytes)
        """
    )
    memory, nbytes = found[20:-1], found[-1]
    growth, note = (max(memory) - min(memory)) / nbytes, f"resident memory, of nbytes, {nbytes / MIB:.1f} MiB"
    figures.value(f"growth over 20 windows of {window:,}", f"{100 * growth:.1f} %", "flat", note)
    assert growth < 0.05
