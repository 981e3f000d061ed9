/* waiting.c: calls that wait for each other.  Without the mutex, readers copy rows, and writers in place change rows of
 * one sequence where they lie.  A reader that polls is in a function of the caller, and does not count as a reader
 * until that returns.  A gradual call drops kept blocks bit by bit.  A rewrite copies rows.  A waiter is a call that
 * waits to begin a batch. */
#include "cache/waiting.h"

kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id) {
    kvc_sequence *sequence;
    while ((sequence = kvc_table_find(&cache->sequences, id)) && sequence->call.in_place)
        kvc_signal_wait(&cache->waiting.idle, &cache->mutex);
    return sequence;
}

void kvc_cache_find_all(kvc_cache *cache) {
    while (cache->waiting.num_in_place) kvc_signal_wait(&cache->waiting.idle, &cache->mutex);
}

void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->call.in_place = 1;
    cache->waiting.num_in_place++;
    kvc_cache_note_evictable(cache, sequence);
}

void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->call.in_place = 0;
    cache->waiting.num_in_place--;
    kvc_cache_note_evictable(cache, sequence);
    kvc_signal_all(&cache->waiting.idle);
}

/* Waits behind calls that wait for readers (num_waiting).  Goes first while a call polls: those calls may wait for the
 * poll, and the poll for this call. */
static void queue(kvc_cache *cache) {
    while (cache->waiting.num_waiting && !cache->waiting.polling) kvc_signal_wait(&cache->waiting.idle, &cache->mutex);
}

void kvc_cache_begin_reading(kvc_cache *cache) {
    queue(cache);
    cache->waiting.num_readers++;
}

void kvc_cache_end_reading(kvc_cache *cache) {
    if (--cache->waiting.num_readers == 0 && cache->waiting.num_waiting) kvc_signal_all(&cache->waiting.idle);
}

int kvc_cache_is_polling(const kvc_cache *cache) {
    const kvc_polling *p = cache->waiting.polling;
    while (p && !kvc_thread_is_self(p->thread)) p = p->next;
    return p != NULL;
}

void kvc_cache_begin_polling(kvc_cache *cache, kvc_polling *polling) {
    *polling = (kvc_polling){cache->waiting.polling, kvc_thread_self()};
    cache->waiting.polling = polling;
    cache->waiting.num_readers--;
    if (cache->waiting.num_waiting) kvc_signal_all(&cache->waiting.idle);
}

void kvc_cache_end_polling(kvc_cache *cache, kvc_polling *polling) {
    kvc_polling **link = &cache->waiting.polling;
    while (*link != polling) link = &(*link)->next;
    *link = polling->next;
    cache->waiting.num_readers++;
}

/* Whether calls read or write rows, or poll, for which this thread is to wait: not for a poll that it runs itself. */
static int is_at_work(const kvc_cache *cache) {
    return cache->waiting.num_readers || cache->waiting.num_in_place ||
           (cache->waiting.polling && !kvc_cache_is_polling(cache));
}

/* Cannot deadlock: the calls it waits for need nothing but the mutex.  Some call a function of the caller, and what
 * that calls does not wait for this call. */
void kvc_cache_wait(kvc_cache *cache) {
    cache->waiting.num_waiting++;
    while (is_at_work(cache)) kvc_signal_wait(&cache->waiting.idle, &cache->mutex);
    if (--cache->waiting.num_waiting == 0) kvc_signal_all(&cache->waiting.idle);
}

int kvc_cache_wait_copies(kvc_cache *cache) {
    if (!is_at_work(cache)) return 0;
    kvc_cache_wait(cache);
    return 1;
}

void kvc_cache_begin_gradual(kvc_cache *cache) {
    queue(cache);
    cache->waiting.num_gradual++;
}

void kvc_cache_end_gradual(kvc_cache *cache) {
    cache->waiting.num_gradual--;
    kvc_signal_all(&cache->waiting.idle);
}

void kvc_cache_wait_all(kvc_cache *cache) {
    cache->waiting.num_waiting++; /* so that none begins meanwhile */
    while (cache->waiting.num_gradual || cache->waiting.num_readers || cache->waiting.num_in_place)
        kvc_signal_wait(&cache->waiting.idle, &cache->mutex);
    if (--cache->waiting.num_waiting == 0) kvc_signal_all(&cache->waiting.idle);
}

enum { MOST_NAPS = 64 }; /* while others are to get the mutex */

void kvc_cache_give_way(kvc_cache *cache) {
    const int num = atomic_load(&cache->waiting.num_locking);
    if (!num && !KVC_BUGGIFY()) return;
    kvc_unlock(cache, KVC_OK);
    for (int i = 0; i < MOST_NAPS && atomic_load(&cache->waiting.num_locking) >= num; i++) kvc_nap();
    kvc_lock(cache);
}

/* ---- waiting to begin a batch ------------------------------------------------------------------------------------ */

int kvc_may_begin(const kvc_cache *cache, const kvc_waiter *waiter) {
    const kvc_waiter *first = cache->waiting.waiters;
    /* It is first, or (a call without a waiter) nobody waits, or the first is a call whose poll makes this call. */
    const int is_next = first == waiter || (!waiter && kvc_thread_is_self(first->thread));
    return !cache->batch && !cache->waiting.num_rewrites && is_next;
}

kvc_status kvc_fail_busy(const kvc_cache *cache, const kvc_waiter *waiter) {
    const char *why = cache->batch ? "a batch is open, and there is one at a time: commit or abort it first"
                      : cache->waiting.num_rewrites
                          ? "another call rewrites the keys of a sequence: begin again when it has returned"
                          : "other calls wait to begin a batch: begin again later";
    if (!waiter) return kvc_fail(KVC_ERR_BUSY, "%s, or give a timeout to wait", why);
    return kvc_fail(KVC_ERR_BUSY, "%s, or give a longer timeout than %lld ms", why, (long long)waiter->timeout_ms);
}

void kvc_wake_waiter(kvc_cache *cache) {
    kvc_waiter *first = cache->waiting.waiters;
    if (first && kvc_may_begin(cache, first)) kvc_signal_all(&first->signal);
}

kvc_status kvc_waiter_join(kvc_cache *cache, kvc_waiter *waiter, int64_t timeout_ms) {
    const int64_t now = kvc_now(), ms = 1000000;
    *waiter = (kvc_waiter){.thread = kvc_thread_self(), .deadline = INT64_MAX, .timeout_ms = timeout_ms};
    if (timeout_ms >= 0 && timeout_ms < (INT64_MAX - now) / ms) waiter->deadline = now + timeout_ms * ms;
    if (kvc_signal_init(&waiter->signal)) return kvc_fail(KVC_ERR_NOMEM, "out of memory to wait for a batch");
    kvc_waiter **place = &cache->waiting.waiters; /* the end, or before a call whose poll this is */
    while (*place && !kvc_thread_is_self((*place)->thread)) place = &(*place)->next;
    waiter->next = *place;
    *place = waiter;
    return KVC_OK;
}

void kvc_waiter_leave(kvc_cache *cache, kvc_waiter *waiter) {
    kvc_waiter **link = &cache->waiting.waiters;
    while (*link != waiter) link = &(*link)->next;
    *link = waiter->next;
    kvc_signal_destroy(&waiter->signal);
    kvc_wake_waiter(cache);
}

/* Polls without the mutex; returns whether the call is cancelled. */
static int poll_unlocked(kvc_cache *cache, kvc_poll_timer *timer) {
    kvc_unlock(cache, KVC_OK);
    const int stop = kvc_poll_timer_ask(timer);
    kvc_lock(cache);
    return stop;
}

kvc_status kvc_waiter_wait(kvc_cache *cache, kvc_waiter *waiter) {
    kvc_poll_timer timer;
    kvc_poll_timer_init(&timer, cache->poll, cache->poll_user);
    while (!kvc_may_begin(cache, waiter)) {
        if (kvc_now() >= waiter->deadline) return kvc_fail_busy(cache, waiter);
        const int64_t next = timer.poll && timer.next < waiter->deadline ? timer.next : waiter->deadline;
        kvc_signal_wait_until(&waiter->signal, &cache->mutex, next);
        if (timer.poll && kvc_now() >= timer.next && poll_unlocked(cache, &timer))
            return kvc_fail(KVC_ERR_CANCELLED, "cancelled while it waited to begin a batch");
    }
    return KVC_OK;
}
