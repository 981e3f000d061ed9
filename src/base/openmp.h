/* openmp.h: parallel regions of OpenMP, on one of the runtimes that the process has loaded. */
#ifndef KVC_OPENMP_H
#define KVC_OPENMP_H

#include <stdint.h>

/* How this library was compiled: the version of OpenMP, such as 201511, and the runtime that it links to.  With
 * KVC_OPENMP_OF_PROCESS it links to none, and has regions where other libraries of the process have brought one. */
#if !defined(_OPENMP) && defined(KVC_OPENMP_OF_PROCESS)
#define KVC_OPENMP_NAME "OpenMP of the process"
#elif !defined(_OPENMP)
#define KVC_OPENMP_NAME "no OpenMP"
#else
#define KVC_OPENMP_STRING_OF(x) #x
#define KVC_OPENMP_STRING(x) KVC_OPENMP_STRING_OF(x)
#if defined(__clang__)
#define KVC_OPENMP_NAME "OpenMP " KVC_OPENMP_STRING(_OPENMP) " (libomp)"
#elif defined(__GNUC__)
#define KVC_OPENMP_NAME "OpenMP " KVC_OPENMP_STRING(_OPENMP) " (libgomp)"
#else
#define KVC_OPENMP_NAME "OpenMP " KVC_OPENMP_STRING(_OPENMP)
#endif
#endif

/* Looks for runtimes that were loaded since the last call, and picks the one whose threads are to run regions: that
 * which other libraries of the process use already, else the one that this library links to.  Call it from one thread
 * at a time, and not while another forks. */
void kvc_openmp_find(void);

/* Whether this library has regions: it links to a runtime or has found one, and the process is no child of a fork(),
 * where the runtime would wait for threads of the parent.  A fork() before the library was loaded is seen on Linux
 * alone. */
int kvc_openmp_works(void);

/* Whether the calling thread is in a parallel region of the program that has several threads: the others have the
 * processors. */
int kvc_openmp_in_region(void);

/* How many threads a region may have that the calling thread begins: by omp_set_num_threads, which threadpoolctl calls
 * too, else OMP_NUM_THREADS or the number of processors; and by OMP_THREAD_LIMIT alone. */
int kvc_openmp_num_threads(void);
int kvc_openmp_thread_limit(void);

/* Returns how many places (OMP_PLACES) threads are bound to; 0 if they are not bound. */
int kvc_openmp_num_places(void);

/* Runs work(context) on each of up to num_threads threads, the calling one among them, and waits for all of them. */
void kvc_openmp_run(void (*work)(void *context), void *context, int num_threads);

#endif
