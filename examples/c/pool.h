/* pool.h: threads that share the tasks of one job after the other; who asks for it is one of them. */
#ifndef POOL_H
#define POOL_H

#include <stdint.h>

typedef struct pool pool;
typedef void pool_task(void *context, int64_t i);

/* A pool of so many threads, the caller's included: threads of its own, or those of OpenMP.  NULL: there is no memory,
 * or the system gives no more threads.  To be freed by pool_free, which takes NULL too. */
pool *pool_new(int num_threads, int use_openmp);
void pool_free(pool *p);

/* Runs task(context, i) for each i in [0, num_tasks), lower ones first, and returns when all have ended. */
void pool_run(pool *p, pool_task *task, void *context, int64_t num_tasks);

#endif
