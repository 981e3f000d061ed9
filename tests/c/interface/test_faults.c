/* A cache is made, and threads are started, while the nth request to the system fails: alone, with the next one, and
 * with all later ones.  n grows until no request fails.  tests/world makes all other calls so.
 *
 * Requests are for memory, pages, mutexes, signals, threads and handlers of fork().  The core's calls come to the
 * __wrap_ functions here: see compiling.py.
 * Not for Windows: calls of the system go through a table there, and cannot be diverted. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/parallel.h"
#include "support/memory.h"

static memory heap; /* its numbers are of all requests */

/* ---- requests of the core ---------------------------------------------------------------------------------------- */

static int64_t num_taken, mapped; /* blocks of the C library, and bytes of pages, that the core has */

static void *taken(void *p, size_t size) {
    num_taken += p != NULL;
    return p ? memset(p, 0xff, size) : NULL; /* nothing may count on zeros */
}

void *__wrap_malloc(size_t size) { return memory_refuses(&heap) ? NULL : taken(malloc(size), size); }

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
    return memory_refuses(&heap) ? NULL : taken(aligned_alloc(alignment, size), size);
}

void __wrap_free(void *p) {
    num_taken -= p != NULL;
    free(p);
}

static int64_t whole_pages(size_t size) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    return ((int64_t)size + page - 1) / page * page;
}

void *__wrap_mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    if (memory_refuses(&heap)) return MAP_FAILED;
    mapped += whole_pages(size);
    return mmap(at, size, protection, flags, file, offset);
}

int __wrap_munmap(void *at, size_t size) {
    mapped -= whole_pages(size);
    return munmap(at, size);
}

int __wrap_madvise(void *at, size_t size, int advice) {
    if (!memory_refuses(&heap)) return madvise(at, size, advice);
    errno = EINVAL;
    return -1;
}

int __wrap_pthread_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    return memory_refuses(&heap) ? ENOMEM : pthread_mutex_init(mutex, attributes);
}

int __wrap_pthread_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attributes) {
    return memory_refuses(&heap) ? ENOMEM : pthread_cond_init(cond, attributes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
    return memory_refuses(&heap) ? EAGAIN : pthread_create(thread, attributes, run, argument);
}

int __wrap_pthread_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void)) {
    return memory_refuses(&heap) ? ENOMEM : pthread_atfork(prepare, parent, child);
}

/* ---- calls that lack something ------------------------------------------------------------------------------------
 */

/* Whether the message of a call says what it lacked. */
static int names_lack(void) {
    return heap.failed && (strstr(kvc_last_error(), "out of memory") || strstr(kvc_last_error(), "no mutex"));
}

/* How many requests fail, one behind the other. */
enum { NUM_WAYS = 3 };
static const int in_a_row[NUM_WAYS] = {INT32_MAX, 2, 1};

/* A cache is made, with the program's allocator or the default one, in the first of which fork() learns of caches. */
static void test_cache_new(int has_allocator) {
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &(kvc_layer){.num_kv_heads = 1, .k_dim = 4, .v_dim = 4},
                               .layer_size = sizeof(kvc_layer),
                               .num_layers = 1,
                               .allocator = has_allocator ? &heap.allocator : NULL};
    kvc_cache *cache = NULL;
    int i = 0;
    memory_init(&heap);
    for (; memory_fail(&heap, i / NUM_WAYS, in_a_row[i % NUM_WAYS]), kvc_cache_new(&config, &cache) != KVC_OK; i++) {
        CHECK(!cache && heap.num == 0 && num_taken == 0 && names_lack());
        CHECK(i < 20 * NUM_WAYS);
    }
    CHECKF(i >= 3 * NUM_WAYS && heap.failed == 0, "%d", i);
    CHECK(kvc_cache_free(cache) == KVC_OK && heap.num == 0 && num_taken == 0);
}

static void count_task(void *context, int64_t i) {
    (void)i;
    atomic_fetch_add((atomic_int *)context, 1);
}

/* If the system refuses a thread, the other threads do its tasks; the next call asks again. */
static void test_threads(int num_threads) {
    memory_init(&heap);
    int num_refused = 0;
    for (int i = 0, met = 1; met; i++) {
        atomic_int num_done = 0;
        memory_fail(&heap, i / NUM_WAYS, in_a_row[i % NUM_WAYS]);
        kvc_parallel(num_threads, num_threads, count_task, &num_done);
        heap.is_failing = 0;
        CHECKF(num_done == num_threads, "%d tasks of %d", num_done, num_threads);
        num_refused += met = heap.failed > 0;
    }
    CHECKF(num_refused >= 3 * NUM_WAYS, "%d", num_refused); /* a mutex, a signal, a thread */
}

int main(void) {
    setenv("KVCACHE_THREADS", "own", 1);
    for (int num_threads = 2; num_threads < 5; num_threads++) test_threads(num_threads);
    for (int i = 0; i < 2; i++) test_cache_new(i);
    return test_result();
}
