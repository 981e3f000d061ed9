#ifndef KVCACHE_H
#define KVCACHE_H

#include <stddef.h>
#include <stdint.h>

#define KVC_VERSION_MAJOR 0
#define KVC_VERSION_MINOR 2
#define KVC_VERSION_PATCH 0

#if defined(_WIN32) && defined(KVC_SHARED)
#ifdef KVC_BUILD
#define KVC_API __declspec(dllexport)
#else
#define KVC_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define KVC_API __attribute__((visibility("default")))
#else
#define KVC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

KVC_API int32_t kvc_version(void);
KVC_API const char *kvc_build_info(void);
KVC_API const char *kvc_isa(void);
KVC_API int32_t kvc_num_threads(void);

#define KVC_STATUS_LIST(X)                                                                                             \
    X(KVC_OK, 0, "success")                                                                                            \
    X(KVC_ERR_INVALID, 1, "an argument is invalid")                                                                    \
    X(KVC_ERR_INDEX, 2, "a layer, token or row is out of range")                                                       \
    X(KVC_ERR_FULL, 3, "the tokens do not fit")                                                                        \
    X(KVC_ERR_NOMEM, 4, "out of memory")                                                                               \
    X(KVC_ERR_UNSUPPORTED, 5, "not supported")                                                                         \
    X(KVC_ERR_BUSY, 6, "an open batch is using it")                                                                    \
    X(KVC_ERR_HELD, 7, "a view is holding it")                                                                         \
    X(KVC_ERR_GONE, 8, "rows that would be seen were evicted")                                                         \
    X(KVC_ERR_CANCELLED, 9, "cancelled")                                                                               \
    X(KVC_ERR_CORRUPT, 10, "an invariant does not hold")                                                               \
    X(KVC_ERR_CALLBACK, 11, "a function of the caller failed")

typedef enum kvc_status {
#define KVC_STATUS_ENUM(name, value, text) name = value,
    KVC_STATUS_LIST(KVC_STATUS_ENUM)
#undef KVC_STATUS_ENUM
} kvc_status;
KVC_API const char *kvc_strerror(kvc_status status);
KVC_API const char *kvc_last_error(void);
KVC_API kvc_status kvc_set_num_threads(int32_t num_threads);

typedef enum kvc_type {
    KVC_F32 = 0,
    KVC_F16 = 1,
    KVC_BF16 = 2,

    KVC_Q8_0 = 3,
    KVC_Q4_0 = 4
} kvc_type;

typedef enum kvc_policy_kind {
    KVC_FULL = 0,
    KVC_SLIDING = 1,
    KVC_CHUNKED = 2,
    KVC_CROSS = 3,
    KVC_NONE = 4
} kvc_policy_kind;

typedef struct kvc_policy {
    int32_t kind;
    int32_t window;
    int32_t num_sink_tokens;
    int32_t resume_window;
    int32_t attention_chunk_size;
    int32_t max_len;
    int32_t reserved[3];
} kvc_policy;

typedef enum kvc_rope_kind {
    KVC_ROPE_UNKNOWN = 0,
    KVC_ROPE_NONE = 1,
    KVC_ROPE_FREQUENCIES = 2,
    KVC_ROPE_FUNCTION = 3
} kvc_rope_kind;

typedef int32_t kvc_shift_fn(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                             int32_t k_dim, int32_t delta);

typedef struct kvc_rope {
    int32_t kind;
    int32_t interleaved;
    int32_t first_dim;
    int32_t num_freqs;
    const double *inv_freq;
    kvc_shift_fn *shift;
    void *user;
    int64_t reserved[2];
} kvc_rope;

typedef struct kvc_layer {
    int32_t num_kv_heads;
    int32_t k_dim;
    int32_t v_dim;
    int32_t k_type;
    int32_t v_type;
    int32_t k_transform;
    int32_t v_transform;
    int32_t value_in_key;
    int32_t share;
    kvc_policy policy;
    kvc_rope rope;
} kvc_layer;

typedef enum kvc_memory_kind {
    KVC_MEMORY_ROWS = 0,
    KVC_MEMORY_BOOKKEEPING = 1,
    KVC_MEMORY_SCRATCH = 2
} kvc_memory_kind;

typedef struct kvc_memory_hint {
    size_t struct_size;
    int32_t kind;
    int32_t group;
    int32_t first_head;
    int32_t end_head;
} kvc_memory_hint;

typedef struct kvc_allocator {
    size_t struct_size;
    void *user;
    void *(*alloc)(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint);
    void (*free)(void *user, void *memory, size_t size, const kvc_memory_hint *hint);
    void (*purge)(void *user, void *memory, size_t size);
} kvc_allocator;

typedef int32_t kvc_poll_fn(void *user);

typedef struct kvc_config {
    size_t struct_size;
    const kvc_layer *layers;
    size_t layer_size;
    int32_t num_layers;
    int32_t block_size;
    int64_t max_seq_len;
    int64_t max_sequences;
    int64_t capacity;
    int64_t max_bytes;
    int32_t num_threads;
    const kvc_allocator *allocator;
    kvc_poll_fn *poll;
    void *poll_user;
} kvc_config;

typedef struct kvc_cache kvc_cache;
typedef struct kvc_batch kvc_batch;
typedef struct kvc_hold kvc_hold;
typedef struct kvc_plan kvc_plan;
KVC_API kvc_status kvc_cache_new(const kvc_config *config, kvc_cache **cache);
KVC_API kvc_status kvc_cache_clone(kvc_cache *cache, kvc_cache **clone);
KVC_API kvc_status kvc_cache_free(kvc_cache *cache);
KVC_API int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer);
KVC_API int32_t kvc_first_position(kvc_cache *cache, int64_t seq_id);
KVC_API int32_t kvc_last_position(kvc_cache *cache, int64_t seq_id);
KVC_API int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id);
KVC_API int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position);
KVC_API int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids);
KVC_API int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions,
                              int64_t max_positions);

#define KVC_END INT32_MAX

KVC_API kvc_status kvc_clear(kvc_cache *cache);
KVC_API kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id);
KVC_API kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id);
KVC_API kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length);
KVC_API kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst);
KVC_API kvc_status kvc_remove(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift);
KVC_API kvc_status kvc_truncate(kvc_cache *cache, int64_t seq_id, int32_t length);
KVC_API kvc_status kvc_shift(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t delta);
KVC_API kvc_status kvc_divide(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t divisor);
KVC_API kvc_status kvc_settle(kvc_cache *cache);
KVC_API kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens);
KVC_API kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens);
KVC_API kvc_status kvc_compact(kvc_cache *cache);

typedef struct kvc_stats {
    int64_t batches;
    int64_t aborted;
    int64_t tokens;
    int64_t rows_evicted;
    int64_t rows_moved;
    int64_t compactions;
    int64_t blocks_opened;
    int64_t blocks_reused;
    int64_t blocks_returned;
    int64_t live_slots;
    int64_t wasted_slots;
    int64_t blocks_in_use;
    int64_t blocks_free;
    int64_t rows_copied;
} kvc_stats;
KVC_API void kvc_get_stats(kvc_cache *cache, kvc_stats *stats, size_t stats_size);
KVC_API int64_t kvc_nbytes(kvc_cache *cache);
KVC_API int32_t kvc_block_size(kvc_cache *cache);
KVC_API int64_t kvc_capacity(kvc_cache *cache);
KVC_API int64_t kvc_capacity_bytes(kvc_cache *cache);
KVC_API double kvc_utilization(kvc_cache *cache);

typedef struct kvc_block_info {
    int32_t num_slots;
    int32_t filled;
    int32_t live;
    int32_t references;
    int32_t resident;
    int32_t is_held;
    int32_t is_free;
} kvc_block_info;

typedef struct kvc_run_info {
    int64_t seq_id;
    int32_t block;
    int32_t slot;
    int32_t count;
    int32_t position;
    int32_t delta;
    int32_t in_batch;
} kvc_run_info;
KVC_API kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                              int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                              int64_t max_runs, int64_t *num_runs);
KVC_API kvc_status kvc_validate(kvc_cache *cache);

typedef struct kvc_span {
    const void *k;
    const void *v;
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t num_rows;
    int32_t position;
    int32_t delta;
    int32_t reserved;
} kvc_span;
KVC_API kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                             int64_t max_spans, int64_t *num_spans, kvc_hold **hold);
KVC_API void kvc_hold_free(kvc_hold *hold);

typedef struct kvc_rows_out {
    size_t struct_size;
    int32_t type;
    void *k;
    void *v;
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t *positions;
    int64_t *num_stored;
} kvc_rows_out;
KVC_API kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                              const kvc_rows_out *out);
KVC_API kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                               const kvc_rows_out *out);

typedef struct kvc_rows_in {
    size_t struct_size;
    const void *k;
    const void *v;
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t k_type;
    int32_t v_type;
    int32_t skip_missing;
    int64_t *num_replaced;
} kvc_rows_in;
KVC_API kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                              const kvc_rows_in *in);
KVC_API int64_t kvc_find_row(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t position);

#define KVC_MAX_BATCH (1 << 24)

KVC_API kvc_status kvc_begin(kvc_cache *cache, int32_t num_tokens, const int32_t *positions, const int64_t *seq_ids,
                             const int32_t *parents, kvc_batch **batch);

typedef struct kvc_begin_args {
    size_t struct_size;
    int32_t num_tokens;
    const int32_t *positions;
    const int64_t *seq_ids;
    const int32_t *parents;
    const uint8_t *unstored;
} kvc_begin_args;
KVC_API kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **batch);
KVC_API const int32_t *kvc_batch_positions(const kvc_batch *batch);

typedef struct kvc_put_args {
    size_t struct_size;
    int32_t first;
    int32_t num_tokens;
    const void *k;
    const void *v;
    int64_t k_token_stride, k_head_stride;
    int64_t v_token_stride, v_head_stride;
    int32_t k_type;
    int32_t v_type;
    int32_t inner_tokens;
    int64_t k_batch_stride, v_batch_stride;
    int64_t seq_id;
} kvc_put_args;
KVC_API kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *args);
KVC_API kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                             kvc_hold **hold);
KVC_API kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens);

typedef struct kvc_attend_args {
    size_t struct_size;
    const void *q;
    void *out;
    float *lse;
    const float *sinks;
    const float *alibi;
    const volatile int32_t *cancel;
    int64_t q_token_stride, q_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_token_stride, lse_head_stride;
    int32_t q_type;
    float scale;
    float softcap;
    const kvc_put_args *put;
    int32_t inner_tokens;
    int64_t q_batch_stride, out_batch_stride, lse_batch_stride;
} kvc_attend_args;

typedef struct kvc_plan_args {
    size_t struct_size;
    int32_t layer;
    int32_t first;
    int32_t num_tokens;
    int32_t num_heads;
    int32_t num_threads;
    const uint8_t *non_causal;
} kvc_plan_args;
KVC_API kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *plan, const kvc_attend_args *args);
KVC_API kvc_status kvc_plan_new(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **plan);
KVC_API void kvc_plan_free(kvc_plan *plan);
KVC_API int64_t kvc_plan_num_tasks(const kvc_plan *plan);
KVC_API kvc_status kvc_plan_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, int64_t task);
KVC_API kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows);
KVC_API kvc_status kvc_dense_sequences(kvc_batch *batch, int32_t layer, int32_t *num_sequences, int64_t *most_rows);

typedef struct kvc_dense_args {
    size_t struct_size;
    const kvc_rows_out *rows;
    float *mask;
    int64_t mask_token_stride;
    int64_t num_rows;
    const uint8_t *non_causal;
    uint8_t *seen;
    int64_t seen_token_stride;
    int32_t by_sequence;
    int64_t k_batch_stride, v_batch_stride;
} kvc_dense_args;
KVC_API kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *args);
KVC_API kvc_status kvc_commit(kvc_batch *batch);
KVC_API kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept);
KVC_API void kvc_abort(kvc_batch *batch);

#ifdef __cplusplus
}
#endif
#endif
