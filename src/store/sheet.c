#include "store/sheet.h"

#include "store/layout.h"
#include "store/limits.h"
#include "store/waiting.h"

#include <string.h>

uint64_t kvc_sheet_header_bytes(int32_t num_slots) {
    return sizeof(kvc_sheet) + sizeof(kvc_block) + (uint64_t)num_slots;
}

uint64_t kvc_sheet_bytes(const kvc_cache *cache, int32_t num_slots) {
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

kvc_status kvc_sheet_add(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    const int32_t n = batch->num_loose;
    const uint64_t row_bytes = kvc_sheet_bytes(cache, n), bytes = kvc_sheet_header_bytes(n);
    kvc_sheet *sheet = kvc_memory_alloc(&cache->memory, bytes, KVC_MEMORY_BOOKKEEPING, -1);
    uint8_t *rows = sheet ? kvc_memory_alloc(&cache->memory, row_bytes, KVC_MEMORY_ROWS, -1) : NULL;
    if (!rows) {
        kvc_memory_free(&cache->memory, sheet, bytes, KVC_MEMORY_BOOKKEEPING, -1);
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for the rows of %d tokens in one layer", n);
    }
    *sheet = (kvc_sheet){.next = cache->sheets, .bytes = bytes, .row_bytes = row_bytes, .num_slots = n, .layer = -1};
    *kvc_sheet_block(sheet) = (kvc_block){.rows = rows, .index = -1};
    cache->sheets = sheet;
    cache->sheet_bytes += (int64_t)row_bytes;
    return KVC_OK;
}

static void free_sheet(kvc_cache *cache, kvc_sheet *sheet) {
    kvc_sheet **at = &cache->sheets;
    while (*at != sheet) at = &(*at)->next;
    *at = sheet->next;
    cache->sheet_bytes -= (int64_t)sheet->row_bytes;
    kvc_memory_free(&cache->memory, kvc_sheet_block(sheet)->rows, sheet->row_bytes, KVC_MEMORY_ROWS, -1);
    kvc_memory_free(&cache->memory, sheet, sheet->bytes, KVC_MEMORY_BOOKKEEPING, -1);
}

void kvc_sheets_free(kvc_cache *cache) {
    for (kvc_sheet *sheet = cache->sheets, *next; sheet; sheet = next) {
        next = sheet->next;
        sheet->left = 1;
        if (!sheet->users) free_sheet(cache, sheet);
    }
}

void kvc_sheets_forked(kvc_cache *cache) {
    for (kvc_sheet *sheet = cache->sheets, *next; sheet; sheet = next) {
        next = sheet->next;
        sheet->users = sheet->holds;
        if (sheet->left && !sheet->users) free_sheet(cache, sheet);
    }
}

/* The batch's sheet with the rows of a layer; layer -1: one that nobody uses and whose rows need not stay. */
static kvc_sheet *find(const kvc_cache *cache, int32_t layer) {
    kvc_sheet *sheet = cache->sheets;
    while (sheet && (sheet->left || (layer < 0 ? sheet->users || sheet->keeps : sheet->layer != layer)))
        sheet = sheet->next;
    return sheet;
}

/* Gives a layer a sheet: one whose rows need not stay, or a new one. */
static kvc_status assign(kvc_batch *batch, int32_t layer, kvc_sheet **out) {
    kvc_cache *cache = batch->cache;
    size_t bytes = 0;
    if (!(*out = find(cache, -1))) {
        kvc_status status = kvc_sheet_add(batch);
        if (status != KVC_OK) return status;
        status = kvc_check_max_bytes(cache, "putting rows of a sequence that is not stored");
        if (status != KVC_OK) free_sheet(cache, cache->sheets);
        if (status != KVC_OK) return status;
        *out = cache->sheets;
    }
    kvc_sheet *sheet = *out;
    sheet->layer = layer;
    memset(kvc_sheet_written(sheet), 0, (size_t)sheet->num_slots);
    return kvc_layout_add(NULL, &sheet->layout, &cache->layers[layer], sheet->num_slots, &bytes);
}

static int is_shared(const kvc_cache *cache, int32_t layer) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].share == layer + 1) return 1;
    return 0;
}

kvc_status kvc_sheet_enter(kvc_batch *batch, int32_t layer, kvc_sheet_use use, kvc_sheet **out) {
    kvc_cache *cache = batch->cache;
    const int32_t source = kvc_source_of(cache, layer);
    kvc_status status = KVC_OK;
    *out = NULL;
    if (!batch->num_loose || !kvc_keeps_tokens(cache, source)) return KVC_OK;
    kvc_lock(cache);
    if (cache->max_bytes) kvc_cache_wait_pages(cache);
    *out = find(cache, source);
    if (!*out && use != KVC_SHEET_READ) status = assign(batch, source, out);
    if (status == KVC_OK && *out) {
        (*out)->users++;
        if (use == KVC_SHEET_KEEP || is_shared(cache, source)) (*out)->keeps = 1;
    }
    return kvc_unlock(cache, status);
}

void kvc_sheet_let_go(kvc_cache *cache, kvc_sheet *sheet) {
    if (--sheet->users == 0 && sheet->left) free_sheet(cache, sheet);
}

void kvc_sheet_leave(kvc_cache *cache, kvc_sheet *sheet) {
    if (!sheet) return;
    kvc_lock(cache);
    kvc_sheet_let_go(cache, sheet);
    kvc_unlock(cache, KVC_OK);
}

kvc_status kvc_sheet_has(const kvc_batch *batch, const kvc_sheet *sheet, int32_t layer, int32_t t, int32_t slot,
                         int *has) {
    *has = sheet && kvc_sheet_written(sheet)[slot];
    if (*has || !kvc_written_in(batch, kvc_source_of(batch->cache, layer))[t]) return KVC_OK;
    return kvc_fail(KVC_ERR_GONE,
                    "token %d of the batch was put in layer %d, and its rows are gone: its sequence is not stored, and "
                    "what is put while attending stays until the same is done in another layer; put k and v first",
                    t, layer);
}
