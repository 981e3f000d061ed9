/* prefixes.h: the prefixes of the simulated cache. */
#ifndef SIM_PREFIXES_H
#define SIM_PREFIXES_H

#include "sim.h"

/* Makes the prefixes of a world, where its layers allow them. */
void begin_prefixes(client *c);

/* Call while no other call runs.  Clears all prefixes, which may keep nothing.  Frees some prefixes, and all values of
 * the store. */
void drop_prefixes(client *c);
void end_prefixes(client *c);

/* Makes some call of a prefix, if there is one. */
void call_prefix(client *c);

/* Returns the tag of a token that a sequence is fed at a position: the next token of its prompt, or any token.
 * before: tag of the token before it; -1: its rows do not follow from its tokens alone. */
int next_tag(client *c, int s, int at, int before);

/* Returns how many first rows of a sequence follow from its tokens. */
int exact_end(const world *w, const sequence *s);

/* Notes that rows with these tags are computed now, or count as computed: a prefix that has forgotten them may keep
 * them again. */
void note_computed(const int *tags, int num);

/* Sets the tags of rows [begin, end) of a sequence to the tags of some string of tokens. */
void set_any_text(client *c, sequence *s, int begin, int end);

/* Notes that the client uses prefixes from now on, if it does not already, or commits to what they acquired; end_use
 * takes what this returned. */
int begin_use(client *c);
void end_use(client *c, int before);

/* Notes that a sequence is about to be committed up to a token. */
void note_commit(const client *c, int s, int tag);

/* Whether a prefix has a quota, so that bookkeeping may pass max_bytes. */
int has_quota(const world *w);

/* Notes when the blocks of a sequence may have been used. */
void note_use(const client *c, int s);

/* Reads the statistics of the prefixes. */
void read_prefix_stats(world *w, kvc_prefix_stats *stats);

/* Checks that quotas hold, now that others have got room. */
void check_quotas(client *c);

/* Drops the blocks of prefixes that may be evicted. */
void evict_blocks(client *c);

/* Checks that a cache has no sequences except known ones and sequences of calls of kvc_prefix_acquire.  Each call that
 * has begun by the end of this function may have two; `more` are allowed besides. */
void check_known(client *c, kvc_cache *cache, int more);

/* In the child of a fork(): checks that what calls of other threads were about to do leaves nothing behind. */
void check_prefixes_in_child(client *c);

#endif
