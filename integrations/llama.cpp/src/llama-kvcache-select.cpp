#include "llama-kvcache-select.h"

#include "llama-kvcache-variables.h"

#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-memory.h"

#include <algorithm>
#include <stdexcept>
#include <string>

static const char *const SELECT = "LLAMA_KVCACHE_SELECT";

static constexpr size_t FIRST_DENSE = 2; // layers that read all rows: their attention is spread over most of them

static constexpr int64_t SELECT_FROM = 8192; // tokens; with fewer there is little to gain

static constexpr int32_t MOST_KEY_ELEMENTS = 1024; // of a key that has a sketch

int32_t llama_kvcache_select_asked_for() {
    const std::string value = llama_memory_option(SELECT).value_or("0");
    const bool is_number = !value.empty() && value.size() <= 10 &&
                           std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; });
    const long long res = is_number ? std::stoll(value) : 0;

    if (!is_number || res > INT32_MAX) {
        throw std::runtime_error(format("%s is '%s': set it to the number of rows that a new token reads of a long "
                                        "text, such as 2048, or to 0, for all rows",
                                        llama_kvcache_variable(SELECT).c_str(), value.c_str()));
    }

    return (int32_t)res;
}

// kvc_attend reads all of 80 + 2 * n_rows rows
int64_t llama_kvcache_select_from(int32_t n_rows) { return std::max(SELECT_FROM, 81 + 2 * (int64_t)n_rows); }

int32_t llama_kvcache_select_rows(const llama_cparams &cparams) {
    const int32_t res = llama_kvcache_select_asked_for();
    const int64_t first = llama_kvcache_select_from(res);

    if (res == 0 || cparams.n_ctx_seq >= first) {
        return res;
    }

    LLAMA_LOG_WARN("%s: %s is %d: all rows are read, because a token selects from %lld tokens on, and a sequence of "
                   "this context has at most %u\n",
                   __func__, SELECT, res, (long long)first, cparams.n_ctx_seq);

    return 0;
}

static bool can_have_sketches(const kvc_layer &layer) {
    const int32_t n_seen = layer.policy.kind == KVC_SLIDING   ? layer.policy.window
                           : layer.policy.kind == KVC_CHUNKED ? layer.policy.attention_chunk_size
                                                              : INT32_MAX;

    return !layer.value_in_key && layer.v_dim > 0 && layer.k_dim % 32 == 0 && layer.k_dim <= MOST_KEY_ELEMENTS &&
           n_seen >= SELECT_FROM;
}

int32_t llama_kvcache_sketch_bits(const std::vector<kvc_layer> &before, const kvc_layer &layer) {
    if (layer.share > 0) {
        return before[layer.share - 1].sketch_bits;
    }

    return before.size() >= FIRST_DENSE && can_have_sketches(layer) ? 2 : 0;
}

void llama_kvcache_log_selection(const std::vector<kvc_layer> &layers, int32_t n_rows, int64_t n_tokens) {
    size_t n_all = 0;
    size_t n_layers = 0;
    int64_t n_bytes = 0;

    for (const auto &layer : layers) {
        n_all += layer.v_dim > 0; // else the keys of an indexer
        if (layer.sketch_bits > 0) {
            n_layers++;
            n_bytes += layer.share > 0 ? 0 : n_tokens * layer.num_kv_heads * (layer.k_dim / 4 + 2);
        }
    }

    LLAMA_LOG_INFO("llama_kvcache: a new token selects %d rows in %zu of %zu layers, from %lld tokens on, by sketches "
                   "of up to %.2f MiB, counted above\n",
                   n_rows, n_layers, n_all, (long long)llama_kvcache_select_from(n_rows), n_bytes / 1024.0 / 1024.0);
}

void llama_kvcache_check_sketches(const std::vector<kvc_layer> &layers) {
    if (std::none_of(layers.begin(), layers.end(), [](const kvc_layer &layer) { return layer.sketch_bits > 0; })) {
        throw std::runtime_error(
            format("%s is %d: no layer of the model can select rows. Such a layer is behind the "
                   "first %zu, without an indexer, and has values apart from keys, heads of a multiple of 32 elements, "
                   "and full attention or a window of %lld tokens or more. Set it to 0",
                   llama_kvcache_variable(SELECT).c_str(), llama_kvcache_select_asked_for(), FIRST_DENSE,
                   (long long)SELECT_FROM));
    }
}
