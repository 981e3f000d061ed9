/* nodes.c: see nodes.h.  Linux alone says where threads run and takes wishes for memory; elsewhere there is one node.
 */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares sched_getcpu */
#endif
#include "base/nodes.h"

#include <stdio.h>
#include <string.h>

#include "base/openmp.h"

/* ---- reading lists of numbers ------------------------------------------------------------------------------------ */

/* Calls visit(context, i) for each number below KVC_MOST_PROCESSORS of a list such as "0-3,8", the first line of a
 * file. Returns 0 if the file cannot be read or holds anything else. */
static int visit_list(const char *path, void (*visit)(void *context, int32_t i), void *context) {
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int end = ',';
    while (end == ',') {
        int first, last;
        if (fscanf(file, "%d", &first) != 1) break;
        last = first;
        end = fgetc(file);
        if (end == '-') end = fscanf(file, "%d", &last) == 1 ? fgetc(file) : '-';
        for (int i = first; i >= 0 && i <= last && i < KVC_MOST_PROCESSORS; i++) visit(context, i);
    }
    fclose(file);
    return end == '\n' || end == EOF;
}

/* What is found while nodes are read. */
typedef struct reading {
    const char *folder;
    const uint8_t *allowed;
    kvc_nodes *nodes;
    int32_t num_cpus; /* of the node that is being read */
    int32_t failed;
} reading;

static void add_cpu(void *context, int32_t cpu) {
    reading *r = context;
    if (!r->allowed[cpu]) return;
    r->nodes->of_cpu[cpu] = (uint8_t)r->nodes->num;
    r->num_cpus++;
}

static void add_node(void *context, int32_t id) {
    reading *r = context;
    char path[256];
    for (int32_t i = 0; i < r->nodes->num; i++)
        if (r->nodes->ids[i] == id) return;
    if (r->nodes->num == KVC_MOST_NODES) {
        r->failed = 1;
        return;
    }
    r->num_cpus = 0;
    snprintf(path, sizeof path, "%s/node%d/cpulist", r->folder, id);
    r->failed |= !visit_list(path, add_cpu, r);
    if (r->num_cpus) r->nodes->ids[r->nodes->num++] = id;
}

void kvc_nodes_read(const char *folder, const uint8_t *allowed, kvc_nodes *nodes) {
    reading r = {.folder = folder, .allowed = allowed, .nodes = nodes};
    char path[256];
    memset(nodes, 0, sizeof *nodes);
    snprintf(path, sizeof path, "%s/has_cpu", folder);
    if (!visit_list(path, add_node, &r) || r.failed) nodes->num = 0;
}

/* ---- this machine ------------------------------------------------------------------------------------------------ */

static kvc_nodes known;

int32_t kvc_num_nodes(void) { return known.num ? known.num : 1; }

#if defined(__linux__)

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the system places memory where it is first touched, and would take wishes. */
static int has_default_policy(void) {
#if defined(SYS_get_mempolicy) && defined(SYS_mbind)
    int policy;
    return syscall(SYS_get_mempolicy, &policy, NULL, 0UL, NULL, 0UL) == 0 && policy == 0;
#else
    return 0;
#endif
}

void kvc_nodes_allowed(uint8_t *allowed) {
    cpu_set_t set;
    memset(allowed, 0, KVC_MOST_PROCESSORS);
    if (kvc_openmp_mark_processors(allowed, KVC_MOST_PROCESSORS)) return;
    const int is_known = sched_getaffinity(0, sizeof set, &set) == 0;
    for (size_t cpu = 0; cpu < KVC_MOST_PROCESSORS; cpu++)
        allowed[cpu] = !is_known || (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &set));
}

void kvc_nodes_find(void) {
    static int is_done;
    static uint8_t allowed[KVC_MOST_PROCESSORS];
    if (is_done) return;
    is_done = 1;
    kvc_nodes_allowed(allowed);
    kvc_nodes_read("/sys/devices/system/node", allowed, &known);
    if (known.num > 1 && !has_default_policy()) known.num = 0;
}

int32_t kvc_node_here(void) {
    const int cpu = sched_getcpu();
    return known.num > 1 && cpu >= 0 && cpu < KVC_MOST_PROCESSORS ? known.of_cpu[cpu] : 0;
}

void kvc_nodes_spread(void *p, size_t size, int32_t first, int32_t num) {
#if defined(SYS_mbind)
    enum { INTERLEAVE = 3, BITS = 8 * sizeof(unsigned long) }; /* MPOL_INTERLEAVE: over one node, that node alone */
    unsigned long mask[KVC_MOST_PROCESSORS / BITS] = {0};
    for (int32_t i = first; i < first + num; i++) mask[known.ids[i] / BITS] |= 1UL << known.ids[i] % BITS;
    syscall(SYS_mbind, p, size, INTERLEAVE, mask, (unsigned long)KVC_MOST_PROCESSORS, 0U);
#else
    (void)p, (void)size, (void)first, (void)num;
#endif
}

#else

void kvc_nodes_find(void) {}
int32_t kvc_node_here(void) { return 0; }
void kvc_nodes_spread(void *p, size_t size, int32_t first, int32_t num) { (void)p, (void)size, (void)first, (void)num; }

#endif
