/* checkpoint.c: the recurrent states of a model: see checkpoint.h. */
#include "prefix/checkpoint.h"

#include <string.h>

#include "cache/waiting.h"
#include "prefix/tree.h"
#include "space/evict.h"

/* Counts what is freed of it if everything evictable is evicted. */
static void recount(kvc_cache *cache, kvc_checkpoint *checkpoint) {
    const int64_t bytes = checkpoint->goes && checkpoint->num_users == 1 ? kvc_checkpoint_bytes(checkpoint) : 0;
    cache->evictable_bytes += bytes - checkpoint->evictable_bytes;
    checkpoint->evictable_bytes = bytes;
}

void kvc_checkpoint_note(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t goes) {
    if (!checkpoint) return;
    checkpoint->goes = goes;
    recount(cache, checkpoint);
}

void kvc_checkpoint_count(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t add) {
    checkpoint->num_users += add;
    recount(cache, checkpoint);
}

void kvc_checkpoint_use(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t add) {
    if (!checkpoint) return;
    kvc_checkpoint_count(cache, checkpoint, add);
    if (!checkpoint->num_users)
        kvc_memory_free(&cache->memory, checkpoint, (uint64_t)kvc_checkpoint_bytes(checkpoint), KVC_MEMORY_BOOKKEEPING,
                        -1);
}

void kvc_state_use_begin(kvc_cache *cache, kvc_state_use *use, kvc_checkpoint *checkpoint) {
    *use = (kvc_state_use){cache->state_uses, &cache->state_uses, kvc_thread_self(), checkpoint};
    if (use->next) use->next->at = &use->next;
    cache->state_uses = use;
    kvc_checkpoint_use(cache, checkpoint, 1);
}

void kvc_state_use_end(kvc_cache *cache, const kvc_state_use *use) {
    if (!use->checkpoint) return;
    *use->at = use->next;
    if (use->next) use->next->at = use->at;
    kvc_checkpoint_use(cache, use->checkpoint, -1);
}

kvc_status kvc_checkpoint_new(kvc_cache *cache, const void *state, int64_t num_bytes, kvc_state_use *use) {
    const uint64_t size = sizeof *use->checkpoint + (uint64_t)num_bytes;
    use->checkpoint = NULL;
    while (cache->max_bytes && kvc_cache_wait_pages(cache)) continue;
    kvc_checkpoint *checkpoint = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!checkpoint)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for a checkpoint of %lld bytes", (long long)num_bytes);
    *checkpoint = (kvc_checkpoint){.num_bytes = num_bytes};
    kvc_state_use_begin(cache, use, checkpoint);
    const kvc_status status = kvc_fit_max_bytes(cache, "keeping a checkpoint");
    if (status != KVC_OK) {
        kvc_state_use_end(cache, use);
        use->checkpoint = NULL;
        return status;
    }
    kvc_cache_begin_reading(cache);
    kvc_unlock(cache, KVC_OK);
    memcpy(checkpoint + 1, state, (size_t)num_bytes);
    kvc_lock(cache);
    kvc_cache_end_reading(cache);
    return KVC_OK;
}

void kvc_checkpoint_read(kvc_cache *cache, kvc_checkpoint *checkpoint, void *state) {
    kvc_state_use use;
    kvc_state_use_begin(cache, &use, checkpoint);
    kvc_cache_begin_reading(cache);
    kvc_unlock(cache, KVC_OK);
    memcpy(state, checkpoint + 1, (size_t)checkpoint->num_bytes);
    kvc_lock(cache);
    kvc_cache_end_reading(cache);
    kvc_state_use_end(cache, &use);
}

/* ---- of blocks --------------------------------------------------------------------------------------------------- */

static void list(kvc_checkpoints *all, kvc_checkpoint *checkpoint) {
    checkpoint->newer = NULL;
    checkpoint->older = all->newest;
    *(all->newest ? &all->newest->newer : &all->oldest) = checkpoint;
    all->newest = checkpoint;
    all->num_bytes += checkpoint->num_bytes;
    all->num++;
}

static void unlist(kvc_checkpoints *all, kvc_checkpoint *checkpoint) {
    *(checkpoint->older ? &checkpoint->older->newer : &all->oldest) = checkpoint->newer;
    *(checkpoint->newer ? &checkpoint->newer->older : &all->newest) = checkpoint->older;
    all->num_bytes -= checkpoint->num_bytes;
    all->num--;
}

void kvc_checkpoints_touch(kvc_checkpoints *all, kvc_checkpoint *checkpoint) {
    unlist(all, checkpoint);
    list(all, checkpoint);
}

void kvc_checkpoints_drop(kvc_checkpoints *all, kvc_node *node) {
    kvc_checkpoint *checkpoint = node->checkpoint;
    if (!checkpoint) return;
    node->checkpoint = NULL;
    checkpoint->node = NULL;
    kvc_checkpoint_note(all->cache, checkpoint, 0);
    unlist(all, checkpoint);
    kvc_checkpoint_use(all->cache, checkpoint, -1);
}

/* Returns whether those that are pinned leave room for one of so many bytes. */
static int has_room(const kvc_checkpoints *all, int64_t num_bytes) {
    int64_t bytes = all->num_bytes + num_bytes;
    for (const kvc_checkpoint *it = all->oldest; it && bytes > all->most_bytes; it = it->newer)
        if (!it->node->num_state_pins) bytes -= it->num_bytes;
    return bytes <= all->most_bytes;
}

int kvc_checkpoints_put(kvc_checkpoints *all, kvc_node *node, kvc_checkpoint *checkpoint) {
    if (node->checkpoint) {
        kvc_checkpoints_touch(all, node->checkpoint);
        return 0;
    }
    if (all->most_bytes && !has_room(all, checkpoint->num_bytes)) return 0;
    node->checkpoint = checkpoint;
    checkpoint->node = node;
    checkpoint->goes = node->rows && node->rows->is_evictable;
    list(all, checkpoint);
    kvc_checkpoint_use(all->cache, checkpoint, 1);
    for (kvc_checkpoint *oldest = all->oldest, *next; oldest && all->most_bytes; oldest = next) {
        if (all->num_bytes <= all->most_bytes) break;
        next = oldest->newer;
        if (!oldest->node->num_state_pins) kvc_checkpoints_drop(all, oldest->node);
    }
    return 1;
}
