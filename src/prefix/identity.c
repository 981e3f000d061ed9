/* identity.c: what names of blocks stand for besides tokens: what computes the rows, and how a cache stores them. */
#include <string.h>

#include "base/blake2b.h"
#include "base/dtype.h"
#include "prefix/prefix.h"

/* Returns the transform of rows, if the type leaves it open.  Other types have no transform, or their own. */
static int64_t transform_of(int32_t type, int32_t transform) {
    const int is_open = type >= KVC_FLOAT_TYPES && type != KVC_INT6 && type != KVC_INT4;
    return is_open ? transform : KVC_TRANSFORM_NONE;
}

/* Adds the fields of a rope that its kind uses. */
static void add_rope(kvc_blake2b *hash, const kvc_rope *rope) {
    const int has_freqs = rope->kind == KVC_ROPE_FREQUENCIES;
    const int64_t fields[] = {rope->kind, has_freqs && rope->interleaved, has_freqs ? rope->first_dim : 0,
                              has_freqs ? rope->num_freqs : 0};
    kvc_blake2b_add_ints(hash, fields, sizeof fields / sizeof *fields);
    for (int64_t i = 0; i < fields[3]; i++) {
        const double freq = rope->inv_freq[i] == 0 ? 0 : rope->inv_freq[i]; /* -0 rotates as 0 does */
        int64_t bits;
        memcpy(&bits, &freq, sizeof bits);
        kvc_blake2b_add_ints(hash, &bits, 1);
    }
}

/* Adds the fields of a layer that its rows depend on.  A layer without rows of its own adds two numbers: `share`, which
 * is 1 + the layer whose rows it reads, or 0 if it has no attention; and 0. */
static void add_layer(kvc_blake2b *hash, const kvc_layer *layer) {
    const int64_t share = layer->share, has_own_rows = !share && layer->policy.kind != KVC_NONE,
                  has_values = kvc_stores_values(layer), in_key = layer->value_in_key != 0;
    const kvc_policy_fields policy = kvc_policy_read(&layer->policy);
    const int64_t fields[] = {layer->num_kv_heads,
                              layer->k_dim,
                              layer->v_dim,
                              layer->k_type,
                              transform_of(layer->k_type, layer->k_transform),
                              in_key,
                              has_values ? layer->v_type : 0,
                              has_values ? transform_of(layer->v_type, layer->v_transform) : 0};
    kvc_blake2b_add_ints(hash, &share, 1);
    kvc_blake2b_add_ints(hash, &has_own_rows, 1);
    if (!has_own_rows) return;
    kvc_blake2b_add_ints(hash, fields, sizeof fields / sizeof *fields);
    kvc_blake2b_add_ints(hash, policy.fields, sizeof policy.fields / sizeof *policy.fields);
    add_rope(hash, &layer->rope);
}

kvc_status kvc_prefix_identity(const kvc_cache *cache, const void *fingerprint, int64_t size, uint8_t *identity) {
    if (size < 1 || !fingerprint)
        return kvc_fail(KVC_ERR_INVALID,
                        "fingerprint is %s: name what computes the rows, such as the model and its revision",
                        fingerprint ? "empty" : "NULL");
    if (!identity) return kvc_fail(KVC_ERR_INVALID, "identity is NULL: it is where %d bytes go", KVC_NAME_BYTES);
    const int64_t shape[] = {cache->pools[0].block_size, cache->num_layers};
    kvc_blake2b hash;
    kvc_blake2b_begin(&hash, KVC_NAME_BYTES, NULL, 0, "kvcache prefix 1");
    kvc_blake2b_add_ints(&hash, shape, 2);
    for (int32_t i = 0; i < cache->num_layers; i++) add_layer(&hash, &cache->layers[i]);
    kvc_blake2b_add(&hash, fingerprint, (size_t)size);
    kvc_blake2b_end(&hash, identity);
    return KVC_OK;
}
