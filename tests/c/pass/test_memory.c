/* Memory that batches take: none where it was reserved for them. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/memory.h"
#include "support/pairs.h"

enum { BLOCK = 4, MOST = 64 };

static memory heap;

static kvc_cache *new_cache(int num_layers, const kvc_layer *layers)
{
    memory_init(&heap);
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = num_layers,
                               .block_size = BLOCK,
                               .num_threads = 1,
                               .allocator = &heap.allocator};
    kvc_cache *cache = NULL;
    CHECKF(kvc_cache_new(&config, &cache) == KVC_OK, "%s", kvc_last_error());
    return cache;
}

static void free_valid(kvc_cache *cache)
{
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_nbytes(cache) == memory_bytes(&heap));
    CHECK(kvc_cache_free(cache) == KVC_OK && heap.num == 0);
}

/* Feeds n tokens to the end of a sequence, in one batch. */
static kvc_status feed(kvc_cache *cache, int num_layers, int64_t id, int32_t n)
{
    static const float rows[4];
    const kvc_put_args put = {.struct_size = sizeof put, .k = rows, .v = rows};
    int64_t seq_ids[MOST];
    kvc_batch *batch;
    for (int32_t i = 0; i < n; i++)
        seq_ids[i] = id;
    const kvc_status status = kvc_begin(cache, n, NULL, seq_ids, NULL, &batch);
    if (status != KVC_OK)
        return status;
    for (int l = 0; l < num_layers; l++)
        CHECK(kvc_put(batch, l, &put) == KVC_OK);
    return kvc_commit(batch);
}

/* ---- reserved ---------------------------------------------------------------------------------------------------- */

/* Feeds, forks, retains, cuts and views a few sequences at random. */
static kvc_hold *random_scene(kvc_cache *cache, int num_layers)
{
    kvc_hold *hold = NULL;
    kvc_span spans[MOST];
    int64_t num, next_retained = 1000;
    for (int step = random_int(1, 16); step > 0; step--) {
        const int64_t id = random_int(1, 4);
        const int32_t next = kvc_next_position(cache, id);
        switch (random_int(0, 8)) {
        case 0: kvc_fork(cache, id, 1 + id % 3); break;
        case 1: kvc_truncate(cache, id, random_int(0, next + 1)); break;
        case 2: kvc_remove(cache, id, next / 3, next / 2, 0); break;
        case 3: CHECK(kvc_retain(cache, id, next_retained++, next / 2, next) == KVC_OK); break;
        case 4:
            if (!hold)
                CHECK(kvc_spans(cache, id, random_int(0, num_layers), spans, sizeof *spans, MOST, &num, &hold) == KVC_OK);
            break;
        default: feed(cache, num_layers, id, random_int(1, 9)); break;
        }
    }
    return hold;
}

/* However the tokens that memory was reserved for come in batches, and whoever holds the rows before them, they take no
 * more. */
static void test_reserved_beside_others(void)
{
    for (int round = 0; round < (is_quick() ? 6000 : 20000); round++) {
        const kvc_layer layers[] = {layer_with(chunked_policy(random_int(1, 12), random_int(0, 3) ? 0 : random_int(1, 6))),
                                    layer_with(sliding_policy(random_int(1, 9), random_int(0, 3), 0)), plain_layer};
        const int num_layers = random_int(1, 4);
        kvc_cache *cache = new_cache(num_layers, layers);
        kvc_hold *hold = random_scene(cache, num_layers);
        const int64_t id = random_int(1, 4);
        const int32_t most = random_int(1, 30);
        if (kvc_can_resume(cache, id, kvc_next_position(cache, id))) {
            CHECKF(kvc_reserve(cache, id, most) == KVC_OK, "%s", kvc_last_error());
            memory_fail_after(&heap, 0);
            for (int32_t rest = most, n; rest > 0; rest -= n) {
                n = random_int(1, rest + 1);
                const kvc_status status = feed(cache, num_layers, id, n);
                CHECKF(status == KVC_OK, "round %d: %d of %d, of %d: %s", round, n, rest, most, kvc_last_error());
                if (status != KVC_OK)
                    break;
            }
            memory_fail_after(&heap, -1);
        }
        kvc_hold_free(hold);
        free_valid(cache);
    }
}

int main(void)
{
    test_reserved_beside_others();
    return test_result();
}
