#include "llama-kvcache-state.h"

#include "llama-model.h"

std::vector<llama_kvcache::state_part> llama_kvcache::state_parts(llama_state_seq_flags flags) const {
    const bool has_windows = model.hparams.swa_type != LLAMA_SWA_TYPE_NONE;

    std::vector<state_part> res;

    for (const bool is_swa : {false, true}) {
        if (is_swa ? !has_windows : has_windows && (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
            continue;
        }

        state_part part = {is_swa, 0, {}, std::vector<uint8_t>(layers.cache.size(), 0)};

        for (size_t i = 0; i < layers.cache.size(); ++i) {
            if (has_windows && layers.model[i].is_swa != is_swa) {
                continue;
            }

            part.restored[i] = 1;

            if (layers.cache[i].share == 0) {
                part.layers.push_back((int32_t)i);
            }
        }

        // llama.cpp has cells without layers, too
        part.first = part.layers.empty() ? 0 : part.layers[0];

        res.push_back(std::move(part));
    }

    return res;
}

llama_kvcache::state_row llama_kvcache::state_row_of(int32_t layer, bool is_value) const {
    const auto &l = layers.cache[layer];

    state_row res;

    res.type = is_value ? layers.model[layer].type_v : layers.model[layer].type_k;
    res.n_heads = l.num_kv_heads;
    res.n_elements = l.num_kv_heads * (is_value ? l.v_dim : l.k_dim);
    res.n_head_bytes = ggml_row_size(res.type, is_value ? l.v_dim : l.k_dim);
    res.n_bytes = res.n_head_bytes * res.n_heads;

    return res;
}

uint32_t llama_kvcache::n_stream() const { return cparams.kv_unified ? 1 : cparams.n_seq_max; }

void llama_kvcache::state_clear(llama_seq_id seq_id) {
    if (seq_id == -1) {
        clear(true);
    } else {
        close();
        llama_kvcache_check(kvc_clear_sequence(cache, seq_id));
    }
}
