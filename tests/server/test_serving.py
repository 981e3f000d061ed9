"""kvcache.server: clients over HTTP, many at once, on one engine."""

import contextlib
import functools
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.repository_model import MODEL  # noqa: E402 - they need those
from support.serving import KEYS, Client, served, serving, stream  # noqa: E402

from kvcache import CacheFullError  # noqa: E402
from kvcache.server import command, listening, text  # noqa: E402

CANCELLED = 'vllm:request_success_total{finished_reason="abort",model_name="a-model",tenant="one"}'
PROMPTS = [f"{speaker}:\nWhat say you to {n}?\n\n" for n in range(5) for speaker in ("ROMEO", "JULIET")]


@pytest.fixture(scope="module")
def model():
    return served.load(MODEL)


@pytest.fixture(scope="module")
def client(model):
    with serving(model) as one:
        yield one


@pytest.fixture
def slow(model, monkeypatch):
    forward = model[0].forward

    @functools.wraps(forward)
    def wait(*args, **options):
        time.sleep(0.02)
        return forward(*args, **options)

    monkeypatch.setattr(model[0], "forward", wait)


@pytest.mark.slow  # test_ten_clients_some_of_whom_go_away is its shorter form
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
    client.cache.validate()


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
    if is_chat:
        assert [one["choices"][0]["delta"].get("role") for one in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    choices = [one["choices"][0] for one in pieces]
    texts = [one["delta"].get("content", "") if is_chat else one["text"] for one in choices]
    [choice] = whole["choices"]
    assert "".join(texts) == (choice["message"]["content"] if is_chat else choice["text"])
    assert [one["choices"][0]["finish_reason"] for one in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {one["id"] for one in pieces} == {last["id"]}


def test_a_base_url_without_v1(client):
    for path, said in [("/models", "there is no route /models: the base_url of clients ends in /v1"), ("/", "route /")]:
        status, body = client.ask(path)
        assert status == 404
        assert body["error"]["message"].endswith(said)


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


def test_a_long_stop_costs_no_more_than_the_text():
    """Each token is compared with as much of a stop sequence as there is text, because all requests share a thread."""

    class Sequence(str):
        num_taken = 0

        def __getitem__(self, part):
            Sequence.num_taken += 1
            return super().__getitem__(part)

    stop = Sequence("ab" + "c" * 100_000)
    shown = text.Text(text.byte_tokenizer(), (stop,))
    assert "".join(shown.add(token)[0] for token in b"xaxabxab") + shown.end()[0] == "xaxabxab"
    assert Sequence.num_taken <= 8 * 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away(client, slow, is_stream):
    """Its sequence is freed, and the others go on."""
    before = client.metric(CANCELLED) if is_stream else None
    body = {"prompt": "ROMEO:\n", "max_tokens": 1900, "stream": is_stream}
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-one\r\nContent-Length: {len(data)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        while not client.server.server.answering:
            time.sleep(0.005)
        if is_stream:
            assert connection.recv(100)
        [call] = client.server.server.answering
        assert client.complete("JULIET:\n")["choices"][0]["finish_reason"] == "length"
    client.wait_until_idle()
    assert len(call.choices[0].request.tokens) < 1900
    for _ in range(1000):
        if before is None or client.metric(CANCELLED) == before + 1:
            return
        time.sleep(0.01)
    raise AssertionError("it was not counted")


def test_ten_clients_some_of_whom_go_away(model):
    """Whole answers and streams, of which each client leaves some: the others are right, and nothing is left behind."""
    with serving(model, 1024, keys=None) as client:
        wanted = [client.complete(prompt, max_tokens=20)["choices"][0]["text"] for prompt in PROMPTS]

        def play(i):
            choose, found = random.Random(i), []
            for _ in range(2):
                which, is_stream = choose.randrange(len(PROMPTS)), choose.random() < 0.7
                body = {"prompt": PROMPTS[which], "max_tokens": 20, "temperature": 0, "stream": is_stream}
                if not is_stream:
                    found.append((which, client.ask("/v1/completions", body)[1]["choices"][0]["text"]))
                    continue
                connection, response = client.open("/v1/completions", body)
                with contextlib.closing(connection):
                    if choose.random() < 0.5:
                        response.read(choose.randrange(1, 2000))
                        continue
                    found.append((which, "".join(one["choices"][0]["text"] for one in stream(response))))
            return found

        with ThreadPoolExecutor(10) as pool:
            found = [answer for answers in pool.map(play, range(10)) for answer in answers]
        assert 5 < len(found) < 20
        assert found == [(which, wanted[which]) for which, _ in found]
        client.wait_until_idle()
        client.cache.validate()


def test_more_requests_than_a_key_may_have(client, slow):
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


@pytest.mark.slow  # test_engine.py has the same of an engine
def test_a_full_cache_lets_requests_wait(model):
    """Room for two of ten: all get what they get alone."""
    with serving(model, 512, None) as client:
        bodies = [{"prompt": prompt, "max_tokens": 100, "temperature": 0} for prompt in PROMPTS]
        alone = [client.ask("/v1/completions", body) for body in bodies]
        with ThreadPoolExecutor(10) as pool:
            together = [*pool.map(lambda body: client.ask("/v1/completions", body), bodies)]
        assert [(status, one["choices"]) for status, one in together] == [(s, one["choices"]) for s, one in alone]
        assert client.metric("vllm:num_preemptions_total") > 0
        status, body = client.ask("/v1/completions", {"prompt": "x" * 400, "max_tokens": 100})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        client.wait_until_idle()
        client.cache.validate()


BAD = {
    "no key": ({}, {"key": "sk-none"}, 401, None),
    "no JSON": (b"{", {}, 400, None),
    "no object": ([1], {}, 400, None),
    "no prompt": ({}, {}, 400, "prompt"),
    "an empty prompt": ({"prompt": ""}, {}, 400, "prompt"),
    "two prompts, one of which is none": ({"prompt": ["a", 7]}, {}, 400, "prompt"),
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
    "no answers": ({"prompt": "a", "n": 0}, {}, 400, "n"),
    "an unknown field": ({"prompt": "a", "mirostat": 2}, {}, 400, "mirostat"),
    "a chat's field": ({"prompt": "a", "messages": [1]}, {}, 400, "messages"),
    "options of no stream": ({"prompt": "a", "stream_options": {}}, {}, 400, "stream_options"),
    "an option of streams that is none": (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}}, {}, 400, "include_usage",
    ),
    "an unknown option of streams": (
        {"prompt": "a", "stream": True, "stream_options": {"chunks": 2}}, {}, 400, "stream_options",
    ),
    "half a character in a field's name": (b'{"prompt": "a", "\\ud800": 1}', {}, 400, "?"),
    "a body of 9 MB": ({"prompt": "a" * (9 << 20)}, {}, 413, None),
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
        {"messages": [{"role": "user", "content": "a", "mood": "sad"}]},
        {"path": "/v1/chat/completions"}, 400, "messages",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(client, name):
    body, options, wanted, param = BAD[name]
    client.wait_until_idle()
    before = client.engine.stats(), client.engine.prefix.stats, client.cache.stats()
    options = {"path": "/v1/completions", **options}
    status, answer = client.ask(options.pop("path"), body, **options)
    assert (status, answer["error"]["param"]) == (wanted, param)
    assert answer["error"]["message"]
    assert answer["error"]["type"].endswith("_error")
    assert (client.engine.stats(), client.engine.prefix.stats, client.cache.stats()) == before


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


@pytest.mark.parametrize("field", ["temperature", "stream", "x" * 1000])
@pytest.mark.parametrize("value", ['"' + 100_000 * "x" + '"', 900 * "[" + 900 * "]", "1" + 4000 * "0"])
def test_values_are_quoted_in_part(client, field, value):
    status, answer = client.ask("/v1/completions", f'{{"prompt": "a", "{field}": {value}}}'.encode())
    assert (status, answer["error"]["param"]) == (400, field[:80])
    assert len(answer["error"]["message"]) < 200


def test_an_error_of_the_server(client, monkeypatch):
    """The client gets no traceback."""
    monkeypatch.setattr(client.server.server.served, "prompts_of", lambda _: 1 / 0)
    status, answer = client.ask("/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["message"], answer["error"]["type"]) == (500, "the server failed", "server_error")


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
    assert client.ask("/v1/models")[1]["data"][0]["id"] == "a-model"
    client.complete("ROMEO:\n", max_tokens=3)
    assert client.metric("vllm:generation_tokens_total") >= 3
    assert client.metric("vllm:num_requests_running") == 0
    assert client.metric('kvcache_prefix_requests_total{model="a-model",tenant="one"}') >= 1
    assert client.metric(CANCELLED.replace("abort", "length")) >= 1


def test_a_client_that_goes_away_when_its_request_is_put_back(model, monkeypatch):
    """The cache is full, and the client of the youngest request leaves in the same step: nothing more is generated."""
    runs = served.Served("a-model", *model, capacity=256)
    options = {"max_new_tokens": 150, "do_sample": False}
    feed, has_both = runs.engine._packed.feed, threading.Event()

    def note(parts):
        has_both.wait(100)
        try:
            return feed(parts)
        except CacheFullError:
            leaves.cancel()
            raise

    monkeypatch.setattr(runs.engine._packed, "feed", note)
    with runs.engine as engine:
        stays, leaves = (engine.submit([token] * 30, **options) for token in (65, 66))
        has_both.set()
        stays.result(100)
        leaves.result(100)
        assert engine.stats()["put_back"] == 1
    assert len(stays.tokens) == 150
    assert len(leaves.tokens) < 150
    assert leaves.finish_reason == "cancelled"


def test_quotas_keep_whole_blocks(model):
    """There is room for the longest request, however much of other tenants' quotas is kept."""
    keys = {f"sk-{i}": {"name": str(i), "quota": 65} for i in range(5)}
    with serving(model, 1024, keys) as client:
        for i in range(5):
            client.complete(f"{i}{96 * 'x'}", max_tokens=1, key=f"sk-{i}")
        room = client.server.server.served.context - 2
        assert client.complete("No", max_tokens=room, key="sk-0")["usage"]["completion_tokens"] == room
        client.cache.validate()


def test_a_step_that_fails(model, monkeypatch):
    """Its requests get an error, and the next ones are served."""
    with serving(model, 512, None) as client:
        with monkeypatch.context() as patch:
            patch.setattr(model[0], "forward", functools.wraps(model[0].forward)(lambda *_, **__: 1 / 0))
            status, body = client.ask("/v1/completions", {"prompt": "ROMEO:\n"})
        assert (status, body["error"]["type"]) == (500, "server_error")
        client.complete("ROMEO:\n")


def test_many_requests_without_keys(model, slow):
    with serving(model, keys=None) as client, ThreadPoolExecutor(40) as pool:
        answers = [*pool.map(lambda _: client.ask("/v1/completions", {"prompt": "ROMEO:\n"}), range(40))]
        assert [status for status, _ in answers] == 40 * [200]


def test_more_requests_than_may_wait(model, monkeypatch):
    """No pass ends before a request was refused."""
    forward, go_on = model[0].forward, threading.Event()

    @functools.wraps(forward)
    def wait(*args, **options):
        go_on.wait(100)
        return forward(*args, **options)

    with serving(model, 512, None, max_waiting=2) as client, ThreadPoolExecutor(30) as pool:
        monkeypatch.setattr(model[0], "forward", wait)
        asked = [pool.submit(client.ask, "/v1/completions", {"prompt": "ROMEO:\n"}) for _ in range(30)]
        next(as_completed(asked))
        go_on.set()
        answers = [one.result() for one in asked]
        assert {status for status, _ in answers} == {200, 503}
        assert {body["error"]["code"] for status, body in answers if status == 503} == {"overloaded"}
        assert client.ask("/health")[0] == 200


def test_answers_that_take_longer_than_a_shutdown(model, slow, monkeypatch):
    """They say that the server is shutting down, as a whole answer and as a stream, whoever goes away meanwhile."""
    monkeypatch.setattr(listening, "GRACE", 0.5)
    with ThreadPoolExecutor() as pool, serving(model) as client:
        client.server.config.timeout_graceful_shutdown = 100  # however long the clients take to read the error
        body = {"prompt": "ROMEO:\n", "max_tokens": 1000}
        whole = pool.submit(client.ask, "/v1/completions", body)
        leaves, _ = client.open("/v1/completions", {**body, "stream": True})
        connection, response = client.open("/v1/completions", {**body, "stream": True})
        with contextlib.closing(connection):
            while len(client.server.server.answering) < 3:
                time.sleep(0.01)
            client.server.should_exit = True
            leaves.close()
            data = response.read().decode()
    assert json.loads(data.split("data: ")[-1])["error"]["message"] == "the server is shutting down"
    status, answer = whole.result()
    assert (status, answer["error"]["message"]) == (503, "the server is shutting down")


def test_half_a_body_at_a_shutdown(model, monkeypatch, caplog):
    monkeypatch.setattr(listening, "GRACE", 0.5)
    with serving(model, 512, None) as client, socket.create_connection(("127.0.0.1", client.port)) as connection:
        client.server.config.timeout_graceful_shutdown = 100  # however long the client takes to read the error
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        while not client.server.server.readers:
            time.sleep(0.01)
        client.server.should_exit = True
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"the server is shutting down" in answer
    assert not [record for record in caplog.records if record.exc_info]


def test_a_key_of_other_letters(model):
    """A client sends its UTF-8 as it is."""
    names = ("schlüssel", "voilà", "Å")  # the last bytes of two are blanks of Latin-1
    with serving(model, keys={key: {"name": key} for key in names}) as client:
        for key in names:
            assert client.ask("/v1/models", key=key.encode().decode("latin-1"))[0] == 200
        assert client.ask("/v1/models", key="schlussel")[0] == 401


@pytest.mark.parametrize(
    ("arguments", "keys", "said"),
    [
        (["no-folder"], None, "there is no folder no-folder"),
        (["Qwen/Qwen3-0.6B"], None, "run `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"),
        (["no-file.gguf"], None, "there is no no-file.gguf"),
        (["--port", "65536"], None, "65536 is not in the range"),
        (["--capacity", "0"], None, "0 is not in the range"),
        (["--capacity", "129"], None, "129 is not in the range from 130"),
        (["--max-body", "1000"], None, "'1000' is 1,000 bytes, fewer than 1,024: give it as 8MiB"),
        (["--host", "a\udcffb"], None, "--host 'a\\udcffb' is no address and no name"),
        (["--name", "mod\udce8le"], None, "--name 'mod\\udce8le': give a name in UTF-8"),
        (["--adapter", "\udce8=a"], None, "--adapter '\\udce8': give a name in UTF-8"),
        (["--cors-origin", "https://a.example/"], None, "--cors-origin 'https://a.example/': give * or what browsers"),
        (["--cors-origin", "https://A.example"], None, "--cors-origin 'https://A.example': give * or what browsers"),
        (["--store", ""], None, "--store '': give a folder"),
        (["--keys", "no-file"], None, "no-file"),
        ([], "{", "is no JSON"),
        ([], [], "must have an object of keys"),
        ([], {}, "must have one key or more"),
        ([], {" sk": {"name": "a"}}, "none may be empty, or have blanks around it or control characters"),
        ([], {"s\0k": {"name": "a"}}, "none may be empty, or have blanks around it or control characters"),
        ([], "[" * 100_000, "is no JSON"),
        ([], {"sk": {}}, "must have an object of keys"),
        ([], {"sk": {"name": "a", "limit": 1}}, "a has a field 'limit', which there is not"),
        ([], {"sk": {"name": "a", "quota": "5"}}, "quota of a must be a whole number from 0"),
        ([], {"sk": {"name": "a", "quota": -1}}, "quota of a must be a whole number from 0"),
        ([], {"sk": {"name": "a", "quota": 10**30}}, "quota of a must be a whole number from 0"),
        ([], {"sk": {"name": "a", "max_requests": 0}}, "max_requests of a must be a whole number from 1"),
        ([], {"sk": {"name": "a\ud800"}}, "has text that UTF-8 cannot encode"),
        ([], '{"sk": {"name": "a"}, "sk": {"name": "b"}}', "is no JSON of keys: a key or a field is there twice"),
        (
            [],
            {"sk": {"name": "a", "quota": 1 << 20}},
            "--capacity 32768 leaves no room for a request beside quotas and",
        ),
        (
            [],
            {"sk": {"name": "a", "quota": 1 << 14, "pinned": 1 << 14}},
            "32,768 tokens in --keys: give at least 33024",
        ),
        ([], {"sk": {"name": "a"}, "pk": {"name": "a"}}, "two keys have the same name"),
    ],
)
def test_options_that_serve_nobody(tmp_path, capsys, monkeypatch, arguments, keys, said):
    if keys is not None:
        file = tmp_path / "keys.json"
        file.write_text(keys if isinstance(keys, str) else json.dumps(keys))
        arguments = [*arguments, "--keys", str(file)]
    with pytest.raises(SystemExit) as caught:
        run_command(monkeypatch, "--port", "0", *(arguments if arguments[0][0] != "-" else [str(MODEL), *arguments]))
    assert caught.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_port_in_use_is_said_before_anything_else(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            run_command(monkeypatch, str(MODEL), "--port", str(port))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in said
    assert "startup complete" not in said


def test_a_store_of_other_weights(tmp_path):
    """Names of values are those of safetensors; the option is named before the model is loaded."""
    with pytest.raises(ValueError, match=r"^--store prompts: .* has no safetensors"):
        command.make(command.Options(tmp_path, store="prompts"))


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.1"])
def test_addresses_that_asyncio_takes(host):
    command.check_address(host, 0)


def run_command(monkeypatch, *arguments):
    """Run ``kvcache serve`` in this process."""
    from kvcache.tools import cli

    monkeypatch.setattr(sys, "argv", ["kvcache", "serve", *arguments])
    cli.main()


def test_it_shuts_down(tmp_path):
    """With an answer on its way, which is completed or says why not; nothing is printed but the log."""
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    full = [sys.executable, "-m", "kvcache", "serve", MODEL, "--port", "0", "--keys", tmp_path / "keys.json"]
    with subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        log = []
        for line in process.stdout:
            log.append(line)
            if found := re.search(r"http://127.0.0.1:(\d+)", line):
                break
        client = Client(int(found[1]))
        connection, response = client.open(
            "/v1/completions", {"prompt": "ROMEO:\n", "max_tokens": 60, "temperature": 0, "stream": True}
        )
        with contextlib.closing(connection):
            process.send_signal(signal.SIGTERM)
            data = response.read().decode()
        assert data.endswith("data: [DONE]\n\n") or "shutting down" in data
        rest = process.stdout.read()
        assert process.wait(60) in (0, -signal.SIGTERM)
    assert "Traceback" not in "".join([*log, rest])
