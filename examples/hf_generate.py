"""Continue a text with transformers' generate(), through this cache and through transformers' own."""

import argparse
import sys
import time
from pathlib import Path

try:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvcache import KVCacheError
    from kvcache.hf import HFCache
    from kvcache.layer import DTYPES
    from kvcache.tools.arguments import parse_tokens
except ModuleNotFoundError as error:
    sys.exit(
        f"hf_generate.py: there is no module {error.name}; run: "
        "pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install -e '.[hf]'"
    )

MODEL = Path(__file__).parent / "model"  # its tokens are bytes


def count(text):
    number = parse_tokens(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def parse():
    p = argparse.ArgumentParser(
        prog="hf_generate.py",
        description=__doc__,
        epilog='example:\n  python examples/hf_generate.py "ROMEO:" --dtype int8 --tokens 300',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("prompt", nargs="?", default="ROMEO:", help='text to continue (default: "ROMEO:")')
    p.add_argument("--dtype", choices=DTYPES, default="f16", help="of the rows in the cache (default: f16)")
    p.add_argument("--tokens", type=count, default=200, metavar="N", help="how many to add (default: 200)")
    args = p.parse_args()
    if not args.prompt:
        p.error("the prompt is empty: give at least one character")
    return args


def generate(model, prompt, cache, attention, num_tokens):
    """Return the new tokens, and tokens/s."""
    model.set_attn_implementation(attention)
    start = time.perf_counter()
    tokens = model.generate(prompt, cache=cache, max_new_tokens=num_tokens, do_sample=False)
    return tokens[0, prompt.shape[1] :], num_tokens / (time.perf_counter() - start)


def main():
    args = parse()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    prompt = torch.tensor([list(args.prompt.encode())])
    cache = HFCache(model.config, dtype=args.dtype)
    ours, speed = generate(model, prompt, cache, "kvcache", args.tokens)
    theirs, their_speed = generate(model, prompt, DynamicCache(config=model.config), "sdpa", args.tokens)
    same = int((ours == theirs).cumprod(0).sum())
    print(args.prompt + bytes(ours.tolist()).decode(errors="replace"), end="\n\n")
    print(f"HFCache, {args.dtype}: {speed:.0f} tokens/s, {cache.nbytes / 1e6:.2f} MB")
    print(f"DynamicCache, f32: {their_speed:.0f} tokens/s; the first {same} of {args.tokens} tokens are the same")


if __name__ == "__main__":
    try:
        main()
    except KVCacheError as error:
        sys.exit(f"hf_generate.py: {error}")
