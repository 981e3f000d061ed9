/* world.h: the world in which calls are made: a cache, its prefixes, a store, a file, and the oracle of all of it.
 *
 *   calls.c      the table of operations (calls_*.c: how each is drawn and run)
 *   play.c       draws a call, makes it, asks the oracle, and compares; repeats and shortens lists of calls
 *   look.c       compares what can be seen with the oracle
 *   world.c      makes a world of any shape and limits
 *   touch.c      lets other calls come between while a state is copied
 *   drive_*.c    who calls: one thread, real threads, threads of a simulated scheduler, the bytes of a fuzzer, and one
 *                thread whose allocations fail one after the other
 */
#ifndef WORLD_WORLD_H
#define WORLD_WORLD_H

#include <stddef.h>
#include <string.h>

#include "oracle.h"

enum { VALUES = 192, NAMES = 64, VIEW_SPANS = 128 };

/* The points at which a call gives up the mutex and a function of the caller runs, or a state is copied, as bits. */
enum { AT_MOVE = 1, AT_WRITE = 2, AT_READ = 4, AT_STORE = 8, AT_POLL = 16, AT_COPY = 32, AT_ANY = 63 };

/* What a call needs. */
enum { A_BATCH = 1, A_PREFIX = 2, A_FREE_SLOT = 4, A_FILE = 8, ITS_TEXT = 16, ITS_PROMPTS = 32, ALONE = 64 };
enum { AMID = 128 }; /* drawn more often while other clients stand still in the middle of calls */

typedef kvc_status right_fn(oracle *o, const call *c);

typedef struct operation {
    const char *name; /* of the public functions, apart by spaces */
    int weight;
    int (*draw)(call *c); /* chooses arguments; 0: there is nothing to call now */
    void (*run)(call *c); /* calls the library, and notes what it returned */
    right_fn *right;
    const char *text;    /* the call in C: see play.c */
    unsigned errors;     /* bits: the statuses that the header lists */
    unsigned gives_up;   /* the points at which other calls come between */
    unsigned may_run_at; /* the points at which it may be called */
    unsigned needs;      /* bits of what must be there */
    unsigned changes;    /* bits: the statuses after which it may have changed something, too */
    int drops;           /* 1: it drops blocks that prefixes keep; 2: the least recently used ones */
} operation;

extern const operation operations[];
extern const int num_operations;

/* A view of rows, and what they were when it was taken. */
typedef struct view {
    kvc_hold *hold;
    kvc_span spans[VIEW_SPANS];
    int64_t num_spans;
    int layer, num;
    row rows[ROWS];
    uint64_t sum; /* of the bytes of the rows */
} view;

/* A value of the store. */
typedef struct value {
    uint8_t name[KVC_NAME_BYTES];
    uint8_t *bytes; /* NULL: there is none */
    int64_t size;
    int written, forgotten; /* times: of the call that wrote it; when its text was forgotten last */
} value;

/* What a prefix has forgotten, and who has to end it. */
typedef struct departures {
    int num, num_forgets; /* num_forgets: calls with names that are not ended */
    uint8_t names[VALUES][KVC_NAME_BYTES];
} departures;

/* Who decides: a seed, or the bytes of a fuzzer and then a seed. */
typedef struct chance {
    uint64_t state;
    const uint8_t *bytes;
    size_t num_bytes;
} chance;

/* The statistics and bytes of the cache at one time.  `turns` and `faults` count how often other clients have run, and
 * how often memory was refused. */
typedef struct picture {
    kvc_stats stats;
    int64_t nbytes;
    uint64_t turns, faults;
} picture;

/* What a thread is about to do. */
typedef struct client {
    int number;
    chance chance;
    picture before;  /* its call */
    call *call;      /* that it makes; NULL: none */
    int is_within;   /* a call of its own */
    int was_refused; /* a function of the caller failed, or asked for an end */
} client;

/* The subject of most calls of a world. */
typedef enum theme { ANYTHING, EDITS, PROMPTS, ATTENTION, NUM_THEMES } theme;

typedef struct world {
    uint64_t seed;
    theme theme;
    oracle o;
    kvc_cache *cache;
    kvc_batch *batches[CLIENTS];
    kvc_prefix *prefixes[PREFIXES];
    int64_t ids[SLOTS];
    int texts[TEXTS]; /* that prompts and sequences often follow */
    view views[CLIENTS];
    value values[VALUES];
    departures departures[PREFIXES];
    int64_t last_id;
    int32_t last_tag;
    int num_clients;            /* above 1: the oracle is crowded */
    int is_wild;                /* clients change sequences of each other: nobody knows what these hold */
    int has_faults, refuses;    /* allocations, and functions of the caller, fail */
    int has_made_room;          /* memory was refused for a batch, which may have evicted blocks then */
    int refused, refused_at;    /* 1 + the operation for which memory was last refused, and its time; 0: none was */
    int traces, is_child;       /* of fork(), or a copy of the cache */
    int64_t memory, row_memory; /* bytes that the cache has in all, and bytes of rows */
    int num_clones;             /* which have bytes, too */
} world;

extern world w;
extern _Thread_local client *me;

/* ---- what a driver supplies */

typedef struct driver {
    void (*lock)(void), (*unlock)(void); /* of the world; NULL: only one thread runs at a time */
    int (*arm)(int n);                   /* lets the calling thread's nth request for memory fail; 0: none.  Returns
                                            how many were left before */
    uint64_t (*num_faults)(void);        /* counts the requests of the calling thread that failed */
    void (*pause)(void);                 /* lets others run */
    uint64_t (*turns)(void);             /* counts how often other clients have run; NULL: nobody knows */
    int (*num_amid)(void);               /* clients that stand still in the middle of a call; NULL: none do */
    int64_t (*time)(void);               /* rises with each call of it; NULL: calls need not take turns */
    void (*check_turn)(int64_t since);   /* fails if a client waits for a batch that called before this time */
    void *(*take)(size_t alignment, size_t size); /* memory for an allocator of the world; NULL: the system's */
    void (*give)(void *memory);
    int (*fork)(int (*check)(void)); /* runs check in a child; returns what it returned; NULL: cannot fork */
    int faults;                      /* 1: in some worlds, allocations fail now and then; 2: each one fails once */
    int traces;                      /* prints every call */
} driver;

extern driver drive;

/* ---- play.c */

int pick(int n);                   /* a number below n */
int play(void);                    /* makes one call, and checks it; 0: there was none to make */
void stop_playing(void);           /* of a client: others may wait for its batch */
void perform(call *c);             /* makes a call that was drawn */
void come_between(unsigned point); /* from a function of the caller: makes a call, perhaps */
int refuse(int rarity);            /* whether a function of the caller fails now */
void name_blocks(void);            /* asks for the names of full blocks that the oracle has added */
void lock_world(void);
void unlock_world(void);
int run_alone(uint64_t seed, int num_calls); /* plays in a process of its own; shortens what fails */
int run_all(int argc, char **argv, int num_calls, int (*run)(uint64_t seed, int num_calls)); /* from --seed on --runs */

/* Makes a call that copies rows again while memory is refused. */
#define UNTIL_MEMORY(status, call) \
    do {                           \
        (status) = (call);         \
    } while ((status) == KVC_ERR_NOMEM && w.has_faults == 1)

/* ---- world.c */

void make_world(uint64_t seed, int num_clients, int is_wild);
void check_empty(void);
int request_fails(void); /* counts a request of the core to the system, and returns whether it fails */
void end_world(void);    /* drops everything, and checks that every byte comes back */
void make_prefix(call *c);

/* ---- touch.c */

/* Returns room for a state.  After watch(1), the first access to its bytes lets another call come between. */
uint8_t *watched_state(void);
void watch(int on);

/* ---- look.c */

void look_at(int s);    /* compares a sequence */
void look_around(void); /* compares everything */
void look_at_views(void);
uint64_t sum_of_view(const view *v);
void look_up_texts(void); /* asks prefixes for texts */
void take_picture(void);
void note_blocks(void); /* tells the oracle what lies in blocks, where max_bytes counts these */
void check_unchanged(const call *c);
void check_counted(const call *c, const oracle *before, const oracle *after);
void read_tags(kvc_cache *cache, int64_t id, int l, int32_t *tags); /* by position; NO_TOKEN: none */
int32_t tag_of(int l, const float *k, const float *v, int64_t k_stride, int64_t v_stride, int32_t position);
void check_row_of(int l, const row *r, const float *k, const float *v, int64_t k_stride, int64_t v_stride);
void look_at_cache(kvc_cache *cache, const sequence *sequences, const int64_t *ids, int num);
void take_events(int evicts);
void check_sketches(kvc_cache *cache, int64_t id, int l); /* selecting.c */
kvc_rows_out room_for(int l, int64_t n, float *k, float *v);

/* ---- parts of calls */

int own_slot(void);        /* a sequence of the client */
int32_t new_tags(int num); /* returns the first of so many */
int any_position(int s);
int any_text(void);
void forget_plan(int number); /* of a client: its batch ends */

#endif
