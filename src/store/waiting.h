/* waiting.h: calls that read or write rows without the mutex, and the calls that wait for them.
 *
 * Readers copy rows of blocks that they have pinned.  Writers in place change rows of one sequence where they lie.  All
 * functions are called with the mutex held; those that wait release it meanwhile, so that anything read before may have
 * changed.
 */
#ifndef KVC_WAITING_H
#define KVC_WAITING_H

#include "store/cache.h"

/* Finds a sequence (NULL: there is none) after waiting until no call writes its rows in place.  kvc_cache_find_all
 * waits for the writers of all sequences. */
kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id);
void kvc_cache_find_all(kvc_cache *cache);

/* Does the same for an edit that may copy rows: where max_bytes is set, also waits until no call works on pages, so
 * that all free memory can be given back. */
kvc_sequence *kvc_cache_find_to_copy(kvc_cache *cache, int64_t id);

/* Bracket the reading of rows without the mutex.  kvc_cache_begin_reading may wait. */
void kvc_cache_begin_reading(kvc_cache *cache);
void kvc_cache_end_reading(kvc_cache *cache);

/* Bracket the writing of a sequence's rows in place. */
void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence);

/* Waits until there are neither readers nor writers in place.  Does not wait for rewrites by a function of the caller,
 * nor for calls that work on a batch. */
void kvc_cache_wait(kvc_cache *cache);

/* Waits until no call works on pages.  Returns whether it had to wait, and so released the mutex meanwhile. */
int kvc_cache_wait_pages(kvc_cache *cache);

#endif
