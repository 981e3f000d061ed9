"""Facts about layers that a GGUF leaves to its readers, by architecture.

Which elements of a key form a pair, which layers have windows, how fast keys turn there: the loaders and graphs of
llama.cpp have these facts. `test_gguf_tables.py` in `integrations/llama.cpp/tests` compares the tables with the source
of the pinned version.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

# Architectures whose pairs of rotated elements are halves: i and i + n.
HALVES = {
    "afmoe", "apertus", "bailingmoe2", "bert", "bitnet", "codeshell", "cogvlm", "dbrx", "dflash", "dots1", "dream",
    "eurobert", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma", "gemma-embedding", "gemma2",
    "gemma3", "gemma3n", "gemma4", "gemma4-assistant", "glm4moe", "gpt-oss", "gptneox", "grok", "grovemoe",
    "hrm_text", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "hy_v3", "jais2", "jina-bert-v3", "laguna", "lfm2",
    "lfm2moe", "llada-moe", "maple", "mellum", "mimo2", "minicpm3", "minimax-01", "minimax-m2", "minimax-m3",
    "modern-bert", "nemotron", "nomic-bert", "nomic-bert-moe", "olmo2", "olmoe", "openelm", "orion", "paddleocr",
    "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "qwen", "qwen2", "qwen2moe", "qwen2vl",
    "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3tts", "qwen3vl", "qwen3vlmoe", "qwen4exp",
    "rnd1", "seed_oss", "smallthinker", "spark2_5", "stablelm", "starcoder2", "step35", "talkie",
}  # fmt: skip
# Architectures whose pairs are neighbours, 2 * i and 2 * i + 1: converters reorder the weights of some models.
NEIGHBOURS = {
    "arcee", "arctic", "baichuan", "bailingmoe", "bailingmoe3", "chameleon", "chatglm", "cohere2", "cohere2moe",
    "command-r", "deci", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "dots3note", "eagle3",
    "ernie4_5", "ernie4_5-moe", "glm-dsa", "glm4", "granite", "granite_swa", "granitehybrid", "granitemoe",
    "graniteswitch", "hy_v4", "internlm2", "llada", "llama", "llama-embed", "llama4", "maincoder", "minicpm",
    "mistral3", "mistral4", "muse-glimmer", "nanbeige", "neo-bert", "olmo", "plm", "pockettts", "smollm3",
    "starcoder", "xverse",
}  # fmt: skip
# Architectures that rotate no keys.
UNROTATED = {
    "arwkv7", "bloom", "clip", "glm5-next", "gpt2", "gptj", "jais", "jamba", "jina-bert-v2", "kimi-k3",
    "kimi-linear", "mamba", "mamba2", "mpt", "nemotron_h", "nemotron_h_moe", "refact", "rwkv6", "rwkv6qwen2",
    "rwkv7", "t5", "t5encoder", "wavtokenizer-dec",
}  # fmt: skip
# Architectures whose positions are in the embeddings. llama.cpp's table has pairs for some, but no graph rotates them.
EMBEDDED_POSITIONS = {"bert", "gpt2", "starcoder"}
EMBEDDED_OR_ALIBI = {"mpt"}  # in the embeddings unless the file has a bias of ALiBi
# Neighbours in llama.cpp's table, but its graph rotates halves.
HALVES_IN_GRAPH = {"deepseek2-ocr"}
# Neighbours, unless the file divides a key into sections for positions in an image.
HALVES_WITH_SECTIONS = {"bailingmoe3", "glm4"}

_STATE = "its state is not keys and values"
ENCODER = "it is an encoder, which keeps nothing between calls"
REFUSED = {
    **dict.fromkeys(("arwkv7", "mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7"), _STATE),
    **dict.fromkeys(("clip", "t5encoder", "wavtokenizer-dec"), ENCODER),
    "gemma4-assistant": "it reads another model's rows",
    "gptj": "llama.cpp has no loader that would say what its fields mean",
}
# Further encoders, of which the tables have what llama.cpp says.
ENCODERS = {
    "bert", "eurobert", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe",
}  # fmt: skip


class Windows(NamedTuple):
    """Which layers of an architecture have a window, where a file does not say."""

    every: int | None  # every n-th layer sees everything; 0: no layer does; None: the file must list the layers
    first: bool = False  # of n layers, the first sees everything, and not the last
    size: int | None = 0  # 0: no layer has a window without a size in the file; None: the file must have the size


WINDOWS = {
    "afmoe": Windows(4),
    "cohere2": Windows(4, size=None),
    "cohere2moe": Windows(4, first=True, size=None),
    "deepseek4": Windows(0, size=None),
    "deepseek2-ocr": Windows(1),  # files name a window that the decoder does not have
    "dflash": Windows(None),
    "dots3note": Windows(None, size=None),
    "exaone-moe": Windows(4, size=None),
    "exaone4": Windows(4),
    "gemma-embedding": Windows(6, size=None),
    "gemma2": Windows(2, size=4096),
    "gemma3": Windows(6),
    "gemma3n": Windows(5, size=None),
    "gemma4": Windows(None, size=None),
    "gpt-oss": Windows(2, size=None),
    "granite_swa": Windows(None, size=None),
    "laguna": Windows(4, first=True),
    "lfm2": Windows(0),
    "llama4": Windows(4),
    "maple": Windows(None, size=None),
    "mellum": Windows(4),
    "mimo2": Windows(None, size=None),
    "modern-bert": Windows(3, first=True),
    "muse-glimmer": Windows(4, size=None),
    "olmo2": Windows(4),
    "plamo3": Windows(8),
    "smallthinker": Windows(4, first=True),
    "spark2_5": Windows(None, size=None),
    "step35": Windows(None, size=None),
    # llama.cpp lets all layers of these see everything; the models were trained with windows in all layers.
    **dict.fromkeys(("llama", "mistral3", "phi3", "starcoder2"), Windows(0)),
}
EXAONE4_LAYERS, EXAONE4_WINDOW = 64, 4096  # a model of 64 layers has windows, even where its file names none
CHUNKED = {"llama4": 8192}  # tokens of a chunk; a window of 0 in the file means that there are no chunks
# Architectures whose windows reach to both sides.
BOTH_SIDES = {"gemma-embedding", "modern-bert"}

# Layers with a window rotate keys as the other layers do, with these exceptions. Their base is 10,000 unless the file
# has one for them, and nothing is scaled:
OWN_BASE = {"gemma-embedding", "gemma3", "gemma3n", "gemma4", "mimo2", "modern-bert", "plamo3", "step35"}
# Nothing is scaled:
UNSCALED_IN_WINDOWS = {"laguna", "mellum", "muse-glimmer", "olmo2"} | OWN_BASE
# The factors in the file are for layers without a window:
UNDIVIDED_IN_WINDOWS = {"gemma4", "step35"}
# ``rope.dimension_count`` is of layers with a window; the others rotate half as many elements:
HALF_OUTSIDE_WINDOWS = {"step35"}

# Architectures that rotate keys in layers with a window alone, if they have any.
ROTATED_IN_WINDOWS = {"cohere2", "cohere2moe", "exaone-moe", "exaone4", "maple", "muse-glimmer"}
# The layer of each four that rotates no keys; in two architectures, only if they have windows.
UNROTATED_OF_FOUR = {"afmoe": 3, "llama4": 3, "smollm3": 3, "smallthinker": 0}
ONLY_BESIDE_WINDOWS = {"llama4", "smallthinker"}
# Architectures that rotate no keys if ``rope.scaling.finetuned`` is false.
SWITCHED_BY_FINETUNED = {"granite", "granitehybrid", "graniteswitch"}
BAICHUAN_UNROTATED = 40  # layers of the larger model, which adds positions to the scores instead
# Architectures that rotate whole heads, whatever ``rope.dimension_count`` is.
WHOLE_HEAD = {"cogvlm", "deepseek2-ocr", "plamo"}
PLAIN = {"cogvlm", "deepseek2-ocr"}  # with the base 10,000, unscaled, whatever the file has
SCALED_BY_ALPHA = {"hunyuan-dense", "hunyuan_vl"}  # the base grows with ``rope.scaling.alpha``
BETA_FAST = {"grok": 8.0}  # of YaRN, where it is not 32

# Every n-th layer has attention, the others a recurrent state. In other architectures a layer with such a state has no
# KV heads.
ATTENTION_EVERY = {"minimax-01": 8, "qwen35": 4, "qwen35moe": 4, "qwen3next": 4, "qwen4exp": 4}
HYBRID = {"falcon-h1"}  # each layer has attention and a recurrent state
MLP_ALONE = {"nemotron_h", "nemotron_h_moe"}  # a layer without attention and with an MLP has no recurrent state
OWN_ROWS = {"gemma3n": 20}  # the first layers, which have rows of their own; the others read the rows of one of these
ENCODER_DECODERS = {"t5"}

# Architectures with sparse attention: keys with the sizes of an indexer, and Hugging Face's names.
_INDEXER = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
INDEXERS = {
    **dict.fromkeys(("deepseek32", "deepseek4", "dots3note", "glm-dsa", "hy_v4"), _INDEXER),
    "glm5-next": {**_INDEXER, "attention.indexer.kpool": "index_kpool"},
    "minimax-m3": {
        **_INDEXER,
        "attention.indexer.top_k": "index_topk_blocks",
        "attention.indexer.block_size": "index_block_size",
    },
    "qwen4exp": {
        "attention.indexer.head_count": "indexer_n_heads",
        "attention.indexer.key_length": "indexer_head_dim",
        "attention.indexer.top_k": "indexer_budget",
    },
}
# Among these are architectures in which a layer may use the choice of a layer before it.
SHARED_INDEXERS = {"dots3note", "glm-dsa", "glm5-next", "hy_v4"}
# The files of these must say which layers have an indexer.
INDEXERS_IN_FILE = {"dots3note", "hy_v4"}
# If a file of ``glm-dsa`` does not say it, contexts from this one on say it.
GLM52_CONTEXT = 1 << 20
# Architectures whose graphs rotate neighbours of an index key; the other graphs rotate halves.
INDEX_NEIGHBOURS = {"glm-dsa", "hy_v4"}
# Hugging Face's types of DeepSeek V4's layers, by how many tokens a compressed row is made of.
COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

# GGUF's keys of facts that are not a layer's, without the architecture's name, and Hugging Face's names.
NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    # The sizes of recurrent states, for which each model has names of its own.
    "hyper_connection.count": "hc_count",
    "kda.head_dim": "kda_head_dim",
    "ple.conv_kernel": "ple_conv_kernel",
    "ple.layers": "ple_layers",
    "ple.ngram_size": "ple_ngram_size",
    "shortconv.l_cache": "shortconv_l_cache",
    "ssm.conv_kernel": "ssm_conv_kernel",
    "ssm.group_count": "ssm_group_count",
    "ssm.inner_size": "ssm_inner_size",
    "ssm.state_size": "ssm_state_size",
}
# Parts of the names of keys that say what layers are. The reader refuses a key with such a part that it does not read.
# The keys below, from llama.cpp's list, are exceptions: they are about something else.
ABOUT_LAYERS = re.compile(
    "pattern|layers|layer_(type|step|ind|id|list|map)|kv_heads|(head|key|value)_dim|per_layer|n_layer|group|interval|every|block|swa|sliding|window|chunk|shar|cross"
    "|recurrent|hybrid|nextn|loop|compress|local|global|no_?rope"
)
NOT_ABOUT_LAYERS = {
    "attention.compress_rope_freq_base", "attention.group_norm_epsilon", "attention.group_norm_groups",
    "attention.indexer.local_blocks", "attention.key_length_mla_swa", "attention.output_group_count",
    "attention.value_length_mla_swa",
    "attn_res.block_size", "block_size", "conv_group_size", "convnext.block_count",
    "embedding_length_per_layer_input", "expert_chunk_feed_forward_length", "expert_group_count",
    "expert_group_scale", "expert_group_used_count", "expert_shared_count", "expert_shared_feed_forward_length",
    "experts_per_group", "hrm.layers_per_stack", "interleave_moe_layer_step",
    "leading_dense_block_count", "moe_every_n_layers", "n_deepstack_layers", "posnet.block_count",
    "rescale_every_n_layers", "rope.dimension_count_swa", "rope.freq_base_swa", "skip_loop_final_norm",
    "target_layers",
}  # fmt: skip

# Ollama's own converter writes the files below: with other names, a vision encoder's keys beside the decoder's, and
# without some values. Other names of architectures:
ALIKE = {
    "deepseekocr": "deepseek2-ocr", "glm4moelite": "deepseek2", "glmocr": "glm4", "gptoss": "gpt-oss",
    "nemotron_h_omni": "nemotron_h", "olmo3": "olmo2", "qwen25vl": "qwen2vl",
}  # fmt: skip
# Other names of keys:
ALIASES = {
    "head_dim": "attention.key_length",
    "mrope_sections": "rope.dimension_sections",
    "rope.freq_base_local": "rope.freq_base_swa",
    "rope.global.freq_base": "rope.freq_base",
    "rope.local.freq_base": "rope.freq_base_swa",
    "rope.mrope_section": "rope.dimension_sections",
    "rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow",
    "rope.scaling.extrapolation_factor": "rope.scaling.yarn_ext_factor",
    "rope.swa.dimension_count": "rope.dimension_count_swa",
    "rope.swa.freq_base": "rope.freq_base_swa",
}
# The beginnings of keys of another part than the text decoder:
OF_OTHER_PARTS = ("audio.", "clip.", "mm.", "vision.")
# Values that files of these architectures leave out. Only files of gemma3 with the key of IMAGES do:
LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3": {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    "gptoss": {"rope.scaling.type": "yarn"},
}
IMAGES = {"gemma3": "mm.tokens_per_image"}
# Files without a model have these values of ``general.type``. Each value has the file's description:
NO_MODELS = {"adapter": "an adapter, which changes a model's weights", "imatrix": "statistics for a quantisation"}
# Architectures whose name differs from Hugging Face's model type.
MODEL_TYPES = {
    "command-r": "cohere", "deepseek2": "deepseek_v3", "deepseek32": "deepseek_v32", "deepseek4": "deepseek_v4",
    "dots3note": "dots3_note_text", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text",
    "glm-dsa": "glm_moe_dsa", "glm5-next": "glm5_next_text", "gpt-oss": "gpt_oss", "gptneox": "gpt_neox",
    "llama4": "llama4_text", "minimax-m3": "minimax_m3_vl_text", "phi2": "phi", "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next", "qwen4exp": "qwen4_exp_text", "starcoder": "gpt_bigcode",
}  # fmt: skip
