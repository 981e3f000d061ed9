/* checks.c: compares what the library says with the oracle. */
#include "known.h"

/* ---- texts */

/* Whether a token at a position sees the token before it.  If so, blocks before it decide what is known up to there. */
static int sees_last(const world *w, int position) {
    for (int l = 0; l < w->shape.num_layers; l++)
        if (position && w->shape.sees[l][position] >> (position - 1) & 1) return 1;
    return 0;
}

/* The largest known n up to a limit is the only thing that any call goes by. */
static void check_others(world *w, prefix *p, int node, int matched) {
    const int length = text_length(node), n = pick(w, length + 1);
    text_tokens tokens;
    int32_t m, rows;
    if (n > 0) {
        must(w, kvc_prefix_lookup(p->handle, tokens_of(text_begin(node, n), &tokens), &m, &rows));
        if (m > least(n, matched) || (n >= matched && m < matched && sees_last(w, matched)))
            fail(w, "%s: of %d tokens %d are known, of the first %d %d", spell(node), length, matched, n, m);
    }
    if (length < MOST_TEXT) {
        must(w, kvc_prefix_lookup(p->handle, tokens_of(text_behind(node, pick(w, SYMBOLS)), &tokens), &m, &rows));
        if (m < matched) fail(w, "%s: %d tokens are known, with one more %d", spell(node), matched, m);
    }
}

int check_lookup(world *w, prefix *p, int node) {
    if (!node) return 0;
    text_tokens tokens;
    const int length = text_length(node);
    int32_t matched = -1, with_rows = -1;
    must(w, kvc_prefix_lookup(p->handle, tokens_of(node, &tokens), &matched, &with_rows));
    const int sure = known(w, p, node, length, 1, 1), may = known(w, p, node, length, 0, 1);
    const int sure_rows = known(w, p, node, length, 1, 0), may_rows = known(w, p, node, length, 0, 0);
    if (matched < sure || matched > may)
        fail(w, "prefix %d, %s (%d): lookup says %d, but %d to %d are known", (int)(p - w->prefixes), spell(node),
             length, matched, sure, may);
    if (with_rows < sure_rows || with_rows > may_rows || with_rows < matched)
        fail(w, "prefix %d, %s: lookup says that %d tokens have rows, but %d to %d have, and %d are known",
             (int)(p - w->prefixes), spell(node), with_rows, sure_rows, may_rows, matched);
    if (!p->config.state_bytes && with_rows != matched)
        fail(w, "prefix %d, %s: %d tokens have rows, %d are known", (int)(p - w->prefixes), spell(node), with_rows,
             matched);
    check_others(w, p, node, matched);
    return matched;
}

/* ---- sequences */

void rows_of(const world *w, const sequence *s, uint64_t *rows) {
    int32_t positions[4 * MOST_TEXT];
    for (int l = 0; l < w->shape.num_layers; l++) {
        rows[l] = 0;
        if (!w->shape.has_rows[l]) continue;
        const int64_t n = kvc_positions(w->caches[s->cache], s->id, l, positions, 4 * MOST_TEXT);
        for (int64_t i = 0; i < n; i++)
            if (positions[i] < 64) rows[l] |= (uint64_t)1 << positions[i];
    }
}

static void check_rows(world *w, sequence *s, int l, uint64_t rows) {
    float k[MOST_HEADS][MOST_TEXT][DIM], v[MOST_HEADS][MOST_TEXT][DIM], own_k[DIM], own_v[DIM];
    const kvc_layer *layer = &w->shape.layers[l];
    const int stride = layer->policy.kind == KVC_FULL && layer->policy.stride > 1 ? layer->policy.stride : 1;
    const kvc_rows_out out = {.struct_size = sizeof out, /* each row goes to its position */
                              .k = k[0][stride - 1],
                              .v = has_values(&w->shape, l) ? v[0][stride - 1] : NULL,
                              .k_head_stride = sizeof k[0],
                              .k_row_stride = (int64_t)sizeof k[0][0] * stride,
                              .v_head_stride = sizeof v[0],
                              .v_row_stride = (int64_t)sizeof v[0][0] * stride};
    const int n = least(text_length(s->node), s->exact);
    if (!n) return;
    must(w, kvc_extract(w->caches[s->cache], s->id, l, 0, n, &out));
    for (int i = 0; i < n; i++) {
        if (!(rows >> i & 1)) continue;
        for (int h = 0; h < layer->num_kv_heads; h++) {
            make_row(w, s->model, l, h, text_begin(s->node, i + 1), own_k, own_v);
            if (memcmp(own_k, k[h][i], sizeof own_k) ||
                (has_values(&w->shape, l) && memcmp(own_v, v[h][i], sizeof own_v)))
                fail(w, "sequence %d: the row at %d in layer %d is not one of %s", (int)s->id, i, l, spell(s->node));
        }
    }
}

void check_sequence(world *w, sequence *s) {
    uint64_t rows[MOST_LAYERS];
    const int length = text_length(s->node);
    const int32_t next = kvc_next_position(w->caches[s->cache], s->id),
                  exact = kvc_exact_to(w->caches[s->cache], s->id);
    if (s->is_loose) return;
    if (next != length) fail(w, "sequence %d goes on at %d, not at %d", (int)s->id, next, length);
    if (exact != s->exact) fail(w, "sequence %d is exact to %d, not to %d", (int)s->id, exact, s->exact);
    rows_of(w, s, rows);
    for (int l = 0; l < w->shape.num_layers; l++) {
        if (!w->shape.has_rows[l]) continue;
        if (s->exact == INT32_MAX && w->shape.sees[l][length] & ~rows[l])
            fail(w, "sequence %d, %s: layer %d lacks rows", (int)s->id, spell(s->node), l);
        check_rows(w, s, l, rows[l]);
    }
}

/* ---- events */

static int follow(prefix *p, const uint8_t *name) {
    for (int i = 0; i < p->num_followed; i++)
        if (!memcmp(p->followed[i], name, KVC_NAME_BYTES)) return i;
    return -1;
}

static void take_event(world *w, prefix *p, const kvc_prefix_event *e) {
    const int at = e->kind == KVC_BLOCKS_CLEARED ? -1 : follow(p, e->name);
    trace(w, "  event %d of the block at %d: %02x%02x", e->kind, e->begin, e->name[0], e->name[1]);
    if (e->kind == KVC_BLOCKS_CLEARED) {
        p->num_followed = 0;
        p->has_lost = 0;
    } else if (e->kind == KVC_BLOCK_KEPT) {
        if (at >= 0 && !p->has_lost)
            fail(w, "prefix %d: an event of a block that was kept before", (int)(p - w->prefixes));
        if (at < 0 && p->num_followed < FOLLOWED) memcpy(p->followed[p->num_followed++], e->name, KVC_NAME_BYTES);
    } else if (e->kind == KVC_BLOCK_DROPPED) {
        if (at < 0 && !p->has_lost) fail(w, "prefix %d: an event of a block that was not kept", (int)(p - w->prefixes));
        if (at >= 0) memcpy(p->followed[at], p->followed[--p->num_followed], KVC_NAME_BYTES);
    } else {
        fail(w, "an event of kind %d", e->kind);
    }
}

/* Compares the blocks that events left with the known blocks. */
static void check_followed(world *w, prefix *p) {
    text_tokens tokens;
    int32_t matched;
    for (int i = 0; i < p->num_blocks; i++) {
        const kept *b = &p->blocks[i];
        if (b->end - b->begin != w->shape.block || follow(p, b->name) >= 0) continue;
        must(w, kvc_prefix_lookup(p->handle, tokens_of(b->node, &tokens), &matched, NULL));
        if (matched == b->end)
            fail(w, "prefix %d: %s is known, and no event said so", (int)(p - w->prefixes), spell(b->node));
    }
    for (int i = 0; i < p->num_followed && !p->config.ttl_ms; i++) {
        int is_kept = 0;
        for (int j = 0; j < p->num_blocks; j++) is_kept |= !memcmp(p->blocks[j].name, p->followed[i], KVC_NAME_BYTES);
        if (!is_kept) fail(w, "prefix %d: an event said that a block is known which is not", (int)(p - w->prefixes));
    }
}

void take_events(world *w, prefix *p, int64_t most) {
    static kvc_prefix_event events[4096];
    int64_t num, lost;
    if (!p->config.max_events) return;
    must(w, kvc_prefix_take_events(p->handle, events, sizeof *events, most, &num, &lost));
    if (num > most) fail(w, "%d events of at most %d", (int)num, (int)most);
    if (lost) {
        if (num < most && num + lost <= p->config.max_events)
            fail(w, "%d events were lost before %d, of %d", (int)lost, (int)num, p->config.max_events);
        p->has_lost = 1;
    }
    for (int64_t i = 0; i < num; i++) take_event(w, p, &events[i]);
    if (num < most && !p->has_lost) check_followed(w, p);
}

/* ---- statistics */

static int within(int64_t value, int64_t least_value, int64_t most) { return least_value <= value && value <= most; }

static void check_states(world *w, prefix *p, const kvc_prefix_stats *s) {
    int64_t sure = 0, sure_bytes = 0, may_bytes = 0;
    uint8_t bytes[MOST_STATE];
    for (int i = 0; i < p->num_states; i++) {
        const int size = make_state(w, p->model, p->states[i].node, bytes);
        may_bytes += size;
        if (p->states[i].is_sure) sure++, sure_bytes += size;
    }
    const int is_late = p->config.ttl_ms != 0; /* expired ones may wait to be dropped */
    if (!within(s->checkpoints, sure, is_late ? INT64_MAX : p->num_states) ||
        !within(s->checkpoint_bytes, sure_bytes, is_late ? INT64_MAX : may_bytes))
        fail(w, "prefix %d: %d states of %d bytes are counted, not %d to %d of %d to %d", (int)(p - w->prefixes),
             (int)s->checkpoints, (int)s->checkpoint_bytes, (int)sure, p->num_states, (int)sure_bytes, (int)may_bytes);
    if (p->config.max_checkpoint_bytes && s->checkpoint_bytes > p->config.max_checkpoint_bytes && !p->num_pins)
        fail(w, "prefix %d: states take %d bytes", (int)(p - w->prefixes), (int)s->checkpoint_bytes);
}

static void check_stats(world *w, prefix *p) {
    kvc_prefix_stats s;
    kvc_prefix_get_stats(p->handle, &s, sizeof s);
    trace(w, "  prefix %d: %d blocks of %d tokens, %d states", (int)(p - w->prefixes), (int)s.blocks, (int)s.held,
          (int)s.checkpoints);
    if (s.requests != p->requests || s.hits != p->hits || s.tokens != p->tokens || s.matched != p->matched ||
        s.reused != p->reused)
        fail(w,
             "prefix %d: statistics say %d requests, %d hits, %d tokens, %d matched, %d reused, not %d, %d, %d, %d, %d",
             (int)(p - w->prefixes), (int)s.requests, (int)s.hits, (int)s.tokens, (int)s.matched, (int)s.reused,
             (int)p->requests, (int)p->hits, (int)p->tokens, (int)p->matched, (int)p->reused);
    int num_layers = 0;
    for (int l = 0; l < w->shape.num_layers; l++) num_layers += w->shape.has_rows[l];
    int64_t num = 0, least_blocks = 0, least_held = 0, most_held = 0;
    for (int i = 0; i < SEQUENCES; i++)
        num += w->sequences[i].is_there && w->sequences[i].prefix == 1 + (int)(p - w->prefixes);
    if (s.sequences != num)
        fail(w, "prefix %d: %d sequences, not %d", (int)(p - w->prefixes), (int)s.sequences, (int)num);
    for (int i = 0; i < p->num_blocks; i++) {
        const kept *b = &p->blocks[i];
        most_held += b->end - b->begin;
        if (b->end - b->begin != w->shape.block || num_whole(w, b) < num_layers ||
            known(w, p, b->node, b->end, 1, 1) != b->end)
            continue;
        least_blocks++, least_held += b->end - b->begin;
    }
    if (!within(s.blocks, least_blocks, p->config.ttl_ms ? INT64_MAX : p->num_blocks) ||
        !within(s.held, least_held, p->config.ttl_ms ? INT64_MAX : most_held))
        fail(w, "prefix %d: %d blocks of %d tokens are counted, not %d to %d of %d to %d", (int)(p - w->prefixes),
             (int)s.blocks, (int)s.held, (int)least_blocks, p->num_blocks, (int)least_held, (int)most_held);
    check_states(w, p, &s);
}

unsigned bit_of(const world *w, const prefix *p) { return 1u << (p - w->prefixes); }

void check_limit(const world *w, int cache) {
    const int64_t most = w->shape.config.max_bytes, bytes = kvc_nbytes(w->caches[cache]);
    for (int i = 0; i < PREFIXES; i++)
        if (w->prefixes[i].handle && w->prefixes[i].config.quota) return; /* its bookkeeping may exceed max_bytes */
    if (most && bytes > most) fail(w, "the cache has %lld bytes of %lld", (long long)bytes, (long long)most);
}

void notice_evictions(world *w, int cache, unsigned own) {
    kvc_stats s;
    kvc_get_stats(w->caches[cache], &s, sizeof s);
    const int is_evicted = s.rows_evicted != w->stats[cache].rows_evicted;
    const int may_evict = w->shape.is_limited || w->has_faults; /* blocks go to a batch if memory is refused */
    if (is_evicted && !may_evict) fail(w, "rows were evicted, but nothing is limited");
    w->stats[cache] = s;
    if (is_evicted || w->shape.config.max_bytes) note_evicted(w, cache, own);
}

/* ---- all of it */

void check_step(world *w) {
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &w->prefixes[i];
        if (!p->handle) continue;
        note_time(w, p);
        for (int j = 0; j < 2; j++) check_lookup(w, p, any_text(w));
        check_stats(w, p);
        if (p->config.max_events > 1000 || pick(w, 8) == 0) take_events(w, p, pick(w, 8) ? 4096 : 1 + pick(w, 5));
    }
}

void check_all(world *w) {
    for (int i = 0; i < PREFIXES; i++)
        for (int j = 0; j < TEXTS && w->prefixes[i].handle; j++) check_lookup(w, &w->prefixes[i], w->texts[j]);
    for (int i = 0; i < SEQUENCES; i++)
        if (w->sequences[i].is_there) check_sequence(w, &w->sequences[i]);
    for (int i = 0; i < CACHES; i++)
        if (w->caches[i] && kvc_validate(w->caches[i])) fail(w, "%s", kvc_last_error());
}
