/* stores.c: a store in memory that fails now and then, payloads, and names: each is of one text and one kind of rows.
 */
#include "known.h"
#include "support/payloads.h"

enum { HEADER = 128, MOST_PAYLOAD = 1 << 14, MOST_NAMES = 1 << 17, MOST_VALUES = 1 << 12, MOST_READS = 256 };

/* ---- names, over many runs of the program */

typedef struct named {
    uint8_t name[KVC_NAME_BYTES];
    uint64_t fewest, all; /* hashes of what must tell names apart, and of all that may */
    int node, is_there;
} named;

static named *by_name, *by_text; /* tables of MOST_NAMES */
static int num_named;

static uint64_t hash_of(uint64_t hash, const void *data, size_t size) {
    for (size_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3;
    return hash;
}

static uint64_t hash_text(uint64_t hash, const char *text) { return hash_of(hash, text, strlen(text) + 1); }

static uint64_t hash_number(uint64_t hash, int64_t number) { return hash_of(hash, &number, sizeof number); }

/* The layers of a shape.  Some policies give a block another name, some do not. */
static uint64_t hash_shape(const shape *s, int with_policies) {
    uint64_t hash = hash_number(hash_number(7, s->block), s->num_layers);
    for (int i = 0; i < s->num_layers; i++) {
        const kvc_layer *l = &s->layers[i];
        const kvc_policy *p = &l->policy;
        const int64_t sizes[] = {l->num_kv_heads,
                                 l->k_dim,
                                 l->v_dim,
                                 l->k_type,
                                 l->v_dim ? l->v_type : 0,
                                 l->value_in_key != 0,
                                 p->kind == KVC_FULL && p->stride > 1 ? p->stride : 1};
        if (p->kind != KVC_NONE) hash = hash_of(hash, sizes, sizeof sizes);
        if (!with_policies) continue;
        const int is_sliding = p->kind == KVC_SLIDING, is_chunked = p->kind == KVC_CHUNKED;
        const int64_t policy[] = {l->share,
                                  p->kind,
                                  is_sliding ? p->window : 0,
                                  is_sliding ? p->num_sink_tokens : 0,
                                  is_sliding && !p->resume_window ? p->window
                                  : is_sliding || is_chunked      ? p->resume_window
                                                                  : 0,
                                  is_chunked ? p->attention_chunk_size : 0};
        hash = hash_of(hash, policy, sizeof policy);
        if (p->kind == KVC_NONE) hash = hash_of(hash, sizes, sizeof sizes);
    }
    return hash;
}

static uint64_t hash_model(const world *w, int model_index, int with_policies) {
    const model *m = &w->models[model_index];
    uint64_t hash = hash_text(14695981039346656037u, m->salt ? m->salt : "");
    hash = hash_number(hash, m->state_bytes);
    if (m->identity)
        hash = hash_text(hash_number(hash, 1), m->identity);
    else
        hash =
            hash_number(hash_text(hash_number(hash, 2), m->fingerprint), (int64_t)hash_shape(&w->shape, with_policies));
    return with_policies && m->identity ? hash_number(hash, (int64_t)hash_shape(&w->shape, 1)) : hash;
}

static named *entry(named *table, uint64_t hash, const void *key, size_t size, size_t at) {
    for (uint64_t i = hash;; i++) {
        named *n = &table[i % MOST_NAMES];
        if (!n->is_there || !memcmp((const uint8_t *)n + at, key, size)) return n;
    }
}

void begin_names(void) {
    if (by_name && num_named < MOST_NAMES / 2) return;
    free(by_name), free(by_text);
    by_name = calloc(MOST_NAMES, sizeof *by_name), by_text = calloc(MOST_NAMES, sizeof *by_text);
    num_named = 0;
}

/* Returns what has a name; NULL: nothing that was seen. */
static named *named_by(const uint8_t *name) {
    named *n = entry(by_name, hash_of(1, name, KVC_NAME_BYTES), name, KVC_NAME_BYTES, offsetof(named, name));
    return n->is_there ? n : NULL;
}

void check_name(world *w, int model_index, int node, const uint8_t *name) {
    named *n = named_by(name);
    const uint64_t fewest = hash_model(w, model_index, 0), all = hash_model(w, model_index, 1);
    if (n && (n->fewest != fewest || n->node != node))
        fail(w, "a block of model %d, %s, and another, %s, have one name", model_index, spell(node), spell(n->node));
    uint64_t slot = hash_number(all, node);
    while (by_text[slot % MOST_NAMES].is_there &&
           (by_text[slot % MOST_NAMES].all != all || by_text[slot % MOST_NAMES].node != node))
        slot++;
    named *t = &by_text[slot % MOST_NAMES];
    if (t->is_there && memcmp(t->name, name, KVC_NAME_BYTES))
        fail(w, "a block of model %d, %s, has another name than before", model_index, spell(node));
    if (t->is_there) return;
    if (num_named > MOST_NAMES * 3 / 4) fail(w, "one run has %d names", num_named);
    *t = (named){.fewest = fewest, .all = all, .node = node, .is_there = 1};
    memcpy(t->name, name, KVC_NAME_BYTES);
    num_named++;
    if (!n) *entry(by_name, hash_of(1, name, KVC_NAME_BYTES), name, KVC_NAME_BYTES, offsetof(named, name)) = *t;
}

void do_names(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = any_text(w), block = w->shape.block;
    text_tokens tokens;
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num = -1;
    must(w, kvc_prefix_names(p->handle, tokens_of(node, &tokens), names[0], MOST_TEXT, &num));
    if (num != text_length(node) / block) fail(w, "%s has %d names", spell(node), (int)num);
    for (int i = 0; i < num; i++) check_name(w, p->model, text_begin(node, (i + 1) * block), names[i]);
}

/* ---- payloads */

static uint16_t half_of(float x) { /* of an integer below 2048 */
    int e = 0;
    if (x == 0) return 0;
    while (x >= 2) x /= 2, e++;
    return (uint16_t)((e + 15) << 10 | (int)((x - 1) * 1024));
}

static void check_elements(const world *w, const float *own, int type, int dim, const uint8_t **at,
                           const uint8_t *end) {
    for (int i = 0; i < dim; i++) {
        const int size = type == KVC_F32 ? 4 : 2;
        const uint16_t half = half_of(own[i]);
        if (*at + size > end) fail(w, "a payload is too short");
        if (memcmp(*at, type == KVC_F32 ? (const void *)&own[i] : (const void *)&half, (size_t)size))
            fail(w, "a payload has other rows");
        *at += size;
    }
}

void read_payload(const world *w, int model_index, int node, const uint8_t *payload, int64_t size, uint64_t *rows,
                  int *state_node) {
    const uint8_t *at = payload + w->shape.num_layers, *end = payload + size;
    const int block = w->shape.block, begin = text_length(node) - block;
    float k[DIM], v[DIM];
    uint8_t own[MOST_STATE];
    if (size < w->shape.num_layers) fail(w, "a payload of %d bytes", (int)size);
    for (int l = 0; l < w->shape.num_layers; l++) {
        const kvc_layer *layer = &w->shape.layers[l];
        rows[l] = 0;
        if (payload[l] > 1 || (payload[l] && !w->shape.has_rows[l]))
            fail(w, "a payload has byte %d of layer %d", payload[l], l);
        if (!payload[l]) continue;
        for (int part = 0; part < (has_values(&w->shape, l) ? 2 : 1); part++) {
            for (int h = 0; h < layer->num_kv_heads; h++) {
                for (int i = 0; i < block; i++) {
                    if (!(w->shape.has[l] >> (begin + i) & 1)) continue;
                    make_row(w, model_index, l, h, text_begin(node, begin + i + 1), k, v);
                    check_elements(w, part ? v : k, part ? layer->v_type : layer->k_type, DIM, &at, end);
                    rows[l] |= (uint64_t)1 << (begin + i);
                }
            }
        }
    }
    *state_node = 0;
    if (at == end) return;
    if (end - at < 5 || !w->models[model_index].state_bytes) fail(w, "a payload is %d bytes too long", (int)(end - at));
    const int position = at[0] | at[1] << 8 | at[2] << 16 | at[3] << 24;
    if (position <= begin || position > begin + block) fail(w, "a state at %d in a block at %d", position, begin);
    *state_node = text_begin(node, position);
    if (make_state(w, model_index, *state_node, own) != end - at - 4 || memcmp(own, at + 4, (size_t)(end - at - 4)))
        fail(w, "a payload has another state");
}

/* ---- the store */

typedef struct value {
    uint8_t name[KVC_NAME_BYTES];
    int64_t size;
    uint8_t *bytes;
    int is_payload, has_state;
} value;

enum { NO_FAULT, FAILS, ALTERS, CONFUSES };

static value values[MOST_VALUES];
static int num_values, fault, fault_after, num_reads, num_served, num_writes;
static int served[MOST_READS]; /* the numbers of the reads that brought the right value */
static uint8_t reads[MOST_READS][KVC_NAME_BYTES];
static world *the_world;

static value *find_value(const uint8_t *name, int is_payload) {
    for (int i = 0; i < num_values; i++)
        if (values[i].is_payload == is_payload && !memcmp(values[i].name, name, KVC_NAME_BYTES)) return &values[i];
    return NULL;
}

static void keep_value(const uint8_t *name, const void *bytes, int64_t size, int is_payload, int has_state) {
    value *v = find_value(name, is_payload);
    if (!v && num_values == MOST_VALUES) return;
    if (!v) v = &values[num_values++];
    free(v->bytes);
    *v = (value){.size = size, .bytes = malloc((size_t)size), .is_payload = is_payload, .has_state = has_state};
    memcpy(v->name, name, KVC_NAME_BYTES);
    memcpy(v->bytes, bytes, (size_t)size);
}

void free_store(void) {
    for (int i = 0; i < num_values; i++) free(values[i].bytes);
    memset(values, 0, sizeof values);
    num_values = 0;
}

static int has_fault(int kind) { return fault == kind && fault_after-- == 0; }

static kvc_status read_value(void *user, const uint8_t *name, void *bytes, int64_t most, int64_t *size) {
    (void)user;
    if (num_reads < MOST_READS) memcpy(reads[num_reads++], name, KVC_NAME_BYTES);
    if (has_fault(FAILS)) {
        kvc_set_last_error("the store is away");
        return KVC_ERR_STORE;
    }
    const value *v = find_value(name, 0);
    int is_wrong = 0;
    if (v && has_fault(CONFUSES))
        v = &values[pick(the_world, num_values)],
        is_wrong = v->is_payload || memcmp(v->name, name, KVC_NAME_BYTES) != 0;
    *size = v ? v->size : 0;
    if (!v || v->size > most) return KVC_OK;
    memcpy(bytes, v->bytes, (size_t)v->size);
    if (has_fault(ALTERS)) ((uint8_t *)bytes)[pick(the_world, (int)v->size)] ^= 1, is_wrong = 1;
    if (!is_wrong && num_served < MOST_READS) served[num_served++] = num_reads - 1;
    return KVC_OK;
}

/* Returns a prefix of the model that may have the block; NULL: none. */
static prefix *owner_of(const named *n, kept **block) {
    world *w = the_world;
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &w->prefixes[i];
        if (!p->handle || hash_model(w, p->model, 0) != n->fewest) continue;
        *block = find_kept(p, n->node, text_length(n->node) - w->shape.block);
        if (*block || p->config.ttl_ms) return p;
    }
    return NULL;
}

static kvc_status write_value(void *user, const uint8_t *name, const void *bytes, int64_t size) {
    world *w = the_world;
    kept *block = NULL;
    uint64_t rows[MOST_LAYERS];
    int state_node;
    (void)user;
    num_writes++;
    if (has_fault(FAILS)) {
        kvc_set_last_error("the store is full");
        return KVC_ERR_STORE;
    }
    const named *n = named_by(name);
    prefix *p = n ? owner_of(n, &block) : NULL;
    if (!p) fail(w, "a block is written that is not kept");
    if (size < HEADER) fail(w, "a value of %d bytes", (int)size);
    read_payload(w, p->model, n->node, (const uint8_t *)bytes + HEADER, size - HEADER, rows, &state_node);
    const value *old = find_value(name, 0);
    if (old && old->has_state && !state_node)
        fail(w, "a value with a state is overwritten by one without: %s", spell(n->node));
    trace(w, "  written: %s, state %s", spell(n->node), spell(state_node));
    keep_value(name, bytes, size, 0, state_node != 0);
    return KVC_OK;
}

static kvc_store open_store(world *w) {
    the_world = w;
    fault = pick(w, 4) ? NO_FAULT : 1 + pick(w, 3);
    fault_after = pick(w, 4);
    num_reads = num_served = num_writes = 0;
    return (kvc_store){.struct_size = sizeof(kvc_store), .read = read_value, .write = write_value};
}

/* ---- calls */

/* Whether a block ends where a payload's state stands: a block of the payload's rows, or one that is known, surely or
 * maybe. */
static int has_place(world *w, const prefix *p, int state_node, int begin, const uint64_t *rows, int surely) {
    const uint64_t range = (((uint64_t)1 << text_length(state_node)) - 1) & ~(((uint64_t)1 << begin) - 1);
    const kept *b = find_kept(p, state_node, begin);
    uint64_t any = 0;
    for (int l = 0; l < w->shape.num_layers; l++) any |= rows[l] & range;
    for (int l = 0; b && l < w->shape.num_layers; l++) any |= surely ? b->sure[l] : b->may[l];
    return any != 0;
}

static void note_payload(world *w, prefix *p, int node, const uint8_t *payload, int64_t size) {
    uint64_t rows[MOST_LAYERS];
    int state_node;
    const int begin = text_length(node) - w->shape.block;
    const int is_first = !find_kept(p, node, begin);
    int is_sure = !w->shape.is_limited && !may_lack_room(w, p, p->config.state_bytes);
    for (int end = w->shape.block; end <= begin; end += w->shape.block) {
        const kept *b = find_kept(p, text_begin(node, end), end - w->shape.block);
        is_sure &= b && b->is_sure;
    }
    read_payload(w, p->model, node, payload, size, rows, &state_node);
    if (state_node && !has_place(w, p, state_node, begin, rows, 0)) state_node = 0;
    const int is_placed = state_node && has_place(w, p, state_node, begin, rows, 1);
    note_kept(w, p, node, begin, rows, is_sure);
    kept *b = find_kept(p, node, begin);
    const int sure_new = is_first ? 0 : b->sure_new, may_new = is_first ? 0 : b->may_new;
    if (state_node) {
        if (state_node != node) note_kept(w, p, state_node, begin, rows, is_sure); /* one more block, up to there */
        int *was_new = malloc(sizeof *was_new * (size_t)p->num_blocks); /* it is no news for others, either */
        for (int i = 0; i < p->num_blocks; i++) was_new[i] = p->blocks[i].sure_new;
        const state *old = find_state(p, state_node);
        const long old_use = old ? old->sure_use : 0;
        note_state(w, p, state_node, is_sure && is_placed);
        if (old_use) find_state(p, state_node)->sure_use = old_use; /* a later state of the block may be used instead */
        for (int i = 0; i < p->num_blocks; i++) p->blocks[i].sure_new = was_new[i];
        free(was_new);
    }
    b = find_kept(p, node, begin); /* it may have moved */
    b->sure_new = sure_new, b->may_new = may_new;
}

/* Whether a token behind `length` tokens sees rows of the block up to `end`. */
static int is_seen(const world *w, int length, int end) {
    const uint64_t range = (((uint64_t)1 << end) - 1) & ~(((uint64_t)1 << (end - w->shape.block)) - 1);
    uint64_t any = 0;
    for (int l = 0; l < w->shape.num_layers; l++)
        if (w->shape.has_rows[l]) any |= w->shape.sees[l][length] & range;
    return any != 0;
}

void do_fetch(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = any_text(w), length = text_length(node), most = pick(w, 4) ? -1 : pick(w, length + 2);
    const int limit = most < 0 ? length - 1 : least(most, length - 1), block = w->shape.block;
    const int before = check_lookup(w, p, text_begin(node, limit)), first = before / block;
    text_tokens tokens;
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num;
    int32_t fetched = -1, matched, with_rows = 0;
    const kvc_store store = open_store(w);
    if (limit > 0)
        must(w, kvc_prefix_lookup(p->handle, tokens_of(text_begin(node, limit), &tokens), &matched, &with_rows));
    must(w, kvc_prefix_names(p->handle, tokens_of(node, &tokens), names[0], MOST_TEXT, &num));
    w->call = "kvc_prefix_fetch";
    arm(w);
    const kvc_status status = kvc_prefix_fetch(p->handle, tokens_of(node, &tokens), most, &store, &fetched);
    w->fails_in = w->fails_on = 0;
    trace(w, "fetch of prefix %d: %s, at most %d: %d tokens, %d reads behind %d tokens: %d", (int)(p - w->prefixes),
          spell(node), most, fetched, num_reads, before, status);
    if (status && !(status == KVC_ERR_NOMEM && w->is_short) && !(fault == FAILS && status == KVC_ERR_STORE) &&
        !(fault > FAILS && status == KVC_ERR_FORMAT))
        must(w, status);
    if (fetched < 0 || fetched % block || fetched > num_served * block) fail(w, "%d tokens are fetched", fetched);
    for (int i = 0; i < num_reads; i++)
        if ((first + i + 1) * block > limit || memcmp(reads[i], names[first + i], KVC_NAME_BYTES))
            fail(w, "read %d of a fetch is none of block %d", i, first + i);
    int in_store[2] = {0, 0}; /* it goes on over kept blocks that the store lacks: surely kept ones, or any */
    for (int may = 0; may < 2; may++) {
        for (int end = (first + 1) * block, goes_on = 1; goes_on && end <= limit; end += block) {
            const int is_stored = find_value(names[end / block - 1], 0) != NULL;
            const kept *b = find_kept(p, text_begin(node, end), end - block);
            in_store[may] += is_stored;
            const int has_rows = end <= with_rows && (may || is_seen(w, with_rows, end));
            goes_on = is_stored || ((may || !p->config.ttl_ms) && (has_rows || (b && (may || b->is_sure))));
        }
    }
    int lacking = 0; /* what is not there in any case */
    for (int i = 0; i < num_served; i++) {
        const int end = (first + served[i] + 1) * block;
        lacking += find_kept(p, text_begin(node, end), end - block) == NULL;
    }
    const int may_lack = w->shape.is_limited || may_lack_room(w, p, p->config.state_bytes); /* it ends without room */
    if (!status && fault == NO_FAULT && !w->is_short && !may_lack &&
        (num_served < in_store[0] || num_served > in_store[1] || fetched < lacking * block))
        fail(w,
             "prefix %d: %d tokens of %s are fetched behind %d, and %d read, but %d to %d are stored, %d of them new",
             (int)(p - w->prefixes), fetched, spell(node), before, num_served * block, in_store[0] * block,
             in_store[1] * block, lacking * block);
    note_use(w, p, node, length, 0);
    notice_evictions(w, p->cache, bit_of(w, p));
    for (int i = 0; i < num_served; i++) {
        const int number = first + served[i];
        const value *v = find_value(names[number], 0);
        note_payload(w, p, text_begin(node, (number + 1) * block), v->bytes + HEADER, v->size - HEADER);
    }
    const int after = check_lookup(w, p, text_begin(node, limit));
    if (after < before && !w->shape.is_limited && !p->config.max_checkpoint_bytes)
        fail(w, "fewer tokens are known once they were fetched");
}

/* Whether the blocks that have to be listed were: each of them surely new one. */
static void note_listed(world *w, int cache, int is_all) {
    for (int i = 0; i < PREFIXES; i++) {
        prefix *p = &w->prefixes[i];
        for (int j = 0; p->handle && p->cache == cache && j < p->num_blocks; j++) {
            p->blocks[j].sure_new = 0;
            if (is_all) p->blocks[j].may_new = 0;
        }
    }
}

static void check_written(world *w, const prefix *p) {
    for (int i = 0; i < p->num_blocks; i++) {
        const kept *b = &p->blocks[i];
        if (!b->sure_new || !num_whole(w, b) || !p->config.collects_new) continue;
        const value *v = find_value(b->name, 0);
        if (!v) fail(w, "prefix %d: %s is kept, and not written", (int)(p - w->prefixes), spell(b->node));
        for (int j = 0; j < p->num_states && !w->shape.is_limited; j++) {
            const int n = text_length(p->states[j].node);
            if (p->states[j].is_sure && b->begin < n && n <= b->end && text_begin(b->node, n) == p->states[j].node &&
                !v->has_state)
                fail(w, "prefix %d: the state of %s is kept, and not written with %s", (int)(p - w->prefixes),
                     spell(p->states[j].node), spell(b->node));
        }
    }
}

void do_store(world *w) {
    const int cache = w->caches[1] && pick(w, 2);
    const kvc_store store = open_store(w);
    int64_t num = -1, sum = 0;
    kvc_status status;
    if (fault > FAILS) fault = NO_FAULT; /* what reads first may not replace what it cannot read */
    int has_failed = fault == FAILS;
    do {
        w->call = "kvc_store_new_blocks";
        arm(w);
        status = kvc_store_new_blocks(w->caches[cache], &store, &num);
        w->fails_in = w->fails_on = 0;
        trace(w, "store of cache %d: %d blocks are written: %d", cache, (int)num, status);
        has_failed |= w->is_short;
        if (status && !(status == KVC_ERR_NOMEM && w->is_short) && !(has_failed && status == KVC_ERR_STORE))
            must(w, status);
        sum += num;
        if (num < 0 || sum > num_writes) fail(w, "%d blocks are written, not %d", (int)sum, num_writes);
    } while (status);
    for (int i = 0; i < PREFIXES && !has_failed; i++)
        if (w->prefixes[i].handle && w->prefixes[i].cache == cache) check_written(w, &w->prefixes[i]);
    note_listed(w, cache, 1);
}

static void check_listed(world *w, int cache, const kvc_new_block *b, uint8_t *payload) {
    uint64_t rows[MOST_LAYERS];
    int state_node = 0;
    int64_t size = -1;
    prefix *p = b->user;
    const named *n = named_by(b->name);
    if (!n || !p->handle || p->cache != cache || !p->config.collects_new) fail(w, "a block of nobody is listed");
    kept *k = find_kept(p, n->node, b->begin);
    trace(w, "  listed: %s of prefix %d, id %d", spell(n->node), (int)(p - w->prefixes), (int)b->id);
    if (b->end != text_length(n->node) || b->begin != b->end - w->shape.block)
        fail(w, "a block at [%d, %d) is listed", b->begin, b->end);
    if (!k && !p->config.ttl_ms)
        fail(w, "prefix %d: %s is listed, and was dropped", (int)(p - w->prefixes), spell(n->node));
    if (k && !k->may_new) fail(w, "prefix %d: %s is listed again", (int)(p - w->prefixes), spell(n->node));
    const int node = n->node;
    must(w, kvc_read_block(w->caches[cache], b->id, payload, MOST_PAYLOAD, &size));
    if (k) k->sure_new = k->may_new = 0;
    if (size)
        read_payload(w, p->model, node, payload, size, rows, &state_node);
    else if (k && num_whole(w, k))
        fail(w, "prefix %d: %s is kept, and has no payload", (int)(p - w->prefixes), spell(node));
    if (size) keep_value(b->name, payload, size, 1, state_node != 0);
}

void do_take(world *w) {
    static kvc_new_block blocks[1024];
    static uint8_t payload[MOST_PAYLOAD];
    const int cache = w->caches[1] && pick(w, 2), most = pick(w, 3) ? 1024 : 1 + pick(w, 4);
    int64_t num = -1;
    if (payload_bytes(w->caches[cache]) > MOST_PAYLOAD) fail(w, "payloads are large");
    w->call = "kvc_take_new_blocks";
    kvc_status status;
    CALL(w, status, kvc_take_new_blocks(w->caches[cache], blocks, sizeof *blocks, most, &num));
    must(w, status);
    trace(w, "take of cache %d: %d new blocks", cache, (int)num);
    for (int i = 0; i < num; i++) check_listed(w, cache, &blocks[i], payload);
    for (int i = 0; i < PREFIXES && num < most; i++) {
        const prefix *p = &w->prefixes[i];
        for (int j = 0; p->handle && p->cache == cache && p->config.collects_new && j < p->num_blocks; j++)
            if (p->blocks[j].sure_new && num_whole(w, &p->blocks[j]))
                fail(w, "prefix %d: %s is new, and not listed", i, spell(p->blocks[j].node));
    }
    if (num < most) note_listed(w, cache, 1);
}

/* Adds what was read of a text, one block after the other. */
void do_add(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = any_text(w), block = w->shape.block;
    text_tokens tokens;
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num;
    must(w, kvc_prefix_names(p->handle, tokens_of(node, &tokens), names[0], MOST_TEXT, &num));
    int is_sure = !w->shape.is_limited, is_possible = 1;
    for (int i = 0; i < num; i++) {
        const value *v = find_value(names[i], 1);
        const int end = (i + 1) * block;
        if (v && (pick(w, 8) || i == 0)) {
            int32_t is_known = -1;
            w->call = "add_payload";
            kvc_status status;
            CALL(w, status, add_payload(p->handle, tokens_of(node, &tokens), i, v->bytes, v->size, &is_known));
            must(w, status);
            trace(w, "add to prefix %d: %s: %d", (int)(p - w->prefixes), spell(text_begin(node, end)), is_known);
            note_use(w, p, node, text_length(node), 0);
            const int may_lack = w->shape.is_limited || (v->has_state && may_lack_room(w, p, p->config.state_bytes));
            const int begin = i * block, may_be = is_possible || find_kept(p, text_begin(node, end), begin) ||
                                                  known(w, p, text_begin(node, begin), begin, 0, 0) == begin;
            if ((is_sure && !is_known && !w->is_short && !may_lack) || (!may_be && is_known))
                fail(w, "prefix %d: %s is added, and known: %d", (int)(p - w->prefixes), spell(text_begin(node, end)),
                     is_known);
            notice_evictions(w, p->cache, bit_of(w, p));
            if (is_known || (may_be && (w->is_short || may_lack))) /* perhaps a part of it */
                note_payload(w, p, text_begin(node, end), v->bytes, v->size);
        }
        const kept *b = find_kept(p, text_begin(node, end), end - block);
        is_sure &= b && b->is_sure && !w->shape.is_limited;
        is_possible &= b != NULL;
    }
    check_lookup(w, p, node);
}

void do_missing(world *w) {
    prefix *p = any_prefix(w);
    if (!p) return;
    const int node = any_text(w), length = text_length(node), n = pick(w, 2) ? length : pick(w, length + 1);
    const int all = check_lookup(w, p, node), some = check_lookup(w, p, text_begin(node, n)), block = w->shape.block;
    text_tokens tokens;
    uint8_t names[MOST_TEXT][KVC_NAME_BYTES], own[MOST_TEXT][KVC_NAME_BYTES];
    int64_t num = -1, num_own;
    int32_t first = -1;
    must(w, kvc_prefix_names(p->handle, tokens_of(node, &tokens), own[0], MOST_TEXT, &num_own));
    w->call = "missing_blocks";
    kvc_status status;
    CALL(w, status, missing_blocks(p->handle, tokens_of(node, &tokens), n, names[0], MOST_TEXT, &first, &num));
    must(w, status);
    trace(w, "missing of prefix %d: %s, %d tokens: %d from %d on", (int)(p - w->prefixes), spell(node), n, (int)num,
          first);
    if (num && first != all / block && first != some / block)
        fail(w, "prefix %d: blocks of %s from %d on are missing, but %d tokens are known", (int)(p - w->prefixes),
             spell(node), first, all);
    if (num != (n / block > first ? n / block - first : 0) && !(num == 0 && n / block <= all / block))
        fail(w, "prefix %d: %d blocks of %s are missing from %d on", (int)(p - w->prefixes), (int)num, spell(node),
             first);
    if (num && memcmp(names, own[first], (size_t)num * KVC_NAME_BYTES)) fail(w, "missing blocks have other names");
    note_use(w, p, node, least(all, some), 1);
    note_use(w, p, node, length, 0);
}
