/* softmax.h: steps of the online softmax; part of template.h. */

enum { EXPS = 4 }; /* vectors that exp is taken of together */

/* Replaces x <= 0 by exp(x), or by 0 below -125.5 ln 2 = -87.0.  x = n ln 2 + r with n an integer, so that exp(x) = 2^n
 * exp(r), and exp(r) = 1 + r + r^2 p(r), p as in Cephes' expf.  Takes `count` vectors side by side, as each step waits
 * for the one before. */
INLINE void exp_negative(int count, vec *x) {
    static const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                    5.0000001201e-1f};
    vec n[EXPS], p[EXPS];
    UNROLL
    for (int i = 0; i < count; i++) n[i] = v_round(v_mul(x[i], v_set(1.44269504088896341f)));
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_fma(n[i], v_set(-0.693359375f), x[i]); /* r, from ln 2 in two parts: */
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_fma(n[i], v_set(2.12194440e-4f), x[i]); /* n times the first is exact */
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(v_set(1.9875691500e-4f), x[i], v_set(factors[0]));
    UNROLL
    for (int f = 1; f < 5; f++) UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], x[i], v_set(factors[f]));
    UNROLL
    for (int i = 0; i < count; i++) p[i] = v_fma(p[i], v_mul(x[i], x[i]), x[i]);
    UNROLL
    for (int i = 0; i < count; i++) x[i] = v_scale(v_add(p[i], v_set(1.0f)), n[i]);
}

/* Finds all rows' largest scores first, then computes their weights, as the steps for one row wait for each other. */
INLINE void softmax_rows(float *scores, int num_q, int n, float *max, float *sum, float *factor) {
    const int step = EXPS * LANES, padded = (n + step - 1) / step * step;
    for (int r = 0; r < num_q; r++) {
        float *row = scores + r * KVC_TILE;
        vec largest = v_set(max[r]);
        int past = n;
        for (; past % LANES; past++) row[past] = -INFINITY;
        for (; past < padded; past += LANES) v_store(row + past, v_set(-INFINITY));
        for (; past < KVC_TILE; past += LANES) v_store(row + past, v_zero());
        for (int j = 0; j < padded; j += LANES) largest = v_max(v_load(row + j), largest);
        const float now = v_max_lane(largest);
        factor[r] = 1;
        if (max[r] != now) {
            vec change = v_set(max[r] - (now == -INFINITY ? 0 : now));
            exp_negative(1, &change);
            factor[r] = v_max_lane(change);
        }
        max[r] = now;
    }
    for (int r = 0; r < num_q; r++) {
        float *row = scores + r * KVC_TILE;
        /* where nothing is visible, weights become 0, or stay NaN */
        const vec shift = v_set(max[r] == -INFINITY ? 0 : -max[r]);
        vec total = v_zero();
        for (int j = 0; j < padded; j += step) {
            vec x[EXPS];
            UNROLL
            for (int i = 0; i < EXPS; i++) x[i] = v_add(v_load(row + j + i * LANES), shift);
            exp_negative(EXPS, x);
            UNROLL
            for (int i = 0; i < EXPS; i++) {
                v_store(row + j + i * LANES, x[i]);
                total = v_add(total, x[i]);
            }
        }
        sum[r] = sum[r] * factor[r] + v_sum_lanes(total);
    }
}

/* Multiplies rows by a number; elements past dim, too, up to the next multiple of LANES. */
INLINE void scale_rows(float *q, int q_stride, int num_q, int dim, float by) {
    for (int r = 0; r < num_q; r++)
        for (int d = 0; d < dim; d += LANES) {
            float *at = q + (ptrdiff_t)r * q_stride + d;
            v_store(at, v_mul(v_load(at), v_set(by)));
        }
}
