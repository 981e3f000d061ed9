/* openmp.c: see openmp.h.
 *
 * Threads of OpenMP spin after each parallel region, and so keep the processors.  Workers of our own beside torch's
 * team get them late: with 16,384 tokens a step of decoding took 1.23 times as long.  So where there is a team already,
 * our tasks run on it.  The runtime is found in the running process, and not linked to: without it nothing is lost.
 */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* RTLD_DEFAULT */
#endif
#include "base/openmp.h"

#if defined(__ELF__) && defined(__GNUC__)

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

/* Weak: before version 2.34, glibc has them in a library of their own. */
extern __typeof__(dlopen) dlopen __attribute__((weak));
extern __typeof__(dlsym) dlsym __attribute__((weak));

typedef int in_parallel_fn(void);
/* What compilers make of `#pragma omp parallel num_threads(n)`. */
typedef void parallel_fn(void (*work)(void *context), void *context, unsigned num_threads, unsigned flags);

static in_parallel_fn *_Atomic in_parallel;
static parallel_fn *_Atomic parallel;

void kvc_openmp_find(void) {
    if (!dlopen || !dlsym || atomic_load(&in_parallel)) return;
    /* torch's is not among the program's global symbols.  The handle is kept, and the runtime with it. */
    void *library = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library) library = RTLD_DEFAULT;
    in_parallel_fn *found;
    parallel_fn *found_parallel;
    *(void **)&found = dlsym(library, "omp_in_parallel");
    *(void **)&found_parallel = dlsym(library, "GOMP_parallel");
    if (found && found_parallel) {
        atomic_store(&parallel, found_parallel);
        atomic_store(&in_parallel, found);
    }
}

int kvc_openmp_in_region(void) {
    in_parallel_fn *const ask = atomic_load(&in_parallel);
    return ask && ask();
}

int kvc_openmp_run(void (*work)(void *context), void *context, int num_threads) {
    parallel_fn *const run = atomic_load(&parallel);
    if (!run) return 0;
    run(work, context, (unsigned)num_threads, 0);
    return 1;
}

#else

void kvc_openmp_find(void) {}
int kvc_openmp_in_region(void) { return 0; }
int kvc_openmp_run(void (*work)(void *context), void *context, int num_threads) {
    (void)work, (void)context, (void)num_threads;
    return 0;
}

#endif
