"""Measure the first token's time of a prompt whose beginning llama-server has computed before, prefixes on and off.

cd integrations/llama.cpp && ./build.sh                               # once, minutes
python bench/bench_llama_prefix.py                                    # 8,192 tokens, in the shape of a 1 B Llama
python bench/bench_llama_prefix.py --model qwen3.5-0.8b               # in the shape of Qwen3.5 0.8B, a hybrid model
python bench/bench_llama_prefix.py --tokens 2k --model model.gguf

One server after the other computes a prompt on its first slot. Then it computes prompts on other slots that begin with
the same tokens and end with 16 tokens of their own. After a restart, the next turn of a conversation is computed whole,
or goes on from what a folder keeps; llama.cpp's own cache restores its slot from a file. A model of random weights is
written if none is named.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench_llama_cpp import BUILT, model_of
from llama_cpp_models import SHAPES

from kvcache.tools.arguments import parse_tokens

SLOTS = 4
OWN = 16  # tokens at the end of a prompt that no other has
ANSWER = 32  # tokens of the answer before a restart
OWN_CACHE = "own cache"


class Server:
    """A server at an address. `clock` returns the seconds that requests are timed with."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address, self._clock = address, clock

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._address}/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def complete(self, prompt: list[int], num_tokens: int, slot: int) -> dict[str, Any]:
        common = {"temperature": 0, "ignore_eos": True, "return_tokens": True}
        return self.post("completion", {"prompt": prompt, "n_predict": num_tokens, "id_slot": slot} | common)

    def first_token(self, prompt: list[int], slot: int = 0, file: str = "") -> tuple[float, int]:
        """Return the seconds until a prompt's first token, and how many of its tokens were there.

        The slot is restored from a file if one is named.
        """
        began = self._clock()
        if file:
            self.post(f"slots/{slot}?action=restore", {"filename": file})
        answer = self.complete(prompt, 1, slot)
        return self._clock() - began, answer["timings"]["cache_n"]


@contextmanager
def serve(o: argparse.Namespace, *options: str) -> Iterator[Server]:
    """Start a server, and stop it in the end."""
    size = ("--parallel", str(SLOTS), "--ctx-size", str(2 * o.tokens + SLOTS * 256), "--kv-unified")
    command = [str(o.library / "llama-server"), "--model", str(o.model), "--port", "0", *size, *options]
    command += ["--threads", str(o.threads), "--verbosity", "3"]
    with tempfile.TemporaryFile("w+") as log:
        waits = os.environ | {"OMP_WAIT_POLICY": "passive"}  # in vain, on cores that other programs have
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=waits)
        try:
            while True:
                log.seek(0)
                found = re.search(r"listening on (http://\S+:\d+)", log.read())
                if found or process.poll() is not None:
                    break
                time.sleep(0.1)
            if not found:
                log.seek(0)
                raise RuntimeError(f"llama-server ended: {log.read()[-2000:]}")
            clock_of_process = (~process.pid << 3) | 2  # as clock_getcpuclockid() makes it
            clock = partial(time.clock_gettime, clock_of_process) if o.cpu_time else time.perf_counter
            yield Server(found[1], clock)
        finally:
            process.terminate()
            process.wait()


def show(what: str, answers: Sequence[tuple[float, int]]) -> None:
    seconds = statistics.median(seconds for seconds, _ in answers)
    print(f"{what:<38} {seconds:8.3f} s, {answers[0][1]} tokens there", flush=True)


def other_slots(o: argparse.Namespace, prompts: Sequence[list[int]]) -> None:
    """Measure prompts on other slots, with prefixes and without."""
    for prefix, others in (("on", prompts[1:]), ("off", prompts[1:2])):
        with serve(o, "--kvcache", "--kvcache-prefix", prefix) as server:
            show(f"prefix {prefix}, first slot", [server.first_token(prompts[0])])
            show(f"prefix {prefix}, another slot", [server.first_token(prompt, 1) for prompt in others])


def restart(o: argparse.Namespace, prompt: list[int], questions: Sequence[list[int]], cache: str, folder: str) -> None:
    """Measure turns behind a prompt and its answer on new servers: one that computes all, and others."""
    if cache == OWN_CACHE:
        plain, keeping, file = "--no-kvcache", ("--slot-save-path", folder), "conversation"
    else:
        plain, keeping, file = "--kvcache", ("--kvcache-prefix", f"dir:{folder}"), ""
    with serve(o, plain, *keeping) as server:
        conversation = prompt + server.complete(prompt, ANSWER, 0)["tokens"]
        if file:
            server.post("slots/0?action=save", {"filename": file})
    with serve(o, plain) as server:
        show(f"{cache}, computed after a restart", [server.first_token(conversation + questions[0])])
    answers = []
    for question in questions:
        with serve(o, plain, *keeping) as server:
            answers.append(server.first_token(conversation + question, file=file))
    show(f"{cache}, from a {'file' if file else 'folder'}", answers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_tokens, default=8192, help="that prompts have in common (default: 8k)")
    parser.add_argument(
        "--model", type=model_of, default="llama-1b", help=f"a GGUF file, or one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--library", type=Path, default=BUILT, help="the folder of llama-server (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all)")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time of the servers; with --threads 1")
    parser.add_argument("--only", choices=("slots", "restart"), help="(default: both)")
    o = parser.parse_args(arguments)
    chance = random.Random(0)
    common, *ends = ([chance.randrange(3, 256) for _ in range(num)] for num in (o.tokens, *[OWN] * SLOTS))
    print(f"{o.model.name}, {o.threads} threads, prompts that begin with the same {o.tokens} tokens")
    if o.only != "restart":
        other_slots(o, [common + end for end in ends])
    if o.only != "slots":
        for cache in ("kvcache", OWN_CACHE):
            with tempfile.TemporaryDirectory() as folder:
                restart(o, common, ends[1:], cache, folder)


if __name__ == "__main__":
    main()
