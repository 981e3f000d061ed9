/* sheet.h: rows of a batch's loose tokens: those of unstored sequences (kvc_begin_args.unstored) that were empty
 * before.
 *
 * A sheet is a block with room for one layer's rows of all loose tokens.  Rows that kvc_attend puts stay until it puts
 * in another layer, which may take over the sheet.  Rows that kvc_put puts, or that other layers share, stay until the
 * batch ends, in a sheet of their layer's own.
 */
#ifndef KVC_SHEET_H
#define KVC_SHEET_H

#include "store/batch.h"

typedef struct kvc_sheet {
    struct kvc_sheet *next;    /* in cache->sheets */
    uint64_t bytes, row_bytes; /* of this allocation, and of the rows */
    int32_t num_slots;
    int32_t layer;     /* whose rows it has; -1: no layer's */
    int32_t users;     /* calls that use it now, and kvc_holds */
    int32_t holds;     /* the kvc_holds among the users */
    int32_t keeps;     /* not 0: its rows stay until the batch ends */
    int32_t left;      /* not 0: the batch has ended, and the last user frees it */
    kvc_layout layout; /* of its layer */
} kvc_sheet;

/* Behind the struct lie its block, whose index is -1, and for each slot whether the row was put. */

static inline kvc_block *kvc_sheet_block(const kvc_sheet *sheet) { return (kvc_block *)(sheet + 1); }
static inline uint8_t *kvc_sheet_written(const kvc_sheet *sheet) { return (uint8_t *)(kvc_sheet_block(sheet) + 1); }

/* The sheet whose block it is; NULL: the block is a pool's. */
static inline kvc_sheet *kvc_sheet_of(const kvc_block *block) {
    return block->index < 0 ? (kvc_sheet *)block - 1 : NULL;
}

/* Where a layer's rows are in a block. */
static inline const kvc_layout *kvc_layout_in(const kvc_cache *cache, int32_t layer, const kvc_block *block) {
    return block->index < 0 ? &kvc_sheet_of(block)->layout : &cache->layouts[cache->layout_of[layer]];
}

/* Bytes of a sheet for so many tokens: of its rows, UINT64_MAX where they do not fit the address space, and of its
 * bookkeeping. */
uint64_t kvc_sheet_bytes(const kvc_cache *cache, int32_t num_slots);
uint64_t kvc_sheet_header_bytes(int32_t num_slots);

/* Makes one more sheet for the batch, as yet of no layer; with the mutex held. */
kvc_status kvc_sheet_add(const kvc_batch *batch);

typedef enum kvc_sheet_use {
    KVC_SHEET_READ, /* find the sheet with the layer's rows */
    KVC_SHEET_PASS, /* ... or take one over from a layer whose rows need not stay, or make one */
    KVC_SHEET_KEEP  /* ... whose rows then stay until the batch ends */
} kvc_sheet_use;

/* Finds the sheet of a layer, which stays as it is until it is left; NULL where there is none, or no token is loose. */
kvc_status kvc_sheet_enter(kvc_batch *batch, int32_t layer, kvc_sheet_use use, kvc_sheet **sheet);
void kvc_sheet_leave(kvc_cache *cache, kvc_sheet *sheet);

/* kvc_sheet_leave, with the mutex held. */
void kvc_sheet_let_go(kvc_cache *cache, kvc_sheet *sheet);

/* Frees the batch's sheets as it ends, or leaves that to their last users; with the mutex held. */
void kvc_sheets_free(kvc_cache *cache);

/* Forgets users that are calls, in the child of a fork(), where calls of other threads never end. */
void kvc_sheets_forked(kvc_cache *cache);

/* Whether the row of token t of the batch, in a slot of the layer's sheet (NULL: there is none), was put and is still
 * there.  KVC_ERR_GONE where it is not. */
kvc_status kvc_sheet_has(const kvc_batch *batch, const kvc_sheet *sheet, int32_t layer, int32_t t, int32_t slot,
                         int *has);

#endif
