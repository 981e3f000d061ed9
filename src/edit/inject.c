/* inject.c: kvc_inject: replaces stored rows.
 *
 * First, a rewrite (edit/rewrite.h) copies the rows to write that another sequence or a view holds too to new slots, so
 * that the sequence has each slot to itself.  Then rows are written where they lie, without the mutex.  Positions may
 * repeat: then the latest row is written.  Victims are kept sequences that the call will evict to make room. */
#include <stdio.h>
#include <string.h>

#include "base/parallel.h"
#include "base/dtype.h"
#include "edit/rewrite.h"
#include "cache/check.h"
#include "space/limits.h"
#include "rows/copy.h"
#include "rows/sketch.h"
#include "cache/waiting.h"

enum { WORTH_THREADS = 1 << 16 }; /* elements */

/* One call of kvc_inject. */
typedef struct injection {
    kvc_cache *cache;
    const kvc_rows_in *in;
    kvc_sequence *sequence; /* NULL: there is none */
    int32_t layer, group, stride;
    int32_t begin, end; /* positions, or rows of a group with a stride, here and below */
    int32_t low, high;  /* positions [low, high) of [begin, end) may hold a row */
    uint8_t *found;     /* [(high - low) / 8 + 1] a bit per position: whether it holds a row */
    kvc_run *parts;     /* [num_rows] the latest row of each position, in runs of at most KVC_COPY_ROWS rows */
    int64_t num_rows;   /* number of rows at positions [begin, end), not only the latest */
    int64_t num_parts, num_found; /* number of parts, and of rows in them */
    kvc_copiers copiers;
    kvc_rewrite rewrite; /* copies rows that another sequence or a view holds too */
} injection;

/* ---- which rows -------------------------------------------------------------------------------------------------- */

static size_t found_bytes(const injection *x) { return (size_t)(x->high - x->low) / 8 + 1; }

static int is_found(const injection *x, int32_t position) {
    const int32_t i = position - x->low;
    return position >= x->low && position < x->high && x->found[i / 8] >> i % 8 & 1;
}

/* Adds the parts of a run at positions where no later row was found. */
static void find_in_run(injection *x, const kvc_run *run) {
    const kvc_run all = kvc_run_part(run, x->begin, x->end);
    for (int32_t to = all.position + all.count, from; to > all.position; to = from) {
        for (from = to; from > all.position && to - from < KVC_COPY_ROWS && !is_found(x, from - 1); from--) {
            const int32_t i = from - 1 - x->low;
            x->found[i / 8] = (uint8_t)(x->found[i / 8] | 1 << i % 8);
        }
        if (from == to)
            from--; /* a later row stands there */
        else
            x->parts[x->num_parts++] = kvc_run_part(&all, from, to);
    }
}

/* Finds the parts in one pass, from the row that arrived last to the first: the first found at a position counts. */
static void find_parts(injection *x, const kvc_run_list *list) {
    x->num_parts = x->num_found = 0;
    memset(x->found, 0, found_bytes(x));
    for (int32_t i = list->num - 1; i >= 0; i--) find_in_run(x, kvc_runs_begin(list) + i);
    for (int64_t i = 0; i < x->num_parts; i++) x->num_found += x->parts[i].count;
}

/* Returns KVC_ERR_INDEX, with a message that names the first few stretches of positions without a row. */
static kvc_status fail_missing(const injection *x, int64_t seq_id) {
    char ranges[128] = "";
    int32_t position = x->begin;
    size_t n = 0;
    for (int i = 0; position < x->end && i < 4; i++) {
        while (position < x->end && is_found(x, position)) position++;
        if (position == x->end) break;
        const int32_t from = position;
        while (position < x->end && !is_found(x, position)) position++;
        n += (size_t)snprintf(ranges + n, sizeof ranges - n, "%s%d", i ? ", " : "", kvc_position_of(from, x->stride));
        if (position - from > 1)
            n += (size_t)snprintf(ranges + n, sizeof ranges - n, " to %d", kvc_position_of(position - 1, x->stride));
    }
    while (position < x->end && is_found(x, position)) position++;
    return kvc_fail(KVC_ERR_INDEX,
                    "sequence %lld holds nothing at %lld of %d positions in layer %d: %s%s; store rows there first, or "
                    "set skip_missing",
                    (long long)seq_id, (long long)(x->end - x->begin - x->num_found), x->end - x->begin, x->layer,
                    ranges, position < x->end ? ", ..." : "");
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* Rotates a part's keys back by its delta, as stored keys lack that rotation, and writes them. */
static void rotate_keys_back(const injection *x, kvc_rotator *rotator, const kvc_run *part, const kvc_rope *rope) {
    const kvc_rows_in *in = x->in;
    const kvc_layer *config = &x->cache->layers[x->layer];
    const kvc_layout *at = &x->cache->layouts[x->cache->layout_of[x->layer]];
    const kvc_rows to = kvc_stored_rows(config, at, part->block->rows, part->slot, KVC_KEYS),
                   given = kvc_given_rows(in->k_type, in->k, in->k_row_stride, in->k_head_stride, config->k_dim),
                   from = kvc_row_of(&given, part->position - x->begin, 0);
    kvc_rotator_rotate(rotator, rope, -part->delta, &to, &from, part->count, config);
}

/* Writes the rows of a part, of all heads. */
static void write_part(const injection *x, kvc_rotator *rotator, const kvc_run *part) {
    const kvc_cache *cache = x->cache;
    const kvc_rows_in *in = x->in;
    const kvc_layer *config = &cache->layers[x->layer];
    const kvc_layout *at = &cache->layouts[cache->layout_of[x->layer]];
    const kvc_rope *rope = part->delta ? kvc_rope_of(cache, x->layer) : NULL;
    const int64_t row = part->position - x->begin;
    const kvc_rows keys = kvc_stored_rows(config, at, part->block->rows, part->slot, KVC_KEYS),
                   given_keys = kvc_given_rows(in->k_type, (const char *)in->k + row * in->k_row_stride,
                                               in->k_row_stride, in->k_head_stride, config->k_dim);
    if (rope)
        rotate_keys_back(x, rotator, part, rope);
    else
        kvc_copy_rows(cache->kernels, config, 0, &keys, &given_keys, part->count);
    kvc_sketch_rows(cache->kernels, config, at, part->block->rows, part->slot, part->count);
    if (!in->v) return;
    const kvc_rows values = kvc_stored_rows(config, at, part->block->rows, part->slot, KVC_VALUES),
                   given_values = kvc_given_rows(in->v_type, (const char *)in->v + row * in->v_row_stride,
                                                 in->v_row_stride, in->v_head_stride, config->v_dim);
    kvc_copy_rows(cache->kernels, config, 1, &values, &given_values, part->count);
}

static void write_copier(void *context, int64_t copier) {
    const injection *x = context;
    kvc_rotator rotator = {.kernels = x->cache->kernels,
                           .scratch = x->copiers.scratch + (uint64_t)copier * x->copiers.floats};
    const int64_t first = copier * x->num_parts / x->copiers.num, end = (copier + 1) * x->num_parts / x->copiers.num;
    for (int64_t i = first; i < end; i++) write_part(x, &rotator, &x->parts[i]);
}

/* Copies and writes rows without the mutex: no other sequence has them, and pins keep their blocks in place. */
static void write_unlocked(injection *x) {
    kvc_cache *cache = x->cache;
    const kvc_layer *config = &cache->layers[x->layer];
    kvc_rewrite_pin(&x->rewrite);
    for (int64_t i = 0; i < x->num_parts; i++) kvc_pool_pin(x->parts[i].block);
    kvc_cache_begin_in_place(cache, x->sequence);
    kvc_unlock(cache, KVC_OK);
    kvc_rewrite_copy(cache, x->group, &x->rewrite, &x->copiers);
    const int64_t elements = x->num_found * config->num_kv_heads * (config->k_dim + config->v_dim);
    kvc_parallel(kvc_threads_for((double)elements, WORTH_THREADS, x->copiers.num), x->copiers.num, write_copier, x);
    kvc_lock(cache);
    kvc_cache_end_in_place(cache, x->sequence);
    for (int64_t i = 0; i < x->num_parts; i++) kvc_pool_unpin(&cache->pools[x->group], x->parts[i].block);
    kvc_rewrite_unpin(cache, x->group, &x->rewrite);
}

/* ---- the call, with the mutex held ------------------------------------------------------------------------------- */

/* Returns whether another sequence or a view has the row too, so that it must not be written.  In the scope KVC_FIXED,
 * evictable holders do not count.  A kvc_change.copies whose context is the scope. */
static int is_shared(const void *context, const kvc_run *run, int32_t slot) {
    const kvc_holders *holders = &run->block->holders[slot];
    const kvc_scope *scope = context;
    return holders->num - (*scope == KVC_FIXED ? holders->evictable : 0) > 1 || run->block->pins;
}

static kvc_status get_memory(injection *x, const kvc_run_list *list) {
    kvc_memory *memory = &x->cache->memory;
    x->low = list->min_position > x->begin ? list->min_position : x->begin;
    x->high = list->max_position < x->end ? list->max_position + 1 : x->end;
    if (x->high < x->low || !list->num) x->high = x->low;
    x->num_rows = kvc_runs_visit(list, x->begin, x->end, /* only count */ NULL, NULL);
    x->copiers.floats = kvc_rotator_floats(x->cache->layers[x->layer].k_dim);
    x->found = kvc_memory_alloc(memory, found_bytes(x), KVC_MEMORY_SCRATCH, -1);
    if (x->num_rows)
        x->parts = kvc_memory_alloc(memory, (uint64_t)x->num_rows * sizeof *x->parts, KVC_MEMORY_SCRATCH, -1);
    if (x->found && (x->parts || !x->num_rows)) return kvc_copiers_new(x->cache, &x->copiers);
    return kvc_fail(KVC_ERR_NOMEM, "out of memory to replace %lld rows", (long long)x->num_rows);
}

static void free_memory(injection *x) {
    kvc_memory *memory = &x->cache->memory;
    kvc_memory_free(memory, x->found, found_bytes(x), KVC_MEMORY_SCRATCH, -1);
    kvc_memory_free(memory, x->parts, (uint64_t)x->num_rows * sizeof *x->parts, KVC_MEMORY_SCRATCH, -1);
    kvc_copiers_free(x->cache, &x->copiers);
}

/* Visits all rows that the call may copy: it drops those that it does copy.  A victim that holds one of them takes a
 * slot of its own there, whether the row is copied then or not. */
static void visit_replaced(const kvc_need *need, int32_t g, kvc_part_fn *visit, void *context) {
    const injection *x = need->context;
    if (x->group == g) kvc_runs_visit(&x->sequence->runs[g], x->begin, x->end, visit, context);
}

static void try_drop(void *slots, const kvc_run *part) {
    kvc_pool_try_drop(part->block, KVC_NOW, part->slot, part->count, slots);
}

static void undo_try_drop(void *context, const kvc_run *part) {
    (void)context;
    kvc_pool_undo_try_drop(part->block, KVC_NOW, part->slot, part->count);
}

/* Visits the rows of the victims in the group. */
static void visit_victims(const injection *x, kvc_part_fn *visit, void *context) {
    for (const kvc_sequence *victim = x->cache->evicting.victims; victim; victim = victim->evicting.next_victim)
        if (kvc_is_evicted_in(x->cache, victim, x->group))
            kvc_runs_visit(&victim->runs[x->group], 0, KVC_END, visit, context);
}

/* Makes the rewrite anew, as if the victims were evicted already: then fewer rows are shared. */
static kvc_status remake(injection *x, kvc_scope scope) {
    const kvc_change change = {
        .begin = x->begin, .end = x->begin, .moved_end = x->end, .copies = is_shared, .context = &scope};
    int64_t slots = 0;
    kvc_rewrite_discard(x->cache, x->group, &x->rewrite);
    visit_victims(x, try_drop, &slots);
    const kvc_status status = kvc_rewrite_make(x->cache, x->group, &x->sequence->runs[x->group], &change, &x->rewrite);
    visit_victims(x, undo_try_drop, /* context */ NULL);
    return status;
}

/* Finds the rows to copy, and checks the capacity. */
static kvc_status check_slots(const kvc_need *need, int32_t g) {
    injection *x = need->context;
    if (g != x->group) return KVC_OK;
    KVC_TRY(remake(x, need->scope));
    if (!x->rewrite.num_copied) return KVC_OK;
    return kvc_rewrites_check(need, x->group, x->num_rows - x->rewrite.num_copied);
}

/* Makes and accepts the rewrite; once its copies are made, no other sequence or view has the rows to write. */
static kvc_status unshare_rows(injection *x) {
    const kvc_need need = {.cache = x->cache,
                           .check_slots = check_slots,
                           .visit_replaced = visit_replaced,
                           .context = x,
                           .what = "copying rows that are shared"};
    kvc_cache_pin(x->cache, x->sequence, 1); /* it may be a kept one */
    const kvc_status status = kvc_make_room(&need);
    if (status == KVC_OK && x->rewrite.num_copied)
        kvc_rewrite_accept(x->cache, x->group, &x->rewrite);
    else
        kvc_rewrite_discard(x->cache, x->group, &x->rewrite);
    kvc_cache_pin(x->cache, x->sequence, -1);
    return status;
}

static kvc_status inject(injection *x, int64_t seq_id) {
    static const kvc_run_list none = {.min_position = -1, .max_position = -1};
    kvc_sequence *sequence = x->sequence = kvc_cache_find(x->cache, seq_id);
    const kvc_run_list *list = sequence ? &sequence->runs[x->group] : NULL;
    KVC_TRY(kvc_check_idle(sequence));
    kvc_status status = get_memory(x, list ? list : &none);
    if (status == KVC_OK) find_parts(x, list ? list : &none);
    if (status == KVC_OK && !x->in->skip_missing && x->num_found < x->end - x->begin) status = fail_missing(x, seq_id);
    if (status == KVC_OK && x->num_found) status = unshare_rows(x);
    if (status == KVC_OK && x->num_found) {
        if (x->rewrite.num_copies) find_parts(x, list); /* copied rows have other slots now */
        /* Rows of a block from a store (is_given) stay exact: they follow from its tokens. */
        const int32_t first = kvc_position_of(x->begin, x->stride);
        if (!sequence->evicting.is_given) kvc_sequence_note_edit(sequence, first, first);
        write_unlocked(x);
        kvc_rewrite_free(x->cache, &x->rewrite);
    }
    free_memory(x);
    return status;
}

/* Copies the caller's struct, checks it for num_rows rows of a layer, and resolves its strides. */
static kvc_status resolve_rows_in(const kvc_layer *layer, const kvc_rows_in *given, kvc_rows_in *in, int64_t num_rows) {
    KVC_TRY(KVC_READ(kvc_rows_in, in, given, "in"));
    KVC_TRY(kvc_check_values(layer, in->k, in->v));
    const kvc_array k = {.name = "k",
                         .data = in->k,
                         .type = in->k_type,
                         .stored = layer->k_type,
                         .length = layer->k_dim,
                         .axes = {KVC_AXIS(in, k_head_stride, layer->num_kv_heads),
                                  KVC_AXIS(in, k_row_stride, num_rows)}},
                    v = {.name = "v",
                         .data = in->v,
                         .type = in->v_type,
                         .stored = layer->v_type,
                         .length = layer->v_dim,
                         .axes = {KVC_AXIS(in, v_head_stride, layer->num_kv_heads),
                                  KVC_AXIS(in, v_row_stride, num_rows)}};
    KVC_TRY(kvc_resolve_array(&k));
    return kvc_resolve_array(&v);
}

kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                      const kvc_rows_in *given) {
    kvc_rows_in in;
    kvc_status status = kvc_check_layer(cache, layer);
    if (status == KVC_OK) status = kvc_check_own_rows(cache, layer);
    if (status == KVC_OK && !kvc_keeps_tokens(cache, layer))
        status =
            kvc_fail(KVC_ERR_UNSUPPORTED, "layer %d is a cross-attention layer: its rows are replaced by a put", layer);
    if (status == KVC_OK) status = kvc_check_positions(begin, end);
    if (status != KVC_OK) return status;
    injection x = {.cache = cache, .in = &in, .layer = layer, .group = cache->group_of[layer]};
    x.stride = cache->pools[x.group].stride;
    x.begin = kvc_rows_below(begin, x.stride);
    x.end = kvc_rows_below(end, x.stride);
    KVC_TRY(resolve_rows_in(&cache->layers[layer], given, &in, x.end - x.begin));
    kvc_lock(cache);
    do status = inject(&x, seq_id);
    while (!(x.sequence && x.sequence->evicting.is_given) && /* that call adds a block, and is itself a reader */
           status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    kvc_unlock(cache, KVC_OK);
    if (status == KVC_OK && in.num_replaced) *in.num_replaced = x.num_found;
    return status;
}
