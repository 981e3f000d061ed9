/* prefetch.h: prefetching memory while a loop works on other rows; part of template.h.
 *
 * A loop prefetches a constant number of times a step, at a constant distance, so that prefetches are spread evenly
 * over it, in address order, and cost it one instruction and one addition each.  Issued faster than memory delivers,
 * they stall the demand loads behind them, or are dropped.
 */

enum { LINE = 64 }; /* bytes of a cache line */

/* Counts the cache lines that num_vecs vectors of elements fill, rounded up. */
INLINE int lines_of(int type, int num_vecs) { return ((int)bytes_of(type, num_vecs * LANES) + LINE - 1) / LINE; }

typedef struct prefetcher {
    const char *at, *end; /* what is left to prefetch */
    ptrdiff_t step;       /* bytes from one prefetch to the next; 0: there is nothing, and `at` is in the cache */
    int level;            /* as in kvc_ahead */
} prefetcher;

/* Prefetches `next` in `count` prefetches, which may be more than it has lines; if it has more, prefetch_rest takes
 * those that are left.  idle: an address that the loop reads, to prefetch where there is nothing. */
INLINE prefetcher prefetch_begin(kvc_ahead next, const void *idle, int count) {
    if (next.bytes <= 0) return (prefetcher){idle, idle, 0, next.level};
    const int64_t step = count > 0 ? (next.bytes + count - 1) / count : 0;
    const char *begin = next.begin;
    return (prefetcher){begin, begin + next.bytes, (ptrdiff_t)(step < LINE ? step : LINE), next.level};
}

/* Prefetches `count` times: a constant. */
INLINE void prefetch_step(prefetcher *p, int count) {
    if (LANES == 16 && p->level == 1) { /* the processors for which this is faster have AVX-512 */
        UNROLL
        for (int i = 0; i < count; i++, p->at += p->step) __builtin_prefetch(p->at, 0, 3);
    } else {
        UNROLL
        for (int i = 0; i < count; i++, p->at += p->step) __builtin_prefetch(p->at, 0, 2);
    }
}

INLINE void prefetch_rest(const prefetcher *p) {
    for (const char *at = p->at; at < p->end; at += LINE) __builtin_prefetch(at, 0, 2);
}
