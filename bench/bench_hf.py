"""transformers' decoding with HFCache and with DynamicCache: tokens a second after a context, in turns."""

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from kvcache.hf import HFCache

CHUNK = 512
CONFIG = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
    head_dim=64, vocab_size=4096, max_position_embeddings=1 << 20, eos_token_id=None,
)  # fmt: skip


def prefill(model, cache, context):
    tokens = torch.randint(0, CONFIG.vocab_size, (1, context))
    for begin in range(0, context, CHUNK):
        model(tokens[:, begin : begin + CHUNK], past_key_values=cache, logits_to_keep=1)


def step(model, cache):
    start = time.perf_counter()
    model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    return time.perf_counter() - start


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument(
        "--context", type=int, nargs="+", default=[512, 8192], metavar="N", help="tokens (default: 512 8192)"
    )
    p.add_argument("--dtype", nargs="+", default=["bf16", "q8_0"], help="of our rows (default: bf16 q8_0)")
    p.add_argument("--threads", type=int, default=2, metavar="N", help="of torch and of ours (default: 2)")
    p.add_argument("--steps", type=int, default=20, metavar="N", help="of each, in turns (default: 20)")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()
    print("  context  DynamicCache  " + "".join(f"{dtype:>8}  ratio" for dtype in args.dtype), " tokens/s")
    with torch.inference_mode():
        for context in args.context:
            entrants = [("sdpa", DynamicCache(config=CONFIG))] + [("kvcache", HFCache(CONFIG, d)) for d in args.dtype]
            for attention, cache in entrants:
                model.set_attn_implementation(attention)
                prefill(model, cache, context)
            seconds = [[] for _ in entrants]
            for _ in range(args.steps):
                for times, (attention, cache) in zip(seconds, entrants, strict=True):
                    model.set_attn_implementation(attention)
                    times.append(step(model, cache))
            theirs, *ours = (1 / statistics.median(times) for times in seconds)
            print(f"{context:9,}  {theirs:12.1f}  " + "".join(f"{x:8.1f}  {x / theirs:5.2f}" for x in ours), flush=True)


if __name__ == "__main__":
    main()
