/* What a program has of kvcache.h of 0.1.0, as it makes a cache: the structs could not grow then. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct kvc_policy {
    int32_t kind, window, num_sink_tokens, resume_window, attention_chunk_size, max_len;
} kvc_policy;

typedef struct kvc_rope {
    int32_t kind, interleaved, first_dim, num_freqs;
    const double *inv_freq;
    void *shift, *user;
} kvc_rope;

typedef struct kvc_layer {
    int32_t num_kv_heads, k_dim, v_dim, k_type, v_type, k_transform, v_transform, value_in_key, share;
    kvc_policy policy;
    kvc_rope rope;
} kvc_layer;

typedef struct kvc_config {
    size_t struct_size;
    const kvc_layer *layers;
    size_t layer_size;
    int32_t num_layers, block_size;
    int64_t max_seq_len, max_sequences, capacity, max_bytes;
    int32_t num_threads;
    const void *allocator;
} kvc_config;

int kvc_cache_new(const kvc_config *config, void **cache);
const char *kvc_last_error(void);

int main(void) {
    kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 4, .v_dim = 4}};
    kvc_config config = {sizeof config, layers, sizeof *layers, .num_layers = 1};
    void *cache = &layers;
    int refused = kvc_cache_new(&config, &cache) == 1 /* KVC_ERR_INVALID */;
    return puts(kvc_last_error()) < 0 || !refused || cache != &layers || !strstr(kvc_last_error(), "size");
}
