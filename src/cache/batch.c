/* batch.c: makes a batch.  Tokens with parents form trees: a token attends to its ancestors in the batch.  batch->order
 * lists the tokens by sequence.  In a group with a stride of n, only each n-th position has a row.  batch->strided
 * lists the tokens with a row for each such group, a sequence's from member->first on. */
#include "cache/batch.h"

#include <string.h>

/* Numbers the tokens depth first.  Parents come before their children, so no stack is needed.  A pass backwards adds
 * up the sizes of subtrees.  A pass forwards gives each token the first free number of its parent's subtree.
 * next_child: [num_tokens] the number that a token's next child gets. */
static void number_trees(kvc_batch *batch, int32_t *next_child) {
    const int32_t *parents = batch->parents, n = batch->num_tokens;
    int32_t *number = batch->tree_number, *size = batch->subtree_size, next_root = 0;
    for (int32_t t = 0; t < n; t++) size[t] = 1;
    for (int32_t t = n - 1; t >= 0; t--)
        if (parents[t] >= 0) size[parents[t]] += size[t];
    for (int32_t t = 0; t < n; t++) {
        int32_t *next = parents[t] < 0 ? &next_root : &next_child[parents[t]];
        number[t] = *next;
        next_child[t] = number[t] + 1;
        *next += size[t];
    }
}

/* The arrays of a batch, in the order in which they lie behind its struct; next_child is scratch of number_trees. */
enum {
    BATCH_POSITIONS,
    BATCH_PARENTS,
    BATCH_TREE_NUMBER,
    BATCH_SUBTREE_SIZE,
    BATCH_NEXT_CHILD,
    BATCH_SEQUENCE_OF,
    BATCH_ORDER,
    BATCH_STRIDED,
    BATCH_SEQUENCES,
    BATCH_PLACES,
    BATCH_PENDING,
    BATCH_RUNS,
    BATCH_COMMITTED,
    BATCH_SELECTED,
    BATCH_GROUP_FLAGS,
    BATCH_WRITTEN,
    BATCH_CROSS_PUTS,
    NUM_BATCH_ARRAYS
};

kvc_batch *kvc_batch_new(kvc_cache *cache, int32_t num_tokens, const int32_t *given_parents) {
    const uint64_t n = (uint64_t)num_tokens, groups = (uint64_t)cache->num_groups;
    const uint64_t tree = given_parents ? n * sizeof(int32_t) : 0;
    const int32_t num_cross = cache->num_groups - cache->num_token_groups;
    const uint64_t num_strided = (uint64_t)cache->num_strided;
    uint64_t size = sizeof(kvc_batch);
    uint64_t at[NUM_BATCH_ARRAYS] = {[BATCH_POSITIONS] = n * sizeof(int32_t),
                                     [BATCH_PARENTS] = tree,
                                     [BATCH_TREE_NUMBER] = tree,
                                     [BATCH_SUBTREE_SIZE] = tree,
                                     [BATCH_NEXT_CHILD] = tree,
                                     [BATCH_SEQUENCE_OF] = n * sizeof(int32_t),
                                     [BATCH_ORDER] = n * sizeof(int32_t),
                                     [BATCH_STRIDED] = n * num_strided * sizeof(int32_t),
                                     [BATCH_SEQUENCES] = n * sizeof(kvc_batch_sequence),
                                     [BATCH_PLACES] = n * groups * sizeof(kvc_place),
                                     [BATCH_PENDING] = n * groups * sizeof(kvc_pending),
                                     [BATCH_RUNS] = n * groups * sizeof(kvc_run),
                                     [BATCH_COMMITTED] = n,
                                     [BATCH_SELECTED] = n,
                                     [BATCH_GROUP_FLAGS] = groups,
                                     [BATCH_WRITTEN] = n * (uint64_t)cache->num_layers,
                                     [BATCH_CROSS_PUTS] = (uint64_t)num_cross * sizeof(atomic_int)};
    kvc_add_arrays(&size, at, NUM_BATCH_ARRAYS);
    int32_t is_fresh;
    char *start = kvc_scratch_take(cache, &size, &is_fresh);
    if (!start) return NULL;
    kvc_batch *batch = (void *)start;
    *batch = (kvc_batch){.cache = cache,
                         .size = size,
                         .is_fresh = is_fresh,
                         .num_tokens = num_tokens,
                         .positions = (void *)(start + at[BATCH_POSITIONS]),
                         .parents = given_parents ? (void *)(start + at[BATCH_PARENTS]) : NULL,
                         .tree_number = (void *)(start + at[BATCH_TREE_NUMBER]),
                         .subtree_size = (void *)(start + at[BATCH_SUBTREE_SIZE]),
                         .sequence_of = (void *)(start + at[BATCH_SEQUENCE_OF]),
                         .order = (void *)(start + at[BATCH_ORDER]),
                         .strided = (void *)(start + at[BATCH_STRIDED]),
                         .sequences = (void *)(start + at[BATCH_SEQUENCES]),
                         .places = (void *)(start + at[BATCH_PLACES]),
                         .pending = (void *)(start + at[BATCH_PENDING]),
                         .runs = (void *)(start + at[BATCH_RUNS]),
                         .committed = (void *)(start + at[BATCH_COMMITTED]),
                         .selected = (void *)(start + at[BATCH_SELECTED]),
                         .group_flags = (void *)(start + at[BATCH_GROUP_FLAGS]),
                         .written = (void *)(start + at[BATCH_WRITTEN]),
                         .num_cross_puts = (void *)(start + at[BATCH_CROSS_PUTS])};
    for (int32_t i = 0; i < num_cross; i++) atomic_init(&batch->num_cross_puts[i], 0);
    if (given_parents) {
        memcpy(batch->parents, given_parents, (size_t)tree);
        number_trees(batch, (void *)(start + at[BATCH_NEXT_CHILD]));
    }
    memset(batch->committed, 1, (size_t)num_tokens);
    memset(batch->selected, 0, (size_t)num_tokens);
    memset(batch->written, 0, (size_t)num_tokens * (size_t)cache->num_layers);
    return batch;
}

/* Lists the tokens of sequence s that get a row in group g, which has a stride.  Other tokens get no place. */
static void list_strided(const kvc_batch *batch, int32_t g, int32_t s) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    const kvc_pool *pool = &batch->cache->pools[g];
    int32_t *in_group = batch->strided + (size_t)pool->strided_index * (size_t)batch->num_tokens;
    int32_t num = 0;
    for (int32_t i = 0; i < member->num_tokens; i++) {
        const int32_t t = batch->order[member->first + i];
        if (kvc_has_row_at(batch->positions[t], pool->stride))
            in_group[member->first + num++] = t;
        else
            kvc_places_in(batch, g)[t] = (kvc_place){NULL, -1};
    }
    kvc_pending_of(batch, g, s)->num_tokens = num;
}

void kvc_batch_list_rows(kvc_batch *batch) {
    for (int32_t s = 0; s < batch->num_sequences; s++)
        for (int32_t g = 0; g < batch->cache->num_groups; g++) {
            kvc_pending_of(batch, g, s)->num_tokens = batch->sequences[s].num_tokens;
            if (batch->cache->pools[g].stride > 1) list_strided(batch, g, s);
        }
}

/* Adds a sequence to the table: the one that kvc_reserve made, or a new one.  Returns NULL if out of memory. */
static kvc_sequence *new_sequence(kvc_batch *batch, int64_t seq_id) {
    kvc_cache *cache = batch->cache;
    kvc_sequence *sequence = cache->sequences.reserved;
    if (!sequence) sequence = kvc_sequence_new(cache->pools, seq_id, cache->num_groups, cache->num_token_groups);
    if (!sequence) return NULL;
    if (sequence == cache->sequences.reserved) batch->reserved = sequence;
    cache->sequences.reserved = NULL;
    sequence->id = seq_id;
    kvc_cache_enter(cache, sequence);
    return sequence;
}

int32_t kvc_batch_find(const kvc_batch *batch, int64_t seq_id) {
    const kvc_sequence *sequence = kvc_table_find(&batch->cache->sequences, seq_id);
    return sequence ? sequence->in_batch - 1 : -1;
}

/* Returns where the rows of the batch's sequences go in group g. */
static int8_t find_destination(const kvc_batch *batch, int32_t g) {
    const kvc_cache *cache = batch->cache;
    if (batch->replaced && !batch->replaced[g]) return KVC_TO_NOWHERE;
    if (g >= cache->num_token_groups) return cache->policies[g].kind == KVC_CROSS ? KVC_TO_CROSS : KVC_TO_NOWHERE;
    return batch->replaced ? KVC_TO_REPLACE : KVC_TO_END;
}

int32_t kvc_batch_add_sequence(kvc_batch *batch, int64_t seq_id, int32_t is_unstored) {
    kvc_sequence *sequence = kvc_table_find(&batch->cache->sequences, seq_id);
    if (!sequence && !(sequence = new_sequence(batch, seq_id))) return -1;
    if (!sequence->in_batch) {
        const int32_t s = batch->num_sequences++;
        sequence->in_batch = s + 1; /* 0: not in the batch */
        const int is_empty = kvc_sequence_is_empty(sequence);
        kvc_batch_sequence *member = &batch->sequences[s];
        *member = (kvc_batch_sequence){.sequence = sequence,
                                       .is_unstored = is_unstored,
                                       .last = -1,
                                       .exact_to = INT32_MAX,
                                       .selected_from = INT32_MAX};
        for (int32_t g = 0; g < batch->cache->num_groups; g++)
            *kvc_pending_of(batch, g, s) =
                (kvc_pending){.capacity_before = sequence->runs[g].capacity, .to = find_destination(batch, g)};
        sequence->min_query_position = is_empty ? INT32_MAX : kvc_min_query_position(sequence); /* tokens lower it */
        kvc_cache_mark_changed(batch->cache, sequence);
    }
    return sequence->in_batch - 1;
}
