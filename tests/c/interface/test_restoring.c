/* kvc_restore beside other calls: what a call that is refused has taken is seen by nobody. */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "support/pairs.h"
#include "support/saved.h"

enum { BLOCK = 4, LONG = 60, CAPACITY = 40 };

/* Saves one sequence, 5, of LONG tokens in a full and a sliding layer. */
static saved long_state(void)
{
    saved file;
    pair *p = limited_pair(0, 0, 0, 0);
    CHECK(pair_feed(p, 5, 0, LONG) == KVC_OK && save_all(p->cache, &file) == KVC_OK);
    pair_free(p);
    return file;
}

/* ---- refused ----------------------------------------------------------------------------------------------------- */

typedef struct beside {
    kvc_cache *cache;
    atomic_int *stop;
} beside;

/* Looks at the cache, asks for as many tokens as fit beside the 10 there are, and copies it. */
static void *look(void *context)
{
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
static void test_refused(void)
{
    saved file = long_state();
    const kvc_load_args args = load_args_of(&file);
    pair *p = limited_pair(0, 0, CAPACITY, 0);
    atomic_int stop = 0;
    beside b = {p->cache, &stop};
    pthread_t thread;
    CHECK(pair_feed(p, 0, 0, 10) == KVC_OK);
    CHECK(pthread_create(&thread, NULL, look, &b) == 0);
    for (int i = 0; i < (is_quick() ? 2000 : 10000) && !test_failures; i++)
        CHECK_FAILS(kvc_restore(p->cache, &args), KVC_ERR_FULL, "loading", "capacity is 40");
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    free(file.bytes);
    CHECK(kvc_validate(p->cache) == KVC_OK);
    pair_free(p);
}

int main(void)
{
    if (KVC_IS_BIG_ENDIAN) /* test_saved.c checks that states are refused */
        return 0;
    test_refused();
    return test_result();
}
