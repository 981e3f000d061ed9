/* compact.c: moves the rows of a group together, into fewer blocks.
 *
 * Blocks that are not full are ordered as the runs of the sequences come to them.  Every live slot in them moves down
 * to the first free place in that order.  No row moves up, so that one pass over the rows of each head works in place.
 * Slots that several sequences share move once.  Slots keep their order, so runs stay runs.  A slot's target is its new
 * place: a number over the blocks in that order.  Lists of runs get longer arrays (spare ones) before anything moves,
 * so that moving cannot fail.  Sequences are fixed, or evictable: the latter are kept, and may be evicted. */
#include <string.h>

#include "space/compact.h"

#include "base/parallel.h"
#include "cache/check.h"
#include "cache/useful.h"
#include "space/resident.h"

enum { WORTH_THREADS = 1 << 18 }; /* bytes */

static int is_movable(const kvc_compaction *c, const kvc_block *block) {
    return kvc_pool_is_movable(c->pool, (kvc_use){.live = block->live, .is_pinned = block->pins != 0});
}

static kvc_sequence *first_evictable(const kvc_compaction *c) {
    return kvc_sequence_end(&c->cache->evicting.evictable, KVC_BY_USE, KVC_LOW);
}

/* Return the first sequence with rows that a compaction looks at, and the next one; NULL at the end. */
static kvc_sequence *first_of(const kvc_compaction *c) {
    kvc_sequence *first = kvc_table_first_fixed(&c->cache->sequences);
    return first ? first : first_evictable(c);
}
static kvc_sequence *next_of(const kvc_compaction *c, const kvc_sequence *s) {
    kvc_sequence *next = kvc_sequence_beside(s, KVC_BY_USE, KVC_HIGH);
    return next || s->evicting.is_evictable ? next : first_evictable(c);
}

int64_t kvc_compaction_gain(const kvc_cache *cache, int32_t group) {
    const kvc_pool *pool = &cache->pools[group];
    const kvc_count *movable = &pool->tallies[KVC_NOW].movable; /* blocks that may be moved, as they are now */
    int64_t waste = movable->filled - movable->live;            /* slots handed out, less those that sequences hold */
    /* Holes that a window leaves behind its sinks, and in the block that it moves out of, do not count: soon free.
     * So two blocks are taken off for each sequence that holds rows. */
    if (kvc_policy_expires(&cache->policies[group]))
        waste -= 2 * (int64_t)pool->block_size * cache->sequences.num_holding;
    return waste;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void *alloc_array(kvc_compaction *c, uint64_t count, size_t item) {
    return kvc_memory_alloc(&c->cache->memory, (count ? count : 1) * item, KVC_MEMORY_SCRATCH, -1);
}

static void free_array(kvc_compaction *c, void *p, uint64_t count, size_t item) {
    kvc_memory_free(&c->cache->memory, p, (count ? count : 1) * item, KVC_MEMORY_SCRATCH, -1);
}

static void free_memory(kvc_compaction *c) {
    for (int32_t i = 0; i < c->num_blocks; i++) c->order[i]->plan.targets = NULL;
    free_array(c, c->order, (uint64_t)c->max_blocks, sizeof *c->order);
    free_array(c, c->slots, (uint64_t)c->num_slots, sizeof *c->slots);
    free_array(c, c->moves, (uint64_t)c->max_moves, sizeof *c->moves);
    free_array(c, c, 1, sizeof *c);
}

/* Drops the spare lists of runs that get_lists made ready. */
static void discard_lists(const kvc_compaction *c) {
    for (kvc_sequence *s = first_of(c); s; s = next_of(c, s)) kvc_runs_discard(&s->runs[c->group], &c->cache->memory);
}

/* ---- planning the moves ------------------------------------------------------------------------------------------ */

/* Adds a block to the order.  Its targets are not there yet. */
static void add_block(kvc_compaction *c, kvc_block *block) {
    c->order[c->num_blocks++] = block;
    block->plan.is_ordered = 1;
}

/* Returns the last movable block with rows of a sequence in the batch that is about to begin; NULL if there is none. */
static kvc_block *last_of_batch(const kvc_compaction *c) {
    for (const kvc_sequence *s = kvc_table_first_fixed(&c->cache->sequences); s && !s->is_hidden;
         s = kvc_table_next_fixed(s)) {
        const kvc_run_list *list = &s->runs[c->group];
        for (const kvc_run *run = kvc_runs_end(list); s->in_batch && run > kvc_runs_begin(list);)
            if (is_movable(c, (--run)->block)) return run->block;
    }
    return NULL;
}

/* Lists the blocks in the order in which runs come to them.  The block in which a batch goes on comes last, so that its
 * tokens fill the room that is left behind all. */
static void order_blocks(kvc_compaction *c) {
    kvc_block *last = last_of_batch(c);
    for (const kvc_sequence *s = first_of(c); s; s = next_of(c, s)) {
        const kvc_run_list *list = &s->runs[c->group];
        if (s->evicting.fate == KVC_GOES) continue;
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
            if (run->block != last && is_movable(c, run->block) && !run->block->plan.is_ordered)
                add_block(c, run->block);
    }
    if (last) add_block(c, last);
    for (int32_t i = 0; i < c->num_blocks; i++) c->order[i]->plan.is_ordered = 0;
}

/* Gets memory for the places of the slots of all blocks in order, and for their moves; returns 0 if there is not
 * enough. */
static int get_slots(kvc_compaction *c) {
    for (int32_t i = 0; i < c->num_blocks; i++) {
        const kvc_block *block = c->order[i];
        c->num_slots += block->fill;
        for (int32_t s = 0; s < block->fill; s++)
            c->max_moves += block->holders[s].num && (s == 0 || !block->holders[s - 1].num);
    }
    /* A stretch of live slots is cut in two where it would pass the end of a block: at most once per block. */
    c->max_moves += c->num_blocks;
    c->slots = alloc_array(c, (uint64_t)c->num_slots, sizeof *c->slots);
    c->moves = alloc_array(c, (uint64_t)c->max_moves, sizeof *c->moves);
    return c->slots && c->moves;
}

/* Adds the move of one slot, by lengthening the last move where it continues that. */
static void add_move(kvc_compaction *c, kvc_block *from, int32_t slot, kvc_block *to, int32_t to_slot) {
    kvc_move *last = c->num_moves ? &c->moves[c->num_moves - 1] : NULL;
    if (last && last->from == from && last->to == to && last->from_slot + last->count == slot &&
        last->to_slot + last->count == to_slot)
        last->count++;
    else
        c->moves[c->num_moves++] = (kvc_move){from, to, slot, to_slot, 1};
}

/* Numbers the new places of all live slots, and lists the moves to them. */
static void plan_moves(kvc_compaction *c) {
    const int32_t size = c->pool->block_size;
    int32_t next = 0, *targets = c->slots;
    for (int32_t i = 0; i < c->num_blocks; i++) {
        kvc_block *block = c->order[i];
        block->plan.targets = targets;
        targets += block->fill;
        for (int32_t s = 0; s < block->fill; s++) {
            if (!block->holders[s].num) continue;
            kvc_block *to = c->order[next / size];
            if (to != block || next % size != s) add_move(c, block, s, to, next % size);
            block->plan.targets[s] = next++;
        }
    }
    c->live = next;
}

/* Takes slots off the front of a run, as many as stay side by side, and returns them in their new place. */
static kvc_run next_moved(const kvc_compaction *c, kvc_run *rest) {
    const int32_t *targets = rest->block->plan.targets, size = c->pool->block_size;
    kvc_run part = *rest;
    if (targets) {
        const int32_t target = targets[rest->slot], room = size - target % size;
        part.block = c->order[target / size];
        part.slot = target % size;
        if (part.count > room) part.count = room;
    }
    rest->slot += part.count;
    rest->position += part.count;
    rest->count -= part.count;
    return part;
}

/* Returns for how many runs a list must have room while the compaction moves its runs. */
static int32_t room_for(const kvc_compaction *c, const kvc_run_list *list) {
    int32_t num = 0, moved = 0, ahead = 0; /* runs read, runs written, and the most by which more were written */
    kvc_run last = {0};
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++) {
        kvc_run rest = *run;
        num++;
        while (rest.count > 0) {
            const kvc_run part = next_moved(c, &rest);
            moved += !(last.block == part.block && last.slot + last.count == part.slot &&
                       last.position + last.count == part.position && last.delta == part.delta);
            last = part;
        }
        if (moved - num > ahead) ahead = moved - num;
    }
    return num + ahead;
}

/* Gets memory for the lists of runs of a sequence. */
static kvc_status get_list(const kvc_compaction *c, kvc_sequence *s) {
    kvc_run_list *list = &s->runs[c->group];
    if (kvc_is_evicted_in(c->cache, s, c->group)) return KVC_OK;
    const int expires = kvc_policy_expires(&c->cache->policies[c->group]);
    /* A batch adds runs before, and rows that expire may cut a run in two. */
    if (s->listed.changed_at && (s->in_batch || expires)) return kvc_runs_prepare_edit(list, &c->cache->memory, 2);
    const int32_t num = room_for(c, list);
    return num > list->capacity ? kvc_runs_prepare(list, &c->cache->memory, num - list->num) : KVC_OK;
}

kvc_status kvc_compaction_plan(kvc_cache *cache, int32_t group, const kvc_tally *tally) {
    kvc_pool *pool = &cache->pools[group];
    kvc_compaction made = {.cache = cache, .pool = pool, .group = group, .max_blocks = (int32_t)tally->movable.blocks};
    if (pool->compaction || (tally->movable.blocks < 2 && tally->movable.live == tally->movable.filled)) return KVC_OK;
    kvc_compaction *c = alloc_array(&made, 1, sizeof *c);
    if (c) *c = made;
    if (c) c->order = alloc_array(c, (uint64_t)c->max_blocks, sizeof *c->order);
    if (c && c->order) order_blocks(c);
    int has_memory = c && c->order && get_slots(c);
    if (has_memory) plan_moves(c);
    for (kvc_sequence *s = has_memory && c->num_moves ? first_of(c) : NULL; has_memory && s; s = next_of(c, s))
        has_memory = get_list(c, s) == KVC_OK;
    if (!has_memory) {
        discard_lists(&made);
        if (c) free_memory(c);
        return kvc_fail(KVC_ERR_NOMEM, "out of memory to compact %lld slots", (long long)tally->movable.filled);
    }
    pool->compaction = c;
    if (!c->num_moves) kvc_compaction_drop(cache, group); /* all holes lie past the last slot that is held */
    return KVC_OK;
}

int32_t kvc_compaction_fill(const kvc_compaction *c, int32_t i) {
    const int64_t rest = c->live - (int64_t)i * c->pool->block_size;
    return rest < 0 ? 0 : rest < c->pool->block_size ? (int32_t)rest : c->pool->block_size;
}

/* ---- moving ------------------------------------------------------------------------------------------------------ */

static void move_region(void *context, int64_t i) {
    const kvc_compaction *c = context;
    const kvc_region at = kvc_pool_region(c->pool, i);
    for (int64_t m = 0; m < c->num_moves; m++) {
        const kvc_move *mv = &c->moves[m];
        memmove(mv->to->rows + at.offset + (size_t)mv->to_slot * at.row_bytes,
                mv->from->rows + at.offset + (size_t)mv->from_slot * at.row_bytes, (size_t)mv->count * at.row_bytes);
    }
}

/* Moves holders, then rows. */
static void move_rows(kvc_compaction *c) {
    int64_t moved = 0;
    for (int64_t m = 0; m < c->num_moves; m++) {
        const kvc_move *mv = &c->moves[m];
        memmove(mv->to->holders + mv->to_slot, mv->from->holders + mv->from_slot,
                (size_t)mv->count * sizeof *mv->to->holders);
        moved += mv->count;
    }
    c->cache->stats.rows_moved += moved;
    const int64_t bytes = moved * kvc_pool_slot_bytes(c->pool);
    kvc_parallel(kvc_threads_for((double)bytes, WORTH_THREADS, kvc_cache_threads(c->cache)),
                 kvc_pool_num_regions(c->pool), move_region, c);
}

/* Gives the runs of a list the new places of their slots; a run that would cross the end of a block becomes two. */
static void move_runs(const kvc_compaction *c, kvc_run_list *list) {
    const int32_t num = list->num, from = list->capacity - num; /* reads from the array's end, writes from its start */
    const kvc_interval lost = list->lost;
    if (!num) return;
    memmove(list->runs + from, kvc_runs_begin(list), (size_t)num * sizeof *list->runs);
    list->first = list->num = 0;
    for (int32_t i = 0; i < num; i++) {
        kvc_run rest = list->runs[from + i];
        while (rest.count > 0) {
            const kvc_run part = next_moved(c, &rest);
            kvc_runs_push(list, &part);
        }
    }
    kvc_runs_recount(list);
    list->lost = lost;
}

void kvc_compaction_run(kvc_cache *cache, int32_t group) {
    kvc_pool *pool = &cache->pools[group];
    kvc_compaction *c = pool->compaction;
    for (kvc_sequence *s = first_of(c); s; s = next_of(c, s)) {
        kvc_runs_install(&s->runs[group], &cache->memory);
        if (s->evicting.is_evictable) kvc_useful_remove(cache, s); /* it is added again where its rows then are */
    }
    move_rows(c);
    for (kvc_sequence *s = first_of(c); s; s = next_of(c, s)) {
        move_runs(c, &s->runs[group]);
    }
    kvc_pool_refill(pool, c->order, c->num_blocks, c->live);
    for (kvc_sequence *s = first_evictable(c); s; s = kvc_sequence_beside(s, KVC_BY_USE, KVC_HIGH))
        kvc_useful_add(cache, s);
    cache->stats.compactions++;
    pool->compaction = NULL;
    free_memory(c);
}

void kvc_compaction_drop(kvc_cache *cache, int32_t group) {
    kvc_pool *pool = &cache->pools[group];
    discard_lists(pool->compaction);
    free_memory(pool->compaction);
    pool->compaction = NULL;
}

static kvc_status compact(kvc_cache *cache) {
    kvc_status status = kvc_check_closed(cache, "compact");
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++)
        status = kvc_compaction_plan(cache, g, &cache->pools[g].tallies[KVC_NOW]);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        if (!cache->pools[g].compaction) continue;
        if (status == KVC_OK)
            kvc_compaction_run(cache, g);
        else
            kvc_compaction_drop(cache, g);
    }
    if (status != KVC_OK) return status;
    kvc_scratch_free(cache);
    kvc_return_pages(cache);
    return KVC_OK;
}

kvc_status kvc_compact(kvc_cache *cache) {
    kvc_lock(cache);
    return kvc_unlock(cache, compact(cache));
}
