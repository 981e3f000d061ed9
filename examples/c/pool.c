#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

struct pool {
    pool_task *task; /* the job: only threads that have taken a task of it read these */
    void *context;
    int64_t num_tasks;
    atomic_llong left;   /* tasks that no thread has taken yet; may fall below 0 */
    atomic_int active;   /* threads that may have taken one */
    atomic_int sleepers; /* threads that want to be woken */
    atomic_int ending;
    pthread_mutex_t mutex; /* guards falling asleep and waking up only */
    pthread_cond_t wake;
    int num_threads, use_openmp;
    int num_started;
    pthread_t threads[]; /* [num_threads - 1] */
};

/* How often a thread looks for a task before it sleeps.  In a forward pass the next job is some microseconds away, and
 * waking a thread takes longer than most jobs. */
enum { LOOKS = 2000 };

static void pause_a_little(void) {
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_tasks(pool *p) {
    for (int64_t left; (left = atomic_fetch_sub(&p->left, 1)) > 0;) p->task(p->context, p->num_tasks - left);
}

/* Waits for tasks, and returns 1.  Returns 0 once the pool ends. */
static int wait_for_tasks(pool *p) {
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load(&p->left) > 0) return 1;
        pause_a_little();
    }
    pthread_mutex_lock(&p->mutex);
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->left) <= 0 && !atomic_load(&p->ending)) pthread_cond_wait(&p->wake, &p->mutex);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->mutex);
    return !atomic_load(&p->ending);
}

static void wake_all(pool *p) {
    if (!atomic_load(&p->sleepers)) return;
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
}

static void *work(void *context) {
    pool *p = context;
    while (wait_for_tasks(p)) {
        atomic_fetch_add(&p->active, 1);
        take_tasks(p);
        atomic_fetch_sub(&p->active, 1);
    }
    return NULL;
}

pool *pool_new(int num_threads, int use_openmp) {
    pool *p = calloc(1, sizeof *p + (size_t)num_threads * sizeof *p->threads);
    if (!p) return NULL;
    p->num_threads = num_threads;
    p->use_openmp = use_openmp;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (; !use_openmp && p->num_started < num_threads - 1; p->num_started++)
        if (pthread_create(&p->threads[p->num_started], NULL, work, p) != 0) {
            pool_free(p);
            return NULL;
        }
    return p;
}

void pool_free(pool *p) {
    if (!p) return;
    pthread_mutex_lock(&p->mutex);
    atomic_store(&p->ending, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    for (int i = 0; i < p->num_started; i++) pthread_join(p->threads[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}

/* Waits only for threads that have counted themselves active.  A thread that does so later finds no task.  So a thread
 * that the system does not run delays nobody. */
void pool_run(pool *p, pool_task *task, void *context, int64_t num_tasks) {
    if (p->num_threads == 1 || num_tasks == 1) {
        for (int64_t i = 0; i < num_tasks; i++) task(context, i);
        return;
    }
#if defined(_OPENMP)
    if (p->use_openmp) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(p->num_threads)
        for (int64_t i = 0; i < num_tasks; i++) task(context, i);
        return;
    }
#endif
    p->task = task;
    p->context = context;
    p->num_tasks = num_tasks;
    atomic_store(&p->left, num_tasks);
    wake_all(p);
    take_tasks(p);
    for (int looks = 0; atomic_load(&p->active); looks++) {
        pause_a_little();
        if (looks > LOOKS) sched_yield();
    }
}
