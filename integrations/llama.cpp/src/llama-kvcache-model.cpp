#include "llama-kvcache-model.h"

#include "llama-kvcache-select.h"
#include "llama-kvcache-variables.h"

#include "llama-arch.h"
#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-memory.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

static const char *const TYPE_K = "LLAMA_KVCACHE_TYPE_K";
static const char *const TYPE_V = "LLAMA_KVCACHE_TYPE_V";
static const char *const PROMPTS = "LLAMA_KVCACHE_PROMPTS";

static constexpr int32_t DSV4_OVERLAPPED = 4; // the stride of rows that are computed of two blocks of tokens

// In states, kvc_types that ggml lacks have numbers from this one on, which llama.cpp's own cache refuses.
static constexpr int32_t FIRST_OWN_TYPE = 1000;

// returns the kvc_type of this name, -1 if there is none
static int32_t type_of(const char *name) {
    for (int32_t res = 0; kvc_type_name(res); ++res) {
        if (!strcmp(kvc_type_name(res), name)) {
            return res;
        }
    }

    return -1;
}

int32_t llama_kvcache_type(ggml_type type) { return type_of(ggml_type_name(type)); }

int32_t llama_kvcache_state_type(int32_t type) {
    for (int32_t res = 0; res < GGML_TYPE_COUNT; ++res) {
        if (llama_kvcache_type((ggml_type)res) == type) {
            return res;
        }
    }

    return FIRST_OWN_TYPE + type;
}

std::string llama_kvcache_state_type_name(int64_t number) {
    for (int32_t type = 0; kvc_type_name(type); ++type) {
        if (llama_kvcache_state_type(type) == number) {
            return kvc_type_name(type);
        }
    }

    const bool is_of_ggml = number >= 0 && number < GGML_TYPE_COUNT && ggml_type_name((ggml_type)number);

    return is_of_ggml ? ggml_type_name((ggml_type)number) : "number " + std::to_string(number);
}

// names the types of the cache, or those that ggml has, too
static std::string type_names(bool is_own_too) {
    std::vector<const char *> names;

    for (int32_t type = 0; kvc_type_name(type); ++type) {
        if (is_own_too || llama_kvcache_state_type(type) < FIRST_OWN_TYPE) {
            names.push_back(kvc_type_name(type));
        }
    }

    std::string res = names[0];

    for (size_t i = 1; i < names.size(); ++i) {
        res += (i + 1 < names.size() ? ", " : " or ") + std::string(names[i]);
    }

    return res;
}

// returns the kvc_type that a variable names, -1 if it is not set
static int32_t type_asked_for(const char *variable) {
    const auto name = llama_memory_option(variable);

    if (!name) {
        return -1;
    }

    const int32_t res = type_of(name->c_str());

    if (res < 0) {
        throw std::runtime_error(format("%s is '%s': set it to %s", llama_kvcache_variable(variable).c_str(),
                                        name->c_str(), type_names(true).c_str()));
    }

    return res;
}

bool llama_kvcache_types_asked_for() { return std::max(type_asked_for(TYPE_K), type_asked_for(TYPE_V)) >= 0; }

kvc_precision llama_kvcache_precision_asked_for() {
    const std::string name = llama_memory_option(PROMPTS).value_or("stored");

    if (name != "stored" && name != "int8") {
        throw std::runtime_error(
            format("%s is '%s': set it to stored or int8", llama_kvcache_variable(PROMPTS).c_str(), name.c_str()));
    }

    return name == "int8" ? KVC_PRECISION_INT8 : KVC_PRECISION_STORED;
}

// the kvc_types that rows are stored in, -1: the cache lacks it
struct stored_types {
    int32_t k;
    int32_t v;
};

static bool has_value_in_key(const llama_model &model) {
    return model.hparams.is_mla() || model.arch == LLM_ARCH_DEEPSEEK4;
}

// a variable goes before llama.cpp's option
static stored_types stored_types_of(const llama_model &model, const llama_memory_params &params) {
    const int32_t k = type_asked_for(TYPE_K);
    const int32_t v = type_asked_for(TYPE_V);

    stored_types res = {k < 0 ? llama_kvcache_type(params.type_k) : k, v < 0 ? llama_kvcache_type(params.type_v) : v};

    if (has_value_in_key(model)) {
        if (res.k >= 0 && v >= 0 && v != res.k) {
            throw std::runtime_error(format("%s is '%s': this model's values lie in its keys, whose type is %s (%s)",
                                            llama_kvcache_variable(TYPE_V).c_str(), kvc_type_name(v),
                                            kvc_type_name(res.k), TYPE_K));
        }
        res.v = res.k;
    }

    return res;
}

static const char *const WITHOUT_CACHE = "the model works without a cache";

// Architectures by the reason why they are refused.  Those that are served, without one, attend through
// llm_graph_context::build_attn, and their graphs touch the cache nowhere else.
static const struct {
    const char *reason;
    std::vector<llm_arch> archs;
} ARCHS[] = {
    {"the model has no attention",
     {LLM_ARCH_MAMBA, LLM_ARCH_MAMBA2, LLM_ARCH_RWKV6, LLM_ARCH_RWKV6QWEN2, LLM_ARCH_RWKV7, LLM_ARCH_ARWKV7}},
    {WITHOUT_CACHE,
     {LLM_ARCH_BERT, LLM_ARCH_MODERN_BERT, LLM_ARCH_NOMIC_BERT, LLM_ARCH_NOMIC_BERT_MOE, LLM_ARCH_NEO_BERT,
      LLM_ARCH_JINA_BERT_V2, LLM_ARCH_JINA_BERT_V3, LLM_ARCH_EUROBERT, LLM_ARCH_GEMMA_EMBEDDING,
      LLM_ARCH_WAVTOKENIZER_DEC, LLM_ARCH_DREAM, LLM_ARCH_LLADA, LLM_ARCH_LLADA_MOE, LLM_ARCH_LLAMA_EMBED,
      LLM_ARCH_RND1}},
    {"the model is an encoder-decoder (T5), whose attention adds a bias by position",
     {LLM_ARCH_T5, LLM_ARCH_T5ENCODER}},
    {"the model is a draft head, which works on another context's cache",
     {LLM_ARCH_EAGLE3, LLM_ARCH_DFLASH, LLM_ARCH_GEMMA4_ASSISTANT}},
    {"llama.cpp does not run such models", {LLM_ARCH_CHAMELEON, LLM_ARCH_CLIP, LLM_ARCH_GPTJ, LLM_ARCH_UNKNOWN}},
    {nullptr, {LLM_ARCH_AFMOE,          LLM_ARCH_APERTUS,     LLM_ARCH_ARCEE,        LLM_ARCH_ARCTIC,
               LLM_ARCH_BAICHUAN,       LLM_ARCH_BAILINGMOE,  LLM_ARCH_BAILINGMOE2,  LLM_ARCH_BAILINGMOE3,
               LLM_ARCH_BITNET,         LLM_ARCH_BLOOM,       LLM_ARCH_CHATGLM,      LLM_ARCH_CODESHELL,
               LLM_ARCH_COGVLM,         LLM_ARCH_COHERE2,     LLM_ARCH_COHERE2MOE,   LLM_ARCH_COMMAND_R,
               LLM_ARCH_DBRX,           LLM_ARCH_DECI,        LLM_ARCH_DEEPSEEK,     LLM_ARCH_DEEPSEEK2,
               LLM_ARCH_DEEPSEEK2OCR,   LLM_ARCH_DEEPSEEK32,  LLM_ARCH_DEEPSEEK4,    LLM_ARCH_DOTS1,
               LLM_ARCH_DOTS3NOTE,      LLM_ARCH_ERNIE4_5,    LLM_ARCH_ERNIE4_5_MOE, LLM_ARCH_EXAONE,
               LLM_ARCH_EXAONE4,        LLM_ARCH_EXAONE_MOE,  LLM_ARCH_FALCON,       LLM_ARCH_FALCON_H1,
               LLM_ARCH_GEMMA,          LLM_ARCH_GEMMA2,      LLM_ARCH_GEMMA3,       LLM_ARCH_GEMMA3N,
               LLM_ARCH_GEMMA4,         LLM_ARCH_GLM4,        LLM_ARCH_GLM4_MOE,     LLM_ARCH_GLM5_NEXT,
               LLM_ARCH_GLM_DSA,        LLM_ARCH_GPT2,        LLM_ARCH_GPTNEOX,      LLM_ARCH_GRANITE,
               LLM_ARCH_GRANITE_HYBRID, LLM_ARCH_GRANITE_MOE, LLM_ARCH_GRANITE_SWA,  LLM_ARCH_GRANITE_SWITCH,
               LLM_ARCH_GROK,           LLM_ARCH_GROVEMOE,    LLM_ARCH_HRM_TEXT,     LLM_ARCH_HUNYUAN_DENSE,
               LLM_ARCH_HUNYUAN_MOE,    LLM_ARCH_HUNYUAN_VL,  LLM_ARCH_HY_V3,        LLM_ARCH_HY_V4,
               LLM_ARCH_INTERNLM2,      LLM_ARCH_JAIS,        LLM_ARCH_JAIS2,        LLM_ARCH_JAMBA,
               LLM_ARCH_KIMI_K3,        LLM_ARCH_KIMI_LINEAR, LLM_ARCH_LAGUNA,       LLM_ARCH_LFM2,
               LLM_ARCH_LFM2MOE,        LLM_ARCH_LLAMA,       LLM_ARCH_LLAMA4,       LLM_ARCH_MAINCODER,
               LLM_ARCH_MAPLE,          LLM_ARCH_MELLUM,      LLM_ARCH_MIMO2,        LLM_ARCH_MINICPM,
               LLM_ARCH_MINICPM3,       LLM_ARCH_MINIMAX_01,  LLM_ARCH_MINIMAX_M2,   LLM_ARCH_MINIMAX_M3,
               LLM_ARCH_MISTRAL3,       LLM_ARCH_MISTRAL4,    LLM_ARCH_MPT,          LLM_ARCH_MUSE_GLIMMER,
               LLM_ARCH_NANBEIGE,       LLM_ARCH_NEMOTRON,    LLM_ARCH_NEMOTRON_H,   LLM_ARCH_NEMOTRON_H_MOE,
               LLM_ARCH_OLMO,           LLM_ARCH_OLMO2,       LLM_ARCH_OLMOE,        LLM_ARCH_OPENAI_MOE,
               LLM_ARCH_OPENELM,        LLM_ARCH_ORION,       LLM_ARCH_PADDLEOCR,    LLM_ARCH_PANGU_EMBED,
               LLM_ARCH_PHI2,           LLM_ARCH_PHI3,        LLM_ARCH_PHIMOE,       LLM_ARCH_PLAMO,
               LLM_ARCH_PLAMO2,         LLM_ARCH_PLAMO3,      LLM_ARCH_PLM,          LLM_ARCH_POCKETTTS,
               LLM_ARCH_QWEN,           LLM_ARCH_QWEN2,       LLM_ARCH_QWEN2MOE,     LLM_ARCH_QWEN2VL,
               LLM_ARCH_QWEN3,          LLM_ARCH_QWEN35,      LLM_ARCH_QWEN35MOE,    LLM_ARCH_QWEN3MOE,
               LLM_ARCH_QWEN3NEXT,      LLM_ARCH_QWEN3TTS,    LLM_ARCH_QWEN3VL,      LLM_ARCH_QWEN3VLMOE,
               LLM_ARCH_QWEN4EXP,       LLM_ARCH_REFACT,      LLM_ARCH_SEED_OSS,     LLM_ARCH_SMALLTHINKER,
               LLM_ARCH_SMOLLM3,        LLM_ARCH_SPARK2_5,    LLM_ARCH_STABLELM,     LLM_ARCH_STARCODER,
               LLM_ARCH_STARCODER2,     LLM_ARCH_STEP35,      LLM_ARCH_TALKIE,       LLM_ARCH_XVERSE}},
};

const char *llama_kvcache_arch_refusal(llm_arch arch) {
    for (const auto &[reason, archs] : ARCHS) {
        if (std::find(archs.begin(), archs.end(), arch) != archs.end()) {
            return reason;
        }
    }

    return "this version does not know it";
}

bool llama_kvcache_is_hybrid(llm_arch arch) { return llm_arch_is_hybrid(arch) && arch != LLM_ARCH_DEEPSEEK4; }

bool llama_kvcache_has_cache(llm_arch arch) { return llama_kvcache_arch_refusal(arch) != WITHOUT_CACHE; }

// whether llama.cpp's cache has the layer; those after n_layer() are a draft head's, for a context of its own
static bool is_in_own_cache(const llama_hparams &hparams, uint32_t il) {
    const bool is_trunk = il < hparams.n_layer() || hparams.n_layer() == 0 || hparams.router_layer >= 0;

    return is_trunk && !hparams.is_recr(il);
}

bool llama_kvcache_is_cached(const llama_model &model, uint32_t il) {
    const auto &hparams = model.hparams;

    switch (model.arch) {
    case LLM_ARCH_FALCON_H1: return true; // layers attend and recur
    case LLM_ARCH_NEMOTRON_H:
    case LLM_ARCH_NEMOTRON_H_MOE: return !hparams.is_recr(il) && hparams.n_ff(il) == 0;
    default: break;
    }

    return is_in_own_cache(hparams, il) && hparams.n_head_kv(il) > 0;
}

bool llama_kvcache_is_blank(const llama_model &model, uint32_t il) {
    return !llama_kvcache_is_hybrid(model.arch) && is_in_own_cache(model.hparams, il) &&
           model.hparams.n_head_kv(il) == 0;
}

static bool is_on_gpu(const llama_model &model) {
    for (uint32_t il = 0; il < model.hparams.n_layer_all; ++il) {
        if (ggml_backend_dev_type(model.dev_layer(il)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return true;
        }
    }

    return false;
}

std::string llama_kvcache_refusal(const llama_model &model, const llama_memory_params &params,
                                  const llama_cparams &cparams) {
    const auto &hparams = model.hparams;

    if (const char *reason = llama_kvcache_arch_refusal(model.arch)) {
        return std::string(llm_arch_name(model.arch)) + ": " + reason;
    }
    if (is_on_gpu(model)) {
        return "layers of the model are on a GPU (use -ngl 0)";
    }
    if (cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || cparams.ctx_other) {
        return "the context is a draft head's (MTP; use a draft model, -md, or no speculation)";
    }
    if (model.arch == LLM_ARCH_DEEPSEEK4 && model.layers[0].ffn_exp_probs_b_vl) { // which routes tokens of images
        return "deepseek4: the model reads images, whose tokens see each other beyond its windows";
    }
    if (hparams.swa_type == LLAMA_SWA_TYPE_SYMMETRIC ||
        (hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_FULL && model.arch != LLM_ARCH_DEEPSEEK4)) {
        return "the model's windows reach to both sides";
    }
    if (const char *reason = llama_kvcache_indexer_refusal(model)) {
        return reason;
    }

    const stored_types types = stored_types_of(model, params);

    if (types.k < 0 || types.v < 0) {
        const char *name = ggml_type_name(types.k < 0 ? params.type_k : params.type_v);

        return std::string("no support for rows of type ") + name + " (use " + type_names(false) + ")";
    }

    return "";
}

// Keys of an indexer may stand for several tokens.  What they are pooled of is kept for as many tokens as a sequence
// may go back.
static kvc_policy index_policy_of(const llama_kvcache_layer &layer, const llama_kvcache_choice &choice,
                                  const llama_cparams &cparams, int32_t ngram) {
    kvc_policy policy = {};

    if (layer.is_index) {
        policy.kind = KVC_FULL;
        policy.stride = choice.pool;
    } else {
        policy.kind = KVC_SLIDING;
        policy.window = std::max(choice.pool, ngram);
        policy.resume_window = policy.window + std::max<int32_t>(64, (int32_t)cparams.n_rs_seq);
    }

    return policy;
}

static kvc_policy policy_of(const llama_model &model, const llama_memory_params &params, const llama_cparams &cparams,
                            uint32_t il) {
    const auto &hparams = model.hparams;

    kvc_policy policy = {};

    if (!hparams.is_swa(il)) {
        policy.kind = KVC_FULL;
        return policy;
    }

    // keep as many as llama.cpp's cache does, so that a sequence can go back as far
    const uint32_t n_kept = params.swa_full ? cparams.n_ctx_seq : GGML_PAD(hparams.n_swa + cparams.n_ubatch, 256);

    if (hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED) {
        policy.kind = KVC_CHUNKED;
        policy.attention_chunk_size = hparams.n_swa;
        policy.resume_window = n_kept;
    } else {
        policy.kind = KVC_SLIDING;
        policy.window = hparams.n_swa;
        policy.resume_window = std::max(hparams.n_swa, n_kept);
    }

    return policy;
}

// the angle per position of each pair of elements, as ggml_rope_ext computes it (YaRN: Peng et al. 2023)
static std::vector<double> inv_freq_of(const llama_model &model, const llama_cparams &cparams, uint32_t il) {
    const uint32_t n_rot = model.hparams.n_rot(il);
    const double base = model.get_rope_freq_base(cparams, il);
    const double freq_scale = model.get_rope_freq_scale(cparams, il);

    std::vector<float> factors(n_rot / 2, 1.0f);

    if (const ggml_tensor *tensor = model.get_rope_factors(cparams, il);
        tensor && tensor->buffer && !model.hparams.no_alloc) {
        ggml_backend_tensor_get(tensor, factors.data(), 0,
                                std::min(ggml_nbytes(tensor), factors.size() * sizeof(float)));
    }

    float corr_dims[2];
    ggml_rope_yarn_corr_dims(n_rot, cparams.n_ctx_orig_yarn, base, cparams.yarn_beta_fast, cparams.yarn_beta_slow,
                             corr_dims);

    std::vector<double> res(n_rot / 2);

    for (uint32_t i = 0; i < n_rot / 2; ++i) {
        const double extrapolated = std::pow(base, -2.0 * i / n_rot) / factors[i];
        const double interpolated = freq_scale * extrapolated;
        const double y = (i - corr_dims[0]) / std::max(0.001f, corr_dims[1] - corr_dims[0]);
        const double mix = (1.0 - std::min(1.0, std::max(0.0, y))) * cparams.yarn_ext_factor;

        res[i] = interpolated * (1.0 - mix) + extrapolated * mix;
    }

    return res;
}

// inv_freq: what inv_freq_of returned, which outlives the result
static kvc_rope rope_of(const llama_model &model, uint32_t il, const std::vector<double> &inv_freq) {
    const auto &hparams = model.hparams;

    kvc_rope rope = {};

    if (hparams.n_pos_per_embd() > 1 || model.arch == LLM_ARCH_DEEPSEEK4) {
        rope.kind = KVC_ROPE_UNKNOWN; // tokens are not moved
        return rope;
    }
    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE || !hparams.has_rope(il)) {
        rope.kind = KVC_ROPE_NONE;
        return rope;
    }

    rope.kind = KVC_ROPE_FREQUENCIES;
    rope.interleaved = hparams.rope_type == LLAMA_ROPE_TYPE_NORM;
    rope.first_dim = hparams.n_lora_kv > 0 ? hparams.n_embd_head_k(il) - hparams.n_rot(il) : 0;
    rope.num_freqs = inv_freq.size();
    rope.inv_freq = inv_freq.data();

    return rope;
}

// llama.cpp multiplies what it quantises by Hadamard matrices if all heads of its cache have one size, a multiple of 64
static void set_transforms(const llama_model &model, std::vector<llama_kvcache_layer> &layers, bool is_swa) {
    const auto &hparams = model.hparams;

    const char *disabled = getenv("LLAMA_ATTN_ROT_DISABLE");
    const bool is_iswa = hparams.swa_type != LLAMA_SWA_TYPE_NONE;

    // its graphs of MLA, and of hybrid models with windows, leave it out
    if ((disabled && atoi(disabled)) || hparams.is_mla() || (is_iswa && llama_kvcache_is_hybrid(model.arch))) {
        return;
    }

    bool is_uniform = true;
    uint32_t n_k = 0;
    uint32_t n_v = 0;

    for (const auto &layer : layers) {
        if (layer.is_swa == is_swa) {
            n_k = n_k ? n_k : hparams.n_embd_head_k(layer.il);
            n_v = n_v ? n_v : hparams.n_embd_head_v(layer.il);

            is_uniform = is_uniform && n_k == hparams.n_embd_head_k(layer.il) && n_v == hparams.n_embd_head_v(layer.il);
        }
    }

    if (!is_uniform) {
        return;
    }

    const kvc_transform k_transform = hparams.n_embd_head_k() % 64 ? KVC_TRANSFORM_NONE : KVC_TRANSFORM_HADAMARD;
    const kvc_transform v_transform = hparams.n_embd_head_v() % 64 ? KVC_TRANSFORM_NONE : KVC_TRANSFORM_HADAMARD;

    for (auto &layer : layers) {
        if (layer.is_swa == is_swa) {
            layer.k_transform = k_transform;
            layer.v_transform = v_transform;
        }
    }
}

// returns which layer's rows a layer without its own reads, -1 if it has its own
static int32_t shared_of(const llama_model &model, uint32_t il) {
    const auto &hparams = model.hparams;

    if (hparams.has_kv(il)) {
        return -1;
    }

    return hparams.n_layer_kv_from_start - (hparams.is_swa(il) ? 2 : 1);
}

static int32_t shape_of(const llama_kvcache_layers &layers, const llama_kvcache_layer &model, const kvc_layer &cache) {
    for (size_t i = 0; i < layers.cache.size(); ++i) {
        const auto &other = layers.cache[i];

        if (layers.model[i].shape >= 0 && layers.model[i].is_swa == model.is_swa &&
            layers.model[i].is_index == model.is_index && other.policy.stride == cache.policy.stride &&
            layers.model[i].n_head == model.n_head && layers.model[i].is_sparse == model.is_sparse &&
            other.num_kv_heads == cache.num_kv_heads && other.k_dim == cache.k_dim && other.v_dim == cache.v_dim &&
            other.sketch_bits == cache.sketch_bits) {
            return layers.model[i].shape;
        }
    }

    return (int32_t)layers.shapes.size();
}

// the layers with attention, then their indexers, then what these pool, then the tokens
static std::vector<llama_kvcache_layer> cached_layers_of(const llama_model &model) {
    const auto &hparams = model.hparams;

    std::vector<llama_kvcache_layer> res;

    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (llama_kvcache_is_cached(model, il)) {
            res.push_back({(int32_t)il, false, false, llama_kvcache_is_sparse(model, il), KVC_TRANSFORM_NONE,
                           KVC_TRANSFORM_NONE, hparams.is_swa(il), hparams.n_head(il), 0});
        }
    }

    set_transforms(model, res, false);
    set_transforms(model, res, true);

    for (const bool is_input : {false, true}) {
        for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
            const bool has = llama_kvcache_is_cached(model, il) && llama_kvcache_has_indexer(model, il) &&
                             (!is_input || llama_kvcache_input_dim(model) > 0);

            if (has) {
                res.push_back({(int32_t)il, !is_input, is_input, !is_input, KVC_TRANSFORM_NONE, KVC_TRANSFORM_NONE,
                               false, is_input ? 0 : hparams.indexer_n_head, 0});
            }
        }
    }
    if (llama_kvcache_ngram(model) > 0) {
        res.push_back({-1, false, true, false, KVC_TRANSFORM_NONE, KVC_TRANSFORM_NONE, false, 0, 0, 1,
                       (int32_t)llama_kvcache_ngram(model)});
    }

    return res;
}

// The keys of an indexer, or inputs, which stay exact.
static kvc_layer index_layer_of(const llama_model &model, const llama_kvcache_layer &layer, int32_t type,
                                const llama_kvcache_choice &choice, const llama_cparams &cparams) {
    kvc_layer res = {};

    res.num_kv_heads = 1;
    res.k_dim = layer.is_index  ? model.hparams.indexer_head_size
                : layer.il >= 0 ? llama_kvcache_input_dim(model)
                                : 1; // the number of a token
    res.k_type = layer.is_index ? type : (int32_t)KVC_F32;
    res.policy = index_policy_of(layer, choice, cparams, llama_kvcache_ngram(model));

    return res;
}

static kvc_layer attention_layer_of(const llama_model &model, const llama_memory_params &params,
                                    const llama_cparams &cparams, const llama_kvcache_layer &layer,
                                    const llama_kvcache_layers &layers) {
    const auto &hparams = model.hparams;
    const stored_types types = stored_types_of(model, params);
    const int32_t shared = shared_of(model, layer.il);

    kvc_layer res = {};

    res.num_kv_heads = hparams.n_head_kv(layer.il);
    res.k_dim = hparams.n_embd_head_k(layer.il);
    res.v_dim = hparams.n_embd_head_v(layer.il);
    res.k_type = types.k;
    res.v_type = types.v;
    res.k_transform = layer.k_transform;
    res.v_transform = layer.v_transform;
    res.value_in_key = has_value_in_key(model);
    res.share = shared < 0 ? 0 : layers.attention[shared] + 1;
    res.policy = policy_of(model, params, cparams, layer.il);

    return res;
}

// Keys that stand for several tokens are not moved, nor are inputs: their RoPE stays unknown.
static void set_rope(const llama_model &model, const llama_cparams &cparams, const llama_kvcache_layer &layer,
                     kvc_layer &cache, llama_kvcache_layers &layers) {
    if (layer.is_input || (layer.is_index && layers.choice.pool > 1)) {
        return;
    }

    layers.inv_freqs.push_back(inv_freq_of(model, cparams, layer.il));
    cache.rope = rope_of(model, layer.il, layers.inv_freqs.back());
    if (layer.is_index) {
        layers.mixed_rope->inv_freq = layers.inv_freqs.back(); // all indexers have the same
        llama_kvcache_set_index_rope(model, *layers.mixed_rope, cache.rope);
    }
}

// Adds a layer of the cache, and returns its number.
static int32_t add_layer(llama_kvcache_layers &layers, llama_kvcache_layer model, const kvc_layer &cache) {
    model.shape = model.is_input ? -1 : shape_of(layers, model, cache);
    if (model.shape == (int32_t)layers.shapes.size()) {
        layers.shapes.push_back((int32_t)layers.cache.size());
    }

    layers.stride = std::max(layers.stride, cache.policy.stride);
    layers.model.push_back(model);
    layers.cache.push_back(cache);

    return (int32_t)layers.cache.size() - 1;
}

// Adds rows of DeepSeek V4 that stand for several tokens, and what they are pooled of: elements, and their gates.
static void add_pooled(llama_kvcache_layers &layers, const llama_kvcache_layer &model, const kvc_layer &cache,
                       int32_t resume_window) {
    const int32_t n_series = cache.policy.stride == DSV4_OVERLAPPED ? 2 : 1; // for a block, and for the next

    kvc_layer of_tokens = {};

    of_tokens.num_kv_heads = 1;
    of_tokens.k_dim = 2 * n_series * cache.k_dim;
    of_tokens.k_type = KVC_F32;
    of_tokens.policy.kind = KVC_SLIDING;
    of_tokens.policy.window = n_series * cache.policy.stride;
    of_tokens.policy.resume_window = std::max(of_tokens.policy.window, resume_window);

    llama_kvcache_layer input = model;

    input.is_index = false;
    input.is_input = true;
    input.pool = cache.policy.stride;
    input.span = of_tokens.policy.window;

    (model.is_index ? layers.indexer : layers.compressed)[model.il] = add_layer(layers, model, cache);
    (model.is_index ? layers.inputs : layers.compressed_inputs)[model.il] = add_layer(layers, input, of_tokens);
}

static void add_compressed(const llama_model &model, llama_memory_params params, const llama_cparams &cparams,
                           llama_kvcache_layers &layers) {
    const auto &hparams = model.hparams;

    params.swa_full = false; // what rows are pooled of is many times as large as they are

    const int32_t resume_window = policy_of(model, params, cparams, 0).resume_window;

    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        llama_kvcache_layer of_model = layers.model[layers.attention[il]];
        kvc_layer rows = layers.cache[layers.attention[il]];

        rows.policy = {};
        rows.policy.kind = KVC_FULL;
        rows.policy.stride = (int32_t)hparams.dsv4_compress_ratios[il];
        if (rows.policy.stride == 0) {
            continue;
        }

        of_model.is_swa = false;
        of_model.is_sparse = rows.policy.stride == DSV4_OVERLAPPED;
        add_pooled(layers, of_model, rows, resume_window);

        if (of_model.is_sparse) {
            of_model.is_index = true;
            of_model.n_head = hparams.indexer_n_head;
            rows.k_dim = (int32_t)hparams.indexer_head_size;
            rows.v_dim = rows.value_in_key = 0;
            rows.k_transform = KVC_TRANSFORM_NONE;
            add_pooled(layers, of_model, rows, resume_window);
        }
    }
}

llama_kvcache_layers llama_kvcache_layers_of(const llama_model &model, const llama_memory_params &params,
                                             const llama_cparams &cparams) {
    llama_kvcache_layers res;

    for (auto *of_model : {&res.attention, &res.indexer, &res.inputs, &res.compressed, &res.compressed_inputs}) {
        of_model->resize(model.hparams.n_layer_all, -1);
    }
    res.choice = llama_kvcache_choice_of(model, cparams);
    res.mixed_rope = std::make_unique<llama_kvcache_mixed_rope>();
    res.swa_full = params.swa_full;
    res.select_rows = llama_kvcache_select_rows(cparams);
    res.precision = llama_kvcache_precision_asked_for();

    for (auto &layer : cached_layers_of(model)) {
        if (layer.is_input && layer.il >= 0) {
            layer.pool = layer.span = res.choice.pool;
        }

        const bool is_attention = !layer.is_index && !layer.is_input;
        kvc_layer cache = is_attention
                              ? attention_layer_of(model, params, cparams, layer, res)
                              : index_layer_of(model, layer, stored_types_of(model, params).k, res.choice, cparams);

        set_rope(model, cparams, layer, cache, res);
        cache.sketch_bits =
            res.select_rows > 0 && is_attention && !layer.is_sparse ? llama_kvcache_sketch_bits(res.cache, cache) : 0;

        int32_t &of_model = layer.il < 0     ? res.tokens
                            : layer.is_index ? res.indexer[layer.il]
                            : layer.is_input ? res.inputs[layer.il]
                                             : res.attention[layer.il];

        of_model = add_layer(res, layer, cache);
    }
    if (model.arch == LLM_ARCH_DEEPSEEK4) {
        add_compressed(model, params, cparams, res);
    }

    if (res.select_rows > 0) {
        llama_kvcache_check_sketches(res.cache);
    }

    return res;
}
