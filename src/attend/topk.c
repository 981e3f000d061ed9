/* topk.c: see topk.h.
 *
 * This is a radix selection.  It finds the key of the last entry that is chosen, digit by digit, highest first.  It
 * counts how often each digit occurs among the keys that have the digits found so far, which tells the next digit.  A
 * pass in order then takes each entry with a larger key, and as many entries with that very key as are still missing.
 * So there is no sort, and time does not depend on how scores are distributed.
 */
#include "attend/topk.h"

/* Entries [begin, end). */
typedef struct range {
    int64_t begin, end;
} range;

enum { MOST_RANGES = 4, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, HISTOGRAMS = 2 };

/* Entries with a key above `least` are chosen, and the first num_equal of those whose key it is. */
typedef struct threshold {
    uint32_t least;
    int64_t num_equal;
} threshold;

static int64_t count_entries(const uint32_t *keys, const range *ranges, int num) {
    int64_t n = 0;
    for (int r = 0; r < num; r++)
        for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) n += keys[i] != KVC_NO_KEY;
    return n;
}

/* Counts the digits `shift` bits above the lowest one, of keys that agree with `prefix` above them.  Uses histograms in
 * turns: with equal digits, each increment would wait for the one before. */
static inline void count_digits(uint32_t counts[HISTOGRAMS][DIGITS], const uint32_t *keys, range in, int shift,
                                int bits, uint32_t prefix) {
    const int above = shift + bits;
    const uint32_t mask = (1u << bits) - 1;
    for (int64_t i = in.begin; i < in.end; i++) {
        const uint32_t key = keys[i];
        if (above == 32 || key >> above == prefix) counts[i & 1][key >> shift & mask]++;
    }
}

/* Copies the keys of ranges that have the digits `prefix` above `shift` bits: fewer than KVC_FEW_KEYS.  Returns how
 * many these are. */
static int64_t gather_keys(uint32_t few[KVC_FEW_KEYS], const uint32_t *keys, const range *ranges, int num, int shift,
                           uint32_t prefix) {
    int64_t n = 0;
    for (int r = 0; r < num; r++)
        for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) {
            few[n] = keys[i];
            n += keys[i] >> shift == prefix;
        }
    return n;
}

/* Finds the threshold of the `most` best entries of ranges that have more.  Once few keys have the digits that were
 * found, only these are looked at. */
static threshold find_threshold(const uint32_t *keys, const range *ranges, int num, int64_t most) {
    static const int BITS[] = {DIGIT_BITS, 11, 10};
    uint32_t few[KVC_FEW_KEYS], prefix = 0;
    range all_few = {0, KVC_FEW_KEYS};
    for (int step = 0, shift = 32; step < 3; step++) {
        uint32_t counts[HISTOGRAMS][DIGITS] = {{0}}, n;
        shift -= BITS[step];
        for (int r = 0; r < num; r++)
            if (step == 0)
                count_digits(counts, keys, ranges[r], 32 - DIGIT_BITS, DIGIT_BITS, 0); /* numbers that are constant */
            else
                count_digits(counts, keys, ranges[r], shift, BITS[step], prefix);
        uint32_t digit = (1u << BITS[step]) - 1;
        while ((n = counts[0][digit] + counts[1][digit]) < most && digit) most -= n, digit--;
        prefix = prefix << BITS[step] | digit;
        if (n >= KVC_FEW_KEYS || keys == few) continue;
        all_few.end = gather_keys(few, keys, ranges, num, shift, prefix);
        keys = few, ranges = &all_few, num = 1;
    }
    return (threshold){prefix, most};
}

/* Appends the indices of entries of a range that are good enough to out[0 .. num); returns how many there are then. */
static int32_t take(const uint32_t *keys, range in, threshold *t, int32_t *out, int32_t num, int32_t most) {
    const uint32_t least = t->least;
    int64_t left = t->num_equal;
    for (int64_t i = in.begin; i < in.end && num < most; i++) {
        const int is_equal = keys[i] == least && left > 0;
        out[num] = (int32_t)i;
        num += keys[i] > least || is_equal;
        left -= is_equal;
    }
    t->num_equal = left;
    return num;
}

int32_t kvc_topk(const kvc_entries *e, int32_t most, int32_t *out) {
    const threshold all = {KVC_NO_KEY, 0};
    const int64_t local = e->local > e->first ? e->local : e->first;
    const int64_t local_end = e->local_end > local ? e->local_end : local;
    const range in_order[MOST_RANGES] = {{0, e->first}, {e->first, local}, {local, local_end}, {local_end, e->num}};
    const range forced[2] = {in_order[0], in_order[2]}, others[2] = {in_order[1], in_order[3]};
    const int64_t num_forced = count_entries(e->keys, forced, 2);
    threshold t[2] = {all, all}; /* of others, and of those that are forced */
    if (num_forced > most) {
        t[0] = (threshold){UINT32_MAX, 0};
        t[1] = find_threshold(e->keys, forced, 2, most);
    } else if (count_entries(e->keys, others, 2) > most - num_forced) {
        t[0] = num_forced == most ? (threshold){UINT32_MAX, 0} : find_threshold(e->keys, others, 2, most - num_forced);
    }
    int32_t num = 0;
    for (int r = 0; r < MOST_RANGES; r++) num = take(e->keys, in_order[r], &t[r % 2 == 0], out, num, most);
    return num;
}
