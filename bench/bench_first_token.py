"""Compare the seconds to the first token by the estimate of `kvcache plan --users` and by `Engine`.

The models are this repository's, and a Llama of 54 million random parameters. One thread computes. Its CPU time is
taken for seconds, so that a busy machine changes little.

    OMP_NUM_THREADS=1 python bench/bench_first_token.py --weights f32
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from kvcache import get_num_threads
from kvcache.hf import Engine
from kvcache.models import shapes
from kvcache.tools import memory_plan, rates, team_plan

MODEL = Path(__file__).resolve().parents[1] / "examples/model"
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
RANDOM = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 16000, "max_position_embeddings": 8192, "bos_token_id": None,
          "eos_token_id": None}  # fmt: skip
RUNS = 3


def first_token(engine, tokens):
    """Return the seconds to a prompt's first token."""
    start = time.perf_counter()
    engine.submit(tokens, max_new_tokens=1).result()
    return time.perf_counter() - start


def compare(model, weights, dtype, lengths):
    """Print a line for each prompt, which is new, or known except for its last 64 tokens."""
    shape, memory = shapes.read(model.config), memory_plan.available_memory(model.config, weights)
    known = rates.measure(shape, [dtype], context=max(lengths), threads=1, weights=weights)
    layers = memory_plan.variants(shape, dtype, None, None)[memory_plan.AS_IT_IS]
    rng, num_tokens = np.random.default_rng(0), model.config.vocab_size
    with Engine(model, dtype, max_bytes=1 << 30) as engine:
        first_token(engine, [1] * 600)  # warms up
        for length in lengths:
            for new in (length, team_plan.NEW_TOKENS):
                taken = []
                for _ in range(RUNS):
                    prompt = rng.integers(0, num_tokens, length).tolist()
                    if new < length:
                        first_token(engine, prompt)
                        prompt = prompt[:-new] + rng.integers(0, num_tokens, new).tolist()
                    taken.append(first_token(engine, prompt))
                planned = team_plan.seconds_of(shape, layers, memory, known, length - new, length)
                ratio = f"planned {planned:.3f} s, took {min(taken):.3f} s, planned / took {planned / min(taken):.2f}"
                print(f"{weights} weights, {dtype} rows, {length:,} tokens, {new:,} of them new: {ratio}", flush=True)


def main():
    """Compare both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=TYPES, default="f32")
    weights = parser.parse_args().weights
    if get_num_threads() != 1:
        parser.error("the threads' times would add up: set OMP_NUM_THREADS=1")
    time.perf_counter = time.process_time  # for what measures rates, too
    torch.set_num_threads(1)
    torch.manual_seed(0)
    auto, config = transformers.AutoModelForCausalLM, transformers.LlamaConfig(**RANDOM)
    models = {
        (256, 512, 1024, 1900): auto.from_pretrained(MODEL, dtype=TYPES[weights]),
        (512, 2048, 4096): auto.from_config(config).to(TYPES[weights]),
    }
    for lengths, model in models.items():
        for dtype in ("f16", "int8"):
            compare(model.eval(), weights, dtype, lengths)


if __name__ == "__main__":
    main()
