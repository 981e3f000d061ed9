/* threads.h: the lock, the clock, the number of threads of a call, and calls that end early. */
#ifndef KVC_THREADS_H
#define KVC_THREADS_H

#include <stdatomic.h>

#include "kvcache.h"

/* The system's mutex, condition variable (kvc_signal) and thread id under one name each. */
#if defined(_WIN32)
#if !defined(WIN32_LEAN_AND_MEAN)
#define WIN32_LEAN_AND_MEAN /* leaves out headers that make macros of common words */
#endif
#include <windows.h>
typedef SRWLOCK kvc_mutex;
static inline int kvc_mutex_init(kvc_mutex *m) {
    InitializeSRWLock(m);
    return 0;
}
static inline void kvc_mutex_destroy(kvc_mutex *m) { (void)m; }
#define kvc_mutex_lock AcquireSRWLockExclusive
#define kvc_mutex_try_lock TryAcquireSRWLockExclusive
#define kvc_mutex_unlock ReleaseSRWLockExclusive
static inline void kvc_pause(void) { SwitchToThread(); }
typedef DWORD kvc_thread;
static inline kvc_thread kvc_thread_self(void) { return GetCurrentThreadId(); }
static inline int kvc_thread_is_self(kvc_thread thread) { return thread == GetCurrentThreadId(); }
typedef CONDITION_VARIABLE kvc_signal;
static inline int kvc_signal_init(kvc_signal *s) {
    InitializeConditionVariable(s);
    return 0;
}
static inline void kvc_signal_destroy(kvc_signal *s) { (void)s; }
static inline void kvc_signal_wait(kvc_signal *s, kvc_mutex *m) { SleepConditionVariableSRW(s, m, INFINITE, 0); }
#define kvc_signal_all WakeAllConditionVariable
#else
#include <pthread.h>
#include <sched.h>
typedef pthread_mutex_t kvc_mutex;
static inline int kvc_mutex_init(kvc_mutex *m) { return pthread_mutex_init(m, NULL); }
static inline void kvc_mutex_destroy(kvc_mutex *m) { pthread_mutex_destroy(m); }
#define kvc_mutex_lock pthread_mutex_lock
#define kvc_mutex_try_lock(m) (!pthread_mutex_trylock(m))
#define kvc_mutex_unlock pthread_mutex_unlock
static inline void kvc_pause(void) { sched_yield(); }
typedef pthread_t kvc_thread;
static inline kvc_thread kvc_thread_self(void) { return pthread_self(); }
static inline int kvc_thread_is_self(kvc_thread thread) { return pthread_equal(thread, pthread_self()) != 0; }
typedef pthread_cond_t kvc_signal;
int kvc_signal_init(kvc_signal *s);
static inline void kvc_signal_destroy(kvc_signal *s) { pthread_cond_destroy(s); }
static inline void kvc_signal_wait(kvc_signal *s, kvc_mutex *m) { pthread_cond_wait(s, m); }
#define kvc_signal_all pthread_cond_broadcast
#endif

/* Returns the time in nanoseconds, by a clock that never goes back. */
int64_t kvc_now(void);

/* Sleeps for a moment, in which others run. */
void kvc_nap(void);

/* Waits like kvc_signal_wait, but no longer than until kvc_now() is `time`, nor than an hour. */
void kvc_signal_wait_until(kvc_signal *s, kvc_mutex *m, int64_t time);

enum { KVC_MOST_THREADS = 4096 }; /* the largest number a caller may set */

/* Returns KVC_ERR_UNSUPPORTED, with a message, if KVCACHE_THREADS decides and names no layer of this build. */
kvc_status kvc_threads_check(void);

/* Whether calls run in regions of OpenMP, and not on this library's own threads. */
int kvc_uses_openmp(void);

/* Returns how many threads a call may have at most, by OMP_THREAD_LIMIT: as OpenMP's runtime says, where regions are
 * used. */
int32_t kvc_thread_limit(void);

/* Counts the cores that the process may use, within the limits of its control group: places where OpenMP binds threads.
 */
int kvc_usable_cores(void);

/* Call in the child of the process's fork(), which lacks the threads of its parent: calls run on one from then on. */
void kvc_threads_forked(void);

/* Whether a call is to use the calling thread alone: in the child of a fork(); and in a parallel region of the
 * program's OpenMP, whose other threads have the processors. */
int kvc_is_alone(void);

/* Decides whether a long call is to end early: its tasks call kvc_poll_timer_ask every millisecond or so. */
typedef struct kvc_poll_timer {
    kvc_poll_fn *poll;
    void *user;
    const char *caller; /* identifies the thread that made the call; only that one polls */
    int64_t next;       /* time of its next poll, in nanoseconds */
    atomic_int stopped; /* the tasks were told to end early */
} kvc_poll_timer;

/* Begins; poll NULL: the call never ends early. */
void kvc_poll_timer_init(kvc_poll_timer *timer, kvc_poll_fn *poll, void *user);

/* Whether the call is to end early.  Polls if this thread made the call and its next poll is due. */
int kvc_poll_timer_ask(kvc_poll_timer *timer);

/* Do what kvc_poll_timer_ask does in steps, for calls that prepare for a poll.  kvc_poll_timer_was_stopped and
 * kvc_poll_timer_poll return whether the call is to end early.  kvc_poll_timer_is_due returns whether this thread is to
 * poll now. */
int kvc_poll_timer_was_stopped(const kvc_poll_timer *timer);
int kvc_poll_timer_is_due(const kvc_poll_timer *timer);
int kvc_poll_timer_poll(kvc_poll_timer *timer);

#endif
