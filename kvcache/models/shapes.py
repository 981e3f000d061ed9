"""The layers' shapes of a model's cache, from a Hugging Face folder, a ``config.json`` or a GGUF.

`read` derives a `Shape` from the fields that `kvcache.models.fields` gathers from either format; `KVCache.from_config`
makes a cache of it. The tables of this module hold the facts that files leave to their readers; most are keyed by model
type.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcache.errors import ModelFileError, NotSupportedError, plain, shown
from kvcache.layer import DTYPES, DType, Layer, why_not
from kvcache.models.fields import Fields, find_weights, is_positive, read_config, read_safetensors_header
from kvcache.models.reading import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, open_file
from kvcache.policy import ChunkedAttention, CrossAttention, FullAttention, Policy, SlidingWindow
from kvcache.rope import Rope, RopeLike

__all__ = ["PREFILL_TOKENS", "Shape", "read"]

# Tokens of a prompt that the runner feeds at once, and transformers where a model has windows, which hold them until
# they are committed: enough for efficient matrix products, few beside a window.
PREFILL_TOKENS = 512
PACKED = "quantization_config"  # a field with which weights may be packed into other shapes

# Every n-th layer uses full attention, the others a window (model type: n).
FULL_EVERY = {
    "afmoe": 4, "cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6,
    "gpt_oss": 2, "olmo3": 4, "vaultgemma": 2,
}  # fmt: skip
# Types whose layers with full attention rotate no keys; their layers with a window do.
NO_ROPE_IN_FULL = {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "lara_mini"}
# Every n-th layer rotates no keys (model type: n).
NO_ROPE_EVERY = {"llama4_text": 4, "smollm3": 4}
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
# Types that are refused, and the reason.
REFUSED = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), "its state is not keys and values"),
    "reformer": "it sorts what it stores into buckets",
    "blt_local_decoder": "it is made of several decoders",
    **dict.fromkeys(("dory", "inkling2_loop_text"), "it runs some of its layers several times"),
}
# Attentions per layer, where there are several; each is a layer of the cache.
ATTENTIONS = {"longcat_flash": 2}
# Types whose layers with a window have more KV heads than their other layers (model type: how many times as many).
MORE_KV_HEADS = {"mimo_v2_flash": 2}
# Types for which every layer has the window that a GGUF names.
SLIDING_EVERYWHERE = {"llama", "mistral", "mistral3", "phi3", "starcoder2"}
# Types of layers that store no keys and values.
STATELESS = {"linear_attention", "conv", "mamba", "recurrent", "dummy", "moe", "mlp"}
FULL = {"full_attention", "attention", "hybrid"}  # a hybrid layer has another state as well
SLIDING = {"sliding_attention", "hybrid_sliding"}
# GGUF architectures whose pairs of rotated elements are neighbours: converters reorder some models' weights.
INTERLEAVED_GGUF = {
    "arcee", "arctic", "baichuan", "chameleon", "chatglm", "cohere2", "command-r", "deci", "deepseek", "deepseek2",
    "ernie4_5", "ernie4_5-moe", "granite", "granitemoe", "internlm2", "llama", "llama4", "minicpm", "mistral3",
    "olmo", "orion", "plamo", "smollm3", "starcoder", "xverse",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model as its cache sees it.

    Attributes
    ----------
    model_type : str
        Hugging Face's type of the text decoder.
    layers : tuple of Layer
        The layers of the cache: heads, sizes, policies, shared rows and rotations are the model's, types the default.
        A `rope` of None: the files do not say.
    num_heads : tuple of int
        The number of query heads of each layer.
    max_seq_len : int or None
        The context length of the model's training.
    """

    model_type: str
    layers: tuple[Layer, ...]
    num_heads: tuple[int, ...]
    max_seq_len: int | None

    @property
    def dtypes(self) -> list[DType]:
        """The element types that can store the rows of every layer."""
        return [dtype for dtype in DTYPES if not self.why_not(dtype)]

    def why_not(self, dtype: DType) -> str | None:
        """Return the reason why an element type cannot store the rows of some layer; None: it can."""
        sizes = dict.fromkeys((layer.head_dim, layer.v_head_dim, layer.value_in_key) for layer in self.layers)
        return next((reason for each in sizes if (reason := why_not(dtype, *each))), None)


def read(source: Any, max_source_len: int | None = None) -> Shape:
    """Read the shape of a model's cache.

    Parameters
    ----------
    source : path, mapping, or configuration of transformers
        A folder with a ``config.json``, that file, or a GGUF; or the content of a ``config.json``, as a mapping or as
        `Fields`.
    max_source_len : int, optional
        The most tokens, or frames, that an encoder is given; by default the files' number. Ignored without an encoder.

    Returns
    -------
    Shape
        The shape. A model with an encoder has the decoder's layers, then a cross-attention layer for each of them.

    Raises
    ------
    ModelFileError
        If a file is missing, is of another format, or holds impossible values.
    NotSupportedError
        If a layer keeps a state that no policy describes, or no layer keeps keys and values.
    TypeError
        If `source` is none of these.

    Examples
    --------
    >>> shape = read({"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 32,
    ...               "num_key_value_heads": 8, "hidden_size": 4096, "sliding_window": 4096})
    >>> shape.layers[1].num_kv_heads, shape.layers[1].head_dim, shape.layers[1].policy
    (8, 128, SlidingWindow(window=4096, num_sink_tokens=0, resume_window=None))
    """
    config = read_config(source)
    model_type = config.text("model_type", "model")
    if model_type in REFUSED:
        raise NotSupportedError(f"{config.source}: a {model_type} is not supported, as {REFUSED[model_type]}")
    kinds = _kinds(config)
    own = config.by_layer(len(kinds))
    described = [_layer(own[i], i, kind) for i, kind in enumerate(kinds)]
    num_heads = [heads for heads, _ in described]
    shares = _share(config, kinds)
    layers = [replace(layer, share=share) for (_, layer), share in zip(described, shares, strict=True)]
    if config.get("is_encoder_decoder"):
        cross = _cross(config, max_source_len)
        layers += [replace(layer, policy=cross, rope=False, share=None) for layer in layers]
        num_heads *= 2
    if all(layer.policy is None for layer in layers):
        raise NotSupportedError(f"{config.source}: no layer of this {plain(model_type)} has keys and values")
    context = config.get("max_position_embeddings")
    if context is not None:
        context = config.count("max_position_embeddings", most=MAX_CONTEXT)
    shape = Shape(model_type, tuple(layers), tuple(num_heads), context)
    if isinstance(source, str | os.PathLike) and not any(config.get(name) for name in ("gguf_architecture", PACKED)):
        _check_weights(Path(source), shape)
    return shape


def _check_weights(path: Path, shape: Shape) -> None:
    """Refuse a folder whose weights disagree with its configuration on the size of keys or values."""
    folder = path if os.path.isdir(path) else path.parent
    prefix = "model.layers.0.self_attn"  # what most models call layer 0's attention
    first = shape.layers[0]
    dims = {f"{prefix}.k_proj.weight": first.head_dim, f"{prefix}.v_proj.weight": first.v_head_dim}
    for found in find_weights(folder, dims):
        if found is None or not os.path.isfile(found):
            continue
        with open_file(found) as file:
            entries, _ = read_safetensors_header(file)
        for tensor, dim in dims.items():
            made = Fields(entry, "").get("shape") if isinstance(entry := entries.get(tensor), dict) else None
            if not isinstance(made, list) or not made or first.value_in_key:
                continue
            if made[0] != first.num_kv_heads * dim:
                raise ModelFileError(
                    f"{plain(found)}: {tensor} makes {shown(made[0])} elements for a token, and config.json says "
                    f"{first.num_kv_heads} KV heads of {dim}"
                )


# ---- heads, sizes and policy of each layer


def _kinds(config: Fields) -> list[str]:
    """Return Hugging Face's type of each layer."""
    listed = config.get("layer_types")
    default = len(listed) if isinstance(listed, list) else None
    num_layers = config.count("num_hidden_layers", default, most=MAX_LAYERS)
    num_layers *= ATTENTIONS.get(config.text("model_type", ""), 1)
    kinds = config.sequence("layer_types", num_layers)
    if kinds is None:
        return [_kind(config, i) for i in range(num_layers)]
    for i, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in STATELESS | FULL | SLIDING | {"chunked_attention"}:
            raise NotSupportedError(f"{config.source}: layer {i} is of type {shown(kind)}, which no policy stands for")
    return kinds


def _kind(config: Fields, layer: int) -> str:
    """Derive the type of a layer whose type the file does not name."""
    if config.get("attention_chunk_size") is not None:  # as in Llama 4
        return "chunked_attention" if _rotates_by_interval(config, layer) else "full_attention"
    if _has_rows(config, layer):
        return "sliding_attention" if _slides(config, layer) else "full_attention"
    return "linear_attention"


def _has_rows(config: Fields, layer: int) -> bool:
    """Whether a layer has attention: some models have layers without it."""
    if config.get("attn_layer_period") is not None:
        return layer % config.count("attn_layer_period") == config.count("attn_layer_offset", 0, least=0)
    if config.get("full_attention_interval") is not None:
        return (layer + 1) % config.count("full_attention_interval") == 0
    if config.get("model_type") == "bamba":
        return layer in (config.sequence("attn_layer_indices") or ())
    blocks = config.sequence("block_types")
    return not blocks or blocks[layer % len(blocks)] == "attention"


def _slides(config: Fields, layer: int) -> bool:
    """Whether a layer with attention has a window."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return False
    model_type = config.text("model_type", "")
    pattern = config.get("sliding_window_pattern", FULL_EVERY.get(model_type))
    if isinstance(pattern, str):  # such as "LLLG": three layers with a window, one without
        return not pattern or pattern[layer % len(pattern)] != "G"
    if pattern is not None:
        return (layer + 1) % config.count("sliding_window_pattern", pattern) != 0
    if config.get("gguf_architecture") is not None and model_type not in SLIDING_EVERYWHERE:
        raise NotSupportedError(
            f"{config.source}: it names a window, but not which layers of a {plain(model_type)} have it: give a policy"
        )
    first = config.count("max_window_layers", 0, least=0) if config.get("use_sliding_window") else 0
    return layer >= first


def _layer(config: Fields, layer: int, kind: str) -> tuple[int, Layer]:
    """Return the number of query heads of a layer, and the layer."""
    policy = _policy(config, kind)
    num_heads = config.count("num_attention_heads", most=MAX_HEADS) if policy is not None else 1
    if config.get("kv_lora_rank"):
        rank = config.count("kv_lora_rank", most=MAX_HEAD_DIM)
        rotated = config.count("qk_rope_head_dim", least=0, most=MAX_HEAD_DIM)
        _check_width(config, num_heads, rank + rotated)
        rope = _rope(config, layer, kind, rank + rotated, rank)
        latents = Layer(1, rank + rotated, v_head_dim=rank, value_in_key=True, policy=policy, rope=rope)
        return num_heads, latents
    if policy is None:
        return 1, Layer(1, 32, policy=None)  # stores nothing: sizes that suit every element type
    prefix = "swa_" if kind in SLIDING and config.get("swa_head_dim") is not None else ""
    derived = config.get("hidden_size")
    derived = None if derived is None else config.count("hidden_size") // num_heads
    head_dim = config.count(prefix + "head_dim", derived or None, most=MAX_HEAD_DIM)
    v_head_dim = config.count(prefix + "v_head_dim", head_dim, most=MAX_HEAD_DIM)
    num_kv_heads = _num_kv_heads(config, prefix, kind, num_heads)
    if num_heads % num_kv_heads:
        raise config.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    _check_width(config, num_heads, max(head_dim, v_head_dim))
    rope = _rope(config, layer, kind, head_dim, 0)
    return num_heads, Layer(num_kv_heads, head_dim, v_head_dim=v_head_dim, policy=policy, rope=rope)


def _check_width(config: Fields, num_heads: int, head_dim: int) -> None:
    if num_heads * head_dim > MAX_WIDTH:
        raise config.error(f"{num_heads} heads of {head_dim} elements are more than any model's")


def _num_kv_heads(config: Fields, prefix: str, kind: str, num_heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    attention = config.part("attn_config")
    if attention is not None and attention.get("kv_n_heads") is not None:
        return attention.count("kv_n_heads", most=MAX_HEADS)
    default = config.get("num_key_value_heads", num_heads)
    if not prefix and kind in SLIDING:
        more = MORE_KV_HEADS.get(config.text("model_type", ""), 1)
        return more * config.count("num_key_value_heads", default, most=MAX_HEADS // more)
    return config.count(prefix + "num_key_value_heads", default, most=MAX_HEADS)


def _policy(config: Fields, kind: str) -> Policy | None:
    if kind in STATELESS:
        return None
    if kind in SLIDING:
        return SlidingWindow(config.count("sliding_window"))
    return ChunkedAttention(config.count("attention_chunk_size")) if kind == "chunked_attention" else FullAttention()


def _cross(config: Fields, max_source_len: int | None) -> CrossAttention:
    """Return the policy of a cross-attention layer."""
    if max_source_len is None and config.get("max_source_positions") is None:
        raise NotSupportedError(
            f"{config.source}: it does not say what its encoder is given at most: give max_source_len"
        )
    return CrossAttention(config.count("max_source_positions") if max_source_len is None else max_source_len)


def _share(config: Fields, kinds: list[str]) -> list[int | None]:
    """Return the index of the layer whose rows each layer reads; None: its own.

    The last ``num_kv_shared_layers`` layers read the rows of the last layer of their type before them.
    """
    num_shared = config.count("num_kv_shared_layers", 0, least=0, most=len(kinds) - 1)
    own = kinds[: len(kinds) - num_shared]
    last = {kind: i for i, kind in enumerate(own)}
    for i, kind in enumerate(kinds[len(own) :], len(own)):
        if kind not in last and kind not in STATELESS:
            raise config.error(
                f"layer {i} is to read the rows of a layer of type {kind!r}, and there is none before it"
            )
    return [None] * len(own) + [None if kind in STATELESS else last[kind] for kind in kinds[len(own) :]]


# ---- rotation of keys


def _rope(config: Fields, layer: int, kind: str, head_dim: int, first_dim: int) -> RopeLike:
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
        return _rotates_by_interval(config, layer)
    thetas = config.get("layer_rope_theta")
    return not isinstance(thetas, list) or layer >= len(thetas) or thetas[layer] != 0


def _rotates_by_interval(config: Fields, layer: int) -> bool:
    """Whether a layer rotates keys, by ``no_rope_layers`` (0: it does not), else by ``no_rope_layer_interval``."""
    listed = config.get("no_rope_layers")
    if listed:
        rotating = config.sequence("no_rope_layers", layer + 1)
        return rotating is not None and bool(rotating[layer])
    every = config.count("no_rope_layer_interval", NO_ROPE_EVERY.get(config.text("model_type", "")))
    return (layer + 1) % every != 0


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
