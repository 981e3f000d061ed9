"""The commands of docs/scaling.md, with other ports, and the figures of its table."""

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from support import servers

import kvcache
from kvcache import stores

PAGE = (Path(__file__).resolve().parents[2] / "docs/scaling.md").read_text()
COMMANDS = re.findall(r"^ *```sh\n(.*?)^ *```$", PAGE, re.M | re.S)


def only(commands):
    (command,) = commands
    return command


def shell(command, folder, **options):
    """Run a command of the page with the server's program that is here."""
    program = Path(servers.PROGRAM).name
    command = command.replace("redis-server", program).replace("redis-cli", program.replace("server", "cli"))
    return subprocess.run(["bash", "-c", command], cwd=folder, check=True, capture_output=True, timeout=60, **options)


def test_a_server(tmp_path):
    servers.need()
    command = only(command for command in COMMANDS if "--port 6379" in command)
    port = servers.free_port()
    words = command.replace("6379", str(port)).replace("redis-server", servers.PROGRAM)
    server = subprocess.Popen(["bash", "-c", f"exec {words}"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        store = stores.open(f"valkey://localhost:{port}/0?timeout=30")

        def answers():
            with contextlib.suppress(servers.need().ConnectionError):
                store["a"] = b"value"
                return store["a"] == b"value"

        servers.until(answers)
        client = servers.need().Valkey(port=port)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        limit_user(tmp_path, port)
        server.terminate()
        server.wait()
        assert os.listdir(tmp_path) == [], "nothing is kept on disk"
    finally:
        server.kill()
        server.wait()


def add_user(folder, port):
    command = only(command for command in COMMANDS if "ACL SETUSER" in command)
    shell(command.replace("redis-cli", f"redis-cli -p {port}"), folder)


def limit_user(folder, port):
    """The user of the page can do all that a store does, and neither read nor remove what belongs to others."""
    valkey = servers.need()
    add_user(folder, port)
    store = stores.open(f"valkey://runner:a%20password@localhost:{port}/0?timeout=30")
    store.set_many({"a": b"value", "b": b"value"})
    del store["b"]
    assert store.get_many("ab") == {"a": b"value"}
    assert store.read_many("ab", 3) == {"a": b"val"}
    assert list(store) == ["a"]
    assert "a" in store
    store.clear()
    other = stores.open(f"valkey://runner:a%20password@localhost:{port}/0?prefix=others:&ttl=none&timeout=30")
    for call in (lambda: other["a"], lambda: other.update(a=b""), lambda: other.pop("a")):
        with pytest.raises(valkey.exceptions.NoPermissionError):
            call()


@pytest.mark.slow
def test_a_cluster(tmp_path):
    servers.need()
    command = only(command for command in COMMANDS if "--cluster create" in command)
    # The port of the bus is 10,000 higher than the node's.
    ports = [port for port in dict.fromkeys(servers.free_port() for _ in range(100)) if port < 55_000][:3]
    command = re.sub(r"\b700([123])\b", lambda found: str(ports[int(found[1]) - 1]), command)
    waits = "".join(f"while ! redis-cli -p {port} ping; do sleep 0.1; done; " for port in ports)
    command = command.replace("redis-cli", f"{waits}redis-cli")
    try:
        shell(command, tmp_path)
        store = stores.open(f"valkey+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}?timeout=30")

        def works():
            with contextlib.suppress(servers.need().exceptions.ClusterDownError):
                store.set_many({str(i): b"value" for i in range(50)})
                return len(store) == 50

        servers.until(works)  # the nodes take a moment to agree
        for port in ports:
            add_user(tmp_path, port)
        store = stores.open(f"valkey+cluster://runner:a%20password@127.0.0.1:{ports[2]}?timeout=30")
        assert len(store.get_many(map(str, range(50)))) == 50
        store.clear()
        assert len(store) == 0
    finally:
        for port in ports:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                shell(f"redis-cli -p {port} shutdown nosave || true", tmp_path)


def test_the_table():
    """Bytes and tokens per second follow from shape, type and link."""
    shapes = {"Llama 3.1 8B": (32, 8, 128), "Llama 3.1 70B": (80, 8, 128)}
    types = ("f16", "q8_0", "q4_0")
    table = dict(re.findall(r"^\| (Llama .*?) \| (.*) \|$", PAGE, re.M))
    sizes = {
        name: [kvcache.KVCache(*shape, dtype=dtype, max_seq_len=1).most_bytes(1) for dtype in types]
        for name, shape in shapes.items()
    }
    assert table == {name: " | ".join(f"{size:,}" for size in each) for name, each in sizes.items()}
    f16, _, q4_0 = (f"{1e9 / 8 / size:,.0f}" for size in sizes["Llama 3.1 8B"])
    assert f"{f16} tokens a second of the 8B model in `f16`, and {q4_0} in `q4_0`" in " ".join(PAGE.split())
