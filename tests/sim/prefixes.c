/* prefixes.c: clients of the prefixes of the simulated cache.
 *
 * A tag stands for a string of tokens, and so a row tells behind which tokens it was computed.  A prefix may
 * know every string that was noted since it was cleared.  It may know fewer, because blocks are evicted, but no others.
 */
#include "prefixes.h"

/* The mutexes that payloads.h locks are the world's. */
#define pthread_mutex_lock sim_mutex_lock
#define pthread_mutex_trylock sim_mutex_trylock
#define pthread_mutex_unlock sim_mutex_unlock
#include "support/payloads.h"

#include <stdio.h>
#include <string.h>

enum {
    MOST_PROMPT = 40,
    MOST_NAMES = MOST,
    MOST_BLOCKS = 4, /* new blocks that are read at once */
    MOST_EVENTS = 64,
    LEAST_STATE = 4, /* bytes of a recurrent state: a tag, and some more */
    STATE = LEAST_STATE + 12,
    RECENT = 64
};

/* ---- strings of tokens ------------------------------------------------------------------------------------------- */

/* By tag: its last token, the tag of the string without that token, and the list of strings that continue it. */
static struct string {
    int num; /* tokens; 0: the empty string, or no string at all */
    int token, before, first, next;
} strings[MOST_TAGS];

static int noted[PREFIXES][MOST_TAGS];    /* when a prefix may have got to know it */
static int64_t used[PREFIXES][MOST_TAGS]; /* what the clock was when a call last used it */
static int recent[RECENT], num_recent;    /* tags, with which prompts begin */
static int64_t computed[MOST_TAGS];       /* by sim_now(), when a row of it was computed last */

/* Times by sim_now() at which a call that forgot a tag last began and ended; 0: no call has. */
static struct forgotten {
    int64_t begin, end;
} forgotten[PREFIXES][MOST_TAGS];

static int64_t clock_now(void) {
    struct timespec t;
    sim_clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Returns the tag of the string that goes on from another with a token. */
static int string_of(world *w, int before, int token) {
    for (int tag = strings[before].first; tag; tag = strings[tag].next)
        if (strings[tag].token == token) return tag;
    const int tag = new_tag(w, strings[before].num);
    strings[tag] = (struct string){strings[before].num + 1, token, before, 0, strings[before].first};
    strings[before].first = tag;
    return tag;
}

static text text_of(int tag) {
    text t = {.num = strings[tag].num};
    for (int i = t.num; i > 0; tag = strings[tag].before) t.tags[--i] = tag;
    return t;
}

static int last_of(const text *t, int num) { return num ? t->tags[num - 1] : 0; }

/* Returns a token; those from 3 on have no id. */
static int any_token(void) { return pick(10) ? pick(3) : 3 + pick(2); }

static void extend(world *w, text *t, int num) {
    for (; num > 0 && t->num < MOST; num--, t->num++) t->tags[t->num] = string_of(w, last_of(t, t->num), any_token());
}

/* Returns a prompt that usually begins like others. */
static text any_prompt(world *w) {
    text t = {0};
    if (num_recent && pick(5)) {
        t = text_of(recent[pick(num_recent < RECENT ? num_recent : RECENT)]);
        t.num = pick(3) ? t.num : pick(t.num + 1);
    }
    if (t.num > MOST_PROMPT) t.num = MOST_PROMPT;
    extend(w, &t, pick(t.num ? 6 : 20) + !t.num);
    return t;
}

/* Tokens as a call takes them. */
typedef struct given {
    int64_t ids[MOST];
    uint8_t digests[MOST][KVC_NAME_BYTES];
    kvc_tokens tokens;
} given;

static const kvc_tokens *give(given *g, const text *t) {
    int has_digests = 0;
    memset(g, 0, sizeof *g);
    for (int i = 0; i < t->num; i++) {
        const int token = strings[t->tags[i]].token;
        has_digests |= token >= 3;
        g->ids[i] = token < 3 ? token : 0;
        if (token >= 3) g->digests[i][0] = (uint8_t)token;
    }
    g->tokens = (kvc_tokens){sizeof g->tokens, g->ids, t->num, has_digests ? *g->digests : NULL};
    return &g->tokens;
}

int exact_end(const world *w, const sequence *s) {
    int before = 0, i = 0;
    for (; i < MOST && !s->is_spoilt; i++) {
        const int tag = s->tags[w->whole][i];
        if (strings[tag].num != i + 1 || strings[tag].before != before) break;
        for (int l = 0; l < w->num_layers; l++)
            if (is_own(w, l) && has_row(w, l, i) && s->tags[l][i] != tag) return i;
        before = tag;
    }
    return i;
}

int next_tag(client *c, int s, int at, int before) {
    world *w = c->w;
    const sequence *of = &w->sequences[s];
    if (!w->has_prefixes || w->is_meddled || before < 0 || strings[before].num != at) return new_tag(w, at);
    if (at < of->num_prompt && last_of(&of->prompt, at) == before) return of->prompt.tags[at];
    return string_of(w, before, any_token());
}

void set_any_text(client *c, sequence *s, int begin, int end) {
    text t = {0};
    if (c->w->has_prefixes && !c->w->is_meddled) extend(c->w, &t, end);
    for (int i = begin; i < end; i++) {
        const int tag = t.num ? t.tags[i] : new_tag(c->w, i);
        note_computed(&tag, 1);
        for (int l = 0; l < c->w->num_layers; l++)
            if (is_own(c->w, l) && has_row(c->w, l, i)) s->tags[l][i] = tag;
    }
}

/* ---- what may be known ------------------------------------------------------------------------------------------- */

int begin_use(client *c) {
    int *since = &c->w->since[c->number];
    const int before = *since;
    if (!before) *since = ++c->w->time;
    return before;
}

void end_use(client *c, int before) { c->w->since[c->number] = before; }

/* Whether another client uses prefixes. */
static int is_shared(const client *c) {
    for (int i = 0; i < MOST_CLIENTS; i++)
        if (i != c->number && c->w->since[i]) return 1;
    return 0;
}

/* Returns the time before which nothing was noted that a call may add still. */
static int earliest(const world *w) {
    int time = w->time + 1;
    for (int i = 0; i < MOST_CLIENTS; i++)
        if (w->since[i] && w->since[i] < time) time = w->since[i];
    return time;
}

static void use(int p, int tag) {
    for (const int64_t now = clock_now(); tag; tag = strings[tag].before) used[p][tag] = now;
}

/* Notes that a call may keep a string's tokens from position `begin` on. */
static void note(world *w, int p, int tag, int begin) {
    w->time++;
    use(p, tag);
    if (tag) recent[num_recent++ % RECENT] = tag;
    for (; strings[tag].num > begin; tag = strings[tag].before) noted[p][tag] = w->time;
}

void note_use(const client *c, int s) {
    const sequence *of = &c->w->sequences[s];
    if (of->prefix) use(of->prefix - 1, last_of(&of->prompt, of->prompt.num));
}

void note_commit(const client *c, int s, int tag) {
    const sequence *of = &c->w->sequences[s];
    if (of->prefix && strings[tag].num) note(c->w, of->prefix - 1, tag, 0);
    note_computed(&tag, 1);
}

static int is_pinned(const prefix *p, int tag) {
    for (int i = 0; i < PINS; i++)
        for (int pin = p->pins[i] < 0 ? -p->pins[i] : p->pins[i]; pin; pin = strings[pin].before)
            if (pin == tag) return 1;
    return 0;
}

/* Whether another client has a sequence that the prefix acquired. */
static int has_others(const world *w, int p, int own) {
    for (int s = 0; s < IDS; s++)
        if (s != own && w->sequences[s].is_taken && w->sequences[s].prefix == p + 1) return 1;
    return 0;
}

static int handed_over(const client *c) { return sim_handovers() != c->before.handovers; }

/* When a call began: by the clock and by sim_now().  Strings that were noted before a third time were unknown by then.
 */
typedef struct moment {
    int64_t clock;
    int cleared;
    int64_t now;
} moment;

static moment moment_of(const world *w, int p) { return (moment){clock_now(), w->prefixes[p].cleared, sim_now()}; }

void note_computed(const int *tags, int num) {
    for (int i = 0; i < num; i++) computed[tags[i]] = sim_now();
}

/* Checks that a call found no tokens that the prefix had forgotten when it began, unless they were computed since.
 * It does not look if layers have windows: tokens that no window sees need no rows, and are found behind others. */
static void check_forgotten(client *c, int p, const text *t, int found, moment began) {
    for (int i = 0; i < found; i++) {
        const struct forgotten *of = &forgotten[p][t->tags[i]];
        if (of->end && of->begin > c->w->prefixes[p].since && of->end < began.now && computed[t->tags[i]] < of->begin)
            fail(c, "found token %d of %d, which was forgotten", i, t->num);
    }
}

/* Checks how many tokens of a string a prefix found.  own: a sequence of the caller's. */
static void check_found(client *c, int p, const text *t, int found, int limit, moment began, int own) {
    const world *w = c->w;
    const prefix *of = &w->prefixes[p];
    const int block = (int)kvc_block_size(w->cache);
    if (found < 0 || found > limit) fail(c, "found %d tokens, of at most %d", found, limit);
    if (!found || w->is_meddled) return;
    if (noted[p][t->tags[found - 1]] < began.cleared)
        fail(c, "found %d of %d tokens, which are not kept", found, t->num);
    check_forgotten(c, p, t, found, began);
    if (!of->config.ttl_ms || is_shared(c) || handed_over(c) || has_others(w, p, own)) return;
    const int tag = t->tags[(found - 1) / block * block]; /* of the first token in the last block */
    if (used[p][tag] < began.clock - of->config.ttl_ms * 1000000 && !is_pinned(of, tag))
        fail(c, "found %d tokens, of which the last block was used %lld ns ago", found,
             (long long)(began.clock - used[p][tag]));
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static kvc_prefix *handle_of(const client *c, int p) { return c->w->prefixes[p].handle; }

static void begin(client *c, int p, const char *call) {
    begin_call(c, call);
    if (c->w->prefixes[p].config.ttl_ms) c->handovers = UINT64_MAX; /* it drops what is too old, even if it fails */
}

static kvc_prefix_stats stats_of(const client *c, int p) {
    kvc_prefix_stats stats;
    const kvc_prefix_config *config = &c->w->prefixes[p].config;
    kvc_prefix_get_stats(handle_of(c, p), &stats, sizeof stats);
    if (!stats.checkpoints != !stats.checkpoint_bytes ||
        (config->max_checkpoint_bytes && stats.checkpoint_bytes > config->max_checkpoint_bytes))
        fail(c, "%lld states have %lld bytes", (long long)stats.checkpoints, (long long)stats.checkpoint_bytes);
    return stats;
}

void read_prefix_stats(world *w, kvc_prefix_stats *stats) {
    for (int p = 0; p < PREFIXES; p++) {
        prefix *of = &w->prefixes[p];
        if (!of->handle || of->is_changing) continue;
        of->users++;
        kvc_prefix_get_stats(of->handle, &stats[p], sizeof stats[p]);
        of->users--;
    }
}

int has_quota(const world *w) {
    for (int p = 0; p < PREFIXES; p++)
        if (w->prefixes[p].config.quota) return 1;
    return 0;
}

/* Whether a call that keeps blocks left the cache within max_bytes, or no larger than it was. */
static void check_limit(client *c) {
    const int64_t most = c->w->config.max_bytes, nbytes = kvc_nbytes(c->w->cache);
    if (!most || has_quota(c->w) || handed_over(c) || nbytes <= most || nbytes <= c->before.nbytes) return;
    fail(c, "passes max_bytes by %lld, with %lld bytes before", (long long)(nbytes - most),
         (long long)c->before.nbytes);
}

void check_quotas(client *c) {
    kvc_prefix_stats now[PREFIXES] = {0};
    const int block = (int)kvc_block_size(c->w->cache);
    read_prefix_stats(c->w, now);
    for (int p = 0; p < PREFIXES && is_alone(c); p++)
        if (now[p].held < c->before.prefixes[p].held && now[p].held <= c->w->prefixes[p].config.quota - block)
            fail(c, "leaves %lld of %lld tokens, of which %lld are within the quota", (long long)now[p].held,
                 (long long)c->before.prefixes[p].held, (long long)c->w->prefixes[p].config.quota);
}

void evict_blocks(client *c) {
    int64_t num;
    for (int p = 0; p < PREFIXES; p++) {
        prefix *of = &c->w->prefixes[p];
        if (!of->handle || of->is_changing || of->config.quota) continue;
        of->users++;
        kvc_prefix_evict(of->handle, INT64_MAX, &num);
        of->users--;
    }
}

static void lookup(client *c, int p) {
    given g;
    int32_t found = -1;
    const text t = any_prompt(c->w);
    const moment began = moment_of(c->w, p);
    begin(c, p, "kvc_prefix_lookup");
    if (!ended(c, kvc_prefix_lookup(handle_of(c, p), give(&g, &t), &found, NULL), 0)) return;
    check_unchanged(c);
    check_found(c, p, &t, found, t.num, began, -1);
}

/* Returns how many tokens of a string a prefix knows, -1 if that cannot be found out. */
static int known(client *c, int p, const text *t) {
    given g;
    int32_t found = -1;
    sim_fail_memory(0);
    return kvc_prefix_lookup(handle_of(c, p), give(&g, t), &found, NULL) == KVC_OK ? found : -1;
}

/* ---- recurrent states -------------------------------------------------------------------------------------------- */

/* Writes the state behind a string; returns its bytes. */
static int state_of(int tag, uint8_t *state) {
    const int size = LEAST_STATE + tag % (STATE - LEAST_STATE + 1);
    memcpy(state, &tag, LEAST_STATE);
    for (int i = LEAST_STATE; i < size; i++) state[i] = (uint8_t)(tag * 31 + i);
    return size;
}

/* Checks that a state is that behind some string, and returns its tag. */
static int tag_of_state(const client *c, const uint8_t *state, int64_t size) {
    uint8_t wanted[STATE];
    int tag = -1;
    if (size >= LEAST_STATE) memcpy(&tag, state, LEAST_STATE);
    if (tag < 0 || tag > c->w->last_tag || state_of(tag, wanted) != size || memcmp(state, wanted, (size_t)size))
        fail(c, "%lld bytes of a state are no state", (long long)size);
    return tag;
}

static void check_state(client *c, int p, int s, const text *t, int matched) {
    uint8_t state[STATE];
    int64_t size = -1;
    c->call = "kvc_prefix_state";
    if (kvc_prefix_state(handle_of(c, p), id_of(s), state, STATE, &size) != KVC_OK) fail(c, "fails");
    if (!c->w->is_meddled && (size > 0) != (c->w->prefixes[p].config.state_bytes && matched))
        fail(c, "has %lld bytes behind %d tokens", (long long)size, matched);
    const int tag = size ? tag_of_state(c, state, size) : 0;
    if (size && !c->w->is_meddled && tag != last_of(t, matched))
        fail(c, "is that behind %d other tokens, not %d", strings[tag].num, matched);
}

/* ---- sequences --------------------------------------------------------------------------------------------------- */

/* Notes rows that were computed elsewhere: of the same tokens, behind others. */
static void note_moved(client *c, int s, const text *t, int begin, int end) {
    rows r;
    for (int l = 0; l < c->w->num_layers; l++) {
        if (!is_own(c->w, l)) continue;
        while (read_all(c, c->w->cache, s, l, &r) != KVC_OK) continue;
        for (int i = begin; i < end; i++) {
            const int tag = r.positions[i] < 0 ? 0 : tag_of(c, r.k[0][i], r.v[0][i], MOST * ROW, MOST * ROW, l, i);
            if (tag && (!strings[tag].num || strings[tag].token != strings[t->tags[i]].token))
                fail(c, "took a row of another token at %d, layer %d", i, l);
            c->w->sequences[s].tags[l][i] = tag;
        }
    }
}

/* Notes what an acquired sequence holds. */
static void note_acquired(client *c, int p, int s, const text *t, int matched) {
    world *w = c->w;
    sequence *of = &w->sequences[s];
    int exact = kvc_exact_to(w->cache, id_of(s));
    if (exact > matched) exact = matched;
    of->prefix = p + 1;
    of->prompt = *t;
    of->num_prompt = t->num;
    if (matched) of->barred |= ~(1 << p); /* others may have forgotten rows that this one knows */
    of->is_spoilt |= w->is_meddled;
    for (int l = 0; l < w->num_layers; l++)
        for (int i = 0; i < exact && is_own(w, l); i++) of->tags[l][i] = has_row(w, l, i) ? t->tags[i] : 0;
    if (w->is_meddled) return;
    if (exact < matched && !w->prefixes[p].config.reuse_min_tokens) fail(c, "is exact to %d of %d", exact, matched);
    if (exact < matched) note_moved(c, s, t, exact, matched);
    if (kvc_next_position(w->cache, id_of(s)) != matched || !kvc_can_resume(w->cache, id_of(s), matched))
        fail(c, "cannot go on behind %d tokens", matched);
}

static void acquire_as(client *c, int p, int s) {
    world *w = c->w;
    given g;
    int32_t matched = -1;
    int64_t id = -1;
    const text t = any_prompt(w);
    const int most = pick(4) ? -1 : pick(t.num + 2), limit = most < 0 || most >= t.num ? t.num - 1 : most;
    const moment began = moment_of(w, p);
    begin(c, p, "kvc_prefix_acquire");
    /* Tokens that were moved before a function failed to move others had taken the place of kept rows. */
    if (w->prefixes[p].config.reuse_min_tokens) c->handovers = UINT64_MAX;
    w->num_acquiring++;
    w->acquired++;
    const int is_there = ended(c, kvc_prefix_acquire(handle_of(c, p), give(&g, &t), most, &id, &matched), MAY_BE_FULL);
    if (is_there) ids[s] = id;
    w->num_acquiring--;
    if (!is_there) return;
    check_limit(c);
    const int exact = kvc_exact_to(w->cache, id);
    check_found(c, p, &t, matched < exact ? matched : exact, limit, began, s);
    if (matched > limit) fail(c, "matched %d, of at most %d", matched, limit);
    note_acquired(c, p, s, &t, matched);
    check_state(c, p, s, &t, matched);
    use(p, last_of(&t, t.num));
}

static void acquire(client *c, int p) {
    const int s = take(c);
    if (s >= 0 && clear_one(c, s)) {
        note_use(c, s); /* by the prefix that it was acquired from before */
        acquire_as(c, p, s);
    }
    let_go(c, s);
}

/* Whether a layer has no row at a position, as where its rows were restored: others may have exact ones there. */
static int lacks_row(const world *w, const sequence *s, int at) {
    for (int l = 0; l < w->num_layers; l++)
        if (is_own(w, l) && has_row(w, l, at) && !s->tags[l][at]) return 1;
    return 0;
}

/* Returns the tokens of a sequence as far as it is exact, and then any tokens, `more` than it holds.  A position gets
 * its own token if the sequence may hold an exact row there. */
static text tokens_of(client *c, const sequence *s, int more) {
    const int exact = exact_end(c->w, s), held = end_of(s);
    text t = text_of(exact ? s->tags[c->w->whole][exact - 1] : 0);
    if (exact == held || !lacks_row(c->w, s, exact)) extend(c->w, &t, held + more - exact);
    return t;
}

/* Whether a sequence's blocks are known, now that a call kept them, unless something may have come between. */
static void check_kept(client *c, int p, int s, const text *t, int exact) {
    const kvc_config *config = &c->w->config;
    const kvc_prefix_config *own = &c->w->prefixes[p].config;
    if (handed_over(c) || sim_faults() != c->faults || config->max_bytes || config->capacity || c->w->expires) return;
    if (own->ttl_ms || own->state_bytes || c->w->is_meddled) return;
    if (c->w->prefixes[p].num_forgetting || c->w->sequences[s].barred & 1 << p) return;
    const int found = known(c, p, t);
    if (!handed_over(c) && found >= 0 && found < exact) fail(c, "kept %d of %d tokens", found, exact);
}

static void release(client *c, int p) {
    const int s = take(c);
    if (s < 0) return;
    given g;
    const text t = tokens_of(c, &c->w->sequences[s], pick(4) ? 0 : pick(5));
    const int own = exact_end(c->w, &c->w->sequences[s]);
    int exact = kvc_exact_to(c->w->cache, id_of(s));
    if (exact > own) exact = own;
    note(c->w, p, last_of(&t, own), 0);
    begin(c, p, "kvc_prefix_release");
    if (ended(c, kvc_prefix_release(handle_of(c, p), id_of(s), give(&g, &t)), 0)) {
        check_limit(c);
        check_kept(c, p, s, &t, exact);
        use(p, last_of(&t, t.num));
        while (!clear_one(c, s)) continue;
    }
    let_go(c, s);
}

static void checkpoint(client *c, int p) {
    const int s = take(c);
    if (s < 0) return;
    given g;
    uint8_t state[STATE];
    text t = tokens_of(c, &c->w->sequences[s], pick(3));
    if (!pick(3)) t.num = pick(t.num + 1);
    const int exact = exact_end(c->w, &c->w->sequences[s]), num = exact < t.num ? exact : t.num;
    const int size = c->w->prefixes[p].config.state_bytes && t.num && pick(8) ? state_of(last_of(&t, t.num), state) : 0;
    note(c->w, p, last_of(&t, num), 0);
    begin(c, p, "kvc_prefix_checkpoint");
    if (ended(c, kvc_prefix_checkpoint(handle_of(c, p), id_of(s), give(&g, &t), state, size),
              size ? MAY_BE_FULL | MAY_CHANGE : 0))
        check_limit(c);
    use(p, last_of(&t, t.num));
    stats_of(c, p);
    let_go(c, s);
}

/* ---- pins -------------------------------------------------------------------------------------------------------- */

static void pin(client *c, int p) {
    given g;
    int32_t kept = -1;
    int64_t num;
    int *own = &c->w->prefixes[p].pins[pick(PINS)];
    const text t = any_prompt(c->w);
    if (*own) return;
    *own = -last_of(&t, t.num);
    const moment began = moment_of(c->w, p);
    begin(c, p, "kvc_prefix_pin");
    const int is_pinned = ended(c, kvc_prefix_pin(handle_of(c, p), give(&g, &t), &kept), MAY_BE_FULL) && kept;
    if (is_pinned) check_limit(c);
    if (is_pinned && !c->w->is_meddled && noted[p][last_of(&t, kept)] < began.cleared)
        fail(c, "pinned %d tokens, which are not kept", kept);
    if (is_pinned && !pick(4) && !c->w->expires && !c->w->prefixes[p].config.state_bytes &&
        kvc_prefix_evict(handle_of(c, p), INT64_MAX, &num) == KVC_OK) {
        const int found = known(c, p, &t);
        if (!handed_over(c) && found >= 0 && found < kept) fail(c, "%d of %d pinned tokens are there", found, kept);
    }
    *own = is_pinned ? -*own : 0;
}

static void unpin(client *c, int p) {
    given g;
    int *own = &c->w->prefixes[p].pins[pick(PINS)];
    if (*own <= 0) return;
    const text t = text_of(*own);
    *own = -*own;
    begin(c, p, "kvc_prefix_unpin");
    ended(c, kvc_prefix_unpin(handle_of(c, p), give(&g, &t)), 0);
    use(p, last_of(&t, t.num));
    *own = 0;
}

/* ---- dropping ---------------------------------------------------------------------------------------------------- */

static void evict(client *c, int p) {
    const int64_t most = pick(3) ? pick(30) : INT64_MAX;
    int64_t num = -1;
    begin(c, p, "kvc_prefix_evict");
    if (!ended(c, kvc_prefix_evict(handle_of(c, p), most, &num), 0)) return;
    const kvc_prefix_stats now = stats_of(c, p);
    if (handed_over(c)) return;
    if (c->before.prefixes[p].held - now.held != num)
        fail(c, "says %lld, of %lld tokens leaves %lld", (long long)num, (long long)c->before.prefixes[p].held,
             (long long)now.held);
    int num_pins = 0;
    for (int i = 0; i < PINS; i++) num_pins += c->w->prefixes[p].pins[i] != 0;
    if (most == INT64_MAX && !num_pins && !is_shared(c) && now.blocks)
        fail(c, "leaves %lld blocks that nobody has pinned", (long long)now.blocks);
}

static void bar_all(world *w, int p) {
    for (int s = 0; s < IDS; s++) w->sequences[s].barred |= 1 << p;
}

static void forget_prompt(client *c, int p) {
    given g;
    int64_t num = -1, num_names = -1;
    const text t = any_prompt(c->w);
    if (c->w->theme != PROMPTS && pick(3)) return;
    const int64_t began = sim_now();
    c->w->prefixes[p].num_forgetting++;
    begin(c, p, "kvc_prefix_forget");
    beside *forks = pick(3) ? NULL : begin_beside(c, fork_process);
    const int is_done = ended(c, kvc_prefix_forget(handle_of(c, p), give(&g, &t), NULL, 0, &num_names, &num), 0);
    end_beside(forks);
    c->w->prefixes[p].num_forgetting--;
    bar_all(c->w, p);
    if (!is_done) return;
    for (int i = 0; i < t.num; i++) forgotten[p][t.tags[i]] = (struct forgotten){began, sim_now()};
    const kvc_prefix_stats now = stats_of(c, p);
    if (handed_over(c) || c->w->prefixes[p].config.ttl_ms) return;
    if (c->before.prefixes[p].held - now.held != num) fail(c, "says %lld, which is wrong", (long long)num);
    const int found = known(c, p, &t);
    if (!handed_over(c) && found > 0) fail(c, "leaves %d tokens of it known", found);
}

static void clear_prefix(client *c, int p) {
    prefix *of = &c->w->prefixes[p];
    const int cleared = earliest(c->w);
    if (pick(4)) return;
    of->since = INT64_MAX;
    begin_call(c, "kvc_prefix_clear");
    const int is_cleared = ended(c, kvc_prefix_clear(of->handle), 0);
    of->since = sim_now();
    if (!is_cleared) return;
    if (of->cleared < cleared) of->cleared = cleared;
    const kvc_prefix_stats now = stats_of(c, p);
    if (!handed_over(c) && (now.blocks || now.held || now.checkpoints))
        fail(c, "leaves %lld blocks with %lld tokens", (long long)now.blocks, (long long)now.held);
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

static int find_followed(const prefix *of, const uint8_t *name) {
    int i = 0;
    while (i < of->num_followed && memcmp(of->followed[i], name, KVC_NAME_BYTES)) i++;
    return i;
}

static void follow_event(client *c, prefix *of, const kvc_prefix_event *event) {
    const int at = find_followed(of, event->name);
    if (event->kind == KVC_BLOCKS_CLEARED) {
        of->num_followed = of->has_lost = 0;
    } else if (event->kind == KVC_BLOCK_DROPPED) {
        if (at == of->num_followed && !of->has_lost) fail(c, "a block is dropped that was not kept");
        if (at < of->num_followed) memcpy(of->followed[at], of->followed[--of->num_followed], KVC_NAME_BYTES);
    } else if (at == of->num_followed) {
        of->has_lost |= at == MOST_FOLLOWED;
        if (at < MOST_FOLLOWED) memcpy(of->followed[of->num_followed++], event->name, KVC_NAME_BYTES);
    }
}

/* Checks the events against the first full blocks of a string, which are known. */
static void check_followed(client *c, int p) {
    given g;
    uint8_t names[MOST_NAMES][KVC_NAME_BYTES];
    const world *w = c->w;
    const prefix *of = &w->prefixes[p];
    const text t = any_prompt(c->w);
    int64_t num;
    int full = 0;
    if (w->expires || of->config.state_bytes || of->config.ttl_ms || of->has_lost) return;
    if (kvc_prefix_names(of->handle, give(&g, &t), *names, MOST_NAMES, &num) != KVC_OK) fail(c, "has no names");
    while (full < num && find_followed(of, names[full]) < of->num_followed) full++;
    const int found = known(c, p, &t);
    if (!handed_over(c) && found >= 0 && found / (int)kvc_block_size(w->cache) != full)
        fail(c, "tells of %d blocks, and %d tokens are known", full, found);
}

static void follow(client *c, int p) {
    kvc_prefix_event events[MOST_EVENTS];
    prefix *of = &c->w->prefixes[p];
    int64_t num = 0, lost = 0;
    if (of->is_followed || !of->config.max_events) return;
    of->is_followed = 1;
    begin_call(c, "kvc_prefix_take_events");
    const int most = 1 + pick(MOST_EVENTS);
    ended(c, kvc_prefix_take_events(of->handle, events, sizeof *events, most, &num, &lost), 0);
    of->has_lost |= lost != 0;
    for (int64_t i = 0; i < num; i++) follow_event(c, of, &events[i]);
    if (num < most) check_followed(c, p);
    of->is_followed = 0;
}

/* ---- stores ------------------------------------------------------------------------------------------------------ */

/* Checks the rows of a layer in a payload; returns the tag of the last one. */
static int check_rows(const client *c, const uint8_t *bytes, int l, int begin, int end) {
    const int stride = stride_of(c->w, l), num = (end - begin) / stride;
    const float *k = (const float *)(const void *)bytes, *v = k + HEADS * num * key_dim(c->w, l);
    int tag = 0;
    for (int i = 0; i < num; i++) {
        const int position = begin + i * stride + stride - 1, last = tag;
        tag = tag_of(c, k + i * key_dim(c->w, l), v + i * DIM, num * key_dim(c->w, l), num * DIM, l, position);
        int before = tag;
        for (int n = 0; n < stride; n++) before = strings[before].before;
        if (!c->w->is_meddled && (strings[tag].num != position + 1 || (i && before != last)))
            fail(c, "a block has a row of another at %d, layer %d", position, l);
    }
    return tag;
}

/* Checks what was read of a block; returns the tag of its last token. */
static int check_payload(const client *c, const uint8_t *bytes, int64_t size, int begin, int end) {
    const int num_layers = c->w->num_layers;
    uint8_t *copy = malloc((size_t)size); /* floats stand anywhere in the payload */
    int64_t at = num_layers;
    int found = 0;
    for (int l = 0; l < num_layers; l++) {
        if (!bytes[l]) continue;
        const int row = HEADS * (key_dim(c->w, l) + c->w->layers[l].v_dim) * (int)sizeof(float);
        const int64_t more = (int64_t)((end - begin) / stride_of(c->w, l)) * row;
        if (at + more > size) fail(c, "%lld bytes are too few", (long long)size);
        memcpy(copy, bytes + at, (size_t)more);
        const int tag = check_rows(c, copy, l, begin, end);
        if (found && found != tag && !c->w->is_meddled) fail(c, "layers are of different tokens");
        found = tag;
        at += more;
    }
    free(copy);
    if (at == size) return found;
    const int position = bytes[at] | bytes[at + 1] << 8, tag = tag_of_state(c, bytes + at + 4, size - at - 4);
    const text t = text_of(found);
    if (!c->w->is_meddled && (position <= begin || position > end || tag != last_of(&t, position)))
        fail(c, "has the state behind %d tokens at %d", strings[tag].num, position);
    return found;
}

/* Checks that a block has the name that its tokens give. */
static void check_name(const client *c, prefix *of, const kvc_new_block *block, int tag) {
    given g;
    uint8_t names[MOST_NAMES][KVC_NAME_BYTES];
    int64_t num = 0;
    const text t = text_of(tag);
    if (!of->handle || of->is_changing || c->w->is_meddled) return;
    of->users++;
    kvc_prefix_names(of->handle, give(&g, &t), *names, MOST_NAMES, &num);
    of->users--;
    if (num * kvc_block_size(c->w->cache) != block->end || memcmp(names[num - 1], block->name, KVC_NAME_BYTES))
        fail(c, "names a block that ends at %d otherwise than its tokens", block->end);
}

/* Puts a block into the store, in place of another. */
static void put_away(world *w, uint8_t *bytes, int64_t size, int tag) {
    payload *to = &w->store[pick(STORE)];
    uint8_t *old = to->is_taken ? bytes : to->bytes;
    if (!to->is_taken) *to = (payload){0, tag, size, bytes};
    free(old);
}

static void take_blocks(client *c, int p) {
    kvc_new_block blocks[MOST_BLOCKS];
    world *w = c->w;
    int64_t num = 0, size = 0;
    (void)p;
    begin_call(c, "kvc_take_new_blocks");
    ended(c, kvc_take_new_blocks(w->cache, blocks, sizeof *blocks, MOST_BLOCKS, &num), 0);
    for (int64_t i = 0; i < num; i++) {
        prefix *of = blocks[i].user;
        if (of < w->prefixes || of >= w->prefixes + PREFIXES || blocks[i].end > MOST) fail(c, "lists an unknown block");
        const int64_t room = payload_bytes(w->cache);
        uint8_t *bytes = malloc((size_t)room);
        begin_call(c, "kvc_read_block");
        if (ended(c, kvc_read_block(w->cache, blocks[i].id, bytes, room, &size), 0) && size) {
            const int tag = check_payload(c, bytes, size, blocks[i].begin, blocks[i].end);
            check_name(c, of, &blocks[i], tag);
            if (!w->is_meddled) put_away(w, bytes, size, tag), bytes = NULL;
        }
        free(bytes);
    }
}

/* Adds a block of the store to a prefix. */
static void add_from(client *c, int p, const payload *from) {
    world *w = c->w;
    given g;
    text t = text_of(from->tag);
    int32_t is_known = -1, first = -1;
    int64_t num = -1;
    const int block = (int)kvc_block_size(w->cache), end = t.num, is_damaged = !pick(8);
    const int64_t size = is_damaged ? w->num_layers : from->size;
    extend(w, &t, pick(6));
    const kvc_tokens *tokens = give(&g, &t);
    const moment began = moment_of(w, p);
    begin(c, p, "missing_blocks");
    if (ended(c, missing_blocks(handle_of(c, p), tokens, t.num, NULL, 0, &first, &num), 0) && first &&
        noted[p][last_of(&t, first * block)] < began.cleared)
        fail(c, "says that %d blocks are known, which are not kept", first);
    use(p, last_of(&t, t.num));
    if (!is_damaged) note(w, p, from->tag, end - block);
    note_computed(t.tags + end - block, block);
    begin(c, p, "add_payload");
    const kvc_status status = add_payload(handle_of(c, p), tokens, end / block - 1, from->bytes, size, &is_known);
    if (is_damaged && status == KVC_ERR_FORMAT)
        check_unchanged(c);
    else if (ended(c, status, 0) && is_damaged)
        fail(c, "took a damaged block");
    else
        check_limit(c);
    use(p, last_of(&t, t.num));
}

static void add_block(client *c, int p) {
    payload *from = &c->w->store[pick(STORE)];
    if (from->is_taken || !from->bytes) return;
    from->is_taken = 1;
    add_from(c, p, from);
    from->is_taken = 0;
}

/* ---- making and freeing ------------------------------------------------------------------------------------------ */

static kvc_prefix_config any_config(const world *w, int p) {
    return (kvc_prefix_config){.struct_size = sizeof(kvc_prefix_config),
                               .fingerprint = "a model",
                               .salt = p ? "a tenant" : NULL,
                               .salt_size = p ? 8 : 0,
                               .quota = pick(3) ? 0 : pick(30),
                               .ttl_ms = w->theme == PROMPTS || pick(3) ? 0 : 1 + pick(20),
                               .reuse_min_tokens = w->has_states || w->unit > 1 || pick(3) ? 0 : 1 + pick(6),
                               .collects_new = pick(4) != 0,
                               .user = (void *)&w->prefixes[p],
                               .state_bytes = w->has_states ? STATE : 0,
                               .max_checkpoint_bytes = w->has_states && pick(2) ? STATE + pick(60) : 0,
                               .max_events = pick(2) * (4 + pick(80))};
}

static void make_prefix(client *c, int p) {
    prefix *of = &c->w->prefixes[p];
    const kvc_prefix_config config = any_config(c->w, p);
    kvc_prefix *handle = NULL;
    begin_call(c, "kvc_prefix_new");
    if (!ended(c, kvc_prefix_new(c->w->cache, &config, &handle), MAY_BE_FULL)) return;
    of->config = config;
    of->cleared = earliest(c->w);
    of->since = sim_now();
    of->num_followed = of->has_lost = 0;
    memset(of->pins, 0, sizeof of->pins);
    of->handle = handle;
}

/* Frees a prefix that no call uses, or makes one. */
static void renew(client *c, int p) {
    prefix *of = &c->w->prefixes[p];
    if (of->users || of->is_changing) return;
    of->is_changing = 1;
    if (!of->handle) {
        make_prefix(c, p);
    } else {
        begin_call(c, "kvc_prefix_free");
        kvc_prefix *handle = of->handle;
        of->handle = NULL;
        kvc_prefix_free(handle);
    }
    of->is_changing = 0;
}

void begin_prefixes(client *c) {
    world *w = c->w;
    w->has_prefixes = w->config.block_size % w->unit == 0;
    w->has_states = w->theme != PROMPTS && !pick(3);
    for (int l = 0; l < w->num_layers; l++) w->has_prefixes &= w->layers[l].policy.kind != KVC_CROSS;
    for (int p = 0; p < PREFIXES && w->has_prefixes; p++) renew(c, p);
}

/* Takes back all pins, and drops all blocks of a prefix. */
static void drop_all(client *c, int p) {
    given g;
    prefix *of = &c->w->prefixes[p];
    int64_t num;
    for (int i = 0; i < PINS; i++) {
        if (!of->pins[i]) continue;
        const text t = text_of(of->pins[i] < 0 ? -of->pins[i] : of->pins[i]);
        kvc_prefix_unpin(of->handle, give(&g, &t));
        of->pins[i] = 0;
    }
    kvc_prefix_evict(of->handle, INT64_MAX, &num);
    const kvc_prefix_stats stats = stats_of(c, p);
    if (stats.blocks) fail(c, "%lld blocks are left that nobody can drop", (long long)stats.blocks);
}

void drop_prefixes(client *c) {
    for (int p = 0; p < PREFIXES; p++)
        if (c->w->prefixes[p].handle) drop_all(c, p);
}

void end_prefixes(client *c) {
    for (int p = 0; p < PREFIXES; p++)
        if (pick(2)) kvc_prefix_free(c->w->prefixes[p].handle), c->w->prefixes[p].handle = NULL;
    for (int i = 0; i < STORE; i++) free(c->w->store[i].bytes);
}

void call_prefix(client *c) {
    static void (*const calls[])(client *c, int p) = {
        acquire,     acquire,    acquire,     acquire,   release, release, release,       lookup,
        lookup,      checkpoint, checkpoint,  pin,       unpin,   evict,   forget_prompt, clear_prefix,
        take_blocks, add_block,  take_blocks, add_block, follow,  follow};
    const int p = pick(PREFIXES);
    prefix *of = &c->w->prefixes[p];
    if (!c->w->has_prefixes) return;
    if (!pick(of->handle ? 40 : 4)) renew(c, p);
    if (!of->handle || of->is_changing) return;
    of->users++;
    const int before = begin_use(c);
    calls[pick(sizeof calls / sizeof *calls)](c, p);
    end_use(c, before);
    of->users--;
}

/* Forgets a prompt and finds that nothing is known of it, whatever calls of the parent forgot. */
static void forget_in_child(client *c, int p) {
    given g;
    const text t = any_prompt(c->w);
    int64_t num, num_names;
    if (kvc_prefix_forget(handle_of(c, p), give(&g, &t), NULL, 0, &num_names, &num) != KVC_OK || known(c, p, &t))
        fail(c, "a prompt cannot be forgotten");
}

/* ---- clones, and children of a fork() ---------------------------------------------------------------------------- */

static int is_known_id(int64_t id) {
    for (int s = 0; s < IDS; s++)
        if (ids[s] == id) return 1;
    return 0;
}

void check_known(client *c, kvc_cache *cache, int more) {
    int64_t found[64];
    int64_t num = kvc_sequences(cache, found, 64), unknown = 0;
    for (int64_t i = 0; i < num && i < 64; i++) unknown += !is_known_id(found[i]);
    if (unknown > more + 2 * c->w->acquired) fail(c, "%lld sequences are left that nobody made", (long long)unknown);
}

void check_prefixes_in_child(client *c) {
    world *w = c->w;
    if (!w->is_meddled) check_known(c, w->cache, w->num_acquiring - 2 * w->acquired);
    memset(w->since, 0, sizeof w->since);
    w->num_acquiring = 0;
    for (int p = 0; p < PREFIXES; p++) {
        prefix *of = &w->prefixes[p];
        if (of->is_changing) of->handle = NULL; /* by a thread of the parent */
        if (of->num_forgetting) bar_all(w, p);
        of->users = of->is_followed = of->num_forgetting = 0;
        of->has_lost = 1;
        if (!of->handle) continue;
        drop_all(c, p);
        forget_in_child(c, p);
    }
    for (int i = 0; i < STORE; i++) w->store[i].is_taken = 0;
}
