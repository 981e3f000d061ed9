/* faults.c: allocations that fail, and children of fork(): caches and prefixes stay as they were. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "known.h"

/* The answers of calls about all prefixes and sequences. */
typedef struct view {
    int32_t matched[PREFIXES][TEXTS], with_rows[PREFIXES][TEXTS];
    kvc_prefix_stats stats[PREFIXES];
    int32_t next[SEQUENCES], exact[SEQUENCES];
    uint64_t rows[SEQUENCES][MOST_LAYERS];
} view;

static view before;

static void look_around(const world *w, view *out) {
    text_tokens tokens;
    memset(out, 0, sizeof *out);
    for (int i = 0; i < PREFIXES; i++) {
        const prefix *p = &w->prefixes[i];
        for (int j = 0; p->handle && j < TEXTS; j++)
            must(w, kvc_prefix_lookup(p->handle, tokens_of(w->texts[j], &tokens), &out->matched[i][j],
                                      &out->with_rows[i][j]));
        if (p->handle) kvc_prefix_get_stats(p->handle, &out->stats[i], sizeof out->stats[i]);
        if (!p->handle || !p->config.ttl_ms) continue; /* expired blocks may be dropped by any call */
        kvc_prefix_stats *s = &out->stats[i];
        s->blocks = s->held = s->checkpoints = s->checkpoint_bytes = 0;
    }
    for (int i = 0; i < SEQUENCES; i++) {
        const sequence *s = &w->sequences[i];
        if (!s->is_there) continue;
        out->next[i] = kvc_next_position(w->caches[s->cache], s->id);
        out->exact[i] = kvc_exact_to(w->caches[s->cache], s->id);
        rows_of(w, s, out->rows[i]);
    }
}

void arm(world *w) {
    const int may_fail = w->has_faults && !pick(w, 4);
    w->is_short = 0;
    if (!may_fail && !w->shape.config.max_bytes) return;
    for (int i = 0; i < PREFIXES; i++)
        if (w->prefixes[i].handle) take_events(w, &w->prefixes[i], 4096);
    look_around(w, &before);
    if (!may_fail) return;
    w->fails_in = 1 + pick(w, pick(w, 2) ? 4 : 30);
    w->fails_on = pick(w, 2);
}

/* Checks that a call that failed has changed nothing. */
static void check_unchanged(world *w) {
    view after;
    kvc_prefix_event event;
    int64_t num, lost;
    look_around(w, &after);
    if (memcmp(&before, &after, sizeof before)) {
        for (int i = 0; i < PREFIXES; i++) {
            const kvc_prefix_stats *a = &before.stats[i], *b = &after.stats[i];
            if (memcmp(a, b, sizeof *a))
                fail(w, "prefix %d: a call that failed left %d blocks of %d tokens and %d states, not %d of %d and %d",
                     i, (int)b->blocks, (int)b->held, (int)b->checkpoints, (int)a->blocks, (int)a->held,
                     (int)a->checkpoints);
        }
        for (int i = 0; i < PREFIXES * TEXTS; i++) {
            const int p = i / TEXTS, t = i % TEXTS, a = before.with_rows[p][t], b = after.with_rows[p][t];
            if (a != b || before.matched[p][t] != after.matched[p][t])
                fail(w, "prefix %d, %s: a call that failed left %d tokens with rows, %d known, not %d, %d", p,
                     spell(w->texts[t]), b, after.matched[p][t], a, before.matched[p][t]);
        }
        for (int i = 0; i < SEQUENCES; i++)
            if (before.next[i] != after.next[i] || before.exact[i] != after.exact[i] ||
                memcmp(before.rows[i], after.rows[i], sizeof before.rows[i]))
                fail(w, "sequence %d, %s: a call that failed has changed it", (int)w->sequences[i].id,
                     spell(w->sequences[i].node));
    }
    for (int i = 0; i < PREFIXES; i++) {
        const prefix *p = &w->prefixes[i];
        if (!p->handle || !p->config.max_events || p->config.ttl_ms) continue;
        must(w, kvc_prefix_take_events(p->handle, &event, sizeof event, 1, &num, &lost));
        if (num || lost) fail(w, "prefix %d: a call that failed noted an event", i);
    }
}

int again(world *w, kvc_status status) {
    w->fails_in = w->fails_on = 0;
    if (status != KVC_ERR_NOMEM) return 0;
    trace(w, "%s fails for want of memory", w->call);
    if (!w->is_short) fail(w, "memory is said to be short");
    check_unchanged(w);
    w->is_short = 0;
    return 1;
}

int is_full(world *w, kvc_status status) {
    if (status != KVC_ERR_FULL || !w->shape.config.max_bytes) return 0;
    trace(w, "%s finds no room: %s", w->call, kvc_last_error());
    check_unchanged(w);
    return 1;
}

/* A child of fork() goes on with the same world, and ends it. */
void do_fork_process(world *w) {
    int status = -1;
    if (w->is_child) return;
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0) return;
    if (!child) {
        alarm(100);
        w->is_child = 1;
        trace(w, "the child begins");
        check_all(w);
        play_steps(w, w->step + 20);
        free_world(w);
        fflush(stdout);
        _exit(0);
    }
    if (waitpid(child, &status, 0) != child || status) fail(w, "a child of fork() ended with status %d", status);
}

/* ---- a state whose call a child lacks */

enum { LARGE = 1 << 22 };

typedef struct keeper { /* of states, on a thread of its own */
    kvc_prefix *prefix;
    int64_t id;
    text_tokens tokens;
    uint8_t *state;
    atomic_int ends, num_calls;
} keeper;

static void *keep_states(void *arg) {
    keeper *k = arg;
    while (!atomic_load(&k->ends)) {
        if (kvc_prefix_checkpoint(k->prefix, k->id, &k->tokens.tokens, k->state, LARGE)) abort();
        atomic_fetch_add(&k->num_calls, 1);
    }
    return NULL;
}

/* Clears the cache, and returns what else it has. */
static int64_t left_bytes(const world *w, kvc_cache *cache) {
    must(w, kvc_clear(cache));
    must(w, kvc_compact(cache));
    return kvc_nbytes(cache);
}

void play_forks(world *w) {
    make_shape(w, &w->shape);
    w->shape.config.max_bytes = w->shape.config.capacity = 0;
    make_models(w);
    const kvc_prefix_config own = {.struct_size = sizeof own, .fingerprint = "a", .state_bytes = LARGE};
    keeper k = {.state = calloc(1, LARGE)};
    kvc_cache *cache;
    pthread_t thread;
    int32_t matched;
    int node = 0;
    while (text_length(node) <= w->shape.block) node = text_behind(node, pick(w, SYMBOLS));
    must(w, kvc_cache_new(&w->shape.config, &cache));
    must(w, kvc_prefix_new(cache, &own, &k.prefix));
    tokens_of(node, &k.tokens);
    must(w, kvc_prefix_acquire(k.prefix, &k.tokens.tokens, -1, &k.id, &matched));
    feed_tokens(w, cache, k.id, text_length(node));
    const int64_t held = kvc_nbytes(cache);
    w->call = "kvc_prefix_checkpoint in another thread";
    if (pthread_create(&thread, NULL, keep_states, &k)) fail(w, "there is no thread");
    for (int i = 0; i < 8; i++) {
        int status = -1;
        while (atomic_load(&k.num_calls) < 2 * i + 1) sched_yield();
        fflush(stdout);
        const pid_t child = fork();
        if (child < 0) break;
        if (!child) {
            alarm(100);
            kvc_prefix_stats stats;
            kvc_prefix_get_stats(k.prefix, &stats, sizeof stats);
            const int64_t beside = kvc_nbytes(cache) - held - stats.checkpoint_bytes;
            if (beside > LARGE / 2) fail(w, "a child has %lld bytes that nobody owns", (long long)beside);
            if (left_bytes(w, cache) > held + LARGE / 2) fail(w, "a child has a state that nobody owns");
            must(w, kvc_cache_free(cache));
            if (w->memory) fail(w, "%lld bytes are left in a child", (long long)w->memory);
            fflush(stdout);
            _exit(0);
        }
        if (waitpid(child, &status, 0) != child || status) fail(w, "a child of fork() ended with status %d", status);
    }
    atomic_store(&k.ends, 1);
    pthread_join(thread, NULL);
    must(w, kvc_cache_free(cache));
    free(k.state);
}
