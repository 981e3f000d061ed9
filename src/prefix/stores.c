/* stores.c: carries blocks between caches and stores.  No lock of a cache is held while a store works.
 *
 * A carrier is the state of such a call, with memory for a value: a block's rows as the store has them.  It has memory
 * for three if values may lack rows or a state, which are then joined with the value in the store.  A departure is a
 * block that is being written.  If kvc_prefix_forget drops the block meanwhile, its node is gone and the cache's clock
 * has risen; the call then removes the value that it has written.
 *
 * A kvc_fetch is where a call stands in a prompt whose blocks it adds to the prefix's tree, in order.  A block is kept
 * if the tree has a node for it which is live: has rows, and has not expired. */
#include "prefix/stores.h"

#include <string.h>

#include "base/structs.h"
#include "prefix/fetch.h"
#include "prefix/prefix.h"

/* Reads the caller's store. */
static kvc_status carrier_init(kvc_carrier *c, kvc_cache *cache, const kvc_store *from) {
    *c = (kvc_carrier){.cache = cache};
    KVC_TRY(KVC_READ(kvc_store, &c->store, from, "store"));
    if (!c->store.read || !c->store.write)
        return kvc_fail(KVC_ERR_INVALID, "%s is NULL: a store has both functions", c->store.read ? "write" : "read");
    return KVC_OK;
}

/* Returns whether blocks of a prefix may lack rows, or a state. */
static int may_lack(const kvc_prefix *prefix) {
    const kvc_cache *cache = prefix->cache;
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (kvc_policy_expires(&cache->policies[g])) return 1;
    return prefix->state_bytes > 0;
}

/* Takes memory for `num` values of a prefix, 1 or 3, unless the call has enough.  Call with the mutex held. */
static kvc_status take_memory(kvc_carrier *c, const kvc_prefix *prefix, int num) {
    const int64_t max_bytes = KVC_VALUE_HEADER + kvc_most_payload_bytes(c->cache, prefix->state_bytes);
    const uint64_t size = sizeof *c->crc + (uint64_t)num * (uint64_t)max_bytes;
    if (c->size && c->max_bytes >= max_bytes && (num == 1 || c->stored)) return KVC_OK;
    if (c->size) kvc_carrier_end(c);
    c->size = 0;
    c->crc = kvc_memory_alloc(&c->cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (!c->crc) return kvc_fail(KVC_ERR_NOMEM, "out of memory for a block of %lld bytes", (long long)max_bytes);
    c->value = (uint8_t *)(c->crc + 1);
    c->stored = num > 1 ? c->value + max_bytes : NULL;
    c->joined = num > 1 ? c->stored + max_bytes : NULL;
    c->max_bytes = max_bytes;
    c->size = size;
    c->thread = kvc_thread_self();
    c->at = &c->cache->prefixes.carriers;
    c->next = *c->at;
    if (c->next) c->next->at = &c->next;
    *c->at = c;
    kvc_crc_init(c->crc);
    return KVC_OK;
}

void kvc_carrier_end(const kvc_carrier *c) {
    *c->at = c->next;
    if (c->next) c->next->at = c->at;
    kvc_memory_free(&c->cache->memory, c->crc, c->size, KVC_MEMORY_SCRATCH, -1);
}

static void carrier_destroy(const kvc_carrier *c) {
    kvc_lock(c->cache);
    if (c->size) kvc_carrier_end(c);
    kvc_unlock(c->cache, KVC_OK);
}

/* ---- out --------------------------------------------------------------------------------------------------------- */

/* Takes memory for a block, and describes it, with the mutex held. */
static kvc_status describe(kvc_carrier *c, const kvc_node *node, kvc_departure *d) {
    const kvc_prefix *prefix = node->tree->prefix;
    KVC_TRY(take_memory(c, prefix, may_lack(prefix) ? 3 : 1));
    d->id = node->rows->id;
    d->owner = prefix->owner;
    d->may_have_state = prefix->state_bytes > 0;
    d->joins = !prefix->num_leaving;
    d->date = c->cache->prefixes.clock;
    memcpy(d->name, node->named.name, sizeof d->name);
    return KVC_OK;
}

/* Takes the next new block; *is_there is 0 if no new block is left. */
static kvc_status take_block(kvc_carrier *c, kvc_departure *d, int *is_there) {
    kvc_lock(c->cache);
    kvc_node *node = kvc_prefix_next_new(c->cache);
    *is_there = node != NULL;
    const kvc_status status = node ? describe(c, node, d) : KVC_OK;
    if (node && status == KVC_OK) kvc_node_take_out(node);
    return kvc_unlock(c->cache, status);
}

/* Returns whether a block may have been forgotten since it was taken, with the mutex held. */
static int has_gone(const kvc_cache *cache, const kvc_departure *d) {
    return !kvc_node_of(cache, d->id) && cache->prefixes.clock != d->date;
}

/* Returns the first call that is writing a block with this name, of c and the calls behind it; NULL: none is. */
static kvc_carrier *find_writer(kvc_carrier *c, const uint8_t *name) {
    while (c && !(c->is_writing && !memcmp(c->block.name, name, KVC_NAME_BYTES))) c = c->next;
    return c;
}

/* Returns whether a call is still writing a value of forgotten rows under a name, or about to remove it. */
static int is_leaving(kvc_cache *cache, const uint8_t *name) {
    kvc_lock(cache);
    kvc_carrier *c = find_writer(cache->prefixes.carriers, name);
    while (c && !has_gone(cache, &c->block)) c = find_writer(c->next, name);
    kvc_unlock(cache, KVC_OK);
    return c != NULL;
}

/* Sets *size to the bytes of a block's value in the store.  0: there is none, it is damaged, or its rows may have been
 * forgotten. */
static kvc_status find_stored(kvc_carrier *c, const kvc_departure *d, int64_t *size) {
    *size = 0;
    if (!d->joins || is_leaving(c->cache, d->name)) return KVC_OK;
    KVC_TRY(c->store.read(c->store.user, d->name, c->stored, c->max_bytes, size));
    if (*size > c->max_bytes || kvc_value_check(c->stored, *size, d->name, &d->owner, c->crc) != KVC_OK) *size = 0;
    return KVC_OK;
}

/* Returns whether a payload has the rows of all layers. */
static int is_complete(const kvc_cache *cache, const uint8_t *payload) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (kvc_keeps_tokens(cache, i) && !payload[i]) return 0;
    return 1;
}

/* Adds rows and state that the store has of a block to its payload of *size bytes.  The payload may lack them: the
 * block was computed again without a state, or windows have lost rows.  Sets *value to the value of both, NULL where
 * the store has it already. */
static kvc_status join_stored(kvc_carrier *c, const kvc_departure *d, uint8_t **value, int64_t *size) {
    const int64_t header = KVC_VALUE_HEADER;
    int64_t stored;
    *value = c->value;
    if (!c->stored || (!d->may_have_state && is_complete(c->cache, c->value + header))) return KVC_OK;
    KVC_TRY(find_stored(c, d, &stored));
    if (!stored || kvc_join_payloads(c->cache, c->value + header, *size, c->stored + header, stored - header,
                                     c->joined + header, c->max_bytes - header, size) != KVC_OK)
        return KVC_OK;
    const int is_same = *size == stored - header && !memcmp(c->joined + header, c->stored + header, (size_t)*size);
    *value = is_same ? NULL : c->joined;
    return KVC_OK;
}

/* Returns whether the block that a call is writing may have been forgotten since it was taken. */
static int is_forgotten(const kvc_carrier *c) {
    kvc_lock(c->cache);
    const int is_forgotten = has_gone(c->cache, &c->block);
    kvc_unlock(c->cache, KVC_OK);
    return is_forgotten;
}

/* Begins to write a block.  Returns 0 if another call is writing it to this store: that call then writes it again, so
 * that an older value does not come last. */
static int begin_writing(kvc_carrier *c, const kvc_departure *d) {
    kvc_lock(c->cache);
    kvc_carrier *other = find_writer(c->cache->prefixes.carriers, d->name);
    while (other && !(other->store.user == c->store.user && other->store.read == c->store.read))
        other = find_writer(other->next, d->name);
    if (other) {
        other->next_block = *d;
        other->writes_again = 1;
    } else {
        c->block = *d;
        c->is_writing = 1;
    }
    kvc_unlock(c->cache, KVC_OK);
    return !other;
}

/* Ends writing, and returns 0, unless another call has left its block of this name to this one, as c->block. */
static int writes_again(kvc_carrier *c) {
    kvc_lock(c->cache);
    const int again = c->is_writing = c->writes_again;
    c->writes_again = 0;
    if (again) c->block = c->next_block;
    kvc_unlock(c->cache, KVC_OK);
    return again;
}

static kvc_status read_block(const kvc_carrier *c, const kvc_departure *d, int64_t *size) {
    return kvc_read_block(c->cache, d->id, c->value + KVC_VALUE_HEADER, c->max_bytes - KVC_VALUE_HEADER, size);
}

/* Writes c->block, unless the store has all of it; *size is 0 if the block was dropped meanwhile. */
static kvc_status write_once(kvc_carrier *c, int64_t *size, int64_t *num_written) {
    const kvc_departure *d = &c->block;
    uint8_t *value;
    KVC_TRY(read_block(c, d, size));
    if (!*size) return KVC_OK;
    KVC_TRY(join_stored(c, d, &value, size));
    if (!value) return KVC_OK;
    kvc_value_pack(value, *size, d->name, &d->owner, c->crc);
    if (is_forgotten(c)) {
        *size = 0;
        return KVC_OK;
    }
    const kvc_status status = c->store.write(c->store.user, d->name, value, KVC_VALUE_HEADER + *size);
    if (c->store.remove && is_forgotten(c)) {
        *size = 0;
        const kvc_status removed = c->store.remove(c->store.user, d->name);
        return status == KVC_OK ? removed : status;
    }
    *num_written += status == KVC_OK;
    return status;
}

/* Writes a block, and those that other calls leave to this one; or leaves it to a call that is writing its name. */
static kvc_status write_block(kvc_carrier *c, const kvc_departure *d, int64_t *size, int64_t *num_written) {
    kvc_status status = KVC_OK;
    if (!begin_writing(c, d)) return read_block(c, d, size);
    do {
        const kvc_status once = write_once(c, size, num_written);
        if (once != KVC_OK) status = once; /* also where a value stays that could not be removed */
    } while (writes_again(c));
    return status;
}

kvc_status kvc_store_block(kvc_cache *cache, int64_t id, const kvc_store *store, int64_t *size) {
    kvc_carrier c;
    kvc_departure d;
    int64_t num_written = 0;
    if (!size) return kvc_fail(KVC_ERR_INVALID, "size is NULL");
    *size = 0;
    KVC_TRY(carrier_init(&c, cache, store));
    kvc_lock(cache);
    const kvc_node *node = kvc_node_of(cache, id);
    kvc_status status = kvc_unlock(cache, node ? describe(&c, node, &d) : KVC_OK);
    if (node && status == KVC_OK) status = write_block(&c, &d, size, &num_written);
    carrier_destroy(&c);
    return status;
}

kvc_status kvc_store_new_blocks(kvc_cache *cache, const kvc_store *store, int64_t *num_written) {
    kvc_carrier c;
    kvc_departure d;
    int is_there = 0;
    int64_t size;
    if (!num_written) return kvc_fail(KVC_ERR_INVALID, "num_written is NULL");
    *num_written = 0;
    KVC_TRY(carrier_init(&c, cache, store));
    kvc_status status;
    do {
        status = take_block(&c, &d, &is_there);
        if (status == KVC_OK && is_there) status = write_block(&c, &d, &size, num_written);
    } while (status == KVC_OK && is_there);
    carrier_destroy(&c);
    return status;
}

/* ---- in ---------------------------------------------------------------------------------------------------------- */

/* The full blocks of a prompt that are to be fetched. */
typedef struct missing {
    int32_t first; /* number of the next one */
    int64_t num;
    uint8_t name[KVC_NAME_BYTES]; /* of the block before, then of the block itself */
} missing;

static kvc_status begin(kvc_fetch *f, kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens,
                        missing *blocks) {
    const int32_t size = prefix->cache->pools[0].block_size;
    int32_t known = 0;
    kvc_prefix_lock(prefix);
    const kvc_status status = kvc_fetch_begin(f, prefix, tokens, num_tokens, &known, blocks->name);
    blocks->first = known / size;
    blocks->num = prefix->num_leaving ? 0 : num_tokens / size - blocks->first;
    return kvc_unlock(prefix->cache, status);
}

/* Sets *is_kept to whether block number `block` of the prompt is kept.  If it is, the fetch goes on behind it. */
static kvc_status pass_kept(kvc_fetch *f, int32_t block, int32_t *is_kept) {
    const int32_t size = f->prefix->cache->pools[0].block_size;
    const int64_t begin = (int64_t)block * size;
    const kvc_token_span part = kvc_tokens_part(f->tokens, begin, begin + size);
    kvc_node *last; /* the node that ends where the block begins; NULL: on failure, or if nothing may follow it now */
    kvc_prefix_lock(f->prefix);
    const kvc_status status = kvc_fetch_find(f, (int32_t)begin, &last);
    kvc_node *node = last ? kvc_node_child(last, &part) : NULL;
    *is_kept = node && kvc_node_is_live(node);
    if (*is_kept) kvc_fetch_pass(f, node);
    return kvc_unlock(f->prefix->cache, status);
}

/* Reads the next block, and adds it.  *is_kept is 0 if the store lacks a block without rows, or is about to lose it,
 * there is no room, or a prompt was forgotten meanwhile.  *is_new is 0 if the block brings nothing. */
static kvc_status fetch_block(kvc_carrier *c, kvc_fetch *f, const missing *blocks, int32_t *is_kept, int32_t *is_new) {
    const uint8_t *name = blocks->name;
    int64_t size = 0;
    *is_kept = *is_new = 0;
    if (!is_leaving(c->cache, name)) KVC_TRY(c->store.read(c->store.user, name, c->value, c->max_bytes, &size));
    if (!size) return pass_kept(f, blocks->first, is_kept);
    if (size > c->max_bytes)
        return kvc_fail(KVC_ERR_FORMAT, "the value has %lld bytes, and no block more than %lld", (long long)size,
                        (long long)c->max_bytes);
    KVC_TRY(kvc_value_check(c->value, size, name, &f->prefix->owner, c->crc));
    return kvc_prefix_add_block(f, blocks->first, c->value + KVC_VALUE_HEADER, size - KVC_VALUE_HEADER, is_kept,
                                is_new);
}

/* Fetches blocks until one is missing. */
static kvc_status fetch_blocks(kvc_carrier *c, kvc_fetch *f, missing *blocks, int32_t *fetched) {
    const int32_t size = c->cache->pools[0].block_size;
    kvc_status status = KVC_OK;
    for (int32_t is_kept = 1, is_new; status == KVC_OK && is_kept && blocks->num; blocks->num--, blocks->first++) {
        kvc_name_blocks(f->prefix->salt, blocks->name, f->tokens, (int64_t)blocks->first * size, size, 1, blocks->name);
        status = fetch_block(c, f, blocks, &is_kept, &is_new);
        if (is_new) *fetched += size;
    }
    return status;
}

/* Fetches the blocks that are missing in the first num_tokens tokens, and marks the blocks of the prompt as used. */
static kvc_status fetch_all(kvc_carrier *c, kvc_prefix *prefix, const kvc_tokens *tokens, int64_t num_tokens,
                            int32_t *fetched) {
    missing blocks;
    kvc_fetch f;
    KVC_TRY(begin(&f, prefix, tokens, num_tokens, &blocks));
    if (blocks.num <= 0) return KVC_OK;
    kvc_lock(c->cache);
    KVC_TRY(kvc_unlock(c->cache, take_memory(c, prefix, 1)));
    const kvc_status status = fetch_blocks(c, &f, &blocks, fetched);
    kvc_lock(c->cache);
    kvc_fetch_touch(&f);
    return kvc_unlock(c->cache, status);
}

kvc_status kvc_prefix_fetch(kvc_prefix *prefix, const kvc_tokens *from, int64_t max_matched, const kvc_store *store,
                            int32_t *fetched) {
    kvc_tokens tokens;
    kvc_carrier c;
    if (!fetched) return kvc_fail(KVC_ERR_INVALID, "fetched is NULL");
    *fetched = 0;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    int64_t num_tokens;
    KVC_TRY(kvc_match_limit(&tokens, max_matched, &num_tokens));
    KVC_TRY(carrier_init(&c, prefix->cache, store));
    const kvc_status status = fetch_all(&c, prefix, &tokens, num_tokens, fetched);
    carrier_destroy(&c);
    return status;
}
