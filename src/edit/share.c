/* share.c: the public functions that make a sequence (dst) share the rows of another (src).  To share a row is to
 * become a holder of its slot: nothing is copied.  A sharer is a new sequence of the rows to share.  It takes the place
 * of dst, or its runs are moved to the end of dst.  Rows below position exact_to follow from its tokens alone. */
#include "edit/share.h"
#include "cache/check.h"
#include "cache/waiting.h"

/* Finds src and dst (NULL if they do not exist) after waiting until no call writes their rows in place.
 * KVC_ERR_BUSY. */
static kvc_status find_two(kvc_cache *cache, int64_t src_id, int64_t dst_id, kvc_sequence **src, kvc_sequence **dst) {
    do { /* while this waits for one, a call may begin to write the other */
        kvc_cache_find(cache, dst_id);
        *src = kvc_cache_find(cache, src_id);
        *dst = kvc_table_find(&cache->sequences, dst_id);
    } while (*dst && (*dst)->call.in_place);
    KVC_TRY(kvc_check_idle(*src));
    KVC_TRY(kvc_check_idle(*dst));
    if (*src && kvc_sequence_is_blank(*src)) *src = NULL; /* it is there only because a prefix follows it */
    return kvc_check_not_kept(*dst);
}

/* The rows that dst is to share with src. */
typedef struct sharing {
    kvc_sequence *src, *dst; /* dst: rows that it holds already are left out; NULL: it holds none */
    int32_t begin, end;      /* positions of tokens */
} sharing;

/* Fills a list, which is empty, with the rows to share in one group. */
static kvc_status share_group(kvc_cache *cache, const sharing *s, int32_t g, kvc_run_list *to) {
    static const kvc_run_list nothing = {.min_position = -1, .max_position = -1};
    const kvc_run_list *from = &s->src->runs[g], *list = s->dst ? &s->dst->runs[g] : &nothing;
    const int is_cross = g >= cache->num_token_groups;
    const int32_t stride = cache->pools[g].stride;
    const int32_t begin = is_cross ? 0 : kvc_rows_below(s->begin, stride),
                  end = is_cross ? KVC_END : kvc_rows_below(s->end, stride);
    kvc_sorted_runs held;
    if (is_cross && list->num) return KVC_OK; /* dst keeps its own rows of an encoder */
    kvc_status status = kvc_runs_sort(list, &cache->memory, &held);
    if (status != KVC_OK) return status;
    const int32_t num =
        list->num ? kvc_runs_visit_missing(&held, from, begin, end, /* only count */ NULL, NULL) : from->num;
    status = kvc_runs_reserve(to, &cache->memory, num);
    if (status == KVC_OK) {
        kvc_runs_visit_missing(&held, from, begin, end, kvc_hold_part, to);
        to->lost = kvc_runs_lost_in(&held, from->lost, begin, end);
        to->missing = kvc_runs_lost_in(&held, from->missing, begin, end);
    }
    kvc_runs_free_sorted(&cache->memory, &held);
    return status;
}

/* Returns the position from which on the rows to share do not follow from the tokens that dst has then.  They do as far
 * as src is exact, if dst has been the same as src so far.  It has if the row of its last token, exact in both, is the
 * same as in src: such a row was computed once, behind all tokens before it. */
static int32_t find_exact_to(const sharing *s) {
    const int32_t next = s->dst ? kvc_sequence_next(s->dst) : 0;
    int goes_on = next == 0;
    for (int32_t g = 0; !goes_on && g < s->src->num_token_groups; g++) {
        if (s->src->pools[g].stride > 1) continue; /* the token may have no row */
        const kvc_run *a = kvc_runs_at(&s->src->runs[g], next - 1), *b = kvc_runs_at(&s->dst->runs[g], next - 1);
        goes_on = a && b && a->block == b->block && a->slot - a->position == b->slot - b->position;
    }
    if (next && (s->src->exact_to < next || s->dst->exact_to < next)) goes_on = 0;
    return goes_on && s->begin <= next ? kvc_below(s->src->exact_to, s->end) : s->begin;
}

/* Makes a sequence, not in the table yet, of the rows to share; returns NULL if out of memory. */
static kvc_sequence *new_sharer(kvc_cache *cache, const sharing *s, int64_t id) {
    kvc_sequence *sharer = kvc_sequence_new(cache->pools, id, cache->num_groups, cache->num_token_groups);
    kvc_status status = sharer ? KVC_OK : KVC_ERR_NOMEM;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++)
        status = share_group(cache, s, g, &sharer->runs[g]);
    if (status == KVC_OK && kvc_sequence_next(sharer)) sharer->exact_to = find_exact_to(s);
    if (status == KVC_OK) kvc_sequence_note_source(sharer, s->src);
    if (status == KVC_OK) return sharer;
    if (sharer) kvc_sequence_free(sharer, &cache->memory, cache->pools);
    return NULL;
}

/* Moves the rows of `more`, at positions from `begin` on, to the end of a sequence, and frees it. */
static kvc_status join(kvc_cache *cache, kvc_sequence *sequence, kvc_sequence *more, int32_t begin) {
    const int32_t adds_tokens = kvc_sequence_next(more) > 0;
    kvc_status status = KVC_OK;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_groups; g++)
        status = kvc_runs_prepare(&sequence->runs[g], &cache->memory, more->runs[g].num);
    for (int32_t g = 0; g < cache->num_groups; g++) {
        kvc_run_list *list = &sequence->runs[g];
        if (status != KVC_OK) {
            kvc_runs_discard(list, &cache->memory);
            continue;
        }
        kvc_runs_install(list, &cache->memory);
        kvc_runs_join(list, &more->runs[g]);
    }
    if (status == KVC_OK && adds_tokens) {
        kvc_sequence_note_edit(sequence, begin, more->exact_to);
        kvc_sequence_note_source(sequence, more);
    }
    kvc_sequence_free(more, &cache->memory, cache->pools);
    if (status == KVC_OK) kvc_cache_after_edit(cache, sequence);
    return status;
}

static kvc_status fail_empty(int64_t src_id) {
    return kvc_fail(KVC_ERR_INVALID, "src is sequence %lld, which holds nothing that dst could share",
                    (long long)src_id);
}

/* Replaces the rows of dst by the rows of src at positions below `length`. */
static kvc_status copy_prefix(kvc_cache *cache, int64_t src_id, int64_t dst_id, int32_t length) {
    sharing s = {.end = length};
    kvc_sequence *old;
    kvc_status status = find_two(cache, src_id, dst_id, &s.src, &old);
    if (status == KVC_OK && !s.src && length > 0) status = fail_empty(src_id);
    if (status == KVC_OK && s.src) status = kvc_check_cut(cache, s.src, length);
    if (status != KVC_OK) return status;
    kvc_sequence *sharer = s.src ? new_sharer(cache, &s, dst_id) : NULL;
    if (s.src && !sharer) return kvc_fail_sequence(dst_id);
    if (sharer)
        kvc_cache_insert(cache, sharer, old);
    else if (old)
        kvc_cache_drop(cache, old);
    return KVC_OK;
}

/* Returns KVC_ERR_INVALID if dst holds another row than src at any of the positions. */
static kvc_status check_same_rows(kvc_cache *cache, const sharing *s) {
    for (int32_t g = 0; s->dst && g < cache->num_token_groups; g++) {
        kvc_sorted_runs sorted;
        const kvc_status status = kvc_runs_sort(&s->src->runs[g], &cache->memory, &sorted);
        if (status != KVC_OK) return status;
        const int32_t stride = cache->pools[g].stride,
                      row = kvc_runs_find_other(&s->dst->runs[g], &sorted, kvc_rows_below(s->begin, stride),
                                                kvc_rows_below(s->end, stride));
        kvc_runs_free_sorted(&cache->memory, &sorted);
        if (row >= 0)
            return kvc_fail(KVC_ERR_INVALID,
                            "at position %d, dst, sequence %lld, holds another row than src, sequence %lld: remove it "
                            "there, or share other positions",
                            kvc_position_of(row, stride), (long long)s->dst->id, (long long)s->src->id);
    }
    return KVC_OK;
}

/* Adds rows of s->src to dst. */
static kvc_status add_rows(kvc_cache *cache, const sharing *s, int64_t dst_id) {
    KVC_TRY(check_same_rows(cache, s));
    kvc_sequence *sharer = new_sharer(cache, s, dst_id);
    if (!sharer) return kvc_fail_sequence(dst_id);
    if (s->dst) return join(cache, s->dst, sharer, s->begin);
    kvc_cache_insert(cache, sharer, /* old */ NULL);
    return KVC_OK;
}

kvc_status kvc_share_rows(kvc_cache *cache, kvc_sequence *src, int64_t dst_id, int32_t begin, int32_t end) {
    const sharing s = {src, kvc_table_find(&cache->sequences, dst_id), begin, end};
    return add_rows(cache, &s, dst_id);
}

/* Returns KVC_ERR_UNSUPPORTED if a row of a layer with a stride would be shared without some of its positions. */
static kvc_status check_begin(const kvc_cache *cache, int32_t begin) {
    for (int32_t i = 0; cache->num_strided && i < cache->num_layers; i++) {
        const int32_t stride = cache->pools[cache->group_of[i]].stride;
        if (begin % stride)
            return kvc_fail(KVC_ERR_UNSUPPORTED,
                            "begin is %d: a row of layer %d stands for %d positions, some of which are before it; give "
                            "a multiple of each layer's stride",
                            begin, i, stride);
    }
    return KVC_OK;
}

/* Adds the rows of src at positions [begin, end) to dst. */
static kvc_status share(kvc_cache *cache, int64_t src_id, int64_t dst_id, int32_t begin, int32_t end) {
    sharing s = {.begin = begin, .end = end};
    kvc_status status = find_two(cache, src_id, dst_id, &s.src, &s.dst);
    if (status == KVC_OK && s.src && begin < kvc_sequence_next(s.src)) status = check_begin(cache, begin);
    if (status == KVC_OK && !s.src && !s.dst && begin == 0 && end == KVC_END) return fail_empty(src_id);
    return status == KVC_OK && s.src && begin != end ? add_rows(cache, &s, dst_id) : status;
}

static kvc_status check_two(int64_t src, int64_t dst) {
    if (src != dst) return KVC_OK;
    return kvc_fail(KVC_ERR_INVALID, "src and dst are both sequence %lld: they must differ", (long long)src);
}

kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length) {
    kvc_status status = check_two(src, dst);
    if (status == KVC_OK) status = kvc_check_position(length, "length");
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, copy_prefix(cache, src, dst, length));
}

kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst) {
    const kvc_status status = check_two(src, dst);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, copy_prefix(cache, src, dst, KVC_END));
}

kvc_status kvc_share(kvc_cache *cache, int64_t src, int64_t dst, int32_t begin, int32_t end) {
    kvc_status status = check_two(src, dst);
    if (status == KVC_OK) status = kvc_check_positions(begin, end);
    if (status != KVC_OK) return status;
    kvc_lock(cache);
    return kvc_unlock(cache, share(cache, src, dst, begin, end));
}
