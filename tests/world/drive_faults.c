/* drive_faults.c: one thread calls, and each request of each call to the system fails once: then nothing has changed.
 * Requests are for memory, pages, advice on pages, mutexes, signals and threads.
 *
 *     drive_faults --seed 1 --runs 10 --calls 100
 */
#define _DEFAULT_SOURCE
#include "clock.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

int __wrap_clock_gettime(clockid_t which, struct timespec *now); /* clock.h */

/* The core's calls come here instead (tests/support/compiling.py). */
void *__wrap_malloc(size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset);
int __wrap_madvise(void *at, size_t size, int advice);
int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

void *__wrap_malloc(size_t size) { return request_fails() ? NULL : malloc(size); }

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return request_fails() ? NULL : aligned_alloc(alignment, size);
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    return request_fails() ? MAP_FAILED : mmap(at, size, protection, flags, file, offset);
}

int __wrap_madvise(void *at, size_t size, int advice) {
    if (!request_fails()) return madvise(at, size, advice);
    errno = EINVAL;
    return -1;
}

int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    return request_fails() ? ENOMEM : pthread_mutex_init(mutex, attributes);
}

int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes) {
    return request_fails() ? ENOMEM : pthread_cond_init(cond, attributes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return request_fails() ? EAGAIN : pthread_create(thread, attributes, run, argument);
}

int main(int argc, char **argv) {
    setenv("KVCACHE_THREADS", "own", 1);
    drive.faults = 2;
    return run_all(argc, argv, 100, run_alone);
}
