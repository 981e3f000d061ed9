/* merge.h: merges the results of a unit's parts, and writes them out. */
#ifndef KVC_MERGE_H
#define KVC_MERGE_H

#include "attend/task.h"

/* Ends a task whose rows were attended to: keeps the results of its members' parts, and writes the output of units
 * whose last part it was. */
void kvc_end_parts(const kvc_task *t);

#endif
