"""Every type of model with a text decoder, small and random: logits with `HFCache` against transformers' own cache.

The table of every_model.md says what each type is expected to do. ``python tests/hf/test_every_model.py`` runs them
all, and prints what differs from the table.
"""

import contextlib
import re
import sys
import warnings
from functools import cache
from pathlib import Path

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import small_models  # noqa: E402 - it imports torch
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - torch may be missing

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

PAGE = Path(__file__).with_name("every_model.md")
PROMPT, STEPS, PADDING, SOURCE = 12, 4, 3, 9  # tokens; the windows of the small models are shorter than the prompt
TOLERANCE = 2e-5  # of the largest logit
# One of each kind: a window, MLA, linear attention, layers that share rows, sinks, an encoder, two attentions a layer.
QUICK = ["deepseek_v3", "diffllama", "gemma3_text", "gemma3n_text", "gpt_oss", "llama", "qwen3_next", "whisper"]
POSITIONS = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]  # derive wrong ones in a pass of one token
NO_MASK = ["cpmant", "xlm"]  # take no mask of more columns than the pass has tokens


@cache
def table():
    """Return the table's rows: what each type of model does with the attention "kvcache", and with its own."""
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (kernels, plain) for kernels, plain, names in rows[1:] for name in names.split(", ")}


class Source(BaseModelOutput):
    """What an encoder made, with the attributes that some decoders look for."""

    attention_mask = None
    router_logits = None


def randomise(model):
    """Draw larger weights than models begin with, so that a logit depends on what is attended to."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "A_log" not in name and "dt" not in name:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def logits(model, past, *, change=0):
    """Logits of a prompt, whose first row is padded, and of further tokens; `change` changes a token of the prompt."""
    name = model.config.model_type
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, 80, (2, PROMPT + STEPS), generator=generator)
    tokens[:, 5] += change
    mask = torch.ones_like(tokens)
    padding = 0 if name in NO_MASK else PADDING
    tokens[0, :padding] = mask[0, :padding] = 0
    prefix, given = "", {}
    if model.config.is_encoder_decoder:
        prefix = "decoder_"
        given["encoder_outputs"] = Source(last_hidden_state=torch.randn(2, SOURCE, 64, generator=generator))
        if model.main_input_name == "input_ids":
            given["attention_mask"] = torch.ones(2, SOURCE, dtype=torch.long)
            given["attention_mask"][1, -2:] = 0
    results = []
    for begin, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + STEPS))]:
        given[f"{prefix}input_ids"] = tokens[:, begin:end]
        if name not in NO_MASK:
            given[f"{prefix}attention_mask"] = mask[:, :end]
        if name in POSITIONS:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
        with torch.no_grad():
            made = model(**given, past_key_values=past, use_cache=True).logits.flatten(2)
        results += [made[0, 0 if begin else padding :], made[1]]
    return torch.cat(results)


def their_cache(model):
    if not model.config.is_encoder_decoder:
        return transformers.DynamicCache(config=model.config)
    config = model.config.get_text_config(decoder=True)
    return transformers.EncoderDecoderCache(*(transformers.DynamicCache(config=config) for _ in range(2)))


def our_cache(config):
    if config.is_encoder_decoder:
        return HFEncoderDecoderCache(config, dtype="f32", max_source_len=SOURCE)
    return HFCache(config, dtype="f32")


def calls(ours):
    parts = (ours.self_attention_cache, ours.cross_attention_cache) if hasattr(ours, "is_updated") else (ours,)
    counts = [part.stats()["calls"] for part in parts]
    return {kind: sum(count[kind] for count in counts) for kind in counts[0]}


def attention_of(model):
    return model.config.get_text_config(decoder=True)._attn_implementation


def check(model, want):
    """Compare logits with a new cache to those wanted; return how the layers were attended over."""
    ours = our_cache(model.config)
    got = logits(model, ours)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert ours.get_seq_length() == PROMPT + STEPS
    return {kind for kind, count in calls(ours).items() if count}


def outcome(name, **changes):
    """Return what a type of model does with the attention "kvcache", and with its own; raise if logits are off."""
    model = small_models.make(name, **changes)
    randomise(model)
    wants = {}
    for attention in ("eager", "sdpa"):
        with contextlib.suppress(ValueError):  # of a model without "sdpa"
            model.set_attn_implementation(attention)
        if attention_of(model) == attention:
            wants[attention] = logits(model, their_cache(model))
            assert check(model, wants[attention]) == {"dense"}
    changed = logits(model, their_cache(model), change=1)
    want = wants[attention_of(model)]
    off = (changed - want)[-2 * STEPS :].abs().max()
    assert off > 100 * TOLERANCE * want.abs().max(), "this comparison cannot tell right from wrong"
    model.set_attn_implementation("kvcache")
    kinds = check(model, want)
    if attention_of(model) != "kvcache":
        assert kinds == {"dense"}
        return "its own attention", "yes"
    return "kernels" if kinds == {"kernel"} else "dense tensors", "yes"


def marked(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def names_of(*beginnings):
    return [name for name, (kernels, _) in table().items() if kernels.startswith(beginnings)]


def test_the_table_is_complete():
    assert sorted(table()) == sorted(small_models.TYPES)
    assert {*QUICK} <= {*table()}


@pytest.mark.parametrize("name", marked(names_of("kernels", "dense", "its own")))
def test_logits(name):
    assert outcome(name) == table()[name]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("falcon", {"multi_query": False}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
        ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 4}),
        ("t5", {"d_kv": 24}),
    ],
)
def test_logits_of_variants(name, changes):
    assert outcome(name, **changes) == table()[name]


@pytest.mark.parametrize("name", names_of("refused"))
def test_refused_when_the_cache_is_made(name):
    """As the types are by default; the table has the reason."""
    with pytest.raises(kvcache.NotSupportedError) as error:
        our_cache(small_models.CONFIG_MAPPING[name]())
    assert table()[name] == (f"refused: {str(error.value).rpartition(': ')[2]}", "refused")


def row_of(name):
    """Return the row of the table that a type of model belongs in."""
    try:
        our_cache(small_models.CONFIG_MAPPING[name]())
    except kvcache.NotSupportedError as error:
        if "no layer with" not in str(error):
            return f"refused: {str(error).rpartition(': ')[2]}", "refused"
    except Exception:
        pass
    try:
        return outcome(name)
    except Exception as error:
        return f"not tried: {type(error).__name__} {error}", ""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or small_models.TYPES:
        got, listed = row_of(name), table().get(name)
        if got != listed:
            print(f"{name}: {got}, listed as {listed}", flush=True)
