/* sequence.c: a sequence, and the table of all sequences: see sequence.h. */
#include "cache/sequence.h"

#include "base/status.h"

static size_t sequence_bytes(int32_t num_groups) {
    return sizeof(kvc_sequence) + (size_t)num_groups * sizeof(kvc_run_list);
}

kvc_sequence *kvc_sequence_new(kvc_memory *memory, int64_t id, int32_t num_groups, int32_t num_token_groups) {
    kvc_sequence *sequence = kvc_memory_alloc(memory, sequence_bytes(num_groups), KVC_MEMORY_BOOKKEEPING, -1);
    if (!sequence) return NULL;
    *sequence = (kvc_sequence){.id = id,
                               .exact_to = INT32_MAX,
                               .edited_from = INT32_MAX,
                               .origin = {.num_forgets = INT64_MAX},
                               .num_groups = num_groups,
                               .num_token_groups = num_token_groups};
    for (int32_t g = 0; g < num_groups; g++) kvc_runs_init(&sequence->runs[g]);
    return sequence;
}

void kvc_origin_add(kvc_origin *origin, const kvc_origin *more) {
    const int64_t none = INT64_MAX;
    origin->forgotten_in |= more->forgotten_in;
    if (origin->num_forgets == none)
        origin->prefix = more->prefix;
    else if (more->num_forgets < none && more->prefix != origin->prefix)
        origin->prefix = 0;
    if (more->num_forgets < origin->num_forgets) origin->num_forgets = more->num_forgets;
}

kvc_status kvc_fail_sequence(int64_t id) {
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for sequence %lld", (long long)id);
}

void kvc_sequence_free(kvc_sequence *sequence, kvc_memory *memory, kvc_pool *pools) {
    for (int32_t g = 0; g < sequence->num_groups; g++) kvc_runs_destroy(&sequence->runs[g], &pools[g]);
    kvc_memory_free(memory, sequence, sequence_bytes(sequence->num_groups), KVC_MEMORY_BOOKKEEPING, -1);
}

int kvc_sequence_is_blank(const kvc_sequence *sequence) {
    for (int32_t g = 0; g < sequence->num_groups; g++)
        if (sequence->runs[g].num || sequence->runs[g].lost.end) return 0;
    return 1;
}

int64_t kvc_sequence_bytes(const kvc_sequence *sequence) {
    int64_t bytes = (int64_t)sequence_bytes(sequence->num_groups);
    for (int32_t g = 0; g < sequence->num_groups; g++) bytes += kvc_runs_bytes(&sequence->runs[g]);
    return bytes;
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
        const int32_t position = sequence->runs[g].min_position;
        if (position >= 0 && (first < 0 || position < first)) first = position;
    }
    return first;
}

int32_t kvc_sequence_last(const kvc_sequence *sequence) {
    int32_t last = -1;
    for (int32_t g = 0; g < sequence->num_token_groups; g++)
        if (sequence->runs[g].max_position > last) last = sequence->runs[g].max_position;
    return last;
}

int32_t kvc_sequence_next(const kvc_sequence *sequence) {
    int32_t next = 0;
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const kvc_run_list *list = &sequence->runs[g];
        if (list->max_position >= next) next = list->max_position + 1;
        if (list->lost.end > next) next = list->lost.end;
    }
    return next;
}

int32_t kvc_min_query_position(const kvc_sequence *sequence) {
    int32_t low = kvc_sequence_next(sequence);
    for (int32_t g = 0; g < sequence->num_token_groups; g++) {
        const kvc_interval missing = sequence->runs[g].missing;
        if (missing.end && missing.begin < low) low = missing.begin;
    }
    return low;
}

void kvc_sequence_note_edit(kvc_sequence *sequence, int32_t position, int32_t exact_to) {
    sequence->edited_from = kvc_lower(sequence->edited_from, position);
    sequence->exact_to = kvc_lower(sequence->exact_to, exact_to);
}

void kvc_sequence_note_cut(kvc_sequence *sequence, int32_t length, int32_t next_before) {
    /* A mark behind all rows (kvc_mark_inexact) is of rows to come, and stays. */
    if (sequence->exact_to >= length && sequence->exact_to < next_before) sequence->exact_to = INT32_MAX;
    kvc_sequence_note_edit(sequence, length, INT32_MAX);
}

/* ---- sorted sequences -------------------------------------------------------------------------------------------- */

static int64_t key_of(const kvc_sequence *sequence, kvc_key by) {
    return by == KVC_BY_USE ? sequence->used : sequence->id;
}

/* Returns the rank of a sequence.  A sequence stands above sequences of lower rank in its tree, which makes the tree
 * about as flat as a random one, whatever the keys are. */
static uint64_t rank_of(const kvc_sequence *sequence, kvc_key by) {
    uint64_t x = (uint64_t)key_of(sequence, by) + 0x9e3779b97f4a7c15u; /* SplitMix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Moves a sequence to the place of the one above it, which becomes one below it. */
static void rotate_up(kvc_sorted *sorted, kvc_sequence *sequence) {
    const kvc_key by = sorted->by;
    kvc_links *links = &sequence->links[by];
    kvc_sequence *above = links->above, *top = above->links[by].above;
    const int side = above->links[by].below[1] == sequence;
    kvc_sequence *between = links->below[!side];
    above->links[by].below[side] = between;
    if (between) between->links[by].above = above;
    links->below[!side] = above;
    above->links[by].above = sequence;
    links->above = top;
    *(top ? &top->links[by].below[top->links[by].below[1] == above] : &sorted->root) = sequence;
}

void kvc_sorted_insert(kvc_sorted *sorted, kvc_sequence *sequence) {
    const kvc_key by = sorted->by;
    kvc_links *links = &sequence->links[by];
    kvc_sequence **at = &sorted->root;
    *links = (kvc_links){NULL, {NULL, NULL}};
    while (*at) {
        links->above = *at;
        at = &(*at)->links[by].below[key_of(sequence, by) > key_of(*at, by)];
    }
    *at = sequence;
    while (links->above && rank_of(links->above, by) < rank_of(sequence, by)) rotate_up(sorted, sequence);
    sorted->num++;
}

void kvc_sorted_remove(kvc_sorted *sorted, kvc_sequence *sequence) {
    const kvc_key by = sorted->by;
    kvc_links *links = &sequence->links[by];
    kvc_sequence **below = links->below;
    while (below[0] && below[1]) rotate_up(sorted, below[rank_of(below[1], by) > rank_of(below[0], by)]);
    kvc_sequence *above = links->above, *rest = below[below[1] != NULL];
    *(above ? &above->links[by].below[above->links[by].below[1] == sequence] : &sorted->root) = rest;
    if (rest) rest->links[by].above = above;
    sorted->num--;
}

/* Returns the first (side 0), or the last (side 1), of those below and at a sequence; NULL if that is NULL. */
static kvc_sequence *end_of(kvc_sequence *sequence, kvc_key by, int side) {
    while (sequence && sequence->links[by].below[side]) sequence = sequence->links[by].below[side];
    return sequence;
}

/* Returns the next sequence by falling key (side 0) or rising key (side 1); NULL at the end. */
static kvc_sequence *beside(const kvc_sequence *sequence, kvc_key by, int side) {
    const kvc_links *links = &sequence->links[by];
    if (links->below[side]) return end_of(links->below[side], by, !side);
    for (; links->above && links->above->links[by].below[side] == sequence; links = &sequence->links[by])
        sequence = links->above;
    return links->above;
}

kvc_sequence *kvc_sorted_first(const kvc_sorted *sorted) { return end_of(sorted->root, sorted->by, 0); }

kvc_sequence *kvc_sorted_next(const kvc_sorted *sorted, const kvc_sequence *sequence) {
    return beside(sequence, sorted->by, 1);
}

/* ---- the table of sequences -------------------------------------------------------------------------------------- */

static kvc_sequence *find(kvc_sequence *sequence, int64_t id) {
    while (sequence && sequence->id != id) sequence = sequence->links[KVC_BY_ID].below[id > sequence->id];
    return sequence;
}

kvc_sequence *kvc_table_find(const kvc_table *table, int64_t id) { return find(table->named.root, id); }

kvc_sequence *kvc_table_find_hidden(const kvc_table *table, int64_t id) { return find(table->hidden.root, id); }

void kvc_table_insert(kvc_table *table, kvc_sequence *sequence) {
    kvc_sorted_insert(sequence->is_hidden ? &table->hidden : &table->named, sequence);
}

void kvc_table_remove(kvc_table *table, kvc_sequence *sequence) {
    kvc_sorted_remove(sequence->is_hidden ? &table->hidden : &table->named, sequence);
}

kvc_sequence *kvc_table_first(const kvc_table *table) {
    kvc_sequence *first = kvc_sorted_first(&table->named);
    return first ? first : kvc_sorted_first(&table->hidden);
}

kvc_sequence *kvc_table_next(const kvc_table *table, const kvc_sequence *sequence) {
    kvc_sequence *next = beside(sequence, KVC_BY_ID, 1);
    return next || sequence->is_hidden ? next : kvc_sorted_first(&table->hidden);
}

kvc_sequence *kvc_table_last(const kvc_table *table) {
    kvc_sequence *last = end_of(table->hidden.root, KVC_BY_ID, 1);
    return last ? last : end_of(table->named.root, KVC_BY_ID, 1);
}

kvc_sequence *kvc_table_before(const kvc_table *table, const kvc_sequence *sequence) {
    kvc_sequence *before = beside(sequence, KVC_BY_ID, 0);
    return before || !sequence->is_hidden ? before : end_of(table->named.root, KVC_BY_ID, 1);
}
