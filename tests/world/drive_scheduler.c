/* drive_scheduler.c: clients in a simulation (scheduler.h): threads take turns by the seed, memory and pages are
 * refused, the clock jumps, the process forks.  Each client has sequences of its own; in wild worlds it calls for any.
 * With every fourth seed, calls wait for each other, and polls for calls of other clients.
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

/* ---- calls that wait for each other ------------------------------------------------------------------------------ */

enum { WAITERS = 3, WAITED_ROWS = 24, WAITED_DIM = 8 };

static kvc_cache *shared;
static int64_t num_reads,
    reading[WAITERS];          /* the number of the call by which a client copies rows out; 0: it does not */
static int beginning[WAITERS]; /* how many calls of a client are about to begin a batch: its poll makes the second */

static float waited_rows[WAITED_ROWS][WAITED_DIM];

static kvc_status count_room(void) {
    int64_t room;
    return kvc_room(shared, 0, &room);
}

static kvc_status begin_in_turn(void);

/* A poll may wait until another client has copied rows, as that waits for no call that polls.  A call that it makes
 * does not wait for its own, and a batch that it begins does not wait for the batch that its own call waits for. */
static int32_t await_reader(void *user) {
    const int other = pick(WAITERS);
    const int64_t awaited = reading[other];
    (void)user;
    if (me->number == WAITERS) return 0; /* the cache is being made */
    if (!pick(4)) count_room();
    if (beginning[me->number] == 1 && !pick(4)) begin_in_turn();
    for (int i = pick(200); i > 0; i--) sim_step();
    while (awaited && reading[other] == awaited) sim_wait(&reading[other]);
    return beginning[me->number] < 2 && !pick(30); /* who waits for itself waits for ever */
}

/* Copies rows out, which others may wait for. */
static kvc_status copy_out(void) {
    float k[WAITED_ROWS][WAITED_DIM];
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k};
    reading[me->number] = ++num_reads;
    const kvc_status status = kvc_gather(shared, 0, 0, 0, 1 + pick(WAITED_ROWS), &out);
    reading[me->number] = 0;
    sim_wake(&reading[me->number]);
    return status;
}

static kvc_status weigh(void) {
    float weights[WAITED_ROWS];
    const kvc_weights_args args = {.struct_size = sizeof args,
                                   .q = waited_rows,
                                   .weights = weights,
                                   .num_rows = WAITED_ROWS,
                                   .num_queries = 1 + pick(WAITED_ROWS),
                                   .num_heads = 1};
    return kvc_weights(shared, 0, 0, &args);
}

static kvc_status write_in_place(void) {
    const kvc_rows_in in = {
        .struct_size = sizeof in, .k = waited_rows, .v = waited_rows, .skip_missing = 1 /* while rows are moved */};
    return kvc_inject(shared, 0, 0, 0, 1 + pick(WAITED_ROWS), &in);
}

static int has_batch; /* whether sequence 0 is in the open batch */

/* Keys are not rewritten while their sequence is in a batch. */
static int32_t move_waited(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                           int32_t k_dim, int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    for (int i = pick(200); i > 0; i--) {
        sim_step();
        if (has_batch) wrong("a batch of a sequence is open while its keys are rewritten");
    }
    return 0;
}

/* Moves the last rows up by a position, and down again. */
static kvc_status move_keys(void) {
    const int32_t at = WAITED_ROWS / 2;
    const kvc_status status = kvc_shift(shared, 0, at, KVC_END, 1);
    return status ? status : kvc_shift(shared, 0, at, KVC_END, -1);
}

/* Begins a batch of a sequence, perhaps after others, and ends it. */
static kvc_status begin_in_turn(void) {
    static const int64_t ids[2][6] = {{0}, {1, 1, 1, 1, 1, 1}};
    const int id = pick(2);
    const kvc_begin_args args = {
        .struct_size = sizeof args, .num_tokens = 6, .seq_ids = ids[id], .timeout_ms = pick(2) - 1};
    kvc_batch *batch;
    beginning[me->number]++;
    const kvc_status status = kvc_begin_with(shared, &args, &batch);
    beginning[me->number]--;
    if (status) return status;
    has_batch = !id;
    for (int i = pick(20); i > 0; i--) sim_step();
    has_batch = 0;
    kvc_abort(batch);
    return KVC_OK;
}

static kvc_status move_together(void) { return kvc_compact(shared); }

static void *run_waiter(void *context) {
    static kvc_status (*const calls[])(void) = {copy_out,      copy_out,   copy_out,      weigh,
                                                weigh,         count_room, move_together, begin_in_turn,
                                                begin_in_turn, move_keys,  write_in_place};
    const unsigned may_be =
        1u << KVC_OK | 1u << KVC_ERR_BUSY | 1u << KVC_ERR_HELD | 1u << KVC_ERR_NOMEM | 1u << KVC_ERR_CANCELLED;
    me = context;
    while (calls_left-- > 0) {
        const kvc_status status = calls[pick(sizeof calls / sizeof *calls)]();
        if (!(may_be >> status & 1)) wrong("answers \"%s\"", kvc_strerror(status));
    }
    return NULL;
}

/* Makes a cache in which clients do nothing but wait for each other. */
static void make_shared(void) {
    const kvc_layer layer = {.num_kv_heads = 1,
                             .k_dim = WAITED_DIM,
                             .v_dim = WAITED_DIM,
                             .rope = {.kind = KVC_ROPE_FUNCTION, .shift = move_waited}};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &layer,
                               .layer_size = sizeof layer,
                               .num_layers = 1,
                               .block_size = 4,
                               .capacity = 100,
                               .num_threads = 1,
                               .poll = await_reader};
    const kvc_put_args put = {.struct_size = sizeof put, .k = waited_rows, .v = waited_rows};
    kvc_batch *batch;
    w.has_faults = 1;
    kvc_status status;
    UNTIL_MEMORY(status, kvc_cache_new(&config, &shared));
    if (!status) UNTIL_MEMORY(status, kvc_begin(shared, WAITED_ROWS, NULL, NULL, NULL, &batch));
    if (!status) UNTIL_MEMORY(status, kvc_put(batch, 0, &put));
    if (status || kvc_commit(batch)) wrong("there is no cache: %s", kvc_last_error());
}

/* Lets clients wait for each other, in some short runs. */
static void simulate_waits(uint64_t seed, int num_calls) {
    enum { RUNS = 16 };
    alarm(MOST_SECONDS);
    for (uint64_t i = 0; i < RUNS; i++) {
        pthread_t handles[WAITERS];
        const uint64_t own = seed * RUNS + i;
        const sim_options options = {own, faults & (int)(own * 0x9e3779b97f4a7c15 >> 57), 1 << 2 * (i % 5)};
        sim_begin(&options);
        for (int c = 0; c <= WAITERS; c++)
            clients[c] = (client){.number = c, .chance = {.state = own * 8 + (uint64_t)c}};
        me = &clients[WAITERS];
        w.seed = seed;
        calls_left = num_calls;
        make_shared();
        for (int c = 0; c < WAITERS; c++)
            while (sim_thread_create(&handles[c], NULL, run_waiter, &clients[c])) continue;
        for (int c = 0; c < WAITERS; c++) sim_thread_join(handles[c], NULL);
        sim_calm();
        if (kvc_validate(shared) || kvc_cache_free(shared)) wrong("%s", kvc_last_error());
    }
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
        (seed % 4 == 2 ? simulate_waits : simulate)(seed, num_calls);
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
