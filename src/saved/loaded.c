/* loaded.c: the sequences and slots that the tables of a saved state ask for.  A holding is the rows of a sequence in a
 * layer group, as saved: runs of rows of the file.  Rows that no chosen sequence holds are not needed.  The others are
 * cut into extents, which fill one block after the other.  Lost and missing positions are those of kvc_run_list.
 * Sequences that have an id that is loaded are replaced at the end. */
#include "saved/loaded.h"

#include <string.h>

#include "cache/check.h"
#include "space/limits.h"
#include "space/evict.h"
#include "space/resident.h"
#include "cache/waiting.h"

/* ---- checking the tables ----------------------------------------------------------------------------------------- */

static int is_interval(int64_t begin, int64_t end, int64_t stride) {
    return begin >= 0 && begin <= end && end <= INT32_MAX / stride;
}

/* Returns whether a sequence can have this holding in a group of the policy. */
static int is_holding(const kvc_saved_holding *h, const kvc_policy *policy) {
    const int32_t kind = policy->kind, stride = kvc_policy_stride(policy);
    const int64_t most = kind == KVC_NONE ? 0 : kind == KVC_CROSS ? 1 : INT64_MAX;
    if (h->num_runs < 0 || h->num_runs > most) return 0;
    if (kind == KVC_NONE || kind == KVC_CROSS) return !h->lost_end && !h->missing_end;
    return is_interval(h->lost_begin, h->lost_end, stride) && is_interval(h->missing_begin, h->missing_end, stride);
}

/* Returns whether this can be a run in a group of the policy, with so many rows.  Neither its positions nor the
 * positions at which its keys were rotated are negative.  Rows below exact_to, of its sequence, were not moved. */
static int is_run(const kvc_saved_run *run, const kvc_policy *policy, int64_t num_rows, int64_t exact_to) {
    const int64_t stride = kvc_policy_stride(policy);
    if (run->count < 1 || run->count > INT32_MAX || run->row < 0 || run->row > num_rows - run->count) return 0;
    if (run->position < 0 || run->position > INT32_MAX / stride - run->count || run->delta % stride) return 0;
    const int64_t position = run->position * stride + stride - 1;
    if (run->delta > position || run->delta < position - INT32_MAX) return 0;
    if (run->delta && position < exact_to) return 0;
    return policy->kind != KVC_CROSS || (!run->position && !run->delta && run->count <= policy->max_len);
}

static kvc_status check_layers(const kvc_state *state) {
    const kvc_format *f = &state->format;
    const kvc_cache *cache = state->cache;
    int32_t i = 0;
    if (f->state->num_groups != cache->num_groups)
        return kvc_fail(KVC_ERR_FORMAT, "altered: %lld layer groups, where its layers make %d",
                        (long long)f->state->num_groups, cache->num_groups);
    while (i < cache->num_layers && f->layers[i].group == cache->group_of[i]) i++;
    if (i < cache->num_layers)
        return kvc_fail(KVC_ERR_FORMAT, "altered: layer %d is in group %lld", i, (long long)f->layers[i].group);
    for (int32_t g = 0; g < cache->num_groups; g++) /* other groups' rows are in the file, which limits their number */
        if (cache->policies[g].kind == KVC_NONE && f->group_rows[g])
            return kvc_fail(KVC_ERR_FORMAT, "altered: group %d, of layers without attention, has rows", g);
    return KVC_OK;
}

/* Checks the holdings of sequence i, one for each group, and their runs.  *first: index of its first run; becomes the
 * index of the next sequence's. */
static kvc_status check_holdings(const kvc_state *state, int64_t i, int64_t *first) {
    const kvc_format *f = &state->format;
    const kvc_cache *cache = state->cache;
    const int64_t exact_to = f->exact_to[i];
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_saved_holding *h = &f->holdings[i * cache->num_groups + g];
        int64_t r = 0;
        if (!is_holding(h, &cache->policies[g]) || h->num_runs > f->state->num_runs - *first)
            return kvc_fail(KVC_ERR_FORMAT, "altered: what sequence %lld holds in group %d cannot be",
                            (long long)f->sequences[i].id, g);
        while (r < h->num_runs && is_run(&f->runs[*first + r], &cache->policies[g], f->group_rows[g], exact_to)) r++;
        if (r < h->num_runs)
            return kvc_fail(KVC_ERR_FORMAT, "altered: run %lld of the table of runs cannot be",
                            (long long)(*first + r));
        *first += r;
    }
    return KVC_OK;
}

/* Checks that sequences share all rows of a cross-attention layer or none: no run in its group begins or ends within
 * another.  edges: [rows + 1] zeros; where runs begin and end. */
static kvc_status check_shared(const kvc_format *f, int32_t g, int32_t num_groups, uint8_t *edges) {
    for (int checks = 0; checks < 2; checks++) { /* the first pass only marks */
        const kvc_saved_holding *holding = f->holdings;
        const kvc_saved_run *run = f->runs;
        for (int64_t i = 0; i < f->state->num_sequences * num_groups; i++, run += holding++->num_runs) {
            if (i % num_groups != g || !holding->num_runs) continue;
            edges[run->row] = edges[run->row + run->count] = 1;
            for (int64_t j = 1; checks && j < run->count; j++)
                if (edges[run->row + j])
                    return kvc_fail(KVC_ERR_FORMAT, "altered: sequences share a part of their rows in group %d", g);
        }
    }
    return KVC_OK;
}

static kvc_status check_all_shared(kvc_state *state) {
    kvc_status status = KVC_OK;
    for (int32_t g = state->cache->num_token_groups; status == KVC_OK && g < state->cache->num_groups; g++) {
        const uint64_t size = (uint64_t)state->format.group_rows[g] + 1;
        uint8_t *edges = kvc_state_take(state, size);
        if (!edges) return KVC_ERR_NOMEM;
        memset(edges, 0, (size_t)size);
        status = check_shared(&state->format, g, state->cache->num_groups, edges);
    }
    return status;
}

kvc_status kvc_loaded_check(kvc_state *state) {
    const kvc_format *f = &state->format;
    int64_t num_runs = 0, num_tokens = 0;
    kvc_status status = check_layers(state);
    for (int64_t i = 0; status == KVC_OK && i < f->state->num_sequences; i++) {
        const kvc_saved_sequence *s = &f->sequences[i];
        if ((i && s->id <= f->sequences[i - 1].id) || s->num_tokens < 0 ||
            s->num_tokens > f->state->num_tokens - num_tokens || f->exact_to[i] < 0 || f->exact_to[i] > INT32_MAX)
            return kvc_fail(KVC_ERR_FORMAT, "altered: sequence %lld of the table of sequences cannot be", (long long)i);
        num_tokens += s->num_tokens;
        status = check_holdings(state, i, &num_runs);
    }
    if (status != KVC_OK) return status;
    if (num_runs == f->state->num_runs && num_tokens == f->state->num_tokens) return check_all_shared(state);
    return kvc_fail(KVC_ERR_FORMAT, "altered: the sequences have %lld runs and %lld tokens, of %lld and %lld",
                    (long long)num_runs, (long long)num_tokens, (long long)f->state->num_runs,
                    (long long)f->state->num_tokens);
}

kvc_status kvc_loaded_choose(const kvc_state *state, const kvc_load_args *args, int32_t *chosen) {
    const kvc_format *f = &state->format;
    int64_t next = 0; /* index in seq_ids */
    for (int64_t i = 0; i < f->state->num_sequences; i++) {
        const int is_next = next < args->num_sequences && args->seq_ids[next] == f->sequences[i].id;
        chosen[i] = is_next ? (int32_t)++next : !args->seq_ids;
    }
    if (next == args->num_sequences) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "seq_ids[%lld] is %lld: the file has no such sequence", (long long)next,
                    (long long)args->seq_ids[next]);
}

/* ---- visiting runs ----------------------------------------------------------------------------------------------- */

/* A walk over the holdings of the chosen sequences. */
typedef struct visitor {
    kvc_state *state;
    const kvc_load_args *args;
    const int32_t *chosen;
    kvc_status (*visit)(struct visitor *v, int32_t g, const kvc_saved_holding *holding, const kvc_saved_run *runs);
    uint8_t **needed; /* [num_groups][rows] which rows of the file are needed: NEEDED or BEGINS_BLOCK */
    kvc_sequence *sequence;
} visitor;

enum { NOT_NEEDED, NEEDED, BEGINS_BLOCK };

/* Calls visit for all that the chosen sequences hold.  begin: called before the rows of sequence i of the file; may
 * be NULL. */
static kvc_status visit_all(visitor *v, kvc_status (*begin)(visitor *v, int64_t i)) {
    const kvc_format *f = &v->state->format;
    const kvc_saved_holding *holding = f->holdings;
    const kvc_saved_run *run = f->runs;
    kvc_status status = KVC_OK;
    for (int64_t i = 0; i < f->state->num_sequences; i++) {
        if (begin && v->chosen[i]) status = begin(v, i);
        for (int32_t g = 0; status == KVC_OK && g < v->state->cache->num_groups; g++, run += holding++->num_runs)
            if (v->chosen[i]) status = v->visit(v, g, holding, run);
        if (status != KVC_OK) return status;
    }
    return KVC_OK;
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

/* Marks the rows of a holding as needed. */
static kvc_status mark_rows(visitor *v, int32_t g, const kvc_saved_holding *holding, const kvc_saved_run *runs) {
    const int is_cross = g >= v->state->cache->num_token_groups;
    for (int64_t r = 0; r < holding->num_runs; r++) {
        const kvc_saved_run *run = &runs[r];
        uint8_t *needed = v->needed[g] + run->row;
        for (int64_t i = 0; i < run->count; i++)
            if (needed[i] == NOT_NEEDED) needed[i] = NEEDED;
        if (is_cross) needed[0] = BEGINS_BLOCK; /* a sequence's rows of cross-attention lie in a block of their own */
    }
    return KVC_OK;
}

/* Cuts the needed rows into extents that fill one block after the other; only counts extents while there is no memory
 * for them.  Returns the number of blocks. */
static int64_t cut_rows(kvc_extents *extents, const uint8_t *needed, int64_t num_rows, int32_t block_size) {
    int64_t num_blocks = 0, last_row = -2;
    int32_t fill = block_size;
    extents->num = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        if (needed[row] == NOT_NEEDED) continue;
        const int opens = fill == block_size || needed[row] == BEGINS_BLOCK;
        if (opens) fill = 0;
        num_blocks += opens;
        if (opens || last_row != row - 1) {
            if (extents->items) extents->items[extents->num] = (kvc_extent){.row = row, .slot = fill};
            extents->num++;
        }
        if (extents->items) extents->items[extents->num - 1].count++;
        fill++;
        last_row = row;
    }
    return num_blocks;
}

/* Takes slots for the needed rows of a group. */
static kvc_status take_slots(visitor *v, int32_t g) {
    kvc_state *state = v->state;
    kvc_pool *pool = &state->cache->pools[g];
    kvc_extents *to = &state->groups[g], extents = {0};
    const int64_t num_rows = state->format.group_rows[g],
                  num_blocks = cut_rows(&extents, v->needed[g], num_rows, pool->block_size);
    extents.items = kvc_state_alloc(state, (uint64_t)extents.num * sizeof *extents.items);
    if (!extents.items) return KVC_ERR_NOMEM;
    if (num_blocks > INT32_MAX / 2 - pool->num_blocks)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld blocks", (long long)num_blocks);
    cut_rows(&extents, v->needed[g], num_rows, pool->block_size); /* fills them in */
    KVC_TRY(kvc_pool_reserve(pool, (int32_t)num_blocks, &extents.reserved));
    kvc_block *block = NULL;
    for (int64_t i = 0; i < extents.num; i++) {
        kvc_extent *e = &extents.items[i];
        if (!e->slot) block = kvc_pool_open(pool);
        e->block = block;
        kvc_pool_take(pool, block, e->count);
        memset(block->holders + e->slot, 0, (size_t)e->count * sizeof *block->holders); /* add_runs holds them */
        pool->counts.replacing += e->count;
    }
    *to = extents;
    return KVC_OK;
}

/* ---- sequences --------------------------------------------------------------------------------------------------- */

/* Makes sequence i of the file, without rows. */
static kvc_status add_sequence(visitor *v, int64_t i) {
    kvc_cache *cache = v->state->cache;
    const kvc_format *f = &v->state->format;
    const int64_t id = v->args->to_ids ? v->args->to_ids[v->chosen[i] - 1] : f->sequences[i].id;
    if (kvc_table_find(&v->state->sequences, id))
        return kvc_fail(KVC_ERR_INVALID, "to_ids has %lld twice", (long long)id);
    v->sequence = kvc_sequence_new(cache->pools, id, cache->num_groups, cache->num_token_groups);
    if (!v->sequence) return kvc_fail_sequence(id);
    v->sequence->exact_to = (int32_t)f->exact_to[i];
    v->sequence->date = 0; /* nobody knows how old its rows are */
    kvc_table_insert(&v->state->sequences, v->sequence);
    return KVC_OK;
}

/* Calls visit for each part of a saved run that lies in one extent; returns their number. */
static int32_t visit_parts(const kvc_extents *extents, const kvc_saved_run *run, kvc_part_fn *visit, void *context) {
    const int64_t end = run->row + run->count;
    int32_t num = 0;
    for (const kvc_extent *e = kvc_first_extent(extents, run->row); e < extents->items + extents->num && e->row < end;
         e++, num++) {
        const int64_t from = e->row > run->row ? e->row : run->row,
                      to = e->row + e->count < end ? e->row + e->count : end;
        const kvc_run part = {.block = e->block,
                              .slot = e->slot + (int32_t)(from - e->row),
                              .count = (int32_t)(to - from),
                              .position = (int32_t)(run->position + from - run->row),
                              .delta = (int32_t)run->delta};
        if (visit) visit(context, &part);
    }
    return num;
}

/* Gives the sequence that was made last the runs of its holding in group g. */
static kvc_status add_runs(visitor *v, int32_t g, const kvc_saved_holding *holding, const kvc_saved_run *runs) {
    const kvc_extents *extents = &v->state->groups[g];
    kvc_run_list *list = &v->sequence->runs[g];
    int64_t num = 0;
    for (int64_t r = 0; r < holding->num_runs; r++) num += visit_parts(extents, &runs[r], /* only count */ NULL, NULL);
    if (num > INT32_MAX / 4) return kvc_fail(KVC_ERR_NOMEM, "a sequence of more than %lld runs", (long long)num);
    if (num) KVC_TRY(kvc_runs_reserve(list, &v->state->cache->memory, (int32_t)num));
    for (int64_t r = 0; r < holding->num_runs; r++) visit_parts(extents, &runs[r], kvc_hold_part, list);
    list->lost = (kvc_interval){(int32_t)holding->lost_begin, (int32_t)holding->lost_end};
    list->missing = (kvc_interval){(int32_t)holding->missing_begin, (int32_t)holding->missing_end};
    return KVC_OK;
}

/* ---- limits ------------------------------------------------------------------------------------------------------ */

/* Calls visit for all rows in a group of the sequences that are to be replaced. */
static void visit_replaced(const kvc_need *need, int32_t g, kvc_part_fn *visit, void *context) {
    const kvc_state *state = need->context;
    const kvc_table *loaded = &state->sequences;
    for (const kvc_sequence *s = kvc_table_first(loaded); s; s = kvc_table_next(loaded, s)) {
        const kvc_sequence *old = kvc_table_find(&state->cache->sequences, s->id);
        if (old) kvc_runs_visit(&old->runs[g], 0, KVC_END, visit, context);
    }
}

static kvc_status check_slots(const kvc_need *need, int32_t g) {
    const kvc_cache *cache = need->cache;
    int64_t live;
    if (!kvc_exceeds_capacity(need, g, 0, &live)) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL, "loading would make it %lld tokens in all: capacity is %lld%s", (long long)live,
                    (long long)cache->limits.capacity,
                    cache->limits.has_own_capacity ? "" : ", which is max_seq_len * max_sequences");
}

static kvc_need need_of(kvc_state *state) {
    return (kvc_need){.cache = state->cache,
                      .check_slots = check_slots,
                      .visit_replaced = visit_replaced,
                      .context = state,
                      .what = "loading"};
}

/* Returns KVC_ERR_BUSY if a sequence that is to be replaced is in use, KVC_ERR_INVALID if it is kept. */
static kvc_status check_idle(const kvc_state *state) {
    const kvc_table *loaded = &state->sequences;
    for (const kvc_sequence *s = kvc_table_first(loaded); s; s = kvc_table_next(loaded, s)) {
        const kvc_sequence *old = kvc_table_find(&state->cache->sequences, s->id);
        KVC_TRY(kvc_check_idle(old));
        KVC_TRY(kvc_check_not_kept(old));
    }
    return KVC_OK;
}

/* ---- the steps --------------------------------------------------------------------------------------------------- */

/* Gets the marks of all rows of the file. */
static kvc_status mark_needed(visitor *v) {
    kvc_state *state = v->state;
    const int32_t num_groups = state->cache->num_groups;
    v->needed = kvc_state_alloc(state, (uint64_t)num_groups * sizeof *v->needed);
    if (!v->needed) return KVC_ERR_NOMEM;
    for (int32_t g = 0; g < num_groups; g++) {
        const uint64_t num_rows = (uint64_t)state->format.group_rows[g];
        v->needed[g] = kvc_state_alloc(state, num_rows);
        if (!v->needed[g]) return KVC_ERR_NOMEM;
        memset(v->needed[g], NOT_NEEDED, (size_t)num_rows);
    }
    v->visit = mark_rows;
    return visit_all(v, /* begin */ NULL);
}

/* Takes the memory of the blocks that are new. */
static void take_pages(kvc_state *state) {
    for (int32_t g = 0; g < state->cache->num_groups; g++)
        for (int64_t i = 0; i < state->groups[g].num; i++) {
            const kvc_extent *e = &state->groups[g].items[i];
            /* The first extent of a block in which slots are filled for the first time. */
            if (!e->slot && e->block->pages.touched_before < e->block->fill) kvc_take_filled(state->cache, g, e->block);
        }
}

kvc_status kvc_loaded_make(kvc_state *state, const kvc_load_args *args, const int32_t *chosen) {
    visitor v = {.state = state, .args = args, .chosen = chosen};
    const kvc_need need = need_of(state);
    while (kvc_cache_wait_copies(state->cache)) continue; /* others have rows in use meanwhile */
    kvc_status status = kvc_state_add_groups(state);
    if (status == KVC_OK) status = mark_needed(&v);
    if (status != KVC_OK) return status;
    state->is_loading = 1;
    for (int32_t g = 0; status == KVC_OK && g < state->cache->num_groups; g++) status = take_slots(&v, g);
    v.visit = add_runs;
    if (status == KVC_OK) status = visit_all(&v, add_sequence);
    if (status == KVC_OK) status = check_idle(state);
    if (status == KVC_OK) status = kvc_check_room(&need); /* victims are evicted once all is read and checked */
    if (status != KVC_OK) {
        kvc_state_drop(state); /* before the mutex is released: slots without runs are nobody else's business */
        return status;
    }
    kvc_state_pin(state);
    take_pages(state);
    return KVC_OK;
}

kvc_status kvc_loaded_accept(kvc_state *state) {
    kvc_cache *cache = state->cache;
    const kvc_need need = need_of(state);
    kvc_status status;
    do {
        kvc_cache_find_all(cache);
        status = check_idle(state); /* others may have used them since kvc_loaded_make */
        if (status == KVC_OK) status = kvc_make_room(&need);
    } while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    if (status == KVC_OK) kvc_state_accept(state);
    return status;
}
