/* drive_limits.c: closed worlds of several layer groups, prefixes and sequences, in which the header leaves nothing
 * open.
 *
 *     drive_limits --seed 1 --runs 100
 *
 * Each run plays some scenes:
 *
 *   scene_victims   A batch, or kvc_prefix_evict, drops blocks.  Which ones follows from where all rows lie
 *                   (kvc_blocks), from the order of uses, and from the limit, to the byte and the slot.
 *   scene_promises  Batches after kvc_room and kvc_reserve fit, and take no memory.
 *   scene_sources   Sequences share rows of several prefixes, which forget.  A prefix keeps its own alone. */
#define _DEFAULT_SOURCE
#include "victims.h"

/* ---- the scene of victims ---------------------------------------------------------------------------------------- */

/* Chooses the limit: often as many bytes as some blocks count. */
static void open_limited(const kvc_allocator *allocator, int is_limited) {
    kvc_config config = config_of_layers();
    int64_t num;
    int blocks = 6 + pick(20);
    must(kvc_cache_new(&config, &o.cache));
    must(feed_some(0, o.block));
    for (int l = 0; l < o.num_layers; l++) {
        if (!leads_group(&w.o, l)) continue;
        must(kvc_blocks(o.cache, l, places[l].blocks, sizeof(kvc_block_info), 1, &num, NULL, sizeof(kvc_run_info), 0,
                        &num));
        v.costs[l] = places[l].blocks[0].bytes;
        v.budget += v.costs[l] * (blocks + pick(5));
    }
    must(kvc_cache_free(o.cache));
    v.budget += pick(2) ? pick(3) - 1 : pick(3 * STATE_ROOM);
    if (!pick(4)) v.capacity = blocks * o.block + pick(o.block), v.budget = 0;
    if (!is_limited) v.budget = v.capacity = 0;
    config.capacity = v.capacity;
    config.max_seq_len = v.max_seq_len;
    config.allocator = allocator;
    must(kvc_cache_new(&config, &o.cache));
    if (v.budget) {
        config.max_bytes = kvc_nbytes(o.cache) + v.budget;
        must(kvc_cache_free(o.cache));
        must(kvc_cache_new(&config, &o.cache));
    }
    const int has_states = is_limited && !pick(3);
    for (int i = 0; i < 2; i++) {
        const kvc_prefix_config own = {.struct_size = sizeof own,
                                       .fingerprint = "a model",
                                       .salt = i ? "b" : "a",
                                       .salt_size = 1,
                                       .state_bytes = has_states ? STATE_ROOM : 0};
        must(kvc_prefix_new(o.cache, &own, &v.prefixes[i]));
    }
    o.prefix = v.prefixes[0];
}

/* Texts that begin alike by whole blocks.  The last block of a text may have fewer tokens. */
static void choose_texts(void) {
    o.num = 2 + pick(MOST_PROMPTS - 1);
    for (int i = 0; i < o.num; i++) {
        const int other = i ? o.prompts[pick(i)].text : 0, most = MOST_TEXT / o.block - 1;
        int text = text_begin(other, pick(text_length(other) / o.block + 1) * o.block);
        const int length = least(text_length(text) + o.block * (1 + pick(4)), most * o.block) - pick(2) * pick(o.block);
        for (int at = text_length(text); at < length; at++) text = text_behind(text, at % o.block ? pick(SYMBOLS) : i);
        o.prompts[i].text = text;
    }
}

/* Whether a block has tokens of a text alone, or, where the text ends in it, begins with them. */
static int is_on(const kept *k, int prefix, int text) {
    return k->prefix == prefix && text_common(k->text, text) == least(text_length(text), text_length(k->text)) &&
           begin_of(k) < text_length(text);
}

/* A prompt's blocks were used by a call, those nearer to the beginning later. */
static void note_uses(int prefix, int text) {
    o.clock += MOST_TEXT;
    for (kept *k = v.kept; k < v.kept + v.num_kept; k++)
        if (is_on(k, prefix, text)) k->used = o.clock - begin_of(k);
}

static void end_other(int i) {
    must(kvc_clear_sequence(o.cache, v.others[i]));
    v.others[i] = v.others[--v.num_others];
}

/* Another sequence keeps rows of this one, if there may be one more. */
static void fork_one(int64_t id) {
    if (v.num_others == MOST_OTHERS) return;
    v.others[v.num_others] = kvc_new_sequence(o.cache);
    must(kvc_fork(o.cache, id, v.others[v.num_others++]));
}

static void note_state(int prefix, int text, int64_t bytes) {
    for (kept *k = v.kept; k < v.kept + v.num_kept; k++)
        if (k->prefix == prefix && k->text == text && !k->state) k->state = bytes; /* one that is there stays */
}

/* A sequence that holds the first tokens of a prompt has all rows that the next token sees. */
static void check_shown(int64_t id, int32_t next) {
    for (int l = 0; l < o.num_layers; l++) {
        const kvc_policy *policy = &o.layers[l].policy;
        int32_t positions[MOST_TEXT];
        uint64_t there = 0;
        const int64_t num = kvc_positions(o.cache, id, l, positions, MOST_TEXT);
        for (int64_t i = 0; i < num; i++) there |= (uint64_t)1 << positions[i];
        for (int32_t at = 0; at < next; at++) {
            const int is_seen = at >= lowest_seen(policy, next) || at < policy->num_sink_tokens;
            if (is_seen && gets_row(&w.o, l, at) && !(there >> at & 1))
                wrong("layer %d: %d tokens are matched, without the row at %d", l, next, at);
        }
    }
}

/* Feeds a prompt, and keeps it, perhaps in the other prefix as well; returns 0 if there was no room. */
static int serve_in(int prefix, int text) {
    static const uint8_t state[STATE_ROOM];
    const int length = text_length(text), has_states = pick(2);
    int64_t id, bytes;
    int32_t at;
    o.prefix = v.prefixes[prefix];
    if (kvc_prefix_acquire(o.prefix, tokens_in(text_behind(text, 0)), -1, &id, &at)) return 0;
    check_shown(id, at);
    kvc_status status = kvc_prefix_state(o.prefix, id, NULL, 0, &bytes);
    if (!at && bytes) wrong("%s goes on from a state of %d bytes, behind no token", spell(text), (int)bytes);
    while (at < length && !status) {
        const int next = least(at / o.block * o.block + o.block * (1 + pick(2)), length), n = 1 + pick(next - at);
        status = feed_some(id, n);
        at += status ? 0 : n;
        look(prefix, text);
        if (status || at % o.block || !has_states || pick(3)) continue;
        bytes = 1 + pick(STATE_ROOM);
        const int part = text_begin(text, at);
        const int is_kept = !kvc_prefix_checkpoint(o.prefix, id, tokens_in(part), state, bytes);
        look(prefix, text);
        if (is_kept) note_state(prefix, part, bytes);
    }
    if (!status && !pick(4)) fork_one(id);
    const int64_t copy = kvc_new_sequence(o.cache);
    if (!status) must(kvc_fork(o.cache, id, copy));
    must(status ? kvc_clear_sequence(o.cache, id) : kvc_prefix_release(o.prefix, id, tokens_in(text)));
    look(prefix, text);
    note_uses(prefix, text);
    if (!status && !pick(3)) { /* the other prefix keeps the same rows */
        must(kvc_prefix_release(v.prefixes[!prefix], copy, tokens_in(text)));
        look(!prefix, text);
        note_uses(!prefix, text);
    } else {
        must(kvc_clear_sequence(o.cache, copy));
    }
    return !status;
}

/* A batch of a new sequence evicts what is right, and goes on as another one, or is aborted. */
static void begin_other(void) {
    const int64_t id = kvc_new_sequence(o.cache);
    kvc_batch *batch;
    int64_t room;
    look(0, 0);
    must(kvc_room(o.cache, id, &room));
    const int n = 1 + (pick(2) ? pick((int)(room < 40 ? room + 1 : 40)) : pick(2 * o.block));
    const int right = predict(n);
    const kvc_status status = begin(id, n, &batch);
    if ((status == KVC_OK) != right || (status == KVC_OK) != (n <= room))
        wrong("a batch of %d tokens: status %d, room for %d", n, status, (int)room);
    check_kept("a batch of tokens", n);
    if (status) return;
    for (int i = 0; i < v.num_kept; i++) v.kept[i].fate = STAYS;
    if (v.budget && bytes_with(0, 0, 0) > v.budget)
        wrong("%d bytes count, and %d may", (int)bytes_with(0, 0, 0), (int)v.budget);
    if (v.num_others == MOST_OTHERS || pick(2)) {
        kvc_abort(batch);
        return;
    }
    put_all(batch);
    v.others[v.num_others++] = id;
}

static void evict_from(int prefix) {
    const int wanted = 1 + pick(3 * o.block);
    int64_t dropped, right = 0;
    look(0, 0);
    qsort(v.kept, (size_t)v.num_kept, sizeof *v.kept, by_use);
    for (kept *k = v.kept; k < v.kept + v.num_kept; k++) {
        k->fate = k->prefix == prefix && !k->pins && right < wanted ? GOES : STAYS;
        right += k->fate == GOES ? tokens_of_kept(k) : 0;
    }
    must(kvc_prefix_evict(v.prefixes[prefix], wanted, &dropped));
    if (dropped != right) wrong("%d tokens are dropped, not %d", (int)dropped, (int)right);
    check_kept("kvc_prefix_evict", wanted);
}

/* Pins a prompt of which all blocks are kept, or takes a pin back. */
static void pin_or_not(int prefix, int text) {
    int32_t num = 0, known;
    look(0, 0);
    for (const kept *k = v.kept; k < v.kept + v.num_kept; k++) num += is_on(k, prefix, text) ? tokens_of_kept(k) : 0;
    must(kvc_prefix_lookup(v.prefixes[prefix], tokens_in(text), &known, NULL));
    if (v.num_pins && pick(2)) {
        const pin_of p = v.pins[--v.num_pins];
        must(kvc_prefix_unpin(v.prefixes[p.prefix], tokens_in(p.text)));
        for (kept *k = v.kept; k < v.kept + v.num_kept; k++) k->pins &= ~(1u << v.num_pins);
    } else if (v.num_pins < 2 && num == text_length(text) && known == num &&
               !kvc_prefix_pin(v.prefixes[prefix], tokens_in(text), &known)) {
        look(0, 0);
        for (kept *k = v.kept; k < v.kept + v.num_kept; k++)
            if (is_on(k, prefix, text)) k->pins |= 1u << v.num_pins;
        v.pins[v.num_pins++] = (pin_of){prefix, text};
    }
}

/* Begins a sequence with a part of a text, and lets the sequence wait.  Or ends a waiting sequence. */
static void begin_or_end(int prefix, int text) {
    if (v.num_begun == 2 || (v.num_begun && pick(2))) {
        const begun b = v.begun[--v.num_begun];
        must(kvc_clear_sequence(o.cache, b.id));
        note_uses(b.prefix, text_begin(b.text, text_length(b.text) / o.block * o.block));
        return;
    }
    const kvc_tokens *tokens = tokens_in(text_begin(text, 1 + pick(text_length(text))));
    const int64_t bytes = sizeof(int64_t) + (tokens->digests ? KVC_NAME_BYTES : 0);
    begun *b = &v.begun[v.num_begun];
    int32_t matched;
    int64_t state;
    if (kvc_prefix_acquire(v.prefixes[prefix], tokens, -1, &b->id, &matched)) return;
    *b = (begun){b->id, bytes * (tokens->num_tokens - matched), prefix, text_begin(text, matched)};
    look(0, 0);
    note_uses(prefix, b->text);
    must(kvc_prefix_state(v.prefixes[prefix], b->id, NULL, 0, &state));
    if (state)
        must(kvc_clear_sequence(o.cache, b->id)); /* it would keep its state, and these bytes, from going */
    else
        v.num_begun++;
}

static void hold_or_not(void) {
    kvc_span spans[MOST_TEXT];
    int64_t num;
    if (v.num_holds && (v.num_holds == 2 || pick(2))) {
        kvc_hold_free(v.holds[--v.num_holds]);
    } else if (v.num_others) {
        kvc_hold **hold = &v.holds[v.num_holds];
        const int64_t id = v.others[pick(v.num_others)];
        must(kvc_spans(o.cache, id, pick(o.num_layers), spans, sizeof *spans, MOST_TEXT, &num, hold));
        v.num_holds += *hold != NULL;
    }
}

static void scene_victims(void) {
    memset(&v, 0, sizeof v);
    make_layers();
    choose_texts();
    open_limited(NULL, 1);
    for (w.o.now = 0; w.o.now < 40; w.o.now++) {
        const int prefix = pick(2), text = o.prompts[pick(o.num)].text;
        const int kind = w.o.now < 3 ? 0 : pick(14);
        if (kind < 3 && !serve_in(prefix, text)) break;
        if (kind >= 3 && kind < 8) begin_other();
        if (kind == 8) evict_from(prefix);
        if (kind == 9) pin_or_not(prefix, text);
        if (kind == 10 && v.num_others) end_other(pick(v.num_others));
        if (kind == 11) hold_or_not();
        if (kind > 11) begin_or_end(prefix, text);
    }
    while (v.num_holds) kvc_hold_free(v.holds[--v.num_holds]);
    close_cache();
}

/* ---- what calls promise of the next batches ---------------------------------------------------------------------- */

static int64_t requests[4]; /* for memory, by its kind */

static void *take_memory(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user;
    requests[hint->kind]++;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void give_memory(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    free(memory);
}

/* As many tokens as there is room for begin a batch, and one more does not. */
static void check_room(int64_t id) {
    kvc_batch *batch;
    int64_t room;
    must(kvc_room(o.cache, id, &room));
    if (room >= MOST_TEXT - 1) return;
    if (begin(id, (int)room + 1, &batch) != KVC_ERR_FULL) wrong("there is room for more than %d tokens", (int)room);
    if (room && begin(id, (int)room, &batch)) wrong("there is no room for %d tokens", (int)room);
    if (room && v.num_holds == 0) kvc_abort(batch);
    if (room && v.num_holds) put_all(batch); /* aborted, it would use slots up */
}

/* Returns how many tokens go on to the end of a chunk, in a layer that has chunks; otherwise any number up to most. */
static int to_chunk(int64_t id, int most) {
    const kvc_policy *policy = &o.layers[pick(o.num_layers)].policy;
    const int size = policy->attention_chunk_size;
    return size ? least(most, size - (int)(kvc_next_position(o.cache, id) % size)) : 1 + pick(most);
}

/* Feeds reserved tokens in any batches, and aborts some batches.  fit: the tokens fit beside the blocks there are. */
static void feed_reserved(int64_t id, int left, int fit) {
    for (int tries = 0; left; tries++) {
        kvc_batch *batch;
        const int n = pick(2) ? to_chunk(id, left) : 1 + pick(left);
        const kvc_status status = begin(id, n, &batch);
        if (status == KVC_ERR_FULL && !fit) return;
        must(status);
        if (tries < 3 && !v.num_holds && !pick(3)) {
            kvc_abort(batch);
            continue;
        }
        put_all(batch);
        left -= n;
    }
}

/* Batches of reserved tokens take no memory, whatever lies in the blocks, if they fit beside the blocks there are. */
static void check_reserved(int64_t id, int n) {
    kvc_stats before, after;
    look(0, 0);
    const int fit = !v.budget || bytes_with(kvc_next_position(o.cache, id), n, 0) <= v.budget;
    kvc_get_stats(o.cache, &before, sizeof before);
    must(kvc_reserve(o.cache, id, n));
    memset(requests, 0, sizeof requests);
    feed_reserved(id, n, fit);
    kvc_get_stats(o.cache, &after, sizeof after);
    if (fit && after.rows_moved == before.rows_moved && requests[KVC_MEMORY_ROWS] + requests[KVC_MEMORY_BOOKKEEPING])
        wrong("batches of %d reserved tokens take %d blocks, and memory %d times for lists", n,
              (int)requests[KVC_MEMORY_ROWS], (int)requests[KVC_MEMORY_BOOKKEEPING]);
}

static void scene_promises(void) {
    static const kvc_allocator counting = {.struct_size = sizeof counting, .alloc = take_memory, .free = give_memory};
    memset(&v, 0, sizeof v);
    make_layers();
    if (!pick(3)) v.max_seq_len = 1 + pick(4 * o.block);
    open_limited(&counting, pick(2));
    const int64_t id = kvc_new_sequence(o.cache);
    v.others[v.num_others++] = id;
    for (int step = pick(12); step; step--) {
        const int kind = pick(6), at = pick(v.num_others);
        if (kind < 3) feed_some(v.others[at], 1 + pick(2 * o.block));
        if (kind == 3 && v.num_others < MOST_OTHERS) v.others[v.num_others++] = kvc_new_sequence(o.cache);
        if (kind == 4 && kvc_next_position(o.cache, id)) fork_one(id);
        if (kind == 5 && at) end_other(at);
    }
    if (pick(2) && kvc_next_position(o.cache, id)) { /* a fork has a part of the last block */
        fork_one(id);
        feed_some(id, 1 + pick(2));
    }
    hold_or_not();
    check_room(id);
    for (int times = 1 + pick(2); times; times--) {
        int64_t room;
        must(kvc_room(o.cache, id, &room));
        const int most = room < 30 ? (int)room : 30;
        if (room) check_reserved(id, pick(2) ? most : 1 + pick(most));
    }
    while (v.num_holds) kvc_hold_free(v.holds[--v.num_holds]);
    close_cache();
}

/* ---- whose rows a prefix keeps ----------------------------------------------------------------------------------- */

/* A sequence of the first tokens of one text. */
typedef struct source {
    int is_there;
    int64_t id;
    int length;
    long date; /* when the oldest sequence whose rows it has was begun or acquired; -1: some were restored */
    int from;  /* 1 + the prefix that acquired one of these; 0: none did; -1: several did */
    int keeps; /* 1 + the prefix for which commits keep its blocks; 0: they do not */
} source;

static struct {
    int text, num_bytes;
    int64_t reserved; /* a sequence that has memory, and no token yet; 0: none has */
    int known[2];     /* tokens that are known in each prefix */
    long horizons[2]; /* when it forgot last; 0: it never did */
    source all[5];
    uint8_t file[1 << 16];
} s;

static int32_t write_file(void *user, const void *data, size_t size) {
    (void)user;
    if (s.num_bytes + size > sizeof s.file) wrong("a file is too long");
    memcpy(s.file + s.num_bytes, data, size);
    s.num_bytes += (int)size;
    return 0;
}

/* Whether a prefix that has forgotten keeps anything of a sequence. */
static int may_keep(int prefix, const source *of) {
    return !s.horizons[prefix] || (of->date > s.horizons[prefix] && (!of->from || of->from == 1 + prefix));
}

/* A prefix keeps the first tokens of a sequence, as far as they are exact. */
static void note_kept_of(int prefix, const source *of, int length) {
    const int32_t exact = kvc_exact_to(o.cache, of->id);
    if (exact < length) length = exact;
    if (may_keep(prefix, of) && length > s.known[prefix]) s.known[prefix] = length;
}

static void feed_source(source *of) {
    const int n = 1 + pick(2 * o.block);
    if (of->length + n >= text_length(s.text)) return;
    if (!of->is_there) {
        *of = (source){.is_there = 1, .id = s.reserved ? s.reserved : kvc_new_sequence(o.cache), .date = o.clock};
        s.reserved = 0;
    }
    must(feed_some(of->id, n));
    of->length += n;
    if (of->keeps) note_kept_of(of->keeps - 1, of, of->length / o.block * o.block);
}

/* A sequence that gets memory is not begun by that. */
static void reserve_source(void) {
    if (!s.reserved) s.reserved = kvc_new_sequence(o.cache);
    must(kvc_reserve(o.cache, s.reserved, 1 + pick(2 * o.block)));
}

static void acquire_source(int prefix, source *of) {
    int32_t matched;
    int64_t id;
    if (of->is_there) return;
    must(kvc_prefix_acquire(v.prefixes[prefix], tokens_in(s.text), -1, &id, &matched));
    if (matched != s.known[prefix]) wrong("%d tokens are matched, and %d known", (int)matched, s.known[prefix]);
    *of = (source){1, id, matched, o.clock, 1 + prefix, 1 + prefix};
}

static void clear_source(source *of) {
    if (of->is_there) must(kvc_clear_sequence(o.cache, of->id));
    *of = (source){0};
}

/* A sequence gets rows of another one, of which it may have the first ones. */
static void copy_source(const source *from, source *to) {
    const int length = 1 + pick(from->length);
    if (from == to || !from->length) return;
    if (pick(2)) clear_source(to);
    const int is_new = !to->is_there;
    if (is_new) *to = (source){1, kvc_new_sequence(o.cache), 0, from->date, from->from, 0};
    if (is_new && pick(2)) {
        must(pick(2) ? kvc_fork(o.cache, from->id, to->id) : kvc_copy_prefix(o.cache, from->id, to->id, from->length));
        to->length = from->length;
    } else if (length > to->length) {
        must(kvc_share(o.cache, from->id, to->id, to->length, length));
        to->length = length;
        to->keeps = 0;
        if (from->date < to->date) to->date = from->date;
        if (from->from && from->from != to->from) to->from = to->from ? -1 : from->from;
    }
}

static void restore_source(const source *from, source *to) {
    const kvc_save_args save = {
        .struct_size = sizeof save, .write = write_file, .seq_ids = &from->id, .num_sequences = 1};
    if (from == to || !from->length || to->is_there) return;
    *to = (source){1, kvc_new_sequence(o.cache), from->length, -1, 0, 0};
    s.num_bytes = 0;
    must(kvc_save(o.cache, &save));
    const kvc_load_args load = {.struct_size = sizeof load,
                                .data = s.file,
                                .size = s.num_bytes,
                                .seq_ids = &from->id,
                                .to_ids = &to->id,
                                .num_sequences = 1};
    must(kvc_restore(o.cache, &load));
}

/* Forgets all of the text, or a text that is nowhere. */
static void forget_some(int prefix) {
    const int other = pick(2) ? s.text : text_behind(0, SYMBOLS - 1);
    int64_t num, dropped;
    must(kvc_prefix_forget(v.prefixes[prefix], tokens_in(other), NULL, 0, &num, &dropped));
    if (other == s.text) s.known[prefix] = 0;
    s.horizons[prefix] = o.clock;
}

static void evict_all(int prefix) {
    int64_t dropped;
    for (const source *of = s.all; of < s.all + 5; of++)
        if (of->keeps == 1 + prefix) return; /* whether its later blocks are kept is open then */
    must(kvc_prefix_evict(v.prefixes[prefix], MOST_TEXT, &dropped));
    s.known[prefix] = 0;
}

/* A prefix keeps what it may of a sequence, which then ends or goes on. */
static void end_source(int prefix, source *of) {
    const kvc_tokens *tokens = tokens_in(text_begin(s.text, of->length));
    if (!of->length) return;
    note_kept_of(prefix, of, of->length);
    if (!pick(4)) {
        must(kvc_prefix_checkpoint(v.prefixes[prefix], of->id, tokens, NULL, 0));
        return;
    }
    must(kvc_prefix_release(v.prefixes[prefix], of->id, tokens));
    *of = (source){0};
}

static void scene_sources(void) {
    memset(&v, 0, sizeof v);
    memset(&s, 0, sizeof s);
    memset(&o, 0, sizeof o);
    memset(&w.o, 0, sizeof w.o);
    o.num_layers = w.o.num_layers = 1;
    o.layers[0] = w.o.layers[0] = (kvc_layer){.num_kv_heads = 1, .k_dim = WIDTH, .rope = {.kind = KVC_ROPE_NONE}};
    o.block = 1 + pick(3);
    s.text = any_text_of(0, 30);
    open_limited(NULL, 0);
    for (o.clock = 1; o.clock < 60; o.clock++) {
        const int prefix = pick(2), kind = pick(26);
        source *of = &s.all[pick(5)], *other = &s.all[pick(5)];
        if (kind < 6)
            feed_source(of);
        else if (kind < 11)
            acquire_source(prefix, of);
        else if (kind < 16)
            copy_source(of, other);
        else if (kind < 20)
            end_source(prefix, of);
        else if (kind == 20)
            clear_source(of);
        else if (kind == 21)
            restore_source(of, other);
        else if (kind == 22)
            evict_all(prefix);
        else if (kind == 23)
            forget_some(prefix);
        else
            reserve_source();
        for (int p = 0; p < 2; p++) {
            int32_t known;
            must(kvc_prefix_lookup(v.prefixes[p], tokens_in(s.text), &known, NULL));
            if (known != s.known[p]) wrong("%d tokens are known in prefix %d, not %d", (int)known, p, s.known[p]);
        }
    }
    close_cache();
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

static int run(uint64_t seed, int num_scenes) {
    static void (*const scenes[])(void) = {scene_victims, scene_promises, scene_sources};
    client own = {.chance = {.state = seed}};
    me = &own;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    forget_texts();
    for (int i = 0; i < num_scenes; i++) scenes[pick(sizeof scenes / sizeof *scenes)]();
    return 0;
}

int main(int argc, char **argv) { return run_all(argc, argv, 20, run); }
