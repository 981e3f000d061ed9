/* saved_layers.c: the layers and limits of a cache in the tables of a saved state.  A field that differs from what any
 * cache can have makes a file "altered". */
#include "saved/saved_layers.h"

#include <string.h>

#include "cache/config.h"

/* ---- writing ----------------------------------------------------------------------------------------------------- */

int64_t kvc_count_freqs(const kvc_cache *cache) {
    int64_t num = 0;
    for (int32_t r = 0; r < cache->ropes.num; r++) num += cache->ropes.items[r].num_freqs;
    return num;
}

static kvc_saved_layer saved_layer(const kvc_cache *cache, int32_t i) {
    const kvc_layer *layer = &cache->layers[i];
    const kvc_policy *policy = &layer->policy;
    const kvc_rope *rope = kvc_rope_of(cache, i);
    kvc_saved_layer saved = {.num_kv_heads = layer->num_kv_heads,
                             .k_dim = layer->k_dim,
                             .v_dim = layer->v_dim,
                             .k_type = layer->k_type,
                             .v_type = layer->v_type,
                             .k_transform = layer->k_transform,
                             .v_transform = layer->v_transform,
                             .value_in_key = layer->value_in_key != 0,
                             .share = layer->share,
                             .group = cache->group_of[i],
                             .kind = policy->kind,
                             .window = policy->window,
                             .num_sink_tokens = policy->num_sink_tokens,
                             .resume_window = policy->resume_window,
                             .attention_chunk_size = policy->attention_chunk_size,
                             .max_len = policy->max_len,
                             .stride = kvc_policy_stride(policy) > 1 ? policy->stride : 0,
                             .rope = layer->rope.kind};
    if (!rope) return saved;
    saved.interleaved = rope->interleaved != 0;
    saved.first_dim = rope->first_dim;
    saved.num_freqs = rope->num_freqs;
    saved.first_freq = rope->inv_freq - cache->ropes.inv_freqs;
    return saved;
}

void kvc_save_layers(const kvc_cache *cache, const kvc_format *format) {
    for (int32_t i = 0; i < cache->num_layers; i++) format->layers[i] = saved_layer(cache, i);
    const size_t num = (size_t)kvc_count_freqs(cache);
    if (num) memcpy(format->inv_freq, cache->ropes.inv_freqs, num * sizeof *format->inv_freq);
}

void kvc_save_limits(const kvc_cache *cache, kvc_saved_state *state) {
    state->block_size = cache->pools[0].block_size;
    state->max_seq_len = cache->limits.max_seq_len;
    state->max_sequences = cache->limits.max_sequences;
    state->capacity = cache->limits.has_own_capacity ? cache->limits.capacity : 0;
    state->max_bytes = cache->limits.max_bytes;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

/* Stands for the function of a caller's that moves keys, which no file has.  It fails. */
static int32_t no_shift(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                        int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    return 1;
}

/* Returns whether all of `num` numbers fit an int32. */
static int are_int32(const int64_t *numbers, size_t num) {
    size_t i = 0;
    while (i < num && numbers[i] >= INT32_MIN && numbers[i] <= INT32_MAX) i++;
    return i == num;
}

static kvc_status read_layer(const kvc_format *format, int32_t i, kvc_layer *layer) {
    const kvc_saved_layer *saved = &format->layers[i];
    const int64_t num_freqs = format->state->num_freqs;
    if (!are_int32((const int64_t *)saved, sizeof *saved / sizeof(int64_t)) || saved->first_freq < 0 ||
        saved->first_freq > num_freqs || saved->num_freqs < 0 || saved->num_freqs > num_freqs - saved->first_freq ||
        saved->group < 0 || saved->group >= format->state->num_groups || saved->reserved[0] || saved->reserved[1])
        return kvc_fail(KVC_ERR_FORMAT, "altered: layer %d in the table of layers cannot be", i);
    *layer = (kvc_layer){.num_kv_heads = (int32_t)saved->num_kv_heads,
                         .k_dim = (int32_t)saved->k_dim,
                         .v_dim = (int32_t)saved->v_dim,
                         .k_type = (int32_t)saved->k_type,
                         .v_type = (int32_t)saved->v_type,
                         .k_transform = (int32_t)saved->k_transform,
                         .v_transform = (int32_t)saved->v_transform,
                         .value_in_key = (int32_t)saved->value_in_key,
                         .share = (int32_t)saved->share,
                         .policy = {.kind = (int32_t)saved->kind,
                                    .window = (int32_t)saved->window,
                                    .num_sink_tokens = (int32_t)saved->num_sink_tokens,
                                    .resume_window = (int32_t)saved->resume_window,
                                    .attention_chunk_size = (int32_t)saved->attention_chunk_size,
                                    .max_len = (int32_t)saved->max_len,
                                    .stride = (int32_t)saved->stride},
                         .rope = {.kind = (int32_t)saved->rope,
                                  .interleaved = (int32_t)saved->interleaved,
                                  .first_dim = (int32_t)saved->first_dim,
                                  .num_freqs = (int32_t)saved->num_freqs,
                                  .inv_freq = format->inv_freq + saved->first_freq}};
    if (layer->rope.kind == KVC_ROPE_FUNCTION) layer->rope.shift = no_shift;
    return KVC_OK;
}

kvc_status kvc_read_layers(const kvc_format *format, kvc_layer *layers, kvc_config *config) {
    const kvc_saved_state *state = format->state;
    kvc_config checked;
    if (state->num_layers > 1 << 20 || state->block_size < 1 || state->block_size > INT32_MAX)
        return kvc_fail(KVC_ERR_FORMAT, "altered: %lld layers and blocks of %lld slots", (long long)state->num_layers,
                        (long long)state->block_size);
    *config = (kvc_config){.struct_size = sizeof *config,
                           .layers = layers,
                           .layer_size = sizeof *layers,
                           .num_layers = (int32_t)state->num_layers,
                           .block_size = (int32_t)state->block_size,
                           .max_seq_len = state->max_seq_len,
                           .max_sequences = state->max_sequences,
                           .capacity = state->capacity,
                           .max_bytes = state->max_bytes};
    for (int32_t i = 0; i < config->num_layers; i++) {
        const kvc_status status = read_layer(format, i, &layers[i]);
        if (status != KVC_OK) return status;
    }
    if (kvc_config_read(&checked, config) == KVC_OK) return KVC_OK;
    char why[256];
    strncpy(why, kvc_last_error(), sizeof why - 1);
    why[sizeof why - 1] = 0;
    return kvc_fail(KVC_ERR_FORMAT, "altered: no cache is like this: %s", why);
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

/* Returns the name of the first field in which layers differ, and the values of both; NULL if they match. */
static const char *find_difference(const kvc_layer *a, const kvc_layer *b, int32_t values[2]) {
    const int is_none = a->policy.kind == KVC_NONE, keeps_tokens = kvc_policy_keeps_tokens(&a->policy);
    const struct {
        const char *name;
        int32_t a, b;
        int counts; /* layers of this kind use the field */
    } fields[] = {{"policy.kind", a->policy.kind, b->policy.kind, 1},
                  {"num_kv_heads", a->num_kv_heads, b->num_kv_heads, !is_none},
                  {"k_dim", a->k_dim, b->k_dim, !is_none},
                  {"v_dim", a->v_dim, b->v_dim, !is_none},
                  {"k_type", a->k_type, b->k_type, !is_none},
                  {"v_type", a->v_type, b->v_type, !is_none},
                  {"k_transform", a->k_transform, b->k_transform, !is_none},
                  {"v_transform", a->v_transform, b->v_transform, !is_none},
                  {"value_in_key", a->value_in_key != 0, b->value_in_key != 0, !is_none},
                  {"share", a->share, b->share, 1},
                  {"rope.kind", a->rope.kind, b->rope.kind, keeps_tokens}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        values[0] = fields[i].a;
        values[1] = fields[i].b;
        if (fields[i].counts && fields[i].a != fields[i].b) return fields[i].name;
    }
    values[0] = kvc_policy_stride(&a->policy);
    values[1] = kvc_policy_stride(&b->policy);
    if (values[0] != values[1]) return "policy.stride";
    values[0] = values[1] = -1; /* equal: the difference is of more than one number */
    if (!kvc_policy_equal(&a->policy, &b->policy)) return "policy";
    if (keeps_tokens && a->rope.kind == KVC_ROPE_FREQUENCIES && !kvc_rope_equal(&a->rope, &b->rope)) return "rope";
    return NULL;
}

kvc_status kvc_match_layers(const kvc_config *saved, const kvc_config *own) {
    if (saved->num_layers != own->num_layers)
        return kvc_fail(KVC_ERR_FORMAT, "of another shape: the file has %d layers, the cache %d", saved->num_layers,
                        own->num_layers);
    for (int32_t i = 0; i < own->num_layers; i++) {
        const kvc_layer a = kvc_config_layer(saved, i), b = kvc_config_layer(own, i);
        int32_t values[2];
        const char *name = find_difference(&a, &b, values);
        if (!name) continue;
        if (values[0] == values[1])
            return kvc_fail(KVC_ERR_FORMAT, "of another shape: layers[%d].%s differs from the cache's", i, name);
        return kvc_fail(KVC_ERR_FORMAT, "of another shape: layers[%d].%s is %d in the file, and %d in the cache", i,
                        name, values[0], values[1]);
    }
    return KVC_OK;
}
