"""Runs kvcache.server in this process, for clients over HTTP."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time

from support.repository_model import MODEL

from kvcache.server import application, listening
from kvcache.server import model as served

KEYS = {
    "sk-one": {"name": "one", "quota": 128, "max_requests": 20, "pinned": 256},
    "sk-two": {"name": "two", "max_requests": 2},
}


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
        pattern = rf'^{re.escape(name)}(?:{{model_name="[^"]*"}})? (.*)$'
        return float(re.search(pattern, text, re.MULTILINE)[1])

    def wait_until_metric(self, name, least):
        for _ in range(2000):
            if self.metric(name) >= least:
                return
            time.sleep(0.01)
        raise AssertionError(f"{name} is below {least}")

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
def serving(model, capacity=1 << 14, keys=KEYS, limits=None, **arguments):
    runs = served.Served("a-model", *model, capacity=capacity, dtype="f32", **arguments)
    limits = application.Limits(**(limits or {}))
    http_server = listening.HttpServer(application.Server(runs, keys, limits), log_level="error")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        thread = threading.Thread(target=http_server.run, args=([taken],))
        thread.start()
        try:
            while not http_server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield Client(taken.getsockname()[1], http_server)
        finally:
            http_server.should_exit = True
            thread.join()
    assert not runs.engine.is_alive


@contextlib.contextmanager
def running(*arguments, stderr=subprocess.STDOUT):
    """Run the command, and yield its process, a client, and what it has printed so far."""
    full = [sys.executable, "-m", "kvcache", "serve", str(MODEL), "--port", "0", *map(str, arguments)]
    with subprocess.Popen(full, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("try: "):
                    break
            port = re.search(r"http://127.0.0.1:(\d+)/v1", "".join(said))
            assert port, said
            yield process, Client(int(port[1])), said
        finally:
            process.kill()
