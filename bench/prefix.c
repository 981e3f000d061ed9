/* prefix.c: calls the core's prefixes and times each call, in a library that holds both. */
#include "driver.h"

#include "kvcache.h"

enum { BLOCK = 64, DIM = 8 };

/* ---- a cache of small rows --------------------------------------------------------------------------------------- */

static kvc_status new_cache(kvc_cache **cache) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16};
    const kvc_config config = {.struct_size = sizeof config,
                               .layers = &layer,
                               .layer_size = sizeof layer,
                               .num_layers = 1,
                               .block_size = BLOCK};
    return kvc_cache_new(&config, cache);
}

/* Makes a prefix of a tenant's own. */
static kvc_status new_prefix(kvc_cache *cache, int32_t tenant, kvc_prefix **prefix) {
    const kvc_prefix_config config = {
        .struct_size = sizeof config, .fingerprint = "none", .salt = &tenant, .salt_size = sizeof tenant};
    return kvc_prefix_new(cache, &config, prefix);
}

/* Sets tokens to [begin, begin + num). */
static kvc_tokens count_up(int64_t *ids, int64_t begin, int64_t num) {
    for (int64_t i = 0; i < num; i++) ids[i] = begin + i;
    return (kvc_tokens){.struct_size = sizeof(kvc_tokens), .ids = ids, .num_tokens = num};
}

/* Feeds tokens, each to its sequence; *seconds is what the commit takes. */
static kvc_status feed(kvc_cache *cache, const int64_t *seq_ids, int32_t num, double *seconds) {
    static const float row[DIM];
    const kvc_put_args put = {.struct_size = sizeof put, .k = row, .v = row}; /* the same row for all */
    kvc_batch *batch;
    TRY(kvc_begin(cache, num, NULL, seq_ids, NULL, &batch));
    kvc_status status = kvc_put(batch, 0, &put);
    const double start = now();
    if (!status) status = kvc_commit(batch);
    *seconds = now() - start;
    if (status) kvc_abort(batch);
    return status;
}

/* Feeds tokens to one sequence. */
static kvc_status feed_one(kvc_cache *cache, int64_t seq_id, int32_t num) {
    int64_t *seq_ids = allocate((size_t)num, sizeof *seq_ids);
    double seconds;
    for (int32_t i = 0; i < num; i++) seq_ids[i] = seq_id;
    const kvc_status status = feed(cache, seq_ids, num, &seconds);
    free(seq_ids);
    return status;
}

/* ---- known tokens ----------------------------------------------------------------------------------------------- */

/* Finds all tokens but the last of a prompt again and again: lookup, acquire, release [reps]. */
EXPORT kvc_status prefix_hits(int32_t num_tokens, int32_t reps, double *lookup, double *acquire, double *release) {
    int64_t *ids = allocate((size_t)num_tokens, sizeof *ids), id;
    const kvc_tokens tokens = count_up(ids, 0, num_tokens);
    kvc_cache *cache;
    kvc_prefix *prefix;
    int32_t matched;
    TRY(new_cache(&cache));
    TRY(new_prefix(cache, 0, &prefix));
    TRY(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched));
    TRY(feed_one(cache, id, num_tokens));
    TRY(kvc_prefix_release(prefix, id, &tokens));
    for (int32_t i = 0; i < reps; i++) {
        const double start = now();
        TRY(kvc_prefix_lookup(prefix, &tokens, &matched, NULL));
        const double known = now();
        TRY(kvc_prefix_acquire(prefix, &tokens, -1, &id, &matched));
        const double acquired = now();
        TRY(kvc_prefix_release(prefix, id, &tokens));
        release[i] = now() - acquired;
        acquire[i] = acquired - known;
        lookup[i] = known - start;
        if (matched != num_tokens - 1) abort();
    }
    kvc_prefix_free(prefix);
    free(ids);
    return kvc_cache_free(cache);
}

/* ---- decode steps ------------------------------------------------------------------------------------------------ */

/* Commits a token of one sequence, then a token of each: one, all [reps].  Each sequence belongs to one of num
 * prefixes, or to none. */
EXPORT kvc_status prefix_commits(int32_t num, int32_t of_prefixes, int32_t reps, double *one, double *all) {
    kvc_prefix **prefixes = allocate((size_t)num, sizeof *prefixes);
    int64_t *seq_ids = allocate((size_t)num, sizeof *seq_ids), ids[BLOCK];
    const kvc_tokens tokens = count_up(ids, 0, BLOCK);
    kvc_cache *cache;
    int32_t matched;
    TRY(new_cache(&cache));
    for (int32_t i = 0; i < num; i++) {
        if (of_prefixes) {
            TRY(new_prefix(cache, i, &prefixes[i]));
            TRY(kvc_prefix_acquire(prefixes[i], &tokens, -1, &seq_ids[i], &matched));
        } else {
            seq_ids[i] = kvc_new_sequence(cache);
        }
        TRY(feed_one(cache, seq_ids[i], BLOCK));
    }
    for (int32_t i = 0; i < reps; i++) {
        TRY(feed(cache, &seq_ids[i % num], 1, &one[i]));
        TRY(feed(cache, seq_ids, num, &all[i]));
    }
    for (int32_t i = 0; i < num; i++) kvc_prefix_free(prefixes[i]);
    free(prefixes);
    free(seq_ids);
    return kvc_cache_free(cache);
}
