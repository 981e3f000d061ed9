/* cache.c: the public functions that create, look at and edit a cache: check arguments, then tie the parts together. */
#include "store/cache.h"

#include <string.h>

#include "store/check.h"
#include "kernels/dispatch.h"
#include "base/dtype.h"
#include "store/atfork.h"

/* ---- version and machine ----------------------------------------------------------------------------------------- */

int32_t kvc_version(void) { return KVC_VERSION_MAJOR * 1000000 + KVC_VERSION_MINOR * 1000 + KVC_VERSION_PATCH; }

const char *kvc_build_info(void) {
#define STRING_OF(x) #x
#define STRING(x) STRING_OF(x)
    return "kvcache " STRING(KVC_VERSION_MAJOR) "." STRING(KVC_VERSION_MINOR) "." STRING(KVC_VERSION_PATCH)
#if defined(__clang__)
        ", clang " __clang_version__
#elif defined(__GNUC__)
        ", gcc " __VERSION__
#endif
        ", " KVC_KERNEL_NAMES
#if defined(_OPENMP)
        ", OpenMP " STRING(_OPENMP);
#else
        ", no OpenMP";
#endif
#undef STRING
#undef STRING_OF
}

const char *kvc_isa(void) {
    const char *wanted;
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    return kernels ? kernels->name : NULL;
}

/* ---- creation ---------------------------------------------------------------------------------------------------- */

static kvc_status check_limit(int64_t value, const char *name, int64_t most) {
    if (value >= 0 && value <= most) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is %lld: it must be between 1 and %lld, or 0 for the default", name,
                    (long long)value, (long long)most);
}

static kvc_status check_type(int32_t type, int32_t dim, int32_t transform, int32_t layer, const char *name) {
    if (!kvc_type_name(type))
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s_type is %d: no kvc_type", layer, name, type);
    if (dim % kvc_type_elements(type))
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s_dim is %d: for %s it must be a multiple of %d", layer, name,
                        dim, kvc_type_name(type), kvc_type_elements(type));
    if (transform)
        return kvc_fail(KVC_ERR_UNSUPPORTED, "layers[%d].%s_transform is %d: only 0, none, is supported", layer, name,
                        transform);
    return KVC_OK;
}

/* Values that lie in the keys. */
static kvc_status check_value_in_key(const kvc_layer *layer, int32_t index) {
    if (!layer->value_in_key) return KVC_OK;
    if (layer->v_dim > layer->k_dim)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].v_dim is %d: values that lie in the keys have at most k_dim, %d",
                        index, layer->v_dim, layer->k_dim);
    if (layer->v_type != layer->k_type)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].v_type is %s: values that lie in the keys have k_type, %s", index,
                        kvc_type_name(layer->v_type), kvc_type_name(layer->k_type));
    return KVC_OK;
}

/* Where fields of later versions will be. */
static kvc_status check_reserved(const kvc_layer *layer, int32_t index) {
    const int32_t *policy = layer->policy.reserved;
    const int64_t *rope = layer->rope.reserved;
    const int is_set = policy[0] || policy[1] || policy[2];
    if (!is_set && !rope[0] && !rope[1]) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED, "layers[%d].%s sets a field that this version of the library does not know",
                    index, is_set ? "policy" : "rope");
}

static kvc_status check_layer_config(const kvc_layer *layer, int32_t index) {
    const struct {
        int32_t value;
        const char *name;
    } sizes[] = {{layer->num_kv_heads, "num_kv_heads"}, {layer->k_dim, "k_dim"}, {layer->v_dim, "v_dim"}};
    for (int i = 0; i < 3; i++)
        if (sizes[i].value < 1 || sizes[i].value > 1 << 20)
            return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s is %d: it must be between 1 and %d", index, sizes[i].name,
                            sizes[i].value, 1 << 20);
    kvc_status status = check_reserved(layer, index);
    if (status == KVC_OK) status = kvc_policy_check(&layer->policy, index);
    if (status != KVC_OK || layer->policy.kind == KVC_NONE) return status;
    status = check_type(layer->k_type, layer->k_dim, layer->k_transform, index, "k");
    if (status == KVC_OK) status = check_type(layer->v_type, layer->v_dim, layer->v_transform, index, "v");
    if (status == KVC_OK) status = check_value_in_key(layer, index);
    return status == KVC_OK ? kvc_rope_check(layer, index) : status;
}

/* Checks the limits and fills in those that were left to us. */
static kvc_status check_config(kvc_config *config) {
    kvc_status status = KVC_OK;
    if (config->num_layers < 1 || config->num_layers > 1 << 20)
        return kvc_fail(KVC_ERR_INVALID, "num_layers is %d: it must be between 1 and %d", config->num_layers, 1 << 20);
    if (status == KVC_OK) status = check_limit(config->block_size, "block_size", INT32_MAX - 1);
    if (status == KVC_OK) status = check_limit(config->max_seq_len, "max_seq_len", INT32_MAX - 1);
    if (status == KVC_OK) status = check_limit(config->max_sequences, "max_sequences", INT32_MAX);
    if (status == KVC_OK) status = check_limit(config->capacity, "capacity", INT64_MAX);
    if (status == KVC_OK) status = check_limit(config->max_bytes, "max_bytes", INT64_MAX);
    if (status == KVC_OK) status = check_limit(config->num_threads, "num_threads", KVC_MOST_THREADS);
    if (!config->capacity) config->capacity = config->max_seq_len * config->max_sequences; /* each below 2^31 */
    return status;
}

static kvc_layer layer_at(const kvc_config *config, int32_t i) {
    kvc_layer layer;
    kvc_write_struct(&layer, sizeof layer, (const char *)config->layers + (size_t)i * config->layer_size,
                     config->layer_size);
    if (layer.policy.kind == KVC_NONE) layer.rope = (kvc_rope){0}; /* it was not checked */
    return layer;
}

/* The layer whose rows another reads has rows of its own, and they are alike. */
static kvc_status check_share(const kvc_config *config, int32_t index) {
    const kvc_layer layer = layer_at(config, index);
    if (!layer.share) return KVC_OK;
    if (layer.share < 0 || layer.share > config->num_layers || layer.share == index + 1)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].share is %d: it must be 1 + the index of another of the %d layers",
                        index, layer.share, config->num_layers);
    const kvc_layer source = layer_at(config, layer.share - 1);
    if (source.share)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d] shares the rows of layer %d, which has none of its own", index,
                        layer.share - 1);
    if (layer.num_kv_heads != source.num_kv_heads || layer.k_dim != source.k_dim || layer.v_dim != source.v_dim ||
        layer.k_type != source.k_type || layer.v_type != source.v_type || !layer.value_in_key != !source.value_in_key ||
        !kvc_policy_equal(&layer.policy, &source.policy) || !kvc_rope_equal(&layer.rope, &source.rope))
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d] shares the rows of layer %d: both must have the same heads, dims, types, policy "
                        "and rope",
                        index, layer.share - 1);
    return KVC_OK;
}

static int32_t default_block_size(const kvc_config *config) {
    int32_t full = 1;
    for (int32_t i = 0; i < config->num_layers; i++) {
        const kvc_layer layer = layer_at(config, i);
        full &= !kvc_policy_evicts(&layer.policy);
    }
    return config->max_seq_len && config->max_sequences == 1 && full ? (int32_t)config->max_seq_len : 64;
}

/* Bytes of one head's keys, or values: whole cache lines.  Where they fill huge pages, and memory is taken only as it
 * is touched, as many as those take.  SIZE_MAX: too many. */
static size_t head_bytes(const kvc_memory *memory, int32_t block_size, size_t row_bytes) {
    if (row_bytes > SIZE_MAX / 8 / (size_t)block_size) return SIZE_MAX;
    const size_t bytes = (size_t)block_size * row_bytes;
    const int fills_pages = bytes >= KVC_HUGE_PAGE && memory && kvc_memory_is_lazy(memory, bytes);
    return (size_t)kvc_align_up(bytes, fills_pages ? KVC_HUGE_PAGE : KVC_CACHE_LINE);
}

/* A head's values lie behind its keys, which they are read after: what the processor fetches past the end of the keys
 * by itself is not in vain.  From head to head it is an odd number of cache lines, so that the same slot of several
 * heads does not fall into the same set of a cache. */
kvc_status kvc_layout_add(const kvc_memory *memory, kvc_layout *layout, const kvc_layer *layer, int32_t num_slots,
                          size_t *block_bytes) {
    layout->num_kv_heads = layer->num_kv_heads;
    layout->k_row_bytes = kvc_row_bytes(layer->k_type, layer->k_dim);
    layout->v_stored = layer->value_in_key ? 0 : kvc_row_bytes(layer->v_type, layer->v_dim);
    layout->v_row_bytes = layer->value_in_key ? layout->k_row_bytes : layout->v_stored;
    const size_t k_bytes = head_bytes(memory, num_slots, layout->k_row_bytes),
                 v_bytes = head_bytes(memory, num_slots, layout->v_stored);
    layout->head_stride = k_bytes + v_bytes;
    if (layout->head_stride / KVC_CACHE_LINE % 2 == 0) layout->head_stride += KVC_CACHE_LINE;
    layout->k_offset = *block_bytes;
    layout->v_offset = layout->k_offset + (layer->value_in_key ? 0 : k_bytes);
    if (k_bytes == SIZE_MAX || v_bytes == SIZE_MAX ||
        layout->head_stride > (SIZE_MAX / 4 - *block_bytes) / (size_t)layer->num_kv_heads)
        return kvc_fail(KVC_ERR_INVALID,
                        "a block of %d slots does not fit the address space: give a smaller block_size", num_slots);
    *block_bytes += layout->head_stride * (size_t)layer->num_kv_heads;
    return KVC_OK;
}

static int32_t add_group(kvc_cache *cache, const kvc_policy *policy) {
    cache->policies[cache->num_groups] = *policy;
    return cache->num_groups++;
}

/* Which group each layer belongs to: first those of tokens, in order of first appearance. */
static void find_groups(kvc_cache *cache) {
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const kvc_policy *policy = &cache->layers[i].policy;
        if (!kvc_policy_keeps_tokens(policy)) continue;
        int32_t g = 0;
        while (g < cache->num_groups && !kvc_policy_equal(&cache->policies[g], policy)) g++;
        cache->group_of[i] = g < cache->num_groups ? g : add_group(cache, policy);
    }
    cache->num_token_groups = cache->num_groups;
    for (int32_t i = 0, none = -1; i < cache->num_layers; i++) {
        const kvc_policy *policy = &cache->layers[i].policy;
        if (kvc_policy_keeps_tokens(policy) || cache->layers[i].share) continue;
        const int is_none = policy->kind == KVC_NONE;
        /* Those of cross-attention are put, and replaced, layer by layer. */
        cache->group_of[i] = is_none && none >= 0 ? none : add_group(cache, policy);
        if (is_none) none = cache->group_of[i];
    }
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].share) cache->group_of[i] = cache->group_of[kvc_source_of(cache, i)];
}

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
    }
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->layers[i].share) cache->layout_of[i] = cache->layout_of[kvc_source_of(cache, i)];
    return KVC_OK;
}

/* Keeps a copy of every rotation once: those of two layers are the same if they are the same one. */
static void find_ropes(kvc_cache *cache) {
    double *inv_freq = cache->inv_freqs;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        kvc_rope *rope = &cache->layers[i].rope;
        cache->rope_of[i] = -1;
        if (rope->kind != KVC_ROPE_FREQUENCIES) continue;
        if (!kvc_policy_keeps_tokens(&cache->layers[i].policy)) {
            *rope = (kvc_rope){0}; /* nothing moves there, and the caller's array is not kept */
            continue;
        }
        int32_t r = 0;
        while (r < cache->num_ropes && !kvc_rope_equal(&cache->ropes[r], rope)) r++;
        cache->rope_of[i] = r;
        if (r == cache->num_ropes) {
            memcpy(inv_freq, rope->inv_freq, (size_t)rope->num_freqs * sizeof *inv_freq);
            cache->ropes[r] = *rope;
            cache->ropes[r].inv_freq = inv_freq;
            inv_freq += rope->num_freqs;
            cache->num_ropes++;
        }
        rope->inv_freq = cache->ropes[r].inv_freq;
    }
}

/* Room for those copies: layers that follow each other mostly have the same. */
static uint64_t count_frequencies(const kvc_config *config) {
    uint64_t num = 0;
    kvc_layer before = {0};
    for (int32_t i = 0; i < config->num_layers; i++) {
        const kvc_layer layer = layer_at(config, i);
        if (layer.rope.kind == KVC_ROPE_FREQUENCIES && !kvc_rope_equal(&layer.rope, &before.rope))
            num += (uint64_t)layer.rope.num_freqs;
        before = layer;
    }
    return num;
}

/* Where the arrays lie behind the struct, in one allocation of `size` bytes. */
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
    cache->rope_of = (void *)(start + at.rope_of);
    cache->ropes = (void *)(start + at.ropes);
    cache->inv_freqs = (void *)(start + at.inv_freqs);
    cache->policies = (void *)(start + at.policies);
    cache->pools = (void *)(start + at.pools);
    return cache;
}

static void free_cache(kvc_cache *cache) {
    kvc_memory memory = cache->memory; /* it lies in what is freed */
    kvc_memory_free(&memory, cache, cache->size, KVC_MEMORY_BOOKKEEPING, -1);
}

static kvc_status init_cache(kvc_cache *cache, const kvc_config *config) {
    cache->num_layers = config->num_layers;
    cache->num_threads = config->num_threads;
    cache->poll = config->poll;
    cache->poll_user = config->poll_user;
    cache->max_seq_len = config->max_seq_len;
    cache->max_sequences = config->max_sequences;
    cache->capacity = config->capacity;
    cache->max_bytes = config->max_bytes;
    for (int32_t i = 0; i < config->num_layers; i++) cache->layers[i] = layer_at(config, i);
    find_groups(cache);
    find_ropes(cache);
    const kvc_status status = init_groups(cache, config->block_size ? config->block_size : default_block_size(config));
    if (status != KVC_OK) return status;
    if (kvc_mutex_init(&cache->mutex) == 0) {
        if (kvc_signal_init(&cache->idle) == 0) return KVC_OK;
        kvc_mutex_destroy(&cache->mutex);
    }
    return kvc_fail(KVC_ERR_NOMEM, "no mutex is to be had");
}

kvc_status kvc_cache_new(const kvc_config *given, kvc_cache **out) {
    kvc_config config;
    kvc_memory memory;
    const char *wanted;
    kvc_status status = KVC_READ(kvc_config, &config, given, "config");
    if (status == KVC_OK && !out) status = kvc_fail(KVC_ERR_INVALID, "cache is NULL");
    if (status == KVC_OK) status = check_config(&config);
    for (int32_t i = 0; status == KVC_OK && i < config.num_layers; i++) {
        kvc_layer layer;
        const char *at = config.layers ? (const char *)config.layers + (size_t)i * config.layer_size : NULL;
        status = kvc_read_struct(&layer, sizeof layer, kvc_layer_least_size, at, config.layer_size, "layers");
        if (status == KVC_OK) status = check_layer_config(&layer, i);
    }
    for (int32_t i = 0; status == KVC_OK && i < config.num_layers; i++) status = check_share(&config, i);
    if (status == KVC_OK) status = kvc_memory_init(&memory, config.allocator);
    if (status != KVC_OK) return status;
    const kvc_kernels *kernels = kvc_cpu_kernels(&wanted);
    if (!kernels)
        return kvc_fail(KVC_ERR_UNSUPPORTED, "KVCACHE_ISA is %s: this machine and build have %s", wanted,
                        KVC_KERNEL_NAMES);
    if (kvc_atfork_init()) return kvc_fail(KVC_ERR_NOMEM, "out of memory for what fork() is to call");

    kvc_cache *cache = new_cache(&memory, config.num_layers, count_frequencies(&config));
    if (!cache) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a cache of %d layers", config.num_layers);
    cache->kernels = kernels;
    cache->prefetch_level = kvc_cpu_prefetch_level();
    status = init_cache(cache, &config);
    if (status != KVC_OK) {
        free_cache(cache);
        return status;
    }
    kvc_atfork_watch(cache);
    *out = cache;
    return KVC_OK;
}

/* ---- who reads and writes rows without the mutex ----------------------------------------------------------------- */

kvc_sequence *kvc_cache_find(kvc_cache *cache, int64_t id) {
    kvc_sequence *sequence;
    while ((sequence = kvc_table_find(&cache->sequences, id)) && sequence->in_place)
        kvc_signal_wait(&cache->idle, &cache->mutex);
    return sequence;
}

kvc_sequence *kvc_cache_find_to_copy(kvc_cache *cache, int64_t id) {
    kvc_sequence *sequence;
    do sequence = kvc_cache_find(cache, id);
    while (cache->max_bytes && kvc_cache_wait_pages(cache));
    return sequence;
}

void kvc_cache_find_all(kvc_cache *cache) {
    while (cache->num_in_place) kvc_signal_wait(&cache->idle, &cache->mutex);
}

void kvc_cache_begin_in_place(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->in_place = 1;
    cache->num_in_place++;
}

void kvc_cache_end_in_place(kvc_cache *cache, kvc_sequence *sequence) {
    sequence->in_place = 0;
    cache->num_in_place--;
    kvc_signal_all(&cache->idle);
}

void kvc_cache_begin_reading(kvc_cache *cache) {
    while (cache->num_waiting) kvc_signal_wait(&cache->idle, &cache->mutex);
    cache->num_readers++;
}

void kvc_cache_end_reading(kvc_cache *cache) {
    if (--cache->num_readers == 0 && cache->num_waiting) kvc_signal_all(&cache->idle);
}

/* None of those that are waited for waits for anybody but the mutex, nor calls what is the caller's: it ends. */
void kvc_cache_wait(kvc_cache *cache) {
    cache->num_waiting++;
    while (cache->num_readers || cache->num_in_place) kvc_signal_wait(&cache->idle, &cache->mutex);
    if (--cache->num_waiting == 0) kvc_signal_all(&cache->idle);
}

int kvc_cache_wait_pages(kvc_cache *cache) {
    if (!kvc_memory_any_busy(&cache->memory)) return 0;
    cache->num_waiting++;
    while (kvc_memory_any_busy(&cache->memory)) kvc_signal_wait(&cache->idle, &cache->mutex);
    if (--cache->num_waiting == 0) kvc_signal_all(&cache->idle);
    return 1;
}

static kvc_status check_position(int32_t value, const char *name) {
    if (value >= 0) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is %d: a position must not be negative", name, value);
}

int kvc_keeps_tokens(const kvc_cache *cache, int32_t layer) {
    return !cache->layers[layer].share && kvc_policy_keeps_tokens(&cache->layers[layer].policy);
}

void kvc_spare_free(kvc_cache *cache) {
    if (cache->spare) kvc_sequence_free(cache->spare, &cache->memory, cache->pools);
    cache->spare = NULL;
}

void kvc_give_back(kvc_cache *cache, int64_t most_bytes) {
    if (kvc_cache_bytes(cache) > most_bytes) kvc_spare_free(cache);
    for (int32_t g = 0; g < cache->num_groups; g++)
        while (kvc_cache_bytes(cache) > most_bytes &&
               kvc_pool_shrink(&cache->pools[g], cache->pools[g].demand.num_blocks, 1));
    for (int32_t g = 0; g < cache->num_groups; g++)
        for (int32_t i = 0; i < cache->pools[g].num_blocks && kvc_cache_bytes(cache) > most_bytes; i++)
            kvc_pool_purge(&cache->pools[g], cache->pools[g].blocks[i], kvc_cache_threads(cache));
}

/* What kvc_give_back gives of a pool, if it is to give all. */
static int64_t unused_bytes(const kvc_pool *pool) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < pool->num_blocks; i++) {
        const kvc_block *block = pool->blocks[i];
        bytes += kvc_pool_block_bytes(pool, block->touched);
        bytes += block->is_free ? kvc_pool_header_bytes(pool) : -kvc_pool_block_bytes(pool, block->fill);
    }
    return bytes;
}

kvc_status kvc_check_max_bytes(kvc_cache *cache, const char *what) {
    int64_t bytes = kvc_cache_bytes(cache);
    if (!cache->max_bytes || bytes <= cache->max_bytes) return KVC_OK;
    if (cache->spare) bytes -= kvc_sequence_bytes(cache->spare);
    for (int32_t g = 0; g < cache->num_groups; g++) bytes -= unused_bytes(&cache->pools[g]);
    if (bytes > cache->max_bytes)
        return kvc_fail(KVC_ERR_FULL, "%s would make it %lld bytes: max_bytes is %lld", what, (long long)bytes,
                        (long long)cache->max_bytes);
    kvc_give_back(cache, cache->max_bytes);
    return KVC_OK;
}

/* The smallest one that is large enough; -1: none. */
static int find_spare(const kvc_cache *cache, uint64_t size) {
    int best = -1;
    for (int i = 0; i < KVC_NUM_SPARES; i++)
        if (cache->spares[i].size >= size && (best < 0 || cache->spares[i].size < cache->spares[best].size)) best = i;
    return best;
}

int kvc_scratch_has(const kvc_cache *cache, uint64_t size) { return find_spare(cache, size) >= 0; }

void *kvc_scratch_take(kvc_cache *cache, uint64_t *size) {
    const int best = find_spare(cache, *size);
    if (best < 0) {
        *size = kvc_align_up(*size + *size / 4, 4096); /* the next one is a little longer */
        return kvc_memory_alloc(&cache->memory, *size, KVC_MEMORY_SCRATCH, -1);
    }
    void *memory = cache->spares[best].memory;
    *size = cache->spares[best].size;
    cache->spares[best].memory = NULL;
    cache->spares[best].size = 0;
    return memory;
}

void kvc_scratch_give(kvc_cache *cache, void *memory, uint64_t size) {
    int smallest = 0;
    for (int i = 1; i < KVC_NUM_SPARES; i++)
        if (cache->spares[i].size < cache->spares[smallest].size) smallest = i;
    if (cache->spares[smallest].size < size) { /* an empty place has size 0 */
        void *other = cache->spares[smallest].memory;
        const uint64_t other_size = cache->spares[smallest].size;
        cache->spares[smallest].memory = memory;
        cache->spares[smallest].size = size;
        memory = other;
        size = other_size;
    }
    kvc_memory_free(&cache->memory, memory, size, KVC_MEMORY_SCRATCH, -1);
}

void kvc_scratch_free(kvc_cache *cache) {
    for (int i = 0; i < KVC_NUM_SPARES; i++) {
        kvc_memory_free(&cache->memory, cache->spares[i].memory, cache->spares[i].size, KVC_MEMORY_SCRATCH, -1);
        cache->spares[i].memory = NULL;
        cache->spares[i].size = 0;
    }
}

/* ---- editing sequences ------------------------------------------------------------------------------------------- */

static void count_holding(kvc_cache *cache, kvc_sequence *sequence, int32_t holds) {
    cache->num_holding += holds - sequence->holds;
    sequence->holds = holds;
}

void kvc_cache_note(kvc_cache *cache, kvc_sequence *sequence) {
    count_holding(cache, sequence, kvc_sequence_holds(sequence));
    if (sequence->changed_at) return;
    sequence->next_changed = cache->changed;
    sequence->changed_at = &cache->changed;
    if (cache->changed) cache->changed->changed_at = &sequence->next_changed;
    cache->changed = sequence;
}

void kvc_cache_settled(kvc_sequence *sequence) {
    if (!sequence->changed_at) return;
    *sequence->changed_at = sequence->next_changed;
    if (sequence->next_changed) sequence->next_changed->changed_at = sequence->changed_at;
    sequence->changed_at = NULL;
    sequence->next_changed = NULL;
}

void kvc_cache_forget(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_cache_settled(sequence);
    count_holding(cache, sequence, 0);
    kvc_table_remove(&cache->sequences, sequence);
    kvc_sequence_free(sequence, &cache->memory, cache->pools);
}

void kvc_cache_tidy(kvc_cache *cache, kvc_sequence *sequence) {
    if (kvc_sequence_is_blank(sequence)) kvc_cache_forget(cache, sequence);
}

void kvc_cache_after_edit(kvc_cache *cache, kvc_sequence *sequence) {
    if (kvc_sequence_is_empty(sequence))
        for (int32_t g = 0; g < sequence->num_groups; g++) sequence->runs[g].lost_end = 0;
    kvc_cache_note(cache, sequence);
    kvc_cache_tidy(cache, sequence);
}

static kvc_status clear_all_but(kvc_cache *cache, const kvc_sequence *kept) {
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_status status =
            cache->sequences.items[i] == kept ? KVC_OK : kvc_check_idle(cache->sequences.items[i]);
        if (status != KVC_OK) return status;
    }
    for (int32_t i = cache->sequences.num - 1; i >= 0; i--)
        if (cache->sequences.items[i] != kept) kvc_cache_forget(cache, cache->sequences.items[i]);
    return KVC_OK;
}

kvc_status kvc_clear(kvc_cache *cache) {
    kvc_lock(cache);
    kvc_cache_find_all(cache);
    return kvc_unlock(cache, clear_all_but(cache, NULL));
}

kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    kvc_cache_find_all(cache);
    return kvc_unlock(cache, clear_all_but(cache, kvc_table_find(&cache->sequences, seq_id)));
}

kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    kvc_sequence *sequence = kvc_cache_find(cache, seq_id);
    const kvc_status status = kvc_check_idle(sequence);
    if (status == KVC_OK && sequence) kvc_cache_forget(cache, sequence);
    return kvc_unlock(cache, status);
}

/* A sequence outside the table, with room for all of src's runs; NULL if there is no memory. */
static kvc_sequence *new_sharer(kvc_cache *cache, const kvc_sequence *src, int64_t id) {
    kvc_sequence *dst = kvc_sequence_new(&cache->memory, id, cache->num_groups, cache->num_token_groups);
    const kvc_table before = cache->sequences;
    kvc_status status = dst ? kvc_table_reserve(&cache->sequences, &before, &cache->memory) : KVC_ERR_NOMEM;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++)
        status = kvc_runs_reserve(&dst->runs[g], &cache->memory, src->runs[g].num);
    if (status == KVC_OK) {
        kvc_table_keep(&cache->sequences, &before, &cache->memory);
        return dst;
    }
    kvc_table_restore(&cache->sequences, &before, &cache->memory);
    if (dst) kvc_sequence_free(dst, &cache->memory, cache->pools);
    return NULL;
}

static kvc_status share(kvc_cache *cache, int64_t src_id, int64_t dst_id, int32_t length) {
    const kvc_sequence *src;
    kvc_sequence *old, *dst = NULL;
    do {
        old = kvc_cache_find(cache, dst_id);
        src = kvc_table_find(&cache->sequences, src_id);
    } while (src && src->in_place && (kvc_cache_find(cache, src_id), 1)); /* now the other may be written */
    kvc_status status = kvc_check_idle(src);
    if (status == KVC_OK) status = kvc_check_idle(old);
    if (status != KVC_OK) return status;
    if (src && !(dst = new_sharer(cache, src, dst_id)))
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for sequence %lld", (long long)dst_id);
    if (dst)
        for (int32_t g = 0; g < cache->num_groups; g++)
            kvc_runs_share(&dst->runs[g], &src->runs[g], g < cache->num_token_groups ? length : KVC_END);
    if (old) kvc_cache_forget(cache, old);
    if (dst) {
        kvc_table_insert(&cache->sequences, dst);
        kvc_cache_after_edit(cache, dst);
    }
    return KVC_OK;
}

static kvc_status check_two(int64_t src, int64_t dst) {
    if (src != dst) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "src and dst are both sequence %lld: they must differ", (long long)src);
}

kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length) {
    kvc_status status = check_two(src, dst);
    if (status == KVC_OK) status = check_position(length, "length");
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, share(cache, src, dst, length));
}

kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst) {
    const kvc_status status = check_two(src, dst);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, share(cache, src, dst, KVC_END));
}

kvc_status kvc_cache_free(kvc_cache *cache) {
    if (!cache) return KVC_OK;
    kvc_lock(cache);
    kvc_status status = kvc_check_closed(cache, "free the cache");
    while (status == KVC_OK && cache->memory.works) {
        kvc_signal_wait(&cache->idle, &cache->mutex);
        status = kvc_check_closed(cache, "free the cache");
    }
    if (status == KVC_OK) clear_all_but(cache, NULL);
    kvc_unlock(cache, status);
    if (status != KVC_OK) return status;
    kvc_atfork_unwatch(cache);
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_pool_destroy(&cache->pools[g]);
    kvc_scratch_free(cache);
    kvc_spare_free(cache);
    kvc_table_destroy(&cache->sequences, &cache->memory);
    kvc_signal_destroy(&cache->idle);
    kvc_mutex_destroy(&cache->mutex);
    free_cache(cache);
    return KVC_OK;
}

/* ---- looking at sequences ---------------------------------------------------------------------------------------- */

int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer) {
    if (layer != -1 && kvc_check_layer(cache, layer) != KVC_OK) return -1;
    int64_t len = 0;
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    if (sequence && layer != -1) len = sequence->runs[cache->group_of[layer]].num_rows;
    for (int32_t g = 0; sequence && layer == -1 && g < cache->num_token_groups; g++)
        if (sequence->runs[g].num_rows > len) len = sequence->runs[g].num_rows;
    kvc_unlock(cache, KVC_OK);
    return len;
}

int32_t kvc_first_position(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const int32_t position = sequence ? kvc_sequence_first(sequence) : -1;
    kvc_unlock(cache, KVC_OK);
    return position;
}

int32_t kvc_last_position(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const int32_t position = sequence ? kvc_sequence_last(sequence) : -1;
    kvc_unlock(cache, KVC_OK);
    return position;
}

int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id) { return kvc_last_position(cache, seq_id) + 1; }

int32_t kvc_cache_misses(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position) {
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_policy_lowest(&cache->policies[g], position) < sequence->runs[g].lost_end) return 1;
    return 0;
}

int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position) {
    if (position < 0) return 0;
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const int32_t can =
        sequence ? position <= kvc_sequence_last(sequence) + 1 && !kvc_cache_misses(cache, sequence, position)
                 : position == 0;
    kvc_unlock(cache, KVC_OK);
    return can;
}

int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids) {
    int64_t n = 0;
    kvc_lock(cache);
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        if (kvc_sequence_is_empty(cache->sequences.items[i])) continue;
        if (n < max_ids) seq_ids[n] = cache->sequences.items[i]->id;
        n++;
    }
    kvc_unlock(cache, KVC_OK);
    return n;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

int64_t kvc_cache_bytes(const kvc_cache *cache) {
    int64_t bytes = cache->memory.bookkeeping + cache->sheet_bytes;
    for (int32_t g = 0; g < cache->num_groups; g++) bytes += cache->pools[g].row_bytes;
    return bytes;
}

int64_t kvc_nbytes(kvc_cache *cache) {
    kvc_lock(cache);
    const int64_t bytes = kvc_cache_bytes(cache);
    kvc_unlock(cache, KVC_OK);
    return bytes;
}

int32_t kvc_block_size(kvc_cache *cache) { return cache->pools[0].block_size; }

int64_t kvc_capacity(kvc_cache *cache) { return cache->capacity ? cache->capacity : -1; }

int64_t kvc_capacity_bytes(kvc_cache *cache) {
    int64_t bytes = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const int64_t slot = kvc_pool_slot_bytes(pool);
        if (!slot) continue;
        /* What a cross-attention layer is given lies in one block for each sequence. */
        const int64_t most = (INT64_MAX - bytes) / slot,
                      slots = g < cache->num_token_groups ? cache->capacity : cache->max_sequences * pool->block_size;
        if (!slots) return -1;
        if (slots > most) return INT64_MAX;
        bytes += slots * slot;
    }
    return bytes;
}

double kvc_utilization(kvc_cache *cache) {
    double most = 0;
    kvc_lock(cache);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const double slots =
            cache->capacity ? (double)cache->capacity : (double)(pool->num_blocks - pool->num_free) * pool->block_size;
        const double share = slots > 0 ? (double)(pool->live - pool->drafted) / slots : 0;
        if (share > most) most = share;
    }
    kvc_unlock(cache, KVC_OK);
    return most;
}

void kvc_get_stats(kvc_cache *cache, kvc_stats *out, size_t size) {
    kvc_lock(cache);
    kvc_stats stats = cache->stats;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        stats.blocks_opened += pool->opened;
        stats.blocks_reused += pool->reused;
        stats.blocks_returned += pool->returned;
        stats.live_slots += pool->live;
        stats.wasted_slots += pool->filled - pool->live;
        stats.blocks_in_use += pool->num_blocks - pool->num_free;
        stats.blocks_free += pool->num_free;
    }
    kvc_unlock(cache, KVC_OK);
    kvc_write_struct(out, size, &stats, sizeof stats);
}
