"""Models whose rows follow from the length of the text, or from later tokens: no piece of it can be fed alone."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, CONV, MIXED, SLIDING, make, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache, disable, enable  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

TRAINED, NEW = 40, 5  # tokens
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
PHI = {name: value for name, value in BASE.items() if name != "head_dim"}
PHI |= {"num_hidden_layers": 2, "original_max_position_embeddings": TRAINED}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": TRAINED}
LONG |= {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0 + 2.0 * i for i in range(8)]}
DYNAMIC = {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
# Each drops its cache where the text exceeds TRAINED, and then is fed the whole text.
DROPPING = {
    "phi3": lambda: transformers.Phi3Config(**PHI, rope_parameters=LONG, sliding_window=None),
    "phimoe": lambda: transformers.PhimoeConfig(
        **PHI,
        num_local_experts=2,
        rope_parameters=LONG | {"short_mscale": 1.0, "long_mscale": 1.2},
        sliding_window=None,
    ),
}
UNCUT = {
    "dynamic": lambda: transformers.MistralConfig(**SLIDING | DYNAMIC),
    "both ways": lambda: transformers.Gemma3TextConfig(**MIXED, use_bidirectional_attention=True),
    "recurrent": lambda: transformers.Lfm2Config(**BASE | CONV | DYNAMIC),
}
WAYS = {"greedy": (2, {}), "beams": (1, {"num_beams": 3}), "lookup": (1, {"prompt_lookup_num_tokens": 3})}


def watched(model):
    """Return a list to which the lengths of the model's passes are added."""
    fed = []
    model.register_forward_pre_hook(lambda *given: fed.append(given[2]["input_ids"].shape[1]), with_kwargs=True)
    return fed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DROPPING)
def test_a_cache_that_the_model_drops(name, way):
    """It is served at every length: before TRAINED, while the answer exceeds it, and behind it."""
    model, (rows, options) = make(DROPPING[name]()), WAYS[way]
    options = OPTIONS | options
    for length in (TRAINED - 2, TRAINED + 1, 2 * TRAINED):
        tokens = random_tokens(rows, length)
        want = model.generate(tokens, **options)
        enable(model, dtype="f32")
        got = model.generate(tokens, **options)
        disable(model)
        assert isinstance(got.past_key_values, HFCache)
        assert got.past_key_values.get_seq_length() == length + NEW - 1
        assert got.past_key_values.stats()["calls"]["dense"] == 0
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("padding", [0, 7])
def test_a_conversation_that_grows_beyond(padding):
    """Only the turn in which it does is fed once more."""
    model, text = make(DROPPING["phi3"]()), random_tokens(2, TRAINED - 10)
    mask = torch.ones_like(text)
    text[0, :padding] = mask[0, :padding] = 0
    fed, cache, num_fed = watched(model), HFCache(model.config, dtype="f32"), []
    for turn in range(4):
        options = OPTIONS | {
            "attention_mask": torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        }
        want = model.generate(text, **options).sequences
        fed.clear()
        model.set_attn_implementation("kvcache")
        text = model.generate(text, cache=cache, **options).sequences
        model.set_attn_implementation("eager")
        num_fed.append([num for num in fed if num > 1])
        assert torch.equal(text, want)
        assert cache.get_seq_length() == text.shape[1] - 1
        text = torch.cat([text, random_tokens(2, NEW - 1, seed=turn)], 1)
    assert num_fed == [[TRAINED - 10], [NEW, TRAINED + 1], [NEW], [NEW]]


@pytest.mark.parametrize("padding", [2, 5, 20])
def test_a_padded_text_that_grows_beyond(padding):
    """A model drops its cache by the number of columns, and rotates by the number of tokens."""
    model, text = make(DROPPING["phi3"]()), random_tokens(1, TRAINED - 2 + padding)
    cache, mask = HFCache(model.config, dtype="f32"), torch.ones_like(text)
    text[0, :padding] = mask[0, :padding] = 0
    for turn in range(3):
        options = OPTIONS | {"max_new_tokens": 1 + turn}
        options["attention_mask"] = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        want = model.generate(text, **options).sequences
        model.set_attn_implementation("kvcache")
        text = model.generate(text, cache=cache, **options).sequences
        model.set_attn_implementation("eager")
        assert torch.equal(text, want)
        text = torch.cat([text, random_tokens(1, NEW, seed=turn)], 1)
    two, held = random_tokens(2, text.shape[1]), cache.get_seq_length()
    mask = torch.ones_like(two)
    mask[:, :padding] = 0
    model.set_attn_implementation("kvcache")
    with pytest.raises(ValueError, match=r"batch.*2"):
        model.generate(two, cache=cache, **OPTIONS | {"attention_mask": mask})
    assert cache.get_seq_length() == held


def test_a_short_text_that_loses_its_long_neighbour():
    """The longest text of a batch decides the rotation of all."""
    model, text = make(DROPPING["phi3"]()), random_tokens(2, TRAINED + 10)
    cache, mask = HFCache(model.config, dtype="f32"), torch.ones_like(text)
    text[1, :TRAINED] = mask[1, :TRAINED] = 0
    enable(model)
    text = model.generate(text, cache=cache, attention_mask=mask, **OPTIONS).sequences
    cache.reorder_cache(torch.tensor([1, 1]))
    text = torch.cat([text[[1, 1]], random_tokens(2, 4)], 1)
    mask = torch.nn.functional.pad(mask[[1, 1]], (0, text.shape[1] - mask.shape[1]), value=1)
    options = OPTIONS | {"attention_mask": mask, "output_logits": True}
    got = model.generate(text, cache=cache, **options)
    disable(model)
    want = model.generate(text, **options)
    torch.testing.assert_close(got.logits[0], want.logits[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", UNCUT)
def test_a_prompt_is_fed_at_once(name, options):
    model, tokens = make(UNCUT[name]()), random_tokens(1, 600 if name == "dynamic" else 100)
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits[:, -1]
    fed = watched(model)
    model.set_attn_implementation("kvcache")
    made = model.generate(tokens, cache=HFCache(model.config, dtype="f32"), output_logits=True, **OPTIONS, **options)
    assert fed[:2] == [tokens.shape[1], 1]
    torch.testing.assert_close(made.logits[0], want, rtol=0, atol=1e-3)


def test_a_cache_that_is_not_used_is_warned_of():
    class Forgetful(transformers.LlamaForCausalLM):
        def forward(self, input_ids, cache=None, past_key_values=None, **kwargs):
            return super().forward(input_ids, **kwargs)

    model = Forgetful(transformers.LlamaConfig(**BASE)).eval()
    enable(model)
    with pytest.warns(UserWarning, match="its cache holds no token: the Forgetful uses another cache"):
        model.generate(random_tokens(1, 9), **OPTIONS)
