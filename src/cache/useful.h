/* useful.h: which evictable sequences free slots of a group, or a recurrent state, once they are evicted.
 *
 * A sequence is useful in a group if it holds slots there that only evictable sequences hold.  A call that needs room
 * looks at useful ones alone.  If it needs bytes, it also looks at sequences whose state nobody else uses.  The others
 * come back as soon as the last sequence that may not be evicted drops a slot of theirs.  A sequence becomes useless
 * without notice when others get hold of its slots: kvc_useful_check finds out.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_USEFUL_H
#define KVC_USEFUL_H

#include "cache/cache.h"

/* The standing of a sequence in a group, or among sequences that free a state. */
struct kvc_standing {
    kvc_links links;          /* in the set of useful ones, by last use; first, as useful.c casts */
    kvc_sequence *sequence;   /* NULL: it is not evictable, or has no rows there */
    kvc_standing *next, **at; /* in a list of useless ones: that of its block, or of the pool; NULL: it is useful */
};

/* Lets a pool tell when slots of useless sequences are held only by evictable ones. */
void kvc_useful_init(kvc_pool *pool);

/* Let an evictable sequence stand in all groups in which it has rows, by its last use, and in none. */
void kvc_useful_add(kvc_cache *cache, kvc_sequence *sequence);
void kvc_useful_remove(kvc_cache *cache, kvc_sequence *sequence);

/* Notes how many bytes the state of a sequence has that goes with it, if it is evictable; else 0. */
void kvc_useful_note_state(kvc_cache *cache, kvc_sequence *sequence, int64_t bytes);

/* Searches a set of useful sequences, pool->evicting.useful or cache->evicting.with_states.  Returns the sequence that
 * was used first after `used`, or NULL. */
kvc_sequence *kvc_useful_after(const kvc_sorted *useful, int64_t used);

/* Returns whether a sequence that kvc_useful_after has found is useful still; if not, it is found no more. */
int kvc_useful_check(kvc_pool *pool, kvc_sequence *sequence);

/* Visits rows that a call drops before it evicts others: sequences with rows in the same block count as useful until
 * pool->evicting.num_choices rises.  A kvc_part_fn whose context is the pool. */
void kvc_useful_beside(void *context, const kvc_run *part);

#endif
