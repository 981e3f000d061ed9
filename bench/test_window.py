"""Test that a step costs the same in a long sliding window, that no row moves, and that memory stays flat."""

import numpy as np
from driver import Driver
from resident_memory import measure_in_child

HEADS, DIM = 8, 128
SMALL, LARGE = 1024, 65536


def test_step_of_a_window(figures, interleave):
    """Time begin, put and commit of one token in one layer, once the window is full."""
    steps = 64  # steps of one round: the slots of a block
    drivers = {window: Driver(1, HEADS, DIM, 0, window=window) for window in (SMALL, LARGE)}
    for window, driver in drivers.items():
        driver.append(window + window // 2)

    def step(window):
        return np.stack(drivers[window].steps(steps)).mean(axis=1)

    small, large = interleave(lambda: step(SMALL), lambda: step(LARGE))
    for i, part in enumerate(("begin", "put", "commit")):
        one, other = ([1e9 * s[i] for s in samples] for samples in (small, large))
        note = f"{np.median(one):.0f} ns at {SMALL:,}, {np.median(other):.0f} ns at {LARGE:,}"
        figures.ratio(f"window of {LARGE:,} against {SMALL:,}, {part}", other, one, note=note)
    total = [[1e9 * sum(s) for s in samples] for samples in (small, large)]
    note = f"{np.median(total[0]):.0f} ns at {SMALL:,}, {np.median(total[1]):.0f} ns at {LARGE:,}"
    figures.ratio(f"window of {LARGE:,} against {SMALL:,}, the whole step", total[1], total[0], "<= 1.3", note)
    moved = sum(driver.rows_moved() for driver in drivers.values())
    figures.value("rows moved by windows", str(moved), "0")
    for driver in drivers.values():
        driver.close()
    assert moved == 0


def test_memory_of_a_window(figures):
    """Measure resident memory at the end of each of 20 windows, in a process of its own.

    By the twentieth before them, the heap has as many holes as blocks that come and go leave in it.
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
