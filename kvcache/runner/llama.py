"""`Llama`, a Llama-family model in NumPy that keeps keys and values in a `KVCache`.

The model is read from a Hugging Face folder (``config.json``, safetensors) or a GGUF file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache import KVCache, Rope
from kvcache.arguments import integers
from kvcache.arrays import Precision, to_precision
from kvcache.errors import shown
from kvcache.eviction import Queries
from kvcache.layer import Layer
from kvcache.models import shapes
from kvcache.models.configuration import read_config
from kvcache.models.reading import Fields, expanded
from kvcache.models.shapes import PREFILL_TOKENS as PREFILL_TOKENS
from kvcache.models.weights import F32, Tensors
from kvcache.policy import Policy

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


class LlamaError(ValueError):
    """A request that the runner cannot meet; the message is one sentence."""


# --- the model's files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaConfig:
    """The parts of a model's configuration that the runner needs, under this project's names."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    rms_norm_eps: float
    rope: Rope
    policy: tuple[Policy | None, ...]  # one policy per layer
    tie_word_embeddings: bool

    def check_tokens(self, tokens: ArrayLike) -> None:
        """Refuse tokens outside the vocabulary: the tokenizer may be another model's."""
        for token in (np.min(tokens), np.max(tokens)):
            if not 0 <= token < self.vocab_size:
                raise LlamaError(f"token {token:,} is none of the model's {self.vocab_size:,}")

    @classmethod
    def read(cls, path: str | Path) -> LlamaConfig:
        """Read the configuration of a Hugging Face folder or a GGUF file.

        Raises
        ------
        ModelFileError
            The file is missing, a field is missing or impossible, or the model is not of Llama's family.
        NotSupportedError
            A layer keeps a state that no policy describes.
        """
        fields = read_config(path)
        _check_family(fields)
        shape = shapes.read(fields)
        num_heads, num_kv_heads, head_dim = _heads(fields, shape)
        return cls(
            num_layers=len(shape.layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            max_seq_len=fields.count("max_position_embeddings"),
            rms_norm_eps=fields.positive("rms_norm_eps"),
            rope=_rope(fields, shape.layers, head_dim),
            policy=tuple(layer.policy for layer in shape.layers),
            tie_word_embeddings=fields.get("tie_word_embeddings") is True,
        )


def _check_family(fields: Fields) -> None:
    """Refuse models that the forward pass does not compute."""
    model_type = fields.text("model_type")
    if model_type not in MODEL_TYPES:
        raise fields.error(f"model_type {shown(model_type)} is not supported, only {', '.join(MODEL_TYPES)} are")
    fields.expect("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, False)
    scaling = fields.part("rope_parameters") or fields.part("rope_scaling") or Fields({}, fields.source)
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise fields.error(f"rope_type {shown(rope_type)} is not supported, only {', '.join(ROPE_TYPES)} are")


def _heads(fields: Fields, shape: shapes.Shape) -> tuple[int, int, int]:
    """Return query heads, KV heads and head size, which must be equal in all layers."""
    layers = zip(shape.num_heads, shape.layers, strict=True)
    kinds = {(heads, layer.num_kv_heads, layer.head_dim) for heads, layer in layers}
    if len(kinds) > 1 or any(layer.v_head_dim != layer.head_dim or layer.value_in_key for layer in shape.layers):
        raise fields.error("its layers differ, or their keys and values do, which is not supported")
    (num_heads, num_kv_heads, head_dim) = kinds.pop()
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise fields.error(f"head_dim must be even for RoPE, not {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _rope(fields: Fields, layers: Sequence[Layer], head_dim: int) -> Rope:
    """Return the rotation, which must be equal in all layers."""
    rope = layers[0].rope
    if not isinstance(rope, Rope) or any(layer.rope != rope for layer in layers) or 2 * len(rope.inv_freq) != head_dim:
        raise fields.error("only models whose heads are rotated as a whole, and all alike, are supported")
    return rope


# --- the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """The weights of a layer. Matrices are [out, in], and matrices with the same input are stacked."""

    attention_norm: F32  # [hidden]
    qkv: F32  # [(num_heads + 2 num_kv_heads) * head_dim, hidden]
    qkv_bias: F32 | None  # [(num_heads + 2 num_kv_heads) * head_dim]
    q_norm: F32 | None  # [head_dim]
    k_norm: F32 | None  # [head_dim]
    out: F32  # [hidden, num_heads * head_dim]
    mlp_norm: F32  # [hidden]
    gate_up: F32  # [2 intermediate, hidden]
    down: F32  # [hidden, intermediate]


class Llama:
    """A Llama model in float32: RMSNorm, rotary positions (half-split), grouped-query attention, SwiGLU.

    If the weights have biases of queries, keys and values (Qwen2), or norms of queries and keys (Qwen3), these are
    applied.

    A `Llama` holds weights only: keys and values lie in the cache that each call is given. `load` reads a model from a
    folder or a GGUF file.
    """

    def __init__(self, config: LlamaConfig, embedding: F32, layers: Sequence[_Layer], norm: F32, head: F32) -> None:
        self.config = config
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self.norm = norm  # [hidden]
        self.head = head  # [vocab, hidden]
        self.inv_freq = np.array(config.rope.inv_freq)

    @classmethod
    def load(cls, path: str | Path) -> Llama:
        """Load a Hugging Face folder, ``config.json`` and ``model.safetensors`` or its shards, or a GGUF file.

        Safetensors may hold F32, F16 or BF16; GGUF also Q8_0, Q4_0, and every other type that the package ``gguf``
        decodes. All weights become float32. Embeddings may be tied.

        Raises
        ------
        ModelFileError
            A file, field or tensor is missing, has another shape, or is of an unsupported kind.
        ImportError
            A package that reads the weights is not installed.
        """
        return cls.from_tensors(LlamaConfig.read(path), Tensors(expanded(path)))

    @classmethod
    def from_tensors(cls, config: LlamaConfig, tensors: Tensors) -> Llama:
        """Take a model's weights from its files; raise as `load` does."""
        embedding = tensors.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_take_layer(tensors, config, f"model.layers.{i}.") for i in range(config.num_layers)]
        norm = tensors.take("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        head = embedding if tied else tensors.take("lm_head.weight", config.vocab_size, config.hidden_size)
        tensors.finish("lm_head.weight", "rope_freqs.weight")  # rope_freqs: already in the configuration
        rope = Rope(config.rope.inv_freq)  # _take_layer has reordered interleaved heads to halves
        return cls(replace(config, rope=rope), embedding, layers, norm, head)

    def forward(
        self,
        tokens: Iterable[SupportsIndex],
        cache: KVCache,
        *,
        seq_id: int | Sequence[int] = 0,
        last_only: bool = False,
        select: int | None = None,
        prompts: Precision = "stored",
        queries: Queries | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> F32:
        """Append tokens to a sequence of a cache, and return the logits after each token.

        Parameters
        ----------
        tokens : sequence or array of int, or bytes, shape [n]
            The tokens that follow those of the sequence, at least one. Long inputs are cut into batches.
        cache : KVCache
            A cache for this model's shape and rotation, as `new_cache` makes. `KVCache.from_config` needs
            ``rope=model.config.rope`` for a GGUF: `load` reorders heads whose neighbours are rotated together.
        seq_id : int or sequence of int, default 0
            The sequence, say one that `kvcache.PrefixCache.acquire` returned; or, for a batch of several sequences, the
            sequence of each token. Tokens of a sequence then stand side by side.
        last_only : bool
            Whether to compute the logits of the last token only.
        select : int, optional
            About how many rows a token reads for each KV head in layers with sketches, as in `kvcache.Batch.attend`. By
            default all rows are read.
        prompts : {"stored", "int8"}, default "stored"
            How tokens are attended to, more than 8 of a sequence in a batch: the `precision` of
            `kvcache.Batch.attend`.
        queries : kvcache.eviction.Queries, optional
            Notes the tokens' queries, which are of one sequence, for `kvcache.eviction.evict`.
        on_batch : callable, optional
            A function called after each batch with the number of tokens done, and with `n`.

        Returns
        -------
        ndarray of float32, shape [n, vocab_size], or [1, vocab_size] with `last_only`
            The logits of the next token.

        Raises
        ------
        LlamaError
            A token is outside the vocabulary, or the cache rotates keys otherwise than the model.
        TypeError, ValueError
            `tokens` has none, or something else than integers, or `prompts` is neither way.
        """
        ids = integers(tokens, "tokens")
        if not len(ids):
            raise ValueError("tokens is empty: at least one token is needed")
        self.config.check_tokens(ids)
        self._check_rope(cache)
        options = {} if prompts == "stored" else {"precision": to_precision(prompts, "prompts")}
        seq_ids = [*seq_id] if isinstance(seq_id, Sequence) else [seq_id] * len(ids)
        if len(seq_ids) != len(ids):
            raise ValueError(f"seq_id must be one sequence, or one for each of {len(ids)} tokens, not {len(seq_ids)}")
        hidden = []
        for i in range(0, len(ids), PREFILL_TOKENS):
            part = slice(i, i + PREFILL_TOKENS)
            hidden.append(self._hidden(ids[part], cache, seq_ids[part], select, options, queries))
            if on_batch is not None:
                on_batch(min(i + PREFILL_TOKENS, len(ids)), len(ids))
        x = hidden[-1][-1:] if last_only else np.concatenate(hidden)
        return _rms_norm(x, self.norm, self.config.rms_norm_eps) @ self.head.T

    def _check_rope(self, cache: KVCache) -> None:
        """Raise LlamaError if the cache would move keys by another rotation than the model's."""
        for i, layer in enumerate(cache.layers):
            if isinstance(layer.rope, Rope) and layer.rope != self.config.rope:
                raise LlamaError(
                    f"cache: layer {i} rotates keys otherwise than the model: use `new_cache`, or give"
                    " rope=model.config.rope"
                )

    def _hidden(
        self, ids: NDArray[np.int64], cache: KVCache, seq_ids: Sequence[int], select: int | None,
        options: dict[str, Any], queries: Queries | None,
    ) -> F32:  # fmt: skip
        """Run one batch through all layers, with more options of `Batch.attend`: [n] -> [n, hidden]."""
        c, n = self.config, len(ids)
        selecting = () if select is None else {i for i, own in enumerate(cache.layers) if own.sketch}
        rotated, all_heads = c.num_heads + c.num_kv_heads, c.num_heads + 2 * c.num_kv_heads
        x = self.embedding[ids]
        with cache.batch(n, seq_ids=seq_ids) as batch:
            angles = batch.positions[:, None, None] * self.inv_freq  # float64: positions may be large
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            for index, layer in enumerate(self.layers):
                qkv = _rms_norm(x, layer.attention_norm, c.rms_norm_eps) @ layer.qkv.T
                if layer.qkv_bias is not None:
                    qkv += layer.qkv_bias
                heads = qkv.reshape(n, all_heads, c.head_dim)
                q, k, v = heads[:, : c.num_heads], heads[:, c.num_heads : rotated], heads[:, rotated:]
                for rows, norm in ((q, layer.q_norm), (k, layer.k_norm)):
                    if norm is not None:
                        rows[...] = _rms_norm(rows, norm, c.rms_norm_eps)
                _rotate(heads[:, :rotated], cos, sin)
                if queries is not None:
                    queries.note(index, q, batch.positions, seq_id=seq_ids[0])
                own = {**options, "select": select} if index in selecting else options
                x += batch.attend(index, q, k, v, **own).reshape(n, -1) @ layer.out.T
                gate_up = _rms_norm(x, layer.mlp_norm, c.rms_norm_eps) @ layer.gate_up.T
                x += _swiglu(gate_up) @ layer.down.T
        return x


def _take_layer(tensors: Tensors, config: LlamaConfig, prefix: str) -> _Layer:
    """Take the weights of the layer whose tensors' names begin with `prefix`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def take(name: str, *shape: int) -> F32:
        return tensors.take(f"{prefix}{name}", *shape)

    def take_qkv(kind: str, *columns: int) -> F32:
        q, k, v = (
            take(f"self_attn.{n}_proj.{kind}", r, *columns)
            for n, r in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
        )
        if config.rope.interleaved:
            q, k = _to_halves(q, config.head_dim), _to_halves(k, config.head_dim)
        return np.concatenate([q, k, v])

    def take_if_there(name: str) -> F32 | None:
        return take(name, config.head_dim) if f"{prefix}{name}" in tensors else None

    return _Layer(
        attention_norm=take("input_layernorm.weight", hidden),
        qkv=take_qkv("weight", hidden),
        qkv_bias=take_qkv("bias") if f"{prefix}self_attn.q_proj.bias" in tensors else None,
        q_norm=take_if_there("self_attn.q_norm.weight"),
        k_norm=take_if_there("self_attn.k_norm.weight"),
        out=take("self_attn.o_proj.weight", hidden, q_rows),
        mlp_norm=take("post_attention_layernorm.weight", hidden),
        gate_up=np.concatenate(
            [take("mlp.gate_proj.weight", inner, hidden), take("mlp.up_proj.weight", inner, hidden)]
        ),
        down=take("mlp.down_proj.weight", hidden, inner),
    )


def _to_halves(rows: F32, head_dim: int) -> F32:
    """Reorder each head from rotated neighbours to rotated halves: 0 2 4 ... 1 3 5 ..."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Divide vectors by the root of their mean square, and multiply them by a weight."""
    squares: F32 = np.vecdot(x, x)[..., None]
    normed: F32 = x / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps)) * weight
    return normed


def _rotate(heads: F32, cos: F32, sin: F32) -> None:
    """Rotate [n, heads, head_dim] in place; element i pairs with i + head_dim / 2."""
    half = heads.shape[-1] // 2
    a, b = heads[..., :half], heads[..., half:]
    rotated_a = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = rotated_a


def _swiglu(gate_up: F32) -> F32:
    """Return silu(gate) * up: [n, 2 inner] -> [n, inner]."""
    inner = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives 0, as it should
        out: F32 = gate / (1 + np.exp(-gate)) * up
    return out
