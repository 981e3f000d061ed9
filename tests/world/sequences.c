/* sequences.c: what sequences hold, and what batches and edits do to them. */
#include "oracle.h"

#include <string.h>

token *tokens;

/* ---- layers ------------------------------------------------------------------------------------------------------ */

int is_own(const oracle *o, int l) {
    const kvc_layer *layer = &o->layers[l];
    return !layer->share && layer->policy.kind != KVC_CROSS && layer->policy.kind != KVC_NONE;
}

int is_cross(const oracle *o, int l) { return !o->layers[l].share && o->layers[l].policy.kind == KVC_CROSS; }

int source_of(const oracle *o, int l) { return o->layers[l].share ? o->layers[l].share - 1 : l; }

int32_t stride_of(const oracle *o, int l) {
    const kvc_policy *policy = &o->layers[l].policy;
    return policy->kind == KVC_FULL && policy->stride > 1 ? policy->stride : 1;
}

int gets_row(const oracle *o, int l, int32_t position) { return (position + (int64_t)1) % stride_of(o, l) == 0; }

/* How many positions a window keeps. */
static int32_t num_kept(const kvc_policy *policy) {
    return policy->resume_window ? policy->resume_window : policy->window;
}

static int same_policy(const kvc_policy *a, const kvc_policy *b) {
    if (a->kind != b->kind) return 0;
    if (a->kind == KVC_FULL) return (a->stride > 1 ? a->stride : 1) == (b->stride > 1 ? b->stride : 1);
    if (a->kind == KVC_CHUNKED)
        return a->attention_chunk_size == b->attention_chunk_size && a->resume_window == b->resume_window;
    return a->window == b->window && a->num_sink_tokens == b->num_sink_tokens && num_kept(a) == num_kept(b);
}

int same_group(const oracle *o, int a, int b) {
    return is_own(o, a) && is_own(o, b) && same_policy(&o->layers[a].policy, &o->layers[b].policy);
}

/* Each cross-attention layer is a group by itself. */
int leads_group(const oracle *o, int l) {
    for (int i = 0; i < l; i++)
        if (same_group(o, i, l)) return 0;
    return is_own(o, l) || is_cross(o, l);
}

int has_rope(const oracle *o, int l, int32_t kind) {
    for (int i = 0; i < o->num_layers; i++)
        if (same_group(o, i, l) && o->layers[i].rope.kind == kind) return 1;
    return 0;
}

static int32_t not_negative(int32_t x) { return x > 0 ? x : 0; }

/* The lowest position that a query sees, sink tokens aside. */
int32_t lowest_seen(const kvc_policy *policy, int32_t position) {
    if (policy->kind == KVC_CHUNKED) return position / policy->attention_chunk_size * policy->attention_chunk_size;
    return policy->kind == KVC_SLIDING ? not_negative(position - policy->window + 1) : 0;
}

/* Whether a row stays if no later query comes before `low`. */
static int is_kept(const kvc_policy *policy, int32_t position, int32_t low) {
    if (policy->kind == KVC_CHUNKED) return position >= lowest_seen(policy, low) - policy->resume_window;
    return policy->kind != KVC_SLIDING || position < policy->num_sink_tokens ||
           position >= not_negative(low - num_kept(policy) + 1);
}

int has_windows(const oracle *o) {
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l) && o->layers[l].policy.kind != KVC_FULL) return 1;
    return 0;
}

/* ---- sequences --------------------------------------------------------------------------------------------------- */

int holds_tokens(const oracle *o, const sequence *s) {
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l) && s->layers[l].num) return 1;
    return 0;
}

int holds_rows(const oracle *o, const sequence *s) {
    for (int l = 0; l < o->num_layers; l++)
        if (s->layers[l].num) return 1;
    return 0;
}

int holds_any(const oracle *o, const sequence *s) {
    for (int l = 0; l < o->num_layers; l++)
        if (s->layers[l].num || s->layers[l].lost.end) return 1;
    return 0;
}

int is_there(const oracle *o, const sequence *s) { return s->prefix || holds_any(o, s); }

int32_t extreme_of(const oracle *o, const sequence *s, int sign) {
    int32_t found = -1;
    for (int l = 0; l < o->num_layers; l++)
        for (int i = 0; is_own(o, l) && i < s->layers[l].num; i++)
            if (found < 0 || ((int64_t)s->layers[l].at[i].position - found) * sign > 0)
                found = s->layers[l].at[i].position;
    return found;
}

int32_t next_of(const oracle *o, const sequence *s) {
    int32_t next = extreme_of(o, s, 1) + 1;
    for (int l = 0; l < o->num_layers; l++) next = s->layers[l].lost.end > next ? s->layers[l].lost.end : next;
    return next;
}

/* The lowest position at which a query may come: the next one, or one where a layer lacks rows that others have. */
static int32_t low_of(const oracle *o, const sequence *s) {
    int32_t low = next_of(o, s);
    for (int l = 0; l < o->num_layers; l++)
        if (s->layers[l].missing.end && s->layers[l].missing.begin + 1 - stride_of(o, l) < low)
            low = s->layers[l].missing.begin + 1 - stride_of(o, l);
    return low;
}

/* Whether a query at a position would see rows of a layer below `end` that have expired, or were not restored. */
int misses_in(const oracle *o, const sequence *s, int l, int32_t position, int32_t end) {
    const kvc_policy *policy = &o->layers[l].policy;
    const range gone[] = {s->layers[l].lost, s->layers[l].missing};
    const int32_t lowest = lowest_seen(policy, position),
                  sinks = policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0;
    for (int i = 0; i < 2; i++)
        if (gone[i].end && gone[i].begin < end && (lowest < gone[i].end || gone[i].begin < sinks)) return 1;
    return 0;
}

int misses_below(const oracle *o, const sequence *s, int32_t position, int32_t end) {
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l) && misses_in(o, s, l, position, end)) return 1;
    return 0;
}

int misses(const oracle *o, const sequence *s, int32_t position) { return misses_below(o, s, position, KVC_END); }

const row *find_row(const rows *list, int32_t position) {
    for (int i = list->num - 1; i >= 0; i--)
        if (list->at[i].position == position) return &list->at[i];
    return NULL;
}

void add_row(rows *list, row r) {
    if (list->num == ROWS) wrong("a sequence has more than %d rows", ROWS);
    list->at[list->num++] = r;
}

row new_row(int32_t position, int32_t tag) { return (row){position, tag, 0, tag, 0}; }

void copy_rows(oracle *o, sequence *to) {
    for (int l = 0; l < o->num_layers; l++) {
        const rows before = to->layers[l];
        for (int i = 0, j; i < before.num; i++) {
            for (j = 0; before.at[j].slot != before.at[i].slot;) j++;
            to->layers[l].at[i].slot = j < i ? to->layers[l].at[j].slot : o->next_slot++;
        }
    }
}

/* Whether a row is not there, and has not expired. */
static int is_absent(const oracle *o, const rows *list, int l, int32_t at) {
    return gets_row(o, l, at) && !find_row(list, at) && !(at >= list->lost.begin && at < list->lost.end);
}

/* The exact tokens end where the sequence does, and where rows become inexact. */
static void trim_text(const oracle *o, sequence *s) {
    const int32_t next = next_of(o, s), exact = s->exact_to < next ? s->exact_to : next;
    int32_t num = exact < text_length(s->text) ? exact : text_length(s->text);
    for (int l = 0; l < o->num_layers; l++) /* a layer that was restored may lack the first ones */
        for (int32_t at = 0; is_own(o, l) && at < num; at++)
            if (is_absent(o, &s->layers[l], l, at)) num = at;
    s->text = text_begin(s->text, num);
    for (int l = 0; l < o->num_layers; l++)
        if (num < 64) s->had[l] &= ((uint64_t)1 << num) - 1;
}

void end_sequence(oracle *o, sequence *s) {
    note_end(o, s);
    *s = (sequence){.exact_to = INT32_MAX};
}

/* What a layer with a stride lacks begins and ends with a row. */
static void trim_missing(const oracle *o, sequence *s) {
    for (int l = 0; l < o->num_layers; l++) {
        range *missing = &s->layers[l].missing;
        while (missing->begin < missing->end && !gets_row(o, l, missing->begin)) missing->begin++;
        while (missing->begin < missing->end && !gets_row(o, l, missing->end - 1)) missing->end--;
        if (missing->begin >= missing->end) *missing = (range){0, 0};
    }
}

/* An edit that leaves no token of the ones that a sequence had ends it, whatever an encoder's rows it has. */
void tidy(oracle *o, sequence *s, int had_tokens) {
    trim_missing(o, s);
    if ((had_tokens && next_of(o, s) == 0) || (!holds_any(o, s) && !s->prefix))
        end_sequence(o, s);
    else
        trim_text(o, s);
}

/* Later blocks are kept only by kvc_prefix_release.  Earlier blocks for which memory was short may still be kept. */
void stop_keeping(sequence *s) {
    if (s->keeps == 2) s->keeps = 0;
}

/* An edit of an acquired sequence. */
void note_edit(sequence *s) {
    stop_keeping(s);
    s->state = s->state ? -1 : 0;
}

int is_busy(const oracle *o, int s) {
    for (int i = 0; i < CLIENTS; i++)
        if (o->batches[i].is_open && count_in(&o->batches[i], s)) return 1;
    return o->rewriting == 1 + s && !o->crowded;
}

int is_engaged(const oracle *o, const call *c) {
    for (int i = 0; i < CLIENTS; i++)
        if (o->batches[i].is_open && (i == c->client || !o->crowded)) return 1;
    return o->rewriting && !o->crowded;
}

/* ---- expiring ---------------------------------------------------------------------------------------------------- */

void widen(range *r, int32_t position) {
    if (!r->end || position < r->begin) r->begin = position;
    if (position >= r->end) r->end = position + 1;
}

/* Drops what no query from `low` on will see, and the policies do not keep. */
void expire_below(const oracle *o, sequence *s, int32_t low) {
    for (int l = 0; l < o->num_layers; l++) {
        rows *list = &s->layers[l];
        int num = 0;
        for (int i = 0; i < list->num; i++)
            if (!is_own(o, l) || is_kept(&o->layers[l].policy, list->at[i].position, low))
                list->at[num++] = list->at[i];
            else
                widen(&list->lost, list->at[i].position);
        list->num = num;
    }
}

int count_in(const batch *b, int s) {
    int num = 0;
    for (int t = 0; t < b->num; t++) num += b->slots[t] == s;
    return num;
}

void expire_for(oracle *o, const batch *b) {
    for (int i = 0; i < SLOTS; i++) {
        sequence *s = &o->sequences[i];
        int32_t low = holds_tokens(o, s) ? low_of(o, s) : INT32_MAX;
        if (!count_in(b, i)) low = not_negative(low - 1);
        for (int t = 0; t < b->num; t++)
            if (b->slots[t] == i && b->positions[t] < low) low = b->positions[t];
        expire_below(o, s, low);
    }
}

/* What a query in the place of a sequence's last token would not see expires with a commit. */
static void expire_behind(const oracle *o, sequence *s) { expire_below(o, s, not_negative(low_of(o, s) - 1)); }

/* ---- batches ----------------------------------------------------------------------------------------------------- */

int takes_tokens(const oracle *o, int l, const batch *b) { return is_own(o, l) && (!b->restores || b->layers[l]); }

/* Makes the batch of a call; without positions, tokens follow those that their sequences have. */
static void read_batch(const oracle *o, const call *c, batch *b) {
    int32_t next[SLOTS];
    *b = (batch){.is_open = 1, .num = c->num, .has_parents = c->flag & 2, .restores = c->flag & 8};
    for (int s = 0; s < SLOTS; s++) next[s] = next_of(o, &o->sequences[s]);
    memcpy(b->layers, c->layers, sizeof b->layers);
    for (int t = 0; t < c->num; t++) {
        const int s = b->slots[t] = c->slots[t];
        b->positions[t] = c->flag & 1 || o->crowded ? c->positions[t] : next[s]++;
        b->parents[t] = c->parents[t];
        b->symbols[t] = c->symbols[t];
        b->tags[t] = c->tag + t;
        b->unstored[t] = c->flag & 4 && c->marks[t];
    }
}

kvc_status right_begin(oracle *o, const call *c) {
    batch b;
    if (is_engaged(o, c)) return KVC_ERR_BUSY;
    read_batch(o, c, &b);
    for (int t = 0; t < b.num && !b.restores; t++)
        if (misses(o, &o->sequences[b.slots[t]], b.positions[t])) /* both may be wrong */
            return c->status == KVC_ERR_FULL && fits(o, &b, c->status) ? KVC_ERR_FULL : KVC_ERR_GONE;
    if (fits(o, &b, c->status)) return KVC_ERR_FULL;
    expire_for(o, &b);
    for (int t = 0; t < b.num; t++) {
        sequence *s = &o->sequences[b.slots[t]];
        if (!is_there(o, s)) s->date = o->now, s->from = 0;
        tokens[b.tags[t]] = (token){.base = b.positions[t], .time = o->now, .symbol = b.symbols[t]};
    }
    o->batches[c->client] = b;
    return KVC_OK;
}

kvc_status may_put(const oracle *o, const batch *b, const call *c) {
    if (!takes_tokens(o, c->layer, b)) return KVC_ERR_INVALID;
    if (c->begin + c->num > b->num) return KVC_ERR_INDEX;
    for (int t = c->begin; t < c->begin + c->num; t++)
        if (b->is_put[c->layer][t]) return KVC_ERR_INVALID;
    return KVC_OK;
}

/* Tokens [begin, begin + num) of the batch get their rows in a layer. */
static void give_rows(batch *b, const call *c) { memset(b->is_put[c->layer] + c->begin, 1, (size_t)c->num); }

kvc_status right_put(oracle *o, const call *c) {
    batch *b = &o->batches[c->client];
    const kvc_status right = may_put(o, b, c);
    if (!right) give_rows(b, c);
    return right;
}

/* c->more: bits of the statuses that are right. */
kvc_status right_listed(oracle *o, const call *c) {
    kvc_status right = KVC_OK;
    (void)o;
    while (!(c->more >> right & 1)) right++;
    return c->more >> c->status & 1 ? c->status : right;
}

/* flag: tokens get their rows first.  marks: tokens that have selected rows. */
kvc_status right_attend(oracle *o, const call *c) {
    const kvc_status right = right_listed(o, c);
    batch *b = &o->batches[c->client];
    if (c->flag && !right) give_rows(b, c);
    for (int t = 0; t < b->num && !right; t++) b->has_selected[t] |= c->marks[t];
    return right;
}

kvc_status right_put_cross(oracle *o, const call *c) {
    batch *b = &o->batches[c->client];
    if (c->num > o->layers[c->layer].policy.max_len) return KVC_ERR_FULL;
    b->num_cross[c->layer][c->s] = c->num;
    b->cross[c->layer][c->s] = c->tag;
    for (int i = 0; i < c->num; i++) tokens[c->tag + i] = (token){.base = i, .time = c->began};
    return KVC_OK;
}

/* The old rows of a sequence in the restored layers are missing from now on, unless they come back. */
static void drop_restored(const oracle *o, const batch *b, sequence *s) {
    for (int l = 0; l < o->num_layers; l++) {
        rows *list = &s->layers[l];
        if (!takes_tokens(o, l, b)) continue;
        for (int i = 0; i < list->num; i++) widen(&list->missing, list->at[i].position);
        for (int32_t at = list->lost.begin; at < list->lost.end; at++) widen(&list->missing, at);
        list->num = 0;
        list->lost = (range){0, 0};
    }
}

/* Notes what layers lack once some have been restored: what a window let go before, and what other layers have. */
static void note_missing(const oracle *o, const batch *b, sequence *s) {
    for (int l = 0; l < o->num_layers; l++) {
        const kvc_policy *policy = &o->layers[l].policy;
        rows *list = &s->layers[l];
        int32_t last = -1, at = policy->kind == KVC_SLIDING ? policy->num_sink_tokens : 0;
        for (int i = 0; i < list->num; i++) last = list->at[i].position > last ? list->at[i].position : last;
        for (; takes_tokens(o, l, b) && last >= 0 && at < lowest_seen(policy, last + 1); at++)
            if (!find_row(list, at)) widen(&list->lost, at);
    }
    for (int l = 0; l < o->num_layers; l++) {
        rows *list = &s->layers[l];
        const range before = list->missing;
        list->missing = (range){0, 0};
        if (!is_own(o, l)) continue;
        for (int other = 0; other < o->num_layers; other++)
            for (int i = 0; is_own(o, other) && i < s->layers[other].num; i++) {
                const int32_t last = s->layers[other].at[i].position;
                for (int32_t at = last + 1 - stride_of(o, other); at <= last; at++)
                    if (is_absent(o, list, l, at)) widen(&list->missing, at);
            }
        for (int32_t at = before.begin; at < before.end && at < list->missing.end; at++)
            if (is_absent(o, list, l, at)) widen(&list->missing, at);
    }
}

/* Gives sequences the rows of a batch that restores layers, in order of position. */
static void commit_restored(oracle *o, const batch *b, const uint8_t *kept) {
    for (int t = 0; t < b->num; t++)
        if (kept[t]) drop_restored(o, b, &o->sequences[b->slots[t]]);
    for (int t = 0; t < b->num; t++) {
        sequence *s = &o->sequences[b->slots[t]];
        for (int l = 0; kept[t] && l < o->num_layers; l++) {
            rows *list = &s->layers[l];
            if (!takes_tokens(o, l, b) || !gets_row(o, l, b->positions[t])) continue;
            add_row(list, new_row(b->positions[t], b->tags[t]));
            for (int i = list->num - 1; i > 0 && list->at[i - 1].position > list->at[i].position; i--) {
                const row after = list->at[i];
                list->at[i] = list->at[i - 1];
                list->at[i - 1] = after;
            }
        }
    }
    for (int t = 0; t < b->num; t++)
        if (kept[t]) note_missing(o, b, &o->sequences[b->slots[t]]);
}

/* Gives a sequence the rows that were put for it in cross-attention layers. */
static void commit_cross(oracle *o, const batch *b, int s) {
    for (int l = 0; l < o->num_layers; l++) {
        rows *list = &o->sequences[s].layers[l];
        if (!b->num_cross[l][s]) continue;
        list->num = 0;
        for (int i = 0; i < b->num_cross[l][s]; i++) add_row(list, new_row(i, b->cross[l][s] + i));
    }
}

static int is_any_kept(const batch *b, const uint8_t *kept, int s) {
    for (int t = 0; t < b->num; t++)
        if (b->slots[t] == s && kept[t]) return 1;
    return 0;
}

/* Ends a batch for one of its sequences. */
static void commit_sequence(oracle *o, const batch *b, const uint8_t *kept, int at, int32_t exact_to) {
    sequence *s = &o->sequences[at];
    const int32_t old = next_of(o, s);
    int is_unstored = 0;
    for (int t = 0; t < b->num; t++) is_unstored |= b->slots[t] == at && b->unstored[t];
    for (int t = 0; t < b->num && !b->restores && !is_unstored; t++)
        for (int l = 0; b->slots[t] == at && kept[t] && l < o->num_layers; l++)
            if (is_own(o, l) && gets_row(o, l, b->positions[t]))
                add_row(&s->layers[l], new_row(b->positions[t], b->tags[t]));
    if (is_unstored) {
        const sequence ended = {.exact_to = INT32_MAX,
                                .prefix = s->prefix,
                                .prompt = s->prompt,
                                .prompt_bytes = s->prompt_bytes,
                                .date = s->date,
                                .from = s->from};
        *s = ended;
        return;
    }
    if (is_any_kept(b, kept, at)) {
        commit_cross(o, b, at);
        make_inexact(s, exact_to);
    }
    s->state = 0;
    const int keeps = s->keeps && !is_any_kept(b, kept, at); /* whether it is edited then is open */
    if (b->restores) note_edit(s), s->keeps = keeps;
    for (int t = 0; t < b->num; t++)
        if (b->slots[t] == at && kept[t] && b->positions[t] == text_length(s->text) && s->exact_to > b->positions[t])
            s->text = text_behind(s->text, b->symbols[t]);
    trim_text(o, s);
    note_commit(o, b, kept, at, old);
    expire_behind(o, s);
    if (!holds_any(o, s) && !s->prefix) end_sequence(o, s);
}

kvc_status right_commit(oracle *o, const call *c) {
    const batch b = o->batches[c->client];
    uint8_t kept[TOKENS];
    int32_t exact_to[SLOTS];
    for (int t = 0; t < b.num; t++) kept[t] = !c->flag || (t < c->num && c->marks[t]);
    for (int t = b.num; c->flag && t < c->num; t++)
        if (c->marks[t]) return KVC_ERR_INDEX;
    for (int t = 0; t < b.num; t++)
        for (int l = 0; l < o->num_layers; l++)
            if (kept[t] && !b.unstored[t] && takes_tokens(o, l, &b) && gets_row(o, l, b.positions[t]) &&
                !b.is_put[l][t])
                return KVC_ERR_INVALID;
    for (int s = 0; s < SLOTS; s++) exact_to[s] = batch_exact_to(o, &b, s, kept);
    note_texts(o, &b, kept);
    o->batches[c->client].is_open = 0;
    if (b.restores) commit_restored(o, &b, kept);
    for (int s = 0; s < SLOTS; s++)
        if (count_in(&b, s)) commit_sequence(o, &b, kept, s, exact_to[s]);
    return KVC_OK;
}

kvc_status right_abort(oracle *o, const call *c) {
    const batch *b = &o->batches[c->client];
    o->batches[c->client].is_open = 0;
    for (int t = 0; t < b->num; t++)
        if (!is_there(o, &o->sequences[b->slots[t]])) o->sequences[b->slots[t]].exact_to = INT32_MAX;
    return KVC_OK;
}

kvc_status right_vain(oracle *o, const call *c) {
    const kvc_status right = right_begin(o, c);
    if (!right && !c->status) right_abort(o, c);
    return right;
}
