/* questions.c: makes questions by chance, and compares the answers with plain arithmetic over the rows that tokens see.
 *
 * Keys, values and queries are such that their types store them without an error, and queries have an element of the
 * largest magnitude, by which kernels round them.  Scores of choices are exact then. */
#include "questions.h"

#include <float.h>

enum { UNWRITTEN = 0x5a, LARGEST = 127 };

/* ---- arrays ------------------------------------------------------------------------------------------------------ */

void lay_out(array *a, int num, int inner, int heads, int64_t row) {
    const int has_heads_inside = pick(2), backwards = !pick(3);
    const int64_t gap = pick(3) ? 0 : row;
    a->inner = inner ? inner : num;
    a->head = has_heads_inside ? row : a->inner * row + gap;
    a->token = has_heads_inside ? heads * row + gap : row;
    a->batch = has_heads_inside ? a->inner * a->token : heads * a->head;
    a->start = 0;
    if (backwards) a->start = (a->inner - 1) * a->token, a->token = -a->token;
    a->head_stride = a->head, a->token_stride = a->token, a->batch_stride = a->batch;
    memset(a->bytes, UNWRITTEN, sizeof a->bytes);
    if (!has_heads_inside || backwards || gap) return; /* otherwise rows lie side by side */
    if (pick(2)) a->head_stride = 0;
    if (pick(2)) a->token_stride = 0;
    if (pick(2)) a->batch_stride = 0;
}

char *row_in(array *a, int n, int head) {
    return a->bytes + a->start + n / a->inner * a->batch + n % a->inner * a->token + head * a->head;
}

void write_floats(array *a, int n, int head, const float *x, int num, int32_t type) {
    write_elements(row_in(a, n, head), x, num, type);
}

float read_float(int32_t type, const char *at) {
    uint32_t bits;
    uint16_t half;
    float x;
    memcpy(&half, at, sizeof half);
    if (type == KVC_F16) return (float)from_half(at);
    if (type == KVC_BF16)
        bits = (uint32_t)half << 16;
    else
        memcpy(&bits, at, sizeof bits);
    memcpy(&x, &bits, sizeof x);
    return x;
}

int is_unwritten(const char *at, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        if (at[i] != UNWRITTEN) return 0;
    return 1;
}

/* Nothing beside rows may be written.  Call after all rows were read: they are cleared. */
void check_gaps(const question *q, array *a, int heads, int64_t row) {
    for (int n = 0; n < q->num; n++)
        for (int h = 0; h < heads; h++) memset(row_in(a, n, h), UNWRITTEN, (size_t)row);
    if (!is_unwritten(a->bytes, sizeof a->bytes)) wrong("layer %d: writes between rows", q->layer);
}

/* ---- what tokens see --------------------------------------------------------------------------------------------- */

int is_far_off(int32_t position, int32_t tag) { return fabs((double)position - tokens[tag].base) > FAR; }

int is_known(const batch *of, int t) { return !w.is_wild && !w.o.sequences[of->slots[t]].is_open; }

int list_shown(const batch *of, int s, int l, shown *to) {
    const rows *list = &w.o.sequences[s].layers[l];
    int num = 0;
    if (is_cross(&w.o, l) && of->num_cross[l][s]) {
        for (; num < of->num_cross[l][s]; num++) to[num] = (shown){num, of->cross[l][s] + num, -1};
        return num;
    }
    for (; num < list->num; num++) to[num] = (shown){list->at[num].position, list->at[num].tag, -1};
    for (int t = 0; t < of->num; t++)
        if (of->slots[t] == s && is_own(&w.o, l) && gets_row(&w.o, l, of->positions[t]))
            to[num++] = (shown){of->positions[t], of->tags[t], t};
    return num;
}

int sees(const question *q, int t, const shown *row) {
    const batch *of = q->of;
    const kvc_policy *policy = &w.o.layers[q->layer].policy;
    const int32_t at = of->positions[t];
    if (hides_row(q->masked, q->plan.num_masked, w.ids[of->slots[t]], row->position)) return 0;
    if (policy->kind == KVC_CROSS) return 1;
    if (row->token >= 0 && of->has_parents) {
        if (!descends_from(of->parents, t, row->token)) return 0;
    } else if (row->position > at && !(q->plan.non_causal && q->non_causal[t - q->first])) {
        return 0;
    }
    return shows_row(policy, at, row->position);
}

/* Lists the rows that a token sees.  Returns how many there are. */
int list_seen(const question *q, int t, shown *to) {
    const int all = list_shown(q->of, q->of->slots[t], source_of(&w.o, q->layer), to);
    int num = 0;
    for (int i = 0; i < all; i++)
        if (sees(q, t, &to[i])) to[num++] = to[i];
    return num;
}

void sort_by_position(shown *rows, int num) {
    for (int i = 1; i < num; i++) {
        const shown row = rows[i];
        int j = i;
        for (; j && rows[j - 1].position > row.position; j--) rows[j] = rows[j - 1];
        rows[j] = row;
    }
}

/* Whether a token lies between positions that query tokens of its sequence see, so that it may count as visible. */
static int is_between(const question *q, int token) {
    const batch *of = q->of;
    const kvc_policy *policy = &w.o.layers[q->layer].policy;
    int is_behind = 0, is_before = 0;
    for (int t = q->first; t < q->first + q->num; t++) {
        if (of->slots[t] != of->slots[token]) continue;
        is_behind |= of->positions[token] >= lowest_seen(policy, of->positions[t]) || policy->num_sink_tokens;
        is_before |= of->positions[token] <= of->positions[t] || q->plan.non_causal;
    }
    return is_behind && is_before;
}

unsigned right_statuses(const question *q) {
    const int source = source_of(&w.o, q->layer);
    unsigned bits = 0, perhaps = 0;
    shown rows[MOST_SHOWN];
    if (q->of->restores) return 1u << KVC_ERR_INVALID;
    for (int t = 0; t < q->of->num; t++)
        if (!is_known(q->of, t)) return ~0u;
    for (int t = q->first; t < q->first + q->num; t++) {
        const int num = list_seen(q, t, rows);
        for (int i = 0; i < num; i++)
            if (rows[i].token >= 0 && !q->of->is_put[source][rows[i].token]) bits |= 1u << KVC_ERR_INVALID;
        if (is_cross(&w.o, source) && !list_shown(q->of, q->of->slots[t], source, rows)) bits |= 1u << KVC_ERR_INVALID;
    }
    for (int t = 0; t < q->of->num && is_own(&w.o, source); t++)
        if (!q->of->is_put[source][t] && is_between(q, t)) perhaps |= 1u << KVC_ERR_INVALID;
    return perhaps | (bits ? bits : 1u << KVC_OK);
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

static int32_t position_in(const batch *of) {
    const int32_t at = of->positions[pick(of->num)];
    return pick(3) ? at : at > 60 ? at - pick(60) : pick(64);
}

/* Hides ranges of positions, often of the batch's own tokens. */
static void make_masks(question *q) {
    q->plan.num_masked = pick(2) ? 0 : 1 + pick(MOST_MASKED);
    for (int i = 0; i < q->plan.num_masked; i++) {
        const int s = q->of->slots[pick(q->of->num)];
        const int32_t begin = position_in(q->of);
        const int32_t end = begin < INT32_MAX - 64 ? begin + pick(20) : begin;
        q->masked[i] = (kvc_masked){w.ids[s], begin, pick(3) ? end : KVC_END};
    }
    if (!q->plan.num_masked && pick(2)) return;
    q->plan.masked = q->masked;
    q->plan.masked_size = sizeof *q->masked;
}

void make_plan(question *q, const batch *of, int layer, int first, int num) {
    const kvc_layer *at = &w.o.layers[layer];
    memset(q, 0, offsetof(question, numbers));
    q->of = of;
    q->layer = layer;
    q->first = first, q->num = num;
    q->num_heads = at->num_kv_heads * (1 + pick(QUERY_HEADS / HEADS));
    q->plan = (kvc_plan_args){.struct_size = sizeof q->plan,
                              .layer = layer,
                              .first = first,
                              .num_tokens = first + num == of->num && pick(2) ? 0 : num,
                              .num_heads = q->num_heads,
                              .num_threads = pick(3) ? 0 : 1 + pick(4)};
    for (int t = 0; t < num; t++) q->non_causal[t] = (uint8_t)(pick(4) == 0);
    if (!pick(4)) q->plan.non_causal = q->non_causal;
    make_masks(q);
    if (!at->v_dim) {
        const int num = at->num_kv_heads;
        do q->num_choices = 1 + pick(q->num_heads);
        while (q->num_heads % q->num_choices || (q->num_choices % num && num % q->num_choices));
        q->plan.num_choices = q->num_choices;
    } else if (!pick(w.theme == ATTENTION ? 6 : 3)) {
        q->plan.max_chosen = 1 + pick(MOST_CHOSEN);
    } else if (at->sketch_bits && pick(3)) {
        q->plan.select_rows = 1 + pick(w.theme == ATTENTION || pick(2) ? 4 : 16);
    }
    if (at->v_dim && !pick(w.theme == ATTENTION ? 2 : 3)) q->plan.precision = KVC_PRECISION_INT8;
}

void make_numbers(float x[][QUERY_HEADS][DIM], int num, int num_heads, float unit, int is_sparse) {
    for (int t = 0; t < num; t++)
        for (int h = 0; h < num_heads; h++) {
            const int only = is_sparse && pick(4) ? FIRST_OF_TAG + pick(FIRST_TURNED - FIRST_OF_TAG) : -1;
            for (int d = 0; d < DIM; d++) {
                const int n = d == only || (only < 0 && !d) ? LARGEST
                              : only < 0                    ? (pick(2) ? 1 + pick(LARGEST) : -1 - pick(LARGEST))
                                                            : 0;
                x[t][h][d] = (float)n * unit;
            }
        }
}

void write_numbers(array *a, float x[][QUERY_HEADS][DIM], int num, int inner, int num_heads, int dim, int32_t type) {
    lay_out(a, num, inner, num_heads, dim * float_bytes(type));
    for (int t = 0; t < num; t++)
        for (int h = 0; h < num_heads; h++) write_floats(a, t, h, x[t][h], dim, type);
}

void make_queries(question *q, float unit, int is_sparse) {
    const kvc_layer *layer = &w.o.layers[q->layer];
    const int32_t type = pick(3);
    make_numbers(q->numbers, q->num, q->num_heads, unit, is_sparse);
    write_numbers(&q->q, q->numbers, q->num, q->inner, q->num_heads, layer->k_dim, type);
    q->args.q = q->choosing.q = row_in(&q->q, 0, 0);
    q->args.q_type = q->choosing.q_type = type;
    q->args.q_token_stride = q->choosing.q_token_stride = q->q.token_stride;
    q->args.q_head_stride = q->choosing.q_head_stride = q->q.head_stride;
    q->args.q_batch_stride = q->choosing.q_batch_stride = q->q.batch_stride;
}

/* Lists positions, or blocks of them, in any order; some repeat, and some do not exist. */
void make_lists(question *q, int heads, int width, int block) {
    lay_out(&q->lists, q->num, q->inner, heads, width * (int64_t)sizeof(int32_t));
    for (int t = 0; t < q->num; t++)
        for (int h = 0; h < heads; h++) {
            const int32_t from = q->of->positions[q->first + t] / block, is_range = pick(2);
            for (int i = 0; i < width; i++) {
                int32_t *entry = &q->entries[t][h][i];
                *entry = is_range ? from - i : from - pick(64 / block + 1);
                if (is_range && pick(2)) *entry = from - width + 1 + i;
                if (!pick(8)) *entry = pick(2) ? -1 - pick(3) : INT32_MAX - pick(3);
            }
            memcpy(row_in(&q->lists, t, h), q->entries[t][h], (size_t)width * sizeof(int32_t));
        }
}

/* Chooses rows for each token; max_chosen of the plan says how many. */
static void make_choice(question *q) {
    const int most_of_all = q->plan.max_chosen, block = pick(2) ? pick(2) : 1 + pick(most_of_all),
              size = block ? block : 1;
    const int tail = pick(2) && 2 * size - 1 <= most_of_all;
    const int most = (most_of_all - (tail ? size - 1 : 0)) / size;
    q->chosen = (kvc_chosen){.struct_size = sizeof q->chosen,
                             .num_choices = pick(2) ? w.o.layers[q->layer].num_kv_heads : 1,
                             .width = pick(2) ? most : 1 + pick(most),
                             .block = block,
                             .tail = tail};
    make_lists(q, q->chosen.num_choices, q->chosen.width, size);
    q->chosen.positions = (const int32_t *)(const void *)row_in(&q->lists, 0, 0);
    q->chosen.token_stride = q->lists.token_stride;
    q->chosen.choice_stride = q->lists.head_stride;
    q->chosen.batch_stride = q->lists.batch_stride;
    q->args.chosen = &q->chosen;
}

/* Results of attention to other rows, which join the softmax, or saw nothing. */
static void make_prior(question *q) {
    const int v_dim = w.o.layers[q->layer].v_dim;
    q->prior_out = q->out, q->prior_lse = q->lse;
    for (int t = 0; t < q->num; t++)
        for (int h = 0; h < q->num_heads; h++) {
            const int sees_nothing = !pick(6);
            const float lse = sees_nothing ? -INFINITY : (float)(pick(65) - 32) / 8;
            for (int d = 0; d < v_dim; d++) q->prior[t][h][d] = sees_nothing ? NAN : (float)(pick(255) - 127);
            write_floats(&q->prior_out, t, h, q->prior[t][h], v_dim, q->out_type);
            write_floats(&q->prior_lse, t, h, &lse, 1, KVC_F32);
        }
    q->args.prior_out = row_in(&q->prior_out, 0, 0);
    q->args.prior_lse = (const float *)(const void *)row_in(&q->prior_lse, 0, 0);
}

/* Draws the optional arguments of a call, alone and in pairs. */
static void make_optional(question *q) {
    static const float sinks[] = {-INFINITY, -3, 0, 0.5f, 4}, slopes[] = {0, 0.01f, 0.5f, -0.125f};
    int is_far = 0;
    for (int h = 0; h < q->num_heads; h++) {
        q->sinks[h] = sinks[pick(5)];
        q->alibi[h] = slopes[pick(4)];
    }
    for (int t = 0; t < q->of->num; t++) is_far |= q->of->positions[t] > FAR;
    if (!pick(3)) q->args.sinks = q->sinks;
    if (!pick(4) && !is_far) q->args.alibi = q->alibi;
    if (!pick(4)) q->args.softcap = 5;
    if (pick(3)) q->args.lse = (float *)(void *)row_in(&q->lse, 0, 0);
    if (!pick(3)) make_prior(q);
    q->cancel = !pick(8);
    if (q->cancel || pick(2)) q->args.cancel = q->choosing.cancel = &q->cancel;
}

static void make_attending(question *q) {
    const kvc_layer *layer = &w.o.layers[q->layer];
    const int is_rounded = q->plan.precision || is_transformed(layer, 0),
              has_scale = layer->value_in_key || is_rounded || pick(2);
    const float scale = is_rounded ? 0x1p-15f : 0x1p-13f; /* rounded queries: small scores are off by little */
    q->args = (kvc_attend_args){.struct_size = sizeof q->args,
                                .scale = has_scale ? scale : 0,
                                .tokens_per_sequence = q->inner,
                                .out_is_f32 = pick(2)};
    make_queries(q, has_scale ? 1 : 0x1p-11f, 0);
    q->out_type = q->args.out_is_f32 ? KVC_F32 : q->args.q_type;
    lay_out(&q->out, q->num, q->inner, q->num_heads, layer->v_dim * float_bytes(q->out_type));
    lay_out(&q->lse, q->num, q->inner, q->num_heads, sizeof(float));
    q->args.out = row_in(&q->out, 0, 0);
    q->args.out_token_stride = q->out.token_stride;
    q->args.out_head_stride = q->out.head_stride;
    q->args.out_batch_stride = q->out.batch_stride;
    q->args.lse_token_stride = q->lse.token_stride;
    q->args.lse_head_stride = q->lse.head_stride;
    q->args.lse_batch_stride = q->lse.batch_stride;
    make_optional(q);
    if (q->plan.max_chosen) make_choice(q);
}

void make_question(question *q) {
    q->inner = pick(3) ? 0 : 1 + pick(q->num);
    if (q->inner && q->num % q->inner) q->inner = 0;
    make_attending(q);
    if (!w.o.layers[q->layer].v_dim) make_choosing(q);
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

/* Asks the same of the tokens [first, first + num) alone.  Company changes no bit of their results. */
static void compare_alone(question *q, int first, int num) {
    static _Thread_local array out, lse;
    const int n = first - q->first;
    const int64_t row = w.o.layers[q->layer].v_dim * float_bytes(q->out_type);
    kvc_plan_args plan = q->plan;
    kvc_attend_args args = q->args;
    kvc_chosen chosen = q->chosen;
    out = q->out, lse = q->lse;
    plan.first = first, plan.num_tokens = num;
    if (plan.non_causal) plan.non_causal += n;
    args.put = NULL, args.cancel = NULL, args.tokens_per_sequence = 0;
    args.q = row_in(&q->q, n, 0), args.q_token_stride = q->q.token, args.q_head_stride = q->q.head;
    args.out = row_in(&out, n, 0), args.out_token_stride = out.token, args.out_head_stride = out.head;
    args.lse = (float *)(void *)row_in(&lse, n, 0), args.lse_token_stride = lse.token, args.lse_head_stride = lse.head;
    if (args.prior_out) args.prior_out = row_in(&q->prior_out, n, 0);
    if (args.prior_out) args.prior_lse = (const float *)(const void *)row_in(&q->prior_lse, n, 0);
    if (args.chosen) chosen.positions = (const int32_t *)(const void *)row_in(&q->lists, n, 0);
    if (args.chosen) args.chosen = &chosen;
    chosen.token_stride = q->lists.token, chosen.choice_stride = q->lists.head;
    const int left = drive.arm(0), was_within = me->is_within;
    kvc_status status;
    me->is_within = 1; /* no call comes between */
    do UNTIL_MEMORY(status, kvc_attend(w.batches[me->call->client], &plan, &args));
    while (status == KVC_ERR_CANCELLED); /* by the poll */
    me->is_within = was_within;
    drive.arm(left);
    if (status) wrong("layer %d: tokens from %d to %d alone: %s", q->layer, first, first + num, kvc_last_error());
    for (int i = n; i < n + num; i++)
        for (int h = 0; h < q->num_heads; h++)
            if (memcmp(row_in(&q->out, i, h), row_in(&out, i, h), (size_t)row) ||
                (q->args.lse && memcmp(row_in(&q->lse, i, h), row_in(&lse, i, h), sizeof(float))))
                wrong("layer %d: token %d, head %d has other bits alone", q->layer, q->first + i, h);
}

void check_alone(question *q) {
    for (int t = q->first, end = t + q->num, next; t < end; t = next) {
        const int s = q->of->slots[t], stride = q->inner ? q->inner : q->num;
        int elsewhere = 0;
        for (next = t + 1; next < end && q->of->slots[next] == s;) next++;
        for (int u = q->first; u < end; u++) elsewhere |= (u < t || u >= next) && q->of->slots[u] == s;
        const int in_one_stride = (t - q->first) / stride == (next - 1 - q->first) / stride;
        if (!elsewhere && in_one_stride && next - t < q->num && is_known(q->of, t)) compare_alone(q, t, next - t);
    }
}

/* Whether a token may be attended to in bytes: if the processor multiplies them. */
static int is_in_bytes(const question *q, int t) {
    const kvc_layer *layer = &w.o.layers[q->layer];
    int beside = 0;
    for (int u = q->first; u < q->first + q->num; u++) beside += q->of->slots[u] == q->of->slots[t];
    return q->plan.precision && !q->args.chosen && beside > 8 && layer->k_dim % 32 == 0 && layer->v_dim % 32 == 0;
}

/* How far off a number may be.  Queries of quantised keys, weights of quantised values, and results are rounded.  In
 * bytes, a weight is off by up to half a step of 255, and values of some types are rounded. */
static double error_of(const question *q, int in_bytes, double largest, double right) {
    const kvc_layer *layer = &w.o.layers[q->layer];
    const int is_rounded = in_bytes || is_transformed(layer, 0) || is_transformed(layer, 1);
    const double coarse = is_rounded ? 3e-2 : layer->k_type > KVC_BF16 || layer->v_type > KVC_BF16 ? 1e-3 : 1e-4;
    return coarse * largest + (q->out_type == KVC_F32 ? 0 : q->out_type == KVC_F16 ? 0x1p-10 : 0x1p-7) * fabs(right);
}

/* reads: which of the rows the token reads; NULL: all. */
static void check_head(question *q, int t, int h, const shown *rows, int num, const uint8_t *reads) {
    const int n = t - q->first, source = source_of(&w.o, q->layer);
    const kvc_layer *layer = &w.o.layers[source];
    const int kv = h * layer->num_kv_heads / q->num_heads;
    double numbers[DIM], k[MOST_SHOWN][DIM], v[MOST_SHOWN][DIM], largest = 1;
    seen_row seen[MOST_SHOWN];
    float x[DIM], prior_lse;
    kvc_chosen chosen = q->chosen;
    chosen.positions = **q->entries;
    chosen.token_stride = sizeof *q->entries;
    chosen.choice_stride = sizeof **q->entries;
    sight s = {.q = doubles(numbers, q->numbers[n][h], layer->k_dim),
               .k_dim = layer->k_dim,
               .v_dim = layer->v_dim,
               .scale = (double)q->args.scale,
               .softcap = (double)q->args.softcap,
               .alibi = q->args.alibi ? (double)q->alibi[h] : 0,
               .sink = q->args.sinks ? &q->sinks[h] : NULL,
               .rows = seen};
    if (q->args.prior_out) {
        prior_lse = read_float(KVC_F32, row_in(&q->prior_lse, n, h));
        s.prior_out = q->prior[n][h], s.prior_lse = &prior_lse;
        largest = LARGEST;
    }
    for (int i = 0; i < num; i++) {
        const shown *r = &rows[i];
        if (reads && !reads[i]) continue;
        if (q->args.chosen && !names_row(&chosen, n, kv, q->of->positions[t], r->position, stride_of(&w.o, source)))
            continue;
        make_key(layer, r->tag, source, kv, r->position - tokens[r->tag].base, x);
        doubles(k[i], x, layer->k_dim);
        make_value(layer, r->tag, source, kv, x);
        doubles(v[i], x, layer->v_dim);
        seen[s.num++] = (seen_row){.k = k[i], .v = v[i], .apart = fabs((double)r->position - q->of->positions[t])};
        largest = LARGEST;
    }
    attend_plainly(&s);
    const int in_bytes = is_in_bytes(q, t);
    for (int d = 0; d < layer->v_dim; d++) {
        const double got = (double)read_float(q->out_type, row_in(&q->out, n, h) + d * float_bytes(q->out_type));
        if (!(fabs(got - s.out[d]) <= error_of(q, in_bytes, largest, s.out[d])))
            wrong("layer %d: token %d, head %d, element %d of %d rows is %g, not %g", q->layer, t, h, d, s.num, got,
                  s.out[d]);
    }
    const double lse = (double)read_float(KVC_F32, row_in(&q->lse, n, h));
    if (q->args.lse && !(lse == s.lse || fabs(lse - s.lse) <= (in_bytes || is_transformed(layer, 0) ? 5e-2 : 1e-3)))
        wrong("layer %d: token %d, head %d of %d rows has an lse of %g, not %g", q->layer, t, h, s.num, lse, s.lse);
}

static void check_token(question *q, int t, int partly) {
    const kvc_layer *layer = &w.o.layers[q->layer];
    shown rows[MOST_SHOWN];
    uint8_t reads[MOST_SHOWN];
    const int num = list_seen(q, t, rows), selects = select_plainly(q, t, num);
    if (selects) sort_by_position(rows, num);
    for (int h = 0, last = -1, is_sure = 1; h < q->num_heads; h++) {
        const int kv = h * layer->num_kv_heads / q->num_heads;
        if (selects && kv != last) is_sure = mark_reads(q, q->batch, t, last = kv, reads);
        if (is_sure &&
            !(partly && is_unwritten(row_in(&q->out, t - q->first, h), layer->v_dim * float_bytes(q->out_type))))
            check_head(q, t, h, rows, num, selects ? reads : NULL);
    }
}

void check_answers(question *q, int partly) {
    const kvc_layer *layer = &w.o.layers[q->layer];
    const int64_t row = layer->v_dim * float_bytes(q->out_type);
    if (!layer->v_dim) {
        check_choices(q, partly);
        return;
    }
    for (int t = q->first; t < q->first + q->num; t++)
        if (is_known(q->of, t)) check_token(q, t, partly);
    check_gaps(q, &q->out, q->num_heads, row);
    if (!q->args.lse && !is_unwritten(q->lse.bytes, sizeof q->lse.bytes)) wrong("writes lse, which is NULL");
    check_gaps(q, &q->lse, q->num_heads, sizeof(float));
}
