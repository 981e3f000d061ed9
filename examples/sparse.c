/* sparse.c: a layer of sparse attention: index keys choose the rows that a token reads.
 *
 *   sparse [TOKENS]
 *
 * Rows and queries are random.  One row is hidden among TOKENS others.  The last SEEKERS tokens look for the hidden
 * row's index key. */
#include <kvcache.h>
#include <stdio.h>
#include <stdlib.h>

enum { KV_HEADS = 2, HEADS = 8, DIM = 64, INDEX_HEADS = 16, INDEX_DIM = 32, WIDTH = 64, BATCH = 512, MOST = 100000 };
enum { SEEKERS = 1 };

/* The layer that attends, and a layer of index keys: with the same policy, so that both share slots. */
static const kvc_layer LAYERS[] = {
    {.num_kv_heads = KV_HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16},
    {.num_kv_heads = 1, .k_dim = INDEX_DIM, .v_dim = 0, .k_type = KVC_INT8},
};

/* Fills in numbers of [-1, 1). */
static void fill(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = (float)rand() / ((float)RAND_MAX / 2) - 1;
}

static int fail(kvc_batch *batch, kvc_cache *cache) {
    fprintf(stderr, "sparse: %s\n", kvc_last_error());
    kvc_abort(batch);
    kvc_cache_free(cache);
    return 1;
}

/* Puts rows for n tokens in both layers.  Token `hidden` of them gets `sought` as its index key, unless it is -1. */
static kvc_status put(kvc_batch *batch, int n, int hidden, const float *sought) {
    static float k[BATCH][KV_HEADS][DIM], v[BATCH][KV_HEADS][DIM], index[BATCH][INDEX_DIM];
    fill(**k, n * KV_HEADS * DIM);
    fill(**v, n * KV_HEADS * DIM);
    fill(*index, n * INDEX_DIM);
    for (int d = 0; d < INDEX_DIM && hidden >= 0; d++) index[hidden][d] = sought[d];
    const kvc_put_args rows = {.struct_size = sizeof rows, .k = k, .v = v};
    const kvc_put_args keys = {.struct_size = sizeof keys, .k = index};
    const kvc_status status = kvc_put(batch, 0, &rows);
    return status ? status : kvc_put(batch, 1, &keys);
}

/* Chooses rows for the batch's tokens, whose index queries are all `sought`, and attends to them. */
static kvc_status attend(kvc_batch *batch, const float *sought, int32_t chosen[SEEKERS][WIDTH]) {
    static float q[SEEKERS][HEADS][DIM], out[SEEKERS][HEADS][DIM];
    static float index_q[SEEKERS][INDEX_HEADS][INDEX_DIM], weights[SEEKERS][INDEX_HEADS];
    fill(**q, SEEKERS * HEADS * DIM);
    for (int t = 0; t < SEEKERS; t++)
        for (int h = 0; h < INDEX_HEADS; h++) {
            weights[t][h] = 1;
            for (int d = 0; d < INDEX_DIM; d++) index_q[t][h][d] = sought[d];
        }
    const kvc_plan_args index_plan = {.struct_size = sizeof index_plan, .layer = 1, .num_heads = INDEX_HEADS};
    const kvc_choose_args choice = {.struct_size = sizeof choice,
                                    .q = index_q,
                                    .weights = *weights,
                                    .relu = 1,
                                    .num_choices = 1,
                                    .width = WIDTH,
                                    .chosen = *chosen};
    const kvc_status status = kvc_choose(batch, &index_plan, &choice);
    if (status) return status;
    const kvc_chosen rows = {.struct_size = sizeof rows, .positions = *chosen, .num_choices = 1, .width = WIDTH};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = 0, .num_heads = HEADS};
    const kvc_attend_args args = {.struct_size = sizeof args, .q = q, .out = out, .chosen = &rows};
    return kvc_attend(batch, &plan, &args);
}

int main(int argc, char **argv) {
    const int num_tokens = argc > 1 ? atoi(argv[1]) : 20000;
    if (argc > 2 || num_tokens < 1 || num_tokens > MOST) {
        fprintf(stderr, "usage: sparse [TOKENS], of 1 to %d\n", MOST);
        return 2;
    }
    kvc_cache *cache = NULL;
    kvc_batch *batch = NULL;
    float sought[INDEX_DIM];
    int32_t chosen[SEEKERS][WIDTH];
    const int hidden = num_tokens / 3;
    int num_failed = 0;
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = LAYERS,
                               .layer_size = sizeof *LAYERS,
                               .num_layers = 2,
                               .max_seq_len = num_tokens + SEEKERS,
                               .max_sequences = 1};
    fill(sought, INDEX_DIM);
    if (kvc_cache_new(&config, &cache)) return fail(NULL, NULL);
    for (int begin = 0, n; begin < num_tokens; begin += n) {
        n = num_tokens - begin < BATCH ? num_tokens - begin : BATCH;
        const int has_hidden = hidden >= begin && hidden < begin + n;
        if (kvc_begin(cache, n, NULL, NULL, NULL, &batch)) return fail(NULL, cache);
        if (put(batch, n, has_hidden ? hidden - begin : -1, sought)) return fail(batch, cache);
        if (kvc_commit(batch)) return fail(batch, cache);
    }
    if (kvc_begin(cache, SEEKERS, NULL, NULL, NULL, &batch)) return fail(NULL, cache);
    if (put(batch, SEEKERS, -1, sought) || attend(batch, sought, chosen) || kvc_commit(batch))
        return fail(batch, cache);
    for (int t = 0; t < SEEKERS; t++) {
        int num = 0, is_found = 0;
        for (; num < WIDTH && chosen[t][num] >= 0; num++) is_found |= chosen[t][num] == hidden;
        printf("read %d of %d rows, with the hidden one at position %d: %s\n", num, num_tokens + t + 1, hidden,
               is_found ? "yes" : "no");
        num_failed += !is_found;
    }
    kvc_cache_free(cache);
    return num_failed != 0;
}
