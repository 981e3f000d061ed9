/* openmp.h: the OpenMP runtime that the program, or another of its libraries such as torch, has loaded. */
#ifndef KVC_OPENMP_H
#define KVC_OPENMP_H

/* Looks for the runtime, unless it was found before. */
void kvc_openmp_find(void);

/* Whether the calling thread is in a parallel region of the program, whose other threads have the processors. */
int kvc_openmp_in_region(void);

/* Runs work(context) on each of up to num_threads threads of the runtime, the calling one among them; returns 0 at once
 * if no runtime was found. */
int kvc_openmp_run(void (*work)(void *context), void *context, int num_threads);

#endif
