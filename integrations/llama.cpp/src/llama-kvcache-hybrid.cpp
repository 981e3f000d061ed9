#include "llama-kvcache-hybrid.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>

// whether a layer has a recurrent state; llama_model::create_memory says the same
static bool is_recurrent(const llama_model &model, uint32_t il) {
    const auto &hparams = model.hparams;

    switch (model.arch) {
    case LLM_ARCH_FALCON_H1: return true; // layers attend and recur
    case LLM_ARCH_NEMOTRON_H:
    case LLM_ARCH_NEMOTRON_H_MOE: return hparams.is_recr(il) && hparams.n_ff(il) == 0;
    default: return hparams.is_recr(il);
    }
}

llama_kvcache_hybrid::llama_kvcache_hybrid(const llama_model &model, const llama_cparams &cparams,
                                           llama_kvcache_layers layers)
    : cparams(cparams), recr(model, GGML_TYPE_F32, GGML_TYPE_F32, cparams.offload_kqv, std::max(1u, cparams.n_seq_max),
                             cparams.n_seq_max, cparams.n_rs_seq, [&](int32_t il) { return is_recurrent(model, il); }),
      attn(model, cparams, std::move(layers), &recr) {}

static llama_memory_context_ptr failed(llama_memory_status status) {
    return std::make_unique<llama_memory_recurrent_context>(status);
}

llama_memory_context_ptr llama_kvcache_hybrid::init_batch(llama_batch_allocr &balloc, uint32_t n_ubatch,
                                                          bool embd_all) {
    attn.note_failure(__func__, "");
    balloc.split_reset();

    std::vector<llama_ubatch> ubatches;

    while (true) {
        // the last tokens of a sequence, to which it can be rolled back, stay in one ubatch
        const uint32_t n_together = cparams.n_rs_seq > 0 ? cparams.n_rs_seq + 1 : 0;

        auto ubatch = embd_all ? balloc.split_seq(n_ubatch)
                               : balloc.split_equal(n_ubatch, !cparams.kv_unified && cparams.n_seq_max > 1, n_together);

        if (ubatch.n_tokens == 0) {
            break;
        }

        ubatches.push_back(std::move(ubatch));
    }

    if (balloc.get_n_used() < balloc.get_n_tokens()) {
        return failed(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    if (!recr.prepare(ubatches)) {
        LLAMA_LOG_ERROR("%s: failed to prepare recurrent ubatches\n", __func__);
        return failed(LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }

    auto ctx_attn = attn.init_ubatches(ubatches);

    if (llama_memory_status_is_fail(ctx_attn->get_status())) {
        return ctx_attn;
    }

    return std::make_unique<llama_kvcache_hybrid_context>(
        std::move(ctx_attn), std::make_unique<llama_memory_recurrent_context>(&recr, std::move(ubatches)));
}

llama_memory_context_ptr llama_kvcache_hybrid::init_full() {
    return std::make_unique<llama_kvcache_hybrid_context>(attn.init_full(), recr.init_full());
}

llama_memory_context_ptr llama_kvcache_hybrid::init_update(llama_context *lctx, bool optimize) {
    return std::make_unique<llama_kvcache_hybrid_context>(attn.init_update(lctx, optimize),
                                                          recr.init_update(lctx, optimize));
}

bool llama_kvcache_hybrid::get_can_shift() const { return attn.get_can_shift(); }

void llama_kvcache_hybrid::clear(bool data) {
    attn.clear(data);
    recr.clear(data);
}

// either part may refuse, and nothing changes then
bool llama_kvcache_hybrid::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    return attn.can_remove(seq_id, p0, p1) && recr.seq_rm(seq_id, p0, p1) && attn.seq_rm(seq_id, p0, p1);
}

void llama_kvcache_hybrid::seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) {
    if (attn.copy(seq_id_src, seq_id_dst, p0, p1)) {
        recr.seq_cp(seq_id_src, seq_id_dst, p0, p1);
    }
}

void llama_kvcache_hybrid::seq_keep(llama_seq_id seq_id) {
    attn.seq_keep(seq_id);
    recr.seq_keep(seq_id);
}

void llama_kvcache_hybrid::seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (attn.shift(seq_id, p0, p1, shift)) {
        recr.seq_add(seq_id, p0, p1, shift);
    }
}

void llama_kvcache_hybrid::seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) {
    if (attn.divide(seq_id, p0, p1, d)) {
        recr.seq_div(seq_id, p0, p1, d);
    }
}

llama_pos llama_kvcache_hybrid::seq_pos_min(llama_seq_id seq_id) const {
    return std::max(attn.seq_pos_min(seq_id), recr.seq_pos_min(seq_id));
}

llama_pos llama_kvcache_hybrid::seq_pos_max(llama_seq_id seq_id) const {
    return std::min(attn.seq_pos_max(seq_id), recr.seq_pos_max(seq_id));
}

std::map<ggml_backend_buffer_type_t, size_t> llama_kvcache_hybrid::memory_breakdown() const {
    auto res = attn.memory_breakdown();

    for (const auto &[buft, size] : recr.memory_breakdown()) {
        res[buft] += size;
    }

    return res;
}

// a partial state has no rows of full attention
bool llama_kvcache_hybrid::has_attn_state(llama_state_seq_flags flags) const {
    return attn.has_partial_state() || (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 0;
}

void llama_kvcache_hybrid::state_write(llama_io_write_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
    if (has_attn_state(flags)) {
        attn.state_write(io, seq_id, flags);
    }

    recr.state_write(io, seq_id, flags);
}

void llama_kvcache_hybrid::state_read(llama_io_read_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) {
    try {
        if (has_attn_state(flags)) {
            attn.state_read(io, seq_id, flags);
        }

        recr.state_read(io, seq_id, flags);
    } catch (...) { // neither part goes on without the other
        if (has_attn_state(flags)) {
            attn.state_clear(seq_id);
        }
        if (seq_id == -1) {
            recr.clear(true);
        } else {
            recr.seq_rm(seq_id, -1, -1);
        }

        throw;
    }
}

llama_kvcache_hybrid_context::llama_kvcache_hybrid_context(llama_memory_context_ptr attn, llama_memory_context_ptr recr)
    : attn(std::move(attn)), recr(std::move(recr)) {}

bool llama_kvcache_hybrid_context::next() {
    recr->next();

    return attn->next();
}

bool llama_kvcache_hybrid_context::apply() {
    const bool res = attn->apply();

    return recr->apply() && res;
}

const llama_ubatch &llama_kvcache_hybrid_context::get_ubatch() const { return attn->get_ubatch(); }

llama_memory_status llama_kvcache_hybrid_context::get_status() const {
    return llama_memory_status_combine(attn->get_status(), recr->get_status());
}

const llama_memory_recurrent_context *llama_kvcache_hybrid_context::get_recr() const {
    return static_cast<const llama_memory_recurrent_context *>(recr.get());
}
