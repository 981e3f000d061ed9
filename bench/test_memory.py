"""Measure resident memory, each figure in a process of its own."""

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
        result.append(cache.nbytes)
        pages = set()  # a row may reach into a second one
        for layer in range(32):
            for x in (cache.keys(layer), cache.values(layer)):
                for head in range(8):
                    begin = x.ctypes.data + head * x.strides[0]
                    pages.update(range(begin // 4096, (begin + x[head].nbytes - 1) // 4096 + 1))
        result.append(4096 * len(pages))
        """
    )
    empty, first, rows = found[1] - found[0], found[2] - found[1], found[4]
    figures.value("resident, empty cache of 131,072 tokens", f"{empty / KIB:.0f} KiB", "< 1 MiB")
    figures.value(
        "resident, its first token beside its rows' OS pages",
        f"{(first - rows) / KIB:.0f} KiB",
        "<= 64 KiB",
        f"OS pages: {rows / KIB:.0f} KiB; nbytes says {found[3] / KIB:.0f} KiB",
    )
    assert empty < MIB
    assert first - rows <= 64 * KIB


def test_nbytes_of_a_full_cache(figures):
    shapes = {
        "contiguous": "4, 8, 128, 8192",
        "blocks of 64": "4, 8, 128, 8192, block_size=64",
        "blocks of 16, 1 head x 64": "1, 1, 64, 65536, block_size=16",
        "f32, f16, 80 and 96": "3, 5, 80, 8192, v_head_dim=96, k_dtype='f32'",
    }
    for name, shape in shapes.items():
        before, after, nbytes = measure_in_child(
            f"""
            with kvcache.KVCache({shape}) as like:
                dims = like.layers[0].head_dim, like.layers[0].v_head_dim
                k, v = (np.ones((512, like.layers[0].num_kv_heads, dim), np.float32) for dim in dims)
            result.append(resident())
            cache = kvcache.KVCache({shape})
            for _ in range(cache.max_seq_len // 512):
                with cache.batch(512) as batch:
                    for layer in range(cache.num_layers):
                        batch.put(layer, k, v)
            result.append(resident())
            result.append(cache.nbytes)
            """
        )
        ratio = nbytes / (after - before)
        figures.value(
            f"nbytes of a full cache / measured growth, {name}",
            f"{ratio:.3f}",
            "0.98 .. 1.02",
            f"{nbytes / MIB:.1f} MiB",
        )
