"""llama-server as its clients see it, with this cache and beside it with llama.cpp's own."""

import http.client
import json
import os
import re
import subprocess
import time

import llama_cpp_build
import pytest

ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_KVCACHE", "LLAMA_ARG_"))
} | {
    "OMP_WAIT_POLICY": "passive"  # threads that spin at barriers take the cores of the other server
}
USED = r"llama_kvcache: \d+ cells"
SECONDS = 120  # for any one answer

# Options of a server that keeps prompts.
ON = ("--kvcache", "--kvcache-prefix", "on")
NO_AMX = "--no-repack"  # llama.cpp's AMX code gives wrong products where sequences of a hybrid model go together
THREE_SLOTS = ("--parallel", "3", "--ctx-size", "3072")


def in_folder(path):
    """Return the options of a server that keeps prompts in a folder."""
    return ("--kvcache", "--kvcache-prefix", f"dir:{path}", *THREE_SLOTS)


# Fields of an answer that depend on the cache alone: times, names and the choice of the slot are left out.
FIELDS = ("content", "tokens", "tokens_predicted", "tokens_evaluated", "tokens_cached", "truncated", "stop_type")
COUNTS = ("cache_n", "prompt_n", "predicted_n", "draft_n", "draft_n_accepted")


class Server:
    """A server on a free port; used in a with statement."""

    def __init__(self, model, log, *options, name="llama-server", **environment):
        self.log_path = log
        command = [llama_cpp_build.program(name), "--model", model, "--port", "0", "--threads", "1", "--verbosity", "4"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *options], stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT | environment
            )
        self.port = self._listening()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.process.terminate()
        try:
            status = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        assert kind or status == 0, self.end_of_log()

    def log(self):
        return self.log_path.read_text(errors="replace")

    def end_of_log(self):
        return "\n".join(self.log().splitlines()[-20:])

    def _listening(self):
        end = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log())
            if found:
                return int(found[1])
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()
        raise RuntimeError(self.end_of_log())

    def connect(self, method, path, body=None):
        """Send a request, and return the connection and its response, whose body is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def ask(self, path, body=None, *, status=200):
        """Return the answer to a GET, or to a POST if there is a body."""
        connection, response = self.connect("GET" if body is None else "POST", path, body)
        said = response.read().decode()
        connection.close()
        assert response.status == status, said
        return json.loads(said) if response.headers.get("Content-Type", "").startswith("application/json") else said

    def stream(self, path, body):
        """Yield the events of an answer; closing the generator closes the connection."""
        connection, response = self.connect("POST", path, body | {"stream": True})
        try:
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])
        finally:
            response.close()
            connection.close()

    def complete(self, prompt, num_tokens=32, **fields):
        return self.ask("/completion", completion(prompt, num_tokens, **fields))

    def wait_for_slots(self):
        """Wait until no slot is at work."""
        end = time.monotonic() + SECONDS
        while any(slot["is_processing"] for slot in self.ask("/slots")):
            assert time.monotonic() < end, self.end_of_log()
            time.sleep(0.02)


def completion(prompt, num_tokens=32, **fields):
    """Return a request whose answer is the same each time."""
    common = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return common | fields


def part_of_cache(answer):
    """Return what must not depend on which cache answered."""
    found = {name: answer[name] for name in FIELDS}
    return found | {name: answer["timings"].get(name) for name in COUNTS}


def timings(answer):
    """Return how many tokens of a prompt were there, and how many were computed."""
    return answer["timings"]["cache_n"], answer["timings"]["prompt_n"]


def probabilities(answer):
    """Return the likeliest next tokens: those of a random model are often too close to compare which is first."""
    (token,) = answer["completion_probabilities"]
    return {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}


# The next token's probabilities; it is forced to be "a", as half a character would not be answered.
NEXT_TOKEN = {"n_probs": 20, "logit_bias": [[ord("a"), 1000]]}


def next_token(server, prompt, **fields):
    """Ask for the next token's probabilities."""
    return server.complete(prompt, 1, **NEXT_TOKEN, **fields)


def expect_same_probabilities(ours, own, most=0.15):
    both = probabilities(ours).keys() & probabilities(own).keys()
    assert len(both) >= 15
    for token in both:
        assert probabilities(ours)[token] == pytest.approx(probabilities(own)[token], abs=most)


class Pair:
    """Two servers with the same options: one with this cache, one with llama.cpp's own; used in a with statement."""

    def __init__(self, model, folder, *options):
        names = {"ours": "--kvcache", "own": "--no-kvcache"}
        logs = {name: folder / f"{name}-{len(list(folder.iterdir()))}.log" for name in names}
        self.ours = Server(model, logs["ours"], names["ours"], *options)
        try:
            self.own = Server(model, logs["own"], names["own"], *options)
        except BaseException:
            self.ours.process.kill()
            self.ours.process.wait()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            assert error[0] or (re.search(USED, self.ours.log()) and not re.search(USED, self.own.log()))
        finally:
            try:
                self.ours.__exit__(*error)
            finally:
                self.own.__exit__(*error)

    def ask(self, path, body=None, *, status=200):
        """Return the answers of both."""
        return self.ours.ask(path, body, status=status), self.own.ask(path, body, status=status)

    def complete(self, prompt, num_tokens=32, **fields):
        """Complete a prompt with both, expect the same, and return the answer of this cache."""
        ours, own = self.ask("/completion", completion(prompt, num_tokens, **fields))
        assert part_of_cache(ours) == part_of_cache(own)
        return ours
