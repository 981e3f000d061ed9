/* scheduler.c: see scheduler.h. */
#include "scheduler.h"

#include <errno.h>
#include <malloc.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
    MOST_THREADS = 64,
    MOST_HANDLERS = 4,
    MOST_SECONDS = 60,
    MOST_STEPS = 1 << 25,
    MOST_STALL = 1 << 20,
    PLACES = 1 << 12, /* functions of the core, by a hash: functions of one hash share their count of stalls */
    HOT = 4,          /* of so many places, one is hot in a run */
    SECOND = 1000000000
};

typedef enum thread_state { READY, BLOCKED, WAITING, ENDED } thread_state;

typedef struct thread {
    thread_state state;
    const void *awaits; /* the mutex, condition or thread that it waits for */
    int64_t deadline;   /* of WAITING; INT64_MAX: none */
    int64_t stalls_until;
    int is_worker;         /* of the core */
    int depth, has_locked; /* calls of the core's functions it is in; whether it had a mutex since the first of them */
    int num_locks;         /* mutexes that it has */
    int64_t inside_since;  /* when it entered the function that is watched; 0: it is not in it */
    uint64_t faults;
    uint64_t memory_left; /* requests for memory until one fails; 0: any number */
    sem_t begun, go;      /* posted when this thread has begun, and when it is to go on */
    pthread_t real;
    int is_gone; /* the system's thread has ended */
    void *(*run)(void *);
    void *argument, *result;
} thread;

static thread threads[MOST_THREADS];
static int num_threads, current, last_client; /* last_client: the last thread to run that is no worker */
static sim_options options;
static uint64_t random_state, num_steps, num_handovers;
static int64_t now, num_bytes; /* nanoseconds; bytes of the core */
static int is_calm = 1;
static uint32_t num_stalls[PLACES];
static void (*watched)(void);

static void (*prepare_handlers[MOST_HANDLERS])(void), (*parent_handlers[MOST_HANDLERS])(void),
    (*child_handlers[MOST_HANDLERS])(void);
static int num_handlers;

static uint64_t mix(uint64_t z) { /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

uint64_t sim_random(uint64_t n) { return mix(random_state += 0x9e3779b97f4a7c15) % n; }

/* Ends the program: prints the seed, the step and a reason. */
__attribute__((format(printf, 1, 2))) _Noreturn static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("seed %llu, step %llu: ", (unsigned long long)options.seed, (unsigned long long)num_steps);
    vprintf(format, arguments);
    putchar('\n');
    fflush(stdout);
    abort();
}

/* Whether a fault of this kind happens now: once in `rarity` times, if the run has it. */
static int goes_wrong(int fault, uint64_t rarity) { return !is_calm && options.faults & fault && !sim_random(rarity); }

/* Whether the system refuses what the calling thread asks for. */
static int is_refused(int fault, uint64_t rarity) {
    const int refuses = goes_wrong(fault, rarity);
    threads[current].faults += refuses;
    return refuses;
}

static int lacks_memory(void) {
    thread *self = &threads[current];
    const int is_last = self->memory_left && !--self->memory_left;
    return is_refused(SIM_MEMORY, is_last ? 1 : 1024);
}

uint64_t sim_fail_memory(uint64_t n) {
    const uint64_t left = threads[current].memory_left;
    threads[current].memory_left = n;
    return left;
}

int sim_buggify(const char *function, int line) {
    static const uint64_t percents[] = {0, 0, 0, 5, 25, 25, 75, 100};
    if (is_calm || !(options.faults & SIM_RARE)) return 0;
    uint64_t place = mix(options.seed) + (uint64_t)line;
    while (*function) place = mix(place + (uint64_t)*function++);
    return sim_random(100) < percents[place % 8];
}

uint64_t sim_handovers(void) { return num_handovers; }
uint64_t sim_faults(void) { return threads[current].faults; }
int64_t sim_bytes(void) { return num_bytes; }

/* ---- whose turn it is -------------------------------------------------------------------------------------------- */

static void hand_to(int next) {
    const int self = current;
    if (next == self) return;
    if (!threads[next].is_worker) {
        num_handovers += next != last_client;
        last_client = next;
    }
    current = next;
    sem_post(&threads[next].go);
    if (threads[self].state != ENDED)
        while (sem_wait(&threads[self].go)) continue;
}

/* Returns a random thread that can go on; -1: no thread can.  A thread that stalls is returned only if there is no
 * other. */
static int pick_ready(void) {
    int found = -1;
    for (int stalls = 0; stalls < 2 && found < 0; stalls++)
        for (int i = 0, n = 0; i < num_threads; i++)
            if (threads[i].state == READY && (threads[i].stalls_until > now) == stalls && !sim_random((uint64_t)++n))
                found = i;
    return found;
}

/* Wakes the thread whose deadline comes first, and lets its time come.  Returns -1 if no thread has one soon: the core
 * wakes threads after an hour, whatever happened. */
static int wake_next(void) {
    int next = -1;
    for (int i = 0; i < num_threads; i++)
        if (threads[i].state == WAITING && threads[i].deadline < (next < 0 ? INT64_MAX : threads[next].deadline))
            next = i;
    if (next < 0 || threads[next].deadline - now > MOST_SECONDS * (int64_t)SECOND) return -1;
    if (now < threads[next].deadline) now = threads[next].deadline;
    threads[next].state = READY;
    return next;
}

/* Goes on with another thread, as this one cannot. */
static void give_up_turn(void) {
    if (goes_wrong(SIM_WAKE_UPS, 64)) {
        const int i = (int)sim_random((uint64_t)num_threads);
        if (threads[i].state == WAITING) threads[i].state = READY;
    }
    int next = pick_ready();
    if (next < 0) next = wake_next();
    if (next < 0) fail("every thread waits for another one");
    hand_to(next);
}

void sim_step(void) {
    if (!num_threads) return;
    if (++num_steps > MOST_STEPS) fail("the threads do not get on");
    now += 100 + (int64_t)sim_random(200);
    if (goes_wrong(SIM_CLOCK, 4096)) now += (int64_t)sim_random(3 * (uint64_t)SECOND);
    for (int i = 0; i < num_threads; i++)
        if (threads[i].state == WAITING && threads[i].deadline <= now) threads[i].state = READY;
    if (goes_wrong(SIM_STALLS, 1024)) {
        threads[current].stalls_until = now + (int64_t)sim_random(MOST_STALL);
        hand_to(pick_ready());
    }
    if ((int)sim_random(1024) < options.handover) hand_to(pick_ready());
}

/* Stops the thread at a place of the core that is hot in this run, if its call had a mutex and has let it go.  Others
 * then make calls in the middle of its call.  The more often it did so, the less likely it is to do it again. */
static void stall_at(const void *place) {
    thread *self = &threads[current];
    if (is_calm || !(options.faults & SIM_STALLS) || self->num_locks || !self->has_locked) return;
    const uint64_t hash = mix(mix(options.seed) + (uint64_t)(uintptr_t)place);
    if (hash % HOT || sim_random(2 + num_stalls[hash / HOT % PLACES] / 4)) return;
    num_stalls[hash / HOT % PLACES]++;
    self->stalls_until = now + ((int64_t)1 << sim_random(23));
    hand_to(pick_ready());
}

int sim_num_stalled(void) {
    int num = 0;
    for (int i = 0; i < num_threads; i++) num += threads[i].state == READY && threads[i].stalls_until > now;
    return num;
}

void sim_watch(void (*function)(void)) { watched = function; }
int sim_self(void) { return current; }
int64_t sim_inside_since(int thread) { return threads[thread].inside_since; }
int64_t sim_now(void) { return ++now; }

void __cyg_profile_func_enter(void *function, void *caller);
void __cyg_profile_func_exit(void *function, void *caller);

static int is_watched(const void *function) { return (uintptr_t)function == (uintptr_t)watched; }

/* Called by the core at the beginning and the end of its functions. */
void __cyg_profile_func_enter(void *function, void *caller) {
    (void)caller;
    if (!num_threads) return;
    if (is_watched(function)) threads[current].inside_since = ++now;
    if (!threads[current].depth++) threads[current].has_locked = threads[current].num_locks;
    stall_at(function);
    sim_step();
}

void __cyg_profile_func_exit(void *function, void *caller) {
    (void)caller;
    if (!num_threads) return;
    if (is_watched(function)) threads[current].inside_since = 0;
    if (--threads[current].depth) stall_at((char *)function + 1);
}

int sim_yield(void) {
    sim_step();
    hand_to(pick_ready());
    return 0;
}

/* Keeps all threads on one processor: only one goes on at a time, and it is woken sooner there. */
static void stay_on_processor(void) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(sched_getcpu(), &own);
    sched_setaffinity(0, sizeof own, &own);
}

void sim_begin(const sim_options *given) {
    stay_on_processor();
    if (!num_threads) {
        sem_init(&threads[0].go, 0, 0);
        num_threads = 1;
    }
    options = *given;
    random_state = options.seed * 0x2545f4914f6cdd1d;
    num_steps = num_handovers = 0;
    memset(num_stalls, 0, sizeof num_stalls);
    is_calm = 0;
}

void sim_calm(void) { is_calm = 1; }

/* ---- threads ----------------------------------------------------------------------------------------------------- */

static void wake_those(const void *awaited) {
    for (int i = 0; i < num_threads; i++)
        if (threads[i].state != ENDED && threads[i].state != READY && threads[i].awaits == awaited)
            threads[i].state = READY;
}

static void wait_for(thread_state state, const void *awaited, int64_t deadline) {
    thread *self = &threads[current];
    self->awaits = awaited;
    self->deadline = deadline;
    self->state = state;
    give_up_turn();
}

void sim_wait(const void *awaited) { wait_for(BLOCKED, awaited, INT64_MAX); }
void sim_wake(const void *awaited) { wake_those(awaited); }

static void *run_thread(void *context) {
    thread *self = context;
    sem_post(&self->begun);
    while (sem_wait(&self->go)) continue;
    self->result = self->run(self->argument);
    self->state = ENDED;
    wake_those(self);
    give_up_turn();
    return NULL;
}

static int create(pthread_t *handle, const pthread_attr_t *attributes, void *(*run)(void *), void *argument,
                  int is_worker) {
    sim_step();
    if (is_refused(SIM_THREADS, 2)) return EAGAIN;
    int i = 1;
    while (i < num_threads && !(threads[i].state == ENDED && !threads[i].run)) i++;
    if (i == MOST_THREADS) return EAGAIN;
    threads[i] = (thread){.state = READY, .run = run, .argument = argument, .is_worker = is_worker};
    sem_init(&threads[i].begun, 0, 0);
    sem_init(&threads[i].go, 0, 0);
    if (pthread_create(&threads[i].real, attributes, run_thread, &threads[i])) return EAGAIN;
    while (sem_wait(&threads[i].begun)) continue; /* as it begins it may lock an allocator, in the middle of a fork() */
    *handle = threads[i].real;
    if (i == num_threads) num_threads++;
    return 0;
}

int sim_thread_create(pthread_t *handle, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return create(handle, attributes, run, argument, 0);
}

int sim_worker_create(pthread_t *handle, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return create(handle, attributes, run, argument, 1);
}

/* Waits until the system's thread has ended, too. */
static void await_end(thread *t) {
    if (!t->is_gone) pthread_join(t->real, NULL);
    t->is_gone = 1;
}

int sim_thread_join(pthread_t handle, void **result) {
    int i = 1;
    while (i < num_threads && !(threads[i].run && pthread_equal(threads[i].real, handle))) i++;
    if (i == num_threads) fail("a thread is joined that was not started");
    while (threads[i].state != ENDED) wait_for(BLOCKED, &threads[i], INT64_MAX);
    if (result) *result = threads[i].result;
    threads[i].run = NULL;
    await_end(&threads[i]);
    return 0;
}

/* ---- locks ------------------------------------------------------------------------------------------------------- */

/* A mutex holds 1 + the thread that has it; 0: none has. */
static int *owner_of(pthread_mutex_t *mutex) { return (int *)(void *)mutex; }

static void take_mutex(pthread_mutex_t *mutex) {
    *owner_of(mutex) = current + 1;
    threads[current].num_locks++;
    threads[current].has_locked = 1;
}

static void give_mutex(pthread_mutex_t *mutex) {
    *owner_of(mutex) = 0;
    threads[current].num_locks--;
    wake_those(mutex);
}

int sim_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    (void)attributes;
    *owner_of(mutex) = 0;
    return lacks_memory() ? ENOMEM : 0;
}

int sim_mutex_destroy(pthread_mutex_t *mutex) {
    if (*owner_of(mutex)) fail("a mutex is destroyed while it is locked");
    return 0;
}

int sim_mutex_lock(pthread_mutex_t *mutex) {
    sim_step();
    if (*owner_of(mutex) == current + 1) fail("a thread locks a mutex that it has");
    while (*owner_of(mutex)) wait_for(BLOCKED, mutex, INT64_MAX);
    take_mutex(mutex);
    return 0;
}

int sim_mutex_trylock(pthread_mutex_t *mutex) {
    sim_step();
    if (*owner_of(mutex)) return EBUSY;
    take_mutex(mutex);
    return 0;
}

int sim_mutex_unlock(pthread_mutex_t *mutex) {
    if (*owner_of(mutex) != current + 1) fail("a thread unlocks a mutex that it has not");
    give_mutex(mutex);
    sim_step();
    return 0;
}

int sim_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes) {
    (void)cond, (void)attributes;
    return lacks_memory() ? ENOMEM : 0;
}

int sim_cond_destroy(pthread_cond_t *cond) {
    for (int i = 0; i < num_threads; i++)
        if (threads[i].state == WAITING && threads[i].awaits == cond)
            fail("a condition is destroyed while a thread waits for it");
    return 0;
}

static void wait_on(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline) {
    if (*owner_of(mutex) != current + 1) fail("a thread waits without the mutex");
    give_mutex(mutex);
    wait_for(WAITING, cond, deadline);
    while (*owner_of(mutex)) wait_for(BLOCKED, mutex, INT64_MAX);
    take_mutex(mutex);
}

int sim_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex) {
    wait_on(cond, mutex, INT64_MAX);
    return 0;
}

int sim_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    const int64_t deadline = (int64_t)until->tv_sec * SECOND + until->tv_nsec;
    if (deadline > now) wait_on(cond, mutex, deadline);
    return now < deadline ? 0 : ETIMEDOUT;
}

int sim_cond_broadcast(pthread_cond_t *cond) {
    wake_those(cond);
    sim_step();
    return 0;
}

int sim_clock_gettime(clockid_t clock, struct timespec *time) {
    (void)clock;
    sim_step();
    *time = (struct timespec){(time_t)(now / SECOND), (long)(now % SECOND)};
    return 0;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Counts memory that is handed out, and fills it: nothing may count on zeros.  The filling reads as
 * -1, or as a number far too large for an index. */
static void *count(void *memory) {
    if (!memory) return NULL;
    num_bytes += (int64_t)malloc_usable_size(memory);
    return memset(memory, options.seed / 2 % 2 ? 0xff : 0x5a, malloc_usable_size(memory));
}

void *sim_malloc(size_t size) {
    sim_step();
    return lacks_memory() ? NULL : count(malloc(size));
}

void *sim_aligned_alloc(size_t alignment, size_t size) {
    sim_step();
    return lacks_memory() ? NULL : count(aligned_alloc(alignment, size));
}

void sim_free(void *memory) {
    sim_step();
    if (!memory) return;
    num_bytes -= (int64_t)malloc_usable_size(memory);
    memset(memory, 0xa5, malloc_usable_size(memory)); /* for who reads it still */
    free(memory);
}

/* Returns the bytes of the pages that `size` bytes lie in: munmap gives back whole ones. */
static int64_t page_bytes(size_t size) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (int64_t)((size + page - 1) / page * page);
}

void *sim_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    sim_step();
    if (is_refused(SIM_PAGES, 16)) return MAP_FAILED;
    void *memory = mmap(at, size, protection, flags, file, offset);
    if (memory != MAP_FAILED) num_bytes += page_bytes(size);
    return memory;
}

int sim_munmap(void *at, size_t size) {
    sim_step();
    num_bytes -= page_bytes(size);
    return munmap(at, size);
}

int sim_madvise(void *at, size_t size, int advice) {
    sim_step();
    if (!is_refused(SIM_PAGES, 4)) return madvise(at, size, advice);
    errno = EINVAL;
    return -1;
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

int sim_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
    if (is_refused(SIM_MEMORY, 2)) return ENOMEM;
    if (num_handlers == MOST_HANDLERS) fail("too many handlers of fork()");
    prepare_handlers[num_handlers] = prepare;
    parent_handlers[num_handlers] = parent;
    child_handlers[num_handlers++] = child;
    return 0;
}

int sim_fork(int (*check)(void *context), void *context) {
    int status;
    sim_step();
    for (int i = num_handlers - 1; i >= 0; i--) prepare_handlers[i]();
    for (int i = 1; i < num_threads; i++)
        if (threads[i].state == ENDED && threads[i].run) await_end(&threads[i]);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < num_threads; i++)
            if (i != current) threads[i] = (thread){.state = ENDED}; /* its handle may be taken again */
        for (int i = 0; i < num_handlers; i++) child_handlers[i]();
        status = check(context);
        fflush(stdout);
        _exit(status);
    }
    for (int i = 0; i < num_handlers; i++) parent_handlers[i]();
    if (child < 0 || waitpid(child, &status, 0) != child) return 0; /* no process could be made */
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
