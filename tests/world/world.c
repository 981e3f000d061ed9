/* world.c: makes a world: layers of any policy and type, limits or none, prefixes or none; and ends it. */
#define _DEFAULT_SOURCE
#include "attend/cutting.h"
#include "world.h"

#include <stdio.h>
#include <stdlib.h>

#define RIGHT_ANGLE 1.57079632679489661923

enum { MOST_TOKENS = 1 << 20 }; /* that are ever put in a world */

world w;
_Thread_local client *me;
driver drive;

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static int64_t to_fail; /* requests until one fails; 0: none does */
static uint64_t num_failed;

static int arm(int n) {
    const int left = (int)to_fail;
    to_fail = n;
    return left;
}

static uint64_t num_faults(void) { return num_failed; }

static void count_memory(int64_t bytes, int32_t kind) {
    if (kind != KVC_MEMORY_SCRATCH) __atomic_fetch_add(&w.memory, bytes, __ATOMIC_RELAXED);
    if (kind == KVC_MEMORY_ROWS) __atomic_fetch_add(&w.row_memory, bytes, __ATOMIC_RELAXED);
}

int request_fails(void) {
    if (!to_fail || --to_fail) return 0;
    num_failed++;
    return 1;
}

/* What functions of the caller are called with, if anything. */
static void check_user(void *user) {
    if (user && user != &w) wrong("a function of the caller is called with another user");
}

static void *take_memory(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    check_user(user);
    if (request_fails()) return NULL;
    const size_t whole = (size + alignment - 1) / alignment * alignment;
    void *memory = drive.take ? drive.take(alignment, whole) : aligned_alloc(alignment, whole);
    if (!memory) return NULL;
    const int is_large = size >= 1 << 18; /* pages that are counted as they are touched, if there is a purge */
    if (!is_large || !w.o.config.allocator || !w.o.config.allocator->purge) memset(memory, 0xff, size); /* no zeros */
    count_memory((int64_t)size, hint->kind);
    return memory;
}

static void give_memory(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    check_user(user);
    count_memory(-(int64_t)size, hint->kind);
    memset(memory, 0xa5, size); /* for who reads it still */
    drive.take ? drive.give(memory) : free(memory);
}

/* What was in purged pages is lost. */
static void purge_memory(void *user, void *memory, size_t size) {
    check_user(user);
    memset(memory, 0xa5, size);
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* Moves keys as ropes of right angles do. */
static int32_t move_keys(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                         int32_t delta) {
    check_user(user);
    for (int64_t i = 0; i < num_kv_heads * num_rows; i++)
        turn(w.o.layers[layer].rope.interleaved, delta, keys + i * k_dim);
    const int has_slot = me->call && !me->is_within && operations[me->call->operation].right != right_acquire;
    const int outer = w.o.rewriting;
    w.o.rewriting = has_slot ? 1 + me->call->s : SLOTS + 1;
    come_between(AT_MOVE);
    w.o.rewriting = outer;
    return refuse(12);
}

static int32_t poll_once(void *user) {
    check_user(user);
    if (!me || !me->call) return 0;
    come_between(AT_POLL);
    return refuse(12);
}

static kvc_policy any_policy(int l, int has_prefixes) {
    const int size = pick(8) ? 2 + pick(9) : 1, kind = pick(has_prefixes ? 8 : 12);
    if (kind < 4 || (!l && pick(3))) return (kvc_policy){.kind = KVC_FULL, .window = pick(3), .resume_window = pick(5)};
    if (kind < 6)
        return (kvc_policy){.kind = KVC_SLIDING,
                            .window = size,
                            .num_sink_tokens = pick(3) ? 0 : 1 + pick(4),
                            .resume_window = pick(3) ? 0 : size + pick(8),
                            .stride = 0};
    if (kind < 8 || !l)
        return (kvc_policy){.kind = KVC_CHUNKED, .attention_chunk_size = size, .resume_window = pick(3) ? 0 : pick(8)};
    if (kind < 11) return (kvc_policy){.kind = KVC_CROSS, .max_len = 1 + pick(CROSS)};
    return (kvc_policy){.kind = KVC_NONE};
}

static int32_t any_type(int is_turned) {
    static const int32_t types[] = {KVC_F32,  KVC_F16,  KVC_BF16, KVC_F32,  KVC_Q8_0, KVC_INT8,  KVC_INT6,
                                    KVC_INT4, KVC_Q4_0, KVC_Q4_1, KVC_Q5_0, KVC_Q5_1, KVC_IQ4_NL};
    return types[pick(is_turned == KVC_ROPE_FUNCTION ? 4 : is_turned ? 6 : 13)];
}

/* Now and then rows of floats are not as long as a block of quantised ones. */
static int32_t any_dim(int32_t type, int least) { return type > KVC_BF16 || pick(3) ? DIM : least + pick(DIM - least); }

static kvc_layer any_layer(int l, int rope, int has_prefixes) {
    static double angles[TURNED];
    for (int i = 0; i < TURNED; i++) angles[i] = quarters[i] * RIGHT_ANGLE;
    if (rope == KVC_ROPE_FREQUENCIES && !pick(8)) rope = KVC_ROPE_FUNCTION;
    kvc_layer layer = {.num_kv_heads = 1 + pick(HEADS),
                       .policy = any_policy(l, has_prefixes),
                       .rope = {.kind = pick(3) ? rope : KVC_ROPE_NONE}};
    const int is_turned = layer.rope.kind == KVC_ROPE_FREQUENCIES || layer.rope.kind == KVC_ROPE_FUNCTION;
    const int transforms = w.theme == ATTENTION ? 1 : 3; /* in these worlds, nearly every row is transformed */
    layer.k_type = any_type(is_turned ? layer.rope.kind : 0);
    if (transforms == 1 && pick(4) && layer.rope.kind != KVC_ROPE_FUNCTION)
        layer.k_type = pick(2) ? KVC_INT8 : KVC_Q8_0;
    layer.v_type = any_type(0);
    layer.k_dim = any_dim(layer.k_type, FIRST_TURNED + 2 * TURNED);
    layer.v_dim = pick(5) ? any_dim(layer.v_type, 1) : 0;
    if (is_turned)
        layer.rope = (kvc_rope){.kind = layer.rope.kind,
                                .interleaved = pick(2),
                                .first_dim = FIRST_TURNED,
                                .num_freqs = TURNED,
                                .inv_freq = angles,
                                .shift = move_keys,
                                .user = pick(2) ? &w : NULL};
    if (layer.k_type <= KVC_BF16 && !pick(5)) {
        layer.value_in_key = 1 + pick(2);
        layer.v_dim = IN_KEY;
        layer.v_type = layer.k_type;
    }
    const int divides = !layer.value_in_key || IN_KEY % (layer.k_dim & -layer.k_dim) == 0;
    if (!pick(transforms) && divides) layer.k_transform = KVC_TRANSFORM_HADAMARD;
    layer.v_transform = layer.value_in_key ? layer.k_transform : !pick(3) * KVC_TRANSFORM_HADAMARD;
    return layer;
}

/* Gives some layers a row for every n-th token, and one layer rows of all, or of those in a window. */
static void add_strides(oracle *o) {
    const int stride = 2 + pick(3);
    while (o->layers[0].policy.kind == KVC_FULL && pick(3)) o->layers[0].policy = any_policy(1, 1);
    for (int l = 1; l < o->num_layers; l++)
        if (pick(3) && !o->layers[l].share) {
            o->layers[l].policy = (kvc_policy){.kind = KVC_FULL, .stride = stride};
            o->unit = stride;
        } else if (o->layers[l].share) {
            o->layers[l].policy = o->layers[o->layers[l].share - 1].policy;
        }
    const int last = o->num_layers - 1;
    for (int l = 0; l <= last; l++)
        if (o->layers[l].share) return; /* by number */
    if (pick(2)) return;
    const kvc_layer first = o->layers[0];
    o->layers[0] = o->layers[last];
    o->layers[last] = first;
}

/* Lets tokens select rows, where layers can have sketches. */
static void add_sketches(oracle *o) {
    for (int l = 0; l < o->num_layers; l++) {
        kvc_layer *layer = &o->layers[l];
        const int can = layer->k_dim == DIM && layer->v_dim && !layer->value_in_key && layer->policy.kind == KVC_FULL &&
                        layer->policy.stride < 2;
        layer->sketch_bits = layer->share ? o->layers[layer->share - 1].sketch_bits : can && pick(4) ? 2 : 0;
    }
}

static void make_layers(oracle *o, int has_prefixes) {
    static const int ropes[] = {KVC_ROPE_NONE, KVC_ROPE_FREQUENCIES, KVC_ROPE_FREQUENCIES, KVC_ROPE_FUNCTION,
                                KVC_ROPE_UNKNOWN};
    const int is_usual = w.theme != ATTENTION || !pick(3);
    const int rope = is_usual ? ropes[pick(pick(2) ? 4 : 5)] : KVC_ROPE_FREQUENCIES, kind = is_usual ? pick(6) : 0;
    o->num_layers = 1 + pick(LAYERS);
    o->unit = 1;
    for (int l = 0; l < o->num_layers; l++) {
        o->layers[l] = any_layer(l, rope, has_prefixes);
        if (kind < 2) o->layers[l].policy = (kvc_policy){.kind = KVC_FULL};
        while (kind == 2 && o->layers[l].policy.kind == KVC_FULL) o->layers[l].policy = any_policy(1, 1);
        if (l && pick(2)) o->layers[l].policy = o->layers[l - 1].policy;
        const int from = pick(l);
        if (l && !pick(5) && (is_own(o, from) || is_cross(o, from)))
            o->layers[l] = o->layers[from], o->layers[l].share = from + 1;
    }
    if (is_usual && pick(4) == 0) add_strides(o);
    if (!is_usual || pick(2)) add_sketches(o);
}

/* ---- limits ------------------------------------------------------------------------------------------------------ */

/* Asks another cache what a block of each group counts.  Returns what such a cache takes that is empty. */
static int64_t measure(oracle *o) {
    kvc_config config = o->config;
    kvc_cache *cache;
    kvc_batch *batch;
    kvc_block_info block;
    int64_t num_blocks, num_runs, bytes;
    kvc_status status;
    config.max_seq_len = config.max_sequences = config.capacity = 0;
    UNTIL_MEMORY(status, kvc_cache_new(&config, &cache));
    if (status) wrong("kvc_cache_new: %s", kvc_last_error());
    bytes = kvc_nbytes(cache);
    UNTIL_MEMORY(status, kvc_begin(cache, o->unit, NULL, NULL, NULL, &batch));
    if (status) wrong("kvc_begin: %s", kvc_last_error());
    for (int l = 0; l < o->num_layers; l++) {
        static const float zeros[HEADS * DIM];
        const int has_values = o->layers[l].v_dim && !o->layers[l].value_in_key;
        const kvc_put_args args = {
            .struct_size = sizeof args, .num_tokens = 1, .k = zeros, .v = has_values ? zeros : NULL};
        if (!leads_group(o, l)) continue;
        if (is_cross(o, l)) UNTIL_MEMORY(status, kvc_put(batch, l, &args));
        if (kvc_blocks(cache, l, &block, sizeof block, 1, &num_blocks, NULL, sizeof(kvc_run_info), 0, &num_runs) ||
            !num_blocks)
            wrong("layer %d has %d blocks: %s", l, (int)num_blocks, kvc_last_error());
        o->groups[l] = (group){.cost = block.bytes, .size = block.num_slots};
    }
    kvc_abort(batch);
    kvc_cache_free(cache);
    return bytes;
}

/* Returns how many rows so many tokens have in the layer that keeps the most. */
static int most_rows(const oracle *o, int num) {
    for (int l = 0; l < o->num_layers; l++)
        if (is_own(o, l) && o->layers[l].policy.kind == KVC_FULL && stride_of(o, l) == 1) return num;
    return num / o->unit;
}

static void make_limits(oracle *o) {
    static const int sizes[] = {1, 2, 3, 4, 5, 6, 8, 16, 40};
    const int size = w.theme == PROMPTS ? 1 + pick(5)
                     : pick(20)         ? sizes[pick(9)]
                                        : 3000; /* memory of such a block comes and goes by the page */
    kvc_config *c = &o->config;
    *c = (kvc_config){.struct_size = sizeof *c,
                      .layers = o->layers,
                      .layer_size = sizeof *o->layers,
                      .num_layers = o->num_layers,
                      .block_size = (size + o->unit - 1) / o->unit * o->unit,
                      .num_threads = 1 + !pick(4)};
    if (w.theme != ATTENTION) { /* whose texts are long */
        if (!pick(4)) c->max_seq_len = most_rows(o, 4 + pick(56));
        if (!pick(c->max_seq_len ? 2 : 8)) c->max_sequences = 3 + pick(6);
        if (!pick(4)) c->capacity = most_rows(o, 20 + pick(180));
    }
    if (pick(3) == 0) c->poll = poll_once, c->poll_user = pick(2) ? &w : NULL;
}

/* Leaves room for a block of each group, and often for few more. */
static void limit_bytes(oracle *o, int has_prefixes) {
    const int64_t empty = measure(o), tokens_wanted = (w.theme == PROMPTS ? 70 : 10) + pick(pick(2) ? 60 : 160);
    int64_t blocks = 0;
    for (int l = 0; l < o->num_layers; l++) blocks += o->groups[l].cost;
    o->budget = blocks * (1 + tokens_wanted / o->config.block_size) + blocks * pick(100) / 100;
    if (has_prefixes)
        o->budget += (PREFIXES - 1) * MOST_EVENTS * (int64_t)sizeof(kvc_prefix_event) + pick(3 * MOST_STATE);
    o->config.max_bytes = empty + o->budget;
}

/* A prefix of one of two tenants, or of the first one again. */
void make_prefix(call *c) {
    prefix *p = &w.o.prefixes[c->prefix];
    memset(p, 0, sizeof *p);
    p->tenant = pick(2);
    kvc_prefix_config *of = &p->config;
    *of = (kvc_prefix_config){.struct_size = sizeof *of, .fingerprint = "a model", .max_events = MOST_EVENTS};
    if (p->tenant) of->salt = "salt", of->salt_size = 4;
    if (p->tenant && w.seed % 3) of->secret = "secret", of->secret_size = 6;
    if (w.seed / 8 % 2 == 0 && pick(4)) of->state_bytes = STATE;
    if (of->state_bytes && pick(3)) of->max_checkpoint_bytes = STATE + pick(3 * STATE);
    if (!pick(5) && !drive.time) of->ttl_ms = 1050; /* otherwise the clock is not the world's */
    if (!pick(5)) of->quota = 1 + pick(60);
    if (!pick(5) && !of->state_bytes && w.o.unit == 1 && w.num_clients == 1) of->reuse_min_tokens = 1 + pick(6);
    if (!pick(5)) of->max_events = 1 + pick(20);
    of->collects_new = pick(3) != 0;
    of->user = p;
    int turns = 0;
    for (int l = 0; l < w.o.num_layers; l++) turns |= w.o.layers[l].rope.kind == KVC_ROPE_FREQUENCIES;
    for (int l = 0; l < w.o.num_layers; l++)
        if (w.o.layers[l].rope.kind == KVC_ROPE_UNKNOWN || (w.o.layers[l].rope.kind == KVC_ROPE_FUNCTION && turns))
            of->reuse_min_tokens = 0; /* which delta a group of both kinds of ropes has is open */
    c->status = kvc_prefix_new(w.cache, of, &w.prefixes[c->prefix]);
    p->is_there = c->status == KVC_OK;
    if (!p->is_there) w.prefixes[c->prefix] = NULL;
}

/* Chooses the scalar kernels in some worlds: they multiply in bytes on every machine.  In some, any shape is. */
static void choose_kernels(void) {
    static int is_given = -1;
    if (is_given < 0) is_given = getenv("KVCACHE_ISA") != NULL;
    kvc_costs_in_bytes = w.theme == ATTENTION ? (kvc_byte_costs){0} : (kvc_byte_costs){pick(3), pick(2), pick(16)};
    if (is_given) return;
    if (w.seed % 3)
        unsetenv("KVCACHE_ISA");
    else
        setenv("KVCACHE_ISA", "scalar", 1);
}

void make_world(uint64_t seed, int num_clients, int is_wild) {
    static const int64_t ids[ACQUIRED] = {0, -1, INT64_MIN, INT64_MAX, (int64_t)1 << 40, -77};
    static const theme themes[] = {ANYTHING, EDITS, PROMPTS, PROMPTS, ANYTHING, EDITS, ATTENTION, PROMPTS};
    static kvc_allocator allocator;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    w.num_clients = num_clients;
    w.is_wild = is_wild;
    w.theme = themes[seed % 8];
    choose_kernels();
    w.refuses = seed / 4 % 2 == 0;
    oracle *o = &w.o;
    if (!tokens) tokens = calloc(MOST_TOKENS, sizeof *tokens);
    memset(fetched, 0, sizeof fetched);
    o->crowded = num_clients > 1;
    o->next_slot = MOST_TAG;
    const int has_prefixes = w.theme == PROMPTS || (w.theme == ANYTHING && pick(3) != 0);
    do make_layers(o, has_prefixes);
    while (!is_own(o, 0) && !is_own(o, o->num_layers - 1));
    make_limits(o);
    if (has_prefixes && o->config.max_sequences == 1) o->config.max_sequences = 2;
    const int has_allocator = pick(2);
    allocator = (kvc_allocator){sizeof allocator, pick(2) ? &w : NULL, take_memory, give_memory, NULL};
    if (has_allocator && pick(2) && !drive.take) allocator.purge = purge_memory;
    if (!drive.arm) drive.arm = arm, drive.num_faults = num_faults;
    if (has_allocator || (drive.arm == arm && drive.faults == 1)) o->config.allocator = &allocator;
    kvc_status status;
    w.has_faults = drive.faults;
    if (w.theme != ATTENTION && !pick(3)) limit_bytes(o, has_prefixes);
    UNTIL_MEMORY(status, kvc_cache_new(&o->config, &w.cache));
    if (status) wrong("kvc_cache_new: %s", kvc_last_error());
    if (o->config.max_bytes) o->budget = o->config.max_bytes - kvc_nbytes(w.cache);
    o->block_size = kvc_block_size(w.cache);
    memcpy(w.ids, ids, sizeof ids);
    for (int s = 0; s < SLOTS; s++) o->sequences[s].exact_to = INT32_MAX;
    w.ids[0] = w.last_id = kvc_new_sequence(w.cache);
    for (int s = ACQUIRED; s < SLOTS; s++) w.ids[s] = INT64_MIN + 1 + s; /* nobody has these yet */
    call c = {0};
    for (c.prefix = 0; has_prefixes && c.prefix < PREFIXES - 1; c.prefix++) make_prefix(&c);
}

void check_empty(void) {
    kvc_stats stats;
    if (kvc_clear(w.cache) || kvc_compact(w.cache)) wrong("the cache cannot be emptied: %s", kvc_last_error());
    kvc_get_stats(w.cache, &stats, sizeof stats);
    if (stats.live_slots || stats.blocks_in_use || stats.blocks_free || stats.retained || stats.evictable_slots)
        wrong("rows are left in an empty cache");
    if (w.row_memory && !w.num_clones) wrong("%lld bytes of rows are left", (long long)w.row_memory);
    if (kvc_validate(w.cache)) wrong("the empty cache is corrupt: %s", kvc_last_error());
}

void end_world(void) {
    for (int i = 0; i < CLIENTS; i++) {
        forget_plan(i);
        kvc_abort(w.batches[i]);
        kvc_hold_free(w.views[i].hold);
        w.batches[i] = NULL;
        w.views[i].hold = NULL;
    }
    for (int i = 0; i < PREFIXES; i++)
        if (i % 2) kvc_prefix_free(w.prefixes[i]); /* others go with the cache */
    check_empty();
    if (kvc_cache_free(w.cache)) wrong("the cache cannot be freed: %s", kvc_last_error());
    if (w.memory) wrong("%lld bytes are left", (long long)w.memory);
    for (int i = 0; i < VALUES; i++) free(w.values[i].bytes);
    for (int i = 0; i < CLIENTS; i++) free(w.o.files[i]);
}
