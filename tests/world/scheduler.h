/* scheduler.h: a scheduler and a system in which the core is simulated: one seed decides all that happens there.
 *
 * Every source of the core is compiled with `-include scheduler.h -DSIM_CORE -finstrument-functions`.  What it asks of
 * the system then comes to scheduler.c.  Threads are the system's, but one runs at a time.  Another one may go on at
 * each step: a call of a function, a lock, a wake-up, an atomic access, an allocation.  Waiting threads wake early,
 * threads stall, the clock jumps, memory and threads are refused, the system declines advice on pages, and the core
 * takes ways that are rare elsewhere.  In each run, some functions of the core are hot.  A thread that enters or leaves
 * one often stalls there, if its call has let go of a mutex.  Others then make calls in the middle of its call.  A run
 * repeats with its seed, to the step.
 */
#ifndef WORLD_SCHEDULER_H
#define WORLD_SCHEDULER_H

#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* ---- for the simulation ------------------------------------------------------------------------------------------ */

/* Faults, each a bit of sim_options.faults. */
enum sim_fault {
    SIM_MEMORY = 1,   /* allocations fail */
    SIM_THREADS = 2,  /* no thread can be started */
    SIM_PAGES = 4,    /* mmap and madvise fail */
    SIM_WAKE_UPS = 8, /* waiting threads wake early */
    SIM_CLOCK = 16,   /* the clock jumps forward */
    SIM_RARE = 32,    /* the core takes rare ways: KVC_BUGGIFY */
    SIM_STALLS = 64,  /* threads stop for as long as others take for many calls */
    SIM_ALL_FAULTS = 127
};

typedef struct sim_options {
    uint64_t seed;
    int faults;
    int handover; /* of 1024 steps, those at which another thread may go on */
} sim_options;

/* Begins a simulation, in which the calling thread is the only one, on the processor that it runs on.  Steps of an
 * earlier one are forgotten. */
void sim_begin(const sim_options *options);

/* Ends it: from now on nothing fails, and threads go on in turn.  Call when all threads but the core's have ended. */
void sim_calm(void);

/* Starts a thread; sim_thread_join waits for its end. */
int sim_thread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
int sim_thread_join(pthread_t thread, void **result);

/* Returns a random number below n, which is at least 1. */
uint64_t sim_random(uint64_t n);

/* Lets another thread go on, perhaps. */
void sim_step(void);

/* Waits until another thread calls sim_wake with the same pointer. */
void sim_wait(const void *awaited);
void sim_wake(const void *awaited);

/* Returns the calling thread's number, how many threads stall in the middle of what they do, and the time in
 * nanoseconds, which no other call has returned. */
int sim_self(void);
int sim_num_stalled(void);
int64_t sim_now(void);

/* Watches a function of the core: sim_inside_since returns when a thread entered it, by sim_now; 0: it is not in it. */
void sim_watch(void (*function)(void));
int64_t sim_inside_since(int thread);

/* Lets the calling thread's nth request for memory from now on fail, if memory fails at all; 0: none.  Returns how many
 * were left until one would have failed. */
uint64_t sim_fail_memory(uint64_t n);

/* Count handovers between the simulation's own threads, refused requests of the calling thread, and bytes that the core
 * has not given back. */
uint64_t sim_handovers(void);
uint64_t sim_faults(void);
int64_t sim_bytes(void);

/* Forks the process at this step.  The child calls check(context) and ends; returns what that returned, or -1 if the
 * child crashed. */
int sim_fork(int (*check)(void *context), void *context);

/* The core gets sizes for short sequences: see base/compiler.h. */
#define KVC_SIZE(usual, simulated) (simulated)

/* ---- for the core ------------------------------------------------------------------------------------------------ */

int sim_worker_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
int sim_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
int sim_mutex_destroy(pthread_mutex_t *mutex);
int sim_mutex_lock(pthread_mutex_t *mutex);
int sim_mutex_trylock(pthread_mutex_t *mutex);
int sim_mutex_unlock(pthread_mutex_t *mutex);
int sim_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes);
int sim_cond_destroy(pthread_cond_t *cond);
int sim_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex);
int sim_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until);
int sim_cond_broadcast(pthread_cond_t *cond);
int sim_yield(void);
int sim_clock_gettime(clockid_t clock, struct timespec *time);
int sim_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));
void *sim_malloc(size_t size);
void *sim_aligned_alloc(size_t alignment, size_t size);
void sim_free(void *memory);
void *sim_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
int sim_munmap(void *at, size_t size);
int sim_madvise(void *at, size_t size, int advice);

/* Whether to take the rare way at this line: in a run at some lines never, at others now and then, or always. */
int sim_buggify(const char *function, int line);

#if defined(SIM_CORE)
#define pthread_create sim_worker_create
#define pthread_join sim_thread_join
#define pthread_mutex_init sim_mutex_init
#define pthread_mutex_destroy sim_mutex_destroy
#define pthread_mutex_lock sim_mutex_lock
#define pthread_mutex_trylock sim_mutex_trylock
#define pthread_mutex_unlock sim_mutex_unlock
#define pthread_cond_init sim_cond_init
#define pthread_cond_destroy sim_cond_destroy
#define pthread_cond_wait sim_cond_wait
#define pthread_cond_timedwait sim_cond_timedwait
#define pthread_cond_broadcast sim_cond_broadcast
#define pthread_atfork sim_atfork
#define sched_yield sim_yield
#define nanosleep(...) sim_yield()
#define clock_gettime sim_clock_gettime
#define malloc sim_malloc
#define aligned_alloc sim_aligned_alloc
#define free sim_free
#define mmap sim_mmap
#define munmap sim_munmap
#define madvise sim_madvise
#define KVC_BUGGIFY() sim_buggify(__func__, __LINE__)
#undef atomic_load
#undef atomic_store
#undef atomic_exchange
#undef atomic_fetch_add
#undef atomic_fetch_sub
#undef atomic_compare_exchange_weak
#undef atomic_flag_test_and_set
#undef atomic_flag_test_and_set_explicit
#undef atomic_flag_clear_explicit
#define atomic_load(p) (sim_step(), atomic_load_explicit(p, memory_order_seq_cst))
#define atomic_store(p, x) (sim_step(), atomic_store_explicit(p, x, memory_order_seq_cst))
#define atomic_exchange(p, x) (sim_step(), atomic_exchange_explicit(p, x, memory_order_seq_cst))
#define atomic_fetch_add(p, x) (sim_step(), atomic_fetch_add_explicit(p, x, memory_order_seq_cst))
#define atomic_fetch_sub(p, x) (sim_step(), atomic_fetch_sub_explicit(p, x, memory_order_seq_cst))
#define atomic_compare_exchange_weak(p, old, x) \
    (sim_step(), atomic_compare_exchange_weak_explicit(p, old, x, memory_order_seq_cst, memory_order_seq_cst))
#define atomic_flag_test_and_set(p) (sim_step(), __atomic_test_and_set(p, __ATOMIC_SEQ_CST))
#define atomic_flag_test_and_set_explicit(p, order) (sim_step(), __atomic_test_and_set(p, order))
#define atomic_flag_clear_explicit(p, order) (sim_step(), __atomic_clear(p, order))
#endif

#endif
