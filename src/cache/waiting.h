/* waiting.h: calls that read or write rows without the mutex, and the calls that wait for them.
 *
 * Readers copy rows of blocks that they have pinned, or add a block from a store.  Writers in place change rows of one
 * sequence where they lie.  All functions are called with the mutex held.  A function that waits releases it meanwhile,
 * so anything read before may have changed.
 */
#ifndef KVC_WAITING_H
#define KVC_WAITING_H

#include "cache/cache.h"

/* Finds a sequence after waiting until no call writes its rows in place; NULL if it does not exist.
 * kvc_cache_find_all waits for the writers of all sequences. */
kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id);
void kvc_cache_find_all(kvc_cache *cache);

/* Bracket the reading of rows without the mutex, and the adding of a block.  kvc_cache_begin_reading may wait.  A call
 * does not begin again before it has ended. */
void kvc_cache_begin_reading(kvc_cache *cache);
void kvc_cache_end_reading(kvc_cache *cache);

/* A reader that runs the cache's poll; on the stack of its thread.  Meanwhile it counts as no reader: fork() does not
 * wait for it, and kvc_cache_wait of the poll itself does not, either. */
typedef struct kvc_polling {
    struct kvc_polling *next;
    kvc_thread thread;
} kvc_polling;

/* Bracket a reader's poll, with the mutex held each time. */
void kvc_cache_begin_polling(kvc_cache *cache, kvc_polling *polling);
void kvc_cache_end_polling(kvc_cache *cache, kvc_polling *polling);

/* Whether this thread runs the poll of a reader. */
int kvc_cache_is_polling(const kvc_cache *cache);

/* Bracket the writing of a sequence's rows in place. */
void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence);
void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence);

/* Waits until there are neither readers nor writers in place.  Does not wait for rewrites by a function of the caller,
 * nor for calls that work on a batch. */
void kvc_cache_wait(kvc_cache *cache);

/* Waits like kvc_cache_wait, for a call that found the cache full, and is no reader: what readers pin cannot be
 * evicted. Returns whether it had to wait, so that the call looks again. */
int kvc_cache_wait_copies(kvc_cache *cache);

/* Bracket a call that drops kept blocks a few at a time, so that no child of a fork() has half of it.
 * kvc_cache_begin_gradual may wait. */
void kvc_cache_begin_gradual(kvc_cache *cache);
void kvc_cache_end_gradual(kvc_cache *cache);

/* Waits until there are neither readers, nor writers in place, nor gradual calls. */
void kvc_cache_wait_all(kvc_cache *cache);

/* Lets a waiting thread have the mutex.  A thread that unlocks it and soon locks it again usually gets it before a
 * waiting thread wakes up. */
void kvc_cache_give_way(kvc_cache *cache);

/* ---- waiting to begin a batch ------------------------------------------------------------------------------------ */

/* A call that waits to begin a batch; on the stack of its thread. */
typedef struct kvc_waiter {
    struct kvc_waiter *next;
    kvc_signal signal;  /* sent when the call may begin a batch */
    int64_t deadline;   /* kvc_now() when it stops waiting */
    int64_t timeout_ms; /* for the message */
    kvc_thread thread;
} kvc_waiter;

/* Adds a call at the end of cache->waiting.waiters, or removes it.  A call by the poll of another call comes before
 * that one, which goes on only once the poll has returned.  timeout_ms is as in kvc_begin_args.  Can fail with
 * KVC_ERR_NOMEM. */
kvc_status kvc_waiter_join(kvc_cache *cache, kvc_waiter *waiter, int64_t timeout_ms);
void kvc_waiter_leave(kvc_cache *cache, kvc_waiter *waiter);

/* Waits until the call may begin a batch.  Returns KVC_ERR_BUSY at the deadline, KVC_ERR_CANCELLED if poll says so. */
kvc_status kvc_waiter_wait(kvc_cache *cache, kvc_waiter *waiter);

/* Returns whether a call may begin a batch: none is open, no keys are being rewritten, and no call that came before
 * waits.  waiter NULL: the call, which is this thread's, does not wait.  kvc_fail_busy returns KVC_ERR_BUSY, and says
 * why it may not. */
int kvc_may_begin(const kvc_cache *cache, const kvc_waiter *waiter);
kvc_status kvc_fail_busy(const kvc_cache *cache, const kvc_waiter *waiter);

/* Wakes the first waiter if it may begin a batch.  Call when a batch, or the rewriting of keys, has ended. */
void kvc_wake_waiter(kvc_cache *cache);

#endif
