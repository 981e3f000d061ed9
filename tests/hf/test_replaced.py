"""An `HFCache` replaces methods of transformers' models, by functions that do what the methods' source says."""

import hashlib
import inspect
import threading
import time

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache.hf import replacing  # noqa: E402 - it imports those
from kvcache.hf.layers import expand  # noqa: E402 - as above
from kvcache.hf.models import deepseek_v4, deepseek_v32, glm5_next, minimax_m3_vl, qwen4_exp  # noqa: E402 - as above
from kvcache.hf.replacing import REPLACED, replacements  # noqa: E402 - as above

# Digests of the source that each function stands for, by the first version of transformers that has it. Somebody has
# read these, and found that the function does the same.
READ = {
    deepseek_v4.attend: {"5.23": "1078dec8c419", "5.24": "7e61a222ad06"},
    deepseek_v32.choose: {"5.23": "f05b6543a2da", "5.24": "d661c778bc18"},
    deepseek_v32.choose_interleaved: {"5.23": "c0bfda4dc45e", "5.24": "5b484bc355c7"},
    glm5_next.choose: {"5.23": "9ae93cd369a3", "5.24": "66575baacb82"},
    glm5_next.make_mask: {"5.23": "ec33b58c7689"},
    deepseek_v32.choose_with_last: {"5.23": "5657afa6a7bb", "5.24": "1dc7cea02eef"},
    expand: {"5.23": "44c910b29abd"},
    minimax_m3_vl.choose: {"5.23": "a2cd7f4feb57", "5.24": "83606351ef7f"},
    deepseek_v32.choose_by_own: {"5.23": "73a9258f1ca0", "5.24": "cc77e0d2bf12"},
    qwen4_exp.choose: {"5.23": "5b998d399ae7", "5.24": "d4ef05fac7a7"},
}
LATENT = ["axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash"]
LATENT += ["minicpm3", "mistral4", "sarvam_mla", "youtu"]


@pytest.mark.parametrize("model_type", [*REPLACED, *LATENT])
def test_sources_are_known(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    found = replacements(transformers.CONFIG_MAPPING[model_type])
    assert {f"{owner.__name__}.{name}" for owner, name, _ in found} >= REPLACED.get(model_type, {}).keys()
    assert found
    for owner, name, function in found:
        digest = hashlib.sha256(inspect.getsource(getattr(owner, name)).encode()).hexdigest()[:12]
        assert digest in READ[function].values(), (
            f"transformers {transformers.__version__} changed {owner.__name__}.{name} of {owner.__module__}: read what"
            f" it does now, and whether {function.__module__}.{function.__name__} still does that; then add {digest!r}"
        )


def test_a_later_name_leaves_the_model_its_own_code(monkeypatch):
    monkeypatch.setitem(REPLACED, "deepseek_v32", {"DeepseekV32Chooser.forward": deepseek_v32.choose})
    found = replacements(transformers.CONFIG_MAPPING["deepseek_v32"])
    assert {name for _, name, _ in found} == {"expand_kv"}


def test_threads_replace_a_method_once(monkeypatch):
    class Slow(type):
        def __setattr__(cls, name, value):
            super().__setattr__(name, value)
            time.sleep(0.1)  # while others come

    class Attention(metaclass=Slow):
        def expand_kv(self, kv_nope, k_rot):
            return kv_nope, k_rot

    own = Attention.expand_kv
    monkeypatch.setattr(replacing, "replacements", lambda kind: [(Attention, "expand_kv", expand)])
    threads = [threading.Thread(target=replacing.install, args=(object,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Attention.expand_kv.__wrapped__ is own
