/* look.c: compares what can be seen of a cache with the oracle. */
#include "world.h"

#include <stdlib.h>

enum { MOST_PLACES = 4096 };

static struct seen { /* rows that were read */
    float k[HEADS * ROWS * DIM], v[HEADS * ROWS * DIM];
    int32_t positions[ROWS];
} *seen_rows(void) {
    static _Thread_local struct seen seen;
    return &seen;
}

/* Describes arrays for n rows of a layer, as floats; some strides are left out. */
kvc_rows_out room_for(int l, int64_t n, float *k, float *v) {
    const kvc_layer *layer = &w.o.layers[l];
    const int64_t k_row = (int64_t)sizeof *k * layer->k_dim, v_row = (int64_t)sizeof *v * layer->v_dim;
    const int k_given = layer->num_kv_heads > 1 ? 2 : pick(3), v_given = layer->num_kv_heads > 1 ? 2 : pick(3);
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .type = KVC_F32,
                          .k = k,
                          .v = layer->v_dim ? v : NULL,
                          .k_head_stride = k_given > 1 ? n * k_row : 0,
                          .k_row_stride = k_given ? k_row : 0,
                          .v_head_stride = v_given > 1 ? n * v_row : 0,
                          .v_row_stride = v_given ? v_row : 0};
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Checks that keys and values are those of a row; NULL: they were not read. */
void check_row_of(int l, const row *r, const float *k, const float *v, int64_t k_stride, int64_t v_stride) {
    const kvc_layer *layer = &w.o.layers[l];
    float own[DIM];
    for (int h = 0; h < layer->num_kv_heads; h++) {
        make_key(layer, r->tag, l, h, r->position - tokens[r->tag].base, own);
        if (k && !same_elements(k + h * k_stride, own, layer->k_dim, key_error(layer)))
            wrong("layer %d: the key at %d is not that of tag %d, but of %d", l, r->position, r->tag,
                  tag_of_key(layer, l, k + h * k_stride));
        make_value(layer, r->tag, l, h, own);
        if (v && layer->v_dim && !same_elements(v + h * v_stride, own, layer->v_dim, 0.01f))
            wrong("layer %d: the value at %d is not that of tag %d", l, r->position, r->tag);
    }
}

/* Returns the tag of a row, all of which must be of that tag. */
int32_t tag_of(int l, const float *k, const float *v, int64_t k_stride, int64_t v_stride, int32_t position) {
    const int32_t tag = tag_of_key(&w.o.layers[l], l, k);
    if (tag <= 0 || tag > w.last_tag) wrong("layer %d: the row at %d is nobody's", l, position);
    const row r = {position, tag, 0, 0, 0};
    check_row_of(l, &r, k, v, k_stride, v_stride);
    return tag;
}

void read_tags(kvc_cache *cache, int64_t id, int l, int32_t *tags) {
    struct seen *seen = seen_rows();
    const kvc_layer *layer = &w.o.layers[l];
    const int stride = stride_of(&w.o, l), n = 64 / stride;
    kvc_rows_out out = room_for(l, n, seen->k, seen->v);
    out.positions = seen->positions;
    for (int at = 0; at < ROWS; at++) tags[at] = NO_TOKEN;
    kvc_status status;
    UNTIL_MEMORY(status, kvc_extract(cache, id, l, 0, n * stride, &out));
    if (status) wrong("kvc_extract: %s", kvc_last_error());
    for (int i = 0; i < n; i++)
        if (seen->positions[i] >= 0)
            tags[(i + 1) * stride - 1] =
                tag_of(l, seen->k + i * layer->k_dim, seen->v + i * layer->v_dim, (int64_t)n * layer->k_dim,
                       (int64_t)n * layer->v_dim, seen->positions[i]);
}

static void check_gather(kvc_cache *cache, int64_t id, const sequence *s, int l) {
    struct seen *seen = seen_rows();
    const kvc_layer *layer = &w.o.layers[l];
    const rows *list = &s->layers[source_of(&w.o, l)];
    const int first = pick(3) ? 0 : pick(list->num), num = first ? 1 + pick(list->num - first) : list->num;
    kvc_rows_out out = room_for(l, num, seen->k, seen->v);
    out.positions = seen->positions;
    kvc_status status;
    UNTIL_MEMORY(status, kvc_gather(cache, id, l, first, num, &out));
    if (status) wrong("kvc_gather: %s", kvc_last_error());
    for (int i = 0; i < num; i++) {
        const row *r = &list->at[first + i];
        if (seen->positions[i] != r->position)
            wrong("layer %d: row %d stands at %d, not %d", l, first + i, seen->positions[i], r->position);
        check_row_of(source_of(&w.o, l), r, seen->k + i * layer->k_dim, seen->v + i * layer->v_dim,
                     (int64_t)num * layer->k_dim, (int64_t)num * layer->v_dim);
    }
}

/* Checks spans against a list.  Elements of f32 are compared where they lie. */
static void check_spans(const kvc_span *spans, int64_t num, int l, const row *list, int num_rows) {
    const kvc_layer *layer = &w.o.layers[l];
    int at = 0;
    for (int64_t i = 0; i < num; i++)
        for (int j = 0; j < spans[i].num_rows; j++, at++) {
            const kvc_span *span = &spans[i];
            if (at == num_rows) wrong("layer %d: spans have more than %d rows", l, num_rows);
            if (span->position + j * stride_of(&w.o, l) != list[at].position || span->delta != list[at].delta)
                wrong("layer %d: row %d of a span stands at %d, moved by %d, not at %d by %d", l, at,
                      span->position + j * stride_of(&w.o, l), span->delta, list[at].position, list[at].delta);
            if (layer->k_type || layer->v_type) continue;
            row stored = list[at];
            stored.position -= stored.delta;
            check_row_of(l, &stored, (const float *)span->k + j * span->k_row_stride / 4,
                         span->v ? (const float *)span->v + j * span->v_row_stride / 4 : NULL, span->k_head_stride / 4,
                         span->v_head_stride / 4);
        }
    if (at != num_rows) wrong("layer %d: spans have %d rows, not %d", l, at, num_rows);
}

/* ---- sequences --------------------------------------------------------------------------------------------------- */

static void check_layer(kvc_cache *cache, int64_t id, const sequence *s, int l) {
    kvc_span spans[ROWS];
    int32_t positions[ROWS], first = 7, last = 7, low = -1, high = -1;
    int64_t num = 0;
    const rows *list = &s->layers[source_of(&w.o, l)];
    for (int i = 0; i < list->num; i++) {
        low = low < 0 || list->at[i].position < low ? list->at[i].position : low;
        high = list->at[i].position > high ? list->at[i].position : high;
    }
    if (kvc_seq_len(cache, id, l) != list->num || kvc_positions(cache, id, l, positions, ROWS) != list->num)
        wrong("layer %d of sequence %lld has %d rows, not %d", l, (long long)id, (int)kvc_seq_len(cache, id, l),
              list->num);
    if (kvc_position_range(cache, id, l, &first, &last) || first != low || last != high)
        wrong("layer %d: positions from %d to %d, not %d to %d", l, first, last, low, high);
    if (list->num) check_gather(cache, id, s, l);
    if (list->num) check_sketches(cache, id, l);
    kvc_status status;
    UNTIL_MEMORY(status, kvc_spans(cache, id, l, spans, sizeof *spans, ROWS, &num, NULL));
    if (status) wrong("kvc_spans: %s", kvc_last_error());
    check_spans(spans, num, source_of(&w.o, l), list->at, list->num);
}

/* A sequence of the open batch counts as exact as if all its tokens were kept. */
static int32_t exact_to(int at, const sequence *s) {
    uint8_t all[TOKENS];
    memset(all, 1, sizeof all);
    int32_t exact = s->exact_to;
    for (int i = 0; i < CLIENTS && at >= 0; i++) {
        const batch *b = &w.o.batches[i];
        if (!b->is_open || !count_in(b, at)) continue;
        const int32_t own = batch_exact_to(&w.o, b, at, all);
        exact = own < exact ? own : exact;
    }
    return exact;
}

static int has_token_layers(void) {
    for (int l = 0; l < w.o.num_layers; l++)
        if (is_own(&w.o, l)) return 1;
    return 0;
}

/* at: its slot in the world's cache; -1: it is of another cache. */
static void check_sequence(kvc_cache *cache, int64_t id, const sequence *s, int at) {
    const int32_t next = next_of(&w.o, s);
    int32_t first, last;
    int64_t most = 0;
    for (int l = 0; l < w.o.num_layers; l++)
        if (is_own(&w.o, l) && stride_of(&w.o, l) == 1 && s->layers[l].num > most) most = s->layers[l].num;
    if (kvc_next_position(cache, id) != next)
        wrong("sequence %lld goes on at %d, not %d", (long long)id, kvc_next_position(cache, id), next);
    if (kvc_seq_len(cache, id, -1) != most)
        wrong("sequence %lld has %d tokens, not %d", (long long)id, (int)kvc_seq_len(cache, id, -1), (int)most);
    if (kvc_position_range(cache, id, -1, &first, &last) || first != extreme_of(&w.o, s, -1) ||
        last != extreme_of(&w.o, s, 1))
        wrong("sequence %lld stands from %d to %d", (long long)id, first, last);
    if (kvc_exact_to(cache, id) != exact_to(at, s))
        wrong("sequence %lld is exact to %d, not %d", (long long)id, kvc_exact_to(cache, id), exact_to(at, s));
    for (int32_t i = -2; i < 2 && next < INT32_MAX - 2; i++) {
        const int32_t position = i < 1 ? next + i : pick(next < 64 ? next + 1 : 64);
        const int right = position >= 0 && (!has_token_layers() || (position <= next && !misses(&w.o, s, position)));
        if (kvc_can_resume(cache, id, position) != right)
            wrong("sequence %lld can go on at %d: %d", (long long)id, position, !right);
    }
    for (int l = 0; l < w.o.num_layers; l++) check_layer(cache, id, s, l);
}

/* In a crowded cache, batches of others expire rows: the oracle learns of it. */
static void learn_expired(int at) {
    sequence *s = &w.o.sequences[at];
    for (int l = 0; l < w.o.num_layers; l++) {
        rows *list = &s->layers[l];
        int32_t positions[ROWS];
        int64_t num = kvc_positions(w.cache, w.ids[at], l, positions, ROWS), kept = 0;
        if (!is_own(&w.o, l) || w.o.layers[l].policy.kind == KVC_FULL) continue;
        for (int i = 0, j = 0; i < list->num; i++)
            if (j < num && positions[j] == list->at[i].position)
                list->at[kept++] = list->at[i], j++;
            else
                widen(&list->lost, list->at[i].position);
        list->num = (int)kept;
    }
}

/* Each row of a sequence that anybody may change is whole. */
static void check_whole(int at) {
    int32_t tags[ROWS];
    for (int l = 0; l < w.o.num_layers; l++)
        if (is_own(&w.o, l)) read_tags(w.cache, w.ids[at], l, tags);
}

/* Compares what a sequence holds, contents aside that another batch may expire meanwhile. */
static void check_crowded(int at) {
    const sequence *s = &w.o.sequences[at];
    int32_t tags[ROWS];
    for (int l = 0; l < w.o.num_layers; l++) {
        const rows *list = &s->layers[l];
        if (!is_own(&w.o, l)) continue;
        read_tags(w.cache, w.ids[at], l, tags);
        for (int i = 0; i < list->num; i++) {
            const int32_t position = list->at[i].position;
            if (position >= 64 || find_row(list, position) != &list->at[i]) continue;
            if (tags[position] != list->at[i].tag && (tags[position] >= 0 || w.o.layers[l].policy.kind == KVC_FULL))
                wrong("sequence %lld has tag %d at %d, not %d, layer %d", (long long)w.ids[at], tags[position],
                      position, list->at[i].tag, l);
        }
    }
}

void look_at(int at) {
    if (!w.o.crowded) {
        check_sequence(w.cache, w.ids[at], &w.o.sequences[at], at);
        return;
    }
    if (w.o.sequences[at].is_open || w.is_wild) {
        check_whole(at);
        return;
    }
    if (at % w.num_clients != me->number || is_busy(&w.o, at)) return;
    lock_world();
    learn_expired(at);
    unlock_world();
    check_crowded(at);
}

/* ---- the cache --------------------------------------------------------------------------------------------------- */

static void check_ids(void) {
    int64_t ids[SLOTS + 1];
    int64_t num = kvc_sequences(w.cache, ids, SLOTS + 1), right = 0;
    for (int s = 0; s < SLOTS; s++) right += holds_tokens(&w.o, &w.o.sequences[s]);
    if (num != right) wrong("there are %d sequences, not %d", (int)num, (int)right);
    for (int64_t i = 1; i < num; i++)
        if (ids[i] <= ids[i - 1]) wrong("sequences are out of order");
}

/* Counts the holders of each slot of a layer's blocks; block i begins at first[i]. */
static void count_holders(const kvc_run_info *runs, int64_t num, const kvc_block_info *blocks, const int *first,
                          uint16_t *holders) {
    for (const kvc_run_info *r = runs; r < runs + num; r++) {
        if (r->slot < 0 || r->count < 1 || r->slot + r->count > blocks[r->block].filled)
            wrong("a run lies outside of its block");
        for (int i = 0; i < r->count; i++) holders[first[r->block] + r->slot + i]++;
    }
}

/* A block against the holders of its slots. */
static void check_block(const kvc_block_info *b, const uint16_t *holders, kvc_stats *sums) {
    int live = 0, most = 0;
    for (int i = 0; i < b->filled; i++) live += holders[i] > 0, most = holders[i] > most ? holders[i] : most;
    if (!me->is_within && (b->live != live || b->references != most))
        wrong("a block has %d live slots and %d references, not %d and %d", b->live, b->references, live, most);
    if (b->filled > b->resident || b->resident > b->num_slots || b->live > b->filled) wrong("a block has odd slots");
    if (!b->is_free != (b->live || b->is_held)) wrong("a block is free, and is not");
    if (!b->is_held && b->filled && b->live && !me->is_within && !holders[b->filled - 1])
        wrong("the last of %d filled slots can be used again", b->filled);
    sums->live_slots += b->live;
    sums->wasted_slots += b->filled - b->live;
    sums->blocks_in_use += !b->is_free;
    sums->blocks_free += b->is_free;
}

static int slot_of(int64_t id) {
    int s = 0;
    while (s < SLOTS && w.ids[s] != id) s++;
    return s;
}

/* Compares the runs of each sequence with its rows.  Runs come by rising id of their sequence, then runs that prefixes
 * keep, then runs of batches. */
static void check_runs(int l, const kvc_run_info *runs, int64_t num) {
    int at[SLOTS + 1] = {0}, kind = 0;
    for (const kvc_run_info *r = runs; r < runs + num; r++) {
        const int own = r->in_batch ? 2 : r->is_kept ? 1 : 0, s = slot_of(r->seq_id);
        if (own < kind || (r > runs && !own && r->seq_id < r[-1].seq_id)) wrong("runs are out of order");
        kind = own;
        for (int i = 0; !own && s < SLOTS && i < r->count; i++, at[s]++) {
            const rows *list = &w.o.sequences[s].layers[source_of(&w.o, l)];
            const int32_t position = r->position + i * stride_of(&w.o, l);
            if (at[s] < list->num && (list->at[at[s]].position != position || list->at[at[s]].delta != r->delta))
                wrong("layer %d: a run has position %d, moved by %d, for row %d", l, position, r->delta, at[s]);
        }
    }
    for (int s = 0; s < SLOTS; s++)
        if (at[s] != w.o.sequences[s].layers[source_of(&w.o, l)].num)
            wrong("layer %d: sequence %lld has %d rows in runs", l, (long long)w.ids[s], at[s]);
}

/* Checks blocks against the runs in them. */
static void check_blocks(int l, kvc_stats *sums) {
    static kvc_block_info blocks[MOST_PLACES];
    static kvc_run_info runs[MOST_PLACES];
    static uint16_t holders[4 * MOST_PLACES];
    static int first[MOST_PLACES + 1];
    int64_t num_blocks, num_runs;
    if (kvc_blocks(w.cache, l, blocks, sizeof *blocks, MOST_PLACES, &num_blocks, runs, sizeof *runs, MOST_PLACES,
                   &num_runs) ||
        num_blocks > MOST_PLACES || num_runs > MOST_PLACES)
        wrong("there are %d blocks and %d runs", (int)num_blocks, (int)num_runs);
    for (int64_t i = 0; i < num_blocks; i++) first[i + 1] = first[i] + blocks[i].filled;
    if (first[num_blocks] > 4 * MOST_PLACES) wrong("there are %d slots", first[num_blocks]);
    memset(holders, 0, sizeof *holders * (size_t)first[num_blocks]);
    count_holders(runs, num_runs, blocks, first, holders);
    for (int64_t i = 0; i < num_blocks; i++) check_block(&blocks[i], holders + first[i], sums);
    if (!me->is_within) check_runs(l, runs, num_runs);
}

/* Returns how many dropped blocks kept runs of a group build on, at most. */
static int64_t blocks_before(const kvc_run_info *runs, int64_t num) {
    int64_t before = 0;
    for (const kvc_run_info *r = runs; r < runs + num; r++) before += r->is_kept ? r->position / w.o.block_size : 0;
    return before;
}

/* Lists come on top of max_bytes.  num_dropped: blocks that kept ones build on. */
static void check_lists(int64_t num_runs, int64_t num_groups, int64_t num_dropped) {
    kvc_stats stats;
    int64_t num = 0;
    kvc_get_stats(w.cache, &stats, sizeof stats);
    for (int s = 0; s < SLOTS; s++) {
        num += is_there(&w.o, &w.o.sequences[s]) || is_busy(&w.o, s);
        num_dropped += w.o.sequences[s].prefix ? text_length(w.o.sequences[s].prompt) / w.o.block_size : 0;
    }
    for (const prefix *p = w.o.prefixes; p < w.o.prefixes + PREFIXES; p++) {
        num += p->is_there ? 1 + p->num_pins : 0;
        for (int j = 0; p->is_there && j < p->num_pins; j++)
            num_dropped += text_length(p->pins[j].node) / w.o.block_size;
    }
    num += stats.retained;
    const int64_t most = w.o.config.max_bytes + 48 * num_runs + (700 + 300 * num_groups) * num + 300 * num_dropped +
                         40 * (stats.retained + num_dropped) * w.o.block_size,
                  nbytes = kvc_nbytes(w.cache);
    if (nbytes > most) wrong("kvc_nbytes is %lld, and may be %lld", (long long)nbytes, (long long)most);
}

/* Notes which rows lie in blocks that holds keep. */
static void note_held(int l, const kvc_block_info *blocks, const kvc_run_info *runs, int64_t num) {
    int at[SLOTS + 1] = {0};
    for (const kvc_run_info *r = runs; r < runs + num; r++) {
        const int s = slot_of(r->seq_id);
        for (int i = 0; !r->in_batch && !r->is_kept && s < SLOTS && i < r->count; i++, at[s]++)
            if (at[s] < w.o.sequences[s].layers[l].num)
                w.o.sequences[s].layers[l].at[at[s]].is_held = blocks[r->block].is_held;
    }
}

/* After each call, blocks as they lie, states and prompts are within the limit. */
void note_blocks(void) {
    static kvc_block_info blocks[MOST_PLACES];
    static kvc_run_info runs[MOST_PLACES];
    int64_t num_blocks, num_runs, all_runs = 0, bytes = 0, groups = 0, dropped = 0;
    if (!w.o.config.max_bytes || w.o.crowded) return;
    for (int l = 0; l < w.o.num_layers; l++) {
        group *of = &w.o.groups[l];
        if (!of->cost) continue;
        if (kvc_blocks(w.cache, l, blocks, sizeof *blocks, MOST_PLACES, &num_blocks, runs, sizeof *runs, MOST_PLACES,
                       &num_runs))
            wrong("kvc_blocks fails");
        of->held = of->open = of->live = of->used = 0;
        for (const kvc_block_info *b = blocks; b < blocks + num_blocks; b++) {
            if (b->bytes != of->cost || b->num_slots != of->size) wrong("a block counts %d bytes", (int)b->bytes);
            of->used += !b->is_free;
            of->held += b->is_held != 0;
            of->open += b->is_held ? b->num_slots - b->filled : 0;
            of->live += b->is_held ? 0 : b->live;
        }
        note_held(l, blocks, runs, num_runs);
        bytes += of->used * of->cost;
        dropped += blocks_before(runs, num_runs);
        all_runs += num_runs, groups++;
    }
    w.o.is_moved = 0;
    bytes += bytes_beside_blocks(&w.o);
    if (bytes > w.o.budget) wrong("%lld bytes count, and %lld may", (long long)bytes, (long long)w.o.budget);
    check_lists(all_runs, groups, dropped);
}

static void check_stats(void) {
    kvc_stats stats;
    kvc_stats sums = {0}, others = {0};
    int64_t most = 0; /* blocks that may be kept */
    for (int l = 0; l < w.o.num_layers; l++)
        if (w.o.layers[l].policy.kind != KVC_NONE) check_blocks(l, leads_group(&w.o, l) ? &sums : &others);
    kvc_get_stats(w.cache, &stats, sizeof stats);
    const int64_t live = sums.live_slots;
    if (stats.live_slots != live || stats.wasted_slots != sums.wasted_slots ||
        stats.blocks_in_use != sums.blocks_in_use || stats.blocks_free != sums.blocks_free)
        wrong("%d slots are live, and %d in blocks; %d are wasted, and %d", (int)stats.live_slots, (int)live,
              (int)stats.wasted_slots, (int)sums.wasted_slots);
    for (int i = 0; i < PREFIXES; i++) most += w.o.prefixes[i].num_blocks + (w.o.prefixes[i].config.ttl_ms > 0);
    const int64_t right = live_slots(&w.o);
    const int has_more = most || stats.retained || me->is_within || w.o.has_twins; /* a call on the way has rows, too */
    if (live < right || (live != right && !has_more)) wrong("%d slots are live, not %d", (int)live, (int)right);
    if (stats.evictable_slots > live - right && !w.o.has_twins)
        wrong("%d slots are evictable, of %d", (int)stats.evictable_slots, (int)(live - right));
    if (stats.rows_evicted && !capacity_of(&w.o) && !w.o.config.max_bytes && !w.has_made_room)
        wrong("rows are evicted without a limit");
    const int has_purge = w.o.config.allocator && w.o.config.allocator->purge; /* then pages count once touched */
    if (w.memory && (has_purge ? kvc_nbytes(w.cache) > w.memory : kvc_nbytes(w.cache) != w.memory))
        wrong("kvc_nbytes is %lld, not %lld", (long long)kvc_nbytes(w.cache), (long long)w.memory);
}

/* What prefixes count. */
static void check_prefix(int i) {
    const prefix *p = &w.o.prefixes[i];
    kvc_prefix_stats s;
    int64_t least = 0, held = 0, most_held = 0, sequences = 0, sure = 0;
    kvc_prefix_get_stats(w.prefixes[i], &s, sizeof s);
    if (s.requests != p->requests || s.hits != p->hits || s.tokens != p->tokens || s.matched != p->matched ||
        s.reused != p->reused)
        wrong("prefix %d counts %d requests, %d hits, %d tokens, %d matched, %d reused", i, (int)s.requests,
              (int)s.hits, (int)s.tokens, (int)s.matched, (int)s.reused);
    for (int at = 0; at < SLOTS; at++) sequences += w.o.sequences[at].prefix == 1 + i;
    if (s.sequences != sequences && !me->is_within)
        wrong("prefix %d has %d sequences, not %d", i, (int)s.sequences, (int)sequences);
    for (int j = 0; j < p->num_blocks; j++) {
        const block *b = &p->blocks[j];
        const int num = text_length(b->node) - b->begin;
        most_held += num;
        if (is_full_block(&w.o, b) && b->is_sure && num_whole(&w.o, b)) least++, held += num;
    }
    const int is_late = p->config.ttl_ms || me->is_within; /* expired ones may wait, and a call be adding some */
    if (s.blocks < least || s.held < held || (!is_late && (s.blocks > p->num_blocks || s.held > most_held)))
        wrong("prefix %d has %d blocks of %d tokens, not %d to %d of %d to %d", i, (int)s.blocks, (int)s.held,
              (int)least, p->num_blocks, (int)held, (int)most_held);
    for (int j = 0; j < p->num_states; j++) sure += p->states[j].is_sure;
    if (s.checkpoints < sure || (!is_late && s.checkpoints > p->num_states))
        wrong("prefix %d has %d states, not %d to %d", i, (int)s.checkpoints, (int)sure, p->num_states);
}

/* Asks a prefix for a text that it may know. */
static void look_up(int i) {
    const prefix *p = &w.o.prefixes[i];
    text_tokens given;
    int32_t matched = -1, with_rows = -1;
    call c = {.prefix = i, .text = w.texts[pick(TEXTS)]};
    if (p->num_blocks && pick(2)) c.text = p->blocks[pick(p->num_blocks)].node;
    if (pick(3)) c.text = text_begin(c.text, pick(text_length(c.text) + 1));
    if (p->num_pins && !pick(4)) c.text = p->pins[pick(p->num_pins)].node;
    const kvc_tokens *own = tokens_of(c.text, pick(1000), &given);
    UNTIL_MEMORY(c.status, kvc_prefix_lookup(w.prefixes[i], own, &matched, &with_rows));
    c.result = matched;
    c.more = with_rows;
    right_lookup(&w.o, &c);
}

void look_up_texts(void) {
    for (int i = 0; i < 2 * PREFIXES && !w.o.crowded; i++)
        if (w.o.prefixes[i / 2].is_there) look_up(i / 2);
}

static uint64_t add_bytes(uint64_t sum, const char *at, int64_t num) {
    for (int64_t i = 0; i < num; i++) sum = (sum ^ (uint8_t)at[i]) * 0x100000001b3;
    return sum;
}

/* Sums up the bytes of a view's rows, of any types: as they are stored, with their scales. */
uint64_t sum_of_view(const view *v) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < v->num_spans; i++)
        for (int64_t h = 0; h < w.o.layers[v->layer].num_kv_heads; h++) {
            const kvc_span *s = &v->spans[i];
            const int64_t k = h * s->k_head_stride, of_v = h * s->v_head_stride, of_scales = s->num_rows * 2;
            sum = add_bytes(sum, (const char *)s->k + k, s->num_rows * s->k_row_stride);
            if (s->v) sum = add_bytes(sum, (const char *)s->v + of_v, s->num_rows * s->v_row_stride);
            if (s->k_scales) sum = add_bytes(sum, (const char *)s->k_scales + k, of_scales);
            if (s->v_scales) sum = add_bytes(sum, (const char *)s->v_scales + of_v, of_scales);
        }
    return sum;
}

void look_at_views(void) {
    for (int i = 0; i < CLIENTS; i++) {
        const view *v = &w.views[i];
        if (!v->hold || w.o.crowded) continue;
        check_spans(v->spans, v->num_spans, v->layer, v->rows, v->num);
        if (sum_of_view(v) != v->sum) wrong("layer %d: rows that a view holds have changed", v->layer);
    }
}

void look_around(void) {
    kvc_status status;
    UNTIL_MEMORY(status, kvc_validate(w.cache));
    if (status) wrong("the cache is corrupt: %s", kvc_last_error());
    if (w.o.crowded) return;
    check_ids();
    check_stats();
    for (int s = 0; s < SLOTS; s++) check_sequence(w.cache, w.ids[s], &w.o.sequences[s], s);
    for (int i = 0; i < PREFIXES; i++)
        if (w.o.prefixes[i].is_there) check_prefix(i);
    look_at_views();
}

void look_at_cache(kvc_cache *cache, const sequence *sequences, const int64_t *ids, int num) {
    kvc_status status;
    UNTIL_MEMORY(status, kvc_validate(cache));
    if (status) wrong("a copy is corrupt: %s", kvc_last_error());
    static const sequence empty = {.exact_to = INT32_MAX};
    int64_t right = 0;
    for (int i = 0; i < num; i++) right += holds_tokens(&w.o, &sequences[i]);
    if (!w.o.crowded && kvc_sequences(cache, NULL, 0) != right) wrong("a copy has other sequences");
    for (int i = 0; i < num && !w.o.crowded; i++)
        check_sequence(cache, ids[i], holds_any(&w.o, &sequences[i]) ? &sequences[i] : &empty, -1);
}

/* Returns how many rows of all groups are new, and lets `lost` be how many are gone. */
static int64_t count_new(const oracle *before, const oracle *after, int64_t *lost) {
    int64_t num = 0;
    *lost = 0;
    for (int l = 0; l < after->num_layers; l++)
        for (int s = 0; leads_group(after, l) && s < SLOTS; s++) {
            const rows *list = &after->sequences[s].layers[l];
            *lost += before->sequences[s].layers[l].num - list->num;
            for (int i = 0; i < list->num; i++) num += list->at[i].slot >= before->next_slot;
        }
    return num;
}

/* Whether no sequence of a batch is stored, nor has blocks that a prefix lays by. */
static int is_all_unstored(const oracle *o, const batch *b) {
    for (int t = 0; t < b->num; t++)
        if (!b->unstored[t] || o->sequences[b->slots[t]].prefix) return 0;
    return 1;
}

/* Compares what a call that succeeded, alone, has added to the statistics. */
void check_counted(const call *c, const oracle *before, const oracle *after) {
    kvc_stats now;
    const kvc_stats *was = &me->before.stats;
    int64_t lost, tokens_kept = 0;
    right_fn *const right = operations[c->operation].right;
    const int commits = right == right_commit, aborts = right == right_abort || right == right_vain,
              begins = right == right_begin || right == right_vain || right == right_reserve;
    const int64_t copied = count_new(before, after, &lost);
    const int copies = right == right_remove || right == right_move || right == right_inject;
    const batch *b = &before->batches[c->client];
    kvc_get_stats(w.cache, &now, sizeof now);
    for (int t = 0; commits && t < b->num; t++) tokens_kept += (!c->flag || c->marks[t]) && !b->unstored[t];
    if (now.batches - was->batches != commits || now.aborted - was->aborted != aborts ||
        now.tokens - was->tokens != tokens_kept)
        wrong("%d tokens are counted, not %d", (int)(now.tokens - was->tokens), (int)tokens_kept);
    const int64_t more = now.rows_copied - was->rows_copied - copied; /* of kept blocks and views */
    if (copies && !before->has_twins && (more < 0 || (more > 0 && !was->retained && !before->num_holds)))
        wrong("%d rows are copied, not %d", (int)(more + copied), (int)copied);
    if (commits && is_all_unstored(before, b) && !before->num_holds && !has_windows(before) &&
        now.blocks_free > was->blocks_free)
        wrong("%d blocks of sequences that are not stored stay", (int)(now.blocks_free - was->blocks_free));
    if (begins && now.rows_expired - was->rows_expired != lost)
        wrong("%d rows expire, not %d", (int)(now.rows_expired - was->rows_expired), (int)lost);
}

void take_picture(void) {
    me->before.turns = drive.turns ? drive.turns() : 0; /* first: the rest is as it was then, unless others run */
    me->before.faults = drive.num_faults();
    kvc_get_stats(w.cache, &me->before.stats, sizeof me->before.stats);
    me->before.nbytes = kvc_nbytes(w.cache);
}

/* A call that failed has changed nothing, unless others have run meanwhile. */
void check_unchanged(const call *c) {
    const picture was = me->before;
    take_picture();
    const picture now = me->before;
    me->before = was;
    if (w.o.crowded && (!drive.turns || drive.turns() != was.turns)) return;
    if (now.nbytes != was.nbytes)
        wrong("answers \"%s\", and has %lld bytes, not %lld", kvc_strerror(c->status), (long long)now.nbytes,
              (long long)was.nbytes);
    if (memcmp(&now.stats, &was.stats, sizeof now.stats))
        wrong("answers \"%s\", and has other statistics", kvc_strerror(c->status));
    if (!w.o.crowded) look_around();
}

void take_events(int evicts) {
    static kvc_prefix_event events[MOST_EVENTS];
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &w.o.prefixes[i];
        int64_t num, lost;
        if (!p->is_there || !p->config.max_events) continue;
        if (kvc_prefix_take_events(w.prefixes[i], events, sizeof *events, MOST_EVENTS, &num, &lost)) wrong("no events");
        if (lost) p->has_lost = 1;
        for (int64_t j = 0; j < num && !p->has_lost; j++) {
            int is_kept_again = 0;
            for (int64_t k = j + 1; k < num; k++)
                is_kept_again |= !memcmp(events[k].name, events[j].name, KVC_NAME_BYTES);
            note_event(&w.o, p, &events[j], evicts, is_kept_again);
        }
    }
}
