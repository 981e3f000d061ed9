/* kvcache.h: the KV cache for CPU inference.  The whole public C interface.
 *
 * A language-model runner keeps, for every layer, the keys and values of the tokens it has seen, decides which of
 * them stay, and attends over them.  This library does that, and nothing else.
 *
 * Words
 *   position      where a token stands in its sequence (int32).  Never the same thing as where it is stored.
 *   policy        per layer: which positions a query may see, and so which rows may be dropped.
 *   layer group   the layers that share a policy; they share blocks and bookkeeping.  A KVC_CROSS layer is a group by
 *                 itself.
 *   slot          room for one token: its K and V rows of every head of every layer of the group.
 *   block         `block_size` slots: the unit of allocation and of sharing between sequences.
 *   run           consecutive slots of one block that one sequence holds, at consecutive positions.
 *   sequence      a list of runs, in order of arrival.  Named by any int64; one that holds nothing is empty, not
 *                 unknown: queries answer 0 or -1, edits do nothing; but it cannot be forked.
 *   batch         the tokens of one forward pass, of one or many sequences.  A cache has one open batch at a time.
 *   delta         of a run: its positions now, less the positions its keys were rotated for (RoPE).
 *   span          a run as memory: pointers, strides, number of rows, first position, delta.
 *   retained      of a sequence: it waits to be used again, until its memory is needed (kvc_retain).
 *   prefix        finds the beginning of a prompt among the blocks that sequences left behind (kvc_prefix_new).
 *   store         keeps blocks of prefixes outside the cache, for other processes and later ones (kvc_store).
 *
 * Life of a cache
 *   kvc_cache_new(config, &cache)                 an empty cache, of a model's shape
 *     kvc_begin(cache, n, positions, ..., &batch) room for every token in every layer, or an error and no change
 *       kvc_put(batch, layer, rows)               for each layer, then:
 *       kvc_attend(batch, plan, queries)          over all that the tokens may see
 *     kvc_commit(batch)                           the tokens are part of their sequences; or kvc_abort: they never were
 *     kvc_fork, kvc_remove, kvc_shift, ...        edit sequences, between batches
 *     kvc_gather, kvc_spans, ...                  read rows, at any time
 *   kvc_cache_free(cache)
 *
 * Errors    A function that can fail returns a kvc_status; KVC_OK is 0.  A call that failed has changed nothing, unless
 *           its function says otherwise.  kvc_last_error() returns the message of the thread's last failure, with the
 *           numbers in it.  Read it at once, because a call that succeeds may have overcome a failure of its own.
 *           Nothing here aborts, prints or leaks.
 *           Each function lists its errors, except two that any function may return: KVC_ERR_INVALID (a bad argument:
 *           NULL, negative, an unknown constant) and KVC_ERR_INDEX (no such layer).
 *           Handles (kvc_cache *, kvc_batch *, ...) are not checked.  Pass what kvc_cache_new, kvc_begin and the like
 *           made, while it is in use.  NULL crashes, except where it is freed.
 * Threads   Any thread may call any function.  A mutex guards the bookkeeping.  Nobody holds it while rows are put,
 *           replaced, copied out, settled, attended over or handed to a function of the caller.  How long a call holds
 *           it depends on its arguments and on the sequences that it names, not on what else the cache has.
 *           Two kinds of calls may hold it longer: calls about all sequences (kvc_clear, kvc_keep, kvc_sequences,
 *           kvc_retained, kvc_settle, kvc_cache_clone, kvc_save without seq_ids, kvc_blocks, kvc_validate), and
 *           kvc_compact, kvc_begin and kvc_reserve when they move rows together.
 *           While a batch is open, or kvc_shift, kvc_remove or kvc_divide rewrites the keys of a sequence, these fail
 *           with KVC_ERR_BUSY: to begin a batch, to edit such a sequence, and kvc_reserve, kvc_room, kvc_settle,
 *           kvc_compact, kvc_cache_clone and kvc_cache_free.  Other sequences may be edited.  So threads that serve one
 *           request each put their tokens in one batch, of many sequences, or take turns: kvc_begin_with waits for the
 *           open batch to end if it is given timeout_ms.
 *           Some calls wait.  Calls that read the rows of a sequence, edit it or begin a batch of it wait while
 *           kvc_inject or kvc_settle writes its rows.  kvc_compact, kvc_settle and kvc_cache_free wait for calls that
 *           copy rows out; a call that comes to copy rows meanwhile waits behind them.
 *           kvc_commit and kvc_reserve end with work on OS pages, without the mutex; the batch has ended by then.
 *           If max_bytes is set, calls that may take memory for rows wait for this work.
 * fork()    The child has one thread, and every cache as it was.  fork() waits for what other threads do in the
 *           library, except for work on a batch (the child has it open, without that work), for threads that wait to
 *           begin one (in the child nobody waits), and for functions of the caller (a sequence whose keys one was
 *           moving is as it was before).  Sequences that a call has for itself, and does not return, are not there.
 * Limits    max_seq_len and max_sequences are checked when a batch begins.  capacity is also checked by edits that copy
 *           rows, by kvc_retain_new and by what loads rows; max_bytes whenever memory is taken for rows.
 *           Sharing and loading may exceed max_seq_len and max_sequences.  Past max_seq_len, the next batch
 *           of that sequence is refused.  Past max_sequences, any batch is refused.
 * Structs   grow at their end, so that a program and a library of different versions understand each other.
 *           Handed in: a struct begins with its own size, an array comes with the size of an element.  A field that is
 *           0 asks for its default, and so does one that an older, smaller struct lacks.  Fields of a newer, larger one
 *           that the library does not know must be 0, or it is KVC_ERR_UNSUPPORTED.  A struct that is smaller than the
 *           oldest that the library takes is KVC_ERR_INVALID.
 *           Filled in: a smaller struct gets its own fields only, a larger one zeros past those the library knows.
 *           Within another struct (kvc_policy, kvc_rope): `reserved` fields take the place of growth, and must be 0
 *           until they have a name, or it is KVC_ERR_UNSUPPORTED.
 * Ranges    are half open: [begin, end).  Strides are in bytes.
 */
#ifndef KVCACHE_H
#define KVCACHE_H

#include <stddef.h>
#include <stdint.h>

#define KVC_VERSION_MAJOR 0
#define KVC_VERSION_MINOR 2
#define KVC_VERSION_PATCH 0

/* Marks what a shared library exports.  Sources that are compiled with -DKVC_API= and -fvisibility=hidden into another
 * library are not exported by that. */
#ifndef KVC_API
#if defined(_WIN32) && defined(KVC_SHARED)
#ifdef KVC_BUILD
#define KVC_API __declspec(dllexport)
#else
#define KVC_API __declspec(dllimport)
#endif
#elif defined(__GNUC__)
#define KVC_API __attribute__((visibility("default")))
#else
#define KVC_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------------------------ */

/* All statuses, as X(name, value, text). */
#define KVC_STATUS_LIST(X)                                                                                             \
    X(KVC_OK, 0, "success")                                                                                            \
    X(KVC_ERR_INVALID, 1, "an argument is invalid")                                                                    \
    X(KVC_ERR_INDEX, 2, "a layer, token or row is out of range")                                                       \
    X(KVC_ERR_FULL, 3, "the tokens do not fit")                                                                        \
    X(KVC_ERR_NOMEM, 4, "out of memory")                                                                               \
    X(KVC_ERR_UNSUPPORTED, 5, "not supported")                                                                         \
    X(KVC_ERR_BUSY, 6, "an open batch is using it")                                                                    \
    X(KVC_ERR_HELD, 7, "a view is holding it")                                                                         \
    X(KVC_ERR_GONE, 8, "rows that would be seen have expired")                                                         \
    X(KVC_ERR_CANCELLED, 9, "cancelled")                                                                               \
    X(KVC_ERR_CORRUPT, 10, "an invariant does not hold")                                                               \
    X(KVC_ERR_CALLBACK, 11, "a function of the caller failed")                                                         \
    X(KVC_ERR_FORMAT, 12, "no saved state or stored value, or a damaged one")                                          \
    X(KVC_ERR_STORE, 13, "a store failed")

typedef enum kvc_status {
#define KVC_STATUS_ENUM(name, value, text) name = value,
    KVC_STATUS_LIST(KVC_STATUS_ENUM)
#undef KVC_STATUS_ENUM
} kvc_status;

/* Returns the status in general words, static; "unknown status" for a number that is none. */
KVC_API const char *kvc_strerror(kvc_status status);

/* Returns the message of this thread's last call that failed, "" if none did.  Valid until its next failure. */
KVC_API const char *kvc_last_error(void);

/* Sets what kvc_last_error() returns on this thread, for functions of the caller that return a status (kvc_store): a
 * sentence, as printf makes it, cut to 511 bytes.  An argument may be the text that kvc_last_error() returned. */
KVC_API void kvc_set_last_error(const char *format, ...);

/* ---- configuration ----------------------------------------------------------------------------------------------- */

typedef enum kvc_type { /* element types of rows */
    KVC_F32 = 0,
    KVC_F16 = 1,
    KVC_BF16 = 2,
    /* Blocks of 32 elements along a row, byte for byte what ggml's reference makes of them; k_dim, or v_dim, must be a
     * multiple of 32.  All begin with an f16 scale d: where that overflows (elements beyond 65504 * 127, or times 8, 15,
     * 16 or 31) it is infinite, and elements decode to infinities and, where they are stored as 0, to NaN.
     *
     * Codes q of 4 bits stand at the end, that of element i with that of element i + 16 in a byte, low bits first.  A
     * fifth bit stands before them, as bit i of 4 bytes.  Before these, behind d, stands an f16 minimum m, if any. */
    KVC_Q8_0 = 3,  /* 34 bytes: d = max |x| / 127, then 32 int8 q = round(x / d), halves away from 0; x = d * q */
    KVC_Q4_0 = 4,  /* 18 bytes: d = the x of largest magnitude / -8, q = floor(x / d + 8.5), at most 15; x = d * (q - 8) */
    KVC_Q4_1 = 5,  /* 20 bytes: m = min x, d = (max x - m) / 15, q = floor((x - m) / d + 0.5); x = d * q + m */
    KVC_Q5_0 = 6,  /* 22 bytes: as KVC_Q4_0 with 16 for 8 and 31 for 15; 5 bits */
    KVC_Q5_1 = 7,  /* 24 bytes: as KVC_Q4_1 with 31 for 15; 5 bits */
    KVC_IQ4_NL = 8, /* 18 bytes: x = d * level[q], with level = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.
                      q is that of the level nearest to -127 * x / (the x of largest magnitude); d = sum of w * level[q] *
                      x / sum of w * level[q]^2, with w = x^2.  Elements below 1e-15 are stored as d = 0, q = 8; with any
                      beyond 1e18, d may be NaN */
    /* One f16 scale d for a whole row, so that kernels multiply integers alone; k_dim, or v_dim, must be a multiple of
     * 32.  In a row of a caller's d stands behind the elements; in the cache, apart (kvc_span).  An infinite element, or
     * one of 65520 * 127 or more, makes d infinite, and NaN or infinities of all elements; NaN is stored as 0. */
    KVC_INT8 = 9, /* dim + 2 bytes: d = max |x| / 127, int8 q = round(x / d), halves away from 0; x = d * q */
    /* The same with fewer bits, for rows of normally distributed elements, which the cache makes of all rows: it
     * multiplies each by D * H * D before it is quantised, and back when it is decoded, where H is Sylvester's Hadamard
     * matrix of the order that KVC_TRANSFORM_HADAMARD takes for keys, over the root of it, and D is diagonal: -1 where
     * element i of each `order` elements has an odd number of pairs of bits 2 j and 2 j + 1 that are both set in i,
     * else 1.  A large channel, or a mean that is not 0, is spread over the row.
     *
     * x = d * level[q], of 16 or 64 levels in ascending order (Lloyd and Max): those below 0 mirror those above.  q is
     * that of the level nearest to x / u in magnitude, the larger one halfway between two, on the side of x's sign (+ of
     * 0); d = sum of level[q] * x / sum of level[q]^2.  u = max |x| / 127; for KVC_INT4, 0.96 or 1.06 times that: the
     * one for which (sum of level[q] * x)^2 / sum of level[q]^2, of the first 1024 elements, is larger.  Where 1 / u
     * overflows, all x / u count as 0.  Where d would exceed 65504, or an element is no finite number, d is NaN. */
    KVC_INT6 = 10, /* dim * 3 / 4 + 2 bytes: 24 for 32 elements.  Byte j < 8 has bits 4 and 5 of elements j, j + 8, j +
                      16 and j + 24, lowest first; 16 bytes have the low 4 bits of elements i and i + 16.  level[32 ..] =
                      1 3 6 9 12 15 18 21 24 27 30 33 36 39 42 45 48 52 56 60 64 68 72 76 81 86 91 97 103 110 118 127 */
    KVC_INT4 = 11  /* dim / 2 + 2 bytes: 16 for 32 elements, with elements i and i + 16.  level[8 ..] = 5 16 28 40 54 70
                      90 119 */
} kvc_type;

/* Returns the name of a type, such as "q8_0", static; NULL for a number that is no kvc_type.  Types are numbered from 0
 * on without gaps.  A name that ggml has too means ggml's type, byte for byte. */
KVC_API const char *kvc_type_name(int32_t type);

/* Returns the bytes of a row of dim elements.  For a quantised type, dim must be a multiple of 32.  Returns 0 for an
 * unknown type, and for a negative dim. */
KVC_API size_t kvc_row_bytes(int32_t type, int32_t dim);

typedef enum kvc_policy_kind {
    KVC_FULL = 0,    /* a query sees every position up to its own */
    KVC_SLIDING = 1, /* a query sees the `window` positions that end with its own, and the sinks */
    KVC_CHUNKED = 2, /* a query sees the positions of its own chunk, up to its own */
    KVC_CROSS = 3,   /* every query sees all rows, which kvc_put sets, any number at once, for a whole sequence.  They
                        have no positions that could be removed or shifted: row i stands at position i until the
                        sequence ends, when none of its tokens is left (kvc_remove) */
    KVC_NONE = 4     /* no attention here: the layer holds nothing */
} kvc_policy_kind;

typedef struct kvc_policy {
    int32_t kind;                 /* kvc_policy_kind; fields that the kind does not use are ignored */
    int32_t window;               /* SLIDING: positions a query sees, its own included; at least 1 */
    int32_t num_sink_tokens;      /* SLIDING: positions below this are always seen, and stay */
    int32_t resume_window;        /* SLIDING: how many of the latest positions are kept, counted like window; at least
                                     window; 0: window.  CHUNKED: how many are kept beside the current chunk's.  With
                                     more, a sequence can go back further */
    int32_t attention_chunk_size; /* CHUNKED: positions in a chunk; at least 1 */
    int32_t max_len;              /* CROSS: rows of one sequence; at least 1 */
    int32_t reserved[3];          /* 0 */
} kvc_policy;

typedef enum kvc_rope_kind {
    KVC_ROPE_UNKNOWN = 0,     /* unknown: calls that would have to rotate keys fail: KVC_ERR_UNSUPPORTED */
    KVC_ROPE_NONE = 1,        /* keys carry no rotation: tokens move without touching them */
    KVC_ROPE_FREQUENCIES = 2, /* keys were rotated by position * inv_freq */
    KVC_ROPE_FUNCTION = 3     /* the caller moves keys */
} kvc_rope_kind;

/* Moves keys [num_kv_heads][num_rows][k_dim], in place, from the positions they stand at to those plus delta.  Returns
 * 0 for success; anything else makes the edit fail with KVC_ERR_CALLBACK, and changes nothing.  It is called without
 * the cache's mutex, from the thread that edits, and must not edit this sequence. */
typedef int32_t kvc_shift_fn(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                             int32_t k_dim, int32_t delta);

/* How keys carry their position (Su et al. 2021, "RoFormer").  With n = num_freqs, elements first_dim + i and
 * first_dim + n + i are a pair, or, interleaved, first_dim + 2 i and first_dim + 2 i + 1; pair i is rotated by
 * position * inv_freq[i].  When tokens move, their stored keys stay as they are, and queries are rotated back by as
 * much instead. */
typedef struct kvc_rope {
    int32_t kind;           /* kvc_rope_kind; fields that the kind does not use are ignored */
    int32_t interleaved;
    int32_t first_dim;
    int32_t num_freqs;      /* first_dim + 2 * num_freqs is at most k_dim */
    const double *inv_freq; /* [num_freqs] radians per position; copied */
    kvc_shift_fn *shift;
    void *user;
    int64_t reserved[2]; /* 0 */
} kvc_rope;

/* How quantised rows are transformed before they are stored, so that elements that share a scale are about equally
 * large (Ashkboos et al. 2024, "QuaRot").  Callers hand rows in, and get them, untransformed: kvc_put transforms them,
 * and what decodes them transforms them back.  Raw rows, and those that kvc_spans and kvc_slots show, are as stored. */
typedef enum kvc_transform {
    KVC_TRANSFORM_NONE = 0,
    KVC_TRANSFORM_HADAMARD = 1 /* blocks of n elements are multiplied by the Hadamard matrix over sqrt(n), which is its
                                  own inverse.  Of keys, n is the largest power of two that divides k_dim, at most 1024;
                                  of values the largest that divides v_dim, at most 64; of values in keys that of the
                                  keys.  So does llama.cpp where 64 divides the dimensions.  Rows whose type is not
                                  quantised, which have no scale, are stored as given; those of KVC_INT6 and KVC_INT4
                                  are always transformed, as these say */
} kvc_transform;

typedef struct kvc_layer {
    int32_t num_kv_heads;
    int32_t k_dim; /* elements of one key of one head */
    int32_t v_dim;
    int32_t k_type; /* kvc_type that keys are stored as */
    int32_t v_type;
    int32_t k_transform; /* kvc_transform */
    int32_t v_transform;
    int32_t value_in_key; /* not 0: values are the first v_dim elements of the keys, and stored once (MLA).  v_type is
                             k_type then and v_transform k_transform, whose blocks must divide v_dim; RoPE leaves those
                             elements alone, and kvc_attend must be given a scale */
    int32_t share;        /* 0: rows of its own; else those of layer `share` - 1, which has the same shapes, types,
                             policy and rope, and rows of its own.  Rows are put in that layer only */
    kvc_policy policy;
    kvc_rope rope;
} kvc_layer;

typedef enum kvc_memory_kind { /* what an allocation is for */
    KVC_MEMORY_ROWS = 0,       /* a block: keys and values.  Large, long-lived */
    KVC_MEMORY_BOOKKEEPING = 1,
    KVC_MEMORY_SCRATCH = 2 /* lives as long as a batch or a call */
} kvc_memory_kind;

typedef struct kvc_memory_hint {
    size_t struct_size;
    int32_t kind;       /* kvc_memory_kind */
    int32_t group;      /* layer group of a block; -1: none, as for rows that are not stored */
    int32_t first_head; /* KV heads [first_head, end_head) whose rows lie here; for NUMA placement */
    int32_t end_head;
} kvc_memory_hint;

/* Functions of the caller that allocate memory.  They are called with the cache's mutex held, or while the cache is
 * made or freed.  So a cache calls one at a time, except `purge`, which it may call for several parts of a block at
 * once.  Caches with the same functions, such as clones, may call them at the same time.  They are called from any
 * thread, and must neither call into the library nor fork. */
typedef struct kvc_allocator {
    size_t struct_size;
    void *user;
    /* Returns `size` bytes (not 0) aligned to `alignment` (a power of two), or NULL. */
    void *(*alloc)(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint);
    void (*free)(void *user, void *memory, size_t size, const kvc_memory_hint *hint);
    /* Called when the contents of [memory, memory + size), whole OS pages of a block, are no longer needed; the range
     * stays allocated.  May be NULL.  An allocator that has this is taken to hand out blocks of 256 KiB and more
     * without touching them, and kvc_nbytes counts what was touched. */
    void (*purge)(void *user, void *memory, size_t size);
} kvc_allocator;

/* Returns whether a call that takes long is to end: not 0 ends it with KVC_ERR_CANCELLED.  kvc_put and kvc_attend call
 * this about every 40 ms, and kvc_begin_with while it waits, from the thread that called them and without the cache's
 * mutex; short calls never do.  It may call into the library, but must not end the batch that is put in or attended
 * over, nor return in the child of a fork(). */
typedef int32_t kvc_poll_fn(void *user);

typedef struct kvc_config {
    size_t struct_size; /* sizeof(kvc_config) */
    const kvc_layer *layers;
    size_t layer_size; /* sizeof(kvc_layer) */
    int32_t num_layers;
    int32_t block_size;    /* slots in a block.  0: max_seq_len where that is given, max_sequences is 1 and every layer
                              sees everything (one contiguous block); else 64 */
    int64_t max_seq_len;   /* rows one sequence may hold in one layer between batches; 0: no limit.  A batch may have
                              more tokens in a layer whose window, with its sinks, or chunk is at most this */
    int64_t max_sequences; /* sequences that hold rows, in any layer, once a batch has begun; 0: no limit */
    int64_t capacity;      /* live slots of one layer group, shared ones counted once, the open batch's included.  0:
                              max_seq_len * max_sequences, for which only those tokens of a batch count that
                              max_seq_len lets stay; no limit where one of these has none */
    int64_t max_bytes;     /* limit of kvc_nbytes whenever memory is taken for rows; an edit that takes none may pass
                              it by bookkeeping, until a batch begins.  0: none */
    int32_t num_threads;   /* threads one call uses; 0: kvc_num_threads() at the time of the call */
    const kvc_allocator *allocator; /* copied; NULL: the C library, and the operating system's pages for blocks */
    kvc_poll_fn *poll;              /* may be NULL: calls go on to their end */
    void *poll_user;
} kvc_config;

typedef struct kvc_cache kvc_cache;
typedef struct kvc_batch kvc_batch;
typedef struct kvc_hold kvc_hold;
typedef struct kvc_plan kvc_plan;

/* ---- a cache ----------------------------------------------------------------------------------------------------- */

/* Sets *cache to a new, empty cache, to be freed with kvc_cache_free.  Rows take no memory before they are needed.
 * Fails with KVC_ERR_INVALID, whose message names the field and what it may be, KVC_ERR_UNSUPPORTED and
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_cache_new(const kvc_config *config, kvc_cache **cache);

/* Frees the cache and its prefixes, after waiting for calls that copy rows out; ignores NULL.  Fails with KVC_ERR_BUSY
 * while a batch is open, keys are rewritten or a call waits in kvc_begin_with, and with KVC_ERR_HELD while there is a
 * kvc_hold, or kvc_save or kvc_restore runs. */
KVC_API kvc_status kvc_cache_free(kvc_cache *cache);

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* Tokens of a batch.  For each token, a batch takes some 80 bytes, 90 in each layer group and 1 or 2 in each layer.
 * The cache keeps this memory for later batches, until kvc_compact.  In each layer group, the token's sequence keeps up
 * to 12 bytes for it, or 24 where the positions of the batch are not consecutive. */
#define KVC_MAX_BATCH (1 << 24)

/* Opens a batch, of which a cache has one at a time: makes room in every layer for num_tokens tokens, from 1 to
 * KVC_MAX_BATCH, at these positions of these sequences.  seq_ids NULL: all of sequence 0.  positions NULL: those that
 * follow what each sequence holds at that moment, from kvc_next_position on.
 * Expires rows that no later query can see and the policies do not keep.  It assumes that later queries stand at or
 * after the sequence's smallest position in this batch; for sequences not in the batch, at or after
 * kvc_next_position.  While the batch is open, layers with a window or chunks hold its tokens beside what they keep;
 * kvc_commit expires what no later query can see.
 * parents, where it is not NULL, makes trees of the tokens (speculated ones, to be verified together): parents[i] is
 * an earlier token of the same sequence, or -1, and of the batch a token sees itself and its ancestors, where the
 * layer's policy shows it their positions, and nothing else.
 * Fails with KVC_ERR_FULL where max_seq_len, max_sequences, capacity or max_bytes would be passed, with KVC_ERR_GONE
 * where a token would see rows that have expired, with KVC_ERR_BUSY and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_begin(kvc_cache *cache, int32_t num_tokens, const int32_t *positions, const int64_t *seq_ids,
                             const int32_t *parents, kvc_batch **batch);

typedef struct kvc_put_args {
    size_t struct_size;
    int32_t first;      /* tokens [first, first + num_tokens) of the batch */
    int32_t num_tokens; /* 0: all from first on */
    const void *k;      /* [num_tokens][num_kv_heads][k_dim], tokens and heads this far apart, elements adjacent */
    const void *v;
    int64_t k_token_stride, k_head_stride;
    int64_t v_token_stride, v_head_stride;
    int32_t k_type; /* KVC_F32, KVC_F16 or KVC_BF16: what k points at; or the layer's own k_type, a quantised one too:
                       rows as kvc_gather hands them out raw, which are stored byte for byte, need no alignment, and
                       are not checked: a scale may be infinite or NaN */
    int32_t v_type; /* the same for v */
    /* 0: tokens lie as said above.  n: they lie as [num_tokens / n][n], sequences a batch stride apart, the n tokens of
     * one a token stride: [batch][head][token][dim], in lock step. */
    int32_t tokens_per_sequence;
    int64_t k_batch_stride, v_batch_stride;
    int64_t seq_id; /* KVC_CROSS: the sequence, one of the batch, whose rows these are */
} kvc_put_args;

/* Stores keys and values of one layer; v is NULL where values lie in the keys.  Disjoint ranges of tokens may be put
 * from several threads at once.  Strides may be negative or 0; they are whole elements, those of quantised rows any
 * number of bytes.
 * In a KVC_CROSS layer the num_tokens rows (at least 1; first is 0) replace all that the sequence has there: for this
 * batch at once, for others once it is committed.
 * Fails with KVC_ERR_INVALID if a token was put before, or if the layer shares another's rows or has none, with
 * KVC_ERR_INDEX if the batch has no such tokens, and with KVC_ERR_CANCELLED (poll), after which nothing was put.  Rows
 * of KVC_CROSS layers, and of sequences that are not stored, may take new memory: the call then also fails with
 * KVC_ERR_FULL (max_len or max_bytes) and KVC_ERR_NOMEM.  Retained sequences are evicted for such rows once these are
 * put; until then the cache may exceed max_bytes by them. */
KVC_API kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *args);

typedef struct kvc_attend_args {
    size_t struct_size;
    const void *q;      /* [num_tokens][num_heads][k_dim] */
    void *out;          /* [num_tokens][num_heads][v_dim], of q's type */
    float *lse;         /* [num_tokens][num_heads] log-sum-exp of the scores (natural, sinks included); may be NULL */
    const float *sinks; /* [num_heads] a logit that joins the softmax and has no value; may be NULL */
    const float *alibi; /* [num_heads] slopes: -slope * |query position - key position| is added; may be NULL */
    const volatile int32_t *cancel; /* may be NULL; set to other than 0: tasks end early, or do not begin */
    int64_t q_token_stride, q_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_token_stride, lse_head_stride;
    int32_t q_type; /* KVC_F32, KVC_F16 or KVC_BF16 */
    float scale;    /* 0: 1 / sqrt(k_dim); to be given where values lie in the keys */
    float softcap;  /* 0: none; else scores become softcap * tanh(score / softcap) before alibi */
    const kvc_put_args *put; /* may be NULL; rows to store first, as by kvc_put.  For kvc_attend only */
    int32_t tokens_per_sequence; /* of q, out and lse, as in kvc_put_args */
    int64_t q_batch_stride, out_batch_stride, lse_batch_stride;
} kvc_attend_args;

/* Rows at positions [begin, end) of a sequence of the batch, stored or the batch's own, which no query of a call sees,
 * whatever the policy: padding, for example.  Results have the bits of a cache in which these rows were never put.
 * Attention does not read them: they may hold anything, and tokens of the batch among them need not have been put. */
typedef struct kvc_masked {
    int64_t seq_id;
    int32_t begin, end; /* end may be past all there is, up to KVC_END */
} kvc_masked;

typedef struct kvc_plan_args {
    size_t struct_size;
    int32_t layer;      /* any layer of the group, with the shapes that count */
    int32_t first;      /* query tokens [first, first + num_tokens) of the batch */
    int32_t num_tokens; /* 0: all from first on */
    int32_t num_heads;  /* query heads: a multiple of num_kv_heads */
    int32_t num_threads; /* tasks that may run at the same time, at most 4096; a further one waits.  0: the cache's
                            threads */
    const uint8_t *non_causal; /* [num_tokens] not 0: the token sees later positions of its sequence too (of a batch
                                  with parents, no more than its ancestors); NULL: none does.  Copied */
    const kvc_masked *masked;  /* [num_masked] what no query of the plan sees, in any order, overlapping or not.
                                  Copied */
    size_t masked_size;        /* sizeof(kvc_masked) */
    int32_t num_masked;        /* 0: nothing is masked */
} kvc_plan_args;

/* Attends: out[t, h] = sum over visible rows j of softmax(scale * q[t, h] . k[j]) * v[j], for the query tokens of the
 * plan's range in the layer plan->layer, with all threads of the cache.  A token sees the stored rows of its sequence
 * and the batch's own, at positions up to its own, that the policy shows and the plan does not hide; those of the
 * batch must have been put in this layer.  Where nothing is visible, out is 0, and lse is -inf, or the head's sink if
 * sinks are given.  Sums are kept in f32, and values are summed before they are divided by the sum of their weights:
 * out may be infinite where a value times the number of visible rows exceeds 3.4e38.
 * The bits of a token's result depend on nothing but the rows it sees and which tokens of its sequence are in the
 * call: not on threads, on where rows lie, or on who else is in the batch.  Infinities and NaN in rows reach the
 * tokens that see them, and no others; prompts that hold any take longer.  The instruction set decides whether a
 * quantised key with an infinite scale scores NaN or an infinity of either sign, and such a value yields NaN or one;
 * whether, for many query rows, an infinity in values yields NaN, one in keys scores NaN or counts as 3.39e38, and
 * queries, times the scale, of more than that count as NaN or as it; whether denormals count as 0 where queries, keys
 * or values are bf16, or prompts are multiplied as bf16; whether queries of bf16 are multiplied by keys before the
 * scale is applied, and scores beyond 3.4e38 are infinite then; and whether queries of less than 9.6e-35 count as 0
 * where keys are quantised.
 * Fails with KVC_ERR_INVALID also where a visible token was not put, or a sequence has no rows in a cross-attention
 * layer, with KVC_ERR_INDEX, with KVC_ERR_GONE for sequences that are not stored (kvc_begin_with), with KVC_ERR_NOMEM,
 * with KVC_ERR_FULL as kvc_put does, and with KVC_ERR_CANCELLED (cancel, or the cache's poll).  After an error nothing
 * was put, and the call can be made again; but in a cross-attention layer rows may have been put after KVC_ERR_NOMEM
 * and KVC_ERR_CANCELLED, where putting them again does no harm.  After KVC_ERR_CANCELLED, out and lse hold
 * anything. */
KVC_API kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *plan, const kvc_attend_args *args);

/* Ends the batch and frees it: its tokens become part of their sequences, if these are stored.  Layers with a window
 * or chunks keep what a query in the place of a sequence's last token would see, or as many positions as resume_window
 * says; blocks that this frees go back to the system.  Beside what it keeps, such a layer takes at most two blocks, or
 * with sinks three, to go on in, for each sequence whose tokens are all kept and in nobody else's blocks; or, where these
 * are more, as many free blocks as this batch took, so that the next one of as many tokens takes no memory.
 * Fails with KVC_ERR_INVALID if a token was not put in some layer; the batch is still open then.  Once every token was
 * put, this cannot fail: kvc_begin has taken all memory that it needs.  (The work on OS pages at its end is left out
 * where the system refuses it.) */
KVC_API kvc_status kvc_commit(kvc_batch *batch);

/* Does what kvc_commit does with num_kept of the tokens only, such as the accepted ones of those that were
 * speculated: `kept` has their indices in the batch, in any order.  The others need not have been put.  What a
 * sequence was given in a cross-attention layer is kept if one of its tokens is.  Fails with KVC_ERR_INDEX for an
 * index that is none, with KVC_ERR_INVALID for one given twice, and as kvc_commit does: once the kept tokens were put,
 * whichever they are, this cannot fail. */
KVC_API kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept);

/* Ends the batch and frees it, as if its tokens had never been, and gives back the memory that it took for rows and
 * bookkeeping.  What kvc_begin did to make room stays done: rows that it expired stay expired, and their blocks wait for
 * the next kvc_commit.  Ignores NULL. */
KVC_API void kvc_abort(kvc_batch *batch);

/* ---- looking at sequences ---------------------------------------------------------------------------------------- */

/* Returns the number of rows of the sequence in the layer; layer -1: of its tokens, in the layer that keeps most.  -1
 * if there is no such layer. */
KVC_API int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer);

/* Sets *first and *last to the smallest and the largest stored position in a layer, both to -1 if nothing is stored
 * there; layer -1: those of its tokens in any layer.  Takes the same time however many rows there are.  Fails with
 * KVC_ERR_INDEX. */
KVC_API kvc_status kvc_position_range(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *first, int32_t *last);

/* Returns the position of the next token: behind the largest that is stored or has expired.  0 if nothing was
 * stored. */
KVC_API int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id);

/* Returns 1 if `position` is at most kvc_next_position and no row that a query there or later would see has expired or
 * was left out by a batch that restored other layers; otherwise 0.  Returns 0 for a negative position, and 1 for
 * any other where all layers are KVC_CROSS or KVC_NONE, because that cache holds no tokens. */
KVC_API int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position);

/* Returns the position from which on the sequence's rows may not be exact; INT32_MAX: all are.  A row is exact if it
 * follows from the sequence's tokens alone, as it was computed at its position, behind exactly the tokens before it: so
 * another sequence that begins with these tokens may share it.  Not exact, with all that is behind, is what was
 * - moved, or left behind tokens that were removed; replaced by kvc_inject, or by a batch that restores layers;
 * - shared by kvc_share from a sequence that need not have the same tokens before it: dst goes on as src does where the
 *   last row of dst is src's as well, and exact in both;
 * - stored at a position that was not the next one, or computed while it saw tokens that kvc_commit_kept did not keep;
 * - marked by kvc_mark_inexact, or loaded from a state of version 1.
 * It stays so wherever it goes: in forks, shares, retained and attached sequences, clones and saved states.  Once none
 * of it is left, as after kvc_truncate at that position, all rows are exact again.  In the open batch, a sequence's
 * tokens count as if all were kept. */
KVC_API int32_t kvc_exact_to(kvc_cache *cache, int64_t seq_id);

/* Writes the ids of the sequences that hold rows of tokens, ascending, at most max_ids of them, none if seq_ids is
 * NULL; returns how many there are. */
KVC_API int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids);

/* Writes the positions of the sequence's rows in order of arrival, at most max_positions of them, none if positions is
 * NULL; returns how many rows there are, or -1 if there is no such layer. */
KVC_API int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions,
                              int64_t max_positions);

/* ---- editing sequences ------------------------------------------------------------------------------------------- */

/* Each of these fails with KVC_ERR_BUSY for a sequence of the open batch, or one whose keys another call rewrites,
 * whether it would change that sequence or share its rows.  kvc_keep may keep such a sequence, and kvc_mark_inexact takes
 * any. */

#define KVC_END INT32_MAX /* as the end of a range of positions: to the last one */

/* Forgets every sequence, retained ones too, and the blocks that prefixes have kept by then; of these a few at a time, so
 * that other calls go on.  Memory is kept for reuse. */
KVC_API kvc_status kvc_clear(kvc_cache *cache);

/* Forgets one sequence.  Memory is kept for reuse. */
KVC_API kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id);

/* Forgets every sequence but this one, retained ones too. */
KVC_API kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id);

/* Makes dst hold all that src holds, as kvc_copy_prefix does, with its errors. */
KVC_API kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst);

/* Makes dst hold the rows of src at positions below `length`, in place of what it held.  No row is copied: the two
 * share slots until one of them drops these, and each appends to its own.  Sharing takes no slots: limits are checked
 * when the next batch begins.  src == dst is KVC_ERR_INVALID, and so is a length above 0 of an src that holds
 * nothing: clear dst where that is meant.  Fails with KVC_ERR_GONE as kvc_truncate of src does, and with
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length);

/* Adds the rows of src at positions [begin, end) to dst, which keeps what it holds, as the last to arrive there.  No
 * row is copied, and limits are checked later, as in kvc_copy_prefix; of a cross-attention layer all rows are added,
 * where dst has none.  Rows that dst holds already, in the same slots at the same positions, are left out, so that
 * sharing twice does no harm.  What has expired of src at these positions counts as expired of dst, unless dst holds
 * rows there, and so does what lies between this and what had expired of dst: kvc_can_resume says where dst can go on,
 * and a batch that would see such positions fails with KVC_ERR_GONE.
 * Into an empty sequence, [0, KVC_END) does what kvc_fork does, with its errors; else sharing of an empty one does
 * nothing.
 * Fails with KVC_ERR_INVALID, and the position, if dst holds another row at the position of one of src's in some
 * layer, with KVC_ERR_INVALID also if src == dst, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_share(kvc_cache *cache, int64_t src, int64_t dst, int32_t begin, int32_t end);

/* Drops the rows at positions [begin, end).  A sequence that this, or any edit, leaves without tokens, so that it would
 * go on at position 0, ends as by kvc_clear_sequence: its rows in KVC_CROSS layers go, too.  So does one that has such
 * rows alone, where positions from 0 on are dropped.  (To keep these rows, first let another sequence hold them, by
 * kvc_copy_prefix with length 0.)
 * With `shift`, later tokens move down by end - begin, as by kvc_shift, with its errors.  Without, they stay where
 * they are.  What has expired moves along, in every edit: where a token would see such a position, in its window or
 * among the sinks, a batch of it fails with KVC_ERR_GONE.
 * Fails with KVC_ERR_NOMEM, and where there are no later tokens with KVC_ERR_GONE as kvc_truncate does. */
KVC_API kvc_status kvc_remove(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift);

/* Drops the rows at positions of at least `length`, where the sequence goes on then.  If there are no such rows, it
 * changes nothing.  Fails with KVC_ERR_GONE where rows are dropped and a token there would see others that have
 * expired.
 * Always possible are 0 and a position that kvc_can_resume confirms.  If no layer has chunks, a position within the
 * sinks of every layer with a window is, too, unless a layer was restored without its sinks (kvc_begin_with).
 * Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_truncate(kvc_cache *cache, int64_t seq_id, int32_t length);

/* Moves the tokens at positions [begin, end) by delta; those that would come below 0 are dropped.  No row is copied or
 * rotated, unless a layer has KVC_ROPE_FUNCTION: then the moved rows are rewritten in new slots, and take memory twice
 * meanwhile.  That must fit into max_bytes once retained rows are evicted and free memory is given back, which the call
 * does after the function has succeeded.  `capacity` counts what is live once the edit is done, which is more than
 * before where sequences shared rows.
 * Fails with KVC_ERR_UNSUPPORTED if a layer's rope is not known, with KVC_ERR_INVALID if a position would pass the
 * largest, and with KVC_ERR_NOMEM; where rows are rewritten, also with KVC_ERR_FULL (capacity or max_bytes) and
 * KVC_ERR_CALLBACK. */
KVC_API kvc_status kvc_shift(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t delta);

/* Divides the positions [begin, end) by `divisor`, at least 1, rounding down (self-extend, Jin et al. 2024).  Keys
 * that carry a rotation are rewritten.  Fails as kvc_shift does. */
KVC_API kvc_status kvc_divide(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t divisor);

/* Rotates the keys of every sequence for the positions they have now, so that every delta is 0.  Keys are rounded to
 * their type once more; rows that sequences share at different deltas are copied.  Fails with KVC_ERR_BUSY,
 * KVC_ERR_HELD, KVC_ERR_NOMEM and KVC_ERR_FULL (capacity, as in kvc_shift, or max_bytes). */
KVC_API kvc_status kvc_settle(kvc_cache *cache);

/* Notes that the sequence's rows from `position` on, those that a batch adds later included, are not exact
 * (kvc_exact_to), for what the cache cannot see: a mask hid tokens from them, say, or showed them later ones.  Possible
 * at any time, also while the sequence is in the open batch; of one that holds nothing and is not there, nothing is
 * noted.  Fails with KVC_ERR_INVALID. */
KVC_API kvc_status kvc_mark_inexact(kvc_cache *cache, int64_t seq_id, int32_t position);

/* ---- reading and replacing rows ---------------------------------------------------------------------------------- */

typedef struct kvc_span {
    const void *k; /* row of the first position, KV head 0; rows are k_row_stride apart, heads k_head_stride */
    const void *v;
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t num_rows;
    int32_t position; /* of the first row; the others follow one by one */
    int32_t delta;    /* position now, less the position the keys were rotated for: they are as they were stored */
    int32_t reserved; /* 0 */
    /* Of types with one scale a row: that of the first position, KV head 0; an f16 for each row, side by side, those of
     * the next head k_head_stride, or v_head_stride, behind it.  Else NULL. */
    const void *k_scales, *v_scales;
} kvc_span;

/* Lists the stored rows of a sequence in a layer, in order of arrival, without a copy.  Writes at most max_spans of
 * them (each span_size bytes) and sets *num_spans to how many there are.  If hold is not NULL, there are rows, and all
 * spans were written, *hold keeps the rows as they are, whatever is edited, until kvc_hold_free.  Otherwise it becomes
 * NULL.  Without a hold, pointers are valid until anything is edited or loaded, memory is reserved, or a batch begins
 * or ends.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                             int64_t max_spans, int64_t *num_spans, kvc_hold **hold);

/* Frees a hold, and lets go of its rows; ignores NULL.  Free every hold before the cache. */
KVC_API void kvc_hold_free(kvc_hold *hold);

typedef struct kvc_rows_out {
    size_t struct_size;
    int32_t type;          /* KVC_F32, KVC_F16 or KVC_BF16: what rows are converted to, unless they are raw */
    void *k;               /* [num_kv_heads][rows][k_dim], rows and heads this far apart; NULL: not wanted */
    void *v;
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t *positions;  /* [rows] set to where each row stands, -1 where kvc_extract found none; may be NULL */
    int64_t *num_stored; /* set to how many rows there are to copy from: those of the sequence in the layer, or, by
                            kvc_dense, what kvc_dense_rows says; also if the call fails because it asks for more, or
                            another number.  May be NULL.  Rows, positions and number are of one moment */
    int32_t raw; /* 0: rows are converted to `type`.  Else they stay in the types in which the layer stores them, its
                    k_type and v_type, byte for byte; k and v need no alignment then.  Keys that were moved by a delta
                    are rotated, and encoded anew in the copy: the bytes that kvc_settle would store */
    kvc_batch *batch; /* for kvc_gather and kvc_extract: the open batch, if rows that it was given for the sequence are
                         to count as well, behind the stored ones, as in kvc_batch_spans and with its errors.  NULL:
                         stored rows only */
} kvc_rows_out;

/* Copies rows [first_row, first_row + num_rows), counted in order of arrival, of a sequence in a layer: decoded or
 * raw, and keys rotated for the position they stand at now.  Strides are whole elements, those of quantised rows any
 * number of bytes.  Fails with KVC_ERR_INDEX if the sequence does not hold that many, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                              const kvc_rows_out *out);

/* Copies the rows at positions [begin, end), decoded or raw, and rotated as by kvc_gather: row i is that of position
 * begin + i, the latest of several, and bytes of 0 where there is none.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                               const kvc_rows_out *out);

typedef struct kvc_rows_in {
    size_t struct_size;
    const void *k; /* [num_kv_heads][rows][k_dim], rows and heads this far apart */
    const void *v; /* NULL where values lie in the keys */
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t k_type; /* as in kvc_put_args */
    int32_t v_type;
    int32_t skip_missing;  /* 0: every position must hold a row; else positions without one are skipped */
    int64_t *num_replaced; /* set to how many rows were replaced; may be NULL */
} kvc_rows_in;

/* Replaces the rows at positions [begin, end) of one layer, the latest of several at one position.  Keys are given as
 * rotated for these positions; where the stored ones were moved by a delta, the new ones are rotated back by it and
 * encoded anew.  Other sequences and holds keep what they had.
 * Fails with KVC_ERR_INDEX, and the positions, if some hold no row and skip_missing is 0, with KVC_ERR_INVALID if the
 * layer has no rows of its own, with KVC_ERR_UNSUPPORTED for KVC_CROSS, and with KVC_ERR_BUSY; where shared rows are
 * copied first, also with KVC_ERR_NOMEM and KVC_ERR_FULL (capacity or max_bytes). */
KVC_API kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                              const kvc_rows_in *in);

/* ---- room and memory --------------------------------------------------------------------------------------------- */

/* Sets *num_tokens to the number of tokens, at consecutive positions from kvc_next_position on, that one batch could
 * add to a sequence now: what max_seq_len, max_sequences, capacity and max_bytes leave once rows expire for it, at most
 * KVC_MAX_BATCH; 0 where the next token would see rows that are gone.  A batch of one token more is refused; under
 * max_bytes a still larger one may begin, as its size decides which rows are moved together first.  Under a sliding
 * window or chunks there may be as much room again once these are committed, and max_seq_len leaves room for any number
 * where it is at least what the policy keeps.  Fails with KVC_ERR_BUSY, KVC_ERR_NOMEM, and KVC_ERR_INVALID for a
 * retained sequence. */
KVC_API kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens);

/* Takes memory now for num_tokens more tokens of a sequence, at least 1, so that the next batches, of as many tokens
 * together, take none for rows or bookkeeping.  It is resident then, in huge pages where the system has them: writing
 * these rows faults on no page.  Nothing fails after the first page is touched; slots that another thread takes
 * meanwhile are not touched.  Free memory counts, and other sequences may use what was reserved, so calls for several
 * sequences do not add up: reserve the sum of their tokens, each rounded up to whole blocks, for one of them, in a
 * cache without max_seq_len.  What was reserved stays until it is used, kvc_compact gives it back, or other rows need
 * it to stay within max_bytes.  In a block that a kvc_hold keeps, a batch that is aborted uses slots up, too, until the
 * hold is freed.  Expires rows and moves rows together as kvc_begin does, within the limits of a batch of as many
 * tokens.  Fails with KVC_ERR_FULL, KVC_ERR_BUSY, KVC_ERR_NOMEM, with KVC_ERR_GONE where the next token would see rows
 * that are gone, and with KVC_ERR_INVALID for a retained sequence. */
KVC_API kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens);

/* Moves rows together so that no block has holes, and gives back the memory that this frees, and that of unused
 * blocks.  Fails with KVC_ERR_BUSY, with KVC_ERR_HELD (pointers into the rows would go stale) and with
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_compact(kvc_cache *cache);

/* Returns the bytes of memory the cache holds: rows that were ever written since their memory was taken, in whole OS
 * pages where a block is large, and bookkeeping.  KVC_MEMORY_SCRATCH does not count. */
KVC_API int64_t kvc_nbytes(kvc_cache *cache);

/* Returns the slots in a block, with the default filled in. */
KVC_API int32_t kvc_block_size(kvc_cache *cache);

/* Returns the slots in all, with the default filled in; -1: no limit. */
KVC_API int64_t kvc_capacity(kvc_cache *cache);

/* Returns the bytes of rows when `capacity` slots of every layer group are filled; -1 where there is no limit.  (What
 * an open batch puts in cross-attention layers comes on top until it is committed.) */
KVC_API int64_t kvc_capacity_bytes(kvc_cache *cache);

/* Returns the fullest layer group's live slots over `capacity`, or, where that has no limit, over the slots in
 * blocks.  Above 1 while a batch is open with tokens that a capacity of 0 does not count.  Rows being written to
 * replace others, in an edit or a batch that restores, do not count beside those that they replace; rows that can be
 * evicted do not count. */
KVC_API double kvc_utilization(kvc_cache *cache);

typedef struct kvc_stats {
    int64_t batches;         /* committed */
    int64_t aborted;         /* batches */
    int64_t tokens;          /* committed to sequences that are stored */
    int64_t rows_expired;    /* per layer group, as are all rows and slots here */
    int64_t rows_moved;      /* by compaction */
    int64_t compactions;
    int64_t blocks_opened;   /* memory taken */
    int64_t blocks_reused;   /* taken from those that nobody held any more */
    int64_t blocks_returned; /* memory given back */
    int64_t live_slots;      /* now: held by a sequence or an open batch */
    int64_t wasted_slots;    /* now: neither live nor free to be handed out before a compaction */
    int64_t blocks_in_use;   /* now */
    int64_t blocks_free;     /* now: memory kept for reuse */
    int64_t rows_copied;     /* to slots of a sequence's own, to be changed there: by kvc_divide and KVC_ROPE_FUNCTION,
                                and of shared rows by kvc_settle and kvc_inject.  Compactions move rows, too
                                (rows_moved) */
    int64_t rows_evicted;    /* of retained sequences, to make room: what two of them shared counts twice */
    int64_t retained;        /* now: retained sequences */
    int64_t evictable_slots; /* now: of live_slots, those that only such sequences hold */
} kvc_stats;

/* Fills in *stats, of stats_size bytes. */
KVC_API void kvc_get_stats(kvc_cache *cache, kvc_stats *stats, size_t stats_size);

/* ---- saved states ------------------------------------------------------------------------------------------------ */

/* A saved state is a file, or any other sequence of bytes, with rows as they are stored, all that belongs to them, and
 * checksums; docs/format.md specifies it.  safetensors opens it, too.  Checksums find damage; they do not find a
 * change by somebody who computes them anew.  The file ends with KVC_MAC_BYTES bytes that the library writes as 0 and
 * ignores: whoever has a secret puts there a MAC of all bytes before them. */
#define KVC_MAC_BYTES 32

/* Takes the next `size` bytes of a file that is saved.  Returns 0 for success; anything else ends the call with
 * KVC_ERR_CALLBACK.  It is called without the cache's mutex, from the thread that saves, and must not save or load in
 * turn.  The last KVC_MAC_BYTES bytes come in a call of their own. */
typedef int32_t kvc_write_fn(void *user, const void *data, size_t size);

/* Sets the next `size` bytes of a file that is loaded, as kvc_write_fn takes them.  The last KVC_MAC_BYTES bytes are
 * asked for in a call of their own, before anything is changed. */
typedef int32_t kvc_read_fn(void *user, void *data, size_t size);

typedef struct kvc_save_args {
    size_t struct_size;
    kvc_write_fn *write;
    void *user;
    const int64_t *seq_ids;    /* [num_sequences] by rising id; NULL: all but retained ones */
    int64_t num_sequences;     /* 0 where seq_ids is NULL */
    const int64_t *tokens;     /* token ids, kept for the caller: of each of seq_ids, one after the other; may be NULL */
    const int64_t *num_tokens; /* [num_sequences] how many of them each has, 0 or more */
    const char *fingerprint;   /* names the model, say by a hash of its file: up to 255 printable ASCII characters but
                                  quotes and backslashes.  NULL: "" */
} kvc_save_args;

/* Saves sequences: their rows, those that they share once, positions, deltas, what has expired, and the configuration
 * but for threads and functions.  It is the state of one moment.  Of an open batch nothing is saved; rows are written
 * without the mutex, and may be edited meanwhile, as if a kvc_hold held them: kvc_compact, kvc_settle and
 * kvc_cache_free fail with KVC_ERR_HELD.  seq_ids may name empty sequences.
 * Fails with KVC_ERR_CALLBACK, after which what was written is no whole file, with KVC_ERR_NOMEM, and with
 * KVC_ERR_UNSUPPORTED on a big-endian machine, as files are little-endian. */
KVC_API kvc_status kvc_save(kvc_cache *cache, const kvc_save_args *args);

/* Gets the tokens that were saved with a sequence, before anything is changed.  Returns as kvc_read_fn does. */
typedef int32_t kvc_tokens_fn(void *user, int64_t seq_id, const int64_t *tokens, int64_t num_tokens);

typedef struct kvc_load_args {
    size_t struct_size;
    const void *data;  /* [size] the file in memory: parts are copied and checked on all threads.  A mapped file that
                          somebody cuts meanwhile ends the process with SIGBUS.  NULL: it is read by `read` */
    kvc_read_fn *read;
    void *user;        /* for read and tokens */
    int64_t size;      /* bytes of the file */
    const char *fingerprint; /* not NULL: KVC_ERR_FORMAT if the file has another one */
    const int64_t *seq_ids;  /* [num_sequences] sequences of the file, by rising id; NULL: all */
    const int64_t *to_ids;   /* [num_sequences] what they are called in the cache; NULL: the same */
    int64_t num_sequences;   /* 0 where seq_ids is NULL */
    kvc_tokens_fn *tokens;   /* called for each of these sequences; may be NULL */
    const kvc_config *config; /* for kvc_load only; may be NULL.  Its allocator, threads and poll are the cache's; limits
                                 and block_size, where not 0, take the place of the file's.  layers may be NULL and
                                 num_layers 0; give layers, the same as the file's, where some have KVC_ROPE_FUNCTION */
} kvc_load_args;

/* Sets *cache to a new cache with the configuration and the sequences of a file, to be freed with kvc_cache_free.  The
 * file is untrusted: every count is checked against its size before memory is taken for it.  cache NULL: only checks
 * the file, checksums included.
 * kvc_nbytes of the new cache must be within max_bytes.  It is usually smaller than before saving, because rows are
 * packed into full blocks.  A sequence's list of runs may be a few entries longer, of 24 bytes each.
 * Fails with KVC_ERR_FORMAT, and the reason in kvc_last_error(), if it is truncated, altered
 * (and which tensor), of another shape or model, of a newer format, or no saved state; with KVC_ERR_INVALID also where
 * the file has not all of seq_ids, or needs functions that move keys; with KVC_ERR_CALLBACK, KVC_ERR_FULL (capacity or
 * max_bytes), KVC_ERR_NOMEM and KVC_ERR_UNSUPPORTED. */
KVC_API kvc_status kvc_load(const kvc_load_args *args, kvc_cache **cache);

/* Loads sequences into a cache whose layers have the shapes, types, transforms, policies and ropes of the file's, in
 * place of what it held under these ids; block_size and limits may differ.  Rows that two of them share are shared
 * again.  Meanwhile other calls go on, as beside kvc_save; the sequences are there once all is read and checked.  Only
 * then are retained ones evicted and old rows replaced: until then the cache may exceed max_bytes by what is
 * loaded.  Fails as kvc_load does, with KVC_ERR_BUSY for a sequence that kvc_begin or an edit is using, and with
 * KVC_ERR_INVALID for a retained one. */
KVC_API kvc_status kvc_restore(kvc_cache *cache, const kvc_load_args *args);

/* Sets *clone to an independent copy of a cache and of all that its sequences hold, to be freed with kvc_cache_free.
 * Rows are copied block by block, without the mutex; those that sequences share are copied once, and shared in the
 * copy as well.  The copy has the same configuration, allocator and functions that move keys: their `user` must take
 * calls for both caches, from any thread.  Its statistics begin at 0, and memory kept for reuse is not copied, so that
 * its kvc_nbytes is no larger.  Its instruction set is kvc_isa().  Fails with KVC_ERR_BUSY, KVC_ERR_NOMEM, and as
 * kvc_cache_new does with KVC_ERR_UNSUPPORTED. */
KVC_API kvc_status kvc_cache_clone(kvc_cache *cache, kvc_cache **clone);

/* ---- retained sequences: rows that wait to be used again --------------------------------------------------------- */

/* A retained sequence keeps rows for later sequences that begin with the same tokens, when no running sequence may
 * need them any more: say block_size tokens of a prompt.  It is read like any other.  Batches and edits refuse it with
 * KVC_ERR_INVALID, but for kvc_inject; kvc_clear_sequence drops it; kvc_sequences does not list it, and max_sequences
 * does not count it.
 * Where a call would fail with KVC_ERR_FULL for capacity or max_bytes, rows that only retained sequences hold are
 * evicted, the least recently used first, and none unless the call succeeds.  A sequence is evicted as a whole, unless
 * others hold its rows in the layers that see everything: then only its rows in the other layers are.  One whose rows
 * would free nothing of what is lacking stays, unless max_bytes lacks even the bytes of its bookkeeping.  kvc_room
 * counts what can be evicted.
 * This is for runners that know by themselves which tokens belong to which id; others use a kvc_prefix, below. */

/* Makes a retained sequence `id` of the rows of src at positions [begin, end), as the most recently used.  No row is
 * copied, and those of cross-attention layers are left out.  If src holds no rows there, no sequence is made.  Rows
 * that the open batch adds to src, if src is stored, are retained as well: call this before the commit, which expires
 * some of layers with a window or chunks.  If the batch is aborted, or does not keep them, clear the retained sequence.
 * Fails with KVC_ERR_INVALID if `id` holds rows, with KVC_ERR_BUSY while keys of src are rewritten, and with
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_retain(kvc_cache *cache, int64_t src, int64_t id, int32_t begin, int32_t end);

/* Makes a retained sequence of new rows at positions [begin, end), at most block_size of them, whose contents come
 * from elsewhere: write them with kvc_inject, after which they count as exact.  Until then they are undefined, so the
 * sequence is pinned: take the pin away (kvc_pin) when they are written.  layers: [num_layers] not 0 for layers that
 * have rows, with all layers of one group alike; NULL: all have.  May be called while a batch is open.  Fails with
 * KVC_ERR_INVALID as kvc_retain does, with KVC_ERR_FULL and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_retain_new(kvc_cache *cache, int64_t id, int32_t begin, int32_t end, const uint8_t *layers);

/* Makes dst, which holds nothing, of rows of retained sequences, given by rising position, as if their tokens had been
 * put in dst.  *matched becomes the largest number of tokens, at most `length`, behind which every layer has what a
 * query sees there: all rows, or those of its window or chunk.  It is at most what the sequences had, expired tokens
 * included.  Ids that do not exist count as evicted: what they held is missing.  dst holds no token from *matched on,
 * and nothing where that is 0; what has expired of it is forgotten.  Marks the sequences as used, as kvc_touch does.
 * Fails with KVC_ERR_INVALID if dst holds rows, an id is that of a sequence that is not retained, or rows of one do
 * not stand behind those of the ones before; with KVC_ERR_BUSY and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_attach(kvc_cache *cache, const int64_t *ids, int32_t num_ids, int64_t dst, int32_t length,
                              int32_t *matched);

/* Marks retained sequences as used, the first as the most recent: what others build on stays longest.  Ids that do not
 * exist, or are not retained, are ignored. */
KVC_API kvc_status kvc_touch(kvc_cache *cache, const int64_t *ids, int32_t num_ids);

/* Pins retained sequences (add 1), so that they are not evicted, or takes a pin away (add -1).  Ids that do not
 * exist, or are not retained, are ignored. */
KVC_API kvc_status kvc_pin(kvc_cache *cache, const int64_t *ids, int32_t num_ids, int32_t add);

/* Writes the ids of the retained sequences, the least recently used first, at most max_ids of them, none if ids is
 * NULL; returns how many there are. */
KVC_API int64_t kvc_retained(kvc_cache *cache, int64_t *ids, int64_t max_ids);

/* ---- prefixes: prompts that begin alike -------------------------------------------------------------------------- */

/* A prefix finds the beginning of a prompt among the blocks that earlier sequences left behind, by their tokens.
 *
 *   kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched)  a new sequence, which holds the first `matched` tokens
 *     feed it the tokens from position `matched` on, then what is generated
 *   kvc_prefix_release(prefix, seq_id, &all_tokens)             the sequence ends, its blocks stay
 *
 * The commit that fills a block of the prompt keeps this block, and other prompts find it from then on.
 * kvc_prefix_release keeps blocks of generated tokens, and the last block, which may not be full.  Only exact rows are
 * kept (kvc_exact_to).
 *
 * Known     is the one word for what a prompt finds.  A block is kept while it has rows of some layer, and until it
 *           expires (ttl_ms).  The first n tokens of a prompt are known if kept blocks of these tokens hold, for each
 *           layer, every row that a token at position n would see.  Where the prefix has state_bytes, a checkpoint at n
 *           is needed as well.  n is at most where the last kept block of the prompt ends.  If only the first tokens of
 *           that block are the prompt's, it ends behind these.
 *           The number of known tokens is the largest such n up to a limit; each call below says its own.  Where many
 *           kept blocks begin like the rest of a prompt, the 32 with the most tokens in common are looked at.
 *
 * Kept blocks take no room from others: where a call would fail with KVC_ERR_FULL, they are evicted, as retained
 * sequences are.  KVC_ERR_FULL then says that sequences in use, pins and quotas hold all.  Release a sequence, and
 * acquire it again with all its tokens when another has ended.  A batch that fits without a match fits with one, except
 * for some bytes of bookkeeping.
 * An acquired sequence ends like any other: kvc_clear_sequence keeps only the blocks of the prompt that were full by
 * then.  It may be edited: what follows the edit is kept only by kvc_prefix_release.  Several prefixes, for adapters
 * and tenants, may share a cache.  The time of a call grows with the blocks of its tokens, with the blocks that it
 * drops, and with blocks that begin like one of its own, at most 32 for each. */

typedef struct kvc_prefix kvc_prefix;

#define KVC_NAME_BYTES 32

/* The tokens of a sequence, from position 0 on. */
typedef struct kvc_tokens {
    size_t struct_size;
    const int64_t *ids;     /* [num_tokens] */
    int64_t num_tokens;
    const uint8_t *digests; /* [num_tokens][KVC_NAME_BYTES] stands for the token in place of its id, such as the hash of
                               an image; all 0: the id counts.  NULL: all ids count */
} kvc_tokens;

typedef struct kvc_prefix_config {
    size_t struct_size;
    const char *fingerprint; /* what computes the rows: the model's name and revision, a hash of its file, an adapter.
                                Not empty; ignored where identity is given */
    const void *salt;        /* [salt_size] the tenant, a secret where tenants distrust each other.  NULL: none */
    int64_t salt_size;
    const void *identity; /* [identity_size] what rows depend on besides tokens, in place of kvc_prefix_identity.  NULL:
                             that, of the fingerprint */
    int64_t identity_size;
    int64_t quota;       /* tokens: so many of its most recently used ones are not evicted for others, though their
                            bookkeeping, not their rows, may exceed max_bytes.  0: none */
    int64_t ttl_ms;      /* milliseconds after which blocks that no call has used, and that are not pinned, are not
                            kept any more; later calls drop them.  0: never */
    int32_t reuse_min_tokens; /* not 0: tokens that begin where the match ends are taken from wherever they were
                            computed, in another prompt or at another position, if they are at least so many in a row
                            and span a whole block there, and are moved: an approximation, and inexact.  Of blocks with
                            the same tokens, the 32 used last are looked at.  0: never */
    int32_t collects_new; /* not 0: kvc_take_new_blocks lists its blocks, and kvc_store_new_blocks writes them */
    void *user;          /* what kvc_take_new_blocks says of its blocks */
    const void *secret;  /* [secret_size] the key of a MAC over each value in a store.  Without the key one can remove
                            values, but kvc_prefix_fetch takes none that one writes.  NULL: values have a checksum,
                            which finds accidents.  Give both fields, or neither */
    int64_t secret_size;
    int64_t state_bytes; /* not 0: the model has a recurrent state as well, of at most so many bytes a sequence, and a
                            match ends at a checkpoint (kvc_prefix_checkpoint).  0: it has none */
    int64_t max_checkpoint_bytes; /* of the states that are kept: the least recently used ones are dropped.  0: as many
                            as their blocks, and max_bytes */
    int32_t max_events; /* so many, of 40 bytes each, are noted for kvc_prefix_take_events.  0: none are */
} kvc_prefix_config;

/* Writes the identity that the names of blocks depend on besides tokens, salt and state_bytes: KVC_NAME_BYTES bytes.
 * It is a digest of the fingerprint, which has `size` bytes, of block_size, and of each field of a layer that rows
 * depend on.  Python's PrefixCache has the same identity if its cache has the same layers, and its fingerprint in UTF-8
 * the same bytes. */
KVC_API kvc_status kvc_prefix_identity(const kvc_cache *cache, const void *fingerprint, int64_t size,
                                       uint8_t *identity);

/* Sets *prefix to a new prefix of a cache, to be freed with kvc_prefix_free, or with the cache.  Fails with
 * KVC_ERR_INVALID if the cache is for one sequence or a field is out of range, with KVC_ERR_UNSUPPORTED if it has a
 * KVC_CROSS layer, whose rows do not follow from tokens, or reuse_min_tokens is given and the rope of a layer is not
 * known, or the model has a recurrent state, with KVC_ERR_FULL if max_bytes leaves no room, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_new(kvc_cache *cache, const kvc_prefix_config *config, kvc_prefix **prefix);

/* Frees a prefix, and drops its blocks; ignores NULL.  Sequences that it acquired go on as any others. */
KVC_API void kvc_prefix_free(kvc_prefix *prefix);

/* Returns a new id, which names no sequence.  Ids count up from 0.  Neither this call nor kvc_prefix_acquire has
 * returned it before. */
KVC_API int64_t kvc_new_sequence(kvc_cache *cache);

/* Sets *seq_id to a new sequence that holds the known tokens of a prompt, and *matched to their number: at most
 * max_matched (-1: no limit), and fewer than all, because the last token has to be fed.  If the prompt may need all of
 * max_bytes, the call drops blocks that go on with other tokens where the match ends.  May be called while a batch is
 * open.  Fails with KVC_ERR_INVALID if there are no tokens, with KVC_ERR_NOMEM, and with KVC_ERR_CALLBACK if a
 * kvc_shift_fn fails (reuse_min_tokens).  In the last case it may have evicted kept blocks for rows that it moved
 * before. */
KVC_API kvc_status kvc_prefix_acquire(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t max_matched,
                                      int64_t *seq_id, int32_t *matched);

/* Keeps the blocks of a sequence, and ends it.  Pass all its tokens, generated ones too; tokens that were not fed are
 * ignored.  The sequence may be any of the cache; if it is empty, it only ends.  If memory for bookkeeping is short,
 * the call keeps fewer blocks.  Fails with KVC_ERR_BUSY while the sequence is in the open batch or its keys are
 * rewritten, and with KVC_ERR_INVALID if it is retained. */
KVC_API kvc_status kvc_prefix_release(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *tokens);

/* Keeps the blocks of a sequence's first tokens, and the recurrent state of the model behind them.  The sequence goes
 * on.  A match of a prefix with state_bytes ends at a checkpoint.  num_bytes 0: keeps the blocks alone.
 * A runner calls it before the last token of a prompt, because an acquired sequence never holds that token; at the end
 * of an answer; and every few thousand tokens of a long prompt.
 * A state counts as memory, and is dropped with the rows of its last token.  It is not kept in three cases: the
 * sequence holds fewer tokens, its tokens are not all exact, or all its windows have left the last token behind and no
 * kept block has the rows of that token.
 * Fails with KVC_ERR_BUSY and KVC_ERR_INVALID as kvc_prefix_release does, and with KVC_ERR_INVALID if num_bytes is more
 * than state_bytes.  Fails with KVC_ERR_FULL if max_bytes leaves no room for the state, and with KVC_ERR_NOMEM; blocks
 * may then have been kept without it. */
KVC_API kvc_status kvc_prefix_checkpoint(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *tokens,
                                         const void *state, int64_t num_bytes);

/* Writes the recurrent state from which an acquired sequence goes on, and sets *num_bytes to its bytes: 0 if nothing
 * was matched.  `state` has room for max_bytes.  state NULL: sets *num_bytes alone.  Call it before tokens are fed,
 * because the commit forgets the state.  Fails with KVC_ERR_INVALID if the state has more than max_bytes. */
KVC_API kvc_status kvc_prefix_state(kvc_prefix *prefix, int64_t seq_id, void *state, int64_t max_bytes,
                                    int64_t *num_bytes);

/* Sets *matched to the number of known tokens.  Takes nothing, and marks nothing as used.  Sets *with_rows, unless it
 * is NULL, to the number of tokens that would be known if no checkpoints were needed.  If that is more, another prompt
 * began alike, and a checkpoint there lets the next such prompt go on from it. */
KVC_API kvc_status kvc_prefix_lookup(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t *matched,
                                     int32_t *with_rows);

/* Pins the known tokens of a prompt, such as a system prompt: their blocks and state are not evicted.  Sets *kept to
 * the number of these tokens; if it is 0, nothing is pinned.  Call it again once more of the prompt is known: the pin
 * then holds that, too.  If only the first tokens of a block are the prompt's, the whole block is pinned.  A pin does
 * not count as a use.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_pin(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t *kept);

/* Takes back one kvc_prefix_pin of the same tokens; does nothing if no such pin is left.  Once all are taken back, they
 * pin nothing of the prompt. */
KVC_API kvc_status kvc_prefix_unpin(kvc_prefix *prefix, const kvc_tokens *tokens);

/* Drops the least recently used blocks that are not pinned, until num_tokens tokens are dropped or no block is left.
 * Sets *num_evicted to the number of dropped tokens, which may be more, because blocks are dropped whole. */
KVC_API kvc_status kvc_prefix_evict(kvc_prefix *prefix, int64_t num_tokens, int64_t *num_evicted);

/* Drops all blocks, pinned ones too, and takes back all pins.  Sequences stay as they are; the tokens that they hold
 * are kept once they are released. */
KVC_API kvc_status kvc_prefix_clear(kvc_prefix *prefix);

/* Forgets a prompt, for example private data: none of its tokens matches any prompt until somebody computes them again.
 * Pass the answer with the prompt.  The call drops each block that holds a row of one of the tokens, and each block
 * that follows the whole prompt; pinned blocks too, and the states of all.  Sets *num_dropped to the number of tokens
 * in these blocks.
 *
 * A block that follows a part of the prompt and holds none of its tokens stays.  It belongs to another prompt, and
 * matches again once the tokens before it are computed again.
 * Sequences stay as they are, and go on.  But this prefix keeps no more blocks of a sequence that may hold forgotten
 * rows.  An acquired sequence may hold them if it begins with the prompt's first token.  Any other sequence may hold
 * them if it holds tokens now, or is a copy of one that does; retained sequences too.  If a cache has more than 64
 * prefixes, some of them also keep no blocks of a sequence whose rows another prefix has forgotten.  A kvc_prefix_fetch
 * under way adds nothing more.
 * Saved states keep their rows: rows that are restored from them count as computed again.
 * Pins stay.  Once the tokens are computed again, their blocks are pinned again, until kvc_prefix_unpin.
 * Stores keep their values.  Remove the values under the names of the prompt (kvc_prefix_names), and under the names
 * that this call writes to `names`, [max_names][KVC_NAME_BYTES]: the full blocks that it dropped.  The call ends when
 * it has written max_names of them; call it again until *num_names is less.  names NULL, and max_names 0: drops all. */
KVC_API kvc_status kvc_prefix_forget(kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *names, int64_t max_names,
                                     int64_t *num_names, int64_t *num_dropped);

/* Writes the names of the full blocks of a prompt, known or not: at most max_names, [..][KVC_NAME_BYTES].  Sets
 * *num_names to the number of full blocks. */
KVC_API kvc_status kvc_prefix_names(kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *names, int64_t max_names,
                                    int64_t *num_names);

/* Events: what a router follows, to send a prompt to where its blocks are. */

typedef enum kvc_prefix_event_kind {
    KVC_BLOCK_KEPT = 1, /* a full block is kept from now on.  If all blocks before it are kept, its tokens are usually
                           known.  They are not if a row that a window sees behind it is lost, or a checkpoint */
    KVC_BLOCK_DROPPED,  /* the block is dropped: evicted, expired or forgotten */
    KVC_BLOCKS_CLEARED  /* all kept blocks are dropped */
} kvc_prefix_event_kind;

typedef struct kvc_prefix_event {
    int32_t kind;                 /* kvc_prefix_event_kind */
    int32_t begin;                /* position of the block's first token */
    uint8_t name[KVC_NAME_BYTES]; /* of the block */
} kvc_prefix_event;

/* Writes the events since the last call, in order: at most max_events.  Sets *num_events to how many it wrote, and
 * *num_lost to how many before them were overwritten because there are more than kvc_prefix_config.max_events. */
KVC_API kvc_status kvc_prefix_take_events(kvc_prefix *prefix, kvc_prefix_event *events, size_t event_size,
                                          int64_t max_events, int64_t *num_events, int64_t *num_lost);

/* Stores: how full blocks get out of the cache, and back.  A payload begins with a byte for each layer: 1 if its rows
 * follow.  Then come the rows of these layers, as they are stored: keys [num_kv_heads][block_size], then values, unless
 * they lie in the keys.  If the block has a checkpoint, the position of the last one follows (4 bytes, the lowest
 * first), then its state.  A payload is kept under the block's name, and fits any prefix with the same names, on any
 * machine.  Names tell prefixes of other state_bytes apart. */

typedef struct kvc_new_block {
    void *user;         /* of its prefix */
    int64_t id;         /* for kvc_read_block */
    int32_t begin, end; /* positions of its tokens */
    uint8_t name[KVC_NAME_BYTES];
} kvc_new_block;

/* Writes the blocks that prefixes with collects_new have kept since the last call: at most max_blocks.  Sets
 * *num_blocks to how many it wrote.  A block comes once, and again when it gets more rows, a checkpoint at its end, or
 * a later checkpoint within it; of blocks that begin with the same tokens, up to 64 come again for the last reason.
 * Blocks that were dropped since, or added by kvc_prefix_add, do not come.  Call it after each commit and
 * kvc_prefix_release. */
KVC_API kvc_status kvc_take_new_blocks(kvc_cache *cache, kvc_new_block *blocks, size_t new_block_size,
                                       int64_t max_blocks, int64_t *num_blocks);

/* Returns the bytes of a payload in which no layer is missing, with the largest state of any prefix. */
KVC_API int64_t kvc_payload_bytes(kvc_cache *cache);

/* Writes the payload of a block, and sets *size to its bytes: 0 if the block was dropped.  max_bytes should be at least
 * kvc_payload_bytes, asked after the block's prefix was made; a state that does not fit is left out.  Fails with
 * KVC_ERR_INVALID if max_bytes is less than the rows of all layers have, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_read_block(kvc_cache *cache, int64_t id, void *payload, int64_t max_bytes, int64_t *size);

/* Joins two payloads of a block into `to`, which has room for max_bytes, and sets *size to the bytes of the result.  It
 * has the rows of each layer that either payload has, and the state with the larger position.  Join both before you
 * replace a stored payload: a block that is computed again may have no state, or lack rows of windows.  Fails with
 * KVC_ERR_INVALID if max_bytes does not suffice, and with KVC_ERR_FORMAT if either is no payload of this cache. */
KVC_API kvc_status kvc_join_payloads(const kvc_cache *cache, const void *first, int64_t first_size, const void *second,
                                     int64_t second_size, void *to, int64_t max_bytes, int64_t *size);

/* Writes the names of the full blocks that are not known to their end, among the first num_tokens tokens of a prompt:
 * at most max_names, [..][KVC_NAME_BYTES].  Sets *first to the number of the first such block, which has the tokens
 * from *first * block_size on, and *num_names to how many there are.  Marks the known blocks as used.  Fails with
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_missing(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens, uint8_t *names,
                                      int64_t max_names, int32_t *first, int64_t *num_names);

/* Adds block number `block` of a prompt from its payload.  Sets *is_kept to 1 if the block is now kept with all that
 * the payload has, and to 0 if there is no room for its rows and state.  If not all blocks before it are kept, and the
 * tokens before it are not known, it is not added.  A state within the block is kept with one more block, of the tokens
 * up to there.  Fails with KVC_ERR_FORMAT if it is no payload of this cache, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_add(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t block, const void *payload,
                                  int64_t size, int32_t *is_kept);

/* A store keeps such blocks, of any number of caches, processes and machines.  kvc_dir_store_new makes one in a folder;
 * another one is two functions of the caller, which any thread may call, several at once, without the cache's mutex.
 * They return KVC_OK, or, usually, KVC_ERR_STORE, after kvc_set_last_error.
 *
 *   kvc_prefix_fetch(prefix, &tokens, -1, store, &fetched)      before kvc_prefix_acquire: adds what the store has
 *   kvc_store_new_blocks(cache, store, &num_written)            after commits and releases: writes what is new
 *
 * Call both on any thread, such as one of your own for writing: nothing waits for them.  A store that fails costs
 * speed, and nothing else; the status says that it failed.  A value is a header of 128 bytes, bound to the name, the
 * model and the secret, and the payload.  A value is used only if it is unchanged.  Python's PrefixCache writes the
 * same values, under the same names in hexadecimal digits. */

typedef struct kvc_store {
    size_t struct_size;
    void *user; /* given to the functions */
    /* Copies the value under a name of KVC_NAME_BYTES bytes to `value`, and sets *size to its bytes: 0 if there is
     * none.  If the value has more than max_bytes, sets *size to any number above max_bytes, and copies nothing. */
    kvc_status (*read)(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size);
    /* Keeps a value under a name, in place of the one that is there. */
    kvc_status (*write)(void *user, const uint8_t *name, const void *value, int64_t size);
} kvc_store;

/* Reads full blocks from a store, and adds them: those that follow the known tokens of a prompt, in order.  It ends
 * where the store lacks a block, where there is no room, and where a block would reach past max_matched tokens (-1: no
 * limit) or hold the prompt's last token.  A block whose rows are kept is read if it lacks its state.  Sets *fetched to
 * the number of tokens in blocks that brought rows or a state, also if it fails.
 * Fails with KVC_ERR_INVALID if there are no tokens, as `read` fails, with KVC_ERR_FORMAT if a value was changed, and
 * with KVC_ERR_NOMEM.  The prompt's tokens are then computed, and a changed value is written again. */
KVC_API kvc_status kvc_prefix_fetch(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t max_matched,
                                    const kvc_store *store, int32_t *fetched);

/* Takes the new blocks as kvc_take_new_blocks does, and writes them to a store.  Sets *num_written to how many it
 * wrote, also if it fails.  If a block may have no state, or lack rows of windows, it reads the block's value first,
 * and writes both joined.  Fails as `read` and `write` do, and with KVC_ERR_NOMEM.  It does not try that block again;
 * the next call writes the others. */
KVC_API kvc_status kvc_store_new_blocks(kvc_cache *cache, const kvc_store *store, int64_t *num_written);

/* Sets *store to a new store in a folder, which is made if there is none; free it with kvc_dir_store_free.  Any number
 * of processes and threads may share a folder, also Python's DirectoryStore.  A relative path starts where the process
 * is now, also after a chdir().  Its files take at most max_bytes (0: no limit): the least recently read or written
 * ones are removed until 1/16 of that is free.  Only their owner can read files; on Windows, whoever the folder allows.
 * There the path is UTF-8.  Links and files of other names are left alone.  Nothing is synced to the disk: a file that
 * a power cut damages counts as missing.  Its functions fail with KVC_ERR_STORE and KVC_ERR_NOMEM.  Fails with
 * KVC_ERR_STORE if the folder cannot be made or used, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_dir_store_new(const char *path, int64_t max_bytes, kvc_store **store);

/* Frees a store of kvc_dir_store_new that no call uses any more; ignores NULL.  Its files stay. */
KVC_API void kvc_dir_store_free(kvc_store *store);

typedef struct kvc_prefix_stats {
    int64_t requests;  /* calls of kvc_prefix_acquire that succeeded */
    int64_t hits;      /* requests that matched a token or more */
    int64_t tokens;    /* tokens of all requests */
    int64_t matched;   /* tokens that were matched */
    int64_t reused;    /* matched tokens that were computed elsewhere (reuse_min_tokens) */
    int64_t blocks;    /* kept blocks now, full or not, also behind a block that was dropped.  An expired block counts
                          until a call drops it */
    int64_t held;      /* tokens in kept blocks now */
    int64_t sequences; /* acquired sequences now that have not ended */
    int64_t checkpoints;      /* states of the model that are kept now */
    int64_t checkpoint_bytes; /* bytes of these states */
} kvc_prefix_stats;

/* Fills in *stats, of stats_size bytes. */
KVC_API void kvc_prefix_get_stats(kvc_prefix *prefix, kvc_prefix_stats *stats, size_t stats_size);

/* ---- batches of other kinds -------------------------------------------------------------------------------------- */

/* Sequences that are not stored (kvc_begin_args.unstored), for example to score a text, or where memory is short.  The
 * batch sees what such a sequence held before; the commit drops that.  Where it held nothing, its tokens take the
 * memory of one layer: rows that kvc_attend puts stay until it puts in another layer, even if that is cancelled;
 * attending over them after that, or asking kvc_dense for them, fails with KVC_ERR_GONE.  Rows that kvc_put puts or
 * kvc_slots shows stay until the batch ends, in memory of their own, for which the call may fail with KVC_ERR_FULL
 * (max_bytes) and KVC_ERR_NOMEM; so do those of layers that others share, and of cross-attention layers.  capacity and
 * max_sequences do not count such tokens, and kvc_blocks does not show their rows. */

/* Waiting for the open batch (kvc_begin_args.timeout_ms).  Calls wait in order of arrival, and find the sequences as
 * they are then; a call that does not wait fails with KVC_ERR_BUSY while others wait.  Any thread may end the batch,
 * so a thread that waits for a batch that it was to end itself waits in vain.  The call fails with KVC_ERR_BUSY once
 * timeout_ms have passed, and with KVC_ERR_CANCELLED if the cache's poll says so. */

/* Restoring layers (kvc_begin_args.replaced): the batch puts back rows that were saved.  Once it is committed, its
 * tokens are all that their sequences hold in these layers, in place of what they held there; other layers stay as
 * they are.  So a state whose layers hold different positions takes several batches: one with all positions, for the
 * layers that see everything, and one with the last positions, for those with a window.
 * Give positions, in any order: the tokens arrive by rising position, those of a sequence at the same position, as
 * kvc_divide leaves them, in the order given; parents and unstored are NULL.  Layers of one group are restored
 * together; flags of layers that share rows, or have no attention, are ignored.  Put every token in every restored
 * layer, and in no other (KVC_ERR_INVALID).  kvc_put replaces the rows of a restored KVC_CROSS layer; where it is not
 * called, they stay.  Nothing attends in such a batch: kvc_attend, kvc_plan_new, kvc_dense and those beside it fail
 * with KVC_ERR_INVALID.  kvc_commit_kept leaves a sequence as it is if it keeps none of its tokens.  What is replaced
 * takes memory until the commit, but counts neither for max_seq_len nor, unless an edit copies rows meanwhile, for
 * capacity.  Positions that one layer holds and another lacks are gone from that other one, as if they had been
 * expired: to go on where they would be seen fails with KVC_ERR_GONE until it is restored as well, or kvc_truncate
 * drops them.  Of a restored layer with a window or chunks, positions that were not given and that the query behind
 * its last row would not see count as expired.  Until layers agree again, no row expires that a query would see at the
 * first position that one of them lacks, or later: so the window of an earlier moment can be restored into a sequence
 * that has gone on, and kvc_truncate takes it back there. */

typedef struct kvc_begin_args {
    size_t struct_size;
    int32_t num_tokens;
    const int32_t *positions; /* [num_tokens], as are the arrays below; NULL: those that follow */
    const int64_t *seq_ids;   /* NULL: all of sequence 0 */
    const int32_t *parents;   /* NULL: no trees */
    const uint8_t *unstored;  /* not 0: the token's sequence is not stored, and holds nothing once the batch is
                                 committed; the same for all tokens of a sequence.  NULL: all sequences are stored */
    int64_t timeout_ms;       /* milliseconds to wait while another batch is open or keys are rewritten: 0, not at all;
                                 -1, as long as it takes */
    const uint8_t *replaced;  /* [num_layers] not 0: the batch restores the layer.  NULL: none, it is an ordinary one */
} kvc_begin_args;

/* Does what kvc_begin does, with its errors, for batches of the kinds above.  Fails with KVC_ERR_INVALID also where
 * replaced, positions, parents or unstored are not as said there. */
KVC_API kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **batch);

/* Returns the positions of the batch's tokens, [num_tokens]; valid until the batch ends. */
KVC_API const int32_t *kvc_batch_positions(const kvc_batch *batch);

/* ---- a kernel of your own: writing rows -------------------------------------------------------------------------- */

/* Sets *span to where a kernel of the caller is to write the rows of token `first` of the batch, and of those after it
 * that lie in consecutive slots, in place of kvc_put.  Write through its pointers; they are valid until the batch
 * ends, or, if hold is not NULL, until *hold is freed.  position is that of `first`; those of the others are the
 * batch's.  Do not call it while another thread puts or writes tokens of the same layer.
 * Fails with KVC_ERR_INDEX and KVC_ERR_INVALID as kvc_put does, with KVC_ERR_UNSUPPORTED for KVC_CROSS, with
 * KVC_ERR_NOMEM for a hold, and, for sequences that are not stored, with KVC_ERR_NOMEM and KVC_ERR_FULL. */
KVC_API kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                             kvc_hold **hold);

/* Notes that tokens [first, first + num_tokens) of the batch were written where kvc_slots showed.  Fails with
 * KVC_ERR_INDEX and KVC_ERR_INVALID as kvc_put does, and with KVC_ERR_UNSUPPORTED for KVC_CROSS. */
KVC_API kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens);

/* ---- threads of your own: the tasks of kvc_attend ---------------------------------------------------------------- */

/* Makes a plan, for runners with threads of their own.  A plan cuts the work of kvc_attend into tasks and takes all
 * memory that they need; it serves every layer of the group that has the same shapes, one layer at a time, until the
 * batch ends, which frees it.  It may be made before rows are put, but in a cross-attention layer after what is put in
 * this batch.  Fails with KVC_ERR_INDEX and KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_plan_new(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **plan);

/* Returns the number of tasks of a plan. */
KVC_API int64_t kvc_plan_num_tasks(const kvc_plan *plan);

/* Runs one task of a layer, on any thread.  Run every task of [0, num_tasks) once, best in about this order, as the
 * large ones come first.  The last to end merges, in a fixed order, so no barrier is needed.  All calls for one layer
 * get the same args; args->put is NULL.
 * After tasks failed, were cancelled or were left out, run these again, or all of them, in any order: results are
 * right once the last has ended.  Where all are run again, args may have changed.  The next layer may be begun as
 * well.  Fails with KVC_ERR_INDEX if there is no such task, with KVC_ERR_BUSY while another thread runs the same task,
 * or tasks of another layer, and with KVC_ERR_INVALID, KVC_ERR_GONE and KVC_ERR_CANCELLED (cancel) as kvc_attend
 * does.  kvc_last_error() has the message on the thread that ran the task. */
KVC_API kvc_status kvc_plan_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, int64_t task);

/* Frees a plan before its batch ends; ignores NULL. */
KVC_API void kvc_plan_free(kvc_plan *plan);

/* ---- an attention of your own ------------------------------------------------------------------------------------ */

/* Lists the rows that the batch's tokens might see of one of its sequences in a layer, as kvc_spans does: the stored
 * ones, then those of the batch that were put, in the batch's order.  A token that is not put yet has no row.  Rows
 * put in a KVC_CROSS layer take the place of the stored ones.  Rows of the batch have delta 0; they continue the span
 * of the stored ones where they lie behind them.  No mask is applied: the policy, parents and positions say what a
 * token sees.  A hold keeps the rows after the batch has ended, too, even if it was aborted.  Without one, pointers
 * are valid until the batch ends.  Pointers to a sequence that is not stored (kvc_begin_with) are valid until
 * kvc_attend puts in another layer, pointers to a KVC_CROSS layer until rows are put there again.
 * Do not call this while another thread puts or writes tokens of the same layer.
 * Fails with KVC_ERR_INVALID if the batch has no token of the sequence, if it restores, or if the layer has no
 * attention, with KVC_ERR_GONE where rows of a sequence that is not stored are gone, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_batch_spans(kvc_batch *batch, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                                   int64_t max_spans, int64_t *num_spans, kvc_hold **hold);

/* Sets *num_rows to the number of rows the batch's tokens might see in a layer.  These are the stored rows of each
 * sequence of the batch, by rising id, and the batch's own that were put, each sequence in order of position (of equal
 * ones, in order of arrival).  Fails with KVC_ERR_GONE for sequences that are not stored (kvc_begin_with). */
KVC_API kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows);

/* For by_sequence: sets *num_sequences to the number of sequences in the batch, and *most_rows to the largest number of
 * these rows that one of them has.  Fails with KVC_ERR_INVALID unless the batch's tokens come sequence after sequence,
 * as many of each, and with KVC_ERR_GONE as kvc_dense_rows does. */
KVC_API kvc_status kvc_dense_sequences(kvc_batch *batch, int32_t layer, int32_t *num_sequences, int64_t *most_rows);

typedef struct kvc_dense_args {
    size_t struct_size;
    const kvc_rows_out *rows;  /* where they go, decoded or raw, and rotated */
    float *mask;               /* [the batch's tokens][rows] 0 where the token sees the row, else -inf; may be NULL */
    int64_t mask_token_stride; /* rows are adjacent */
    int64_t num_rows;          /* what kvc_dense_rows says; with by_sequence, most_rows of kvc_dense_sequences */
    const uint8_t *non_causal; /* [the batch's tokens], as in kvc_plan_args */
    uint8_t *seen;             /* [the batch's tokens][rows] 1 where the token sees the row, else 0; may be NULL */
    int64_t seen_token_stride;
    int32_t by_sequence; /* 0: rows of all sequences, one after the other.  Else each sequence has num_rows rows of its
                            own, a batch stride apart, in the order in which the batch names the sequences; where it has
                            fewer, the rest is zeros (position -1) that no token sees.  Masks are over the rows of the
                            token's sequence */
    int64_t k_batch_stride, v_batch_stride;
    const kvc_masked *masked; /* [num_masked] what the masks hide from all tokens, as in kvc_plan_args; these rows are
                                 copied, too */
    size_t masked_size;       /* sizeof(kvc_masked) */
    int32_t num_masked;
} kvc_dense_args;

/* Copies these rows, decoded or raw, rotated for the positions they have now, and says which token sees which, with
 * all threads of the cache.  Fails with KVC_ERR_INVALID if num_rows is not the number there are, and as
 * kvc_dense_sequences does, with KVC_ERR_NOMEM, and with KVC_ERR_GONE as kvc_dense_rows does. */
KVC_API kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *args);

/* ---- version, machine and threads -------------------------------------------------------------------------------- */

/* Returns the version this library was built as: major * 1000000 + minor * 1000 + patch. */
KVC_API int32_t kvc_version(void);

/* Returns one line on how the library was built: version, compiler, instruction sets compiled in, OpenMP.  Static. */
KVC_API const char *kvc_build_info(void);

/* Returns the instruction set that a cache created now would use: "scalar", "avx2", "neon", ...  It is the best this
 * machine has, unless the environment variable KVCACHE_ISA names another; NULL if that is one this machine or build
 * does not have. */
KVC_API const char *kvc_isa(void);

/* Returns the number of threads a call uses if the cache's configuration gives none: the number given to
 * kvc_set_num_threads, else the least of
 * - the first number in OMP_NUM_THREADS, which is read once, else the physical cores this process may use, within its
 *   affinity and cgroup quota, or the places (OMP_PLACES) that OpenMP binds threads to;
 * - with OpenMP's threads, omp_get_max_threads() of the runtime in use, which omp_set_num_threads, threadpoolctl and
 *   torch.set_num_threads change for the calling thread.
 * OMP_THREAD_LIMIT bounds these in any case.  Always 1 inside a parallel region of OpenMP that has several threads, and
 * in a child after fork() of a process with caches.
 *
 * All caches of the process share these threads, which the first call that is worth it starts.  While one call has
 * them, others run on the threads that made them. */
KVC_API int32_t kvc_num_threads(void);

/* Sets what kvc_num_threads returns, for the whole process, at most 4096; 0 undoes that.  Fails with
 * KVC_ERR_INVALID. */
KVC_API kvc_status kvc_set_num_threads(int32_t num_threads);

/* Returns whose threads a call uses that is made now: "openmp", where the library was compiled with OpenMP, or "own".
 * The environment variable KVCACHE_THREADS, which is read once, when it is first needed, or kvc_set_threading_layer
 * names another; NULL if the variable names one that this build does not have, with which no cache can be made.
 *
 * "openmp"  Calls are parallel regions of the OpenMP runtime that the program's other libraries use: the one that this
 *           library links to; or a copy of it, Clang's (libomp) or Intel's (libiomp5), if the process had loaded that
 *           when a cache was made and nothing else needs the linked one.  While regions are held up, because another
 *           program takes a processor, calls use the own threads; or, where OpenMP binds threads to places, the calling
 *           one alone.
 * "own"     Threads of this library, which wait for 50 microseconds and then sleep.  Also in a child after fork(),
 *           where the parent had no cache, or (on Linux) had not even loaded this library. */
KVC_API const char *kvc_threading_layer(void);

/* Sets whose threads calls of the whole process use from now on, "openmp" or "own", over KVCACHE_THREADS; NULL undoes
 * that.  Fails with KVC_ERR_UNSUPPORTED for a name that this build does not have. */
KVC_API kvc_status kvc_set_threading_layer(const char *name);

/* Returns the path of the OpenMP runtime that "openmp" means, whichever layer is in use; "" while it is not known:
 * before the first cache is made, without OpenMP, and on macOS and Windows.  Static. */
KVC_API const char *kvc_openmp_library(void);

/* ---- inspection -------------------------------------------------------------------------------------------------- */

typedef struct kvc_block_info {
    int32_t num_slots;
    int32_t filled;     /* slots below this were handed out; those past it belong to nobody yet */
    int32_t live;       /* of these, that a sequence or the open batch holds; the others wait for a compaction */
    int32_t references; /* how many hold the slot that most hold: sequences, and the open batch */
    int32_t resident;   /* slots that were ever handed out since its memory was taken: memory the system has given */
    int32_t is_held;    /* not 0: a kvc_hold keeps its rows as they are; until it lets go they are not reused */
    int32_t is_free;    /* not 0: nobody holds any of it: memory kept for reuse */
} kvc_block_info;

typedef struct kvc_run_info {
    int64_t seq_id;
    int32_t block; /* which of the blocks */
    int32_t slot;  /* the run is slots [slot, slot + count) of it */
    int32_t count;
    int32_t position; /* of the first row; the others follow one by one */
    int32_t delta;
    int32_t in_batch; /* not 0: of the open batch, and no part of the sequence yet */
    int32_t is_kept;  /* not 0: of a block that a prefix keeps; seq_id is a number of its own then, and listed last */
    int32_t reserved; /* 0 */
} kvc_run_info;

/* Lists where the rows of a layer's group lie, at one moment: every block that it has memory for, and every run in
 * them, by rising sequence id and in order of arrival; then those of the open batch, and rows that a kvc_put is
 * writing to a cross-attention layer.  Writes at most max_blocks and max_runs of them, each of the size given, and
 * sets *num_blocks and *num_runs to how many there are.  Once blocks are given back, others take their numbers.  Slots
 * that another call is writing rewritten keys to are live, and in no run. */
KVC_API kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                              int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                              int64_t max_runs, int64_t *num_runs);

/* Checks every invariant of the bookkeeping.  Fails with KVC_ERR_CORRUPT, with the reason in kvc_last_error(). */
KVC_API kvc_status kvc_validate(kvc_cache *cache);

#ifdef __cplusplus
}
#endif
#endif
