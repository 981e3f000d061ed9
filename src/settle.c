/* settle.c: writes what shifts have left to the queries into the keys.
 *
 * A slot is turned where it lies if all sequences that hold it see its keys off by the same delta.  Otherwise it stays
 * as it is, and each of those that see it off gets a copy.
 */
#include <string.h>

#include "rewrite.h"

/* What is known of a slot: the delta that all who hold it see, or one of these. */
enum { UNSEEN = INT32_MIN, DISPUTED = INT32_MIN + 1 };

/* One group on its way. */
typedef struct settling {
    kvc_cache *cache;
    int32_t group, num_blocks;
    int32_t num_drafts; /* made */
    int32_t **deltas;   /* [num_blocks + 1] where each block's slots begin in `slots` */
    int32_t *slots;     /* [num_slots] */
    kvc_draft *drafts;  /* [number of sequences] */
    float *scratch;
    size_t num_slots;
    uint64_t num_floats;
} settling;

static int is_disputed(const void *context, const kvc_run *run, int32_t slot) {
    const settling *s = context;
    return run->delta != 0 && s->deltas[run->block->index][slot] == DISPUTED;
}

static kvc_rows *rows_of(const settling *s, int32_t i) { return &s->cache->sequences.items[i]->rows[s->group]; }

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
        const kvc_rows *rows = rows_of(s, i);
        for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++)
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
    s->num_floats = kvc_draft_scratch(s->cache, s->group);
    s->deltas = get(s, (size_t)s->num_blocks, sizeof *s->deltas);
    s->slots = get(s, s->num_slots, sizeof *s->slots);
    s->drafts = get(s, (size_t)s->cache->sequences.num, sizeof *s->drafts);
    s->scratch = get(s, s->num_floats, sizeof *s->scratch);
    if (!s->deltas || !s->slots || !s->drafts || !s->scratch)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory to settle the keys of %zu slots", s->num_slots);
    note_deltas(s);
    const kvc_change change = {.moved_end = KVC_END, .settles = 1, .copies = is_disputed, .context = s};
    for (; s->num_drafts < s->cache->sequences.num; s->num_drafts++) {
        const kvc_status status =
            kvc_draft_make(s->cache, s->group, rows_of(s, s->num_drafts), &change, &s->drafts[s->num_drafts]);
        if (status != KVC_OK) return status;
    }
    return KVC_OK;
}

static void turn_slots(const settling *s) {
    const kvc_pool *pool = &s->cache->pools[s->group];
    kvc_turner turner = {.kernels = s->cache->kernels, .scratch = s->scratch};
    for (int32_t b = 0; b < s->num_blocks; b++)
        for (const int32_t *delta = s->deltas[b]; delta < s->deltas[b + 1]; delta++)
            if (*delta != 0 && *delta != UNSEEN && *delta != DISPUTED)
                kvc_turn_keys(s->cache, s->group, pool->blocks[b], (int32_t)(delta - s->deltas[b]), *delta, &turner);
}

static void end(settling *s, kvc_status status) {
    for (int32_t i = 0; status == KVC_OK && i < s->num_drafts; i++)
        kvc_draft_copy(s->cache, s->group, &s->drafts[i], s->scratch);
    if (status == KVC_OK) turn_slots(s);
    for (int32_t i = 0; i < s->num_drafts; i++)
        if (status == KVC_OK)
            kvc_draft_accept(s->cache, s->group, rows_of(s, i), &s->drafts[i]);
        else
            kvc_draft_discard(s->cache, s->group, &s->drafts[i]);
    put_back(s, s->deltas, (size_t)s->num_blocks, sizeof *s->deltas);
    put_back(s, s->slots, s->num_slots, sizeof *s->slots);
    put_back(s, s->drafts, (size_t)s->cache->sequences.num, sizeof *s->drafts);
    put_back(s, s->scratch, s->num_floats, sizeof *s->scratch);
}

static int has_deltas(const kvc_cache *cache, int32_t group) {
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_rows *rows = &cache->sequences.items[i]->rows[group];
        for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++)
            if (run->delta) return 1;
    }
    return 0;
}

static kvc_status settle(kvc_cache *cache) {
    kvc_status status = kvc_check_closed(cache, "settle keys");
    if (status != KVC_OK) return status;
    const size_t size = (size_t)cache->num_groups * sizeof(settling);
    settling *groups = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!groups) return kvc_fail(KVC_ERR_NOMEM, "out of memory to settle %d layer groups", cache->num_groups);
    int32_t num = 0;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        if (!has_deltas(cache, g)) continue;
        groups[num] = (settling){.cache = cache, .group = g, .num_blocks = cache->pools[g].num_blocks};
        status = prepare(&groups[num++]);
    }
    static const char what[] = "settling keys";
    for (int32_t i = 0; status == KVC_OK && i < num; i++)
        status = kvc_drafts_check(cache, groups[i].group, groups[i].drafts, groups[i].num_drafts, what);
    if (status == KVC_OK) status = kvc_check_max_bytes(cache, what);
    for (int32_t i = 0; i < num; i++) end(&groups[i], status);
    kvc_memory_free(&cache->memory, groups, size, KVC_MEMORY_SCRATCH, -1);
    return status;
}

kvc_status kvc_settle(kvc_cache *cache) {
    kvc_lock(cache);
    return kvc_unlock(cache, settle(cache));
}
