"""Measure what a prefix cache saves and costs: python bench/bench_prefix.py [--only SECTIONS] [--valkey URL]

`prefill` needs torch and transformers. It measures the time to the first token of a prompt, with a Llama of random
weights. The prompt is computed, or found in memory, in a DirectoryStore or in Valkey. A new prefix cache reads the
stores, as in another process. `hybrid` measures it with models that have recurrent layers, with a prefix cache and
without, and what the states take beside the rows. `calls` needs no model: it measures acquire, release, the making of
keys, and how much longer a commit takes with a store that sleeps. Measurements take turns; quotients are medians of the
rounds' quotients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from figures import Figures
from program import Arguments

import kvcache
from kvcache import stores
from kvcache.tools.arguments import parse_tokens
from kvcache.tools.interleave import rounds, timed

SECTIONS = ("calls", "prefill", "hybrid")
LONG = 600.0
BLOCK = 64
SHAPE = {
    "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096,
    "max_position_embeddings": 1 << 17, "eos_token_id": None,
}  # fmt: skip


def report(f: Figures, name: str, seconds: list[float], others: list[float], wanted: str = "") -> None:
    f.samples(f"first token of {name}", [1e3 * s for s in seconds], "ms")
    f.ratio("  speedup over prefill", others, seconds, wanted)


# ---- the time to the first token


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str | None]:
    """Yield the address of a server: the given address, or a started server's, or None if there is none."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if url is not None or program is None:
        yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"valkey://127.0.0.1:{port}/0"
        finally:
            process.kill()
            process.wait()


def measure_prefill(f: Figures, arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kvcache.hf import HFCache

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, "num_hidden_layers": arguments.layers, "hidden_size": arguments.hidden})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kvcache").eval()
    tokens = torch.randint(0, config.vocab_size, (1, arguments.tokens))

    def prefix_on(store: Any = None) -> kvcache.PrefixCache:
        memory = HFCache.make_kv_cache(config, block_size=BLOCK)
        return kvcache.PrefixCache(memory, fingerprint="random", store=store, timeout=LONG)

    def answer(prefix: kvcache.PrefixCache, matched: int) -> float:
        begin = time.perf_counter()
        cache = HFCache(config, prefix=prefix)
        model.generate(tokens, past_key_values=cache, max_new_tokens=1, do_sample=False)
        taken = time.perf_counter() - begin
        if prefix.stats.matched < matched:
            raise SystemExit(f"only {prefix.stats.matched} tokens were found: {prefix.stats}")
        cache.release(tokens)
        return taken

    def anew(url: str | None, matched: int) -> Callable[[], float]:
        def run() -> float:
            store = None if url is None else stores.open(url)
            prefix = prefix_on(store)
            taken = answer(prefix, matched)
            if store is not None and not prefix.close(LONG):
                raise SystemExit(f"{url} did not take the values: {prefix.stats}")
            del prefix
            gc.collect()
            return taken

        return run

    memory = prefix_on()
    answer(memory, 0)
    found = arguments.tokens - BLOCK
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        entrants = {"prefill": (anew(None, 0), ""), "memory": (lambda: answer(memory, found), "50")}
        urls = {"DirectoryStore": (f"dir:{folder}", "10")}
        url = stack.enter_context(server(arguments.valkey))
        if url is not None:
            urls["Valkey"] = url, "5"
        for name, (address, wanted) in urls.items():
            anew(address, 0)()  # fills it
            entrants[name] = anew(address, found), wanted
        parameters = model.num_parameters()
        print(f"{arguments.tokens:,} tokens, {parameters / 1e6:.0f} million parameters, {arguments.threads} threads")
        functions = [run for run, _ in entrants.values()]
        times = [*zip(*rounds(*functions, seconds=arguments.seconds, least=5), strict=True)]
        for (name, (_, wanted)), taken in zip(entrants.items(), times, strict=True):
            report(f, name, list(taken), list(times[0]), wanted)


def hybrid_models(layers: int, hidden: int) -> Iterator[tuple[str, Any]]:
    """Yield models with random weights, of whose layers every third attends, and the others are recurrent."""
    from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, Lfm2Config

    def types(recurrent: str) -> list[str]:
        return ["full_attention" if i % 3 == 2 else recurrent for i in range(layers)]

    shape = {**SHAPE, "num_hidden_layers": layers, "hidden_size": hidden}
    configs = {
        "LFM2": Lfm2Config(**shape, layer_types=types("conv")),
        "Granite": GraniteMoeHybridConfig(
            **shape, layer_types=types("linear_attention"), num_local_experts=0, shared_intermediate_size=1408,
            mamba_n_heads=hidden // 32, mamba_d_head=64, mamba_d_state=128,
        ),
    }  # fmt: skip
    for name, config in configs.items():
        yield name, AutoModelForCausalLM.from_config(config, attn_implementation="kvcache").eval()


def measure_hybrid(f: Figures, arguments: argparse.Namespace) -> None:
    import torch

    from kvcache.hf import HFCache

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{arguments.tokens:,} known tokens and 16 new ones, {arguments.threads} threads")
    for name, model in hybrid_models(arguments.layers, arguments.hidden):
        config = model.config
        memory = HFCache.make_kv_cache(config, block_size=BLOCK)
        prefix = kvcache.PrefixCache(memory, fingerprint="random", state_bytes=HFCache.state_bytes(model))
        known = torch.randint(3, config.vocab_size, (1, arguments.tokens))  # tokens that no mask hides

        def answer(tokens: torch.Tensor, prefix: kvcache.PrefixCache | None, model: Any = model) -> HFCache:
            cache = HFCache(model.config, prefix=prefix)
            model.generate(tokens, past_key_values=cache, max_new_tokens=1, do_sample=False)
            return cache

        def ask(prefix: kvcache.PrefixCache | None, known: Any = known, answer: Any = answer) -> float:
            question = torch.randint(3, SHAPE["vocab_size"], (1, 16))
            taken, _ = timed(answer, torch.cat([known, question], 1), prefix)
            return taken

        answer(known, prefix).release(known)
        stats, rows = prefix.stats, memory.nbytes - prefix.stats.checkpoint_bytes
        times = rounds(lambda: ask(None), lambda: ask(prefix), seconds=arguments.seconds, least=2)  # noqa: B023
        computed, found = ([*taken] for taken in zip(*times, strict=True))
        if prefix.stats.matched < len(found) * arguments.tokens:
            raise SystemExit(f"only {prefix.stats.matched} tokens were found: {prefix.stats}")
        report(f, f"{name}, {model.num_parameters() / 1e6:.0f} million parameters, prefill", computed, computed)
        report(f, f"{name}, memory", found, computed, "50")
        note = f"{stats.checkpoints} states of {prefix.state_bytes / 1e6:.2f} MB, beside {rows / 1e6:.1f} MB of rows"
        f.value("  bytes of states over those of rows", f"{stats.checkpoint_bytes / rows:.3f}", note=note)


# ---- what calls take


class Sleeping(dict[str, bytes]):
    """A store that sleeps a second per call."""

    def __getitem__(self, key: str) -> bytes:
        time.sleep(1)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: bytes) -> None:
        time.sleep(1)
        super().__setitem__(key, value)


def make_cache(dim: int = 8) -> kvcache.KVCache:
    return kvcache.KVCache(2, 1, dim, None, max_sequences=None, block_size=BLOCK)


def feed(cache: kvcache.KVCache, seq_id: int, begin: int, rows: np.ndarray) -> float:
    """Feed tokens, and return the seconds that the commit took."""
    num = len(rows)
    batch = cache.batch(positions=range(begin, begin + num), seq_ids=[seq_id] * num)
    for layer in range(cache.num_layers):
        batch.put(layer, rows, rows)
    return timed(batch.commit)[0]


def measure_acquire(f: Figures, seconds: float) -> None:
    cache = make_cache()
    prefix = kvcache.PrefixCache(cache, fingerprint="none")
    tokens = np.arange(32768)
    seq_id, _ = prefix.acquire(tokens)
    feed(cache, seq_id, 0, np.ones((len(tokens), 1, 8), np.float32))
    prefix.release(seq_id, tokens)

    def acquire() -> tuple[float, float]:
        taken, (seq_id, matched) = timed(prefix.acquire, tokens)
        assert matched == len(tokens) - 1
        return taken, timed(prefix.release, seq_id, tokens)[0]

    def name() -> float:
        return timed(prefix.names, tokens)[0]

    hits, names = zip(*rounds(acquire, name, seconds=seconds, least=20), strict=True)
    acquired, released = zip(*hits, strict=True)
    f.samples("acquire, a hit of 32,768 tokens, from Python", [1e3 * s for s in acquired], "ms", "<= 0.5")
    f.samples("  its release", [1e3 * s for s in released], "ms")
    f.samples("names, million tokens/s", [len(tokens) / s / 1e6 for s in names], "", ">= 20")


def measure_commit(f: Figures, seconds: float) -> None:
    """Commit a token at a time to two caches in turn: one has a store that sleeps, the other none."""
    one = np.ones((1, 1, 128), np.float32)
    sleeping = Sleeping()
    serving = []
    for store in (None, sleeping):
        cache = make_cache(128)
        prefix = kvcache.PrefixCache(cache, fingerprint="none", store=store, timeout=0)
        serving.append((cache, prefix))

    def thousand() -> list[list[float]]:
        taken: list[list[float]] = [[], []]
        prompt = np.random.default_rng().integers(0, 1 << 30, 1000)
        acquired = [prefix.acquire(prompt)[0] for _, prefix in serving]
        for position in range(len(prompt)):
            order = (0, 1) if position % 2 else (1, 0)
            for i in order:
                taken[i].append(feed(serving[i][0], acquired[i], position, one))
        for (_, prefix), seq_id in zip(serving, acquired, strict=True):
            prefix.release(seq_id, prompt)
        return taken

    thousand()
    found = [round_ for [round_] in rounds(thousand, seconds=seconds, least=20)]
    without, with_store = ([t for each in found for t in each[i]] for i in range(2))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        first, second = (float(np.quantile(times, share)) for times in (without, with_store))
        note = f"{first * 1e6:.1f} µs, with the store {second * 1e6:.1f}"
        f.value(f"commit of a token with a store that sleeps, {name}, cost", f"{second / first:.3f}", "<= 1.1", note)
    serving[1][1].close(0)


def main() -> None:
    parser = Arguments(__doc__)
    parser.list("--only", SECTIONS, known=SECTIONS)
    parser.add_argument("--tokens", type=parse_tokens, default=4096, metavar="N", help="of the prompt")
    parser.number("--layers", 12, "of the model")
    parser.number("--hidden", 768, "hidden size of the model")
    parser.number("--threads", 2, "of torch")
    parser.add_argument("--valkey", metavar="URL", help="a server; by default one is started if it is installed")
    parser.number("--seconds", 10.0, "of each section; five rounds are the least")
    o = parser.parse_args()
    f = Figures("prefix")
    if "calls" in o.only:
        measure_acquire(f, o.seconds)
        measure_commit(f, o.seconds)
    if "prefill" in o.only:
        measure_prefill(f, o)
    if "hybrid" in o.only:
        measure_hybrid(f, o)


if __name__ == "__main__":
    main()
