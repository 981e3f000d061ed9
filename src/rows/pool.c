/* pool.c: the blocks of one layer group: see pool.h. */
#include "rows/pool.h"

#include <string.h>

#include "base/parallel.h"
#include "base/status.h"

enum {
    WORTH_THREADS = 1 << 22, /* bytes that are given back */
    COLLAPSE_SLOTS = 512,    /* slots filled in a block before its pages are looked at again */
    COLLAPSE_TOKENS = 8,     /* tokens of a batch per step made, and per block looked at, beyond the first ones */
    COLLAPSE_BLOCKS = 8,     /* blocks looked at after a batch of few tokens */
    FAULT_BYTES = 256 << 10  /* most bytes of memory taken in one step */
};

void kvc_pool_init(kvc_pool *pool, kvc_memory *memory, int32_t group, int32_t block_size, const kvc_layout *layouts,
                   int32_t num_layers, size_t block_bytes) {
    *pool = (kvc_pool){.memory = memory,
                       .group = group,
                       .block_size = block_size,
                       .block_bytes = block_bytes,
                       .is_lazy = kvc_memory_is_lazy(memory, block_bytes),
                       .layouts = layouts,
                       .num_layers = num_layers,
                       .epoch = 1};
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Put a block into the list of blocks that may lack memory, or take it out; do nothing if it is there, or is not. */
static void list_untaken(kvc_pool *pool, kvc_block *block) {
    if (block->untaken_at) return;
    block->next_untaken = pool->untaken;
    block->untaken_at = &pool->untaken;
    if (pool->untaken) pool->untaken->untaken_at = &block->next_untaken;
    pool->untaken = block;
}

static void unlist_untaken(kvc_block *block) {
    if (!block->untaken_at) return;
    *block->untaken_at = block->next_untaken;
    if (block->next_untaken) block->next_untaken->untaken_at = block->untaken_at;
    block->next_untaken = NULL;
    block->untaken_at = NULL;
}

static void free_block(kvc_pool *pool, kvc_block *block) {
    unlist_untaken(block);
    kvc_memory_free(pool->memory, block->rows, pool->block_bytes, KVC_MEMORY_ROWS, pool->group);
    kvc_memory_free(pool->memory, block, (size_t)kvc_pool_header_bytes(pool), KVC_MEMORY_BOOKKEEPING, -1);
}

/* Puts a block at the end of the list of all blocks. */
static void list_block(kvc_pool *pool, kvc_block *block) {
    block->index = pool->num_blocks++;
    block->earlier = pool->last;
    *(pool->last ? &pool->last->later : &pool->first) = block;
    pool->last = block;
}

/* Takes a block out of the list of all blocks, and puts the last one in its place. */
static void unlist_block(kvc_pool *pool, kvc_block *block) {
    kvc_block *last = pool->last;
    if (pool->collapse_block == block) pool->collapse_block = last == block ? NULL : last;
    pool->num_blocks--;
    pool->last = last->earlier;
    *(last->earlier ? &last->earlier->later : &pool->first) = NULL;
    if (last == block) return;
    last->index = block->index;
    last->earlier = block->earlier;
    last->later = block->later;
    *(last->earlier ? &last->earlier->later : &pool->first) = last;
    *(last->later ? &last->later->earlier : &pool->last) = last;
}

void kvc_pool_destroy(kvc_pool *pool) {
    for (kvc_block *block; (block = pool->last);) {
        unlist_block(pool, block);
        free_block(pool, block);
    }
}

/* Adds a new block to the end of the free list: at **end, which becomes the new end. */
static kvc_status new_block(kvc_pool *pool, kvc_block ***end) {
    kvc_block *block = kvc_memory_alloc(pool->memory, (size_t)kvc_pool_header_bytes(pool), KVC_MEMORY_BOOKKEEPING, -1);
    uint8_t *rows = block ? kvc_memory_alloc(pool->memory, pool->block_bytes, KVC_MEMORY_ROWS, pool->group) : NULL;
    if (!rows) {
        if (block)
            kvc_memory_free(pool->memory, block, (size_t)kvc_pool_header_bytes(pool), KVC_MEMORY_BOOKKEEPING, -1);
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for a block of %d slots, %zu bytes", pool->block_size,
                        pool->block_bytes);
    }
    *block = (kvc_block){.rows = rows, .pool = pool, .is_free = 1};
    list_block(pool, block);
    **end = block;
    *end = &block->next;
    pool->num_free++;
    pool->opened++;
    pool->row_bytes += kvc_pool_block_bytes(pool, 0);
    return KVC_OK;
}

/* Returns the link behind the first num_free blocks of the free list. */
static kvc_block **list_end(kvc_pool *pool, int32_t num_free) {
    kvc_block **end = &pool->free;
    while (num_free--) end = &(*end)->next;
    return end;
}

kvc_status kvc_pool_reserve(kvc_pool *pool, int32_t count, int32_t *reserved) {
    const int32_t before = pool->num_free;
    kvc_status status = KVC_OK;
    *reserved = 0;
    if (count <= before) return KVC_OK;
    /* New blocks go to the end of the list: blocks that were used before are resident, and are to be used first. */
    kvc_block **end = list_end(pool, before);
    while (status == KVC_OK && pool->num_free < count) status = new_block(pool, &end);
    *reserved = pool->num_free - before;
    if (status != KVC_OK) kvc_pool_unreserve(pool, pool->num_free, reserved);
    return status;
}

int32_t kvc_pool_shrink(kvc_pool *pool, int32_t kept, int32_t count) {
    if (kept >= pool->num_free) return 0;
    kvc_block **first = list_end(pool, kept);
    int32_t done = 0;
    while (done < count && *first) {
        kvc_block *block = *first;
        if (kvc_memory_is_busy(pool->memory, block->rows, pool->block_bytes)) {
            first = &block->next;
            continue;
        }
        done++;
        *first = block->next;
        unlist_block(pool, block);
        pool->num_free--;
        pool->returned++;
        pool->row_bytes -= kvc_pool_block_bytes(pool, block->faulted);
        free_block(pool, block);
    }
    if (pool->num_loose > pool->num_free) pool->num_loose = pool->num_free;
    return done;
}

int32_t kvc_pool_surplus(const kvc_pool *pool, int64_t num_sequences) {
    if (!pool->num_loose) return 0;
    const int64_t size = pool->block_size, unused = (pool->num_blocks - pool->num_free) * size - pool->live;
    const int64_t kept = 2 * num_sequences - (unused + size - 1) / size;
    const int64_t surplus = pool->num_free - (kept > pool->last_taken ? kept : pool->last_taken);
    return (int32_t)(surplus > pool->num_loose ? pool->num_loose : surplus > 0 ? surplus : 0);
}

int32_t kvc_pool_give_surplus(kvc_pool *pool, int32_t count) {
    const int32_t before = pool->num_loose, done = kvc_pool_shrink(pool, before - count, count);
    pool->num_loose = before - done;
    return done;
}

/* Undoes kvc_pool_open of a block that is free again. */
static void unopen(kvc_pool *pool, kvc_block *block) {
    const int32_t faulted = block->touched_before;
    pool->reused -= faulted != 0;
    pool->num_loose += block->was_loose;
    block->fill = faulted; /* keeps the memory that was faulted before */
    kvc_pool_purge(pool, block, 1);
    block->fill = 0;
    if (!pool->is_lazy) block->faulted = faulted;
    if (block->resident > block->faulted) block->resident = block->faulted;
}

void kvc_pool_unreserve(kvc_pool *pool, int32_t num_used, int32_t *reserved) {
    const int32_t done = kvc_pool_shrink(pool, num_used - *reserved, *reserved);
    pool->opened -= done;
    pool->returned -= done;
    *reserved = 0;
}

enum { REGIONS = 4 }; /* of a head: keys, values, and the scales of both */

int64_t kvc_pool_num_regions(const kvc_pool *pool) {
    int64_t num = 0;
    for (int32_t i = 0; i < pool->num_layers; i++) num += REGIONS * (int64_t)pool->layouts[i].num_kv_heads;
    return num;
}

kvc_region kvc_pool_region(const kvc_pool *pool, int64_t index) {
    const kvc_layout *at = pool->layouts;
    for (; index >= REGIONS * (int64_t)at->num_kv_heads; at++) index -= REGIONS * (int64_t)at->num_kv_heads;
    const size_t begin = (size_t)(index / REGIONS) * at->head_stride;
    switch (index % REGIONS) {
    case 0: return (kvc_region){begin + at->k_offset, at->k_row_bytes};
    case 1: return (kvc_region){begin + at->v_offset, at->v_stored};
    case 2: return (kvc_region){begin + at->k_scales, at->k_scales ? KVC_SCALE_BYTES : 0};
    default: return (kvc_region){begin + at->v_scales, at->v_scales && at->v_stored ? KVC_SCALE_BYTES : 0};
    }
}

typedef struct purge {
    const kvc_pool *pool;
    const kvc_block *block;
} purge;

/* Gives back the pages of a region past the fill mark. */
static void purge_region(void *context, int64_t index) {
    const kvc_pool *pool = ((const purge *)context)->pool;
    const kvc_block *block = ((const purge *)context)->block;
    const kvc_region at = kvc_pool_region(pool, index);
    kvc_memory_purge(pool->memory, block->rows + at.offset + (size_t)block->fill * at.row_bytes,
                     (size_t)(block->faulted - block->fill) * at.row_bytes);
}

void kvc_pool_purge(kvc_pool *pool, kvc_block *block, int32_t num_threads) {
    if (block->fill >= block->faulted || !pool->is_lazy ||
        kvc_memory_is_busy(pool->memory, block->rows, pool->block_bytes))
        return;
    const int64_t bytes = kvc_pool_block_bytes(pool, block->faulted) - kvc_pool_block_bytes(pool, block->fill);
    purge work = {pool, block};
    kvc_memory_clear_written(pool->memory, block->rows);
    kvc_parallel(kvc_threads_for((double)bytes, WORTH_THREADS, num_threads), kvc_pool_num_regions(pool), purge_region,
                 &work);
    pool->row_bytes -= bytes;
    block->faulted = block->fill;
    if (block->collapsed > block->fill) block->collapsed = block->fill;
    if (block->resident > block->fill) block->resident = block->fill;
    block->collapse_next = 0;
}

int64_t kvc_pool_slot_bytes(const kvc_pool *pool) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < pool->num_layers; i++) {
        const kvc_layout *at = &pool->layouts[i];
        bytes += at->num_kv_heads * (int64_t)(at->k_row_bytes + at->v_stored) +
                 at->num_kv_heads * at->num_scales * KVC_SCALE_BYTES;
    }
    return bytes;
}

/* ---- huge pages -------------------------------------------------------------------------------------------------- */

/* Finds the huge pages that slots [from, to) fill in the rows of a region; returns whether there is one.  The first
 * page may begin a little before the rows, in padding. */
static int collapse_rows(const kvc_pool *pool, uint8_t *rows, size_t row_bytes, int32_t from, int32_t to,
                         kvc_page_work *work) {
    const uintptr_t start = (uintptr_t)rows;
    uintptr_t begin = (start + (size_t)from * row_bytes) / KVC_HUGE_PAGE * KVC_HUGE_PAGE;
    const uintptr_t end = (start + (size_t)to * row_bytes) / KVC_HUGE_PAGE * KVC_HUGE_PAGE;
    if (begin + KVC_HUGE_PAGE / 4 < start) begin += KVC_HUGE_PAGE;
    return begin < end && kvc_memory_mark_written(pool->memory, (uint8_t *)begin, end - begin, work);
}

/* Returns the number of steps in which the pages of a block are collapsed up to collapse_to.  If the block is full,
 * a step is a page; otherwise it is a region, because the ends of regions are not filled. */
static int64_t num_collapse_steps(const kvc_pool *pool, const kvc_block *block) {
    if (block->collapse_to < pool->block_size) return kvc_pool_num_regions(pool);
    return pool->block_bytes < KVC_HUGE_PAGE ? 1 : (int64_t)(pool->block_bytes / KVC_HUGE_PAGE);
}

/* Finds the pages of one step; returns whether there are any. */
static int collapse_step(const kvc_pool *pool, const kvc_block *block, int64_t step, kvc_page_work *work) {
    if (block->collapse_to == pool->block_size) /* blocks that have a huge page are aligned to it */
        return kvc_memory_mark_written(pool->memory, block->rows + step * KVC_HUGE_PAGE, KVC_HUGE_PAGE, work);
    const kvc_region at = kvc_pool_region(pool, step);
    return collapse_rows(pool, block->rows + at.offset, at.row_bytes, block->collapsed, block->collapse_to, work);
}

/* Finds the next pages to collapse in a block up to collapse_to; returns 0 if no pages are left. */
static int next_step(const kvc_pool *pool, kvc_block *block, kvc_page_work *work) {
    while (block->collapse_next < num_collapse_steps(pool, block))
        if (collapse_step(pool, block, block->collapse_next++, work)) return 1;
    block->collapsed = block->collapse_to;
    block->collapse_next = 0;
    return 0;
}

/* Finds the next pages to collapse in a block; returns 0 if no pages are left.  A step takes the system a
 * millisecond or more, so the steps of a block are spread over many batches. */
static int next_in_block(const kvc_pool *pool, kvc_block *block, kvc_page_work *work) {
    for (;;) {
        if (block->collapse_next == 0) {
            const int is_ahead = block->resident > block->fill;
            const int32_t to = is_ahead ? block->resident : block->fill;
            const int is_full = to == pool->block_size;
            if (block->epoch == pool->epoch || to - block->collapsed < (is_full || is_ahead ? 1 : COLLAPSE_SLOTS))
                return 0;
            if (pool->block_bytes < KVC_HUGE_PAGE && !is_full) return 0; /* it shares its huge page with other blocks */
            block->collapse_to = to;
        }
        if (next_step(pool, block, work)) return 1;
    }
}

int kvc_pool_next_filled(kvc_pool *pool, kvc_block *block, kvc_page_work *work) {
    if (block->collapsed >= block->fill) return 0;
    if (pool->block_bytes < KVC_HUGE_PAGE && block->fill < pool->block_size) return 0;
    block->collapse_to = block->fill;
    return next_step(pool, block, work);
}

kvc_collapsing kvc_pool_collapse_for(int32_t num_tokens) {
    const int32_t more = num_tokens / COLLAPSE_TOKENS;
    return (kvc_collapsing){1 + more, COLLAPSE_BLOCKS + more, 0};
}

kvc_collapsing kvc_pool_collapse_ahead(const kvc_pool *pool) {
    return (kvc_collapsing){INT64_MAX, pool->num_blocks, 1};
}

int kvc_pool_next_collapse(kvc_pool *pool, kvc_collapsing *collapsing, kvc_page_work *work) {
    if (!pool->is_lazy) return 0;
    if (collapsing->blocks > pool->num_blocks) collapsing->blocks = pool->num_blocks;
    for (; collapsing->steps > 0 && collapsing->blocks > 0; collapsing->blocks--) {
        kvc_block *block = pool->collapse_block = pool->collapse_block ? pool->collapse_block : pool->first;
        if ((!collapsing->is_ahead || block->resident > block->fill) && next_in_block(pool, block, work))
            return collapsing->steps-- > 0;
        pool->collapse_block = block->later;
    }
    return 0;
}

/* ---- taking memory beforehand ------------------------------------------------------------------------------------ */

/* Finds the next piece of memory in a block's slots past the fill mark; returns 0 if nothing is left. */
static int fault_in_block(const kvc_pool *pool, const kvc_block *block, kvc_taking *taking, kvc_page_work *work) {
    const size_t from = (size_t)(block->fill > block->resident ? block->fill : block->resident);
    for (; taking->region < kvc_pool_num_regions(pool); taking->region++, taking->done = 0) {
        const kvc_region at = kvc_pool_region(pool, taking->region);
        const size_t begin = from * at.row_bytes, end = (size_t)taking->to * at.row_bytes;
        if (taking->done < begin) taking->done = begin;
        if (taking->done >= end) continue;
        work->p = block->rows + at.offset + taking->done;
        work->size = end - taking->done < FAULT_BYTES ? end - taking->done : FAULT_BYTES;
        taking->done += work->size;
        return 1;
    }
    return 0;
}

int kvc_pool_next_fault(kvc_pool *pool, kvc_taking *taking, kvc_page_work *work) {
    for (kvc_block *block; (block = pool->untaken);) {
        if (block->fill < block->faulted && block->resident < block->faulted) {
            if (block != taking->block || taking->to != block->faulted) /* it was purged, or reserved, meanwhile */
                *taking = (kvc_taking){.block = block, .to = block->faulted};
            if (fault_in_block(pool, block, taking, work)) return 1;
            block->resident = taking->to;
        }
        if (block->resident >= block->faulted || block->fill >= block->faulted) unlist_untaken(block);
    }
    return 0;
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

kvc_block *kvc_pool_open(kvc_pool *pool) {
    kvc_block *block = pool->free;
    pool->free = block->next;
    pool->num_free--;
    block->was_loose = pool->num_loose > 0; /* they are the first: expiries come right before */
    pool->num_loose -= block->was_loose;
    if (block->faulted) pool->reused++;
    block->is_free = 0;
    block->next = NULL;
    block->touched_before = block->faulted;
    return block;
}

void kvc_pool_fault(kvc_pool *pool, kvc_block *block, int32_t count) {
    if (count > block->fill) list_untaken(pool, block);
    if (count <= block->faulted) return;
    pool->row_bytes += kvc_pool_block_bytes(pool, count) - kvc_pool_block_bytes(pool, block->faulted);
    block->faulted = count;
}

/* ---- holders of slots -------------------------------------------------------------------------------------------- */

int32_t kvc_pool_take(kvc_pool *pool, kvc_block *block, int32_t count) {
    const int32_t slot = block->fill;
    for (int32_t i = 0; i < count; i++) block->holders[slot + i] = (kvc_holders){1, 0};
    block->fill += count;
    block->epoch = pool->epoch;
    block->live += count;
    pool->live += count;
    pool->filled += count;
    kvc_pool_fault(pool, block, block->fill);
    kvc_pool_recount(block);
    return slot;
}

/* Adds to the number of slots whose holders may all be evicted. */
static void add_evictable(kvc_block *block, int32_t num) {
    block->evictable += num;
    block->pool->evictable += num;
    kvc_pool_recount(block);
    if (num > 0 && (block->useless || block->num_watchers)) block->pool->freed(block->pool, block);
}

static int is_evictable(const kvc_holders *holders) { return holders->num && holders->num == holders->evictable; }

int kvc_pool_frees(const kvc_block *block, int32_t slot, int32_t count) {
    const kvc_holders *at = block->holders + slot;
    for (int32_t i = 0; block->evictable && i < count; i++)
        if (is_evictable(&at[i])) return 1;
    return 0;
}

void kvc_pool_hold(kvc_block *block, int32_t slot, int32_t count) {
    int32_t kept = 0;
    for (kvc_holders *at = block->holders + slot; at < block->holders + slot + count; at++) {
        kept += is_evictable(at);
        at->num++;
    }
    add_evictable(block, -kept);
}

void kvc_pool_mark_evictable(kvc_block *block, int32_t slot, int32_t count, int32_t add) {
    int32_t num = 0;
    for (kvc_holders *at = block->holders + slot; at < block->holders + slot + count; at++) {
        num -= is_evictable(at);
        at->evictable += (uint32_t)add;
        num += is_evictable(at);
    }
    add_evictable(block, num);
}

static void free_if_empty(kvc_pool *pool, kvc_block *block) {
    if (block->live || block->pins || block->is_free) return;
    block->is_free = 1;
    block->next = pool->free;
    pool->free = block;
    pool->num_free++;
}

/* Lowers the fill mark to the end of the last slot that is held; frees the block if no slot is. */
static void lower_fill(kvc_pool *pool, kvc_block *block) {
    if (block->pins) return;
    pool->filled -= block->fill;
    block->fill = kvc_pool_use(block, KVC_NOW).fill;
    pool->filled += block->fill;
    free_if_empty(pool, block);
}

void kvc_pool_refill(kvc_pool *pool, kvc_block *const *blocks, int32_t num_blocks, int32_t live) {
    for (int32_t i = 0; i < num_blocks; i++) {
        kvc_block *block = blocks[i];
        pool->filled -= block->fill;
        block->fill = block->live = live < pool->block_size ? live : pool->block_size;
        pool->filled += block->fill;
        kvc_pool_fault(pool, block, block->fill);
        live -= block->fill;
        int32_t evictable = 0;
        for (int32_t s = 0; s < block->fill; s++) evictable += is_evictable(&block->holders[s]);
        add_evictable(block, evictable - block->evictable);
        free_if_empty(pool, block);
    }
}

void kvc_pool_drop(kvc_pool *pool, kvc_block *block, int32_t slot, int32_t count) {
    int32_t dead = 0, evictable = 0;
    for (kvc_holders *at = block->holders + slot; at < block->holders + slot + count; at++) {
        dead += --at->num == 0;
        evictable += is_evictable(at);
    }
    block->live -= dead;
    pool->live -= dead;
    if (block->live == 0 || slot + count == block->fill) lower_fill(pool, block);
    add_evictable(block, evictable);
}

int32_t kvc_pool_untake(kvc_pool *pool, kvc_block *block, int32_t slot, int32_t count) {
    kvc_pool_drop(pool, block, slot, count);
    list_untaken(pool, block); /* nothing may have been written there */
    if (slot || !block->is_free) return 0;
    unopen(pool, block);
    return 1;
}

void kvc_pool_pin(kvc_block *block) {
    block->pins++;
    kvc_pool_recount(block);
}

void kvc_pool_unpin(kvc_pool *pool, kvc_block *block) {
    if (--block->pins == 0) lower_fill(pool, block);
    kvc_pool_recount(block);
}
