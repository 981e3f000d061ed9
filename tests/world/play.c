/* play.c: draws calls, makes them, asks the oracle what is right, and compares.  What fails is made shorter. */
#define _DEFAULT_SOURCE
#include "calls.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_CALLS = 4000, SHORTEN_SECONDS = 12, MOST_SECONDS = 120 };

/* ---- chance ------------------------------------------------------------------------------------------------------ */

static uint64_t next_bits(chance *c) { /* splitmix64 */
    uint64_t z = c->state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

int pick(int n) {
    chance *c = &me->chance;
    if (!c->num_bytes) return n > 1 ? (int)(next_bits(c) % (uint64_t)n) : 0;
    c->num_bytes--;
    return n > 1 ? *c->bytes++ % n : 0;
}

int refuse(int rarity) {
    if (!w.refuses || !me || w.is_child || pick(rarity)) return 0;
    return me->was_refused = 1;
}

void lock_world(void) {
    if (drive.lock) drive.lock();
}

void unlock_world(void) {
    if (drive.unlock) drive.unlock();
}

/* ---- messages ---------------------------------------------------------------------------------------------------- */

static void print_list(const call *c, char what) {
    const char *const types[] = {"int32_t", "int64_t", "uint8_t"};
    const int is_absent = (what == 'Q' && !(c->flag & 1)) || (what == 'A' && !(c->flag & 2)) ||
                          (what == 'U' && !(c->flag & 4)) || (what == 'R' && !(c->flag & 8));
    if (is_absent) {
        printf("NULL");
        return;
    }
    printf("(%s[]){", types[what == 'S' ? 1 : what == 'U' || what == 'R' ? 2 : 0]);
    const int num = what == 'R' ? w.o.num_layers : c->num;
    for (int i = 0, printed = 0; i < num; i++) {
        const long long x = what == 'S'   ? (long long)w.ids[c->slots[i]]
                            : what == 'A' ? c->parents[i]
                            : what == 'U' ? c->marks[i]
                            : what == 'R' ? c->layers[i]
                            : what == 'K' ? i
                                          : c->positions[i];
        if (what == 'K' && c->flag && !c->marks[i]) continue;
        printf(printed++ ? ", %lld" : "%lld", x);
    }
    putchar('}');
}

/* Writes a call in C. */
static void print_call(const call *c) {
    printf("%*s", me->is_within ? 8 : 4, "");
    if (w.o.crowded) printf("client %d: ", c->client);
    for (const char *at = operations[c->operation].text; *at; at++) {
        if (*at != '%') {
            putchar(*at);
            continue;
        }
        switch (*++at) {
        case 'i': printf("%lld", (long long)w.ids[c->s]); break;
        case 'j': printf("%lld", (long long)w.ids[c->to]); break;
        case 'l': printf("%d", c->layer); break;
        case 'b': printf("%d", c->begin); break;
        case 'e': printf(c->end == KVC_END ? "KVC_END" : "%d", c->end); break;
        case 'd': printf("%d", c->delta); break;
        case 'n': printf("%d", c->num); break;
        case 'f': printf("%d", c->flag); break;
        case 'p': printf("%d", c->prefix); break;
        case 't': printf("%s", spell(c->text)); break;
        default: print_list(c, *at);
        }
    }
    printf(";");
    fflush(stdout);
}

static void print_layer(int l) {
    const kvc_layer *x = &w.o.layers[l];
    const kvc_policy *p = &x->policy;
    printf("    layer %d: heads %d, k %s[%d], v %s[%d], in key %d, share %d, rope %d, policy %d: window %d, sinks %d, "
           "resume %d, chunk %d, max_len %d, stride %d\n",
           l, x->num_kv_heads, kvc_type_name(x->k_type), x->k_dim, kvc_type_name(x->v_type), x->v_dim, x->value_in_key,
           x->share, x->rope.kind, p->kind, p->window, p->num_sink_tokens, p->resume_window, p->attention_chunk_size,
           p->max_len, p->stride);
}

static void print_world(void) {
    const kvc_config *c = &w.o.config;
    for (int l = 0; l < w.o.num_layers; l++) print_layer(l);
    printf("    block_size %d, max_seq_len %d, max_sequences %d, capacity %d, max_bytes %lld, threads %d, poll %d\n",
           w.o.block_size, (int)c->max_seq_len, (int)c->max_sequences, (int)c->capacity, (long long)c->max_bytes,
           c->num_threads, c->poll != NULL);
    for (int i = 0; i < PREFIXES; i++) {
        const kvc_prefix_config *p = &w.o.prefixes[i].config;
        if (w.o.prefixes[i].is_there)
            printf("    prefix %d: tenant %d, states %d, at most %d, ttl %d, quota %d, reuse %d, events %d, new %d\n",
                   i, w.o.prefixes[i].tenant, (int)p->state_bytes, (int)p->max_checkpoint_bytes, (int)p->ttl_ms,
                   (int)p->quota, p->reuse_min_tokens, p->max_events, p->collects_new);
    }
}

static struct recording { /* of the calls of a process; shared with its parent */
    int num;
    const char *failure; /* the message with which it failed; NULL: none */
    int operation;       /* that failed */
    call calls[MOST_CALLS];
} *recording;

_Noreturn void wrong(const char *format, ...) {
    va_list arguments;
    const char *call_name = me && me->call ? operations[me->call->operation].name : "-";
    printf("%sseed %llu, time %d, %s: ", w.traces ? "\n" : "", (unsigned long long)w.seed, w.o.now, call_name);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    if (me && me->call && me->call->status) printf(" [%s]", kvc_last_error());
    if (w.refused) printf(" (memory was last refused at time %d: %s)", w.refused_at, operations[w.refused - 1].name);
    printf("%s\n", w.is_child ? " (in a child or copy)" : "");
    fflush(stdout);
    if (!recording) abort(); /* as a fuzzer expects */
    recording->failure = format;
    recording->operation = me && me->call ? me->call->operation : -1;
    _exit(3);
}

/* ---- right answers ----------------------------------------------------------------------------------------------- */

/* Whether an operation takes memory for rows of a batch. */
static int takes_rows(const operation *op) {
    return op->right == right_begin || op->right == right_vain || op->right == right_reserve;
}

/* Whether a call may be answered so where the oracle says `right`.  This is the only place that lets the library
 * choose:
 * - where a call that begins no batch may lack room (room_is_open);
 * - where memory was refused, or a function of the caller failed;
 * - where other clients, or calls that came between, decide. */
static int is_right(const call *c, kvc_status right) {
    const unsigned errors = operations[c->operation].errors;
    const kvc_status got = c->status;
    if (got && !(errors >> got & 1)) return 0; /* the header does not list it */
    if (got == right || (got == KVC_ERR_NOMEM && c->met_fault)) return 1;
    if (me->was_refused &&
        (got == KVC_ERR_CALLBACK || got == KVC_ERR_CANCELLED || got == KVC_ERR_STORE || got == KVC_ERR_FORMAT))
        return 1;
    if (got == KVC_ERR_FULL && right == KVC_OK && c->is_disturbed) return 1;
    if (got == KVC_ERR_FULL && right == KVC_OK && !takes_rows(&operations[c->operation]) && room_is_open(&w.o))
        return 1;
    if (!w.o.crowded) return 0;
    return got == KVC_ERR_BUSY || got == KVC_ERR_FULL || got == KVC_ERR_HELD ||
           (got == KVC_ERR_GONE && has_windows(&w.o)) || (got == KVC_ERR_INDEX && has_windows(&w.o));
}

/* Copies word by word: clients look at their own part of the oracle meanwhile, and a sanitizer would see memcpy. */
static void set_oracle(const oracle *next) {
    volatile uint64_t *to = (volatile uint64_t *)(void *)&w.o;
    const uint64_t *from = (const uint64_t *)(const void *)next;
    for (size_t i = 0; i < sizeof *next / sizeof *from; i++)
        if (to[i] != from[i]) to[i] = from[i];
}

/* Nobody knows what a sequence holds, until it is cleared: it counts as empty. */
static void open_sequence(oracle *o, int s) {
    const sequence *of = &o->sequences[s];
    o->sequences[s] = (sequence){.exact_to = INT32_MAX, .is_open = 1, .prefix = of->prefix, .prompt = of->prompt};
}

static int is_open_call(const oracle *o, const call *c) {
    int is_open = o->sequences[c->s].is_open || o->sequences[c->to].is_open;
    for (int t = 0; t < TOKENS; t++) is_open |= o->sequences[c->slots[t]].is_open;
    return is_open;
}

static void open_sequences(oracle *o, const call *c) {
    for (int s = 0; s < SLOTS && w.is_wild; s++) open_sequence(o, s);
    open_sequence(o, c->s);
    open_sequence(o, c->to);
    for (int t = 0; t < c->num && t < TOKENS; t++) open_sequence(o, c->slots[t]);
}

/* Judges a call of sequences that others change meanwhile: of batches, it is known only which tokens are in them. */
static void judge_openly(const call *c) {
    static _Thread_local oracle next;
    const operation *op = &operations[c->operation];
    next = w.o;
    open_sequences(&next, c);
    if (c->status && !(op->errors >> c->status & 1)) wrong("answers \"%s\"", kvc_strerror(c->status));
    if (c->status) return;
    op->right(&next, c);
    if (op->right == right_clear_sequence && !w.is_wild)
        next.sequences[c->s].is_open = 0;
    else if (w.is_wild || op->right != right_acquire)
        open_sequences(&next, c);
    set_oracle(&next);
}

void name_blocks(void) {
    static const uint8_t none[KVC_NAME_BYTES];
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < w.o.prefixes[i].num_blocks; j++) {
            block *b = &w.o.prefixes[i].blocks[j];
            text_tokens given;
            uint8_t names[NAMES][KVC_NAME_BYTES];
            int64_t num;
            if (!is_full_block(&w.o, b) || memcmp(b->name, none, sizeof none)) continue;
            kvc_status status;
            const kvc_tokens *own = tokens_of(b->node, 0, &given);
            UNTIL_MEMORY(status, kvc_prefix_names(w.prefixes[i], own, names[0], NAMES, &num));
            if (status) wrong("names fail");
            memcpy(b->name, names[num - 1], KVC_NAME_BYTES);
        }
}

/* Whether blocks may have been evicted: to make room, or as memory was refused for the rows of a batch. */
static int may_evict(const call *c) {
    kvc_stats stats;
    const operation *op = &operations[c->operation];
    const int is_refused = c->is_short && takes_rows(op);
    if (!capacity_of(&w.o) && !w.o.config.max_bytes && !is_refused) return 0;
    kvc_get_stats(w.cache, &stats, sizeof stats);
    w.has_made_room |= is_refused;
    return w.o.config.max_bytes || stats.rows_evicted != me->before.stats.rows_evicted;
}

static int may_change(const call *c) { return operations[c->operation].changes >> c->status & 1; }

/* Compares the answer, and does to the oracle what the call did to the cache. */
static void judge(call *c) {
    static _Thread_local oracle next;
    const operation *op = &operations[c->operation];
    const int evicts = !w.o.crowded && may_evict(c);
    if (w.o.crowded && (w.is_wild || is_open_call(&w.o, c))) {
        judge_openly(c);
        return;
    }
    next = w.o;
    for (int i = 0; evicts && i < PREFIXES; i++) note_doubt(&next, &next.prefixes[i]);
    const kvc_status right = op->right(&next, c);
    const int needs_rows = right == KVC_ERR_GONE || right == KVC_ERR_INDEX;
    if (w.o.crowded && has_windows(&w.o) && !c->status && needs_rows) { /* what has expired by then is open */
        judge_openly(c);
        return;
    }
    if (!is_right(c, right)) wrong("answers \"%s\", not \"%s\"", kvc_strerror(c->status), kvc_strerror(right));
    if (!c->status && !w.o.crowded && !c->is_disturbed) check_counted(c, &w.o, &next);
    if (c->status == KVC_OK || may_change(c)) {
        if (c->is_short) note_short(&next);
        set_oracle(&next);
    }
    if (w.o.crowded) return;
    name_blocks();
    const int is_quiet = takes_rows(op) && evicts && !c->is_short && !c->is_disturbed;
    take_events(op->drops == 2 ? FIRST_USED : is_quiet ? FOR_ROWS : evicts || me->is_within ? SOME_BLOCKS : NO_BLOCKS);
}

/* ---- making calls ------------------------------------------------------------------------------------------------ */

/* Whether sequences that prefixes acquired are fed their prompts, as callers promise. */
static int feeds_prompts(const call *c) {
    int64_t next[SLOTS], fed[SLOTS];
    for (int s = 0; s < SLOTS; s++) next[s] = next_of(&w.o, &w.o.sequences[s]);
    for (int s = 0; s < SLOTS; s++) fed[s] = text_length(w.o.sequences[s].text);
    for (int t = 0; t < c->num; t++) {
        const int prompt = w.o.sequences[c->slots[t]].prompt;
        const int64_t position = c->flag & 1 ? c->positions[t] : next[c->slots[t]]++;
        if (position != fed[c->slots[t]]) continue;
        fed[c->slots[t]]++;
        if (position < text_length(prompt) && text_symbol(text_begin(prompt, (int)position + 1)) != c->symbols[t] &&
            w.o.sequences[c->slots[t]].keeps)
            return 0;
    }
    return 1;
}

static int has_needs(const call *c) {
    const unsigned needs = operations[c->operation].needs;
    if (needs & A_BATCH && !w.o.batches[me->number].is_open) return 0;
    if (needs & A_PREFIX && !w.o.prefixes[c->prefix].is_there) return 0;
    if (needs & A_FREE_SLOT && (is_there(&w.o, &w.o.sequences[c->to]) || is_busy(&w.o, c->to))) return 0;
    if (needs & ITS_TEXT) { /* the caller promises to give the sequence's own tokens, as far as rows are exact */
        const sequence *s = &w.o.sequences[c->s];
        const int length = text_length(s->text), common = text_common(s->text, c->text), next = next_of(&w.o, s);
        if (common < text_length(c->text) && (common < length || (length < next && length < s->exact_to))) return 0;
    }
    if (needs & A_FILE && !w.o.files[me->number]) return 0;
    if (needs & ITS_PROMPTS && !w.o.crowded && !feeds_prompts(c)) return 0;
    return !(needs & ALONE && w.num_clients > 1);
}

/* Compares, after a call that failed, what nothing has changed. */
static void check_failed(const call *c) {
    if (!w.o.crowded && c->is_disturbed) look_around();
    if (!c->is_disturbed && !may_change(c)) check_unchanged(c);
}

/* Runs a call, whose requests for memory fail one after the other, or now and then; what failed so is made again.  A
 * call that overcomes a failure is over, so that the first request to fail is drawn, too. */
static void run_call(call *c) {
    const chance before = me->chance;
    int n = w.has_faults == 2 ? 1 + pick(pick(2) ? 20 : 1) : w.has_faults && !pick(4) ? 1 + pick(pick(2) ? 4 : 30) : 0;
    for (;; n = w.has_faults == 2 ? n + 1 : 0) {
        me->was_refused = 0;
        me->chance = before;
        drive.arm(n);
        const uint64_t faults = drive.num_faults();
        operations[c->operation].run(c);
        c->is_short = drive.num_faults() != faults;
        if (c->is_short) w.refused = c->operation + 1, w.refused_at = w.o.now;
        drive.arm(0);
        if (!(c->status == KVC_ERR_NOMEM && (c->is_short || w.has_faults)) || me->is_within || may_change(c)) break;
        check_failed(c);
    }
    c->met_fault = w.has_faults != 0;
}

void perform(call *c) {
    call *outer = me->call;
    const chance before = me->chance;
    const int was_refused = me->was_refused, left = outer ? drive.arm(0) : 0;
    const picture picture = me->before;
    me->call = c;
    me->chance = (chance){.state = c->seed};
    if (outer) c->is_disturbed = w.o.is_moved = 1;                            /* by the call that it is within */
    if (c->tag + TOKENS > w.last_tag && c->tag) w.last_tag = c->tag + TOKENS; /* of a call that is repeated */
    take_picture();
    if (w.traces) printf("\n"), print_call(c);
    run_call(c);
    const char *answer = kvc_strerror(c->status); /* a step of the scheduler, with a trace or without */
    if (w.traces && w.o.crowded) printf("\n    client %d: ", c->client);
    if (w.traces) printf(" /* %s, %lld */", answer, (long long)c->result);
    lock_world();
    judge(c);
    unlock_world();
    if (!outer) note_blocks();
    if (c->status && !c->is_disturbed) check_failed(c);
    if (outer && (!c->status || may_change(c))) outer->is_disturbed = 1;
    if (outer) drive.arm(left);
    me->call = outer;
    me->chance = before;
    me->was_refused = was_refused;
    me->before = picture;
}

/* Whether a call is about the sequence of a call on the way, whose tokens the caller has promised. */
static int breaks_promise(const call *c) {
    if (!me->is_within || !(operations[me->call->operation].needs & ITS_TEXT)) return 0;
    int breaks = c->s == me->call->s || c->to == me->call->s;
    for (int t = 0; t < c->num && t < TOKENS; t++) breaks |= c->slots[t] == me->call->s;
    return breaks;
}

/* Batches are usually fed at once if prompts are the theme. */
static int is_feeding(void) { return w.theme == PROMPTS && w.o.batches[me->number].is_open; }

/* How often an operation is drawn, by the theme of the world. */
static int weight_of(const operation *op, unsigned point, int is_amid) {
    static const int of_batches[NUM_THEMES] = {4, 4, 8, 8}, of_prefixes[NUM_THEMES] = {4, 0, 8, 0},
                     others[NUM_THEMES] = {4, 4, 1, 1};
    const int is_of_batches = op->needs & A_BATCH || op->run == operations[0].run;
    if (is_amid) return (op->needs & AMID) != 0;
    if (point & (AT_STORE | AT_COPY) && op->drops) return 16 * op->weight; /* what the call is about goes meanwhile */
    const int goes_on = is_of_batches && !point && is_feeding() ? 16 : 1;
    const int is_wanted =
        w.theme == ATTENTION && (op->run == run_copy || op->run == run_shift || op->run == run_attend);
    return op->weight * goes_on * (is_wanted ? 16 : 1) *
           (is_of_batches                                          ? of_batches
            : op->needs & A_PREFIX && (!op->drops || op->gives_up) ? of_prefixes
                                                                   : others)[w.theme];
}

/* A call that would not fit waits for calls that copy, and so for ever within one. */
static int waits_for_copies(const operation *op) {
    return op->errors >> KVC_ERR_FULL & 1 && (capacity_of(&w.o) || w.o.config.max_bytes);
}

/* Draws one of the calls that may be made at a point; 0: a few tries found none. */
static int draw(call *c, unsigned point) {
    const int is_amid = !point && drive.num_amid && drive.num_amid() && pick(2);
    int total = 0;
    for (int i = 0; i < num_operations; i++) total += weight_of(&operations[i], point, is_amid);
    for (int tries = 0; tries < 40; tries++) {
        int at = pick(total > 256 && me->chance.num_bytes ? 256 : total), i = 0;
        if (me->chance.num_bytes) at = at * total / 256;
        while ((at -= weight_of(&operations[i], point, is_amid)) >= 0) i++;
        if (point && !(operations[i].may_run_at & point)) continue;
        if (point == AT_COPY && waits_for_copies(&operations[i])) continue;
        memset(c, 0, sizeof *c);
        c->operation = i;
        c->client = me->number;
        c->began = w.o.now + 1;
        if (operations[i].needs & A_BATCH && !w.o.batches[me->number].is_open) continue;
        if (!operations[i].draw(c) || !has_needs(c) || breaks_promise(c)) continue;
        c->seed = next_bits(&me->chance);
        memcpy(c->texts, w.texts, sizeof w.texts);
        w.o.now++;
        return 1;
    }
    return 0;
}

void come_between(unsigned point) {
    call inner;
    if (drive.pause) drive.pause();
    if (!me || !me->call || me->is_within || !(operations[me->call->operation].gives_up & point) || pick(4)) return;
    me->is_within = 1;
    int is_drawn;
    do {
        lock_world();
        is_drawn = draw(&inner, point);
        if (is_drawn && !w.o.crowded) take_events(SOME_BLOCKS); /* of what the call on the way has dropped until now */
        unlock_world();
        if (is_drawn) perform(&inner);
    } while (is_drawn && pick(2));
    me->is_within = 0;
}

/* Makes a call, and looks around, in the same way whenever it is made again. */
static void perform_and_look(call *c, int looks_at_all) {
    const chance before = me->chance;
    perform(c);
    if (is_feeding() && !looks_at_all) return;
    me->chance = (chance){.state = ~c->seed};
    look_up_texts();
    if (looks_at_all)
        look_around();
    else
        look_at(pick(2) ? c->s : pick(SLOTS));
    me->chance = before;
}

int play(void) {
    call c;
    lock_world();
    const int is_drawn = draw(&c, 0);
    if (is_drawn && recording && !w.is_child && recording->num < MOST_CALLS) recording->calls[recording->num++] = c;
    unlock_world();
    if (!is_drawn) return 0;
    perform_and_look(&c, !w.o.crowded && w.o.now % 8 == 0);
    return is_feeding() && pick(30) ? play() : 1;
}

void stop_playing(void) {
    call c = {.client = me->number};
    run_abort(&c);
    lock_world();
    right_abort(&w.o, &c);
    unlock_world();
}

/* ---- shortening -------------------------------------------------------------------------------------------------- */

void __gcov_dump(void) __attribute__((weak)); /* notes which lines ran, as _exit() does not: coverage.py */

/* Plays in a child: new calls, or those of a list.  Returns whether it failed. */
static int play_in_child(uint64_t seed, int num_calls, const call *calls, int is_quiet, int traces) {
    fflush(stdout);
    recording->failure = NULL;
    const pid_t child = fork();
    if (!child) {
        client own = {.chance = {.state = seed}};
        me = &own;
        alarm(MOST_SECONDS);
        if (is_quiet && !freopen("/dev/null", "w", stdout)) _exit(4);
        make_world(seed, 1, 0);
        w.has_faults = drive.faults == 2 ? 2 : drive.faults && seed % 5 == 1;
        w.traces = traces || (drive.traces && !is_quiet);
        if (w.traces) print_world();
        for (int i = 0; i < num_calls; i++)
            if (!calls) {
                play();
            } else {
                call c = calls[i];
                c.began = ++w.o.now;
                memcpy(w.texts, c.texts, sizeof w.texts);
                if (has_needs(&c)) perform_and_look(&c, 1);
            }
        me->call = NULL;
        look_around();
        end_world();
        fflush(stdout);
        if (__gcov_dump) __gcov_dump();
        _exit(0);
    }
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child) return 0;
    return status != 0;
}

/* Leaves calls out as long as what is left fails alike. */
static int shorten(uint64_t seed, call *calls, int num) {
    static call fewer[MOST_CALLS];
    const char *failure = recording->failure;
    const int operation = recording->operation;
    const time_t end_time = time(NULL) + SHORTEN_SECONDS;
    for (int size = num / 2; size; size /= 2)
        for (int begin = 0; begin < num && time(NULL) < end_time;) {
            const int end = begin + size < num ? begin + size : num, left = num - (end - begin);
            memcpy(fewer, calls, (size_t)begin * sizeof *calls);
            memcpy(fewer + begin, calls + end, (size_t)(num - end) * sizeof *calls);
            if (!play_in_child(seed, left, fewer, 1, 0) || recording->failure != failure ||
                recording->operation != operation) {
                begin = end;
                continue;
            }
            num = left;
            memcpy(calls, fewer, (size_t)num * sizeof *calls);
        }
    return num;
}

int run_alone(uint64_t seed, int num_calls) {
    static call calls[MOST_CALLS];
    if (!recording) {
        share_texts();
        recording = mmap(NULL, sizeof *recording, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    }
    forget_texts();
    recording->num = 0;
    if (!play_in_child(seed, num_calls < MOST_CALLS ? num_calls : MOST_CALLS, NULL, 0, 0)) return 0;
    memcpy(calls, recording->calls, (size_t)recording->num * sizeof *calls);
    if (!play_in_child(seed, recording->num, calls, 1, 0)) {
        printf("seed %llu: fails, but not again\n", (unsigned long long)seed);
        return 1;
    }
    const int num = shorten(seed, calls, recording->num);
    printf("seed %llu fails; %d calls of %d are left:\n", (unsigned long long)seed, num, recording->num);
    play_in_child(seed, num, calls, 0, 1);
    return 1;
}

int run_all(int argc, char **argv, int num_calls, int (*run)(uint64_t seed, int num_calls)) {
    uint64_t seed = 1, runs = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seed")) seed = strtoull(argv[i + 1], NULL, 10);
        if (!strcmp(argv[i], "--runs")) runs = strtoull(argv[i + 1], NULL, 10);
        if (!strcmp(argv[i], "--calls")) num_calls = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--trace")) drive.traces = atoi(argv[i + 1]);
    }
    for (uint64_t i = 0; i < runs; i++)
        if (run(seed + i, num_calls)) return 1;
    return 0;
}
