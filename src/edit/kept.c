/* kept.c: makes kept sequences for prefixes, and goes on from them.  A kept sequence has the rows of some tokens of a
 * prompt, for later prompts that begin alike.  A piece is its rows at positions [begin, end) of a new prompt.  Pieces
 * are sorted by `begin`; those that begin alike may hold rows of the same tokens.  A match is the number of first
 * tokens behind which the pieces have all rows that a query sees.  With a stride, positions are numbers of rows. */
#include "edit/kept.h"

#include "cache/batch.h"
#include "cache/check.h"
#include "space/evict.h"
#include "space/limits.h"

/* ---- making kept sequences ----------------------------------------------------------------------------------- */

/* Adds the new sequence to the table and the kept ones if it holds rows and status is KVC_OK; frees it otherwise.
 * Returns the status. */
static kvc_status end_keeping(kvc_cache *cache, kvc_sequence *sequence, kvc_status status) {
    if (status != KVC_OK || !kvc_sequence_holds(sequence)) {
        kvc_sequence_free(sequence, &cache->memory, cache->pools);
        return status;
    }
    kvc_cache_enter(cache, sequence);
    kvc_cache_use(cache, sequence, ++cache->evicting.num_uses);
    kvc_cache_keep(cache, sequence);
    return KVC_OK;
}

/* Adds 1 to the int32_t that is the context. */
static void count_part(void *num, const kvc_run *part) {
    (void)part;
    ++*(int32_t *)num;
}

/* Visits the parts of a run of the open batch at positions [begin, end) whose tokens, from *token on, are committed. */
static void visit_committed(const kvc_batch *batch, const kvc_run *run, const int32_t *token, int32_t begin,
                            int32_t end, kvc_part_fn *visit, void *context) {
    const int32_t last = kvc_lower(run->count, end - run->position);
    for (int32_t from = begin > run->position ? begin - run->position : 0, to; from < last; from = to + 1) {
        for (to = from; to < last && batch->committed[token[to]];) to++;
        const kvc_run committed = {run->block, run->slot + from, to - from, run->position + from, run->delta};
        if (to > from) visit(context, &committed);
    }
}

/* Returns the first run of the batch that may hold positions from `begin` on: by bisection if they are consecutive. */
static int32_t first_pending(const kvc_batch_sequence *member, const kvc_pending *pending, int32_t begin) {
    int32_t from = 0, to = member->num_stretches == 1 ? pending->num : 0;
    while (from < to) {
        const int32_t middle = from + (to - from) / 2;
        const kvc_run *run = &pending->runs[middle];
        if (run->position + run->count <= begin)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* Visits the rows of a sequence at positions [begin, end) in one group: the stored ones, then those that the open batch
 * adds to them. */
static void visit_rows(const kvc_cache *cache, const kvc_sequence *sequence, int32_t g, int32_t begin, int32_t end,
                       kvc_part_fn *visit, void *context) {
    const kvc_batch *batch = cache->batch;
    begin = kvc_rows_below(begin, cache->pools[g].stride);
    end = kvc_rows_below(end, cache->pools[g].stride);
    kvc_runs_visit(&sequence->runs[g], begin, end, visit, context);
    const kvc_batch_sequence *member = sequence->in_batch ? &batch->sequences[sequence->in_batch - 1] : NULL;
    if (!member || member->is_unstored) return;
    const kvc_pending *pending = kvc_pending_of(batch, g, sequence->in_batch - 1);
    if (pending->to != KVC_TO_END) return;
    const int is_stretch = member->num_stretches == 1; /* the batch's positions are consecutive: skips runs by that */
    int32_t i = first_pending(member, pending, begin);
    const int32_t *token = kvc_order_in(batch, g) + member->first;
    if (is_stretch && i < pending->num) token += pending->runs[i].position - pending->runs->position;
    for (; i < pending->num && !(is_stretch && pending->runs[i].position >= end); token += pending->runs[i++].count)
        visit_committed(batch, &pending->runs[i], token, begin, end, visit, context);
}

/* Shares the rows of src at positions [begin, end) in one group. */
static kvc_status keep_group(kvc_cache *cache, const kvc_sequence *src, int32_t g, int32_t begin, int32_t end,
                             kvc_run_list *to) {
    int32_t num = 0;
    visit_rows(cache, src, g, begin, end, count_part, &num);
    const kvc_status status = kvc_runs_reserve(to, &cache->memory, num);
    if (status != KVC_OK) return status;
    visit_rows(cache, src, g, begin, end, kvc_hold_part, to);
    kvc_sorted_runs sorted;
    KVC_TRY(kvc_runs_sort(to, &cache->memory, &sorted));
    begin = kvc_rows_below(begin, cache->pools[g].stride);
    end = kvc_rows_below(end, cache->pools[g].stride);
    to->lost = kvc_runs_lost_in(&sorted, src->runs[g].lost, begin, end);
    to->missing = kvc_runs_lost_in(&sorted, src->runs[g].missing, begin, end);
    kvc_runs_free_sorted(&cache->memory, &sorted);
    return KVC_OK;
}

kvc_status kvc_make_kept(kvc_cache *cache, const kvc_sequence *src, int64_t id, int32_t begin, int32_t end,
                         kvc_follower *follower, kvc_sequence **made) {
    kvc_status status = KVC_OK;
    kvc_sequence *sequence = kvc_sequence_new(cache->pools, id, cache->num_groups, cache->num_token_groups);
    *made = NULL;
    if (!sequence) return kvc_fail_sequence(id);
    sequence->is_hidden = follower != NULL;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++)
        status = keep_group(cache, src, g, begin, end, &sequence->runs[g]);
    const int32_t exact_to = kvc_exact_to_with_batch(cache, src);
    sequence->exact_to = kvc_below(exact_to > begin ? exact_to : begin, end);
    const int is_made = status == KVC_OK && kvc_sequence_holds(sequence);
    status = end_keeping(cache, sequence, status);
    if (!is_made) return status;
    sequence->follower = follower;
    *made = sequence;
    return KVC_OK;
}

/* ---- rows that come from elsewhere ------------------------------------------------------------------------------- */

/* New rows that are on the way. */
typedef struct new_rows {
    kvc_sequence *sequence; /* has a run in each group that gets rows */
    int32_t begin, end;
    int32_t *reserved; /* [num_token_groups] blocks that were opened for them */
} new_rows;

/* Takes slots for all positions, which fit a block, in one group. */
static kvc_status take_slots(kvc_cache *cache, const new_rows *rows, int32_t g) {
    kvc_pool *pool = &cache->pools[g];
    kvc_run_list *list = &rows->sequence->runs[g];
    const int32_t begin = kvc_rows_below(rows->begin, pool->stride),
                  count = kvc_rows_below(rows->end, pool->stride) - begin;
    kvc_status status = kvc_runs_reserve(list, &cache->memory, 1);
    if (status == KVC_OK) status = kvc_pool_reserve(pool, 1, &rows->reserved[g]);
    if (status != KVC_OK) return status;
    kvc_block *block = kvc_pool_open(pool);
    const int32_t slot = kvc_pool_take(pool, block, count);
    kvc_runs_append(list, &(kvc_run){block, slot, count, begin, 0});
    return KVC_OK;
}

/* Gives back the slots that take_slots took, and their block. */
static void give_slots(kvc_cache *cache, const new_rows *rows, int32_t g) {
    kvc_pool *pool = &cache->pools[g];
    kvc_run_list *list = &rows->sequence->runs[g];
    if (!list->num) return;
    const kvc_run *run = kvc_runs_begin(list);
    list->num = 0;
    kvc_pool_unreserve(pool, kvc_pool_untake(pool, run->block, run->slot, run->count), &rows->reserved[g]);
}

/* Returns whether a layer of the group is flagged. */
static int takes_group(const kvc_cache *cache, int32_t g, const uint8_t *layers) {
    for (int32_t i = 0; i < cache->num_layers; i++)
        if (cache->group_of[i] == g && layers[i]) return 1;
    return 0;
}

/* Checks the capacity.  The new rows have their slots already. */
static kvc_status check_slots(const kvc_need *need, int32_t g) {
    const new_rows *rows = need->context;
    const int32_t count = rows->end - rows->begin;
    int64_t live;
    if (!rows->sequence->runs[g].num || !kvc_exceeds_capacity(need, g, 0, &live)) return KVC_OK;
    return kvc_fail(KVC_ERR_FULL, "%d more %s not fit: %lld of capacity %lld are in use", count,
                    count == 1 ? "token does" : "tokens do", (long long)(live - count),
                    (long long)need->cache->limits.capacity);
}

static kvc_status take_all(kvc_cache *cache, new_rows *rows, const uint8_t *layers, int64_t before) {
    const kvc_need need = {
        .cache = cache, .check_slots = check_slots, .context = rows, .what = "keeping rows", .before = before};
    kvc_status status = KVC_OK;
    for (int32_t g = 0; g < cache->num_token_groups; g++) rows->reserved[g] = 0;
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++) {
        if (takes_group(cache, g, layers))
            status = take_slots(cache, rows, g);
        else
            rows->sequence->runs[g].lost = (kvc_interval){kvc_rows_below(rows->begin, cache->pools[g].stride),
                                                          kvc_rows_below(rows->end, cache->pools[g].stride)};
    }
    if (status == KVC_OK) status = kvc_make_room(&need);
    for (int32_t g = cache->num_token_groups - 1; status != KVC_OK && g >= 0; g--) give_slots(cache, rows, g);
    return status;
}

kvc_status kvc_make_kept_unwritten(kvc_cache *cache, int64_t id, int32_t begin, int32_t end, const uint8_t *layers,
                                   int64_t before) {
    kvc_status status;
    const size_t size = (size_t)(cache->num_token_groups + 1) * sizeof(int32_t);
    new_rows rows = {.begin = begin, .end = end};
    rows.reserved = kvc_memory_alloc(&cache->memory, size, KVC_MEMORY_SCRATCH, -1);
    if (rows.reserved) rows.sequence = kvc_sequence_new(cache->pools, id, cache->num_groups, cache->num_token_groups);
    if (rows.sequence) {
        rows.sequence->evicting.num_pins = rows.sequence->evicting.is_given = 1; /* its rows come from elsewhere */
        status = end_keeping(cache, rows.sequence, take_all(cache, &rows, layers, before));
    } else {
        status = kvc_fail_sequence(id);
    }
    kvc_memory_free(&cache->memory, rows.reserved, size, KVC_MEMORY_SCRATCH, -1);
    if (status == KVC_OK) kvc_cache_set_in_call(cache, id, 1);
    return status;
}

/* ---- going on from kept sequences ---------------------------------------------------------------------------- */

/* Returns where the rows of piece i end in group g: a number of rows, if that has a stride. */
static int32_t end_in(const kvc_piece_list *p, int32_t i, int32_t g) {
    return kvc_rows_below(p->items[i].end, p->cache->pools[g].stride);
}

/* Returns the run of piece i that has a row of group g at a position; NULL if it has none there.  Here and below,
 * positions in a group with a stride are rows. */
static const kvc_run *run_at(const kvc_piece_list *p, int32_t i, int32_t g, int32_t position) {
    const kvc_piece *piece = &p->items[i];
    return piece->rows && position < end_in(p, i, g) ? kvc_runs_at(&piece->rows->runs[g], position) : NULL;
}

/* Return the first and the last piece that begins where piece i does. */
static int32_t first_beside(const kvc_piece_list *p, int32_t i) {
    while (i > 0 && p->items[i - 1].begin == p->items[i].begin) i--;
    return i;
}
static int32_t last_beside(const kvc_piece_list *p, int32_t i) {
    while (i + 1 < p->num && p->items[i + 1].begin == p->items[i].begin) i++;
    return i;
}

/* Returns the end of the rows of group g that stand at positions from 0 on without a gap. */
static int32_t covered_to(const kvc_piece_list *p, int32_t g) {
    int32_t end = 0;
    for (int32_t i = 0; i < p->num; i++) {
        const kvc_run *run = run_at(p, i, g, end);
        if (!run) continue;
        end = kvc_lower(run->position + run->count, end_in(p, i, g));
        i = first_beside(p, i) - 1; /* goes on with all pieces that begin there */
    }
    return end;
}

/* Returns the index of the last piece, at most `last`, that begins below `end`; -1 if there is none. */
static int32_t find_below(const kvc_piece_list *p, int32_t last, int32_t end) {
    while (last >= 0 && (!p->items[last].rows || p->items[last].begin >= end)) last--;
    return last;
}

/* Returns the first of the positions below `end` that have rows of group g up to `end` without a gap.  Pieces behind
 * `last` have no rows below `end`. */
static int32_t look_covered_from(const kvc_piece_list *p, int32_t g, int32_t end, int32_t last) {
    for (int32_t i = find_below(p, last, end); i >= 0; i = find_below(p, i - 1, end)) {
        const kvc_run *run = end > 0 ? run_at(p, i, g, end - 1) : NULL;
        if (run) {
            end = run->position;
            i = last_beside(p, i) + 1;
        } else if (first_beside(p, i) == i) {
            break; /* pieces that begin lower only have rows below its begin */
        }
    }
    return end;
}

/* Returns what look_covered_from does.  Keeps the answer, which holds for all ends within the stretch that it found. */
static int32_t covered_from(const kvc_piece_list *p, int32_t g, int32_t end, int32_t last) {
    kvc_covered *c = &p->covered[g];
    if (end <= c->begin || end > c->end) *c = (kvc_covered){c->to, look_covered_from(p, g, end, last), end};
    return c->begin;
}

/* Returns the position behind the last row of group g below `end`; any position up to `least` if no row is behind
 * `least`.  Pieces behind `last` have no rows below `end`. */
static int32_t last_below(const kvc_piece_list *p, int32_t g, int32_t end, int32_t last, int32_t least) {
    int32_t found = 0, begin = INT32_MAX;
    for (int32_t i = find_below(p, last, end); i >= 0; i = find_below(p, i - 1, end)) {
        const kvc_run_list *list = &p->items[i].rows->runs[g];
        const int32_t most = kvc_lower(end, p->items[i].end);
        if (p->items[i].begin != begin && (found || begin <= least)) break;
        begin = p->items[i].begin;
        for (const kvc_run *run = kvc_runs_begin(list); run < kvc_runs_end(list); run++)
            if (run->position < most && kvc_lower(run->position + run->count, most) > found)
                found = kvc_lower(run->position + run->count, most);
    }
    return found;
}

/* Returns the largest position, at most `end`, at which a query sees nothing below itself, sinks aside. */
static int32_t fresh_start(const kvc_policy *policy, int32_t end) {
    const int32_t lowest = kvc_policy_lowest(policy, end);
    return kvc_policy_lowest(policy, lowest) == lowest ? lowest : 0;
}

/* Returns the largest position, at most `end`, at which group g holds all that a query there would see. */
static int32_t find_end(const kvc_piece_list *p, int32_t g, int32_t end) {
    const kvc_policy *policy = &p->cache->policies[g];
    const int32_t first_gap = kvc_position_of(p->covered[g].to, p->cache->pools[g].stride);
    if (!kvc_policy_expires(policy) || first_gap < kvc_policy_sinks(policy)) return first_gap < end ? first_gap : end;
    for (int32_t last = p->num - 1; end > first_gap;) {
        last = find_below(p, last, end);
        const int32_t from = covered_from(p, g, end, last);
        if (from <= kvc_policy_lowest(policy, end)) break;
        /* The row at from - 1 is missing: a match ends behind the last row before it, or where a query sees nothing. */
        const int32_t fresh = fresh_start(policy, from - 1), before = last_below(p, g, from - 1, last, fresh);
        end = before > fresh ? before : fresh;
    }
    return end;
}

/* Returns the largest position, at most `length`, at which all groups hold what a query there would see. */
static int32_t find_match(kvc_piece_list *p, int32_t length) {
    p->num = find_below(p, p->num - 1, length) + 1;
    for (int32_t g = 0, end; g < p->cache->num_token_groups; g++) {
        end = find_end(p, g, length);
        if (end == length) continue;
        g = -1; /* groups before may have gaps in the windows of an earlier position */
        length = end;
        p->num = find_below(p, p->num - 1, length) + 1;
    }
    return length;
}

/* Visits the rows of group g of the tokens [begin, end) of pieces [first, past) that begin alike, each row once. */
static void visit_beside(const kvc_piece_list *p, int32_t first, int32_t past, int32_t g, kvc_interval at,
                         kvc_part_fn *visit, void *context) {
    at.begin = kvc_rows_below(at.begin, p->cache->pools[g].stride);
    at.end = kvc_rows_below(at.end, p->cache->pools[g].stride);
    if (past == first + 1) {
        const kvc_piece *piece = &p->items[first];
        if (piece->rows && at.begin < at.end)
            kvc_runs_visit(&piece->rows->runs[g], at.begin, kvc_lower(at.end, end_in(p, first, g)), visit, context);
        return;
    }
    for (int32_t position = at.begin; position < at.end; position++)
        for (int32_t i = first; i < past; i++) {
            const kvc_run *run = run_at(p, i, g, position);
            if (!run) continue;
            const kvc_run part = kvc_run_part(run, position, position + 1);
            visit(context, &part);
            break;
        }
}

/* Visits the rows of group g below `end`, except those in a gap. */
static void visit_pieces(const kvc_piece_list *p, int32_t g, kvc_interval gap, int32_t end, kvc_part_fn *visit,
                         void *context) {
    for (int32_t i = 0, past; i < p->num; i = past) {
        int32_t low = p->items[i].begin, high = low; /* positions of the pieces that begin there */
        past = last_beside(p, i) + 1;
        for (int32_t j = i; j < past; j++)
            if (p->items[j].rows && kvc_sequence_next(p->items[j].rows) > high)
                high = kvc_sequence_next(p->items[j].rows);
        high = kvc_lower(high, end);
        visit_beside(p, i, past, g, (kvc_interval){low, kvc_lower(high, gap.begin)}, visit, context);
        visit_beside(p, i, past, g, (kvc_interval){low > gap.end ? low : gap.end, high}, visit, context);
    }
}

/* Fills a group's list with what a query at `end` or later sees, and what its policy keeps besides.  gap: the rest. */
static kvc_status attach_group(const kvc_piece_list *p, int32_t g, int32_t end, kvc_run_list *list) {
    const kvc_policy *policy = &p->cache->policies[g];
    kvc_interval gap = {0, 0};
    if (kvc_policy_expires(policy)) {
        const int32_t covered = look_covered_from(p, g, end, p->num - 1);
        gap = kvc_policy_expired(policy, end);
        if (covered > gap.end) gap.end = covered;
        if (gap.end < gap.begin) gap.end = gap.begin;
        if (gap.begin > end) gap = (kvc_interval){end, end};
    }
    int32_t num = 0;
    visit_pieces(p, g, gap, end, count_part, &num);
    const kvc_status status = kvc_runs_reserve(list, &p->cache->memory, num);
    if (status != KVC_OK) return status;
    visit_pieces(p, g, gap, end, kvc_hold_part, list);
    if (gap.begin < gap.end) list->lost = gap;
    return KVC_OK;
}

kvc_piece_list kvc_pieces_begin(kvc_cache *cache, const kvc_piece *items, int32_t num, kvc_covered *covered) {
    kvc_piece_list p = {cache, items, covered, num, 0};
    for (int32_t i = 0; i < num; i++)
        if (items[i].rows && kvc_lower(kvc_sequence_next(items[i].rows), items[i].end) > p.end)
            p.end = kvc_lower(kvc_sequence_next(items[i].rows), items[i].end);
    for (int32_t g = 0; g < cache->num_token_groups; g++) covered[g] = (kvc_covered){covered_to(&p, g), 0, 0};
    return p;
}

int32_t kvc_pieces_match(kvc_piece_list *p, int32_t length) { return find_match(p, kvc_lower(length, p->end)); }

kvc_status kvc_attach_pieces(kvc_cache *cache, const kvc_piece *items, int32_t num, int64_t id, int32_t matched) {
    const kvc_piece_list p = {.cache = cache, .items = items, .num = num};
    kvc_sequence *sequence = kvc_sequence_new(cache->pools, id, cache->num_groups, cache->num_token_groups);
    kvc_status status = sequence ? KVC_OK : kvc_fail_sequence(id);
    for (int32_t g = 0; status == KVC_OK && g < cache->num_token_groups; g++)
        status = attach_group(&p, g, matched, &sequence->runs[g]);
    for (int32_t i = 0; status == KVC_OK && i < num; i++) {
        if (!items[i].rows) continue;
        sequence->exact_to = kvc_lower(sequence->exact_to, kvc_below(items[i].rows->exact_to, matched));
    }
    if (status == KVC_OK)
        kvc_cache_insert(cache, sequence, /* old */ NULL);
    else if (sequence)
        kvc_sequence_free(sequence, &cache->memory, cache->pools);
    return status;
}
