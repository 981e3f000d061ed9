/* retained.h: retained sequences in the oracle: their rows, the rows that are attached, and the order of their use.
 * The oracle learns from the cache which sequences are evicted, and checks that these could be evicted. */
#ifndef KVC_TEST_RETAINED_H
#define KVC_TEST_RETAINED_H

#include "support/oracle.h"

enum { NUM_RETAINED = 4, FIRST_RETAINED = 1000 }; /* ids, which no other operation uses */

static inline void oracle_use(pair *p, int64_t id) { find_sequence(p, id)->used = ++p->clock; }

/* Retains the rows of a sequence that is in no batch. */
static inline kvc_status pair_retain(pair *p, int64_t src, int64_t id, int32_t begin, int32_t end) {
    if (in_batch(p, src)) return KVC_ERR_BUSY; /* which retains rows of the batch, too: test_retain.c */
    const kvc_status right = find_sequence(p, id) ? KVC_ERR_INVALID : KVC_OK;
    const kvc_status status = agree(p, "retain", retain(p->cache, src, id, begin, end), right);
    const sequence *from = find_sequence(p, src);
    if (status != KVC_OK || !from) return status;
    sequence *to = add_sequence(p, id);
    from = find_sequence(p, src);
    if (from->exact_to < end) make_inexact(to, from->exact_to > begin ? from->exact_to : begin);
    int num = 0;
    for (int l = 0; l < p->config.num_layers; l++) {
        if (!keeps_tokens(p, l)) continue;
        for (int i = 0; i < from->layers[l].num; i++)
            if (from->layers[l].rows[i].position >= begin && from->layers[l].rows[i].position < end)
                list_add(&to->layers[l], from->layers[l].rows[i]);
        row_list *list = &to->layers[l];
        oracle_share_gone(list, &list->lost, from->layers[l].lost, list->num, begin, end);
        oracle_share_gone(list, &list->missing, from->layers[l].missing, list->num, begin, end);
        num += list->num;
    }
    if (num)
        oracle_use(p, id);
    else
        forget_sequence(p, id);
    return status;
}

static inline void pair_pin(pair *p, int64_t id, int add) {
    sequence *s = find_sequence(p, id);
    CHECK(pin_retained(p->cache, &id, 1, add) == KVC_OK);
    if (s && (add > 0 || s->num_pins)) s->num_pins += add;
}

static inline void pair_touch(pair *p, int64_t id) {
    CHECK(touch_retained(p->cache, &id, 1) == KVC_OK);
    if (find_sequence(p, id)) oracle_use(p, id);
}

/* ---- attaching --------------------------------------------------------------------------------------------------- */

/* Whether any of the sequences has a row of a layer at a position. */
static inline int is_held(const pair *p, const int64_t *ids, int n, int l, int32_t position) {
    for (int i = 0; i < n; i++) {
        const sequence *s = find_sequence(p, ids[i]);
        if (s && has_position(&s->layers[l], s->layers[l].num, position)) return 1;
    }
    return 0;
}

/* Whether these sequences have all that a query at a position sees. */
static inline int can_go_on(const pair *p, const int64_t *ids, int n, int32_t position) {
    for (int l = 0; l < p->config.num_layers; l++) {
        const kvc_policy *policy = &p->layers[l].policy;
        const int32_t lowest = lowest_seen(policy, position);
        const int32_t sinks = policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0;
        for (int32_t at = 0; keeps_tokens(p, l) && at < position; at++)
            if ((at >= lowest || at < sinks) && gets_row(p, l, at) && !is_held(p, ids, n, l, at)) return 0;
    }
    return 1;
}

/* Adds to a layer the sequences' rows below `length`, except a gap: rows that no later query sees, and rows before a
 * missing row. */
static inline void oracle_attach_layer(pair *p, const int64_t *ids, int n, sequence *to, int l, int32_t length) {
    const kvc_policy *policy = &p->layers[l].policy;
    range gap = {0, 0};
    if (policy->kind != KVC_FULL) {
        const int32_t sinks = policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0;
        int32_t covered = length;
        while (covered > 0 && is_kept(policy, covered - 1, length) && is_held(p, ids, n, l, covered - 1)) covered--;
        gap.begin = sinks < length ? sinks : length; /* empty or not, rows before it come first */
        gap.end = covered > gap.begin ? covered : gap.begin;
    }
    for (int i = 0; i < n; i++) {
        const sequence *s = find_sequence(p, ids[i]);
        for (int side = 0; s && side < 2; side++)
            for (int r = 0; r < s->layers[l].num; r++) {
                const row *at = &s->layers[l].rows[r];
                if (side ? at->position >= gap.end && at->position < length : at->position < gap.begin)
                    list_add(&to->layers[l], *at);
            }
    }
    to->layers[l].lost = gap.begin < gap.end ? gap : (range){0, 0};
}

static inline kvc_status attach_right(const pair *p, const int64_t *ids, int n, int64_t dst) {
    int32_t last = -1;
    if (in_batch(p, dst)) return KVC_ERR_BUSY;
    if (holds_rows(p, find_sequence(p, dst))) return KVC_ERR_INVALID;
    for (int i = 0; i < n; i++) {
        const sequence *s = find_sequence(p, ids[i]);
        if (s && extreme_of(p, s, -1) <= last) return KVC_ERR_INVALID;
        last = s ? extreme_of(p, s, 1) : last;
    }
    return KVC_OK;
}

static inline kvc_status pair_attach(pair *p, const int64_t *ids, int n, int64_t dst, int32_t length) {
    int32_t matched = -1, right = 0;
    const kvc_status status =
        agree(p, "attach", attach_retained(p->cache, ids, n, dst, length, &matched), attach_right(p, ids, n, dst));
    if (status != KVC_OK) return status;
    for (int i = 0; i < n; i++) {
        const int32_t next = next_of(p, find_sequence(p, ids[i]));
        right = next > right ? next : right;
    }
    for (right = right < length ? right : length; right > 0 && !can_go_on(p, ids, n, right);) right--;
    CHECKF(matched == right, "%d matched, not %d", matched, right);
    for (int i = n - 1; i >= 0; i--)
        if (find_sequence(p, ids[i])) oracle_use(p, ids[i]);
    forget_sequence(p, dst); /* of which rows may have been expired */
    if (!right) return status;
    sequence *to = add_sequence(p, dst);
    for (int i = 0, num = 0; i < n; i++) {
        const sequence *s = find_sequence(p, ids[i]);
        if (!s) continue;
        num += extreme_of(p, s, -1) < right;
        p->has_mixed |= num > 1;
        if (s->exact_to < right) make_inexact(to, s->exact_to);
    }
    for (int l = 0; l < p->config.num_layers; l++)
        if (keeps_tokens(p, l)) oracle_attach_layer(p, ids, n, to, l, right);
    tidy(p, to);
    return status;
}

#endif
