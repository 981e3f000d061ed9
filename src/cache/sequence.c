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
                               .num_groups = num_groups,
                               .num_token_groups = num_token_groups};
    for (int32_t g = 0; g < num_groups; g++) kvc_runs_init(&sequence->runs[g]);
    return sequence;
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

/* ---- the table of sequences -------------------------------------------------------------------------------------- */

/* Returns the rank of an id: a sequence stands above those of lower rank in its tree, so that trees of any ids are
 * about as flat as random ones. */
static uint64_t rank_of(const kvc_sequence *sequence) {
    uint64_t x = (uint64_t)sequence->id + 0x9e3779b97f4a7c15u; /* SplitMix64 */
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static kvc_sequence *find(kvc_sequence *sequence, int64_t id) {
    while (sequence && sequence->id != id) sequence = sequence->below[id > sequence->id];
    return sequence;
}

kvc_sequence *kvc_table_find(const kvc_table *table, int64_t id) { return find(table->roots[0], id); }

kvc_sequence *kvc_table_find_hidden(const kvc_table *table, int64_t id) { return find(table->roots[1], id); }

/* Moves a sequence to the place of the one above it, which becomes one below it. */
static void rotate_up(kvc_sequence **root, kvc_sequence *sequence) {
    kvc_sequence *above = sequence->above, *top = above->above;
    const int side = above->below[1] == sequence;
    kvc_sequence *between = sequence->below[!side];
    above->below[side] = between;
    if (between) between->above = above;
    sequence->below[!side] = above;
    above->above = sequence;
    sequence->above = top;
    *(top ? &top->below[top->below[1] == above] : root) = sequence;
}

void kvc_table_insert(kvc_table *table, kvc_sequence *sequence) {
    kvc_sequence **root = &table->roots[sequence->is_hidden], **at = root;
    sequence->above = sequence->below[0] = sequence->below[1] = NULL;
    while (*at) {
        sequence->above = *at;
        at = &(*at)->below[sequence->id > (*at)->id];
    }
    *at = sequence;
    while (sequence->above && rank_of(sequence->above) < rank_of(sequence)) rotate_up(root, sequence);
    table->nums[sequence->is_hidden]++;
}

void kvc_table_remove(kvc_table *table, kvc_sequence *sequence) {
    kvc_sequence **root = &table->roots[sequence->is_hidden], **below = sequence->below;
    while (below[0] && below[1]) rotate_up(root, below[rank_of(below[1]) > rank_of(below[0])]);
    kvc_sequence *above = sequence->above, *rest = below[below[1] != NULL];
    *(above ? &above->below[above->below[1] == sequence] : root) = rest;
    if (rest) rest->above = above;
    table->nums[sequence->is_hidden]--;
}

/* Returns the first (side 0), or the last (side 1), of a tree; NULL if it is empty. */
static kvc_sequence *end_of(kvc_sequence *root, int side) {
    while (root && root->below[side]) root = root->below[side];
    return root;
}

/* Returns the next sequence of the tree on one side, 1 behind, 0 before; NULL if there is none. */
static kvc_sequence *beside(const kvc_sequence *sequence, int side) {
    if (sequence->below[side]) return end_of(sequence->below[side], !side);
    while (sequence->above && sequence->above->below[side] == sequence) sequence = sequence->above;
    return sequence->above;
}

kvc_sequence *kvc_table_first(const kvc_table *table) {
    kvc_sequence *first = end_of(table->roots[0], 0);
    return first ? first : end_of(table->roots[1], 0);
}

kvc_sequence *kvc_table_next(const kvc_table *table, const kvc_sequence *sequence) {
    kvc_sequence *next = beside(sequence, 1);
    return next || sequence->is_hidden ? next : end_of(table->roots[1], 0);
}

kvc_sequence *kvc_table_last(const kvc_table *table) {
    kvc_sequence *last = end_of(table->roots[1], 1);
    return last ? last : end_of(table->roots[0], 1);
}

kvc_sequence *kvc_table_before(const kvc_table *table, const kvc_sequence *sequence) {
    kvc_sequence *before = beside(sequence, 0);
    return before || !sequence->is_hidden ? before : end_of(table->roots[0], 1);
}
