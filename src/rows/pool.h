/* pool.h: the blocks of one layer group: opened when first needed, reused, given back.
 *
 * A block counts, for every slot, how many sequences hold it, and how many of these may be evicted.  Slots are handed
 * out in order, at the fill mark.  Once no sequence holds a slot, it is wasted until it can be handed out again.  That
 * is when all slots behind it are dropped, because the fill mark falls then, or when the whole block is free.  A pinned
 * block does not become free, and its fill mark does not fall.
 */
#ifndef KVC_POOL_H
#define KVC_POOL_H

#include "kvcache.h"
#include "base/dtype.h"
#include "base/memory.h"
#include "base/sorted.h"

/* How many sequences hold a slot, and how many of these may be evicted. */
typedef struct kvc_holders {
    uint32_t num, evictable;
} kvc_holders;

/* Where an evictable sequence stands in a group: cache/useful.h. */
typedef struct kvc_standing kvc_standing;

/* Which holders of slots count: all of them (KVC_NOW), or only sequences that may not be evicted (KVC_FIXED). */
typedef enum kvc_scope { KVC_NOW, KVC_FIXED, KVC_NUM_SCOPES } kvc_scope;

/* How much of a block is in use in a scope. */
typedef struct kvc_use {
    int32_t fill;   /* the fill mark */
    int32_t live;   /* number of slots that sequences hold */
    int8_t is_used; /* it is not free */
    int8_t is_pinned;
} kvc_use;

/* Some used blocks: their number, their slots below fill marks, and the slots that sequences hold. */
typedef struct kvc_count {
    int64_t blocks, filled, live;
} kvc_count;

/* How much of all blocks is in use in a scope.  It is updated as blocks change, so that nobody has to visit them all.
 */
typedef struct kvc_tally {
    kvc_count used;    /* all used blocks */
    kvc_count held;    /* blocks that a view or a call keeps as they are */
    kvc_count movable; /* blocks that a compaction moves: not held, and not full of live slots */
} kvc_tally;

/* Places of a block in lists. */
typedef struct kvc_block_listings {
    struct kvc_block *next_free;                  /* in the list of free blocks */
    struct kvc_block *earlier, *later;            /* in the list of all blocks of the pool */
    struct kvc_block *next_untaken, **untaken_at; /* in pool->free.untaken; NULL: it is not there */
    int32_t index;   /* in the list of all, which changes as others are given back: read under the mutex */
    int8_t is_free;  /* it is in the list of free blocks */
    int8_t was_idle; /* it counted in pool->free.num_idle when it was opened */
} kvc_block_listings;

/* The memory of a block's rows. */
typedef struct kvc_block_pages {
    int32_t faulted;        /* slots below this count as resident: handed out, or reserved, since memory was taken */
    int32_t touched_before; /* value of `faulted` when it was opened */
    int32_t resident;       /* slots below this have memory that kvc_pool_next_fault took beforehand */
    uint32_t epoch;         /* pool->epoch when slots were last handed out */
    int32_t collapsed;      /* huge pages that slots below this fill were made */
    int32_t collapse_to;    /* value of `collapsed` after the steps from collapse_next on */
    int64_t collapse_next;  /* index of the next huge page to look at; 0: none has been */
} kvc_block_pages;

/* Slots of a block that sequences hold which may be evicted: cache/useful.h. */
typedef struct kvc_block_evicting {
    kvc_standing *useless; /* list of the sequences with rows in this block alone that free no slots of it */
    int32_t evictable;     /* number of live slots whose holders may all be evicted */
    int32_t num_watchers;  /* runs here of those in pool->evicting.useless */
    uint32_t choice;       /* value of pool->evicting.num_choices when a call was to drop rows of it */
} kvc_block_evicting;

/* The plans of the running call for a block. */
typedef struct kvc_block_plan {
    int32_t *targets;             /* [fill] while a compaction is planned: the new places of its slots; NULL: none */
    struct kvc_block *next_tried; /* in the list of a preview */
    int32_t num_slots;            /* number of slots past fill that a batch about to begin will take */
    int8_t is_tried;              /* it is in the list of a preview */
    int8_t is_ordered;            /* while a compaction is planned: it has its place in the order */
} kvc_block_plan;

/* An example: a block of 8 slots, of which 6 were handed out.  Sequence A holds the slots 0, 1 and 5.  Sequence B,
 * which may be evicted, holds the slots 1, 2 and 3:
 *
 *     slot               0  1  2  3  4  5  6  7     fill is 6
 *     holders.num        1  2  1  1  0  1           live is 5: slot 4 is wasted while slot 5 is held
 *     holders.evictable  0  1  1  1  0  0           evicting.evictable is 2: evicting B would free slots 2 and 3
 */
typedef struct kvc_block {
    /* Per layer and head of the group: K [slot][k_dim], then V [slot][v_dim], if stored.  The scales of these rows
     * follow, K [slot] and V [slot], if their types have any. */
    uint8_t *rows;
    int32_t fill;   /* the fill mark: slots below it were handed out */
    int32_t live;   /* number of slots that sequences hold */
    int32_t pins;   /* number of views and calls that keep the rows in place */
    int32_t number; /* while a state is saved: of the blocks with rows that are saved, from 1 on; else 0 */
    kvc_use noted[KVC_NUM_SCOPES]; /* what pool->tallies count of it */
    struct kvc_pool *pool;
    kvc_block_listings listed;
    kvc_block_pages pages;
    kvc_block_evicting evicting;
    kvc_block_plan plan;
    kvc_holders holders[]; /* [block_size] of each slot, for slots below fill */
} kvc_block;

/* The place of a layer's rows in a block. */
typedef struct kvc_layout {
    size_t k_offset, v_offset; /* offsets of head 0, slot 0 */
    size_t head_stride;
    size_t k_row_bytes, v_row_bytes; /* strides from slot to slot; the same if values lie in the keys, and v_row_bytes 0
                                        if the layer holds keys alone */
    size_t v_stored;                 /* bytes stored for a row of values: v_row_bytes, or 0 if values lie in the keys */
    size_t k_scales, v_scales;       /* offsets of the scales of head 0, slot 0; 0: rows have none */
    int32_t num_scales;              /* stored for a slot and head: 0 to 2 */
    size_t sketch_offset,
        sketch_bytes; /* place of the sketch of head 0, slot 0; bytes of a sketch, or 0 without sketches */
    int32_t num_kv_heads;
} kvc_layout;

/* Returns whether a layer stores values beside its keys: not if they lie in the keys, nor if it holds keys alone. */
static inline int kvc_stores_values(const kvc_layer *layer) { return layer->v_dim && !layer->value_in_key; }

/* Return where the key, or the value, of one slot and head lies. */
static inline uint8_t *kvc_key_at(const kvc_layout *at, const kvc_block *block, int32_t slot, int32_t head) {
    return block->rows + at->k_offset + (size_t)head * at->head_stride + (size_t)slot * at->k_row_bytes;
}
static inline uint8_t *kvc_value_at(const kvc_layout *at, const kvc_block *block, int32_t slot, int32_t head) {
    return block->rows + at->v_offset + (size_t)head * at->head_stride + (size_t)slot * at->v_row_bytes;
}

/* Returns where the sketch of one slot's key and head lies, in a block whose rows these are. */
static inline uint8_t *kvc_sketch_at(const kvc_layout *at, const uint8_t *rows, int32_t slot, int32_t head) {
    return (uint8_t *)(uintptr_t)rows + at->sketch_offset + (size_t)head * at->head_stride +
           (size_t)slot * at->sketch_bytes;
}

/* Return where the scale of one slot's key, or value, and head lies; NULL if rows have none. */
static inline uint8_t *kvc_scale_at(const kvc_layout *at, size_t scales, const kvc_block *block, int32_t slot,
                                    int32_t head) {
    return scales ? block->rows + scales + (size_t)head * at->head_stride + (size_t)slot * KVC_SCALE_BYTES : NULL;
}

/* What a batch that is about to begin takes in a group. */
typedef struct kvc_demand {
    int64_t num_blocks; /* number of blocks it will open: free ones, and new ones */
    int64_t num_new;    /* number of new ones */
} kvc_demand;

/* The free blocks of a group, and the blocks that batches have not filled yet. */
typedef struct kvc_free_blocks {
    kvc_block *first;   /* list of free blocks, last freed first: its rows may still be in the CPU's caches */
    kvc_block *untaken; /* list of blocks in which slots past the fill mark count as faulted, and may lack memory */
    int32_t num;
    int32_t num_idle; /* blocks in front of the list that expiries, or unstored sequences, left and nobody took since */
    int32_t last_taken; /* blocks that the last batch took */
    int32_t reserved;   /* blocks opened for the open batch, or for a batch that is about to begin */
} kvc_free_blocks;

/* Slots of a group that sequences hold which may be evicted: cache/useful.h. */
typedef struct kvc_pool_evicting {
    int64_t evictable;                                      /* number of live slots whose holders may all be evicted */
    kvc_sorted useful;                                      /* by last use: evictable sequences that free slots */
    kvc_standing *useless;                                  /* list of those that free none, and have several runs */
    void (*freed)(struct kvc_pool *pool, kvc_block *block); /* slots of these may be held only by evictable ones */
    uint32_t num_choices;                                   /* calls that have looked for victims */
    int32_t lacks_slots; /* while victims are chosen: the call needs more slots here than are free */
} kvc_pool_evicting;

/* Counts over all blocks of a group. */
typedef struct kvc_pool_counts {
    int64_t live;      /* number of slots that sequences hold */
    int64_t replacing; /* how many of them are to replace others: in rewrites, and in restoring batches */
    int64_t filled;    /* number of slots below fill marks */
    int64_t row_bytes; /* resident bytes of all blocks' rows */
    int64_t opened, reused, returned; /* counters of blocks: kvc_stats */
} kvc_pool_counts;

typedef struct kvc_pool {
    kvc_memory *memory;
    int32_t group;
    int32_t block_size;
    int32_t stride;        /* positions of a row: rows/stride.h */
    int32_t strided_index; /* index among the groups with a stride, if it has one: number of those before */
    size_t block_bytes;
    int64_t cost;  /* what a used block counts for max_bytes: all its rows, its bookkeeping, and a share for lists */
    int is_lazy;   /* its rows get memory as slots are faulted, not all at once */
    int collapses; /* its OS pages are collapsed into huge ones */
    const kvc_layout *layouts; /* [num_layers] of the group's layers */
    int32_t num_layers;
    int32_t num_blocks;
    kvc_block *first, *last; /* list of all blocks that have memory */
    kvc_free_blocks free;
    kvc_demand demand;
    struct kvc_compaction *compaction; /* the planned compaction; NULL: none */
    kvc_block *collapse_block;         /* the next block to look at for pages to collapse; NULL: the first one */
    uint32_t epoch;                    /* 1 + batches ended; in a block of this epoch, slots may lack rows */
    kvc_tally tallies[KVC_NUM_SCOPES]; /* of all blocks */
    kvc_pool_counts counts;
    kvc_pool_evicting evicting;
} kvc_pool;

void kvc_pool_init(kvc_pool *pool, kvc_memory *memory, int32_t group, int32_t block_size, const kvc_layout *layouts,
                   int32_t num_layers, size_t block_bytes);
void kvc_pool_destroy(kvc_pool *pool);

/* Returns the resident bytes of the rows of a block of which `faulted` slots were faulted. */
int64_t kvc_pool_block_bytes(const kvc_pool *pool, int32_t faulted);

/* The keys of one head of one layer, or its values, scales or sketches: where they begin in a block, and the bytes of a
 * row.  row_bytes is 0 if they are not stored. */
typedef struct kvc_region {
    size_t offset, row_bytes;
} kvc_region;

/* Return the number of regions of a block, over all layers and heads of its group; and region `index` of them. */
int64_t kvc_pool_num_regions(const kvc_pool *pool);
kvc_region kvc_pool_region(const kvc_pool *pool, int64_t index);

/* Makes sure that at least `count` blocks are free, and sets *reserved to how many are new; on failure nothing has
 * changed.  kvc_pool_unreserve gives these back, once the num_used blocks that were opened since are the first of the
 * free list again, counts them as never opened, and sets *reserved to 0.  A block that others use by now stays. */
kvc_status kvc_pool_reserve(kvc_pool *pool, int32_t count, int32_t *reserved);
void kvc_pool_unreserve(kvc_pool *pool, int32_t num_used, int32_t *reserved);

/* Takes a free block into use; there must be one. */
kvc_block *kvc_pool_open(kvc_pool *pool);

/* Hands out `count` slots at the fill mark, held once; there must be room.  Returns the first. */
int32_t kvc_pool_take(kvc_pool *pool, kvc_block *block, int32_t count);

/* Adds, or takes away, one holder of each of the slots [slot, slot + count). */
void kvc_pool_hold(kvc_block *block, int32_t slot, int32_t count);
void kvc_pool_drop(kvc_pool *pool, kvc_block *block, int32_t slot, int32_t count);

/* Drops slots of a block that this call opened.  With the block's first slot, also undoes kvc_pool_open, unless a
 * view keeps the block, and returns 1; otherwise returns 0.  The sum is num_used for kvc_pool_unreserve.  Call it
 * for the last slots first: so the free list gets its order back. */
int32_t kvc_pool_untake(kvc_pool *pool, kvc_block *block, int32_t slot, int32_t count);

/* Keeps a block's rows in place until kvc_pool_unpin takes this pin away. */
void kvc_pool_pin(kvc_block *block);
void kvc_pool_unpin(kvc_pool *pool, kvc_block *block);

/* Notes that one holder of each of these slots may be evicted from now on (add 1), or may not (add -1). */
void kvc_pool_mark_evictable(kvc_block *block, int32_t slot, int32_t count, int32_t add);

/* Returns whether some of these slots are held only by sequences that may be evicted. */
int kvc_pool_frees(const kvc_block *block, int32_t slot, int32_t count);

/* Returns what is in use of a block in a scope, also after kvc_pool_try_drop there: up to the last slot that is held.
 */
kvc_use kvc_pool_use(const kvc_block *block, kvc_scope scope);

/* Returns whether a compaction moves a block.  A block full of live slots is not moved: it would gain nothing, and a
 * batch that lacks a block would move the whole cache. */
int kvc_pool_is_movable(const kvc_pool *pool, kvc_use use);

/* Counts a block anew after it has changed. */
void kvc_pool_recount(kvc_block *block);

/* Adds what is in use of a block to a tally (sign 1), or takes it out (sign -1). */
void kvc_tally_add(const kvc_pool *pool, kvc_tally *tally, kvc_use use, int64_t sign);

/* Takes one holder of each slot out of the counts, until kvc_pool_undo_try_drop, to see what dropping it would free.
 * Adds to *slots how many slots then have no holder that counts in the scope.  In KVC_FIXED, holders that may be
 * evicted do not count, and the holder that is taken out must be another one. */
void kvc_pool_try_drop(kvc_block *block, kvc_scope scope, int32_t slot, int32_t count, int64_t *slots);
void kvc_pool_undo_try_drop(kvc_block *block, kvc_scope scope, int32_t slot, int32_t count);

/* Sets the fill marks after a compaction, which moved `live` slots and their holders to the front of `blocks`, filling
 * one block after the other. */
void kvc_pool_refill(kvc_pool *pool, kvc_block *const *blocks, int32_t num_blocks, int32_t live);

/* A round of collapsing pages into huge ones: number of steps still to make, and of blocks still to look at. */
typedef struct kvc_collapsing {
    int64_t steps, blocks;
    int32_t is_ahead; /* looks only at blocks with memory taken beforehand */
} kvc_collapsing;

/* Return a round of collapsing after a batch of num_tokens tokens, for a few of the written pages; and a round for
 * all pages whose memory was taken beforehand.  Pages that nothing has faulted cannot be collapsed, so blocks with
 * slots of the open batch, whose rows may be missing, are skipped. */
kvc_collapsing kvc_pool_collapse_for(const kvc_pool *pool, int32_t num_tokens);
kvc_collapsing kvc_pool_collapse_ahead(const kvc_pool *pool);

/* Finds the next pages for kvc_pages_collapse, which takes a millisecond or more for each; returns 0 if no pages are
 * left.
 */
int kvc_pool_next_collapse(kvc_pool *pool, kvc_collapsing *collapsing, kvc_page_work *work);

/* Finds the next pages to collapse in a block whose slots will all have rows soon; returns 0 if no pages are left.
 */
int kvc_pool_next_filled(kvc_pool *pool, kvc_block *block, kvc_page_work *work);

/* How far kvc_pool_next_fault has come; all 0 at first. */
typedef struct kvc_taking {
    const kvc_block *block;
    int32_t to;
    int64_t region;
    size_t done; /* bytes of the region that are done */
} kvc_taking;

/* Finds the next piece of memory in slots past fill marks that counts as faulted and was never used.  Returns 0 at the
 * end.  Between two calls, others may take blocks or give them back. */
int kvc_pool_next_fault(kvc_pool *pool, kvc_taking *taking, kvc_page_work *work);

/* Returns the bytes of one block's bookkeeping. */
int64_t kvc_pool_header_bytes(const kvc_pool *pool);

/* Returns the bytes of the rows in one slot. */
int64_t kvc_pool_slot_bytes(const kvc_pool *pool);

/* Frees at most `count` free blocks, but not the next `num_left` to be used; returns the number freed. */
int32_t kvc_pool_shrink(kvc_pool *pool, int32_t num_left, int32_t count);

/* Returns how many of the free blocks that count as idle are surplus.  Two blocks for each of num_sequences sequences
 * are not surplus; used blocks whose slots are not live count towards these.  Nor are as many blocks as the last batch
 * took. Other free blocks, such as reserved ones, do not count. */
int32_t kvc_pool_surplus(const kvc_pool *pool, int64_t num_sequences);

/* Frees at most `count` surplus blocks; returns the number freed. */
int32_t kvc_pool_give_surplus(kvc_pool *pool, int32_t count);

/* Gives back the pages past the fill mark of a block. */
void kvc_pool_purge(kvc_pool *pool, kvc_block *block, int32_t num_threads);

/* Counts slots below `count` as faulted. */
void kvc_pool_fault(kvc_pool *pool, kvc_block *block, int32_t count);

#endif
