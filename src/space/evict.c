/* evict.c: chooses and evicts victims among kept sequences, for a call that needs room (kvc_need).
 *
 * Choosing changes nothing: a preview counts a group's slots as if the victims were gone.  What the call lacks is slots
 * of some groups, or bytes, or both.  A victim goes, or only loses its rows in windows and chunks (its fate).  In the
 * scope KVC_FIXED all evictable sequences count as gone.
 *
 * An example.  A call lacks 5 slots.  The evictable sequences, from the least recently used on, would free
 *
 *     a 3 slots    b none, as a sequence that is fixed shares its rows    c 4 slots    d 9 slots
 *
 * The fewest of the oldest with which the call fits are a, b and c.  Of these, b stays, and a and c are evicted.  That
 * d alone would do does not matter: it was used last. */
#include "space/evict.h"

#include <stdio.h>

#include "cache/useful.h"
#include "space/expire.h"
#include "space/limits.h"

/* ---- victims ----------------------------------------------------------------------------------------------------- */

/* Adds a victim behind the others. */
static void add_victim(kvc_sequence ***end, kvc_sequence *sequence) {
    sequence->evicting.fate = KVC_GOES;
    **end = sequence;
    *end = &sequence->evicting.next_victim;
}

void kvc_let_victims_stay(kvc_cache *cache) {
    for (kvc_sequence *victim; (victim = cache->evicting.victims);) {
        cache->evicting.victims = victim->evicting.next_victim;
        victim->evicting.next_victim = NULL;
        victim->evicting.fate = KVC_STAYS;
    }
}

void kvc_evict(kvc_cache *cache) {
    for (kvc_sequence *victim; (victim = cache->evicting.victims);) {
        const int goes = victim->evicting.fate == KVC_GOES; /* otherwise it loses its rows in windows and chunks */
        if (!goes) kvc_cache_pin(cache, victim, 1);         /* not evictable while its rows change */
        for (int32_t g = 0; g < cache->num_token_groups; g++)
            if (goes)
                cache->stats.rows_evicted += victim->runs[g].num_rows;
            else if (kvc_is_evicted_in(cache, victim, g)) /* needs no memory, as no run is cut in two */
                cache->stats.rows_evicted += kvc_runs_expire(&victim->runs[g], &cache->pools[g], 0, KVC_END);
        cache->evicting.victims = victim->evicting.next_victim;
        victim->evicting.next_victim = NULL;
        victim->evicting.fate = KVC_STAYS;
        if (goes)
            kvc_cache_drop(cache, victim);
        else
            kvc_cache_pin(cache, victim, -1);
    }
}

/* ---- counting without victims ------------------------------------------------------------------------------------ */

/* Opens a preview of a group without what the call drops in the end.  preview.slots counts these slots, too. */
static kvc_preview open_without(const kvc_need *need, int32_t g, kvc_scope scope) {
    kvc_preview preview = kvc_preview_open(need->cache, g, scope, need->expires);
    if (need->visit_replaced) need->visit_replaced(need, g, kvc_preview_drop_part, &preview);
    return preview;
}

static void close_without(const kvc_need *need, int32_t g, kvc_preview *preview) {
    if (need->visit_replaced) need->visit_replaced(need, g, kvc_preview_undo_part, preview);
    kvc_preview_close(preview);
}

int64_t kvc_live_after(const kvc_need *need, int32_t g, kvc_scope scope) {
    kvc_preview preview = open_without(need, g, scope);
    close_without(need, g, &preview);
    return need->cache->pools[g].counts.live - preview.slots;
}

int kvc_exceeds_capacity(const kvc_need *need, int32_t g, int64_t more, int64_t *live) {
    kvc_cache *cache = need->cache;
    if (!cache->limits.capacity) return 0;
    *live = kvc_live_after(need, g, need->scope);
    if (*live + more <= cache->limits.capacity) return 0;
    cache->pools[g].evicting.lacks_slots = 1;
    return 1;
}

/* ---- choosing ---------------------------------------------------------------------------------------------------- */

/* What the rows of a victim free once all victims are gone. */
enum {
    FREES_LACKING = 1, /* slots of a group that lacks some; where bytes are lacking, any in blocks that can go */
    FREES_FULL = 2     /* slots of a group that sees everything: nobody can go on behind them */
};

/* How many slots no sequence holds any more, in all blocks and in blocks without a pin. */
typedef struct unheld {
    int64_t slots, unpinned;
} unheld;

static void count_unheld(void *to, const kvc_run *part) {
    unheld *found = to;
    for (int32_t i = 0; i < part->count; i++) {
        const int is_unheld = !part->block->holders[part->slot + i].num;
        found->slots += is_unheld;
        found->unpinned += is_unheld && !part->block->pins;
    }
}

/* Notes for every victim what its rows in group g free. */
static void note_freed(const kvc_need *need, int32_t g) {
    const kvc_cache *cache = need->cache;
    const int full = kvc_policy_expires(&cache->policies[g]) ? 0 : FREES_FULL;
    kvc_preview preview = open_without(need, g, KVC_NOW);
    for (kvc_sequence *victim = cache->evicting.victims; victim; victim = victim->evicting.next_victim) {
        unheld found = {0, 0};
        kvc_runs_visit(&victim->runs[g], 0, KVC_END, count_unheld, &found);
        if (found.slots) victim->evicting.frees |= full;
        if ((cache->evicting.lacks_bytes && found.unpinned) || (cache->pools[g].evicting.lacks_slots && found.slots))
            victim->evicting.frees |= FREES_LACKING;
    }
    close_without(need, g, &preview);
}

/* Makes sequences count as useful that hold rows in blocks of which the call itself drops rows: after that, they may
 * be the only holders of a slot. */
static void note_dropped(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        const kvc_preview lost = {.pool = pool, .cache = cache, .expires = need->expires}; /* there are no victims */
        pool->evicting.num_choices++;
        kvc_preview_visit_lost(&lost, kvc_useful_beside, pool);
        if (need->visit_replaced) need->visit_replaced(need, g, kvc_useful_beside, pool);
    }
}

/* Returns whether a sequence holds rows of a group that sees everything. */
static int holds_full(const kvc_cache *cache, const kvc_sequence *sequence) {
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (sequence->runs[g].num && !kvc_policy_expires(&cache->policies[g])) return 1;
    return 0;
}

/* Returns whether a call lacks bytes, and a victim frees some of them with its state. */
static int frees_state(const kvc_cache *cache, const kvc_sequence *victim) {
    return cache->evicting.lacks_bytes && victim->evicting.state_bytes;
}

/* Notes for every victim what its rows and its state free. */
static void note_all_freed(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    for (kvc_sequence *victim = cache->evicting.victims; victim; victim = victim->evicting.next_victim)
        victim->evicting.frees = frees_state(cache, victim) ? FREES_LACKING : 0;
    for (int32_t g = 0; g < cache->num_token_groups; g++) note_freed(need, g);
}

/* Lets victims stay if they free nothing of what is lacking; returns how many. */
static int32_t let_useless_stay(kvc_cache *cache) {
    int32_t num = 0;
    for (kvc_sequence **link = &cache->evicting.victims, *victim; (victim = *link);) {
        if (victim->evicting.frees & FREES_LACKING) {
            link = &victim->evicting.next_victim;
            continue;
        }
        *link = victim->evicting.next_victim;
        victim->evicting.next_victim = NULL;
        victim->evicting.fate = KVC_STAYS;
        num++;
    }
    return num;
}

/* Lets victims stay if they free nothing that is lacking.  Lets rows stay if others hold all of the victim's rows in
 * the layers that see everything, unless its state has to go. */
static void sift(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    note_all_freed(need);
    if (let_useless_stay(cache)) note_all_freed(need); /* what stays may hold rows of other victims */
    for (kvc_sequence *victim = cache->evicting.victims; victim; victim = victim->evicting.next_victim)
        if (!(victim->evicting.frees & FREES_FULL) && !frees_state(cache, victim) && holds_full(cache, victim))
            victim->evicting.fate = KVC_LOSES_WINDOWS;
}

/* Counts what was noted as lacking. */
static int32_t count_lacking(const kvc_cache *cache) {
    int32_t num = cache->evicting.lacks_bytes;
    for (int32_t g = 0; g < cache->num_token_groups; g++) num += cache->pools[g].evicting.lacks_slots;
    return num;
}

/* Returns whether rows of a group would free something that is lacking. */
static int lacks_rows_of(const kvc_cache *cache, int32_t g) {
    return cache->evicting.lacks_bytes || cache->pools[g].evicting.lacks_slots;
}

/* Returns whichever of two sequences was used first, of which the second may be NULL. */
static kvc_sequence *first_used(kvc_sequence *found, kvc_sequence *next) {
    return next && (!found || next->evicting.used < found->evicting.used) ? next : found;
}

/* Returns the sequence that was used first after `used` and may free something lacking, or NULL. */
static kvc_sequence *next_useful(kvc_cache *cache, int64_t used) {
    for (;;) {
        kvc_sequence *found = cache->evicting.lacks_bytes ? kvc_useful_after(&cache->evicting.with_states, used) : NULL;
        for (int32_t g = 0; g < cache->num_token_groups; g++)
            if (lacks_rows_of(cache, g))
                found = first_used(found, kvc_useful_after(&cache->pools[g].evicting.useful, used));
        int is_useful = found && frees_state(cache, found);
        for (int32_t g = 0; found && g < cache->num_token_groups; g++)
            if (lacks_rows_of(cache, g)) is_useful |= kvc_useful_check(&cache->pools[g], found);
        if (!found || is_useful) return found;
    }
}

/* Makes victims of useful sequences, the num least recently used.  They free slots or bytes that are lacking, by
 * themselves or together.  Returns how many sequences it has looked at. */
static int64_t choose(const kvc_need *need, int64_t num) {
    kvc_cache *cache = need->cache;
    kvc_sequence **end = &cache->evicting.victims;
    int64_t chosen = 0, used = 0;
    kvc_let_victims_stay(cache);
    for (kvc_sequence *sequence; chosen < num && (sequence = next_useful(cache, used)); chosen++) {
        if (need->before && sequence->evicting.used >= need->before) break;
        add_victim(&end, sequence);
        used = sequence->evicting.used;
    }
    sift(need);
    return chosen;
}

/* Returns KVC_ERR_FULL if the call needs new blocks, and notes which groups lack slots. */
static kvc_status check_free_blocks(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    int64_t num_bytes = 0;
    for (int32_t g = 0; need->scope != KVC_FIXED && g < cache->num_token_groups; g++) {
        kvc_pool *pool = &cache->pools[g];
        pool->evicting.lacks_slots |= pool->demand.num_new > 0;
        num_bytes += pool->demand.num_new * (int64_t)pool->block_bytes;
    }
    if (!num_bytes) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL, "out of memory for %lld bytes of blocks", (long long)num_bytes);
}

/* Returns KVC_ERR_FULL, and notes that bytes are lacking. */
static kvc_status fail_bytes(const kvc_need *need, int64_t bytes) {
    kvc_cache *cache = need->cache;
    int64_t used = 0;
    char tokens[32];
    snprintf(tokens, sizeof tokens, "%d more token%s", need->num_tokens, need->num_tokens == 1 ? "" : "s");
    for (int32_t g = 0; g < cache->num_groups; g++) used += cache->pools[g].tallies[KVC_FIXED].used.blocks;
    cache->evicting.lacks_bytes = 1;
    return kvc_fail(KVC_ERR_FULL,
                    "%s would make it %lld bytes of whole blocks, states and prompts: max_bytes %lld leaves %lld for "
                    "these, and %lld blocks are in use; clear a sequence, or give a larger max_bytes",
                    need->num_tokens ? tokens : need->what, (long long)bytes, (long long)cache->limits.max_bytes,
                    (long long)cache->limits.budget, (long long)used);
}

kvc_status kvc_fits(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    kvc_status status = KVC_OK;
    for (int32_t g = cache->num_token_groups; need->check_slots && g-- > 0;) { /* all, to note each that lacks some */
        const kvc_status in_group = need->check_slots(need, g);
        if (in_group != KVC_OK) status = in_group;
    }
    if (status != KVC_OK) return status;
    const int64_t bytes = need->count_bytes ? need->count_bytes(need) : kvc_counted_bytes(cache, need->scope);
    if (bytes > cache->limits.budget) return fail_bytes(need, bytes);
    return need->takes_no_memory ? check_free_blocks(need) : KVC_OK;
}

/* Finds the fewest victims with which the call fits: tries 1, 2, 4 ... until it fits, and then bisects, as a call needs
 * few of many.  Begins again once something else is found to be lacking, too. */
static kvc_status find_oldest(const kvc_need *need) {
    int64_t tried = 1, less = 0, more = 0; /* less: known not to do; more: known to do, 0: not known yet */
    int32_t lacking = count_lacking(need->cache);
    for (;;) {
        const int64_t chosen = choose(need, tried);
        const kvc_status status = kvc_fits(need);
        if (count_lacking(need->cache) > lacking) {
            lacking = count_lacking(need->cache);
            tried = 1;
            less = more = 0;
            continue;
        }
        if (status != KVC_OK && (status != KVC_ERR_FULL || chosen < tried)) return status; /* no more to choose */
        if (status == KVC_OK && chosen <= less + 1) return KVC_OK;                         /* one fewer does not do */
        *(status == KVC_OK ? &more : &less) = chosen;
        tried = !more ? 2 * less : more - less > 1 ? less + (more - less) / 2 : more;
    }
}

/* Adds to the error of a call that does not fit how many of something take room, and what the caller can do. */
static void add_to_error(int64_t num, const char *what) {
    char text[384]; /* a copy, as kvc_fail writes over it, and with space behind it for what is added */
    snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, kvc_last_error());
    if (num) kvc_set_last_error("%s; %lld %s", text, (long long)num, what);
}

/* Names what holds room, and is not evicted. */
static kvc_status fail_by_fixed(const kvc_cache *cache, int lacks_bytes) {
    int64_t num_held = 0;
    for (int32_t g = 0; g < cache->num_groups; g++) num_held += cache->pools[g].tallies[KVC_FIXED].held.blocks;
    if (lacks_bytes) {
        add_to_error(num_held, "of these blocks are kept in place by views: free some");
        add_to_error(cache->prefixes.prompt_bytes,
                     "bytes of it are prompts of acquired sequences, pins and events: release some");
    }
    if (cache->evicting.num_protected)
        add_to_error(cache->evicting.num_protected, "blocks are within the quotas of prefixes: give smaller ones");
    else
        add_to_error(cache->evicting.num_pinned, "kept blocks are pinned: unpin some");
    return KVC_ERR_FULL;
}

kvc_status kvc_choose_victims(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    const int64_t num = cache->evicting.evictable.num;
    kvc_need without_all = *need;
    kvc_status status = kvc_fits(need);
    without_all.scope = KVC_FIXED;
    if (num && status == KVC_ERR_FULL && kvc_fits(&without_all) != KVC_ERR_FULL) {
        note_dropped(need);
        status = find_oldest(need);
    }
    const int lacks_bytes = cache->evicting.lacks_bytes;
    cache->evicting.lacks_bytes = 0;
    for (int32_t g = 0; g < cache->num_token_groups; g++) cache->pools[g].evicting.lacks_slots = 0;
    if (status != KVC_OK) kvc_let_victims_stay(cache);
    return status == KVC_ERR_FULL ? fail_by_fixed(cache, lacks_bytes) : status;
}

kvc_status kvc_choose_for_free_blocks(kvc_need need) {
    if (!need.cache->evicting.evictable.num) return KVC_ERR_NOMEM;
    need.takes_no_memory = 1;
    kvc_let_victims_stay(need.cache);
    const kvc_status status = kvc_choose_victims(&need);
    return status == KVC_ERR_FULL ? KVC_ERR_NOMEM : status;
}

kvc_status kvc_check_room(const kvc_need *need) {
    const kvc_status status = kvc_choose_victims(need);
    kvc_let_victims_stay(need->cache);
    return status;
}

kvc_status kvc_make_room(const kvc_need *need) {
    kvc_cache *cache = need->cache;
    const kvc_status status = kvc_choose_victims(need);
    if (status != KVC_OK) return status;
    kvc_evict(cache);
    kvc_give_back_beyond(cache);
    return KVC_OK;
}
