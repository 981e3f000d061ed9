/* cache.h: what the public functions share: the cache and the open batch. */
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
    kvc_cache *next, **link; /* the caches of the process: fork.c */
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

/* What one sequence has in the batch. */
typedef struct kvc_batch_sequence {
    kvc_sequence *sequence;
    int32_t first, num_tokens; /* its tokens: order[first .. first + num_tokens) */
    int32_t num_slots;         /* as many of them need in a pool: all, or none if they are loose */
    int32_t is_unstored;       /* nothing of it stays once the batch is committed */
    int32_t is_loose;          /* nor was anything stored before: its tokens' rows lie in sheets */
    int32_t num_stretches;     /* of consecutive positions among its tokens */
    int32_t next;              /* position that would go on with the last stretch */
} kvc_batch_sequence;

typedef struct kvc_place {
    kvc_block *block;
    int32_t slot;
} kvc_place;

/* The runs that a sequence's tokens of the batch got in one group. */
typedef struct kvc_pending {
    kvc_run *runs;
    int32_t num;
} kvc_pending;

/* A kvc_put to a cross-attention layer that is copying rows: slots that are taken and not yet pending.  Not on its
 * thread's stack: in the child of a fork() that may be gone. */
typedef struct kvc_cross_put {
    struct kvc_cross_put *next;
    kvc_thread thread;     /* that called kvc_put */
    int32_t group, member; /* the sequence: index into batch->sequences */
    kvc_run run;
    int32_t touched, num_opened; /* of its block before: kvc_pool_unopen; blocks whose memory was taken for it */
} kvc_cross_put;

/* The beginning of a plan that attention made for a batch: all that the batch knows of it. */
typedef struct kvc_plan_link {
    struct kvc_plan_link *next;
    uint64_t size; /* of the plan's allocation */
    /* Drops what threads of the parent were doing with the plan, in the child of a fork(). */
    void (*after_fork)(struct kvc_plan_link *link);
} kvc_plan_link;

struct kvc_batch {
    kvc_cache *cache;
    uint64_t size;          /* of this allocation */
    int32_t is_fresh;       /* it was not scratch of earlier batches */
    kvc_table table_before; /* of sequences, while the batch begins */
    kvc_sequence *spare;    /* the sequence that was the cache's spare one */
    int32_t num_tokens, num_sequences;
    int32_t *positions;            /* [num_tokens] */
    int32_t *parents;              /* [num_tokens], or NULL: no trees.  Then, counted in depth-first order, */
    int32_t *enter, *leave;        /* a token is number enter, and its descendants are those up to leave */
    int32_t *sequence_of;          /* [num_tokens] index into sequences */
    int32_t *order;                /* [num_tokens] tokens, those of a sequence side by side, else in order */
    kvc_batch_sequence *sequences; /* [num_sequences] */
    kvc_place *places;             /* [num_groups][num_tokens] */
    kvc_pending *pending;          /* [num_groups][num_sequences], then, for all groups of tokens, of loose ones */
    kvc_run *runs;                 /* [num_groups + 1][num_tokens] what pending points into */
    uint8_t *kept;                 /* [num_tokens] what is committed of them */
    uint8_t *written;              /* [num_layers][num_tokens] the token's rows of the layer are there */
    int32_t num_loose;             /* tokens whose rows lie in sheets: in a place without a block */
    kvc_plan_link *plans;          /* made for this batch, freed with it */
    kvc_cross_put *cross_puts;     /* in progress; guarded by the mutex */
    atomic_int *num_cross_puts;    /* [num_groups - num_token_groups] done; a plan of the group is out of date after the
                                      next */
};

static inline void kvc_lock(kvc_cache *cache) { kvc_mutex_lock(&cache->mutex); }

/* Returns status, for functions that end with it. */
static inline kvc_status kvc_unlock(kvc_cache *cache, kvc_status status) {
    kvc_mutex_unlock(&cache->mutex);
    return status;
}

/* The runs of sequence s of the batch in group g. */
static inline kvc_pending *kvc_pending_of(const kvc_batch *batch, int32_t g, int32_t s) {
    return &batch->pending[(size_t)g * (size_t)batch->num_sequences + (size_t)s];
}

/* Its own tokens in a group of tokens, wherever their rows lie. */
static inline kvc_pending *kvc_own_pending(const kvc_batch *batch, int32_t g, int32_t s) {
    return kvc_pending_of(batch, batch->sequences[s].is_loose ? batch->cache->num_groups : g, s);
}

/* Whether a token of a batch with parents is another, or one of its descendants. */
static inline int kvc_descends(const kvc_batch *batch, int32_t token, int32_t ancestor) {
    return batch->enter[token] >= batch->enter[ancestor] && batch->enter[token] < batch->leave[ancestor];
}

/* Whether each token of the batch was put in a layer. */
static inline uint8_t *kvc_written_in(const kvc_batch *batch, int32_t layer) {
    return batch->written + (size_t)layer * (size_t)batch->num_tokens;
}

/* Scratch that outlives a call: of at least *size bytes, which becomes what it really is; whether there is some from
 * before.  Taken and given back with the mutex held. */
int kvc_scratch_has(const kvc_cache *cache, uint64_t size);
void *kvc_scratch_take(kvc_cache *cache, uint64_t *size);
void kvc_scratch_give(kvc_cache *cache, void *memory, uint64_t size);

/* Takes a sequence out of the table and frees it; only if it is blank. */
void kvc_cache_forget(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_tidy(kvc_cache *cache, kvc_sequence *sequence);

/* The sequence, NULL: there is none, once no other call writes its rows where they lie; what follows is done before the
 * mutex is let go.  kvc_cache_find_all waits for all there are. */
kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id);
void kvc_cache_find_all(kvc_cache *cache);

/* The runs of a sequence in a layer; NULL if it does not exist. */
static inline const kvc_run_list *kvc_runs_of(const kvc_cache *cache, int64_t id, int32_t layer) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    return sequence ? &sequence->runs[cache->group_of[layer]] : NULL;
}

/* The same for an edit that may copy rows, and so need what can be given back. */
kvc_sequence *kvc_cache_find_to_copy(kvc_cache *cache, int64_t id);

/* Bracket the reading of rows without the mutex; the reader pins their blocks.  The first may wait, so look only
 * afterwards at what is to be read. */
void kvc_cache_begin_reading(kvc_cache *cache);
void kvc_cache_end_reading(kvc_cache *cache);

/* resident.c: joins pages after a batch of so many tokens; takes the memory of all slots that are counted as touched,
 * and joins all.  With the mutex held, which is let go meanwhile: what the call is for is done before. */
void kvc_cache_join(kvc_cache *cache, int32_t num_tokens);
void kvc_cache_take(kvc_cache *cache);

/* resident.c: kvc_give_back, of all, in steps between which the mutex is let go. */
void kvc_cache_return(kvc_cache *cache);

/* Waits until no pages are worked on, so that all that is free can be given back; whether it had to, and others may
 * have had the mutex. */
int kvc_cache_wait_pages(kvc_cache *cache);

/* Waits until no call reads or writes rows without the mutex, but for the rewrites of a function of the caller and for
 * what works on a batch. */
void kvc_cache_wait(kvc_cache *cache);

/* Bracket the writing of a sequence's rows in place, without the mutex. */
void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence);

/* To be called once the rows of a sequence of the table have changed: counts it if it holds rows, and has the next
 * batch look for what it may evict. */
void kvc_cache_note(kvc_cache *cache, kvc_sequence *sequence);

/* Takes a sequence out of the list of those that changed. */
void kvc_cache_settled(kvc_sequence *sequence);

/* Frees the spare sequence. */
void kvc_spare_free(kvc_cache *cache);

/* An edit that leaves no token in any layer also forgets what was evicted. */
void kvc_cache_after_edit(kvc_cache *cache, kvc_sequence *sequence);

/* Whether a query at this position would miss rows that were evicted. */
int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position);

/* KVC_ERR_INDEX; KVC_ERR_BUSY if a batch, or a rewrite, has the sequence (NULL: nobody); KVC_ERR_BUSY or KVC_ERR_HELD
 * if rows must not move now; until they are copied by those that read them, kvc_check_closed waits. */
kvc_status kvc_check_layer(const kvc_cache *cache, int32_t layer);
kvc_status kvc_check_idle(const kvc_sequence *sequence);
kvc_status kvc_check_closed(kvc_cache *cache, const char *what);

/* The first of these for calls that holds do not matter to. */
kvc_status kvc_check_no_batch(const kvc_cache *cache, const char *what);

/* Gives memory back until kvc_nbytes is at most so many bytes, or all was: that of free blocks, but for the next to be
 * used, as pool->demand.num_blocks says, then the pages past fill marks. */
void kvc_give_back(kvc_cache *cache, int64_t most_bytes);

/* Gives back what is free until kvc_nbytes is at most max_bytes.  KVC_ERR_FULL, because of `what`, if that is not
 * enough: then nothing is given back. */
kvc_status kvc_check_max_bytes(kvc_cache *cache, const char *what);

/* batch.c: takes a put out of the batch's list and frees it.  With `all`, its rows become what the sequence has in the
 * layer in this batch, instead of what it was given before; else they are not all there, and nobody's. */
void kvc_cross_put_end(kvc_batch *batch, kvc_cross_put *put, int all);

/* What turns the keys of a layer where they move; NULL: nothing does. */
static inline const kvc_rope *kvc_rope_of(const kvc_cache *cache, int32_t layer) {
    return cache->rope_of[layer] < 0 ? NULL : &cache->ropes[cache->rope_of[layer]];
}

/* The layer whose rows a layer reads. */
static inline int32_t kvc_source_of(const kvc_cache *cache, int32_t layer) {
    return cache->layers[layer].share ? cache->layers[layer].share - 1 : layer;
}

/* Where the rows of a layer are in a block of so many slots, behind what takes *block_bytes.  memory: the block's, if
 * that is taken as it is touched; NULL: it is not. */
kvc_status kvc_layout_add(const kvc_memory *memory, kvc_layout *layout, const kvc_layer *layer, int32_t num_slots,
                          size_t *block_bytes);

/* KVC_ERR_INDEX, or KVC_ERR_INVALID if it is KVC_NONE. */
kvc_status kvc_check_attention(const kvc_cache *cache, int32_t layer);

/* edit.c: KVC_ERR_INVALID unless it is a range of positions. */
kvc_status kvc_check_positions(int32_t begin, int32_t end);

/* batch.c: KVC_ERR_INVALID if the layer shares another's rows or has none; if k or v is there or not as it should be.
 */
kvc_status kvc_check_own_rows(const kvc_cache *cache, int32_t layer);
kvc_status kvc_check_values(const kvc_layer *layer, const void *k, const void *v);

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

/* What kvc_nbytes answers; with the mutex held. */
int64_t kvc_cache_bytes(const kvc_cache *cache);

/* batch.c: KVC_ERR_INDEX unless the batch has tokens [first, first + *num_tokens); 0 becomes all from first on. */
kvc_status kvc_check_range(const kvc_batch *batch, int32_t first, int32_t *num_tokens);

/* batch.c: KVC_ERR_INVALID unless tokens can be cut into groups of so many. */
kvc_status kvc_check_inner(int32_t inner_tokens, int32_t num_tokens);

/* batch.c: KVC_ERR_INVALID unless it is a type that callers may hand in, at strides of whole elements. */
kvc_status kvc_check_array(int32_t type, int64_t row_stride, int64_t head_stride, const char *name);

/* batch.c: the two halves of kvc_put: copies and checks the arguments; stores the rows, which
 * cannot fail but in cross-attention layers. */
kvc_status kvc_put_check(const kvc_batch *batch, int32_t layer, const kvc_put_args *given, kvc_put_args *args);
kvc_status kvc_put_rows(kvc_batch *batch, int32_t layer, const kvc_put_args *args, struct kvc_sheet *sheet);

/* batch.c: notes of tokens that their rows of a layer are there, or are not; sheet: where some of them lie. */
void kvc_mark_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens, struct kvc_sheet *sheet,
                      int is_written);

/* batch.c: whether rows of some of the tokens lie in sheets. */
int kvc_any_loose(const kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens);

#endif
