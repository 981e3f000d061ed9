/* topk.h: finds the best of many entries.
 *
 * The rule: a larger score is better, NaN is the largest, and -0 is 0.  If scores are equal, the earlier entry is
 * better.  Scores are compared as keys, integers in the same order.
 */
#ifndef KVC_TOPK_H
#define KVC_TOPK_H

#include <stdint.h>
#include <string.h>

#include "base/compiler.h"

enum {
    KVC_NO_KEY = 0,                     /* below the key of any score: the entry is never chosen */
    KVC_FEW_KEYS = KVC_SIZE(1 << 11, 4) /* fewer keys than this are looked at by themselves */
};

/* Return the key of a score, and the score of a key.  All NaN have one key. */
static inline uint32_t kvc_key_of(float score) {
    uint32_t bits;
    score += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &score, sizeof bits);
    const uint32_t key = bits ^ ((0 - (bits >> 31)) | 0x80000000u); /* without a branch: compilers make vectors of it */
    return score != score ? UINT32_MAX : key;
}
static inline float kvc_score_of(uint32_t key) {
    const uint32_t bits = key == UINT32_MAX ? 0x7fc00000u : key >> 31 ? key ^ 0x80000000u : ~key;
    float score;
    memcpy(&score, &bits, sizeof score);
    return score;
}

/* Entries by their keys.  Entries in [0, first) and in [local, local_end) are forced: better than all others. */
typedef struct kvc_entries {
    const uint32_t *keys; /* [num] */
    int64_t num, first, local, local_end;
} kvc_entries;

/* Writes the indices of the `most` best entries, or of all if there are fewer, ascending.  Returns their number. */
int32_t kvc_topk(const kvc_entries *entries, int32_t most, int32_t *out);

#endif
