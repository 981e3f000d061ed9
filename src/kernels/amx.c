/* amx.c: products of tiles of bf16 for processors with tile registers (AMX), and the table.  Its other entries are
 * those of avx512bf16.c.
 *
 * A float is split into the sum of two or three bf16: the nearest bf16, or the next one below, and the rest.  Two keep
 * 16 bits, which is all that f16 and bf16 have; three keep all of a float.  Products of parts that are about 2^-17 of
 * the whole (with two parts) or 2^-24 (with three) are left out.  Query rows of bf16 that need not be rotated or
 * transformed are one part, as the caller has them.
 *
 * If the processor also multiplies tiles of f16 (AMX-FP16), values of f16 are multiplied as they are, by weights in two
 * f16.  Keys of f16 are multiplied by query rows of f16.
 *
 * A tile is a tile register, or what is loaded into it: 16 rows of 64 bytes.  A panel is packed keys, or values.
 * Factors are packed in chunks of 32 elements along the sum, with zeros behind the last element.
 *
 *     of a query row, or of weights     part 0 of 32 elements, part 1, part 2
 *     of a panel                        for each 16 columns, for each chunk that there is space for, for each part, a
 *                                       tile: elements (0, 1) of all columns, (2, 3), ... (30, 31)
 */
#include "kernels/kernels.h"

#ifdef KVC_HAVE_AMX
#include "kernels/avx512.h"
#define TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni," KVC_AVX512_TARGET)))
#define HAS_VNNI 1
#define HAS_DOT_16 1
#include "kernels/vector_avx512.h"
#include "kernels/template.h"

enum { CHUNK = KVC_CHUNK, TILE_ROWS = 16, TILE_BYTES = 64, TILE = TILE_ROWS * LANES /* floats */ };

typedef __m512i ints;

INLINE int chunks_of(int k) { return (k + CHUNK - 1) / CHUNK; }

INLINE ints bits_of(vec x) { return _mm512_castps_si512(x); }

/* Rounds floats to what a bf16 has; leaves 0 in the lower halves.  Of some NaN it makes numbers. */
INLINE vec rounded(vec x) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_add_epi32(bits_of(x), _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(-0x10000)));
}

/* Takes part p of num_parts off *rest, which may not be the last one.  Of three parts the first is rounded down, so
 * that it is finite where the float is.  Of an infinity, what is left is NaN. */
INLINE vec take_bf16(int num_parts, int p, vec *rest) {
    const vec part = num_parts == 3 && p == 0
                         ? _mm512_castsi512_ps(_mm512_and_si512(bits_of(*rest), _mm512_set1_epi32(-0x10000)))
                         : rounded(*rest);
    *rest = _mm512_sub_ps(*rest, part);
    return part;
}

/* Splits the 32 floats of x and y into num_parts bf16 each.  parts[p] has part p of x, then of y. */
INLINE void split(int num_parts, vec x, vec y, ints *parts) {
    const ints odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                      23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    UNROLL
    for (int p = 0; p < num_parts - 1; p++) {
        const vec part_x = take_bf16(num_parts, p, &x), part_y = take_bf16(num_parts, p, &y);
        parts[p] = _mm512_permutex2var_epi16(bits_of(part_x), odd, bits_of(part_y));
    }
    parts[num_parts - 1] = (ints)_mm512_cvtne2ps_pbh(y, x);
}

/* Places each float of y beside that of x, of floats that are bf16. */
INLINE ints pair_bf16(vec x, vec y) { return _mm512_or_si512(_mm512_srli_epi32(bits_of(x), 16), bits_of(y)); }

/* Splits floats into num_parts bf16 each.  parts[p] has part p of x, and part p of y beside it.  take_bf16 leaves the
 * rest in x.  With two parts, the last rest is rounded to a bf16; with three, it is a bf16. */
INLINE void split_pairs(int num_parts, vec x, vec y, ints *parts) {
    UNROLL
    for (int p = 0; p < num_parts - 1; p++) {
        const vec part_x = take_bf16(num_parts, p, &x), part_y = take_bf16(num_parts, p, &y);
        parts[p] = pair_bf16(part_x, part_y);
    }
    parts[num_parts - 1] = num_parts == 2 ? pair_bf16(rounded(x), rounded(y)) : pair_bf16(x, y);
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* Loads elements [d, d + LANES) of a row of `dim`, and 0 past its end. */
INLINE vec load_or_zero(int type, const void *row, int d, int dim) {
    return d < dim ? load(type, row, d, smaller(LANES, dim - d)) : v_zero();
}

/* Packs a query row, times scale.  `to` may be `from`: three parts take more space, so the last chunk comes first. */
INLINE void split_row(int num_parts, float *to, const float *from, int dim, float scale) {
    for (int i = 0; i < chunks_of(dim); i++) {
        const int c = num_parts == 3 ? chunks_of(dim) - 1 - i : i;
        ints parts[3];
        split(num_parts, v_mul(load_or_zero(KVC_F32, from, c * CHUNK, dim), v_set(scale)),
              v_mul(load_or_zero(KVC_F32, from, c * CHUNK + LANES, dim), v_set(scale)), parts);
        UNROLL
        for (int p = 0; p < num_parts; p++) _mm512_storeu_si512(to + (c * num_parts + p) * LANES, parts[p]);
    }
}

enum { SHIFT = 12 /* weights are so many powers of two larger, which keeps small ones from being denormals */ };

/* Rounds 32 floats to f16. */
INLINE ints to_f16(vec x, vec y) {
    const __m256i low = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i high = _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Splits 32 floats into two f16 each. */
INLINE void split_f16(vec x, vec y, ints parts[2]) {
    parts[0] = to_f16(x, y);
    const vec upper_x = _mm512_cvtph_ps(_mm512_castsi512_si256(parts[0]));
    const vec upper_y = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(parts[0], 1));
    parts[1] = to_f16(_mm512_sub_ps(x, upper_x), _mm512_sub_ps(y, upper_y));
}

/* Returns the place of the first part of a panel's tile: chunk c of columns [j, j + LANES). */
INLINE float *tile_at(float *panel, int j, int num_chunks, int c, int num_parts) {
    return panel + (ptrdiff_t)((j / LANES * num_chunks + c) * num_parts) * TILE;
}

/* Replaces infinities by the largest bf16, so that no part of a query row that is 0 makes a NaN of them. */
INLINE vec within_bf16(vec x) {
    const vec largest = v_set(0x1.fep127f);
    return v_max(v_set(-0x1.fep127f), v_min(largest, x)); /* a NaN stays, as the second operand */
}

/* Packs half a chunk, x[i] of key i, into the panel's tiles: transposes it, then splits pairs of elements. */
INLINE void pack_half_chunk(int num_parts, float *to, vec *x) {
    if (num_parts == 3) UNROLL
    for (int i = 0; i < LANES; i++) x[i] = within_bf16(x[i]);
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i += 2) {
        ints parts[3];
        split_pairs(num_parts, x[i], x[i + 1], parts);
        UNROLL
        for (int p = 0; p < num_parts; p++) _mm512_storeu_si512(to + p * TILE + i / 2 * LANES, parts[p]);
    }
}

/* Loads elements [d, d + LANES) of keys [j, j + LANES), some of which may be past row n or element dim: 0 there. */
RARE void load_edge(int type, vec *x, const void *rows, int64_t row_stride, int n, int j, int d, int dim) {
    for (int i = 0; i < LANES; i++)
        x[i] = j + i < n ? load_or_zero(type, row_at(rows, row_stride, j + i), d, dim) : v_zero();
}

/* Packs chunk c of keys [j, j + LANES) of bf16, which are not split: transposes pairs. */
INLINE void pack_chunk_bf16(float *dst, const void *rows, int64_t row_stride, int j, int c, int dim) {
    vec x[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) x[i] = v_load((const uint16_t *)row_at(rows, row_stride, j + i) + c * CHUNK);
    v_transpose(x);
    UNROLL
    for (int i = 0; i < LANES; i++) v_store(tile_at(dst, j, chunks_of(dim), c, 1) + i * LANES, x[i]);
}

/* Packs n keys into a panel from column `first` on: a kvc_pack_keys_fn, once the type and num_parts are constants. */
INLINE void pack_keys_in_parts(int type, int num_parts, float *dst, const void *rows, int64_t row_stride, int first,
                               int n, int dim) {
    dst = tile_at(dst, first, chunks_of(dim), 0, num_parts);
    for (int j = 0; j < KVC_PANEL; j += LANES)
        for (int c = 0; c < chunks_of(dim); c++) {
            const int is_whole = j + LANES <= n && (c + 1) * CHUNK <= dim;
            if (is_whole && num_parts == 1) {
                pack_chunk_bf16(dst, rows, row_stride, j, c, dim);
                continue;
            }
            for (int d = c * CHUNK; d < (c + 1) * CHUNK; d += LANES) {
                float *to = tile_at(dst, j, chunks_of(dim), c, num_parts) + d % CHUNK / 2 * LANES;
                vec x[LANES];
                if (!is_whole)
                    load_edge(type, x, rows, row_stride, n, j, d, dim);
                else
                    UNROLL for (int i = 0; i < LANES; i++) x[i] = load(type, row_at(rows, row_stride, j + i), d, LANES);
                pack_half_chunk(num_parts, to, x);
            }
        }
}

/* Packs n values into a panel from row `first` on: a kvc_pack_values_fn, once the type and num_parts are constants. */
INLINE void pack_values_in_parts(int type, int num_parts, float *dst, const void *rows, int64_t row_stride, int first,
                                 int n, int dim) {
    enum { MOST_CHUNKS = KVC_WIDE_TILE / CHUNK };
    dst = tile_at(dst, 0, MOST_CHUNKS, first / CHUNK, num_parts);
    for (int j = 0; j < chunks_of(n) * CHUNK; j += 2) {
        for (int d = 0; d < dim; d += LANES) {
            const vec x = j < n ? load_or_zero(type, row_at(rows, row_stride, j), d, dim) : v_zero();
            const vec y = j + 1 < n ? load_or_zero(type, row_at(rows, row_stride, j + 1), d, dim) : v_zero();
            ints parts[3];
            split_pairs(num_parts, x, y, parts);
            float *to = tile_at(dst, d, MOST_CHUNKS, j / CHUNK, num_parts) + j % CHUNK / 2 * LANES;
            UNROLL
            for (int p = 0; p < num_parts; p++) _mm512_storeu_si512(to + p * TILE, parts[p]);
        }
    }
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

/* Replaces x by 2^x times `times`.  x = n + r with n an integer below it, so that 2^x = 2^n 2^r, and 2^r is a
 * polynomial of degree 5 or 6, whose largest relative error is 8e-8 or 2e-9. */
INLINE void exp2_times(int degree, float times, vec x[EXPS]) {
    static const float factors[2][7] = {
        {1, 0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f, 0x1.277854p-7f, 0x1.e97502p-10f},
        {1, 0x1.62e42cp-1f, 0x1.ebfd58p-3f, 0x1.c68912p-5f, 0x1.3d0b92p-7f, 0x1.46d64cp-10f, 0x1.c5417ap-13f}};
    vec r[EXPS], p[EXPS];
    UNROLL
    for (int i = 0; i < EXPS; i++) r[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    UNROLL
    for (int i = 0; i < EXPS; i++) p[i] = v_set(times * factors[degree - 5][degree]);
    UNROLL
    for (int f = degree - 1; f >= 0; f--) UNROLL
    for (int i = 0; i < EXPS; i++) p[i] = v_fma(p[i], r[i], v_set(times * factors[degree - 5][f]));
    UNROLL
    for (int i = 0; i < EXPS; i++) x[i] = _mm512_scalef_ps(p[i], x[i]);
}

/* Raises a row's maximum to its largest score; returns 2^(the old one - the new one). */
RARE float raise_maximum(vec largest, float *max) {
    const float now = v_max_lane(largest), factor = exp2f(*max - now);
    *max = now;
    return factor;
}

/* Turns scores, times scale, into packed weights; returns their sum.  Three parts take more space: goes backwards. */
INLINE float weigh_packed_row(int is_f16, int num_parts, float *row, int num_chunks, float scale, float max) {
    enum { CHUNKS = EXPS / 2 };
    const int degree = is_f16 || num_parts == 3 ? 6 : 5;
    const float times = is_f16 ? 1 << SHIFT : 1;
    const vec by = v_set(scale),
              shift = v_set(max == -INFINITY ? 0 : -max); /* where nothing is visible, weights are 0 */
    vec total = v_zero();
    for (int i = 0; i < num_chunks; i += CHUNKS) {
        const int c = num_parts == 3 ? num_chunks - CHUNKS - i : i;
        vec x[EXPS];
        UNROLL
        for (int v = 0; v < EXPS; v++) /* rounds products, so that the largest weight is 1 */
            x[v] = v_add(v_mul(v_load(row + c * CHUNK + v * LANES), by), shift);
        exp2_times(degree, times, x);
        UNROLL
        for (int j = 0; j < CHUNKS; j++) {
            ints parts[3];
            total = v_add(total, v_add(x[2 * j], x[2 * j + 1]));
            if (is_f16)
                split_f16(x[2 * j], x[2 * j + 1], parts);
            else
                split(num_parts, x[2 * j], x[2 * j + 1], parts);
            UNROLL
            for (int p = 0; p < num_parts; p++) _mm512_storeu_si512(row + ((c + j) * num_parts + p) * LANES, parts[p]);
        }
    }
    return v_sum_lanes(total) / times;
}

/* Turns scores, times scale, into packed weights, 2^(score * log2(e) - max), and updates max, sum and factor. */
INLINE void weigh(int is_f16, int num_parts, float *scores, int num_q, int n, float scale, float *max, float *sum,
                  float *factor) {
    const int padded = (n + EXPS * LANES - 1) / (EXPS * LANES) * (EXPS * LANES);
    const float by = scale * 1.44269504088896341f;
    for (int r = 0; r < num_q; r++) {
        float *const row = scores + r * KVC_WEIGHTS_STRIDE;
        for (int j = n; j < padded; j++) row[j] = -INFINITY;
        vec largest = v_set(-INFINITY);
        for (int j = 0; j < padded; j += LANES) largest = v_max(v_load(row + j), largest);
        largest = v_mul(largest, v_set(by));
        factor[r] = _mm512_cmp_ps_mask(largest, v_set(max[r]), _CMP_GT_OQ) ? raise_maximum(largest, &max[r]) : 1;
        sum[r] = sum[r] * factor[r] + weigh_packed_row(is_f16, num_parts, row, padded / CHUNK, by, max[r]);
    }
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* c += a * b for up to two by two tiles, in tile registers:
 *
 *                      b: 6   b: 7
 *              a: 4    c: 0   c: 1
 *              a: 5    c: 2   c: 3
 */
typedef struct tiles {
    float *c;
    const float *a, *b, *b_right; /* b, and the tiles to the right */
    int ldc, lda;
    int two_rows, two_columns; /* whether the block has two rows of tiles, two columns */
    int is_f16;                /* whether a and b are f16, not bf16 */
} tiles;

/* Has the compiler write memory before tiles are loaded, and read it after they are stored, as not all do. */
INLINE void memory_barrier(void) { __asm__ volatile("" ::: "memory"); }

/* The shapes of all registers, as the processor has them in memory; all 0: none is in use. */
typedef struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;
_Static_assert(sizeof(tile_shapes) == sizeof(kvc_former), "former shapes have their space");

enum { BLOCK_ROWS = 2 * TILE_ROWS };

/* Gives the registers their shapes, for `rows` rows of a and c.  Never inlined: in a larger frame, GCC 12 takes it that
 * they lie at a multiple of 64 bytes, where the address sanitizer's frames do not. */
static __attribute__((noinline)) TARGET void configure_tiles(int rows) {
    tile_shapes all = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int is_second = i == 2 || i == 3 || i == 5, is_b = i >= 6; /* second: of two rows of tiles */
        all.bytes[i] = TILE_BYTES;
        all.rows[i] = (uint8_t)(is_b               ? TILE_ROWS
                                : !is_second       ? smaller(rows, TILE_ROWS)
                                : rows > TILE_ROWS ? rows - TILE_ROWS
                                                   : TILE_ROWS);
    }
    const tile_shapes *at = &all;
    __asm__ volatile(""
                     : "+r"(at)
                     :
                     : "memory"); /* has the compiler write all of it, of which it knows 8 bytes are read */
    _tile_loadconfig(at);
}

/* Configuring takes as long as 10 products, so it is done once for all products of a tile of rows. */
TARGET static void kvc_begin_amx(kvc_former *former) {
    _tile_storeconfig(former);
    memory_barrier();
    configure_tiles(BLOCK_ROWS);
}

/* Gives the registers their former shapes back: ggml sets those of its threads once, and multiplies with them later. */
TARGET static void kvc_end_amx(const kvc_former *former) {
    memory_barrier();
    if (former->bytes[0]) /* the palette */
        _tile_loadconfig(former);
    else
        _tile_release(); /* takes 60 ns less */
}

/* Macros, as instructions name registers.  The product of f16, which is new in GCC 13 and Clang 16, is written out. */
#ifndef KVC_TILE_DPFP16PS /* tests emulate it */
#define KVC_TILE_DPFP16PS(c, a, b) \
    __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"((15 - (b)) << 3 | 3), "i"(0xc0 | (c) << 3 | (a)))
#endif
#define PRODUCT(t, c, a, b)             \
    do {                                \
        if ((t)->is_f16)                \
            KVC_TILE_DPFP16PS(c, a, b); \
        else                            \
            _tile_dpbf16ps(c, a, b);    \
    } while (0)
#define LOAD_A(t, at)                                                                          \
    do {                                                                                       \
        _tile_loadd(4, (t)->a + (at), (t)->lda * 4);                                           \
        if ((t)->two_rows) _tile_loadd(5, (t)->a + (at) + TILE_ROWS * (t)->lda, (t)->lda * 4); \
    } while (0)
#define LOAD_B(t, at)                                                          \
    do {                                                                       \
        _tile_loadd(6, (t)->b + (at), TILE_BYTES);                             \
        if ((t)->two_columns) _tile_loadd(7, (t)->b_right + (at), TILE_BYTES); \
    } while (0)
#define MULTIPLY(t)                                                 \
    do {                                                            \
        PRODUCT(t, 0, 4, 6);                                        \
        if ((t)->two_columns) PRODUCT(t, 1, 4, 7);                  \
        if ((t)->two_rows) PRODUCT(t, 2, 5, 6);                     \
        if ((t)->two_rows && (t)->two_columns) PRODUCT(t, 3, 5, 7); \
    } while (0)
#define EACH_C(t, what)                                                                                      \
    do {                                                                                                     \
        what(0, (t)->c, (t)->ldc * 4);                                                                       \
        if ((t)->two_columns) what(1, (t)->c + LANES, (t)->ldc * 4);                                         \
        if ((t)->two_rows) what(2, (t)->c + TILE_ROWS * (t)->ldc, (t)->ldc * 4);                             \
        if ((t)->two_rows && (t)->two_columns) what(3, (t)->c + TILE_ROWS * (t)->ldc + LANES, (t)->ldc * 4); \
    } while (0)

/* Adds the products of parts of one chunk, but not the smallest: part o of a times part p of b only where o + p is
 * below the larger number of parts.  a, b: floats before the chunk. */
INLINE void multiply_chunk(const tiles *t, ptrdiff_t a, ptrdiff_t b, int parts_a, int parts_b) {
    LOAD_B(t, b);
    for (int p = parts_a - 1; p >= 0; p--) {
        LOAD_A(t, a + p * LANES);
        MULTIPLY(t);
    }
    for (int p = 1; p < parts_b; p++) {
        LOAD_B(t, b + p * TILE);
        for (int o = 0; o < parts_a && o + p < parts_b; o++) {
            if (o + p > 1) LOAD_A(t, a + o * LANES); /* else it is there */
            MULTIPLY(t);
        }
    }
}

/* Computes c = a * b or, if add, c += a * b. */
INLINE void multiply_tiles(const tiles *t, int num_chunks, int parts_a, int parts_b, int add) {
    memory_barrier();
    if (add) {
        EACH_C(t, _tile_loadd);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int i = 0; i < num_chunks; i++)
        multiply_chunk(t, (ptrdiff_t)i * parts_a * LANES, (ptrdiff_t)i * parts_b * TILE, parts_a, parts_b);
    EACH_C(t, _tile_stored);
    memory_barrier();
}

/* Multiplies m packed rows by a panel of n columns: a kvc_matmul_fn, between kvc_begin_amx and kvc_end_amx. */
TARGET static void multiply_parts(int is_f16, int parts_a, int parts_b, float *c, int ldc, const float *a, int lda,
                                  const float *b, int ldb, int m, int n, int k, int add, kvc_ahead next) {
    const int of_columns = chunks_of(ldb) * parts_b; /* tiles of 16 columns of the panel */
    shares all = shares_of(next, (m + BLOCK_ROWS - 1) / BLOCK_ROWS * (int64_t)((n + 2 * LANES - 1) / (2 * LANES)));
    for (int i = 0, rows; i < m; i += rows) {
        rows = smaller(BLOCK_ROWS, m - i);
        tiles t = {.a = a + (ptrdiff_t)i * lda, .ldc = ldc, .lda = lda, .two_rows = rows > TILE_ROWS, .is_f16 = is_f16};
        if (rows < BLOCK_ROWS) configure_tiles(rows);
        for (int j = 0; j < n; j += 2 * LANES) {
            t.b = b + (ptrdiff_t)(j / LANES * of_columns) * TILE;
            t.b_right = t.b + (ptrdiff_t)of_columns * TILE;
            t.c = c + (ptrdiff_t)i * ldc + j;
            t.two_columns = n - j > LANES;
            prefetch_share(&all);
            multiply_tiles(&t, chunks_of(k), parts_a, parts_b, add);
        }
        if (rows < BLOCK_ROWS) configure_tiles(BLOCK_ROWS);
    }
}

/* ---- the kernels, by name ---------------------------------------------------------------------------------------- */

#define DEFINE_PREPARE_PARTS(name, num_parts)                                                  \
    TARGET static void name(float *q, int q_stride, int num_q, int dim, float scale) {         \
        for (int r = 0; r < num_q; r++, q += q_stride) split_row(num_parts, q, q, dim, scale); \
    }

#define DEFINE_WEIGH(name, is_f16, num_parts)                                                                      \
    TARGET static void name(float *scores, int num_q, int n, float scale, float *max, float *sum, float *factor) { \
        weigh(is_f16, num_parts, scores, num_q, n, scale, max, sum, factor);                                       \
    }

#define DEFINE_PACK_KEYS_IN_PARTS(name, type, num_parts)                                                   \
    TARGET static void name(float *dst, const void *rows, int64_t row_stride, int first, int n, int dim) { \
        pack_keys_in_parts(type, num_parts, dst, rows, row_stride, first, n, dim);                         \
    }

#define DEFINE_PACK_VALUES_IN_PARTS(name, type, num_parts)                                                      \
    TARGET static void name(float *dst, int dst_stride, const void *rows, int64_t row_stride, int first, int n, \
                            int dim) {                                                                          \
        (void)dst_stride;                                                                                       \
        pack_values_in_parts(type, num_parts, dst, rows, row_stride, first, n, dim);                            \
    }

#define DEFINE_MULTIPLY_PARTS(name, is_f16, parts_a, parts_b)                                                         \
    TARGET static void name(float *c, int ldc, const float *a, int lda, const float *b, int ldb, int m, int n, int k, \
                            int add, kvc_ahead next) {                                                                \
        multiply_parts(is_f16, parts_a, parts_b, c, ldc, a, lda, b, ldb, m, n, k, add, next);                         \
    }

#include "kernels/amx_bytes.h"
#include "kernels/amx_sketch.h"

DEFINE_PREPARE_PARTS(kvc_prepare_2_parts_amx, 2)
DEFINE_PREPARE_PARTS(kvc_prepare_3_parts_amx, 3)
DEFINE_WEIGH(kvc_weigh_2_parts_amx, 0, 2)
DEFINE_WEIGH(kvc_weigh_3_parts_amx, 0, 3)
DEFINE_WEIGH(kvc_weigh_amxfp16, 1, 2)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_f32_amx, KVC_F32, 3)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_f16_amx, KVC_F16, 2)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_bf16_amx, KVC_BF16, 1)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_q8_0_amx, KVC_Q8_0, 2)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_q4_0_amx, KVC_Q4_0, 2)
DEFINE_PACK_KEYS_IN_PARTS(kvc_pack_keys_decoded_amx, KVC_F32, 2)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_f32_amx, KVC_F32, 3)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_f16_amx, KVC_F16, 2)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_bf16_amx, KVC_BF16, 1)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_q8_0_amx, KVC_Q8_0, 2)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_q4_0_amx, KVC_Q4_0, 2)
DEFINE_PACK_VALUES_IN_PARTS(kvc_pack_values_decoded_amx, KVC_F32, 2)
DEFINE_MULTIPLY_PARTS(kvc_multiply_1_by_1_amx, 0, 1, 1)
DEFINE_MULTIPLY_PARTS(kvc_multiply_1_by_2_amx, 0, 1, 2)
DEFINE_MULTIPLY_PARTS(kvc_multiply_1_by_3_amx, 0, 1, 3)
DEFINE_MULTIPLY_PARTS(kvc_multiply_2_by_1_amx, 0, 2, 1)
DEFINE_MULTIPLY_PARTS(kvc_multiply_2_by_2_amx, 0, 2, 2)
DEFINE_MULTIPLY_PARTS(kvc_multiply_3_by_3_amx, 0, 3, 3)
DEFINE_MULTIPLY_PARTS(kvc_multiply_1_by_1_amxfp16, 1, 1, 1)
DEFINE_MULTIPLY_PARTS(kvc_multiply_2_by_1_amxfp16, 1, 2, 1)

/* A kvc_tiler of parts, whose two products are computed alike. */
#define TILER(prepare_fn, pack_keys_fn, pack_values_fn, multiply, weigh_fn, multiply_bf16) \
    {.prepare = prepare_fn,                                                                \
     .pack_keys = pack_keys_fn,                                                            \
     .pack_values = pack_values_fn,                                                        \
     .score = multiply,                                                                    \
     .accumulate = multiply,                                                               \
     .weigh = weigh_fn,                                                                    \
     .score_bf16 = multiply_bf16}

/* Prompts in bytes. */
#define KVC_AMX_BYTES                                                                    \
    .bytes = {kvc_pack_byte_keys_amx,     kvc_pack_byte_values_amx, kvc_score_bytes_amx, \
              kvc_weigh_bytes_avx512vnni, kvc_sum_bytes_amx,        BLOCK_ROWS}

/* What both tables have in common. */
#define KVC_AMX                                                                                              \
    .begin = kvc_begin_amx, .end = kvc_end_amx, .convert = kvc_convert_avx512bf16, .sketch = kvc_sketch_amx, \
    .tiled_sketches = FEWEST_TILED, .rank[KVC_BF16] = kvc_rank_bf16_avx512bf16, KVC_AVX512_FLOATS,           \
    KVC_AVX512VNNI_INTEGERS, KVC_AMX_BYTES,                                                                  \
    .tiler[KVC_F32] = TILER(kvc_prepare_3_parts_amx, kvc_pack_keys_f32_amx, kvc_pack_values_f32_amx,         \
                            kvc_multiply_3_by_3_amx, kvc_weigh_3_parts_amx, kvc_multiply_1_by_3_amx),        \
    .tiler[KVC_BF16] = TILER(kvc_prepare_2_parts_amx, kvc_pack_keys_bf16_amx, kvc_pack_values_bf16_amx,      \
                             kvc_multiply_2_by_1_amx, kvc_weigh_2_parts_amx, kvc_multiply_1_by_1_amx),       \
    .tiler[KVC_Q8_0] = TILER(kvc_prepare_2_parts_amx, kvc_pack_keys_q8_0_amx, kvc_pack_values_q8_0_amx,      \
                             kvc_multiply_2_by_2_amx, kvc_weigh_2_parts_amx, kvc_multiply_1_by_2_amx),       \
    .tiler[KVC_Q4_0] = TILER(kvc_prepare_2_parts_amx, kvc_pack_keys_q4_0_amx, kvc_pack_values_q4_0_amx,      \
                             kvc_multiply_2_by_2_amx, kvc_weigh_2_parts_amx, kvc_multiply_1_by_2_amx),       \
    .decoded = TILER(kvc_prepare_2_parts_amx, kvc_pack_keys_decoded_amx, kvc_pack_values_decoded_amx,        \
                     kvc_multiply_2_by_2_amx, kvc_weigh_2_parts_amx, kvc_multiply_1_by_2_amx)

const kvc_kernels kvc_kernels_amx = {
    .name = "amx",
    KVC_AMX,
    .tiler[KVC_F16] = TILER(kvc_prepare_2_parts_amx, kvc_pack_keys_f16_amx, kvc_pack_values_f16_amx,
                            kvc_multiply_2_by_2_amx, kvc_weigh_2_parts_amx, kvc_multiply_1_by_2_amx),
};

/* Rows of f16 that are multiplied as they are are packed as those of bf16. */
const kvc_kernels kvc_kernels_amxfp16 = {
    .name = "amxfp16",
    KVC_AMX,
    .tiler[KVC_F16] = {.prepare = kvc_prepare_2_parts_amx,
                       .pack_keys = kvc_pack_keys_f16_amx,
                       .pack_values = kvc_pack_values_bf16_amx,
                       .score = kvc_multiply_2_by_2_amx,
                       .accumulate = kvc_multiply_2_by_1_amxfp16,
                       .weigh = kvc_weigh_amxfp16,
                       .score_bf16 = kvc_multiply_1_by_2_amx,
                       .sum_shift = SHIFT},
    .tiler_f16 = {.pack_keys = kvc_pack_keys_bf16_amx, .score = kvc_multiply_1_by_1_amxfp16},
};
#endif
