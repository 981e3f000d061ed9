/* Calls run in regions of OpenMP where the core has it, on a team that the program shares, with the same bits.  While
 * regions are held up, they run on the library's own threads.  Within the program's regions, and in a child after
 * fork(), they run on one thread.
 * Not for Windows: there is no fork(). */
#define _DEFAULT_SOURCE /* alarm, fork */
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/scene.h"

#if defined(_OPENMP)
#include <omp.h>

#include "base/parallel.h"
#include "base/threads.h"

/* NULL in a static program, in which a core without OpenMP finds no runtime. */
extern const char _DYNAMIC[] __attribute__((weak));

enum { DIM = 32, HEADS = 8, MOST = 1000 };

static char right[HEADS * DIM * sizeof(float)];

/* Whether attention gives the bits of one thread. */
static int attends_right(const stage *st) {
    question a = question_new(st, 0, 0, st->tokens.n);
    const int is_right = kvc_attend(st->batch, &a.plan, &a.args) == KVC_OK && !memcmp(a.out, right, sizeof right);
    question_free(&a);
    return is_right;
}

static void nap(long microseconds) {
    nanosleep(&(struct timespec){microseconds / 1000000, microseconds % 1000000 * 1000}, NULL);
}

static void note_team(void *teams, int64_t i) { ((int *)teams)[i] = omp_get_num_threads(); }

/* Returns the size of the team that runs tasks, 1 outside of regions; checks that it is the same for all. */
static int team_of(int num_threads) {
    static int teams[MOST];
    kvc_parallel(num_threads, MOST, note_team, teams);
    for (int i = 1; i < MOST; i++)
        CHECKF(teams[i] == teams[0], "task %d is run by a team of %d, and task 0 of %d", i, teams[i], teams[0]);
    return teams[0];
}

/* Waits until calls run in regions.  If another program holds up a region, the next calls run without regions. */
static void await_regions(int num_threads) {
    int team = 0;
    for (int i = 0; i < 1000 && (team = team_of(num_threads)) != num_threads; i++) nap(10000);
    CHECKF(team == num_threads, "a team of %d, not of %d", team, num_threads);
}

static void test_layers(void) {
    await_regions(3);
    await_regions(2);
    await_regions(3);
    CHECK(!strcmp(kvc_threading_layer(), "openmp"));
}

typedef struct held_up {
    atomic_int is_held; /* a thread of the team has begun a task, which takes long */
} held_up;

static void hold_up(void *context, int64_t i) {
    held_up *h = context;
    (void)i;
    if (omp_get_thread_num() != 0 && !atomic_exchange(&h->is_held, 1)) nap(30000);
    for (int n = 0; n < 100 && !atomic_load(&h->is_held); n++) nap(20);
}

/* After a region that waited for one of its threads, calls run without regions, and later in regions again. */
static void test_held_up(void) {
    held_up h;
    int without = 0;
    for (int i = 0; i < 30 && !without; i++) {
        atomic_init(&h.is_held, 0);
        kvc_parallel(2, 16, hold_up, &h);
        without = atomic_load(&h.is_held) && team_of(2) == 1;
    }
    CHECKF(without, "regions go on after one was held up (%d)", atomic_load(&h.is_held));
    await_regions(2);
}

/* The number of threads is what the runtime says to the calling thread. */
static void test_numbers(void) {
    const int before = omp_get_max_threads(), number = kvc_num_threads();
    omp_set_num_threads(1);
    CHECKF(kvc_num_threads() == 1, "%d", kvc_num_threads());
    CHECK(kvc_set_num_threads(3) == KVC_OK && kvc_num_threads() == 3);
    omp_set_num_threads(before);
    CHECK(kvc_set_num_threads(0) == KVC_OK && kvc_num_threads() == number);
}

int main(void) {
    scene s = plain_scene(2, HEADS / 2, DIM, 1100, 1);
    s.layer.k_type = s.layer.v_type = KVC_F16;
    stage *alone = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1});
    question a = question_new(alone, 0, 0, 1);
    CHECK(kvc_attend(alone->batch, &a.plan, &a.args) == KVC_OK);
    memcpy(right, a.out, sizeof right);
    question_free(&a);
    stage_free(alone);

    stage *st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 3});
    for (int i = 0; i < 20; i++) CHECK(attends_right(st));
    if (kvc_uses_openmp()) { /* else the core was compiled without it */
        test_layers();
        test_held_up();
        test_numbers();
    }

    CHECK(kvc_set_num_threads(3) == KVC_OK && kvc_num_threads() == 3);
    int num_right = 0;
    const int sees_regions = _DYNAMIC || kvc_uses_openmp();
#pragma omp parallel num_threads(4) reduction(+ : num_right)
    num_right += (kvc_num_threads() == 1 || !sees_regions) && attends_right(st);
    CHECKF(num_right == 4, "%d", num_right);

    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(60); /* threads that are not there would be waited for without end */
        end_child(kvc_num_threads() == 1 && attends_right(st) ? 0 : 1);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
    stage_free(st);
    return test_result();
}
#else
int main(void) { return 0; } /* a compiler without OpenMP */
#endif
