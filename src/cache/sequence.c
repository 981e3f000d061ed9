/* sequence.c: a sequence, and the table of all sequences.
 *
 * Exact rows follow from the sequence's tokens alone: those below position exact_to.  Rows from edited_from on were
 * changed or dropped since it was last set to INT32_MAX.  In a group with a stride, lists have numbers of rows in place
 * of positions (rows/stride.h).  Expired rows are lost; missing ones are rows that other groups have.  Hidden sequences
 * have ids that no call can name, and come behind the others.
 *
 * kvc_sequence.links has a place in a tree for each key: KVC_BY_ID in the table, and KVC_BY_USE among the evictable
 * sequences or among the fixed ones, which hold rows and are not evictable. */
#include "cache/sequence.h"

#include "base/status.h"
#include "cache/useful.h"
#include "rows/stride.h"

static size_t sequence_bytes(int32_t num_groups, int32_t num_token_groups) {
    return sizeof(kvc_sequence) + (size_t)num_groups * sizeof(kvc_run_list) +
           ((size_t)num_token_groups + 1) * sizeof(kvc_standing);
}

kvc_sequence *kvc_sequence_new(const kvc_pool *pools, int64_t id, int32_t num_groups, int32_t num_token_groups) {
    const size_t size = sequence_bytes(num_groups, num_token_groups);
    kvc_sequence *sequence = kvc_memory_alloc(pools->memory, size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!sequence) return NULL;
    *sequence = (kvc_sequence){.id = id,
                               .exact_to = INT32_MAX,
                               .edited_from = INT32_MAX,
                               .date = INT64_MAX,
                               .num_groups = num_groups,
                               .num_token_groups = num_token_groups,
                               .pools = pools};
    for (int32_t g = 0; g < num_groups; g++) kvc_runs_init(&sequence->runs[g]);
    sequence->evicting.standings = (kvc_standing *)(void *)(sequence->runs + num_groups);
    for (int32_t g = 0; g <= num_token_groups; g++) sequence->evicting.standings[g] = (kvc_standing){0};
    return sequence;
}

kvc_status kvc_fail_sequence(int64_t id) {
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for sequence %lld", (long long)id);
}

void kvc_sequence_free(kvc_sequence *sequence, kvc_memory *memory, kvc_pool *pools) {
    for (int32_t g = 0; g < sequence->num_groups; g++) kvc_runs_destroy(&sequence->runs[g], &pools[g]);
    kvc_memory_free(memory, sequence, sequence_bytes(sequence->num_groups, sequence->num_token_groups),
                    KVC_MEMORY_BOOKKEEPING, -1);
}

int kvc_sequence_is_blank(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_groups; g++)
        if (sequence->runs[g].num || sequence->runs[g].lost.end) return 0;
    return 1;
}

int kvc_sequence_holds(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_groups; g++)
        if (sequence->runs[g].num) return 1;
    return 0;
}

int kvc_sequence_is_empty(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        if (sequence->runs[g].num) return 0;
    return 1;
}

int32_t kvc_sequence_first(const kvc_sequence *sequence) {
    int32_t first = -1;
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        if (!sequence->runs[g].num) continue;
        const int32_t position = kvc_position_of(sequence->runs[g].min_position, sequence->pools[g].stride);
        if (first < 0 || position < first) first = position;
    }
    return first;
}

int32_t kvc_sequence_last(const kvc_sequence *sequence) {
    int32_t last = -1;
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const int32_t position = kvc_position_of(sequence->runs[g].max_position, sequence->pools[g].stride);
        if (position > last) last = position;
    }
    return last;
}

int32_t kvc_sequence_next(const kvc_sequence *sequence) {
    int32_t next = 0;
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const kvc_run_list *list = &sequence->runs[g];
        const int32_t rows = list->lost.end > list->max_position ? list->lost.end : list->max_position + 1;
        if (rows * sequence->pools[g].stride > next) next = rows * sequence->pools[g].stride;
    }
    return next;
}

/* Returns the larger of `found` and the end of the part of [from, to) that lies below `end`. */
static int32_t reach(int32_t found, int32_t from, int32_t to, int32_t end) {
    to = kvc_lower(to, end);
    return from < end && to > found ? to : found;
}

/* Returns the position behind the last row of a list below `end`; rows that have expired, or that it lacks, count. */
static int32_t end_below(const kvc_run_list *list, int32_t end) {
    int32_t found = reach(0, list->lost.begin, list->lost.end, end);
    found = reach(found, list->missing.begin, list->missing.end, end);
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        found = reach(found, run->position, run->position + run->count, end);
    return found;
}

int32_t kvc_sequence_num_exact(const kvc_sequence *sequence) {
    const int32_t next = kvc_sequence_next(sequence);
    int32_t num = sequence->exact_to;
    if (num >= next) return next;
    /* Groups with a stride do not count: they lack rows of the last tokens. */
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        if (sequence->pools[g].stride == 1) num = end_below(&sequence->runs[g], num);
    return num;
}

int32_t kvc_min_query_position(const kvc_sequence *sequence) {
    int32_t low = kvc_sequence_next(sequence);
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const kvc_interval missing = sequence->runs[g].missing;
        if (missing.end) low = kvc_lower(low, missing.begin * sequence->pools[g].stride);
    }
    return low;
}

void kvc_sequence_note_source(kvc_sequence *sequence, const kvc_sequence *source) {
    if (source->date < sequence->date) sequence->date = source->date;
    if (!sequence->from)
        sequence->from = source->from;
    else if (source->from && source->from != sequence->from)
        sequence->from = -1;
}

void kvc_sequence_note_edit(kvc_sequence *sequence, int32_t position, int32_t exact_to) {
    sequence->edited_from = kvc_lower(sequence->edited_from, position);
    sequence->exact_to = kvc_lower(sequence->exact_to, exact_to);
}

void kvc_sequence_note_cut(kvc_sequence *sequence, int32_t length, int32_t next_before) {
    /* No inexact row is left.  A mark behind all rows (kvc_mark_inexact) is of rows to come, and stays. */
    if (sequence->exact_to >= kvc_sequence_next(sequence) && sequence->exact_to < next_before)
        sequence->exact_to = INT32_MAX;
    kvc_sequence_note_edit(sequence, length, INT32_MAX);
}

/* ---- sorted sequences, and the table of all ---------------------------------------------------------------------- */

/* Returns the sequence whose links[by] these are; NULL if they are NULL. */
static kvc_sequence *at(kvc_links *links, kvc_key by) { return links ? (void *)(links - by) : NULL; }

static const kvc_sequence *seen_at(const kvc_links *links, kvc_key by) { return (const void *)(links - by); }

static int is_used_later(const kvc_links *member, const kvc_links *other) {
    return seen_at(member, KVC_BY_USE)->evicting.used > seen_at(other, KVC_BY_USE)->evicting.used;
}

static int has_higher_id(const kvc_links *member, const kvc_links *other) {
    return seen_at(member, KVC_BY_ID)->id > seen_at(other, KVC_BY_ID)->id;
}

void kvc_sequence_sort(kvc_sorted *sorted, kvc_sequence *sequence, kvc_key by) {
    kvc_sorted_add(sorted, &sequence->links[by], by == KVC_BY_USE ? is_used_later : has_higher_id);
}

kvc_sequence *kvc_sequence_end(const kvc_sorted *sorted, kvc_key by, int side) {
    return at(kvc_sorted_end(sorted, side), by);
}

kvc_sequence *kvc_sequence_beside(const kvc_sequence *sequence, kvc_key by, int side) {
    return at(kvc_sorted_beside(&sequence->links[by], side), by);
}

static kvc_sequence *find(const kvc_sorted *sorted, int64_t id) {
    for (kvc_links *links = sorted->root; links;) {
        kvc_sequence *sequence = (void *)(links - KVC_BY_ID);
        if (sequence->id == id) return sequence;
        links = links->below[id > sequence->id];
    }
    return NULL;
}

kvc_sequence *kvc_table_find(const kvc_table *table, int64_t id) { return find(&table->named, id); }

kvc_sequence *kvc_table_find_hidden(const kvc_table *table, int64_t id) { return find(&table->hidden, id); }

static kvc_sorted *set_of(kvc_table *table, const kvc_sequence *sequence) {
    return sequence->is_hidden ? &table->hidden : &table->named;
}

void kvc_table_insert(kvc_table *table, kvc_sequence *sequence) {
    kvc_sequence_sort(set_of(table, sequence), sequence, KVC_BY_ID);
}

void kvc_table_remove(kvc_table *table, kvc_sequence *sequence) {
    kvc_sorted_remove(set_of(table, sequence), &sequence->links[KVC_BY_ID]);
    kvc_table_list(table, sequence, /* is_fixed */ 0);
}

/* Returns whether a sequence comes behind another in the table: hidden ones behind the others. */
static int comes_later(const kvc_links *member, const kvc_links *other) {
    const kvc_sequence *a = seen_at(member, KVC_BY_USE), *b = seen_at(other, KVC_BY_USE);
    return a->is_hidden == b->is_hidden ? a->id > b->id : a->is_hidden;
}

void kvc_table_list(kvc_table *table, kvc_sequence *sequence, int32_t is_fixed) {
    if (sequence->evicting.is_fixed == is_fixed) return;
    sequence->evicting.is_fixed = is_fixed;
    if (is_fixed)
        kvc_sorted_add(&table->fixed, &sequence->links[KVC_BY_USE], comes_later);
    else
        kvc_sorted_remove(&table->fixed, &sequence->links[KVC_BY_USE]);
}

kvc_sequence *kvc_table_first_fixed(const kvc_table *table) {
    return kvc_sequence_end(&table->fixed, KVC_BY_USE, KVC_LOW);
}

kvc_sequence *kvc_table_next_fixed(const kvc_sequence *sequence) {
    return kvc_sequence_beside(sequence, KVC_BY_USE, KVC_HIGH);
}

kvc_sequence *kvc_table_first(const kvc_table *table) {
    kvc_sequence *first = kvc_sequence_end(&table->named, KVC_BY_ID, KVC_LOW);
    return first ? first : kvc_sequence_end(&table->hidden, KVC_BY_ID, KVC_LOW);
}

kvc_sequence *kvc_table_next(const kvc_table *table, const kvc_sequence *sequence) {
    kvc_sequence *next = kvc_sequence_beside(sequence, KVC_BY_ID, KVC_HIGH);
    return next || sequence->is_hidden ? next : kvc_sequence_end(&table->hidden, KVC_BY_ID, KVC_LOW);
}

kvc_sequence *kvc_table_last(const kvc_table *table) {
    kvc_sequence *last = kvc_sequence_end(&table->hidden, KVC_BY_ID, KVC_HIGH);
    return last ? last : kvc_sequence_end(&table->named, KVC_BY_ID, KVC_HIGH);
}

kvc_sequence *kvc_table_before(const kvc_table *table, const kvc_sequence *sequence) {
    kvc_sequence *before = kvc_sequence_beside(sequence, KVC_BY_ID, KVC_LOW);
    return before || !sequence->is_hidden ? before : kvc_sequence_end(&table->named, KVC_BY_ID, KVC_HIGH);
}
