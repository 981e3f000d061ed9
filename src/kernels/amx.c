/* amx.c: products of tiles of bf16, where the processor has tile registers (AMX), and the table, all else of which is
 * as in avx512bf16.c.
 *
 * A float is split into the sum of two bf16: the nearest one, and what is left, rounded.  Together they keep 16 bits,
 * which is all that f16 and bf16 have.  A product is computed as upper * upper + upper * lower + lower * upper; lower *
 * lower, some 2^-17 of it, is left out.  Rows of f32 are not multiplied like this.
 *
 * Factors are packed in chunks of 32 elements along the sum; a chunk that is not full is filled up with zeros.
 *
 *     of a query row,    in the place of its 32 floats:   upper[32] lower[32]
 *     or of weights
 *     of a panel         in the place of 32 rows of floats, for each column:
 *                        rows 0 .. 15    upper parts of elements (0, 1), (2, 3), ... (30, 31)
 *                        rows 16 .. 31   lower parts of the same
 */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AMX
#include "kernels/avx512.h"
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#define HAS_BF16_DOT 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

enum { CHUNK = 32, TILE_ROWS = 16, TILE_BYTES = 64 };

typedef __m512i ints;

INLINE int chunks_of(int k) { return (k + CHUNK - 1) / CHUNK; }

/* Upper and lower parts of 32 floats, as bf16. */
typedef struct parts {
    ints upper, lower;
} parts;

INLINE ints bits_of(vec x) { return _mm512_castps_si512(x); }

/* Rounds floats to what a bf16 has; leaves 0 in the lower halves.  Of some NaN it makes numbers. */
INLINE ints upper_of(vec x) {
    return _mm512_and_si512(_mm512_add_epi32(bits_of(x), _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(-0x10000));
}

/* Rounds what upper_of leaves of the floats x and y; of an infinity and a NaN that is NaN. */
INLINE ints lower_of(vec x, ints upper_x, vec y, ints upper_y) {
    return (ints)_mm512_cvtne2ps_pbh(_mm512_sub_ps(y, _mm512_castsi512_ps(upper_y)),
                                     _mm512_sub_ps(x, _mm512_castsi512_ps(upper_x)));
}

/* Splits the 32 floats of x and y. */
INLINE parts split(vec x, vec y) {
    const ints upper_x = upper_of(x), upper_y = upper_of(y);
    const ints odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                      23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (parts){_mm512_permutex2var_epi16(upper_x, odd, upper_y), lower_of(x, upper_x, y, upper_y)};
}

/* Places each float of y beside that of x, of floats that are bf16. */
INLINE ints pair_bf16(vec x, vec y) { return _mm512_or_si512(_mm512_srli_epi32(bits_of(x), 16), bits_of(y)); }

/* Splits floats as well, and places each float of y beside that of x. */
INLINE parts split_pairs(vec x, vec y) {
    const ints order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                        5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const ints upper_x = upper_of(x), upper_y = upper_of(y);
    return (parts){pair_bf16(_mm512_castsi512_ps(upper_x), _mm512_castsi512_ps(upper_y)),
                   _mm512_permutexvar_epi16(order, lower_of(x, upper_x, y, upper_y))};
}

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* Loads elements [d, d + LANES) of a row of `dim`, and 0 past its end. */
INLINE vec load_or_zero(int type, const void *row, int d, int dim) {
    return d < dim ? load(type, row, d, smaller(LANES, dim - d)) : v_zero();
}

/* Packs a query row or a row of weights, times scale; `to` may be `from`. */
INLINE void split_row(float *to, const float *from, int dim, float scale) {
    for (int d = 0; d < dim; d += CHUNK) {
        const vec x = v_mul(load_or_zero(KVC_F32, from, d, dim), v_set(scale));
        const vec y = v_mul(load_or_zero(KVC_F32, from, d + LANES, dim), v_set(scale));
        const parts both = split(x, y);
        _mm512_storeu_si512(to + d, both.upper);
        _mm512_storeu_si512(to + d + LANES, both.lower);
    }
}

/* Stores one part of a chunk of LANES rows in the panel: pairs below each other, a column for each row. */
INLINE void store_transposed(float *to, vec x[LANES]) {
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i++) v_store(to + i * KVC_TILE, x[i]);
}

/* Packs chunk c of rows [j, j + LANES) into the panel of keys. */
INLINE void pack_chunk(int type, float *dst, const void *rows, int64_t row_stride, int j, int c) {
    vec upper[LANES], lower[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) {
        const void *row = row_at(rows, row_stride, j + i);
        if (type == KVC_BF16) {
            upper[i] = v_load((const uint16_t *)row + c * CHUNK);
            continue;
        }
        const parts both = split(load(type, row, c * CHUNK, LANES), load(type, row, c * CHUNK + LANES, LANES));
        upper[i] = _mm512_castsi512_ps(both.upper);
        lower[i] = _mm512_castsi512_ps(both.lower);
    }
    float *to = dst + 2 * c * TILE_ROWS * KVC_TILE + j;
    store_transposed(to, upper);
    if (type != KVC_BF16) store_transposed(to + TILE_ROWS * KVC_TILE, lower);
}

/* Packs a chunk that ends past row n or element dim. */
RARE void pack_chunk_edge(int type, float *dst, const void *rows, int64_t row_stride, int n, int j, int c, int dim) {
    vec upper[LANES], lower[LANES];
    for (int i = 0; i < LANES; i++) {
        upper[i] = lower[i] = v_zero();
        if (j + i >= n) continue;
        const parts both = split(load_or_zero(type, row_at(rows, row_stride, j + i), c * CHUNK, dim),
                                 load_or_zero(type, row_at(rows, row_stride, j + i), c * CHUNK + LANES, dim));
        upper[i] = _mm512_castsi512_ps(both.upper);
        lower[i] = _mm512_castsi512_ps(both.lower);
    }
    float *to = dst + 2 * c * TILE_ROWS * KVC_TILE + j;
    store_transposed(to, upper);
    store_transposed(to + TILE_ROWS * KVC_TILE, lower);
}

/* Is a kvc_pack_keys_fn once the type is a constant. */
INLINE void pack_keys_in_parts(int type, float *dst, const void *rows, int64_t row_stride, int n, int dim) {
    for (int j = 0; j < KVC_TILE; j += LANES)
        for (int c = 0; c < chunks_of(dim); c++)
            if (j + LANES <= n && (c + 1) * CHUNK <= dim)
                pack_chunk(type, dst, rows, row_stride, j, c);
            else
                pack_chunk_edge(type, dst, rows, row_stride, n, j, c, dim);
}

/* Is a kvc_pack_values_fn once the type is a constant. */
INLINE void pack_values_in_parts(int type, float *dst, int dst_stride, const void *rows, int64_t row_stride, int n,
                                 int dim) {
    for (int j = 0; j < chunks_of(n) * CHUNK; j += 2) {
        float *to = dst + (ptrdiff_t)(j / CHUNK * CHUNK + j % CHUNK / 2) * dst_stride;
        for (int d = 0; d < dim; d += LANES) {
            const vec x = j < n ? load_or_zero(type, row_at(rows, row_stride, j), d, dim) : v_zero();
            const vec y = j + 1 < n ? load_or_zero(type, row_at(rows, row_stride, j + 1), d, dim) : v_zero();
            const parts both = type == KVC_BF16 ? (parts){.upper = pair_bf16(x, y)} : split_pairs(x, y);
            _mm512_storeu_si512(to + d, both.upper);
            if (type != KVC_BF16) _mm512_storeu_si512(to + TILE_ROWS * dst_stride + d, both.lower);
        }
    }
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* c += a * b for up to two by two tiles, in tile registers:
 *
 *                      b: 6   b: 7
 *              a: 4    c: 0   c: 1
 *              a: 5    c: 2   c: 3
 */
typedef struct tiles {
    float *c;
    const float *a, *b;
    int ldc, lda, ldb;
    int two_rows, two_columns; /* whether the block has two rows of tiles, two columns */
} tiles;

/* Has the compiler write memory before tiles are loaded, and read it after they are stored, as not all do. */
INLINE void memory_barrier(void) { __asm__ volatile("" ::: "memory"); }

/* The shapes of all registers, as the processor has them in memory; all 0: none is in use. */
typedef struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

/* Gives the registers their shapes, for `rows` rows of a and c. */
INLINE void configure_tiles(int rows) {
    tile_shapes all = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int is_second = i == 2 || i == 3 || i == 5, is_b = i >= 6; /* second: of two rows of tiles */
        all.bytes[i] = TILE_BYTES;
        all.rows[i] = (uint8_t)(is_b               ? TILE_ROWS
                                : !is_second       ? smaller(rows, TILE_ROWS)
                                : rows > TILE_ROWS ? rows - TILE_ROWS
                                                   : TILE_ROWS);
    }
    memory_barrier();
    _tile_loadconfig(&all);
}

/* Macros, as the number of a register is a part of the instruction. */
#define LOAD_A(t, at)                                                                          \
    do {                                                                                       \
        _tile_loadd(4, (t)->a + (at), (t)->lda * 4);                                           \
        if ((t)->two_rows) _tile_loadd(5, (t)->a + (at) + TILE_ROWS * (t)->lda, (t)->lda * 4); \
    } while (0)
#define LOAD_B(t, at)                                                              \
    do {                                                                           \
        _tile_loadd(6, (t)->b + (at), (t)->ldb * 4);                               \
        if ((t)->two_columns) _tile_loadd(7, (t)->b + (at) + LANES, (t)->ldb * 4); \
    } while (0)
#define MULTIPLY(t)                                                     \
    do {                                                                \
        _tile_dpbf16ps(0, 4, 6);                                        \
        if ((t)->two_columns) _tile_dpbf16ps(1, 4, 7);                  \
        if ((t)->two_rows) _tile_dpbf16ps(2, 5, 6);                     \
        if ((t)->two_rows && (t)->two_columns) _tile_dpbf16ps(3, 5, 7); \
    } while (0)
#define EACH_C(t, what)                                                                                      \
    do {                                                                                                     \
        what(0, (t)->c, (t)->ldc * 4);                                                                       \
        if ((t)->two_columns) what(1, (t)->c + LANES, (t)->ldc * 4);                                         \
        if ((t)->two_rows) what(2, (t)->c + TILE_ROWS * (t)->ldc, (t)->ldc * 4);                             \
        if ((t)->two_rows && (t)->two_columns) what(3, (t)->c + TILE_ROWS * (t)->ldc + LANES, (t)->ldc * 4); \
    } while (0)

/* Computes c = a * b or, if add, c += a * b.  num_parts: parts of the elements of b; 1: they have no lower parts. */
INLINE void multiply_tiles(const tiles *t, int num_chunks, int num_parts, int add) {
    memory_barrier();
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
        if (num_parts == 2) {
            LOAD_B(t, b + TILE_ROWS * t->ldb);
            MULTIPLY(t);
        }
    }
    EACH_C(t, _tile_stored);
    memory_barrier();
}

/* Is a kvc_matmul_fn over packed rows and panels.  Gives the registers their former shapes back: ggml sets those of its
 * threads once, and multiplies with them later. */
INLINE void multiply_parts(int num_parts, float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m,
                           int n, int k, int add, kvc_ahead next) {
    enum { ROWS = 2 * TILE_ROWS };
    shares all = shares_of(next, (m + ROWS - 1) / ROWS * (int64_t)((n + 2 * LANES - 1) / (2 * LANES)));
    tile_shapes former;
    _tile_storeconfig(&former);
    memory_barrier();
    for (int i = 0, rows; i < m; i += rows) {
        rows = smaller(ROWS, m - i);
        tiles t = {.a = a + (ptrdiff_t)i * lda, .ldc = ldc, .lda = lda, .ldb = ldb, .two_rows = rows > TILE_ROWS};
        if (i == 0 || rows < ROWS) configure_tiles(rows);
        for (int j = 0; j < n; j += 2 * LANES) {
            t.b = b + j;
            t.c = c + (ptrdiff_t)i * ldc + j;
            t.two_columns = n - j > LANES;
            prefetch_share(&all);
            multiply_tiles(&t, chunks_of(k), num_parts, add);
        }
    }
    if (former.palette)
        _tile_loadconfig(&former);
    else
        _tile_release(); /* takes 60 ns less */
}

/* ---- the kernels, by name ---------------------------------------------------------------------------------------- */

TARGET static void kvc_prepare_parts_amx(float *q, int q_stride, int num_q, int dim, float scale) {
    for (int r = 0; r < num_q; r++) split_row(q + (ptrdiff_t)r * q_stride, q + (ptrdiff_t)r * q_stride, dim, scale);
}

#define DEFINE_PACK_KEYS_IN_PARTS(name, type)                                                   \
    TARGET static void name(float *dst, const void *rows, int64_t row_stride, int n, int dim) { \
        pack_keys_in_parts(type, dst, rows, row_stride, n, dim);                                \
    }

#define DEFINE_PACK_VALUES_IN_PARTS(name, type)                                                                 \
    TARGET static void name(float *dst, int dst_stride, const void *rows, int64_t row_stride, int n, int dim) { \
        pack_values_in_parts(type, dst, dst_stride, rows, row_stride, n, dim);                                  \
    }

#define DEFINE_MULTIPLY_PARTS(name, num_parts)                                                                        \
    TARGET static void name(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k, \
                            int add, kvc_ahead next) {                                                                \
        multiply_parts(num_parts, c, ldc, a, lda, b, ldb, m, n, k, add, next);                                        \
    }

DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_f32_amx, KVC_F32)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_f16_amx, KVC_F16)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_bf16_amx, KVC_BF16)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_q8_0_amx, KVC_Q8_0)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_q4_0_amx, KVC_Q4_0)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_f32_amx, KVC_F32)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_f16_amx, KVC_F16)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_bf16_amx, KVC_BF16)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_q8_0_amx, KVC_Q8_0)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_q4_0_amx, KVC_Q4_0)

/* Rows of bf16 have no lower parts; those of other types have. */
DEFINE_MULTIPLY_PARTS(kvc_multiply_parts_bf16_amx, 1)
DEFINE_MULTIPLY_PARTS(kvc_multiply_parts_amx, 2)

const kvc_kernels kvc_kernels_amx = {
    .name = "amx",
    .convert = kvc_convert_avx512bf16,
    .unpack = kvc_unpack_avx512,
    KVC_AVX512_FLOATS,
    KVC_AVX512_TILER_F32,
    KVC_AVX512VNNI_INTEGERS,
    .decoded = {kvc_prepare_parts_amx, kvc_pack_keys_f32_amx, kvc_pack_values_f32_amx, kvc_multiply_parts_amx,
                kvc_multiply_parts_amx, kvc_prepare_parts_amx},
    .tiler[KVC_F16] = {kvc_prepare_parts_amx, kvc_pack_keys_f16_amx, kvc_pack_values_f16_amx, kvc_multiply_parts_amx,
                       kvc_multiply_parts_amx, kvc_prepare_parts_amx},
    .tiler[KVC_BF16] = {kvc_prepare_parts_amx, kvc_pack_keys_bf16_amx, kvc_pack_values_bf16_amx,
                        kvc_multiply_parts_bf16_amx, kvc_multiply_parts_bf16_amx, kvc_prepare_parts_amx},
    .tiler[KVC_Q8_0] = {kvc_prepare_parts_amx, kvc_pack_keys_q8_0_amx, kvc_pack_values_q8_0_amx, kvc_multiply_parts_amx,
                        kvc_multiply_parts_amx, kvc_prepare_parts_amx},
    .tiler[KVC_Q4_0] = {kvc_prepare_parts_amx, kvc_pack_keys_q4_0_amx, kvc_pack_values_q4_0_amx, kvc_multiply_parts_amx,
                        kvc_multiply_parts_amx, kvc_prepare_parts_amx},
};
#endif
