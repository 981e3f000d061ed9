/* softmax.h: steps of the online softmax; part of template.h.
 *
 * The state of a query row is max, its largest score so far, and sum, of exp(score - max).  A step raises max, turns a
 * tile's scores into weights, exp(score - max), and sets factor, by which sum and what was accumulated are multiplied.
 * `padded` is the number of scores in a row up to a multiple of EXPS * LANES.  Scores past the last key are -INFINITY:
 * they are no maximum, and their weights are 0.
 */

enum { EXPS = 4 /* vectors that exp is taken of together */ };

static const float LEAST_EXP = -87, SCALE_OF_1 = 0x1.8p23f + 127;

/* Replaces x <= 0 by exp(x), or by 0 below LEAST_EXP.  x = n ln 2 + r with n an integer, so that exp(x) = 2^n exp(r),
 * and exp(r) is a polynomial whose largest relative error, 3e-9, is as small as can be.  Takes `count` vectors side by
 * side, as each step waits for the one before. */
INLINE void exp_negative(int count, vec *x) {
    static const float factors[] = {0x1.123a2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1, 1};
    vec n[EXPS], p[EXPS], scale[EXPS];
    UNROLL
    for (int i = 0; i < count; i++) scale[i] = v_fma(x[i], v_set(1.44269504088896341f), v_set(SCALE_OF_1));
    UNROLL
    for (int i = 0; i < count; i++) n[i] = v_add(scale[i], v_set(-SCALE_OF_1));
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(n[i], v_set(-0.693359375f), x[i]); /* r, from ln 2 in two parts: */
    UNROLL
    for (int i = 0; i < count; i++) n[i] = v_fma(n[i], v_set(2.12194440e-4f), p[i]); /* n times the first is exact */
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(v_set(0x1.6a23dp-10f), n[i], v_set(factors[0]));
    UNROLL
    for (int f = 1; f < 6; f++) UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], n[i], v_set(factors[f]));
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_scale(p[i], scale[i], x[i], v_set(LEAST_EXP));
}

/* Pads a row of n scores: sets scores up to `padded` to -INFINITY, and those behind to 0. */
INLINE void hide_past(float *row, int n, int padded) {
    const int end = kvc_padded_rows(n);
    for (; n % LANES; n++) row[n] = -INFINITY;
    for (; n < padded; n += LANES) v_store(row + n, v_set(-INFINITY));
    for (; n < end; n += LANES) v_store(row + n, v_zero());
}

/* Stores the maxima of `count` rows of scores: the largest score of a row, or its maximum in the tiles before this one,
 * if that is larger.  Writes up to a multiple of 4. */
INLINE void store_maxima(float *maxima, const float *rows, int count, int padded, const float *before) {
    for (int first = 0; first < count; first += 4) {
        const float *row[4];
        vec x[4];
        UNROLL
        for (int i = 0; i < 4; i++) {
            const int r = smaller(first + i, count - 1);
            row[i] = rows + r * KVC_SCORES;
            x[i] = v_set(before[r]);
        }
        if (count - first == 1) { /* the other three would repeat this row */
            for (int j = 0; j < padded; j += LANES) x[0] = v_max(v_load(row[0] + j), x[0]);
        } else {
            for (int j = 0; j < padded; j += LANES) UNROLL
            for (int i = 0; i < 4; i++) x[i] = v_max(v_load(row[i] + j), x[i]);
        }
        v_store_largest(maxima + first, x);
    }
}

/* Turns a row's scores into weights, and returns their sums, lane by lane. */
INLINE vec weigh_row(float *row, int padded, float max, prefetcher *next) {
    /* where nothing is visible, weights become 0, or stay NaN */
    const vec shift = v_set(max == -INFINITY ? 0 : -max);
    vec total = v_zero();
    for (int j = 0; j < padded; j += EXPS * LANES) {
        vec x[EXPS];
        UNROLL
        for (int i = 0; i < EXPS; i++) {
            prefetch_at(next, vector_bytes(KVC_F32, i));
            x[i] = v_add(v_load(row + j + i * LANES), shift);
        }
        exp_negative(EXPS, x);
        UNROLL
        for (int i = 0; i < EXPS; i++) {
            v_store(row + j + i * LANES, x[i]);
            total = v_add(total, x[i]);
        }
    }
    return total;
}

/* Updates the state of `count` rows at once, as the steps for one wait for each other.  totals: of weights, by lane. */
INLINE void update_rows(int count, const float *maxima, const vec *totals, float *max, float *sum, float *factor) {
    const vec now = v_load_some(maxima, count);
    vec change = v_number(v_fma(now, v_set(-1), v_load_some(max, count))); /* 0 where both are infinite */
    float sums[LANES];
    for (int first = 0; first < count; first += 4) {
        vec x[4];
        UNROLL
        for (int i = 0; i < 4; i++) x[i] = totals[smaller(first + i, count - 1)];
        v_store_sums(sums + first, x);
    }
    exp_negative(1, &change);
    v_store_some(max, now, count);
    v_store_some(factor, change, count);
    v_store_some(sum, v_fma(v_load_some(sum, count), change, v_load_some(sums, count)), count);
}

/* Takes a step of the softmax for num_q query rows, LANES at a time, as the steps for one row wait for each other. */
INLINE void softmax_rows(float *scores, int num_q, int n, float *max, float *sum, float *factor, kvc_ahead next) {
    const int step = EXPS * LANES, padded = (n + step - 1) / step * step;
    prefetcher p = prefetch_begin(next, scores, num_q * (padded / KVC_LANES));
    for (int r = 0; n % KVC_PANEL && r < num_q; r++) hide_past(scores + r * KVC_SCORES, n, padded);
    for (int first = 0; first < num_q; first += LANES) {
        float *const rows = scores + first * KVC_SCORES, maxima[LANES];
        vec totals[LANES];
        const int count = smaller(LANES, num_q - first);
        store_maxima(maxima, rows, count, padded, max + first);
        for (int r = 0; r < count; r++) totals[r] = weigh_row(rows + r * KVC_SCORES, padded, maxima[r], &p);
        update_rows(count, maxima, totals, max + first, sum + first, factor + first);
    }
    prefetch_rest(&p);
}

/* Multiplies rows by a number; elements past dim, too, up to the next multiple of LANES. */
INLINE void scale_rows(float *q, int q_stride, int num_q, int dim, float by) {
    for (int r = 0; r < num_q; r++)
        for (int d = 0; d < dim; d += LANES) {
            float *at = q + (ptrdiff_t)r * q_stride + d;
            v_store(at, v_mul(v_load(at), v_set(by)));
        }
}
