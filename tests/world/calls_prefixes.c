/* calls_prefixes.c: how calls of prefixes, and of a store, are drawn and run. */
#include "calls.h"

#include <stdlib.h>

/* ---- texts ------------------------------------------------------------------------------------------------------- */

/* Makes one of the world's texts anew: it often begins like another one. */
static int new_text(void) {
    int text = w.texts[pick(TEXTS)];
    text = text_begin(text, pick(text_length(text) + 1));
    for (int n = 1 + pick(pick(4) ? 8 : 30); n > 0 && text_length(text) < MOST_TEXT - 10; n--)
        text = text_behind(text, pick(3) ? pick(2) : pick(SYMBOLS));
    return w.texts[pick(TEXTS)] = text;
}

/* Returns a text that usually begins like those that sequences or prefixes have. */
int any_text(void) {
    int text = pick(4) ? w.texts[pick(TEXTS)] : w.o.sequences[pick(SLOTS)].text;
    const prefix *p = &w.o.prefixes[pick(PREFIXES)];
    if (!text || !pick(12)) text = new_text();
    if (!pick(4) && !w.o.crowded && p->num_blocks) text = p->blocks[pick(p->num_blocks)].node;
    if (!pick(3) && !w.o.crowded && p->num_states) text = p->states[pick(p->num_states)].node;
    if (pick(3) == 0) text = text_begin(text, pick(text_length(text) + 1));
    for (int n = pick(3) ? 0 : pick(4); n > 0 && text_length(text) < MOST_TEXT - 10; n--)
        text = text_behind(text, pick(3) ? pick(2) : pick(SYMBOLS));
    return text;
}

static int draw_prefix(call *c) {
    for (int i = 0; i < 6; i++) {
        c->prefix = pick(PREFIXES);
        if (w.o.prefixes[c->prefix].is_there) return 1;
    }
    return 0;
}

int draw_text(call *c) {
    if (!draw_prefix(c)) return 0;
    c->text = any_text();
    if (me->is_within && me->call->text && pick(2)) { /* that a call on the way is about */
        c->prefix = me->call->prefix;
        c->text = text_begin(me->call->text, 1 + pick(text_length(me->call->text)));
    }
    return 1;
}

static const kvc_tokens *give(int text, text_tokens *out) { return tokens_of(text, (int64_t)pick(1 << 20), out); }

/* The oracle has no room for many more blocks of the prefix. */
static int is_crammed(const call *c) { return w.o.prefixes[c->prefix].num_blocks > BLOCKS / 2; }

/* ---- acquiring --------------------------------------------------------------------------------------------------- */

int draw_acquire(call *c) {
    if (!draw_text(c) || is_crammed(c)) return 0;
    if (pick(3) && text_length(c->text) < MOST_TEXT - 10) c->text = text_behind(c->text, pick(2)); /* is not matched */
    for (c->to = ACQUIRED; c->to < SLOTS; c->to++)
        if (c->to % w.num_clients == me->number && !w.o.sequences[c->to].prefix &&
            !holds_any(&w.o, &w.o.sequences[c->to]) && !is_busy(&w.o, c->to))
            break;
    c->delta = pick(4) ? -1 : pick(text_length(c->text) + 2);
    return c->to < SLOTS;
}

static int64_t reused_by(int p) {
    kvc_prefix_stats stats;
    kvc_prefix_get_stats(w.prefixes[p], &stats, sizeof stats);
    return stats.reused;
}

void run_acquire(call *c) {
    text_tokens tokens;
    int32_t matched = -1;
    const int64_t reused = reused_by(c->prefix);
    const kvc_tokens *given = give(c->text, &tokens);
    c->end = given->digests ? 8 + KVC_NAME_BYTES : 8; /* bytes of a token */
    c->status = kvc_prefix_acquire(w.prefixes[c->prefix], given, c->delta, &c->id, &matched);
    drive.arm(0);
    if (c->status) return;
    c->result = matched;
    c->more = w.o.crowded ? 0 : reused_by(c->prefix) - reused;
    if (!w.o.crowded && c->id <= w.last_id) wrong("%lld is no new id", (long long)c->id);
    w.ids[c->to] = w.last_id = c->id;
    for (int l = 0; l < w.o.num_layers; l++)
        if (is_own(&w.o, l)) read_tags(w.cache, c->id, l, c->tags[l]);
}

static int checkpoints[1 << 16]; /* when the call ended that kept a state, by the time when it began */

/* The state of an acquired sequence: none, or that behind its match, computed since it was forgotten. */
static void check_state(const prefix *p, const sequence *s, const uint8_t *state, int64_t size) {
    int32_t text, time;
    for (int i = 8; i < size; i++)
        if (state[i] != state[i % 4]) wrong("a state has changed at %d", i);
    const int right = s->state && p->config.state_bytes ? state_size(s->state) : 0;
    if (size != right) wrong("a state of %d bytes, not %d", (int)size, right);
    if (!size) return;
    memcpy(&text, state, 4);
    memcpy(&time, state + 4, 4);
    if (text != s->state) wrong("the state of %s stands behind %s", spell(text), spell(s->state));
    if (forgotten_at(p, text, w.o.crowded ? checkpoints[time & 0xffff] : time, s->date))
        wrong("the state of %s was forgotten", spell(text));
}

int draw_state(call *c) {
    c->s = ACQUIRED + pick(SLOTS - ACQUIRED);
    const sequence *s = &w.o.sequences[c->s];
    if (!s->prefix || s->state < 0 || s->is_open || c->s % w.num_clients != me->number || is_busy(&w.o, c->s)) return 0;
    c->prefix = s->prefix - 1;
    c->text = s->prompt;
    return 1;
}

void run_state(call *c) {
    uint8_t *state = watched_state();
    int64_t size = -1, again = -1;
    const sequence s = w.o.sequences[c->s];
    kvc_prefix *p = w.prefixes[c->prefix];
    c->status = kvc_prefix_state(p, w.ids[c->s], NULL, 0, &size);
    if (c->status) return;
    if (size && kvc_prefix_state(p, w.ids[c->s], state, size - 1, &again) != KVC_ERR_INVALID)
        wrong("a state is written where there is no room");
    watch(size > 0);
    const kvc_status status = kvc_prefix_state(p, w.ids[c->s], state, size, &again);
    watch(0);
    if (status || again != size) wrong("a state has another size");
    if (!w.is_wild) check_state(&w.o.prefixes[c->prefix], &s, state, size);
}

/* The tokens to give with a sequence: all, fewer, or more than it holds. */
static int draw_given(call *c) {
    if (!draw_prefix(c)) return 0;
    c->s = own_slot();
    const sequence *s = &w.o.sequences[c->s];
    const int is_fed = text_length(s->text) >= text_length(s->prompt) && s->text;
    if (s->is_open || (w.theme == PROMPTS && !is_fed && pick(5))) return 0;
    if (s->prefix && pick(6)) c->prefix = s->prefix - 1;
    if (!w.o.prefixes[c->prefix].is_there || is_crammed(c)) return 0;
    c->text = s->text;
    if (!pick(5)) c->text = text_begin(c->text, pick(text_length(c->text) + 1));
    for (int n = pick(3) ? 0 : 1 + pick(5); n > 0 && text_length(c->text) < MOST_TEXT; n--)
        c->text = text_behind(c->text, pick(SYMBOLS));
    return holds_any(&w.o, s) || s->prefix;
}

int draw_release(call *c) { return draw_given(c); }

void run_release(call *c) {
    text_tokens tokens;
    c->status = kvc_prefix_release(w.prefixes[c->prefix], w.ids[c->s], give(c->text, &tokens));
}

int draw_checkpoint(call *c) {
    if (!draw_given(c)) return 0;
    if (w.o.prefixes[c->prefix].config.state_bytes && pick(2))
        c->text = text_begin(c->text, pick(text_length(c->text) + 1));
    c->begin = w.o.prefixes[c->prefix].config.state_bytes && c->text && pick(4) ? state_size(c->text) : 0;
    return text_length(c->text) <= MOST_TEXT;
}

void run_checkpoint(call *c) {
    text_tokens tokens;
    uint8_t *state = watched_state();
    const int32_t text = c->text, time = c->began;
    for (int i = 0; i < STATE; i += 4) memcpy(state + i, i == 4 ? &time : &text, 4);
    watch(c->begin > 0);
    c->status = kvc_prefix_checkpoint(w.prefixes[c->prefix], w.ids[c->s], give(c->text, &tokens), state, c->begin);
    watch(0);
    checkpoints[c->began & 0xffff] = w.o.now;
}

/* ---- what is known ----------------------------------------------------------------------------------------------- */

void run_lookup(call *c) {
    text_tokens tokens;
    int32_t matched = -1, with_rows = -1;
    const int counts = pick(2);
    c->status = kvc_prefix_lookup(w.prefixes[c->prefix], give(c->text, &tokens), &matched, counts ? &with_rows : NULL);
    c->result = matched;
    c->more = with_rows;
}

int draw_pin(call *c) {
    if (!draw_text(c)) return 0;
    const prefix *p = &w.o.prefixes[c->prefix];
    int num = 0;
    for (int i = 0; i < p->num_pins; i++) num += p->pins[i].count > 0;
    if (p->num_states && pick(2)) c->text = p->states[pick(p->num_states)].node;
    if (num && !pick(3)) c->text = p->pins[pick(p->num_pins)].node;
    return num < PINS && !w.o.crowded;
}

void run_pin(call *c) {
    text_tokens tokens;
    int32_t kept = -1;
    c->status = kvc_prefix_pin(w.prefixes[c->prefix], give(c->text, &tokens), &kept);
    c->result = kept;
}

int draw_unpin(call *c) {
    if (!draw_text(c)) return 0;
    const prefix *p = &w.o.prefixes[c->prefix];
    if (p->num_pins && pick(5)) c->text = p->pins[pick(p->num_pins)].node;
    return 1;
}

void run_unpin(call *c) {
    text_tokens tokens;
    c->status = kvc_prefix_unpin(w.prefixes[c->prefix], give(c->text, &tokens));
}

int draw_evict(call *c) {
    c->begin = pick(40);
    return draw_prefix(c);
}

void run_evict(call *c) { c->status = kvc_prefix_evict(w.prefixes[c->prefix], c->begin, &c->result); }

int draw_prefix_call(call *c) { return draw_prefix(c); }
void run_prefix_clear(call *c) { c->status = kvc_prefix_clear(w.prefixes[c->prefix]); }

/* ---- the store --------------------------------------------------------------------------------------------------- */

static value *find_value(const uint8_t *name, int adds) {
    for (int i = 0; i < VALUES; i++)
        if ((w.values[i].bytes || w.values[i].forgotten) && !memcmp(w.values[i].name, name, KVC_NAME_BYTES))
            return &w.values[i];
    for (int i = 0; adds && i < VALUES; i++)
        if (!w.values[i].bytes && !w.values[i].forgotten) {
            memcpy(w.values[i].name, name, KVC_NAME_BYTES);
            return &w.values[i];
        }
    return NULL;
}

static kvc_status refuse_value(void) {
    if (!refuse(30)) return KVC_OK;
    kvc_set_last_error("the store is away");
    return KVC_ERR_STORE;
}

/* Whether a forget with names has not been ended.  Until then, a block is written without rows that the store has. */
static int is_forgetting(void) {
    for (int p = 0; p < PREFIXES; p++)
        if (w.departures[p].num_forgets) return 1;
    return 0;
}

/* Calls that come between may know the blocks that a call has fetched until now. */
static void note_reading(void) {
    call *c = me->call;
    if (operations[c->operation].run != run_fetch) return;
    lock_world();
    if (!c->flag) recall(&w.o, c->text);
    c->flag = 1;
    unlock_world();
    if (w.o.crowded) return;
    note_fetched(&w.o, &w.o.prefixes[c->prefix], c->text);
    name_blocks();
}

/* Whether some prefix may keep a block of this name. */
static int is_known_name(const uint8_t *name) {
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < w.o.prefixes[i].num_blocks; j++)
            if (!memcmp(w.o.prefixes[i].blocks[j].name, name, KVC_NAME_BYTES)) return 1;
    return 0;
}

/* A block that is kept as a call asks for its value was computed again, if it was forgotten. */
static void note_known(const uint8_t *name) {
    value *v = w.o.crowded ? NULL : find_value(name, 0);
    if (v && is_known_name(name)) v->forgotten = 0;
}

/* A fetch reads no value that a call was writing as the block was forgotten. */
static void check_readable(const uint8_t *name) {
    if (w.o.crowded || operations[me->call->operation].run != run_fetch) return;
    const value *v = find_value(name, 0);
    if (v && v->bytes && v->forgotten > v->written) wrong("a value of forgotten rows is read");
}

static kvc_status read_value(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    (void)user;
    check_readable(name);
    note_reading();
    note_known(name);
    if (pick(2)) come_between(AT_STORE);
    if (refuse_value()) return KVC_ERR_STORE;
    lock_world();
    const value *v = find_value(name, 0);
    *size = v && v->bytes ? v->size : 0;
    if (*size) memcpy(to, v->bytes, (size_t)(*size < max_bytes ? *size : max_bytes));
    if (*size && !w.o.crowded && operations[me->call->operation].run == run_fetch) w.o.has_fetched = 1;
    unlock_world();
    if (*size && *size <= max_bytes && w.refuses && !pick(60)) {
        ((uint8_t *)to)[pick((int)*size)] ^= 4;
        me->was_refused = 1;
    }
    come_between(AT_STORE);
    return KVC_OK;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *from, int64_t size) {
    (void)user;
    note_known(name);
    come_between(AT_STORE);
    if (refuse_value()) return KVC_ERR_STORE;
    lock_world();
    value *v = find_value(name, 1);
    if (v && v->bytes && v->size > size + (MOST_STATE - LEAST_STATE) && !me->was_refused && !me->call->is_disturbed &&
        !w.o.crowded && !is_forgetting() && v->written != me->call->began && drive.num_faults() == me->before.faults)
        wrong("a value of %d bytes is replaced by one of %d", (int)v->size, (int)size);
    if (v) {
        v->bytes = realloc(v->bytes, (size_t)size);
        memcpy(v->bytes, from, (size_t)size);
        v->size = size;
        v->written = me->call->began;
    }
    unlock_world();
    if (pick(2)) come_between(AT_STORE);
    return KVC_OK;
}

static void drop_value(const uint8_t *name, int time) {
    value *v = find_value(name, 1);
    if (!v) return;
    free(v->bytes);
    v->bytes = NULL;
    if (time) v->forgotten = time;
}

static kvc_status remove_value(void *user, const uint8_t *name) {
    (void)user;
    lock_world();
    drop_value(name, 0);
    unlock_world();
    return KVC_OK;
}

static const kvc_store store = {
    .struct_size = sizeof store, .user = &w, .read = read_value, .write = write_value, .remove = remove_value};

/* A call that writes blocks leaves no value of a text that was forgotten since it began, and not computed again. */
static void check_written(const call *c) {
    for (int i = 0; i < VALUES && !w.o.crowded; i++) {
        const value *v = &w.values[i];
        if (v->bytes && v->written == c->began && v->forgotten > c->began && !is_known_name(v->name))
            wrong("a block that was forgotten meanwhile is in the store");
    }
}

/* Bytes of a layer's rows in a payload. */
static int64_t payload_bytes(int l) {
    const kvc_layer *layer = &w.o.layers[l];
    const size_t value = layer->value_in_key ? 0 : kvc_row_bytes(layer->v_type, layer->v_dim);
    return (int64_t)(kvc_row_bytes(layer->k_type, layer->k_dim) + value) * layer->num_kv_heads *
           (w.o.block_size / stride_of(&w.o, l));
}

/* Notes which blocks of the text the store has, with all rows, and where their states stand. */
static void list_values(call *c) {
    enum { HEADER = 128 };
    text_tokens tokens;
    uint8_t names[NAMES][KVC_NAME_BYTES];
    int64_t num = 0;
    if (kvc_prefix_names(w.prefixes[c->prefix], give(c->text, &tokens), names[0], NAMES, &num)) return;
    for (int i = 0; i < num; i++) {
        const value *v = find_value(names[i], 0);
        const uint8_t *payload = v && v->bytes ? v->bytes + HEADER : NULL;
        int64_t size = HEADER + w.o.num_layers;
        int32_t position = 0;
        c->marks[i] = payload != NULL;
        for (int l = 0; payload && l < w.o.num_layers; l++) {
            if (is_own(&w.o, l)) c->marks[i] &= payload[l] == 1;
            size += payload[l] == 1 ? payload_bytes(l) : 0;
        }
        if (payload && v->size > size) memcpy(&position, v->bytes + size, sizeof position);
        c->positions[i] = position;
    }
}

int draw_fetch(call *c) {
    c->delta = pick(4) ? -1 : pick(MOST_TEXT);
    return draw_text(c) && !is_crammed(c);
}

/* flag: it has begun to read. */
void run_fetch(call *c) {
    text_tokens tokens;
    int32_t num = -1;
    c->flag = 0;
    if (!w.o.crowded) list_values(c);
    c->status = kvc_prefix_fetch(w.prefixes[c->prefix], give(c->text, &tokens), c->delta, &store, &num);
    c->result = num;
    c->more = me->was_refused;
}

void run_store_new(call *c) {
    c->status = kvc_store_new_blocks(w.cache, &store, &c->result);
    lock_world();
    check_written(c);
    unlock_world();
}

/* What is listed is kept, and was not listed before. */
static void check_listed(const kvc_new_block *listed) {
    const prefix *p = listed->user;
    for (int i = 0; i < p->num_blocks; i++) {
        block *b = (block *)&p->blocks[i];
        if (!is_full_block(&w.o, b) || memcmp(b->name, listed->name, KVC_NAME_BYTES)) continue;
        if (listed->begin != b->begin || listed->end != text_length(b->node))
            wrong("a block is listed at %d", listed->begin);
        if (!b->may_new) wrong("%s is listed again", spell(b->node));
        b->sure_new = b->may_new = 0;
        return;
    }
    if (!p->is_there || !p->config.collects_new || !p->config.ttl_ms) wrong("a block of nobody is listed");
}

/* Lists new blocks, and writes some of them. */
void run_take_new(call *c) {
    kvc_new_block blocks[64];
    int64_t num = -1, size = -1;
    const int most = pick(3) ? 64 : 1 + pick(4);
    c->status = kvc_take_new_blocks(w.cache, blocks, sizeof *blocks, most, &num);
    if (c->status) return;
    for (int i = 0; i < num && !w.o.crowded; i++) check_listed(&blocks[i]);
    for (int i = 0; i < PREFIXES && num < most && !w.o.crowded; i++)
        for (int j = 0; j < w.o.prefixes[i].num_blocks; j++) {
            block *b = &w.o.prefixes[i].blocks[j];
            if (w.o.prefixes[i].config.collects_new && b->sure_new && num_whole(&w.o, b))
                wrong("%s is kept, and not listed", spell(b->node));
            b->sure_new = b->may_new = 0;
        }
    c->result = num;
    if (num) c->status = kvc_store_block(w.cache, blocks[pick((int)num)].id, &store, &size);
    lock_world();
    check_written(c);
    unlock_world();
}

/* All blocks were listed, or written. */
kvc_status right_store_new(oracle *o, const call *c) {
    (void)c;
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < o->prefixes[i].num_blocks; j++) o->prefixes[i].blocks[j].sure_new = 0;
    return KVC_OK;
}

/* ---- forgetting -------------------------------------------------------------------------------------------------- */

/* Whether another prefix has blocks of the same names. */
static int has_twin(int p) {
    for (int i = 0; i < PREFIXES; i++)
        if (i != p && w.o.prefixes[i].is_there && w.o.prefixes[i].tenant == w.o.prefixes[p].tenant) return 1;
    return 0;
}

/* Has a value removed as the forget is ended.  If it is not there yet, the call that writes it has to remove it. */
static void leave(call *c, const uint8_t *name, int time) {
    departures *d = &w.departures[c->prefix];
    value *v = find_value(name, 1);
    if (v && time && !v->bytes) v->forgotten = time;
    if (d->num < VALUES)
        memcpy(d->names[d->num++], name, KVC_NAME_BYTES);
    else
        drop_value(name, time);
}

/* Forgets a text.  Its values are removed from the store as the header advises: under the names of the text, and those
 * that the call returns.  Without names, they are removed at once.  more: calls that are to be ended. */
void run_forget(call *c) {
    text_tokens tokens;
    uint8_t names[NAMES][KVC_NAME_BYTES];
    int64_t num = 0, dropped = 0;
    const int most = pick(2) ? 0 : 1 + pick(8), time = me->is_within && !has_twin(c->prefix) ? c->began : 0;
    const kvc_tokens *given = give(c->text, &tokens);
    kvc_prefix *p = w.prefixes[c->prefix];
    c->result = c->more = 0;
    do {
        c->status = kvc_prefix_forget(p, given, most ? names[0] : NULL, most, &num, &dropped);
        if (c->status) return;
        c->result += dropped;
        c->more += most > 0;
        lock_world();
        w.departures[c->prefix].num_forgets += most > 0;
        for (int i = 0; most && i < num; i++) leave(c, names[i], time);
        unlock_world();
    } while (most && num == most);
    if (kvc_prefix_names(p, given, names[0], NAMES, &num)) return;
    lock_world();
    for (int i = 0; i < num && i < NAMES; i++)
        if (most)
            leave(c, names[i], time);
        else
            drop_value(names[i], time);
    unlock_world();
}

int draw_end_forget(call *c) { return draw_prefix(c) && w.departures[c->prefix].num_forgets > 0; }

/* Removes values of a prefix from the store. */
static void remove_all(departures *d) {
    while (d->num) drop_value(d->names[--d->num], 0);
}

void run_end_forget(call *c) {
    departures *d = &w.departures[c->prefix];
    lock_world();
    c->result = d->num_forgets > 0; /* another client may have been here */
    d->num_forgets -= (int)c->result;
    remove_all(d);
    unlock_world();
    c->status = c->result ? kvc_prefix_end_forget(w.prefixes[c->prefix]) : KVC_OK;
}

/* The names of blocks are those of their text and tenant, and of no other. */
void run_names(call *c) {
    text_tokens tokens;
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num = -1, again = -1;
    kvc_prefix *p = w.prefixes[c->prefix];
    c->status = kvc_prefix_names(p, give(c->text, &tokens), names[0], MOST_TEXT, &num);
    if (c->status) return;
    if (num != text_length(c->text) / w.o.block_size) wrong("%s has %d names", spell(c->text), (int)num);
    if (kvc_prefix_names(p, give(c->text, &tokens), NULL, 0, &again) || again != num)
        wrong("names are counted otherwise");
    for (int i = 0; i < PREFIXES && !w.o.crowded; i++)
        for (int j = 0; j < w.o.prefixes[i].num_blocks; j++) {
            const block *b = &w.o.prefixes[i].blocks[j];
            const int is_same = w.o.prefixes[i].tenant == w.o.prefixes[c->prefix].tenant &&
                                w.o.prefixes[i].config.state_bytes == w.o.prefixes[c->prefix].config.state_bytes;
            for (int k = 0; k < num && is_full_block(&w.o, b); k++)
                if (!memcmp(b->name, names[k], KVC_NAME_BYTES) !=
                    (is_same && b->node == text_begin(c->text, (k + 1) * w.o.block_size)))
                    wrong("%s and %s: names", spell(b->node), spell(text_begin(c->text, (k + 1) * w.o.block_size)));
        }
}

/* ---- prefixes that come and go, and time ------------------------------------------------------------------------- */

int draw_prefix_new(call *c) {
    c->prefix = pick(PREFIXES);
    return !w.o.prefixes[c->prefix].is_there && w.prefixes[0] && w.num_clients == 1;
}

void run_prefix_new(call *c) { make_prefix(c); }

/* Frees a prefix: its sequences go on as any others. */
int draw_prefix_free(call *c) { return draw_prefix(c) && c->prefix && w.num_clients == 1; }

void run_prefix_free(call *c) {
    remove_all(&w.departures[c->prefix]);
    w.departures[c->prefix].num_forgets = 0;
    kvc_prefix_free(w.prefixes[c->prefix]);
    w.prefixes[c->prefix] = NULL;
    c->status = KVC_OK;
}

kvc_status right_prefix_free(oracle *o, const call *c) {
    for (int s = 0; s < SLOTS; s++)
        if (o->sequences[s].prefix == 1 + c->prefix) {
            o->sequences[s].prefix = o->sequences[s].keeps = 0;
            if (!holds_any(o, &o->sequences[s]) && !is_busy(o, s)) o->sequences[s] = (sequence){.exact_to = INT32_MAX};
        }
    o->prefixes[c->prefix] = (prefix){0};
    return KVC_OK;
}

kvc_status right_always(oracle *o, const call *c) {
    (void)o, (void)c;
    return KVC_OK;
}

/* Time passes; now and then an acquired sequence ends before any other call. */
int draw_wait(call *c) {
    static const int ms[] = {100, 300, 700, 1300, 2600};
    c->s = ACQUIRED + pick(SLOTS - ACQUIRED);
    c->flag = w.o.sequences[c->s].prefix && !is_busy(&w.o, c->s) && pick(2);
    return c->delta = ms[pick(5)];
}

void run_wait(call *c) {
    w.o.ms += c->delta;
    c->status = c->flag ? kvc_clear_sequence(w.cache, w.ids[c->s]) : KVC_OK;
}

kvc_status right_wait(oracle *o, const call *c) {
    note_time(o);
    if (c->flag && is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (c->flag) end_sequence(o, &o->sequences[c->s]);
    return KVC_OK;
}
