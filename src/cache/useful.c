/* useful.c: which evictable sequences free slots once they are evicted.  A sequence is useful in a group if it holds
 * slots there that only evictable sequences hold.  Its standing in a group is either in the pool's set of useful ones,
 * sorted by last use, or in a list of useless ones.  That is the list of its block if it has a single run, otherwise
 * the list of the pool; then all blocks with its runs count it as a watcher.  So a block whose slots have become free
 * to evict finds the sequences that may have become useful. */
#include "cache/useful.h"

/* ---- lists of useless standings --------------------------------------------------------------------------------- */

/* Returns the block of a list's only run; NULL if there are several. */
static kvc_block *block_of(const kvc_run_list *list) { return list->num == 1 ? kvc_runs_begin(list)->block : NULL; }

/* Adds to the number of watchers of each block in which the runs lie. */
static void watch(const kvc_run_list *list, int32_t add) {
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        run->block->evicting.num_watchers += add;
}

static void list_useless(kvc_pool *pool, kvc_standing *standing) {
    const kvc_run_list *runs = &standing->sequence->runs[pool->group];
    kvc_block *block = block_of(runs);
    kvc_standing **list = block ? &block->evicting.useless : &pool->evicting.useless;
    if (!block) watch(runs, 1);
    standing->next = *list;
    standing->at = list;
    if (*list) (*list)->at = &standing->next;
    *list = standing;
}

static void unlist_useless(const kvc_pool *pool, kvc_standing *standing) {
    const kvc_run_list *runs = &standing->sequence->runs[pool->group];
    if (!block_of(runs)) watch(runs, -1);
    *standing->at = standing->next;
    if (standing->next) standing->next->at = standing->at;
    standing->next = NULL;
    standing->at = NULL;
}

/* ---- the set of useful standings --------------------------------------------------------------------------------- */

static int is_used_later(const kvc_links *member, const kvc_links *other) {
    const kvc_standing *a = (const void *)member, *b = (const void *)other;
    return a->sequence->evicting.used > b->sequence->evicting.used;
}

static void sort(kvc_pool *pool, kvc_standing *standing) {
    kvc_sorted_add(&pool->evicting.useful, &standing->links, is_used_later);
}

kvc_sequence *kvc_useful_after(const kvc_sorted *useful, int64_t used) {
    kvc_sequence *found = NULL;
    for (kvc_links *next = useful->root; next;) {
        kvc_sequence *sequence = ((const kvc_standing *)(const void *)next)->sequence;
        if (sequence->evicting.used > used) found = sequence;
        next = next->below[sequence->evicting.used <= used];
    }
    return found;
}

/* ---- sequences --------------------------------------------------------------------------------------------------- */

static int is_useful(const kvc_run_list *list) { /* once its sequence goes, a slot is free */
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        if (kvc_pool_frees(run->block, run->slot, run->count)) return 1;
    return 0;
}

/* Makes standings of a list of useless ones useful: those whose sequence frees a slot again or, with `all`, each. */
static void wake_list(kvc_pool *pool, kvc_standing *list, int all) {
    for (kvc_standing *standing = list, *next; standing; standing = next) {
        next = standing->next;
        if (!all && !is_useful(&standing->sequence->runs[pool->group])) continue;
        unlist_useless(pool, standing);
        sort(pool, standing);
    }
}

/* Does what wake_list does for sequences that may have rows in a block. */
static void wake(kvc_pool *pool, kvc_block *block, int all) {
    wake_list(pool, block->evicting.useless, all);
    if (block->evicting.num_watchers) wake_list(pool, pool->evicting.useless, all);
}

/* Called when slots of a block have come to be held by evictable sequences alone. */
static void freed(kvc_pool *pool, kvc_block *block) { wake(pool, block, /* all */ 0); }

void kvc_useful_init(kvc_pool *pool) { pool->evicting.freed = freed; }

/* Put a sequence that frees a state into the set of these, and take it out. */
static void sort_state(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_standing *standing = &sequence->evicting.standings[cache->num_token_groups]; /* the one behind all groups' */
    *standing = (kvc_standing){.sequence = sequence};
    kvc_sorted_add(&cache->evicting.with_states, &standing->links, is_used_later);
}

static void unsort_state(kvc_cache *cache, kvc_sequence *sequence) {
    kvc_sorted_remove(&cache->evicting.with_states, &sequence->evicting.standings[cache->num_token_groups].links);
}

void kvc_useful_note_state(kvc_cache *cache, kvc_sequence *sequence, int64_t bytes) {
    int64_t *noted = &sequence->evicting.state_bytes;
    if (*noted && !bytes) unsort_state(cache, sequence);
    if (!*noted && bytes) sort_state(cache, sequence);
    cache->evicting.state_bytes += bytes - *noted;
    *noted = bytes;
}

void kvc_useful_add(kvc_cache *cache, kvc_sequence *sequence) {
    if (sequence->evicting.state_bytes) sort_state(cache, sequence);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        kvc_standing *standing = &sequence->evicting.standings[g];
        if (!sequence->runs[g].num) continue;
        *standing = (kvc_standing){.sequence = sequence};
        if (is_useful(&sequence->runs[g]))
            sort(&cache->pools[g], standing);
        else
            list_useless(&cache->pools[g], standing);
    }
}

void kvc_useful_remove(kvc_cache *cache, kvc_sequence *sequence) {
    if (sequence->evicting.state_bytes) unsort_state(cache, sequence);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        kvc_standing *standing = &sequence->evicting.standings[g];
        if (!standing->sequence) continue;
        if (standing->at)
            unlist_useless(&cache->pools[g], standing);
        else
            kvc_sorted_remove(&cache->pools[g].evicting.useful, &standing->links);
        standing->sequence = NULL;
    }
}

int kvc_useful_check(kvc_pool *pool, kvc_sequence *sequence) {
    const kvc_run_list *list = &sequence->runs[pool->group];
    kvc_standing *standing = &sequence->evicting.standings[pool->group];
    if (!standing->sequence || standing->at) return 0;
    for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
        if (run->block->evicting.choice == pool->evicting.num_choices || /* kvc_useful_beside marked the block */
            kvc_pool_frees(run->block, run->slot, run->count))
            return 1;
    kvc_sorted_remove(&pool->evicting.useful, &standing->links);
    list_useless(pool, standing);
    return 0;
}

void kvc_useful_beside(void *context, const kvc_run *part) {
    kvc_pool *pool = context;
    part->block->evicting.choice = pool->evicting.num_choices;
    wake(pool, part->block, /* all */ 1);
}
