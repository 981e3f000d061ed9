/* chosen.h: the rows that a token chooses: kvc_chosen. */
#ifndef KVC_CHOSEN_H
#define KVC_CHOSEN_H

#include "attend/seen.h"

/* Reads args->chosen, which is not NULL. */
kvc_status kvc_chosen_read(const kvc_attend_args *args, kvc_chosen *chosen);

/* Returns the most rows that a choice names, if each position has one row. */
int32_t kvc_most_chosen(const kvc_chosen *chosen);

/* Returns KVC_ERR_INVALID unless the choice suits the plan.  Resolves its strides. */
kvc_status kvc_chosen_check(const kvc_plan_args *plan, int32_t num_kv_heads, int32_t tokens_per_sequence,
                            kvc_chosen *chosen);

/* Lists rows that a token sees by position, some at a time.  It goes on where it stopped, so that all of a token's rows
 * are found in one walk over its entries and segments. */
typedef struct kvc_row_lister {
    const kvc_batch *batch;
    const int32_t *order;
    kvc_visible seen;
    const int32_t *entries, *entries_end; /* that name further rows, ascending */
    int64_t block, tail;                  /* positions of an entry; rows from position `tail` on are named, too */
    kvc_row_range named;                  /* positions whose rows are being listed */
    int32_t stride;
    const kvc_row_range *ranges, *ranges_end; /* of named rows to list, ascending, from those on that are not listed */
    const kvc_segment *next, *end;            /* the sequence's segments from where the next rows may lie on */
    int64_t begin;                            /* positions below have no further rows */
    int64_t at;                               /* number of rows named before `next` */
    int64_t from;                             /* number of the first row that is not listed yet */
    kvc_segment *to;                          /* the list, its length, and its most rows */
    int64_t num_segments, num_rows, most;
} kvc_row_lister;

/* Return the first row that has a position of an entry's block, and the number behind the last one. */
static inline int64_t kvc_first_of(const kvc_row_lister *l, int32_t entry) {
    return l->stride == 1 ? entry * l->block : entry * l->block / l->stride;
}
static inline int64_t kvc_past(const kvc_row_lister *l, int32_t entry) {
    return l->stride == 1 ? entry * l->block + l->block : (entry * l->block + l->block - 1) / l->stride + 1;
}

/* Return a lister of the rows that the task's token chooses, from row `first` on, and of the rows that it sees, in
 * these ranges, which ascend. */
kvc_row_lister kvc_list_chosen(const kvc_task *t, int64_t first);
kvc_row_lister kvc_list_seen(const kvc_task *t, const kvc_row_range *ranges, int64_t num_ranges);

/* Lists the next rows, up to `most`, as segments.  Returns their number. */
int64_t kvc_list_next(kvc_row_lister *l, kvc_segment *to, int64_t most);

#endif
