/* scratch.c: memory kept from one batch to the next: see scratch.h. */
#include "cache/scratch.h"

#include "base/compiler.h"

/* Returns the index of the smallest spare that is large enough; -1 if none is. */
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
        *size =
            kvc_align_up(*size + *size / 4, 4096); /* larger, to serve the next batch, which may need a little more */
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
    if (cache->spares[smallest].size < size &&
        !KVC_BUGGIFY()) { /* keep the larger of the two; an empty place has size 0 */
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
