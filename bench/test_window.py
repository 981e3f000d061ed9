"""Measure the memory of sliding windows."""

from resident_memory import measure_in_child

HEADS, DIM = 8, 128
SMALL, LARGE = 1024, 65536


def test_memory_of_a_window(figures):
    """Measure resident memory at the end of each of 20 windows, in a process of its own.

    After the twenty turns before them, the heap has all the holes that coming and going blocks leave.
    """
    for window in (SMALL, LARGE):
        found = measure_in_child(
            f"""
            window, layers, heads, dim = {window}, 1, {HEADS}, {DIM if window == SMALL else 16}
            cache = kvcache.KVCache(layers, heads, dim, None, policy=kvcache.SlidingWindow(window))
            x = np.ones((window // 16, heads, dim), np.float32)
            for turn in range(40):
                for _ in range(15):
                    with cache.batch(len(x)) as batch:
                        batch.put(0, x, x)
                for _ in range(len(x) if window < 4096 else 64):
                    with cache.batch(1) as batch:
                        batch.put(0, x[:1], x[:1])
                result.append([resident(), cache.nbytes])
            """
        )[20:]
        memory = [rss for rss, _ in found]
        growth = (max(memory) - min(memory)) / found[0][1]
        figures.value(
            f"growth over 20 windows of {window:,}",
            f"{100 * growth:.1f} %",
            "flat",
            f"resident memory, of nbytes, {found[-1][1] / 2**20:.1f} MiB",
        )
        assert growth < 0.05
