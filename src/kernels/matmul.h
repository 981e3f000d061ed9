/* matmul.h: products of many query rows with a tile, and the panels that tiles are packed into; part of template.h.
 *
 * c = a * b, or c += a * b: a is query rows or weights, b a panel, which is keys packed as columns, or values as rows.
 * Shares are memory that is prefetched a bit with each block of c.
 */

enum { MATMUL_DEPTH = 128 }; /* rows of a panel of 64 columns that fill 32 KiB */

/* c[num_rows][num_vectors * LANES] = (add ? c : 0) + a[num_rows][k] * b[k][...]; rows: ldc, lda, ldb floats apart. */
INLINE void matmul_block(int num_rows, int num_vectors, float *c, int ldc, const float *a, int lda, const float *b,
                         int ldb, int k, int add) {
    vec sums[MATMUL_SUMS], x[MATMUL_VECTORS];
    UNROLL
    for (int i = 0; i < num_rows; i++) UNROLL
    for (int j = 0; j < num_vectors; j++)
        sums[i * num_vectors + j] = add ? v_load(c + (ptrdiff_t)i * ldc + j * LANES) : v_zero();
    /* Addresses rows of a from every fourth one, behind GCC's back: left to itself it keeps an address for each row,
     * more than there are registers, and moves them there through the ports that the multiply-adds need. */
    const float *fourth[2];
    UNROLL
    for (int i = 0; i < num_rows; i += 4) {
        fourth[i / 4] = a + (ptrdiff_t)i * lda;
        __asm__("" : "+r"(fourth[i / 4]));
    }
    for (int p = 0; p < k; p++) {
        UNROLL
        for (int j = 0; j < num_vectors; j++) x[j] = v_load(b + (ptrdiff_t)p * ldb + j * LANES);
        UNROLL
        for (int i = 0; i < num_rows; i++) {
            vec y = v_set(fourth[i / 4][(ptrdiff_t)(i % 4) * lda + p]);
            UNROLL
            for (int j = 0; j < num_vectors; j++) sums[i * num_vectors + j] = v_fma(y, x[j], sums[i * num_vectors + j]);
        }
    }
    UNROLL
    for (int i = 0; i < num_rows; i++) UNROLL
    for (int j = 0; j < num_vectors; j++) v_store(c + (ptrdiff_t)i * ldc + j * LANES, sums[i * num_vectors + j]);
}

/* Memory to prefetch in equal shares; counted in lines. */
typedef struct shares {
    const char *at;
    int64_t left, each;
} shares;

INLINE shares shares_of(kvc_ahead next, int64_t num) {
    const int64_t lines = (next.bytes + LINE - 1) / LINE;
    return (shares){next.begin, lines, (lines + num - 1) / num};
}

INLINE void prefetch_share(shares *s) {
    for (int64_t i = 0; i < s->each && s->left; i++, s->left--, s->at += LINE) __builtin_prefetch(s->at, 0, 2);
}

/* Multiplies blocks of `rows` rows as long as that many are left. */
#define MATMUL_ROWS_OF(rows)                                                                                 \
    for (; rows * num_vectors <= MATMUL_SUMS && i + rows <= m; i += rows) {                                  \
        prefetch_share(next);                                                                                \
        matmul_block(rows * num_vectors <= MATMUL_SUMS ? rows : 1, num_vectors, c + (ptrdiff_t)i * ldc, ldc, \
                     a + (ptrdiff_t)i * lda, lda, b, ldb, k, add);                                           \
    }

/* Multiplies num_vectors vectors of columns, for all rows while these columns of b stay in the L1 cache. */
INLINE void matmul_columns(int num_vectors, float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                           int k, int add, shares *next) {
    int i = 0;
    MATMUL_ROWS_OF(6);
    MATMUL_ROWS_OF(4);
    MATMUL_ROWS_OF(2);
    MATMUL_ROWS_OF(1);
}

/* Multiplies blocks of `vectors` vectors of columns, KVC_LANES floats or more, as long as that many are left. */
#define MATMUL_VECTORS_OF(vectors)                                                                                   \
    for (; vectors * LANES >= KVC_LANES && vectors <= MATMUL_VECTORS && left >= vectors;                             \
         left -= vectors, j += vectors * LANES)                                                                      \
    matmul_columns(vectors <= MATMUL_VECTORS ? vectors : 1, c + j, ldc, a + p, lda, b + (ptrdiff_t)p * ldb + j, ldb, \
                   m, depth, add || p, &all)

/* c[m][n] = (add ? c : 0) + a[m][k] * b[k][n].  Takes MATMUL_DEPTH rows of b at a time, which fit the L1 cache. */
INLINE void matmul_rows(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k,
                        int add, kvc_ahead next) {
    const int vectors = (n + KVC_LANES - 1) / KVC_LANES * (KVC_LANES / LANES);
    const int64_t blocks = (int64_t)((k + MATMUL_DEPTH - 1) / MATMUL_DEPTH) * vectors * m / MATMUL_SUMS;
    shares all = shares_of(next, blocks + 1);
    for (int p = 0; p < k || p == 0; p += MATMUL_DEPTH) {
        const int depth = smaller(k - p, MATMUL_DEPTH);
        int left = vectors, j = 0;
        MATMUL_VECTORS_OF(4);
        MATMUL_VECTORS_OF(2);
        MATMUL_VECTORS_OF(1);
    }
}

/* Packs elements [d, d + LANES) of rows [j, j + LANES): transposes them. */
INLINE void pack_keys_block(int type, float *dst, const void *rows, int64_t row_stride, int j, int d) {
    vec x[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) x[i] = load(type, row_at(rows, row_stride, j + i), d, LANES);
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i++) v_store(dst + (d + i) * KVC_PANEL + j, x[i]);
}

/* Packs a block that has only `count` elements, or rows past n: these become 0. */
RARE void pack_keys_edge(int type, float *dst, const void *rows, int64_t row_stride, int n, int j, int d, int count) {
    vec x[LANES];
    for (int i = 0; i < LANES; i++) x[i] = j + i < n ? load(type, row_at(rows, row_stride, j + i), d, count) : v_zero();
    v_transpose(x);
    for (int i = 0; i < count; i++) v_store(dst + (d + i) * KVC_PANEL + j, x[i]);
}

INLINE void pack_keys(int type, float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    for (int j = 0; j < KVC_PANEL; j += LANES)
        for (int d = 0; d < dim; d += LANES)
            if (j + LANES <= n && d + LANES <= dim)
                pack_keys_block(type, dst, rows, row_stride, j, d);
            else
                pack_keys_edge(type, dst, rows, row_stride, n, j, d, smaller(LANES, dim - d));
}

INLINE void pack_values(int type, float *dst, int dst_stride, const void *rows, int64_t row_stride, int n, int dim) {
    int padded = (dim + KVC_LANES - 1) / KVC_LANES * KVC_LANES;
    for (int j = 0; j < n; j++) {
        float *row = dst + (ptrdiff_t)j * dst_stride;
        int d = 0;
        for (; d + LANES <= dim; d += LANES) v_store(row + d, load(type, row_at(rows, row_stride, j), d, LANES));
        for (; d < padded; d += LANES)
            v_store(row + d, d < dim ? load(type, row_at(rows, row_stride, j), d, dim - d) : v_zero());
    }
}
