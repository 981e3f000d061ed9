/* known.h: an oracle of prefixes, written from include/kvcache.h alone, and the world that it watches.
 *
 * Random calls drive caches and their prefixes.  The oracle notes with plain lists which blocks and states each prefix
 * has: surely, or maybe where the header leaves it open or memory was short.  After each step it asks the library, and
 * compares.  A row is made of the hash of all tokens up to its own, so that a wrong match shows in the rows. */
#ifndef KNOWN_H
#define KNOWN_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache.h"

enum {
    MOST_LAYERS = 4,
    MOST_HEADS = 2,
    DIM = 4,
    MOST_TEXT = 62, /* tokens of a text: positions fit into the bits of a number */
    MOST_STATE = 24,
    SYMBOLS = 9,
    CACHES = 2,
    MODELS = 4,
    PREFIXES = 5,
    SEQUENCES = 14,
    TEXTS = 14,
    PINS = 6,
    FOLLOWED = 1024
};

/* ---- texts (texts.c): a node of one tree stands for a text, and for the last token of it */

/* A token: an id, or a digest in place of an id. */
typedef struct symbol {
    int64_t id;
    int has_digest;
    uint8_t digest[KVC_NAME_BYTES];
} symbol;

extern symbol symbols[SYMBOLS];

typedef struct text_tokens {
    kvc_tokens tokens;
    int64_t ids[MOST_TEXT];
    uint8_t digests[MOST_TEXT][KVC_NAME_BYTES];
} text_tokens;

void make_symbols(void);

/* Makes what is random below digests the same for each run. */
void begin_tokens(void);
int text_behind(int node, int symbol);
int text_length(int node);
int text_symbol(int node);

/* Returns the first `length` tokens of a text. */
int text_begin(int node, int length);

/* Returns the number of tokens with which both texts begin. */
int text_common(int a, int b);

/* Fills in the tokens of a text; what stands below digests is random. */
const kvc_tokens *tokens_of(int node, text_tokens *out);

/* Returns a hash of a text, a model and a number. */
uint64_t text_hash(int node, int model, int number);

/* ---- what the world is made of */

typedef struct shape {
    int num_layers, block;
    int is_limited; /* by capacity or max_bytes */
    int has_windows;
    int has_rows[MOST_LAYERS]; /* of its own */
    int unit;                  /* a multiple of the strides of all layers */
    uint64_t has[MOST_LAYERS]; /* the positions at which a layer has rows */
    kvc_layer layers[MOST_LAYERS];
    kvc_config config;
    uint64_t sees[MOST_LAYERS][MOST_TEXT + 1]; /* the positions that a token at each position sees, before its own */
} shape;

/* Whether a layer stores values beside its keys: they may lie in the keys, or there may be none. */
static inline int has_values(const shape *s, int l) { return s->layers[l].v_dim && !s->layers[l].value_in_key; }

/* The properties that name the rows of a prefix. */
typedef struct model {
    const char *fingerprint, *identity, *salt; /* tenants with a salt have a secret */
    int state_bytes;
    int like; /* the first model of the run with the same rows and names */
} model;

/* A block that a prefix keeps, or may keep. */
typedef struct kept {
    int node, begin, end;                         /* the text up to its end, and the positions of its tokens */
    int is_sure;                                  /* 0: it may be dropped */
    uint64_t sure[MOST_LAYERS], may[MOST_LAYERS]; /* the positions whose rows it has */
    long sure_use, may_use;                       /* the latest steps that used it, and that may have */
    int64_t sure_ms, may_ms;                      /* their times */
    int sure_new, may_new;                        /* kvc_take_new_blocks lists it, or may */
    uint8_t name[KVC_NAME_BYTES];                 /* of a full block */
} kept;

/* A recurrent state that a prefix keeps, or may keep. */
typedef struct state {
    int node;
    int is_sure;
    long sure_use, may_use; /* twice the steps, and 1 more unless a prompt went on from another state of its block */
} state;

typedef struct pin {
    int node;
    int count;
    int is_loose; /* its blocks were cleared: whether new ones are pinned is open */
    int kept;     /* tokens that were known as it was pinned last */
    int has_full; /* of these, only full blocks are surely pinned: it was forgotten since */
} pin;

typedef struct prefix {
    kvc_prefix *handle; /* NULL: the prefix does not exist */
    int cache, model;
    kvc_prefix_config config;
    int num_blocks, room_blocks, num_states, room_states, num_pins;
    kept *blocks;
    state *states;
    pin pins[PINS];
    int has_lost;      /* events */
    int has_forgotten; /* a prompt: it may keep no blocks of sequences that another prefix acquired */
    int num_followed;
    uint8_t followed[FOLLOWED][KVC_NAME_BYTES]; /* the blocks that it has by its events */
    int64_t requests, hits, tokens, matched, reused;
} prefix;

/* A sequence of a cache.  Up to `exact`, it has the rows of `node`. */
typedef struct sequence {
    int is_there, cache, model;
    int64_t id;
    int node;
    int exact;                       /* INT32_MAX: all are */
    int is_loose;                    /* kvc_exact_to may say one less, or more: the header leaves it open */
    int has_gaps;                    /* tokens between others were dropped */
    int prefix;                      /* 1 + the prefix that acquired it; 0: no prefix did, or it is gone */
    int prompt;                      /* the text that it was acquired with */
    int keeps;                       /* 2: commits keep the prompt's blocks; 1: they may; 0: they do not */
    int is_other;                    /* its first token may not be the prompt's any more */
    uint8_t copies_barred[PREFIXES]; /* 1: it was there when the prefix forgot another prompt: it may bar copies */
    uint8_t barred[PREFIXES];  /* 2: the prefix keeps none of its blocks; 1: it may not: it has forgotten a prompt */
    int left_out;              /* 1 + the first position that a commit may have left out, for want of memory; 0: none */
    int state;                 /* the text whose state it goes on from; 0: none */
    uint64_t had[MOST_LAYERS]; /* rows of blocks that commits filled: a prefix may have kept them aside */
} sequence;

typedef struct world {
    uint64_t seed, random;
    long step;
    int64_t ms;
    shape shape;
    model models[MODELS];
    kvc_cache *caches[CACHES];
    kvc_stats stats[CACHES]; /* as they were last noticed */
    int64_t last_id[CACHES]; /* that the library gave */
    prefix prefixes[PREFIXES];
    sequence sequences[SEQUENCES];
    int texts[TEXTS];
    int is_traced;
    int64_t looks;          /* at the clock */
    int64_t memory;         /* bytes that the library has */
    int has_faults;         /* allocations fail now and then */
    int fails_in, fails_on; /* allocations until one fails, and whether those behind it do, too */
    int is_short;           /* one has failed in the last call: what it keeps is not sure */
    int is_child;           /* of fork() */
    const char *call;
} world;

/* ---- chance, and failing */

static inline uint64_t random_bits(world *w) {
    uint64_t z = w->random += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* A random integer of [0, n). */
static inline int pick(world *w, int n) { return (int)(random_bits(w) % (uint64_t)n); }

static inline int least(int a, int b) { return a < b ? a : b; }

_Noreturn void fail(const world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
void trace(world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Fails unless a call succeeded. */
void must(const world *w, kvc_status status);

/* Writes a text for messages. */
const char *spell(int node);

/* ---- rows, states and payloads (texts.c) */

/* Fills in the row of a text's last token, of one head. */
void make_row(const world *w, int model, int layer, int head, int node, float k[DIM], float v[DIM]);

/* Fills in the state behind a text; returns its bytes. */
int make_state(const world *w, int model, int node, uint8_t *bytes);

/* ---- faults (faults.c) */

/* In some worlds, lets one of the next allocations fail. */
void arm(world *w);

/* Returns whether a call failed for want of memory: nothing has changed then, or the world fails. */
int again(world *w, kvc_status status);

/* Returns whether a call failed because max_bytes leaves no room: nothing has changed then, or the world fails. */
int is_full(world *w, kvc_status status);
void do_fork_process(world *w);

/* Calls once more whatever failed for want of memory. */
#define CALL(w, status, call) \
    do {                      \
        arm(w);               \
        (status) = (call);    \
    } while (again(w, status))

/* ---- the model (model.c) */

/* Notes that a prefix keeps a block with these rows, surely or maybe, and uses it. */
void note_kept(world *w, prefix *p, int node, int begin, const uint64_t *rows, int is_sure);

/* Notes that it keeps a state, surely or maybe. */
void note_state(world *w, prefix *p, int node, int is_sure);

/* Returns whether pinned states may leave no room for a state of so many bytes. */
int may_lack_room(const world *w, const prefix *p, int64_t size);

/* Notes that blocks on a text, up to `length` tokens, were used: surely, or maybe. */
void note_use(world *w, prefix *p, int node, int length, int is_sure);

/* Notes that a sequence ends, which uses the blocks that it goes on from. */
void note_end(world *w, const sequence *s);

/* Notes that a call for the prefixes whose bits are set in `own` may have evicted what nothing holds. */
void note_evicted(world *w, int cache, unsigned own);

/* Notes that all blocks were dropped, or those on a text; returns the least and the most tokens in these. */
void note_cleared(prefix *p);

/* Notes which sequences may hold rows of a prompt that a prefix has forgotten; node 0: none does. */
void note_bars(world *w, prefix *p, int node);
int last_kept(const world *w, const kept *b, int node);
void note_forgotten(world *w, prefix *p, int node, int64_t *least_tokens, int64_t *most_tokens);

/* Notes that kvc_prefix_evict dropped so many tokens of the `wanted` ones. */
void note_evict(world *w, prefix *p, int64_t wanted, int64_t dropped);

void note_time(world *w, prefix *p);

/* Returns the largest n up to limit such that the first n tokens are known: surely, or maybe.  with_states 0: as far
 * as rows go. */
int known(const world *w, const prefix *p, int node, int limit, int surely, int with_states);

/* Returns in how many layers a block surely has all rows: one without any is neither listed nor handed out. */
int num_whole(const world *w, const kept *b);
kept *find_kept(const prefix *p, int node, int begin);
int is_pinned(const world *w, const prefix *p, const kept *b, int surely);
state *find_state(const prefix *p, int node);

/* ---- stores and payloads (stores.c) */

void free_store(void);

/* Leaves room for the names of one more run: names are compared over many runs, and then forgotten. */
void begin_names(void);

/* Checks a payload against the oracle: of this text.  Fills in the rows, and the text of its state, 0 for none. */
void read_payload(const world *w, int model, int node, const uint8_t *payload, int64_t size, uint64_t *rows,
                  int *state);
void check_name(world *w, int model, int node, const uint8_t *name);
void do_fetch(world *w);
void do_store(world *w);
void do_take(world *w);
void do_add(world *w);
void do_missing(world *w);
void do_names(world *w);

/* ---- checks (checks.c) */

/* Asks for a text, compares, and returns how much is known. */
int check_lookup(world *w, prefix *p, int node);
void check_sequence(world *w, sequence *s);
void check_step(world *w);
void check_all(world *w);
void take_events(world *w, prefix *p, int64_t most);

/* Checks that a call that takes memory has left a cache within max_bytes. */
void check_limit(const world *w, int cache);

/* Looks whether a call has evicted anything. */
void notice_evictions(world *w, int cache, unsigned own);
unsigned bit_of(const world *w, const prefix *p);

/* Notes that the first n tokens of a text are there, as the library said. */
void learn(world *w, prefix *p, int node, int n);

/* Rows that a sequence holds, by layer. */
void rows_of(const world *w, const sequence *s, uint64_t *rows);

/* ---- calls (calls.c, edits.c) */

/* Returns a prefix; NULL: no prefix exists. */
prefix *any_prefix(world *w);
sequence *any_sequence(world *w, int cache);
int any_text(world *w);
void do_acquire(world *w);
void do_batch(world *w);
void do_release(world *w);
void do_checkpoint(world *w);
void release(world *w, sequence *s, prefix *p, int node);
void clear_sequence(world *w, sequence *s);
sequence *new_sequence(world *w, int cache);
void feed(world *w, int cache, sequence **chosen, int num, const int *counts);
void do_clear_sequence(world *w);
void do_truncate(world *w);
void do_fork(world *w);
void do_remove(world *w);
void do_keep(world *w);
void do_pin(world *w);
void do_unpin(world *w);
void do_forget(world *w);
void do_evict(world *w);
void do_clear(world *w);
void do_clear_cache(world *w);
void do_wait(world *w);
void do_clone(world *w);
void do_inject(world *w);
void do_prefix(world *w);
void do_new_text(world *w);

/* ---- worlds (worlds.c) and scenes (scenes.c) */

/* Plays on, up to a step (known.c). */
void play_steps(world *w, long last);

void make_world(world *w);
void free_world(world *w);
void make_shape(world *w, shape *s);
void make_layers(world *w, shape *s);

/* Writes the same layers otherwise: in fields that nothing uses. */
void vary_layers(world *w, shape *s);
void make_models(world *w);
void make_prefix(world *w, prefix *p, int cache);
void free_prefix(world *w, prefix *p);
void free_cache(world *w, int cache);

/* Rows that a clone gets of elsewhere are exact. */

/* A child of fork() has no state that nobody owns. */
void play_forks(world *w);

/* Feeds a sequence n tokens in one batch, as rows of zeros. */
void feed_tokens(world *w, kvc_cache *cache, int64_t id, int n);

/* A prompt that fits without a match fits with one. */
void play_fits(world *w);

/* Names tell apart what rows depend on, and nothing else. */
void play_names(world *w);

/* Blocks are evicted in the order in which they were used last. */
void play_orders(world *w);

/* Fetched blocks and states go in that order, too. */
void play_fetches(world *w);

/* States that prompts go on from are dropped in that order, too. */
void play_states(world *w);

/* Tokens that stand elsewhere are taken from there. */
void play_reuse(world *w);

/* A prompt that is forgotten while a store works is gone. */
void play_forgets(world *w);

/* Tokens that select rows are not known (selected.c). */
void play_selected(world *w);

#endif
