"""The recurrent states that a model keeps of a sequence beside keys and values: their sizes, from its configuration.

Layers of linear attention, state spaces and convolutions have a state of a fixed size, whatever the sequence's length.
It is a matrix for each head, and what a short convolution takes of the last tokens. The runner keeps it, not the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.errors import plain
from kvcache.models.configuration import read_config
from kvcache.models.kinds import STATELESS, fields_of_layers, layer_types
from kvcache.models.reading import Fields

WITHOUT_STATE = {"dummy", "mlp", "moe"}  # types of layers that keep nothing at all
RECURRENT = STATELESS - WITHOUT_STATE | {"hybrid", "hybrid_sliding"}  # a hybrid layer has attention as well
# Types of models whose layers without attention keep nothing.
SKIPPING = {"nemotron-nas"}
# Tokens of a prompt from one kept state to the next: a state may take as much memory as the rows of so many tokens.
CHECKPOINT_TOKENS = 2048


@dataclass(frozen=True)
class State:
    """The elements that a layer keeps of a sequence beside keys and values.

    Attributes
    ----------
    conv : int
        What convolutions take of the tokens before the next one. llama.cpp keeps it in f32.
    recurrent : int
        The recurrent state, which llama.cpp keeps in f32.
    conv_in_transformers : int
        What transformers keeps for convolutions, in the type of the weights: of one more token.
    is_f32 : bool
        Whether transformers keeps the recurrent state in f32, too, whatever the type of the weights.
    """

    conv: int = 0
    recurrent: int = 0
    conv_in_transformers: int = 0
    is_f32: bool = True

    @property
    def nbytes(self) -> int:
        """The bytes that llama.cpp keeps."""
        return 4 * (self.conv + self.recurrent)

    def nbytes_in_transformers(self, itemsize: int) -> int:
        """Return the bytes that transformers keeps, where an element of the weights has `itemsize`."""
        return itemsize * self.conv_in_transformers + (4 if self.is_f32 else itemsize) * self.recurrent


def read(source: Any) -> tuple[State, ...]:
    """Read what a model's layers keep of a sequence beside keys and values.

    Parameters
    ----------
    source : path, mapping, or configuration of transformers
        What `kvcache.models.shapes.read` takes.

    Returns
    -------
    tuple of State
        The states of the first layers of the shape that `kvcache.models.shapes.read` returns; the others have none.

    Raises
    ------
    ModelFileError
        If a file is missing, is of another format, or holds impossible values.
    NotSupportedError
        If the sizes of a model's states are not known.

    Examples
    --------
    >>> states = read({"model_type": "qwen3_next", "num_hidden_layers": 4, "linear_num_key_heads": 16,
    ...                "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128})
    >>> [state.nbytes for state in states]
    [2195456, 2195456, 2195456, 0]
    """
    config = read_config(source)
    kinds = layer_types(config)
    if RECURRENT.isdisjoint(kinds) or config.get("model_type") in SKIPPING:
        return (State(),) * len(kinds)
    make = _of_gguf if config.get("gguf_architecture") is not None else MODELS.get(config.text("model_type", ""))
    if make is None:
        name = plain(config.get("model_type"))
        raise config.unsupported(f"the sizes of recurrent states of the model_type {name!r} are unknown")
    own = fields_of_layers(config, kinds)
    return tuple(make(own[i], i) if kind in RECURRENT else State() for i, kind in enumerate(kinds))


def _convolved(width: int, kernel: int, recurrent: int) -> State:
    """Return the state of a layer with a convolution over `kernel` tokens, each with `width` elements."""
    return State((kernel - 1) * width, recurrent, kernel * width)


def _of_gguf(config: Fields, layer: int) -> State:
    """Return the state of a layer of a GGUF, as llama.cpp's ``n_embd_r`` and ``n_embd_s`` count it."""
    kernel = config.count("ssm_conv_kernel", 1)
    if config.get("shortconv_l_cache") is not None:
        return _convolved(config.count("hidden_size"), config.count("shortconv_l_cache"), 0)
    if config.get("kda_head_dim") is not None:
        return _kda(config.count("num_attention_heads"), config.count("kda_head_dim"), kernel)
    if config.text("gguf_architecture") == "minimax-01":
        return _lightning(config, layer)
    inner, size = config.count("ssm_inner_size", 0, least=0), config.count("ssm_state_size", 0, least=0)
    state = _convolved(inner + 2 * size * config.count("ssm_group_count", 0, least=0), kernel, size * inner)
    return _with_ngrams(config, layer, state, "ple_layers", "ple_conv_kernel", "ple_ngram_size")


def _delta_net(config: Fields, layer: int) -> State:
    """Return the state of a layer with a gated delta rule, as in Qwen 3 Next."""
    heads, dim = config.count("linear_num_value_heads"), config.count("linear_value_head_dim")
    key_heads, key_dim = config.count("linear_num_key_heads"), config.count("linear_key_head_dim")
    width = 2 * key_heads * key_dim + heads * dim
    return _convolved(width, config.count("linear_conv_kernel_dim", 4), heads * key_dim * dim)


def _olmo(config: Fields, layer: int) -> State:
    """Return the state of a layer of OLMo's hybrid, whose sizes follow from others where a file has none."""
    heads = config.count("num_attention_heads")
    key_heads = config.count("linear_num_key_heads", heads)
    key_dim = config.count("linear_key_head_dim", 3 * config.count("hidden_size") // (4 * key_heads))
    usual = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }
    given = {name: value for name, value in config.values.items() if value is not None}
    return _delta_net(Fields({**usual, **given}, config.source), layer)


def _qwen4(config: Fields, layer: int) -> State:
    """Return the state of a layer of Qwen 4; one layer embeds n-grams."""
    ids = config.sequence("ple_layer_ids") or []  # of which the first layer is 1
    own = Fields({**config.values, "ple_layers": [i - 1 for i in ids if isinstance(i, int)]}, config.source)
    return _with_ngrams(own, layer, _delta_net(config, layer), "ple_layers", "ple_conv_kernel_size", "ngram_size")


def _with_ngrams(config: Fields, layer: int, state: State, layers: str, kernel: str, ngram: str) -> State:
    """Add what the layer that embeds n-grams convolves: tokens that are as far apart as an n-gram is long."""
    if layer not in (config.sequence(layers) or ()):
        return state
    width = config.count("hc_count") * config.count("hidden_size")
    more = (config.count(kernel) - 1) * config.count(ngram) * width
    return State(state.conv + more, state.recurrent, state.conv_in_transformers + more)


def _kda(heads: int, dim: int, kernel: int) -> State:
    """Return the state of a layer with Kimi's delta attention."""
    return _convolved(3 * heads * dim, kernel, heads * dim * dim)


def _kimi(config: Fields, layer: int) -> State:
    """Return the state of a layer of Kimi Linear, whose sizes are in an object, or under other names beside it."""
    given = config.part("linear_attn_config") or Fields({}, config.source)
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    heads, dim = (
        given.count(name) if given.get(name) is not None else config.count(new) for name, new in names.items()
    )
    return _kda(heads, dim, given.count("short_conv_kernel_size", config.count("linear_conv_kernel_dim", 4)))


def _bailing(config: Fields, layer: int) -> State:
    """Return the state of a layer of Bailing, whose class keeps a file's ``head_dim`` under another name."""
    kernel = config.count("short_conv_kernel_size", 4)
    dim = config.count("linear_head_dim", config.count("head_dim"))
    return _kda(config.count("num_attention_heads"), dim, kernel)


def _lightning(config: Fields, layer: int) -> State:
    """Return the state of a layer of MiniMax, which has no convolution."""
    heads = config.count("num_attention_heads")
    dim = config.count("head_dim", config.count("hidden_size") // heads)
    return State(0, heads * dim * dim, is_f32=False)


def _inner(config: Fields) -> int:
    """Return the width of a state space: ``mamba_expand`` times the model's."""
    return config.count("mamba_expand", 2) * config.count("hidden_size")


def _mamba(config: Fields, layer: int) -> State:
    """Return the state of a layer of Mamba's first version."""
    inner = _inner(config)
    return _convolved(inner, config.count("mamba_d_conv", 4), inner * config.count("mamba_d_state", 16))


def _mamba2(config: Fields, layer: int) -> State:
    """Return the state of a layer of Mamba's second version."""
    inner, size = config.count("mamba_d_ssm", _inner(config)), config.count("mamba_d_state")
    groups = config.count("mamba_n_groups", config.count("mamba_ngroups", 1))
    return _convolved(inner + 2 * groups * size, config.count("mamba_d_conv", 4), inner * size)


def _nemotron(config: Fields, layer: int) -> State:
    """Return the state of a layer of Nemotron-H: Mamba's second version, with names of its own."""
    inner, size = config.count("mamba_num_heads") * config.count("mamba_head_dim"), config.count("ssm_state_size")
    return _convolved(inner + 2 * config.count("n_groups") * size, config.count("conv_kernel", 4), inner * size)


def _plamo2(config: Fields, layer: int) -> State:
    """Return the state of a layer of Plamo 2, whose convolution takes the inner width alone."""
    inner = config.count("mamba_num_heads", 64) * config.count("head_dim", 128)
    return _convolved(inner, config.count("mamba_d_conv", 4), inner * config.count("mamba_d_state", 64))


def _short_conv(config: Fields, layer: int) -> State:
    """Return the state of a layer that is a short convolution."""
    return _convolved(config.count("hidden_size"), config.count("conv_L_cache"), 0)


def _griffin(config: Fields, layer: int) -> State:
    """Return the state of a recurrent layer of Griffin, of which transformers keeps no more than needed."""
    width = config.count("lru_width", config.count("hidden_size"))
    conv = (config.count("conv1d_width", 4) - 1) * width
    return State(conv, width, conv)


def _zaya(config: Fields, layer: int) -> State:
    """Return the state of a layer that convolves queries and keys twice, and delays half of each value by a token."""
    kv_width = config.count("num_key_value_heads") * config.count("head_dim")
    width = kv_width + config.count("num_attention_heads") * config.count("head_dim")
    conv = (config.count("cca_time0", 2) + config.count("cca_time1", 2) - 2) * width
    return State(conv, kv_width // 2, conv, is_f32=False)


MODELS: dict[str, Callable[[Fields, int], State]] = {
    **dict.fromkeys(("lara_mini", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _delta_net),
    **dict.fromkeys(("glm5_next_text", "kimi_linear"), _kimi),
    **dict.fromkeys(("bailing_moe_linear", "minimax", "minimax_m1", "minimax_text_01"), _lightning),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "zamba2"), _mamba2),
    **dict.fromkeys(("jamba", "zamba"), _mamba),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_conv),
    "bailing_hybrid": _bailing,
    "nemotron_h": _nemotron,
    "olmo_hybrid": _olmo,
    "plamo2": _plamo2,
    "qwen4_exp_text": _qwen4,
    "recurrent_gemma": _griffin,
    **dict.fromkeys(("zaya", "zaya_2025"), _zaya),
}
