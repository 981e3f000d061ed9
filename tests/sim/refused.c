/* refused.c: calls of the simulated cache that must be refused, each for one argument that is just out of range.
 *
 * This file calls what the header does not allow; the rest of the simulation calls what it allows.  A refused call
 * changes nothing.
 */
#include <string.h>

#include "sim.h"

/* A number below all allowed numbers. */
static int below(void) { return pick(3) ? -1 : INT32_MIN; }

/* A number that no layer has. */
static int no_layer(const world *w) { return pick(2) ? w->num_layers : below(); }

static kvc_status edit_wrongly(const client *c, int64_t id, int64_t other) {
    kvc_cache *cache = c->w->cache;
    const int position = pick(MOST);
    const int32_t falling[] = {position, position + 1, position + pick(2)}, negative[] = {below(), position};
    switch (pick(15)) {
    case 0: return kvc_truncate(cache, id, below());
    case 1: return kvc_remove(cache, id, below(), position, pick(2));
    case 2: return kvc_remove(cache, id, position + 1, position, pick(2));
    case 3: return kvc_shift(cache, id, below(), KVC_END, 1);
    case 4: return kvc_shift(cache, id, position + 1, position, 1);
    case 5: return kvc_divide(cache, id, 0, KVC_END, pick(2) ? 0 : below());
    case 6: return kvc_copy_prefix(cache, id, id, position);
    case 7: return kvc_copy_prefix(cache, id, other, below());
    case 8: return kvc_share(cache, id, id, 0, KVC_END);
    case 9: return kvc_share(cache, id, other, below(), KVC_END);
    case 10: return kvc_mark_inexact(cache, id, below());
    case 11: return kvc_keep_positions(cache, id, falling, 3);
    case 12: return kvc_keep_positions(cache, id, negative, 2);
    case 13: return kvc_keep_positions(cache, id, pick(2) ? NULL : negative, pick(2) ? 1 : below());
    default: return kvc_reserve(cache, id, below());
    }
}

static kvc_status read_wrongly(const client *c, int64_t id) {
    const world *w = c->w;
    rows r;
    kvc_span span;
    kvc_hold *held;
    int64_t num;
    const kvc_rows_out out = out_of(w, 0, &r);
    const kvc_rows_in in = in_of(w, 0, &r);
    const kvc_weights_args weights = {
        .struct_size = sizeof weights, .q = &r, .weights = r.k[0][0], .num_queries = below()};
    switch (pick(7)) {
    case 6: return kvc_weights(w->cache, id, 0, &weights);
    case 0: return kvc_extract(w->cache, id, no_layer(w), 0, 1, &out);
    case 1: return kvc_extract(w->cache, id, 0, below(), 1, &out);
    case 2: return kvc_gather(w->cache, id, 0, 0, MOST + 1, &out);
    case 3: return kvc_gather(w->cache, id, 0, below(), 1, &out);
    case 4: return kvc_inject(w->cache, id, no_layer(w), 0, 1, &in);
    default: return kvc_spans(w->cache, id, no_layer(w), &span, sizeof span, 1, &num, &held);
    }
}

/* Makes a batch of one token, or of none. */
static kvc_status begin_wrongly(const client *c, int64_t id) {
    const int32_t position = below();
    const int has_tokens = pick(2);
    kvc_batch *batch;
    const kvc_begin_args args = {.struct_size = sizeof args,
                                 .num_tokens = has_tokens,
                                 .seq_ids = &id,
                                 .positions = has_tokens ? &position : NULL};
    return kvc_begin_with(c->w->cache, &args, &batch);
}

/* Makes a prefix with one field out of range. */
static kvc_status new_prefix_wrongly(const client *c) {
    kvc_prefix_config config = {.struct_size = sizeof config, .fingerprint = "a model"};
    kvc_prefix *handle;
    switch (pick(9)) {
    case 0: config.fingerprint = ""; break;
    case 1: config.quota = below(); break;
    case 2: config.ttl_ms = below(); break;
    case 3: config.reuse_min_tokens = below(); break;
    case 4: config.max_events = below(); break;
    case 5: config.state_bytes = below(); break;
    case 6: config.max_checkpoint_bytes = 1 + pick(100); break; /* without states */
    case 7: config.state_bytes = 2 + pick(9), config.max_checkpoint_bytes = config.state_bytes - 1; break;
    default: config.salt_size = 1;
    }
    return kvc_prefix_new(c->w->cache, &config, &handle);
}

/* Makes a cache with one field out of range. */
static kvc_status new_cache_wrongly(const client *c) {
    kvc_layer layers[MOST_LAYERS];
    kvc_config config = c->w->config;
    kvc_cache *cache;
    const int l = pick(config.num_layers);
    kvc_layer *layer = &layers[l];
    memcpy(layers, c->w->layers, sizeof layers);
    config.layers = layers;
    switch (pick(21)) {
    case 0: config.num_layers = pick(2) ? 0 : below(); break;
    case 1: config.block_size = below(); break;
    case 2: config.capacity = below(); break;
    case 3: config.max_bytes = below(); break;
    case 4: config.max_seq_len = below(); break;
    case 5: config.max_sequences = below(); break;
    case 6: config.num_threads = below(); break;
    case 7: config.layer_size = 1; break;
    case 8: layer->num_kv_heads = pick(2) ? 0 : below(); break;
    case 9: layer->k_dim = pick(2) ? 0 : below(); break;
    case 10: layer->v_dim = below(); break;
    case 11: layer->k_type = pick(2) ? KVC_INT4 + 1 : below(); break;
    case 12: layer->share = pick(2) ? l + 1 : below(); break;
    case 13: layer->policy = (kvc_policy){.kind = KVC_SLIDING, .window = pick(2) ? 0 : below()}; break;
    case 14: layer->policy = (kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = pick(2) ? 0 : below()}; break;
    case 15: layer->policy = (kvc_policy){.kind = KVC_SLIDING, .window = 3, .num_sink_tokens = below()}; break;
    case 18: layer->policy = (kvc_policy){.kind = KVC_FULL, .stride = below()}; break;
    case 19: layer->policy = (kvc_policy){.kind = KVC_SLIDING, .window = 3, .stride = 2 + pick(3)}; break;
    case 16: layer->sketch_bits = pick(2) ? 1 + 2 * pick(2) : below(); break;
    case 17: layer->sketch_bits = 2, layer->k_dim = DIM + pick(2) * ROW; break;
    default: layer->rope.kind = KVC_ROPE_FREQUENCIES; layer->rope.first_dim = layer->k_dim - 1;
    }
    if (layer->policy.kind != c->w->layers[l].policy.kind) layer->share = 0;
    return kvc_cache_new(&config, &cache);
}

static void call_once(client *c, int64_t id, int64_t other) {
    static const char *const names[] = {"an edit", "a reading", "a begin", "a new prefix", "a new cache"};
    const int kind = pick(5);
    kvc_status status;
    begin_call(c, "a wrong call");
    switch (kind) {
    case 0: status = edit_wrongly(c, id, other); break;
    case 1: status = read_wrongly(c, id); break;
    case 2: status = begin_wrongly(c, id); break;
    case 3: status = new_prefix_wrongly(c); break;
    default: status = new_cache_wrongly(c);
    }
    if (status == KVC_OK) fail(c, "%s is not refused", names[kind]);
    ended(c, status, MAY_BE_INVALID | MAY_INDEX | MAY_BE_UNSUPPORTED);
}

void call_wrongly(client *c) {
    const int s = take(c), to = take(c);
    for (int i = 0; i < 8 && s >= 0 && to >= 0; i++) call_once(c, id_of(s), id_of(to));
    let_go(c, s);
    let_go(c, to);
}
