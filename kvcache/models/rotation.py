"""The rotation of a layer's keys, from the fields of a model's configuration: which elements, how fast, how scaled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.errors import NotSupportedError, plain
from kvcache.models.fields import Fields, is_positive
from kvcache.models.kinds import NO_ROPE_EVERY, SLIDING, rotates_by_interval
from kvcache.rope import Rope, RopeLike

__all__ = ["rope"]

# Types whose layers with full attention rotate no keys; their layers with a window do.
NO_ROPE_IN_FULL = {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "lara_mini"}
# Types that use RoPE even if an old config.json does not say so.
ROTATING = {"falcon", "gemma", "gemma2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "phi", "phi3", "qwen2"}
# Types that add positions to the scores (ALiBi), and rotate no keys.
ALIBI = {"bloom", "mpt"}
# Types whose pairs of rotated elements are neighbours (i, i + 1), not halves (i, i + n).
INTERLEAVED = {
    "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe",
    "ernie4_5_vl_moe_text", "glm", "glm4", "glm4v_text", "glm_ocr_text", "gptj", "helium", "llama4_text",
    "moonshine", "moonshine_streaming", "sarvam_mla",
}  # fmt: skip
# GGUF architectures whose pairs of rotated elements are neighbours: converters reorder some models' weights.
INTERLEAVED_GGUF = {
    "arcee", "arctic", "baichuan", "chameleon", "chatglm", "cohere2", "command-r", "deci", "deepseek", "deepseek2",
    "ernie4_5", "ernie4_5-moe", "granite", "granitemoe", "internlm2", "llama", "llama4", "minicpm", "mistral3",
    "olmo", "orion", "plamo", "smollm3", "starcoder", "xverse",
}  # fmt: skip


def rope(config: Fields, layer: int, kind: str, head_dim: int, first_dim: int) -> RopeLike:
    """Return the rotation of a layer's keys, whose rotated elements begin at `first_dim`."""
    model_type = config.text("model_type", "")
    if model_type in ALIBI or config.get("alibi") is True or not _rotates(config, layer, kind):
        return False
    parameters = _rope_parameters(config, kind)
    if parameters is None:
        return None
    name = parameters.text("rope_type", parameters.text("type", "default"))
    scale = SCALINGS.get(name)
    if scale is None:
        return Unshiftable(name)
    fraction = parameters.positive(
        "partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)), most=1.0
    )
    if name == "proportional":
        dim, num_rotated = head_dim, int(fraction * head_dim // 2)
    else:
        dim = config.count("rotary_dim", int((head_dim - first_dim) * fraction), least=2, most=head_dim - first_dim)
        num_rotated = dim // 2
    with np.errstate(all="ignore"):  # frequencies that are not finite are refused below
        inv_freq = np.float64(parameters.positive("rope_theta", 10000.0)) ** -(np.arange(0, 2 * num_rotated, 2) / dim)
        inv_freq = np.pad(scale(parameters, config, inv_freq, dim), (0, dim // 2 - num_rotated))
        inv_freq /= _factors(config, len(inv_freq))
    if not len(inv_freq) or not np.isfinite(inv_freq).all():
        raise parameters.error(f"rope_theta and what scales it, {plain(name)}, give no finite frequencies")
    return _shared_rope(inv_freq.tobytes(), _interleaved(config, model_type), first_dim)


@lru_cache(maxsize=16)
def _shared_rope(inv_freq: bytes, interleaved: bool, first_dim: int) -> Rope:
    """Make a `Rope`, one object for all layers with the same rotation."""
    return Rope(np.frombuffer(inv_freq), interleaved, first_dim)


def _factors(config: Fields, count: int) -> Frequencies:
    """Return the factor that divides each frequency: 1, unless the file lists factors."""
    listed = config.get("rope_freqs")
    if listed is None:
        return np.ones(count)
    if not isinstance(listed, list | tuple) or len(listed) != count or not all(map(is_positive, listed)):
        raise config.error(f"rope_freqs must be {count} positive numbers")
    return np.array(listed, np.float64)


def _rotates(config: Fields, layer: int, kind: str) -> bool:
    """Whether a layer's keys are rotated, in a model that rotates some layers' keys."""
    if config.get("position_embedding_type") == "nope":
        return False
    if config.text("model_type", "") in NO_ROPE_IN_FULL and kind == "full_attention":
        return config.get("sliding_window") is None
    if (
        config.get("no_rope_layers")
        or config.get("no_rope_layer_interval")
        or config.get("model_type") in NO_ROPE_EVERY
    ):
        return rotates_by_interval(config, layer)
    thetas = config.get("layer_rope_theta")
    return not isinstance(thetas, list) or layer >= len(thetas) or thetas[layer] != 0


def _interleaved(config: Fields, model_type: str) -> bool:
    architecture = config.get("gguf_architecture")
    if architecture is not None:
        return architecture in INTERLEAVED_GGUF
    return config.get("rope_interleave", model_type in INTERLEAVED) is True


def _rope_parameters(config: Fields, kind: str) -> Fields | None:
    """Gather the rotation's parameters for a type of layer; None: the file has none."""
    given = config.part("rope_parameters")
    if given is not None:
        if kind in given.values:  # the file has parameters for each type of layer
            return given.part(kind)
        return Fields({"rope_theta": config.get("rope_theta"), **given.values}, given.source)
    local = config.get("rope_local_base_freq", config.get("local_rope_theta"))
    if kind in SLIDING and local is not None:
        return Fields({"rope_theta": local}, config.source)
    theta = config.get("rope_theta", config.get("global_rope_theta", config.get("rotary_emb_base")))
    if theta is None and config.get("rotary_dim") is None and config.get("model_type") not in ROTATING:
        return None
    scaling = config.part("rope_scaling")
    return Fields({"rope_theta": theta, **(scaling.values if scaling else {})}, config.source)


@dataclass(frozen=True)
class Unshiftable:
    """A rotation that depends on more than the position, so that keys cannot be moved: calling it raises."""

    rope_type: str

    def __call__(self, layer: int, keys: npt.NDArray[np.float32], delta: int) -> Any:
        raise NotSupportedError(
            f"keys of layer {layer} cannot be moved: their rotation, {self.rope_type!r}, depends on how long the "
            "sequence is; feed the tokens again"
        )


Frequencies: TypeAlias = npt.NDArray[np.float64]


def _plain(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    return inv_freq


def _linear(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    return inv_freq / parameters.positive("factor", 1.0)


def _llama3(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    """Divide low frequencies, keep high ones, and interpolate between them, as Llama 3 does."""
    low, high = parameters.positive("low_freq_factor"), parameters.positive("high_freq_factor")
    context = parameters.positive("original_max_position_embeddings")
    rotations = context * inv_freq / (2 * np.pi)  # full turns of each pair within the original context
    kept: Frequencies = np.clip((rotations - low) / (high - low), 0, 1)
    return kept * inv_freq + (1 - kept) * inv_freq / parameters.positive("factor")


def _yarn(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    """Interpolate like `_llama3`, but by the index of the pair [1]_.

    .. [1] Bowen Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", ICLR 2024.
    """
    context = parameters.positive("original_max_position_embeddings")
    factor = parameters.positive("factor", config.positive("max_position_embeddings", context) / context)
    theta = parameters.positive("rope_theta")
    if theta <= 1:
        raise parameters.error(f"rope_theta must be above 1 for yarn, not {theta:g}")

    def pair(rotations: float) -> Any:
        """Return the index of the pair that makes `rotations` rotations within the original context."""
        return dim * np.log(context / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low, high = pair(parameters.positive("beta_fast", 32.0)), pair(parameters.positive("beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = np.maximum(low, 0), np.minimum(high, dim - 1)  # NumPy's minimum and maximum keep NaN
    divided: Frequencies = np.clip((np.arange(dim // 2) - low) / np.maximum(high - low, 0.001), 0, 1)
    return inv_freq * (1 - divided) + inv_freq / factor * divided


SCALINGS: dict[str, Callable[[Fields, Fields, Frequencies, int], Frequencies]] = {
    "default": _plain,
    "mrope": _plain,  # for text, all three positions are equal
    "proportional": _linear,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,  # in files older than their model's class in transformers
}
