/* orders.c: three scenes.  Blocks are evicted in order, rows are taken from elsewhere, and prompts are forgotten while
 * a store works.  Each has worlds in which the header leaves nothing open. */
#include "known.h"

enum { MOST_ORDERED = 6, MOST_DROPS = 256, MOST_STORED = 128 };

/* A prefix of a cache whose layers all see everything. */
typedef struct ordered {
    kvc_cache *cache;
    kvc_prefix *prefix;
    int num, texts[MOST_ORDERED]; /* of whole blocks; no two begin alike */
    long used[MOST_ORDERED];      /* when each was used last; 0: none of its blocks is left */
    int left[MOST_ORDERED];       /* its blocks that are kept */
    int is_pinned[MOST_ORDERED];
    long clock;
} ordered;

static void open_ordered(world *w, ordered *o, int64_t capacity, kvc_prefix_config own) {
    do make_shape(w, &w->shape);
    while (w->shape.has_windows);
    *o = (ordered){.num = 2 + pick(w, MOST_ORDERED - 1)};
    w->shape.config.max_bytes = 0, w->shape.config.capacity = capacity;
    own.struct_size = sizeof own, own.fingerprint = "a", own.max_events = MOST_DROPS;
    must(w, kvc_cache_new(&w->shape.config, &o->cache));
    must(w, kvc_prefix_new(o->cache, &own, &o->prefix));
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

/* Acquires a text, feeds what is not known of it, and keeps it, or only ends; returns how much matched. */
static int serve_text(world *w, const ordered *o, int node, int is_released) {
    text_tokens tokens;
    int64_t id;
    int32_t matched;
    must(w, kvc_prefix_acquire(o->prefix, tokens_of(text_behind(node, 0), &tokens), -1, &id, &matched));
    for (int at = matched, n; at < text_length(node); at += n)
        feed_tokens(w, o->cache, id, n = 1 + pick(w, text_length(node) - at));
    if (is_released)
        must(w, kvc_prefix_release(o->prefix, id, tokens_of(node, &tokens)));
    else
        must(w, kvc_clear_sequence(o->cache, id));
    return matched;
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
        ordered again = o;
        w->shape.config.capacity = capacity;
        must(w, kvc_cache_new(&w->shape.config, &again.cache));
        const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a", .max_events = MOST_DROPS};
        must(w, kvc_prefix_new(again.cache, &own, &again.prefix));
        o = again;
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
    int node;          /* the prompt */
    int turn, is_late; /* the call of the store in which it is forgotten, at its beginning or its end */
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
