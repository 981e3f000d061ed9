/* selected.c: tokens that select rows (kvc_plan_args.select_rows): no prefix keeps them, nor what follows them.
 *
 * Texts are longer here than elsewhere, because only tokens of long sequences select.  Each has the tokens of a trunk,
 * then of another trunk.  The rows of a layer follow from the text up to their token.  In the second layer they are
 * others if the token, or one before it, has selected rows in the first. */
#include <math.h>

#include "known.h"

enum { MOST_TOKENS = 128, TRUNKS = 3, LONG_TEXTS = 8, OPEN = 4, MOST_KEPT = 600, LAYERS = 2, KEY = 32 };

typedef struct long_text {
    int64_t ids[MOST_TOKENS];
    uint64_t hashes[MOST_TOKENS]; /* of the tokens up to each */
    int num;
} long_text;

/* A sequence, which has the first `length` tokens of a text.  Its rows from position `exact` on do not follow from
 * these tokens. */
typedef struct open_text {
    int64_t id;
    int is_there, text, length, exact;
    int keeps; /* 2: commits keep its blocks.  1: commits may keep them.  0: it was cut, or not acquired */
} open_text;

/* The first tokens of a text, which the prefix keeps: surely, or maybe. */
typedef struct kept_text {
    int text, sure, may;
} kept_text;

typedef struct play {
    world *w;
    kvc_cache *cache;
    kvc_prefix *prefix;
    int block, num_kept;
    long_text texts[LONG_TEXTS];
    open_text open[OPEN];
    kept_text kept[MOST_KEPT];
} play;

static kvc_tokens tokens_up_to(const long_text *t, int num) {
    return (kvc_tokens){sizeof(kvc_tokens), t->ids, num, NULL};
}

static void make_texts(play *p) {
    int64_t trunks[TRUNKS][MOST_TOKENS];
    for (int i = 0; i < TRUNKS; i++)
        for (int at = 0; at < MOST_TOKENS; at++) trunks[i][at] = pick(p->w, 5);
    for (int i = 0; i < LONG_TEXTS; i++) {
        long_text *t = &p->texts[i];
        const int first = pick(p->w, TRUNKS), then = pick(p->w, TRUNKS), cut = pick(p->w, MOST_TOKENS);
        uint64_t hash = 1;
        t->num = 90 + pick(p->w, MOST_TOKENS - 89);
        for (int at = 0; at < t->num; at++) {
            t->ids[at] = trunks[at < cut ? first : then][at];
            hash = (hash ^ (uint64_t)t->ids[at]) * 0x9e3779b97f4a7c15;
            t->hashes[at] = hash ^= hash >> 29;
        }
    }
}

static int common(const play *p, int a, int b) {
    const long_text *x = &p->texts[a], *y = &p->texts[b];
    int n = 0;
    while (n < x->num && n < y->num && x->hashes[n] == y->hashes[n]) n++;
    return n;
}

/* Element d of a row in a layer; is_changed: its token, or one before it, has selected. */
static float row_element(const play *p, const open_text *s, int layer, int at, int d, int is_changed) {
    const uint64_t hash = p->texts[s->text].hashes[at] + (uint64_t)(layer * 64 + d) + (layer && is_changed ? 1000 : 0);
    return (float)(hash * 0xd1342543de82ef95 >> 52) - 2048;
}

/* ---- known tokens ------------------------------------------------------------------------------------------------ */

static void keep(play *p, int text, int sure, int may) {
    if (p->num_kept == MOST_KEPT) fail(p->w, "too much is kept");
    p->kept[p->num_kept++] = (kept_text){text, sure, may};
}

static void check_texts(play *p) {
    for (int i = 0; i < LONG_TEXTS; i++) {
        const kvc_tokens tokens = tokens_up_to(&p->texts[i], p->texts[i].num);
        int sure = 0, may = 0;
        int32_t matched = -1, with_rows = -1;
        for (int j = 0; j < p->num_kept; j++) {
            const kept_text *k = &p->kept[j];
            const int n = common(p, i, k->text);
            sure = least(n, k->sure) > sure ? least(n, k->sure) : sure;
            may = least(n, k->may) > may ? least(n, k->may) : may;
        }
        must(p->w, kvc_prefix_lookup(p->prefix, &tokens, &matched, &with_rows));
        if (matched < sure || matched > may)
            fail(p->w, "text %d: %d of %d tokens are known, but %d to %d are exact", i, matched, p->texts[i].num, sure,
                 may);
    }
}

/* Compares the rows of the exact tokens of a sequence. */
static void check_open(play *p, const open_text *s) {
    static float k[MOST_TOKENS][KEY], v[MOST_TOKENS][KEY];
    const int n = least(s->length, s->exact);
    if (kvc_next_position(p->cache, s->id) != s->length) fail(p->w, "a sequence does not go on at %d", s->length);
    if (kvc_exact_to(p->cache, s->id) != s->exact)
        fail(p->w, "a sequence is exact to %d, not to %d", kvc_exact_to(p->cache, s->id), s->exact);
    for (int l = 0; l < LAYERS && n; l++) {
        const kvc_rows_out out = {
            .struct_size = sizeof out, .k = k, .v = v, .k_row_stride = sizeof *k, .v_row_stride = sizeof *v};
        must(p->w, kvc_extract(p->cache, s->id, l, 0, n, &out));
        for (int at = 0; at < n; at++)
            for (int d = 0; d < KEY; d++)
                if (k[at][d] != row_element(p, s, l, at, d, 0))
                    fail(p->w, "layer %d, %d: a row of another text", l, at);
    }
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static open_text *any_open(play *p) {
    open_text *s = &p->open[pick(p->w, OPEN)];
    return s->is_there ? s : NULL;
}

static void begin_text(play *p) {
    open_text *s = &p->open[pick(p->w, OPEN)];
    const int text = pick(p->w, LONG_TEXTS);
    const kvc_tokens tokens = tokens_up_to(&p->texts[text], p->texts[text].num);
    int32_t matched, known;
    if (s->is_there) return;
    p->w->call = "kvc_prefix_acquire";
    must(p->w, kvc_prefix_lookup(p->prefix, &tokens, &known, NULL));
    must(p->w, kvc_prefix_acquire(p->prefix, &tokens, -1, &s->id, &matched));
    trace(p->w, "%lld: text %d, %d matched", (long long)s->id, text, matched);
    if (matched != least(known, tokens.num_tokens - 1)) fail(p->w, "%d match, of %d known", matched, known);
    *s = (open_text){s->id, 1, text, matched, INT32_MAX, 2};
}

/* Puts the rows of a layer. */
static void put(play *p, const open_text *s, kvc_batch *batch, int layer, int n, int first_changed) {
    static float k[MOST_TOKENS][KEY], v[MOST_TOKENS][KEY];
    for (int t = 0; t < n; t++)
        for (int d = 0; d < KEY; d++)
            k[t][d] = v[t][d] = row_element(p, s, layer, s->length + t, d, s->length + t >= first_changed);
    const kvc_put_args args = {.struct_size = sizeof args,
                               .num_tokens = n,
                               .k = k,
                               .v = v,
                               .k_token_stride = sizeof *k,
                               .v_token_stride = sizeof *v};
    must(p->w, kvc_put(batch, layer, &args));
}

/* Lets the last `num` of n tokens select, in the first layer, by a call or by tasks.  Returns the position from which
 * on rows are not exact; INT32_MAX: all are. */
static int let_select(play *p, const open_text *s, kvc_batch *batch, int n, int num, int rows) {
    static float q[MOST_TOKENS][KEY], out[MOST_TOKENS][KEY];
    const kvc_plan_args plan_args = {
        .struct_size = sizeof plan_args, .first = n - num, .num_tokens = num, .num_heads = 1, .select_rows = rows};
    const kvc_attend_args args = {
        .struct_size = sizeof args, .q = q, .out = out, .q_token_stride = sizeof *q, .out_token_stride = sizeof *out};
    kvc_plan *plan;
    const int limit = 80 + 2 * rows, before = kvc_exact_to(p->cache, s->id);
    const int selects = num <= 8 && s->length + n > limit;
    int first = s->length + n - num; /* that sees enough */
    while (first < limit) first++;
    p->w->call = "kvc_attend";
    if (pick(p->w, 2)) {
        must(p->w, kvc_attend(batch, &plan_args, &args));
    } else {
        must(p->w, kvc_plan_new(batch, &plan_args, &plan));
        for (int64_t i = kvc_plan_num_tasks(plan); i-- > 0;) must(p->w, kvc_plan_run(plan, 0, &args, i));
        kvc_plan_free(plan);
    }
    const int exact = kvc_exact_to(p->cache, s->id);
    trace(p->w, "%lld: %d of %d tokens behind %d select %d rows: exact to %d", (long long)s->id, num, n, s->length,
          rows, exact);
    if (selects ? exact > least(before, first) || exact < least(before, s->length + n - num) : exact != before)
        fail(p->w, "exact to %d, and to %d before tokens from %d on selected", exact, before, first);
    return exact < before ? exact : INT32_MAX;
}

/* Feeds a sequence n tokens, some of which may select; keeps the first ones, or none. */
static void feed_some(play *p, open_text *s) {
    const long_text *t = &p->texts[s->text];
    int64_t ids[MOST_TOKENS];
    int32_t kept[MOST_TOKENS];
    kvc_batch *batch;
    const int left = t->num - s->length, n = least(left, 1 + pick(p->w, pick(p->w, 2) ? 9 : MOST_TOKENS));
    if (!n) return;
    for (int i = 0; i < n; i++) ids[i] = s->id, kept[i] = i;
    p->w->call = "kvc_begin";
    must(p->w, kvc_begin(p->cache, n, NULL, ids, NULL, &batch));
    put(p, s, batch, 0, n, INT32_MAX);
    const int num = 1 + pick(p->w, n < 10 ? n : 10);
    const int selected = pick(p->w, 3) ? let_select(p, s, batch, n, least(num, n), 1 + pick(p->w, 12)) : INT32_MAX;
    put(p, s, batch, 1, n, least(selected, s->exact));
    const int num_kept = pick(p->w, 4) ? n : pick(p->w, n + 1);
    if (!pick(p->w, 8)) {
        p->w->call = "kvc_abort";
        kvc_abort(batch);
        return;
    }
    p->w->call = "kvc_commit_kept";
    must(p->w, kvc_commit_kept(batch, kept, num_kept));
    s->length += num_kept;
    if (selected < s->length) s->exact = least(s->exact, selected);
    const int full = least(s->length, s->exact) / p->block * p->block;
    if (num_kept < n || s->exact < INT32_MAX) s->keeps = least(s->keeps, 1);
    if (s->keeps) keep(p, s->text, s->keeps == 2 ? full : 0, full);
}

/* The prefix keeps what is exact of a sequence; it may go on. */
static void keep_text(play *p, open_text *s) {
    const int ends = pick(p->w, 2), exact = least(s->length, s->exact);
    const kvc_tokens tokens = tokens_up_to(&p->texts[s->text], pick(p->w, 2) ? s->length : p->texts[s->text].num);
    p->w->call = ends ? "kvc_prefix_release" : "kvc_prefix_checkpoint";
    trace(p->w, "%lld: %s of %d, exact to %d", (long long)s->id, p->w->call, s->length, s->exact);
    must(p->w, ends ? kvc_prefix_release(p->prefix, s->id, &tokens)
                    : kvc_prefix_checkpoint(p->prefix, s->id, &tokens, NULL, 0));
    keep(p, s->text, exact, exact);
    s->is_there = !ends;
}

static void cut_text(play *p, open_text *s) {
    const int length = 1 + pick(p->w, s->length);
    p->w->call = "kvc_truncate";
    must(p->w, kvc_truncate(p->cache, s->id, length));
    if (length < s->length) s->keeps = 0;
    if (length <= s->exact && length < s->length) s->exact = INT32_MAX;
    s->length = length;
}

static void copy_text(play *p, const open_text *s) {
    open_text *to = &p->open[pick(p->w, OPEN)];
    const int length = pick(p->w, 2) ? s->length : 1 + pick(p->w, s->length);
    if (to->is_there) return;
    const int64_t id = kvc_new_sequence(p->cache);
    p->w->call = "kvc_copy_prefix";
    must(p->w, kvc_copy_prefix(p->cache, s->id, id, length));
    *to = (open_text){id, 1, s->text, length, s->exact < length ? s->exact : INT32_MAX, 0};
}

static void step(play *p) {
    const int what = pick(p->w, 12);
    open_text *s = any_open(p);
    if (!s)
        begin_text(p);
    else if (what < 8)
        feed_some(p, s);
    else if (!s->length)
        return;
    else if (what < 10)
        keep_text(p, s);
    else if (what == 10)
        cut_text(p, s);
    else
        copy_text(p, s);
}

void play_selected(world *w) {
    static play p;
    p = (play){.w = w, .block = 1 + pick(w, 16)};
    const kvc_layer layers[LAYERS] = {{.num_kv_heads = 1, .k_dim = KEY, .v_dim = KEY, .sketch_bits = 2},
                                      {.num_kv_heads = 1, .k_dim = KEY, .v_dim = KEY}};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = layers,
                               .layer_size = sizeof *layers,
                               .num_layers = LAYERS,
                               .block_size = p.block,
                               .num_threads = 1};
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a"};
    must(w, kvc_cache_new(&config, &p.cache));
    must(w, kvc_prefix_new(p.cache, &own, &p.prefix));
    make_texts(&p);
    for (w->step = 1; w->step <= 60; w->step++) {
        step(&p);
        for (int i = 0; i < OPEN; i++)
            if (p.open[i].is_there) check_open(&p, &p.open[i]);
        check_texts(&p);
    }
    kvc_prefix_free(p.prefix);
    must(w, kvc_cache_free(p.cache));
}
