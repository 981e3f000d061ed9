/* cache.h: a cache: its layers, its layer groups, the table of its sequences. */
#ifndef KVC_CACHE_H
#define KVC_CACHE_H

#include <stdatomic.h>

#include "base/status.h"
#include "base/structs.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "store/policy.h"
#include "store/rope.h"
#include "store/sequence.h"

enum { KVC_NUM_SPARES = 4 };

struct kvc_cache {
    kvc_mutex mutex; /* guards everything that changes after creation */
    kvc_memory memory;
    uint64_t size; /* of this allocation: the struct and the arrays behind it */
    const kvc_kernels *kernels;
    int prefetch_level; /* kvc_ahead */

    kvc_layer *layers;    /* [num_layers] */
    int32_t *group_of;    /* [num_layers] */
    kvc_layout *layouts;  /* [num_layers], those of a group side by side */
    int32_t *layout_of;   /* [num_layers] index into layouts */
    int32_t *rope_of;     /* [num_layers] index into ropes; -1: keys of the layer are not rotated by frequencies */
    kvc_rope *ropes;      /* [num_ropes] of frequencies, no two alike */
    double *inv_freqs;    /* what ropes point into */
    kvc_policy *policies; /* [num_groups] */
    kvc_pool *pools;      /* [num_groups] */
    int32_t num_layers, num_groups, num_ropes;
    int32_t num_token_groups; /* the first ones; then one for each cross-attention layer, and one for KVC_NONE layers */

    int32_t num_threads;
    kvc_poll_fn *poll; /* may be NULL */
    void *poll_user;
    int64_t max_seq_len, max_sequences, capacity, max_bytes; /* 0: no limit */

    kvc_table sequences;
    kvc_sequence *changed; /* list of those in which the next batch looks for rows to evict */
    kvc_sequence *spare;   /* made by kvc_reserve for the next new sequence; NULL: none */
    int64_t num_holding;   /* sequences that hold rows */
    kvc_batch *batch;      /* the open one; NULL: none */
    struct kvc_row_buffer *row_buffers;
    int64_t row_buffer_bytes; /* of the rows of all row buffers */
    int64_t num_holds;        /* kvc_hold that callers have not freed */
    int64_t num_rewrites;     /* calls that copy rows to new slots without the mutex */
    int64_t num_readers;      /* calls that read rows, of pinned blocks, without the mutex */
    int64_t num_in_place;     /* sequences whose rows are written where they lie without the mutex */
    int64_t num_waiting;      /* calls that wait for these; no reader begins until they are done */
    kvc_signal idle;          /* sent when there are fewer of any of these */
    kvc_cache *next, **link;  /* in the list of all caches of the process: atfork.c */
    kvc_stats stats;          /* counters; kvc_get_stats adds what pools count */
    struct {
        void *memory;
        uint64_t size;
    } spares[KVC_NUM_SPARES]; /* what kvc_scratch_give keeps */
};

/* Byte offset of token i in a caller's array, whose groups of inner_tokens, if that is not 0, are a batch stride apart.
 */
static inline int64_t kvc_token_offset(int32_t i, int32_t inner_tokens, int64_t token_stride, int64_t batch_stride) {
    return inner_tokens ? i / inner_tokens * batch_stride + i % inner_tokens * token_stride : i * token_stride;
}

static inline void kvc_lock(kvc_cache *cache) { kvc_mutex_lock(&cache->mutex); }

/* Returns status, so that a function may end with it. */
static inline kvc_status kvc_unlock(kvc_cache *cache, kvc_status status) {
    kvc_mutex_unlock(&cache->mutex);
    return status;
}

/* The runs of a sequence in a layer; NULL if it does not exist. */
static inline const kvc_run_list *kvc_runs_of(const kvc_cache *cache, int64_t id, int32_t layer) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    return sequence ? &sequence->runs[cache->group_of[layer]] : NULL;
}

/* The frequencies that rotate keys of a layer when they move; NULL: none do. */
static inline const kvc_rope *kvc_rope_of(const kvc_cache *cache, int32_t layer) {
    return cache->rope_of[layer] < 0 ? NULL : &cache->ropes[cache->rope_of[layer]];
}

/* The layer whose rows a layer reads: itself, unless it shares those of another. */
static inline int32_t kvc_source_of(const kvc_cache *cache, int32_t layer) {
    return cache->layers[layer].share ? cache->layers[layer].share - 1 : layer;
}

/* Whether the layer has rows of its own, and these are of tokens. */
int kvc_keeps_tokens(const kvc_cache *cache, int32_t layer);

/* The number of threads of the cache, or else of the process. */
static inline int32_t kvc_cache_threads(const kvc_cache *cache) {
    return cache->num_threads ? cache->num_threads : kvc_num_threads();
}

/* Begins watching a call of `work` multiply-adds or conversions; short calls do not poll. */
static inline void kvc_cache_watch(const kvc_cache *cache, double work, kvc_watch *watch) {
    static const double WORTH_POLLING = 1 << 22; /* about a millisecond */
    kvc_watch_init(watch, work < WORTH_POLLING ? NULL : cache->poll, cache->poll_user);
}

/* ---- sequences of the table, with the mutex held ----------------------------------------------------------------- */

/* Call once the rows of a sequence have changed: counts it if it holds rows, and has the next batch look for what it
 * may evict, until kvc_cache_unmark_changed. */
void kvc_cache_mark_changed(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_unmark_changed(kvc_sequence *sequence);

/* Does the same at the end of an edit.  A sequence that holds no token any more forgets what was evicted; if it is
 * blank then, it leaves the table. */
void kvc_cache_after_edit(kvc_cache *cache, kvc_sequence *sequence);

/* Takes a sequence out of the table and frees it. */
void kvc_cache_forget(kvc_cache *cache, kvc_sequence *sequence);

/* Does the same if it is blank; with all sequences but one, or with all if that is NULL. */
void kvc_cache_forget_blank(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_forget_all(kvc_cache *cache, const kvc_sequence *kept);

/* Whether a query at this position would miss rows that were evicted. */
int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position);

#endif
