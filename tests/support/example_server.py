"""Runs examples/server in this process, for clients over HTTP."""

import contextlib
import http.client
import importlib
import json
import re
import socket
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = {
    "sk-one": {"name": "one", "quota": 128, "max_requests": 20},
    "sk-two": {"name": "two", "max_requests": 2},
}
# As `python -m` from the clone's root, but what is installed comes first.
RUN = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_module('examples.server', run_name='__main__')"


def imported(name):
    """Return a module of the example."""
    before = [*sys.path]
    sys.path.append(str(ROOT))
    try:
        return importlib.import_module(f"examples.server.{name}")
    finally:
        sys.path[:] = before


main, served, server, text = map(imported, ("__main__", "model", "server", "text"))


class Client:
    """Speaks to a server of this process."""

    def __init__(self, port, server=None):
        self.port, self.server = port, server
        self.engine = server and server.server.engine
        self.cache = server and self.engine.prefix.cache

    def open(self, path, body=None, key="sk-one", method=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=100)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(
            method or ("GET" if data is None else "POST"), path, data, {"Authorization": f"Bearer {key}"}
        )
        return connection, connection.getresponse()

    def ask(self, path, body=None, **options):
        connection, response = self.open(path, body, **options)
        with contextlib.closing(connection):
            data = response.read().decode()
            return response.status, json.loads(data) if response.headers["content-type"] == "application/json" else data

    def complete(self, prompt, key="sk-one", **options):
        status, body = self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, **options}, key=key)
        assert status == 200, body
        return body

    def metric(self, name):
        _, text = self.ask("/metrics")
        return float(re.search(rf"^{re.escape(name)} (.*)$", text, re.MULTILINE)[1])

    def wait_until_idle(self):
        for _ in range(2000):
            stats = self.engine.stats()
            if not (stats["running"] or stats["waiting"] or self.cache.sequences):
                return
            time.sleep(0.01)
        raise AssertionError("requests are left")


def stream(response):
    """Return the pieces of an event stream, and check how it ends."""
    blocks = response.read().decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@contextlib.contextmanager
def serving(model, capacity=1 << 14, keys=KEYS, **arguments):
    runs = served.Served("kvcache-example", *model, capacity=capacity, dtype="f32", **arguments)
    http_server = server.HttpServer(server.Server(runs, keys), log_level="error")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=http_server.run, args=([listening],))
        thread.start()
        try:
            while not http_server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield Client(listening.getsockname()[1], http_server)
        finally:
            http_server.should_exit = True
            thread.join()
    assert not runs.engine.is_alive
