/* room.c: what fits. */
#include "oracle.h"

#include <string.h>

int room_is_open(const oracle *o) {
    if (o->config.max_bytes || o->has_twins) return 1;
    for (int i = 0; i < PREFIXES && (o->config.capacity || o->config.max_seq_len); i++)
        if (o->prefixes[i].is_there && (o->prefixes[i].num_pins || o->prefixes[i].config.quota)) return 1;
    return 0;
}

int64_t capacity_of(const oracle *o) {
    return o->config.capacity ? o->config.capacity : o->config.max_seq_len * o->config.max_sequences;
}

/* Rows of all sequences in a layer; shared ones count once.  In worlds where rows of one token may be copies, they
 * count as one row, so the number is a lower bound. */
int32_t live_rows(const oracle *o, int l) {
    enum { PLACES = 1 << 12 };
    int32_t seen[PLACES], num = 0;
    memset(seen, -1, sizeof seen);
    for (int s = 0; s < SLOTS; s++)
        for (int i = 0; i < o->sequences[s].layers[l].num; i++) {
            const row *r = &o->sequences[s].layers[l].at[i];
            const int32_t slot = o->has_twins ? r->tag : r->slot;
            int at = slot % PLACES;
            while (seen[at] >= 0 && seen[at] != slot) at = (at + 1) % PLACES;
            num += seen[at] < 0;
            seen[at] = slot;
        }
    return num;
}

/* Rows of open batches in a layer. */
int64_t batch_rows(const oracle *o, int l) {
    int64_t num = 0;
    for (int i = 0; i < CLIENTS; i++) {
        const batch *b = &o->batches[i];
        for (int t = 0; b->is_open && takes_tokens(o, l, b) && t < b->num; t++) num += gets_row(o, l, b->positions[t]);
        for (int s = 0; b->is_open && is_cross(o, l) && s < SLOTS; s++) num += b->num_cross[l][s];
    }
    return num;
}

int64_t live_slots(const oracle *o) {
    int64_t num = 0;
    for (int l = 0; l < o->num_layers; l++)
        if (leads_group(o, l)) num += live_rows(o, l) + batch_rows(o, l);
    return num;
}

/* The most rows a policy keeps of a sequence that has one at each position. */
static int64_t most_kept(const kvc_policy *policy) {
    if (policy->kind == KVC_SLIDING)
        return (policy->resume_window ? policy->resume_window : policy->window) + policy->num_sink_tokens;
    return policy->kind == KVC_CHUNKED ? policy->attention_chunk_size + policy->resume_window : INT64_MAX;
}

/* Whether a layer will hold at most max_seq_len rows of a sequence once a batch is committed, whatever its number of
 * tokens.  That is so by its policy, if all rows and tokens stand at rising positions. */
static int stays_within(const oracle *o, int l, int s, const batch *b) {
    const sequence *of = &o->sequences[s];
    int32_t next = next_of(o, of);
    int rises = !b->restores && most_kept(&o->layers[l].policy) <= o->config.max_seq_len;
    for (int i = 0; i < o->num_layers; i++) rises &= !of->layers[i].missing.end;
    for (int t = 0; t < b->num; t++) {
        if (b->slots[t] != s) continue;
        rises &= b->positions[t] >= next;
        next = b->positions[t] + 1;
    }
    for (int i = 1; i < of->layers[l].num; i++)
        rises &= of->layers[l].at[i].position > of->layers[l].at[i - 1].position;
    return rises;
}

/* How many of the first num tokens of a batch are of a sequence and get a row in a layer. */
static int count_rows(const oracle *o, int l, int s, int num, const batch *b) {
    int rows = 0;
    for (int t = 0; t < num; t++) rows += b->slots[t] == s && gets_row(o, l, b->positions[t]);
    return rows;
}

/* Whether a batch fits into a layer of a cache that has expired rows for it. */
static int fits_layer(const oracle *o, const oracle *expired, int l, const batch *b) {
    const kvc_config *limits = &o->config;
    int64_t more = 0; /* rows that count for the capacity */
    for (int t = 0; t < b->num; t++) {
        const int s = b->slots[t], within = stays_within(o, l, s, b);
        const int64_t held = expired->sequences[s].layers[l].num, all = held + count_rows(o, l, s, b->num, b),
                      until = held + count_rows(o, l, s, t, b);
        if (limits->max_seq_len && all > limits->max_seq_len && !within) return 0;
        more += gets_row(o, l, b->positions[t]) && (limits->capacity || !within || until < limits->max_seq_len);
    }
    return !capacity_of(o) || live_rows(expired, l) + more <= capacity_of(o);
}

kvc_status fits(const oracle *o, const batch *b) {
    oracle expired = *o;
    int64_t num = 0; /* sequences that hold rows, with the batch's */
    for (int s = 0; s < SLOTS; s++) num += holds_rows(o, &o->sequences[s]) || count_in(b, s);
    if (o->crowded) return KVC_OK;
    if (o->config.max_sequences && num > o->config.max_sequences) return KVC_ERR_FULL;
    expire_for(&expired, b);
    for (int s = 0; s < SLOTS; s++)
        for (int l = 0; b->restores && l < o->num_layers; l++)
            if (count_in(b, s) && takes_tokens(o, l, b)) expired.sequences[s].layers[l].num = 0;
    for (int l = 0; l < o->num_layers; l++)
        if (takes_tokens(o, l, b) && !fits_layer(o, &expired, l, b)) return KVC_ERR_FULL;
    return KVC_OK;
}

/* Whether an edit gave rows of a layer new slots. */
static int has_copied(const oracle *before, const oracle *after, int l) {
    for (int s = 0; s < SLOTS; s++)
        for (int i = 0; i < after->sequences[s].layers[l].num; i++)
            if (after->sequences[s].layers[l].at[i].slot >= before->next_slot) return 1;
    return 0;
}

kvc_status fits_copies(const oracle *before, const oracle *after) {
    for (int l = 0; capacity_of(after) && !after->crowded && l < after->num_layers; l++)
        if (is_own(after, l) && has_copied(before, after, l) &&
            live_rows(after, l) + batch_rows(after, l) > capacity_of(after))
            return KVC_ERR_FULL;
    return KVC_OK;
}

/* A batch of n more tokens of a sequence. */
static kvc_status go_on(const oracle *o, int s, int n, batch *b) {
    const int32_t next = next_of(o, &o->sequences[s]);
    *b = (batch){.is_open = 1, .num = n};
    if (misses(o, &o->sequences[s], next)) return KVC_ERR_GONE;
    for (int t = 0; t < n; t++) b->slots[t] = (int8_t)s, b->positions[t] = next + t;
    return fits(o, b);
}

kvc_status right_reserve(oracle *o, const call *c) {
    batch b;
    if (is_engaged(o, c)) return KVC_ERR_BUSY;
    const kvc_status status = go_on(o, c->s, c->num, &b);
    if (status == KVC_OK) expire_for(o, &b);
    return status;
}

/* A batch of as many tokens fits, and a larger one does not. */
kvc_status right_room(oracle *o, const call *c) {
    batch b;
    if (is_engaged(o, c)) return KVC_ERR_BUSY;
    if (c->status || o->crowded) return KVC_OK;
    const int32_t left = INT32_MAX - next_of(o, &o->sequences[c->s]); /* positions */
    if (left <= TOKENS) {
        if (c->result > left) wrong("there is room for %d tokens, but there are %d positions", (int)c->result, left);
        return KVC_OK;
    }
    if (go_on(o, c->s, 1, &b) == KVC_ERR_GONE) {
        if (c->result) wrong("there is room for %d tokens, but rows are gone", (int)c->result);
        return KVC_OK;
    }
    if (room_is_open(o)) return KVC_OK;
    if (c->result > 0 && c->result <= TOKENS && go_on(o, c->s, (int)c->result, &b))
        wrong("there is no room for %d tokens", (int)c->result);
    if (c->result < TOKENS && go_on(o, c->s, (int)c->result + 1, &b) != KVC_ERR_FULL)
        wrong("there is room for more than %d tokens", (int)c->result);
    return KVC_OK;
}
