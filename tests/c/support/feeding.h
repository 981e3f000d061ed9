/* feeding.h: caches in memory that may be told to fail, and tokens for them whose rows are no matter. */
#ifndef KVC_TEST_FEEDING_H
#define KVC_TEST_FEEDING_H

#include "support/memory.h"

enum { MOST_FED = 512 };

static memory heap;

/* Makes a cache of these layers in the heap; its blocks are of 4 tokens, unless `config` says otherwise. */
static inline kvc_cache *heap_cache(int num_layers, const kvc_layer *layers, kvc_config config) {
    memory_init(&heap);
    config.block_size = config.block_size ? config.block_size : 4;
    config.num_threads = 1;
    config.allocator = &heap.allocator;
    return cache_of(layers, num_layers, config);
}

/* Returns the max_bytes of a heap_cache that has room for `num` blocks of each layer.  No two layers share a group. */
static inline int64_t bytes_of_blocks(int num_layers, const kvc_layer *layers, kvc_config config, int64_t num) {
    enum { FED = 8 }; /* a layer with a stride may have no row for the first tokens */
    const int64_t seq_ids[FED] = {0};
    int64_t num_blocks, num_runs;
    kvc_block_info block;
    kvc_batch *batch = NULL;
    config.max_bytes = 0;
    kvc_cache *cache = heap_cache(num_layers, layers, config);
    int64_t bytes = kvc_nbytes(cache);
    CHECK(kvc_begin(cache, FED, NULL, seq_ids, NULL, &batch) == KVC_OK);
    for (int l = 0; l < num_layers; l++) {
        CHECK(kvc_blocks(cache, l, &block, sizeof block, 1, &num_blocks, NULL, sizeof(kvc_run_info), 0, &num_runs) ==
              KVC_OK);
        bytes += num * block.bytes;
    }
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return bytes;
}

/* Frees a cache.  Checks that it was valid, that it counts as many bytes as the heap, and that none is left. */
static inline void free_valid(kvc_cache *cache) {
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_nbytes(cache) == memory_bytes(&heap));
    CHECK(kvc_cache_free(cache) == KVC_OK && heap.num == 0);
}

/* Begins a batch of n tokens at the end of a sequence. */
static inline kvc_status begin_at_end(kvc_cache *cache, int64_t id, int32_t n, kvc_batch **batch) {
    int64_t seq_ids[MOST_FED];
    CHECK(n <= MOST_FED);
    for (int32_t i = 0; i < n; i++) seq_ids[i] = id;
    return kvc_begin(cache, n, NULL, seq_ids, NULL, batch);
}

/* Begins such a batch, and aborts it. */
static inline kvc_status try_batch(kvc_cache *cache, int64_t id, int32_t n) {
    kvc_batch *batch = NULL;
    const kvc_status status = begin_at_end(cache, id, n, &batch);
    kvc_abort(batch);
    return status;
}

/* Feeds n tokens to the end of a sequence, in one batch; rows are put in layers [0, num_layers). */
static inline kvc_status feed(kvc_cache *cache, int num_layers, int64_t id, int32_t n) {
    const kvc_put_args put = zero_rows(0, 0);
    kvc_batch *batch = NULL;
    const kvc_status status = begin_at_end(cache, id, n, &batch);
    if (status != KVC_OK) return status;
    for (int l = 0; l < num_layers; l++) CHECKF(kvc_put(batch, l, &put) == KVC_OK, "%s", kvc_last_error());
    return kvc_commit(batch);
}

#endif
