/* calls_batches.c: how batches are drawn and run.  Flags of a batch that begins: see enum begins. */
#include "packing.h"

enum begins { POSITIONS = 1, PARENTS = 2, UNSTORED = 4, RESTORES = 8, WAITS = 16, PLAIN = 32 };

int32_t new_tags(int num) {
    const int32_t first = w.last_tag + 1;
    w.last_tag += num;
    if (w.last_tag >= (1 << 20)) wrong("a world has too many tokens: give it fewer calls");
    return first;
}

int own_slot(void) {
    const int num = w.num_clients;
    if (w.is_wild && !pick(3)) return pick(SLOTS);
    for (int tries = w.theme == PROMPTS && pick(4) ? 6 : 0; tries > 0; tries--) { /* those that are acquired */
        const int at = ACQUIRED + pick(SLOTS - ACQUIRED);
        if (w.o.sequences[at].prefix && at % num == me->number) return at;
    }
    int at = 0;
    for (int tries = w.theme == ATTENTION ? 1 + pick(4) : 1; tries > 0; tries--) { /* a long one */
        at = me->number + num * pick((SLOTS - me->number + num - 1) / num);
        if (next_of(&w.o, &w.o.sequences[at]) > 24) break;
    }
    const sequence *s = &w.o.sequences[at];
    return at < ACQUIRED || s->prefix || holds_any(&w.o, s) ? at : at % ACQUIRED;
}

int any_position(int s) {
    const int32_t next = next_of(&w.o, &w.o.sequences[s]);
    if (w.o.sequences[s].is_open) return pick(40);
    return next > 1000 && pick(2) ? next - pick(9) : pick(next < 64 ? next + 3 : 64);
}

static const batch *own_batch(void) { return &w.o.batches[me->number]; }

static void set_ids(const call *c, int64_t *ids) {
    for (int t = 0; t < c->num; t++) ids[t] = w.ids[c->slots[t]];
}

/* ---- begin ------------------------------------------------------------------------------------------------------- */

/* The token that follows a sequence's text: of its prompt, of a text of the world, or any. */
static int next_symbol(const sequence *s, int64_t position, int text) {
    if (s->prompt && position < text_length(s->prompt) && text_begin(s->prompt, position) == text)
        return text_symbol(text_begin(s->prompt, position + 1));
    const int other = w.texts[pick(TEXTS)];
    if (text_length(other) > position && text_begin(other, position) == text)
        return text_symbol(text_begin(other, position + 1));
    return pick(3) ? pick(2) : pick(SYMBOLS);
}

/* Returns a position, or 0 for what is none. */
static int32_t position_or_0(int64_t position) { return position >= 0 && position < KVC_END ? (int32_t)position : 0; }

/* Whether a layer of a sequence has nearly as many rows as the oracle has room for. */
static int is_crowded_in(const sequence *s) {
    for (int l = 0; l < w.o.num_layers; l++)
        if (s->layers[l].num > ROWS - TOKENS) return 1;
    return 0;
}

/* Returns a sequence.  In worlds of attention it often shares many rows with s, which attention scans once for both. */
static int beside(int s) {
    int at = own_slot();
    for (int tries = w.theme == ATTENTION ? 8 : 0; tries > 0; tries--) {
        if (at != s && text_common(w.o.sequences[at].text, w.o.sequences[s].text) > 16) break;
        at = own_slot();
    }
    return at;
}

/* Draws the tokens of up to three sequences: usually the next ones, one sequence after the other or mixed. */
static void draw_tokens(call *c, int is_odd) {
    int members[3], texts[3];
    int64_t next[3];
    int is_prompt = 0; /* which is long, of one sequence */
    for (int m = 0; m < 3; m++) {
        members[m] = is_prompt ? members[0] : m ? beside(members[0]) : own_slot();
        if (w.theme == ATTENTION && !m) is_prompt = next_of(&w.o, &w.o.sequences[members[0]]) < 24 || !pick(4);
        const sequence *s = &w.o.sequences[members[m]];
        for (int i = 0; i < m; i++)
            if (members[i] == members[m]) members[m] = members[i];
        next[m] = next_of(&w.o, s);
        texts[m] = s->text;
    }
    c->num = is_prompt ? TOKENS - pick(8) : pick(w.theme == PROMPTS ? 2 : 4) ? 1 + pick(8) : 1 + pick(TOKENS);
    for (int t = 0; t < c->num; t++) {
        int m = is_odd ? pick(3) : t * 3 / c->num;
        for (int i = 0; i < m; i++)
            if (members[i] == members[m]) m = i;
        const sequence *s = &w.o.sequences[members[m]];
        if ((next[m] >= MOST_TEXT && next[m] < 1000) || (!is_odd && next[m] >= KVC_END) || is_crowded_in(s)) {
            c->num = t; /* it is long enough */
            return;
        }
        c->slots[t] = (int8_t)members[m];
        c->symbols[t] = (int8_t)next_symbol(s, next[m], texts[m]);
        if (next[m] == text_length(texts[m]) && next[m] < MOST_TEXT) texts[m] = text_behind(texts[m], c->symbols[t]);
        const int is_moved = is_odd && !pick(3) && !s->prefix;
        c->positions[t] = position_or_0(next[m]++ + (is_moved ? pick(13) - 6 : 0));
        c->parents[t] = -1;
    }
}

/* Makes a tree of the tokens: each has a position behind its parent's, or behind all of its sequence. */
static void draw_parents(call *c) {
    const int rises = !pick(4);
    c->flag |= rises ? PARENTS : PARENTS | POSITIONS;
    for (int t = 0; t < c->num; t++) {
        const int parent = t - 1 - pick(3);
        c->parents[t] = parent >= 0 && c->slots[parent] == c->slots[t] ? parent : -1;
        if (rises) continue;
        const int64_t next = next_of(&w.o, &w.o.sequences[c->slots[t]]);
        c->positions[t] = position_or_0(c->parents[t] < 0 ? next : (int64_t)c->positions[c->parents[t]] + 1);
    }
}

/* Draws positions of a sequence, in any order, some more than once. */
static void draw_restored_tokens(call *c, int s) {
    const int holes = !pick(4), repeats = !pick(4), first = c->num;
    const int32_t next = next_of(&w.o, &w.o.sequences[s]),
                  end = !next || pick(3) == 0 ? 1 + pick(next < 60 ? next + 5 : 60) : next;
    for (int32_t at = pick(3) ? end - 1 - pick(pick(2) ? 4 : 12) : pick(9); at < end && c->num < TOKENS; at++) {
        if (at < 0 || (holes && !pick(3))) continue;
        const int to = pick(4) ? c->num : first + pick(c->num - first + 1);
        c->positions[c->num] = c->positions[to];
        c->slots[c->num++] = (int8_t)s;
        c->positions[to] = at;
        at -= repeats && !pick(2);
    }
}

/* Draws tokens of one sequence or two, and layers that they restore. */
static int draw_restored(call *c) {
    const int s = own_slot(), other = pick(3) ? s : own_slot();
    int any = 0;
    if (next_of(&w.o, &w.o.sequences[s]) > 1000 || next_of(&w.o, &w.o.sequences[other]) > 1000) return 0;
    c->flag = RESTORES | POSITIONS;
    c->num = 0;
    draw_restored_tokens(c, s);
    if (other != s) draw_restored_tokens(c, other);
    for (int l = 0; l < w.o.num_layers; l++) {
        c->layers[l] = (uint8_t)pick(2);
        for (int i = 0; i < l; i++)
            if (same_group(&w.o, i, l)) c->layers[l] = c->layers[i];
        any |= c->layers[l] && (is_own(&w.o, l) || is_cross(&w.o, l));
    }
    return c->num && any;
}

int draw_begin(call *c) {
    if (own_batch()->is_open && pick(20)) return 0;
    const int rarity = w.theme == PROMPTS ? 30 : 7;
    const int restores = w.o.unit > 1 && w.theme != PROMPTS ? 3 : rarity; /* a layer lacks other layers' blocks then */
    if (!pick(restores)) return draw_restored(c) ? (c->tag = new_tags(c->num)) : 0;
    const int is_odd = !pick(rarity);
    draw_tokens(c, is_odd);
    if (!c->num) return 0;
    c->flag = is_odd ? POSITIONS : pick(3) ? 0 : POSITIONS;
    if (!is_odd && !pick(rarity)) draw_parents(c);
    if (!pick(rarity)) {
        c->flag |= UNSTORED;
        int is_unstored[SLOTS];
        for (int s = 0; s < SLOTS; s++) is_unstored[s] = pick(2);
        for (int t = 0; t < c->num; t++) c->marks[t] = (uint8_t)is_unstored[c->slots[t]];
    }
    if (!(c->flag & UNSTORED) && pick(2)) c->flag |= PLAIN;
    if (!(c->flag & PLAIN) && !own_batch()->is_open && !me->is_within && pick(2)) c->flag |= WAITS;
    if (w.o.crowded && !w.is_wild && c->flag & PARENTS)
        for (int t = 0; t < c->num; t++)
            if (w.o.sequences[c->slots[t]].prefix) return 0;
    return c->tag = new_tags(c->num);
}

void run_begin(call *c) {
    int64_t ids[TOKENS];
    kvc_batch *opened = NULL;
    int is_default = !(c->flag & ~PLAIN & ~WAITS);              /* all of sequence 0 */
    const int waits = c->flag & WAITS && !own_batch()->is_open; /* it is, if the call that ends it was left out */
    for (int t = 0; t < c->num; t++) is_default &= c->slots[t] == 0;
    set_ids(c, ids);
    for (int t = 0; t < c->num && w.is_wild; t++) /* nobody knows how long it is */
        if (kvc_next_position(w.cache, ids[t]) > MOST_TEXT - TOKENS)
            kvc_clear_sequence(w.cache, ids[t]), take_picture();
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = c->num,
                                 .positions = c->flag & POSITIONS ? c->positions : NULL,
                                 .seq_ids = is_default ? NULL : ids,
                                 .parents = c->flag & PARENTS ? c->parents : NULL,
                                 .unstored = c->flag & UNSTORED ? c->marks : NULL,
                                 .timeout_ms = waits ? (c->seed % 3 ? -1 : (int64_t)(c->seed % 50)) : 0,
                                 .replaced = c->flag & RESTORES ? c->layers : NULL};
    const int64_t called = drive.time ? drive.time() : 0;
    c->status = c->flag & PLAIN ? kvc_begin(w.cache, c->num, args.positions, args.seq_ids, args.parents, &opened)
                                : kvc_begin_with(w.cache, &args, &opened);
    if (c->status) return;
    if (drive.check_turn) drive.check_turn(called);
    w.batches[c->client] = opened;
    const int32_t *positions = kvc_batch_positions(opened);
    for (int t = 0; t < c->num && w.o.crowded; t++) c->positions[t] = positions[t];
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Draws tokens of the batch that lack a row in a layer; mostly all from the first such one on. */
static int draw_range(call *c, int l) {
    const batch *b = own_batch();
    int first = 0, end;
    while (first < b->num && b->is_put[l][first]) first++;
    for (end = first; end < b->num && !b->is_put[l][end];) end++;
    if (first == end) return 0;
    if (!pick(5)) first += pick(end - first);
    c->begin = first;
    c->num = pick(5) ? end - first : 1 + pick(end - first);
    return 1;
}

/* Now and then names a layer that takes no rows, or tokens that have rows. */
int draw_put(call *c) {
    const batch *b = own_batch();
    if (!b->is_open) return 0;
    for (int i = 0; i < 2 * LAYERS; i++) {
        c->layer = pick(w.o.num_layers);
        if (!pick(60) && !is_cross(&w.o, c->layer)) return c->num = 1 + pick(b->num);
        if (takes_tokens(&w.o, c->layer, b) && draw_range(c, c->layer)) return 1;
    }
    return 0;
}

/* Lists the tags of tokens that have a row in the layer. */
static int list_tags(const call *c, int32_t *tags) {
    const batch *b = own_batch();
    int num = 0;
    for (int t = c->begin; t < c->begin + c->num && t < b->num; t++)
        if (gets_row(&w.o, c->layer, b->positions[t])) tags[num++] = b->tags[t];
    return num;
}

void make_put(const call *c, kvc_put_args *args, packed *k, packed *v) {
    int32_t tags[TOKENS] = {0};
    const int num = list_tags(c, tags), is_whole = c->begin + c->num == own_batch()->num;
    int inner = stride_of(&w.o, c->layer) > 1 || pick(3) ? 0 : 1 + pick(6);
    if (inner && num % inner) inner = 0;
    pack_rows(k, c->layer, 0, tags, num, inner);
    pack_rows(v, c->layer, 1, tags, num, inner);
    const int is_absent = !num && pick(2);
    *args = (kvc_put_args){.struct_size = sizeof *args,
                           .first = c->begin,
                           .num_tokens = is_whole && pick(2) ? 0 : c->num,
                           .k = is_absent ? NULL : k->start,
                           .v = is_absent ? NULL : v->start,
                           .k_token_stride = k->token_stride,
                           .k_head_stride = k->head_stride,
                           .v_token_stride = v->token_stride,
                           .v_head_stride = v->head_stride,
                           .k_type = k->type,
                           .v_type = v->type,
                           .tokens_per_sequence = inner,
                           .k_batch_stride = k->batch_stride,
                           .v_batch_stride = v->batch_stride};
}

void run_put(call *c) {
    packed k, v;
    kvc_put_args args;
    make_put(c, &args, &k, &v);
    c->status = kvc_put(w.batches[c->client], c->layer, &args);
}

/* Only rows of floats are written where they lie. */
int draw_write(call *c) {
    if (!draw_put(c) || !takes_tokens(&w.o, c->layer, own_batch())) return 0;
    if (may_put(&w.o, own_batch(), c)) c->num = 1; /* rows of several tokens are asked for in several calls */
    const kvc_layer *layer = &w.o.layers[c->layer];
    return layer->k_type <= KVC_BF16 && (layer->v_type <= KVC_BF16 || !layer->v_dim);
}

static void write_row(const kvc_layer *layer, int l, int32_t tag, const kvc_span *span, int i) {
    float x[DIM];
    for (int h = 0; h < layer->num_kv_heads; h++) {
        make_key(layer, tag, l, h, 0, x);
        char *to = (char *)span->k + h * span->k_head_stride + i * span->k_row_stride;
        write_elements(to, x, layer->k_dim, layer->k_type);
        if (!layer->v_dim || layer->value_in_key) continue;
        make_value(layer, tag, l, h, x);
        to = (char *)span->v + h * span->v_head_stride + i * span->v_row_stride;
        write_elements(to, x, layer->v_dim, layer->v_type);
    }
}

void run_write(call *c) {
    const batch *b = own_batch();
    for (int t = c->begin, end = c->begin + c->num, next; t < end; t = next) {
        kvc_span span;
        kvc_hold *hold = NULL;
        next = t + 1;
        if (!gets_row(&w.o, c->layer, b->positions[t])) continue;
        const int holds = pick(2);
        do {
            c->status = kvc_slots(w.batches[c->client], c->layer, t, &span, sizeof span, holds ? &hold : NULL);
            if (t > c->begin) drive.arm(0); /* rows before this one are written */
        } while (c->status == KVC_ERR_NOMEM && t > c->begin);
        if (c->status) return;
        if (span.position != b->positions[t] || span.num_rows < 1 || span.delta) wrong("the span is another token's");
        for (int i = 0, u = t; u < end && i < span.num_rows; next = ++u)
            if (gets_row(&w.o, c->layer, b->positions[u]))
                write_row(&w.o.layers[c->layer], c->layer, b->tags[u], &span, i++);
        kvc_hold_free(hold);
    }
    c->status = kvc_written(w.batches[c->client], c->layer, c->begin, c->num);
}

int draw_put_cross(call *c) {
    const batch *b = own_batch();
    c->layer = pick(w.o.num_layers);
    if (!b->is_open || !is_cross(&w.o, c->layer) || (b->restores && !b->layers[c->layer])) return 0;
    c->s = b->slots[pick(b->num)];
    c->num = 1 + pick(w.o.layers[c->layer].policy.max_len + 1);
    return c->tag = new_tags(c->num);
}

void run_put_cross(call *c) {
    packed k, v;
    int32_t tags[CROSS + 1];
    for (int i = 0; i < c->num; i++) tags[i] = c->tag + i;
    pack_rows(&k, c->layer, 0, tags, c->num, 0);
    pack_rows(&v, c->layer, 1, tags, c->num, 0);
    const kvc_put_args args = {.struct_size = sizeof args,
                               .num_tokens = c->num,
                               .k = k.start,
                               .v = v.start,
                               .k_token_stride = k.token_stride,
                               .k_head_stride = k.head_stride,
                               .v_token_stride = v.token_stride,
                               .v_head_stride = v.head_stride,
                               .k_type = k.type,
                               .v_type = v.type,
                               .seq_id = w.ids[c->s]};
    c->status = kvc_put(w.batches[c->client], c->layer, &args);
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

static int is_put(const batch *b, int t) {
    for (int l = 0; l < w.o.num_layers; l++)
        if (takes_tokens(&w.o, l, b) && gets_row(&w.o, l, b->positions[t]) && !b->is_put[l][t]) return 0;
    return 1;
}

/* Keeps all tokens, the first ones of each sequence, or any.  A tree keeps one path. */
int draw_commit(call *c) {
    const batch *b = own_batch();
    int all = 1, kind = pick(w.theme == PROMPTS ? 8 : 4);
    uint8_t kept[TOKENS];
    if (!b->is_open) return 0;
    for (int t = 0; t < b->num; t++) all &= is_put(b, t);
    if (!all && pick(30)) return 0;
    c->num = b->num;
    c->flag = kind < 2 || b->has_parents;
    memset(c->marks, 1, sizeof c->marks);
    if (b->has_parents && kind) {
        memset(c->marks, 0, sizeof c->marks);
        for (int t = pick(b->num); t >= 0; t = b->parents[t]) c->marks[t] = 1;
    } else if (kind == 0) {
        for (int t = 0; t < b->num; t++) c->marks[t] = (uint8_t)(pick(3) > 0);
    } else if (kind == 1) {
        for (int s = 0; s < SLOTS; s++)
            for (int t = 0, left = pick(b->num + 1); t < b->num; t++)
                if (b->slots[t] == s && left-- <= 0) c->marks[t] = 0;
    }
    for (int t = 0; t < b->num; t++) kept[t] = !c->flag || c->marks[t];
    note_texts(&w.o, b, kept); /* others may find these tokens before the call returns */
    return 1;
}

void run_commit(call *c) {
    int32_t kept[TOKENS], num = 0;
    for (int t = 0; t < c->num; t++)
        if (c->marks[t]) kept[num++] = t;
    for (int i = 0; i < num; i++) { /* in any order */
        const int j = pick(num), at = kept[i];
        kept[i] = kept[j], kept[j] = at;
    }
    forget_plan(c->client);
    kvc_batch *ends = w.batches[c->client];
    w.batches[c->client] = NULL;
    c->status = c->flag ? kvc_commit_kept(ends, kept, num) : kvc_commit(ends);
    if (c->status) w.batches[c->client] = ends;
}

int draw_abort(call *c) {
    (void)c;
    return own_batch()->is_open;
}

void run_abort(call *c) {
    forget_plan(c->client);
    kvc_batch *ends = w.batches[c->client];
    w.batches[c->client] = NULL;
    kvc_abort(ends);
    c->status = KVC_OK;
}

/* A batch that ends at once leaves no more bytes than it found, unless rows expired or made room for it. */
void run_vain(call *c) {
    const picture *was = &me->before;
    kvc_stats now;
    run_begin(c);
    if (c->status) return;
    run_abort(c);
    kvc_get_stats(w.cache, &now, sizeof now);
    const int64_t nbytes = kvc_nbytes(w.cache);
    const int is_alone = !w.o.crowded || (drive.turns && drive.turns() == was->turns);
    if (!is_alone || c->is_disturbed || drive.num_faults() != was->faults || !w.o.config.allocator) return;
    if (now.rows_moved + now.rows_expired + now.rows_evicted !=
        was->stats.rows_moved + was->stats.rows_expired + was->stats.rows_evicted)
        return;
    if (nbytes > was->nbytes)
        wrong("leaves %lld bytes, of %lld before the batch", (long long)nbytes, (long long)was->nbytes);
}

/* ---- looking at a batch ------------------------------------------------------------------------------------------ */

int draw_batch_spans(call *c) {
    const batch *b = own_batch();
    if (!b->is_open || b->restores) return 0;
    c->layer = pick(w.o.num_layers);
    const int t = pick(b->num);
    c->s = b->slots[t];
    return w.o.layers[c->layer].policy.kind != KVC_NONE;
}

/* Lists the rows that the batch shows of a sequence: the stored ones, then those that were put. */
static void list_batch_rows(const batch *b, int s, int l, rows *list) {
    *list = w.o.sequences[s].layers[l];
    for (int t = 0; is_own(&w.o, l) && t < b->num; t++)
        if (b->slots[t] == s && b->is_put[l][t] && gets_row(&w.o, l, b->positions[t]))
            add_row(list, new_row(b->positions[t], b->tags[t]));
    if (!is_cross(&w.o, l) || !b->num_cross[l][s]) return;
    list->num = 0;
    for (int i = 0; i < b->num_cross[l][s]; i++) add_row(list, new_row(i, b->cross[l][s] + i));
}

void run_batch_spans(call *c) {
    kvc_span spans[VIEW_SPANS];
    kvc_hold *hold = NULL;
    rows list;
    int64_t num = 0, stored = -1;
    const int holds = pick(2), l = source_of(&w.o, c->layer);
    int is_other = 0;
    if (!count_in(own_batch(), c->s)) return; /* when calls are repeated */
    c->status = kvc_batch_spans(w.batches[c->client], w.ids[c->s], c->layer, spans, sizeof *spans, VIEW_SPANS, &num,
                                holds ? &hold : NULL);
    if (c->status == KVC_ERR_INVALID && w.is_wild) is_other = 1; /* the slot has another id since */
    if (is_other) c->status = KVC_OK;
    if (c->status || is_other) return;
    list_batch_rows(own_batch(), c->s, l, &list);
    int at = 0;
    for (int64_t i = 0; i < num && !w.o.crowded; i++)
        for (int j = 0; j < spans[i].num_rows; j++, at++)
            if (at >= list.num || list.at[at].position != spans[i].position + j * stride_of(&w.o, l) ||
                list.at[at].delta != spans[i].delta)
                wrong("row %d of a span of the batch stands at %d", at, spans[i].position + j);
    if (!w.o.crowded && at != list.num) wrong("the batch shows %d rows, not %d", at, list.num);
    kvc_hold_free(hold);
    const kvc_rows_out none = {.struct_size = sizeof none, .num_stored = &stored, .batch = w.batches[c->client]};
    c->status = kvc_gather(w.cache, w.ids[c->s], c->layer, 0, 0, &none);
    if (!c->status && !w.o.crowded && stored != list.num) wrong("the batch has %d rows, not %d", (int)stored, list.num);
}

int draw_dense_rows(call *c) {
    const batch *b = own_batch();
    c->layer = pick(w.o.num_layers);
    return b->is_open && !b->restores && w.o.layers[c->layer].policy.kind != KVC_NONE && w.o.layers[c->layer].v_dim;
}

/* The rows of the batch's sequences, and whether these come one after the other, with as many tokens each. */
void run_dense_rows(call *c) {
    const batch *b = own_batch();
    const int l = source_of(&w.o, c->layer);
    int64_t num = -1, sum = 0, most = 0, most_rows = -1;
    int32_t members = 0, num_sequences = -1, is_even = 1, first = 0;
    for (int s = 0; s < SLOTS; s++) {
        rows list;
        if (!count_in(b, s)) continue;
        list_batch_rows(b, s, l, &list);
        sum += list.num, members++;
        most = list.num > most ? list.num : most;
    }
    for (int t = 1; t <= b->num; t++)
        if (t == b->num || b->slots[t] != b->slots[t - 1]) {
            is_even &= (t - first) * members == b->num;
            for (int i = t; i < b->num; i++) is_even &= b->slots[i] != b->slots[t - 1];
            first = t;
        }
    c->status = kvc_dense_rows(w.batches[c->client], c->layer, &num);
    if (c->status || w.o.crowded) return;
    if (num != sum) wrong("there are %d dense rows, not %d", (int)num, (int)sum);
    const kvc_status status = kvc_dense_sequences(w.batches[c->client], c->layer, &num_sequences, &most_rows);
    if ((status == KVC_OK) != is_even) wrong("sequences side by side: %s", kvc_strerror(status));
    if (!status && (num_sequences != members || most_rows != most))
        wrong("%d sequences of %d rows, not %d of %d", num_sequences, (int)most_rows, members, (int)most);
}
