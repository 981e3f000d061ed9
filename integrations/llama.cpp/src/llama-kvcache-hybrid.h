// The memory of hybrid models: llama_kvcache for the layers that attend, beside llama.cpp's recurrent memory for the
// others.  What llama_memory_hybrid and llama_memory_hybrid_iswa are to llama.cpp's own caches.
#pragma once

#include "llama-kvcache.h"
#include "llama-memory-recurrent.h"

class llama_kvcache_hybrid : public llama_memory_i {
  public:
    llama_kvcache_hybrid(const llama_model &model, const llama_cparams &cparams, llama_kvcache_layers layers);

    //
    // llama_memory_i
    //

    llama_memory_context_ptr init_batch(llama_batch_allocr &balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context *lctx, bool optimize) override;

    bool get_can_shift() const override;

    void clear(bool data) override;

    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id seq_id_src, llama_seq_id seq_id_dst, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id seq_id) override;
    void seq_add(llama_seq_id seq_id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id seq_id, llama_pos p0, llama_pos p1, int d) override;

    llama_pos seq_pos_min(llama_seq_id seq_id) const override;
    llama_pos seq_pos_max(llama_seq_id seq_id) const override;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;

    void state_write(llama_io_write_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i &io, llama_seq_id seq_id, llama_state_seq_flags flags) override;

    llama_memory_kvcache_i *get_kvcache() override { return &attn; }

  private:
    bool has_attn_state(llama_state_seq_flags flags) const;

    const llama_cparams &cparams;

    llama_memory_recurrent recr;
    llama_kvcache attn; // which keeps the states of recr with its prompts
};

class llama_kvcache_hybrid_context : public llama_memory_context_i {
  public:
    llama_kvcache_hybrid_context(llama_memory_context_ptr attn, llama_memory_context_ptr recr);

    bool next() override;
    bool apply() override;

    const llama_ubatch &get_ubatch() const override;
    llama_memory_status get_status() const override;

    const llama_memory_attn_i *get_attn_impl() const override { return attn->get_attn_impl(); }
    const llama_memory_recurrent_context *get_recr() const override;

  private:
    const llama_memory_context_ptr attn;
    const llama_memory_context_ptr recr;
};
