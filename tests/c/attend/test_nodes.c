/* Rows on a machine with several memory nodes.  The machine is this program's: the core is told of its nodes, and of
 * where a thread runs; where memory lies is noted, as Linux would place it; and kernels count the bytes that they read
 * and write on the node of their thread and on others.  Its threads are equally fast: they take tasks in turn.  Then
 * real threads take them, which changes no bit.
 * Not for Windows: no call is diverted there. */
#define _GNU_SOURCE /* mkdtemp, cpu_set_t */
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/nodes.h"
#include "base/openmp.h"
#include "base/pages.h"
#include "base/parallel.h"
#include "cache/cache.h"
#include "support/test.h"

enum { PAGE = 4096, THREADS = 12, MOST_PAGES = 1 << 16, MOST_SPREAD = 1 << 10 };

/* ---- the machine ------------------------------------------------------------------------------------------------- */

static int num_nodes;   /* of the machine */
static int is_spread;   /* whether the core is told of them */
static int has_threads; /* tasks are run by real threads */
static int64_t num_claims;
static atomic_int num_seen; /* real threads */
static _Thread_local int here, number;

/* Where pages lie. */
typedef struct range {
    uintptr_t begin, end;
    int first, num;
} range;

static range ranges[MOST_SPREAD];
static int num_ranges;
static struct {
    uintptr_t page;
    int node;
} touched[MOST_PAGES];

/* Bytes that threads read or wrote of memory of their own node, of the other nodes of their socket, which is half of
 * the nodes, and of the other socket; and of each node's memory. */
typedef struct traffic {
    double own, socket, other, of_node[KVC_MOST_NODES];
} traffic;

static traffic reads, writes;

int32_t __wrap_kvc_num_nodes(void);
int32_t __wrap_kvc_node_here(void);
void __wrap_kvc_nodes_spread(void *p, size_t size, int32_t first, int32_t num);
void __wrap_kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i), void *context);

int32_t __wrap_kvc_num_nodes(void) { return is_spread ? num_nodes : 1; }

int32_t __wrap_kvc_node_here(void) {
    if (has_threads && !number) number = 1 + atomic_fetch_add(&num_seen, 1);
    return has_threads ? number % num_nodes : here;
}

void __wrap_kvc_nodes_spread(void *p, size_t size, int32_t first, int32_t num) {
    CHECK((uintptr_t)p % PAGE == 0 && size % PAGE == 0 && size && first >= 0 && num > 0 && first + num <= num_nodes);
    CHECK(num_ranges < MOST_SPREAD);
    ranges[num_ranges++] = (range){(uintptr_t)p, (uintptr_t)p + size, first, num};
}

/* Runs tasks as equally fast threads do, on the nodes in turn. */
void __wrap_kvc_parallel(int32_t num_threads, int64_t num_tasks, void (*task)(void *context, int64_t i),
                         void *context) {
    if (has_threads) {
        kvc_parallel(num_threads, num_tasks, task, context);
        return;
    }
    for (int64_t i = 0; i < num_tasks; i++) {
        here = num_threads > 1 && num_tasks > 1 ? (int)(num_claims++ % num_nodes) : 0;
        task(context, i);
    }
    here = 0;
}

/* Returns the node of a page: that which it was placed on, else that of the thread that touches it first. */
static int node_of(uintptr_t page) {
    for (int i = num_ranges; i-- > 0;)
        if (page >= ranges[i].begin && page < ranges[i].end)
            return ranges[i].first + (int)(page / PAGE % (uintptr_t)ranges[i].num);
    size_t at = page / PAGE * 0x9e3779b1u % MOST_PAGES;
    while (touched[at].page && touched[at].page != page) at = (at + 1) % MOST_PAGES;
    if (!touched[at].page) touched[at].node = here;
    touched[at].page = page;
    return touched[at].node;
}

static void count(traffic *t, const void *rows, int64_t stride, int64_t n, int64_t bytes) {
    const int half = num_nodes / 2;
    if (has_threads) return;
    for (int64_t i = 0; i < n; i++) {
        const int node = node_of(((uintptr_t)rows + (uintptr_t)(i * stride)) / PAGE * PAGE);
        *(node == here ? &t->own : node / half == here / half ? &t->socket : &t->other) += (double)bytes;
        t->of_node[node] += (double)bytes;
    }
}

/* ---- its kernels ------------------------------------------------------------------------------------------------- */

static kvc_kernels kernels;
static const kvc_kernels *real;

static void convert(int from, int to, void *dst, int64_t dst_stride, const void *src, int64_t src_stride,
                    int64_t num_rows, int dim) {
    if (to == KVC_F16) count(&writes, dst, dst_stride, num_rows, 2 * dim);
    real->convert(from, to, dst, dst_stride, src, src_stride, num_rows, dim);
}

static void score(float *scores, const float *q, int q_stride, int num_q, const void *rows, int64_t row_stride, int n,
                  int dim, kvc_ahead next) {
    count(&reads, rows, row_stride, n, 2 * dim);
    real->score[KVC_F16].score(scores, q, q_stride, num_q, rows, row_stride, n, dim, next);
}

static void accumulate(float *acc, int acc_stride, const float *factor, const float *weights, int num_q,
                       const void *rows, int64_t row_stride, int n, int dim, kvc_ahead next) {
    count(&reads, rows, row_stride, n, 2 * dim);
    real->accumulate[KVC_F16](acc, acc_stride, factor, weights, num_q, rows, row_stride, n, dim, next);
}

static void divert_kernels(kvc_cache *cache) {
    real = cache->kernels;
    kernels = *real;
    kernels.convert = convert;
    kernels.score[KVC_F16].score = score;
    kernels.accumulate[KVC_F16] = accumulate;
    cache->kernels = &kernels;
}

/* ---- a prompt, and tokens decoded behind it ---------------------------------------------------------------------- */

enum { DIM = 128, MOST_HEADS = 8, GROUP = 4, PIECE = 256, PROMPT = 1024, DECODED = 1024 };

typedef struct shape {
    int num_heads, num_layers, block_size; /* KV heads */
} shape;

static float rows[PIECE * MOST_HEADS * DIM], queries[MOST_HEADS * GROUP * DIM];

static void put_rows(kvc_cache *cache, const shape *s, int32_t first, int32_t n, float *out) {
    const kvc_attend_args args = float_queries(s->num_heads * GROUP, DIM, DIM, queries, out);
    int64_t ids[PIECE] = {0};
    kvc_batch *batch = NULL;
    for (int i = 0; i < n * s->num_heads * DIM; i++) rows[i] = element_of(0, 0, first + i / (s->num_heads * DIM), i);
    CHECKF(kvc_begin(cache, n, NULL, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int32_t l = 0; l < s->num_layers; l++) {
        put_floats(batch, l, 0, n, s->num_heads, DIM, DIM, rows, rows);
        const kvc_plan_args plan = {
            .struct_size = sizeof plan, .layer = l, .num_heads = s->num_heads * GROUP, .num_threads = THREADS};
        if (out) CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    }
    CHECK(kvc_commit(batch) == KVC_OK);
}

/* Feeds all tokens; counts what the last one's attention reads in all layers, and what was written. */
static kvc_cache *play(const shape *s, int spread, int threads, float *out) {
    kvc_layer layers[8];
    for (int l = 0; l < s->num_layers; l++)
        layers[l] =
            (kvc_layer){.num_kv_heads = s->num_heads, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_F16, .v_type = KVC_F16};
    is_spread = spread;
    has_threads = threads;
    num_claims = num_ranges = 0;
    memset(touched, 0, sizeof touched);
    reads = writes = (traffic){0};
    kvc_cache *cache = cache_of(
        layers, s->num_layers,
        (kvc_config){.max_seq_len = PROMPT + DECODED + 1, .block_size = s->block_size, .num_threads = THREADS});
    divert_kernels(cache);
    for (int32_t first = 0; first < PROMPT; first += PIECE) put_rows(cache, s, first, PIECE, NULL);
    for (int32_t first = PROMPT; first < PROMPT + DECODED - 1; first++) put_rows(cache, s, first, 1, NULL);
    put_rows(cache, s, PROMPT + DECODED - 1, 1, out);
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    return cache;
}

static double all_of(const traffic *t) { return t->own + t->socket + t->other; }

/* Returns the share of the node whose memory is read most. */
static double busiest(const traffic *t) {
    double most = 0;
    for (int i = 0; i < num_nodes; i++)
        if (t->of_node[i] > most) most = t->of_node[i];
    return most / all_of(t);
}

static void print(const shape *s, const char *what) {
    printf("%d nodes, %d KV heads, blocks of %4d, %s: reads %.3f own node, %.3f own socket, %.3f other; busiest node "
           "%.3f; writes %.3f other socket\n",
           num_nodes, s->num_heads, s->block_size, what, reads.own / all_of(&reads), reads.socket / all_of(&reads),
           reads.other / all_of(&reads), busiest(&reads), writes.other / all_of(&writes));
}

/* Rows that lie where the system puts them are read from anywhere, most from the caller's node; spread, they are read
 * from the thread's own part of the nodes, and from all nodes alike. */
static void test_shape(int nodes, const shape *s, int num_parts) {
    static float before[MOST_HEADS * GROUP * DIM], after[MOST_HEADS * GROUP * DIM];
    num_nodes = nodes;
    kvc_cache_free(play(s, 0, 0, before));
    print(s, "as the system places rows");
    CHECK(num_ranges == 0 && busiest(&reads) > 0.5);
    const double bytes = all_of(&reads);
    CHECK(reads.own / bytes < 0.6);
    kvc_cache_free(play(s, 1, 0, after));
    print(s, "spread");
    CHECK(num_ranges > 0 && all_of(&reads) == bytes && !memcmp(before, after, sizeof after));
    CHECKF(busiest(&reads) < 1.1 / nodes, "%f", busiest(&reads));
    if (num_parts % 2 == 0) CHECKF(reads.other / bytes < 0.03, "%f", reads.other / bytes);
    CHECKF(reads.own / bytes > 0.9 * num_parts / nodes, "%f", reads.own / bytes);
    kvc_cache_free(play(s, 1, 1, after));
    CHECK(!memcmp(before, after, sizeof after));
}

/* A clone has the same rows where it is not spread, as for fewer threads, and its rows lie in another order. */
static void test_clone(void) {
    static float before[MOST_HEADS * GROUP * DIM], after[MOST_HEADS * GROUP * DIM];
    const shape s = {8, 8, 256};
    kvc_cache *clone = NULL;
    num_nodes = 2;
    kvc_cache *cache = play(&s, 1, 0, before);
    is_spread = 0;
    CHECKF(kvc_cache_clone(cache, &clone) == KVC_OK, "%s", kvc_last_error());
    CHECK(cache->pools[0].num_parts == 2 && clone->pools[0].num_parts == 1);
    put_rows(cache, &s, PROMPT + DECODED, 1, before);
    put_rows(clone, &s, PROMPT + DECODED, 1, after);
    CHECK(!memcmp(before, after, sizeof after));
    kvc_cache_free(clone);
    kvc_cache_free(cache);
}

/* Where parts end within huge pages, all nodes hold as much nevertheless; where they would not fill one, there is one.
 */
static void test_uneven(void) {
    static float out[MOST_HEADS * GROUP * DIM];
    const shape uneven = {8, 8, 192}, small = {8, 8, 64};
    num_nodes = 2;
    kvc_cache_free(play(&uneven, 1, 0, out));
    print(&uneven, "spread");
    CHECKF(busiest(&reads) < 0.55 && reads.own / all_of(&reads) > 0.8, "%f", busiest(&reads));
    kvc_cache *cache = play(&small, 1, 0, out);
    print(&small, "spread");
    CHECK(cache->pools[0].num_parts == 1 && num_ranges && busiest(&reads) < 0.51);
    kvc_cache_free(cache);
}

static void test_machines(void) {
    const shape paged = {8, 8, 256}, contiguous = {8, 1, PROMPT + DECODED + 1}, single = {1, 8, 512}, odd = {3, 8, 512};
    test_shape(2, &paged, 2);
    test_shape(2, &contiguous, 2);
    test_shape(2, &single, 1);
    test_shape(6, &paged, 2);
    test_shape(6, &odd, 3);
    test_shape(4, &paged, 4);
    test_uneven();
}

/* ---- reading nodes ----------------------------------------------------------------------------------------------- */

static char folder[] = P_tmpdir "/kvcache-nodes-XXXXXX";

static const char *path_of(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const char *text) {
    FILE *file = fopen(path_of(name), "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void write_node(const char *name, const char *cpus) {
    char list[64];
    snprintf(list, sizeof list, "%s/cpulist", name);
    CHECK(mkdir(path_of(name), 0700) == 0);
    write_file(list, cpus);
}

static void remove_node(const char *name) {
    char list[64];
    snprintf(list, sizeof list, "%s/cpulist", name);
    CHECK(unlink(path_of(list)) == 0 && rmdir(path_of(name)) == 0);
}

#if defined(__linux__)

/* What the system and OpenMP say where a process may use processors [first, last]; last -1: what they say here. */
static int first, last = -1, num_places;

int __wrap_kvc_openmp_mark_processors(uint8_t *marks, int num);
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set);

int __wrap_kvc_openmp_mark_processors(uint8_t *marks, int num) {
    if (last < 0) return kvc_openmp_mark_processors(marks, num);
    if (num_places) memset(marks + first, 1, (size_t)(last - first + 1));
    return num_places;
}

/* OpenMP has bound the calling thread to the first place. */
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    if (last < 0) return sched_getaffinity(pid, size, set);
    CPU_ZERO_S(size, set);
    for (int i = first; i <= (num_places ? first : last); i++) CPU_SET_S((size_t)i, size, set);
    return 0;
}

/* Counts the nodes of a process that may use processors [from, to]. */
static int32_t num_confined(int from, int to) {
    static uint8_t allowed[KVC_MOST_PROCESSORS];
    static kvc_nodes nodes;
    first = from;
    last = to;
    kvc_nodes_allowed(allowed);
    last = -1;
    kvc_nodes_read(folder, allowed, &nodes);
    return nodes.num;
}

static void test_confined(void) {
    for (num_places = 0; num_places < 3; num_places++) {
        CHECK(num_confined(0, 3) == 1 && num_confined(4, 7) == 1);
        CHECK(num_confined(16, 23) == 2 && num_confined(0, 12) == 4);
    }
}

#else
static void test_confined(void) {}
#endif

/* Nodes are those with processors that the process may use. */
static void test_reading(void) {
    static uint8_t allowed[KVC_MOST_PROCESSORS];
    static kvc_nodes nodes;
    CHECK(mkdtemp(folder) != NULL);
    kvc_nodes_read(folder, allowed, &nodes);
    CHECK(nodes.num == 0);
    write_file("has_cpu", "0-1,3,7\n");
    write_node("node0", "0-3,16-19\n");
    write_node("node1", "4-7,20-23\n");
    write_node("node3", "8\n");
    write_node("node7", "9,11-12\n");
    memset(allowed, 1, sizeof allowed);
    kvc_nodes_read(folder, allowed, &nodes);
    CHECK(nodes.num == 4 && nodes.ids[2] == 3 && nodes.ids[3] == 7);
    CHECK(nodes.of_cpu[2] == 0 && nodes.of_cpu[19] == 0 && nodes.of_cpu[20] == 1 && nodes.of_cpu[8] == 2);
    CHECK(nodes.of_cpu[9] == 3 && nodes.of_cpu[10] == 0 && nodes.of_cpu[12] == 3);
    memset(allowed, 0, 8);
    memset(allowed + 16, 0, 8);
    kvc_nodes_read(folder, allowed, &nodes);
    CHECK(nodes.num == 2 && nodes.ids[0] == 3 && nodes.ids[1] == 7 && nodes.of_cpu[8] == 0 && nodes.of_cpu[9] == 1);
    memset(allowed, 1, sizeof allowed);
    write_file("has_cpu", "1,0-1,3,3,7,0\n"); /* each node counts once */
    kvc_nodes_read(folder, allowed, &nodes);
    CHECK(nodes.num == 4 && nodes.ids[0] == 1 && nodes.ids[1] == 0 && nodes.of_cpu[2] == 1 && nodes.of_cpu[20] == 0);
    test_confined();
    write_file("has_cpu", "0-1,4\n"); /* a node whose list is missing */
    kvc_nodes_read(folder, allowed, &nodes);
    CHECK(nodes.num == 0);
    write_file("has_cpu", "none\n");
    kvc_nodes_read(folder, allowed, &nodes);
    CHECK(nodes.num == 0);
    const char *const made[] = {"node0", "node1", "node3", "node7"};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) remove_node(made[i]);
    CHECK(unlink(path_of("has_cpu")) == 0 && rmdir(folder) == 0);
}

/* Memory that is spread over the nodes of this machine can be used; where there is one, nothing is spread. */
static void test_this_machine(void) {
    void *p = kvc_pages_map(8 * PAGE);
    kvc_nodes_find();
    const int32_t num = kvc_num_nodes();
    CHECK(num >= 1 && num <= KVC_MOST_NODES && kvc_node_here() >= 0 && kvc_node_here() < num);
    kvc_nodes_spread(p, 8 * PAGE, 0, num);
    memset(p, 1, 8 * PAGE);
    kvc_pages_unmap(p, 8 * PAGE);
}

int main(void) {
    test_reading();
    test_this_machine();
    for (int i = 0; i < MOST_HEADS * GROUP * DIM; i++) queries[i] = element_of(2, 0, 0, i);
    test_machines();
    test_clone();
    return test_result();
}
