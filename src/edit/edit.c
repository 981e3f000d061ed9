/* edit.c: the public functions that remove or move tokens of a sequence, and clear sequences.
 *
 * A change says what an edit does to the rows of one group (kvc_change): positions [begin, end) go, unless they are
 * listed; [end, moved_end) move by `move`, or are divided.  A row's delta is how far it has moved since its key was
 * rotated for a position, which readers make up for.  A rewrite carries out a change.  It copies rows to new slots if
 * their keys have to be rotated at once.  Lost positions are those of expired rows, missing ones those of rows that
 * only other groups have.  In a group with a stride, a row stands for that many positions. */
#include <string.h>

#include "cache/check.h"
#include "edit/rewrite.h"
#include "space/limits.h"
#include "cache/waiting.h"

/* Returns KVC_ERR_UNSUPPORTED if the rope of a layer is not known, so that its keys cannot move. */
static kvc_status check_rope(const kvc_cache *cache) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (kvc_keeps_tokens(cache, i) && cache->layers[i].rope.kind == KVC_ROPE_UNKNOWN)
            return kvc_fail(
                KVC_ERR_UNSUPPORTED,
                "tokens would move, and the keys of layer %d may have to be rotated: give its rope when the "
                "cache is made, or say there that its keys carry no rotation",
                i);
    return KVC_OK;
}

/* Returns KVC_ERR_UNSUPPORTED if an edit would cut blocks of a layer with a stride in two.  It removes or moves the
 * positions [begin, end), and moves tokens by `delta`: all three have to be multiples.  The end of the sequence may be
 * anywhere. */
static kvc_status check_blocks(const kvc_cache *cache, const kvc_sequence *sequence, int32_t begin, int32_t end,
                               int32_t delta) {
    const int32_t next = kvc_sequence_next(sequence);
    for (int32_t i = 0; cache->num_strided && i < cache->num_layers; i++) {
        const int32_t stride = cache->pools[cache->group_of[i]].stride;
        if (begin >= next || (begin % stride == 0 && delta % stride == 0 && (end % stride == 0 || end >= next)))
            continue;
        return kvc_fail(
            KVC_ERR_UNSUPPORTED,
            "a row of layer %d stands for %d positions: positions from %d to %d, or tokens that move by %d, "
            "would cut some of its rows; give multiples of each layer's stride",
            i, stride, begin, kvc_lower(end, next) - 1, delta);
    }
    return KVC_OK;
}

/* ---- one edit of all groups -------------------------------------------------------------------------------------- */

typedef struct edit {
    kvc_change change;
    int32_t removes; /* not 0: tokens are removed; 0: they move */
} edit;

/* Notes in a sequence, whose next position was `next`, from where on rows were edited and are not exact. */
static void note(kvc_sequence *sequence, const edit *e, int32_t next) {
    const kvc_change *c = &e->change;
    const int32_t moves = c->end < c->moved_end;
    int32_t low = c->begin;               /* the lowest position of what has changed */
    if (c->begin == c->moved_end) return; /* nothing changes */
    if (c->begin >= next) return;         /* there are no rows there */
    if (c->divisor)
        low = c->begin / c->divisor;
    else if (moves && c->move < 0 && c->end + c->move < low)
        low = c->end + c->move;
    if (c->end < next) {
        kvc_sequence_note_edit(sequence, low, low);
        return;
    }
    kvc_sequence_note_cut(sequence, c->begin, next);
    if (c->listed) /* rows behind the first dropped one may stay */
        kvc_sequence_note_edit(sequence, low, kvc_below(low, kvc_sequence_next(sequence)));
}

/* Widens an interval to include the positions of `lost` that are in [begin, end), once they were moved by `move` and
 * divided. */
static void add_moved(kvc_interval *all, kvc_interval lost, int32_t begin, int32_t end, int32_t move, int32_t divisor) {
    if (lost.begin < begin) lost.begin = begin;
    if (lost.end > end) lost.end = end;
    if (lost.begin >= lost.end) return;
    const int64_t from = (lost.begin + (int64_t)move) / divisor, last = (lost.end - 1 + (int64_t)move) / divisor;
    const int32_t first = from < INT32_MAX - 2 ? (int32_t)from : INT32_MAX - 2,
                  past = last < INT32_MAX - 2 ? (int32_t)last + 1 : INT32_MAX - 1;
    kvc_interval_add(all, (kvc_interval){first, past});
}

/* Returns the position behind the last listed position; 0 if none is listed. */
static int32_t end_of(const kvc_listed *listed) { return listed->num ? listed->positions[listed->num - 1] + 1 : 0; }

/* Returns the lost, or missing, positions of a list after the change in its group.  They are removed and moved as rows
 * are.  Except: where listed rows stay, all lost positions up to the last listed one stay lost. */
static kvc_interval lost_after(const kvc_change *c, kvc_interval lost) {
    kvc_interval after = {0, 0};
    add_moved(&after, lost, 0, c->listed ? kvc_rows_below(end_of(c->listed), c->listed->stride) : c->begin, 0, 1);
    add_moved(&after, lost, c->end, c->moved_end, c->move, c->divisor ? c->divisor : 1);
    add_moved(&after, lost, c->moved_end, INT32_MAX, 0, 1);
    return after;
}

/* Returns 1: every changing row is copied.  A kvc_change.copies. */
static int copies_every_row(const void *context, const kvc_run *run, int32_t slot) {
    (void)context, (void)run, (void)slot;
    return 1;
}

/* Returns the change in one group, in rows if it has a stride.  Keys are rotated at once, in copies of their rows, if
 * only the caller's function knows how they move, or if positions are divided: almost every row would need a delta of
 * its own.  listed: memory for own.listed. */
static kvc_change change_in(const kvc_cache *cache, int32_t group, const kvc_change *change, kvc_listed *listed) {
    const int32_t stride = cache->pools[group].stride;
    kvc_change own = *change;
    own.begin = kvc_rows_below(change->begin, stride);
    own.end = kvc_rows_below(change->end, stride);
    own.moved_end = kvc_rows_below(change->moved_end, stride);
    own.move = change->move / stride;
    if (change->listed) {
        *listed = (kvc_listed){change->listed->positions, change->listed->num, stride};
        own.listed = listed;
    }
    for (int32_t i = 0; i < cache->num_layers; i++) {
        if (cache->group_of[i] != group) continue;
        if (cache->ropes.of_layer[i] >= 0) own.adds_delta = 1;
        if (cache->layers[i].rope.kind == KVC_ROPE_FUNCTION) own.applies_delta = 1;
    }
    if (own.adds_delta && own.divisor) own.applies_delta = 1;
    if (own.applies_delta) own.copies = copies_every_row;
    return own;
}

static void visit_replaced(const kvc_need *need, int32_t g, kvc_part_fn *visit, void *context) {
    const kvc_rewrites *rewrites = need->context;
    kvc_rewrite_visit_replaced(&rewrites->of_group[g], visit, context);
}

/* Checks the capacity, where rows are copied. */
static kvc_status check_slots(const kvc_need *need, int32_t g) {
    const kvc_rewrites *rewrites = need->context;
    return rewrites->of_group[g].num_copied ? kvc_rewrites_check(need, g, /* staying */ 0) : KVC_OK;
}

/* Copies rows to their new slots on the copiers, perhaps by the caller's function, without the mutex. */
static kvc_status copy_unlocked(kvc_cache *cache, kvc_sequence *sequence, kvc_rewrites *rewrites) {
    kvc_status status = KVC_OK;
    sequence->call.is_rewriting = 1;
    sequence->call.thread = kvc_thread_self();
    sequence->call.rewrites = rewrites;
    cache->waiting.num_rewrites++;
    kvc_unlock(cache, KVC_OK);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++)
        status = kvc_rewrite_copy(cache, g, &rewrites->of_group[g], &rewrites->copiers);
    kvc_lock(cache);
    cache->waiting.num_rewrites--;
    kvc_wake_waiter(cache);
    sequence->call.is_rewriting = 0;
    return status;
}

/* Copies the rows that are to be copied, and makes room for them.  A failed call evicts nothing.  So if the caller's
 * function may fail, room is only checked before, and made after the copies. */
static kvc_status copy_rows(kvc_cache *cache, kvc_sequence *sequence, kvc_rewrites *rewrites) {
    const kvc_need need = {.cache = cache,
                           .check_slots = check_slots,
                           .visit_replaced = visit_replaced,
                           .context = rewrites,
                           .what = "rewriting the keys of a sequence"};
    kvc_copiers *copiers = &rewrites->copiers;
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (rewrites->of_group[g].num_copies) kvc_rewrite_size_copiers(cache, g, &rewrites->of_group[g], copiers);
    if (!copiers->floats) return KVC_OK;
    const int asks_caller = copiers->least != 0; /* a layer has a KVC_ROPE_FUNCTION */
    kvc_status status = kvc_copiers_new(cache, copiers);
    if (status == KVC_OK) status = asks_caller ? kvc_check_room(&need) : kvc_make_room(&need);
    if (status == KVC_OK) status = copy_unlocked(cache, sequence, rewrites);
    if (status == KVC_OK && asks_caller) status = kvc_make_room(&need);
    kvc_copiers_free(cache, copiers);
    return status;
}

/* Accepts the rewrites, or discards them if status is an error. */
static void finish(kvc_cache *cache, kvc_sequence *sequence, kvc_rewrites *rewrites, kvc_status status) {
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        kvc_run_list *list = &sequence->runs[g];
        if (status != KVC_OK) {
            kvc_rewrite_discard(cache, g, &rewrites->of_group[g]);
            continue;
        }
        const kvc_change change = rewrites->of_group[g].change;
        kvc_rewrite_accept(cache, g, &rewrites->of_group[g]);
        list->lost = lost_after(&change, list->lost);
        list->missing = lost_after(&change, list->missing);
        kvc_rewrite_free(cache, &rewrites->of_group[g]);
    }
}

/* Edits a sequence in all groups of tokens. */
static kvc_status change_groups(kvc_cache *cache, kvc_sequence *sequence, const edit *e) {
    const size_t size = kvc_rewrites_size(cache);
    if (!cache->num_token_groups) return KVC_OK;
    kvc_rewrites *rewrites = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!rewrites) return kvc_fail(KVC_ERR_NOMEM, "out of memory to edit %d layer groups", cache->num_token_groups);
    memset(rewrites, 0, size);
    rewrites->listed = (kvc_listed *)(void *)(rewrites->of_group + cache->num_token_groups);
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        const kvc_change own = change_in(cache, g, &e->change, &rewrites->listed[g]);
        status = kvc_rewrite_make(cache, g, &sequence->runs[g], &own, &rewrites->of_group[g]);
    }
    if (status == KVC_OK) status = copy_rows(cache, sequence, rewrites);
    finish(cache, sequence, rewrites, status);
    kvc_memory_free(&cache->memory, rewrites, size, KVC_MEMORY_SCRATCH, -1);
    return status;
}

/* Edits a sequence, and notes it.  An edit that removes its last token ends the sequence: its rows in cross-attention
 * layers, for example of an image, must not be seen by later tokens under the same id. */
static kvc_status apply(kvc_cache *cache, kvc_sequence *sequence, const edit *e) {
    const int32_t next = kvc_sequence_next(sequence);
    const int may_end =
        !kvc_sequence_is_blank(sequence) && (next > 0 || (e->removes && e->change.begin == 0 && e->change.end > 0));
    const kvc_status status = change_groups(cache, sequence, e);
    if (status != KVC_OK) return status;
    note(sequence, e, next);
    if (may_end && kvc_sequence_next(sequence) == 0)
        kvc_cache_drop(cache, sequence);
    else
        kvc_cache_after_edit(cache, sequence);
    return KVC_OK;
}

/* ---- removing ---------------------------------------------------------------------------------------------------- */

static kvc_status remove_range(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift) {
    kvc_sequence *sequence = kvc_cache_find(cache, seq_id);
    kvc_status status = kvc_check_idle(sequence);
    if (status == KVC_OK) status = kvc_check_not_kept(sequence);
    if (status == KVC_OK && sequence && end >= kvc_sequence_next(sequence))
        status = kvc_check_cut(cache, sequence, begin);
    if (status != KVC_OK || !sequence) return status;
    edit e = {.change = {.begin = begin, .end = end, .moved_end = end}, .removes = 1};
    if (shift && kvc_sequence_last(sequence) >= end) status = check_rope(cache);
    if (status == KVC_OK && begin < end && end < kvc_sequence_next(sequence))
        status = check_blocks(cache, sequence, begin, end, begin - end);
    if (shift && begin < end) { /* where nothing is removed, nothing moves */
        e.change.moved_end = KVC_END;
        e.change.move = begin - end;
    }
    return status == KVC_OK ? apply(cache, sequence, &e) : status;
}

kvc_status kvc_remove(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift) {
    kvc_status status = kvc_check_positions(begin, end);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    do status = remove_range(cache, seq_id, begin, end, shift);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    return kvc_unlock(cache, status);
}

kvc_status kvc_truncate(kvc_cache *cache, int64_t seq_id, int32_t length) {
    kvc_status status = kvc_check_position(length, "length");
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    do status = remove_range(cache, seq_id, length, KVC_END, /* shift */ 0);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    return kvc_unlock(cache, status);
}

/* ---- keeping a list of positions --------------------------------------------------------------------------------- */

static kvc_status check_listed(const int32_t *positions, int64_t num_positions) {
    if (num_positions < 0)
        return kvc_fail(KVC_ERR_INVALID, "num_positions is %lld: it must not be negative", (long long)num_positions);
    if (!positions && num_positions)
        return kvc_fail(KVC_ERR_INVALID, "positions is NULL: num_positions is %lld", (long long)num_positions);
    for (int64_t i = 0; i < num_positions; i++) {
        if (positions[i] < 0 || positions[i] == KVC_END)
            return kvc_fail(KVC_ERR_INVALID, "positions[%lld] is %d: a position is from 0 to %d", (long long)i,
                            positions[i], KVC_END - 1);
        if (i && positions[i] <= positions[i - 1])
            return kvc_fail(KVC_ERR_INVALID, "positions[%lld] is %d, behind %d: positions must ascend, without repeats",
                            (long long)i, positions[i], positions[i - 1]);
    }
    return KVC_OK;
}

/* A search for the last listed position that runs have. */
typedef struct listed_end {
    kvc_listed listed;
    int64_t next;
    int32_t end;
} listed_end;

static void find_listed_end(void *context, const kvc_run *run) {
    listed_end *found = context;
    kvc_run rest = *run;
    for (kvc_run part; (part = kvc_listed_next(&found->listed, &found->next, &rest)).count;) {
        const int32_t last = kvc_position_of(part.position + part.count - 1, found->listed.stride);
        if (last >= found->end) found->end = last + 1;
    }
}

/* Searches lost, or missing, positions as if they were a run. */
static void find_listed_lost(listed_end *found, kvc_interval lost) {
    find_listed_end(found, &(kvc_run){.position = lost.begin, .count = lost.end - lost.begin});
}

/* Returns a list without its last positions that have no row and have not expired. */
static kvc_listed without_unknown(const kvc_cache *cache, const kvc_sequence *sequence, const kvc_listed *listed) {
    listed_end found = {.listed = *listed};
    kvc_listed known = *listed;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        found.listed.stride = cache->pools[g].stride;
        kvc_runs_visit(&sequence->runs[g], 0, KVC_END, find_listed_end, &found);
        find_listed_lost(&found, sequence->runs[g].lost);
        find_listed_lost(&found, sequence->runs[g].missing);
    }
    while (end_of(&known) > found.end) known.num--;
    return known;
}

/* Lowers *first to the first position of a part. */
static void find_first(void *context, const kvc_run *part) {
    int32_t *first = context;
    *first = kvc_lower(*first, kvc_position_of(part->position, part->block->pool->stride));
}

/* Returns the first position of rows that are not listed, or of what is cut off behind all listed positions; INT32_MAX
 * if everything stays. */
static int32_t first_dropped(const kvc_cache *cache, const kvc_sequence *sequence, const kvc_listed *listed) {
    int32_t first = listed->num ? kvc_below(end_of(listed), kvc_sequence_next(sequence)) : 0;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_listed own = {listed->positions, listed->num, cache->pools[g].stride};
        kvc_runs_visit_unlisted(&sequence->runs[g], 0, KVC_END, &own, find_first, &first);
    }
    return first;
}

static kvc_status keep_listed(kvc_cache *cache, int64_t seq_id, const kvc_listed *listed) {
    kvc_sequence *sequence = kvc_cache_find(cache, seq_id);
    KVC_TRY(kvc_check_idle(sequence));
    KVC_TRY(kvc_check_not_kept(sequence));
    if (!sequence) return KVC_OK;
    const kvc_listed stays = without_unknown(cache, sequence, listed);
    KVC_TRY(kvc_check_cut(cache, sequence, end_of(&stays)));
    const int32_t first = first_dropped(cache, sequence, &stays);
    const edit e = {.change = {.begin = first, .end = KVC_END, .moved_end = KVC_END, .listed = &stays}, .removes = 1};
    return first < INT32_MAX ? apply(cache, sequence, &e) : KVC_OK;
}

kvc_status kvc_keep_positions(kvc_cache *cache, int64_t seq_id, const int32_t *positions, int64_t num_positions) {
    const kvc_listed listed = {positions, num_positions, 1};
    KVC_TRY(check_listed(positions, num_positions));
    kvc_lock(cache);
    return kvc_unlock(cache, keep_listed(cache, seq_id, &listed));
}

/* ---- moving ------------------------------------------------------------------------------------------------------ */

/* Raises *last to the last position of a part. */
static void find_last(void *context, const kvc_run *part) {
    int32_t *last = context;
    const int32_t position = kvc_position_of(part->position + part->count - 1, part->block->pool->stride);
    if (position > *last) *last = position;
}

/* Returns KVC_ERR_INVALID if rows would move past the largest position. */
static kvc_status check_target(const kvc_cache *cache, const kvc_sequence *sequence, int32_t begin, int32_t end,
                               int32_t delta) {
    int32_t last = -1;
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        kvc_runs_visit(&sequence->runs[g], kvc_rows_below(begin, cache->pools[g].stride),
                       kvc_rows_below(end, cache->pools[g].stride), find_last, &last);
    if (last < 0 || (int64_t)last + delta < INT32_MAX) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "delta is %d: position %d would pass the largest, %d", delta, last, INT32_MAX - 1);
}

static kvc_status move_range(kvc_cache *cache, int64_t seq_id, const edit *e) {
    kvc_sequence *sequence = kvc_cache_find(cache, seq_id);
    kvc_status status = sequence && kvc_sequence_next(sequence) ? check_rope(cache) : KVC_OK;
    if (status == KVC_OK) status = kvc_check_idle(sequence);
    if (status == KVC_OK) status = kvc_check_not_kept(sequence);
    if (status == KVC_OK && sequence && e->change.move > 0)
        status = check_target(cache, sequence, e->change.begin, e->change.moved_end, e->change.move);
    const int stays = e->change.divisor ? e->change.divisor == 1 : e->change.move == 0;
    if (status != KVC_OK || !sequence || stays) return status;
    if (e->change.divisor && cache->num_strided)
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "divisor is %d: a layer has a stride, and its rows stand for positions that would become fewer",
                        e->change.divisor);
    KVC_TRY(check_blocks(cache, sequence, e->change.begin, e->change.moved_end, e->change.move));
    return apply(cache, sequence, e);
}

kvc_status kvc_shift(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t delta) {
    kvc_status status = kvc_check_positions(begin, end);
    if (status != KVC_OK) return status;
    edit e = {.change = {.begin = begin, .end = begin, .moved_end = end, .move = delta}}; /* end: removes none */
    if (begin + (int64_t)delta < 0) /* rows that would come below position 0 are removed */
        e.change.end = -(int64_t)delta < end ? -delta : end;
    kvc_lock(cache);
    do status = move_range(cache, seq_id, &e);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    return kvc_unlock(cache, status);
}

kvc_status kvc_divide(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t divisor) {
    kvc_status status = kvc_check_positions(begin, end);
    if (status != KVC_OK) return status;
    if (divisor < 1) return kvc_fail(KVC_ERR_INVALID, "divisor is %d: it must be at least 1", divisor);
    const edit e = {.change = {.begin = begin, .end = begin, .moved_end = end, .divisor = divisor}}; /* removes none */
    kvc_lock(cache);
    do status = move_range(cache, seq_id, &e);
    while (status == KVC_ERR_FULL && kvc_cache_wait_copies(cache));
    return kvc_unlock(cache, status);
}

/* ---- exactness --------------------------------------------------------------------------------------------------- */

kvc_status kvc_mark_inexact(kvc_cache *cache, int64_t seq_id, int32_t position) {
    KVC_TRY(kvc_check_position(position, "position"));
    kvc_lock(cache);
    kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    if (sequence) sequence->exact_to = kvc_lower(sequence->exact_to, position);
    return kvc_unlock(cache, KVC_OK);
}

/* ---- clearing ---------------------------------------------------------------------------------------------------- */

enum { AT_ONCE = KVC_SIZE(16, 2) }; /* hidden sequences that are dropped before others get the mutex */

/* Drops every sequence except one, `except` (NULL: none).  Sequences that calls can name are dropped at once, the
 * blocks of prefixes bit by bit.  If a sequence is busy, returns KVC_ERR_BUSY and drops none. */
static kvc_status clear_all_but(kvc_cache *cache, const kvc_sequence *except) {
    const kvc_table *table = &cache->sequences;
    const kvc_sorted *hidden = &table->hidden;
    for (const kvc_sequence *sequence = kvc_table_first(table); sequence && !sequence->is_hidden;
         sequence = kvc_table_next(table, sequence))
        if (sequence != except) KVC_TRY(kvc_check_idle(sequence));
    const int64_t first_new = cache->sequences.next_hidden_id; /* blocks that others keep meanwhile stay */
    for (kvc_sequence *sequence, *next = kvc_sequence_end(&table->named, KVC_BY_ID, KVC_LOW); (sequence = next);) {
        next = kvc_sequence_beside(sequence, KVC_BY_ID, KVC_HIGH);
        if (sequence != except) kvc_cache_drop(cache, sequence);
    }
    kvc_sequence *first;
    for (int i = 1; (first = kvc_sequence_end(hidden, KVC_BY_ID, KVC_LOW)) && first->id < first_new; i++) {
        kvc_cache_drop(cache, first);
        if (i % AT_ONCE == 0) kvc_cache_give_way(cache);
    }
    return KVC_OK;
}

/* Drops every sequence, except the one with this id (NULL: no exception). */
static kvc_status clear_all(kvc_cache *cache, const int64_t *except_id) {
    kvc_lock(cache);
    kvc_cache_begin_gradual(cache);
    kvc_cache_find_all(cache);
    const kvc_status status = clear_all_but(cache, except_id ? kvc_table_find(&cache->sequences, *except_id) : NULL);
    kvc_cache_end_gradual(cache);
    return kvc_unlock(cache, status);
}

kvc_status kvc_clear(kvc_cache *cache) { return clear_all(cache, /* except_id */ NULL); }

kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id) { return clear_all(cache, &seq_id); }

kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id) {
    kvc_lock(cache);
    kvc_sequence *sequence = kvc_cache_find(cache, seq_id);
    const kvc_status status = kvc_check_idle(sequence);
    if (status == KVC_OK && sequence) kvc_cache_drop(cache, sequence);
    return kvc_unlock(cache, status);
}
