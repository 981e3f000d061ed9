/* exact.c: rows that follow from a sequence's tokens alone, so that another one that begins with these may share them.
 */
#include "oracle.h"

void make_inexact(sequence *s, int32_t position) {
    if (position < s->exact_to) s->exact_to = position;
}

/* The rows at the end of a sequence were dropped: once no inexact row is left, all are exact. */
void cut_exact(const oracle *o, sequence *s, int32_t before) {
    if (s->exact_to >= next_of(o, s) && s->exact_to < before) s->exact_to = INT32_MAX;
}

/* Whether a token of a batch sees another of its sequence. */
static int sees_token(const batch *b, int t, int other) {
    if (!b->has_parents) return b->positions[other] <= b->positions[t];
    while (t > other) t = b->parents[t];
    return t == other;
}

/* Returns the position from which a batch's tokens of a sequence are inexact if the tokens `kept` are kept.  A token is
 * inexact if it does not stand behind all rows, has selected some, or saw others than the kept tokens before it. */
int32_t batch_exact_to(const oracle *o, const batch *b, int s, const uint8_t *kept) {
    int32_t next = next_of(o, &o->sequences[s]), exact_to = INT32_MAX;
    for (int t = 0; t < b->num; t++) {
        if (b->slots[t] != s || !kept[t]) continue;
        int follows = !b->restores && b->positions[t] == next && !b->has_selected[t];
        for (int other = 0; other < b->num; other++) {
            if (b->slots[other] != s || other == t) continue;
            const int sees = sees_token(b, t, other);
            follows &= kept[other] ? sees || other > t : !sees;
        }
        if (!follows && b->positions[t] < exact_to) exact_to = b->positions[t];
        next = b->positions[t] + 1;
    }
    return exact_to;
}

void note_texts(oracle *o, const batch *b, const uint8_t *kept) {
    for (int s = 0; s < SLOTS; s++) {
        const sequence *of = &o->sequences[s];
        const int32_t own = batch_exact_to(o, b, s, kept), exact_to = own < of->exact_to ? own : of->exact_to;
        for (int t = 0; t < b->num && of->is_open; t++)
            if (b->slots[t] == s) tokens[b->tags[t]].text = -1;
        for (int t = 0, text = of->text; t < b->num && !of->is_open; t++)
            if (b->slots[t] == s && kept[t] && b->positions[t] == text_length(text) && b->positions[t] < exact_to)
                tokens[b->tags[t]].text = text = text_behind(text, b->symbols[t]);
    }
}

/* Returns the position from which on rows are inexact that a sequence shares with another. */
int32_t shared_exact_to(const oracle *o, const sequence *from, const sequence *to, int32_t begin, int32_t end) {
    const int32_t next = next_of(o, to);
    int goes_on = next == 0;
    for (int l = 0; next && l < o->num_layers; l++) {
        const row *last = find_row(&to->layers[l], next - 1);
        const int has_all = is_own(o, l) && stride_of(o, l) == 1;
        for (int i = 0; has_all && last && i < from->layers[l].num; i++)
            goes_on |= from->layers[l].at[i].slot == last->slot && from->layers[l].at[i].position == next - 1;
    }
    if (!goes_on || begin > next || from->exact_to < next || (next && to->exact_to < next)) return begin;
    return from->exact_to < end ? from->exact_to : INT32_MAX;
}
