/* batch.c: makes a batch: its arrays, its trees, its sequences. */
#include "cache/batch.h"

#include "cache/scratch.h"

#include <string.h>

/* Numbers the tokens depth first.  Parents come before their children, so no stack is needed: one pass backwards adds
 * up the sizes of subtrees, one forwards gives each token the first number that its parent's subtree has left.
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

kvc_batch *kvc_batch_new(kvc_cache *cache, int32_t num_tokens, const int32_t *given_parents) {
    const uint64_t n = (uint64_t)num_tokens, groups = (uint64_t)cache->num_groups;
    const uint64_t tree = given_parents ? n * sizeof(int32_t) : 0;
    uint64_t size = sizeof(kvc_batch);
    const uint64_t positions = kvc_add_array(&size, n * sizeof(int32_t));
    const uint64_t parents = kvc_add_array(&size, tree);
    const uint64_t tree_number = kvc_add_array(&size, tree);
    const uint64_t subtree_size = kvc_add_array(&size, tree);
    const uint64_t next_child = kvc_add_array(&size, tree);
    const uint64_t sequence_of = kvc_add_array(&size, n * sizeof(int32_t));
    const uint64_t order = kvc_add_array(&size, n * sizeof(int32_t));
    const uint64_t sequences = kvc_add_array(&size, n * sizeof(kvc_batch_sequence));
    const uint64_t places = kvc_add_array(&size, n * groups * sizeof(kvc_place));
    const uint64_t pending = kvc_add_array(&size, n * groups * sizeof(kvc_pending));
    const uint64_t runs = kvc_add_array(&size, n * groups * sizeof(kvc_run));
    const uint64_t kept = kvc_add_array(&size, n);
    const uint64_t group_flags = kvc_add_array(&size, groups);
    const uint64_t written = kvc_add_array(&size, n * (uint64_t)cache->num_layers);
    const int32_t num_cross = cache->num_groups - cache->num_token_groups;
    const uint64_t cross_puts = kvc_add_array(&size, (uint64_t)num_cross * sizeof(atomic_int));
    const int32_t is_fresh = !kvc_scratch_has(cache, size);
    char *start = kvc_scratch_take(cache, &size);
    if (!start) return NULL;
    kvc_batch *batch = (void *)start;
    *batch = (kvc_batch){.cache = cache,
                         .size = size,
                         .is_fresh = is_fresh,
                         .table_before = cache->sequences,
                         .num_tokens = num_tokens,
                         .positions = (void *)(start + positions),
                         .parents = given_parents ? (void *)(start + parents) : NULL,
                         .tree_number = (void *)(start + tree_number),
                         .subtree_size = (void *)(start + subtree_size),
                         .sequence_of = (void *)(start + sequence_of),
                         .order = (void *)(start + order),
                         .sequences = (void *)(start + sequences),
                         .places = (void *)(start + places),
                         .pending = (void *)(start + pending),
                         .runs = (void *)(start + runs),
                         .kept = (void *)(start + kept),
                         .group_flags = (void *)(start + group_flags),
                         .written = (void *)(start + written),
                         .num_cross_puts = (void *)(start + cross_puts)};
    for (int32_t i = 0; i < num_cross; i++) atomic_init(&batch->num_cross_puts[i], 0);
    if (given_parents) {
        memcpy(batch->parents, given_parents, (size_t)tree);
        number_trees(batch, (void *)(start + next_child));
    }
    memset(batch->written, 0, (size_t)num_tokens * (size_t)cache->num_layers);
    return batch;
}

/* Adds a sequence to the table: the spare one, or a new one; returns NULL if out of memory. */
static kvc_sequence *new_sequence(kvc_batch *batch, int64_t seq_id) {
    kvc_cache *cache = batch->cache;
    kvc_sequence *sequence = cache->spare;
    if (kvc_table_reserve(&cache->sequences, 1, &batch->table_before, &cache->memory) != KVC_OK) return NULL;
    if (!sequence) sequence = kvc_sequence_new(&cache->memory, seq_id, cache->num_groups, cache->num_token_groups);
    if (!sequence) return NULL;
    if (sequence == cache->spare) batch->spare = sequence;
    cache->spare = NULL;
    sequence->id = seq_id;
    kvc_table_insert(&cache->sequences, sequence);
    return sequence;
}

int32_t kvc_batch_find(const kvc_batch *batch, int64_t seq_id) {
    const kvc_sequence *sequence = kvc_table_find(&batch->cache->sequences, seq_id);
    return sequence ? sequence->in_batch - 1 : -1;
}

/* Returns where the rows of a sequence go in group g. */
static kvc_destination find_destination(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_cache *cache = batch->cache;
    if (batch->restored && !batch->restored[g]) return KVC_TO_NOWHERE;
    if (g >= cache->num_token_groups) return cache->policies[g].kind == KVC_CROSS ? KVC_TO_CROSS : KVC_TO_NOWHERE;
    return member->is_buffered ? KVC_TO_BUFFER : batch->restored ? KVC_TO_REPLACE : KVC_TO_END;
}

int32_t kvc_batch_add_sequence(kvc_batch *batch, int64_t seq_id, int32_t is_unstored) {
    kvc_sequence *sequence = kvc_table_find(&batch->cache->sequences, seq_id);
    if (!sequence && !(sequence = new_sequence(batch, seq_id))) return -1;
    if (!sequence->in_batch) {
        const int32_t s = batch->num_sequences++;
        sequence->in_batch = s + 1;
        const int is_empty = kvc_sequence_is_empty(sequence);
        kvc_batch_sequence *member = &batch->sequences[s];
        *member = (kvc_batch_sequence){
            .sequence = sequence, .is_unstored = is_unstored, .is_buffered = is_unstored && is_empty};
        for (int32_t g = 0; g < batch->cache->num_groups; g++)
            *kvc_pending_of(batch, g, s) = (kvc_pending){.to = find_destination(batch, member, g)};
        sequence->low = is_empty ? INT32_MAX : kvc_sequence_low(sequence);
        kvc_cache_mark_changed(batch->cache, sequence);
    }
    return sequence->in_batch - 1;
}
