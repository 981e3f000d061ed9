/* evict.h: forgets rows that no query will see any more, when a batch begins.
 *
 * A group's policy decides how far: kvc_evictable says it of one sequence.  What a group gains is looked at in a
 * preview before anything is evicted.  Only sequences that changed since they last had nothing to evict are gone over,
 * so that idle ones cost nothing.
 */
#ifndef KVC_EVICT_H
#define KVC_EVICT_H

#include "store/cache.h"

/* Positions [begin, end); none where end <= begin. */
typedef struct kvc_position_range {
    int32_t begin, end;
} kvc_position_range;

/* Set `low` for sequences outside the batch.  Call before evicting: one group's eviction changes the next one's. */
void kvc_set_lows(kvc_cache *cache);

/* What group g forgets of a sequence, as its `low` says. */
kvc_position_range kvc_evictable(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g);

/* Rows that a sequence keeps in group g. */
int64_t kvc_count_kept(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g);

/* Group g as it will be once it has evicted.
 *
 * Opening a preview takes the evicted rows out of the counts of the group's blocks (holders, live); closing it puts
 * them back, so that nothing has changed.  In between, nothing but kvc_pool_fill_after and kvc_compaction_plan looks at
 * those counts, and the mutex is held. */
typedef struct kvc_preview {
    kvc_pool *pool;
    const kvc_cache *cache;
    kvc_block *free; /* blocks that will be free, in the order of their use: those it frees, then the pool's */
    int64_t slots;   /* that nobody will hold any more */
} kvc_preview;

kvc_preview kvc_preview_open(kvc_cache *cache, int32_t g);
void kvc_preview_close(kvc_preview *preview);

/* Lists one more block as one that will be free, and used before those listed so far. */
void kvc_preview_add_free(kvc_preview *preview, kvc_block *block);

/* Slots of group g that nobody will hold once it has evicted. */
int64_t kvc_count_evictable_slots(kvc_cache *cache, int32_t g);

/* Evicts.  Cannot fail after kvc_runs_prepare_evict of all sequences that changed. */
void kvc_evict(kvc_cache *cache, int32_t g);

#endif
