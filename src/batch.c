/* batch.c: the public functions of a forward pass: begin, put, commit, abort. */
#include <string.h>

#include "attention.h"
#include "dtype.h"
#include "rows.h"
#include "sheet.h"

/* ---- begin: the batch's own memory ------------------------------------------------------------------------------- */

/* Numbers the tokens depth first.  Parents come before their children, so no stack is needed: going backwards adds up
 * the sizes of subtrees, going forwards gives each the next numbers of its parent's. */
static void number_trees(kvc_batch *batch) {
    int32_t *enter = batch->enter, *leave = batch->leave, next = 0;
    for (int32_t t = 0; t < batch->num_tokens; t++) leave[t] = 1;
    for (int32_t t = batch->num_tokens - 1; t >= 0; t--)
        if (batch->parents[t] >= 0) leave[batch->parents[t]] += leave[t];
    for (int32_t t = 0; t < batch->num_tokens; t++) { /* enter: where the next child's numbers begin, less one */
        int32_t *from = batch->parents[t] < 0 ? &next : &enter[batch->parents[t]];
        const int32_t first = batch->parents[t] < 0 ? *from : *from + 1;
        *from += leave[t];
        enter[t] = first;
    }
    for (int32_t t = batch->num_tokens - 1; t >= 0; t--) /* what children have taken goes back */
        if (batch->parents[t] >= 0) enter[batch->parents[t]] -= leave[t];
    for (int32_t t = 0; t < batch->num_tokens; t++) leave[t] += enter[t];
}

/* A batch of n tokens, of as many sequences at most, with all its arrays in one piece of scratch. */
static kvc_batch *new_batch(kvc_cache *cache, int32_t num_tokens, const int32_t *given_parents) {
    const uint64_t n = (uint64_t)num_tokens, groups = (uint64_t)cache->num_groups;
    uint64_t size = sizeof(kvc_batch);
    const uint64_t positions = kvc_add_array(&size, n * sizeof(int32_t));
    const uint64_t tree = given_parents ? n : 0;
    const uint64_t parents = kvc_add_array(&size, tree * sizeof(int32_t));
    const uint64_t enter = kvc_add_array(&size, tree * sizeof(int32_t));
    const uint64_t leave = kvc_add_array(&size, tree * sizeof(int32_t));
    const uint64_t sequence_of = kvc_add_array(&size, n * sizeof(int32_t));
    const uint64_t order = kvc_add_array(&size, n * sizeof(int32_t));
    const uint64_t sequences = kvc_add_array(&size, n * sizeof(kvc_batch_sequence));
    const uint64_t places = kvc_add_array(&size, n * groups * sizeof(kvc_place));
    const uint64_t pending = kvc_add_array(&size, n * (groups + 1) * sizeof(kvc_pending));
    const uint64_t runs = kvc_add_array(&size, n * (groups + 1) * sizeof(kvc_run));
    const uint64_t kept = kvc_add_array(&size, n);
    const uint64_t written = kvc_add_array(&size, n * (uint64_t)cache->num_layers);
    const int32_t num_cross = cache->num_groups - cache->num_token_groups;
    const uint64_t cross_puts = kvc_add_array(&size, (uint64_t)num_cross * sizeof(atomic_int));
    char *start = kvc_scratch_take(cache, &size);
    if (!start) return NULL;
    kvc_batch *batch = (void *)start;
    *batch = (kvc_batch){.cache = cache,
                         .size = size,
                         .num_tokens = num_tokens,
                         .positions = (void *)(start + positions),
                         .parents = given_parents ? (void *)(start + parents) : NULL,
                         .enter = (void *)(start + enter),
                         .leave = (void *)(start + leave),
                         .sequence_of = (void *)(start + sequence_of),
                         .order = (void *)(start + order),
                         .sequences = (void *)(start + sequences),
                         .places = (void *)(start + places),
                         .pending = (void *)(start + pending),
                         .runs = (void *)(start + runs),
                         .kept = (void *)(start + kept),
                         .written = (void *)(start + written),
                         .num_cross_puts = (void *)(start + cross_puts)};
    for (int32_t i = 0; i < num_cross; i++) atomic_init(&batch->num_cross_puts[i], 0);
    if (given_parents) {
        memcpy(batch->parents, given_parents, (size_t)num_tokens * sizeof *given_parents);
        number_trees(batch);
    }
    memset(batch->written, 0, (size_t)num_tokens * (size_t)cache->num_layers);
    return batch;
}

/* The batch no longer owns its sequences; those that hold nothing are forgotten. */
static void release_batch(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        batch->sequences[s].sequence->in_batch = 0;
        kvc_cache_tidy(cache, batch->sequences[s].sequence);
    }
    if (cache->batch == batch) cache->batch = NULL;
    kvc_plans_free(batch);
    kvc_sheets_free(cache);
    kvc_scratch_give(cache, batch, batch->size);
}

/* ---- begin: whose tokens, and do they fit ------------------------------------------------------------------------ */

/* The place of a sequence in the batch, given one at its first token; -1 if there is no memory. */
static int32_t join(kvc_batch *batch, int64_t seq_id) {
    kvc_cache *cache = batch->cache;
    kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    if (!sequence) {
        if (kvc_table_reserve(&cache->sequences, &cache->memory) != KVC_OK) return -1;
        sequence = kvc_sequence_new(&cache->memory, seq_id, cache->num_groups, cache->num_token_groups);
        if (!sequence) return -1;
        kvc_table_insert(&cache->sequences, sequence);
    }
    if (!sequence->in_batch) {
        const int32_t s = batch->num_sequences++;
        sequence->in_batch = s + 1;
        batch->sequences[s] = (kvc_batch_sequence){.sequence = sequence};
        sequence->low = kvc_sequence_is_empty(sequence) ? INT32_MAX : kvc_sequence_last(sequence) + 1;
    }
    return sequence->in_batch - 1;
}

/* What becomes of a sequence once the batch is committed, as its first token says; all must say the same. */
static kvc_status mark_unstored(kvc_batch *batch, kvc_batch_sequence *member, int32_t t, int is_unstored) {
    if (!member->num_tokens) {
        member->is_unstored = is_unstored;
        member->is_loose = is_unstored && kvc_sequence_is_empty(member->sequence);
    }
    batch->num_loose += member->is_loose;
    if (member->is_unstored == is_unstored) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "unstored[%d] is %d: for the tokens of sequence %lld before it, it is %d", t,
                    is_unstored, (long long)member->sequence->id, member->is_unstored);
}

/* args->positions NULL: those that follow. */
static kvc_status join_all(kvc_batch *batch, const kvc_begin_args *args) {
    const int32_t *positions = args->positions;
    const int64_t *seq_ids = args->seq_ids;
    for (int32_t t = 0; t < batch->num_tokens; t++) {
        const int64_t id = seq_ids ? seq_ids[t] : 0;
        const int repeats = t && id == (seq_ids ? seq_ids[t - 1] : 0);
        const int32_t s = repeats ? batch->sequence_of[t - 1] : join(batch, id);
        if (s < 0) return kvc_fail(KVC_ERR_NOMEM, "out of memory for sequence %lld", (long long)id);
        kvc_batch_sequence *member = &batch->sequences[s];
        const kvc_status status = mark_unstored(batch, member, t, args->unstored && args->unstored[t]);
        if (status != KVC_OK) return status;
        const int32_t next = member->num_tokens ? member->next : kvc_sequence_last(member->sequence) + 1;
        const int32_t position = positions ? positions[t] : next;
        if (position == INT32_MAX)
            return kvc_fail(KVC_ERR_INVALID, "num_tokens is %d: positions go up to %d, and sequence %lld goes on at %d",
                            batch->num_tokens, INT32_MAX - 1, (long long)id, kvc_sequence_last(member->sequence) + 1);
        batch->positions[t] = position;
        batch->sequence_of[t] = s;
        member->num_stretches += !member->num_tokens++ || position != member->next;
        member->next = position + 1;
        if (position < member->sequence->low) member->sequence->low = position;
    }
    return KVC_OK;
}

/* Lists the tokens of each sequence side by side, in the order they were given. */
static void sort_tokens(kvc_batch *batch) {
    int32_t next = 0;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        batch->sequences[s].first = next;
        next += batch->sequences[s].num_tokens;
        batch->sequences[s].num_tokens = 0;
    }
    for (int32_t t = 0; t < batch->num_tokens; t++) {
        kvc_batch_sequence *member = &batch->sequences[batch->sequence_of[t]];
        batch->order[member->first + member->num_tokens++] = t;
        member->num_slots += !member->is_loose;
    }
}

static kvc_status check_not_gone(const kvc_cache *cache, int32_t num_tokens, const int32_t *positions,
                                 const int64_t *seq_ids) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_ids ? seq_ids[0] : 0);
    for (int32_t t = 0; t < num_tokens; t++) {
        if (seq_ids && t && seq_ids[t] != seq_ids[t - 1]) sequence = kvc_table_find(&cache->sequences, seq_ids[t]);
        if (!sequence || !kvc_cache_misses(cache, sequence, positions[t])) continue;
        if (kvc_sequence_is_empty(sequence)) /* it ended where no later query saw any of its rows */
            return kvc_fail(KVC_ERR_GONE,
                            "a token at position %d of sequence %lld would see rows that were evicted, as all of it "
                            "were: give the position where it goes on, or clear it; a resume_window would keep its end",
                            positions[t], (long long)sequence->id);
        return kvc_fail(KVC_ERR_GONE,
                        "a token at position %d of sequence %lld would see rows that were evicted: the sequence goes "
                        "on at %d; to go back further, clear it and feed it again, or give resume_window",
                        positions[t], (long long)sequence->id, kvc_sequence_last(sequence) + 1);
    }
    return KVC_OK;
}

static kvc_status check_num_sequences(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t num = 0;
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_sequence *sequence = cache->sequences.items[i];
        num +=
            sequence->in_batch ? !batch->sequences[sequence->in_batch - 1].is_loose : !kvc_sequence_is_empty(sequence);
    }
    if (!cache->max_sequences || num <= cache->max_sequences) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL, "the batch makes %lld sequences: max_sequences is %lld; clear one, or allow more",
                    (long long)num, (long long)cache->max_sequences);
}

/* Of those that are not in the batch: before anything is evicted, as what goes in one group must not decide on what
 * stays in the next. */
static void find_lows(const kvc_cache *cache) {
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        kvc_sequence *sequence = cache->sequences.items[i];
        if (!sequence->in_batch) sequence->low = kvc_sequence_last(sequence) + 1;
    }
}

/* What this batch lets group g forget of a sequence: positions [*begin, *end). */
static void evictable(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g, int32_t *begin, int32_t *end) {
    *begin = kvc_policy_sinks(&cache->policies[g]);
    *end = kvc_policy_retained(&cache->policies[g], sequence->low);
}

/* What a group needs for the batch, and what eviction gives it. */
typedef struct demand {
    kvc_block *reusable; /* those that eviction frees, last first, then those that are free: the order of their use */
    int64_t freed_slots; /* by eviction */
    int64_t new_blocks;  /* beyond the reusable ones */
    int64_t new_bytes;   /* rows and bookkeeping of all that is newly touched */
} demand;

static void try_part(void *context, const kvc_run *part) {
    demand *d = context;
    if (!kvc_pool_try_drop(part->block, part->slot, part->count, &d->freed_slots)) return;
    part->block->next = d->reusable;
    d->reusable = part->block;
}

static void restore_part(void *context, const kvc_run *part) {
    (void)context;
    kvc_pool_restore(part->block, part->slot, part->count);
}

/* Calls visit for every part that group g evicts of any sequence. */
static void visit_evictable(const kvc_batch *batch, int32_t g, kvc_part_fn *visit, void *context) {
    const kvc_cache *cache = batch->cache;
    if (!kvc_policy_evicts(&cache->policies[g])) return;
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        const kvc_sequence *sequence = cache->sequences.items[i];
        int32_t begin, end;
        evictable(cache, sequence, g, &begin, &end);
        kvc_rows_visit(&sequence->rows[g], begin, end, visit, context);
    }
}

/* The block that a sequence's next token in group g goes to after eviction, while there is room: that of the last run
 * of which something stays.  NULL: a new one. */
static kvc_block *last_block(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_rows *rows = &member->sequence->rows[g];
    int32_t begin, end;
    evictable(batch->cache, member->sequence, g, &begin, &end);
    for (int32_t i = rows->num - 1; i >= 0; i--) {
        const kvc_run *run = kvc_rows_begin(rows) + i;
        if (run->position < begin || run->position + run->count > end) return run->block;
    }
    return NULL;
}

static void plan_slots(const kvc_pool *pool, int32_t from, int32_t to, int32_t touched, demand *d) {
    const int64_t now = kvc_pool_block_bytes(pool, from > touched ? from : touched);
    d->new_bytes += kvc_pool_block_bytes(pool, to > touched ? to : touched) - now;
}

/* Adds up which blocks one sequence of the batch will fill in group g, after eviction.  A block may be the last of
 * several sequences, so what one will take of it is noted there for the next. */
static void plan_blocks(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, kvc_block **reusable,
                        demand *d) {
    const kvc_pool *pool = &batch->cache->pools[g];
    kvc_block *last = last_block(batch, member, g);
    int32_t rest = member->num_slots;
    if (last) {
        const int32_t fill = last->fill + last->planned, room = pool->block_size - fill;
        const int32_t taken = room < rest ? room : rest;
        plan_slots(pool, fill, fill + taken, last->touched, d);
        last->planned += taken;
        rest -= taken;
    }
    while (rest > 0) {
        const int32_t taken = rest < pool->block_size ? rest : pool->block_size;
        if (*reusable) {
            plan_slots(pool, 0, taken, (*reusable)->touched, d);
            *reusable = (*reusable)->next;
        } else {
            d->new_blocks++;
            d->new_bytes += kvc_pool_block_bytes(pool, taken) + kvc_pool_header_bytes(pool);
        }
        rest -= taken;
    }
}

/* Evicts for a trial, sees what the batch then needs, and undoes it. */
static demand find_demand(const kvc_batch *batch, int32_t g) {
    const kvc_pool *pool = &batch->cache->pools[g];
    demand d = {.reusable = pool->free};
    visit_evictable(batch, g, try_part, &d);
    kvc_block *reusable = d.reusable;
    for (int32_t s = 0; s < batch->num_sequences; s++) plan_blocks(batch, &batch->sequences[s], g, &reusable, &d);
    visit_evictable(batch, g, restore_part, NULL);
    while (d.reusable != pool->free) {
        kvc_block *block = d.reusable;
        d.reusable = block->next;
        block->next = NULL;
    }
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_block *last = last_block(batch, &batch->sequences[s], g);
        if (last) last->planned = 0;
    }
    return d;
}

static kvc_status check_room(const kvc_batch *batch, int32_t g, const demand *d) {
    const kvc_cache *cache = batch->cache;
    const int64_t live = cache->pools[g].live - d->freed_slots;
    const int32_t num_slots = batch->num_tokens - batch->num_loose;
    if (cache->capacity && live + num_slots > cache->capacity)
        return kvc_fail(KVC_ERR_FULL,
                        "%d more tokens do not fit: %lld of capacity %lld are in use; remove some, clear a "
                        "sequence, or give a larger capacity",
                        num_slots, (long long)live, (long long)cache->capacity);
    for (int32_t s = 0; cache->max_seq_len && s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        const kvc_rows *rows = &member->sequence->rows[g];
        int32_t begin, end;
        evictable(cache, member->sequence, g, &begin, &end);
        const int64_t kept = rows->count - kvc_rows_visit(rows, begin, end, NULL, NULL);
        if (kept + member->num_tokens > cache->max_seq_len)
            return kvc_fail(KVC_ERR_FULL,
                            "%d more tokens do not fit: sequence %lld holds %lld of max_seq_len %lld; remove some, or "
                            "give a larger max_seq_len",
                            member->num_tokens, (long long)member->sequence->id, (long long)kept,
                            (long long)cache->max_seq_len);
    }
    return KVC_OK;
}

/* ---- begin: memory ----------------------------------------------------------------------------------------------- */

static int64_t bytes_after(const kvc_batch *batch) {
    int64_t bytes = kvc_cache_bytes(batch->cache);
    if (batch->num_loose) bytes += (int64_t)kvc_sheet_bytes(batch->cache, batch->num_loose);
    for (int32_t g = 0; g < batch->cache->num_token_groups; g++) {
        const kvc_pool *pool = &batch->cache->pools[g];
        const demand d = find_demand(batch, g);
        bytes += d.new_bytes;
        if (d.new_blocks <= INT32_MAX - pool->num_blocks) bytes += kvc_pool_list_growth(pool, (int32_t)d.new_blocks);
    }
    return bytes;
}

/* Room for the runs that each sequence may get, and for those that eviction may split.  One run for each stretch of
 * consecutive positions, and one more for each block it goes on in. */
static kvc_status reserve_runs(const kvc_batch *batch, int32_t g) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    for (int32_t i = 0; status == KVC_OK && i < cache->sequences.num; i++) {
        kvc_sequence *sequence = cache->sequences.items[i];
        const kvc_batch_sequence *member = sequence->in_batch ? &batch->sequences[sequence->in_batch - 1] : NULL;
        if (!member && !kvc_policy_evicts(&cache->policies[g])) continue;
        int32_t begin, end;
        evictable(cache, sequence, g, &begin, &end);
        const int32_t more = member ? member->num_stretches + member->num_tokens / cache->pools[g].block_size + 2 : 0;
        status = kvc_rows_reserve_evict(&sequence->rows[g], &cache->memory, begin, end, more);
    }
    return status;
}

static kvc_status reserve_all_runs(const kvc_batch *batch) {
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < batch->cache->num_token_groups; g++) status = reserve_runs(batch, g);
    return status;
}

/* The hard limit: what is scattered is moved together and what is free goes back, and only then is it an error. */
static kvc_status check_bytes(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    if (!cache->max_bytes || bytes_after(batch) <= cache->max_bytes) return KVC_OK;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) {
        status = kvc_compact_group(cache, g);
        kvc_pool_give_back(&cache->pools[g], kvc_cache_threads(cache));
    }
    if (status == KVC_OK) status = reserve_all_runs(batch);
    if (status != KVC_OK) return status;
    const int64_t bytes = bytes_after(batch);
    if (bytes <= cache->max_bytes) return KVC_OK;
    int64_t wasted = 0;
    for (int32_t g = 0; g < cache->num_groups; g++)
        wasted += (cache->pools[g].filled - cache->pools[g].live) * kvc_pool_slot_bytes(&cache->pools[g]);
    const long long held = (long long)kvc_cache_bytes(cache);
    return kvc_fail(KVC_ERR_FULL,
                    "%d more tokens would make it %lld bytes: max_bytes is %lld, %lld are live and %lld wasted%s",
                    batch->num_tokens, (long long)bytes, (long long)cache->max_bytes, held - (long long)wasted,
                    (long long)wasted, cache->num_holds ? ", which views of the rows keep from being compacted" : "");
}

/* A group that would open a block while more than a quarter of what was handed out is waste is compacted first.  That
 * this may not succeed costs memory, not room. */
static void compact_if_scattered(const kvc_batch *batch, int32_t g) {
    kvc_cache *cache = batch->cache;
    const kvc_pool *pool = &cache->pools[g];
    if ((pool->filled - pool->live) * 4 <= pool->filled) return;
    if (find_demand(batch, g).new_blocks && kvc_compact_group_waste(cache, g) * 4 > pool->filled)
        kvc_compact_group(cache, g);
}

static kvc_status reserve(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t g = 0; g < cache->num_token_groups; g++) compact_if_scattered(batch, g);
    kvc_status status = reserve_all_runs(batch);
    if (status == KVC_OK) status = check_bytes(batch);
    if (status == KVC_OK && batch->num_loose) status = kvc_sheet_add(batch);
    int32_t g = 0;
    for (; status == KVC_OK && g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        const int64_t new_blocks = find_demand(batch, g).new_blocks;
        pool->free_before = pool->num_free;
        status = new_blocks > INT32_MAX - pool->num_blocks
                     ? kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld blocks", (long long)new_blocks)
                     : kvc_pool_reserve(pool, pool->num_free + (int32_t)new_blocks);
    }
    if (status != KVC_OK)
        for (g -= 2; g >= 0; g--) kvc_pool_unreserve(&cache->pools[g], cache->pools[g].free_before);
    return status;
}

/* ---- begin: what cannot fail ------------------------------------------------------------------------------------- */

static void evict(kvc_batch *batch, int32_t g) {
    kvc_cache *cache = batch->cache;
    if (!kvc_policy_evicts(&cache->policies[g])) return;
    for (int32_t i = 0; i < cache->sequences.num; i++) {
        kvc_sequence *sequence = cache->sequences.items[i];
        int32_t begin, end;
        evictable(cache, sequence, g, &begin, &end);
        cache->stats.rows_evicted += kvc_rows_evict(&sequence->rows[g], &cache->pools[g], begin, end);
    }
}

/* Puts a token's slot at the end of its sequence's runs. */
static void add_slot(kvc_pending *pending, kvc_block *block, int32_t slot, int32_t position) {
    kvc_run *last = pending->num ? &pending->runs[pending->num - 1] : NULL;
    if (last && last->block == block && last->slot + last->count == slot && last->position + last->count == position)
        last->count++;
    else
        pending->runs[pending->num++] = (kvc_run){block, slot, 1, position, 0};
}

/* Slots at the fill mark of the sequence's last block, then of new ones. */
static void hand_out(kvc_batch *batch, int32_t g, int32_t s) {
    kvc_pool *pool = &batch->cache->pools[g];
    const kvc_batch_sequence *member = &batch->sequences[s];
    kvc_pending *pending = kvc_pending_of(batch, g, s);
    kvc_block *block = last_block(batch, member, g);
    for (int32_t done = 0; done < member->num_slots;) {
        if (!block || block->fill == pool->block_size) block = kvc_pool_open(pool);
        const int32_t rest = member->num_slots - done, room = pool->block_size - block->fill;
        const int32_t count = rest < room ? rest : room, slot = kvc_pool_take(pool, block, count);
        for (int32_t i = 0; i < count; i++) {
            const int32_t t = batch->order[member->first + done + i];
            batch->places[(size_t)g * (size_t)batch->num_tokens + (size_t)t] = (kvc_place){block, slot + i};
            add_slot(pending, block, slot + i, batch->positions[t]);
        }
        done += count;
    }
}

/* Slots of the sheets that the batch's rows will pass through, from `slot` on, the same in every group. */
static int32_t hand_out_loose(kvc_batch *batch, int32_t s, int32_t slot) {
    const kvc_batch_sequence *member = &batch->sequences[s];
    for (int32_t i = 0; i < member->num_tokens; i++, slot++) {
        const int32_t t = batch->order[member->first + i];
        for (int32_t g = 0; g < batch->cache->num_token_groups; g++)
            batch->places[(size_t)g * (size_t)batch->num_tokens + (size_t)t] = (kvc_place){NULL, slot};
        add_slot(kvc_own_pending(batch, 0, s), NULL, slot, batch->positions[t]);
    }
    return slot;
}

static kvc_status begin(kvc_batch *batch, const kvc_begin_args *args) {
    kvc_cache *cache = batch->cache;
    kvc_status status = join_all(batch, args);
    if (status == KVC_OK && !args->positions)
        status = check_not_gone(cache, batch->num_tokens, batch->positions, args->seq_ids);
    if (status != KVC_OK) return status;
    sort_tokens(batch);
    find_lows(cache);
    status = check_num_sequences(batch);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        const demand d = find_demand(batch, g);
        status = check_room(batch, g, &d);
    }
    if (status == KVC_OK) status = reserve(batch);
    if (status != KVC_OK) return status;
    for (int32_t g = 0; g <= cache->num_groups; g++)
        for (int32_t s = 0; s < batch->num_sequences; s++)
            *kvc_pending_of(batch, g, s) = (kvc_pending){
                batch->runs + (size_t)g * (size_t)batch->num_tokens + (size_t)batch->sequences[s].first, 0};
    for (int32_t s = 0, slot = 0; s < batch->num_sequences; s++)
        if (batch->sequences[s].is_loose) slot = hand_out_loose(batch, s, slot);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        evict(batch, g);
        for (int32_t s = 0; s < batch->num_sequences; s++) hand_out(batch, g, s);
    }
    cache->batch = batch;
    return KVC_OK;
}

static kvc_status check_tokens(const kvc_begin_args *args) {
    const int32_t *positions = args->positions, *parents = args->parents;
    const int64_t *seq_ids = args->seq_ids;
    for (int32_t t = 0; t < args->num_tokens; t++) {
        if (positions && (positions[t] < 0 || positions[t] == INT32_MAX))
            return kvc_fail(KVC_ERR_INVALID, "positions[%d] is %d: it must be between 0 and %d", t, positions[t],
                            INT32_MAX - 1);
        if (!parents || parents[t] == -1) continue;
        if (parents[t] < -1 || parents[t] >= t)
            return kvc_fail(KVC_ERR_INVALID, "parents[%d] is %d: it must be an earlier token of the batch, or -1", t,
                            parents[t]);
        if (seq_ids && seq_ids[parents[t]] != seq_ids[t])
            return kvc_fail(KVC_ERR_INVALID, "parents[%d] is %d, a token of sequence %lld: it must be one of %lld", t,
                            parents[t], (long long)seq_ids[parents[t]], (long long)seq_ids[t]);
    }
    return KVC_OK;
}

/* Whether another call writes rows of one of these sequences where they lie; once it has ended.  Where memory is short,
 * of any sequence: the call may hold what could be given back. */
static int wait_in_place(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids) {
    if (cache->max_bytes) kvc_cache_find_all(cache);
    for (int32_t t = 0; cache->num_in_place && t < num_tokens; t++) {
        const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_ids ? seq_ids[t] : 0);
        if (sequence && sequence->in_place) return kvc_cache_find(cache, sequence->id), 1;
    }
    return 0;
}

/* Tokens that may need a slot. */
static int32_t count_stored(const kvc_begin_args *args) {
    int32_t num = 0;
    for (int32_t t = 0; t < args->num_tokens; t++) num += !(args->unstored && args->unstored[t]);
    return num;
}

static kvc_status begin_locked(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **out) {
    kvc_status status = KVC_OK;
    while (wait_in_place(cache, args->num_tokens, args->seq_ids)) continue;
    if (cache->batch) status = kvc_fail(KVC_ERR_BUSY, "a batch is open already: commit or abort it first");
    if (cache->num_rewrites) status = kvc_fail(KVC_ERR_BUSY, "another call rewrites the keys of a sequence");
    if (status == KVC_OK && args->positions)
        status = check_not_gone(cache, args->num_tokens, args->positions, args->seq_ids);
    if (status == KVC_OK && cache->num_token_groups && cache->capacity &&
        count_stored(args) > cache->capacity) /* before memory is taken for so many */
        status = kvc_fail(KVC_ERR_FULL, "%d tokens do not fit: capacity is %lld", count_stored(args),
                          (long long)cache->capacity);
    if (status != KVC_OK) return status;
    kvc_batch *batch = new_batch(cache, args->num_tokens, args->parents);
    if (!batch) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a batch of %d tokens", args->num_tokens);
    status = begin(batch, args);
    if (status == KVC_OK)
        *out = batch;
    else
        release_batch(batch);
    return status;
}

kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *given, kvc_batch **out) {
    kvc_begin_args args;
    kvc_status status = KVC_READ(kvc_begin_args, &args, given, "args");
    if (status != KVC_OK) return status;
    if (args.num_tokens < 1 || args.num_tokens > KVC_MAX_BATCH)
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is %d: a batch has from 1 to %d", args.num_tokens, KVC_MAX_BATCH);
    if (!out) return kvc_fail(KVC_ERR_INVALID, "batch is NULL");
    status = check_tokens(&args);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, begin_locked(cache, &args, out));
}

kvc_status kvc_begin(kvc_cache *cache, int32_t num_tokens, const int32_t *positions, const int64_t *seq_ids,
                     const int32_t *parents, kvc_batch **batch) {
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = num_tokens,
                                 .positions = positions,
                                 .seq_ids = seq_ids,
                                 .parents = parents};
    return kvc_begin_with(cache, &args, batch);
}

const int32_t *kvc_batch_positions(const kvc_batch *batch) { return batch->positions; }

/* ---- put --------------------------------------------------------------------------------------------------------- */

enum {
    PUT_TOKENS = 64, /* in one task, at least: for fewer no thread is woken */
    PUT_MOST = 512   /* converted before it asks whether it is to go on */
};

/* A put, split into one task for each thread: when it is repeated, a thread finds in its cache what it had there. */
typedef struct put_work {
    const kvc_cache *cache;
    const kvc_put_args *args;
    const kvc_layer *layer;
    const kvc_layout *layout;
    const kvc_sheet *sheet;  /* for places without a block */
    const kvc_place *places; /* of the batch's tokens in the layer's group; NULL: one after the other from start on */
    kvc_place start;
    int32_t task_tokens;
    kvc_watch watch;
} put_work;

/* Rows of K or of V on their way into a block: [token][head][dim] on one side, [head][slot][dim] on the other. */
typedef struct transfer {
    kvc_convert_fn *convert;
    char *to;
    const char *from;
    int64_t to_row, to_head, from_token, from_head; /* strides */
    int32_t heads, dim;
} transfer;

/* Goes over the source in the order in which it lies in memory. */
static void transfer_rows(const transfer *x, int32_t num_tokens) {
    if (x->from_head < x->from_token)
        for (int32_t t = 0; t < num_tokens; t++)
            x->convert(x->to + t * x->to_row, x->to_head, x->from + t * x->from_token, x->from_head, x->heads, x->dim);
    else
        for (int32_t h = 0; h < x->heads; h++)
            x->convert(x->to + h * x->to_head, x->to_row, x->from + h * x->from_head, x->from_token, num_tokens,
                       x->dim);
}

static kvc_place place_of(const put_work *work, int32_t i) {
    if (work->places) return work->places[work->args->first + i];
    return (kvc_place){work->start.block, work->start.slot + i};
}

/* Stores tokens [i, i + count) of the arrays, which lie in consecutive slots. */
static void put_rows(const put_work *work, int32_t i, int32_t count) {
    const kvc_put_args *a = work->args;
    const kvc_layer *layer = work->layer;
    const kvc_place to = place_of(work, i);
    const kvc_layout *at = to.block ? work->layout : &work->sheet->layout;
    const kvc_place place = {to.block ? to.block : kvc_sheet_block(work->sheet), to.slot};
    const transfer k = {work->cache->kernels->convert[a->k_type][layer->k_type],
                        (char *)kvc_key_at(at, place.block, place.slot, 0),
                        (const char *)a->k + kvc_token_offset(i, a->inner_tokens, a->k_token_stride, a->k_batch_stride),
                        (int64_t)at->k_row_bytes,
                        (int64_t)at->head_stride,
                        a->k_token_stride,
                        a->k_head_stride,
                        layer->num_kv_heads,
                        layer->k_dim};
    transfer_rows(&k, count);
    if (layer->value_in_key) return;
    const transfer v = {work->cache->kernels->convert[a->v_type][layer->v_type],
                        (char *)kvc_value_at(at, place.block, place.slot, 0),
                        (const char *)a->v + kvc_token_offset(i, a->inner_tokens, a->v_token_stride, a->v_batch_stride),
                        (int64_t)at->v_row_bytes,
                        (int64_t)at->head_stride,
                        a->v_token_stride,
                        a->v_head_stride,
                        layer->num_kv_heads,
                        layer->v_dim};
    transfer_rows(&v, count);
}

static void put_task(void *context, int64_t task) {
    put_work *work = context;
    const int32_t inner = work->args->inner_tokens, end = work->args->num_tokens;
    int32_t i = (int32_t)task * work->task_tokens;
    const int32_t last = end - i > work->task_tokens ? i + work->task_tokens : end;
    while (i < last && !kvc_watch_ask(&work->watch)) {
        const kvc_place first = place_of(work, i);
        int32_t n = 1;
        for (; i + n < last && n < PUT_MOST && !(inner && (i + n) % inner == 0); n++) {
            const kvc_place next = place_of(work, i + n);
            if (next.block != first.block || next.slot != first.slot + n) break;
        }
        put_rows(work, i, n);
        i += n;
    }
}

static kvc_status put_all(put_work *work) {
    const kvc_layer *layer = work->layer;
    const int32_t num_tokens = work->args->num_tokens, most = (num_tokens + PUT_TOKENS - 1) / PUT_TOKENS;
    const int32_t threads = most > 1 ? kvc_cache_threads(work->cache) : 1, tasks = threads < most ? threads : most;
    work->task_tokens = (num_tokens + tasks - 1) / tasks;
    kvc_cache_watch(work->cache, (double)num_tokens * layer->num_kv_heads * (layer->k_dim + layer->v_dim),
                    &work->watch);
    kvc_parallel(threads, tasks, put_task, work);
    return kvc_watch_stopped(&work->watch) ? kvc_fail(KVC_ERR_CANCELLED, "the put was cancelled") : KVC_OK;
}

kvc_status kvc_check_array(int32_t type, int64_t row_stride, int64_t head_stride, const char *name) {
    if (type < 0 || type >= KVC_FLOAT_TYPES)
        return kvc_fail(KVC_ERR_INVALID, "%s_type is %d: it must be KVC_F32, KVC_F16 or KVC_BF16", name, type);
    const int64_t unit = (int64_t)kvc_row_bytes(type, 1); /* a power of two */
    if ((row_stride | head_stride) & (unit - 1))
        return kvc_fail(KVC_ERR_INVALID, "%s: strides of %lld and %lld bytes are not multiples of an element's %lld",
                        name, (long long)row_stride, (long long)head_stride, (long long)unit);
    return KVC_OK;
}

kvc_status kvc_check_range(const kvc_batch *batch, int32_t first, int32_t *num_tokens) {
    if (first < 0 || first >= batch->num_tokens)
        return kvc_fail(KVC_ERR_INDEX, "first is %d: the batch has %d tokens", first, batch->num_tokens);
    if (*num_tokens == 0) *num_tokens = batch->num_tokens - first;
    if (*num_tokens < 0 || *num_tokens > batch->num_tokens - first)
        return kvc_fail(KVC_ERR_INDEX, "num_tokens is %d: from token %d on, the batch has %d", *num_tokens, first,
                        batch->num_tokens - first);
    return KVC_OK;
}

kvc_status kvc_check_own_rows(const kvc_cache *cache, int32_t layer) {
    if (cache->layers[layer].share)
        return kvc_fail(KVC_ERR_INVALID, "layer %d shares the rows of layer %d: put them there", layer,
                        kvc_source_of(cache, layer));
    if (cache->layers[layer].policy.kind == KVC_NONE)
        return kvc_fail(KVC_ERR_INVALID, "layer %d has no attention: it holds no rows", layer);
    return KVC_OK;
}

kvc_status kvc_check_values(const kvc_layer *layer, const void *k, const void *v) {
    if (!k) return kvc_fail(KVC_ERR_INVALID, "k is NULL");
    if (layer->value_in_key && v)
        return kvc_fail(KVC_ERR_INVALID, "v is given: in this layer values are the first part of the keys");
    if (!layer->value_in_key && !v) return kvc_fail(KVC_ERR_INVALID, "v is NULL");
    return KVC_OK;
}

kvc_status kvc_check_inner(int32_t inner_tokens, int32_t num_tokens) {
    if (inner_tokens >= 0 && (inner_tokens == 0 || num_tokens % inner_tokens == 0)) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "inner_tokens is %d: it must divide the number of tokens, %d, or be 0",
                    inner_tokens, num_tokens);
}

static kvc_status check_arrays(const kvc_layer *layer, const kvc_put_args *args) {
    kvc_status status = kvc_check_values(layer, args->k, args->v);
    if (status == KVC_OK) status = kvc_check_inner(args->inner_tokens, args->num_tokens);
    if (status == KVC_OK) status = kvc_check_array(args->k_type, args->k_token_stride, args->k_head_stride, "k");
    if (status == KVC_OK && args->inner_tokens) status = kvc_check_array(args->k_type, args->k_batch_stride, 0, "k");
    if (status != KVC_OK || layer->value_in_key) return status;
    status = kvc_check_array(args->v_type, args->v_token_stride, args->v_head_stride, "v");
    if (status == KVC_OK && args->inner_tokens) status = kvc_check_array(args->v_type, args->v_batch_stride, 0, "v");
    return status;
}

static kvc_status check_not_written(const kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    const uint8_t *written = kvc_written_in(batch, layer);
    for (int32_t t = first; t < first + num_tokens; t++)
        if (written[t])
            return kvc_fail(KVC_ERR_INVALID, "token %d of the batch was put in layer %d before: each is put once", t,
                            layer);
    return KVC_OK;
}

/* Which of the open batch's sequences it is; -1: none.  With the mutex held. */
static int32_t find_member(const kvc_cache *cache, int64_t seq_id) {
    const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_id);
    return sequence ? sequence->in_batch - 1 : -1;
}

static kvc_status check_cross_put(const kvc_batch *batch, int32_t layer, const kvc_put_args *args) {
    const int32_t max_len = batch->cache->layers[layer].policy.max_len;
    kvc_lock(batch->cache);
    const int32_t member = find_member(batch->cache, args->seq_id);
    kvc_unlock(batch->cache, KVC_OK);
    if (member < 0)
        return kvc_fail(KVC_ERR_INVALID, "seq_id is %lld: the batch has no token of that sequence",
                        (long long)args->seq_id);
    if (args->first != 0 || args->num_tokens < 1)
        return kvc_fail(KVC_ERR_INVALID,
                        "first is %d and num_tokens %d: a cross-attention layer is given all its rows at once, from 0 "
                        "on",
                        args->first, args->num_tokens);
    if (args->num_tokens > max_len)
        return kvc_fail(KVC_ERR_FULL, "%d rows do not fit in cross-attention layer %d: max_len is %d", args->num_tokens,
                        layer, max_len);
    return KVC_OK;
}

kvc_status kvc_put_check(const kvc_batch *batch, int32_t layer, const kvc_put_args *given, kvc_put_args *args) {
    kvc_status status = KVC_READ(kvc_put_args, args, given, "args");
    if (status == KVC_OK) status = kvc_check_layer(batch->cache, layer);
    if (status == KVC_OK) status = kvc_check_own_rows(batch->cache, layer);
    if (status != KVC_OK) return status;
    if (kvc_keeps_tokens(batch->cache, layer)) {
        status = kvc_check_range(batch, args->first, &args->num_tokens);
        if (status == KVC_OK) status = check_not_written(batch, layer, args->first, args->num_tokens);
    } else {
        status = check_cross_put(batch, layer, args);
    }
    return status == KVC_OK ? check_arrays(&batch->cache->layers[layer], args) : status;
}

/* Slots for what a sequence is given in a cross-attention layer, all in one block. */
static kvc_status open_cross(kvc_cache *cache, int32_t group, int32_t count, kvc_run *run) {
    kvc_pool *pool = &cache->pools[group];
    const int32_t num_blocks = pool->num_blocks;
    kvc_status status = kvc_pool_reserve(pool, 1);
    if (status != KVC_OK) return status;
    kvc_block *block = kvc_pool_open(pool);
    *run = (kvc_run){block, kvc_pool_take(pool, block, count), count, 0, 0};
    status = kvc_check_max_bytes(cache, "putting the rows of a cross-attention layer");
    if (status == KVC_OK) return KVC_OK;
    kvc_pool_drop(pool, block, run->slot, count);
    kvc_pool_unopen(pool, pool->num_blocks - num_blocks);
    return status;
}

/* Drops what the sequence was given in a cross-attention layer; where it is not stored, the memory goes back, too. */
static void drop_cross(const kvc_batch *batch, int32_t g, int32_t s) {
    kvc_pool *pool = &batch->cache->pools[g];
    const int32_t num_free = pool->num_free;
    kvc_drop_part(pool, kvc_pending_of(batch, g, s)->runs);
    if (batch->sequences[s].is_loose) kvc_pool_shrink(pool, pool->num_free - num_free);
}

/* The rows become what the sequence has in the layer in this batch, instead of what it was given before; or, if they
 * are not all there, nobody's. */
static void end_cross(kvc_batch *batch, const kvc_cross_put *put, int all) {
    const int32_t g = put->group;
    kvc_pending *pending = kvc_pending_of(batch, g, put->member);
    kvc_cross_put **link = &batch->cross_puts;
    while (*link != put) link = &(*link)->next;
    *link = put->next;
    if (!all) {
        kvc_drop_part(&batch->cache->pools[g], &put->run);
        return;
    }
    if (pending->num) drop_cross(batch, g, put->member);
    pending->runs[0] = put->run;
    pending->num = 1;
    atomic_fetch_add(&batch->num_cross_puts[g - batch->cache->num_token_groups], 1);
    kvc_signal_all(&batch->cache->idle);
}

static kvc_status put_cross(kvc_batch *batch, put_work *work, int32_t group) {
    kvc_cache *cache = batch->cache;
    kvc_cross_put put = {.group = group};
    kvc_lock(cache);
    kvc_status status = open_cross(cache, group, work->args->num_tokens, &put.run);
    if (status == KVC_OK) {
        put.member = find_member(cache, work->args->seq_id);
        put.next = batch->cross_puts;
        batch->cross_puts = &put;
    }
    kvc_unlock(cache, status);
    if (status != KVC_OK) return status;
    work->start = (kvc_place){put.run.block, put.run.slot};
    status = put_all(work);
    kvc_lock(cache);
    end_cross(batch, &put, status == KVC_OK);
    return kvc_unlock(cache, status);
}

/* Where the batch's tokens from one on lie in a layer's group. */
static const kvc_place *places_in(const kvc_batch *batch, int32_t layer, int32_t first) {
    return batch->places + (size_t)batch->cache->group_of[layer] * (size_t)batch->num_tokens + (size_t)first;
}

int kvc_any_loose(const kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    const kvc_place *place = places_in(batch, layer, first);
    if (!batch->num_loose || !kvc_keeps_tokens(batch->cache, layer)) return 0;
    for (int32_t i = 0; i < num_tokens; i++)
        if (!place[i].block) return 1;
    return 0;
}

/* The sheet for rows of a layer that stay until the batch ends, if some of these tokens need one. */
static kvc_status enter_sheet(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens, kvc_sheet **sheet) {
    *sheet = NULL;
    if (!kvc_any_loose(batch, layer, first, num_tokens)) return KVC_OK;
    return kvc_sheet_enter(batch, layer, KVC_SHEET_KEEP, sheet);
}

void kvc_mark_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens, kvc_sheet *sheet,
                      int is_written) {
    const kvc_place *place = places_in(batch, layer, first);
    memset(kvc_written_in(batch, layer) + first, is_written, (size_t)num_tokens);
    for (int32_t i = 0; sheet && i < num_tokens; i++)
        if (!place[i].block) kvc_sheet_written(sheet)[place[i].slot] = (uint8_t)is_written;
}

kvc_status kvc_put_rows(kvc_batch *batch, int32_t layer, const kvc_put_args *args, kvc_sheet *sheet) {
    const kvc_cache *cache = batch->cache;
    const int32_t g = cache->group_of[layer];
    put_work work = {.cache = cache,
                     .args = args,
                     .layer = &cache->layers[layer],
                     .layout = &cache->layouts[cache->layout_of[layer]],
                     .sheet = sheet};
    if (!kvc_keeps_tokens(cache, layer)) return put_cross(batch, &work, g);
    work.places = places_in(batch, layer, 0);
    const kvc_status status = put_all(&work);
    if (status == KVC_OK) kvc_mark_written(batch, layer, args->first, args->num_tokens, sheet, 1);
    return status;
}

kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *given) {
    kvc_put_args args;
    kvc_sheet *sheet = NULL;
    kvc_status status = kvc_put_check(batch, layer, given, &args);
    if (status == KVC_OK) status = enter_sheet(batch, layer, args.first, args.num_tokens, &sheet);
    if (status != KVC_OK) return status;
    status = kvc_put_rows(batch, layer, &args, sheet);
    kvc_sheet_leave(batch->cache, sheet);
    return status;
}

/* ---- writing in place -------------------------------------------------------------------------------------------- */

static kvc_status check_in_place(const kvc_batch *batch, int32_t layer, int32_t first, int32_t *num_tokens) {
    kvc_status status = kvc_check_layer(batch->cache, layer);
    if (status == KVC_OK) status = kvc_check_own_rows(batch->cache, layer);
    if (status == KVC_OK && !kvc_keeps_tokens(batch->cache, layer))
        status = kvc_fail(KVC_ERR_UNSUPPORTED, "layer %d is a cross-attention layer: its rows are put", layer);
    return status == KVC_OK ? kvc_check_range(batch, first, num_tokens) : status;
}

kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                     kvc_hold **hold) {
    int32_t rest = 0;
    kvc_status status = check_in_place(batch, layer, first, &rest);
    if (status == KVC_OK) status = check_not_written(batch, layer, first, 1);
    if (status == KVC_OK && !span) status = kvc_fail(KVC_ERR_INVALID, "span is NULL");
    if (status == KVC_OK) status = kvc_check_size(span_size, kvc_span_least_size, sizeof *span, "span");
    if (status != KVC_OK) return status;
    kvc_cache *cache = batch->cache;
    kvc_sheet *sheet;
    status = enter_sheet(batch, layer, first, 1, &sheet);
    if (status != KVC_OK) return status;
    const kvc_place *place = places_in(batch, layer, first);
    const uint8_t *written = kvc_written_in(batch, layer) + first;
    kvc_run run = {place->block, place->slot, 1, batch->positions[first], 0};
    while (run.count < rest && place[run.count].block == run.block && place[run.count].slot == run.slot + run.count &&
           !written[run.count])
        run.count++;
    if (!run.block) run.block = kvc_sheet_block(sheet);
    if (hold) {
        kvc_lock(cache);
        status = kvc_unlock(cache, kvc_hold_runs(cache, &run, 1, cache->group_of[layer], hold));
    }
    if (status == KVC_OK) {
        const kvc_span found = kvc_span_of(&run, kvc_layout_in(cache, layer, run.block));
        kvc_write_struct(span, span_size, &found, sizeof found);
    }
    kvc_sheet_leave(cache, sheet);
    return status;
}

kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens) {
    kvc_status status = check_in_place(batch, layer, first, &num_tokens);
    kvc_sheet *sheet;
    if (status == KVC_OK) status = check_not_written(batch, layer, first, num_tokens);
    if (status == KVC_OK) status = enter_sheet(batch, layer, first, num_tokens, &sheet);
    if (status != KVC_OK) return status;
    kvc_mark_written(batch, layer, first, num_tokens, sheet, 1);
    kvc_sheet_leave(batch->cache, sheet);
    return KVC_OK;
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

static kvc_status check_complete(const kvc_batch *batch) {
    for (int32_t layer = 0; layer < batch->cache->num_layers; layer++) {
        if (!kvc_keeps_tokens(batch->cache, layer)) continue;
        const uint8_t *written = kvc_written_in(batch, layer);
        for (int32_t t = 0; t < batch->num_tokens; t++)
            if (batch->kept[t] && !written[t])
                return kvc_fail(KVC_ERR_INVALID,
                                "token %d of the batch was not put in layer %d: put every token in every layer, or "
                                "abort",
                                t, layer);
    }
    return KVC_OK;
}

/* Calls visit for the longest stretches of a sequence's slots in a group whose tokens are kept, or not. */
static int32_t visit_kept(const kvc_batch *batch, int32_t g, int32_t s, int kept, kvc_part_fn *visit, void *context) {
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    const int32_t *token = batch->order + batch->sequences[s].first;
    int32_t num = 0;
    for (int32_t i = 0; i < pending->num; token += pending->runs[i++].count)
        for (int32_t from = 0, to; from < pending->runs[i].count; from = to + 1) {
            kvc_run part = pending->runs[i];
            for (to = from; to < part.count && batch->kept[token[to]] == kept;) to++;
            if (to == from) continue;
            part.slot += from;
            part.position += from;
            part.count = to - from;
            num++;
            if (visit) visit(context, &part);
        }
    return num;
}

static void append_part(void *rows, const kvc_run *part) { kvc_rows_append(rows, part); }

/* Room for all the runs that sequences get. */
static kvc_status reserve_kept(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; g < cache->num_groups; g++)
        for (int32_t s = 0; status == KVC_OK && s < batch->num_sequences; s++) {
            const int32_t more =
                g < cache->num_token_groups ? visit_kept(batch, g, s, 1, NULL, NULL) : kvc_pending_of(batch, g, s)->num;
            status = kvc_rows_reserve(&batch->sequences[s].sequence->rows[g], &cache->memory, more);
        }
    return status;
}

/* What the sequence was given in a cross-attention layer takes the place of what it had, if a token of it was kept. */
static void commit_cross(const kvc_batch *batch, int32_t g, int32_t s) {
    kvc_pool *pool = &batch->cache->pools[g];
    kvc_rows *rows = &batch->sequences[s].sequence->rows[g];
    const kvc_pending *pending = kvc_pending_of(batch, g, s);
    const int32_t *token = batch->order + batch->sequences[s].first;
    int32_t any = 0;
    for (int32_t i = 0; i < batch->sequences[s].num_tokens; i++) any |= batch->kept[token[i]];
    if (!pending->num) return;
    if (!any) {
        drop_cross(batch, g, s);
        return;
    }
    kvc_rows_visit(rows, 0, KVC_END, kvc_drop_part, pool);
    rows->first = rows->num = 0;
    kvc_rows_push(rows, pending->runs);
    kvc_rows_recount(rows);
}

/* What is not stored leaves nothing: neither what it held before nor where that began. */
static void forget_unstored(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t s = 0; s < batch->num_sequences; s++)
        for (int32_t g = 0; batch->sequences[s].is_unstored && g < cache->num_groups; g++)
            kvc_rows_destroy(&batch->sequences[s].sequence->rows[g], &cache->pools[g]);
}

static kvc_status commit(kvc_batch *batch, int32_t num_kept) {
    kvc_cache *cache = batch->cache;
    const kvc_status status = reserve_kept(batch);
    if (status != KVC_OK) return status;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        for (int32_t g = 0; g < cache->num_token_groups; g++) {
            visit_kept(batch, g, s, 1, append_part, &batch->sequences[s].sequence->rows[g]);
            visit_kept(batch, g, s, 0, kvc_drop_part, &cache->pools[g]);
        }
        for (int32_t g = cache->num_token_groups; g < cache->num_groups; g++) commit_cross(batch, g, s);
    }
    for (int32_t g = 0; g < cache->num_groups; g++) kvc_pool_join(&cache->pools[g], batch->num_tokens);
    forget_unstored(batch);
    cache->stats.batches++;
    cache->stats.tokens += num_kept;
    release_batch(batch);
    return KVC_OK;
}

static kvc_status finish(kvc_batch *batch) {
    int32_t num_kept = 0;
    for (int32_t t = 0; t < batch->num_tokens; t++)
        num_kept += batch->kept[t] &= !batch->sequences[batch->sequence_of[t]].is_unstored;
    const kvc_status status = check_complete(batch);
    if (status != KVC_OK) return status;
    kvc_cache *cache = batch->cache;
    kvc_lock(cache);
    return kvc_unlock(cache, commit(batch, num_kept));
}

kvc_status kvc_commit(kvc_batch *batch) {
    memset(batch->kept, 1, (size_t)batch->num_tokens);
    return finish(batch);
}

kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept) {
    if (num_kept < 0 || (num_kept && !kept))
        return kvc_fail(KVC_ERR_INVALID, "num_kept is %d%s", num_kept, num_kept < 0 ? "" : " and kept is NULL");
    memset(batch->kept, 0, (size_t)batch->num_tokens);
    for (int32_t i = 0; i < num_kept; i++) {
        if (kept[i] < 0 || kept[i] >= batch->num_tokens)
            return kvc_fail(KVC_ERR_INDEX, "kept[%d] is %d: the batch has %d tokens", i, kept[i], batch->num_tokens);
        if (batch->kept[kept[i]]) return kvc_fail(KVC_ERR_INVALID, "kept[%d] is %d, as one before it is", i, kept[i]);
        batch->kept[kept[i]] = 1;
    }
    return finish(batch);
}

void kvc_abort(kvc_batch *batch) {
    if (!batch) return;
    kvc_cache *cache = batch->cache;
    kvc_lock(cache);
    for (int32_t g = 0; g < cache->num_groups; g++)
        for (int32_t s = batch->num_sequences - 1; s >= 0; s--) { /* last handed out, first given back */
            const kvc_pending *pending = kvc_pending_of(batch, g, s);
            if (g >= cache->num_token_groups && pending->num)
                drop_cross(batch, g, s);
            else
                for (int32_t i = pending->num - 1; i >= 0; i--) kvc_drop_part(&cache->pools[g], &pending->runs[i]);
        }
    cache->stats.aborted++;
    release_batch(batch);
    kvc_unlock(cache, KVC_OK);
}
