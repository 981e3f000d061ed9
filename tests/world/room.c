/* room.c: what fits.
 *
 * max_bytes counts whole blocks, states and prompts.  Whether a batch begins follows from a sum: rows as they lie once
 * they are moved together, without all that may be evicted.  The oracle knows two sums where it does not know all:
 * which rows pins and quotas protect, and which rows of one token are copies.  Between them, either answer is right.
 * The oracle does not know in which blocks rows lie.  Some calls count blocks as they lie, and may give either answer,
 * unless there is much room. */
#include "oracle.h"

#include <string.h>

enum { MOST_TOKEN_BYTES = 40 }; /* that a token of a prompt counts, with its digest; also an event */

/* Whether pins and quotas hold rows: the oracle does not know which. */
static int has_protected(const oracle *o) {
    for (int i = 0; i < PREFIXES; i++)
        if (o->prefixes[i].is_there && (o->prefixes[i].num_pins || o->prefixes[i].config.quota)) return 1;
    return 0;
}

int64_t capacity_of(const oracle *o) {
    return o->config.capacity ? o->config.capacity : o->config.max_seq_len * o->config.max_sequences;
}

/* Counts rows of all sequences in a layer, those in held blocks as well or not; shared ones count once.  In worlds
 * where rows of one token may be copies, they count as one row, so the number is a lower bound. */
static int32_t count_slots(const oracle *o, int l, int with_held) {
    enum { PLACES = 1 << 12 };
    int32_t seen[PLACES], num = 0;
    memset(seen, -1, sizeof seen);
    for (int s = 0; s < SLOTS; s++)
        for (int i = 0; i < o->sequences[s].layers[l].num; i++) {
            const row *r = &o->sequences[s].layers[l].at[i];
            const int32_t slot = o->has_twins ? r->tag : r->slot;
            int at = slot % PLACES;
            if (r->is_held && !with_held) continue;
            while (seen[at] >= 0 && seen[at] != slot) at = (at + 1) % PLACES;
            num += seen[at] < 0;
            seen[at] = slot;
        }
    return num;
}

int32_t live_rows(const oracle *o, int l) { return count_slots(o, l, 1); }

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

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

/* The state that an acquired sequence goes on from counts once for all that go on from it, unless it was kept anew. */
static int64_t bytes_of_state(const oracle *o, int at, int most) {
    const sequence *s = &o->sequences[at];
    if (s->state <= 0) return s->state && most ? MOST_STATE : 0;
    for (int i = 0; i < at && !most; i++)
        if (o->sequences[i].prefix == s->prefix && o->sequences[i].state == s->state) return 0;
    return state_size(s->state);
}

/* Returns what a prefix counts for max_bytes, except its blocks and acquired sequences. */
static int64_t bytes_of_prefix(const oracle *o, const prefix *p, int most) {
    int64_t bytes = p->config.max_events * (int64_t)sizeof(kvc_prefix_event);
    for (int i = 0; i < p->num_pins && most; i++) {
        const int num_blocks = text_length(p->pins[i].node) / o->block_size + 1; /* which may be in two parts */
        bytes += (int64_t)sizeof(void *) * p->pins[i].count * (2 * num_blocks + 1);
    }
    for (int i = 0; i < p->num_states && most && has_protected(o); i++) bytes += state_size(p->states[i].node);
    return bytes;
}

/* Bytes of states and prompts that are not evicted: at least, or at most. */
static int64_t bytes_of_others(const oracle *o, int most) {
    int64_t bytes = 0;
    for (int i = 0; i < PREFIXES; i++)
        if (o->prefixes[i].is_there) bytes += bytes_of_prefix(o, &o->prefixes[i], most);
    for (int s = 0; s < SLOTS; s++)
        if (o->sequences[s].prefix) bytes += o->sequences[s].prompt_bytes + bytes_of_state(o, s, most);
    return bytes;
}

int64_t bytes_beside_blocks(const oracle *o) {
    int64_t bytes = bytes_of_others(o, 0);
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < o->prefixes[i].num_states; j++) {
            const state *kept = &o->prefixes[i].states[j];
            int is_counted = !kept->is_sure;
            for (int s = 0; s < SLOTS; s++)
                is_counted |= o->sequences[s].prefix == 1 + i && o->sequences[s].state == kept->node;
            if (!is_counted) bytes += state_size(kept->node);
        }
    return bytes;
}

/* Returns what max_bytes counts with a batch, once everything evictable is evicted and rows are moved together.  Where
 * the oracle does not know which rows there are, it is the least sum, or the largest. */
static int64_t packed_bytes(const oracle *expired, const batch *b, int most) {
    const int is_open = expired->has_twins || has_protected(expired);
    int64_t bytes = bytes_of_others(expired, most);
    for (int l = 0; l < expired->num_layers; l++) {
        const group *of = &expired->groups[l];
        int64_t rows = -of->open;
        if (!of->cost) continue;
        for (int t = 0; t < b->num && takes_tokens(expired, l, b); t++) rows += gets_row(expired, l, b->positions[t]);
        rows = (rows > 0 ? rows : 0) + (most && is_open ? of->live : count_slots(expired, l, 0));
        bytes += of->cost * (of->held + (rows + of->size - 1) / of->size);
    }
    return bytes;
}

/* Whether there is room for each block in use once more, for every row of two sequences to come, and for a prompt. */
static int fits_easily(const oracle *o) {
    int64_t bytes = bytes_of_others(o, 1) + MOST_STATE + (MOST_EVENTS + MOST_TEXT + 1) * (int64_t)MOST_TOKEN_BYTES;
    if (o->crowded || o->is_moved) return 0;
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < o->prefixes[i].num_states; j++) bytes += state_size(o->prefixes[i].states[j].node);
    for (int l = 0; l < o->num_layers; l++) bytes += o->groups[l].cost * (2 * (o->groups[l].used + ROWS));
    return bytes <= o->budget;
}

int room_is_open(const oracle *o) {
    return o->has_twins || (o->config.max_bytes && !fits_easily(o)) || (capacity_of(o) && has_protected(o));
}

/* ---- what fits --------------------------------------------------------------------------------------------------- */

static kvc_status fits_bytes(const oracle *expired, const batch *b, kvc_status answered) {
    if (!expired->config.max_bytes || expired->is_moved) return KVC_OK;
    if (packed_bytes(expired, b, 0) > expired->budget) return KVC_ERR_FULL;
    return packed_bytes(expired, b, 1) <= expired->budget ? KVC_OK : answered;
}

kvc_status fits(const oracle *o, const batch *b, kvc_status answered) {
    oracle expired = *o;
    int64_t num = 0; /* sequences that hold rows, with the batch's */
    const int is_open = capacity_of(o) && (o->has_twins || has_protected(o));
    for (int s = 0; s < SLOTS; s++) num += holds_rows(o, &o->sequences[s]) || count_in(b, s);
    if (o->crowded) return KVC_OK;
    if (o->config.max_sequences && num > o->config.max_sequences) return KVC_ERR_FULL;
    expire_for(&expired, b);
    const kvc_status in_bytes = fits_bytes(&expired, b, answered);
    for (int s = 0; s < SLOTS; s++)
        for (int l = 0; b->restores && l < o->num_layers; l++)
            if (count_in(b, s) && takes_tokens(o, l, b)) expired.sequences[s].layers[l].num = 0;
    for (int l = 0; l < o->num_layers; l++)
        if (takes_tokens(o, l, b) && !fits_layer(o, &expired, l, b)) return KVC_ERR_FULL;
    return in_bytes == KVC_ERR_FULL || (is_open && answered == KVC_ERR_FULL) ? KVC_ERR_FULL : KVC_OK;
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
static kvc_status go_on(const oracle *o, int s, int n, batch *b, kvc_status answered) {
    const int32_t next = next_of(o, &o->sequences[s]);
    *b = (batch){.is_open = 1, .num = n};
    if (misses(o, &o->sequences[s], next)) return KVC_ERR_GONE;
    for (int t = 0; t < n; t++) b->slots[t] = (int8_t)s, b->positions[t] = next + t;
    return fits(o, b, answered);
}

kvc_status right_reserve(oracle *o, const call *c) {
    batch b;
    if (is_engaged(o, c)) return KVC_ERR_BUSY;
    const int all = c->result < TOKENS ? (int)c->result + !c->result : TOKENS, num = c->num ? c->num : all;
    if (c->more && !c->is_disturbed && !o->crowded) wrong("there is room for more than %d tokens", (int)c->result);
    if (num > INT32_MAX - next_of(o, &o->sequences[c->s])) /* what is looked at first is open */
        return c->status == KVC_ERR_FULL || c->status == KVC_ERR_GONE ? c->status : KVC_ERR_INVALID;
    const kvc_status status = go_on(o, c->s, num, &b, c->status);
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
    if (go_on(o, c->s, 1, &b, KVC_OK) == KVC_ERR_GONE) {
        if (c->result) wrong("there is room for %d tokens, but rows are gone", (int)c->result);
        return KVC_OK;
    }
    if (c->is_disturbed) return KVC_OK;
    const int num = c->result < TOKENS ? (int)c->result : TOKENS;
    if (num > 0 && go_on(o, c->s, num, &b, KVC_OK)) wrong("there is no room for %d tokens", (int)c->result);
    if (num < TOKENS && go_on(o, c->s, num + 1, &b, KVC_ERR_FULL) != KVC_ERR_FULL)
        wrong("there is room for more than %d tokens", num);
    return KVC_OK;
}
