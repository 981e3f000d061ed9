/* tally.c: what is in use of blocks, of each and of all.  A scope says which holders of slots count: all (KVC_NOW), or
 * those that may not be evicted (KVC_FIXED).  A block's use is how much of it is in use in a scope.  A tally adds up
 * the uses of all blocks, as noted in block->noted. */
#include "rows/pool.h"

int64_t kvc_pool_header_bytes(const kvc_pool *pool) {
    return (int64_t)(sizeof(kvc_block) + (size_t)pool->block_size * sizeof(kvc_holders));
}

int64_t kvc_pool_block_bytes(const kvc_pool *pool, int32_t faulted) {
    if (!pool->is_lazy) return (int64_t)pool->block_bytes;
    const size_t page = kvc_os_page_size();
    uint64_t bytes = 0;
    for (int32_t i = 0; i < pool->num_layers; i++) {
        const kvc_layout *at = &pool->layouts[i];
        bytes += (uint64_t)at->num_kv_heads *
                 (kvc_align_up((size_t)faulted * at->k_row_bytes, page) +
                  kvc_align_up((size_t)faulted * at->v_stored, page) +
                  (uint64_t)at->num_scales * kvc_align_up((size_t)faulted * KVC_SCALE_BYTES, page) +
                  kvc_align_up((size_t)faulted * at->sketch_bytes, page));
    }
    const uint64_t all = kvc_align_up(pool->block_bytes, page);
    return (int64_t)(bytes < all ? bytes : all);
}

/* Returns how many holders of a slot a scope leaves out: in KVC_FIXED, the ones that may be evicted. */
static uint32_t num_left_out(const kvc_holders *holders, kvc_scope scope) {
    return scope == KVC_FIXED ? holders->evictable : 0;
}

kvc_use kvc_pool_use(const kvc_block *block, kvc_scope scope) {
    const int32_t live = block->live - (scope == KVC_FIXED ? block->evicting.evictable : 0);
    kvc_use use = {.fill = block->fill, .live = live, .is_used = live || block->pins, .is_pinned = block->pins != 0};
    if (block->pins) return use;
    if (!live) use.fill = 0;
    const kvc_holders *end = block->holders + use.fill;
    while (end > block->holders && end[-1].num <= num_left_out(&end[-1], scope)) end--; /* no holder that counts */
    use.fill = (int32_t)(end - block->holders);
    return use;
}

int kvc_pool_is_movable(const kvc_pool *pool, kvc_use use) {
    return !use.is_pinned && use.live && use.live < pool->block_size;
}

static void add(kvc_count *count, kvc_use use, int64_t sign) {
    count->blocks += sign;
    count->filled += sign * use.fill;
    count->live += sign * use.live;
}

void kvc_tally_add(const kvc_pool *pool, kvc_tally *tally, kvc_use use, int64_t sign) {
    if (!use.is_used) return;
    add(&tally->used, use, sign);
    if (use.is_pinned) add(&tally->held, use, sign);
    if (kvc_pool_is_movable(pool, use)) add(&tally->movable, use, sign);
}

void kvc_pool_recount(kvc_block *block) {
    kvc_pool *pool = block->pool;
    for (int scope = 0; scope < KVC_NUM_SCOPES; scope++) {
        kvc_use *noted = &block->noted[scope];
        const kvc_use use = kvc_pool_use(block, (kvc_scope)scope);
        if (use.fill == noted->fill && use.live == noted->live && use.is_used == noted->is_used &&
            use.is_pinned == noted->is_pinned)
            continue;
        kvc_tally_add(pool, &pool->tallies[scope], *noted, -1);
        kvc_tally_add(pool, &pool->tallies[scope], use, 1);
        *noted = use;
    }
}

void kvc_pool_try_drop(kvc_block *block, kvc_scope scope, int32_t slot, int32_t count, int64_t *slots) {
    for (kvc_holders *at = block->holders + slot; at < block->holders + slot + count; at++) {
        at->num--;
        const int was_last = at->num == num_left_out(at, scope); /* of the holders that count */
        block->live -= was_last;
        *slots += was_last;
    }
}

void kvc_pool_undo_try_drop(kvc_block *block, kvc_scope scope, int32_t slot, int32_t count) {
    for (kvc_holders *at = block->holders + slot; at < block->holders + slot + count; at++) {
        block->live += at->num == num_left_out(at, scope);
        at->num++;
    }
}
