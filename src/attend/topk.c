/* topk.c: finds the best of many entries: see topk.h.
 *
 * This is a radix selection.  It finds the key of the last entry that is chosen, digit by digit, highest first.  It
 * counts how often each digit occurs among the keys that have the digits found so far, which tells the next digit.  A
 * pass in order then takes each entry with a larger key, and as many entries with that very key as are still missing.
 * So there is no sort, and time does not depend on how scores are distributed.
 *
 * If few of many entries are chosen, a sample of keys gives a bound.  Somewhat more entries than are chosen reach it.
 * The first pass lists these candidates.  Further passes look at nothing else.
 * Forced entries, [0, first) and [local, local_end), are better than others.  A pool is the forced ones, or the others.
 */
#include "attend/topk.h"

/* Entries [begin, end). */
typedef struct range {
    int64_t begin, end;
} range;

/* The entries of two ranges.  Entry i is number ids[i] of all entries, or number i if ids is NULL. */
typedef struct pool {
    const uint32_t *keys; /* larger for better entries; KVC_NO_KEY: the entry may not be chosen */
    range ranges[2];
    const int32_t *ids;
} pool;

enum {
    DIGIT_BITS = 11,
    DIGITS = 1 << DIGIT_BITS,
    NUM_DIGITS = 3,
    HISTOGRAMS = 2,
    SAMPLES = KVC_FEW_KEYS / 2, /* keys in a sample */
    LEAST_STEP = 4              /* from one to the next, at least: a sample of fewer entries does not pay */
};

/* Entries with a key above `least` are chosen, and the first num_equal of those whose key it is. */
typedef struct threshold {
    uint32_t least;
    int64_t num_equal;
} threshold;

static int64_t count_entries(const pool *p) {
    int64_t n = 0;
    for (int r = 0; r < 2; r++)
        for (int64_t i = p->ranges[r].begin; i < p->ranges[r].end; i++) n += p->keys[i] != KVC_NO_KEY;
    return n;
}

/* Counts how often each digit, the `bits` bits above the lowest `shift`, occurs in keys whose bits above it are
 * `prefix`. Uses histograms in turns: with equal digits, each increment would wait for the one before. */
static inline void count_digits(uint32_t counts[HISTOGRAMS][DIGITS], const uint32_t *keys, range in, int shift,
                                int bits, uint32_t prefix) {
    const int above = shift + bits;
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t i = in.begin; i < in.end; i++) {
        const uint32_t key = keys[i];
        if (above == 32 || key >> above == prefix) counts[i & 1][key >> shift & mask]++;
    }
}

/* Copies the keys of a pool whose bits above the lowest `shift` are `prefix`.  Returns their number, which is below
 * KVC_FEW_KEYS, so that the last write fits, too. */
static int64_t gather_keys(uint32_t few[KVC_FEW_KEYS], const pool *p, int shift, uint32_t prefix) {
    int64_t n = 0;
    for (int r = 0; r < 2; r++)
        for (int64_t i = p->ranges[r].begin; i < p->ranges[r].end; i++) {
            few[n] = p->keys[i]; /* without a branch: the next key replaces it if it does not count */
            n += p->keys[i] >> shift == prefix;
        }
    return n;
}

/* Finds the threshold of the `most` best entries of a pool that has more, by the first num_digits digits; the others
 * become 0.  Once few keys have the digits that were found, only these keys are looked at. */
static threshold find_threshold(const pool *of, int64_t most, int num_digits) {
    static const int BITS[NUM_DIGITS] = {DIGIT_BITS, 11, 10};
    uint32_t few[KVC_FEW_KEYS], prefix = 0;
    pool p = *of;
    int shift = 32;
    for (int step = 0; step < num_digits; step++) {
        uint32_t counts[HISTOGRAMS][DIGITS] = {{0}}, n;
        shift -= BITS[step];
        for (int r = 0; r < 2; r++)
            if (step == 0)
                count_digits(counts, p.keys, p.ranges[r], 32 - DIGIT_BITS, DIGIT_BITS, 0); /* by constants: faster */
            else
                count_digits(counts, p.keys, p.ranges[r], shift, BITS[step], prefix);
        uint32_t digit = (1u << BITS[step]) - 1;
        /* The digit of the key of rank `most`; `most` becomes that key's rank among the keys with this digit. */
        while ((n = counts[0][digit] + counts[1][digit]) < most && digit) most -= n, digit--;
        prefix = prefix << BITS[step] | digit;
        if (n >= KVC_FEW_KEYS || p.keys == few || step + 1 == num_digits) continue;
        p = (pool){few, {{0, gather_keys(few, &p, shift, prefix)}, {0, 0}}, NULL};
    }
    return (threshold){prefix << shift, most};
}

/* Returns a key that the `most` best entries of a pool reach, and somewhat more, as a sample of every step-th key
 * suggests.  Returns KVC_NO_KEY if so many may reach it that a list of them does not pay. */
static uint32_t guess_bound(const pool *p, int64_t most, int64_t size) {
    const int64_t step = size / SAMPLES + 1, expected = most / step, wanted = expected + expected / 4 + 6;
    uint32_t keys[SAMPLES + 2];
    pool sample = {keys, {{0, 0}, {0, 0}}, NULL};
    if (step < LEAST_STEP || wanted * step > KVC_FEW_KEYS * 3 / 4 || 4 * wanted > size / step) return KVC_NO_KEY;
    for (int r = 0; r < 2; r++)
        for (int64_t i = p->ranges[r].begin; i < p->ranges[r].end; i += step) keys[sample.ranges[0].end++] = p->keys[i];
    return find_threshold(&sample, wanted, 1).least;
}

/* Narrows a pool to fewer than KVC_FEW_KEYS entries, with the `most` best; not if no bound fits. */
static void narrow(pool *p, int64_t most, uint32_t keys[KVC_FEW_KEYS], int32_t ids[KVC_FEW_KEYS]) {
    const int64_t size = p->ranges[0].end - p->ranges[0].begin + p->ranges[1].end - p->ranges[1].begin;
    const uint32_t bound = guess_bound(p, most, size);
    pool found = {.keys = keys, .ids = ids};
    int64_t num = 0;
    if (bound == KVC_NO_KEY) return;
    for (int r = 0; r < 2; r++) {
        found.ranges[r].begin = num;
        for (int64_t i = p->ranges[r].begin; i < p->ranges[r].end && num < KVC_FEW_KEYS; i++) {
            keys[num] = p->keys[i], ids[num] = (int32_t)i;
            num += p->keys[i] >= bound;
        }
        found.ranges[r].end = num;
    }
    if (num >= most && num < KVC_FEW_KEYS) *p = found;
}

/* Appends the numbers of the entries of range r that reach the threshold to out[0 .. num), up to `most`.  Returns the
 * new length.  Entries with the very key of the threshold are taken while t->num_equal lasts. */
static int32_t take(const pool *p, int r, threshold *t, int32_t *out, int32_t num, int32_t most) {
    const uint32_t *const keys = p->keys, least = t->least;
    const int32_t before = num;
    int64_t left = t->num_equal;
    for (int64_t i = p->ranges[r].begin; i < p->ranges[r].end && num < most; i++) {
        const int is_equal = keys[i] == least && left > 0;
        out[num] = (int32_t)i;
        num += keys[i] > least || is_equal;
        left -= is_equal;
    }
    for (int32_t i = before; p->ids && i < num; i++) out[i] = p->ids[out[i]];
    t->num_equal = left;
    return num;
}

/* Takes all forced entries, and the best others for the rest of `most`; if more are forced, only the best of these. */
int32_t kvc_topk(const kvc_entries *e, int32_t most, int32_t *out) {
    const threshold all = {KVC_NO_KEY, 0}, none = {UINT32_MAX, 0};
    const int64_t local = e->local > e->first ? e->local : e->first;
    const int64_t local_end = e->local_end > local ? e->local_end : local;
    const pool forced = {e->keys, {{0, e->first}, {local, local_end}}, NULL};
    pool others = {e->keys, {{e->first, local}, {local_end, e->num}}, NULL};
    const int64_t left = most - count_entries(&forced);
    threshold of_forced = all, of_others = all;
    uint32_t keys[KVC_FEW_KEYS];
    int32_t ids[KVC_FEW_KEYS], num = 0;
    if (left > 0) narrow(&others, left, keys, ids);
    if (left < 0) of_forced = find_threshold(&forced, most, NUM_DIGITS);
    if (left <= 0)
        of_others = none;
    else if (count_entries(&others) > left)
        of_others = find_threshold(&others, left, NUM_DIGITS);
    for (int r = 0; r < 2; r++) {
        num = take(&forced, r, &of_forced, out, num, most);
        num = take(&others, r, &of_others, out, num, most);
    }
    return num;
}
