"""kvcache.server answers what clients send by default: bodies as they were recorded, in bodies.json, and LangChain."""

import contextlib
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from support.repository_model import MODEL  # noqa: E402 - they need those
from support.serving import served, serving, stream  # noqa: E402

BODIES = json.loads(Path(__file__).with_name("bodies.json").read_text())


@pytest.fixture(scope="module")
def client():
    model = served.load(MODEL)
    model[1].chat_template += "{# <tool_call> #}"  # calls as Hermes writes them
    with serving(model, 4096) as one:
        runs = one.server.server.served
        submit = runs.submit  # the answers of this model have no end
        runs.submit = lambda prompt, ask, max_tokens, *rest: submit(prompt, ask, min(max_tokens, 160), *rest)
        yield one


@pytest.mark.parametrize("name", BODIES)
def test_recorded_bodies(client, name):
    body = BODIES[name]
    if "response_format" in body:
        pytest.importorskip("llguidance")
    connection, response = client.open(f"/v1/{'completions' if 'prompt' in body else 'chat/completions'}", body)
    with contextlib.closing(connection):
        assert response.status == 200, response.read()
        if body.get("stream"):
            pieces = stream(response)
            usage = pieces.pop()["usage"] if "stream_options" in body else None
            choices = [one["choices"][0] for one in pieces]
            texts = ["".join(one["delta"].get("content", "") for one in choices)]
        else:
            whole = json.loads(response.read())
            usage, choices = whole["usage"], whole["choices"]
            texts = [one["text"] if "prompt" in body else one["message"]["content"] for one in choices]
    assert choices[-1]["finish_reason"] in ("stop", "length")
    assert len(texts) == body.get("n", 1)
    assert all(texts)
    assert usage is None or usage["completion_tokens"] >= len(texts)
    if "json_schema" in str(body):
        assert json.loads(texts[0]).keys() == {"a"}


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer ", "Bearer None"])
def test_models_without_keys(authorization):
    """Open WebUI sends an empty key where it has none."""
    import http.client

    with serving(served.load(MODEL), 512, None) as one:
        connection = http.client.HTTPConnection("127.0.0.1", one.port)
        with contextlib.closing(connection):
            connection.request("GET", "/v1/models", headers={"Authorization": authorization} if authorization else {})
            assert json.loads(connection.getresponse().read())["data"][0]["id"] == "a-model"


@pytest.mark.full  # LangChain has many dependencies
def test_langchain(client):
    langchain = pytest.importorskip("langchain_openai")
    pytest.importorskip("llguidance")
    from pydantic import BaseModel

    class Answer(BaseModel, extra="forbid"):
        """Answers a question."""

        yes: bool

    options = {"model": "a-model", "api_key": "sk-one", "temperature": 0, "max_retries": 0}
    chat = langchain.ChatOpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", **options)
    whole = chat.invoke([("system", "Be brief."), ("human", "Who?")])
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    pieces = [*chat.stream([("system", "Be brief."), ("human", "Who?")])]
    assert "".join(one.content for one in pieces) == whole.content
    both = chat.batch(["Who?", "Why?"])
    assert [one.content for one in both] == [chat.invoke(one).content for one in ("Who?", "Why?")]

    bound = chat.bind_tools([Answer], tool_choice="required")
    called = bound.invoke("Is it?")
    [call] = called.tool_calls
    assert (call["name"], call["args"].keys()) == ("Answer", {"yes"})
    history = [("human", "Is it?"), called, {"role": "tool", "tool_call_id": call["id"], "content": "No."}]
    assert chat.bind_tools([Answer]).invoke(history).response_metadata["finish_reason"]
    *_, last = bound.stream("Is it?")
    assert last is not None
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Answer, method=method).invoke("Is it?"), Answer)
