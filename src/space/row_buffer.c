/* row_buffer.c: rows of unstored tokens: see row_buffer.h. */
#include "space/row_buffer.h"

#include "rows/layout.h"
#include "space/evict.h"
#include "cache/waiting.h"

#include <string.h>

uint64_t kvc_row_buffer_header_bytes(int32_t num_slots) {
    return sizeof(kvc_row_buffer) + sizeof(kvc_block) + (uint64_t)num_slots;
}

uint64_t kvc_row_buffer_bytes(const kvc_cache *cache, int32_t num_slots) {
    size_t most = 1;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        kvc_layout layout;
        size_t bytes = 0;
        if (!kvc_keeps_tokens(cache, i)) continue;
        if (kvc_layout_add(NULL, &layout, &cache->layers[i], num_slots, &bytes) != KVC_OK) return UINT64_MAX;
        if (bytes > most) most = bytes;
    }
    return most;
}

kvc_status kvc_row_buffer_add(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    const int32_t n = batch->num_buffered;
    const uint64_t row_bytes = kvc_row_buffer_bytes(cache, n), bytes = kvc_row_buffer_header_bytes(n);
    kvc_row_buffer *buffer = kvc_memory_alloc(&cache->memory, bytes, KVC_MEMORY_BOOKKEEPING, -1);
    uint8_t *rows = buffer ? kvc_memory_alloc(&cache->memory, row_bytes, KVC_MEMORY_ROWS, -1) : NULL;
    if (!rows) {
        kvc_memory_free(&cache->memory, buffer, bytes, KVC_MEMORY_BOOKKEEPING, -1);
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for the rows of %d tokens in one layer", n);
    }
    *buffer = (kvc_row_buffer){
        .next = cache->buffers.first, .bytes = bytes, .row_bytes = row_bytes, .num_slots = n, .layer = -1};
    *kvc_row_buffer_block(buffer) = (kvc_block){.rows = rows, .listed.index = -1, .listed.is_row_buffer = 1};
    cache->buffers.first = buffer;
    cache->buffers.bytes += (int64_t)row_bytes;
    return KVC_OK;
}

static void free_buffer(kvc_cache *cache, kvc_row_buffer *buffer) {
    kvc_row_buffer **at = &cache->buffers.first;
    while (*at != buffer) at = &(*at)->next;
    *at = buffer->next;
    cache->buffers.bytes -= (int64_t)buffer->row_bytes;
    kvc_memory_free(&cache->memory, kvc_row_buffer_block(buffer)->rows, buffer->row_bytes, KVC_MEMORY_ROWS, -1);
    kvc_memory_free(&cache->memory, buffer, buffer->bytes, KVC_MEMORY_BOOKKEEPING, -1);
}

/* Frees a buffer without users, if its batch has ended or no rows were put in it. */
static void free_unused(kvc_cache *cache, kvc_row_buffer *buffer) {
    if (!buffer->users && (buffer->left || buffer->is_new)) free_buffer(cache, buffer);
}

void kvc_row_buffers_free(kvc_cache *cache) {
    for (kvc_row_buffer *buffer = cache->buffers.first, *next; buffer; buffer = next) {
        next = buffer->next;
        buffer->left = 1;
        free_unused(cache, buffer);
    }
}

void kvc_row_buffers_forked(kvc_cache *cache) {
    for (kvc_row_buffer *buffer = cache->buffers.first, *next; buffer; buffer = next) {
        next = buffer->next;
        buffer->users = buffer->holds;
        free_unused(cache, buffer);
    }
}

/* Finds the batch's buffer with the rows of a layer; for layer -1, a buffer without users whose rows need not stay. */
static kvc_row_buffer *find_buffer(const kvc_cache *cache, int32_t layer) {
    kvc_row_buffer *buffer = cache->buffers.first;
    while (buffer && (buffer->left || (layer < 0 ? buffer->users || buffer->keeps : buffer->layer != layer)))
        buffer = buffer->next;
    return buffer;
}

static kvc_need need_of(kvc_cache *cache) {
    return kvc_need_max_bytes(cache, "putting rows of a sequence that is not stored");
}

/* Gives a layer a buffer: an existing buffer whose rows need not stay, or a new one. */
static kvc_status assign_buffer(kvc_batch *batch, int32_t layer, kvc_row_buffer **out) {
    kvc_cache *cache = batch->cache;
    size_t bytes = 0;
    kvc_row_buffer *buffer = find_buffer(cache, -1);
    if (!buffer) {
        const kvc_need need = need_of(cache);
        KVC_TRY(kvc_row_buffer_add(batch));
        buffer = cache->buffers.first;
        buffer->is_new = 1;
        const kvc_status status = kvc_check_room(&need);
        if (status != KVC_OK) free_unused(cache, buffer);
        if (status != KVC_OK) return status;
    }
    *out = buffer;
    buffer->layer = layer;
    memset(kvc_row_buffer_written(buffer), 0, (size_t)buffer->num_slots);
    return kvc_layout_add(NULL, &buffer->layout, &cache->layers[layer], buffer->num_slots, &bytes);
}

/* Returns whether another layer shares the rows of a layer. */
static int is_shared(const kvc_cache *cache, int32_t layer) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].share == layer + 1) return 1;
    return 0;
}

kvc_row_buffer *kvc_row_buffer_find(const kvc_batch *batch, int32_t layer) {
    kvc_cache *cache = batch->cache;
    const int32_t source = kvc_source_of(cache, layer);
    if (!batch->num_buffered || !kvc_keeps_tokens(cache, source)) return NULL;
    kvc_lock(cache);
    kvc_row_buffer *buffer = find_buffer(cache, source);
    if (buffer) buffer->users++;
    kvc_unlock(cache, KVC_OK);
    return buffer;
}

kvc_status kvc_row_buffer_enter(kvc_batch *batch, int32_t layer, kvc_row_buffer **out) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    kvc_lock(cache);
    do {
        if (cache->limits.max_bytes) kvc_cache_wait_pages(cache);
        *out = find_buffer(cache, layer);
        status = *out ? KVC_OK : assign_buffer(batch, layer, out);
    } while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    if (status == KVC_OK) (*out)->users++;
    return kvc_unlock(cache, status);
}

kvc_status kvc_row_buffer_accept(kvc_cache *cache, kvc_row_buffer *buffer, int keeps) {
    kvc_status status = KVC_OK;
    kvc_lock(cache);
    do {
        if (cache->limits.max_bytes) kvc_cache_wait_pages(cache);
        const kvc_need need = need_of(cache);
        if (buffer->is_new) status = kvc_make_room(&need);
    } while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    if (status == KVC_OK) {
        buffer->is_new = 0;
        if (keeps || is_shared(cache, buffer->layer)) buffer->keeps = 1;
    }
    return kvc_unlock(cache, status);
}

void kvc_row_buffer_let_go(kvc_cache *cache, kvc_row_buffer *buffer) {
    buffer->users--;
    free_unused(cache, buffer);
}

void kvc_row_buffer_leave(kvc_cache *cache, kvc_row_buffer *buffer) {
    if (!buffer) return;
    kvc_lock(cache);
    kvc_row_buffer_let_go(cache, buffer);
    kvc_unlock(cache, KVC_OK);
}

kvc_status kvc_row_buffer_has(const kvc_batch *batch, const kvc_row_buffer *buffer, int32_t layer, int32_t t,
                              int32_t slot, int *has) {
    *has = buffer && kvc_row_buffer_written(buffer)[slot];
    if (*has || !kvc_written_in(batch, kvc_source_of(batch->cache, layer))[t]) return KVC_OK;
    return kvc_fail(KVC_ERR_GONE,
                    "token %d of the batch was put in layer %d, and its rows are gone: its sequence is not stored, and "
                    "what is put while attending stays until the same is done in another layer; put k and v first",
                    t, layer);
}
