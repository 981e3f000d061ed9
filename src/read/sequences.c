/* sequences.c: the public functions that say which sequences and tokens a cache holds. */
#include "cache/check.h"

int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer) {
    if (layer != -1 && kvc_check_layer(cache, layer) != KVC_OK) return -1;
    int64_t len = 0;
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    if (sequence && layer != -1) len = sequence->runs[cache->group_of[layer]].num_rows;
    for (int32_t g = 0; sequence && layer == -1 && g < cache->num_token_groups; g++)
        if (cache->pools[g].stride == 1 && sequence->runs[g].num_rows > len) len = sequence->runs[g].num_rows;
    kvc_unlock(cache, KVC_OK);
    return len;
}

kvc_status kvc_position_range(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *first, int32_t *last) {
    if (layer != -1) KVC_TRY(kvc_check_layer(cache, layer));
    if (!first) return kvc_fail(KVC_ERR_INVALID, "first is NULL");
    if (!last) return kvc_fail(KVC_ERR_INVALID, "last is NULL");
    *first = *last = -1;
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    if (sequence && layer == -1) {
        *first = kvc_sequence_first(sequence);
        *last = kvc_sequence_last(sequence);
    } else if (sequence) {
        const int32_t g = cache->group_of[layer], stride = cache->pools[g].stride;
        if (sequence->runs[g].num) *first = kvc_position_of(sequence->runs[g].min_position, stride);
        if (sequence->runs[g].num) *last = kvc_position_of(sequence->runs[g].max_position, stride);
    }
    return kvc_unlock(cache, KVC_OK);
}

int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const int32_t position = sequence ? kvc_sequence_next(sequence) : 0;
    kvc_unlock(cache, KVC_OK);
    return position;
}

int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position) {
    if (position < 0) return 0;
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const int32_t next = sequence ? kvc_sequence_next(sequence) : 0;
    const int32_t can = cache->num_token_groups == 0 ||
                        (position <= next && !(sequence && kvc_cache_misses(cache, sequence, position)));
    kvc_unlock(cache, KVC_OK);
    return can;
}

int32_t kvc_exact_to(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    const int32_t position = sequence ? kvc_exact_to_with_batch(cache, sequence) : INT32_MAX;
    kvc_unlock(cache, KVC_OK);
    return position;
}

int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids) {
    const kvc_table *table = &cache->sequences;
    int64_t n = 0;
    kvc_lock(cache);
    for (const kvc_sequence *sequence = kvc_table_first(table); sequence && !sequence->is_hidden;
         sequence = kvc_table_next(table, sequence)) {
        if (sequence->call.is_own || kvc_sequence_is_empty(sequence)) continue;
        if (seq_ids && n < max_ids) seq_ids[n] = sequence->id;
        n++;
    }
    kvc_unlock(cache, KVC_OK);
    return n;
}

int64_t kvc_new_sequence(kvc_cache *cache) {
    kvc_lock(cache);
    const int64_t id = kvc_cache_new_id(cache);
    kvc_unlock(cache, KVC_OK);
    return id;
}
