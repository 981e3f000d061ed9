/* nodes.h: the machine's memory nodes (NUMA): how many there are, where a thread runs, and where memory lies.
 *
 * Nodes are numbered from 0 in the order of the system's numbers, in which those of one socket stand side by side. */
#ifndef KVC_NODES_H
#define KVC_NODES_H

#include <stddef.h>
#include <stdint.h>

enum { KVC_MOST_NODES = 16, KVC_MOST_PROCESSORS = 1024 };

typedef struct kvc_nodes {
    int32_t num;                         /* 0: not known, or more than KVC_MOST_NODES */
    int32_t ids[KVC_MOST_NODES];         /* the system's numbers */
    uint8_t of_cpu[KVC_MOST_PROCESSORS]; /* the node of a processor */
} kvc_nodes;

/* Reads the nodes that have some of the allowed processors from a folder like Linux's /sys/devices/system/node.
 * allowed: [KVC_MOST_PROCESSORS] whether the process may run on a processor. */
void kvc_nodes_read(const char *folder, const uint8_t *allowed, kvc_nodes *nodes);

/* Sets allowed[i] to whether the process may run on processor i, also where OpenMP has bound the calling thread to few
 * of them.  Linux alone. */
void kvc_nodes_allowed(uint8_t *allowed);

/* Finds out about this machine, the first time.  Call it from one thread at a time. */
void kvc_nodes_find(void);

/* Returns how many nodes the process runs on, and may place memory on.  1, too, where it has a policy of its own for
 * its memory or may have none, as in many containers. */
int32_t kvc_num_nodes(void);

/* Returns the node that the calling thread runs on. */
int32_t kvc_node_here(void);

/* Spreads the pages of [p, p + size), which nothing has touched, over nodes [first, first + num).  Does nothing if the
 * system refuses. */
void kvc_nodes_spread(void *p, size_t size, int32_t first, int32_t num);

#endif
