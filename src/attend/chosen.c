/* chosen.c: see chosen.h.
 *
 * The rule for chosen rows.  A token's rows are ordered by position, and at one position by arrival.  They are cut
 * every KVC_SPLIT_ROWS.  So the bits of a result depend on nothing but the rows that are chosen and seen.
 */
#include "attend/chosen.h"

#include <string.h>

#include "attend/seen.h"
#include "cache/check.h"

/* ---- arguments --------------------------------------------------------------------------------------------------- */

kvc_status kvc_chosen_read(const kvc_attend_args *args, kvc_chosen *chosen) {
    KVC_TRY(KVC_READ(kvc_chosen, chosen, args->chosen, "chosen"));
    if (!chosen->positions) return kvc_fail(KVC_ERR_INVALID, "chosen->positions is NULL");
    if (chosen->width < 1)
        return kvc_fail(KVC_ERR_INVALID, "chosen->width is %d: it must be at least 1", chosen->width);
    if (chosen->block < 0)
        return kvc_fail(KVC_ERR_INVALID, "chosen->block is %d: it must be positive, or 0 if entries are positions",
                        chosen->block);
    return KVC_OK;
}

int32_t kvc_most_chosen(const kvc_chosen *chosen) {
    const int64_t block = chosen->block ? chosen->block : 1;
    return (int32_t)kvc_smaller(chosen->width * block + (chosen->tail ? block - 1 : 0), INT32_MAX);
}

kvc_status kvc_chosen_check(const kvc_plan_args *plan, int32_t num_kv_heads, int32_t tokens_per_sequence,
                            kvc_chosen *chosen) {
    const int32_t inner = tokens_per_sequence, num = plan->num_tokens;
    const kvc_array positions = {.name = "chosen->positions",
                                 .data = chosen->positions,
                                 .element_bytes = sizeof *chosen->positions,
                                 .length = chosen->width,
                                 .axes = {KVC_AXIS(chosen, choice_stride, chosen->num_choices),
                                          KVC_AXIS(chosen, token_stride, inner ? inner : num),
                                          KVC_AXIS(chosen, batch_stride, inner ? num / inner : 0)}};
    if (!chosen->positions && plan->max_chosen)
        return kvc_fail(KVC_ERR_INVALID, "chosen is NULL: the plan is for chosen rows, as max_chosen is %d",
                        plan->max_chosen);
    if (chosen->num_choices != 1 && chosen->num_choices != num_kv_heads)
        return kvc_fail(KVC_ERR_INVALID, "chosen->num_choices is %d: it must be 1, or the layer's num_kv_heads, %d",
                        chosen->num_choices, num_kv_heads);
    if (kvc_most_chosen(chosen) > plan->max_chosen)
        return kvc_fail(KVC_ERR_INVALID, "chosen names up to %d rows for a token: max_chosen of the plan is %d",
                        kvc_most_chosen(chosen), plan->max_chosen);
    return kvc_check_array(&positions);
}

/* ---- entries in order -------------------------------------------------------------------------------------------- */

/* Sorts entries, none of which is negative; `spare` has room for as many.  Returns where they are: in one of the two.
 */
static const int32_t *sort_entries(int32_t *entries, int32_t *spare, int32_t num) {
    enum { BITS = 11, DIGITS = 1 << BITS };
    for (int shift = 0; shift < 32; shift += BITS) {
        int32_t ends[DIGITS] = {0};
        for (int32_t i = 0; i < num; i++) ends[entries[i] >> shift & (DIGITS - 1)]++;
        if (ends[entries[0] >> shift & (DIGITS - 1)] == num) continue; /* all have the same digit */
        for (int32_t d = 0, n = 0; d < DIGITS; d++) {
            const int32_t begin = n;
            n += ends[d];
            ends[d] = begin;
        }
        for (int32_t i = 0; i < num; i++) spare[ends[entries[i] >> shift & (DIGITS - 1)]++] = entries[i];
        int32_t *const sorted = spare;
        spare = entries;
        entries = sorted;
    }
    return entries;
}

/* Copies a token's entries to the workspace, in ascending order and without those below 0.  Returns where they are. */
static const int32_t *take_entries(const kvc_task *t, int32_t *num) {
    const kvc_call *c = t->call;
    const kvc_chosen *chosen = &c->chosen;
    const int32_t token = t->tokens[0] - c->plan->args.first, choice = chosen->num_choices > 1 ? kvc_kv_head_of(t) : 0;
    const char *from =
        (const char *)chosen->positions +
        kvc_token_offset(token, c->args->tokens_per_sequence, chosen->token_stride, chosen->batch_stride) +
        choice * chosen->choice_stride;
    const int32_t *given = (const int32_t *)(const void *)from;
    int32_t *to = (int32_t *)(void *)(t->workspace + c->plan->workspace.chosen), n = 0, last = -1, rises = 1;
    for (int32_t i = 0; i < chosen->width; i++) {
        const int32_t entry = given[i];
        to[n] = entry;
        n += entry >= 0;
        if (entry < 0) continue;
        rises &= entry >= last;
        last = entry;
    }
    *num = n;
    return rises ? to : sort_entries(to, to + c->plan->args.max_chosen, n);
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* A list of rows that is being made. */
typedef struct row_lister {
    const kvc_batch *batch;
    const int32_t *order;
    kvc_visible seen;
    const kvc_segment *next, *end;            /* the sequence's segments from where the next rows may lie on */
    kvc_segment *to;                          /* the list's segments */
    const kvc_row_range *ranges, *ranges_end; /* of rows to list, ascending, from those on that are not listed yet */
    int64_t at;                               /* number of rows that were passed */
    int64_t num_rows, num_segments;
} row_lister;

static int is_done(const row_lister *l) { return l->ranges == l->ranges_end; }

/* Returns the first segment from `at` on that ends behind a position.  Looks at those near `at` first. */
static const kvc_segment *find_segment(const kvc_segment *at, const kvc_segment *end, int32_t position) {
    if (at == end || at->position + at->count > position) return at;
    int64_t step = 1;
    for (; step < end - at && at[step].position + at[step].count <= position; step *= 2) at += step;
    while (step > 1) { /* `at` ends at or before the position, and at[step] does not */
        step /= 2;
        if (step < end - at && at[step].position + at[step].count <= position) at += step;
    }
    return at + 1;
}

/* Adds `count` rows of a segment from row `offset` on. */
static void add_rows(row_lister *l, const kvc_segment *from, int32_t offset, int32_t count) {
    kvc_segment row = *from;
    row.slot += offset;
    row.position += offset;
    row.count = count;
    if (row.token >= 0) row.token += offset;
    l->num_rows += count;
    kvc_segment *last = l->to + l->num_segments - 1;
    if (l->num_segments && kvc_extends(last, &row))
        last->count += count;
    else
        l->to[l->num_segments++] = row;
}

/* Passes `count` rows of a segment from row `offset` on, and adds those in the ranges. */
static void pass_rows(row_lister *l, const kvc_segment *from, int32_t offset, int32_t count) {
    const int64_t first = l->at, end = first + count;
    l->at = end;
    for (; !is_done(l) && l->ranges->begin < end; l->ranges++) {
        const int64_t begin = l->ranges->begin > first ? l->ranges->begin : first;
        const int64_t stop = kvc_smaller(l->ranges->end, end);
        if (begin < stop) add_rows(l, from, offset + (int32_t)(begin - first), (int32_t)(stop - begin));
        if (l->ranges->end > end) break;
    }
}

/* Adds the rows at positions [begin, end) that the token sees if its policy shows these positions. */
static void add_positions(row_lister *l, int64_t begin, int64_t end) {
    const int is_tree = l->batch->parents != NULL;
    const int64_t causal_end = kvc_smaller(end, (int64_t)l->seen.last + 1);
    if (!is_tree) end = causal_end;
    if (begin >= end) return;
    const kvc_segment *segment = l->next = find_segment(l->next, l->end, (int32_t)begin);
    for (; segment < l->end && segment->position < end && !is_done(l); segment++) {
        const int is_own = is_tree && segment->token >= 0;
        const int64_t from = begin > segment->position ? begin - segment->position : 0;
        const int64_t to = kvc_smaller((is_own ? end : causal_end) - segment->position, segment->count);
        if (!is_own && from < to) pass_rows(l, segment, (int32_t)from, (int32_t)(to - from));
        for (int64_t i = from; is_own && i < to; i++)
            if (kvc_descends(l->batch, l->seen.token, l->order[segment->token + i]))
                pass_rows(l, segment, (int32_t)i, 1);
    }
}

/* Adds the rows at positions [begin, end) that the token sees. */
static void add_range(row_lister *l, int64_t begin, int64_t end) {
    if (begin < l->seen.sinks) add_positions(l, begin, kvc_smaller(end, l->seen.sinks));
    add_positions(l, begin > l->seen.low ? begin : l->seen.low, end);
}

static row_lister make_lister(const kvc_task *t, const kvc_row_range *ranges, int64_t num_ranges) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    row_lister l = {.batch = plan->batch,
                    .order = plan->order,
                    .seen = kvc_visible_to(c, t->tokens[0]),
                    .next = plan->segments + plan->starts[t->slice->first_start].segment,
                    .end = plan->segments + t->slice->end_segment,
                    .to = kvc_chosen_segments(t),
                    .ranges = ranges,
                    .ranges_end = ranges + num_ranges};
    if (c->policy->kind == KVC_CROSS) l.seen.last = INT32_MAX;
    if (l.seen.sinks >= l.seen.low) l.seen.sinks = l.seen.low = 0;
    return l;
}

/* Return the first row that has a position of a block, and the number behind the last one. */
static int64_t first_of(int32_t entry, int64_t block, int32_t stride) {
    return stride == 1 ? entry * block : entry * block / stride;
}
static int64_t past(int32_t entry, int64_t block, int32_t stride) {
    return stride == 1 ? entry * block + block : (entry * block + block - 1) / stride + 1;
}

int64_t kvc_list_chosen(const kvc_task *t, int64_t first, int64_t most) {
    const kvc_call *c = t->call;
    const int64_t block = c->chosen.block ? c->chosen.block : 1;
    const int64_t position = c->plan->batch->positions[t->tokens[0]];
    const int32_t stride = c->plan->stride;
    const int64_t tail = c->chosen.tail ? (position + 1) / block * block / stride : INT64_MAX;
    int32_t num;
    const int32_t *entries = take_entries(t, &num);
    const kvc_row_range range = {first, first + most};
    row_lister l = make_lister(t, &range, 1);
    for (int32_t i = 0; i < num && !is_done(&l); i++) {
        const int64_t begin = first_of(entries[i], block, stride);
        int64_t end = past(entries[i], block, stride);
        for (; i + 1 < num && first_of(entries[i + 1], block, stride) <= end; i++)
            end = past(entries[i + 1], block, stride);
        if (begin < tail) add_range(&l, begin, kvc_smaller(end, tail));
    }
    if (c->chosen.tail && !is_done(&l)) add_range(&l, tail, INT32_MAX);
    return l.num_rows;
}

int64_t kvc_list_seen(const kvc_task *t, const kvc_row_range *ranges, int64_t num_ranges) {
    row_lister l = make_lister(t, ranges, num_ranges);
    add_range(&l, 0, INT32_MAX);
    return l.num_rows;
}

int64_t kvc_count_seen(const kvc_task *t) {
    const kvc_row_range none = {INT64_MAX, INT64_MAX};
    row_lister l = make_lister(t, &none, 1);
    add_range(&l, 0, INT32_MAX);
    return l.at;
}
