"""Measure the first token's time of a prompt whose beginning llama-server has computed before, prefixes on and off.

cd integrations/llama.cpp && ./build.sh                               # once, minutes
python bench/bench_llama_prefix.py                                    # 8,192 tokens, in the shape of a 1 B Llama
python bench/bench_llama_prefix.py --model lfm-1b                     # in the shape of LFM2 1.2B, a hybrid model
python bench/bench_llama_prefix.py --tokens 2k --model model.gguf

One server after the other computes a prompt on its first slot. Then it computes prompts on other slots that begin with
the same tokens and end with 16 tokens of their own. With a folder, the server is started again in between. A model of
random weights is written if none is named.
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from bench_llama_cpp import BUILT, written
from llama_cpp_models import SHAPES

from kvcache.tools.arguments import parse_tokens

SLOTS = 4
OWN = 16  # tokens at the end of a prompt that no other has


@contextmanager
def serve(program: Path, model: Path, context: int, threads: int, prefix: str) -> Iterator[str]:
    """Start a server, and yield its address."""
    size = ("--parallel", str(SLOTS), "--ctx-size", str(context), "--kv-unified", "--threads", str(threads))
    command = [str(program), "--model", str(model), "--port", "0", *size, "--kvcache", "--kvcache-prefix", prefix]
    with tempfile.TemporaryFile("w+") as log:
        waits = os.environ | {"OMP_WAIT_POLICY": "passive"}  # in vain, on cores that other programs have
        process = subprocess.Popen([*command, "--verbosity", "3"], stdout=log, stderr=subprocess.STDOUT, env=waits)
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
            yield found[1]
        finally:
            process.terminate()
            process.wait()


def first_token(address: str, prompt: list[int], slot: int) -> tuple[float, int]:
    """Return the seconds until a prompt's first token, and how many of its tokens were there."""
    body = {"prompt": prompt, "n_predict": 1, "id_slot": slot, "temperature": 0}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    began = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return time.perf_counter() - began, answer["timings"]["cache_n"]


def model_of(name: str) -> Path:
    """Return a file; for the name of a shape, a written file of random weights."""
    return written(name) if name in SHAPES else Path(name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=parse_tokens, default=8192, help="that prompts have in common (default: 8k)")
    parser.add_argument(
        "--model", type=model_of, default="llama-1b", help=f"a GGUF file, or one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--library", type=Path, default=BUILT, help="the folder of llama-server (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all)")
    o = parser.parse_args(arguments)
    chance = random.Random(0)
    common = [chance.randrange(3, 256) for _ in range(o.tokens)]
    prompts = [common + [chance.randrange(3, 256) for _ in range(OWN)] for _ in range(SLOTS)]
    print(f"{o.model.name}, {o.threads} threads, prompts that begin with the same {o.tokens} tokens")

    def server(prefix: str) -> AbstractContextManager[str]:
        return serve(o.library / "llama-server", o.model, 2 * o.tokens + SLOTS * 256, o.threads, prefix)

    def show(prefix: str, what: str, seconds: float, there: int) -> None:
        print(f"prefix {prefix:<4} {what:<14} {seconds:8.3f} s, {there} tokens there", flush=True)

    for prefix in ("on", "off"):
        with server(prefix) as address:
            show(prefix, "first slot", *first_token(address, prompts[0], 0))
            others = [first_token(address, prompt, 1) for prompt in prompts[1 : 2 if prefix == "off" else SLOTS]]
            show(prefix, "another slot", statistics.median(seconds for seconds, _ in others), others[0][1])
    with tempfile.TemporaryDirectory() as folder:
        for what, prompt in (("first slot", prompts[0]), ("after a restart", prompts[1])):
            with server(f"dir:{folder}") as address:
                show("dir", what, *first_token(address, prompt, 0))


if __name__ == "__main__":
    main()
