/* calls_whole.c: files, copies of the cache, and children of fork(). */
#include "world.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- going on elsewhere ------------------------------------------------------------------------------------------ */

/* Makes some calls as another client. */
static void play_some(void) {
    static client own;
    own = (client){.chance = me->chance};
    me = &own;
    for (int i = 0; i < 12; i++) play();
}

/* Makes the copy the world's cache.  It has sequences alone. */
static void go_to(kvc_cache *copy) {
    w.is_child = 1;
    w.cache = copy;
    w.o.num_holds = 0;
    memset(w.views, 0, sizeof w.views);
    memset(w.prefixes, 0, sizeof w.prefixes);
    memset(w.o.prefixes, 0, sizeof w.o.prefixes);
    memset(w.o.files, 0, sizeof w.o.files);
    for (sequence *s = w.o.sequences; s < w.o.sequences + SLOTS; s++) {
        s->prefix = s->prompt = s->keeps = s->state = 0;
        if (!holds_any(&w.o, s)) *s = (sequence){.exact_to = INT32_MAX};
    }
    note_blocks();
}

static void end_there(void) {
    look_around();
    stop_playing();
    for (int i = 0; i < CLIENTS; i++) {
        kvc_hold_free(w.views[i].hold);
        free(w.o.files[i]);
    }
}

/* Goes on in a copy of the cache for some calls.  The world is then as it was, but for the bytes that the copy has. */
static void play_in(kvc_cache *copy) {
    static world was;
    client *own = me;
    const int64_t bytes = w.memory ? kvc_nbytes(w.cache) : 0;
    kvc_status status = KVC_OK;
    if (w.o.crowded || w.is_child || own->call->is_disturbed || w.o.batches[own->number].is_open) return;
    was = w;
    w.memory -= bytes;
    if (pick(2)) UNTIL_MEMORY(status, kvc_compact(copy));
    if (status) wrong("a copy is not compacted: %s", kvc_last_error());
    go_to(copy);
    look_around();
    play_some();
    end_there();
    was.memory = w.memory + bytes, was.row_memory = w.row_memory;
    w = was;
    me = own;
}

static int change(kvc_layer *l);

/* ---- files ------------------------------------------------------------------------------------------------------- */

static int32_t write_file(void *user, const void *data, size_t size) {
    client_file *f = user;
    come_between(AT_WRITE);
    if (refuse(100) || f->size + (int64_t)size > FILE_BYTES) return me->was_refused = 1;
    memcpy(f->bytes + f->size, data, size);
    f->size += (int64_t)size;
    return 0;
}

int draw_save(call *c) {
    c->s = own_slot();
    c->to = own_slot();
    c->num = 1 + (pick(3) == 0 && w.ids[c->s] < w.ids[c->to]);
    return 1;
}

/* Saves one sequence or two; the file has them as they are at the beginning of the call. */
void run_save(call *c) {
    static const int64_t given[] = {7, -1, INT64_MAX}, num_given[] = {2, 1};
    client_file *f = malloc(sizeof *f);
    *f = (client_file){.ids = {w.ids[c->s], w.ids[c->to]}};
    f->num = f->ids[0] < f->ids[1] ? c->num : 1; /* others may have given the slots other ids */
    for (int i = 0; i < 2; i++) {
        const sequence *s = &w.o.sequences[i ? c->to : c->s];
        f->sequences[i] = holds_any(&w.o, s) ? *s : (sequence){.exact_to = INT32_MAX};
    }
    kvc_save_args args = {.struct_size = sizeof args,
                          .write = write_file,
                          .user = f,
                          .seq_ids = f->ids,
                          .num_sequences = f->num,
                          .tokens = pick(2) ? given : NULL,
                          .num_tokens = num_given,
                          .fingerprint = f->fingerprint = pick(2) ? "a model" : NULL};
    if (!args.tokens) args.num_tokens = NULL;
    c->status = kvc_save(w.cache, &args);
    lock_world();
    client_file *last = c->status ? f : w.o.files[c->client];
    if (!c->status) w.o.files[c->client] = f;
    unlock_world();
    free(last);
}

typedef struct file {
    uint8_t *bytes;
    int64_t size, at;
    const char *fingerprint;
} file;

static int32_t read_file(void *user, void *data, size_t size) {
    file *f = user;
    come_between(AT_READ);
    if (refuse(size == KVC_MAC_BYTES ? 12 : 100) || (int64_t)size > f->size - f->at) return me->was_refused = 1;
    memcpy(data, f->bytes + f->at, size);
    f->at += (int64_t)size;
    return 0;
}

/* Copies the client's file, and alters some copies. */
static void copy_file(call *c, file *f) {
    const client_file *from = w.o.files[c->client];
    *f = (file){malloc((size_t)from->size), from->size, 0, pick(2) ? from->fingerprint : NULL};
    memcpy(f->bytes, from->bytes, (size_t)f->size);
    c->more = !pick(8);
    if (c->more && pick(2))
        f->size = pick((int)f->size);
    else if (c->more)
        f->bytes[pick((int)f->size - KVC_MAC_BYTES)] ^= (uint8_t)(1 << pick(8));
    if (!pick(12)) c->more = 1, f->fingerprint = "another model";
}

static kvc_load_args args_of(file *f, int is_read) {
    return (kvc_load_args){.struct_size = sizeof(kvc_load_args),
                           .data = is_read ? NULL : f->bytes,
                           .read = is_read ? read_file : NULL,
                           .user = f,
                           .size = f->size,
                           .fingerprint = f->fingerprint};
}

int draw_restore(call *c) {
    if (!w.o.files[me->number]) return 0;
    c->num = pick(w.o.files[me->number]->num);
    c->to = own_slot();
    return c->to < ACQUIRED && (w.num_clients == 1 || w.is_wild); /* nobody tells others how old its rows are */
}

void run_restore(call *c) {
    file f;
    copy_file(c, &f);
    kvc_load_args args = args_of(&f, pick(2));
    args.seq_ids = &w.o.files[c->client]->ids[c->num];
    args.to_ids = &w.ids[c->to];
    args.num_sequences = 1;
    c->status = kvc_restore(w.cache, &args);
    if (c->more && !c->status) wrong("an altered file is restored");
    if (c->more && c->status == KVC_ERR_FORMAT) me->was_refused = 1;
    free(f.bytes);
}

/* Caches of other layers do not load a file. */
static void load_as_others(const uint8_t *bytes, int64_t size) {
    kvc_layer layers[LAYERS];
    kvc_config config = w.o.config;
    kvc_cache *loaded = NULL;
    kvc_status status = KVC_ERR_FORMAT;
    const kvc_load_args args = {.struct_size = sizeof args, .data = bytes, .size = size, .config = &config};
    config.layers = layers;
    config.allocator = NULL;
    for (int l = 0; l < w.o.num_layers; l++)
        if (w.o.layers[l].share) return;
    for (int tries = 6; tries && status == KVC_ERR_FORMAT; tries--) {
        memcpy(layers, w.o.layers, sizeof layers);
        if (change(&layers[pick(w.o.num_layers)])) UNTIL_MEMORY(status, kvc_load(&args, &loaded));
    }
    if (status != KVC_ERR_FORMAT) wrong("a cache of other layers loads a file: %s", kvc_strerror(status));
}

/* Loads the file as a cache of its own, which is compared and freed; or only checks it. */
void run_load(call *c) {
    file f;
    kvc_cache *loaded = NULL;
    const client_file *from = w.o.files[c->client];
    copy_file(c, &f);
    kvc_config config = w.o.config;
    kvc_load_args args = args_of(&f, pick(2));
    const int only_checks = !pick(4);
    config.block_size = pick(2) ? 0 : 1 + pick(40);
    if (config.block_size) config.max_bytes = INT64_MAX; /* which has room for a block of any size */
    config.allocator = NULL;
    args.config = only_checks ? NULL : &config;
    c->status = kvc_load(&args, only_checks ? NULL : &loaded);
    drive.arm(0);
    if (c->more && !c->status) wrong("an altered file is loaded");
    if (c->more && c->status == KVC_ERR_FORMAT) me->was_refused = 1;
    if (loaded) {
        look_at_cache(loaded, from->sequences, from->ids, from->num);
        if (kvc_cache_free(loaded)) wrong("what was loaded cannot be freed");
    }
    if (!c->status) load_as_others(from->bytes, from->size);
    free(f.bytes);
}

int draw_load(call *c) {
    (void)c;
    return w.o.files[me->number] != NULL;
}

/* The state of a whole cache; calm: no other calls come between. */
typedef struct whole {
    int is_calm;
    int64_t size;
    uint8_t bytes[FILE_BYTES];
} whole;

static int32_t append(void *user, const void *data, size_t size) {
    whole *to = user;
    if (!to->is_calm) come_between(AT_WRITE);
    if (!to->is_calm && refuse(100)) return 1;
    if (to->size + (int64_t)size > FILE_BYTES) wrong("a file has more than %d bytes", FILE_BYTES);
    memcpy(to->bytes + to->size, data, size);
    to->size += (int64_t)size;
    return 0;
}

static kvc_status save_whole(kvc_cache *cache, whole *to, int is_calm) {
    const kvc_save_args args = {.struct_size = sizeof args, .write = append, .user = to};
    to->is_calm = is_calm;
    to->size = 0;
    return kvc_save(cache, &args);
}

/* Loads a file, or checks that its rows are too many bytes. */
static kvc_cache *load_whole(const whole *from) {
    kvc_config config = w.o.config;
    kvc_cache *loaded = NULL;
    kvc_status status;
    config.allocator = NULL;
    config.poll = NULL;
    const kvc_load_args args = {.struct_size = sizeof args, .data = from->bytes, .size = from->size, .config = &config};
    UNTIL_MEMORY(status, kvc_load(&args, &loaded));
    if (status == KVC_ERR_FULL) {
        config.max_bytes = INT64_MAX;
        UNTIL_MEMORY(status, kvc_load(&args, &loaded));
        if (loaded && kvc_nbytes(loaded) <= w.o.config.max_bytes) wrong("%d bytes do not fit", (int)kvc_nbytes(loaded));
    }
    if (status) wrong("a file is not loaded: %s", kvc_last_error());
    return loaded;
}

/* The loaded cache is as the saved one was, and is saved to the same bytes. */
void run_save_all(call *c) {
    static sequence were[SLOTS];
    static whole first, again;
    int64_t ids[SLOTS];
    kvc_status status;
    memcpy(were, w.o.sequences, sizeof were);
    memcpy(ids, w.ids, sizeof ids);
    c->status = save_whole(w.cache, &first, 0);
    drive.arm(0);
    if (c->status) return;
    load_as_others(first.bytes, first.size);
    kvc_cache *loaded = load_whole(&first);
    look_at_cache(loaded, were, ids, SLOTS);
    UNTIL_MEMORY(status, save_whole(loaded, &again, 1));
    if (status || again.size != first.size || memcmp(again.bytes, first.bytes, (size_t)first.size))
        wrong("what is loaded is saved to other bytes");
    if (!w.o.config.max_bytes) play_in(loaded); /* otherwise blocks count as those of the other allocator */
    if (kvc_cache_free(loaded)) wrong("what was loaded cannot be freed");
}

int draw_save_all(call *c) {
    (void)c;
    return w.num_clients == 1;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

void run_clone(call *c) {
    kvc_cache *clone = NULL;
    __atomic_fetch_add(&w.num_clones, 1, __ATOMIC_RELAXED);
    c->status = kvc_cache_clone(w.cache, &clone);
    drive.arm(0);
    if (c->status) __atomic_fetch_sub(&w.num_clones, 1, __ATOMIC_RELAXED);
    if (c->status) return;
    if (!w.o.crowded) look_at_cache(clone, w.o.sequences, w.ids, SLOTS);
    if (!w.o.crowded && kvc_nbytes(clone) > kvc_nbytes(w.cache)) wrong("a clone has more bytes");
    play_in(clone);
    if (kvc_cache_free(clone)) wrong("a clone cannot be freed");
    __atomic_fetch_sub(&w.num_clones, 1, __ATOMIC_RELAXED);
}

/* ---- identities -------------------------------------------------------------------------------------------------- */

/* Writes a layer otherwise, in fields that its kinds ignore. */
static void vary(kvc_layer *l) {
    kvc_policy *p = &l->policy;
    if (l->value_in_key) l->value_in_key = 3 - l->value_in_key;
    if (!l->v_dim) l->v_type = 77;
    if (p->kind != KVC_SLIDING) p->window = pick(9), p->num_sink_tokens = pick(3);
    if (p->kind == KVC_FULL || p->kind == KVC_CROSS) p->resume_window = pick(9);
    if (p->kind == KVC_SLIDING && !p->resume_window) p->resume_window = p->window;
    if (p->kind != KVC_CHUNKED) p->attention_chunk_size = pick(9);
    if (p->kind == KVC_FULL && p->stride <= 1) p->stride = !p->stride;
    if (p->kind != KVC_FULL) p->stride = pick(p->kind == KVC_NONE ? 3 : 2);
    if (p->kind != KVC_CROSS) p->max_len = pick(9);
    if (l->rope.kind <= KVC_ROPE_NONE) l->rope.interleaved = pick(2), l->rope.first_dim = pick(3);
}

/* Changes something that rows depend on; returns whether it did. */
static int change(kvc_layer *l) {
    kvc_policy *p = &l->policy;
    if (p->kind == KVC_NONE) return 0; /* it has no rows */
    switch (pick(6)) {
    case 0: return l->num_kv_heads += 1;
    case 1:
        if (p->kind == KVC_SLIDING) p->window += 1, p->resume_window += p->resume_window > 0;
        if (p->kind == KVC_CHUNKED) p->attention_chunk_size += 1;
        return p->kind == KVC_SLIDING || p->kind == KVC_CHUNKED;
    case 2: /* an encoder's rows have no positions to rotate for */
        if (p->kind == KVC_CROSS || l->rope.kind != KVC_ROPE_FREQUENCIES) return 0;
        l->rope.interleaved = !l->rope.interleaved;
        return 1;
    case 3: /* other types have no transform, or their own */
        if (l->value_in_key || l->k_type <= KVC_BF16 || l->k_type >= KVC_INT6) return 0;
        return l->k_transform = !l->k_transform, 1;
    case 4:
        if (l->value_in_key || !l->v_dim || l->v_type <= KVC_BF16 || l->v_type >= KVC_INT6) return 0;
        return l->v_transform = !l->v_transform, 1;
    default:
        if (l->k_type <= KVC_BF16 && !l->value_in_key) l->k_type = (l->k_type + 1) % 3;
        return l->k_type <= KVC_BF16 && !l->value_in_key;
    }
}

/* Layers that are written otherwise have the same identity; layers that are others have another one. */
void run_identity(call *c) {
    kvc_layer layers[LAYERS];
    uint8_t own[KVC_NAME_BYTES], other[KVC_NAME_BYTES];
    kvc_config config = w.o.config;
    kvc_cache *cache = NULL;
    int changes = 0, is_shared = 0;
    memcpy(layers, w.o.layers, sizeof layers);
    for (int l = 0; l < w.o.num_layers; l++) is_shared |= layers[l].share;
    for (int l = 0; l < w.o.num_layers && !is_shared; l++) vary(&layers[l]);
    if (pick(2) && !is_shared) changes = change(&layers[pick(w.o.num_layers)]);
    config.layers = layers;
    config.block_size = w.o.block_size;
    config.max_bytes = 0;
    c->status = kvc_cache_new(&config, &cache);
    if (c->status) return;
    if (kvc_prefix_identity(w.cache, "m", 1, own) || kvc_prefix_identity(cache, "m", 1, other)) wrong("no identity");
    if (!memcmp(own, other, sizeof own) == (changes != 0)) wrong("identities are alike: %d", !changes);
    kvc_cache_free(cache);
}

/* ---- fork() ------------------------------------------------------------------------------------------------------ */

/* Nobody goes on with what other clients were doing: it can be dropped, and the cache used anew. */
static int check_child_of_many(void) {
    for (int i = 0; i < CLIENTS; i++) {
        forget_plan(i);
        kvc_abort(w.batches[i]), w.batches[i] = NULL;
        kvc_hold_free(w.views[i].hold), w.views[i].hold = NULL;
        w.o.batches[i].is_open = 0;
    }
    for (int i = 0; i < PREFIXES; i++) { /* nothing waits for ever */
        int64_t num, dropped;
        text_tokens given;
        if (w.prefixes[i])
            kvc_prefix_forget(w.prefixes[i], tokens_of(text_behind(0, 0), 0, &given), NULL, 0, &num, &dropped);
    }
    if (kvc_clear(w.cache)) return 0;         /* a batch that begins or ends is nobody's to abort */
    if (!kvc_compact(w.cache)) check_empty(); /* otherwise a call on the way held rows */
    for (int s = 0; s < SLOTS; s++) w.o.sequences[s] = (sequence){.exact_to = INT32_MAX};
    w.is_wild = 1;
    play_some();
    return 0;
}

/* The child has everything as it was, goes on for some calls, and ends. */
static int check_child(void) {
    w.is_child = 1;
    drive.arm(0);
    if (kvc_validate(w.cache)) wrong("the cache of a child is corrupt: %s", kvc_last_error());
    if (w.o.crowded) return check_child_of_many();
    look_around();
    play_some();
    end_world();
    return 0;
}

int draw_fork(call *c) {
    (void)c;
    return drive.fork && !w.is_child;
}

void run_fork(call *c) {
    const int status = drive.fork(check_child);
    if (status) wrong("a child of fork() ended with %d", status);
    c->status = KVC_OK;
}
