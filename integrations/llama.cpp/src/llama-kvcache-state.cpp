#include "llama-kvcache-state.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

llama_kvcache::state_part llama_kvcache::state_part_of(bool is_swa, bool is_index) const {
    const bool has_windows = model.hparams.swa_type != LLAMA_SWA_TYPE_NONE;
    const auto &of_model = is_index ? layers.indexer : layers.attention;

    state_part res = {is_swa, is_index, -1, {}, std::vector<uint8_t>(layers.cache.size(), 0)};

    for (uint32_t il = 0; il < of_model.size(); ++il) {
        const int32_t layer = of_model[il];
        const bool is_blank = !is_index && llama_kvcache_is_blank(model, il);

        if ((layer < 0 && !is_blank) || (has_windows && model.hparams.is_swa(il) != is_swa)) {
            continue;
        }
        if (layer >= 0) {
            res.replaced[layer] = !is_index;
            res.first = res.first < 0 ? layer : res.first;
        }
        if (!is_index && layers.indexer[il] >= 0) {
            res.replaced[layers.indexer[il]] = 1; // restored with the other rows of their tokens
        }
        if (layer < 0 || layers.cache[layer].share == 0) {
            res.layers.push_back(layer);
        }
    }

    res.first = std::max(res.first, 0); // llama.cpp has cells without layers, too

    return res;
}

std::vector<llama_kvcache::state_part> llama_kvcache::state_parts(llama_state_seq_flags flags) const {
    const bool has_windows = model.hparams.swa_type != LLAMA_SWA_TYPE_NONE;

    std::vector<state_part> res;

    if (!has_windows || !(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        res.push_back(state_part_of(false, false));
        if (layers.choice.width > 0) {
            res.push_back(state_part_of(false, true));
        }
    }
    if (has_windows) {
        res.push_back(state_part_of(true, false));
    }

    return res;
}

llama_kvcache::state_row llama_kvcache::state_row_of(int32_t layer, bool is_value) const {
    state_row res = {};

    res.type = is_value ? layers.cache[0].v_type : layers.cache[0].k_type;

    if (layer < 0) {
        return res;
    }

    const auto &l = layers.cache[layer];
    const auto &m = layers.model[layer];

    // llama.cpp has values beside the keys of an indexer, which nobody reads
    const int32_t n_dims = !is_value ? l.k_dim : m.is_index ? (int32_t)model.hparams.n_embd_head_v(m.il) : l.v_dim;

    res.n_heads = l.num_kv_heads;
    res.n_elements = l.num_kv_heads * n_dims;
    res.n_head_bytes = kvc_row_bytes(res.type, n_dims);
    res.n_bytes = res.n_head_bytes * res.n_heads;

    return res;
}

llama_kvcache::batch_ptr llama_kvcache::begin_restored(const std::vector<int32_t> &positions,
                                                       const std::vector<int64_t> &seq_ids,
                                                       const std::vector<uint8_t> &replaced) {
    kvc_begin_args args = {};

    args.struct_size = sizeof(args);
    args.num_tokens = (int32_t)positions.size();
    args.positions = positions.data();
    args.seq_ids = seq_ids.data();
    args.replaced = replaced.data();

    kvc_batch *res = nullptr;

    if (kvc_begin_with(cache, &args, &res)) {
        throw llama_kvcache_state_failure(format("%zu cells do not fit: %s", positions.size(), kvc_last_error()));
    }

    return {res, kvc_abort};
}

bool llama_kvcache::has_partial_state() const { return model.hparams.swa_type != LLAMA_SWA_TYPE_NONE || has_strides(); }

uint32_t llama_kvcache::n_stream() const { return cparams.kv_unified ? 1 : cparams.n_seq_max; }

void llama_kvcache::state_clear(llama_seq_id seq_id) {
    if (seq_id == -1) {
        clear(true);
    } else {
        close();
        llama_kvcache_check(kvc_clear_sequence(cache, id_of(seq_id)));
    }
}
