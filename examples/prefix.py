"""Ask a small Llama for several replies to one scene, whose keys and values a PrefixCache keeps from the first on."""

import sys
import time
from pathlib import Path

try:
    import kvcache
    from kvcache.models.fingerprint import fingerprint
    from kvcache.runner import Llama
except ModuleNotFoundError as error:
    sys.exit(f"prefix.py: there is no module {error.name}; run: pip install -e .")

MODEL = Path(__file__).parent / "model"  # its tokens are bytes
SCENE = b"""\
ESCALUS:
Go, bring them in; the morning is not young,
And half the city waits before the gate
To hear what sentence shall be given here.
My lords, be patient; speak when you are called,
And let no man put passion in his plea.

"""
SPEAKERS = (b"ROMEO:\n", b"JULIET:\n", b"First Citizen:\n")
NUM_TOKENS = 60


def new_prefix_cache(model):
    c = model.config
    layers = [kvcache.Layer(c.num_kv_heads, c.head_dim, policy=policy, rope=c.rope) for policy in c.policy]
    limits = {"max_seq_len": c.max_seq_len, "max_sequences": None, "max_bytes": 64 << 20}
    cache = kvcache.KVCache(layers, block_size=16, **limits)
    return kvcache.PrefixCache(cache, fingerprint=fingerprint(MODEL))


def reply(model, prefix, prompt):
    """Return the likeliest reply to a prompt, how many of its tokens were found, and the seconds to the first one."""
    start = time.perf_counter()
    tokens = list(prompt)
    seq_id, matched = prefix.acquire(tokens)
    try:
        logits = model.forward(tokens[matched:], prefix.cache, seq_id=seq_id, last_only=True)
        seconds = time.perf_counter() - start
        for _ in range(NUM_TOKENS):
            tokens.append(int(logits[-1].argmax()))
            logits = model.forward(tokens[-1:], prefix.cache, seq_id=seq_id)
    finally:
        prefix.release(seq_id, tokens)
    return bytes(tokens[len(prompt) :]), matched, seconds


def main():
    model = Llama.load(MODEL)
    prefix = new_prefix_cache(model)
    for speaker in SPEAKERS:
        prompt = SCENE + speaker
        text, matched, seconds = reply(model, prefix, prompt)
        print(f"{speaker.decode()}{text.decode(errors='replace')}")
        print(f"({matched} of {len(prompt)} tokens were there, the rest took {1000 * seconds:.0f} ms)\n")


if __name__ == "__main__":
    main()
