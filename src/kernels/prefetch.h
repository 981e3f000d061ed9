/* prefetch.h: prefetching memory while a loop works on other rows; part of template.h.
 *
 * A loop prefetches a line for every line's worth of bytes that it loads, right there: one instruction with a constant
 * offset, and an addition for each step.  So prefetches are spread evenly, in address order.  Issued in bursts, even of
 * four, or faster than memory delivers, they stall the demand loads behind them, or are dropped.
 */

enum { LINE = 64 }; /* bytes of a cache line */

/* Counts the bytes of num_vecs vectors of elements, and the cache lines that they fill, rounded up. */
INLINE int vector_bytes(int type, int num_vecs) { return (int)bytes_of(type, num_vecs * LANES); }
INLINE int lines_of(int type, int num_vecs) { return (vector_bytes(type, num_vecs) + LINE - 1) / LINE; }

typedef struct prefetcher {
    const char *at, *end; /* what is left to prefetch */
    ptrdiff_t step;       /* bytes that `at` moves for each line that the loop loads; 0: nothing, and `at` is loaded */
    int level;            /* as in kvc_ahead */
} prefetcher;

/* Begins to prefetch `next` while a loop loads `lines` lines, evenly.  A step is a line at most: if the loop loads too
 * few lines, prefetch_rest prefetches what is left.  idle: an address that the loop loads, prefetched if `next` is
 * empty.  APART, which target.h defines, keeps compilers from inlining it. */
APART prefetcher prefetch_begin(kvc_ahead next, const void *idle, int lines) {
    if (next.bytes <= 0) return (prefetcher){.at = idle, .end = idle, .step = 0, .level = next.level};
    const int step = lines > 0 ? (next.bytes + lines - 1) / lines : 0;
    const char *begin = next.begin;
    return (prefetcher){.at = begin, .end = begin + next.bytes, .step = step < LINE ? step : LINE, .level = next.level};
}

/* Prefetches the next line.  The empty asm keeps addresses a chain: prefetches that are ready at once reach the cache
 * in any order, and hardware that looks for ascending addresses finds none. */
INLINE void prefetch_line(prefetcher *p) {
    if (LANES == 16 && p->level == 1) /* the processors for which this is faster have AVX-512 */
        __builtin_prefetch(p->at, 0, 3);
    else
        __builtin_prefetch(p->at, 0, 2);
    p->at += p->step;
#if defined(__GNUC__)
    __asm__("" : "+r"(p->at));
#endif
}

INLINE void prefetch_step(prefetcher *p, int lines) {
    UNROLL
    for (int i = 0; i < lines; i++) prefetch_line(p);
}

/* Prefetches a line if a step begins to load one here, `offset` bytes into what it loads: a constant. */
INLINE void prefetch_at(prefetcher *p, int offset) {
    if (offset % LINE == 0) prefetch_line(p);
}

/* Takes off `all` the share of a pass over `some` of the `left` query rows that are left.  If the first pass prefetched
 * all of it, prefetches would come faster than memory delivers. */
INLINE kvc_ahead take_part(kvc_ahead *all, int some, int left) {
    kvc_ahead part = *all;
    if (all->bytes == 0) return part; /* of NULL, to which C lets nothing be added */
    if (some < left) part.bytes = all->bytes / LINE * some / left * LINE;
    all->begin = (const char *)all->begin + part.bytes;
    all->bytes -= part.bytes;
    return part;
}

INLINE void prefetch_rest(const prefetcher *p) {
    for (const char *at = p->at; at < p->end; at += LINE) __builtin_prefetch(at, 0, 2);
}
