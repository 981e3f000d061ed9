"""kvcache serve as its operator sees it: limits of time and size, signals, logs, restarts, the folder that is given."""

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.repository_model import MODEL  # noqa: E402 - they need those
from support.serving import running, served, serving  # noqa: E402

from kvcache.server import command, log  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return served.load(MODEL)


def connect(client, data):
    connection = socket.create_connection(("127.0.0.1", client.port))
    connection.sendall(data)
    connection.settimeout(30)
    return connection


def test_requests_that_do_not_come(model):
    """Half of the headers end the connection, half of the body a 408; others are served meanwhile."""
    with serving(model, 512, None, limits={"read_timeout": 0.5}) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
        half = [connect(client, b""), connect(client, head)]
        bodies = [connect(client, head + b"\r\n{") for _ in range(20)]
        assert client.ask("/health")[0] == 200
        for connection in half:
            with contextlib.closing(connection):
                assert connection.recv(100) == b""
        for connection in bodies:
            with contextlib.closing(connection):
                assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        kept, response = client.open("/health")
        response.read()
        with contextlib.closing(kept):  # a connection that was used may ask again, and not ask for long
            kept.request("GET", "/health")
            assert kept.getresponse().read()
            kept.sock.sendall(b"GET /he")
            kept.sock.settimeout(30)
            assert kept.sock.recv(100) == b""


@pytest.mark.parametrize("is_stream", [False, True])
def test_answers_that_take_too_long(model, monkeypatch, is_stream):
    forward = model[0].forward
    monkeypatch.setattr(model[0], "forward", slowed(forward))
    with serving(model, 4096, None, limits={"timeout": 0.5}) as client:
        body = {"prompt": "ROMEO:\n", "max_tokens": 1000, "stream": is_stream}
        status, answer = client.ask("/v1/completions", body)
        error = json.loads(answer.split("data: ")[-1])["error"] if is_stream else answer["error"]
        assert (status, error["code"]) == (200 if is_stream else 504, "timeout")
        client.wait_until_idle()


def slowed(forward):
    import functools

    @functools.wraps(forward)
    def wait(*args, **options):
        time.sleep(0.02)
        return forward(*args, **options)

    return wait


def test_a_request_that_takes_too_long_to_prepare(model, monkeypatch):
    """It counts until its thread has ended, and the key's next one waits for that."""
    go_on = threading.Event()
    with serving(model, 512, None, limits={"timeout": 0.3}) as client:
        [tenant] = client.server.server.tenants
        monkeypatch.setattr(client.server.server.served, "prompts_of", lambda *_: go_on.wait(100) and [])
        for _ in range(2):
            assert client.ask("/v1/completions", {"prompt": "a"})[0] == 504
            assert (tenant.preparing.locked(), tenant.num_requests) == (True, 1)
        assert client.ask("/health")[0] == 200
        go_on.set()
        for _ in range(1000):
            if not tenant.preparing.locked() and tenant.num_requests == 0:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("the request still counts")


def test_a_client_that_does_not_read(model):
    """Its answer waits in its own connection; others go on, and it ends with the time for an answer."""
    with serving(model, 1 << 14, None, limits={"timeout": 3}) as client:
        body = json.dumps({"prompt": "a", "max_tokens": 2000, "stream": True, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        slow = [connect(client, head.encode() + body) for _ in range(5)]
        assert client.complete("ROMEO:\n", max_tokens=8)["usage"]["completion_tokens"] == 8
        client.wait_until_idle()
        for connection in slow:
            connection.close()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_never_reads(model, is_stream):
    """Its connection ends with the time for an answer, and what was written to it is dropped."""
    with serving(model, 1 << 14, None, limits={"timeout": 3}) as client, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", client.port))
        connections = client.server.server_state.connections
        wait_until(lambda: connections)
        for one in connections:
            one.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps({"prompt": "a", "n": 4, "max_tokens": 20, "stream": is_stream, "logprobs": 20}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_until(lambda: not connections)
        assert not client.server.server.answering
        client.wait_until_idle()


def wait_until(is_so):
    for _ in range(3000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


def test_nothing_is_logged_of_clients_that_read_too_little():
    """An answer ends in time, with an error for one that reads slowly; long names fill what sockets hold."""
    with running("--name", 100_000 * "x", "--timeout", 1) as (process, client, _):
        body = json.dumps({"prompt": "a", "max_tokens": 1900, "stream": True}).encode()
        for num, how in enumerate(["leaves", "reads slowly", "never reads"], 1):
            with socket.socket() as connection:
                if how != "reads slowly":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", client.port))
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                assert connection.recv(100)
                if how == "reads slowly":
                    assert b"the answer took longer than 1 s" in last_of(connection)
                elif how == "never reads":
                    client.wait_until_metric("vllm:e2e_request_latency_seconds_count", num)
            client.wait_until_metric("vllm:e2e_request_latency_seconds_count", num)
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert [line for line in said.splitlines() if "stopping" not in line] == []


def last_of(connection):
    """Read a stream to its end, and return that."""
    connection.settimeout(30)
    last = b""
    while not last.endswith(b"0\r\n\r\n"):
        time.sleep(0.01)
        data = connection.recv(1 << 20)
        assert data, last
        last = (last + data)[-300:]
    return last


def test_more_answers_than_turns(model):
    """The answers of one request take turns, and those that are not read keep none."""
    with serving(model, 1 << 14, None, limits={"max_running": 2}) as client:
        connections = []
        for _ in range(3):
            body = {"prompt": "a", "max_tokens": 1500, "stream": True, "logprobs": 20}
            connections.append(client.open("/v1/completions", body)[0])
        body = client.complete(["a", "b", "c"], n=3, max_tokens=4)
        assert body["usage"]["completion_tokens"] == 36
        for connection in connections:
            connection.close()
        status, body = client.ask("/v1/completions", {"prompt": ["a", "b"], "n": 65})
        assert (status, body["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("is_stream", [False, True])
def test_more_answers_than_may_wait(model, is_stream):
    """A request is refused before its first answer begins, or not at all: its other answers wait, however many wait."""
    with serving(model, 1 << 14, None, limits={"max_running": 1, "max_waiting": 0}) as client:
        body = {"prompt": "a", "n": 5, "max_tokens": 3, "stream": is_stream}
        status, answer = client.ask("/v1/completions", body)
        assert status == 200, answer
        if is_stream:
            assert answer.endswith("data: [DONE]\n\n"), answer
        else:
            assert len(answer["choices"]) == 5


def test_scripts_of_other_pages(model):
    with serving(model, 512, None, limits={"origins": ("https://chat.example",)}) as client:
        connection = http.client.HTTPConnection("127.0.0.1", client.port)
        headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", "/v1/chat/completions", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        connection.close()


def test_what_is_refused_says_when_to_try_again(model, monkeypatch):
    monkeypatch.setattr(model[0], "forward", slowed(model[0].forward))
    limits = {"max_running": 1, "max_waiting": 0}
    with serving(model, 4096, None, limits=limits) as client:
        connection, response = client.open("/v1/completions", {"prompt": "a", "max_tokens": 500, "stream": True})
        with contextlib.closing(connection):
            assert response.read(10)
            other, refused = client.open("/v1/completions", {"prompt": "a"})
            with contextlib.closing(other):
                assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert client.metric('kvcache_server_refused_total{status="503"}') == 1
        assert client.metric("vllm:generation_tokens_total") > 0  # while the answer goes on
        assert client.ask("/v1/nothing")[0] == 404
        assert client.metric('kvcache_server_refused_total{status="404"}') == 1
        client.wait_until_idle()


def test_metrics_have_vllms_names(model):
    with serving(model, 512, None) as client:
        client.complete("ROMEO:\n", max_tokens=5)
        _, text = client.ask("/metrics")
        vllms = [line for line in text.splitlines() if line.startswith("vllm:")]
        assert all('model_name="a-model"' in line for line in vllms)
        assert client.metric("vllm:prompt_tokens_total") == 7
        assert client.metric("vllm:generation_tokens_total") == 5
        for name, times in (
            ("time_to_first_token_seconds", 1), ("inter_token_latency_seconds", 4), ("request_queue_time_seconds", 1),
            ("e2e_request_latency_seconds", 1), ("request_prompt_tokens", 1), ("request_generation_tokens", 1),
        ):  # fmt: skip
            assert client.metric(f"vllm:{name}_count") == times
        client.complete("ROMEO:\n", max_tokens=1, n=4)
        assert client.metric("vllm:e2e_request_latency_seconds_count") == 5


@pytest.mark.parametrize("is_json", [False, True])
def test_a_line_for_each_request(model, is_json):
    """It has no text of the prompt."""
    lines, formatter = [], log.JsonFormatter() if is_json else logging.Formatter("%(message)s")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(formatter.format(record))
    log.logger.addHandler(handler)
    log.logger.setLevel(logging.INFO)
    try:
        with serving(model, 512, None, limits={"logs_requests": True}) as client:
            client.complete("A secret", max_tokens=5)
            client.ask("/v1/completions", {"prompt": "A secret", "n": -1})
    finally:
        log.logger.removeHandler(handler)
    assert len(lines) == 2
    assert "secret" not in "".join(lines)
    if is_json:
        ended, refused = map(json.loads, lines)
        assert (ended["prompt"], ended["generated"], ended["reason"]) == (8, 5, "length")
        assert (refused["status"], refused["path"]) == (400, "/v1/completions")
    else:
        assert "prompt=8 cached=0 generated=5" in lines[0]


def test_what_a_client_cannot_forge(model, caplog):
    """A line has the path as it came: without blanks, and without a terminal's sequences."""
    caplog.set_level(logging.INFO, log.logger.name)
    with serving(model, 512, None, limits={"logs_requests": True}) as client:
        assert client.ask("/v1/%1b%5b2J%20status=200")[0] == 404
    assert "path=/v1/%1b%5b2J%20status=200 status=404" in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_a_log_that_nobody_reads():
    """Lines are dropped, and neither requests nor the end wait for a reader."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, bytes(1000)):
            pass
    os.set_blocking(writing, True)
    with running("--log-requests", stderr=writing) as (process, client, _):
        for _ in range(3):
            assert client.complete("ROMEO:\n", max_tokens=2)["choices"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    os.close(reading)
    os.close(writing)


def test_all_lines_are_json():
    """Also a warning, and what an interrupt ends; one interrupt ends with its status, too."""
    for times in (1, 2):
        with running("--log-json", "--select", "2k") as (process, client, said):
            connection, response = client.open("/v1/completions", {"prompt": "a", "n": 64, "stream": True})
            with contextlib.closing(connection):
                assert response.read(10)
                for _ in range(times):
                    process.send_signal(signal.SIGINT)
                    time.sleep(0.3)
                rest = process.stdout.read()
            assert process.wait(60) == 130
        logged = [*(line for line in said if line.startswith("{")), *rest.splitlines()]
        lines = [json.loads(line) for line in logged]
        assert all(line["message"] for line in lines)
        assert "warning" in [line["level"] for line in lines]  # it may be written behind the first lines


def test_what_it_says_at_the_start_and_at_the_end():
    """What is served, where, in how much memory, and a command that works; two interrupts end it."""
    with running("--name", "mine") as (process, client, said):
        text = "".join(said)
        assert text.startswith(f"mine on http://127.0.0.1:{client.port}/v1, for anybody\n")
        assert "room for 32,768 tokens of all requests, 64.0 MiB of the " in " ".join(text.split())
        tried = subprocess.run(["bash", "-c", said[-1].removeprefix("try: ")], capture_output=True, text=True)
        assert json.loads(tried.stdout)["choices"]
        body = {"prompt": "a", "max_tokens": 2000, "n": 64, "stream": True}  # of more seconds than it has to end
        connection, response = client.open("/v1/completions", body)
        with contextlib.closing(connection):
            assert response.read(10)
            process.send_signal(signal.SIGINT)
            assert "stopping" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
        assert process.wait(30) == 130
    assert "Traceback" not in rest


@pytest.mark.parametrize("ending", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_prompts_outlive_a_restart(tmp_path, ending):
    prompt = "A long beginning, which is the same. " * 8
    url = f"dir:{tmp_path}/prompts"
    answers = []
    for _ in range(2):
        with running("--store", url) as (process, client, _):
            answers.append(client.complete(prompt, max_tokens=8))
            if ending == signal.SIGKILL and len(answers) == 1:  # nothing is flushed: what is written by then is there
                client.wait_until_metric('kvcache_store_written_total{model="model",tenant="all"}', 1)
                time.sleep(0.5)
            process.send_signal(ending)
            process.wait(60)
    assert answers[0]["choices"] == answers[1]["choices"]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers]
    assert cached[0] == 0
    assert cached[1] > len(prompt) // 2


def test_another_model_finds_nothing_in_a_store(model, tmp_path):
    """Its weights are a part of each name."""
    import shutil

    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    from safetensors.numpy import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    identities = set()
    for folder in (MODEL, other):
        prefix = served.kept_prompts(served.load(folder)[0], folder, str(tmp_path / "store"), dtype=None, capacity=512)
        identities.add(prefix.identity)
        prefix.close()
    assert len(identities) == 2


def test_a_gguf_is_for_llama_cpp(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ValueError, match="kvcache-llama-server serves a GGUF"):
            command.make(command.Options(path))


def test_many_idle_connections(model):
    """A thousand connections that say nothing hold nobody up."""
    with serving(model, 512, None) as client:
        idle = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(500)]
        assert client.complete("ROMEO:\n", max_tokens=5)["usage"]["completion_tokens"] == 5
        for one in idle:
            one.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows limits no files")
def test_more_connections_than_files():
    """The limit of a shell or of systemd, which programs raise themselves, is none."""
    import resource

    _, most = found = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
    with running("--read-timeout", 600) as (_, client, _), contextlib.ExitStack() as idle:
        resource.setrlimit(resource.RLIMIT_NOFILE, found)
        for _ in range(200):
            idle.enter_context(socket.create_connection(("127.0.0.1", client.port)))
        assert client.complete("ROMEO:\n", max_tokens=5)["usage"]["completion_tokens"] == 5


def test_a_fair_share(model, monkeypatch):
    """A key's request does not wait for all that another key has sent before."""
    monkeypatch.setattr(model[0], "forward", slowed(model[0].forward))
    with serving(model, 4096, limits={"max_running": 1}) as client:
        ended = []

        def ask(name, key):
            client.complete(name, key=key, max_tokens=5)
            ended.append(name)

        threads = [threading.Thread(target=ask, args=(f"one {i}", "sk-one")) for i in range(6)]
        for thread in threads:
            thread.start()
        while client.server.server.turns.num_waiting < 5:
            time.sleep(0.01)
        threads.append(threading.Thread(target=ask, args=("two", "sk-two")))
        threads[-1].start()
        for thread in threads:
            thread.join()
    assert ended.index("two") <= 2
