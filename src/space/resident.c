/* resident.c: takes OS pages, collapses them into huge ones, or gives them back, in steps that do not hold the mutex.
 *
 * A step counts as a call that reads rows: calls that wait for readers wait for one step at most; other calls leave the
 * memory of the step alone (kvc_memory_is_busy).  Between two steps anything may change, so each step is chosen anew,
 * with the mutex held.  A page work is a call's list of steps, of which it has one at a time.  Surplus blocks are free
 * ones, left by expiries or unstored sequences, that nobody will soon need. */
#include "space/resident.h"

#include "base/compiler.h"
#include "space/limits.h"
#include "cache/waiting.h"

enum { RETURN_BYTES = 4 << 20 }; /* most bytes given back in one step, after which other calls may have the mutex */

/* Bracket the steps of a page work: while it is listed, its pages are neither freed nor purged. */
static void begin_work(kvc_cache *cache, kvc_page_work *work) {
    *work = (kvc_page_work){.next = cache->memory.works};
    cache->memory.works = work;
    kvc_cache_begin_reading(cache);
}

static void end_work(kvc_cache *cache, kvc_page_work *work) {
    kvc_page_work **at = &cache->memory.works;
    while (*at != work) at = &(*at)->next;
    *at = work->next;
    kvc_cache_end_reading(cache);
    kvc_signal_all(&cache->waiting.idle); /* kvc_cache_free waits for the work to end */
}

/* Does the step noted in `work` by calling `act`, and lets calls that wait for readers pass.  Returns act's result. */
static int step(kvc_cache *cache, kvc_page_work *work, int (*act)(void *p, size_t size)) {
    kvc_unlock(cache, KVC_OK);
    const int result = act(work->p, work->size);
    kvc_lock(cache);
    work->size = 0; /* the call is between two steps */
    kvc_cache_end_reading(cache);
    if (cache->waiting.num_waiting) kvc_signal_all(&cache->waiting.idle);
    kvc_cache_begin_reading(cache);
    return result;
}

/* Collapses the pages of group g, as far as `collapsing` goes. */
static void collapse_pages(kvc_cache *cache, int32_t g, kvc_collapsing collapsing, kvc_page_work *work) {
    while (kvc_pool_next_collapse(&cache->pools[g], &collapsing, work)) step(cache, work, kvc_pages_collapse);
}

void kvc_collapse_pages(kvc_cache *cache, int32_t num_tokens) {
    kvc_page_work work;
    int any = 0; /* whether memory of any group is taken page by page */
    for (int32_t g = 0; g < cache->num_groups; g++) any |= cache->pools[g].is_lazy;
    if (!any) return;
    begin_work(cache, &work);
    for (int32_t g = 0; g < cache->num_groups; g++)
        collapse_pages(cache, g, kvc_pool_collapse_for(&cache->pools[g], num_tokens), &work);
    end_work(cache, &work);
}

/* Writes to each page once. */
static void touch(const kvc_page_work *work) {
    const size_t page = kvc_os_page_size();
    volatile uint8_t *p = work->p;
    for (size_t i = 0; i < work->size; i += page - (uintptr_t)(p + i) % page) p[i] = 0;
}

/* Does nothing in a step but let other calls have the mutex. */
static int let_pass(void *p, size_t size) {
    (void)p, (void)size;
    kvc_pause();
    return 1;
}

/* Takes the memory of group g.  If the system has no call for it, touches the pages by hand, with the mutex held.
 * Otherwise another call might take the slots meanwhile. */
static void take_pages(kvc_cache *cache, int32_t g, kvc_page_work *work) {
    kvc_taking taking = {0}, before = taking;
    /* before: how far it has come before the step, for a step that fails and is made again by hand. */
    for (int by_hand = 0; kvc_pool_next_fault(&cache->pools[g], &taking, work); before = taking) {
        if (by_hand) touch(work);
        if (step(cache, work, by_hand ? let_pass : kvc_pages_take)) continue;
        by_hand = 1;
        taking = before;
    }
}

void kvc_take_pages(kvc_cache *cache) {
    kvc_page_work work;
    begin_work(cache, &work);
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        take_pages(cache, g, &work);
        collapse_pages(cache, g, kvc_pool_collapse_ahead(&cache->pools[g]), &work);
    }
    end_work(cache, &work);
}

/* Takes memory for huge pages: one OS page of each, which the others join by collapsing, if the system can do that. */
static int take_collapsed(void *p, size_t size) {
    for (size_t i = 0; i < size; i += KVC_HUGE_PAGE) kvc_pages_take((char *)p + i, 1);
    return kvc_pages_collapse(p, size) || kvc_pages_take(p, size);
}

/* Takes the memory of a region's rows below the fill mark. */
static void take_region(kvc_cache *cache, const kvc_block *block, kvc_region at, kvc_page_work *work) {
    uint8_t *rows = block->rows + at.offset;
    const size_t bytes = (size_t)block->fill * at.row_bytes;
    for (size_t i = 0; i < bytes; i += KVC_HUGE_PAGE) {
        work->p = rows + i;
        work->size = bytes - i < KVC_HUGE_PAGE ? bytes - i : KVC_HUGE_PAGE;
        step(cache, work, kvc_pages_take);
    }
}

void kvc_take_filled(kvc_cache *cache, int32_t g, kvc_block *block) {
    kvc_pool *pool = &cache->pools[g];
    const int is_full = block->fill == pool->block_size;
    kvc_page_work work;
    if (!pool->is_lazy) return;
    begin_work(cache, &work);
    while (kvc_pool_next_filled(pool, block, &work)) step(cache, &work, take_collapsed);
    for (int64_t i = 0; !is_full && i < kvc_pool_num_regions(pool); i++)
        take_region(cache, block, kvc_pool_region(pool, i), &work);
    end_work(cache, &work);
}

void kvc_return_pages(kvc_cache *cache) {
    kvc_page_work work;
    int64_t before, after;
    begin_work(cache, &work);
    do {
        const int64_t at_once = KVC_BUGGIFY() ? 1 : RETURN_BYTES; /* KVC_BUGGIFY: true in simulations, now and then */
        before = kvc_cache_bytes(cache);
        kvc_give_back(cache, before > at_once ? before - at_once : 0);
        after = kvc_cache_bytes(cache);
        step(cache, &work, let_pass);
    } while (after < before);
    end_work(cache, &work);
}

/* Returns how many free blocks of a group go back.  Only windows need spare ones. */
static int32_t surplus_of(const kvc_cache *cache, int32_t g) {
    const kvc_pool *pool = &cache->pools[g];
    if (!kvc_policy_expires(&cache->policies[g])) return pool->free.num_idle;
    return kvc_pool_surplus(pool, cache->sequences.num_holding);
}

/* Gives back the surplus of a group, in steps. */
static void return_surplus(kvc_cache *cache, int32_t g) {
    kvc_pool *pool = &cache->pools[g];
    const size_t at_once = KVC_BUGGIFY() ? 1 : RETURN_BYTES / pool->block_bytes + 1;
    kvc_page_work work;
    begin_work(cache, &work);
    for (int32_t left; (left = surplus_of(cache, g)) > 0; step(cache, &work, let_pass))
        if (!kvc_pool_give_surplus(pool, (size_t)left < at_once ? left : (int32_t)at_once)) break;
    end_work(cache, &work);
}

void kvc_return_surplus(kvc_cache *cache) {
    for (int32_t g = 0; g < cache->num_groups; g++)
        if (cache->pools[g].free.num_idle && surplus_of(cache, g) > 0) return_surplus(cache, g);
}
