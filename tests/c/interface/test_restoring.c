/* kvc_restore evicts nothing if it is refused, and waits for rows that are written in place.  tests/world makes all
 * other calls while it reads. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "cache/waiting.h"
#include "support/keeping.h"
#include "support/pairs.h"
#include "support/saved.h"

enum { LENGTH = 60 };

/* Saves one sequence, 5, of LENGTH tokens in a full and a sliding layer. */
static saved long_state(void) {
    saved file;
    pair *p = limited_pair(0, 0, 0, 0);
    CHECK(pair_feed(p, 5, 0, LENGTH) == KVC_OK && save_all(p->cache, &file) == KVC_OK);
    pair_free(p);
    return file;
}

/* ---- refused ----------------------------------------------------------------------------------------------------- */

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

/* ---- beside rows that are written in place ----------------------------------------------------------------------- */

/* A file of sequence 5, whose rows begin to be written in place while it is read. */
typedef struct written_file {
    saved file; /* first, so that it is what saved_read gets */
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
    test_altered_evicts_nothing();
    test_written_in_place();
    return test_result();
}
