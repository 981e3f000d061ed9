"""Soak `kvcache serve` with random clients over all its fields; it is killed and restarted on one store meanwhile.

python tests/soak/serve.py --seconds 3600 --seed 0

Each answer is compared with the model alone: greedy tokens are the likeliest, told probabilities are right, JSON
follows its schema. A key finds no tokens but those that it has sent to the same model. Nothing is left of
requests that ended.
"""

import argparse
import http.client
import json
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache.server.model import load, num_common
from kvcache.server.text import SCENE, byte_tokenizer

MODEL = Path(__file__).resolve().parents[2] / "examples/model"
WORDS, END = (MODEL / "eval.txt").read_text(), "|"  # which the words do not have
KEYS = {
    "sk-alice": {"name": "alice", "quota": 512, "max_requests": 8, "pinned": 1024},
    "sk-bob": {"name": "bob", "adapters": ["sql"]},
    "sk-carol": {"name": "carol", "quota": 256, "max_requests": 2, "pinned": 256, "adapters": []},
}
ADAPTERS = ("sql", "chat")
TOOLS = '{% if tools %}{{ tools | tojson }}<tool_call>{"name": "arguments"}</tool_call>{% endif %}'
NUM_CLIENTS, LOOKS = 6, 12
OPTIONS = {
    "--dtype": "f32", "--capacity": 8192, "--max-running": 4, "--max-waiting": 4, "--read-timeout": 2, "--timeout": 60,
}  # fmt: skip
PATIENCE = 100  # seconds for anything
CLOSE = 1e-3  # logits that rounding may put in another order
MOST_GROWTH = 0.05  # of what the last server holds
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# ---- what is asked

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "who": {"enum": ["Romeo", "Juliet"]}},
    "required": ["age", "who"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
DRAWING = {  # fields that change which token is drawn
    "temperature": [0.7, 2, 1e-6], "top_p": [0.3, 1e-6], "top_k": [3, 0, -1], "min_p": [0.2, 1], "seed": [1, 0, -1],
    "repetition_penalty": [1.3, 0.01], "presence_penalty": [2, -2], "frequency_penalty": [0.5, -2],
    "logit_bias": [{"101": -100}, {"32": 5, "10": 1.5}],
}  # fmt: skip
OTHERS = {
    "min_tokens": [0, 1], "ignore_eos": [True, False], "stop": ["\n", ["the", "and"], [], "no such text"],
    "n": [1, 2, None], "user": ["x"], "metadata": [{"a": "b"}], "prompt_cache_key": ["x"], "store": [True],
    "service_tier": ["auto"], "safety_identifier": [None], "prompt_cache_retention": ["24h", "in_memory"],
    "modalities": [["text"]], "suffix": [""], "response_format": [None, {"type": "text"}],
}  # fmt: skip
OF_CHAT = {
    "parallel_tool_calls": [False], "chat_template_kwargs": [{"enable_thinking": False}], "reasoning_effort": ["low"],
    "logprobs": [True, False], "top_logprobs": [0], "tool_choice": ["none"], "tools": [[TOOL], []],
}  # fmt: skip
OF_TEXT = {"logprobs": [0, 3, False], "echo": [True, False]}
WRONG = {
    "temperature": [-1, float("nan"), "hot", True], "top_p": [0, float("inf")], "n": [0, 129, 1.5, "2"],
    "max_tokens": ["many", 0, 1e3], "stop": [[""], 5, ["a"] * 17], "logit_bias": [{"x": 1}, {"999": 1}, [1]],
    "seed": [1.5, 1 << 63], "nothing": [1, {}], "response_format": [{"type": "xml"}, "json", {"type": "json_schema"}],
    "stream": ["yes"], "stream_options": [{"include_usage": True}, 1], "suffix": ["a"], "audio": [{}],
    "min_tokens": [-1, 10**6], "prompt_cache_retention": ["1y"], "frequency_penalty": [3], "logprobs": ["yes", 99],
    "functions": [[TOOL]], "repetition_penalty": [0], "top_k": [-2, 0.5], "min_p": [-1], "model": [5],
    "user\ud800": [1],
}  # fmt: skip
NO_BODIES = [b"", b"{", b"[1]", b"[" * 20000, b'"\xff"', b"{}", b'{"prompt": 5}', b'{"n": ' + b"9" * 5000 + b"}"]


@dataclass
class Ask:
    """A request, and what has to come of it."""

    key: str
    path: str
    body: dict | bytes
    manner: str  # of the client
    status: int = 200
    is_greedy: bool = False
    has_schema: bool = False

    @property
    def whose(self):
        return self.key, self.body.get("model", "model")

    @property
    def data(self):
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def draw(choose):
    """Draw a request."""
    manners = {
        "whole": 6,
        "stream": 4,
        "slow": 1,
        "trickle": 1,
        "leave": 2,
        "leave midway": 2,
        "half": 1,
        "rude": 1,
        "twice": 1,
    }
    key, path, manner = choose.choice([*KEYS]), choose.choice([CHAT, TEXT]), weighed(choose, manners)
    ask = Ask(key, path, fields(choose, path == CHAT), manner)
    if manner in ("stream", "slow", "leave midway"):
        ask.body["stream"] = True
        ask.body |= {"stream_options": {"include_usage": True}} if choose.random() < 0.5 else {}
    model = choose.choice(["model", *ADAPTERS, None])
    ask.body |= {} if model is None else {"model": model}
    if model in ADAPTERS and model not in KEYS[key].get("adapters", ADAPTERS):
        ask.status = 404
    add_schema(choose, ask)
    changing = ask.body.keys() & DRAWING.keys() - {"temperature", "top_p", "top_k", "min_p", "seed"}
    ask.is_greedy = ask.body["temperature"] <= 1e-5 and not changing and not ask.has_schema
    if choose.random() < 0.15:
        spoil(choose, ask)
    return ask


def weighed(choose, weights):
    return choose.choices([*weights], [*weights.values()])[0]


def fields(choose, is_chat):
    """Draw a body that is answered."""
    body = {choose.choice(["max_tokens", "max_completion_tokens"]): choose.randint(1, 40), "temperature": 0}
    for name, values in {**OTHERS, **(OF_CHAT if is_chat else OF_TEXT)}.items():
        if choose.random() < 0.15:
            body[name] = choose.choice(values)
    if choose.random() < 0.4:
        body |= {name: choose.choice(values) for name, values in DRAWING.items() if choose.random() < 0.3}
    if body.get("echo") and body.get("logprobs") is not None:
        del body["logprobs"]
    if "top_logprobs" in body and body.get("logprobs"):
        body["top_logprobs"] = 2
    if "tool_choice" in body and not body.get("tools"):
        del body["tool_choice"]
    if is_chat:
        return body | {"messages": messages(choose, body)}
    body["prompt"] = [text(choose) for _ in range(2)] if choose.random() < 0.1 else text(choose)
    if isinstance(body["prompt"], str) and choose.random() < 0.1:
        body["prompt"] = [*body["prompt"].encode()]
    if choose.random() < 0.1:
        body["best_of"] = body.get("n") or 1
    return body


def text(choose):
    """Draw a text that begins as others do: all keys draw from the same ones. None begins another one."""
    begin = choose.randrange(6) * 500
    middle = choose.randrange(len(WORDS) - 300) if choose.random() < 0.5 else choose.randrange(10) * 300
    return WORDS[begin : begin + 150 + begin % 200] + WORDS[middle : middle + choose.randint(10, 200)] + END


def messages(choose, body):
    """Draw a chat; some of its parts are to be pinned."""
    found = [{"role": "system", "content": text(choose)}] if choose.random() < 0.7 else []
    for _ in range(choose.randrange(2)):
        found += [{"role": "user", "content": text(choose)[-50:]}, {"role": "assistant", "content": text(choose)[-60:]}]
    if found and choose.random() < 0.4:
        control = {"type": "ephemeral", **({"ttl": "1h"} if choose.random() < 0.5 else {})}
        found[0]["content"] = [{"type": "text", "text": found[0]["content"], "cache_control": control}]
    found.append({"role": "user", "content": text(choose)[-60:], **({"name": "Tom"} if choose.random() < 0.2 else {})})
    if choose.random() < 0.1:
        found.append({"role": "assistant", "content": "I say"})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return found


def add_schema(choose, ask):
    """Ask for JSON, now and then, or for a call of a tool."""
    way = choose.random()
    if way > 0.12 or ask.body.get("stop") or "min_tokens" in ask.body or "logit_bias" in ask.body:
        return
    ask.has_schema = True
    if ask.path == CHAT and way < 0.06:
        ask.body |= {"tools": [TOOL], "tool_choice": choose.choice(["required", {"function": {"name": "find"}}])}
    else:
        ask.body["response_format"] = FORMAT


def spoil(choose, ask):
    """Make a request wrong."""
    ways = {"field": 10, "body": 3, "key": 2, "model": 1, "length": 2, "size": 0.2}
    way = weighed(choose, ways)
    if way == "field":
        name = choose.choice([*WRONG])
        if name == "stream_options":
            ask.body.pop("stream", None)
        if name == "max_tokens":
            ask.body.pop("max_completion_tokens", None)
        ask.body[name] = choose.choice(WRONG[name])
        ask.status = 400
    elif way == "model":
        ask.body["model"], ask.status = "nobody", 404
    elif way == "key":
        ask.key, ask.status = "sk-mallory", 401
    elif way == "length":
        ask.body |= {"messages": [{"role": "user", "content": WORDS}]} if ask.path == CHAT else {"prompt": WORDS}
        ask.status = ask.status if ask.status == 404 else 400
    else:
        ask.body, ask.status = (
            (b"[" + b" " * (9 << 20) + b"]", 413) if way == "size" else (choose.choice(NO_BODIES), 400)
        )


# ---- what is right


def make_models(folder):
    """Save the repository's model in f32 with a template that has tools, and random adapters of it."""
    model, tokenizer = load(MODEL)[0], byte_tokenizer()
    tokenizer.chat_template = TOOLS + SCENE
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    for seed, name in enumerate(ADAPTERS):
        lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(load(MODEL)[0], lora)
        torch.manual_seed(seed)
        for path, weight in wrapped.named_parameters():
            if "lora" in path:
                weight.data = torch.randn_like(weight) * 0.08
        wrapped.save_pretrained(folder / name, save_embedding_layers=False)


class Oracle:
    """The model alone, with transformers' own attention."""

    def __init__(self, folder):
        def model():
            return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").eval()

        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        adapted = {name: peft.PeftModel.from_pretrained(model(), folder / name).eval() for name in ADAPTERS}
        self.models, self.lock = {"model": model(), **adapted}, threading.Lock()

    def prompts(self, body):
        """Return the texts of a body's prompts."""
        if "messages" not in body:
            given = body["prompt"]
            many = [given] if isinstance(given, str) or isinstance(given[0], int) else given
            return [one if isinstance(one, str) else bytes(one).decode() for one in many]
        chat = [{**one, "content": plain(one["content"])} for one in body["messages"]]
        goes_on = body.get("continue_final_message", False)
        tools = None if body.get("tool_choice") == "none" else body.get("tools") or None
        how = {"tokenize": False, "add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        return [self.tokenizer.apply_chat_template(chat, tools=tools, **how)]

    def wrong(self, model, prompt, answer, told, is_greedy):
        """Return what is wrong about a text behind a prompt, as far as rounding decides nothing; None: nothing.

        `told` are the log probabilities of its first tokens.
        """
        tokens, begin = torch.tensor([[*(prompt + answer).encode()]]), len(prompt.encode())
        with self.lock, torch.no_grad():
            logits = self.models[model](tokens).logits[0, begin - 1 : -1]
        chosen = logits.gather(1, tokens[0, begin:, None])[:, 0]
        right = (chosen - logits.logsumexp(-1)).tolist()
        for i, (one, known) in enumerate(zip(right, told, strict=False)):
            if abs(one - known) > 10 * CLOSE:
                return f"the log probability {known} of token {i} is {one}"
        if not is_greedy:
            return None
        best, other = logits.topk(2).values.T
        for i in range(len(chosen)):
            if best[i] - chosen[i] > CLOSE:
                return f"token {i} of {answer!r} is less likely than another one"
            if best[i] - other[i] < CLOSE:
                return None
        return None


def plain(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Sent:
    """The prompts that each key has sent to each model."""

    def __init__(self):
        self.texts, self.lock = defaultdict(list), threading.Lock()

    def add(self, whose, text):
        with self.lock:
            insort(self.texts[whose], text.encode())

    def known(self, whose, text):
        """Return how many first bytes of a text that was sent may be known by others of the same key."""
        text = text.encode()
        with self.lock:
            texts = self.texts[whose]
            at = bisect_left(texts, text)
            if texts[at + 1 : at + 2] == [text] or any(has(texts, text[:i]) for i in range(len(text))):
                return len(text)  # it was sent before; or what begins it, whose answer may go on as it does
            near = texts[max(0, at - 1) : at] + texts[at + 1 : at + 2]
        return max((num_common(one, text) for one in near), default=0)


def has(texts, text):
    at = bisect_left(texts, text)
    return texts[at : at + 1] == [text]


# ---- the server


class Life:
    """A server from its start to its end."""

    def __init__(self, folder):
        (folder / "keys.json").write_text(json.dumps(KEYS))
        options = OPTIONS | {"--keys": folder / "keys.json", "--store": f"dir:{folder}/store?max_bytes=64MiB"}
        words = ["--port", "0", *(word for pair in options.items() for word in pair)]
        words += [word for name in ADAPTERS for word in ("--adapter", f"{name}={folder / name}")]
        command = [sys.executable, "-m", "kvcache", "serve", folder / "model", *words]
        self.path, self.counters = folder / "log", {}
        with open(self.path, "wb") as log:
            self.process = subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + PATIENCE
        while not (found := re.search(r"http://127.0.0.1:(\d+)/v1/", self.path.read_text())):
            assert self.process.poll() is None, self.path.read_text()
            assert time.monotonic() < end, self.path.read_text()
            time.sleep(0.1)
        self.port = int(found[1])

    def metrics(self):
        """Return all metrics; counters may only grow."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        now = {name: float(value) for name, value in (one.rsplit(" ", 1) for one in lines if not one.startswith("#"))}
        for name, before in self.counters.items():
            assert now[name] >= before, f"{name} fell from {before} to {now[name]}"
        self.counters = {name: now[name] for name in now if re.search(r"_(total|count|sum|bucket)(\{|$)", name)}
        return now

    def idle(self):
        """Wait until all requests have ended, and return what is held then."""
        end = time.monotonic() + PATIENCE
        while True:
            now = self.metrics()
            busy = [
                name for name in now if re.search("requests_(running|waiting)|prefix_sequences", name) and now[name]
            ]
            if not busy:
                break
            assert time.monotonic() < end, f"requests are left: {busy}"
            time.sleep(0.1)
        assert now["kvcache_server_pinned_tokens"] <= sum(one.get("pinned", 0) for one in KEYS.values())
        time.sleep(1.5 * OPTIONS["--read-timeout"])  # connections of half requests end
        proc = Path(f"/proc/{self.process.pid}")
        status = (proc / "status").read_text()
        rss, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))
        cached = sum(now[name] for name in now if name.startswith("kvcache_prefix_matched_total"))
        return {
            "MiB": rss / 1024, "MiB of the cache": now["kvcache_bytes"] / 2**20, "threads": threads,
            "files": len([*(proc / "fd").iterdir()]), "cached": cached,
            "from the store": sum(now[name] for name in now if name.startswith("kvcache_prefix_fetched_total")),
        }  # fmt: skip

    def end(self, sig):
        self.process.send_signal(sig)
        code = self.process.wait(PATIENCE)
        assert code in (0, -sig), (code, self.path.read_text())
        assert "Traceback" not in self.path.read_text(), self.path.read_text()


# ---- the clients


@dataclass
class Soak:
    """Clients of a server that comes and goes."""

    folder: Path
    seed: int
    life: Life | None = None  # None: nobody asks
    is_ending: bool = False
    is_over: bool = False
    num_asking: int = 0
    number: int = 0
    counts: Counter = field(default_factory=Counter)
    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: Sent = field(default_factory=Sent)

    def __post_init__(self):
        make_models(self.folder)
        self.oracle = Oracle(self.folder)

    def let(self, life):
        """Let clients ask a server; None: wait until none asks."""
        with self.changed:
            self.life = life
            self.changed.notify_all()
            assert life or self.changed.wait_for(lambda: not self.num_asking, 2 * PATIENCE)

    def run(self):
        """Ask, until the end."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.is_over or self.life)
                if self.is_over:
                    return
                self.num_asking, self.number, port = self.num_asking + 1, self.number + 1, self.life.port
                number, choose = self.number, random.Random(f"{self.seed} {self.number}")
            ask = draw(choose)
            try:
                how = self.play(port, ask, choose)
            except Exception as error:
                if not (self.is_ending and isinstance(error, OSError | http.client.HTTPException)):
                    raise AssertionError(f"request {number}: {ask}: {error!r}") from error
                how = "cut off"
                time.sleep(0.2)
            finally:
                with self.changed:
                    self.num_asking -= 1
                    self.changed.notify_all()
            with self.changed:
                self.counts.update([how])

    def play(self, port, ask, choose):
        """Ask, check the answer, and return what became of it."""
        if ask.manner == "half":
            return half_a_request(port, ask, choose)
        prompts = self.oracle.prompts(ask.body) if ask.status == 200 else []
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        with closing(connection):
            for _ in range(2 if ask.manner == "twice" else 1):
                how = self.ask_once(connection, ask, prompts, choose)
        return how

    def ask_once(self, connection, ask, prompts, choose):
        for prompt in prompts:
            self.sent.add(ask.whose, prompt)
        post(connection, ask, choose)
        if ask.manner in ("leave", "rude"):
            time.sleep(choose.expovariate(20))
            if ask.manner == "rude":  # the connection is reset
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return "left"
        response = connection.getresponse()
        if response.status != 200:
            assert response.status in (429, 503, ask.status), (response.status, response.read())
            assert json.loads(response.read())["error"]["message"]
            return str(response.status)
        assert ask.status == 200, response.read()
        answer = streamed(response, ask, choose) if ask.body.get("stream") else json.loads(response.read())
        if answer is None:
            return "left midway" if ask.manner == "leave midway" else "shut down"
        self.check(ask, prompts, answer)
        return "greedy" if ask.is_greedy else "JSON" if ask.has_schema else "drawn"

    def check(self, ask, prompts, answer):
        """Compare an answer with what the model alone says."""
        each, usage = ask.body.get("n") or 1, answer.get("usage")
        assert len(answer["choices"]) == len(prompts) * each, answer
        if usage is not None:
            assert usage["prompt_tokens"] == sum(len(prompt.encode()) for prompt in prompts), (prompts, usage)
            found = usage["prompt_tokens_details"]["cached_tokens"]
            known = sum(self.sent.known(ask.whose, prompt) for prompt in prompts)
            # The answers of one request may know each other's prompts.
            assert found <= known or len(answer["choices"]) > 1, f"{found} tokens, of which the key knew {known}"
        for choice in answer["choices"]:
            self.check_choice(ask, prompts[choice["index"] // each], choice)

    def check_choice(self, ask, prompt, choice):
        message, reason = choice.get("message") or {"content": choice["text"]}, choice["finish_reason"]
        said, stops = message["content"] or "", ask.body.get("stop") or []
        if ask.body.get("echo"):
            assert said.startswith(prompt)
            said = said[len(prompt) :]
        stops = [stops] if isinstance(stops, str) else stops
        assert not any(stop in said for stop in stops), choice
        assert reason == "length" or stops or ask.has_schema, choice
        if ask.has_schema and reason != "length":
            calls = message.get("tool_calls")
            found = json.loads(calls[0]["function"]["arguments"] if calls else said)
            assert found.keys() == {"age", "who"}, found
            assert 0 <= found["age"] <= 99, found
            assert found["who"] in ("Romeo", "Juliet"), found
        if not said.isascii() or message.get("tool_calls") or message.get("reasoning_content"):
            return
        told = choice.get("logprobs") or {}
        told = told.get("token_logprobs") or [one["logprob"] for one in told.get("content", [])]
        ends = stops if reason == "stop" and not ask.has_schema else [""]
        wrong = [self.oracle.wrong(ask.whose[1], prompt, said + end, told, ask.is_greedy) for end in ends]
        assert None in wrong, wrong


def post(connection, ask, choose):
    """Send a request, some in little pieces."""
    headers, data = {"Authorization": f"Bearer {ask.key}"}, ask.data
    try:
        if ask.manner != "trickle":
            connection.request("POST", ask.path, data, headers)
            return
        connection.request("POST", ask.path, None, headers | {"Content-Length": str(len(data))})
        size = max(1, len(data) // 5)
        for begin in range(0, len(data), size):
            time.sleep(choose.random() / 10)
            connection.send(data[begin : begin + size])
    except (BrokenPipeError, ConnectionResetError):  # it was refused before its end
        if ask.status == 200:
            raise


def half_a_request(port, ask, choose):
    """Send a part of a request, which the server ends in time."""
    head = f"POST {ask.path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ask.key}\r\nContent-Length: {len(ask.data)}"
    whole = f"{head}\r\n\r\n".encode() + ask.data[:10000]
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        connection.sendall(whole[: choose.randrange(len(whole))])
        if choose.random() < 0.5:
            got = connection.recv(4096)
            assert got == b"" or re.match(rb"HTTP/1.1 (401|408|413|429|503) ", got), got
    return "half"


def streamed(response, ask, choose):
    """Return a stream's answer as if it were whole; None if the client leaves before its end, or the server stops."""
    choices, usage, leaves = {}, None, choose.randrange(40) if ask.manner == "leave midway" else -1
    for number, line in enumerate(response):
        if number == leaves:
            return None
        if line == b"data: [DONE]\n":
            found = [choices[i] for i in sorted(choices)]
            return {"choices": found, **({} if usage is None else {"usage": usage})}
        if line.startswith(b"data: "):
            piece = json.loads(line[6:])
            if "error" in piece:
                assert piece["error"]["code"] == "shutting_down", piece
                return None
            usage = piece.get("usage") or usage
            for one in piece["choices"]:
                add_piece(choices, one)
        if ask.manner == "slow":
            time.sleep(0.02)
    raise http.client.IncompleteRead(b"")


def add_piece(choices, one):
    begun = {"text": ""} if "text" in one else {"message": {"content": ""}}
    choice = choices.setdefault(one["index"], {"index": one["index"], "finish_reason": None, "logprobs": {}, **begun})
    assert choice["finish_reason"] is None, one
    choice["finish_reason"] = one["finish_reason"]
    for name, values in (one["logprobs"] or {}).items():
        choice["logprobs"].setdefault(name, []).extend(values)
    if "text" in one:
        choice["text"] += one["text"]
        return
    choice["message"]["content"] += one["delta"].get("content") or ""
    if calls := one["delta"].get("tool_calls"):
        choice["message"].setdefault("tool_calls", []).extend(calls)


# ---- the whole


def soak(folder, seconds, seed):
    """Let clients ask for so long; return what the last server held now and then, and what became of requests.

    Each server ends by a signal. The last one has half of the seconds, or all of few.
    """
    choose, made = random.Random(f"{seed} lives"), Soak(folder, seed)
    parts = []
    while sum(parts) < seconds / 2 and seconds > 20:
        parts.append(choose.uniform(0.02, 0.08) * seconds)
    parts.append(seconds - sum(parts))
    life = None
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(made.run) for _ in range(NUM_CLIENTS)]
        try:
            for part in parts:
                is_last = part is parts[-1]
                life, made.is_ending = Life(folder), False
                held = live(made, life, clients, part, LOOKS if is_last and seconds > 20 else 1)
                made.let(life)
                wait(clients, 1, FIRST_EXCEPTION)
                made.is_ending = True
                life.end(signal.SIGTERM if is_last else choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
                made.let(None)
        finally:
            made.is_over, made.is_ending = True, True
            if life is not None:
                life.process.kill()
            with made.changed:
                made.changed.notify_all()
            for one in clients:
                one.result()
    return held, made.counts


def live(made, life, clients, seconds, num_looks):
    """Let clients ask a server, and look now and then at what it holds while nobody asks."""
    held = []
    for _ in range(num_looks):
        made.let(life)
        end = time.monotonic() + seconds / num_looks
        while (left := end - time.monotonic()) > 0:
            wait(clients, min(left, 2), FIRST_EXCEPTION)
            for one in clients:
                if one.done():
                    one.result()
            life.metrics()  # while they ask
        made.let(None)
        held.append(life.idle())
        facts = ", ".join(f"{value:,.5g} {name}" for name, value in held[-1].items())
        print(f"server {life.process.pid}: {facts}; {dict(made.counts)}", flush=True)
        assert held[-1]["files"] <= held[0]["files"], held
        assert held[-1]["threads"] <= held[0]["threads"] + 8, held  # those that make prompts
    return held


def growth(held):
    """Return by how much of itself a server's memory grew from its second third to its last one; None: a short run."""
    rest = [one["MiB"] - one["MiB of the cache"] for one in held]
    third = len(rest) // 3
    return None if third < 3 else statistics.median(rest[-third:]) / statistics.median(rest[third : 2 * third]) - 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        held, counts = soak(Path(folder), arguments.seconds, arguments.seed)
    print(", ".join(f"{count:,} {name}" for name, count in counts.most_common()))
    grown = growth(held)
    if grown is not None:
        print(f"memory beside the cache: {grown:+.2%}")
    if grown is not None and grown > MOST_GROWTH:
        sys.exit(f"memory has grown by more than {MOST_GROWTH:.0%}")


if __name__ == "__main__":
    main()
