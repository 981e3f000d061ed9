"""examples/server: clients over HTTP, many at once, on one cache."""

import contextlib
import http.client
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcache import CacheFullError
from kvcache.models.fingerprint import fingerprint
from kvcache.runner import Llama

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
FOLDER = Path(__file__).parents[2] / "examples" / "server"
MODEL = FOLDER.parent / "model"
KEYS = {
    "sk-one": {"name": "one", "quota": 128, "max_requests": 20},
    "sk-two": {"name": "two", "max_requests": 2},
}
CANCELLED = 'server_requests_total{reason="cancelled",tenant="one"}'
PROMPTS = [f"{speaker}:\nWhat say you to {n}?\n\n" for n in range(5) for speaker in ("ROMEO", "JULIET")]


@pytest.fixture(scope="module")
def server_module():
    before = [*sys.path]
    spec = importlib.util.spec_from_file_location("example_server", FOLDER / "server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def model():
    return Llama.load(MODEL)


class Client:
    """Speaks to a server of this process."""

    def __init__(self, port, server=None):
        self.port, self.server = port, server
        self.engine = server and server.engine

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
            if not (self.engine.running or self.engine.waiting or self.engine.cache.sequences):
                return
            time.sleep(0.01)
        raise AssertionError("requests are left")


def stream(response):
    """Return the pieces of an event stream, and check how it ends."""
    blocks = response.read().decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@contextlib.contextmanager
def serving(module, model, capacity=1 << 14, keys=KEYS):
    engine = module.Engine(model, capacity, fingerprint(MODEL))
    server = module.HttpServer(engine, module.Server(engine, keys).app(), log_level="error")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield Client(listening.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join()
    assert not engine.is_alive


@pytest.fixture(scope="module")
def client(server_module, model):
    with serving(server_module, model) as one:
        yield one


def test_ten_clients_at_once(client):
    """They get what each gets alone, greedily and by chance, and share a batch."""
    bodies = [
        {"prompt": prompt, "max_tokens": 24, "temperature": temperature, "seed": i}
        for i, prompt in enumerate(PROMPTS)
        for temperature in (0, 0.8)
    ]
    alone = [client.ask("/v1/completions", body) for body in bodies]
    client.engine.prefix.clear()
    with ThreadPoolExecutor(10) as pool:
        together = [*pool.map(lambda body: client.ask("/v1/completions", body), bodies)]
    for (status, one), (_, other) in zip(alone, together, strict=True):
        assert status == 200, one
        assert one["choices"] == other["choices"]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"] == 24
        assert one["usage"]["total_tokens"] == 24 + one["usage"]["prompt_tokens"]
    client.wait_until_idle()
    client.engine.cache.validate()


def test_a_prompt_that_begins_as_another(client):
    prompt = "A long beginning, which is the same for both. " * 3
    client.complete(prompt + "One")
    body = client.complete(prompt + "Two")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) - 16
    other = {"prompt": prompt + "Two", "temperature": 0}
    _, foreign = client.ask("/v1/completions", other, key="sk-two")
    assert foreign["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert foreign["choices"] == body["choices"]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_stream_has_the_same_text(client, is_chat):
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    given = {"messages": [{"role": "user", "content": "Who is there?"}]} if is_chat else {"prompt": "ROMEO:\n"}
    given |= {"max_tokens": 40, "temperature": 0.7, "seed": 3}
    _, whole = client.ask(path, given)
    connection, response = client.open(path, {**given, "stream": True, "stream_options": {"include_usage": True}})
    with contextlib.closing(connection):
        assert response.headers["content-type"].startswith("text/event-stream")
        *pieces, last = stream(response)
    assert len(pieces) > 10
    assert last["usage"]["completion_tokens"] == 40
    assert last["choices"] == []
    texts = [one["choices"][0]["delta"]["content"] if is_chat else one["choices"][0]["text"] for one in pieces]
    [choice] = whole["choices"]
    assert "".join(texts) == (choice["message"]["content"] if is_chat else choice["text"])
    assert [one["choices"][0]["finish_reason"] for one in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {one["id"] for one in pieces} == {last["id"]}


def test_stop(client):
    text = client.complete("ROMEO:\n", max_tokens=80)["choices"][0]["text"]
    stop = text[30:35]
    for stops in (stop, ["no such text", stop]):
        [choice] = client.complete("ROMEO:\n", max_tokens=80, stop=stops)["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
    for stops in ([stop, text[28:35]], [text[28:35], stop]):  # both end with the same token
        [choice] = client.complete("ROMEO:\n", max_tokens=80, stop=stops)["choices"]
        assert choice["text"] == text[:28]
    connection, response = client.open(
        "/v1/completions",
        {"prompt": "ROMEO:\n", "max_tokens": 80, "temperature": 0, "stop": stop, "stream": True},
    )
    with contextlib.closing(connection):
        assert "".join(one["choices"][0]["text"] for one in stream(response)) == text[: text.index(stop)]


def test_a_long_stop_costs_no_more_than_the_text(server_module):
    """Each token is compared with as much of a stop sequence as there is text, because all requests share a thread."""

    class Sequence(bytes):
        num_taken = 0

        def __getitem__(self, part):
            Sequence.num_taken += 1
            return super().__getitem__(part)

    stop = Sequence(b"ab" + b"c" * 100_000)
    text = sys.modules[server_module.Engine.__module__].Text((stop,))
    assert "".join(text.add(token)[0] for token in b"xaxabxab") + text.end() == "xaxabxab"
    assert Sequence.num_taken <= 8 * 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away(client, is_stream):
    """Its sequence is freed, and the others go on."""
    before = client.metric(CANCELLED) if is_stream else None
    body = {"prompt": "ROMEO:\n", "max_tokens": 1900, "stream": is_stream}
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-one\r\nContent-Length: {len(data)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        while not client.engine.running:
            time.sleep(0.005)
        if is_stream:
            assert connection.recv(100)
        request = client.engine.running[0]
        assert client.complete("JULIET:\n")["choices"][0]["finish_reason"] == "length"
    client.wait_until_idle()
    assert request.num_generated < 1900
    assert request.seq_id is None
    for _ in range(1000):
        if before is None or client.metric(CANCELLED) == before + 1:
            return
        time.sleep(0.01)
    raise AssertionError("it was not counted")


def test_more_requests_than_a_key_may_have(client):
    body = {"prompt": "ROMEO:\n", "max_tokens": 1500, "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            connection, response = client.open("/v1/completions", body, key="sk-two")
            stack.enter_context(contextlib.closing(connection))
            assert response.status == 200
        status, answer = client.ask("/v1/completions", body, key="sk-two")
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        client.complete("ROMEO:\n")  # of another key
    client.wait_until_idle()
    for _ in range(1000):  # the application notices a little later
        status, _ = client.ask("/v1/completions", {"prompt": "ROMEO:\n"}, key="sk-two")
        if status == 200:
            break
        time.sleep(0.01)
    assert status == 200


def test_a_full_cache_lets_requests_wait(server_module, model):
    """Room for two of ten: all get what they get alone."""
    with serving(server_module, model, 512, None) as client:
        bodies = [{"prompt": prompt, "max_tokens": 150, "temperature": 0} for prompt in PROMPTS]
        alone = [client.ask("/v1/completions", body) for body in bodies]
        with ThreadPoolExecutor(10) as pool:
            together = [*pool.map(lambda body: client.ask("/v1/completions", body), bodies)]
        assert [(status, one["choices"]) for status, one in together] == [(s, one["choices"]) for s, one in alone]
        assert client.metric("server_num_preempted") > 0
        status, body = client.ask("/v1/completions", {"prompt": "x" * 400, "max_tokens": 100})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        client.wait_until_idle()
        client.engine.cache.validate()


BAD = {
    "no key": ({}, {"key": "sk-none"}, 401, None),
    "no JSON": (b"{", {}, 400, None),
    "no object": ([1], {}, 400, None),
    "no prompt": ({}, {}, 400, "prompt"),
    "an empty prompt": ({"prompt": ""}, {}, 400, "prompt"),
    "two prompts": ({"prompt": ["a", "b"]}, {}, 400, "prompt"),
    "tokens that are none": ({"prompt": [1, 256]}, {}, 400, "prompt"),
    "half a character": (b'{"prompt": "\\ud800"}', {}, 400, "prompt"),
    "another model": ({"prompt": "a", "model": "gpt"}, {}, 404, "model"),
    "no tokens": ({"prompt": "a", "max_tokens": 0}, {}, 400, "max_tokens"),
    "too many tokens": ({"prompt": "a", "max_tokens": 2048}, {}, 400, "max_tokens"),
    "a long prompt": ({"prompt": "a" * 3000}, {}, 400, "prompt"),
    "a negative temperature": ({"prompt": "a", "temperature": -1}, {}, 400, "temperature"),
    "no temperature": (b'{"prompt": "a", "temperature": NaN}', {}, 400, "temperature"),
    "an empty stop": ({"prompt": "a", "stop": [""]}, {}, 400, "stop"),
    "a seed that is none": ({"prompt": "a", "seed": 0.5}, {}, 400, "seed"),
    "a stream that is none": ({"prompt": "a", "stream": 1}, {}, 400, "stream"),
    "several answers": ({"prompt": "a", "n": 2}, {}, 400, "n"),
    "no logprobs but the token's own": ({"prompt": "a", "logprobs": 0}, {}, 400, "logprobs"),
    "an unknown field": ({"prompt": "a", "top_k": 2}, {}, 400, "top_k"),
    "a chat's field": ({"prompt": "a", "messages": []}, {}, 400, "messages"),
    "options of no stream": ({"prompt": "a", "stream_options": {}}, {}, 400, "stream_options"),
    "an option of streams that is none": (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, {}, 400, "include_usage",
    ),
    "an unknown option of streams": (
        {"prompt": "a", "stream": True, "stream_options": {"chunks": 2}}, {}, 400, "stream_options",
    ),
    "half a character in a field's name": (b'{"prompt": "a", "\\ud800": 1}', {}, 400, "?"),
    "a body of 2 MB": ({"prompt": "a" * (2 << 20)}, {}, 413, None),
    "no such page": ({}, {"path": "/v1/none"}, 404, None),
    "another method": (None, {"path": "/v1/completions", "method": "GET"}, 405, None),
    "no messages": ({"messages": []}, {"path": "/v1/chat/completions"}, 400, "messages"),
    "a long chat": (
        {"messages": [{"role": "user", "content": "a" * 3000}], "max_tokens": 1}, {"path": "/v1/chat/completions"}, 400,
        "messages",
    ),
    "a message without a role": ({"messages": [{"content": "a"}]}, {"path": "/v1/chat/completions"}, 400, "messages"),
    "a part without a text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        {"path": "/v1/chat/completions"}, 400, "messages",
    ),
    "a name that is none": (
        {"messages": [{"role": "user", "content": "a", "name": 1}]}, {"path": "/v1/chat/completions"}, 400, "messages",
    ),
    "an unknown field of a message": (
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        {"path": "/v1/chat/completions"}, 400, "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(client, name):
    body, options, wanted, param = BAD[name]
    client.wait_until_idle()
    before = client.engine.num_generated, client.engine.prefix.stats, client.engine.cache.stats()
    options = {"path": "/v1/completions", **options}
    status, answer = client.ask(options.pop("path"), body, **options)
    assert (status, answer["error"]["param"]) == (wanted, param)
    assert answer["error"]["message"]
    assert answer["error"]["type"].endswith("_error")
    assert (client.engine.num_generated, client.engine.prefix.stats, client.engine.cache.stats()) == before


@pytest.mark.parametrize(
    ("num_prompt", "wanted", "said"),
    [
        (2048, {}, "prompt: the prompt has 2048 tokens and the context 2048, which leaves no room for an answer"),
        (3000, {"max_tokens": 9}, "prompt: the prompt has 3000 tokens and the context 2048, which leaves no room for "),
        (2000, {"max_tokens": 49}, "max_tokens=49: the prompt has 2000 tokens and the context 2048, which leaves 48 "),
    ],
)
def test_what_is_too_long_is_said(client, num_prompt, wanted, said):
    status, answer = client.ask("/v1/completions", {"prompt": "a" * num_prompt, **wanted})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["message"].startswith(said)


def test_bad_requests_take_no_place(client):
    """A key of two requests at once is served after any number of bad ones."""
    for _ in range(3):
        body = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": 1}}
        assert client.ask("/v1/completions", body, key="sk-two")[0] == 400
    client.wait_until_idle()
    assert client.ask("/v1/completions", {"prompt": "a", "max_tokens": 2}, key="sk-two")[0] == 200


def test_a_client_that_goes_away_in_its_request(client, caplog):
    """The log has no traceback."""
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-one\r\n")
        connection.sendall(b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.1)
    for _ in range(20):
        client.ask("/health")
        time.sleep(0.01)
    assert not [record for record in caplog.records if record.exc_info]


def test_models_health_and_metrics(client):
    assert client.ask("/health") == (200, {"status": "ok"})
    assert client.ask("/v1/models")[1]["data"][0]["id"] == "kvcache-example"
    client.complete("ROMEO:\n", max_tokens=3)
    assert client.metric("server_num_generated") >= 3
    assert client.metric("server_running") == 0
    assert client.metric('kvcache_prefix_requests_total{tenant="one"}') >= 1
    assert client.metric('server_requests_total{reason="length",tenant="one"}') >= 1


def test_a_file_without_keys_serves_nobody(server_module, model):
    with serving(server_module, model, 512, {}) as client:
        assert client.ask("/v1/completions", {"prompt": "a"})[0] == 401
        assert client.ask("/v1/completions", {"prompt": "a"}, key="")[0] == 401


def test_a_client_that_goes_away_when_its_request_is_put_back(server_module, model, monkeypatch):
    """The cache is full, and the client of the youngest request leaves in the same step: nothing more is generated."""
    engine = server_module.Engine(model, 256, fingerprint(MODEL))
    options = sys.modules[server_module.Engine.__module__].Options(
        max_tokens=100, temperature=0, top_p=1, stop=(), seed=1
    )
    stays, leaves = (server_module.Request(engine.prefix, [token] * 100, options) for token in (65, 66))
    ended = {one: threading.Event() for one in (stays, leaves)}
    for one, event in ended.items():
        one.deliver = lambda text, reason, event=event: event.set() if reason else None

    def forward(*args, **options):
        try:
            return model.forward(*args, **options)
        except CacheFullError:
            engine.cancel(leaves)
            raise

    monkeypatch.setattr(engine, "model", SimpleNamespace(config=model.config, forward=forward))
    for one in ended:
        engine.submit(one)
    engine.start()
    assert ended[stays].wait(100)
    engine.stop()
    assert engine.num_preempted == 1
    assert stays.num_generated == 100
    assert leaves.num_generated < 100
    assert not ended[leaves].is_set()


def test_clients_that_go_away_while_the_server_stops(server_module, model):
    """Each request that is still wanted gets its end, whichever requests are cancelled meanwhile."""
    engine = server_module.Engine(model, 256, fingerprint(MODEL))
    options = sys.modules[server_module.Engine.__module__].Options(1, 0, 1, (), 1)
    first, leaves, stays = (server_module.Request(engine.prefix, [65], options) for _ in range(3))
    reasons = []
    first.deliver = lambda text, reason: engine.cancel(leaves)
    leaves.deliver = lambda text, reason: None
    stays.deliver = lambda text, reason: reasons.append(reason)
    for one in (first, leaves, stays):
        engine.submit(one)
    engine.stop()
    engine.start()
    engine.close()
    assert reasons == ["shutdown"]


def test_quotas_keep_whole_blocks(server_module, model):
    """There is room for the longest request, however much of other tenants' quotas is kept."""
    keys = {f"sk-{i}": {"name": str(i), "quota": 17} for i in range(10)}
    with serving(server_module, model, 512, keys) as client:
        for i in range(10):
            client.complete(f"{i}{48 * 'x'}", max_tokens=1, key=f"sk-{i}")
        room = client.engine.max_tokens - 2
        assert client.complete("No", max_tokens=room, key="sk-0")["usage"]["completion_tokens"] == room
        client.engine.cache.validate()


def test_a_step_that_fails(server_module, model, monkeypatch):
    """Its requests get an error, and the next ones are served."""
    with serving(server_module, model, 512, None) as client:
        broken = SimpleNamespace(config=model.config, forward=lambda *_, **__: 1 / 0)
        monkeypatch.setattr(client.engine, "model", broken)
        status, body = client.ask("/v1/completions", {"prompt": "ROMEO:\n"})
        assert (status, body["error"]["type"]) == (500, "server_error")
        monkeypatch.undo()
        client.complete("ROMEO:\n")


def test_answers_that_take_longer_than_a_shutdown(server_module, model, monkeypatch):
    """They say that the server is shutting down, as a whole answer and as a stream."""
    monkeypatch.setattr(server_module, "GRACE", 0.5)
    with ThreadPoolExecutor() as pool, serving(server_module, model) as client:
        slow = SimpleNamespace(config=model.config, forward=lambda *a, **k: time.sleep(0.02) or model.forward(*a, **k))
        monkeypatch.setattr(client.engine, "model", slow)
        body = {"prompt": "ROMEO:\n", "max_tokens": 200}
        whole = pool.submit(client.ask, "/v1/completions", body)
        connection, response = client.open("/v1/completions", {**body, "stream": True})
        with contextlib.closing(connection):
            while len(client.engine.running) < 2:
                time.sleep(0.01)
            client.server.should_exit = True
            data = response.read().decode()
    assert json.loads(data.split("data: ")[-1])["error"]["message"] == "the server is shutting down"
    status, answer = whole.result()
    assert (status, answer["error"]["message"]) == (503, "the server is shutting down")


def test_a_key_of_other_letters(server_module, model):
    """A client sends its UTF-8 as it is."""
    with serving(server_module, model, keys={"schlüssel": {"name": "one"}}) as client:
        assert client.ask("/v1/models", key="schlüssel".encode().decode("latin-1"))[0] == 200
        assert client.ask("/v1/models", key="schlussel")[0] == 401


@pytest.mark.parametrize(
    ("arguments", "keys", "said"),
    [
        (["no-folder"], None, "there is no no-folder"),
        (["--port", "65536"], None, "--port 65536: must be from 0 to 65535"),
        (["--capacity", "0"], None, "capacity=0: must be at least 1"),
        (["--capacity", "33"], None, "--capacity 33 leaves no room for a request beside all quotas"),
        (["--keys", "no-file"], None, "no-file"),
        ([], "{", "is no JSON"),
        ([], [], "must have an object of keys"),
        ([], {"sk": {}}, "must have an object of keys"),
        ([], {"sk": {"name": "a", "limit": 1}}, "a has a field 'limit', which there is not"),
        ([], {"sk": {"name": "a", "quota": "5"}}, "quota and max_requests of a must be whole numbers"),
        ([], {"sk": {"name": "a", "quota": -1}}, "quota and max_requests of a must be whole numbers"),
        ([], {"sk": {"name": "a", "quota": 1 << 20}}, "leaves no room for a request beside all quotas"),
        ([], {"sk": {"name": "a"}, "pk": {"name": "a"}}, "two keys have the same name"),
    ],
)
def test_options_that_serve_nobody(server_module, tmp_path, capsys, arguments, keys, said):
    if keys is not None:
        file = tmp_path / "keys.json"
        file.write_text(keys if isinstance(keys, str) else json.dumps(keys))
        arguments = [*arguments, "--keys", str(file)]
    with pytest.raises(SystemExit) as caught:
        server_module.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_said_before_anything_else(server_module, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            server_module.main(["--port", str(port)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in said
    assert "startup complete" not in said


def test_it_shuts_down(tmp_path):
    """With an answer on its way, which is completed or says why not; nothing is printed but the log."""
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    command = [sys.executable, "-W", "error", FOLDER / "server.py", "--port", "0", "--keys", tmp_path / "keys.json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log = []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"running on http://127.0.0.1:(\d+)", line):
                break
        client = Client(int(found[1]))
        connection, response = client.open(
            "/v1/completions", {"prompt": "ROMEO:\n", "max_tokens": 60, "temperature": 0, "stream": True}
        )
        with contextlib.closing(connection):
            process.send_signal(signal.SIGTERM)
            data = response.read().decode()
        assert data.endswith("data: [DONE]\n\n") or "shutting down" in data
        rest = process.stderr.read()
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert "Traceback" not in "".join([*log, rest])
