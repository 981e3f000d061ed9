"""Fields of a configuration that say what its layers are, and that nothing has read: never pass over one in silence."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcache.errors import NotSupportedError, plain, shown
from kvcache.models import classes
from kvcache.models.configuration import NAMES
from kvcache.models.kinds import BY_LAYER, INDICES, PERIODS, WITH_INDEXER, ignored_kinds
from kvcache.models.reading import Fields, is_positive
from kvcache.warning import warn

# Parts of names that say something of layers, heads, or what tokens see.
SAYS = re.compile(
    r"pattern|per_layer|layer_?types?|block_?types?|block_configs|block_overrides|layers$|(^|_)n_(\w+_)?layer$|layers_(ids|idxs?|list|map)"
    r"|(layer|attn|attention)_(ids?|idxs?|ind(ic|ex)\w*|list|map|period|offset|interval|step)|_idxs?$|_indices$"
    r"|group|interval|every|period|mb_per|share|reuse|recycle|(^|_)(cla|yoco|swa|gqa|mqa|kv)(_|$)|sliding|window"
    r"|(^|_)(local|global)_|nope|no_rope|hybrid|cross_(attn|attention|layer)|(attn|attention)_types?|memory_tokens"
    r"|multi_query|(key|value|kv)_heads|heads_(k|v|kv)$|head_(dim|size)s?$|(^|_)(key|value|kv)_(dim|size)s?$|sink_tokens"
    r"|linear_(attn|attention)|full_att|(^|_)loops?(_|$)|recurrence|recurrent_block|ut_steps|_in_(prelude|coda)$"
)
# Parts of names that say it of something else: experts, other networks, training, kernels, what guesses tokens.
OF_OTHERS = re.compile(
    r"(^|_)(moe|experts?|mlp|ffn?|router|dense|mtp|nextn|vision|vit|image|visual|video|audio|speech|encoder|t2u|unit|mm"
    r"|projector|adapter|adaptor|conv|mamba|ssm|deepstack|ngram|ple|altup|laurel|byte|dropout|init|loss|quant|cache"
    r"|tokens?|layerdrop|pruned|freeze|norm|bias|scale|scalar|multiplier|embed|embeddings?|time|feat|resampler|aligner"
    r"|prenet|postnet|gate|lora|state|pp|tp|hc|swiglu|vocab|logits?|res|topk|sconv|factor|prob|implementation|size"
    r"|sparsity|hidden|sparse|layernorm|activation|input_output|train|frozen|recompute|scan|teacher|distill|draft"
    r"|medusa|exit|dola|target|fast|context|training|trainable|unfreeze|pipeline"
    r"|checkpoint(ing)?|log|eval|save|sample|by_length|classifier|regression|pooler|readout|probe|hook|spec(ulative)?)(_|$)|per_layer_input|max_period$|^index_|for_linear_attn"
    r"|^linear_(num_)?(key_|value_)?head"
    r"|^(n_groups?|num_(limited_)?groups|n_(in|out)put_layers|output_|num_(beam|mem|random)_|stagger_)"
)
# Parts of names that OF_OTHERS must not match, because their first word says something of layers.
KEPT = re.compile("(group|window|head|key|value|kv|sink)_(?:size|lora|tokens)")
# Whole names that say something of layers, and that the patterns above pass over.
NAMED = re.compile(
    r"^(attn|attn_(cfg|dim|mode|size)|attention|attention_(projection_)?size|cla_factor|[dkv]_dim|d_[kv]"
    r"|(attn|attention)_(chunk|dilation|mask_types?|sink_size|span)|chunk_attention|expand_[kv]|head_width"
    r"|history_length|layers?_(configs?|kinds?|overrides|repeats?|sharing|type)|(mamba|ssm)_layers|ssm_layer_idx"
    r"|mixers?|(token_)?mixer_types|(num_)?meta_tokens|num_(groups|recursions|repeats)|(num_)?[kv]_heads|qk_dim"
    r"|recursion_depth|token_mixers?|use_retention)$"
)
# Fields that the reader need not ask for, in files of any type: others say the same, or they hold for all layers alike.
HARMLESS = {
    "add_cross_attention", "attn_type", "linear_attn_config", "max_window_layers", "mla_use_nope",
    "no_rope_layer_interval", "qk_nope_head_dim", "rope_scaling_layers", "share_q_dim", "use_cla", "use_gqa",
    "use_sliding_window",
}  # fmt: skip
# Harmless fields of types that transformers has a class for: tests compare its real layers with what is read.
HARMLESS_IN_CLASSES = {
    "_sliding_window_pattern", "attention_type", "attention_window", "cross_layer_interval", "global_head_dim",
    "indexer_kv_heads", "keep_window_size", "kv_source_layers", "local_radius",
    "num_sliding_attention_heads", "o_groups", "order_of_interleaved_layers", "qk_head_dim", "sliding_window_pattern",
}  # fmt: skip
# Harmless fields of other types.
HARMLESS_OF = {
    "deepseek_v4": {"num_hash_layers"},  # how many choose experts by tokens
    "hf_olmo": {"block_type"},
    "llada": {"block_type"},
    "openelm": {"num_gqa_groups"},
}
# Parts of names that say how often something comes: with the value 1, all layers are alike.
OFTEN = re.compile(r"every|period|interval|(^|_)(step|mod|group_size|factor)(_|$)")
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
    "layer_sharing": "it runs each layer twice, each time with rows of its own",
    "attn_mode": "its layers of linear attention keep states, not rows",
    "num_slots": "its layers keep slots, not rows",
}
OF_INDEXERS = {"index_head_dim", "compress_ratios"}  # those of them that types with an indexer may have
# Types that are refused though a config.json may leave out such a field, and the reason.
REFUSED_TYPES = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "it reads another model's rows"),
    "modernbert": "it is an encoder, whose windows reach to both sides",
    **dict.fromkeys(("unlimited_ocr", "unlimited_ocr_text"), "its windows keep some tokens for ever"),
}  # fmt: skip
# Types of encoders. Files of these types that hold a decoder say so.
ENCODERS = {
    "albert", "bert", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "mpnet",
    "nomic_bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
    "xmod",
}  # fmt: skip
DECODING = ("ForCausalLM", "LMHeadModel")  # how the architectures of decoders end
# Fields that say how often layers run. Each run has rows of its own.
TIMES = ("loop_num", "num_loops", "total_ut_steps", "mean_recurrence")
# Types of classes.COMPARED whose layers all have the window that a file names.
WINDOWED = {"grinmoe", "llama_original", "phi3_v", "phi4mm", "solar"}
# Fields that say which layers have a window.
SAYS_WHERE = (*BY_LAYER, *INDICES, *PERIODS, "block_configs", "block_types", "full_attention_idx", "use_sliding_window")
# Fields that say how far the layers of a type see.
LENGTHS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
# Fields with which tokens see later ones, and the values with which windows reach to both sides.
BOTH_SIDES: dict[str, tuple[object, ...]] = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}
# Types whose windows end at the token itself, whatever such a field says: in PaliGemma 2 it is about the prompt alone.
ONE_SIDED = {"use_bidirectional_attention": {"gemma2"}}
ADVICE = "describe its layers yourself, KVCache([Layer(...), ...])"


def says_layers(name: str) -> bool:
    """Whether a field's name says something of what layers keep."""
    if NAMED.search(name):
        return True
    return SAYS.search(name) is not None and OF_OTHERS.search(KEPT.sub(r"\1", name)) is None


def is_unknown(config: Fields) -> bool:
    """Whether a config.json names no type, or a type that transformers has no class for and that nobody compared."""
    model_type = config.text("model_type", "")
    known = model_type in classes.COMPARED or classes.of(model_type) is not classes.UNKNOWN
    return not known and config.get("gguf_architecture") is None


def refuse(config: Fields) -> None:
    """Raise NotSupportedError if a file says that its model keeps more than a cache's layers stand for."""
    for name in config.sequence("model_types") or []:
        if name in REFUSED_TYPES:
            raise config.unsupported(f"a {name} is not supported, as {REFUSED_TYPES[name]}; {ADVICE}")
    named = classes.architecture(config.values)
    model_type = config.get("model_type")
    if named and model_type in ENCODERS and not named.endswith(DECODING) and not config.get("is_decoder"):
        raise config.unsupported(f"{plain(named)} is not supported, as an encoder has no KV cache")
    for name in TIMES:
        if config.count(name, 1) > 1:
            raise _refused(config, name, "it runs layers several times, each with rows of its own")
    if config.get("layer_types") is not None:
        return
    for name, reason in REFUSED.items():
        if config.get(name) and not (name in OF_INDEXERS and config.get("model_type") in WITH_INDEXER):
            raise _refused(config, name, reason)


def _refused(config: Fields, name: str, reason: str) -> NotSupportedError:
    return config.unsupported(f"{name} {shown(config.get(name))} is not supported, as {reason}; {ADVICE}")


def check(config: Fields, kinds: Sequence[str]) -> None:
    """Raise NotSupportedError for a field that says what layers are, and that was not asked for; warn of some.

    `kinds` are the layers' types as they were read.
    """
    model_type = config.text("model_type", "")
    for name, values in BOTH_SIDES.items():
        if config.get(name) in values and model_type not in ONE_SIDED.get(name, ()) and "sliding_attention" in kinds:
            raise _refused(config, name, "its windows reach to both sides, which no policy stands for")
    if config.get("gguf_architecture") is not None:
        return
    known = (HARMLESS | config.used | HARMLESS_OF.get(model_type, set())).union(*NAMES.values())
    if classes.of(model_type) is not classes.UNKNOWN:
        known |= HARMLESS_IN_CLASSES
    if config.get("sliding_window") is not None:
        known |= {"window_size"}  # the same, under an older name
    heads, kv_heads = (config.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    shared_by = heads // kv_heads if type(heads) is type(kv_heads) is int and kv_heads else None
    parts = (config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim"))
    of_latents = sum(parts) if all(type(part) is int for part in parts) else None
    derived = {"num_key_value_groups": shared_by, "q_head_dim": of_latents, "qk_head_dim": of_latents}
    less = []
    for name in config.get("beside", []):
        raise config.unsupported(f"{name} stands beside the text decoder's configuration, and is not read; {ADVICE}")
    for name, value in config.values.items():
        if not isinstance(name, str) or name in known or not value or value == -1:
            continue
        if name[:1] == "_" and name[1:] in known & config.values.keys():  # transformers wrote what it had made of it
            continue
        if value == derived.get(name) or (type(value) is int and value == 1 and OFTEN.search(name)):
            continue
        if name in READS_LESS:
            less.append(name)
        elif says_layers(name):
            raise config.unsupported(
                f"{plain(name)} {shown(value)} says what its layers are, and is not read; {ADVICE}"
            )
    if less:
        names = f"{', '.join(less)} {'is' if len(less) == 1 else 'are'}"
        message = f"{plain(config.source)}: {names} not read: layers keep every row, of which they read some"
        warn(message)
    _check_unread(config)
    _check_type(config, kinds)


def _check_unread(config: Fields) -> None:
    """Warn of fields that say something, and that the model of this type does not read."""
    width, heads, part = (config.get(name) for name in ("hidden_size", "num_attention_heads", "partial_rotary_factor"))
    dim = config.get("head_dim", width // heads if type(width) is type(heads) is int and heads else None)
    usual = [None, 1, part, dim]  # what the model does all the same
    if isinstance(dim, int) and is_positive(part):
        usual += [int(dim * part)]
    unread = [name for name, value in config.get("unread", {}).items() if value not in usual]
    if config.get("kv_lora_rank"):  # latents have the rotated elements apart
        unread = []
    ignored = ignored_kinds(config)
    length = next((kind for kind, name in LENGTHS.items() if config.get(name) is not None), "")  # the first counts
    if length in ignored and config.get("use_sliding_window") is not False:
        unread.append(LENGTHS[length])
    if unread:
        model_type = plain(config.get("model_type"))
        message = (
            f"{plain(config.source)}: models of type {model_type} do not read {', '.join(unread)}; nor does kvcache"
        )
        warn(message)


def _check_type(config: Fields, kinds: Sequence[str]) -> None:
    """Warn of a type that nobody knows: its layers may keep something else than its fields seem to say."""
    model_type = config.text("model_type", "")
    if classes.of(model_type) is not classes.UNKNOWN:
        return
    told = any(config.get(name) is not None for name in SAYS_WHERE) or model_type in WINDOWED
    whose = f"model_type {plain(model_type)!r} is not known" if model_type else "there is no model_type"
    if "sliding_attention" in kinds and not told and not isinstance(config.get("sliding_window"), list | tuple):
        taken = f"every layer is taken to have the window {shown(config.get('sliding_window'))}"
    elif is_unknown(config):
        taken = "compare its layers, and how its keys rotate, with the model's own code"
    else:
        return
    warn(f"{plain(config.source)}: {whose}: {taken}")
