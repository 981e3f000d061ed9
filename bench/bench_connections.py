"""Measure what connections that ask nothing, ask halves or read slowly cost the other clients of kvcache serve.

python bench/bench_connections.py
python bench/bench_connections.py --idle 5000 --rounds 9

In each round, clients ask alone, and then beside each kind of connection. A slow reader takes a byte a second of a long
answer, which is complete by the time that the clients ask.
"""

import os
import re
import socket
import statistics
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

from figures import Table, keep, quotients
from program import Arguments
from serving_peers import asks_over_http, listening

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
LONG = b'{"prompt": "a", "max_tokens": %d, "stream": true, "logprobs": 20, "ignore_eos": true, "temperature": 0}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"


class Server:
    """A server that listens, as others see it."""

    def __init__(self, process, address):
        self._process, self.address = process, address
        host, _, port = address.removeprefix("http://").rpartition(":")
        self._where = host, int(port)

    def beside_the_cache(self):
        """Return the MiB that it holds beside rows, which grow with each prompt."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024 - self._metric("kvcache_bytes") / 2**20

    def processor_seconds(self):
        """Return the seconds that processors have worked for it."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_idle(self):
        """Return whether no request is computed."""
        return not (self._metric("vllm:num_requests_running") or self._metric("vllm:num_requests_waiting"))

    def _metric(self, name):
        with urllib.request.urlopen(f"{self.address}/metrics") as lines:
            return float(re.search(rf"^{name} (.*)$", lines.read().decode(), re.MULTILINE)[1])

    @contextmanager
    def connections(self, count, data):
        """Keep so many connections on which data was sent; `data` returns that of each."""
        with ExitStack() as stack:
            made = [stack.enter_context(socket.create_connection(self._where)) for _ in range(count)]
            for i, one in enumerate(made):
                one.sendall(data(i))
            yield made

    @contextmanager
    def readers(self, count, tokens):
        """Keep so many clients who read a byte a second of an answer."""
        body, is_over = LONG % tokens, threading.Event()

        def read():
            while not is_over.wait(1):
                for one in made:
                    one.recv(1)

        with self.connections(count, lambda _: HEAD % len(body) + b"\r\n" + body) as made:
            time.sleep(1)
            while not self.is_idle():
                time.sleep(0.1)
            reader = threading.Thread(target=read)
            reader.start()
            try:
                yield
            finally:
                is_over.set()
                reader.join()


def measure(server, args):
    """Return seconds of all requests, to the first token, and of processors, and MiB, of each round, by the kind."""
    kinds = {
        "alone": lambda: server.connections(0, bytes),
        f"{args.idle:,} idle": lambda: server.connections(args.idle, lambda _: b""),
        f"{args.half:,} half requests": lambda: server.connections(
            args.half, lambda i: HEAD % 99 + (b"\r\n{" if i % 2 else b"")
        ),
        f"{args.slow:,} slow readers": lambda: server.readers(args.slow, args.long),
    }
    ask = asks_over_http(
        f"{server.address}/v1/completions", time.perf_counter,
        lambda prompt, count: {"prompt": prompt, "max_tokens": count},
        lambda piece: [0] if piece["choices"][0]["text"] else [],
    )  # fmt: skip
    found = {kind: [] for kind in kinds}
    for round in range(args.rounds + 1):
        for kind, connected in kinds.items():
            with connected():
                begun = server.processor_seconds()
                answers = [
                    ask([[*f"{round} {i} {j}".encode()] for j in range(args.clients)], args.new)
                    for i in range(args.times)
                ]
                worked = server.processor_seconds() - begun
                took, first = sum(one.took for one in answers), [s for one in answers for s in one.first]
                found[kind].append((took, statistics.median(first), worked, server.beside_the_cache()))
    return found


def report(found, args):
    """Print a line for each kind, and return them as rows. The first round only counts for memory."""
    columns = {
        "beside": "<18",
        "requests/s": ">10.1f",
        "first token ms": ">14.1f",
        "rate": ">6.2f",
        "latency": ">7.2f",
        "CPU": ">5.2f",
    }
    table = Table(columns | {"MiB, first round": ">16.1f", "second": ">7.1f", "last": ">7.1f"}, "connections")
    alone = [*zip(*found["alone"][1:], strict=True)]
    for kind, rounds in found.items():
        took, first, worked, held = zip(*rounds[1:], strict=True)
        rate = args.clients * args.times / statistics.median(took)
        pairs = (alone[0], took), (first, alone[1]), (worked, alone[2])
        faster, later, more = (statistics.median(quotients(*pair)) for pair in pairs)
        figures = rate, 1e3 * statistics.median(first), faster, later, more, rounds[0][3], held[0], held[-1]
        table.line(kind, *figures, name=kind, rate=rate, seconds=statistics.median(first), quotient=faster)
    return table.rows


def main():
    p = Arguments(__doc__)
    p.add_argument("--model", type=Path, default=MODEL, help="a folder that kvcache serve takes")
    p.number("--idle", 1000, "connections that ask nothing")
    p.number("--half", 200, "requests of which a part is sent: of the header or of the body")
    p.number("--slow", 100, "clients who read a byte a second")
    p.number("--long", 500, "tokens of an answer that is read slowly")
    p.number("--clients", 4, "ordinary ones, who ask at once")
    p.number("--times", 8, "that each of them asks in a round")
    p.number("--new", 32, "tokens of an answer")
    p.number("--rounds", 5, "after a first one, which warms up")
    p.kept()
    args = p.parse_args()
    command = [sys.executable, "-m", "kvcache", "serve", str(args.model), "--port", "0", "--max-running", "128"]
    with listening([*command, "--capacity", "256k"]) as (process, address):
        found = measure(Server(process, address), args)
    print(f"{args.clients} clients, {args.new} tokens, medians of {args.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    print("rate, latency and CPU time: over those alone, of the same round; MiB of the server beside its cache")
    rows = report(found, args)
    if args.json:
        keep(args.json, args.command, rows)


if __name__ == "__main__":
    main()
