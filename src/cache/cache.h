/* cache.h: the struct of a cache: its layers, its layer groups, the table of its sequences. */
#ifndef KVC_CACHE_H
#define KVC_CACHE_H

#include <stdatomic.h>

#include "base/compiler.h"
#include "base/status.h"
#include "base/structs.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "rows/policy.h"
#include "rows/rope.h"
#include "cache/sequence.h"

enum { KVC_NUM_SCRATCH = 4 }; /* allocations of scratch in reserve, for reuse */

/* The ropes of kind KVC_ROPE_FREQUENCIES. */
typedef struct kvc_ropes {
    int32_t *of_layer; /* [num_layers] index into items; -1: keys of the layer are not rotated by frequencies */
    kvc_rope *items;   /* [num] all different */
    double *inv_freqs; /* the frequencies that items point into */
    int32_t num;
} kvc_ropes;

/* The limits that the caller has set.  0: no limit. */
typedef struct kvc_limits {
    int64_t max_seq_len, max_sequences, capacity, max_bytes;
    int64_t budget;           /* what max_bytes leaves for all that counts: space/limits.h.  No limit: INT64_MAX */
    int32_t has_own_capacity; /* whether one was given; else it is max_seq_len * max_sequences */
} kvc_limits;

/* The prefixes of a cache, and what is common to them: prefix/. */
typedef struct kvc_prefixes {
    struct kvc_prefix *first;                      /* list of all */
    int64_t prompt_bytes;                          /* of acquired sequences, pins and prefixes */
    int64_t state_bytes;                           /* of recurrent states */
    int64_t num_made;                              /* prefixes that were made */
    int64_t clock;                                 /* rises when a prompt is forgotten: kvc_sequence.date */
    struct kvc_tree *dying;                        /* list of the trees that prefixes have given up: prefix.c */
    struct kvc_node *new_blocks, **new_blocks_end; /* list of blocks for kvc_take_new_blocks, oldest first */
    struct kvc_carrier *carriers;                  /* list of calls that carry blocks to or from a store */
    struct kvc_state_use *state_uses;              /* list of calls that use a recurrent state of a model */
} kvc_prefixes;

/* Which sequences are kept for later prompts, and the plan of which the running call evicts: space/evict.h. */
typedef struct kvc_evicting {
    int64_t num_kept, num_protected, num_pinned; /* num_pinned: pinned and not protected */
    int64_t num_uses;                            /* of kept sequences: no kvc_sequence.evicting.used is higher */
    kvc_sorted evictable;                        /* by use: kept sequences that may be evicted */
    kvc_sorted with_states;                      /* those whose state goes with them: cache/useful.h */
    int64_t state_bytes;                         /* of these states */
    kvc_sequence *victims; /* list of sequences that the running call's plan evicts, by rising last use */
    int32_t lacks_bytes;   /* while victims are chosen: max_bytes leaves no room */
} kvc_evicting;

/* Calls that use the cache without its mutex, and calls that wait for them: cache/waiting.h. */
typedef struct kvc_waiting {
    int64_t num_holds;           /* number of kvc_holds that callers have not freed */
    int64_t num_rewrites;        /* number of calls that copy rows to new slots without the mutex */
    int64_t num_readers;         /* number of calls that read rows without the mutex */
    int64_t num_in_place;        /* number of sequences whose rows are written where they lie without the mutex */
    int64_t num_gradual;         /* number of calls that drop kept blocks a few at a time, and that fork() waits for */
    atomic_int num_locking;      /* number of calls that wait for the mutex */
    int64_t num_waiting;         /* number of calls in kvc_cache_wait, _all or _pages; new readers queue behind them */
    kvc_signal idle;             /* sent when a call that others may wait for has ended */
    struct kvc_polling *polling; /* list of calls that would be readers, and are in a function of the caller */
    struct kvc_waiter *waiters;  /* list of the calls that wait to begin a batch, in order of arrival */
} kvc_waiting;

/* Memory in reserve, for the next call that needs scratch.  NULL and 0: none. */
typedef struct kvc_scratch {
    void *memory;
    uint64_t size;
} kvc_scratch;

struct kvc_cache {
    kvc_mutex mutex; /* guards everything that changes after creation */
    kvc_memory memory;
    uint64_t size; /* bytes of this allocation: the struct and the arrays behind it */

    /* Layers, and groups of layers whose rows lie side by side. */
    kvc_layer *layers;    /* [num_layers] */
    int32_t *group_of;    /* [num_layers] the layer group of each layer */
    kvc_layout *layouts;  /* [num_layers] where the rows of a layer lie; layouts of a group are side by side */
    int32_t *layout_of;   /* [num_layers] index into layouts */
    kvc_policy *policies; /* [num_groups] */
    kvc_pool *pools;      /* [num_groups] */
    int32_t num_layers, num_groups;
    /* Number of groups that hold rows of tokens: the first ones.  Then comes one group for each cross-attention layer,
     * and one for all layers of kind KVC_NONE. */
    int32_t num_token_groups;
    int32_t num_strided; /* number of groups with a stride */
    kvc_ropes ropes;

    /* How calls run. */
    const kvc_kernels *kernels;
    int prefetch_level; /* cache level to prefetch into: kvc_ahead */
    int32_t num_threads;
    kvc_poll_fn *poll; /* asks whether to cancel a call; may be NULL */
    void *poll_user;
    kvc_limits limits;

    /* Its sequences, and the calls that use it. */
    kvc_table sequences;
    kvc_batch *batch; /* the open batch; NULL: none */
    kvc_prefixes prefixes;
    kvc_evicting evicting;
    kvc_waiting waiting;
    struct kvc_state *states; /* list of what is being saved and loaded */
    kvc_cache *next, **link;  /* place in the list of all caches of the process: atfork.c */
    kvc_stats stats;          /* counters; kvc_get_stats adds what pools count */
    kvc_scratch scratch[KVC_NUM_SCRATCH];
};

/* Returns the byte offset of token i in a caller's array.  If tokens_per_sequence is not 0, groups of
 * tokens_per_sequence tokens are batch_stride apart. */
static inline int64_t kvc_token_offset(int32_t i, int32_t tokens_per_sequence, int64_t token_stride,
                                       int64_t batch_stride) {
    return tokens_per_sequence ? i / tokens_per_sequence * batch_stride + i % tokens_per_sequence * token_stride
                               : i * token_stride;
}

void kvc_lock_late(kvc_cache *cache); /* where others have the mutex */
static inline void kvc_lock(kvc_cache *cache) {
    if (!kvc_mutex_try_lock(&cache->mutex)) kvc_lock_late(cache);
}

/* Unlocks the cache, and returns status, so that a function can end with this call. */
static inline kvc_status kvc_unlock(kvc_cache *cache, kvc_status status) {
    kvc_mutex_unlock(&cache->mutex);
    return status;
}

/* Returns the runs of a sequence in a layer; NULL if the sequence does not exist. */
static inline const kvc_run_list *kvc_runs_of(const kvc_cache *cache, int64_t id, int32_t layer) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    return sequence ? &sequence->runs[cache->group_of[layer]] : NULL;
}

/* Returns the frequencies by which keys of a layer are rotated when they move; NULL if they are not rotated. */
static inline const kvc_rope *kvc_rope_of(const kvc_cache *cache, int32_t layer) {
    return cache->ropes.of_layer[layer] < 0 ? NULL : &cache->ropes.items[cache->ropes.of_layer[layer]];
}

/* Returns the layer whose rows a layer reads: itself, unless it shares the rows of another. */
static inline int32_t kvc_source_of(const kvc_cache *cache, int32_t layer) {
    return cache->layers[layer].share ? cache->layers[layer].share - 1 : layer;
}

/* Returns whether a layer has rows of its own that belong to tokens: not if it shares rows, nor in cross-attention. */
static inline int kvc_keeps_tokens(const kvc_cache *cache, int32_t layer) {
    return !cache->layers[layer].share && cache->group_of[layer] < cache->num_token_groups;
}

/* Returns whether a layer has rows of its own. */
static inline int kvc_has_rows(const kvc_cache *cache, int32_t layer) {
    return !cache->layers[layer].share && cache->layers[layer].policy.kind != KVC_NONE;
}

/* Returns the number of threads set for the cache, or else for the process. */
static inline int32_t kvc_cache_threads(const kvc_cache *cache) {
    return cache->num_threads ? cache->num_threads : kvc_num_threads();
}

/* Begins the timer of a call of `work` multiply-adds or conversions; short calls do not poll. */
static inline void kvc_cache_poll_timer(const kvc_cache *cache, double work, kvc_poll_timer *timer) {
    static const double WORTH_POLLING = 1 << 22; /* multiply-adds or conversions: about a millisecond */
    kvc_poll_timer_init(timer, work < WORTH_POLLING && !KVC_BUGGIFY() ? NULL : cache->poll, cache->poll_user);
}

/* ---- sequences of the table, with the mutex held ----------------------------------------------------------------- */

/* Notes that the rows of a sequence have changed.  Counts the sequence if it holds rows.  Lists it in
 * cache->sequences.changed until kvc_cache_unmark_changed, so that the next batch looks there for rows to expire. */
void kvc_cache_mark_changed(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_unmark_changed(kvc_sequence *sequence);

/* Marks a sequence as changed at the end of an edit, and frees it if it is blank: it has neither rows nor expired
 * ones. */
void kvc_cache_after_edit(kvc_cache *cache, kvc_sequence *sequence);

/* Marks the sequence with an id, if it exists, as the running call's own (1), or as any other (0). */
void kvc_cache_set_in_call(kvc_cache *cache, int64_t id, int32_t in_call);

/* Inserts a new sequence into the table.  kvc_cache_insert first drops `old`, whose place it takes (NULL: none).  Then
 * it marks the new sequence as changed, and frees it if it holds no rows and none have expired. */
void kvc_cache_enter(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_insert(kvc_cache *cache, kvc_sequence *sequence, kvc_sequence *old);

/* Sets kvc_sequence.evicting.used of a sequence that is kept, or is to be. */
void kvc_cache_use(kvc_cache *cache, kvc_sequence *sequence, int64_t used);

/* Adds a sequence of the table to the kept ones, or takes it out. */
void kvc_cache_keep(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_stop_keeping(kvc_cache *cache, kvc_sequence *sequence);

/* Protects a hidden kept sequence from being evicted, until kvc_cache_keep. */
void kvc_cache_protect(kvc_cache *cache, kvc_sequence *sequence);

/* Adds to the pins of a sequence.  While it has any, and is kept, it is not evicted, and its rows may change. */
void kvc_cache_pin(kvc_cache *cache, kvc_sequence *sequence, int64_t add);

/* Notes whether a sequence may be evicted: not if it is not kept, protected, pinned, or a call writes its rows.
 * Takes time for its rows where that has changed. */
void kvc_cache_note_evictable(kvc_cache *cache, kvc_sequence *sequence);

/* Returns whether a sequence loses its rows in group g when victims are evicted. */
static inline int kvc_is_evicted_in(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g) {
    return sequence->evicting.fate == KVC_GOES ||
           (sequence->evicting.fate == KVC_LOSES_WINDOWS && kvc_policy_expires(&cache->policies[g]));
}

/* Returns an id that names nothing, and that this function has not returned before. */
int64_t kvc_cache_new_id(kvc_cache *cache);

/* Takes a blank sequence out of the table, as the reserved one; there must be none. */
void kvc_cache_set_aside(kvc_cache *cache, kvc_sequence *sequence);

/* Takes a sequence out of the table and frees it.  _blank does nothing if it is not blank; _all takes every sequence.
 */
void kvc_cache_drop(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_drop_blank(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_drop_all(kvc_cache *cache);

/* Returns whether a query of the sequence at `position`, or a later one, would miss rows: lost or missing ones. */
int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position);

/* ---- scratch: memory for the length of a call or a batch, with the mutex held; some is reused ---------------------
 */

/* Take scratch of at least *size bytes, and give it back with its size.  The first returns NULL if out of memory.
 * It sets *size to the size, and *is_new, which may be NULL, to whether the scratch is newly allocated. */
void *kvc_scratch_take(kvc_cache *cache, uint64_t *size, int32_t *is_new);
void kvc_scratch_give(kvc_cache *cache, void *memory, uint64_t size);

/* Frees all scratch in reserve. */
void kvc_scratch_free(kvc_cache *cache);

#endif
