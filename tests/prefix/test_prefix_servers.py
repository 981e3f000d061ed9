"""Prefixes that processes share: through a folder, a server, and a cluster that fails in the middle of work."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import servers
from support.prefixes import make_cache, serve
from support.servers import LONG, Server, until

import kvcache
from kvcache import stores

PROMPTS = [[1000 * i + j for j in range(80)] for i in range(12)]

PROCESS = """
import sys
sys.path[:] = {path!r}
import kvcache
from kvcache import stores
from support.prefixes import make_cache, serve
cache = make_cache("hybrid")
prefix = kvcache.PrefixCache(cache, fingerprint="m", store=stores.open({url!r}), secret=b"secret", timeout=30)
print(serve(prefix, cache, list(range(100)), range(100, 120)))
assert prefix.close(30)
"""


@pytest.fixture(params=["folder", "server", "cluster"])
def url(request, tmp_path):
    if request.param == "folder":
        yield f"dir:{tmp_path}/store"
        return
    servers.need()
    if request.param == "cluster":
        with servers.cluster(tmp_path) as nodes:
            yield f"{servers.url_of(nodes)}?timeout=30"
    else:
        with Server(tmp_path / "server") as server:
            yield f"{server.url}?timeout=30"


def test_the_first_answer_of_a_second_process_is_a_hit(url):
    """It has the rows that the first one computed, generated tokens' too; `serve` compares them."""
    matched = []
    for _ in range(2):
        code = PROCESS.format(path=sys.path, url=url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        matched.append(int(done.stdout))
    assert matched == [0, 96]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "cluster"])
@pytest.mark.filterwarnings("ignore")
def test_trouble_in_the_middle_of_work(tmp_path, kind):
    """Two caches serve requests of eight threads while nodes are killed, started, stopped and go on; all are right."""
    servers.need()
    with servers.cluster(tmp_path) if kind == "cluster" else Server(tmp_path / "server") as started:
        nodes = started if kind == "cluster" else [started]
        address = servers.url_of(nodes) if kind == "cluster" else nodes[0].url
        made = []
        for _ in range(2):
            cache = make_cache(capacity=40 * 16 * 2, num_threads=1)
            store = stores.open(f"{address}?timeout=0.2")
            made.append((cache, kvcache.PrefixCache(cache, fingerprint="m", store=store, timeout=0.2)))
        ended, served = threading.Event(), []

        def work(number):
            choose = np.random.default_rng(number)
            while not ended.is_set():
                cache, prefix = made[choose.integers(2)]
                try:
                    matched = serve(prefix, cache, PROMPTS[choose.integers(12)] + [-int(choose.integers(5)) - 1])
                except kvcache.CacheFullError:
                    continue
                served.append(matched)

        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(work, number) for number in range(8)]
            try:
                for node in nodes * 2:
                    for action in (node.kill, node.start, node.stop, node.go_on):
                        action()
                        before = len(served)
                        until(lambda before=before: len(served) > before + 50)
            finally:
                ended.set()
            for each in running:
                each.result(LONG)
        assert sum(matched > 0 for matched in served) > len(served) // 4
        for cache, prefix in made:
            assert cache.sequences == []
            cache.validate()
            assert prefix.stats.store.corrupt == 0
            prefix.close(1)
