"""Configurations as model folders have them, only the fields that say what the layers keep, and what they come to.

Sizes are computed from the model's card or paper. Each form has the elements of keys and values of a token in all
layers that see everything. It has the same for all layers with a window, or over an encoder's output, and the tokens
that these hold. `rotating` is the number of layers that rotate keys; None where the rotation is not checked. `theta` is
the base of their frequencies, where nothing scales them.
"""

from typing import Any, NamedTuple


class Form(NamedTuple):
    """A published configuration and its sizes."""

    config: dict[str, Any]
    full: int
    windowed: int = 0
    window: int | None = None
    rotating: int | None = None
    theta: float | None = None


def form(
    full: int,
    windowed: int = 0,
    window: int | None = None,
    rotating: int | None = None,
    theta: float | None = None,
    **config: Any,
) -> Form:
    """Make a `Form`; the fields of the configuration come by keyword."""
    return Form(config, full, windowed, window, rotating, theta)


def sizes(layers: int, heads: int, kv: int | None, hidden: int, **more: Any) -> dict[str, Any]:
    """Return the fields that most files have."""
    kv_heads = {} if kv is None else {"num_key_value_heads": kv}
    return {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, **kv_heads, **more}


def n(name: str, layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    """Return the fields of GPT-2's names."""
    return {"model_type": name, "n_layer": layers, "n_head": heads, "n_embd": hidden, **more}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
ATTENTION = {"no_op": False, "replace_with_linear": False, "n_heads_in_group": 8, "window_length": None}
NO_ATTENTION = {"no_op": True, "replace_with_linear": False, "n_heads_in_group": None}
OPENELM_KV = [3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5]
OPENELM_Q = [12, 12, 12, 12, 12, 16, 16, 16, 16, 16, 16, 16, 20, 20, 20, 20]
PUBLISHED: dict[str, Form] = {
    # All layers see everything.
    "Llama 2 7B": form(262_144, rotating=32, model_type="llama", **sizes(32, 32, 32, 4096)),
    "Llama 3.1 8B": form(65_536, rotating=32, model_type="llama", rope_theta=5e5,
                         rope_scaling={"rope_type": "llama3", **LLAMA3}, **sizes(32, 32, 8, 4096)),
    "Llama 3.1, params.json": form(65_536, model_type="llama", dim=4096, n_layers=32, n_heads=32, n_kv_heads=8,
                                   rope_theta=5e5),
    "Mistral 7B v0.1": form(0, 65_536, 4096, 32, model_type="mistral", sliding_window=4096, **sizes(32, 32, 8, 4096)),
    "Mistral 7B v0.3": form(65_536, rotating=32, model_type="mistral", sliding_window=None, rope_theta=1e6,
                            **sizes(32, 32, 8, 4096)),
    "Mistral Nemo": form(81_920, model_type="mistral", head_dim=128, sliding_window=None, **sizes(40, 32, 8, 5120)),
    "Mixtral 8x7B": form(65_536, model_type="mixtral", sliding_window=None, rope_theta=1e6, **sizes(32, 32, 8, 4096)),
    "Qwen 7B": form(262_144, model_type="qwen", kv_channels=128, rotary_emb_base=10000, rotary_pct=1.0,
                    seq_length=8192, **sizes(32, 32, None, 4096)),
    "Qwen2.5 7B": form(28_672, rotating=28, model_type="qwen2", sliding_window=131072, use_sliding_window=False,
                       max_window_layers=28, rope_theta=1e6, **sizes(28, 28, 4, 3584)),
    "Qwen2-VL 7B, flat": form(28_672, rotating=28, model_type="qwen2_vl", use_sliding_window=False,
                              sliding_window=32768, max_window_layers=28, rope_theta=1e6,
                              rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, **sizes(28, 28, 4, 3584)),
    "Qwen3 8B": form(73_728, rotating=36, model_type="qwen3", head_dim=128, use_sliding_window=False,
                     sliding_window=None, rope_theta=1e6, **sizes(36, 32, 8, 4096)),
    "Qwen3 30B-A3B": form(49_152, model_type="qwen3_moe", head_dim=128, decoder_sparse_step=1, mlp_only_layers=[],
                          use_sliding_window=False, **sizes(48, 32, 4, 2048)),
    "Gemma 7B": form(229_376, rotating=28, model_type="gemma", head_dim=256, **sizes(28, 16, 16, 3072)),
    "Phi-2": form(163_840, rotating=32, model_type="phi", partial_rotary_factor=0.4, **sizes(32, 32, None, 2560)),
    "Phi-1.5, own code": Form(n("phi-msft", 24, 32, 2048, n_head_kv=None, rotary_dim=32), 98_304, rotating=24),
    "Phi-3 mini": form(0, 196_608, 2047, 32, model_type="phi3", sliding_window=2047, **sizes(32, 32, 32, 3072)),
    "Phi-4 mini": form(0, 65_536, 262_144, model_type="phi3", partial_rotary_factor=0.75, sliding_window=262144,
                       **sizes(32, 24, 8, 3072)),
    "GLM-4 9B": form(20_480, rotating=40, model_type="glm", head_dim=128, partial_rotary_factor=0.5,
                     **sizes(40, 32, 2, 4096)),
    "ChatGLM3 6B": form(14_336, rotating=28, model_type="chatglm", num_layers=28, num_attention_heads=32,
                        hidden_size=4096, kv_channels=128, multi_query_attention=True, multi_query_group_num=2,
                        seq_length=8192),
    "Baichuan2 7B": form(262_144, rotating=32, model_type="baichuan", **sizes(32, 32, None, 4096)),
    "Baichuan2 13B": form(409_600, rotating=0, model_type="baichuan", **sizes(40, 40, None, 5120)),
    "InternLM 7B": form(262_144, model_type="internlm", rotary={"base": 10000, "type": "dynamic"},
                        **sizes(32, 32, None, 4096)),
    "InternLM2.5 7B": form(65_536, model_type="internlm2", rope_theta=1e6,
                           rope_scaling={"type": "dynamic", "factor": 2.0}, **sizes(32, 32, 8, 4096)),
    "Yi 34B": form(122_880, model_type="llama", rope_theta=5e6, **sizes(60, 56, 8, 7168)),
    "StableLM 3B": form(163_840, rotating=32, model_type="stablelm_epoch", rope_pct=0.25, rope_theta=10000,
                        **sizes(32, 32, 32, 2560)),
    "Falcon 7B": form(4_096, rotating=32, model_type="falcon", multi_query=True, new_decoder_architecture=False,
                      alibi=False, **sizes(32, 71, None, 4544)),
    "Falcon 40B": form(61_440, rotating=60, model_type="falcon", multi_query=True, new_decoder_architecture=True,
                       num_kv_heads=8, alibi=False, **sizes(60, 128, None, 8192)),
    "StarCoder": Form(n("gpt_bigcode", 40, 48, 6144, multi_query=True, n_positions=8192), 10_240),
    "StarCoder2 15B": form(0, 40_960, 4096, 40, model_type="starcoder2", sliding_window=4096, rope_theta=1e5,
                           **sizes(40, 48, 4, 6144)),
    "GPT-2": Form(n("gpt2", 12, 12, 768, n_ctx=1024, n_positions=1024), 18_432),
    "GPT-J": Form(n("gptj", 28, 16, 4096, rotary_dim=64, n_positions=2048), 229_376, rotating=28),
    "Pythia 6.9B": form(262_144, rotating=32, model_type="gpt_neox", rotary_emb_base=10000, rotary_pct=0.25,
                        **sizes(32, 32, None, 4096)),
    "GPT-Neo 1.3B": form(49_152, 49_152, 256, model_type="gpt_neo", num_layers=24, num_heads=16, hidden_size=2048,
                         attention_types=[[["global", "local"], 12]], window_size=256, max_position_embeddings=2048),
    "BLOOM 7B1": form(245_760, rotating=0, model_type="bloom", n_layer=30, num_attention_heads=32, n_embed=4096),
    "MPT 7B": form(262_144, rotating=0, model_type="mpt", d_model=4096, n_heads=32, n_layers=32, max_seq_len=2048,
                   attn_config={"alibi": True, "attn_type": "multihead_attention"}),
    "DBRX": form(81_920, rotating=40, model_type="dbrx", d_model=6144, n_heads=48, n_layers=40, max_seq_len=32768,
                 attn_config={"kv_n_heads": 8, "rope_theta": 500000, "clip_qkv": 8}),
    "Command R": form(655_360, rotating=40, model_type="cohere", rope_theta=4e6, **sizes(40, 64, 64, 8192)),
    "OLMo 2 7B": form(262_144, model_type="olmo2", rope_theta=500000, **sizes(32, 32, 32, 4096)),
    "OpenELM 270M": form(8_064, rotating=16, model_type="openelm", num_transformer_layers=16, model_dim=1280,
                         head_dim=64, num_kv_heads=OPENELM_KV, num_query_heads=OPENELM_Q, rope_freq_constant=10000,
                         max_context_length=2048, num_gqa_groups=4),
    "DeciLM 7B": form(256 * 67, rotating=0, model_type="deci", rope_theta=10000.0,
                      rope_scaling={"type": "dynamic", "factor": 2.0},
                      num_key_value_heads_per_layer=[4] * 5 + [2] * 5 + [4] + [2] * 9 + [1] * 11 + [4],
                      **sizes(32, 32, 32, 4096)),
    "DeciLM 7B, heads all alike": form(32_768, model_type="deci", num_key_value_heads_per_layer=[4] * 32,
                                       **sizes(32, 32, None, 4096)),
    "DeciLM 6B": form(256 * 50, model_type="deci", num_key_value_heads_per_layer=[4] + [2] * 9 + [1] * 20 + [4, 4],
                      **sizes(32, 32, None, 4096)),
    "Nemotron Super 49B": form(100_352, rotating=49, model_type="nemotron-nas", rope_theta=5e5,
                               block_configs=[{"attention": ATTENTION}] * 49 + [{"attention": NO_ATTENTION}] * 31,
                               rope_scaling={"rope_type": "llama3", **LLAMA3}, **sizes(80, 64, None, 8192)),
    "Hunyuan Large": form(65_536, model_type="hunyuan", attention_head_dim=128, use_cla=True, cla_share_factor=2,
                          rope_theta=10000.0, rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
                          **sizes(64, 80, 8, 6400)),
    "Hunyuan A13B": form(65_536, model_type="hunyuan_v1_moe", head_dim=128, use_cla=False, cla_share_factor=2,
                         **sizes(32, 32, 8, 4096)),
    "DeepSeek OCR": form(30_720, rotating=12, model_type="deepseek_vl_v2", language_config={
        "model_type": "deepseek_v2", "kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0,
        "v_head_dim": 0, "use_mla": False, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1,
        **sizes(12, 10, 10, 1280)}),
    "Plamo 13B": form(51_200, model_type="plamo", n_shared_head=8, **sizes(40, 40, None, 5120)),
    "ERNIE 4.5 21B": form(28_672, rotating=28, model_type="ernie4_5_moe", rope_theta=5e5, moe_layer_start_index=1,
                          moe_layer_end_index=-1, moe_layer_interval=1, **sizes(28, 20, 4, 2560)),
    "Apertus 8B": form(65_536, rotating=32, model_type="apertus", rope_theta=12e6,
                       rope_scaling={"rope_type": "llama3", **LLAMA3}, **sizes(32, 32, 8, 4096)),
    "Seed-OSS 36B": form(131_072, rotating=64, model_type="seed_oss", head_dim=128, rope_theta=1e7,
                         **sizes(64, 80, 8, 5120)),
    "SmolLM3 3B": form(36_864, rotating=27, model_type="smollm3", use_sliding_window=False, sliding_window=None,
                       no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, rope_theta=5e6,
                       **sizes(36, 16, 4, 2048)),
    "MiniMax M2": form(126_976, rotating=62, model_type="minimax_m2", head_dim=128, rotary_dim=64, rope_theta=5e6,
                       attn_type_list=[1] * 62, **sizes(62, 48, 8, 3072)),
    "Arctic": form(71_680, model_type="arctic", sliding_window=None, rope_theta=10000, moe_layer_frequency=2,
                   **sizes(35, 56, 8, 7168)),
    # Latents.
    "DeepSeek V2 Lite": form(15_552, rotating=27, model_type="deepseek_v2", **MLA, rope_scaling={**YARN, "mscale": 0.7},
                             first_k_dense_replace=1, moe_layer_freq=1, **sizes(27, 16, 16, 2048)),
    "DeepSeek V3": form(35_136, rotating=61, model_type="deepseek_v3", **MLA, rope_scaling={**YARN, "mscale": 1.0},
                        num_nextn_predict_layers=1, n_group=8, topk_group=4, **sizes(61, 128, 128, 7168)),
    "Kimi K2": form(35_136, rotating=61, model_type="kimi_k2", **MLA, rope_theta=50000.0, n_group=1, topk_group=1,
                    rope_scaling={**YARN, "factor": 32}, **sizes(61, 64, 64, 7168)),
    "Kimi Linear": form(4_032, rotating=0, model_type="kimi_linear", **MLA, mla_use_nope=True, rope_theta=10000.0,
                        linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
                                            "kda_layers": [i for i in range(1, 27) if i % 4], "num_heads": 32},
                        model_max_length=1048576, head_dim=72, **sizes(27, 32, 32, 2304)),
    "Kimi K3": form(13_824, rotating=0, model_type="kimi_k3", text_config={
        "model_type": "kimi_linear", **MLA, "mla_use_nope": True, "first_k_dense_replace": 1, "num_expert_group": 1,
        "linear_attn_config": {"full_attn_layers": [*range(4, 93, 4), 93], "head_dim": 128, "num_heads": 96,
                               "kda_layers": [i for i in range(1, 93) if i % 4], "use_full_rank_gate": True},
        "attn_res_block_size": 12, **sizes(93, 96, 96, 7168)}),
    # Windows.
    "Gemma 2 9B": form(86_016, 86_016, 4096, 42, model_type="gemma2", head_dim=256, sliding_window=4096,
                       **sizes(42, 16, 8, 3584)),
    "Gemma 3 4B": form(10_240, 59_392, 1024, 34, model_type="gemma3", text_config={
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "Gemma 3 1B": form(2_048, 11_264, 512, 26, model_type="gemma3_text", head_dim=256, sliding_window=512,
                       sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=10000, **sizes(26, 4, 1, 1152)),
    "Gemma 3n E4B": form(4_096, 16_384, 512, 35, model_type="gemma3n", text_config={
        "model_type": "gemma3n_text", "head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "hidden_size_per_layer_input": 256,
        **sizes(35, 8, 2, 2048)}),
    "Command R7B": form(16_384, 49_152, 4096, 24, model_type="cohere2", sliding_window=4096, sliding_window_pattern=4,
                        order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
                        rotary_pct=1.0, **sizes(32, 32, 8, 4096)),
    "gpt-oss 20B": form(12_288, 12_288, 128, 24, model_type="gpt_oss", head_dim=64, sliding_window=128,
                        rope_theta=150000, rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                                         "original_max_position_embeddings": 4096},
                        **sizes(24, 64, 8, 2880)),
    "OLMo 3 7B": form(65_536, 196_608, 4096, 32, model_type="olmo3", sliding_window=4096, rope_theta=500000,
                      rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
                      **sizes(32, 32, 32, 4096)),
    "EXAONE 4.0 32B": form(32_768, 98_304, 4096, 48, model_type="exaone4", head_dim=128, sliding_window=4096,
                           sliding_window_pattern="LLLG", rope_theta=1e6, **sizes(64, 40, 8, 5120)),
    "Llama 4 Scout": form(24_576, 73_728, 8192, 36, model_type="llama4", text_config={
        "model_type": "llama4_text", "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [],
        "interleave_moe_layer_step": 1, **sizes(48, 40, 8, 5120)}),
    "MiMo V2 Flash": form(11_520, 99_840, 128, 48, model_type="mimo_v2_flash", head_dim=192, v_head_dim=128,
                          swa_head_dim=192, swa_v_head_dim=128, swa_num_attention_heads=64, swa_num_key_value_heads=8,
                          hybrid_layer_pattern=[0, 1, 1, 1, 1] + [0, 1, 1, 1, 1, 1] * 7 + [0], sliding_window=128,
                          sliding_window_size=128, attention_chunk_size=128, rope_theta=5e6, swa_rope_theta=1e4,
                          partial_rotary_factor=0.334, moe_layer_freq=[0] + [1] * 47, **sizes(48, 64, 4, 4096)),
    "Step 3.5 Flash": form(24_576, 67_584, 512, 45, model_type="step3p5", num_attention_groups=8, head_dim=128,
                           layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 12, sliding_window=512,
                           attention_other_setting={"attention_type": "sliding_attention", "num_attention_heads": 96,
                                                    "num_attention_groups": 8, "head_dim": 128},
                           rope_theta=[5e6, 1e4, 1e4, 1e4] * 12, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 12,
                           yarn_only_types=["full_attention"], use_rope_layers=[], moe_layers_enum="3,4,5",
                           num_nextn_predict_layers=3, **sizes(45, 64, None, 4096)),
    "ModernBERT decoder": form(12_288, 21_504, 64, 22, model_type="modernbert-decoder", local_attention=128,
                               global_attn_every_n_layers=3, global_rope_theta=160000.0, local_rope_theta=10000.0,
                               **sizes(22, 12, None, 768)),
    "RecurrentGemma 2B": form(0, 4_096, 2048, 8, model_type="recurrent_gemma", attention_window_size=2048, head_dim=256,
                              block_types=["recurrent", "recurrent", "attention"], **sizes(26, 10, 1, 2560)),
    # Layers without rows.
    "MiniMax Text 01": form(20_480, model_type="minimax_text_01", head_dim=128, rotary_dim=64, rope_theta=1e7,
                            attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10, **sizes(80, 64, 8, 6144)),
    "Ring mini linear": form(4_096, rotating=4, model_type="bailing_moe_linear", layer_group_size=5, group_norm_size=4,
                             head_dim=128, partial_rotary_factor=0.5, rope_theta=600000, **sizes(20, 16, 4, 2048)),
    "LFM2 1.2B": form(6_144, rotating=6, model_type="lfm2", full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3,
                      rope_theta=1e6, **sizes(16, 32, 8, 2048)),
    "Jamba 1.5 mini": form(8_192, rotating=0, model_type="jamba", attn_layer_period=8, attn_layer_offset=4,
                           expert_layer_period=2, expert_layer_offset=1, sliding_window=None, **sizes(32, 32, 8, 4096)),
    "Bamba 9B": form(6_144, rotating=3, model_type="bamba", attn_layer_indices=[9, 18, 27], attn_rotary_emb=64,
                     rope_theta=10000.0, **sizes(32, 32, 8, 4096)),
    "Nemotron-H 8B": form(8_192, rotating=0, model_type="nemotron_h", attention_head_dim=128,
                          hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                          **sizes(52, 32, 8, 4096)),
    "Granite 4.0 H small": form(8_192, rotating=0, model_type="granitemoehybrid", position_embedding_type="nope",
                                layer_types=["mamba"] * 5 + (["attention"] + ["mamba"] * 9) * 3 + ["attention"]
                                + ["mamba"] * 4, **sizes(40, 32, 8, 4096)),
    "Granite 4.0 micro": form(40_960, rotating=40, model_type="granitemoehybrid", position_embedding_type="rope",
                              layer_types=["attention"] * 40, rope_theta=1e7, **sizes(40, 40, 8, 2560)),
    "Falcon-H1 7B": form(22_528, rotating=44, model_type="falcon_h1", head_dim=128, rope_theta=1e11,
                         **sizes(44, 12, 2, 3072)),
    "Qwen3-Next 80B": form(12_288, rotating=12, model_type="qwen3_next", head_dim=256, full_attention_interval=4,
                           partial_rotary_factor=0.25, rope_theta=1e7, decoder_sparse_step=1, **sizes(48, 16, 2, 2048)),
    "Zamba2 1.2B": form(49_152, rotating=0, model_type="zamba2", attention_head_dim=128, num_query_groups=32,
                        layers_block_type=(["mamba"] * 5 + ["hybrid"]) * 6 + ["mamba"] * 2, use_mem_rope=False,
                        hybrid_layer_ids=[5, 11, 17, 23, 29, 35], kv_channels=64, num_mem_blocks=1,
                        **sizes(38, 32, 32, 2048)),
    "Plamo 2 1B": form(8 * 256, model_type="plamo2", hidden_size_per_head=128, mamba_step=2, mamba_enabled=True,
                       full_attention_idx=None, **sizes(16, 16, 1, 2048)),
    # Older names, and architectures of the last two years.
    "ChatGLM 6B": form(229_376, rotating=0, model_type="chatglm", hidden_size=4096, num_layers=28,
                       num_attention_heads=32, max_sequence_length=2048, position_encoding_2d=True),
    "GLM-4 9B, own code": form(20_480, rotating=40, model_type="chatglm", num_layers=40, num_attention_heads=32,
                               hidden_size=4096, kv_channels=128, multi_query_attention=True, original_rope=True,
                               multi_query_group_num=2, rope_ratio=500, seq_length=131072),
    "Qwen 7B, scaled by length": form(262_144, rotating=0, model_type="qwen", kv_channels=128, rotary_emb_base=10000,
                                      rotary_pct=1.0, seq_length=8192, use_dynamic_ntk=True, use_logn_attn=True,
                                      **sizes(32, 32, None, 4096)),
    "MPT with rotations": form(65_536, rotating=32, model_type="mpt", d_model=4096, n_heads=32, n_layers=32,
                               attn_config={"alibi": False, "rope": True, "rope_theta": 500000, "kv_n_heads": 8,
                                            "attn_type": "grouped_query_attention"}),
    "openPangu Ultra 718B": form(35_136, rotating=61, model_type="pangu_ultra_moe", attention_kv_lora_dim=512,
                                 attention_q_lora_dim=1536, attention_qk_dim=128, attention_qk_rope_dim=64,
                                 attention_v_dim=128, num_dense_layers=3, num_mtp_layers=1, rope_theta=25600000,
                                 **sizes(61, 128, 128, 7680)),
    "Step 3": form(31_232, rotating=61, model_type="step3_vl", text_config={
        "model_type": "step3_text", "head_dim": 256, "num_attention_groups": 1, "share_q_dim": 2048,
        "share_expert_dim": 5120, "moe_layers_enum": "4,5,6", "rope_theta": 500000, **sizes(61, 64, None, 7168)}),
    "SmallThinker 21B": form(13_312, 39_936, 4096, 39, model_type="smallthinker", head_dim=128, rope_theta=1.5e6,
                             rope_layout=[0, 1, 1, 1] * 13, sliding_window_layout=[0, 1, 1, 1] * 13,
                             sliding_window_size=4096, moe_layer_layout=[1] * 52, **sizes(52, 28, 4, 2560)),
    "SmallThinker 4B": form(16_384, rotating=32, model_type="smallthinker", head_dim=128, rope_theta=1.5e6,
                            rope_layout=[1] * 32, sliding_window_layout=[0] * 32, sliding_window_size=4096,
                            **sizes(32, 12, 2, 1536)),
    "Ring 2.5 1T": form(5_760, rotating=10, model_type="bailing_hybrid", **MLA, layer_group_size=8, group_norm_size=8,
                        num_kv_heads_for_linear_attn=64, partial_rotary_factor=0.5, head_dim=128, n_group=8,
                        max_window_layers=20, rope_theta=6e6, num_nextn_predict_layers=0, **sizes(80, 64, 64, 8192)),
    "Ling 1T": form(163_840, rotating=80, model_type="bailing_moe_v2", head_dim=128, partial_rotary_factor=0.5,
                    max_window_layers=20, n_group=8, rope_theta=6e5, **sizes(80, 64, 8, 8192)),
    "Trinity mini": form(8_192, 24_576, 2048, 24, model_type="afmoe", head_dim=128, global_attn_every_n_layers=4,
                         layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, sliding_window=2048,
                         num_expert_groups=1, num_limited_groups=1, n_group=1, num_dense_layers=2, rope_theta=10000,
                         **sizes(32, 32, 4, 2048)),
    "Nemotron 3 nano": form(3_072, rotating=0, model_type="nemotron_h", head_dim=128, n_group=1, rope_theta=10000,
                            hybrid_override_pattern="MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME",
                            sliding_window=None, **sizes(52, 32, 2, 2688)),
    "Nemotron nano 9B v2": form(8_192, rotating=0, model_type="nemotron_h", head_dim=128, hybrid_override_pattern=
                                "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", **sizes(56, 40, 8, 4480)),
    "Qwen3.5 35B": form(10_240, rotating=10, model_type="qwen3_5_moe", text_config={
        "model_type": "qwen3_5_moe_text", "head_dim": 256, "full_attention_interval": 4, "attn_output_gate": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "mtp_num_hidden_layers": 1,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                            "rope_theta": 1e7, "partial_rotary_factor": 0.25}, **sizes(40, 16, 2, 2048)}),
    "Ministral 3 8B": form(69_632, rotating=34, model_type="mistral3", text_config={
        "model_type": "ministral3", "head_dim": 128, "sliding_window": None,
        "rope_parameters": {**YARN, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
                            "llama_4_scaling_beta": 0.1, "rope_theta": 1e6}, **sizes(34, 32, 8, 4096)}),
    "GLM 4.5 Air": form(94_208, rotating=46, model_type="glm4_moe", head_dim=128, partial_rotary_factor=0.5, n_group=1,
                        num_nextn_predict_layers=1, first_k_dense_replace=1, rope_theta=1e6, rope_scaling=None,
                        **sizes(46, 96, 8, 4096)),
    "dots.llm1": form(507_904, rotating=62, model_type="dots1", head_dim=128, max_window_layers=62, sliding_window=None,
                      first_k_dense_replace=1, moe_layer_freq=1, rope_theta=1e7, **sizes(62, 32, 32, 4096)),
    "InternLM3 8B": form(24_576, rotating=0, model_type="internlm3", head_dim=128, rope_theta=5e7,
                         rope_scaling={"factor": 6.0, "rope_type": "dynamic"}, **sizes(48, 32, 2, 4096)),
    "JetMoE 8B": form(98_304, rotating=24, model_type="jetmoe", num_layers=24, hidden_size=2048, kv_channels=128,
                      num_attention_heads=32, num_key_value_heads=16, moe_top_k=2, rope_theta=10000.0),
    "Kimi VL A3B": form(15_552, rotating=27, model_type="kimi_vl", text_config={
        "model_type": "deepseek_v3", **MLA, "rope_theta": 8e5, "n_group": 1, **sizes(27, 16, 16, 2048)}),
    "LongCat Flash": form(32_256, rotating=56, model_type="longcat_flash", num_layers=28, hidden_size=6144, **MLA,
                          num_attention_heads=64, attention_method="MLA", rope_theta=1e7, zero_expert_num=256),
    "Gemma 3 27B": form(40_960, 212_992, 1024, 62, model_type="gemma3", text_config={
        "model_type": "gemma3_text", "head_dim": 128, "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, **sizes(62, 32, 16, 5376)}),
    "InternVL3 8B": form(28_672, rotating=0, model_type="internvl_chat", llm_config={
        "model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "max_window_layers": 70,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"}, **sizes(28, 28, 4, 3584)}),
    "EXAONE 3.5 7.8B": form(65_536, rotating=32, model_type="exaone", num_layers=32, hidden_size=4096, head_dim=128,
                            num_attention_heads=32, num_key_value_heads=8, rope_theta=1e6,
                            rope_scaling={"rope_type": "llama3", **LLAMA3}),
    "EXAONE 4.0 1.2B": form(30_720, rotating=30, model_type="exaone4", head_dim=64, sliding_window=None,
                            sliding_window_pattern=None, layer_types=["full_attention"] * 30, rope_theta=1e6,
                            **sizes(30, 32, 8, 2048)),
    "AFM 4.5B": form(36_864, rotating=36, model_type="arcee", head_dim=128, rope_theta=10000.0,
                     rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
                     **sizes(36, 20, 4, 2560)),
    "PLaMo 3 2B": form(1_536, 10_752, 2048, 24, model_type="plamo3", head_dim=128, sliding_window=2048,
                       window_size=2048, sliding_window_pattern=8, rope_theta=1e6, rope_local_theta=10000,
                       **sizes(24, 16, 2, 2048)),
    "Command A": form(32_768, 98_304, 4096, 48, model_type="cohere2", head_dim=128, layer_switch=4, rotary_pct=1.0,
                      sliding_window=4096, sliding_window_pattern=4, order_of_interleaved_layers="local_attn_first",
                      position_embedding_type="rope_gptj", rope_theta=50000, **sizes(64, 96, 8, 12288)),
    "Minitron 4B": form(65_536, rotating=32, model_type="nemotron", head_dim=128, rope_theta=10000,
                        partial_rotary_factor=0.5, rope_percent=0.5, kv_channels=128, **sizes(32, 24, 8, 3072)),
    "Molmo 7B": form(28_672, rotating=28, model_type="molmo", rope_theta=1e6, **sizes(28, 28, 4, 3584)),
    "MiniMax M1": form(20_480, rotating=10, model_type="minimax_m1", head_dim=128, rotary_dim=64, rope_theta=1e7,
                       attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10, **sizes(80, 64, 8, 6144)),
    "Persimmon 8B": form(294_912, rotating=36, model_type="persimmon", rope_theta=25000.0, partial_rotary_factor=0.5,
                         **sizes(36, 64, None, 4096)),
}  # fmt: skip

SPARSE = {"use_sparse_attention": True, "sparse_index_dim": 128, "sparse_attention_freq": [0] * 3 + [1] * 57}
# Configurations that are refused, and the name that the refusal must say.
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi 4 mini flash": ("mb_per_layer", {"model_type": "phi4flash", "sliding_window": [512, None] * 16,
                                          "mb_per_layer": 2, **sizes(32, 40, 20, 2560)}),
    "MiniMax M3": ("sparse_attention_config", {"model_type": "minimax_m3_vl", "text_config": {
        "head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.5, "sparse_attention_config": SPARSE,
        **sizes(60, 64, 4, 6144)}}),
    "DeepSeek V3.2": ("index_head_dim", {"model_type": "deepseek_v32", **MLA, "index_head_dim": 128,
                                         "index_topk": 2048, **sizes(61, 128, 128, 7168)}),
    "Ouro 1.4B": ("total_ut_steps", {"model_type": "ouro", "total_ut_steps": 4, "rope_theta": 1e6,
                                     "layer_types": ["full_attention"] * 24, **sizes(24, 16, 16, 2048)}),
    "IQuest Coder Loop": ("loop_num", {"model_type": "iquestloopcoder", "loop_num": 2, "loop_window_size": 64,
                                       **sizes(80, 40, 8, 5120)}),
    "Huginn": ("mean_recurrence", {"model_type": "huginn_raven", "mean_recurrence": 32, "n_heads": 55, "n_layers": 8,
                                   "n_layers_in_prelude": 2, "n_embd": 5280}),
    "Baichuan M1": ("sliding_window_layers", {"model_type": "baichuan_m1", "sliding_window_layers": [1, 3, 5, 7],
                                              "sliding_window": 8192, "num_swa_attention_heads": 40,
                                              "num_swa_key_value_heads": 8, **sizes(40, 20, 2, 5120)}),
    "StripedHyena": ("attn_layer_idxs", {"model_type": "stripedhyena", "attn_layer_idxs": [1, 3, 5],
                                         "hyena_layer_idxs": [0, 2, 4], **sizes(32, 32, None, 4096)}),
    "Apriel H1": ("hybrid_block_layout", {"model_type": "apriel_h", "hybrid_block_layout": ["t", "m2"] * 25,
                                          **sizes(50, 32, 8, 5120)}),
    "Jet Nemotron": ("'jet'", {"model_type": "jet_nemotron", "layer_types": ["jet", "attn"] * 14,
                               **sizes(28, 12, 2, 1536)}),
    "Hymba 1.5B": ("kv_reuse_group", {"model_type": "hymba", "global_attn_idx": [0, 15, 31], "sliding_window": 1024,
                                      "kv_reuse_group": [[1, 2], [3, 4]], "num_memory_tokens": 128,
                                      **sizes(32, 25, 5, 1600)}),
    "AFM on device": ("num_kv_reuse_layers", {"model_type": "afm", "num_kv_reuse_layers": 21,
                                              **sizes(56, 16, 2, 2048)}),
}  # fmt: skip
