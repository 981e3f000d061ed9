/* reclaim.h: drops rows of retained sequences, which wait to be used again, where memory is needed.
 *
 * A retained sequence stands in the table like any other, but no batch and no edit takes it.  All functions are called
 * with the mutex held.
 */
#ifndef KVC_RECLAIM_H
#define KVC_RECLAIM_H

#include "store/cache.h"

enum { KVC_ANY_GROUP = -1 };

/* Reclaims retained sequences, the least recently used first, until num_slots slots of a group that nobody else holds
 * are free; passes over sequences that would free none.  Where others hold the rows of the groups that see everything,
 * only rows of the other groups are dropped.  Where no slot can be freed, and of any group, drops num_slots sequences
 * for the sake of their bookkeeping.  Returns 0 if there was nothing to reclaim. */
int kvc_reclaim(kvc_cache *cache, int32_t group, int64_t num_slots);

/* Does kvc_check_max_bytes, and reclaims what it takes to succeed. */
kvc_status kvc_fit_max_bytes(kvc_cache *cache, const char *what);

/* Counts slots, free blocks and bookkeeping until kvc_unforgo, with the same num, as if the oldest num retained
 * sequences were gone, but for those that may not be reclaimed.  In between, only what a batch would need is computed.
 */
void kvc_forgo(kvc_cache *cache, int64_t num);
void kvc_unforgo(kvc_cache *cache, int64_t num);

/* Counts the slots of a group that would be free if all that may be reclaimed were. */
int64_t kvc_count_reclaimable(const kvc_cache *cache, int32_t group);

#endif
