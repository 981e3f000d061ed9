/* seen.c: which rows of a tile a query token sees: see seen.h.
 *
 * Tokens of a batch may form a tree: then a token sees, of the batch's own rows, its own and its ancestors'.  A tile
 * lists its rows as stretches: rows at equal distances in memory.  first[0], step[0] and scales[0] of a stretch are of
 * keys, and [1] of values.  A view is a task with fewer of its query rows.
 */
#include "attend/seen.h"

#include <math.h>

kvc_visible kvc_visible_to(const kvc_call *c, int32_t token) {
    const int32_t position = c->plan->batch->positions[token];
    return (kvc_visible){.token = token,
                         .low = kvc_policy_lowest(c->policy, position),
                         .sinks = c->num_sinks,
                         .last =
                             kvc_plan_sees_all(c->plan, token) ? INT32_MAX : kvc_last_row(position, c->plan->stride)};
}

/* Whether the batch's tree, not the order of positions, decides which rows of the tile are seen.  The batch's own rows
 * come last, so the tile's last row tells.  Where rows come by position instead, any row may be the batch's. */
static int has_branches(const kvc_call *c, const kvc_tile *tile) {
    return c->plan->batch->parents && (tile->is_batch || c->plan->by_token || c->plan->args.select_rows);
}

int kvc_sees_whole_tile(const kvc_call *c, const kvc_tile *tile, const kvc_visible *v) {
    return c->policy->kind == KVC_CROSS ||
           (!has_branches(c, tile) && tile->max_position <= v->last && tile->min_position >= v->low);
}

int kvc_sees_nothing_of(const kvc_call *c, const kvc_tile *tile, int32_t token) {
    const kvc_visible v = kvc_visible_to(c, token);
    return c->policy->kind != KVC_CROSS && !has_branches(c, tile) &&
           (tile->min_position > v.last || (tile->max_position < v.low && tile->min_position >= v.sinks));
}

kvc_task kvc_view_that_sees(const kvc_task *t, const kvc_tile *tile) {
    const int32_t heads = t->call->plan->parts.heads;
    int32_t first = 0, end = t->num_query_rows / heads;
    while (first < end && kvc_sees_nothing_of(t->call, tile, t->tokens[first])) first++;
    while (first < end && kvc_sees_nothing_of(t->call, tile, t->tokens[end - 1])) end--;
    return kvc_view_of(t, first * heads, (end - first) * heads);
}

int kvc_sees_row(const kvc_call *c, const kvc_tile *tile, const kvc_visible *v, int32_t j) {
    const int32_t p = tile->position[j];
    const int in_order = has_branches(c, tile) && tile->token[j] >= 0
                             ? kvc_descends(c->plan->batch, v->token, tile->token[j])
                             : p <= v->last;
    return in_order && (p >= v->low || p < v->sinks);
}

/* Sets the scores of rows that a token does not see to -inf, in its `num` query rows. */
static void hide_unseen(const kvc_call *c, kvc_tile *tile, float *scores, int32_t stride, int32_t num,
                        const kvc_visible *v) {
    kvc_locate_rows(tile, c->plan->order);
    for (int32_t j = 0; j < tile->n; j++) {
        const int is_seen = kvc_sees_row(c, tile, v, j);
        for (int32_t r = 0; !is_seen && r < num; r++) scores[r * stride + j] = -INFINITY;
    }
}

void kvc_bend_scores(const kvc_call *c, float *scores, const int32_t *positions, int32_t n, int32_t token,
                     int32_t head) {
    const int32_t position = c->plan->batch->positions[token], stride = c->plan->stride;
    if (c->args->softcap > 0)
        for (int32_t j = 0; j < n; j++) scores[j] = c->args->softcap * tanhf(scores[j] / c->args->softcap);
    for (int32_t j = 0; c->args->alibi && j < n; j++)
        scores[j] -= c->args->alibi[head] * fabsf((float)(kvc_position_of(positions[j], stride) - position));
}

void kvc_change_scores(const kvc_task *t, kvc_tile *tile, int32_t first, int32_t end, float *scores, int32_t stride) {
    const kvc_call *c = t->call;
    const int32_t heads = c->plan->parts.heads;
    for (int32_t r = first, next; r < end; scores += (next - r) * stride, r = next) {
        const kvc_visible v = kvc_visible_to(c, t->tokens[r / heads]);
        next = (int32_t)kvc_smaller(r - r % heads + heads, end);
        if (c->args->alibi) kvc_locate_rows(tile, c->plan->order);
        for (int32_t i = r; c->changes_scores && i < next; i++)
            kvc_bend_scores(c, scores + (i - r) * stride, tile->position, tile->n, v.token, kvc_query_head_of(t, i));
        if (!kvc_sees_whole_tile(c, tile, &v)) hide_unseen(c, tile, scores, stride, next - r, &v);
    }
}

/* ---- values that are no numbers ---------------------------------------------------------------------------------- */

/* Returns whether num f16 or bf16, `step` bytes apart, are finite: not all bits of the mask `exponent` are set. */
static int are_finite_16(const uint8_t *at, int32_t num, size_t step, uint16_t exponent) {
    int bad = 0;
    for (int32_t i = 0; i < num; i++, at += step) {
        uint16_t bits;
        memcpy(&bits, at, sizeof bits);
        bad |= (bits & exponent) == exponent;
    }
    return !bad;
}

static int are_finite_32(const uint8_t *at, int32_t num) {
    const uint32_t exponent = 0x7f800000;
    int bad = 0;
    for (int32_t i = 0; i < num; i++, at += sizeof exponent) {
        uint32_t bits;
        memcpy(&bits, at, sizeof bits);
        bad |= (bits & exponent) == exponent;
    }
    return !bad;
}

/* Returns whether all elements of a stored row are finite.  A quantised row is if its scales and minima are.  0x7c00
 * and 0x7f80 are the exponents of f16 and bf16. */
static int is_finite(const uint8_t *row, const uint8_t *scale, int32_t type, int32_t dim) {
    const kvc_type_row *of = &KVC_TYPES[type];
    const size_t step = (size_t)of->bytes;
    const int32_t num = dim / of->elements;
    if (of->has_row_scale) return are_finite_16(scale, 1, 0, 0x7c00);
    if (type == KVC_F32) return are_finite_32(row, num);
    if (type == KVC_BF16) return are_finite_16(row, num, step, 0x7f80);
    return are_finite_16(row, num, step, 0x7c00) &&
           (!of->has_minimum || are_finite_16(row + sizeof(uint16_t), num, step, 0x7c00));
}

/* The value of row i of a stretch, and its scale, where it has one. */
typedef struct place {
    const uint8_t *row, *scale;
} place;

static place value_at(const kvc_stretch *stretch, int32_t i) {
    const uint8_t *scales = stretch->scales[1];
    return (place){stretch->first[1] + i * stretch->step[1], scales ? scales + i * stretch->scale_step : NULL};
}

kvc_visible kvc_visible_to_all(const kvc_task *t) {
    kvc_visible all = kvc_visible_to(t->call, t->tokens[0]);
    for (int32_t i = 1; i < t->num_query_rows / t->call->plan->parts.heads; i++) {
        const kvc_visible v = kvc_visible_to(t->call, t->tokens[i]);
        if (v.low > all.low) all.low = v.low;
        if (v.last < all.last) all.last = v.last;
    }
    return all;
}

/* Rows that every token sees are not looked at: what they hold belongs into the result.  A task of one token gets only
 * rows that it sees.  j counts the tile's rows, i those of a stretch. */
int kvc_spoils_others(const kvc_task *t, kvc_tile *tile, const kvc_visible *common) {
    const kvc_call *c = t->call;
    if (t->num_query_rows == c->plan->parts.heads || c->policy->kind == KVC_CROSS) return 0;
    const int is_tree = has_branches(c, tile);
    kvc_locate_rows(tile, c->plan->order);
    const kvc_stretch *stretch = tile->stretches;
    for (int32_t j = 0, i = 0; j < tile->n; j++) {
        const int is_common = !(is_tree && tile->token[j] >= 0) && kvc_sees_row(c, tile, common, j);
        const place at = value_at(stretch, i);
        if (!is_common && !is_finite(at.row, at.scale, c->layer->v_type, c->plan->v_dim)) return 1;
        if (++i == stretch->n) stretch++, i = 0;
    }
    return 0;
}

/* Appends row i of the stretch `from` to a list of `num` stretches.  `value`, unless it is NULL, takes the place of the
 * row's own value.  The row extends the last stretch if it follows it.  Returns the new number of stretches. */
static int32_t add_row(kvc_stretch *to, int32_t num, const kvc_stretch *from, int32_t i, const uint8_t *value) {
    const place own = value_at(from, i), v = value ? (place){value, value} : own;
    const uint8_t *k = from->first[0] + i * from->step[0];
    kvc_stretch *last = to + num - 1;
    if (num && k == last->first[0] + last->n * last->step[0] && v.row == last->first[1] + last->n * last->step[1]) {
        last->n++;
        return num;
    }
    to[num] = *from;
    to[num].first[0] = k;
    to[num].first[1] = v.row;
    to[num].n = 1;
    if (from->scales[0]) to[num].scales[0] += i * from->scale_step;
    if (from->scales[1]) to[num].scales[1] = v.scale;
    return num + 1;
}

void kvc_clear_unseen(const kvc_task *t, const kvc_tile *tile, kvc_tile *own) {
    const kvc_call *c = t->call;
    const kvc_visible v = kvc_visible_to(c, t->tokens[0]);
    float *const zeros = t->workspace + c->plan->attending.zeros;
    const kvc_stretch *stretch = tile->stretches;
    int32_t num = 0;
    memset(zeros, 0, (size_t)tile->layout->v_row_bytes);
    *own = *tile;
    for (int32_t j = 0, i = 0; j < tile->n; j++) {
        const place at = value_at(stretch, i);
        const int is_cleared =
            !kvc_sees_row(c, tile, &v, j) && !is_finite(at.row, at.scale, c->layer->v_type, c->plan->v_dim);
        num = add_row(own->stretches, num, stretch, i, is_cleared ? (const uint8_t *)zeros : NULL);
        if (++i == stretch->n) stretch++, i = 0;
    }
}
