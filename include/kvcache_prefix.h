/* kvcache_prefix.h: prompts that begin alike.  kvcache.h includes it, and says what holds for all calls.
 *
 * Contents
 *   a prefix           kvc_tokens, kvc_prefix_config, kvc_prefix_new
 *   a prompt           kvc_prefix_acquire, kvc_prefix_release, kvc_prefix_lookup
 *   recurrent states   kvc_prefix_checkpoint, kvc_prefix_state
 *   what stays         kvc_prefix_pin, kvc_prefix_evict, kvc_prefix_clear
 *   private data       kvc_prefix_forget, kvc_prefix_names, kvc_prefix_end_forget
 *   events             kvc_prefix_take_events: what a router follows, to send a prompt to where its blocks are
 *   stores             kvc_store, kvc_prefix_fetch, kvc_store_new_blocks: blocks leave the cache and come back
 *   a store in files   kvc_dir_store_new
 *   counts             kvc_prefix_get_stats
 *
 * Words
 *   checkpoint    a recurrent state of the model that a prefix keeps.
 *   store         keeps blocks of prefixes outside the cache, for other processes and later ones.
 *
 * A prefix finds the beginning of a prompt among the blocks that earlier sequences left behind, by their tokens.
 *
 *   kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched)  a new sequence, which holds the first `matched` tokens
 *     feed it the tokens from position `matched` on, then what is generated
 *   kvc_prefix_release(prefix, seq_id, &all_tokens)             the sequence ends, its blocks stay
 *
 * The commit that fills a block of the prompt keeps this block, and other prompts find it from then on.
 * kvc_prefix_release keeps blocks of generated tokens, and the last block, which may not be full.  Only exact rows are
 * kept (kvc_exact_to).
 *
 * Room      Kept blocks take no room from others.  A call that lacks room within capacity or max_bytes evicts the least
 *           recently used ones, as few as it needs, and none if it fails all the same.  So KVC_ERR_FULL says that
 *           sequences in use, prompts, holds, pins and quotas hold all.
 *           Blocks that would free no slot and no state stay.  A block goes whole, with one exception: its state would
 *           free nothing, and sequences or other blocks hold its rows in the layers that see everything.  Then it
 *           keeps these rows, and loses those of layers with windows or chunks.  kvc_begin moves
 *           rows together if the tokens fit only so, or if that saves an eighth of max_bytes and no block has to go.
 *           If the system refuses memory for a block, kvc_begin and kvc_reserve evict others, too.
 * Answers   A commit also lays by each block that generated tokens fill, until kvc_prefix_release knows the tokens.
 *           Such a block is evicted like a kept one, and counts in kvc_stats.retained.  It is not in kvc_prefix_stats,
 *           and kvc_prefix_evict does not reach it.  Where windows drop rows, only these blocks keep the rows of a
 *           long answer.  They take the room of older blocks, also of its own prompt.  A pin or a quota keeps those.
 * Sequences An acquired sequence ends like any other, also when an edit leaves nothing of it: only the blocks of the
 *           prompt that were full by then are kept.  It may be edited: what follows the edit is kept only by
 *           kvc_prefix_release.  An unstored batch counts as an edit of all its tokens, but the emptied sequence goes
 *           on until it is ended.
 *           Several prefixes, for adapters and tenants, may share a cache.
 * Known     is the one word for what a prompt finds.  A block is kept while it has rows of some layer, and until it
 *           expires (ttl_ms).  The first n tokens of a prompt are known if kept blocks of these tokens hold, for each
 *           layer, every row that a token at position n would see.  If the prefix has state_bytes, a checkpoint at n is
 *           needed as well.  n is at most where the last kept block of the prompt ends.  If only the first tokens of
 *           that block are the prompt's, it ends behind these.
 *           The number of known tokens is the largest such n up to a limit; each call below says its own.  A limit
 *           acts as the end of the prompt would.  If many kept blocks begin like the rest of a prompt, the 32 with the
 *           most tokens in common are looked at.  A search skips at most 256 expired blocks that no call has dropped
 *           yet, and does not find kept blocks behind further ones.
 * Used      A call uses the blocks that it matches, keeps or computes again, with their states.  A commit that keeps
 *           blocks of an acquired sequence also uses the blocks before them, and so does the end of the sequence.  If
 *           one call uses several blocks, the blocks nearer to the beginning of the prompt count as used later.
 *           The block whose state the prompt goes on from counts as used later than others that begin where it does.
 * Time      A call takes time for the blocks of its tokens, and for blocks that it drops.  For each
 *           block it also looks at up to 32 others that begin alike.  kvc_prefix_forget and kvc_prefix_clear wait for a
 *           kvc_prefix_forget of the same prefix.  They look at all sequences that the prefix has acquired. */
#ifndef KVCACHE_PREFIX_H
#define KVCACHE_PREFIX_H

#include "kvcache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- a prefix ---------------------------------------------------------------------------------------------------- */

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
    int64_t quota;       /* this many of its most recently used tokens are not evicted for others, nor is the rest of
                            the block in which they end.  0: none */
    int64_t ttl_ms;      /* milliseconds after which an unpinned block expires if no call uses it; later calls drop it.
                            0: never */
    int32_t reuse_min_tokens; /* not 0: tokens that begin where the match ends may be taken from another prompt, or from
                                another position, and moved there.  They must be at least so many in a row, and span a
                                whole block there.  This is an approximation: the rows are inexact.  Of blocks with the
                                same tokens, the 32 used last are looked at.  0: never */
    int32_t collects_new; /* not 0: kvc_take_new_blocks lists its blocks, and kvc_store_new_blocks writes them */
    void *user;          /* what kvc_take_new_blocks says of its blocks */
    const void *secret;  /* [secret_size] the key of a MAC over each value in a store.  Without the key one can remove
                            values, but kvc_prefix_fetch takes none that one writes.  NULL: values have a checksum,
                            which finds accidents.  Give both fields, or neither */
    int64_t secret_size;
    int64_t state_bytes; /* not 0: the model has a recurrent state as well, of at most so many bytes a sequence, and a
                            match ends at a checkpoint (kvc_prefix_checkpoint).  0: it has none */
    int64_t max_checkpoint_bytes; /* limit of the states that are kept.  Beyond it, states that are not pinned are
                            dropped, the least recently used first.  0: states are limited as their blocks are, and by
                            max_bytes */
    int32_t max_events; /* events kept for kvc_prefix_take_events, of 40 bytes each.  0: none */
} kvc_prefix_config;

/* Writes the identity that the names of blocks depend on besides tokens, salt and state_bytes: KVC_NAME_BYTES bytes.
 * It is a digest of the fingerprint, which has `size` bytes, of block_size, and of each field of a layer that rows
 * depend on.  Python's PrefixCache has the same identity if its cache has the same layers, and its fingerprint in UTF-8
 * the same bytes. */
KVC_API kvc_status kvc_prefix_identity(const kvc_cache *cache, const void *fingerprint, int64_t size,
                                       uint8_t *identity);

/* Sets *prefix to a new prefix of a cache, to be freed with kvc_prefix_free, or with the cache.  Fails with
 * KVC_ERR_INVALID if the cache is for one sequence or a field is out of range.  Fails with KVC_ERR_UNSUPPORTED if it
 * has a KVC_CROSS layer, because rows of such a layer do not follow from tokens.  reuse_min_tokens is
 * KVC_ERR_UNSUPPORTED if the rope of a layer is not known, or the model has a recurrent state.  Fails with KVC_ERR_FULL
 * if max_bytes leaves no room, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_new(kvc_cache *cache, const kvc_prefix_config *config, kvc_prefix **prefix);

/* Frees a prefix, and drops its blocks; ignores NULL.  Sequences that it acquired go on as any others. */
KVC_API void kvc_prefix_free(kvc_prefix *prefix);

/* ---- a prompt ---------------------------------------------------------------------------------------------------- */

/* Sets *seq_id to a new sequence that holds the known tokens of a prompt, and *matched to their number.  That is at
 * most max_matched (-1: no limit), and less than all tokens, because the last one has to be fed.  It may lack rows that
 * only resume_window keeps: kvc_can_resume says how far it can go back.
 * May be called while a batch is open.  Fails with KVC_ERR_INVALID if there are no tokens, with KVC_ERR_FULL if
 * max_bytes leaves no room for the prompt, with KVC_ERR_NOMEM, and with KVC_ERR_CALLBACK if a kvc_shift_fn fails
 * (reuse_min_tokens).  In the last case it may have evicted kept blocks, and taken memory that is kept for reuse. */
KVC_API kvc_status kvc_prefix_acquire(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t max_matched,
                                      int64_t *seq_id, int32_t *matched);

/* Keeps the blocks of a sequence, and ends it.  Pass all its tokens, generated ones too; tokens that were not fed are
 * ignored.  No tokens: the sequence only ends.  The sequence may be any of the cache; if it is empty, it only ends.  If
 * memory for bookkeeping is short, the call keeps fewer blocks.  Fails with KVC_ERR_BUSY while the sequence is in the
 * open batch or its keys are rewritten.  Fails with KVC_ERR_INVALID if the sequence holds more exact tokens than were
 * passed, as it does if a whole prompt was fed behind its match.  Commits have kept blocks of such a prompt by then,
 * with rows of other tokens: call kvc_prefix_forget for it, and for prompts that went on from them meanwhile.
 * kvc_mark_inexact, called at position n before, limits what is kept to the first n tokens. */
KVC_API kvc_status kvc_prefix_release(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *tokens);

/* Sets *matched to the number of known tokens.  Takes nothing, and marks nothing as used.  Sets *with_rows, unless it
 * is NULL, to the number of tokens that would be known if no checkpoints were needed.  If that is more, another prompt
 * began alike, and a checkpoint there lets the next such prompt go on from it.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_lookup(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t *matched,
                                     int32_t *with_rows);

/* ---- recurrent states -------------------------------------------------------------------------------------------- */

/* Keeps the blocks of a sequence's first tokens, and the recurrent state of the model behind them.  The sequence goes
 * on.  A match of a prefix with state_bytes ends at a checkpoint.  num_bytes 0: keeps the blocks alone.
 * Call it before the last token of a prompt, because an acquired sequence never holds that token.  Call it also at the
 * end of an answer, and every few thousand tokens of a long prompt.
 * A state counts as memory, and is dropped with the rows of its last token.  It is not kept if the sequence holds
 * fewer tokens, if its tokens are not all exact, or if the prefix forgets a prompt while the call runs.  Nor is it kept
 * if all windows have left the last token behind, and no kept block has its rows.
 * Fails with KVC_ERR_BUSY as kvc_prefix_release does, and with KVC_ERR_INVALID if num_bytes is more than state_bytes,
 * or there is a state and no token.  Fails with KVC_ERR_FULL if max_bytes leaves no room for the state, or pinned
 * states leave none within max_checkpoint_bytes, and with KVC_ERR_NOMEM.  A call that fails so may have kept blocks
 * without the state, and evicted others. */
KVC_API kvc_status kvc_prefix_checkpoint(kvc_prefix *prefix, int64_t seq_id, const kvc_tokens *tokens,
                                         const void *state, int64_t num_bytes);

/* Writes the recurrent state from which an acquired sequence goes on, and sets *num_bytes to its bytes: 0 if nothing
 * was matched.  `state` has room for max_bytes.  state NULL: sets *num_bytes alone.  Call it before the sequence's
 * first commit, which forgets the state.  Fails with KVC_ERR_INVALID if the state has more than max_bytes. */
KVC_API kvc_status kvc_prefix_state(kvc_prefix *prefix, int64_t seq_id, void *state, int64_t max_bytes,
                                    int64_t *num_bytes);

/* ---- what stays -------------------------------------------------------------------------------------------------- */

/* Pins the known tokens of a prompt, such as a system prompt: their blocks and state are not evicted.  Sets *kept to
 * the number of these tokens; if it is 0, nothing is pinned.  Call it again once more of the prompt is known: the pin
 * then holds that, too.  If only the first tokens of a block are the prompt's, the whole block is pinned.  If layers
 * have chunks, the block behind the known tokens may have to be pinned, too.  A pin does not count as a use.  It takes
 * 8 bytes for each block.  Fails with KVC_ERR_FULL if max_bytes leaves no room for that, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_pin(kvc_prefix *prefix, const kvc_tokens *tokens, int32_t *kept);

/* Takes back one kvc_prefix_pin of the same tokens; does nothing if no such pin is left.  Once all are taken back, they
 * pin nothing of the prompt. */
KVC_API kvc_status kvc_prefix_unpin(kvc_prefix *prefix, const kvc_tokens *tokens);

/* Drops the least recently used blocks that are not pinned, until num_tokens tokens are dropped or no block is left.
 * Sets *num_evicted to the number of dropped tokens, which may be more, because blocks are dropped whole. */
KVC_API kvc_status kvc_prefix_evict(kvc_prefix *prefix, int64_t num_tokens, int64_t *num_evicted);

/* Drops all blocks, pinned ones too, and takes back all pins.  Sequences stay as they are; the tokens that they hold
 * are kept once they are released.  Fails with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_prefix_clear(kvc_prefix *prefix);

/* ---- private data ------------------------------------------------------------------------------------------------ */

/* Forgets a prompt, for example private data: no prompt of this prefix matches one of its tokens until somebody
 * computes it again.  Other prefixes, and other caches, do not learn of it.  Pass the answer, too, so that
 * kvc_prefix_names has the names of its blocks.
 * Drops each block that has one of these tokens at its place, also a block of a system prompt that others share.  Drops
 * each block behind the whole prompt, too; pinned or not, and with their states.  Sets *num_dropped to the number of
 * tokens in these blocks.  Without tokens, drops nothing.
 * Other blocks behind a part of the prompt stay, for when that part is computed again, unless all layers have windows
 * or chunks.  Equal tokens of another prompt, or at another position, stay, too.  If reuse_min_tokens must not move
 * them, forget that prompt as well.
 * Sequences go on.  But the prefix keeps nothing more of sequences that were begun or acquired before the call
 * returned.  From its first forget on, it also keeps nothing of a sequence that kvc_restore made, or that another
 * prefix acquired.  Nor does it keep a sequence that got rows of such a sequence by a fork or by kvc_share.
 * A kvc_prefix_fetch under way adds nothing more.  Pins stay, for when the same blocks are computed again.
 * Other calls may run before it ends.  Until then, prompts with the same first token match nothing and leave no blocks.
 *
 * Stores keep their values, and a fetch of such a value counts as computing the block again.  To remove them, too:
 *   1. Give `names`, [max_names][KVC_NAME_BYTES].  The call writes the names of the full blocks that were dropped, by
 *      the call or by others during it, and sets *num_names to their number.  If that is max_names, it may have
 *      stopped, and prompts still find the rest: call it again.  Give room for more than kvc_prefix_stats.blocks,
 *      because blocks that others drop between two calls have no names.
 *   2. Remove the values under these names, and under the names of the prompt's full blocks (kvc_prefix_names).
 *   3. Call kvc_prefix_end_forget, once for each call of step 1.
 * From the beginning of step 1 to the end of step 3, kvc_prefix_fetch adds nothing to this prefix.
 * Without names (NULL, and max_names 0), the call drops all blocks, names none, and there is nothing to end.
 * A kvc_store_new_blocks or kvc_store_block that runs at that time starts to write none of these blocks.  If it was
 * writing one, it removes the value.  Until it has, kvc_prefix_fetch reads no value under this name.  If the store has
 * no `remove`, or if that fails, the value stays: remove it once the call that wrote it has ended, before step 3.
 * Other prefixes, caches and processes that use the store may hold these tokens, too.  They go on fetching the values,
 * and may write them again.  Forget the prompt in all of them before step 2.  In the child of a fork(), end the calls
 * that its parent had not ended.
 * Blocks that had left the cache before have no names.  A store may bring them back, with tokens of the prompt or
 * behind it.  To be sure, give each tenant a store of its own, and clear it before step 3. */
KVC_API kvc_status kvc_prefix_forget(kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *names, int64_t max_names,
                                     int64_t *num_names, int64_t *num_dropped);

/* Writes the names of the full blocks of a prompt, known or not: at most max_names, [..][KVC_NAME_BYTES].  Sets
 * *num_names to the number of full blocks. */
KVC_API kvc_status kvc_prefix_names(kvc_prefix *prefix, const kvc_tokens *tokens, uint8_t *names, int64_t max_names,
                                    int64_t *num_names);

/* Ends a kvc_prefix_forget that has given names.  Once all are ended, kvc_prefix_fetch adds blocks again.  Fails with
 * KVC_ERR_INVALID if no such call is left to end. */
KVC_API kvc_status kvc_prefix_end_forget(kvc_prefix *prefix);

/* ---- events ------------------------------------------------------------------------------------------------------ */

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
 * *num_lost to how many before them were overwritten because there are more than kvc_prefix_config.max_events.
 * kvc_prefix_clear takes away the events before its own, which do not count as lost. */
KVC_API kvc_status kvc_prefix_take_events(kvc_prefix *prefix, kvc_prefix_event *events, size_t event_size,
                                          int64_t max_events, int64_t *num_events, int64_t *num_lost);

/* ---- stores ------------------------------------------------------------------------------------------------------ */

/* How full blocks get out of the cache, and back.  A payload begins with a byte for each layer: 1 if its rows follow,
 * which are all of the block or none.  Then come the rows of these layers, as they are stored: keys
 * [num_kv_heads][block_size / stride], then values, unless they lie in the keys or the layer holds keys alone.  If the
 * block has a checkpoint, the position of the last one follows (4 bytes, the lowest first), then its state.  A payload
 * is kept under the block's name, and fits any prefix with the same names, on any machine.  Names tell prefixes of
 * other state_bytes apart. */

typedef struct kvc_new_block {
    void *user;         /* of its prefix */
    int64_t id;         /* for kvc_store_block */
    int32_t begin, end; /* positions of its tokens */
    uint8_t name[KVC_NAME_BYTES];
} kvc_new_block;

/* Writes the blocks that prefixes with collects_new have kept since the last call: at most max_blocks.  Sets
 * *num_blocks to how many it wrote.  A block comes once.  It comes again when it gets more rows, a checkpoint at its
 * end, or a later checkpoint within it.  For a checkpoint within them, up to 64 blocks that begin with the same tokens
 * come again.  Blocks that were dropped since, or added by kvc_prefix_fetch, do not come.  A checkpoint that
 * kvc_prefix_fetch added does not make its block come, either.  A block does not come if windows have lost rows of it
 * in every layer.  Call it after each commit and kvc_prefix_release. */
KVC_API kvc_status kvc_take_new_blocks(kvc_cache *cache, kvc_new_block *blocks, size_t new_block_size,
                                       int64_t max_blocks, int64_t *num_blocks);

/* A store keeps such blocks, of any number of caches, processes and machines.  kvc_dir_store_new makes one in a folder.
 * Another one is two or three functions of the caller.  Any thread may call them, several at once, without the cache's
 * mutex.  They return KVC_OK, or an error after kvc_set_last_error, usually KVC_ERR_STORE.
 *
 *   kvc_prefix_fetch(prefix, &tokens, -1, store, &fetched)      before kvc_prefix_acquire: adds what the store has
 *   kvc_store_new_blocks(cache, store, &num_written)            after commits and releases: writes what is new
 *
 * Call both on any thread, such as one of your own for writing: nothing waits for a store.  A store that fails costs
 * speed, and nothing else; the status says that it failed.  A value is a header of 128 bytes, bound to the name, the
 * model and the secret, and the payload.  It is used only if it is unchanged.  Python's PrefixCache writes the
 * same values, under the same names in hexadecimal digits. */

typedef struct kvc_store {
    size_t struct_size;
    void *user; /* given to the functions; stores with the same `user` and `read` are one store */
    /* Copies the value under a name of KVC_NAME_BYTES bytes to `value`, and sets *size to its bytes, or to 0 if
     * there is no value.  If the value has more than max_bytes, sets *size to any number above max_bytes, and copies no
     * more than max_bytes. */
    kvc_status (*read)(void *user, const uint8_t *name, void *value, int64_t max_bytes, int64_t *size);
    /* Keeps a value under a name, in place of the one that is there. */
    kvc_status (*write)(void *user, const uint8_t *name, const void *value, int64_t size);
    /* Removes the value under a name; does nothing if there is none.  NULL: values cannot be removed. */
    kvc_status (*remove)(void *user, const uint8_t *name);
} kvc_store;

/* Reads the full blocks that follow the known tokens of a prompt from a store, and adds them in order.  It ends where
 * the store lacks a block that is not kept, and where there is no room or no memory for a block.  It also ends before a
 * block that would reach past max_matched tokens (-1: no limit) or hold the prompt's last token.  A kept block is read
 * if it lacks its state.  It evicts no block that was used later than the blocks that it matched or added.  While the
 * store works, the call keeps nothing from being dropped.  It ends soon after others have dropped what its blocks
 * follow.
 * Sets *fetched to the number of tokens in blocks that brought rows or a state, also if it fails.
 * Fails with KVC_ERR_INVALID if there are no tokens, as `read` fails, with KVC_ERR_FORMAT if a value was changed, and
 * with KVC_ERR_NOMEM if there is no memory for values.  The prompt's tokens are then computed, and a changed value is
 * written again. */
KVC_API kvc_status kvc_prefix_fetch(kvc_prefix *prefix, const kvc_tokens *tokens, int64_t max_matched,
                                    const kvc_store *store, int32_t *fetched);

/* Takes the new blocks as kvc_take_new_blocks does, and writes them to a store.  Sets *num_written to how many it
 * wrote, also if it fails.  If a block may have no state, or lack rows of windows, it reads the block's value first,
 * and writes both joined.  It does not read a value that may be of forgotten rows: between a kvc_prefix_forget with
 * names and its end, it writes the block alone.  If another call of this cache is writing the block to the same store,
 * that call writes it again in place of this one.  Fails as `read`, `write` and `remove` do, and with KVC_ERR_NOMEM.
 * It does not try that block again; the next call writes the others. */
KVC_API kvc_status kvc_store_new_blocks(kvc_cache *cache, const kvc_store *store, int64_t *num_written);

/* Writes a block that kvc_take_new_blocks has listed to a store, as kvc_store_new_blocks does, on any thread: for
 * callers whose prefixes have several stores.  Sets *size to the bytes of its payload, which is 0 if the block was
 * dropped.  Does not call `write` if the store has all of it.  Fails as `read`, `write` and `remove` do, and with
 * KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_store_block(kvc_cache *cache, int64_t id, const kvc_store *store, int64_t *size);

/* ---- a store in files -------------------------------------------------------------------------------------------- */

/* Sets *store to a new store in a folder, which is made if there is none; free it with kvc_dir_store_free.  Any
 * number of processes and threads may share a folder, also Python's DirectoryStore.  A relative path starts where the
 * process is now, also after a chdir().  Its values take at most max_bytes (0: no limit), and values that are being
 * written come on top.  The least recently read or written values are removed until 1/16 of max_bytes is free.  Nothing
 * is synced to the disk: a file that a power cut damages counts as missing.
 * Only their owner can read the files.  On Windows the folder's rights count, and the path is UTF-8.  Links and files
 * of other names are left alone.  If a value has more than max_bytes, `read` copies the first max_bytes.
 * Its functions fail with KVC_ERR_STORE and KVC_ERR_NOMEM.  Fails with KVC_ERR_STORE if the folder cannot be made or
 * used, and with KVC_ERR_NOMEM. */
KVC_API kvc_status kvc_dir_store_new(const char *path, int64_t max_bytes, kvc_store **store);

/* Frees a store of kvc_dir_store_new that no call uses any more; ignores NULL.  Its files stay. */
KVC_API void kvc_dir_store_free(kvc_store *store);

/* ---- counts ------------------------------------------------------------------------------------------------------ */

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

#ifdef __cplusplus
}
#endif

#endif
