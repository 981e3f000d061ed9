/* parallel.c: runs tasks on several threads.
 *
 * One call at a time has the other threads: kvc_parallel takes them, or runs its tasks alone.  It publishes a job,
 * which is its list of tasks, and its threads claim tasks, the caller like the others.
 *
 * A team of OpenMP runs the job in a region.  The region ends when all of its threads have come there, even a thread
 * that had no task because the system did not run it.  Beside a busy program this takes a time slice of the system,
 * some milliseconds.  Regions that lose more than a fifth of the time so are followed by calls with workers for a
 * while.  (Not after a single one: beside the threads of torch, which spin, workers get the processors late.)
 *
 * Workers are threads of this library.  The caller wakes sleeping workers, and waits for tasks that were begun, never
 * for a worker that has not begun a task.  A worker that loses its core in the middle of a task does hold up the
 * caller.  A call that took longer than its caller would have needed alone is followed by calls without workers for a
 * while.
 *
 * Whoever waits spins for SPIN_NS at most and then sleeps.  On a machine with other work, threads that spin for longer
 * burn the time slices of the threads that they wait for.  A call of 100 microseconds then takes ten milliseconds.  A
 * thread sleeps at once where a spin seems in vain: the last wait was long, or another thread ran during the last. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares pthread_sigmask */
#endif
#include "base/parallel.h"

#include <stdatomic.h>

#include "base/compiler.h"
#include "base/openmp.h"
#include "base/threads.h"

#if !defined(_WIN32)
#include <signal.h>
#include <unistd.h>
#endif

enum {
    APART = 128,             /* bytes that processors keep apart: cache lines come in pairs */
    SPIN_NS = 50000,         /* about what it takes to wake a thread */
    INTERRUPTED_NS = 200000, /* between two looks at the clock: the system ran another thread */
    BUSY_NS = 100000000,     /* after which an interrupted thread spins again */
    LOST_NS = 5000000,       /* regions that were held up for longer give way to workers, */
    LEAST_LOSS = 5,          /* unless that is less than this part of the time */
    FINE_TASKS = 4           /* for each thread: with as many tasks, no thread is long in its last one */
};

/* A thread that may have to wait.  The first is the caller; the others are workers. */
typedef struct member {
    _Alignas(APART) atomic_int is_asleep;
    kvc_mutex mutex; /* guards falling asleep and waking up */
    kvc_signal wake;
    int64_t last_wait;  /* nanoseconds */
    int64_t busy_until; /* time until which this thread does not spin */
#if !defined(_WIN32)    /* there workers never end: see start_thread */
    pthread_t thread;
#endif
} member;

static member members[KVC_MOST_THREADS];
static int32_t num_members; /* that were made; 0 before the first parallel call */
static atomic_int is_taken; /* by the thread that runs a job; guards num_members and the job */
static atomic_int is_ending;

/* A time in which calls do without what has held them up. */
typedef struct recess {
    const int64_t shortest, longest; /* nanoseconds */
    _Atomic int64_t until;
    int64_t length; /* of the last one; guarded by is_taken */
} recess;

/* Without regions, calls have workers; without workers, the caller is alone. */
static recess from_regions = {.shortest = 40000000, .longest = 1000000000};
static recess from_workers = {.shortest = 10000000, .longest = 100000000};

/* Nanoseconds that regions lost while they were held up, less those that they may lose; and when that was.  Guarded by
 * is_taken. */
static int64_t regions_lost, regions_judged;

/* The job.  Threads read it while they have a claim. */
static void (*job_task)(void *context, int64_t i);
static void *job_context;
static int64_t job_size;

/* Tasks that nobody has claimed, below THREADS; and, in its multiples, the threads that may claim: those with a
 * lower index.  It is one number, so that a late thread claims nothing of a job that is not for it. */
#define THREADS (UINT64_C(1) << 48)
static _Alignas(APART) _Atomic uint64_t open_tasks;
static _Alignas(APART) _Atomic int64_t num_pending; /* tasks that have not ended */

/* Whether `open` has tasks for this member. */
static int has_tasks(uint64_t open, int32_t index) { return open % THREADS && index < (int32_t)(open / THREADS); }

/* ---- waiting ----------------------------------------------------------------------------------------------------- */

/* Whether what a thread waits for has come: to the caller, the end of all tasks; to a worker, a task. */
static int has_come(int32_t index) {
    if (index == 0) return atomic_load(&num_pending) == 0;
    return has_tasks(atomic_load(&open_tasks), index) || atomic_load(&is_ending);
}

/* Tells the processor that this thread spins. */
static void relax(void) {
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
    __builtin_ia32_pause();
#elif defined(__GNUC__) && defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins from `begin` on.  Returns whether what the thread waits for came. */
static int spin(member *m, int32_t index, int64_t begin) {
    if (begin < m->busy_until || m->last_wait > 2 * SPIN_NS) return 0;
    for (int64_t before = begin, time; before - begin < SPIN_NS; before = time) {
        for (int i = 0; i < 16; i++) {
            if (has_come(index)) return 1;
            relax();
        }
        time = kvc_now();
        if (time - before > INTERRUPTED_NS) m->busy_until = time + BUSY_NS;
    }
    return has_come(index);
}

/* Waits until what the thread with this index in `members` waits for has come. */
static void await(int32_t index) {
    if (has_come(index)) return;
    member *m = &members[index];
    const int64_t begin = kvc_now();
    if (!spin(m, index, begin)) {
        kvc_mutex_lock(&m->mutex);
        /* Whoever brings something looks at is_asleep afterwards. */
        while (atomic_store(&m->is_asleep, 1), !has_come(index)) kvc_signal_wait(&m->wake, &m->mutex);
        atomic_store(&m->is_asleep, 0);
        kvc_mutex_unlock(&m->mutex);
    }
    m->last_wait = kvc_now() - begin;
}

static void wake(member *m) {
    if (!atomic_load(&m->is_asleep) || !atomic_exchange(&m->is_asleep, 0)) return; /* another thread wakes it */
    kvc_mutex_lock(&m->mutex);
    kvc_signal_all(&m->wake);
    kvc_mutex_unlock(&m->mutex);
}

/* ---- running a job ----------------------------------------------------------------------------------------------- */

/* Wakes the two members that this one is to wake: so all are awake soon, however many they are. */
static void wake_next(int32_t index) {
    const uint64_t open = atomic_load(&open_tasks);
    for (int32_t next = 2 * index + 1; next <= 2 * index + 2; next++)
        if (has_tasks(open, next)) wake(&members[next]);
}

/* Claims tasks and runs them until none is left.  Returns whether these were the last to end. */
static int run_tasks(int32_t index) {
    int64_t num_done = 0;
    uint64_t open = atomic_load(&open_tasks);
    while (has_tasks(open, index))
        if (atomic_compare_exchange_weak(&open_tasks, &open, open - 1)) {
            job_task(job_context, job_size - (int64_t)(open % THREADS));
            num_done++;
            open = atomic_load(&open_tasks);
        }
    const int was_last = num_done && atomic_fetch_sub(&num_pending, num_done) == num_done;
    if (was_last && index > 0) wake(&members[0]);
    return was_last;
}

static void work(member *m) {
    const int32_t index = (int32_t)(m - members);
    for (await(index); !atomic_load(&is_ending); await(index)) { /* a job has come */
        wake_next(index);
        run_tasks(index);
    }
}

/* ---- starting and ending workers --------------------------------------------------------------------------------- */

#if defined(_WIN32)

static DWORD WINAPI run_worker(void *m) {
    work(m);
    return 0;
}

/* Starts a worker; returns whether it could.  Keeps the library loaded for good: a thread that ends needs the lock that
 * unloading holds, so that it cannot be waited for then. */
static int start_thread(member *m) {
    HMODULE library;
    if (!GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_PIN,
                            (const char *)members, &library))
        return 0;
    const HANDLE thread = CreateThread(NULL, 0, run_worker, m, 0, NULL);
    if (thread) CloseHandle(thread);
    return thread != NULL;
}

#else

static pid_t owner; /* the process that has the workers */

static void *run_worker(void *m) {
    work(m);
    return NULL;
}

/* Starts a worker, which blocks all signals: they are for the program's threads.  Returns whether it could. */
static int start_thread(member *m) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&m->thread, NULL, run_worker, m);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    owner = getpid();
    return !error;
}

/* Ends the workers when the library is unloaded or the program exits, unless one is needed still: then the program
 * exits while another of its threads computes.  Calls then run serially. */
__attribute__((destructor)) static void end_workers(void) {
    if (atomic_exchange(&is_taken, 1) || owner != getpid()) return;
    atomic_store(&is_ending, 1);
    for (int32_t i = 1; i < num_members; i++) wake(&members[i]);
    for (int32_t i = 1; i < num_members; i++) pthread_join(members[i].thread, NULL);
}

#endif

/* Makes members until there are num_threads, or the system gives no more threads. */
static void make_members(int32_t num_threads) {
    for (; num_members < num_threads; num_members++) {
        member *m = &members[num_members];
        if (kvc_mutex_init(&m->mutex)) return;
        if (!kvc_signal_init(&m->wake)) {
            if (num_members == 0 || start_thread(m)) continue;
            kvc_signal_destroy(&m->wake);
        }
        kvc_mutex_destroy(&m->mutex);
        return;
    }
}

/* ---- parallel loops ---------------------------------------------------------------------------------------------- */

/* Judges a call that ended now.  If it was held up, the next calls do without what it used (`from`) for a while, which
 * is twice as long each time. */
static void judge(recess *from, int was_held_up, int64_t now) {
    if (was_held_up) {
        from->length = from->length ? 2 * from->length : from->shortest;
        if (from->length > from->longest) from->length = from->longest;
        atomic_store(&from->until, now + from->length);
    } else if (now - atomic_load(&from->until) > from->longest) {
        from->length = 0;
    }
}

/* Whether the caller, which had tasks from `begin` to `end` and then waited until now, would have done the others' work
 * as well in that time. */
static int is_held_up(int64_t begin, int64_t end, int64_t now, int32_t num_threads) {
    return now - end > INTERRUPTED_NS && now - end > (num_threads - 1) * (end - begin);
}

/* Runs the job with workers. */
static void run_with_workers(int32_t num_threads, int64_t num_tasks) {
    make_members(num_threads);
    const int64_t begin = kvc_now();
    wake_next(0);
    run_tasks(0);
    const int64_t end = kvc_now();
    await(0);
    if (num_tasks < FINE_TASKS * num_threads) return; /* one long task may have held it up */
    const int64_t now = kvc_now();
    judge(&from_workers, is_held_up(begin, end, now, num_threads), now);
}

static KVC_THREAD_LOCAL char thread_mark; /* its address identifies the thread */

typedef struct region {
    const char *caller;
    int64_t caller_end; /* of the caller's tasks */
    int64_t end;        /* of the last task */
} region;

/* Runs tasks as the caller does, on a thread of OpenMP. */
static void run_in_region(void *context) {
    region *r = context;
    if (run_tasks(0)) r->end = kvc_now();
    if (r->caller == &thread_mark) r->caller_end = kvc_now();
}

/* Runs the job in a region of OpenMP.  It ends when all threads have come to its end, those too that the system did not
 * run and that had no task. */
static void run_with_team(int32_t num_threads, int64_t num_tasks) {
    region r = {.caller = &thread_mark};
    const int64_t begin = kvc_now();
    kvc_openmp_run(run_in_region, &r, num_threads);
    const int64_t now = kvc_now();
    /* Held up for threads that had not come to the region's end, or for a thread's last task: */
    const int for_threads = now - r.end > INTERRUPTED_NS && now - r.end > r.end - begin;
    const int for_tasks = num_tasks >= FINE_TASKS * num_threads && is_held_up(begin, r.caller_end, now, num_threads);
    regions_lost -= (now - regions_judged) / LEAST_LOSS; /* so much was allowed since */
    if (regions_lost < 0) regions_lost = 0;
    if (for_threads || for_tasks) regions_lost += now - r.caller_end;
    regions_judged = now;
    judge(&from_regions, regions_lost > LOST_NS, now);
    if (regions_lost <= LOST_NS) return;
    regions_lost = LOST_NS; /* after the recess, one more loss is too much at first */
    regions_judged = atomic_load(&from_regions.until);
}

/* What the calling thread has beside itself for its tasks. */
enum { NOTHING, WORKERS, TEAM };

/* Takes the team or the workers, and returns which.  There is nothing while another call has them. */
static int take_threads(void) {
    if (kvc_is_alone()) return NOTHING;
    const int64_t now = kvc_now();
    const int in_region = kvc_uses_openmp(), has_team = in_region && now >= atomic_load(&from_regions.until);
    if (!has_team && now < atomic_load(&from_workers.until)) return NOTHING;
    /* Workers would inherit the place that the caller is bound to. */
    if (!has_team && in_region && kvc_openmp_num_places() > 0) return NOTHING;
    if (atomic_exchange(&is_taken, 1)) return NOTHING;
    return has_team ? TEAM : WORKERS;
}

void kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i), void *context) {
    if (num_threads > num_tasks) num_threads = (int32_t)num_tasks;
    if (num_threads > KVC_MOST_THREADS) num_threads = KVC_MOST_THREADS;
    const int32_t limit = num_threads > 1 ? kvc_thread_limit() : 1;
    if (num_threads > limit) num_threads = limit;
    const int with = num_threads > 1 ? take_threads() : NOTHING;
    if (with == NOTHING) {
        for (int64_t i = 0; i < num_tasks; i++) task(context, i);
        return;
    }
    job_task = task;
    job_context = context;
    job_size = num_tasks;
    atomic_store(&num_pending, num_tasks);
    /* Workers have no claim on tasks of a region: its threads claim them as the caller, whose index is 0. */
    const uint64_t num_claimants = with == TEAM ? 1 : (uint64_t)num_threads;
    atomic_store(&open_tasks, num_claimants * THREADS + (uint64_t)num_tasks); /* now they claim tasks */
    if (with == TEAM)
        run_with_team(num_threads, num_tasks);
    else
        run_with_workers(num_threads, num_tasks);
    atomic_store(&is_taken, 0);
}
