#include "llama-kvcache-indexer.h"

#include "llama-arch.h"
#include "llama-cparams.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>

static bool is_mixed(llm_arch arch) {
    return arch == LLM_ARCH_DEEPSEEK32 || arch == LLM_ARCH_DEEPSEEK4 || arch == LLM_ARCH_DOTS3NOTE ||
           arch == LLM_ARCH_GLM_DSA;
}

// returns how many tokens share a key of an indexer, 0: each has its own, or there is no indexer
static uint32_t pool_of(const llama_model &model) {
    const auto &hparams = model.hparams;

    if (model.arch == LLM_ARCH_GLM5_NEXT) {
        return hparams.indexer_kpool;
    }
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (model.arch == LLM_ARCH_QWEN4EXP && llama_kvcache_is_sparse(model, il)) {
            return hparams.dsv4_compress_ratios[il];
        }
    }

    return 0;
}

llama_kvcache_choice llama_kvcache_choice_of(const llama_model &model, const llama_cparams &cparams) {
    const auto &hparams = model.hparams;

    llama_kvcache_choice res;

    if (is_mixed(model.arch) || model.arch == LLM_ARCH_HY_V4 || model.arch == LLM_ARCH_MINIMAX_M3) {
        res.width = (int32_t)std::min(hparams.indexer_top_k, cparams.n_ctx_seq);
        res.is_mixed = is_mixed(model.arch);
    }
    if (model.arch == LLM_ARCH_MINIMAX_M3) {
        res.block = hparams.indexer_block_size;
        res.num_choices = hparams.indexer_n_head;
        res.num_local = hparams.indexer_local_blocks;
        res.relu = false;
    }
    if (model.arch == LLM_ARCH_DEEPSEEK4) {
        res.block = 4; // a row stands for a block
        res.width = std::max(1, std::min(res.width, (int32_t)cparams.n_ctx_seq / res.block));
    }
    if (const uint32_t pool = pool_of(model)) {
        res.pool = res.block = (int32_t)pool;
        res.width = (int32_t)(std::max(pool, std::min(hparams.indexer_top_k, cparams.n_ctx_seq)) / pool);
        res.has_tail = model.arch == LLM_ARCH_QWEN4EXP || hparams.indexer_kpool_select_tail;
    }

    return res;
}

uint32_t llama_kvcache_input_dim(const llama_model &model) {
    const uint32_t n_parts = model.arch == LLM_ARCH_GLM5_NEXT ? 2 : 1; // keys, and the gates of their elements

    return pool_of(model) ? n_parts * model.hparams.indexer_head_size : 0;
}

uint32_t llama_kvcache_ngram(const llama_model &model) {
    return model.hparams.ple_n_heads > 0 ? model.hparams.ple_ngram_size : 0;
}

const char *llama_kvcache_indexer_refusal(const llama_model &model) {
    const auto &hparams = model.hparams;
    const uint32_t pool = pool_of(model);

    if (pool == 0) {
        return nullptr;
    }
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (model.arch == LLM_ARCH_QWEN4EXP && llama_kvcache_is_sparse(model, il) &&
            hparams.dsv4_compress_ratios[il] != pool) {
            return "the indexers of some layers pool more tokens to a key than those of others";
        }
    }

    return hparams.indexer_top_k < pool ? "tokens choose less than a block" : nullptr;
}

bool llama_kvcache_is_sparse(const llama_model &model, uint32_t il) {
    const auto &hparams = model.hparams;

    switch (model.arch) {
    case LLM_ARCH_DEEPSEEK32:
    case LLM_ARCH_GLM5_NEXT:
    case LLM_ARCH_GLM_DSA: return true;
    case LLM_ARCH_DOTS3NOTE: return !hparams.is_swa(il);
    case LLM_ARCH_HY_V4: return hparams.indexer_top_k > 0; // else the file has no indexer
    case LLM_ARCH_MINIMAX_M3: return il >= hparams.n_layer_dense_lead;
    case LLM_ARCH_QWEN4EXP: return !hparams.is_recr(il) && hparams.dsv4_compress_ratios[il] > 0;
    default: return false;
    }
}

bool llama_kvcache_has_indexer(const llama_model &model, uint32_t il) {
    const bool all_have =
        model.arch == LLM_ARCH_DEEPSEEK32 || model.arch == LLM_ARCH_MINIMAX_M3 || model.arch == LLM_ARCH_QWEN4EXP;

    return llama_kvcache_is_sparse(model, il) && (all_have || model.hparams.is_indexer_full(il));
}

// moves keys that were rotated, then multiplied
static int32_t shift_mixed(void *user, int32_t /*layer*/, float *keys, int32_t num_kv_heads, int64_t num_rows,
                           int32_t k_dim, int32_t delta) {
    const auto &rope = *static_cast<const llama_kvcache_mixed_rope *>(user);
    const size_t n = rope.inv_freq.size();

    std::vector<float> cosines(n);
    std::vector<float> sines(n);

    for (size_t i = 0; i < n; ++i) {
        cosines[i] = (float)std::cos(delta * rope.inv_freq[i]);
        sines[i] = (float)std::sin(delta * rope.inv_freq[i]);
    }

    for (float *row = keys, *end = keys + num_kv_heads * num_rows * k_dim; row < end; row += k_dim) {
        llama_kvcache_mix(row, k_dim);
        for (size_t i = 0; i < n; ++i) {
            float &a = row[rope.interleaved ? 2 * i : i];
            float &b = row[rope.interleaved ? 2 * i + 1 : n + i];
            const float turned = a * cosines[i] - b * sines[i];

            b = a * sines[i] + b * cosines[i];
            a = turned;
        }
        llama_kvcache_mix(row, k_dim);
    }

    return 0;
}

void llama_kvcache_set_index_rope(const llama_model &model, llama_kvcache_mixed_rope &mixed, kvc_rope &rope) {
    const auto &hparams = model.hparams;

    if (rope.kind != KVC_ROPE_FREQUENCIES) {
        return;
    }

    // as the graphs rotate them
    rope.interleaved = model.arch == LLM_ARCH_GLM_DSA || model.arch == LLM_ARCH_HY_V4;
    rope.first_dim = model.arch == LLM_ARCH_HY_V4 ? (int32_t)hparams.indexer_head_size - 2 * rope.num_freqs : 0;

    if (is_mixed(model.arch)) {
        mixed.interleaved = rope.interleaved;
        rope.kind = KVC_ROPE_FUNCTION;
        rope.shift = shift_mixed;
        rope.user = &mixed;
    }
}

void llama_kvcache_mix(float *row, size_t n) {
    const size_t order = n & (0 - n);
    const float scale = 1.0f / std::sqrt((float)order);

    for (size_t half = 1; half < order; half *= 2) {
        for (size_t first = 0; first < n; first += 2 * half) {
            for (size_t i = first; i < first + half; ++i) {
                const float a = row[i];
                const float b = row[i + half];

                row[i] = a + b;
                row[i + half] = a - b;
            }
        }
    }
    for (size_t i = 0; i < n; ++i) {
        row[i] *= scale;
    }
}
