/* choices.c: which rows tokens choose by the keys of a layer that holds keys alone (kvc_choose). */
#include "questions.h"

enum { MOST_FIRST = 5 };

static void point_at(const array *a, int64_t *token_stride, int64_t *head_stride, int64_t *batch_stride) {
    *token_stride = a->token_stride;
    *head_stride = a->head_stride;
    *batch_stride = a->batch_stride;
}

/* Whole numbers, so that sums are exact in any order. */
static void make_weights(question *q) {
    kvc_choose_args *a = &q->choosing;
    lay_out(&q->weights, q->num, q->inner, q->num_heads, sizeof(float));
    for (int t = 0; t < q->num; t++)
        for (int h = 0; h < q->num_heads; h++) {
            q->head_weights[t][h] = (float)(pick(4) - 1);
            write_floats(&q->weights, t, h, &q->head_weights[t][h], 1, KVC_F32);
        }
    a->weights = (const float *)(const void *)row_in(&q->weights, 0, 0);
    point_at(&q->weights, &a->weights_token_stride, &a->weights_head_stride, &a->weights_batch_stride);
}

/* A scale of 0 rounds scores: they keep their order if no choice adds up several heads. */
void make_choosing(question *q) {
    static const float scales[] = {1, 0.5f, -2, 0, 0};
    const int stride = stride_of(&w.o, q->layer), sums = q->num_heads > q->num_choices;
    kvc_choose_args *a = &q->choosing;
    *a = (kvc_choose_args){.struct_size = sizeof *a,
                           .scale = scales[pick(sums ? 3 : 5)],
                           .relu = pick(2),
                           .num_choices = q->num_choices == 1 && pick(2) ? 0 : q->num_choices,
                           .width = 1 + pick(pick(2) ? 6 : MOST_CHOSEN),
                           .among_width = pick(4) ? pick(MOST_CHOSEN + 1) : 0,
                           .block = pick(2) ? pick(2) : stride * (1 + pick(6)),
                           .num_first = pick(2) ? 0 : pick(MOST_FIRST),
                           .num_local = pick(2) ? 0 : pick(MOST_FIRST),
                           .tokens_per_sequence = q->inner,
                           .cancel = q->args.cancel};
    make_queries(q, 1, pick(2));
    if (pick(2)) make_weights(q);
    if (!pick(3) && a->among_width) {
        make_lists(q, q->num_choices, a->among_width, a->block > 1 ? a->block : 1);
        a->among = (const int32_t *)(const void *)row_in(&q->lists, 0, 0);
        point_at(&q->lists, &a->among_token_stride, &a->among_choice_stride, &a->among_batch_stride);
    }
    lay_out(&q->out, q->num, q->inner, q->num_choices, a->width * (int64_t)sizeof(int32_t));
    lay_out(&q->scores, q->num, q->inner, q->num_choices, a->width * (int64_t)sizeof(float));
    a->chosen = (int32_t *)(void *)row_in(&q->out, 0, 0);
    point_at(&q->out, &a->chosen_token_stride, &a->chosen_choice_stride, &a->chosen_batch_stride);
    if (pick(2)) a->scores = (float *)(void *)row_in(&q->scores, 0, 0);
    point_at(&q->scores, &a->scores_token_stride, &a->scores_choice_stride, &a->scores_batch_stride);
}

/* The score that a choice of a question's n-th token gives a row. */
static double score_of(const question *q, int n, int choice, const shown *row) {
    const kvc_choose_args *a = &q->choosing;
    const int source = source_of(&w.o, q->layer), num = q->num_heads / q->num_choices;
    const kvc_layer *layer = &w.o.layers[source];
    double sum = 0;
    for (int h = choice * num; h < (choice + 1) * num; h++) {
        float k[DIM];
        double product = 0;
        make_key(layer, row->tag, source, h * layer->num_kv_heads / q->num_heads, row->position - tokens[row->tag].base,
                 k);
        for (int d = 0; d < layer->k_dim; d++) product += (double)q->numbers[n][h][d] * (double)k[d];
        sum += head_score(a, layer->k_dim, product, a->weights ? (double)q->head_weights[n][h] : 1);
    }
    return sum;
}

static void check_choice(question *q, int t, int choice, const shown *rows, int num_rows) {
    const kvc_choose_args *a = &q->choosing;
    const int n = t - q->first, stride = stride_of(&w.o, q->layer);
    candidate all[MOST_SHOWN];
    int num = 0;
    for (int i = 0; i < num_rows; i++)
        if (may_choose(a, q->entries[n][choice], stride, rows[i].position))
            all[num++] = (candidate){.id = entry_of(a, rows[i].position),
                                     .is_forced = must_choose(a, q->of->positions[t], stride, rows[i].position),
                                     .score = score_of(q, n, choice, &rows[i])};
    num = choose_plainly(all, num, a->width);
    for (int i = 0; i < a->width; i++) {
        const int32_t right = i < num ? all[i].id : -1;
        const double score = i < num ? all[i].score : -INFINITY;
        int32_t got;
        memcpy(&got, row_in(&q->out, n, choice) + i * (int)sizeof got, sizeof got);
        if (got != right)
            wrong("layer %d: token %d chooses %d of %d rows as entry %d of choice %d, not %d", q->layer, t, got,
                  num_rows, i, choice, right);
        const double scored = (double)read_float(KVC_F32, row_in(&q->scores, n, choice) + i * (int)sizeof(float));
        if (a->scores && scored != score && !(a->scale == 0 && fabs(scored - score) <= 1e-6 * fabs(score)))
            wrong("layer %d: token %d gives entry %d of choice %d a score of %g, not %g", q->layer, t, i, choice,
                  scored, score);
    }
}

/* Whether some key is not quite exact.  Queries of transformed keys are rounded. */
static int is_far(const question *q, const shown *rows, int num) {
    if (is_transformed(&w.o.layers[q->layer], 0)) return 1;
    for (int i = 0; i < num; i++)
        if (is_far_off(rows[i].position, rows[i].tag)) return 1;
    return 0;
}

void check_choices(question *q, int partly) {
    const int64_t row = q->choosing.width * (int64_t)sizeof(int32_t);
    for (int t = q->first; t < q->first + q->num; t++) {
        shown rows[MOST_SHOWN];
        const int num = is_known(q->of, t) ? list_seen(q, t, rows) : 0;
        for (int i = 0; i < q->num_choices && is_known(q->of, t) && !is_far(q, rows, num); i++)
            if (!partly || !is_unwritten(row_in(&q->out, t - q->first, i), row)) check_choice(q, t, i, rows, num);
    }
    check_gaps(q, &q->out, q->num_choices, row);
    if (!q->choosing.scores && !is_unwritten(q->scores.bytes, sizeof q->scores.bytes))
        wrong("writes scores, which is NULL");
    check_gaps(q, &q->scores, q->num_choices, row);
}
