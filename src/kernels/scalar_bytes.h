/* scalar_bytes.h: prompts in bytes; part of scalar.c.  Panels are rows of int8, one after the other.
 *
 * Each query row, key and value has int8 codes and a unit, what a code of 1 stands for.  Scores of values are raised by
 * the logarithm of their unit before the softmax, whose weights are rounded to bytes (kvc_weigh_bytes_fn).
 */

static void pack_bytes(void *panel, const void *rows, int64_t row_stride, int first, int n, int dim) {
    for (int j = 0; j < n; j++)
        memcpy((char *)panel + (ptrdiff_t)(first + j) * dim, (const char *)rows + j * row_stride, (size_t)dim);
}

static void score_bytes(float *scores, const float *q, int q_stride, int num_q, const void *panel, const float *units,
                        int n, int dim) {
    for (int r = 0; r < num_q; r++) {
        kvc_byte_query query;
        const char *const row = (const char *)(q + (ptrdiff_t)r * q_stride);
        const int8_t *const codes = (const int8_t *)row + KVC_BYTE_CODES, *key = panel;
        memcpy(&query, row, sizeof query);
        for (int j = 0; j < n; j++, key += dim) {
            int32_t sum = 0;
            for (int d = 0; d < dim; d++) sum += codes[d] * key[d];
            const float product = (float)sum * units[j];
            scores[r * KVC_BYTE_SCORES + j] = product * query.unit;
        }
    }
}

/* Returns exp(x) for x <= 0, by the operations of exp_negative in softmax.h. */
static float exp_negative(float x) {
    static const float factors[] = {
        0x1.6a23dp-10f, 0x1.123a2p-7f, 0x1.5558f2p-5f, 0x1.555492p-3f, 0x1.fffffcp-2f, 1, 1};
    const float scale_of_1 = 0x1.8p23f + 127, scale = fmaf(x, 1.44269504088896341f, scale_of_1), n = scale - scale_of_1;
    const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, x));
    float p = factors[0];
    for (int f = 1; f < 7; f++) p = fmaf(p, r, factors[f]);
    return x < -87 ? 0 : p * float_of(bits_of(scale) << 23);
}

/* Returns x less the maximum; 0 where both are infinite. */
static float below(float x, float max) { return x == -INFINITY && max == -INFINITY ? 0 : x - max; }

/* Turns scores into weights of 8 bits, in their place.  Adds up in KVC_LANES sums, as sets with vectors do. */
static void weigh_bytes(float *scores, int num_q, int n, const kvc_byte_units *units, float *max, float *sum,
                        float *factor, float *unit) {
    for (int r = 0; r < num_q; r++) {
        float *const row = scores + r * KVC_BYTE_SCORES, sums[KVC_LANES] = {0}, largest = -INFINITY;
        uint8_t *const weights = (uint8_t *)row;
        for (int j = 0; j < n; j++) {
            row[j] += units->logs[j];
            if (row[j] > largest) largest = row[j];
        }
        for (int j = 0; j < n; j++) {
            const float e = exp_negative(row[j] - (largest == -INFINITY ? 0 : largest));
            sums[j % KVC_LANES] = fmaf(e, units->inverses[j], sums[j % KVC_LANES]);
            weights[j] = e <= 1 ? (uint8_t)lrintf(e * 255) : 0; /* e may be NaN */
        }
        memset(weights + n, 0, (size_t)(kvc_padded_rows(n) - n));
        const float now = largest > max[r] ? largest : max[r], part = exp_negative(below(largest, now));
        factor[r] = exp_negative(below(max[r], now));
        unit[r] = part * (1.0f / 255);
        sum[r] = fmaf(sum[r], factor[r], kvc_add_up(sums) * part);
        max[r] = now;
    }
}

static void sum_bytes(float *acc, int acc_stride, const float *factor, const float *unit, const float *weights,
                      int num_q, const void *panel, int n, int dim) {
    for (int r = 0; r < num_q; r++) {
        const uint8_t *const w = (const uint8_t *)(weights + r * KVC_BYTE_SCORES);
        for (int d = 0; d < dim; d++) {
            int32_t sum = 0;
            for (int j = 0; j < n; j++) sum += w[j] * ((const int8_t *)panel)[j * dim + d];
            float *const to = &acc[(ptrdiff_t)r * acc_stride + d];
            *to = fmaf((float)sum, unit[r], *to * factor[r]);
        }
    }
}
