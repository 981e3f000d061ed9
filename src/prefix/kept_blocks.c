/* kept_blocks.c: how blocks get out of a cache, into stores, and back; their names; events.
 *
 * A payload is a full block as bytes: one for each layer, 1 if its rows follow, otherwise 0; then the rows of these
 * layers, keys before values; and perhaps the position of a recurrent state within the block, and the state.  A layer
 * with a stride has a row for each `stride` tokens: kvc_rows_below counts them.  A node is a kept block in the tree of
 * a prefix. */
#include <string.h>

#include "base/dtype.h"
#include "cache/check.h"
#include "cache/waiting.h"
#include "edit/kept.h"
#include "prefix/fetch.h"
#include "read/read.h"
#include "space/evict.h"

/* ---- payloads ---------------------------------------------------------------------------------------------------- */

enum { POSITION_BYTES = 4 }; /* of a state's position, which stands before it */

/* The rows of one layer in a payload. */
typedef struct rows {
    int64_t k_row, v_row; /* bytes of a row; v_row is 0 if values lie in the keys or the layer has none */
    int64_t k_size, size; /* bytes of the keys, and of all */
} rows;

static rows rows_of(const kvc_cache *cache, int32_t layer, int32_t num_tokens) {
    const kvc_layer *config = &cache->layers[layer];
    rows r = {.k_row = (int64_t)kvc_row_bytes(config->k_type, config->k_dim)};
    if (kvc_stores_values(config)) r.v_row = (int64_t)kvc_row_bytes(config->v_type, config->v_dim);
    const int64_t num_rows =
        (int64_t)config->num_kv_heads * kvc_rows_below(num_tokens, cache->pools[cache->group_of[layer]].stride);
    r.k_size = num_rows * r.k_row;
    r.size = r.k_size + num_rows * r.v_row;
    return r;
}

/* Returns the bytes of a payload without a state in which no layer is missing. */
static int64_t rows_bytes(const kvc_cache *cache) {
    int64_t size = cache->num_layers;
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (kvc_keeps_tokens(cache, i)) size += rows_of(cache, i, cache->pools[0].block_size).size;
    return size;
}

int64_t kvc_most_payload_bytes(const kvc_cache *cache, int64_t state_bytes) {
    return rows_bytes(cache) + (state_bytes ? POSITION_BYTES + state_bytes : 0);
}

/* A payload that was read. */
typedef struct kvc_payload {
    const uint8_t *bytes;
    const uint8_t *rows;  /* of the next layer */
    const uint8_t *state; /* behind its position; NULL: it has none */
    int64_t state_bytes;
    int32_t position;
} kvc_payload;

/* Sets *end to where the rows of num_tokens tokens end in a payload, or behind its end if it has fewer bytes, and *num
 * to how many layers have rows.  KVC_ERR_FORMAT if a layer's byte is neither 0 nor 1, or the layer has no rows. */
static kvc_status find_end(const kvc_cache *cache, const uint8_t *bytes, int64_t size, int32_t num_tokens, int64_t *end,
                           int64_t *num) {
    *end = cache->num_layers, *num = 0;
    for (int32_t i = 0; i < cache->num_layers && size >= *end; i++) {
        if (bytes[i] > kvc_keeps_tokens(cache, i))
            return kvc_fail(KVC_ERR_FORMAT, "the payload has %d for layer %d", bytes[i], i);
        if (!bytes[i]) continue;
        *end += rows_of(cache, i, num_tokens).size;
        (*num)++;
    }
    return KVC_OK;
}

/* Finds the state of a payload of a full block; KVC_ERR_FORMAT if it has fewer bytes than it says. */
static kvc_status read_payload(const kvc_cache *cache, const void *bytes, int64_t size, kvc_payload *p) {
    int64_t end, num;
    *p = (kvc_payload){.bytes = bytes, .rows = (const uint8_t *)bytes + cache->num_layers};
    KVC_TRY(find_end(cache, bytes, size, cache->pools[0].block_size, &end, &num));
    if (size < end || (size > end && size <= end + POSITION_BYTES))
        return kvc_fail(KVC_ERR_FORMAT, "the payload has %lld bytes, of rows with %lld", (long long)size,
                        (long long)end);
    if (size == end) return KVC_OK;
    p->position = (int32_t)kvc_get_integer(p->bytes + end, POSITION_BYTES);
    p->state = p->bytes + end + POSITION_BYTES;
    p->state_bytes = size - end - POSITION_BYTES;
    return KVC_OK;
}

kvc_status kvc_join_payloads(const kvc_cache *cache, const void *first, int64_t first_size, const void *second,
                             int64_t second_size, void *to, int64_t max_bytes, int64_t *size) {
    kvc_payload parts[2];
    uint8_t *bytes = to, *at = bytes;
    KVC_TRY(read_payload(cache, first, first_size, &parts[0]));
    KVC_TRY(read_payload(cache, second, second_size, &parts[1]));
    const kvc_payload *with_state = parts[1].position > parts[0].position ? &parts[1] : &parts[0];
    int64_t most = cache->num_layers + (with_state->state ? POSITION_BYTES + with_state->state_bytes : 0);
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (parts[0].bytes[i] || parts[1].bytes[i]) most += rows_of(cache, i, cache->pools[0].block_size).size;
    if (max_bytes < most)
        return kvc_fail(KVC_ERR_INVALID, "max_bytes is %lld: both have %lld together", (long long)max_bytes,
                        (long long)most);
    at += cache->num_layers;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const int64_t num = rows_of(cache, i, cache->pools[0].block_size).size;
        const kvc_payload *from = parts[0].bytes[i] ? &parts[0] : &parts[1];
        bytes[i] = parts[0].bytes[i] || parts[1].bytes[i];
        if (bytes[i]) memcpy(at, from->rows, (size_t)num);
        at += bytes[i] ? num : 0;
        for (int j = 0; j < 2; j++) parts[j].rows += parts[j].bytes[i] ? num : 0;
    }
    if (with_state->state) {
        kvc_put_integer(at, POSITION_BYTES, (uint64_t)with_state->position);
        memcpy(at + POSITION_BYTES, with_state->state, (size_t)with_state->state_bytes);
    }
    *size = most;
    return KVC_OK;
}

/* ---- out --------------------------------------------------------------------------------------------------------- */

kvc_status kvc_take_new_blocks(kvc_cache *cache, kvc_new_block *blocks, size_t new_block_size, int64_t max_blocks,
                               int64_t *num_blocks) {
    KVC_TRY(kvc_check_output(blocks, new_block_size, max_blocks, kvc_new_block_least_size, sizeof *blocks, "blocks"));
    if (!num_blocks) return kvc_fail(KVC_ERR_INVALID, "num_blocks is NULL");
    *num_blocks = 0;
    kvc_lock(cache);
    for (kvc_node *node; *num_blocks < max_blocks && (node = kvc_prefix_next_new(cache)); kvc_node_take_out(node)) {
        kvc_new_block block = {node->tree->prefix->user, node->rows->id, node->begin, node->end, {0}};
        memcpy(block.name, node->named.name, sizeof block.name);
        kvc_write_struct((char *)blocks + (size_t)(*num_blocks)++ * new_block_size, new_block_size, &block,
                         sizeof block);
    }
    return kvc_unlock(cache, KVC_OK);
}

kvc_status kvc_prefix_take_events(kvc_prefix *prefix, kvc_prefix_event *events, size_t event_size, int64_t max_events,
                                  int64_t *num_events, int64_t *num_lost) {
    KVC_TRY(kvc_check_output(events, event_size, max_events, kvc_prefix_event_least_size, sizeof *events, "events"));
    if (!num_events || !num_lost) return kvc_fail(KVC_ERR_INVALID, "num_%s is NULL", num_events ? "lost" : "events");
    kvc_prefix_lock_late(prefix);
    kvc_prefix_event event;
    for (*num_events = 0; *num_events < max_events && kvc_events_take(&prefix->events, &event); ++*num_events)
        kvc_write_struct((char *)events + (size_t)*num_events * event_size, event_size, &event, sizeof event);
    *num_lost = prefix->events.num_lost;
    prefix->events.num_lost = 0;
    return kvc_unlock(prefix->cache, KVC_OK);
}

kvc_status kvc_prefix_names(kvc_prefix *prefix, const kvc_tokens *from, uint8_t *names, int64_t max_names,
                            int64_t *num_names) {
    kvc_tokens tokens;
    const int32_t block = prefix->cache->pools[0].block_size;
    KVC_TRY(kvc_read_tokens(from, &tokens));
    if (max_names < 0 || (max_names && !names))
        return kvc_fail(KVC_ERR_INVALID, "max_names is %lld%s", (long long)max_names,
                        max_names < 0 ? ": it must be at least 0" : " and names is NULL");
    if (!num_names) return kvc_fail(KVC_ERR_INVALID, "num_names is NULL");
    *num_names = tokens.num_tokens / block;
    kvc_name_blocks(prefix->salt, prefix->root, &tokens, 0, block, *num_names < max_names ? *num_names : max_names,
                    names);
    return KVC_OK;
}

/* A block that is being read: its rows lie in pinned blocks of pools, so that they stay though they are evicted. */
typedef struct departing {
    kvc_cache *cache;
    kvc_run *runs; /* [num] of the groups in which the block has all its rows */
    int32_t num, begin, end;
    kvc_state_use use; /* of the last state within it, if it has one that fits */
    int32_t position;  /* of the state */
} departing;

static uint64_t departing_bytes(const departing *d) { return (uint64_t)d->num * sizeof *d->runs; }

/* Pins a block's rows and uses its state, so that they stay while the mutex is released.  A state with its position
 * that has more than max_state bytes is left out.  Call as a reader (cache/waiting.h). */
static kvc_status begin_departing(departing *d, const kvc_node *node, int64_t max_state) {
    kvc_cache *cache = d->cache;
    const kvc_run_list *lists = node->rows->runs;
    const kvc_node *last = node->parent ? kvc_node_with_state(node->parent, &node->tokens) : NULL;
    d->begin = node->begin, d->end = node->end;
    for (int32_t g = 0; g < cache->num_token_groups; g++)
        if (lists[g].num_rows == kvc_node_rows(node, g)) d->num += lists[g].num;
    if (!d->num) return KVC_OK;
    d->runs = kvc_memory_alloc(&cache->memory, departing_bytes(d), KVC_MEMORY_SCRATCH, -1);
    if (!d->runs) return kvc_fail(KVC_ERR_NOMEM, "out of memory to read %d runs of a block", d->num);
    kvc_run *to = d->runs;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        if (lists[g].num_rows != kvc_node_rows(node, g)) continue;
        memcpy(to, kvc_runs_begin(&lists[g]), (size_t)lists[g].num * sizeof *to);
        to += lists[g].num;
    }
    for (int32_t i = 0; i < d->num; i++) kvc_pool_pin(d->runs[i].block);
    if (!last || POSITION_BYTES + last->checkpoint->num_bytes > max_state) return KVC_OK;
    d->position = last->end;
    kvc_state_use_begin(cache, &d->use, last->checkpoint);
    return KVC_OK;
}

static void end_departing(const departing *d) {
    kvc_state_use_end(d->cache, &d->use);
    for (int32_t i = 0; i < d->num; i++) kvc_pool_unpin(d->runs[i].block->pool, d->runs[i].block);
    kvc_memory_free(&d->cache->memory, d->runs, departing_bytes(d), KVC_MEMORY_SCRATCH, -1);
}

/* Writes the rows of one layer; returns whether the block has any. */
static int write_layer(const departing *d, int32_t layer, const rows *r, uint8_t *at) {
    const int32_t stride = d->cache->pools[d->cache->group_of[layer]].stride, begin = kvc_rows_below(d->begin, stride),
                  num = kvc_rows_below(d->end, stride) - begin;
    const kvc_rows_out out = {.struct_size = sizeof out,
                              .k = at,
                              .v = r->v_row ? at + r->k_size : NULL,
                              .k_row_stride = r->k_row,
                              .k_head_stride = num * r->k_row,
                              .v_row_stride = r->v_row,
                              .v_head_stride = num * r->v_row,
                              .raw = 1};
    kvc_reader reader = kvc_reader_for(d->cache, layer, &out, /* scratch */ NULL); /* exact keys are not rotated */
    int has_rows = 0;
    for (int32_t i = 0; i < d->num; i++) {
        const kvc_run *run = &d->runs[i];
        if (run->block->pool->group != d->cache->group_of[layer]) continue;
        kvc_reader_copy(&reader, run, &out, run->position - begin);
        has_rows = 1;
    }
    return has_rows;
}

/* Writes a payload, without the mutex; returns its bytes. */
static int64_t write_payload(const departing *d, uint8_t *payload) {
    const kvc_cache *cache = d->cache;
    int64_t size = cache->num_layers;
    memset(payload, 0, (size_t)cache->num_layers);
    for (int32_t i = 0; i < cache->num_layers; i++) {
        if (!kvc_keeps_tokens(cache, i)) continue;
        const rows r = rows_of(cache, i, d->end - d->begin);
        payload[i] = (uint8_t)write_layer(d, i, &r, payload + size);
        if (payload[i]) size += r.size;
    }
    const kvc_checkpoint *state = d->use.checkpoint;
    if (!state) return size;
    kvc_put_integer(payload + size, POSITION_BYTES, (uint64_t)d->position);
    memcpy(payload + size + POSITION_BYTES, state + 1, (size_t)state->num_bytes);
    return size + POSITION_BYTES + state->num_bytes;
}

kvc_status kvc_read_block(kvc_cache *cache, int64_t id, void *payload, int64_t max_bytes, int64_t *size) {
    departing d = {.cache = cache};
    *size = 0;
    kvc_lock(cache);
    kvc_cache_begin_reading(cache);
    const kvc_node *node;
    while ((node = kvc_node_of(cache, id)) && node->rows->call.in_place) kvc_cache_find_all(cache);
    const kvc_status status = node ? begin_departing(&d, node, max_bytes - rows_bytes(cache)) : KVC_OK;
    if (d.runs) {
        kvc_unlock(cache, KVC_OK);
        *size = write_payload(&d, payload);
        kvc_lock(cache);
        end_departing(&d);
    }
    kvc_cache_end_reading(cache);
    return kvc_unlock(cache, status);
}

/* ---- in ---------------------------------------------------------------------------------------------------------- */

/* A block on its way in. */
typedef struct arrival {
    kvc_fetch *fetch;
    kvc_token_span tokens;
    const uint8_t *payload; /* its first bytes say which layers follow */
    int64_t size, id;       /* id: of the sequence that gets its rows */
    int64_t state_bytes;    /* the last ones of the payload; 0: it has no state */
    int32_t begin, end;
    int32_t position; /* of the state */
} arrival;

/* Finds the state behind the rows of a payload of `size` bytes.  Returns whether it is a state of the block. */
static int find_state(arrival *a, int64_t size) {
    a->state_bytes = a->size - size - POSITION_BYTES;
    if (a->state_bytes < 1 || a->state_bytes > a->fetch->prefix->state_bytes) return 0;
    a->position = (int32_t)kvc_get_integer(a->payload + size, POSITION_BYTES);
    return a->position > a->begin && a->position <= a->end;
}

/* Returns KVC_ERR_FORMAT unless the payload has as many bytes as it says, of layers that have rows, and perhaps a
 * state. */
static kvc_status resolve_payload(const kvc_cache *cache, arrival *a) {
    int64_t size, num;
    KVC_TRY(find_end(cache, a->payload, a->size, a->end - a->begin, &size, &num));
    if (kvc_check_groups(cache, a->payload, "payload") != KVC_OK)
        return kvc_fail(KVC_ERR_FORMAT, "the payload lacks layers of a group");
    if (num && (a->size == size || find_state(a, size))) return KVC_OK;
    return kvc_fail(KVC_ERR_FORMAT, "the payload has %lld bytes, of %lld layers with %lld", (long long)a->size,
                    (long long)num, (long long)size);
}

/* Writes the rows of a payload to the sequence that was made for them. */
static kvc_status write_rows(kvc_cache *cache, const arrival *a) {
    const uint8_t *at = a->payload + cache->num_layers;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        if (!a->payload[i]) continue;
        const kvc_layer *layer = &cache->layers[i];
        const rows r = rows_of(cache, i, a->end - a->begin);
        const int32_t num = kvc_rows_below(a->end - a->begin, cache->pools[cache->group_of[i]].stride);
        const kvc_rows_in in = {.struct_size = sizeof in,
                                .k = at,
                                .v = r.v_row ? at + r.k_size : NULL,
                                .k_row_stride = r.k_row,
                                .k_head_stride = num * r.k_row,
                                .v_row_stride = r.v_row,
                                .v_head_stride = num * r.v_row,
                                .k_type = layer->k_type,
                                .v_type = layer->v_type};
        KVC_TRY(kvc_inject(cache, a->id, i, a->begin, a->end, &in));
        at += r.size;
    }
    return KVC_OK;
}

/* Returns the tokens of a block up to a position. */
static kvc_token_span tokens_to(const arrival *a, int32_t end) {
    return (kvc_token_span){a->tokens.ids, a->tokens.digests, end - a->begin};
}

/* Returns whether a block behind `parent` ends where the state of a payload stands: a kept block, or a block of the
 * payload's rows.  There may be none, because rows of a layer with a stride stand for the tokens before them. */
static int has_place(const arrival *a, const kvc_node *parent) {
    const kvc_cache *cache = parent->tree->cache;
    const kvc_token_span part = tokens_to(a, a->position);
    const kvc_node *node = kvc_node_child(parent, &part);
    if (node && kvc_node_is_live(node)) return 1;
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const int32_t stride = cache->pools[cache->group_of[i]].stride;
        if (a->payload[i] && kvc_rows_below(a->position, stride) > kvc_rows_below(a->begin, stride)) return 1;
    }
    return 0;
}

/* Returns whether a payload has rows, or a state, that blocks behind `parent` lack. */
static int brings_more(const arrival *a, const kvc_node *parent) {
    const kvc_cache *cache = parent->tree->cache;
    const kvc_node *node = kvc_node_child(parent, &a->tokens);
    const kvc_token_span part = tokens_to(a, a->state_bytes > 0 ? a->position : a->begin);
    const kvc_node *with_state = kvc_node_with_state(parent, &part);
    if (part.num && (!with_state || with_state->end != a->position)) return 1;
    if (!node || !kvc_node_is_live(node)) return 1;
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (a->payload[i] && node->rows->runs[cache->group_of[i]].num_rows <
                                 kvc_rows_below(a->end - a->begin, cache->pools[cache->group_of[i]].stride))
            return 1;
    return 0;
}

/* Sets a->id if the block is to be added.  Sets *is_kept if it is kept already. */
static kvc_status begin_arrival(arrival *a, int32_t *is_kept) {
    kvc_node *last;
    KVC_TRY(kvc_fetch_find(a->fetch, a->begin, &last));
    if (!last) return KVC_OK;
    if (a->state_bytes > 0 && !has_place(a, last)) a->state_bytes = 0; /* the block is added without it */
    *is_kept = !brings_more(a, last);
    if (*is_kept)
        kvc_fetch_pass(a->fetch, kvc_node_child(last, &a->tokens)); /* to bring it again is a use */
    else
        a->id = kvc_cache_new_id(last->tree->cache);
    return KVC_OK;
}

/* Returns whether a block behind `parent` has the state of a payload, or there is room for it. */
static int has_room(const arrival *a, const kvc_node *parent) {
    const kvc_token_span part = tokens_to(a, a->position);
    const kvc_node *node = kvc_node_child(parent, &part);
    return (node && kvc_node_is_live(node) && node->checkpoint) ||
           kvc_checkpoints_have_room(&parent->tree->checkpoints, a->state_bytes);
}

/* Returns the block of the arrived rows up to a position, with a state at its end (NULL: without a state).  Returns
 * NULL if there is no memory. */
static kvc_node *add_rows(const arrival *a, kvc_node *parent, const kvc_sequence *arrived, int32_t end,
                          kvc_checkpoint *checkpoint) {
    kvc_tree *tree = parent->tree;
    const kvc_token_span tokens = tokens_to(a, end);
    kvc_node *same = kvc_node_child(parent, &tokens);
    const int is_listed = same && same->at;
    const int64_t used = kvc_fetch_place(a->fetch, end, same && kvc_node_is_live(same) ? same->rows->evicting.used : 0);
    kvc_node *list = NULL, *node = end == a->end ? kvc_node_find(parent, &tokens) : NULL;
    const kvc_status status = node ? KVC_OK : kvc_node_new(tree, arrived, a->begin, end, &list, &node);
    if (!node && status == KVC_OK && same && kvc_node_is_live(same)) node = same; /* no such rows have arrived */
    if (node && !list) kvc_fetch_use(a->fetch, node);
    if (list && (node = kvc_tree_add(parent, node, &tokens, used)) && !is_listed)
        kvc_node_take_out(node); /* it is stored */
    if (node && checkpoint) kvc_checkpoints_put(&tree->checkpoints, node, checkpoint);
    return node;
}

/* Adds the block to the tree if its rows were written, and blocks may still be added there.  Ends the use of its state,
 * and forgets the sequence that got the rows.  Returns the id of the block's rows, or -1. */
static int64_t add_to_tree(const arrival *a, kvc_status status, const kvc_state_use *use) {
    kvc_cache *cache = a->fetch->prefix->cache;
    kvc_sequence *arrived = kvc_table_find(&cache->sequences, a->id);
    kvc_checkpoint *checkpoint = use->checkpoint;
    kvc_node *node = NULL, *parent = NULL;
    if (status == KVC_OK && arrived && kvc_fetch_find(a->fetch, a->begin, &parent) == KVC_OK && parent &&
        (!checkpoint || has_room(a, parent))) {
        const int is_within = checkpoint && a->position < a->end; /* the state is that of a block of its own */
        if (!is_within || add_rows(a, parent, arrived, a->position, checkpoint))
            node = add_rows(a, parent, arrived, a->end, is_within ? NULL : checkpoint);
    }
    kvc_state_use_end(cache, use);
    if (arrived) kvc_cache_drop(cache, arrived);
    return node ? node->rows->id : -1;
}

/* Adds the block to the tree, and goes on from it. */
static void end_arrival(const arrival *a, kvc_status status, const kvc_state_use *use, int32_t *is_kept) {
    kvc_cache *cache = a->fetch->prefix->cache;
    kvc_node *node = kvc_node_of(cache, add_to_tree(a, status, use));
    *is_kept = node != NULL;
    if (node) kvc_fetch_pass(a->fetch, node);
}

kvc_status kvc_prefix_add_block(kvc_fetch *fetch, int32_t block, const void *payload, int64_t size, int32_t *is_kept,
                                int32_t *is_new) {
    kvc_cache *cache = fetch->prefix->cache;
    const int32_t block_size = cache->pools[0].block_size, begin = block * block_size, end = begin + block_size;
    arrival a = {fetch, kvc_tokens_part(fetch->tokens, begin, end), payload, size, -1, 0, begin, end, 0};
    *is_kept = *is_new = 0;
    KVC_TRY(resolve_payload(cache, &a));
    kvc_prefix_lock(fetch->prefix);
    kvc_cache_begin_reading(cache); /* whoever needs room waits until the rows may be evicted */
    kvc_state_use use = {0};        /* without its state the block would not be asked for again */
    kvc_status status = begin_arrival(&a, is_kept);
    if (a.id >= 0) {
        status = kvc_make_kept_unwritten(cache, a.id, a.begin, a.end, a.payload, fetch->before);
        if (status == KVC_OK && a.state_bytes > 0)
            status = kvc_checkpoint_take(cache, a.state_bytes, fetch->before, &use);
        kvc_unlock(cache, KVC_OK);
        if (status == KVC_OK) status = write_rows(cache, &a);
        if (use.checkpoint) memcpy(use.checkpoint + 1, a.payload + a.size - a.state_bytes, (size_t)a.state_bytes);
        kvc_lock(cache);
        end_arrival(&a, status, &use, is_kept);
        *is_new = *is_kept;
        if (status != KVC_ERR_FORMAT) status = KVC_OK; /* no room, or kvc_clear has taken the sequence */
    }
    kvc_cache_end_reading(cache);
    return kvc_unlock(cache, status);
}
