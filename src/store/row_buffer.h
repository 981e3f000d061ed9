/* row_buffer.h: rows of a batch's buffered tokens: those of sequences that are unstored (kvc_begin_args.unstored) and
 * were empty before.
 *
 * A row buffer is a block with room for one layer's rows of all buffered tokens.  Rows that kvc_attend puts stay until
 * it puts in another layer, which may take over the buffer.  Rows that kvc_put puts, or that other layers share, stay
 * until the batch ends, in a buffer of their layer's own.
 */
#ifndef KVC_ROW_BUFFER_H
#define KVC_ROW_BUFFER_H

#include "store/batch.h"

typedef struct kvc_row_buffer {
    struct kvc_row_buffer *next; /* in cache->row_buffers */
    uint64_t bytes, row_bytes;   /* of this allocation, and of the rows */
    int32_t num_slots;
    int32_t layer;     /* whose rows it has; -1: no layer's */
    int32_t users;     /* calls that use it now, and kvc_holds */
    int32_t holds;     /* the kvc_holds among the users */
    int32_t keeps;     /* not 0: its rows stay until the batch ends */
    int32_t left;      /* not 0: the batch has ended, and the last user frees it */
    kvc_layout layout; /* of its layer */
} kvc_row_buffer;

/* Behind the struct lie its block, whose index is -1, and for each slot whether the row was put. */

static inline kvc_block *kvc_row_buffer_block(const kvc_row_buffer *buffer) { return (kvc_block *)(buffer + 1); }
static inline uint8_t *kvc_row_buffer_written(const kvc_row_buffer *buffer) {
    return (uint8_t *)(kvc_row_buffer_block(buffer) + 1);
}

/* The buffer whose block it is; NULL: the block is a pool's. */
static inline kvc_row_buffer *kvc_row_buffer_of(const kvc_block *block) {
    return block->index < 0 ? (kvc_row_buffer *)block - 1 : NULL;
}

/* Where a layer's rows are in a block. */
static inline const kvc_layout *kvc_layout_in(const kvc_cache *cache, int32_t layer, const kvc_block *block) {
    return block->index < 0 ? &kvc_row_buffer_of(block)->layout : &cache->layouts[cache->layout_of[layer]];
}

/* Bytes of a row buffer for so many tokens: of its rows, UINT64_MAX where they do not fit the address space, and of its
 * bookkeeping. */
uint64_t kvc_row_buffer_bytes(const kvc_cache *cache, int32_t num_slots);
uint64_t kvc_row_buffer_header_bytes(int32_t num_slots);

/* Makes one more row buffer for the batch, as yet of no layer; with the mutex held. */
kvc_status kvc_row_buffer_add(const kvc_batch *batch);

typedef enum kvc_row_buffer_use {
    KVC_ROW_BUFFER_READ, /* find the buffer with the layer's rows */
    KVC_ROW_BUFFER_PASS, /* ... or take one over from a layer whose rows need not stay, or make one */
    KVC_ROW_BUFFER_KEEP  /* ... whose rows then stay until the batch ends */
} kvc_row_buffer_use;

/* Finds the row buffer of a layer, which stays as it is until it is left; NULL where there is none, or no token is
 * buffered. */
kvc_status kvc_row_buffer_enter(kvc_batch *batch, int32_t layer, kvc_row_buffer_use use, kvc_row_buffer **buffer);
void kvc_row_buffer_leave(kvc_cache *cache, kvc_row_buffer *buffer);

/* kvc_row_buffer_leave, with the mutex held. */
void kvc_row_buffer_let_go(kvc_cache *cache, kvc_row_buffer *buffer);

/* Frees the batch's row buffers as it ends, or leaves that to their last users; with the mutex held. */
void kvc_row_buffers_free(kvc_cache *cache);

/* Forgets users that are calls, in the child of a fork(), where calls of other threads never end. */
void kvc_row_buffers_forked(kvc_cache *cache);

/* Whether the row of token t of the batch, in a slot of the layer's buffer (NULL: there is none), was put and is still
 * there.  KVC_ERR_GONE where it is not. */
kvc_status kvc_row_buffer_has(const kvc_batch *batch, const kvc_row_buffer *buffer, int32_t layer, int32_t t,
                              int32_t slot, int *has);

#endif
