/* origin.h: which prefixes have forgotten tokens whose rows a sequence may hold.
 *
 * A prefix has a bit of kvc_origin.forgotten_in.  A follower's sequence gets the bit when its prefix says so.  A
 * sequence that nobody follows may hold rows of any tokens: it has the bit once the prefix forgets a prompt, and nobody
 * need look for it then.  A sequence has noted its bits at one moment.  Each bit has the date of the last prompt that
 * was forgotten, which tells whether that came later.
 *
 * All functions are called with the mutex held.
 */
#ifndef KVC_ORIGIN_H
#define KVC_ORIGIN_H

#include "cache/cache.h"

/* Take a bit for a new prefix, an unused one as long as one is left, and give it back.  The first returns -1 if out of
 * memory. */
int32_t kvc_origin_take_bit(kvc_cache *cache);
void kvc_origin_give_bit(kvc_cache *cache, int32_t bit);

/* Notes that a prefix with this bit forgets a prompt: all sequences that nobody follows may hold rows of it. */
void kvc_origin_forget(kvc_cache *cache, int32_t bit);

/* Returns whether a sequence has a bit. */
int kvc_origin_has(const kvc_cache *cache, const kvc_sequence *sequence, int32_t bit);

/* Brings the bits of a sequence up to date.  Call it before a follower comes or goes. */
void kvc_origin_renew(const kvc_cache *cache, kvc_sequence *sequence);

/* Gives a sequence that somebody follows a bit. */
void kvc_origin_mark(const kvc_cache *cache, kvc_sequence *sequence, int32_t bit);

/* Adds the origin of more rows, those of another sequence. */
void kvc_origin_add(const kvc_cache *cache, kvc_sequence *sequence, const kvc_sequence *more);

/* Notes that the prefix with this number keeps the rows from now on. */
void kvc_origin_keep(const kvc_cache *cache, kvc_sequence *sequence, int64_t prefix);

/* Makes it the origin of a sequence that holds nothing. */
void kvc_origin_reset(const kvc_cache *cache, kvc_sequence *sequence);

#endif
