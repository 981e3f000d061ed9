"""Counters for Prometheus: of a cache and its prefix caches, and of a server's requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache import KVCache, PrefixCache

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

    Prefix caches are told apart by the values of `labels`.
    """

    def __init__(
        self, cache: KVCache, prefixes: dict[tuple[str, ...], PrefixCache], labels: Sequence[str] = ("tenant",)
    ) -> None:
        self.cache, self.prefixes, self.labels = cache, prefixes, labels

    def collect(self) -> Iterator[Metric]:
        """Yield what the counters are now."""
        yield GaugeMetricFamily("kvcache_bytes", "bytes that the cache holds", value=self.cache.nbytes)
        for name, value in self.cache.stats().items():
            yield _family(f"kvcache_{name}", name, [((), value)])
        stats = {of: dataclasses.asdict(prefix.stats) for of, prefix in self.prefixes.items()}
        stores = {of: one.pop("store") for of, one in stats.items()}
        yield from self._fields("kvcache_prefix", stats)
        yield from self._fields("kvcache_store", {of: one for of, one in stores.items() if one})

    def _fields(self, prefix: str, stats: dict[tuple[str, ...], dict[str, float]]) -> Iterator[Metric]:
        for name in next(iter(stats.values()), {}):
            values = [(of, one[name]) for of, one in stats.items() if one[name] is not None]
            yield _family(f"{prefix}_{name}", name, values, self.labels)


def _family(metric: str, name: str, values: list[Any], labels: Sequence[str] = ()) -> Metric:
    kind = GaugeMetricFamily if name in PRESENT else CounterMetricFamily
    family = kind(metric, HELP[name], labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


SECONDS = 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600
TOKENS = 1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144


class RequestMetrics:
    """What a server counts of its requests. Names that begin with ``vllm:`` mean what they mean there.

    Its dashboards choose a `model` by the label ``model_name``.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, ["model_name"], registry=registry).labels(model)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, what, ["model_name"], buckets=buckets, registry=registry).labels(model)

        labels = "model_name", "finished_reason", "tenant"
        self.ended = Counter("vllm:request_success", "answers that ended, by the reason", labels, registry=registry)
        what = "requests that were refused, by the status"
        self.refused = Counter("kvcache_server_refused", what, ["status"], registry=registry)
        self.prompt_tokens = counter("vllm:prompt_tokens", "tokens of prompts")
        self.generated = counter("vllm:generation_tokens", "tokens that were generated")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "from the request to its first token", SECONDS)
        self.between = histogram("vllm:inter_token_latency_seconds", "from a token to the next", SECONDS)
        self.queued = histogram("vllm:request_queue_time_seconds", "until it was the request's turn", SECONDS)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "from the request to an answer's end", SECONDS)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "tokens of a prompt", TOKENS)
        self.answer_length = histogram("vllm:request_generation_tokens", "tokens of an answer", TOKENS)


class Gauges(Collector):
    """Reads numbers whenever Prometheus asks. Those of vLLM's names are about a `model`."""

    def __init__(self, of_now: dict[str, tuple[str, Callable[[], float]]], model: str) -> None:
        self._of_now, self._model = of_now, model

    def collect(self) -> Iterator[Metric]:
        """Yield what the numbers are now; one whose name ends in ``_total`` only grows."""
        for name, (what, value) in self._of_now.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            labels = {"model_name": self._model} if name.startswith("vllm:") else {}
            family = kind(name, what, labels=[*labels])
            family.add_metric([*labels.values()], value())
            yield family
