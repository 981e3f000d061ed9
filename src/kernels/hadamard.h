/* hadamard.h: multiplying by a Hadamard matrix; part of template.h.  The step for a bit replaces each two elements
 * whose numbers differ in that bit alone by their sum and difference.  Steps for low bits are within vectors. */

enum { HADAMARD_VECTORS = 4 }; /* most vectors that are kept in registers: 8 take 2 KB and gain a tenth */

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

/* Returns x with the signs that kvc_mixing says for elements [i, i + LANES): of the lowest four bits from a table, of
 * those above, for KVC_LANES elements at once, from the bits of a number. */
INLINE vec signs_of(int i, float x) {
    static const float SIGNS[KVC_LANES] = {1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1};
    static const float SIGNS_ABOVE[2] = {1, -1};
    const uint64_t is_negative = 0x8777788878887888; /* bit i / KVC_LANES */
    return v_mul(v_load(SIGNS + i % KVC_LANES), v_set(SIGNS_ABOVE[is_negative >> i / KVC_LANES & 1] * x));
}

/* Multiplies num vectors, whose first element is number `first`, by scale and signs, and does the steps within them. */
INLINE void hadamard_vectors(float *dst, const char *src, int num, float scale, int has_signs, int first) {
    vec x[HADAMARD_VECTORS];
    UNROLL
    for (int i = 0; i < num; i++)
        x[i] = v_mul(v_load(src + (size_t)i * LANES * sizeof(float)),
                     has_signs ? signs_of(first + i * LANES, scale) : v_set(scale));
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

/* Is a kvc_hadamard_fn, the fast Walsh-Hadamard transform: scales, then does a step for each bit of the matrix's rows'
 * numbers, lowest first: in this order, every set and ggml round alike. */
INLINE void hadamard(float *dst, const void *src, int n, kvc_mixing mixing) {
    const int order = mixing.order, unit = smaller(order, HADAMARD_VECTORS * LANES);
    const float scale = 1 / sqrtf((float)order);
    for (int i = 0; i < n; i += unit) {
        const char *from = (const char *)src + (size_t)i * sizeof(float);
        if (unit == HADAMARD_VECTORS * LANES)
            hadamard_vectors(dst + i, from, HADAMARD_VECTORS, scale, mixing.has_signs, i % order);
        else
            hadamard_vectors(dst + i, from, HADAMARD_VECTORS / 2, scale, mixing.has_signs, i % order);
    }
    for (int half = unit; half < order; half *= 2) hadamard_step(dst, n, half);
    for (int i = 0; i < n && mixing.has_signs; i += LANES)
        v_store(dst + i, v_mul(v_load(dst + i), signs_of(i % order, 1)));
}
