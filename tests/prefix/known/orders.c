/* orders.c: five scenes.  Blocks are evicted in the order of their use.  Fetched blocks are, too, and states.  Rows are
 * taken from elsewhere.  Prompts are forgotten while a store works.  In each world the header leaves nothing open. */
#include "known.h"

enum { MOST_ORDERED = 6, MOST_DROPS = 256, MOST_STORED = 128, ORDERED_STATE = 8, ORDERED_TTL = 1050 };

/* A prefix of a cache whose layers all see everything. */
typedef struct ordered {
    kvc_cache *cache;
    kvc_prefix *prefix;
    int num, texts[MOST_ORDERED]; /* of whole blocks; no two begin alike */
    long used[MOST_ORDERED];      /* when each was used last; 0: none of its blocks is left */
    int left[MOST_ORDERED];       /* its blocks that are kept */
    int is_pinned[MOST_ORDERED];
    uint64_t states[MOST_ORDERED]; /* bits of the positions behind which a state is kept; 0: the prefix has no states */
    long clock;
} ordered;

/* Makes a cache of the world's shape, and its prefix. */
static void open_shape(world *w, ordered *o, int64_t capacity, kvc_prefix_config own) {
    w->shape.config.max_bytes = 0, w->shape.config.capacity = capacity;
    own.struct_size = sizeof own, own.fingerprint = "a", own.max_events = MOST_DROPS;
    must(w, kvc_cache_new(&w->shape.config, &o->cache));
    must(w, kvc_prefix_new(o->cache, &own, &o->prefix));
}

static void choose_ordered(world *w, ordered *o) {
    do make_shape(w, &w->shape);
    while (w->shape.has_windows);
    *o = (ordered){.num = 2 + pick(w, MOST_ORDERED - 1)};
}

static void open_ordered(world *w, ordered *o, int64_t capacity, kvc_prefix_config own) {
    do choose_ordered(w, o);
    while (own.reuse_min_tokens && w->shape.unit > 1);
    open_shape(w, o, capacity, own);
}

static void close_ordered(world *w, ordered *o) {
    if (kvc_validate(o->cache)) fail(w, "%s", kvc_last_error());
    must(w, kvc_cache_free(o->cache));
}

static int random_text(world *w, int first, int length) {
    int node = text_behind(0, first);
    while (text_length(node) < length) node = text_behind(node, pick(w, SYMBOLS));
    return node;
}

/* Acquires a text, feeds what is not known of it, and keeps it, or only ends; returns how much matched.  Keeps states
 * behind some positions. */
static int serve_marked(world *w, const ordered *o, int node, uint64_t states, int is_released) {
    static const uint8_t state[ORDERED_STATE];
    text_tokens tokens;
    int64_t id;
    int32_t matched;
    must(w, kvc_prefix_acquire(o->prefix, tokens_of(text_behind(node, 0), &tokens), -1, &id, &matched));
    for (int at = matched; at < text_length(node);) {
        int n = 1 + pick(w, text_length(node) - at), marked = 1;
        while (marked < n && !(states >> (at + marked) & 1)) marked++;
        feed_tokens(w, o->cache, id, marked);
        at += marked;
        if (!(states >> at & 1)) continue;
        must(w, kvc_prefix_checkpoint(o->prefix, id, tokens_of(text_begin(node, at), &tokens), state, sizeof state));
    }
    if (is_released)
        must(w, kvc_prefix_release(o->prefix, id, tokens_of(node, &tokens)));
    else
        must(w, kvc_clear_sequence(o->cache, id));
    return matched;
}

static int serve_text(world *w, const ordered *o, int node, int is_released) {
    return serve_marked(w, o, node, 0, is_released);
}

static int known_of(world *w, const ordered *o, int node) {
    text_tokens tokens;
    int32_t n;
    must(w, kvc_prefix_lookup(o->prefix, tokens_of(node, &tokens), &n, NULL));
    return n;
}

/* ---- the order of eviction */

/* Returns the text that has a full block with this name. */
static int text_named(world *w, const ordered *o, const uint8_t *name) {
    for (int i = 0; i < o->num; i++) {
        text_tokens tokens;
        uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
        int64_t num;
        must(w, kvc_prefix_names(o->prefix, tokens_of(o->texts[i], &tokens), names[0], MOST_TEXT, &num));
        for (int64_t j = 0; j < num; j++)
            if (!memcmp(names[j], name, KVC_NAME_BYTES)) return i;
    }
    fail(w, "a block of no text is dropped");
}

/* Checks that each block that was dropped was the least recently used one then that has no pin; returns how many. */
static int check_drops(world *w, ordered *o) {
    kvc_prefix_event events[MOST_DROPS];
    int64_t num, lost;
    int num_drops = 0;
    must(w, kvc_prefix_take_events(o->prefix, events, sizeof *events, MOST_DROPS, &num, &lost));
    for (int64_t i = 0; i < num; i++) {
        if (events[i].kind != KVC_BLOCK_DROPPED) continue;
        const int at = text_named(w, o, events[i].name);
        if (!o->left[at] || o->is_pinned[at]) fail(w, "text %d has lost a block that is pinned or not there", at);
        for (int j = 0; j < o->num; j++)
            if (o->left[j] && !o->is_pinned[j] && o->used[j] < o->used[at])
                fail(w, "text %d, used at %ld, has lost a block before text %d, used at %ld", at, o->used[at], j,
                     o->used[j]);
        o->left[at]--;
        num_drops++;
    }
    for (int i = 0; i < o->num; i++) /* a prompt ends before it begins to go */
        if (known_of(w, o, o->texts[i]) != o->left[i] * w->shape.block)
            fail(w, "%d tokens of text %d are known, and %d blocks are kept", known_of(w, o, o->texts[i]), i,
                 o->left[i]);
    return num_drops;
}

static void use_text(world *w, ordered *o, int at) {
    const int length = text_length(o->texts[at]), is_whole = o->left[at] * w->shape.block == length;
    o->used[at] = ++o->clock;
    serve_text(w, o, o->texts[at], is_whole ? pick(w, 2) : 1);
    o->left[at] = length / w->shape.block;
    check_drops(w, o); /* it may have needed room */
}

/* A pin, and its end, a lookup and names are no use. */
static void look_at_text(world *w, ordered *o, int at) {
    text_tokens tokens;
    const kvc_tokens *all = tokens_of(o->texts[at], &tokens);
    const int is_whole = o->left[at] * w->shape.block == text_length(o->texts[at]);
    int32_t n;
    int64_t num;
    switch (pick(w, 4)) {
    case 0: must(w, kvc_prefix_lookup(o->prefix, all, &n, NULL)); break;
    case 1: must(w, kvc_prefix_names(o->prefix, all, NULL, 0, &num)); break;
    default:
        if (o->is_pinned[at])
            must(w, kvc_prefix_unpin(o->prefix, all));
        else if (is_whole)
            must(w, kvc_prefix_pin(o->prefix, all, &n));
        if (is_whole || o->is_pinned[at]) o->is_pinned[at] = !o->is_pinned[at];
    }
}

void play_orders(world *w) {
    ordered o;
    const int block_room = pick(w, 2);
    open_ordered(w, &o, 0, (kvc_prefix_config){0});
    int64_t capacity = 0;
    for (int i = 0; i < o.num; i++) {
        o.texts[i] = random_text(w, i, w->shape.block * (1 + pick(w, least(5, (MOST_TEXT - 1) / w->shape.block))));
        capacity += text_length(o.texts[i]);
    }
    if (block_room) { /* all but some of them fit */
        close_ordered(w, &o);
        open_shape(w, &o, capacity, (kvc_prefix_config){0});
    }
    w->call = "the order of eviction";
    for (int i = 0; i < o.num; i++) use_text(w, &o, i);
    for (int step = 0; step < 40; step++) {
        const int at = pick(w, o.num);
        switch (pick(w, 4)) {
        case 0:
            if (!block_room || !o.is_pinned[at]) use_text(w, &o, at);
            break;
        case 1: {
            const int wanted = 1 + pick(w, 3 * w->shape.block);
            int64_t dropped = 0;
            int most = 0;
            for (int i = 0; i < o.num; i++) most += o.is_pinned[i] ? 0 : o.left[i];
            must(w, kvc_prefix_evict(o.prefix, wanted, &dropped));
            const int num = check_drops(w, &o), right = (wanted + w->shape.block - 1) / w->shape.block;
            if (num != least(right, most) || dropped != (int64_t)num * w->shape.block)
                fail(w, "%d tokens are to go, and %d do in %d of %d blocks", wanted, (int)dropped, num, most);
            break;
        }
        case 2:
            if (block_room && pick(w, 2)) { /* a sequence takes what is used least recently */
                int room = (int)capacity, n;
                for (int i = 0; i < o.num; i++) room -= o.is_pinned[i] ? o.left[i] * w->shape.block : 0;
                if ((n = least(pick(w, room + 1), MOST_TEXT))) feed_tokens(w, o.cache, 1 << 20, n);
                check_drops(w, &o);
                must(w, kvc_clear_sequence(o.cache, 1 << 20));
            }
            break;
        default: look_at_text(w, &o, at);
        }
        check_drops(w, &o);
    }
    close_ordered(w, &o);
}

/* ---- tokens from elsewhere */

/* The text behind the first token is taken from there, at another position, digests included. */
void play_reuse(world *w) {
    ordered o;
    const int least_row = 1 + pick(w, 6);
    open_ordered(w, &o, 0, (kvc_prefix_config){.reuse_min_tokens = least_row});
    const int block = w->shape.block, shift = 1 + pick(w, 4), common = least(2 * block + pick(w, 8), MOST_TEXT - 12);
    if (common < 2 * block || common < least_row) {
        close_ordered(w, &o);
        return;
    }
    const int length = 1 + pick(w, 4) + common, other = random_text(w, 0, length);
    int node = 0;
    while (text_length(node) < shift) node = text_behind(node, 1);
    for (int i = length - common; i < length; i++) node = text_behind(node, text_symbol(text_begin(other, i + 1)));
    w->call = "tokens from elsewhere";
    serve_text(w, &o, text_begin(node, shift), 1); /* neither takes anything from the other one */
    serve_text(w, &o, other, 1);
    text_tokens tokens;
    int64_t id;
    int32_t matched;
    must(w, kvc_prefix_acquire(o.prefix, tokens_of(text_behind(node, 0), &tokens), -1, &id, &matched));
    if (matched < shift + common)
        fail(w, "%d tokens are known, and %d stand elsewhere behind them, but only %d are matched", shift, common,
             matched);
    if (kvc_exact_to(o.cache, id) != shift) fail(w, "moved tokens are exact to %d", kvc_exact_to(o.cache, id));
    close_ordered(w, &o);
}

/* ---- a prompt that is forgotten while a store works */

static struct {
    world *w;
    const ordered *o;
    int node;                /* the prompt */
    int turn, is_late;       /* the call of the store in which it is forgotten, at its beginning or its end */
    void (*meanwhile)(void); /* what happens while a value is read; NULL: nothing */
    int num;
    uint8_t names[MOST_STORED][KVC_NAME_BYTES];
    uint8_t *values[MOST_STORED];
    int64_t sizes[MOST_STORED];
} shelf;

static void forget_at(int is_late) {
    text_tokens tokens;
    int64_t num, dropped;
    if (shelf.is_late != is_late || shelf.turn-- != 0) return;
    must(shelf.w, kvc_prefix_forget(shelf.o->prefix, tokens_of(shelf.node, &tokens), NULL, 0, &num, &dropped));
}

static int find_stored(const uint8_t *name) {
    int at = 0;
    while (at < shelf.num && (memcmp(shelf.names[at], name, KVC_NAME_BYTES) || !shelf.values[at])) at++;
    return at;
}

static kvc_status read_shelf(void *user, const uint8_t *name, void *to, int64_t most, int64_t *size) {
    const int at = find_stored(name);
    (void)user;
    forget_at(0);
    if (shelf.meanwhile) shelf.meanwhile();
    *size = at < shelf.num ? shelf.sizes[at] : 0;
    if (*size && *size <= most) memcpy(to, shelf.values[at], (size_t)*size);
    forget_at(1);
    return KVC_OK;
}

static kvc_status write_shelf(void *user, const uint8_t *name, const void *value, int64_t size) {
    int at = find_stored(name);
    (void)user;
    forget_at(0);
    if (at == shelf.num) memcpy(shelf.names[shelf.num++], name, KVC_NAME_BYTES);
    free(shelf.values[at]);
    memcpy(shelf.values[at] = malloc((size_t)size), value, (size_t)size);
    shelf.sizes[at] = size;
    forget_at(1);
    return KVC_OK;
}

static kvc_status remove_shelf(void *user, const uint8_t *name) {
    const int at = find_stored(name);
    (void)user;
    if (at == shelf.num) return KVC_OK;
    free(shelf.values[at]);
    shelf.values[at] = NULL;
    return KVC_OK;
}

static int is_stored(world *w, const ordered *o, int node, int at) {
    text_tokens tokens;
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num;
    must(w, kvc_prefix_names(o->prefix, tokens_of(node, &tokens), names[0], MOST_TEXT, &num));
    return find_stored(names[at]) < shelf.num;
}

void play_forgets(world *w) {
    ordered o;
    open_ordered(w, &o, 0, (kvc_prefix_config){.collects_new = 1});
    const int block = w->shape.block, most = least(5, (MOST_TEXT - 1) / block);
    const int num = 1 + pick(w, most), private = random_text(w, 0, block * num),
              other = random_text(w, 1, block * (1 + pick(w, most)));
    const kvc_store store = {
        .struct_size = sizeof store, .read = read_shelf, .write = write_shelf, .remove = remove_shelf};
    int64_t num_written;
    int32_t fetched;
    text_tokens tokens;
    memset(&shelf, 0, sizeof shelf);
    shelf.w = w, shelf.o = &o, shelf.node = private, shelf.turn = -1;
    const int private_first = pick(w, 2), all = num + text_length(other) / block;
    serve_text(w, &o, private_first ? private : other, 1);
    serve_text(w, &o, private_first ? other : private, 1);
    const int is_written = pick(w, 2);
    w->call =
        is_written ? "kvc_store_new_blocks beside kvc_prefix_forget" : "kvc_prefix_fetch beside kvc_prefix_forget";
    if (is_written) {
        const int turn = pick(w, all);
        shelf.turn = turn, shelf.is_late = pick(w, 2);
        must(w, kvc_store_new_blocks(o.cache, &store, &num_written));
        const int first =
            private_first ? 0 : all - num; /* the turns of the prompt's blocks, in which they are written */
        for (int i = 0; i < num; i++)
            if (is_stored(w, &o, private, i) != (first + i < turn))
                fail(w, "block %d of a prompt that is forgotten in turn %d is %sstored", i, turn,
                     first + i < turn ? "not " : "");
        for (int i = 0; i < text_length(other) / block; i++)
            if (!is_stored(w, &o, other, i)) fail(w, "block %d of another prompt is not stored", i);
    } else {
        must(w, kvc_store_new_blocks(o.cache, &store, &num_written));
        if (num_written != all) fail(w, "%d blocks are written of %d", (int)num_written, all);
        must(w, kvc_prefix_clear(o.prefix));
        const int turn = shelf.turn = pick(w, num);
        shelf.is_late = pick(w, 2);
        must(w, kvc_prefix_fetch(o.prefix, tokens_of(text_behind(private, 0), &tokens), -1, &store, &fetched));
        if (known_of(w, &o, private)) fail(w, "a forgotten prompt is fetched still");
        if (fetched != turn * block) fail(w, "%d tokens are fetched before turn %d", fetched, turn);
        must(w, kvc_prefix_fetch(o.prefix, tokens_of(text_behind(other, 0), &tokens), -1, &store, &fetched));
        if (known_of(w, &o, other) != text_length(other)) fail(w, "another prompt is not fetched any more");
        must(w, kvc_prefix_fetch(o.prefix, tokens_of(text_behind(private, 0), &tokens), -1, &store, &fetched));
        if (known_of(w, &o, private) != text_length(private)) fail(w, "what is fetched later does not count as new");
    }
    for (int i = 0; i < shelf.num; i++) free(shelf.values[i]);
    close_ordered(w, &o);
}

/* ---- the order of what is fetched */

static struct {
    ordered *o;
    int at, is_cold; /* the text that is fetched, and whether nothing of it was known before */
    int num_reads;
    long now;                    /* when the fetch uses its text; calls that come meanwhile count as equally late */
    int64_t ms[MOST_ORDERED];    /* when texts were used last */
    int is_sorted[MOST_ORDERED]; /* a fetch used a text last, which brought all its states */
} going;

static void compute_text(world *w, ordered *o, int at, long now) {
    serve_marked(w, o, o->texts[at], o->states[at], pick(w, 2));
    o->used[at] = now, going.ms[at] = w->ms, going.is_sorted[at] = !o->states[at];
}

/* While the store reads, time passes, and others use a text. */
static void go_on(void) {
    world *w = shelf.w;
    ordered *o = going.o;
    const int other = pick(w, o->num), is_first = !going.num_reads++;
    if (pick(w, 3) == 0) w->ms += is_first && going.is_cold ? pick(w, 3 * ORDERED_TTL) : pick(w, ORDERED_TTL / 2);
    if (other != going.at && pick(w, 4) == 0) compute_text(w, o, other, going.now);
}

static void fetch_text(world *w, ordered *o, int at) {
    const kvc_store store = {
        .struct_size = sizeof store, .read = read_shelf, .write = write_shelf, .remove = remove_shelf};
    const int length = text_length(o->texts[at]), before = known_of(w, o, o->texts[at]);
    text_tokens tokens;
    int32_t fetched;
    going.at = at, going.is_cold = !before, going.num_reads = 0, going.now = ++o->clock;
    shelf.meanwhile = go_on;
    must(w, kvc_prefix_fetch(o->prefix, tokens_of(text_behind(o->texts[at], 0), &tokens), -1, &store, &fetched));
    shelf.meanwhile = NULL;
    if (fetched < length - before)
        fail(w, "text %d: %d tokens are fetched behind %d of %d", at, fetched, before, length);
    o->used[at] = going.now, going.ms[at] = w->ms, going.is_sorted[at] = !before;
}

/* Checks that only the least recently used text loses tokens, and these from its end on: one state or block at once. */
static void check_losses(world *w, const ordered *o, int *left) {
    for (int i = 0; i < o->num; i++) {
        const int before = left[i], after = left[i] = known_of(w, o, o->texts[i]);
        int next = before - w->shape.block;
        if (o->states[i])
            for (next = before - 1; next > 0 && !(o->states[i] >> next & 1);) next--;
        if (after == before) continue;
        if (after > before || (going.is_sorted[i] && after != next))
            fail(w, "%d tokens of text %d are known, then %d, not %d", before, i, after, next);
        for (int j = 0; j < o->num; j++)
            if (left[j] && j != i && o->used[j] < o->used[i])
                fail(w, "text %d, used at %ld, loses tokens before text %d, used at %ld", i, o->used[i], j, o->used[j]);
    }
}

/* Drops one block after the other.  by_states: adds states of another text, so that one state after the other goes. */
static void drain(world *w, const ordered *o, int by_states) {
    static const uint8_t state[ORDERED_STATE];
    const int other = random_text(w, o->num, MOST_TEXT);
    int left[MOST_ORDERED];
    text_tokens tokens;
    int64_t id = -1, dropped = 1;
    int32_t matched;
    for (int i = 0; i < o->num; i++) left[i] = known_of(w, o, o->texts[i]);
    if (by_states) must(w, kvc_prefix_acquire(o->prefix, tokens_of(other, &tokens), -1, &id, &matched));
    for (int at = 1; dropped && (!by_states || at < MOST_TEXT); at++) {
        if (by_states) {
            feed_tokens(w, o->cache, id, 1);
            must(w,
                 kvc_prefix_checkpoint(o->prefix, id, tokens_of(text_begin(other, at), &tokens), state, sizeof state));
        } else {
            must(w, kvc_prefix_evict(o->prefix, 1, &dropped));
        }
        check_losses(w, o, left);
    }
}

static void check_quota(world *w, const ordered *o, int64_t quota) {
    const int64_t block = w->shape.block, most = (quota + block - 1) / block * block;
    kvc_prefix_stats stats;
    int64_t room = -1;
    kvc_prefix_get_stats(o->prefix, &stats, sizeof stats);
    must(w, kvc_room(o->cache, kvc_new_sequence(o->cache), &room));
    if (room != w->shape.config.capacity - (stats.held < most ? stats.held : most))
        fail(w, "room for %d, but %d tokens are held, and the quota is %d", (int)room, (int)stats.held, (int)quota);
}

/* Chooses whole blocks, and perhaps a state within some of them and at their end; returns how many tokens they are. */
static int choose_texts(world *w, ordered *o, int has_states) {
    const int block = w->shape.block, most = least(15, (MOST_TEXT - 1) / block);
    int sum = 0;
    for (int i = 0; i < o->num; i++) {
        const int length = block * (1 + pick(w, most));
        o->texts[i] = random_text(w, i, length);
        if (has_states) o->states[i] = (uint64_t)1 << length;
        for (int begin = 0; has_states && begin + block < length; begin += block)
            if (pick(w, 4)) o->states[i] |= (uint64_t)1 << (begin + 1 + pick(w, block));
        sum += length;
    }
    return sum;
}

/* Puts all texts into the store, and drops them. */
static void store_texts(world *w, ordered *o) {
    const kvc_store store = {.struct_size = sizeof store, .read = read_shelf, .write = write_shelf};
    int64_t num;
    memset(&shelf, 0, sizeof shelf), memset(&going, 0, sizeof going);
    shelf.w = w, shelf.o = o, shelf.turn = -1, going.o = o;
    for (int i = 0; i < o->num; i++) compute_text(w, o, i, 0);
    must(w, kvc_store_new_blocks(o->cache, &store, &num));
    must(w, kvc_prefix_clear(o->prefix));
}

static void use_texts(world *w, ordered *o, int has_time) {
    for (int step = 1 + pick(w, 10); step; step--) {
        const int at = pick(w, o->num);
        if (pick(w, 3))
            fetch_text(w, o, at);
        else
            compute_text(w, o, at, ++o->clock);
        if (known_of(w, o, o->texts[at]) != text_length(o->texts[at])) fail(w, "text %d is not known", at);
        for (int i = 0; i < o->num; i++)
            if (has_time && w->ms - going.ms[i] > ORDERED_TTL && known_of(w, o, o->texts[i]))
                fail(w, "text %d has expired, and is known", i);
    }
}

/* Blocks and states of several texts are fetched and computed, and then go in the order of their use. */
void play_fetches(world *w) {
    ordered o;
    kvc_prefix_config own = {.collects_new = 1};
    const int has_states = pick(w, 2), by_states = has_states && pick(w, 2), has_time = pick(w, 2);
    choose_ordered(w, &o);
    const int num_tokens = choose_texts(w, &o, has_states), block = w->shape.block;
    if (has_states) own.state_bytes = ORDERED_STATE;
    if (has_time) own.ttl_ms = ORDERED_TTL;
    if (!has_states && pick(w, 2)) own.quota = 1 + pick(w, 80);
    for (int i = 0; by_states && i < o.num; i++)
        own.max_checkpoint_bytes += (int64_t)ORDERED_STATE * __builtin_popcountll(o.states[i]);
    open_shape(w, &o, own.quota ? num_tokens + 5 * block : 0, own);
    w->call = "the order of what is fetched";
    store_texts(w, &o);
    use_texts(w, &o, has_time);
    if (own.quota) check_quota(w, &o, own.quota);
    drain(w, &o, by_states);
    for (int i = 0; i < shelf.num; i++) free(shelf.values[i]);
    close_ordered(w, &o);
}

/* ---- the order of states */

/* A state of a text.  Times are doubled: 1 more is later in the same call. */
typedef struct marked {
    int node;
    long sure, may; /* when it was used last, and may have been */
} marked;

/* Goes on from a state.  Others before it, and beside it in its block, may be used as well, those beside it before it.
 */
static void go_on_from(world *w, ordered *o, marked *states, int num, marked *from) {
    const int block = w->shape.block, length = text_length(from->node), begin = (length - 1) / block * block;
    text_tokens tokens;
    int64_t id;
    int32_t matched;
    const int prompt = text_behind(from->node, pick(w, SYMBOLS));
    o->clock++;
    must(w, kvc_prefix_acquire(o->prefix, tokens_of(prompt, &tokens), -1, &id, &matched));
    if (matched != length) fail(w, "%d tokens of %s are matched", matched, spell(prompt));
    must(w, kvc_clear_sequence(o->cache, id));
    for (int i = 0; i < num; i++) {
        const int at = (text_length(states[i].node) - 1) / block * block;
        if (at > begin || text_common(states[i].node, from->node) <= at) continue;
        states[i].may = 2 * o->clock + (at < begin);
    }
    from->sure = from->may = 2 * o->clock + 1;
}

/* Adds states of another text, so that one state after the other goes.  The states used earlier go first. */
static void drop_states(world *w, const ordered *o, marked *states, int num) {
    static const uint8_t state[ORDERED_STATE];
    const int other = random_text(w, o->num, num);
    text_tokens tokens;
    int64_t id;
    int32_t matched;
    must(w, kvc_prefix_acquire(o->prefix, tokens_of(text_behind(other, 0), &tokens), -1, &id, &matched));
    for (int at = 1; at <= num; at++) {
        int gone = -1;
        feed_tokens(w, o->cache, id, 1);
        must(w, kvc_prefix_checkpoint(o->prefix, id, tokens_of(text_begin(other, at), &tokens), state, sizeof state));
        for (int i = 0; i < num; i++)
            if (states[i].node && known_of(w, o, states[i].node) != text_length(states[i].node)) gone = i;
        if (gone < 0) fail(w, "no state has gone for state %d", at);
        for (int i = 0; i < num; i++)
            if (states[i].node && states[i].may < states[gone].sure)
                fail(w, "the state of %s, used at %ld, goes before that of %s, used at %ld", spell(states[gone].node),
                     states[gone].sure, spell(states[i].node), states[i].may);
        states[gone].node = 0;
    }
}

/* Prompts go on from states, of which several are in one block.  Then states go in the order of their use. */
void play_states(world *w) {
    enum { MARKS = 4 };
    ordered o;
    marked states[MARKS * MOST_ORDERED];
    int num = 0;
    do choose_ordered(w, &o);
    while (w->shape.block < 2);
    for (int i = 0; i < o.num; i++) {
        const int length = w->shape.block * (1 + pick(w, 3));
        o.texts[i] = random_text(w, i, length);
        for (int j = 0; j < MARKS; j++) o.states[i] |= (uint64_t)1 << (1 + pick(w, length));
        for (int at = 1; at <= length; at++)
            if (o.states[i] >> at & 1) states[num++] = (marked){text_begin(o.texts[i], at), 2 * i, 2 * i + 1};
    }
    open_shape(w, &o, 0,
               (kvc_prefix_config){.state_bytes = ORDERED_STATE, .max_checkpoint_bytes = ORDERED_STATE * num});
    w->call = "the order of states";
    for (; o.clock < o.num; o.clock++) serve_marked(w, &o, o.texts[o.clock], o.states[o.clock], 1);
    for (int step = pick(w, 10); step; step--) go_on_from(w, &o, states, num, &states[pick(w, num)]);
    drop_states(w, &o, states, num);
    close_ordered(w, &o);
}
