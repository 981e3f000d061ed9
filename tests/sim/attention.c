/* attention.c: attends in the batches of the simulated cache, and compares the results with sums over the rows.
 *
 * In a layer of keys alone, it chooses rows.  The elements of queries and keys are whole numbers there, so that scores
 * are exact, and so is the comparison.
 *
 * Some plans are run by several threads, each of which skips tasks, runs others twice, and goes on to another layer
 * when it likes.  A plan for chosen rows is made before the choice of each layer.  Whatever they do, an output is
 * either not written or right.  Once all tasks of a layer were run one after the other, the whole output is written.
 */
#include <string.h>

#include "sim.h" /* first, as it decides on sizes of the core */

#include "attend/work.h"
#include "support/sketches.h"
#include "world/attention.h"

enum {
    MOST_CREW = 3,    /* threads of a plan */
    MOST_CHOSEN = 40, /* positions that a choice may name */
    MOST_TRIES = 20   /* of a task that another thread is running, or whose plan is at another layer */
};

static const float UNWRITTEN = 3e30f, SCALE = 1e-4f;
static const int32_t UNENTERED = -7;

typedef struct result {
    float out[MOST_TOKENS][QUERY_HEADS][DIM], lse[MOST_TOKENS][QUERY_HEADS];
} result;

/* A layer's part of an attention. */
typedef struct piece {
    int layer;
    float q[MOST_TOKENS][QUERY_HEADS][ROW];
    int32_t entries[MOST_TOKENS][HEADS][MOST_CHOSEN];
    kvc_chosen chosen; /* args.chosen, unless that is NULL */
    result result, prior;
    float sinks[QUERY_HEADS];
    int32_t cancel;
    kvc_attend_args args;
    kvc_choose_args choosing; /* in a layer of keys alone */
    float weights[MOST_TOKENS][QUERY_HEADS], scores[MOST_TOKENS][QUERY_HEADS][MOST_CHOSEN];
    int32_t among[MOST_TOKENS][QUERY_HEADS][MOST_CHOSEN], entered[MOST_TOKENS][QUERY_HEADS][MOST_CHOSEN];
} piece;

/* Threads that run one plan. */
typedef struct crew {
    client *c;
    pass *p;
    query query;
    kvc_plan *plan;
    int num_pieces, num_threads, may_cancel, may_lack;
    piece pieces[2];
    piece call; /* of kvc_attend, which may be made while the plan is there */
} crew;

static crew crews[MOST_CLIENTS + 1];

/* ---- what a token sees ------------------------------------------------------------------------------------------- */

int sees(const kvc_policy *policy, int at, int position) { return position <= at && shows_row(policy, at, position); }

static int member_of(const pass *p, int t) {
    int i = 0;
    while (t >= p->first[i + 1]) i++;
    return i;
}

/* Returns the token of t's sequence that stands at a position in the batch, or -1.  In a tree, it is t or an ancestor
 * of t. */
static int own_token(const pass *p, int t, int position) {
    const int i = member_of(p, t);
    if (p->is_tree) {
        while (t >= 0 && p->positions[t] != position) t = p->parents[t];
        return t;
    }
    for (int own = p->first[i]; own < p->first[i + 1]; own++)
        if (p->positions[own] == position) return own;
    return -1;
}

/* Returns the tag of the row that a token sees at a position, 0 if it sees none; *lacks is set where that row was not
 * put yet. */
static int tag_seen(const world *w, const pass *p, const query *q, int layer, int t, int position, int *lacks) {
    const int i = member_of(p, t), source = source_of(w, layer), own = own_token(p, t, position), at = p->positions[t];
    const int is_later = position > at && !(q->has_non_causal && q->non_causal[t - q->first]);
    if (!has_row(w, source, position) || is_later || !shows_row(&w->layers[source].policy, at, position)) return 0;
    if (hides_row(q->masked, q->num_masked, id_of(p->sequences[i]), position)) return 0;
    if (own >= p->num_put[source]) *lacks = 1;
    return own >= 0 ? p->tags[own] : w->sequences[p->sequences[i]].tags[source][position];
}

/* Whether a query sees rows that were not put in a layer. */
static int lacks_rows(const world *w, const pass *p, const query *q, int layer) {
    int lacks = 0;
    for (int t = q->first; t < q->first + q->num; t++)
        for (int position = 0; position < MOST; position++) tag_seen(w, p, q, layer, t, position, &lacks);
    return lacks;
}

static int is_spoilt(const world *w, const pass *p) {
    for (int i = 0; i < p->num_sequences; i++)
        if (w->sequences[p->sequences[i]].is_spoilt) return 1;
    return 0;
}

static int has_unstored(const pass *p) {
    for (int t = 0; t < p->num_tokens; t++)
        if (p->unstored[t]) return 1;
    return 0;
}

/* ---- results ----------------------------------------------------------------------------------------------------- */

static int is_unwritten(const float *out, float lse) {
    for (int d = 0; d < DIM; d++)
        if (out[d] != UNWRITTEN) return 0;
    return lse == UNWRITTEN;
}

/* ---- what a token selects ---------------------------------------------------------------------------------------- */

/* The positions of the rows that a token reads for a KV head; is_unsure: rounding decides. */
typedef struct selected {
    uint8_t reads[MOST];
    int is_unsure;
} selected;

/* Whether the tokens of a query select rows in a layer, if they see enough. */
static int selects(const world *w, const query *q, int layer) { return q->select && w->layers[layer].sketch_bits; }

/* How many of a query's tokens are of the sequence of token t. */
static int num_beside(const pass *p, const query *q, int t) {
    int num = 0;
    for (int other = q->first; other < q->first + q->num; other++) num += member_of(p, other) == member_of(p, t);
    return num;
}

/* Whether a token that sees so many rows selects some of them. */
static int selects_of(const pass *p, const query *q, int t, int num_seen) {
    return num_beside(p, q, t) <= KVC_MOST_SELECTING && num_seen > KVC_FIRST_READ + KVC_LAST_READ + 2 * q->select;
}

static int num_seen(const world *w, const pass *p, const query *q, int layer, int t) {
    int num = 0, lacks = 0;
    for (int position = 0; position < MOST; position++) num += tag_seen(w, p, q, layer, t, position, &lacks) != 0;
    return num;
}

/* Notes which tokens have selected rows: theirs, and those behind them, count as inexact from now on. */
static void note_selected(client *c, pass *p, const query *q, int layer) {
    if (!selects(c->w, q, layer) || is_spoilt(c->w, p)) return;
    for (int t = q->first; t < q->first + q->num; t++) {
        const int64_t id = id_of(p->sequences[member_of(p, t)]);
        if (!selects_of(p, q, t, num_seen(c->w, p, q, layer, t))) continue;
        p->has_selected[t] = 1;
        if (!c->w->is_meddled && kvc_exact_to(c->w->cache, id) > p->positions[t])
            fail(c, "sequence %lld is exact to %d, though the token at %d has selected rows", (long long)id,
                 kvc_exact_to(c->w->cache, id), p->positions[t]);
    }
}

/* Lists the rows that a token sees, by position. */
static int list_seen(const client *c, const pass *p, const query *q, int layer, int t, sketched_row *to) {
    const kvc_batch *batch = p->batch;
    const int source = source_of(c->w, layer);
    int member = 0, num = 0, lacks = 0;
    while (batch->sequences[member].sequence->id != id_of(p->sequences[member_of(p, t)])) member++;
    const int all = list_sketched(batch, source, member, to);
    for (int i = 0; i < all; i++)
        if (tag_seen(c->w, p, q, layer, t, to[i].position, &lacks) && to[i].token == own_token(p, t, to[i].position))
            to[num++] = to[i];
    return num;
}

/* Finds what a token selects for a KV head, by the sketches of the rows that it sees. */
static void select_by_sketches(const client *c, const pass *p, const query *q, const piece *of, int t, int kv,
                               selected *to) {
    static const selecting usual = {KVC_FIRST_READ, KVC_LAST_READ, 0};
    sketched_row rows[MOST + MOST_TOKENS];
    const kvc_layer *layer = &c->w->layers[of->layer];
    const int num = list_seen(c, p, q, of->layer, t, rows), group = q->num_heads / HEADS;
    double scores[QUERY_HEADS * MOST], off = 0;
    uint8_t reads[MOST];
    selecting by = usual;
    by.rows = q->select;
    for (int h = 0; h < group; h++)
        for (int j = 0; j < num; j++) {
            const rounded_query rounded = round_query(layer, of->q[t - q->first][kv * group + h], rows[j].delta);
            scores[h * num + j] =
                (double)SCALE * product_with(&rounded, rows[j].bytes + (size_t)kv * rows[j].head_stride, ROW);
            off = fmax(off, (double)SCALE * unsure_of(&rounded, rows[j].bytes + (size_t)kv * rows[j].head_stride, ROW));
        }
    to->is_unsure = !mark_selected(&by, num, scores, group, 2 * off, reads);
    memset(to->reads, 0, sizeof to->reads);
    for (int j = 0; j < num; j++) to->reads[rows[j].position] = reads[j];
}

/* Compares the result of one token and query head with plain arithmetic over the rows that it sees.  read: what it
 * selects of these; NULL: it selects nothing. */
static void check_head(const client *c, const pass *p, const query *q, const piece *of, int t, int h,
                       const selected *read) {
    const world *w = c->w;
    const int source = source_of(w, of->layer), n = t - q->first, kv = h * HEADS / q->num_heads;
    const float *out = of->result.out[n][h];
    double wide_q[ROW], k[MOST][ROW], v[MOST][DIM], largest = 1;
    seen_row rows[MOST];
    sight s = {.q = doubles(wide_q, of->q[n][h], ROW),
               .k_dim = key_dim(w, source),
               .v_dim = DIM,
               .scale = (double)SCALE,
               .sink = of->args.sinks ? &of->sinks[h] : NULL,
               .rows = rows};
    int lacks = 0;
    if (of->args.prior_out) s.prior_out = of->prior.out[n][h], s.prior_lse = &of->prior.lse[n][h];
    for (int d = 0; d < DIM && of->args.prior_out; d++) largest = fmax(largest, fabs((double)s.prior_out[d]));
    for (int position = 0; position < MOST; position++) {
        const int tag = tag_seen(w, p, q, of->layer, t, position, &lacks);
        if (!tag || (read && !read->reads[position])) continue;
        if (of->args.chosen && !names_row(&of->chosen, n, kv, p->positions[t], position, stride_of(w, source)))
            continue;
        for (int d = 0; d < s.k_dim; d++) k[position][d] = (double)key_element(w, tag, source, kv, d, position);
        for (int d = 0; d < DIM; d++) {
            v[position][d] = (double)element(tag, source, 1, kv, d);
            largest = fmax(largest, fabs(v[position][d]));
        }
        rows[s.num++] = (seen_row){.k = k[position], .v = v[position]};
    }
    attend_plainly(&s);
    for (int d = 0; d < DIM; d++)
        if (!(fabs(out[d] - s.out[d]) <= 1e-4 * largest))
            fail(c, "%g for token %d, head %d in layer %d of sequence %lld, not %g", (double)out[d], t, h, of->layer,
                 (long long)id_of(p->sequences[member_of(p, t)]), s.out[d]);
    const double lse = (double)of->result.lse[n][h];
    if (!of->args.lse && of->result.lse[n][h] != UNWRITTEN) fail(c, "wrote lse, which is NULL");
    if (of->args.lse && !(lse == s.lse || fabs(lse - s.lse) <= 1e-3))
        fail(c, "an lse of %g for token %d, head %d in layer %d, not %g", lse, t, h, of->layer, s.lse);
}

/* The score that a choice of the n-th token of a query gives a row. */
static double score_row(const world *w, const query *q, const piece *of, int n, int choice, int tag, int position) {
    const kvc_choose_args *a = &of->choosing;
    const int source = source_of(w, of->layer), num = q->num_heads / a->num_choices;
    double sum = 0;
    for (int h = choice * num; h < (choice + 1) * num; h++) {
        double product = 0;
        for (int d = 0; d < DIM; d++)
            product += of->q[n][h][d] * (double)key_element(w, tag, source, h * HEADS / q->num_heads, d, position);
        sum += head_score(a, DIM, product, a->weights ? (double)of->weights[n][h] : 1);
    }
    return sum;
}

/* Compares a choice of one token with what the rows that it sees make right. */
static void check_choice(const client *c, const pass *p, const query *q, const piece *of, int t, int choice) {
    candidate all[MOST];
    const kvc_choose_args *a = &of->choosing;
    const int n = t - q->first, at = p->positions[t], stride = stride_of(c->w, of->layer);
    const int32_t *entered = of->entered[n][choice];
    int num = 0, lacks = 0;
    for (int position = 0; position < MOST; position++) {
        const int tag = tag_seen(c->w, p, q, of->layer, t, position, &lacks);
        if (tag && may_choose(a, of->among[n][choice], stride, position))
            all[num++] = (candidate){.id = entry_of(a, position),
                                     .is_forced = must_choose(a, at, stride, position),
                                     .score = score_row(c->w, q, of, n, choice, tag, position)};
    }
    num = choose_plainly(all, num, a->width);
    for (int i = 0; i < a->width; i++) {
        const int right = i < num ? all[i].id : -1;
        const double score = i < num ? all[i].score : -INFINITY;
        if (entered[i] != right)
            fail(c, "token %d chooses %d in layer %d as entry %d of choice %d, not %d", t, entered[i], of->layer, i,
                 choice, right);
        if (a->scores && of->scores[n][choice][i] != score)
            fail(c, "a score of %g for entry %d of token %d in layer %d, not %g", (double)of->scores[n][choice][i],
                 right, t, of->layer, score);
    }
}

/* Compares the choices of a query's tokens.  partly: some may not be made. */
static void check_choices(const client *c, const pass *p, const query *q, const piece *of, int partly) {
    for (int t = q->first; t < q->first + q->num; t++)
        for (int i = 0; i < q->num_choices; i++)
            if (!partly || of->entered[t - q->first][i][0] != UNENTERED) check_choice(c, p, q, of, t, i);
}

/* Compares a result with plain arithmetic over the rows.  partly: parts of the result may not be written. */
static void check_result(const client *c, const pass *p, const query *q, const piece *of, int partly) {
    if (is_spoilt(c->w, p)) return;
    if (!c->w->layers[of->layer].v_dim) {
        check_choices(c, p, q, of, partly);
        return;
    }
    for (int t = q->first; t < q->first + q->num; t++) {
        selected read;
        const int has_selected = selects(c->w, q, of->layer) && selects_of(p, q, t, num_seen(c->w, p, q, of->layer, t));
        for (int h = 0, last = -1; h < q->num_heads; h++) {
            const int kv = h * HEADS / q->num_heads;
            if (partly && is_unwritten(of->result.out[t - q->first][h], of->result.lse[t - q->first][h])) continue;
            if (has_selected && kv != last) select_by_sketches(c, p, q, of, t, last = kv, &read);
            if (!has_selected || !read.is_unsure) check_head(c, p, q, of, t, h, has_selected ? &read : NULL);
        }
    }
}

/* Names positions for each token, or blocks of them, in any order; some repeat, and some do not exist. */
static void make_choice(piece *of, const query *q) {
    const int block = pick(2) ? pick(2) : 1 + pick(q->max_chosen), size = block ? block : 1;
    const int tail = pick(2) && 2 * size - 1 <= q->max_chosen;
    const int most = (q->max_chosen - (tail ? size - 1 : 0)) / size;
    of->chosen = (kvc_chosen){.struct_size = sizeof of->chosen,
                              .positions = **of->entries,
                              .token_stride = sizeof *of->entries,
                              .choice_stride = sizeof **of->entries,
                              .num_choices = pick(2) ? HEADS : 1,
                              .width = pick(2) ? most : 1 + pick(most),
                              .block = block,
                              .tail = tail};
    of->args.chosen = &of->chosen;
    for (int t = 0; t < q->num; t++)
        for (int kv = 0; kv < HEADS; kv++) {
            const int first = pick(MOST / size + 1), is_range = pick(2);
            for (int i = 0; i < of->chosen.width; i++) {
                int32_t *entry = &of->entries[t][kv][i];
                *entry = is_range ? first + i : pick(MOST / size + 1);
                if (!pick(8)) *entry = pick(2) ? -1 - pick(3) : INT32_MAX - pick(3);
            }
        }
}

/* Says how rows are to be chosen.  No element of a query is 0: turned by a right angle, it would become almost 0. */
static void make_choosing(piece *of, const query *q, int stride) {
    static const float scales[] = {0, 0.5f, -2};
    for (int t = 0; t < q->num; t++)
        for (int h = 0; h < q->num_heads; h++) {
            of->weights[t][h] = (float)(pick(4) - 1);
            for (int d = 0; d < DIM; d++) of->q[t][h][d] = (float)(2 * pick(4) - 3);
            for (int i = 0; i < MOST_CHOSEN; i++) {
                of->among[t][h][i] = pick(8) ? pick(MOST) : pick(2) ? -1 - pick(3) : INT32_MAX - pick(3);
                of->entered[t][h][i] = UNENTERED;
            }
        }
    of->choosing = (kvc_choose_args){.struct_size = sizeof of->choosing,
                                     .q = of->q,
                                     .weights = pick(2) ? *of->weights : NULL,
                                     .among = pick(3) ? NULL : **of->among,
                                     .chosen = **of->entered,
                                     .scores = pick(2) ? **of->scores : NULL,
                                     .q_token_stride = sizeof *of->q,
                                     .q_head_stride = sizeof **of->q,
                                     .weights_token_stride = sizeof *of->weights,
                                     .weights_head_stride = sizeof **of->weights,
                                     .among_token_stride = sizeof *of->among,
                                     .among_choice_stride = sizeof **of->among,
                                     .chosen_token_stride = sizeof *of->entered,
                                     .chosen_choice_stride = sizeof **of->entered,
                                     .scores_token_stride = sizeof *of->scores,
                                     .scores_choice_stride = sizeof **of->scores,
                                     .scale = scales[pick(3)],
                                     .relu = pick(2),
                                     .num_choices = q->num_choices,
                                     .width = 1 + pick(pick(2) ? 6 : MOST_CHOSEN),
                                     .among_width = pick(MOST_CHOSEN + 1),
                                     .block = pick(2) ? pick(2) : stride * (1 + pick(6)),
                                     .num_first = pick(2) ? 0 : pick(5),
                                     .num_local = pick(2) ? 0 : pick(5)};
}

/* Gives sinks, and the results of other calls, or leaves them out; now and then nobody asks for lse. */
static void make_optional(piece *of, const query *q) {
    for (int h = 0; h < QUERY_HEADS; h++) of->sinks[h] = (float)(pick(9) - 4);
    for (int t = 0; t < q->num; t++)
        for (int h = 0; h < q->num_heads; h++) {
            const int sees_nothing = !pick(6);
            of->prior.lse[t][h] = sees_nothing ? -INFINITY : (float)(pick(201) - 100) / 20;
            for (int d = 0; d < DIM; d++) of->prior.out[t][h][d] = sees_nothing ? NAN : (float)(pick(2001) - 1000);
        }
    if (pick(3) == 0) of->args.sinks = of->sinks;
    if (pick(3) == 0) of->args.prior_out = of->prior.out, of->args.prior_lse = *of->prior.lse;
    if (pick(3) == 0) of->args.lse = NULL;
}

static void make_piece(piece *of, const world *w, int layer, const query *q) {
    of->layer = layer;
    of->cancel = 0;
    for (int t = 0; t < q->num; t++)
        for (int h = 0; h < q->num_heads; h++) {
            of->result.lse[t][h] = UNWRITTEN;
            for (int d = 0; d < ROW; d++) of->q[t][h][d] = (float)(pick(2001) - 1000) / 250;
            for (int d = 0; d < DIM; d++) of->result.out[t][h][d] = UNWRITTEN;
        }
    of->args = (kvc_attend_args){.struct_size = sizeof of->args,
                                 .q = of->q,
                                 .out = of->result.out,
                                 .lse = *of->result.lse,
                                 .q_token_stride = sizeof *of->q,
                                 .q_head_stride = sizeof **of->q,
                                 .out_token_stride = sizeof *of->result.out,
                                 .out_head_stride = sizeof **of->result.out,
                                 .lse_token_stride = sizeof *of->result.lse,
                                 .lse_head_stride = sizeof **of->result.lse,
                                 .scale = SCALE};
    make_optional(of, q);
    if (q->max_chosen && !selects(w, q, layer)) make_choice(of, q);
    if (!w->layers[layer].v_dim) make_choosing(of, q, stride_of(w, layer));
}

/* ---- queries ----------------------------------------------------------------------------------------------------- */

/* Hides a range of one sequence, often the batch's own tokens. */
static kvc_masked any_masked(const pass *p) {
    const int i = pick(p->num_sequences);
    const int begin = pick(3) ? pick(MOST) : p->positions[p->first[i]], end = begin + pick(MOST - begin + 1);
    return (kvc_masked){id_of(p->sequences[i]), begin, pick(3) ? end : KVC_END};
}

/* Lets a query's tokens select rows: some that may, of one sequence or several. */
static void let_select(query *q, const pass *p) {
    int i = pick(p->num_sequences), end = p->first[i + 1];
    const int begin = p->selecting[i];
    if (begin == end) return;
    while (++i < p->num_sequences && p->selecting[i] == p->first[i] && pick(2)) end = p->first[i + 1];
    q->select = p->select;
    q->first = pick(2) ? begin : begin + pick(end - begin);
    q->num = pick(2) ? end - q->first : 1 + pick(end - q->first);
    if (pick(3)) q->num_masked = 0;
    memset(q->non_causal, 0, sizeof q->non_causal);
}

/* Returns tokens of a pass, and the rows that are hidden from them.  Usually it is the last token alone. */
static query any_query(const pass *p) {
    query q = {.num_heads = pick(2) ? HEADS : QUERY_HEADS, .num_threads = pick(3) ? 1 + pick(MOST_CREW) : 0};
    const int is_last = pick(2), end = p->first[1 + pick(p->num_sequences)];
    q.first = is_last ? end - 1 : pick(p->num_tokens);
    q.num = is_last ? 1 : 1 + pick(p->num_tokens - q.first);
    q.num_masked = pick(2) ? 0 : 1 + pick(MOST_MASKED);
    for (int i = 0; i < q.num_masked; i++) q.masked[i] = any_masked(p);
    q.has_non_causal = !pick(4);
    for (int t = 0; t < q.num; t++) q.non_causal[t] = q.has_non_causal && pick(2);
    if (!pick(3)) q.max_chosen = 1 + pick(MOST_CHOSEN);
    q.num_choices = pick(2) ? q.num_heads : 1 + pick(2);
    if (p->select && pick(4)) let_select(&q, p);
    return q;
}

/* Describes a plan to attend; in a layer of keys alone, to choose. */
static kvc_plan_args plan_of(const world *w, const query *q, int layer) {
    const int has_values = w->layers[layer].v_dim;
    return (kvc_plan_args){.struct_size = sizeof(kvc_plan_args),
                           .layer = layer,
                           .first = q->first,
                           .num_tokens = q->num,
                           .num_heads = q->num_heads,
                           .num_threads = q->num_threads,
                           .non_causal = q->has_non_causal ? q->non_causal : NULL,
                           .masked = q->num_masked ? q->masked : NULL,
                           .masked_size = sizeof *q->masked,
                           .num_masked = q->num_masked,
                           .max_chosen = has_values && !selects(w, q, layer) ? q->max_chosen : 0,
                           .num_choices = has_values ? 0 : q->num_choices,
                           .select_rows = selects(w, q, layer) ? q->select : 0};
}

/* Begins a call whose effects nobody sees but the caller. */
static void begin_own_call(client *c, const char *call) {
    c->call = call;
    c->was_cancelled = 0;
    c->faults = sim_faults();
    c->handovers = UINT64_MAX;
}

/* Returns which failures a call over the rows of a query may answer with. */
static int may_fail(const client *c, const pass *p, const query *q, int layer) {
    return (lacks_rows(c->w, p, q, layer) ? MAY_BE_INVALID : 0) | (has_unstored(p) ? MAY_BE_GONE : 0);
}

/* Calls kvc_attend, which puts rows first if `put` is not NULL, or kvc_choose; returns whether it could. */
static int attend_by_call(client *c, pass *p, const query *q, int layer, const kvc_put_args *put) {
    piece *of = &crews[c->number].call;
    const int chooses = !c->w->layers[layer].v_dim;
    kvc_plan_args plan = plan_of(c->w, q, layer);
    make_piece(of, c->w, layer, q);
    if (pick(2)) plan.max_chosen = plan.num_choices = 0; /* as the arguments say */
    of->args.put = put;
    const int lacks = lacks_rows(c->w, p, q, layer);
    begin_own_call(c, chooses ? "kvc_choose" : put ? "kvc_attend with rows" : "kvc_attend");
    const kvc_status status =
        chooses ? kvc_choose(p->batch, &plan, &of->choosing) : kvc_attend(p->batch, &plan, &of->args);
    if (status == KVC_OK && lacks && !is_spoilt(c->w, p)) fail(c, "succeeds without rows that were not put");
    if (!ended(c, status, MAY_CANCEL | may_fail(c, p, q, layer) | (put ? MAY_BE_FULL : 0))) return 0;
    check_result(c, p, q, of, 0);
    note_selected(c, p, q, layer);
    return 1;
}

/* Attends in a layer of keys alone, which must be refused. */
static void attend_in_keys(client *c, pass *p, int layer) {
    piece *of = &crews[c->number].call;
    query q = any_query(p);
    q.max_chosen = 0; /* which is refused otherwise */
    const kvc_plan_args plan = plan_of(c->w, &q, layer);
    int64_t num;
    make_piece(of, c->w, layer, &q);
    begin_own_call(c, "kvc_attend in a layer of keys alone");
    const kvc_status status = pick(2) ? kvc_attend(p->batch, &plan, &of->args) : kvc_dense_rows(p->batch, layer, &num);
    if (status != KVC_ERR_UNSUPPORTED) fail(c, "answers \"%s\"", kvc_strerror(status));
}

/* Selects rows where that must be refused: in a layer without sketches, of fewer than none, or beside chosen rows. */
static void select_wrongly(client *c, const pass *p, int layer) {
    piece *of = &crews[c->number].call;
    query q = any_query(p);
    q.select = 0;
    kvc_plan_args plan = plan_of(c->w, &q, layer);
    make_piece(of, c->w, layer, &q);
    const int has_sketches = c->w->layers[layer].sketch_bits != 0, is_chosen = q.max_chosen != 0;
    plan.select_rows = has_sketches && !is_chosen ? -1 - pick(9) : 1 + pick(9);
    begin_own_call(c, "kvc_attend, selecting wrongly");
    const kvc_status status = kvc_attend(p->batch, &plan, &of->args);
    if (status != (has_sketches || is_chosen ? KVC_ERR_INVALID : KVC_ERR_UNSUPPORTED))
        fail(c, "answers \"%s\"", kvc_strerror(status));
}

void attend(client *c, pass *p, int layer) {
    if (!c->w->layers[layer].v_dim && !pick(4)) {
        attend_in_keys(c, p, layer);
        return;
    }
    if (c->w->layers[layer].v_dim && !pick(20)) select_wrongly(c, p, layer);
    p->last = any_query(p);
    if (pick(3)) {
        attend_by_call(c, p, &p->last, layer, NULL);
    } else if (begin_tasks(c, p, layer)) {
        end_tasks(c);
    }
}

int put_and_attend(client *c, pass *p, int layer, int first, int n, const kvc_put_args *put) {
    const query q = any_query(p);
    pass after = *p; /* a fork() meanwhile finds these rows not put */
    after.num_put[layer] = first + n;
    const int is_done = attend_by_call(c, &after, &q, layer, put);
    memcpy(p->has_selected, after.has_selected, sizeof p->has_selected);
    return is_done;
}

void attend_again(client *c, pass *p, int layer) {
    if (p->last.num && !has_unstored(p)) attend_by_call(c, p, &p->last, layer, NULL);
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

static kvc_status run_once(const crew *w, const piece *of, int task) {
    if (!w->c->w->layers[of->layer].v_dim) return kvc_plan_choose(w->plan, of->layer, &of->choosing, task);
    return kvc_plan_run(w->plan, of->layer, &of->args, task);
}

/* Runs a task, perhaps several times until no other thread is in its way. */
static void run_task(const crew *w, piece *of, int task) {
    for (int i = 0; i < MOST_TRIES; i++) {
        const kvc_status status = run_once(w, of, task);
        const int is_allowed = status == KVC_OK || (status == KVC_ERR_BUSY && w->num_threads > 1) ||
                               (status == KVC_ERR_CANCELLED && w->may_cancel) ||
                               (status == KVC_ERR_INVALID && (w->may_lack || w->c->w->is_meddled)) ||
                               (status == KVC_ERR_GONE && has_unstored(w->p));
        if (!is_allowed) fail(w->c, "task %d of layer %d answers \"%s\"", task, of->layer, kvc_strerror(status));
        if (status != KVC_ERR_BUSY) return;
        sim_step();
    }
}

/* Runs tasks of one layer or another: all or a few, some of them twice. */
static void *run_crew(void *context) {
    crew *w = context;
    const int n = (int)kvc_plan_num_tasks(w->plan);
    for (int rounds = 1 + pick(12); rounds > 0; rounds--) {
        piece *of = &w->pieces[pick(w->num_pieces)];
        const int first = pick(n), num = pick(3) ? 1 + pick(n < 3 ? n : 3) : n, again = 1 + pick(8);
        for (int j = 0; j < num; j++) {
            if (w->may_cancel && !pick(4)) of->cancel = !of->cancel;
            run_task(w, of, (first + j) % n);
            if (!pick(again)) run_task(w, of, pick(n));
        }
    }
    return NULL;
}

/* Lets several threads run tasks of a plan. */
static void run_together(crew *w) {
    pthread_t threads[MOST_CREW];
    int num = 0;
    while (num < w->num_threads - 1 && sim_thread_create(&threads[num], NULL, run_crew, w) == 0) num++;
    run_crew(w);
    while (num) sim_thread_join(threads[--num], NULL);
    for (int i = 0; i < w->num_pieces; i++) check_result(w->c, w->p, &w->query, &w->pieces[i], 1);
}

/* Returns another layer that a plan serves, in which all rows were put.  If there is no other, it returns the same
 * layer, for other queries. */
static int other_layer(const world *w, const pass *p, int layer) {
    for (int l = pick(w->num_layers); l >= 0; l--) {
        const kvc_policy *x = &w->layers[l].policy, *y = &w->layers[layer].policy;
        if (l != layer && w->layers[l].v_dim == w->layers[layer].v_dim && key_dim(w, l) == key_dim(w, layer) &&
            memcmp(x, y, sizeof *x) == 0 && p->num_put[source_of(w, l)] == p->num_tokens)
            return l;
    }
    return layer;
}

int begin_tasks(client *c, pass *p, int layer) {
    crew *w = &crews[c->number];
    p->last = any_query(p);
    const kvc_plan_args plan = plan_of(c->w, &p->last, layer);
    begin_own_call(c, "kvc_plan_new");
    if (!ended(c, kvc_plan_new(p->batch, &plan, &w->plan), 0)) return 0;
    w->c = c;
    w->p = p;
    w->query = p->last;
    w->num_pieces = 0;
    make_piece(&w->pieces[w->num_pieces++], c->w, layer, &w->query);
    if (pick(4)) make_piece(&w->pieces[w->num_pieces++], c->w, other_layer(c->w, p, layer), &w->query);
    w->num_threads = pick(4) ? MOST_CREW : 1 + pick(MOST_CREW);
    w->may_cancel = !pick(3);
    w->may_lack = lacks_rows(c->w, p, &w->query, layer);
    for (int i = 0; i < w->num_pieces && w->may_cancel; i++)
        w->pieces[i].args.cancel = w->pieces[i].choosing.cancel = &w->pieces[i].cancel;
    c->call = "kvc_plan_run";
    run_together(w);
    return 1;
}

void end_tasks(client *c) {
    crew *w = &crews[c->number];
    const int n = (int)kvc_plan_num_tasks(w->plan), may_be_gone = has_unstored(w->p);
    c->call = "kvc_plan_run of all tasks";
    for (int i = 0; i < w->num_pieces; i++) {
        piece *of = &w->pieces[i];
        const int first = pick(n);
        int is_whole = 1;
        of->cancel = 0;
        for (int j = 0; j < n; j++) {
            const kvc_status status = run_once(w, of, (first + j) % n);
            is_whole &= status == KVC_OK;
            if (status != KVC_OK && !(status == KVC_ERR_GONE && may_be_gone) &&
                !(status == KVC_ERR_INVALID && (c->w->is_meddled || lacks_rows(c->w, w->p, &w->query, of->layer))))
                fail(c, "task %d of layer %d answers \"%s\"", (first + j) % n, of->layer, kvc_strerror(status));
        }
        check_result(c, w->p, &w->query, of, !is_whole);
        if (is_whole) note_selected(c, w->p, &w->query, of->layer);
    }
    kvc_plan_free(w->plan);
}

/* ---- rows side by side ------------------------------------------------------------------------------------------- */

/* Compares the rows that kvc_dense copies of a layer that keeps all, and which of them each token sees, with what there
 * is. */
void check_dense(client *c, const pass *p, int layer) {
    static struct {
        float k[HEADS][MOST_FED * MOST][ROW], v[HEADS][MOST_FED * MOST][ROW];
        int32_t positions[MOST_FED * MOST];
        uint8_t seen[MOST_TOKENS][MOST_FED * MOST];
    } all[MOST_CLIENTS + 1];
    const world *w = c->w;
    const int source = source_of(w, layer);
    int64_t num = 0;
    query q = any_query(p);
    if (w->layers[source].policy.kind != KVC_FULL || !w->layers[source].v_dim || is_spoilt(w, p) || has_unstored(p) ||
        p->is_tree)
        return;
    q.first = 0, q.num = p->num_tokens, q.has_non_causal = 0;
    begin_own_call(c, "kvc_dense");
    if (!ended(c, kvc_dense_rows(p->batch, layer, &num), 0) || num > MOST_FED * MOST) return;
    const kvc_rows_out rows = {.struct_size = sizeof rows,
                               .k = all[c->number].k,
                               .v = all[c->number].v,
                               .k_head_stride = sizeof *all->k,
                               .k_row_stride = sizeof **all->k,
                               .v_head_stride = sizeof *all->v,
                               .v_row_stride = sizeof **all->v,
                               .positions = all[c->number].positions};
    const kvc_dense_args args = {.struct_size = sizeof args,
                                 .rows = &rows,
                                 .num_rows = num,
                                 .seen = *all[c->number].seen,
                                 .seen_token_stride = sizeof *all->seen,
                                 .masked = q.num_masked ? q.masked : NULL,
                                 .masked_size = sizeof *q.masked,
                                 .num_masked = q.num_masked};
    if (!ended(c, kvc_dense(p->batch, layer, &args), 0)) return;
    int n = 0;
    for (int64_t last = INT64_MIN;;) { /* by rising id */
        int i = -1, lacks = 0;
        for (int j = 0; j < p->num_sequences; j++)
            if (id_of(p->sequences[j]) > last && (i < 0 || id_of(p->sequences[j]) < id_of(p->sequences[i]))) i = j;
        if (i < 0) break;
        last = id_of(p->sequences[i]);
        for (int position = 0; position < MOST; position++) {
            const int own = own_token(p, p->first[i], position);
            const int tag = own >= 0 ? p->tags[own] : w->sequences[p->sequences[i]].tags[source][position];
            if (!tag || !has_row(w, source, position) || own >= p->num_put[source]) continue;
            if (n >= num || all[c->number].positions[n] != position ||
                tag_of(c, all[c->number].k[0][n], all[c->number].v[0][n], MOST_FED * MOST * ROW, MOST_FED * MOST * ROW,
                       source, position) != tag)
                fail(c, "row %d of %lld is not that of position %d of sequence %lld", n, (long long)num, position,
                     (long long)last);
            for (int t = 0; t < p->num_tokens; t++)
                if (all[c->number].seen[t][n] !=
                    (member_of(p, t) == i && tag_seen(w, p, &q, layer, t, position, &lacks) != 0))
                    fail(c, "token %d sees position %d of sequence %lld wrongly", t, position, (long long)last);
            n++;
        }
    }
    if (n != num) fail(c, "has %lld rows, not %d", (long long)num, n);
}
