/* store.c: keeps the blocks of prompts in a folder, so that the next process, or another one beside this, finds them.
 *
 *   store FOLDER TEXT
 *
 * Run it twice, with the same text or a text that begins alike.  A thread of the program's own writes to the store;
 * requests never wait for it. */
#include <kvcache.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { BLOCK = 16, DIM = 8, MOST = 1024, BATCH = 64 };

/* ---- writing ----------------------------------------------------------------------------------------------------- */

/* The thread that writes new blocks. */
typedef struct writer {
    kvc_cache *cache;
    const kvc_store *store;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int has_work, is_over;
    int64_t num_written;
} writer;

static void *write_blocks(void *argument) {
    writer *w = argument;
    int64_t num;
    pthread_mutex_lock(&w->mutex);
    while (w->has_work || !w->is_over) {
        if (!w->has_work) {
            pthread_cond_wait(&w->changed, &w->mutex);
            continue;
        }
        w->has_work = 0;
        pthread_mutex_unlock(&w->mutex);
        /* A store that fails costs speed and nothing else.  A server would count it, and wait a while. */
        if (kvc_store_new_blocks(w->cache, w->store, &num)) fprintf(stderr, "not stored: %s\n", kvc_last_error());
        pthread_mutex_lock(&w->mutex);
        w->num_written += num;
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

/* Tells the thread that there may be new blocks, or, in the end, that there will be no more. */
static void wake(writer *w, int is_over) {
    pthread_mutex_lock(&w->mutex);
    w->has_work = 1;
    w->is_over = is_over;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

/* ---- a request --------------------------------------------------------------------------------------------------- */

/* Feeds tokens [begin, end) of a prompt, with rows that stand in for a model's. */
static kvc_status feed(kvc_cache *cache, int64_t seq_id, const int64_t *ids, int begin, int end) {
    static float k[BATCH][DIM], v[BATCH][DIM];
    int64_t seq_ids[BATCH];
    kvc_batch *batch;
    for (int i = 0; i < end - begin; i++) {
        seq_ids[i] = seq_id;
        for (int j = 0; j < DIM; j++) k[i][j] = v[i][j] = (float)(ids[begin + i] + j);
    }
    kvc_status status = kvc_begin(cache, end - begin, NULL, seq_ids, NULL, &batch);
    if (status) return status;
    const kvc_put_args put = {.struct_size = sizeof put, .k = k, .v = v};
    status = kvc_put(batch, 0, &put);
    if (!status) return kvc_commit(batch);
    kvc_abort(batch);
    return status;
}

static kvc_status serve(writer *w, kvc_prefix *prefix, const int64_t *ids, int num) {
    const kvc_tokens tokens = {.struct_size = sizeof tokens, .ids = ids, .num_tokens = num};
    int64_t seq_id;
    int32_t fetched, matched;
    if (kvc_prefix_fetch(prefix, &tokens, -1, w->store, &fetched))
        fprintf(stderr, "not fetched: %s\n", kvc_last_error()); /* what did not come is computed */
    kvc_status status = kvc_prefix_acquire(prefix, &tokens, -1, &seq_id, &matched);
    if (status) return status;
    printf("%d of %d tokens are there, %d of them from the store\n", (int)matched, num, (int)fetched);
    for (int begin = matched; !status && begin < num; begin += BATCH) {
        status = feed(w->cache, seq_id, ids, begin, begin + BATCH < num ? begin + BATCH : num);
        wake(w, 0);
    }
    const kvc_status released = kvc_prefix_release(prefix, seq_id, &tokens);
    return status ? status : released;
}

int main(int argc, char **argv) {
    static int64_t ids[MOST];
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16};
    const kvc_config config = {sizeof config, &layer, sizeof layer, 1, .block_size = BLOCK, .capacity = 4 * MOST};
    const kvc_prefix_config model = {
        .struct_size = sizeof model, .fingerprint = "a sum, revision 1", .collects_new = 1};
    writer w = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    kvc_store *store = NULL;
    kvc_prefix *prefix = NULL;
    if (argc != 3 || !*argv[2]) return fprintf(stderr, "store: give a folder and a text\n"), 2;
    int num = 0;
    for (; num < MOST && argv[2][num]; num++) ids[num] = (unsigned char)argv[2][num];
    kvc_status status = kvc_dir_store_new(argv[1], 1 << 30, &store); /* at most 1 GiB */
    if (!status) status = kvc_cache_new(&config, &w.cache);
    if (!status) status = kvc_prefix_new(w.cache, &model, &prefix);
    w.store = store;
    if (!status && pthread_create(&w.thread, NULL, write_blocks, &w)) return fprintf(stderr, "store: no thread\n"), 2;
    if (!status) {
        status = serve(&w, prefix, ids, num);
        wake(&w, 1);
        pthread_join(w.thread, NULL);
        printf("%d blocks are new in the store\n", (int)w.num_written);
    }
    if (status) fprintf(stderr, "store: %s\n", kvc_last_error());
    kvc_cache_free(w.cache);
    kvc_dir_store_free(store);
    return status ? 2 : 0;
}
