/* transit.h: rows on their way between a cache and a saved state.
 *
 * While it lasts, the rows' blocks stay in place, and other calls see nothing half done.  Saving works on a copy of the
 * lists of runs.  Loading fills sequences that are not in the table yet.  The caller's functions run meanwhile, so no
 * call waits for a state: it counts as a hold.
 */
#ifndef KVC_TRANSIT_H
#define KVC_TRANSIT_H

#include "cache/cache.h"
#include "saved/format.h"

/* Rows [row, row + count) of a group in the file, which lie in consecutive slots of a block. */
typedef struct kvc_extent {
    int64_t row;
    kvc_block *block;
    int32_t slot, count;
} kvc_extent;

/* The extents of a layer group, by rising row. */
typedef struct kvc_extents {
    kvc_extent *items;
    int64_t num;
    int32_t reserved; /* loading: new blocks that were made for them */
} kvc_extents;

/* Memory of a state: what was asked for begins a cache line behind this. */
typedef struct kvc_state_buffer {
    struct kvc_state_buffer *next;
    uint64_t size;
} kvc_state_buffer;

typedef struct kvc_state {
    struct kvc_state *next; /* in the list cache->states */
    kvc_thread thread;
    kvc_cache *cache;   /* NULL: there is none yet */
    kvc_memory *memory; /* for what the state allocates */
    kvc_state_buffer *buffers;
    int32_t is_begun, is_pinned, is_loading;
    kvc_extents *groups; /* [num_groups] NULL: there are none yet */
    kvc_table sequences; /* loading: sequences that will be part of the cache */
    kvc_format format;
} kvc_state;

/* All functions but kvc_state_take and kvc_pieces_run are called with the cache's mutex held, if there is a cache. */

/* Allocates memory that is freed with the state, aligned to a cache line; NULL if out of memory, which is noted for
 * kvc_last_error. */
void *kvc_state_alloc(kvc_state *state, uint64_t size);

/* Does what kvc_state_alloc does for callers that do not hold the mutex: locks it meanwhile. */
void *kvc_state_take(kvc_state *state, uint64_t size);

/* Makes the list of groups, without extents.  KVC_ERR_NOMEM. */
kvc_status kvc_state_add_groups(kvc_state *state);

/* Keeps the cache from being freed, and shows the sequences to kvc_validate and fork(), until kvc_state_end. */
void kvc_state_begin(kvc_state *state);

/* Keeps the rows of all extents in place until kvc_state_end. */
void kvc_state_pin(kvc_state *state);

/* Makes the sequences part of the table, in place of those with the same id. */
void kvc_state_accept(kvc_state *state);

/* Drops all that is being loaded. */
void kvc_state_drop(kvc_state *state);

/* Lets go of the rows and frees all memory; what is being loaded and was not accepted is dropped. */
void kvc_state_end(kvc_state *state);

/* Returns KVC_ERR_UNSUPPORTED if the bytes of numbers here are not in the order of the file's. */
kvc_status kvc_check_endian(void);

/* Returns KVC_ERR_INVALID unless the ids rise, or seq_ids is NULL and their number is 0. */
kvc_status kvc_check_seq_ids(const int64_t *seq_ids, int64_t num_sequences);

/* ---- bytes of rows ----------------------------------------------------------------------------------------------- */

/* Returns the first extent that ends behind a row; the end of the list if none does. */
const kvc_extent *kvc_first_extent(const kvc_extents *extents, int64_t row);

enum { KVC_WINDOW_PIECES = 4 };
#define KVC_WINDOW_BYTES ((uint64_t)KVC_WINDOW_PIECES * KVC_FORMAT_PIECE)

typedef enum kvc_pieces_use { KVC_SAVE_PIECES, KVC_LOAD_PIECES, KVC_HASH_PIECES } kvc_pieces_use;

/* Up to KVC_WINDOW_BYTES consecutive bytes of a tensor, from a multiple of KVC_FORMAT_PIECE on. */
typedef struct kvc_pieces {
    const kvc_state *state;
    const kvc_tensor *tensor;
    kvc_pieces_use use; /* bytes are copied from the cache, or to it, or only hashed */
    int32_t num_threads;
    uint64_t begin, size;
    char *bytes; /* [size] */
    uint64_t hashes[KVC_WINDOW_PIECES];
} kvc_pieces;

/* Copies and hashes the pieces.  `checksum` is that of the tensor up to their begin: 0 for no bytes.  Returns the
 * checksum up to their end: for each piece, kvc_hash of its kvc_hash, with the checksum before it as the seed. */
uint64_t kvc_pieces_run(kvc_pieces *pieces, uint64_t checksum);

/* Makes the sketches of all rows of the extents, once these are loaded. */
void kvc_state_sketch(const kvc_state *state);

#endif
