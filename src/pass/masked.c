/* masked.c: see masked.h. */
#include "pass/masked.h"

#include <stdlib.h>

#include "base/structs.h"

kvc_hidden kvc_hidden_at(const kvc_hidden *given, size_t size, int32_t i) {
    kvc_hidden hidden;
    kvc_write_struct(&hidden, sizeof hidden, (const char *)given + (size_t)i * size, size);
    return hidden;
}

/* Checks range i of a caller's array; call with the mutex held. */
static kvc_status check_range(const kvc_batch *batch, const kvc_hidden *given, size_t size, int32_t i) {
    kvc_hidden h;
    const kvc_status status =
        kvc_read_struct(&h, sizeof h, kvc_hidden_least_size, (const char *)given + (size_t)i * size, size, "hidden");
    if (status != KVC_OK) return status;
    if (h.begin < 0)
        return kvc_fail(KVC_ERR_INVALID, "hidden[%d].begin is %d: a position must not be negative", i, h.begin);
    if (h.end < h.begin)
        return kvc_fail(KVC_ERR_INVALID, "hidden[%d].end is %d: it must be at least begin, %d", i, h.end, h.begin);
    if (kvc_batch_find(batch, h.seq_id) < 0)
        return kvc_fail(KVC_ERR_INVALID, "hidden[%d].seq_id is %lld: the batch has no token of that sequence", i,
                        (long long)h.seq_id);
    return KVC_OK;
}

kvc_status kvc_hidden_check(const kvc_batch *batch, const kvc_hidden *given, size_t size, int32_t num) {
    kvc_status status = KVC_OK;
    if (num < 0) return kvc_fail(KVC_ERR_INVALID, "num_hidden is %d: it must not be negative", num);
    if (!num) return KVC_OK;
    if (!given) return kvc_fail(KVC_ERR_INVALID, "hidden is NULL: num_hidden is %d", num);
    kvc_lock(batch->cache);
    for (int32_t i = 0; status == KVC_OK && i < num; i++) status = check_range(batch, given, size, i);
    return kvc_unlock(batch->cache, status);
}

static int by_begin(const void *a, const void *b) {
    const kvc_hidden_range *x = a, *y = b;
    if (x->sequence != y->sequence) return x->sequence < y->sequence ? -1 : 1;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Joins sorted ranges that overlap or touch, and drops empty ones.  Returns how many are left. */
static int32_t join(kvc_hidden_range *ranges, int32_t num) {
    int32_t joined = 0;
    for (int32_t i = 0; i < num; i++) {
        const kvc_hidden_range r = ranges[i];
        kvc_hidden_range *last = joined ? &ranges[joined - 1] : NULL;
        if (r.begin == r.end) continue;
        if (!last || last->sequence != r.sequence || last->end < r.begin)
            ranges[joined++] = r;
        else if (last->end < r.end)
            last->end = r.end;
    }
    return joined;
}

void kvc_hidden_sort(const kvc_batch *batch, const kvc_hidden *given, size_t size, int32_t num,
                     kvc_hidden_range *ranges, kvc_hidden_ranges *by_sequence) {
    kvc_lock(batch->cache);
    for (int32_t i = 0; i < num; i++) {
        const kvc_hidden h = kvc_hidden_at(given, size, i);
        ranges[i] = (kvc_hidden_range){kvc_batch_find(batch, h.seq_id), h.begin, h.end};
    }
    kvc_unlock(batch->cache, KVC_OK);
    qsort(ranges, (size_t)num, sizeof *ranges, by_begin);
    const kvc_hidden_range *end = ranges + join(ranges, num);
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        by_sequence[s] = (kvc_hidden_ranges){.ranges = ranges};
        while (ranges < end && ranges->sequence == s) ranges++;
        by_sequence[s].num = (int32_t)(ranges - by_sequence[s].ranges);
    }
}

kvc_run kvc_hidden_next(const kvc_hidden_ranges *hidden, const kvc_run *run, int32_t *from) {
    int32_t low = 0, high = hidden->num, begin = *from > run->position ? *from : run->position;
    while (low < high) { /* the first range that ends behind `begin` */
        const int32_t middle = low + (high - low) / 2;
        if (hidden->ranges[middle].end <= begin)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < hidden->num && hidden->ranges[low].begin <= begin) begin = hidden->ranges[low++].end;
    const kvc_hidden_range *next = low < hidden->num ? &hidden->ranges[low] : NULL;
    *from = next ? next->end : INT32_MAX;
    return kvc_run_part(run, begin, next ? next->begin : INT32_MAX);
}
