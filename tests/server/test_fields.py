"""kvcache.server: each field of a request does what docs/server.md says, as openai's client sends it and reads it."""

import contextlib
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from support.repository_model import MODEL  # noqa: E402 - they need those
from support.serving import served, serving  # noqa: E402

PROMPT = "ROMEO:\nWhat say you"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "who": {"enum": ["Romeo", "Juliet"]}},
    "required": ["age", "who"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("first", "second")
]
# Writes calls as Hermes does, and thoughts where they are switched on.
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<tool_call>{"name": "arguments"}</tool_call>{% endif -%}
{%- for one in messages %}<{{ one.role }}>{{ one.content }}{% for call in one.tool_calls or [] %}
{{- call.function.name }}({{ call.function.arguments.age }}){% endfor %}{{ one.tool_call_id or "" }}{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% if thinks %}<think>{% endif %}{% endif -%}"""


@pytest.fixture(scope="module")
def model():
    loaded = served.load(MODEL)
    loaded[1].chat_template = TEMPLATE
    return loaded


@pytest.fixture(scope="module")
def client(model):
    with serving(model) as one:
        yield one


@pytest.fixture(scope="module")
def api(client):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="sk-one", max_retries=0)


def complete(client, **options):
    return client.complete(PROMPT, **{"max_tokens": 24, **options})["choices"][0]["text"]


def test_drawing(client):
    """Options of generate are what they are there, with transformers' own cache."""
    own, tokenizer = served.load(MODEL)
    own.set_attn_implementation("eager")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    def generated(**options):
        return tokenizer.decode(own.generate(ids, max_new_tokens=24, **options)[0, ids.shape[1] :])

    plain = complete(client)
    assert plain == generated(do_sample=False)
    assert complete(client, repetition_penalty=1.3) == generated(do_sample=False, repetition_penalty=1.3) != plain
    for given in ({"top_k": 3}, {"min_p": 0.3}, {"top_k": 2, "top_p": 0.5}):
        torch.manual_seed(5)
        wanted = generated(do_sample=True, **{"top_k": 0, "top_p": 1.0, "temperature": 0.9} | given)
        assert complete(client, temperature=0.9, seed=5, **{"top_p": 1.0} | given) == wanted
    for none in (0, -1):
        assert complete(client, temperature=0.9, seed=5, top_k=none) == complete(client, temperature=0.9, seed=5)
    assert complete(client, temperature=0.9, seed=-1)


def test_bias_and_penalties(client):
    plain = complete(client)
    token = ord(plain[3])
    assert plain[3] not in complete(client, logit_bias={str(token): -100})
    assert complete(client, logit_bias={"120": 100}) == 24 * "x"
    assert len({*complete(client, frequency_penalty=2, logit_bias={str(i): 40 for i in range(97, 107)})[:10]}) > 5
    assert complete(client, presence_penalty=0.0) == plain
    assert complete(client, presence_penalty=2, frequency_penalty=2) != plain


def test_fields_of_the_other_route(client):
    for path, other, fields in [("completions", "chat/completions", ("messages", "tools")),
                                ("chat/completions", "completions", ("prompt", "echo"))]:  # fmt: skip
        for name in fields:
            status, body = client.ask(f"/v1/{path}", {name: "a"})
            assert (status, body["error"]["param"]) == (400, name)
            assert body["error"]["message"] == f"{name}: is a field of /v1/{other}"


def test_lengths(client, model, monkeypatch):
    text = complete(client)
    monkeypatch.setattr(model[0].generation_config, "eos_token_id", ord(text[4]))
    assert complete(client) == text[: text.index(text[4])] + text[4]
    assert len(complete(client, ignore_eos=True)) == 24
    assert len(complete(client, min_tokens=12)) >= 12
    assert (
        client.ask("/v1/completions", {"prompt": PROMPT, "max_completion_tokens": 3})[1]["usage"]["completion_tokens"]
        == 3
    )
    status, body = client.ask("/v1/completions", {"prompt": PROMPT, "min_tokens": 30, "max_tokens": 20})
    assert (status, body["error"]["param"]) == (400, "min_tokens")
    monkeypatch.setattr(model[0].generation_config, "eos_token_id", None)
    assert client.complete(PROMPT * 100, max_tokens=-1)["usage"]["total_tokens"] == 2048


def test_several_answers_and_prompts(client, api):
    """Each is what it is alone, with the seed that follows; a prompt is computed once."""
    alone = [complete(client, temperature=1, seed=seed) for seed in (3, 4)]
    body = client.complete([PROMPT, "JULIET:\n"], n=2, temperature=1, seed=3, max_tokens=24)
    assert [one["index"] for one in body["choices"]] == [0, 1, 2, 3]
    assert [one["text"] for one in body["choices"][:2]] == alone
    assert body["usage"]["completion_tokens"] == 96
    assert body["usage"]["prompt_tokens"] == len(PROMPT) + len("JULIET:\n")
    stream = api.completions.create(
        model="a-model", prompt=PROMPT, n=2, temperature=1, seed=3, max_tokens=24, stream=True
    )
    texts = ["", ""]
    for piece in stream:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == alone
    status, body = client.ask("/v1/completions", {"prompt": PROMPT, "n": 2, "best_of": 3})
    assert (status, body["error"]["param"]) == (400, "best_of")


def test_echo(client):
    assert complete(client, echo=True) == PROMPT + complete(client)


def test_logprobs_of_completions(api, client, model):
    """They are those of the model, of each token that is shown."""
    answer = api.completions.create(model="a-model", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    [choice] = answer.choices
    ids = model[1](PROMPT + choice.text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model[0](ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [*range(6)]
    np.testing.assert_allclose(found.token_logprobs, wanted.max(-1).values, atol=1e-3)
    for top, row in zip(found.top_logprobs, wanted, strict=True):
        assert {*top} == {chr(i) for i in row.topk(3).indices}
    stream = api.completions.create(
        model="a-model", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3, stream=True
    )
    pieces = [piece.choices[0].logprobs for piece in stream]
    assert [token for one in pieces if one for token in one.tokens] == found.tokens


def test_places_of_tokens_in_a_text():
    """Parts of a character begin where it does; what is no character is one in the text."""
    from kvcache.server.answers import Places

    for tokens, wanted in [
        (["😀".encode()[i : i + 1] for i in range(4)] + [b"Z", b"\xe2", b"Y"], [0, 0, 0, 0, 1, 2, 3]),
        ([b"ab\xf0\x9f", b"\x98\x80c", b"d"], [0, 2, 4]),
        ([b"\x80", b"\x80", b"\xf0", b"\x80", b"", b"!"], [0, 1, 2, 3, 4, 4]),
    ]:
        places = Places()
        assert [places.add(token) for token in tokens] == wanted


def test_likely_parts_of_characters(client):
    """They look alike as text: the likeliest one is told."""
    found = client.complete(PROMPT, max_tokens=1, logprobs=3, logit_bias={"226": 90})["choices"][0]["logprobs"]
    assert max(found["top_logprobs"][0].values()) >= found["token_logprobs"][0]


def test_logprobs_of_calls_that_are_left_out(client, monkeypatch, model):
    call = '<tool_call>{"name": "first", "arguments": {"age": 7}}</tool_call>'
    with forced(monkeypatch, model, call + call + "$"):
        for tail in ({}, {"parallel_tool_calls": False}):
            body = ask_chat(client, tools=TOOLS, stop="$", logprobs=True, max_tokens=200, **tail)
            message, logprobs = body["choices"][0]["message"], body["choices"][0]["logprobs"]["content"]
            assert len(logprobs) == body["usage"]["completion_tokens"]
            assert (len(message["tool_calls"]), message["content"]) == (1 if tail else 2, None)


def test_logprobs_of_chats(api):
    given = {"model": "a-model", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 6, "temperature": 0}
    answer = api.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in found).decode() == answer.choices[0].message.content
    for one in found:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == one.logprob >= one.top_logprobs[1].logprob
    assert api.chat.completions.create(**given, logprobs=False, top_logprobs=0).choices[0].logprobs is None


def test_openais_stream_helper(api):
    """It joins the pieces to one message, whose role is said once."""
    given = {"model": "a-model", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 99, "temperature": 0}
    text = api.chat.completions.create(**given).choices[0].message.content
    given["stop"] = text[12:14]
    whole = api.chat.completions.create(**given)
    with api.chat.completions.stream(**given) as stream:
        found = stream.get_final_completion()
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.content == whole.choices[0].message.content
    assert found.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


EMPTY = {
    "tools": [], "logit_bias": None, "response_format": None, "stop": None, "user": None, "seed": None,
    "functions": None,
    "logprobs": False, "top_logprobs": 0, "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "tool_choice": "none",
    "parallel_tool_calls": None, "stream_options": None, "metadata": None, "service_tier": "auto", "store": False,
    "modalities": ["text"], "suffix": None, "audio": None, "reasoning_effort": "low", "max_tokens": None,
    "best_of": None,
}  # fmt: skip


def test_null_and_empty_mean_left_out(client):
    messages = [
        {"role": "user", "content": "Who?", "name": None},
        {"role": "assistant", "content": "I", "tool_calls": [], "annotations": [], "refusal": None, "audio": None},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "first", "arguments": '{"age": 7}'}},
        ]},
        {"role": "tool", "content": [{"type": "text", "text": "8"}], "tool_call_id": "1"},
    ]  # fmt: skip
    chat = {"messages": messages, "temperature": 0, "max_completion_tokens": 8}
    plain = client.ask("/v1/chat/completions", chat)
    assert plain[0] == 200, plain[1]
    given = {name: value for name, value in EMPTY.items() if name != "best_of"}
    status, body = client.ask("/v1/chat/completions", {**given, **chat})
    assert (status, body["choices"]) == (200, plain[1]["choices"])
    refused = {"suffix": "x", "audio": {}, "functions": [{}], "prediction": {}, "web_search_options": {}}
    for name, value in refused.items():
        status, body = client.ask("/v1/chat/completions", {**chat, name: value})
        assert (status, body["error"]["param"]) == (400, name)


def test_what_a_template_gets(client, model):
    """Calls come with their arguments as an object; a client's own arguments of the template are passed on."""
    messages = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "first", "arguments": '{"age": 7}'}},
        ]},
        {"role": "tool", "content": "8", "tool_call_id": "id"},
    ]  # fmt: skip

    def num_prompt(**options):
        status, body = client.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **options})
        assert status == 200, body
        return body["usage"]["prompt_tokens"]

    head = "<user>Who?<assistant>first(7)<tool>8id"
    assert num_prompt() == len(head + "<assistant>")
    assert num_prompt(add_generation_prompt=False) == len(head)
    assert num_prompt(chat_template_kwargs={"thinks": True}) == len(head + "<assistant><think>")
    assert num_prompt(continue_final_message=True, messages=[messages[0]]) == len("<user>Who?")


def test_a_response_template(client, api, monkeypatch, model):
    """transformers' parser tells the parts apart where a tokenizer has a template for it."""
    template = {
        "start_anchor": "<assistant>",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<hm>", "close": "</hm>"},
            "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"},
            "content": {"optional": True},
        },
    }
    monkeypatch.setattr(model[1], "response_template", template, raising=False)
    text = '<hm>So.</hm>Well.<call>{"name": "first", "arguments": {"age": 7}}</call>'
    given = {"model": "a-model", "messages": [{"role": "user", "content": "Who?"}], "stop": "$", "tools": TOOLS}
    with forced(monkeypatch, model, text + "$"):
        [choice] = api.chat.completions.create(**given).choices
        pieces = [one.choices[0].delta for one in api.chat.completions.create(**given, stream=True)]
    assert choice.message.reasoning_content == "So."
    assert choice.message.content == "Well." == "".join(one.content or "" for one in pieces)
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("first", {"age": 7})
    assert [call.function.name for one in pieces for call in one.tool_calls or []] == ["first"]


def test_thoughts(client, monkeypatch, model):
    """They stand apart, where the template has opened them, too."""
    text = "Hm.</think>Yes, it is."
    answer = forced(monkeypatch, model, text)
    with answer:
        body = ask_chat(client, chat_template_kwargs={"thinks": True}, max_tokens=len(text))
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes, it is.")


class forced:
    """Makes the model say a text, whatever it is asked."""

    def __init__(self, monkeypatch, model, text):
        self.patch, self.model, self.text = monkeypatch, model, text.encode()

    def __enter__(self):
        from kvcache.hf.requests import Request

        draw, text = Request.draw, self.text

        def say(request, logits):
            made = torch.zeros_like(logits)
            made[text[min(len(request.tokens), len(text) - 1)]] = 50
            return draw(request, made)

        self.context = self.patch.context()
        self.context.__enter__().setattr(Request, "draw", say)

    def __exit__(self, *error):
        self.context.__exit__(*error)


def ask_chat(client, **options):
    given = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100, "temperature": 0}
    status, body = client.ask("/v1/chat/completions", {**given, **options})
    assert status == 200, body
    return body


def test_tools(api, client, monkeypatch, model):
    """What the model writes as calls comes as calls, whole and as a stream; a choice of none hides the tools."""
    text = 'Well.\n<tool_call>{"name": "first", "arguments": {"age": 7, "who": "Romeo"}}</tool_call>'
    given = {"model": "a-model", "messages": [{"role": "user", "content": "Who?"}], "temperature": 0}
    given |= {"stop": "$", "tools": TOOLS}
    with forced(monkeypatch, model, text + "$"):
        [choice] = api.chat.completions.create(**given).choices
        with api.chat.completions.stream(**given) as stream:
            [streamed] = stream.get_final_completion().choices
        plain = api.chat.completions.create(**given, tool_choice="none").choices[0].message
    for message in (choice.message, streamed.message):
        assert message.content == "Well."
        assert [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls] == [
            ("first", {"age": 7, "who": "Romeo"})
        ]
    assert (plain.content, plain.tool_calls) == (text, None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "second"}}])
def test_tools_that_must_be_called(client, choice):
    """The answer is a call that follows the tool's schema, however the model would go on."""
    pytest.importorskip("llguidance")
    body = ask_chat(client, tools=TOOLS, tool_choice=choice, temperature=1, seed=1, max_tokens=600)
    assert body["choices"][0]["finish_reason"] == "tool_calls", body["choices"]
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in (["second"] if isinstance(choice, dict) else ["first", "second"])
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"age", "who"}
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_added_tokens_and_of_schemas_with_definitions(client, model):
    """Qwen's markers are tokens of their own; Pydantic puts parts of schemas in $defs."""
    pytest.importorskip("llguidance")
    from transformers import PreTrainedTokenizerFast

    from kvcache.server.drawing import Grammars
    from kvcache.server.speech import HERMES

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model[1]._tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    parameters = {"$defs": {"A": {"enum": [1, 2]}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}
    parameters |= {"required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "first", "parameters": parameters}}
    for given, markers in ((tokenizer, (256, 257)), (model[1], (None, None))):
        grammar = Grammars(given, len(given), None).of_calls(HERMES, [tool])
        text = b'\n{"name": "first", "arguments": {"a":2}}\n'
        begin, end = (
            [*mark.encode()] if one is None else [one]
            for one, mark in zip(markers, ("<tool_call>", "</tool_call>"), strict=True)
        )
        ends = [bool(grammar.ends(torch.tensor([[token]]), None)) for token in [*begin, *text, *end]]
        assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("kind", [None, ["object", "string"]])
def test_arguments_are_an_object(client, kind):
    """Whatever else the tool's schema allows; one that allows no object is refused."""
    pytest.importorskip("llguidance")
    parameters = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    tool = {"name": "first", "parameters": parameters | ({"type": kind} if kind else {})}
    given = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    [call] = ask_chat(client, **given, logit_bias={"34": 50})["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    tool["parameters"]["type"] = "string"
    status, body = client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who?"}], **given})
    assert (status, body["error"]["message"]) == (400, "tools: the parameters of 'first' must have the type object")


@pytest.mark.parametrize("unknown", [None, "!"])
def test_a_grammar_behind_thoughts_needs_their_token(client, model, monkeypatch, unknown):
    """Texts alone do not show where the grammar begins; the unknown token is not it."""
    pytest.importorskip("llguidance")
    monkeypatch.setitem(model[1]._special_tokens_map, "unk_token", unknown)
    asked = {"messages": [{"role": "user", "content": "Who?"}], "chat_template_kwargs": {"thinks": True}}
    asked |= {"response_format": {"type": "json_object"}, "max_tokens": 8}
    status, body = client.ask("/v1/chat/completions", {**asked, "stream": True})
    assert (status, body["error"]["param"]) == (501, "response_format")
    assert body["error"]["message"].endswith("the model's tokenizer has no token </think>")


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_answers_that_follow_a_schema(client, route):
    pytest.importorskip("llguidance")
    asked = {"prompt": PROMPT} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "Who?"}]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    given = {**asked, "temperature": 1, "seed": 2, "max_tokens": 200, "response_format": form}
    status, body = client.ask(route, given)
    assert status == 200, body
    [choice] = body["choices"]
    found = json.loads(choice["text"] if "prompt" in asked else choice["message"]["content"])
    assert isinstance(found["age"], int)
    assert found["who"] in ("Romeo", "Juliet")
    assert choice["finish_reason"] == "stop"
    for wrong in (
        {"type": "json_schema"},
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "no type"}}},
    ):
        status, body = client.ask(route, {**given, "response_format": wrong})
        assert (status, body["error"]["param"]) == (400, "response_format"), body


def test_json_that_looks_like_a_call(client):
    """Where an answer follows a schema, it is text as a whole."""
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["a <tool_call> b"]}}}
    [choice] = ask_chat(client, tools=TOOLS, response_format=form)["choices"]
    assert choice["message"]["content"].strip() == '"a <tool_call> b"'


MANY = {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(3000)}}


@pytest.mark.parametrize("is_tool", [False, True])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.000123},
        {"type": "integer", "multipleOf": 1234567},
        {"allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 0.0997}]},
        MANY,
        {"$ref": "#/$defs/a0", "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(6000)}},
        {"type": "string", "allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuv"]},
        {"allOf": [{"properties": {"a": {"pattern": f".*{c}.*"}}} for c in "abcdefghijklmnopqrstuv"]},
        {"anyOf": [{"type": "integer", "multipleOf": number} for number in (83, 89, 97, 101)]},
        {"type": "integer", "multipleOf": True},
        {"$ref": "https://example.com/schema"},
    ],
    ids=["digits", "large", "both", "many", "deep", "patterns", "parts", "choice", "bool", "elsewhere"],
)
def test_schemas_that_cannot_be_followed(model, client, schema, is_tool):
    """They are refused before anything is computed."""
    pytest.importorskip("llguidance")
    from kvcache.server.drawing import Grammars
    from kvcache.server.errors import ApiError
    from kvcache.server.speech import HERMES

    if is_tool:
        tool = {"type": "function", "function": {"name": "first", "parameters": schema}}
        with pytest.raises(ApiError, match=r"^tools: "):
            Grammars(model[1], 256, None).of_calls(HERMES, [tool])
        return
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    before = client.engine.prefix.stats
    status, body = client.ask("/v1/completions", {"prompt": PROMPT, "stream": True, "response_format": form})
    assert (status, body["error"]["param"]) == (400, "response_format"), body
    assert client.engine.prefix.stats == before


@pytest.mark.parametrize("multiple", [0.01, 5, 250, 1e9, 1e-5, 0, 10**400])
def test_usual_multiples_are_followed_or_refused_by_llguidance(multiple):
    from kvcache.server.drawing import check_schema

    fields = {f"a{i}": {"multipleOf": i} for i in (7, 11, 13, 17, 19)}
    properties = {"multipleOf": {"multipleOf": multiple}, "a": {"multipleOf": 0.5}, **fields}
    check_schema({"properties": properties, "default": {"multipleOf": 1234567}}, "x")


def test_schemas_as_deep_as_they_may_be(client):
    """References to references take a large stack."""
    pytest.importorskip("llguidance")
    parts = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(2490)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**parts, "a2490": {"const": 7}}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert complete(client, response_format=form) == "7"


def test_a_schema_that_cannot_be_followed_any_further(client):
    """The answer says so, and others go on."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": MANY}, "required": ["a", "b"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {"prompt": PROMPT, "response_format": form, "max_tokens": 200, "logit_bias": {"32": -100, "10": -100}}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(complete, client, max_tokens=60)
        status, body = client.ask("/v1/completions", asked)
        streamed = client.ask("/v1/completions", {**asked, "stream": True})[1].split("data: ")[-1]
        assert len(other.result()) == 60
    for error in (body["error"], json.loads(streamed)["error"]):
        assert error["message"].startswith("response_format: the schema cannot be followed: ")
        assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    assert status == 400
    client.wait_until_idle()


def test_an_object_of_json(client):
    pytest.importorskip("llguidance")
    body = ask_chat(client, response_format={"type": "json_object"}, max_tokens=40, logit_bias={"125": 30, "34": 5})
    assert body["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_pins(model):
    """A prompt that a key has pinned stays while others push everything else out; without a limit nothing is pinned."""
    beginning = "A long beginning, which all share. " * 4
    parts = [
        {"type": "text", "text": beginning, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "What now?"},
    ]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}

    def cached(client, key):
        status, body = client.ask("/v1/chat/completions", asked, key=key)
        assert status == 200, body
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    with serving(model, 1024) as client:
        for key in ("sk-one", "sk-two"):
            cached(client, key)
        client.wait_until_idle()
        assert client.metric("kvcache_server_pinned_tokens") >= len(beginning)
        for i in range(8):
            client.complete(f"{i}" + 300 * "x", max_tokens=1)
        assert cached(client, "sk-one") >= len(beginning)
        assert cached(client, "sk-two") < len(beginning) // 2
        assert client.metric("kvcache_server_pinned_tokens") < 2 * len(beginning)  # not counted twice
        for control in ({"type": "for ever"}, {"type": "ephemeral", "ttl": "1d"}, "ephemeral"):
            parts[0]["cache_control"] = control
            status, body = client.ask("/v1/chat/completions", asked)
            assert (status, body["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(("tokens_of_state", "num_pins"), [(0, 3), (64, 1)])
def test_no_more_is_pinned_than_a_key_may(model, tokens_of_state, num_pins):
    """A short prompt pins a block, and a state; the same prompt again is pinned for longer, and to its end."""
    import asyncio

    from kvcache.server.keys import Tenant

    async def play():
        runs = served.Served("a-model", *model, capacity=1024, dtype="f32")
        runs.tokens_of_state += tokens_of_state
        with runs.engine:
            tenant = Tenant(runs, "sk", "one", pinned=256)
            size, tokens = runs.engine.prefix.cache.block_size, [*range(100, 200)]
            tenant.pin("a-model", tokens, 100)  # nothing of it is known
            assert tenant.num_pinned == 0
            prompts = [tokens, *([i] for i in range(9))]
            for prompt in prompts:
                runs.engine.submit(prompt, tenant=tenant.prefixes["a-model"], max_new_tokens=1).result()
            for prompt in prompts:
                tenant.pin("a-model", prompt, 100)
            assert 100 <= tenant.num_pinned <= 256
            assert tenant.num_pinned % size == 0
            assert len(tenant._pins) == num_pins
            name = ("a-model", tuple(tokens))
            before = tenant._pins[name][1].when()
            tenant.pin("a-model", tokens, 1)
            assert tenant._pins[name][1].when() == before

    asyncio.run(play())


def test_pins_end(model, monkeypatch):
    from kvcache.server import fields

    monkeypatch.setitem(fields.LIFETIMES, "24h", 0.2)
    with serving(model, 1024) as client:
        client.complete(100 * "y", max_tokens=1, prompt_cache_retention="24h")
        client.wait_until_idle()
        assert client.metric("kvcache_server_pinned_tokens") >= 64
        for _ in range(500):
            if client.metric("kvcache_server_pinned_tokens") == 0:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("the pin has not ended")


def test_headers(client):
    """An encoded body is refused by that name; a client without a key is told how one is sent."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", client.port)) as connection:
        for encoding, key, status in (("gzip", "sk-one", 415), ("identity", "sk-one", 400), ("gzip", "none", 401)):
            headers = {"Content-Encoding": encoding, "Authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/completions", b"\x1f\x8b", headers)
            response = connection.getresponse()
            message = json.loads(response.read())["error"]["message"]
            assert (response.status, "Content-Encoding" in message) == (status, status == 415)
            assert response.headers["WWW-Authenticate"] == ("Bearer" if status == 401 else None)


def test_other_routes(client):
    for route, words in (
        ("/v1/embeddings", "no embeddings"), ("/v1/responses", "/v1/chat/completions"), ("/v1/messages", "/v1/chat"),
    ):  # fmt: skip
        status, body = client.ask(route, {})
        assert status == 404
        assert words in body["error"]["message"]
    assert client.ask("/v1/models/a-model")[1]["id"] == "a-model"
    assert client.ask("/v1/models/none")[0] == 404
    assert client.ask("/v1/models/") == client.ask("/v1/models")
    assert client.ask("/ready") == (200, {"status": "ready"})
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    status, body = client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert status == 400
    assert "kvcache-llama-server takes images" in body["error"]["message"]
