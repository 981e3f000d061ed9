/* edits.c: edits of sequences, and what else is done to prefixes and caches. */
#include "known.h"

/* ---- sequences */

void clear_sequence(world *w, sequence *s) {
    trace(w, "clear of sequence %d", (int)s->id);
    w->call = "kvc_clear_sequence";
    note_end(w, s);
    must(w, kvc_clear_sequence(w->caches[s->cache], s->id));
    s->is_there = 0;
}

void do_clear_sequence(world *w) {
    sequence *s = any_sequence(w, -1);
    if (s) clear_sequence(w, s);
}

/* Notes that a sequence lost its tokens from `length` on. */
static void note_cut(world *w, sequence *s, int length) {
    if (!length) note_end(w, s);
    s->node = text_begin(s->node, length);
    if (length <= s->exact) s->exact = INT32_MAX;
    s->keeps = 0, s->state = -1;
    for (int l = 0; l < MOST_LAYERS; l++) s->had[l] &= ((uint64_t)1 << length) - 1;
    if (!length) s->is_there = 0;
}

void do_truncate(world *w) {
    sequence *s = any_sequence(w, -1);
    if (!s || s->is_loose || s->has_gaps) return;
    const int old = text_length(s->node), length = pick(w, 3) ? pick(w, old + 1) : old + pick(w, 3);
    const int may_be_gone = w->shape.has_windows && !kvc_can_resume(w->caches[s->cache], s->id, length);
    w->call = "kvc_truncate";
    kvc_status status;
    CALL(w, status, kvc_truncate(w->caches[s->cache], s->id, length));
    trace(w, "truncate of sequence %d, %s, to %d: %d", (int)s->id, spell(s->node), length, status);
    if (status == KVC_ERR_GONE && may_be_gone && length < old) return;
    must(w, status);
    if (length < old) note_cut(w, s, length);
    if (s->is_there) check_sequence(w, s);
}

void do_fork(world *w) {
    sequence *s = any_sequence(w, -1);
    if (!s || s->is_loose || !text_length(s->node)) return;
    const sequence source = *s;
    const int old = text_length(s->node), length = s->has_gaps || pick(w, 2) ? old : 1 + pick(w, old);
    sequence *t = new_sequence(w, s->cache);
    if (!s->is_there || s == t) { /* it made room */
        t->is_there = 0;
        return;
    }
    const int may_be_gone = !kvc_can_resume(w->caches[s->cache], s->id, length);
    w->call = "kvc_copy_prefix";
    kvc_status status;
    CALL(w, status,
         length == old ? kvc_fork(w->caches[s->cache], s->id, t->id)
                       : kvc_copy_prefix(w->caches[s->cache], s->id, t->id, length));
    trace(w, "fork of sequence %d, %s, up to %d to %d: %d", (int)s->id, spell(s->node), length, (int)t->id, status);
    if (status == KVC_ERR_GONE && may_be_gone && length < old) {
        t->is_there = 0;
        return;
    }
    must(w, status);
    t->model = source.model;
    for (int i = 0; i < PREFIXES; i++) t->barred[i] = source.barred[i] ? source.barred[i] : source.copies_barred[i];

    t->node = text_begin(source.node, length);
    t->has_gaps = source.has_gaps;
    t->exact = length <= source.exact && length < old ? INT32_MAX : source.exact;
    if (source.exact >= length) t->exact = INT32_MAX;
    check_sequence(w, t);
    check_sequence(w, s);
}

void do_remove(world *w) {
    sequence *s = any_sequence(w, -1);
    if (!s || s->is_loose) return;
    const int old = text_length(s->node);
    if (old < 3) return;
    int begin = pick(w, old - 1), end = begin + 1 + pick(w, old - 1 - begin); /* at least one token is behind */
    const int unit = w->shape.unit, cuts = pick(w, 4) == 0 && (begin % unit || end % unit);
    if (!cuts) begin -= begin % unit, end -= end % unit;
    w->call = "kvc_remove";
    kvc_status status;
    CALL(w, status, kvc_remove(w->caches[s->cache], s->id, begin, end, 1));
    if (cuts && status != KVC_ERR_UNSUPPORTED) fail(w, "[%d, %d) of sequence %d is removed", begin, end, (int)s->id);
    if (cuts || begin == end) return;
    must(w, status);
    trace(w, "remove of [%d, %d) of sequence %d, %s", begin, end, (int)s->id, spell(s->node));
    int node = text_begin(s->node, begin);
    for (int i = end; i < old; i++) node = text_behind(node, text_symbol(text_begin(s->node, i + 1)));
    s->node = node, s->exact = least(s->exact, begin), s->keeps = 0, s->state = -1;
    s->is_other |= begin == 0;
    for (int l = 0; l < MOST_LAYERS; l++) s->had[l] &= ((uint64_t)1 << begin) - 1;
    s->is_loose = w->shape.has_windows; /* what has expired moves along */
    check_sequence(w, s);
}

/* Lists the positions of some tokens of a sequence, of which the last has a row.  Returns their number. */
static int list_some(world *w, const sequence *s, uint64_t rows, int32_t *positions) {
    const int length = text_length(s->node), begin = pick(w, length + 1), often = 2 + pick(w, 8);
    int num = 0;
    for (int i = 0; i < length; i++)
        if (i < begin || pick(w, often)) positions[num++] = i;
    if (pick(w, 4) == 0) num = least(num, begin); /* the rest is cut off */
    while (num && !(rows >> positions[num - 1] & 1)) num--;
    return num;
}

void do_keep(world *w) {
    sequence *s = any_sequence(w, -1);
    uint64_t rows[MOST_LAYERS], dropped = 0;
    int32_t positions[MOST_TEXT];
    if (!s || s->is_loose) return;
    rows_of(w, s, rows);
    for (int l = 0; l < w->shape.num_layers; l++) dropped |= rows[l];
    const int old = text_length(s->node), num = list_some(w, s, dropped, positions);
    const int length = num ? positions[num - 1] + 1 : 0;
    const int may_be_gone = w->shape.has_windows && !kvc_can_resume(w->caches[s->cache], s->id, length);
    for (int i = 0; i < num; i++) dropped &= ~((uint64_t)1 << positions[i]);
    w->call = "kvc_keep_positions";
    kvc_status status;
    CALL(w, status, kvc_keep_positions(w->caches[s->cache], s->id, positions, num));
    trace(w, "keep of %d tokens up to %d of sequence %d, %s: %d", num, length, (int)s->id, spell(s->node), status);
    if (status == KVC_ERR_GONE && may_be_gone && length < old) return;
    must(w, status);
    int first = 0; /* dropped */
    while (first < length && !(dropped >> first & 1)) first++;
    if (length < old) note_cut(w, s, length);
    if (first < length) {
        s->exact = least(s->exact, first), s->has_gaps = 1, s->keeps = 0, s->state = -1;
        s->is_other |= first == 0;
        for (int l = 0; l < MOST_LAYERS; l++) s->had[l] &= ((uint64_t)1 << first) - 1;
    }
    if (s->is_there) check_sequence(w, s);
}

/* Makes rows of a sequence inexact: they are replaced, or only said to be. */
void do_inject(world *w) {
    sequence *s = any_sequence(w, -1);
    const float zeros[MOST_HEADS][DIM] = {{0}};
    uint64_t rows[MOST_LAYERS];
    if (!s || s->is_loose || !text_length(s->node)) return;
    const int at = pick(w, text_length(s->node)), l = pick(w, w->shape.num_layers);
    rows_of(w, s, rows);
    if (pick(w, 2) || !(rows[l] >> at & 1)) {
        w->call = "kvc_mark_inexact";
        must(w, kvc_mark_inexact(w->caches[s->cache], s->id, at));
    } else {
        const kvc_rows_in in = {.struct_size = sizeof in,
                                .k = zeros,
                                .v = has_values(&w->shape, l) ? zeros : NULL,
                                .k_head_stride = sizeof zeros[0],
                                .k_row_stride = sizeof zeros[0],
                                .v_head_stride = sizeof zeros[0],
                                .v_row_stride = sizeof zeros[0]};
        w->call = "kvc_inject";
        kvc_status status;
        CALL(w, status, kvc_inject(w->caches[s->cache], s->id, l, at, at + 1, &in));
        notice_evictions(w, s->cache, s->prefix ? 1u << (s->prefix - 1) : 0);
        if (status == KVC_ERR_FULL && w->shape.is_limited) return;
        must(w, status);
    }
    trace(w, "sequence %d, %s, is not exact from %d on", (int)s->id, spell(s->node), at);
    s->exact = least(s->exact, at);
    s->keeps = least(s->keeps, 1);
    s->is_other |= at == 0;
    check_sequence(w, s);
}

/* ---- prefixes */

static pin *find_pin(prefix *p, int node) {
    for (int i = 0; i < p->num_pins; i++)
        if (p->pins[i].node == node) return &p->pins[i];
    return NULL;
}

void do_pin(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = p->num_pins && pick(w, 3) == 0 ? p->pins[pick(w, p->num_pins)].node : any_text(w);
    if (p->num_pins == PINS && !find_pin(p, node)) return;
    const int matched = check_lookup(w, p, node);
    text_tokens tokens;
    int32_t pinned = -1;
    w->call = "kvc_prefix_pin";
    kvc_status status;
    CALL(w, status, kvc_prefix_pin(p->handle, tokens_of(node, &tokens), &pinned));
    if (is_full(w, status)) return;
    must(w, status);
    if (pinned) check_limit(w, p->cache);
    trace(w, "pin of prefix %d: %s: %d tokens", (int)(p - w->prefixes), spell(node), pinned);
    if (pinned != matched)
        fail(w, "prefix %d: %d tokens of %s are pinned, but %d are known", (int)(p - w->prefixes), pinned, spell(node),
             matched);
    notice_evictions(w, p->cache, bit_of(w, p));
    if (!pinned) return;
    if (!find_pin(p, node)) p->pins[p->num_pins++] = (pin){.node = node};
    pin *it = find_pin(p, node);
    it->count++, it->kept = it->kept > pinned ? it->kept : pinned;
    if (it->kept == pinned) it->has_full = 0;
    learn(w, p, node, pinned);
}

void do_unpin(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = p->num_pins && pick(w, 6) ? p->pins[pick(w, p->num_pins)].node : any_text(w);
    text_tokens tokens;
    w->call = "kvc_prefix_unpin";
    must(w, kvc_prefix_unpin(p->handle, tokens_of(node, &tokens)));
    trace(w, "unpin of prefix %d: %s", (int)(p - w->prefixes), spell(node));
    pin *it = find_pin(p, node);
    if (it && !--it->count) *it = p->pins[--p->num_pins];
    note_time(w, p);
    notice_evictions(w, p->cache, bit_of(w, p));
}

/* The name of a dropped block: a block that may be there, and has a token of the text, or follows it. */
static void check_forgotten(world *w, const prefix *p, int node, const uint8_t *name) {
    for (int i = 0; i < p->num_blocks; i++) {
        const kept *b = &p->blocks[i];
        if (!memcmp(b->name, name, KVC_NAME_BYTES) && text_common(node, b->node) > last_kept(w, b, node)) return;
    }
    if (!p->config.ttl_ms) fail(w, "forgetting %s names a block of another text", spell(node));
}

void do_forget(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = any_text(w);
    text_tokens tokens;
    int64_t dropped = 0, fewest, most, num = 0, part = -1;
    const int most_names = pick(w, 2) ? 0 : 1 + pick(w, 4);
    uint8_t names[4][KVC_NAME_BYTES];
    do {
        w->call = "kvc_prefix_forget";
        kvc_status status;
        CALL(w, status,
             kvc_prefix_forget(p->handle, tokens_of(node, &tokens), most_names ? names[0] : NULL, most_names, &num,
                               &part));
        must(w, status);
        dropped += part;
        for (int i = 0; most_names && i < num; i++) check_forgotten(w, p, node, names[i]);
    } while (most_names && num == most_names);
    trace(w, "forget by prefix %d: %s: %d tokens", (int)(p - w->prefixes), spell(node), (int)dropped);
    note_forgotten(w, p, node, &fewest, &most);
    if (dropped < fewest || (dropped > most && !p->config.ttl_ms))
        fail(w, "prefix %d: %d tokens of %s are forgotten, not %d to %d", (int)(p - w->prefixes), (int)dropped,
             spell(node), (int)fewest, (int)most);
    check_lookup(w, p, node);
    notice_evictions(w, p->cache, bit_of(w, p));
}

void do_evict(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int wanted = pick(w, 40);
    int64_t dropped = -1, most = 0, fewest = 0;
    for (int i = 0; i < p->num_blocks; i++) {
        const kept *b = &p->blocks[i];
        most += b->end - b->begin;
        if (b->is_sure && !is_pinned(w, p, b, 0)) fewest = 1; /* there is one to drop, or one behind it */
    }
    w->call = "kvc_prefix_evict";
    kvc_status status;
    CALL(w, status, kvc_prefix_evict(p->handle, wanted, &dropped));
    must(w, status);
    trace(w, "evict by prefix %d: %d of %d tokens", (int)(p - w->prefixes), (int)dropped, wanted);
    if (dropped < 0 || (dropped > most && !p->config.ttl_ms) || (!dropped && wanted && fewest && !p->num_pins))
        fail(w, "prefix %d: %d tokens are evicted, of %d", (int)(p - w->prefixes), (int)dropped, (int)most);
    note_evict(w, p, wanted, dropped);
    notice_evictions(w, p->cache, bit_of(w, p));
}

void do_clear(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    w->call = "kvc_prefix_clear";
    must(w, kvc_prefix_clear(p->handle));
    trace(w, "clear of prefix %d", (int)(p - w->prefixes));
    note_cleared(p);
    for (int i = 0; i < SEQUENCES; i++) /* the header leaves open which later blocks of these are kept by commits */
        if (w->sequences[i].prefix == 1 + (int)(p - w->prefixes))
            w->sequences[i].keeps = least(w->sequences[i].keeps, 1);
}

void do_prefix(world *w) {
    prefix *p = &w->prefixes[pick(w, PREFIXES)];
    const int cache = w->caches[1] && pick(w, 2);
    if (p->handle && pick(w, 3)) return;
    free_prefix(w, p);
    make_prefix(w, p, cache);
}

/* ---- caches, time and texts */

/* All sequences end, or all but one, and what prefixes keep. */
void do_clear_cache(world *w) {
    const int cache = w->caches[1] && pick(w, 2);
    const sequence *left = pick(w, 2) ? any_sequence(w, cache) : NULL;
    w->call = left ? "kvc_keep" : "kvc_clear";
    must(w, left ? kvc_keep(w->caches[cache], left->id) : kvc_clear(w->caches[cache]));
    trace(w, "clear of cache %d, but for sequence %d", cache, left ? (int)left->id : -1);
    for (int i = 0; i < SEQUENCES; i++)
        if (w->sequences[i].cache == cache && &w->sequences[i] != left) w->sequences[i].is_there = 0;
    for (int i = 0; i < PREFIXES; i++)
        if (w->prefixes[i].handle && w->prefixes[i].cache == cache) note_cleared(&w->prefixes[i]);
    for (int i = 0; i < SEQUENCES; i++)
        if (w->sequences[i].cache == cache) w->sequences[i].keeps = least(w->sequences[i].keeps, 1);
}

void do_wait(world *w) {
    static const int ms[] = {100, 300, 300, 700, 1300, 2600};
    w->ms += ms[pick(w, 6)];
    trace(w, "the time is %d ms", (int)w->ms);
    for (int i = 0; i < PREFIXES; i++)
        if (w->prefixes[i].handle) note_time(w, &w->prefixes[i]);
    sequence *s = pick(w, 3) == 0 ? any_sequence(w, -1) : NULL; /* before any other call */
    if (s) clear_sequence(w, s);
}

/* Makes another cache: a clone of the first one with its sequences, or an empty one. */
void do_clone(world *w) {
    free_cache(w, 1);
    if (pick(w, 3) == 0) return;
    w->call = "kvc_cache_clone";
    const int is_clone = pick(w, 2);
    trace(w, "another cache: %s", is_clone ? "a clone" : "an empty one");
    kvc_status status;
    kvc_cache *other = NULL;
    CALL(w, status, is_clone ? kvc_cache_clone(w->caches[0], &other) : kvc_cache_new(&w->shape.config, &other));
    must(w, status);
    w->caches[1] = other;
    kvc_get_stats(w->caches[1], &w->stats[1], sizeof w->stats[1]);
    w->last_id[1] = -1;
    for (int i = 0, j = 0; is_clone && i < SEQUENCES; i++) {
        const sequence *s = &w->sequences[i];
        if (!s->is_there || s->cache || !s->node) continue; /* an empty one is not there */
        while (j < SEQUENCES && w->sequences[j].is_there) j++;
        if (j == SEQUENCES) {
            must(w, kvc_clear_sequence(w->caches[1], s->id));
            continue;
        }
        w->sequences[j] = *s;
        memset(w->sequences[j].barred, 0, sizeof w->sequences[j].barred);
        w->sequences[j].cache = 1, w->sequences[j].prefix = w->sequences[j].keeps = w->sequences[j].state = 0;
        check_sequence(w, &w->sequences[j]);
    }
    free_prefix(w, &w->prefixes[PREFIXES - 1]);
    make_prefix(w, &w->prefixes[PREFIXES - 1], 1);
}

void do_new_text(world *w) {
    const int other = w->texts[pick(w, TEXTS)], most = text_length(other);
    int node = pick(w, 3) ? text_begin(other, pick(w, most + 1)) : 0;
    const int num_symbols = pick(w, 2) ? 3 : SYMBOLS;
    for (int n = 1 + pick(w, pick(w, 2) ? 12 : 40); n && text_length(node) < MOST_TEXT - 8; n--)
        node = text_behind(node, pick(w, num_symbols));
    w->texts[pick(w, TEXTS)] = node;
    for (int i = 0; i < TEXTS; i++)
        if (!w->texts[i]) w->texts[i] = node;
}
