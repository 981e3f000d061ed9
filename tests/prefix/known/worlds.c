/* worlds.c: caches of random shapes, with limits or without, and prefixes of several models and tenants. */
#include "known.h"

/* ---- shapes */

static void choose_policy(world *w, int family, int l, kvc_policy *p) {
    const int is_full = family == 0 || (family != 2 && l == 0);
    *p = (kvc_policy){.kind = is_full ? KVC_FULL : pick(w, 3) ? KVC_SLIDING : KVC_CHUNKED};
    if (family == 3 && l) p->kind = KVC_CHUNKED;
    if (p->kind == KVC_SLIDING) {
        p->window = pick(w, 8) ? 2 + pick(w, 9) : 1; /* a window of 1 sees nothing */
        if (pick(w, 3) == 0) p->num_sink_tokens = 1 + pick(w, 4);
        if (pick(w, 4) == 0) p->resume_window = p->window + pick(w, 8);
    }
    if (p->kind == KVC_CHUNKED) {
        p->attention_chunk_size = pick(w, 8) ? 2 + pick(w, 9) : 1;
        if (pick(w, 4) == 0) p->resume_window = pick(w, 8);
    }
}

/* Fills in fields that nothing uses, and writes what counts in other ways. */
static void add_what_is_ignored(world *w, kvc_layer *l) {
    if (pick(w, 2)) return;
    if (l->value_in_key) l->value_in_key = 2;
    if (!l->v_dim) l->v_type = 77, l->v_transform = KVC_TRANSFORM_HADAMARD;
    if (l->policy.kind != KVC_SLIDING) l->policy.window = 3, l->policy.num_sink_tokens = pick(w, 3);
    if (l->policy.kind == KVC_FULL) l->policy.resume_window = 5;
    if (l->policy.kind == KVC_FULL && !l->policy.stride) l->policy.stride = 1;
    if (l->policy.kind == KVC_NONE) l->policy.stride = 3;
    if (l->policy.kind != KVC_CHUNKED) l->policy.attention_chunk_size = 9;
    if (l->policy.kind == KVC_SLIDING && !l->policy.resume_window) l->policy.resume_window = l->policy.window;
    l->policy.max_len = 4;
    l->rope.first_dim = 2, l->rope.interleaved = 1;
}

static uint64_t seen(const kvc_policy *p, int n) {
    const uint64_t before = ((uint64_t)1 << n) - 1;
    if (p->kind == KVC_FULL) return before;
    if (p->kind == KVC_CHUNKED) return before & ~(((uint64_t)1 << (n - n % p->attention_chunk_size)) - 1);
    const int first = n - p->window + 1 > 0 ? n - p->window + 1 : 0;
    const uint64_t sinks = ((uint64_t)1 << p->num_sink_tokens) - 1;
    return before & (sinks | ~(((uint64_t)1 << first) - 1));
}

void vary_layers(world *w, shape *s) {
    for (int i = 0; i < s->num_layers; i++)
        if (!s->layers[i].share && (i + 1 == s->num_layers || !s->layers[i + 1].share))
            add_what_is_ignored(w, &s->layers[i]);
}

/* Gives some layers a row for every n-th token. */
static void add_strides(world *w, shape *s) {
    const int stride = 2 + pick(w, 3);
    s->unit = 1;
    if (pick(w, 3)) return;
    for (int i = 1; i < s->num_layers; i++)
        if (pick(w, 3)) s->layers[i].policy = (kvc_policy){.kind = KVC_FULL, .stride = s->unit = stride};
    if (s->unit == 1 || pick(w, 2)) return;
    const kvc_layer first = s->layers[0]; /* has all tokens, and may come last */
    s->layers[0] = s->layers[s->num_layers - 1];
    s->layers[s->num_layers - 1] = first;
}

/* Notes at which positions a layer has rows, and which of them a token sees. */
static void note_rows(shape *s, int i) {
    const int stride = s->layers[i].policy.kind == KVC_FULL && s->layers[i].policy.stride > 1 ? s->unit : 1;
    s->has[i] = 0;
    for (int at = stride - 1; at < 64 && s->has_rows[i]; at += stride) s->has[i] |= (uint64_t)1 << at;
    for (int n = 0; n <= MOST_TEXT; n++) s->sees[i][n] = seen(&s->layers[i].policy, n) & s->has[i];
}

void make_layers(world *w, shape *s) {
    static const int families[] = {0, 0, 0, 1, 1, 1, 2, 2, 3, 3};
    const int family = families[pick(w, 10)];
    s->num_layers = 1 + pick(w, 3);
    if (family == 1 || family == 3) s->num_layers += s->num_layers == 1;
    s->has_windows = 0;
    for (int i = 0; i < s->num_layers; i++) {
        kvc_layer *l = &s->layers[i];
        *l = (kvc_layer){.num_kv_heads = 1 + pick(w, MOST_HEADS), .k_dim = DIM, .v_dim = DIM};
        l->k_type = pick(w, 3) ? KVC_F32 : KVC_F16;
        l->v_type = pick(w, 3) ? KVC_F32 : KVC_F16;
        if (pick(w, 5) == 0) l->value_in_key = 1, l->v_dim = 2, l->v_type = l->k_type;
        if (pick(w, 5) == 0) l->value_in_key = 0, l->v_dim = 0, l->v_type = 0;
        choose_policy(w, family, i, &l->policy);
        l->rope.kind = KVC_ROPE_NONE;
        s->has_rows[i] = 1;
    }
    add_strides(w, s);
    for (int i = 0; i < s->num_layers; i++) s->has_windows |= s->layers[i].policy.kind != KVC_FULL;
    if (s->num_layers < MOST_LAYERS && pick(w, 4) == 0) {
        const int i = s->num_layers++;
        s->layers[i] = s->layers[i - 1];
        s->has_rows[i] = 0;
        if (pick(w, 2))
            s->layers[i].share = i;
        else
            s->layers[i].policy = (kvc_policy){.kind = KVC_NONE};
    }
    for (int i = 0; i < s->num_layers; i++) note_rows(s, i);
    vary_layers(w, s);
}

static void *take_memory(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    world *w = user;
    (void)hint;
    if (w->is_short && w->fails_on) return NULL;
    if (w->fails_in && !--w->fails_in) {
        w->is_short = 1;
        return NULL;
    }
    __atomic_fetch_add(&w->memory, (int64_t)size, __ATOMIC_RELAXED);
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void free_memory(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    (void)hint;
    __atomic_fetch_sub(&((world *)user)->memory, (int64_t)size, __ATOMIC_RELAXED);
    free(memory);
}

void make_shape(world *w, shape *s) {
    static kvc_allocator allocator;
    allocator = (kvc_allocator){.struct_size = sizeof allocator, .user = w, .alloc = take_memory, .free = free_memory};
    memset(s, 0, sizeof *s);
    make_layers(w, s);
    s->block = pick(w, 4) ? 1 + pick(w, 6) : 1 + pick(w, 16);
    s->block = (s->block + s->unit - 1) / s->unit * s->unit;
    s->config = (kvc_config){.struct_size = sizeof s->config,
                             .layer_size = sizeof *s->layers,
                             .num_layers = s->num_layers,
                             .block_size = s->block,
                             .num_threads = 1,
                             .allocator = &allocator};
    s->config.layers = s->layers;
    if (pick(w, 3) == 0) {
        s->is_limited = 1;
        if (pick(w, 2))
            s->config.capacity = MOST_TEXT + 16 + pick(w, 150);
        else
            s->config.max_bytes = 20000 + 1000 * pick(w, 60);
    }
}

/* ---- models and prefixes */

static int is_same(const char *a, const char *b) { return !strcmp(a ? a : "", b ? b : ""); }

void make_models(world *w) {
    static const char *const fingerprints[] = {"a", "a", "b", "ab"};
    static const char *const identities[] = {NULL, NULL, NULL, "a", "i"};
    static const char *const salts[] = {NULL, NULL, "b", "x"};
    static const int states[] = {0, 0, 0, 1, 8, 24};
    for (int i = 0; i < MODELS; i++) {
        model *m = &w->models[i];
        *m = (model){fingerprints[pick(w, 4)], identities[pick(w, 5)], salts[pick(w, 4)], states[pick(w, 6)], i};
        for (int j = i; j-- > 0;) {
            const model *o = &w->models[j];
            const int is_like = m->identity ? o->identity && is_same(m->identity, o->identity)
                                            : !o->identity && is_same(m->fingerprint, o->fingerprint);
            if (is_like && is_same(m->salt, o->salt) && m->state_bytes == o->state_bytes) m->like = o->like;
        }
    }
}

void make_prefix(world *w, prefix *p, int cache) {
    free(p->blocks);
    free(p->states);
    *p = (prefix){.cache = cache, .model = pick(w, MODELS)};
    const model *m = &w->models[p->model];
    kvc_prefix_config *c = &p->config;
    *c = (kvc_prefix_config){.struct_size = sizeof *c, .fingerprint = m->fingerprint, .salt = m->salt};
    c->salt_size = m->salt ? (int64_t)strlen(m->salt) : 0;
    c->identity = m->identity;
    c->identity_size = m->identity ? (int64_t)strlen(m->identity) : 0;
    c->state_bytes = m->state_bytes;
    if (m->state_bytes && pick(w, 2)) c->max_checkpoint_bytes = m->state_bytes + pick(w, 4 * m->state_bytes);
    if (pick(w, 4) == 0) c->ttl_ms = 1050;
    if (pick(w, 4) == 0) c->quota = 1 + pick(w, 60);
    if (pick(w, 6) == 0 && !m->state_bytes && w->shape.unit == 1) c->reuse_min_tokens = 1 + pick(w, 6);
    if (c->salt_size) c->secret = "secret", c->secret_size = 6;
    c->collects_new = pick(w, 3) != 0;
    if (pick(w, 3)) c->max_events = pick(w, 4) ? 100000 : 1 + pick(w, 20);
    c->user = p;
    kvc_status status;
    w->call = "kvc_prefix_new";
    kvc_prefix *handle = NULL;
    CALL(w, status, kvc_prefix_new(w->caches[cache], c, &handle));
    p->handle = handle;
    trace(w,
          "prefix %d of cache %d: model %d (fingerprint %s, identity %s, salt %s), state_bytes %d, at most %d, ttl_ms "
          "%d, "
          "quota %d, reuse_min_tokens %d, collects_new %d, max_events %d: %d",
          (int)(p - w->prefixes), cache, p->model, m->fingerprint, m->identity ? m->identity : "-",
          m->salt ? m->salt : "-", m->state_bytes, (int)c->max_checkpoint_bytes, (int)c->ttl_ms, (int)c->quota,
          c->reuse_min_tokens, c->collects_new, c->max_events, status);
    if (status == KVC_ERR_FULL && w->shape.config.max_bytes)
        p->handle = NULL;
    else
        must(w, status);
    notice_evictions(w, cache, 0);
}

void free_prefix(world *w, prefix *p) {
    if (!p->handle) return;
    trace(w, "free prefix %d", (int)(p - w->prefixes));
    kvc_prefix_free(p->handle);
    p->handle = NULL;
    for (int i = 0; i < SEQUENCES; i++)
        if (w->sequences[i].prefix == 1 + (int)(p - w->prefixes)) w->sequences[i].prefix = 0;
    note_bars(w, p, 0);
    note_cleared(p);
    p->num_pins = 0;
}

void free_cache(world *w, int cache) {
    if (!w->caches[cache]) return;
    for (int i = 0; i < SEQUENCES; i++)
        if (w->sequences[i].cache == cache) w->sequences[i].is_there = 0;
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &w->prefixes[i];
        if (p->handle && p->cache == cache && pick(w, 2))
            free_prefix(w, p);
        else if (p->handle && p->cache == cache)
            p->handle = NULL, note_cleared(p), note_bars(w, p, 0); /* goes with the cache */
    }
    must(w, kvc_cache_free(w->caches[cache]));
    w->caches[cache] = NULL;
}

void make_world(world *w) {
    make_shape(w, &w->shape);
    make_models(w);
    w->has_faults = pick(w, 4) == 0;
    const shape *s = &w->shape;
    trace(w, "block_size %d, capacity %d, max_bytes %d", s->block, (int)s->config.capacity, (int)s->config.max_bytes);
    for (int i = 0; i < s->num_layers; i++) {
        const kvc_policy *p = &s->layers[i].policy;
        trace(w, "layer %d: share %d, kind %d, window %d, sinks %d, resume %d, chunk %d, stride %d", i,
              s->layers[i].share, p->kind, p->window, p->num_sink_tokens, p->resume_window, p->attention_chunk_size,
              p->stride);
    }
    must(w, kvc_cache_new(&s->config, &w->caches[0]));
    w->last_id[0] = w->last_id[1] = -1;
    for (int i = 0; i < TEXTS; i++) do_new_text(w);
    for (int i = 0; i < 3; i++) make_prefix(w, &w->prefixes[i], 0);
}

void free_world(world *w) {
    for (int i = 0; i < CACHES; i++) free_cache(w, i);
    for (int i = 0; i < PREFIXES; i++) {
        free(w->prefixes[i].blocks);
        free(w->prefixes[i].states);
    }
    free_store();
    w->call = "the end";
    if (w->memory) fail(w, "%lld bytes are left", (long long)w->memory);
}
