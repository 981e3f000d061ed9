/* peer.c FOLDER IDENTITY SALT SECRET: serves the prompt 0 to 99 as support/prefixes.py does, on a store in a folder
 * that Python shares.  Checks the rows that it finds there.  Prints how many tokens it fetched and blocks it wrote. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache.h"

enum { NUM = 100, LAYERS = 2, DIM = 2, BLOCK = 16 };

static int fail(const char *what) { return fprintf(stderr, "%s: %s\n", what, kvc_last_error()), 1; }

/* CRC-32 of a text that continues the text of `sum`. */
static uint32_t crc(uint32_t sum, const char *text, size_t size) {
    for (sum = ~sum; size; size--, text++) {
        sum ^= (uint8_t)*text;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0xedb88320 : 0);
    }
    return ~sum;
}

/* Each row has a checksum of all tokens up to its own. */
static void make_rows(float rows[NUM][DIM], int layer) {
    const char first = (char)layer;
    uint32_t sum = crc(0, &first, 1);
    for (int i = 0; i < NUM; i++) {
        char text[8];
        sum = crc(sum, text, (size_t)snprintf(text, sizeof text, "%d,", i));
        rows[i][0] = rows[i][1] = (float)(sum & 0x7ff);
    }
}

static int serve(kvc_cache *cache, kvc_prefix *prefix, const kvc_tokens *tokens, int32_t fetched) {
    static float rows[NUM][DIM], found[2][NUM][DIM];
    int64_t seq_id, seq_ids[NUM];
    int32_t matched;
    kvc_batch *batch;
    if (kvc_prefix_acquire(prefix, tokens, -1, &seq_id, &matched)) return fail("acquire");
    for (int i = 0; i < NUM; i++) seq_ids[i] = seq_id;
    if (kvc_begin(cache, NUM - matched, NULL, seq_ids, NULL, &batch)) return fail("begin");
    for (int l = 0; l < LAYERS; l++) {
        make_rows(rows, l);
        const kvc_put_args put = {.struct_size = sizeof put,
                                  .k = rows[matched],
                                  .v = rows[matched],
                                  .k_token_stride = sizeof *rows,
                                  .v_token_stride = sizeof *rows};
        if (kvc_put(batch, l, &put)) return fail("put");
    }
    if (kvc_commit(batch)) return fail("commit");
    for (int l = 0; l < LAYERS; l++) {
        const kvc_rows_out out = {.struct_size = sizeof out,
                                  .k = found[0],
                                  .v = found[1],
                                  .k_row_stride = sizeof *rows,
                                  .k_head_stride = sizeof rows,
                                  .v_row_stride = sizeof *rows,
                                  .v_head_stride = sizeof rows};
        make_rows(rows, l);
        if (kvc_extract(cache, seq_id, l, 0, NUM, &out)) return fail("extract");
        if (memcmp(found[0], rows, sizeof rows) || memcmp(found[1], rows, sizeof rows) || matched != fetched)
            return fprintf(stderr, "other rows\n"), 1;
    }
    return kvc_prefix_release(prefix, seq_id, tokens) ? fail("release") : 0;
}

int main(int argc, char **argv) {
    static uint8_t identity[1 << 16];
    if (argc != 5) return 2;
    const size_t size = strlen(argv[2]) / 2;
    for (size_t i = 0; i < size && i < sizeof identity; i++) {
        const char digits[] = {argv[2][2 * i], argv[2][2 * i + 1], 0};
        identity[i] = (uint8_t)strtol(digits, NULL, 16);
    }
    int64_t ids[NUM], num_written;
    for (int i = 0; i < NUM; i++) ids[i] = i;
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM}, layers[LAYERS] = {layer, layer};
    const kvc_config config = {sizeof config, layers, sizeof layer, LAYERS, .block_size = BLOCK};
    const kvc_prefix_config named = {.struct_size = sizeof named,
                                     .identity = identity,
                                     .identity_size = (int64_t)size,
                                     .salt = *argv[3] ? argv[3] : NULL,
                                     .salt_size = (int64_t)strlen(argv[3]),
                                     .secret = *argv[4] ? argv[4] : NULL,
                                     .secret_size = (int64_t)strlen(argv[4]),
                                     .collects_new = 1};
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = NUM};
    kvc_cache *cache;
    kvc_prefix *prefix;
    kvc_store *store;
    int32_t fetched;
    if (kvc_dir_store_new(argv[1], 0, &store)) return fail("store");
    if (kvc_cache_new(&config, &cache) || kvc_prefix_new(cache, &named, &prefix)) return fail("cache");
    const kvc_status status = kvc_prefix_fetch(prefix, &tokens, -1, store, &fetched);
    if (status) printf("%s\n", kvc_last_error());
    if (serve(cache, prefix, &tokens, fetched)) return 1;
    if (kvc_store_new_blocks(cache, store, &num_written)) return fail("store_new_blocks");
    printf("%d %d\n", (int)fetched, (int)num_written);
    kvc_dir_store_free(store);
    return kvc_cache_free(cache) != KVC_OK;
}
