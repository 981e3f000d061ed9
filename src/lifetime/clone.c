/* clone.c: kvc_cache_clone: makes an independent cache with the same contents.  A twin is a block and its copy.  With
 * the mutex held, the blocks of the clone and its lists of runs are made, and the original's blocks pinned.  Then rows
 * are copied without it.  A region is the keys, or values, scales or sketches, of one head of one layer. */
#include <string.h>

#include "base/parallel.h"
#include "cache/cache.h"
#include "cache/check.h"
#include "cache/waiting.h"

enum { WORTH_THREADS = 1 << 18 }; /* bytes */

/* A block and its copy, which has the slots up to the last one that a cloned sequence holds. */
typedef struct twin {
    kvc_block *from, *to; /* NULL if there is no copy */
    int32_t group;
    int32_t fill; /* number of slots of the copy; 0: cloned sequences hold none of the block, and there is no copy */
} twin;

typedef struct cloning {
    kvc_cache *from, *to;
    twin *twins;                    /* [num_twins] for each group, one for each of its blocks, by index */
    int64_t num_twins, num_regions; /* num_regions: the most in a group */
} cloning;

/* Returns whether the clone has the sequence: it lacks sequences that no caller can name. */
static int is_cloned(const kvc_sequence *sequence) { return !sequence->is_hidden && !sequence->call.is_own; }

/* Makes an empty cache of the same configuration. */
static kvc_status new_like(const kvc_cache *from, kvc_cache **out) {
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = from->layers,
                               .layer_size = sizeof *from->layers,
                               .num_layers = from->num_layers,
                               .block_size = from->pools[0].block_size,
                               .max_seq_len = from->limits.max_seq_len,
                               .max_sequences = from->limits.max_sequences,
                               .capacity = from->limits.has_own_capacity ? from->limits.capacity : 0,
                               .max_bytes = from->limits.max_bytes,
                               .num_threads = from->num_threads,
                               .poll = from->poll,
                               .poll_user = from->poll_user,
                               .allocator = &from->memory.allocator};
    const kvc_status status = kvc_cache_new(&config, out);
    if (status == KVC_OK) (*out)->kernels = from->kernels;
    return status;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Sets the fills of a group's twins, by the runs of the sequences.  Fill marks of blocks may be higher, because views
 * keep rows that were dropped, and calls have rows that they are loading.  Returns the number of blocks to copy. */
static int32_t find_fills(const cloning *c, int32_t g, twin *twins) {
    const kvc_table *table = &c->from->sequences;
    int32_t num = 0;
    memset(twins, 0, (size_t)c->from->pools[g].num_blocks * sizeof *twins);
    for (const kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s)) {
        if (!is_cloned(s)) continue;
        const kvc_run_list *list = &s->runs[g];
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) {
            twin *t = &twins[run->block->listed.index];
            num += !t->fill; /* the first run of the block */
            if (run->slot + run->count > t->fill) t->fill = run->slot + run->count;
        }
    }
    return num;
}

/* Allocates the list of twins, and the blocks of the clone. */
static kvc_status reserve_blocks(cloning *c) {
    for (int32_t g = 0; g < c->from->num_groups; g++) c->num_twins += c->from->pools[g].num_blocks;
    if (!c->num_twins) return KVC_OK;
    c->twins = kvc_memory_alloc(&c->from->memory, (uint64_t)c->num_twins * sizeof *c->twins, KVC_MEMORY_SCRATCH, -1);
    if (!c->twins) return kvc_fail(KVC_ERR_NOMEM, "out of memory to list %lld blocks", (long long)c->num_twins);
    kvc_status status = KVC_OK;
    twin *twins = c->twins;
    int32_t reserved;
    for (int32_t g = 0; status == KVC_OK && g < c->from->num_groups; twins += c->from->pools[g++].num_blocks)
        status = kvc_pool_reserve(&c->to->pools[g], find_fills(c, g, twins), &reserved); /* freed with the clone */
    return status;
}

/* Adds an empty sequence with lists just long enough, so that a clone never has more bytes than its original. */
static kvc_status add_sequence(kvc_cache *to, const kvc_sequence *from) {
    kvc_sequence *sequence = kvc_sequence_new(to->pools, from->id, from->num_groups, from->num_token_groups);
    if (!sequence) return kvc_fail_sequence(from->id);
    sequence->exact_to = from->exact_to;
    sequence->edited_from = from->edited_from;
    kvc_cache_enter(to, sequence);
    for (int32_t g = 0; g < from->num_groups; g++) {
        kvc_run_list *list = &sequence->runs[g];
        const int32_t num = from->runs[g].num;
        if (!num) continue;
        list->runs = kvc_memory_alloc(&to->memory, (uint64_t)num * sizeof *list->runs, KVC_MEMORY_BOOKKEEPING, -1);
        if (!list->runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a list of %d runs", num);
        list->capacity = num;
    }
    return KVC_OK;
}

/* Gets all memory: everything that can fail. */
static kvc_status reserve(cloning *c) {
    kvc_status status = reserve_blocks(c);
    const kvc_table *table = &c->from->sequences;
    for (const kvc_sequence *s = kvc_table_first(table); status == KVC_OK && s; s = kvc_table_next(table, s))
        if (is_cloned(s)) status = add_sequence(c->to, s);
    return status;
}

/* ---- bookkeeping ------------------------------------------------------------------------------------------------- */

/* Opens the copies of a group's blocks, and pins the blocks, so that their rows stay while they are copied.  The clone
 * holds all slots for now, so that their blocks stay open until there are runs that hold them. */
static void open_blocks(cloning *c, int32_t g, twin *twins) {
    kvc_pool *pool = &c->to->pools[g];
    for (kvc_block *block = c->from->pools[g].first; block; block = block->listed.later) {
        twin *t = &twins[block->listed.index];
        if (!t->fill) continue;
        *t = (twin){block, kvc_pool_open(pool), g, t->fill};
        kvc_pool_take(pool, t->to, t->fill);
        kvc_pool_pin(t->from);
    }
}

/* Copies a list of runs, which hold their slots; blocks are replaced by their twins. */
static void copy_runs(kvc_run_list *to, const kvc_run_list *from, const twin *twins) {
    const kvc_run_list own = *to;
    *to = *from;
    to->runs = own.runs;
    to->capacity = own.capacity;
    to->first = 0;
    for (int32_t i = 0; i < from->num; i++) {
        kvc_run *run = &to->runs[i];
        *run = kvc_runs_begin(from)[i];
        run->block = twins[run->block->listed.index].to;
        kvc_pool_hold(run->block, run->slot, run->count);
    }
}

/* Lets go of the slots that open_blocks held. */
static void close_blocks(cloning *c, int32_t g, const twin *twins) {
    for (int32_t i = 0; i < c->from->pools[g].num_blocks; i++)
        if (twins[i].to) kvc_pool_drop(&c->to->pools[g], twins[i].to, 0, twins[i].fill);
}

static void copy_bookkeeping(cloning *c) {
    const kvc_table *table = &c->to->sequences;
    twin *twins = c->twins;
    for (int32_t g = 0; g < c->from->num_groups; g++) {
        const int32_t num_blocks = c->from->pools[g].num_blocks;
        open_blocks(c, g, twins);
        for (kvc_sequence *to = kvc_table_first(table); to; to = kvc_table_next(table, to))
            copy_runs(&to->runs[g], &kvc_table_find(&c->from->sequences, to->id)->runs[g], twins);
        close_blocks(c, g, twins);
        if (num_blocks) twins += num_blocks; /* NULL where there are no blocks at all */
    }
    for (kvc_sequence *to = kvc_table_last(table), *before; to; to = before) {
        before = kvc_table_before(table, to); /* first, as a blank sequence is freed */
        kvc_cache_after_edit(c->to, to);
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Copies region i % num_regions of the block of twin i / num_regions. */
static void copy_region(void *context, int64_t i) {
    const cloning *c = context;
    const twin *pair = &c->twins[i / c->num_regions];
    const kvc_pool *pool = &c->to->pools[pair->group];
    if (!pair->to || i % c->num_regions >= kvc_pool_num_regions(pool)) return;
    const kvc_region at = kvc_pool_region(pool, i % c->num_regions);
    memcpy(pair->to->rows + at.offset, pair->from->rows + at.offset, (size_t)pair->to->fill * at.row_bytes);
}

static void copy_rows(cloning *c) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < c->to->num_groups; g++) {
        const int64_t num = kvc_pool_num_regions(&c->to->pools[g]);
        if (num > c->num_regions) c->num_regions = num;
        bytes += c->to->pools[g].counts.row_bytes;
    }
    kvc_parallel(kvc_threads_for((double)bytes, WORTH_THREADS, kvc_cache_threads(c->to)), c->num_twins * c->num_regions,
                 copy_region, c);
}

/* Copies everything; releases the mutex while it copies rows. */
static void copy(cloning *c) {
    kvc_cache *from = c->from;
    copy_bookkeeping(c);
    kvc_unlock(from, KVC_OK);
    copy_rows(c);
    kvc_lock(from);
    for (int64_t i = 0; i < c->num_twins; i++)
        if (c->twins[i].from) kvc_pool_unpin(&from->pools[c->twins[i].group], c->twins[i].from);
}

static kvc_status clone_cache(cloning *c) {
    kvc_cache_begin_reading(c->from);
    kvc_cache_find_all(c->from);
    kvc_status status = kvc_check_no_batch(c->from, "copy the cache");
    if (status == KVC_OK) status = reserve(c);
    if (status == KVC_OK) copy(c);
    kvc_cache_end_reading(c->from);
    kvc_memory_free(&c->from->memory, c->twins, (uint64_t)c->num_twins * sizeof *c->twins, KVC_MEMORY_SCRATCH, -1);
    return status;
}

kvc_status kvc_cache_clone(kvc_cache *cache, kvc_cache **out) {
    if (!out) return kvc_fail(KVC_ERR_INVALID, "clone is NULL: it is where the copy goes");
    *out = NULL;
    cloning c = {.from = cache};
    kvc_status status = new_like(cache, &c.to); /* needs no mutex: a configuration does not change */
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    status = kvc_unlock(cache, clone_cache(&c));
    if (status == KVC_OK)
        *out = c.to;
    else
        kvc_cache_free(c.to);
    return status;
}
