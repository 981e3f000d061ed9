/* deltas.c: how far the keys of a plan are moved, and the angles that rotate query rows back: see deltas.h.
 *
 * A delta is a row's position less the position for which its key was rotated.  A plan lists those of its rows.
 */
#include "attend/deltas.h"

#include <stdlib.h>

void kvc_find_angles_stride(kvc_plan *plan) {
    const kvc_cache *cache = plan->batch->cache;
    for (int32_t r = 0; r < cache->ropes.num; r++)
        if ((int32_t)kvc_rope_angles_size(&cache->ropes.items[r]) > plan->deltas.angles_stride)
            plan->deltas.angles_stride = (int32_t)kvc_rope_angles_size(&cache->ropes.items[r]);
}

static int by_value(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

void kvc_sort_deltas(kvc_plan *plan, int32_t num) {
    qsort(plan->deltas.values, (size_t)num, sizeof *plan->deltas.values, by_value);
    plan->deltas.num = 0;
    for (int32_t i = 0; i < num; i++)
        if (plan->deltas.num == 0 || plan->deltas.values[i] != plan->deltas.values[plan->deltas.num - 1])
            plan->deltas.values[plan->deltas.num++] = plan->deltas.values[i];
}

/* Layers that share a rope share its angles.  last: the rope of the layer before, whose angles are there already. */
void kvc_compute_angles(kvc_plan *plan) {
    const kvc_cache *cache = plan->batch->cache;
    const size_t stride = (size_t)plan->deltas.angles_stride;
    for (int32_t layer = 0, last = -1; layer < cache->num_layers; layer++) {
        const int32_t r = cache->ropes.of_layer[layer];
        if (cache->group_of[layer] != plan->group || r < 0 || r == last) continue;
        kvc_rope_table table = {.angles = plan->deltas.rope_table, .coarse = 1};
        float *angles = plan->deltas.angles + (size_t)r * (size_t)plan->deltas.num * stride;
        for (int32_t d = 0; d < plan->deltas.num; d++, angles += stride)
            kvc_rope_angles_from(&table, &cache->ropes.items[r], -plan->deltas.values[d], angles);
        last = r;
    }
}
