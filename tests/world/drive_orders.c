/* drive_orders.c: closed worlds (closed.h), so that the exact order is right in which blocks and states go.
 *
 *     drive_orders --seed 1 --runs 100
 *
 * Elsewhere the oracle says that a block may be gone.  Each run plays some scenes:
 *
 *   scene_evict    Blocks are evicted for calls and batches.  Pins, their ends and questions are no uses.
 *   scene_fetch    Blocks and states are fetched, while others call and time passes.
 *   scene_room     Blocks are fetched where there is no room for all.
 *   scene_states   Prompts go on from states.  Several stand in one block.
 *   scene_later    A block is kept with a state, and stored with a later one.
 *   scene_reuse    Tokens are taken from elsewhere.
 *   scene_forget   A prompt is forgotten while a store works. */
#define _DEFAULT_SOURCE
#include "clock.h"
#include "closed.h"

#include <limits.h>

int __wrap_clock_gettime(clockid_t which, struct timespec *now); /* clock.h */

enum { TTL = 1050 };

static struct {
    int is_cold; /* nothing of the prompt was known */
    int num_reads;
    long began;
    const prompt *prompt; /* whose blocks nobody but the call could drop now; NULL: none */
} fetching;

/* ---- the order of eviction --------------------------------------------------------------------------------------- */

/* Returns the prompt that has a block of this name. */
static prompt *prompt_named(const uint8_t *name) {
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num;
    for (int i = 0; i < o.num; i++) {
        must(kvc_prefix_names(o.prefix, tokens_in(o.prompts[i].text), *names, MOST_TEXT, &num));
        for (int64_t j = 0; j < num; j++)
            if (!memcmp(names[j], name, KVC_NAME_BYTES)) return &o.prompts[i];
    }
    wrong("a block of no prompt is dropped");
}

/* Counts what is kept and dropped.  Checks that each block that was dropped was the least recently used one without a
 * pin; returns how many were. */
static int check_drops(void) {
    kvc_prefix_event events[EVENTS];
    int64_t num, lost;
    int num_drops = 0;
    must(kvc_prefix_take_events(o.prefix, events, sizeof *events, EVENTS, &num, &lost));
    for (int64_t i = 0; i < num; i++) {
        prompt *p = prompt_named(events[i].name);
        if (events[i].kind == KVC_BLOCK_KEPT) p->left += o.block;
        if (events[i].kind != KVC_BLOCK_DROPPED) continue;
        if (!p->left || p->num_pins) wrong("%s loses a block that is pinned, or not there", spell(p->text));
        if (p == fetching.prompt) wrong("%s loses a block for what follows it", spell(p->text));
        for (prompt *q = o.prompts; q < o.prompts + o.num; q++) {
            if (!q->left || q->num_pins || q == p) continue;
            if (q->may < p->used)
                wrong("%s, used at %ld, loses a block before %s, used at %ld", spell(p->text), p->used, spell(q->text),
                      q->may);
            if (q->used <= p->used) q->used = p->used + 1; /* when a fetch used it was open */
        }
        p->left -= o.block;
        num_drops++;
    }
    for (const prompt *p = o.prompts; p < o.prompts + o.num; p++) /* a prompt ends before it begins to go */
        if (known_of(p->text) != p->left)
            wrong("%d tokens of %s are known, not %d", known_of(p->text), spell(p->text), p->left);
    return num_drops;
}

static void evict_some(void) {
    const int wanted = 1 + pick(3 * o.block), blocks = (wanted + o.block - 1) / o.block;
    int64_t dropped;
    int most = 0;
    for (int i = 0; i < o.num; i++) most += o.prompts[i].num_pins ? 0 : o.prompts[i].left / o.block;
    must(kvc_prefix_evict(o.prefix, wanted, &dropped));
    const int num = check_drops();
    if (num != least(blocks, most) || dropped != (int64_t)num * o.block)
        wrong("%d tokens are to go, and %d do in %d of %d blocks", wanted, (int)dropped, num, most);
}

static void use(prompt *p) {
    const int is_whole = p->left == text_length(p->text);
    p->used = p->may = ++o.clock;
    serve(p->text, 0, is_whole ? pick(2) : 1);
    check_drops();
}

/* Blocks are evicted while a sequence goes on from them.  Its beginning and its end are uses. */
static void run_on(prompt *p) {
    int matched;
    const int64_t id = acquire(text_behind(p->text, 0), &matched);
    p->used = p->may = ++o.clock;
    evict_some();
    must(kvc_clear_sequence(o.cache, id));
    p->used = p->may = ++o.clock;
}

/* A pin, and its end, a lookup and names are no use. */
static void ask(prompt *p) {
    const kvc_tokens *tokens = tokens_in(p->text);
    const int is_whole = p->left == text_length(p->text);
    int32_t n;
    int64_t num;
    switch (pick(4)) {
    case 0: must(kvc_prefix_lookup(o.prefix, tokens, &n, NULL)); break;
    case 1: must(kvc_prefix_names(o.prefix, tokens, NULL, 0, &num)); break;
    case 2:
        must(kvc_prefix_unpin(o.prefix, tokens));
        p->num_pins -= p->num_pins > 0;
        break;
    default:
        if (!is_whole) break;
        must(kvc_prefix_pin(o.prefix, tokens, &n));
        p->num_pins++;
    }
}

/* Another sequence takes the blocks of what was used least recently, and of no more. */
static void take_room(int room) {
    const int64_t id = kvc_new_sequence(o.cache);
    int held = 0, pinned = 0;
    for (int i = 0; i < o.num; i++) {
        held += o.prompts[i].left / o.block;
        pinned += o.prompts[i].num_pins ? o.prompts[i].left / o.block : 0;
    }
    if (o.block_bytes) room += (int)((PROMPTS_BYTES - PIN_BYTES * pinned) / o.block_bytes) * o.block;
    const int most = room - pinned * o.block, n = least(pick(most + 1), MOST_TEXT);
    const int wanted = held + (n + o.block - 1) / o.block - room / o.block;
    if (n) feed(id, n);
    const int num = check_drops();
    if (num != (n && wanted > 0 ? wanted : 0)) wrong("%d blocks go, not %d", num, wanted);
    must(kvc_clear_sequence(o.cache, id));
}

static void scene_evict(void) {
    const int by_bytes = !pick(3);
    int room = 0;
    make_shape(by_bytes || pick(3) ? 0 : 2 + pick(3));
    for (int i = 0; i < o.num; i++) {
        o.prompts[i].text = any_text_of(i, o.block * (1 + pick(least(5, (MOST_TEXT - 1) / o.block))));
        room += text_length(o.prompts[i].text);
    }
    if (!by_bytes && pick(2)) room = 0;
    open_cache(room, by_bytes, (kvc_prefix_config){.quota = room || pick(2) ? 0 : 1 + pick(80)});
    for (int i = 0; i < o.num; i++) use(&o.prompts[i]);
    for (w.o.now = 0; w.o.now < 40; w.o.now++) {
        prompt *p = &o.prompts[pick(o.num)];
        switch (pick(5)) {
        case 0: use(p); break;
        case 1: evict_some(); break;
        case 2: run_on(p); break;
        case 3:
            if (room) take_room(room);
            break;
        default: ask(p);
        }
        check_drops();
    }
    close_cache();
}

/* ---- the order of what is fetched -------------------------------------------------------------------------------- */

static void compute(prompt *p) {
    serve(p->text, p->states, pick(2));
    p->used = p->may = ++o.clock, p->ms = w.o.ms, p->is_sorted = !p->states;
}

/* While the store reads, time passes, and others use a prompt, perhaps the same one. */
static void go_on(void) {
    const int other = pick(o.num), is_first = !fetching.num_reads++;
    if (!pick(3)) w.o.ms += is_first && fetching.is_cold ? pick(3 * TTL) : pick(TTL / 2);
    if (!pick(4)) compute(&o.prompts[other]);
}

static void fetch_prompt(int at) {
    prompt *p = &o.prompts[at];
    const int length = text_length(p->text), before = known_of(p->text);
    fetching.is_cold = !before, fetching.num_reads = 0, fetching.began = ++o.clock;
    store.before = go_on;
    const int fetched = fetch(p->text);
    store.before = NULL;
    p->may = ++o.clock, p->ms = w.o.ms;
    if (p->used > fetching.began) return; /* others have computed it */
    if (fetched < length - before) wrong("%s: %d tokens are fetched behind %d", spell(p->text), fetched, before);
    p->used = fetching.began, p->is_sorted = !before;
}

/* Checks that only the least recently used prompt loses tokens, and these from its end on: a state or block at once. */
static void check_losses(void) {
    for (prompt *p = o.prompts; p < o.prompts + o.num; p++) {
        const int before = p->left, after = known_of(p->text);
        int next = before - o.block;
        if (p->states)
            for (next = before - 1; next > 0 && !(p->states >> next & 1);) next--;
        p->left = after;
        if (after == before) continue;
        if (after > before || (p->is_sorted && after != next))
            wrong("%d tokens of %s are known, then %d, not %d", before, spell(p->text), after, next);
        for (const prompt *q = o.prompts; q < o.prompts + o.num; q++)
            if (q->left && q != p && q->may < p->used)
                wrong("%s, used at %ld, loses tokens before %s, used at %ld", spell(p->text), p->used, spell(q->text),
                      q->may);
    }
}

/* Drops one block after the other.  by_states: another prompt gets states, so that one state after the other goes. */
static void drain(int by_states) {
    const int other = any_text_of(o.num, MOST_TEXT);
    int matched;
    int64_t id = by_states ? acquire(other, &matched) : 0, dropped = 1;
    for (int i = 0; i < o.num; i++) o.prompts[i].left = known_of(o.prompts[i].text);
    for (int at = 1; dropped && (!by_states || at < MOST_TEXT); at++) {
        if (by_states) {
            feed(id, 1);
            checkpoint(id, text_begin(other, at));
        } else {
            must(kvc_prefix_evict(o.prefix, 1, &dropped));
        }
        check_losses();
    }
}

static void forget_prompt(int at) {
    int64_t num, dropped;
    must(kvc_prefix_forget(o.prefix, tokens_in(o.prompts[at].text), NULL, 0, &num, &dropped));
}

/* Tokens that the quota protects are no room. */
static void check_quota(int64_t capacity, int64_t quota) {
    const int64_t most = (quota + o.block - 1) / o.block * o.block;
    kvc_prefix_stats stats;
    int64_t room = -1;
    kvc_prefix_get_stats(o.prefix, &stats, sizeof stats);
    must(kvc_room(o.cache, kvc_new_sequence(o.cache), &room));
    if (room != capacity - (stats.held < most ? stats.held : most))
        wrong("room for %d; %d tokens are held, and the quota is %d", (int)room, (int)stats.held, (int)quota);
}

/* Chooses prompts, with a state at the end of each, and within some blocks; returns how many tokens they are. */
static int choose_prompts(int has_states) {
    int sum = 0;
    for (int i = 0; i < o.num; i++) {
        prompt *p = &o.prompts[i];
        const int length = o.block * (1 + pick(least(15, (MOST_TEXT - 1) / o.block)));
        p->text = any_text_of(i, length);
        if (has_states) p->states = (uint64_t)1 << length;
        for (int begin = 0; has_states && begin + o.block < length; begin += o.block)
            if (pick(4)) p->states |= (uint64_t)1 << (begin + 1 + pick(o.block));
        sum += length;
    }
    return sum;
}

static void use_prompts(int has_time) {
    for (int step = 1 + pick(10); step; step--, w.o.now++) {
        const int at = pick(o.num);
        if (pick(3))
            fetch_prompt(at);
        else
            compute(&o.prompts[at]);
        for (int i = 0; i < o.num; i++) {
            const prompt *p = &o.prompts[i];
            const int n = known_of(p->text);
            if (i == at && n != text_length(p->text)) wrong("%s is not known", spell(p->text));
            if (has_time && w.o.ms - p->ms > TTL && n) wrong("%s has expired, and is known", spell(p->text));
        }
    }
}

static void scene_fetch(void) {
    kvc_prefix_config own = {.collects_new = 1};
    const int has_states = pick(2), by_states = has_states && pick(2), has_time = pick(2);
    int64_t num;
    make_shape(pick(3) ? 0 : 2 + pick(3));
    const int num_tokens = choose_prompts(has_states);
    if (has_states) own.state_bytes = ONE_STATE;
    if (has_time) own.ttl_ms = TTL;
    if (!has_states && pick(2)) own.quota = 1 + pick(80);
    for (int i = 0; by_states && i < o.num; i++)
        own.max_checkpoint_bytes += ONE_STATE * __builtin_popcountll(o.prompts[i].states);
    const int capacity = own.quota ? num_tokens + 5 * o.block : 0;
    open_cache(capacity, 0, own);
    for (int i = 0; i < o.num; i++) compute(&o.prompts[i]);
    must(kvc_store_new_blocks(o.cache, &in_memory, &num));
    must(kvc_prefix_clear(o.prefix));
    use_prompts(has_time);
    for (int times = own.quota ? 2 : 0; times; times--) { /* the quota goes to others once a prompt is forgotten */
        check_quota(capacity, own.quota);
        forget_prompt(pick(o.num));
    }
    drain(by_states);
    close_cache();
    end_store();
}

/* ---- a fetch that lacks room ------------------------------------------------------------------------------------- */

/* While the store reads, others use another prompt: the call that reads may not evict its blocks any more. */
static void use_another(void) {
    const prompt *own = fetching.prompt;
    prompt *p = &o.prompts[pick(o.num)];
    check_drops();
    fetching.prompt = NULL;
    if (p != own && !pick(3)) use(p);
    fetching.prompt = own;
}

/* A fetch ends early only if there is no room, and no block that was used before it, or if its own blocks go. */
static void fetch_into(prompt *p, int room) {
    const int known = p->left;
    int held = 0, is_older = 0;
    p->used = ++o.clock;
    p->may = LONG_MAX;
    fetching.prompt = p;
    store.before = use_another;
    const int num = fetch(p->text);
    store.before = NULL;
    check_drops();
    fetching.prompt = NULL;
    p->may = ++o.clock;
    for (const prompt *q = o.prompts; q < o.prompts + o.num; q++) {
        held += q->left;
        is_older |= q->left && q->may < p->used;
    }
    if (p->left < text_length(p->text) && p->left == known + num && (is_older || held + o.block <= room))
        wrong("%d tokens of %s are fetched behind %d; %d are held, of %d", num, spell(p->text), known, held, room);
}

static void scene_room(void) {
    const int by_bytes = !pick(3);
    int64_t num;
    int longest = 0;
    make_shape(by_bytes || pick(3) ? 0 : 2 + pick(3));
    o.num = least(o.num, 4);
    const int all = choose_prompts(0);
    for (int i = 0; i < o.num; i++)
        if (text_length(o.prompts[i].text) > longest) longest = text_length(o.prompts[i].text);
    const int room = longest + pick(all - longest);
    open_cache(room, by_bytes, (kvc_prefix_config){.collects_new = 1});
    for (int i = 0; i < o.num; i++) {
        use(&o.prompts[i]);
        must(kvc_store_new_blocks(o.cache, &in_memory, &num));
    }
    for (w.o.now = 0; w.o.now < 10; w.o.now++)
        if (pick(3))
            fetch_into(&o.prompts[pick(o.num)], by_bytes ? 0 : room);
        else
            evict_some();
    close_cache();
    end_store();
}

/* ---- the order of states ----------------------------------------------------------------------------------------- */

/* A state behind a text.  Times are doubled: 1 more is later in the same call. */
typedef struct mark {
    int text;       /* 0: the state is gone */
    long sure, may; /* when it was used last, and may have been */
} mark;

static int block_of(int text) { return (text_length(text) - 1) / o.block * o.block; }

/* A prompt goes on from a state.  States before it may be used by that, too, and those beside it in its block before
 * it. */
static void go_on_from(mark *from, mark *marks, int num) {
    int matched;
    const int length = text_length(from->text), begin = block_of(from->text);
    must(kvc_clear_sequence(o.cache, acquire(text_behind(from->text, pick(SYMBOLS)), &matched)));
    if (matched != length) wrong("%d tokens behind %s are matched", matched, spell(from->text));
    o.clock++;
    for (int i = 0; i < num; i++) {
        const int at = block_of(marks[i].text);
        if (at <= begin && text_common(marks[i].text, from->text) > at) marks[i].may = 2 * o.clock + (at < begin);
    }
    from->sure = from->may = 2 * o.clock + 1;
}

/* Another prompt gets states, so that one after the other goes: those used earlier first. */
static void drop_states(mark *marks, int num) {
    int matched;
    const int other = any_text_of(o.num, num);
    const int64_t id = acquire(text_behind(other, 0), &matched);
    for (int at = 1; at <= num; at++) {
        mark *gone = NULL;
        feed(id, 1);
        checkpoint(id, text_begin(other, at));
        for (mark *m = marks; m < marks + num; m++)
            if (m->text && known_of(m->text) != text_length(m->text)) gone = m;
        if (!gone) wrong("no state goes for state %d", at);
        for (const mark *m = marks; m < marks + num; m++)
            if (m->text && m->may < gone->sure)
                wrong("the state of %s, used at %ld, goes before that of %s, used at %ld", spell(gone->text),
                      gone->sure, spell(m->text), m->may);
        gone->text = 0;
    }
}

static void scene_states(void) {
    enum { EACH = 4 };
    mark marks[EACH * MOST_PROMPTS];
    int num = 0;
    do make_shape(pick(3) ? 0 : 2 + pick(3));
    while (o.block < 2);
    for (int i = 0; i < o.num; i++) {
        prompt *p = &o.prompts[i];
        const int length = o.block * (1 + pick(3));
        p->text = any_text_of(i, length);
        for (int j = 0; j < EACH; j++) p->states |= (uint64_t)1 << (1 + pick(length));
        for (int at = 1; at <= length; at++)
            if (p->states >> at & 1) marks[num++] = (mark){text_begin(p->text, at), 2 * i, 2 * i + 1};
    }
    open_cache(0, 0, (kvc_prefix_config){.state_bytes = ONE_STATE, .max_checkpoint_bytes = ONE_STATE * num});
    for (; o.clock < o.num; o.clock++) serve(o.prompts[o.clock].text, o.prompts[o.clock].states, 1);
    for (int step = pick(10); step; step--) go_on_from(&marks[pick(num)], marks, num);
    drop_states(marks, num);
    close_cache();
}

/* A fetch brings a later state of a block that is kept. */
static void scene_later(void) {
    int64_t num;
    int matched;
    do make_shape(pick(3) ? 0 : 2 + pick(3));
    while (o.block < 2);
    const int length = o.block * (1 + pick(3)), text = any_text_of(0, length);
    const int early = length - o.block + 1 + pick(o.block - 1), late = early + 1 + pick(length - early);
    open_cache(0, 0,
               (kvc_prefix_config){.collects_new = 1, .state_bytes = ONE_STATE, .max_checkpoint_bytes = ONE_STATE * 2});
    serve(text, (uint64_t)1 << late, 1);
    must(kvc_store_new_blocks(o.cache, &in_memory, &num));
    must(kvc_prefix_clear(o.prefix));
    serve(text, (uint64_t)1 << early, 1);
    fetch(text);
    must(kvc_clear_sequence(o.cache, acquire(text_behind(text, 0), &matched)));
    if (matched != late) wrong("%d tokens of %s are matched, not %d", matched, spell(text), late);
    close_cache();
    end_store();
}

/* ---- tokens from elsewhere --------------------------------------------------------------------------------------- */

/* The tokens of a prompt behind its known ones are taken from another prompt, where they stand at other positions. */
static void scene_reuse(void) {
    const int most = 1 + pick(6), shift = 1 + pick(4);
    int matched, text = 0;
    make_shape(0);
    const int common = least(2 * o.block + pick(8), MOST_TEXT - 12);
    if (common < 2 * o.block || common < most) return;
    const int length = 1 + pick(4) + common, other = any_text_of(0, length);
    while (text_length(text) < shift) text = text_behind(text, 1);
    for (int i = length - common; i < length; i++) text = text_behind(text, text_symbol(text_begin(other, i + 1)));
    open_cache(0, 0, (kvc_prefix_config){.reuse_min_tokens = most});
    serve(text_begin(text, shift), 0, 1); /* neither takes anything from the other one */
    serve(other, 0, 1);
    const int64_t id = acquire(text_behind(text, 0), &matched);
    if (matched < shift + common)
        wrong("%s: %d tokens are known, and %s has the others, but only %d match", spell(text), shift, spell(other),
              matched);
    if (kvc_exact_to(o.cache, id) != shift) wrong("moved tokens are exact to %d", kvc_exact_to(o.cache, id));
    close_cache();
}

/* ---- a prompt that is forgotten while a store works -------------------------------------------------------------- */

static int forgets_in;   /* calls of the store until prompt 0 is forgotten */
static int serves_again; /* and whether it is then computed and stored again */

static void forget(void) {
    int64_t num;
    if (forgets_in--) return;
    forget_prompt(0);
    if (!serves_again) return;
    serve(o.prompts[0].text, 0, 1);
    must(kvc_store_new_blocks(o.cache, &in_memory, &num)); /* the call on the way writes its block again */
}

static void forget_in(int turn, int again) {
    forgets_in = turn;
    serves_again = again;
    *(pick(2) ? &store.before : &store.behind) = forget;
}

static void forget_while_writing(int first, int all) {
    const int private = o.prompts[0].text, other = o.prompts[1].text, turn = pick(all);
    int64_t num;
    const int again = pick(2);
    forget_in(turn, again);
    must(kvc_store_new_blocks(o.cache, &in_memory, &num));
    for (int i = 0; i < text_length(private) / o.block; i++) {
        const int right = first + i < turn || again;
        if (is_stored(private, i) != right)
            wrong("block %d of a prompt that is forgotten in turn %d is %sstored", i, turn, right ? "not " : "");
    }
    for (int i = 0; i < text_length(other) / o.block; i++)
        if (!is_stored(other, i)) wrong("block %d of another prompt is not stored", i);
}

static void forget_while_reading(int all) {
    const int private = o.prompts[0].text, other = o.prompts[1].text, turn = pick(text_length(private) / o.block);
    int64_t num;
    must(kvc_store_new_blocks(o.cache, &in_memory, &num));
    if (num != all) wrong("%d blocks are written of %d", (int)num, all);
    must(kvc_prefix_clear(o.prefix));
    forget_in(turn, 0);
    const int fetched = fetch(private);
    if (known_of(private)) wrong("a forgotten prompt is fetched still");
    if (fetched != turn * o.block) wrong("%d tokens are fetched before turn %d", fetched, turn);
    fetch(other);
    if (known_of(other) != text_length(other)) wrong("another prompt is not fetched any more");
    fetch(private);
    if (known_of(private) != text_length(private)) wrong("what is fetched later does not count as new");
}

static void scene_forget(void) {
    int all = 0;
    make_shape(pick(3) ? 0 : 2 + pick(3));
    o.num = 2;
    open_cache(0, 0, (kvc_prefix_config){.collects_new = 1});
    for (int i = 0; i < o.num; i++) {
        o.prompts[i].text = any_text_of(i, o.block * (1 + pick(least(5, (MOST_TEXT - 1) / o.block))));
        all += text_length(o.prompts[i].text) / o.block;
    }
    const int is_first = pick(2);
    serve(o.prompts[!is_first].text, 0, 1);
    serve(o.prompts[is_first].text, 0, 1);
    if (pick(2))
        forget_while_writing(is_first ? 0 : text_length(o.prompts[1].text) / o.block, all);
    else
        forget_while_reading(all);
    close_cache();
    end_store();
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

static int run(uint64_t seed, int num_scenes) {
    static void (*const scenes[])(void) = {scene_evict, scene_fetch, scene_room,  scene_states,
                                           scene_later, scene_reuse, scene_forget};
    client own = {.chance = {.state = seed}};
    me = &own;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    forget_texts();
    for (int i = 0; i < num_scenes; i++) scenes[pick(sizeof scenes / sizeof *scenes)]();
    return 0;
}

int main(int argc, char **argv) { return run_all(argc, argv, 20, run); }
