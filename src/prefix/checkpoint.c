/* checkpoint.c: the recurrent states of a model: see checkpoint.h.
 *
 * A checkpoint is a state, behind its struct, kept with the block (node) at whose end it was.  The block is a user of
 * it.  Evicting the block's rows frees the state if it has no other user. */
#include "prefix/checkpoint.h"

#include <string.h>

#include "cache/useful.h"
#include "cache/waiting.h"
#include "prefix/tree.h"
#include "space/evict.h"

void kvc_checkpoint_note(kvc_cache *cache, const kvc_checkpoint *checkpoint) {
    kvc_sequence *rows = checkpoint->node ? checkpoint->node->rows : NULL;
    /* its only user is the block: */
    const int goes = rows && rows->evicting.is_evictable && checkpoint->num_users == 1;
    if (rows) kvc_useful_note_state(cache, rows, goes ? checkpoint->num_bytes : 0);
}

void kvc_checkpoint_use(kvc_cache *cache, kvc_checkpoint *checkpoint, int32_t add) {
    if (!checkpoint) return;
    checkpoint->num_users += add;
    kvc_checkpoint_note(cache, checkpoint);
    if (checkpoint->num_users) return;
    cache->prefixes.state_bytes -= checkpoint->num_bytes;
    kvc_memory_free(&cache->memory, checkpoint, (uint64_t)kvc_checkpoint_bytes(checkpoint), KVC_MEMORY_BOOKKEEPING, -1);
}

void kvc_state_use_begin(kvc_cache *cache, kvc_state_use *use, kvc_checkpoint *checkpoint) {
    *use = (kvc_state_use){cache->prefixes.state_uses, &cache->prefixes.state_uses, kvc_thread_self(), checkpoint};
    if (use->next) use->next->at = &use->next;
    cache->prefixes.state_uses = use;
    kvc_checkpoint_use(cache, checkpoint, 1);
}

void kvc_state_use_end(kvc_cache *cache, const kvc_state_use *use) {
    if (!use->checkpoint) return;
    *use->at = use->next;
    if (use->next) use->next->at = use->at;
    kvc_checkpoint_use(cache, use->checkpoint, -1);
}

kvc_status kvc_checkpoint_take(kvc_cache *cache, int64_t num_bytes, int64_t before, kvc_state_use *use) {
    const uint64_t size = sizeof *use->checkpoint + (uint64_t)num_bytes;
    use->checkpoint = NULL;
    kvc_checkpoint *checkpoint = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!checkpoint)
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for a checkpoint of %lld bytes", (long long)num_bytes);
    *checkpoint = (kvc_checkpoint){.num_bytes = num_bytes};
    cache->prefixes.state_bytes += num_bytes;
    kvc_state_use_begin(cache, use, checkpoint);
    const kvc_need need = {.cache = cache, .what = "keeping a checkpoint", .before = before};
    const kvc_status status = kvc_make_room(&need);
    if (status != KVC_OK) {
        kvc_state_use_end(cache, use);
        use->checkpoint = NULL;
    }
    return status;
}

kvc_status kvc_checkpoint_new(kvc_cache *cache, const void *state, int64_t num_bytes, kvc_state_use *use) {
    kvc_status status;
    do status = kvc_checkpoint_take(cache, num_bytes, 0, use);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    if (status != KVC_OK) return status;
    kvc_cache_begin_reading(cache);
    kvc_unlock(cache, KVC_OK);
    memcpy(use->checkpoint + 1, state, (size_t)num_bytes);
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

static int is_used_later(const kvc_links *member, const kvc_links *other) {
    const kvc_checkpoint *a = (const void *)member, *b = (const void *)other;
    return a->stamp > b->stamp;
}

/* Sort a checkpoint into all->unpinned, or count it in pinned_bytes if its node's state has a pin; and undo that. */
static void sort(kvc_checkpoints *all, kvc_checkpoint *checkpoint) {
    if (checkpoint->node->users.num_state_pins)
        all->pinned_bytes += checkpoint->num_bytes;
    else
        kvc_sorted_add(&all->unpinned, &checkpoint->unpinned, is_used_later);
}

static void unsort(kvc_checkpoints *all, kvc_checkpoint *checkpoint) {
    if (checkpoint->node->users.num_state_pins)
        all->pinned_bytes -= checkpoint->num_bytes;
    else
        kvc_sorted_remove(&all->unpinned, &checkpoint->unpinned);
}

void kvc_checkpoints_touch(kvc_checkpoints *all, kvc_checkpoint *checkpoint) {
    unsort(all, checkpoint);
    checkpoint->stamp = checkpoint->node->rows->evicting.used;
    sort(all, checkpoint);
}

void kvc_checkpoints_pin(kvc_checkpoints *all, kvc_node *node, int32_t add) {
    if (node->checkpoint) unsort(all, node->checkpoint);
    node->users.num_state_pins += add;
    if (node->checkpoint) sort(all, node->checkpoint);
}

void kvc_checkpoints_drop(kvc_checkpoints *all, kvc_node *node) {
    kvc_checkpoint *checkpoint = node->checkpoint;
    if (!checkpoint) return;
    unsort(all, checkpoint);
    all->num_bytes -= checkpoint->num_bytes;
    all->num--;
    node->checkpoint = NULL;
    checkpoint->node = NULL;
    if (node->rows) kvc_useful_note_state(all->cache, node->rows, /* bytes */ 0);
    kvc_checkpoint_use(all->cache, checkpoint, -1);
}

int kvc_checkpoints_put(kvc_checkpoints *all, kvc_node *node, kvc_checkpoint *checkpoint) {
    if (node->checkpoint) {
        kvc_checkpoints_touch(all, node->checkpoint);
        return 0;
    }
    if (!kvc_checkpoints_have_room(all, checkpoint->num_bytes)) return 0;
    node->checkpoint = checkpoint;
    checkpoint->node = node;
    checkpoint->stamp = ++all->cache->evicting.num_uses;
    all->num_bytes += checkpoint->num_bytes;
    all->num++;
    sort(all, checkpoint);
    kvc_checkpoint_use(all->cache, checkpoint, 1);
    while (all->most_bytes && all->num_bytes > all->most_bytes) {
        kvc_checkpoint *oldest = (void *)kvc_sorted_end(&all->unpinned, KVC_LOW);
        kvc_checkpoints_drop(all, oldest->node);
    }
    return 1;
}
