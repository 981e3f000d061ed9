/* create.c: kvc_cache_new and kvc_cache_free.  A layer group is layers whose rows lie in the same blocks.  A rope is
 * how keys are rotated: layers with equal ropes share a copy of their frequencies.  A layer that shares another layer's
 * rows has that layer's group and layout. */
#include <string.h>

#include "kernels/dispatch.h"
#include "lifetime/atfork.h"
#include "cache/check.h"
#include "cache/config.h"
#include "cache/useful.h"
#include "rows/layout.h"
#include "prefix/prefix.h"
#include "space/limits.h"

/* ---- layer groups ------------------------------------------------------------------------------------------------ */

static int32_t add_group(kvc_cache *cache, const kvc_policy *policy) {
    cache->policies[cache->num_groups] = *policy;
    return cache->num_groups++;
}

/* Assigns a group to every layer.  Layers that keep tokens share a group if their policies are equal; these groups come
 * first, in the order of their first layers.  Each cross-attention layer has a group of its own, as its rows are put
 * and replaced separately; layers without attention share one group. */
static void find_groups(kvc_cache *cache) {
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const kvc_policy *policy = &cache->layers[i].policy;
        if (!kvc_policy_keeps_tokens(policy)) continue;
        int32_t g = 0;
        while (g < cache->num_groups && !kvc_policy_equal(&cache->policies[g], policy)) g++;
        cache->group_of[i] = g < cache->num_groups ? g : add_group(cache, policy);
    }
    cache->num_token_groups = cache->num_groups;
    for (int32_t i = 0, none = -1; i < cache->num_layers; i++) { /* none: the group of layers without attention */
        const kvc_policy *policy = &cache->layers[i].policy;
        if (kvc_policy_keeps_tokens(policy) || cache->layers[i].share) continue;
        const int is_none = policy->kind == KVC_NONE;
        cache->group_of[i] = is_none && none >= 0 ? none : add_group(cache, policy);
        if (is_none) none = cache->group_of[i];
    }
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].share) cache->group_of[i] = cache->group_of[kvc_source_of(cache, i)];
}

/* Lays out the blocks of each group, and makes its pool. */
static kvc_status init_groups(kvc_cache *cache, int32_t block_size) {
    int32_t next = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int32_t first = next,
                      size = cache->policies[g].kind == KVC_CROSS ? cache->policies[g].max_len : block_size;
        size_t block_bytes = 0;
        for (int32_t i = 0; i < cache->num_layers && cache->policies[g].kind != KVC_NONE; i++) {
            if (cache->group_of[i] != g || cache->layers[i].share) continue;
            const kvc_status status =
                kvc_layout_add(&cache->memory, &cache->layouts[next], &cache->layers[i], size, &block_bytes);
            if (status != KVC_OK) return status;
            cache->layout_of[i] = next++;
        }
        kvc_pool_init(&cache->pools[g], &cache->memory, g, size, &cache->layouts[first], next - first, block_bytes);
        kvc_useful_init(&cache->pools[g]);
        cache->pools[g].stride = kvc_policy_stride(&cache->policies[g]);
        cache->pools[g].strided_index = cache->num_strided;
        cache->num_strided += cache->pools[g].stride > 1;
    }
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].share) cache->layout_of[i] = cache->layout_of[kvc_source_of(cache, i)];
    return KVC_OK;
}

/* ---- ropes ------------------------------------------------------------------------------------------------------- */

/* Copies each distinct rope of kind KVC_ROPE_FREQUENCIES once: layers with equal ropes get the same index. */
static void find_ropes(kvc_cache *cache) {
    double *inv_freq = cache->ropes.inv_freqs;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        kvc_rope *rope = &cache->layers[i].rope;
        cache->ropes.of_layer[i] = -1;
        if (rope->kind != KVC_ROPE_FREQUENCIES) continue;
        if (!kvc_policy_keeps_tokens(&cache->layers[i].policy)) {
            *rope = (kvc_rope){0}; /* its keys never move; do not keep a pointer to the caller's array */
            continue;
        }
        int32_t r = 0;
        while (r < cache->ropes.num && !kvc_rope_equal(&cache->ropes.items[r], rope)) r++;
        cache->ropes.of_layer[i] = r;
        if (r == cache->ropes.num) {
            memcpy(inv_freq, rope->inv_freq, (size_t)rope->num_freqs * sizeof *inv_freq);
            cache->ropes.items[r] = *rope;
            cache->ropes.items[r].inv_freq = inv_freq;
            inv_freq += rope->num_freqs;
            cache->ropes.num++;
        }
        rope->inv_freq = cache->ropes.items[r].inv_freq;
    }
}

/* Returns the number of frequencies to allocate for the copies: at least as many as needed, and exactly as many if
 * layers with the same rope follow each other.  Ropes that find_ropes does not copy do not count. */
static uint64_t count_frequencies(const kvc_config *config) {
    uint64_t num = 0;
    kvc_rope before = {0};
    for (int32_t i = 0; i < config->num_layers; i++) {
        const kvc_layer layer = kvc_config_layer(config, i);
        if (layer.rope.kind != KVC_ROPE_FREQUENCIES || !kvc_policy_keeps_tokens(&layer.policy)) continue;
        if (!kvc_rope_equal(&layer.rope, &before)) num += (uint64_t)layer.rope.num_freqs;
        before = layer.rope;
    }
    return num;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Offsets of the arrays behind the struct, in one allocation of `size` bytes. */
typedef struct offsets {
    uint64_t layers, group_of, layouts, layout_of, rope_of, ropes, inv_freqs, policies, pools, size;
} offsets;

static offsets lay_out(uint64_t num_layers, uint64_t num_freqs) {
    offsets at = {.size = sizeof(kvc_cache)};
    at.layers = kvc_add_array(&at.size, num_layers * sizeof(kvc_layer));
    at.group_of = kvc_add_array(&at.size, num_layers * sizeof(int32_t));
    at.layouts = kvc_add_array(&at.size, num_layers * sizeof(kvc_layout));
    at.layout_of = kvc_add_array(&at.size, num_layers * sizeof(int32_t));
    at.rope_of = kvc_add_array(&at.size, num_layers * sizeof(int32_t));
    at.ropes = kvc_add_array(&at.size, (num_freqs ? num_layers : 0) * sizeof(kvc_rope));
    at.inv_freqs = kvc_add_array(&at.size, num_freqs * sizeof(double));
    at.policies = kvc_add_array(&at.size, num_layers * sizeof(kvc_policy));
    at.pools = kvc_add_array(&at.size, num_layers * sizeof(kvc_pool));
    return at;
}

static kvc_cache *new_cache(kvc_memory *memory, int32_t num_layers, uint64_t num_freqs) {
    const offsets at = lay_out((uint64_t)num_layers, num_freqs);
    char *start = kvc_memory_alloc(memory, at.size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!start) return NULL;
    kvc_cache *cache = memset(start, 0, sizeof *cache);
    cache->memory = *memory;
    cache->size = at.size;
    cache->layers = (void *)(start + at.layers);
    cache->group_of = (void *)(start + at.group_of);
    cache->layouts = (void *)(start + at.layouts);
    cache->layout_of = (void *)(start + at.layout_of);
    cache->ropes.of_layer = (void *)(start + at.rope_of);
    cache->ropes.items = (void *)(start + at.ropes);
    cache->ropes.inv_freqs = (void *)(start + at.inv_freqs);
    cache->policies = (void *)(start + at.policies);
    cache->pools = (void *)(start + at.pools);
    return cache;
}

static void free_cache(kvc_cache *cache) {
    kvc_memory memory = cache->memory; /* a copy, as the original is part of what is freed */
    kvc_memory_free(&memory, cache, cache->size, KVC_MEMORY_BOOKKEEPING, -1);
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Returns KVC_ERR_INVALID if max_bytes does not hold the empty cache and one block of each layer group. */
static kvc_status check_max_bytes(const kvc_cache *cache, int32_t block_size) {
    int64_t least = cache->memory.bookkeeping;
    if (!cache->limits.max_bytes) return KVC_OK;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const int64_t cost = cache->pools[g].cost;
        least = cost < INT64_MAX - least ? least + cost : INT64_MAX;
    }
    if (least < INT64_MAX && least <= cache->limits.max_bytes) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID,
                    "max_bytes is %lld: it must be at least %lld, which the empty cache and one block of each layer "
                    "group take with a block_size of %d%s",
                    (long long)cache->limits.max_bytes, (long long)least, block_size,
                    block_size > 1 ? "; or give a smaller block_size" : "");
}

static kvc_status init_cache(kvc_cache *cache, const kvc_config *config) {
    const int32_t block_size = config->block_size ? config->block_size : kvc_config_block_size(config);
    cache->num_layers = config->num_layers;
    cache->num_threads = config->num_threads;
    cache->poll = config->poll;
    cache->poll_user = config->poll_user;
    cache->limits.max_seq_len = config->max_seq_len;
    cache->limits.max_sequences = config->max_sequences;
    cache->limits.has_own_capacity = config->capacity != 0;
    cache->limits.capacity = config->capacity ? config->capacity : config->max_seq_len * config->max_sequences;
    cache->limits.max_bytes = config->max_bytes;
    for (int32_t i = 0; i < config->num_layers; i++) cache->layers[i] = kvc_config_layer(config, i);
    find_groups(cache);
    find_ropes(cache);
    KVC_TRY(init_groups(cache, block_size));
    cache->limits.budget = config->max_bytes ? config->max_bytes - cache->memory.bookkeeping : INT64_MAX;
    KVC_TRY(check_max_bytes(cache, block_size));
    if (kvc_mutex_init(&cache->mutex) == 0) {
        if (kvc_signal_init(&cache->waiting.idle) == 0) return KVC_OK;
        kvc_mutex_destroy(&cache->mutex);
    }
    return kvc_fail(KVC_ERR_NOMEM, "no mutex is to be had");
}

kvc_status kvc_cache_new(const kvc_config *given, kvc_cache **out) {
    kvc_config config;
    kvc_memory memory;
    const char *wanted;
    if (!out) return kvc_fail(KVC_ERR_INVALID, "cache is NULL");
    *out = NULL;
    KVC_TRY(kvc_config_read(&config, given));
    KVC_TRY(kvc_memory_init(&memory, config.allocator));
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    if (!kernels)
        return kvc_fail(KVC_ERR_UNSUPPORTED, "KVCACHE_ISA is %s: this machine lacks it, or this build, which has %s",
                        wanted, KVC_KERNEL_NAMES);
    KVC_TRY(kvc_threads_check());
    if (kvc_atfork_init()) return kvc_fail(KVC_ERR_NOMEM, "out of memory for what fork() is to call");

    kvc_cache *cache = new_cache(&memory, config.num_layers, count_frequencies(&config));
    if (!cache) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a cache of %d layers", config.num_layers);
    cache->kernels = kernels;
    cache->prefetch_level = kvc_cpu_prefetch_level();
    kvc_status status = init_cache(cache, &config);
    if (status != KVC_OK) {
        free_cache(cache);
        return status;
    }
    kvc_atfork_add(cache);
    *out = cache;
    return KVC_OK;
}

kvc_status kvc_cache_free(kvc_cache *cache) {
    if (!cache) return KVC_OK;
    kvc_lock(cache);
    kvc_status status = kvc_check_closed(cache, "free the cache");
    while (status == KVC_OK && cache->memory.works) {
        kvc_signal_wait(&cache->waiting.idle, &cache->mutex);
        status = kvc_check_closed(cache, "free the cache");
    }
    if (status == KVC_OK && cache->waiting.waiters)
        status =
            kvc_fail(KVC_ERR_BUSY, "cannot free the cache while other calls wait to begin a batch: let them return");
    if (status == KVC_OK) kvc_cache_drop_all(cache);
    kvc_unlock(cache, status);
    if (status != KVC_OK) return status;
    while (cache->prefixes.first) kvc_prefix_free(cache->prefixes.first);
    kvc_atfork_remove(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_pool_destroy(&cache->pools[g]);
    kvc_scratch_free(cache);
    kvc_reserved_free(cache);
    kvc_signal_destroy(&cache->waiting.idle);
    kvc_mutex_destroy(&cache->mutex);
    free_cache(cache);
    return KVC_OK;
}
