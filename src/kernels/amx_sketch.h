/* amx_sketch.h: sketches scored in tile registers for many query rows; part of amx.c.
 *
 * A sketch is a code of two bits for each element of a key; a quad is four codes, a byte each.  A tile has 16 quads of
 * each of 16 rows, the lanes of a vector, as sketch.h unpacks them: SKETCH_VECTORS tiles are side by side.
 */

enum { FEWEST_TILED = 5 /* query rows: the kernel of vectors is faster for fewer */ };

/* Scores unpacked rows for up to BLOCK_ROWS queries.  Registers keep their shapes, of TILE_ROWS queries: to configure
 * them takes longer than products with garbage behind the last query, whose sums nobody reads. */
INLINE void score_in_tiles(float *scores, const kvc_sketch_query *q, int num_q, const unpacked_sketches *rows,
                           int dim) {
    const char *const tiles = (const char *)rows->quads;
    const int two_rows = num_q > TILE_ROWS;
    int32_t sums[BLOCK_ROWS][KVC_PANEL];
    for (int v = 0; v < SKETCH_VECTORS; v += 2) {
        MULTIPLY_BYTES(_tile_dpbsud, q->codes, q->stride, tiles + v * TILE_BYTES, tiles + (v + 1) * TILE_BYTES,
                       SKETCH_VECTORS * TILE_BYTES, key_tiles(dim), two_rows);
        store_byte_sums(&sums[0][v * LANES], sizeof *sums, two_rows);
    }
    for (int r = 0; r < num_q; r++) UNROLL
    for (int v = 0; v < SKETCH_VECTORS; v++)
        v_store(scores + r * KVC_SCORES + v * KVC_LANES, scores_of(i_load(sums[r] + v * LANES), rows->scales[v], q, r));
}

APART void score_sketches_in_tiles(float *scores, const kvc_sketch_query *q, int num_q, const void *rows,
                                   int64_t row_stride, int dim) {
    unpacked_sketches codes;
    unpack_sketches(&codes, rows, row_stride, dim);
    for (int r = 0; r < num_q; r += BLOCK_ROWS) {
        const kvc_sketch_query some = queries_from(q, r);
        score_in_tiles(scores + r * KVC_SCORES, &some, smaller(num_q - r, BLOCK_ROWS), &codes, dim);
    }
}

/* Scores the sketches of KVC_PANEL rows for num_q queries: in tiles, unless queries are few or keys too long. */
TARGET static void kvc_sketch_amx(float *scores, const kvc_sketch_query *q, int num_q, const void *rows,
                                  int64_t row_stride, int dim) {
    if (num_q < FEWEST_TILED || dim > MOST_UNPACKED)
        kvc_sketch_avx512vnni(scores, q, num_q, rows, row_stride, dim);
    else
        score_sketches_in_tiles(scores, q, num_q, rows, row_stride, dim);
}
