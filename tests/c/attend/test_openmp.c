/* A program with an OpenMP of its own: calls run on its threads, with the same bits; within its parallel regions they
 * run on one, and in a child after fork() too. */
#define _DEFAULT_SOURCE /* alarm, fork */
#include <sys/wait.h>
#include <unistd.h>

#include "support/scene.h"

#if defined(_OPENMP)
#include <omp.h>

#include "base/parallel.h"

enum { DIM = 32, HEADS = 8, MOST = 1000 };

static char right[HEADS * DIM * sizeof(float)];

static scene long_scene(void)
{
    return (scene){.layer = {.num_kv_heads = 2, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16},
                   .num_heads = HEADS,
                   .num_members = 1,
                   .members = {member_of_length(1100, 1)}};
}

/* Whether attention gives the bits of one thread. */
static int attends_right(const stage *st)
{
    question a = question_new(st, 0, 0, st->num_tokens);
    const int is_right =
        kvc_attend(st->batch, &a.plan, &a.args) == KVC_OK && !memcmp(a.out, right, sizeof right);
    question_free(&a);
    return is_right;
}

static void note_thread(void *threads, int64_t i) { ((int *)threads)[i] = omp_get_num_threads(); }

int main(void)
{
    scene s = long_scene();
    stage alone = stage_new(&s, &(setting){.block_size = 16, .num_threads = 1});
    question a = question_new(&alone, 0, 0, 1);
    CHECK(kvc_attend(alone.batch, &a.plan, &a.args) == KVC_OK);
    memcpy(right, a.out, sizeof right);
    question_free(&a);
    stage_free(&alone);

    static int threads[MOST];
    stage st = stage_new(&s, &(setting){.block_size = 16, .num_threads = 3});
    kvc_parallel(3, MOST, note_thread, threads);
    for (int i = 0; i < MOST; i++)
        CHECKF(threads[i] == 3, "task %d is run by a team of %d", i, threads[i]);
    for (int i = 0; i < 20; i++)
        CHECK(attends_right(&st));

    CHECK(kvc_set_num_threads(3) == KVC_OK && kvc_num_threads() == 3);
    int num_right = 0;
#pragma omp parallel num_threads(4) reduction(+ : num_right)
    num_right += kvc_num_threads() == 1 && attends_right(&st);
    CHECKF(num_right == 4, "%d", num_right);

    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(60); /* threads that are not there would be waited for without end */
        _exit(kvc_num_threads() == 1 && attends_right(&st) ? 0 : 1);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
    stage_free(&st);
    return test_result();
}
#else
int main(void) { return 0; } /* a compiler without OpenMP */
#endif
