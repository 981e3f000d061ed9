"""Constructors name an argument that they do not have, and its name here. Signatures read well."""

import importlib
import inspect
import pkgutil
import re

import pytest

import kvcache
from kvcache.models.configuration import NAMES
from kvcache.stores import DirectoryStore, ValkeyStore

MADE_BY_OTHERS = {"Batch", "Block", "PrefixEvent", "PrefixStats", "Run", "Span"}
CLASSES = [getattr(kvcache, name) for name in kvcache.__all__ if name[0].isupper() and name not in MADE_BY_OTHERS]
CONSTRUCTORS = [kind for kind in CLASSES if not issubclass(kind, Exception)] + [DirectoryStore, ValkeyStore]


@pytest.mark.parametrize(
    ("make", "typed", "here"),
    [
        ("KVCache(num_key_value_heads=4)", "num_key_value_heads", "num_kv_heads"),
        ("KVCache(num_hidden_layers=2, n_head_kv=4, head_dim=8)", "num_hidden_layers", "num_layers"),
        ("KVCache(2, 4, 8, max_position_embeddings=64)", "max_position_embeddings", "max_seq_len"),
        ("KVCache(2, 4, 8, max_batch_size=64)", "max_batch_size", "max_sequences"),
        ("KVCache(2, 4, 8, page_size=64)", "page_size", "block_size"),
        ("KVCache(2, 4, 8, kv_cache_dtype='f16')", "kv_cache_dtype", "dtype"),
        ("KVCache(2, 4, 8, type_k='q8_0')", "type_k", "k_dtype"),
        ("KVCache.from_config(config, n_ctx=64)", "n_ctx", "max_seq_len"),
        ("KVCache.from_config(config, cache_type_k='f16')", "cache_type_k", "k_dtype"),
        ("Layer(n_kv_heads=4, head_dim=8)", "n_kv_heads", "num_kv_heads"),
        ("Layer(4, head_size=8)", "head_size", "head_dim"),
        ("SlidingWindow(sliding_window=4)", "sliding_window", "window"),
        ("SlidingWindow(4, attention_sinks=1)", "attention_sinks", "num_sink_tokens"),
        ("ChunkedAttention(chunk_size=4)", "chunk_size", "attention_chunk_size"),
        ("CrossAttention(max_source_positions=4)", "max_source_positions", "max_len"),
        ("Rope(freqs=[1.0])", "freqs", "inv_freq"),
        ("LongSequencesOnly(min_tokens=4)", "min_tokens", "threshold"),
        ("PrefixCache(cache, model='a')", "model", "fingerprint"),
        ("DirectoryStore(directory='a')", "directory", "path"),
        ("DirectoryStore('a', size_limit=1)", "size_limit", "max_bytes"),
        ("ValkeyStore(host='a')", "host", "url"),
    ],
)
def test_another_name_of_an_argument(make, typed, here):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    names = {**{name: getattr(kvcache, name) for name in kvcache.__all__}, "DirectoryStore": DirectoryStore,
             "ValkeyStore": ValkeyStore, "config": config, "cache": None}  # fmt: skip
    what = re.match(r"[A-Za-z]+", make)[0]
    with pytest.raises(TypeError, match=f"^{typed} is no argument of {what}: it is called {here} here$"):
        eval(make, names)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: kvcache.KVCache(2, 4, 8, sliding_window=4), "sliding_window is .*: give policy=SlidingWindow"),
        (lambda: kvcache.Layer(4, 8, num_sinks=4), "num_sinks is .*: give policy=SlidingWindow.*num_sink_tokens"),
        (lambda: kvcache.KVCache(2, 4, 8, rope_theta=1e4), "rope_theta is .*: give rope=Rope"),
        (lambda: kvcache.Rope(theta=1e4), "theta is .*: give inv_freq"),
        (
            lambda: kvcache.KVCache(2, num_attention_heads=4),
            "num_attention_heads is .*: give num_kv_heads: the query's",
        ),
        (lambda: kvcache.KVCache(2, 4, 8, capacty=3), "capacty is .*: did you mean capacity"),
        (lambda: kvcache.FullAttention(window=3), "window is no argument of FullAttention: it takes stride"),
        (lambda: kvcache.Adaptive(zzz=3), "zzz is no argument of Adaptive: it takes fraction"),
        (lambda: kvcache.SlidingWindow(), r"^SlidingWindow\(window\) is given no window"),
        (lambda: kvcache.Layer(head_dim=4), r"^Layer\(num_kv_heads, head_dim\) is given no num_kv_heads"),
        (lambda: kvcache.Layer(kv_heads=4), "kv_heads is no argument of Layer: it is called num_kv_heads"),
        (lambda: kvcache.KVCache.load("no file", batch_size=2), "batch_size is .*KVCache.load: .*max_sequences"),
    ],
)
def test_an_argument_of_something_else(make, said):
    with pytest.raises(TypeError, match=said):
        make()


@pytest.mark.parametrize("kind", CONSTRUCTORS, ids=lambda kind: kind.__name__)
def test_every_constructor_names_what_was_typed(kind):
    with pytest.raises(TypeError, match=f"^no_such_thing is no argument of {kind.__name__}: it takes "):
        kind(no_such_thing=1)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_every_name_in_published_configurations_is_known(name):
    here = {"num_hidden_layers": "num_layers", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
    ours = here.get(name, "max_seq_len")
    for typed in set(NAMES[name]) - {ours}:
        with pytest.raises(TypeError, match=f"^{typed} is no argument of KVCache: it is called {ours} here$"):
            kvcache.KVCache(**{typed: 4})


def test_signatures_show_no_objects():
    """Every public function, class and method of the package whose modules are here."""
    for module in [kvcache, *modules()]:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            methods = vars(thing).items() if inspect.isclass(thing) else ()
            for each, function in [(name, thing), *((f"{name}.{own}", method) for own, method in methods)]:
                if callable(function) and not isinstance(function, type(None)):
                    try:
                        shown = str(inspect.signature(function))
                    except (TypeError, ValueError):  # it has none
                        continue
                    assert not re.search("<object| at 0x", shown), (module.__name__, each, shown)
    assert "num_kv_heads: 'Any' = None" in str(inspect.signature(kvcache.KVCache))


def modules():
    for found in pkgutil.walk_packages(kvcache.__path__, "kvcache."):
        left_out = "kvcache.benchmarks", "kvcache.tools", "kvcache.hf", "kvcache.server", "kvcache.__main__"
        if not found.name.startswith(left_out):
            yield importlib.import_module(found.name)
