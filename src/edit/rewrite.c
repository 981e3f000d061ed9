/* rewrite.c: makes, checks, copies and accepts rewrites.  A rewrite gives a sequence new runs in one group: a change
 * (kvc_change) moves rows to other positions, or copies them to slots of the sequence's own.  Copiers are threads.  A
 * row's delta is how far it has moved since its key was rotated.  A change either adds to deltas, or applies them:
 * rotates the copied keys and sets deltas to 0.  Rows may be selected by sketches, which follow from keys.  A piece is
 * rows whose keys a KVC_ROPE_FUNCTION moves in one call. */
#include "edit/rewrite.h"

#include <string.h>

#include "base/parallel.h"
#include "rows/copy.h"
#include "rows/sketch.h"

enum {
    WORTH_THREADS = 1 << 16, /* bytes */
    FUNCTION_ROWS = 512,     /* most rows decoded at a time for a KVC_ROPE_FUNCTION */
    FUNCTION_PIECES = 128    /* most pieces that these rows may be in */
};

/* ---- the rewrite ------------------------------------------------------------------------------------------------- */

/* Returns the position after the change. */
static int32_t target(const kvc_change *change, int32_t position) {
    return change->divisor ? position / change->divisor : position + change->move;
}

/* A pass over the rows of the list: the first pass counts, the second fills in the rewrite. */
typedef struct walk {
    const kvc_change *change;
    kvc_pool *pool;
    kvc_rewrite *rewrite; /* NULL: only count */
    kvc_block *block;     /* the block to which rows are copied */
    int64_t parts;        /* number of parts of runs whose rows are all treated alike */
    int64_t copies;       /* number of parts that are copied */
    int64_t copied;       /* number of rows in copied parts */
} walk;

/* Adds a copied part to the rewrite, cut where blocks are full.  to: a run with the part's new position and delta. */
static void add_copies(walk *w, const kvc_run *part, kvc_run to) {
    for (int32_t done = 0; done < part->count; done += to.count) {
        if (!w->block || w->block->fill == w->pool->block_size) w->block = kvc_pool_open(w->pool);
        const int32_t rest = part->count - done, left = w->pool->block_size - w->block->fill;
        to.count = rest < left ? rest : left;
        if (to.count > KVC_COPY_ROWS) to.count = KVC_COPY_ROWS;
        to.block = w->block;
        to.slot = kvc_pool_take(w->pool, w->block, to.count);
        w->rewrite->copies[w->rewrite->num_copies++] = (kvc_copy){.from = part->block,
                                                                  .to = to.block,
                                                                  .from_slot = part->slot + done,
                                                                  .to_slot = to.slot,
                                                                  .count = to.count,
                                                                  .position = part->position + done,
                                                                  .delta = part->delta};
        kvc_runs_push(&w->rewrite->runs, &to);
        to.position += to.count;
    }
}

/* Counts a part of a run, or adds it to the rewrite.  changes, copied: how its rows are treated. */
static void add_part(walk *w, const kvc_run *part, int changes, int copied) {
    const kvc_change *change = w->change;
    w->parts++;
    w->copies += copied;
    w->copied += copied ? part->count : 0;
    if (!w->rewrite) return;
    kvc_run to = *part;
    if (changes) {
        to.position = target(change, part->position);
        if (change->adds_delta) to.delta += (to.position - part->position) * w->pool->stride;
        if (change->applies_delta) to.delta = 0;
    }
    if (copied)
        add_copies(w, part, to);
    else
        kvc_runs_push(&w->rewrite->runs, &to);
}

/* Returns the number of rows, from the first of a changing part on, that are treated alike; *copied: whether they are
 * copied.  If positions are divided, this is 1: positions of a run ascend by 1, and divided ones may be the same. */
static int32_t count_alike(const kvc_change *change, const kvc_run *part, int *copied) {
    *copied = change->copies && change->copies(change->context, part, part->slot);
    if (change->divisor) return 1;
    if (!change->copies) return part->count;
    int32_t n = 1;
    while (n < part->count && !change->copies(change->context, part, part->slot + n) == !*copied) n++;
    return n;
}

/* Calls add_part for all rows of the list but the dropped ones. */
static void walk_rows(walk *w, const kvc_run_list *list) {
    const kvc_change *change = w->change;
    int64_t next = 0; /* where the search in change->listed goes on */
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) {
        const kvc_run below = kvc_run_part(run, 0, change->begin),
                      above = kvc_run_part(run, change->moved_end, INT32_MAX);
        kvc_run rest = kvc_run_part(run, change->end, change->moved_end);
        if (below.count) add_part(w, &below, /* changes */ 0, /* copied */ 0);
        kvc_run dropped = kvc_run_part(run, change->begin, change->end);
        for (kvc_run stays; change->listed && (stays = kvc_listed_next(change->listed, &next, &dropped)).count;)
            add_part(w, &stays, /* changes */ 0, /* copied */ 0);
        while (rest.count) {
            int copied;
            kvc_run part = rest;
            part.count = count_alike(change, &rest, &copied);
            add_part(w, &part, /* changes */ 1, copied);
            rest.slot += part.count;
            rest.position += part.count;
            rest.count -= part.count;
        }
        if (above.count) add_part(w, &above, /* changes */ 0, /* copied */ 0);
    }
}

/* Gets all memory for the parts and rows that the first pass counted. */
static kvc_status reserve(kvc_cache *cache, kvc_pool *pool, const walk *counted, kvc_rewrite *rewrite) {
    const int64_t blocks = (counted->copied + pool->block_size - 1) / pool->block_size;
    const int64_t runs = counted->parts + blocks; /* copied parts are cut where blocks end */
    const int64_t copies = counted->copies + blocks + counted->copied / KVC_COPY_ROWS;
    if (runs > INT32_MAX / 2) return kvc_fail(KVC_ERR_NOMEM, "a sequence of more than %lld runs", (long long)runs);
    kvc_status status = kvc_runs_reserve(&rewrite->runs, &cache->memory, (int32_t)runs);
    if (status != KVC_OK || !counted->copied) return status;
    rewrite->max_copies = (int32_t)copies;
    rewrite->copies = kvc_memory_alloc(&cache->memory, (uint64_t)copies * sizeof(kvc_copy), KVC_MEMORY_SCRATCH, -1);
    if (!rewrite->copies) return kvc_fail(KVC_ERR_NOMEM, "out of memory to copy %lld rows", (long long)counted->copied);
    return kvc_pool_reserve(pool, (int32_t)blocks, &rewrite->reserved);
}

kvc_status kvc_rewrite_make(kvc_cache *cache, int32_t group, kvc_run_list *list, const kvc_change *change,
                            kvc_rewrite *rewrite) {
    walk w = {.change = change, .pool = &cache->pools[group]};
    *rewrite = (kvc_rewrite){.change = *change, .from = list};
    kvc_runs_init(&rewrite->runs);
    walk_rows(&w, list);
    const kvc_status status = reserve(cache, w.pool, &w, rewrite);
    if (status != KVC_OK) {
        kvc_rewrite_discard(cache, group, rewrite);
        return status;
    }
    rewrite->num_copied = w.copied;
    w.pool->counts.replacing += w.copied;
    w.rewrite = rewrite;
    walk_rows(&w, list);
    kvc_runs_recount(&rewrite->runs);
    return KVC_OK;
}

void kvc_rewrite_visit_replaced(const kvc_rewrite *rewrite, kvc_part_fn *visit, void *context) {
    const kvc_change *change = &rewrite->change;
    kvc_runs_visit_unlisted(rewrite->from, change->begin, change->end, change->listed, visit, context);
    for (int32_t i = 0; i < rewrite->num_copies; i++) {
        const kvc_copy *copy = &rewrite->copies[i];
        visit(context, &(kvc_run){copy->from, copy->from_slot, copy->count, copy->position, copy->delta});
    }
}

kvc_status kvc_rewrites_check(const kvc_need *need, int32_t group, int64_t staying) {
    int64_t live;
    if (!kvc_exceeds_capacity(need, group, staying, &live)) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL,
                    "%s would make it %lld slots: capacity is %lld; remove some tokens, clear a sequence, or give a "
                    "larger capacity",
                    need->what, (long long)(live + staying), (long long)need->cache->limits.capacity);
}

void kvc_rewrite_free(kvc_cache *cache, kvc_rewrite *rewrite) {
    kvc_memory_free(&cache->memory, rewrite->copies, (uint64_t)rewrite->max_copies * sizeof(kvc_copy),
                    KVC_MEMORY_SCRATCH, -1);
    *rewrite = (kvc_rewrite){0};
}

void kvc_rewrite_accept(kvc_cache *cache, int32_t group, kvc_rewrite *rewrite) {
    kvc_pool *pool = &cache->pools[group];
    kvc_run_list *list = rewrite->from;
    kvc_rewrite_visit_replaced(rewrite, kvc_drop_part, pool);
    pool->counts.replacing -= rewrite->num_copied;
    cache->stats.rows_copied += rewrite->num_copied;
    rewrite->runs.lost = list->lost; /* both stay as they are, unless the caller changes them */
    rewrite->runs.missing = list->missing;
    kvc_runs_free_list(list, &cache->memory);
    *list = rewrite->runs;
}

void kvc_rewrite_discard(kvc_cache *cache, int32_t group, kvc_rewrite *rewrite) {
    kvc_pool *pool = &cache->pools[group];
    int32_t num_freed = 0;                                   /* blocks */
    for (int32_t i = rewrite->num_copies - 1; i >= 0; i--) { /* last to first: the free list gets its order back */
        const kvc_copy *copy = &rewrite->copies[i];
        num_freed += kvc_pool_untake(pool, copy->to, copy->to_slot, copy->count);
    }
    pool->counts.replacing -= rewrite->num_copied; /* rows, of which a copy has several; they replace none now */
    kvc_pool_unreserve(pool, num_freed, &rewrite->reserved); /* gives back those that were new */
    kvc_runs_free_list(&rewrite->runs, &cache->memory);
    kvc_rewrite_free(cache, rewrite);
}

void kvc_rewrite_pin(const kvc_rewrite *rewrite) {
    for (int32_t i = 0; i < rewrite->num_copies; i++) {
        kvc_pool_pin(rewrite->copies[i].from);
        kvc_pool_pin(rewrite->copies[i].to);
    }
}

void kvc_rewrite_unpin(kvc_cache *cache, int32_t group, const kvc_rewrite *rewrite) {
    for (int32_t i = 0; i < rewrite->num_copies; i++) {
        kvc_pool_unpin(&cache->pools[group], rewrite->copies[i].from);
        kvc_pool_unpin(&cache->pools[group], rewrite->copies[i].to);
    }
}

/* ---- copying ----------------------------------------------------------------------------------------------------- */

kvc_status kvc_copiers_new(kvc_cache *cache, kvc_copiers *copiers) {
    copiers->num = kvc_cache_threads(cache);
    if ((uint64_t)copiers->num * copiers->floats > copiers->least)
        copiers->least = (uint64_t)copiers->num * copiers->floats;
    if (!copiers->least) return KVC_OK;
    copiers->scratch = kvc_memory_alloc(&cache->memory, copiers->least * sizeof(float), KVC_MEMORY_SCRATCH, -1);
    if (copiers->scratch) return KVC_OK;
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for %llu elements of keys", (unsigned long long)copiers->least);
}

void kvc_copiers_free(kvc_cache *cache, kvc_copiers *copiers) {
    kvc_memory_free(&cache->memory, copiers->scratch, copiers->least * sizeof(float), KVC_MEMORY_SCRATCH, -1);
}

void kvc_rewrite_size_copiers(const kvc_cache *cache, int32_t group, const kvc_rewrite *rewrite, kvc_copiers *copiers) {
    const int64_t rows = rewrite->num_copied < FUNCTION_ROWS ? rewrite->num_copied : FUNCTION_ROWS;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const kvc_layer *layer = &cache->layers[i];
        if (cache->group_of[i] != group) continue;
        const uint64_t floats = kvc_rotator_floats(layer->k_dim),
                       least = (uint64_t)layer->k_dim * (uint64_t)layer->num_kv_heads * (uint64_t)rows;
        if (floats > copiers->floats) copiers->floats = floats;
        if (layer->rope.kind == KVC_ROPE_FUNCTION && least > copiers->least) copiers->least = least;
    }
}

/* Copies the rows of one layer, all heads. */
static void copy_rows(const kvc_layout *at, const kvc_copy *copy) {
    const size_t scales[] = {at->k_scales, at->v_scales == at->k_scales ? 0 : at->v_scales}; /* 0: none of its own */
    for (int32_t h = 0; h < at->num_kv_heads; h++) {
        memcpy(kvc_key_at(at, copy->to, copy->to_slot, h), kvc_key_at(at, copy->from, copy->from_slot, h),
               (size_t)copy->count * at->k_row_bytes);
        if (at->v_stored)
            memcpy(kvc_value_at(at, copy->to, copy->to_slot, h), kvc_value_at(at, copy->from, copy->from_slot, h),
                   (size_t)copy->count * at->v_stored);
        if (at->sketch_bytes)
            memcpy(kvc_sketch_at(at, copy->to->rows, copy->to_slot, h),
                   kvc_sketch_at(at, copy->from->rows, copy->from_slot, h), (size_t)copy->count * at->sketch_bytes);
        for (int i = 0; i < 2; i++) {
            if (!scales[i]) continue;
            memcpy(kvc_scale_at(at, scales[i], copy->to, copy->to_slot, h),
                   kvc_scale_at(at, scales[i], copy->from, copy->from_slot, h), (size_t)copy->count * KVC_SCALE_BYTES);
        }
    }
}

void kvc_rotate_keys(const kvc_cache *cache, int32_t group, kvc_block *block, int32_t slot, int32_t delta,
                     kvc_rotator *rotator) {
    for (int32_t layer = 0; layer < cache->num_layers; layer++) {
        const kvc_rope *rope = kvc_rope_of(cache, layer);
        const int has_own_rows = !cache->layers[layer].share; /* otherwise it reads another layer's */
        if (cache->group_of[layer] != group || !has_own_rows || !rope) continue;
        const kvc_layout *at = &cache->layouts[cache->layout_of[layer]];
        const kvc_layer *config = &cache->layers[layer];
        const kvc_rows keys = kvc_stored_rows(config, at, block->rows, slot, KVC_KEYS);
        kvc_rotator_rotate(rotator, rope, delta, &keys, &keys, 1, config);
        kvc_sketch_rows(cache->kernels, config, at, block->rows, slot, /* count */ 1); /* of the key that it is now */
    }
}

/* A call of kvc_rewrite_copy.  Each copier copies a part of the list of copies. */
typedef struct copying {
    const kvc_cache *cache;
    const kvc_rewrite *rewrite;
    const kvc_copiers *copiers;
    int32_t group, num_parts;
} copying;

static void copy_part(void *context, int64_t part) {
    const copying *c = context;
    const kvc_rewrite *rewrite = c->rewrite;
    const kvc_pool *pool = &c->cache->pools[c->group];
    kvc_rotator rotator = {.kernels = c->cache->kernels};
    if (rewrite->change.applies_delta) rotator.scratch = c->copiers->scratch + (uint64_t)part * c->copiers->floats;
    const int64_t first = part * rewrite->num_copies / c->num_parts,
                  end = (part + 1) * rewrite->num_copies / c->num_parts; /* of this part's copies */
    for (const kvc_copy *copy = rewrite->copies + first; copy < rewrite->copies + end; copy++) {
        for (int32_t l = 0; l < pool->num_layers; l++) copy_rows(&pool->layouts[l], copy);
        for (int32_t i = 0; rewrite->change.applies_delta && i < copy->count; i++) {
            const int32_t position = copy->position + i,
                          delta = copy->delta + (target(&rewrite->change, position) - position) * pool->stride;
            if (delta) kvc_rotate_keys(c->cache, c->group, copy->to, copy->to_slot + i, delta, &rotator);
        }
    }
}

/* ---- the caller's function --------------------------------------------------------------------------------------- */

/* Copied rows whose keys the caller's function moves in one call. */
typedef struct piece {
    const kvc_copy *copy;
    int32_t first, count, delta;
    float *keys; /* [num_kv_heads][count][k_dim] */
} piece;

/* The pieces of one layer that are decoded, moved and encoded together. */
typedef struct moving {
    const kvc_cache *cache;
    const kvc_layer *layer;
    const kvc_layout *at;
    const kvc_copiers *copiers;
    int32_t index;                         /* index of the layer */
    int32_t num_pieces, num_rows, encodes; /* encodes: convert_piece encodes keys; otherwise it decodes them */
    piece pieces[FUNCTION_PIECES];
} moving;

/* Decodes the stored keys of a piece to f32, or encodes them from f32. */
static void convert_piece(void *context, int64_t i) {
    const moving *m = context;
    const piece *p = &m->pieces[i];
    const kvc_kernels *kernels = m->cache->kernels;
    const int32_t dim = m->layer->k_dim;
    const kvc_mixing mixing = kvc_mixing_of(m->layer, KVC_KEYS);
    const kvc_rows stored = kvc_stored_rows(m->layer, m->at, p->copy->to->rows, p->copy->to_slot + p->first, KVC_KEYS);
    const int64_t stride = dim * (int64_t)sizeof(float);
    for (int32_t h = 0; h < m->at->num_kv_heads; h++) {
        const kvc_rows of_head = kvc_row_of(&stored, 0, h);
        float *keys = p->keys + (size_t)h * (size_t)p->count * (size_t)dim;
        if (!m->encodes) kvc_decode_rows(kernels, keys, stride, &of_head, p->count, dim);
        /* Stored keys may be mixed: multiplied by a matrix that is its own inverse. */
        if (mixing.order) kernels->hadamard(keys, keys, p->count * dim, mixing);
        if (m->encodes) kvc_encode_rows(kernels, &of_head, keys, stride, p->count, dim);
    }
    if (m->encodes) kvc_sketch_rows(kernels, m->layer, m->at, p->copy->to->rows, p->copy->to_slot + p->first, p->count);
}

/* Moves the keys of all pieces by the caller's function, and empties the list of pieces. */
static kvc_status move_pieces(moving *m) {
    const kvc_rope *rope = &m->layer->rope;
    const int64_t bytes = (int64_t)m->num_rows * m->at->num_kv_heads * (int64_t)m->at->k_row_bytes;
    const int32_t threads = kvc_threads_for((double)bytes, WORTH_THREADS, m->copiers->num);
    m->encodes = 0;
    kvc_parallel(threads, m->num_pieces, convert_piece, m);
    for (int32_t i = 0; i < m->num_pieces; i++)
        if (rope->shift(rope->user, m->index, m->pieces[i].keys, m->layer->num_kv_heads, m->pieces[i].count,
                        m->layer->k_dim, m->pieces[i].delta))
            return kvc_fail(KVC_ERR_CALLBACK, "the function that moves the keys of layer %d failed", m->index);
    m->encodes = 1;
    kvc_parallel(threads, m->num_pieces, convert_piece, m);
    m->num_pieces = m->num_rows = 0;
    return KVC_OK;
}

/* Adds a piece; if there is no space for it, first moves the pieces before it. */
static kvc_status add_piece(moving *m, piece p) {
    const size_t row = (size_t)m->layer->num_kv_heads * (size_t)m->layer->k_dim;
    if (m->num_pieces == FUNCTION_PIECES || m->num_rows + p.count > FUNCTION_ROWS || (m->num_pieces && KVC_BUGGIFY())) {
        const kvc_status status = move_pieces(m);
        if (status != KVC_OK) return status;
    }
    p.keys = m->copiers->scratch + (size_t)m->num_rows * row;
    m->num_rows += p.count;
    m->pieces[m->num_pieces++] = p;
    return KVC_OK;
}

/* Moves all copied keys of a layer by the caller's function. */
static kvc_status move_by_function(const kvc_cache *cache, int32_t layer, const kvc_rewrite *rewrite,
                                   const kvc_copiers *copiers) {
    const kvc_change *change = &rewrite->change;
    const int32_t stride = cache->pools[cache->group_of[layer]].stride;
    moving m = {.cache = cache,
                .layer = &cache->layers[layer],
                .at = &cache->layouts[cache->layout_of[layer]],
                .copiers = copiers,
                .index = layer};
    kvc_status status = KVC_OK;
    for (int32_t c = 0; c < rewrite->num_copies; c++) {
        const kvc_copy *copy = &rewrite->copies[c];
        for (int32_t i = 0, n; status == KVC_OK && i < copy->count; i += n) {
            const int32_t position = copy->position + i, delta = (target(change, position) - position) * stride;
            n = change->divisor ? 1 : copy->count; /* then each row moves by a distance of its own */
            if (delta) status = add_piece(&m, (piece){.copy = copy, .first = i, .count = n, .delta = delta});
        }
    }
    return status == KVC_OK && m.num_pieces ? move_pieces(&m) : status;
}

kvc_status kvc_rewrite_copy(const kvc_cache *cache, int32_t group, const kvc_rewrite *rewrite,
                            const kvc_copiers *copiers) {
    const int32_t most = copiers->num < rewrite->num_copies ? copiers->num : rewrite->num_copies;
    const int64_t bytes = rewrite->num_copied * kvc_pool_slot_bytes(&cache->pools[group]);
    copying c = {cache, rewrite, copiers, group, kvc_threads_for((double)bytes, WORTH_THREADS, most)};
    if (rewrite->num_copies) kvc_parallel(c.num_parts, c.num_parts, copy_part, &c);
    kvc_status status = KVC_OK;
    for (int32_t layer = 0; status == KVC_OK && rewrite->change.applies_delta && layer < cache->num_layers; layer++)
        if (cache->group_of[layer] == group && kvc_keeps_tokens(cache, layer) &&
            cache->layers[layer].rope.kind == KVC_ROPE_FUNCTION)
            status = move_by_function(cache, layer, rewrite, copiers);
    return status;
}
