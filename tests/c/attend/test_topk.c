/* Choosing the best of many entries, against sorting them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend/topk.h"
#include "support/test.h"

enum { MOST = 6000 };

static float scores[MOST];
static uint8_t is_present[MOST], is_forced[MOST];

/* Orders two entries as the rule says, by their scores. */
static int compare(const void *a, const void *b) {
    const int i = *(const int *)a, j = *(const int *)b;
    const int x_nan = isnan(scores[i]) != 0, y_nan = isnan(scores[j]) != 0;
    if (is_forced[i] != is_forced[j]) return is_forced[j] - is_forced[i];
    if (x_nan != y_nan) return y_nan - x_nan;
    if (!x_nan && scores[i] != scores[j]) return scores[i] < scores[j] ? 1 : -1;
    return i - j;
}

static int by_index(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static void check(int n, int most, int first, int local, int local_end) {
    static uint32_t keys[MOST];
    static int order[MOST], out[MOST + 1];
    int num = 0;
    for (int i = 0; i < n; i++) {
        is_forced[i] = i < first || (i >= local && i < local_end);
        keys[i] = is_present[i] ? kvc_key_of(scores[i]) : KVC_NO_KEY;
        if (is_present[i]) order[num++] = i;
    }
    qsort(order, (size_t)num, sizeof *order, compare);
    if (num > most) num = most;
    qsort(order, (size_t)num, sizeof *order, by_index);
    out[most] = -7;
    const kvc_entries entries = {keys, n, first, local, local_end};
    const int found = kvc_topk(&entries, most, out);
    CHECKF(found == num && out[most] == -7, "%d of %d entries: %d chosen, not %d", most, n, found, num);
    CHECKF(!memcmp(out, order, (size_t)num * sizeof *out), "%d of %d entries", most, n);
}

/* A score; the larger `kind`, the more scores are equal. */
static float score_of(int kind) {
    static const float some[] = {0, -0.0f, 1, -1, INFINITY, -INFINITY, NAN, -NAN, 1e-45f, -1e-45f, 3e38f, -3e38f};
    if (kind == 0) return random_float();
    if (kind == 1) return random_int(0, 4) ? 0 : random_float();
    if (kind == 2) return (float)random_int(-3, 4);
    if (kind == 3) return some[random_int(0, (int)(sizeof some / sizeof *some))];
    if (kind == 4) return 1 + random_float() * 1e-2f; /* many keys agree in their first digit, ... */
    if (kind == 5) return 1 + random_float() * 1e-5f; /* ... and in two */
    return 0;
}

static void test_choices(void) {
    for (int t = 0; t < (is_full() ? 3000 : 300); t++) {
        const int n = random_int(0, 20) ? random_int(0, 60) : random_int(0, MOST), kind = random_int(0, 7);
        const int all_present = random_int(0, 3);
        for (int i = 0; i < n; i++) {
            scores[i] = score_of(kind);
            is_present[i] = (uint8_t)(all_present || random_int(0, 3));
        }
        const int first = random_int(0, 3) ? 0 : random_int(0, n + 1);
        const int local = random_int(0, 3) ? n : random_int(0, n + 1);
        const int local_end = random_int(local, n + 1);
        check(n, 1, first, local, local_end);
        check(n, n ? random_int(1, n + 1) : 1, first, local, local_end);
        for (int most = n - 1; most <= n + 1; most++)
            if (most >= 1 && most < MOST) check(n, most, first, local, local_end);
    }
}

/* About KVC_FEW_KEYS keys have the digits that were found: the first one, or the first two.  The others lie between. */
static void test_few_keys(void) {
    for (int digits = 1; digits <= 2; digits++)
        for (int few = KVC_FEW_KEYS - 2; few <= KVC_FEW_KEYS + 2; few++) {
            for (int i = 0; i < MOST; i++) {
                const float any = fabsf(random_float()); /* digits are of 11 bits: the second one ends with the 13th of
                                                            the fraction */
                const int is_few = i % 2 == 0 && i / 2 < few;
                is_present[i] = 1;
                if (digits == 1) scores[i] = is_few ? 1 + any * 0.2f : -1 - any;
                if (digits == 2) scores[i] = is_few ? 1.125f + any * 0x1p-14f : 1 + any * 0.1f;
            }
            for (int most = 1; most <= few; most += few / 3) check(MOST, most, 0, MOST, MOST);
        }
}

/* A few of many entries are chosen, which a sample of them tells more or less of.  It tells nothing where scores repeat
 * as often as the sample takes one (kind 7), and too little where the best ones are in one place (kind 8). */
static void test_samples(void) {
    for (int t = 0; t < (is_full() ? 3000 : 300); t++) {
        const int n = MOST - random_int(0, 1000), kind = t % 9, period = random_int(2, 9), at = random_int(0, n);
        for (int i = 0; i < n; i++) {
            const float any = random_float();
            scores[i] = kind == 7 ? (i % period ? any : 2 + any) : kind == 8 ? (abs(i - at) < 200 ? 2 + any : any) : 0;
            if (kind < 7) scores[i] = score_of(kind);
            is_present[i] = (uint8_t)(t % 2 || random_int(0, 30));
        }
        const int local = random_int(0, 2) ? n - random_int(0, 300) : random_int(0, n);
        check(n, random_int(1, 400), random_int(0, 50), local, random_int(local, n + 1));
    }
}

/* Keys are in the order of scores, and none is that of no score. */
static void test_keys(void) {
    static const float rising[] = {-INFINITY, -3e38f, -1, -1e-45f, 0, 1e-45f, 1, 3e38f, INFINITY, NAN};
    const int n = (int)(sizeof rising / sizeof *rising);
    for (int i = 0; i < n; i++) {
        const uint32_t key = kvc_key_of(rising[i]);
        CHECK(key > KVC_NO_KEY && (i == 0 || key > kvc_key_of(rising[i - 1])));
        CHECK(i == n - 1 ? isnan(kvc_score_of(key)) : kvc_score_of(key) == rising[i]);
    }
    CHECK(kvc_key_of(-0.0f) == kvc_key_of(0) && kvc_key_of(-NAN) == kvc_key_of(NAN));
    CHECK(!signbit(kvc_score_of(kvc_key_of(-0.0f))));
}

int main(void) {
    test_keys();
    test_choices();
    test_few_keys();
    test_samples();
    return test_result();
}
