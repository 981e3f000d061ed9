#include "llama-kvcache-state.h"

#include "llama-model.h"

#include <algorithm>

std::vector<llama_kvcache::state_part> llama_kvcache::state_parts(llama_state_seq_flags flags) const {
    const bool has_windows = model.hparams.swa_type != LLAMA_SWA_TYPE_NONE;

    std::vector<state_part> res;

    for (const bool is_swa : {false, true}) {
        if (is_swa ? !has_windows : has_windows && (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
            continue;
        }

        state_part part = {is_swa, 0, {}, std::vector<uint8_t>(layers.cache.size(), 0)};

        for (uint32_t il = 0; il < layers.index.size(); ++il) {
            const int32_t layer = layers.index[il];

            if ((layer < 0 && !llama_kvcache_is_blank(model, il)) ||
                (has_windows && model.hparams.is_swa(il) != is_swa)) {
                continue;
            }
            if (layer >= 0) {
                part.replaced[layer] = 1;
            }
            if (layer < 0 || layers.cache[layer].share == 0) {
                part.layers.push_back(il);
            }
        }

        // llama.cpp has cells without layers, too
        const auto replaced = std::find(part.replaced.begin(), part.replaced.end(), 1);

        part.first = replaced == part.replaced.end() ? 0 : (int32_t)(replaced - part.replaced.begin());

        res.push_back(std::move(part));
    }

    return res;
}

llama_kvcache::state_row llama_kvcache::state_row_of(uint32_t il, bool is_value) const {
    const int32_t layer = layers.index[il];

    state_row res = {};

    res.type = is_value ? layers.cache[0].v_type : layers.cache[0].k_type;

    if (layer >= 0) {
        const auto &l = layers.cache[layer];
        const int32_t n_dims = is_value ? l.v_dim : l.k_dim;

        res.n_heads = l.num_kv_heads;
        res.n_elements = l.num_kv_heads * n_dims;
        res.n_head_bytes = kvc_row_bytes(res.type, n_dims);
        res.n_bytes = res.n_head_bytes * res.n_heads;
    }

    return res;
}

uint32_t llama_kvcache::n_stream() const { return cparams.kv_unified ? 1 : cparams.n_seq_max; }

void llama_kvcache::state_clear(llama_seq_id seq_id) {
    if (seq_id == -1) {
        clear(true);
    } else {
        close();
        llama_kvcache_check(kvc_clear_sequence(cache, ids[seq_id]));
    }
}
