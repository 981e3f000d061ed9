/* put.c: kvc_put; and kvc_slots and kvc_written, with which callers write rows in place.  A place is the slot of a
 * token's rows in a group.  In a group with a stride, a token may have no row there (slot -1), and the arrays of a put
 * have rows only for tokens that do.  Tokens come in lock step if tokens_per_sequence is given: so many of each
 * sequence in turn.  A put to a cross-attention layer has rows of an encoder, and takes its slots itself. */
#include <string.h>

#include "pass/put.h"

#include "base/parallel.h"
#include "cache/check.h"
#include "space/evict.h"
#include "read/span.h"
#include "rows/copy.h"
#include "rows/sketch.h"
#include "cache/waiting.h"

/* ---- put --------------------------------------------------------------------------------------------------------- */

enum {
    LEAST_TASK_TOKENS = 64, /* least tokens of a task: waking a thread for fewer costs more than it saves */
    MOST_POLL_TOKENS = 512  /* most tokens converted before asking again whether the call was cancelled */
};

/* A put, split into one task for each thread.  A put of the same shape is split alike, so that each thread's cache
 * still has the slots it wrote before. */
typedef struct put_work {
    const kvc_cache *cache;
    const kvc_put_args *args;
    const kvc_layer *layer;
    const kvc_layout *layout;
    /* Places of the batch's tokens in the layer's group; NULL: consecutive slots from `start` on. */
    const kvc_place *places;
    kvc_place start;
    int32_t has_gaps; /* some tokens may have no row */
    int32_t task_tokens;
    kvc_poll_timer timer;
} put_work;

/* Returns the place of token i of the put. */
static kvc_place place_of(const put_work *work, int32_t i) {
    if (work->places) return work->places[work->args->first + i];
    return (kvc_place){work->start.block, work->start.slot + i};
}

/* Returns the offset in an array of row `row`: of token i's sequence if tokens come in lock step, else of the put. */
static int64_t offset_of(const put_work *work, int32_t i, int32_t row, int64_t token_stride, int64_t batch_stride) {
    const int32_t inner = work->args->tokens_per_sequence;
    return (inner ? i / inner * batch_stride : 0) + row * token_stride;
}

/* Returns the number of rows before token i: in its sequence if tokens come in lock step, otherwise in the put. */
static int32_t rows_before(const put_work *work, int32_t i) {
    const int32_t inner = work->args->tokens_per_sequence, first = inner ? i - i % inner : 0;
    int32_t num = 0;
    if (!work->has_gaps) return i - first;
    for (int32_t j = first; j < i; j++) num += place_of(work, j).slot >= 0;
    return num;
}

/* Stores `count` rows of the arrays, from row `row` of token i on, in consecutive slots. */
static void put_rows(const put_work *work, int32_t i, int32_t row, int32_t count) {
    const kvc_put_args *a = work->args;
    const kvc_layer *layer = work->layer;
    const kvc_layout *at = work->layout;
    const kvc_place place = place_of(work, i);
    const kvc_kernels *kernels = work->cache->kernels;
    const int64_t k_from = offset_of(work, i, row, a->k_token_stride, a->k_batch_stride);
    const kvc_rows keys = kvc_stored_rows(layer, at, place.block->rows, place.slot, KVC_KEYS),
                   given_keys = kvc_given_rows(a->k_type, (const char *)a->k + k_from, a->k_token_stride,
                                               a->k_head_stride, layer->k_dim);
    kvc_copy_rows(kernels, layer, 0, &keys, &given_keys, count);
    if (at->sketch_bytes) kvc_sketch_rows(kernels, layer, at, place.block->rows, place.slot, count);
    if (!a->v) return;
    const int64_t v_from = offset_of(work, i, row, a->v_token_stride, a->v_batch_stride);
    const kvc_rows values = kvc_stored_rows(layer, at, place.block->rows, place.slot, KVC_VALUES),
                   given_values = kvc_given_rows(a->v_type, (const char *)a->v + v_from, a->v_token_stride,
                                                 a->v_head_stride, layer->v_dim);
    kvc_copy_rows(kernels, layer, 1, &values, &given_values, count);
}

/* Stores the rows of a task's tokens, as many at once as lie in consecutive slots. */
static void put_task(void *context, int64_t task) {
    put_work *work = context;
    const int32_t inner = work->args->tokens_per_sequence, end = work->args->num_tokens;
    int32_t i = (int32_t)task * work->task_tokens, row = rows_before(work, i);
    const int32_t last = end - i > work->task_tokens ? i + work->task_tokens : end;
    while (i < last && !kvc_poll_timer_ask(&work->timer)) {
        const kvc_place first = place_of(work, i);
        int32_t n = first.slot >= 0, to = i + 1; /* n: rows of the tokens [i, to) */
        for (; to < last && n < MOST_POLL_TOKENS && !(inner && to % inner == 0); to++) {
            const kvc_place next = place_of(work, to);
            if (next.slot < 0) continue;
            if (next.block != first.block || next.slot != first.slot + n) break;
            n++;
        }
        if (n) put_rows(work, i, row, n);
        row = inner && to % inner == 0 ? 0 : row + n;
        i = to;
    }
}

static kvc_status put_all(put_work *work) {
    const kvc_layer *layer = work->layer;
    const int32_t num_tokens = work->args->num_tokens, least = KVC_BUGGIFY() ? 1 : LEAST_TASK_TOKENS;
    const int32_t most = (num_tokens + least - 1) / least;
    const int32_t threads = most > 1 ? kvc_cache_threads(work->cache) : 1, tasks = threads < most ? threads : most;
    work->task_tokens = (num_tokens + tasks - 1) / tasks;
    kvc_cache_poll_timer(work->cache, (double)num_tokens * layer->num_kv_heads * (layer->k_dim + layer->v_dim),
                         &work->timer);
    kvc_parallel(threads, tasks, put_task, work);
    return atomic_load(&work->timer.stopped) ? kvc_fail(KVC_ERR_CANCELLED, "the put was cancelled") : KVC_OK;
}

static kvc_status check_not_written(const kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    const uint8_t *written = kvc_written_in(batch, layer);
    for (int32_t t = first; t < first + num_tokens; t++)
        if (written[t])
            return kvc_fail(KVC_ERR_INVALID, "token %d of the batch was put in layer %d before: each is put once", t,
                            layer);
    return KVC_OK;
}

/* Returns how many of these tokens get a row in a layer. */
static int32_t count_rows(const kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    const int32_t stride = batch->cache->pools[batch->cache->group_of[layer]].stride;
    return stride == 1 ? num_tokens : kvc_count_rows_at(batch->positions + first, num_tokens, stride);
}

static kvc_status check_cross_put(const kvc_batch *batch, int32_t layer, const kvc_put_args *args) {
    const int32_t max_len = batch->cache->layers[layer].policy.max_len;
    kvc_lock(batch->cache);
    const int32_t member = kvc_batch_find(batch, args->seq_id);
    kvc_unlock(batch->cache, KVC_OK);
    if (member < 0)
        return kvc_fail(KVC_ERR_INVALID, "seq_id is %lld: the batch has no token of that sequence",
                        (long long)args->seq_id);
    if (args->first != 0 || args->num_tokens < 1)
        return kvc_fail(KVC_ERR_INVALID,
                        "first is %d and num_tokens %d: a cross-attention layer is given all its rows at once, from 0 "
                        "on",
                        args->first, args->num_tokens);
    if (args->num_tokens > max_len)
        return kvc_fail(KVC_ERR_FULL, "%d rows do not fit in cross-attention layer %d: max_len is %d", args->num_tokens,
                        layer, max_len);
    return KVC_OK;
}

/* Returns the most rows that a sequence has in a put of num_rows rows in lock step. */
static int32_t most_rows(const kvc_batch *batch, int32_t layer, const kvc_put_args *args, int32_t num_rows) {
    const int32_t inner = args->tokens_per_sequence;
    int32_t most = 0;
    if (num_rows == args->num_tokens) return inner;
    for (int32_t i = 0; i < args->num_tokens; i += inner) {
        const int32_t rows = count_rows(batch, layer, args->first + i, inner);
        if (rows > most) most = rows;
    }
    return most;
}

kvc_status kvc_resolve_put(const kvc_batch *batch, int32_t layer, kvc_put_args *args) {
    const kvc_layer *config = &batch->cache->layers[layer];
    KVC_TRY(kvc_check_takes_rows(batch, layer));
    int32_t num_rows = args->num_tokens;
    if (kvc_keeps_tokens(batch->cache, layer)) {
        KVC_TRY(kvc_resolve_range(batch, args->first, &args->num_tokens));
        KVC_TRY(check_not_written(batch, layer, args->first, args->num_tokens));
        num_rows = count_rows(batch, layer, args->first, args->num_tokens);
    } else {
        KVC_TRY(check_cross_put(batch, layer, args));
    }
    if (num_rows) KVC_TRY(kvc_check_values(config, args->k, args->v));
    const int32_t heads = config->num_kv_heads, inner = args->tokens_per_sequence;
    if (inner) KVC_TRY(kvc_check_tokens_per_sequence(inner, args->num_tokens));
    const int32_t rows = inner ? most_rows(batch, layer, args, num_rows) : num_rows,
                  batches = inner ? args->num_tokens / inner : 0;
    const kvc_array k = {.name = "k",
                         .data = args->k,
                         .type = args->k_type,
                         .stored = config->k_type,
                         .length = config->k_dim,
                         .axes = {KVC_AXIS(args, k_head_stride, heads), KVC_AXIS(args, k_token_stride, rows),
                                  KVC_AXIS(args, k_batch_stride, batches)}},
                    v = {.name = "v",
                         .data = args->v,
                         .type = args->v_type,
                         .stored = config->v_type,
                         .length = config->v_dim,
                         .axes = {KVC_AXIS(args, v_head_stride, heads), KVC_AXIS(args, v_token_stride, rows),
                                  KVC_AXIS(args, v_batch_stride, batches)}};
    KVC_TRY(kvc_resolve_array(&k));
    return kvc_resolve_array(&v);
}

void kvc_drop_cross(const kvc_batch *batch, int32_t g, int32_t s) {
    kvc_pool *pool = &batch->cache->pools[g];
    const int32_t before = pool->free.num;
    kvc_drop_part(pool, kvc_pending_of(batch, g, s)->runs);
    if (batch->sequences[s].is_unstored) pool->free.num_idle += pool->free.num - before;
}

void kvc_cross_put_end(kvc_batch *batch, kvc_cross_put *put, int all) {
    kvc_pool *pool = &batch->cache->pools[put->group];
    kvc_pending *pending = kvc_pending_of(batch, put->group, put->member);
    kvc_cross_put **link = &batch->cross_puts;
    while (*link != put) link = &(*link)->next;
    *link = put->next;
    if (all) {
        if (pending->num) kvc_drop_cross(batch, put->group, put->member);
        pending->runs[0] = put->run;
        pending->num = 1;
        atomic_fetch_add(&batch->num_cross_puts[put->group - batch->cache->num_token_groups], 1);
        pool->free.reserved += put->reserved; /* an abort gives all new blocks back at once */
    } else {
        const int32_t num_blocks = kvc_pool_untake(pool, put->run.block, put->run.slot, put->run.count);
        kvc_pool_unreserve(pool, num_blocks, &put->reserved);
    }
    kvc_memory_free(&batch->cache->memory, put, sizeof *put, KVC_MEMORY_SCRATCH, -1);
}

/* Takes slots for all rows of a put to a cross-attention layer, in one block, and adds the put to the batch's list. */
static kvc_status begin_cross(kvc_batch *batch, int32_t group, const kvc_put_args *args, const kvc_need *need,
                              kvc_cross_put **out) {
    kvc_cache *cache = batch->cache;
    kvc_pool *pool = &cache->pools[group];
    const int32_t count = args->num_tokens;
    int32_t reserved;
    kvc_cross_put *put = kvc_memory_alloc(&cache->memory, sizeof *put, KVC_MEMORY_SCRATCH, -1);
    if (!put) return kvc_fail(KVC_ERR_NOMEM, "out of memory to put the rows of a cross-attention layer");
    kvc_status status = kvc_pool_reserve(pool, 1, &reserved);
    if (status != KVC_OK) {
        kvc_memory_free(&cache->memory, put, sizeof *put, KVC_MEMORY_SCRATCH, -1);
        return status;
    }
    kvc_block *block = kvc_pool_open(pool);
    *put = (kvc_cross_put){.next = batch->cross_puts,
                           .group = group,
                           .member = kvc_batch_find(batch, args->seq_id),
                           .reserved = reserved,
                           .thread = kvc_thread_self()};
    put->run = (kvc_run){block, kvc_pool_take(pool, block, count), count, 0, 0};
    batch->cross_puts = *out = put;
    status = kvc_check_room(need); /* victims are evicted once the rows are there */
    if (status != KVC_OK) kvc_cross_put_end(batch, put, /* all */ 0);
    return status;
}

/* Takes slots, copies an encoder's rows to them without the mutex, and adds the slots to the batch.  kvc_make_room
 * evicts last: a put that is cancelled while it copies has evicted nobody. */
static kvc_status put_cross(kvc_batch *batch, put_work *work, int32_t group) {
    kvc_cache *cache = batch->cache;
    const kvc_need need = {.cache = cache, .what = "putting the rows of a cross-attention layer"};
    kvc_cross_put *put = NULL;
    kvc_lock(cache);
    kvc_status status;
    do status = begin_cross(batch, group, work->args, &need, &put);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    KVC_TRY(kvc_unlock(cache, status));
    work->start = (kvc_place){put->run.block, put->run.slot};
    const kvc_status done = put_all(work);
    kvc_lock(cache);
    do status = done == KVC_OK ? kvc_make_room(&need) : done;
    while (done == KVC_OK && status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    kvc_cross_put_end(batch, put, status == KVC_OK);
    return kvc_unlock(cache, status);
}

/* Returns the places of the batch's tokens in a layer's group, from token `first` on. */
static const kvc_place *places_in(const kvc_batch *batch, int32_t layer, int32_t first) {
    return kvc_places_in(batch, batch->cache->group_of[layer]) + first;
}

void kvc_mark_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens, int is_written) {
    memset(kvc_written_in(batch, layer) + first, is_written, (size_t)num_tokens);
}

kvc_status kvc_put_rows(kvc_batch *batch, int32_t layer, const kvc_put_args *args) {
    const kvc_cache *cache = batch->cache;
    const int32_t g = cache->group_of[layer];
    put_work work = {.cache = cache,
                     .args = args,
                     .layer = &cache->layers[layer],
                     .layout = &cache->layouts[cache->layout_of[layer]]};
    if (!kvc_keeps_tokens(cache, layer)) return put_cross(batch, &work, g);
    work.places = places_in(batch, layer, 0);
    work.has_gaps = cache->pools[g].stride > 1;
    const kvc_status status = put_all(&work);
    if (status == KVC_OK) kvc_mark_written(batch, layer, args->first, args->num_tokens, /* is_written */ 1);
    return status;
}

kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *given) {
    kvc_put_args args;
    KVC_TRY(KVC_READ(kvc_put_args, &args, given, "args"));
    KVC_TRY(kvc_check_layer(batch->cache, layer));
    KVC_TRY(kvc_resolve_put(batch, layer, &args));
    return kvc_put_rows(batch, layer, &args);
}

/* ---- writing in place -------------------------------------------------------------------------------------------- */

static kvc_status resolve_in_place(const kvc_batch *batch, int32_t layer, int32_t first, int32_t *num_tokens) {
    KVC_TRY(kvc_check_layer(batch->cache, layer));
    KVC_TRY(kvc_check_takes_rows(batch, layer));
    if (!kvc_keeps_tokens(batch->cache, layer))
        return kvc_fail(KVC_ERR_UNSUPPORTED, "layer %d is a cross-attention layer: its rows are put", layer);
    return kvc_resolve_range(batch, first, num_tokens);
}

kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                     kvc_hold **hold) {
    int32_t rest = 0;
    if (hold) *hold = NULL;
    KVC_TRY(resolve_in_place(batch, layer, first, &rest));
    KVC_TRY(check_not_written(batch, layer, first, 1));
    if (!span) return kvc_fail(KVC_ERR_INVALID, "span is NULL");
    if (places_in(batch, layer, first)->slot < 0)
        return kvc_fail(KVC_ERR_INVALID,
                        "token %d of the batch, at position %d, has no row in layer %d: it completes none of its "
                        "strides",
                        first, batch->positions[first], layer);
    KVC_TRY(kvc_check_size(span_size, kvc_span_least_size, sizeof *span, "span"));
    kvc_cache *cache = batch->cache;
    const kvc_place *place = places_in(batch, layer, first);
    const uint8_t *written = kvc_written_in(batch, layer) + first;
    const int32_t stride = cache->pools[cache->group_of[layer]].stride;
    kvc_run run = {place->block, place->slot, 1, kvc_rows_below(batch->positions[first], stride), 0};
    for (int32_t i = 1; i < rest && !written[i]; i++) {
        if (place[i].slot < 0) continue;
        if (place[i].block != run.block || place[i].slot != run.slot + run.count) break;
        run.count++;
    }
    if (hold) {
        kvc_lock(cache);
        KVC_TRY(kvc_unlock(cache, kvc_hold_runs(cache, &run, 1, cache->group_of[layer], hold)));
    }
    const kvc_span found = kvc_span_of(&run, &cache->layouts[cache->layout_of[layer]], stride);
    kvc_write_struct(span, span_size, &found, sizeof found);
    return KVC_OK;
}

/* Makes the sketches of rows that the caller wrote. */
static void sketch_written(const kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    const kvc_cache *cache = batch->cache;
    const kvc_place *place = places_in(batch, layer, first);
    for (int32_t i = 0; i < num_tokens; i++)
        kvc_sketch_rows(cache->kernels, &cache->layers[layer], &cache->layouts[cache->layout_of[layer]],
                        place[i].block->rows, place[i].slot, /* count */ 1);
}

kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    KVC_TRY(resolve_in_place(batch, layer, first, &num_tokens));
    KVC_TRY(check_not_written(batch, layer, first, num_tokens));
    if (batch->cache->layers[layer].sketch_bits) sketch_written(batch, layer, first, num_tokens);
    kvc_mark_written(batch, layer, first, num_tokens, /* is_written */ 1);
    return KVC_OK;
}
