/* template.h: the kernels, written once over vectors of floats.
 *
 * The file of an instruction set defines the parameters below, most of them in a header of vector primitives, and
 * includes this; then it lists its kernels, each with its name in full, and its table (instantiate.h).  The parts stand
 * at the end, in their order: none calls a later one.
 *
 *   TARGET           attribute of every function
 *   INLINE           static, TARGET, and always inlined where speed counts (target.h)
 *   RARE             static, TARGET, and small: for shapes that few models have (target.h)
 *   APART            static, TARGET, and never inlined: its caller stays small (target.h)
 *   UNROLL           before a loop over registers; nothing where speed does not count (target.h)
 *   LANES            floats in a vector; divides KVC_LANES, which is half of KVC_QUANT_ELEMENTS
 *   ACCUMULATORS     registers for the sums of score and accumulate, which need four more for factors: at least 4, and
 *                    more than the latency of an fma times the fmas that start in a cycle
 *   MATMUL_SUMS      registers for the block of c that matmul works on, of up to 6 rows and up to MATMUL_VECTORS (2 or
 *   MATMUL_VECTORS   4) vectors of columns, beside which it needs MATMUL_VECTORS + 1
 *   IS_WIDE          1 if vectors have 16 lanes and there are 32 registers: up to 8 queries are worked on at once, rows
 *                    are scored in pairs that share vectors, and bf16 is loaded two vectors at a time; may be left out
 *   HAS_DOT_16       1 if there are bvec and b_dot, of a type of 16 bits; may be left out
 *   LARGEST_WEIGHT   int16 that the largest weight of quantised rows becomes: INT16_MAX, unless it is defined
 *   HAS_QUADS        1 if there is i_dot_quads; may be left out
 *   HAS_VNNI         1 if there are the products of AVX-512 VNNI, where i_dot is one instruction; may be left out
 *   HAS_AVX_VNNI     1 if there are those of AVX-VNNI: as slow to end, with half of the registers; may be left out
 *
 *   vec                        a vector of LANES floats; where these primitives take integers, x holds them as floats
 *   v_zero()  v_set(x)         0 or x in all lanes
 *   v_keep(x)                  x, held in a register: compilers tend to load a value anew for every use
 *   v_load(p)  v_store(p, x)   floats at any address
 *   v_store_first(p, x)        the first lane
 *   v_load_some(p, count)  v_store_some(p, x, count)     the first `count` lanes; others are not read, and are 0
 *   v_load_f16(p)  v_store_f16(p, x)  v_load_bf16(p)  v_store_bf16(p, x)     the same, converted
 *   v_load_i8(p)               LANES int8
 *   v_load_u4(p, shift)        bits [shift, shift + 4) of each of LANES bytes
 *   v_store_8(p, x)            the low 8 bits of LANES integers of [-128, 256)
 *   code_bytes                 a vector of KVC_QUANT_ELEMENTS uint8_t, which adds and compares as C's integers do
 *   c_from_floats(x)           those of x[0 .. QUANT_VECTORS), of [0, 256), truncated
 *   c_to_floats(x, y)          sets x[0 .. QUANT_VECTORS) to bytes y that have signs
 *   c_look_up(table, x)        for each byte of x, below 16, that of 16 at table
 *   v_set_f16(p)               the f16 at p in all lanes
 *   store_f16(p, x)            one float as an f16
 *   v_add(x, y)  v_mul(x, y)  v_div(x, y)
 *   v_fma(x, y, z)             x * y + z, rounded once
 *   v_max(x, y)  v_min(x, y)   y where either is NaN
 *   v_abs(x)
 *   v_max_abs(x, y)            v_max(v_abs(x), y), where y is at least 0 and x no signalling NaN
 *   v_number(x)                x, or 0 where it is NaN
 *   v_mask(x, p)               the bits of x that are set in the vector at p
 *   v_store_nearest(p, x)      8 bits each: the nearest integers to LANES numbers, halves away from 0
 *   v_truncate(x)              to an integer, towards 0
 *   v_equal(x, y)              a uint32_t whose bit i is set where lanes i are equal
 *   v_count(n, x, y)           n, and 1 more where x >= y
 *   v_scale(x, scale, y, least)
 *                              x * 2^n, where scale is 3 * 2^22 + 127 + n, n an integer of [-126, 0]; 0 where y is
 *                              below least
 *   v_split_power(x)           returns x less the next integer below, and makes x that integer, as ...
 *   v_times_power(y, x)        takes it: y of [1, 2) * 2^x, where x was below 128; 0 where it was below -127, and what
 *                              is small between; NaN where it was NaN
 *   v_max_lane(x)  v_sum_lanes(x)     one float
 *   v_max_lanes(x, count)      a vector of the largest lanes of x[0 .. count), none NaN; reads up to a multiple of 4
 *   v_store_largest(p, x)  v_store_sums(p, x)
 *                              the largest lanes of x[0 .. 4), none NaN, or the sums, each added up in the same order,
 *                              as four floats
 *   v_sums(x)                  a vector of the sums of x[0 .. LANES), each added up in the same order; where IS_WIDE,
 *                              of the halves of x[0 .. LANES / 2): the lower one of x[0], its upper one, those of x[1]
 *   v_transpose(x)             swaps lane j of x[i] and lane i of x[j]
 *   v_swap(x, n)               swaps lanes i and i ^ n, for n = 1, 2, 4, ... below LANES
 *   v_load_pair(type, x, p, q)
 *                              where IS_WIDE: LANES elements of each of two rows, at p and q, as x[0] and x[1], which
 *                              have LANES / 2 of the first row, then as many of the second; of bf16, even ones in x[0]
 *   v_load_twice(p)            where IS_WIDE: LANES / 2 floats, in both halves
 *   v_store_halves(p, q, x)    where IS_WIDE: the lower half at p and, unless q is NULL, the upper one at q
 *   v_evens_first(x)           where IS_WIDE: the even lanes in the lower half, the odd ones in the upper
 *   v_load_apart(x, p)         where IS_WIDE: of 2 * LANES bf16, the even ones as x[0], the odd ones as x[1]
 *   v_unzip(x)  v_zip(x)       where IS_WIDE: brings x[0 .. 2) into that order, and back
 *   copy_row(dst, src, bytes)  memcpy, or what is faster for rows that lie apart
 *
 *   ivec                       a vector of LANES int32, or of twice as many int16
 *   i_zero()
 *   i_set_16(x)                the int16 x in all lanes
 *   i_set_pair(p)              the int32, or pair of int16, at p in all lanes
 *   i_and(x, y)
 *   i_xor_and(x, y, z)         (x ^ y) & z
 *   i_high_bytes(x)            the high byte of each int16, with its sign
 *   i_shift(x, n)              shifts int16 lanes right by n: 2, 4, 6, 8 or 12; zeros come in
 *   i_dot(sum, x, y)           adds to each int32 lane of sum the two products of int16 there
 *   v_from_int(x)              converts int32 to floats
 *   i_store_16(p, x, y)        rounds two vectors of floats to 2 * LANES int16, which saturate
 *   unpack_codes(type, dst, block, by)
 *                              the codes of a block for each element, less `by`, or the levels that they stand for, as
 *                              KVC_QUANT_ELEMENTS int8
 *   i_load_rows(x, p, stride)  loads 16 bytes of each of LANES rows, those of the first at p: lane j of x[i] is int32 i
 *                              of row j
 *   v_load_scales(x, p, stride)
 *                              loads an f16 of each of LANES rows to x[0], that of the first at p, and the f16 behind
 *                              each to x[1]
 *   i_load_pairs(type, x, p, q)
 *                              pairs, as int16, of the elements of two rows in the same columns, at p and q.  q8_0:
 *                              2 * LANES columns in x[0 .. 2), in any order.  q4_0: LANES bytes, low halves in x[0],
 *                              high halves in x[1]
 *   i_order(type, x)           puts sums over what i_load_pairs loaded in the order of columns
 *   i_load(p)                  LANES int32 at any address
 *   i_begin_quads(p)           what sums of i_dot_quads begin with; p: starts of a kvc_rank_query
 *   i_set_quad(p)              the four int8 at p in all lanes, as i_dot_quads takes them
 *   i_dot_quads(sum, x, y)     adds to each int32 lane of sum the four products of int8 there, none of y -128
 *   i_dot_codes(sum, x, y)     the same of codes in bytes of x, which are below 4.  Sums may have another form, which
 *                              serves CODE_BYTES bytes of a sketch
 *   i_begin_codes(sum)         what such sums begin with that i_end_codes will add to the int32 of sum
 *   i_end_codes(sum, some)     returns int32: the sum, and what was added to such sums
 *
 *   where HAS_VNNI or HAS_AVX_VNNI, for prompts in bytes and what follows:
 *   i_dot_bytes(sum, x, y)     adds to each int32 lane of sum the four products of bytes there, of x without signs
 *   i_store(p, x)              LANES int32 at any address
 *   i_set_32(x)                the int32 x in all lanes
 *   i_xor(x, y)
 *   i_add(x, y)                adds int32
 *   i_load_quad(p, stride, swaps)
 *                              loads LANES bytes of each of four rows, those of the first at p: lane j has bytes j of
 *                              rows 0, 1, 2 and 3, or, swapped, of rows 0, 2, 1 and 3
 *
 *   where HAS_VNNI, for the kernels of codes of four and five bits, and of rows with one scale:
 *   i_set_16_bytes(p)          the 16 bytes at p in each quarter
 *   i_or(x, y)
 *   i_load_long_rows(x, p, stride)
 *                              as i_load_rows, of 32 bytes, to x[0 .. 8)
 *   i_low_bytes(x)             the low byte of each int16, with its sign
 *   i_next_bits(x)             shifts int32 lanes right by 4; zeros come in
 *   i_join(x, y)               the high half of each int32 of x, and the low half of that of y above it
 *   i_permute_16(x, order)     lane order[i] of the int16 of x as lane i
 *   i_look_up(table, x)        for each byte of x, below 16, that byte of the same quarter of the table
 *   has_look_up_64()           whether the processor has i_look_up_64
 *   i_look_up_64(table, x)     for each byte of x, that of the table which its low six bits name
 *   i_select(mask, x, y)       the bits of x where mask has ones, else those of y
 *   i_add_16(codes, x, bits)   adds 16 to those bytes of codes where x & bits is not 0
 *   v_from_f16_pairs(x, both)  converts the low halves of lanes, f16, to x[0] and the high ones to x[1]
 *
 *   where HAS_DOT_16, for queries and rows of f16 or bf16:
 *   bvec                       a vector of 2 * LANES of these
 *   b_load_some(p, count)      unless IS_WIDE: loads the first `count` at p; others are not read, and are 0
 *   b_load_pair(p, q, count)   where IS_WIDE: the same at p and at q, in a half each
 *   b_load_twice(p, count)     where IS_WIDE: the same at p, in both halves
 *   b_dot(sum, x, y)           adds to each float of sum two products: all of x and y
 *
 * Arguments that choose what is inlined (type, q_type, num_q, num_rows, num_vecs) are constants where a function is
 * called, so that loops over registers have constant bounds and can be unrolled.  A result is always computed by the
 * same operations in the same order, whatever is computed beside it: a query's scores do not depend on how many queries
 * there are.
 */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kvcache.h"

#ifndef IS_WIDE
#define IS_WIDE 0
#endif
#ifndef HAS_VNNI
#define HAS_VNNI 0
#endif
#ifndef HAS_AVX_VNNI
#define HAS_AVX_VNNI 0
#endif
#ifndef LARGEST_WEIGHT
#define LARGEST_WEIGHT INT16_MAX
#endif

enum {
    QUERIES = 4, /* most query rows that score and accumulate work on at once, but for rows of f16 and bf16 ... */
    FLOAT_QUERIES = IS_WIDE ? 8 : QUERIES /* ... where there are registers for it: fewer passes convert the same rows */
};
INLINE int most_queries(int type) { return type == KVC_F16 || type == KVC_BF16 ? FLOAT_QUERIES : QUERIES; }

#include "kernels/elements.h"
#include "kernels/rounding.h"
#include "kernels/prefetch.h"

/* ---- what score and accumulate work on --------------------------------------------------------------------------- */

/* Arguments for num_q <= FLOAT_QUERIES queries. */
typedef struct score_args {
    float *scores;    /* [num_q][KVC_SCORES] */
    const float *q;   /* [num_q][q_stride], prepared */
    int q_stride;     /* floats from row to row */
    const void *rows; /* [n], each of dim elements */
    int64_t row_stride;
    int n, dim;
} score_args;

/* A block of score is num_q queries by num_vecs vectors of rows.  Vector v holds elements of row v, or, where IS_WIDE,
 * of rows 2 v and 2 v + 1, a half each: where rows are short, adding up the lanes of sums costs as much as products,
 * and half as much with two rows in a vector.  Each query and vector of rows has a vector in which products are added
 * up:
 *
 *     sums[r * stride + v]     query r, vector v of rows; stride = sums_stride(num_vecs)
 */
enum {
    ROWS = IS_WIDE ? 2 : 1, /* in a vector */
    MAX_BLOCK_VECS = 8 / ROWS,
    MAX_SUMS = 16 /* vectors of a block, gaps included */
};

INLINE int block_vecs(int num_q) {
    const int most = ACCUMULATORS / num_q;
    return most >= MAX_BLOCK_VECS ? MAX_BLOCK_VECS : most >= 4 ? 4 : IS_WIDE ? 2 : most;
}

/* Returns a power of two, so that no load of a query's scores straddles two vectors just stored, and waits for both. */
INLINE int sums_stride(int num_vecs) { return num_vecs == 3 ? 4 : num_vecs; }

typedef struct accumulate_args {
    float *acc;              /* [num_q][acc_stride], of which dim columns are used */
    const float *factor;     /* [num_q] */
    const float *weights;    /* [num_q][KVC_SCORES] */
    kvc_value_piece *pieces; /* n rows, each of dim elements */
    int64_t row_stride;
    int acc_stride, n, dim;
    int apart;                             /* from the prefetcher of a piece to the next piece's: 0 or 1 */
    prefetcher next[KVC_TILE / KVC_PANEL]; /* copied into registers by each loop over rows */
} accumulate_args;

/* Begins to prefetch for a pass over `some` of `left` query rows, of `before` lines, then `lines` of each piece. */
APART void begin_ahead(accumulate_args *a, int some, int left, int before, int lines) {
    kvc_value_piece *const pieces = a->pieces;
    const int num = (a->n + KVC_PANEL - 1) / KVC_PANEL;
    a->apart = num > 1 && pieces[1].next.bytes > 0;
    for (int i = 0; i < (a->apart ? num : 1); i++, before = 0)
        a->next[i] = prefetch_begin(take_part(&pieces[i].next, some, left), pieces[i].rows,
                                    before + (a->apart ? lines : num * lines));
}

/* Prefetches what the passes over pieces have left. */
APART void end_ahead(const accumulate_args *a) {
    for (int i = 0; i == 0 || (a->apart && i * KVC_PANEL < a->n); i++) prefetch_rest(&a->next[i]);
}

/* Calls f(num_q, ...) with num_q as a constant: up to QUERIES, or `most`, which is QUERIES or 8.  has_all: 1 if there
 * may be 5, 6 and 7 as well. */
#define CALL_WITH_QUERIES(f, num_q, most, has_all, ...)  \
    switch (num_q) {                                     \
    case 1: f(1, __VA_ARGS__); break;                    \
    case 2: f(2, __VA_ARGS__); break;                    \
    case 3: f(3, __VA_ARGS__); break;                    \
    case 4: f(4, __VA_ARGS__); break;                    \
    case 5:                                              \
        if ((has_all) && (most) == 8) f(5, __VA_ARGS__); \
        break;                                           \
    case 6:                                              \
        if ((has_all) && (most) == 8) f(6, __VA_ARGS__); \
        break;                                           \
    case 7:                                              \
        if ((has_all) && (most) == 8) f(7, __VA_ARGS__); \
        break;                                           \
    default:                                             \
        if ((most) == 8) f(8, __VA_ARGS__);              \
    }

#include "kernels/score_quantised.h"
#if HAS_VNNI
#include "kernels/score_codes.h"
#endif
#if HAS_DOT_16
#include "kernels/score_16.h"
#endif
#include "kernels/score.h"
#include "kernels/accumulate_quantised.h"
#if HAS_VNNI
#include "kernels/accumulate_codes.h"
#endif
#include "kernels/accumulate.h"
#include "kernels/softmax.h"
#include "kernels/matmul.h"
#include "kernels/hadamard.h"
#include "kernels/rank.h"
#include "kernels/sketch.h"

#include "kernels/instantiate.h"
