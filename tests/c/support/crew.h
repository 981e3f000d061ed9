/* crew.h: threads that run the tasks of one plan together. */
#ifndef KVC_TEST_CREW_H
#define KVC_TEST_CREW_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "kvcache.h"
#include "support/test.h"

enum { MOST_CREW = 8 };

typedef struct crew {
    kvc_plan *plan;
    int32_t layer;
    const kvc_attend_args *args;
    const int64_t *order; /* in which tasks are run; NULL: by number */
    atomic_int next;
} crew;

static inline void *crew_work(void *context) {
    crew *c = context;
    const int64_t num_tasks = kvc_plan_num_tasks(c->plan);
    for (int64_t i = atomic_fetch_add(&c->next, 1); i < num_tasks; i = atomic_fetch_add(&c->next, 1))
        CHECKF(kvc_plan_run(c->plan, c->layer, c->args, c->order ? c->order[i] : i) == KVC_OK, "%s", kvc_last_error());
    return NULL;
}

/* Runs all tasks on this number of threads, the caller's included. */
static inline void crew_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const int64_t *order,
                            int num_threads) {
    pthread_t threads[MOST_CREW];
    crew c = {.plan = plan, .layer = layer, .args = args, .order = order};
    for (int i = 1; i < num_threads; i++) CHECK(pthread_create(&threads[i], NULL, crew_work, &c) == 0);
    crew_work(&c);
    for (int i = 1; i < num_threads; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Returns 0 to n - 1 in random order; the caller frees it. */
static inline int64_t *shuffled(int64_t n) {
    int64_t *order = malloc((size_t)n * sizeof *order);
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = random_int(0, (int)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    return order;
}

#endif
