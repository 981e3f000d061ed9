/* sheet.h: rows of the tokens of a batch that are not to be stored.
 *
 * A sheet is a block with room for one layer's rows of all such tokens, and goes from layer to layer: what kvc_attend
 * puts stays until it puts in another layer.  What kvc_put puts stays until the batch ends, in a sheet of that layer's
 * own, as the rows of a layer do that others share.
 */
#ifndef KVC_SHEET_H
#define KVC_SHEET_H

#include "store/batch.h"

typedef struct kvc_sheet {
    struct kvc_sheet *next;    /* of the cache's */
    uint64_t bytes, row_bytes; /* of this allocation, and of the rows */
    int32_t num_slots;
    int32_t layer; /* whose rows it has; -1: nobody's */
    int32_t users; /* calls that use it now, and holds */
    int32_t holds; /* of these */
    int32_t keeps; /* not 0: its rows stay until the batch ends */
    int32_t left;  /* not 0: the batch has ended, and the last user frees it */
    kvc_layout
        layout; /* of its layer.  Behind the struct lie its block, whose index is -1, and for each slot whether */
} kvc_sheet;    /* the row is there */

static inline kvc_block *kvc_sheet_block(const kvc_sheet *sheet) { return (kvc_block *)(sheet + 1); }
static inline uint8_t *kvc_sheet_written(const kvc_sheet *sheet) { return (uint8_t *)(kvc_sheet_block(sheet) + 1); }

/* The sheet that a block is; NULL: it is one of a pool. */
static inline kvc_sheet *kvc_sheet_of(const kvc_block *block) {
    return block->index < 0 ? (kvc_sheet *)block - 1 : NULL;
}

/* Where a layer's rows are in a block. */
static inline const kvc_layout *kvc_layout_in(const kvc_cache *cache, int32_t layer, const kvc_block *block) {
    return block->index < 0 ? &kvc_sheet_of(block)->layout : &cache->layouts[cache->layout_of[layer]];
}

/* Bytes that the rows of a sheet for so many tokens take; UINT64_MAX: more than there are.  Those of its bookkeeping.
 */
uint64_t kvc_sheet_bytes(const kvc_cache *cache, int32_t num_slots);
uint64_t kvc_sheet_header_bytes(int32_t num_slots);

/* One more for the batch, whose rows are nobody's; with the mutex held. */
kvc_status kvc_sheet_add(const kvc_batch *batch);

typedef enum kvc_sheet_use {
    KVC_SHEET_READ, /* the sheet with the layer's rows, if there is one */
    KVC_SHEET_PASS, /* ... or one for them, if need be that of a layer whose rows need not stay */
    KVC_SHEET_KEEP  /* ... and they stay until the batch ends */
} kvc_sheet_use;

/* The sheet of a layer, to be left; NULL where there is none, or the batch stores all its tokens. */
kvc_status kvc_sheet_enter(kvc_batch *batch, int32_t layer, kvc_sheet_use use, kvc_sheet **sheet);
void kvc_sheet_leave(kvc_cache *cache, kvc_sheet *sheet);

/* The same with the mutex held. */
void kvc_sheet_let_go(kvc_cache *cache, kvc_sheet *sheet);

/* The batch ends: frees its sheets, with the mutex held. */
void kvc_sheets_free(kvc_cache *cache);

/* In the child of a fork(), where calls of other threads never end: they no longer use any. */
void kvc_sheets_forked(kvc_cache *cache);

/* Whether the row of token t of the batch, in a slot of the layer's sheet (NULL: there is none), was put and is still
 * there.  KVC_ERR_GONE where it is not. */
kvc_status kvc_sheet_has(const kvc_batch *batch, const kvc_sheet *sheet, int32_t layer, int32_t t, int32_t slot,
                         int *has);

#endif
