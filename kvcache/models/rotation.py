"""The rotation of a layer's keys, from the fields of a model's configuration: which elements, how fast, how scaled.

The elements of a pair are rotated together, by the pair's frequency in radians for each position. A theta is the base
of the frequencies. A scaling lowers some of them, for texts longer than those of the training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.errors import NotSupportedError, plain, shown
from kvcache.models import classes, guard
from kvcache.models.configuration import NAMES
from kvcache.models.kinds import NO_ROPE_EVERY, SLIDING, rotates_by_interval
from kvcache.models.reading import Fields, is_positive
from kvcache.rope import Rope, RopeLike

MUSE = {"muse_glimmer_text", "muse_spark_text"}
# Types whose layers with full attention rotate no keys; their layers with a window do.
NO_ROPE_IN_FULL = {
    "afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini", *MUSE,
}  # fmt: skip
# Fields that say whether keys are rotated at all.
SWITCHES = {
    "rope_embeddings", "use_rope", "use_rotary", "use_rotary_emb", "use_rotary_embedding", "use_rotary_embeddings",
    "use_rotary_pos_emb", "use_rotary_position_embeddings",
}  # fmt: skip
# Types that rotate no keys, whatever their files say: order is in their other layers.
NO_ROPE = {"glm_2022", "jamba", "kimi_linear", "nemotron_h", "zamba"}
# Types that rotate the other way.
REVERSED = {"nanochat"}
# Types that rotate keys only where a field has this value.
ROPE_IF = {"granitemoehybrid": ("position_embedding_type", "rope"), "zamba2": ("use_mem_rope", True)}
# Types that add positions to the scores (ALiBi), and rotate no keys.
ALIBI = {"bloom", "jais", "mpt"}
# How else positions are told to a model, in a field ``position_embedding_type``: not in its keys, or in its embeddings.
NO_ROTATION = {"alibi", "nope", "none"}
EMBEDDED = {"absolute", "learned", "learned_absolute"}
# Types whose rotation is given as an object with a theta of null if they rotate no keys.
NO_ROPE_IF_NULL = {"olmo_hybrid"}
# Names of fields that say how keys rotate. A field with such a name makes the rotation unknown unless KNOWN has it.
SAYS_ROTATION = re.compile("(^|_)(rope|rotary|rot|xpos)(_|$)|ntk|yarn|^position_encoding_2d$")
KNOWN = {
    *SWITCHES, *NAMES["partial_rotary_factor"], *NAMES["rope_local_base_freq"], *NAMES["rope_theta"],
    *NAMES["use_rope_layers"],
    "attention_qk_rope_dim", "attn_rotary_emb", "indexer_rope_interleave", "layer_rope_theta", "no_rope_layer_interval",
    "no_rope_layers", "original_rope", "qk_rope_head_dim", "rope", "rope_3d", "rope_dail_config", "rope_freqs",
    "rope_full_precision", "rope_hf_config", "rope_impl", "rope_interleave", "rope_max_length", "rope_parameters",
    "rope_ratio", "rope_scaling", "rope_scaling_layers", "rotary", "rotary_dim", "rotary_value", "swa_qk_rope_head_dim",
    "use_dynamic_ntk", "use_mem_rope", "yarn_only_types",
}  # fmt: skip
# Names within a scaling that are read, or that say what the scores or queries are multiplied by.
PARAMETERS = {
    "attention_factor", "attn_factor", "beta_fast", "beta_slow", "extrapolation_factor", "factor", "finetuned",
    "high_freq_factor", "interleaved", "llama_4_scaling_beta", "long_factor", "long_mscale", "low_freq_factor",
    "max_position_embeddings", "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "pos_idx_in_fp32", "rope_theta", "rope_type",
    "rotary_dim", "short_factor", "short_mscale", "truncate", "type", "xdrope_section", "xpos_scale_base",
}  # fmt: skip
# Types that rotate keys even if neither the file nor transformers' class says so.
ROTATING = {
    "PanguEmbedded", "PanguProMoE", "RefinedWeb", "RefinedWebModel", "aquila", "baichuan", "chatglm", "codegen",
    "dbrx", "deci", "deepseek", "gptj", "grok-1", "hf_olmo", "internlm", "internlm2", "internlmxcomposer2",
    "llada", "minicpm", "mpt", "openelm", "orion", "phi-msft", "plamo", "plamo2", "qwen", "stablelm_epoch",
    "xverse", "yuan",
}  # fmt: skip
# Types of layers whose rotation a file may give under the other's name.
SAME = {
    "hybrid": "full_attention", "full_attention": "hybrid",
    "hybrid_sliding": "sliding_attention", "sliding_attention": "hybrid_sliding",
}  # fmt: skip
# Types whose pairs of rotated elements are neighbours (i, i + 1) where they are stored, not halves (i, i + n).
# ``rope_interleave`` says how the weights order them: transformers stores the rotated keys in halves either way.
INTERLEAVED = {
    "chatglm", "codegen", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "ernie4_5", "ernie4_5_moe",
    "ernie4_5_moe_vl", "ernie4_5_vl_moe_text", "glm", "glm4", "glm4v_text", "glm_ocr_text", "gptj", "helium",
    "hy_v4_vl_text", "llama4_text", "llama_original", "moonshine", "moonshine_streaming", "moss",
}  # fmt: skip


def rope(config: Fields, layer: int, kind: str, head_dim: int, first_dim: int) -> RopeLike:
    """Return the rotation of a layer's keys, whose rotated elements begin at `first_dim`."""
    model_type = config.text("model_type", "")
    if _has_embedded_positions(config, model_type):
        return Unshiftable("they were computed from embeddings of their positions")
    if not _rotates(config, layer, kind, model_type):
        return False
    parameters = _parameters(config, layer, kind, model_type)
    if parameters is None:
        return None
    name = parameters.text("rope_type", parameters.text("type", "default"))
    reason = _why_unshiftable(config, parameters, model_type, name)
    if reason is not None:
        return Unshiftable(reason)
    inv_freq = _frequencies(config, parameters, name, head_dim, first_dim)
    if model_type in REVERSED:
        inv_freq = -inv_freq
    neighbours = model_type in INTERLEAVED and config.get("use_mla") is not False  # else its attention is Llama's
    interleaved = config.get("stored_as_neighbours", neighbours) is True  # a GGUF's reader knows
    return _shared_rope(inv_freq.tobytes(), interleaved, first_dim)


def _why_unshiftable(config: Fields, parameters: Fields, model_type: str, name: str) -> str | None:
    """Return why nobody can rotate stored keys further; None: it is known how they are rotated."""
    if guard.is_unknown(config):
        whose = f"model_type {plain(model_type)!r} is not known" if model_type else "there is no model_type"
        return f"{whose}, so nobody knows which elements rotate together"
    unknown = _unknown(config, parameters)
    if unknown is not None:
        return f"{unknown} says how they are rotated, and is not read"
    if name not in SCALINGS:
        by_length = name in BY_LENGTH
        return (
            f"their rotation, {shown(name)}, {'depends on how long the sequence is' if by_length else 'is not known'}"
        )
    return None


def _frequencies(config: Fields, parameters: Fields, name: str, head_dim: int, first_dim: int) -> Frequencies:
    """Return the frequency of each pair of elements, from `first_dim` on: 0 for pairs that are not rotated.

    Pair i rotates by ``theta ** -(2 i / dim)`` at each position, before it is scaled. If half of 128 elements are
    rotated, by a theta of 10000, there are 32 pairs, with a `dim` of 64: 1, 0.75, 0.56, and so on down to 0.00013.
    """
    # Latents have the rotated elements apart, all of them.
    fraction = 1.0 if first_dim else parameters.positive("partial_rotary_factor", 1.0, most=1.0)
    if name == "proportional":  # the frequencies of a whole head, of which the first pairs are rotated
        dim, num_rotated = head_dim, int(fraction * head_dim // 2)
    else:
        width = head_dim - first_dim
        dim = width if first_dim else parameters.count("rotary_dim", int(width * fraction), least=2, most=width)
        num_rotated = min((dim + 1) // 2, width // 2)  # transformers rounds up where `dim` is odd
    with np.errstate(all="ignore"):  # frequencies that are not finite are refused below
        inv_freq = np.float64(parameters.positive("rope_theta", 10000.0)) ** -(np.arange(0, 2 * num_rotated, 2) / dim)
        inv_freq = np.pad(SCALINGS[name](parameters, config, inv_freq, dim), (0, max(0, dim // 2 - num_rotated)))
        inv_freq /= _factors(config, len(inv_freq))
    if not len(inv_freq) or not np.isfinite(inv_freq).all():
        raise parameters.error(f"rope_theta and what scales it, {plain(name)}, give no finite frequencies")
    return inv_freq


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


def _has_embedded_positions(config: Fields, model_type: str) -> bool:
    """Whether positions are added to the embeddings, so that keys carry them, not rotated."""
    if config.get("embeds_positions") is True:  # a GGUF's reader knows
        return True
    if model_type == "mpt" and config.get("learned_pos_emb") is True and config.get("alibi") is False:
        return config.get("rope") is not True
    return config.text("position_embedding_type", "") in EMBEDDED


def _rotates(config: Fields, layer: int, kind: str, model_type: str) -> bool:
    """Whether a layer's keys are rotated."""
    rotates = config.get("rotates")
    if rotates is not None:  # a GGUF's reader knows
        return rotates is True
    if isinstance(config.get("rope"), bool):  # OLMo's first models, MPT's later ones
        return config.get("rope") is True
    if model_type in ALIBI | NO_ROPE or any(
        config.get(name) is True for name in ("alibi", "use_alibi", "mla_use_nope")
    ):
        return False
    if any(config.get(name) is False for name in SWITCHES) or config.text("position_embedding_type", "") in NO_ROTATION:
        return False
    if model_type == "baichuan" and config.get("hidden_size") != 4096:
        return False  # its larger models use ALiBi
    given = config.part("rope_parameters")
    if model_type in NO_ROPE_IF_NULL and given is not None and given.values.get("rope_theta", 0) is None:
        return False
    name, value = ROPE_IF.get(model_type, ("", None))
    if name and config.get(name) != value:
        return False
    if config.get("layer_rope_theta") is not None:
        return bool(config.get("layer_rope_theta") != 0)
    if model_type in NO_ROPE_IN_FULL and kind == "full_attention":
        return config.get("sliding_window") is None
    if config.sequence("use_rope_layers"):
        rotating = config.sequence("use_rope_layers", layer + 1)
        return rotating is not None and bool(rotating[layer])
    if config.get("no_rope_layers") or config.get("no_rope_layer_interval") or model_type in NO_ROPE_EVERY:
        return rotates_by_interval(config, layer)
    return True


def _unknown(config: Fields, parameters: Fields) -> str | None:
    """Return the name of an unread field about rotations, of the file or of the scaling; None: all are read."""
    if config.get("gguf_architecture") is not None:
        return None
    own = {"alpha"} if parameters.get("rope_type") == "ntk_alpha" else set()
    if more := [name for name in parameters.values if name not in PARAMETERS | own]:
        return f"{parameters.source.rpartition(', ')[2]}, {plain(more[0])},"
    for name in _unread(tuple(config.values)):
        value = config.values[name]
        changes_nothing = value in (None, False, "full-1d") or (value == 1 and value is not True)
        if not changes_nothing:
            return plain(name)
    return None


@lru_cache(maxsize=4)
def _unread(names: tuple[Any, ...]) -> list[str]:
    """Return the names that say how keys rotate, and that nothing reads; the layers of a model have the same names."""
    return [name for name in names if isinstance(name, str) and SAYS_ROTATION.search(name) and name not in KNOWN]


# The theta of layers with a window, of types whose files may leave it out, where nothing is scaled.
LOCAL_THETA = {"dots3_note_text": 5e4}
# Types whose layers with a window are scaled as the others, though they have a theta of their own.
SCALED_LOCALLY = {"modernbert-decoder"}
# Types whose layers with a window are not scaled, though they may have no theta of their own.
NOT_SCALED_LOCALLY = {"step3p5"}
# Types whose ``rope_scaling`` says nothing, but ``rope_parameters`` do.
WITHOUT_SCALING = {"cohere2_moe"}
# Other names of scalings, in files of any type, and of these types.
SCALING_NAMES = {
    **dict.fromkeys(("no_scaling", "origin", "original"), "default"),
    "su": "longrope",
    "xdrope": "dynamic",
}
# Types whose scaling by length is a fixed one if it has an ``alpha``.
ALPHA = {"hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hunyuan_vl_text"}
SCALING_NAMES_OF = {key: {"yarn": "longrope"} for key in ("phi3", "phi4_multimodal")}


def _parameters(config: Fields, layer: int, kind: str, model_type: str) -> Fields | None:
    """Gather the rotation's parameters for a layer, under transformers' names; None: the file does not say it."""
    theta = None
    if kind in SLIDING:
        given = config.get("rope_scaling", config.get("rope_parameters"))
        theta = config.get("rope_local_base_freq", LOCAL_THETA.get(model_type) if given is None else None)
    found, source = _scaling(config, layer, kind, model_type, theta is not None)
    if theta is None:
        usual = classes.of(model_type).defaults.get("rope_parameters") or {}  # counts beside a file's scaling
        theta = config.get("layer_rope_theta", config.get("rope_theta", usual.get("rope_theta")))
    rotates = model_type in ROTATING or config.get("rotary_dim") or config.text("position_embedding_type", "") == "rope"
    if found is None or not (found or rotates or theta):
        return None
    if config.get("rope_ratio") is not None:  # as in ChatGLM
        theta = config.positive("rope_ratio") * 10000.0
    length = config.get("original_max_position_embeddings", found.get("original_max_position_embeddings"))
    beside = {
        "rope_theta": theta,
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        "rotary_dim": config.get("rotary_dim"),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
    }
    found = {**beside, **found, **({} if length is None else {"original_max_position_embeddings": length})}
    name = found.get("rope_type", found.get("type", "default"))
    if config.get("use_dynamic_ntk") is True:  # Qwen's first models
        name = "dynamic"
    if isinstance(name, str):
        name = {**SCALING_NAMES, **SCALING_NAMES_OF.get(model_type, {})}.get(name, name)
        found["rope_type"] = "ntk_alpha" if name == "dynamic" and model_type in ALPHA and found.get("alpha") else name
    return Fields(found, source)


def _scaling(
    config: Fields, layer: int, kind: str, model_type: str, own_theta: bool
) -> tuple[dict[str, Any] | None, str]:
    """Return what an object of the file says of a layer's rotation, and where it is; None: nothing of this layer."""
    given = config.part("rope_parameters")
    if (
        config.get("rope_scaling") is None
        and given is not None
        and any(isinstance(value, Mapping) for value in given.values.values())
    ):
        own = given.part(kind) or given.part(SAME.get(kind, kind))
        return (None, "") if own is None else ({k: v for k, v in own.values.items() if v is not None}, own.source)
    scaling = given if config.get("model_type") in WITHOUT_SCALING else config.part("rope_scaling") or given
    if scaling is None and config.get("rope_impl") in ("dail", "hf"):  # MPT
        scaling = config.part(f"rope_{config.get('rope_impl')}_config")
    rotary = None if config.get("rotary") is True else config.part("rotary")  # True in GPT-J, an object in InternLM
    if scaling is None and rotary is not None:
        scaling = Fields({"rope_theta": rotary.get("base"), "type": rotary.get("type")}, rotary.source)
    if scaling is None:
        return {}, config.source
    found = {name: value for name, value in scaling.values.items() if value is not None}
    scaled_layers, scaled_types = config.sequence("rope_scaling_layers"), config.sequence("yarn_only_types")
    if kind in SLIDING and own_theta:
        return (found if model_type in SCALED_LOCALLY else {}), scaling.source
    plain_here = (
        (kind in SLIDING and model_type in NOT_SCALED_LOCALLY)
        or (scaled_layers is not None and layer not in scaled_layers)
        or (scaled_types is not None and kind not in scaled_types)
    )
    if plain_here:
        found = {name: found[name] for name in ("rope_theta", "partial_rotary_factor") if name in found}
    return found, scaling.source


@dataclass(frozen=True)
class Unshiftable:
    """A rotation that depends on more than the position, or is not known, so that keys cannot be moved."""

    reason: str

    def __call__(self, layer: int, keys: npt.NDArray[np.float32], delta: int) -> Any:
        """Refuse to move keys."""
        raise NotSupportedError(f"keys of layer {layer} cannot be moved: {self.reason}; feed the tokens again")


Frequencies: TypeAlias = npt.NDArray[np.float64]


def _plain(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    return inv_freq


def _linear(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    return inv_freq / parameters.positive("factor", 1.0)


def _ntk_alpha(parameters: Fields, config: Fields, inv_freq: Frequencies, dim: int) -> Frequencies:
    """Let the base grow with alpha, so that the lowest frequency is divided by it."""
    slowed: Frequencies = inv_freq * parameters.positive("alpha") ** (-np.arange(0, 2 * len(inv_freq), 2) / (dim - 2))
    return slowed


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
    kept = 1 - np.clip((np.arange(len(inv_freq)) - low) / np.maximum(high - low, 0.001), 0, 1)
    kept *= parameters.positive("extrapolation_factor", 1.0)
    scaled: Frequencies = inv_freq * kept + inv_freq / factor * (1 - kept)
    return scaled


BY_LENGTH = {"dynamic", "longrope"}
SCALINGS: dict[str, Callable[[Fields, Fields, Frequencies, int], Frequencies]] = {
    "default": _plain,
    "mrope": _plain,  # for text, all three positions are equal
    "proportional": _linear,
    "linear": _linear,
    "ntk_alpha": _ntk_alpha,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,  # in files older than their model's class in transformers
}
