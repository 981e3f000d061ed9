/* parallel.h: runs tasks on several threads: the caller's, and OpenMP's or workers of this library. */
#ifndef KVC_PARALLEL_H
#define KVC_PARALLEL_H

#include <stdint.h>

/* Runs task(context, i) for every i in [0, num_tasks), on at most num_threads threads, in any order.  Runs serially
 * while another call, of this thread or another one, has the threads, and where kvc_is_alone(). */
void kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i), void *context);

#endif
