/* atfork.c: handles the process's fork(): keeps caches usable in the child, whatever other threads were doing.
 *
 * fork() first locks every cache, and waits for all calls that read or write rows without the mutex, except calls on a
 * batch.  It also waits for calls that forget sequences, or a prompt, a few blocks at a time.  So in the child
 * nothing else is half done, and no mutex belongs to a thread that does not exist there.  Only here is a cache locked
 * while another cache, or the list of caches, is locked.  Rewrites of keys by a function of the caller, which may do
 * anything, are not waited for: the child undoes them. */
#include "lifetime/atfork.h"

#include "base/openmp.h"
#include "edit/rewrite.h"
#include "pass/put.h"
#include "read/snapshot.h"
#include "prefix/prefix.h"
#include "prefix/stores.h"
#include "saved/transit.h"
#include "cache/waiting.h"

#if defined(_WIN32)

int kvc_atfork_init(void) { return 0; }
void kvc_atfork_add(kvc_cache *cache) { (void)cache; }
void kvc_atfork_remove(kvc_cache *cache) { (void)cache; }

#else

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static kvc_cache *caches, **end_of_caches = &caches; /* in order of creation, in which they are locked */

/* Runs before fork(): locks the list and all caches, and waits for calls that must not end halfway. */
static void lock_all(void) {
    kvc_mutex_lock(&list_mutex);
    for (kvc_cache *cache = caches; cache; cache = cache->next) {
        kvc_lock(cache);
        kvc_cache_wait_all(cache);
    }
}

/* Unlocks the list and all caches.  Runs after fork() in the parent; in the child, in_child calls it. */
static void unlock_all(void) {
    for (kvc_cache *cache = caches; cache; cache = cache->next) kvc_unlock(cache, KVC_OK);
    kvc_mutex_unlock(&list_mutex);
}

/* Undoes the rewrite of a sequence's keys. */
static void undo_rewrite(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_rewrites *rewrites = sequence->call.rewrites;
    for (int32_t g = 0; g < cache->num_token_groups; g++) kvc_rewrite_discard(cache, g, &rewrites->of_group[g]);
    kvc_copiers_free(cache, &rewrites->copiers);
    kvc_memory_free(&cache->memory, rewrites, kvc_rewrites_size(cache), KVC_MEMORY_SCRATCH, -1);
    sequence->call.is_rewriting = 0;
    cache->waiting.num_rewrites--;
}

/* Undoes the rewrites that the parent's other threads had begun, and drops sequences that belong to their calls. */
static void end_edits(kvc_cache *cache) {
    const kvc_table *table = &cache->sequences;
    for (kvc_sequence *sequence = kvc_table_last(table), *before; sequence; sequence = before) {
        before = kvc_table_before(table, sequence); /* dropping it may drop hidden ones, which stand behind it */
        if (kvc_thread_is_self(sequence->call.thread)) continue;
        if (sequence->call.is_rewriting) undo_rewrite(cache, sequence);
        if (sequence->call.is_own) kvc_cache_drop(cache, sequence);
    }
}

/* Ends what the parent's other threads were saving or loading. */
static void end_states(kvc_cache *cache) {
    for (kvc_state *state = cache->states, *next; state; state = next) {
        next = state->next;
        if (!kvc_thread_is_self(state->thread)) kvc_state_end(state);
    }
}

/* Ends the calls of the parent's other threads that were carrying blocks to or from a store. */
static void end_carriers(kvc_cache *cache) {
    for (kvc_carrier *c = cache->prefixes.carriers, *next; c; c = next) {
        next = c->next;
        if (!kvc_thread_is_self(c->thread)) kvc_carrier_end(c);
    }
}

/* Ends the calls of the parent's other threads that used recurrent states. */
static void end_state_uses(kvc_cache *cache) {
    for (kvc_state_use *use = cache->prefixes.state_uses, *next; use; use = next) {
        next = use->next;
        if (!kvc_thread_is_self(use->thread)) kvc_state_use_end(cache, use);
    }
}

/* Ends the work of the parent's other threads on the batch: making plans, running tasks, putting rows.  fork() does not
 * wait for puts.  A put of an encoder's rows has taken slots, and gives them back.  Other puts took none: the batch
 * had their slots before, and their rows do not count as put.  A put of this thread stays: the cache's poll, a function
 * of the caller, called fork() during the put, which goes on.  Plans are reset whoever used them. */
static void end_work(kvc_batch *batch) {
    for (kvc_plan_link *plan = batch->plans; plan; plan = plan->next) plan->after_fork(plan);
    for (kvc_cross_put *put = batch->cross_puts, *next; put; put = next) {
        next = put->next;
        if (!kvc_thread_is_self(put->thread)) kvc_cross_put_end(batch, put, /* all */ 0);
    }
}

/* Takes calls of other threads out of the list of those that wait to begin a batch.  A call of this thread stays: its
 * poll, which called fork(), may return to it. */
static void end_waiters(kvc_cache *cache) {
    for (kvc_waiter **link = &cache->waiting.waiters, *waiter; (waiter = *link);)
        if (kvc_thread_is_self(waiter->thread))
            link = &waiter->next;
        else
            *link = waiter->next;
}

/* Runs after fork() in the child: ends the work of threads that only the parent has, and unlocks all. */
static void in_child(void) {
    kvc_threads_forked();
    for (kvc_cache *cache = caches; cache; cache = cache->next) {
        kvc_signal_init(&cache->waiting.idle); /* anew: it may count waiting threads of the parent */
        cache->waiting.num_waiting = 0;
        atomic_store(&cache->waiting.num_locking, 0);
        end_waiters(cache);
        cache->memory.works = NULL; /* of threads of the parent, which were between two steps of a work on pages */
        if (cache->batch) end_work(cache->batch);
        kvc_snapshots_forked(cache);
        end_carriers(cache);
        end_state_uses(cache);
        end_states(cache);
        end_edits(cache);
        kvc_prefixes_forked(cache);
    }
    unlock_all();
}

int kvc_atfork_init(void) {
    static int is_set; /* guarded by list_mutex; where memory was short once, the next cache tries again */
    kvc_mutex_lock(&list_mutex);
    if (!is_set) is_set = pthread_atfork(lock_all, unlock_all, in_child) == 0;
    kvc_openmp_find(); /* under the mutex: a fork() in the middle of dlopen would leave its locks to the child */
    kvc_mutex_unlock(&list_mutex);
    return !is_set;
}

void kvc_atfork_add(kvc_cache *cache) {
    kvc_mutex_lock(&list_mutex);
    cache->link = end_of_caches;
    *end_of_caches = cache;
    end_of_caches = &cache->next;
    kvc_mutex_unlock(&list_mutex);
}

void kvc_atfork_remove(kvc_cache *cache) {
    kvc_mutex_lock(&list_mutex);
    *cache->link = cache->next;
    *(cache->next ? &cache->next->link : &end_of_caches) = cache->link;
    kvc_mutex_unlock(&list_mutex);
}

#endif
