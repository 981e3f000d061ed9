/* calls.c: what a server does: it acquires sequences, feeds them in batches, notes checkpoints, and releases them. */
#include "known.h"

prefix *any_prefix(world *w) {
    for (int i = 0; i < 8; i++) {
        prefix *p = &w->prefixes[pick(w, PREFIXES)];
        if (p->handle) return p;
    }
    return NULL;
}

/* Returns a sequence of a cache (-1: of any cache); NULL: no sequence exists. */
sequence *any_sequence(world *w, int cache) {
    for (int i = 0; i < 3 * SEQUENCES; i++) {
        sequence *s = &w->sequences[pick(w, SEQUENCES)];
        if (s->is_there && (cache < 0 || s->cache == cache)) return s;
    }
    return NULL;
}

int any_text(world *w) {
    const int node = w->texts[pick(w, TEXTS)];
    return pick(w, 3) ? node : text_begin(node, 1 + pick(w, text_length(node)));
}

/* Returns room for one more sequence.  If there is no room, a sequence ends. */
static sequence *room_for_one(world *w) {
    for (int i = 0; i < SEQUENCES; i++)
        if (!w->sequences[i].is_there) return &w->sequences[i];
    sequence *s = &w->sequences[pick(w, SEQUENCES)];
    clear_sequence(w, s);
    return s;
}

static void check_id(world *w, int cache, int64_t id) {
    if (id <= w->last_id[cache] || kvc_next_position(w->caches[cache], id) < 0)
        fail(w, "%lld is no new id behind %lld", (long long)id, (long long)w->last_id[cache]);
    w->last_id[cache] = id;
}

sequence *new_sequence(world *w, int cache) {
    sequence *s = room_for_one(w);
    *s = (sequence){.is_there = 1, .cache = cache, .model = pick(w, MODELS), .exact = INT32_MAX};
    s->id = kvc_new_sequence(w->caches[cache]);
    check_id(w, cache, s->id);
    return s;
}

/* ---- acquiring */

static void check_state(world *w, prefix *p, sequence *s) {
    uint8_t bytes[MOST_STATE], own[MOST_STATE];
    int64_t size = -1;
    const int expected = s->state ? make_state(w, s->model, s->state, own) : 0;
    must(w, kvc_prefix_state(p->handle, s->id, NULL, 0, &size));
    if (size != expected) fail(w, "sequence %d: a state of %d bytes, not %d", (int)s->id, (int)size, expected);
    if (!size) return;
    if (kvc_prefix_state(p->handle, s->id, bytes, size - 1, &size) != KVC_ERR_INVALID)
        fail(w, "no room is taken for a state");
    must(w, kvc_prefix_state(p->handle, s->id, bytes, sizeof bytes, &size));
    if (memcmp(bytes, own, (size_t)expected)) fail(w, "sequence %d has the state of another text", (int)s->id);
}

/* Whether as many tokens as are reused have to be found elsewhere: in a row of blocks that are surely there. */
static int has_elsewhere(const world *w, const prefix *p, int node, int matched, int limit) {
    if (w->shape.has_windows) return 0;
    for (int i = 0; i < p->num_blocks; i++) {
        const int other = p->blocks[i].node, end = p->blocks[i].end;
        if (known(w, p, other, end, 1, 1) != end) continue;
        for (int at = 0; at < end; at++) {
            int n = 0, a, b;
            while (at + n < end && matched + n < limit) {
                a = text_begin(other, at + n + 1), b = text_begin(node, matched + n + 1);
                if (text_symbol(a) != text_symbol(b)) break;
                n++;
            }
            const int first = (at + w->shape.block - 1) / w->shape.block * w->shape.block;
            if (n >= p->config.reuse_min_tokens && first + w->shape.block <= at + n) return 1;
        }
    }
    return 0;
}

/* Takes what statistics say was reused; returns it. */
static int check_reused(world *w, prefix *p, int node, int exact, int limit, int matched) {
    kvc_prefix_stats stats;
    kvc_prefix_get_stats(p->handle, &stats, sizeof stats);
    const int reused = (int)(stats.reused - p->reused);
    if (matched - reused != exact)
        fail(w, "%d are matched, of them %d from elsewhere, but %d are known", matched, reused, exact);
    if (reused && (!p->config.reuse_min_tokens || reused < p->config.reuse_min_tokens))
        fail(w, "%d are taken from elsewhere", reused);
    if (p->config.reuse_min_tokens && !reused && !w->is_short && !w->shape.is_limited &&
        has_elsewhere(w, p, node, exact, limit))
        fail(w, "%s: nothing behind %d tokens is taken from elsewhere", spell(node), exact);
    p->reused += reused;
    return reused;
}

void do_acquire(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    sequence *s = room_for_one(w);
    const int node = any_text(w), length = text_length(node), most = pick(w, 4) ? -1 : pick(w, length + 2);
    const int limit = most < 0 ? length - 1 : least(most, length - 1);
    const int expected = check_lookup(w, p, text_begin(node, limit));
    text_tokens tokens;
    int64_t id = -1;
    int32_t matched = -1;
    w->call = "kvc_prefix_acquire";
    kvc_status status;
    CALL(w, status, kvc_prefix_acquire(p->handle, tokens_of(node, &tokens), most, &id, &matched));
    if (is_full(w, status)) return;
    must(w, status);
    check_limit(w, p->cache);
    trace(w, "acquire of prefix %d: %s, at most %d: sequence %d, %d matched", (int)(p - w->prefixes), spell(node), most,
          (int)id, matched);
    check_id(w, p->cache, id);
    const int reused = check_reused(w, p, node, expected, limit, matched);
    if (matched < 0 || matched > limit) fail(w, "%d tokens are matched of at most %d", matched, limit);
    p->requests++, p->tokens += length, p->matched += matched, p->hits += matched > 0;
    note_use(w, p, node, matched, 1);
    note_use(w, p, node, length, 0);
    notice_evictions(w, p->cache, bit_of(w, p));
    *s = (sequence){.is_there = 1, .cache = p->cache, .model = p->model, .id = id};
    s->node = text_begin(node, matched);
    s->exact = reused ? expected : INT32_MAX;
    s->prefix = 1 + (int)(p - w->prefixes), s->prompt = node, s->keeps = 2;
    s->state = p->config.state_bytes ? s->node : 0;
    for (int i = 0; i < PREFIXES; i++) /* these blocks may be older than what another prefix has forgotten */
        s->barred[i] = matched && &w->prefixes[i] != p && w->prefixes[i].has_forgotten;
    check_state(w, p, s);
    check_sequence(w, s);
}

/* ---- batches */

typedef struct fed { /* a sequence in a batch */
    sequence *s;
    int old, num, is_unstored;
    int nodes[MOST_TEXT]; /* the texts up to its tokens */
    int is_kept[MOST_TEXT];
} fed;

typedef struct feeding {
    int num, num_tokens;
    fed fed[4];
    int which[4 * MOST_TEXT], token[4 * MOST_TEXT]; /* of the batch's tokens: the sequence, and the index within it */
    int64_t ids[4 * MOST_TEXT];
    kvc_batch *batch;
} feeding;

static int next_token(world *w, const sequence *s, int node) {
    const int length = text_length(node);
    if (s->prefix && length < text_length(s->prompt)) return text_symbol(text_begin(s->prompt, length + 1));
    for (int i = 0; i < 4; i++) {
        const int text = w->texts[pick(w, TEXTS)];
        if (text_length(text) > length && text_begin(text, length) == node)
            return text_symbol(text_begin(text, length + 1));
    }
    return pick(w, SYMBOLS);
}

static void plan(world *w, feeding *f, sequence **chosen, int num, const int *counts) {
    *f = (feeding){.num = num};
    int left = 0, done[4] = {0}, turn = 0;
    const int is_mixed = pick(w, 2);
    for (int i = 0; i < num; i++) {
        fed *it = &f->fed[i];
        it->is_unstored = pick(w, 24) == 0;
        it->s = chosen[i], it->old = text_length(chosen[i]->node);
        it->num = least(counts[i], MOST_TEXT - it->old);
        left += it->num;
        for (int j = 0, node = chosen[i]->node; j < it->num; j++) {
            it->nodes[j] = node = text_behind(node, next_token(w, chosen[i], node));
            it->is_kept[j] = 1;
        }
    }
    for (; left; left--, f->num_tokens++) {
        if (is_mixed) turn = pick(w, num);
        while (done[turn] == f->fed[turn].num) turn = (turn + 1) % num;
        f->which[f->num_tokens] = turn, f->token[f->num_tokens] = done[turn]++;
        f->ids[f->num_tokens] = f->fed[turn].s->id;
    }
}

static kvc_status put(world *w, feeding *f) {
    static float k[4 * MOST_TEXT][MOST_HEADS][DIM], v[4 * MOST_TEXT][MOST_HEADS][DIM];
    for (int l = 0; l < w->shape.num_layers; l++) {
        if (!w->shape.has_rows[l]) continue;
        for (int first = 0; first < f->num_tokens;) {
            const int n = pick(w, 3) ? f->num_tokens - first : 1 + pick(w, f->num_tokens - first);
            int num = 0;
            for (int i = first; i < first + n; i++) {
                const fed *it = &f->fed[f->which[i]];
                if (!(w->shape.has[l] >> (it->old + f->token[i]) & 1)) continue;
                for (int h = 0; h < MOST_HEADS; h++)
                    make_row(w, it->s->model, l, h, it->nodes[f->token[i]], k[num][h], v[num][h]);
                num++;
            }
            const kvc_put_args args = {.struct_size = sizeof args,
                                       .first = first,
                                       .num_tokens = n,
                                       .k = k,
                                       .v = has_values(&w->shape, l) ? v : NULL,
                                       .k_token_stride = sizeof k[0],
                                       .k_head_stride = sizeof k[0][0],
                                       .v_token_stride = sizeof v[0],
                                       .v_head_stride = sizeof v[0][0]};
            const kvc_status status = kvc_put(f->batch, l, &args);
            if (status) return status;
            first += n;
        }
    }
    return KVC_OK;
}

/* Chooses which tokens are not kept: the last of a sequence, all, or one in the middle. */
static void reject(world *w, feeding *f) {
    for (int i = 0; i < f->num; i++) {
        fed *it = &f->fed[i];
        if (!it->num || pick(w, 2)) continue;
        if (pick(w, 8) == 0)
            it->is_kept[pick(w, it->num)] = 0;
        else
            for (int j = pick(w, it->num); j < it->num; j++) it->is_kept[j] = 0;
    }
}

static uint64_t range_of(int begin, int end) { return (((uint64_t)1 << end) - 1) & ~(((uint64_t)1 << begin) - 1); }

/* Notes the blocks that a commit has filled.  rows: number of rows just before, the batch's included. */
static void note_filled(world *w, fed *it, int length, const uint64_t *rows) {
    sequence *s = it->s;
    prefix *p = &w->prefixes[s->prefix - 1];
    const int block = w->shape.block;
    const int barred = s->barred[s->prefix - 1];
    int is_sure = s->keeps == 2 && s->exact == INT32_MAX && !barred && !w->shape.config.max_bytes;
    note_use(w, p, s->prompt, length, 0);
    for (int end = block; end <= least(length, text_length(s->prompt)); end += block) {
        const int node = text_begin(s->prompt, end);
        kept *b = find_kept(p, node, end - block);
        const kept old = b ? *b : (kept){0};
        const int is_late = s->left_out && end > s->left_out - 1 && text_common(s->node, node) == end;
        if ((is_late || (end > it->old && s->keeps)) && barred < 2 && s->exact >= end)
            note_kept(w, p, node, end - block, rows, is_sure && end > it->old);
        if (end > it->old && w->is_short && !s->left_out) s->left_out = end - block + 1;
        if (b = find_kept(p, node, end - block), b && old.node)
            b->sure_use = old.sure_use, b->sure_ms = old.sure_ms; /* whether it was used is open */
        uint64_t any = 0; /* rows of it; windows may have left all of them behind */
        for (int l = 0; l < w->shape.num_layers; l++) any |= rows[l] & range_of(end - block, end);
        is_sure &= !any || (b && b->is_sure);
    }
}

static void note_commit(world *w, feeding *f, uint64_t rows[4][MOST_LAYERS]) {
    for (int i = 0; i < f->num; i++) {
        fed *it = &f->fed[i];
        sequence *s = it->s;
        int length = it->old, all = 1, last = -1;
        if (it->is_unstored && it->num) {
            if (kvc_next_position(w->caches[s->cache], s->id)) fail(w, "a sequence that is not stored holds rows");
            s->is_there = s->prefix != 0; /* an acquired one goes on, from its first token */
            s->node = s->is_loose = 0, s->exact = INT32_MAX, s->keeps = 0, s->state = -1, s->is_other = 1;
            memset(s->had, 0, sizeof s->had);
            for (int j = 0; j < PREFIXES; j++) s->barred[j] = s->barred[j] != 0, s->copies_barred[j] = 0;
            continue;
        }
        for (int j = 0; j < it->num; j++) {
            all &= it->is_kept[j];
            if (!it->is_kept[j]) {
                s->is_other |= !it->old && !j;
                continue;
            }
            for (int l = 0; l < w->shape.num_layers; l++) rows[i][l] |= (uint64_t)1 << (it->old + j) & w->shape.has[l];
            if (all) length++, s->node = it->nodes[j];
            last = j;
        }
        if (s->prefix) note_filled(w, it, length, rows[i]);
        for (int l = 0; l < w->shape.num_layers; l++) s->had[l] |= rows[i][l];
        if (!all && s->prefix && length < text_length(s->prompt)) s->keeps = least(s->keeps, 1);
        if (it->old + last + 1 > length) { /* behind a token that was not kept */
            s->is_loose = 1, s->exact = least(s->exact, length);
            s->keeps = 0;
        }
        if (it->num) s->state = last < 0 ? -1 : 0;
    }
}

static void end_batch(world *w, feeding *f, int cache, unsigned own) {
    kvc_status status;
    uint64_t rows[4][MOST_LAYERS];
    for (int i = 0; i < f->num; i++) rows_of(w, f->fed[i].s, rows[i]);
    if (pick(w, 3) == 0) {
        reject(w, f);
        int32_t kept[4 * MOST_TEXT];
        int num = 0;
        for (int i = 0; i < f->num_tokens; i++)
            if (f->fed[f->which[i]].is_kept[f->token[i]]) kept[num++] = i;
        for (int i = 0; i + 1 < num; i++) {
            const int j = i + pick(w, num - i), at = kept[i];
            kept[i] = kept[j], kept[j] = at;
        }
        trace(w, "  %d of %d tokens are kept", num, f->num_tokens);
        w->call = "kvc_commit_kept";
        CALL(w, status, kvc_commit_kept(f->batch, kept, num));
    } else {
        w->call = "kvc_commit";
        CALL(w, status, kvc_commit(f->batch));
    }
    must(w, status);
    notice_evictions(w, cache, own);
    note_commit(w, f, rows);
    for (int i = 0; i < f->num; i++)
        if (f->fed[i].s->is_there) check_sequence(w, f->fed[i].s);
}

/* Rows of sequences that are not stored take memory as they are put. */
static int has_unstored(const feeding *f) {
    int num = 0;
    for (int i = 0; i < f->num; i++) num += f->fed[i].is_unstored && f->fed[i].num;
    return num;
}

static kvc_status begin(world *w, feeding *f, int cache) {
    uint8_t unstored[4 * MOST_TEXT];
    int is_any = 0;
    for (int i = 0; i < f->num_tokens; i++) is_any |= unstored[i] = (uint8_t)f->fed[f->which[i]].is_unstored;
    const kvc_begin_args args = {
        .struct_size = sizeof args, .num_tokens = f->num_tokens, .seq_ids = f->ids, .unstored = unstored};
    return is_any ? kvc_begin_with(w->caches[cache], &args, &f->batch)
                  : kvc_begin(w->caches[cache], f->num_tokens, NULL, f->ids, NULL, &f->batch);
}

/* Feeds sequences so many tokens each. */
void feed(world *w, int cache, sequence **chosen, int num, const int *counts) {
    feeding f;
    unsigned own = 0;
    int may_be_gone = 0;
    plan(w, &f, chosen, num, counts);
    if (!f.num_tokens) return;
    for (int i = 0; i < num; i++) {
        const sequence *s = chosen[i];
        trace(w, "  batch: %d tokens of sequence %d, behind %s", f.fed[i].num, (int)s->id, spell(s->node));
        if (s->prefix) own |= 1u << (s->prefix - 1);
        may_be_gone |= !kvc_can_resume(w->caches[cache], s->id, kvc_next_position(w->caches[cache], s->id));
    }
    prefix *p = any_prefix(w);
    const int text = any_text(w), before = p ? check_lookup(w, p, text) : 0;
    w->call = "kvc_begin";
    kvc_status status;
    CALL(w, status, begin(w, &f, cache));
    notice_evictions(w, cache, own);
    if (status && p && check_lookup(w, p, text) != before) fail(w, "a batch that failed has changed what is known");
    if ((status == KVC_ERR_FULL && w->shape.is_limited) || (status == KVC_ERR_GONE && may_be_gone)) {
        for (int i = 0; i < num; i++) clear_sequence(w, chosen[i]);
        return;
    }
    must(w, status);
    status = put(w, &f);
    notice_evictions(w, cache, own);
    if (status == KVC_ERR_FULL && w->shape.config.max_bytes && has_unstored(&f)) {
        kvc_abort(f.batch);
        return;
    }
    must(w, status);
    if (p && pick(w, 4) == 0) check_lookup(w, p, text);
    if (pick(w, 10) == 0) {
        trace(w, "  abort");
        kvc_abort(f.batch);
        notice_evictions(w, cache, own);
        return;
    }
    end_batch(w, &f, cache, own);
}

void do_batch(world *w) {
    const int cache = w->caches[1] && pick(w, 3) == 0;
    sequence *chosen[4];
    int counts[4], num = 0;
    for (int i = 1 + pick(w, 4); i > 0; i--) {
        sequence *s = any_sequence(w, cache);
        if (!s) s = new_sequence(w, cache);
        for (int j = 0; j < num; j++)
            if (chosen[j] == s) s = NULL;
        if (!s || s->is_loose) continue;
        counts[num] = pick(w, 3) ? 1 + pick(w, 6) : 1 + pick(w, 30);
        chosen[num++] = s;
    }
    feed(w, cache, chosen, num, counts);
}

/* ---- keeping */

/* Notes the blocks of a sequence's first tokens. */
static int note_blocks(world *w, sequence *s, prefix *p, int node, const uint64_t *rows) {
    const int block = w->shape.block, length = least(text_common(node, s->node), s->exact);
    const int barred = s->barred[p - w->prefixes], is_sure = !w->shape.config.max_bytes && !barred;
    note_use(w, p, node, length, 0);
    if (barred == 2) return 0;
    for (int begin = 0; begin < length; begin += block)
        note_kept(w, p, text_begin(node, least(begin + block, length)), begin, rows, is_sure);
    for (int begin = 0; begin < length; begin += block)
        note_kept(w, p, text_begin(node, least(begin + block, length)), begin, s->had, 0);
    if (s->is_loose && text_length(node) > length && length > 0) /* a token without a row may count */
        note_kept(w, p, text_begin(node, length + 1), length / block * block, rows, 0);
    return length;
}

/* Returns the tokens to give with a sequence: all, fewer, or more than it holds. */
static int tokens_for(world *w, const sequence *s) {
    int node = s->node;
    if (pick(w, 4) == 0)
        node = text_begin(node, pick(w, text_length(node) + 1));
    else if (pick(w, 4) == 0)
        for (int n = 1 + pick(w, 5); n && text_length(node) < MOST_TEXT; n--)
            node = text_behind(node, pick(w, SYMBOLS));
    return node;
}

/* Returns whether fewer tokens than the exact ones were given, and so refused. */
static int lacks_tokens(world *w, const sequence *s, int given, kvc_status status) {
    kvc_cache *cache = w->caches[s->cache];
    const int num_exact = least(text_length(s->node), s->exact);
    if (status == KVC_ERR_INVALID && given &&
        given < least(kvc_next_position(cache, s->id), kvc_exact_to(cache, s->id)))
        return 1;
    if (given && given < num_exact && !s->is_loose && !s->has_gaps)
        fail(w, "%d tokens are taken for sequence %d, which holds %d", given, (int)s->id, num_exact);
    return 0;
}

void release(world *w, sequence *s, prefix *p, int node) {
    text_tokens tokens;
    uint64_t rows[MOST_LAYERS];
    const int given = text_length(node);
    if (given < text_length(s->node) && w->step % 2) { /* the other tokens are not to be kept */
        must(w, kvc_mark_inexact(w->caches[s->cache], s->id, given));
        s->exact = least(s->exact, given);
    }
    trace(w, "release of sequence %d, %s, to prefix %d: %s", (int)s->id, spell(s->node), (int)(p - w->prefixes),
          spell(node));
    rows_of(w, s, rows);
    w->call = "kvc_prefix_release";
    kvc_status status;
    CALL(w, status, kvc_prefix_release(p->handle, s->id, tokens_of(node, &tokens)));
    if (lacks_tokens(w, s, given, status)) return;
    must(w, status);
    note_end(w, s);
    notice_evictions(w, p->cache, bit_of(w, p));
    note_blocks(w, s, p, node, rows);
    if (kvc_next_position(w->caches[s->cache], s->id)) fail(w, "a released sequence goes on");
    s->is_there = 0;
}

/* Returns a prefix that may keep the blocks of a sequence; NULL: no prefix may. */
static prefix *keeper_of(world *w, const sequence *s) {
    if (s->prefix && pick(w, 8)) return &w->prefixes[s->prefix - 1];
    for (int i = 0; i < 12; i++) {
        prefix *p = &w->prefixes[pick(w, PREFIXES)];
        if (p->handle && p->cache == s->cache && w->models[p->model].like == w->models[s->model].like) return p;
    }
    return NULL;
}

void do_release(world *w) {
    sequence *s = any_sequence(w, -1);
    prefix *p = s ? keeper_of(w, s) : NULL;
    if (p)
        release(w, s, p, tokens_for(w, s));
    else if (s && pick(w, 4) == 0)
        clear_sequence(w, s);
}

void do_checkpoint(world *w) {
    sequence *s = any_sequence(w, -1);
    prefix *p = s ? keeper_of(w, s) : NULL;
    if (!p) return;
    const int node = tokens_for(w, s);
    text_tokens tokens;
    uint64_t rows[MOST_LAYERS];
    uint8_t bytes[MOST_STATE];
    const int size = p->config.state_bytes && node && pick(w, 4) ? make_state(w, p->model, node, bytes) : 0;
    rows_of(w, s, rows);
    w->call = "kvc_prefix_checkpoint";
    arm(w);
    const kvc_status status = kvc_prefix_checkpoint(p->handle, s->id, tokens_of(node, &tokens), bytes, size);
    w->fails_in = w->fails_on = 0;
    trace(w, "checkpoint of sequence %d, %s, by prefix %d: %s, %d bytes: %d", (int)s->id, spell(s->node),
          (int)(p - w->prefixes), spell(node), size, status);
    notice_evictions(w, p->cache, bit_of(w, p));
    const int may_lack = size && (w->shape.config.max_bytes || may_lack_room(w, p, size));
    if (!(status == KVC_ERR_FULL && may_lack) && !(status == KVC_ERR_NOMEM && w->is_short)) must(w, status);
    const int length = note_blocks(w, s, p, node, rows);
    const int is_behind_gap = s->is_loose && length && length + 1 == text_length(node); /* a token without a row */
    if (status || !size || !length || (length < text_length(node) && !is_behind_gap)) return;
    int has_rows = known(w, p, node, length, 1, 0) == length; /* a state without rows need not stay */
    uint64_t own = 0;
    for (int l = 0; l < w->shape.num_layers; l++) own |= rows[l];
    has_rows &= own >> (length - 1) & 1; /* windows may have left the last token's rows behind */
    note_state(w, p, node, !is_behind_gap && !w->shape.config.max_bytes && !s->barred[p - w->prefixes] && has_rows);
}
