/* begin.c: kvc_begin, kvc_reserve and kvc_room: whether tokens fit, and the memory that they need.
 *
 * Three steps.  Plan: find out what a batch would meet once the cache has evicted, moved scattered rows together and
 * given back what is free, without doing any of it.  Take all memory that may be wanting.  Then act, which cannot fail.
 * The cost does not depend on the number of idle sequences: only those that changed may have rows to evict.
 */
#include <string.h>

#include "store/compact.h"
#include "store/limits.h"
#include "store/resident.h"
#include "store/scratch.h"
#include "store/sheet.h"
#include "store/waiting.h"

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

/* ---- whose tokens ------------------------------------------------------------------------------------------------ */

/* A sequence that is not there yet: the spare one, or another; NULL if there is no memory. */
static kvc_sequence *new_sequence(kvc_batch *batch, int64_t seq_id) {
    kvc_cache *cache = batch->cache;
    kvc_sequence *sequence = cache->spare;
    if (kvc_table_reserve(&cache->sequences, &batch->table_before, &cache->memory) != KVC_OK) return NULL;
    if (!sequence) sequence = kvc_sequence_new(&cache->memory, seq_id, cache->num_groups, cache->num_token_groups);
    if (!sequence) return NULL;
    if (sequence == cache->spare) batch->spare = sequence;
    cache->spare = NULL;
    sequence->id = seq_id;
    kvc_table_insert(&cache->sequences, sequence);
    return sequence;
}

/* The place of a sequence in the batch, given one at its first token; -1 if there is no memory. */
static int32_t join(kvc_batch *batch, int64_t seq_id) {
    kvc_sequence *sequence = kvc_table_find(&batch->cache->sequences, seq_id);
    if (!sequence && !(sequence = new_sequence(batch, seq_id))) return -1;
    if (!sequence->in_batch) {
        const int32_t s = batch->num_sequences++;
        sequence->in_batch = s + 1;
        batch->sequences[s] = (kvc_batch_sequence){.sequence = sequence};
        sequence->low = kvc_sequence_is_empty(sequence) ? INT32_MAX : kvc_sequence_last(sequence) + 1;
        kvc_cache_mark_changed(batch->cache, sequence);
    }
    return sequence->in_batch - 1;
}

/* Marks a sequence of the batch as stored or not, as its first token says; its other tokens must say the same. */
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

/* Gives each token its sequence and position; with args->positions NULL, the positions that follow. */
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

/* Sequences that hold rows, and those of the batch. */
static int64_t num_after(const kvc_batch *batch) {
    int64_t num = batch->cache->num_holding;
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        num += !member->sequence->holds && !member->is_loose;
    }
    return num;
}

static kvc_status check_num_sequences(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    const int64_t num = num_after(batch);
    if (!cache->max_sequences || num <= cache->max_sequences) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL, "the batch makes %lld sequences: max_sequences is %lld; clear one, or allow more",
                    (long long)num, (long long)cache->max_sequences);
}

/* ---- what there will be ------------------------------------------------------------------------------------------ */

/* Set `low` for sequences outside the batch.  Call before evicting: one group's eviction changes the next one's. */
static void find_lows(const kvc_cache *cache) {
    for (kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed)
        if (!sequence->in_batch) sequence->low = kvc_sequence_last(sequence) + 1;
}

/* What this batch lets group g forget of a sequence: positions [*begin, *end). */
static void evictable(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g, int32_t *begin, int32_t *end) {
    *begin = kvc_policy_sinks(&cache->policies[g]);
    *end = kvc_policy_retained(&cache->policies[g], sequence->low);
}

/* Blocks that will be free, in the order of their use, and slots that eviction gives. */
typedef struct freed {
    kvc_block *blocks;
    int64_t slots;
} freed;

static void add_block(freed *f, kvc_block *block) {
    block->next = f->blocks;
    f->blocks = block;
}

static void try_part(void *context, const kvc_run *part) {
    freed *f = context;
    if (kvc_pool_try_drop(part->block, part->slot, part->count, &f->slots)) add_block(f, part->block);
}

static void restore_part(void *context, const kvc_run *part) {
    (void)context;
    kvc_pool_restore(part->block, part->slot, part->count);
}

/* Calls visit for every part that group g evicts of any sequence. */
static void visit_evictable(const kvc_batch *batch, int32_t g, kvc_part_fn *visit, void *context) {
    const kvc_cache *cache = batch->cache;
    if (!kvc_policy_evicts(&cache->policies[g])) return;
    for (const kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed) {
        int32_t begin, end;
        evictable(cache, sequence, g, &begin, &end);
        kvc_runs_visit(&sequence->runs[g], begin, end, visit, context);
    }
}

/* The block that a sequence's next token in group g goes to while there is room, and its fill mark, once the group has
 * evicted and was compacted: that of the last row that stays.  NULL: a new one. */
static kvc_block *last_block(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, int32_t *fill) {
    const kvc_run_list *list = &member->sequence->runs[g];
    const kvc_compaction *c = batch->cache->pools[g].compaction;
    int32_t begin, end;
    evictable(batch->cache, member->sequence, g, &begin, &end);
    for (int32_t i = list->num - 1; i >= 0; i--) {
        const kvc_run *run = kvc_runs_begin(list) + i;
        const int32_t last = run->position + run->count > end ? run->count : begin - run->position;
        if (last <= 0) continue;
        const int32_t *targets = c ? c->targets[run->block->index] : NULL;
        if (!targets) {
            *fill = kvc_pool_fill_after(run->block);
            return run->block;
        }
        const int32_t to = targets[run->slot + (last < run->count ? last : run->count) - 1] / c->pool->block_size;
        *fill = kvc_compaction_fill(c, to);
        return c->order[to];
    }
    return NULL;
}

/* More slots of a block are touched than were: those below `to`, where those below `from` are anyway. */
static void plan_slots(kvc_pool *pool, const kvc_block *block, int32_t from, int32_t to) {
    if (from < block->touched) from = block->touched;
    if (from < to) pool->demand.more_bytes += kvc_pool_block_bytes(pool, to) - kvc_pool_block_bytes(pool, from);
}

/* Adds up which blocks one sequence of the batch will fill in group g.  A block may be the last of several sequences,
 * so what one will take of it is noted there for the next.  *next is the first free one that is left. */
static void plan_blocks(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g, kvc_block **next) {
    kvc_pool *pool = &batch->cache->pools[g];
    const int32_t size = pool->block_size;
    int32_t rest = member->num_slots, fill = 0, taken;
    for (kvc_block *block = last_block(batch, member, g, &fill); rest > 0 && (block || *next); block = NULL) {
        if (!block) {
            block = *next;
            *next = block->next;
            fill = 0;
            pool->demand.num_blocks++;
        }
        fill += block->planned;
        taken = rest < size - fill ? rest : size - fill;
        plan_slots(pool, block, fill, fill + taken);
        block->planned += taken;
        rest -= taken;
    }
    const int64_t full = rest / size, more = full + (rest % size != 0), header = kvc_pool_header_bytes(pool);
    pool->demand.new_blocks += more;
    pool->demand.new_bytes += full * kvc_pool_block_bytes(pool, size) + more * header;
    if (rest % size) pool->demand.new_bytes += kvc_pool_block_bytes(pool, rest % size);
}

/* What blocks that are there already take, once what is free was given back, with the batch's slots. */
static int64_t least_bytes(const kvc_pool *pool) {
    const kvc_compaction *c = pool->compaction;
    const int64_t header = kvc_pool_header_bytes(pool);
    int64_t bytes = 0;
    for (int32_t i = 0; i < pool->num_blocks; i++) {
        const kvc_block *block = pool->blocks[i];
        const int32_t fill = c && c->targets[i] ? 0 : kvc_pool_fill_after(block) + block->planned;
        if (fill || block->pins) bytes += kvc_pool_block_bytes(pool, fill) + header;
    }
    for (int32_t i = 0; c && i < c->num_blocks; i++) {
        const int32_t fill = kvc_compaction_fill(c, i) + c->order[i]->planned;
        if (fill) bytes += kvc_pool_block_bytes(pool, fill) + header;
    }
    return bytes;
}

/* The demand, while what will be evicted is dropped for a trial.  presses: least_bytes is wanted, too. */
static void find_demand(const kvc_batch *batch, int32_t g, int presses, freed *f) {
    kvc_pool *pool = &batch->cache->pools[g];
    const kvc_compaction *c = pool->compaction;
    const int32_t num_members = g < batch->cache->num_token_groups ? batch->num_sequences : 0;
    int32_t fill;
    pool->demand = (kvc_demand){0};
    for (int32_t i = 0; c && i < c->num_blocks; i++) {
        const int32_t after = kvc_compaction_fill(c, i);
        plan_slots(pool, c->order[i], 0, after);
        if (!after) add_block(f, c->order[i]);
    }
    kvc_block *next = f->blocks;
    for (int32_t s = 0; s < num_members; s++) plan_blocks(batch, &batch->sequences[s], g, &next);
    pool->demand.num_blocks += (int32_t)pool->demand.new_blocks;
    if (presses) pool->demand.least_bytes = least_bytes(pool);
    for (int32_t s = 0; s < num_members; s++) {
        kvc_block *last = last_block(batch, &batch->sequences[s], g, &fill);
        if (last) last->planned = 0;
    }
    for (kvc_block *block = f->blocks; block != next; block = block->next) block->planned = 0;
}

/* Evicts for a trial, plans to compact where that is wanted, sees what the batch then needs of group g, and undoes it.
 * *slots: what eviction gives.  KVC_ERR_NOMEM, for a compaction only. */
static kvc_status look(const kvc_batch *batch, int32_t g, int compacts, int presses, int64_t *slots) {
    const kvc_pool *pool = &batch->cache->pools[g];
    freed f = {.blocks = pool->free};
    visit_evictable(batch, g, try_part, &f);
    const kvc_status status = compacts ? kvc_compaction_plan(batch->cache, g) : KVC_OK;
    if (status == KVC_OK) find_demand(batch, g, presses, &f);
    visit_evictable(batch, g, restore_part, NULL);
    while (f.blocks != pool->free) {
        kvc_block *block = f.blocks;
        f.blocks = block->next;
        block->next = NULL;
    }
    if (slots) *slots = f.slots;
    return status;
}

/* Rows that a sequence of the batch keeps in group g. */
static int64_t num_kept(const kvc_batch *batch, const kvc_batch_sequence *member, int32_t g) {
    const kvc_run_list *list = &member->sequence->runs[g];
    int32_t begin, end;
    evictable(batch->cache, member->sequence, g, &begin, &end);
    return list->num_rows - kvc_runs_visit(list, begin, end, NULL, NULL);
}

static kvc_status check_room(const kvc_batch *batch, int32_t g, int64_t freed_slots) {
    const kvc_cache *cache = batch->cache;
    const int64_t live = cache->pools[g].live - freed_slots;
    for (int32_t s = 0; cache->max_seq_len && s < batch->num_sequences; s++) {
        const kvc_batch_sequence *member = &batch->sequences[s];
        const int64_t kept = num_kept(batch, member, g);
        if (kept + member->num_tokens > cache->max_seq_len)
            return kvc_fail(KVC_ERR_FULL,
                            "%d more tokens do not fit: sequence %lld holds %lld of max_seq_len %lld, %lld fit at "
                            "once; %s, or give a larger max_seq_len",
                            member->num_tokens, (long long)member->sequence->id, (long long)kept,
                            (long long)cache->max_seq_len, (long long)(cache->max_seq_len - kept),
                            kvc_policy_evicts(&cache->policies[g]) ? "feed so many at a time" : "remove some");
    }
    const int32_t num_slots = batch->num_tokens - batch->num_loose;
    if (cache->capacity && live + num_slots > cache->capacity)
        return kvc_fail(KVC_ERR_FULL,
                        "%d more tokens do not fit: %lld of capacity %lld are in use, %lld fit at once; remove some, "
                        "clear a sequence, or give a larger capacity",
                        num_slots, (long long)live, (long long)cache->capacity, (long long)(cache->capacity - live));
    return KVC_OK;
}

/* A group that would open a block while more than a quarter of what was handed out is waste is compacted first.  That
 * there may be no memory for it costs memory, not room. */
static void plan_if_scattered(const kvc_batch *batch, int32_t g) {
    const kvc_pool *pool = &batch->cache->pools[g];
    if ((pool->filled - pool->live) * 4 > pool->filled && pool->demand.new_blocks &&
        kvc_compaction_gain(batch->cache, g) * 4 > pool->filled)
        look(batch, g, 1, batch->cache->max_bytes != 0, NULL);
}

/* ---- all memory that there may not be ---------------------------------------------------------------------------- */

/* Room for the runs that each sequence may get, and for those that eviction may split.  One run for each stretch of
 * consecutive positions, and one more for each block it goes on in. */
static kvc_status prepare_runs(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        for (kvc_sequence *sequence = cache->changed; status == KVC_OK && sequence; sequence = sequence->next_changed) {
            kvc_run_list *list = &sequence->runs[g];
            const kvc_batch_sequence *member = sequence->in_batch ? &batch->sequences[sequence->in_batch - 1] : NULL;
            const int32_t more =
                member ? member->num_stretches + member->num_tokens / cache->pools[g].block_size + 2 : 0;
            int32_t begin, end;
            evictable(cache, sequence, g, &begin, &end);
            if (cache->pools[g].compaction)
                status = kvc_runs_prepare_edit(list, &cache->memory, more + 2);
            else if (member || kvc_policy_evicts(&cache->policies[g]))
                status = kvc_runs_prepare_evict(list, &cache->memory, begin, end, more);
        }
    return status;
}

/* kvc_nbytes once the batch has begun, if nothing that is free was given back, or if all was. */
static int64_t bytes_after(const kvc_batch *batch, int presses) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = cache->memory.bookkeeping - cache->memory.replaced;
    bytes += cache->sheet_bytes;
    if (batch->num_loose)
        bytes += (int64_t)(kvc_sheet_bytes(cache, batch->num_loose) + kvc_sheet_header_bytes(batch->num_loose));
    if (presses && cache->spare) bytes -= kvc_sequence_bytes(cache->spare);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        const kvc_demand *d = &pool->demand;
        bytes += d->new_bytes;
        bytes +=
            presses ? d->least_bytes - pool->num_blocks * kvc_pool_header_bytes(pool) : pool->row_bytes + d->more_bytes;
        if (d->new_blocks <= INT32_MAX - pool->num_blocks) bytes += kvc_pool_list_growth(pool, (int32_t)d->new_blocks);
    }
    return bytes;
}

/* Forgets what was planned, and lists of runs that were made ready. */
static void forget_plans(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t g = 0; g < cache->num_groups; g++) {
        cache->pools[g].demand = (kvc_demand){0};
        kvc_compaction_drop(cache, g);
        for (kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed)
            kvc_runs_discard(&sequence->runs[g], &cache->memory);
    }
}

/* What is moved together before a batch: groups where that is worth it, none, all. */
enum { COMPACT_SCATTERED, COMPACT_NONE, COMPACT_ALL };

static kvc_status plan(const kvc_batch *batch, int compacts) {
    const kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    forget_plans(batch);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++) {
        status = look(batch, g, compacts == COMPACT_ALL, cache->max_bytes != 0, NULL);
        if (compacts == COMPACT_SCATTERED) plan_if_scattered(batch, g);
    }
    return status == KVC_OK ? prepare_runs(batch) : status;
}

/* Plans so that max_bytes is kept to: as it is, or once what is free was given back.  *bytes: what is too much.
 * KVC_ERR_FULL, without a sentence, or KVC_ERR_NOMEM. */
static kvc_status fit_bytes(const kvc_batch *batch, int64_t *bytes) {
    const kvc_cache *cache = batch->cache;
    for (int compacts = COMPACT_SCATTERED; compacts <= COMPACT_ALL; compacts++) {
        const kvc_status status = plan(batch, compacts);
        if (status != KVC_OK || !cache->max_bytes) return status;
        *bytes = bytes_after(batch, 0);
        if (*bytes > cache->max_bytes) *bytes = bytes_after(batch, 1);
        if (*bytes <= cache->max_bytes) return KVC_OK;
    }
    return KVC_ERR_FULL;
}

static kvc_status check_bytes(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    int64_t bytes = 0;
    const kvc_status status = fit_bytes(batch, &bytes);
    if (status != KVC_ERR_FULL) return status;
    return kvc_fail(KVC_ERR_FULL,
                    "%d more tokens would make it %lld bytes: max_bytes is %lld, and nothing that is scattered or free "
                    "is left to be given back%s",
                    batch->num_tokens, (long long)bytes, (long long)cache->max_bytes,
                    cache->num_holds ? ", but for what views of the rows keep from being moved" : "");
}

static kvc_status prepare_blocks(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_status status = KVC_OK;
    int32_t g = 0;
    for (; status == KVC_OK && g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        const int64_t more = pool->demand.new_blocks;
        status = more > INT32_MAX - pool->num_blocks
                     ? kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld blocks", (long long)more)
                     : kvc_pool_prepare(pool, more ? pool->num_free + (int32_t)more : 0);
    }
    if (status != KVC_OK)
        for (g -= 2; g >= 0; g--) kvc_pool_unprepare(&cache->pools[g]);
    return status;
}

/* Plans what becomes of the cache, if the tokens fit. */
static kvc_status fit(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    find_lows(cache);
    kvc_status status = check_num_sequences(batch);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        int64_t slots;
        look(batch, g, 0, 0, &slots);
        status = check_room(batch, g, slots);
    }
    return status == KVC_OK ? check_bytes(batch) : status;
}

/* Does all that can fail.  If it does, or is not to be used, drop() what it has planned and taken. */
static kvc_status prepare(kvc_batch *batch) {
    kvc_status status = fit(batch);
    if (status == KVC_OK && batch->num_loose) status = kvc_sheet_add(batch);
    return status == KVC_OK ? prepare_blocks(batch) : status;
}

static void forget_demands(kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_groups; g++) cache->pools[g].demand = (kvc_demand){0};
}

/* Drops what was prepared, but for blocks, and lets the sequences of the batch go: nothing has changed. */
static void drop(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    forget_plans(batch);
    for (int32_t s = 0; s < batch->num_sequences; s++) {
        kvc_sequence *sequence = batch->sequences[s].sequence;
        sequence->in_batch = 0;
        if (sequence == batch->spare) {
            kvc_cache_unmark_changed(sequence);
            kvc_table_remove(&cache->sequences, sequence);
            cache->spare = sequence;
        } else {
            kvc_cache_tidy(cache, sequence);
        }
    }
    kvc_sheets_free(cache);
    kvc_table_restore(&cache->sequences, &batch->table_before, &cache->memory);
    if (batch->is_fresh)
        kvc_memory_free(&cache->memory, batch, batch->size, KVC_MEMORY_SCRATCH, -1);
    else
        kvc_scratch_give(cache, batch, batch->size);
}

/* ---- what cannot fail -------------------------------------------------------------------------------------------- */

static void evict(const kvc_batch *batch, int32_t g) {
    kvc_cache *cache = batch->cache;
    for (kvc_sequence *sequence = cache->changed; sequence; sequence = sequence->next_changed) {
        int32_t begin, end;
        kvc_runs_install(&sequence->runs[g], &cache->memory);
        if (!kvc_policy_evicts(&cache->policies[g])) continue;
        evictable(cache, sequence, g, &begin, &end);
        cache->stats.rows_evicted += kvc_runs_evict(&sequence->runs[g], &cache->pools[g], begin, end);
    }
}

/* Does what was planned: then there are free blocks for all that the batch needs, and nobody has anything to evict. */
static void carry_out(const kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    kvc_table_keep(&cache->sequences, &batch->table_before, &cache->memory);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        if (g < cache->num_token_groups) evict(batch, g);
        kvc_compaction_run(cache, g);
        kvc_pool_accept(&cache->pools[g]);
    }
    while (cache->changed) {
        kvc_sequence *sequence = cache->changed;
        kvc_cache_mark_changed(cache, sequence);
        kvc_cache_unmark_changed(sequence);
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
    int32_t fill;
    kvc_block *block = last_block(batch, member, g, &fill);
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

static void open_batch(kvc_batch *batch) {
    kvc_cache *cache = batch->cache;
    for (int32_t g = 0; g <= cache->num_groups; g++)
        for (int32_t s = 0; s < batch->num_sequences; s++) {
            *kvc_pending_of(batch, g, s) = (kvc_pending){
                batch->runs + (size_t)g * (size_t)batch->num_tokens + (size_t)batch->sequences[s].first, 0};
            if (g < cache->num_token_groups) hand_out(batch, g, s);
        }
    for (int32_t s = 0, slot = 0; s < batch->num_sequences; s++)
        if (batch->sequences[s].is_loose) slot = hand_out_loose(batch, s, slot);
    forget_demands(cache);
    if (cache->max_bytes) kvc_give_back(cache, cache->max_bytes);
    cache->batch = batch;
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

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

static kvc_status check_none_open(const kvc_cache *cache) {
    if (cache->batch) return kvc_fail(KVC_ERR_BUSY, "a batch is open already: commit or abort it first");
    if (cache->num_rewrites) return kvc_fail(KVC_ERR_BUSY, "another call rewrites the keys of a sequence");
    return KVC_OK;
}

/* Checks the number of tokens against the limits, before memory is taken for so many. */
static kvc_status check_num_tokens(const kvc_cache *cache, int64_t num_tokens) {
    if (cache->num_token_groups && cache->capacity && num_tokens > cache->capacity)
        return kvc_fail(KVC_ERR_FULL, "%lld tokens do not fit: capacity is %lld, so that at most %lld fit at once",
                        (long long)num_tokens, (long long)cache->capacity, (long long)cache->capacity);
    if (num_tokens < INT32_MAX) return KVC_OK;
    return kvc_fail(KVC_ERR_NOMEM, "out of memory for %lld tokens", (long long)num_tokens);
}

/* Counts the tokens that may need a slot. */
static int32_t count_stored(const kvc_begin_args *args) {
    int32_t num = 0;
    for (int32_t t = 0; t < args->num_tokens; t++) num += !(args->unstored && args->unstored[t]);
    return num;
}

static kvc_status begin(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **out) {
    kvc_status status = check_none_open(cache);
    if (status == KVC_OK && args->positions)
        status = check_not_gone(cache, args->num_tokens, args->positions, args->seq_ids);
    if (status == KVC_OK) status = check_num_tokens(cache, count_stored(args));
    if (status != KVC_OK) return status;
    kvc_batch *batch = new_batch(cache, args->num_tokens, args->parents);
    if (!batch) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a batch of %d tokens", args->num_tokens);
    status = join_all(batch, args);
    if (status == KVC_OK && !args->positions)
        status = check_not_gone(cache, args->num_tokens, batch->positions, args->seq_ids);
    if (status == KVC_OK) {
        sort_tokens(batch);
        status = prepare(batch);
    }
    if (status != KVC_OK) {
        drop(batch);
        return status;
    }
    carry_out(batch);
    open_batch(batch);
    *out = batch;
    return KVC_OK;
}

/* Returns whether another call writes rows of one of these sequences in place, after waiting for its end.  Under
 * max_bytes, waits for writers of any sequence and for calls that work on pages: they may hold what could be given
 * back.
 */
static int wait_in_place(kvc_cache *cache, int32_t num_tokens, const int64_t *seq_ids) {
    if (cache->max_bytes) kvc_cache_find_all(cache);
    if (cache->max_bytes && kvc_cache_wait_pages(cache)) return 1;
    for (int32_t t = 0; cache->num_in_place && t < num_tokens; t++) {
        const kvc_sequence *sequence = kvc_table_find(&cache->sequences, seq_ids ? seq_ids[t] : 0);
        if (sequence && sequence->in_place) return kvc_cache_find(cache, sequence->id), 1;
    }
    return 0;
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
    while (wait_in_place(cache, args.num_tokens, args.seq_ids)) continue;
    return kvc_unlock(cache, begin(cache, &args, out));
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

static void set_probe(kvc_batch *batch, int32_t num_tokens) {
    batch->num_tokens = batch->sequences->num_tokens = batch->sequences->num_slots = num_tokens;
}

/* A batch of tokens that go on with one sequence, which is not to be opened, in the memory of one of `room` tokens. */
static kvc_status new_probe(kvc_cache *cache, int64_t seq_id, int32_t room, int32_t num_tokens, kvc_batch **out) {
    kvc_batch *batch = new_batch(cache, room, NULL);
    if (!batch) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a batch of %d tokens", room);
    if (join(batch, seq_id) < 0) {
        drop(batch);
        return kvc_fail(KVC_ERR_NOMEM, "out of memory for sequence %lld", (long long)seq_id);
    }
    set_probe(batch, num_tokens);
    batch->sequences->num_stretches = 1;
    *out = batch;
    return KVC_OK;
}

/* Before memory is taken for so many in one batch, as many as it may have. */
static kvc_status fit_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens) {
    kvc_batch *batch;
    kvc_status status = check_num_tokens(cache, num_tokens);
    if (status == KVC_OK) status = new_probe(cache, seq_id, 1, (int32_t)num_tokens, &batch);
    if (status != KVC_OK) return status;
    status = fit(batch);
    drop(batch);
    return status;
}

/* Counts the memory of the slots that the batch would be handed out. */
static void touch(const kvc_batch *batch, int32_t g) {
    kvc_pool *pool = &batch->cache->pools[g];
    int32_t rest = batch->num_tokens, fill;
    kvc_block *block = last_block(batch, batch->sequences, g, &fill), *next = pool->free;
    for (fill = block ? fill : pool->block_size; rest > 0; fill = 0) {
        const int32_t taken = rest < pool->block_size - fill ? rest : pool->block_size - fill;
        if (taken) kvc_pool_touch(pool, block, fill + taken);
        rest -= taken;
        block = next;
        if (next) next = next->next;
    }
}

static kvc_status reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens) {
    kvc_batch *batch;
    kvc_status status = check_none_open(cache);
    if (status == KVC_OK) status = fit_reserve(cache, seq_id, num_tokens);
    if (status == KVC_OK)
        status = new_probe(cache, seq_id, num_tokens < KVC_MAX_BATCH ? (int32_t)num_tokens : KVC_MAX_BATCH,
                           (int32_t)num_tokens, &batch);
    if (status != KVC_OK) return status;
    status = prepare(batch);
    if (status != KVC_OK) {
        drop(batch);
        return status;
    }
    const int presses = cache->max_bytes && bytes_after(batch, 0) > cache->max_bytes;
    carry_out(batch);
    if (presses) kvc_give_back(cache, 0);
    forget_demands(cache);
    for (int32_t g = 0; g < cache->num_token_groups; g++) touch(batch, g);
    kvc_sequence *sequence = batch->sequences->sequence;
    sequence->in_batch = 0;
    if (kvc_sequence_is_blank(sequence)) {
        kvc_table_remove(&cache->sequences, sequence);
        cache->spare = sequence;
    }
    kvc_scratch_give(cache, batch, batch->size);
    return KVC_OK;
}

kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens) {
    if (num_tokens < 1)
        return kvc_fail(KVC_ERR_INVALID, "num_tokens is %lld: it must be at least 1", (long long)num_tokens);
    kvc_lock(cache);
    while (wait_in_place(cache, 1, &seq_id)) continue;
    const kvc_status status = reserve(cache, seq_id, num_tokens);
    if (status == KVC_OK) kvc_take_pages(cache);
    return kvc_unlock(cache, status);
}

/* Counts the tokens that the limits other than max_bytes leave room for. */
static int64_t count_room(const kvc_batch *batch) {
    const kvc_cache *cache = batch->cache;
    const kvc_batch_sequence *member = batch->sequences;
    int64_t room = INT32_MAX - 1 - kvc_sequence_last(member->sequence), slot_bytes = 0;
    if (room > KVC_MAX_BATCH) room = KVC_MAX_BATCH;
    if (cache->max_sequences && num_after(batch) > cache->max_sequences) return 0;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_pool *pool = &cache->pools[g];
        int64_t slots;
        look(batch, g, 0, 0, &slots);
        const int64_t in_group = cache->capacity - pool->live + slots,
                      in_sequence = cache->max_seq_len - num_kept(batch, member, g);
        if (cache->capacity && in_group < room) room = in_group;
        if (cache->max_seq_len && in_sequence < room) room = in_sequence;
        slot_bytes += kvc_pool_slot_bytes(pool);
    }
    if (cache->max_bytes && slot_bytes && cache->max_bytes / slot_bytes < room) room = cache->max_bytes / slot_bytes;
    return room;
}

static kvc_status find_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens) {
    kvc_batch *batch;
    kvc_status status = check_none_open(cache);
    if (status == KVC_OK) status = new_probe(cache, seq_id, 1, 1, &batch);
    if (status != KVC_OK) return status;
    find_lows(cache);
    int64_t room = 0, most = count_room(batch), bytes; /* so many fit; more than so many do not */
    if (!cache->max_bytes) room = most;
    while (status == KVC_OK && room < most) {
        const int64_t middle = most - (most - room) / 2;
        set_probe(batch, (int32_t)middle);
        status = fit_bytes(batch, &bytes);
        if (status == KVC_OK) room = middle;
        if (status != KVC_ERR_FULL) continue;
        most = middle - 1;
        status = KVC_OK;
    }
    drop(batch);
    if (status == KVC_OK) *num_tokens = room;
    return status;
}

kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens) {
    if (!num_tokens) return kvc_fail(KVC_ERR_INVALID, "num_tokens is NULL");
    kvc_lock(cache);
    while (wait_in_place(cache, 1, &seq_id)) continue;
    return kvc_unlock(cache, find_room(cache, seq_id, num_tokens));
}
