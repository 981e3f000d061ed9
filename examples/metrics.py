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
    family = kind(metric, f"`{name}` of kvcache's stats", labels=labels)
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
