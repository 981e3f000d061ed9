/* model.c: the oracle. It says which blocks and states a prefix keeps, surely or maybe, and how much of a text they
 * make known. */
#include "known.h"

static void drop_block(prefix *p, kept *b) { *b = p->blocks[--p->num_blocks]; }

static void drop_state(prefix *p, state *s) { *s = p->states[--p->num_states]; }

kept *find_kept(const prefix *p, int node, int begin) {
    for (int i = 0; i < p->num_blocks; i++)
        if (p->blocks[i].node == node && p->blocks[i].begin == begin) return &p->blocks[i];
    return NULL;
}

state *find_state(const prefix *p, int node) {
    for (int i = 0; i < p->num_states; i++)
        if (p->states[i].node == node) return &p->states[i];
    return NULL;
}

/* Returns whether a block has the last token of a text. */
static int has_end(const kept *b, int node) {
    const int length = text_length(node);
    return b->begin < length && length <= b->end && text_begin(b->node, length) == node;
}

int is_pinned(const world *w, const prefix *p, const kept *b, int surely) {
    for (int i = 0; i < p->num_pins; i++) {
        const pin *it = &p->pins[i];
        if ((surely && it->is_loose) || b->begin >= it->kept || text_common(it->node, b->node) <= b->begin) continue;
        const int is_full =
            b->end - b->begin == w->shape.block; /* of a shorter one, the tokens may be pinned elsewhere */
        if ((is_full || !surely) && b->end <= it->kept && text_begin(it->node, b->end) == b->node) return 1;
        int others = 0; /* of the blocks that go on otherwise, one is pinned */
        for (int j = 0; j < p->num_blocks; j++) {
            const kept *o = &p->blocks[j];
            others += o != b && o->begin == b->begin &&
                      text_begin(o->node, b->begin + 1) == text_begin(it->node, b->begin + 1);
        }
        if (!surely || (!others && !it->has_full && text_common(b->node, it->node) >= it->kept)) return 1;
    }
    return 0;
}

/* A state goes with the rows of its last token. */
static void settle_states(prefix *p) {
    for (int i = p->num_states; i-- > 0;) {
        int is_sure = 1, is_there = 0;
        for (int j = 0; j < p->num_blocks; j++)
            if (has_end(&p->blocks[j], p->states[i].node)) is_there = 1, is_sure &= p->blocks[j].is_sure;
        if (!is_there)
            drop_state(p, &p->states[i]);
        else if (!is_sure)
            p->states[i].is_sure = 0;
    }
}

/* A block that may have been dropped takes along those behind it. */
static void doubt(prefix *p, kept *b) {
    b->is_sure = b->sure_new = 0;
    memset(b->sure, 0, sizeof b->sure);
    for (int i = 0; i < p->num_states; i++)
        if (has_end(b, p->states[i].node)) p->states[i].is_sure = 0;
}

/* Returns where the block begins that has the last token of a text. */
static int block_of(const world *w, int node) { return (text_length(node) - 1) / w->shape.block * w->shape.block; }

void note_use(world *w, prefix *p, int node, int length, int is_sure) {
    for (int i = 0; i < p->num_blocks; i++) {
        kept *b = &p->blocks[i];
        if (b->begin >= length || text_begin(node, b->begin + 1) != text_begin(b->node, b->begin + 1)) continue;
        b->may_use = w->step, b->may_ms = w->ms;
        if (is_sure && b->end <= length && text_begin(node, b->end) == b->node)
            b->sure_use = w->step, b->sure_ms = w->ms;
    }
    for (int i = 0; i < p->num_states; i++) {
        state *s = &p->states[i];
        const int begin = block_of(w, s->node), last = text_begin(node, length);
        if (begin >= length || text_begin(node, begin + 1) != text_begin(s->node, begin + 1)) continue;
        const int is_late = !is_sure || s->node == last || begin < block_of(w, last); /* or beside the last one */
        if (s->may_use < 2 * w->step) s->may_use = 2 * w->step + is_late;
        if (is_sure && s->node == last) s->sure_use = s->may_use = 2 * w->step + 1;
    }
}

void note_end(world *w, const sequence *s) {
    if (!s->prefix) return;
    const int block = w->shape.block, length = least(text_length(s->node), text_length(s->prompt));
    prefix *p = &w->prefixes[s->prefix - 1];
    note_use(w, p, s->prompt, text_length(s->prompt), 0);
    if (s->keeps < 2 || s->left_out || s->barred[s->prefix - 1] || w->shape.config.max_bytes) return;
    for (int end = block; end <= length; end += block) {
        kept *b = find_kept(p, text_begin(s->prompt, end), end - block);
        if (b) b->sure_use = w->step, b->sure_ms = w->ms;
    }
}

int num_whole(const world *w, const kept *b) {
    const uint64_t range = (((uint64_t)1 << b->end) - 1) & ~(((uint64_t)1 << b->begin) - 1);
    int num = 0;
    for (int l = 0; l < w->shape.num_layers; l++)
        num += b->is_sure && w->shape.has_rows[l] && !(range & w->shape.has[l] & ~b->sure[l]);
    return num;
}

void note_kept(world *w, prefix *p, int node, int begin, const uint64_t *rows, int is_sure) {
    kept *b = find_kept(p, node, begin);
    const int end = text_length(node);
    const int is_full = end - begin == w->shape.block;
    if (!b) {
        if (p->num_blocks == p->room_blocks)
            p->blocks = realloc(p->blocks, sizeof *p->blocks * (size_t)(p->room_blocks += 64));
        b = &p->blocks[p->num_blocks++];
        *b = (kept){.node = node, .begin = begin, .end = end};
        if (is_full) {
            text_tokens tokens;
            uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
            int64_t num;
            must(w, kvc_prefix_names(p->handle, tokens_of(node, &tokens), names[0], MOST_TEXT, &num));
            memcpy(b->name, names[num - 1], KVC_NAME_BYTES);
            check_name(w, p->model, node, b->name);
        }
    }
    const int is_new = !b->may_use; /* never used before */
    const uint64_t range = (((uint64_t)1 << end) - 1) & ~(((uint64_t)1 << begin) - 1);
    uint64_t any = 0;
    for (int l = 0; l < w->shape.num_layers; l++) any |= rows[l] & range;
    is_sure &= any != 0 && !w->is_short; /* a block is kept while it has rows of some layer */
    b->may_new |= is_full;
    b->is_sure |= is_sure;
    for (int l = 0; l < w->shape.num_layers; l++) {
        b->may[l] |= rows[l] & range;
        if (is_sure) b->sure[l] |= rows[l] & range;
    }
    if (is_new && is_full && num_whole(w, b)) b->sure_new = 1;
    b->may_use = w->step, b->may_ms = w->ms;
    if (is_sure) b->sure_use = w->step, b->sure_ms = w->ms;
}

/* Returns whether every state that may be there fits beside those used since `use`. */
static int fits_states(const world *w, const prefix *p, int node, long use) {
    uint8_t bytes[MOST_STATE];
    int64_t sum = make_state(w, p->model, node, bytes);
    for (int i = 0; i < p->num_states; i++) {
        int is_kept = p->states[i].may_use >= use;
        for (int j = 0; j < p->num_blocks; j++)
            is_kept |= has_end(&p->blocks[j], p->states[i].node) && is_pinned(w, p, &p->blocks[j], 0);
        if (p->states[i].node != node && is_kept) sum += make_state(w, p->model, p->states[i].node, bytes);
    }
    return !p->config.max_checkpoint_bytes || sum <= p->config.max_checkpoint_bytes;
}

/* The state that goes with what is pinned stays. */
static int is_pinned_state(const prefix *p, int node) {
    const int length = text_length(node);
    for (int i = 0; i < p->num_pins; i++) {
        if (!p->pins[i].is_loose && p->pins[i].kept == length && text_begin(p->pins[i].node, length) == node) return 1;
    }
    return 0;
}

int may_lack_room(const world *w, const prefix *p, int64_t size) {
    uint8_t bytes[MOST_STATE];
    for (int i = 0; i < p->num_states; i++) {
        const int node = p->states[i].node, length = text_length(node);
        int may_be_pinned = 0;
        for (int j = 0; j < p->num_pins; j++) {
            const pin *it = &p->pins[j];
            may_be_pinned |= length <= it->kept && text_begin(it->node, length) == node;
        }
        if (may_be_pinned) size += make_state(w, p->model, node, bytes);
    }
    return p->config.max_checkpoint_bytes && size > p->config.max_checkpoint_bytes;
}

void note_state(world *w, prefix *p, int node, int is_sure) {
    state *s = find_state(p, node);
    const int is_new = !s;
    if (!s) {
        if (p->num_states == p->room_states)
            p->states = realloc(p->states, sizeof *p->states * (size_t)(p->room_states += 32));
        s = &p->states[p->num_states++];
        *s = (state){.node = node};
    }
    s->sure_use = s->may_use = 2 * w->step + 1;
    s->is_sure = (s->is_sure || !w->is_short) && is_sure;
    for (int i = 0; i < p->num_states; i++) {
        state *it = &p->states[i];
        if (!is_pinned_state(p, it->node) && !fits_states(w, p, it->node, it->sure_use)) it->is_sure = 0;
    }
    for (int i = 0; i < p->num_blocks; i++) { /* a full block with a new state is listed again, if it is its last one */
        kept *b = &p->blocks[i];
        if (!has_end(b, node) || b->end - b->begin != w->shape.block) continue;
        b->may_new = 1;
        int is_last = 1;
        for (int j = 0; j < p->num_states; j++) {
            const int length = text_length(p->states[j].node);
            is_last &=
                length <= text_length(node) || length > b->end || text_begin(b->node, length) != p->states[j].node;
        }
        if (is_new && is_last && b->is_sure && find_state(p, node)->is_sure) b->sure_new = 1;
    }
}

/* Tokens of other blocks that may have been used as lately as this one: fewer than the quota means that it stays. */
static int is_within_quota(const prefix *p, const kept *b) {
    int64_t sum = 0;
    for (int i = 0; i < p->num_blocks; i++)
        if (&p->blocks[i] != b && p->blocks[i].may_use >= b->sure_use) sum += p->blocks[i].end - p->blocks[i].begin;
    return sum < p->config.quota;
}

void note_evicted(world *w, int cache, unsigned own) {
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &w->prefixes[i];
        if (!p->handle || p->cache != cache) continue;
        for (int j = 0; j < p->num_blocks; j++) {
            kept *b = &p->blocks[j];
            if (!is_pinned(w, p, b, 1) && (own >> i & 1 || !is_within_quota(p, b))) doubt(p, b);
        }
        for (int j = 0; j < p->num_states; j++)
            if (!is_pinned_state(p, p->states[j].node)) p->states[j].is_sure = 0;
    }
}

void note_cleared(prefix *p) {
    p->num_blocks = p->num_states = 0;
    for (int i = 0; i < p->num_pins; i++) p->pins[i].is_loose = 1;
}

void note_bars(world *w, prefix *p, int node) {
    const int at = (int)(p - w->prefixes);
    p->has_forgotten = node != 0;
    for (int i = 0; i < SEQUENCES; i++) {
        sequence *s = &w->sequences[i];
        if (!node || !s->is_there || s->cache != p->cache) {
            if (!node) s->barred[at] = s->copies_barred[at] = 0;
        } else if (s->prefix == 1 + at) {
            const int has_both = text_begin(s->prompt, 1) == text_begin(node, 1), is_fed = s->node != 0;
            s->copies_barred[at] |= is_fed;
            if (is_fed && s->is_other && !s->barred[at]) s->barred[at] = 1; /* like tokens that it did not acquire */
            if (has_both && s->barred[at] < 2) s->barred[at] = is_fed ? 2 : 1;
        } else if (s->node) {
            const int has_both = text_begin(s->node, 1) == text_begin(node, 1);
            if (s->barred[at] < 2) s->barred[at] = has_both ? 2 : 1;
        }
    }
}

/* Returns how many tokens a block may have in common with a forgotten text, and stay: where layers see all tokens,
 * those before it, but not all of the text. */
int last_kept(const world *w, const kept *b, int node) {
    for (int l = 0; l < w->shape.num_layers; l++)
        if (w->shape.has_rows[l] && w->shape.layers[l].policy.kind == KVC_FULL)
            return least(b->begin, text_length(node) - 1);
    return 0;
}

void note_forgotten(world *w, prefix *p, int node, int64_t *least_tokens, int64_t *most_tokens) {
    *least_tokens = *most_tokens = 0;
    if (!node) return;
    for (int i = p->num_blocks; i-- > 0;) {
        kept *b = &p->blocks[i];
        if (text_common(node, b->node) <= last_kept(w, b, node)) continue; /* of a prompt that begins alike */
        const int is_part = b->end - b->begin < w->shape.block;
        *most_tokens += b->end - b->begin;
        if (num_whole(w, b) && !is_part) *least_tokens += b->end - b->begin;
        drop_block(p, b);
    }
    settle_states(p);
    note_bars(w, p, node);
    for (int i = 0; i < p->num_pins; i++) p->pins[i].has_full |= text_common(p->pins[i].node, node) > 0;
}

void note_evict(world *w, prefix *p, int64_t wanted, int64_t dropped) {
    for (int i = p->num_blocks; i-- > 0;) {
        kept *b = &p->blocks[i];
        if (!dropped || is_pinned(w, p, b, 1)) continue;
        int64_t older = 0; /* tokens that go before it */
        for (int j = 0; j < p->num_blocks; j++) {
            const kept *o = &p->blocks[j];
            const int is_full =
                o->end - o->begin == w->shape.block && num_whole(w, o); /* others may be a part of one */
            if (is_full && o->is_sure && o->may_use < b->sure_use && !is_pinned(w, p, o, 0)) older += o->end - o->begin;
        }
        if (older < dropped || !b->is_sure) doubt(p, b);
    }
    if (dropped >= wanted) return;
    for (int i = p->num_blocks; i-- > 0;) { /* no block was left that is not pinned, or before one */
        int is_held = 0;
        for (int j = 0; j < p->num_pins; j++)
            is_held |= text_common(p->pins[j].node, p->blocks[i].node) > p->blocks[i].begin;
        if (!is_held) drop_block(p, &p->blocks[i]);
    }
    settle_states(p);
}

void note_time(world *w, prefix *p) {
    if (!p->config.ttl_ms) return;
    for (int i = p->num_blocks; i-- > 0;) {
        kept *b = &p->blocks[i];
        if (w->ms - b->sure_ms > p->config.ttl_ms && !is_pinned(w, p, b, 1)) doubt(p, b);
        if (w->ms - b->may_ms > p->config.ttl_ms && !is_pinned(w, p, b, 0)) drop_block(p, b);
    }
    settle_states(p);
}

void learn(world *w, prefix *p, int node, int n) {
    for (int begin = 0; begin < n; begin += w->shape.block) {
        kept *b = NULL;
        int num = 0; /* blocks that may have the rows of these tokens */
        for (int i = 0; i < p->num_blocks; i++)
            if (p->blocks[i].begin == begin && text_common(p->blocks[i].node, node) > begin) b = &p->blocks[i], num++;
        for (int l = 0; l < w->shape.num_layers && num == 1; l++) {
            const uint64_t seen = b->may[l] & w->shape.sees[l][n];
            b->sure[l] |= seen;
            b->is_sure |= seen != 0;
        }
    }
}

/* ---- what is known */

/* The blocks that a prefix has of a text. */
typedef struct found {
    int end;                    /* where the last block ends */
    uint64_t rows[MOST_LAYERS]; /* that they have */
} found;

static void look(const world *w, const prefix *p, int node, int surely, found *f) {
    const int length = text_length(node);
    memset(f, 0, sizeof *f);
    for (int i = 0; i < p->num_blocks; i++) {
        const kept *b = &p->blocks[i];
        if (b->begin >= length || (surely && !b->is_sure)) continue;
        const int common = text_common(b->node, node);
        if (common <= b->begin) continue;
        for (int l = 0; l < w->shape.num_layers; l++)
            f->rows[l] |= (surely ? b->sure : b->may)[l] & (((uint64_t)1 << common) - 1);
        if (f->end < common) f->end = common;
    }
}

static int shows(const world *w, int n, const uint64_t *rows) {
    for (int l = 0; l < w->shape.num_layers; l++)
        if (w->shape.has_rows[l] && w->shape.sees[l][n] & ~rows[l]) return 0;
    return 1;
}

int known(const world *w, const prefix *p, int node, int limit, int surely, int with_states) {
    found f;
    look(w, p, node, surely, &f);
    for (int n = least(limit, f.end); n > 0; n--) {
        if (with_states && p->config.state_bytes) {
            const state *s = find_state(p, text_begin(node, n));
            if (!s || (surely && !s->is_sure)) continue;
        }
        if (shows(w, n, f.rows)) return n;
    }
    return 0;
}
