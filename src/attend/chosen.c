/* chosen.c: the rows that a token chooses: see chosen.h.
 *
 * A caller chooses rows by entries: positions, or numbers of blocks of positions.  A lister walks once over a token's
 * entries and its sequence's segments, rows of one run each, by position.  A row is named if an entry has its position,
 * and counts if the token also sees it.  Ranges of the counted rows are listed.
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
    if (chosen->width > plan->chosen_width)
        return kvc_fail(KVC_ERR_INVALID, "chosen->width is %d: chosen_width of the plan is %d", chosen->width,
                        plan->chosen_width);
    return kvc_resolve_array(&positions);
}

/* ---- entries in order -------------------------------------------------------------------------------------------- */

/* Sorts entries, none of which is negative.  `other` has room for all.  Returns the array in which they are then. */
static const int32_t *sort_entries(int32_t *entries, int32_t *other, int32_t num) {
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
        for (int32_t i = 0; i < num; i++) other[ends[entries[i] >> shift & (DIGITS - 1)]++] = entries[i];
        int32_t *const sorted = other;
        other = entries;
        entries = sorted;
    }
    return entries;
}

/* Counts the entries of a list that ascends, before the negative ones at its end.  Returns -1 if it does not ascend: as
 * unsigned numbers, negative ones are the largest. */
static int32_t count_ascending(const int32_t *entries, int32_t width) {
    int32_t falls = 0, num = entries[0] >= 0;
    for (int32_t i = 1; i < width; i++) {
        falls |= (uint32_t)entries[i] < (uint32_t)entries[i - 1];
        num += entries[i] >= 0;
    }
    return falls ? -1 : num;
}

/* Returns a token's entries in ascending order, without negative ones, and sets *num to their number.  They are the
 * caller's array if it is in this order, otherwise a sorted copy in the workspace. */
static const int32_t *take_entries(const kvc_task *t, int32_t *num) {
    const kvc_call *c = t->call;
    const kvc_chosen *chosen = &c->chosen;
    const int32_t token = t->tokens[0] - c->plan->args.first, choice = chosen->num_choices > 1 ? kvc_kv_head_of(t) : 0;
    const char *from =
        (const char *)chosen->positions +
        kvc_token_offset(token, c->args->tokens_per_sequence, chosen->token_stride, chosen->batch_stride) +
        choice * chosen->choice_stride;
    const int32_t *given = (const int32_t *)(const void *)from;
    int32_t *to = (int32_t *)(void *)(t->workspace + c->plan->listing.entries), n = 0;
    *num = count_ascending(given, chosen->width);
    if (*num >= 0) return given;
    for (int32_t i = 0; i < chosen->width; i++) {
        to[n] = given[i];
        n += given[i] >= 0;
    }
    *num = n;
    return n ? sort_entries(to, to + c->plan->args.chosen_width, n) : to;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Whether the list is full, or has all rows. */
static int is_done(const kvc_row_lister *l) { return l->ranges == l->ranges_end || l->num_rows == l->most; }

/* Returns the first segment from `at` on that ends behind a position.  Doubles the step, then halves it: it is near. */
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

/* Adds `count` rows of a segment, from row `offset` on, to the list, or to its last segment if they follow it. */
static void add_rows(kvc_row_lister *l, const kvc_segment *from, int32_t offset, int32_t count) {
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

/* Counts `count` rows of a segment, from row `offset` on, and adds those in a range to the list, while there is room.
 * l->at: the number of rows counted before; rows below l->from are listed already. */
static void pass_rows(kvc_row_lister *l, const kvc_segment *from, int32_t offset, int32_t count) {
    const int64_t first = l->at, end = first + count;
    l->at = end;
    while (!is_done(l) && l->ranges->begin < end) {
        const int64_t of_range = l->ranges->begin > l->from ? l->ranges->begin : l->from, room = l->most - l->num_rows;
        const int64_t begin = of_range > first ? of_range : first;
        int64_t stop = kvc_smaller(l->ranges->end, end);
        if (stop - begin > room) stop = begin + room;
        if (begin < stop) add_rows(l, from, offset + (int32_t)(begin - first), (int32_t)(stop - begin));
        if (l->num_rows == l->most) l->from = stop;
        if (stop < l->ranges->end) break;
        l->ranges++;
    }
}

/* Adds the rows at positions [begin, end) that the token sees, if its policy shows these positions.  In a tree, the
 * batch's own rows are seen if they are an ancestor's, whatever their position. */
static void add_positions(kvc_row_lister *l, int64_t begin, int64_t end) {
    const int is_tree = l->batch->parents != NULL;
    const int64_t causal_end = kvc_smaller(end, (int64_t)l->seen.last + 1);
    if (!is_tree) end = causal_end;
    if (begin < l->begin) begin = l->begin;
    if (begin >= end) return;
    const kvc_segment *segment = l->next = find_segment(l->next, l->end, (int32_t)begin);
    for (; segment < l->end && segment->position < end; segment++) {
        const int is_own = is_tree && segment->token >= 0;
        const int64_t from = begin > segment->position ? begin - segment->position : 0, before = l->at;
        const int64_t to = kvc_smaller((is_own ? end : causal_end) - segment->position, segment->count);
        if (!is_own && from < to) pass_rows(l, segment, (int32_t)from, (int32_t)(to - from));
        for (int64_t i = from; is_own && i < to; i++)
            if (kvc_descends(l->batch, l->seen.token, l->order[segment->token + i]))
                pass_rows(l, segment, (int32_t)i, 1);
        if (!is_done(l)) continue;
        l->at = before; /* the next rows may lie in this segment, too */
        l->next = segment;
        l->begin = begin;
        return;
    }
}

/* Adds the rows at positions [begin, end) that the token sees. */
static void add_range(kvc_row_lister *l, int64_t begin, int64_t end) {
    if (begin < l->seen.sinks) {
        add_positions(l, begin, kvc_smaller(end, l->seen.sinks));
        if (is_done(l)) return;
    }
    add_positions(l, begin > l->seen.low ? begin : l->seen.low, end);
}

kvc_row_lister kvc_list_seen(const kvc_task *t, const kvc_row_range *ranges, int64_t num_ranges) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    kvc_row_lister l = {.batch = plan->batch,
                        .order = plan->order,
                        .seen = kvc_visible_to(c, t->tokens[0]),
                        .block = 1,
                        .stride = plan->stride,
                        .next = plan->segments + plan->starts[t->slice->first_start].segment,
                        .end = plan->segments + t->slice->end_segment,
                        .ranges = ranges,
                        .ranges_end = ranges + num_ranges};
    if (c->policy->kind == KVC_CROSS) l.seen.last = INT32_MAX;
    if (l.seen.sinks >= l.seen.low) l.seen.sinks = l.seen.low = 0; /* no gap between sinks and window */
    return l;
}

kvc_row_lister kvc_list_chosen(const kvc_task *t, int64_t first) {
    static const kvc_row_range all = {0, INT64_MAX};
    const kvc_call *c = t->call;
    const int64_t position = c->plan->batch->positions[t->tokens[0]];
    int32_t num;
    kvc_row_lister l = kvc_list_seen(t, &all, 1);
    l.from = first;
    l.block = c->chosen.block ? c->chosen.block : 1;
    l.tail = c->chosen.tail ? (position + 1) / l.block * l.block / l.stride : INT64_MAX;
    l.entries = take_entries(t, &num);
    l.entries_end = l.entries + num;
    return l;
}

/* Sets l->named to the rows of the next entries whose blocks touch, or, behind all entries, to the tail, which is then
 * INT64_MAX: none.  Returns 0 if nothing is left. */
static int name_next(kvc_row_lister *l) {
    if (l->entries == l->entries_end) {
        const int is_left = l->tail != INT64_MAX;
        l->named = is_left ? (kvc_row_range){l->tail, INT32_MAX} : (kvc_row_range){0, 0};
        l->tail = INT64_MAX;
        return is_left;
    }
    const int32_t *at = l->entries, *const entries_end = l->entries_end;
    const int64_t begin = kvc_first_of(l, *at);
    int64_t end = kvc_past(l, *at);
    for (at++; at != entries_end && kvc_first_of(l, *at) <= end; at++) end = kvc_past(l, *at);
    l->entries = at;
    l->named = (kvc_row_range){begin, kvc_smaller(end, l->tail)};
    return 1;
}

int64_t kvc_list_next(kvc_row_lister *l, kvc_segment *to, int64_t most) {
    l->to = to;
    l->most = most;
    l->num_rows = l->num_segments = 0;
    do add_range(l, l->named.begin, l->named.end);
    while (!is_done(l) && name_next(l));
    return l->num_rows;
}
