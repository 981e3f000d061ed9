/* sim.h: what the parts of the simulation share: the world's sequences and prefixes, the clients, and their calls. */
#ifndef SIM_SIM_H
#define SIM_SIM_H

#include "kvcache.h"
#include "world.h"

enum {
    MOST_LAYERS = 4,
    MOST_CLIENTS = 8,
    HEADS = 2,
    DIM = 4,         /* of a row, but of keys with sketches */
    ROW = 32,        /* most elements of a row: of keys with sketches */
    MOST = 96,       /* positions of a sequence */
    USUAL_MOST = 56, /* in a world without sketches */
    IDS = 7,
    FEED = 9,     /* most tokens of a sequence in one batch */
    MOST_FED = 3, /* most sequences of a batch */
    MOST_TOKENS = MOST_FED * FEED,
    QUERY_HEADS = 2 * HEADS, /* most */
    MOST_MASKED = 3,
    CROSS = 5, /* most rows of a sequence in a cross-attention layer */
    MOST_TAGS = 1 << 20,
    PREFIXES = 2,
    STORE = 8, /* blocks outside the cache */
    PINS = 3,  /* of a prefix */
    MOST_FOLLOWED = 256
};

/* The tags of the tokens of a string, each of which stands for all tokens up to it. */
typedef struct text {
    int num;
    int tags[MOST];
} text;

/* Holds tags of a sequence's rows by position, 0 where there is no row.  A layer that expires rows may lack some. */
typedef struct sequence {
    int is_taken;            /* by a client, who alone may change it */
    int meddlers, meddlings; /* clients that change it though another one has it; how often any began to */
    int is_spoilt;           /* one did since it was cleared: nobody knows which rows it holds */
    int tags[MOST_LAYERS][MOST];
    int num_cross;
    int prefix;     /* 1 + the prefix that acquired it; 0: no prefix has */
    text prompt;    /* that it was acquired with */
    int barred;     /* bits: prefixes that have forgotten a prompt, and may keep no block of it */
    int num_prompt; /* tokens of the prompt that it is fed, before others */
} sequence;

/* A prefix of the cache, and what may be known of it. */
typedef struct prefix {
    kvc_prefix *handle; /* NULL: the prefix does not exist */
    kvc_prefix_config config;
    int users;          /* calls that use it: meanwhile it is not freed */
    int is_changing;    /* it is made or freed */
    int num_forgetting; /* calls that forget a prompt */
    int cleared;        /* strings that were noted before this time are not known any more */
    int pins[PINS];     /* tags of pinned strings; 0: nothing; below 0: a call is about to pin or unpin the tag */
    int is_followed;    /* a call reads its events */
    int has_lost;       /* events: nobody knows which blocks there are */
    int64_t since;      /* time of making or clearing, by sim_now(): forgets before that count no more */
    int num_followed;
    uint8_t followed[MOST_FOLLOWED][KVC_NAME_BYTES]; /* the blocks that it has by its events */
} prefix;

/* A block outside the cache. */
typedef struct payload {
    int is_taken;
    int tag; /* of its last token */
    int64_t size;
    uint8_t *bytes; /* NULL: none */
} payload;

/* Tokens of a batch that attend, and what is hidden from them. */
typedef struct query {
    int first, num, num_heads, num_threads, num_masked, has_non_causal;
    kvc_masked masked[MOST_MASKED];
    uint8_t non_causal[MOST_TOKENS];
    int max_chosen;  /* 0: no rows are chosen to attend to */
    int num_choices; /* of a token, in a layer of keys alone */
    int select;      /* about how many rows a token selects, in a layer with sketches; 0: it attends to all */
} query;

/* A forward pass of a client. */
typedef struct pass {
    kvc_batch *batch;
    int num_sequences, num_tokens;
    int sequences[MOST_FED], first[MOST_FED + 1]; /* tokens of each: [first[i], first[i + 1]) */
    int positions[MOST_TOKENS], tags[MOST_TOKENS];
    int stands[MOST_TOKENS];           /* the core's positions: others may have moved the end of a sequence */
    int parents[MOST_TOKENS], is_tree; /* is_tree: a token sees its ancestors among the tokens, and no others */
    uint8_t unstored[MOST_TOKENS];
    int num_put[MOST_LAYERS]; /* tokens that were put in a layer: the first ones */
    query last;               /* that attended */
    int select;               /* rows that tokens may select; 0: they do not */
    int selecting[MOST_FED];  /* the first token of each sequence that may: its rows follow from no tokens */
    uint8_t has_selected[MOST_TOKENS];
} pass;

/* The subject of most calls of a run.  If the subject is prompts, only calls drop what prefixes keep. */
typedef enum theme { ANYTHING, PASSES, MOVES, PROMPTS, NUM_THEMES } theme;

typedef struct world {
    kvc_cache *cache;
    theme theme;
    kvc_layer layers[MOST_LAYERS];
    kvc_config config;
    int num_layers, expires, last_tag;
    int has_sketches;    /* of keys, in some layers */
    int unit;            /* a multiple of the strides of all layers */
    int whole;           /* a layer that has rows of all tokens */
    int is_meddled;      /* not 0: clients change sequences that others have */
    int takes_rare_ways; /* not 0: rows may be moved together where that gains nothing */
    sequence sequences[IDS];
    kvc_batch *batch; /* the open one; NULL while none is, or it begins or ends */
    pass *pass;       /* that it is of; NULL: it is of none */
    kvc_hold *holds[MOST_CLIENTS];
    int num_holds; /* holds in the list, and holds that a call is about to return */
    int num_clones;
    int has_allocator;
    int64_t bytes[KVC_MEMORY_SCRATCH + 1]; /* that the cache and its clones have of the allocator, by kvc_memory_kind */
    int64_t calls_left;
    int has_prefixes, has_states; /* has_states: they are of a model beside its rows */
    prefix prefixes[PREFIXES];
    payload store[STORE];
    int time;                    /* rises with each string that is noted */
    int since[MOST_CLIENTS];     /* when the client began to use prefixes; 0: it does not */
    int num_acquiring, acquired; /* calls of kvc_prefix_acquire that run, and that began */
    uint8_t origins[MOST_TAGS];  /* by tag: the position that the row was put at */
} world;

/* The parts of the cache that others can see.  They are of one moment unless sim_handovers() has changed. */
typedef struct picture {
    uint64_t handovers;
    int layer; /* whose blocks are in it */
    int64_t nbytes;
    kvc_stats stats;
    uint64_t contents; /* a hash of the sequences, in order of use, and the blocks */
    kvc_prefix_stats prefixes[PREFIXES];
} picture;

typedef struct client {
    world *w;
    int number, thread;
    int was_cancelled; /* since the call began */
    int is_called;     /* by the core: its call is one within another */
    int is_last;       /* beside another client, which has ended its call */
    int calls_aside;   /* how many it made within others, or in a batch without need */
    uint64_t handovers, faults;
    picture before; /* the call */
    const char *call;
    int replaces;     /* the sequence that the call replaces; -1: none */
    kvc_batch *batch; /* a batch that began meanwhile: of that sequence, or, with takes_room, of all tokens that fit */
    int takes_room;
} client;

typedef struct rows {
    float k[HEADS][MOST][ROW], v[HEADS][MOST][ROW];
    int32_t positions[MOST];
} rows;

/* The failures with which a call may answer, beside failures that a fault causes. */
enum {
    MAY_BE_BUSY = 1,
    MAY_BE_FULL = 2,
    MAY_BE_GONE = 4,
    MAY_BE_HELD = 8,
    MAY_BE_INVALID = 16,
    MAY_CANCEL = 32,
    MAY_INDEX = 64,
    MAY_CHANGE = 128, /* after a failure, too */
    MAY_BE_UNSUPPORTED = 256
};

extern int64_t ids[IDS]; /* by which each sequence is named now */

int pick(int n);
int64_t id_of(int s);
_Noreturn void fail(const client *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Notes how things are before a call. */
void begin_call(client *c, const char *call);

/* Returns whether a call succeeded; it must not fail otherwise than this, and if it did, it must have changed nothing.
 */
int ended(client *c, kvc_status status, int may);

/* Whether others may have seen, or changed, something since the call began. */
int is_alone(const client *c);

/* Whether nothing has changed since the call began, unless others ran meanwhile. */
void check_unchanged(client *c);

/* Makes a call on a thread of its own, after some steps; NULL: no thread could be had.  end_beside waits for its end.
 */
typedef struct beside beside;
beside *begin_beside(const client *c, void (*call)(client *c));
void end_beside(beside *b);

/* Forks the process, and checks the child. */
void fork_process(client *c);

/* Returns a tag for a new row. */
int new_tag(world *w, int position);

/* An element of a row, and of a key at a position. */
float element(int tag, int layer, int is_value, int h, int d);
float key_element(const world *w, int tag, int layer, int h, int d, int position);

/* Returns the tag of a row, all of which must be of that tag, and its key turned as at this position. */
int tag_of(const client *c, const float *k, const float *v, int64_t k_stride, int64_t v_stride, int layer,
           int position);

/* Describe rows of a layer; a layer of keys alone gets no values. */
kvc_rows_out out_of(const world *w, int layer, rows *r);
kvc_rows_in in_of(const world *w, int layer, const rows *r);
void set_row(rows *r, int i, int tag, int layer);
int is_own(const world *w, int l);
int source_of(const world *w, int l);

/* For how many positions a layer has one row. */
static inline int stride_of(const world *w, int l) {
    return w->layers[l].policy.stride > 1 ? w->layers[l].policy.stride : 1;
}

/* Whether a layer has rows at a position. */
static inline int has_row(const world *w, int l, int position) { return (position + 1) % stride_of(w, l) == 0; }

/* Copies each row that a sequence of a cache holds in a layer to its position.  Elsewhere, r->positions is -1. */
kvc_status read_all(const client *c, kvc_cache *cache, int s, int l, rows *r);

/* Returns how many elements a key of a layer has. */
static inline int key_dim(const world *w, int layer) { return w->layers[layer].k_dim; }

/* Compares what a sequence of a cache holds with what it should. */
void check_sequence(client *c, kvc_cache *cache, int s);

/* Takes a sequence that nobody has; -1: a few tries found none. */
int take(client *c);
void let_go(client *c, int s);

int end_of(const sequence *s);
int clear_one(client *c, int s);

/* Whether a query at position `at` sees a position of its sequence. */
int sees(const kvc_policy *policy, int at, int position);

/* Attends in a layer, and compares the results with plain arithmetic over the rows.  In a layer of keys alone, this and
 * the calls below choose rows. */
void attend(client *c, pass *p, int layer);

/* Attends, and puts tokens [first, first + n) first; returns whether it could. */
int put_and_attend(client *c, pass *p, int layer, int first, int n, const kvc_put_args *put);

/* Attends as the pass did last. */
void attend_again(client *c, pass *p, int layer);

/* Makes a plan, and lets several threads run tasks of it; returns whether it could.  end_tasks runs all tasks and frees
 * the plan; more rows may be put before. */
int begin_tasks(client *c, pass *p, int layer);
void end_tasks(client *c);

/* Divides the positions of a sequence, and edits it and copies of it while several rows stand at one position. */
void divide(client *c, int s);

/* Makes a call that must be refused. */
void call_wrongly(client *c);

/* Compares rows side by side, and who sees them, with what there is. */
void check_dense(client *c, const pass *p, int layer);

#endif
