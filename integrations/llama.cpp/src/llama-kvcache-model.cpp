#include "llama-kvcache-model.h"

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

int32_t llama_kvcache_type(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32: return KVC_F32;
    case GGML_TYPE_F16: return KVC_F16;
    case GGML_TYPE_BF16: return KVC_BF16;
    case GGML_TYPE_Q8_0: return KVC_Q8_0;
    case GGML_TYPE_Q4_0: return KVC_Q4_0;
    default: return -1;
    }
}

// models whose graphs attend through llm_graph_context::build_attn and touch the cache nowhere else
static bool is_served(llm_arch arch) {
    switch (arch) {
    case LLM_ARCH_LLAMA:
    case LLM_ARCH_LLAMA4:
    case LLM_ARCH_QWEN2:
    case LLM_ARCH_QWEN3:
    case LLM_ARCH_GEMMA:
    case LLM_ARCH_GEMMA2:
    case LLM_ARCH_GEMMA3:
    case LLM_ARCH_GEMMA3N:
    case LLM_ARCH_PHI3:
    case LLM_ARCH_BLOOM:
    case LLM_ARCH_DEEPSEEK2:
    case LLM_ARCH_OPENAI_MOE: return true;
    default: return false;
    }
}

// the layers that hold rows in this context; others are recurrent, or belong to another kind of context
static bool is_cached(const llama_model &model, uint32_t il) {
    const auto &hparams = model.hparams;

    return il < hparams.n_layer() && !hparams.is_recr(il);
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

    if (!is_served(model.arch)) {
        return std::string("no support for models of architecture ") + llm_arch_name(model.arch);
    }
    if (is_on_gpu(model)) {
        return "layers of the model are on a GPU (use -ngl 0)";
    }
    if (hparams.n_pos_per_embd() > 1) {
        return "the model rotates keys by several positions a token (M-RoPE)";
    }
    if (cparams.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || cparams.ctx_other) {
        return "the context is a draft head that shares another context's cache";
    }
    if (hparams.swa_type == LLAMA_SWA_TYPE_SYMMETRIC) {
        return "the model's windows are symmetric";
    }
    for (const ggml_type type : {params.type_k, params.type_v}) {
        if (llama_kvcache_type(type) < 0) {
            return std::string("no support for rows of type ") + ggml_type_name(type) +
                   " (use f32, f16, bf16, q8_0 or q4_0)";
        }
    }

    return "";
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

// multiplies blocks of n elements by the Hadamard matrix over sqrt(n), its own inverse
static void multiply_by_hadamard(float *row, uint32_t n_elements, uint32_t n) {
    const float scale = 1.0f / std::sqrt((float)n);

    for (float *block = row; block < row + n_elements; block += n) {
        for (uint32_t half = 1; half < n; half *= 2) {
            for (uint32_t i = 0; i < n; i += 2 * half) {
                for (uint32_t j = i; j < i + half; ++j) {
                    const float a = block[j];
                    const float b = block[j + half];

                    block[j] = a + b;
                    block[j + half] = a - b;
                }
            }
        }
        for (uint32_t i = 0; i < n; ++i) {
            block[i] *= scale;
        }
    }
}

static int32_t move_keys(void *user, int32_t /*layer*/, float *keys, int32_t num_kv_heads, int64_t num_rows,
                         int32_t k_dim, int32_t delta) {
    const auto &mover = *static_cast<const llama_kvcache_mover *>(user);
    const size_t n = mover.inv_freq.size();

    std::vector<float> cos(n);
    std::vector<float> sin(n);
    for (size_t i = 0; i < n; ++i) {
        cos[i] = (float)std::cos(delta * mover.inv_freq[i]);
        sin[i] = (float)std::sin(delta * mover.inv_freq[i]);
    }

    for (int64_t r = 0; r < num_kv_heads * num_rows; ++r) {
        float *row = keys + r * k_dim;

        multiply_by_hadamard(row, k_dim, mover.n_hadamard);

        for (size_t i = 0; i < n; ++i) {
            float &x = row[mover.first_dim + (mover.interleaved ? 2 * i : i)];
            float &y = row[mover.first_dim + (mover.interleaved ? 2 * i + 1 : i + n)];

            const float x0 = x;

            x = x0 * cos[i] - y * sin[i];
            y = x0 * sin[i] + y * cos[i];
        }

        multiply_by_hadamard(row, k_dim, mover.n_hadamard);
    }

    return 0;
}

static kvc_rope rope_of(const llama_model &model, const llama_kvcache_layer &layer, llama_kvcache_mover &mover) {
    const auto &hparams = model.hparams;

    kvc_rope rope = {};

    if (hparams.rope_type == LLAMA_ROPE_TYPE_NONE || !hparams.has_rope(layer.il)) {
        rope.kind = KVC_ROPE_NONE;
        return rope;
    }

    rope.kind = layer.n_hadamard_k ? KVC_ROPE_FUNCTION : KVC_ROPE_FREQUENCIES;
    rope.interleaved = mover.interleaved;
    rope.first_dim = mover.first_dim;
    rope.num_freqs = mover.inv_freq.size();
    rope.inv_freq = mover.inv_freq.data();
    rope.shift = move_keys;
    rope.user = &mover;

    return rope;
}

// llama.cpp multiplies what it quantises by Hadamard matrices if all heads of its cache have one size
static void set_hadamard(const llama_model &model, std::vector<llama_kvcache_layer> &layers, bool is_swa) {
    const auto &hparams = model.hparams;

    const char *disabled = getenv("LLAMA_ATTN_ROT_DISABLE");
    const bool is_iswa = hparams.swa_type != LLAMA_SWA_TYPE_NONE;

    // its graphs of MLA, and of hybrid models with windows, leave it out
    if ((disabled && atoi(disabled)) || hparams.is_mla() || (is_iswa && llm_arch_is_hybrid(model.arch))) {
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

    uint32_t n_hadamard = 64;
    while (n_k && n_k % (2 * n_hadamard) == 0) {
        n_hadamard *= 2;
    }

    for (auto &layer : layers) {
        if (layer.is_swa == is_swa) {
            layer.n_hadamard_k = ggml_is_quantized(layer.type_k) && hparams.n_embd_head_k() % 64 == 0 ? n_hadamard : 0;
            layer.n_hadamard_v = ggml_is_quantized(layer.type_v) && hparams.n_embd_head_v() % 64 == 0 ? 64 : 0;
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

        if (layers.model[i].is_swa == model.is_swa && layers.model[i].n_head == model.n_head &&
            other.num_kv_heads == cache.num_kv_heads && other.k_dim == cache.k_dim && other.v_dim == cache.v_dim) {
            return layers.model[i].shape;
        }
    }

    return layers.n_shapes;
}

llama_kvcache_layers llama_kvcache_layers_of(const llama_model &model, const llama_memory_params &params,
                                             const llama_cparams &cparams) {
    const auto &hparams = model.hparams;

    std::vector<llama_kvcache_layer> cached;

    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (is_cached(model, il)) {
            cached.push_back(
                {(int32_t)il, params.type_k, params.type_v, 0, 0, hparams.is_swa(il), hparams.n_head(il), 0});
        }
    }

    set_hadamard(model, cached, false);
    set_hadamard(model, cached, true);

    llama_kvcache_layers res;

    res.index.resize(hparams.n_layer_all, -1);

    for (auto &layer : cached) {
        const uint32_t il = layer.il;

        const uint32_t n_rot = hparams.n_rot(il);

        auto mover = std::make_unique<llama_kvcache_mover>();

        mover->inv_freq = inv_freq_of(model, cparams, il);
        mover->first_dim = hparams.n_lora_kv > 0 ? hparams.n_embd_head_k(il) - n_rot : 0;
        mover->interleaved = hparams.rope_type == LLAMA_ROPE_TYPE_NORM;
        mover->n_hadamard = layer.n_hadamard_k;

        kvc_layer cache = {};

        cache.num_kv_heads = hparams.n_head_kv(il);
        cache.k_dim = hparams.n_embd_head_k(il);
        cache.v_dim = hparams.n_embd_head_v(il);
        cache.k_type = llama_kvcache_type(layer.type_k);
        cache.v_type = llama_kvcache_type(hparams.is_mla() ? layer.type_k : layer.type_v);
        cache.value_in_key = hparams.is_mla();
        cache.share = shared_of(model, il) < 0 ? 0 : res.index[shared_of(model, il)] + 1;
        cache.policy = policy_of(model, params, cparams, il);
        cache.rope = rope_of(model, layer, *mover);

        layer.shape = shape_of(res, layer, cache);
        res.n_shapes = std::max(res.n_shapes, layer.shape + 1);

        res.index[il] = (int32_t)res.cache.size();

        res.model.push_back(layer);
        res.cache.push_back(cache);
        res.movers.push_back(std::move(mover));
    }

    return res;
}
