/* check.h: checks that several public functions make before they change anything. */
#ifndef KVC_CHECK_H
#define KVC_CHECK_H

#include "cache/batch.h"

/* Returns KVC_ERR_INDEX unless the cache has the layer. */
kvc_status kvc_check_layer(const kvc_cache *cache, int32_t layer);

enum { KVC_MAY_LACK_VALUES, KVC_NEEDS_VALUES }; /* what kvc_check_attention takes */

/* Returns KVC_ERR_INDEX unless the cache has the layer, KVC_ERR_INVALID if it is KVC_NONE or the batch restores, and
 * KVC_ERR_UNSUPPORTED if needs_values is KVC_NEEDS_VALUES and the layer holds keys alone. */
kvc_status kvc_check_attention(const kvc_batch *batch, int32_t layer, int needs_values);

/* Returns KVC_ERR_INVALID if the layer has no rows of its own. */
kvc_status kvc_check_own_rows(const kvc_cache *cache, int32_t layer);

/* Returns KVC_ERR_INVALID if the layer has no rows of its own, or the batch restores other layers than this one. */
kvc_status kvc_check_takes_rows(const kvc_batch *batch, int32_t layer);

/* Checks that a batch may choose rows by a layer: what kvc_check_attention checks.  Also returns KVC_ERR_UNSUPPORTED
 * unless the layer holds keys alone. */
kvc_status kvc_check_choosing(const kvc_batch *batch, int32_t layer);

/* Returns KVC_ERR_INVALID unless k is given, and v exactly where the layer stores values apart from its keys. */
kvc_status kvc_check_values(const kvc_layer *layer, const void *k, const void *v);

/* An axis of a caller's array: the bytes from one entry to the next, in a field of this name. */
typedef struct kvc_axis {
    const char *name;
    int64_t *stride;
    int64_t num; /* of entries; 0: there is no such axis, or nothing in the array */
} kvc_axis;

enum { KVC_MOST_AXES = 3 };

#define KVC_AXIS(args, field, num) {#field, &(args)->field, num}

/* A caller's array of rows.  The elements of a row are adjacent. */
typedef struct kvc_array {
    const char *name; /* of the argument, for messages */
    const void *data; /* NULL: the caller gives no such array */
    int32_t is_output;
    int32_t element_bytes;        /* 0: elements are of `type` */
    int32_t type, stored;         /* a float type, or the type in which the layer stores rows, if that is given */
    int64_t length;               /* elements of a row */
    kvc_axis axes[KVC_MOST_AXES]; /* from heads, or choices, outwards */
} kvc_array;

/* Resolves strides: replaces 0 by the default, with which rows lie side by side.  Returns KVC_ERR_INVALID if the array
 * may not have its type, if a stride is not a whole number of elements, or if rows of an output overlap. */
kvc_status kvc_resolve_array(const kvc_array *array);

/* Returns KVC_ERR_INVALID unless tokens_per_sequence, which is not 0, divides num_tokens. */
kvc_status kvc_check_tokens_per_sequence(int32_t tokens_per_sequence, int32_t num_tokens);

/* Return KVC_ERR_INVALID unless the argument of this name is a position, or [begin, end) a range of positions. */
kvc_status kvc_check_position(int32_t value, const char *name);
kvc_status kvc_check_positions(int32_t begin, int32_t end);

/* Resolves a number of tokens: 0 becomes all from `first` on.  Returns KVC_ERR_INDEX unless the batch has tokens
 * [first, first + *num_tokens). */
kvc_status kvc_resolve_range(const kvc_batch *batch, int32_t first, int32_t *num_tokens);

/* Returns KVC_ERR_INVALID if flags of layers name some layers of a group, and others that have rows not; name: of the
 * argument. */
kvc_status kvc_check_groups(const kvc_cache *cache, const uint8_t *flags, const char *name);

/* Returns KVC_ERR_GONE for a token at `position` that would miss rows (kvc_cache_misses), and says which. */
kvc_status kvc_fail_gone(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position);

/* Returns KVC_ERR_GONE if the sequence could not resume at position `length` once its rows from there on are
 * dropped.  Returns KVC_OK if it has no such rows. */
kvc_status kvc_check_cut(const kvc_cache *cache, const kvc_sequence *sequence, int32_t length);

/* Returns KVC_ERR_BUSY if a batch or a rewrite has the sequence, which may be NULL. */
kvc_status kvc_check_idle(const kvc_sequence *sequence);

/* Returns KVC_ERR_INVALID if the sequence, which may be NULL, is a kept one. */
kvc_status kvc_check_not_kept(const kvc_sequence *sequence);

/* Returns KVC_ERR_BUSY if a batch is open or keys are being rewritten; `what`, for the message, cannot be done then. */
kvc_status kvc_check_no_batch(const kvc_cache *cache, const char *what);

/* Checks what kvc_check_no_batch does, and returns KVC_ERR_HELD while views are held, as their rows must not move.
 * Waits for calls that read or write rows without the mutex. */
kvc_status kvc_check_closed(kvc_cache *cache, const char *what);

#endif
