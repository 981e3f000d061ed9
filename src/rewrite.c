#include "rewrite.h"

#include <string.h>

enum { FUNCTION_ROWS = 64 }; /* that the caller's function gets at a time */

/* ---- the draft --------------------------------------------------------------------------------------------------- */

static int32_t target(const kvc_change *change, int32_t position) {
    return change->divisor ? position / change->divisor : position + change->move;
}

/* Goes over what rows are to become. */
typedef struct walk {
    const kvc_change *change;
    kvc_pool *pool;
    kvc_draft *draft;              /* NULL: parts are only counted */
    kvc_block *block;              /* that copies go to */
    int64_t parts, copies, copied; /* runs, those that are copied, their rows */
} walk;

static void add_copies(walk *w, const kvc_run *part, kvc_run to) {
    for (int32_t done = 0; done < part->count; done += to.count) {
        if (!w->block || w->block->fill == w->pool->block_size) w->block = kvc_pool_open(w->pool);
        const int32_t rest = part->count - done, room = w->pool->block_size - w->block->fill;
        to.count = rest < room ? rest : room;
        to.block = w->block;
        to.slot = kvc_pool_take(w->pool, w->block, to.count);
        w->draft->copies[w->draft->num_copies++] =
            (kvc_copy){part->block, to.block, part->slot + done, to.slot, to.count, part->position + done, part->delta};
        kvc_rows_push(&w->draft->rows, &to);
        to.position += to.count;
    }
}

static void add_part(walk *w, const kvc_run *part, int changes, int copied) {
    const kvc_change *change = w->change;
    w->parts++;
    w->copies += copied;
    w->copied += copied ? part->count : 0;
    if (!w->draft) return;
    kvc_run to = *part;
    if (changes) {
        to.position = target(change, part->position);
        if (change->turns) to.delta += to.position - part->position;
        if (change->settles) to.delta = 0;
    }
    if (copied)
        add_copies(w, part, to);
    else
        kvc_rows_push(&w->draft->rows, &to);
}

/* How many of a part's rows, from its first one, change alike. */
static int32_t alike(const kvc_change *change, const kvc_run *part, int *copied) {
    *copied = change->copies && change->copies(change->context, part, part->slot);
    if (change->divisor) return 1; /* positions may repeat from here on */
    if (!change->copies) return part->count;
    int32_t n = 1;
    while (n < part->count && !change->copies(change->context, part, part->slot + n) == !*copied) n++;
    return n;
}

static void walk_rows(walk *w, const kvc_rows *rows) {
    const kvc_change *change = w->change;
    for (const kvc_run *run = kvc_rows_begin(rows); run < kvc_rows_end(rows); run++) {
        const kvc_run below = kvc_run_part(run, 0, change->begin),
                      above = kvc_run_part(run, change->moved_end, INT32_MAX);
        kvc_run rest = kvc_run_part(run, change->end, change->moved_end);
        if (below.count) add_part(w, &below, 0, 0);
        while (rest.count) {
            int copied;
            kvc_run part = rest;
            part.count = alike(change, &rest, &copied);
            add_part(w, &part, 1, copied);
            rest.slot += part.count;
            rest.position += part.count;
            rest.count -= part.count;
        }
        if (above.count) add_part(w, &above, 0, 0);
    }
}

static kvc_status reserve(kvc_cache *cache, kvc_pool *pool, const walk *counted, kvc_draft *draft) {
    const int64_t blocks = (counted->copied + pool->block_size - 1) / pool->block_size;
    const int64_t copies = counted->copies + blocks, runs = counted->parts + blocks; /* cut where blocks end */
    if (runs > INT32_MAX / 2) return kvc_fail(KVC_ERR_NOMEM, "a sequence of more than %lld runs", (long long)runs);
    kvc_status status = kvc_rows_reserve(&draft->rows, &cache->memory, (int32_t)runs);
    if (status != KVC_OK || !counted->copied) return status;
    draft->room = (int32_t)copies;
    draft->copies = kvc_memory_alloc(&cache->memory, (uint64_t)copies * sizeof(kvc_copy), KVC_MEMORY_SCRATCH, -1);
    if (!draft->copies) return kvc_fail(KVC_ERR_NOMEM, "out of memory to copy %lld rows", (long long)counted->copied);
    const int32_t before = pool->num_blocks;
    status = kvc_pool_reserve(pool, (int32_t)blocks);
    draft->num_opened = pool->num_blocks - before;
    return status;
}

kvc_status kvc_draft_make(kvc_cache *cache, int32_t group, const kvc_rows *rows, const kvc_change *change,
                          kvc_draft *draft) {
    walk w = {.change = change, .pool = &cache->pools[group]};
    *draft = (kvc_draft){.change = *change, .from = rows};
    kvc_rows_init(&draft->rows);
    walk_rows(&w, rows);
    const kvc_status status = reserve(cache, w.pool, &w, draft);
    if (status != KVC_OK) {
        kvc_draft_discard(cache, group, draft);
        return status;
    }
    w.pool->drafted += w.copied;
    w.draft = draft;
    draft->num_reused = -w.pool->reused;
    walk_rows(&w, rows);
    draft->num_reused += w.pool->reused;
    kvc_rows_recount(&draft->rows);
    return KVC_OK;
}

/* Calls visit for all that a draft takes the place of. */
static void visit_replaced(const kvc_draft *draft, kvc_part_fn *visit, void *context) {
    kvc_rows_visit(draft->from, draft->change.begin, draft->change.end, visit, context);
    for (int32_t i = 0; i < draft->num_copies; i++) {
        const kvc_copy *copy = &draft->copies[i];
        visit(context, &(kvc_run){copy->from, copy->from_slot, copy->count, copy->position, copy->delta});
    }
}

static void try_drop(void *slots, const kvc_run *part) {
    kvc_pool_try_drop(part->block, part->slot, part->count, slots);
}

static void restore(void *context, const kvc_run *part) {
    (void)context;
    kvc_pool_restore(part->block, part->slot, part->count);
}

kvc_status kvc_drafts_check(const kvc_cache *cache, int32_t group, const kvc_draft *drafts, int32_t num,
                            const char *what) {
    int64_t freed = 0;
    if (!cache->capacity) return KVC_OK;
    for (int32_t i = 0; i < num; i++) visit_replaced(&drafts[i], try_drop, &freed);
    for (int32_t i = 0; i < num; i++) visit_replaced(&drafts[i], restore, NULL);
    const int64_t live = cache->pools[group].live - freed;
    if (live <= cache->capacity) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL,
                    "%s would make it %lld slots: capacity is %lld; remove some tokens, clear a sequence, or give a "
                    "larger capacity",
                    what, (long long)live, (long long)cache->capacity);
}

static void free_copies(kvc_cache *cache, int32_t group, kvc_draft *draft) {
    for (int32_t i = 0; i < draft->num_copies; i++) cache->pools[group].drafted -= draft->copies[i].count;
    kvc_memory_free(&cache->memory, draft->copies, (uint64_t)draft->room * sizeof(kvc_copy), KVC_MEMORY_SCRATCH, -1);
}

void kvc_draft_accept(kvc_cache *cache, int32_t group, kvc_rows *rows, kvc_draft *draft) {
    kvc_pool *pool = &cache->pools[group];
    visit_replaced(draft, kvc_drop_part, pool);
    for (int32_t i = 0; i < draft->num_copies; i++) cache->stats.rows_copied += draft->copies[i].count;
    draft->rows.lost_end = rows->lost_end;
    kvc_rows_free_list(rows, &cache->memory);
    *rows = draft->rows;
    free_copies(cache, group, draft);
}

void kvc_draft_discard(kvc_cache *cache, int32_t group, kvc_draft *draft) {
    for (int32_t i = draft->num_copies - 1; i >= 0; i--)
        kvc_pool_drop(&cache->pools[group], draft->copies[i].to, draft->copies[i].to_slot, draft->copies[i].count);
    kvc_pool_unopen(&cache->pools[group], draft->num_opened);
    cache->pools[group].reused -= draft->num_reused;
    kvc_rows_free_list(&draft->rows, &cache->memory);
    free_copies(cache, group, draft);
    *draft = (kvc_draft){0};
}

/* ---- copying ----------------------------------------------------------------------------------------------------- */

uint64_t kvc_draft_scratch(const kvc_cache *cache, int32_t group) {
    uint64_t most = 0;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const kvc_layer *layer = &cache->layers[i];
        if (cache->group_of[i] != group) continue;
        uint64_t size = kvc_turner_floats(layer->k_dim);
        if (layer->rope.kind == KVC_ROPE_FUNCTION)
            size = (uint64_t)layer->k_dim * (uint64_t)layer->num_kv_heads * FUNCTION_ROWS;
        if (size > most) most = size;
    }
    return most;
}

static void copy_rows(const kvc_layout *at, const kvc_copy *copy) {
    for (int32_t h = 0; h < at->num_kv_heads; h++) {
        memcpy(kvc_key_at(at, copy->to, copy->to_slot, h), kvc_key_at(at, copy->from, copy->from_slot, h),
               (size_t)copy->count * at->k_row_bytes);
        if (at->v_stored)
            memcpy(kvc_value_at(at, copy->to, copy->to_slot, h), kvc_value_at(at, copy->from, copy->from_slot, h),
                   (size_t)copy->count * at->v_stored);
    }
}

void kvc_turn_keys(const kvc_cache *cache, int32_t group, kvc_block *block, int32_t slot, int32_t delta,
                   kvc_turner *turner) {
    for (int32_t layer = 0; layer < cache->num_layers; layer++) {
        const kvc_rope *rope = kvc_rope_of(cache, layer);
        if (cache->group_of[layer] != group || cache->layers[layer].share || !rope) continue;
        const kvc_layout *at = &cache->layouts[cache->layout_of[layer]];
        const int32_t type = cache->layers[layer].k_type, dim = cache->layers[layer].k_dim;
        for (int32_t h = 0; h < at->num_kv_heads; h++) {
            uint8_t *key = kvc_key_at(at, block, slot, h);
            kvc_turner_turn(turner, rope, delta, key, type, key, type, dim);
        }
    }
}

/* Moves the keys of copied rows by the caller's function. */
static kvc_status call_function(const kvc_cache *cache, int32_t layer, const kvc_copy *copy, int32_t first,
                                int32_t count, int32_t delta, float *keys) {
    const kvc_layer *config = &cache->layers[layer];
    const kvc_layout *at = &cache->layouts[cache->layout_of[layer]];
    const int64_t row = (int64_t)at->k_row_bytes, f32_row = config->k_dim * (int64_t)sizeof(float);
    const size_t head = (size_t)count * (size_t)config->k_dim;
    for (int32_t h = 0; h < at->num_kv_heads; h++)
        cache->kernels->convert[config->k_type][KVC_F32](keys + (size_t)h * head, f32_row,
                                                         kvc_key_at(at, copy->to, copy->to_slot + first, h), row, count,
                                                         config->k_dim);
    if (config->rope.shift(config->rope.user, layer, keys, config->num_kv_heads, count, config->k_dim, delta))
        return kvc_fail(KVC_ERR_CALLBACK, "the function that moves the keys of layer %d failed", layer);
    for (int32_t h = 0; h < at->num_kv_heads; h++)
        cache->kernels->convert[KVC_F32][config->k_type](kvc_key_at(at, copy->to, copy->to_slot + first, h), row,
                                                         keys + (size_t)h * head, f32_row, count, config->k_dim);
    return KVC_OK;
}

static kvc_status move_by_function(const kvc_cache *cache, int32_t layer, const kvc_change *change,
                                   const kvc_copy *copy, float *keys) {
    for (int32_t i = 0, n; i < copy->count; i += n) {
        const int32_t position = copy->position + i, delta = target(change, position) - position;
        n = change->divisor ? 1 : copy->count - i < FUNCTION_ROWS ? copy->count - i : FUNCTION_ROWS;
        const kvc_status status = delta ? call_function(cache, layer, copy, i, n, delta, keys) : KVC_OK;
        if (status != KVC_OK) return status;
    }
    return KVC_OK;
}

static kvc_status move_copy(const kvc_cache *cache, int32_t group, const kvc_change *change, const kvc_copy *copy,
                            float *scratch) {
    kvc_turner turner = {.kernels = cache->kernels, .scratch = scratch};
    for (int32_t i = 0; i < copy->count; i++) {
        const int32_t position = copy->position + i, delta = copy->delta + target(change, position) - position;
        if (delta) kvc_turn_keys(cache, group, copy->to, copy->to_slot + i, delta, &turner);
    }
    kvc_status status = KVC_OK;
    for (int32_t layer = 0; status == KVC_OK && layer < cache->num_layers; layer++)
        if (cache->group_of[layer] == group && kvc_keeps_tokens(cache, layer) &&
            cache->layers[layer].rope.kind == KVC_ROPE_FUNCTION)
            status = move_by_function(cache, layer, change, copy, scratch);
    return status;
}

kvc_status kvc_draft_copy(const kvc_cache *cache, int32_t group, const kvc_draft *draft, float *scratch) {
    const kvc_pool *pool = &cache->pools[group];
    kvc_status status = KVC_OK;
    for (int32_t i = 0; status == KVC_OK && i < draft->num_copies; i++) {
        for (int32_t l = 0; l < pool->num_layers; l++) copy_rows(&pool->layouts[l], &draft->copies[i]);
        if (draft->change.settles) status = move_copy(cache, group, &draft->change, &draft->copies[i], scratch);
    }
    return status;
}
