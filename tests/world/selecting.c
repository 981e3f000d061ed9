/* selecting.c: which rows a token reads that selects some (kvc_plan_args.select_rows), by the sketches of the rows that
 * it sees.  Sketches are read where the core keeps them, and compared with their keys. */
#include "questions.h"

#include "attend/work.h"
#include "cache/waiting.h"
#include "support/sketches.h"

int select_plainly(const question *q, int t, int num_seen) {
    int beside = 0;
    for (int u = q->first; u < q->first + q->num; u++) beside += q->of->slots[u] == q->of->slots[t];
    return q->plan.select_rows && beside <= KVC_MOST_SELECTING &&
           num_seen > KVC_FIRST_READ + KVC_LAST_READ + 2 * q->plan.select_rows;
}

/* Lists the sketches of the rows that a token sees, by position. */
static int list_sketches(const question *q, const kvc_batch *batch, int t, sketched_row *to) {
    const int64_t id = w.ids[q->of->slots[t]];
    int member = 0, num = 0;
    while (batch->sequences[member].sequence->id != id) member++;
    const int all = list_sketched(batch, source_of(&w.o, q->layer), member, to);
    for (int i = 0; i < all; i++) {
        const shown row = {to[i].position, 0, to[i].token};
        if (sees(q, t, &row)) to[num++] = to[i];
    }
    return num;
}

int mark_reads(const question *q, const kvc_batch *batch, int t, int kv, uint8_t *reads) {
    const kvc_layer *layer = &w.o.layers[source_of(&w.o, q->layer)];
    const int group = q->num_heads / layer->num_kv_heads;
    const selecting by = {KVC_FIRST_READ, KVC_LAST_READ, q->plan.select_rows};
    const double scale = q->args.scale != 0 ? (double)q->args.scale : 1 / sqrt(layer->k_dim);
    sketched_row rows[MOST_SHOWN];
    double scores[QUERY_HEADS * MOST_SHOWN], off = 0;
    const int num = list_sketches(q, batch, t, rows);
    for (int h = 0; h < group; h++)
        for (int j = 0; j < num; j++) {
            const int head = kv * group + h;
            const rounded_query rounded = round_query(layer, q->numbers[t - q->first][head], rows[j].delta);
            const uint8_t *bytes = rows[j].bytes + (size_t)kv * rows[j].head_stride;
            const double apart = fabs((double)rows[j].position - q->of->positions[t]);
            scores[h * num + j] =
                score_from(scale * product_with(&rounded, bytes, layer->k_dim), (double)q->args.softcap,
                           q->args.alibi ? (double)q->alibi[head] : 0, apart);
            off = fmax(off, scale * unsure_of(&rounded, bytes, layer->k_dim));
        }
    return mark_selected(&by, num, scores, group, 2 * off, reads);
}

void check_sketches(kvc_cache *cache, int64_t id, int l) {
    if (!w.o.layers[l].sketch_bits || w.o.layers[l].share) return;
    const int at = wrong_sketch_in(cache, kvc_cache_find(cache, id), l);
    if (at >= 0) wrong("layer %d: the key at %d has the sketch of another key", l, at);
}
