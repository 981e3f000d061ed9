/* merge.h: merges the results of a slice's splits, and writes them out. */
#ifndef KVC_MERGE_H
#define KVC_MERGE_H

#include "attend/task.h"

/* Ends a task whose rows were attended to: keeps the results of its slices' splits, and writes the output of slices
 * whose last split it was. */
void kvc_end_splits(const kvc_task *t);

#endif
