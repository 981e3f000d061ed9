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

    kvc_layer *layers;   /* [num_layers] */
    int32_t *group_of;   /* [num_layers] */
    kvc_layout *layouts; /* [num_layers], those of a group side by side */
    int32_t *layout_of;  /* [num_layers] index into layouts */
    int32_t *rope_of;    /* [num_layers] index into ropes of what turns the layer's keys where they move; -1: nothing */
    kvc_rope *ropes;     /* [num_ropes] of frequencies, all different */
    double *inv_freqs;   /* what ropes point into */
    kvc_policy *policies; /* [num_groups] */
    kvc_pool *pools;      /* [num_groups] */
    int32_t num_layers, num_groups, num_ropes;
    int32_t num_token_groups; /* those first; then one for each cross-attention layer, and one for layers without */

    int32_t num_threads;
    kvc_poll_fn *poll; /* may be NULL */
    void *poll_user;
    int64_t max_seq_len, max_sequences, capacity, max_bytes; /* 0: no limit */

    kvc_table sequences;
    kvc_sequence *changed; /* those that may have something to evict, as they changed since they last had not */
    kvc_sequence *spare;   /* one that kvc_reserve made, for the next new one; NULL: none */
    int64_t num_holding;   /* sequences that hold rows */
    kvc_batch *batch;      /* the open one */
    struct kvc_sheet *sheets;
    int64_t sheet_bytes; /* of their rows */
    int64_t num_holds, num_rewrites;
    int64_t num_readers;     /* calls that copy rows, whose blocks they pin, without the mutex */
    int64_t num_in_place;    /* sequences */
    int64_t num_waiting;     /* calls of kvc_cache_wait: until they are done no reader begins */
    kvc_signal idle;         /* there are fewer of these */
    kvc_cache *next, **link; /* the caches of the process: atfork.c */
    kvc_stats stats;         /* its counters; what is counted now is filled in when asked for */
    struct {
        void *memory;
        uint64_t size;
    } spares[KVC_NUM_SPARES]; /* scratch kept for the next batch */
};

/* Where token i of an array begins, in bytes: groups of inner_tokens lie a batch stride apart. */
static inline int64_t kvc_token_offset(int32_t i, int32_t inner_tokens, int64_t token_stride, int64_t batch_stride) {
    return inner_tokens ? i / inner_tokens * batch_stride + i % inner_tokens * token_stride : i * token_stride;
}

static inline void kvc_lock(kvc_cache *cache) { kvc_mutex_lock(&cache->mutex); }

/* Returns status, for functions that end with it. */
static inline kvc_status kvc_unlock(kvc_cache *cache, kvc_status status) {
    kvc_mutex_unlock(&cache->mutex);
    return status;
}

/* The runs of a sequence in a layer; NULL if it does not exist. */
static inline const kvc_run_list *kvc_runs_of(const kvc_cache *cache, int64_t id, int32_t layer) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    return sequence ? &sequence->runs[cache->group_of[layer]] : NULL;
}

/* What turns the keys of a layer where they move; NULL: nothing does. */
static inline const kvc_rope *kvc_rope_of(const kvc_cache *cache, int32_t layer) {
    return cache->rope_of[layer] < 0 ? NULL : &cache->ropes[cache->rope_of[layer]];
}

/* The layer whose rows a layer reads. */
static inline int32_t kvc_source_of(const kvc_cache *cache, int32_t layer) {
    return cache->layers[layer].share ? cache->layers[layer].share - 1 : layer;
}

/* Whether the layer has rows of its own, which are tokens'. */
int kvc_keeps_tokens(const kvc_cache *cache, int32_t layer);

/* The cache's own number, or what it is for the process now. */
static inline int32_t kvc_cache_threads(const kvc_cache *cache) {
    return cache->num_threads ? cache->num_threads : kvc_num_threads();
}

/* For a call of so many multiply-adds, or elements to convert: the short ones do not poll. */
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

/* Take a sequence out of the table and free it; all but one (NULL: all); only if it is blank. */
void kvc_cache_forget(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_forget_all(kvc_cache *cache, const kvc_sequence *kept);
void kvc_cache_tidy(kvc_cache *cache, kvc_sequence *sequence);

/* Whether a query at this position would miss rows that were evicted. */
int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position);

#endif
