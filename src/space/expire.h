/* expire.h: forgets rows that no later query will see, when a batch begins, and for its sequences when it is committed.
 *
 * Given sequence->min_query_position, kvc_policy_expired says which rows of a sequence a group lets go.  A preview
 * shows what a group gains before anything expires, or is evicted of kept sequences (evict.h).  Sequences with
 * nothing to expire and no change since are skipped, so that idle ones cost nothing.
 */
#ifndef KVC_EXPIRE_H
#define KVC_EXPIRE_H

#include "cache/cache.h"

/* Sets `min_query_position` of sequences outside the batch as after a commit, so that their last token can be taken
 * back.  Call before expiring: one group's expiry changes the next one's.  Sequences that a call has made for itself
 * keep all rows. */
void kvc_set_min_query_positions(kvc_cache *cache);

/* Counts the rows of group g that a sequence keeps once others have expired. */
int64_t kvc_count_staying(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g);

/* A group as it will be once rows have expired, if the call expires, and victims are evicted.  In the scope KVC_FIXED,
 * every evictable sequence counts as evicted; that takes no time for these sequences.
 *
 * Opening a preview takes these rows out of the counts of the group's blocks (holders, live); closing it puts them
 * back, so that nothing has changed.  In between, only kvc_pool_use and kvc_compaction_plan read the counts, and the
 * mutex is held. */
typedef struct kvc_preview {
    kvc_pool *pool;
    const kvc_cache *cache;
    kvc_scope scope;
    int32_t expires;
    kvc_block *tried; /* list of the blocks whose counts differ */
    int64_t slots;    /* slots that lose their last holder */
} kvc_preview;

kvc_preview kvc_preview_open(kvc_cache *cache, int32_t g, kvc_scope scope, int expires);
void kvc_preview_close(kvc_preview *preview);

/* Visits every part of a run that the group loses, open or not. */
void kvc_preview_visit_lost(const kvc_preview *preview, kvc_part_fn *visit, void *context);

/* Take rows that the call drops in the end out of the counts, or put them back.  Each is a kvc_part_fn whose context is
 * the preview. */
void kvc_preview_drop_part(void *preview, const kvc_run *part);
void kvc_preview_undo_part(void *preview, const kvc_run *part);

/* Returns what will be in use of all blocks. */
kvc_tally kvc_preview_tally(const kvc_preview *preview);

/* Expires from group g, in all sequences of cache->sequences.changed, after kvc_runs_prepare_expire of each.  Cannot
 * fail. */
void kvc_expire(kvc_cache *cache, int32_t g);

/* Sets `min_query_position` of a sequence to which a batch adds tokens up to position `last` (-1: it adds none).  It
 * is the position of its last token then; if groups lack rows that others have, the position before these.  So as
 * many of the latest positions stay as the policy says. */
void kvc_set_min_query_behind(kvc_sequence *sequence, int32_t last);

/* Appends a run to a sequence's list of group g, except rows that this expires, given sequence->min_query_position. */
void kvc_append_staying(kvc_cache *cache, kvc_sequence *sequence, int32_t g, const kvc_run *run);

/* Expires from a sequence, in all groups, as a batch adds tokens to it: kvc_set_min_query_behind.  The lists have room
 * for kvc_most_cuts more runs.  Cannot fail. */
void kvc_expire_behind(kvc_cache *cache, kvc_sequence *sequence, int32_t last);

/* Returns the most runs of group g that kvc_expire_behind may cut in two after a batch with so many stretches of
 * consecutive positions, given sequence->min_query_position. */
int32_t kvc_most_cuts(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g, int32_t num_stretches);

#endif
