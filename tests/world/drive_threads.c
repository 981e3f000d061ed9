/* drive_threads.c: threads of the system call, each with sequences of its own, or, in wild worlds, with any.
 *
 *     drive_threads --seed 1 --runs 10 --calls 300
 *
 * It is meant for the thread sanitizer in the core; the world itself is compiled without. */
#define _DEFAULT_SOURCE
#include "world.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

enum { MOST_SECONDS = 120 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int calls_each;

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }
static int arm(int n) { return (void)n, 0; }
static uint64_t num_faults(void) { return 0; }
static void let_others_run(void) { sched_yield(); }

static void *run_client(void *context) {
    me = context;
    for (int i = 0; i < calls_each; i++) play();
    stop_playing();
    return NULL;
}

static int run(uint64_t seed, int num_calls) {
    enum { THREADS = 3 };
    client clients[THREADS + 1];
    pthread_t threads[THREADS];
    for (int i = 0; i <= THREADS; i++) clients[i] = (client){.number = i, .chance = {.state = seed * 8 + (uint64_t)i}};
    me = &clients[THREADS];
    forget_texts();
    alarm(MOST_SECONDS);
    calls_each = num_calls;
    make_world(seed, THREADS, seed % 3 == 0);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, run_client, &clients[i])) wrong("there is no thread");
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    look_around();
    end_world();
    return 0;
}

int main(int argc, char **argv) {
    drive = (driver){.lock = lock, .unlock = unlock, .arm = arm, .num_faults = num_faults, .pause = let_others_run};
    return run_all(argc, argv, 300, run);
}
