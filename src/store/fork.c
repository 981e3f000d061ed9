/* fork.c: the public functions that make a sequence share the rows of another. */
#include "store/check.h"
#include "store/waiting.h"

static kvc_status check_position(int32_t value, const char *name) {
    if (value >= 0) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is %d: a position must not be negative", name, value);
}

/* Makes a sequence, not in the table yet, with memory for all runs of src; returns NULL if out of memory. */
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

/* Replaces the rows of dst by those of src, without tokens at positions from `length` on. */
static kvc_status share(kvc_cache *cache, int64_t src_id, int64_t dst_id, int32_t length) {
    const kvc_sequence *src;
    kvc_sequence *old, *dst = NULL;
    do { /* while this waits for one, a call may begin to write the other */
        kvc_cache_find(cache, dst_id);
        src = kvc_cache_find(cache, src_id);
        old = kvc_table_find(&cache->sequences, dst_id);
    } while (old && old->in_place);
    kvc_status status = kvc_check_idle(src);
    if (status == KVC_OK) status = kvc_check_idle(old);
    if (status == KVC_OK && src) status = kvc_check_cut(cache, src, length);
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
