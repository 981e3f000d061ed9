/* parallel.h: runs tasks on several threads: the caller's, and OpenMP's or workers of this library. */
#ifndef KVC_PARALLEL_H
#define KVC_PARALLEL_H

#include <stdint.h>

#include "base/compiler.h"

/* Runs task(context, i) for every i in [0, num_tasks), on at most num_threads threads, in any order.  Runs serially
 * while another call has the threads, in the child of a fork(), and in a parallel region of the program's OpenMP. */
void kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i), void *context);

/* Returns how many threads `work` is worth: one, if less than `least`, as waking others takes longer than they save. */
static inline int32_t kvc_threads_for(double work, double least, int32_t num_threads) {
    return work < least && !KVC_BUGGIFY() ? 1 : num_threads;
}

#endif
