/* scalar_select.h: the kernels that say which rows are to be read; part of scalar.c.
 *
 * A rank is a row's score for a choice, some query heads, each of which is a lane.  A sketch is a code of 0 to 3 for
 * each element of a key, four in a byte, which stands for code - 1.5, and a scale.  Four rows are a piece.
 */

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

/* Returns the product of a row and the query in a lane. */
static float rank_product(int type, const kvc_rank_query *q, int lane, const uint8_t *row) {
    const int elements = KVC_STEP_BYTES * KVC_TYPES[type].elements / KVC_TYPES[type].bytes;
    int32_t sum = 0;
    float sum_of_floats = 0;
    for (int i = 0; i < q->num_steps; i++, row += KVC_STEP_BYTES) {
        const uint8_t *step = (const uint8_t *)q->packed + ((ptrdiff_t)i * q->num_lanes + lane) * KVC_STEP_BYTES;
        for (int e = 0; e < elements; e++) {
            if (type == KVC_INT8)
                sum += ((const int8_t *)step)[e] * ((const int8_t *)row)[e];
            else
                sum_of_floats += load(type, step, e) * load(type, row, e);
        }
    }
    return type == KVC_INT8 ? (float)sum : sum_of_floats;
}

/* Returns a row's score for a choice.  Storing each product rounds it before it is added, as in `scaled`. */
static float rank_row(int type, const kvc_rank_query *q, int choice, const uint8_t *row, float by) {
    const int width = q->choice_lanes < KVC_LANES ? q->choice_lanes : KVC_LANES;
    float sums[KVC_LANES] = {0};
    for (int i = 0; i < q->choice_lanes; i++) {
        const int lane = choice * q->choice_lanes + i;
        const volatile float product = rank_product(type, q, lane, row) * by;
        const volatile float weighed = (q->relu && product < 0 ? 0 : product) * q->weights[lane];
        if (q->masks[lane]) sums[i % KVC_LANES] += weighed;
    }
    for (int half = width / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static void rank(int type, float *scores, const kvc_rank_query *q, const void *rows, int64_t row_stride,
                 const float *by, int n) {
    for (int c = 0; c < q->num_lanes / q->choice_lanes; c++)
        for (int j = 0; j < n; j++)
            scores[c * KVC_SCORES + j] = rank_row(type, q, c, row_at(rows, row_stride, j), by[j]);
}

/* ---- sketches ---------------------------------------------------------------------------------------------------- */

/* Makes the sketch of a key.  A code is 3 less the number of thresholds -most, 0 and most not below the element. */
static void make_sketch(char *to, const float *key, int dim) {
    float squares[KVC_LANES] = {0}, products[KVC_LANES] = {0};
    for (int d = 0; d < dim; d++) {
        const volatile float square = key[d] * key[d];
        squares[d % KVC_LANES] += square;
    }
    const float sum = kvc_add_up(squares), most = kvc_sketch_threshold(sum, dim);
    memset(to, 0, (size_t)dim / 4);
    for (int d = 0; d < dim; d++) {
        const int not_below = (-most >= key[d]) + (0 >= key[d]) + (most >= key[d]);
        const volatile float product = key[d] * (1.5f - (float)not_below);
        products[d % KVC_LANES] += product;
        to[d / 32 * 8 + d % 8] = (char)(to[d / 32 * 8 + d % 8] | (3 - not_below) << d % 32 / 8 * 2);
    }
    store(KVC_F16, to + dim / 4, 0, kvc_sketch_scale(sum, kvc_add_up(products)));
}

static void make_sketches(void *to, int64_t stride, const float *keys, int n, int dim) {
    for (int i = 0; i < n; i++) make_sketch((char *)to + i * stride, keys + (ptrdiff_t)i * dim, dim);
}

static void score_sketches(float *scores, const kvc_sketch_query *q, int num_q, const void *rows, int64_t by, int dim) {
    for (int i = 0; i < num_q * KVC_PANEL; i++) {
        const int r = i / KVC_PANEL, j = i % KVC_PANEL, n = dim / 4;
        const uint8_t *row = row_at(rows, by, j);
        float sum = q->offsets[r]; /* exact, as integers are small */
        for (int d = 0; d < dim; d++)
            sum += (float)((row[d / 32 * 8 + d % 8] >> d % 32 / 8 * 2 & 3) * q->codes[r * q->stride + d]);
        const volatile float product = sum * load(KVC_F16, row + n, 0);
        scores[r * KVC_SCORES + j % 4 * KVC_LANES + j / 4] = product * q->scales[r];
    }
}

/* Turns a tile's scores into weights of pieces.  Raises a query's exponent, and rescales, if a score is far above. */
static void weigh_pieces(float *pieces, int64_t stride, int first, const float *scores, int num_q, float *exponents,
                         float *sums) {
    const float log2_e = 1.44269504f;
    for (int r = 0; r < num_q; r++, pieces += stride, scores += KVC_SCORES, sums += KVC_LANES) {
        const float limit = (exponents[r] + KVC_SLACK) / log2_e;
        float most = limit;
        for (int j = 0; j < KVC_PANEL; j++) most = scores[j] > most ? scores[j] : most;
        if (most != limit) {
            const float before = exponents[r];
            exponents[r] = truncf(most * log2_e);
            for (int i = 0; i < KVC_LANES; i++) sums[i] *= exp2f(before - exponents[r]);
            for (int i = 0; i < first; i++) pieces[i] *= exp2f(before - exponents[r]);
        }
        for (int i = first; i < first + KVC_LANES; i++) pieces[i] = 0;
        for (int j = 0; j < KVC_PANEL; j++)
            pieces[first + j % KVC_LANES] += exp2f(scores[j] * log2_e - (exponents[r] == -INFINITY ? 0 : exponents[r]));
        for (int i = 0; i < KVC_LANES; i++) sums[i] += pieces[first + i];
    }
}
