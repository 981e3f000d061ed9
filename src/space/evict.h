/* evict.h: plans which kept sequences, which wait to be used again, a call drops where it needs room.
 *
 * A kept sequence stands in the table like any other, but no batch and no edit takes it.  A call that needs room
 * chooses victims first, which changes nothing: previews (expire.h) and kvc_counted_bytes count as if they were gone.
 * Once nothing can fail, they are evicted; otherwise they stay.
 *
 * All functions are called with the mutex held, which is not released between choosing victims and evicting them.
 */
#ifndef KVC_EVICT_H
#define KVC_EVICT_H

#include "cache/cache.h"

/* The room that a call needs: slots within the capacity, and bytes within max_bytes. */
typedef struct kvc_need {
    kvc_cache *cache;
    /* Returns KVC_ERR_FULL unless the capacity leaves the slots that the call takes in group g, once victims are gone.
     * Notes a group that lacks slots, as kvc_exceeds_capacity does.  NULL: the call takes none. */
    kvc_status (*check_slots)(const struct kvc_need *need, int32_t g);
    /* Returns what counts for max_bytes once victims are gone, and the call has taken what it needs.  NULL: it has
     * taken that already, so that everything counts as it lies. */
    int64_t (*count_bytes)(const struct kvc_need *need);
    /* Visits the rows of group g that the call itself drops in the end.  NULL: none. */
    void (*visit_replaced)(const struct kvc_need *need, int32_t g, kvc_part_fn *visit, void *to);
    void *context;
    const char *what;   /* begins messages ... */
    int32_t num_tokens; /* ... unless the call adds tokens, of which this is the number */
    /* KVC_FIXED: check_slots and count_bytes count all that may be evicted as evicted, which takes no time. */
    kvc_scope scope;
    int32_t expires;         /* whether the call expires rows, as kvc_begin does */
    int32_t takes_no_memory; /* whether new blocks count as lacking, too: the system has refused memory for one */
    int64_t before;          /* not 0: only sequences with a lower kvc_sequence.evicting.used are evicted */
} kvc_need;

/* Returns KVC_ERR_FULL unless the call fits once victims are gone, and notes what is lacking. */
kvc_status kvc_fits(const kvc_need *need);

/* Chooses the fewest least recently used victims with which the call fits, and of these only sequences that free
 * what is lacking, by themselves or together.  The call does not look at sequences that free none of it
 * (cache/useful.h).  A victim is dropped.  If others hold all its rows in the groups that see everything, it only
 * loses the rows of the other groups, unless bytes are lacking and its state frees some.  After a failure there are no
 * victims.  The need is asked last for the victims chosen. */
kvc_status kvc_choose_victims(const kvc_need *need);

/* Chooses victims again, with which the call also needs no new block.  Returns KVC_ERR_NOMEM if no victims suffice. */
kvc_status kvc_choose_for_free_blocks(kvc_need need);

/* Returns what kvc_choose_victims does, and lets them stay: for a call that evicts them later, by kvc_make_room, as
 * something else may fail before. */
kvc_status kvc_check_room(const kvc_need *need);

/* Lets all victims stay. */
void kvc_let_victims_stay(kvc_cache *cache);

/* Evicts the victims. */
void kvc_evict(kvc_cache *cache);

/* Chooses victims, evicts them, and gives back memory to stay within max_bytes: the last step of a call that can
 * fail. */
kvc_status kvc_make_room(const kvc_need *need);

/* Returns the slots of group g that will be live: after the expiry, without what the call drops, and without victims
 * or, in KVC_FIXED, all that may be evicted. */
int64_t kvc_live_after(const kvc_need *need, int32_t g, kvc_scope scope);

/* Sets *live to kvc_live_after.  Returns whether *live + more exceeds the capacity, and notes that in lacks_slots. */
int kvc_exceeds_capacity(const kvc_need *need, int32_t g, int64_t more, int64_t *live);

#endif
