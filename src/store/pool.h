/* pool.h: the blocks of one layer group: opened when first needed, reused, given back.
 *
 * A block counts, for every slot, how many sequences hold it.  Slots are handed out in order, at the fill mark.  A slot
 * that nobody holds any more is waste until the fill mark falls below it, as slots at the end are dropped, or the whole
 * block is free.  A block that a view pins is not handed out anew, and its fill mark does not fall.
 */
#ifndef KVC_POOL_H
#define KVC_POOL_H

#include "kvcache.h"
#include "base/memory.h"

typedef struct kvc_block {
    uint8_t *rows;          /* per layer of the group: K [head][slot][k_dim], then V [head][slot][v_dim], if stored */
    struct kvc_block *next; /* in the list of free blocks */
    int32_t index;          /* in pool->blocks */
    int32_t fill;           /* slots below this were handed out; those past it belong to nobody */
    int32_t live;           /* slots that somebody holds */
    int32_t touched;        /* slots that were ever handed out since the memory was taken: it counts as resident */
    int32_t resident;       /* slots whose memory kvc_pool_next_touch has taken beforehand */
    int32_t joined;         /* slots whose OS pages were made huge, where they fill one */
    int32_t join_to;        /* what `joined` becomes after the steps from join_next on */
    int64_t join_next;      /* the next step; 0: none has been made */
    uint32_t epoch;         /* of the pool, when slots were last handed out */
    int32_t pins;           /* holds that keep the rows as they are */
    int32_t planned;        /* slots past fill that a batch about to begin will take */
    int8_t is_free;         /* in the list of free blocks */
    int8_t has_key;         /* the block is full and `key` names its contents, for prefix sharing */
    uint8_t key[32];
    uint32_t holders[]; /* [block_size] sequences that hold the slot, for slots below fill */
} kvc_block;

/* Where a layer's rows are in a block. */
typedef struct kvc_layout {
    size_t k_offset, v_offset; /* of head 0, slot 0 */
    size_t head_stride;
    size_t k_row_bytes, v_row_bytes; /* from slot to slot; for values that lie in the keys, the keys' */
    size_t v_stored;                 /* bytes of a row of values: v_row_bytes, or 0 where they lie in the keys */
    int32_t num_kv_heads;
} kvc_layout;

/* Where the row of one head lies. */
static inline uint8_t *kvc_key_at(const kvc_layout *at, const kvc_block *block, int32_t slot, int32_t head) {
    return block->rows + at->k_offset + (size_t)head * at->head_stride + (size_t)slot * at->k_row_bytes;
}
static inline uint8_t *kvc_value_at(const kvc_layout *at, const kvc_block *block, int32_t slot, int32_t head) {
    return block->rows + at->v_offset + (size_t)head * at->head_stride + (size_t)slot * at->v_row_bytes;
}

/* What a batch that is about to begin needs of a group. */
typedef struct kvc_demand {
    int64_t new_blocks;
    int32_t num_blocks;  /* new blocks, and free ones that it will use */
    int64_t new_bytes;   /* rows and bookkeeping of the new blocks */
    int64_t more_bytes;  /* rows that it will touch in the other blocks */
    int64_t least_bytes; /* rows and bookkeeping of the other blocks, once what is free was given back */
} kvc_demand;

typedef struct kvc_pool {
    kvc_memory *memory;
    int32_t group;
    int32_t block_size;
    size_t block_bytes;
    const kvc_layout *layouts; /* of the group's layers */
    int32_t num_layers;
    kvc_block **blocks; /* all that have memory */
    int32_t num_blocks, max_blocks;
    kvc_block *free; /* last freed first: its rows may still be in cache */
    int32_t num_free;
    int32_t free_before; /* num_free, and the list of blocks, before kvc_pool_prepare */
    kvc_block **blocks_before;
    int32_t max_before;
    kvc_demand demand;
    struct kvc_compaction *compaction; /* the planned one; NULL: none */
    int32_t join_block;                /* index of the block whose pages are looked at next */
    uint32_t epoch;                    /* batches that ended: slots handed out since may not have their rows yet */
    int64_t live;                      /* slots that somebody holds, over all blocks */
    int64_t drafted;                   /* of these, slots of copies whose edit is not done */
    int64_t filled;                    /* slots below fill marks */
    int64_t row_bytes;                 /* resident */
    int64_t opened, reused, returned;
} kvc_pool;

void kvc_pool_init(kvc_pool *pool, kvc_memory *memory, int32_t group, int32_t block_size, const kvc_layout *layouts,
                   int32_t num_layers, size_t block_bytes);
void kvc_pool_destroy(kvc_pool *pool);

/* Resident bytes of a block with so many slots touched. */
int64_t kvc_pool_block_bytes(const kvc_pool *pool, int32_t touched);

/* The keys, or the values, of one head of one layer: where they begin in a block, and how far apart rows are; 0: they
 * are not stored.  The regions of a group are numbered. */
typedef struct kvc_region {
    size_t offset, row_bytes;
} kvc_region;

int64_t kvc_pool_num_regions(const kvc_pool *pool);
kvc_region kvc_pool_region(const kvc_pool *pool, int64_t index);

/* Makes sure that at least `count` blocks are free; on failure nothing has changed.  Prepare all pools first; then let
 * all accept, or undo it in all. */
kvc_status kvc_pool_prepare(kvc_pool *pool, int32_t count);
void kvc_pool_accept(kvc_pool *pool);
void kvc_pool_unprepare(kvc_pool *pool);

/* kvc_pool_prepare and kvc_pool_accept. */
kvc_status kvc_pool_reserve(kvc_pool *pool, int32_t count);

/* Takes a free block into use; there must be one. */
kvc_block *kvc_pool_open(kvc_pool *pool);

/* Hands out `count` slots at the fill mark, held once; there must be room.  Returns the first. */
int32_t kvc_pool_take(kvc_pool *pool, kvc_block *block, int32_t count);

/* Count one sequence more, or one less, that holds slots [slot, slot + count). */
void kvc_pool_hold(kvc_block *block, int32_t slot, int32_t count);
void kvc_pool_drop(kvc_pool *pool, kvc_block *block, int32_t slot, int32_t count);

void kvc_pool_pin(kvc_block *block);
void kvc_pool_unpin(kvc_pool *pool, kvc_block *block);

/* The fill mark that the holders of the block's slots call for: kvc_pool_drop lets it fall to that. */
int32_t kvc_pool_fill_after(const kvc_block *block);

/* Takes one holder of each slot out of the counts, until kvc_pool_restore, to see what dropping would give: adds the
 * slots that nobody would hold to *slots; returns whether the block would be free. */
int kvc_pool_try_drop(kvc_block *block, int32_t slot, int32_t count, int64_t *slots);
void kvc_pool_restore(kvc_block *block, int32_t slot, int32_t count);

/* Sets the fill marks after a compaction: the blocks hold `live` slots, one block after the other, whose holders are in
 * place. */
void kvc_pool_refill(kvc_pool *pool, kvc_block *const *blocks, int32_t num_blocks, int32_t live);

/* Which pages are still to be made huge: in how many steps, and in how many blocks. */
typedef struct kvc_joining {
    int64_t steps, blocks;
    int32_t is_ahead; /* only in blocks with slots whose memory was taken beforehand */
} kvc_joining;

/* A few of the pages that are written, after a batch of so many tokens; all that were taken beforehand.  While a batch
 * is open the rows of its slots may be missing, and pages that nothing has touched cannot be joined. */
kvc_joining kvc_pool_join_for(int32_t num_tokens);
kvc_joining kvc_pool_join_ahead(const kvc_pool *pool);

/* Finds the next pages for kvc_pages_join, for which the system takes a millisecond or more; 0: those were all. */
int kvc_pool_next_join(kvc_pool *pool, kvc_joining *joining, kvc_page_work *work);

/* How far kvc_pool_next_touch has come; all 0 at first. */
typedef struct kvc_taking {
    const kvc_block *block;
    int32_t index, to;
    int64_t region;
    size_t done; /* bytes of the region */
} kvc_taking;

/* Finds the next piece of memory that counts as touched, in slots that belong to nobody; 0: that was all.  Other calls
 * may take or return blocks between two calls. */
int kvc_pool_next_touch(kvc_pool *pool, kvc_taking *taking, kvc_page_work *work);

/* Bookkeeping of one block, and what the list of blocks grows by for so many new ones. */
int64_t kvc_pool_header_bytes(const kvc_pool *pool);
int64_t kvc_pool_list_growth(const kvc_pool *pool, int32_t new_blocks);

/* Bytes of the rows in one slot. */
int64_t kvc_pool_slot_bytes(const kvc_pool *pool);

/* Gives at most `count` free blocks back, but for the next `kept` to be used; returns how many. */
int32_t kvc_pool_shrink(kvc_pool *pool, int32_t kept, int32_t count);

/* The same, and counts the blocks as never opened. */
void kvc_pool_unreserve(kvc_pool *pool, int32_t kept, int32_t count);

/* Undoes kvc_pool_open of a block that is free again, and had so many slots touched before. */
void kvc_pool_unopen(kvc_pool *pool, kvc_block *block, int32_t touched);

/* Gives back the pages past the fill mark of a block. */
void kvc_pool_purge(kvc_pool *pool, kvc_block *block, int32_t num_threads);

/* Counts the memory of slots below `count` as taken. */
void kvc_pool_touch(kvc_pool *pool, kvc_block *block, int32_t count);

#endif
