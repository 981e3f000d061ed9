"""Operations of models and users on the keys, values and masks that the attention "kvcache" gives them."""

import functools
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import two_sided  # noqa: E402 - torch may be missing
from transformers.models.llama import modeling_llama  # noqa: E402 - torch may be missing

from kvcache import FullAttention, NotSupportedError, SlidingWindow  # noqa: E402
from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

LAYERS = 3
BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.5,
}
TOKENS = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**BASE)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="kvcache").eval()


@pytest.fixture
def passed(model):
    """A cache that a model has been through with two rows of ten tokens, and its rows in transformers' own cache."""
    ours, theirs = HFCache(model.config, dtype="f32"), transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(TOKENS[:, :10], past_key_values=ours)
        model(TOKENS[:, :10], past_key_values=theirs)
    return ours, theirs


def logits(model, cache, parts=((0, 6), (6, 10), (10, 11))):
    with torch.inference_mode():
        return torch.cat([model(TOKENS[:, begin:end], past_key_values=cache).logits for begin, end in parts], 1)


def run(model, inputs, cache, attention, columns):
    """Feed a decoder some columns of its tokens."""
    model.set_attn_implementation(attention)
    given = {"input_features" if model.config.model_type == "whisper" else "input_ids": inputs["inputs"]}
    tokens = inputs["decoder_input_ids"][:, columns]
    with torch.no_grad():
        model(**given, decoder_input_ids=tokens, past_key_values=cache)


def test_an_encoders_rows_are_those_of_the_source_that_is_held():
    """Keys that were read before a reset are refused. Values belong to the source of today."""
    model, inputs = two_sided("bart")
    cache, tokens = HFEncoderDecoderCache(model.config, "f32"), slice(0, 2)
    run(model, inputs, cache, "kvcache", tokens)
    layer = cache.cross_attention_cache.layers[0]
    first = layer.keys  # and no values, which are read behind them
    cache.reset()
    run(model, inputs | {"inputs": inputs["inputs"].flip(1)}, cache, "kvcache", tokens)
    with pytest.raises(RuntimeError, match=r"of rows that the cache no longer has: read cache\.layers\[i\]\.keys"):
        first.sum()
    values = layer.values + 0
    assert torch.equal(values, layer.values + 0)


CHANGES = {
    "values": lambda k, v: (k, v * 2),
    "keys": lambda k, v: (k * 0.5, v),
    "both, in other shapes": lambda k, v: (
        torch.cat([k, k], 1)[:, :2].flip(-1).flip(-1),
        v.transpose(1, 2).transpose(1, 2),
    ),
}


@pytest.mark.filterwarnings("ignore:kvcache. the rows of every layer")
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_rows_after_the_cache(model, monkeypatch, change):
    """An operation on keys or values works on all rows, rows of earlier passes included."""

    def changed(cache):
        update = type(cache).update

        def then_change(self, *args, **options):
            return CHANGES[change](*update(self, *args, **options))

        monkeypatch.setattr(type(cache), "update", then_change)
        return cache

    with monkeypatch.context():
        want = logits(model, changed(transformers.DynamicCache(config=model.config)))
    ours = HFCache(model.config, dtype="f32")
    got = logits(model, changed(ours))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert ours.stats()["calls"] == {"kernel": 0, "dense": 3 * LAYERS, "fallback": 0}


@pytest.mark.filterwarnings("ignore:kvcache. a mask or an operation")
@pytest.mark.parametrize(
    "touch",
    [
        lambda mask: mask.contiguous(),
        lambda mask: mask & torch.ones(1, dtype=torch.bool),
        lambda mask: mask[:, :, :, : mask.shape[-1] // 1].clone(),
        lambda mask: torch.where(mask, 0.0, float("-inf")),
    ],
)
def test_a_model_that_changes_the_mask(model, monkeypatch, touch):
    want = logits(model, transformers.DynamicCache(config=model.config))
    make = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **options: touch(make(**options)))
    cache = HFCache(model.config, dtype="f32")
    torch.testing.assert_close(logits(model, cache), want, rtol=1e-4, atol=1e-3)
    assert cache.stats()["calls"] == {"kernel": 0, "dense": 0, "fallback": 3 * LAYERS}


def test_what_a_mask_says_without_being_made(model, monkeypatch):
    """Shape and type are no reason to leave the kernels."""

    def look(**options):
        mask = make(**options)
        assert isinstance(mask, torch.Tensor)
        assert (mask.dtype, mask.ndim, mask.device.type, len(mask)) == (torch.bool, 4, "cpu", 2)
        assert mask.shape == mask.size() == (2, 1, mask.shape[2], mask.size(-1))
        return mask[:, :, :, : mask.shape[-1]]

    make = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", look)
    cache = HFCache(model.config, dtype="f32")
    logits(model, cache)
    assert cache.stats()["calls"] == {"kernel": 3 * LAYERS, "dense": 0, "fallback": 0}


@functools.cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.trace(lambda x: x * 2, torch.zeros(2, 2, 13, 8))


def undispatched(x):
    with torch._C.DisableTorchFunction():
        return x * 2


@pytest.mark.filterwarnings("ignore:kvcache. a mask or an operation", "ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    "double",
    [
        torch.vmap(lambda x: x * 2),
        torch.func.functionalize(lambda x: x * 2),
        torch.func.grad(lambda x: (x * x).sum()),
        torch.compile(lambda x: x * 2, backend="eager"),
        lambda x: torch.from_numpy(x.numpy() * 2),
        lambda x: torch.tensor(x) * 2,
        lambda x: x.as_subclass(torch.Tensor) * 2,
        lambda x: torch.ops.aten.mul.Tensor(x, 2),
        lambda x: scripted()(x),
        undispatched,
    ],
)
def test_operations_past_the_functions_of_torch(passed, double):
    """Transforms, compiled functions and TorchScript compute with the elements, as other operations do."""
    k, v = torch.randn(2, 2, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    got, want = (cache.update(k, v, 0) for cache in passed)
    for mine, their in zip(got, want, strict=True):
        torch.testing.assert_close(double(mine), their * 2)


def test_rows_of_a_pass_that_has_ended(model):
    cache = HFCache(model.config)
    keys, _ = cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    cache.reset()
    with pytest.raises(RuntimeError, match=r"of a forward pass that has ended: read cache\.layers\[i\]\.keys"):
        keys.sum()


def test_print(passed):
    ours, _ = passed
    said = repr(ours)
    layers = "3 layers with policy=FullAttention(), 10 rows of a sequence kept"
    assert said.startswith(f"<HFCache: 2 sequences of 10 tokens, dtype='f32'; {layers}; "), said
    assert said.endswith("KiB; layers attended: 3 by the kernels, 0 with dense tensors, 0 by fallback>"), said


def test_print_says_what_windows_keep(model):
    policy = [SlidingWindow(4), FullAttention(), SlidingWindow(4)]
    cache = HFCache(model.config, transform="hadamard", policy=policy)
    said = "; 2 layers with policy=SlidingWindow(window=4)%s; 1 layer with policy=FullAttention()%s; "
    assert said % ("", "") in repr(cache)
    with torch.inference_mode():
        model(TOKENS[:, :10], past_key_values=cache)
        for token in TOKENS[0, :5]:
            model(token.expand(2, 1), past_key_values=cache)
    assert repr(cache).startswith("<HFCache: 2 sequences of 15 tokens, dtype='f16', transform='hadamard'; 2 layers")
    kept = cache._cache.seq_len(0, layer=0)
    assert 4 <= kept < 15
    assert said % (f", {kept} rows of a sequence kept", ", 15 rows of a sequence kept") in repr(cache)


@pytest.mark.parametrize("save", [pickle.dumps, lambda cache: torch.save(cache, "never.pt")])
def test_saving_says_what_to_do(passed, save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"use save\(\) and load\(\)"):
        save(passed[0])


def test_a_config_with_fewer_layers(model):
    cache = HFCache(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 2}))
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"the model has 3 layers or more, .* has 2: give HFCache"),
    ):
        model(TOKENS, past_key_values=cache)


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": 4}, "keys of shape (2, 2, 11, 8), and the config .* says 4 heads of 8 elements"),
        ({"head_dim": 16}, "keys of shape (2, 2, 11, 8), and the config .* says 2 heads of 16 elements"),
        ({"v_head_dim": 16}, "values of shape (2, 2, 11, 8), and the config .* says 2 heads of 16 elements"),
    ],
)
def test_a_config_with_other_heads(model, attention, changes, says):
    model.set_attn_implementation(attention)
    cache = HFCache(transformers.LlamaConfig(**BASE | changes))
    says = says.replace("(", r"\(").replace(")", r"\)")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=f"layer 0 of the model brings {says}.* give HFCache this mod"),
    ):
        model(TOKENS, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
def test_a_model_in_float64(model, attention):
    model.double().set_attn_implementation(attention)
    cache = HFCache(model.config)
    with (
        torch.no_grad(),
        pytest.raises(NotSupportedError, match=r"keys or values are of type torch\.float64: .*model\.to"),
    ):
        model(TOKENS, past_key_values=cache)
    logits(model.float(), cache)


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 2}, {"prefill_chunk_size": 4}])
@pytest.mark.parametrize("length", [1, 11])
@pytest.mark.filterwarnings("ignore:kvcache. the last forward pass")
def test_a_config_with_more_layers(model, attention, options, length):
    """The model's tokens cannot be kept: no text is made without them."""
    model.set_attn_implementation(attention)
    cache = HFCache(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 5}))
    with pytest.raises(ValueError, match=r"through 3 of 5 layers .* the config .*: give HFCache model\.config"):
        model.generate(TOKENS[:1, :length], past_key_values=cache, max_new_tokens=3, **options)
