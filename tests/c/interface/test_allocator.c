/* A cache calls its allocator with the mutex held, unless the cache is being made or freed.  So the allocator needs no
 * lock. */
#define _POSIX_C_SOURCE 200809L
#include "base/threads.h"
#include "cache/cache.h"
#include "support/feeding.h"
#include "support/pairs.h"
#include "support/saved.h"

static kvc_cache *watched; /* NULL: none yet, or it is being freed */
static int num_watched;

/* Checks that some call holds the mutex of the watched cache. */
static void watch(void) {
    if (!watched) return;
    const int is_free = kvc_mutex_try_lock(&watched->mutex);
    if (is_free) kvc_mutex_unlock(&watched->mutex);
    CHECKF(!is_free, "the mutex is not held");
    num_watched++;
}

static void *watched_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    watch();
    return memory_alloc(user, size, alignment, hint);
}

static void watched_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    watch();
    memory_free(user, start, size, hint);
}

static void watched_purge(void *user, void *start, size_t size) {
    (void)user, (void)start, (void)size;
    watch();
}

enum { DIM = 32, NUM_TOKENS = 5, ENCODED = 40 };

static float rows[512][DIM];

/* A layer that sees everything, a window, an encoder's. */
static const kvc_layer three_layers[] = {
    {.num_kv_heads = 1,
     .k_dim = DIM,
     .v_dim = DIM,
     .rope = {KVC_ROPE_FREQUENCIES, .num_freqs = 4, .inv_freq = any_angles}},
    {.num_kv_heads = 1,
     .k_dim = DIM,
     .v_dim = DIM,
     .policy = {KVC_SLIDING, .window = 6, .num_sink_tokens = 1},
     .rope = {KVC_ROPE_FREQUENCIES, .num_freqs = 4, .inv_freq = any_angles}},
    {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = {KVC_CROSS, .max_len = ENCODED}},
};

/* A batch of one pass, attended over in each way. */
static void pass(kvc_cache *cache, uint8_t is_unstored) {
    uint8_t unstored[NUM_TOKENS];
    memset(unstored, is_unstored, sizeof unstored);
    const kvc_begin_args args = {.struct_size = sizeof args, .num_tokens = NUM_TOKENS, .unstored = unstored};
    kvc_put_args put = {.struct_size = sizeof put, .k = rows, .v = rows};
    kvc_batch *batch = NULL;
    CHECK(kvc_begin_with(cache, &args, &batch) == KVC_OK);
    for (int l = 0; l < 3; l++) {
        put.num_tokens = l == 2 ? ENCODED : 0;
        CHECKF(kvc_put(batch, l, &put) == KVC_OK, "%s", kvc_last_error());
        const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .layer = l, .num_heads = 1};
        const kvc_attend_args attend = {.struct_size = sizeof attend, .q = rows, .out = rows[256]};
        kvc_plan *plan = NULL;
        CHECKF(kvc_attend(batch, &plan_args, &attend) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
        for (int64_t i = 0; i < kvc_plan_num_tasks(plan); i++) CHECK(kvc_plan_run(plan, l, &attend, i) == KVC_OK);
        kvc_plan_free(plan);
    }
    CHECK(kvc_commit(batch) == KVC_OK);
}

static void edit(kvc_cache *cache) {
    const kvc_rows_in in = {.struct_size = sizeof in, .k = rows, .v = rows};
    const kvc_rows_out out = {.struct_size = sizeof out, .k = rows, .k_row_stride = sizeof *rows};
    kvc_span spans[64];
    int64_t num;
    kvc_hold *hold = NULL;
    CHECK(kvc_fork(cache, 0, 1) == KVC_OK && kvc_remove(cache, 1, 3, 9, 1) == KVC_OK);
    CHECK(kvc_gather(cache, 1, 0, 0, 5, &out) == KVC_OK);
    CHECKF(kvc_spans(cache, 1, 0, spans, sizeof *spans, 64, &num, &hold) == KVC_OK, "%s", kvc_last_error());
    kvc_hold_free(hold);
    CHECK(kvc_inject(cache, 1, 0, 0, 5, &in) == KVC_OK);
    CHECK(kvc_reserve(cache, 0, 50) == KVC_OK && kvc_compact(cache) == KVC_OK);
}

static void save_and_restore(kvc_cache *cache) {
    saved file;
    CHECK(save_all(cache, &file) == KVC_OK);
    kvc_load_args args = {.struct_size = sizeof args, .read = saved_read, .user = &file, .size = (int64_t)file.size};
    CHECKF(kvc_restore(cache, &args) == KVC_OK, "%s", kvc_last_error());
    args.read = NULL;
    args.data = file.bytes;
    CHECK(kvc_restore(cache, &args) == KVC_OK);
    free(file.bytes);
}

/* A loaded cache takes its memory from the allocator of its configuration. */
static void load_elsewhere(kvc_cache *cache) {
    static memory elsewhere;
    const kvc_config config = {.struct_size = sizeof config, .allocator = &elsewhere.allocator};
    kvc_cache *loaded = NULL;
    saved file;
    memory_init(&elsewhere);
    CHECK(save_all(cache, &file) == KVC_OK);
    kvc_load_args args = load_args_of(&file);
    args.config = &config;
    CHECKF(kvc_load(&args, &loaded) == KVC_OK, "%s", kvc_last_error());
    free(file.bytes);
    CHECK(elsewhere.num > 0 && kvc_cache_free(loaded) == KVC_OK && elsewhere.num == 0);
}

int main(void) {
    memory_init(&heap);
    heap.allocator.alloc = watched_alloc;
    heap.allocator.free = watched_free;
    heap.allocator.purge = watched_purge;
    watched =
        cache_of(three_layers, 3, (kvc_config){.block_size = 4, .max_bytes = 1 << 22, .allocator = &heap.allocator});
    for (int i = 0; i < 6; i++) pass(watched, 0);
    edit(watched);
    save_and_restore(watched);
    load_elsewhere(watched);
    pass(watched, 1);
    CHECK(kvc_clear(watched) == KVC_OK && kvc_compact(watched) == KVC_OK);
    kvc_cache *cache = watched;
    CHECK(num_watched > 100);
    watched = NULL;
    free_valid(cache);
    return test_result();
}
