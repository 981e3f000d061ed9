/* check.c: checks that several public functions make.  A batch that restores (batch->replaced is not NULL) replaces
 * rows of some groups.  Rows that have expired are lost.  Rows that other groups have, and a group lacks since such a
 * batch, are missing.  An axis is a dimension of a caller's array, from the innermost outwards. */
#include "cache/check.h"

#include "base/dtype.h"
#include "cache/waiting.h"

kvc_status kvc_check_layer(const kvc_cache *cache, int32_t layer) {
    if (layer >= 0 && layer < cache->num_layers) return KVC_OK;
    return kvc_fail(KVC_ERR_INDEX, "layer is %d: this cache has %d layers", layer, cache->num_layers);
}

kvc_status kvc_check_attention(const kvc_batch *batch, int32_t layer, int needs_values) {
    KVC_TRY(kvc_check_layer(batch->cache, layer));
    const kvc_layer *config = &batch->cache->layers[layer];
    if (config->policy.kind == KVC_NONE) return kvc_fail(KVC_ERR_INVALID, "layer %d has no attention", layer);
    if (batch->replaced)
        return kvc_fail(KVC_ERR_INVALID, "the batch restores rows: its tokens attend to nothing; put and commit it");
    if (needs_values && !config->v_dim)
        return kvc_fail(KVC_ERR_UNSUPPORTED,
                        "layer %d holds keys alone, and attention needs values: attend in the layer that has them; "
                        "gather these keys, or read their spans",
                        layer);
    return KVC_OK;
}

kvc_status kvc_check_choosing(const kvc_batch *batch, int32_t layer) {
    KVC_TRY(kvc_check_attention(batch, layer, KVC_MAY_LACK_VALUES));
    if (!batch->cache->layers[layer].v_dim) return KVC_OK;
    return kvc_fail(KVC_ERR_UNSUPPORTED, "layer %d holds values: rows are chosen by a layer of keys alone", layer);
}

kvc_status kvc_check_own_rows(const kvc_cache *cache, int32_t layer) {
    if (cache->layers[layer].share)
        return kvc_fail(KVC_ERR_INVALID, "layer %d shares the rows of layer %d: put them there", layer,
                        kvc_source_of(cache, layer));
    if (cache->layers[layer].policy.kind == KVC_NONE)
        return kvc_fail(KVC_ERR_INVALID, "layer %d has no attention: it holds no rows", layer);
    return KVC_OK;
}

kvc_status kvc_check_takes_rows(const kvc_batch *batch, int32_t layer) {
    const kvc_status status = kvc_check_own_rows(batch->cache, layer);
    if (status != KVC_OK || kvc_takes_rows(batch, batch->cache->group_of[layer])) return status;
    return kvc_fail(KVC_ERR_INVALID, "layer %d is not among the layers that the batch restores: it gets no rows",
                    layer);
}

kvc_status kvc_check_values(const kvc_layer *layer, const void *k, const void *v) {
    if (!k) return kvc_fail(KVC_ERR_INVALID, "k is NULL");
    const char *why = !layer->v_dim         ? "this layer holds keys alone (v_dim 0)"
                      : layer->value_in_key ? "in this layer values are the first part of the keys"
                                            : NULL;
    if (why && v) return kvc_fail(KVC_ERR_INVALID, "v is given: %s", why);
    if (!why && !v) return kvc_fail(KVC_ERR_INVALID, "v is NULL");
    return KVC_OK;
}

/* Checks that no two rows overlap.  Goes through the axes by rising strides: each must leave room for the entries of
 * those before.  Numbers that overflow belong to no array that fits in memory. */
static kvc_status check_apart(const kvc_array *a, int num_axes, uint64_t row_bytes) {
    uint64_t extent = row_bytes;                   /* of the entries of the axes so far */
    for (int done = 0, i = 0; i < num_axes; i++) { /* done: bit j is set once axis j was looked at */
        int next = -1;
        uint64_t step = UINT64_MAX;
        for (int j = 0; j < num_axes; j++) {
            const int64_t stride = *a->axes[j].stride;
            const uint64_t size = stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
            if (!(done >> j & 1) && a->axes[j].num > 1 && size < step) next = j, step = size;
        }
        if (next < 0) break;
        if (step < extent)
            return kvc_fail(KVC_ERR_INVALID,
                            "%s: %s is %lld bytes, and rows overlap: it must be at least %llu, or 0 for rows side by "
                            "side",
                            a->name, a->axes[next].name, (long long)*a->axes[next].stride, (unsigned long long)extent);
        extent += (uint64_t)(a->axes[next].num - 1) * step;
        done |= 1 << next;
    }
    return KVC_OK;
}

static kvc_status fail_type(const kvc_array *a) {
    if (a->stored < KVC_FLOAT_TYPES)
        return kvc_fail(KVC_ERR_INVALID, "%s_type is %d: it must be KVC_F32, KVC_F16 or KVC_BF16", a->name, a->type);
    return kvc_fail(KVC_ERR_INVALID,
                    "%s_type is %d: it must be KVC_F32, KVC_F16 or KVC_BF16, or %d, as the layer stores %s", a->name,
                    a->type, a->stored, KVC_TYPES[a->stored].name);
}

kvc_status kvc_resolve_array(const kvc_array *a) {
    /* Raw rows have the type in which the layer stores them. */
    const int is_float = a->type >= 0 && a->type < KVC_FLOAT_TYPES, is_raw = !a->element_bytes && !is_float;
    if (is_raw && a->type != a->stored && (a->data || a->is_output)) return fail_type(a);
    if (!a->data || a->length <= 0) return KVC_OK;
    const int64_t unit = a->element_bytes ? a->element_bytes : is_raw ? 1 : KVC_TYPES[a->type].bytes;
    const uint64_t row_bytes =
        is_raw ? kvc_row_bytes(a->type, (int32_t)a->length) : (uint64_t)unit * (uint64_t)a->length;
    uint64_t within = row_bytes; /* bytes of the entries within */
    int num_axes = 0;
    for (; num_axes < KVC_MOST_AXES && a->axes[num_axes].num > 0; num_axes++) {
        const kvc_axis *axis = &a->axes[num_axes];
        if (!*axis->stride) *axis->stride = (int64_t)within;
        if (*axis->stride & (unit - 1)) /* it is no multiple of `unit`, a power of two */
            return kvc_fail(KVC_ERR_INVALID, "%s: %s is %lld bytes: it must be a multiple of an element's %lld",
                            a->name, axis->name, (long long)*axis->stride, (long long)unit);
        within = (uint64_t)*axis->stride * (uint64_t)axis->num;
    }
    return a->is_output ? check_apart(a, num_axes, row_bytes) : KVC_OK;
}

kvc_status kvc_check_tokens_per_sequence(int32_t tokens_per_sequence, int32_t num_tokens) {
    if (tokens_per_sequence > 0 && num_tokens % tokens_per_sequence == 0) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "tokens_per_sequence is %d: it must divide the number of tokens, %d, or be 0",
                    tokens_per_sequence, num_tokens);
}

kvc_status kvc_check_position(int32_t value, const char *name) {
    if (value >= 0) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "%s is %d: a position must not be negative", name, value);
}

kvc_status kvc_check_positions(int32_t begin, int32_t end) {
    const kvc_status status = kvc_check_position(begin, "begin");
    if (status != KVC_OK || end >= begin) return status;
    return kvc_fail(KVC_ERR_INVALID, "end is %d: it must be at least begin, %d", end, begin);
}

kvc_status kvc_resolve_range(const kvc_batch *batch, int32_t first, int32_t *num_tokens) {
    if (first < 0 || first >= batch->num_tokens)
        return kvc_fail(KVC_ERR_INDEX, "first is %d: the batch has %d tokens", first, batch->num_tokens);
    if (*num_tokens == 0) *num_tokens = batch->num_tokens - first;
    if (*num_tokens < 0 || *num_tokens > batch->num_tokens - first)
        return kvc_fail(KVC_ERR_INDEX, "num_tokens is %d: from token %d on, the batch has %d", *num_tokens, first,
                        batch->num_tokens - first);
    return KVC_OK;
}

/* Returns the first position from which on no token of the sequence sees lost or missing rows; INT32_MAX: none. */
static int32_t first_safe(const kvc_cache *cache, const kvc_sequence *sequence) {
    int32_t begin = 0, end = INT32_MAX;
    while (begin < end) {
        const int32_t middle = begin + (end - begin) / 2;
        if (kvc_cache_misses(cache, sequence, middle))
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* Returns KVC_ERR_INVALID if a layer is named and another layer of its group is not. */
static kvc_status check_group(const kvc_cache *cache, const uint8_t *flags, const char *name, int32_t layer) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (!flags[i] && kvc_has_rows(cache, i) && cache->group_of[i] == cache->group_of[layer])
            return kvc_fail(
                KVC_ERR_INVALID,
                "%s names layer %d and not layer %d, which has the same policy: name all layers of a policy "
                "or none",
                name, layer, i);
    return KVC_OK;
}

kvc_status kvc_check_groups(const kvc_cache *cache, const uint8_t *flags, const char *name) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (flags[i] && kvc_has_rows(cache, i)) KVC_TRY(check_group(cache, flags, name, i));
    return KVC_OK;
}

/* Returns KVC_ERR_GONE if a token at `position` would see missing rows below position `end`. */
static kvc_status check_missing(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position, int32_t end) {
    for (int32_t layer = 0; layer < cache->num_layers; layer++) {
        const int32_t g = cache->group_of[layer], stride = cache->pools[g].stride;
        const kvc_interval missing = sequence->runs[g].missing;
        if (g >= cache->num_token_groups || missing.begin >= kvc_rows_below(end, stride)) continue;
        if (!kvc_policy_sees(&cache->policies[g], position, missing.begin, missing.end)) continue;
        return kvc_fail(KVC_ERR_GONE,
                        "a token at position %d of sequence %lld would see rows that layer %d lacks, from %d to %d: a "
                        "batch replaced other layers; restore those of its policy, too, or cut the sequence there",
                        position, (long long)sequence->id, layer, missing.begin * stride, missing.end * stride - 1);
    }
    return KVC_OK;
}

kvc_status kvc_fail_gone(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position) {
    KVC_TRY(check_missing(cache, sequence, position, KVC_END));
    const int32_t safe = first_safe(cache, sequence), next = kvc_sequence_next(sequence);
    if (safe == INT32_MAX)
        return kvc_fail(KVC_ERR_GONE,
                        "a token at position %d of sequence %lld would see rows that have expired, as every later one "
                        "would: clear the sequence and feed it again, or cut it before them",
                        position, (long long)sequence->id);
    return kvc_fail(
        KVC_ERR_GONE,
        "a token at position %d of sequence %lld would see rows that have expired: from position %d on none "
        "would; to go on before it, clear the sequence and feed it again, or give resume_window",
        position, (long long)sequence->id, safe > next ? safe : next);
}

/* Returns whether a token at `position` would see rows below it that have expired.  Sets *first to the lowest position
 * at which any row has expired; INT32_MAX if none has. */
static int sees_expired(const kvc_cache *cache, const kvc_sequence *sequence, int32_t position, int32_t *first) {
    int sees = 0;
    *first = INT32_MAX;
    for (int32_t g = 0; g < cache->num_token_groups; g++) {
        const kvc_interval lost = sequence->runs[g].lost;
        const int32_t stride = cache->pools[g].stride;
        if (lost.end) *first = kvc_lower(*first, lost.begin * stride);
        sees |= lost.begin < kvc_rows_below(position, stride) &&
                kvc_policy_sees(&cache->policies[g], position, lost.begin, lost.end);
    }
    return sees;
}

kvc_status kvc_check_cut(const kvc_cache *cache, const kvc_sequence *sequence, int32_t length) {
    if (length >= kvc_sequence_next(sequence)) return KVC_OK;
    KVC_TRY(check_missing(cache, sequence, length, length)); /* the cut drops rows from `length` on: none is missed */
    int32_t expired;
    if (!sees_expired(cache, sequence, length, &expired)) return KVC_OK;
    const int32_t safe = first_safe(cache, sequence);
    if (safe == INT32_MAX)
        return kvc_fail(KVC_ERR_GONE,
                        "sequence %lld cannot go on at position %d: a token there would see rows that have expired, as "
                        "every later one would; it can at positions up to %d",
                        (long long)sequence->id, length, expired);
    return kvc_fail(KVC_ERR_GONE,
                    "sequence %lld cannot go on at position %d: a token there would see rows that have expired; it can "
                    "at positions from %d on, or up to %d; a larger resume_window keeps more",
                    (long long)sequence->id, length, safe, expired);
}

kvc_status kvc_check_idle(const kvc_sequence *sequence) {
    if (!sequence || !(sequence->in_batch || sequence->call.is_rewriting)) return KVC_OK;
    if (sequence->call.is_rewriting)
        return kvc_fail(
            KVC_ERR_BUSY,
            "the keys of sequence %lld are being rewritten by another call: call again when it has returned",
            (long long)sequence->id);
    return kvc_fail(KVC_ERR_BUSY, "sequence %lld belongs to the open batch: commit or abort it first",
                    (long long)sequence->id);
}

kvc_status kvc_check_not_kept(const kvc_sequence *sequence) {
    if (!sequence || !sequence->evicting.is_kept) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "sequence %lld is a running call's own: use another id", (long long)sequence->id);
}

kvc_status kvc_check_no_batch(const kvc_cache *cache, const char *what) {
    if (cache->waiting.num_rewrites)
        return kvc_fail(KVC_ERR_BUSY,
                        "cannot %s while another call rewrites the keys of a sequence: call again when it has returned",
                        what);
    if (cache->batch) return kvc_fail(KVC_ERR_BUSY, "cannot %s while a batch is open: commit or abort it first", what);
    return KVC_OK;
}

static kvc_status check_closed(const kvc_cache *cache, const char *what) {
    KVC_TRY(kvc_check_no_batch(cache, what));
    if (kvc_cache_is_polling(cache))
        return kvc_fail(KVC_ERR_HELD, "cannot %s in the poll of a call that reads rows: do it once that has returned",
                        what);
    if (cache->waiting.num_holds)
        return kvc_fail(KVC_ERR_HELD, "cannot %s while views of the rows are held (%lld): let go of them first", what,
                        (long long)cache->waiting.num_holds);
    return KVC_OK;
}

kvc_status kvc_check_closed(kvc_cache *cache, const char *what) {
    kvc_status status = check_closed(cache, what);
    while (status == KVC_OK && kvc_cache_wait_copies(cache))
        status = check_closed(cache, what); /* again: waiting released the mutex */
    return status;
}
