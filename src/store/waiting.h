/* waiting.h: calls that read or write rows without the mutex, and the calls that wait for them.
 *
 * Readers copy rows of blocks they have pinned.  Writers in place change rows of one sequence where they lie.  All
 * functions are called with the mutex held; those that wait let it go meanwhile, so look only afterwards at what they
 * wait for.
 */
#ifndef KVC_WAITING_H
#define KVC_WAITING_H

#include "store/cache.h"

/* Finds a sequence, NULL: there is none, once no call writes its rows in place.  kvc_cache_find_all waits for all
 * sequences. */
kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id);
void kvc_cache_find_all(kvc_cache *cache);

/* Does the same for an edit that may copy rows: also waits, where max_bytes is set, for pages to be worked on no
 * longer, so that all that is free can be given back. */
kvc_sequence *kvc_cache_find_to_copy(kvc_cache *cache, int64_t id);

/* Bracket the reading of rows without the mutex.  The first may wait. */
void kvc_cache_begin_reading(kvc_cache *cache);
void kvc_cache_end_reading(kvc_cache *cache);

/* Bracket the writing of a sequence's rows in place. */
void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence);

/* Waits until there are neither readers nor writers in place.  Rewrites by a function of the caller go on, and so does
 * what works on a batch. */
void kvc_cache_wait(kvc_cache *cache);

/* Waits until no call works on pages.  Returns whether it had to, so that others may have had the mutex. */
int kvc_cache_wait_pages(kvc_cache *cache);

#endif
