/* settle.c: kvc_settle: rotates stored keys by the deltas that moves have left; the deltas become 0.
 *
 * The keys of a slot are rotated where they lie if all sequences that hold it have the same delta there.  Otherwise the
 * slot stays as it is, and each sequence whose delta is not 0 gets a rotated copy.
 */
#include <string.h>

#include "base/parallel.h"
#include "edit/rewrite.h"
#include "cache/check.h"
#include "space/limits.h"
#include "cache/waiting.h"

/* Notes for a slot without a delta: no sequence holds it, or its holders have different deltas there. */
enum { UNHELD = INT32_MIN, DISPUTED = INT32_MIN + 1 };

/* The work on one group. */
typedef struct group_work {
    kvc_cache *cache;
    int32_t group, num_blocks, num_sequences;
    int32_t num_rewrites; /* number of rewrites made: of the sequences that are not evicted in the group */
    kvc_block **blocks;   /* [num_blocks] the pool's blocks before any is opened for copies; NULL: of no held slot */
    int32_t **deltas; /* [num_blocks + 1] where each block's slots begin in slot_deltas, and where the last one's end */
    int32_t *slot_deltas;  /* [num_slots] the delta of each slot, over all blocks, or UNHELD or DISPUTED */
    kvc_rewrite *rewrites; /* [num_sequences] copies of disputed rows */
    size_t num_slots;      /* number of slots below fill marks */
    const kvc_copiers *copiers;
} group_work;

/* Returns whether a row is copied, as kvc_change asks. */
static int is_disputed(const void *context, const kvc_run *run, int32_t slot) {
    const group_work *w = context;
    return run->delta != 0 && w->deltas[run->block->listed.index][slot] == DISPUTED;
}

/* Returns the list of a sequence; NULL if victims lose their rows in the group. */
static kvc_run_list *list_of(const kvc_cache *cache, int32_t g, kvc_sequence *sequence) {
    return kvc_is_evicted_in(cache, sequence, g) ? NULL : &sequence->runs[g];
}

static void *alloc_array(const group_work *w, uint64_t count, size_t item) {
    return kvc_memory_alloc(&w->cache->memory, (count + 1) * item, KVC_MEMORY_SCRATCH, -1);
}

static void free_array(const group_work *w, void *p, uint64_t count, size_t item) {
    kvc_memory_free(&w->cache->memory, p, (count + 1) * item, KVC_MEMORY_SCRATCH, -1);
}

/* Notes the delta of every slot. */
static void note_deltas(const group_work *w) {
    const kvc_pool *pool = &w->cache->pools[w->group];
    w->deltas[0] = w->slot_deltas;
    for (const kvc_block *block = pool->first; block; block = block->listed.later)
        w->deltas[block->listed.index + 1] = w->deltas[block->listed.index] + block->fill;
    for (size_t i = 0; i < w->num_slots; i++) w->slot_deltas[i] = UNHELD;
    const kvc_table *table = &w->cache->sequences;
    for (kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s)) {
        const kvc_run_list *list = list_of(w->cache, w->group, s);
        for (const kvc_run *run = list ? kvc_runs_begin(list) : NULL; run && run < kvc_runs_end(list); run++)
            for (int32_t n = 0; n < run->count; n++) {
                int32_t *delta = &w->deltas[run->block->listed.index][run->slot + n];
                *delta = *delta == UNHELD || *delta == run->delta ? run->delta : DISPUTED;
            }
    }
}

/* Gets all memory, notes deltas and makes rewrites: everything that can fail. */
static kvc_status prepare_group(group_work *w) {
    const kvc_pool *pool = &w->cache->pools[w->group];
    for (const kvc_block *block = pool->first; block; block = block->listed.later) w->num_slots += (size_t)block->fill;
    w->blocks = alloc_array(w, (size_t)w->num_blocks, sizeof *w->blocks);
    w->deltas = alloc_array(w, (size_t)w->num_blocks, sizeof *w->deltas);
    w->slot_deltas = alloc_array(w, w->num_slots, sizeof *w->slot_deltas);
    w->rewrites = alloc_array(w, (size_t)w->num_sequences, sizeof *w->rewrites);
    if (!w->blocks || !w->deltas || !w->slot_deltas || !w->rewrites)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory to settle the keys of %zu slots", w->num_slots);
    note_deltas(w);
    for (kvc_block *block = pool->first; block; block = block->listed.later) { /* some may be given back meanwhile */
        const int32_t b = block->listed.index, *delta = w->deltas[b];
        while (delta < w->deltas[b + 1] && *delta == UNHELD) delta++;
        w->blocks[b] = delta < w->deltas[b + 1] ? block : NULL;
    }
    const kvc_change change = {.moved_end = KVC_END, .applies_delta = 1, .copies = is_disputed, .context = w};
    kvc_status status = KVC_OK;
    const kvc_table *table = &w->cache->sequences;
    for (kvc_sequence *s = kvc_table_first(table); status == KVC_OK && s; s = kvc_table_next(table, s)) {
        kvc_run_list *list = list_of(w->cache, w->group, s);
        if (list) status = kvc_rewrite_make(w->cache, w->group, list, &change, &w->rewrites[w->num_rewrites]);
        w->num_rewrites += list && status == KVC_OK;
    }
    return status;
}

/* Accepts the rewrites before their rows are written, which needs no mutex while all blocks of the group are pinned. */
static void accept_rewrites(group_work *w) {
    for (int32_t i = 0; i < w->num_rewrites; i++) {
        kvc_rewrite_pin(&w->rewrites[i]);
        kvc_rewrite_accept(w->cache, w->group, &w->rewrites[i]);
    }
    for (int32_t b = 0; b < w->num_blocks; b++)
        if (w->blocks[b]) kvc_pool_pin(w->blocks[b]);
}

/* Rotates the keys in one copier's share of the slots, where they lie. */
static void rotate_slots(void *context, int64_t copier) {
    const group_work *w = context;
    kvc_rotator rotator = {.kernels = w->cache->kernels,
                           .scratch = w->copiers->scratch + (uint64_t)copier * w->copiers->floats};
    const uint64_t num = w->num_slots, copiers = (uint64_t)w->copiers->num;
    const int32_t *delta = w->slot_deltas + (uint64_t)copier * num / copiers,
                  *end = w->slot_deltas + (uint64_t)(copier + 1) * num / copiers;
    for (int32_t b = 0; delta < end; b++)
        for (; delta < end && delta < w->deltas[b + 1]; delta++)
            if (*delta != 0 && *delta != UNHELD && *delta != DISPUTED)
                kvc_rotate_keys(w->cache, w->group, w->blocks[b], (int32_t)(delta - w->deltas[b]), *delta, &rotator);
}

/* Copies disputed rows, then rotates the others where they lie. */
static void write_rows(group_work *w) {
    for (int32_t i = 0; i < w->num_rewrites; i++) kvc_rewrite_copy(w->cache, w->group, &w->rewrites[i], w->copiers);
    kvc_parallel(w->copiers->num, w->copiers->num, rotate_slots, w);
}

/* Unpins blocks and frees memory.  If status is not KVC_OK, the rewrites were not accepted: discards them. */
static void end_group(group_work *w, kvc_status status) {
    for (int32_t b = 0; status == KVC_OK && b < w->num_blocks; b++)
        if (w->blocks[b]) kvc_pool_unpin(&w->cache->pools[w->group], w->blocks[b]);
    for (int32_t i = w->num_rewrites - 1; i >= 0; i--) /* backwards: the rewrite made last is discarded first */
        if (status == KVC_OK) {
            kvc_rewrite_unpin(w->cache, w->group, &w->rewrites[i]);
            kvc_rewrite_free(w->cache, &w->rewrites[i]);
        } else {
            kvc_rewrite_discard(w->cache, w->group, &w->rewrites[i]);
        }
    free_array(w, w->blocks, (size_t)w->num_blocks, sizeof *w->blocks);
    free_array(w, w->deltas, (size_t)w->num_blocks, sizeof *w->deltas);
    free_array(w, w->slot_deltas, w->num_slots, sizeof *w->slot_deltas);
    free_array(w, w->rewrites, (size_t)w->num_sequences, sizeof *w->rewrites);
}

/* Returns whether a run of the list has a delta to apply. */
static int has_deltas(const kvc_run_list *list) {
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        if (run->delta) return 1;
    return 0;
}

/* ---- all groups -------------------------------------------------------------------------------------------------- */

/* Value of in_place in sequences whose deltas are applied; in kvc_inject it is 1. */
enum { APPLIES_DELTAS = 2 };

/* Marks the sequences that have deltas as written in place. */
static void mark_sequences(kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    for (kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s)) {
        int32_t has = 0;
        for (int32_t g = 0; g < cache->num_token_groups; g++) has |= has_deltas(&s->runs[g]);
        if (!has) continue;
        kvc_cache_begin_in_place(cache, s);
        s->call.in_place = APPLIES_DELTAS;
    }
}

/* Lists of sequences without deltas are made anew, too. */
static void note_lists(kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    for (kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s)) {
    }
}

static void unmark_sequences(kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    for (kvc_sequence *s = kvc_table_first(table); s; s = kvc_table_next(table, s))
        if (s->call.in_place == APPLIES_DELTAS) kvc_cache_end_in_place(cache, s);
}

static void write_unlocked(kvc_cache *cache, group_work *groups, int32_t num) {
    mark_sequences(cache);
    for (int32_t i = 0; i < num; i++) accept_rewrites(&groups[i]);
    note_lists(cache);
    kvc_unlock(cache, KVC_OK);
    for (int32_t i = 0; i < num; i++) write_rows(&groups[i]);
    kvc_lock(cache);
    unmark_sequences(cache);
}

/* A call of kvc_settle. */
typedef struct settling {
    group_work *groups; /* [num_groups] */
    int32_t num;        /* number of groups that are prepared */
    kvc_copiers copiers;
} settling;

/* Ends the work on all groups that are prepared; where status is not KVC_OK, undoes it. */
static void end_all(settling *s, kvc_status status) {
    for (int32_t i = s->num - 1; i >= 0; i--) end_group(&s->groups[i], status);
    s->num = 0;
}

/* Prepares every group that has deltas, and sizes the copiers. */
static kvc_status prepare_all(kvc_cache *cache, settling *s) {
    const kvc_table *table = &cache->sequences;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        const kvc_run_list *list = NULL;
        int32_t has = 0;
        for (kvc_sequence *q = kvc_table_first(table); q && !has; q = kvc_table_next(table, q))
            has = (list = list_of(cache, g, q)) && has_deltas(list);
        if (!has) continue;
        group_work *w = &s->groups[s->num++];
        *w = (group_work){.cache = cache,
                          .group = g,
                          .num_blocks = cache->pools[g].num_blocks,
                          .num_sequences = table->named.num + table->hidden.num,
                          .copiers = &s->copiers};
        status = prepare_group(w);
        for (int32_t i = 0; status == KVC_OK && i < w->num_rewrites; i++)
            kvc_rewrite_size_copiers(cache, g, &w->rewrites[i], &s->copiers);
    }
    return status;
}

static void visit_replaced(const kvc_need *need, int32_t g, kvc_part_fn *visit, void *context) {
    const settling *s = need->context;
    for (int32_t i = 0; i < s->num; i++)
        for (int32_t d = 0; s->groups[i].group == g && d < s->groups[i].num_rewrites; d++)
            kvc_rewrite_visit_replaced(&s->groups[i].rewrites[d], visit, context);
}

/* Prepares all, and undoes it: victims have no rewrites, and others may need fewer copies without them.  The
 * preparation must not decide which victims are chosen next. */
static kvc_status fits(const kvc_need *need) {
    settling *s = need->context;
    if (need->scope == KVC_FIXED) return KVC_OK; /* it looks at all sequences anyway */
    kvc_status status = prepare_all(need->cache, s);
    for (int32_t i = 0; status == KVC_OK && i < s->num; i++) {
        int64_t copied = 0;
        for (int32_t d = 0; d < s->groups[i].num_rewrites; d++) copied += s->groups[i].rewrites[d].num_copied;
        if (copied) status = kvc_rewrites_check(need, s->groups[i].group, 0);
    }
    if (status == KVC_OK) status = kvc_check_max_bytes(need->cache, need->scope, need->what);
    end_all(s, KVC_ERR_FULL);
    if (status == KVC_ERR_FULL) need->cache->evicting.lacks_bytes = 1;
    return status;
}

static kvc_status settle(kvc_cache *cache) {
    kvc_status status = kvc_check_closed(cache, "settle keys");
    if (status != KVC_OK) return status;
    const size_t size = (size_t)cache->num_groups * sizeof(group_work);
    settling s = {.groups = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1)};
    if (!s.groups) return kvc_fail(KVC_ERR_NOMEM, "out of memory to settle %d layer groups", cache->num_groups);
    const kvc_need need = {
        .cache = cache, .fits = fits, .visit_replaced = visit_replaced, .context = &s, .what = "settling keys"};
    status = kvc_choose_victims(&need);
    if (status == KVC_OK) status = prepare_all(cache, &s);
    if (status == KVC_OK) status = kvc_copiers_new(cache, &s.copiers);
    if (status == KVC_OK) {
        kvc_evict(cache);
        if (cache->limits.max_bytes) kvc_give_back_beyond(cache);
        if (s.num) write_unlocked(cache, s.groups, s.num);
    }
    kvc_let_victims_stay(cache);
    end_all(&s, status);
    kvc_copiers_free(cache, &s.copiers);
    kvc_memory_free(&cache->memory, s.groups, size, KVC_MEMORY_SCRATCH, -1);
    return status;
}

kvc_status kvc_settle(kvc_cache *cache) {
    kvc_lock(cache);
    return kvc_unlock(cache, settle(cache));
}
