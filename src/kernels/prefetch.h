/* prefetch.h: prefetching rows while a loop works on others; part of template.h.
 *
 * Prefetches are issued at a constant rate, in address order, spread over the steps of the loop.  Issued faster than
 * memory delivers, they stall the demand loads behind them, or are dropped.
 */

enum { LINE = 64 }; /* bytes of a cache line */

typedef struct prefetcher {
    const void *const *row; /* the next row to begin */
    const char *at, *end;   /* what is left of the row before it */
    int bytes, level;       /* as in kvc_ahead */
    int lines, steps;       /* lines to prefetch, and steps to do it in */
    int due;                /* lines that are due, times steps: a fraction is carried over */
} prefetcher;

/* Prefetches n rows in `steps` steps.  Takes rows that lie one after the other as one, so that a line which two of them
 * share is prefetched once. */
INLINE prefetcher prefetch_begin(kvc_ahead next, int n, int steps) {
    if (!next.rows) n = 0;
    if (n && (uintptr_t)next.rows[n - 1] - (uintptr_t)next.rows[0] == (size_t)(n - 1) * (size_t)next.bytes) {
        next.bytes *= n;
        n = 1;
    }
    return (prefetcher){next.rows, NULL, NULL, next.bytes, next.level, n * ((next.bytes + LINE - 1) / LINE), steps, 0};
}

/* Issues the prefetches of one step. */
INLINE void prefetch_step(prefetcher *p) {
    for (p->due += p->lines; p->due >= p->steps; p->due -= p->steps, p->at += LINE) {
        if (p->at >= p->end) {
            p->at = *p->row++;
            p->end = p->at + p->bytes;
        }
        if (LANES == 16 && p->level == 1) /* the processors for which this is faster have AVX-512 */
            __builtin_prefetch(p->at, 0, 3);
        else
            __builtin_prefetch(p->at, 0, 2);
    }
}
