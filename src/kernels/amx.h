/* amx.h: products of tiles of bf16, where the processor has tile registers (AMX).  To be included after avx512.h, of
 * whose table it makes another.
 *
 * A float is taken as the sum of two bf16: its upper half as it stands, and what is left, rounded.  Together they have
 * 16 bits, and all that f16 and bf16 have.  A product is that of the upper parts and those of an upper with a lower
 * part; that of the lower parts, some 2^-17 of it, is left out.  Rows of f32 are not multiplied like this.
 *
 * What is multiplied lies in chunks of 32 elements along the sum.  A chunk of a row of factors takes the place of its
 * floats: 32 upper parts, then 32 lower ones.  A chunk of a panel takes the place of 32 rows of floats: 16 rows of the
 * upper parts of pairs of elements, then 16 of lower ones.  Where a chunk is not full there are zeros.
 */

enum { CHUNK = 32, TILE_ROWS = 16, TILE_BYTES = 64 };

typedef __m512i ints;

INLINE int chunks_of(int k) { return (k + CHUNK - 1) / CHUNK; }

/* The upper and lower parts of 32 floats. */
typedef struct halves {
    ints upper, lower;
} halves;

INLINE vec as_floats(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* An infinity's lower part is NaN. */
INLINE halves halves_of(vec x, vec y) {
    halves all;
    all.upper = (ints)_mm512_cvtne2ps_pbh(y, x);
    x = _mm512_sub_ps(x, as_floats(_mm512_castsi512_si256(all.upper)));
    y = _mm512_sub_ps(y, as_floats(_mm512_extracti64x4_epi64(all.upper, 1)));
    all.lower = (ints)_mm512_cvtne2ps_pbh(y, x);
    return all;
}

/* Element i of the first half beside that of the second one. */
INLINE ints paired(ints x) {
    const ints order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                        5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, x);
}

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* Elements [d, d + LANES) of a row of `dim`; 0 past its end. */
INLINE vec load_or_zero(int type, const void *row, int d, int dim) {
    return d < dim ? load(type, row, d, smaller(LANES, dim - d)) : v_zero();
}

INLINE void split_row(float *to, const float *from, int dim, float scale) {
    for (int d = 0; d < dim; d += CHUNK) {
        const vec x = v_mul(load_or_zero(KVC_F32, from, d, dim), v_set(scale));
        const vec y = v_mul(load_or_zero(KVC_F32, from, d + LANES, dim), v_set(scale));
        const halves both = halves_of(x, y);
        _mm512_storeu_si512(to + d, both.upper);
        _mm512_storeu_si512(to + d + LANES, both.lower);
    }
}

TARGET static void prepare_parts(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++) split_row(q + (ptrdiff_t)r * q_stride, q + (ptrdiff_t)r * q_stride, dim, scale);
}

INLINE void store_transposed(float *to, vec x[LANES]) {
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i++) v_store(to + i * KVC_TILE, x[i]);
}

/* Chunk c of rows [j, j + LANES). */
INLINE void pack_chunk(int type, float *dst, const void *const *rows, int j, int c) {
    vec upper[LANES], lower[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) {
        const halves both =
            halves_of(load(type, rows[j + i], c * CHUNK, LANES), load(type, rows[j + i], c * CHUNK + LANES, LANES));
        upper[i] = _mm512_castsi512_ps(both.upper);
        lower[i] = _mm512_castsi512_ps(both.lower);
    }
    float *to = dst + 2 * c * TILE_ROWS * KVC_TILE + j;
    store_transposed(to, upper);
    if (type != KVC_BF16) store_transposed(to + TILE_ROWS * KVC_TILE, lower);
}

/* The same where there are fewer rows or elements. */
RARE void pack_chunk_edge(int type, float *dst, const void *const *rows, int n, int j, int c, int dim) {
    vec upper[LANES], lower[LANES];
    for (int i = 0; i < LANES; i++) {
        upper[i] = lower[i] = v_zero();
        if (j + i >= n) continue;
        const halves both = halves_of(load_or_zero(type, rows[j + i], c * CHUNK, dim),
                                      load_or_zero(type, rows[j + i], c * CHUNK + LANES, dim));
        upper[i] = _mm512_castsi512_ps(both.upper);
        lower[i] = _mm512_castsi512_ps(both.lower);
    }
    float *to = dst + 2 * c * TILE_ROWS * KVC_TILE + j;
    store_transposed(to, upper);
    store_transposed(to + TILE_ROWS * KVC_TILE, lower);
}

INLINE void pack_keys_in_parts(int type, float *dst, const void *const *rows, int n, int dim) {
    for (int j = 0; j < KVC_TILE; j += LANES)
        for (int c = 0; c < chunks_of(dim); c++)
            if (j + LANES <= n && (c + 1) * CHUNK <= dim)
                pack_chunk(type, dst, rows, j, c);
            else
                pack_chunk_edge(type, dst, rows, n, j, c, dim);
}

INLINE void pack_values_in_parts(int type, float *dst, int dst_stride, const void *const *rows, int n, int dim) {
    for (int j = 0; j < chunks_of(n) * CHUNK; j += 2) {
        float *to = dst + (ptrdiff_t)(j / CHUNK * CHUNK + j % CHUNK / 2) * dst_stride;
        for (int d = 0; d < dim; d += LANES) {
            const vec x = j < n ? load_or_zero(type, rows[j], d, dim) : v_zero();
            const vec y = j + 1 < n ? load_or_zero(type, rows[j + 1], d, dim) : v_zero();
            const halves both = halves_of(x, y);
            _mm512_storeu_si512(to + d, paired(both.upper));
            if (type != KVC_BF16) _mm512_storeu_si512(to + TILE_ROWS * dst_stride + d, paired(both.lower));
        }
    }
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* c += a * b, of up to two by two tiles: c in registers 0 .. 4, a in 4 and 5, b in 6 and 7. */
typedef struct tiles {
    float *c;
    const float *a, *b;
    int ldc, lda, ldb;
    int tall, wide; /* whether there are two of rows, of columns */
} tiles;

/* Compilers do not all know that tiles are loaded from memory. */
INLINE void memory_is_read(void) { __asm__ volatile("" ::: "memory"); }

INLINE void configure_tiles(int rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int is_second = i == 2 || i == 3 || i == 5, is_b = i >= 6; /* of the tiles of rows */
        all.bytes[i] = TILE_BYTES;
        all.rows[i] = (uint8_t)(is_b               ? TILE_ROWS
                                : !is_second       ? smaller(rows, TILE_ROWS)
                                : rows > TILE_ROWS ? rows - TILE_ROWS
                                                   : TILE_ROWS);
    }
    memory_is_read();
    _tile_loadconfig(&all);
}

/* What follows is macros as the number of a register stands in the instruction. */
#define LOAD_A(t, at)                                                                      \
    do {                                                                                   \
        _tile_loadd(4, (t)->a + (at), (t)->lda * 4);                                       \
        if ((t)->tall) _tile_loadd(5, (t)->a + (at) + TILE_ROWS * (t)->lda, (t)->lda * 4); \
    } while (0)
#define LOAD_B(t, at)                                                       \
    do {                                                                    \
        _tile_loadd(6, (t)->b + (at), (t)->ldb * 4);                        \
        if ((t)->wide) _tile_loadd(7, (t)->b + (at) + LANES, (t)->ldb * 4); \
    } while (0)
#define MULTIPLY(t)                                          \
    do {                                                     \
        _tile_dpbf16ps(0, 4, 6);                             \
        if ((t)->wide) _tile_dpbf16ps(1, 4, 7);              \
        if ((t)->tall) _tile_dpbf16ps(2, 5, 6);              \
        if ((t)->tall && (t)->wide) _tile_dpbf16ps(3, 5, 7); \
    } while (0)
#define EACH_C(t, what)                                                                           \
    do {                                                                                          \
        what(0, (t)->c, (t)->ldc * 4);                                                            \
        if ((t)->wide) what(1, (t)->c + LANES, (t)->ldc * 4);                                     \
        if ((t)->tall) what(2, (t)->c + TILE_ROWS * (t)->ldc, (t)->ldc * 4);                      \
        if ((t)->tall && (t)->wide) what(3, (t)->c + TILE_ROWS * (t)->ldc + LANES, (t)->ldc * 4); \
    } while (0)

INLINE void multiply_tiles(const tiles *t, int num_chunks, int parts, int add) {
    memory_is_read();
    if (add) {
        EACH_C(t, _tile_loadd);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < num_chunks; i++) {
        const ptrdiff_t a = (ptrdiff_t)i * CHUNK, b = (ptrdiff_t)i * CHUNK * t->ldb;
        LOAD_A(t, a + LANES);
        LOAD_B(t, b);
        MULTIPLY(t);
        LOAD_A(t, a);
        MULTIPLY(t);
        if (parts == 2) {
            LOAD_B(t, b + TILE_ROWS * t->ldb);
            MULTIPLY(t);
        }
    }
    EACH_C(t, _tile_stored);
    memory_is_read();
}

/* As matmul; parts: of the elements of b.  a: in parts already, or weights, which are split here. */
INLINE void multiply_parts(int parts, int is_split, float *c, int ldc, const float *a, int lda, const float *b, int ldb,
                           int m, int n, int k, int add) {
    enum { ROWS = 2 * TILE_ROWS };
    for (int i = 0, rows; i < m; i += rows) {
        _Alignas(TILE_BYTES) float weights[ROWS * KVC_TILE];
        rows = smaller(ROWS, m - i);
        tiles t = {.a = a + (ptrdiff_t)i * lda, .ldc = ldc, .lda = lda, .ldb = ldb, .tall = rows > TILE_ROWS};
        if (i == 0 || rows < ROWS) configure_tiles(rows);
        if (!is_split) {
            for (int r = 0; r < rows; r++)
                split_row(weights + r * KVC_TILE, t.a + (ptrdiff_t)r * lda, chunks_of(k) * CHUNK, 1);
            t.a = weights;
            t.lda = KVC_TILE;
        }
        for (int j = 0; j < n; j += 2 * LANES) {
            t.b = b + j;
            t.c = c + (ptrdiff_t)i * ldc + j;
            t.wide = n - j > LANES;
            multiply_tiles(&t, chunks_of(k), parts, add);
        }
    }
    _tile_release();
}

#define IN_PARTS(name, type, parts)                                                                                  \
    TARGET static void pack_keys_in_parts_##name(float *dst, const void *const *rows, int n, int dim) {              \
        pack_keys_in_parts(type, dst, rows, n, dim);                                                                 \
    }                                                                                                                \
    TARGET static void pack_values_in_parts_##name(float *dst, int dst_stride, const void *const *rows, int n,       \
                                                   int dim) {                                                        \
        pack_values_in_parts(type, dst, dst_stride, rows, n, dim);                                                   \
    }                                                                                                                \
    TARGET static void score_tile_##name(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, \
                                         int n, int k, int add) {                                                    \
        multiply_parts(parts, 1, c, ldc, a, lda, b, ldb, m, n, k, add);                                              \
    }                                                                                                                \
    TARGET static void accumulate_tile_##name(float *c, int ldc, const float *a, int lda, const float *b, int ldb,   \
                                              int m, int n, int k, int add) {                                        \
        multiply_parts(parts, 0, c, ldc, a, lda, b, ldb, m, n, k, add);                                              \
    }

IN_PARTS(f16, KVC_F16, 2)
IN_PARTS(bf16, KVC_BF16, 1)
IN_PARTS(q8_0, KVC_Q8_0, 2)
IN_PARTS(q4_0, KVC_Q4_0, 2)

#define PARTS(name)                                                             \
    {prepare_parts,     pack_keys_in_parts_##name, pack_values_in_parts_##name, \
     score_tile_##name, accumulate_tile_##name,    64}

const kvc_kernels kvc_kernels_amx = KERNELS("amx", PARTS);
