/* kvcache_more.h: what fewer programs need of the KV cache.  kvcache.h includes it, and says what holds for all calls.
 *
 * Contents
 *   batches of other kinds    kvc_begin_with: sequences that are not stored, restoring layers
 *   a kernel of your own      kvc_slots, kvc_written: rows are written where they will lie
 *   threads of your own       kvc_plan_new, kvc_plan_run: the tasks of kvc_attend and kvc_choose
 *   an attention of your own  kvc_batch_spans, kvc_dense: the rows that a batch sees
 *   weights of rows           kvc_weights: how much queries attend to each row
 *   dividing positions        kvc_divide
 *   memory of your own        kvc_allocator: functions of the caller that allocate
 *   layouts of types          the bytes of a row, for each kvc_type
 *   saved states              kvc_save, kvc_load, kvc_restore, kvc_cache_clone
 *   inspection                kvc_get_stats, kvc_blocks, kvc_validate
 *   build and machine         kvc_build_info, kvc_isa, kvc_threading_layer
 */
#ifndef KVCACHE_MORE_H
#define KVCACHE_MORE_H

#include "kvcache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- batches of other kinds -------------------------------------------------------------------------------------- */

/* Sequences that are not stored (kvc_begin_args.unstored), for example to score a text.  The batch sees the rows that
 * such a sequence held before, and its own.  Until the batch ends, its tokens count for every limit, like the tokens of
 * any sequence: they take the rows of all layers.  The commit drops all rows of the sequence, and their blocks go back
 * to the system, reserved ones (kvc_reserve) as well.  In layers with a window or chunks, the spare blocks that
 * kvc_commit keeps may be of these.  Blocks that a hold keeps stay free for later batches once it ends.
 * A token of such a sequence need not have been put.  If the rows of a long text are too many, feed it in batches that
 * are stored, and clear the sequence. */

/* Restoring layers (kvc_begin_args.replaced): the batch puts back rows that were saved.  Once it is committed, its
 * tokens replace all rows of their sequences in the restored layers; other layers stay as they are.  A state whose
 * layers hold different positions takes several batches: one with all positions, for the layers that see everything,
 * and one with the last positions, for layers with a window.
 * Give positions, in any order; parents and unstored are NULL.  The tokens arrive by rising position.  Tokens of a
 * sequence at the same position, as kvc_divide leaves them, arrive in the order given.  Layers of one group are
 * restored together; flags of layers that share rows, or have no attention, are ignored.
 * Put every token in every restored layer, and in no other layer (KVC_ERR_INVALID).  kvc_put replaces the rows of a
 * restored KVC_CROSS layer; if it is not called, they stay.  Nothing attends in such a batch: kvc_attend, kvc_plan_new,
 * kvc_batch_spans and the kvc_dense calls fail with KVC_ERR_INVALID.  kvc_commit_kept leaves a sequence as it is if it
 * keeps none of its tokens.
 * The old rows take memory until the commit.  They do not count for max_seq_len.  They count for capacity only if an
 * edit copies rows meanwhile.
 * A position that one layer holds and another lacks is gone from the other layer, as if it had expired.  A batch that
 * would see it fails with KVC_ERR_GONE, until that layer is restored as well, or kvc_truncate drops the position.  In a
 * restored layer with a window or chunks, a position that was not given counts as expired if the query behind the last
 * row would not see it.
 * The window of an earlier moment can be restored into a sequence that has gone on, and kvc_truncate takes the
 * sequence back there.  Until layers agree again, the cache expires no row that a query would need from the first
 * position on that a layer lacks. */

/* ---- a kernel of your own ---------------------------------------------------------------------------------------- */

/* Sets *span to where a kernel of the caller writes rows, in place of kvc_put.  The span has the row of token `first`
 * of the batch, and the rows of the tokens after it that lie in consecutive slots.  Write through the span's pointers.
 * They are valid until the batch ends, or, if hold is not NULL, until *hold is freed.  position is the position of
 * `first`; the other tokens have the batch's positions.  `first` must have a row (kvc_policy.stride), and tokens
 * without one are passed over.  Do not call it while another thread puts or writes tokens of the same layer.  Fails
 * with KVC_ERR_INDEX and KVC_ERR_INVALID as kvc_put does, with KVC_ERR_UNSUPPORTED for KVC_CROSS, and with
 * KVC_ERR_NOMEM for a hold. */
KVC_API kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                             kvc_hold **hold);

/* Marks tokens [first, first + num_tokens) of the batch as put, after they were written where kvc_slots showed.  Fails
 * with KVC_ERR_INDEX and KVC_ERR_INVALID as kvc_put does, and with KVC_ERR_UNSUPPORTED for KVC_CROSS. */
KVC_API kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens);

/* ---- threads of your own ----------------------------------------------------------------------------------------- */

typedef struct kvc_plan kvc_plan;

/* Makes a plan, for runners with threads of their own.  A plan cuts the work of kvc_attend, or of kvc_choose, into
 * tasks, and takes all memory that they need.  It serves every layer of the group that has the same shapes, one layer
 * at a time.  The end of the batch frees it.  It may be made before rows are put; for a cross-attention layer, make it
 * after this batch's rows were put.  Fails with KVC_ERR_INDEX and KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_plan_new(kvc_batch *batch, const kvc_plan_args *args, kvc_plan **plan);

/* Returns the number of tasks of a plan. */
KVC_API int64_t kvc_plan_num_tasks(const kvc_plan *plan);

/* Runs one task of a layer, on any thread.  Run every task of [0, num_tasks) once, best in this order, because large
 * tasks come first.  All calls for one layer get the same args; args->put is NULL.  The task that ends last merges, in
 * a fixed order, so no barrier is needed.
 * If tasks failed, were cancelled or were left out, run these again, or all of them, in any order: results are right
 * once the last task has ended.  If all are run again, args may have changed.  You may also leave
 * them, and begin the next layer.
 * Fails with KVC_ERR_INDEX if there is no such task, and with KVC_ERR_BUSY while another thread runs the same task, or
 * tasks of another layer.  Fails with KVC_ERR_INVALID and KVC_ERR_CANCELLED (cancel) as kvc_attend does.
 * kvc_last_error() has the message on the thread that ran the task. */
KVC_API kvc_status kvc_plan_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, int64_t task);

/* Runs one task of kvc_choose, as kvc_plan_run does of kvc_attend, of a plan for a layer that holds keys alone.  The
 * task of a token that ends last chooses. */
KVC_API kvc_status kvc_plan_choose(kvc_plan *plan, int32_t layer, const kvc_choose_args *args, int64_t task);

/* Frees a plan before its batch ends, so that a later plan of the batch takes its memory; ignores NULL. */
KVC_API void kvc_plan_free(kvc_plan *plan);

/* ---- an attention of your own ------------------------------------------------------------------------------------ */

/* Lists the rows of one sequence of the batch in a layer as spans, as kvc_spans does.  The stored rows come first, then
 * the rows that were put in the batch, in the batch's order.  In a KVC_CROSS layer, rows of the batch replace the
 * stored rows.  Rows of the batch have delta 0; if they lie behind the stored rows, they continue the same span.  No
 * mask is applied: the policy, parents and positions say what a token sees.
 * A hold keeps the rows after the batch has ended, too, even if it was aborted.  Without a hold, pointers are valid
 * until the batch ends; in a KVC_CROSS layer, until rows are put there again.
 * Do not call this while another thread puts or writes tokens of the same layer.
 * Fails with KVC_ERR_INVALID if the batch has no token of the sequence, if it restores, or if the layer has no
 * attention.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_batch_spans(kvc_batch *batch, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                                   int64_t max_spans, int64_t *num_spans, kvc_hold **hold);

/* Sets *num_rows to the number of rows that the batch's tokens might see in a layer.  These are the stored rows of the
 * batch's sequences, and the rows that were put in the batch.  Sequences come by rising id, the rows of each by rising
 * position; rows at equal positions come in order of arrival. */
KVC_API kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows);

/* For by_sequence: sets *num_sequences to the number of sequences in the batch, and *most_rows to the largest number of
 * such rows of one sequence.  Fails with KVC_ERR_INVALID unless the batch's tokens come sequence after sequence, the
 * same number of each. */
KVC_API kvc_status kvc_dense_sequences(kvc_batch *batch, int32_t layer, int32_t *num_sequences, int64_t *most_rows);

typedef struct kvc_dense_args {
    size_t struct_size;
    const kvc_rows_out *rows;  /* where the rows go, decoded or raw, and rotated */
    float *mask;               /* [the batch's tokens][rows] 0 if the token sees the row, otherwise -inf; may be NULL */
    int64_t mask_token_stride;
    int64_t num_rows;          /* num_rows of kvc_dense_rows; with by_sequence, most_rows of kvc_dense_sequences */
    const uint8_t *non_causal; /* [the batch's tokens], as in kvc_plan_args */
    uint8_t *seen;             /* [the batch's tokens][rows] 1 if the token sees the row, otherwise 0; may be NULL */
    int64_t seen_token_stride;
    int32_t by_sequence; /* 0: rows of all sequences, one after the other.  Not 0: each sequence has num_rows rows, a
                            batch stride apart, in the order in which the batch names the sequences.  Missing rows are
                            zeros at position -1, which no token sees.  Masks are over the rows of the token's
                            sequence */
    int64_t k_batch_stride, v_batch_stride;
    const kvc_masked *masked; /* [num_masked] rows that the masks hide from all tokens, as in kvc_plan_args; they are
                                 copied, too */
    size_t masked_size;       /* sizeof(kvc_masked) */
    int32_t num_masked;
} kvc_dense_args;

/* Copies these rows, decoded or raw, rotated for their present positions, and says which token sees which row, with all
 * threads of the cache.  Fails with KVC_ERR_INVALID if num_rows is another number, and as kvc_dense_sequences does.
 * Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *args);

/* ---- weights of rows --------------------------------------------------------------------------------------------- */

typedef enum kvc_reduction { /* what becomes of the weights that several queries give a row */
    KVC_REDUCE_SUM = 0,
    KVC_REDUCE_MAX = 1 /* the largest one */
} kvc_reduction;

typedef struct kvc_weights_args {
    size_t struct_size;
    const void *q;            /* [num_queries][num_heads][k_dim] */
    float *weights;           /* out: [num_kv_heads][num_rows], in order of arrival */
    const int32_t *positions; /* [num_queries] where the queries stand.  NULL: all at kvc_next_position */
    const float *sinks;       /* [num_heads] a logit that joins the softmax and has no row; may be NULL */
    int64_t q_token_stride, q_head_stride, weights_head_stride;
    int64_t num_rows;    /* kvc_seq_len of the layer */
    int32_t num_queries; /* at least 1 */
    int32_t num_heads;   /* query heads: a multiple of num_kv_heads */
    int32_t q_type;      /* KVC_F32, KVC_F16 or KVC_BF16 */
    int32_t reduction;   /* kvc_reduction */
    int32_t rotates;     /* not 0: queries carry no rotation, and are rotated for their positions by the layer's rope */
    float scale;         /* 0: 1 / sqrt(k_dim).  Must be given if values lie in the keys */
    float softcap;       /* 0: none, as in kvc_attend_args */
    const volatile int32_t *cancel; /* may be NULL.  Once it is not 0, the call ends early */
} kvc_weights_args;

/* Computes the softmax weights that queries give to the stored rows of a sequence, without a batch.  weights[g][j] is
 * the sum, or the maximum, of w[t, h, j] over the queries t and the query heads h of KV head g.
 *     w[t, h, j] = exp(scale * q[t, h] . k[j, g]) / sum over visible rows i of exp(scale * q[t, h] . k[i, g])
 * A policy that evicts tokens by their importance (kvc_keep_positions) needs these weights.  The call reads keys alone,
 * with all threads of the cache.  A query sees the stored rows that a token at its position would see.  It gives the
 * other rows a weight of 0.
 * A query that is not finite, or sees such rows, may give NaN to the rows that it sees, and to no others.
 * The bits of the result do not depend on threads, or on where rows lie.
 * For each row, the call takes 4 bytes of memory for each query and query head of a KV head, at most 512 bytes.  If
 * that would exceed 64 MiB, it takes fewer queries at a time, down to 64 bytes for each row.  Bookkeeping comes on top.
 * Rows between others of another delta (kvc_span) take up to 16 times as much.
 * Fails with KVC_ERR_INVALID also if the layer has another number of rows, or no attention.  Fails with
 * KVC_ERR_UNSUPPORTED if the layer holds keys alone, and if it cannot rotate queries that are to be rotated: its rope
 * is unknown or a function, or it is a KVC_CROSS layer with frequencies.  Fails with KVC_ERR_GONE if a query would see
 * rows that have expired, with KVC_ERR_NOMEM, and with KVC_ERR_CANCELLED (cancel, or the cache's poll).  After
 * KVC_ERR_CANCELLED, the contents of weights are undefined. */
KVC_API kvc_status kvc_weights(kvc_cache *cache, int64_t seq_id, int32_t layer, const kvc_weights_args *args);

/* ---- dividing positions ------------------------------------------------------------------------------------------ */

/* Divides the positions [begin, end) by `divisor`, which is at least 1, and rounds down (self-extend, Jin et al. 2024).
 * Keys that carry a rotation are rewritten.  Fails as kvc_shift does. */
KVC_API kvc_status kvc_divide(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t divisor);

/* ---- memory of your own ------------------------------------------------------------------------------------------ */

typedef enum kvc_memory_kind { /* what an allocation is for */
    KVC_MEMORY_ROWS = 0,       /* a block: keys and values.  Large, long-lived */
    KVC_MEMORY_BOOKKEEPING = 1,
    KVC_MEMORY_SCRATCH = 2 /* lives as long as a batch or a call */
} kvc_memory_kind;

typedef struct kvc_memory_hint {
    size_t struct_size;
    int32_t kind;  /* kvc_memory_kind */
    int32_t group; /* layer group of a block; -1: no group */
} kvc_memory_hint;

/* Functions of the caller that allocate memory.  They are called from any thread, and must neither call into the
 * library nor fork.  A cache calls one at a time, with its mutex held, or while the cache is made or freed.  Only
 * `purge` may be called for several parts of a block at once.  Caches with the same functions, such as clones, may call
 * them at the same time. */
typedef struct kvc_allocator {
    size_t struct_size;
    void *user;
    /* Returns `size` bytes (not 0) aligned to `alignment` (a power of two), or NULL. */
    void *(*alloc)(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint);
    void (*free)(void *user, void *memory, size_t size, const kvc_memory_hint *hint);
    /* Called when the contents of [memory, memory + size), whole OS pages of a block, are no longer needed; the range
     * stays allocated.  May be NULL.  If it is not, `alloc` must not touch blocks of 256 KiB and more: kvc_nbytes
     * counts the pages that the library touches. */
    void (*purge)(void *user, void *memory, size_t size);
} kvc_allocator;

/* ---- layouts of types -------------------------------------------------------------------------------------------- */

/* Types of ggml.  A block has 32 elements along a row, and the bytes that ggml's reference makes.  It begins with an
 * f16 scale d.  An f16 minimum m follows, if the type has one.  Then come the fifth bits of codes with 5 bits: 4 bytes,
 * whose bit i belongs to element i.  The low 4 bits of the codes q come last: a byte has element i in its low bits, and
 * element i + 16 in its high bits.
 * d is infinite if it would exceed 65504.  Elements then decode to infinities, and to NaN if q stands for 0.
 *   KVC_Q8_0    d = max |x| / 127, then 32 int8 q = round(x / d), halves away from 0; x = d * q
 *   KVC_Q4_0    d = the x of largest magnitude / -8, q = floor(x / d + 8.5), at most 15; x = d * (q - 8)
 *   KVC_Q4_1    m = min x, d = (max x - m) / 15, q = floor((x - m) / d + 0.5); x = d * q + m
 *   KVC_Q5_0    as KVC_Q4_0 with 16 for 8 and 31 for 15; 5 bits
 *   KVC_Q5_1    as KVC_Q4_1 with 31 for 15; 5 bits
 *   KVC_IQ4_NL  x = d * level[q], with level = -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113.  q has the
 *               level nearest to -127 * x / (the x of largest magnitude); d = sum of w * level[q] * x / sum of
 *               w * level[q]^2, with w = x^2.  If all elements are below 1e-15, d = 0 and q = 8; if any is beyond 1e18,
 *               d may be NaN
 *
 * KVC_INT8, KVC_INT6 and KVC_INT4 have one f16 scale d for a whole row.  In rows passed to or from the library, d
 * follows the elements.  In the cache it is stored separately (kvc_span).
 *   KVC_INT8    d = max |x| / 127, int8 q = round(x / d), halves away from 0; x = d * q.  An element that is infinite,
 *               or at least 65520 * 127, makes d infinite, and all elements NaN or infinite.  NaN is stored as 0
 * KVC_INT6 and KVC_INT4 are for normally distributed elements.  The cache makes any row so: it multiplies the row by
 * D * H * D before it is quantised, and again when it is decoded.  That spreads a large channel, or a mean that is not
 * 0, over the row.  H is Sylvester's Hadamard matrix over the root of its order, which is the order that
 * KVC_TRANSFORM_HADAMARD takes for keys.  D is diagonal.  Its element i, counted from 0 in each block of that order, is
 * -1 if i has an odd number of pairs of bits 2 j and 2 j + 1 that are both set, otherwise 1.
 *   x = d * level[q].  The 16 or 64 levels ascend (Lloyd and Max), and levels below 0 mirror levels above.  q has the
 * sign of x (+ for 0), and the level nearest to x / u in magnitude; halfway between two levels, the larger one.
 * d = sum of level[q] * x / sum of level[q]^2.  u = max |x| / 127.  For KVC_INT4, u is 0.96 or 1.06 times that: the
 * one with the larger (sum of level[q] * x)^2 / sum of level[q]^2 over the first 1024 elements.  If 1 / u overflows,
 * all x / u count as 0.  If d would exceed 65504, or an element is not finite, d is NaN.
 *   KVC_INT6    24 bytes for 32 elements.  Byte j < 8 has bits 4 and 5 of elements j, j + 8, j + 16 and j + 24, lowest
 *               first; 16 bytes have the low 4 bits of elements i and i + 16.  level[32 ..] = 1 3 6 9 12 15 18 21 24 27
 *               30 33 36 39 42 45 48 52 56 60 64 68 72 76 81 86 91 97 103 110 118 127
 *   KVC_INT4    16 bytes for 32 elements, with elements i and i + 16.  level[8 ..] = 5 16 28 40 54 70 90 119 */

/* ---- saved states ------------------------------------------------------------------------------------------------ */

/* A saved state is a file, or any other sequence of bytes.  It has rows as they are stored, their bookkeeping, and
 * checksums; docs/format.md specifies it.  safetensors opens it, too.  Checksums find damage, but not a change by
 * somebody who computes them anew.  So the file ends with KVC_MAC_BYTES bytes that the library writes as 0 and ignores:
 * with a secret, one puts there a MAC of all bytes before them. */
#define KVC_MAC_BYTES 32

/* Takes the next `size` bytes of a file that is saved.  Returns 0 for success; anything else ends the call with
 * KVC_ERR_CALLBACK.  It is called without the cache's mutex, from the thread that saves, and must not save or load
 * itself.  The last KVC_MAC_BYTES bytes come in a call of their own. */
typedef int32_t kvc_write_fn(void *user, const void *data, size_t size);

/* Sets the next `size` bytes of a file that is loaded, as kvc_write_fn takes them.  The last KVC_MAC_BYTES bytes are
 * asked for in a call of their own, before anything is changed. */
typedef int32_t kvc_read_fn(void *user, void *data, size_t size);

typedef struct kvc_save_args {
    size_t struct_size;
    kvc_write_fn *write;
    void *user;
    const int64_t *seq_ids;    /* [num_sequences] by rising id; NULL: all */
    int64_t num_sequences;     /* 0 if seq_ids is NULL */
    const int64_t *tokens;     /* token ids of each of seq_ids, one sequence after the other, for the caller's use; may
                                  be NULL */
    const int64_t *num_tokens; /* [num_sequences] how many token ids each sequence has, 0 or more */
    const char *fingerprint;   /* names the model, for example by a hash of its file: up to 255 printable ASCII
                                  characters, except quotes and backslashes.  NULL: "" */
} kvc_save_args;

/* Saves sequences: their rows, positions, deltas and expired positions, and the configuration without threads and
 * functions.  Shared rows are saved once.  Nothing of an open batch is saved.  seq_ids may name empty sequences.
 * It is the state of one moment.  Rows are written without the mutex, and sequences may be edited meanwhile, as if a
 * kvc_hold held their rows: kvc_compact and kvc_cache_free fail with KVC_ERR_HELD.
 * Fails with KVC_ERR_CALLBACK, after which the file is not whole, and with KVC_ERR_NOMEM.  Fails with
 * KVC_ERR_UNSUPPORTED on a big-endian machine, because files are little-endian. */
KVC_API kvc_status kvc_save(kvc_cache *cache, const kvc_save_args *args);

/* Gets the tokens that were saved with a sequence, before the cache is changed.  Returns as kvc_read_fn does. */
typedef int32_t kvc_tokens_fn(void *user, int64_t seq_id, const int64_t *tokens, int64_t num_tokens);

typedef struct kvc_load_args {
    size_t struct_size;
    const void *data;  /* [size] the file in memory: parts are copied and checked on all threads.  If it is a mapped
                          file that somebody truncates meanwhile, SIGBUS ends the process.  NULL: `read` reads it */
    kvc_read_fn *read;
    void *user;        /* for read and tokens */
    int64_t size;      /* bytes of the file */
    const char *fingerprint; /* not NULL: KVC_ERR_FORMAT if the file has another one */
    const int64_t *seq_ids;  /* [num_sequences] sequences of the file, by rising id; NULL: all */
    const int64_t *to_ids;   /* [num_sequences] their ids in the cache; NULL: the same */
    int64_t num_sequences;   /* 0 if seq_ids is NULL */
    kvc_tokens_fn *tokens;   /* called for each of these sequences; may be NULL */
    const kvc_config *config; /* for kvc_load only; may be NULL.  The new cache has its allocator, threads and poll, and
                                 its limits and block_size in place of the file's, unless these are 0.  layers may be
                                 NULL and num_layers 0.  Layers with KVC_ROPE_FUNCTION need layers, equal to the
                                 file's, and so do layers that are to have sketches */
} kvc_load_args;

/* Sets *cache to a new cache with the configuration and the sequences of a file, to be freed with kvc_cache_free.  The
 * file is untrusted: every count is checked against its size before memory is taken for it.  cache NULL: only checks
 * the file, checksums included.
 * Rows are packed into full blocks, so the new cache usually takes less memory than the saved one.  A sequence's list
 * of runs may be a few entries longer, of 24 bytes each.  Blocks of the file may be too large for max_bytes.  If config
 * gives no block_size, it is then 64, or the largest smaller power of two that fits.
 * Fails with KVC_ERR_FORMAT if the file is truncated, altered, of another shape or model, of a newer format, or no
 * saved state.  The message has the reason, and which tensor was altered.  Fails with KVC_ERR_INVALID also if the
 * file lacks one of seq_ids, or needs functions that move keys.  Fails with KVC_ERR_CALLBACK, KVC_ERR_FULL (capacity
 * or max_bytes), KVC_ERR_NOMEM and KVC_ERR_UNSUPPORTED. */
KVC_API kvc_status kvc_load(const kvc_load_args *args, kvc_cache **cache);

/* Loads sequences of a file into a cache, in place of the rows under their ids.  Layers must have the shapes, types,
 * transforms, policies and ropes of the file's; block_size and limits may differ.  Rows that two of the sequences share
 * are shared again.
 * Other calls go on meanwhile, as beside kvc_save.  The sequences appear once everything is read and checked.  Then
 * kept blocks are evicted and old rows replaced.  Until then the loaded rows may exceed max_bytes, which counts both:
 * if it is short, first clear the sequences that are to be replaced.  capacity does not count replaced rows.  Rows that
 * the file's sequences shared with others of the cache are rows of their own.  Fails as kvc_load does, and with
 * KVC_ERR_BUSY for a sequence that kvc_begin or an edit is using. */
KVC_API kvc_status kvc_restore(kvc_cache *cache, const kvc_load_args *args);

/* Sets *clone to an independent copy of a cache and its sequences, to be freed with kvc_cache_free.  Rows are copied
 * block by block, without the mutex.  Shared rows are copied once, and shared in the copy as well.
 * The copy has the same configuration, allocator and functions that move keys: their `user` must take calls for both
 * caches, from any thread.  Its statistics begin at 0, except that blocks_opened counts the copied blocks.  Memory kept
 * for reuse is not copied, so its kvc_nbytes is no larger.  Its instruction set is kvc_isa().  Fails with KVC_ERR_BUSY,
 * KVC_ERR_NOMEM and KVC_ERR_UNSUPPORTED. */
KVC_API kvc_status kvc_cache_clone(kvc_cache *cache, kvc_cache **clone);

/* ---- inspection -------------------------------------------------------------------------------------------------- */

/* Returns the bytes of rows if `capacity` slots of every layer group are filled; -1 if there is no limit.  Rows that an
 * open batch puts in cross-attention layers add to this until the commit. */
KVC_API int64_t kvc_capacity_bytes(kvc_cache *cache);

/* Returns the live slots of the fullest layer group over `capacity`; without a limit, over its slots in blocks.  Rows
 * that can be evicted do not count.  While an edit or a restoring batch replaces rows, the new rows do not count.  The
 * result is above 1 while the open batch has tokens that the default of capacity does not count. */
KVC_API double kvc_utilization(kvc_cache *cache);

typedef struct kvc_stats {
    int64_t batches;         /* committed batches */
    int64_t aborted;         /* aborted batches */
    int64_t tokens;          /* tokens committed to sequences that are stored */
    int64_t rows_expired;    /* counted in each layer group, as are all rows and slots here */
    int64_t rows_moved;      /* rows moved by compactions */
    int64_t compactions;
    int64_t blocks_opened;   /* blocks for which memory was taken */
    int64_t blocks_reused;   /* blocks that were free and are used again */
    int64_t blocks_returned; /* blocks whose memory was given back */
    int64_t live_slots;      /* slots that a sequence or the open batch holds now */
    int64_t wasted_slots;    /* slots that are not live and cannot be used before a compaction, now */
    int64_t blocks_in_use;   /* now */
    int64_t blocks_free;     /* blocks whose memory is kept for reuse, now */
    int64_t rows_copied;     /* rows copied to slots of a sequence's own, to be changed there: by kvc_divide and
                                KVC_ROPE_FUNCTION, and if they were shared, by kvc_inject */
    int64_t rows_evicted;    /* rows of kept blocks that were evicted; a row that two blocks shared counts twice */
    int64_t retained;        /* now: kept blocks, blocks of answers that are not released yet, and blocks that calls
                                read or add */
    int64_t evictable_slots; /* live slots that only kept blocks hold, now; none of what pins and quotas protect */
} kvc_stats;

/* Fills in *stats, of stats_size bytes. */
KVC_API void kvc_get_stats(kvc_cache *cache, kvc_stats *stats, size_t stats_size);

typedef struct kvc_block_info {
    int32_t num_slots;
    int32_t filled;     /* slots below this were handed out */
    int32_t live;       /* filled slots that a sequence or the open batch holds; the others wait for a compaction */
    int32_t references; /* the most sequences, the open batch included, that hold one of its slots */
    int32_t resident;   /* slots that were handed out since its memory was taken, so that the system has given
                           memory for them */
    int32_t is_held;    /* not 0: a kvc_hold keeps its rows as they are; they are not reused meanwhile */
    int32_t is_free;    /* not 0: nobody holds a slot; its memory is kept for reuse */
    int32_t reserved;   /* 0 */
    int64_t bytes;      /* what it counts for max_bytes unless it is free: its rows, its header, and the lists of one
                           kept block: 300 bytes, and in the first layer group 700 and 8 for each slot more.  It is the
                           same for all blocks of a layer group */
} kvc_block_info;

typedef struct kvc_run_info {
    int64_t seq_id;
    int32_t block; /* index of the block */
    int32_t slot;  /* the run is slots [slot, slot + count) of the block */
    int32_t count;
    int32_t position; /* of the first row; the others follow one by one, or a stride apart */
    int32_t delta;
    int32_t in_batch; /* not 0: the run is the open batch's, and not yet a part of the sequence */
    int32_t is_kept;  /* not 0: a prefix keeps the run; seq_id is then a number that names no sequence */
    int32_t reserved; /* 0 */
} kvc_run_info;

/* Lists where the rows of a layer's group lie, at one moment: every block that has memory, and every run in these
 * blocks.  Runs come by rising sequence id and in order of arrival, runs that prefixes keep last.  Then come runs of
 * the open batch, and of rows that a kvc_put is writing to a cross-attention layer.  Writes at most max_blocks and
 * max_runs, each of the size given, and sets *num_blocks and *num_runs to how many there are.  Once a block is given
 * back, another one takes its index.  Slots to which another call writes rewritten keys are live, and in no run. */
KVC_API kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                              int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                              int64_t max_runs, int64_t *num_runs);

/* Checks every invariant of the bookkeeping.  Fails with KVC_ERR_CORRUPT, with the reason in kvc_last_error(). */
KVC_API kvc_status kvc_validate(kvc_cache *cache);

/* ---- build and machine ------------------------------------------------------------------------------------------- */

/* Returns a line on how the library was built: version, compiler, instruction sets, OpenMP.  The text is static. */
KVC_API const char *kvc_build_info(void);

/* Returns the instruction set that a cache created now would use: "scalar", "avx2", "neon", ...  It is the best set
 * of this machine, unless the environment variable KVCACHE_ISA names another set.  Returns NULL if this machine or
 * build lacks the set that the variable names. */
KVC_API const char *kvc_isa(void);

/* Returns whose threads a call uses that is made now: "openmp" if the library was compiled with OpenMP, otherwise
 * "own".  The environment variable KVCACHE_THREADS may name the other one.  It is read once, when it is first
 * needed.  Returns NULL if this build lacks the threads that the variable names; no cache can be made then.
 *
 * "openmp"  Calls are parallel regions of the OpenMP runtime that the program's other libraries use.  Usually this is
 *           the runtime that the library links to.  The process may have loaded another one, Clang's (libomp) or
 *           Intel's (libiomp5), before a cache was made; calls run on that one if nothing else needs the linked one.
 *           While regions are held up, because another program takes a processor, calls use the own threads.  If OpenMP
 *           binds threads to places, they then use the calling thread alone.
 * "own"     Threads of this library, which wait for 50 microseconds and then sleep.  A child after fork() has them if
 *           its parent had no cache, or (on Linux) had not even loaded this library. */
KVC_API const char *kvc_threading_layer(void);

#ifdef __cplusplus
}
#endif

#endif
