/* hadamard.h: multiplying by a Hadamard matrix; part of template.h. */

enum { HADAMARD_VECTORS = 8 }; /* most vectors that are kept in registers */

/* Row b: -1 in the lanes whose number has bit b, else 1. */
static const float hadamard_signs[4][16] = {{1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
                                            {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
                                            {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
                                            {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};

/* Replaces x by x + y, and y by x - y. */
INLINE void add_and_subtract(vec *x, vec *y) {
    vec sum = v_add(*x, *y);
    *y = v_fma(*y, v_set(-1), *x);
    *x = sum;
}

/* Multiplies num vectors by scale, and does the steps within them. */
INLINE void hadamard_vectors(float *dst, const char *src, int num, vec scale) {
    vec x[HADAMARD_VECTORS];
    UNROLL
    for (int i = 0; i < num; i++) x[i] = v_mul(v_load(src + (size_t)i * LANES * sizeof(float)), scale);
    UNROLL
    for (int b = 0; 1 << b < LANES; b++) {
        vec signs = v_load(hadamard_signs[b]);
        UNROLL
        for (int i = 0; i < num; i++) x[i] = v_fma(x[i], signs, v_swap(x[i], 1 << b));
    }
    UNROLL
    for (int half = 1; half < num; half *= 2) UNROLL
    for (int i = 0; i < num; i++)
        if (!(i & half)) add_and_subtract(&x[i], &x[i + half]);
    UNROLL
    for (int i = 0; i < num; i++) v_store(dst + i * LANES, x[i]);
}

/* Does the step that combines elements `half` apart. */
INLINE void hadamard_step(float *x, int n, int half) {
    for (int i = 0; i < n; i += 2 * half)
        for (int j = i; j < i + half; j += LANES) {
            vec a = v_load(x + j), b = v_load(x + j + half);
            add_and_subtract(&a, &b);
            v_store(x + j, a);
            v_store(x + j + half, b);
        }
}

/* Changes the signs that kvc_mixing says: of the lowest four bits in a table, of those above for KVC_LANES elements at
 * once. */
INLINE void change_signs(float *dst, const char *src, int n, int order) {
    static const float SIGNS[KVC_LANES] = {1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1};
    for (int i = 0; i < n; i += LANES) {
        const unsigned pairs = (unsigned)(i % order) / KVC_LANES, both = pairs & pairs >> 1 & 0x15;
        const float sign = (both ^ both >> 2 ^ both >> 4) & 1 ? -1 : 1;
        v_store(dst + i,
                v_mul(v_mul(v_load(src + (size_t)i * sizeof(float)), v_load(SIGNS + i % KVC_LANES)), v_set(sign)));
    }
}

/* The fast Walsh-Hadamard transform: scales, then does a step for each bit of the matrix's rows' numbers, lowest first:
 * in this order, every set and ggml round alike. */
INLINE void multiply_by_hadamard(float *dst, const void *src, int n, int order) {
    const int unit = smaller(order, HADAMARD_VECTORS * LANES);
    const vec scale = v_set(1 / sqrtf((float)order));
    for (int i = 0; i < n; i += unit) {
        const char *from = (const char *)src + (size_t)i * sizeof(float);
        if (unit == HADAMARD_VECTORS * LANES)
            hadamard_vectors(dst + i, from, HADAMARD_VECTORS, scale);
        else if (QUANT_VECTORS == 4 || unit == 4 * LANES)
            hadamard_vectors(dst + i, from, 4, scale);
        else
            hadamard_vectors(dst + i, from, 2, scale);
    }
    for (int half = unit; half < order; half *= 2) hadamard_step(dst, n, half);
}

/* Is a kvc_hadamard_fn. */
INLINE void hadamard(float *dst, const void *src, int n, kvc_mixing mixing) {
    if (mixing.has_signs) change_signs(dst, src, n, mixing.order), src = dst;
    multiply_by_hadamard(dst, src, n, mixing.order);
    if (mixing.has_signs) change_signs(dst, (const char *)dst, n, mixing.order);
}
