/* transit.c: rows on their way between a cache and a saved state.  A state is a call that saves or loads.  Its extents
 * are rows of the file that lie in consecutive slots of a block.  While rows are loaded, they count as rows that will
 * replace others (pool->counts.replacing).  A piece is the bytes of a tensor that are hashed together.  state->cache is
 * NULL while a file is read for which no cache was made yet. */
#include "saved/transit.h"

#include <string.h>

#include "base/hash.h"
#include "base/parallel.h"
#include "rows/sketch.h"

void *kvc_state_alloc(kvc_state *state, uint64_t size) {
    kvc_state_buffer *buffer = NULL;
    if (size < UINT64_MAX - KVC_CACHE_LINE)
        buffer = kvc_memory_alloc(state->memory, size + KVC_CACHE_LINE, KVC_MEMORY_SCRATCH, -1);
    if (!buffer) {
        kvc_set_last_error("out of memory for %llu bytes of a saved state", (unsigned long long)size);
        return NULL;
    }
    *buffer = (kvc_state_buffer){state->buffers, size + KVC_CACHE_LINE};
    state->buffers = buffer;
    return (char *)buffer + KVC_CACHE_LINE;
}

void *kvc_state_take(kvc_state *state, uint64_t size) {
    if (state->cache) kvc_lock(state->cache);
    void *p = kvc_state_alloc(state, size);
    if (state->cache) kvc_unlock(state->cache, KVC_OK);
    return p;
}

kvc_status kvc_state_add_groups(kvc_state *state) {
    const size_t size = (size_t)state->cache->num_groups * sizeof *state->groups;
    state->groups = kvc_state_alloc(state, size);
    if (!state->groups) return KVC_ERR_NOMEM;
    memset(state->groups, 0, size);
    return KVC_OK;
}

/* ---- keeping rows in place --------------------------------------------------------------------------------------- */

void kvc_state_begin(kvc_state *state) {
    kvc_cache *cache = state->cache;
    cache->waiting.num_holds++;
    state->thread = kvc_thread_self();
    state->is_begun = 1;
    state->next = cache->states;
    cache->states = state;
}

static void leave(kvc_state *state) {
    kvc_state **link = &state->cache->states;
    while (*link != state) link = &(*link)->next;
    *link = state->next;
    state->cache->waiting.num_holds--;
}

void kvc_state_pin(kvc_state *state) {
    for (int32_t g = 0; g < state->cache->num_groups; g++)
        for (int64_t i = 0; i < state->groups[g].num; i++) kvc_pool_pin(state->groups[g].items[i].block);
    state->is_pinned = 1;
}

static void unpin(kvc_state *state) {
    kvc_cache *cache = state->cache;
    for (int32_t g = 0; g < cache->num_groups; g++)
        for (int64_t i = 0; i < state->groups[g].num; i++)
            kvc_pool_unpin(&cache->pools[g], state->groups[g].items[i].block);
}

/* ---- the sequences that are loaded ------------------------------------------------------------------------------- */

/* Counts the rows of a group no longer as rows that will replace others. */
static void uncount_replacing(kvc_state *state, int32_t g) {
    const kvc_extents *extents = &state->groups[g];
    for (int64_t i = 0; i < extents->num; i++) state->cache->pools[g].counts.replacing -= extents->items[i].count;
}

void kvc_state_accept(kvc_state *state) {
    kvc_cache *cache = state->cache;
    for (int32_t g = 0; g < cache->num_groups; g++) uncount_replacing(state, g);
    for (kvc_sequence *sequence; (sequence = kvc_table_first(&state->sequences));) {
        kvc_table_remove(&state->sequences, sequence);
        kvc_cache_insert(cache, sequence, kvc_table_find(&cache->sequences, sequence->id));
    }
    state->is_loading = 0;
}

/* Gives back the slots and blocks that were taken for a group.  The last slots come first, so that the free list gets
 * its order back, and the new blocks (`reserved` of them) at its end can be freed. */
static void give_back(kvc_state *state, int32_t g) {
    kvc_extents *extents = &state->groups[g];
    kvc_pool *pool = &state->cache->pools[g];
    int32_t num_blocks = 0;
    for (int64_t i = extents->num - 1; i >= 0; i--) {
        const kvc_extent *e = &extents->items[i];
        num_blocks += kvc_pool_untake(pool, e->block, e->slot, e->count); /* 1 if the block is free again */
    }
    kvc_pool_unreserve(pool, num_blocks, &extents->reserved);
}

/* Holds all slots while it frees the sequences, so that no block becomes free before give_back gives it back. */
void kvc_state_drop(kvc_state *state) {
    kvc_cache *cache = state->cache;
    for (int32_t g = 0; state->groups && g < cache->num_groups; g++) {
        uncount_replacing(state, g);
        for (int64_t i = 0; i < state->groups[g].num; i++) {
            const kvc_extent *e = &state->groups[g].items[i];
            kvc_pool_hold(e->block, e->slot, e->count);
        }
    }
    for (kvc_sequence *sequence; (sequence = kvc_table_first(&state->sequences));) {
        kvc_table_remove(&state->sequences, sequence);
        kvc_sequence_free(sequence, &cache->memory, cache->pools);
    }
    for (int32_t g = 0; state->groups && g < cache->num_groups; g++) give_back(state, g);
    state->is_loading = 0;
}

void kvc_state_end(kvc_state *state) {
    if (state->is_begun) leave(state);
    if (state->is_pinned) unpin(state);
    if (state->is_loading) kvc_state_drop(state);
    for (kvc_state_buffer *buffer = state->buffers, *next; buffer; buffer = next) {
        next = buffer->next;
        kvc_memory_free(state->memory, buffer, buffer->size, KVC_MEMORY_SCRATCH, -1);
    }
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

kvc_status kvc_check_seq_ids(const int64_t *seq_ids, int64_t num_sequences) {
    if (num_sequences < 0 || num_sequences > INT32_MAX || (!seq_ids && num_sequences))
        return kvc_fail(KVC_ERR_INVALID, "num_sequences is %lld%s", (long long)num_sequences,
                        seq_ids ? "" : ": it must be 0, as seq_ids is NULL");
    for (int64_t i = 1; i < num_sequences; i++)
        if (seq_ids[i] <= seq_ids[i - 1])
            return kvc_fail(KVC_ERR_INVALID, "seq_ids[%lld] is %lld, after %lld: ids must rise", (long long)i,
                            (long long)seq_ids[i], (long long)seq_ids[i - 1]);
    return KVC_OK;
}

kvc_status kvc_check_endian(void) {
    if (!KVC_IS_BIG_ENDIAN) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED, "this machine is big-endian: saved states are little-endian");
}

/* ---- bytes of rows ----------------------------------------------------------------------------------------------- */

const kvc_extent *kvc_first_extent(const kvc_extents *extents, int64_t row) {
    int64_t from = 0, to = extents->num;
    while (from < to) {
        const int64_t middle = from + (to - from) / 2;
        if (extents->items[middle].row + extents->items[middle].count <= row)
            from = middle + 1;
        else
            to = middle;
    }
    return extents->items + from;
}

/* Returns how many bytes of a tensor of rows from `begin` on, at most up to `end`, lie side by side in the cache,
 * and sets *rows to their address.  If nobody asked for these rows, sets *rows to NULL, and returns the bytes up to
 * the next row that lies in the cache. */
static uint64_t find_bytes(const kvc_pieces *pieces, uint64_t begin, uint64_t end, uint8_t **rows) {
    const kvc_state *state = pieces->state;
    const kvc_tensor *tensor = pieces->tensor;
    const kvc_cache *cache = state->cache;
    const kvc_layout *at = &cache->layouts[cache->layout_of[tensor->layer]];
    const int32_t g = cache->group_of[tensor->layer];
    const size_t offsets[][2] = {{at->k_offset, at->k_scales}, {at->v_offset, at->v_scales}},
                 row_sizes[][2] = {{at->k_row_bytes, KVC_SCALE_BYTES}, {at->v_row_bytes, KVC_SCALE_BYTES}},
                 offset = offsets[tensor->is_value][tensor->is_scale],
                 row_bytes = row_sizes[tensor->is_value][tensor->is_scale];
    const uint64_t head_bytes = (uint64_t)state->format.group_rows[g] * row_bytes, head = begin / head_bytes,
                   from = begin - head * head_bytes, left = end - begin, /* from: in the rows of the head */
        most = left < head_bytes - from ? left : head_bytes - from;
    const kvc_extents *extents = &state->groups[g];
    const kvc_extent *e = kvc_first_extent(extents, (int64_t)(from / row_bytes));
    *rows = NULL;
    if (e == extents->items + extents->num) return most;
    const uint64_t first = (uint64_t)e->row * row_bytes, past = first + (uint64_t)e->count * row_bytes;
    if (from < first) return first - from < most ? first - from : most;
    *rows = e->block->rows + offset + head * at->head_stride + (size_t)e->slot * row_bytes + (from - first);
    return past - from < most ? past - from : most;
}

/* Hashes a piece.  Saving copies it from the cache before, loading copies it to the cache on the way. */
static void run_piece(void *context, int64_t i) {
    kvc_pieces *pieces = context;
    const uint64_t from = (uint64_t)i * KVC_FORMAT_PIECE, rest = pieces->size - from,
                   end = from + (rest < KVC_FORMAT_PIECE ? rest : KVC_FORMAT_PIECE);
    kvc_hasher hasher;
    kvc_hash_begin(&hasher, /* seed */ 0);
    for (uint64_t at = from, size = end - from; at < end; at += size) {
        char *bytes = pieces->bytes + at;
        uint8_t *rows = NULL;
        if (pieces->use != KVC_HASH_PIECES) size = find_bytes(pieces, pieces->begin + at, pieces->begin + end, &rows);
        if (pieces->use == KVC_SAVE_PIECES) memcpy(bytes, rows, (size_t)size);
        kvc_hash_add(&hasher, bytes, (size_t)size, pieces->use == KVC_LOAD_PIECES ? rows : NULL);
    }
    pieces->hashes[i] = kvc_hash_end(&hasher);
}

/* Makes the sketches of layer i. */
static void sketch_layer(void *context, int64_t i) {
    const kvc_state *state = context;
    const kvc_cache *cache = state->cache;
    const kvc_layer *layer = &cache->layers[i];
    if (!layer->sketch_bits || layer->share) return;
    const kvc_extents *extents = &state->groups[cache->group_of[i]];
    for (const kvc_extent *e = extents->items; e < extents->items + extents->num; e++)
        kvc_sketch_rows(cache->kernels, layer, &cache->layouts[cache->layout_of[i]], e->block->rows, e->slot, e->count);
}

void kvc_state_sketch(const kvc_state *state) {
    kvc_parallel(kvc_cache_threads(state->cache), state->cache->num_layers, sketch_layer, (void *)(uintptr_t)state);
}

uint64_t kvc_pieces_run(kvc_pieces *pieces, uint64_t checksum) {
    const int64_t num = (int64_t)((pieces->size + KVC_FORMAT_PIECE - 1) / KVC_FORMAT_PIECE);
    kvc_parallel(pieces->num_threads, num, run_piece, pieces);
    for (int64_t i = 0; i < num; i++) checksum = kvc_hash(&pieces->hashes[i], sizeof *pieces->hashes, checksum);
    return checksum;
}
