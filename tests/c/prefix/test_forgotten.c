/* Random calls; no call ever meets a forgotten row again.
 *
 *   test_forgotten [first seed] [worlds] [steps]
 *
 * Each row says by its contents after which tokens it stands, and when it was computed; so does each state.  A row
 * may pass through copies, retained rows, saved states, stores, other prefixes and blocks that lie aside.  A sequence
 * that a prefix hands out never has a row that was computed before this prefix forgot its tokens.
 *
 * Not for Windows: the core's clock is replaced by the linker. */
#define _XOPEN_SOURCE 700 /* posix_memalign */
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/keeping.h"
#include "support/saved.h"
#include "support/serving.h"

enum { PREFIXES = 3, SEQUENCES = 10, LONGEST = 40, FORGETS = 400, VALUES = 400, TOKENS = 3, RECENT = 8 };

typedef struct text {
    int64_t tokens[LONGEST];
    int num;
} text;

typedef struct live {
    int64_t id;
    int is_there, is_retained;
    int prefix;  /* that acquired it, or the first of its copies */
    text own;    /* the tokens that it holds */
    text prompt; /* that it is fed first */
} live;

typedef struct forgotten {
    text what;
    int time;
} forgotten;

typedef struct value {
    uint8_t name[KVC_NAME_BYTES];
    uint8_t *bytes;
    int64_t size;
} value;

static struct world {
    uint64_t seed, random;
    int step, time; /* time: of the last rows that were computed */
    int64_t clock;
    int fails, num_layers, state_bytes, is_limited; /* is_limited: by max_bytes */
    kvc_prefix_config config;
    kvc_prefix *prefixes[PREFIXES];
    live sequences[SEQUENCES];
    forgotten forgets[PREFIXES][FORGETS];
    int num_forgets[PREFIXES];
    value values[VALUES];
    int num_values;
    int forgets_in_store; /* a call of the store forgets something now and then */
    saved file;           /* of one sequence */
    live in_file;
    text recent[RECENT]; /* of sequences that were fed */
    text fetched;        /* by the last call */
} w;

static uint64_t next_random(void) {
    uint64_t z = w.random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static int pick(int n) { return (int)(next_random() % (uint64_t)n); }

/* The core's clock goes on by some microseconds at each look. */
int __wrap_clock_gettime(clockid_t which, struct timespec *now);
int __wrap_clock_gettime(clockid_t which, struct timespec *now) {
    (void)which;
    w.clock += 1 + (int64_t)(w.clock * 31 % 60000);
    now->tv_sec = 1000 + w.clock / 1000000000;
    now->tv_nsec = w.clock % 1000000000;
    return 0;
}

static void fail(const char *what, int a, int b) {
    printf("seed %llu, step %d: %s: %d, %d [%s]\n", (unsigned long long)w.seed, w.step, what, a, b, kvc_last_error());
    fflush(stdout);
    abort();
}

/* Lets some allocations of the next call fail. */
static void arm(void) {
    if (w.fails && pick(4) == 0) memory_fail(&heap, pick(6), 1 + pick(3));
}

/* Returns whether a call succeeded; fails where its failure has no cause. */
static int ends(kvc_status status) {
    heap.is_failing = 0;
    if (status == KVC_OK) return 1;
    if (status != KVC_ERR_FULL && status != KVC_ERR_NOMEM && status != KVC_ERR_GONE && status != KVC_ERR_STORE)
        fail("a call fails", (int)status, 0);
    return 0;
}

#define CALLS(call) (arm(), ends(call))

/* ---- texts ------------------------------------------------------------------------------------------------------- */

static int common(const text *a, const text *b) {
    int n = 0;
    while (n < a->num && n < b->num && a->tokens[n] == b->tokens[n]) n++;
    return n;
}

/* Returns a number that stands for the first n tokens, which a float holds exactly. */
static float mark_of(const text *t, int n) {
    uint32_t hash = 7;
    for (int i = 0; i < n; i++) hash = ((hash * 31 + (uint32_t)t->tokens[i] + 1) * 2654435761u) ^ (hash >> 13);
    return (float)(hash & 0xffffff);
}

static kvc_tokens tokens_in(const text *t) { return tokens_of(t->tokens, t->num); }

static live *any_sequence(int is_retained) {
    const int first = pick(SEQUENCES);
    for (int i = 0; i < SEQUENCES; i++) {
        live *s = &w.sequences[(first + i) % SEQUENCES];
        if (s->is_there && s->is_retained == is_retained) return s;
    }
    return NULL;
}

static live *free_sequence(void) {
    for (int i = 0; i < SEQUENCES; i++)
        if (!w.sequences[i].is_there) return &w.sequences[i];
    return NULL;
}

/* Returns a text that mostly begins as others do. */
static text any_text(void) {
    text t = {.num = 1 + pick(30)};
    const text *like = &w.recent[pick(RECENT)];
    const int usual = pick(TOKENS), begin = pick(4) ? like->num : pick(like->num + 1);
    for (int i = 0; i < t.num; i++) t.tokens[i] = i < begin ? like->tokens[i] : pick(7) ? usual : pick(TOKENS);
    return t;
}

/* ---- what is not to be met again --------------------------------------------------------------------------------- */

/* Fails if something that was made of a text's first n tokens at a time, in row `at`, was forgotten since. */
static void check_time(int prefix, const text *t, int at, int time) {
    for (int i = 0; i < w.num_forgets[prefix]; i++) {
        const forgotten *f = &w.forgets[prefix][i];
        const int n = common(&f->what, t);
        if ((n > at || n == f->what.num) && time <= f->time) fail("a row was forgotten", at, time);
    }
}

/* Checks what a prefix has handed out. */
static void check_rows(const live *s, int prefix) {
    for (int l = 0; l < w.num_layers; l++) {
        int32_t positions[LONGEST];
        const int64_t num = kvc_positions(cache, s->id, l, positions, LONGEST);
        for (int64_t i = 0; i < num; i++) {
            float k[DIM], v[DIM];
            const kvc_rows_out out = {.struct_size = sizeof out,
                                      .k = k,
                                      .v = v,
                                      .k_row_stride = sizeof k,
                                      .v_row_stride = sizeof v,
                                      .k_head_stride = sizeof k,
                                      .v_head_stride = sizeof v};
            const int at = positions[i];
            if (kvc_extract(cache, s->id, l, at, at + 1, &out) != KVC_OK) fail("kvc_extract fails", l, at);
            if (at >= s->own.num || k[0] != mark_of(&s->own, at + 1)) fail("a row of other tokens", l, at);
            check_time(prefix, &s->own, at, (int)v[0]);
        }
    }
}

static void check_state(const live *s, int prefix) {
    float state[STATE / sizeof(float)];
    int64_t size = 0;
    if (!w.state_bytes || !s->own.num) return;
    if (kvc_prefix_state(w.prefixes[prefix], s->id, state, STATE, &size) != KVC_OK || size != STATE)
        fail("a match has no state", (int)size, s->own.num);
    if (state[0] != mark_of(&s->own, s->own.num)) fail("a state of other tokens", s->own.num, 0);
    check_time(prefix, &s->own, s->own.num - 1, (int)state[1]);
}

/* ---- the store --------------------------------------------------------------------------------------------------- */

static void forget(int p, text t);
static void step_forget(void);

static value *find_value(const uint8_t *name) {
    for (int i = 0; i < w.num_values; i++)
        if (!memcmp(w.values[i].name, name, KVC_NAME_BYTES)) return &w.values[i];
    return NULL;
}

static kvc_status remove_value(void *user, const uint8_t *name) {
    value *v = find_value(name);
    (void)user;
    if (!v) return KVC_OK;
    free(v->bytes);
    *v = w.values[--w.num_values];
    return KVC_OK;
}

static void meddle(void) {
    const int is_failing = heap.is_failing;
    heap.is_failing = 0;
    if (w.forgets_in_store && pick(10) == 0) forget(pick(PREFIXES), pick(2) && w.fetched.num ? w.fetched : any_text());
    heap.is_failing = is_failing;
}

static kvc_status read_value(void *user, const uint8_t *name, void *to, int64_t max_bytes, int64_t *size) {
    const value *v = find_value(name);
    (void)user;
    *size = v ? v->size : 0;
    if (v && v->size <= max_bytes) memcpy(to, v->bytes, (size_t)v->size);
    if (v) meddle();
    return KVC_OK;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    (void)user;
    if (pick(2)) meddle();
    if (pick(9) == 0) {
        kvc_set_last_error("the store is full");
        return KVC_ERR_STORE;
    }
    remove_value(NULL, name);
    if (w.num_values == VALUES) return KVC_OK;
    value *v = &w.values[w.num_values++];
    *v = (value){.bytes = malloc((size_t)size), .size = size};
    memcpy(v->name, name, KVC_NAME_BYTES);
    memcpy(v->bytes, bytes, (size_t)size);
    if (pick(2)) meddle();
    return KVC_OK;
}

static const kvc_store store = {sizeof store, NULL, read_value, write_value, remove_value};

/* ---- steps: sequences -------------------------------------------------------------------------------------------- */

static void step_acquire(void) {
    const int prefix = pick(PREFIXES);
    live *s = free_sequence();
    int32_t matched = -1;
    if (!s) return;
    const text t = any_text();
    const kvc_tokens tokens = tokens_in(&t);
    live made = {.is_there = 1, .prefix = prefix, .prompt = t, .own = t};
    if (!CALLS(kvc_prefix_acquire(w.prefixes[prefix], &tokens, pick(4) ? -1 : pick(30), &made.id, &matched))) return;
    made.own.num = matched;
    *s = made;
    check_rows(s, prefix);
    check_state(s, prefix);
}

/* Feeds a sequence some tokens, of which the first ones are kept, or none; others may call meanwhile. */
static void step_feed(void) {
    live *s = any_sequence(0);
    static float k[LONGEST][DIM], v[LONGEST][DIM];
    int32_t kept[LONGEST];
    kvc_batch *batch = NULL;
    if (!s || s->own.num == LONGEST) return;
    text t = s->own;
    const int room = LONGEST - t.num, num = 1 + pick(room < 9 ? room : 9);
    for (; t.num < s->own.num + num; t.num++)
        t.tokens[t.num] = t.num < s->prompt.num ? s->prompt.tokens[t.num] : pick(TOKENS);
    if (!CALLS(begin_at_end(cache, s->id, num, &batch))) return;
    w.time++;
    for (int i = 0; i < num; i++) k[i][0] = mark_of(&t, s->own.num + i + 1), v[i][0] = (float)w.time, kept[i] = i;
    for (int l = 0; l < w.num_layers; l++) put_floats(batch, l, 0, num, 1, DIM, DIM, k, v);
    step_forget();
    const int how = pick(8), num_kept = how > 2 ? num : how ? pick(num + 1) : 0;
    if (how)
        CHECK(kvc_commit_kept(batch, kept, num_kept) == KVC_OK);
    else
        kvc_abort(batch);
    t.num = s->own.num + num_kept;
    s->own = w.recent[pick(RECENT)] = t;
}

/* Returns the prefix that is given a sequence: usually the prefix that acquired it. */
static kvc_prefix *keeper(const live *s) { return w.prefixes[pick(4) ? s->prefix : pick(PREFIXES)]; }

static void step_release(void) {
    live *s = any_sequence(0);
    if (!s) return;
    text t = s->own;
    if (pick(4) == 0) t.num = pick(t.num + 1);
    const kvc_tokens tokens = tokens_in(&t);
    if (t.num < s->own.num && !CALLS(kvc_mark_inexact(cache, s->id, (int32_t)t.num))) return;
    if (CALLS(kvc_prefix_release(keeper(s), s->id, &tokens))) s->is_there = 0;
}

static void step_checkpoint(void) {
    const live *s = any_sequence(0);
    if (!s || !s->own.num) return;
    text t = s->own;
    if (pick(4) == 0) t.num = 1 + pick(t.num);
    const float state[STATE / sizeof(float)] = {mark_of(&t, t.num), (float)w.time};
    const kvc_tokens tokens = tokens_in(&t);
    (void)CALLS(kvc_prefix_checkpoint(keeper(s), s->id, &tokens, state, w.state_bytes));
}

static void step_end(void) {
    live *s = any_sequence(pick(2));
    if (!s || pick(2)) return;
    CHECK(kvc_clear_sequence(cache, s->id) == KVC_OK);
    s->is_there = 0;
}

static void step_truncate(void) {
    live *s = any_sequence(0);
    if (!s || !s->own.num) return;
    const int length = pick(s->own.num + 1);
    if (!CALLS(kvc_truncate(cache, s->id, length))) return;
    if (length < s->own.num) s->prompt.num = 0;
    s->own.num = length;
}

/* Makes a copy of a sequence's first tokens: by sharing, by retaining, or by attaching what was retained. */
static void step_copy(void) {
    const int how = pick(4);
    live *from = any_sequence(how == 3), *to = free_sequence();
    int32_t matched = 0;
    if (!from || !to || !from->own.num) return;
    live made = *from;
    made.id = kvc_new_sequence(cache);
    made.own.num = how == 3 ? from->own.num : 1 + pick(from->own.num);
    made.is_retained = how == 2;
    if (how == 0) (void)CALLS(kvc_copy_prefix(cache, from->id, made.id, made.own.num));
    if (how == 1) (void)CALLS(kvc_share(cache, from->id, made.id, 0, made.own.num));
    if (how == 2) (void)CALLS(retain(cache, from->id, made.id, 0, made.own.num));
    if (how == 3 && CALLS(attach_retained(cache, &from->id, 1, made.id, made.own.num, &matched)))
        made.own.num = matched;
    if (kvc_next_position(cache, made.id) == made.own.num && made.own.num)
        *to = made;
    else
        CHECK(kvc_clear_sequence(cache, made.id) == KVC_OK);
}

/* Shares rows into a sequence that was acquired for other tokens, and holds none. */
static void step_share(void) {
    const live *from = any_sequence(0);
    live *to = any_sequence(0);
    if (!from || !to || from == to || !from->own.num || to->own.num) return;
    const int num = 1 + pick(from->own.num);
    if (!CALLS(kvc_share(cache, from->id, to->id, 0, num))) return;
    to->own = from->own;
    to->own.num = num;
    to->prompt.num = 0;
    if (kvc_next_position(cache, to->id) == num) return;
    CHECK(kvc_clear_sequence(cache, to->id) == KVC_OK);
    to->is_there = 0;
}

static void step_save(void) {
    live *s = any_sequence(0), *to = free_sequence();
    if (!w.file.size || pick(3) == 0) {
        if (!s || !s->own.num || kvc_next_position(cache, s->id) != s->own.num) return;
        free(w.file.bytes);
        w.in_file = *s;
        if (!CALLS(save_one(cache, s->id, &w.file))) w.file.size = 0; /* it replaces the file */
    } else if (to) {
        kvc_load_args args = load_args_of(&w.file);
        live made = w.in_file;
        made.id = kvc_new_sequence(cache);
        args.seq_ids = &w.in_file.id;
        args.to_ids = &made.id;
        args.num_sequences = 1;
        if (CALLS(kvc_restore(cache, &args))) *to = made;
    }
}

/* ---- steps: prefixes --------------------------------------------------------------------------------------------- */

static void step_pin(void) {
    const text t = any_text();
    const kvc_tokens tokens = tokens_in(&t);
    int32_t kept;
    if (pick(3))
        (void)CALLS(kvc_prefix_pin(w.prefixes[pick(PREFIXES)], &tokens, &kept));
    else
        CHECK(kvc_prefix_unpin(w.prefixes[pick(PREFIXES)], &tokens) == KVC_OK);
}

static void step_drop(void) {
    int64_t num;
    const int p = pick(PREFIXES), how = pick(40);
    (void)CALLS(kvc_prefix_evict(w.prefixes[p], pick(20), &num));
    if (how == 0) (void)CALLS(kvc_prefix_clear(w.prefixes[p]));
    if (how == 1) w.clock += 1000000;
}

static void forget(int p, text t) {
    const kvc_tokens tokens = tokens_in(&t);
    uint8_t names[2][KVC_NAME_BYTES];
    const int most = pick(3);
    int64_t num = 0, dropped;
    int32_t matched = -1, with_rows = -1;
    if (w.num_forgets[p] == FORGETS) return;
    do {
        if (!CALLS(kvc_prefix_forget(w.prefixes[p], &tokens, most ? *names : NULL, most, &num, &dropped))) return;
    } while (most && num == most);
    while (w.num_values) free(w.values[--w.num_values].bytes); /* also of blocks that had left the cache before */
    w.forgets[p][w.num_forgets[p]++] = (forgotten){t, w.time};
    if (kvc_prefix_lookup(w.prefixes[p], &tokens, &matched, &with_rows) != KVC_OK || matched || with_rows)
        fail("a forgotten prompt is known", matched, with_rows);
}

static void step_forget(void) {
    if (!pick(8)) forget(pick(PREFIXES), any_text());
}

static void step_write(void) {
    int64_t num;
    (void)CALLS(kvc_store_new_blocks(cache, &store, &num));
}

static void step_fetch(void) {
    w.fetched = any_text();
    const kvc_tokens tokens = tokens_in(&w.fetched);
    int32_t fetched;
    (void)CALLS(kvc_prefix_fetch(w.prefixes[pick(PREFIXES)], &tokens, -1, &store, &fetched));
}

static void make_prefix(int p) {
    static const char salts[PREFIXES] = "abc";
    kvc_prefix_config config = w.config;
    config.struct_size = sizeof config;
    config.fingerprint = "a model";
    config.salt = salts + p;
    config.salt_size = 1;
    w.num_forgets[p] = 0;
    w.prefixes[p] = NULL;
    if (kvc_prefix_new(cache, &config, &w.prefixes[p]) != KVC_OK) fail("kvc_prefix_new fails", p, 0);
}

static void step_renew(void) {
    const int p = pick(PREFIXES);
    if (pick(20) || w.is_limited) return; /* there may be no room */
    kvc_prefix_free(w.prefixes[p]);
    make_prefix(p);
}

static void (*const steps[])(void) = {
    step_acquire,  step_acquire, step_acquire, step_acquire, step_feed,       step_feed,       step_feed,
    step_feed,     step_feed,    step_release, step_release, step_checkpoint, step_checkpoint, step_end,
    step_truncate, step_copy,    step_copy,    step_share,   step_save,       step_pin,        step_drop,
    step_forget,   step_forget,  step_write,   step_fetch,   step_renew};

/* ---- worlds ------------------------------------------------------------------------------------------------------ */

static void begin_world(void) {
    const kvc_policy any[] = {full,
                              {.kind = KVC_SLIDING, .window = 3 + pick(8), .num_sink_tokens = pick(2) ? 0 : pick(6)},
                              {.kind = KVC_CHUNKED, .attention_chunk_size = 4 + pick(9)}};
    kvc_policy policies[3];
    kvc_config config = {.capacity = pick(2) ? 0 : 60 + pick(150), .max_bytes = pick(3) ? 0 : 80000 + pick(100000)};
    w.is_limited = config.max_bytes > 0;
    w.num_layers = 1 + pick(3);
    const int same = pick(2) ? pick(3) : -1; /* all layers may lack the same rows then */
    for (int l = 0; l < w.num_layers; l++) policies[l] = any[same >= 0 ? same : pick(2) ? 0 : pick(3)];
    w.state_bytes = pick(2) ? STATE : 0;
    w.fails = pick(2);
    w.forgets_in_store = pick(2);
    w.config = (kvc_prefix_config){.state_bytes = w.state_bytes,
                                   .max_checkpoint_bytes = w.state_bytes && pick(2) ? STATE * (1 + pick(5)) : 0,
                                   .quota = pick(3) ? 0 : pick(40),
                                   .ttl_ms = pick(2),
                                   .max_events = pick(20),
                                   .collects_new = 1};
    open_world(policies, w.num_layers, config, w.config);
    kvc_prefix_free(prefix);
    for (int p = 0; p < PREFIXES; p++) make_prefix(p);
}

static void play(int num) {
    for (const int last = w.step + num; w.step < last; w.step++) {
        steps[pick(sizeof steps / sizeof *steps)]();
        if (kvc_validate(cache) != KVC_OK) fail("invalid", 0, 0);
    }
}

static void end_world(void) {
    while (w.num_values) free(w.values[--w.num_values].bytes);
    free(w.file.bytes);
    close_world();
}

/* A child of fork() goes on, and meets none either. */
static void play_in_child(void) {
    fflush(stdout);
    const pid_t child = fork();
    int status = 0;
    if (!child) {
        play(100);
        end_world();
        _exit(test_result());
    }
    CHECK(waitpid(child, &status, 0) == child && !status);
}

static void play_world(uint64_t seed, int num_steps) {
    w = (struct world){.seed = seed, .random = seed};
    begin_world();
    play(num_steps / 2);
    if (pick(20) == 0) play_in_child();
    play(num_steps / 2);
    end_world();
}

int main(int argc, char **argv) {
    const uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    const int worlds = argc > 2 ? atoi(argv[2]) : is_full() ? 300 : 50, num_steps = argc > 3 ? atoi(argv[3]) : 1000;
    for (uint64_t seed = first; seed < first + (uint64_t)worlds; seed++) play_world(seed, num_steps);
    return test_result();
}
