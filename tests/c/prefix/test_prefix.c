/* Prefixes against a dictionary: what is kept is a list of token strings, and a prompt matches as many of its first
 * tokens as it has in common with one of them.  Each row says what its sequence's tokens were when it was computed, so
 * that no row is taken for that of other tokens. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, nanosleep */
#include <time.h>

#include "support/feeding.h"
#include "support/pairs.h"

enum {
    MOST_EVENTS = 256,
    STATE = 16,
    MOST_STATES = 3, /* bytes of a recurrent state; states that the last prefix keeps */
    QUOTA = 10,
    BLOCK = 4,
    MOST_TOKENS = 48,
    MOST_LIVE = 6,
    MOST_KEPT = 4096,
    NUM_PREFIXES = 3,
    DIM = 8
};

/* ---- tokens ------------------------------------------------------------------------------------------------------ */

typedef struct text {
    int32_t num;
    int64_t ids[MOST_TOKENS];
    uint8_t digests[MOST_TOKENS][KVC_NAME_BYTES];
} text;

static kvc_tokens tokens_of(const text *t) {
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = t->ids, .num_tokens = t->num, .digests = *t->digests};
}

static int is_same_token(const text *a, const text *b, int32_t i) {
    return a->ids[i] == b->ids[i] && !memcmp(a->digests[i], b->digests[i], KVC_NAME_BYTES);
}

static int32_t common(const text *a, const text *b) {
    int32_t i = 0;
    while (i < a->num && i < b->num && is_same_token(a, b, i)) i++;
    return i;
}

static void add_token(text *t) {
    const int is_digest = random_int(0, 12) == 0;
    t->ids[t->num] = is_digest ? 0 : random_int(0, 3);
    memset(t->digests[t->num], 0, KVC_NAME_BYTES);
    if (is_digest) t->digests[t->num][random_int(0, 2)] = 7;
    t->num++;
}

/* Returns what the row at a position says of the tokens up to there. */
static float row_of(const text *t, int32_t position) {
    uint32_t hash = 2166136261u;
    for (int32_t i = 0; i <= position; i++) {
        hash = (hash ^ (uint32_t)t->ids[i]) * 16777619u;
        hash = (hash ^ (uint32_t)(t->digests[i][0] * 3 + t->digests[i][1])) * 16777619u;
    }
    return (float)(hash >> 9);
}

/* ---- the dictionary ---------------------------------------------------------------------------------------------- */

typedef struct live {
    int64_t id;
    int prefix;
    text tokens;      /* fed, or to be fed first */
    int32_t fed;      /* of these */
    int32_t prompt;   /* tokens of the prompt that are still those that were given; 0 once it was edited */
    int32_t kept;     /* of these, in blocks that are full */
    int32_t exact_to; /* position from which on rows say something else */
    int is_acquired;  /* it is known to its prefix, though it may hold nothing */
    int is_partial;   /* windows may have lost rows of blocks that nobody keeps */
    int forgotten_in; /* a bit for each prefix that may keep no more of its blocks */
} live;

typedef struct world {
    kvc_cache *cache;
    int num_layers;
    int may_lose; /* whether anything may be evicted */
    int is_windowed;
    kvc_prefix *prefixes[NUM_PREFIXES];
    live sequences[MOST_LIVE];
    int num_live;
    text kept[NUM_PREFIXES][MOST_KEPT];   /* every string whose tokens are kept */
    int is_sure[NUM_PREFIXES][MOST_KEPT]; /* whether all of its rows are */
    int num_kept[NUM_PREFIXES];
    int has_states;                       /* of a model beside its rows: a match ends where one is kept */
    text states[NUM_PREFIXES][MOST_KEPT]; /* the strings behind which one was kept */
    int num_states[NUM_PREFIXES];
    int may_lose_states[NUM_PREFIXES];
    int have_forgotten; /* a bit for each prefix that has forgotten a prompt */
    uint8_t followed[MOST_KEPT][KVC_NAME_BYTES]; /* names of the blocks that the first prefix has by its events */
    int num_followed, lost_events;
    int64_t next_id; /* of sequences that no prefix has acquired */
} world;

static world w;

static int32_t best(int prefix, const text *t, int is_sure) {
    int32_t most = 0;
    for (int i = 0; i < w.num_kept[prefix]; i++)
        if (w.is_sure[prefix][i] >= is_sure && common(&w.kept[prefix][i], t) > most)
            most = common(&w.kept[prefix][i], t);
    return most;
}

static void remember(int prefix, const text *t, int32_t num, int is_sure) {
    const int n = w.num_kept[prefix];
    text first = *t;
    first.num = num;
    if (best(prefix, &first, is_sure) >= num || n == MOST_KEPT) return;
    w.kept[prefix][n] = first;
    w.is_sure[prefix][n] = is_sure;
    w.num_kept[prefix]++;
}

/* Writes the state after the first `num` tokens; returns its bytes. */
static int64_t state_of(const text *t, int32_t num, uint8_t *state) {
    const float row = row_of(t, num - 1);
    memset(state, num, STATE);
    memcpy(state, &row, sizeof row);
    return STATE - num % 3;
}

/* Checks that a match ends at the last state within it. */
static void check_state(int prefix, const text *t, int32_t found, int32_t limit) {
    int32_t most = 0;
    int is_one = !found;
    for (int i = 0; i < w.num_states[prefix]; i++) {
        const text *other = &w.states[prefix][i];
        if (other->num > limit || common(other, t) < other->num) continue;
        if (other->num > most) most = other->num;
        is_one |= other->num == found;
    }
    CHECKF(is_one && found <= most, "%d of %d tokens are found, not %d", found, t->num, most);
    CHECKF(found == most || w.may_lose || w.is_windowed || w.may_lose_states[prefix],
           "%d of %d tokens are found, not %d", found, t->num, most);
}

/* Checks how much of a prompt was found: windows may lack rows behind the last full block. */
static void check_found(int prefix, const text *t, int32_t found, int32_t limit) {
    if (w.has_states) {
        check_state(prefix, t, found, limit);
        return;
    }
    int32_t most = best(prefix, t, 0), least = best(prefix, t, 1);
    if (most > limit) most = limit;
    if (least > limit) least = limit;
    if (w.is_windowed) least -= least % BLOCK;
    CHECKF(found <= most, "%d of %d tokens are found, not %d", found, t->num, most);
    CHECKF(found >= least || w.may_lose, "%d of %d tokens are found, at least %d are there", found, t->num, least);
}

/* Checks that a sequence's rows are those of its tokens, and that a query at the next position has all it sees. */
static void check_rows(const live *s) {
    CHECK(kvc_next_position(w.cache, s->id) == s->fed && kvc_can_resume(w.cache, s->id, s->fed));
    for (int l = 0; l < w.num_layers; l++) {
        static float k[MOST_TOKENS][DIM];
        int32_t positions[MOST_TOKENS];
        const int64_t num = kvc_seq_len(w.cache, s->id, l);
        const kvc_rows_out out = {.struct_size = sizeof out,
                                  .k = k,
                                  .k_row_stride = sizeof *k,
                                  .k_head_stride = sizeof k,
                                  .positions = positions};
        CHECK(kvc_gather(w.cache, s->id, l, 0, num, &out) == KVC_OK);
        for (int64_t i = 0; i < num && positions[i] < s->exact_to; i++)
            CHECKF(k[i][0] == row_of(&s->tokens, positions[i]), "the row at %d is that of other tokens", positions[i]);
    }
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static void forget_live(int i) { w.sequences[i] = w.sequences[--w.num_live]; }

/* Makes a prompt, mostly one that begins like another. */
static void make_prompt(int prefix, text *t) {
    t->num = 0;
    if (w.num_kept[prefix] && random_int(0, 4)) {
        *t = w.kept[prefix][random_int(0, w.num_kept[prefix])];
        t->num = random_int(0, t->num + 1);
    }
    const int32_t more = random_int(t->num ? 0 : 1, 14);
    for (int32_t i = 0; i < more && t->num < MOST_TOKENS - 12; i++) add_token(t);
}

/* Checks that the state that a sequence goes on from is that of its tokens. */
static void check_restored(const live *s, int32_t matched) {
    uint8_t state[STATE], wanted[STATE];
    int64_t num = -1;
    CHECK(kvc_prefix_state(w.prefixes[s->prefix], s->id, state, STATE, &num) == KVC_OK);
    if (!w.has_states || !matched)
        CHECK(!num);
    else
        CHECK(num == state_of(&s->tokens, matched, wanted) && !memcmp(state, wanted, (size_t)num));
}

static void step_acquire(void) {
    if (w.num_live == MOST_LIVE) return;
    live *s = &w.sequences[w.num_live];
    int32_t matched = -1, seen = -1;
    *s = (live){.id = -1, .prefix = random_int(0, NUM_PREFIXES), .exact_to = INT32_MAX};
    make_prompt(s->prefix, &s->tokens);
    const kvc_tokens tokens = tokens_of(&s->tokens);
    const int64_t most = random_int(0, 4) ? -1 : random_int(0, s->tokens.num + 2);
    const int32_t limit = most < 0 || most >= s->tokens.num ? s->tokens.num - 1 : (int32_t)most;
    CHECK(kvc_prefix_lookup(w.prefixes[s->prefix], &tokens, &seen, NULL) == KVC_OK);
    check_found(s->prefix, &s->tokens, seen, s->tokens.num);
    CHECKF(kvc_prefix_acquire(w.prefixes[s->prefix], &tokens, most, &s->id, &matched) == KVC_OK, "%s",
           kvc_last_error());
    check_found(s->prefix, &s->tokens, matched, limit);
    const int32_t most_matched = seen < limit ? seen : limit;
    CHECKF(w.is_windowed || w.has_states || matched == most_matched, "%d matched, %d seen", matched, seen);
    check_restored(s, matched);
    for (int i = 0; i < w.num_live; i++) CHECK(w.sequences[i].id != s->id);
    s->is_acquired = 1;
    s->forgotten_in = matched ? w.have_forgotten & ~(1 << s->prefix) : 0; /* perhaps: others may have older blocks */
    s->fed = matched;
    s->prompt = s->tokens.num;
    s->kept = matched / BLOCK * BLOCK;
    s->is_partial = w.is_windowed && matched > best(s->prefix, &s->tokens, 1);
    check_rows(s);
    w.num_live++;
}

/* Notes which blocks of the prompt are full now. */
static void note_full(live *s) {
    int32_t end = s->fed < s->prompt ? s->fed : s->prompt;
    if (end > s->exact_to) end = s->exact_to;
    if (end / BLOCK * BLOCK > s->kept) s->kept = end / BLOCK * BLOCK;
    remember(s->prefix, &s->tokens, s->kept, !s->is_partial);
}

/* Notes that the tokens from a position on are others than those that were given. */
static void note_edit(live *s, int32_t position) {
    const int32_t full = position / BLOCK * BLOCK;
    if (s->prompt > full) s->prompt = full;
    if (s->kept > full) s->kept = full;
    s->is_partial |= w.is_windowed;
}

static void put_rows(kvc_batch *batch, const live *s, int32_t num) {
    static float rows[MOST_TOKENS][DIM];
    for (int32_t i = 0; i < num; i++)
        for (int d = 0; d < DIM; d++)
            rows[i][d] = s->fed + i < s->exact_to ? row_of(&s->tokens, s->fed + i) : -1.0f - (float)i;
    for (int l = 0; l < w.num_layers; l++) put_floats(batch, l, 0, num, 1, DIM, DIM, rows, rows);
}

/* Feeds some tokens: those of the prompt, then others; of some of them only the first are kept. */
static void step_feed(void) {
    if (!w.num_live) return;
    live *s = &w.sequences[random_int(0, w.num_live)];
    const int32_t num = random_int(1, 10), before = s->tokens.num;
    int32_t kept[16], num_kept = random_int(0, 4) ? num : random_int(0, num + 1);
    kvc_batch *batch = NULL;
    kvc_prefix_stats stats[2];
    kvc_prefix_get_stats(w.prefixes[2], &stats[0], sizeof *stats);
    while (s->tokens.num < s->fed + num && s->tokens.num < MOST_TOKENS) add_token(&s->tokens);
    const int begins = s->fed + num <= MOST_TOKENS && begin_at_end(w.cache, s->id, num, &batch) == KVC_OK;
    kvc_prefix_get_stats(w.prefixes[2], &stats[1], sizeof *stats);
    CHECKF(stats[1].held >= stats[0].held || stats[1].held > QUOTA - BLOCK, "%lld of %lld tokens are left",
           (long long)stats[1].held, (long long)stats[0].held);
    if (!begins) {
        CHECKF(s->fed + num > MOST_TOKENS || w.may_lose, "%s", kvc_last_error());
        s->tokens.num = before;
        return;
    }
    put_rows(batch, s, num);
    for (int32_t i = 0; i < num; i++) kept[i] = i;
    if (!random_int(0, 8)) {
        kvc_abort(batch);
        num_kept = 0;
    } else if (num_kept == num) {
        CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    } else {
        CHECKF(kvc_commit_kept(batch, kept, num_kept) == KVC_OK, "%s", kvc_last_error());
        note_edit(s, s->fed + num_kept); /* windows have moved on when its blocks are kept, and other tokens may come */
    }
    s->fed += num_kept;
    if (s->tokens.num > before) s->tokens.num = s->fed > before ? s->fed : before;
    note_full(s);
}

/* Takes tokens back, or makes rows inexact: moves some, writes others in their place, says so. */
static void step_edit(void) {
    if (!w.num_live) return;
    live *s = &w.sequences[random_int(0, w.num_live)];
    static const float row[DIM];
    const int32_t at = random_int(0, s->fed + 1), end = random_int(at, s->fed + 2);
    const int was_empty = !s->fed;
    kvc_status status;
    switch (random_int(0, 4)) {
    case 0:
        if (kvc_truncate(w.cache, s->id, at) != KVC_OK || at >= s->fed) return; /* it drops nothing */
        if (s->exact_to >= at && s->exact_to < s->fed) s->exact_to = INT32_MAX;
        s->fed = s->tokens.num = kvc_next_position(w.cache, s->id); /* less, if those before were removed */
        if (!s->fed && !was_empty) {                                /* it has ended */
            s->is_acquired = 0;
            s->exact_to = INT32_MAX;
        }
        note_edit(s, at);
        if (kvc_can_resume(w.cache, s->id, s->fed)) return;
        CHECK(kvc_clear_sequence(w.cache, s->id) == KVC_OK); /* its window has moved on from before what was removed */
        forget_live((int)(s - w.sequences));
        return;
    case 1:
        CHECK(kvc_mark_inexact(w.cache, s->id, at) == KVC_OK);
        if ((s->fed || s->is_acquired) && at < s->exact_to) s->exact_to = at;
        return;
    case 2:
        if (end >= s->fed || at == end || kvc_remove(w.cache, s->id, at, end, 0) != KVC_OK) return;
        break;
    default:
        if (at >= s->fed) return;
        status = kvc_inject(w.cache, s->id, 0, at, at + 1,
                            &(kvc_rows_in){.struct_size = sizeof(kvc_rows_in), .k = row, .v = row});
        CHECK(status == KVC_OK || status == KVC_ERR_INDEX || w.may_lose);
        if (status != KVC_OK) return;
    }
    if (at < s->exact_to) s->exact_to = at;
    note_edit(s, at);
}

/* Copies a sequence: the copy is nobody's, and exact where the first is. */
static void step_fork(void) {
    if (!w.num_live || w.num_live == MOST_LIVE) return;
    const live *from = &w.sequences[random_int(0, w.num_live)];
    live *s = &w.sequences[w.num_live];
    *s = *from;
    s->id = kvc_new_sequence(w.cache);
    s->prompt = s->kept = s->is_acquired = 0;
    s->is_partial = w.is_windowed;
    if (from->fed && kvc_fork(w.cache, from->id, s->id) == KVC_OK) w.num_live++;
}

static void step_release(void) {
    if (!w.num_live) return;
    const int i = random_int(0, w.num_live);
    live *s = &w.sequences[i];
    text t = s->tokens;
    if (!random_int(0, 5) && t.num < MOST_TOKENS) add_token(&t); /* was not fed */
    const kvc_tokens tokens = tokens_of(&t);
    const int prefix = random_int(0, 6) ? s->prefix : random_int(0, NUM_PREFIXES); /* of any sequence */
    CHECK(kvc_prefix_release(w.prefixes[prefix], s->id, &tokens) == KVC_OK);
    CHECK(kvc_next_position(w.cache, s->id) == 0);
    int32_t end = s->fed < s->exact_to ? s->fed : s->exact_to;
    const int has_all = !w.is_windowed || (prefix == s->prefix && !s->is_partial);
    remember(prefix, &s->tokens, end, has_all && !(s->forgotten_in >> prefix & 1));
    forget_live(i);
}

/* Keeps the state behind some of a sequence's tokens, or behind more than it holds. */
static void step_checkpoint(void) {
    if (!w.num_live || !w.has_states) return;
    const live *s = &w.sequences[random_int(0, w.num_live)];
    const int prefix = random_int(0, 6) ? s->prefix : random_int(0, NUM_PREFIXES);
    text t = s->tokens;
    uint8_t state[STATE] = {0};
    t.num = random_int(0, 2) ? s->fed : random_int(0, t.num + 1);
    if (!t.num) return;
    const kvc_tokens tokens = tokens_of(&t);
    const int64_t size = random_int(0, 8) ? state_of(&t, t.num, state) : 0;
    const kvc_status status = kvc_prefix_checkpoint(w.prefixes[prefix], s->id, &tokens, state, size);
    CHECKF(status == KVC_OK || (status == KVC_ERR_FULL && w.may_lose), "%s", kvc_last_error());
    if (status != KVC_OK || !size || t.num > s->fed || t.num > s->exact_to) return;
    if (w.num_states[prefix] < MOST_KEPT) w.states[prefix][w.num_states[prefix]++] = t;
    w.may_lose_states[prefix] |= (prefix == 2 && w.num_states[prefix] > MOST_STATES) || s->forgotten_in >> prefix & 1;
}

static void step_clear(void) {
    if (!w.num_live) return;
    const int i = random_int(0, w.num_live);
    CHECK(kvc_clear_sequence(w.cache, w.sequences[i].id) == KVC_OK);
    forget_live(i);
}

/* Forgets what is kept; blocks that live sequences fill have gaps before them then. */
static void forget_kept(int prefix) {
    w.num_kept[prefix] = 0;
    for (int i = 0; i < w.num_live; i++)
        if (w.sequences[i].prefix == prefix) w.sequences[i].is_partial = 1;
}

/* Forgets a prompt; what goes on from it is not found until it is computed again. */
static void step_forget(void) {
    const int prefix = random_int(0, NUM_PREFIXES);
    text t;
    int32_t seen;
    int64_t num, num_names;
    kvc_prefix_stats before, after;
    if (random_int(0, 10)) return;
    make_prompt(prefix, &t);
    const kvc_tokens tokens = tokens_of(&t);
    kvc_prefix_get_stats(w.prefixes[prefix], &before, sizeof before);
    CHECK(kvc_prefix_forget(w.prefixes[prefix], &tokens, NULL, 0, &num_names, &num) == KVC_OK && num_names == 0);
    kvc_prefix_get_stats(w.prefixes[prefix], &after, sizeof after);
    CHECK(before.held - after.held == num);
    CHECK(kvc_prefix_lookup(w.prefixes[prefix], &tokens, &seen, NULL) == KVC_OK);
    CHECKF(seen == 0, "%d tokens of a forgotten prompt are known", seen);
    for (int i = 0; i < w.num_kept[prefix]; i++)
        if (common(&w.kept[prefix][i], &t)) w.is_sure[prefix][i] = 0;
    if (t.num) w.have_forgotten |= 1 << prefix;
    for (int i = 0; i < w.num_live && t.num; i++) {
        w.sequences[i].forgotten_in |= 1 << prefix; /* perhaps */
        if (w.sequences[i].prefix == prefix) w.sequences[i].is_partial = 1;
    }
    w.may_lose_states[prefix] = 1;
}

static void step_drop(void) {
    const int prefix = random_int(0, NUM_PREFIXES);
    int64_t num;
    kvc_prefix_stats before, after;
    if (random_int(0, 10)) return;
    kvc_prefix_get_stats(w.prefixes[prefix], &before, sizeof before);
    CHECK(kvc_prefix_evict(w.prefixes[prefix], random_int(0, 2) ? 0 : INT64_MAX, &num) == KVC_OK);
    kvc_prefix_get_stats(w.prefixes[prefix], &after, sizeof after);
    CHECK(before.held - after.held == num && after.held >= 0);
    if (num == before.held) CHECK(after.blocks == 0);
    CHECK(kvc_prefix_clear(w.prefixes[prefix]) == KVC_OK);
    kvc_prefix_get_stats(w.prefixes[prefix], &after, sizeof after);
    CHECK(after.blocks == 0 && after.held == 0);
    forget_kept(prefix);
    w.num_states[prefix] = w.may_lose_states[prefix] = 0;
    for (int i = 0; i < w.num_live; i++) /* tokens are not known any more until they are released */
        if (w.sequences[i].prefix == prefix) w.sequences[i].prompt = 0;
}

/* Forgets what is kept but in the blocks of the first `num` tokens of a prompt, which may go on otherwise. */
static void forget_unpinned(int prefix, const text *t, int32_t num) {
    int n = 0;
    for (int i = 0; i < w.num_kept[prefix]; i++) {
        text *other = &w.kept[prefix][i];
        const int32_t same = common(other, t) < num ? common(other, t) : num;
        if (!same) continue;
        if (other->num > (same / BLOCK + 1) * BLOCK) other->num = (same / BLOCK + 1) * BLOCK;
        w.kept[prefix][n] = *other;
        w.is_sure[prefix][n++] = 0;
    }
    forget_kept(prefix);
    w.num_kept[prefix] = n;
}

/* Pins a prompt, takes the pin back, and checks that what was pinned stays meanwhile. */
static void step_pin(void) {
    const int prefix = random_int(0, NUM_PREFIXES);
    text t;
    int32_t kept, seen;
    int64_t num;
    if (random_int(0, 12)) return;
    make_prompt(prefix, &t);
    const kvc_tokens tokens = tokens_of(&t);
    CHECK(kvc_prefix_pin(w.prefixes[prefix], &tokens, &kept) == KVC_OK && kept <= t.num);
    CHECK(kvc_prefix_evict(w.prefixes[prefix], INT64_MAX, &num) == KVC_OK);
    CHECK(kvc_prefix_lookup(w.prefixes[prefix], &tokens, &seen, NULL) == KVC_OK);
    CHECKF(seen == kept, "%d of %d pinned tokens are there", seen, kept);
    CHECK(kvc_prefix_unpin(w.prefixes[prefix], &tokens) == KVC_OK);
    CHECK(kvc_prefix_unpin(w.prefixes[prefix], &tokens) == KVC_OK); /* there is no other pin */
    forget_unpinned(prefix, &t, kept);
    w.may_lose_states[prefix] = 1;
    t.num = kept;
    remember(prefix, &t, kept, !w.is_windowed);
}

static void new_world_of(const kvc_policy *policies, int num_layers, kvc_config config, int has_states) {
    kvc_layer layers[MAX_LAYERS];
    for (int l = 0; l < num_layers; l++)
        layers[l] = (kvc_layer){
            .num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = policies[l], .rope = {.kind = KVC_ROPE_NONE}};
    memset(&w, 0, sizeof w);
    w.cache = heap_cache(num_layers, layers, config);
    w.num_layers = num_layers;
    w.has_states = has_states;
    w.may_lose = config.capacity || config.max_bytes;
    for (int l = 0; l < num_layers; l++) w.is_windowed |= policies[l].kind != KVC_FULL;
    for (int i = 0; i < NUM_PREFIXES; i++) {
        const kvc_prefix_config one = {.struct_size = sizeof one,
                                       .fingerprint = i < 2 ? "a model" : "another",
                                       .salt = i ? "a tenant" : NULL,
                                       .salt_size = i ? 8 : 0,
                                       .quota = i == 2 ? QUOTA : 0,
                                       .ttl_ms = i == 1 ? INT32_MAX : 0,
                                       .max_events = i ? 0 : MOST_EVENTS,
                                       .state_bytes = has_states ? STATE : 0,
                                       .max_checkpoint_bytes = has_states && i == 2 ? MOST_STATES * STATE : 0};
        CHECKF(kvc_prefix_new(w.cache, &one, &w.prefixes[i]) == KVC_OK, "%s", kvc_last_error());
    }
}

static void new_world(const kvc_policy *policies, int num_layers, kvc_config config) {
    new_world_of(policies, num_layers, config, 0);
}

/* Follows the events of the first prefix: the blocks that are known by them are as many as the cache has, and each is
 * one that was kept. */
static void follow_events(void) {
    kvc_prefix_event events[MOST_EVENTS];
    int64_t num, lost;
    if (w.lost_events) return;
    CHECK(kvc_prefix_take_events(w.prefixes[0], events, sizeof *events, MOST_EVENTS, &num, &lost) == KVC_OK);
    w.lost_events = lost != 0;
    for (int64_t i = 0; i < num; i++) {
        int at = 0;
        while (at < w.num_followed && memcmp(w.followed[at], events[i].name, KVC_NAME_BYTES)) at++;
        if (events[i].kind == KVC_BLOCKS_CLEARED) {
            w.num_followed = 0;
        } else if (events[i].kind == KVC_BLOCK_DROPPED) {
            CHECKF(at < w.num_followed, "a block is dropped that was not kept");
            if (at < w.num_followed) memcpy(w.followed[at], w.followed[--w.num_followed], KVC_NAME_BYTES);
        } else if (at == w.num_followed && at < MOST_KEPT) {
            memcpy(w.followed[w.num_followed++], events[i].name, KVC_NAME_BYTES);
        }
    }
}

/* Checks the events against what lookup says of every string that was ever kept: its full blocks. */
static void check_events(void) {
    follow_events();
    for (int i = 0; i < w.num_kept[0] && !w.lost_events && !w.is_windowed && !w.has_states; i++) {
        static uint8_t names[MOST_TOKENS / BLOCK][KVC_NAME_BYTES];
        const kvc_tokens tokens = tokens_of(&w.kept[0][i]);
        int64_t num;
        int32_t seen, full = 0;
        CHECK(kvc_prefix_lookup(w.prefixes[0], &tokens, &seen, NULL) == KVC_OK);
        CHECK(kvc_prefix_names(w.prefixes[0], &tokens, *names, MOST_TOKENS / BLOCK, &num) == KVC_OK &&
              num == tokens.num_tokens / BLOCK);
        for (int is_there = 1; full < num && is_there; full += is_there) {
            is_there = 0;
            for (int at = 0; at < w.num_followed; at++)
                is_there |= !memcmp(w.followed[at], names[full], KVC_NAME_BYTES);
        }
        CHECKF(full == seen / BLOCK, "%d blocks by events, %d tokens are known", full, seen);
    }
}

static void end_world(void) {
    for (int i = 0; i < random_int(0, NUM_PREFIXES + 1); i++) kvc_prefix_free(w.prefixes[i]); /* sequences go on */
    for (int i = 0; i < w.num_live; i++) check_rows(&w.sequences[i]);
    free_valid(w.cache);
}

static void test_random(const kvc_policy *policies, int num_layers, kvc_config config, int has_states) {
    static void (*const steps[])(void) = {step_acquire, step_feed,       step_feed,    step_feed,  step_edit,
                                          step_fork,    step_release,    step_release, step_clear, step_drop,
                                          step_pin,     step_checkpoint, step_forget};
    new_world_of(policies, num_layers, config, has_states);
    for (int i = 0; i < (is_quick() ? 300 : 2000) && !test_failures; i++) {
        void (*const step)(void) = steps[random_int(0, (int)(sizeof steps / sizeof *steps))];
        const int64_t before = kvc_nbytes(w.cache);
        step();
        const int64_t limit = config.max_bytes + 800 * QUOTA,
                      most = before > limit ? before : limit; /* more: of the quota */
        if (config.max_bytes && step != step_fork && step != step_edit && step != step_acquire)
            CHECKF(kvc_nbytes(w.cache) <= most, "%lld bytes, and max_bytes is %lld", (long long)kvc_nbytes(w.cache),
                   (long long)config.max_bytes);
        CHECKF(kvc_validate(w.cache) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_nbytes(w.cache) == memory_bytes(&heap));
        follow_events();
        if (i % 50 == 0) check_events();
        for (int s = 0; s < w.num_live; s++)
            CHECKF(kvc_exact_to(w.cache, w.sequences[s].id) == w.sequences[s].exact_to, "exact to %d, not %d",
                   kvc_exact_to(w.cache, w.sequences[s].id), w.sequences[s].exact_to);
    }
    end_world();
}

/* ---- allocations that fail --------------------------------------------------------------------------------------- */

/* Returns how many tokens of a text are known. */
static int32_t known(const text *t) {
    const kvc_tokens tokens = tokens_of(t);
    int32_t matched = -1;
    CHECK(kvc_prefix_lookup(w.prefixes[0], &tokens, &matched, NULL) == KVC_OK);
    return matched;
}

/* A request of tokens that another began with, in which allocation number `fail_after` fails; returns how many did. */
static int request(const text *t, int fail_after) {
    const kvc_tokens tokens = tokens_of(t);
    const int64_t bytes = kvc_nbytes(w.cache);
    live s = {.tokens = *t, .exact_to = INT32_MAX};
    int32_t matched = -1, kept = -1;
    memory_fail_after(&heap, fail_after);
    const kvc_status status = kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &matched);
    if (status != KVC_OK) {
        CHECK(status == KVC_ERR_NOMEM && strstr(kvc_last_error(), "memory") && kvc_nbytes(w.cache) == bytes);
        return heap.failed;
    }
    s.fed = matched;
    kvc_batch *batch = NULL;
    if (begin_at_end(w.cache, s.id, t->num - matched, &batch) == KVC_OK) {
        put_rows(batch, &s, t->num - matched);
        CHECK(kvc_commit(batch) == KVC_OK);
        s.fed = t->num;
    }
    if (fail_after < 0) check_rows(&s);
    if (kvc_prefix_pin(w.prefixes[0], &tokens, &kept) == KVC_OK)
        CHECK(kvc_prefix_unpin(w.prefixes[0], &tokens) == KVC_OK);
    CHECK(kvc_prefix_release(w.prefixes[0], s.id, &tokens) == KVC_OK);
    if (kvc_prefix_clear(w.prefixes[1]) != KVC_OK) CHECK(strstr(kvc_last_error(), "memory"));
    const int failed = heap.failed;
    memory_fail_after(&heap, -1);
    return failed;
}

static void test_failing_allocations(void) {
    const kvc_policy policies[] = {{.kind = KVC_FULL}, sliding_policy(3, 1, 0)};
    text first = {0}, second;
    for (int i = 0; i < 11; i++) add_token(&first);
    second = first;
    for (int i = 0; i < 14; i++) add_token(&second);
    for (int n = 0, failed = 1; failed; n++) {
        new_world(policies, 2, (kvc_config){0});
        request(&first, -1);
        CHECK(known(&first) == first.num);
        failed = request(&second, n);
        memory_fail_after(&heap, -1);
        CHECKF(kvc_validate(w.cache) == KVC_OK, "%s", kvc_last_error());
        CHECK(known(&first) == first.num);
        const int32_t before = known(&second);
        request(&second, -1);
        CHECKF(known(&second) == second.num && before <= second.num, "allocation %d: %d known", n, known(&second));
        end_world();
    }
}

/* ---- quotas and times to live ------------------------------------------------------------------------------------ */

static text numbered(int64_t first, int32_t num) {
    text t = {.num = num};
    for (int32_t i = 0; i < num; i++) t.ids[i] = first + i;
    return t;
}

static kvc_prefix *new_prefix(kvc_prefix_config config) {
    kvc_prefix *prefix = NULL;
    config.struct_size = sizeof config;
    config.fingerprint = "a model";
    CHECKF(kvc_prefix_new(w.cache, &config, &prefix) == KVC_OK, "%s", kvc_last_error());
    return prefix;
}

/* Requests of others take what is above a quota, and nothing of the blocks that are within it, or in part. */
static void test_quota(void) {
    for (int quota = 0; quota <= 24; quota += quota % 12 == 1 ? 5 : 1) {
        new_world(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){.capacity = 60});
        kvc_prefix *first = w.prefixes[0],
                   *small = w.prefixes[0] =
                       new_prefix((kvc_prefix_config){.salt = "a", .salt_size = 1, .quota = quota});
        const text kept = numbered(1000, 24);
        request(&kept, -1);
        w.prefixes[0] = first;
        for (int i = 0; i < 10; i++) {
            const text other = numbered(2000 + 100 * i, 30);
            request(&other, -1);
        }
        w.prefixes[0] = small;
        CHECKF(known(&kept) >= quota && known(&kept) < quota + 12, "quota %d: %d are left", quota, known(&kept));
        const kvc_tokens tokens = tokens_of(&kept);
        int32_t num;
        CHECK(kvc_prefix_pin(small, &tokens, &num) == KVC_OK && num == known(&kept));
        kvc_prefix_free(small);
        w.prefixes[0] = first;
        end_world();
    }
}

static void test_ttl(void) {
    new_world(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){0});
    kvc_prefix *first = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.ttl_ms = 1});
    const text one = numbered(0, 12), other = numbered(50, 9);
    const kvc_tokens tokens = tokens_of(&one);
    int32_t kept;
    request(&one, -1);
    CHECK(kvc_prefix_pin(w.prefixes[0], &tokens, &kept) == KVC_OK && kept == 12);
    request(&other, -1);
    for (struct timespec pause = {0, 5000000}; known(&other);) nanosleep(&pause, NULL);
    CHECK(known(&one) == 12);
    kvc_prefix_free(w.prefixes[0]);

    w.prefixes[0] = new_prefix((kvc_prefix_config){.ttl_ms = 1, .reuse_min_tokens = 4});
    const text many = numbered(0, 40), middle = numbered(16, 20); /* more blocks than one call drops */
    const kvc_tokens part = tokens_of(&middle);
    int64_t id;
    request(&many, -1);
    nanosleep(&(struct timespec){0, 5000000}, NULL);
    CHECK(kvc_prefix_acquire(w.prefixes[0], &part, -1, &id, &kept) == KVC_OK && kept == 0);
    CHECK(kvc_clear_sequence(w.cache, id) == KVC_OK);
    kvc_prefix_free(w.prefixes[0]);
    w.prefixes[0] = first;
    end_world();
}

/* ---- blocks for stores ------------------------------------------------------------------------------------------- */

/* Feeds a sequence the rest of its tokens, `step` at a time. */
static void feed_all(live *s, int step) {
    for (int32_t n; s->fed < s->tokens.num; s->fed += n) {
        kvc_batch *batch = NULL;
        n = s->tokens.num - s->fed < step ? s->tokens.num - s->fed : step;
        CHECK(begin_at_end(w.cache, s->id, n, &batch) == KVC_OK);
        put_rows(batch, s, n);
        CHECK(kvc_commit(batch) == KVC_OK);
    }
}

/* A block goes out of one cache and into another, also one of which windows have lost some rows. */
static void test_payloads(void) {
    const kvc_policy policies[][2] = {{{.kind = KVC_FULL}, sliding_policy(3, 1, 0)},
                                      {sliding_policy(2, 0, 0), sliding_policy(3, 0, 0)}};
    static uint8_t payloads[8][4096];
    uint8_t names[8][KVC_NAME_BYTES];
    const text t = numbered(7, 21);
    const kvc_tokens tokens = tokens_of(&t);
    for (int set = 0; set < 2; set++)
        for (int step = 1; step <= 21; step += 10) {
            kvc_new_block blocks[8];
            int64_t num = 0, sizes[8], num_names, id;
            int32_t first, is_known, matched;
            new_world(policies[set], 2, (kvc_config){0});
            kvc_prefix *own = w.prefixes[0];
            w.prefixes[0] = new_prefix((kvc_prefix_config){.collects_new = 1, .user = &w});
            CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &id, &matched) == KVC_OK && !matched);
            live s = {.id = id, .tokens = t, .exact_to = INT32_MAX};
            feed_all(&s, step);
            CHECK(kvc_take_new_blocks(w.cache, blocks, sizeof *blocks, 8, &num) == KVC_OK && num == 5);
            CHECK(kvc_payload_bytes(w.cache) <= (int64_t)sizeof *payloads);
            for (int i = 0; i < num; i++) {
                CHECK(blocks[i].user == &w && blocks[i].begin == 4 * i && blocks[i].end == 4 * i + 4);
                CHECK(kvc_read_block(w.cache, blocks[i].id, payloads[i], sizeof payloads[i], &sizes[i]) == KVC_OK);
            }
            CHECK(kvc_read_block(w.cache, 1000, payloads[7], sizeof payloads[7], &sizes[7]) == KVC_OK && sizes[7] == 0);
            kvc_prefix_free(w.prefixes[0]);
            w.prefixes[0] = new_prefix((kvc_prefix_config){.collects_new = 1});
            CHECK(kvc_prefix_missing(w.prefixes[0], &tokens, 21, *names, 8, &first, &num_names) == KVC_OK);
            CHECK(first == 0 && num_names == 5);
            for (int i = 0; i < num_names; i++) {
                CHECK(!memcmp(names[i], blocks[i].name, sizeof names[i]));
                if (!sizes[i]) continue; /* windows have lost rows of each layer */
                CHECKF(kvc_prefix_add(w.prefixes[0], &tokens, i, payloads[i], sizes[i], &is_known) == KVC_OK, "%s",
                       kvc_last_error());
                CHECK(is_known || i);
                CHECK_FAILS(kvc_prefix_add(w.prefixes[0], &tokens, i, payloads[i], sizes[i] - 1, &is_known),
                            KVC_ERR_FORMAT, "payload", "bytes");
            }
            CHECK(kvc_take_new_blocks(w.cache, blocks, sizeof *blocks, 8, &num) == KVC_OK && num == 0);
            CHECK_FAILS(kvc_prefix_add(w.prefixes[0], &tokens, INT32_MAX, payloads[0], 9, &is_known), KVC_ERR_INVALID,
                        "block", "2147483647");
            CHECK(known(&t) <= 20 && (set || step < 21 || known(&t) == 20));
            kvc_prefix_free(w.prefixes[0]);
            w.prefixes[0] = own;
            CHECK(kvc_clear_sequence(w.cache, id) == KVC_OK);
            end_world();
        }
}

/* Bytes of a block may be more than an int holds. */
static void test_large_payload(void) {
    if (SIZE_MAX == UINT32_MAX) return; /* such a cache is refused there */
    const kvc_layer layer = {.num_kv_heads = 1 << 12, .k_dim = 1, .v_dim = 1};
    kvc_cache *cache = heap_cache(1, &layer, (kvc_config){.block_size = 1 << 19});
    CHECK(kvc_payload_bytes(cache) == 1 + 2 * (INT64_C(4) << 31));
    kvc_cache_free(cache);
}

/* Serves a request of one prefix, fed by `step`. */
static void serve(const text *t, int step) {
    const kvc_tokens tokens = tokens_of(t);
    live s = {.tokens = *t, .exact_to = INT32_MAX};
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &s.fed) == KVC_OK);
    feed_all(&s, step);
    CHECK(kvc_prefix_release(w.prefixes[0], s.id, &tokens) == KVC_OK);
}

/* Blocks that are added stay within max_bytes: the bookkeeping of the last one counts, too. */
static void test_adding_within_max_bytes(void) {
    enum { LIMIT = 20000 };
    static uint8_t payload[4096];
    const text first = numbered(7, 5);
    kvc_new_block block;
    int64_t num, size;
    int32_t is_known;
    new_world(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){.max_bytes = LIMIT});
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.collects_new = 1});
    serve(&first, 5);
    CHECK(kvc_take_new_blocks(w.cache, &block, sizeof block, 1, &num) == KVC_OK && num == 1);
    CHECK(kvc_read_block(w.cache, block.id, payload, sizeof payload, &size) == KVC_OK);
    for (int i = 1; i < 100; i++) {
        const text t = numbered(100 * i, 5);
        const kvc_tokens tokens = tokens_of(&t);
        CHECK(kvc_prefix_add(w.prefixes[0], &tokens, 0, payload, size, &is_known) == KVC_OK);
        CHECK(is_known && known(&t) == 4);
        CHECKF(kvc_nbytes(w.cache) <= LIMIT, "%lld bytes with %d blocks", (long long)kvc_nbytes(w.cache), i);
    }
    kvc_prefix_free(w.prefixes[0]);
    w.prefixes[0] = own;
    end_world();
}

/* A block of which windows have lost rows takes the place of none that has them. */
static void test_fewer_rows(void) {
    const kvc_policy policies[] = {{.kind = KVC_FULL}, sliding_policy(3, 0, 0)};
    const text longer = numbered(7, 6), four = numbered(7, 4);
    text other = numbered(7, 5); /* begins with the same block */
    other.ids[4] = 98;
    new_world(policies, 2, (kvc_config){0});
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.collects_new = 1});
    const kvc_tokens tokens = tokens_of(&four);
    static uint8_t payload[4096];
    kvc_new_block block;
    int64_t num, size;
    int32_t is_known;
    serve(&longer, 1);
    CHECK(kvc_take_new_blocks(w.cache, &block, sizeof block, 1, &num) == KVC_OK && num == 1);
    CHECK(kvc_read_block(w.cache, block.id, payload, sizeof payload, &size) == KVC_OK && size && !payload[1]);
    kvc_prefix_clear(w.prefixes[0]);
    serve(&four, 1);
    CHECK(known(&other) == 4);
    CHECK(kvc_prefix_add(w.prefixes[0], &tokens, 0, payload, size, &is_known) == KVC_OK && is_known);
    CHECK(known(&other) == 4);
    kvc_prefix_free(w.prefixes[0]);
    w.prefixes[0] = own;
    end_world();
}

/* Where windows have lost all of the block with a prompt's tokens, one that ends earlier is gone on from. */
static void test_shorter(void) {
    const kvc_policy policies[] = {{.kind = KVC_FULL}, sliding_policy(3, 0, 0)};
    const text longer = numbered(7, 10), seven = numbered(7, 7), eight = numbered(7, 8);
    static uint8_t payload[4096];
    kvc_new_block blocks[2];
    int64_t num, size, id;
    int32_t is_known, matched;
    new_world(policies, 2, (kvc_config){0});
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.collects_new = 1});
    const kvc_tokens tokens = tokens_of(&eight);
    serve(&longer, 1);
    CHECK(kvc_take_new_blocks(w.cache, blocks, sizeof *blocks, 2, &num) == KVC_OK && num == 2);
    CHECK(kvc_read_block(w.cache, blocks[1].id, payload, sizeof payload, &size) == KVC_OK && size && !payload[1]);
    kvc_prefix_clear(w.prefixes[0]);
    serve(&seven, 7);
    CHECK(kvc_prefix_add(w.prefixes[0], &tokens, 1, payload, size, &is_known) == KVC_OK && is_known);
    CHECKF(known(&eight) == 7, "%d", known(&eight));
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &id, &matched) == KVC_OK && matched == 7);
    CHECK(kvc_can_resume(w.cache, id, 7));
    CHECK(kvc_clear_sequence(w.cache, id) == KVC_OK);
    kvc_prefix_free(w.prefixes[0]);
    w.prefixes[0] = own;
    end_world();
}

/* Returns the first 16 numbers from 7 on, number `at` of which is another. */
static text other_at(int32_t at, int64_t id) {
    text t = numbered(7, 16);
    t.ids[at] = id;
    return t;
}

/* A block of which windows have lost rows hides none that begins alike and has what a query sees. */
static void test_beginnings(void) {
    const kvc_policy policies[] = {{.kind = KVC_FULL}, sliding_policy(2, 0, 0)};
    const text shorter = numbered(7, 10), longer = numbered(7, 14), full = numbered(7, 16), next = other_at(12, 91),
               whole = other_at(12, 99), after_ten = other_at(10, 90), after_twelve = other_at(12, 90),
               after_fourteen = other_at(14, 90);
    new_world(policies, 2, (kvc_config){.block_size = 8});
    serve(&shorter, 1);
    CHECK(known(&after_ten) == 10);
    serve(&longer, 1);
    serve(&full, 1);
    serve(&next, 1);
    CHECK(known(&after_ten) == 10 && known(&after_twelve) == 10 && known(&after_fourteen) == 14);
    serve(&whole, 8);
    CHECK(known(&after_ten) == 10 && known(&after_twelve) == 12 && known(&after_fourteen) == 14);
    end_world();
}

/* Serves a prompt of numbers from 7 on, of which only the rows that windows see in the end are kept. */
static void serve_gap(int32_t num) {
    live s = {.tokens = numbered(7, num), .exact_to = INT32_MAX};
    const kvc_tokens tokens = tokens_of(&s.tokens);
    CHECK(kvc_prefix_clear(w.prefixes[0]) == KVC_OK);
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &s.fed) == KVC_OK && s.fed == 0);
    feed_all(&s, 1);
    CHECK(kvc_prefix_clear(w.prefixes[0]) == KVC_OK);
    CHECK(kvc_prefix_release(w.prefixes[0], s.id, &tokens) == KVC_OK);
}

/* Windows see nothing of blocks whose rows are gone: what is known behind these can be pinned, and goes on. */
static void test_gaps(void) {
    const kvc_policy policy = sliding_policy(3, 0, 0);
    const text all = numbered(7, 44);
    kvc_tokens tokens = tokens_of(&all);
    static uint8_t payload[1024] = {1}, names[2][KVC_NAME_BYTES];
    int64_t num;
    int32_t kept, first, is_known;
    new_world(&policy, 1, (kvc_config){0});
    const int64_t size = kvc_payload_bytes(w.cache);
    CHECK(size <= (int64_t)sizeof payload);
    serve_gap(38);
    CHECK(known(&all) == 38);
    CHECK(kvc_prefix_pin(w.prefixes[0], &tokens, &kept) == KVC_OK && kept == 38);
    CHECK(kvc_prefix_missing(w.prefixes[0], &tokens, 44, *names, 2, &first, &num) == KVC_OK && first == 9 && num == 2);
    CHECK(kvc_prefix_add(w.prefixes[0], &tokens, 9, payload, size, &is_known) == KVC_OK && is_known);
    CHECK(known(&all) == 40);
    serve_gap(40);
    CHECK(known(&all) == 40);
    CHECK(kvc_prefix_pin(w.prefixes[0], &tokens, &kept) == KVC_OK && kept == 40);
    CHECK(kvc_prefix_evict(w.prefixes[0], INT64_MAX, &num) == KVC_OK && known(&all) == 40);
    CHECK(kvc_prefix_missing(w.prefixes[0], &tokens, 44, *names, 2, &first, &num) == KVC_OK);
    CHECKF(first == 10 && num == 1, "%lld from %d on", (long long)num, first);
    CHECK(kvc_prefix_add(w.prefixes[0], &tokens, 5, payload, size, &is_known) == KVC_OK && !is_known);
    CHECK(kvc_prefix_add(w.prefixes[0], &tokens, 10, payload, size, &is_known) == KVC_OK && is_known);
    CHECK(known(&all) == 44);
    CHECK(kvc_prefix_missing(w.prefixes[0], &tokens, 44, *names, 2, &first, &num) == KVC_OK && first == 11 && !num);
    CHECK(kvc_prefix_unpin(w.prefixes[0], &tokens) == KVC_OK);
    end_world();
}

/* Of the prompts that have a block in common, those used last are looked at. */
static void test_reuse(void) {
    enum { PROMPTS = 100 };
    new_world(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){0});
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.reuse_min_tokens = 4});
    for (int i = 0; i < PROMPTS; i++) {
        text t = numbered(1000 + 100 * i, 11);
        for (int j = 4; j < 8; j++) t.ids[j] = 7;
        serve(&t, 11);
    }
    for (int i = 0; i < PROMPTS; i += PROMPTS - 1) {
        text t = numbered(1000 + 100 * i, 12);
        for (int j = 4; j < 8; j++) t.ids[j] = 7;
        const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = t.ids + 4, .num_tokens = 8};
        int64_t id;
        int32_t matched;
        CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &id, &matched) == KVC_OK);
        CHECKF(matched == (i ? 7 : 4), "%d: %d", i, matched);
        CHECK(kvc_clear_sequence(w.cache, id) == KVC_OK);
    }
    kvc_prefix_free(w.prefixes[0]);
    w.prefixes[0] = own;
    end_world();
}

/* Of a batch with a tree, the tokens that are kept are exact, and what they fill goes on as that. */
static void test_tree(void) {
    const text t = numbered(7, 16);
    const kvc_tokens tokens = tokens_of(&t);
    int32_t matched;
    new_world(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){0});
    live s = {.tokens = t, .exact_to = INT32_MAX};
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &matched) == KVC_OK);
    kvc_batch *batch = NULL;
    CHECK(begin_at_end(w.cache, s.id, 6, &batch) == KVC_OK);
    put_rows(batch, &s, 6);
    CHECK(kvc_commit(batch) == KVC_OK);
    s.fed = 6;
    const int32_t positions[] = {6, 6, 7, 8}, parents[] = {-1, -1, 1, 2}, kept[] = {1, 2, 3};
    const int64_t ids[] = {s.id, s.id, s.id, s.id};
    CHECK(kvc_begin(w.cache, 4, positions, ids, parents, &batch) == KVC_OK);
    put_rows(batch, &s, 4);
    CHECK(kvc_commit_kept(batch, kept, 3) == KVC_OK);
    CHECK(kvc_exact_to(w.cache, s.id) == INT32_MAX && kvc_next_position(w.cache, s.id) == 9);
    CHECK(kvc_prefix_release(w.prefixes[0], s.id, &tokens) == KVC_OK);
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &matched) == KVC_OK && matched == 9);
    CHECK(kvc_exact_to(w.cache, s.id) == INT32_MAX);
    end_world();
}

/* ---- recurrent states -------------------------------------------------------------------------------------------- */

/* Serves a request, with a checkpoint after each `step` tokens; returns how many were matched. */
static int32_t serve_states(const text *t, int32_t step) {
    const kvc_tokens tokens = tokens_of(t);
    live s = {.tokens = *t, .exact_to = INT32_MAX};
    int32_t matched;
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &matched) == KVC_OK);
    check_restored(&s, matched);
    for (s.fed = matched; s.fed < t->num;) {
        uint8_t state[STATE];
        s.tokens.num = s.fed + step < t->num ? s.fed + step : t->num;
        feed_all(&s, step);
        const kvc_tokens fed = tokens_of(&s.tokens);
        CHECK(kvc_prefix_checkpoint(w.prefixes[0], s.id, &fed, state, state_of(t, s.fed, state)) == KVC_OK);
    }
    CHECK(kvc_prefix_release(w.prefixes[0], s.id, &tokens) == KVC_OK);
    return matched;
}

static int64_t num_states(void) {
    kvc_prefix_stats stats;
    kvc_prefix_get_stats(w.prefixes[0], &stats, sizeof stats);
    CHECK(!stats.checkpoint_bytes == !stats.checkpoints);
    return stats.checkpoints;
}

/* A state goes with its block, from one to a longer one that begins with it, out to a store, and back. */
static void test_checkpoints(void) {
    static uint8_t payloads[8][4096];
    const text t = numbered(7, 22);
    const kvc_tokens tokens = tokens_of(&t);
    kvc_new_block blocks[8];
    int64_t num, sizes[8], evicted;
    int32_t is_known, matched, with_rows;
    new_world_of(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){0}, 1);
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.collects_new = 1, .state_bytes = STATE});
    CHECK(serve_states(&t, 7) == 0 && num_states() == 4);
    CHECK(serve_states(&t, 7) == 21); /* behind its second last token */
    kvc_tokens part = tokens;
    part.num_tokens = 20;
    CHECK(kvc_prefix_lookup(w.prefixes[0], &part, &matched, &with_rows) == KVC_OK && matched == 14 && with_rows == 20);
    CHECK(kvc_take_new_blocks(w.cache, blocks, sizeof *blocks, 8, &num) == KVC_OK && num == 5);
    for (int i = 0; i < num; i++)
        CHECK(kvc_read_block(w.cache, blocks[i].id, payloads[i], sizeof payloads[i], &sizes[i]) == KVC_OK);
    CHECK(sizes[1] > sizes[0] && sizes[1] <= kvc_payload_bytes(w.cache) && sizes[3] > sizes[2]);
    CHECK_FAILS(kvc_read_block(w.cache, blocks[0].id, payloads[7], 4, &sizes[7]), KVC_ERR_INVALID, "max_bytes", "4");
    CHECK(kvc_prefix_evict(w.prefixes[0], INT64_MAX, &evicted) == KVC_OK && num_states() == 0);
    for (int i = 0; i < num; i++)
        CHECK(kvc_prefix_add(w.prefixes[0], &tokens, blocks[i].begin / BLOCK, payloads[i], sizes[i], &is_known) ==
                  KVC_OK &&
              is_known);
    CHECK(num_states() == 2);
    CHECK(serve_states(&t, 50) == 14);
    payloads[1][sizes[0]] = 4; /* a position before the block */
    CHECK_FAILS(kvc_prefix_add(w.prefixes[0], &tokens, 1, payloads[1], sizes[1], &is_known), KVC_ERR_FORMAT, "payload",
                "bytes");
    CHECK_FAILS(kvc_prefix_checkpoint(w.prefixes[0], 0, &tokens, payloads[0], STATE + 1), KVC_ERR_INVALID, "num_bytes",
                "17");
    CHECK_FAILS(kvc_prefix_checkpoint(w.prefixes[0], 0, &tokens, NULL, 1), KVC_ERR_INVALID, "state", "NULL");
    CHECK(kvc_prefix_checkpoint(w.prefixes[0], 12345, &tokens, payloads[0], STATE) == KVC_OK); /* holds nothing */
    kvc_prefix_free(w.prefixes[0]);
    const kvc_prefix_config bad[] = {{sizeof *bad, "a model", .state_bytes = -1},
                                     {sizeof *bad, "a model", .state_bytes = 9, .max_checkpoint_bytes = 8},
                                     {sizeof *bad, "a model", .state_bytes = 9, .reuse_min_tokens = 4},
                                     {sizeof *bad, "a model", .max_checkpoint_bytes = 8}};
    CHECK_FAILS(kvc_prefix_new(w.cache, &bad[0], &w.prefixes[0]), KVC_ERR_INVALID, "state_bytes", "-1");
    CHECK_FAILS(kvc_prefix_new(w.cache, &bad[1], &w.prefixes[0]), KVC_ERR_INVALID, "max_checkpoint_bytes", "8");
    CHECK_FAILS(kvc_prefix_new(w.cache, &bad[2], &w.prefixes[0]), KVC_ERR_UNSUPPORTED, "reuse_min_tokens", "state");
    CHECK_FAILS(kvc_prefix_new(w.cache, &bad[3], &w.prefixes[0]), KVC_ERR_INVALID, "max_checkpoint_bytes", "8");
    w.prefixes[0] = own;
    end_world();
}

/* A checkpoint for which memory is short is not kept, and says so, whichever allocation fails. */
static void test_failing_checkpoints(void) {
    const text t = numbered(7, 10);
    const kvc_tokens tokens = tokens_of(&t);
    uint8_t state[STATE];
    for (int n = 0, failed = 1; failed; n++) {
        new_world_of(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){0}, 1);
        live s = {.tokens = t, .exact_to = INT32_MAX};
        CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &s.fed) == KVC_OK);
        feed_all(&s, 10);
        const int64_t size = state_of(&t, t.num, state);
        memory_fail_after(&heap, n);
        const kvc_status status = kvc_prefix_checkpoint(w.prefixes[0], s.id, &tokens, state, size);
        CHECK(status == KVC_OK || (status == KVC_ERR_NOMEM && !num_states()));
        failed = heap.failed;
        memory_fail_after(&heap, -1);
        CHECKF(kvc_validate(w.cache) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_prefix_checkpoint(w.prefixes[0], s.id, &tokens, state, size) == KVC_OK && num_states() == 1);
        end_world();
    }
}

/* With room for a few, a state takes the place of the one used least recently; one that does not fit is refused. */
static void test_room_for_states(void) {
    enum { LARGE = 4000 };
    static uint8_t state[45000];
    new_world_of(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){.max_bytes = 45000}, 1);
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.state_bytes = sizeof state});
    int64_t id;
    int32_t matched;
    for (int i = 0; i < 20; i++) {
        const text t = numbered(100 * i, 9);
        const kvc_tokens tokens = tokens_of(&t);
        live s = {.tokens = t, .exact_to = INT32_MAX};
        CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &s.id, &s.fed) == KVC_OK && !s.fed);
        feed_all(&s, 8);
        CHECKF(kvc_prefix_checkpoint(w.prefixes[0], s.id, &tokens, state, LARGE) == KVC_OK, "%s", kvc_last_error());
        CHECK_FAILS(kvc_prefix_checkpoint(w.prefixes[0], s.id, &tokens, state, sizeof state), KVC_ERR_FULL, "max_bytes",
                    "45000");
        CHECK(kvc_prefix_release(w.prefixes[0], s.id, &tokens) == KVC_OK && kvc_nbytes(w.cache) <= 45000);
    }
    CHECKF(num_states() >= 2 && num_states() <= 5, "%lld states", (long long)num_states());
    text last = numbered(1900, 9);
    add_token(&last);
    const kvc_tokens tokens = tokens_of(&last);
    CHECK(kvc_prefix_acquire(w.prefixes[0], &tokens, -1, &id, &matched) == KVC_OK && matched == 9);
    kvc_prefix_free(w.prefixes[0]);
    CHECK(kvc_clear_sequence(w.cache, id) == KVC_OK);
    w.prefixes[0] = own;
    end_world();
}

/* Events beyond the room for them are lost, and counted; a cleared prefix says so. */
static void test_events(void) {
    kvc_prefix_event events[8];
    int64_t num, lost;
    const text t = numbered(0, 24);
    new_world(&(kvc_policy){.kind = KVC_FULL}, 1, (kvc_config){0});
    kvc_prefix *own = w.prefixes[0];
    w.prefixes[0] = new_prefix((kvc_prefix_config){.max_events = 4});
    serve(&t, 4);
    CHECK_FAILS(kvc_prefix_take_events(w.prefixes[0], NULL, sizeof *events, 8, &num, &lost), KVC_ERR_INVALID, "events",
                "NULL");
    CHECK(kvc_prefix_take_events(w.prefixes[0], events, sizeof *events, 8, &num, &lost) == KVC_OK);
    CHECK(num == 4 && lost == 2 && events[0].kind == KVC_BLOCK_KEPT && events[0].begin == 8);
    CHECK(kvc_prefix_clear(w.prefixes[0]) == KVC_OK);
    CHECK(kvc_prefix_take_events(w.prefixes[0], events, sizeof *events, 8, &num, &lost) == KVC_OK);
    CHECK(num == 1 && !lost && events[0].kind == KVC_BLOCKS_CLEARED);
    kvc_prefix_free(w.prefixes[0]);
    w.prefixes[0] = own;
    end_world();
}

/* Random steps on caches of different shapes, from a seed. */
static void test_random_worlds(uint64_t seed) {
    const kvc_policy full = {.kind = KVC_FULL}, window = sliding_policy(3, 1, 0), wide = sliding_policy(9, 0, 0),
                     chunk = {.kind = KVC_CHUNKED, .attention_chunk_size = 6};
    const kvc_policy sets[][2] = {{full, full}, {full, window}, {wide, full}, {window, chunk}};
    const int round = (int)(seed / 4 % 2), set = (int)(seed % 4);
    random_state = seed + 1;
    test_random(sets[set], 1 + (round + set) % 2, (kvc_config){0}, round);
    test_random(sets[set], 2, (kvc_config){.capacity = 40}, round);
    test_random(sets[set], 2, (kvc_config){.max_bytes = 34000}, round);
}

int main(int argc, char **argv) {
    if (has_seed(argc, argv)) {
        test_random_worlds(random_state);
        return test_result();
    }
    test_events();
    test_checkpoints();
    test_failing_checkpoints();
    test_room_for_states();
    test_payloads();
    test_large_payload();
    test_tree();
    test_quota();
    test_ttl();
    test_fewer_rows();
    test_adding_within_max_bytes();
    test_shorter();
    test_beginnings();
    test_gaps();
    test_reuse();
    test_failing_allocations();
    for (uint64_t seed = 0; seed < (is_quick() ? 16 : 160) && !test_failures; seed++) test_random_worlds(seed);
    return test_result();
}
