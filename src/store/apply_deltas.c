/* apply_deltas.c: writes what shifts have left to the queries into the keys.
 *
 * A slot is turned where it lies if all sequences that hold it see its keys off by the same delta.  Otherwise it stays
 * as it is, and each of those that see it off gets a copy.
 */
#include <string.h>

#include "store/draft.h"
#include "store/check.h"
#include "store/limits.h"
#include "store/waiting.h"

/* What is known of a slot: the delta that all who hold it see, or one of these. */
enum { UNSEEN = INT32_MIN, DISPUTED = INT32_MIN + 1 };

/* One group on its way. */
typedef struct settling {
    kvc_cache *cache;
    int32_t group, num_blocks, num_sequences;
    int32_t num_drafts; /* made */
    kvc_block **blocks; /* [num_blocks] of the pool, before anything is opened for copies */
    int32_t **deltas;   /* [num_blocks + 1] where each block's slots begin in `slots` */
    int32_t *slots;     /* [num_slots] */
    kvc_draft *drafts;  /* [num_sequences] */
    size_t num_slots;
    const kvc_lanes *lanes;
} settling;

static int is_disputed(const void *context, const kvc_run *run, int32_t slot) {
    const settling *s = context;
    return run->delta != 0 && s->deltas[run->block->index][slot] == DISPUTED;
}

static kvc_run_list *rows_of(const settling *s, int32_t i) { return &s->cache->sequences.items[i]->runs[s->group]; }

static void *get(const settling *s, uint64_t count, size_t item) {
    return kvc_memory_alloc(&s->cache->memory, (count + 1) * item, KVC_MEMORY_SCRATCH, -1);
}

static void put_back(const settling *s, void *p, uint64_t count, size_t item) {
    kvc_memory_free(&s->cache->memory, p, (count + 1) * item, KVC_MEMORY_SCRATCH, -1);
}

static void note_deltas(const settling *s) {
    const kvc_pool *pool = &s->cache->pools[s->group];
    s->deltas[0] = s->slots;
    for (int32_t b = 0; b < s->num_blocks; b++) s->deltas[b + 1] = s->deltas[b] + pool->blocks[b]->fill;
    for (size_t i = 0; i < s->num_slots; i++) s->slots[i] = UNSEEN;
    for (int32_t i = 0; i < s->cache->sequences.num; i++) {
        const kvc_run_list *list = rows_of(s, i);
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
            for (int32_t n = 0; n < run->count; n++) {
                int32_t *delta = &s->deltas[run->block->index][run->slot + n];
                *delta = *delta == UNSEEN || *delta == run->delta ? run->delta : DISPUTED;
            }
    }
}

/* All that can fail. */
static kvc_status prepare(settling *s) {
    const kvc_pool *pool = &s->cache->pools[s->group];
    for (int32_t b = 0; b < s->num_blocks; b++) s->num_slots += (size_t)pool->blocks[b]->fill;
    s->blocks = get(s, (size_t)s->num_blocks, sizeof *s->blocks);
    s->deltas = get(s, (size_t)s->num_blocks, sizeof *s->deltas);
    s->slots = get(s, s->num_slots, sizeof *s->slots);
    s->drafts = get(s, (size_t)s->num_sequences, sizeof *s->drafts);
    if (!s->blocks || !s->deltas || !s->slots || !s->drafts)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory to settle the keys of %zu slots", s->num_slots);
    memcpy(s->blocks, pool->blocks, (size_t)s->num_blocks * sizeof *s->blocks);
    note_deltas(s);
    const kvc_change change = {.moved_end = KVC_END, .applies_delta = 1, .copies = is_disputed, .context = s};
    for (; s->num_drafts < s->num_sequences; s->num_drafts++) {
        const kvc_status status =
            kvc_draft_make(s->cache, s->group, rows_of(s, s->num_drafts), &change, &s->drafts[s->num_drafts]);
        if (status != KVC_OK) return status;
    }
    return KVC_OK;
}

/* Runs say what they will be, and blocks stay where they are, so that the mutex is free while rows are written. */
static void accept(settling *s) {
    for (int32_t i = 0; i < s->num_drafts; i++) {
        kvc_draft_pin(&s->drafts[i]);
        kvc_draft_accept(s->cache, s->group, rows_of(s, i), &s->drafts[i]);
    }
    for (int32_t b = 0; b < s->num_blocks; b++)
        if (s->deltas[b] < s->deltas[b + 1]) kvc_pool_pin(s->blocks[b]);
}

/* Turns one lane's share of the slots. */
static void turn_slots(void *context, int64_t lane) {
    const settling *s = context;
    kvc_rotator rotator = {.kernels = s->cache->kernels,
                           .scratch = s->lanes->scratch + (uint64_t)lane * s->lanes->floats};
    const uint64_t num = s->num_slots, lanes = (uint64_t)s->lanes->num;
    const int32_t *delta = s->slots + (uint64_t)lane * num / lanes,
                  *end = s->slots + (uint64_t)(lane + 1) * num / lanes;
    for (int32_t b = 0; delta < end; b++)
        for (; delta < end && delta < s->deltas[b + 1]; delta++)
            if (*delta != 0 && *delta != UNSEEN && *delta != DISPUTED)
                kvc_rotate_keys(s->cache, s->group, s->blocks[b], (int32_t)(delta - s->deltas[b]), *delta, &rotator);
}

static void write_rows(settling *s) {
    for (int32_t i = 0; i < s->num_drafts; i++) kvc_draft_copy(s->cache, s->group, &s->drafts[i], s->lanes);
    kvc_parallel(s->lanes->num, s->lanes->num, turn_slots, s);
}

static void end(settling *s, kvc_status status) {
    for (int32_t b = 0; status == KVC_OK && b < s->num_blocks; b++)
        if (s->deltas[b] < s->deltas[b + 1]) kvc_pool_unpin(&s->cache->pools[s->group], s->blocks[b]);
    for (int32_t i = s->num_drafts - 1; i >= 0; i--) /* last made, first discarded */
        if (status == KVC_OK) {
            kvc_draft_unpin(s->cache, s->group, &s->drafts[i]);
            kvc_draft_free(s->cache, &s->drafts[i]);
        } else {
            kvc_draft_discard(s->cache, s->group, &s->drafts[i]);
        }
    put_back(s, s->blocks, (size_t)s->num_blocks, sizeof *s->blocks);
    put_back(s, s->deltas, (size_t)s->num_blocks, sizeof *s->deltas);
    put_back(s, s->slots, s->num_slots, sizeof *s->slots);
    put_back(s, s->drafts, (size_t)s->num_sequences, sizeof *s->drafts);
}

static int has_deltas(const kvc_run_list *list) {
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        if (run->delta) return 1;
    return 0;
}

/* ---- all groups -------------------------------------------------------------------------------------------------- */

/* Sequences whose rows are written are in_place with this number, so that they are told from those of kvc_inject. */
enum { SETTLES = 2 };

static void mark_sequences(kvc_cache *cache) {
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        kvc_sequence *sequence = cache->sequences.items[i];
        int32_t has = 0;
        for (int32_t g = 0; g < cache->num_token_groups; g++) has |= has_deltas(&sequence->runs[g]);
        if (!has) continue;
        kvc_cache_begin_in_place(cache, sequence);
        sequence->in_place = SETTLES;
    }
}

static void unmark_sequences(kvc_cache *cache) {
    for (int32_t i = 0; i < cache->sequences.num; i++)
        if (cache->sequences.items[i]->in_place == SETTLES) kvc_cache_end_in_place(cache, cache->sequences.items[i]);
}

static void write_unlocked(kvc_cache *cache, settling *groups, int32_t num) {
    mark_sequences(cache);
    for (int32_t i = 0; i < num; i++) accept(&groups[i]);
    kvc_unlock(cache, KVC_OK);
    for (int32_t i = 0; i < num; i++) write_rows(&groups[i]);
    kvc_lock(cache);
    unmark_sequences(cache);
}

/* Makes ready every group with something to settle; num counts them. */
static kvc_status prepare_all(kvc_cache *cache, settling *groups, int32_t *num, kvc_lanes *lanes) {
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        int32_t i = 0;
        while (i < cache->sequences.num && !has_deltas(&cache->sequences.items[i]->runs[g])) i++;
        if (i == cache->sequences.num) continue;
        settling *s = &groups[(*num)++];
        *s = (settling){.cache = cache,
                        .group = g,
                        .num_blocks = cache->pools[g].num_blocks,
                        .num_sequences = cache->sequences.num,
                        .lanes = lanes};
        status = prepare(s);
        for (i = 0; status == KVC_OK && i < s->num_drafts; i++) kvc_draft_size_lanes(cache, g, &s->drafts[i], lanes);
    }
    static const char what[] = "settling keys";
    for (int32_t i = 0; status == KVC_OK && i < *num; i++)
        status = kvc_drafts_check(cache, groups[i].group, groups[i].drafts, groups[i].num_drafts, what);
    if (status == KVC_OK) status = kvc_check_max_bytes(cache, what);
    return status == KVC_OK ? kvc_lanes_new(cache, lanes) : status;
}

static kvc_status settle(kvc_cache *cache) {
    kvc_status status = kvc_check_closed(cache, "settle keys");
    if (status != KVC_OK) return status;
    const size_t size = (size_t)cache->num_groups * sizeof(settling);
    settling *groups = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!groups) return kvc_fail(KVC_ERR_NOMEM, "out of memory to settle %d layer groups", cache->num_groups);
    kvc_lanes lanes = {0};
    int32_t num = 0;
    status = prepare_all(cache, groups, &num, &lanes);
    if (status == KVC_OK && num) write_unlocked(cache, groups, num);
    for (int32_t i = 0; i < num; i++) end(&groups[i], status);
    kvc_lanes_free(cache, &lanes);
    kvc_memory_free(&cache->memory, groups, size, KVC_MEMORY_SCRATCH, -1);
    return status;
}

kvc_status kvc_settle(kvc_cache *cache) {
    kvc_lock(cache);
    return kvc_unlock(cache, settle(cache));
}
