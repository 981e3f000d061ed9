/* masked.c: ranges of positions that no query of a call sees.  In a group with a stride, they become ranges of rows:
 * kvc_rows_below gives the number of rows below a position. */
#include "pass/masked.h"

#include <stdlib.h>

#include "base/structs.h"

kvc_masked kvc_masked_at(const kvc_masked *given, size_t size, int32_t i) {
    kvc_masked masked;
    kvc_write_struct(&masked, sizeof masked, (const char *)given + (size_t)i * size, size);
    return masked;
}

/* Checks range i of a caller's array; call with the mutex held. */
static kvc_status check_range(const kvc_batch *batch, const kvc_masked *given, size_t size, int32_t i) {
    kvc_masked h;
    const kvc_status status =
        kvc_read_struct(&h, sizeof h, kvc_masked_least_size, (const char *)given + (size_t)i * size, size, "masked");
    if (status != KVC_OK) return status;
    if (h.begin < 0)
        return kvc_fail(KVC_ERR_INVALID, "masked[%d].begin is %d: a position must not be negative", i, h.begin);
    if (h.end < h.begin)
        return kvc_fail(KVC_ERR_INVALID, "masked[%d].end is %d: it must be at least begin, %d", i, h.end, h.begin);
    if (kvc_batch_find(batch, h.seq_id) < 0)
        return kvc_fail(KVC_ERR_INVALID, "masked[%d].seq_id is %lld: the batch has no token of that sequence", i,
                        (long long)h.seq_id);
    return KVC_OK;
}

kvc_status kvc_masked_check(const kvc_batch *batch, const kvc_masked *given, size_t size, int32_t num) {
    kvc_status status = KVC_OK;
    if (num < 0) return kvc_fail(KVC_ERR_INVALID, "num_masked is %d: it must not be negative", num);
    if (!given) return kvc_fail(KVC_ERR_INVALID, "masked is NULL: num_masked is %d", num);
    kvc_lock(batch->cache);
    for (int32_t i = 0; status == KVC_OK && i < num; i++) status = check_range(batch, given, size, i);
    return kvc_unlock(batch->cache, status);
}

static int by_begin(const void *a, const void *b) {
    const kvc_masked_range *x = a, *y = b;
    if (x->sequence != y->sequence) return x->sequence < y->sequence ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Joins sorted ranges that overlap or touch, and drops empty ones.  Returns how many are left. */
static int32_t join(kvc_masked_range *ranges, int32_t num) {
    int32_t joined = 0;
    for (int32_t i = 0; i < num; i++) {
        const kvc_masked_range r = ranges[i];
        kvc_masked_range *last = joined ? &ranges[joined - 1] : NULL;
        if (r.begin == r.end) continue;
        if (!last || last->sequence != r.sequence || last->end < r.begin)
            ranges[joined++] = r;
        else if (last->end < r.end)
            last->end = r.end;
    }
    return joined;
}

void kvc_masked_sort(const kvc_batch *batch, int32_t group, const kvc_masked *given, size_t size, int32_t num,
                     kvc_masked_range *ranges, kvc_masked_ranges *by_sequence) {
    const int32_t stride = batch->cache->pools[group].stride;
    kvc_lock(batch->cache);
    for (int32_t i = 0; i < num; i++) {
        const kvc_masked h = kvc_masked_at(given, size, i);
        ranges[i] = (kvc_masked_range){kvc_batch_find(batch, h.seq_id), kvc_rows_below(h.begin, stride),
                                       kvc_rows_below(h.end, stride)};
    }
    kvc_unlock(batch->cache, KVC_OK);
    qsort(ranges, (size_t)num, sizeof *ranges, by_begin);
    const kvc_masked_range *end = ranges + join(ranges, num);
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        by_sequence[s] = (kvc_masked_ranges){.ranges = ranges}; /* sorted by sequence */
        while (ranges < end && ranges->sequence == s) ranges++;
        by_sequence[s].num = (int32_t)(ranges - by_sequence[s].ranges);
    }
}

kvc_run kvc_masked_next(const kvc_masked_ranges *masked, const kvc_run *run, int32_t *from) {
    int32_t low = 0, high = masked->num, begin = *from > run->position ? *from : run->position;
    while (low < high) { /* the first range that ends behind `begin` */
        const int32_t middle = low + (high - low) / 2;
        if (masked->ranges[middle].end <= begin)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < masked->num && masked->ranges[low].begin <= begin) begin = masked->ranges[low++].end;
    const kvc_masked_range *next = low < masked->num ? &masked->ranges[low] : NULL;
    *from = next ? next->end : INT32_MAX;
    return kvc_run_part(run, begin, next ? next->begin : INT32_MAX);
}
