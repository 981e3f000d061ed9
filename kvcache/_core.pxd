"""The declarations of include/kvcache.h that the extension module uses. The header explains them."""

from libc.stdint cimport int32_t, int64_t, uint8_t


cdef extern from "kvcache.h" nogil:
    ctypedef enum kvc_status:
        KVC_OK
        KVC_ERR_INVALID
        KVC_ERR_INDEX
        KVC_ERR_FULL
        KVC_ERR_NOMEM
        KVC_ERR_UNSUPPORTED
        KVC_ERR_BUSY
        KVC_ERR_HELD
        KVC_ERR_GONE
        KVC_ERR_CANCELLED
        KVC_ERR_CALLBACK
        KVC_ERR_FORMAT
        KVC_ERR_STORE

    cdef enum:
        KVC_F32
        KVC_F16
        KVC_BF16
        KVC_Q8_0
        KVC_TRANSFORM_NONE
        KVC_TRANSFORM_HADAMARD
        KVC_FULL
        KVC_SLIDING
        KVC_CHUNKED
        KVC_CROSS
        KVC_NONE
        KVC_ROPE_UNKNOWN
        KVC_ROPE_NONE
        KVC_ROPE_FREQUENCIES
        KVC_ROPE_FUNCTION
        KVC_END
        KVC_MAX_BATCH

    int32_t kvc_version()
    const char *kvc_build_info()
    const char *kvc_isa()
    int32_t kvc_num_threads()
    const char *kvc_threading_layer()
    const char *kvc_type_name(int32_t type)
    size_t kvc_row_bytes(int32_t type, int32_t dim)
    const char *kvc_last_error()
    void kvc_set_last_error(const char *format, ...)
    kvc_status kvc_set_num_threads(int32_t num_threads)

    ctypedef struct kvc_policy:
        int32_t kind, window, num_sink_tokens, attention_chunk_size, resume_window, max_len, stride

    ctypedef int32_t kvc_shift_fn(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                                  int32_t k_dim, int32_t delta) noexcept

    ctypedef struct kvc_rope:
        int32_t kind, interleaved, first_dim, num_freqs
        const double *inv_freq
        kvc_shift_fn *shift
        void *user

    ctypedef struct kvc_layer:
        int32_t num_kv_heads, k_dim, v_dim, k_type, v_type, k_transform, v_transform, value_in_key, share
        kvc_policy policy
        kvc_rope rope
        int32_t sketch_bits

    ctypedef int32_t kvc_poll_fn(void *user) noexcept

    ctypedef struct kvc_config:
        size_t struct_size
        const kvc_layer *layers
        size_t layer_size
        int32_t num_layers, block_size
        int64_t max_seq_len, max_sequences, capacity, max_bytes
        int32_t num_threads
        kvc_poll_fn *poll
        void *poll_user

    ctypedef struct kvc_cache
    ctypedef struct kvc_batch
    ctypedef struct kvc_hold

    kvc_status kvc_cache_new(const kvc_config *config, kvc_cache **cache)
    kvc_status kvc_cache_clone(kvc_cache *cache, kvc_cache **clone)
    kvc_status kvc_cache_free(kvc_cache *cache)

    int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer)
    kvc_status kvc_position_range(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *first, int32_t *last)
    int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id)
    int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position)
    int32_t kvc_exact_to(kvc_cache *cache, int64_t seq_id)
    kvc_status kvc_mark_inexact(kvc_cache *cache, int64_t seq_id, int32_t position)
    int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids)
    int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions, int64_t max_positions)

    kvc_status kvc_clear(kvc_cache *cache)
    kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id)
    kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id)
    kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length)
    kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst)
    kvc_status kvc_share(kvc_cache *cache, int64_t src, int64_t dst, int32_t begin, int32_t end)
    kvc_status kvc_remove(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift)
    kvc_status kvc_keep_positions(kvc_cache *cache, int64_t seq_id, const int32_t *positions, int64_t num_positions)
    kvc_status kvc_truncate(kvc_cache *cache, int64_t seq_id, int32_t length)
    kvc_status kvc_shift(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t delta)
    kvc_status kvc_divide(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t divisor)
    kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens)
    kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens)
    kvc_status kvc_compact(kvc_cache *cache)

    cdef enum:
        KVC_NAME_BYTES

    ctypedef struct kvc_prefix:
        pass

    ctypedef struct kvc_tokens:
        size_t struct_size
        const int64_t *ids
        int64_t num_tokens
        const uint8_t *digests

    ctypedef struct kvc_prefix_config:
        size_t struct_size
        const void *salt
        int64_t salt_size
        const void *identity
        int64_t identity_size, quota, ttl_ms
        const void *secret
        int64_t secret_size
        int32_t reuse_min_tokens, collects_new
        void *user
        int64_t state_bytes, max_checkpoint_bytes
        int32_t max_events

    ctypedef struct kvc_prefix_event:
        int32_t kind, begin
        uint8_t name[32]

    ctypedef struct kvc_prefix_stats:
        int64_t requests, hits, tokens, matched, reused, blocks, sequences, checkpoints, checkpoint_bytes

    ctypedef struct kvc_new_block:
        void *user
        int64_t id
        uint8_t name[32]

    kvc_status kvc_prefix_new(kvc_cache *cache, const kvc_prefix_config *config, kvc_prefix **prefix)
    void kvc_prefix_free(kvc_prefix *prefix)
    int64_t kvc_new_sequence(kvc_cache *cache)
    kvc_status kvc_prefix_acquire(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t max_matched, int64_t *seq_id,
                                  int32_t *matched)
    kvc_status kvc_prefix_release(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *tokens)
    kvc_status kvc_prefix_checkpoint(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *tokens, const void *state,
                                     int64_t num_bytes)
    kvc_status kvc_prefix_state(kvc_prefix *prefix, int64_t seq_id, void *state, int64_t max_bytes, int64_t *num_bytes)
    kvc_status kvc_prefix_lookup(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t *matched, int32_t *with_rows)
    kvc_status kvc_prefix_pin(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t *kept)
    kvc_status kvc_prefix_unpin(kvc_prefix *prefix, const kvc_tokens *tokens)
    kvc_status kvc_prefix_evict(kvc_prefix *prefix, int64_t num_tokens, int64_t *num_evicted)
    kvc_status kvc_prefix_clear(kvc_prefix *prefix)
    kvc_status kvc_prefix_identity(const kvc_cache *cache, const void *fingerprint, int64_t size, uint8_t *identity)
    kvc_status kvc_prefix_forget(kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *names, int64_t max_names,
                                 int64_t *num_names, int64_t *num_dropped)
    kvc_status kvc_prefix_end_forget(kvc_prefix *prefix)
    kvc_status kvc_prefix_names(kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *names, int64_t max_names,
                                int64_t *num_names)
    kvc_status kvc_prefix_take_events(kvc_prefix *prefix, kvc_prefix_event *events, size_t event_size,
                                      int64_t max_events, int64_t *num_events, int64_t *num_lost)
    kvc_status kvc_take_new_blocks(kvc_cache *cache, kvc_new_block *blocks, size_t new_block_size, int64_t max_blocks,
                                   int64_t *num_blocks)
    void kvc_prefix_get_stats(kvc_prefix *prefix, kvc_prefix_stats *stats, size_t stats_size)

    ctypedef struct kvc_store:
        size_t struct_size
        void *user
        kvc_status (*read)(void *user, const uint8_t *name, void *value, int64_t max_bytes,
                           int64_t *size) noexcept nogil
        kvc_status (*write)(void *user, const uint8_t *name, const void *value, int64_t size) noexcept nogil
        kvc_status (*remove)(void *user, const uint8_t *name) noexcept nogil

    kvc_status kvc_prefix_fetch(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t max_matched,
                                const kvc_store *store, int32_t *fetched)
    kvc_status kvc_store_block(kvc_cache *cache, int64_t id, const kvc_store *store, int64_t *size)
    kvc_status kvc_dir_store_new(const char *path, int64_t max_bytes, kvc_store **store)
    void kvc_dir_store_free(kvc_store *store)

    ctypedef int32_t kvc_write_fn(void *user, const void *data, size_t size) noexcept
    ctypedef int32_t kvc_read_fn(void *user, void *data, size_t size) noexcept

    ctypedef struct kvc_save_args:
        size_t struct_size
        kvc_write_fn *write
        void *user
        const int64_t *seq_ids
        int64_t num_sequences
        const int64_t *tokens
        const int64_t *num_tokens
        const char *fingerprint

    ctypedef struct kvc_load_args:
        size_t struct_size
        kvc_read_fn *read
        void *user
        int64_t size
        const char *fingerprint
        const int64_t *seq_ids
        const int64_t *to_ids
        int64_t num_sequences

    kvc_status kvc_save(kvc_cache *cache, const kvc_save_args *args)
    kvc_status kvc_load(const kvc_load_args *args, kvc_cache **cache)
    kvc_status kvc_restore(kvc_cache *cache, const kvc_load_args *args)

    ctypedef struct kvc_stats:
        int64_t batches, aborted, tokens, rows_expired, rows_moved, compactions
        int64_t blocks_opened, blocks_reused, blocks_returned
        int64_t live_slots, wasted_slots, blocks_in_use, blocks_free, rows_copied
        int64_t rows_evicted, retained, evictable_slots

    void kvc_get_stats(kvc_cache *cache, kvc_stats *stats, size_t stats_size)
    int64_t kvc_nbytes(kvc_cache *cache)
    int32_t kvc_block_size(kvc_cache *cache)
    int64_t kvc_capacity(kvc_cache *cache)
    int64_t kvc_capacity_bytes(kvc_cache *cache)
    double kvc_utilization(kvc_cache *cache)
    kvc_status kvc_validate(kvc_cache *cache)

    ctypedef struct kvc_block_info:
        int32_t num_slots, filled, live, references, resident, is_held
        int64_t bytes

    ctypedef struct kvc_run_info:
        int64_t seq_id
        int32_t block, slot, count, position, delta, in_batch, is_kept

    kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                          int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                          int64_t max_runs, int64_t *num_runs)

    ctypedef struct kvc_span:
        const void *k
        const void *v
        int64_t k_head_stride, k_row_stride, v_head_stride, v_row_stride
        int32_t num_rows, position, delta
        const void *k_scales
        const void *v_scales

    kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                         int64_t max_spans, int64_t *num_spans, kvc_hold **hold)
    void kvc_hold_free(kvc_hold *hold)

    ctypedef struct kvc_rows_out:
        size_t struct_size
        int32_t type
        void *k
        void *v
        int64_t k_head_stride, k_row_stride, v_head_stride, v_row_stride
        int32_t *positions
        int64_t *num_stored
        int32_t raw
        kvc_batch *batch

    kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                          const kvc_rows_out *out)
    kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                           const kvc_rows_out *out)

    ctypedef struct kvc_rows_in:
        size_t struct_size
        const void *k
        const void *v
        int64_t k_head_stride, k_row_stride, v_head_stride, v_row_stride
        int32_t k_type, v_type, skip_missing
        int64_t *num_replaced

    kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                          const kvc_rows_in *rows)

    ctypedef struct kvc_begin_args:
        size_t struct_size
        int32_t num_tokens
        const int32_t *positions
        const int64_t *seq_ids
        const int32_t *parents
        const uint8_t *unstored
        int64_t timeout_ms
        const uint8_t *replaced
    kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **batch)
    const int32_t *kvc_batch_positions(const kvc_batch *batch)

    ctypedef struct kvc_put_args:
        size_t struct_size
        int32_t first, num_tokens
        const void *k
        const void *v
        int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride
        int32_t k_type, v_type, tokens_per_sequence
        int64_t k_batch_stride, v_batch_stride, seq_id

    kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *args)
    kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                         kvc_hold **hold)
    kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens)

    ctypedef struct kvc_chosen:
        size_t struct_size
        const int32_t *positions
        int32_t num_choices, width, block, tail

    ctypedef struct kvc_attend_args:
        size_t struct_size
        const void *q
        void *out
        float *lse
        const float *sinks
        const float *alibi
        int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride
        int32_t q_type
        float scale, softcap
        const kvc_put_args *put
        int32_t tokens_per_sequence
        int64_t q_batch_stride, out_batch_stride, lse_batch_stride
        const kvc_chosen *chosen
        const void *prior_out
        const float *prior_lse
        int32_t out_is_f32

    ctypedef struct kvc_masked:
        int64_t seq_id
        int32_t begin, end

    ctypedef struct kvc_plan_args:
        size_t struct_size
        int32_t layer, first, num_tokens, num_heads
        const uint8_t *non_causal
        const kvc_masked *masked
        size_t masked_size
        int32_t num_masked, select_rows, precision

    kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *plan, const kvc_attend_args *args)

    ctypedef struct kvc_choose_args:
        size_t struct_size
        const void *q
        const float *weights
        const int32_t *among
        int32_t *chosen
        float *scores
        int64_t q_token_stride, q_head_stride, weights_token_stride, weights_head_stride
        int32_t q_type
        float scale
        int32_t relu, num_choices, width, among_width, block, num_first, num_local, tokens_per_sequence
        int64_t q_batch_stride, weights_batch_stride

    cdef enum:
        KVC_REDUCE_SUM
        KVC_REDUCE_MAX

    ctypedef struct kvc_weights_args:
        size_t struct_size
        const void *q
        float *weights
        const int32_t *positions
        const float *sinks
        int64_t q_token_stride, q_head_stride, weights_head_stride, num_rows
        int32_t num_queries, num_heads, q_type, reduction, rotates
        float scale, softcap

    kvc_status kvc_weights(kvc_cache *cache, int64_t seq_id, int32_t layer, const kvc_weights_args *args)
    kvc_status kvc_choose(kvc_batch *batch, const kvc_plan_args *plan, const kvc_choose_args *args)
    kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows)
    kvc_status kvc_dense_sequences(kvc_batch *batch, int32_t layer, int32_t *num_sequences, int64_t *most_rows)

    ctypedef struct kvc_dense_args:
        size_t struct_size
        const kvc_rows_out *rows
        float *mask
        int64_t num_rows
        const uint8_t *non_causal
        uint8_t *seen
        int32_t by_sequence
        int64_t k_batch_stride, v_batch_stride
        const kvc_masked *masked
        size_t masked_size
        int32_t num_masked

    kvc_status kvc_batch_spans(kvc_batch *batch, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                               int64_t max_spans, int64_t *num_spans, kvc_hold **hold)
    kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *args)
    kvc_status kvc_commit(kvc_batch *batch)
    kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept)
    void kvc_abort(kvc_batch *batch)


cdef extern from "rows/stride.h" nogil:
    # The one rule that a caller needs, too, as it counts the rows of its arrays. Its functions are inline.
    int32_t kvc_rows_below(int32_t position, int32_t stride)
    int32_t kvc_count_rows_at(const int32_t *positions, int32_t num_tokens, int32_t stride)
    int32_t kvc_tokens_with_rows(const int32_t *positions, int32_t num_tokens, int32_t stride, int64_t num_rows)
