/* Parallel loops: each task runs once, on as many threads as were asked for, whoever calls, sleeps, forks or fails. */
#define _GNU_SOURCE /* RLIMIT_AS */
#include "base/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"
#include "support/test.h"

enum { MOST_TASKS = 1000, CALLERS = 4 };

/* ---- a job that looks at itself ---------------------------------------------------------------------------------- */

typedef struct job {
    atomic_int times[MOST_TASKS]; /* that each task ran */
    atomic_int num_running, most_running;
    atomic_int others;       /* tasks that ran on other threads than the caller's */
    atomic_int open_signals; /* tasks on such threads that a signal could interrupt */
    pthread_t caller;
    int nap; /* microseconds of each task */
} job;

static int runs_regions; /* of OpenMP, and not on the library's own threads */

static void nap(long microseconds) {
    nanosleep(&(struct timespec){microseconds / 1000000, microseconds % 1000000 * 1000}, NULL);
}

static void run_task(void *context, int64_t i) {
    job *j = context;
    int running = atomic_fetch_add(&j->num_running, 1) + 1, most = atomic_load(&j->most_running);
    while (running > most && !atomic_compare_exchange_weak(&j->most_running, &most, running));
    atomic_fetch_add(&j->times[i], 1);
    if (!pthread_equal(j->caller, pthread_self())) {
        sigset_t blocked;
        pthread_sigmask(SIG_BLOCK, NULL, &blocked);
        atomic_fetch_add(&j->others, 1);
        if (!sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGTERM) || !sigismember(&blocked, SIGALRM))
            atomic_fetch_add(&j->open_signals, 1);
    }
    if (j->nap) nap(j->nap);
    atomic_fetch_sub(&j->num_running, 1);
}

/* Runs a job; checks that every task ran once, on no more threads than it may have. */
static void run(job *j, int32_t num_threads, int64_t num_tasks, int nap_us) {
    memset(j, 0, sizeof *j);
    j->caller = pthread_self();
    j->nap = nap_us;
    kvc_parallel(num_threads, num_tasks, run_task, j);
    for (int64_t i = 0; i < MOST_TASKS; i++)
        CHECKF(j->times[i] == (i < num_tasks), "%d threads, %d tasks: task %d ran %d times", num_threads,
               (int)num_tasks, (int)i, j->times[i]);
    CHECKF(j->most_running <= (num_threads > 1 ? num_threads : 1), "%d threads: %d tasks at once", num_threads,
           j->most_running);
    CHECK(j->num_running == 0);
    CHECKF(runs_regions || j->open_signals == 0, "%d tasks could be interrupted by signals", j->open_signals);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

static void test_sizes(void) {
    static job j;
    static const int32_t threads[] = {-1, 0, 1, 2, 3, 8, 2, 17, 5};
    static const int64_t tasks[] = {0, 1, 2, 3, 7, 100, MOST_TASKS};
    for (size_t t = 0; t < sizeof threads / sizeof *threads; t++)
        for (size_t n = 0; n < sizeof tasks / sizeof *tasks; n++) run(&j, threads[t], tasks[n], 0);
}

/* Tasks that take a while run on other threads as well, at once and after workers have fallen asleep. */
static void test_other_threads_help(void) {
    static job j;
    static const long pauses[] = {0, 20, 60, 300, 3000, 0};
    for (size_t p = 0; p < sizeof pauses / sizeof *pauses; p++) {
        int others = 0;
        for (int i = 0; i < 100 && !others; i++) {
            nap(pauses[p]);
            run(&j, 3, 12, 500);
            others = j.others;
        }
        CHECKF(others > 0, "after %ld microseconds the caller is alone", pauses[p]);
    }
}

typedef struct held_up {
    pthread_t caller;
    atomic_int is_held; /* a worker has begun a task, which takes long */
} held_up;

static void hold_up(void *context, int64_t i) {
    held_up *h = context;
    (void)i;
    if (!pthread_equal(h->caller, pthread_self()) && !atomic_exchange(&h->is_held, 1)) nap(30000);
    for (int n = 0; n < 100 && !atomic_load(&h->is_held); n++) nap(20);
}

/* A worker that stops in the middle of one of many tasks is not asked for some time, and then helps again.  (Workers
 * take the place of a region that was held up, too.) */
static void test_held_up(void) {
    static job j;
    held_up h = {.caller = pthread_self()};
    int alone = 0, others = 0;
    for (int i = 0; i < 30 && !alone; i++) {
        h.is_held = 0;
        kvc_parallel(2, 16, hold_up, &h);
        run(&j, 2, 8, 300);
        alone = h.is_held && j.others == 0;
    }
    CHECKF(alone, "calls have workers after one was held up (%d)", h.is_held);
    for (int i = 0; i < 100 && !others; i++) {
        run(&j, 2, 8, 500);
        others = j.others;
    }
    CHECKF(others > 0, "the caller stays alone (%d)", h.is_held);
}

static void test_many_jobs(void) {
    static job j;
    for (int i = 0; i < (is_full() ? 20000 : 3000); i++) run(&j, random_int(2, 6), random_int(1, 12), 0);
}

/* A job within a task runs on the task's thread. */
static void run_nested(void *context, int64_t i) {
    job *jobs = context;
    run(&jobs[i], 4, 20, 0);
    CHECK(jobs[i].others == 0);
}

static void test_nested(void) {
    static job jobs[8];
    kvc_parallel(4, 8, run_nested, jobs);
}

static void *call_often(void *context) {
    for (int i = 0; i < 200; i++) run(context, 3, 20, i % 50 ? 0 : 20);
    return NULL;
}

/* Threads of the program call at the same time; one of these calls has the workers. */
static void test_callers(void) {
    static job jobs[CALLERS];
    pthread_t threads[CALLERS];
    for (int i = 0; i < CALLERS; i++) CHECK(!pthread_create(&threads[i], NULL, call_often, &jobs[i]));
    for (int i = 0; i < CALLERS; i++) CHECK(!pthread_join(threads[i], NULL));
}

/* The child has none of the workers, runs tasks by itself, and ends without waiting for them. */
static void test_fork(void) {
    static job j;
    run(&j, 4, 100, 0);
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(60);
        kvc_threads_forked(); /* what kvc_cache_new registers with the system */
        test_sizes();
        run(&j, 4, 12, 500);
        CHECK(j.others == 0 && kvc_num_threads() == 1);
        fflush(stdout);
        exit(test_result());
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %x", (unsigned)status);
    run(&j, 4, 100, 0);
}

#if defined(__has_feature)
#define HAS_FEATURE(name) __has_feature(name)
#else
#define HAS_FEATURE(name) 0
#endif
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !HAS_FEATURE(address_sanitizer) && !HAS_FEATURE(thread_sanitizer)
/* If the system gives no more threads, a call uses the threads that it has. */
static void test_too_few_threads(void) {
    static job j;
    long pages = 0;
    struct rlimit before;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld", &pages) == 1 && fclose(file) == 0);
    CHECK(!getrlimit(RLIMIT_AS, &before));
    const rlim_t few = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + (20 << 20); /* a few stacks */
    CHECK(!setrlimit(RLIMIT_AS, &(struct rlimit){few, before.rlim_max}));
    for (int i = 0; i < 3; i++) run(&j, 300, MOST_TASKS, 20);
    CHECK(!setrlimit(RLIMIT_AS, &before));
    run(&j, 20, MOST_TASKS, 0);
}
#else
static void test_too_few_threads(void) {}
#endif

/* ---- the number of threads --------------------------------------------------------------------------------------- */

/* Returns what a new process takes for the number of threads. */
static int threads_with(const char *environment) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) {
        if (environment)
            setenv("OMP_NUM_THREADS", environment, 1);
        else
            unsetenv("OMP_NUM_THREADS");
        end_child(kvc_num_threads() & 127);
    }
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* Call before anything asks for the number of threads, because it is read once.  If the text is no number, LLVM 14's
 * runtime takes whatever it finds in memory, and may end the process. */
static void test_environment(void) {
    static const struct {
        const char *value;
        int number; /* 0: the default */
    } cases[] = {
        {"5", 5},  {" 7 ", 7},  {"4,2", 4}, {"3 ,2", 3},
        {"0", 0},  {"4097", 0},
#if !defined(__clang__)
        {"+6", 6}, {"-2", 0},   {"", 0},    {"99999999999999999999", 0},
        {"x", 0},  {"3x", 0},   {",2", 0},
#endif
    };
    const int otherwise = threads_with(NULL);
    CHECK(otherwise >= 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int number = threads_with(cases[i].value);
        CHECKF(number == (cases[i].number ? cases[i].number : otherwise), "OMP_NUM_THREADS=%s: %d", cases[i].value,
               number);
    }
}

/* The same: own threads keep to OMP_THREAD_LIMIT as it is when they are first asked for; a runtime of OpenMP has read
 * it when the process began. */
static void test_thread_limit(void) {
    static const struct {
        const char *value;
        int32_t limit;
    } cases[] = {{"3", 3}, {"0", KVC_MOST_THREADS}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fflush(stdout);
        const pid_t pid = fork();
        if (pid == 0) {
            setenv("OMP_THREAD_LIMIT", cases[i].value, 1);
            end_child(kvc_thread_limit() != cases[i].limit);
        }
        int status = -1;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
        CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "OMP_THREAD_LIMIT=%s", cases[i].value);
    }
}

/* Returns the line of the first check that fails in a process whose parent asked for no layer; 0 if none does. */
static int check_layer_names(void) {
    const int has_openmp = !strstr(kvc_build_info(), "no OpenMP");
    setenv("KVCACHE_THREADS", "owned", 1);
    if (kvc_threading_layer() || kvc_uses_openmp()) return __LINE__;
    if (kvc_threads_check() != KVC_ERR_UNSUPPORTED || !strstr(kvc_last_error(), "KVCACHE_THREADS is owned"))
        return __LINE__;
    if (!has_openmp) {
        setenv("KVCACHE_THREADS", "openmp", 1);
        if (kvc_threads_check() != KVC_ERR_UNSUPPORTED) return __LINE__;
    }
    setenv("KVCACHE_THREADS", "own", 1);
    if (kvc_uses_openmp() || strcmp(kvc_threading_layer(), "own") || kvc_threads_check() != KVC_OK) return __LINE__;
    setenv("KVCACHE_THREADS", "owned", 1); /* a name that this build has is read once */
    return strcmp(kvc_threading_layer(), "own") || kvc_threads_check() != KVC_OK ? __LINE__ : 0;
}

static void test_layer_names(void) {
    fflush(stdout);
    const pid_t pid = fork();
    if (pid == 0) end_child(check_layer_names());
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECKF(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d", status);
}

/* Runs on the threads of the build, and then, if those are OpenMP's, this program again on its own. */
int main(int argc, char **argv) {
    (void)argc;
    if (HAS_FORK) test_environment();
    if (HAS_FORK) test_thread_limit();
    if (HAS_FORK) test_layer_names();
    runs_regions = kvc_uses_openmp();
    CHECK(!strcmp(kvc_threading_layer(), runs_regions ? "openmp" : "own"));
    test_sizes();
    test_other_threads_help();
    if (!runs_regions) test_held_up();
    test_many_jobs();
    test_nested();
    test_callers();
    if (HAS_FORK) test_fork();
    if (!runs_regions) test_too_few_threads();
    if (!runs_regions || test_result()) return test_result();
    fflush(stdout);
    setenv("KVCACHE_THREADS", "own", 1);
    execv(argv[0], argv);
    CHECKF(0, "%s is not run again", argv[0]);
    return test_result();
}
