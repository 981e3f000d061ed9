/* kvcache.h: the KV cache for CPU inference.  The C interface for every day; it includes the rest at its end.
 *
 * A language-model runner keeps, for every layer, the keys and values of the tokens it has seen, decides which of
 * them stay, and attends over them.  This library does that, and nothing else.
 *
 * Contents  Each function says at its place what it does, what its limits are, and how it fails.
 *   status                      kvc_status, kvc_last_error
 *   configuration               kvc_config, and what it is made of: kvc_layer, kvc_type, kvc_policy, kvc_rope
 *   a cache                     kvc_cache_new, kvc_cache_free
 *   a forward pass              kvc_begin, kvc_begin_with, kvc_put, kvc_attend, kvc_commit, kvc_commit_kept, kvc_abort
 *   choosing rows               kvc_choose: which rows to attend to, for models with sparse attention
 *   looking at sequences        kvc_new_sequence, kvc_seq_len, kvc_next_position, kvc_can_resume, kvc_exact_to
 *   editing sequences           kvc_clear, kvc_fork, kvc_remove, kvc_truncate, kvc_shift
 *   reading and replacing rows  kvc_spans, kvc_gather, kvc_extract, kvc_inject
 *   room and memory             kvc_room, kvc_reserve, kvc_compact, kvc_nbytes
 *   version and threads         kvc_version, kvc_num_threads
 *   kvcache_prefix.h            prompts that begin alike: prefixes, checkpoints, events, stores
 *   kvcache_more.h              batches of other kinds; kernels, threads and memory of your own; saved states
 *
 * Words
 *   position      where a token stands in its sequence (int32).  Never the same thing as where it is stored.
 *   policy        per layer: which positions a query may see, and so which rows may be dropped.
 *   layer group   the layers that share a policy; they share blocks and bookkeeping.  A KVC_CROSS layer is a group by
 *                 itself.
 *   slot          room for one token: its K and V rows of every head of every layer of the group.
 *   block         `block_size` slots: the unit of allocation and of sharing between sequences.
 *   run           consecutive slots of one block that one sequence holds, at consecutive positions.
 *   stride        of a layer: how many positions share a row (kvc_policy).  1, unless it is said to be more.  The
 *                 strides of arrays are bytes: see Strides.
 *   sequence      a list of runs, in order of arrival.  Any int64 names one.  A sequence without rows is empty, not
 *                 unknown: queries answer 0 or -1, and edits do nothing.  Only forking it is an error.
 *   batch         the tokens of one forward pass, of one or many sequences.  A cache has one open batch at a time.
 *   delta         of a run: its positions now, less the positions its keys were rotated for (RoPE).
 *   span          a run as memory: pointers, strides, number of rows, first position, delta.
 *   hold          keeps the rows behind spans as they are, whatever is edited, until it is freed (kvc_spans).
 *   live          a slot is live while a sequence or the open batch holds it.
 *   expire        rows expire, and are dropped, when no later query can see them.
 *   sink tokens   the first num_sink_tokens positions of a sequence, which a sliding window shows for ever.  `sinks` in
 *                 kvc_attend_args are something else: logits that join the softmax.
 *   plan          kvc_plan_args says which tokens of a batch attend.  kvc_plan_new cuts that into tasks.
 *   prefix        finds the beginning of a prompt among the blocks that sequences left behind (kvc_prefix_new).
 *   kept block    a block that a prefix keeps for later prompts.  When other rows need its memory, it is evicted.
 *
 * Life of a cache
 *   kvc_cache_new(config, &cache)                 an empty cache, of a model's shape
 *     kvc_begin(cache, n, positions, ..., &batch) room for every token in every layer, or an error and no change
 *       kvc_put(batch, layer, rows)               for each layer, then:
 *       kvc_attend(batch, &plan_args, &args)      over all that the tokens may see
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
 *           Handles (kvc_cache *, kvc_batch *, ...) are not checked.  Pass only handles that kvc_cache_new, kvc_begin
 *           and the like made, and that nobody has freed.  NULL crashes, except in the calls that free.  A call that
 *           makes a handle writes NULL in its place if it fails.
 * Threads   Any thread may call any function.  A cache has one open batch at a time: kvc_begin fails with KVC_ERR_BUSY
 *           until it ends, and kvc_begin_with can wait.  The rest of this paragraph says how long calls wait.
 *           A mutex guards the bookkeeping.  Nobody holds it while rows are put, replaced, copied out, attended over or
 *           handed to a function of the caller.  How long a call holds it depends on its arguments and on the sequences
 *           that it names, not on what else the cache has.
 *           Some calls fail with KVC_ERR_BUSY while a batch is open: kvc_begin, edits of a sequence in the batch,
 *           kvc_reserve, kvc_room, kvc_compact, kvc_cache_clone and kvc_cache_free.  Other sequences may be edited.
 *           The same calls fail while kvc_shift, kvc_remove, kvc_divide or kvc_prefix_acquire (reuse_min_tokens)
 *           rewrites the keys of a sequence, and so do edits of that sequence.
 *           If each thread serves one request, let them put their tokens in one batch of many sequences, or take turns:
 *           with timeout_ms, kvc_begin_with waits for the open batch to end.
 *           Some calls wait.  Calls that read the rows of a sequence, edit it or begin a batch of it wait while
 *           kvc_inject writes its rows.  kvc_compact and kvc_cache_free wait for calls that copy rows out; a call that
 *           comes to copy rows meanwhile waits behind them.  kvc_room, kvc_load, and a call that would fail with
 *           KVC_ERR_FULL, wait for calls that copy rows, or carry a block to or from a store.
 *           Some calls may hold the mutex longer.  These are calls about all sequences (kvc_clear, kvc_keep,
 *           kvc_sequences, kvc_cache_clone, kvc_save without seq_ids, kvc_blocks, kvc_validate), and kvc_compact,
 *           kvc_begin and kvc_reserve when they move rows together.  kvc_commit and kvc_reserve end with work on OS
 *           pages, without the mutex; the batch has ended by then.  A free block whose pages are worked on is not given
 *           back meanwhile.
 * fork()    The child has one thread, and every cache as it was.  fork() waits for calls of other threads to end,
 *           except for three kinds.  Work on a batch: in the child the batch is open, without that work.  Threads that
 *           wait to begin a batch: in the child nobody waits.  Functions of the caller: a sequence whose keys such a
 *           function was moving is as it was before.
 *           Sequences that an unfinished call made for its own use are not in the child.
 * Limits    max_seq_len and max_sequences are checked when a batch begins.  capacity is also checked by edits that copy
 *           rows, and by what loads rows.  max_bytes is checked by every call that takes memory for what it counts.
 *           Sharing and loading may exceed max_seq_len and max_sequences.  Past max_seq_len, the next batch
 *           of that sequence is refused.  Past max_sequences, any batch is refused.
 * Structs   grow at their end, so that a program and a library of different versions understand each other.
 *           Handed in: a struct begins with its own size, an array comes with the size of an element.  A field that is
 *           0, or that an older, smaller struct lacks, has its default.  A newer, larger struct may have fields that
 *           the library does not know: they must be 0, otherwise the call fails with KVC_ERR_UNSUPPORTED.  A struct
 *           smaller than the oldest that the library takes is KVC_ERR_INVALID.
 *           Filled in: a smaller struct gets the fields that it has; in a larger one, fields that the library does not
 *           know become 0.
 *           Structs within others (kvc_policy, kvc_rope) have `reserved` fields in place of growth.  These must be 0,
 *           otherwise the call fails with KVC_ERR_UNSUPPORTED.
 * Ranges    are half open: [begin, end).
 * Strides   are the bytes from one row of an array to the next, and may be negative.  The elements of a row are
 *           adjacent.  A stride of 0 has its default: rows lie side by side, in the order that the array's comment has
 *           in brackets, such as [num_tokens][num_heads][k_dim].  A head stride, or a choice stride, is then one row.
 *           A token stride, or a row stride, is the number of heads or choices times their stride.  In an array without
 *           heads, it is one row.  A batch stride is the number of a sequence's tokens, or rows, times the token or row
 *           stride.  So arrays without gaps need no strides.  If heads lie farther apart than a row, as in
 *           [head][token][dim], give both strides.
 *           Strides are multiples of an element's size, or for quantised rows any number of bytes.
 *           Rows that a call reads may overlap.  Rows of one array that it writes may not: the call fails with
 *           KVC_ERR_INVALID unless each stride is at least as long as everything that lies along shorter strides.  This
 *           also refuses a few arrays whose rows interleave.  Arrays are not compared with each other.
 */
#ifndef KVCACHE_H
#define KVCACHE_H

#include <stddef.h>
#include <stdint.h>

#define KVC_VERSION_MAJOR 0
#define KVC_VERSION_MINOR 3
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

/* Returns the status in general words; "unknown status" for a number that is no status.  The text is static. */
KVC_API const char *kvc_strerror(kvc_status status);

/* Returns the message of this thread's last call that failed; "" if none has failed.  Valid until the next failure. */
KVC_API const char *kvc_last_error(void);

/* Sets what kvc_last_error() returns on this thread, for functions of the caller that return a status (kvc_store): a
 * sentence, as printf makes it, cut to 511 bytes.  An argument may be the text that kvc_last_error() returned. */
KVC_API void kvc_set_last_error(const char *format, ...);

/* ---- configuration ----------------------------------------------------------------------------------------------- */

typedef enum kvc_type { /* element types of rows; kvcache_more.h has the layout of each */
    KVC_F32 = 0,
    KVC_F16 = 1,
    KVC_BF16 = 2,
    /* Types of ggml, byte for byte: blocks of 32 elements along a row.  k_dim, or v_dim, must be a multiple of 32. */
    KVC_Q8_0 = 3,   /* 34 bytes a block */
    KVC_Q4_0 = 4,   /* 18 bytes */
    KVC_Q4_1 = 5,   /* 20 bytes */
    KVC_Q5_0 = 6,   /* 22 bytes */
    KVC_Q5_1 = 7,   /* 24 bytes */
    KVC_IQ4_NL = 8, /* 18 bytes */
    /* Types with one scale for a whole row: kernels multiply integers alone.  k_dim, or v_dim, must be a multiple of
     * 32. */
    KVC_INT8 = 9,  /* dim + 2 bytes a row */
    KVC_INT6 = 10, /* dim * 3 / 4 + 2 bytes.  The cache spreads large channels of such rows before it quantises them */
    KVC_INT4 = 11  /* dim / 2 + 2 bytes, and as KVC_INT6 */
} kvc_type;

/* Returns the name of a type, such as "q8_0"; NULL for a number that is no kvc_type.  The text is static.  Types are
 * numbered from 0 on without gaps.  If ggml has a type of this name, it is the same type, byte for byte. */
KVC_API const char *kvc_type_name(int32_t type);

/* Returns the bytes of a row of dim elements.  For a quantised type, dim must be a multiple of 32.  Returns 0 for an
 * unknown type, and for a negative dim. */
KVC_API size_t kvc_row_bytes(int32_t type, int32_t dim);

typedef enum kvc_policy_kind {
    KVC_FULL = 0,    /* a query sees every position up to its own */
    KVC_SLIDING = 1, /* a query sees the `window` positions that end with its own, and the sink tokens */
    KVC_CHUNKED = 2, /* a query sees the positions of its own chunk, up to its own */
    KVC_CROSS = 3,   /* every query sees all rows of its sequence.  One kvc_put sets them all, any number.  Row i stands
                        at position i and is neither removed nor shifted.  The rows go when the sequence ends, because
                        none of its tokens is left (kvc_remove) */
    KVC_NONE = 4     /* no attention here: the layer holds nothing */
} kvc_policy_kind;

/* A layer with a stride n, above 1, has a row only for tokens at positions p with (p + 1) % n == 0.  The row stands
 * for the n positions up to p.  It may be a pooled key, or an entry that the model computes of n tokens.  A query at
 * position t sees the rows with p <= t: one for each of the (t + 1) / n complete blocks.  Layers of the same stride
 * are one group.  A cache needs another layer too, without a stride, or kvc_cache_new fails.
 * kvc_put takes rows of the tokens that have one, in the batch's order.  If a put has no such tokens, it may be left
 * out, or have k and v NULL.  Each row counts as one, and takes one slot.
 * A row stands at p, wherever positions name rows: in the range of an edit, in masks and in lists.  Rows of a span or
 * a run are n positions apart.  kvc_extract and kvc_inject have a row for each block: row i belongs to block begin / n
 * + i, and the number of rows is end / n - begin / n.
 * An edit may cut a block in two only at the end of the sequence.  Otherwise kvc_remove, kvc_shift and kvc_share
 * fail with KVC_ERR_UNSUPPORTED unless positions and deltas are multiples of n.  kvc_divide fails so always.
 * Prefixes need a block_size that is a multiple, and no reuse_min_tokens.  Layers with a stride have no sketches. */
typedef struct kvc_policy {
    int32_t kind;                 /* kvc_policy_kind; fields that the kind does not use are ignored */
    int32_t window;               /* SLIDING: positions a query sees, its own included; at least 1 */
    int32_t num_sink_tokens;      /* SLIDING: positions below this are always seen, and stay */
    int32_t resume_window;        /* how far a sequence can go back.  SLIDING: how many of the latest positions are
                                     kept, counted like window.  At least window; 0 means window.  CHUNKED: how many
                                     positions before the current chunk are kept */
    int32_t attention_chunk_size; /* CHUNKED: positions in a chunk; at least 1 */
    int32_t max_len;              /* CROSS: rows of one sequence, at least 1.  Its block has as many slots, and counts
                                     whole for max_bytes in each layer */
    int32_t stride;               /* FULL: positions that share a row; 0 means 1.  Other kinds have 0 or 1 */
    int32_t reserved[2];          /* 0 */
} kvc_policy;

typedef enum kvc_rope_kind {
    KVC_ROPE_UNKNOWN = 0,     /* unknown: a call that needs to rotate keys fails with KVC_ERR_UNSUPPORTED */
    KVC_ROPE_NONE = 1,        /* keys carry no rotation: tokens move without touching them */
    KVC_ROPE_FREQUENCIES = 2, /* keys were rotated by position * inv_freq */
    KVC_ROPE_FUNCTION = 3     /* the caller moves keys */
} kvc_rope_kind;

/* Moves keys [num_kv_heads][num_rows][k_dim], in place, to positions that are larger by delta.  Returns 0 for success;
 * anything else makes the edit fail with KVC_ERR_CALLBACK, and changes nothing.  It is called without the cache's
 * mutex, from the thread that edits, and must not edit this sequence. */
typedef int32_t kvc_shift_fn(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                             int32_t k_dim, int32_t delta);

/* How keys carry their position (Su et al. 2021, "RoFormer").  With n = num_freqs, elements first_dim + i and
 * first_dim + n + i are a pair, or, interleaved, first_dim + 2 i and first_dim + 2 i + 1; pair i is rotated by
 * position * inv_freq[i].  When tokens move, their stored keys stay as they are; queries are rotated back by the
 * same angle instead. */
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
 * large (Ashkboos et al. 2024, "QuaRot").  Callers pass rows, and get them, untransformed: kvc_put transforms them, and
 * calls that decode them transform them back.  Raw rows, and the rows behind kvc_spans and kvc_slots, are as stored. */
typedef enum kvc_transform {
    KVC_TRANSFORM_NONE = 0,
    KVC_TRANSFORM_HADAMARD = 1 /* blocks of n elements are multiplied by the Hadamard matrix over sqrt(n), which is its
                                  own inverse.  For keys, and values in keys, n is the largest power of two that divides
                                  k_dim, at most 1024.  For values it is the largest that divides v_dim, at most 64.
                                  llama.cpp does the same if 64 divides the dimensions.  Rows of f32, f16 and bf16 have
                                  no scale, and are stored as given.  Rows of KVC_INT6 and KVC_INT4 always have the
                                  transform of their type */
} kvc_transform;

/* A layer with v_dim 0 holds keys alone, such as the index keys of a model with sparse attention: one key for each
 * token and head, and no values.  Give it the policy of the layer that it belongs to.  Both layers are then in one
 * group and share slots, so every edit, fork, prefix and saved state carries the rows of both.  Its keys have a type, a
 * transform and a rope of their own.  v is NULL wherever its rows go in or out.  Nothing attends in it: kvc_attend,
 * kvc_plan_run and the kvc_dense calls fail with KVC_ERR_UNSUPPORTED.  A plan for it is for choosing rows
 * (kvc_plan_choose). */
typedef struct kvc_layer {
    int32_t num_kv_heads;
    int32_t k_dim;  /* elements of one key of one head */
    int32_t v_dim;  /* elements of one value of one head.  0: the layer holds keys alone; v_type and v_transform are
                       ignored, and value_in_key is 0 */
    int32_t k_type; /* kvc_type that keys are stored as */
    int32_t v_type;
    int32_t k_transform; /* kvc_transform */
    int32_t v_transform;
    int32_t value_in_key; /* not 0: values are the first v_dim elements of the keys, and stored once (MLA).  v_type and
                             v_transform must equal k_type and k_transform, and the transform's blocks must divide
                             v_dim.  RoPE must leave these elements alone, and kvc_attend needs a scale */
    int32_t share;        /* 0: the layer has rows of its own.  n: it reads the rows of layer n - 1, and none are put in
                             it.  Layer n - 1 has rows of its own, and the same shapes, types, policy and rope */
    kvc_policy policy;
    kvc_rope rope;
    int32_t sketch_bits;  /* 2: a sketch of each key is kept beside it, k_dim / 4 + 2 bytes, by which a token can select
                             rows (select_rows).  k_dim must be a multiple of 32 and at most 1024, the layer stores
                             values apart from its keys, and its window or chunk, if it has one, is at least 8192
                             positions.  Sketches follow from the stored keys, and are in no store and no saved state,
                             which says nothing of sketch_bits, either.  0: the layer has no sketches */
} kvc_layer;

/* Returns whether a long call is to end: not 0 ends it with KVC_ERR_CANCELLED.  kvc_put, kvc_attend, kvc_choose and
 * kvc_weights call this about every 40 ms, and kvc_begin_with while it waits; short calls never do.  It runs on the
 * calling thread, without the cache's mutex.  It may call into the library, but must not end the batch in question, nor
 * return in the child of a fork(), except to kvc_begin_with.  During kvc_weights, kvc_compact and
 * kvc_cache_free fail with KVC_ERR_HELD where the poll calls them. */
typedef int32_t kvc_poll_fn(void *user);

typedef struct kvc_config {
    size_t struct_size; /* sizeof(kvc_config) */
    const kvc_layer *layers;
    size_t layer_size; /* sizeof(kvc_layer) */
    int32_t num_layers;
    int32_t block_size;    /* slots in a block.  0 means 64, with one exception: max_sequences is 1, max_seq_len is
                              given, max_bytes is not, and every layer sees everything.  Then one block holds
                              max_seq_len slots, or at most 2048 if all rows are quantised */
    int64_t max_seq_len;   /* rows one sequence may hold in one layer between batches; 0: no limit.  During a batch, a
                              layer may hold more if it keeps at most so many afterwards.  A layer with a window keeps
                              `window` (or `resume_window`, if given) and the sink tokens.  A layer with chunks keeps
                              one chunk and `resume_window` */
    int64_t max_sequences; /* sequences that hold rows, in any layer, once a batch has begun; 0: no limit */
    int64_t capacity;      /* live slots of one layer group, the open batch's included; a shared slot counts once.
                              0: max_seq_len * max_sequences, or no limit if either has none.  Tokens of the open batch
                              beyond max_seq_len, which do not stay, do not count towards this default */
    int64_t max_bytes;     /* limit of the memory for rows, recurrent states and prompts; 0: no limit.  A block counts
                              whole (kvc_block_info.bytes) while it has a row or a hold keeps it.  Each token that an
                              acquired sequence is to be fed counts 8 bytes, or 40 with digests.  Pins and events count
                              by their bytes.  The empty cache counts, too (kvc_nbytes), and one block of each layer
                              group must fit beside it.  Of lists, the part in kvc_block_info.bytes counts */
    int32_t num_threads;   /* threads one call uses; 0: kvc_num_threads() at the time of the call */
    const struct kvc_allocator *allocator; /* copied (kvcache_more.h); NULL: the C library, and the operating system's
                                              pages for blocks */
    kvc_poll_fn *poll;              /* may be NULL: calls run to their end */
    void *poll_user;
} kvc_config;

typedef struct kvc_cache kvc_cache;
typedef struct kvc_batch kvc_batch;
typedef struct kvc_hold kvc_hold;

/* ---- a cache ----------------------------------------------------------------------------------------------------- */

/* Sets *cache to a new, empty cache, to be freed with kvc_cache_free.  Rows take no memory before they are needed.
 * Fails with KVC_ERR_INVALID (the message names the field and what it may be), KVC_ERR_UNSUPPORTED and
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_cache_new(const kvc_config *config, kvc_cache **cache);

/* Frees the cache and its prefixes; ignores NULL.  Waits for calls that copy rows out.  Fails with KVC_ERR_BUSY while a
 * batch is open, keys are rewritten or a call waits in kvc_begin_with.  Fails with KVC_ERR_HELD while there is a
 * kvc_hold, or kvc_save or kvc_restore runs. */
KVC_API kvc_status kvc_cache_free(kvc_cache *cache);

/* ---- a forward pass ---------------------------------------------------------------------------------------------- */

/* The most tokens of a batch.  For each token, a batch takes some 80 bytes, 100 in each layer group and 1 or 2 in each
 * layer.  The cache keeps this memory for later batches, until kvc_compact.  In each layer group, the token's sequence
 * keeps up to 12 bytes for it, or 48 if its position does not follow on the last one. */
#define KVC_MAX_BATCH (1 << 24)

/* Opens a batch: makes room in every layer for num_tokens tokens, 1 to KVC_MAX_BATCH, and sets *batch.  A cache has one
 * open batch at a time.  Token i stands at positions[i] of the sequence seq_ids[i].  seq_ids NULL: all tokens are of
 * sequence 0.  positions NULL: the tokens of a sequence follow the tokens that it has, from kvc_next_position on.
 * Positions may repeat, leave gaps and come in any order: nothing is overwritten.
 * parents[i] is the index of an earlier token of the same sequence, or -1.  It makes trees of speculated tokens, which
 * are verified together: of the batch, a token sees only itself and its ancestors, as far as the layer's policy shows
 * their positions.  parents NULL: no trees.
 * End the batch with kvc_commit or kvc_abort.
 * The call expires rows that no later query can see and no policy keeps.  It assumes that later queries of a sequence
 * stand at or after its smallest position in this batch.  Of a sequence without tokens in this batch, rows stay that a
 * query at its last token's position would see.  While the batch is open, layers with a window or chunks hold its
 * tokens beside the rows that they keep.
 * Fails with KVC_ERR_FULL if max_seq_len, max_sequences, capacity or max_bytes would be exceeded, with KVC_ERR_GONE if
 * a token would see rows that have expired, with KVC_ERR_BUSY and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_begin(kvc_cache *cache, int32_t num_tokens, const int32_t *positions, const int64_t *seq_ids,
                             const int32_t *parents, kvc_batch **batch);

typedef struct kvc_begin_args {
    size_t struct_size;
    int32_t num_tokens;
    const int32_t *positions; /* [num_tokens] as in kvc_begin; NULL: from kvc_next_position on */
    const int64_t *seq_ids;   /* [num_tokens] NULL: all of sequence 0 */
    const int32_t *parents;   /* [num_tokens] NULL: no trees */
    const uint8_t *unstored;  /* [num_tokens] not 0: the token's sequence is not stored, and is empty once the batch
                                 is committed.  The same for all tokens of a sequence.  NULL: all sequences are
                                 stored */
    int64_t timeout_ms;       /* milliseconds to wait while another batch is open or keys are rewritten.  0: not at all.
                                 -1: without end */
    const uint8_t *replaced;  /* [num_layers] not 0: the batch restores the layer.  NULL: an ordinary batch */
} kvc_begin_args;

/* Does what kvc_begin does, with its errors, and can wait for the open batch.  kvcache_more.h has the other kinds of
 * batches (unstored, replaced).  Fails with KVC_ERR_INVALID also if replaced, positions, parents or unstored are not as
 * said there.
 * Calls that wait are served in order of arrival, and find the sequences as they are at that time.  While others wait,
 * a call that does not wait fails with KVC_ERR_BUSY.  Any thread may end the batch.  The thread that is to end it must
 * not wait itself.  The call fails with KVC_ERR_BUSY once timeout_ms have passed, and with KVC_ERR_CANCELLED if the
 * cache's poll says so.  A call keeps its place while its poll runs, so that a poll that takes long delays the calls
 * behind it.  Batches that the poll itself begins come before them. */
KVC_API kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **batch);

/* Returns the positions of the batch's tokens, [num_tokens]; valid until the batch ends. */
KVC_API const int32_t *kvc_batch_positions(const kvc_batch *batch);

typedef struct kvc_put_args {
    size_t struct_size;
    int32_t first;      /* tokens [first, first + num_tokens) of the batch */
    int32_t num_tokens; /* 0: all from first on */
    const void *k;      /* [num_tokens][num_kv_heads][k_dim].  A layer with a stride takes only the rows of tokens that
                           have one */
    const void *v;
    int64_t k_token_stride, k_head_stride; /* for [head][token][dim]: a row, and the rows of all tokens (Strides) */
    int64_t v_token_stride, v_head_stride;
    int32_t k_type; /* the type of k: KVC_F32, KVC_F16 or KVC_BF16, or the layer's k_type.  Quantised rows are raw, as
                       kvc_gather copies them.  They are stored byte for byte, need no alignment, and are not checked: a
                       scale may be infinite or NaN */
    int32_t v_type; /* the same for v */
    /* 0: tokens lie a token stride apart.  n: the batch has n tokens of each sequence, in lock step, as in
     * [sequences][n][num_kv_heads][k_dim].  Sequences lie a batch stride apart, and tokens of a sequence a token
     * stride.  In a layer with a stride, the default of a batch stride has room for the sequence with the most rows. */
    int32_t tokens_per_sequence;
    int64_t k_batch_stride, v_batch_stride;
    int64_t seq_id; /* KVC_CROSS: the rows are of this sequence, which has tokens in the batch */
} kvc_put_args;

/* Stores keys and values of tokens in one layer.  v is NULL if values lie in the keys, and if the layer holds keys
 * alone.  Several threads may put disjoint ranges of tokens at once.
 * In a KVC_CROSS layer, first is 0, and the rows (num_tokens, at least 1) replace all rows that the sequence has there.
 * This batch sees the new rows at once; other calls see them once it is committed.
 * Fails with KVC_ERR_INVALID if a token was put before, and if the layer has no rows of its own.  Fails with
 * KVC_ERR_INDEX if the batch has no such tokens, and with KVC_ERR_CANCELLED (poll).  After an error, nothing was put.
 * Rows of KVC_CROSS layers may take new memory: the call then also fails with KVC_ERR_FULL (max_len or max_bytes) and
 * KVC_ERR_NOMEM.  These rows may exceed max_bytes until they were put.  Then kept blocks are evicted. */
KVC_API kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *args);

/* Rows that tokens attend to, for models that choose rows.  A token sees a row if the row is listed, and if the token
 * would see it without the list.  Other entries, such as -1, count for nothing.  Order and repeats do not matter.  If a
 * position has several rows (kvc_divide), it names all of them.  In a layer with a stride, a position names the row
 * that stands for it.  A tail adds nothing if the block is 1.
 * Lists are fastest if their entries ascend, and negative entries follow at the end.  Each task of the token copies and
 * sorts any other list.  One thread sorts 2048 entries in about 10 microseconds.
 * If a model attends to all rows, rows computed over chosen ones do not follow from its tokens: see kvc_mark_inexact.
 */
typedef struct kvc_chosen {
    size_t struct_size;
    const int32_t *positions; /* [num_tokens][num_choices][width] */
    int64_t token_stride, choice_stride;
    int64_t batch_stride; /* used with tokens_per_sequence of kvc_attend_args */
    int32_t num_choices;  /* 1: all heads see the same rows.  num_kv_heads: each KV head has a choice of its own */
    int32_t width;        /* entries of a choice, at least 1 */
    int32_t block;        /* 0 or 1: entries are positions.  n: entry b names the positions [b * n, (b + 1) * n) */
    int32_t tail;         /* not 0: a token at position p also sees its incomplete block: positions from
                             (p + 1) / n * n on */
} kvc_chosen;

typedef struct kvc_attend_args {
    size_t struct_size;
    const void *q;      /* [num_tokens][num_heads][k_dim] */
    void *out;          /* [num_tokens][num_heads][v_dim], of q's type, or f32 (out_is_f32) */
    float *lse;         /* [num_tokens][num_heads] log-sum-exp of the scores (natural, sinks included); may be NULL */
    const float *sinks; /* [num_heads] a logit that joins the softmax and has no value; may be NULL */
    const float *alibi; /* [num_heads] slopes: -slope * |query position - key position| is added; may be NULL */
    const volatile int32_t *cancel; /* may be NULL.  Once it is not 0, tasks end early, or do not begin */
    int64_t q_token_stride, q_head_stride;
    int64_t out_token_stride, out_head_stride;
    int64_t lse_token_stride, lse_head_stride;
    int32_t q_type; /* KVC_F32, KVC_F16 or KVC_BF16 */
    float scale;    /* 0: 1 / sqrt(k_dim).  Must be given if values lie in the keys */
    float softcap;  /* 0: none.  Otherwise scores become softcap * tanh(score / softcap) before alibi */
    const kvc_put_args *put; /* may be NULL; rows to store first, as by kvc_put.  For kvc_attend only */
    int32_t tokens_per_sequence; /* of q, out and lse, as in kvc_put_args */
    int64_t q_batch_stride, out_batch_stride, lse_batch_stride;
    const kvc_chosen *chosen; /* NULL: a token sees all rows that it may see */
    const void *prior_out;    /* [num_tokens][num_heads][v_dim] of out's type, with the strides of out: what attention
                                 to other rows, such as another layer's, gave these queries.  These rows join the
                                 softmax.  NULL: none.  May be `out`, if no task is run twice, nor the call made again
                                 after an error */
    const float *prior_lse;   /* [num_tokens][num_heads] with the strides of lse: the log-sum-exp of that attention.
                                 May be `lse`, as prior_out may be `out` */
    int32_t out_is_f32;       /* not 0: out and prior_out are KVC_F32, whatever q's type is.  Results that are joined
                                 are then rounded once, by the caller.  0: they are of q's type */
} kvc_attend_args;

/* Rows that no query of a call sees, such as padding: those at positions [begin, end) of a sequence of the batch,
 * stored or put in this batch.  Results have the bits of a cache in which these rows were never put.  Attention does
 * not read them: they may hold anything, and tokens of the batch among them need not have been put. */
typedef struct kvc_masked {
    int64_t seq_id;
    int32_t begin, end; /* end may exceed all positions, up to KVC_END */
} kvc_masked;

/* How an attention multiplies the rows of prompts. */
typedef enum kvc_precision {
    KVC_PRECISION_STORED = 0, /* as precisely as the rows are stored */
    KVC_PRECISION_INT8 = 1    /* in bytes */
} kvc_precision;

typedef struct kvc_plan_args {
    size_t struct_size;
    int32_t layer;      /* any layer of the group, with the shapes that count */
    int32_t first;      /* query tokens [first, first + num_tokens) of the batch */
    int32_t num_tokens; /* 0: all from first on */
    int32_t num_heads;  /* query heads: a multiple of num_kv_heads */
    int32_t num_threads; /* tasks that may run at the same time, at most 4096; a further task waits.  0: the cache's
                            threads */
    const uint8_t *non_causal; /* [num_tokens] not 0: the token also sees all later positions of its sequence, however
                                  far away: windows and chunks hide earlier positions alone.  In a batch with parents,
                                  it still sees only its ancestors of the batch's tokens.  NULL: no token sees later
                                  positions.  Copied */
    const kvc_masked *masked;  /* [num_masked] in any order; ranges may overlap.  Copied */
    size_t masked_size;        /* sizeof(kvc_masked) */
    int32_t num_masked;        /* 0: nothing is masked */
    int32_t max_chosen;        /* the most positions that kvc_chosen may name, later tokens of a tail aside: width *
                                  block, and with a tail block - 1 more, at most INT32_MAX.  The plan is made before
                                  they are known.  Its memory depends on the rows that the tokens see, too.  0: the
                                  plan is not for chosen rows, but kvc_attend finds the number itself */
    int32_t num_choices;       /* of kvc_choose_args, for a layer that holds keys alone.  0: 1 */
    int32_t select_rows;       /* a token of a long sequence reads about this number of rows for each KV head: the rows
                                  that matter most by their sketches (kvc_attend).  The layer has sketches.  0: all rows
                                  are read */
    int32_t chosen_width;      /* the most entries of a choice: the width of kvc_chosen.  The plan takes 8 bytes of
                                  memory for each entry and thread.  0: max_chosen, or kvc_attend finds it itself */
    int32_t precision;         /* kvc_precision: how long prompts are attended to */
} kvc_plan_args;

/* Attends: out[t, h] = sum over visible rows j of softmax(scale * q[t, h] . k[j]) * v[j], for the query tokens of the
 * plan, in the layer plan->layer, with all threads of the cache.  A token sees the rows of its sequence at positions up
 * to its own, if the policy shows them and the plan does not mask them.  These are stored rows, and rows of the batch,
 * which must have been put in this layer.  If a token sees no row, out is 0, and lse is -inf; if sinks are given, lse
 * is the head's sink.
 *
 * Errors.  Fails with KVC_ERR_INVALID also if a visible token was not put, chosen or not, or a sequence has no rows in
 * a cross-attention layer.  A token between two positions that query tokens of its sequence see must be put, too.
 * Fails with KVC_ERR_UNSUPPORTED if the layer holds keys alone, with KVC_ERR_FULL as kvc_put does, with KVC_ERR_NOMEM,
 * and with KVC_ERR_CANCELLED (cancel, or the cache's poll).  After an error nothing was put, and the call can be made
 * again.  In a cross-attention layer, rows may have been put after KVC_ERR_NOMEM and KVC_ERR_CANCELLED; putting them
 * again does no harm.  After KVC_ERR_CANCELLED, the contents of out and lse are undefined.
 *
 * Several layers in one softmax.  Attend to one layer, and pass out and lse as prior_out and prior_lse to the call for
 * the next.  Pass sinks to a single call.  If queries have 16 bits, let the calls write f32 (out_is_f32): a result that
 * is rounded before it is joined adds to the error.
 *
 * Selected rows (plan->select_rows).  A token reads only a part of the rows that it sees.  The rows are cut into pieces
 * of 4, by position.  For each KV head the token reads the pieces with its first 16 and its last 64 rows.  Sketches
 * give each row that it sees a score for each query head, and so, by the softmax, a weight.  The weight of a piece is
 * the sum over its rows and the query heads.  The token also reads the heaviest select_rows / 4 of the other pieces,
 * rounded up.  If pieces weigh the same, it reads the first of them.  Softcap and ALiBi apply to these scores.  A
 * sequence reads all rows if it has more than 8 query tokens in the call.  A token also reads all if it sees at most
 * 80 + 2 * select_rows rows.  Masked rows do not count.  The rows of a token that selected some do not follow from the
 * tokens alone, so kvc_exact_to ends before it.
 *
 * Prompts in bytes (plan->precision).  Queries, keys, weights and values of a sequence are rounded to 8 bits and
 * multiplied as integers where that is faster.  The positions of its tokens in the call, the rows that the middle one
 * sees, and heads decide it, on all processors.  So do the types of all layers that the plan serves.  With heads of
 * 128, 4 query heads for each of 8 KV heads, bytes begin at 460 tokens over KVC_INT8, KVC_INT6 and KVC_INT4, and at
 * 1,025 over others, behind 8,000 rows at 13 and 65.  These three are multiplied as stored.  Other keys are mixed by a
 * Hadamard matrix first, as are their queries.  Exact are up to 8 tokens, chosen and selected rows, heads whose k_dim
 * or v_dim is no multiple of 32 or k_dim exceeds 65536, and all on some processors (docs/platforms.md).  Rows behind
 * such a prompt differ from exact ones: give them a fingerprint of their own (kvc_prefix_config).
 *
 * A result in bytes is usually off by 1 to 2 % of its size, about as much as rows of KVC_INT8 are.  It is off by up to
 * a tenth if a channel of keys or queries is 30 times as large as the others.  With rows of KVC_INT8 that no transform
 * mixes, it is off by a quarter if a channel of the queries is 100 times as large.  Values are not mixed: a channel of
 * values that is 30 times as large puts the others off by 9 to 25 %.  If scores deviate by 8, not by 1, a token's
 * result is off by up to 16 %, and its lse by 0.28 (docs/choosing.md).  A NaN or an infinity in a value makes all
 * elements of a result NaN.  A row's values count as 0 if its weight, times its largest value, is below 1/510 of the
 * largest product among 128 rows.  A single row that outweighs each of the others so takes up to a quarter of the
 * result.  Values below 1e-16 count as 0, and a row of zeros does not count beside values above 1e20.  Keys above 1e35
 * give NaN.
 *
 * Bits.  The bits of a token's result depend on the rows that it sees, on which tokens of its sequence are in the call,
 * and on how many rows these see.  They do not depend on threads, on where rows lie, or on other sequences of the
 * batch.  If rows are chosen, the bits depend on the rows that the token sees alone.  Instruction sets select the same
 * rows, unless two pieces weigh nearly the same.
 *
 * Infinities and NaN in rows reach only the tokens that see them.  Prompts with infinities or NaN take longer.  Results
 * for infinities, NaN and denormals may differ between instruction sets; docs/platforms.md lists how.  Sums are kept in
 * f32, and values are summed before they are divided by the sum of their weights.  So out may be infinite if a value
 * times the number of visible rows exceeds 3.4e38. */
KVC_API kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *plan, const kvc_attend_args *args);

/* Ends the batch and frees it: its tokens become part of their sequences, if these are stored.
 * A layer with a window or chunks expires rows.  It keeps the rows that a query at the position of the sequence's last
 * token would see, or as many positions as resume_window says.  Such a layer also uses at most two spare blocks for
 * each sequence, or three with sink tokens.  Sequences that share blocks may use more, and so may sequences that lost
 * tokens to edits or to kvc_commit_kept.  For the next batch, the cache keeps at most as many free blocks as this batch
 * took.  Other free blocks go back to the system.
 * Fails with KVC_ERR_INVALID if a token was not put in some layer; the batch is still open then.  Once every token was
 * put, this cannot fail, because kvc_begin has taken all memory that it needs.  If the system refuses the work on OS
 * pages at the end, that work is left out. */
KVC_API kvc_status kvc_commit(kvc_batch *batch);

/* Does what kvc_commit does with num_kept of the tokens only, such as the accepted tokens of a speculation.  `kept` has
 * their indices in the batch, in any order.  The other tokens need not have been put.  The rows of a sequence in a
 * cross-attention layer are kept if one of the sequence's tokens is kept.  Fails with KVC_ERR_INDEX for an index
 * that the batch does not have, and with KVC_ERR_INVALID for an index given twice.  Once the kept tokens were put,
 * it cannot fail otherwise. */
KVC_API kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept);

/* Ends the batch and frees it, as if its tokens had never been, and gives back the memory that it took for rows and
 * bookkeeping.  Rows that kvc_begin expired or evicted to make room stay so; their blocks wait for the next kvc_commit.
 * Ignores NULL. */
KVC_API void kvc_abort(kvc_batch *batch);

/* ---- choosing rows ----------------------------------------------------------------------------------------------- */

typedef struct kvc_choose_args {
    size_t struct_size;
    const void *q;        /* [num_tokens][num_heads][k_dim] */
    const float *weights; /* [num_tokens][num_heads]; NULL: all 1 */
    const int32_t *among; /* [num_tokens][num_choices][among_width] in any order: only these rows, or blocks, may be
                             chosen; entries below 0 count for nothing.  NULL: all that the token sees */
    int32_t *chosen;      /* out: [num_tokens][num_choices][width] ascending, then -1 */
    float *scores;        /* out: [num_tokens][num_choices][width] of what is chosen, -inf beside -1; may be NULL */
    const volatile int32_t *cancel; /* as in kvc_attend_args */
    int64_t q_token_stride, q_head_stride, weights_token_stride, weights_head_stride;
    int64_t among_token_stride, among_choice_stride, chosen_token_stride, chosen_choice_stride;
    int64_t scores_token_stride, scores_choice_stride;
    int32_t q_type;      /* KVC_F32, KVC_F16 or KVC_BF16 */
    float scale;         /* 0: 1 / sqrt(k_dim) */
    int32_t relu;        /* not 0: negative products count 0 */
    int32_t num_choices; /* 1: all heads choose together.  n divides num_heads: the first num_heads / n heads choose
                            together, then the next ones, and so on.  It is a multiple or a divisor of num_kv_heads.
                            0: 1 */
    int32_t width, among_width;
    int32_t block;       /* 0 or 1: rows are chosen, by their positions.  n: blocks of n positions are chosen; entry b
                            stands for the positions [b n, (b + 1) n).  In a layer with a stride, n is a multiple */
    int32_t num_first;   /* rows, or blocks, from position 0 on that are chosen before others, ... */
    int32_t num_local;   /* ... and as many up to the token's own, or the last that it sees in a layer with a stride */
    int32_t tokens_per_sequence; /* of all these arrays, as in kvc_put_args */
    int64_t q_batch_stride, weights_batch_stride, among_batch_stride, chosen_batch_stride, scores_batch_stride;
} kvc_choose_args;

/* Chooses rows for each query token of the plan: the `width` rows with the largest scores, or all if a token sees no
 * more.  The keys of plan->layer, which holds keys alone, give the scores.  Another layer attends to the rows
 * (kvc_chosen).
 *     score[t, c, j] = sum over the heads h of choice c of weights[t, h] * f(scale * q[t, h] . k[j, KV head of h])
 * f is the identity or, with relu, max(0, .).  A token sees the same rows as in kvc_attend; they must have been put.
 * A larger score is chosen first.  NaN counts as the largest, and -0 as 0.  Of equal scores, the lower position is
 * chosen first.  The score of a block is the score of its best visible row; so is the score of a position with several
 * rows.  num_first and num_local only move rows forward.  Rows that the token does not see are not chosen, and rows
 * outside `among` are not either.  If there are more first and local rows than `width`, their scores decide.
 * The choice is exact.  Its bits depend on the rows that the token sees alone: not on threads, on where rows lie, or on
 * other tokens of the batch.  Keys of KVC_INT8, KVC_INT6 and KVC_INT4 are multiplied as integers, by queries that are
 * rounded to 8 bits, with a scale for each head.  These scores are the same on every instruction set.  Keys of more
 * than 65536 elements are multiplied as floats.
 * Fails as kvc_attend does, and with KVC_ERR_UNSUPPORTED if the layer holds values.  After an error, the contents of
 * chosen and scores are undefined. */
KVC_API kvc_status kvc_choose(kvc_batch *batch, const kvc_plan_args *plan, const kvc_choose_args *args);

/* ---- looking at sequences ---------------------------------------------------------------------------------------- */

/* Returns a new id, which names no sequence.  Ids count up from 0.  Neither this call nor kvc_prefix_acquire has
 * returned it before.  Calls that read or add blocks take new ids for sequences of their own. */
KVC_API int64_t kvc_new_sequence(kvc_cache *cache);

/* Returns the number of rows of a sequence in a layer.  layer -1: the number of its tokens, in the layer without a
 * stride that keeps most.  Returns -1 if there is no such layer. */
KVC_API int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer);

/* Sets *first and *last to the smallest and the largest stored position of a sequence in a layer; both to -1 if it
 * holds nothing there.  layer -1: the positions of its tokens in any layer.  Takes the same time however many rows
 * there are.  Fails with KVC_ERR_INDEX. */
KVC_API kvc_status kvc_position_range(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *first, int32_t *last);

/* Returns the position of a sequence's next token: one more than the largest that is stored or has expired.  Returns 0
 * if nothing was stored.  Expired positions are one range, here and in every other function: positions between them
 * that no token ever had count as expired, too. */
KVC_API int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id);

/* Returns whether a sequence can go on at `position`: 1 if the position is at most kvc_next_position, and no row that a
 * query there or later would see has expired; otherwise 0.  A row that a batch left out when it restored other layers
 * counts as expired.  If all layers are KVC_CROSS or KVC_NONE, the cache holds no tokens: returns 1 unless the position
 * is negative. */
KVC_API int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position);

/* Returns the position from which on a sequence's rows may not be exact; INT32_MAX if all are exact.  A row is exact if
 * it was computed at its position, behind exactly the tokens before it.  Another sequence that begins with the same
 * tokens may share it.  A row is inexact in these cases, and so is any row behind it.  It was
 * - at or behind the first position of a range that kvc_remove, kvc_shift or kvc_divide changed, as the range was
 *   before the call, or is after it;
 * - behind a row that kvc_keep_positions dropped;
 * - replaced by kvc_inject, or by a batch that restores layers;
 * - added by kvc_share behind tokens that may differ from src's.  Tokens cannot differ if the last row of dst is also a
 *   row of src, and exact in both;
 * - stored at a position that was not the next one;
 * - computed while it saw tokens that kvc_commit_kept did not keep;
 * - computed by a token that selected rows (kvc_plan_args.select_rows);
 * - marked by kvc_mark_inexact.
 * An inexact row is inexact in forks, shares, clones and saved states, too.  Once no inexact row is left, as after
 * kvc_truncate at the returned position, all rows are exact.  But a mark of kvc_mark_inexact behind the last row counts
 * for rows to come, and stays.  While a batch is open, its tokens count as if all were kept. */
KVC_API int32_t kvc_exact_to(kvc_cache *cache, int64_t seq_id);

/* Writes the ids of the sequences that hold rows of tokens, ascending: at most max_ids, and none if seq_ids is NULL.
 * Returns how many there are. */
KVC_API int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids);

/* Writes the positions of a sequence's rows in a layer, in order of arrival: at most max_positions, and none if
 * positions is NULL.  Returns how many rows there are, or -1 if there is no such layer. */
KVC_API int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions,
                              int64_t max_positions);

/* ---- editing sequences ------------------------------------------------------------------------------------------- */

/* An edit fails with KVC_ERR_BUSY if it would change, or share rows of, a sequence of the open batch, or a sequence
 * whose keys another call rewrites.  Two calls take such a sequence: kvc_keep, to keep it, and kvc_mark_inexact. */

#define KVC_END INT32_MAX /* the end of a range of positions: behind the last one */

/* Forgets every sequence, and the blocks that prefixes have kept by then.  The blocks are forgotten a few at a time, so
 * that other calls go on.  Pins stay, as in kvc_prefix_forget.  Memory is kept for reuse. */
KVC_API kvc_status kvc_clear(kvc_cache *cache);

/* Forgets one sequence.  Memory is kept for reuse. */
KVC_API kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id);

/* Forgets every sequence except this one, and the blocks of prefixes, as kvc_clear does. */
KVC_API kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id);

/* Makes dst hold all rows of src, as kvc_copy_prefix does, with its errors. */
KVC_API kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst);

/* Makes dst hold the rows of src at positions below `length`, in place of its own.  No row is copied: both share slots,
 * and each appends to slots of its own.  Sharing takes no slots, so limits are checked when the next batch begins.
 * Fails with KVC_ERR_INVALID if src == dst, and if src is empty and length is above 0 (to empty dst, clear it).  Fails
 * with KVC_ERR_GONE as kvc_truncate of src does, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length);

/* Adds the rows of src at positions [begin, end) to dst, behind the rows that dst holds.  No row is copied, and limits
 * are checked later, as in kvc_copy_prefix.  In a cross-attention layer, all rows are added if dst has none.  Rows that
 * dst holds already, in the same slots at the same positions, are left out: sharing twice does no harm.
 * Positions in the range that have expired in src count as expired in dst, unless dst holds a row there.  For
 * kvc_exact_to, they count as added rows.  If dst had expired positions before, all positions between the two ranges
 * count as expired, too.  kvc_can_resume says where dst can go on; a batch that would see such positions fails with
 * KVC_ERR_GONE.
 * If dst is empty, [0, KVC_END) does what kvc_fork does, with its errors.  Otherwise, if src is empty, it does nothing.
 * Fails with KVC_ERR_INVALID if src == dst, and if a row of src stands at the position of another row of dst in some
 * layer; the message has the position.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_share(kvc_cache *cache, int64_t src, int64_t dst, int32_t begin, int32_t end);

/* Drops the rows at positions [begin, end).  With `shift`, later tokens move down by end - begin, as by kvc_shift, with
 * its errors.  Without `shift` they stay where they are.
 * In every edit, expired positions move with the tokens.  A batch fails with KVC_ERR_GONE if a token would see such a
 * position, in its window or among the sink tokens.
 * If this or any other edit leaves a sequence without tokens, so that it would go on at position 0, the sequence
 * ends as by kvc_clear_sequence.  Its rows in KVC_CROSS layers go, too.  A sequence that has only such rows ends if
 * positions from 0 on are dropped.  To keep these rows, first let another sequence hold them: kvc_copy_prefix with
 * length 0.  Fails with KVC_ERR_NOMEM.  If there are no later tokens, fails with KVC_ERR_GONE as kvc_truncate does. */
KVC_API kvc_status kvc_remove(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift);

/* Drops all rows of a sequence's tokens except those at num_positions positions, in all layers at once.  The positions
 * ascend, without repeats.  A position is ignored if it has no row, unless its row has expired.  The call takes
 * time for the sequence's rows and the list, however many gaps there are.  A policy that evicts tokens by their
 * importance needs this.
 * Kept rows keep their positions.  Attention has the bits of a cache that was given these rows alone at these
 * positions.  The slots between them are wasted until kvc_compact.  Each gap takes 24 bytes in each layer group.
 * If the last tokens are dropped, the sequence goes on behind the last position that counts, as after kvc_truncate
 * there.  Positions before it that have expired stay expired.  Rows in KVC_CROSS layers stay, unless the sequence ends
 * as in kvc_remove.  A list in which no position counts ends it.  Holds, and sequences that share the rows, keep them.
 * The first dropped row ends the exact rows (kvc_exact_to), if rows behind it stay.  So a prefix keeps no block and no
 * checkpoint from there on; what it kept before stays.  The caller's recurrent state, if the model has one, still
 * follows from all tokens.
 * Fails with KVC_ERR_INVALID also if a position is out of order.  Fails with KVC_ERR_NOMEM, and with KVC_ERR_GONE as
 * kvc_truncate behind the last position that counts does. */
KVC_API kvc_status kvc_keep_positions(kvc_cache *cache, int64_t seq_id, const int32_t *positions,
                                      int64_t num_positions);

/* Drops the rows at positions of at least `length`; the sequence then goes on at `length`, or behind its last token if
 * tokens before `length` were removed without `shift`.  If there are no such rows, it changes nothing.  Fails with
 * KVC_ERR_GONE if a token at `length` would see rows that have expired, and with KVC_ERR_NOMEM.
 * Position 0, and a position that kvc_can_resume confirms, are always possible.  If no layer has chunks, so is a
 * position within the sink tokens of every layer with a window.  There are two exceptions: a layer was restored
 * without its sink tokens (kvc_begin_with), or an edit moved expired positions there. */
KVC_API kvc_status kvc_truncate(kvc_cache *cache, int64_t seq_id, int32_t length);

/* Moves the tokens at positions [begin, end) by delta.  A token that would move below 0 is dropped.  No row is copied
 * or rotated, except in a layer with KVC_ROPE_FUNCTION: there, moved rows are rewritten in new slots.
 * Rewritten rows count twice for max_bytes during the call; it evicts kept blocks for that once the function has
 * succeeded.  `capacity` counts the slots that are live after the edit, which are more than before if sequences shared
 * rows.
 * Fails with KVC_ERR_UNSUPPORTED if a layer's rope is not known, with KVC_ERR_INVALID if a position would exceed the
 * largest, and with KVC_ERR_NOMEM.  If rows are rewritten, fails with KVC_ERR_FULL (capacity or max_bytes) and
 * KVC_ERR_CALLBACK, too. */
KVC_API kvc_status kvc_shift(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t delta);

/* Marks a sequence's rows from `position` on as not exact (kvc_exact_to), including rows that a batch adds later.  Use
 * it if a mask hid tokens from them, or showed them later ones: masked and non_causal of kvc_plan_args, and kvc_chosen,
 * mark no rows.  It may be called at any time, also while the sequence is in the open batch.  Call it before the
 * commit: blocks that a prefix has kept by now, at a commit or by kvc_prefix_checkpoint, stay and match others.  It
 * does nothing if the sequence is empty and not in the open batch.  Fails with KVC_ERR_INVALID. */
KVC_API kvc_status kvc_mark_inexact(kvc_cache *cache, int64_t seq_id, int32_t position);

/* ---- reading and replacing rows ---------------------------------------------------------------------------------- */

typedef struct kvc_span {
    const void *k; /* row of the first position, KV head 0; rows are k_row_stride apart, heads k_head_stride */
    const void *v; /* NULL, with strides of 0, in a layer of keys alone */
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t num_rows;
    int32_t position; /* of the first row; the others follow one by one, or a stride apart */
    int32_t delta;    /* position now, less the position the keys were rotated for; keys are as they were stored */
    int32_t reserved; /* 0 */
    /* The scales of types with one scale a row: an f16 for each row, adjacent, from the first position of KV head 0 on.
     * Heads are k_head_stride, or v_head_stride, apart.  NULL for other types. */
    const void *k_scales, *v_scales;
} kvc_span;

/* Lists the stored rows of a sequence in a layer as spans, in order of arrival, without a copy.  Writes at most
 * max_spans spans, of span_size bytes each, and sets *num_spans to how many there are.
 * If hold is not NULL, *hold keeps the rows as they are, whatever is edited, until kvc_hold_free.  *hold becomes NULL
 * if there are no rows, or not all spans were written.  Without a hold, pointers are valid until anything is edited or
 * loaded, memory is reserved, or a batch begins or ends.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                             int64_t max_spans, int64_t *num_spans, kvc_hold **hold);

/* Frees a hold; ignores NULL.  Free every hold before the cache. */
KVC_API void kvc_hold_free(kvc_hold *hold);

typedef struct kvc_rows_out {
    size_t struct_size;
    int32_t type;          /* KVC_F32, KVC_F16 or KVC_BF16: what rows are converted to, unless they are raw */
    void *k;               /* [rows][num_kv_heads][k_dim]; NULL: not wanted */
    void *v;               /* [rows][num_kv_heads][v_dim]; NULL: not wanted, and in a layer of keys alone */
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t *positions;  /* [rows] set to the position of each row; to -1 if kvc_extract found none.  May be NULL */
    int64_t *num_stored; /* set to the number of rows of the sequence in the layer; by kvc_dense, to the number that
                            kvc_dense_rows says.  It is also set if the call fails because it asks for another number.
                            Rows, positions and this number are of one moment.  May be NULL */
    int32_t raw; /* 0: rows are converted to `type`.  Not 0: rows have the layer's k_type and v_type, byte for byte, and
                    k and v need no alignment.  Keys that were moved by a delta are rotated, and encoded anew in the
                    copy */
    kvc_batch *batch; /* for kvc_gather and kvc_extract: the open batch, whose rows of the sequence count as well,
                         behind the stored rows, as in kvc_batch_spans and with its errors.  NULL: stored rows only */
} kvc_rows_out;

/* Copies rows [first_row, first_row + num_rows) of a sequence in a layer, counted in order of arrival.  Rows are
 * decoded or raw, and keys are rotated for their present position.  Fails with KVC_ERR_INDEX if the sequence has fewer
 * rows, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                              const kvc_rows_out *out);

/* Copies the rows at positions [begin, end), decoded or raw, and rotated as by kvc_gather.  Row i is the latest
 * row at position begin + i.  If no row is stored there, row i is bytes of 0.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                               const kvc_rows_out *out);

typedef struct kvc_rows_in {
    size_t struct_size;
    const void *k; /* [rows][num_kv_heads][k_dim] */
    const void *v; /* [rows][num_kv_heads][v_dim]; NULL if values lie in the keys, and in a layer of keys alone */
    int64_t k_head_stride, k_row_stride;
    int64_t v_head_stride, v_row_stride;
    int32_t k_type; /* as in kvc_put_args */
    int32_t v_type;
    int32_t skip_missing;  /* 0: every position must hold a row.  Not 0: positions without a row are skipped */
    int64_t *num_replaced; /* set to how many rows were replaced; may be NULL */
} kvc_rows_in;

/* Replaces the rows at positions [begin, end) of a sequence in one layer; the latest, if several stand at one position.
 * Pass keys rotated for these positions.  If the stored keys were moved by a delta, the new keys are rotated back by it
 * and encoded anew.  Other sequences and holds keep their rows.
 * Fails with KVC_ERR_INDEX if a position holds no row and skip_missing is 0; the message has the positions.  Fails with
 * KVC_ERR_INVALID if the layer has no rows of its own, with KVC_ERR_UNSUPPORTED for KVC_CROSS, and with KVC_ERR_BUSY.
 * If shared rows are copied first, fails with KVC_ERR_NOMEM and KVC_ERR_FULL (capacity or max_bytes), too. */
KVC_API kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                              const kvc_rows_in *in);

/* ---- room and memory --------------------------------------------------------------------------------------------- */

/* Sets *num_tokens to the most tokens of one sequence with which a batch can begin now, at consecutive positions from
 * kvc_next_position on.  One more is refused.  It is at most KVC_MAX_BATCH, and 0 if the next token would see rows that
 * are gone.  With windows or chunks, as many may fit again after the commit.  Fails with KVC_ERR_BUSY and
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens);

/* Takes memory now for num_tokens more tokens of a sequence, at least 1.  The next batches of as many tokens together,
 * at consecutive positions and without parents, then take none for rows or bookkeeping, and writing these rows faults
 * on no page.  The memory is in huge pages if the system has them.  None of this is promised if a prefix keeps blocks
 * of these tokens, or if they fit only in blocks of other sequences or once rows are moved together.
 * Free memory counts, and any sequence may use it.  For several sequences, round the tokens of each up to whole blocks,
 * and reserve the sum for one of them.  This needs a cache without max_seq_len.  The memory stays free until used,
 * kvc_compact gives it back, or other rows need it.  If a batch is aborted, its slots in a block that a hold keeps are
 * lost: reserve again.
 * Expires rows as kvc_begin would for the next token, so that kvc_truncate may not go back as far as before.
 * Makes room within the limits of kvc_begin, and fails as it does.  Nothing fails after the first page is touched. */
KVC_API kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens);

/* Moves rows together so that no block has holes, and gives back the memory of blocks without rows.  Fails with
 * KVC_ERR_BUSY, with KVC_ERR_HELD (pointers into the rows would go stale) and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_compact(kvc_cache *cache);

/* Returns the bytes of memory that the cache holds: bookkeeping, and rows that were written since their memory was
 * taken.  Large blocks count in whole OS pages.  KVC_MEMORY_SCRATCH does not count.
 * Lists may take it beyond max_bytes: at most 48 bytes for each run; 700, and 300 a layer group, for each sequence,
 * kept block, prefix and pin; 300 for each dropped block that a kept block follows; 8, or 40 with digests, for each
 * token of these blocks, and of the block in which the match of an acquired sequence ends.  In each layer group, tokens
 * of batches take the bytes that KVC_MAX_BATCH says.  A dropped block also counts while a pin or an acquired sequence
 * builds on it, because a prompt finds a block only by all tokens up to its end.  So lists may take more than max_bytes
 * if rows are small, and windows keep the end of long prompts alone.  Memory that a call replaces may come on top. */
KVC_API int64_t kvc_nbytes(kvc_cache *cache);

/* Returns the number of slots in a block: kvc_config.block_size, or its default. */
KVC_API int32_t kvc_block_size(kvc_cache *cache);

/* Returns the most live slots of a layer group: kvc_config.capacity, or its default; -1 if there is no limit. */
KVC_API int64_t kvc_capacity(kvc_cache *cache);

/* ---- version and threads ----------------------------------------------------------------------------------------- */

/* Returns the library's version: major * 1000000 + minor * 1000 + patch. */
KVC_API int32_t kvc_version(void);

/* Returns the number of threads that a call uses if the cache's configuration gives none.  It is the number given to
 * kvc_set_num_threads.  Otherwise, it is the least of
 * - the first number in OMP_NUM_THREADS, which is read once.  If it is not set: the number of physical cores that this
 *   process may use, within its affinity and cgroup quota, or of places (OMP_PLACES) that OpenMP binds threads to;
 * - with OpenMP's threads, omp_get_max_threads() of the runtime in use.  omp_set_num_threads, threadpoolctl and
 *   torch.set_num_threads change it for the calling thread.
 * It never exceeds OMP_THREAD_LIMIT.  It is 1 inside a parallel region of OpenMP that has several threads, and in a
 * child after fork() of a process with caches.
 *
 * All caches of the process share these threads.  The first call with enough work starts them.  While one call uses
 * them, other calls run on their calling threads alone. */
KVC_API int32_t kvc_num_threads(void);

/* Sets the number that kvc_num_threads returns, for the whole process: at most 4096; 0 undoes that.  Fails with
 * KVC_ERR_INVALID. */
KVC_API kvc_status kvc_set_num_threads(int32_t num_threads);

#ifdef __cplusplus
}
#endif

#include "kvcache_prefix.h"
#include "kvcache_more.h"

#endif
