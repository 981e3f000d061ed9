/* blocks.c: which blocks and states prefixes keep, surely or maybe, and how much of a text they make known. */
#include "oracle.h"

#include <string.h>

static int least(int a, int b) { return a < b ? a : b; }

static uint64_t bits_of(int begin, int end) { return (((uint64_t)1 << end) - 1) & ~(((uint64_t)1 << begin) - 1); }

uint64_t positions_of(const rows *list) {
    uint64_t bits = 0;
    for (int i = 0; i < list->num; i++)
        if (list->at[i].position < 64) bits |= (uint64_t)1 << list->at[i].position;
    return bits;
}

/* The positions below 64 at which a layer has rows. */
static uint64_t rowed(const oracle *o, int l) {
    uint64_t bits = 0;
    for (int at = 0; at < 64 && is_own(o, l); at++) bits |= (uint64_t)gets_row(o, l, at) << at;
    return bits;
}

/* The positions that a token at position n sees, before its own. */
static uint64_t seen_at(const oracle *o, int l, int n) {
    const kvc_policy *policy = &o->layers[l].policy;
    const int sinks = policy->kind == KVC_SLIDING ? least(policy->num_sink_tokens, n) : 0;
    return (bits_of(lowest_seen(policy, n), n) | bits_of(0, sinks)) & rowed(o, l);
}

int is_full_block(const oracle *o, const block *b) { return text_length(b->node) - b->begin == o->block_size; }

block *find_block(const prefix *p, int node, int begin) {
    for (int i = 0; i < p->num_blocks; i++)
        if (p->blocks[i].node == node && p->blocks[i].begin == begin) return (block *)&p->blocks[i];
    return NULL;
}

static state *find_state(const prefix *p, int node) {
    for (int i = 0; i < p->num_states; i++)
        if (p->states[i].node == node) return (state *)&p->states[i];
    return NULL;
}

/* Whether a block has the last token of a text. */
static int has_end(const block *b, int node) {
    const int length = text_length(node);
    return b->begin < length && length <= text_length(b->node) && text_begin(b->node, length) == node;
}

static void drop_block(prefix *p, block *b) { *b = p->blocks[--p->num_blocks]; }

/* A state goes with the rows of its last token. */
static void settle_states(prefix *p) {
    for (int i = p->num_states; i-- > 0;) {
        int is_sure = 1, is_there = 0;
        for (int j = 0; j < p->num_blocks; j++)
            if (has_end(&p->blocks[j], p->states[i].node)) is_there = 1, is_sure &= p->blocks[j].is_sure;
        if (!is_there)
            p->states[i] = p->states[--p->num_states];
        else if (!is_sure)
            p->states[i].is_sure = 0;
    }
}

/* Of a pinned block that is not full, the tokens may be pinned elsewhere. */
int is_pinned(const oracle *o, const prefix *p, const block *b, int surely) {
    for (int i = 0; i < p->num_pins; i++) {
        const pin *it = &p->pins[i];
        if (!it->count || (surely && it->is_loose) || b->begin >= it->kept ||
            text_common(it->node, b->node) <= b->begin)
            continue;
        const int end = text_length(b->node);
        if (!surely || (is_full_block(o, b) && end <= it->kept && text_begin(it->node, end) == b->node)) return 1;
    }
    return 0;
}

/* Where the block begins that has the last token of a text. */
static int block_of(const oracle *o, int node) { return (text_length(node) - 1) / o->block_size * o->block_size; }

/* The state that goes with what is pinned stays. */
static int is_pinned_state(const prefix *p, int node) {
    for (int i = 0; i < p->num_pins; i++) {
        const pin *it = &p->pins[i];
        if (it->count && !it->is_loose && it->kept == text_length(node) && text_begin(it->node, it->kept) == node)
            return 1;
    }
    return 0;
}

/* ---- uses -------------------------------------------------------------------------------------------------------- */

/* A call uses the blocks of the first tokens of a text, with their states: surely, or maybe. */
static void note_use(oracle *o, prefix *p, int text, int length, int is_sure) {
    for (int i = 0; i < p->num_blocks; i++) {
        block *b = &p->blocks[i];
        const int end = text_length(b->node);
        if (b->begin >= length || text_begin(text, b->begin + 1) != text_begin(b->node, b->begin + 1)) continue;
        b->may_use = o->now, b->may_ms = o->ms;
        if (is_sure && end <= length && text_begin(text, end) == b->node) b->sure_use = o->now, b->sure_ms = o->ms;
    }
    for (int i = 0; i < p->num_states; i++) {
        state *s = &p->states[i];
        const int last = text_begin(text, length), begin = block_of(o, s->node), is_own = is_sure && s->node == last;
        if (!length || begin >= length || text_begin(text, begin + 1) != text_begin(s->node, begin + 1)) continue;
        const int is_late = !is_sure || is_own || begin < block_of(o, last);
        if (s->may_use < 2 * o->now) s->may_use = 2 * o->now + is_late;
        if (is_own) s->sure_use = s->may_use = 2 * o->now + 1;
    }
}

void note_end(oracle *o, const sequence *s) {
    if (!s->prefix || !s->prompt || o->crowded) return;
    prefix *p = &o->prefixes[s->prefix - 1];
    note_use(o, p, s->prompt, text_length(s->prompt), 0);
}

/* A call may have evicted blocks; events tell of full ones. */
static void doubt(prefix *p, block *b) {
    b->is_sure = b->sure_new = 0;
    memset(b->sure, 0, sizeof b->sure);
    for (int i = 0; i < p->num_states; i++)
        if (has_end(b, p->states[i].node)) p->states[i].is_sure = 0;
}

void note_doubt(const oracle *o, prefix *p) {
    const int is_followed = p->config.max_events > 200 && !p->has_lost && !has_windows(o);
    for (int i = 0; i < p->num_blocks; i++)
        if (!is_pinned(o, p, &p->blocks[i], 1) && !(is_followed && is_full_block(o, &p->blocks[i])))
            doubt(p, &p->blocks[i]);
    for (int i = 0; i < p->num_states; i++)
        if (!is_pinned_state(p, p->states[i].node)) p->states[i].is_sure = 0;
}

void note_short(oracle *o) {
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &o->prefixes[i];
        for (int j = 0; j < p->num_blocks; j++)
            if (p->blocks[j].may_use == o->now) doubt(p, &p->blocks[j]);
        for (int j = 0; j < p->num_states; j++)
            if (p->states[j].may_use >= 2 * o->now) p->states[j].is_sure = 0;
    }
    for (int s = 0; s < SLOTS; s++)
        if (o->sequences[s].prefix) {
            o->sequences[s].was_short = 1;
            if (o->sequences[s].keeps) o->sequences[s].keeps = 1;
        }
}

void note_cleared(prefix *p) {
    p->num_blocks = p->num_states = 0;
    for (int i = 0; i < p->num_pins; i++) p->pins[i].is_loose = 1;
}

void note_time(oracle *o) {
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &o->prefixes[i];
        for (int j = p->num_blocks; p->config.ttl_ms && j-- > 0;) {
            block *b = &p->blocks[j];
            if (o->ms - b->sure_ms >= p->config.ttl_ms && !is_pinned(o, p, b, 1)) doubt(p, b);
            if (o->ms - b->may_ms > p->config.ttl_ms && !is_pinned(o, p, b, 0)) drop_block(p, b);
        }
        settle_states(p);
    }
}

/* ---- keeping ----------------------------------------------------------------------------------------------------- */

int num_whole(const oracle *o, const block *b) {
    const uint64_t range = bits_of(b->begin, text_length(b->node));
    int num = 0;
    for (int l = 0; l < o->num_layers; l++) num += b->is_sure && is_own(o, l) && !(range & rowed(o, l) & ~b->sure[l]);
    return num;
}

/* Notes that a prefix keeps a block with these rows, surely or maybe, and uses it. */
static void note_kept(oracle *o, prefix *p, int node, int begin, const uint64_t *rows, int is_sure) {
    block *b = find_block(p, node, begin);
    const int end = text_length(node);
    if (!b && p->num_blocks == BLOCKS) wrong("a prefix keeps more than %d blocks", BLOCKS);
    if (!b) *(b = &p->blocks[p->num_blocks++]) = (block){.node = node, .begin = begin};
    const int is_new = !b->may_use, is_full = is_full_block(o, b);
    uint64_t any = 0;
    for (int l = 0; l < o->num_layers; l++) any |= rows[l] & bits_of(begin, end);
    is_sure &= any != 0; /* a block is kept while it has rows of some layer */
    b->may_new |= is_full;
    b->is_sure |= is_sure;
    for (int l = 0; l < o->num_layers; l++) {
        b->may[l] |= rows[l] & bits_of(begin, end);
        if (is_sure) b->sure[l] |= rows[l] & bits_of(begin, end);
    }
    if (is_new && is_full && num_whole(o, b)) b->sure_new = 1;
    b->may_use = o->now, b->may_ms = o->ms;
    if (is_sure) b->sure_use = o->now, b->sure_ms = o->ms;
}

/* A block may have rows that its sequence has lost: rows of the same tokens in another block. */
static void note_twins(const prefix *p, block *b) {
    for (int i = 0; i < p->num_blocks; i++) {
        const block *other = &p->blocks[i];
        const int end = text_common(other->node, b->node);
        for (int l = 0; l < LAYERS && other->begin == b->begin && end > b->begin; l++)
            b->may[l] |= other->may[l] & bits_of(b->begin, end);
    }
}

/* Whether a prefix keeps anything of a sequence.  Once it has forgotten a prompt, it keeps only sequences that were
 * made since, and that no other prefix has acquired. */
static int keeps_of(const oracle *o, int prefix, const sequence *s) {
    const int horizon = o->prefixes[prefix].horizon;
    return !horizon || (s->date >= horizon && (!s->from || s->from == 1 + prefix));
}

static void rows_of(const oracle *o, const sequence *s, uint64_t *bits) {
    for (int l = 0; l < o->num_layers; l++) bits[l] = is_own(o, l) ? positions_of(&s->layers[l]) : 0;
}

/* A commit that fills a block of the prompt of an acquired sequence keeps it, and uses those before. */
void note_commit(oracle *o, const batch *b, const uint8_t *kept, int at, int old) {
    sequence *s = &o->sequences[at];
    uint64_t bits[LAYERS] = {0};
    int all = 1, is_whole = 1, is_any = 0;
    int32_t dropped = INT32_MAX; /* the lowest position that is not kept: no block has it */
    for (int t = 0; t < b->num; t++) {
        if (b->slots[t] != at) continue;
        if (!kept[t] && b->positions[t] < dropped) dropped = b->positions[t];
        all &= kept[t];
        is_any |= kept[t];
        is_whole &= all || !kept[t];
    }
    if (!s->prefix || o->crowded) return;
    prefix *p = &o->prefixes[s->prefix - 1];
    const int block_size = o->block_size, length = text_common(s->text, s->prompt);
    if (b->has_parents) s->keeps = s->keeps ? 1 : 0; /* the header leaves open whether trees fill blocks */
    int is_sure = s->keeps == 2 && s->exact_to == INT32_MAX;
    rows_of(o, s, bits);
    note_use(o, p, s->prompt, length, 0);
    int may_keep = s->keeps || s->was_short; /* then blocks come late */
    may_keep &= is_any && keeps_of(o, s->prefix - 1, s);
    for (int end = block_size; end <= length && may_keep; end += block_size) {
        const int node = text_begin(s->prompt, end);
        const block *known_block = find_block(p, node, end - block_size);
        const block before = known_block ? *known_block : (block){0};
        uint64_t any = 0;
        for (int l = 0; l < o->num_layers; l++) any |= bits[l] & bits_of(end - block_size, end);
        if (end <= old && s->keeps == 2) {
            is_sure &= !any || (known_block && known_block->is_sure);
            continue;
        }
        note_kept(o, p, node, end - block_size, bits, is_sure);
        block *now = find_block(p, node, end - block_size);
        for (int l = 0; l < o->num_layers; l++) now->may[l] |= s->had[l] & bits_of(end - block_size, end);
        if (before.node) now->sure_use = before.sure_use, now->sure_ms = before.sure_ms; /* that is open */
        is_sure &= !any || now->is_sure;
    }
    const int32_t next = next_of(o, s), exact = s->exact_to < next ? s->exact_to : next;
    const int end = (length / block_size + 1) * block_size;
    const int is_within = end <= exact && end <= dropped && end <= text_length(s->prompt);
    if (may_keep && is_within) /* positions without a token may count */
        note_kept(o, p, text_begin(s->prompt, end), end - block_size, bits, 0);
    for (int l = 0; l < o->num_layers; l++) s->had[l] |= bits[l];
    if (!all && length < text_length(s->prompt) && s->keeps) s->keeps = 1;
    if (!is_whole) stop_keeping(s);
}

/* Keeps the blocks of a sequence's first tokens; returns how many tokens. */
static int keep_blocks(oracle *o, const sequence *s, int own, int text, int is_disturbed) {
    prefix *p = &o->prefixes[own];
    const int length = text_common(text, s->text), block_size = o->block_size;
    const int is_sure = !is_disturbed;
    uint64_t bits[LAYERS] = {0};
    if (!keeps_of(o, own, s)) return 0;
    rows_of(o, s, bits);
    note_use(o, p, text, length, 0);
    for (int begin = 0; begin < length; begin += block_size) {
        const int node = text_begin(text, least(begin + block_size, length));
        note_kept(o, p, node, begin, bits, is_sure);
        block *b = find_block(p, node, begin);
        for (int l = 0; l < o->num_layers; l++) b->may[l] |= s->had[l] & bits_of(begin, text_length(node));
        note_twins(p, b);
    }
    const int32_t next = next_of(o, s), exact = s->exact_to < next ? s->exact_to : next;
    if (length < exact && length < text_length(text)) /* a position without a token may count */
        note_kept(o, p, text_begin(text, length + 1), length / block_size * block_size, bits, 0);
    return length;
}

/* Whether fewer tokens are given than are exact.  Whether positions without a token count is open, and whether those do
 * that some layer lacks since others were restored. */
static int lacks_tokens(const oracle *o, const sequence *s, const call *c) {
    const int given = text_length(c->text), next = next_of(o, s), exact = s->exact_to < next ? s->exact_to : next;
    int is_open = 0;
    for (int l = 0; l < o->num_layers; l++) is_open |= s->layers[l].missing.end;
    return given && ((given < text_length(s->text) && !is_open) || (given < exact && c->status == KVC_ERR_INVALID));
}

kvc_status right_release(oracle *o, const call *c) {
    sequence *s = &o->sequences[c->s];
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (lacks_tokens(o, s, c)) return KVC_ERR_INVALID;
    const sequence old = *s;
    end_sequence(o, s);
    if (!o->crowded) keep_blocks(o, &old, c->prefix, c->text, 0);
    return KVC_OK;
}

/* ---- states ------------------------------------------------------------------------------------------------------ */

int state_size(int text) { return LEAST_STATE + text % (MOST_STATE - LEAST_STATE + 1); }

/* Whether a pin may hold the block of a state. */
static int may_be_held(const oracle *o, const prefix *p, int node) {
    for (int i = 0; i < p->num_blocks; i++)
        if (has_end(&p->blocks[i], node) && is_pinned(o, p, &p->blocks[i], 0)) return 1;
    return 0;
}

/* Whether pinned states may leave no room for one more. */
static int may_lack_room(const oracle *o, const prefix *p, int64_t size) {
    for (int i = 0; i < p->num_states; i++)
        if (may_be_held(o, p, p->states[i].node)) size += state_size(p->states[i].node);
    return p->config.max_checkpoint_bytes && size > p->config.max_checkpoint_bytes;
}

/* Drops states beyond max_checkpoint_bytes, the least recently used first: those stay surely that fit beside all that
 * may have been used since. */
static void limit_states(const oracle *o, prefix *p) {
    for (int i = 0; i < p->num_states; i++) {
        int64_t sum = 0;
        for (int j = 0; j < p->num_states; j++)
            if (p->states[j].may_use >= p->states[i].sure_use || may_be_held(o, p, p->states[j].node))
                sum += state_size(p->states[j].node);
        if (is_pinned_state(p, p->states[i].node)) continue;
        if (p->config.max_checkpoint_bytes && sum > p->config.max_checkpoint_bytes) p->states[i].is_sure = 0;
    }
}

/* Whether a state was ever kept behind a text, so that a store may have it. */
static uint8_t had_state[MOST_TEXTS];

static void note_state(oracle *o, prefix *p, int node, int is_sure, int time) {
    state *s = find_state(p, node);
    const int is_new = !s, was_sure = s && s->is_sure;
    int is_last = 1;
    if (!s && p->num_states == STATES) wrong("a prefix keeps more than %d states", STATES);
    if (!s) *(s = &p->states[p->num_states++]) = (state){.node = node};
    *s = (state){node, s->is_sure || is_sure, time, 2 * o->now + 1, 2 * o->now + 1};
    had_state[node] = 1;
    if (!is_sure) s->is_sure = 0;
    limit_states(o, p);
    for (int i = 0; i < p->num_blocks; i++) { /* a full block with a new state is listed again, if it is its last one */
        block *b = &p->blocks[i];
        if (!has_end(b, node) || !is_full_block(o, b) || was_sure) continue;
        b->may_new = 1;
        for (int j = 0; j < p->num_states; j++)
            is_last &= text_length(p->states[j].node) <= text_length(node) || !has_end(b, p->states[j].node);
        if (is_new && is_last && b->is_sure && find_state(p, node)->is_sure && time) b->sure_new = 1;
    }
}

/* Keeps blocks and, with begin, a state of so many bytes. */
kvc_status right_checkpoint(oracle *o, const call *c) {
    sequence *s = &o->sequences[c->s];
    prefix *p = &o->prefixes[c->prefix];
    const int given = text_length(c->text);
    if (c->begin > p->config.state_bytes || (c->begin && !given)) return KVC_ERR_INVALID;
    if (is_busy(o, c->s)) return KVC_ERR_BUSY;
    if (c->status == KVC_ERR_INVALID && lacks_tokens(o, s, c)) return KVC_ERR_INVALID;
    if (o->crowded) return KVC_OK;
    const int length = keep_blocks(o, s, c->prefix, c->text, c->is_disturbed || c->status), last = length - 1;
    const int lacks = c->begin && length && may_lack_room(o, p, c->begin);
    if (c->status) return lacks ? KVC_ERR_FULL : KVC_OK;
    uint64_t own = 0;
    for (int l = 0; l < o->num_layers; l++) own |= is_own(o, l) ? positions_of(&s->layers[l]) : 0;
    if (c->begin && length && length == given && p->horizon <= c->began) /* it forgot no prompt meanwhile */
        note_state(o, p, c->text, !c->is_disturbed && own >> last & 1 && known(o, p, c->text, length, 1, 0) == length,
                   c->began);
    return KVC_OK;
}

/* A state within a block may have come with it, and the rows up to there may count as a block. */
static void note_inner(oracle *o, prefix *p, int node) {
    uint64_t all[LAYERS];
    memset(all, 0xff, sizeof all);
    note_kept(o, p, node, (text_length(node) - 1) / o->block_size * o->block_size, all, 0);
    if (!find_state(p, node)) note_state(o, p, node, 0, 0);
}

/* A call has fetched blocks of a text from a store, or was about to: all of them may be there, unless a forget is to be
 * ended. */
void note_fetched(oracle *o, prefix *p, int text) {
    uint64_t all[LAYERS];
    memset(all, 0xff, sizeof all);
    const int length = p->num_forgets ? 0 : text_length(text);
    p->has_fetched = 1;
    for (int end = o->block_size; end <= length; end += o->block_size)
        note_kept(o, p, text_begin(text, end), end - o->block_size, all, 0);
    for (int end = 1; end <= length; end++)
        if (had_state[text_begin(text, end)]) note_inner(o, p, text_begin(text, end));
    note_use(o, p, text, text_length(text), 0);
}

/* Where layers see everything and nothing is limited, a fetch brings all blocks that the store has, up to one that is
 * neither there nor kept: marks and positions say which the store has, and behind which token their states stand. */
void note_read(oracle *o, prefix *p, const call *c) {
    const int length = text_length(c->text), limit = c->delta < 0 || c->delta > length - 1 ? length - 1 : c->delta;
    uint64_t all[LAYERS];
    memset(all, 0xff, sizeof all);
    for (int i = 0, end = o->block_size; end <= limit; i++, end += o->block_size) {
        const int node = text_begin(c->text, end);
        const block *b = find_block(p, node, end - o->block_size);
        if (!c->marks[i] && !(b && num_whole(o, b) && b->is_sure)) return;
        if (c->marks[i] && c->positions[i] && may_lack_room(o, p, STATE)) return; /* a fetch ends where there is none */
        const int is_there = b && b->is_sure, is_new = b && b->sure_new;
        int has_state = 0; /* if it does, it may not be read for another one */
        for (int j = 0; j < p->num_states; j++) has_state |= b && has_end(b, p->states[j].node);
        note_kept(o, p, node, end - o->block_size, all, 1);
        if (!is_there) find_block(p, node, end - o->block_size)->sure_new = is_new;
        const int with_state =
            c->marks[i] && p->config.state_bytes && !has_state ? text_begin(c->text, c->positions[i]) : 0;
        if (with_state) note_state(o, p, with_state, 1, 0);
    }
}

/* ---- what is known ----------------------------------------------------------------------------------------------- */

/* How many tokens are known of a text that begins with pinned ones: as many as when these were pinned.  Of a part of a
 * pinned text, fewer may be, as blocks behind the known tokens may be needed. */
static int pinned_length(const prefix *p, int text) {
    int most = 0;
    for (const pin *it = p->pins; it < p->pins + p->num_pins; it++)
        if (it->count && !it->is_loose && it->kept > most && text_common(it->node, text) == text_length(it->node))
            most = it->kept;
    return most;
}

int known(const oracle *o, const prefix *p, int text, int limit, int surely, int with_states) {
    const int length = least(limit, text_length(text)); /* where the prompt counts as ended */
    uint64_t bits[LAYERS] = {0};
    int end = 0;
    text = text_begin(text, length);
    const int pinned = surely ? pinned_length(p, text) : 0;
    for (int i = 0; i < p->num_blocks; i++) {
        const block *b = &p->blocks[i];
        const int common = least(text_common(b->node, text), length);
        if ((surely && !b->is_sure) || b->begin >= length || common <= b->begin) continue;
        for (int l = 0; l < o->num_layers; l++) bits[l] |= (surely ? b->sure : b->may)[l] & bits_of(0, common);
        if (common > end) end = common;
    }
    for (int n = end; n > pinned; n--) {
        const state *s = find_state(p, text_begin(text, n));
        int shows = !with_states || !p->config.state_bytes || (s && (s->is_sure || !surely));
        for (int l = 0; l < o->num_layers; l++) shows &= !is_own(o, l) || !(seen_at(o, l, n) & ~bits[l]);
        if (shows) return n;
    }
    return pinned;
}

/* The first n tokens of a text are there, as the library said. */
static void learn(const oracle *o, prefix *p, int text, int n) {
    for (int begin = 0; begin < n; begin += o->block_size) {
        block *b = NULL;
        int num = 0; /* blocks that may have the rows of these tokens */
        for (int i = 0; i < p->num_blocks; i++)
            if (p->blocks[i].begin == begin && text_common(p->blocks[i].node, text) > begin) b = &p->blocks[i], num++;
        for (int l = 0; l < o->num_layers && num == 1; l++) {
            const uint64_t bits = is_own(o, l) ? b->may[l] & seen_at(o, l, n) : 0;
            b->sure[l] |= bits;
            b->is_sure |= bits != 0;
        }
    }
}

static void check_known(const oracle *o, const prefix *p, int text, int limit, int64_t found, int with_states) {
    const int sure = known(o, p, text, limit, 1, with_states), may = known(o, p, text, limit, 0, with_states);
    if (found < sure || found > may)
        wrong("prefix %d: of %s, up to %d, %d tokens %s, but %d to %d", (int)(p - o->prefixes), spell(text), limit,
              (int)found, with_states ? "are known" : "have rows", sure, may);
}

kvc_status right_lookup(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    if (o->crowded || c->status) return KVC_OK;
    check_known(o, p, c->text, text_length(c->text), c->result, 1);
    if (c->more >= 0) check_known(o, p, c->text, text_length(c->text), c->more, 0);
    if (c->more >= 0 && (c->more < c->result || (!p->config.state_bytes && c->more != c->result)))
        wrong("%d tokens are known, and %d have rows", (int)c->result, (int)c->more);
    learn(o, p, c->text, (int)c->result);
    return KVC_OK;
}

/* Checks that a row of a match is the row of its token, computed since the prefix forgot it. */
static void check_row(const prefix *p, const call *c, int position, const token *t) {
    if (t->text != text_begin(c->text, position + 1) && t->text >= 0)
        wrong("%s: the row at %d was computed for %s", spell(c->text), position, spell(t->text));
    const int time = forgotten_at(p, text_begin(c->text, position + 1), t->time, c->began);
    if (time)
        wrong("%s: the row at %d was computed at %d, and forgotten at %d", spell(c->text), position, t->time, time);
}

/* A new sequence holds what is known of a prompt; more: how much of it was reused from elsewhere. */
kvc_status right_acquire(oracle *o, const call *c) {
    prefix *p = &o->prefixes[c->prefix];
    const int length = text_length(c->text), matched = (int)c->result, exact = matched - (int)c->more;
    const int limit = c->delta < 0 || c->delta > length - 1 ? length - 1 : c->delta;
    sequence *s = &o->sequences[c->to];
    const int is_open = s->is_open; /* others may have changed it before it was looked at */
    if (!length) return KVC_ERR_INVALID;
    if (c->status) {
        note_use(o, p, c->text, length, 0);
        return KVC_OK;
    }
    if (matched < 0 || matched > limit) wrong("%d tokens are matched, of at most %d", matched, limit);
    const int is_alone =
        !o->crowded && !c->is_disturbed; /* calls that came between may have kept blocks, or used them */
    if (is_alone) check_known(o, p, c->text, limit, exact, 1);
    if (c->more && c->more < p->config.reuse_min_tokens) wrong("%d tokens are reused", (int)c->more);
    *s = (sequence){.exact_to = c->more ? exact : INT32_MAX,
                    .text = text_begin(c->text, exact),
                    .from = 1 + c->prefix,
                    .prefix = 1 + c->prefix,
                    .prompt = c->text,
                    .prompt_bytes = c->end * (length - exact),
                    .keeps = 2,
                    .date = c->began};
    s->state = p->config.state_bytes ? s->text : 0;
    for (int l = 0; l < o->num_layers; l++)
        for (int32_t at = 0; is_own(o, l) && at < matched; at++) {
            const int32_t tag = c->tags[l][at];
            if (tag < 0 && gets_row(o, l, at)) widen(&s->layers[l].lost, at);
            if (tag < 0) continue;
            if (at < exact && !is_open) check_row(p, c, at, &tokens[tag]);
            if (at >= exact && tokens[tag].symbol != text_symbol(text_begin(c->text, at + 1)))
                wrong("%s: the row at %d is of another token", spell(c->text), at);
            row r = new_row(at, tag);
            for (int other = 0; other < SLOTS; other++)
                for (int i = 0; other != c->to && i < o->sequences[other].layers[l].num; i++) {
                    const row *twin = &o->sequences[other].layers[l].at[i];
                    o->has_twins |= twin->tag == tag && (twin->slot != tag || o->has_fetched);
                }
            if (has_rope(o, l, KVC_ROPE_FREQUENCIES) && !has_rope(o, l, KVC_ROPE_FUNCTION))
                r.delta = at - tokens[tag].base;
            if (tokens[tag].base != at && has_rope(o, l, KVC_ROPE_FUNCTION)) r.slot = o->next_slot++;
            add_row(&s->layers[l], r);
        }
    if (misses(o, s, exact) && !c->more && !is_open)
        wrong("%s: rows are lacking behind %d tokens", spell(c->text), matched);
    if (o->crowded) return KVC_OK;
    p->requests++, p->tokens += length, p->matched += matched, p->hits += matched > 0, p->reused += c->more;
    note_use(o, p, c->text, exact, is_alone);
    note_use(o, p, c->text, length, 0);
    if (!o->config.max_bytes) learn(o, p, c->text, exact); /* otherwise the call may drop blocks that it matched */
    return KVC_OK;
}
