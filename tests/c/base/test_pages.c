/* OS pages that are taken and joined while nobody holds the mutex.  This program's own madvise stands in for the
 * system's: what another thread might do in the middle of a step is done there, at that moment.
 * Not for Windows: no page is collapsed there. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "base/pages.h"
#include "space/limits.h"
#include "support/test.h"

enum { COLLAPSE = 25, POPULATE_WRITE = 23, TOKENS = 4096, DIM = 128, HEADS = 4, HUGE = 2 << 20 };

static kvc_cache *watched; /* its mutex must be free at each step */
typedef void act(void);
static _Atomic(act *) meanwhile; /* done in the next step, once */
static atomic_int num_collapsed, num_taken;
static atomic_int is_alone = 1; /* no other thread is running */
static int no_populate;

enum { MOST_COLLAPSED = 4096 };
static uintptr_t collapsed[MOST_COLLAPSED]; /* the huge pages that a test of shares has seen collapsed */
static int num_noted = -1;                  /* of these; -1: they are not noted */

/* Notes the huge pages of a range.  Nearly all OS pages of each must be there, so that collapsing takes no memory. */
static void note_collapsed(void *p, size_t size, const unsigned char *there, size_t num_pages) {
    size_t num_there = 0;
    for (size_t i = 0; i < num_pages; i++) num_there += there[i] & 1;
    if (num_noted < 0) return;
    CHECKF(num_there >= num_pages - num_pages / 16, "%zu of %zu pages are there", num_there, num_pages);
    for (uintptr_t page = (uintptr_t)p; page < (uintptr_t)p + size; page += HUGE) {
        int i = 0;
        while (i < num_noted && collapsed[i] != page) i++;
        CHECK(i < MOST_COLLAPSED);
        if (i == num_noted) collapsed[num_noted++] = page;
    }
}

/* Forgets the huge pages of which a part is given back. */
static void forget_collapsed(void *p, size_t size) {
    for (int i = num_noted; i-- > 0;)
        if (collapsed[i] < (uintptr_t)p + size && (uintptr_t)p < collapsed[i] + HUGE)
            collapsed[i] = collapsed[--num_noted];
}

int madvise(void *p, size_t size, int advice) {
    if (num_noted > 0 && advice == MADV_DONTNEED) forget_collapsed(p, size);
    if (advice != COLLAPSE && advice != POPULATE_WRITE) return (int)syscall(SYS_madvise, p, size, advice);
    num_collapsed += advice == COLLAPSE;
    num_taken += advice == POPULATE_WRITE;
    if (watched && is_alone) {
        CHECKF(pthread_mutex_trylock(&watched->mutex) == 0, "a step holds the mutex");
        pthread_mutex_unlock(&watched->mutex);
    }
    act *then = atomic_exchange(&meanwhile, NULL);
    if (then) then();
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), num_pages = (size + page - 1) / page;
    unsigned char *there = malloc(num_pages + 1);
    CHECKF(mincore((void *)((uintptr_t)p / page * page), size, there) == 0, "the memory of a step was given back");
    if (advice == COLLAPSE) note_collapsed(p, size, there, num_pages);
    free(there);
    if (advice == POPULATE_WRITE && no_populate) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_madvise, p, size, advice);
}

static kvc_cache *new_cache(int32_t block_size, int64_t max_bytes) {
    const kvc_layer layer = {.num_kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16};
    const kvc_layer layers[2] = {layer, layer};
    kvc_cache *cache = cache_of(layers, 2, (kvc_config){.block_size = block_size, .max_bytes = max_bytes});
    num_collapsed = num_taken = 0;
    return watched = cache;
}

static void free_cache(kvc_cache *cache) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(!cache->memory.works && kvc_cache_free(cache) == KVC_OK);
    watched = NULL;
}

/* All elements of rows at position i are value_at(i), which has no byte of 0. */
static uint16_t value_at(int64_t i) { return (uint16_t)(257 * (1 + (i & 15))); }

static void put(kvc_batch *batch, int32_t n, int32_t position) {
    static uint16_t rows[TOKENS][HEADS][DIM];
    for (int32_t i = 0; i < n; i++)
        for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < DIM; d++) rows[i][h][d] = value_at(position + i);
    const kvc_put_args args = {.struct_size = sizeof args,
                               .num_tokens = n,
                               .k = rows,
                               .v = rows,
                               .k_type = KVC_F16,
                               .v_type = KVC_F16,
                               .k_token_stride = sizeof *rows,
                               .k_head_stride = sizeof **rows,
                               .v_token_stride = sizeof *rows,
                               .v_head_stride = sizeof **rows};
    for (int l = 0; l < 2; l++) CHECKF(kvc_put(batch, l, &args) == KVC_OK, "%s", kvc_last_error());
}

static kvc_batch *begin(kvc_cache *cache, int64_t id, int32_t n) {
    static int64_t ids[TOKENS];
    kvc_batch *batch = NULL;
    for (int32_t i = 0; i < n; i++) ids[i] = id;
    CHECKF(kvc_begin(cache, n, NULL, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

static void feed(kvc_cache *cache, int64_t id, int32_t n) {
    const int32_t position = kvc_next_position(cache, id);
    kvc_batch *batch = begin(cache, id, n);
    put(batch, n, position);
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

static void check_rows(kvc_cache *cache, int64_t id, int32_t n) {
    kvc_run run;
    CHECKF(kvc_seq_len(cache, id, -1) == n, "%d rows, not %d", (int)kvc_seq_len(cache, id, -1), n);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, id);
    const kvc_run *end = sequence ? kvc_runs_end(sequence->runs) : NULL;
    int64_t at = 0;
    for (const kvc_run *r = sequence ? kvc_runs_begin(sequence->runs) : NULL; r < end; r++)
        for (run = *r; run.count > 0; run.count--, run.slot++, at++)
            for (int l = 0; l < 2; l++)
                for (int h = 0; h < HEADS; h++) {
                    const kvc_layout *to = &cache->layouts[cache->layout_of[l]];
                    uint16_t k, v;
                    memcpy(&k, kvc_key_at(to, run.block, run.slot, h), sizeof k);
                    memcpy(&v, kvc_value_at(to, run.block, run.slot, h), sizeof v);
                    CHECKF(k == value_at(at) && v == k, "slot %d", run.slot);
                }
}

/* ---- joining ----------------------------------------------------------------------------------------------------- */

static void ask(void) {
    CHECK(kvc_nbytes(watched) > 0 && kvc_seq_len(watched, 0, -1) == TOKENS && kvc_validate(watched) == KVC_OK);
}

static void clear(void) { CHECK(kvc_clear(watched) == KVC_OK); }

static void commit_another(void) { feed(watched, 1, 600); }

static void remove_some(void) { CHECK(kvc_truncate(watched, 0, 100) == KVC_OK); }

/* Gives back what it may, as a cache with max_bytes does. */
static void give_back(void) {
    clear();
    pthread_mutex_lock(&watched->mutex);
    kvc_give_back(watched, 0);
    const int32_t left = watched->pools[0].num_blocks;
    pthread_mutex_unlock(&watched->mutex);
    CHECKF(left > 0, "the block that was being worked on was given back");
}

static void purge(void) {
    remove_some();
    pthread_mutex_lock(&watched->mutex);
    kvc_give_back(watched, 0);
    pthread_mutex_unlock(&watched->mutex);
}

static void test_join(int32_t block_size) {
    act *const all[] = {ask, clear, commit_another, remove_some, give_back, purge};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        kvc_cache *cache = new_cache(block_size, 0);
        meanwhile = all[i];
        feed(cache, 0, TOKENS);
        CHECKF(num_collapsed > (i == 0) && !meanwhile, "blocks of %d: %d joined", block_size, num_collapsed);
        const int32_t left = (int32_t)kvc_seq_len(cache, 0, -1);
        check_rows(cache, 0, left);
        feed(cache, 0, 32);
        check_rows(cache, 0, left + 32);
        CHECK(kvc_clear(cache) == KVC_OK && kvc_compact(cache) == KVC_OK);
        CHECKF(cache->pools[0].num_blocks == 0 && !cache->memory.slabs, "memory was not given back afterwards");
        free_cache(cache);
    }
}

static kvc_batch *another;

static void begin_another(void) { another = begin(watched, 1, 1024); }

/* Pages of a batch that is open are left to its end: nothing was written there yet. */
static void test_open_batch(int32_t block_size) {
    kvc_cache *cache = new_cache(block_size, 0);
    const kvc_pool *pool = &cache->pools[0];
    int32_t num_new = 0;
    meanwhile = begin_another;
    feed(cache, 0, TOKENS);
    for (const kvc_block *block = pool->first; block; block = block->listed.later)
        if (block->pages.epoch == pool->epoch) {
            num_new++;
            CHECKF(!block->pages.collapsed && !block->pages.collapse_next, "joined before it was written");
        }
    CHECK(num_new > 0);
    num_collapsed = 0;
    put(another, 1024, 0);
    CHECK(kvc_commit(another) == KVC_OK &&
          (num_collapsed > 0 || block_size > 1024)); /* the rows fill a page, or none */
    free_cache(cache);
}

/* ---- other threads ----------------------------------------------------------------------------------------------- */

static pthread_t other;

static void *free_it(void *cache) {
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return NULL;
}

static void *compact_it(void *cache) {
    CHECK(kvc_compact(cache) == KVC_OK);
    return NULL;
}

static void *begin_it(void *cache) {
    feed(cache, 1, 1024);
    return NULL;
}

/* Waits until the other thread waits for the step, or has come to its end. */
static void let_wait(void *(*what)(void *)) {
    is_alone = 0;
    CHECK(pthread_create(&other, NULL, what, watched) == 0);
    for (int64_t waits = 0; !waits;) {
        pthread_mutex_lock(&watched->mutex);
        waits = watched->waiting.num_waiting;
        pthread_mutex_unlock(&watched->mutex);
    }
}

static void join_other(void) {
    CHECK(pthread_join(other, NULL) == 0);
    is_alone = 1;
}

static void start_free(void) {
    kvc_cache *cache = watched;
    CHECK(kvc_clear(cache) == KVC_OK);
    let_wait(free_it);
    watched = NULL; /* from now on it may go with the end of the last step */
}

static void start_compact(void) {
    CHECK(kvc_truncate(watched, 0, 500) == KVC_OK);
    let_wait(compact_it);
}

/* There is room although what is being worked on cannot be given back: nobody waits for it. */
static void begin_meanwhile(void) {
    CHECK(kvc_clear(watched) == KVC_OK);
    is_alone = 0;
    CHECK(pthread_create(&other, NULL, begin_it, watched) == 0);
    join_other();
}

static void test_waiting(int32_t block_size) {
    kvc_cache *cache = new_cache(block_size, 0);
    meanwhile = start_free;
    feed(cache, 0, TOKENS);
    join_other();

    cache = new_cache(block_size, 0);
    meanwhile = start_compact;
    feed(cache, 0, TOKENS);
    join_other();
    check_rows(cache, 0, 500);
    free_cache(cache);

    cache = new_cache(block_size, (int64_t)TOKENS * HEADS * DIM * 8 + (4 << 20));
    meanwhile = begin_meanwhile;
    feed(cache, 0, TOKENS);
    check_rows(cache, 1, 1024);
    free_cache(cache);
}

static void *fork_it(void *cache) {
    const pid_t child = fork();
    if (child == 0) {
        watched = NULL;
        const int fails = kvc_validate(cache) != KVC_OK || kvc_clear(cache) != KVC_OK || kvc_compact(cache) != KVC_OK ||
                          kvc_cache_free(cache) != KVC_OK;
        _exit(fails);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    return NULL;
}

static void start_fork(void) { let_wait(fork_it); }

static void test_fork(void) {
    kvc_cache *cache = new_cache(64, 0);
    meanwhile = start_fork;
    feed(cache, 0, TOKENS);
    join_other();
    check_rows(cache, 0, TOKENS);
    free_cache(cache);
}

/* ---- reserving --------------------------------------------------------------------------------------------------- */

/* Whether each page of the rows of so many slots is there. */
static int is_resident(kvc_cache *cache, int32_t slots) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const kvc_pool *pool = cache->pools;
    for (const kvc_block *block = pool->first; block && slots > 0;
         block = block->listed.later, slots -= pool->block_size)
        for (int64_t r = 0; r < kvc_pool_num_regions(pool); r++) {
            const kvc_region at = kvc_pool_region(pool, r);
            const size_t used = at.row_bytes * (size_t)(slots < pool->block_size ? slots : pool->block_size);
            const uintptr_t start = (uintptr_t)(block->rows + at.offset);
            for (uintptr_t p = start / page * page; p < start + used; p += page) {
                unsigned char there;
                if (mincore((void *)p, 1, &there) || !(there & 1)) return 0;
            }
        }
    return 1;
}

static void take_slots(void) { feed(watched, 1, 200); }

static void test_reserve(int32_t block_size, int by_hand, act *then) {
    kvc_cache *cache = new_cache(block_size, 0);
    no_populate = by_hand;
    feed(cache, 0, 100);
    check_rows(cache, 0, 100);
    meanwhile = then;
    num_collapsed = num_taken = 0;
    CHECKF(kvc_reserve(cache, 0, TOKENS - 100) == KVC_OK, "%s", kvc_last_error());
    CHECKF(by_hand ? num_taken == 1 : num_taken > 0, "%d taken", num_taken);
    CHECK(then || is_resident(cache, TOKENS));
    check_rows(cache, 0, then == clear ? 0 : 100);
    CHECK(kvc_validate(cache) == KVC_OK);
    const int64_t nbytes = kvc_nbytes(cache);
    if (!then) {
        struct rusage before, after;
        kvc_batch *batch = begin(cache, 0, TOKENS - 100);
        CHECK(kvc_nbytes(cache) - nbytes < 1 << 16);
        put(batch, 1, 100); /* the arrays are there now */
        CHECK(kvc_commit_kept(batch, NULL, 0) == KVC_OK);
        batch = begin(cache, 0, TOKENS - 100);
        CHECK(kvc_set_num_threads(1) == KVC_OK); /* a thread that starts takes pages for its stack */
        getrusage(RUSAGE_SELF, &before);
        put(batch, TOKENS - 100, 100);
        getrusage(RUSAGE_SELF, &after);
        CHECK(kvc_set_num_threads(0) == KVC_OK);
        const long faults = after.ru_minflt - before.ru_minflt; /* a sanitizer has a byte of its own for each 8 */
        CHECKF(faults < kvc_nbytes(cache) / 4096 / 4, "%ld page faults", faults);
        num_collapsed = 0;
        CHECK(kvc_commit(batch) == KVC_OK);
        CHECKF(num_collapsed == 0, "%d pages were not joined before", num_collapsed);
        check_rows(cache, 0, TOKENS);
    }
    no_populate = 0;
    CHECK(kvc_clear(cache) == KVC_OK && kvc_compact(cache) == KVC_OK && cache->pools[0].num_blocks == 0);
    free_cache(cache);
}

/* ---- shares ------------------------------------------------------------------------------------------------------ */

/* Feeds n tokens whose rows are zeros, in batches of 512, then 64 more, one at a time. */
static void feed_zeros(kvc_cache *cache, int64_t id, int32_t n) {
    const kvc_layer *layer = cache->layers;
    for (int32_t done = 0, some; done < n + 64; done += some) {
        some = done < n ? (n - done < 512 ? n - done : 512) : 1;
        kvc_batch *batch = begin(cache, id, some);
        kvc_put_args args = zero_rows(0, some);
        args.k_type = layer->k_type;
        args.v_type = layer->v_type;
        for (int32_t l = 0; l < cache->num_layers; l++)
            CHECKF(kvc_put(batch, l, &args) == KVC_OK, "%s", kvc_last_error());
        CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    }
}

/* A cache of seven layers with eight heads.  Seven does not divide a huge page. */
static kvc_cache *seven_layers(int32_t type, int32_t dim, kvc_policy policy, kvc_config config) {
    const kvc_layer layer = {
        .num_kv_heads = 8, .k_dim = dim, .v_dim = dim, .k_type = type, .v_type = type, .policy = policy};
    const kvc_layer layers[7] = {layer, layer, layer, layer, layer, layer, layer};
    num_noted = 0;
    return watched = cache_of(layers, 7, config);
}

static void check_share(kvc_cache *cache, const char *what) {
    const double share = (double)num_noted * HUGE / (double)kvc_nbytes(cache);
    const kvc_layer *layer = cache->layers;
    CHECKF(share >= 0.85, "%s, %s, heads of %d, blocks of %d: %.2f", what, kvc_type_name(layer->k_type), layer->k_dim,
           kvc_block_size(cache), share);
}

static void test_share(int32_t type, int32_t dim, kvc_config config) {
    kvc_cache *cache = seven_layers(type, dim, (kvc_policy){0}, config);
    feed_zeros(cache, 0, TOKENS);
    check_share(cache, "one sequence");
    free_cache(cache);
}

/* A compaction fills the holes of half of the tokens, and leaves full blocks. */
static void test_share_of_compacted(int32_t type, int32_t block_size) {
    kvc_cache *cache = seven_layers(type, DIM, (kvc_policy){0}, (kvc_config){.block_size = block_size});
    feed_zeros(cache, 0, 2 * TOKENS);
    for (int32_t at = 0; at < TOKENS; at += 32)
        CHECKF(kvc_remove(cache, 0, at, at + 32, 0) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_compact(cache) == KVC_OK, "%s", kvc_last_error());
    feed_zeros(cache, 0, 0);
    check_share(cache, "compacted");
    free_cache(cache);
}

/* Each fork goes on in blocks of its own. */
static void test_share_of_forks(int32_t type, int64_t max_bytes) {
    kvc_cache *cache = seven_layers(type, DIM, (kvc_policy){0}, (kvc_config){.max_bytes = max_bytes});
    feed_zeros(cache, 0, TOKENS / 2 + 13);
    CHECKF(kvc_fork(cache, 0, 1) == KVC_OK, "%s", kvc_last_error());
    feed_zeros(cache, 0, TOKENS / 2);
    feed_zeros(cache, 1, TOKENS / 2);
    check_share(cache, max_bytes ? "forks under max_bytes" : "forks");
    CHECKF(kvc_truncate(cache, 0, TOKENS / 4) == KVC_OK, "%s", kvc_last_error());
    feed_zeros(cache, 0, TOKENS / 2);
    check_share(cache, max_bytes ? "truncated under max_bytes" : "truncated");
    free_cache(cache);
}

static void test_share_of_windows(int32_t type) {
    kvc_cache *cache = seven_layers(type, DIM, (kvc_policy){.kind = KVC_SLIDING, .window = TOKENS}, (kvc_config){0});
    feed_zeros(cache, 0, 3 * TOKENS);
    check_share(cache, "window");
    free_cache(cache);
}

/* Collapsed pages hold most rows and little else, whatever the type, the heads and the blocks.  The single block of a
 * sequence of floats has them once it is nearly full. */
static void test_shares(void) {
    static const int32_t types[] = {KVC_F16, KVC_INT8, KVC_Q4_0, KVC_Q8_0, KVC_INT4};
    for (int i = 0; i < (is_full() ? 5 : 3); i++) {
        const int32_t type = types[i];
        for (int32_t dim = 64; dim <= 128; dim += 64) {
            for (int32_t size = 64; size <= TOKENS; size *= 8) test_share(type, dim, (kvc_config){.block_size = size});
            test_share(type, dim, (kvc_config){.max_seq_len = TOKENS + 64, .max_sequences = 1});
            if (type == KVC_F16) continue;
            test_share(type, dim, (kvc_config){.max_seq_len = 1 << 20, .max_sequences = 1});
        }
        test_share_of_compacted(type, 64);
        test_share_of_compacted(type, 512);
        test_share_of_forks(type, 0);
        test_share_of_forks(type, 256 << 20);
        test_share_of_windows(type);
    }
    num_noted = -1;
}

/* ---- mapping ----------------------------------------------------------------------------------------------------- */

/* The pages that the process has mapped, and whether the system keeps no memory for the mapping of an address; 0 where
 * it does not say. */
static long num_mapped(void) {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%ld", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return pages;
}

static int is_unreserved(const void *p) {
    int is_it = 0, found = 0;
    char line[512];
    FILE *file = fopen("/proc/self/smaps", "r");
    while (file && fgets(line, sizeof line, file)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) is_it = begin <= (uintptr_t)p && (uintptr_t)p < end;
        if (is_it && !strncmp(line, "VmFlags:", 8)) found = strstr(line, " nr") != NULL;
    }
    if (file) fclose(file);
    return found;
}

/* A mapping with room for a huge page begins where a huge page can begin, and nothing beside it stays mapped.  The
 * system reserves no memory for it, because it may be longer than the memory. */
static void test_map(void) {
    static const size_t sizes[] = {1, HUGE - 1, HUGE, HUGE + 1, 2 * HUGE};
    const long before = num_mapped();
    for (int round = 0; round < 100; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            char *p = kvc_pages_map(sizes[i]);
            CHECK(p && (sizes[i] < HUGE || (uintptr_t)p % HUGE == 0));
            p[0] = p[sizes[i] - 1] = 1;
            kvc_pages_unmap(p, sizes[i]);
        }
    /* An emulator maps some for itself; what lies beside the mappings would be some 100,000. */
    CHECKF(num_mapped() < before + 10000, "%ld pages stay", num_mapped() - before);
    const size_t page = kvc_os_page_size();
    void *p = kvc_pages_map(page);
    void *like = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(is_unreserved(p) == is_unreserved(like));
    munmap(like, page);
    kvc_pages_unmap(p, page);
}

/* Whether the system says that it took a page which is not there then, as an emulator of programs does. */
static int only_pretends(void) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char there = 0;
    void *p = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const int taken = syscall(SYS_madvise, p, page, POPULATE_WRITE) == 0;
    CHECK(mincore(p, page, &there) == 0);
    munmap(p, page);
    return taken && !(there & 1);
}

int main(void) {
    test_map();
    test_shares();
    for (int32_t block_size = 16; block_size <= TOKENS; block_size *= 4) {
        if (block_size > 32) test_join(block_size), test_open_batch(block_size);
        test_waiting(block_size > 32 ? block_size : 64);
        for (int by_hand = only_pretends(); by_hand < 2; by_hand++) {
            test_reserve(block_size, by_hand, NULL);
            test_reserve(block_size, by_hand, take_slots);
            test_reserve(block_size, by_hand, clear);
        }
    }
    test_fork();
    return test_result();
}

#else

int main(void) { return 0; }

#endif
