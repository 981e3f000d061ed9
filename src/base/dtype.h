/* dtype.h: the table of element types: their names and sizes (kvc_type_name and kvc_row_bytes in kvcache.h), and
 * what a block holds. */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "kvcache.h"

enum {
    KVC_FLOAT_TYPES = 3,     /* kvc_type below this are floating point: what callers hand in and get out */
    KVC_STORED_TYPES = 12,   /* kvc_type below this can be stored; from KVC_FLOAT_TYPES on they are quantised */
    KVC_QUANT_ELEMENTS = 32, /* elements in a block of a quantised type */
    KVC_SCALE_BYTES = 2,     /* a block begins with its scale, an f16 */
    KVC_NIBBLE_BYTES = KVC_QUANT_ELEMENTS / 2,
    KVC_Q8_0_BYTES = KVC_SCALE_BYTES + KVC_QUANT_ELEMENTS
};

/* A block ends with the codes of its elements: 32 int8, or the low four bits of each, element i with element i + 16 in
 * a byte.  Before them stand, behind the scale: */
typedef struct kvc_type_row {
    const char *name;
    int8_t elements, bytes; /* in a block */
    int8_t has_minimum;     /* the f16 that a code of 0 stands for */
    int8_t has_fifth_bits;  /* 4 bytes, of which bit i is bit 4 of the code of element i */
    int8_t zero;            /* what is taken off a code before it is multiplied by the scale */
    int8_t has_row_scale;   /* instead of one in each block, a row has one: an f16 behind all blocks, or apart */
    int8_t num_levels;      /* what codes stand for where it is not 0: kvc_levels; of 64, bits 4 and 5 of the codes of
                               elements j, j + 8, j + 16 and j + 24 are byte j of the block, lowest first */
    int8_t is_fitted;       /* rows are mixed (kvc_mixing), and fitted to the levels as a whole */
} kvc_type_row;

/* In the order of kvc_type.  A type needs a row here and a function that encodes a block (elements.h, scalar.c).  A
 * type that is not a list of codes as above, or is not scored as one, also needs a function that decodes it. */
static const kvc_type_row KVC_TYPES[KVC_STORED_TYPES] = {
    [KVC_F32] = {"f32", 1, 4, 0, 0, 0, 0, 0, 0},
    [KVC_F16] = {"f16", 1, 2, 0, 0, 0, 0, 0, 0},
    [KVC_BF16] = {"bf16", 1, 2, 0, 0, 0, 0, 0, 0},
    [KVC_Q8_0] = {"q8_0", KVC_QUANT_ELEMENTS, KVC_Q8_0_BYTES, 0, 0, 0, 0, 0, 0},
    [KVC_Q4_0] = {"q4_0", KVC_QUANT_ELEMENTS, KVC_SCALE_BYTES + KVC_NIBBLE_BYTES, 0, 0, 8, 0, 0, 0},
    [KVC_Q4_1] = {"q4_1", KVC_QUANT_ELEMENTS, KVC_SCALE_BYTES + 2 + KVC_NIBBLE_BYTES, 1, 0, 0, 0, 0, 0},
    [KVC_Q5_0] = {"q5_0", KVC_QUANT_ELEMENTS, KVC_SCALE_BYTES + 4 + KVC_NIBBLE_BYTES, 0, 1, 16, 0, 0, 0},
    [KVC_Q5_1] = {"q5_1", KVC_QUANT_ELEMENTS, KVC_SCALE_BYTES + 2 + 4 + KVC_NIBBLE_BYTES, 1, 1, 0, 0, 0, 0},
    [KVC_IQ4_NL] = {"iq4_nl", KVC_QUANT_ELEMENTS, KVC_SCALE_BYTES + KVC_NIBBLE_BYTES, 0, 0, 0, 0, 16, 0},
    [KVC_INT8] = {"int8", KVC_QUANT_ELEMENTS, KVC_QUANT_ELEMENTS, 0, 0, 0, 1, 0, 0},
    [KVC_INT6] = {"int6", KVC_QUANT_ELEMENTS, KVC_QUANT_ELEMENTS / 4 + KVC_NIBBLE_BYTES, 0, 0, 0, 1, 64, 1},
    [KVC_INT4] = {"int4", KVC_QUANT_ELEMENTS, KVC_NIBBLE_BYTES, 0, 0, 0, 1, 16, 1}};

/* The numbers that codes stand for, times the scale, in ascending order.  The levels of int4 and int6 have the least
 * error (Lloyd and Max) among integers, for 64 and 128 normally distributed elements whose largest is 127 scales. */
static const int8_t KVC_LEVELS_IQ4_NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t KVC_LEVELS_INT4[16] = {-119, -90, -70, -54, -40, -28, -16, -5, 5, 16, 28, 40, 54, 70, 90, 119};
static const int8_t KVC_LEVELS_INT6[64] = {
    -127, -118, -110, -103, -97, -91, -86, -81, -76, -72, -68, -64, -60, -56, -52, -48, -45, -42, -39, -36, -33, -30,
    -27,  -24,  -21,  -18,  -15, -12, -9,  -6,  -3,  -1,  1,   3,   6,   9,   12,  15,  18,  21,  24,  27,  30,  33,
    36,   39,   42,   45,   48,  52,  56,  60,  64,  68,  72,  76,  81,  86,  91,  97,  103, 110, 118, 127};
static inline const int8_t *kvc_levels(int32_t type) {
    return type == KVC_INT4 ? KVC_LEVELS_INT4 : type == KVC_INT6 ? KVC_LEVELS_INT6 : KVC_LEVELS_IQ4_NL;
}

#define KVC_LARGEST_F16 65504.0f

/* A block of iq4_nl without a larger element than this is stored as a scale of 0, and codes of the level 1. */
#define KVC_LEAST_LEVELLED 1e-15f
enum { KVC_LEVELS_OF_1 = 0x88 };

/* Return the bytes of a row's blocks, without a scale of the row; and the bytes of its scale. */
static inline size_t kvc_blocks_bytes(int32_t type, int32_t dim) {
    return (size_t)dim / (size_t)KVC_TYPES[type].elements * (size_t)KVC_TYPES[type].bytes;
}
static inline size_t kvc_row_scale_bytes(int32_t type) { return KVC_TYPES[type].has_row_scale ? KVC_SCALE_BYTES : 0; }

/* Whether rows are int8, with scales in their blocks or one for each row. */
static inline int kvc_is_8_bits(int32_t type) { return type == KVC_Q8_0 || type == KVC_INT8; }

/* Returns the elements in a block of the type, of which a row's length is a multiple; 1 if it is not quantised. */
static inline int32_t kvc_type_elements(int32_t type) { return KVC_TYPES[type].elements; }

#endif
