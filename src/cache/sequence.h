/* sequence.h: what a sequence holds in every layer group, and the table of all sequences.  Pure bookkeeping. */
#ifndef KVC_SEQUENCE_H
#define KVC_SEQUENCE_H

#include "base/sorted.h"
#include "base/threads.h"
#include "rows/runs.h"

/* The fate of a kept sequence by the plan of the running call: it keeps all rows, loses the rows of groups that
 * expire, or is dropped. */
typedef enum kvc_fate { KVC_STAYS, KVC_LOSES_WINDOWS, KVC_GOES } kvc_fate;

/* Who keeps note of a sequence, and is told when it ends: see prefix/tree.h. */
typedef struct kvc_follower {
    /* Called once the sequence has left the table and is freed, with the mutex held; may free the follower, and end
     * hidden sequences. */
    void (*ended)(kvc_cache *cache, struct kvc_follower *follower);
    /* Called when the sequence has become evictable.  NULL: the follower need not know. */
    void (*noted)(struct kvc_follower *follower);
} kvc_follower;

/* The orders of sequences.  A sequence has a place in a tree for each, and no two have the same key. */
typedef enum kvc_key { KVC_BY_ID, KVC_BY_USE, KVC_NUM_KEYS } kvc_key;

/* The running call that has a sequence, if any. */
typedef struct kvc_caller {
    int32_t is_own;                /* the call has made it, and drops it or hands it out at its end: no list has it */
    int32_t is_rewriting;          /* the call copies its rows to new slots without the mutex */
    int32_t in_place;              /* a call writes its rows where they lie without the mutex: kvc_cache_find waits */
    kvc_thread thread;             /* of the call that has made it, or copies its rows */
    struct kvc_rewrites *rewrites; /* of the call that copies its rows */
} kvc_caller;

/* Places in lists of the table; NULL: in none. */
typedef struct kvc_listings {
    struct kvc_sequence *next_changed, **changed_at;
} kvc_listings;

/* Whether a sequence is kept for later prompts, and may be evicted: cache->evicting. */
typedef struct kvc_eviction {
    int32_t is_kept;           /* it waits to be used again, and may be evicted, unless something below forbids it */
    int32_t is_given;          /* its rows come from elsewhere: kvc_make_kept_unwritten */
    int32_t is_protected;      /* it is not evicted, as it is within a prefix's quota */
    int32_t is_counted_pinned; /* it is counted in cache->evicting.num_pinned */
    int32_t is_fixed;          /* it is in table->fixed */
    int32_t is_evictable;      /* it is in cache->evicting.evictable, and blocks count it so */
    int32_t frees;             /* while victims are chosen: evict.c */
    kvc_fate fate;             /* KVC_STAYS unless it is in the list cache->evicting.victims */
    int64_t num_pins;          /* of a kept sequence: while there are any, it is not evicted */
    int64_t used;              /* of a kept sequence: the larger, the more recently */
    int64_t state_bytes;       /* it has so many of cache->evicting.state_bytes */
    struct kvc_sequence *next_victim; /* in the list cache->evicting.victims */
    kvc_standing *standings;          /* [num_token_groups + 1] in each group, and by its state: cache/useful.h */
} kvc_eviction;

typedef struct kvc_sequence {
    kvc_links links[KVC_NUM_KEYS]; /* places in the table, and among the evictable or the others; first, as sequence.c
                                      casts */
    int64_t id;
    int32_t is_hidden;          /* its id is a number of its own: no call can name it, and it stands behind others */
    int32_t in_batch;           /* 1 + its index among the sequences of the open batch; 0: it is not in the batch */
    int32_t min_query_position; /* lowest position at which a query may still come; set before rows expire */
    int32_t exact_to;           /* rows below are exact: they follow from its tokens alone.  INT32_MAX: all are */
    int64_t date; /* cache->prefixes.clock when it was made.  A copy has the date of its oldest source.  0: nobody knows
                     how old its rows are.  INT64_MAX: it is in no table yet, or hidden: forgotten rows are not kept */
    int64_t from; /* kvc_prefix.number of the prefix that acquired it.  A copy has that of its source.  0: no prefix
                     did.  -1: several did */
    int32_t edited_from; /* edits changed or dropped rows from there on; INT32_MAX: none since it was set so */
    int32_t holds;       /* it is counted in cache->sequences.num_holding */
    kvc_caller call;
    kvc_listings listed;
    kvc_eviction evicting;
    kvc_follower *follower; /* NULL: nobody.  With one, it stays in the table when it is blank */
    const kvc_pool *pools;  /* [num_groups] */
    int32_t num_groups;
    int32_t num_token_groups; /* number of groups of tokens: the first; others are of cross-attention layers */
    kvc_run_list runs[];      /* [num_groups] */
} kvc_sequence;

/* Makes an empty sequence; returns NULL if out of memory. */
kvc_sequence *kvc_sequence_new(const kvc_pool *pools, int64_t id, int32_t num_groups, int32_t num_token_groups);

/* Returns KVC_ERR_NOMEM, with the id of the sequence in the message. */
kvc_status kvc_fail_sequence(int64_t id);

/* Frees the sequence and drops the slots that it holds. */
void kvc_sequence_free(kvc_sequence *sequence, kvc_memory *memory, kvc_pool *pools);

/* Returns whether the sequence holds rows, of tokens or in a cross-attention layer. */
int kvc_sequence_holds(const kvc_sequence *sequence);

/* Returns whether the sequence holds no token's rows. */
int kvc_sequence_is_empty(const kvc_sequence *sequence);

/* Returns whether the sequence holds no rows and none of its rows have expired: it then leaves the table. */
int kvc_sequence_is_blank(const kvc_sequence *sequence);

/* Return the smallest and the largest position of a row in any group of tokens; -1 if the sequence is empty. */
int32_t kvc_sequence_first(const kvc_sequence *sequence);
int32_t kvc_sequence_last(const kvc_sequence *sequence);

/* Returns the position behind all tokens in any group, expired ones included. */
int32_t kvc_sequence_next(const kvc_sequence *sequence);

/* Returns how many first tokens of the sequence are exact, expired ones included.  Below the first inexact token there
 * may be positions that no token has. */
int32_t kvc_sequence_num_exact(const kvc_sequence *sequence);

/* Returns the lowest position at which the sequence may resume: kvc_sequence_next.  After a batch that restored only
 * some groups, it is the first position that the others lack, because truncating there is allowed. */
int32_t kvc_min_query_position(const kvc_sequence *sequence);

/* Return the lower of two positions, either of which may be INT32_MAX: none; or a position, none if it is not below
 * `end`. */
static inline int32_t kvc_lower(int32_t a, int32_t b) { return a < b ? a : b; }
static inline int32_t kvc_below(int32_t position, int32_t end) { return position < end ? position : INT32_MAX; }

/* Notes that a sequence got rows of another one: it gets its date, if that is earlier, and its prefix. */
void kvc_sequence_note_source(kvc_sequence *sequence, const kvc_sequence *source);

/* Notes an edit, or a commit, once it cannot fail: rows from `position` on were changed or dropped, and rows from
 * exact_to on may not follow from the tokens alone. */
void kvc_sequence_note_edit(kvc_sequence *sequence, int32_t position, int32_t exact_to);

/* Notes that all rows from `length` on were dropped of a sequence whose next position was next_before.  If all
 * inexact rows are among them, all remaining rows are exact. */
void kvc_sequence_note_cut(kvc_sequence *sequence, int32_t length, int32_t next_before);

/* ---- sorted sequences, and the table of all ---------------------------------------------------------------------- */

/* Inserts a sequence into a set by a key. */
void kvc_sequence_sort(kvc_sorted *sorted, kvc_sequence *sequence, kvc_key by);

/* Return the first sequence of a set (KVC_LOW) or the last one (KVC_HIGH), and the next one by falling key (KVC_LOW) or
 * rising key (KVC_HIGH); NULL at the end. */
kvc_sequence *kvc_sequence_end(const kvc_sorted *sorted, kvc_key by, int side);
kvc_sequence *kvc_sequence_beside(const kvc_sequence *sequence, kvc_key by, int side);

typedef struct kvc_table {
    kvc_sorted named, hidden;        /* by id: sequences that calls can name, and hidden ones */
    kvc_sorted fixed;                /* all sequences that hold rows and are not evictable, in the order of the table */
    kvc_sequence *changed;           /* list of the sequences in which the next batch looks for rows to expire */
    kvc_sequence *reserved;          /* made by kvc_reserve for the next new sequence, in no table; NULL: none */
    int64_t num_holding;             /* number of sequences that hold rows, except kept and hidden ones */
    int64_t next_id, next_hidden_id; /* for sequences that kvc_new_sequence and prefixes name */
} kvc_table;

/* Returns the sequence with an id, except hidden ones; NULL if it does not exist. */
kvc_sequence *kvc_table_find(const kvc_table *table, int64_t id);

/* Returns the hidden sequence with an id; NULL if it does not exist. */
kvc_sequence *kvc_table_find_hidden(const kvc_table *table, int64_t id);

/* Inserts a sequence, or removes one without freeing it. */
void kvc_table_insert(kvc_table *table, kvc_sequence *sequence);
void kvc_table_remove(kvc_table *table, kvc_sequence *sequence);

/* Puts a sequence into table->fixed, or takes it out.  Does nothing if it is there already, or not.  An inserted
 * sequence is not there yet. */
void kvc_table_list(kvc_table *table, kvc_sequence *sequence, int32_t is_fixed);

/* Return the first sequence of table->fixed, and the next one; NULL at the end. */
kvc_sequence *kvc_table_first_fixed(const kvc_table *table);
kvc_sequence *kvc_table_next_fixed(const kvc_sequence *sequence);

/* Return the first sequence by rising id, and the next one; NULL at the end.  Hidden sequences come last. */
kvc_sequence *kvc_table_first(const kvc_table *table);
kvc_sequence *kvc_table_next(const kvc_table *table, const kvc_sequence *sequence);

/* Return the last sequence in this order, and the previous one; NULL at the end. */
kvc_sequence *kvc_table_last(const kvc_table *table);
kvc_sequence *kvc_table_before(const kvc_table *table, const kvc_sequence *sequence);

#endif
