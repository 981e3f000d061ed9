/* merge.h: merges the results of a unit's parts. */
#ifndef KVC_MERGE_H
#define KVC_MERGE_H

#include "attend/task.h"

/* The members' parts are done. */
void kvc_end_parts(const kvc_task *t);

#endif
