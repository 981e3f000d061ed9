/* drive_scheduler.c: clients in a simulation (scheduler.h): threads take turns by the seed, memory and pages are
 * refused, the clock jumps, the process forks.  Each client has sequences of its own; in wild worlds it calls for any.
 *
 *     drive_scheduler --seed 1 --runs 100 --calls 400 --clients 3 --faults 127 --trace 1 */
#include "scheduler.h" /* first: it decides on sizes of the core */

#include "cache/waiting.h"
#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_SECONDS = 120, MOST_STALL = 10 };

static int num_clients = 3, faults = SIM_ALL_FAULTS;
static int64_t calls_left;

/* A stalled thread is in the middle of its call: what others may do to it is tried then. */
static void pause_client(void) {
    for (int i = 1 << pick(MOST_STALL); i > 0; i--) sim_step();
}

static int arm(int n) { return (int)sim_fail_memory((uint64_t)n); }

static client clients[CLIENTS + 1];
static int threads[CLIENTS]; /* of the clients, by the scheduler's numbers */

/* Calls that wait for a batch get it in order of arrival. */
static void check_turn(int64_t called) {
    for (int i = 0; i < w.num_clients; i++) {
        const int64_t since = i == me->number ? 0 : sim_inside_since(threads[i]);
        if (since && since < called) wrong("begins a batch before client %d, which waits for one", i);
    }
}

static int call_check(void *check) { return (*(int (**)(void))check)(); }

static int fork_process(int (*check)(void)) { return sim_fork(call_check, &check); }

/* A child has one thread, for which nothing fails. */
static int check_calmly(void);
static int (*check_child)(void);

static int fork_calmly(int (*check)(void)) {
    check_child = check;
    return fork_process(check_calmly);
}

static int check_calmly(void) {
    sim_calm();
    w.has_faults = 0;
    return check_child();
}

static void *run_client(void *context) {
    me = context;
    threads[me->number] = sim_self();
    while (calls_left-- > 0) play();
    stop_playing();
    return NULL;
}

static void simulate(uint64_t seed, int num_calls) {
    static const int handovers[] = {1, 4, 32, 256};
    pthread_t handles[CLIENTS];
    /* Some faults hide what others show: a thread that wakes early misses no signal. */
    const sim_options options = {seed, faults & (int)(seed * 0x9e3779b97f4a7c15 >> 57), handovers[seed % 4]};
    /* One client sees what a call changes that fails. */
    const int num = seed % 5 == 4 ? 1 : num_clients;
    alarm(MOST_SECONDS);
    sim_begin(&options);
    sim_watch((void (*)(void))kvc_waiter_wait);
    for (int i = 0; i <= num; i++) clients[i] = (client){.number = i, .chance = {.state = seed * 8 + (uint64_t)i}};
    me = &clients[num];
    calls_left = num_calls;
    const int64_t bytes = sim_bytes();
    make_world(seed, num, num > 1 && seed / 4 % 3 == 0);
    w.has_faults = 1;
    w.traces = drive.traces;
    for (int i = 0; i < num; i++)
        while (sim_thread_create(&handles[i], NULL, run_client, &clients[i])) continue;
    for (int i = 0; i < num; i++) sim_thread_join(handles[i], NULL);
    sim_calm();
    w.has_faults = 0;
    look_around();
    end_world();
    if (sim_bytes() != bytes) wrong("%lld bytes are left", (long long)(sim_bytes() - bytes));
}

/* Each run has a process of its own: what the core keeps for the next call decides, too. */
static int run(uint64_t seed, int num_calls) {
    int status = -1;
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        simulate(seed, num_calls);
        fflush(stdout);
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !status) return 0;
    printf("seed %llu: status %d%s\n", (unsigned long long)seed, status,
           WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? ": a call never ends" : "");
    return 1;
}

int main(int argc, char **argv) {
    /* Addresses decide the order of some lists. */
    if (!(personality(0xffffffff) & ADDR_NO_RANDOMIZE) && personality(ADDR_NO_RANDOMIZE) >= 0)
        execv("/proc/self/exe", argv);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--clients")) num_clients = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--faults")) faults = atoi(argv[i + 1]);
    }
    if (num_clients < 2 || num_clients >= CLIENTS) return 2;
    drive = (driver){.arm = arm,
                     .num_faults = sim_faults,
                     .pause = pause_client,
                     .turns = sim_handovers,
                     .num_amid = sim_num_stalled,
                     .time = sim_now,
                     .check_turn = check_turn,
                     .take = sim_aligned_alloc,
                     .give = sim_free,
                     .fork = fork_calmly,
                     .faults = 1};
    return run_all(argc, argv, 400, run);
}
