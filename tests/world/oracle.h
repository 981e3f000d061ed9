/* oracle.h: what a cache holds, what it says, and what it refuses, as include/kvcache.h defines it.
 *
 * The oracle has plain lists: of rows for each sequence and layer, of blocks and states for each prefix.  A right_
 * function does to the lists what a call does to the cache, and returns the status that the call must have.  Nothing
 * here is clever or fast; where the header leaves something open, the lists say that it may be so.
 *
 *   sequences.c   what a sequence holds, and what batches do to it
 *   edits.c       what edits do to it
 *   exact.c       which rows follow from the tokens alone (kvc_exact_to)
 *   room.c        what fits: the one place that knows where bytes decide
 *   prefixes.c    what prefixes know, in which order they let it go, and what they have forgotten
 */
#ifndef WORLD_ORACLE_H
#define WORLD_ORACLE_H

#include <stdint.h>

#include "kvcache.h"
#include "rows.h"
#include "texts.h"

enum {
    LAYERS = 4,
    SLOTS = 12,   /* for sequences */
    ACQUIRED = 6, /* the first slot for sequences that prefixes acquire; ids of those before are the world's */
    ROWS = 96,    /* most rows of a sequence in a layer */
    TOKENS = 24,  /* most tokens of a batch */
    CROSS = 5,    /* most rows of a sequence in a cross-attention layer */
    CLIENTS = 4,  /* each may have a batch */
    PREFIXES = 3,
    BLOCKS = 320, /* of a prefix */
    STATES = 64,
    PINS = 4,
    STATE = 2000, /* most bytes of a recurrent state */
    LEAST_STATE = 1000,
    MOST_STATE = 2000, /* bytes of those that are kept */
    MOST_EVENTS = 256, /* of a prefix */
    NO_TOKEN = -1,     /* in place of a tag */
    FILE_BYTES = 1 << 20,
    TEXTS = 6
};

/* ---- calls ------------------------------------------------------------------------------------------------------- */

/* A call: what was drawn for it, and what it returned.  Each operation of the table (calls.c) says which fields it
 * uses.  Nothing here points anywhere, so that a list of calls can be kept, cut short and played again. */
typedef struct call {
    int operation, client;
    uint64_t seed; /* of what is chosen while it runs */
    int s, to;     /* slots of sequences */
    int layer, prefix, text;
    int32_t begin, end, delta;
    int flag, num;               /* num: of the lists that follow */
    int32_t positions[ROWS];     /* of tokens, or of rows */
    int32_t parents[TOKENS];     /* of tokens: -1, or an earlier token */
    int8_t slots[TOKENS];        /* of their sequences */
    int8_t symbols[TOKENS];      /* their ids, for texts */
    uint8_t marks[ROWS];         /* unstored tokens, or kept ones */
    uint8_t layers[LAYERS];      /* that a batch restores */
    int32_t tag;                 /* the first of its rows */
    int texts[TEXTS];            /* of the world, that calls on the way often follow */
    int32_t began;               /* time: when it was made */
    kvc_status status;           /* what it returned, ... */
    int64_t id, result, more;    /* ... and in which numbers */
    int32_t tags[LAYERS][ROWS];  /* by position: the rows of a sequence that it made; NO_TOKEN: none */
    uint8_t is_short, met_fault; /* an allocation failed on the way */
    uint8_t is_disturbed;        /* other calls came between */
} call;

/* ---- sequences ----------------------------------------------------------------------------------------------------
 */

/* A row.  Its key was put for the position `delta` below the one where it stands. */
typedef struct row {
    int32_t position, tag, delta;
    int32_t slot; /* rows that sequences share have the same slot, and count once */
    int is_held;  /* a hold keeps its block: see note_blocks() */
} row;

/* Positions [begin, end); end 0: none. */
typedef struct range {
    int32_t begin, end;
} range;

/* The rows of a sequence in a layer, in order of arrival. */
typedef struct rows {
    int num;
    range lost;    /* all rows that have expired stood here */
    range missing; /* and here other layers have, or had, rows that this one lacks since some were restored */
    row at[ROWS];
} rows;

typedef struct sequence {
    int32_t exact_to;     /* rows from there on do not follow from the tokens; INT32_MAX: all do */
    int text;             /* the tokens that all follow from it: the exact ones from position 0 on */
    int date;             /* when it, or its oldest source, was begun or acquired; -1: it was restored */
    int from;             /* 1 + the prefix that acquired it or its source; 0: none did; -1: several did */
    int prefix;           /* 1 + the prefix that acquired it; 0: none did */
    int prompt;           /* the text that it was acquired with, and is fed */
    int keeps;            /* 2: commits keep the prompt's blocks; 1: they may; 0: they do not */
    int was_short;        /* of memory: a later commit may keep what an earlier one left out */
    int state;            /* the text whose state it goes on from; 0: none; -1: open */
    int prompt_bytes;     /* what its prompt counts for max_bytes, as long as a prefix has acquired it */
    int is_open;          /* others changed it meanwhile: nobody knows what it holds */
    uint64_t had[LAYERS]; /* positions: rows that commits of an acquired sequence have seen */
    rows layers[LAYERS];
} sequence;

/* Every token that was ever put, by tag. */
typedef struct token {
    int32_t base; /* the position that it was put for */
    int text;     /* the tokens up to it, if its rows follow from them alone; otherwise 0; -1: nobody knows */
    int time;     /* of the call that put it */
    int symbol;
} token;

extern token *tokens;

typedef struct batch {
    int is_open, num, has_parents, restores;
    int32_t positions[TOKENS], parents[TOKENS], tags[TOKENS];
    int8_t slots[TOKENS], symbols[TOKENS];
    uint8_t unstored[TOKENS]; /* alike for all tokens of a sequence */
    uint8_t layers[LAYERS];   /* that it restores */
    uint8_t is_put[LAYERS][TOKENS];
    uint8_t has_selected[TOKENS];                       /* rows, by their sketches */
    int num_cross[LAYERS][SLOTS], cross[LAYERS][SLOTS]; /* rows put in cross-attention layers, and their first tag */
} batch;

/* A file of a client: sequences as they were saved. */
typedef struct client_file {
    int num;
    int64_t ids[2], size;
    const char *fingerprint;
    sequence sequences[2];
    uint8_t bytes[FILE_BYTES];
} client_file;

/* ---- prefixes -----------------------------------------------------------------------------------------------------
 */

/* A block that a prefix keeps, or may keep. */
typedef struct block {
    int node, begin;                    /* the text up to its end, and where it begins */
    int is_sure;                        /* 0: it may be dropped */
    uint64_t sure[LAYERS], may[LAYERS]; /* the positions whose rows it has */
    int64_t sure_use, may_use;          /* when a call used it last, and when one may have */
    int64_t sure_ms, may_ms;            /* the same by the clock */
    int sure_new, may_new;              /* kvc_take_new_blocks lists it, or may */
    uint8_t name[KVC_NAME_BYTES];       /* of a full block */
} block;

/* A recurrent state that a prefix keeps, or may keep, behind a text. */
typedef struct state {
    int node, is_sure, time;
    int64_t sure_use, may_use; /* twice the times, and 1 more unless a prompt went on from another state of its block */
} state;

typedef struct pin {
    int node, count;
    int kept;     /* tokens that were known as it was pinned last */
    int is_loose; /* blocks of it went since: whether new ones are pinned is open */
} pin;

/* A text that a prefix has forgotten: rows that were computed before match no prompt, once the call has ended. */
typedef struct forgotten {
    int node, time, end;
} forgotten;

enum { FORGOTTEN = 64 };

typedef struct prefix {
    int is_there;
    kvc_prefix_config config;
    int tenant; /* prefixes of one tenant have the same names */
    int num_blocks, num_states, num_pins, num_forgotten;
    block blocks[BLOCKS];
    state states[STATES];
    pin pins[PINS];
    forgotten forgotten[FORGOTTEN];
    int horizon;     /* when it forgot a prompt last; 0: it never did */
    int num_forgets; /* with names, that are not ended: nothing is fetched */
    int has_lost;    /* events */
    int has_fetched; /* blocks: nobody else knows how old their rows are */
    int64_t requests, hits, tokens, matched, reused;
} prefix;

/* What max_bytes counts in a layer group.  The first layer of the group has it. */
typedef struct group {
    int64_t cost, size; /* of a block: bytes, and slots */
    int64_t held, open; /* blocks that holds keep, and their slots behind fill marks: see note_blocks() */
    int64_t live, used; /* live slots of the others, those of kept blocks included, and all blocks in use */
} group;

typedef struct oracle {
    kvc_layer layers[LAYERS];
    kvc_config config;
    int num_layers, block_size, unit; /* unit: a multiple of the strides of all layers */
    group groups[LAYERS];             /* cost 0: there is no limit in bytes, or the layer is not the first */
    int64_t budget;                   /* bytes that max_bytes leaves to a new cache */
    int is_moved;                     /* calls came since note_blocks(): what it noted is of no use */
    int crowded;                      /* other clients call at the same time: what they leave is open */
    int num_holds;
    int has_fetched; /* blocks from a store: rows of one token may lie in several slots, ... */
    int has_twins;   /* ... and nobody knows whether sequences share them */
    int rewriting;   /* 1 + the sequence whose keys a function of the caller moves; above SLOTS: one of no slot */
    int now;         /* time: counts calls */
    int64_t ms;      /* by the clock of the core */
    int next_slot;   /* of rows; those of new tokens are their tags */
    sequence sequences[SLOTS];
    batch batches[CLIENTS];
    client_file *files[CLIENTS]; /* NULL: the client has none */
    prefix prefixes[PREFIXES];
} oracle;

/* ---- what layers see (sequences.c) */

int is_own(const oracle *o, int l);   /* has rows of its own, which are tokens' */
int is_cross(const oracle *o, int l); /* has an encoder's rows */
int source_of(const oracle *o, int l);
int32_t stride_of(const oracle *o, int l);
int gets_row(const oracle *o, int l, int32_t position);
int same_group(const oracle *o, int a, int b);
int leads_group(const oracle *o, int l);
int has_rope(const oracle *o, int l, int32_t kind); /* in some layer of the group */
int32_t lowest_seen(const kvc_policy *policy, int32_t position);
int has_windows(const oracle *o);

/* ---- what sequences hold */

int32_t next_of(const oracle *o, const sequence *s);
int32_t extreme_of(const oracle *o, const sequence *s, int sign); /* its smallest or largest position; -1: none */
int holds_tokens(const oracle *o, const sequence *s);
int holds_rows(const oracle *o, const sequence *s);
int holds_any(const oracle *o, const sequence *s); /* has rows, or has lost some */
int is_there(const oracle *o, const sequence *s);  /* or a prefix has acquired it */
int misses(const oracle *o, const sequence *s, int32_t position);
const row *find_row(const rows *list, int32_t position); /* the latest one; NULL: none */
void end_sequence(oracle *o, sequence *s);
void expire_below(const oracle *o, sequence *s, int32_t low);
void expire_for(oracle *o, const batch *b); /* as a batch that begins does */
int takes_tokens(const oracle *o, int l, const batch *b);
kvc_status may_put(const oracle *o, const batch *b, const call *c);
int count_in(const batch *b, int s);            /* tokens of a sequence */
int is_busy(const oracle *o, int s);            /* in the open batch */
int is_engaged(const oracle *o, const call *c); /* the cache, by a batch or by keys that are rewritten */
void copy_rows(oracle *o, sequence *to);        /* gives all its rows slots of its own */
void widen(range *r, int32_t position);
void tidy(oracle *o, sequence *s, int had_tokens); /* after an edit: ends it if nothing is left */
void stop_keeping(sequence *s);                    /* commits that follow do not keep blocks of its prompt */
void note_edit(sequence *s);
int misses_in(const oracle *o, const sequence *s, int l, int32_t position, int32_t end);
int misses_below(const oracle *o, const sequence *s, int32_t position, int32_t end);
row new_row(int32_t position, int32_t tag);
void add_row(rows *list, row r);

/* ---- exactness (exact.c) */

void make_inexact(sequence *s, int32_t position);
void cut_exact(const oracle *o, sequence *s, int32_t before); /* its last rows went: it went on at `before` */
int32_t batch_exact_to(const oracle *o, const batch *b, int s, const uint8_t *kept);
int32_t shared_exact_to(const oracle *o, const sequence *from, const sequence *to, int32_t begin, int32_t end);

/* Sets the texts of a batch's tokens, once it is known which are kept. */
void note_texts(oracle *o, const batch *b, const uint8_t *kept);

/* ---- room (room.c) */

/* Whether an edit, or another call that begins no batch, may lack room: the oracle does not follow in which blocks rows
 * lie, nor what pins and quotas hold. */
int room_is_open(const oracle *o);
int64_t capacity_of(const oracle *o);
int64_t live_slots(const oracle *o); /* of all groups, those of blocks that are kept aside */
int32_t live_rows(const oracle *o, int l);
int64_t batch_rows(const oracle *o, int l);
int64_t bytes_beside_blocks(const oracle *o); /* that surely count for max_bytes, kept states included */

/* Whether a batch fits: KVC_OK or KVC_ERR_FULL, or what a call has answered where that is open. */
kvc_status fits(const oracle *o, const batch *b, kvc_status answered);
kvc_status fits_copies(const oracle *before, const oracle *after); /* an edit that copies rows */

/* ---- the calls: what each does to the lists */

kvc_status right_begin(oracle *o, const call *c);
kvc_status right_put(oracle *o, const call *c);
kvc_status right_put_cross(oracle *o, const call *c);
kvc_status right_attend(oracle *o, const call *c);
kvc_status right_listed(oracle *o, const call *c);
kvc_status right_commit(oracle *o, const call *c);
kvc_status right_abort(oracle *o, const call *c);
kvc_status right_vain(oracle *o, const call *c); /* begins a batch, and aborts it */
kvc_status right_copy(oracle *o, const call *c);
kvc_status right_share(oracle *o, const call *c);
kvc_status right_remove(oracle *o, const call *c);
kvc_status right_keep_positions(oracle *o, const call *c);
kvc_status right_truncate(oracle *o, const call *c);
kvc_status right_move(oracle *o, const call *c); /* kvc_shift, and with flag kvc_divide */
kvc_status right_inject(oracle *o, const call *c);
kvc_status right_mark_inexact(oracle *o, const call *c);
kvc_status right_clear_sequence(oracle *o, const call *c);
kvc_status right_clear(oracle *o, const call *c);
kvc_status right_keep(oracle *o, const call *c);
kvc_status right_compact(oracle *o, const call *c);
kvc_status right_reserve(oracle *o, const call *c);
kvc_status right_room(oracle *o, const call *c);
kvc_status right_restore(oracle *o, const call *c);
kvc_status right_clone(oracle *o, const call *c);

kvc_status right_acquire(oracle *o, const call *c);
kvc_status right_release(oracle *o, const call *c);
kvc_status right_checkpoint(oracle *o, const call *c);
kvc_status right_lookup(oracle *o, const call *c);
kvc_status right_pin(oracle *o, const call *c);
kvc_status right_unpin(oracle *o, const call *c);
kvc_status right_evict(oracle *o, const call *c);
kvc_status right_prefix_clear(oracle *o, const call *c);
kvc_status right_forget(oracle *o, const call *c);
kvc_status right_end_forget(oracle *o, const call *c);
kvc_status right_fetch(oracle *o, const call *c);

/* ---- what prefixes know (prefixes.c) */

/* Returns the largest n up to a limit such that the first n tokens of a text are known: surely, or maybe.  with_states
 * 0: as far as rows go. */
int known(const oracle *o, const prefix *p, int text, int limit, int surely, int with_states);
void note_commit(oracle *o, const batch *b, const uint8_t *kept, int s, int old); /* blocks that it filled */
void note_end(oracle *o, const sequence *s);                                      /* of an acquired one: a use */
void note_doubt(const oracle *o, prefix *p); /* a call may have evicted what nothing holds */
void note_cleared(prefix *p);                /* all its blocks are dropped */
void note_time(oracle *o);                   /* blocks expire */
void note_fetched(oracle *o, prefix *p, int text);
void note_read(oracle *o, prefix *p, const call *c);
void note_short(oracle *o); /* memory was short: what a call has kept is not sure */

/* When a fetch last began to read the rows of each text.  These count as computed again, in any prefix.  If the text is
 * forgotten later, the fetch adds nothing more. */
extern int fetched[MOST_TEXTS];
void recall(const oracle *o, int text); /* notes it for a text and all that it begins with */

/* When a prefix forgot what was computed for a text at a time, if that ended before a call began; 0: it did not. */
int forgotten_at(const prefix *p, int text, int time, int began);

/* Takes note of an event, and checks that it may be: a block is dropped for a reason, and in order.  evicts: the call
 * evicts none; or some, nobody knows in which order; or of this prefix those used first; or of all, for rows.
 * is_kept_again: a later event says so. */
enum { NO_BLOCKS, SOME_BLOCKS, FIRST_USED, FOR_ROWS };
void note_event(oracle *o, prefix *p, const kvc_prefix_event *event, int evicts, int is_kept_again);
int is_full_block(const oracle *o, const block *b);
int is_pinned(const oracle *o, const prefix *p, const block *b, int surely);
int num_whole(const oracle *o, const block *b); /* layers of which it surely has all rows */
block *find_block(const prefix *p, int node, int begin);
int drops(const oracle *o, const block *b, int text); /* whether forgetting the text drops a block */
uint64_t positions_of(const rows *list);              /* those below 64, as bits */
int state_size(int text);                             /* the bytes of the state that the world keeps behind it */

/* Fails the run: an answer is wrong (play.c). */
_Noreturn void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
