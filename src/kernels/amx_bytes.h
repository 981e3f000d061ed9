/* amx_bytes.h: prompts in bytes in tile registers; part of amx.c.  Weights are those of avx512vnni.c.  A tile is a tile
 * register, or what is loaded into it: of factor a 4 and 5, of b 6 and 7, and of their sums 0 to 3.
 *
 * Panels are of tiles, each of 64 bytes along the sum and 16 columns: bytes (0 .. 3) of all columns, (4 .. 7), and so
 * on.
 *
 *     keys      of each 16 rows, a tile for each 64 elements
 *     values    of each 16 columns, a tile for each 64 rows
 *
 * Where a tile is not filled, the other factor is 0.
 */

enum {
    TILE_STEPS = TILE_BYTES, /* bytes along the sum */
    VALUE_TILES = KVC_BYTE_TILE / TILE_STEPS,
    WEIGHTS_BYTES_APART = KVC_BYTE_SCORES * (int)sizeof(float)
};

INLINE int key_tiles(int dim) { return (dim + TILE_STEPS - 1) / TILE_STEPS; }

INLINE char *byte_tile(void *panel, int i) { return (char *)panel + (ptrdiff_t)i * TILE_ROWS * TILE_BYTES; }

INLINE const char *byte_tile_in(const void *panel, int i) {
    return (const char *)panel + (ptrdiff_t)i * TILE_ROWS * TILE_BYTES;
}

extern kvc_pack_bytes_fn kvc_pack_byte_keys_amx, kvc_pack_byte_values_amx;
extern kvc_score_bytes_fn kvc_score_bytes_amx;
extern kvc_sum_bytes_fn kvc_sum_bytes_amx;

/* Packs n keys of int8 into a panel's tiles: transposes words of four elements. */
TARGET void kvc_pack_byte_keys_amx(void *panel, const void *rows, int64_t row_stride, int first, int n, int dim) {
    for (int j = 0; j < n; j += LANES)
        for (int d = 0; d < dim; d += TILE_STEPS) {
            char *const to = byte_tile(panel, (first + j) / LANES * key_tiles(dim) + d / TILE_STEPS);
            const int words = smaller(LANES, (dim - d) / 4);
            vec x[LANES];
            UNROLL
            for (int i = 0; i < LANES; i++) {
                const char *const from = (const char *)row_at(rows, row_stride, j + i) + d;
                x[i] = words == LANES ? v_load(from) : v_load_some((const float *)(const void *)from, words);
            }
            v_transpose(x);
            UNROLL
            for (int i = 0; i < LANES; i++) v_store(to + i * TILE_BYTES, x[i]);
        }
}

/* Packs n values of int8 into a panel's tiles: puts a column's elements of four rows side by side. */
TARGET void kvc_pack_byte_values_amx(void *panel, const void *rows, int64_t row_stride, int first, int n, int dim) {
    for (int j = 0; j < n; j += 4)
        for (int d = 0; d < dim; d += LANES) {
            char *const tile = byte_tile(panel, d / LANES * VALUE_TILES + (first + j) / TILE_STEPS);
            i_store(tile + (first + j) % TILE_STEPS / 4 * TILE_BYTES,
                    i_load_quad((const char *)row_at(rows, row_stride, j) + d, row_stride, /* swaps */ 0));
        }
}

/* Multiplies the bytes of up to BLOCK_ROWS rows at a, lda bytes apart, by two columns of tiles, whose rows are ldb
 * bytes apart; leaves the sums in registers.  The product says which bytes have signs. */
#define MULTIPLY_BYTES(product, a, lda, b, b_right, ldb, num_tiles, two_rows)             \
    do {                                                                                  \
        memory_barrier();                                                                 \
        _tile_zero(0);                                                                    \
        _tile_zero(1);                                                                    \
        _tile_zero(2);                                                                    \
        _tile_zero(3);                                                                    \
        for (int i = 0; i < (num_tiles); i++) {                                           \
            _tile_loadd(6, (b) + i * TILE_ROWS * (ldb), ldb);                             \
            _tile_loadd(4, (a) + i * TILE_STEPS, lda);                                    \
            _tile_loadd(7, (b_right) + i * TILE_ROWS * (ldb), ldb);                       \
            product(0, 4, 6);                                                             \
            product(1, 4, 7);                                                             \
            if (two_rows) {                                                               \
                _tile_loadd(5, (a) + i * TILE_STEPS + TILE_ROWS * (ptrdiff_t)(lda), lda); \
                product(2, 5, 6);                                                         \
                product(3, 5, 7);                                                         \
            }                                                                             \
        }                                                                                 \
        memory_barrier();                                                                 \
    } while (0)

/* Stores these sums at c, ldc bytes apart. */
INLINE void store_byte_sums(void *c, ptrdiff_t ldc, int two_rows) {
    char *const first = c, *const second = first + TILE_ROWS * ldc;
    memory_barrier();
    _tile_stored(0, first, ldc);
    _tile_stored(1, first + TILE_BYTES, ldc);
    if (two_rows) {
        _tile_stored(2, second, ldc);
        _tile_stored(3, second + TILE_BYTES, ldc);
    }
    memory_barrier();
}

/* Turns the sums of products in two vectors of columns of num_q rows, in their place, into scores. */
INLINE void finish_scores(float *scores, const float *q, int q_stride, int num_q, const float *units) {
    const vec first = v_load(units), second = v_load(units + LANES);
    for (int r = 0; r < num_q; r++, scores += KVC_BYTE_SCORES, q += q_stride) {
        kvc_byte_query query;
        memcpy(&query, q, sizeof query);
        const vec unit = v_set(query.unit);
        v_store(scores, v_mul(v_mul(v_from_int(i_load(scores)), first), unit));
        v_store(scores + LANES, v_mul(v_mul(v_from_int(i_load(scores + LANES)), second), unit));
    }
}

/* Scores n packed keys for num_q query rows, up to BLOCK_ROWS.  Finishes scores while the next ones are multiplied. */
TARGET void kvc_score_bytes_amx(float *scores, const float *q, int q_stride, int num_q, const void *panel,
                                const float *units, int n, int dim) {
    const ptrdiff_t stride = q_stride * (ptrdiff_t)sizeof *q;
    const char *const codes = (const char *)q + KVC_BYTE_CODES;
    const int padded = kvc_padded_rows(n), two_rows = num_q > TILE_ROWS, num_tiles = key_tiles(dim), step = 2 * LANES;
    if (num_q < BLOCK_ROWS) configure_tiles(num_q);
    for (int j = 0; j < padded; j += step) {
        const char *const left = byte_tile_in(panel, j / LANES * num_tiles), *const right =
                                                                                 byte_tile_in(left, num_tiles);
        MULTIPLY_BYTES(_tile_dpbssd, codes, stride, left, right, TILE_BYTES, num_tiles, two_rows);
        if (j) finish_scores(scores + j - step, q, q_stride, num_q, units + j - step);
        store_byte_sums(scores + j, WEIGHTS_BYTES_APART, two_rows);
    }
    finish_scores(scores + padded - step, q, q_stride, num_q, units + padded - step);
    if (num_q < BLOCK_ROWS) configure_tiles(BLOCK_ROWS);
}

/* Adds sums of two vectors of columns to acc. */
INLINE void add_byte_sums(float *acc, int acc_stride, const float *factor, const float *unit,
                          const int32_t (*sums)[2 * LANES], int num_q) {
    for (int r = 0; r < num_q; r++, acc += acc_stride) UNROLL
    for (int v = 0; v < 2; v++) {
        const vec sum = v_from_int(i_load(sums[r] + v * LANES));
        v_store(acc + v * LANES, v_fma(sum, v_set(unit[r]), v_mul(v_load(acc + v * LANES), v_set(factor[r]))));
    }
}

/* Adds n packed values, weighted, to num_q rows of acc, while the next columns are multiplied. */
TARGET void kvc_sum_bytes_amx(float *acc, int acc_stride, const float *factor, const float *unit, const float *weights,
                              int num_q, const void *panel, int n, int dim) {
    int32_t sums[BLOCK_ROWS][2 * LANES];
    const int num_tiles = kvc_padded_rows(n) / TILE_STEPS, two_rows = num_q > TILE_ROWS, step = 2 * LANES;
    if (num_q < BLOCK_ROWS) configure_tiles(num_q);
    for (int d = 0; d < dim; d += step) {
        const char *const left = byte_tile_in(panel, d / LANES * VALUE_TILES), *const right =
                                                                                   byte_tile_in(left, VALUE_TILES);
        MULTIPLY_BYTES(_tile_dpbusd, (const char *)weights, WEIGHTS_BYTES_APART, left, right, TILE_BYTES, num_tiles,
                       two_rows);
        if (d) add_byte_sums(acc + d - step, acc_stride, factor, unit, (const int32_t (*)[2 * LANES]) sums, num_q);
        store_byte_sums(sums, sizeof *sums, two_rows);
    }
    add_byte_sums(acc + dim - step, acc_stride, factor, unit, (const int32_t (*)[2 * LANES]) sums, num_q);
    if (num_q < BLOCK_ROWS) configure_tiles(BLOCK_ROWS);
}
