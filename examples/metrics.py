"""Serve the counters of a PrefixCache and its KVCache to Prometheus, while the scene of prefix.py is played."""

import dataclasses
import runpy
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

    import kvcache
    from kvcache.runner import Llama
except ModuleNotFoundError as error:
    sys.exit(f"metrics.py: there is no module {error.name}; run: pip install -e . prometheus-client")

# Fields that may fall, because they say what is there now. All others only grow.
PRESENT = {"blocks", "checkpoints", "checkpoint_bytes", "sequences", "reading", "writing"}
PRESENT |= {"live_slots", "wasted_slots", "blocks_in_use", "blocks_free", "retained", "evictable_slots"}

# A name that two families have, such as `hits`, has one text for both.
HELP = {
    "batches": "batches that were committed",
    "aborted": "batches that were aborted",
    "tokens": "tokens that were committed, or that prompts asked for",
    "rows_expired": "rows that windows dropped, of all layer groups",
    "rows_moved": "rows that compactions moved",
    "rows_copied": "rows that were copied before a change",
    "rows_evicted": "rows of kept blocks that were dropped to make room",
    "compactions": "times that rows were moved together",
    "blocks_opened": "blocks for which memory was taken",
    "blocks_reused": "free blocks that were used again",
    "blocks_returned": "blocks whose memory was given back",
    "live_slots": "slots that hold a token, of all layer groups",
    "wasted_slots": "slots that wait for a compaction",
    "blocks_in_use": "blocks that hold tokens",
    "blocks_free": "blocks whose memory waits to be used again",
    "retained": "blocks that are kept for later prompts",
    "evictable_slots": "slots that kept blocks alone hold, and that others can have",
    "requests": "prompts that were asked for",
    "hits": "prompts that began as an earlier one, or keys that the store had in time",
    "matched": "tokens of prompts that were there",
    "reused": "matched tokens that were computed behind other tokens",
    "fetched": "tokens that came from the store",
    "blocks": "blocks that are known",
    "sequences": "prompts that run",
    "checkpoints": "recurrent states that are kept",
    "checkpoint_bytes": "bytes of these states",
    "misses": "keys that the store did not have in time",
    "errors": "calls of the store that failed",
    "timeouts": "reads that were not answered in time",
    "corrupt": "values that were not what was stored",
    "dropped": "values that were not written",
    "written": "values that were written",
    "bytes_read": "bytes that the store handed out",
    "bytes_written": "bytes that the store took",
    "reading": "whether the store is asked; 0 while it is left alone after failures",
    "writing": "whether the store is written to; 0 while it is left alone after failures",
}


class CacheCollector(Collector):
    """Reads the counters whenever Prometheus asks: nothing is counted twice, and a request costs nothing.

    Prefix caches are told apart by the label `tenant`.
    """

    def __init__(self, cache: kvcache.KVCache, tenants: dict[str, kvcache.PrefixCache]) -> None:
        self.cache, self.tenants = cache, tenants

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvcache_bytes", "bytes that the cache holds", value=self.cache.nbytes)
        for name, value in self.cache.stats().items():
            yield make(f"kvcache_{name}", name, [((), value)])
        stats = {tenant: dataclasses.asdict(prefix.stats) for tenant, prefix in self.tenants.items()}
        stores = {tenant: one.pop("store") for tenant, one in stats.items()}
        yield from self.collect_fields("kvcache_prefix", stats)
        yield from self.collect_fields("kvcache_store", {tenant: one for tenant, one in stores.items() if one})

    def collect_fields(self, prefix: str, stats: dict[str, dict[str, float]]) -> Iterator[Metric]:
        for name in next(iter(stats.values()), {}):
            values = [((tenant,), one[name]) for tenant, one in stats.items() if one[name] is not None]
            yield make(f"{prefix}_{name}", name, values, ["tenant"])


def make(metric: str, name: str, values: list, labels: tuple | list = ()) -> Metric:
    kind = GaugeMetricFamily if name in PRESENT else CounterMetricFamily
    family = kind(metric, HELP[name], labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def main() -> None:
    play = runpy.run_path(str(Path(__file__).with_name("prefix.py")))
    model = Llama.load(play["MODEL"])
    prefix = play["new_prefix_cache"](model)
    registry = CollectorRegistry()
    registry.register(CacheCollector(prefix.cache, {"everybody": prefix}))
    server, _ = start_http_server(0, "127.0.0.1", registry)  # any free port: a service chooses one
    for speaker in play["SPEAKERS"]:
        play["reply"](model, prefix, play["SCENE"] + speaker)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        print(answer.read().decode(), end="")  # what Prometheus reads
    server.shutdown()


if __name__ == "__main__":
    main()
