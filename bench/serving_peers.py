"""Servers that bench_serving.py asks: llama-server, and OpenVINO GenAI and vLLM, which run in a process each.

python serving_peers.py NAME MODEL THREADS CLOCK     # reads and writes lines of JSON
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

PIECE = 512  # the most tokens of prompts in a step
SEQUENCES = 64  # the most requests at once
MEMORY = 2  # GiB of rows
NO_MODEL = "--model or --gguf names its weights"

Prompts: TypeAlias = Sequence[Sequence[int]]
Clock: TypeAlias = Callable[[], float]


@dataclass
class Answers:
    """The tokens of requests that were asked at once, and the seconds to the first of each and to the last of all."""

    tokens: list[list[int]]
    first: list[float]
    took: float = 0.0


Ask: TypeAlias = Callable[[Prompts, int], Answers]  # asks a server for as many tokens behind each prompt


class Unavailable(Exception):
    """A peer cannot be measured; the message says why."""


def begin(count: int, now: Clock) -> tuple[Answers, Callable[[int, Sequence[int]], None]]:
    """Return answers to so many requests, which begin now, and a function that adds new tokens of one of them."""
    answers = Answers([[] for _ in range(count)], [0.0] * count)
    start = now()

    def add(index: int, tokens: Sequence[int]) -> None:
        answers.took = now() - start
        if not answers.tokens[index]:
            answers.first[index] = answers.took
        answers.tokens[index] += tokens

    return answers, add


@contextmanager
def llama_server(program: Path, gguf: Path | None, options: Sequence[str], counts_cpu_time: bool) -> Iterator[Ask]:
    """Run llama-server; its clock may count its own CPU time."""
    if gguf is None:
        raise Unavailable(NO_MODEL)
    if not program.is_file():
        raise Unavailable(f"{program} is no file: run integrations/llama.cpp/build.sh, or give --library")
    command = [str(program), "--model", str(gguf), "--port", "0", "--verbosity", "3", *options]
    waits = os.environ | {"OMP_WAIT_POLICY": "passive"}
    with listening(command, waits) as (server, address):
        clock = ~server.pid << 3 | 2  # as clock_getcpuclockid makes it

        def now() -> float:
            return time.clock_gettime(clock) if counts_cpu_time else time.perf_counter()

        def body(prompt: Sequence[int], count: int) -> dict[str, Any]:
            return {"prompt": prompt, "n_predict": count, "return_tokens": True}

        yield asks_over_http(f"{address}/completion", now, body, lambda piece: piece["tokens"])


@contextmanager
def kvcache_serve(model: Path, dtype: str, tokens: int) -> Iterator[Ask]:
    """Run kvcache serve on a folder, with room for so many tokens."""
    command = [sys.executable, "-m", "kvcache", "serve", str(model), "--port", "0", "--dtype", dtype]

    def body(prompt: Sequence[int], count: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": count}

    def tokens_of(piece: Any) -> list[int]:
        return [0] if piece["choices"][0]["text"] else []  # its text has one token or more

    with listening([*command, "--capacity", str(tokens)]) as (_, address):
        yield asks_over_http(f"{address}/v1/completions", time.perf_counter, body, tokens_of)


@contextmanager
def listening(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server; yield its process and its address."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            yield server, _address(server, log)
        finally:
            server.terminate()
            server.wait()


def _address(process: subprocess.Popen[bytes], log: Any) -> str:
    """Wait until a server listens."""
    while True:
        log.seek(0)
        text = log.read()
        if found := re.search(r" on (http://[^\s/]+:\d+)", text):
            return found[1]
        if process.poll() is not None:
            raise Unavailable(f"the server ended: {text[-300:]}")
        time.sleep(0.1)


def asks_over_http(
    url: str,
    now: Clock,
    body: Callable[[Sequence[int], int], dict[str, Any]],
    tokens_of: Callable[[Any], Sequence[int]],
) -> Ask:
    """Return what asks a server for streams; `body` makes a request, and `tokens_of` reads a piece of an answer."""

    def ask(prompts: Prompts, count: int) -> Answers:
        answers, add = begin(len(prompts), now)

        def read(index: int) -> None:
            asked = body(prompts[index], count) | {"temperature": 0, "ignore_eos": True, "stream": True}
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode())) as lines:
                for line in lines:
                    if line.startswith(b"data: {") and (tokens := tokens_of(json.loads(line[6:]))):
                        add(index, tokens)

        with ThreadPoolExecutor(len(prompts)) as pool:
            [*pool.map(read, range(len(prompts)))]
        return answers

    return ask


@contextmanager
def process(python: str, name: str, model: Path | None, threads: int, now: Clock) -> Iterator[Ask]:
    """Run a peer in a process, which waits between questions, so that others can be measured."""
    if model is None:
        raise Unavailable(NO_MODEL)
    command = [python, "-P", str(Path(__file__).resolve()), name, str(model), str(threads), now.__name__]
    waits = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "OMP_NUM_THREADS": str(threads)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=os.environ | waits, **pipes) as child:

        def read() -> Any:
            line = child.stdout.readline()
            answer = json.loads(line) if line else {"error": f"it ended with {child.wait()}"}
            if "error" in answer:
                raise Unavailable(answer["error"])
            return answer

        def ask(prompts: Prompts, count: int) -> Answers:
            print(json.dumps([prompts, count]), file=child.stdin, flush=True)
            return Answers(**read())

        read()
        yield ask


# ---- in the process


def openvino(model: str, threads: int, now: Clock) -> Ask:
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.cache_size = True, MEMORY
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = PIECE, SEQUENCES
    config = openvino_genai.GenerationConfig()
    config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
    pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def ask(prompts: Prompts, count: int) -> Answers:
        config.max_new_tokens = count
        answers, add = begin(len(prompts), now)
        handles = [pipe.add_request(i, openvino.Tensor(np.array([p])), config) for i, p in enumerate(prompts)]
        while pipe.has_non_finished_requests():
            pipe.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for one in handle.read().values():
                        add(i, [*map(int, one.generated_ids)])
        return answers

    return ask


def vllm(model: str, threads: int, now: Clock) -> Ask:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": str(MEMORY), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # so that OMP_NUM_THREADS counts
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_model_len=8192,
        max_num_batched_tokens=PIECE, max_num_seqs=SEQUENCES, enable_prefix_caching=True,
    ).llm_engine  # fmt: skip

    def ask(prompts: Prompts, count: int) -> Answers:
        options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        answers, add = begin(len(prompts), now)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, options)
        while engine.has_unfinished_requests():
            for one in engine.step():
                i = int(one.request_id)
                add(i, one.outputs[0].token_ids[len(answers.tokens[i]) :])
        return answers

    return ask


def main(name: str, model: str, threads: str, clock: str) -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps a library's prints out of the answers
    try:
        ask = {"openvino": openvino, "vllm": vllm}[name](model, int(threads), getattr(time, clock))
    except Exception as error:
        print(json.dumps({"error": repr(error)[:300]}), file=lines)
        return
    print(json.dumps({}), file=lines)
    for line in sys.stdin:
        print(json.dumps(asdict(ask(*json.loads(line)))), file=lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
