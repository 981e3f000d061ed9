"""Compare HFCache with DynamicCache: interleaved speed after a context, memory, quality by type, torch.compile."""

import argparse
import multiprocessing
import resource
import statistics
import warnings
from pathlib import Path

import torch
from driver import BYTES
from transformers import AutoModelForCausalLM, DeepseekV3Config, DynamicCache, LlamaConfig

from kvcache import SlidingWindow
from kvcache.hf import HFCache
from kvcache.tools.arguments import parse_tokens
from kvcache.tools.interleave import timed

CHUNK = 512
COMMON = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "vocab_size": 4096, "max_position_embeddings": 1 << 20, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "gqa": LlamaConfig(**COMMON, num_key_value_heads=4, head_dim=64),
    "mla": DeepseekV3Config(**COMMON, num_key_value_heads=16, mlp_layer_types=["dense"] * 8),  # latents of 512 and 64
}
EXAMPLE = Path(__file__).parents[1] / "examples/model"


def new_model(kind, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.bfloat16).eval()


def prefill(model, cache, context):
    tokens = torch.randint(0, model.config.vocab_size, (1, context))
    for begin in range(0, context, CHUNK):
        model(tokens[:, begin : begin + CHUNK], past_key_values=cache, logits_to_keep=1)


# ---- speed


def step(model, cache):
    return timed(model, torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)[0]


def entrants_of(config, dtypes):
    """Yield name, attention and cache: DynamicCache, HFCache, and HFCache under transformers' own attention."""
    yield "DynamicCache", "sdpa", DynamicCache(config=config)
    yield from ((dtype, "kvcache", HFCache(config, dtype)) for dtype in dtypes)
    yield f"{dtypes[0]}, sdpa", "sdpa", HFCache(config, dtypes[0])


def speed(args):
    model = new_model(args.model, args.threads)
    print("tokens/s after a context, and speedup over DynamicCache")
    for context in args.context:
        entrants = list(entrants_of(model.config, args.dtype))
        for _, attention, cache in entrants:
            model.set_attn_implementation(attention if isinstance(cache, DynamicCache) else "kvcache")
            prefill(model, cache, context)
        seconds = [[] for _ in entrants]
        for _ in range(args.steps):
            for times, (_, attention, cache) in zip(seconds, entrants, strict=True):
                model.set_attn_implementation(attention)
                times.append(step(model, cache))
        dynamic = statistics.median(seconds[0])
        for (name, _, _), times in zip(entrants, seconds, strict=True):
            median = statistics.median(times)
            print(f"{context:9,}  {name:12}  {1 / median:8.1f}  {dynamic / median:6.2f}", flush=True)


# ---- torch.compile


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
    elements = config.num_hidden_layers * width * context
    print(f"peak memory of {context:,} tokens above that of one token, in MB, and over the bytes of the rows")
    peaks = {}
    for name in ("one token", *args.dtype, "DynamicCache"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peaks[name] = pool.apply(peak, (name, args.model, context, args.threads))
        above, rows = peaks[name] - peaks["one token"], elements * BYTES.get(name, 2)
        if above:
            print(f"{name:12}  {above / 1e6:8.1f}  {above / rows:6.2f}", flush=True)


# ---- quality


def read(model, dtype, text):
    """Return the logits of a text whose second half is read one token at a time."""
    cache = HFCache(model.config, dtype)
    half = text.shape[1] // 2
    parts = [model(text[:, :half], past_key_values=cache).logits]
    parts += [model(text[:, i : i + 1], past_key_values=cache).logits for i in range(half, text.shape[1])]
    return torch.cat(parts, 1)[0]


def quality(args):
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32, attn_implementation="kvcache").eval()
    length = model.config.max_position_embeddings
    text = torch.frombuffer(bytearray((EXAMPLE / "eval.txt").read_bytes()), dtype=torch.uint8).long()
    windows = [text[None, i : i + length] for i in range(0, len(text) - length + 1, length)]
    exact = [read(model, "f32", window) for window in windows]
    print(f"the model in this repository over {len(windows)} texts of {length:,} tokens")
    print("type   loss    mean and largest distance of logits from those of f32")
    for dtype in ("f32", *args.dtype):
        logits = [read(model, dtype, window) for window in windows]
        losses = [
            torch.nn.functional.cross_entropy(x[:-1], w[0, 1:]).item() for x, w in zip(logits, windows, strict=True)
        ]
        off = torch.cat([(x - y).abs() for x, y in zip(logits, exact, strict=True)])
        print(f"{dtype:5}  {statistics.mean(losses):.4f}  {off.mean():.1e}  {off.max():.1e}", flush=True)


ONLY = {"speed": speed, "memory": memory, "quality": quality, "compile": compiled}


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--only", choices=ONLY, default="speed", help="default: speed")
    p.add_argument("--model", choices=CONFIGS, default="gqa", help="grouped queries or latents (MLA); default: gqa")
    p.add_argument(
        "--context", type=parse_tokens, nargs="+", default=[512, 8192], metavar="N", help="tokens; default: 512 8192"
    )
    p.add_argument("--dtype", choices=BYTES, nargs="+", default=["bf16", "q8_0"], help="of rows; default: bf16 q8_0")
    p.add_argument("--threads", type=int, default=2, metavar="N", help="of torch and of ours; default: 2")
    p.add_argument("--steps", type=int, default=20, metavar="N", help="of each, interleaved; default: 20")
    args = p.parse_args()
    warnings.filterwarnings("ignore", "kvcache: the rows of every layer")  # one entrant is a plain cache
    with torch.inference_mode():
        ONLY[args.only](args)


if __name__ == "__main__":
    main()
