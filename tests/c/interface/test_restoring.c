/* kvc_restore beside other calls.  Nobody sees what a refused call has taken.  A clone that is made meanwhile has what
 * the cache holds, without the rows that are still being loaded. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "cache/waiting.h"
#include "support/keeping.h"
#include "support/pairs.h"
#include "support/saved.h"

enum { BLOCK = 4, LENGTH = 60, CAPACITY = 40 };

/* Saves one sequence, 5, of LENGTH tokens in a full and a sliding layer. */
static saved long_state(void) {
    saved file;
    pair *p = limited_pair(0, 0, 0, 0);
    CHECK(pair_feed(p, 5, 0, LENGTH) == KVC_OK && save_all(p->cache, &file) == KVC_OK);
    pair_free(p);
    return file;
}

/* ---- refused ----------------------------------------------------------------------------------------------------- */

typedef struct beside {
    kvc_cache *cache;
    atomic_int *stop;
} beside;

/* Looks at the cache, asks for as many tokens as fit beside the 10 there are, and copies it. */
static void *look(void *context) {
    const beside *b = context;
    int64_t ids[CAPACITY - 10] = {0};
    while (!atomic_load(b->stop)) {
        kvc_cache *clone = NULL;
        kvc_batch *batch = NULL;
        CHECKF(kvc_validate(b->cache) == KVC_OK, "%s", kvc_last_error());
        CHECKF(kvc_begin(b->cache, CAPACITY - 10, NULL, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
        kvc_abort(batch);
        CHECKF(kvc_cache_clone(b->cache, &clone) == KVC_OK, "%s", kvc_last_error());
        CHECKF(!clone || kvc_validate(clone) == KVC_OK, "%s", kvc_last_error());
        CHECK(!clone || kvc_cache_free(clone) == KVC_OK);
    }
    return NULL;
}

/* A state that passes the capacity, given again and again while another thread looks. */
static void test_refused(void) {
    saved file = long_state();
    const kvc_load_args args = load_args_of(&file);
    pair *p = limited_pair(0, 0, CAPACITY, 0);
    atomic_int stop = 0;
    beside b = {p->cache, &stop};
    pthread_t thread;
    CHECK(pair_feed(p, 0, 0, 10) == KVC_OK);
    CHECK(pthread_create(&thread, NULL, look, &b) == 0);
    for (int i = 0; i < (is_full() ? 10000 : 2000) && !test_failures; i++)
        CHECK_FAILS(kvc_restore(p->cache, &args), KVC_ERR_FULL, "loading", "capacity is 40");
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    free(file.bytes);
    CHECK(kvc_validate(p->cache) == KVC_OK);
    pair_free(p);
}

/* A state for which retained sequences must go: they do once all is read and checked, and not before. */
static void test_altered_evicts_nothing(void) {
    saved file = long_state();
    pair *p = limited_pair(0, 0, LENGTH + 4, 0);
    kvc_stats stats;
    CHECK(pair_feed(p, 2, 0, 12) == KVC_OK);
    for (int i = 0; i < 3; i++) CHECK(retain(p->cache, 2, 100 + i, 4 * i, 4 * i + 4) == KVC_OK);
    CHECK(kvc_clear_sequence(p->cache, 2) == KVC_OK);
    const int64_t nbytes = kvc_nbytes(p->cache);
    for (int is_altered = 1; is_altered >= 0; is_altered--) {
        saved copy = file;
        copy.bytes = malloc(file.size);
        memcpy(copy.bytes, file.bytes, file.size);
        copy.bytes[file.size * 3 / 4] ^= (char)is_altered; /* in the rows */
        const kvc_load_args args = load_args_of(&copy);
        CHECK(kvc_restore(p->cache, &args) == (is_altered ? KVC_ERR_FORMAT : KVC_OK));
        kvc_get_stats(p->cache, &stats, sizeof stats);
        CHECKF(is_altered ? stats.retained == 3 && !stats.rows_evicted : stats.retained < 3,
               "%lld are retained, %lld rows were evicted", (long long)stats.retained, (long long)stats.rows_evicted);
        CHECK(!is_altered || kvc_nbytes(p->cache) == nbytes);
        CHECK(kvc_validate(p->cache) == KVC_OK);
        free(copy.bytes);
    }
    free(file.bytes);
    pair_free(p);
}

/* ---- cloned ------------------------------------------------------------------------------------------------------ */

/* A file that is read while the cache it goes to is cloned, twice. */
typedef struct cloned_file {
    saved file; /* first, so that it is what saved_read gets */
    pair *p;
    kvc_cache *clones[2];
    int num_clones;
} cloned_file;

static int32_t read_and_clone(void *user, void *data, size_t size) {
    cloned_file *c = user;
    if (c->file.at > c->file.size / 2 && c->num_clones < 2) /* rows are being read */
        CHECK(kvc_cache_clone(c->p->cache, &c->clones[c->num_clones++]) == KVC_OK);
    return saved_read(user, data, size);
}

/* A clone takes no slot for what is being loaded beside it: all that it has is its sequences', and can be cleared. */
static void check_clone(const pair *p, kvc_cache *clone) {
    static pair copy;
    kvc_stats stats;
    copy = *p;
    copy.cache = clone;
    pair_check(&copy);
    CHECK(kvc_nbytes(clone) <= kvc_nbytes(p->cache));
    CHECK(kvc_clear(clone) == KVC_OK && kvc_validate(clone) == KVC_OK);
    kvc_get_stats(clone, &stats, sizeof stats);
    CHECKF(stats.live_slots == 0 && stats.blocks_in_use == 0, "%lld slots, %lld blocks", (long long)stats.live_slots,
           (long long)stats.blocks_in_use);
    pair_free(&copy);
}

/* With rows that two sequences share, rows that have expired, and blocks that only the state has. */
static void test_cloned(int is_altered) {
    cloned_file c = {.file = long_state(), .p = limited_pair(0, 0, 0, 0)};
    pair *p = c.p;
    CHECK(pair_feed(p, 0, 0, 11) == KVC_OK && kvc_fork(p->cache, 0, 1) == KVC_OK && pair_feed(p, 1, 11, 15) == KVC_OK);
    CHECK(pair_feed(p, 5, 0, 3) == KVC_OK && kvc_remove(p->cache, 0, 3, 6, 0) == KVC_OK);
    c.file.bytes[c.file.size * 3 / 4] ^= (char)is_altered; /* in the rows */
    kvc_load_args args = read_args_of(&c.file);
    args.read = read_and_clone;
    const kvc_status status = kvc_restore(p->cache, &args);
    CHECKF(status == (is_altered ? KVC_ERR_FORMAT : KVC_OK), "%s", kvc_strerror(status));
    for (int i = 0; i < 2; i++) check_clone(p, c.clones[i]);
    CHECK(kvc_validate(p->cache) == KVC_OK);
    free(c.file.bytes);
    pair_free(p);
}

/* ---- beside rows that are written in place ----------------------------------------------------------------------- */

/* A file of sequence 5, whose rows begin to be written in place while it is read. */
typedef struct written_file {
    saved file; /* first, as above */
    kvc_cache *cache;
    pthread_t thread;
    int has_begun;
    atomic_int is_done;
} written_file;

static void *end_writing(void *context) {
    written_file *w = context;
    usleep(20000); /* in which kvc_restore would return if it did not wait */
    kvc_mutex_lock(&w->cache->mutex);
    atomic_store(&w->is_done, 1);
    kvc_cache_end_in_place(w->cache, kvc_table_find(&w->cache->sequences, 5));
    kvc_mutex_unlock(&w->cache->mutex);
    return NULL;
}

static int32_t read_and_write(void *user, void *data, size_t size) {
    written_file *w = user;
    if (w->file.at > w->file.size / 2 && !w->has_begun++) {
        kvc_mutex_lock(&w->cache->mutex);
        kvc_cache_begin_in_place(w->cache, kvc_table_find(&w->cache->sequences, 5));
        kvc_mutex_unlock(&w->cache->mutex);
        CHECK(pthread_create(&w->thread, NULL, end_writing, w) == 0);
    }
    return saved_read(user, data, size);
}

/* kvc_restore waits for rows of a sequence that are being written before it replaces the sequence. */
static void test_written_in_place(void) {
    written_file w = {.file = long_state()};
    pair *p = limited_pair(0, 0, 0, 0);
    kvc_load_args args = read_args_of(&w.file);
    w.cache = p->cache;
    args.read = read_and_write;
    CHECK(pair_feed(p, 5, 0, 10) == KVC_OK);
    CHECKF(kvc_restore(p->cache, &args) == KVC_OK, "%s", kvc_last_error());
    CHECK(w.has_begun && atomic_load(&w.is_done));
    CHECK(pthread_join(w.thread, NULL) == 0 && kvc_seq_len(p->cache, 5, 0) == LENGTH);
    free(w.file.bytes);
    CHECKF(kvc_validate(p->cache) == KVC_OK, "%s", kvc_last_error());
    pair_free(p);
}

int main(void) {
    if (KVC_IS_BIG_ENDIAN) /* test_saved.c checks that states are refused */
        return 0;
    test_refused();
    test_altered_evicts_nothing();
    test_cloned(0);
    test_cloned(1);
    test_written_in_place();
    return test_result();
}
