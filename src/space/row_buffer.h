/* row_buffer.h: memory for the rows of a batch's buffered tokens: tokens of sequences that are unstored
 * (kvc_begin_args.unstored) and were empty before.
 *
 * A row buffer is a block with room for one layer's rows of all buffered tokens.  Rows that kvc_attend puts stay until
 * it puts in another layer, which may take over the buffer.  Rows that kvc_put puts, or that other layers share, stay
 * until the batch ends, in a buffer of their layer's own.
 */
#ifndef KVC_ROW_BUFFER_H
#define KVC_ROW_BUFFER_H

#include "cache/batch.h"

/* Its kvc_block follows in memory, then one byte per slot: whether the row was put. */
typedef struct kvc_row_buffer {
    struct kvc_row_buffer *next; /* next buffer in cache->buffers.first */
    uint64_t bytes, row_bytes;   /* bytes of this allocation, and of the rows */
    int32_t num_slots;
    int32_t layer;     /* the layer whose rows it has; -1: none */
    int32_t users;     /* number of calls that use it now, and of kvc_holds */
    int32_t holds;     /* number of kvc_holds among the users */
    int32_t keeps;     /* not 0: its rows stay until the batch ends */
    int32_t left;      /* not 0: the batch has ended, and the last user frees it */
    int32_t is_new;    /* not 0: no call has put rows in it yet; the last user frees it if none does */
    kvc_layout layout; /* where rows of its layer lie in it */
} kvc_row_buffer;

/* Return the buffer's block, and for each slot whether the row was put. */
static inline kvc_block *kvc_row_buffer_block(const kvc_row_buffer *buffer) { return (kvc_block *)(buffer + 1); }
static inline uint8_t *kvc_row_buffer_written(const kvc_row_buffer *buffer) {
    return (uint8_t *)(kvc_row_buffer_block(buffer) + 1);
}

/* Returns the buffer that a block belongs to; NULL if the block is a pool's. */
static inline kvc_row_buffer *kvc_row_buffer_of(const kvc_block *block) {
    return block->listed.is_row_buffer ? (kvc_row_buffer *)block - 1 : NULL;
}

/* Returns where a layer's rows lie in a block. */
static inline const kvc_layout *kvc_layout_in(const kvc_cache *cache, int32_t layer, const kvc_block *block) {
    return block->listed.is_row_buffer ? &kvc_row_buffer_of(block)->layout : &cache->layouts[cache->layout_of[layer]];
}

/* Return the bytes of a row buffer for num_slots tokens: of its rows (UINT64_MAX if they do not fit the address space),
 * and of its bookkeeping. */
uint64_t kvc_row_buffer_bytes(const kvc_cache *cache, int32_t num_slots);
uint64_t kvc_row_buffer_header_bytes(int32_t num_slots);

/* Makes one more row buffer for the batch, as yet without a layer; call with the mutex held. */
kvc_status kvc_row_buffer_add(const kvc_batch *batch);

/* Returns the row buffer with a layer's rows, or NULL.  The call is a user of it until kvc_row_buffer_leave. */
kvc_row_buffer *kvc_row_buffer_find(const kvc_batch *batch, int32_t layer);
void kvc_row_buffer_leave(kvc_cache *cache, kvc_row_buffer *buffer);

/* Does the same for a call that puts buffered rows.  If the layer has no buffer, it takes over a buffer whose rows
 * need not stay, or makes one.  Can fail with KVC_ERR_FULL and KVC_ERR_NOMEM. */
kvc_status kvc_row_buffer_enter(kvc_batch *batch, int32_t layer, kvc_row_buffer **out);

/* Keeps the buffer once the rows are there, as the last step of a call that can fail: evicts what makes room for it,
 * if it is new.  keeps: the rows stay until the batch ends.  Fails with KVC_ERR_FULL if others took the room. */
kvc_status kvc_row_buffer_accept(kvc_cache *cache, kvc_row_buffer *buffer, int keeps);

/* Does the same as kvc_row_buffer_leave, with the mutex held. */
void kvc_row_buffer_let_go(kvc_cache *cache, kvc_row_buffer *buffer);

/* Frees the batch's row buffers as it ends, or lets their last users free them; call with the mutex held. */
void kvc_row_buffers_free(kvc_cache *cache);

/* Forgets, in the child of the process's fork(), users that are calls: calls of other threads never end there. */
void kvc_row_buffers_forked(kvc_cache *cache);

/* Sets *has to whether the row of token t of the batch is in its slot of the layer's buffer (NULL: the layer has no
 * buffer).  Returns KVC_ERR_GONE if it was put, but is gone. */
kvc_status kvc_row_buffer_has(const kvc_batch *batch, const kvc_row_buffer *buffer, int32_t layer, int32_t t,
                              int32_t slot, int *has);

#endif
