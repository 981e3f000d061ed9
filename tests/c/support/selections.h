/* selections.h: rows that tokens of a stage (scene.h) select (kvc_plan_args.select_rows).  Sketches say which rows
 * these are (sketches.h), and attention to the same rows, chosen by their positions, says what comes out, to the bit.
 */
#ifndef KVC_TEST_SELECTIONS_H
#define KVC_TEST_SELECTIONS_H

#include "support/choices.h"
#include "support/sketches.h"

enum { MOST_SELECTING = 8 }; /* tokens of a sequence in a call that selects */

static int selections_checked, selections_unsure; /* by token and KV head */

/* Gives a scene's layer sketches, which takes keys of whole blocks, and a policy that shows all rows. */
static inline void add_sketches(scene *s) {
    s->layer.k_dim = (s->layer.k_dim + 31) / 32 * 32;
    s->layer.policy = (kvc_policy){.kind = KVC_FULL};
    s->layer.sketch_bits = 2;
}

/* Lists the rows that token t sees, by position.  Returns how many there are. */
static inline int list_seen(const stage *st, int t, sketched_row *to) {
    const kvc_batch *batch = st->batch;
    int member = 0, num = 0;
    while (batch->sequences[member].sequence->id != st->tokens.ids[t]) member++;
    const int all = list_sketched(batch, 0, member, to);
    for (int i = 0; i < all; i++)
        if (sees(st, t, to[i].position, to[i].token)) to[num++] = to[i];
    return num;
}

/* Lists the positions that token t, the n-th of a question, selects for a KV head.  Returns 0 if rounding decides, or
 * positions do not tell. */
static inline int list_selected(const question *a, const sketched_row *rows, int num, int n, int kv, int32_t *to) {
    static double scores[MAX_HEADS * MAX_POSITIONS];
    static uint8_t reads[MAX_POSITIONS];
    const scene *s = a->stage->scene;
    const int t = a->first + n, group = s->num_heads / s->layer.num_kv_heads, dim = s->layer.k_dim;
    const double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt(dim);
    const selecting by = {16, 64, a->plan.select_rows};
    rounded_query rounded = {.unit = 0};
    double off = 0;
    int is_sure = 1;
    for (int h = 0; h < group; h++) {
        const double alibi = s->alibi ? (double)s->alibi[kv * group + h] : 0;
        float q[MAX_DIM];
        for (int d = 0; d < dim; d++)
            q[d] =
                query_element(s, a->layer, (int)a->stage->tokens.ids[t], a->stage->tokens.rows[t], kv * group + h, d);
        for (int j = 0; j < num; j++) {
            const uint8_t *bytes = rows[j].bytes + (size_t)kv * rows[j].head_stride;
            if (!j || rows[j].delta != rows[j - 1].delta) rounded = round_query(&s->layer, q, rows[j].delta);
            const double score = score_from(scale * product_with(&rounded, bytes, dim), (double)s->softcap, alibi,
                                            abs(rows[j].position - a->stage->tokens.positions[t]));
            off = fmax(off, fabs(scale) * unsure_of(&rounded, bytes, dim) + 4e-6 * (1 + fabs(score)));
            scores[h * num + j] = score;
            if (j && rows[j].position == rows[j - 1].position) is_sure = 0;
        }
    }
    is_sure &= mark_selected(&by, num, scores, group, 2 * off, reads);
    for (int j = 0; j < num; j++)
        if (reads[j]) *to++ = rows[j].position;
    return is_sure;
}

/* Whether head h of the n-th token got the same bits in two questions. */
static inline int same_head(const question *a, const question *b, int n, int h) {
    const size_t out = (size_t)(n * a->args.out_token_stride + h * a->args.out_head_stride),
                 lse = (size_t)(n * a->args.lse_token_stride + h * a->args.lse_head_stride);
    return !memcmp(a->out + out, b->out + out, (size_t)a->args.out_head_stride) &&
           !memcmp((char *)a->lse + lse, (char *)b->lse + lse, sizeof *a->lse);
}

/* A question that selects, what its tokens select, and the same question about all rows. */
typedef struct selection {
    question selects, chooses, is_dense;
    uint8_t is_selecting[MAX_NEW * 2]; /* by token: its sequence selects */
    uint8_t is_unsure[MAX_NEW * 2][MAX_KV_HEADS];
} selection;

/* Fills in a choice of what the tokens of a question select. */
static inline void choose_selected(selection *s) {
    static sketched_row rows[MAX_POSITIONS];
    const question *a = &s->selects;
    const stage *st = a->stage;
    for (int n = 0; n < a->n; n++) {
        int beside = 0;
        for (int i = 0; i < a->n; i++) beside += st->tokens.ids[a->first + i] == st->tokens.ids[a->first + n];
        const int num = list_seen(st, a->first + n, rows);
        s->is_selecting[n] = beside <= MOST_SELECTING && num > 80 + 2 * a->plan.select_rows;
        for (int kv = 0; kv < st->scene->layer.num_kv_heads; kv++) {
            int32_t *to = chosen.entries[a->first + n][kv];
            for (int i = 0; i < MAX_WIDTH; i++) to[i] = -1;
            s->is_unsure[n][kv] = s->is_selecting[n] && !list_selected(a, rows, num, n, kv, to);
        }
    }
}

/* Compares a question that selects with attention to the same rows; with the same bits on several threads. */
static inline void check_selection(selection *s) {
    const question *a = &s->selects;
    const scene *of = a->stage->scene;
    const int group = of->num_heads / of->layer.num_kv_heads;
    for (int n = 0; n < a->n; n++)
        for (int h = 0; h < of->num_heads; h++) {
            const question *right = s->is_selecting[n] ? &s->chooses : &s->is_dense;
            selections_checked += s->is_selecting[n] && h % group == 0;
            selections_unsure += s->is_unsure[n][h / group] && h % group == 0;
            CHECKF(s->is_unsure[n][h / group] || same_head(a, right, n, h),
                   "%s: types %d and %d, %d rows of token %d, head %d: others than %s", kvc_isa(), of->layer.k_type,
                   of->layer.v_type, a->plan.select_rows, a->first + n, h,
                   s->is_selecting[n] ? "what it selects" : "all");
        }
}

/* Lets some tokens of a stage's batch select rows. */
static inline void check_selecting(const scene *s, const setting *how) {
    static selection all;
    stage *st = stage_new(s, how);
    const int most = st->tokens.n < 2 * MAX_NEW ? st->tokens.n : 2 * MAX_NEW;
    const int is_few = random_int(0, 4) != 0, n = is_few && most > 4 ? random_int(1, 5) : most;
    const int first = random_int(0, most - n + 1), rows = random_int(1, 9) * random_int(1, 60);
    for (int m = 0; m < s->num_members; m++) {
        const kvc_sequence *of = kvc_table_find(&st->cache->sequences, m);
        const int wrong = of ? wrong_sketch_in(st->cache, of, 0) : -1;
        CHECKF(wrong < 0, "type %d: the sketch of the key at %d is not its own", s->layer.k_type, wrong);
    }
    all.selects = question_new(st, 0, first, n);
    all.chooses = question_new(st, 0, first, n);
    all.is_dense = question_new(st, 0, first, n);
    chosen.num_tokens = st->tokens.n;
    chosen.num_choices = s->layer.num_kv_heads;
    chosen.width = MAX_WIDTH;
    chosen.block = chosen.tail = 0;
    memcpy(chosen.positions, st->tokens.positions, (size_t)st->tokens.n * sizeof *chosen.positions);
    const kvc_chosen given = choice_for(&all.chooses);
    all.selects.plan = all.is_dense.plan = all.chooses.plan;
    all.selects.plan.select_rows = rows;
    choose_selected(&all);
    all.chooses.args.chosen = &given;
    CHECKF(ask(&all.selects) == KVC_OK && ask(&all.chooses) == KVC_OK && ask(&all.is_dense) == KVC_OK, "%s",
           kvc_last_error());
    check_selection(&all);
    question_free(&all.selects);
    question_free(&all.chooses);
    question_free(&all.is_dense);
    stage_free(st);
}

#endif
