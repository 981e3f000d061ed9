"""Serve the counters of a PrefixCache and its KVCache to Prometheus, while the scene of prefix.py is played."""

import runpy
import sys
import urllib.request
from pathlib import Path

try:
    from prometheus_client import CollectorRegistry, start_http_server

    from kvcache.runner import Llama
    from kvcache.server.metrics import CacheCollector
except ModuleNotFoundError as error:
    sys.exit(f"metrics.py: there is no module {error.name}; run: pip install -e . prometheus-client")


def main() -> None:
    play = runpy.run_path(str(Path(__file__).with_name("prefix.py")))
    model = Llama.load(play["MODEL"])
    prefix = play["new_prefix_cache"](model)
    registry = CollectorRegistry()
    registry.register(CacheCollector(prefix.cache, {("everybody",): prefix}))
    server, _ = start_http_server(0, "127.0.0.1", registry)  # any free port: a service chooses one
    for speaker in play["SPEAKERS"]:
        play["reply"](model, prefix, play["SCENE"] + speaker)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        print(answer.read().decode(), end="")  # what Prometheus reads
    server.shutdown()


if __name__ == "__main__":
    main()
