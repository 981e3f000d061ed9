/* known.c: random calls of caches, prefixes and stores, beside an oracle of the known blocks.
 *
 *   known [--seed N] [--runs N] [--steps N] [--fits N] [--names N] [--forks N] [--trace]
 *
 * Run i has the seed N + i.  A failure names the seed and the step; with --trace every call is printed.  --fits: so
 * many prompts, in caches of just their size, once others have left blocks there.  --names: so many
 * shapes, whose blocks' names are compared.  --forks: so
 * many times, children of fork() beside a thread that keeps states. */
#define _POSIX_C_SOURCE 200809L
#include <stdarg.h>
#include <time.h>

#include "known.h"

static world *current;

/* The clock of the library: it goes on as the world says, and a little at each look. */
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    (void)clock;
    const int64_t ns = 1000000 * (1000000 + (current ? current->ms : 0)) + (current ? ++current->looks % 1000000 : 0);
    now->tv_sec = ns / 1000000000, now->tv_nsec = ns % 1000000000;
    return 0;
}

void fail(const world *w, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("seed %llu, step %ld, behind %s: ", (unsigned long long)w->seed, w->step, w->call);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
    exit(1);
}

void trace(world *w, const char *format, ...) {
    va_list args;
    if (!w->is_traced) return;
    va_start(args, format);
    printf("%s%ld: ", w->is_child ? "child " : "", w->step);
    vprintf(format, args);
    putchar('\n');
    fflush(stdout);
    va_end(args);
}

void must(const world *w, kvc_status status) {
    if (status) fail(w, "status %d: %s", status, kvc_last_error());
}

typedef struct call {
    const char *name;
    void (*play)(world *);
    int often;
} call;

static const call calls[] = {
    {"acquire", do_acquire, 14},
    {"batch", do_batch, 30},
    {"release", do_release, 10},
    {"checkpoint", do_checkpoint, 8},
    {"clear a sequence", do_clear_sequence, 2},
    {"truncate", do_truncate, 3},
    {"fork", do_fork, 2},
    {"remove", do_remove, 1},
    {"keep", do_keep, 2},
    {"inject", do_inject, 1},
    {"pin", do_pin, 3},
    {"unpin", do_unpin, 2},
    {"forget", do_forget, 3},
    {"evict", do_evict, 1},
    {"clear", do_clear, 1},
    {"wait", do_wait, 3},
    {"fetch", do_fetch, 4},
    {"store", do_store, 3},
    {"take", do_take, 3},
    {"add", do_add, 4},
    {"missing", do_missing, 2},
    {"names", do_names, 1},
    {"prefix", do_prefix, 1},
    {"new text", do_new_text, 2},
};
enum { CALLS = sizeof calls / sizeof *calls };

static int often[CALLS]; /* in this world */

/* Gives each world a mix of calls of its own: what needs many of two kinds comes soon in some. */
static void mix_calls(world *w) {
    const int is_mixed = pick(w, 3);
    for (int i = 0; i < CALLS; i++) often[i] = calls[i].often * (is_mixed && pick(w, 6) == 0 ? 8 : 1);
}

static const call rare_calls[] = {
    {"clear a cache", do_clear_cache, 1}, {"clone", do_clone, 2}, {"fork()", do_fork_process, 1}};

static const call *choose(world *w, const call *from, const int *weights, size_t num) {
    int sum = 0;
    for (size_t i = 0; i < num; i++) sum += weights ? weights[i] : from[i].often;
    for (int at = pick(w, sum), i = 0;; i++)
        if ((at -= weights ? weights[i] : from[i].often) < 0) return &from[i];
}

void play_steps(world *w, long last) {
    for (; w->step <= last; w->step++) {
        const call *c = pick(w, 40) ? choose(w, calls, often, CALLS)
                                    : choose(w, rare_calls, NULL, sizeof rare_calls / sizeof *rare_calls);
        w->call = c->name;
        w->is_short = 0;
        c->play(w);
        w->call = c->name;
        check_step(w);
        if (w->step % 16 == 0) check_all(w);
    }
    check_all(w);
}

static void play(uint64_t seed, long steps, int is_traced) {
    static world w;
    memset(&w, 0, sizeof w);
    w = (world){.seed = seed, .random = seed, .is_traced = is_traced, .call = "the beginning"};
    current = &w;
    begin_tokens();
    begin_names();
    make_world(&w);
    mix_calls(&w);
    w.step = 1;
    play_steps(&w, steps);
    free_world(&w);
}

static void play_scene(uint64_t seed, int is_traced, void (*scene)(world *)) {
    static world w;
    memset(&w, 0, sizeof w);
    w = (world){.seed = seed, .random = seed, .is_traced = is_traced, .call = "a scene"};
    current = &w;
    begin_names();
    scene(&w);
    free_world(&w);
}

typedef struct scene {
    const char *option;
    void (*play)(world *);
} scene;

static const scene scenes[] = {{"--fits", play_fits},         {"--names", play_names},     {"--forks", play_forks},
                               {"--orders", play_orders},     {"--reuse", play_reuse},     {"--forgets", play_forgets},
                               {"--selected", play_selected}, {"--fetches", play_fetches}, {"--states", play_states}};

int main(int argc, char **argv) {
    enum { SCENES = sizeof scenes / sizeof *scenes };
    uint64_t seed = 1, runs = 1, nums[SCENES] = {0};
    long steps = 400;
    int is_traced = 0, has_scenes = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        int at = 0;
        while (at < SCENES && strcmp(argv[i], scenes[at].option) != 0) at++;
        if (!strcmp(argv[i], "--trace"))
            is_traced = 1;
        else if (!strcmp(argv[i], "--seed"))
            seed = strtoull(value, NULL, 0), i++;
        else if (!strcmp(argv[i], "--runs"))
            runs = strtoull(value, NULL, 0), i++;
        else if (!strcmp(argv[i], "--steps"))
            steps = strtol(value, NULL, 0), i++;
        else if (at < SCENES)
            nums[at] = strtoull(value, NULL, 0), has_scenes = 1, i++;
        else
            return fprintf(stderr, "known: %s\n", argv[i]), 2;
    }
    make_symbols();
    for (int i = 0; i < SCENES; i++)
        for (uint64_t j = 0; j < nums[i]; j++) play_scene(seed + j, is_traced, scenes[i].play);
    for (uint64_t i = 0; i < runs && !has_scenes; i++) play(seed + i, steps, is_traced);
    return 0;
}
