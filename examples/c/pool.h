/* pool.h: threads, among them the caller's, that share the tasks of one job after the other. */
#ifndef POOL_H
#define POOL_H

#include <stdint.h>

typedef struct pool pool;
typedef void pool_task(void *context, int64_t i);

/* Makes a pool of num_threads threads, the caller's included.  The threads are the pool's own, or OpenMP's.  Returns
 * NULL if there is no memory, or if the system refuses a thread.  pool_free frees it, and takes NULL too. */
pool *pool_new(int num_threads, int use_openmp);
void pool_free(pool *p);

/* Runs task(context, i) for each i in [0, num_tasks), lower ones first, and returns when all have ended. */
void pool_run(pool *p, pool_task *task, void *context, int64_t num_tasks);

#endif
