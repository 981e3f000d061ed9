/* config.c: checks a caller's kvc_config and its layers.  The caller may have another version of these structs. */
#include "cache/config.h"

#include "base/dtype.h"
#include "base/structs.h"
#include "base/threads.h"
#include "rows/policy.h"
#include "rows/rope.h"
#include "rows/copy.h"

static kvc_status check_limit(int64_t value, const char *name, int64_t most) {
    if (value >= 0 && value <= most) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is %lld: it must be between 1 and %lld, or 0 for the default", name,
                    (long long)value, (long long)most);
}

static kvc_status check_type(int32_t type, int32_t dim, int32_t transform, int32_t layer, const char *name) {
    if (!kvc_type_name(type))
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s_type is %d: no kvc_type", layer, name, type);
    if (dim % kvc_type_elements(type))
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s_dim is %d: for %s it must be a multiple of %d", layer, name,
                        dim, kvc_type_name(type), kvc_type_elements(type));
    if (transform != KVC_TRANSFORM_NONE && transform != KVC_TRANSFORM_HADAMARD)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s_transform is %d: no kvc_transform", layer, name, transform);
    return KVC_OK;
}

/* Returns KVC_ERR_INVALID if values are to be the first elements of the keys, and cannot be. */
static kvc_status check_value_in_key(const kvc_layer *layer, int32_t index) {
    if (!layer->value_in_key) return KVC_OK;
    if (!layer->v_dim)
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d].v_dim is 0: values that lie in the keys have at least 1 element; for a layer of "
                        "keys alone, leave value_in_key 0",
                        index);
    if (layer->v_dim > layer->k_dim)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].v_dim is %d: values that lie in the keys have at most k_dim, %d",
                        index, layer->v_dim, layer->k_dim);
    if (layer->v_type != layer->k_type)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].v_type is %s: values that lie in the keys have k_type, %s", index,
                        kvc_type_name(layer->v_type), kvc_type_name(layer->k_type));
    if (layer->v_transform != layer->k_transform)
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d].v_transform is %d: values that lie in the keys have k_transform, %d", index,
                        layer->v_transform, layer->k_transform);
    const int32_t order = kvc_mixing_of(layer, KVC_KEYS).order;
    if (order && layer->v_dim % order)
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d].v_dim is %d: values that lie in transformed keys of %d elements must be a multiple "
                        "of %d",
                        index, layer->v_dim, layer->k_dim, order);
    return KVC_OK;
}

/* Checks whether a layer can have sketches, if it is to have them. */
static kvc_status check_sketch(const kvc_layer *layer, int32_t index) {
    enum { LEAST_WINDOW = 8192 };
    const kvc_policy *policy = &layer->policy;
    if (!layer->sketch_bits) return KVC_OK;
    if (layer->sketch_bits != 2)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].sketch_bits is %d: it must be 2, or 0 for no sketches", index,
                        layer->sketch_bits);
    if (!layer->v_dim || layer->value_in_key)
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "layers[%d].sketch_bits is 2: %s, and rows are selected where values are stored apart from "
                        "keys",
                        index, layer->v_dim ? "its values lie in the keys" : "it holds keys alone");
    if (layer->k_dim % KVC_QUANT_ELEMENTS || layer->k_dim > KVC_MOST_KEY_ORDER)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].k_dim is %d: for sketches it must be a multiple of %d, at most %d",
                        index, layer->k_dim, KVC_QUANT_ELEMENTS, KVC_MOST_KEY_ORDER);
    if (kvc_policy_stride(policy) > 1)
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "layers[%d].sketch_bits is 2: its stride is %d, and rows are selected where each token has one",
                        index, policy->stride);
    const int is_short = (policy->kind == KVC_SLIDING && policy->window < LEAST_WINDOW) ||
                         (policy->kind == KVC_CHUNKED && policy->attention_chunk_size < LEAST_WINDOW);
    if (!is_short && policy->kind != KVC_CROSS) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED, "layers[%d].sketch_bits is 2: %s, and to select rows would gain nothing",
                    index, is_short ? "its queries see fewer than 8192 positions" : "it is a cross-attention layer");
}

/* Returns KVC_ERR_UNSUPPORTED if a reserved field, to which a later version may give a meaning, is not 0. */
static kvc_status check_reserved(const kvc_layer *layer, int32_t index) {
    const int32_t *policy = layer->policy.reserved;
    const int64_t *rope = layer->rope.reserved;
    const int is_set = policy[0] || policy[1];
    if (!is_set && !rope[0] && !rope[1]) return KVC_OK;
    return kvc_fail(
        KVC_ERR_UNSUPPORTED,
        "layers[%d].%s.reserved is not 0: begin a struct as zeros, as later versions may have a field there", index,
        is_set ? "policy" : "rope");
}

static kvc_status check_layer(const kvc_layer *layer, int32_t index) {
    const struct {
        int32_t value, least;
        const char *name;
    } sizes[] = {{layer->num_kv_heads, 1, "num_kv_heads"}, {layer->k_dim, 1, "k_dim"}, {layer->v_dim, 0, "v_dim"}};
    for (int i = 0; i < 3; i++)
        if (sizes[i].value < sizes[i].least || sizes[i].value > 1 << 20)
            return kvc_fail(KVC_ERR_INVALID, "layers[%d].%s is %d: it must be between %d and %d", index, sizes[i].name,
                            sizes[i].value, sizes[i].least, 1 << 20);
    kvc_status status = check_reserved(layer, index);
    if (status == KVC_OK) status = kvc_policy_check(&layer->policy, index);
    if (status != KVC_OK || layer->policy.kind == KVC_NONE) return status;
    status = check_type(layer->k_type, layer->k_dim, layer->k_transform, index, "k");
    if (status == KVC_OK && layer->v_dim)
        status = check_type(layer->v_type, layer->v_dim, layer->v_transform, index, "v");
    if (status == KVC_OK) status = check_value_in_key(layer, index);
    if (status == KVC_OK) status = check_sketch(layer, index);
    return status == KVC_OK ? kvc_rope_check(layer, index) : status;
}

static kvc_status check_limits(const kvc_config *config) {
    if (config->num_layers < 1 || config->num_layers > 1 << 20)
        return kvc_fail(KVC_ERR_INVALID, "num_layers is %d: it must be between 1 and %d", config->num_layers, 1 << 20);
    kvc_status status = check_limit(config->block_size, "block_size", INT32_MAX - 1);
    if (status == KVC_OK) status = check_limit(config->max_seq_len, "max_seq_len", INT32_MAX - 1);
    if (status == KVC_OK) status = check_limit(config->max_sequences, "max_sequences", INT32_MAX);
    if (status == KVC_OK) status = check_limit(config->capacity, "capacity", INT64_MAX);
    if (status == KVC_OK) status = check_limit(config->max_bytes, "max_bytes", INT64_MAX);
    return status == KVC_OK ? check_limit(config->num_threads, "num_threads", KVC_MOST_THREADS) : status;
}

kvc_layer kvc_config_layer(const kvc_config *config, int32_t i) {
    kvc_layer layer;
    kvc_write_struct(&layer, sizeof layer, (const char *)config->layers + (size_t)i * config->layer_size,
                     config->layer_size);
    if (layer.policy.kind == KVC_NONE) layer.rope = (kvc_rope){0}, layer.sketch_bits = 0; /* not checked there */
    if (!layer.v_dim) layer.v_type = KVC_F32, layer.v_transform = KVC_TRANSFORM_NONE;     /* it has no values */
    return layer;
}

/* Returns KVC_ERR_INVALID if a layer shares the rows of a layer that has none of its own, or differs from it. */
static kvc_status check_share(const kvc_config *config, int32_t index) {
    const kvc_layer layer = kvc_config_layer(config, index);
    if (!layer.share) return KVC_OK;
    if (layer.share < 0 || layer.share > config->num_layers || layer.share == index + 1)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d].share is %d: it must be 1 + the index of another of the %d layers",
                        index, layer.share, config->num_layers);
    const kvc_layer source = kvc_config_layer(config, layer.share - 1);
    if (source.share)
        return kvc_fail(KVC_ERR_INVALID, "layers[%d] shares the rows of layer %d, which has none of its own", index,
                        layer.share - 1);
    if (layer.num_kv_heads != source.num_kv_heads || layer.k_dim != source.k_dim || layer.v_dim != source.v_dim ||
        layer.k_type != source.k_type || layer.v_type != source.v_type || layer.k_transform != source.k_transform ||
        layer.v_transform != source.v_transform || !layer.value_in_key != !source.value_in_key ||
        layer.sketch_bits != source.sketch_bits || !kvc_policy_equal(&layer.policy, &source.policy) ||
        !kvc_rope_equal(&layer.rope, &source.rope))
        return kvc_fail(KVC_ERR_INVALID,
                        "layers[%d] shares the rows of layer %d: both must have the same heads, dims, types, "
                        "transforms, sketches, policy and rope",
                        index, layer.share - 1);
    return KVC_OK;
}

/* Returns KVC_ERR_UNSUPPORTED if some layers have a stride and no layer has a row for each token.  The positions of
 * tokens that no row stands for yet would be known to nobody. */
static kvc_status check_strides(const kvc_config *config) {
    int32_t with_stride = -1;
    for (int32_t i = 0; i < config->num_layers; i++) {
        const kvc_layer layer = kvc_config_layer(config, i);
        if (kvc_policy_stride(&layer.policy) > 1)
            with_stride = i;
        else if (kvc_policy_keeps_tokens(&layer.policy))
            return KVC_OK;
    }
    if (with_stride < 0) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED,
                    "layers[%d]: its policy has a stride, and no layer has a row for each token: add one, such as the "
                    "layer that the rows are computed from",
                    with_stride);
}

kvc_status kvc_config_read(kvc_config *config, const kvc_config *given) {
    kvc_status status = KVC_READ(kvc_config, config, given, "config");
    if (status == KVC_OK) status = check_limits(config);
    for (int32_t i = 0; status == KVC_OK && i < config->num_layers; i++) {
        kvc_layer layer;
        const char *at = config->layers ? (const char *)config->layers + (size_t)i * config->layer_size : NULL;
        status = kvc_read_struct(&layer, sizeof layer, kvc_layer_least_size, at, config->layer_size, "layers");
        if (status == KVC_OK) status = check_layer(&layer, i);
    }
    for (int32_t i = 0; status == KVC_OK && i < config->num_layers; i++) status = check_share(config, i);
    return status == KVC_OK ? check_strides(config) : status;
}

/* Slots of a block by default: of most caches; and of a single sequence whose rows nobody reads in place.  Most huge
 * pages of a long block are filled only as the block becomes full.  It is a multiple of LONG_STEP, because attention is
 * cut there anyway (KVC_SPLIT_ROWS).  max_bytes counts whole blocks, and long ones would waste it. */
enum { SHORT_BLOCK = 64, LEAST_LONG_BLOCK = 1024, LONG_BLOCK = 2048, LONG_STEP = 512 };

/* Returns how many of num_rows rows lie in the last block; 0 where they fill 15/16 of it. */
static int32_t rows_left(int32_t num_rows, int32_t block_size) {
    const int32_t left = num_rows % block_size;
    return left < block_size - block_size / 16 ? left : 0;
}

/* Returns the size of blocks for a single sequence of quantised rows: the one that leaves the fewest rows in a last
 * block that stays rather empty (rows_left).  Of several it is the longest. */
static int32_t long_block_size(int32_t max_seq_len) {
    int32_t best = LONG_BLOCK;
    if (max_seq_len <= LONG_BLOCK) return max_seq_len;
    for (int32_t size = LONG_BLOCK; size >= LEAST_LONG_BLOCK; size -= LONG_STEP)
        if (rows_left(max_seq_len, size) < rows_left(max_seq_len, best)) best = size;
    return best;
}

int32_t kvc_config_block_size(const kvc_config *config) {
    const int32_t max_seq_len = (int32_t)config->max_seq_len;
    int is_full = 1, is_quantised = 1;
    for (int32_t i = 0; i < config->num_layers; i++) {
        const kvc_layer layer = kvc_config_layer(config, i);
        is_full &= !kvc_policy_expires(&layer.policy);
        if (!kvc_policy_keeps_tokens(&layer.policy)) continue;
        is_quantised &= layer.k_type >= KVC_FLOAT_TYPES && (layer.v_type >= KVC_FLOAT_TYPES || !layer.v_dim);
    }
    if (!max_seq_len || config->max_sequences != 1 || config->max_bytes || !is_full) return SHORT_BLOCK;
    return is_quantised ? long_block_size(max_seq_len) : max_seq_len;
}
