"""Fields of a configuration that say what its layers are, and that nothing has read: never pass over one in silence."""

from __future__ import annotations

import re
import warnings

from kvcache.errors import NotSupportedError, plain, shown
from kvcache.models.fields import NAMES, Fields

__all__ = ["check", "refuse", "says_layers"]

# Parts of names that say something of layers, heads, or what tokens see.
SAYS = re.compile(
    r"pattern|per_layer|layer_?types?|block_?types?|block_configs|block_overrides|layers$|layers_(ids|idxs?|list|map)"
    r"|(layer|attn|attention)_(ids?|idxs?|ind(ic|ex)\w*|list|map|period|offset|interval|step)|_idxs?$|_indices$"
    r"|group|interval|every|period|mb_per|share|reuse|recycle|(^|_)(cla|yoco|swa|gqa|mqa|kv)(_|$)|sliding|window"
    r"|(^|_)(local|global)_|nope|no_rope|hybrid|cross_(attn|attention|layer)|(attn|attention)_types?|memory_tokens"
    r"|linear_(attn|attention)|full_att|(^|_)loops?(_|$)|recurrence|recurrent_block|ut_steps|_in_(prelude|coda)$"
)
# Parts of names that say it of something else: experts, other networks, training, kernels, heads that guess tokens.
OF_OTHERS = re.compile(
    r"(^|_)(moe|experts?|mlp|ffn?|router|dense|mtp|nextn|vision|vit|image|visual|video|audio|speech|encoder|t2u|unit|mm"
    r"|projector|adapter|adaptor|conv|mamba|ssm|deepstack|ngram|ple|altup|laurel|byte|dropout|init|loss|quant|cache"
    r"|tokens?|layerdrop|pruned|freeze|norm|bias|scale|scalar|multiplier|embed|embeddings?|time|feat|resampler|aligner"
    r"|prenet|postnet|gate|lora|state|pp|tp|hc|swiglu|vocab|logits?|res|topk|sconv|factor|prob|implementation|size"
    r"|sparsity|hidden|sparse)(_|$)|per_layer_input|^index_|for_linear_attn"
    r"|^(n_groups?|num_(limited_)?groups|n_(in|out)put_layers|output_|num_(mem|random)_|stagger_)"
)
# Fields that the reader need not ask for: others say the same, or they hold for all layers alike.
HARMLESS = {
    "_sliding_window_pattern", "add_cross_attention", "attention_type", "attention_window", "attn_type",
    "cla_share_factor", "cross_layer_interval", "decoder_layers", "freeze_text_layers", "global_head_dim",
    "indexer_types", "keep_window_size", "kv_channels", "kv_source_layers", "linear_attn_config", "local_radius",
    "max_window_layers", "mla_use_nope", "no_rope_layer_interval", "num_attention_groups", "num_gqa_groups",
    "num_kv_groups", "num_query_groups", "num_sliding_attention_heads", "order_of_interleaved_layers",
    "qk_nope_head_dim", "recurrent_kv_cache_mode", "rope_scaling_layers", "share_q_dim", "sliding_window_pattern",
    "use_cla", "use_gqa", "use_sliding_window",
}  # fmt: skip
# Fields that say which rows a layer reads, not which it keeps: sizes do not depend on them.
READS_LESS = {
    "blocksparse_block_size", "blocksparse_homo_head_pattern", "blocksparse_num_local_blocks",
    "blocksparse_vert_stride", "dense_attention_every_n_layers", "sparse_attention_config", "sparse_config",
}  # fmt: skip
# Fields with which a model keeps something that no layer of a cache stands for, and the reason.
REFUSED = {
    "mb_per_layer": "its later layers read rows and states of a layer in its middle",
    "index_head_dim": "its layers keep the keys of an indexer beside the others",
    "compress_ratios": "its layers compress what they keep",
}
# Fields that say how often layers run. Each run has rows of its own.
TIMES = ("loop_num", "num_loops", "total_ut_steps", "mean_recurrence")
# Types that keep no keys of an indexer though their files have its fields.
WITHOUT_INDEX = {"minimax_m3_vl_text"}
ADVICE = "describe its layers yourself, KVCache([Layer(...), ...])"


def says_layers(name: str) -> bool:
    """Whether a field's name says something of what layers keep."""
    says = SAYS.search(name)
    return says is not None and OF_OTHERS.search(re.sub("(group|window)_size|(kv)_lora", r"\1\2", name)) is None


def refuse(config: Fields) -> None:
    """Raise NotSupportedError if a file says that its model keeps more than a cache's layers stand for."""
    for name in TIMES:
        if config.count(name, 1) > 1:
            raise NotSupportedError(
                f"{config.source}: {name} {shown(config.get(name))} is not supported, as it runs layers several times, "
                f"each with rows of its own; {ADVICE}"
            )
    if config.get("layer_types") is not None:
        return
    sparse = config.part("sparse_attention_config")
    if (
        sparse is not None
        and sparse.get("sparse_index_dim")
        and any(sparse.sequence("sparse_attention_freq") or [True])
    ):
        raise NotSupportedError(
            f"{config.source}: sparse_attention_config is not supported, as {REFUSED['index_head_dim']}; {ADVICE}"
        )
    if config.get("model_type") in WITHOUT_INDEX:
        return
    for name, reason in REFUSED.items():
        if config.get(name):
            raise NotSupportedError(
                f"{config.source}: {name} {shown(config.get(name))} is not supported, as {reason}; {ADVICE}"
            )


def check(config: Fields) -> None:
    """Raise NotSupportedError for a field that says what layers are, and that was not asked for; warn of some."""
    if config.get("gguf_architecture") is not None:
        return
    known = (HARMLESS | config.used).union(*NAMES.values())
    if config.get("sliding_window") is not None:
        known |= {"window_size"}  # the same, under an older name
    for name, value in config.values.items():
        if not isinstance(name, str) or name in known or not value or value == -1:
            continue
        if name in READS_LESS:
            message = f"{plain(config.source)}: {name} is not read: layers keep every row, of which they read some"
            warnings.warn(message, stacklevel=4)
        elif says_layers(name):
            raise NotSupportedError(
                f"{config.source}: {plain(name)} {shown(value)} says what its layers are, and is not read; {ADVICE}"
            )
