"""Compare HFCache with DynamicCache: speed after a context, of prompts and over a restart, memory, torch.compile.

python bench/bench_hf.py --context 512 8192
python bench/bench_hf.py --model 1b --context 32k --select 2048     # and with rows selected by sketches
python bench/bench_hf.py --only prompt --model smollm2 --context 4k     # to the first token, also in bytes
python bench/bench_hf.py --only resume --model hybrid --context 8000    # the next turn, after a restart
python bench/bench_hf.py --model 1b --threads 1 --cpu-time ...      # on a machine that is busy otherwise
"""

import copy
import multiprocessing
import resource
import statistics
import tempfile
import time
import warnings
from functools import partial

import torch
from driver import BYTES
from figures import Table, keep
from program import Arguments
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, LlamaConfig, Qwen3_5TextConfig
from transformers.generation.streamers import BaseStreamer

from kvcache import PrefixCache, SlidingWindow, stores
from kvcache.hf import HFCache
from kvcache.hf.told import CACHE
from kvcache.tools.arguments import parse_tokens
from kvcache.tools.interleave import timed

CHUNK = 512
PIECE = 4096  # random rows, of which a context is made
NEW_TOKENS = 5  # of a call to generate(): the times of the last three count
ANSWER, QUESTION = 32, 16  # tokens of the turn before a restart, and of the turn behind it
LONG = 600.0  # seconds that a store may take
COMMON = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "vocab_size": 4096, "max_position_embeddings": 1 << 20, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "gqa": LlamaConfig(**COMMON, num_key_value_heads=4, head_dim=64),
    "mla": DeepseekV3Config(**COMMON, num_key_value_heads=16, mlp_layer_types=["dense"] * 8),  # latents of 512 and 64
    "1b": LlamaConfig(**COMMON | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    }),  # Llama 3.2 1B
    "smollm2": LlamaConfig(**COMMON | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "vocab_size": 49152, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
    }),  # SmolLM2 135M
    "hybrid": Qwen3_5TextConfig(**COMMON | {
        "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 16,
    }),  # Qwen3.5 0.8B with 8 of its 24 layers; every fourth one attends, and the others are recurrent
}  # fmt: skip


def new_model(kind, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.bfloat16).eval()


def prefill(model, cache, context):
    tokens = torch.randint(0, model.config.vocab_size, (1, context))
    for begin in range(0, context, CHUNK):
        model(tokens[:, begin : begin + CHUNK], **{CACHE: cache}, logits_to_keep=1)


def in_child(function, *arguments):
    """Call a function in a process of its own, and return what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# ---- speed


class Clock(BaseStreamer):
    """Notes when each token comes."""

    def __init__(self, now):
        self.now, self.times = now, []

    def put(self, value):
        self.times.append(self.now())

    def end(self):
        pass


def filled_dynamic(model, num_tokens):
    """Return a DynamicCache of random rows, and of recurrent states behind one token."""
    cache = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    model(torch.zeros(1, 1, dtype=torch.long), **{CACHE: cache}, logits_to_keep=1)  # rows that show their shapes
    for layer in cache.layers:
        for name in ("keys", "values") if hasattr(layer, "keys") else ():
            _, num_heads, _, dim = getattr(layer, name).shape
            some = torch.randn(1, num_heads, PIECE, dim, dtype=torch.bfloat16)
            setattr(layer, name, some.repeat(1, 1, -(-num_tokens // PIECE), 1)[:, :, :num_tokens])
    return cache


def state_behind_one_token(model):
    """Return the recurrent state of a sequence; nothing if no layer is recurrent."""
    cache = HFCache(model.config)
    model(torch.zeros(1, 1, dtype=torch.long), **{CACHE: cache}, logits_to_keep=1)
    return cache.recurrent.state_of(0) if cache.recurrent else b""


def filled(model, dtype, select, tokens):
    """Return a prefix cache that has random rows of these tokens, and a recurrent state behind them."""
    memory, state = HFCache.make_kv_cache(model.config, dtype, select=select), state_behind_one_token(model)
    prefix = PrefixCache(memory, fingerprint="random rows", state_bytes=len(state))
    layer = memory.layers[0]
    dims = (layer.head_dim,) if layer.value_in_key else (layer.head_dim, layer.v_head_dim)
    some = [torch.randn(PIECE, layer.num_kv_heads, dim) for dim in dims]
    seq_id, _ = prefix.acquire([*tokens, 0])
    for begin in range(0, len(tokens), PIECE):
        some = [rows.roll(1, 0) for rows in some]  # other rows stand side by side
        count = min(PIECE, len(tokens) - begin)
        with memory.batch(count, seq_ids=[seq_id] * count) as batch:
            for i in range(len(memory.layers)):
                batch.put(i, *(rows[:count] for rows in some))
    if state:
        prefix.checkpoint(seq_id, tokens, state)
    prefix.release(seq_id, tokens)
    return prefix


def entrants_of(model, args, tokens):
    """Yield name, type, attention and cache: DynamicCache and HFCache; with selected rows, or transformers' attention.

    Caches of one type share their rows.
    """
    config = model.config
    yield "DynamicCache", "bf16", "sdpa", filled_dynamic(model, len(tokens))
    for dtype in args.dtype:
        prefix = filled(model, dtype, args.select, tokens)
        yield "kvcache", dtype, "kvcache", HFCache(config, prefix=prefix)
        if args.select is not None:
            yield f"kvcache, select={args.select}", dtype, "kvcache", HFCache(config, prefix=prefix, select=args.select)
        elif dtype == args.dtype[0]:
            yield "kvcache, sdpa", dtype, "sdpa", HFCache(config, prefix=prefix)


def generate(model, cache, tokens, now):
    """Generate tokens behind a text, and return the seconds of each of the last ones.

    A DynamicCache is copied, because a recurrent state cannot go back. An HFCache finds what the next call begins with.
    """
    clock, own = Clock(now), copy.deepcopy(cache) if isinstance(cache, DynamicCache) else cache
    model.generate(tokens, cache=own, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock)
    return [after - before for before, after in zip(clock.times[2:], clock.times[3:], strict=False)]


def speed(args):
    model = new_model(args.model, args.threads)
    now = time.process_time if args.cpu_time else time.perf_counter
    print("tokens/s of generate() behind a context of random rows, and speedup over DynamicCache")
    columns = {"tokens": ">7,", "": "<21", "type": "<5", "tokens/s": ">8.2f", "speedup": ">7.2f"}
    table = Table(columns, f"generate {args.model}")
    for context in args.context:
        tokens = torch.randint(0, model.config.vocab_size, (1, context))
        entrants = [*entrants_of(model, args, tokens[0, :-1].tolist())]
        seconds = [[] for _ in entrants]
        for _ in range(args.steps):
            for times, (_, _, attention, cache) in zip(seconds, entrants, strict=True):
                model.set_attn_implementation(attention)
                times += generate(model, cache, tokens, now)
        dynamic = statistics.median(seconds[0])
        for (name, dtype, _, _), times in zip(entrants, seconds, strict=True):
            rate, quotient = 1 / statistics.median(times), dynamic / statistics.median(times)
            row = {"name": name, "context": context, "threads": args.threads, "type": dtype, "rate": rate}
            table.line(context, name, dtype, rate, quotient, **row, quotient=quotient)
    if args.json:
        keep(args.json, args.command, table.rows)


# ---- the first token

SECONDS = {"tokens": ">7,", "": "<21", "type": "<5", "seconds": ">8.3f", "speedup": ">7.2f"}
WAYS = {"kvcache": "stored", "kvcache, in bytes": "int8"}  # by which prompts are multiplied


def first_token(model, tokens, cache):
    """Generate the first token behind a text."""
    model.set_attn_implementation("kvcache" if isinstance(cache, HFCache) else "sdpa")
    model.generate(tokens, cache=cache, max_new_tokens=1, do_sample=False)


def take_turns(entrants, args):
    """Call functions in turn, and return the median seconds of each."""
    now = time.process_time if args.cpu_time else time.perf_counter
    seconds = [[] for _ in entrants]
    for _ in range(args.steps):
        for times, call in zip(seconds, entrants, strict=True):
            begin = now()
            call()
            times.append(now() - begin)
    return [statistics.median(times) for times in seconds]


def add_seconds(table, context, args, names, seconds):
    """Add a line for each entrant, which is a name and a type, with its speedup over the first one."""
    for (name, dtype), took in zip(names, seconds, strict=True):
        row = {"name": name, "context": context, "threads": args.threads, "type": dtype, "seconds": took}
        table.line(context, name, dtype, took, seconds[0] / took, **row, quotient=seconds[0] / took)


def prompt(args):
    """Time prompts up to the first token, whose rows go into an empty cache."""
    model = new_model(args.model, args.threads)
    print("seconds of generate() from a prompt to the first token, and speedup over DynamicCache")
    table = Table(SECONDS, f"prompt {args.model}")
    names = [("DynamicCache", "bf16"), *((name, dtype) for dtype in args.dtype for name in WAYS)]
    for context in args.context:
        tokens = torch.randint(0, model.config.vocab_size, (1, context))

        def read(name, dtype, tokens=tokens):
            if name in WAYS:
                cache = HFCache(model.config, dtype, prompts=WAYS[name])
            else:
                cache = DynamicCache(config=model.config)
            first_token(model, tokens, cache)

        add_seconds(table, context, args, names, take_turns([partial(read, *entrant) for entrant in names], args))
    if args.json:
        keep(args.json, args.command, table.rows)


# ---- over a restart


def opened(model, dtype, state_bytes, folder):
    """Return a prefix cache that reads and writes a folder."""
    memory, store = HFCache.make_kv_cache(model.config, dtype), stores.open(f"dir:{folder}/{dtype}")
    return PrefixCache(memory, fingerprint="random", state_bytes=state_bytes, store=store, timeout=LONG)


@torch.inference_mode()
def converse(args, context, folder):
    """Return a conversation of so many tokens, which a process has had, and left in a folder."""
    model = new_model(args.model, args.threads)
    model.set_attn_implementation("kvcache")
    text = torch.randint(0, model.config.vocab_size, (1, context - ANSWER))
    for dtype in args.dtype:
        prefix = opened(model, dtype, HFCache.state_bytes(model), folder)
        cache = HFCache(model.config, prefix=prefix)
        conversation = model.generate(text, cache=cache, max_new_tokens=ANSWER, do_sample=False)
        cache.release(conversation)
        if not prefix.close(LONG):
            raise SystemExit(f"{folder} did not take the values: {prefix.stats}")
    return conversation.tolist()


@torch.inference_mode()
def go_on(args, conversation, folder):
    """Return the seconds in which another process answers the next turn: all computed, and with each type's rows."""
    model = new_model(args.model, args.threads)
    model.set_attn_implementation("kvcache")
    state_bytes = HFCache.state_bytes(model)

    def turn():
        question = torch.randint(0, model.config.vocab_size, (1, QUESTION))
        return torch.cat([torch.tensor(conversation), question], 1)

    def compute():
        first_token(model, turn(), DynamicCache(config=model.config))

    def find(dtype):
        prefix = opened(model, dtype, state_bytes, folder)
        first_token(model, turn(), HFCache(model.config, prefix=prefix))
        if not prefix.stats.matched:
            raise SystemExit(f"no tokens were found: {prefix.stats}")

    return take_turns([compute, *(partial(find, dtype) for dtype in args.dtype)], args)


def resume(args):
    """Time a conversation's next turn up to its first token, in a process that finds the turns before in a folder."""
    print("seconds from a turn to its first token after a restart, and speedup over computing all with DynamicCache")
    table = Table(SECONDS, f"resume {args.model}")
    names = [("DynamicCache", "bf16"), *(("kvcache, from a folder", dtype) for dtype in args.dtype)]
    for context in args.context:
        with tempfile.TemporaryDirectory() as folder:
            conversation = in_child(converse, args, context, folder)
            add_seconds(table, context, args, names, in_child(go_on, args, conversation, folder))
    if args.json:
        keep(args.json, args.command, table.rows)


# ---- torch.compile


def step(model, cache):
    return timed(model, torch.zeros(1, 1, dtype=torch.long), **{CACHE: cache})[0]


def compiled(args):
    """Compare a model with and without a `forward` that torch compiles, three times."""
    model = new_model(args.model, args.threads)
    model.set_attn_implementation("kvcache")
    for context in args.context:
        torch.compiler.reset()
        entrants = [
            (forward, HFCache(model.config, args.dtype[0])) for forward in (model, torch.compile(model.forward))
        ]
        for _, cache in entrants:
            prefill(model, cache, context)
        first = [step(*entrants[1]) for _ in range(3)]  # the second call has a sequence of another length
        print(f"{context:,} tokens: the first calls take {', '.join(f'{seconds:.1f}' for seconds in first)} s")
        for _ in range(3):
            pairs = [[step(*entrant) for entrant in entrants] for _ in range(args.steps)]
            eager, fast = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"{1 / eager:8.1f} tokens/s, compiled {1 / fast:8.1f}: {eager / fast:.2f}", flush=True)


# ---- memory


def peak(name, kind, context, threads):
    """Return the most bytes that a process takes while it prefills a context."""
    model = new_model(kind, threads)
    model.set_attn_implementation("sdpa" if name == "DynamicCache" else "kvcache")
    if name == "DynamicCache":
        cache = DynamicCache(config=model.config)
    elif name == "one token":
        cache = HFCache(model.config, policy=SlidingWindow(1))
    else:
        cache = HFCache(model.config, name)
    with torch.inference_mode():
        prefill(model, cache, context)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(args):
    context = max(args.context)
    config = CONFIGS[args.model]
    width = 576 if args.model == "mla" else 2 * config.num_key_value_heads * config.head_dim
    elements = HFCache.make_kv_cache(config).num_layers * width * context
    print(f"peak memory of {context:,} tokens above that of one token, and over the bytes of the rows")
    table = Table({"": "<12", "MB": ">8.1f", "over rows": ">6.2f"})
    peaks = {}
    for name in ("one token", *args.dtype, "DynamicCache"):
        peaks[name] = in_child(peak, name, args.model, context, args.threads)
        above, rows = peaks[name] - peaks["one token"], elements * BYTES.get(name, 2)
        if above:
            table.line(name, above / 1e6, above / rows)


ONLY = {"speed": speed, "prompt": prompt, "resume": resume, "memory": memory, "compile": compiled}


def main():
    p = Arguments(__doc__)
    p.add_argument("--only", choices=ONLY, default="speed", help="what is measured")
    p.add_argument("--model", choices=CONFIGS, default="gqa",
                   help="grouped queries, latents (MLA), Llama 3.2, SmolLM2, recurrent layers (Qwen3.5)")  # fmt: skip
    p.list("--context", [512, 8192], parse_tokens, help="tokens")
    p.list("--dtype", ["bf16", "q8_0"], known=BYTES, help="of rows")
    p.number("--threads", 2, "of torch and of ours")
    p.number("--steps", 20, "calls of each, interleaved")
    p.add_argument("--select", type=parse_tokens, metavar="N", help="with --only speed: also select about N rows")
    p.add_argument("--cpu-time", action="store_true", help="of speed and prompts, count the process's CPU time")
    p.kept()
    args = p.parse_args()
    warnings.filterwarnings("ignore", "kvcache: the rows of every layer")  # one entrant is a plain cache
    with torch.inference_mode():
        ONLY[args.only](args)


if __name__ == "__main__":
    main()
