"""examples/metrics.py: what Prometheus reads is what `stats` says."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcache

pytest.importorskip("prometheus_client")
SCRIPT = Path(__file__).parents[2] / "examples" / "metrics.py"


def test_the_scene_is_counted():
    output = subprocess.run([sys.executable, SCRIPT], capture_output=True, encoding="utf-8", check=True).stdout
    read = dict(line.rsplit(" ", 1) for line in output.splitlines() if not line.startswith("#"))
    assert float(read['kvcache_prefix_requests_total{tenant="everybody"}']) == 3
    assert float(read['kvcache_prefix_hits_total{tenant="everybody"}']) == 2
    assert float(read["kvcache_retained"]) == float(read['kvcache_prefix_blocks{tenant="everybody"}']) > 0
    assert "kvcache_store" not in output
    assert "# HELP kvcache_blocks_free blocks whose memory waits to be used again" in output


def test_stores_and_tenants():
    cache = kvcache.KVCache(1, 1, 8, None, max_sequences=None)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model", store={})
    tenants = {("one",): prefix, ("another",): prefix.tenant(b"another")}
    prefix.acquire([1, 2, 3])
    found = {}
    for family in runpy.run_path(str(SCRIPT))["CacheCollector"](cache, tenants).collect():
        found |= {(sample.name, sample.labels.get("tenant")): sample.value for sample in family.samples}
    assert found["kvcache_prefix_requests_total", "one"] == 1
    assert found["kvcache_prefix_requests_total", "another"] == 0
    assert found["kvcache_store_reading", "one"] == 1
    assert found["kvcache_store_hits_total", "another"] == 0


def test_only_what_may_fall_is_a_gauge():
    """A prefix, a state, a forgotten prompt: no counter has fallen."""
    cache = kvcache.KVCache(1, 1, 8, None, max_sequences=None, block_size=2)
    prefix = kvcache.PrefixCache(cache, fingerprint="a model", state_bytes=4)
    collector = runpy.run_path(str(SCRIPT))["CacheCollector"](cache, {("everybody",): prefix})
    rows = np.ones((4, 1, 8), np.float32)
    seq_id, _ = prefix.acquire([1, 2, 3, 4])
    with cache.batch(positions=range(4), seq_ids=[seq_id] * 4) as batch:
        batch.put(0, rows, rows)
    prefix.checkpoint(seq_id, [1, 2, 3, 4], b"1234")
    before = [*collector.collect()]
    held = {sample.name: sample.value for family in before for sample in family.samples}
    assert (held["kvcache_prefix_checkpoints"], held["kvcache_prefix_checkpoint_bytes"]) == (1, 4)
    prefix.release(seq_id, [1, 2, 3, 4])
    prefix.forget([1, 2, 3, 4])
    cache.compact()
    after = [*collector.collect()]
    fell = {
        family.name: family.type
        for family, later in zip(before, after, strict=True)
        for sample, at_last in zip(family.samples, later.samples, strict=True)
        if at_last.value < sample.value
    }
    assert {"kvcache_prefix_checkpoints", "kvcache_prefix_checkpoint_bytes"} <= fell.keys()
    assert {*fell.values()} == {"gauge"}
