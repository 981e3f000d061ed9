/* pool.c: the blocks of one layer group: opened when first needed, reused, given back.
 *
 * Slots of a block are handed out in order: those below `fill` were.  A slot is live while a sequence holds it; a
 * holder is evictable while its sequence may be evicted.  A block without live slots and pins is in the list of free
 * blocks, the one freed last in front.  Idle blocks were left by an expiry or an unstored sequence.  They are taken to
 * be in front, because expiries come right before blocks are opened.  Surplus blocks are idle ones that no sequence
 * will soon need.
 *
 * In a lazy pool, rows get memory from the system as they are touched.  Slots below pages.faulted count as resident.
 * Those from `fill` to `faulted` may lack memory, and then their block is in the list of untaken ones.  Slots below
 * pages.resident were given memory beforehand.  To purge a block is to give back the pages past `fill`.
 *
 * A region is a part of a block: the keys of one head of one layer, its values, the scales of either, or its sketches.
 * So each head has 5 (REGIONS). */
#include "rows/pool.h"

#include <string.h>

#include "base/parallel.h"
#include "base/status.h"

enum {
    WORTH_THREADS = 1 << 22, /* bytes that are given back */
    COLLAPSE_SLOTS = 128,    /* slots filled in a block before its pages are looked at again */
    COLLAPSE_SHARE = 16,     /* 1/16 of a page that is collapsed may have no rows */
    COLLAPSE_TOKENS = 8,     /* tokens of a batch per step made, and per block looked at, beyond the first ones */
    COLLAPSE_BLOCKS = 8,     /* blocks looked at after a batch of few tokens */
    FAULT_BYTES = 256 << 10  /* most bytes of memory taken in one step */
};

void kvc_pool_init(kvc_pool *pool, kvc_memory *memory, int32_t group, int32_t block_size, const kvc_layout *layouts,
                   int32_t num_layers, size_t block_bytes) {
    *pool = (kvc_pool){.memory = memory,
                       .group = group,
                       .block_size = block_size,
                       .stride = 1,
                       .block_bytes = block_bytes,
                       .is_lazy = kvc_memory_is_lazy(memory, block_bytes),
                       .collapses = kvc_memory_collapses(memory, block_bytes),
                       .layouts = layouts,
                       .num_layers = num_layers,
                       .epoch = 1};
    /* The share pays for one kept block: a list of runs in each group, a sequence, a node, and the tokens. */
    enum { SHARE = 300, FIRST_SHARE = 700, TOKEN_SHARE = 8 };
    const int64_t share = SHARE + (group ? 0 : FIRST_SHARE + TOKEN_SHARE * (int64_t)block_size);
    if (block_bytes) pool->cost = kvc_pool_block_bytes(pool, block_size) + kvc_pool_header_bytes(pool) + share;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Put a block into the list of blocks that may lack memory, or take it out; do nothing if it is there, or is not. */
static void list_untaken(kvc_pool *pool, kvc_block *block) {
    if (block->listed.untaken_at) return;
    block->listed.next_untaken = pool->free.untaken;
    block->listed.untaken_at = &pool->free.untaken;
    if (pool->free.untaken) pool->free.untaken->listed.untaken_at = &block->listed.next_untaken;
    pool->free.untaken = block;
}

static void unlist_untaken(kvc_block *block) {
    if (!block->listed.untaken_at) return;
    *block->listed.untaken_at = block->listed.next_untaken;
    if (block->listed.next_untaken) block->listed.next_untaken->listed.untaken_at = block->listed.untaken_at;
    block->listed.next_untaken = NULL;
    block->listed.untaken_at = NULL;
}

static void free_block(kvc_pool *pool, kvc_block *block) {
    unlist_untaken(block);
    kvc_memory_free(pool->memory, block->rows, pool->block_bytes, KVC_MEMORY_ROWS, pool->group);
    kvc_memory_free(pool->memory, block, (size_t)kvc_pool_header_bytes(pool), KVC_MEMORY_BOOKKEEPING, -1);
}

/* Puts a block at the end of the list of all blocks. */
static void list_block(kvc_pool *pool, kvc_block *block) {
    block->listed.index = pool->num_blocks++;
    block->listed.earlier = pool->last;
    *(pool->last ? &pool->last->listed.later : &pool->first) = block;
    pool->last = block;
}

/* Takes a block out of the list of all blocks, and puts the last one in its place. */
static void unlist_block(kvc_pool *pool, kvc_block *block) {
    kvc_block *last = pool->last;
    if (pool->collapse_block == block) pool->collapse_block = last == block ? NULL : last;
    pool->num_blocks--;
    pool->last = last->listed.earlier;
    *(last->listed.earlier ? &last->listed.earlier->listed.later : &pool->first) = NULL;
    if (last == block) return;
    last->listed.index = block->listed.index;
    last->listed.earlier = block->listed.earlier;
    last->listed.later = block->listed.later;
    *(last->listed.earlier ? &last->listed.earlier->listed.later : &pool->first) = last;
    *(last->listed.later ? &last->listed.later->listed.earlier : &pool->last) = last;
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
    *block = (kvc_block){.rows = rows, .pool = pool, .listed.is_free = 1};
    list_block(pool, block);
    **end = block;
    *end = &block->listed.next_free;
    pool->free.num++;
    pool->counts.opened++;
    pool->counts.row_bytes += kvc_pool_block_bytes(pool, 0);
    return KVC_OK;
}

/* Returns the pointer that points behind the first num_free blocks of the free list: to the next one, or NULL. */
static kvc_block **list_end(kvc_pool *pool, int32_t num_free) {
    kvc_block **end = &pool->free.first;
    while (num_free--) end = &(*end)->listed.next_free;
    return end;
}

kvc_status kvc_pool_reserve(kvc_pool *pool, int32_t count, int32_t *reserved) {
    const int32_t before = pool->free.num;
    kvc_status status = KVC_OK;
    *reserved = 0;
    if (count <= before) return KVC_OK;
    /* New blocks go to the end of the list: blocks that were used before are resident, and are to be used first. */
    kvc_block **end = list_end(pool, before);
    while (status == KVC_OK && pool->free.num < count) status = new_block(pool, &end);
    *reserved = pool->free.num - before;
    if (status != KVC_OK) kvc_pool_unreserve(pool, pool->free.num, reserved);
    return status;
}

int32_t kvc_pool_shrink(kvc_pool *pool, int32_t num_left, int32_t count) {
    if (num_left >= pool->free.num) return 0;
    kvc_block **first = list_end(pool, num_left);
    int32_t done = 0;
    while (done < count && *first) {
        kvc_block *block = *first;
        if (kvc_memory_is_busy(pool->memory, block->rows, pool->block_bytes)) {
            first = &block->listed.next_free;
            continue;
        }
        done++;
        *first = block->listed.next_free;
        unlist_block(pool, block);
        pool->free.num--;
        pool->counts.returned++;
        pool->counts.row_bytes -= kvc_pool_block_bytes(pool, block->pages.faulted);
        free_block(pool, block);
    }
    if (pool->free.num_idle > pool->free.num) pool->free.num_idle = pool->free.num;
    return done;
}

int32_t kvc_pool_surplus(const kvc_pool *pool, int64_t num_sequences) {
    const int64_t size = pool->block_size,
                  unused = (pool->num_blocks - pool->free.num) * size - pool->counts.live; /* slots of used blocks */
    const int64_t needed = 2 * num_sequences - (unused + size - 1) / size;
    const int64_t surplus = pool->free.num - (needed > pool->free.last_taken ? needed : pool->free.last_taken);
    return (int32_t)(surplus > pool->free.num_idle ? pool->free.num_idle : surplus > 0 ? surplus : 0);
}

/* Idle blocks are in front of the list: frees the last of these, and leaves those that are used next. */
int32_t kvc_pool_give_surplus(kvc_pool *pool, int32_t count) {
    const int32_t before = pool->free.num_idle, done = kvc_pool_shrink(pool, before - count, count);
    pool->free.num_idle = before - done; /* kvc_pool_shrink does not know which are idle */
    return done;
}

/* Undoes kvc_pool_open of a block that is free again: its counts, and the memory of slots faulted since. */
static void unopen(kvc_pool *pool, kvc_block *block) {
    const int32_t faulted = block->pages.touched_before; /* slots faulted when it was opened */
    pool->counts.reused -= faulted != 0;
    pool->free.num_idle += block->listed.was_idle; /* it is in front of the list, as it was */
    block->fill = faulted;                         /* the purge gives back what lies past this */
    kvc_pool_purge(pool, block, /* num_threads */ 1);
    block->fill = 0;
    if (!pool->is_lazy) block->pages.faulted = faulted; /* nothing was purged */
    if (block->pages.resident > block->pages.faulted) block->pages.resident = block->pages.faulted;
}

/* The new blocks are the last of the first num_used: kvc_pool_reserve put them at the end of the list. */
void kvc_pool_unreserve(kvc_pool *pool, int32_t num_used, int32_t *reserved) {
    const int32_t num = num_used < *reserved ? num_used : *reserved, done = kvc_pool_shrink(pool, num_used - num, num);
    pool->counts.opened -= done;
    pool->counts.returned -= done;
    *reserved = 0;
}

enum { REGIONS = 5 }; /* of a head: keys, values, the scales of both, and sketches */

static int64_t num_regions_of(const kvc_layout *layer) { return REGIONS * (int64_t)layer->num_kv_heads; }

int64_t kvc_pool_num_regions(const kvc_pool *pool) {
    int64_t num = 0;
    for (int32_t i = 0; i < pool->num_layers; i++) num += num_regions_of(&pool->layouts[i]);
    return num;
}

/* Returns region `index` of a head, in the order of addresses.  Values in the keys have no scales of their own. */
static kvc_region region_of(const kvc_layout *at, size_t head, int index) {
    const size_t begin = head * at->head_stride;
    switch (index) {
    case 0: return (kvc_region){begin + at->k_offset, at->k_row_bytes};
    case 1: return (kvc_region){begin + at->v_offset, at->v_stored};
    case 2: return (kvc_region){begin + at->k_scales, at->k_scales ? KVC_SCALE_BYTES : 0};
    case 3: return (kvc_region){begin + at->v_scales, at->v_scales && at->v_stored ? KVC_SCALE_BYTES : 0};
    default: return (kvc_region){begin + at->sketch_offset, at->sketch_bytes};
    }
}

/* Regions are numbered layer by layer, head by head, and the REGIONS of a head as in region_of. */
kvc_region kvc_pool_region(const kvc_pool *pool, int64_t index) {
    const kvc_layout *layer = pool->layouts;
    for (; index >= num_regions_of(layer); layer++) index -= num_regions_of(layer);
    return region_of(layer, (size_t)(index / REGIONS), (int)(index % REGIONS));
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
                     (size_t)(block->pages.faulted - block->fill) * at.row_bytes);
}

void kvc_pool_purge(kvc_pool *pool, kvc_block *block, int32_t num_threads) {
    if (block->fill >= block->pages.faulted || !pool->is_lazy ||
        kvc_memory_is_busy(pool->memory, block->rows, pool->block_bytes))
        return;
    const int64_t bytes = kvc_pool_block_bytes(pool, block->pages.faulted) - kvc_pool_block_bytes(pool, block->fill);
    purge work = {pool, block};
    kvc_memory_mark(pool->memory, block->rows, /* is_written */ 0);
    kvc_parallel(kvc_threads_for((double)bytes, WORTH_THREADS, num_threads), kvc_pool_num_regions(pool), purge_region,
                 &work);
    pool->counts.row_bytes -= bytes;
    block->pages.faulted = block->fill;
    block->pages.collapsed = 0; /* a huge page that reached past the fill mark is divided */
    if (block->pages.resident > block->fill) block->pages.resident = block->fill;
    block->pages.collapse_next = 0;
}

int64_t kvc_pool_slot_bytes(const kvc_pool *pool) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < pool->num_layers; i++) {
        const kvc_layout *at = &pool->layouts[i];
        bytes += at->num_kv_heads * (int64_t)(at->k_row_bytes + at->v_stored + at->sketch_bytes) +
                 at->num_kv_heads * at->num_scales * KVC_SCALE_BYTES;
    }
    return bytes;
}

/* ---- huge pages -------------------------------------------------------------------------------------------------- */

/* To collapse is to make one huge page of OS pages that are filled.  A round takes a step for each huge page of a
 * block. It collapses those that slots below pages.collapse_to fill, and that slots below pages.collapsed did not fill.
 */

/* Where a block's huge pages begin: the first one may begin before the block, the last one may end behind it. */
static uintptr_t huge_page_at(const kvc_block *block, int64_t index) {
    return (uintptr_t)block->rows / KVC_HUGE_PAGE * KVC_HUGE_PAGE + (uintptr_t)index * KVC_HUGE_PAGE;
}

/* Adds the OS pages from *done on in [begin, end) of a block that a region's slots below `to` reach into.  Sets *done
 * to the end of the last one. */
static size_t add_pages(kvc_region at, int32_t to, size_t begin, size_t end, size_t *done) {
    const size_t page = kvc_os_page_size();
    size_t first = at.offset / page * page, last = (size_t)kvc_align_up(at.offset + (size_t)to * at.row_bytes, page);
    if (first < begin) first = begin;
    if (first < *done) first = *done;
    if (last > end) last = end;
    if (!to || !at.row_bytes || last <= first) return 0;
    *done = last;
    return last - first;
}

/* Returns whether nearly all OS pages in [begin, begin + KVC_HUGE_PAGE) of a block have rows of slots below `to`. */
static int is_filled(const kvc_pool *pool, size_t begin, int32_t to) {
    const size_t end = begin + KVC_HUGE_PAGE;
    size_t done = 0, bytes = 0;
    for (const kvc_layout *at = pool->layouts; at < pool->layouts + pool->num_layers; at++) {
        size_t head = at->k_offset < begin ? (begin - at->k_offset) / at->head_stride : 0;
        for (; head < (size_t)at->num_kv_heads && at->k_offset + head * at->head_stride < end; head++)
            for (int i = 0; i < REGIONS; i++) bytes += add_pages(region_of(at, head, i), to, begin, end, &done);
    }
    return bytes >= KVC_HUGE_PAGE - KVC_HUGE_PAGE / COLLAPSE_SHARE;
}

/* Sets `work` to the huge page of a step, if slots below collapse_to fill it, and those below `collapsed` did not.
 * Pages at the ends are shared with other blocks: these are filled once all of the blocks are. */
static int collapse_step(const kvc_pool *pool, const kvc_block *block, int64_t step, kvc_page_work *work) {
    const uintptr_t rows = (uintptr_t)block->rows, page = huge_page_at(block, step);
    const int is_own = page >= rows && page + KVC_HUGE_PAGE <= rows + pool->block_bytes;
    if (is_own ? !is_filled(pool, page - rows, block->pages.collapse_to) ||
                     is_filled(pool, page - rows, block->pages.collapsed)
               : block->pages.collapse_to < pool->block_size || !kvc_memory_fills(pool->memory, (void *)page))
        return 0;
    work->p = (uint8_t *)page;
    work->size = KVC_HUGE_PAGE;
    return 1;
}

/* Finds the next pages to collapse in a block up to collapse_to; returns 0 if no pages are left. */
static int next_step(const kvc_pool *pool, kvc_block *block, kvc_page_work *work) {
    const uintptr_t end = (uintptr_t)block->rows + pool->block_bytes;
    if (block->pages.collapse_to == pool->block_size) kvc_memory_mark(pool->memory, block->rows, /* is_written */ 1);
    while (huge_page_at(block, block->pages.collapse_next) < end)
        if (collapse_step(pool, block, block->pages.collapse_next++, work)) return 1;
    block->pages.collapsed = block->pages.collapse_to;
    block->pages.collapse_next = 0;
    return 0;
}

/* Finds the next pages to collapse in a block; returns 0 if no pages are left.  A step takes the system a
 * millisecond or more, so the steps of a block are spread over many batches. */
static int next_in_block(const kvc_pool *pool, kvc_block *block, kvc_page_work *work) {
    for (;;) {
        if (block->pages.collapse_next == 0) { /* a new round */
            const int is_ahead = block->pages.resident > block->fill;
            const int32_t to = is_ahead ? block->pages.resident : block->fill;
            const int is_full = to == pool->block_size;
            if (block->pages.epoch == pool->epoch ||
                to - block->pages.collapsed < (is_full || is_ahead ? 1 : COLLAPSE_SLOTS))
                return 0;
            block->pages.collapse_to = to;
        }
        if (next_step(pool, block, work)) return 1;
    }
}

int kvc_pool_next_filled(kvc_pool *pool, kvc_block *block, kvc_page_work *work) {
    if (!pool->collapses || block->pages.collapsed >= block->fill) return 0;
    block->pages.collapse_to = block->fill;
    return next_step(pool, block, work);
}

kvc_collapsing kvc_pool_collapse_for(const kvc_pool *pool, int32_t num_tokens) {
    const int32_t more = num_tokens / COLLAPSE_TOKENS;
    const int64_t filled = num_tokens * kvc_pool_slot_bytes(pool) / KVC_HUGE_PAGE;
    return (kvc_collapsing){1 + more + filled, COLLAPSE_BLOCKS + more, 0};
}

kvc_collapsing kvc_pool_collapse_ahead(const kvc_pool *pool) {
    return (kvc_collapsing){INT64_MAX, pool->num_blocks, 1};
}

int kvc_pool_next_collapse(kvc_pool *pool, kvc_collapsing *collapsing, kvc_page_work *work) {
    if (!pool->collapses) return 0;
    if (collapsing->blocks > pool->num_blocks) collapsing->blocks = pool->num_blocks;
    for (; collapsing->steps > 0 && collapsing->blocks > 0; collapsing->blocks--) {
        kvc_block *block = pool->collapse_block = pool->collapse_block ? pool->collapse_block : pool->first;
        if ((!collapsing->is_ahead || block->pages.resident > block->fill) && next_in_block(pool, block, work))
            return collapsing->steps-- > 0;
        pool->collapse_block = block->listed.later;
    }
    return 0;
}

/* ---- taking memory beforehand ------------------------------------------------------------------------------------ */

/* Finds the next piece of memory in a block's slots past the fill mark; returns 0 if nothing is left. */
static int fault_in_block(const kvc_pool *pool, const kvc_block *block, kvc_taking *taking, kvc_page_work *work) {
    const size_t from = (size_t)(block->fill > block->pages.resident ? block->fill : block->pages.resident);
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
    for (kvc_block *block; (block = pool->free.untaken);) {
        if (block->fill < block->pages.faulted && block->pages.resident < block->pages.faulted) {
            if (block != taking->block ||
                taking->to != block->pages.faulted) /* it was purged, or reserved, meanwhile */
                *taking = (kvc_taking){.block = block, .to = block->pages.faulted};
            if (fault_in_block(pool, block, taking, work)) return 1;
            block->pages.resident = taking->to;
        }
        if (block->pages.resident >= block->pages.faulted || block->fill >= block->pages.faulted) unlist_untaken(block);
    }
    return 0;
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

kvc_block *kvc_pool_open(kvc_pool *pool) {
    kvc_block *block = pool->free.first;
    pool->free.first = block->listed.next_free;
    pool->free.num--;
    block->listed.was_idle = pool->free.num_idle > 0; /* the idle ones are in front */
    pool->free.num_idle -= block->listed.was_idle;
    if (block->pages.faulted) pool->counts.reused++;
    block->listed.is_free = 0;
    block->listed.next_free = NULL;
    block->pages.touched_before = block->pages.faulted;
    return block;
}

void kvc_pool_fault(kvc_pool *pool, kvc_block *block, int32_t count) {
    if (count > block->fill) list_untaken(pool, block);
    if (count <= block->pages.faulted) return;
    pool->counts.row_bytes += kvc_pool_block_bytes(pool, count) - kvc_pool_block_bytes(pool, block->pages.faulted);
    block->pages.faulted = count;
}

/* ---- holders of slots -------------------------------------------------------------------------------------------- */

int32_t kvc_pool_take(kvc_pool *pool, kvc_block *block, int32_t count) {
    const int32_t slot = block->fill;
    for (int32_t i = 0; i < count; i++) block->holders[slot + i] = (kvc_holders){1, 0};
    block->fill += count;
    block->pages.epoch = pool->epoch;
    block->live += count;
    pool->counts.live += count;
    pool->counts.filled += count;
    kvc_pool_fault(pool, block, block->fill);
    kvc_pool_recount(block);
    return slot;
}

/* Adds to the number of slots whose holders may all be evicted. */
static void add_evictable(kvc_block *block, int32_t num) {
    block->evicting.evictable += num;
    block->pool->evicting.evictable += num;
    kvc_pool_recount(block);
    if (num > 0 && (block->evicting.useless || block->evicting.num_watchers))
        block->pool->evicting.freed(block->pool, block);
}

static int is_evictable(const kvc_holders *holders) { return holders->num && holders->num == holders->evictable; }

int kvc_pool_frees(const kvc_block *block, int32_t slot, int32_t count) {
    const kvc_holders *at = block->holders + slot;
    for (int32_t i = 0; block->evicting.evictable && i < count; i++)
        if (is_evictable(&at[i])) return 1;
    return 0;
}

void kvc_pool_hold(kvc_block *block, int32_t slot, int32_t count) {
    int32_t num = 0;
    for (kvc_holders *at = block->holders + slot; at < block->holders + slot + count; at++) {
        num += is_evictable(at);
        at->num++;
    }
    add_evictable(block, -num);
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
    if (block->live || block->pins || block->listed.is_free) return;
    block->listed.is_free = 1;
    block->listed.next_free = pool->free.first;
    pool->free.first = block;
    pool->free.num++;
}

/* Lowers the fill mark to the end of the last slot that is held; frees the block if no slot is. */
static void lower_fill(kvc_pool *pool, kvc_block *block) {
    if (block->pins) return;
    pool->counts.filled -= block->fill;
    block->fill = kvc_pool_use(block, KVC_NOW).fill;
    pool->counts.filled += block->fill;
    free_if_empty(pool, block);
}

void kvc_pool_refill(kvc_pool *pool, kvc_block *const *blocks, int32_t num_blocks, int32_t live) {
    for (int32_t i = 0; i < num_blocks; i++) {
        kvc_block *block = blocks[i];
        pool->counts.filled -= block->fill;
        block->fill = block->live = live < pool->block_size ? live : pool->block_size;
        pool->counts.filled += block->fill;
        kvc_pool_fault(pool, block, block->fill);
        live -= block->fill;
        int32_t evictable = 0;
        for (int32_t s = 0; s < block->fill; s++) evictable += is_evictable(&block->holders[s]);
        add_evictable(block, evictable - block->evicting.evictable);
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
    pool->counts.live -= dead;
    if (block->live == 0 || slot + count == block->fill) lower_fill(pool, block);
    add_evictable(block, evictable);
}

int32_t kvc_pool_untake(kvc_pool *pool, kvc_block *block, int32_t slot, int32_t count) {
    kvc_pool_drop(pool, block, slot, count);
    list_untaken(pool, block); /* nothing may have been written there */
    if (slot || !block->listed.is_free) return 0;
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
